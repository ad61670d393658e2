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
from operator import sub
from pathlib import Path
from statistics import median_low
from typing import Annotated, Literal

import msgspec

from megatron_prism.core import foreign
from megatron_prism.core.groups import WORLD_GROUP, of_family, of_lists
from megatron_prism.core.ops import IS_NCCL, IS_PAIR, ITEM_SIZE, NAMES
from megatron_prism.core.program import Programs

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

    def bytes_of(self, one: Communicator) -> int | None:
        """What ``one`` takes; sizes beyond the largest measured take what that takes."""
        fitting = [size for size in self.measured if size <= one.size]
        if not fitting or one.size > 1 and fitting[-1] == 1:
            return None
        size = fitting[-1]
        total = self.alone["init", size]
        if size == 1:
            return total
        if one.kinds & _WAYS:
            ways = [self.alone.get((kind, 2)) for kind in one.kinds]
            return None if None in ways else total + sum(ways)  # type: ignore[arg-type]
        apart = [self.alone.get((kind, size)) for kind in sorted(one.kinds)]
        peer = self.alone.get(("peer", size)) if one.peers else 0
        peers = min(one.peers, _HOST_PEERS)
        if peer is None or None in apart:
            return None
        together = self.alone.get(("all", size), sum(apart))  # type: ignore[arg-type]
        calls = sum(apart) if len(apart) < 2 else min(sum(apart), together)  # type: ignore[arg-type]
        return total + calls + peers * peer

    def nccl(self, used: Sequence[Communicator]) -> int | None:
        """All of a rank's communicators together; None if one of them was not measured."""
        sizes = [self.bytes_of(one) for one in used]
        if not self.alone or None in sizes:
            return None
        return self.once + sum(sizes)  # type: ignore[arg-type]

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
            less, more = self._of_other_hosts(communicator)
            low -= less
            high += more
            less, more = self._of_more_ranks(communicator)
            low -= less
            high += more
        return low, high

    def _parts(self, communicator: Communicator) -> tuple[int, int, int]:
        """Split a communicator's bytes: (before any call, of its calls, of its messages)."""
        rings = frozenset[str]()
        if not communicator.kinds & _WAYS:
            rings = communicator.kinds
        whole = self.bytes_of(communicator) or 0
        without_messages = self.bytes_of(replace(communicator, kinds=rings, peers=0)) or 0
        init = self.bytes_of(replace(communicator, kinds=frozenset(), peers=0)) or 0
        return init, without_messages - init, whole - without_messages

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
        more = round(leaving_calls * (channel / sum(connection_bytes()) - 1))
        if messages > 0:
            more += pool
        return messages + leaving_calls, more

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
        less = more = 0
        # a communicator's calls share their channels; each peer has channels of its own
        connections = [(calls, 1), (messages, min(communicator.peers, _HOST_PEERS))]
        for taken, count in connections:
            if taken > 0:
                less += max(0, taken - count * FEWEST_CHANNELS * channel)
                more += max(0, count * MOST_CHANNELS * channel - taken)
        # ``_of_other_hosts`` counts already that no message may stay on the host
        if communicator.local is not None and communicator.local < communicator.size:
            less = max(0, calls - FEWEST_CHANNELS * channel)
        return less, more

    def provenance(self) -> str:
        """For reports: what device bytes are made of."""
        if self.process is None:
            return "unknown: no calibration of context, workspaces and NCCL"
        process = f"{self.process:,} B"
        if not self.alone:
            return (f"unknown: a process takes {process} beyond reserved without NCCL "
                    f"({self.source}), its communicators are not measured")  # fmt: skip
        ranks = f"{self.measured[0]} to {self.measured[-1]} ranks ({self.source})"
        return (f"modelled: reserved, {process} of context and libraries, and the job's "
                f"communicators as measured for {ranks}; larger ones and other hosts "
                "extrapolated")  # fmt: skip


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


def _calibration(stored: _Stored) -> BufferCalibration:
    cells = {(row.case, row.ranks, row.repeat, row.step): row.bytes for row in stored.rows}
    start = sum(median_low(size) for (case, *_), size in cells.items() if case == "start")
    process = stored.process.bytes if stored.process else start or None
    alone: dict[tuple[str, int], int] = {}
    paid: Counter[int] = Counter()  # of each rank, the first time and not the second
    for (case, size, repeat, step), taken in cells.items():
        if case == "in turn" and repeat == 0:
            again = cells.get((case, size, 1, step), taken)
            paid.update(dict(enumerate(map(sub, taken, again))))
        if (case, step) != ("in turn", "init") or repeat == 0:
            continue
        init = alone["init", size] = max(0, median_low(taken))
        turn = {cell[3]: median_low(found) for cell, found in cells.items()
                if cell[:3] == (case, size, repeat)}  # fmt: skip
        together = sum(n for name, n in turn.items() if not name.startswith(("neighb", "all_to")))
        alone["all", size] = max(0, together - init)
        for kind, name in _ALONE.items():
            if (cell := cells.get(("alone", size, 0, name))) is not None:
                # of neighbours rank 0 has one, those between two
                alone[kind, size] = max(0, (cell[0] if kind == "peer" else median_low(cell)) - init)
        pair = cells.get(("alone", size, 0, "unbatched_16MiB"), [])
        if len(pair) == size == 2:
            alone["out", 2], alone["in", 2] = (max(0, taken - init) for taken in pair)
    return BufferCalibration(process, max(0, *paid.values(), 0), alone, stored.source)


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
        key, peers = (group, distance if pair else 0), self._peers.setdefault(group, set())
        before = self._made.get(key)
        one = before or Communicator(
            f"{group} pair" if pair else group, 2 if pair else size, local=local
        )
        kinds = one.kinds
        if pair:
            kinds = kinds | {"out" if op == "send" else "in"}
        elif message:
            peers.add(distance)
        elif op in _EXCHANGES:
            peers.update(range(1, size))
        elif op in _REDUCES:
            kinds = kinds | {"small" if num_bytes <= SMALL else "large"}
        else:
            kinds = kinds | {"ring"}
        now = self._made[key] = replace(one, kinds=kinds, peers=0 if pair else len(peers - {0}))
        return before, now

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
    for code, text, peer, dtype, num_in, batched in sorted(
        set(zip(*columns, batches, strict=True))
    ):
        group = program.strings[text]
        ranks = members(group)
        size = len(ranks)
        distance = peer % size if IS_PAIR[code] else 0
        if distance or not IS_PAIR[code]:
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
    total = None if nccl is None or process is None else nccl + process
    return BeyondReserved(nccl, calibration.between(used), total)


def _on_host(members: Sequence[int], rank: int, host: int) -> int:
    """How many of them are on the host of ``rank``, where ranks fill hosts of ``host`` in their
    order.
    """
    return sum(member // host == rank // host for member in members)


def _members(programs: Programs, group: str, rank: int) -> Sequence[int]:
    size, lists = programs.world.size, programs.groups.get(group)
    known = of_family(programs.world, group) if lists is None else of_lists(group, lists, size)
    return tuple(known.group(rank).tolist())
