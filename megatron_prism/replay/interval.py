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
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from megatron_prism.core.ops import CODE, NAMES
from megatron_prism.core.units import format_ns, format_share
from megatron_prism.graph.issue_graph import COMPUTE, HOST, LEAD
from megatron_prism.replay.costs.collectives import OverlapFactors
from megatron_prism.replay.costs.host import MODELLED, ON_TARGET, host_spread, indices_of
from megatron_prism.replay.costs.prices import NO_TIME
from megatron_prism.replay.priced_graph import corrected_once
from megatron_prism.replay.timeline import Timeline, durations_of, of_nodes
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
    Range("by their rooflines", "moved", 0.8, 1.2, "scaled by rooflines: off like modelled ones"),
    Range(
        "modelled: op table and roofline", "kernels", 0.8, 1.3,
        "kernels that never ran: the worst of eight published jobs",
    ),
    Range(
        "modelled: op table", "kernels", 0.9, 1.3,
        "kernels that never ran: the worst of eight published jobs",
    ),
    Range(
        "modelled: roofline", "kernels", 0.8, 1.3,
        "kernels that never ran: the worst of eight published jobs",
    ),
    # from 1 GiB on within 6 %; below, latencies of one network are several times NCCL's estimate
    Range(
        "modelled: NCCL's alpha-beta between nodes", "calls", 0.95, 2.2,
        "NCCL's own estimate between nodes: published all-reduces of 32 MiB and more",
    ),
    # with the time around HybridEP's kernels 1.07 to 1.32 times; DeepEP 2 needs 0.78 of its time
    Range(
        "modelled: HybridEP", "calls", 0.78, 1.32,
        "published rates of HybridEP's kernels, with and without what surrounds them, and DeepEP's",
    ),
    # a pair of H100 beside a pair of H200, calls of 1 MiB and more: 0.93 to 1.07 times as long
    Range(
        "modelled: calls of other GPUs", "calls", 0.9, 1.15,
        "calls were measured on other GPUs of this kind",
    ),
    # 9 of 10 of the 64 calls of benchmarks/results/h200_x4_rates.json
    Range(
        "modelled: NCCL", "calls", 0.9, 1.4, "NCCL's own estimate: 9 of 10 calls measured on 4 GPUs"
    ),
    # a call at the power limit takes 8 % longer than calibrated, one of zeros 7 % less than one of
    # numbers (docs/measurements.md)
    Range(
        "measured: calls", "calls", 0.9, 1.1,
        "calibrated calls: clocks and data of the job differ by 8 %",
    ),
)  # fmt: skip
# segments that a GPU ran: real medians of one job on several machines of a kind, and products of
# one rank in two sittings, differ by 4 to 7 %
CLOCKS = Range(
    "measured: segments", "clocks", 0.95, 1.05,
    "kernels of one job take 4 to 7 % longer in one sitting than in another",
)  # fmt: skip
# real medians of jobs that wait for Python, on several hosts of one kind of machine, differ by up
# to 1.7 times; the index of one shared host went from 1.38 to 1.02 within five minutes
HOST_FACTOR, HOST_KNOWN = 1.75, 1.35
# indices of nine in ten of the 28 that were measured on hosts of H100 and H200, NVIDIA's own by
# inference: where the target's may be when that of the capture is known
HOSTS = 0.6, 2.0
_SHOWN = HOSTS[0], 1.0, 1.4, HOSTS[1]
_USUAL = f"nine hosts in ten have index {HOSTS[0]} to {HOSTS[1]:g}"
# modelled: nine in ten of 43 of Megatron's own tests, on two kinds of hosts that nobody measured,
# take 0.78 to 1.25 times as long; jobs beside which the index was measured 0.7 to 1.16 times
HOST_MODEL, HOST_MODEL_KNOWN = (0.75, 1.3), (0.7, 1.16)
# beside calls of 16 MiB and more products took 1.4 to 1.8 times as long, memory-bound kernels 1.1
# to 1.25, attention 1.03 to 1.25; the calls 1.0 to 1.25, 1.7 to 2.2 and 1.04 to 1.16 times, in a
# real ring 1.65 with what its ranks waited for each other: upper ends
_SLOWEST = OverlapFactors(
    {"gemm": ((1, 1.8, 1.25),), "memory": ((1, 1.25, 2.2),), "attention": ((1, 1.25, 1.65),)}
)
_LONGEST = 16  # parts of a source: the others take little
_OF_SEGMENTS = "note", "flops", "traffic", "ns"  # what two segments that are alike have in common
_LEAST = 0.002  # of the iteration: less is not worth a line


