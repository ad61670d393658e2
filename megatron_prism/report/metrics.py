"""The numbers of a timeline that people read, as one JSON-ready value.

All renderers print these, so they cannot disagree.  Sums over ranks are means: a class of 256 ranks
counts 256 times.  Figures that need what the programs do not say are ``Value(None, why)``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

import numpy as np

from megatron_prism.core.jobs.job_settings import short
from megatron_prism.core.programs.ops import CODE, NAMES, PHASE_NAMES
from megatron_prism.core.programs.program import Program
from megatron_prism.core.world import format_ranks
from megatron_prism.replay.costs.host import host_spread
from megatron_prism.replay.network import BusyLink, busy_links
from megatron_prism.replay.rates import Value, rates_of
from megatron_prism.replay.timeline import Timeline
from megatron_prism.replay.uncertainty.headline import Headline, headline
from megatron_prism.replay.uncertainty.interval import Uncertainty, answers_by_host, interval

HOST_PART = "host: "  # what begins so is a host that issues work


@dataclass(frozen=True)
class PathPart:
    """What the critical path is made of.

    Attributes:
        phase: Of the steps.
        what: Name of their op; of hosts with HOST_PART before it.
        group: Description of their group.
        source: Provenance of their durations.
        ns: Of all such steps.
        count: How many they are.
    """

    phase: str
    what: str
    group: str
    source: str
    ns: int
    count: int


@dataclass(frozen=True)
class CallTotals:
    """One kind of call of one group, per rank (the mean over the ranks that make it).

    Attributes:
        group: Description of the group.
        name: Of the call.
        ranks: That make it.
        calls: Per rank and iteration.
        bytes: Per rank and iteration, messages as nccl-tests counts them.
        moving: ns from when everybody had come to the end.
        waiting: ns from when the rank was ready to when everybody had come.
        source: Provenance of the durations.
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
    """Return ns of each class's computing, and of its host's issuing, on the critical path."""
    ns_of_class: dict[int, int] = defaultdict(int)
    for owner, _, start, end, _ in timeline.critical_path():
        ns_of_class[owner] += end - start
    return ns_of_class


def path_parts(timeline: Timeline) -> tuple[PathPart, ...]:
    """Return the critical path by (phase, op, group, provenance), largest first.

    The parts sum to the iteration.
    """
    graph, prices = timeline.graph, timeline.prices
    matched_calls = graph.matched_calls
    ops_of_class = [_OpColumns.of(program) for program in graph.program_list]
    ns_of_part: dict[tuple[str, str, str, str], int] = defaultdict(int)
    count_of_part: Counter[tuple[str, str, str, str]] = Counter()
    for owner, number, start, end, is_host in timeline.critical_path():
        # a step of a class: computing, or its host issuing
        if owner >= 0:
            index, op = owner, number
            sources = prices.host_source if is_host else prices.compute_source
            source = sources[owner][number]
        else:
            # a call is told as its first member makes it
            first = matched_calls.start[number]
            index, op = int(matched_calls.classes[first]), int(matched_calls.ops[first])
            source = prices.collective_source[number]
        columns = ops_of_class[index]
        op_name = NAMES[columns.names[op]]
        if is_host:
            op_name = HOST_PART + op_name
        # an op outside forwards, backwards and the optimizer has no phase
        phase = PHASE_NAMES[columns.phases[op]] or "outside"
        group = graph.program_list[index].strings[columns.groups[op]]
        key = (phase, op_name, group, prices.sources[source])
        ns_of_part[key] += end - start
        count_of_part[key] += 1
    parts = [PathPart(*key, ns, count_of_part[key]) for key, ns in ns_of_part.items() if ns]
    return tuple(sorted(parts, key=lambda part: -part.ns))


@dataclass(frozen=True)
class _OpColumns:
    """Codes of a program's ops, as lists: they are asked for one by one."""

    phases: list[int]
    names: list[int]
    groups: list[int]

    @staticmethod
    def of(program: Program) -> _OpColumns:
        ops = program.ops
        return _OpColumns(ops["phase"].tolist(), ops["name"].tolist(), ops["group"].tolist())


@dataclass
class _CallSums:
    """Sums over the ranks that make one kind of call of one group."""

    ranks: int = 0
    calls: float = 0
    bytes: float = 0
    moving_ns: float = 0
    waiting_ns: float = 0
    sources: set[str] = field(default_factory=set)

    def totals(self, group: str, name: str) -> CallTotals:
        """Return the mean over the ranks."""
        return CallTotals(
            group,
            name,
            self.ranks,
            self.calls / self.ranks,
            self.bytes / self.ranks,
            self.moving_ns / self.ranks,
            self.waiting_ns / self.ranks,
            "; ".join(sorted(self.sources)),
        )


