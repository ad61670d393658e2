"""What a command answers, as text, JSON, a table or a page: the same for all of them.

rich is imported on first use, so that ``prism --version`` and usage errors stay instant.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import errno
import io
import json
import os
import shutil
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from megatron_prism.core.columns import folded, listed
from megatron_prism.core.errors import PrismError, UsageError, shown
from megatron_prism.core.files import check_not_taken, check_writable, write_whole
from megatron_prism.core.messages import printed, progress
from megatron_prism.core.units import format_bytes, format_share

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 200  # columns where nobody looks at a terminal


def prepare() -> None:
    """An ASCII terminal gets ? for …, and closed streams (``>&-``) swallow what is printed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # Python makes None of a closed stream, and None cannot be flushed at the end
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def check_working_directory() -> None:
    """UsageError where it was deleted: libraries that look into it end the process."""
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(
            f"the working directory cannot be used: {error.strerror}", fix="cd to one that exists"
        ) from error


class _Visible:
    """A stream of text on which control characters are seen, not obeyed."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        printed()
        return self.stream.write(shown(text))

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


@contextlib.contextmanager
def visible() -> Iterator[None]:
    """Labels of programs and dumps (groups, notes, files) cannot steer the terminal.

    A ``console`` writes past it, since rich moves the cursor, and takes texts as ``shown``.
    """
    out, err = (cast(TextIO, _Visible(stream)) for stream in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


def output_failed(error: OSError) -> int | None:
    """Exit status where nobody reads our output any more, there is no space for it, or a file or a
    folder cannot be used; None for what is no user's to mend.

    What is still to be printed goes nowhere, so that the end does not fail once more.
    """
    if isinstance(error, BrokenPipeError) or error.errno in (errno.ENOSPC, errno.EDQUOT):
        # Python flushes the stream at its end, which would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        problem = PrismError(
            f"{error.strerror}: not all was written", fix="make room there, and run it again"
        )
    elif error.filename is not None:
        problem = UsageError(
            f"cannot use {error.filename}: {error.strerror}", fix="name another file or folder"
        )
    else:
        return None
    if isinstance(error, BrokenPipeError):
        # 128 + SIGPIPE, as of programs that the signal ends
        return 141
    print(f"prism: error: {problem}", file=sys.stderr)
    return problem.exit_code


def console(stderr: bool = False) -> Console:
    """A rich Console that takes text as it is, but ``shown``; wide when it is not a terminal."""
    from rich.console import Console

    class Plain(Console):
        def print(self, *objects: Any, **more: Any) -> None:
            printed()
            visible_objects = list(objects)
            for place, value in enumerate(objects):
                if isinstance(value, str):
                    visible_objects[place] = shown(value)
            super().print(*visible_objects, **more)

    stream = sys.stderr if stderr else sys.stdout
    # past the stream that shows control characters: rich needs them
    file = stream.stream if isinstance(stream, _Visible) else None  # None: also what comes later
    width = None if stream.isatty() else PIPE_WIDTH
    out = Plain(
        stderr=stderr, file=file, width=width, highlight=False, markup=False, soft_wrap=True
    )
    out.on_broken_pipe = _nobody_reads  # type: ignore[method-assign] # rich would exit with 1
    return out


def _nobody_reads() -> None:
    raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns without lines."""
    print("\n".join(listed([head, *rows])))


