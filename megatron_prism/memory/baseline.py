"""Baselines of a job's memory: measured, written, read and compared.

In : the programs of a job, and what its devices take.  Out: JSON that a person reviews (sorted
keys, whole bytes, one value a line), or Changes between two of them.  One-sided: growth of
allocated bytes beyond the tolerance fails, shrinking only says that the baseline may be updated;
reserved is reported and not guarded, since it is modelled.  Baselines of another job, version or
tier are never compared.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal, TypedDict, cast

import msgspec
import numpy as np

from megatron_prism.core import foreign, job_settings
from megatron_prism.core.errors import UsageError
from megatron_prism.core.files import rendered, write_whole
from megatron_prism.core.ops import CODED
from megatron_prism.core.program import Program, Programs
from megatron_prism.core.units import counted
from megatron_prism.core.world import World, format_ranks
from megatron_prism.graph.classes import equal_programs
from megatron_prism.memory import allocator, nccl_buffers, routing
from megatron_prism.memory.peaks import (
    KINDS,
    HeldMemory,
    class_name,
    described,
    estimates,
    graph_pools,
    growth,
    known_peak,
    reserved,
)

SCHEMA = "prism.mem-baseline/1"
LEAK = 1 << 20  # bytes that an iteration may leave behind
TOP = 48  # origins that a class lists; what is smaller is summed up
PROVENANCE = {
    "peak_allocated": "modelled: live bytes of shapes, before the allocator's rounding",
    "peak_reserved": "modelled: the caching allocator's rules, pools per stream, from the "
    "process's first request if the slices have it; midway between a "
    "device that keeps up and one far behind",
    "peak_device": "unknown: no calibration of context, workspaces and NCCL",
}
# a control character would end a line of a report, or colour it
_Text = Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
_Bytes = foreign.Natural
_UNKNOWN = PROVENANCE["peak_device"]


class PeakPlace(TypedDict):
    """Where a class peaks."""

    step: _Text
    phase: _Text
    microbatch: int
    chunk: int
    op: _Text
    site: _Text


class BaselineOrigin(TypedDict):
    """A ``HeldMemory``, as JSON has it."""

    kind: _Text
    module: _Text
    site: _Text
    num_bytes: _Bytes
    count: _Bytes


class DrawnFigures(TypedDict):
    """Allocated bytes of a class over ``draws`` iterations with routing by ``law``.

    over  : chance that a rank exceeds the limit in an iteration; None without a limit
    group : that one of the ranks that share the experts does
    """

    law: _Text
    draws: int
    capacity: float | None
    p50: _Bytes
    p95: _Bytes
    most: _Bytes
    over: float | None
    group: float | None


class OptionalFigures(TypedDict, total=False):
    """What releases before this one did not write; ``nccl`` and the device's need a calibration."""

    reserved_between: list[int]
    earlier: bool  # the peak is before the iteration that is recorded
    graph_pools: _Bytes  # segments that CUDA graphs' pools keep
    growth: int | None
    growth_top: list[BaselineOrigin]
    nccl: _Bytes | None
    nccl_between: list[int] | None
    peak_device: _Bytes | None
    drawn: DrawnFigures | None
    real: _Bytes  # peak of allocated bytes of real processes of this class


class ClassMemoryFigures(OptionalFigures):
    """Of one class of ranks; bytes."""

    ranks: _Text
    count: _Bytes
    peak_allocated: _Bytes
    peak_reserved: _Bytes
    at: PeakPlace
    by_category: dict[str, _Bytes]
    top: list[BaselineOrigin]
    smaller: _Bytes


