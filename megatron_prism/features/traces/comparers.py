"""Traces of a real job beside its slices, as ``prism.compare`` takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

from megatron_prism.core.comparing import Comparer, JobReader
from megatron_prism.core.errors import UsageError


def are_traces(a: object, b: object) -> bool:
    """Whether A is a list of paths."""
    if isinstance(a, str | bytes) or not isinstance(a, Sequence):
        return False
    return all(isinstance(path, str | PathLike) for path in a)


def compare(a: Sequence[str | PathLike[str]], b: object, priced: Callable[[object], Any]) -> Any:
    """Hold traces against the prediction of their job.

    Args:
        a: paths of the traces.
        b: programs of the job, or what ``price`` made of them.
        priced: prices programs; None for other values.

    Raises:
        UsageError: B has no times.
    """
    from megatron_prism.features.traces.compare import compare_traces

    predicted = priced(b)
    if predicted is None:
        raise UsageError("a real job needs slices beside it", fix="prism compare A SLICES")
    return compare_traces(a, predicted.timeline)


COMPARERS = (Comparer(are_traces, compare),)
JOB_READERS: tuple[JobReader, ...] = ()
