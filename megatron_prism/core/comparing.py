"""What ``prism.compare`` compares beside two jobs: kinds of files and values that features read.

A feature's ``comparers.py`` has ``COMPARERS``, rows of ``Comparer``, and ``JOB_READERS``, rows of
``JobReader``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Comparer:
    """How two values are compared, one of which only a feature knows.

    Args:
        accepts: whether A and B are such values.
        compare: called with A, B and a function that prices programs; its answer has ``to_text``,
            ``to_json`` and ``to_rows``, as a ``Comparison`` has.
    """

    accepts: Callable[[object, object], bool]
    compare: Callable[[Any, Any, Callable[[object], Any]], Any]


@dataclass(frozen=True)
class JobReader:
    """How a path is read that holds neither slices nor programs, but is a side of a comparison.

    Args:
        recognizes: whether the path is such a file.
        read: the value for ``compare``.
    """

    recognizes: Callable[[str], bool]
    read: Callable[[str], Any]
