"""Storages of a new program, and their changes, as they are made."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_prism.replay.microbatches.cut import Kind
from megatron_prism.replay.microbatches.message_buffers import NEVER


@dataclass(frozen=True)
class MemoryChanges:
    """Changes of memory of a new program.

    Attributes:
        allocations: The changes, rows like those of ``Program.allocations``.
        captured: int64 [changes], the captured change that each is made of.
        is_extra: bool [changes], whether each only comes with its captured one, and stands earlier
            or later than that was captured.
    """

    allocations: np.ndarray
    captured: np.ndarray
    is_extra: np.ndarray


class _Pending(NamedTuple):
    """A message's tensor that is there, in the order in which they go."""

    before: int
    number: int
    origin: Kind
    change: int


class NewStorages:
    """The storages of a new program and their changes, as they are made.

    Attributes:
        captured: The captured changes: before, storage, bytes, note.
        live: Bytes of every new storage.
        waiting: New storages by origin, the oldest first; none of a message's tensors.
    """

    def __init__(
        self, old: np.ndarray, messages: Collection[int], origins: Mapping[int, Kind]
    ) -> None:
        """Begin with nothing.

        Args:
            old: The captured changes.
            messages: Captured storages that are messages' tensors.
            origins: Of every captured storage what it is told apart by.
        """
        self.captured: list[tuple[int, int, int, int]] = old.tolist()
        self.live: list[int] = []
        self.waiting = defaultdict[Kind, deque[int]](deque)
        self._dtype = old.dtype
        self._rows: list[tuple[int, int, int, int]] = []
        self._captured_of_rows: list[int] = []
        self._is_extra: list[bool] = []
        self._pending: list[_Pending] = []

        # captured frees of messages' tensors say where among changes of one op they come
        self._frees = defaultdict[tuple[int, Kind], list[int]](list)
        for change, (before, storage, size, _) in enumerate(self.captured):
            if size < 0 and storage in messages:
                self._frees[before, origins[storage]].append(change)

    def begin(self, origin: Kind) -> int:
        """Make a storage, without bytes yet, and return its number."""
        number = len(self.live)
        self.live.append(0)
        self.waiting[origin].append(number)
        return number

    def change(self, origin: Kind, number: int, size: int, before: int, change: int) -> None:
        """Change a storage as a captured change does.

        Args:
            origin: What the storage is told apart by.
            number: The storage.
            size: Bytes that come; negative: that go.
            before: The op behind the change.
            change: The captured change.
        """
        _, _, _, note = self.captured[change]
        self._add(number, size, before, note, change)
        if self.live[number] <= 0:
            self.waiting[origin].remove(number)

    def drop(self, origin: Kind, number: int, before: int, change: int) -> None:
        """Free a storage with a captured change of another one."""
        self._add(number, -self.live[number], before, 0, change, is_extra=True)
        self.waiting[origin].remove(number)

    def receive(self, origin: Kind, before: int, change: int, end: int) -> None:
        """Make a message's tensor, which is dropped before op ``end`` (NEVER)."""
        # one that is never dropped needs no place in the queue
        number = len(self.live)
        self.live.append(0)
        _, _, size, note = self.captured[change]
        self._add(number, size, before, note, change)
        if end != NEVER:
            heapq.heappush(self._pending, _Pending(max(end, before), number, origin, change))

    def drop_messages(self, before: int, change: int) -> None:
        """Drop the messages' tensors that are gone as a captured change comes before an op.

        A tensor goes ahead of other changes before the same op, unless a captured one went behind.
        """
        while self._pending and self._pending[0].before <= before:
            end, number, origin, birth = self._pending[0]
            captured_before, _, _, _ = self.captured[change]
            frees = self._frees.get((captured_before, origin), ())
            # a captured one goes behind the change
            if end == before and any(free >= change for free in frees):
                return
            heapq.heappop(self._pending)
            self._add(number, -self.live[number], end, 0, birth, is_extra=True)

    def drop_message_with(self, origin: Kind, before: int, change: int) -> None:
        """Drop a message's tensor where a captured one went, if one goes before this op."""
        for place, tensor in enumerate(self._pending):
            if tensor.before == before and tensor.origin == origin:
                number = tensor.number
                self._add(number, -self.live[number], before, 0, change)
                del self._pending[place]
                heapq.heapify(self._pending)
                return

    def changes(self) -> MemoryChanges:
        """Give all changes that were made."""
        allocations = np.array(self._rows, dtype=self._dtype)
        captured = np.array(self._captured_of_rows, dtype=np.int64)
        return MemoryChanges(allocations, captured, np.array(self._is_extra, dtype=bool))

    def _add(
        self, number: int, size: int, before: int, note: int, change: int, is_extra: bool = False
    ) -> None:
        """Add a change of a storage."""
        self.live[number] += size
        self._rows.append((before, number, size, note))
        self._captured_of_rows.append(change)
        self._is_extra.append(is_extra)
