"""How much would PyTorch's caching allocator reserve for these allocations?  A model.

In : (storage, bytes) events in order, bytes negative for a free.  Out: segments, blocks and peaks.
The rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.13): sizes round up to 512 B; up
to 1 MiB come from 2 MiB segments of the small pool; below 10 MiB from 20 MiB segments, above from
segments of their own in multiples of 2 MiB; best fit (smallest block, then lowest address); a block
is split if 512 B or more (small), more than 1 MiB (large) would be left; neighbours that are both
free merge.  With expandable segments each pool is one segment that grows in pages (2 and 20 MiB) at
its end.

Not modelled: one pool per stream and record_stream (everything is on one stream here), freeing of
cached segments under pressure (nothing limits it), private pools, and memory outside the allocator.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_prism.errors import UnsupportedError, UsageError

__all__ = ["Block", "Replayed", "Settings", "replay"]

MIB = 1 << 20
ROUND = 512
SMALL = 1 * MIB  # up to here from the small pool
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
OWN_SEGMENT = 10 * MIB  # from here a segment of its own, in multiples of 2 MiB
GAP = 1 << 44  # between segments: they never touch, so they never merge


@dataclass(frozen=True)
class Settings:
    """What of PYTORCH_CUDA_ALLOC_CONF is modelled."""

    expandable: bool = False

    @staticmethod
    def parse(text: str) -> Settings:
        """``expandable_segments:True`` as in PYTORCH_CUDA_ALLOC_CONF; refuses the rest by name."""
        expandable = False
        for part in filter(None, re.split(r",(?![^\[]*\])", text.strip())):
            key, colon, value = (word.strip() for word in part.partition(":"))
            if not colon or not key or not value:
                raise UsageError(f"{part!r} is no option:value", fix="expandable_segments:True")
            if key == "expandable_segments":
                if value not in ("True", "False"):
                    raise UsageError(
                        f"expandable_segments cannot be {value}", fix="expandable_segments:True"
                    )
                expandable = value == "True"
            elif key == "backend" and value == "native" or key == "garbage_collection_threshold":
                continue  # native is what this models; nothing is collected without a limit
            elif key in _KNOWN:
                raise UnsupportedError(
                    f"{key} of PYTORCH_CUDA_ALLOC_CONF is not modelled", fix="leave it out"
                )
            else:
                raise UsageError(
                    f"PYTORCH_CUDA_ALLOC_CONF has no {key}", fix="expandable_segments:True"
                )
        return Settings(expandable)


_KNOWN = (
    "backend",
    "graph_capture_record_stream_reuse",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "per_process_memory_fraction",
    "pinned_num_register_threads",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
    "roundup_power2_divisions",
)


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment.  ``before`` and ``after`` are its neighbours there."""

    address: int
    size: int
    small: bool
    free: bool = False
    before: Block | None = None
    after: Block | None = None


@dataclass
class Replayed:
    """What the allocator holds, and the most it held; bytes."""

    reserved: int = 0
    allocated: int = 0  # rounded sizes of what is in use
    peak_reserved: int = 0
    peak_allocated: int = 0
    num_segments: int = 0
    live: dict[int, list[Block]] = field(default_factory=dict)  # storage -> its blocks
    first: list[Block] = field(default_factory=list)  # of every segment


def replay(events: Iterable[tuple[int, int]], settings: Settings | None = None) -> Replayed:
    """Run ``events`` through the allocator.  UsageError for a free of what is not there.

    A storage that grows gets another block; one that shrinks keeps what it has until it is gone.
    """
    machine = _Machine(settings or Settings())
    sizes: dict[int, int] = {}
    for storage, change in events:
        if change > 0:
            sizes[storage] = sizes.get(storage, 0) + change
            machine.malloc(storage, change)
        elif change < 0:
            left = sizes.get(storage, 0) + change
            if left < 0:
                raise UsageError(
                    f"storage {storage} gives back {-change} bytes and has {left - change}",
                    fix="capture the program again",
                )
            sizes[storage] = left
            if left == 0:
                del sizes[storage]
                machine.free(storage)
    return machine.state


