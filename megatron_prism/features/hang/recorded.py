"""Read the calls of a Flight Recorder dump, a column at a time.

In : the ``entries`` of a dump as torch pickles them, or as JSON has them.  Out: ``RecordedCalls``.

The dumps of a job hold millions of calls, and most calls are like an earlier one but for their
numbers.  So numbers are taken and checked as columns, in C, and what calls share is checked and
converted once (``SharedPart``).  A dump in which a column holds anything unusual is converted
whole, call by call, which also says what is wrong with it and where.
"""

from __future__ import annotations

import array
import dataclasses
import functools
import itertools
import math
import operator
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, TypeVar, cast

import msgspec

from megatron_prism.core.collectives import NAME_OF

T = TypeVar("T")

_LARGEST = (1 << 63) - 1
_Int = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=_LARGEST)]
_Sizes = tuple[tuple[_Int, ...], ...] | None
_MOST_ITEMS = 1 << 24  # of the lists of all calls of a dump
_TOO_MANY = f"it means more than {_MOST_ITEMS:,} items, written as aliases"
_MANY = (list, tuple, set, frozenset)
_LISTS = ("input_sizes", "output_sizes", "input_dtypes", "output_dtypes")
_AT_ONCE = 256  # calls that are read together
_SHARED = ("process_group", "profiling_name", "state", "retired", *_LISTS)
_NUMBERS = ("record_id", "collective_seq_id", "p2p_seq_id", "timeout_ms", "time_created_ns",
            "time_discovered_completed_ns")  # fmt: skip
_KEYS = (*_NUMBERS, "pg_id", *_SHARED, "frames")
_NO_NUMBER = type(None)
_FIRST = operator.itemgetter(0)
_PLACE = operator.itemgetter("filename", "line")

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
    record_id: _Int | None = None
    collective_seq_id: _Int | None = None
    p2p_seq_id: _Int | None = None
    pg_id: _Int | str | None = None
    input_sizes: _Sizes = None
    output_sizes: _Sizes = None
    input_dtypes: tuple[str, ...] | None = None
    output_dtypes: tuple[str, ...] | None = None
    state: str | None = None
    retired: bool | int | None = None
    frames: object = None
    timeout_ms: _Int | None = None
    time_created_ns: _Int | None = None
    time_discovered_completed_ns: _Int | None = None


class SharedPart(NamedTuple):
    """What calls may have in common.

    Attributes:
        group: Name of the group.
        desc: Description of the group.
        op: Name of ``collectives.TABLE``, or the recorder's own word.
        peer: Group rank of the other side of a send or receive, else -1.
        numbers: Elements of (inputs, outputs).
        dtypes: The recorder's words for them.
        state: The recorder's word.
        done: Whether the call is over.
        site: ``file:line`` of the innermost frame, or "".
        is_retired: Whether the watchdog took it from its list.
        is_nccl: Whether NCCL makes it.
    """

    group: str
    desc: str
    op: str
    peer: int
    numbers: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, ...]
    state: str
    done: bool
    site: str
    is_retired: bool
    is_nccl: bool


@dataclass(frozen=True)
class RecordedCalls:
    """The calls of one dump in its order, a list a property; -1 is an unknown number.

    Attributes:
        shared: What each call has in common with others.
        group_ids: The rank's own number of the group.
        records: Number of the record; where it is unknown, its place in the dump.
        collectives: How many collectives the group had made.
        messages: How many messages the group had made.
        timeouts_ms: Time-outs.
        created_ns: When the host asked for each call.
        ended_ns: When the watchdog saw it end.
    """

    shared: list[SharedPart]
    group_ids: list[int | str | None]
    records: list[int]
    collectives: list[int]
    messages: list[int]
    timeouts_ms: list[int]
    created_ns: list[int]
    ended_ns: list[int]

    def without_groups(self, group_ids: Collection[str]) -> RecordedCalls:
        """Leave out the calls of groups with these numbers."""
        kept = [str(number) not in group_ids for number in self.group_ids]
        columns = {}
        for field in dataclasses.fields(self):
            column = getattr(self, field.name)
            columns[field.name] = list(itertools.compress(column, kept))
        return RecordedCalls(**columns)

    def name_of_id(self) -> dict[int | str | None, str]:
        """Return each number of a group with the name that its last call has."""
        return dict(zip(self.group_ids, self._names(), strict=True))

    def ids_and_names(self) -> set[tuple[int | str | None, str]]:
        """Return the numbers of groups with all names that their calls have."""
        return set(zip(self.group_ids, self._names(), strict=True))

    def _names(self) -> list[str]:
        return [part.group for part in self.shared]


