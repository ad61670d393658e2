"""Whether a job fits into its GPUs, what its peak is made of, and which change makes it fit.

In : programs that recorded memory, and a limit.  Out: ``Fit``.  Changes are tried on the programs:
the allocator runs again without what recomputation does not keep (``remedies``), or with other
options; the iteration is replayed with the forwards that run again, priced as they were.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_prism.core.errors import PrismError, UsageError
from megatron_prism.core.programs.ops import CODE
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.core.rendering import renderer_of
from megatron_prism.core.units import format_bytes
from megatron_prism.features.fit import remedies
from megatron_prism.features.fit.op_times import op_times
from megatron_prism.features.fit.section import FitSection, JobMemory, sections_of
from megatron_prism.memory import allocator, blocks, steady
from megatron_prism.memory.host_lead import OpTimes
from megatron_prism.memory.host_need import HostNeed, host_need
from megatron_prism.memory.job_peaks import Draws, MemoryReport, first_program, needed, peak_memory
from megatron_prism.memory.nccl_buffers import DEFAULT
from megatron_prism.replay.costs.kernels import OpTable, parts_of, table_of
from megatron_prism.replay.costs.machine import Machine, usable_memory
from megatron_prism.replay.priced_graph import CalibrationLike, MachineLike, PricedGraph, price
from megatron_prism.replay.timeline import durations_of
from megatron_prism.replay.uncertainty.headline import Headline, headline

EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
_ROWS_OF_FIGURES = steady.MOST_ROWS // 4  # requests of all draws of a class with much to spare


@dataclass(frozen=True)
class TriedChange:
    """A change of the job, as it was tried on the programs.

    words     : to type: Megatron's options, keys of a recipe, or a variable of the environment
    num_bytes : what the class that needs most then needs
    fits      : whether that is within the limit
    slower_ns : ns that an iteration takes longer; None where nobody can say
    captured  : whether a job with the change was captured; else the figure is estimated from the
                slices without it
    host_bytes: what a rank then keeps in memory of its host; 0 where it keeps nothing there
    """

    words: str
    num_bytes: int
    fits: bool
    slower_ns: int | None
    captured: bool = False
    host_bytes: int = 0

    @property
    def order(self) -> tuple[bool, bool, int, int]:
        """Key by which changes are listed: those that fit first, then by what they cost."""
        return not self.fits, self.slower_ns is None, self.slower_ns or 0, self.num_bytes


@dataclass(frozen=True)
class Overrun:
    """Where a class runs out of memory: what it asks for there beside what is reserved (bytes);
    None of ``where``: nowhere if the allocator gives its cache back in time.
    """

    where: str | None
    size: int = 0
    reserved: int = 0


@dataclass(frozen=True)
class Fit:
    """Whether a job fits.

    limit        : bytes of device memory that a process may take
    limit_source : whose they are, "" if they were given
    memory       : the figures of every class of ranks
    worst        : the class that needs most
    overruns     : class -> where it runs out, of those beyond the limit
    risks        : class -> what later iterations reserve, of those within it that have little to
                   spare, and of the worst
    changes      : that were tried, those that fit first, then by what they cost
    iteration_ns : without a change; None where the iteration cannot be priced
    job          : programs and figures that sections are made of
    headline     : what to say first of the iteration; None likewise
    sections     : what other features say of the job
    free         : bytes that are to be freed, by which the limit is less than the job needs; 0
                   where a limit was given
    refused      : words of changes that could not be captured -> why; mostly the job refuses them
    """

    limit: int
    limit_source: str
    memory: MemoryReport
    worst: str
    overruns: Mapping[str, Overrun]
    risks: Mapping[str, steady.Risk]
    changes: tuple[TriedChange, ...]
    iteration_ns: int | None
    job: JobMemory = dataclasses.field(repr=False)
    headline: Headline | None = None
    sections: tuple[FitSection, ...] = ()
    free: int = 0
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def programs(self) -> Programs:
        """The job's programs."""
        return self.job.programs

    @property
    def what_if(self) -> str | None:
        """What is not as captured, in words; None: nothing."""
        return self.programs.what_if

    @property
    def without(self) -> str | None:
        """Options of the job that its capture did without; None: none."""
        return self.programs.without

    @property
    def fits(self) -> bool:
        """Whether every class does, in later iterations and beside the train steps, too."""
        return self.steps_fit and not self.overruns_beside

    @property
    def steps_fit(self) -> bool:
        """Whether the train steps of every class do, those of later iterations, too."""
        return not self.overruns and not self.at_risk

    @property
    def frees_enough(self) -> bool:
        """Whether a change brings every class within the limit."""
        return any(change.fits for change in self.changes)

    @property
    def shown_overruns(self) -> Mapping[str, Overrun]:
        """Overruns of a limit that somebody has; none where memory is to be freed."""
        return {} if self.free else self.overruns

    @property
    def overruns_beside(self) -> dict[str, str]:
        """Class -> where it runs out of memory beside its train steps, as sections say."""
        places: dict[str, str] = {}
        for section in self.sections:
            places.update(section.overruns())
        return places

    @property
    def at_risk(self) -> tuple[str, ...]:
        """The classes that are within the limit at first and may run out in a later iteration."""
        return tuple(name for name, risk in self.risks.items() if risk.failed)

    @property
    def over(self) -> int:
        """Bytes by which the worst class exceeds the limit; negative: what is left."""
        return needed(self.memory.classes[self.worst]) - self.limit

    def as_torch_counts(self, name: str) -> int:
        """What ``torch.cuda.max_memory_allocated`` says of a rank of class ``name``: bytes of the
        blocks that its tensors have.
        """
        return self.job.allocated(name)

    @property
    def host(self) -> HostNeed | None:
        """What the job keeps in memory of its hosts; None if slices say nothing of that."""
        return host_need(self.programs)

    def to_rows(self) -> list[dict[str, object]]:
        """A row for every class; bytes."""
        beyond = {*self.overruns, *self.at_risk, *self.overruns_beside}
        rows = self.memory.to_rows()
        for row, (name, figures) in zip(rows, self.memory.classes.items(), strict=True):
            row["needs"] = needed(figures)
            row["limit"] = self.limit
            # nobody asks whether a job fits that shall need less
            row["fits"] = None if self.free else name not in beyond
        return rows

    def to_json(self) -> dict[str, object]:
        """What ``prism fit --json`` prints; bytes and ns.

        Where memory is to be freed, nobody asks whether the job fits: it is whether changes free
        enough.
        """
        fits: bool | None = self.fits
        frees_enough: bool | None = None
        if self.free:
            fits, frees_enough = None, self.frees_enough
        main_headline = None
        if self.headline is not None:
            main_headline = dataclasses.asdict(self.headline)
        of_host = {}
        if self.host is not None:
            of_host["host"] = vars(self.host)
        of_sections = {section.name: section.to_json() for section in self.sections}
        return {
            "schema": "prism.fit/1",
            "fits": fits,
            "frees_enough": frees_enough,
            "limit": self.limit,
            "limit_source": self.limit_source,
            "worst": self.worst,
            "over": self.over,
            "iteration_ns": self.iteration_ns,
            "headline": main_headline,
            "what_if": self.what_if,
            "classes": dict(self.memory.classes),
            **of_host,
            "overruns": {name: vars(overrun) for name, overrun in self.shown_overruns.items()},
            "risks": {name: risk.to_json() for name, risk in self.risks.items()},
            "free": self.free,
            "changes": [vars(change) for change in self.changes],
            "refused_changes": dict(self.refused),
            **of_sections,
            "provenance": self.memory.provenance,
        }

    def to_text(self, shown: str = "", top: int = 8) -> str:
        """The page that ``prism fit`` prints.

        Args:
            shown: the class whose peak it shows; the worst by default.
            top: how many of the peak's origins.
        """
        text: str = renderer_of(self).text(self, shown, top)
        return text

    def to_html(self) -> str:
        """The page: every class's memory over the iteration, its parts, the limit."""
        page: str = renderer_of(self).page(self)
        return page


