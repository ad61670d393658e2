"""What differs between two jobs, or two versions of one: time, memory by part, sizes, ops.

In : two jobs as programs, priced graphs or reports of memory, or what a feature's comparer takes
(``core.comparing``), such as traces of a real job.  Out: ``Comparison``, or the comparer's answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from megatron_prism.core import feature, job_settings
from megatron_prism.core.errors import PrismError, UsageError
from megatron_prism.core.program import Programs
from megatron_prism.core.rendering import renderer_of
from megatron_prism.core.slices import of_ranks
from megatron_prism.features.compare.scale import ScaleChange, scale_changes
from megatron_prism.graph.difference import FirstDifference, difference, rows_of
from megatron_prism.memory.job_peaks import MemoryReport, beside_tensors, needed, peak_memory
from megatron_prism.memory.peak_changes import Change
from megatron_prism.memory.peak_changes import compare as compare_peaks
from megatron_prism.replay import differences
from megatron_prism.replay.differences import TimeDifference, UncertainTime
from megatron_prism.replay.headline import Headline, headline
from megatron_prism.replay.priced_graph import CalibrationLike, MachineLike, PricedGraph
from megatron_prism.replay.pricing import pricer
from megatron_prism.replay.rates import Rates, rates_of, tokens_of
from megatron_prism.replay.timeline import Timeline, mean_parts

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

    what         : ``tokens/s``, of the whole job; ``tokens/s a GPU``
    of_a_gpu     : whether it is the latter
    a, b         : of A and of B
    first_faster : the chance that A trains more of them
    """

    what: str
    of_a_gpu: bool
    a: float
    b: float
    first_faster: float


