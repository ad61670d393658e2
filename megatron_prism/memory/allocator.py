"""A model of PyTorch's caching allocator: the bytes it would reserve for given allocations.

In : (storage, bytes) events in order, bytes negative for a free; a stream each if there are
several.  Out: segments, blocks and peaks.  The rules are those of c10/cuda/CUDACachingAllocator.cpp
(torch 2.11 to 2.13): sizes round up to 512 B (or as ``roundup_power2_divisions`` says); up to 1 MiB
come from 2 MiB segments of the small pool; below 10 MiB from 20 MiB segments, above from segments
of their own in multiples of 2 MiB; every stream has its own pools; best fit (smallest block, then
lowest address); a block is split if 512 B or more (small), more than 1 MiB (large) would be left;
neighbours that are both free merge.  With expandable segments each pool is one segment that grows
in pages (2 and 20 MiB) at its end, and its free end is used last.  Under a limit, segments that are
all free are given back before memory has run out, and single pages of expandable segments.
Not modelled: garbage collection, private pools, and memory outside the allocator.
"""

from __future__ import annotations

import bisect
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_prism.core.errors import PrismError, UnsupportedError, UsageError
from megatron_prism.core.programs.ops import EMPTIED, WAITED

MIB = 1 << 20
ROUND = 512  # bytes that every size is a multiple of
UNLIMITED = 1 << 62
_INTERVALS = 16  # of roundup_power2_divisions: 1 MiB, 2 MiB, … 64 GiB
_HARMLESS = (  # they move time, or work on what is not modelled
    "garbage_collection_threshold",  # collects only under a memory fraction, which is refused
    "pinned_num_register_threads",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
)
_KNOWN = (
    "backend",
    "graph_capture_record_stream_reuse",
    "large_segment_size_mb",
    "per_process_memory_fraction",
)


