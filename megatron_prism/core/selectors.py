"""How does a person name ranks?  ``0,517`` · ``0-127:8`` · ``pp=3,tp=0`` · several joined by ``;``.

In : a world and a line of text, or a list of ranks.  Out: ranks, or the text that names them again.
Commas list numbers and ranges, or join conditions that must hold together; ``;`` joins selectors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from megatron_prism.core.errors import WorldError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["format_ranks", "select"]

HELP = "write 0,517 or 0-127:8 for ranks, pp=3,tp=0 for coordinates, 'pp=0;pp=3' for several"
_NUMBERS = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+)(?::(?P<step>\d+))?)?")
_CONDITION = re.compile(r"(?P<axis>[a-z]+)\s*=\s*(?P<value>\d+)")


class HasRanks(Protocol):
    """What a selector needs of a world; ``world.World`` is the one that has it."""

    def check_rank(self, rank: int) -> int: ...
    def matching(self, **coordinates: int) -> np.ndarray: ...


def select(world: HasRanks, text: str) -> tuple[int, ...]:
    """Ranks that ``text`` names, ascending, each once.

    WorldError with the fix when it names none, one outside the world, or cannot be read.
    """
    ranks: set[int] = set()
    for selector in text.split(";"):
        terms = [term.strip() for term in selector.split(",")]
        if any("=" in term for term in terms):
            ranks.update(_by_coordinates(world, selector.strip(), terms))
        else:
            for term in terms:
                ranks.update(_by_number(world, term, text))
    return tuple(sorted(ranks))


def _by_coordinates(world: HasRanks, selector: str, terms: list[str]) -> list[int]:
    wanted: dict[str, int] = {}
    for term in terms:
        match = _CONDITION.fullmatch(term)
        if match is None or match["axis"] in wanted:
            what = "is given twice" if match else "is no condition like pp=3"
            raise WorldError(f"selector {selector!r}: {term!r} {what}", fix=HELP)
        wanted[match["axis"]] = int(match["value"])
    found: list[int] = world.matching(**wanted).tolist()
    if not found:
        raise WorldError(
            f"selector {selector!r}: no rank of {world} has all of these", fix="drop one condition"
        )
    return found


def _by_number(world: HasRanks, term: str, text: str) -> range:
    match = _NUMBERS.fullmatch(term)
    if match is None:
        raise WorldError(f"ranks {text!r}: {term!r} is no rank, range or condition", fix=HELP)
    first = world.check_rank(int(match["first"]))
    last = first if match["last"] is None else world.check_rank(int(match["last"]))
    step = 1 if match["step"] is None else int(match["step"])
    if last < first or step < 1:
        raise WorldError(
            f"ranks {text!r}: {term!r} is an empty range",
            fix=f"write {last}-{first}" if last < first else "use a step of at least 1",
        )
    return range(first, last + 1, step)


def format_ranks(ranks: Iterable[int]) -> str:
    """The ranks in few words that ``select`` reads back: ``0-120:8``, ``0-3,9``; no ranks, no text.

    Runs of three or more evenly spaced ranks become a range, greedily from the lowest.
    """
    rest = sorted(set(ranks))
    words = []
    at = 0
    while at < len(rest):
        end = at + 1
        step = rest[end] - rest[at] if end < len(rest) else 1
        while end + 1 < len(rest) and rest[end + 1] - rest[end] == step:
            end += 1
        if end - at >= 2 and end < len(rest):
            words.append(f"{rest[at]}-{rest[end]}" + (f":{step}" if step > 1 else ""))
            at = end + 1
        else:
            words.append(str(rest[at]))
            at += 1
    return ",".join(words)