def fit(
    job: Programs | PricedGraph,
    *,
    limit: int | str | None = None,
    headroom: int = 0,
    machine: MachineLike | None = None,
    calibration: CalibrationLike | None = None,
    alloc_conf: str = "",
    device: str | None = DEFAULT,
    draws: Draws | None = None,
    free: int = 0,
    with_changes: bool = True,
) -> Fit:
    """Say whether a job fits, what its peak is made of and which change makes it fit.

    Args:
        job: what ``load`` or ``capture`` returned, or what ``price`` made of it: with what-ifs,
            memory and time are those of the job that they make.
        limit: bytes of device memory, or text: "80GB" is what a card sold as such has; default:
            that of ``machine``.
        headroom: bytes of the limit that stay free.
        machine: as of ``price``, for what changes cost in time; of programs alone.
        calibration: as of ``price``, of programs alone, too.
        alloc_conf: as of ``peak_memory``.
        device: as of ``peak_memory``.
        draws: as of ``peak_memory``.
        free: bytes that the job shall need less than it does; in place of a limit.
        with_changes: whether to try changes where the job does not fit.

    Raises:
        UsageError: the programs recorded no memory, nobody knows the limit, or there is as well a
            limit as something to free.
    """
    if free and limit is not None:
        message = "a limit and what to free beside it"
        raise UsageError(message, fix="--limit 80GB --headroom 6GiB, or --free 6GiB alone")
    # only a price says whose memory the limit is
    is_asked = machine is not None or (limit is None and not free)
    programs, priced = _priced(job, machine, calibration, is_asked)
    memory = peak_memory(programs, alloc_conf=alloc_conf, device=device, draws=draws)
    needs = {name: needed(figures) for name, figures in memory.classes.items()}
    machine_of_job = None
    if priced is not None:
        machine_of_job = priced.machine
    if free:
        limit_bytes, source = _limit_that_frees(free + headroom, needs)
    else:
        limit_bytes, source = usable_memory(limit, machine_of_job, headroom)
    settings = allocator.Settings.parse(alloc_conf)
    program_of: dict[str, Program] = {}  # class -> its program
    for name, figures in memory.classes.items():
        program_of[name] = first_program(programs, figures)
    overruns: dict[str, Overrun] = {}
    for name, need in needs.items():
        if need > limit_bytes:
            # context, workspaces and NCCL lie beside the allocator's segments
            beside_segments = need - memory.classes[name]["peak_reserved"]
            overruns[name] = _overrun(program_of[name], limit_bytes - beside_segments, settings)
    worst = max(needs, key=needs.__getitem__)
    times = {}  # class -> what its ops take, where the job could be priced
    if priced is not None:
        times = {name: _times_of(priced, programs, memory, name) for name in needs}
    risks: dict[str, steady.Risk] = {}
    # a class that does not fit at first needs no later iterations
    if not overruns:
        risks = _risks(memory, program_of, limit_bytes, settings, worst, times)
    changes: tuple[TriedChange, ...] = ()
    num_ranks = programs.world.size
    if with_changes and overruns:
        changes = _tried(memory, program_of, needs, limit_bytes, settings, priced, num_ranks)
    # all classes fit at first: holes between blocks may be what later iterations lack
    elif with_changes:
        changes = _without_holes(memory, program_of, risks, limit_bytes, settings, num_ranks, times)
    ns = None
    first = None
    if priced is not None:
        ns = priced.timeline.iteration_ns
        first = headline(priced.timeline)
    job_memory = JobMemory(programs, memory, limit_bytes)
    return Fit(
        limit=limit_bytes,
        limit_source=source,
        memory=memory,
        worst=worst,
        overruns=overruns,
        risks=risks,
        changes=changes,
        iteration_ns=ns,
        job=job_memory,
        headline=first,
        sections=sections_of(job_memory),
        free=free,
    )


