"""Programs: the ops of one rank's iteration in the order of issue; those of a whole world; their
file.

Programs are what capture writes and analysis reads.  ``ops.py`` says what an op is,
``program_text.py`` how programs look as text; ``save`` and ``load`` are their file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing

from megatron_prism.core import foreign
from megatron_prism.core.errors import ProgramError
from megatron_prism.core.files import whole_file
from megatron_prism.core.programs.ops import (
    ALLOCATION,
    CODE,
    CODED,
    IS_CALL,
    IS_COLLECTIVE,
    IS_PAIR,
    ITEM_SIZE,
    NAMES,
    OP,
    TEXTS,
    UNKNOWN,
    Op,
    limits,
)
from megatron_prism.core.world import World

WHAT_IF = "what-if"  # of a source: what is not as it ran; of a slice, no part of what the job is
WITHOUT = "without"  # of a source: options of the job that its capture did without
_PLACE = {name: place for place, name in enumerate(OP.names or ())}


def _blank_row() -> list[int]:
    """Return the row of an op that says nothing: codes of "", of the main stream, and -1."""
    row = [0] * len(_PLACE)
    for name, place in _PLACE.items():
        if name in UNKNOWN:
            row[place] = -1
    row[_PLACE["stream"]] = 1
    return row


_BLANK = _blank_row()

Splits = tuple[tuple[int, ...], tuple[int, ...]]  # to and from every member
Row = tuple[int, ...]  # fields of OP, or of ALLOCATION
Rows = tuple[list[Row], list[Row], list[int]]  # ops, allocations, the streams of these


class Builder:
    """Collects a program op by op.  Cheap enough to run inside a training step (~2 us an op).

    Attributes:
        history: As in Program.
        routes: As in Program.
        earlier: As in Program, by description.
    """

    def __init__(self, like: Builder | None = None) -> None:
        """Begin without ops.

        Args:
            like: Has texts and splits with which to begin: its rows then fit.
        """
        self._strings: dict[str, int] = {"": 0, "main": 1}
        self._splits: dict[Splits, int] = {}
        if like is not None:
            self._strings = {**like._strings}
            self._splits = {**like._splits}
        self._rows: list[Row] = []
        self._allocations: list[Row] = []
        self._streams: list[int] = []  # of each allocation
        self.history = self.routes = np.empty((0, 4), np.int64)
        self.earlier: Mapping[str, int] = {}

    def __len__(self) -> int:
        """Return how many ops there are."""
        return len(self._rows)

    def _text(self, text: str) -> int:
        """Return the number of a text."""
        return self._strings.setdefault(text, len(self._strings))

    def add(self, name: str, group: str = "", **values: Any) -> int:
        """Append one op.

        Args:
            name: Of the op.
            group: Description of its group.
            values: Further fields of Op, unchecked.

        Returns:
            The index of the op.
        """
        row = [*_BLANK]
        row[_PLACE["name"]] = CODE[name]
        row[_PLACE["group"]] = self._text(group)
        for column, value in values.items():
            # texts, codes and splits are kept as numbers of tables
            if column in TEXTS:
                value = self._text(value)
            elif column in CODED:
                value = CODED[column].index(value)
            elif column == "splits":
                value = -1 if value is None else self._splits.setdefault(value, len(self._splits))
            row[_PLACE[column]] = value
        self._rows.append(tuple(row))
        return len(self._rows) - 1

    def settle(self, index: int) -> None:
        """Take the handle of an op away, which was not asynchronous after all."""
        row = list(self._rows[index])
        row[_PLACE["handle"]] = -1
        self._rows[index] = tuple(row)

    def memory(self, storage: int, num_bytes: int, note: str = "", stream: int = 0) -> None:
        """Note that a storage came to be, or went, before the next op.

        Args:
            storage: Its number.
            num_bytes: Above 0 where it came to be, below 0 where it went.
            note: What it is.
            stream: On which stream; 0: the main one.
        """
        self._allocations.append((len(self._rows), storage, num_bytes, self._text(note)))
        self._streams.append(stream)

    def own(self, owners: Mapping[int, str]) -> None:
        """Note the owners of storages that came to be, at their sites.

        Args:
            owners: Storage -> ``kind:module``.  A storage whose note names an owner keeps it.
        """
        texts = list(self._strings)
        for position, (before, storage, num_bytes, note) in enumerate(self._allocations):
            owner = owners.get(storage)
            what, _, _ = texts[note].partition("@")
            # a storage that goes has no owner, and a note that names one knows better
            if owner is None or num_bytes <= 0 or ":" in what:
                continue
            _, separator, site = texts[note].rpartition("@")
            if separator and site:
                owner = f"{owner} @{site}"
            self._allocations[position] = (before, storage, num_bytes, self._text(owner))

    def position(self) -> tuple[int, int]:
        """Return how many ops and changes of memory there are."""
        return len(self._rows), len(self._allocations)

    def rows(self, first: int, behind: int) -> list[Row]:
        """Return the ops from ``first`` to before ``behind``."""
        return self._rows[first:behind]

    def since(self, rows: int, memory: int) -> Rows:
        """Return ops, changes of memory and their streams from a position on, for ``extend``."""
        return self._rows[rows:], self._allocations[memory:], self._streams[memory:]

    def extend(self, rows: list[Row], memory: list[Row], streams: list[int]) -> None:
        """Append what ``since`` gave, changed or not."""
        self._rows += rows
        self._allocations += memory
        self._streams += streams

    def build(self, rank: int, memory: bool = True) -> Program:
        """Return the program of ``rank``.

        Args:
            rank: Whose program it is.
            memory: Whether it has the allocations.  Without them the builder drops its own, too.
        """
        if not memory:
            self._allocations = []
            self._streams = []
            self.history = self.history[:0]
        earlier: list[tuple[int, int]] = []
        for desc, count in self.earlier.items():
            # a group that this iteration does not use has no number for its text
            if desc in self._strings:
                earlier.append((self._strings[desc], count))
        # all on the main stream: nothing is said of streams
        streams = self._streams if any(self._streams) else []
        return Program(
            rank,
            np.array(self._rows, dtype=OP),
            tuple(self._strings),
            tuple(self._splits),
            np.array(self._allocations, dtype=ALLOCATION),
            streams=np.array(streams, dtype=np.int16),
            history=self.history,
            routes=self.routes,
            earlier=np.array(earlier, np.int64).reshape(-1, 2),
        )


@dataclass(frozen=True)
class RepeatedEvents:
    """Changes of memory of one step that were written down again, not run again.

    Attributes:
        span: The first and behind the last of them, among the allocations of the iteration.
        source: The same of the step that ran; the two make as many storages, in one order.
        turns: Layer of a dispatcher -> its calls between the step that ran and this one.
    """

    span: tuple[int, int]
    source: tuple[int, int]
    turns: Mapping[int, int]


@dataclass(frozen=True, eq=False)
class Program:
    """The ops of one rank, which stands for every rank that runs the same.

    What a program *is* does not depend on samples, hosts and the like, and the text form leaves
    them out: all but rank, ops, strings, splits and allocations.

    Attributes:
        rank: The rank.
        ops: OP [n], in order of issue.
        strings: What the text columns of ``ops`` index; strings[0] is "".
        splits: (send rows, receive rows) of all-to-alls, by group rank.
        allocations: ALLOCATION [m], ascending in ``before``.
        samples: int64 [iterations, compute ops] ns: each iteration that was only timed, if any.
        hosts: int64 [iterations] ns that the host took for each of some iterations, calls and waits
            left out, if known.
        streams: int16 [allocations]: the stream that each was made on, 0 the main one; none if all
            were made there.
        history: int64 [events, 4] of all requests since the process began (``live_bytes.py``), or
            none.
        routed: int64 [allocations, 2]: the call of a dispatcher (-1: none) on whose tokens each
            depends, and how many bytes it grew by in a probe; none if nobody probed.
        routes: int64 [1 + calls, 4]: (copies of tokens that a rank sends, experts, experts of a
            token, source ranks); of every call (layer, turn, copies that this rank's experts get,
            more of them in the probe).
        earlier: int64 [groups, 2]: (its description in ``strings``, collectives issued in it since
            the process began, before this iteration); of "" the iterations before it; none if not
            known.
        earlier_peak: int64 [n, 3]: (note in ``strings``, bytes of a storage, how many such
            storages) of all that was alive when an earlier part of the process (an iteration
            without CUDA graphs, their capture) had more than this iteration ever has; none if no
            part had, or nobody looked.
        earlier_peak_op: OP [1]: the op during which that was, ``site`` being the line whose
            allocation reached it; none without an ``earlier_peak``.
    """

    rank: int
    ops: np.ndarray
    strings: tuple[str, ...] = ("", "main")
    splits: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    allocations: np.ndarray = field(default_factory=lambda: np.empty(0, ALLOCATION))
    samples: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.int64))
    hosts: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    streams: np.ndarray = field(default_factory=lambda: np.empty(0, np.int16))
    history: np.ndarray = field(default_factory=lambda: np.empty((0, 4), np.int64))
    routed: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int64))
    routes: np.ndarray = field(default_factory=lambda: np.empty((0, 4), np.int64))
    earlier: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int64))
    earlier_peak: np.ndarray = field(default_factory=lambda: np.empty((0, 3), np.int64))
    earlier_peak_op: np.ndarray = field(default_factory=lambda: np.empty(0, OP))

    @staticmethod
    def from_ops(rank: int, ops: Iterable[Op]) -> Program:
        """Make a program out of readable ops."""
        builder = Builder()
        for op in ops:
            builder.add(**vars(op))
        return builder.build(rank)

    def __len__(self) -> int:
        """Return how many ops there are."""
        return len(self.ops)

    def __getitem__(self, index: int) -> Op:
        """Return an op in readable form."""
        return self.readable(self.ops[index])

    def readable(self, row: np.void) -> Op:
        """Return the op that a row of type OP says, with the texts of this program."""
        values: dict[str, Any] = {}
        for name in OP.names or ():
            value = int(row[name])
            if name in TEXTS:
                values[name] = self.strings[value]
            elif name in CODED:
                values[name] = CODED[name][value]
            elif name == "splits":
                values[name] = None if value < 0 else self.splits[value]
            else:
                values[name] = value
        return Op(**values)

    def __iter__(self) -> Iterator[Op]:
        """Yield the ops in readable form."""
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        """Compare ops and allocations, whatever the order of the string tables."""
        if not isinstance(other, Program):
            return NotImplemented
        if len(self) != len(other) or self.rank != other.rank:
            return False
        # both with the texts numbered as in this program
        own_columns = self.columns(self.strings, self.splits)
        return own_columns == other.columns(self.strings, self.splits)

    __hash__ = None  # type: ignore[assignment] # programs are compared, never looked up

    def columns(self, strings: Sequence[str], splits: Sequence[Splits]) -> bytes:
        """Return ops and allocations as bytes, with texts and splits numbered in a given order.

        Args:
            strings: Numbers of texts; others follow in order.
            splits: Numbers of splits; others follow in order.
        """
        text_numbers = _renumbered(self.strings, strings)
        ops = self.ops.copy()
        for name in TEXTS:
            ops[name] = text_numbers[self.ops[name]]
        memory = self.allocations.copy()
        memory["note"] = text_numbers[self.allocations["note"]]

        # an op without splits has -1, which is the last of these
        split_numbers = np.append(_renumbered(self.splits, splits), -1)
        ops["splits"] = split_numbers[self.ops["splits"]]
        return ops.tobytes() + memory.tobytes()

    # -- views that analyses share ----------------------------------------------------------------
    @cached_property
    def bytes_in(self) -> np.ndarray:
        """Bytes of every op's input, int64 [n]; 0 where there is none."""
        return _num_bytes(self.ops["num_in"], self.ops["dtype"])

    @cached_property
    def bytes_out(self) -> np.ndarray:
        """Bytes of every op's output, int64 [n]; 0 where there is none."""
        return _num_bytes(self.ops["num_out"], self.ops["dtype"])

    @cached_property
    def num_bytes(self) -> np.ndarray:
        """Bytes of every op's message, as nccl-tests counts them, int64 [n]."""
        return np.asarray(np.maximum(self.bytes_in, self.bytes_out))

    @cached_property
    def partners(self) -> frozenset[tuple[str, int]]:
        """(group description, offset) of its sends and receives."""
        messages = self.ops[IS_PAIR[self.ops["name"]]]
        # pairs of numbers first: a program has thousands of messages to few partners
        codes = set(zip(messages["group"].tolist(), messages["peer"].tolist(), strict=True))
        return frozenset((self.strings[group], peer) for group, peer in codes)

    @cached_property
    def sequence(self) -> np.ndarray:
        """Place of every op in its FIFO, int64 [n]; -1 for ops that are no communication.

        Collectives count per group; sends, and apart from them receives, per group and peer.
        """
        names = self.ops["name"]
        is_message = IS_PAIR[names]

        # a number for each FIFO: three of a group, of messages one for each peer
        fifo = self.ops["group"].astype(np.int64) * 3
        # 0: collectives, 1: sends, 2: receives
        fifo_of_message = fifo + 1 + (names == CODE["recv"])
        peer = self.ops["peer"].astype(np.int64) + (1 << 31)
        fifo = np.where(is_message, fifo_of_message, fifo) * (1 << 33)
        fifo += np.where(is_message, peer, 0)

        # calls sorted by FIFO, in the order of issue
        calls = np.flatnonzero(is_message | IS_COLLECTIVE[names])
        order = calls[np.argsort(fifo[calls], kind="stable")]
        sequence = np.full(len(self), -1, dtype=np.int64)
        if order.size:
            fifo_in_order = fifo[order]
            is_first = np.append(True, fifo_in_order[1:] != fifo_in_order[:-1])
            starts = np.flatnonzero(is_first)
            # where the FIFO of each call starts in that order
            start_of_call = starts[np.cumsum(is_first) - 1]
            sequence[order] = np.arange(order.size) - start_of_call
        return sequence

    @cached_property
    def derived(self) -> dict[object, Any]:
        """What analyses derive from it and keep, each under a key of its own."""
        return {}

    @cached_property
    def knows_host(self) -> bool:
        """Whether any segment says how long the host takes to issue it."""
        return bool((self.ops["host"] >= 0).any())

    @cached_property
    def _groups(self) -> dict[str, np.ndarray]:
        is_call = IS_CALL[self.ops["name"]]
        calls_of_group: dict[str, np.ndarray] = {}
        for code in np.unique(self.ops["group"][is_call]):
            is_of_group = is_call & (self.ops["group"] == code)
            calls_of_group[self.strings[code]] = np.flatnonzero(is_of_group)
        return calls_of_group

    def groups(self) -> Mapping[str, np.ndarray]:
        """Return indices of collectives and messages, ascending, by description of the group."""
        return self._groups

    def collectives(self, group: str) -> np.ndarray:
        """Return indices of the collectives of one group, ascending; none without calls there."""
        calls = self._groups.get(group, np.empty(0, dtype=np.int64))
        return np.asarray(calls[IS_COLLECTIVE[self.ops["name"][calls]]])

    def calls_before(self) -> dict[str, int]:
        """Return collectives before this iteration, by description; of "" the iterations."""
        return {self.strings[text]: count for text, count in self.earlier.tolist()}

    def live_bytes(self) -> np.ndarray:
        """Return live bytes after every allocation event, int64 [m]."""
        return np.cumsum(self.allocations["bytes"])

    def peak_bytes(self) -> int:
        """Return the most that was alive at once, in this iteration or before it.

        It is 0 if that was not recorded.
        """
        # a part of the process before this iteration may have had more
        sizes = self.earlier_peak[:, 1]
        counts = self.earlier_peak[:, 2]
        earlier_bytes = int((sizes * counts).sum())
        return max(int(self.live_bytes().max(initial=0)), earlier_bytes)

    def counts(self) -> Mapping[str, int]:
        """Return how many ops of each name there are."""
        codes, counts = np.unique(self.ops["name"], return_counts=True)
        return {NAMES[code]: int(count) for code, count in zip(codes, counts, strict=True)}