@dataclass(frozen=True)
class MemoryReport:
    """The peak memory of a job.

    job     : what decides the numbers: arguments, versions, tier
    classes : name -> figures of that class of ranks, bytes
    device  : what ``peak_device`` is made of
    """

    job: Mapping[str, str]
    classes: Mapping[str, ClassMemoryFigures]
    device: str = _UNKNOWN

    def __repr__(self) -> str:
        peaks = (f"{name} {one['peak_allocated']:,} B" for name, one in self.classes.items())
        return f"<MemoryReport of {self.job.get('world', 'a job')}: {', '.join(peaks)}>"

    @property
    def provenance(self) -> dict[str, str]:
        """Level -> what its bytes are made of, and what of it is estimated."""
        with_graphs = any(one.get("graph_pools") for one in self.classes.values())
        unknown = estimates(job_settings.line_of(self.job), with_graphs)
        allocated = described(PROVENANCE["peak_allocated"], unknown)
        return {**PROVENANCE, "peak_allocated": allocated, "peak_device": self.device}

    def to_rows(self) -> list[dict[str, object]]:
        """A row for every class, without the lists of its tensors; bytes."""
        keys = ["ranks", "count", "peak_allocated", "peak_reserved", "nccl", "peak_device", "at",
                "by_category"]  # fmt: skip
        if any("drawn" in one for one in self.classes.values()):
            keys.append("drawn")
        return [{"class": name, **{key: one.get(key) for key in keys}}
                for name, one in self.classes.items()]  # fmt: skip

    def to_text(self) -> str:
        """A line for every class, and where the figures are from."""
        return rendered("report.fit:render_memory", self, str)

    def to_json(self) -> dict[str, object]:
        """The peaks as plain values: whole bytes, by class."""
        return {
            "schema": "prism.memory_peaks/1",
            "classes": dict(self.classes),
            "provenance": self.provenance,
        }


@dataclass(frozen=True)
class Growth:
    """Bytes that one origin holds more (or fewer) at the peak than before."""

    kind: str
    module: str
    site: str
    num_bytes: int


@dataclass(frozen=True)
class Change:
    """One class against its baseline.

    what    : grown, shrunk, same, appeared, vanished, over (its limit: ``level``), leaks
    before  : peak of allocated bytes in the baseline, None if the class appeared
    by_kind : bytes per kind, after - before, where they differ
    origins : the same per origin, largest growth first
    moved   : "1B2 -> O" if the peak is at another step
    real    : peak of a real run of what the baseline is of, None if it has none
    """

    what: str
    name: str
    ranks: str
    before: int | None
    after: int | None
    by_kind: Mapping[str, int]
    origins: tuple[Growth, ...]
    moved: str = ""
    level: str = "allocated"
    real: int | None = None

    @property
    def fails(self) -> bool:
        return self.what in ("grown", "appeared", "vanished", "over", "leaks")


@dataclass(frozen=True)
class Draws:
    """What to draw: ``count`` iterations with routing by ``law``.

    capacity : --moe-expert-capacity-factor; None: the job's own
    limit    : bytes of the device
    """

    law: routing.Law
    count: int
    capacity: float | None = None
    limit: int | None = None


def peak_memory(
    programs: Programs,
    *,
    alloc_conf: str = "",
    device: str | os.PathLike[str] | nccl_buffers.BufferCalibration | None = nccl_buffers.DEFAULT,
    draws: Draws | None = None,
) -> MemoryReport:
    """Find the peak memory of every class of ranks, and what is alive then.

    Args:
        programs: what ``load`` or ``capture`` returned.
        alloc_conf: PYTORCH_CUDA_ALLOC_CONF of the job.
        device: what context, libraries and NCCL take: a shipped calibration, a file, or None:
            device bytes are unknown.
        draws: iterations of an MoE job to draw the routing of.

    Raises:
        UsageError: the programs recorded no memory or did not train, or there is nothing to draw.
    """
    settings = allocator.Settings.parse(alloc_conf)
    optimizer = CODED["phase"].index("optimizer")
    for program in programs.programs:
        if not (program.ops["phase"] == optimizer).any():
            what = f"rank {program.rank} made no optimizer step: such a run is no baseline"
            raise UsageError(what, fix="capture a whole iteration: prism capture RECIPE -o DIR")
    job = {**programs.source, "world": str(programs.world), "alloc_conf": alloc_conf}
    if not isinstance(device, nccl_buffers.BufferCalibration):
        known = nccl_buffers.BufferCalibration()
        device = known if device is None else nccl_buffers.read(device)
    of = programs.program_of
    same = np.where(of < 0, -1, equal_programs(programs.programs)[of])
    classes: dict[str, ClassMemoryFigures] = {}
    for first in np.sort(np.unique(same, return_index=True)[1]).tolist():
        if (index := int(same[first])) < 0:
            continue
        program, ranks = programs.programs[index], np.flatnonzero(same == index).tolist()
        beyond = nccl_buffers.beyond_reserved(programs, index, device)
        name = class_name(programs.world, ranks)
        figures = classes[name] = _figures(program, ranks, settings, beyond)
        if draws is not None:
            more = needed(figures) - figures["peak_allocated"]
            figures["drawn"] = _drawn(program, draws, _capacity(job, draws), more)
    if draws is not None and not any(figures["drawn"] for figures in classes.values()):
        raise _nothing_to_draw(programs)
    return MemoryReport(job, classes, device.provenance())


