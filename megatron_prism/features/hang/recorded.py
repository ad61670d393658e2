"""Read the calls of a Flight Recorder dump, a column at a time.

In : the ``entries`` of a dump as torch pickles them, or as JSON has them.  Out: ``RecordedCalls``.

The dumps of a job hold millions of calls, and most calls are like an earlier one but for their
numbers.  So numbers are taken and checked as columns, in C, and what calls share is checked and
converted once (``RecordedPart``).  A dump in which a column holds anything unusual is converted
whole, call by call, which also says what is wrong with it and where.
"""

from __future__ import annotations

import array
import functools
import itertools
import math
import operator
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, TypeVar, cast

import msgspec
import numpy as np

from megatron_prism.core.programs.collectives import NAME_OF
from megatron_prism.features.hang.calls import CallPart, Integers

T = TypeVar("T")

LARGEST = (1 << 63) - 1
Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=LARGEST)]
_Sizes = tuple[tuple[Int64, ...], ...] | None
_MOST_ITEMS = 1 << 24  # of the lists of all calls of a dump
_TOO_MANY = f"it means more than {_MOST_ITEMS:,} items, written as aliases"
_MANY = (list, tuple, set, frozenset)
_LISTS = ("input_sizes", "output_sizes", "input_dtypes", "output_dtypes")
_AT_ONCE = 256  # calls that are read together
_SHARED = ("process_group", "profiling_name", "state", "retired", *_LISTS)
_NUMBERS = (
    "record_id",
    "collective_seq_id",
    "p2p_seq_id",
    "time_created_ns",
    "time_discovered_completed_ns",
)
_KEYS = (*_NUMBERS, "pg_id", "timeout_ms", *_SHARED, "frames")
_ENCODE = msgspec.msgpack.Encoder().encode
_NO_NUMBER = type(None)
_FIRST = operator.itemgetter(0)
_PLACE = operator.itemgetter("filename", "line")
_SHARED_VALUES = operator.attrgetter("pg_id", "timeout_ms", *_SHARED)

# the recorder's words that are no operation of ours -> the operation that they are
_NAMES = {
    **NAME_OF,
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "ALLGATHER_coalesced": "all_gather",
    "REDUCE_SCATTER_coalesced": "reduce_scatter",
    "all_to_allv": "all_to_all",
    "all_reduce_barrier": "barrier",
    "all_gather_into_tensor_coalesced": "all_gather",
    "_all_gather_base_coalesced": "all_gather",
}
_MESSAGE = re.compile(r"(send|recv) (\d+)(->|<-)(\d+)")


class RawCall(msgspec.Struct, gc=False):
    """A call as torch, or whoever wrote the file, has it."""

    process_group: tuple[str | int, str | int | None]
    profiling_name: str = ""
    record_id: Int64 | None = None
    collective_seq_id: Int64 | None = None
    p2p_seq_id: Int64 | None = None
    pg_id: Int64 | str | None = None
    input_sizes: _Sizes = None
    output_sizes: _Sizes = None
    input_dtypes: tuple[str, ...] | None = None
    output_dtypes: tuple[str, ...] | None = None
    state: str | None = None
    retired: bool | int | None = None
    frames: object = None
    timeout_ms: Int64 | None = None
    time_created_ns: Int64 | None = None
    time_discovered_completed_ns: Int64 | None = None


class RecordedPart(NamedTuple):
    """What calls of one dump may have in common.

    Attributes:
        group_id: The rank's own number of the group.
        call: What an entry says of it.
        is_retired: Whether the watchdog took it from its list.
        is_nccl: Whether NCCL makes it.
    """

    group_id: int | str | None
    call: CallPart
    is_retired: bool
    is_nccl: bool


