"""What another feature adds to the answer of ``prism fit``.

A feature's module ``fit_sections`` has ``FIT_SECTIONS``, functions that make a section of a job's
programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeAlias

from megatron_prism.core import feature
from megatron_prism.core.program import Programs
from megatron_prism.memory.job_peaks import MemoryReport


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


# called with the programs, their memory, and the limit in bytes; None: the slices say nothing of it
SectionMaker: TypeAlias = Callable[[Programs, MemoryReport, int], FitSection | None]


def sections_of(programs: Programs, memory: MemoryReport, limit: int) -> tuple[FitSection, ...]:
    """Make the sections of all features.

    Args:
        programs: of the job.
        memory: figures of its classes.
        limit: bytes of device memory that a process may take.
    """
    sections = []
    for module in feature.modules("fit_sections"):
        for make in module.FIT_SECTIONS:
            section = make(programs, memory, limit)
            if section is not None:
                sections.append(section)
    return tuple(sections)
