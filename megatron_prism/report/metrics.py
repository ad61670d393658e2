"""The numbers of a timeline that people read, as one JSON-ready value.

All renderers print these, so they cannot disagree.  Sums over ranks are means: a class of 256 ranks
counts 256 times.  Figures that need what the programs do not say are ``Value(None, why)``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from megatron_prism.core.job_settings import short
from megatron_prism.core.ops import CODE, NAMES, PHASE_NAMES
from megatron_prism.core.world import format_ranks
from megatron_prism.replay.costs.host import host_spread
from megatron_prism.replay.headline import Headline, headline
from megatron_prism.replay.interval import Uncertainty, answers_by_host, interval
from megatron_prism.replay.network import BusyLink, busy_links
from megatron_prism.replay.rates import Value, rates_of
from megatron_prism.replay.timeline import Timeline

HOST_PART = "host: "  # what begins so is a host that issues work


@dataclass(frozen=True)
class PathPart:
    """What the critical path is made of: ns of all steps of one kind, and how many."""

    phase: str
    what: str
    group: str
    source: str
    ns: int
    count: int


@dataclass(frozen=True)
class CallTotals:
    """One kind of call of one group, per rank (the mean over the ranks that make it).

    ranks   : that make it
    calls   : per rank and iteration
    bytes   : per rank and iteration, messages as nccl-tests counts them
    moving  : ns from when everybody had come to the end
    waiting : ns from when the rank was ready to when everybody had come
    """

    group: str
    name: str
    ranks: int
    calls: float
    bytes: float
    moving: float
    waiting: float
    source: str


def critical_by_class(timeline: Timeline) -> dict[int, int]:
    """Class -> ns of its computing, and of its host's issuing, on the critical path."""
    found: dict[int, int] = defaultdict(int)
    for owner, _, start, end, _ in timeline.critical_path():
        found[owner] += end - start
    return found