def _nothing_to_draw(programs: Programs) -> UsageError:
    """Say why no slice of ``programs`` tells which allocations depend on routing."""
    what = "the slices do not say which allocations depend on routing"
    called_dispatchers = any(len(program.routes) for program in programs.programs)
    if called_dispatchers:
        # tokens went to experts, and no iteration with other loads came, or it was another one
        why = "no iteration with other loads of the experts was recorded that can be compared"
        fix = "capture them again with this release on tier meta, --train-iters 4 or more"
        return UsageError(f"{what}: {why}", fix=fix)
    tier = programs.source.get("tier", "meta")
    if tier != "meta":
        # a device computes its routing: nobody can ask it for another
        fix = "prism capture --prism-tier meta of the same job"
        return UsageError(f"{what}: they are of tier {tier}", fix=fix)
    why = "no call of a dispatcher that sizes its buffers by the routing is in them"
    fix = "an MoE job with an alltoall or allgather dispatcher; no --draws for others"
    return UsageError(f"{what}: {why}", fix=fix)


def _capacity(job: Mapping[str, str], draws: Draws) -> float | None:
    """What is asked for, else what the job's arguments say."""
    if draws.capacity is not None:
        return draws.capacity
    for name, value in job_settings.values(job_settings.line_of(job)).items():
        if name.replace("-", "_").endswith("moe_expert_capacity_factor") and value != "None":
            return float(value)
    return None


def _drawn(
    program: Program, draws: Draws, capacity: float | None, more: int
) -> DrawnFigures | None:
    """``more``: what the device takes beyond allocated bytes."""
    found = routing.draw(program, draws.law, draws.count, capacity=capacity)
    if found is None:
        return None
    over = (None, None) if draws.limit is None else found.beyond(draws.limit - more)
    return {
        "law": found.law,
        "draws": draws.count,
        "capacity": capacity,
        "p50": found.quantile(0.5),
        "p95": found.quantile(0.95),
        "most": int(found.ranks.max()),
        "over": over[0],
        "group": over[1],
    }


def _origins(holdings: tuple[HeldMemory, ...]) -> list[BaselineOrigin]:
    """The largest."""
    return [cast(BaselineOrigin, asdict(one)) for one in holdings[:TOP]]


def _figures(
    program: Program,
    ranks: list[int],
    settings: allocator.Settings,
    beyond: nccl_buffers.BeyondReserved,
) -> ClassMemoryFigures:
    top, left, between = known_peak(program), growth(program), reserved(program, settings)
    op, segments = top.op, sum(between) // 2
    return {
        "ranks": format_ranks(ranks),
        "count": len(ranks),
        "peak_allocated": top.num_bytes,
        "peak_reserved": segments,
        "reserved_between": list(between),
        "earlier": top.earlier,
        "graph_pools": graph_pools(program, settings),
        "at": {
            "step": op.label,
            "phase": op.phase,
            "microbatch": op.microbatch,
            "chunk": op.chunk,
            "op": op.name,
            "site": top.site,
        },
        "by_category": top.by_kind,
        "top": _origins(top.holdings),
        "smaller": sum(h.num_bytes for h in top.holdings[TOP:]),
        "growth": None if left is None else left.num_bytes,
        "growth_top": [] if left is None else _origins(left.origins),
        "nccl": beyond.nccl,
        "nccl_between": None if beyond.between is None else list(beyond.between),
        "peak_device": None if beyond.num_bytes is None else segments + beyond.num_bytes,
    }


