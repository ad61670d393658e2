"""The parts of a process's life, and the one that decides how much memory it needs.

In : slices that keep peaks of parts, and the figures of their train steps.  Out: ``LifeParts`` of
every class of ranks.  All bytes are allocated bytes of blocks, as torch.cuda.max_memory_allocated
counts them; what the allocator reserves beyond these in parts beside the steps is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_prism.features.fit.section import JobMemory
from megatron_prism.memory import part_peaks
from megatron_prism.memory.host_need import resized_replicas
from megatron_prism.memory.job_peaks import ClassMemoryFigures, first_program, needed

STEADY = "steady iteration"
# parts in the order in which they run
ORDER = (
    "start",
    "model",
    "optimizer",
    "load",
    "first iteration",
    STEADY,
    "evaluation",
    "checkpoint",
    "end",
)
# parts of a capture alone that goes on to the end of its job
AT_END = ("evaluation", "checkpoint", "end")


@dataclass(frozen=True)
class LifeParts:
    """The parts of one class of ranks.

    Args:
        peaks: part -> the most that is allocated in it, bytes, in the order of ``ORDER``.
        outside_allocator: bytes of the device: context, libraries, NCCL.
        assumed: the parts that ran on an assumption: "load" of a checkpoint that was not there.
    """

    peaks: Mapping[str, int]
    outside_allocator: int
    assumed: tuple[str, ...] = ()

    @property
    def decides(self) -> str:
        """Return the part that needs most; the steady iteration where another needs as much."""
        largest = max(self.peaks.values())
        if self.peaks.get(STEADY) == largest:
            return STEADY
        return next(name for name, num_bytes in self.peaks.items() if num_bytes == largest)

    @property
    def not_run(self) -> tuple[str, ...]:
        """Return the parts of which nothing is known."""
        return tuple(name for name in ORDER if name not in self.peaks)

    @property
    def least_needed(self) -> int:
        """Return what the part that decides needs of the device at least, bytes."""
        return self.peaks[self.decides] + self.outside_allocator


def lives(job: JobMemory) -> dict[str, LifeParts]:
    """Return the life of every class of ranks whose slices say it.

    With another number of replicas the parts beside the steps are not those of the slices: nothing
    is said then.
    """
    if resized_replicas(job.programs.source):
        return {}
    of_ranks = part_peaks.of_source(job.programs.source)
    found = {}
    for name, figures in job.report.classes.items():
        program = first_program(job.programs, figures)
        captured = of_ranks.get(program.rank)
        if captured is not None and captured.peaks:
            # the slice has all microbatches, where few ran when it was captured
            known = {**captured.peaks, STEADY: job.allocated(name)}
            found[name] = _life(known, figures, captured.assumed)
    return found


def _life(
    known: Mapping[str, int], figures: ClassMemoryFigures, assumed: tuple[str, ...]
) -> LifeParts:
    """Put the parts in their order, beside what the device holds outside of the allocator."""
    ordered = {name: known[name] for name in ORDER if name in known}
    outside = max(needed(figures) - figures["peak_reserved"], 0)
    return LifeParts(ordered, outside, tuple(name for name in ordered if name in assumed))