def _num_bytes(elements: np.ndarray, dtypes: np.ndarray) -> np.ndarray:
    """Return bytes of tensors, int64 [n]; 0 where there is none (below 0 elements)."""
    num_bytes: np.ndarray = np.maximum(elements, 0) * ITEM_SIZE[dtypes]
    return num_bytes


def _renumbered(values: Sequence[Hashable], order: Iterable[Hashable]) -> np.ndarray:
    """Return the place of each of ``values`` in ``order``; others follow: int64 [n]."""
    places = {value: place for place, value in enumerate(order)}
    numbers = [places.setdefault(value, len(places)) for value in values]
    return np.array(numbers, dtype=np.int64)


FORMAT = 4  # of the file; raised when its content changes meaning
SUFFIX = ".prism"
FIX = "a file that prism capture wrote, or a text that starts with prism-program"
Shape = tuple[int, ...]
_COLUMNS: dict[str, tuple[np.typing.DTypeLike, Shape]] = {  # type and shape; -1 is any length
    "ops": (OP, (-1,)),
    "allocations": (ALLOCATION, (-1,)),
    "samples": (np.int64, (-1, -1)),
    "hosts": (np.int64, (-1,)),
    "streams": (np.int16, (-1,)),
    "history": (np.int64, (-1, 4)),
    "routed": (np.int64, (-1, 2)),
    "routes": (np.int64, (-1, 4)),
    "earlier": (np.int64, (-1, 2)),
    "earlier_peak": (np.int64, (-1, 3)),
    "earlier_peak_op": (OP, (-1,)),
}
_ALWAYS = ("ops", "allocations")  # the others are written where there is anything
_MEMBERS = re.compile(rf"program_of|(?:{'|'.join(_COLUMNS)})\d{{1,7}}")
_Ranks = tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)], ...]
_Counts = tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 59)], ...]