def needed(one: ClassMemoryFigures) -> int:
    """Bytes of the device that a class takes, of its allocator where those are not known."""
    device = one.get("peak_device")
    return one["peak_reserved"] if device is None else device


def beside_tensors(one: ClassMemoryFigures) -> dict[str, int]:
    """What ``needed`` has beside the tensors of the peak: what pools of CUDA graphs keep beyond the
    graphs' tensors, the allocator's cache, NCCL, context."""
    nccl = one.get("nccl") or 0
    beyond = one["peak_reserved"] - one["peak_allocated"]
    in_no_tensor = one.get("graph_pools", 0) - one["by_category"].get("graph", 0)
    pools = min(max(in_no_tensor, 0), max(beyond, 0))
    return {
        "pools": pools,
        "cache": beyond - pools,
        "nccl": nccl,
        "context": needed(one) - one["peak_reserved"] - nccl,
    }


def add_real(report: MemoryReport, world: World, rank: int | None, num_bytes: int) -> None:
    """Keep the peak of a real process of ``rank`` with its class; UsageError if it has none, or is
    not known and there are several."""
    if rank is None and len(report.classes) > 1:
        raise UsageError("the snapshot's name says no rank", fix="name it rank0.pickle, or so")
    for one in report.classes.values():
        if rank is None or rank in world.select(one["ranks"]):
            one["real"] = max(one.get("real", 0), num_bytes)
            return
    raise UsageError(f"no slice stands for rank {rank}", fix="a snapshot of this very job")


def first_program(programs: Programs, one: ClassMemoryFigures) -> Program:
    """The program of a class."""
    return programs.of(int(re.split(r"\D", one["ranks"], maxsplit=1)[0]))


