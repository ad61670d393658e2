"""Device memory of NCCL's communicators, which no allocator sees.

In : communicators and what they were used for (``connection_bytes``), and a calibration: what
``benchmarks/tools/device_memory.py`` measured on a host.  Out: their bytes, and a provenance.
Unknown is None.

NCCL connects a communicator when an algorithm is first used (NCCL_RUNTIME_CONNECT, src/group.cc
@v2.28.9-1).  A connection takes, per channel, one page for the sender, and pages for the buffers
of all three protocols for the receiver (src/transport/p2p.cc; ``connection_bytes``).  How many
channels there are depends on the host, so it is measured: a communicator is ``init`` plus what
its kinds of calls connect; what was measured apart and together is never added up to more than
together.  Between hosts nothing was measured: such groups are taken as their part on one host.
More ranks of a host than were measured are taken as the most that were.  ``between`` says what is
open of both.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import median_low
from typing import Annotated, Literal

import msgspec

from megatron_prism.core import foreign
from megatron_prism.core.groups import WORLD_GROUP, of_family, of_lists
from megatron_prism.core.programs.ops import IS_NCCL, IS_PAIR, ITEM_SIZE, NAMES
from megatron_prism.core.programs.program import Programs

FOLDER = Path(__file__).with_name("device_memory")
DEFAULT = "h200"  # the calibration that counts until another device is measured, too
PAGE = 2 << 20
_WAYS = frozenset({"out", "in"})
_HOST = 8  # GPUs, where the world does not say it
_HOST_PEERS = _HOST - 1  # of a rank
# that NCCL opens among the GPUs of a host with an NVLink switch: 16 among 8 x H800 (log in
# github.com/NVIDIA/nccl/issues/892), 24 of a ring and 32 of a pair among 2 to 4 x H200; a
# communicator has 32 at most
FEWEST_CHANNELS, MOST_CHANNELS = 16, 32


def network_bytes() -> tuple[int, int]:
    """(of one channel of a ring or tree, both ends; of all messages to other hosts) on a rank.

    With GPUDirect the buffers of two protocols are in device memory at either end, without it none
    is; messages share a pool for each direction, of at most 32 channels x 16 steps x 128 KiB
    (src/transport/net.cc sendProxyConnect, sharedNetBuffersInit @022c022).
    """
    ll128 = 120 * 640 * 8 * 8
    return 2 * -(-((4 << 20) + ll128) // PAGE) * PAGE, 2 * 32 * 16 * (128 << 10)


def connection_bytes(buffer: int = 4 << 20) -> tuple[int, int]:
    """(sender, receiver) bytes of one channel between two GPUs of a host, by NCCL's source.

    init.cc:810 (buffer sizes), transport/p2p.cc:407 and :486 (rounded up to CUDA_IPC_MIN, 2 MiB);
    ``buffer`` is NCCL_BUFFSIZE.  Where GPUs read from their peers (sm80) the sender has it instead.
    """
    head = 4096  # ncclSendMem, ncclRecvMem: one aligned line of bookkeeping
    ll, ll128 = 8 * 512 * 8 * 16, 120 * 640 * 8 * 8  # of the two protocols of small messages
    return PAGE, -(-(head + buffer + ll + ll128) // PAGE) * PAGE


@dataclass(frozen=True)
class Communicator:
    """One that a rank takes part in.

    kinds : ``small`` and ``large`` reductions, ``ring`` (gathers, scatters, broadcasts); of a pair
            ``out`` and ``in``, which way its messages go
    peers : ranks that it exchanges messages with inside this communicator
    local : ranks of it on this rank's host; None: all
    """

    group: str
    size: int
    kinds: frozenset[str] = frozenset()
    peers: int = 0
    local: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class BufferCalibration:
    """What a host was measured to take; see ``benchmarks/tools/device_memory.py``.

    process : bytes beyond reserved of a training process without communicators; None: unknown
    once    : bytes that the first communicators of a process take beyond their own
    alone   : (kind, ranks) -> bytes beyond ``init``; kinds are init, small, large, ring, all, peer,
              out, in
    source  : where and when
    """

    process: int | None = None
    once: int = 0
    alone: dict[tuple[str, int], int] = field(default_factory=dict)
    source: str = ""

    @property
    def measured(self) -> tuple[int, ...]:
        """Sizes of communicators that were measured, ascending."""
        return tuple(sorted({size for kind, size in self.alone if kind == "init"}))

    def bytes_of(self, communicator: Communicator) -> int | None:
        """What a communicator takes; sizes beyond the largest measured take what that takes."""
        fitting = [size for size in self.measured if size <= communicator.size]
        # of one rank alone nothing follows for several: it has no connections
        if not fitting or communicator.size > 1 and fitting[-1] == 1:
            return None
        size = fitting[-1]
        init_bytes = self.alone["init", size]
        if size == 1:
            return init_bytes
        # a pair of its own, of unbatched messages
        if communicator.kinds & _WAYS:
            way_bytes = self._sum_of([(kind, 2) for kind in sorted(communicator.kinds)])
            if way_bytes is None:
                return None
            return init_bytes + way_bytes
        call_bytes = self._sum_of([(kind, size) for kind in sorted(communicator.kinds)])
        if call_bytes is None:
            return None
        # kinds of calls share channels, so together they take less than the sum of each alone
        if len(communicator.kinds) > 1:
            call_bytes = min(call_bytes, self.alone.get(("all", size), call_bytes))
        peer_bytes = 0
        if communicator.peers:
            measured_bytes = self.alone.get(("peer", size))
            if measured_bytes is None:
                return None
            peer_bytes = measured_bytes
        return init_bytes + call_bytes + min(communicator.peers, _HOST_PEERS) * peer_bytes

    def _sum_of(self, keys: Sequence[tuple[str, int]]) -> int | None:
        """The sum of what was measured of each (kind, ranks); None where one was not."""
        total = 0
        for key in keys:
            num_bytes = self.alone.get(key)
            if num_bytes is None:
                return None
            total += num_bytes
        return total

    def nccl(self, used: Sequence[Communicator]) -> int | None:
        """All of a rank's communicators together; None if one of them was not measured."""
        if not self.alone:
            return None
        total = self.once
        for communicator in used:
            num_bytes = self.bytes_of(communicator)
            if num_bytes is None:
                return None
            total += num_bytes
        return total

    def between(self, used: Sequence[Communicator]) -> tuple[int, int] | None:
        """Find the least and the most that ``nccl`` may be, by what nobody measured.

        Returns:
            (least, most) bytes: of connections to other hosts, and of communicators that have more
            ranks on a host than were measured; None if ``nccl`` is unknown.
        """
        middle = self.nccl(used)
        if middle is None:
            return None
        low = high = middle
        for communicator in used:
            fewer_bytes, further_bytes = self._of_other_hosts(communicator)
            low -= fewer_bytes
            high += further_bytes
            fewer_bytes, further_bytes = self._of_more_ranks(communicator)
            low -= fewer_bytes
            high += further_bytes
        return low, high

    def _parts(self, communicator: Communicator) -> tuple[int, int, int]:
        """Split a communicator's bytes: (before any call, of its calls, of its messages)."""
        rings = frozenset[str]()
        if not communicator.kinds & _WAYS:
            rings = communicator.kinds
        total = self.bytes_of(communicator) or 0
        without_messages = self.bytes_of(replace(communicator, kinds=rings, peers=0)) or 0
        init = self.bytes_of(replace(communicator, kinds=frozenset(), peers=0)) or 0
        return init, without_messages - init, total - without_messages

    def _of_other_hosts(self, communicator: Communicator) -> tuple[int, int]:
        """Say what connections to other hosts may take less and more than those on one.

        The least is without GPUDirect.  A ring leaves the host once, so one of the connections of
        its ranks there does; a rank's messages all may.
        """
        if communicator.local is None or communicator.local >= communicator.size:
            return 0, 0
        channel, pool = network_bytes()
        _, calls, messages = self._parts(communicator)
        leaving_calls = calls // communicator.local
        further_bytes = round(leaving_calls * (channel / sum(connection_bytes()) - 1))
        if messages > 0:
            further_bytes += pool
        return messages + leaving_calls, further_bytes

    def _of_more_ranks(self, communicator: Communicator) -> tuple[int, int]:
        """Say what a communicator may take less and more for ranks that nobody measured together.

        It counts as the largest measured one.  How many channels NCCL opens among more GPUs of a
        host follows from their links: ``FEWEST_CHANNELS`` to ``MOST_CHANNELS``.
        """
        ranks_on_host = communicator.size
        if communicator.local is not None:
            ranks_on_host = communicator.local
        if not self.measured or ranks_on_host <= self.measured[-1]:
            return 0, 0
        _, calls, messages = self._parts(communicator)
        channel = sum(connection_bytes())
        fewer_bytes = further_bytes = 0
        # a communicator's calls share their channels; each peer has channels of its own
        connections = [(calls, 1), (messages, min(communicator.peers, _HOST_PEERS))]
        for taken, count in connections:
            if taken > 0:
                fewer_bytes += max(0, taken - count * FEWEST_CHANNELS * channel)
                further_bytes += max(0, count * MOST_CHANNELS * channel - taken)
        # ``_of_other_hosts`` counts already that no message may stay on the host
        if communicator.local is not None and communicator.local < communicator.size:
            fewer_bytes = max(0, calls - FEWEST_CHANNELS * channel)
        return fewer_bytes, further_bytes

    def provenance(self) -> str:
        """For reports: what device bytes are made of."""
        if self.process is None:
            return "unknown: no calibration of context, workspaces and NCCL"
        process = f"{self.process:,} B"
        if not self.alone:
            without_nccl = f"a process takes {process} beyond reserved without NCCL"
            return f"unknown: {without_nccl} ({self.source}), its communicators are not measured"
        ranks = f"{self.measured[0]} to {self.measured[-1]} ranks ({self.source})"
        own = f"reserved, {process} of context and libraries"
        communicators = f"the job's communicators as measured for {ranks}"
        return f"modelled: {own}, and {communicators}; larger ones and other hosts extrapolated"


