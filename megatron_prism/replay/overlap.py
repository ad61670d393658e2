"""Replay in which computing and calls slow each other down where they overlap.

In : a WorldGraph, Prices and measured factors (``costs.overlap``).  Out: Timeline.  A replay says
for how long each segment had calls of its rank beside it; during that time it gets 1 / factor as
far.  So it takes overlap x (1 - 1 / factor) longer, which changes the timeline: replay and
correction alternate until the iteration settles.  A call is as slow as on its slowest member.
Products and other kernels of a segment lose differently; the slice says how much of it is products.
Segments that were recorded among paced ranks had the job's calls beside them: they lose no more.

Messages take the factors that were measured of an exchange, else those of an all-to-all, which NCCL
runs with the same kernel (SendRecv).  Only calls that move data count, not those that wait for a
rank; several at once count each, and of several segments beside a call each counts in part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from megatron_prism.core.ops import CODE
from megatron_prism.core.program import Program
from megatron_prism.core.slices import PACED, PEERS
from megatron_prism.graph.world_graph import WorldGraph
from megatron_prism.replay import timeline
from megatron_prism.replay.costs import Prices
from megatron_prism.replay.costs.overlap_factors import KINDS, OverlapFactors
from megatron_prism.replay.timeline import Timeline

__all__ = ["corrected_once", "replay_with_overlap"]

PASSES, SETTLED = 50, 1e-4  # of the iteration and of all calls; a few passes, as a rule
_UNKNOWN = 0.5  # of a segment: products


def replay_with_overlap(
    graph: WorldGraph,
    prices: Prices,
    factors: Mapping[str, OverlapFactors],
    source: str,
    iterations: int = 2,
    buffered: int = 0,
) -> Timeline:
    """The timeline with every overlap's cost; ``source`` says who measured the factors."""
    if not factors:
        return timeline.build_timeline(graph, prices, iterations, buffered)
    costs = [_lost(graph, index, factors) for index in range(len(graph.classes))]
    if graph.programs.source.get(PEERS) == PACED:
        for lost in costs:
            lost[:, 0] = 0
    found = timeline.build_timeline(graph, prices, iterations, buffered)
    for _ in range(PASSES):
        now = _corrected(found, prices, costs, source)
        times = timeline.evaluate(found.dag, timeline.durations_of(found.dag, now))
        before, found = found, Timeline(graph, now, found.dag, *times, iterations)
        moved = np.abs(now.collective_ns - before.prices.collective_ns).sum()
        same = abs(found.iteration_ns - before.iteration_ns) <= SETTLED * found.iteration_ns
        if same and moved <= SETTLED * now.collective_ns.sum():
            break
    return found


def corrected_once(found: Timeline, factors: Mapping[str, OverlapFactors], source: str) -> Prices:
    """Prices with what the overlaps of ``found`` would cost, as they are now."""
    costs = [_lost(found.graph, index, factors) for index in range(len(found.graph.classes))]
    return _corrected(found, found.prices, costs, source)


def _lost(graph: WorldGraph, index: int, factors: Mapping[str, OverlapFactors]) -> np.ndarray:
    """float64 [kind of computing, computing or call, op of a class]: 1 - 1 / factor; 0 for what is
    no call, or was not measured."""
    program = graph.program_list[index]
    sizes = np.maximum(program.bytes_in, program.bytes_out)
    found = np.zeros((len(KINDS), 2, len(program)))
    messages = factors.get("exchange", factors.get("all_to_all"))
    if messages is not None:
        factors = {"send": messages, "recv": messages, **factors}
    for name, one in factors.items():
        if name not in CODE:
            continue
        mine = np.flatnonzero(program.ops["name"] == CODE[name])
        each, which = np.unique(sizes[mine], return_inverse=True)
        for kind, rows in zip(KINDS, found, strict=True):
            known = np.array([one.factors(size, kind) for size in each.tolist()]).reshape(-1, 2)
            rows[:, mine] = 1 - 1 / known[which].T
    return found


def _parts(program: Program, segments: np.ndarray) -> np.ndarray:
    """float64 [kind of computing, segments]: which part of each is of that kind."""
    ns, products = (program.ops[name][segments].astype(float) for name in ("ns", "products"))
    known = (products >= 0) & (ns > 0)
    part = np.where(known, np.clip(products / np.maximum(ns, 1), 0, 1), _UNKNOWN)
    return np.stack([part, 1 - part])


def _corrected(found: Timeline, prices: Prices, costs: list[np.ndarray], source: str) -> Prices:
    """``prices``, and what the overlaps of ``found`` cost."""
    sources = list(prices.sources)
    meetings = prices.collective_ns.copy()
    compute, compute_source = [], []
    for index, (program, lost) in enumerate(zip(found.graph.program_list, costs, strict=True)):
        spans = found.spans(index)
        is_compute = program.ops["name"][spans["op"]] == CODE["compute"]
        segments, calls = spans[is_compute], spans[~is_compute]
        calls = calls[lost.sum(axis=(0, 1))[calls["op"]] > 0]
        more, slower = np.zeros(len(segments)), np.zeros(len(calls))
        ones = np.ones(len(segments))
        for part, (of_compute, of_call) in zip(
            _parts(program, segments["op"]), lost[:, :, calls["op"]], strict=True
        ):
            more += part * _covered(calls, segments, of_compute)
            slower += of_call * _covered(segments, calls, part, shared=True)
        late = np.zeros(len(program), dtype=np.int64)
        late[segments["op"]] = np.rint(more)
        compute.append(prices.compute[index] + late)
        compute_source.append(_said(prices.compute_source[index], late > 0, source, sources))
        met = found.graph.matched_calls.of[index][calls["op"]]
        took = calls["end"] - calls["start"]
        within = _covered(segments, calls, ones, shared=True) >= took - 1
        alone = prices.collective_ns[met]
        # within segments it is as much slower throughout: no need to come nearer pass by pass
        whole = alone / (1 - np.where(within, slower / np.maximum(1, took), 0))
        longer = np.where(within, whole, alone + slower)
        np.maximum.at(meetings, met, np.rint(longer).astype(np.int64))
    return dataclasses.replace(
        prices,
        compute=tuple(compute),
        compute_source=tuple(compute_source),
        collective_ns=meetings,
        collective_source=_said(
            prices.collective_source, meetings > prices.collective_ns, source, sources
        ),
        sources=tuple(sources),
    )


def _covered(
    under: np.ndarray, over: np.ndarray, weights: np.ndarray, shared: bool = False
) -> np.ndarray:
    """Per span of ``over``: ns that spans of ``under`` cover of it, each times its weight;
    ``shared``: of several at once their mean."""
    if not len(under) or not len(over):
        return np.zeros(len(over))
    times = np.concatenate([under["start"], under["end"]])
    slopes = np.concatenate([weights, -weights])
    order = np.argsort(times, kind="stable")
    times, slope = times[order], np.cumsum(slopes[order])
    if shared:
        slope = slope / np.maximum(1, np.cumsum(np.where(order < len(under), 1, -1)))
    so_far = np.concatenate(([0.0], np.cumsum(slope[:-1] * np.diff(times))))
    begin, end = (np.interp(over[key], times, so_far) for key in ("start", "end"))
    return np.asarray(end - begin)


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
