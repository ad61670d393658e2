"""The world graph: the programs of all ranks joined over classes of ranks.

In : Programs.  Out: WorldGraph: the classes, and for every op that communicates the *matched
call* at which it meets the ops of other ranks.  A matched call stands for all its equals in the
world: the k-th collective of all groups with the same classes, the k-th message between all ranks
of two classes.  Nothing here costs O(ranks x ops); only the partition looks at ranks at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_prism.core.errors import PrismError
from megatron_prism.core.groups import Membership
from megatron_prism.core.ops import CODE, IS_PAIR, NAMES
from megatron_prism.core.program import Program, Programs
from megatron_prism.core.units import counted
from megatron_prism.graph.classes import Classes, memberships, partition
from megatron_prism.graph.matching import Finding, check


@dataclass(frozen=True)
class MatchedCalls:
    """Where ops of different classes meet.

    of      : per class int64 [ops]: the matched call of every op, -1 for ops that meet nobody
    start   : int64 [matched calls + 1], slices of the next two
    classes : int32 [total], the classes that meet, ascending; a send comes before its receive
    ops     : int64 [total], the op of each of them
    sides   : int64 [matched calls], how many classes meet if all make the call
    """

    of: tuple[np.ndarray, ...]
    start: np.ndarray
    classes: np.ndarray
    ops: np.ndarray
    sides: np.ndarray

    def __len__(self) -> int:
        return len(self.start) - 1

    def members(self, number: int) -> list[tuple[int, int]]:
        """(class, op) of everybody who meets at ``number``."""
        part = slice(self.start[number], self.start[number + 1])
        return list(zip(self.classes[part].tolist(), self.ops[part].tolist(), strict=True))


@dataclass(frozen=True)
class CallKind:
    """Calls of one class that have name, group and peer in common.

    name     : of the collective; send or recv
    group    : its description
    ranks    : int64 [n], who takes part where the class's lowest rank does
    exchange : messages of batches that go both ways at once
    """

    name: str
    group: str
    ranks: np.ndarray
    exchange: bool

    @property
    def is_pair(self) -> bool:
        """Whether it is a message."""
        return self.name in ("send", "recv")

    def spans(self, ranks: int) -> bool:
        """Whether it reaches beyond one block of so many ranks (a node)."""
        return bool((self.ranks // ranks != self.ranks[0] // ranks).any())


@dataclass(frozen=True)
class CallKinds:
    """What the entries of ``MatchedCalls.ops`` are.

    kinds     : all of the world
    of        : int64 [total], the kind of each entry
    num_bytes : int64 [total], its message, as nccl-tests counts it
    least     : int64 [total], bytes of the smaller of its input and output
    ns        : int64 [total], how long its program says that it takes; -1: it does not
    """

    kinds: tuple[CallKind, ...]
    of: np.ndarray
    num_bytes: np.ndarray
    least: np.ndarray
    ns: np.ndarray


@dataclass(frozen=True)
class WorldGraph:
    """All programs of a world, joined."""

    programs: Programs
    groups: Mapping[str, Membership]
    classes: Classes

    def __str__(self) -> str:
        ranks, classes = self.programs.world.size, len(self.classes)
        return (
            f"{counted(ranks, 'rank')} in {counted(classes, 'class')}, "
            f"{self.num_ops():,} ops of which {sum(map(len, self.program_list)):,} are distinct"
        )

    @cached_property
    def program_list(self) -> list[Program]:
        """The program of every class."""
        return [self.programs.programs[index] for index in self.classes.programs]

    def class_name(self, index: int) -> str:
        """``stage 2``; ``stage 2, class 5`` if a stage has several; ``class 5`` across stages."""
        world, classes = self.programs.world, self.classes
        stages = np.asarray(world._along("pp", np.arange(world.size)))
        mine = np.unique(stages[classes.of == index])
        if world.pp == 1 or len(mine) != 1:
            return f"class {index}"
        alone = len(np.unique(classes.of[stages == mine[0]])) == 1
        return f"stage {mine[0]}" if alone else f"stage {mine[0]}, class {index}"

    def num_ops(self) -> int:
        """Ops of all ranks together."""
        pairs = zip(self.program_list, self.classes.counts, strict=True)
        return sum(len(program) * count for program, count in pairs)

    def check(self) -> list[Finding]:
        """What would hang or corrupt the job; empty for a healthy world."""
        return check(self.programs, self.classes, self.groups)

    def check_fits(self, fix: str = "") -> None:
        """PrismError if calls of the ranks do not fit together."""
        path = self.programs.path
        if findings := self.check():
            more = f"\n… and {len(findings) - 1} more" if len(findings) > 1 else ""
            raise PrismError(
                f"the calls of {path or 'these programs'} do not fit together, so the job hangs or "
                f"is wrong and has no timeline:\n\n{findings[0]}{more}",
                fix=fix or f"prism check {path or 'DIR'} explains every mismatch",
            )

    @cached_property
    def matched_calls(self) -> MatchedCalls:
        """Who meets whom: the k-th calls of all FIFOs, whether they fit (``check()``) or not."""
        return _Joiner(self).join()

    @cached_property
    def call_kinds(self) -> CallKinds:
        """The kinds of calls, and which each entry of the matched calls is of."""
        meet, kinds = self.matched_calls, list[CallKind]()
        of, num_bytes, least, ns = np.empty((4, len(meet.ops)), dtype=np.int64)
        entries = np.split(
            np.argsort(meet.classes, kind="stable"),
            np.cumsum(np.bincount(meet.classes, minlength=len(self.classes)))[:-1],
        )
        for index, (program, mine) in enumerate(zip(self.program_list, entries, strict=True)):
            places, both_ways = meet.ops[mine], _both_ways(program)
            names, groups, peers = (program.ops[key][places].astype(np.int64)
                                    for key in ("name", "group", "peer"))  # fmt: skip
            peers = np.where(IS_PAIR[names], peers, 0) + (1 << 32)
            keys = ((groups << 8 | names) << 1 | both_ways[places]) << 33 | peers
            _, first, which = np.unique(keys, return_index=True, return_inverse=True)
            of[mine] = len(kinds) + which
            num_bytes[mine] = program.num_bytes[places]
            least[mine] = np.minimum(program.bytes_in, program.bytes_out)[places]
            ns[mine] = program.ops["ns"][places]
            kinds += [self._kind(index, program, op, both_ways) for op in places[first].tolist()]
        return CallKinds(tuple(kinds), of, num_bytes, least, ns)

    def _kind(self, index: int, program: Program, op: int, both_ways: np.ndarray) -> CallKind:
        row, rank = program.ops[op], self.classes.representatives[index]
        name, group = NAMES[row["name"]], program.strings[row["group"]]
        ranks = self.groups[group].group(rank)
        if IS_PAIR[row["name"]]:
            place = int(self.groups[group].position[rank]) + int(row["peer"])
            ranks = np.array([rank, ranks[place % len(ranks)]])
        return CallKind(name, group, ranks, bool(both_ways[op]))

    def calls_where(self, fits: Callable[[CallKind], bool]) -> np.ndarray:
        """bool [matched calls]: whose first member's kind ``fits``."""
        each = np.array([fits(kind) for kind in self.call_kinds.kinds], dtype=bool)
        return np.asarray(each[self.call_kinds.of[self.matched_calls.start[:-1]]])