# -- the calibration file -------------------------------------------------------------------------
def shipped() -> dict[str, Path]:
    """Name -> file of every calibration that comes with the package."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.json"))}


def fitting(device: str) -> BufferCalibration | None:
    """The shipped calibration of a host of such devices (``NVIDIA H200``); None if none is."""
    for name, path in shipped().items():
        if name in device.lower().split():
            return read(path)
    return None


def read(name: str | os.PathLike[str]) -> BufferCalibration:
    """The shipped calibration of that name, or a file that ``benchmarks/tools/device_memory.py``
    wrote.

    UsageError for anything else.
    """
    with foreign.reading(
        shipped().get(str(name), name),
        "a calibration of device memory",
        "python -m benchmarks.tools.device_memory -o FILE.json writes one",
        absent=f"use {', '.join(shipped())}, or what benchmarks/tools/device_memory.py wrote",
    ) as path:
        return _calibration(foreign.read_json(path, _Stored))


_Bytes = Annotated[int, msgspec.Meta(gt=-(1 << 50), lt=1 << 50)]  # a difference may be below 0
_Few = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]


class _Row(msgspec.Struct):
    case: str
    step: str
    ranks: _Few
    bytes: Annotated[list[_Bytes], msgspec.Meta(min_length=1)]
    repeat: _Few = 0


class _Process(msgspec.Struct):
    bytes: foreign.Natural


class _Stored(msgspec.Struct):
    source: str
    format: Literal[1]
    rows: list[_Row]
    process: _Process | None = None


_Cells = dict[tuple[str, int, int, str], list[int]]  # case, ranks, repeat, step -> of each rank


def _calibration(stored: _Stored) -> BufferCalibration:
    """What the file says, in the terms of ``BufferCalibration``."""
    cells: _Cells = {}
    for row in stored.rows:
        cells[row.case, row.ranks, row.repeat, row.step] = row.bytes
    return BufferCalibration(
        _process_bytes(stored, cells), _paid_once(cells), _alone(cells), stored.source
    )


def _process_bytes(stored: _Stored, cells: _Cells) -> int | None:
    """What a training process takes; where the file says none, the steps of its start."""
    if stored.process:
        return stored.process.bytes
    start = 0
    for (case, *_), rank_bytes in cells.items():
        if case == "start":
            start += median_low(rank_bytes)
    return start or None


def _paid_once(cells: _Cells) -> int:
    """What a rank takes the first time that all is connected and not the second, at most."""
    paid: Counter[int] = Counter()
    for (case, size, repeat, step), rank_bytes in cells.items():
        if case != "in turn" or repeat != 0:
            continue
        again = cells.get((case, size, 1, step), rank_bytes)
        for rank, (first_bytes, again_bytes) in enumerate(zip(rank_bytes, again, strict=False)):
            paid[rank] += first_bytes - again_bytes
    return max(0, *paid.values(), 0)


def _alone(cells: _Cells) -> dict[tuple[str, int], int]:
    """(kind, ranks) -> bytes, of the sizes whose communicator was made a second time."""
    alone: dict[tuple[str, int], int] = {}
    for (case, size, repeat, step), rank_bytes in cells.items():
        # the first time holds what a process takes once
        if (case, step) != ("in turn", "init") or repeat == 0:
            continue
        init = max(0, median_low(rank_bytes))
        alone["init", size] = init
        alone["all", size] = max(0, _rings_in_turn(cells, size, repeat) - init)
        for kind, name in _ALONE.items():
            step_bytes = cells.get(("alone", size, 0, name))
            if step_bytes is None:
                continue
            taken = median_low(step_bytes)
            # of neighbours rank 0 has one, those between two
            if kind == "peer":
                taken = step_bytes[0]
            alone[kind, size] = max(0, taken - init)
        pair = cells.get(("alone", size, 0, "unbatched_16MiB"), [])
        if len(pair) == size == 2:
            alone["out", 2] = max(0, pair[0] - init)
            alone["in", 2] = max(0, pair[1] - init)
    return alone


def _rings_in_turn(cells: _Cells, size: int, repeat: int) -> int:
    """All steps of a communicator one behind the other, without those that connect peers."""
    total = 0
    for cell, rank_bytes in cells.items():
        name = cell[3]
        if cell[:3] != ("in turn", size, repeat) or name.startswith(("neighb", "all_to")):
            continue
        total += median_low(rank_bytes)
    return total


_ALONE = {
    "small": "all_reduce_1KiB",
    "large": "all_reduce_64MiB",
    "ring": "all_gather_16MiB",
    "peer": "neighbours_16MiB",
}

ON_HOST = "_GLOO"  # Megatron's names of groups of host tensors end so
SMALL = 1 << 18  # bytes up to which an all-reduce counts as small (measured: 1 KiB and 64 MiB)
_REDUCES = ("all_reduce", "reduce", "barrier")
_EXCHANGES = ("all_to_all", "all_to_all_single")


class ConnectedCommunicators:
    """The communicators that a rank's calls have connected, in the order of their first use.

    Messages of a batch go through their group's communicator, which connects the two; each pair of
    other messages has a communicator of its own (torch's ProcessGroupNCCL).
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], Communicator] = {}
        self._peers: dict[str, set[int]] = {}

    def add(
        self,
        group: str,
        size: int,
        op: str,
        num_bytes: int,
        distance: int = 0,
        batched: bool = True,
        local: int | None = None,
    ) -> tuple[Communicator | None, Communicator]:
        """The communicator of a call, (before it, None if it was not there; with what it connects).

        distance : of a message, how many places further in the group the other end is; 0 for what
                   is no message
        local    : of Communicator
        """
        message = op in ("send", "recv")
        pair = message and not batched and distance > 0
        # an unbatched message has a communicator of two ranks
        if pair:
            return self._add_pair(group, op, distance, local)
        before = self._made.get((group, 0))
        communicator = before or Communicator(group, size, local=local)
        kinds = communicator.kinds
        peers = self._peers.setdefault(group, set())
        # batched messages connect ranks at their distance in the group
        if message:
            peers.add(distance)
        # torch makes them of messages, in a batch of all pairs
        elif op in _EXCHANGES:
            peers.update(range(1, size))
        # small reductions take another algorithm, with connections of its own
        elif op in _REDUCES:
            kind = "large"
            if num_bytes <= SMALL:
                kind = "small"
            kinds = kinds | {kind}
        # other collectives go around a ring
        else:
            kinds = kinds | {"ring"}
        after = replace(communicator, kinds=kinds, peers=len(peers - {0}))
        self._made[group, 0] = after
        return before, after

    def _add_pair(
        self, group: str, op: str, distance: int, local: int | None
    ) -> tuple[Communicator | None, Communicator]:
        """The communicator of a message outside a batch, as ``add`` returns it."""
        before = self._made.get((group, distance))
        communicator = before or Communicator(f"{group} pair", 2, local=local)
        way = "in"
        if op == "send":
            way = "out"
        after = replace(communicator, kinds=communicator.kinds | {way}, peers=0)
        self._made[group, distance] = after
        return before, after

    def all(self) -> tuple[Communicator, ...]:
        """All of them."""
        return tuple(self._made.values())


