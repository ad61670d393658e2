"""What is printed beside results: a line of progress now and then, and the report of an exception
that nobody expected."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable

from megatron_prism.core.errors import shown

EVERY_S = 10.0  # seconds between two lines of progress
SOFTWARE = 70  # EX_SOFTWARE of sysexits.h


class Lines:
    """Writes what it is told, at most one line every ``EVERY_S`` seconds, none before the first.

    Args:
        write: takes a line.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write, self._last = write, time.monotonic()

    def show(self, text: Callable[[], str] | str) -> None:
        """Write ``text``, or what it returns, if it is time."""
        now = time.monotonic()
        if now - self._last >= EVERY_S:
            self._last = now
            self._write(text if isinstance(text, str) else text())


def last_resort(error: BaseException, doing: str) -> int:
    """Say what was being done and read, the exception, and where its traceback is; returns 70.

    With PRISM_DEBUG=1 the traceback is printed instead of kept.
    """
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    foreign = sys.modules.get("megatron_prism.core.foreign")
    read = foreign.last_read() if foreign else ""
    what = f"{doing}, after reading {read}" if read else doing
    said = shown(f"{type(error).__name__}: {error}".partition("\n")[0][:500])
    if os.environ.get("PRISM_DEBUG") == "1":
        where = "PRISM_DEBUG=1: the traceback is below"
    else:
        where = "PRISM_DEBUG=1 prints the traceback, which could not be written"
        with contextlib.suppress(OSError):
            handle, path = tempfile.mkstemp(prefix="prism-traceback-", suffix=".txt")
            with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{what}\n{text}")
            where = f"the traceback is in {path}"
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed
        print(f"prism: {shown(what)}", file=sys.stderr)
        print(f"prism: a mistake of prism, not yours: {said}", file=sys.stderr)
        print(f"prism: {where}; please report it with that text", file=sys.stderr)
        if os.environ.get("PRISM_DEBUG") == "1":
            print(text, file=sys.stderr)
    return SOFTWARE
