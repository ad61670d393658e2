"""Equivalence classes of ranks: the coarsest equitable partition of a world.

In : Programs.  Out: Classes.  Two ranks are in one class when they run the same program and, for
every group that the program uses, their groups hold the same classes equally often, and for every
send and receive the other side is of the same class.  So whatever is computed once per class (a
replay, a check, a memory curve) is exactly what it would be for each of its ranks.

Colour refinement (Paige & Tarjan 1987; Berkholz, Bonsma & Grohe 2017): start from the programs,
split by what a rank sees in its groups, repeat until nothing splits.  A group's members are told
apart by a sum of random 64-bit words per colour, so that a round costs O(ranks) whatever the sizes
of the groups: of 131,072 ranks two unlike groups are taken for alike once in 10^9 worlds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from megatron_prism.core.groups import Membership, of_family, of_lists
from megatron_prism.core.program import Program, Programs


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
    reasons: tuple[str, ...] = ()

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
    sets = defaultdict[int, list[int]](list)
    for number, ranks in enumerate(apart):
        for rank in ranks:
            sets[int(rank)].append(number)
    known: dict[tuple[int, ...], int] = {}
    for rank, numbers in sets.items():
        start[rank] = len(same) + known.setdefault((int(start[rank]), *numbers), len(known))
    colour, first = _renumber(start)
    reasons = ["its program" if len(first) > 1 else "all ranks run one program"] * len(first)
    while True:
        signature, seen = _signatures(colour, first, programs, groups)
        finer, heads = _renumber(signature)
        if len(heads) == len(first):
            return _describe(colour, first, programs, groups, reasons, same)
        parents = colour[heads].tolist()
        reasons = [
            # the first thing in which it differs from its parent's lowest rank
            next((name for name, column in seen if column[head] != column[first[parent]]),
                 reasons[parent])
            for head, parent in zip(heads, parents, strict=True)
        ]  # fmt: skip
        colour, first = finer, heads


def equal_programs(programs: tuple[Program, ...]) -> np.ndarray:
    """int32 [programs]: the first program that is the same but for its rank."""
    strings = list(dict.fromkeys(text for program in programs for text in program.strings))
    splits = list(dict.fromkeys(split for program in programs for split in program.splits))
    known: dict[bytes, int] = {}
    return np.array(
        [known.setdefault(p.columns(strings, splits), i) for i, p in enumerate(programs)],
        dtype=np.int32,
    )


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


def _describe(
    colour: np.ndarray,
    first: np.ndarray,
    programs: Programs,
    groups: Mapping[str, Membership],
    reasons: list[str],
    same: np.ndarray,
) -> Classes:
    runs = [programs.of(rank) for rank in first]

    @cache  # classes of one group share one value
    def count(name: str, index: int) -> tuple[tuple[int, int], ...]:
        group = groups[name]
        members = group.members[group.start[index] : group.start[index + 1]]  # none of group -1
        found, counts = np.unique(colour[members], return_counts=True)
        return tuple(zip(found.tolist(), counts.tolist(), strict=True))

    members = tuple(
        {name: count(name, int(groups[name].group_of[rank])) for name in sorted(program.groups())}
        for rank, program in zip(first, runs, strict=True)
    )
    partners: list[dict[tuple[str, int], int]] = [{} for _ in first]
    for name, offset in sorted({pair for program in runs for pair in program.partners}):
        peer = groups[name].peers(offset)
        for rank, program, mine in zip(first, runs, partners, strict=True):
            if (name, offset) in program.partners:
                mine[name, offset] = int(colour[peer[rank]]) if peer[rank] >= 0 else -1
    return Classes(
        of=colour,
        representatives=tuple(first.tolist()),
        programs=tuple(same[programs.program_of[first]].tolist()),
        counts=tuple(np.bincount(colour, minlength=len(first)).tolist()),
        members=members,
        partners=tuple(partners),
        reasons=tuple(reasons),
    )