def _both_ways(program: Program) -> np.ndarray:
    """bool [ops]: messages of a batch that goes both ways at once, which is slower than one way."""
    names, batch = program.ops["name"], program.ops["batch"]
    sends, receives = (np.unique(batch[names == CODE[name]]) for name in ("send", "recv"))
    return (batch >= 0) & np.isin(batch, np.intersect1d(sends, receives))


def build(programs: Programs, apart: Iterable[Iterable[int]] = ()) -> WorldGraph:
    """The world graph; each set of ranks of ``apart`` is in classes of its own.  ProgramError for
    groups whose members are not known.
    """
    groups = memberships(programs)
    return WorldGraph(programs, groups, partition(programs, groups, apart))


class _Joiner:
    """Numbers the meetings: one block per set of classes and FIFO, as long as its longest."""

    def __init__(self, graph: WorldGraph) -> None:
        self.graph = graph
        self.entries: list[tuple[int, np.ndarray, object]] = []  # class, its ops, their block
        self.blocks: dict[object, tuple[int, int]] = {}  # length, sides
        self.sets: dict[tuple[int, ...], int] = {}  # which classes meet -> a number for them
        self.together: dict[int, int] = {}

    def _add(self, index: int, ops: np.ndarray, block: object, sides: int) -> None:
        self.entries.append((index, ops, block))
        self.blocks[block] = max(len(ops), self.blocks.get(block, (0, 0))[0]), sides

    def join(self) -> MatchedCalls:
        for index in range(len(self.graph.classes)):
            self._collectives(index)
            self._pairs(index)
        of = [np.full(len(p), -1, dtype=np.int64) for p in self.graph.program_list]
        lengths, sides = np.array([*self.blocks.values()], dtype=np.int64).reshape(-1, 2).T
        first = dict(zip(self.blocks, (np.cumsum(lengths) - lengths).tolist(), strict=True))
        for index, ops, block in self.entries:
            of[index][ops] = first[block] + np.arange(len(ops))
        return self._table(of, np.repeat(sides, lengths))

    def _collectives(self, index: int) -> None:
        program = self.graph.program_list[index]
        for name in program.groups():
            found = program.collectives(name)
            counts = self.graph.classes.members[index][name]
            if id(counts) not in self.together:  # classes of one group share one ``counts``
                who = tuple(c for c, _ in counts)
                self.together[id(counts)] = self.sets.setdefault(who, len(self.sets))
            self._add(index, found, (name, self.together[id(counts)]), len(counts))

    def _pairs(self, index: int) -> None:
        graph, program = self.graph, self.graph.program_list[index]
        rank = graph.classes.representatives[index]
        for name, found in program.groups().items():
            found = found[IS_PAIR[program.ops["name"][found]]]
            size = len(graph.groups[name].group(rank))
            if not found.size or not size:
                continue
            places, names = program.ops["peer"][found] % size, program.ops["name"][found]
            partners = graph.classes.partners[index].items()
            others = {offset % size: other for (group, offset), other in partners if group == name}
            for offset in sorted({*places.tolist()}):
                other = others[offset]
                for what in ("send", "recv"):
                    chosen = found[(places == offset) & (names == CODE[what])]
                    # a message is named by its sender, its receiver and the way between them
                    way = offset if what == "send" else -offset % size
                    ends = (index, other) if what == "send" else (other, index)
                    if chosen.size:
                        self._add(index, chosen, (name, way, ends), 2)

    def _table(self, of: list[np.ndarray], sides: np.ndarray) -> MatchedCalls:
        """The inverse of ``of``, sends before receives."""
        parts = [
            (where[talk], np.full(len(talk), index, dtype=np.int32), talk,
             program.ops["name"][talk] == CODE["recv"])
            for index, (where, program) in enumerate(zip(of, self.graph.program_list, strict=True))
            for talk in [np.flatnonzero(where >= 0)]
        ]  # fmt: skip
        at, owners, numbers, late = map(np.concatenate, zip(*parts, strict=True))
        order = np.lexsort((owners, late, at))
        start = np.searchsorted(at[order], np.arange(len(sides) + 1))
        return MatchedCalls(tuple(of), start, owners[order], numbers[order], sides)
