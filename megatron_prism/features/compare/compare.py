"""What differs between two jobs, or two versions of one: time, memory by part, sizes, ops.

In : two jobs as programs, priced graphs or reports of memory, or what a feature's comparer takes
(``core.comparing``), such as traces of a real job.  Out: ``Comparison``, or the comparer's answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from megatron_prism.core import feature
from megatron_prism.core.errors import PrismError, UsageError
from megatron_prism.core.jobs import job_settings
from megatron_prism.core.programs.program import Programs
from megatron_prism.core.programs.slices import FOUND_OF_RANKS, of_ranks
from megatron_prism.core.rendering import renderer_of
from megatron_prism.core.world import World
from megatron_prism.features.compare.cost import TokenCost, token_cost
from megatron_prism.features.compare.scale import ScaleChange, scale_changes
from megatron_prism.graph.difference import ComparedOp, FirstDifference, difference
from megatron_prism.memory.job_peaks import MemoryReport, beside_tensors, needed, peak_memory
from megatron_prism.memory.peak_changes import Change
from megatron_prism.memory.peak_changes import compare as compare_peaks
from megatron_prism.replay.priced_graph import CalibrationLike, MachineLike, PricedGraph
from megatron_prism.replay.pricing import pricer
from megatron_prism.replay.rates import Rates, rates_of, tokens_of
from megatron_prism.replay.timeline import Timeline, mean_parts
from megatron_prism.replay.uncertainty.differences import TimeDifference, UncertainTime
from megatron_prism.replay.uncertainty.headline import Headline, headline

Job = Programs | PricedGraph | MemoryReport
JOB_TYPES = (Programs, PricedGraph, MemoryReport)


@dataclass(frozen=True)
class Setting:
    """What is said of both jobs, and differs; None: not said."""

    name: str
    a: str | None
    b: str | None


@dataclass(frozen=True)
class Part:
    """ns or bytes of one part of both."""

    what: str
    a: float
    b: float


@dataclass(frozen=True)
class TrainingSpeed:
    """How fast both train, which decides between jobs of other batches or numbers of GPUs.

    Attributes:
        what: ``tokens/s``, of the whole job; ``tokens/s a GPU``.
        of_a_gpu: Whether it is the latter.
        a: Of A.
        b: Of B.
        first_faster: The chance that A trains more of them.
    """

    what: str
    of_a_gpu: bool
    a: float
    b: float
    first_faster: float


@dataclass(frozen=True)
class Comparison:
    """Two jobs.

    Attributes:
        names: Of A and of B.
        settings: Sizes, versions and flags in which they differ.
        iterations: ns of each; None where one of them has no times.
        untimed: Why one of them has no times.
        difference: B's iteration less A's, with its interval.
        times: ns by what a mean rank does.
        memory: Peaks of each; None where one of them recorded none.
        kinds: Bytes of the device by category, of the class that needs most.
        changes: B's peaks against A's, by class.
        first: Of the ranks that both have: the ops in which they differ first; None if they are of
            other sizes.
        timelines: Of each.
        scale: What else changes then.
        rates: Tokens and flops per second of each, as ``prism replay`` says them.
        speeds: Tokens per second of both; none where one does not say how many it has.
        cost: Of tokens of both; None without prices.
        headlines: What to say first of the iteration of each; none where one of them has no times.
    """

    names: tuple[str, str]
    settings: tuple[Setting, ...]
    iterations: tuple[int, int] | None
    untimed: str
    difference: TimeDifference | None
    times: tuple[Part, ...]
    memory: tuple[MemoryReport, MemoryReport] | None
    kinds: tuple[Part, ...]
    changes: tuple[Change, ...]
    first: tuple[FirstDifference, ...] | None
    timelines: tuple[Timeline, Timeline] | None = field(repr=False, default=None)
    scale: tuple[ScaleChange, ...] = ()
    rates: tuple[Rates, Rates] | None = None
    speeds: tuple[TrainingSpeed, ...] = ()
    cost: TokenCost | None = None
    headlines: tuple[Headline, ...] = ()

    @property
    def batches_differ(self) -> bool | None:
        """Whether an iteration of one has more tokens; None where one of them does not say."""
        if not self.speeds or self.timelines is None:
            return None
        a, b = (tokens_of(timeline.graph.programs) for timeline in self.timelines)
        return a != b

    @property
    def gpus_differ(self) -> bool:
        """Whether one has more GPUs."""
        if self.timelines is None:
            return False
        a, b = (timeline.graph.programs.world.size for timeline in self.timelines)
        return a != b

    @cached_property
    def same(self) -> bool:
        """Whether nothing differs."""
        parts = (*self.times, *self.kinds)
        has_unequal_part = any(part.a != part.b for part in parts)
        # worlds of other sizes have no ops to compare; a size is among the settings then
        return not self.settings and not self.first and not has_unequal_part

    def to_rows(self) -> list[dict[str, object]]:
        """Return a row for every part of time (ns) and memory (bytes)."""
        times = list(self.times)
        if self.iterations:
            times.insert(0, Part("iteration", *self.iterations))
        rows = [_row("time", part) for part in times]
        return rows + [_row("memory", part) for part in self.kinds]

    def to_json(self) -> dict[str, object]:
        """Return what ``prism compare --json`` prints."""
        first: list[dict[str, object]] | None = None
        if self.first is not None:
            first = [rank_difference.to_json() for rank_difference in self.first]
        rates: list[dict[str, object]] | None = None
        if self.rates is not None:
            rates = [asdict(job_rates) for job_rates in self.rates]
        sources = [list(timeline.prices.used()) for timeline in self.timelines or ()]
        return {
            "schema": "prism.comparison/2",
            "names": list(self.names),
            "settings": [vars(setting) for setting in self.settings],
            "iterations": None if self.iterations is None else list(self.iterations),
            "untimed": self.untimed,
            "difference": None if self.difference is None else vars(self.difference),
            "rates": rates,
            "speeds": [asdict(speed) for speed in self.speeds],
            "cost": None if self.cost is None else asdict(self.cost),
            "headlines": [asdict(job_headline) for job_headline in self.headlines],
            "parts": self.to_rows(),
            "changes": [asdict(change) for change in self.changes],
            "first": first,
            "scale": [asdict(change) for change in self.scale],
            "sources": sources,
        }

    def to_text(self) -> str:
        """Write the page that ``prism compare`` prints."""
        text: str = renderer_of(self).text(self)
        return text

    def to_html(self) -> str:
        """Write both timelines as one page.

        Raises:
            UsageError: One of the jobs has no times.
        """
        if self.timelines is None:
            raise UsageError(f"a page draws times: {self.untimed}", fix="leave --html out")
        page: str = renderer_of(self).page(self)
        return page


def _row(of: str, part: Part) -> dict[str, object]:
    """Return the row of a part of time or memory."""
    return {"of": of, "what": part.what, "a": part.a, "b": part.b, "difference": part.b - part.a}


def compare(
    a: object,
    b: object,
    *,
    names: tuple[str, str] = ("A", "B"),
    machine: MachineLike | None = None,
    calibration: CalibrationLike | None = None,
    prices: tuple[float, float] | None = None,
) -> Any:
    """Say what differs between two jobs.

    Args:
        a: Programs, what ``price`` made of them (with what-ifs), a report of memory; of a real job:
            a memory snapshot or the paths of its traces.
        b: The other one; of traces and snapshots the programs of the same job, or a later snapshot.
        names: Of both, for people.
        machine: As of ``price``, for programs.
        calibration: As of ``price``, for programs.
        prices: Of a GPU of A and of B for an hour, for what tokens cost; of two jobs alone.

    Returns:
        A Comparison; of traces and snapshots an answer with the same ways out (``to_text``, …).

    Raises:
        UsageError: Something that cannot be compared with the other, or prices where a job does
            not say its tokens or times.
    """
    priced = pricer(machine, calibration)
    for module in feature.modules("comparers"):
        for comparer in module.COMPARERS:
            if comparer.accepts(a, b):
                # files of a real job say neither tokens nor what is unknown of their times
                if prices is not None:
                    raise _no_cost()
                return comparer.compare(a, b, priced)
    # no comparer takes the two, and one of them is no job
    if not (isinstance(a, JOB_TYPES) and isinstance(b, JOB_TYPES)):
        raise UsageError("a real job needs slices beside it", fix="prism compare A SLICES")
    return _jobs((a, b), names, priced, prices)


def _no_cost() -> UsageError:
    """Make the error of prices beside something of which tokens have no cost."""
    message = "a job does not say its tokens or times, so they have no cost"
    return UsageError(message, fix="leave --price out")


def _jobs(
    jobs: tuple[Job, Job],
    names: tuple[str, str],
    priced: Callable[[object], PricedGraph | None],
    prices: tuple[float, float] | None,
) -> Comparison:
    """Compare two jobs of any kind."""
    # times, where both have some
    graphs: list[PricedGraph] = []
    untimed = ""
    try:
        graphs = [graph for graph in map(priced, jobs) if graph is not None]
    # a job whose calls do not fit has no times, but its memory and settings still compare
    except PrismError as error:
        untimed = error.message
    # a report of memory is priced as None
    if not untimed and len(graphs) < 2:
        untimed = "a report of memory has no times"
    if untimed and prices is not None:
        raise _no_cost()
    # memory, sizes and ops are those of the what-ifs too
    as_asked: list[Programs | MemoryReport] = []
    for job in jobs:
        as_asked.append(job.graph.programs if isinstance(job, PricedGraph) else job)
    memory = _memory(as_asked)
    compared = as_asked if untimed else [graph.graph.programs for graph in graphs]
    kinds: list[Part] = []
    changes: list[Change] = []
    if memory is not None:
        kinds = _kinds(*memory)
        for change in compare_peaks(*memory, any_job=True):
            # what two other jobs leak each is no change
            if change.what not in ("same", "leaks"):
                changes.append(change)
    comparison = Comparison(
        names=names,
        settings=tuple(_settings(compared)),
        iterations=None,
        untimed=untimed,
        difference=None,
        times=(),
        memory=memory,
        kinds=tuple(kinds),
        changes=tuple(changes),
        first=_first_differences(compared),
    )
    if untimed:
        return comparison
    return _with_times(comparison, graphs[0], graphs[1], prices)


def _with_times(
    comparison: Comparison, a: PricedGraph, b: PricedGraph, prices: tuple[float, float] | None
) -> Comparison:
    """Return the comparison with what the replays of both say."""
    timelines = (a.timeline, b.timeline)
    # the same kernels and calls on the same machine have the same errors
    same_kernels = comparison.first == () and a.machine == b.machine
    estimates = [UncertainTime.of_timeline(timeline) for timeline in timelines]
    rates = (rates_of(a.timeline), rates_of(b.timeline))
    speeds = _speeds(timelines, rates, estimates, same_kernels)
    cost = None
    if prices is not None:
        if not speeds:
            raise _no_cost()
        # tokens of a GPU, as its price is for a GPU
        _, of_a_gpu = speeds
        cost = token_cost(timelines, (of_a_gpu.a, of_a_gpu.b), prices, estimates, same_kernels)

    # what the iterations are made of
    parts_of_a = _mean_parts(a.timeline)
    parts_of_b = _mean_parts(b.timeline)
    times = _parts(parts_of_a, parts_of_b)
    scale: tuple[ScaleChange, ...] = ()
    # worlds of other sizes have no ranks to compare op by op
    if comparison.first is None:
        scale = scale_changes(a, b)
    estimate_a, estimate_b = estimates
    difference = estimate_a.compared(estimate_b, same_kernels=same_kernels)
    headline_a = headline(a.timeline)
    headline_b = headline(b.timeline)
    return dataclasses.replace(
        comparison,
        iterations=(a.timeline.iteration_ns, b.timeline.iteration_ns),
        difference=difference,
        times=tuple(times),
        timelines=timelines,
        rates=rates,
        speeds=tuple(speeds),
        cost=cost,
        scale=scale,
        headlines=(headline_a, headline_b),
    )


def _mean_parts(timeline: Timeline) -> dict[str, float]:
    """Return ns by what a mean rank does."""
    accounts: list[dict[str, Any]] = []
    for index, count in enumerate(timeline.graph.classes.counts):
        account = vars(timeline.account(index))
        accounts.append({**account, "count": count})
    return mean_parts(accounts)


def _speeds(
    timelines: tuple[Timeline, Timeline],
    rates: tuple[Rates, Rates],
    estimates: Sequence[UncertainTime],
    same_kernels: bool,
) -> list[TrainingSpeed]:
    """Return tokens per second of both, of the job and of a GPU.

    Args:
        timelines: Of both.
        rates: Of both.
        estimates: Of their iterations.
        same_kernels: As of ``UncertainTime.compared``.

    Returns:
        The job's, then that of a GPU; none where one of them does not say its tokens.
    """
    tokens_a, tokens_b = (tokens_of(timeline.graph.programs) for timeline in timelines)
    rate_a, rate_b = (job_rates.tokens_per_s.value for job_rates in rates)
    if not tokens_a or not tokens_b or rate_a is None or rate_b is None:
        return []
    timeline_a, timeline_b = timelines
    gpus_a = timeline_a.graph.programs.world.size
    gpus_b = timeline_b.graph.programs.world.size
    estimate_a, estimate_b = estimates

    # what a token takes, of all GPUs or of one
    cost_a = estimate_a.scaled(1 / tokens_a)
    cost_b = estimate_b.scaled(1 / tokens_b)
    gpu_cost_a = estimate_a.scaled(gpus_a / tokens_a)
    gpu_cost_b = estimate_b.scaled(gpus_b / tokens_b)
    chance = cost_a.compared(cost_b, same_kernels=same_kernels).first_faster
    gpu_chance = gpu_cost_a.compared(gpu_cost_b, same_kernels=same_kernels).first_faster
    rate_a, rate_b = float(rate_a), float(rate_b)
    return [
        TrainingSpeed("tokens/s", False, rate_a, rate_b, chance),
        TrainingSpeed("tokens/s a GPU", True, rate_a / gpus_a, rate_b / gpus_b, gpu_chance),
    ]


def _parts(a: Mapping[str, float], b: Mapping[str, float]) -> list[Part]:
    """Return parts that one of both has, the largest difference first."""
    parts: list[Part] = []
    for name in {**a, **b}:
        part = Part(name, a.get(name, 0), b.get(name, 0))
        if part.a or part.b:
            parts.append(part)
    return sorted(parts, key=lambda part: (-abs(part.b - part.a), part.what))


def _memory(jobs: Sequence[Programs | MemoryReport]) -> tuple[MemoryReport, MemoryReport] | None:
    """Return what ``prism fit`` says of both; None where one recorded no memory."""
    reports: list[MemoryReport] = []
    for job in jobs:
        if isinstance(job, MemoryReport):
            reports.append(job)
            continue
        # a program by hand, or of a run whose memory was not recorded
        if not all(len(program.allocations) for program in job.programs):
            return None
        try:
            reports.append(peak_memory(job))
        except UsageError:  # no whole iteration
            return None
    return reports[0], reports[1]


def _kinds(a: MemoryReport, b: MemoryReport) -> list[Part]:
    """Return bytes by category, of the class of each that needs most."""
    bytes_of_a, bytes_of_b = _largest_class(a), _largest_class(b)
    parts: list[Part] = []
    # a report of a release that knew no graphs has no category of them
    for kind in dict.fromkeys([*bytes_of_a, *bytes_of_b]):
        part = Part(kind, bytes_of_a.get(kind, 0), bytes_of_b.get(kind, 0))
        if part.a or part.b:
            parts.append(part)
    return parts


def _largest_class(report: MemoryReport) -> dict[str, int]:
    """Return bytes by category of the class that needs most."""
    figures = max(report.classes.values(), key=needed)
    return {**figures["by_category"], **beside_tensors(figures), "device": needed(figures)}


def _settings(jobs: Sequence[Programs | MemoryReport]) -> list[Setting]:
    """Return what differs: sizes, then flags by Megatron's names, versions, what follows of them.

    A host or a GPU stays the same one where its rank gets another number.
    """
    are_programs = all(isinstance(job, Programs) for job in jobs)
    a, b = (_texts(job, are_programs) for job in jobs)
    settings: list[Setting] = []
    for name in {**a, **b}:
        # a report of memory says options of the allocator, which slices do not have
        if a.get(name) != b.get(name) and name != "alloc_conf":
            settings.append(Setting(name, a.get(name), b.get(name)))
    return settings


def _texts(job: Programs | MemoryReport, by_place: bool) -> dict[str, str]:
    """Return what is said of a job; ``by_place``: of ranks by their places in a replica."""
    texts: dict[str, str] = {}
    if isinstance(job, Programs):
        texts["world"] = str(job.world)
    source = dict(job.source if isinstance(job, Programs) else job.job)
    # what captures found out is no difference of the jobs: memory's tables show it
    for key in FOUND_OF_RANKS:
        source.pop(key, None)
    texts |= job_settings.of_source(source)
    for key, text in source.items():
        if key not in job_settings.KEYS:
            texts[key] = text
    if by_place and isinstance(job, Programs):
        texts |= _by_place(job.world, source)
    return texts


def _by_place(world: World, source: Mapping[str, str]) -> dict[str, str]:
    """Return what slices say of their ranks' hosts and GPUs, by the rank's place in a replica.

    Where it is the same of all of them, it is said once.
    """
    texts: dict[str, str] = {}
    for key, text_of_rank in of_ranks(source).items():
        text_of_place: dict[str, str] = {}
        for rank, text in sorted(text_of_rank.items()):
            if rank >= world.size:
                continue
            place = world.coordinates(rank)
            text_of_place.setdefault(f"pp={place.pp},cp={place.cp},tp={place.tp}", text)
        if len(set(text_of_place.values())) == 1:
            texts[key] = next(iter(text_of_place.values()))
        elif text_of_place:
            texts[key] = " ".join(f"{place}: {text}" for place, text in text_of_place.items())
    return texts


def _first_differences(jobs: Sequence[object]) -> tuple[FirstDifference, ...] | None:
    """Return where every rank that was captured in both differs first.

    Returns:
        None where they are not as large.
    """
    a, b = jobs
    if not isinstance(a, Programs) or not isinstance(b, Programs) or a.world != b.world:
        return None
    first_differences: list[FirstDifference] = []
    for program in a.programs:
        rank = program.rank
        # the rank's stage was not captured in B
        if b.program_of[rank] < 0:
            continue
        rows_of_a = ComparedOp.of_program(a.of(rank))
        rows_of_b = ComparedOp.of_program(b.of(rank))
        first = difference(rank, rows_of_a, rows_of_b)
        if first is not None:
            first_differences.append(first)
    return tuple(first_differences)
