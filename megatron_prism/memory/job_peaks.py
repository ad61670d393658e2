"""The peak memory of every class of a job's ranks, and what is alive then.

In : the programs of a job, and what its devices take.  Out: a ``MemoryReport``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, TypedDict, cast

import msgspec
import numpy as np

from megatron_prism.core import foreign
from megatron_prism.core.errors import UsageError
from megatron_prism.core.jobs import job_settings
from megatron_prism.core.programs.ops import CODED
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.core.rendering import renderer_of
from megatron_prism.core.world import format_ranks
from megatron_prism.graph.classes import equal_programs
from megatron_prism.memory import allocator, nccl_buffers, routing
from megatron_prism.memory.blocks import expected_reserved, graph_pools, reserved
from megatron_prism.memory.estimates import described, estimates
from megatron_prism.memory.peaks import HeldMemory, class_name, growth, known_peak

TOP = 48  # origins that a class lists; what is smaller is summed up
PROVENANCE = {
    "peak_allocated": "modelled: live bytes of shapes, before the allocator's rounding",
    "peak_reserved": "modelled: the caching allocator's rules, pools per stream, from the "
    "process's first request if the slices have it; midway between a "
    "device that keeps up and one far behind",
    "peak_device": "unknown: no calibration of context, workspaces and NCCL",
}
# a control character would end a line of a report, or colour it
Text = Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
Bytes = foreign.Natural
UNKNOWN_DEVICE = PROVENANCE["peak_device"]


class PeakPlace(TypedDict):
    """Where a class peaks."""

    step: Text
    phase: Text
    microbatch: int
    chunk: int
    op: Text
    site: Text


class BaselineOrigin(TypedDict):
    """A ``HeldMemory``, as JSON has it."""

    kind: Text
    module: Text
    site: Text
    num_bytes: Bytes
    count: Bytes


class DrawnFigures(TypedDict):
    """Allocated bytes of a class over ``draws`` iterations with routing by ``law``.

    over  : chance that a rank exceeds the limit in an iteration; None without a limit
    group : that one of the ranks that share the experts does
    """

    law: Text
    draws: int
    capacity: float | None
    p50: Bytes
    p95: Bytes
    most: Bytes
    over: float | None
    group: float | None


class OptionalFigures(TypedDict, total=False):
    """What releases before this one did not write; ``nccl`` and the device's need a calibration."""

    reserved_between: list[int]
    earlier: bool  # the peak is before the iteration that is recorded
    graph_pools: Bytes  # segments that CUDA graphs' pools keep
    growth: int | None
    growth_top: list[BaselineOrigin]
    nccl: Bytes | None
    nccl_between: list[int] | None
    peak_device: Bytes | None
    drawn: DrawnFigures | None
    real: Bytes  # peak of allocated bytes of real processes of this class


class ClassMemoryFigures(OptionalFigures):
    """Of one class of ranks; bytes."""

    ranks: Text
    count: Bytes
    peak_allocated: Bytes
    peak_reserved: Bytes
    at: PeakPlace
    by_category: dict[str, Bytes]
    top: list[BaselineOrigin]
    smaller: Bytes


_ROW_KEYS = (
    "ranks",
    "count",
    "peak_allocated",
    "peak_reserved",
    "nccl",
    "peak_device",
    "at",
    "by_category",
)


