"""What may it cost to read what others wrote?  Bounds while foreign files become values.

Context managers hold for the whole process, so one file at a time.  Texts are read up to a size,
and nested up to a depth: parsers recurse, and the one of YAML in C ends the process.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["bounded_memory", "flat", "no_collector", "read_json", "read_yaml_text"]

_JSON_BYTES = 1 << 28
_YAML_BYTES = 1 << 20
_DEPTH = 32
_IN_LINE = re.compile(rf"^\s*(?:[-?]\s+){{{_DEPTH}}}", re.MULTILINE)  # - - - - x


def read_json(path: str | os.PathLike[str]) -> Any:
    """The value in a JSON file.  OSError; ValueError for what is none, too long or too deep."""
    try:
        return json.loads(_text(path, _JSON_BYTES))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_yaml_text(path: str | os.PathLike[str]) -> str:
    """A text that a YAML parser may be given.  OSError; ValueError if it is too long or deep."""
    return flat(_text(path, _YAML_BYTES))


def flat(text: str) -> str:
    """The same text; ValueError if it nests too deeply for a parser of YAML."""
    depth = most = 0
    for bracket in re.finditer(r"[][{}]", text):
        depth += 1 if bracket[0] in "[{" else -1
        most = max(most, depth)
    if most > _DEPTH or _IN_LINE.search(text):
        raise ValueError("it is nested too deeply")
    return text


def _text(path: str | os.PathLike[str], most: int) -> str:
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return data.decode("utf-8")


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