def programs_of(job: Programs | PricedGraph) -> Programs:
    """Return the programs of a job; with what-ifs those that they make."""
    if isinstance(job, PricedGraph):
        return job.graph.programs
    return job


def _priced(
    job: Programs | PricedGraph,
    machine: MachineLike | None,
    calibration: CalibrationLike | None,
    is_asked: bool,
) -> tuple[Programs, PricedGraph | None]:
    """Return the programs of a job, and their price; None where it has none and nobody asked."""
    if isinstance(job, PricedGraph):
        return programs_of(job), job
    try:
        return job, price(job, machine=machine, calibration=calibration)
    except PrismError:
        if is_asked:
            raise
    return job, None


def _limit_that_frees(free: int, needs: Mapping[str, int]) -> tuple[int, str]:
    """Return the limit within which the job needs ``free`` bytes less, and whose it is."""
    largest_need = max(needs.values())
    limit_bytes = largest_need - free
    if limit_bytes <= 0:
        job_needs = f"the job needs {format_bytes(largest_need)}"
        message = f"{job_needs}, and {format_bytes(free)} of it cannot be freed"
        raise UsageError(message, fix="--free 6GiB")
    return limit_bytes, f"{format_bytes(free)} less than the job needs"


def _overrun(program: Program, segments: int, settings: allocator.Settings) -> Overrun:
    """Find where a rank runs out of memory.

    Args:
        program: Of the rank.
        segments: Bytes that the allocator may reserve.
        settings: Of the allocator.
    """
    place = blocks.overflow(program, max(segments, 0), settings)
    if place is None:
        return Overrun(None)
    return Overrun(place.where, place.size, place.reserved)


