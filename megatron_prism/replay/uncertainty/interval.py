"""How far off an iteration may be: what is not measured for the machine that the job will run on.

In : a timeline.  Out: Interval, and by how much each source of uncertainty moves its ends.

Every source has a range and a reason (``RANGES``); none is fitted to a prediction's error.  The
range is applied to all durations of the source at once and the graph is evaluated again, so that
what a late host costs is what it costs beside these kernels, not a share of a path.  A host of
another index takes what ``host=`` says of it (``whatif.host_factors``).  Sources are
independent of each other: their deviations add up as squares.  How often real runs lie inside is
counted by ``benchmarks/accuracy/intervals.py``.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_prism.core.programs.ops import CODE
from megatron_prism.core.units import format_bytes, format_ns, format_share
from megatron_prism.graph.issue_graph import COMPUTE
from megatron_prism.replay.costs.collectives import OverlapFactors
from megatron_prism.replay.costs.host import host_spread, indices_of
from megatron_prism.replay.costs.prices import NO_TIME
from megatron_prism.replay.overlap import corrected_once
from megatron_prism.replay.timeline import Timeline, durations_of
from megatron_prism.replay.uncertainty.data_loader import MASK_RATE, NO_MASK, loaded_masks
from megatron_prism.replay.uncertainty.variations import Variations
from megatron_prism.replay.whatif import host_factors


@dataclass(frozen=True)
class Range:
    """Durations of a source lie between ``low`` and ``high`` times what is said of them.

    begins : of provenances (also inside those of what-ifs); the first range that fits counts
    """

    begins: str
    what: str
    low: float
    high: float
    why: str


RANGES = (
    # a step of torch's fused Adam on one thread and on eight, pinned copies: of one host of an H200
    Range(
        "modelled: copies to the host and its memory",
        "memory",
        0.5,
        2.0,
        "nobody measured the memory of the host, nor how many cores a rank has there",
    ),
    Range("by their rooflines", "moved", 0.8, 1.2, "scaled by rooflines: off like modelled ones"),
    Range(
        "modelled: op table and roofline",
        "kernels",
        0.8,
        1.3,
        "kernels that never ran: the worst of eight published jobs",
    ),
    Range(
        "modelled: op table",
        "kernels",
        0.9,
        1.3,
        "kernels that never ran: the worst of eight published jobs",
    ),
    Range(
        "modelled: roofline",
        "kernels",
        0.8,
        1.3,
        "kernels that never ran: the worst of eight published jobs",
    ),
    # from 1 GiB on within 6 %; below, latencies of one network are several times NCCL's estimate
    Range(
        "modelled: NCCL's alpha-beta between nodes",
        "calls",
        0.95,
        2.2,
        "NCCL's own estimate between nodes: published all-reduces of 32 MiB and more",
    ),
    # with the time around HybridEP's kernels 1.07 to 1.32 times; DeepEP 2 needs 0.78 of its time
    Range(
        "modelled: HybridEP",
        "calls",
        0.78,
        1.32,
        "published rates of HybridEP's kernels, with and without what surrounds them, and DeepEP's",
    ),
    # a pair of H100 beside a pair of H200, calls of 1 MiB and more: 0.93 to 1.07 times as long
    Range(
        "modelled: calls of other GPUs",
        "calls",
        0.9,
        1.15,
        "calls were measured on other GPUs of this kind",
    ),
    # 9 of 10 of the 64 calls of benchmarks/results/h200_x4_rates.json
    Range(
        "modelled: NCCL", "calls", 0.9, 1.4, "NCCL's own estimate: 9 of 10 calls measured on 4 GPUs"
    ),
    # a call at the power limit takes 8 % longer than calibrated, one of zeros 7 % less than one of
    # numbers (docs/measurements.md)
    Range(
        "measured: calls",
        "calls",
        0.9,
        1.1,
        "calibrated calls: clocks and data of the job differ by 8 %",
    ),
)
# segments that a GPU ran: real medians of one job on several machines of a kind, and products of
# one rank in two sittings, differ by 4 to 7 %
CLOCKS = Range(
    "measured: segments",
    "clocks",
    0.95,
    1.05,
    "kernels of one job take 4 to 7 % longer in one sitting than in another",
)
# real medians of jobs that wait for Python, on several hosts of one kind of machine, differ by up
# to 1.7 times; the index of one shared host went from 1.38 to 1.02 within five minutes
HOST_FACTOR, HOST_KNOWN = 1.75, 1.35
# indices of nine in ten of the 28 that were measured on hosts of H100 and H200, NVIDIA's own by
# inference: where the target's may be when that of the capture is known
HOSTS = 0.6, 2.0
_SHOWN = HOSTS[0], 1.0, 1.4, HOSTS[1]
_USUAL_HOSTS = f"nine hosts in ten have index {HOSTS[0]} to {HOSTS[1]:g}"
# modelled: nine in ten of 43 of Megatron's own tests, on two kinds of hosts that nobody measured,
# take 0.78 to 1.25 times as long; jobs beside which the index was measured 0.7 to 1.16 times
HOST_MODEL, HOST_MODEL_KNOWN = (0.75, 1.3), (0.7, 1.16)
# beside calls of 16 MiB and more products took 1.4 to 1.8 times as long, memory-bound kernels 1.1
# to 1.25, attention 1.03 to 1.25; the calls 1.0 to 1.25, 1.7 to 2.2 and 1.04 to 1.16 times, in a
# real ring 1.65 with what its ranks waited for each other: upper ends
_SLOWEST = OverlapFactors(
    {"gemm": ((1, 1.8, 1.25),), "memory": ((1, 1.25, 2.2),), "attention": ((1, 1.25, 1.65),)}
)
_LEAST = 0.002  # of the iteration: less is not worth a line


@dataclass(frozen=True)
class Uncertainty:
    """One source of uncertainty.

    Attributes:
        what: its name.
        low_ns: by how much it may make the iteration shorter.
        high_ns: by how much it may make the iteration longer.
        why: the reason for its range.
        fix: what to type against it; "" if nothing helps.
        of: what takes long in it -> ns; a segment of these kernels, a call of this size, what a
            host issues of them: by a number (``Variations.numbers``).
    """

    what: str
    low_ns: int
    high_ns: int
    why: str
    fix: str = ""
    of: Mapping[int, int] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Interval:
    """Where the iteration of the real job is expected."""

    low_ns: int
    high_ns: int
    sources: tuple[Uncertainty, ...] = ()


def combined(iteration_ns: int, sources: Iterable[Uncertainty]) -> Interval:
    """Combine sources into an interval around ``iteration_ns``.

    Independent deviations add up as squares.  Sources that hardly move the iteration count, but
    they are not kept.
    """
    by_size = sorted(sources, key=lambda source: -(source.low_ns + source.high_ns))
    low_ns = math.sqrt(sum(float(source.low_ns) ** 2 for source in by_size))
    high_ns = math.sqrt(sum(float(source.high_ns) ** 2 for source in by_size))
    kept = []
    for source in by_size:
        if max(source.low_ns, source.high_ns) > _LEAST * iteration_ns:
            kept.append(source)
    return Interval(
        max(0, round(iteration_ns - low_ns)), round(iteration_ns + high_ns), tuple(kept)
    )


def interval(timeline: Timeline) -> Interval:
    """Find where the iteration of ``timeline`` may lie."""
    variations = Variations(timeline)
    sources = [
        _uncertain_host(variations),
        _unmeasured_overlap(variations),
        _untimed_segments(variations),
        _unmeasured_loader(variations),
        *_uncertain_ranges(variations),
    ]
    known_sources = [source for source in sources if source is not None]
    return combined(timeline.iteration_ns, known_sources)


def answers_by_host(timeline: Timeline) -> tuple[tuple[float, int], ...]:
    """Replay the timeline on the usual hosts.

    Returns:
        (index of the host, ns of an iteration), from the fastest of the usual hosts to the slowest;
        none if the slices have no index, or the replay is of a host that was named.
    """
    variations = Variations(timeline)
    programs = timeline.graph.programs
    if variations.has_named_host or not variations.knows_host:
        return ()
    if not indices_of(programs.source):
        return ()
    answers = []
    for index in _SHOWN:
        factors = [float(factor) for factor in host_factors(programs, index)]
        answers.append((index, variations.with_hosts(factors)))
    return tuple(answers)


# -- segments and calls ---------------------------------------------------------------------------
def _uncertain_ranges(variations: Variations) -> list[Uncertainty]:
    """Apply ``RANGES`` to segments and calls, by what their provenances say."""
    ranges: tuple[Range, ...] = RANGES
    if variations.tier == "cuda" and not variations.has_delayed_segments:
        ranges = (*RANGES, CLOCKS)
    # source of uncertainty -> (range, bool [nodes] of the nodes that it is of)
    parts_of_source = defaultdict[str, list[tuple[Range, np.ndarray]]](list)
    for code, provenance in enumerate(variations.prices.sources):
        chosen = (variations.codes == code) & ~variations.host_nodes
        fitting_range = _range_of(provenance, ranges)
        if fitting_range is not None and chosen.any():
            parts_of_source[fitting_range.what].append((fitting_range, chosen))
    return [_moved_by(variations, what, parts) for what, parts in parts_of_source.items()]


def _range_of(provenance: str, ranges: Sequence[Range]) -> Range | None:
    """Find the first range that fits a provenance."""
    for candidate in ranges:
        if candidate.begins in provenance:
            return candidate
    return None


def _moved_by(
    variations: Variations, what: str, parts: Sequence[tuple[Range, np.ndarray]]
) -> Uncertainty:
    """Evaluate both ends of a source whose nodes have one range or several."""
    shortest = variations.durations.copy()
    longest = variations.durations.copy()
    for part_range, chosen in parts:
        shortest[chosen] = np.rint(shortest[chosen] * part_range.low)
        longest[chosen] = np.rint(longest[chosen] * part_range.high)
    reasons = dict.fromkeys(part_range.why for part_range, _ in parts)
    fix = ""
    if what == "calls":
        fix = "prism calibrate there, then --calibration FILE"
    all_chosen = np.any([chosen for _, chosen in parts], axis=0)
    return Uncertainty(
        what,
        low_ns=max(0, -variations.longer_ns(shortest)),
        high_ns=max(0, variations.longer_ns(longest)),
        why="; ".join(reasons),
        fix=fix,
        of=variations.longest_parts(all_chosen),
    )


# -- the host -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _HostRange:
    """How much shorter and longer the target's hosts may take.

    Attributes:
        fastest: of each program, times as long as replayed on the fastest host that is likely.
        slowest: the same of the slowest one.
        shorter: the fastest host may be as many times faster for other reasons (at least 1).
        longer: the slowest host may be as many times slower for other reasons.
        why: the reason.
        fix: what to type against it.
    """

    fastest: list[float]
    slowest: list[float]
    shorter: float
    longer: float
    why: str
    fix: str


_MEASURE_HOST = "prism calibrate --host -o HOST.json on the target, then host=HOST.json"


def _uncertain_host(variations: Variations) -> Uncertainty | None:
    """Evaluate how far the target's host moves the iteration; None if no host takes time."""
    if not variations.knows_host and not variations.has_delayed_segments:
        return None
    host_range = _measured_host_range(variations)
    # the model of hosts has an error of its own
    if variations.has_modelled_host:
        host_range = _modelled_host_range(variations, host_range)
    faster = [1 / _apart(1 / factor, host_range.shorter) for factor in host_range.fastest]
    slower = [_apart(factor, host_range.longer) for factor in host_range.slowest]
    # all four: of two replayed iterations the last may be shorter behind a slower first
    ends = (host_range.fastest, host_range.slowest, faster, slower)
    deviations_ns = []
    for factors in {tuple(end) for end in ends}:
        deviations_ns.append(variations.with_hosts(factors) - variations.base_ns)
    return Uncertainty(
        "host",
        low_ns=max(0, -min(deviations_ns)),
        high_ns=max(0, *deviations_ns),
        why=host_range.why,
        fix=host_range.fix,
        of=variations.longest_parts(variations.nodes_of_hosts),
    )