Groups = Mapping[str, tuple[tuple[int, ...], ...]]  # description -> groups of global ranks


@dataclass(frozen=True, eq=False)
class Programs:
    """The programs of a world.

    Attributes:
        world: Sizes of the job; Megatron's groups follow from them.
        programs: One per kind of rank.
        program_of: int32 [world.size], index into ``programs`` for every rank.
        groups: Description -> groups (global ranks in group order), for groups that do not follow
            from the sizes; they replace Megatron's of the same name.
        source: Where it all comes from: versions, tier, arguments; plain text.
        path: What they were read from, for messages; "" if nothing was.
        partial: Ranks may have no program (-1); what needs no other rank, as memory, can be asked.
    """

    world: World
    programs: tuple[Program, ...]
    program_of: np.ndarray
    groups: Groups = field(default_factory=dict)
    source: Mapping[str, str] = field(default_factory=dict)
    path: str = ""
    partial: bool = False

    @property
    def what_if(self) -> str | None:
        """What is not as captured, in words; None: nothing."""
        return self.source.get(WHAT_IF)

    @property
    def without(self) -> str | None:
        """Options of the job that its capture did without, in words; None: none."""
        return self.source.get(WITHOUT)

    def __repr__(self) -> str:
        """Say sizes alone."""
        ops = sum(map(len, self.programs))
        return f"<{len(self.programs)} programs of {self.world}: {ops:,} ops>"

    def __post_init__(self) -> None:
        """Check that every rank has a program."""
        program_of = np.ascontiguousarray(self.program_of, dtype=np.int32)
        object.__setattr__(self, "program_of", program_of)
        if program_of.shape != (self.world.size,):
            text = f"{self.world.size} ranks need a program each, but {program_of.size} are"
            raise ProgramError(f"{text} assigned", fix="say which ranks run each program")
        # a partial world has ranks without a program
        lowest = -1 if self.partial else 0
        is_missing = (program_of < lowest) | (program_of >= len(self.programs))
        missing_ranks = np.flatnonzero(is_missing)
        if missing_ranks.size:
            text = f"rank {missing_ranks[0]} and {missing_ranks.size - 1} others have no program"
            fix = "capture the missing slices, or name those ranks in a program"
            raise ProgramError(text, fix=fix)

    @staticmethod
    def one_per_rank(programs: Sequence[Program], world: World | None = None) -> Programs:
        """Make a world in which every rank has a program of its own, as in a real run's dumps."""
        ordered = tuple(sorted(programs, key=lambda program: program.rank))
        program_of = np.arange(len(ordered), dtype=np.int32)
        return Programs(world or World(len(ordered)), ordered, program_of)

    def __eq__(self, other: object) -> bool:
        """Compare all but the path."""
        if not isinstance(other, Programs):
            return NotImplemented
        return (
            self.world == other.world
            and self.programs == other.programs
            and np.array_equal(self.program_of, other.program_of)
            and dict(self.groups) == dict(other.groups)
            and dict(self.source) == dict(other.source)
        )

    __hash__ = None  # type: ignore[assignment]

    def of(self, rank: int) -> Program:
        """Return the program that ``rank`` runs.

        Raises:
            ProgramError: It has none (``absent``).
        """
        index = int(self.program_of[self.world.check_rank(rank)])
        if index < 0:
            fix = f"capture it into the same folder: --prism-ranks {rank}"
            raise ProgramError(f"the stage of rank {rank} has no slice", fix=fix)
        return self.programs[index]

    @property
    def num_microbatches(self) -> int:
        """Microbatches of an iteration; 0 if no op names one."""
        last_microbatch = -1
        for program in self.programs:
            last_of_program = int(program.ops["microbatch"].max(initial=-1))
            last_microbatch = max(last_microbatch, last_of_program)
        return last_microbatch + 1

    def ranks_of(self, index: int) -> np.ndarray:
        """Return the ranks that run program ``index``, ascending, int64 [n]."""
        return np.flatnonzero(self.program_of == index)

    @property
    def absent(self) -> list[int]:
        """The ranks without a program, of which ``partial`` ones may have some."""
        return [int(rank) for rank in np.flatnonzero(self.program_of < 0)]


