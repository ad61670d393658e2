"""Prices: a duration for every op and matched call of a world, each with its provenance."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
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
from megatron_prism.replay.costs.host import host_ns, host_sources, on_other_host
from megatron_prism.replay.costs.kernels import compute_ns, table_of
from megatron_prism.replay.costs.machine import Machine
from megatron_prism.replay.costs.nccl_settings import NCCL_ENV, NcclSettings, parse
from megatron_prism.replay.costs.provenance import Provenance

GIVEN = "given: times of segments in the programs, which do not say who measured them, or where"
NO_TIME = "unknown: segments that say neither how long they take nor what they compute"


@dataclass(frozen=True)
class Prices:
    """Durations in ns, whole and not negative.

    Attributes:
        compute: Of every class int64 [ops]; 0 for ops that are no segments.
        compute_source: Of every class uint8 [ops], index into ``sources``.
        collective_ns: int64 [matched calls], from when all members have come.
        collective_source: uint8 [matched calls], index into ``sources``.
        sources: Provenance in words: those of ``Provenance``, then those of what-ifs.
        lead: Of every class int64 [ops], how long the host takes until the device may begin an op;
            0 throughout for programs whose segments have the host's delays in them.
        host: Of every class int64 [ops], how long the host takes from then on, in which it never
            waits for a launch.
        host_source: Of every class uint8 [ops], index into ``sources``.
        peak: Flops per second in bf16 on the data sheet of the machine's GPU; 0: unknown.
        peaks: The same of other types: tf32, fp32.
        machine: Its name; "" if nobody said.
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
    machine: str = ""

    def on_hosts(self, factors: Sequence[float]) -> Prices:
        """Return the prices on other hosts; what they are from stays.

        Args:
            factors: Of every class, how many times as long its host takes (``on_other_host``).
        """
        lead: list[np.ndarray] = []
        host: list[np.ndarray] = []
        classes = zip(self.lead, self.host, self.compute, factors, strict=True)
        for lead_ns, rest_ns, device_ns, factor in classes:
            new_lead_ns, new_rest_ns = on_other_host(lead_ns, rest_ns, device_ns, factor)
            lead.append(new_lead_ns)
            host.append(new_rest_ns)
        return dataclasses.replace(self, lead=tuple(lead), host=tuple(host))

    def used(self) -> tuple[str, ...]:
        """List the provenances that a duration above 0 rests on, those of computing first."""
        durations = [*self.compute, self.collective_ns, *self.lead, *self.host]
        sources = [*self.compute_source, self.collective_source]
        sources += [*self.host_source, *self.host_source]  # of lead, and of host
        used_codes: set[int] = set()
        for ns, source in zip(durations, sources, strict=True):
            codes = np.unique(source[ns > 0])
            used_codes.update(codes.tolist())
        return tuple(self.sources[code] for code in sorted(used_codes))


def price_ops(
    graph: WorldGraph, machine: Machine, calibration: Calibration | None = None
) -> Prices:
    """Price every op and matched call of a world.

    A segment has its measured time, else that of the op table, else that of the roofline.  A call
    has its measured time, else that of the model, under the settings of NCCL in the programs.

    Args:
        graph: The joined programs.
        machine: The machine that the programs were measured on, whose model prices what was not.
        calibration: Measured times of calls.

    Raises:
        UsageError: The settings of NCCL leave a call no algorithm, or the machine is too small.
    """
    calibration = calibration or Calibration()
    nccl = parse(graph.programs.source.get(NCCL_ENV, ""))
    texts = _provenance_texts(graph.programs.source, machine, calibration, nccl)
    _check_fits(graph, machine)

    # classes of ranks share programs, so each program is priced once
    compute_of_program: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    host_of_program: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
    for number in set(graph.classes.programs):
        program = graph.programs.programs[number]
        compute_of_program[number] = compute_ns(program, machine)
        host_of_program[number] = host_ns(program, calibration, Provenance.HOST_OF_SEGMENT)
    computes = [compute_of_program[number] for number in graph.classes.programs]
    hosts = [host_of_program[number] for number in graph.classes.programs]

    collective_ns, collective_source = _price_matched_calls(graph, machine, calibration, nccl)
    return Prices(
        compute=tuple(ns for ns, _ in computes),
        compute_source=tuple(source for _, source in computes),
        collective_ns=collective_ns,
        collective_source=collective_source,
        sources=tuple(texts[provenance] for provenance in Provenance),
        lead=tuple(lead for lead, _, _ in hosts),
        host=tuple(ns for _, ns, _ in hosts),
        host_source=tuple(source for _, _, source in hosts),
        peak=machine.peak,
        peaks=machine.peaks,
        machine=machine.name,
    )