# -- calls as columns -----------------------------------------------------------------------------
# a value of another type than torch writes, or a key that is missing
_UNUSUAL = (msgspec.ValidationError, TypeError, LookupError)


def of_rows(rows: object) -> RecordedCalls | None:
    """Read calls that are mappings, as a pickle has them.

    Returns:
        None where a value is of another type than torch writes: ``of_calls`` converts such calls.

    Raises:
        ValueError: Their lists mean too many items.
    """
    if not isinstance(rows, list) or not _are_usual(rows):
        return None
    numbers: dict[str, list[int | None]] = {key: [] for key in _NUMBERS}
    group_ids: list[int | str | None] = []
    shared: list[SharedPart] = []
    part_of_key: dict[object, SharedPart] = {}
    items = 0
    try:
        # a part of the calls at a time: what is looked at twice is still in the processor's cache
        for start in range(0, len(rows), _AT_ONCE):
            columns = _columns(rows[start : start + _AT_ONCE])
            items += _items_of_lists(columns)
            if items > _MOST_ITEMS:
                raise ValueError(_TOO_MANY)
            for key in _NUMBERS:
                numbers[key] += _checked_numbers(columns[key])
            group_ids += _checked_ids(columns["pg_id"])
            shared += _shared_parts(columns, part_of_key)
    except _UNUSUAL:
        return None
    return _of_columns(shared, group_ids, numbers)


def _columns(rows: list[dict[str, object]]) -> dict[str, list[object]]:
    """Turn calls into columns: key -> the value of each call.

    Raises:
        KeyError: A call lacks a key that the first one has.
    """
    present = [key for key in _KEYS if key in rows[0]]

    # one look into each call: there are millions
    values_of_call = operator.itemgetter(*present)
    rows_of_values = map(values_of_call, rows)
    columns: dict[str, list[object]] = {}
    for key, values in zip(present, zip(*rows_of_values, strict=True), strict=True):
        columns[key] = list(values)

    # releases of torch have different keys
    for key in set(_KEYS).difference(present):
        if any(key in row for row in rows):
            raise KeyError(key)
        columns[key] = [None] * len(rows)
    return columns


def of_calls(calls: Sequence[RawCall]) -> RecordedCalls:
    """Read calls that were converted one by one."""
    columns: dict[str, list[int | None]] = {}
    for key in _NUMBERS:
        columns[key] = [getattr(call, key) for call in calls]
    part_of_value: dict[object, SharedPart] = {}
    shared = [_part_of_call(call, part_of_value) for call in calls]
    return _of_columns(shared, [call.pg_id for call in calls], columns)


def _of_columns(
    shared: list[SharedPart],
    group_ids: list[int | str | None],
    columns: dict[str, list[int | None]],
) -> RecordedCalls:
    """Put columns together, with what stands for an unknown number in each."""
    records = _known(columns["record_id"], range(len(shared)))
    collectives = _known(columns["collective_seq_id"])
    messages = _known(columns["p2p_seq_id"])
    timeouts_ms = _known(columns["timeout_ms"])
    created_ns = _known(columns["time_created_ns"])
    ended_ns = _known(columns["time_discovered_completed_ns"])
    return RecordedCalls(
        shared,
        group_ids,
        records,
        collectives,
        messages,
        timeouts_ms,
        created_ns,
        ended_ns,
    )


def _known(column: list[int | None], unknown: Sequence[int] = ()) -> list[int]:
    """Write ``unknown``, or -1, for numbers that are not known."""
    if None not in column:
        return cast(list[int], column)
    known = list(unknown) or [-1] * len(column)
    if column.count(None) < len(column):
        for place, number in enumerate(column):
            if number is not None:
                known[place] = number
    return known


def _checked_numbers(column: list[object]) -> list[int | None]:
    """Return a column that holds nothing but numbers of 64 bits, and unknown ones.

    Raises:
        TypeError: It holds something else.
    """
    types = set(map(type, column))
    if not types.issubset({int, _NO_NUMBER}):
        raise TypeError("no number")
    numbers = cast(list[int], column)
    if _NO_NUMBER in types:
        numbers = [number for number in numbers if number is not None]

    try:
        array.array("q", numbers)
    except OverflowError:
        raise TypeError("a number of more than 64 bits") from None
    return cast("list[int | None]", column)


def _checked_ids(column: list[object]) -> list[int | str | None]:
    """Return a column that holds nothing but numbers and names of groups.

    Raises:
        TypeError: It holds something else.
    """
    distinct = set(column)
    numbers = [number for number in distinct if not isinstance(number, str)]
    _checked_numbers(numbers)
    return cast("list[int | str | None]", column)


