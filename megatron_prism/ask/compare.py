"""What differs between two jobs, or two versions of one: time, memory by part, sizes, ops.

In : two jobs as programs, priced graphs or reports of memory; traces or a memory snapshot of a
real process beside one.  Out: ``Comparison``, or what ``traces`` and ``memory.snapshot`` answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property

from megatron_prism.ask.scale import ScaleChange, scale_changes
from megatron_prism.core import job_settings
from megatron_prism.core.errors import PrismError, UsageError
from megatron_prism.core.files import rendered
from megatron_prism.core.program import Programs
from megatron_prism.graph.difference import FirstDifference, difference, rows_of
from megatron_prism.memory import baseline, snapshot
from megatron_prism.memory.baseline import (
    Change,
    MemoryReport,
    beside_tensors,
    needed,
    peak_memory,
)
from megatron_prism.memory.snapshot import RankedSnapshots, SnapshotComparison, SnapshotGrowth
from megatron_prism.replay import differences
from megatron_prism.replay.differences import TimeDifference
from megatron_prism.replay.priced_graph import CalibrationLike, MachineLike, PricedGraph, price
from megatron_prism.replay.timeline import Timeline, mean_parts
from megatron_prism.traces.compare import TraceComparison, compare_traces

Traces = Sequence[str | os.PathLike[str]]
Job = Programs | PricedGraph | MemoryReport


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
        return {
            "schema": "prism.comparison/2",
            "names": list(self.names),
            "settings": [vars(one) for one in self.settings],
            "iterations": None if self.iterations is None else list(self.iterations),
            "untimed": self.untimed,
            "difference": None if self.difference is None else vars(self.difference),
            "parts": self.to_rows(),
            "changes": [asdict(one) for one in self.changes],
            "first": None if self.first is None else [one.to_json() for one in self.first],
            "scale": [asdict(one) for one in self.scale],
            "sources": [list(one.prices.used()) for one in self.timelines or ()],
        }

    def to_text(self) -> str:
        """The page that ``prism compare`` prints."""
        return rendered("report.compare:render_text", self, str)

    def to_html(self) -> str:
        """Both timelines as one page.  UsageError where one has no times."""
        if self.timelines is None:
            raise UsageError(f"a page draws times: {self.untimed}", fix="leave --html out")
        return rendered("report.compare:render_html", self, str)


Answer = Comparison | TraceComparison | SnapshotComparison | SnapshotGrowth | RankedSnapshots


def compare(
    a: Job | snapshot.Snapshot | Traces,
    b: Job | snapshot.Snapshot,
    *,
    names: tuple[str, str] = ("A", "B"),
    machine: MachineLike | None = None,
    calibration: CalibrationLike | None = None,
) -> Answer:
    """Say what differs between two jobs.

    Args:
        a: programs, what ``price`` made of them (with what-ifs), a report of memory; of a real job:
            a memory snapshot (``memory.snapshot.read``) or the paths of its traces.
        b: the other one; of traces and snapshots the programs of the same job, or a later snapshot.
        names: of both, for people.
        machine, calibration: as of ``price``, for programs.

    Raises:
        UsageError: traces or a snapshot beside something else.
    """

    def priced(job: object) -> PricedGraph | None:
        if isinstance(job, Programs):
            return price(job, machine=machine, calibration=calibration)
        return job if isinstance(job, PricedGraph) else None

    if isinstance(b, snapshot.Snapshot):
        if isinstance(a, snapshot.Snapshot):
            return snapshot.grown(a, b)
        raise UsageError("snapshots come first", fix="prism compare SNAPSHOT SLICES")
    if isinstance(a, (Programs, PricedGraph, MemoryReport)):
        return _jobs((a, b), names, priced)
    if isinstance(b, MemoryReport):
        raise UsageError("a real job needs slices beside it", fix="prism compare A SLICES")
    if isinstance(a, snapshot.Snapshot):
        programs = b.graph.programs if isinstance(b, PricedGraph) else b
        return snapshot.compare(a, programs)
    predicted = priced(b)
    assert predicted is not None
    return compare_traces(a, predicted.timeline)


def _jobs(
    jobs: tuple[Job, Job], names: tuple[str, str], priced: Callable[[object], PricedGraph | None]
) -> Comparison:
    graphs, why = list[PricedGraph](), ""
    try:
        graphs = [one for one in map(priced, jobs) if one is not None]
    except PrismError as error:
        why = error.message
    if not why and len(graphs) < 2:
        why = "a report of memory has no times"
    given = [one.programs if isinstance(one, PricedGraph) else one for one in jobs]
    memory = _memory(given)
    programs = given if why else [one.graph.programs for one in graphs]
    first = _first(programs)
    iterations = difference = timelines = None
    times: list[Part] = []
    if not why:
        one, other = (graph.timeline for graph in graphs)
        timelines, iterations = (one, other), (one.iteration_ns, other.iteration_ns)
        alike = first == () and graphs[0].machine == graphs[1].machine
        own = 0.0 if alike else differences.OWN  # the same kernels and calls have the same errors
        of_a, of_b = map(differences.estimate, timelines)
        difference = differences.difference(of_a, of_b, own)
        parts = [mean_parts({**vars(each.account(index)), "count": count}
                            for index, count in enumerate(each.graph.classes.counts))
                 for each in timelines]  # fmt: skip
        times = _parts(*parts)
    return Comparison(
        names, tuple(_settings(programs)), iterations, why, difference, tuple(times), memory,
        tuple(_kinds(*memory)) if memory else (),
        tuple(one for one in baseline.compare(*memory, any_job=True)
              if one.what not in ("same", "leaks")) if memory else (), first, timelines,
        scale_changes(*graphs) if not why and first is None else (),
    )  # fmt: skip


def _parts(a: dict[str, float], b: dict[str, float]) -> list[Part]:
    """The largest difference first."""
    found = [Part(what, a.get(what, 0), b.get(what, 0)) for what in {**a, **b}]
    found = [one for one in found if one.a or one.b]
    return sorted(found, key=lambda one: (-abs(one.b - one.a), one.what))


def _memory(jobs: Sequence[Programs | MemoryReport]) -> tuple[MemoryReport, MemoryReport] | None:
    reports = []
    for one in jobs:
        if isinstance(one, Programs):
            if not all(len(program.allocations) for program in one.programs):
                return None
            try:
                one = peak_memory(one)
            except UsageError:  # no whole iteration
                return None
        reports.append(one)
    return reports[0], reports[1]


def _kinds(*reports: MemoryReport) -> list[Part]:
    """Of the class of each that needs most."""
    worst = [max(report.classes.values(), key=needed) for report in reports]
    a, b = ({**w["by_category"], **beside_tensors(w), "device": needed(w)} for w in worst)
    return [Part(kind, a[kind], b[kind]) for kind in a if a[kind] or b[kind]]


def _settings(jobs: Sequence[object]) -> list[Setting]:
    """Sizes first, then the flags by Megatron's names, then versions and what follows from them."""
    said: list[dict[str, str]] = []
    for one in jobs:
        source = one.source if isinstance(one, Programs) else one.job  # type: ignore[attr-defined]
        sizes = {"world": str(one.world)} if isinstance(one, Programs) else {}
        rest = {key: value for key, value in source.items() if key not in job_settings.KEYS}
        said.append({**sizes, **job_settings.plain(job_settings.line_of(source)), **rest})
    return [
        Setting(name, said[0].get(name), said[1].get(name))
        for name in {**said[0], **said[1]}
        if said[0].get(name) != said[1].get(name) and name != "alloc_conf"
    ]


def _first(jobs: Sequence[object]) -> tuple[FirstDifference, ...] | None:
    """Of every rank that was captured in both, where they are as large."""
    a, b = jobs
    if not isinstance(a, Programs) or not isinstance(b, Programs) or a.world != b.world:
        return None
    both = [one.rank for one in a.programs if b.program_of[one.rank] >= 0]
    found = (difference(rank, rows_of(a.of(rank)), rows_of(b.of(rank))) for rank in both)
    return tuple(one for one in found if one is not None)