def _provenance_texts(
    source: Mapping[str, str], machine: Machine, calibration: Calibration, nccl: NcclSettings
) -> dict[Provenance, str]:
    """Put each provenance into words.

    Args:
        source: What the programs say of themselves.
        machine: The machine that is priced.
        calibration: Measured times of calls.
        nccl: Settings of NCCL in the programs.
    """
    texts = {Provenance.NO_SEGMENT: "none: not a segment"}
    texts[Provenance.UNKNOWN_SEGMENT] = f"{NO_TIME}, so each counts as the shortest kernel"
    texts |= _texts_of_programs(source, calibration)

    # the machine's model of segments
    table_source = getattr(table_of(machine), "source", "it has none")
    table_text = f"op table of {machine.name} ({table_source})"
    mixed_text = f"op table and roofline of {machine.name}, for kernels that the table lacks"
    roofline_text = f"roofline of {machine.name} ({machine.source})"
    texts[Provenance.ROOFLINE] = f"modelled: {roofline_text}"
    texts[Provenance.OP_TABLE] = f"modelled: {table_text}"
    texts[Provenance.OP_TABLE_AND_ROOFLINE] = (
        f"modelled: {mixed_text} ({table_source}; {machine.source})"
    )
    host_text = f"copies to the host and its memory, kernels by {mixed_text}"
    texts[Provenance.HOST_MEMORY] = f"modelled: {host_text}"

    # the model of NCCL, under the settings that it knows
    settings = ""
    if nccl:
        settings = f" with {nccl}"
    if nccl.unmodelled:
        settings += f", of which the model ignores {', '.join(nccl.unmodelled)}"
    model = "modelled: NCCL's alpha-beta"
    on_machine = f"on {machine.name}{settings} ({machine.source})"
    texts[Provenance.MODELLED_CALL] = f"{model} {on_machine}"
    texts[Provenance.CALL_BETWEEN_NODES] = f"{model} between nodes {on_machine}"
    calls_source = getattr(calls_of(machine.calls), "source", "it has none")
    other_calls = f"calls of other GPUs of this kind{settings}"
    texts[Provenance.CALL_OF_OTHER_GPUS] = f"modelled: {other_calls} ({calls_source})"
    experts_text = f"HybridEP's published rates on {machine.name} ({machine.source})"
    texts[Provenance.EXPERT_CALL] = f"modelled: {experts_text}"

    # a calibration, under the same settings or others
    texts[Provenance.CALIBRATED_CALL] = f"measured: calls ({calibration.source})"
    calibrated_settings = calibration.nccl or "none of them"
    rescaled_text = f"{settings}, times the calls that were measured with {calibrated_settings}"
    texts[Provenance.RESCALED_CALL] = f"{model}{rescaled_text} ({calibration.source})"
    return texts


def _texts_of_programs(
    source: Mapping[str, str], calibration: Calibration
) -> dict[Provenance, str]:
    """Put into words where times come from that programs have.

    Args:
        source: What the programs say of themselves.
        calibration: Measured times of the host.
    """
    # a program written by hand says neither device nor tier
    device = source.get("device", source.get("tier", ""))
    segments, calls = GIVEN, GIVEN.replace("segments", "calls")
    if device:
        segments = f"measured: segments of the slices ({device})"
        calls = f"measured: times of calls in the slices ({device})"
    place = device or "nobody says where"
    host_of_segments, host_of_calls = host_sources(calibration, place, source)
    return {
        Provenance.MEASURED_SEGMENT: segments,
        Provenance.MEASURED_CALL: calls,
        Provenance.HOST_OF_SEGMENT: host_of_segments,
        Provenance.HOST_OF_CALL: host_of_calls,
    }