def _times_of(
    priced: PricedGraph, programs: Programs, memory: MemoryReport, name: str
) -> OpTimes | None:
    """Return what the ops of a class take; None where the slices do not say."""
    program = first_program(programs, memory.classes[name])
    return op_times(priced, program.rank, program)


def _risks(
    memory: MemoryReport,
    programs: Mapping[str, Program],
    limit: int,
    settings: allocator.Settings,
    worst: str,
    times: Mapping[str, OpTimes | None],
) -> dict[str, steady.Risk]:
    """Replay later iterations of the classes that have little to spare, and of the worst."""
    segments: dict[str, int] = {}  # class -> bytes that its allocator may reserve
    close = set()  # classes that have little to spare
    for name, figures in memory.classes.items():
        spare = limit - needed(figures)
        if steady.reaches(programs[name], spare):
            close.add(name)
        if name == worst or name in close:
            segments[name] = figures["peak_reserved"] + spare
    rows_each = steady.MOST_ROWS // max(1, len(segments))
    risks = {}
    for name, size in segments.items():
        # a class that nothing threatens is replayed for its figures alone
        most_rows = rows_each if name in close else min(rows_each, _ROWS_OF_FIGURES)
        risk = steady.risk(programs[name], size, settings, most_rows, times=times.get(name))
        # it has much to spare, so nothing is to be said where there are too many requests
        if risk.draws or name in close:
            risks[name] = risk
    return risks


def _without_holes(
    memory: MemoryReport,
    programs: Mapping[str, Program],
    risks: Mapping[str, steady.Risk],
    limit: int,
    settings: allocator.Settings,
    num_ranks: int,
    times: Mapping[str, OpTimes | None],
) -> tuple[TriedChange, ...]:
    """Expandable segments, where draws run out and the same get through with them."""
    runs_out = any(risk.failed for risk in risks.values())
    if settings.expandable or not runs_out:
        return ()
    expandable = dataclasses.replace(settings, expandable=True)
    largest_need = 0
    for name, figures in memory.classes.items():
        need = needed(figures)
        if name in risks and risks[name].failed:
            segments = figures["peak_reserved"] + limit - need
            with_pages = steady.risk(programs[name], segments, expandable, times=times.get(name))
            # holes are not the reason
            if with_pages.failed:
                return ()
            between = blocks.reserved(programs[name], expandable)
            held = blocks.expected_reserved(between, num_ranks)
            need += held - figures["peak_reserved"]
        largest_need = max(largest_need, need)
    return (TriedChange(EXPANDABLE, largest_need, largest_need <= limit, 0),)


