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
from megatron_prism.core.programs.program import Program, Programs, Splits


@dataclass(frozen=True)
class Classes:
    """A partition of the ranks; classes are numbered by their lowest rank.

    Attributes:
        of: int32 [world], the class of every rank.
        representatives: The lowest rank of each class.
        programs: Index of each class's program (equal programs have one index).
        counts: Ranks in each class.
        members: Of every class group description -> ((class, how many of the group), …); classes
            of one group share one value.
        partners: Of every class (group description, offset) -> class of the rank there; -1: none.
        reasons: Of every class why it is a class of its own.
    """

    of: np.ndarray
    representatives: tuple[int, ...]
    programs: tuple[int, ...]
    counts: tuple[int, ...]
    members: tuple[Mapping[str, tuple[tuple[int, int], ...]], ...] = ()
    partners: tuple[Mapping[tuple[str, int], int], ...] = ()
    reasons: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Count the classes."""
        return len(self.representatives)

    def ranks(self, index: int) -> np.ndarray:
        """Give the ranks of a class, ascending, int64 [n]."""
        return np.flatnonzero(self.of == index)


@dataclass(frozen=True)
class _Views:
    """What ranks see of the world in one round.

    Attributes:
        signatures: uint64 [world], all that a rank is and sees as one word.
        columns: (what is seen, uint64 [world]) one by one.
    """

    signatures: np.ndarray
    columns: list[tuple[str, np.ndarray]]


def memberships(programs: Programs) -> dict[str, Membership]:
    """Give every group that a program uses.

    Explicit lists come before Megatron's own groups of the same description.
    """
    names: set[str] = set()
    for program in programs.programs:
        names.update(program.groups())
    groups: dict[str, Membership] = {}
    for name in sorted(names):
        if name in programs.groups:
            groups[name] = of_lists(name, programs.groups[name], programs.world.size)
        else:
            groups[name] = of_family(programs.world, name)
    return groups


def partition(
    programs: Programs,
    groups: Mapping[str, Membership] | None = None,
    apart: Iterable[Iterable[int]] = (),
) -> Classes:
    """Find the coarsest equitable partition.

    Args:
        programs: Of all ranks.
        groups: Their memberships, if the caller has them already.
        apart: Sets of ranks, each of which is in other classes than all other ranks.
    """
    if groups is None:
        groups = memberships(programs)
    first_equal = equal_programs(programs.programs)
    colour, heads = _renumber(_first_colours(programs, first_equal, apart))
    reason = "all ranks run one program"
    if len(heads) > 1:
        reason = "its program"
    reasons = [reason] * len(heads)

    # split classes by what their ranks see, until nothing splits
    while True:
        views = _views(colour, heads, programs, groups)
        finer_colour, finer_heads = _renumber(views.signatures)
        if len(finer_heads) == len(heads):
            return _describe(colour, heads, programs, groups, reasons, first_equal)

        # the first thing in which a class differs from its parent's lowest rank
        finer_reasons: list[str] = []
        for head in finer_heads.tolist():
            parent = int(colour[head])
            reason = reasons[parent]
            parent_head = heads[parent]
            for name, column in views.columns:
                if column[head] != column[parent_head]:
                    reason = name
                    break
            finer_reasons.append(reason)
        colour, heads, reasons = finer_colour, finer_heads, finer_reasons


def _first_colours(
    programs: Programs, first_equal: np.ndarray, apart: Iterable[Iterable[int]]
) -> np.ndarray:
    """Colour ranks by their programs, and by the sets that are set apart: uint64 [world]."""
    colours: np.ndarray = first_equal[programs.program_of].astype(np.uint64)
    sets_of_rank = defaultdict[int, list[int]](list)
    for number, ranks in enumerate(apart):
        for rank in ranks:
            sets_of_rank[int(rank)].append(number)

    # a colour of its own for each program in each combination of sets
    number_of_key: dict[tuple[int, ...], int] = {}
    for rank, sets in sets_of_rank.items():
        key = int(colours[rank]), *sets
        number = number_of_key.setdefault(key, len(number_of_key))
        colours[rank] = len(first_equal) + number
    return colours


def equal_programs(programs: tuple[Program, ...]) -> np.ndarray:
    """int32 [programs]: the first program that is the same but for its rank."""
    # texts and splits of all programs, numbered alike
    strings: dict[str, None] = {}
    splits: dict[Splits, None] = {}
    for program in programs:
        strings.update(dict.fromkeys(program.strings))
        splits.update(dict.fromkeys(program.splits))
    all_strings, all_splits = list(strings), list(splits)
    first_with: dict[bytes, int] = {}
    first_equal: list[int] = []
    for index, program in enumerate(programs):
        # bytes are equal where the programs are, but for their rank
        columns = program.columns(all_strings, all_splits)
        first_equal.append(first_with.setdefault(columns, index))
    return np.array(first_equal, dtype=np.int32)


def _renumber(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number colours by their lowest rank.

    Returns:
        int32 [world], the colour of every rank, and the lowest rank of every colour.
    """
    _, first_ranks, number_of_rank = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first_ranks, kind="stable")
    colour_of_number = np.empty(len(order), dtype=np.int32)
    colour_of_number[order] = np.arange(len(order), dtype=np.int32)
    return colour_of_number[number_of_rank.ravel()], first_ranks[order]