# -- what calls share -----------------------------------------------------------------------------
def _shared_parts(
    columns: dict[str, list[object]], part_of_key: dict[object, SharedPart]
) -> list[SharedPart]:
    """Return what each call shares with others; equal calls get the same object.

    Args:
        columns: The calls.
        part_of_key: What earlier calls of the dump have, which grows.

    Raises:
        msgspec.ValidationError: A value is of another type than torch writes.
        TypeError: Likewise.
        LookupError: Likewise.
    """
    values = zip(
        columns["process_group"],
        columns["profiling_name"],
        columns["state"],
        columns["retired"],
        msgspec.convert(columns["input_sizes"], list[_Sizes]),
        msgspec.convert(columns["output_sizes"], list[_Sizes]),
        _as_tuples(columns["input_dtypes"]),
        _as_tuples(columns["output_dtypes"]),
        _places(columns["frames"]),
        strict=True,
    )
    keys = list(values)
    parts = list(map(part_of_key.get, keys))

    # calls that are like no earlier one
    for index, part in enumerate(parts):
        if part is None:
            key = keys[index]
            part = part_of_key.get(key)
        if part is None:
            *fields, place = key
            part = _new_part(_checked(fields), cast("tuple[str, int] | None", place))
            part_of_key[key] = part
        parts[index] = part
    return cast(list[SharedPart], parts)


def _items_of_lists(columns: dict[str, list[object]]) -> int:
    """Count the items of the lists of calls, and of the lists in these.

    Raises:
        TypeError: A value is no list.
    """
    items = 0
    for key in _LISTS:
        items += sum(map(len, cast("list[list[object]]", columns[key])))
    for key in ("input_sizes", "output_sizes"):
        shapes = itertools.chain.from_iterable(cast("list[list[list[int]]]", columns[key]))
        items += sum(map(len, shapes))
    return items


def _checked(fields: Sequence[object]) -> RawCall:
    """Convert the values that calls share, in the order of ``_SHARED``."""
    values = dict(zip(_SHARED, fields, strict=True))
    if values["profiling_name"] is None:
        raise TypeError("profiling_name: no text")
    return msgspec.convert(values, RawCall, strict=False)


def _as_tuples(column: list[object]) -> list[object]:
    """Make the lists of a column hashable.

    Raises:
        TypeError: A value is neither a list nor unknown.
    """
    types = set(map(type, column))
    if types.issubset({list, tuple}):
        return list(map(tuple, cast(list[list[object]], column)))
    if not types.issubset({list, tuple, _NO_NUMBER}):
        raise TypeError("no list")
    words_of_calls: list[object] = []
    for words in column:
        # a call without tensors has no types
        if words is not None:
            words = tuple(cast(list[object], words))
        words_of_calls.append(words)
    return words_of_calls


def _places(column: list[object]) -> Sequence[tuple[str, int] | None]:
    """Return file and line of the innermost frame of each call; of the others nothing is read."""
    if not _are_all(column, list) or not all(column):
        return list(map(_innermost, column))
    first_frames = list(map(_FIRST, cast("list[list[object]]", column)))
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


def _part_of_call(call: RawCall, part_of_value: dict[object, SharedPart]) -> SharedPart:
    """Return what a call shares with others, made once for equal values."""
    place = _innermost(call.frames)
    value = (call.process_group, call.profiling_name, call.state, call.retired, call.input_sizes,
             call.output_sizes, call.input_dtypes, call.output_dtypes, place)  # fmt: skip
    part = part_of_value.get(value)
    if part is None:
        part = part_of_value[value] = _new_part(call, place)
    return part


def _new_part(call: RawCall, place: tuple[str, int] | None) -> SharedPart:
    """Read what a call shares with others."""
    name, desc = call.process_group
    op, peer = _operation(call.profiling_name)
    state = (call.state or "")[:20]
    is_retired = bool(call.retired)
    sizes = _elements(call.input_sizes), _elements(call.output_sizes)
    dtypes = (*(call.input_dtypes or ()), *(call.output_dtypes or ()))

    # what closes a batch of collectives has no tensors
    if not call.input_sizes and call.profiling_name.endswith("_coalesced"):
        op = "coalesced"
    return SharedPart(
        group=str(name),
        desc=str(desc)[:200],
        op=op,
        peer=peer,
        numbers=_same_object(sizes),
        dtypes=_same_object(dtypes),
        state=state,
        done=is_retired or state == "completed",
        site=_same_object(_site(place)),
        is_retired=is_retired,
        is_nccl=call.profiling_name.startswith("nccl:"),
    )


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
        if abs(count) > _LARGEST:
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
