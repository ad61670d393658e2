"""What does one rank do in an iteration?  A program: its ops in the order in which it issues them.

Programs are what capture writes and analysis reads.  ``ops.py`` says what an op is,
``program_text.py`` how programs look as text, ``programs.py`` keeps those of a world in one file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

from megatron_prism.core.ops import (
    ALLOCATION,
    CODE,
    CODED,
    DTYPE_NAMES,
    IS_COLLECTIVE,
    IS_PAIR,
    ITEM_SIZE,
    NAMES,
    OP,
    PHASE_NAMES,
    REDUCE,
    TEXTS,
    Op,
)

__all__ = ["Builder", "Program"]


_HANDLE = list(OP.names or ()).index("handle")


Splits = tuple[tuple[int, ...], tuple[int, ...]]  # to and from every member


class Builder:
    """Collects a program op by op.  Cheap enough to run inside a training step (~2 us an op)."""

    def __init__(self) -> None:
        self._strings: dict[str, int] = {"": 0, "main": 1}
        self._splits: dict[Splits, int] = {}
        self._rows: list[tuple[int, ...]] = []
        self._allocations: list[tuple[int, int, int, int]] = []
        self._streams: list[int] = []  # of each allocation
        self.history = np.empty((0, 4), np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def _text(self, text: str) -> int:
        found = self._strings.get(text)
        if found is None:
            found = self._strings[text] = len(self._strings)
        return found

    def add(
        self,
        name: str,
        group: str = "",
        dtype: str = "",
        num_in: int = -1,
        num_out: int = -1,
        reduce: str = "",
        peer: int = 0,
        root: int = -1,
        splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
        stream: str = "main",
        handle: int = -1,
        batch: int = -1,
        phase: str = "",
        microbatch: int = -1,
        chunk: int = -1,
        ns: int = -1,
        flops: int = -1,
        traffic: int = -1,
        host: int = -1,
        lead: int = -1,
        products: int = -1,
        kernels: int = -1,
        shape: str = "",
        site: str = "",
        note: str = "",
    ) -> int:
        """Append one op (the fields of Op, unchecked); returns its index."""
        at = -1 if splits is None else self._splits.setdefault(splits, len(self._splits))
        self._rows.append(
            (
                CODE[name],
                PHASE_NAMES.index(phase),
                DTYPE_NAMES.index(dtype),
                REDUCE.index(reduce),
                chunk,
                *map(self._text, (stream, group, shape, site, note)),
                microbatch,
                peer,
                root,
                at,
                handle,
                batch,
                kernels,
                num_in,
                num_out,
                ns,
                flops,
                traffic,
                host,
                lead,
                products,
            )
        )
        return len(self._rows) - 1

    def settle(self, index: int) -> None:
        """Op ``index`` was not asynchronous after all: it has no handle."""
        row = self._rows[index]
        self._rows[index] = (*row[:_HANDLE], -1, *row[_HANDLE + 1 :])

    def memory(self, storage: int, num_bytes: int, note: str = "", stream: int = 0) -> None:
        """Storage ``storage`` came to be (bytes > 0) or went (bytes < 0) before the next op, on
        stream ``stream`` (0: the main one); it is what ``note`` says."""
        self._allocations.append((len(self._rows), storage, num_bytes, self._text(note)))
        self._streams.append(stream)

    def build(self, rank: int) -> Program:
        """The program of ``rank``."""
        return Program(
            rank,
            np.array(self._rows, dtype=OP),
            tuple(self._strings),
            tuple(self._splits),
            np.array(self._allocations, dtype=ALLOCATION),
            streams=np.array(self._streams if any(self._streams) else [], dtype=np.int16),
            history=self.history,
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
    history     : int64 [events, 4] of all requests since the process began (``tiers.history``), or
                  none; the text form leaves it out
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

    @staticmethod
    def from_ops(rank: int, ops: Iterable[Op]) -> Program:
        """A program out of readable ops."""
        builder = Builder()
        for op in ops:
            builder.add(**{f.name: getattr(op, f.name) for f in fields(Op)})
        return builder.build(rank)

    def __len__(self) -> int:
        return len(self.ops)

    def __getitem__(self, index: int) -> Op:
        row = self.ops[index]
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
    def knows_host(self) -> bool:
        """Whether any segment says how long the host takes to issue it."""
        return bool((self.ops["host"] >= 0).any())

    def groups(self) -> dict[str, np.ndarray]:
        """Group description -> indices of its collectives and p2p ops, ascending."""
        talk = IS_PAIR[self.ops["name"]] | IS_COLLECTIVE[self.ops["name"]]
        return {
            self.strings[code]: np.flatnonzero(talk & (self.ops["group"] == code))
            for code in np.unique(self.ops["group"][talk])
        }

    def live_bytes(self) -> np.ndarray:
        """Live bytes after every allocation event, int64 [m]."""
        return np.cumsum(self.allocations["bytes"])

    def counts(self) -> Mapping[str, int]:
        """How many ops of each name there are."""
        codes, counts = np.unique(self.ops["name"], return_counts=True)
        return {NAMES[code]: int(count) for code, count in zip(codes, counts, strict=True)}
