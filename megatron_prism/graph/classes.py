"""Equivalence classes of ranks: the coarsest equitable partition of a world.

In : Programs.  Out: Classes.  Two ranks are in one class when they run the same program and, for
every group that the program uses, their groups hold the same classes equally often, and for every
send and receive the other side is of the same class.  So whatever is computed once per class (a
replay, a check, a memory curve) is exactly what it would be for each of its ranks.

Colour refinement (Paige & Tarjan 1987; Berkholz, Bonsma & Grohe 2017): start from the programs,
split by what a rank sees in its groups, repeat until nothing splits.  A group's members are told
apart by a sum of random 64-bit words per colour, so that a round costs O(ranks) whatever the sizes
of the groups; the result is then proved group by group with the colours themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from megatron_prism.core.groups import Membership, of_family, of_lists
from megatron_prism.core.program import Program, Programs

if TYPE_CHECKING:
    from megatron_prism.core.program import Splits


@dataclass(frozen=True)
class Classes:
    """A partition of the ranks; classes are numbered by their lowest rank.

    of              : int32 [world], the class of every rank
    representatives : the lowest rank of each class
    programs        : index of each class's program (equal programs have one index)
    counts          : ranks in each class
    members         : per class: group description -> ((class, how many of the group), …)
    partners        : per class: (group description, offset) -> class of the rank there
    reasons         : per class: why it is a class of its own
    """

    of: np.ndarray
    representatives: tuple[int, ...]
    programs: tuple[int, ...]
    counts: tuple[int, ...]
    members: tuple[Mapping[str, tuple[tuple[int, int], ...]], ...] = ()
    partners: tuple[Mapping[tuple[str, int], int], ...] = ()
    reasons: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.representatives)

    def ranks(self, index: int) -> np.ndarray:
        """The ranks of class ``index``, ascending, int64 [n]."""
        return np.flatnonzero(self.of == index)


def memberships(programs: Programs) -> dict[str, Membership]:
    """Every group that some program uses; explicit lists come before Megatron's own."""
    names = sorted({name for program in programs.programs for name in program.groups()})
    size = programs.world.size
    return {
        name: of_lists(name, programs.groups[name], size)
        if name in programs.groups
        else of_family(programs.world, name)
        for name in names
    }


def partition(
    programs: Programs,
    groups: Mapping[str, Membership] | None = None,
    apart: Iterable[Iterable[int]] = (),
) -> Classes:
    """The coarsest equitable partition.

    Args:
        programs: of all ranks.
        groups: their memberships, if the caller has them already.
        apart: sets of ranks, each of which is in other classes than the rest.
    """
    groups = memberships(programs) if groups is None else groups
    same = equal_programs(programs.programs)
    start = same[programs.program_of].astype(np.uint64)
    sets: dict[int, list[int]] = {}
    for number, ranks in enumerate(apart):
        for rank in ranks:
            sets.setdefault(int(rank), []).append(number)
    known: dict[tuple[int, ...], int] = {}
    for rank, numbers in sets.items():
        key = (int(start[rank]), *numbers)
        start[rank] = len(same) + known.setdefault(key, len(known))
    colour, first = _renumber(start)
    reasons = ["its program" if len(first) > 1 else "all ranks run one program"] * len(first)
    while True:
        signature, seen = _signatures(colour, first, programs, groups)
        finer, heads = _renumber(signature)
        if len(heads) == len(first):
            break
        reasons = _explain(colour, first, finer, heads, reasons, seen)
        colour, first = finer, heads
    _prove(colour, first, groups, seen)
    return _describe(colour, first, programs, groups, reasons, same)


def equal_programs(programs: tuple[Program, ...]) -> np.ndarray:
    """int32 [programs]: the first program that is the same but for its rank."""
    strings, splits = _vocabulary(programs)
    known: dict[bytes, int] = {}
    return np.array(
        [known.setdefault(p.columns(strings, splits), i) for i, p in enumerate(programs)],
        dtype=np.int32,
    )


def _vocabulary(programs: tuple[Program, ...]) -> tuple[list[str], list[Splits]]:
    strings = list(dict.fromkeys(text for program in programs for text in program.strings))
    splits = list(dict.fromkeys(split for program in programs for split in program.splits))
    return strings, splits


