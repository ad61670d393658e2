"""Prices: a duration for every op and matched call of a world, each with its provenance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from megatron_prism.core.errors import UsageError
from megatron_prism.core.units import counted
from megatron_prism.graph.world_graph import CallKind, WorldGraph
from megatron_prism.replay.costs.collectives import (
    EXPERT_CALLS,
    Calibration,
    Shape,
    calls_of,
    expert_call_ns,
    measured_elsewhere,
    modelled,
)
from megatron_prism.replay.costs.host import host_ns, host_sources
from megatron_prism.replay.costs.kernels import (
    MEASURED,
    MIXED,
    OPS,
    ROOFLINE,
    UNKNOWN,
    compute_ns,
    table_of,
)
from megatron_prism.replay.costs.machine import Machine
from megatron_prism.replay.costs.nccl_settings import NCCL_ENV, NcclSettings, parse

GIVEN = "given: times of segments in the programs, which do not say who measured them, or where"
NO_TIME = "unknown: segments that say neither how long they take nor what they compute"


# sources of calls: whose times the programs know, and modelled ones between nodes
_OWN, _BETWEEN, _ELSEWHERE, _EXPERTS = 11, 12, 13, 14


@dataclass(frozen=True)
class Prices:
    """Durations in ns, whole and not negative.

    compute         : per class int64 [ops]; 0 for ops that are no segments
    compute_source  : per class uint8 [ops], index into ``sources``
    collective_ns     : int64 [matched calls], once everybody has come
    collective_source  : uint8 [matched calls], index into ``sources``
    sources         : provenance, in words
    lead, host      : per class int64 [ops], how long the host takes until the device may begin an
                      op and then never waits for a launch, and from then on; 0 throughout for
                      programs whose segments have the host's delays in them
    host_source     : per class uint8 [ops], index into ``sources``
    peak            : flops per second that a GPU of the machine has on its data sheet in bf16; 0:
                      unknown
    peaks           : the same of other types: tf32, fp32
    """

    compute: tuple[np.ndarray, ...]
    compute_source: tuple[np.ndarray, ...]
    collective_ns: np.ndarray
    collective_source: np.ndarray
    sources: tuple[str, ...]
    lead: tuple[np.ndarray, ...] = ()
    host: tuple[np.ndarray, ...] = ()
    host_source: tuple[np.ndarray, ...] = ()
    peak: float = 0.0
    peaks: Mapping[str, float] = field(default_factory=dict)

    def used(self) -> tuple[str, ...]:
        """The provenances that some duration above 0 rests on, those of computing first."""
        parts = [*zip(self.compute, self.compute_source, strict=True),
                 (self.collective_ns, self.collective_source),
                 *zip(self.lead, self.host_source, strict=True),
                 *zip(self.host, self.host_source, strict=True)]  # fmt: skip
        codes = {int(code) for ns, source in parts for code in np.unique(source[ns > 0])}
        return tuple(self.sources[code] for code in sorted(codes))


def price_ops(
    graph: WorldGraph, machine: Machine, calibration: Calibration | None = None
) -> Prices:
    """Prices of every op: measured segments, then the op table, then roofline; measured calls, then
    the model, as NCCL's settings in the programs' source let it.  UsageError for such that leave a
    call no way.
    """
    calibration = calibration or Calibration()
    nccl = parse(graph.programs.source.get(NCCL_ENV, ""))
    with_nccl = f" with {nccl}" if nccl else ""
    if nccl.unmodelled:
        with_nccl += f", of which the model ignores {', '.join(nccl.unmodelled)}"
    tier = graph.programs.source.get("device", graph.programs.source.get("tier", ""))
    table, of_calls = (
        getattr(one, "source", "it has none")
        for one in (table_of(machine), calls_of(machine.calls))
    )
    sources = (
        f"measured: segments of the slices ({tier})" if tier else GIVEN,
        f"modelled: roofline of {machine.name} ({machine.source})",
        "none: not a segment",
        f"measured: calls ({calibration.source})",
        f"modelled: NCCL's alpha-beta on {machine.name}{with_nccl} ({machine.source})",
        f"modelled: op table of {machine.name} ({table})",
        f"modelled: op table and roofline of {machine.name}, for kernels that the table lacks"
        f" ({table}; {machine.source})",
        f"modelled: NCCL's alpha-beta{with_nccl}, times the calls that were measured with"
        f" {calibration.nccl or 'none of them'} ({calibration.source})",
        f"{NO_TIME}, so each counts as the shortest kernel",
        *host_sources(calibration, tier or "nobody says where", graph.programs.source),
        f"measured: times of calls in the slices ({tier})"
        if tier
        else GIVEN.replace("segments", "calls"),
        f"modelled: NCCL's alpha-beta between nodes on {machine.name}{with_nccl}"
        f" ({machine.source})",
        f"modelled: calls of other GPUs of this kind{with_nccl} ({of_calls})",
        f"modelled: HybridEP's published rates on {machine.name} ({machine.source})",
    )
    _check_fits(graph, machine)
    once = {p: compute_ns(graph.programs.programs[p], machine) for p in set(graph.classes.programs)}
    pairs = [once[program] for program in graph.classes.programs]
    hosts = {
        p: host_ns(graph.programs.programs[p], calibration, _OWN - 2)
        for p in set(graph.classes.programs)
    }
    issued = [hosts[program] for program in graph.classes.programs]
    meetings, collective_source = _meetings(graph, machine, calibration, nccl)
    assert (MEASURED, ROOFLINE, OPS, MIXED, UNKNOWN) == (0, 1, 5, 6, 8)  # the order of ``sources``
    assert len(sources) - 1 == _EXPERTS
    return Prices(
        compute=tuple(ns for ns, _ in pairs),
        compute_source=tuple(source for _, source in pairs),
        collective_ns=meetings,
        collective_source=collective_source,
        sources=sources,
        lead=tuple(lead for lead, _, _ in issued),
        host=tuple(host for _, host, _ in issued),
        host_source=tuple(source for _, _, source in issued),
        peak=machine.peak,
        peaks=machine.peaks,
    )


def _check_fits(graph: WorldGraph, machine: Machine) -> None:
    """UsageError for a world of several nodes on a machine without a network."""
    size, per_node = graph.programs.world.size, machine.gpus_per_node
    if size > per_node and not machine.network_rate:
        nodes, one = -(-size // per_node), counted(per_node, "rank")
        what = f"{size:,} ranks need {nodes:,} nodes, and {machine.name} has no network between "
        fix = "a world that fits, or a machine with a network: --machine h200"
        raise UsageError(f"{what}nodes: it holds {one}", fix=fix)


def _meetings(
    graph: WorldGraph, machine: Machine, calibration: Calibration, nccl: NcclSettings
) -> tuple[np.ndarray, np.ndarray]:
    """Price of every matched call, looked up once per kind of call and size."""
    calls, firsts = graph.call_kinds, graph.matched_calls.start[:-1]
    columns = calls.of, calls.num_bytes, calls.least
    keys = list(zip(*(each[firsts].tolist() for each in columns), strict=True))
    known = {
        (kind, size, least): _call(calls.kinds[kind], size, least, machine, calibration, nccl)
        for kind, size, least in dict.fromkeys(keys)
    }
    ns, source = np.array([known[key] for key in keys], dtype=np.int64).reshape(-1, 2).T
    given = calls.ns[firsts]
    return (
        np.where(given >= 0, given, ns),
        np.where(given >= 0, _OWN, source).astype(np.uint8),
    )


def _call(
    kind: CallKind,
    num_bytes: int,
    least: int,
    machine: Machine,
    calibration: Calibration,
    nccl: NcclSettings,
) -> tuple[int, int]:
    shape = shape_of(kind, machine)
    if shape.size == 1:
        return 0, 4
    if kind.name in EXPERT_CALLS:
        return expert_call_ns(kind.name, shape, num_bytes, least, machine), _EXPERTS
    ns = modelled(kind.name, shape, num_bytes, machine, nccl)
    rows = ("exchange", kind.name) if kind.exchange else (kind.name,)
    for row in rows:
        measured = calibration.look_up(row, shape.size, num_bytes, shape.per_node)
        if measured is not None:
            if calibration.nccl is None or nccl.same_calls(calibration.nccl):
                return measured, 3
            then = modelled(kind.name, shape, num_bytes, machine, calibration.nccl)
            return round(measured * ns / max(1, then)), 7
    elsewhere = measured_elsewhere(rows, kind.name, shape, num_bytes, machine, nccl)
    if elsewhere is not None:
        return elsewhere, _ELSEWHERE
    return ns, _BETWEEN if shape.nodes > 1 else 4


def shape_of(kind: CallKind, machine: Machine) -> Shape:
    """How who takes part lies on the machine, by the fullest node."""
    _, per_node = np.unique(kind.ranks // machine.gpus_per_node, return_counts=True)
    return Shape(len(np.unique(kind.ranks)), int(per_node.max()))


def relabelled(
    source: np.ndarray, chosen: np.ndarray, what: str | Callable[[str], str], sources: list[str]
) -> np.ndarray:
    """Sources in which the chosen entries say ``what`` was assumed of them, or what it makes of
    theirs; extends ``sources``.
    """
    found = source.copy()
    for code in np.unique(source[chosen]).tolist():
        old = sources[code]
        text = f"assumed: {what}, of {old}" if isinstance(what, str) else what(old)
        if text not in sources:
            sources.append(text)
        found[chosen & (source == code)] = sources.index(text)
    return found