@dataclass(frozen=True)
class Settings:
    """The allocator's options.

    expandable    : one growing segment per pool and stream
    divisions     : 16 numbers, into how many parts sizes from 1, 2, 4 … MiB up to the next power of
                    two are divided before they are rounded up; 0: multiples of 512 B
    max_split     : bytes from which a block is neither split nor given to smaller requests
    max_non_split : bytes by which such a block may exceed its request
    """

    expandable: bool = False
    divisions: tuple[int, ...] = (0,) * _INTERVALS
    max_split: int = UNLIMITED
    max_non_split: int = 20 * MIB

    @staticmethod
    def parse(text: str) -> Settings:
        """``expandable_segments:True,max_split_size_mb:128`` as in PYTORCH_CUDA_ALLOC_CONF."""
        options: dict[str, object] = {}
        # commas inside of brackets are part of a value
        for part in filter(None, re.split(r",(?![^\[]*\])", text.strip())):
            key, colon, value = (word.strip() for word in part.partition(":"))
            if not colon or not key or not value:
                raise UsageError(f"{part!r} is no option:value", fix="expandable_segments:True")
            # options that the model has
            if key in _OPTIONS:
                name, read = _OPTIONS[key]
                options[name] = read(key, value)
            # options of torch that change blocks in ways that are not modelled
            elif key in _KNOWN and (key, value) != ("backend", "native"):
                message = f"{key} of PYTORCH_CUDA_ALLOC_CONF is not modelled"
                raise UnsupportedError(message, fix="leave it out")
            elif key not in (*_KNOWN, *_HARMLESS):
                message = f"PYTORCH_CUDA_ALLOC_CONF has no {key}"
                raise UsageError(message, fix="expandable_segments:True")
        return Settings(**options)  # type: ignore[arg-type]

    @staticmethod
    def of_environment(environment: Mapping[str, str]) -> Settings | None:
        """Read the options of a process from its environment; None where they are not modelled."""
        text = environment.get("PYTORCH_ALLOC_CONF") or environment.get(
            "PYTORCH_CUDA_ALLOC_CONF", ""
        )
        try:
            return Settings.parse(text)
        except PrismError:
            return None

    def rounded(self, num_bytes: int) -> int:
        """What a request of ``num_bytes`` takes at least."""
        if num_bytes < ROUND:
            return ROUND
        interval = min(max(num_bytes.bit_length() - 21, 0), _INTERVALS - 1)
        parts = self.divisions[interval]
        if parts > 1 and num_bytes > ROUND * parts:
            step = (1 << (num_bytes.bit_length() - 1)) // (1 << (parts.bit_length() - 1))
            return -(-num_bytes // step) * step
        return -(-num_bytes // ROUND) * ROUND

    def segment(self, num_bytes: int) -> int:
        """The segment that the device is asked for where no free block fits such a request."""
        size = self.rounded(num_bytes)
        if size <= SMALL:
            return SMALL_SEGMENT
        if size < OWN_SEGMENT:
            return LARGE_SEGMENT
        return -(-size // (2 * MIB)) * (2 * MIB)


def _flag(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise UsageError(f"{key} cannot be {value}", fix=f"{key}:True")
    return value == "True"


def _megabytes(key: str, value: str) -> int:
    if not value.isdecimal() or len(value) > 18 or int(value) < 21:
        raise UsageError(f"{key} cannot be {value}", fix=f"{key}:128")
    return int(value) * MIB


def _divisions(key: str, value: str) -> tuple[int, ...]:
    """``4`` for all sizes, or ``[256:1,512:2,>:4]``: up to 256 MB, 512 MB, beyond."""

    def power(text: str) -> int:
        if not text.isdecimal() or len(text) > 18 or int(text).bit_count() != 1:
            message = f"{key}: {text} is no power of two"
            raise UsageError(message, fix=f"{key}:4, or {key}:[256:1,512:2,>:4]")
        return int(text)

    listed = re.fullmatch(r"\[(.*)\]", value)
    if not listed:
        return (power(value),) * _INTERVALS
    parts = [0] * _INTERVALS
    last, divisions = 0, ""
    for part in listed[1].split(","):
        size, colon, divisions = (word.strip() for word in part.partition(":"))
        if size == ">":
            break
        if not colon:
            raise UsageError(f"{key} cannot be {value}", fix=f"{key}:[256:1,512:2,>:4]")
        end = min(power(size).bit_length(), _INTERVALS)  # 1 MB is interval 0
        parts[last:end] = [power(divisions)] * (end - last)
        last = max(last, end)
    # sizes beyond the last one are divided like it
    return (*parts[:last], *[power(divisions)] * (_INTERVALS - last))


_OPTIONS: dict[str, tuple[str, Callable[[str, str], object]]] = {
    "expandable_segments": ("expandable", _flag),
    "max_split_size_mb": ("max_split", _megabytes),
    "max_non_split_rounding_mb": ("max_non_split", _megabytes),
    "roundup_power2_divisions": ("divisions", _divisions),
}
SMALL = 1 * MIB  # up to here from the small pool
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
OWN_SEGMENT = 10 * MIB  # from here a segment of its own, in multiples of 2 MiB
AHEAD = 1024  # launches that CUDA lets be outstanding, about
GAP = 1 << 44  # between segments: they never touch, so they never merge

Pool = tuple[int, bool]  # stream, whether it is for small blocks


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment; ``before`` and ``after`` are its neighbours there."""

    address: int
    size: int
    pool: Pool
    free: bool = False
    before: Block | None = None
    after: Block | None = None


@dataclass(frozen=True)
class OutOfMemory:
    """A request that did not fit: its rounded size, what was reserved (without caches), in use."""

    event: int
    size: int
    reserved: int
    allocated: int


class _OutOfMemoryError(Exception):
    pass


def replay_requests(
    events: Iterable[Sequence[int]],
    settings: Settings | None = None,
    limit: int | None = None,
    ahead: int | Sequence[int] = AHEAD,
    levels: list[int] | None = None,
) -> CachingAllocator:
    """Run ``events`` through the allocator.  UsageError for a free of what is not there.

    A storage that grows gets another block; one that shrinks keeps what it has until it is gone.
    0 bytes say that another stream uses it: once freed it comes back when the device is past that,
    ``ahead`` launches later (a number, or one for every event) or when the host waits.  Where
    ``limit`` bytes of segments are not enough, it ends with ``full``.  ``levels`` gets what is
    allocated after every event.
    """
    machine = CachingAllocator(settings or Settings(), limit)
    sizes: dict[int, int] = {}
    beside: set[int] = set()  # storages that another stream uses
    late: deque[tuple[int, int]] = deque()  # of those, given back and in use: launch, storage
    for number, event in enumerate(events):
        storage, change = event[0], event[1]
        stream = launch = 0
        if len(event) > 2:
            stream = event[2]
        if len(event) > 3:
            launch = event[3]
        lead = 0
        # how many launches the device is behind the host
        if late:
            lead = _at_event(ahead, number)
        while late and (launch >= late[0][0] + lead or storage in (EMPTIED, WAITED)):
            machine.free(late.popleft()[1])
        # a storage is made, or grows
        if change > 0:
            sizes[storage] = sizes.get(storage, 0) + change
            try:
                machine.malloc(storage, change, stream)
            except _OutOfMemoryError:
                if not _malloc_after_wait(machine, storage, change, stream, late):
                    size, held = machine.settings.rounded(change), machine.reserved
                    machine.full = OutOfMemory(number, size, held, machine.allocated)
                    return machine
        # a storage shrinks: without bytes it gives back its blocks
        elif change < 0:
            left = sizes.get(storage, 0) + change
            if left < 0:
                message = f"storage {storage} gives back {-change} bytes and has {left - change}"
                raise UsageError(message, fix="capture the program again")
            sizes[storage] = left
            if left == 0:
                del sizes[storage]
                if storage in beside:
                    machine.retire(storage)
                    late.append((launch, storage))
                else:
                    machine.free(storage)
        # another stream uses the storage
        elif storage >= 0:
            beside.add(storage)
        # torch.cuda.empty_cache
        elif storage == EMPTIED:
            machine.release()
        if levels is not None:
            levels.append(machine.allocated)
    return machine


def _at_event(ahead: int | Sequence[int], number: int) -> int:
    """How many launches the host is ahead of the device at an event."""
    if isinstance(ahead, int):
        return ahead
    return ahead[number]


def _malloc_after_wait(
    machine: CachingAllocator,
    storage: int,
    num_bytes: int,
    stream: int,
    late: deque[tuple[int, int]],
) -> bool:
    """Say whether a request fits once what other streams use has come back.

    Before torch says no it waits for these streams (CUDACachingAllocator.cpp, ``malloc``).
    """
    # no stream holds anything that could come back
    if not late:
        return False
    while late:
        machine.free(late.popleft()[1])
    try:
        machine.malloc(storage, num_bytes, stream)
    except _OutOfMemoryError:
        return False
    return True


def allocated_by_span(
    events: Sequence[Sequence[int]],
    spans: Iterable[tuple[str, int, int]],
    settings: Settings | None = None,
) -> tuple[CachingAllocator, dict[str, int]]:
    """(the allocator at the end, the most that was allocated in every span of events).

    The device keeps up with the host, as in ``blocks.as_blocks``: a block that another stream used
    is back before the host asks again.  Where it comes back late, later storages are cut from other
    blocks, of which more or less is left (benchmarks/results/h100_life.json, ``moe_save``).

    spans : name, index of the first event and of the one behind the last; names may come again
    """
    levels: list[int] = []
    state = replay_requests(events, settings, ahead=0, levels=levels)
    peaks: dict[str, int] = {}
    for name, start, end in spans:
        # what is there when a span begins counts: the level behind the event before it
        peaks[name] = max(peaks.get(name, 0), *levels[max(start - 1, 0) : end], 0)
    return state, peaks


class CachingAllocator:
    """Pools of free blocks, sorted by (size, address), what is in use and the most that was; bytes.

    allocated : rounded sizes of what is in use
    live      : storage -> its blocks;  first: the first block of every segment
    full      : where memory ran out; nothing after it happened
    """

    def __init__(self, settings: Settings, limit: int | None = None) -> None:
        self.settings, self.limit = settings, limit
        self.reserved = self.allocated = self.peak_reserved = self.peak_allocated = 0
        self.num_segments = 0
        self.live: dict[int, list[Block]] = {}
        self.first: list[Block] = []
        self.full: OutOfMemory | None = None
        self.pools: dict[Pool, list[tuple[int, int]]] = {}
        self.blocks: dict[int, Block] = {}  # free ones by address
        self.ends: dict[Pool, Block] = {}  # last block of a pool's expandable segment
        self.placed = 0  # where the device puts the next segment, if that is known
        self.retired: set[int] = set()  # storages that nobody holds and another stream uses

    def malloc(self, storage: int, num_bytes: int, stream: int = 0) -> None:
        """A block for ``storage``, of the pools of ``stream``."""
        size = self.settings.rounded(num_bytes)
        pool = (stream, size <= SMALL)
        block = self._best(size, pool) or self._more(size, pool)
        left_bytes = block.size - size
        if self._splits(pool, size, left_bytes):
            self._give(self._cut(block, size))
        block.free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.live.setdefault(storage, []).append(block)

    def retire(self, storage: int) -> None:
        """The program lets go of ``storage`` while another stream uses it: it counts no more as
        allocated, and its blocks are free later (CUDACachingAllocator.cpp, ``free``).
        """
        self.allocated -= sum(block.size for block in self.live[storage])
        self.retired.add(storage)

    def free(self, storage: int) -> None:
        """All blocks of ``storage`` go back to their pools."""
        # a storage that another stream still used left the allocated bytes when it was given back
        counted = storage not in self.retired
        self.retired.discard(storage)
        for block in self.live.pop(storage, ()):
            if counted:
                self.allocated -= block.size
            # free neighbours join it
            if block.before is not None and block.before.free:
                self._take(block.before)
                block = self._join(block.before, block)
            if block.after is not None and block.after.free:
                self._take(block.after)
                block = self._join(block, block.after)
            self._give(block)

    def release(self) -> int:
        """Give back every free segment or expandable page (``empty_cache``); their bytes.  Pools of
        CUDA graphs, whose streams are negative, keep theirs.
        """
        before = self.reserved
        for block in [block for block in self.blocks.values() if block.pool[0] >= 0]:
            # a segment without a block in use
            if block.before is None and block.after is None:
                self._take(block)
                self.first.remove(block)
                if self.ends.get(block.pool) is block:
                    del self.ends[block.pool]
                self.reserved -= block.size
            # parts of an expandable segment: whole pages
            elif self.settings.expandable:
                self._unmap(block)
        return before - self.reserved

    def segment_sizes(self) -> Iterator[int]:
        """Bytes of every segment."""
        for block in self.first:
            size = 0
            piece: Block | None = block
            while piece is not None:
                size, piece = size + piece.size, piece.after
            yield size

    def pool_bytes(self) -> int:
        """Bytes of the segments of CUDA graphs' pools, whose streams are negative."""
        return sum(
            size
            for first, size in zip(self.first, self.segment_sizes(), strict=True)
            if first.pool[0] < 0
        )

    def _unmap(self, block: Block) -> None:
        """Give back the whole pages of a free block; what comes later is mapped at the end."""
        page = _page(block.pool)
        base = block.address // GAP * GAP
        first = base + -(-(block.address - base) // page) * page
        last = base + (block.address + block.size - base) // page * page
        # no whole page is free
        if first >= last:
            return
        self._take(block)
        # the beginning stays, up to the first whole page
        if block.address < first:
            block, before = self._cut(block, first - block.address), block
            self._give(before)
        # so does the end, behind the last whole page
        if last < block.address + block.size:
            self._give(self._cut(block, last - block.address))
        self.reserved -= last - first

    # -- free blocks ------------------------------------------------------------------------------
    def _splits(self, pool: Pool, size: int, left_bytes: int) -> bool:
        """Whether a block is split that would have so many bytes left (``should_split``)."""
        if pool[1] or self.settings.expandable:
            return left_bytes >= ROUND
        return size < self.settings.max_split and left_bytes > SMALL

    def _give(self, block: Block) -> None:
        block.free = True
        self.blocks[block.address] = block
        bisect.insort(self.pools.setdefault(block.pool, []), (block.size, block.address))

    def _take(self, block: Block) -> None:
        pool = self.pools[block.pool]
        del pool[bisect.bisect_left(pool, (block.size, block.address))]
        del self.blocks[block.address]
        block.free = False

    def _best(self, size: int, pool: Pool) -> Block | None:
        free = self.pools.get(pool, [])
        at = bisect.bisect_left(free, (size, 0))
        if at == len(free):
            return None
        block = self.blocks[free[at][1]]
        if block is self.ends.get(pool) and at + 1 < len(free):
            block = self.blocks[free[at + 1][1]]  # the end can grow, so it counts as the largest
        # large requests and oversize blocks are kept for each other (``get_free_block``)
        max_split = self.settings.max_split
        if size < max_split <= block.size:
            return None
        if size >= max_split and block.size >= size + self.settings.max_non_split:
            return None
        self._take(block)
        return block

    def _cut(self, block: Block, size: int) -> Block:
        """Leave ``size`` bytes of ``block``; the rest of it, a block of its own."""
        address, left_bytes = block.address + size, block.size - size
        remaining = Block(address, left_bytes, block.pool, False, block, block.after)
        if block.after is not None:
            block.after.before = remaining
        elif self.ends.get(block.pool) is block:
            self.ends[block.pool] = remaining
        block.size, block.after = size, remaining
        return remaining

    def _join(self, left: Block, right: Block) -> Block:
        left.size += right.size
        left.after = right.after
        if right.after is not None:
            right.after.before = left
        elif self.ends.get(left.pool) is right:
            self.ends[left.pool] = left
        return left

    # -- segments ---------------------------------------------------------------------------------
    def _more(self, size: int, pool: Pool) -> Block:
        if self.settings.expandable:
            return self._grow(size, pool)
        return self._segment(self.settings.segment(size), pool)

    def _segment(self, num_bytes: int, pool: Pool) -> Block:
        self._reserve(num_bytes)
        self.num_segments += 1
        block = Block(self.placed or self.num_segments * GAP, num_bytes, pool)
        self.placed = 0
        self.first.append(block)
        return block

    def _reserve(self, num_bytes: int) -> None:
        if self.limit is not None and self.reserved + num_bytes > self.limit:
            self.release()
            if self.reserved + num_bytes > self.limit:
                raise _OutOfMemoryError
        self.reserved += num_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _grow(self, size: int, pool: Pool) -> Block:
        """Pages at the end of the pool's only segment; a free block there is used first."""
        missing_bytes = self._missing_bytes(size, pool)
        if self.limit is not None and self.reserved + missing_bytes > self.limit:
            self.release()  # which may have taken the end, or some of it
            missing_bytes = self._missing_bytes(size, pool)
        end = self.ends.get(pool)
        # the pool has no segment yet
        if end is None:
            block = self._segment(missing_bytes, pool)
            self.ends[pool] = block
            return block
        self._reserve(missing_bytes)
        # a free block at the end grows
        if end.free:
            self._take(end)
            end.size += missing_bytes
            return end
        block = Block(end.address + end.size, missing_bytes, pool, False, end, None)
        end.after = block
        self.ends[pool] = block
        return block

    def _missing_bytes(self, size: int, pool: Pool) -> int:
        """Whole pages that a request needs beyond the free end of the pool's segment."""
        end = self.ends.get(pool)
        free_bytes = 0
        if end is not None and end.free:
            free_bytes = end.size
        page = _page(pool)
        return -(-(size - free_bytes) // page) * page


def _page(pool: Pool) -> int:
    """Bytes by which an expandable segment of the pool grows."""
    if pool[1]:
        return SMALL_SEGMENT
    return LARGE_SEGMENT
