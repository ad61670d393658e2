"""How do commands print?  A console, a plain table and JSON, the same for all of them.

rich is imported on first use, so that ``prism --version`` and usage errors stay instant.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

__all__ = ["console", "print_json", "print_table", "progress"]

PIPE_WIDTH = 200  # columns where nobody looks at a terminal


def console(stderr: bool = False) -> Any:
    """A rich Console that takes text as it is; wide when it is not a terminal."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PIPE_WIDTH
    return Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True, width=width)


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns without lines; only the last one may be folded over several lines."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for place, name in enumerate(head):
        table.add_column(name, no_wrap=place < len(head) - 1, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console().print(table)


def print_json(value: object) -> None:
    """One JSON value on stdout."""
    print(json.dumps(value, indent=2, allow_nan=False))


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[float], None]]:
    """A bar on stderr while work is done; call what it gives with the part that is, 0 to 1.

    Where nobody looks at a terminal it prints nothing, not even the line it would stand in.
    """
    from rich.progress import Progress

    talk = console(stderr=True)
    with Progress(console=talk, transient=True, disable=not talk.is_terminal) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda part: bar.update(task, completed=part)
