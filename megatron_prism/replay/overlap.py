"""Computing and calls that slow each other down.

A replay says for how long each segment had calls of its rank beside it; during that time it gets
1 / factor as far.  So it takes overlap x (1 - 1 / factor) longer, which changes the timeline:
replay and correction alternate until the iteration settles.  A call is as slow as on its slowest
member.  Products and other kernels of a segment lose differently; the slice says how much of it is
products.  Segments that were recorded among paced ranks had the job's calls beside them: they lose
no more.

Segments of several streams share their GPU: while another one computes, each gets half as far.
Copies between device and host do not: the GPU has engines of their own for them.

Messages take the factors that were measured of an exchange, else those of an all-to-all, which NCCL
runs with the same kernel (SendRecv).  What runs beside calls of context-parallel ranks is
attention.  Only calls that move data count, not those that wait for a rank; several at once count
each, and of several segments beside a call each counts in part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_prism.core.programs.ops import CODE
from megatron_prism.core.programs.program import Program
from megatron_prism.graph.world_graph import WorldGraph
from megatron_prism.replay.costs import Prices, relabelled
from megatron_prism.replay.costs.collectives import ATTENTION, OverlapFactors
from megatron_prism.replay.costs.host_work import copies_beside
from megatron_prism.replay.timeline import Timeline, build_timeline, durations_of, evaluate

PASSES, SETTLED = 50, 1e-4  # of the iteration and of all calls; a few passes, as a rule
_UNKNOWN_SHARE = 0.5  # of a segment: products
_CALLS = "calls and computing overlap"
_SEGMENT_KINDS = ("gemm", "memory")  # what slices tell apart
# their exchanges run beside attention; of a2a+p2p the second
_RINGS = "CONTEXT_PARALLEL_GROUP", "HIERARCHICAL_CONTEXT_PARALLEL_GROUP"
_PART_OF_TWO = 0.5  # of its speed a segment loses to another stream of its GPU


@dataclass(frozen=True)
class _Overlaps:
    """What overlaps do to the segments and calls of one class.

    Attributes:
        segments: SPAN [n], its segments.
        calls: SPAN [m], its calls that lose or cost time where they overlap with segments.
        segment_delays: float64 [n], ns that each segment takes longer.
        call_delays: float64 [m], ns that each call takes longer.
    """

    segments: np.ndarray
    calls: np.ndarray
    segment_delays: np.ndarray
    call_delays: np.ndarray


def replay_with_overlap(
    graph: WorldGraph,
    prices: Prices,
    factors: Mapping[str, OverlapFactors],
    source: str,
    iterations: int = 2,
    buffered: int = 0,
) -> Timeline:
    """Make the timeline with every overlap's cost.

    Args:
        graph: The joined programs.
        prices: Durations of ops and calls by themselves.
        factors: Of every collective how many times as long it and computing take side by side.
        source: Who measured the factors.
        iterations: How many in a row.
        buffered: Bytes to a peer that do not wait for it.
    """
    sharing_classes = _classes_on_streams(graph)
    if not factors and not sharing_classes:
        return build_timeline(graph, prices, iterations, buffered)
    losses = [_losses(program, factors) for program in graph.program_list]
    timeline = build_timeline(graph, prices, iterations, buffered)
    for _ in range(PASSES):
        corrected = _corrected(timeline, prices, losses, source, sharing_classes)
        durations = durations_of(timeline.dag, corrected)
        start, end = evaluate(timeline.dag, durations)
        before = timeline
        timeline = Timeline(graph, corrected, before.dag, start, end, iterations)

        # settled: neither the iteration nor the calls in all change
        iteration_change = abs(timeline.iteration_ns - before.iteration_ns)
        if iteration_change > SETTLED * timeline.iteration_ns:
            continue
        call_ns, call_ns_before = corrected.collective_ns, before.prices.collective_ns
        call_changes = np.abs(call_ns - call_ns_before)
        if call_changes.sum() <= SETTLED * call_ns.sum():
            break
    return timeline


def corrected_once(
    timeline: Timeline, factors: Mapping[str, OverlapFactors], source: str
) -> Prices:
    """Give the prices with what the overlaps of a timeline would cost, as they are now."""
    losses = [_losses(program, factors) for program in timeline.graph.program_list]
    return _corrected(timeline, timeline.prices, losses, source, frozenset())


def _classes_on_streams(graph: WorldGraph) -> frozenset[int]:
    """Find the classes that compute on several streams, of segments that were timed one by one."""
    # what ran beside a segment of a trace is in its time
    if graph.programs.source.get("from") == "traces":
        return frozenset()
    classes: set[int] = set()
    for index, program in enumerate(graph.program_list):
        ops = program.ops
        is_segment = ops["name"] == CODE["compute"]
        streams = np.unique(ops["stream"][is_segment])
        if len(streams) > 1:
            classes.add(index)
    return frozenset(classes)


def _losses(program: Program, factors: Mapping[str, OverlapFactors]) -> np.ndarray:
    """Give what each call costs and loses while it runs beside computing.

    Args:
        program: The program of a class.
        factors: Of every collective how many times as long it and computing take side by side.

    Returns:
        float64 [kind of computing, computing or call, op]: 1 - 1 / factor; 0 for what is no call,
        or was not measured.
    """
    ops, sizes = program.ops, program.num_bytes
    losses = np.zeros((len(_SEGMENT_KINDS), 2, len(program)))

    # messages: as an exchange, else as an all-to-all
    factors_of_messages = factors.get("exchange", factors.get("all_to_all"))
    if factors_of_messages is not None:
        factors = {"send": factors_of_messages, "recv": factors_of_messages, **factors}

    # an op without a group has the description ""
    is_ring_name = [text.startswith(_RINGS) for text in program.strings]
    is_ring = np.array(is_ring_name)[ops["group"]]
    for name, collective_factors in factors.items():
        # "exchange" is no op: its factors are those of messages
        if name not in CODE:
            continue
        is_call = ops["name"] == CODE[name]
        is_other_call = is_call & ~is_ring
        is_ring_call = is_call & is_ring
        other_sizes, ring_sizes = sizes[is_other_call], sizes[is_ring_call]
        ring_losses = _losses_by_size(collective_factors, ring_sizes, ATTENTION)
        for number, kind in enumerate(_SEGMENT_KINDS):
            other_losses = _losses_by_size(collective_factors, other_sizes, kind)
            losses[number][:, is_other_call] = other_losses
            losses[number][:, is_ring_call] = ring_losses
    return losses


def _losses_by_size(factors: OverlapFactors, sizes: np.ndarray, kind: str) -> np.ndarray:
    """Give 1 - 1 / factor of computing and of calls: float64 [2, calls].

    Args:
        factors: Of one collective.
        sizes: Bytes of each call.
        kind: The computing beside the calls.
    """
    unique_sizes, size_of_call = np.unique(sizes, return_inverse=True)
    pairs = [factors.factors(size, kind) for size in unique_sizes.tolist()]
    factors_of_sizes = np.array(pairs).reshape(-1, 2)
    losses_of_sizes = 1 - 1 / factors_of_sizes
    losses = losses_of_sizes[size_of_call]
    return np.asarray(losses.T)


def _shares_of_kinds(program: Program, segments: np.ndarray) -> np.ndarray:
    """float64 [kind of computing, segments]: which part of each is of that kind."""
    rows = program.ops[segments]
    ns = rows["ns"].astype(float)
    products_ns = rows["products"].astype(float)
    is_known = (products_ns >= 0) & (ns > 0)
    ratio = products_ns / np.maximum(ns, 1)
    measured_share = np.clip(ratio, 0, 1)
    products = np.where(is_known, measured_share, _UNKNOWN_SHARE)
    return np.stack([products, 1 - products])


def _corrected(
    timeline: Timeline,
    prices: Prices,
    losses: Sequence[np.ndarray],
    source: str,
    sharing_classes: frozenset[int],
) -> Prices:
    """Add to prices what the overlaps of a timeline cost.

    Args:
        timeline: Says what runs beside what.
        prices: Durations of ops and calls by themselves.
        losses: Of every class what ``_losses`` gives.
        source: Who measured the factors.
        sharing_classes: Those whose segments may share a GPU.
    """
    sources = list(prices.sources)
    overlapped = _slower(_CALLS, f"overlap: {source}; ")
    collective_ns = prices.collective_ns.copy()
    compute: list[np.ndarray] = []
    compute_source: list[np.ndarray] = []
    for index, program in enumerate(timeline.graph.program_list):
        overlaps = _overlaps(timeline, index, losses[index])
        segment_ops = overlaps.segments["op"]

        # segments beside calls
        delays = np.zeros(len(program), dtype=np.int64)
        delays[segment_ops] = np.rint(overlaps.segment_delays)
        class_source = prices.compute_source[index]
        class_source = relabelled(class_source, delays > 0, overlapped, sources)

        # segments beside those of other streams
        if index in sharing_classes:
            sharing_delays = np.zeros(len(program), dtype=np.int64)
            computing_segments = overlaps.segments[~_copies(program)[segment_ops]]
            segment_delays = _sharing_delays(computing_segments)
            sharing_delays[computing_segments["op"]] = np.rint(segment_delays)
            shared = _slower("streams share the GPU")
            class_source = relabelled(class_source, sharing_delays > 0, shared, sources)
            delays += sharing_delays
        segment_ns = prices.compute[index]
        compute.append(segment_ns + delays)
        compute_source.append(class_source)

        # a matched call is as slow as on its slowest member
        call_ops = overlaps.calls["op"]
        numbers = timeline.graph.matched_calls.of[index][call_ops]
        alone_ns = prices.collective_ns[numbers]
        call_ns = np.rint(_slowed_calls(overlaps, alone_ns))
        np.maximum.at(collective_ns, numbers, call_ns.astype(np.int64))
    is_slower = collective_ns > prices.collective_ns
    collective_source = relabelled(prices.collective_source, is_slower, overlapped, sources)
    return dataclasses.replace(
        prices,
        compute=tuple(compute),
        compute_source=tuple(compute_source),
        collective_ns=collective_ns,
        collective_source=collective_source,
        sources=tuple(sources),
    )


def _overlaps(timeline: Timeline, index: int, losses: np.ndarray) -> _Overlaps:
    """Find by how much segments and calls of a class delay each other.

    Args:
        timeline: Says what runs beside what.
        index: The class.
        losses: What its calls cost and lose (``_losses``).
    """
    program = timeline.graph.program_list[index]
    spans = timeline.spans(index)
    names = program.ops["name"][spans["op"]]
    is_segment = names == CODE["compute"]
    segments, calls = spans[is_segment], spans[~is_segment]
    losses_of_ops = losses.sum(axis=(0, 1))
    has_losses = losses_of_ops[calls["op"]] > 0
    calls = calls[has_losses]

    # products and other kernels, each as far as a segment consists of them
    segment_delays = np.zeros(len(segments))
    call_delays = np.zeros(len(calls))
    shares_of_kinds = _shares_of_kinds(program, segments["op"])
    losses_of_calls = losses[:, :, calls["op"]]
    for number, shares in enumerate(shares_of_kinds):
        of_computing, of_calls = losses_of_calls[number]
        weighted_calls_ns = _covered(calls, segments, of_computing)
        segment_delays += shares * weighted_calls_ns
        weighted_segments_ns = _covered(segments, calls, shares, is_mean=True)
        call_delays += of_calls * weighted_segments_ns
    return _Overlaps(segments, calls, segment_delays, call_delays)


def _slowed_calls(overlaps: _Overlaps, alone_ns: np.ndarray) -> np.ndarray:
    """Give how long calls of a class take beside its segments, ns.

    Args:
        overlaps: Of the class.
        alone_ns: How long each call takes by itself.
    """
    segments, calls = overlaps.segments, overlaps.calls
    call_ns = calls["end"] - calls["start"]
    every_segment = np.ones(len(segments))
    covered_ns = _covered(segments, calls, every_segment, is_mean=True)
    is_within = covered_ns >= call_ns - 1

    # within segments it is as much slower throughout: no need to come nearer pass by pass
    delays = overlaps.call_delays
    delay_per_ns = delays / np.maximum(1, call_ns)
    lost_parts = np.where(is_within, delay_per_ns, 0)
    within_ns = alone_ns / (1 - lost_parts)
    return np.asarray(np.where(is_within, within_ns, alone_ns + delays))


def _covered(
    under: np.ndarray, over: np.ndarray, weights: np.ndarray, is_mean: bool = False
) -> np.ndarray:
    """Give how long each span is covered by others, ns.

    Args:
        under: SPAN [n], those that cover.
        over: SPAN [m], those that are covered.
        weights: float64 [n], by which each ns counts.
        is_mean: Of several that cover at once their mean counts; else their sum.

    Returns:
        float64 [m].
    """
    if not len(under) or not len(over):
        return np.zeros(len(over))

    # the slope of what has been covered: it changes where a span begins or ends
    times = np.concatenate([under["start"], under["end"]])
    changes = np.concatenate([weights, -weights])
    order = np.argsort(times, kind="stable")
    times = times[order]
    slope = np.cumsum(changes[order])
    if is_mean:
        is_begin = order < len(under)
        opened = np.where(is_begin, 1, -1)
        open_spans = np.cumsum(opened)
        slope = slope / np.maximum(1, open_spans)

    # covered until each of these times, and between begin and end of each span
    lengths = np.diff(times)
    increments = slope[:-1] * lengths
    covered = np.concatenate(([0.0], np.cumsum(increments)))
    until_begin = np.interp(over["start"], times, covered)
    until_end = np.interp(over["end"], times, covered)
    return np.asarray(until_end - until_begin)


def _copies(program: Program) -> np.ndarray:
    """bool [ops]: segments that copy between device and host beside others."""
    notes, note_of_op = np.unique(program.ops["note"], return_inverse=True)
    is_copy = np.zeros(len(notes), dtype=bool)
    for place, note in enumerate(notes.tolist()):
        is_copy[place] = copies_beside(program.strings[note])
    return is_copy[note_of_op.ravel()]


def _sharing_delays(segments: np.ndarray) -> np.ndarray:
    """float64 [segments]: ns that each takes longer because other streams of its rank compute."""
    delays = np.zeros(len(segments))
    for lane in np.unique(segments["lane"]).tolist():
        is_lane = segments["lane"] == lane
        lane_segments = segments[is_lane]
        other_segments = segments[~is_lane]
        weights = np.full(len(other_segments), _PART_OF_TWO)
        delays[is_lane] = _covered(other_segments, lane_segments, weights)
    return delays


def _slower(place: str, measured_by: str = "") -> Callable[[str], str]:
    """Make what a provenance says of entries that are slower there.

    Args:
        place: Where they are slower.
        measured_by: Who measured by how much; "": nobody.
    """

    def text(source: str) -> str:
        """Change the text of a provenance."""
        basis, _, details = source.partition(" (")
        changed = f"{basis}, slower where {place}"
        if details:
            return f"{changed} ({measured_by}{details}"
        if measured_by:
            return f"{changed} ({measured_by})"
        return changed

    return text
