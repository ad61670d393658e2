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
from megatron_prism.core.programs.ops import CODE, IS_PAIR, NAMES
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.core.units import counted
from megatron_prism.graph.classes import Classes, memberships, partition
from megatron_prism.graph.matching import Finding, check


@dataclass(frozen=True)
class MatchedCalls:
    """Where ops of different classes meet.

    Attributes:
        of: Of every class int64 [ops], the matched call of every op; -1 for ops that meet no other.
        start: int64 [matched calls + 1], slices of ``classes`` and ``ops``.
        classes: int32 [total], the classes that meet, ascending; a send comes before its receive.
        ops: int64 [total], the op of each of them.
        sides: int64 [matched calls], how many classes meet if all make the call.
    """

    of: tuple[np.ndarray, ...]
    start: np.ndarray
    classes: np.ndarray
    ops: np.ndarray
    sides: np.ndarray

    def __len__(self) -> int:
        """Count the matched calls."""
        return len(self.start) - 1

    def members(self, number: int) -> list[tuple[int, int]]:
        """List (class, op) of all that meet at a matched call."""
        start, end = self.start[number], self.start[number + 1]
        classes, ops = self.classes[start:end], self.ops[start:end]
        return list(zip(classes.tolist(), ops.tolist(), strict=True))


@dataclass(frozen=True)
class CallKind:
    """Calls of one class that have name, group and peer in common.

    Attributes:
        name: The collective; send or recv.
        group: The group's description.
        ranks: int64 [n], the ranks that take part where the class's lowest rank does.
        exchange: Whether they are messages of batches that go both ways at once.
    """

    name: str
    group: str
    ranks: np.ndarray
    exchange: bool

    @property
    def is_pair(self) -> bool:
        """Whether calls are messages."""
        return self.name in ("send", "recv")

    def spans(self, ranks: int) -> bool:
        """Say whether calls reach beyond one block of so many ranks (a node)."""
        blocks = self.ranks // ranks
        return bool((blocks != blocks[0]).any())


