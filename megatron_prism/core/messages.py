"""What is printed beside results: what is being done where that takes a while, and the report of an
exception that nobody expected.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator

from megatron_prism.core.errors import shown

EVERY_S = 1.5  # seconds without output until a line, or a dot more, says that work goes on
LINE_S = 20.0  # seconds until a new line says how far it is, if only numbers have changed
# off a terminal nothing grows: seconds from a line to the next, a log is read later
LINE_OFF_TERMINAL_S = 10.0
SOFTWARE = 70  # EX_SOFTWARE of sysexits.h
_doing = list[tuple[Callable[[], str], Callable[[str], object]]]()
_last = 0.0  # when something was printed, s
_open: Callable[[str], object] | None = None  # what has written the line that is not ended yet


def printed() -> None:
    """Tell that the user is shown something now; ends a line of dots."""
    global _last, _open
    _last, write, _open = time.monotonic(), _open, None
    if write is not None:
        write("\n")


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed
        print(text, end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(subject: Callable[[], str], write: Callable[[str], object] = _print) -> Iterator[None]:
    """Inside, a line says ``subject`` where nothing was printed for ``EVERY_S`` seconds.

    On a terminal it grows by a dot each time, for ``LINE_S`` seconds or until more than its numbers
    changes.  Elsewhere it is a line, and another one ``LINE_OFF_TERMINAL_S`` seconds later.

    Args:
        subject: returns the text, in a thread; of several the innermost is asked, and an empty text
            is not written.
        write: takes what to write, and ends no line by itself.
    """
    ended = threading.Event()
    _doing.append((subject, write))
    # of nested ones the outermost has the thread that writes
    if len(_doing) == 1:
        printed()
        threading.Thread(target=_beat, args=(ended,), daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        _doing.pop()
        if _open is not None:
            printed()


def _beat(ended: threading.Event) -> None:
    """Write a line, or a dot more, where nothing was printed for a while; ends with ``ended``."""
    global _last, _open
    start_s = time.monotonic()
    line_words, line_start_s = "", start_s  # of the last line, without its numbers
    pause_s = EVERY_S
    while not ended.wait(max(0.0, _last + pause_s - time.monotonic())):
        now_s = time.monotonic()
        if now_s < _last + pause_s:  # something was printed meanwhile
            pause_s = EVERY_S
            continue
        pause_s = EVERY_S
        # of nested work the innermost
        for subject, write in _doing[-1:]:
            text = subject()
            words = re.sub(r"\d+", "", text)
            is_same = words == line_words and now_s < line_start_s + LINE_S
            if _open is not None and is_same:
                _open = None
                write(".")
                _open = write
                continue
            printed()
            line_words, line_start_s = words, now_s
            if not text:
                continue
            line = f"prism: … {text}, {now_s - start_s:.0f} s"
            if _grows():
                write(line)
                _open = write
            else:
                write(f"{line}\n")
                pause_s = LINE_OFF_TERMINAL_S
        _last = time.monotonic()


def _grows() -> bool:
    """Tell whether somebody sees a line grow: stderr is a terminal."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # replaced, or closed
        return False


def last_resort(error: BaseException, doing: str) -> int:
    """Say what was being done and read, the exception, and where its traceback is; returns 70.

    With PRISM_DEBUG=1 the traceback is printed instead of kept.
    """
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    foreign = sys.modules.get("megatron_prism.core.foreign")
    read = foreign.last_read() if foreign else ""
    subject = doing
    if read:
        subject = f"{doing}, after reading {read}"
    summary = shown(f"{type(error).__name__}: {error}".partition("\n")[0][:500])
    if os.environ.get("PRISM_DEBUG") == "1":
        where = "PRISM_DEBUG=1: the traceback is below"
    else:
        where = "PRISM_DEBUG=1 prints the traceback, which could not be written"
        with contextlib.suppress(OSError):
            handle, path = tempfile.mkstemp(prefix="prism-traceback-", suffix=".txt")
            with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{subject}\n{text}")
            where = f"the traceback is in {path}"
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed
        print(f"prism: {shown(subject)}", file=sys.stderr)
        print(f"prism: a mistake of prism, not yours: {summary}", file=sys.stderr)
        print(f"prism: {where}; please report it with that text", file=sys.stderr)
        if os.environ.get("PRISM_DEBUG") == "1":
            print(text, file=sys.stderr)
    return SOFTWARE