def print_lines(text: str, unbroken: Collection[str]) -> None:
    """Print lines of any length: a terminal gets them broken between words, but those that have
    one of ``unbroken``, which are to be pasted; anything else gets them as they are, to search.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for line in text.splitlines():
        # a command that is broken over lines cannot be pasted
        to_paste = any(words and words in line for words in unbroken)
        if len(line) <= width or not width or to_paste:
            print(line)
        else:
            print(*folded(line, 4, width), sep="\n")


def print_json(value: object) -> None:
    """One JSON value on stdout."""
    print(json.dumps(value, indent=2, allow_nan=False))


def exact(num_bytes: int) -> str:
    """``1.5 GiB (1,610,612,736 B)``."""
    return f"{format_bytes(num_bytes)} ({num_bytes:,} B)"


Row = Mapping[str, object]


@dataclass(frozen=True)
class Answer:
    """What a command answers; each form is made when it is asked for.

    value       : what ``--json`` prints
    page        : prints it for people
    rows        : its table, for ``--csv``
    next        : what to type next
    status      : exit status
    html, trace : pages to write
    problem     : raised once all of it is out
    """

    value: Callable[[], Any]
    page: Callable[[], object]
    rows: Callable[[], Iterable[Row]] | None = None
    next: str = ""
    status: int = 0
    html: Callable[[], str] | None = None
    trace: Callable[[], str] | None = None
    problem: PrismError | None = None


def deliver(args: argparse.Namespace, answer: Answer) -> int:
    """Print the answer as it was asked for, and write its files; the exit status."""
    for name, make in (("html", answer.html), ("trace", answer.trace)):
        path = getattr(args, name, None)
        if path is not None and answer.problem is None:
            # an answer without a picture: said, not written as an empty file
            if make is None:
                raise UsageError(f"there is nothing to draw in {path}", fix="leave it out")
            write_outputs(args.force, (path, make))
    rows = answer.rows() if args.csv is not None and answer.rows is not None else None
    if not write_data(args, answer.value() if args.json else None, rows):
        answer.page()
        if answer.next:
            print(f"next: {answer.next}")
    # after the answer: it says what the error is about
    if answer.problem is not None:
        raise answer.problem
    return answer.status


def write_data(args: argparse.Namespace, value: object, rows: Iterable[Row] | None = None) -> bool:
    """Print ``value`` if JSON is wanted, and say so; write ``rows``, its table, if CSV is wanted.

    A cell that is a mapping becomes a column for each key (``at.phase``), a list JSON.
    """
    if args.csv is not None and rows is not None:
        flat = [dict(_flat(row)) for row in rows]
        text = io.StringIO()
        columns: dict[str, None] = {}  # in the order in which rows name them
        for row in flat:
            columns |= dict.fromkeys(row)
        writer = csv.DictWriter(text, list(columns))
        writer.writeheader()
        writer.writerows(flat)
        write_outputs(args.force, (args.csv, text.getvalue))
    if args.json:
        print_json(value)
    return bool(args.json)


def _flat(row: Row, above: str = "") -> Iterator[tuple[str, object]]:
    for key, value in row.items():
        # nested figures become columns: ``at.phase``
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        else:
            listed = isinstance(value, list | tuple)
            yield above + str(key), json.dumps(value) if listed else value


@contextlib.contextmanager
def steps() -> Iterator[Callable[[str, float], None]]:
    """A bar on stderr for things that are done after another; what it gives is called with what is
    done and the part of it, 0 to 1.

    Where nobody looks at a terminal it is a line now and then.
    """
    from rich.progress import Progress

    talk = console(stderr=True)
    if not talk.is_terminal:
        # the last line alone, which the reporter reads now and then
        now = deque([""], 1)
        with progress(lambda: now[0]):
            yield lambda step, part: now.append(f"{step}: {format_share(part, 0)}")
        return
    with Progress(console=talk, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda step, part: bar.update(task, description=step, total=1.0, completed=part)


def check_outputs(asked: Sequence[Path | None], force: bool, inputs: Sequence[str] = ()) -> None:
    """UsageError for what cannot be written, before the work and not after it.

    asked  : files to write; None: one that was not asked for
    inputs : what is read; --force replaces neither such a file nor a slice in such a folder
    """
    paths = [path for path in asked if path is not None]
    if len({path.absolute() for path in paths}) < len(paths):
        raise UsageError(f"two outputs are to be written to {paths[0]}", fix="name two files")
    for path in paths:
        check_not_taken(path, force)
        check_writable(path.absolute().parent, "")
        if _is_input(path, inputs):
            raise UsageError(f"{path} is what is read", fix="name another file to write")


def _is_input(path: Path, inputs: Sequence[str]) -> bool:
    """Whether ``path``, or the folder of a slice, is among what is read."""
    places = [path]
    # a slice is read as one of its folder
    if path.suffix == ".prism":
        places.append(path.parent)
    for place in places:
        if not place.exists():
            continue
        for name in inputs:
            if os.path.exists(name) and place.samefile(name):
                return True
    return False


def write_outputs(force: bool, *outputs: tuple[Path | None, Callable[[], str]]) -> None:
    """Write every text to its file, where one is named, and say so."""
    for path, text in outputs:
        if path is not None:
            write_whole(path, text(), force=force)
            console(stderr=True).print(f"wrote {path}")
