"""What do computing and calls cost each other where the timeline has both at once?

In : a WorldGraph, Prices and measured factors (``costs.overlap``).  Out: Timeline.  A replay says
for how long each segment had calls of its rank beside it; during that time it gets 1 / factor as
far.  So it takes overlap x (1 - 1 / factor) longer, which changes the timeline: replay and
correction alternate until the iteration settles.  A call is as slow as on its slowest member.

Only calls that move data count, not those that wait for a rank; several at once count each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from megatron_prism.costs import Prices
from megatron_prism.costs.collective import Calibration
from megatron_prism.costs.overlap import Overlap
from megatron_prism.graph import WorldGraph
from megatron_prism.ops import CODE
from megatron_prism.replay import maxplus, timeline
from megatron_prism.replay.timeline import Timeline

__all__ = ["PASSES", "priced", "replay"]

PASSES, SETTLED = 12, 1e-4  # of the iteration time
Costs = tuple[np.ndarray, np.ndarray]  # per op: 1 - 1 / factor, of computing and of the call


def replay(
    graph: WorldGraph,
    prices: Prices,
    factors: Mapping[str, Overlap],
    source: str,
    iterations: int = 2,
) -> Timeline:
    """The timeline with every overlap's cost; ``source`` says who measured the factors."""
    if not factors:
        return timeline.replay(graph, prices, iterations)
    costs = [_costs(graph, index, factors) for index in range(len(graph.classes))]
    found = timeline.replay(graph, prices, iterations)
    for _ in range(PASSES):
        now = _corrected(found, prices, costs, source)
        times = maxplus.evaluate(found.dag, timeline.durations_of(found.dag, now))
        before, found = found, Timeline(graph, now, found.dag, *times, iterations)
        if abs(found.iteration_ns - before.iteration_ns) <= SETTLED * found.iteration_ns:
            break
    return found


def priced(graph: WorldGraph, prices: Prices, calibration: Calibration | None) -> Prices:
    """``prices`` with what computing and calls cost each other, if ``calibration`` measured it."""
    if calibration is None or not calibration.overlap:
        return prices
    return replay(graph, prices, calibration.overlap, calibration.source).prices


def _costs(graph: WorldGraph, index: int, factors: Mapping[str, Overlap]) -> Costs:
    """Of every op of a class; 0 for what is no call, or was not measured."""
    program = graph.program_list[index]
    sizes = np.maximum(program.bytes_in, program.bytes_out)
    both = np.zeros((2, len(program)))
    for name, one in factors.items():
        if name not in CODE:
            continue
        mine = np.flatnonzero(program.ops["name"] == CODE[name])
        known = {size: one.factors(size) for size in np.unique(sizes[mine]).tolist()}
        for place, size in zip(mine.tolist(), sizes[mine].tolist(), strict=True):
            both[:, place] = [1 - 1 / factor for factor in known[size]]
    return both[0], both[1]


def _corrected(found: Timeline, prices: Prices, costs: list[Costs], source: str) -> Prices:
    """``prices``, and what the overlaps of ``found`` cost."""
    sources = list(prices.sources)
    meetings = prices.meetings.copy()
    compute, compute_source = [], []
    for index, (program, (of_compute, of_call)) in enumerate(
        zip(found.graph.program_list, costs, strict=True)
    ):
        spans = found.spans(index)
        is_compute = program.ops["name"][spans["op"]] == CODE["compute"]
        segments, calls = spans[is_compute], spans[~is_compute]
        calls = calls[(of_compute + of_call)[calls["op"]] > 0]
        late = np.zeros(len(program), dtype=np.int64)
        late[segments["op"]] = _covered(calls, segments, of_compute[calls["op"]])
        compute.append(prices.compute[index] + late)
        compute_source.append(_said(prices.compute_source[index], late > 0, source, sources))
        own = _covered(segments, calls, np.ones(len(segments)))
        met = found.graph.rendezvous.of[index][calls["op"]]
        slower = prices.meetings[met] + np.rint(own * of_call[calls["op"]]).astype(np.int64)
        np.maximum.at(meetings, met, slower)
    return dataclasses.replace(
        prices,
        compute=tuple(compute),
        compute_source=tuple(compute_source),
        meetings=meetings,
        meeting_source=_said(prices.meeting_source, meetings > prices.meetings, source, sources),
        sources=tuple(sources),
    )


def _covered(under: np.ndarray, over: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """int64 per span of ``over``: ns that spans of ``under`` cover of it, each times its weight."""
    if not len(under) or not len(over):
        return np.zeros(len(over), dtype=np.int64)
    times = np.concatenate([under["start"], under["end"]])
    slopes = np.concatenate([weights, -weights])
    order = np.argsort(times, kind="stable")
    times, slope = times[order], np.cumsum(slopes[order])
    so_far = np.concatenate(([0.0], np.cumsum(slope[:-1] * np.diff(times))))
    begin, end = (np.interp(over[key], times, so_far) for key in ("start", "end"))
    return np.rint(end - begin).astype(np.int64)


def _said(source: np.ndarray, chosen: np.ndarray, who: str, sources: list[str]) -> np.ndarray:
    """Sources in which the chosen entries say that an overlap slowed them; extends ``sources``."""
    found = source.copy()
    for code in np.unique(source[chosen]).tolist():
        what, _, more = sources[code].partition(" (")
        text = f"{what}, slower where calls and computing overlap (overlap: {who}; {more or ')'}"
        if text not in sources:
            sources.append(text)
        found[chosen & (source == code)] = sources.index(text)
    return found
