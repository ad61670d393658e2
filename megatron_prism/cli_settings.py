"""``key=value`` words of a command, read in one way by all that take them.

In : the words, and what each key is read with.  Out: a dict, or the UsageError that says what to
type instead.  Also here: does machine= fit what the slices and calibration= were measured on?
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from megatron_prism import units
from megatron_prism.errors import UnitError, UsageError

__all__ = ["check_calibration", "check_machine", "count", "name", "number", "read"]

Reader = Callable[[str], Any]


def read(
    words: Sequence[str],
    keys: Mapping[str, Reader],
    command: str,
    *,
    several: Collection[str] = (),
) -> dict[str, Any]:
    """The value of every key that was given; ``several`` may come more than once, as a list.

    A reader raises UnitError for what it cannot read.  UsageError for unknown or repeated keys and
    for words without ``=``.
    """
    found: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        key = key.lstrip("-")
        if not equals or key not in keys:
            close = difflib.get_close_matches(key, keys, n=1)
            fix = f"did you mean {close[0]}={text}?" if close else f"use {', '.join(keys)}=…"
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
        raise UnitError("nothing is named", fix="machine=h200, or leave it out")
    return text


def machine_of(programs: Any) -> str:
    """The machine that the programs were measured on, if it is shipped, else h200."""
    from megatron_prism.costs.machine import named_in

    return named_in(programs.source.get("device", "")) or "h200"


def check_machine(programs: Any, machine: str | None) -> None:
    """UsageError if ``machine`` is another one than the programs were measured on."""
    from megatron_prism.costs.machine import named_in

    there = named_in(programs.source.get("device", ""))
    measured = any((program.ops["ns"] >= 0).any() for program in programs.programs)
    if measured and there and _is_another(machine, there):
        raise UsageError(
            f"the segments were measured on {programs.source['device']}; machine={machine} would "
            "price only the calls as that machine's",
            fix=f"machine={there} moved={machine} scales the segments too",
        )


def check_calibration(source: str, machine: str) -> None:
    """UsageError if the calls were measured on another machine than ``machine``."""
    from megatron_prism.costs.machine import named_in

    there = named_in(source)
    if there and _is_another(machine, there):
        raise UsageError(
            f"the calibration is of another machine than {machine}: {source}",
            fix=f"machine={there}, or leave calibration= out, or prism calibrate on {machine}",
        )


def _is_another(machine: str | None, there: str) -> bool:
    """Whether ``machine`` is shipped, so that its GPU is known, and has another GPU."""
    from megatron_prism.costs.machine import machines

    return machine in machines() and str(machine).partition("_")[0] != there.partition("_")[0]
