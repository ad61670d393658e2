"""The tree of errors; ``PrismError`` is the root of all that are raised on purpose.

::

    PrismError                 exit 1   base: what happened, where, and what to type
    ├── UsageError             exit 2   the request cannot be carried out
    │   ├── WorldError         exit 2   sizes, ranks and selectors that do not fit
    │   ├── RecipeError        exit 2   a recipe or one of its key=value overrides
    │   ├── ProgramError       exit 2   a program, or a file of programs, that cannot be read
    │   │   └── MissingSlicesError      slices of a world that lack some of its ranks
    │   ├── DumpError          exit 2   a Flight Recorder dump that is foreign, cut or hostile
    │   └── UnitError          exit 2   text that is no duration, size or count
    ├── UnsupportedError       exit 1   fine, but not with this version or machine
    ├── HangError              exit 1   the job would hang here; the message is the verdict
    └── NotTrainedError        exit 1   the emulated job came back without having trained

A message says what happened and where; ``fix`` says what to type next.  Both are shown to the user
without a traceback, so they must be enough.  A bug of ours is no ``PrismError``: it keeps its
traceback, and labels of programs and dumps that they quote cannot steer a terminal.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

# what a terminal obeys, but for ends of lines and tabs: controls, and turns of direction
_CONTROL = re.compile(
    "\\r(?!\\n)|[\\x00-\\x08\\x0b\\x0c\\x0e-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069]"
)


def shown(text: str) -> str:
    """The same text with its control characters as Python writes them."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def did_you_mean(
    word: str, known: Iterable[str], otherwise: str, *, most: int = 1, cutoff: float = 0.6
) -> str:
    """``did you mean tp?``: the names in ``known`` like ``word``; ``otherwise`` if none is."""
    close = difflib.get_close_matches(word, list(known), most, cutoff)
    return f"did you mean {' or '.join(close)}?" if close else otherwise


class PrismError(Exception):
    """Something the user can act on.

    message   : what happened and where; may have several lines (the picture)
    fix       : what to type, without the word ``fix``; None only where nothing helps
    exit_code : what a process that ends with this error returns
    """

    exit_code = 1

    def __init__(self, message: str, fix: str | None = None) -> None:
        super().__init__(message, fix)  # both are args: the error survives pickling
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return shown(self.message if self.fix is None else f"{self.message}\n  fix: {self.fix}")


class UsageError(PrismError):
    """The request cannot be carried out as written; nothing was started and nothing was written."""

    exit_code = 2


def refuse(*rules: tuple[object, str, str]) -> None:
    """UsageError for the first of (whether it is broken, what is wrong, what to type)."""
    for broken, message, fix in rules:
        if broken:
            raise UsageError(message, fix=fix)


class WorldError(UsageError):
    """Parallel sizes that do not divide the world, a rank outside it, a selector nobody matches."""


class RecipeError(UsageError):
    """An unknown key, a wrong type, or fields of a recipe that contradict each other."""


class ProgramError(UsageError):
    """A program with a mistake in it, a foreign or truncated file, programs that do not fit."""


class MissingSlicesError(ProgramError):
    """Slices that do not make a world: ``ranks`` have to be captured too; ``why``, in words."""

    def __init__(
        self, message: str, fix: str | None = None, ranks: tuple[int, ...] = (), why: str = ""
    ) -> None:
        super().__init__(message, fix)
        self.args = (message, fix, ranks, why)
        self.ranks, self.why = ranks, why


class DumpError(UsageError):
    """A Flight Recorder dump that is foreign, truncated, damaged, or tries to run code."""


class UnitError(UsageError, ValueError):
    """Text that is no quantity.  Also a ValueError, so that argparse reports it as usage."""


class UnsupportedError(PrismError):
    """A well-formed request that this release, Megatron version or machine cannot serve."""


class HangError(PrismError):
    """A call of a local rank that its peers would not make: the real job would hang, or worse."""


class NotTrainedError(PrismError):
    """The job's own code ended without the optimizer steps it was asked for."""
