"""Segments and blocks: what PyTorch's allocator holds for a program, and where that is too much.

In : a program that recorded memory.  Out: bytes of segments, of blocks and of graphs' pools, and
``Overflow``.  A block that another stream uses comes back when the device is past that, so there
are two ends: a device that keeps up with its host, and a host that is far ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Program
from megatron_prism.memory import allocator
from megatron_prism.memory.peaks import HeldMemory, changes, holdings_at, op_at, site_of

_BEYOND_REQUESTS = "other:blocks beyond what was asked for"


@dataclass(frozen=True)
class Overflow:
    """Where a class runs out of memory, after cached segments were given back.

    Attributes:
        op: that asks; None: what stands before the iteration is too much.
        site: Megatron's line that asks; "" where it is not known.
        size: bytes of the request.
        reserved: bytes of segments then.
        holdings: what is alive then.
    """

    op: Op | None
    site: str
    size: int
    reserved: int
    holdings: tuple[HeldMemory, ...] = ()

    @property
    def where(self) -> str:
        """The op and the line in words."""
        if self.op is None:
            return "before the iteration"
        return f"in {self.op.label} {self.op.name} {self.site}".rstrip()


def overflow(
    program: Program, limit: int, settings: allocator.Settings | None = None
) -> Overflow | None:
    """Find where the program runs out of ``limit`` bytes of segments.

    Returns:
        None if they are enough for its iteration, and for all that the process had asked for
        before, where that is known.
    """
    in_iteration = allocator.replay_requests(changes(program), settings, limit).full
    # the process may have needed more before the iteration
    if in_iteration is None:
        before = allocator.replay_requests(program.history.tolist(), settings, limit).full
        if before is None:
            return None
        return Overflow(None, "", before.size, before.reserved)

    # what comes before the first op stands there already
    op_index = op_at(program, in_iteration.event)
    op = None
    if op_index:
        op = program[op_index]
    return Overflow(
        op=op,
        site=site_of(program, in_iteration.event),
        size=in_iteration.size,
        reserved=in_iteration.reserved,
        holdings=holdings_at(program, in_iteration.event),
    )


def reserved(program: Program, settings: allocator.Settings | None = None) -> tuple[int, int]:
    """Return (least, most) bytes of the allocator's segments, over all that its process asked for:
    the device keeps up, or the host is far ahead of it.
    """
    requests = program.history.tolist() or changes(program)
    keeps_up = allocator.replay_requests(requests, settings, ahead=0)
    far_behind = allocator.replay_requests(requests, settings, ahead=allocator.AHEAD)
    return keeps_up.peak_reserved, far_behind.peak_reserved


def expected_reserved(between: Sequence[int], num_ranks: int) -> int:
    """Return the segments to expect of ``between``, the two ends of ``reserved``; bytes.

    A rank that waits for no other rank has a device that keeps up: its blocks are back before the
    host asks again.  In a job of several ranks the device waits for them, by how much nobody knows.

    Args:
        between: least and most bytes.
        num_ranks: of the job.

    Source: benchmarks/results/h100_life.json and h200_x4_real_peaks.json.
    """
    low, high = between
    if num_ranks == 1:
        return low
    return (low + high) // 2


def as_blocks(program: Program, settings: allocator.Settings | None = None) -> Program:
    """Return the program whose storages take what their blocks have.

    ``torch.cuda.memory_allocated`` counts so: sizes are rounded up, and have what is not worth
    splitting off (up to 1 MiB of each large one).  The device keeps up with the host.
    """
    requests = program.history.tolist() or changes(program)
    levels: list[int] = []
    allocator.replay_requests(requests, settings, ahead=0, levels=levels)

    # storage -> bytes of its blocks beyond what was asked for
    beyond: dict[int, int] = {}
    level_before = 0
    for (storage, change, *_), level in zip(requests, levels, strict=True):
        if change > 0:
            beyond[storage] = beyond.get(storage, 0) + level - level_before - change
        level_before = level

    # they come with a storage, and go with the last of it
    events = program.allocations.copy()
    held: dict[int, int] = {}
    pairs = zip(events["storage"].tolist(), events["bytes"].tolist(), strict=True)
    for index, (storage, change) in enumerate(pairs):
        if storage not in held:
            events["bytes"][index] += beyond.get(storage, 0)
        held[storage] = held.get(storage, 0) + change
        if not held[storage]:
            events["bytes"][index] -= beyond.get(storage, 0)
            del held[storage]
    strings, earlier_peak = _earlier_blocks(program, max(levels, default=0))
    return replace(program, allocations=events, strings=strings, earlier_peak=earlier_peak)


def _earlier_blocks(program: Program, peak_in_blocks: int) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the texts and the earlier peak of ``program``.

    An earlier peak is known by sizes, not by storages: what its blocks have beyond them is one row.

    Args:
        program: whose peak may be before its iteration.
        peak_in_blocks: bytes that its process had in blocks.
    """
    beyond_bytes = peak_in_blocks - program.peak_bytes()
    has_earlier_peak = len(program.earlier_peak) > 0
    # without a history nobody knows the blocks of what was before the iteration
    knows_blocks = len(program.history) > 0
    if not has_earlier_peak or not knows_blocks or beyond_bytes <= 0:
        return program.strings, program.earlier_peak
    row = np.array([[len(program.strings), beyond_bytes, 1]], dtype=np.int64)
    strings = (*program.strings, _BEYOND_REQUESTS)
    return strings, np.concatenate([program.earlier_peak, row])


def graph_pools(program: Program, settings: allocator.Settings | None = None) -> int:
    """Return bytes of the segments that pools of CUDA graphs keep; 0 without graphs."""
    history = program.history
    if not (history[:, 2] < 0).any():
        return 0
    return allocator.replay_requests(history.tolist(), settings, ahead=0).pool_bytes()