class _Machine:
    """Pools of free blocks, sorted by (size, address)."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.state = settings, Replayed()
        self.pools: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self.blocks: dict[int, Block] = {}  # free ones by address
        self.ends: dict[bool, Block] = {}  # last block of a pool's expandable segment

    def malloc(self, storage: int, num_bytes: int) -> None:
        size = max(ROUND, -(-num_bytes // ROUND) * ROUND)
        small = size <= SMALL
        block = self._best(size, small) or self._more(size, small)
        rest = block.size - size
        least = ROUND if small or self.settings.expandable else SMALL + 1
        if rest >= least:
            self._split(block, size)
        block.free = False
        state = self.state
        state.allocated += block.size
        state.peak_allocated = max(state.peak_allocated, state.allocated)
        state.live.setdefault(storage, []).append(block)

    def free(self, storage: int) -> None:
        for block in self.state.live.pop(storage):
            self.state.allocated -= block.size
            if block.before is not None and block.before.free:
                self._take(block.before)
                block = self._join(block.before, block)
            if block.after is not None and block.after.free:
                self._take(block.after)
                block = self._join(block, block.after)
            self._give(block)

    # -- free blocks ------------------------------------------------------------------------------
    def _give(self, block: Block) -> None:
        block.free = True
        self.blocks[block.address] = block
        bisect.insort(self.pools[block.small], (block.size, block.address))

    def _take(self, block: Block) -> None:
        pool = self.pools[block.small]
        del pool[bisect.bisect_left(pool, (block.size, block.address))]
        del self.blocks[block.address]
        block.free = False

    def _best(self, size: int, small: bool) -> Block | None:
        pool = self.pools[small]
        at = bisect.bisect_left(pool, (size, 0))
        if at == len(pool):
            return None
        block = self.blocks[pool[at][1]]
        self._take(block)
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.small, True, block, block.after)
        if block.after is not None:
            block.after.before = rest
        elif self.ends.get(block.small) is block:
            self.ends[block.small] = rest
        block.size, block.after = size, rest
        self._give(rest)

    def _join(self, left: Block, right: Block) -> Block:
        left.size += right.size
        left.after = right.after
        if right.after is not None:
            right.after.before = left
        elif self.ends.get(left.small) is right:
            self.ends[left.small] = left
        return left

    # -- segments ---------------------------------------------------------------------------------
    def _more(self, size: int, small: bool) -> Block:
        if self.settings.expandable:
            return self._grow(size, small)
        if small:
            whole = SMALL_SEGMENT
        elif size < OWN_SEGMENT:
            whole = LARGE_SEGMENT
        else:
            whole = -(-size // (2 * MIB)) * (2 * MIB)
        return self._segment(whole, small)

    def _segment(self, whole: int, small: bool) -> Block:
        state = self.state
        state.num_segments += 1
        block = Block(state.num_segments * GAP, whole, small)
        state.first.append(block)
        self._reserve(whole)
        return block

    def _reserve(self, num_bytes: int) -> None:
        self.state.reserved += num_bytes
        self.state.peak_reserved = max(self.state.peak_reserved, self.state.reserved)

    def _grow(self, size: int, small: bool) -> Block:
        """Pages at the end of the pool's only segment; a free block there is used first."""
        page = SMALL_SEGMENT if small else LARGE_SEGMENT
        end = self.ends.get(small)
        if end is None:
            block = self._segment(-(-size // page) * page, small)
            self.ends[small] = block
            return block
        have = end.size if end.free else 0
        more = -(-(size - have) // page) * page
        self._reserve(more)
        if end.free:
            self._take(end)
            end.size += more
            return end
        block = Block(end.address + end.size, more, small, False, end, None)
        end.after = block
        self.ends[small] = block
        return block
