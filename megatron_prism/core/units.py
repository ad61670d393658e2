"""Durations, sizes and counts as text, written and parsed.

Inside, time is integer nanoseconds and memory is integer bytes; this is the only place where they
become text.  Every ``format_x`` is exact or rounds to at most four significant digits, and
``parse_x`` accepts whatever ``format_x`` prints and gives the same text again.  KiB, MiB, GiB, TiB
are powers of 1024; KB, MB, GB, TB powers of 1000.

>>> format_bytes(parse_bytes("1.5 GiB")), format_ns(parse_ns("412us"))
('1.5 GiB', '412 us')
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from megatron_prism.core.errors import UnitError

NS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "min": 60 * 10**9, "h": 3600 * 10**9}
# minutes and hours are read only: 90 s is easier to compare than 1.5 min
_SHOWN_NS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}
BINARY = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
BYTES = BINARY | DECIMAL
COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

_QUANTITY = re.compile(
    r"\s*(?P<number>[+-]?\d[\d,_]*(?:\.\d+)?(?:e[+-]?\d{1,3})?)\s*(?P<unit>[^\d\s]*)\s*"
)
_MOST = 1 << 63  # what a column of a program holds
_ALIASES = {"µs": "us", "μs": "us", "sec": "s", "m": "min", "K": "KB", "M": "MB", "G": "GB"}


def parse_ns(text: str | int) -> int:
    """A duration as whole nanoseconds; a bare whole number is nanoseconds already."""
    return _parse(text, NS, "duration", "1500ns, 412us, 3.2 ms, 1.5s", bare="ns")


def format_ns(ns: int) -> str:
    """``412 us``; below a microsecond exact, above it rounded to four significant digits."""
    return _format(ns, _SHOWN_NS)


def parse_bytes(text: str | int) -> int:
    """A size as whole bytes; a bare whole number is bytes already."""
    return _parse(text, BYTES, "size", "512, 16MiB, 1.5 GiB, 80GB", bare="B")


def parse_limit(text: str | int) -> int:
    """A size of device memory.  UnitError for a bare number that is below 1 MiB as bytes."""
    num_bytes = parse_bytes(text)
    if isinstance(text, str) and text.strip().isdecimal() and num_bytes < 1 << 20:
        message = f"{text.strip()} is {num_bytes:,} bytes, which no device has"
        raise UnitError(message, fix=f"--limit {text.strip()}GB")
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """``1.5 GiB``, in powers of 1024, rounded to four significant digits."""
    return _format(num_bytes, BINARY)


def parse_count(text: str | int) -> int:
    """A whole number: ``1,048,576``, ``70B``, ``8K`` (thousands, not 1024)."""
    return _parse(text, COUNTS, "count", "8192, 1,048,576, 70.6B", bare="")


def counted(count: int, noun: str) -> str:
    """``1 rank``, ``1,023 ranks``, ``2 classes``."""
    if count == 1:
        return f"1 {noun}"
    plural = "s"
    if noun.endswith(("s", "ch")):
        plural = "es"
    return f"{count:,} {noun}{plural}"


def format_share(part: float, digits: int = 1) -> str:
    """A part of 1 as ``66.6 %``."""
    return f"{100 * part:.{digits}f} %"


def format_change(part: float) -> str:
    """What is added to 1, as ``+7.5 %``; zero has no minus."""
    return f"{round(100 * part, 1) + 0.0:+.1f} %"


def format_percent(part: float) -> str:
    """A part of 1 as ``2.4 %``, with two significant digits or all before the point."""
    value = 100 * part
    # ".2g" would write 123 as 1.2e+02, and rounds 99.5 to three digits
    if abs(value) >= 99.5:
        return f"{value:.0f} %"
    return f"{value:.2g} %"


def _parse(text: str | int, units: Mapping[str, int], kind: str, like: str, *, bare: str) -> int:
    """Read a quantity.

    Args:
        text: A number, and maybe a unit.
        units: Name -> what it is in the smallest.
        kind: What it is called in errors.
        like: Examples for errors.
        bare: The unit of a number without one.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = None
    # longer ones are no quantities, and reading them as one takes forever
    if isinstance(text, str) and len(text) <= 400:
        match = _QUANTITY.fullmatch(text)
    if match is None:
        raise UnitError(f"{text!r} is no {kind}", fix=f"write it like {like}")
    unit = _unit(match["unit"] or bare, units)
    if unit not in units:
        raise _no_unit(text, unit, units, kind)
    number = match["number"].replace(",", "").replace("_", "")
    value = Fraction(number) * units[unit]
    if abs(value) >= _MOST:
        message = f"{str(text)[:40]} is out of range for a {kind}"
        raise UnitError(message, fix=f"write it like {like}")
    # with a unit the nearest whole number is meant, as printed text is rounded; else a slip
    if not match["unit"] and value.denominator != 1:
        message = f"{text!r} is no whole number"
        if bare:
            message += f" of {bare}"
        raise UnitError(message, fix=f"write it like {like}")
    return round(value)


def _unit(name: str, units: Mapping[str, int]) -> str:
    """Return the unit that a name means: ``sec`` is ``s``, and ``M`` of bytes is ``MB``."""
    # of counts M is a unit itself
    if name in units:
        return name
    alias = _ALIASES.get(name)
    if alias in units:
        return str(alias)
    return name


def _no_unit(text: str | int, unit: str, units: Mapping[str, int], kind: str) -> UnitError:
    """Return the error of a unit that is none, with the one that was meant."""
    fix = f"use {', '.join(filter(None, units))}"
    for name in units:
        # gib is GiB
        if name.lower() == unit.lower():
            fix = f"did you mean {name}?"
            break
    return UnitError(f"{text!r}: {unit!r} is no unit of a {kind}", fix=fix)


def _format(value: int, units: dict[str, int]) -> str:
    """``value`` in the largest unit that leaves at least 1, at most four significant digits."""
    size, ladder = abs(value), list(units.items())
    place = 0
    while place + 1 < len(ladder) and size >= ladder[place + 1][1]:
        place += 1
    name, scale = ladder[place]
    # the smallest unit is exact
    if place == 0:
        return f"{value} {name}"
    shown = _round(Fraction(size, scale))
    # 1023.9 KiB must not print as 1024 KiB: the next unit says it shorter
    if place + 1 < len(ladder) and shown * scale >= ladder[place + 1][1]:
        name, scale = ladder[place + 1]
        shown = _round(Fraction(size, scale))
    # of whole numbers a float would lose digits
    if shown >= 10_000:
        digits = str(int(shown))
    else:
        digits = f"{float(shown):.3f}".rstrip("0").rstrip(".")
    if value < 0:
        return f"-{digits} {name}"
    return f"{digits} {name}"


def _round(value: Fraction) -> Fraction:
    """To four significant digits, never losing digits before the point."""
    digits_before_point = len(str(int(value)))
    step = Fraction(1, 10 ** max(0, 4 - digits_before_point))
    return round(value / step) * step
