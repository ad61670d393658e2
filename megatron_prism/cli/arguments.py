"""Readers of options and of ``key=value`` words, in one way for all commands that take them.

A reader takes text and returns a value, or raises UnitError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from megatron_prism.core import units
from megatron_prism.core.errors import UnitError, UsageError, did_you_mean

Reader = Callable[[str], Any]


def read(
    words: Sequence[str],
    keys: Mapping[str, Reader],
    command: str,
    *,
    several: Collection[str] = (),
) -> dict[str, Any]:
    """The value of every key that was given; ``several`` may come more than once, as a list.

    UsageError for unknown or repeated keys and for words without ``=``.
    """
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        key = key.lstrip("-").replace("-", "_")
        # no such key: the nearest one is named
        if not equals or key not in keys:
            close = did_you_mean(key, keys, "")
            fix = f"{close[:-1]}={text}?" if close else f"use {', '.join(keys)}=…"
            raise UsageError(f"prism {command} does not understand {word}", fix=fix)
        try:
            value = keys[key](text)
        except UnitError as error:
            raise UsageError(f"{key}={text}: {error.message}", fix=error.fix) from error
        if key in several:
            values.setdefault(key, []).append(value)
        # a second value would hide the first
        elif key in values:
            raise UsageError(f"{key} is given twice", fix=f"leave out one of them, {word} say")
        else:
            values[key] = value
    return values


def count(lowest: int, highest: int, example: str) -> Reader:
    """Reads a whole number from ``lowest`` to ``highest``; ``example`` is what to type."""

    def reader(text: str) -> int:
        try:
            value = units.parse_count(text)
        except UnitError as error:
            raise UnitError(f"{error.message}, so it is no number", fix=example) from None
        if not lowest <= value <= highest:
            raise UnitError(f"{value:,} is outside {lowest:,} to {highest:,}", fix=example)
        return value

    return reader


def number(example: str) -> Reader:
    """Reads a finite number with a fraction; ``example`` is what to type."""

    def reader(text: str) -> float:
        try:
            # nan and inf are floats to Python and would spread through the whole answer
            if math.isfinite(value := float(text)):
                return value
        except ValueError:
            pass
        raise UnitError(f"{text!r} is no number", fix=example)

    return reader


def name(text: str) -> str:
    """Reads a name or a path; UnitError for nothing."""
    if not text:
        raise UnitError("nothing is named", fix="leave it out")
    return text


def size(text: str) -> int:
    """Reads bytes, not below 0."""
    if (value := units.parse_bytes(text)) < 0:
        raise UnitError(f"{text} is below 0", fix="64MiB")
    return value


def limit(text: str) -> str:
    """Checks a size of device memory, which stays text: ``80GB`` is the size of a card."""
    if units.parse_limit(text) < 0:
        raise UnitError(f"{text} is below 0", fix="--limit 80GB")
    return text