_MIX = np.uint64(0x9E3779B97F4A7C15)


def _mixed(words: np.ndarray) -> np.ndarray:
    """Give a random-looking word for each word, the same in every run (splitmix64)."""
    with np.errstate(over="ignore"):
        z = words.astype(np.uint64) + _MIX
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def _views(
    colour: np.ndarray,
    heads: np.ndarray,
    programs: Programs,
    groups: Mapping[str, Membership],
) -> _Views:
    """Say what each rank is and sees of the world.

    Args:
        colour: int32 [world], the class of every rank.
        heads: The lowest rank of every class.
        programs: Of all ranks.
        groups: Their memberships.
    """
    # sums of random words are equal where groups have the same classes equally often
    class_words = _mixed(np.arange(len(heads), dtype=np.uint64))
    words = class_words[colour]
    class_programs = [programs.of(rank) for rank in heads]
    columns: list[tuple[str, np.ndarray]] = []

    # groups that a rank uses: the sum of its members' words
    for name, group in groups.items():
        uses = np.array([name in program.groups() for program in class_programs])
        if not uses.any():
            continue
        group_sums = np.append(group.sums(words), np.uint64(0))  # 0 of group -1, which is none
        rank_sums = group_sums[group.group_of]
        columns.append((f"{name}: which classes are in its group", uses[colour] * rank_sums))

    # the other sides of its messages
    for name, offset in _partners(class_programs):
        uses = np.array([(name, offset) in program.partners for program in class_programs])
        peers = groups[name].peers(offset)
        peer_words = np.where(peers >= 0, words[peers], np.uint64(0))
        text = f"{name}: the class {offset:+d} from it"
        columns.append((text, uses[colour] * peer_words))

    # all of it as one word
    signatures = words.copy()
    with np.errstate(over="ignore"):
        for _, column in columns:
            # the factor keeps two columns apart that are exchanged
            signatures = _mixed(signatures * np.uint64(3) + column)
    return _Views(signatures, columns)


def _partners(programs: Iterable[Program]) -> list[tuple[str, int]]:
    """List (group description, offset) of all messages of some programs."""
    partners: set[tuple[str, int]] = set()
    for program in programs:
        partners |= program.partners
    return sorted(partners)


def _describe(
    colour: np.ndarray,
    heads: np.ndarray,
    programs: Programs,
    groups: Mapping[str, Membership],
    reasons: list[str],
    first_equal: np.ndarray,
) -> Classes:
    """Describe the classes of a partition.

    Args:
        colour: int32 [world], the class of every rank.
        heads: The lowest rank of every class.
        programs: Of all ranks.
        groups: Their memberships.
        reasons: Of every class why it is one.
        first_equal: Of every program the first that is the same.
    """
    class_programs = [programs.of(rank) for rank in heads]

    # classes of one group share one value, so others need not compare it
    @cache
    def count(name: str, number: int) -> tuple[tuple[int, int], ...]:
        """Count the members of each class in a group; none in group -1."""
        group = groups[name]
        members = group.members[group.start[number] : group.start[number + 1]]
        classes, counts = np.unique(colour[members], return_counts=True)
        return tuple(zip(classes.tolist(), counts.tolist(), strict=True))

    members: list[dict[str, tuple[tuple[int, int], ...]]] = []
    for rank, program in zip(heads, class_programs, strict=True):
        counts: dict[str, tuple[tuple[int, int], ...]] = {}
        for name in sorted(program.groups()):
            number = int(groups[name].group_of[rank])
            counts[name] = count(name, number)
        members.append(counts)

    # the class of the rank at the other side of each message
    partners: list[dict[tuple[str, int], int]] = [{} for _ in heads]
    for name, offset in _partners(class_programs):
        peers = groups[name].peers(offset)
        for index, rank in enumerate(heads.tolist()):
            if (name, offset) not in class_programs[index].partners:
                continue
            peer = peers[rank]
            partners[index][name, offset] = -1
            if peer >= 0:
                partners[index][name, offset] = int(colour[peer])
    class_sizes = np.bincount(colour, minlength=len(heads))
    program_numbers = first_equal[programs.program_of[heads]]
    return Classes(
        of=colour,
        representatives=tuple(heads.tolist()),
        programs=tuple(program_numbers.tolist()),
        counts=tuple(class_sizes.tolist()),
        members=tuple(members),
        partners=tuple(partners),
        reasons=tuple(reasons),
    )