def used_by(programs: Programs, index: int) -> tuple[Communicator, ...]:
    """Communicators of the ranks that run program ``index``, pairs of unbatched p2p included.

    The group of all ranks is always one: every script has a barrier before it trains.
    """
    program = programs.programs[index]
    rank = int(programs.ranks_of(index)[0])
    ops = program.ops
    used = ConnectedCommunicators()
    everyone = range(programs.world.size)
    host = programs.world.gpus_per_node or _HOST
    used.add(WORLD_GROUP, len(everyone), "barrier", 0, local=_on_host(everyone, rank, host))
    members = cache(lambda group: _members(programs, group, rank))
    calls = ops[IS_NCCL[ops["name"]] & (ops["group"] != 0)]
    columns = [calls[key].tolist() for key in ("name", "group", "peer", "dtype", "num_in")]
    batches = (calls["batch"] >= 0).tolist()
    distinct_calls = sorted(set(zip(*columns, batches, strict=True)))
    for code, text, peer, dtype, num_in, batched in distinct_calls:
        group = program.strings[text]
        ranks = members(group)
        size = len(ranks)
        distance = 0
        if IS_PAIR[code]:
            distance = peer % size
            # a message to the rank itself needs no connection
            if distance == 0:
                continue
        num_bytes = num_in * int(ITEM_SIZE[dtype])
        if distance and not batched:  # they have a communicator of their own
            ranks = (rank, ranks[(ranks.index(rank) + distance) % size])
        local = _on_host(ranks, rank, host)
        used.add(group, size, NAMES[code], num_bytes, distance, batched, local)
    return used.all()