@dataclass(frozen=True)
class Uncertainty:
    """One source: ``low_ns`` shorter to ``high_ns`` longer, why, and what to type against it.

    of : what takes long in it -> ns; a segment of these kernels, a call of this size, what a host
         issues of them: by a number
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
    """The interval around ``iteration_ns``: independent deviations add up as squares."""
    kept = tuple(sorted(sources, key=lambda one: -(one.low_ns + one.high_ns)))
    low = math.sqrt(sum(float(one.low_ns) ** 2 for one in kept))
    high = math.sqrt(sum(float(one.high_ns) ** 2 for one in kept))
    shown = tuple(o for o in kept if max(o.low_ns, o.high_ns) > _LEAST * iteration_ns)
    return Interval(max(0, round(iteration_ns - low)), round(iteration_ns + high), shown)


def interval(timeline: Timeline) -> Interval:
    """Where the iteration of ``timeline`` may lie."""
    return combined(timeline.iteration_ns, _Variations(timeline).all())


def answers_by_host(timeline: Timeline) -> tuple[tuple[float, int], ...]:
    """(index of the host, ns of an iteration), from the fastest of the usual hosts to the slowest;
    none if the slices have no index, or the replay is of a host that was named.
    """
    here = _Variations(timeline)
    programs = timeline.graph.programs
    if here.named_host or not here.knows_host or not indices_of(programs.source):
        return ()
    each = ((index, host_factors(programs, index)) for index in _SHOWN)
    return tuple((index, here.with_hosts(list(map(float, factors)))) for index, factors in each)


class _Variations:
    """Evaluates the graph again with some of the durations changed."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self.dag, self.prices = timeline, timeline.dag, timeline.prices
        self.durations = durations_of(self.dag, self.prices)
        # where calls share links: all are compared without
        shared = timeline.links is not None
        self.base = timeline.iteration_with(self.durations) if shared else timeline.iteration_ns
        programs = timeline.graph.programs
        self.tier = programs.source.get("tier", "")
        self.knows_host = any(program.knows_host for program in programs.programs)
        columns = {COMPUTE: self.prices.compute_source}  # which provenance segments and calls have
        self.codes = of_nodes(self.dag, self.prices.collective_source, columns, -1)
        self.hosts = np.isin(self.dag.kind, (LEAD, HOST))
        self.named_host = any(ON_TARGET in text for text in self.prices.sources)

    def all(self) -> list[Uncertainty]:
        """Of every source that moves the iteration."""
        found = [self.host(), self.unmeasured_overlap(), self.untimed()]
        ranges: tuple[Range, ...] = RANGES
        if self.tier == "cuda" and not self._delayed:
            ranges = (*RANGES, CLOCKS)
        chosen = defaultdict[str, list[tuple[Range, np.ndarray]]](list)
        for code, text in enumerate(self.prices.sources):
            mine = (self.codes == code) & ~self.hosts
            one = next((one for one in ranges if one.begins in text), None)
            if one is not None and mine.any():
                chosen[one.what].append((one, mine))
        for what, parts in chosen.items():
            ends = []
            for end in ("low", "high"):
                durations = self.durations.copy()
                for one, mine in parts:
                    durations[mine] = np.rint(durations[mine] * getattr(one, end))
                ends.append(self._longer(durations))
            why = "; ".join(dict.fromkeys(one.why for one, _ in parts))
            fix = "prism calibrate there, then --calibration FILE" if what == "calls" else ""
            mine = np.any([mine for _, mine in parts], axis=0)
            low, high = max(0, -ends[0]), max(0, ends[1])
            found.append(Uncertainty(what, low, high, why, fix, self._longest(mine)))
        return [one for one in found if one is not None]

    def _longest(self, mine: np.ndarray) -> dict[int, int]:
        """What most of the time of these nodes goes to; the same number in every job."""
        numbers, which = np.unique(self.numbers[mine], return_inverse=True)
        total = np.bincount(which, self.durations[mine]).astype(np.int64)
        order = np.argsort(-total, kind="stable")[:_LONGEST]
        return dict(zip(numbers[order].tolist(), total[order].tolist(), strict=True))

    @cached_property
    def numbers(self) -> np.ndarray:
        """int64 [nodes]: of what a node does, by its text, whichever job it is in."""
        graph = self.timeline.graph
        kinds, firsts = graph.call_kinds, graph.matched_calls.start[:-1]
        texts = [f"{one.name} {(one.ranks - one.ranks[0]).tolist()}" for one in kinds.kinds]
        called = _numbered((kinds.of[firsts], kinds.num_bytes[firsts]), texts)
        segments, issued = [], []
        for program in graph.program_list:
            ops = program.ops
            numbers = _numbered([ops[key] for key in _OF_SEGMENTS], program.strings)
            # what a host issues is a segment of these kernels, or a call of this kind
            names = _numbered([ops["name"]], NAMES)
            segments.append(numbers)
            issued.append(np.where(ops["name"] == CODE["compute"], numbers, names))
        return of_nodes(self.dag, called, {COMPUTE: segments, LEAD: issued, HOST: issued})

    def _longer(self, durations: np.ndarray) -> int:
        """ns by which the iteration is longer if nodes take ``durations``."""
        return self.timeline.iteration_with(durations) - self.base

    @property
    def _delayed(self) -> bool:
        """Whether segments were timed with their host's delays in them."""
        return self.tier in ("cuda", "cpu") and not self.knows_host

    def host(self) -> Uncertainty | None:
        """Of a host whose times were measured: on another one than the target's."""
        if not self.knows_host and not self._delayed:
            return None
        programs = self.timeline.graph.programs
        here, alike = indices_of(programs.source), [1.0] * len(programs.programs)
        # at both ends: times as long as here, of each program, and how far off that may be
        ends, off = (alike, alike), (HOST_FACTOR, HOST_FACTOR)
        why = f"GPUs wait for their host, and hosts differ by up to {HOST_FACTOR} times"
        fix = "prism calibrate --host -o HOST.json on the target, then host=HOST.json"
        if self.named_host:
            moment = max(HOST_KNOWN, 1 + (host_spread(programs.programs) or 0.0))
            off = moment, moment
            why, fix = f"this host varies by {format_share(moment - 1, 0)}, within minutes", ""
        elif self._delayed:
            why = "the slices have their host's delays in the segments"
            fix = "capture them again with this release"
        elif here:
            fastest, slowest = (host_factors(programs, index) for index in HOSTS)
            ends, off = (list(map(float, fastest)), list(map(float, slowest))), (HOST_KNOWN,) * 2
            index = statistics.median(here.values())
            why = f"GPUs wait for their host, here of a host of index {index:.2g}; {_USUAL}"
        if any(MODELLED in text for text in self.prices.sources):
            low, high = HOST_MODEL_KNOWN if self.named_host else HOST_MODEL
            if self.named_host:
                off = _apart(off[0], 1 / low), _apart(off[1], high)
                fix = "capture the ranks on a GPU"
            else:  # their times have the moment in them
                off, why = (1 / low, high), f"nobody measured the host; {_USUAL}"
                fix = f"capture the ranks on a GPU; or, for less: {fix}"
            why += f", and jobs take {low} to {high} times what their calls and kernels let expect"
        faster = [1 / _apart(1 / times, off[0]) for times in ends[0]]
        slower = [_apart(times, off[1]) for times in ends[1]]
        # all four: of two replayed iterations the last may be shorter behind a slower first
        hosts = {tuple(factors) for factors in (*ends, faster, slower)}
        each = [self.with_hosts(factors) - self.base for factors in hosts]
        mine = self.hosts | (self.dag.kind == COMPUTE) if self._delayed else self.hosts
        low, high = max(0, -min(each)), max(0, *each)
        return Uncertainty("host", low, high, why, fix, self._longest(mine))

    def with_hosts(self, factors: Sequence[float]) -> int:
        """ns of an iteration if the hosts of each program take ``factors`` times as long."""
        mine = self.hosts | (self.dag.kind == COMPUTE) if self._delayed else self.hosts
        of_class = np.array(factors)[list(self.timeline.graph.classes.programs)]
        durations = self.durations.copy()
        durations[mine] = np.rint(durations[mine] * of_class[self.dag.owner[mine]])
        return self.timeline.iteration_with(durations)

    def unmeasured_overlap(self) -> Uncertainty | None:
        """Computing and calls side by side, if nobody measured how they slow each other down."""
        if any("(overlap: " in text for text in self.prices.sources):
            return None
        graph = self.timeline.graph
        names = {n for p in graph.programs.programs for n in np.unique(p.ops["name"]).tolist()}
        factors = {name: _SLOWEST for name, code in CODE.items() if code in names}
        if self.tier not in ("cuda", "meta") or not len(graph.matched_calls):
            return None
        slower = corrected_once(self.timeline, factors, "assumed")
        high = self._longer(durations_of(self.dag, slower))
        why = "nobody measured how much calls and computing slow each other down"
        fix = "prism calibrate on two or more GPUs, then --calibration FILE"
        return Uncertainty("overlap", 0, max(0, high), why, fix)

    def untimed(self) -> Uncertainty | None:
        """Of segments that nobody said anything about: each may take as long as the longest that
        is known.
        """
        code = next(i for i, text in enumerate(self.prices.sources) if text.startswith(NO_TIME))
        segments = self.dag.kind == COMPUTE
        mine = segments & (self.codes == code)
        if not mine.any() or mine[segments].all():
            return None  # or nothing is known, which commands say
        durations = self.durations.copy()
        durations[mine] = longest = int(durations[segments & ~mine].max())
        high = self._longer(durations)
        part = f"{format_share(mine.sum() / segments.sum(), 0)} of the segments say"
        why = f"{part} neither how long they take nor what they compute: the shortest kernel is "
        why += f"the least, the longest segment that is known ({format_ns(longest)}) the most"
        return Uncertainty("no time", 0, max(0, high), why, "capture them: prism capture RECIPE")


def _apart(*times: float) -> float:
    """How many times as long something may take that independent reasons make ``times`` longer."""
    return math.exp(math.hypot(*(math.log(max(1, one)) for one in times)))


def _numbered(columns: Sequence[np.ndarray], texts: Sequence[str]) -> np.ndarray:
    """int64 [rows]: equal where the text of the first column and all others are equal."""
    rows = np.stack([column.astype(np.int64) for column in columns])
    each, which = np.unique(rows, axis=1, return_inverse=True)
    found = [zlib.crc32(repr((texts[text], *rest)).encode()) for text, *rest in each.T.tolist()]
    return np.array(found, dtype=np.int64)[which.ravel()]
