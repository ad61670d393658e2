"""The allocator's rules, compiled: thousands of replays of the same requests.

In : requests of a process, and by how many launches the host is ahead at each of them.  Out: the
most bytes of segments, and the request that does not fit.  The rules are those of
``allocator.CachingAllocator`` with default options; the two are held against each other in a test.

A block is a number: its place in arrays of sizes, addresses and neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_prism.core.programs.ops import EMPTIED, WAITED
from megatron_prism.graph.loops import compiled_function
from megatron_prism.memory.allocator import (
    GAP,
    LARGE_SEGMENT,
    MIB,
    OWN_SEGMENT,
    ROUND,
    SMALL,
    SMALL_SEGMENT,
    OutOfMemory,
    Settings,
)

_NO_LIMIT = 1 << 62
_NONE = -1  # no block, no event
_GREW_TOO_LARGE = -2  # instead of an event: more blocks than there is room for
_BYTES_PER_PAGE = 2 * MIB
# rows of what each block is
_SIZE, _ADDRESS, _POOL, _IS_FREE, _BEFORE, _AFTER, _NEXT = range(7)


# of the whole: reserved, allocated, the most reserved, segments, numbers of blocks given, the first
# number that may be used again, bytes of segments that there may be
_RESERVED, _ALLOCATED, _PEAK, _SEGMENTS, _GIVEN, _UNUSED, _LIMIT = range(7)
# rows of what each storage is: bytes, its first block, whether another stream uses it
_BYTES, _HEAD, _BESIDE = range(3)


class _Heap(NamedTuple):
    """What there is; int64.

    Attributes:
        blocks: [7, blocks]; blocks of a storage, and unused numbers, are linked by ``_NEXT``.
        pools: [pools, blocks], the free blocks of each pool, sorted by size and address.
        counts: [pools], how many these are.
        keeps: bool [pools], whether an emptied cache leaves the pool its segments.
        storages: [3, storages].
        state: [7], of the whole.
    """

    blocks: np.ndarray
    pools: np.ndarray
    counts: np.ndarray
    keeps: np.ndarray
    storages: np.ndarray
    state: np.ndarray


class _Requests(NamedTuple):
    """The requests; int64 [requests] each.

    Attributes:
        numbers: of storages, from 0; negative: no request.
        changes: bytes; 0: another stream uses the storage.
        pools: of small blocks of the stream; that of large ones is the next.
        launches: before the request.
    """

    numbers: np.ndarray
    changes: np.ndarray
    pools: np.ndarray
    launches: np.ndarray


@dataclass(frozen=True)
class ReplayedPeak:
    """What came of a replay.

    Attributes:
        reserved: the most bytes of segments.
        full: the request that did not fit; None: all did.
    """

    reserved: int
    full: OutOfMemory | None = None


class CompiledReplay:
    """Replays one list of requests on hosts that are ahead by different numbers of launches.

    Args:
        rows: (storage, bytes, stream, launch) of each request, as of ``replay_requests``.
    """

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        table = np.array(rows, dtype=np.int64).reshape(-1, 4)
        storages = table[:, 0]
        is_storage = storages >= 0
        distinct, dense = np.unique(storages[is_storage], return_inverse=True)
        numbers = storages.copy()
        numbers[is_storage] = dense.ravel()
        # each stream has a pool of small blocks and one of large ones
        streams, pool = np.unique(table[:, 2], return_inverse=True)
        self._inputs = _Requests(
            numbers=numbers,
            changes=table[:, 1].copy(),
            pools=2 * pool.ravel(),
            launches=table[:, 3].copy(),
        )
        # CUDA graphs' pools, whose streams are negative, keep their segments
        self._keeps = np.repeat(streams < 0, 2)
        self._num_storages = max(1, distinct.size)
        self._room = 4 * self._num_storages + 1024

    def run(self, leads: Sequence[int] | np.ndarray, limit: int | None = None) -> ReplayedPeak:
        """Replay the requests once.

        Args:
            leads: by how many launches the host is ahead, for each request.
            limit: bytes of segments; None: any number.
        """
        heap = _Heap(
            blocks=np.zeros((7, self._room), dtype=np.int64),
            pools=np.zeros((self._keeps.size, self._room), dtype=np.int64),
            counts=np.zeros(self._keeps.size, dtype=np.int64),
            keeps=self._keeps,
            storages=np.zeros((3, self._num_storages), dtype=np.int64),
            state=np.zeros(7, dtype=np.int64),
        )
        heap.state[_UNUSED] = _NONE
        heap.state[_LIMIT] = _NO_LIMIT
        if limit is not None:
            heap.state[_LIMIT] = limit
        heap.storages[_HEAD, :] = _NONE
        late = np.zeros((2, self._inputs.numbers.size + 1), dtype=np.int64)
        all_leads = np.asarray(leads, dtype=np.int64)
        event, size = compiled_function(_replay)(self._inputs, all_leads, heap, late)

        # a process of so many free blocks is rare: there is more room for them now
        if event == _GREW_TOO_LARGE:
            self._room *= 4
            return self.run(leads, limit)
        peak = int(heap.state[_PEAK])
        if event == _NONE:
            return ReplayedPeak(peak)
        reserved, allocated = heap.state[:2].tolist()
        return ReplayedPeak(peak, OutOfMemory(int(event), int(size), reserved, allocated))


def is_covered(settings: Settings | None) -> bool:
    """Say whether these are the options whose rules are compiled."""
    return settings is None or settings == Settings()


def _place(heap: _Heap, pool: int, size: int, address: int) -> int:
    """Return the place of the first free block that is not smaller than (size, address)."""
    blocks = heap.blocks
    low = 0
    high: int = heap.counts[pool]
    while low < high:
        middle = (low + high) // 2
        block = heap.pools[pool, middle]
        difference = blocks[_SIZE, block] - size
        if difference == 0:
            difference = blocks[_ADDRESS, block] - address
        if difference < 0:
            low = middle + 1
        else:
            high = middle
    return low


def _give(heap: _Heap, block: int) -> None:
    """Put a block among the free ones of its pool."""
    blocks = heap.blocks
    pool = blocks[_POOL, block]
    free = heap.pools[pool]
    place = _place(heap, pool, blocks[_SIZE, block], blocks[_ADDRESS, block])
    count = heap.counts[pool]
    for position in range(count, place, -1):
        free[position] = free[position - 1]
    free[place] = block
    heap.counts[pool] = count + 1
    blocks[_IS_FREE, block] = 1


def _take(heap: _Heap, block: int) -> None:
    """Take a block from the free ones of its pool."""
    blocks = heap.blocks
    pool = blocks[_POOL, block]
    free = heap.pools[pool]
    place = _place(heap, pool, blocks[_SIZE, block], blocks[_ADDRESS, block])
    count = heap.counts[pool] - 1
    for position in range(place, count):
        free[position] = free[position + 1]
    heap.counts[pool] = count
    blocks[_IS_FREE, block] = 0


def _new(heap: _Heap) -> int:
    """Return a number for a block that comes to be."""
    state = heap.state
    block: int = state[_UNUSED]
    if block >= 0:
        state[_UNUSED] = heap.blocks[_NEXT, block]
    else:
        block = state[_GIVEN]
        state[_GIVEN] = block + 1
    heap.blocks[_NEXT, block] = _NONE
    return block


def _drop(heap: _Heap, block: int) -> None:
    """Let the number of a block be used again."""
    heap.blocks[_NEXT, block] = heap.state[_UNUSED]
    heap.state[_UNUSED] = block


def _join(heap: _Heap, left: int, right: int) -> None:
    """Make one block of two neighbours."""
    blocks = heap.blocks
    blocks[_SIZE, left] += blocks[_SIZE, right]
    behind = blocks[_AFTER, right]
    blocks[_AFTER, left] = behind
    if behind >= 0:
        blocks[_BEFORE, behind] = left
    _drop(heap, right)


def _free(heap: _Heap, storage: int, counted: bool) -> None:
    """Give all blocks of a storage back to their pools."""
    blocks = heap.blocks
    block = heap.storages[_HEAD, storage]
    heap.storages[_HEAD, storage] = _NONE
    while block >= 0:
        following = blocks[_NEXT, block]
        blocks[_NEXT, block] = _NONE
        if counted:
            heap.state[_ALLOCATED] -= blocks[_SIZE, block]
        # free neighbours join it
        before = blocks[_BEFORE, block]
        if before >= 0 and blocks[_IS_FREE, before]:
            _take(heap, before)
            _join(heap, before, block)
            block = before
        after = blocks[_AFTER, block]
        if after >= 0 and blocks[_IS_FREE, after]:
            _take(heap, after)
            _join(heap, block, after)
        _give(heap, block)
        block = following


def _release(heap: _Heap) -> None:
    """Give every segment back that is free as a whole."""
    blocks = heap.blocks
    for pool in range(heap.counts.size):
        # pools of CUDA graphs keep their segments
        if heap.keeps[pool]:
            continue
        free = heap.pools[pool]
        kept = 0
        for position in range(heap.counts[pool]):
            block = free[position]
            has_neighbour = max(blocks[_BEFORE, block], blocks[_AFTER, block]) >= 0
            if has_neighbour:
                free[kept] = block
                kept += 1
                continue
            heap.state[_RESERVED] -= blocks[_SIZE, block]
            blocks[_IS_FREE, block] = 0
            _drop(heap, block)
        heap.counts[pool] = kept


def _segment(heap: _Heap, size: int, pool: int) -> int:
    """Return the block of a new segment; -1 where the device has no room for it."""
    num_bytes = -(-size // _BYTES_PER_PAGE) * _BYTES_PER_PAGE
    # requests up to 1 MiB share segments of 2 MiB, those below 10 MiB segments of 20 MiB; larger
    # ones get their own, in multiples of 2 MiB
    if size <= SMALL:
        num_bytes = SMALL_SEGMENT
    elif size < OWN_SEGMENT:
        num_bytes = LARGE_SEGMENT
    state = heap.state
    # torch returns free segments before it gives up
    if state[_RESERVED] + num_bytes > state[_LIMIT]:
        _release(heap)
        if state[_RESERVED] + num_bytes > state[_LIMIT]:
            return _NONE
    state[_RESERVED] += num_bytes
    state[_PEAK] = max(state[_PEAK], state[_RESERVED])
    state[_SEGMENTS] += 1
    block = _new(heap)
    blocks = heap.blocks
    blocks[_SIZE, block] = num_bytes
    blocks[_ADDRESS, block] = state[_SEGMENTS] * GAP
    blocks[_POOL, block] = pool
    blocks[_BEFORE, block] = _NONE
    blocks[_AFTER, block] = _NONE
    return block


def _split(heap: _Heap, block: int, size: int) -> None:
    """Leave a block so many bytes; the rest of it is free."""
    blocks = heap.blocks
    rest = _new(heap)
    behind = blocks[_AFTER, block]
    blocks[_SIZE, rest] = blocks[_SIZE, block] - size
    blocks[_ADDRESS, rest] = blocks[_ADDRESS, block] + size
    blocks[_POOL, rest] = blocks[_POOL, block]
    blocks[_BEFORE, rest] = block
    blocks[_AFTER, rest] = behind
    if behind >= 0:
        blocks[_BEFORE, behind] = rest
    blocks[_SIZE, block] = size
    blocks[_AFTER, block] = rest
    _give(heap, rest)


def _malloc(heap: _Heap, storage: int, size: int, pool: int) -> bool:
    """Give a storage a block; False where the device has no room for a segment."""
    blocks = heap.blocks
    # the smallest free block that is large enough
    place = _place(heap, pool, size, 0)
    if place < heap.counts[pool]:
        block = heap.pools[pool, place]
        _take(heap, block)
    else:
        block = _segment(heap, size, pool)
        if block < 0:
            return False
    # a rest that is too small for other requests stays in the block
    least_rest = SMALL + 1
    if size <= SMALL:
        least_rest = ROUND
    if blocks[_SIZE, block] - size >= least_rest:
        _split(heap, block, size)
    blocks[_IS_FREE, block] = 0
    blocks[_NEXT, block] = heap.storages[_HEAD, storage]
    heap.storages[_HEAD, storage] = block
    heap.state[_ALLOCATED] += blocks[_SIZE, block]
    return True


def _retire(heap: _Heap, storage: int) -> None:
    """Count a storage no more as allocated, which another stream still uses."""
    block = heap.storages[_HEAD, storage]
    while block >= 0:
        heap.state[_ALLOCATED] -= heap.blocks[_SIZE, block]
        block = heap.blocks[_NEXT, block]


def _replay(
    requests: _Requests, leads: np.ndarray, heap: _Heap, late: np.ndarray
) -> tuple[int, int]:
    """Follow all requests; the one that did not fit and its size, or (-1, 0).

    ``late`` : launch and storage of what other streams used when it was given back
    """
    storages = heap.storages
    first_late = 0
    num_late = 0
    room = heap.blocks.shape[1] - 3
    for event in range(requests.numbers.size):
        storage = requests.numbers[event]
        change = requests.changes[event]
        launch = requests.launches[event]

        # blocks that the other stream is past, or that the host has waited for
        has_waited = storage in (EMPTIED, WAITED)
        while first_late < num_late:
            is_past = launch >= late[0, first_late] + leads[event]
            if not is_past and not has_waited:
                break
            _free(heap, late[1, first_late], False)
            first_late += 1
        # arrays may be too small for the next request
        if heap.state[_GIVEN] >= room:
            return _GREW_TOO_LARGE, 0

        # a storage is made, or grows
        if change > 0:
            storages[_BYTES, storage] += change
            size = -(-change // ROUND) * ROUND
            pool = requests.pools[event]
            if size > SMALL:
                pool += 1
            fits = _malloc(heap, storage, size, pool)
            # before torch says no it waits for the other streams
            if not fits and first_late < num_late:
                while first_late < num_late:
                    _free(heap, late[1, first_late], False)
                    first_late += 1
                fits = _malloc(heap, storage, size, pool)
            if not fits:
                return event, size
        # a storage shrinks: without bytes it gives back its blocks
        elif change < 0:
            storages[_BYTES, storage] += change
            # one that shrinks keeps its blocks until it is gone
            if storages[_BYTES, storage] > 0:
                continue
            if storages[_BESIDE, storage]:
                _retire(heap, storage)
                late[0, num_late] = launch
                late[1, num_late] = storage
                num_late += 1
            else:
                _free(heap, storage, True)
        # another stream uses the storage
        elif storage >= 0:
            storages[_BESIDE, storage] = 1
        # torch.cuda.empty_cache
        elif storage == EMPTIED:
            _release(heap)
    return _NONE, 0