def _tried(
    memory: MemoryReport,
    programs: Mapping[str, Program],
    needs: Mapping[str, int],
    limit: int,
    settings: allocator.Settings,
    priced: PricedGraph | None,
    num_ranks: int,
) -> tuple[TriedChange, ...]:
    """Try each change on the classes that may need most after it.

    A change of which a part is enough is left out, and so is one after which as much is needed.
    """
    reruns: dict[str, remedies.Recomputation | None] = {}
    need_of_words: dict[str, int] = {}  # after each change, of the classes so far
    largest_need = max(needs.values())
    for name, need in sorted(needs.items(), key=lambda item: -item[1]):
        if need_of_words and need <= min(need_of_words.values()):
            break
        freed: dict[str, int] = {}
        for remedy in remedies.remedies(programs[name], memory.job, settings, num_ranks):
            freed[remedy.words] = remedy.reserved
            reruns[remedy.words] = remedy.how
        if not settings.expandable:
            expandable = dataclasses.replace(settings, expandable=True)
            between = blocks.reserved(programs[name], expandable)
            held = blocks.expected_reserved(between, num_ranks)
            freed[EXPANDABLE] = memory.classes[name]["peak_reserved"] - held
            reruns[EXPANDABLE] = None
        for words in reruns:
            # a change that only a later class has leaves the classes before as they are
            need_before = 0 if need == largest_need else largest_need
            need_then = need - freed.get(words, 0)
            need_of_words[words] = max(need_of_words.get(words, need_before), need_then)
    tried = []
    for words, num_bytes in need_of_words.items():
        if num_bytes >= largest_need:
            continue
        if _is_needless(words, need_of_words, limit):
            continue
        recomputation = reruns[words]
        slower: int | None = 0
        if recomputation is not None:
            slower = None if priced is None else _slower(priced, recomputation)
        tried.append(TriedChange(words, num_bytes, num_bytes <= limit, slower))
    return tuple(sorted(tried, key=lambda change: change.order))


def _is_needless(words: str, need_of_words: Mapping[str, int], limit: int) -> bool:
    """Return whether a part of a change is enough, or frees as much as the whole.

    The words of a change begin or end with those of its parts: a mask that is left out, and what
    runs again without it.
    """
    enough = max(limit, need_of_words[words])
    for part, need in need_of_words.items():
        is_part = words.startswith(f"{part} ") or words.endswith(f" {part}")
        if is_part and need <= enough:
            return True
    return False


def _slower(priced: PricedGraph, how: remedies.Recomputation) -> int:
    """Return ns that an iteration takes longer if backwards run the part's forward again first."""
    timeline, table = priced.timeline, table_of(priced.machine)
    prices = timeline.prices
    compute = [ns.copy() for ns in prices.compute]
    host = [ns.copy() for ns in prices.host]
    for index, program in enumerate(timeline.graph.program_list):
        spans = timeline.spans(index)
        took_ns = np.zeros(len(program))
        took_ns[spans["op"]] = spans["end"] - spans["start"]
        segments = np.flatnonzero(program.ops["name"] == CODE["compute"])
        repeated_ops: set[int] = set()  # layers of one segment share it
        for forward in remedies.reruns(program, how):
            # the segment in which the backward begins takes the time
            following = int(np.searchsorted(segments, forward.before))
            segment = segments[min(following, len(segments) - 1)]
            for op, is_whole in zip(forward.ops, forward.is_whole, strict=True):
                if op in repeated_ops:
                    continue
                repeated_ops.add(op)
                part = 1.0
                if not is_whole:
                    note = program.strings[program.ops["note"][op]]
                    part = _part(note, how.kernels, priced.machine, table)
                compute[index][segment] += round(took_ns[op] * part)
                host[index][segment] += round(int(prices.host[index][op]) * part)
    changed = dataclasses.replace(prices, compute=tuple(compute), host=tuple(host))
    return timeline.iteration_with(durations_of(timeline.dag, changed)) - timeline.iteration_ns


def _part(note: str, kernels: str, machine: Machine, table: OpTable | None) -> float:
    """Return the part of a segment's time that some of its kernels take; 0: it has none of them.

    Args:
        note: Of the segment: its kernels, with "; " between.
        kernels: Pattern of the kernels that run again.
        machine: Of the job.
        table: What kernels take there.
    """
    matches = re.finditer(rf"(?:^|(?<=; ))(?:{kernels})", note)
    repeated_note = "; ".join(match[0] for match in matches)
    if not repeated_note:
        return 0.0
    repeated_ns = parts_of(repeated_note, 0, 0, 0, machine, table).kernels
    segment_ns = parts_of(note, 0, 0, 0, machine, table).kernels
    return repeated_ns / segment_ns
