"""What a rank's training process holds behind an iteration, and what stays of it on the device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from megatron_prism.core.programs.program import Program
from megatron_prism.features.phases.steps import GRADIENTS, OPTIMIZER, WEIGHTS
from megatron_prism.memory import allocator, peaks
from megatron_prism.memory.job_peaks import ClassMemoryFigures, needed

# kind of memory/peaks.py -> part
_PART_OF_KIND = {"param": WEIGHTS, "grad": GRADIENTS, "optim": OPTIMIZER, "master": OPTIMIZER}


@dataclass(frozen=True)
class Footprint:
    """The memory of a rank's training process.

    Args:
        peak: bytes of the device while it trains.
        segments: bytes of the allocator's segments of that.
        communicators: bytes of NCCL, outside of the allocator.
        part_bytes: part -> bytes of its blocks, behind an iteration.
        program: of the rank.
        settings: of its allocator.
    """

    peak: int
    segments: int
    communicators: int
    part_bytes: Mapping[str, int]
    program: Program
    settings: allocator.Settings

    @property
    def outside(self) -> int:
        """Return bytes of the device that are not the allocator's."""
        return self.peak - self.segments

    def segments_without(self, parts: Collection[str]) -> int:
        """Return the segments that stay when parts are gone and the cache is given back.

        A segment stays whole as long as a block of it is in use.
        """
        state = _behind_iteration(self.program, self.settings)
        for storage, part in _parts_of_storages(self.program).items():
            # what the iteration has freed itself is not freed a second time
            if part in parts and storage in state.live:
                state.free(storage)
        state.release()
        return state.reserved


def footprint(
    program: Program, figures: ClassMemoryFigures, settings: allocator.Settings
) -> Footprint:
    """Make the footprint of a class of ranks.

    Args:
        program: of a rank of the class.
        figures: of the class.
        settings: of the allocator.
    """
    state = _behind_iteration(program, settings)
    part_bytes = dict.fromkeys(_PART_OF_KIND.values(), 0)
    for storage, part in _parts_of_storages(program).items():
        for block in state.live.get(storage, ()):
            part_bytes[part] += block.size
    peak = needed(figures)
    segments = figures["peak_reserved"]
    # a calibration may know communicators and not the process, which then has nothing outside
    communicators = min(figures.get("nccl") or 0, peak - segments)
    return Footprint(
        peak=peak,
        segments=segments,
        communicators=communicators,
        part_bytes=part_bytes,
        program=program,
        settings=settings,
    )


def _behind_iteration(program: Program, settings: allocator.Settings) -> allocator.CachingAllocator:
    """Return the allocator when the recorded iteration is over and the device has caught up."""
    requests = program.history.tolist() or peaks.changes(program)
    return allocator.replay_requests(requests, settings, ahead=0)


def _parts_of_storages(program: Program) -> dict[int, str]:
    """Return storage -> part, of what stands before the iteration and has one."""
    parts = {}
    events = program.allocations
    for storage, note in zip(events["storage"].tolist(), events["note"].tolist(), strict=True):
        kind = program.strings[note].partition(":")[0]
        if kind in _PART_OF_KIND and storage not in parts:
            parts[storage] = _PART_OF_KIND[kind]
    return parts
