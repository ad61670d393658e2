"""Programs: the ops of one rank's iteration in the order of issue; those of a whole world; their
file.

Programs are what capture writes and analysis reads.  ``ops.py`` says what an op is,
``program_text.py`` how programs look as text; ``save`` and ``load`` are their file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from megatron_prism.core.ops import (
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

_PLACE = {name: place for place, name in enumerate(OP.names or ())}
# the row of an op that says nothing: codes of "", of the main stream, and -1
_BLANK = [-1 if name in UNKNOWN else 0 for name in _PLACE]
_BLANK[_PLACE["stream"]] = 1

Splits = tuple[tuple[int, ...], tuple[int, ...]]  # to and from every member


# fields of OP, of ALLOCATION, and the stream of each of these
Rows = tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[int]]


class Builder:
    """Collects a program op by op.  Cheap enough to run inside a training step (~2 us an op)."""

    def __init__(self, like: Builder | None = None) -> None:
        """Empty; with the texts and splits of ``like``, whose rows then fit."""
        self._strings: dict[str, int] = {"": 0, "main": 1} if like is None else {**like._strings}
        self._splits: dict[Splits, int] = {} if like is None else {**like._splits}
        self._rows: list[tuple[int, ...]] = []
        self._allocations: list[tuple[int, ...]] = []
        self._streams: list[int] = []  # of each allocation
        self.history = self.routes = np.empty((0, 4), np.int64)
        self.earlier: Mapping[str, int] = {}  # as in Program, by description

    def __len__(self) -> int:
        return len(self._rows)

    def _text(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings))

    def add(self, name: str, group: str = "", **values: Any) -> int:
        """Append one op, ``values`` being fields of Op (unchecked); returns its index."""
        row = [*_BLANK]
        row[_PLACE["name"]] = CODE[name]
        for field_, value in (("group", group), *values.items()):
            if field_ in TEXTS:
                value = self._text(value)
            elif field_ in CODED:
                value = CODED[field_].index(value)
            elif field_ == "splits":
                value = -1 if value is None else self._splits.setdefault(value, len(self._splits))
            row[_PLACE[field_]] = value
        self._rows.append(tuple(row))
        return len(self._rows) - 1

    def settle(self, index: int) -> None:
        """Op ``index`` was not asynchronous after all: it has no handle."""
        row, place = self._rows[index], _PLACE["handle"]
        self._rows[index] = (*row[:place], -1, *row[place + 1 :])

    def memory(self, storage: int, num_bytes: int, note: str = "", stream: int = 0) -> None:
        """Storage ``storage`` came to be (bytes > 0) or went (bytes < 0) before the next op, on
        stream ``stream`` (0: the main one); it is what ``note`` says.
        """
        self._allocations.append((len(self._rows), storage, num_bytes, self._text(note)))
        self._streams.append(stream)

    def own(self, owners: Mapping[int, str]) -> None:
        """Storages that came to be are whose ``owners`` says (``kind:module``), at their site."""
        texts = list(self._strings)
        for at, (before, storage, num_bytes, note) in enumerate(self._allocations):
            owner = owners.get(storage)
            if owner is not None and num_bytes > 0 and ":" not in texts[note].partition("@")[0]:
                site = texts[note].rpartition("@")[2] if "@" in texts[note] else ""
                named = self._text(f"{owner} @{site}" if site else owner)
                self._allocations[at] = (before, storage, num_bytes, named)

    def position(self) -> tuple[int, int]:
        """How many ops and changes of memory there are."""
        return len(self._rows), len(self._allocations)

    def rows(self, first: int, behind: int) -> list[tuple[int, ...]]:
        """The ops from ``first`` to before ``behind``."""
        return self._rows[first:behind]

    def since(self, rows: int, memory: int) -> Rows:
        """Ops, changes of memory and their streams from a position on, as ``extend`` takes them."""
        return self._rows[rows:], self._allocations[memory:], self._streams[memory:]

    def extend(
        self, rows: list[tuple[int, ...]], memory: list[tuple[int, ...]], streams: list[int]
    ) -> None:
        """Append what ``since`` gave, changed or not."""
        self._rows += rows
        self._allocations += memory
        self._streams += streams

    def build(self, rank: int, memory: bool = True) -> Program:
        """The program of ``rank``; without ``memory`` it says nothing of that."""
        if not memory:
            self._allocations, self._streams = [], []
            self.history = self.history[:0]
        earlier = [(self._strings[d], n) for d, n in self.earlier.items() if d in self._strings]
        return Program(
            rank,
            np.array(self._rows, dtype=OP),
            tuple(self._strings),
            tuple(self._splits),
            np.array(self._allocations, dtype=ALLOCATION),
            streams=np.array(self._streams if any(self._streams) else [], dtype=np.int16),
            history=self.history,
            routes=self.routes,
            earlier=np.array(earlier, np.int64).reshape(-1, 2),
        )


@dataclass(frozen=True, eq=False)
class Program:
    """The ops of one rank, ``rank``, which stands for every rank that runs the same.

    ops         : OP [n], in order of issue
    strings     : what the text columns of ``ops`` index; strings[0] is ""
    splits      : (send rows, receive rows) of all-to-alls, by group rank
    allocations : ALLOCATION [m], ascending in ``before``
    samples     : int64 [iterations, compute ops] ns: each iteration that was only timed, if any;
                  what a program *is* does not depend on them, and the text form leaves them out
    hosts       : int64 [iterations] ns that the host took for each of some iterations, calls and
                  waits left out, if known
    streams     : int16 [allocations]: the stream that each was made on, 0 the main one; none if all
                  were made there; the text form leaves them out, too
    history     : int64 [events, 4] of all requests since the process began (``live_bytes.py``), or
                  none; the text form leaves it out
    routed      : int64 [allocations, 2]: the call of a dispatcher (-1: none) on whose tokens each
                  depends, and how many bytes it grew by in a probe; none if nobody probed
    routes      : int64 [1 + calls, 4]: (copies of tokens that a rank sends, experts, experts of a
                  token, source ranks); of every call (layer, turn, copies that this rank's experts
                  get, more of them in the probe); the text form leaves both out
    earlier     : int64 [groups, 2]: (its description in ``strings``, collectives issued in it since
                  the process began, before this iteration); of "" the iterations before it; none
                  if not known, as in the text form
    earlier_peak : int64 [n, 3]: (note in ``strings``, bytes of a storage, how many such storages)
                  of all that was alive when an earlier part of the process (an iteration without
                  CUDA graphs, their capture) had more than this iteration ever has; none if no
                  part had, or nobody looked, as in the text form
    earlier_peak_op : OP [1]: the op during which that was, ``site`` being the line whose
                  allocation reached it; none without an ``earlier_peak``
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
        """A program out of readable ops."""
        builder = Builder()
        for op in ops:
            builder.add(**vars(op))
        return builder.build(rank)

    def __len__(self) -> int:
        return len(self.ops)

    def __getitem__(self, index: int) -> Op:
        return self.readable(self.ops[index])

    def readable(self, row: np.void) -> Op:
        """The op that a row of type OP says, with the texts of this program."""
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
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        """The same ops and allocations, whatever the order of the string tables."""
        if not isinstance(other, Program) or len(self) != len(other):
            return NotImplemented if not isinstance(other, Program) else False
        return self.rank == other.rank and self.columns(self.strings, self.splits) == other.columns(
            self.strings, self.splits
        )

    __hash__ = None  # type: ignore[assignment] # programs are compared, never looked up

    def columns(self, strings: Sequence[str], splits: Sequence[Splits]) -> bytes:
        """Ops and allocations as bytes, texts numbered by ``strings`` (others follow in order)."""
        ops, memory = self.ops.copy(), self.allocations.copy()
        known = {text: i for i, text in enumerate(strings)}
        numbers = np.array([known.setdefault(t, len(known)) for t in self.strings], dtype=np.int64)
        for name in TEXTS:
            ops[name] = numbers[self.ops[name]]
        memory["note"] = numbers[self.allocations["note"]]
        order = {value: i for i, value in enumerate(splits)}
        numbers = np.array([order.setdefault(s, len(order)) for s in self.splits] + [-1])
        ops["splits"] = numbers[self.ops["splits"]]
        return ops.tobytes() + memory.tobytes()

    # -- views that analyses share ----------------------------------------------------------------
    @cached_property
    def bytes_in(self) -> np.ndarray:
        """Bytes of every op's input, int64 [n]; 0 where there is none."""
        found: np.ndarray = np.maximum(self.ops["num_in"], 0) * ITEM_SIZE[self.ops["dtype"]]
        return found

    @cached_property
    def bytes_out(self) -> np.ndarray:
        """Bytes of every op's output, int64 [n]; 0 where there is none."""
        found: np.ndarray = np.maximum(self.ops["num_out"], 0) * ITEM_SIZE[self.ops["dtype"]]
        return found

    @cached_property
    def num_bytes(self) -> np.ndarray:
        """Bytes of every op's message, as nccl-tests counts them, int64 [n]."""
        return np.asarray(np.maximum(self.bytes_in, self.bytes_out))

    @cached_property
    def partners(self) -> frozenset[tuple[str, int]]:
        """(group description, offset) of its sends and receives."""
        pairs = self.ops[IS_PAIR[self.ops["name"]]]
        kinds = set(zip(pairs["group"].tolist(), pairs["peer"].tolist(), strict=True))
        return frozenset((self.strings[group], peer) for group, peer in kinds)

    @cached_property
    def sequence(self) -> np.ndarray:
        """Place of every op in its FIFO, int64 [n]; -1 for ops that are no communication.

        Collectives count per group; sends, and apart from them receives, per group and peer.
        """
        found = np.full(len(self), -1, dtype=np.int64)
        names = self.ops["name"]
        pair = IS_PAIR[names]
        key = self.ops["group"].astype(np.int64) * 3
        key = np.where(pair, key + 1 + (names == CODE["recv"]), key)
        key = key * (1 << 33) + np.where(pair, self.ops["peer"].astype(np.int64) + (1 << 31), 0)
        talk = np.flatnonzero(pair | IS_COLLECTIVE[names])
        order = talk[np.argsort(key[talk], kind="stable")]
        if order.size:
            new = np.concatenate(([True], key[order][1:] != key[order][:-1]))
            starts = np.flatnonzero(new)
            found[order] = np.arange(order.size) - starts[np.cumsum(new) - 1]
        return found

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
        talk = IS_CALL[self.ops["name"]]
        return {
            self.strings[code]: np.flatnonzero(talk & (self.ops["group"] == code))
            for code in np.unique(self.ops["group"][talk])
        }

    def groups(self) -> Mapping[str, np.ndarray]:
        """Group description -> indices of its collectives and p2p ops, ascending."""
        return self._groups

    def collectives(self, group: str) -> np.ndarray:
        """Indices of the collectives of one group, ascending; none if it makes no calls there."""
        found = self._groups.get(group, np.empty(0, dtype=np.int64))
        return np.asarray(found[IS_COLLECTIVE[self.ops["name"][found]]])

    def calls_before(self) -> dict[str, int]:
        """Group's description -> its collectives before this iteration; "" -> iterations before."""
        return {self.strings[i]: n for i, n in self.earlier.tolist()}

    def live_bytes(self) -> np.ndarray:
        """Live bytes after every allocation event, int64 [m]."""
        return np.cumsum(self.allocations["bytes"])

    def peak_bytes(self) -> int:
        """The most that was alive at once, in this iteration or before it; 0 if that was not
        recorded.
        """
        before = int((self.earlier_peak[:, 1] * self.earlier_peak[:, 2]).sum())
        return max(int(self.live_bytes().max(initial=0)), before)

    def counts(self) -> Mapping[str, int]:
        """How many ops of each name there are."""
        codes, counts = np.unique(self.ops["name"], return_counts=True)
        return {NAMES[code]: int(count) for code, count in zip(codes, counts, strict=True)}


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

    world      : sizes of the job; Megatron's groups follow from them
    programs   : one per kind of rank
    program_of : int32 [world.size], index into ``programs`` for every rank
    partial    : ranks may have no program (-1); what needs no other rank, as memory, can be asked
    groups     : description -> tuple of groups (global ranks in group order), for groups that do
                 not follow from the sizes; they replace Megatron's of the same name
    source     : where it all comes from: versions, tier, arguments; plain text
    path       : what they were read from, for messages; "" if nothing was
    """

    world: World
    programs: tuple[Program, ...]
    program_of: np.ndarray
    groups: Groups = field(default_factory=dict)
    source: Mapping[str, str] = field(default_factory=dict)
    path: str = ""
    partial: bool = False

    def __repr__(self) -> str:
        ops = sum(map(len, self.programs))
        return f"<{len(self.programs)} programs of {self.world}: {ops:,} ops>"

    def __post_init__(self) -> None:
        of = np.ascontiguousarray(self.program_of, dtype=np.int32)
        object.__setattr__(self, "program_of", of)
        if of.shape != (self.world.size,):
            what = f"{self.world.size} ranks need a program each, but {of.size} are assigned"
            raise ProgramError(what, fix="say which ranks run each program")
        missing = np.flatnonzero((of < -self.partial) | (of >= len(self.programs)))
        if missing.size:
            what = f"rank {missing[0]} and {missing.size - 1} others have no program"
            fix = "capture the missing slices, or name those ranks in a program"
            raise ProgramError(what, fix=fix)

    @staticmethod
    def one_per_rank(programs: Sequence[Program], world: World | None = None) -> Programs:
        """A world in which every rank has a program of its own, as in a real run's dumps."""
        ordered = tuple(sorted(programs, key=lambda program: program.rank))
        own = np.arange(len(ordered), dtype=np.int32)
        return Programs(world or World(len(ordered)), ordered, own)

    def __eq__(self, other: object) -> bool:
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
        """The program that ``rank`` runs.  ProgramError if it has none (``absent``)."""
        index = int(self.program_of[self.world.check_rank(rank)])
        if index < 0:
            fix = f"capture it into the same folder: --prism-ranks {rank}"
            raise ProgramError(f"the stage of rank {rank} has no slice", fix=fix)
        return self.programs[index]

    def ranks_of(self, index: int) -> np.ndarray:
        """The ranks that run program ``index``, ascending, int64 [n]."""
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