def calls_of(timeline: Timeline) -> tuple[tuple[CallTotals, ...], dict[str, float]]:
    """Return calls by group and name, and mean ns of communication per rank by source."""
    graph, prices = timeline.graph, timeline.prices
    world_size = graph.programs.world.size
    sums: dict[tuple[str, str], _CallSums] = defaultdict(_CallSums)
    busy_ns: dict[str, float] = defaultdict(float)
    for index, program in enumerate(graph.program_list):
        rank_count = graph.classes.counts[index]
        spans = timeline.spans(index)
        # calls alone
        spans = spans[program.ops["name"][spans["op"]] != CODE["compute"]]
        rows = program.ops[spans["op"]]
        source = prices.collective_source[graph.matched_calls.of[index][spans["op"]]]
        # a row of the table for each op in each group
        kinds = set(zip(rows["name"].tolist(), rows["group"].tolist(), strict=True))
        for name, group in sorted(kinds):
            is_of_kind = (rows["name"] == name) & (rows["group"] == group)
            calls = spans[is_of_kind]
            moving = calls["end"] - calls["start"]
            waiting = calls["start"] - calls["ready"]
            kind_sums = sums[program.strings[group], NAMES[name]]
            kind_sums.ranks += rank_count
            kind_sums.calls += float(rank_count * len(calls))
            kind_sums.bytes += float(rank_count * program.num_bytes[calls["op"]].sum())
            kind_sums.moving_ns += float(rank_count * moving.sum())
            kind_sums.waiting_ns += float(rank_count * waiting.sum())
            source_of_call = source[is_of_kind]
            for code in np.unique(source_of_call).tolist():
                text = prices.sources[code]
                kind_sums.sources.add(text)
                ns = float(moving[source_of_call == code].sum())
                # of a mean rank: classes weigh as many ranks as they have
                busy_ns[text] += ns * rank_count / world_size
    totals = [kind_sums.totals(group, name) for (group, name), kind_sums in sums.items()]
    totals.sort(key=lambda call: -(call.moving + call.waiting) * call.ranks)
    return tuple(totals), busy_ns


def sources_of(timeline: Timeline, index: int, ops: np.ndarray) -> np.ndarray:
    """Return the provenance of each of ``ops`` of a class, index into prices.sources."""
    prices = timeline.prices
    matched_call = timeline.graph.matched_calls.of[index][ops]
    of_segments = prices.compute_source[index][ops]
    # a world without calls
    if not len(prices.collective_source):
        return np.asarray(np.where(matched_call >= 0, 0, of_segments))
    of_calls = prices.collective_source[matched_call]
    return np.asarray(np.where(matched_call >= 0, of_calls, of_segments))


_RANKS = 60  # characters of a list of ranks


@dataclass(frozen=True)
class ClassMetrics:
    """One class; times in ns.  compute, exposed, waiting and idle add up to ``total``.

    Attributes:
        index: Of the class.
        name: Of the class.
        ranks: In words.
        count: How many ranks.
        total: The iteration.
        compute: Computing.
        exposed: Communication that nothing hides, by group.
        waiting: For other ranks, by group.
        idle: Neither.
        over: The part of ``idle`` behind the last work of these ranks.
        critical: How much of the critical path its computing is, and its host's issuing.
        slack: By how much all of its computing could be late without delaying the end.
        peak_bytes: Of live memory; None if the slice recorded no allocations.
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
    over: int
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
    """A timeline in numbers; times in ns, ``bubble``, ``computing`` and ``idle`` parts of 1.

    Attributes:
        sizes: Of the job.
        world: How many classes and ops there are.
        source: Where the programs are from.
        iteration_ns: As replayed.
        headline: What to say first: one number, or a range over hosts.
        low_ns: Where the iteration of the real job is expected to begin
            (``replay.uncertainty.interval``).
        high_ns: Where it is expected to end.
        uncertainties: What the two are made of, the largest first.
        links: That calls share, the busiest first; none if nobody shares any.
        iterations: In a row, of which this is the last.
        computing: Part of all ranks' time.
        exposed: Part of all ranks' time in communication that nothing hides.
        bubble: Part of all ranks' time in which they wait for other ranks, or have ended earlier.
        idle: Part of all ranks' time in which the GPU waits for its host.
        host: Part of 1 of the critical path in which a host issues work; None if the slices do not
            say how long that takes.
        hosts: (index of a host, ns of the iteration there), where no host was named.
        host_unknown: Ranks whose slices do not say how long the host takes, where others do.
        host_spread: Relative standard deviation of what a rank's host takes for an iteration, the
            largest of the slices'; None if none has two iterations.
        tokens_per_s: Of the job.
        flops_per_gpu: Of the model, in a second.
        mfu: Of the GPU's peak.
        precision: What a job without --bf16 and --fp16 has to be asked; "" of others.
        classes: Of ranks.
        path: The critical path.
        calls: By group and name.
        sources: Provenances of times.
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
    idle: float
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
        """Return mean ns of all ranks by group, largest first; ``field``: exposed or waiting."""
        mean_ns: dict[str, float] = defaultdict(float)
        # 1: a world without classes has nothing to divide
        rank_count = sum(figures.count for figures in self.classes) or 1
        for figures in self.classes:
            for group, ns in getattr(figures, field).items():
                mean_ns[group] += ns * figures.count / rank_count
        return dict(sorted(mean_ns.items(), key=lambda item: -item[1]))