def _measured_host_range(variations: Variations) -> _HostRange:
    """Say how far the target's host may be from the one that was replayed."""
    programs = variations.timeline.graph.programs
    as_replayed = [1.0] * len(programs.programs)
    # somebody named the target's host, which is one host in many moments
    if variations.has_named_host:
        moment = max(HOST_KNOWN, 1 + (host_spread(programs.programs) or 0.0))
        why = f"this host varies by {format_share(moment - 1, 0)}, within minutes"
        return _HostRange(as_replayed, as_replayed, moment, moment, why, fix="")
    # slices of an early release, in which the two cannot be told apart
    if variations.has_delayed_segments:
        why = "the slices have their host's delays in the segments"
        fix = "capture them again with this release"
        return _HostRange(as_replayed, as_replayed, HOST_FACTOR, HOST_FACTOR, why, fix)
    index_of_rank = indices_of(programs.source)
    # the host of the capture is known, so the usual hosts are faster and slower by known factors
    if index_of_rank:
        index = statistics.median(index_of_rank.values())
        why = f"GPUs wait for their host, here of a host of index {index:.2g}; {_USUAL_HOSTS}"
        fastest = [float(factor) for factor in host_factors(programs, HOSTS[0])]
        slowest = [float(factor) for factor in host_factors(programs, HOSTS[1])]
        return _HostRange(fastest, slowest, HOST_KNOWN, HOST_KNOWN, why, _MEASURE_HOST)
    # nothing is known of either host
    why = f"GPUs wait for their host, and hosts differ by up to {HOST_FACTOR} times"
    return _HostRange(as_replayed, as_replayed, HOST_FACTOR, HOST_FACTOR, why, _MEASURE_HOST)