@dataclass(frozen=True)
class RecordedCalls:
    """The calls of one dump in its order, a column a property; -1 is an unknown number.

    Attributes:
        parts: What calls have in common.
        part: Index in ``parts``, for each call.
        records: Number of the record; where it is unknown, its place in the dump.
        collectives: How many collectives the group had made.
        messages: How many messages the group had made.
        created_ns: When the host asked for each call.
        ended_ns: When the watchdog saw it end.
    """

    parts: list[RecordedPart]
    part: Integers
    records: Integers
    collectives: Integers
    messages: Integers
    created_ns: Integers
    ended_ns: Integers

    def without_groups(self, group_ids: Collection[str]) -> RecordedCalls:
        """Leave out the calls of groups with these numbers."""
        is_kept_of_part = [str(part.group_id) not in group_ids for part in self.parts]
        kept = np.array(is_kept_of_part, np.bool_)[self.part]
        return RecordedCalls(
            self.parts,
            self.part[kept],
            self.records[kept],
            self.collectives[kept],
            self.messages[kept],
            self.created_ns[kept],
            self.ended_ns[kept],
        )

    def name_of_id(self) -> dict[int | str | None, str]:
        """Return each number of a group with the name that its last call has."""
        last_places = np.full(len(self.parts), -1)
        last_places[self.part] = np.arange(len(self.part))
        names: dict[int | str | None, str] = {}
        for index in np.argsort(last_places, kind="stable").tolist():
            # parts of calls that were left out have no place
            if last_places[index] >= 0:
                part = self.parts[index]
                names[part.group_id] = part.call.group
        return names

    def ids_and_names(self) -> set[tuple[int | str | None, str]]:
        """Return the numbers of groups with all names that their calls have."""
        used = np.unique(self.part).tolist()
        return {(self.parts[index].group_id, self.parts[index].call.group) for index in used}


# -- calls as columns -----------------------------------------------------------------------------
# a value of another type than torch writes, or a key that is missing
_UNUSUAL = (msgspec.ValidationError, TypeError, LookupError, OverflowError)


def of_rows(rows: object) -> RecordedCalls | None:
    """Read calls that are mappings, as a pickle has them.

    Returns:
        None where a value is of another type than torch writes: ``of_calls`` converts such calls.

    Raises:
        ValueError: Their lists mean too many items.
    """
    if not isinstance(rows, list) or not _are_usual(rows):
        return None
    table = _PartTable()
    indices: list[int] = []
    numbers: dict[str, list[Integers]] = {key: [] for key in _NUMBERS}
    try:
        # a part of the calls at a time: what is looked at twice is still in the processor's cache
        for start in range(0, len(rows), _AT_ONCE):
            columns = _columns(rows[start : start + _AT_ONCE])
            indices += table.indices(columns)
            for key in _NUMBERS:
                unknown: Sequence[int] = ()
                if key == "record_id":
                    unknown = range(start, start + _AT_ONCE)
                numbers[key].append(_numbers(columns[key], unknown))
    except _UNUSUAL:
        return None
    columns_of_numbers = {key: _joined(pieces) for key, pieces in numbers.items()}
    return _of_columns(table.parts, indices, columns_of_numbers)


def _joined(pieces: list[Integers]) -> Integers:
    """Put the pieces of a column together; there may be none."""
    return np.concatenate([np.empty(0, np.int64), *pieces])


def _columns(rows: list[dict[str, object]]) -> dict[str, Sequence[object]]:
    """Turn calls into columns: key -> the value of each call.

    Raises:
        KeyError: A call lacks a key that the first one has.
    """
    present = [key for key in _KEYS if key in rows[0]]

    # one look into each call: there are millions
    values_of_call = operator.itemgetter(*present)
    rows_of_values = map(values_of_call, rows)
    columns: dict[str, Sequence[object]] = {}
    columns.update(zip(present, zip(*rows_of_values, strict=True), strict=True))

    # releases of torch have different keys
    for key in set(_KEYS).difference(present):
        if any(key in row for row in rows):
            raise KeyError(key)
        columns[key] = [None] * len(rows)
    return columns