@dataclass(frozen=True)
class BeyondReserved:
    """What a rank's process takes beyond its reserved bytes; None where it was not measured.

    nccl      : of its communicators
    between   : the least and the most that ``nccl`` may be
    num_bytes : ``nccl``, context and libraries
    """

    nccl: int | None = None
    between: tuple[int, int] | None = None
    num_bytes: int | None = None


def beyond_reserved(
    programs: Programs, index: int, calibration: BufferCalibration
) -> BeyondReserved:
    """What the ranks that run program ``index`` take beyond reserved bytes."""
    used = used_by(programs, index)
    nccl, process = calibration.nccl(used), calibration.process
    total = None
    if nccl is not None and process is not None:
        total = nccl + process
    return BeyondReserved(nccl, calibration.between(used), total)


def _on_host(members: Sequence[int], rank: int, host: int) -> int:
    """How many of them are on the host of ``rank``, where ranks fill hosts of ``host`` in their
    order.
    """
    return sum(member // host == rank // host for member in members)


def _members(programs: Programs, group: str, rank: int) -> Sequence[int]:
    """The ranks of the group of that description that has ``rank``."""
    lists = programs.groups.get(group)
    # a group that follows from the layout is not listed
    if lists is None:
        groups = of_family(programs.world, group)
    else:
        groups = of_lists(group, lists, programs.world.size)
    return tuple(groups.group(rank).tolist())