def save(programs: Programs, path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Write ``programs`` to one file, whole or not at all; UsageError if the place is taken."""
    path = Path(path)
    arrays: dict[str, np.ndarray] = {"program_of": programs.program_of}
    for i, program in enumerate(programs.programs):
        columns = {name: getattr(program, name) for name in _COLUMNS}
        arrays |= {f"{k}{i}": v for k, v in columns.items() if v.size or k in _ALWAYS}
    heads = [_ProgramHead(one.rank, one.strings, one.splits) for one in programs.programs]
    groups, source = dict(programs.groups), dict(programs.source)
    head = msgspec.json.encode(_Head(FORMAT, programs.world, groups, source, heads))
    arrays["head"] = np.frombuffer(head, dtype=np.uint8)
    # packing costs little where there is little: loading must stay under half a second
    small = sum(array.nbytes for array in arrays.values()) < 1 << 24
    with whole_file(path, force=force) as file:
        write = np.savez_compressed if small else np.savez
        write(file, **arrays)  # type: ignore[arg-type] # no array is called allow_pickle
    return path


def load(path: str | os.PathLike[str]) -> Programs:
    """Read what ``save`` wrote.  ProgramError for foreign, truncated or newer files."""
    path = Path(path)
    if path.is_dir():
        raise ProgramError(f"{path} is a folder", fix=f"name a file in it, *{SUFFIX}")
    what = foreign.reading(
        path, "a file of programs", FIX, absent="prism capture writes them", error=ProgramError
    )
    with what:
        head, arrays = foreign.read_arrays(path, dict[str, Any], _MEMBERS)
        version = head.get("format")
        if version != FORMAT:
            which = f"format {version}" if isinstance(version, int) else "no format version"
            fix = "write it again with this release, or read it with the one that wrote it"
            raise ProgramError(f"{path} has {which}; this release reads {FORMAT}", fix=fix)
        return _assemble(foreign.shaped(head, _Head), arrays)


def _assemble(head: _Head, arrays: dict[str, np.ndarray]) -> Programs:
    """ValueError and KeyError for what is damaged."""
    _check_array("program_of", arrays["program_of"], np.int32, (-1,))
    programs = tuple(_checked(i, one, arrays) for i, one in enumerate(head.programs))
    if any(one.rank >= head.world.size for one in programs):
        raise ValueError(f"a program is of a rank outside a world of {head.world.size}")
    return Programs(head.world, programs, arrays["program_of"], head.groups, head.source)


def _check_array(what: str, array: np.ndarray, dtype: np.typing.DTypeLike, shape: Shape) -> None:
    """ValueError unless ``array`` has this type and shape."""
    fits = len(shape) == array.ndim and all(
        side in (-1, size) for side, size in zip(shape, array.shape, strict=True)
    )
    if array.dtype != dtype or not fits:
        raise ValueError(f"{what} are {array.dtype} {array.shape}")


def _checked(i: int, head: _ProgramHead, arrays: dict[str, np.ndarray]) -> Program:
    """Program ``i`` of a file.  ValueError and KeyError for what is damaged."""
    columns = {name: arrays[f"{name}{i}"] for name in _COLUMNS
               if name in _ALWAYS or f"{name}{i}" in arrays}  # fmt: skip
    for name, array in columns.items():
        _check_array(f"{name} of program {i}", array, *_COLUMNS[name])
    program = Program(head.rank, strings=head.strings, splits=head.splits, **columns)
    segments = int((program.ops["name"] == CODE["compute"]).sum())
    events = len(program.allocations)
    for name, rows in (("samples", segments), ("streams", events), ("routed", events)):
        if name in columns and columns[name].shape[name == "samples"] != rows:
            raise ValueError(f"{name} of program {i} are {columns[name].shape}, not of {rows}")
    if program.hosts.size and not program.samples.size:
        raise ValueError(f"program {i} has times of the host, and none of its segments")
    if wrong := _wrong(program):
        raise ValueError(f"program {i} has {wrong}")
    return program


def _wrong(program: Program) -> str:
    """The first value that a program cannot have, in words; the text form has the same bounds."""
    texts, most = (0, len(program.strings) - 1), limits("bytes")[1]
    bounds = dict.fromkeys(TEXTS, texts) | {"splits": (-1, len(program.splits) - 1)}
    bounds |= {name: (0, len(known) - 1) for name, known in CODED.items()}
    memory, routed, routes = program.allocations, program.routed, program.routes
    columns = [
        *((name, program.ops[name], bounds.get(name) or limits(name)) for name in OP.names or ()),
        ("note", memory["note"], texts),
        ("bytes", memory["bytes"], (-most, most)),
        ("before", memory["before"], (0, len(program))),
        ("samples", program.samples, limits("ns")),
        ("hosts", program.hosts, (0, limits("host")[1])),
        ("routed", routed[:, 0], (-1, max(-1, len(routes) - 2))),
        ("grown", routed[:, 1], (-most, most)),
        ("routes", routes, (0, most)),
        ("more", routes[1:, 3] if routed.size else routes[:0], (1, most)),
        ("routing", routes[:1] if routed.size else routes[:0], (1, most)),
        ("earlier_peak", program.earlier_peak[:, 0], texts),
        ("earlier_peak", program.earlier_peak[:, 1:], (0, most)),
    ]
    for name in OP.names or ():
        bound = bounds.get(name) or limits(name)
        columns.append((f"{name} of earlier_peak", program.earlier_peak_op[name], bound))
    for name, values, (low, high) in columns:
        if values.size and not (low <= values.min() and values.max() <= high):
            value = values.min() if values.min() < low else values.max()
            return f"{name} {value} outside {low} to {high}"
    if len(program.earlier_peak_op) != min(1, len(program.earlier_peak)):
        return "an earlier peak without its op, or with several"
    if (np.diff(memory["before"]) < 0).any():
        return "allocations that are not in the order of its ops"
    return ""