def _modelled_host_range(variations: Variations, measured: _HostRange) -> _HostRange:
    """Widen the range by what jobs differ from what their calls and kernels let expect."""
    if variations.has_named_host:
        low, high = HOST_MODEL_KNOWN
        shorter = _apart(measured.shorter, 1 / low)
        longer = _apart(measured.longer, high)
        why = measured.why
        fix = "capture the ranks on a GPU"
    else:
        # these ranges are of runs at some moment, so the moment does not count again
        low, high = HOST_MODEL
        shorter = 1 / low
        longer = high
        why = f"nobody measured the host; {_USUAL_HOSTS}"
        fix = f"capture the ranks on a GPU; or, for less: {measured.fix}"
    why += f", and jobs take {low} to {high} times what their calls and kernels let expect"
    return _HostRange(measured.fastest, measured.slowest, shorter, longer, why, fix)


def _apart(*times: float) -> float:
    """Combine reasons that are independent of each other.

    Args:
        times: how many times as long each reason makes something; below 1 counts as 1.

    Returns:
        How many times as long all of them together make it.
    """
    logarithms = [math.log(max(1, factor)) for factor in times]
    return math.exp(math.hypot(*logarithms))


# -- what nobody measured -------------------------------------------------------------------------
def _unmeasured_overlap(variations: Variations) -> Uncertainty | None:
    """Evaluate computing and calls side by side as slow as they were ever measured.

    None if somebody measured how they slow each other down, or nothing runs on a GPU.
    """
    prices = variations.prices
    if any("(overlap: " in text for text in prices.sources):
        return None
    # a CPU has no streams, and without calls nothing runs side by side
    graph = variations.timeline.graph
    if variations.tier not in ("cuda", "meta") or not len(graph.matched_calls):
        return None
    # the names of ops that some program has
    used_codes = set[int]()
    for program in graph.programs.programs:
        used_codes.update(np.unique(program.ops["name"]).tolist())
    factors = {name: _SLOWEST for name, code in CODE.items() if code in used_codes}
    slower_prices = corrected_once(variations.timeline, factors, "assumed")
    longer_ns = variations.longer_ns(durations_of(variations.dag, slower_prices))
    why = "nobody measured how much calls and computing slow each other down"
    fix = "prism calibrate on two or more GPUs, then --calibration FILE"
    return Uncertainty("overlap", 0, max(0, longer_ns), why, fix)