def of_calls(calls: Sequence[RawCall]) -> RecordedCalls:
    """Read calls that were converted one by one."""
    columns: dict[str, Integers] = {}
    for key in _NUMBERS:
        unknown: Sequence[int] = ()
        if key == "record_id":
            unknown = range(len(calls))
        columns[key] = _numbers([getattr(call, key) for call in calls], unknown)

    places = [_innermost(call.frames) for call in calls]
    index_of_part: dict[RecordedPart, int] = {}
    index_of_key: dict[object, int] = {}
    indices: list[int] = []
    # most calls are like an earlier one: a part is read once for all calls with the same values
    for values, place, call in zip(map(_SHARED_VALUES, calls), places, calls, strict=True):
        call_key = (values, place)
        index = index_of_key.get(call_key)
        if index is None:
            part = _new_part(call, call.pg_id, call.timeout_ms, place)
            index = index_of_part.setdefault(part, len(index_of_part))
            index_of_key[call_key] = index
        indices.append(index)
    return _of_columns(list(index_of_part), indices, columns)


def _of_columns(
    parts: list[RecordedPart], indices: list[int], columns: dict[str, Integers]
) -> RecordedCalls:
    """Put columns together."""
    return RecordedCalls(
        parts,
        np.array(indices, np.int64),
        columns["record_id"],
        columns["collective_seq_id"],
        columns["p2p_seq_id"],
        columns["time_created_ns"],
        columns["time_discovered_completed_ns"],
    )


def _numbers(column: Sequence[object], unknown: Sequence[int] = ()) -> Integers:
    """Return a column of numbers of 64 bits.

    Args:
        column: The numbers; None is an unknown one.
        unknown: What stands for unknown numbers; by default -1.

    Raises:
        TypeError: It holds something else.
    """
    types = set(map(type, column))
    if not types.issubset({int, _NO_NUMBER}):
        raise TypeError("no number")
    if _NO_NUMBER in types:
        if unknown or int in types:
            column = _with_unknown(column, unknown or [-1] * len(column))
        else:
            return np.full(len(column), -1, np.int64)
    try:
        return np.frombuffer(array.array("q", cast("Sequence[int]", column)), np.int64)
    except OverflowError:
        raise TypeError("a number of more than 64 bits") from None


def _with_unknown(column: Sequence[object], unknown: Sequence[int]) -> list[object]:
    """Write what stands for an unknown number where a column has none."""
    numbers = list(column)
    for place, number in enumerate(numbers):
        if number is None:
            numbers[place] = unknown[place]
    return numbers


# -- what calls share -----------------------------------------------------------------------------
class _PartTable:
    """What the calls of a dump have in common.

    Attributes:
        parts: The parts, each once.
    """

    def __init__(self) -> None:
        self.parts: list[RecordedPart] = []
        self._index_of_key: dict[object, int] = {}
        self._items = 0

    def indices(self, columns: dict[str, Sequence[object]]) -> list[int]:
        """Return the index of each call's part; equal calls have the same.

        A list that is written once may stand in every call: what it means is counted each time.

        Raises:
            ValueError: The lists mean too many items.
            msgspec.ValidationError: A value is of another type than torch writes.
            TypeError: Likewise.
            LookupError: Likewise.
        """
        _check_types(columns["pg_id"], int, str)
        _check_types(columns["timeout_ms"], int)
        self._items += _items_of_lists(columns)
        if self._items > _MOST_ITEMS:
            raise ValueError(_TOO_MANY)

        # lists cannot be looked up: their bytes are
        lists = zip(*(columns[key] for key in _LISTS), strict=True)
        keys = zip(
            columns["pg_id"],
            columns["timeout_ms"],
            columns["process_group"],
            columns["profiling_name"],
            columns["state"],
            columns["retired"],
            map(_ENCODE, lists),
            _places(columns["frames"]),
            strict=True,
        )
        indices: list[int] = []
        index_of_key = self._index_of_key.get
        for key in keys:
            index = index_of_key(key)

            # a call that is like no earlier one
            if index is None:
                place = len(indices)
                fields = {name: columns[name][place] for name in _SHARED}
                index = self._add(key, fields)
            indices.append(index)
        return indices

    def _add(self, key: tuple[object, ...], fields: dict[str, object]) -> int:
        """Add the part of a call.

        Args:
            key: What equal calls have, as it was written.
            fields: The values that calls share.

        Returns:
            Its index.
        """
        group_id, timeout_ms, *_, place = key
        _numbers([timeout_ms])
        if not isinstance(group_id, str):
            _numbers([group_id])
        part = _new_part(
            _checked(fields),
            cast("int | str | None", group_id),
            cast("int | None", timeout_ms),
            cast("tuple[str, int] | None", place),
        )
        self.parts.append(part)
        index = self._index_of_key[key] = len(self.parts) - 1
        return index