def path_parts(timeline: Timeline) -> tuple[PathPart, ...]:
    """The critical path by (phase, op, group, provenance), largest first; sums to the iteration."""
    graph, prices, meet = timeline.graph, timeline.prices, timeline.graph.matched_calls
    columns = [
        [program.ops[name].tolist() for name in ("phase", "name", "group")]
        for program in graph.program_list
    ]
    total: dict[tuple[str, str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for owner, number, start, end, host in timeline.critical_path():
        if owner >= 0:
            who, at = owner, number
            source = (prices.host_source if host else prices.compute_source)[owner][number]
        else:
            first = meet.start[number]
            who, at = int(meet.classes[first]), int(meet.ops[first])
            source = prices.collective_source[number]
        phases, names, groups = columns[who]
        key = (
            PHASE_NAMES[phases[at]] or "outside",
            HOST_PART + NAMES[names[at]] if host else NAMES[names[at]],
            graph.program_list[who].strings[groups[at]],
            prices.sources[source],
        )
        total[key][0] += end - start
        total[key][1] += 1
    parts = [PathPart(*key, ns, count) for key, (ns, count) in total.items() if ns]
    return tuple(sorted(parts, key=lambda part: -part.ns))


def calls_of(timeline: Timeline) -> tuple[tuple[CallTotals, ...], dict[str, float]]:
    """(calls by group and name, mean ns of communication per rank by source)."""
    graph, prices = timeline.graph, timeline.prices
    size = graph.programs.world.size
    sums: dict[tuple[str, str], np.ndarray] = defaultdict(lambda: np.zeros(5))
    sources: dict[tuple[str, str], set[str]] = defaultdict(set)
    busy: dict[str, float] = defaultdict(float)
    for index, program in enumerate(graph.program_list):
        count, spans = graph.classes.counts[index], timeline.spans(index)
        spans = spans[program.ops["name"][spans["op"]] != CODE["compute"]]
        rows = program.ops[spans["op"]]
        source = prices.collective_source[graph.matched_calls.of[index][spans["op"]]]
        for name, group in sorted(
            set(zip(rows["name"].tolist(), rows["group"].tolist(), strict=True))
        ):
            mine = (rows["name"] == name) & (rows["group"] == group)
            chosen, key = spans[mine], (program.strings[group], NAMES[name])
            moving = chosen["end"] - chosen["start"]
            waited = chosen["start"] - chosen["ready"]
            sums[key] += count * np.array(
                [1, len(chosen), program.num_bytes[chosen["op"]].sum(), moving.sum(), waited.sum()]
            )
            for code in np.unique(source[mine]).tolist():
                sources[key].add(prices.sources[code])
                busy[prices.sources[code]] += (
                    float(moving[source[mine] == code].sum()) * count / size
                )
    calls = []
    for (group, name), sum_ in sums.items():
        count_, num_bytes, moving_, waiting = (sum_[1:] / sum_[0]).tolist()
        said = "; ".join(sorted(sources[group, name]))
        calls.append(
            CallTotals(group, name, int(sum_[0]), count_, num_bytes, moving_, waiting, said)
        )
    return tuple(sorted(calls, key=lambda call: -(call.moving + call.waiting) * call.ranks)), busy


def sources_of(timeline: Timeline, index: int, ops: np.ndarray) -> np.ndarray:
    """Provenance of every one of ``ops`` of a class, index into prices.sources."""
    prices, meeting = timeline.prices, timeline.graph.matched_calls.of[index][ops]
    called = prices.collective_source[meeting] if len(prices.collective_source) else 0
    return np.where(meeting >= 0, called, prices.compute_source[index][ops])


_RANKS = 60  # characters of a list of ranks


@dataclass(frozen=True)
class ClassMetrics:
    """One class; times in ns.  compute, exposed, waiting and idle add up to ``total``.

    critical   : how much of the critical path its computing is, and its host's issuing
    slack      : by how much all of its computing could be late without delaying the end
    peak_bytes : of live memory; None if the slice recorded no allocations
    """

    index: int
    name: str
    ranks: str
    count: int
    total: int
    compute: int
    exposed: Mapping[str, int]
    waiting: Mapping[str, int]
    idle: int
    critical: int
    slack: int
    peak_bytes: int | None


@dataclass(frozen=True)
class Source:
    """A provenance: the share of the critical path, and of all busy time, that rests on it."""

    text: str
    path_ns: int
    busy_ns: float


@dataclass(frozen=True)
class Metrics:
    """A timeline in numbers; times in ns, ``bubble`` and ``computing`` parts of 1.

    headline        : what to say first: one number, or a range over hosts
    low_ns, high_ns : where the iteration of the real job is expected (``replay.interval``)
    links           : that calls share, the busiest first; none if nobody shares any
    uncertainties   : what the two are made of, the largest first
    host            : part of 1 of the critical path in which a host issues work; None if the
    slices do not say how long that takes
    hosts           : (index of a host, ns of the iteration there), where no host was named
    host_unknown    : ranks whose slices do not say how long the host takes, where others do
    host_spread     : relative standard deviation of what a rank's host takes for an iteration, the
    largest of the slices'; None if none has two iterations
    precision       : what a job without --bf16 and --fp16 has to be asked; "" of others
    """

    sizes: str
    world: str
    source: Mapping[str, str]
    iteration_ns: int
    headline: Headline
    low_ns: int
    high_ns: int
    uncertainties: tuple[Uncertainty, ...]
    links: tuple[BusyLink, ...]
    iterations: int
    computing: float
    exposed: float
    bubble: float
    host: float | None
    hosts: tuple[tuple[float, int], ...]
    host_unknown: int
    host_spread: float | None
    tokens_per_s: Value
    flops_per_gpu: Value
    mfu: Value
    precision: str
    classes: tuple[ClassMetrics, ...]
    path: tuple[PathPart, ...]
    calls: tuple[CallTotals, ...]
    sources: tuple[Source, ...]

    def mean(self, field: str) -> dict[str, float]:
        """``exposed`` or ``waiting`` by group, the mean over all ranks in ns, largest first."""
        total: dict[str, float] = defaultdict(float)
        ranks = sum(one.count for one in self.classes) or 1
        for one in self.classes:
            for group, ns in getattr(one, field).items():
                total[group] += ns * one.count / ranks
        return dict(sorted(total.items(), key=lambda item: -item[1]))


def to_json(timeline: Timeline) -> dict[str, object]:
    """``timeline_metrics`` as plain values, without what only other timelines are told by."""
    found = asdict(timeline_metrics(timeline))
    for one in found["uncertainties"]:
        del one["of"]
    return found


def timeline_metrics(timeline: Timeline) -> Metrics:
    """The numbers of ``timeline``."""
    graph, iteration = timeline.graph, timeline.iteration_ns
    size = graph.programs.world.size
    path = path_parts(timeline)
    classes = tuple(_classes(timeline))
    calls, busy = calls_of(timeline)
    prices = timeline.prices
    columns = [(prices.compute, prices.compute_source)]
    columns += [(ns, prices.host_source) for ns in (prices.lead, prices.host)]
    for every, sources in columns:
        for ns, source, count in zip(every, sources, graph.classes.counts, strict=False):
            for code, text in enumerate(prices.sources):
                busy[text] += float(ns[source == code].sum()) * count / size
    on_path: dict[str, int] = defaultdict(int)
    for part in path:
        on_path[part.source] += part.ns
    whole = (iteration or 1) * size
    between = interval(timeline)
    knows = np.array([program.knows_host for program in graph.programs.programs])
    late = sum(part.ns for part in path if part.what.startswith(HOST_PART))
    return Metrics(
        sizes=str(graph.programs.world),
        world=str(graph),
        source={key: short(text) for key, text in graph.programs.source.items()},
        iteration_ns=iteration,
        headline=headline(timeline),
        low_ns=between.low_ns,
        high_ns=between.high_ns,
        uncertainties=between.sources,
        links=() if timeline.links is None else tuple(busy_links(timeline, timeline.links)),
        iterations=timeline.iterations,
        computing=sum(c.compute * c.count for c in classes) / whole,
        exposed=sum(sum(c.exposed.values()) * c.count for c in classes) / whole,
        bubble=sum((sum(c.waiting.values()) + c.idle) * c.count for c in classes) / whole,
        host=late / (iteration or 1) if knows.any() else None,
        hosts=answers_by_host(timeline),
        host_unknown=int((~knows[graph.programs.program_of]).sum()) if knows.any() else 0,
        host_spread=host_spread(graph.programs.programs),
        **vars(rates_of(timeline)),
        classes=classes,
        path=path,
        calls=calls,
        sources=tuple(
            Source(text, on_path[text], busy[text])
            for text in timeline.prices.sources
            if busy[text] or on_path[text]
        ),
    )


def _classes(timeline: Timeline) -> list[ClassMetrics]:
    graph, slack = timeline.graph, timeline.slack()
    critical = critical_by_class(timeline)
    found = []
    for index, program in enumerate(graph.program_list):
        account = timeline.account(index)
        ranks = format_ranks(graph.classes.ranks(index).tolist())
        found.append(
            ClassMetrics(
                index=index,
                name=graph.class_name(index),
                ranks=ranks if len(ranks) <= _RANKS else ranks[: _RANKS - 2] + " …",
                count=graph.classes.counts[index],
                total=account.total,
                compute=account.compute,
                exposed=dict(account.exposed),
                waiting=dict(account.waiting),
                idle=account.idle,
                critical=critical[index],
                slack=slack[index],
                peak_bytes=program.peak_bytes() if program.allocations.size else None,
            )
        )
    return found
