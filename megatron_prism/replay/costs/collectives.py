"""How long a call takes once all members have come: measured tables first, then a model of NCCL.

In : a collective, its message size, its group's shape on the machine.  Out: ns and a provenance.

The model is NCCL's own estimate of its algorithms and protocols (``nccl``), on the machine's rates.
Groups that span nodes pay the network's rate and latency between nodes; several ranks of a node
share the work of crossing it rail by rail.  A calibration also says how much a call and computing
slow each other down.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from megatron_prism.core import foreign
from megatron_prism.core.errors import UsageError
from megatron_prism.replay.costs.machine import Machine
from megatron_prism.replay.costs.nccl_settings import NcclSettings, parse

LL, LL128, SIMPLE = "LL", "LL128", "Simple"
_PROTOCOLS = (LL, LL128, SIMPLE)
US = 1000.0  # tables are in us, as in NCCL

_BASE = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 8.4), "pat": (8.0, 8.0, 8.0)}
# of DeepEP's and HybridEP's calls, shares of a link's rate at which rows reach a rank of a node:
# HybridEP's kernels alone among 16 H100, 4,096 tokens of 7,168 with 8 experts, in BF16: 71.71 and
# 62.95 GB/s of a copy for each node (docs/README_Hybrid-EP.md @hybrid-ep)
EXPERT_CALLS = {"dispatch": 0.75, "combine": 0.66}
_HOP = {  # of a hop: (LL, LL128, Simple)
    "nvlink": {"ring": (0.6, 1.9, 3.4), "tree": (0.6, 1.25, 4.0)},
    "pcie": {"ring": (1.0, 2.5, 5.7), "tree": (1.0, 1.9, 4.0)},
    "network": {"ring": (2.7, 4.0, 14.0), "tree": (5.0, 8.5, 14.0)},
}
_NVLS_INSIDE, _NVLS_TREE_BETWEEN, _PAT_BETWEEN = 25.0, 20.9, 14.0
_LL_RATE = {  # most bytes/s of LL inside a node, by generation; between 2 and more nodes (Intel)
    "volta": 39.0e9,
    "ampere": 87.7e9,
    "hopper": 141.0e9,
    "blackwell": 282.0e9,
}
_LL_RATE_NODES = (39.0e9, 20.4e9)
_POST = 1.0  # us to post a message to the network, three of them for Simple
_CHANNELS = 16
# blocks of large rings on 4 x H200 (benchmarks/results/h200_x4_nccl_blocks.json); of NVLS: NCCL's
# own (nvls.cc), not measured
_USUAL, _USUAL_NVLS = 24, 16
_TREE_MIDDLE = (  # trees are slower than that for medium sizes: powers of two from 64 B on
    (1, 1, 1, 1, .9, .8, .7, .7, .7, .7, .6, .5, .4, .4, .5, .6, .7, .8, .9, 1, 1, 1, 1),
    (1, 1, 1, 1, 1, .9, .8, .8, .8, .7, .6, .6, .6, .6, .6, .6, .8, .9, .9, .9, .9, 1, 1),
    (.9, .9, .9, .9, .9, .9, .9, .8, .7, .6, .6, .5, .5, .5, .5, .6, .7, .8, .7, .7, .8, .9, .9),
)  # fmt: skip


def times(
    name: str,
    size: int,
    per_node: int,
    num_bytes: int,
    machine: Machine,
    settings: NcclSettings | None = None,
) -> dict[tuple[str, str], float]:
    """(algorithm, protocol) -> ns, of all ways that NCCL has for this call, or that ``settings``
    leave it; UsageError if they leave none.
    """
    if settings:
        all_times = times(name, size, per_node, num_bytes, _with_channels(machine, settings))
        allowed = {path: ns for path, ns in all_times.items() if settings.allows(name, *path)}
        if not allowed:  # NCCL ends the job
            raise UsageError(
                f"{settings} leaves no way for {name}",
                fix="let Ring, which every call has: nccl=NCCL_ALGO=Ring nccl=NCCL_PROTO=Simple",
            )
        return allowed
    # rounded up: the last node may hold fewer
    nodes = -(-size // per_node)
    call = _Call(name, size, nodes, min(per_node, size), num_bytes, machine)
    if name in ("send", "recv", "all_to_all", "gather", "scatter"):
        return call.messages()
    if name in ("all_reduce", "barrier"):
        return call.ring() | call.tree() | call.nvls()
    # NCCL takes PAT for one rank a node alone
    if name in ("all_gather", "reduce_scatter") and nodes == size:
        return call.ring() | call.pat()
    return call.ring()


def _with_channels(machine: Machine, settings: NcclSettings) -> Machine:
    """A machine on which fewer channels than usual reach as much less."""
    _, most_channels = settings.channels
    if most_channels is None:
        return machine
    # a channel moves a fixed part of what all reach together
    link_share = min(1.0, most_channels / _USUAL)
    nvls_share = min(1.0, most_channels / _USUAL_NVLS)
    return dataclasses.replace(
        machine,
        link_rate=machine.link_rate * link_share,
        nvls_rate=machine.nvls_rate * nvls_share,
    )


class _Call:
    """One call, and what all its ways share."""

    def __init__(
        self, name: str, size: int, nodes: int, per_node: int, num_bytes: int, machine: Machine
    ) -> None:
        self.name = name
        self.size = size
        self.nodes = nodes
        self.per_node = per_node
        self.bytes = num_bytes
        self.machine = machine
        self.inside = _HOP[machine.link]
        if nodes == 1:
            self.bus = machine.link_rate
            self.most_ll = _LL_RATE[machine.generation]
        else:
            # each rank of a node has its own network card
            self.bus = min(machine.link_rate, per_node * machine.network_rate)
            self.most_ll = _LL_RATE_NODES[min(nodes, 3) - 2]  # two nodes, or more

    def ring(self) -> dict[tuple[str, str], float]:
        """Rings: every rank passes on (n - 1) / n of the message, an all-reduce twice."""
        # LL sends a flag of its size with each word, LL128 one with each 120 bytes
        rates = (min(self.most_ll, self.bus / 2), self.bus * 0.92, self.bus)
        rounds = 2 if self.name in ("all_reduce", "barrier") else 1
        has_root = self.name in ("broadcast", "reduce")
        share = 1.0
        if not has_root:
            # a root sends all of it once
            share = rounds * (self.size - 1) / self.size
        wire_bytes = self.bytes * share
        has_plateau = self.nodes > 1 and rounds == 2
        has_plateau = has_plateau and self.bytes >= 64 * _CHANNELS * self.size
        ns = dict[tuple[str, str], float]()
        for p, protocol in enumerate(_PROTOCOLS):
            latency_us = self._ring_hops(p, rounds, has_root)
            latency_us += _BASE["ring"][p]
            if protocol == SIMPLE and has_plateau:
                latency_us *= 1.4  # NCCL: the plateau of rings
            ns["ring", protocol] = latency_us * US + wire_bytes / rates[p] * 1e9
        return ns

    def _ring_hops(self, p: int, rounds: int, has_root: bool) -> float:
        """us of all hops that follow each other, with protocol ``p``."""
        inside = self.inside["ring"][p]
        between = _HOP["network"]["ring"][p]
        if self.nodes > 1:
            posts = 3 if _PROTOCOLS[p] == SIMPLE else 1
            inside = max(inside, _POST * posts)
            if self.per_node == 1:  # no hop inside a node hides them
                between = _HOP["network"]["tree"][p]
        if has_root:  # one hop; the others follow in a pipeline
            return inside if self.nodes == 1 else between
        # the ring leaves each node once a round
        crossings = rounds * (self.nodes - 1)
        hops = rounds * (self.size - 1)
        return (hops - crossings) * inside + crossings * between

    def tree(self) -> dict[tuple[str, str], float]:
        """Trees between nodes, chains inside: an all-reduce goes up and down."""
        bus = 0.92 * self.bus
        ll128_share = 7 / 9 if self.nodes == 1 else 120 / 128
        rates = (min(bus / 3.8, self.most_ll), bus * ll128_share, bus)
        # 0: 64 bytes; each class has twice as many as the one before
        size_class = (self.bytes >> 6).bit_length() - 1
        ns = dict[tuple[str, str], float]()
        for p, protocol in enumerate(_PROTOCOLS):
            rate = rates[p] * 0.5
            if 0 <= size_class < len(_TREE_MIDDLE[p]):
                rate *= _TREE_MIDDLE[p][size_class]
            # along the chain of a node, then from node to node
            hops_us = (self.size // self.nodes - 1) * self.inside["tree"][p]
            hops_us += _log2(self.nodes) * _HOP["network"]["tree"][p]
            latency_us = _BASE["tree"][p] + 2 * hops_us
            ns["tree", protocol] = latency_us * US + self.bytes / rate * 1e9
        return ns

    def nvls(self) -> dict[tuple[str, str], float]:
        """Sums in the NVLink switch, and trees between nodes; none if the machine has none."""
        rate, name, latency = self.machine.nvls_rate, "NVLS", _NVLS_INSIDE
        # nothing to add up in the switch
        if not rate or self.size < 2 or self.per_node < 2:
            return {}
        if self.nodes > 1:
            name, latency = "NVLS tree", latency + 2 * _log2(self.nodes) * _NVLS_TREE_BETWEEN
            across = self.per_node * self.machine.network_rate * (2 if self.nodes == 2 else 1)
            rate = min(rate, across)
        wire = self.bytes * 2 * (self.size - 1) / self.size
        return {(name, SIMPLE): latency * US + wire / rate * 1e9}

    def pat(self) -> dict[tuple[str, str], float]:
        """Parallel aggregated trees, for one rank per node."""
        latency = _BASE["pat"][2] + _log2(self.nodes) * _PAT_BETWEEN / 3.5 + 2.8 * self.size
        wire = self.bytes * (self.size - 1) / self.size
        return {("PAT", SIMPLE): latency * US + wire / (0.75 * self.bus) * 1e9}

    def messages(self) -> dict[tuple[str, str], float]:
        """Sends and receives, all at once."""
        machine = self.machine
        if self.name in ("send", "recv"):  # one peer
            message_bytes: float = self.bytes
            peers_away = 1 if self.nodes > 1 else 0
            peers_near = 1 - peers_away
        else:  # a message to each peer
            message_bytes = self.bytes / self.size
            peers_away = self.size - self.per_node
            peers_near = self.per_node - 1
        ns = dict[tuple[str, str], float]()
        for p, protocol in ((0, LL), (2, SIMPLE)):
            flags = 2 if protocol == LL else 1  # LL sends a flag with every word
            hop = _HOP["network"]["ring"][p] if peers_away else self.inside["ring"][p]
            latency_us = _BASE["ring"][p] + hop
            near_rate = machine.link_rate / flags
            if protocol == LL:
                near_rate = min(near_rate, _LL_RATE[machine.generation])
            # messages inside and between nodes go at the same time
            longest_s = peers_near * message_bytes / near_rate
            if peers_away:
                away_s = peers_away * message_bytes * flags / machine.network_rate
                longest_s = max(longest_s, away_s)
            ns["messages", protocol] = latency_us * US + longest_s * 1e9
        return ns


def _log2(number: int) -> int:
    return number.bit_length() - 1


ATTENTION = "attention"  # the fused one
KINDS = ("gemm", "memory", ATTENTION)  # of computing: products, additions, attention

_ROUNDS = 0.5  # of the rounds of the row that has most of them
_Factor = Annotated[float, msgspec.Meta(gt=0, lt=100)]  # what is more is no measurement


class OverlapRow(msgspec.Struct):
    """One measured pair of factors, of computing and of the call."""

    op: str
    bytes: foreign.PositiveInt
    kind: Literal["gemm", "memory", "attention"]
    compute: _Factor
    call: _Factor
    rounds: float | None = None


@dataclass(frozen=True)
class OverlapFactors:
    """Factors of one kind of call.

    points : kind of computing -> ascending (message bytes, factor of computing, of the call)
    """

    points: Mapping[str, tuple[tuple[int, float, float], ...]]

    def factors(self, num_bytes: int, kind: str) -> tuple[float, float]:
        """(of computing, of the call), between two measured sizes by ratio, beyond them those of
        the nearest; of a kind that was not measured those of another (attention: of products).
        """
        # the first kind is products
        points = self.points.get(kind) or next(iter(self.points.values()))
        place = bisect.bisect_left(points, (num_bytes,))
        low_bytes, low_compute, low_call = points[max(0, place - 1)]
        high_bytes, high_compute, high_call = points[min(place, len(points) - 1)]
        part = 0.0
        if low_bytes != high_bytes:
            part = math.log(num_bytes / low_bytes) / math.log(high_bytes / low_bytes)
        compute = low_compute + part * (high_compute - low_compute)
        call = low_call + part * (high_call - low_call)
        return max(1.0, compute), max(1.0, call)


def read_overlap(rows: Iterable[OverlapRow]) -> dict[str, OverlapFactors]:
    """Collective -> factors of the ``overlap`` rows of a calibration, against each of two kinds of
    computing: products, which fill the GPU, and what takes its memory's rate (they differ: a gather
    of 64 MiB takes 1.1 times as long beside products, 1.9 times beside additions).

    A factor below 1 is noise and counts as 1, and one of few rounds is left out: in the others
    computing did not outlast the call.  ValueError for two rows of the same call.
    """
    rows = list(rows)
    most_rounds = max((row.rounds or 0 for row in rows), default=0)
    enough = _ROUNDS * most_rounds
    # (collective, kind of computing) -> bytes -> (factor of computing, of the call)
    factors = defaultdict[tuple[str, str], dict[int, tuple[float, float]]](dict)
    for row in rows:
        if row.rounds is not None and row.rounds < enough:
            continue
        pair = (row.compute, row.call)
        if factors[row.op, row.kind].setdefault(row.bytes, pair) != pair:
            raise ValueError(
                f"it contradicts itself: {row.op} of {row.bytes} bytes beside {row.kind} "
                "has two pairs of factors"
            )
    points = defaultdict[str, dict[str, tuple[tuple[int, float, float], ...]]](dict)
    for (name, kind), pairs in factors.items():
        points[name][kind] = tuple((size, *pair) for size, pair in sorted(pairs.items()))
    return {name: OverlapFactors(by_kind) for name, by_kind in points.items()}


@dataclass(frozen=True)
class Shape:
    """A group on the machine: its ranks, and how many of them share a node."""

    size: int
    per_node: int

    @property
    def nodes(self) -> int:
        """Nodes that the group spans, if it is spread evenly."""
        return -(-self.size // self.per_node)


@dataclass(frozen=True)
class Calibration:
    """Collective times measured on some machine.

    points : (collective, ranks, of them per node) -> ascending (message bytes, ns)
    source : where and when
    host   : (collective, or ``message``; asynchronous) -> ns that NCCL keeps the host for a call
    again  : the same right after another call, with what it needs in the CPU's caches
    overlap: collective -> how much it and computing slow each other down
    nccl   : NCCL's settings while they were measured; None: nobody knows them
    held   : bytes of sends to a peer that ended while it was busy; 0: none, or nobody measured it
    path   : the file, which may have samples of single calls; "" if there is none
    """

    points: dict[tuple[str, int, int], tuple[tuple[int, int], ...]] = field(default_factory=dict)
    source: str = ""
    host: dict[tuple[str, bool], int] = field(default_factory=dict)
    again: dict[tuple[str, bool], int] = field(default_factory=dict)
    overlap: dict[str, OverlapFactors] = field(default_factory=dict)
    nccl: NcclSettings | None = None
    held: int = 0
    path: str = ""

    def host_ns(self, name: str, asynchronous: bool, default: int, again: bool = False) -> int:
        """ns of the host for a call, ``again``: right after another one; of one that was not
        measured the median of the others.
        """
        # both directions of a message cost the host alike
        key = "message" if name in ("send", "recv") else name, asynchronous
        table = self.host
        if again and self.again:
            table = self.again
        if not table:
            return default
        return table.get(key) or round(statistics.median(table.values()))

    def look_up(
        self, name: str, size: int, num_bytes: int, per_node: int | None = None
    ) -> int | None:
        """ns, interpolated between measured sizes; None if such a group was not measured.

        ``per_node``: how many of its ranks share a node; None: all of them.

        Below the smallest size its time, above the largest the rate of the last two.
        """
        measured_name = "send" if name == "recv" else name
        ranks_per_node = size if per_node is None else per_node
        points = self.points.get((measured_name, size, ranks_per_node))
        if not points:
            return None
        place = bisect.bisect_left(points, (num_bytes, 0))
        if place == 0 or len(points) == 1:
            return points[0][1]
        # above the largest size: the line through the last two
        place = min(place, len(points) - 1)
        low_bytes, low_ns = points[place - 1]
        high_bytes, high_ns = points[place]
        slope = (high_ns - low_ns) / (high_bytes - low_bytes)
        return max(1, round(low_ns + slope * (num_bytes - low_bytes)))


_Size = Annotated[int, msgspec.Meta(gt=0, lt=1 << 50)]  # bytes or ns; more is no measurement
_HostTime = Annotated[int, msgspec.Meta(gt=0, lt=1 << 40)]
_Sample = Annotated[float, msgspec.Meta(gt=-(1 << 50), lt=1 << 50)]


class CollectiveRow(msgspec.Struct):
    """One measured call; ``per_node`` None: all its ranks share a node."""

    op: str
    ranks: foreign.PositiveInt
    bytes: _Size
    ns: _Size
    per_node: foreign.PositiveInt | None = None
    samples: Annotated[list[_Sample], msgspec.Meta(max_length=4096)] | None = None

    @property
    def of_node(self) -> int:
        """Its ranks on one node."""
        return self.ranks if self.per_node is None else self.per_node


class _HostRow(msgspec.Struct):
    op: str
    asynchronous: bool
    ns: _HostTime
    again: _HostTime | None = None


class _HeldRow(msgspec.Struct):
    bytes: _Size
    held: Annotated[int, msgspec.Meta(ge=0, lt=1 << 50)]


class StoredCalibration(msgspec.Struct):
    """What ``prism calibrate`` writes."""

    source: str
    format: Literal[1] = 1
    collectives: list[CollectiveRow] = []
    overlap: list[OverlapRow] = []
    host: list[_HostRow] = []
    nccl_env: str | None = None  # ``NCCL_ENV``
    held: list[_HeldRow] = []


def stored(path: str | os.PathLike[str]) -> StoredCalibration:
    """The rows of a calibration.  UsageError for anything else."""
    fix = "write it again: prism calibrate"
    with foreign.reading(path, "a calibration of ours", fix, absent="prism calibrate"):
        return foreign.read_json(path, StoredCalibration)


def read_calibration(path: str | os.PathLike[str]) -> Calibration:
    """What ``prism calibrate`` wrote.  UsageError for anything else."""
    rows = stored(path)
    with foreign.reading(path, "a calibration of ours", "write it again: prism calibrate"):
        return Calibration(
            points=_points(rows.collectives),
            source=rows.source,
            host={(row.op, row.asynchronous): row.ns for row in rows.host},
            again={(row.op, row.asynchronous): row.again for row in rows.host if row.again},
            overlap=read_overlap(rows.overlap),
            nccl=None if rows.nccl_env is None else parse(rows.nccl_env),
            held=max((row.held for row in rows.held), default=0),
            path=os.fspath(path),
        )


def _points(
    rows: Sequence[CollectiveRow],
) -> dict[tuple[str, int, int], tuple[tuple[int, int], ...]]:
    """(collective, ranks, of them per node) -> ascending (bytes, ns); ValueError for two times."""
    values = defaultdict[tuple[str, int, int], set[tuple[int, int]]](set)
    for row in rows:
        values[row.op, row.ranks, row.of_node].add((row.bytes, row.ns))
    points = {key: tuple(sorted(pairs)) for key, pairs in values.items()}
    for (name, size, _), pairs in points.items():
        for (num_bytes, ns), (next_bytes, next_ns) in itertools.pairwise(pairs):
            if num_bytes == next_bytes:
                raise ValueError(
                    f"it contradicts itself: {name} of {num_bytes} bytes among {size} "
                    f"takes {ns} ns and {next_ns} ns"
                )
    return points


FOLDER = Path(__file__).with_name("calls")


@functools.cache
def calls_of(name: str) -> Calibration | None:
    """The table of calls of a machine that names it (``Machine.calls``); None for ""."""
    if not name:
        return None
    # a file of the user's, or a table of ours by its name
    is_path = "." in name
    return read_calibration(name if is_path else FOLDER / f"{name}.json")


def measured_elsewhere(
    rows: Sequence[str],
    name: str,
    shape: Shape,
    num_bytes: int,
    machine: Machine,
    settings: NcclSettings | None = None,
) -> int | None:
    """ns of a call inside a node: the model of ``name``, times what calls of other GPUs of this
    kind took of it, between the two measured sizes of groups by ratio.

    None if the machine has no table with one of ``rows``, of which the first counts, or if NCCL
    takes the switch for this call, which the table's calls had not.
    """
    table = calls_of(machine.calls) if shape.nodes == 1 else None
    if table is None:
        return None
    measured_rows = [row for row in rows if table.look_up(row, 2, num_bytes)]
    if not measured_rows:
        return None
    algorithm, ns = fastest(name, shape, num_bytes, machine, settings)
    if algorithm.startswith("NVLS"):
        return None
    # (log of ranks, log of measured time over modelled time)
    ratios = list[tuple[float, float]]()
    # the sizes of groups that tables have
    for size in (2, 4):
        measured_ns = table.look_up(measured_rows[0], size, num_bytes)
        if measured_ns is not None:
            modelled_ns = modelled(name, Shape(size, size), num_bytes, machine, table.nccl)
            ratios.append((math.log(size), math.log(measured_ns / max(1, modelled_ns))))
    (low_size, low_ratio), (high_size, high_ratio) = ratios[0], ratios[-1]
    part = 0.0
    if high_size > low_size:
        part = min(1.0, (math.log(shape.size) - low_size) / (high_size - low_size))
    ratio = math.exp(low_ratio + part * (high_ratio - low_ratio))
    return round(ratio * round(machine.call_ns + ns))


def modelled(
    name: str, shape: Shape, num_bytes: int, machine: Machine, settings: NcclSettings | None = None
) -> int:
    """ns of one call of ``num_bytes`` (message size as nccl-tests counts it), the fastest way."""
    if shape.size == 1:
        return 0
    return round(machine.call_ns + fastest(name, shape, num_bytes, machine, settings)[1])


def expert_call_ns(name: str, shape: Shape, to_ranks: int, to_nodes: int, machine: Machine) -> int:
    """ns of a dispatch or combine: a copy of a token's row for each node that has experts of it
    (``to_nodes``, bytes that a rank sends), which forwards it to each such rank (``to_ranks``).
    """
    # experts are spread evenly, so one node's share is this rank's own
    bytes_away = to_nodes * (shape.nodes - 1) / shape.nodes
    away_s = bytes_away / (machine.network_rate or math.inf)
    near_s = to_ranks / (EXPERT_CALLS[name] * machine.link_rate)
    hop = "network" if shape.nodes > 1 else machine.link
    latency_us = _BASE["ring"][2] + _HOP[hop]["ring"][2]
    return round(machine.call_ns + latency_us * US + max(away_s, near_s) * 1e9)


def fastest(
    name: str, shape: Shape, num_bytes: int, machine: Machine, settings: NcclSettings | None = None
) -> tuple[str, float]:
    """(algorithm, ns) of the way that NCCL takes."""
    # a group smaller than a node
    per_node = min(shape.per_node, shape.size)
    ns_of = times(name, shape.size, per_node, num_bytes, machine, settings)
    fastest_path = min(ns_of, key=lambda path: ns_of[path])
    algorithm, _ = fastest_path
    return algorithm, ns_of[fastest_path]