def _check_types(column: Sequence[object], *types: type) -> None:
    """Check that a column holds values of some types, or unknown ones.

    Raises:
        TypeError: It holds something else.
    """
    if not set(map(type, column)).issubset({*types, _NO_NUMBER}):
        raise TypeError("no value of these types")


def _items_of_lists(columns: dict[str, Sequence[object]]) -> int:
    """Count the items of the lists of calls, and the numbers in lists of sizes.

    After that these lists are as flat as torch writes them: what packs a nested one in C may run
    out of its stack.

    Raises:
        TypeError: A value is no list, a size no number, or a type no text.
    """
    items = 0
    for key in _LISTS:
        lists = cast("Sequence[list[object]]", columns[key])
        _check_lists_alone(lists)
        items += sum(map(len, lists))
    if items > _MOST_ITEMS:
        return items
    for key in ("input_sizes", "output_sizes"):
        shapes = list(itertools.chain.from_iterable(cast("list[list[list[int]]]", columns[key])))
        _check_lists_alone(shapes)
        numbers = itertools.chain.from_iterable(shapes)
        items += len(array.array("q", itertools.islice(numbers, _MOST_ITEMS + 1)))
    for key in ("input_dtypes", "output_dtypes"):
        words = itertools.chain.from_iterable(cast("list[list[str]]", columns[key]))
        "".join(words)
    return items


def _check_lists_alone(values: Iterable[object]) -> None:
    """Check that values are lists.

    Raises:
        TypeError: Some is not.
    """
    if not set(map(type, values)).issubset({list, tuple}):
        raise TypeError("no list")


def _checked(fields: dict[str, object]) -> RawCall:
    """Convert the values that calls share."""
    if fields["profiling_name"] is None:
        raise TypeError("profiling_name: no text")
    # sizes are numbers, also where others may be written as text
    for key in ("input_sizes", "output_sizes"):
        fields[key] = msgspec.convert(fields[key], _Sizes)
    return msgspec.convert(fields, RawCall, strict=False)


def _places(column: Sequence[object]) -> Sequence[tuple[str, int] | None]:
    """Return file and line of the innermost frame of each call; of the others nothing is read."""
    if not _are_all(column, list) or not all(column):
        return list(map(_innermost, column))
    first_frames = list(map(_FIRST, cast("Sequence[list[object]]", column)))
    if not _are_all(first_frames, dict):
        return list(map(_innermost, column))

    # all calls have frames, as torch writes them
    places = list(map(_PLACE, cast("list[dict[str, object]]", first_frames)))
    files, lines = zip(*places, strict=True)
    if not _are_all(files, str) or not _are_all(lines, int):
        return list(map(_innermost, column))
    return places


def _are_all(values: Iterable[object], kind: type) -> bool:
    """Tell whether values are of one type, and of no class below it."""
    return set(map(type, values)) == {kind}


def _new_part(
    call: RawCall, group_id: int | str | None, timeout_ms: int | None, place: tuple[str, int] | None
) -> RecordedPart:
    """Read what a call shares with others.

    Args:
        call: The call, of which no number is read.
        group_id: The rank's own number of the group.
        timeout_ms: Time-out.
        place: File and line of the innermost frame.
    """
    name, desc = call.process_group
    op, peer = _operation(call.profiling_name)
    state = (call.state or "")[:20]
    is_retired = bool(call.retired)
    sizes = _elements(call.input_sizes), _elements(call.output_sizes)
    dtypes = (*(call.input_dtypes or ()), *(call.output_dtypes or ()))

    # what closes a batch of collectives has no tensors
    if not call.input_sizes and call.profiling_name.endswith("_coalesced"):
        op = "coalesced"
    if timeout_ms is None:
        timeout_ms = -1
    part = CallPart(
        group=str(name),
        desc=str(desc)[:200],
        op=op,
        to=peer,
        numbers=_same_object(sizes),
        dtypes=_same_object(dtypes),
        state=state,
        done=is_retired or state == "completed",
        site=_same_object(_site(place)),
        timeout_ms=timeout_ms,
    )
    return RecordedPart(group_id, part, is_retired, call.profiling_name.startswith("nccl:"))


