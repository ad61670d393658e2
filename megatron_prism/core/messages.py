"""What is printed beside results: what is being done where that takes a while, and the report of an
exception that nobody expected."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator

from megatron_prism.core.errors import shown

EVERY_S = 1.5  # seconds without output until a line says what is being done
SOFTWARE = 70  # EX_SOFTWARE of sysexits.h
_doing = list[tuple[Callable[[], str], Callable[[str], object]]]()
_last = 0.0  # when something was printed, s


def printed() -> None:
    """Tell that the user has just been shown something."""
    global _last
    _last = time.monotonic()


def _print(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(what: Callable[[], str], write: Callable[[str], object] = _print) -> Iterator[None]:
    """Inside, a line says ``what`` whenever nothing was printed for ``EVERY_S`` seconds.

    Args:
        what: returns the text, in a thread; of several the innermost is asked, and an empty text
            is not written.
        write: takes the line.
    """
    ended = threading.Event()
    _doing.append((what, write))
    if len(_doing) == 1:
        printed()
        threading.Thread(target=_beat, args=(ended,), daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        _doing.pop()


def _beat(ended: threading.Event) -> None:
    start = time.monotonic()
    while not ended.wait(_last + EVERY_S - time.monotonic()):
        if time.monotonic() < _last + EVERY_S:
            continue
        printed()
        for what, write in _doing[-1:]:
            if text := what():
                write(f"prism: … {text}, {time.monotonic() - start:.0f} s")


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