@dataclass(frozen=True)
class Comparison:
    """Two jobs.

    names      : of A and of B
    settings   : sizes, versions and flags in which they differ
    iterations : ns of each; None where one of them has no times (``untimed`` says why)
    difference : B's iteration less A's, with its interval
    times      : ns by what a mean rank does
    memory     : peaks of each; None where one of them recorded none
    kinds      : bytes of the device by category, of the class that needs most
    changes    : B's peaks against A's, by class
    first      : of the ranks that both have: the ops in which they differ first; None if they are
                 of other sizes
    scale      : what else changes then
    rates      : tokens and flops per second of each, as ``prism replay`` says them
    speeds      : tokens per second of both; none where one does not say how many it has
    headlines   : what to say first of the iteration of each; none where one of them has no times
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
        return not (self.settings or self.first or any(one.a != one.b for one in parts))

    def to_rows(self) -> list[dict[str, object]]:
        """A row for every part of time (ns) and memory (bytes)."""
        whole = [Part("iteration", *self.iterations)] if self.iterations else []
        return [
            {"of": of, "what": one.what, "a": one.a, "b": one.b, "difference": one.b - one.a}
            for of, parts in (("time", [*whole, *self.times]), ("memory", self.kinds))
            for one in parts
        ]

    def to_json(self) -> dict[str, object]:
        """What ``prism compare --json`` prints."""
        headlines = []
        for first in self.headlines:
            headlines.append(asdict(first))
        return {
            "schema": "prism.comparison/2",
            "names": list(self.names),
            "settings": [vars(one) for one in self.settings],
            "iterations": None if self.iterations is None else list(self.iterations),
            "untimed": self.untimed,
            "difference": None if self.difference is None else vars(self.difference),
            "rates": None if self.rates is None else [asdict(rates) for rates in self.rates],
            "speeds": [asdict(speed) for speed in self.speeds],
            "headlines": headlines,
            "parts": self.to_rows(),
            "changes": [asdict(one) for one in self.changes],
            "first": None if self.first is None else [one.to_json() for one in self.first],
            "scale": [asdict(one) for one in self.scale],
            "sources": [list(one.prices.used()) for one in self.timelines or ()],
        }

    def to_text(self) -> str:
        """The page that ``prism compare`` prints."""
        text: str = renderer_of(self).text(self)
        return text

    def to_html(self) -> str:
        """Both timelines as one page.  UsageError where one has no times."""
        if self.timelines is None:
            raise UsageError(f"a page draws times: {self.untimed}", fix="leave --html out")
        page: str = renderer_of(self).page(self)
        return page


def compare(
    a: object,
    b: object,
    *,
    names: tuple[str, str] = ("A", "B"),
    machine: MachineLike | None = None,
    calibration: CalibrationLike | None = None,
) -> Any:
    """Say what differs between two jobs.

    Args:
        a: programs, what ``price`` made of them (with what-ifs), a report of memory; of a real job:
            a memory snapshot or the paths of its traces.
        b: the other one; of traces and snapshots the programs of the same job, or a later snapshot.
        names: of both, for people.
        machine: as of ``price``, for programs.
        calibration: as of ``price``, for programs.

    Returns:
        A Comparison; of traces and snapshots an answer with the same ways out (``to_text``, …).

    Raises:
        UsageError: something that cannot be compared with the other.
    """
    priced = pricer(machine, calibration)
    for module in feature.modules("comparers"):
        for comparer in module.COMPARERS:
            if comparer.accepts(a, b):
                return comparer.compare(a, b, priced)
    if not (isinstance(a, JOB_TYPES) and isinstance(b, JOB_TYPES)):
        raise UsageError("a real job needs slices beside it", fix="prism compare A SLICES")
    return _jobs((a, b), names, priced)


def _jobs(
    jobs: tuple[Job, Job], names: tuple[str, str], priced: Callable[[object], PricedGraph | None]
) -> Comparison:
    # times, where both have some
    graphs: list[PricedGraph] = []
    untimed = ""
    try:
        graphs = [graph for graph in map(priced, jobs) if graph is not None]
    except PrismError as error:
        untimed = error.message
    if not untimed and len(graphs) < 2:
        untimed = "a report of memory has no times"
    # memory, sizes and ops are those of the what-ifs too
    as_asked = [job.graph.programs if isinstance(job, PricedGraph) else job for job in jobs]
    memory = _memory(as_asked)
    compared = as_asked if untimed else [graph.graph.programs for graph in graphs]
    first = _first(compared)
    changes: list[Change] = []
    if memory is not None:
        found = compare_peaks(*memory, any_job=True)
        changes = [change for change in found if change.what not in ("same", "leaks")]
    comparison = Comparison(
        names=names,
        settings=tuple(_settings(compared)),
        iterations=None,
        untimed=untimed,
        difference=None,
        times=(),
        memory=memory,
        kinds=tuple(_kinds(*memory)) if memory else (),
        changes=tuple(changes),
        first=first,
    )
    if untimed:
        return comparison
    return _with_times(comparison, graphs[0], graphs[1])


def _with_times(comparison: Comparison, a: PricedGraph, b: PricedGraph) -> Comparison:
    """The comparison with what the replays of both say."""
    timelines = a.timeline, b.timeline
    # the same kernels and calls on the same machine have the same errors
    alike = comparison.first == () and a.machine == b.machine
    own = 0.0 if alike else differences.OWN
    estimates = [differences.estimate(timeline) for timeline in timelines]
    parts = []
    for timeline in timelines:
        accounts = []
        for index, count in enumerate(timeline.graph.classes.counts):
            accounts.append({**vars(timeline.account(index)), "count": count})
        parts.append(mean_parts(accounts))
    rates = rates_of(timelines[0]), rates_of(timelines[1])
    first_a = headline(timelines[0])
    first_b = headline(timelines[1])
    return dataclasses.replace(
        comparison,
        iterations=(timelines[0].iteration_ns, timelines[1].iteration_ns),
        difference=differences.difference(estimates[0], estimates[1], own),
        times=tuple(_parts(parts[0], parts[1])),
        timelines=timelines,
        rates=rates,
        speeds=tuple(_speeds(timelines, rates, estimates, own)),
        scale=scale_changes(a, b) if comparison.first is None else (),
        headlines=(first_a, first_b),
    )


def _speeds(
    timelines: tuple[Timeline, Timeline],
    rates: tuple[Rates, Rates],
    estimates: Sequence[UncertainTime],
    own: float,
) -> Iterator[TrainingSpeed]:
    """Tokens per second of both, of the job and of a GPU; none where one does not say its tokens.

    own : as of ``differences.difference``
    """
    tokens = [tokens_of(timeline.graph.programs) for timeline in timelines]
    if not all(tokens) or any(rate.tokens_per_s.value is None for rate in rates):
        return
    per_second = [float(rate.tokens_per_s.value or 0) for rate in rates]
    sizes = [timeline.graph.programs.world.size for timeline in timelines]
    for what, gpus in (("tokens/s", [1, 1]), ("tokens/s a GPU", sizes)):
        of_a_gpu = gpus is sizes
        # what a token takes, of all GPUs or of one
        costs = [
            estimate.scaled(shared_by / count)
            for estimate, shared_by, count in zip(estimates, gpus, tokens, strict=True)
        ]
        chance = differences.difference(costs[0], costs[1], own).first_faster
        a, b = per_second[0] / gpus[0], per_second[1] / gpus[1]
        yield TrainingSpeed(what, of_a_gpu, a, b, chance)


def _parts(a: dict[str, float], b: dict[str, float]) -> list[Part]:
    """The largest difference first."""
    parts = [Part(what, a.get(what, 0), b.get(what, 0)) for what in {**a, **b}]
    shown = [part for part in parts if part.a or part.b]
    return sorted(shown, key=lambda part: (-abs(part.b - part.a), part.what))


def _memory(jobs: Sequence[Programs | MemoryReport]) -> tuple[MemoryReport, MemoryReport] | None:
    """What ``prism fit`` says of both; None where one recorded no memory."""
    reports = []
    for job in jobs:
        if isinstance(job, MemoryReport):
            reports.append(job)
            continue
        if not all(len(program.allocations) for program in job.programs):
            return None
        try:
            reports.append(peak_memory(job))
        except UsageError:  # no whole iteration
            return None
    return reports[0], reports[1]


def _kinds(*reports: MemoryReport) -> list[Part]:
    """Of the class of each that needs most."""
    worst = [max(report.classes.values(), key=needed) for report in reports]
    a, b = ({**w["by_category"], **beside_tensors(w), "device": needed(w)} for w in worst)
    # a report of a release that knew no graphs has no category of them
    kinds = dict.fromkeys([*a, *b])
    return [
        Part(kind, a.get(kind, 0), b.get(kind, 0))
        for kind in kinds
        if a.get(kind, 0) or b.get(kind, 0)
    ]


def _settings(jobs: Sequence[Programs | MemoryReport]) -> list[Setting]:
    """Sizes first, then the flags by Megatron's names, then versions and what follows from them."""
    both: list[dict[str, str]] = []
    for job in jobs:
        texts: dict[str, str] = {}
        if isinstance(job, Programs):
            texts["world"] = str(job.world)
        source = job.source if isinstance(job, Programs) else job.job
        texts |= job_settings.plain(job_settings.line_of(source))
        texts |= {key: text for key, text in source.items() if key not in job_settings.KEYS}
        # a host or GPU stays the same one where its rank gets another number
        if all(isinstance(other, Programs) for other in jobs):
            assert isinstance(job, Programs)
            texts |= _by_place(job)
        both.append(texts)
    a, b = both
    return [
        Setting(name, a.get(name), b.get(name))
        for name in {**a, **b}
        if a.get(name) != b.get(name) and name != "alloc_conf"
    ]


def _by_place(programs: Programs) -> dict[str, str]:
    """What slices say of their ranks' hosts and GPUs, by the rank's place in a replica; where it is
    the same of all of them, once.
    """
    texts: dict[str, str] = {}
    for key, by_rank in of_ranks(programs.source).items():
        places: dict[str, str] = {}
        for rank, text in sorted(by_rank.items()):
            if rank >= programs.world.size:
                continue
            at = programs.world.coordinates(rank)
            places.setdefault(f"pp={at.pp},cp={at.cp},tp={at.tp}", text)
        if len(set(places.values())) == 1:
            texts[key] = next(iter(places.values()))
        elif places:
            texts[key] = " ".join(f"{place}: {text}" for place, text in places.items())
    return texts


def _first(jobs: Sequence[object]) -> tuple[FirstDifference, ...] | None:
    """Of every rank that was captured in both, where they are as large."""
    a, b = jobs
    if not isinstance(a, Programs) or not isinstance(b, Programs) or a.world != b.world:
        return None
    both = [one.rank for one in a.programs if b.program_of[one.rank] >= 0]
    found = (difference(rank, rows_of(a.of(rank)), rows_of(b.of(rank))) for rank in both)
    return tuple(one for one in found if one is not None)
