"""A memory snapshot beside slices or an earlier snapshot, as ``prism.compare`` takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_prism.core.comparing import Comparer, JobReader
from megatron_prism.core.errors import UsageError
from megatron_prism.core.programs.program import Programs
from megatron_prism.features.snapshots import snapshot


def has_snapshot(a: object, b: object) -> bool:
    """Whether A or B is a snapshot."""
    return isinstance(a, snapshot.Snapshot) or isinstance(b, snapshot.Snapshot)


def compare(a: object, b: Any, priced: Callable[[object], Any] | None = None) -> Any:
    """Say what a process holds more than before, or than the slices of its job say.

    Args:
        a: a snapshot.
        b: a later snapshot, or programs of the same job, perhaps priced.
        priced: not asked: snapshots have no times.

    Raises:
        UsageError: the snapshot comes last, or what stands beside it has no programs.
    """
    if not isinstance(a, snapshot.Snapshot):
        raise UsageError("snapshots come first", fix="prism compare SNAPSHOT SLICES")
    if isinstance(b, snapshot.Snapshot):
        return snapshot.grown(a, b)
    programs = b
    # with what-ifs: the programs that they made
    if not isinstance(b, Programs):
        programs = getattr(getattr(b, "graph", None), "programs", None)
    if programs is None:
        raise UsageError("a real job needs slices beside it", fix="prism compare A SLICES")
    return snapshot.compare(a, programs)


COMPARERS = (Comparer(has_snapshot, compare),)
JOB_READERS: tuple[JobReader, ...] = ()
