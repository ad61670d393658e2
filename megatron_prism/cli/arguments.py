"""Read ``key=value`` words of a command, in one way for all that take them.

``read`` returns a dict, or raises the UsageError that says what to type instead.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_prism.core import units
from megatron_prism.core.errors import UnitError, UsageError

Reader = Callable[[str], Any]


def read(
    words: Sequence[str],
    keys: Mapping[str, Reader],
    command: str,
    *,
    several: Collection[str] = (),
    names: list[str] | None = None,
) -> dict[str, Any]:
    """The value of every key that was given; ``several`` may come more than once, as a list.

    Words that are names (of a recipe, of files that exist) are added to ``names``, if the command
    takes any.  A reader raises UnitError for what it cannot read.  UsageError for unknown or
    repeated keys and for other words without ``=``.
    """
    found: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        key = key.lstrip("-").replace("-", "_")
        if names is not None and key not in keys and (not equals or Path(word).exists()):
            names.append(word)
            continue
        if not equals or key not in keys:
            close = difflib.get_close_matches(key, keys, n=1)
            known = f"use {', '.join(keys)}=…" if keys else "it takes no settings"
            fix = f"did you mean {close[0]}={text}?" if close else known
            raise UsageError(f"prism {command} does not understand {word}", fix=fix)
        try:
            value = keys[key](text)
        except UnitError as error:
            raise UsageError(f"{key}={text}: {error.message}", fix=error.fix) from error
        if key in several:
            found.setdefault(key, []).append(value)
        elif key in found:
            raise UsageError(f"{key} is given twice", fix=f"leave out one of them, {word} say")
        else:
            found[key] = value
    return found


def count(lowest: int, highest: int, example: str) -> Reader:
    """Reads a whole number from ``lowest`` to ``highest``; ``example`` is what to type."""

    def reader(text: str) -> int:
        try:
            found = units.parse_count(text)
        except UnitError as error:
            raise UnitError(f"{error.message}, so it is no number", fix=example) from None
        if not lowest <= found <= highest:
            raise UnitError(f"{found:,} is outside {lowest:,} to {highest:,}", fix=example)
        return found

    return reader


def number(example: str) -> Reader:
    """Reads a finite number with a fraction; ``example`` is what to type."""

    def reader(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not math.isfinite(found):
            raise UnitError(f"{text!r} is no number", fix=example)
        return found

    return reader


def name(text: str) -> str:
    """Reads a name or a path; UnitError for nothing."""
    if not text:
        raise UnitError("nothing is named", fix="leave it out")
    return text


def size(text: str) -> int:
    """Reads bytes, not below 0."""
    found = units.parse_bytes(text)
    if found < 0:
        raise UnitError(f"{text} is below 0", fix="64MiB")
    return found


def limit(text: str) -> str:
    """Checks a size of device memory, which stays text: ``80GB`` is the size of a card."""
    if units.parse_limit(text) < 0:
        raise UnitError(f"{text} is below 0", fix="--limit 80GB")
    return text
