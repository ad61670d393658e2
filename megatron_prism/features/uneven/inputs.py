"""What some ranks get in place of what was captured: the words of ``prism uneven``.

In : ``key=RANKS:VALUE`` words, and a file of lengths.  Out: one ``UnevenInput`` for each.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from megatron_prism.core import foreign
from megatron_prism.core.errors import UsageError
from megatron_prism.core.world import World, format_ranks
from megatron_prism.features.uneven.kinds import InputKind

_LENGTHS = re.compile(r"\d{1,9}(,\d{1,9})*")
_COUNT = re.compile(r"\d{1,7}")
_MOST_BYTES = 1 << 25  # of a file of lengths
_FILE_FIX = 'a line for each dp rank: {"dp": 1, "lengths": [4096, 2048]}'


class _Row(msgspec.Struct):
    """A line of a file of lengths."""

    dp: foreign.Natural
    lengths: tuple[Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)], ...]


@dataclass(frozen=True)
class UnevenInput:
    """What some ranks get.

    Attributes:
        kind: In which way it differs.
        ranks: The ranks, ascending.
        count: Microbatches of the loop, or in the loader; of lengths -1: as many as captured; of
            programs -1.
        path: The other capture of kind ``PROGRAMS``.
        lengths: Tokens of a sample of each microbatch; one: of all microbatches.
        loader: Microbatches in the loader, where that is no input of its own; -1: enough.
    """

    kind: InputKind
    ranks: tuple[int, ...]
    count: int = -1
    path: str = ""
    lengths: tuple[int, ...] = ()
    loader: int = -1

    @property
    def ends_early(self) -> bool:
        """Whether the data iterator of the ranks ends before the iteration does."""
        return self.kind is InputKind.LOADER or self.loader >= 0

    @property
    def value(self) -> str:
        """The part of its word behind the ranks."""
        if self.kind is InputKind.PROGRAMS:
            return self.path
        if self.kind is InputKind.LENGTHS:
            return ",".join(map(str, self.lengths))
        return str(self.count)

    def __str__(self) -> str:
        """Write it as the words of the command."""
        ranks = format_ranks(self.ranks)
        words: list[str] = []
        # an example is printed to be typed again, so a joined count becomes a word again
        if self.kind is InputKind.LENGTHS and self.count >= 0:
            words.append(f"{InputKind.MICROBATCHES.value}={ranks}:{self.count}")
        words.append(f"{self.kind.value}={ranks}:{self.value}")
        if self.loader >= 0:
            words.append(f"{InputKind.LOADER.value}={ranks}:{self.loader}")
        return " ".join(words)


def read_input(kind: InputKind, text: str, world: World) -> UnevenInput:
    """Make the input that a word says.

    Args:
        kind: The word's key.
        text: ``RANKS:VALUE``, with ranks as ``World.select`` reads them.
        world: The world of the ranks.

    Raises:
        UsageError: There are no ranks, or the value is none of that kind.
        WorldError: There are no such ranks.
    """
    selector, value = split_word(kind, text)
    ranks = world.select(selector)
    word = f"{kind.value}={selector}:{value}"
    if kind is InputKind.PROGRAMS:
        return UnevenInput(kind, ranks, path=value)
    if kind is InputKind.LENGTHS:
        if not _LENGTHS.fullmatch(value):
            raise UsageError(f"{word}: {value!r} are no lengths", fix="lengths=dp=1:4096,2048")
        lengths = tuple(map(int, value.split(",")))
        return UnevenInput(kind, ranks, lengths=lengths)
    if not _COUNT.fullmatch(value):
        raise UsageError(f"{word}: {value!r} is no number", fix=f"{kind.value}={selector}:7")
    return UnevenInput(kind, ranks, count=int(value))


def join_counts(inputs: Sequence[UnevenInput]) -> list[UnevenInput]:
    """Make one input of what several words say of the same ranks.

    A number of microbatches, their lengths and what the loader has go together.
    """
    words_of_ranks: dict[tuple[int, ...], dict[InputKind, UnevenInput]] = {}
    joined: list[UnevenInput] = []
    for uneven_input in inputs:
        kind, ranks = uneven_input.kind, uneven_input.ranks
        words = words_of_ranks.setdefault(ranks, {})
        # another batch, and what is said twice, stay inputs of their own, which are refused
        if kind is InputKind.PROGRAMS or kind in words:
            joined.append(uneven_input)
        else:
            words[kind] = uneven_input
    for words in words_of_ranks.values():
        loader = words.get(InputKind.LOADER)
        microbatches = words.get(InputKind.MICROBATCHES)
        whole = words.get(InputKind.LENGTHS)
        # lengths of as many microbatches as the loop has turns
        if whole is not None and microbatches is not None:
            whole = dataclasses.replace(whole, count=microbatches.count)
        if whole is None:
            whole = microbatches
        if whole is not None and loader is not None:
            whole = dataclasses.replace(whole, loader=loader.count)
        if whole is None:
            whole = loader
        if whole is not None:
            joined.append(whole)
    return joined


def split_word(kind: InputKind, text: str) -> tuple[str, str]:
    """Take ``RANKS:VALUE`` apart; UsageError if there are no ranks or no value."""
    if kind is InputKind.PROGRAMS:
        # a path may have a colon
        selector, _, value = text.partition(":")
        example = "programs=dp=3:OTHER"
    else:
        # a step of ranks (0-6:2) is a colon, too
        selector, _, value = text.rpartition(":")
        example = f"{kind.value}=dp=3:7"
    # what has no colon may be meant as a file
    if kind is InputKind.LENGTHS and not selector:
        raise UsageError(
            f"lengths={text}: no file of that name, and no ranks with lengths",
            fix=f"a file of lengths, or {example}",
        )
    if not selector or not value:
        raise UsageError(f"{kind.value}={text} needs ranks and a value", fix=example)
    return selector, value


def read_lengths_file(path: str | os.PathLike[str], world: World) -> list[UnevenInput]:
    """Read a file of lengths: JSON lines, each of one dp rank.

    Args:
        path: The file.
        world: The world of the ranks.

    Raises:
        UsageError: A line is none, or names a dp rank that is named twice.
    """
    place = Path(path)
    rows: list[_Row] = []
    with foreign.reading(place, "a file of lengths", _FILE_FIX):
        text = foreign.read_bytes(place, _MOST_BYTES)
        for line in text.splitlines():
            if line.strip():
                rows.append(foreign.value_of_json(line, _Row))
    inputs: list[UnevenInput] = []
    dp_ranks: set[int] = set()
    for row in rows:
        # the second line would hide the first
        if row.dp in dp_ranks:
            raise UsageError(f"{place}: dp rank {row.dp} is given twice", fix=_FILE_FIX)
        if not row.lengths:
            raise UsageError(f"{place}: dp rank {row.dp} has no lengths", fix=_FILE_FIX)
        dp_ranks.add(row.dp)
        ranks = world.select(f"dp={row.dp}")
        inputs.append(UnevenInput(InputKind.LENGTHS, ranks, lengths=row.lengths))
    if not inputs:
        raise UsageError(f"{place} has no lengths", fix=_FILE_FIX)
    return inputs
