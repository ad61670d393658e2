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
    from megatron_prism.features.fit.fit import Fit
    from megatron_prism.features.fit.oom import Candidate, OomFigures
    from megatron_prism.replay.priced_graph import PricedGraph

_MOST_OTHERS = 4  # other requests of the same size that are listed


def explain_error(args: argparse.Namespace, job: Programs | PricedGraph) -> Answer:
    """Say which request of the slices an out-of-memory error was about, and what frees memory.

    Raises:
        UsageError: The text is no such error, or no request takes such a segment.
    """
    from megatron_prism.features.fit import oom
    from megatron_prism.features.fit.fit import fit, programs_of

    figures = oom.parse(args.oom)
    requests = oom.candidates(programs_of(job).programs, figures)
    if not requests:
        raise UsageError(
            f"no request of the slices is {units.format_bytes(figures.asked)}",
            fix="capture the job with the flags of the run that failed",
        )
    # a text that was cut does not say what the process could have
    limit = oom.limit_of(figures)
    fit_within_limit: Fit | None = None
    if limit is not None:
        fit_within_limit = fit(
            job,
            limit=limit,
            machine=args.machine,
            calibration=args.calibration,
            alloc_conf=args.alloc or "",
            device=None,
        )
    rows = [_row(request) for request in requests]
    changes: list[dict[str, object]] | None = None
    if fit_within_limit is not None:
        changes = [asdict(change) for change in fit_within_limit.changes]
    value = {
        "schema": "prism.memory_oom/1",
        "candidates": rows,
        "limit": limit,
        "changes": changes,
    }
    return Answer(
        lambda: value,
        lambda: _print_page(figures, requests, fit_within_limit, args.top),
        lambda: rows,
    )


def _row(request: Candidate) -> dict[str, object]:
    """Return a request as a row of JSON and CSV."""
    return {
        "rank": request.program.rank,
        "num_bytes": request.num_bytes,
        "step": request.op.label,
        "op": request.op.name,
        "site": request.site,
        "allocated": request.allocated,
        "first_iteration": request.first,
    }


def _print_page(
    figures: OomFigures, requests: Sequence[Candidate], fit_within_limit: Fit | None, top: int
) -> None:
    """Print the request, what was alive then, and what frees memory.

    Args:
        figures: What the error says.
        requests: At least one, the likeliest first.
        fit_within_limit: The job within what the process could have; None where that is not said.
        top: How many origins of memory are shown.
    """
    from megatron_prism.features.fit.report import changes_of
    from megatron_prism.memory import peaks

    _print_request(figures, requests)
    likeliest = requests[0]
    print_holdings(peaks.holdings_at(likeliest.program, likeliest.event)[:top])
    if fit_within_limit is None:
        return
    room = (
        f"the {units.format_bytes(fit_within_limit.limit)} of segments that the process could have"
    )
    verdict = "may run out"
    if fit_within_limit.fits:
        verdict = "fits"
    elif fit_within_limit.overruns:
        verdict = "does not fit"
    say(f"a later iteration {verdict} into {room}")
    print("\n".join(changes_of(fit_within_limit)))


def _print_request(figures: OomFigures, requests: Sequence[Candidate]) -> None:
    """Print the likeliest request, whether memory was in pieces, and other requests of its size."""
    likeliest = requests[0]
    op = likeliest.op
    rank_text = ""
    if len({request.program.rank for request in requests}) > 1:
        rank_text = f"rank {likeliest.program.rank}: "
    say(f"{rank_text}{likeliest.num_bytes:,} B in {op.label} {op.name} {likeliest.site}")

    iteration_text = "any iteration"
    if likeliest.first:
        iteration_text = "the first iteration: Adam's states do not exist yet"
    text = f"  {iteration_text}; {exact(likeliest.allocated)} allocated in the slices then"
    if figures.allocated:
        text += f", the error says {units.format_bytes(figures.allocated)}"
    say(text)

    if figures.unused is not None:
        unused = figures.unused
        is_enough = unused + (figures.device_free or 0) >= figures.asked
        # a little that is unused is usual and no reason
        has_many_pieces = unused >= figures.asked // 4
        reason = "size"
        if is_enough and has_many_pieces:
            reason = "fragmentation"
        say(f"  {reason}: {units.format_bytes(unused)} are reserved and not in use")

    other_places = {(request.op.label, request.site) for request in requests[1:]}
    other_places.discard((op.label, likeliest.site))
    if other_places:
        shown_places = sorted(other_places)[:_MOST_OTHERS]
        listed = ", ".join(f"{label} {site}" for label, site in shown_places)
        say(f"  requests of the same size: {listed}")
