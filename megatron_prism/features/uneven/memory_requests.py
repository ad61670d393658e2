"""Changes of memory of captures of several lengths, made comparable.

In : the changes of one program at each length.  Out: the same changes, with the same storages in
the same order where captures differ in temporaries of single ops alone.

Libraries choose other kernels at other sizes, and these ask for other workspaces.  Where an op has
more changes in one capture than in another, and the surplus are whole temporaries (storages that
come and go within the op), the other capture has them, too, of no bytes.  Captures that differ in
more stay different.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class Changes:
    """Changes of memory of a program.

    Attributes:
        before: int64 [changes], the op before which each comes.
        storage: int64 [changes], numbered in the order of their first changes.
        grows: bool [changes], whether the storage grows (else: shrinks, or goes).
        num_bytes: int64 [changes]; below 0 where a storage goes.
    """

    before: np.ndarray
    storage: np.ndarray
    grows: np.ndarray
    num_bytes: np.ndarray

    def asks_like(self, other: Changes) -> bool:
        """Whether both have the same storages in the same order, of any sizes."""
        same_ops = np.array_equal(self.before, other.before)
        same_storages = np.array_equal(self.storage, other.storage)
        same_directions = np.array_equal(self.grows, other.grows)
        return same_ops and same_storages and same_directions


def comparable(allocations: Mapping[int, np.ndarray]) -> dict[int, Changes]:
    """Make the changes of one program comparable.

    Args:
        allocations: Tokens of a sample -> changes of the capture (``Program.allocations``).

    Returns:
        Tokens of a sample -> the changes.
    """
    ops: set[int] = set()
    by_op_of_length: dict[int, dict[int, list[_Row]]] = {}
    for length, events in allocations.items():
        by_op = _by_op(events)
        by_op_of_length[length] = by_op
        ops.update(by_op)
    rows_of_length: dict[int, list[_Row]] = {length: [] for length in allocations}
    ops_of_length: dict[int, list[int]] = {length: [] for length in allocations}
    for op in sorted(ops):
        most_rows: list[_Row] = []
        for by_op in by_op_of_length.values():
            most_rows = max(most_rows, by_op.get(op, []), key=len)
        most_shape = _shape(most_rows)
        for length, by_op in by_op_of_length.items():
            rows = by_op.get(op, [])
            # kernels of other sizes ask for other workspaces
            if _shape(rows) != most_shape:
                rows = _with_temporaries(rows, most_rows, op)
            rows_of_length[length] += rows
            ops_of_length[length] += [op] * len(rows)
    changes: dict[int, Changes] = {}
    for length, rows in rows_of_length.items():
        changes[length] = _changes(rows, ops_of_length[length])
    return changes


class _Row(NamedTuple):
    """A change: a storage, whether it grows, and bytes.

    A storage that another capture lacks is named by (op, its number) there.
    """

    storage: object
    grows: bool
    num_bytes: int


def _by_op(events: np.ndarray) -> dict[int, list[_Row]]:
    """Group changes by the op before which they come."""
    by_op: dict[int, list[_Row]] = {}
    ops = events["before"].tolist()
    storages = events["storage"].tolist()
    sizes = events["bytes"].tolist()
    for op, storage, num_bytes in zip(ops, storages, sizes, strict=True):
        row = _Row(storage, num_bytes > 0, num_bytes)
        rows = by_op.setdefault(op, [])
        rows.append(row)
    return by_op


def _shape(rows: Sequence[_Row]) -> tuple[tuple[int, bool], ...]:
    """Say which storages of an op come and go in which order, whatever their numbers and sizes."""
    number_of_storage: dict[object, int] = {}
    shape: list[tuple[int, bool]] = []
    for row in rows:
        number = number_of_storage.setdefault(row.storage, len(number_of_storage))
        shape.append((number, row.grows))
    return tuple(shape)


def _with_temporaries(rows: list[_Row], most_rows: list[_Row], op: int) -> list[_Row]:
    """Add the temporaries that another capture has, of no bytes.

    Args:
        rows: Changes before an op.
        most_rows: Those of the capture that has most of them.
        op: The op.

    Returns:
        The same rows if the captures differ in more than temporaries.
    """
    own_keys = _temporary_and_grows(rows)
    most_keys = _temporary_and_grows(most_rows)
    matcher = difflib.SequenceMatcher(None, most_keys, own_keys, autojunk=False)
    aligned: list[_Row] = []
    surplus: list[_Row] = []
    for kind, most_first, most_end, own_first, own_end in matcher.get_opcodes():
        if kind == "equal":
            aligned += rows[own_first:own_end]
        elif kind == "delete":
            for row in most_rows[most_first:most_end]:
                surplus.append(row)
                absent_row = _Row((op, row.storage), row.grows, 0)
                aligned.append(absent_row)
        # this capture has others
        else:
            return rows
    left_bytes = _left_bytes(surplus)
    # a surplus that stays is no temporary: of no bytes it would be missing from the peak
    if any(left_bytes.values()) or _shape(aligned) != _shape(most_rows):
        return rows
    return aligned


def _left_bytes(rows: Sequence[_Row]) -> dict[object, int]:
    """Add up what changes leave of each storage."""
    left_bytes: dict[object, int] = {}
    for row in rows:
        own_bytes = left_bytes.get(row.storage, 0)
        left_bytes[row.storage] = own_bytes + row.num_bytes
    return left_bytes


def _temporary_and_grows(rows: Sequence[_Row]) -> list[tuple[bool, bool]]:
    """Say whether the storage of each change comes and goes among these, and whether it grows."""
    left_bytes = _left_bytes(rows)
    keys: list[tuple[bool, bool]] = []
    for row in rows:
        is_temporary = left_bytes[row.storage] == 0
        keys.append((is_temporary, row.grows))
    return keys


def _changes(rows: Sequence[_Row], ops: Sequence[int]) -> Changes:
    """Make changes, with storages numbered in the order of their first changes."""
    number_of_storage: dict[object, int] = {}
    numbers: list[int] = []
    directions: list[bool] = []
    sizes: list[int] = []
    for row in rows:
        number = number_of_storage.setdefault(row.storage, len(number_of_storage))
        numbers.append(number)
        directions.append(row.grows)
        sizes.append(row.num_bytes)
    return Changes(
        before=np.array(ops, dtype=np.int64),
        storage=np.array(numbers, dtype=np.int64),
        grows=np.array(directions, dtype=bool),
        num_bytes=np.array(sizes, dtype=np.int64),
    )