@dataclass(frozen=True)
class MemoryReport:
    """The peak memory of a job.

    job     : what decides the numbers: arguments, versions, tier
    classes : name -> figures of that class of ranks, bytes
    device  : what ``peak_device`` is made of
    """

    job: Mapping[str, str]
    classes: Mapping[str, ClassMemoryFigures]
    device: str = UNKNOWN_DEVICE

    def __repr__(self) -> str:
        peaks = []
        for name, figures in self.classes.items():
            peaks.append(f"{name} {figures['peak_allocated']:,} B")
        return f"<MemoryReport of {self.job.get('world', 'a job')}: {', '.join(peaks)}>"

    @property
    def provenance(self) -> dict[str, str]:
        """Level -> what its bytes are made of, and what of it is estimated."""
        with_graphs = any(figures.get("graph_pools") for figures in self.classes.values())
        unknown = estimates(job_settings.line_of(self.job), with_graphs)
        allocated = described(PROVENANCE["peak_allocated"], unknown)
        return {**PROVENANCE, "peak_allocated": allocated, "peak_device": self.device}

    def to_rows(self) -> list[dict[str, object]]:
        """A row for every class, without the lists of its tensors; bytes."""
        keys = list(_ROW_KEYS)
        if any("drawn" in figures for figures in self.classes.values()):
            keys.append("drawn")
        rows = []
        for name, figures in self.classes.items():
            row: dict[str, object] = {"class": name}
            for key in keys:
                row[key] = figures.get(key)
            rows.append(row)
        return rows

    def to_text(self) -> str:
        """A line for every class, and where the figures are from."""
        text: str = renderer_of(self).text(self)
        return text

    def to_json(self) -> dict[str, object]:
        """The peaks as plain values: whole bytes, by class."""
        return {
            "schema": "prism.memory_peaks/1",
            "classes": dict(self.classes),
            "provenance": self.provenance,
        }


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
    if draws is not None:
        _check_layers(programs, draws)
    settings = allocator.Settings.parse(alloc_conf)
    optimizer = CODED["phase"].index("optimizer")
    # memory before an optimizer step lacks the optimizer's states
    for program in programs.programs:
        if not (program.ops["phase"] == optimizer).any():
            message = f"rank {program.rank} made no optimizer step: such a run is no baseline"
            raise UsageError(message, fix="capture a whole iteration: prism capture RECIPE -o DIR")
    job = {**programs.source, "world": str(programs.world), "alloc_conf": alloc_conf}
    # a calibration, its name or file, or none
    if not isinstance(device, nccl_buffers.BufferCalibration):
        if device is None:
            device = nccl_buffers.BufferCalibration()
        else:
            device = nccl_buffers.read(device)
    # rank -> number of the first program that is equal to the rank's; -1: no program
    of = programs.program_of
    same = np.where(of < 0, -1, equal_programs(programs.programs)[of])
    classes: dict[str, ClassMemoryFigures] = {}
    first_ranks = np.sort(np.unique(same, return_index=True)[1])
    for first_rank in first_ranks.tolist():
        index = int(same[first_rank])
        if index < 0:
            continue
        program, ranks = programs.programs[index], np.flatnonzero(same == index).tolist()
        beyond = nccl_buffers.beyond_reserved(programs, index, device)
        name = class_name(programs.world, ranks)
        figures = _figures(program, ranks, settings, beyond, programs.world.size)
        classes[name] = figures
        if draws is not None:
            beyond_allocated = needed(figures) - figures["peak_allocated"]
            capacity = _capacity(job, draws)
            figures["drawn"] = _drawn(program, draws, capacity, beyond_allocated)
    if draws is not None and not any(figures["drawn"] for figures in classes.values()):
        raise _nothing_to_draw(programs)
    return MemoryReport(job, classes, device.provenance())


def _check_layers(programs: Programs, draws: Draws) -> None:
    """Refuse tokens by MoE layer of a pipeline: each stage numbers its own layers from 0."""
    if draws.law.is_by_layer and programs.world.pp > 1:
        message = "slices of pipeline stages do not say which MoE layers of the model are theirs"
        fix = "--routing with one list of tokens, for all MoE layers"
        raise UsageError(f"{draws.law.text}, by MoE layer: {message}", fix=fix)


def _nothing_to_draw(programs: Programs) -> UsageError:
    """Say why no slice of ``programs`` tells which allocations depend on routing."""
    message = "the slices do not say which allocations depend on routing"
    routed_programs = [program for program in programs.programs if len(program.routes)]
    if routed_programs and all(map(routing.has_all_experts, routed_programs)):
        message = "every rank has all experts, so the peak is the same for any routing"
        return UsageError(message, fix="prism fit without --draws")
    if routed_programs:
        # tokens went to experts, and no iteration with other loads came, or it was another one
        why = "no iteration with other loads of the experts was recorded that can be compared"
        fix = "capture them again with this release on tier meta, --train-iters 4 or more"
        return UsageError(f"{message}: {why}", fix=fix)
    tier = programs.source.get("tier", "meta")
    if tier != "meta":
        # a device computes its routing: nobody can ask it for another
        fix = "prism capture --prism-tier meta of the same job"
        return UsageError(f"{message}: they are of tier {tier}", fix=fix)
    why = "no call of a dispatcher that sizes its buffers by the routing is in them"
    fix = "an MoE job with an alltoall or allgather dispatcher; no --draws for others"
    return UsageError(f"{message}: {why}", fix=fix)