def _check_fits(graph: WorldGraph, machine: Machine) -> None:
    """Raise UsageError for a world of several nodes on a machine without a network."""
    size, per_node = graph.programs.world.size, machine.gpus_per_node
    if size <= per_node or machine.network_rate:
        return
    nodes = -(-size // per_node)
    capacity = counted(per_node, "rank")
    raise UsageError(
        f"{size:,} ranks need {nodes:,} nodes, and {machine.name} has no network between nodes: "
        f"it holds {capacity}",
        fix="a world that fits, or a machine with a network: --machine h200",
    )


def _price_matched_calls(
    graph: WorldGraph, machine: Machine, calibration: Calibration, nccl: NcclSettings
) -> tuple[np.ndarray, np.ndarray]:
    """Price every matched call: ns int64 [matched calls], provenance uint8 [matched calls]."""
    # the first op of a matched call stands for all its members
    calls = graph.call_kinds
    first_ops = graph.matched_calls.start[:-1]
    kind_numbers = calls.of[first_ops].tolist()
    sizes = calls.num_bytes[first_ops].tolist()
    smallest_shares = calls.least[first_ops].tolist()
    keys = list(zip(kind_numbers, sizes, smallest_shares, strict=True))

    # few calls differ in kind and size, so each such pair is priced once
    price_of_key: dict[tuple[int, int, int], tuple[int, Provenance]] = {}
    for key in dict.fromkeys(keys):
        kind_number, size, smallest_share = key
        kind = calls.kinds[kind_number]
        price_of_key[key] = _price_call(kind, size, smallest_share, machine, calibration, nccl)
    rows = [price_of_key[key] for key in keys]
    prices = np.array(rows, dtype=np.int64).reshape(-1, 2)
    ns, source = prices.T

    # programs may hold the measured time of a call; -1 if not
    measured_ns = calls.ns[first_ops]
    is_measured = measured_ns >= 0
    ns = np.where(is_measured, measured_ns, ns)
    source = np.where(is_measured, Provenance.MEASURED_CALL, source)
    return ns, source.astype(np.uint8)


def _price_call(
    kind: CallKind,
    num_bytes: int,
    smallest_share: int,
    machine: Machine,
    calibration: Calibration,
    nccl: NcclSettings,
) -> tuple[int, Provenance]:
    """Price one call, in ns, from when all its members have come."""
    shape = shape_of(kind, machine)

    # a rank alone has nobody to talk to
    if shape.size == 1:
        return 0, Provenance.MODELLED_CALL

    # DeepEP and HybridEP are no calls of NCCL
    if kind.name in EXPERT_CALLS:
        ns = expert_call_ns(kind.name, shape, num_bytes, smallest_share, machine)
        return ns, Provenance.EXPERT_CALL

    # calls of a calibration; messages both ways have rows of their own
    modelled_ns = modelled(kind.name, shape, num_bytes, machine, nccl)
    rows: tuple[str, ...] = (kind.name,)
    if kind.exchange:
        rows = ("exchange", kind.name)
    for row in rows:
        calibrated_ns = calibration.look_up(row, shape.size, num_bytes, shape.per_node)
        if calibrated_ns is None:
            continue
        if calibration.nccl is None or nccl.same_calls(calibration.nccl):
            return calibrated_ns, Provenance.CALIBRATED_CALL

        # measured under other settings: the model says by how much these change a call
        calibrated_model_ns = modelled(kind.name, shape, num_bytes, machine, calibration.nccl)
        rescaled_ns = calibrated_ns * modelled_ns / max(1, calibrated_model_ns)
        return round(rescaled_ns), Provenance.RESCALED_CALL

    # calls of other GPUs, then the model
    other_gpus_ns = measured_elsewhere(rows, kind.name, shape, num_bytes, machine, nccl)
    if other_gpus_ns is not None:
        return other_gpus_ns, Provenance.CALL_OF_OTHER_GPUS
    if shape.nodes > 1:
        return modelled_ns, Provenance.CALL_BETWEEN_NODES
    return modelled_ns, Provenance.MODELLED_CALL


def shape_of(kind: CallKind, machine: Machine) -> Shape:
    """Say how many ranks take part in a call, and how many of them on the fullest node."""
    nodes = kind.ranks // machine.gpus_per_node
    _, ranks_of_node = np.unique(nodes, return_counts=True)
    ranks = np.unique(kind.ranks)
    return Shape(len(ranks), int(ranks_of_node.max()))


def relabelled(
    source: np.ndarray,
    chosen: np.ndarray,
    assumption: str | Callable[[str], str],
    sources: list[str],
) -> np.ndarray:
    """Say of some durations what was assumed of them.

    Args:
        source: Of every duration its provenance, index into ``sources``.
        chosen: bool, of which durations something was assumed.
        assumption: What; or a function that makes the new text of the old one.
        sources: Provenances in words, to which new ones are added.

    Returns:
        A copy of ``source`` with the new provenances.
    """
    new_source = source.copy()
    for code in np.unique(source[chosen]).tolist():
        old_text = sources[code]
        if isinstance(assumption, str):
            text = f"assumed: {assumption}, of {old_text}"
        else:
            text = assumption(old_text)
        if text not in sources:
            sources.append(text)
        is_changed = chosen & (source == code)
        new_source[is_changed] = sources.index(text)
    return new_source