def _renumber(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(int32 colour per rank, lowest rank per colour); colours are numbered by lowest rank."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    place = np.empty(len(order), dtype=np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    return place[inverse.ravel()], first[order]


_MIX = np.uint64(0x9E3779B97F4A7C15)


def _mixed(words: np.ndarray) -> np.ndarray:
    """splitmix64: an odd-looking word for each word, the same in every run."""
    with np.errstate(over="ignore"):
        z = words.astype(np.uint64) + _MIX
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def _signatures(
    colour: np.ndarray,
    first: np.ndarray,
    programs: Programs,
    groups: Mapping[str, Membership],
) -> tuple[np.ndarray, list[tuple[str, np.ndarray]]]:
    """(what each rank is and sees as one word, what it sees one by one with a name for it)."""
    words = _mixed(np.arange(len(first), dtype=np.uint64))[colour]
    runs = [programs.of(rank) for rank in first]
    total, seen = words.copy(), []
    for name, group in groups.items():
        wanting = np.array([name in program.groups() for program in runs])
        if wanting.any():
            sums = np.append(group.sums(words), np.uint64(0))[group.group_of]
            seen.append((f"{name}: which classes are in its group", wanting[colour] * sums))
    for name, offset in sorted({pair for program in runs for pair in program.partners}):
        wanting = np.array([(name, offset) in program.partners for program in runs])
        peer = groups[name].peers(offset)
        found = np.where(peer >= 0, words[peer], np.uint64(0))
        seen.append((f"{name}: the class {offset:+d} from it", wanting[colour] * found))
    with np.errstate(over="ignore"):
        for _, column in seen:
            total = _mixed(total * np.uint64(3) + column)
    return total, seen


def _explain(
    colour: np.ndarray,
    first: np.ndarray,
    finer: np.ndarray,
    heads: np.ndarray,
    reasons: list[str],
    seen: list[tuple[str, np.ndarray]],
) -> list[str]:
    """Why each new colour is one: the first thing in which it differs from its parent's lowest."""
    found = []
    for head in heads:
        parent = int(colour[head])
        elder = first[parent]
        what = next((name for name, column in seen if column[head] != column[elder]), None)
        found.append(reasons[parent] if what is None else what)
    return found


def _describe(
    colour: np.ndarray,
    first: np.ndarray,
    programs: Programs,
    groups: Mapping[str, Membership],
    reasons: list[str],
    same: np.ndarray,
) -> Classes:
    runs = [programs.of(rank) for rank in first]
    known: dict[tuple[str, int], tuple[tuple[int, int], ...]] = {}  # counted once per group

    def count(name: str, rank: int) -> tuple[tuple[int, int], ...]:
        key = (name, int(groups[name].group_of[rank]))
        if key not in known:
            known[key] = _count(colour[groups[name].group(rank)])
        return known[key]

    members = tuple(
        {name: count(name, rank) for name in sorted(program.groups())}
        for rank, program in zip(first, runs, strict=True)
    )
    partners: list[dict[tuple[str, int], int]] = [{} for _ in first]
    for name, offset in sorted({pair for program in runs for pair in program.partners}):
        peer = groups[name].peers(offset)
        for index, (rank, program) in enumerate(zip(first, runs, strict=True)):
            if (name, offset) in program.partners:
                partners[index][name, offset] = int(colour[peer[rank]]) if peer[rank] >= 0 else -1
    return Classes(
        of=colour,
        representatives=tuple(int(rank) for rank in first),
        programs=tuple(int(same[programs.program_of[rank]]) for rank in first),
        counts=tuple(np.bincount(colour, minlength=len(first)).tolist()),
        members=members,
        partners=tuple(partners),
        reasons=tuple(reasons),
    )


def _count(colours: np.ndarray) -> tuple[tuple[int, int], ...]:
    found, counts = np.unique(colours, return_counts=True)
    return tuple(zip(found.tolist(), counts.tolist(), strict=True))


def _prove(
    colour: np.ndarray,
    first: np.ndarray,
    groups: Mapping[str, Membership],
    seen: list[tuple[str, np.ndarray]],
) -> None:
    """Assert that no two things were taken for alike by an accident of the random words."""
    words = _mixed(np.arange(len(first), dtype=np.uint64))[colour]
    for name, column in seen:
        assert np.array_equal(column, column[first[colour]]), f"collision at {name}"
    for name, group in groups.items():
        sizes, sums = group.group_sizes, group.sums(words)
        for n in np.unique(sizes):
            chosen = np.flatnonzero(sizes == n)
            rows = colour[group.members[group.start[chosen][:, None] + np.arange(n)]]
            rows.sort(axis=1)
            _, model, inverse = np.unique(sums[chosen], return_index=True, return_inverse=True)
            assert np.array_equal(rows, rows[model[inverse.ravel()]]), f"collision in {name}"