@dataclass(frozen=True)
class CallKinds:
    """What the entries of ``MatchedCalls.ops`` are.

    Attributes:
        kinds: All kinds of the world.
        of: int64 [total], the kind of each entry.
        num_bytes: int64 [total], the message of each, as nccl-tests counts it.
        least: int64 [total], bytes of the smaller of input and output.
        ns: int64 [total], how long the program says that the call takes; -1: it does not.
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
        """Say how many ranks, classes and ops there are."""
        ranks = counted(self.programs.world.size, "rank")
        classes = counted(len(self.classes), "class")
        distinct_ops = sum(len(program) for program in self.program_list)
        return (
            f"{ranks} in {classes}, {self.num_ops():,} ops of which {distinct_ops:,} are distinct"
        )

    @cached_property
    def program_list(self) -> list[Program]:
        """The program of every class."""
        return [self.programs.programs[index] for index in self.classes.programs]

    def class_name(self, index: int) -> str:
        """Name a class: ``stage 2``; ``stage 2, class 5`` if a stage has several; ``class 5``."""
        world, classes = self.programs.world, self.classes
        stage_of_rank = np.asarray(world._along("pp", np.arange(world.size)))
        stages = np.unique(stage_of_rank[classes.of == index])

        # across stages, or without any
        if world.pp == 1 or len(stages) != 1:
            return f"class {index}"
        stage = stages[0]
        classes_of_stage = np.unique(classes.of[stage_of_rank == stage])
        if len(classes_of_stage) == 1:
            return f"stage {stage}"
        return f"stage {stage}, class {index}"

    def num_ops(self) -> int:
        """Count the ops of all ranks together."""
        pairs = zip(self.program_list, self.classes.counts, strict=True)
        return sum(len(program) * count for program, count in pairs)

    def check(self) -> list[Finding]:
        """Find what would hang or corrupt the job; nothing in a healthy world."""
        return check(self.programs, self.classes, self.groups)

    def check_fits(self, fix: str = "") -> None:
        """Raise PrismError if calls of the ranks do not fit together."""
        findings = self.check()
        if not findings:
            return
        path = self.programs.path
        further = ""
        if len(findings) > 1:
            further = f"\n… and {len(findings) - 1} more"
        raise PrismError(
            f"the calls of {path or 'these programs'} do not fit together, so the job hangs or "
            f"is wrong and has no timeline:\n\n{findings[0]}{further}",
            fix=fix or f"prism check {path or 'DIR'} explains every mismatch",
        )

    @cached_property
    def matched_calls(self) -> MatchedCalls:
        """Which ops meet: the k-th calls of all FIFOs, whether they fit (``check()``) or not."""
        return _Joiner(self).join()

    @cached_property
    def call_kinds(self) -> CallKinds:
        """The kinds of calls, and which each entry of the matched calls is of."""
        matched_calls = self.matched_calls
        kinds: list[CallKind] = []
        of, num_bytes, least, ns = np.empty((4, len(matched_calls.ops)), dtype=np.int64)

        # the entries of every class, one class after the other
        class_of_entry = matched_calls.classes
        by_class = np.argsort(class_of_entry, kind="stable")
        counts = np.bincount(class_of_entry, minlength=len(self.classes))
        ends = np.cumsum(counts)
        entries_of_classes = np.split(by_class, ends[:-1])
        for index, entries in enumerate(entries_of_classes):
            program = self.program_list[index]
            ops = matched_calls.ops[entries]
            is_exchange = _both_ways(program)
            keys = _keys_of_kinds(program, ops, is_exchange)
            _, first, kind_of_entry = np.unique(keys, return_index=True, return_inverse=True)
            of[entries] = len(kinds) + kind_of_entry
            num_bytes[entries] = program.num_bytes[ops]
            smaller_sides = np.minimum(program.bytes_in, program.bytes_out)
            least[entries] = smaller_sides[ops]
            ns[entries] = program.ops["ns"][ops]
            for op in ops[first].tolist():
                kinds.append(self._kind(index, op, bool(is_exchange[op])))
        return CallKinds(tuple(kinds), of, num_bytes, least, ns)

    def _kind(self, index: int, op: int, is_exchange: bool) -> CallKind:
        """Describe the kind of a call.

        Args:
            index: The class that makes it.
            op: The call in the class's program.
            is_exchange: Whether it is in a batch that goes both ways.
        """
        program, rank = self.program_list[index], self.classes.representatives[index]
        row = program.ops[op]
        name, group = NAMES[row["name"]], program.strings[row["group"]]
        ranks = self.groups[group].group(rank)
        # of a message the rank and its peer
        if IS_PAIR[row["name"]]:
            place = int(self.groups[group].position[rank])
            peer_place = (place + int(row["peer"])) % len(ranks)
            ranks = np.array([rank, ranks[peer_place]])
        return CallKind(name, group, ranks, is_exchange)

    def calls_where(self, fits: Callable[[CallKind], bool]) -> np.ndarray:
        """Choose matched calls by the kind of their first member: bool [matched calls]."""
        fitting = [fits(kind) for kind in self.call_kinds.kinds]
        first_members = self.matched_calls.start[:-1]
        kind_of_call = self.call_kinds.of[first_members]
        return np.asarray(np.array(fitting, dtype=bool)[kind_of_call])


def _keys_of_kinds(program: Program, ops: np.ndarray, is_exchange: np.ndarray) -> np.ndarray:
    """Give calls of one kind the same number: int64 [calls].

    Args:
        program: The program of a class.
        ops: Its calls.
        is_exchange: bool [ops of the program], of batches that go both ways.
    """
    rows = program.ops[ops]
    names = rows["name"].astype(np.int64)
    groups = rows["group"].astype(np.int64)
    offsets = rows["peer"].astype(np.int64)

    # 33 bits of the peer, which may be behind the rank; one of the exchange; 8 of the name
    peers = np.where(IS_PAIR[rows["name"]], offsets, 0) + (1 << 32)
    names_in_groups = groups << 8 | names
    keys: np.ndarray = (names_in_groups << 1 | is_exchange[ops]) << 33 | peers
    return keys


def _both_ways(program: Program) -> np.ndarray:
    """bool [ops]: messages of a batch that goes both ways at once, which is slower than one way."""
    names, batches = program.ops["name"], program.ops["batch"]
    batches_of_sends = np.unique(batches[names == CODE["send"]])
    batches_of_receives = np.unique(batches[names == CODE["recv"]])
    exchanges = np.intersect1d(batches_of_sends, batches_of_receives)
    return (batches >= 0) & np.isin(batches, exchanges)


def build(programs: Programs, apart: Iterable[Iterable[int]] = ()) -> WorldGraph:
    """Join programs to a world graph.

    Args:
        programs: Of all ranks.
        apart: Sets of ranks, each of which is in classes of its own.

    Raises:
        ProgramError: The members of a group are not known.
    """
    groups = memberships(programs)
    classes = partition(programs, groups, apart)
    return WorldGraph(programs, groups, classes)


@dataclass
class _Block:
    """The matched calls of one FIFO of one set of classes.

    Attributes:
        length: As many as the longest FIFO has.
        sides: How many classes meet.
    """

    length: int
    sides: int


class _Joiner:
    """Numbers the matched calls: one block per set of classes and FIFO."""

    def __init__(self, graph: WorldGraph) -> None:
        """Begin without matched calls."""
        self._graph = graph
        self._entries: list[tuple[int, np.ndarray, object]] = []  # class, its ops, their block
        self._blocks: dict[object, _Block] = {}
        # a set of classes, and the list that the classes of one group share -> its number
        self._number_of_set: dict[tuple[int, ...], int] = {}
        self._number_of_list: dict[int, int] = {}

    def join(self) -> MatchedCalls:
        """Number the matched calls of all classes."""
        for index in range(len(self._graph.classes)):
            self._add_collectives(index)
            self._add_messages(index)

        # blocks one after the other
        first_call: dict[object, int] = {}
        calls = 0
        for key, block in self._blocks.items():
            first_call[key] = calls
            calls += block.length
        call_of_op = [np.full(len(p), -1, dtype=np.int64) for p in self._graph.program_list]
        for index, ops, key in self._entries:
            call_of_op[index][ops] = first_call[key] + np.arange(len(ops))
        blocks = self._blocks.values()
        lengths = np.array([block.length for block in blocks], dtype=np.int64)
        sides = np.array([block.sides for block in blocks], dtype=np.int64)
        return self._table(call_of_op, np.repeat(sides, lengths))

    def _add(self, index: int, ops: np.ndarray, key: object, sides: int) -> None:
        """Add the calls of one FIFO of a class to a block."""
        self._entries.append((index, ops, key))
        block = self._blocks.setdefault(key, _Block(0, sides))
        block.length = max(block.length, len(ops))
        block.sides = sides

    def _add_collectives(self, index: int) -> None:
        """Add the collectives of a class, group by group."""
        program = self._graph.program_list[index]
        for name in program.groups():
            class_counts = self._graph.classes.members[index][name]
            list_id = id(class_counts)
            if list_id not in self._number_of_list:
                classes = tuple(member_class for member_class, _ in class_counts)
                number = self._number_of_set.setdefault(classes, len(self._number_of_set))
                self._number_of_list[list_id] = number
            key = name, self._number_of_list[list_id]
            self._add(index, program.collectives(name), key, len(class_counts))

    def _add_messages(self, index: int) -> None:
        """Add the messages of a class, by group and peer."""
        graph, program = self._graph, self._graph.program_list[index]
        rank, ops = graph.classes.representatives[index], program.ops
        for name, calls in program.groups().items():
            messages = calls[IS_PAIR[ops["name"][calls]]]
            size = len(graph.groups[name].group(rank))
            # the rank is no member, or sends and receives nothing there
            if not messages.size or not size:
                continue
            class_of_offset: dict[int, int] = {}
            for (group, offset), peer_class in graph.classes.partners[index].items():
                if group == name:
                    class_of_offset[offset % size] = peer_class

            # a message is named by its sender, its receiver and the offset from one to the other
            offsets = ops["peer"][messages] % size
            operations = ops["name"][messages]
            for offset in np.unique(offsets).tolist():
                peer_class, is_offset = class_of_offset[offset], offsets == offset
                sends = messages[is_offset & (operations == CODE["send"])]
                if sends.size:
                    self._add(index, sends, (name, offset, (index, peer_class)), 2)
                receives = messages[is_offset & (operations == CODE["recv"])]
                if receives.size:
                    way = -offset % size
                    self._add(index, receives, (name, way, (peer_class, index)), 2)

    def _table(self, call_of_op: list[np.ndarray], sides: np.ndarray) -> MatchedCalls:
        """List the ops of every matched call, sends before receives.

        Args:
            call_of_op: Of every class the matched call of every op; -1: none.
            sides: Of every matched call how many classes meet.
        """
        calls: list[np.ndarray] = []
        classes: list[np.ndarray] = []
        ops: list[np.ndarray] = []
        is_receive: list[np.ndarray] = []
        for index, program in enumerate(self._graph.program_list):
            class_ops = np.flatnonzero(call_of_op[index] >= 0)
            calls.append(call_of_op[index][class_ops])
            classes.append(np.full(len(class_ops), index, dtype=np.int32))
            ops.append(class_ops)
            is_receive.append(program.ops["name"][class_ops] == CODE["recv"])

        # by call, then sends first, then by class
        all_calls, all_classes = np.concatenate(calls), np.concatenate(classes)
        order = np.lexsort((all_classes, np.concatenate(is_receive), all_calls))
        start = np.searchsorted(all_calls[order], np.arange(len(sides) + 1))
        all_ops = np.concatenate(ops)
        return MatchedCalls(tuple(call_of_op), start, all_classes[order], all_ops[order], sides)
