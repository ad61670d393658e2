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
    "volta": 39.0e9, "ampere": 87.7e9, "hopper": 141.0e9, "blackwell": 282.0e9,
}  # fmt: skip
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
        found = times(name, size, per_node, num_bytes, _with_channels(machine, settings))
        left = {way: ns for way, ns in found.items() if settings.allows(name, *way)}
        if not left:  # NCCL ends the job
            fix = "let Ring, which every call has: nccl=NCCL_ALGO=Ring nccl=NCCL_PROTO=Simple"
            raise UsageError(f"{settings} leaves no way for {name}", fix=fix)
        return left
    nodes = -(-size // per_node)
    call = _Call(name, size, nodes, min(per_node, size), num_bytes, machine)
    if name in ("send", "recv", "all_to_all", "gather", "scatter"):
        return call.messages()
    found = call.ring()
    if name == "all_reduce" or name == "barrier":
        found |= call.tree() | call.nvls()
    if name in ("all_gather", "reduce_scatter") and nodes == size:
        found |= call.pat()
    return found


def _with_channels(machine: Machine, settings: NcclSettings) -> Machine:
    """A machine on which fewer channels than usual reach as much less."""
    most = settings.channels[1]
    if most is None:
        return machine
    link, nvls = (min(1.0, most / usual) for usual in (_USUAL, _USUAL_NVLS))
    return dataclasses.replace(
        machine, link_rate=machine.link_rate * link, nvls_rate=machine.nvls_rate * nvls
    )


class _Call:
    """One call, and what all its ways share."""

    def __init__(
        self, name: str, size: int, nodes: int, per_node: int, num_bytes: int, machine: Machine
    ) -> None:
        self.name, self.size, self.nodes, self.per_node = name, size, nodes, per_node
        self.bytes, self.machine = num_bytes, machine
        across = per_node * machine.network_rate
        self.bus = machine.link_rate if nodes == 1 else min(machine.link_rate, across)
        inside = _LL_RATE[machine.generation]
        self.most_ll = inside if nodes == 1 else _LL_RATE_NODES[min(nodes, 3) - 2]
        self.inside = _HOP[machine.link]

    def ring(self) -> dict[tuple[str, str], float]:
        """Rings: every rank passes on (n - 1) / n of the message, an all-reduce twice."""
        rates = (min(self.most_ll, self.bus / 2), self.bus * 0.92, self.bus)
        twice = 2 if self.name in ("all_reduce", "barrier") else 1
        rooted = self.name in ("broadcast", "reduce")
        wire = self.bytes * (1.0 if rooted else twice * (self.size - 1) / self.size)
        found = {}
        for p, protocol in enumerate(_PROTOCOLS):
            inside, between = self.inside["ring"][p], _HOP["network"]["ring"][p]
            if self.nodes > 1:
                inside = max(inside, _POST * (3 if protocol == SIMPLE else 1))
                if self.per_node == 1:  # nothing hides them
                    between = _HOP["network"]["tree"][p]
            if rooted:  # one hop; the others follow in a pipeline
                latency = inside if self.nodes == 1 else between
            else:
                crossings = twice * (self.nodes - 1)
                latency = (twice * (self.size - 1) - crossings) * inside + crossings * between
            latency += _BASE["ring"][p]
            large = self.bytes >= 64 * _CHANNELS * self.size
            if protocol == SIMPLE and self.nodes > 1 and twice == 2 and large:
                latency *= 1.4  # NCCL: the plateau of rings
            found["ring", protocol] = latency * US + wire / rates[p] * 1e9
        return found

    def tree(self) -> dict[tuple[str, str], float]:
        """Trees between nodes, chains inside: an all-reduce goes up and down."""
        bus = 0.92 * self.bus
        rates = (min(bus / 3.8, self.most_ll), bus * (7 / 9 if self.nodes == 1 else 120 / 128), bus)
        middle = (self.bytes >> 6).bit_length() - 1
        found = {}
        for p, protocol in enumerate(_PROTOCOLS):
            rate = rates[p] * 0.5
            if 0 <= middle < len(_TREE_MIDDLE[p]):
                rate *= _TREE_MIDDLE[p][middle]
            hops = (self.size // self.nodes - 1) * self.inside["tree"][p]
            hops += _log2(self.nodes) * _HOP["network"]["tree"][p]
            latency = _BASE["tree"][p] + 2 * hops
            found["tree", protocol] = latency * US + self.bytes / rate * 1e9
        return found

    def nvls(self) -> dict[tuple[str, str], float]:
        """Sums in the NVLink switch, and trees between nodes; none if the machine has none."""
        rate, name, latency = self.machine.nvls_rate, "NVLS", _NVLS_INSIDE
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
        machine, pair = self.machine, self.name in ("send", "recv")
        share = self.bytes if pair else self.bytes / self.size
        away = (1 if self.nodes > 1 else 0) if pair else self.size - self.per_node
        near = (1 - away) if pair else self.per_node - 1
        found = {}
        for p, protocol in ((0, LL), (2, SIMPLE)):
            slower = 2 if protocol == LL else 1
            network = _HOP["network"]["ring"][p]
            latency = _BASE["ring"][p] + (network if away else self.inside["ring"][p])
            near_rate = machine.link_rate / slower
            if protocol == LL:
                near_rate = min(near_rate, _LL_RATE[machine.generation])
            longest = near * share / near_rate
            if away:
                longest = max(longest, away * share * slower / machine.network_rate)
            found["messages", protocol] = latency * US + longest * 1e9
        return found


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
        known = self.points.get(kind) or next(iter(self.points.values()))
        at = bisect.bisect_left(known, (num_bytes,))
        low, high = known[max(0, at - 1)], known[min(at, len(known) - 1)]
        part = 0.0 if low == high else math.log(num_bytes / low[0]) / math.log(high[0] / low[0])
        found = (a + part * (b - a) for a, b in zip(low[1:], high[1:], strict=True))
        compute, call = (max(1.0, factor) for factor in found)
        return compute, call


def read_overlap(rows: Iterable[OverlapRow]) -> dict[str, OverlapFactors]:
    """Collective -> factors of the ``overlap`` rows of a calibration, against each of two kinds of
    computing: products, which fill the GPU, and what takes its memory's rate (they differ: a gather
    of 64 MiB takes 1.1 times as long beside products, 1.9 times beside additions).

    A factor below 1 is noise and counts as 1, and one of few rounds is left out: in the others
    computing did not outlast the call.  ValueError for two rows of the same call.
    """
    found: dict[str, dict[str, dict[int, tuple[float, float]]]] = {}
    known = list(rows)
    enough = _ROUNDS * max((row.rounds or 0 for row in known), default=0)
    for row in known:
        if (enough if row.rounds is None else row.rounds) < enough:
            continue
        pair, sizes = (row.compute, row.call), found.setdefault(row.op, {}).setdefault(row.kind, {})
        if sizes.setdefault(row.bytes, pair) != pair:
            what = f"{row.op} of {row.bytes} bytes beside {row.kind}"
            raise ValueError(f"it contradicts itself: {what} has two pairs of factors")
    return {
        name: OverlapFactors(
            {
                kind: tuple((size, *pair) for size, pair in sorted(sizes.items()))
                for kind, sizes in kinds.items()
            }
        )
        for name, kinds in found.items()
    }


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
        key = "message" if name in ("send", "recv") else name, asynchronous
        for table in (self.again, self.host) if again else (self.host,):
            if table:
                return table.get(key) or round(statistics.median(table.values()))
        return default

    def look_up(
        self, name: str, size: int, num_bytes: int, per_node: int | None = None
    ) -> int | None:
        """ns, interpolated between measured sizes; None if such a group was not measured.

        ``per_node``: how many of its ranks share a node; None: all of them.

        Below the smallest size its time, above the largest the rate of the last two.
        """
        points = self.points.get(
            ("send" if name == "recv" else name, size, size if per_node is None else per_node)
        )
        if not points:
            return None
        place = bisect.bisect_left(points, (num_bytes, 0))
        if place == 0 or len(points) == 1:
            return points[0][1]
        low, high = points[place - 1 : place + 1] if place < len(points) else points[-2:]
        slope = (high[1] - low[1]) / (high[0] - low[0])
        return max(1, round(low[1] + slope * (num_bytes - low[0])))


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
    found = stored(path)
    with foreign.reading(path, "a calibration of ours", "write it again: prism calibrate"):
        points: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
        for row in found.collectives:
            points.setdefault((row.op, row.ranks, row.of_node), []).append((row.bytes, row.ns))
        table = {key: tuple(sorted(set(values))) for key, values in points.items()}
        for (name, size, _), values in table.items():
            for (one, ns), (other, more) in itertools.pairwise(values):
                if one == other:
                    what = f"{name} of {one} bytes among {size} takes {ns} ns and {more} ns"
                    raise ValueError(f"it contradicts itself: {what}")
        overlap, source = read_overlap(found.overlap), found.source
        host = {(row.op, row.asynchronous): row.ns for row in found.host}
        again = {(row.op, row.asynchronous): row.again for row in found.host if row.again}
        nccl = None if found.nccl_env is None else parse(found.nccl_env)
        held = max((row.held for row in found.held), default=0)
        return Calibration(table, source, host, again, overlap, nccl, held, os.fspath(path))


FOLDER = Path(__file__).with_name("calls")


@functools.cache
def calls_of(name: str) -> Calibration | None:
    """The table of calls of a machine that names it (``Machine.calls``); None for ""."""
    return read_calibration(FOLDER / f"{name}.json" if "." not in name else name) if name else None


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
    row = next((row for row in rows if table is not None and table.look_up(row, 2, num_bytes)), "")
    if table is None or not row:
        return None
    way, ns = fastest(name, shape, num_bytes, machine, settings)
    if way.startswith("NVLS"):
        return None
    ratios = []
    for size in (2, 4):
        took = table.look_up(row, size, num_bytes)
        if took is not None:
            then = modelled(name, Shape(size, size), num_bytes, machine, table.nccl)
            ratios.append((math.log(size), math.log(took / max(1, then))))
    (low, first), (high, last) = ratios[0], ratios[-1]
    part = min(1.0, (math.log(shape.size) - low) / (high - low)) if high > low else 0.0
    return round(math.exp(first + part * (last - first)) * round(machine.call_ns + ns))


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
    away = to_nodes * (shape.nodes - 1) / shape.nodes / (machine.network_rate or math.inf)
    near = to_ranks / (EXPERT_CALLS[name] * machine.link_rate)
    hop = "network" if shape.nodes > 1 else machine.link
    latency = _BASE["ring"][2] + _HOP[hop]["ring"][2]
    return round(machine.call_ns + latency * US + max(away, near) * 1e9)


def fastest(
    name: str, shape: Shape, num_bytes: int, machine: Machine, settings: NcclSettings | None = None
) -> tuple[str, float]:
    """(algorithm, ns) of the way that NCCL takes."""
    per_node = min(shape.per_node, shape.size)
    ways = times(name, shape.size, per_node, num_bytes, machine, settings)
    return min(((way, ns) for (way, _), ns in ways.items()), key=lambda one: one[1])
