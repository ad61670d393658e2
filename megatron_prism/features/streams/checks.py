"""``prism check --streams``: does each stream finish before its memory is reused or overwritten."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_prism.cli.command import ProgramCheck
from megatron_prism.cli.output import Answer
from megatron_prism.core.errors import ProgramError
from megatron_prism.core.units import counted, format_bytes

if TYPE_CHECKING:
    from megatron_prism.features.streams.order import StreamFault, StreamVerdict
    from megatron_prism.features.streams.trace import RowPlace


# of what nothing is proved
LIMITS = (
    "of one train step; autograd's own C++ orders streams itself, and its operators count on the "
    "stream that is current"
)


def check(args: argparse.Namespace) -> Answer:
    """Prove that streams finish before their memory is reused; exit status 1 if one does not."""
    from megatron_prism.features.streams import trace
    from megatron_prism.features.streams.order import check_trace

    folder = Path(args.programs)
    # slices may be captured without a record of streams
    paths: list[Path] = []
    if folder.is_dir():
        paths = list(trace.traces_of(folder))
    if not paths:
        raise ProgramError(
            f"{folder} has no record of what streams do with memory",
            fix="prism capture -o NEW --prism-streams -- SCRIPT, or of a recipe with "
            "prism.flags=--prism-streams",
        )
    verdicts = [check_trace(trace.load(path)) for path in paths]
    rows = []
    for verdict in verdicts:
        for fault, count in verdict:
            rows.append(_row(fault, count))

    def value() -> dict[str, object]:
        ranks = [_coverage(verdict) for verdict in verdicts]
        return {"faults": rows, "ranks": ranks}

    return Answer(value, lambda: _print(verdicts), lambda: rows, status=int(bool(rows)))


def _print(verdicts: list[StreamVerdict]) -> None:
    """Print the faults of all ranks, then what was looked at."""
    for verdict in verdicts:
        for fault, count in verdict:
            print(fault_text(fault, count))
    for verdict in verdicts:
        print(coverage_text(verdict))
    print(LIMITS)


def fault_text(fault: StreamFault, count: int) -> str:
    """Write a fault in lines: what is wrong, the tensor, both accesses, and the fix."""
    title = f"rank {fault.rank}: {fault.kind.value}"
    # the same two lines meet in every microbatch
    if count > 1:
        title += f", {counted(count, 'time')}"
    tensor = _place_text(fault.tensor)
    # -1: how large it is was not seen
    if fault.num_bytes >= 0:
        tensor += f" ({format_bytes(fault.num_bytes)})"
    lines = [title]
    lines.append(f"  tensor: {tensor}, memory of stream {fault.pool}")
    lines.append(f"  first:  stream {fault.first_stream}, {_place_text(fault.first)}")
    lines.append(f"  second: stream {fault.second_stream}, {_place_text(fault.second)}")
    lines.append(f"  fix: {fault.fix}")
    return "\n".join(lines) + "\n"


def _place_text(place: RowPlace) -> str:
    text = place.what
    if place.site:
        text += f" at {place.site}"
    # outside of microbatches and of the optimizer there is no step
    if place.step not in ("", "-"):
        text += f" in {place.step}"
    return text


def coverage_text(verdict: StreamVerdict) -> str:
    """Say what is proved of a rank, or how much is refuted, and what was looked at."""
    coverage = verdict.coverage
    word = "proved"
    if verdict.faults:
        word = counted(len(verdict.faults), "fault")
    memory = f"{coverage.accesses:,} accesses of {coverage.storages:,} storages"
    order = f"{coverage.events:,} events and {coverage.waits:,} waits"
    text = (
        f"rank {verdict.rank}: {word}; {memory}, {order} on {counted(coverage.streams, 'stream')}"
    )
    # what a CUDA graph launches is not followed
    if coverage.graph_launches:
        text += f"; not of {counted(coverage.graph_launches, 'launch')} of CUDA graphs"
    return text


def _row(fault: StreamFault, count: int) -> dict[str, object]:
    return {
        "rank": fault.rank,
        "kind": fault.kind.name.lower(),
        "tensor": fault.tensor.what,
        "made_at": fault.tensor.site,
        "bytes": None if fault.num_bytes < 0 else fault.num_bytes,
        "pool": fault.pool,
        "first": fault.first.what,
        "first_stream": fault.first_stream,
        "first_site": fault.first.site,
        "second": fault.second.what,
        "second_stream": fault.second_stream,
        "second_site": fault.second.site,
        "count": count,
        "fix": fault.fix,
    }


def _coverage(verdict: StreamVerdict) -> dict[str, object]:
    coverage = verdict.coverage
    return {
        "rank": verdict.rank,
        "proved": not verdict.faults,
        "accesses": coverage.accesses,
        "storages": coverage.storages,
        "events": coverage.events,
        "waits": coverage.waits,
        "streams": coverage.streams,
        "graph_launches": coverage.graph_launches,
    }


CHECKS = (ProgramCheck("streams", "does each stream finish before its memory is reused", check),)
