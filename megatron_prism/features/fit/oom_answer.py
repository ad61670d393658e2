"""``prism fit SLICES --oom TEXT``: which request an out-of-memory error was about."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from megatron_prism.cli.memory_output import print_holdings, say
from megatron_prism.cli.output import Answer, exact
from megatron_prism.core import units
from megatron_prism.core.errors import UsageError

if TYPE_CHECKING:
    from megatron_prism.core.programs.program import Programs
    from megatron_prism.features.fit.oom import Candidate, Said
    from megatron_prism.replay.priced_graph import PricedGraph


def explain_error(args: argparse.Namespace, job: Programs | PricedGraph) -> Answer:
    """Which request of the slices an out-of-memory error was about, and what frees memory."""
    from megatron_prism.features.fit import oom
    from megatron_prism.features.fit.fit import fit, programs_of
    from megatron_prism.features.fit.report import changes_of
    from megatron_prism.memory import peaks

    programs = programs_of(job)
    said = oom.parse(args.oom)
    found = oom.candidates(programs.programs, said)
    if not found:
        raise UsageError(
            f"no request of the slices is {units.format_bytes(said.asked)}",
            fix="capture the job with the flags of the run that failed",
        )
    limit, tried = oom.limit_of(said), None
    if limit is not None:
        tried = fit(
            job,
            limit=limit,
            machine=args.machine,
            calibration=args.calibration,
            alloc_conf=args.alloc or "",
            device=None,
        )
    rows = [
        {
            "rank": one.program.rank,
            "num_bytes": one.num_bytes,
            "step": one.op.label,
            "op": one.op.name,
            "site": one.site,
            "allocated": one.allocated,
            "first_iteration": one.first,
        }
        for one in found
    ]
    value = {
        "schema": "prism.memory_oom/1",
        "candidates": rows,
        "limit": limit,
        "changes": [asdict(one) for one in tried.changes] if tried else None,
    }

    def page() -> None:
        _print_request(said, found)
        print_holdings(peaks.holdings_at(found[0].program, found[0].event)[: args.top])
        if tried is not None:
            size = f"the {units.format_bytes(tried.limit)} of segments that the process could have"
            verdict = "does not fit" if tried.overruns else "may run out"
            if tried.fits:
                verdict = "fits"
            say(f"a later iteration {verdict} into {size}")
            print("\n".join(changes_of(tried)))

    return Answer(lambda: value, page, lambda: rows)


def _print_request(said: Said, found: Sequence[Candidate]) -> None:
    best = found[0]
    when = "the first iteration: Adam's states do not exist yet" if best.first else "any iteration"
    several = len({one.program.rank for one in found}) > 1
    whose = f"rank {best.program.rank}: " if several else ""
    say(f"{whose}{best.num_bytes:,} B in {best.op.label} {best.op.name} {best.site}")
    real = f", the error says {units.format_bytes(said.allocated)}" if said.allocated else ""
    say(f"  {when}; {exact(best.allocated)} allocated in the slices then{real}")
    if said.unused is not None:
        enough = said.unused + (said.device_free or 0) >= said.asked
        kind = "fragmentation" if enough and said.unused >= said.asked // 4 else "size"
        say(f"  {kind}: {units.format_bytes(said.unused)} are reserved and not in use")
    others = {(one.op.label, one.site) for one in found[1:]} - {(best.op.label, best.site)}
    if others:
        listed = ", ".join(f"{label} {site}" for label, site in sorted(others)[:4])
        say(f"  requests of the same size: {listed}")