class _ProgramHead(msgspec.Struct):
    rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    strings: tuple[str, ...]
    splits: tuple[tuple[_Counts, _Counts], ...]


class _Head(msgspec.Struct):
    """What a file says in JSON, beside its arrays."""

    format: int
    world: World
    groups: dict[str, tuple[_Ranks, ...]]
    source: dict[str, str]
    programs: list[_ProgramHead]


_SMALL_BYTES = 1 << 24  # packing costs little below: loading must stay under half a second


def save(programs: Programs, path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Write programs to one file, whole or not at all.

    Args:
        programs: Of a world.
        path: Of the file.
        force: Replace a file that is there.

    Raises:
        UsageError: The place is taken.
    """
    path = Path(path)
    arrays: dict[str, np.ndarray] = {"program_of": programs.program_of}
    heads: list[_ProgramHead] = []
    for number, program in enumerate(programs.programs):
        heads.append(_ProgramHead(program.rank, program.strings, program.splits))
        for name in _COLUMNS:
            column = getattr(program, name)
            # columns that a program has nothing in are left out
            if column.size or name in _ALWAYS:
                arrays[f"{name}{number}"] = column
    groups, source = dict(programs.groups), dict(programs.source)
    head = _Head(FORMAT, programs.world, groups, source, heads)
    arrays["head"] = np.frombuffer(msgspec.json.encode(head), dtype=np.uint8)

    total_bytes = sum(array.nbytes for array in arrays.values())
    # compression of large files takes longer than it saves
    write = np.savez_compressed if total_bytes < _SMALL_BYTES else np.savez
    with whole_file(path, force=force) as file:
        write(file, **arrays)  # type: ignore[arg-type] # no array is called allow_pickle
    return path


def load(path: str | os.PathLike[str]) -> Programs:
    """Read what ``save`` wrote.

    Raises:
        ProgramError: The file is foreign, truncated or of a newer release.
    """
    path = Path(path)
    if path.is_dir():
        raise ProgramError(f"{path} is a folder", fix=f"name a file in it, *{SUFFIX}")
    reading = foreign.reading(
        path, "a file of programs", FIX, absent="prism capture writes them", error=ProgramError
    )
    with reading:
        head, arrays = foreign.read_arrays(path, dict[str, Any], _MEMBERS)
        # columns may have other meanings in another format
        version = head.get("format")
        if version != FORMAT:
            text = f"format {version}" if isinstance(version, int) else "no format version"
            fix = "write it again with this release, or read it with the one that wrote it"
            raise ProgramError(f"{path} has {text}; this release reads {FORMAT}", fix=fix)
        return _assemble(foreign.shaped(head, _Head), arrays)


def _assemble(head: _Head, arrays: dict[str, np.ndarray]) -> Programs:
    """Make programs of what a file has; ValueError and KeyError for what is damaged."""
    _check_array("program_of", arrays["program_of"], np.int32, (-1,))
    programs: list[Program] = []
    for number, program_head in enumerate(head.programs):
        programs.append(_checked_program(number, program_head, arrays))
    if any(program.rank >= head.world.size for program in programs):
        raise ValueError(f"a program is of a rank outside a world of {head.world.size}")
    program_of = arrays["program_of"]
    return Programs(head.world, tuple(programs), program_of, head.groups, head.source)


def _check_array(what: str, array: np.ndarray, dtype: np.typing.DTypeLike, shape: Shape) -> None:
    """Raise ValueError unless an array has this type and shape."""
    fits = len(shape) == array.ndim
    if fits:
        fits = all(side in (-1, size) for side, size in zip(shape, array.shape, strict=True))
    if array.dtype != dtype or not fits:
        raise ValueError(f"{what} are {array.dtype} {array.shape}")


def _checked_program(number: int, head: _ProgramHead, arrays: dict[str, np.ndarray]) -> Program:
    """Make a program of what a file has; ValueError and KeyError for what is damaged."""
    columns: dict[str, np.ndarray] = {}
    for name in _COLUMNS:
        key = f"{name}{number}"
        if name in _ALWAYS or key in arrays:
            columns[name] = arrays[key]
    for name, column in columns.items():
        dtype, shape = _COLUMNS[name]
        _check_array(f"{name} of program {number}", column, dtype, shape)
    program = Program(head.rank, strings=head.strings, splits=head.splits, **columns)

    # columns with a place for each segment, or for each event
    segments = int((program.ops["name"] == CODE["compute"]).sum())
    events = len(program.allocations)
    lengths = {
        "samples": (program.samples.shape[1], segments),
        "streams": (len(program.streams), events),
        "routed": (len(program.routed), events),
    }
    for name, (length, expected) in lengths.items():
        if name in columns and length != expected:
            found_shape = columns[name].shape
            raise ValueError(f"{name} of program {number} are {found_shape}, not of {expected}")
    if program.hosts.size and not program.samples.size:
        raise ValueError(f"program {number} has times of the host, and none of its segments")
    error = _impossible_value(program)
    if error:
        raise ValueError(f"program {number} has {error}")
    return program


_Bounds = tuple[int, int]  # lowest and highest value


@dataclass(frozen=True)
class _BoundedColumn:
    """Values of a program and their bounds."""

    name: str
    values: np.ndarray
    bounds: _Bounds

    def violation(self) -> str:
        """Say which value is out of bounds; empty if none is."""
        low, high = self.bounds
        if not self.values.size:
            return ""
        least, greatest = self.values.min(), self.values.max()
        if low <= least and greatest <= high:
            return ""
        value = least if least < low else greatest
        return f"{self.name} {value} outside {low} to {high}"


def _impossible_value(program: Program) -> str:
    """Say the first value that a program cannot have; the text form has the same bounds."""
    for column in (*_columns_of_ops(program), *_other_columns(program)):
        violation = column.violation()
        if violation:
            return violation
    if len(program.earlier_peak_op) != min(1, len(program.earlier_peak)):
        return "an earlier peak without its op, or with several"
    if (np.diff(program.allocations["before"]) < 0).any():
        return "allocations that are not in the order of its ops"
    return ""


def _bounds_of_fields(program: Program) -> dict[str, _Bounds]:
    """Return the bounds of each field of an op."""
    bounds: dict[str, _Bounds] = {}
    for name in OP.names or ():
        if name in TEXTS:
            bounds[name] = (0, len(program.strings) - 1)
        elif name in CODED:
            bounds[name] = (0, len(CODED[name]) - 1)
        elif name == "splits":
            bounds[name] = (-1, len(program.splits) - 1)
        else:
            bounds[name] = limits(name)
    return bounds


def _columns_of_ops(program: Program) -> list[_BoundedColumn]:
    columns: list[_BoundedColumn] = []
    for name, bounds in _bounds_of_fields(program).items():
        columns.append(_BoundedColumn(name, program.ops[name], bounds))
    return columns


def _other_columns(program: Program) -> list[_BoundedColumn]:
    """Return what is bounded beside the ops."""
    texts = (0, len(program.strings) - 1)
    _, most_bytes = limits("bytes")
    _, most_host_ns = limits("host")
    memory = program.allocations
    routes = program.routes

    # of a program that was not probed, routes say nothing of more copies
    probed_routes = routes if program.routed.size else routes[:0]
    last_call = max(-1, len(routes) - 2)
    columns = [
        _BoundedColumn("note", memory["note"], texts),
        _BoundedColumn("bytes", memory["bytes"], (-most_bytes, most_bytes)),
        _BoundedColumn("before", memory["before"], (0, len(program))),
        _BoundedColumn("samples", program.samples, limits("ns")),
        _BoundedColumn("hosts", program.hosts, (0, most_host_ns)),
        _BoundedColumn("routed", program.routed[:, 0], (-1, last_call)),
        _BoundedColumn("grown", program.routed[:, 1], (-most_bytes, most_bytes)),
        _BoundedColumn("routes", routes, (0, most_bytes)),
        _BoundedColumn("more", probed_routes[1:, 3], (1, most_bytes)),
        _BoundedColumn("routing", probed_routes[:1], (1, most_bytes)),
        _BoundedColumn("earlier_peak", program.earlier_peak[:, 0], texts),
        _BoundedColumn("earlier_peak", program.earlier_peak[:, 1:], (0, most_bytes)),
    ]
    for name, bounds in _bounds_of_fields(program).items():
        values = program.earlier_peak_op[name]
        columns.append(_BoundedColumn(f"{name} of earlier_peak", values, bounds))
    return columns
