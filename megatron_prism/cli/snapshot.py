"""``prism fit`` of a real process: its memory snapshot, or the text of its error.

In : what ``memory.snapshot`` and ``memory.oom`` answer.  Out: text or JSON.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_prism.cli.output import exact, print_table, write_data, write_outputs
from megatron_prism.core import units
from megatron_prism.core.errors import UsageError

if TYPE_CHECKING:
    from megatron_prism.core.program import Program, Programs
    from megatron_prism.memory.peaks import HeldMemory, Peak
    from megatron_prism.memory.snapshot import Snapshot


_NAME = re.compile(r"\.(?:pickle|pkl)(?:\.gz|\.xz)?$", re.IGNORECASE)
_SHOWN = 8  # segments
_RANK = re.compile(r"rank[-_]?0*(\d+)")


def is_snapshot(path: str) -> bool:
    """Whether its name is one of a snapshot's."""
    return _NAME.search(path) is not None


def program_of(programs: Programs, path: str) -> Program:
    """The program of the rank that the snapshot's name says, the first otherwise."""
    named = _RANK.search(Path(path).name)
    rank = int(named[1]) if named else programs.programs[0].rank
    if rank >= programs.world.size:
        raise UsageError(f"{path}: the slices have {programs.world.size} ranks",
                         fix="give the slices of its job")  # fmt: skip
    return programs.of(rank)


def explain(args: argparse.Namespace, path: str, top: int) -> int:
    """Print where the memory of a process went, from its snapshot."""
    from megatron_prism.memory import peaks, snapshot
    from megatron_prism.report.memory import render_snapshot

    taken = snapshot.read(path)
    peak = peaks.known_peak(taken.program)
    write_outputs(args.force, (args.html, lambda: render_snapshot(Path(path).name, taken)))
    rows = [asdict(one) for one in peak.holdings[:top]]
    value = {"schema": "prism.memory_snapshot/1", **_figures(taken, peak), "top": rows}
    status = int(taken.failed is not None)
    if write_data(args, value, rows):
        return status
    since = "its first request" if taken.whole else "later: blocks from before have no line"
    print(f"{Path(path).name}: iterations 1 to {taken.iterations[-1]}, history since {since}")
    if taken.failed is not None:
        _print_failed(taken)
    when = f"iteration {taken.iterations[peak.index]}, {peak.op.label}"
    print(f"peak {exact(peak.num_bytes)} in {when}, {peak.site}")
    print("  " + ", ".join(f"{k} {units.format_bytes(v)}" for k, v in peak.by_kind.items() if v))
    most = taken.peak_reserved
    if most is not None:
        same = "the allocator's rules say the same" if most == taken.modelled else (
            f"the allocator's rules say {exact(taken.modelled)} of these requests")  # fmt: skip
        print(f"reserved {exact(most)} at most: {same}")
        for whose, sizes in zip(("the process", "the rules"), taken.segments, strict=True):
            if sizes:
                listed = ", ".join(map(units.format_bytes, sizes[:_SHOWN]))
                count = units.counted(len(sizes), "segment")
                print(f"  {count} at the end of {whose} alone: {listed}")
    print(f"  at the end {exact(taken.reserved)}, {_free(taken)}")
    _print_holdings(peak.holdings[:top])
    print(f"next: prism compare {path} SLICES  (prism capture -o SLICES -- the job's line)")
    return status


def _figures(taken: Snapshot, peak: Peak) -> dict[str, object]:
    failed = None if taken.failed is None else {
        **asdict(taken.failed), "fits_expandable": taken.fits_expandable()}  # fmt: skip
    return {"peak_allocated": peak.num_bytes, "by_category": peak.by_kind,
            "iteration": taken.iterations[peak.index], "step": peak.op.label, "site": peak.site,
            "peak_reserved": taken.peak_reserved, "modelled_reserved": taken.modelled,
            "reserved": taken.reserved, "free": taken.free[0], "largest_free": taken.free[1],
            "whole": taken.whole, "failed": failed}  # fmt: skip


def _free(taken: Snapshot) -> str:
    free, largest = map(units.format_bytes, taken.free)
    return f"{free} of it in free blocks, the largest {largest}"


def _print_failed(taken: Snapshot) -> None:
    failed = taken.failed
    assert failed is not None
    print(f"out of memory in iteration {failed.iteration}, {failed.label} {failed.site}: "
          f"{failed.size:,} B do not fit")  # fmt: skip
    print(f"  {units.format_bytes(taken.reserved)} reserved, {_free(taken)}; the device has "
          f"{units.format_bytes(failed.device_free)} left")  # fmt: skip
    if taken.fits_expandable():
        print("  fragmentation: the same requests fit with "
              "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")  # fmt: skip
    else:
        print("  size: the same requests do not fit with expandable segments either")
    if failed.iteration == 1:
        print("  the optimizer's states do not exist yet: later iterations need more")


def _print_holdings(holdings: tuple[HeldMemory, ...]) -> None:
    rows = [(f"{h.num_bytes:,}", str(h.count), h.kind, h.site, h.module) for h in holdings]
    print_table(("  bytes", "tensors", "kind", "site", "module"), rows)


def explain_error(args: argparse.Namespace, program: Program, text: str, top: int) -> int:
    """Print which request of the slices an out-of-memory error was about."""
    from megatron_prism.memory import oom

    said = oom.parse(text)
    found = oom.candidates(program, said)
    if not found:
        raise UsageError(
            f"no request of the slices is {units.format_bytes(said.asked)}",
            fix="capture the job with the flags of the run that failed",
        )
    fits = oom.fits_expandable(program, said)
    rows = [{"num_bytes": one.num_bytes, "step": one.op.label, "op": one.op.name,
             "site": one.site, "allocated": one.allocated,
             "first_iteration": one.first} for one in found]  # fmt: skip
    value = {"schema": "prism.memory_oom/1", "candidates": rows, "fits_expandable": fits}
    if write_data(args, value, rows):
        return 0
    best = found[0]
    when = "the first iteration: Adam's states do not exist yet" if best.first else "any iteration"
    print(f"{best.num_bytes:,} B in {best.op.label} {best.op.name} {best.site}")
    real = f", the error says {units.format_bytes(said.allocated)}" if said.allocated else ""
    print(f"  {when}; {exact(best.allocated)} allocated in the slices then{real}")
    if said.unused is not None:
        enough = said.unused + (said.device_free or 0) >= said.asked
        kind = "fragmentation" if enough and said.unused >= said.asked // 4 else "size"
        print(f"  {kind}: {units.format_bytes(said.unused)} are reserved and not in use")
    if fits is not None:
        word = "fits" if fits else "does not fit"
        print(f"  a later iteration {word} with expandable_segments:True")
    others = {(one.op.label, one.site) for one in found[1:]} - {(best.op.label, best.site)}
    if others:
        listed = ", ".join(f"{label} {site}" for label, site in sorted(others)[:4])
        print(f"  requests of the same size: {listed}")
    _print_holdings(best.holdings[:top])
    return 0
