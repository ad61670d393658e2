"""How another feature adds a section to the answer of ``prism fit``.

Its ``FEATURE.fit_sections`` names a module with ``FIT_SECTIONS``, functions that make a section of
a ``JobMemory``; life/sections.py is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from megatron_prism.core import feature
from megatron_prism.core.programs.program import Programs
from megatron_prism.memory import allocator, blocks, peaks
from megatron_prism.memory.job_peaks import MemoryReport, first_program


@dataclass(frozen=True)
class JobMemory:
    """What sections are made of.

    Args:
        programs: of the job.
        report: figures of its classes of ranks.
        limit: bytes of device memory that a process may take.
    """

    programs: Programs
    report: MemoryReport
    limit: int
    _allocated: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    def allocated(self, class_name: str) -> int:
        """Return what ``torch.cuda.max_memory_allocated`` says of a rank of a class.

        These are the bytes of the blocks that its tensors have.  All requests are replayed when a
        class is asked for first.
        """
        if class_name not in self._allocated:
            program = first_program(self.programs, self.report.classes[class_name])
            settings = allocator.Settings.parse(self.report.job.get("alloc_conf", ""))
            peak = peaks.known_peak(blocks.as_blocks(program, settings))
            self._allocated[class_name] = peak.num_bytes
        return self._allocated[class_name]


class FitSection(Protocol):
    """A part of the answer.

    Args:
        name: key in the JSON.
    """

    name: str

    def to_json(self) -> object:
        """Make plain values; bytes and ns."""
        ...

    def lines(self, class_name: str) -> Iterable[str]:
        """Make the lines of a class of ranks; none where there is nothing to say."""
        ...

    def overruns(self) -> Mapping[str, str]:
        """Return class of ranks -> where it runs out of memory beside its train steps."""
        ...


# None: the slices say nothing of it
SectionMaker: TypeAlias = Callable[[JobMemory], FitSection | None]


def sections_of(job: JobMemory) -> tuple[FitSection, ...]:
    """Make the sections of all features."""
    sections = []
    for module in feature.modules("fit_sections"):
        for make in module.FIT_SECTIONS:
            section = make(job)
            if section is not None:
                sections.append(section)
    return tuple(sections)