def _capacity(job: Mapping[str, str], draws: Draws) -> float | None:
    """What is asked for, else what the job's arguments say."""
    if draws.capacity is not None:
        return draws.capacity
    for name, value in job_settings.values(job_settings.line_of(job)).items():
        if name.replace("-", "_").endswith("moe_expert_capacity_factor") and value != "None":
            return float(value)
    return None


def _drawn(
    program: Program, draws: Draws, capacity: float | None, beyond_allocated: int
) -> DrawnFigures | None:
    """Draw the peaks of a class; None if its program does not say what routing changes.

    Args:
        program: Of the class.
        draws: What to draw.
        capacity: Of the job's dispatcher, or None.
        beyond_allocated: Bytes of the device beside allocated ones.
    """
    peaks = routing.draw(program, draws.law, draws.count, capacity=capacity)
    if peaks is None:
        return None
    over_of_rank: float | None = None
    over_of_group: float | None = None
    if draws.limit is not None:
        over_of_rank, over_of_group = peaks.beyond(draws.limit - beyond_allocated)
    return {
        "law": peaks.law,
        "draws": draws.count,
        "capacity": capacity,
        "p50": peaks.quantile(0.5),
        "p95": peaks.quantile(0.95),
        "most": int(peaks.ranks.max()),
        "over": over_of_rank,
        "group": over_of_group,
    }


def _origins(holdings: tuple[HeldMemory, ...]) -> list[BaselineOrigin]:
    """The largest."""
    return [cast(BaselineOrigin, asdict(holding)) for holding in holdings[:TOP]]


def _figures(
    program: Program,
    ranks: list[int],
    settings: allocator.Settings,
    beyond: nccl_buffers.BeyondReserved,
    num_ranks: int,
) -> ClassMemoryFigures:
    top = known_peak(program)
    left = growth(program)
    between = reserved(program, settings)
    segments = expected_reserved(between, num_ranks)
    op = top.op
    growth_bytes: int | None = None
    growth_origins: list[BaselineOrigin] = []
    # an iteration that is recorded alone says nothing of growth
    if left is not None:
        growth_bytes = left.num_bytes
        growth_origins = _origins(left.origins)
    nccl_between: list[int] | None = None
    if beyond.between is not None:
        nccl_between = list(beyond.between)
    peak_device: int | None = None
    if beyond.num_bytes is not None:
        peak_device = segments + beyond.num_bytes
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
        "growth": growth_bytes,
        "growth_top": growth_origins,
        "nccl": beyond.nccl,
        "nccl_between": nccl_between,
        "peak_device": peak_device,
    }


def needed(figures: ClassMemoryFigures) -> int:
    """Bytes of the device that a class takes, of its allocator where those are not known."""
    device = figures.get("peak_device")
    if device is None:
        return figures["peak_reserved"]
    return device


def beside_tensors(figures: ClassMemoryFigures) -> dict[str, int]:
    """What ``needed`` has beside the tensors of the peak: what pools of CUDA graphs keep beyond the
    graphs' tensors, the allocator's cache, NCCL, context.
    """
    nccl = figures.get("nccl") or 0
    beyond = figures["peak_reserved"] - figures["peak_allocated"]
    in_no_tensor = figures.get("graph_pools", 0) - figures["by_category"].get("graph", 0)
    pools = min(max(in_no_tensor, 0), max(beyond, 0))
    return {
        "pools": pools,
        "cache": beyond - pools,
        "nccl": nccl,
        "context": needed(figures) - figures["peak_reserved"] - nccl,
    }


def first_program(programs: Programs, figures: ClassMemoryFigures) -> Program:
    """The program of a class."""
    first_rank = int(re.split(r"\D", figures["ranks"], maxsplit=1)[0])
    return programs.of(first_rank)