def to_json(timeline: Timeline) -> dict[str, object]:
    """Return ``timeline_metrics`` as plain values, without what tells other timelines alone."""
    value = asdict(timeline_metrics(timeline))
    for uncertainty in value["uncertainties"]:
        del uncertainty["of"]
    return value


def timeline_metrics(timeline: Timeline) -> Metrics:
    """Return the numbers of a timeline."""
    graph = timeline.graph
    iteration_ns = timeline.iteration_ns
    path = path_parts(timeline)
    path_ns: dict[str, int] = defaultdict(int)
    host_ns = 0
    for part in path:
        path_ns[part.source] += part.ns
        # delays by the host are parts of the path
        if part.what.startswith(HOST_PART):
            host_ns += part.ns
    calls, busy_ns = calls_of(timeline)
    _add_computing(timeline, busy_ns)
    sources: list[Source] = []
    for text in timeline.prices.sources:
        if busy_ns[text] or path_ns[text]:
            sources.append(Source(text, path_ns[text], busy_ns[text]))

    classes = _classes(timeline)
    all_ranks_ns = (iteration_ns or 1) * graph.programs.world.size
    shares = _shares(classes, all_ranks_ns)
    between = interval(timeline)
    links: tuple[BusyLink, ...] = ()
    if timeline.links is not None:
        links = tuple(busy_links(timeline, timeline.links))

    # of which ranks the slices say how long the host takes
    knows_host = np.array([program.knows_host for program in graph.programs.programs])
    host: float | None = None
    ranks_without_host = 0
    if knows_host.any():
        host = host_ns / (iteration_ns or 1)
        ranks_without_host = int((~knows_host[graph.programs.program_of]).sum())
    return Metrics(
        sizes=str(graph.programs.world),
        world=str(graph),
        source={key: short(text) for key, text in graph.programs.source.items()},
        iteration_ns=iteration_ns,
        headline=headline(timeline),
        low_ns=between.low_ns,
        high_ns=between.high_ns,
        uncertainties=between.sources,
        links=links,
        iterations=timeline.iterations,
        computing=shares.computing,
        exposed=shares.exposed,
        bubble=shares.bubble,
        idle=shares.idle,
        host=host,
        hosts=answers_by_host(timeline),
        host_unknown=ranks_without_host,
        host_spread=host_spread(graph.programs.programs),
        **vars(rates_of(timeline)),
        classes=tuple(classes),
        path=path,
        calls=calls,
        sources=tuple(sources),
    )


def _add_computing(timeline: Timeline, busy_ns: dict[str, float]) -> None:
    """Add mean ns of computing and of hosts per rank, by source."""
    prices = timeline.prices
    counts = timeline.graph.classes.counts
    world_size = timeline.graph.programs.world.size
    columns = (
        (prices.compute, prices.compute_source),
        (prices.lead, prices.host_source),
        (prices.host, prices.host_source),
    )
    for ns_of_class, sources_of_class in columns:
        # worlds without times of hosts have none of these
        for ns, sources, count in zip(ns_of_class, sources_of_class, counts, strict=False):
            for code, text in enumerate(prices.sources):
                busy_ns[text] += float(ns[sources == code].sum()) * count / world_size


@dataclass(frozen=True)
class _Shares:
    """Parts of all ranks' time."""

    computing: float
    exposed: float
    bubble: float
    idle: float


def _shares(classes: Iterable[ClassMetrics], all_ranks_ns: int) -> _Shares:
    computing_ns = exposed_ns = bubble_ns = idle_ns = 0
    for figures in classes:
        computing_ns += figures.compute * figures.count
        exposed_ns += sum(figures.exposed.values()) * figures.count
        # a rank that has ended waits for the others as well
        class_bubble_ns = sum(figures.waiting.values()) + figures.over
        bubble_ns += class_bubble_ns * figures.count
        late_host_ns = figures.idle - figures.over
        idle_ns += late_host_ns * figures.count
    return _Shares(
        computing=computing_ns / all_ranks_ns,
        exposed=exposed_ns / all_ranks_ns,
        bubble=bubble_ns / all_ranks_ns,
        idle=idle_ns / all_ranks_ns,
    )


def _classes(timeline: Timeline) -> list[ClassMetrics]:
    graph = timeline.graph
    slack = timeline.slack()
    critical = critical_by_class(timeline)
    classes: list[ClassMetrics] = []
    for index, program in enumerate(graph.program_list):
        account = timeline.account(index)
        ranks = format_ranks(graph.classes.ranks(index).tolist())
        if len(ranks) > _RANKS:
            ranks = ranks[: _RANKS - 2] + " …"
        peak_bytes = program.peak_bytes() if program.allocations.size else None
        figures = ClassMetrics(
            index=index,
            name=graph.class_name(index),
            ranks=ranks,
            count=graph.classes.counts[index],
            total=account.total,
            compute=account.compute,
            exposed=dict(account.exposed),
            waiting=dict(account.waiting),
            idle=account.idle,
            over=account.over,
            critical=critical[index],
            slack=slack[index],
            peak_bytes=peak_bytes,
        )
        classes.append(figures)
    return classes