@functools.lru_cache(1 << 14)
def _same_object(value: T) -> T:
    """Return one object for equal values, so that dumps share their sizes and sites."""
    return value


@functools.lru_cache(1 << 14)
def _operation(text: str) -> tuple[str, int]:
    """Read (operation, group rank of the other side or -1) of a profiling_name."""
    word = text[:200].rpartition(":")[2]
    message = _MESSAGE.match(word)
    if message is None:
        return _NAMES.get(word, word), -1
    return message[1], int(message[4][:9])


def _innermost(frames: object) -> tuple[str, int] | None:
    """Return file and line of the innermost frame; of the others nothing is read."""
    if not isinstance(frames, list) or not frames:
        return None
    first = frames[0]
    if not isinstance(first, dict):
        return None
    file, line = first.get("filename"), first.get("line")
    if isinstance(file, str) and isinstance(line, int):
        return file, line
    return None


def _site(place: tuple[str, int] | None) -> str:
    """Write a place as ``file:line``."""
    if place is None:
        return ""
    file, line = place
    return f"{file[:300]}:{line}"


def _elements(sizes: _Sizes) -> tuple[int, ...]:
    """Count the elements of each tensor; -1 for more than torch can count."""
    counts = []
    for shape in sizes or ():
        count = math.prod(shape[:64])
        if abs(count) > LARGEST:
            count = -1
        counts.append(count)
    return tuple(counts)


# -- bounds ---------------------------------------------------------------------------------------
def check_groups(value: object) -> None:
    """Refuse a dump whose groups mean too many members.

    Raises:
        ValueError: They mean more than ``_MOST_ITEMS``.
    """
    groups = value.get("pg_config") if isinstance(value, dict) else None
    if isinstance(groups, dict):
        _check_lists([[row.get("ranks") for row in _of_types(groups.values(), dict)]])


def check_calls(value: object) -> None:
    """Refuse a dump whose calls have lists that mean too many items, before they are converted.

    A list that is written once may stand in every call.

    Raises:
        ValueError: They mean more than ``_MOST_ITEMS``.
    """
    entries = value.get("entries") if isinstance(value, dict) else None
    rows = _of_types(entries, dict) if isinstance(entries, _MANY) else []
    columns = []
    for key in _LISTS:
        columns.append([row.get(key) for row in rows])
    _check_lists(columns)


def _are_usual(entries: Collection[object]) -> bool:
    """Tell whether calls are a list of mappings, as torch writes them."""
    return isinstance(entries, list) and set(map(type, entries)).issubset({dict})


def _check_lists(columns: Sequence[list[object]]) -> None:
    """Refuse columns of lists that mean too many items.

    There are millions of lists: their types and lengths are taken without a step of Python for
    each.

    Raises:
        ValueError: They mean more than ``_MOST_ITEMS``, or lists inside them do.
    """
    items = 0
    for _ in range(2):
        # a column for itself: mostly all its values are lists, or none is
        lists_of_columns: list[list[Collection[object]]] = []
        for column in columns:
            lists = cast("list[Collection[object]]", _of_types(column, *_MANY))
            items += sum(map(len, lists))
            lists_of_columns.append(lists)
        if items > _MOST_ITEMS:
            raise ValueError(_TOO_MANY)
        columns = [list(itertools.chain.from_iterable(lists)) for lists in lists_of_columns]


def _of_types(values: Collection[object], *types: type[T]) -> list[T]:
    """Return the values of some types: mostly all of them, or none."""
    present = set(map(type, values))
    if present.issubset(types):
        return cast(list[T], list(values))
    if present.isdisjoint(types):
        return []
    return [cast(T, value) for value in values if type(value) in types]
