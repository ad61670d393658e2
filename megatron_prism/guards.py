"""What may it cost to read what others wrote?  Bounds while foreign files become values.

In : nothing.  Out: context managers.  They hold for the whole process, so one file at a time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

__all__ = ["bounded_memory", "no_collector"]


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Python does not look for cycles meanwhile."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextlib.contextmanager
def bounded_memory(size: int) -> Iterator[None]:
    """A damaged pickle may ask for 64 GiB in one opcode (LONG_BINPUT): make that a MemoryError."""
    try:
        import resource

        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        limit = now + (8 << 30) + 64 * size
        if before[0] != resource.RLIM_INFINITY:
            limit = min(limit, before[0])
        resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    except (ImportError, OSError, ValueError):  # not Linux: no bound, the rest is as safe
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