def save(baseline: MemoryReport, path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Write it, whole or not at all; UsageError if the place is taken."""
    value = {"schema": SCHEMA, "job": baseline.job, "classes": baseline.classes,
             "provenance": baseline.provenance}  # fmt: skip
    return write_whole(path, json.dumps(value, indent=1, sort_keys=True) + "\n", force=force)


# -- reading --------------------------------------------------------------------------------------
def load(path: str | os.PathLike[str]) -> MemoryReport:
    """What ``save`` wrote.  UsageError for anything else."""
    fix = f"write it again: prism memory record PROGRAMS -o {path} --force"
    absent = f"prism memory record PROGRAMS -o {path}"
    with foreign.reading(path, "a baseline of memory", fix, absent=absent):
        found = foreign.read_json(path, _Stored)
        for name, one in found.classes.items():
            _check(name, one)
    return MemoryReport(found.job, found.classes, found.provenance.get("peak_device", _UNKNOWN))


class _Stored(msgspec.Struct):
    schema: Literal["prism.mem-baseline/1"]
    job: Annotated[dict[str, str], msgspec.Meta(min_length=1)]
    classes: Annotated[dict[_Text, ClassMemoryFigures], msgspec.Meta(min_length=1)]
    provenance: dict[str, str] = {}


def _check(name: str, one: ClassMemoryFigures) -> None:
    """ValueError unless the figures add up."""
    kinds, whole = one["by_category"], one["peak_allocated"]
    # releases that knew no graphs have no category of them
    if {*kinds, "graph"} != set(KINDS):
        raise ValueError(f"classes {name!r}: its categories are not {', '.join(KINDS)}")
    parts = sum(entry["num_bytes"] for entry in one["top"]) + one["smaller"]
    if sum(kinds.values()) != whole or parts != whole:
        raise ValueError(f"classes {name!r}: its parts do not add up to {whole}")


# -- comparing ------------------------------------------------------------------------------------
def compare(
    before: MemoryReport,
    after: MemoryReport,
    *,
    tol_bytes: int = 0,
    limit: int | None = None,
    leak_bytes: int = LEAK,
    any_job: bool = False,
) -> list[Change]:
    """Every class of both, in the order of their ranks.

    tol_bytes : growth that is still no failure
    limit     : bytes that device memory may not exceed; where it is unknown, reserved memory
    leak_bytes: what an iteration may leave behind (the last losses are a few bytes)
    any_job   : compare although arguments, versions or tier differ; else UsageError
    """
    if not any_job:
        _same_job(before.job, after.job)
    changes = []
    for name in dict.fromkeys([*after.classes, *before.classes]):
        old, new = before.classes.get(name), after.classes.get(name)
        changes.append(_change(name, old, new, tol_bytes))
        if new is None:
            continue
        if (new.get("growth") or 0) > leak_bytes:
            left = tuple(Growth(h["kind"], h["module"], h["site"], h["num_bytes"])
                         for h in new["growth_top"])  # fmt: skip
            changes.append(Change("leaks", name, new["ranks"], 0, new["growth"], {}, left))
        if limit is not None and (size := needed(new)) > limit:
            level = "reserved" if new.get("peak_device") is None else "device"
            over = Change("over", name, new["ranks"], limit, size, {}, (), level=level)
            changes.append(over)
    return changes


def _same_job(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    differ = []
    for key in sorted({*before, *after}):
        if key in job_settings.KEYS:
            differ += job_settings.differences(key, before.get(key), after.get(key, ""))
        elif before.get(key) != after.get(key):
            differ.append(f"{key} {before.get(key, 'unknown')}, now {after.get(key, 'unknown')}")
    if differ:
        what = f"the baseline is of another job, the two are not comparable: {'; '.join(differ)}"
        fix = "prism memory update takes the new one, prism compare A B shows both"
        raise UsageError(what, fix=fix)


def _change(
    name: str, old: ClassMemoryFigures | None, new: ClassMemoryFigures | None, tol_bytes: int
) -> Change:
    if old is None:
        assert new is not None
        return Change("appeared", name, new["ranks"], None, new["peak_allocated"], {}, ())
    if new is None:
        return Change("vanished", name, old["ranks"], old["peak_allocated"], None, {}, ())
    first, second = old["peak_allocated"], new["peak_allocated"]
    what = "same" if first == second else "shrunk" if second < first else "grown"
    if what == "grown" and second - first <= tol_bytes:
        what = "tolerated"
    kinds = {}
    for kind in KINDS:
        more = new["by_category"].get(kind, 0) - old["by_category"].get(kind, 0)
        if more:
            kinds[kind] = more
    steps = old["at"]["step"], new["at"]["step"]
    moved = f"{steps[0]} -> {steps[1]}" if steps[0] != steps[1] else ""
    if old["count"] != new["count"]:
        moved += f"{'; ' if moved else ''}{old['count']} -> {counted(new['count'], 'rank')}"
    return Change(what, name, new["ranks"], first, second, kinds, _growths(old, new), moved,
                  real=old.get("real"))  # fmt: skip


def _growths(old: ClassMemoryFigures, new: ClassMemoryFigures) -> tuple[Growth, ...]:
    """What each origin holds more; a line that only moved within its file is the same origin."""
    exact: Counter[tuple[str, str, str]] = Counter()
    for sign, side in ((-1, old), (1, new)):
        for h in side["top"]:
            exact[h["kind"], h["module"], h["site"]] += sign * h["num_bytes"]
    lines: dict[tuple[str, str, str], list[tuple[int, str]]] = {}
    for (kind, module, site), size in exact.items():
        lines.setdefault((kind, module, re.sub(r":\d+$", "", site)), []).append((size, site))
    rest = new["smaller"] - old["smaller"]
    found = [Growth("other", "smaller ones", "", rest)] if rest else []
    for (kind, module, _), moved in lines.items():
        if size := sum(size for size, _ in moved):
            found.append(Growth(kind, module, max(moved, key=lambda one: max(one[0], -1))[1], size))
    return tuple(sorted(found, key=lambda g: (-g.num_bytes, g.kind, g.module, g.site)))
