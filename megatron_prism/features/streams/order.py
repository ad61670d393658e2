"""The order that streams and events give to accesses of memory, and accesses without one.

Each stream has a vector clock: for each other stream, how much of its work is certainly done when
the next kernel of the stream starts.  Events carry clocks from one stream to another.  Two accesses
of the same bytes on two streams, one of them a write, need an order.  Memory that is freed goes
back to the pool of the stream that allocated it, and the next request of that stream may get it at
once: accesses of the former tensor need an order before the first access of the next one.
``record_stream`` makes the allocator wait itself (c10/cuda/CUDACachingAllocator.cpp, free and
process_events @v2.11).

It does not know which block the allocator would choose: each later request of the same pool counts
as one that gets the memory.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from megatron_prism.features.streams.trace import MAIN, Kind, RowPlace, StreamTrace

NCCL = "nccl "  # begin of the name of a communicator's stream
SMALL_BYTES = 1 << 20  # requests up to here have pools of their own (kSmallSize @v2.11)


class FaultKind(enum.Enum):
    """What is wrong with two accesses."""

    REUSED = "memory is reused before the stream that uses it has finished"
    FOREIGN = "memory of a stream's pool is used on another stream without waiting for the first"
    OVERWRITTEN = "a tensor is overwritten before the stream that reads it has finished"
    UNFINISHED = "a tensor is read before the stream that writes it has finished"
    WRITTEN_TWICE = "two streams write a tensor without an order"


@dataclass(frozen=True)
class Access:
    """One access.

    Args:
        stream: place among the streams of the trace.
        epoch: of the stream; the epochs of a stream end at its events.
        place: operator, line and step.
        low: first byte in the storage.
        high: behind the last byte.
        writes: whether it is a write.
    """

    stream: int
    epoch: int
    place: int
    low: int
    high: int
    writes: bool

    def overlaps(self, other: Access) -> bool:
        """Whether both touch a byte."""
        return self.low < other.high and other.low < self.high


@dataclass(frozen=True)
class StreamFault:
    """Two accesses without an order.

    Args:
        kind: of the fault.
        rank: global rank.
        tensor: type, shape, line and step of the tensor that the first access is of.
        num_bytes: size of its storage; -1: it is older than the iteration.
        pool: name of the stream whose pool the storage is of.
        first: the earlier access, in the order of issue.
        first_stream: name of its stream.
        second: the later access.
        second_stream: name of its stream.
        fix: what the code lacks.
    """

    kind: FaultKind
    rank: int
    tensor: RowPlace
    num_bytes: int
    pool: str
    first: RowPlace
    first_stream: str
    second: RowPlace
    second_stream: str
    fix: str


@dataclass(frozen=True)
class Coverage:
    """What was looked at: numbers of accesses, storages, events, streams and graph launches."""

    accesses: int
    storages: int
    events: int
    waits: int
    streams: int
    graph_launches: int


@dataclass
class _Storage:
    """What is known of a storage.

    Args:
        pool: stream whose pool it is of.
        num_bytes: its size; -1: it is older than the trace.
        place: of its allocation.
        accesses: those that no later write has replaced.
        used_on: streams that ``record_stream`` named.
        former: former users of its memory, maybe; looked at until each stream has come by.
        holders: events of NCCL's calls that hold it.
        is_freed: nobody holds it but such calls.
    """

    pool: int = MAIN
    num_bytes: int = -1
    place: int = 0
    accesses: list[Access] = field(default_factory=list)
    used_on: set[int] = field(default_factory=set)
    former: list[_Former] = field(default_factory=list)
    holders: set[int] = field(default_factory=set)
    is_freed: bool = False

    @property
    def is_small(self) -> bool:
        """Whether it is of the pool for small requests."""
        return self.num_bytes <= SMALL_BYTES


@dataclass(frozen=True)
class _Former:
    """An access of memory that has been given back, and the storage that it was of."""

    access: Access
    storage: _Storage


class _Checker:
    """Goes through the rows of a trace once."""

    def __init__(self, trace: StreamTrace) -> None:
        self._trace = trace
        size = len(trace.streams)
        # what each stream knows to be done of each stream; epochs begin at 1
        self._clocks = [[0] * size for _ in range(size)]
        self._epochs = [1] * size
        self._events: dict[int, list[int]] = {}
        self._recorded_on: dict[int, int] = {}  # event -> stream
        self._issuers: dict[int, int] = {}  # stream of NCCL -> stream that issued its last call
        self._storages: dict[int, _Storage] = {}
        self._given_back: dict[tuple[int, bool], list[_Former]] = {}
        self._held: dict[int, set[int]] = {}  # event of a call -> storages
        self._numbers = {"accesses": 0, "waits": 0, "storages": 0}
        self.faults: dict[tuple[object, ...], StreamFault] = {}
        self.counts: dict[tuple[object, ...], int] = {}

    def run(self) -> Coverage:
        """Look at all rows."""
        handlers: dict[Kind, Callable[..., None]] = {
            Kind.ALLOCATE: self._allocate,
            Kind.FREE: self._free,
            Kind.READ: self._access,
            Kind.WRITE: self._access,
            Kind.RECORD: self._record,
            Kind.WAIT: self._wait,
            Kind.HOST_STREAM: self._host_waits_for_stream,
            Kind.HOST_EVENT: self._host_waits_for_event,
            Kind.HOST_DEVICE: self._host_waits_for_device,
            Kind.USE: self._use,
            Kind.HOLD: self._hold,
        }
        for kind, stream, number, low, high, text in self._trace.rows.tolist():
            handlers[Kind(kind)](kind, stream, number, low, high, text)
        return Coverage(
            accesses=self._numbers["accesses"],
            storages=self._numbers["storages"],
            events=len(self._events),
            waits=self._numbers["waits"],
            streams=len(self._trace.streams),
            graph_launches=self._trace.graph_launches,
        )

    # -- order ------------------------------------------------------------------------------------
    def _record(self, kind: int, stream: int, event: int, *_: int) -> None:
        """An event has all that its stream knows, and the work of the stream until now."""
        clock = list(self._clocks[stream])
        clock[stream] = self._epochs[stream]
        self._events[event] = clock
        self._recorded_on[event] = stream
        self._epochs[stream] += 1

    def _wait(self, kind: int, stream: int, event: int, *_: int) -> None:
        """A wait for an event that was never recorded does nothing, as in CUDA."""
        self._numbers["waits"] += 1
        clock = self._events.get(event)
        if clock is not None:
            self._join(stream, clock)
            # a stream of NCCL works for the stream that the awaited event is of
            if self._trace.streams[stream].startswith(NCCL):
                self._issuers[stream] = self._recorded_on[event]
        # storages whose memory waits for this event
        for number in self._held.pop(event, ()):
            self._release(number, event)

    def _join(self, stream: int, clock: list[int]) -> None:
        """Let a stream know all that a clock has."""
        known_epochs = self._clocks[stream]
        for leader, epoch in enumerate(clock):
            known_epochs[leader] = max(known_epochs[leader], epoch)

    def _host_knows(self, clock: list[int]) -> None:
        """Kernels that the host issues from here on start behind all that it has waited for."""
        for stream in range(len(self._clocks)):
            self._join(stream, clock)

    def _host_waits_for_stream(self, kind: int, stream: int, *_: int) -> None:
        clock = list(self._clocks[stream])
        clock[stream] = self._epochs[stream]
        self._epochs[stream] += 1
        self._host_knows(clock)

    def _host_waits_for_event(self, kind: int, stream: int, event: int, *_: int) -> None:
        clock = self._events.get(event)
        if clock is not None:
            self._host_knows(clock)

    def _host_waits_for_device(self, *_: int) -> None:
        clock = list(self._epochs)
        for stream in range(len(self._epochs)):
            self._epochs[stream] += 1
        self._host_knows(clock)

    def _is_before(self, access: Access, stream: int) -> bool:
        """Whether an access is done when the next kernel of a stream starts."""
        return access.stream == stream or self._clocks[stream][access.stream] >= access.epoch

    # -- memory -----------------------------------------------------------------------------------
    def _storage(self, number: int) -> _Storage:
        storage = self._storages.get(number)
        if storage is None:  # older than the trace
            storage = self._storages[number] = _Storage()
            self._numbers["storages"] += 1
        return storage

    def _allocate(
        self, kind: int, stream: int, number: int, low: int, num_bytes: int, text: int
    ) -> None:
        """The memory may be that of any tensor whose memory the same pool has got back."""
        storage = self._storages[number] = _Storage(stream, num_bytes, text)
        self._numbers["storages"] += 1
        pool = (stream, storage.is_small)
        former = self._given_back.get(pool)
        if former:
            # those that all streams have left behind conflict with nothing
            open_storages = [old for old in former if not self._is_done_everywhere(old.access)]
            self._given_back[pool] = open_storages
            storage.former = list(open_storages)

    def _is_done_everywhere(self, access: Access) -> bool:
        """Whether each stream is behind an access, so that nobody needs to look at it again."""
        for stream in range(len(self._clocks)):
            if not self._is_before(access, stream):
                return False
        return True

    def _free(self, kind: int, stream: int, number: int, *_: int) -> None:
        storage = self._storages.get(number)
        if storage is None:
            return
        storage.is_freed = True
        if not storage.holders:
            self._give_back(number, storage)

    def _release(self, number: int, event: int) -> None:
        """Somebody waits for a call of NCCL, which so lets its tensors go."""
        storage = self._storages.get(number)
        if storage is None:
            return
        storage.holders.discard(event)
        if storage.is_freed and not storage.holders:
            self._give_back(number, storage)

    def _give_back(self, number: int, storage: _Storage) -> None:
        """Its pool gets the memory, with those accesses that some stream does not wait for."""
        del self._storages[number]
        pool = self._given_back.setdefault((storage.pool, storage.is_small), [])
        latest: dict[int, Access] = {}
        for access in storage.accesses:
            known_access = latest.get(access.stream)
            # of each stream the latest access stands for all before it
            if known_access is None or known_access.epoch <= access.epoch:
                latest[access.stream] = access
        for access in latest.values():
            # only an access that is neither awaited nor over can harm the next owner
            if not self._is_awaited(storage, access) and not self._is_done_everywhere(access):
                self._replace_former(pool, _Former(access, storage))

    def _is_awaited(self, storage: _Storage, access: Access) -> bool:
        """Whether the allocator waits for an access: it records an event on each stream that
        ``record_stream`` named when the memory is freed, which is behind all that such a stream has
        waited for.
        """
        for stream in storage.used_on:
            if stream != storage.pool and self._is_before(access, stream):
                return True
        return False

    def _replace_former(self, pool: list[_Former], new: _Former) -> None:
        """Of accesses of one stream by one line the last one says all; so it does of the pool's own
        stream, whichever line it is.
        """
        is_own = new.access.stream == new.storage.pool
        for index, former in enumerate(pool):
            # accesses of other streams end at other times
            if former.access.stream != new.access.stream:
                continue
            # one place of the program, or the pool's own stream: the later access says all
            if is_own or former.access.place == new.access.place:
                if former.access.epoch <= new.access.epoch:
                    pool[index] = new
                return
        pool.append(new)

    def _use(self, kind: int, stream: int, number: int, *_: int) -> None:
        self._storage(number).used_on.add(stream)

    def _hold(self, kind: int, stream: int, number: int, event: int, *_: int) -> None:
        self._storage(number).holders.add(event)
        self._held.setdefault(event, set()).add(number)

    # -- accesses ---------------------------------------------------------------------------------
    def _access(self, kind: int, stream: int, number: int, low: int, high: int, text: int) -> None:
        self._numbers["accesses"] += 1
        storage = self._storage(number)
        access = Access(stream, self._epochs[stream], text, low, high, kind == Kind.WRITE)
        # the memory had another owner, whose accesses may not be over
        if storage.former:
            self._check_former(storage, access)
        accesses = []
        for earlier in storage.accesses:
            is_before = self._is_before(earlier, stream)
            # two reads never conflict
            conflicts = (earlier.writes or access.writes) and earlier.overlaps(access)
            if conflicts and not is_before:
                self._conflict(storage, earlier, access)
            # an access that this one covers, and that is over before, says nothing more
            if not _replaces(access, earlier, is_before):
                accesses.append(earlier)
        accesses.append(access)
        storage.accesses = accesses

    def _check_former(self, storage: _Storage, access: Access) -> None:
        """The first accesses of new memory come behind the last ones of what it was before."""
        left = []
        for former in storage.former:
            if self._is_before(former.access, access.stream):
                left.append(former)
                continue
            self._reuse(former, storage, access)
        storage.former = left

    def _reuse(self, former: _Former, storage: _Storage, access: Access) -> None:
        names = self._trace.streams
        pool = names[former.storage.pool]
        # the pool's stream is behind the former use, and the new user is not behind that stream
        if self._is_before(former.access, former.storage.pool):
            fix = f"{names[access.stream]}.wait_stream({pool}) before its first use of the tensor"
            self._add(FaultKind.FOREIGN, storage, former.access, access, fix)
            return
        # code knows the stream that waits for a call, not the one of the communicator
        user = names[self._issuers.get(former.access.stream, former.access.stream)]
        fix = f"tensor.record_stream({user}) behind its use there, or {pool}.wait_stream({user}) "
        self._add(
            FaultKind.REUSED, former.storage, former.access, access, fix + "before it is freed"
        )

    def _conflict(self, storage: _Storage, first: Access, second: Access) -> None:
        kind = FaultKind.OVERWRITTEN
        # a read that a write overtakes; else a write that a write or a read overtakes
        if first.writes:
            kind = FaultKind.WRITTEN_TWICE if second.writes else FaultKind.UNFINISHED
        names = self._trace.streams
        earlier, later = names[first.stream], names[second.stream]
        fix = f"{later}.wait_stream({earlier}), or wait_event, before the second access"
        # calls are waited for by their handle
        if earlier.startswith(NCCL):
            fix = f"wait() of the call's handle on {later} before the second access"
        self._add(kind, storage, first, second, fix)

    def _add(
        self, kind: FaultKind, storage: _Storage, first: Access, second: Access, fix: str
    ) -> None:
        """Keep one fault for each pair of lines."""
        places, names = self._trace.places, self._trace.streams
        first_place, second_place = places[first.place], places[second.place]
        key: tuple[object, ...] = (kind, first_place.what, first_place.site, names[first.stream])
        # memory that is reused may be anybody's: the first to get it stands for all
        if kind is not FaultKind.REUSED:
            key += (second_place.site, names[second.stream])
        self.counts[key] = self.counts.get(key, 0) + 1
        if key in self.faults:
            return
        self.faults[key] = StreamFault(
            kind=kind,
            rank=self._trace.rank,
            tensor=places[storage.place],
            num_bytes=storage.num_bytes,
            pool=names[storage.pool],
            first=first_place,
            first_stream=names[first.stream],
            second=second_place,
            second_stream=names[second.stream],
            fix=fix,
        )


def _replaces(access: Access, earlier: Access, is_before: bool) -> bool:
    """Whether an access says all that an earlier one does about accesses to come."""
    covers = access.low <= earlier.low and earlier.high <= access.high
    if not covers or not is_before:
        return False
    # a write behind an access: whatever comes behind the write comes behind the access
    if access.writes:
        return True
    return not earlier.writes and access.stream == earlier.stream


@dataclass(frozen=True)
class StreamVerdict:
    """What is proved or refuted of one rank.

    Args:
        rank: global rank.
        tier: of the capture.
        faults: pairs of accesses without an order, each pair of lines once.
        counts: how often each was met.
        coverage: what was looked at.
    """

    rank: int
    tier: str
    faults: tuple[StreamFault, ...]
    counts: tuple[int, ...]
    coverage: Coverage

    def __iter__(self) -> Iterator[tuple[StreamFault, int]]:
        """Go through the faults, each with how often it was met."""
        return zip(self.faults, self.counts, strict=True)


def check_trace(trace: StreamTrace) -> StreamVerdict:
    """Prove that accesses of a rank's memory have an order, or name those without one."""
    checker = _Checker(trace)
    coverage = checker.run()
    faults = tuple(checker.faults.values())
    counts = tuple(checker.counts[key] for key in checker.faults)
    return StreamVerdict(trace.rank, trace.tier, faults, counts, coverage)
