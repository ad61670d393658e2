"""Which traced call is which captured one.

In : a captured program, how many ranks its groups have, the calls of a traced iteration.  Out:
Pairing.  Calls are compared by their kind, the ranks of their group and their elements, as far as
the trace says these of all its calls, and in their order.  How many elements an all-to-all has is
the routing's matter, so any two of a group are alike.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_prism.core.programs.ops import IS_CALL, NAMES
from megatron_prism.core.programs.program import Program
from megatron_prism.features.traces.timing import Call

ENOUGH = 0.95  # of the calls: with fewer pairs the trace and the program are of two jobs


@dataclass(frozen=True)
class Pairing:
    """One traced rank's calls beside those of its captured program.

    captured, traced : how many calls each has
    kernels : traced calls with a kernel; bare: traced calls that need none, as they move nothing
    pairs   : (op of the program, number of the traced call), ascending
    first   : the first captured call without a counterpart, in words; "" if all have one
    """

    rank: int
    captured: int
    traced: int
    kernels: int
    bare: int
    pairs: tuple[tuple[int, int], ...]
    first: str

    @property
    def lost(self) -> int:
        """Traced calls whose kernel is not in the trace."""
        return self.traced - self.kernels - self.bare

    @property
    def share(self) -> float:
        """Paired calls, as a part of all."""
        return len(self.pairs) / max(self.captured, self.traced, 1)

    def __str__(self) -> str:
        captured = f"{len(self.pairs):,} of {self.captured:,} captured"
        text = f"rank {self.rank}: {captured} and {self.traced:,} traced calls are paired"
        if self.lost:
            text += f", {self.lost:,} have no kernel in the trace"
        if self.first:
            text += f"; {self.first}"
        return text


class _Facts(NamedTuple):
    """What a call is compared by.

    members  : ranks of its group; 0: unknown
    elements : the larger side; 0 where any number is alike; -1: unknown
    """

    op: str
    members: int
    elements: int


def pair(program: Program, members: Mapping[str, int], calls: Sequence[Call]) -> Pairing:
    """Pair the calls of ``program`` with those of a traced iteration.

    Args:
        program: of the rank.
        members: group of the program -> how many ranks it has.
        calls: of one traced iteration.
    """
    call_ops = np.flatnonzero(IS_CALL[program.ops["name"]])
    captured = _captured_facts(program, members, call_ops)
    traced = [_facts(call.op, call.members, call.num_in, call.num_out) for call in calls]

    matched: list[tuple[int, int]] = []
    first_problem = ""
    for place, (a, b) in enumerate(_aligned(*_comparable(captured, traced))):
        # from the first place on where an order skips a call, the two are apart
        if (a, b) != (place, place) and not first_problem:
            first_problem = _apart(captured, traced, place)
        call = calls[b]
        if call.kernel or call.moves_nothing or captured[a].members == 1:
            matched.append((int(call_ops[a]), b))
        elif not first_problem:
            first_problem = f"call {b}, {call}, has no kernel in the trace"
    # all that is aligned is in order: what lacks is at the end
    if not first_problem and len(matched) < max(len(captured), len(traced)):
        first_problem = _apart(captured, traced, len(matched))

    # a paired call needs no kernel, too, if the capture knows that its group has one rank
    needless = {number for _, number in matched}
    needless |= {number for number, call in enumerate(calls) if call.moves_nothing}
    return Pairing(
        rank=program.rank,
        captured=len(captured),
        traced=len(traced),
        kernels=sum(call.kernel for call in calls),
        bare=sum(not calls[number].kernel for number in needless),
        pairs=tuple(matched),
        first=first_problem,
    )


def _captured_facts(
    program: Program, members: Mapping[str, int], call_ops: np.ndarray
) -> list[_Facts]:
    """Return the facts of a program's calls; ``call_ops``: int64 [calls], their ops."""
    rows = program.ops[call_ops]
    facts = []
    for name, group, num_in, num_out in zip(
        rows["name"].tolist(),
        rows["group"].tolist(),
        rows["num_in"].tolist(),
        rows["num_out"].tolist(),
        strict=True,
    ):
        num_members = members[program.strings[group]]
        facts.append(_facts(NAMES[name], num_members, num_in, num_out))
    return facts


def _facts(op: str, members: int, num_in: int, num_out: int) -> _Facts:
    # a barrier has no elements, and those of an all-to-all are the routing's matter
    if op in ("barrier", "all_to_all"):
        return _Facts(op, members, 0)
    return _Facts(op, members, max(num_in, num_out))


def _comparable(captured: list[_Facts], traced: list[_Facts]) -> tuple[list[_Facts], list[_Facts]]:
    """Leave out members and elements where the trace does not say them of all its calls."""
    has_members = all(facts.members > 0 for facts in traced)
    has_elements = all(facts.elements >= 0 for facts in traced)

    def keys(calls: list[_Facts]) -> list[_Facts]:
        shared = calls
        if not has_members:
            shared = [facts._replace(members=0) for facts in shared]
        if not has_elements:
            shared = [facts._replace(elements=0) for facts in shared]
        return shared

    return keys(captured), keys(traced)


def _aligned(captured: list[_Facts], traced: list[_Facts]) -> list[tuple[int, int]]:
    """Return places of equal facts in both, ascending."""
    # difflib is slow on what most jobs are: equal from the beginning
    num_alike, shorter = 0, min(len(captured), len(traced))
    while num_alike < shorter and captured[num_alike] == traced[num_alike]:
        num_alike += 1
    places = [(place, place) for place in range(num_alike)]

    tails = captured[num_alike:], traced[num_alike:]
    for block in difflib.SequenceMatcher(None, *tails, autojunk=False).get_matching_blocks():
        a, b = num_alike + block.a, num_alike + block.b
        places.extend((a + step, b + step) for step in range(block.size))
    return places


def _apart(captured: list[_Facts], traced: list[_Facts], place: int) -> str:
    """Say what stands in one place of both, where that is not the same."""
    captured_words, traced_words = _words(captured, place), _words(traced, place)
    return f"call {place} is captured as {captured_words}, traced as {traced_words}"


def _words(calls: list[_Facts], place: int) -> str:
    if place >= len(calls):
        return "nothing"
    facts = calls[place]
    words = facts.op
    if facts.elements > 0:
        words += f" of {facts.elements:,} elements"
    if facts.members > 0:
        words += f" in a group of {facts.members:,}"
    return words
