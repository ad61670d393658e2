"""A baseline's file as a side of a comparison: ``prism compare memory.json SLICES``."""

from __future__ import annotations

from pathlib import Path

from megatron_prism.core.comparing import Comparer, JobReader
from megatron_prism.memory.job_peaks import MemoryReport

_LOOKED_AT_BYTES = 1 << 16  # of the head and of the tail


def is_baseline(path: str) -> bool:
    """Whether a file of JSON names the schema of a baseline, at its head or at its end."""
    from megatron_prism.features.guard.baseline import SCHEMA

    place = Path(path)
    if place.suffix != ".json" or not place.is_file():
        return False
    # a baseline may be large: its keys are sorted, so that the schema stands near its end
    with place.open("rb") as file:
        head = file.read(_LOOKED_AT_BYTES)
        file.seek(max(0, place.stat().st_size - _LOOKED_AT_BYTES))
        tail = file.read()
    return SCHEMA.encode() in head or SCHEMA.encode() in tail


def read(path: str) -> MemoryReport:
    """Read a baseline.  UsageError if it is damaged."""
    from megatron_prism.features.guard import baseline

    return baseline.load(path)


COMPARERS: tuple[Comparer, ...] = ()
JOB_READERS = (JobReader(is_baseline, read),)
