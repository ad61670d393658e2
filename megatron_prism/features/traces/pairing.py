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

import numpy as np

from megatron_prism.core.ops import IS_CALL, NAMES
from megatron_prism.core.program import Program
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
        said = f"rank {self.rank}: {len(self.pairs):,} of {self.captured:,} captured and "
        said += f"{self.traced:,} traced calls are paired"
        said += f", {self.lost:,} have no kernel in the trace" * bool(self.lost)
        return said + f"; {self.first}" * bool(self.first)


def pair(program: Program, members: Mapping[str, int], calls: Sequence[Call]) -> Pairing:
    """Pair the calls of ``program`` with those of a traced iteration.

    Args:
        program: of the rank.
        members: group of the program -> how many ranks it has.
        calls: of one traced iteration.
    """
    ops = program.ops
    mine = np.flatnonzero(IS_CALL[ops["name"]])
    columns = (ops[name][mine].tolist() for name in ("name", "group", "num_in", "num_out"))
    captured = [
        _facts(NAMES[name], members[program.strings[group]], num_in, num_out)
        for name, group, num_in, num_out in zip(*columns, strict=True)
    ]
    traced = [_facts(call.op, call.members, call.num_in, call.num_out) for call in calls]
    sized, counted = all(n > 0 for _, n, _ in traced), all(k >= 0 for *_, k in traced)
    keys = [[(op, n * sized, k * counted) for op, n, k in each] for each in (captured, traced)]
    matched, first = [], ""
    for place, (a, b) in enumerate(_aligned(*keys)):
        if (a, b) != (place, place) and not first:
            first = _apart(captured, traced, place, place)
        one = calls[b]
        if one.kernel or one.moves_nothing or captured[a][1] == 1:
            matched.append((int(mine[a]), b))
        elif not first:
            first = f"call {b}, {one}, has no kernel in the trace"
    if not first and len(matched) < max(len(captured), len(traced)):
        first = _apart(captured, traced, len(matched), len(matched))
    kernels = sum(call.kernel for call in calls)
    needless = {b for _, b in matched} | {b for b, one in enumerate(calls) if one.moves_nothing}
    bare = sum(not calls[b].kernel for b in needless)
    sizes = len(captured), len(traced), kernels, bare
    return Pairing(program.rank, *sizes, tuple(matched), first)


_Facts = tuple[str, int, int]  # kind, ranks of its group (0: unknown), elements (-1: unknown)


def _facts(op: str, members: int, num_in: int, num_out: int) -> _Facts:
    counted = op not in ("barrier", "all_to_all")
    return op, members, max(num_in, num_out) if counted else 0


def _aligned(first: list[_Facts], second: list[_Facts]) -> list[tuple[int, int]]:
    """Places of equal keys in both, ascending."""
    alike, shorter = 0, min(len(first), len(second))
    while alike < shorter and first[alike] == second[alike]:
        alike += 1
    blocks = difflib.SequenceMatcher(None, first[alike:], second[alike:], autojunk=False)
    return [(place, place) for place in range(alike)] + [
        (alike + a + i, alike + b + i)
        for a, b, count in blocks.get_matching_blocks()
        for i in range(count)
    ]


def _apart(captured: list[_Facts], traced: list[_Facts], a: int, b: int) -> str:
    """Two calls that are not the same, in words."""
    words = []
    for facts, place in ((captured, a), (traced, b)):
        op, members, count = facts[place] if place < len(facts) else ("nothing", 0, 0)
        text = f"{op} of {count:,} elements" if count > 0 else op
        words.append(text + f" in a group of {members:,}" * (members > 0))
    return f"call {a} is captured as {words[0]}, traced as {words[1]}"