def _untimed_segments(variations: Variations) -> Uncertainty | None:
    """Evaluate segments that nobody said anything about as long as the longest that is known.

    None if there are none, or nothing else; commands say the latter.
    """
    # the provenance of segments without a time, if one has it
    untimed_code = -1
    for code, text in enumerate(variations.prices.sources):
        if text.startswith(NO_TIME):
            untimed_code = code
            break
    is_segment = variations.dag.kind == COMPUTE
    untimed = is_segment & (variations.codes == untimed_code)
    if not untimed.any() or untimed[is_segment].all():
        return None
    longest_ns = int(variations.durations[is_segment & ~untimed].max())
    durations = variations.durations.copy()
    durations[untimed] = longest_ns
    share = format_share(untimed.sum() / is_segment.sum(), 0)
    why = (
        f"{share} of the segments say neither how long they take nor what they compute: the "
        "shortest kernel is the least, the longest segment that is known "
        f"({format_ns(longest_ns)}) the most"
    )
    longer_ns = max(0, variations.longer_ns(durations))
    return Uncertainty("no time", 0, longer_ns, why, "capture them: prism capture RECIPE")


def _unmeasured_loader(variations: Variations) -> Uncertainty | None:
    """Let the iteration wait for its data loader, where that makes masks for longer than it takes.

    None if it does not, or a GPU ran the job.
    """
    masks = None
    if variations.tier == "meta":
        masks = loaded_masks(variations.timeline.graph.programs)
    if masks is None:
        return None
    longer_ns = masks.longest_ns - variations.base_ns
    if longer_ns <= 0:
        return None
    why = (
        f"the data loader makes a mask of {format_bytes(masks.bytes_of_sample)} for each sample; "
        f"nobody measured it, and one host made {MASK_RATE / 1e9:.1f} GB/s of them"
    )
    return Uncertainty("data", 0, longer_ns, why, NO_MASK)
