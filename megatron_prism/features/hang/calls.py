"""The calls of a rank: one by one as entries, and all together as columns.

A job's dumps hold millions of calls, and most calls are like an earlier one but for their numbers.
So what calls have in common is kept once (``CallPart``), and each call has the index of its part;
sequence numbers and times are columns.  Questions about all calls are answered on the columns; an
``Entry`` is made where a call is looked at by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
Launch = tuple[str, bool, int]  # group, whether of messages, number in the group


class CallPart(NamedTuple):
    """What calls may have in common.

    Attributes:
        group: Name of the group.
        desc: Description of the group.
        op: Name of ``collectives.TABLE``, or the recorder's own word.
        to: Group rank of the other side of a send or receive, else -1.
        numbers: Elements of (inputs, outputs).
        dtypes: The recorder's words for them.
        state: The recorder's word.
        done: Whether the call is over.
        site: ``file:line`` of the innermost frame, or "".
        timeout_ms: Time-out; -1 is unknown.
    """

    group: str
    desc: str
    op: str
    to: int
    numbers: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, ...]
    state: str
    done: bool
    site: str
    timeout_ms: int

    @property
    def pair(self) -> bool:
        """Whether it is a send or a receive."""
        return self.to >= 0

    @property
    def closes_batch(self) -> bool:
        """Whether it is no call, but the record that closes a batch."""
        return self.op == "coalesced"

    @property
    def is_collective(self) -> bool:
        """Whether it is neither a message nor a record that closes a batch."""
        return self.to < 0 and self.op != "coalesced"


class Entry(NamedTuple):  # made by the million: a frozen dataclass takes four times as long
    """One call.  ``op`` is a name of ``collectives.TABLE`` or the recorder's own word.

    seq : place among the group's collectives, or for sends and receives among those
    to  : group rank of the other side of a send or receive, else -1
    ``numbers`` are the elements of (inputs, outputs), ``dtypes`` the recorder's words
    """

    record: int
    group: str
    desc: str
    op: str
    seq: int
    calls: int  # collectives of the group up to here, also for sends and receives
    to: int
    numbers: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, ...]
    state: str
    done: bool
    site: str
    timeout_ms: int
    created_ns: int

    @property
    def pair(self) -> bool:
        """Whether it is a send or a receive."""
        return self.to >= 0

    @property
    def launch(self) -> Launch:
        """What all that is issued in one batch has in common."""
        return self.group, self.pair, self.seq

    @property
    def part(self) -> CallPart:
        """What it may have in common with other calls."""
        return CallPart._make((*self[1:4], *self[6:13]))


@dataclass(frozen=True, eq=False)
class Calls(Sequence[Entry]):
    """Calls of one rank, in the order of its dump.

    Attributes:
        parts: What the calls have in common, each once and in the order in which they come.
        part: Index in ``parts``, for each call.
        record: Numbers of the records.
        seq: Places among the group's collectives, or of messages among its messages.
        calls: Collectives of the group up to each call.
        created_ns: When the host asked for each call; -1 is unknown.
    """

    parts: tuple[CallPart, ...]
    part: NDArray[np.int64]
    record: Integers
    seq: Integers
    calls: Integers
    created_ns: Integers

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Calls:
        """Turn entries into columns; what are columns already stays as it is."""
        # millions of entries must not be made only to be taken apart again
        if isinstance(entries, Calls):
            return entries
        index_of_part: dict[CallPart, int] = {}
        rows: list[tuple[int, ...]] = []
        for entry in entries:
            index = index_of_part.setdefault(entry.part, len(index_of_part))
            rows.append((index, entry.record, entry.seq, entry.calls, entry.created_ns))
        columns = np.array(rows, np.int64).reshape(-1, 5)
        return cls(tuple(index_of_part), *columns.T)

    @classmethod
    def of_columns(
        cls,
        parts: Iterable[CallPart],
        part: NDArray[np.int64],
        record: Integers,
        seq: Integers,
        calls: Integers,
        created_ns: Integers,
    ) -> Calls:
        """Put columns together; arguments as the attributes.

        Args:
            parts: In any order.  Equal ones become one, and those of no call are left out.
            part: Index in ``parts``, for each call.
            record: Numbers of the records.
            seq: Places among the group's collectives or messages.
            calls: Collectives of the group up to each call.
            created_ns: When the host asked for each call.
        """
        index_of_part: dict[CallPart, int] = {}
        indices: list[int] = []
        for call_part in parts:
            indices.append(index_of_part.setdefault(call_part, len(index_of_part)))
        merged_part = np.array(indices, np.int64)[part]
        merged = cls(tuple(index_of_part), merged_part, record, seq, calls, created_ns)

        # parts already stand in the order of their first calls
        first_places = _first_places(merged_part, len(index_of_part))
        is_in_order = (np.diff(first_places, append=len(merged_part)) > 0).all()
        if is_in_order:
            return merged
        return merged.taken(np.arange(len(merged)))

    # -- a sequence of entries --------------------------------------------------------------------
    def __len__(self) -> int:
        return len(self.part)

    @overload
    def __getitem__(self, place: int) -> Entry: ...

    @overload
    def __getitem__(self, place: slice) -> Calls: ...

    def __getitem__(self, place: int | slice) -> Entry | Calls:
        if isinstance(place, slice):
            return self.taken(np.arange(len(self))[place])
        part = self.parts[self.part[place]]
        record, seq = int(self.record[place]), int(self.seq[place])
        calls, created_ns = int(self.calls[place]), int(self.created_ns[place])
        return Entry._make((record, *part[:3], seq, calls, *part[3:], created_ns))

    def __iter__(self) -> Iterator[Entry]:
        # calls outnumber parts by far: a part is cut once, not for each call
        heads = [part[:3] for part in self.parts]
        tails = [part[3:] for part in self.parts]
        columns = (self.part, self.record, self.seq, self.calls, self.created_ns)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for index, record, seq, calls, created_ns in rows:
            fields = (record, *heads[index], seq, calls, *tails[index], created_ns)
            yield Entry._make(fields)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(self) != len(other):
            return False
        return all(map(Entry.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[object, ...]:
        # what was computed of the columns stays behind
        columns = (self.part, self.record, self.seq, self.calls, self.created_ns)
        return Calls, (self.parts, *columns)

    def place_of(self, entry: Entry) -> int:
        """Return the first place at which a call stands.

        Raises:
            ValueError: It is not among these.
        """
        # columns first: an Entry for each of a million calls would be made to be dropped
        is_like = (self.record == entry.record) & (self.seq == entry.seq)
        for place in np.flatnonzero(is_like).tolist():
            if self[place] == entry:
                return int(place)
        raise ValueError(f"record {entry.record} is not among these calls")

    # -- other sequences --------------------------------------------------------------------------
    def taken(self, places: Integers | Flags) -> Calls:
        """Return the calls at some places, in that order, or those for which a flag is set."""
        part = self.part[places]
        first_places = _first_places(part, len(self.parts))
        kept = np.flatnonzero(first_places < len(part))
        kept = kept[np.argsort(first_places[kept])]
        new_index = np.zeros(len(self.parts), np.int64)
        new_index[kept] = np.arange(len(kept))
        return Calls(
            tuple(self.parts[index] for index in kept.tolist()),
            new_index[part],
            self.record[places],
            self.seq[places],
            self.calls[places],
            self.created_ns[places],
        )

    def followed_by(self, entries: Sequence[Entry]) -> Calls:
        """Return these calls and more behind them."""
        if not entries:
            return self
        more = Calls.of(entries)
        return Calls.of_columns(
            (*self.parts, *more.parts),
            np.concatenate([self.part, more.part + len(self.parts)]),
            np.concatenate([self.record, more.record]),
            np.concatenate([self.seq, more.seq]),
            np.concatenate([self.calls, more.calls]),
            np.concatenate([self.created_ns, more.created_ns]),
        )

    def with_parts(self, changed: Mapping[int, CallPart]) -> Calls:
        """Return the calls with other parts: place -> its new part."""
        if not changed:
            return self
        # columns are shared with other sequences, which must not change
        part = self.part.copy()
        part[list(changed)] = np.arange(len(changed)) + len(self.parts)
        return self._with_new_parts(part, (*self.parts, *changed.values()))

    def with_descriptions(self, described: Callable[[CallPart], str]) -> Calls:
        """Return the calls with other descriptions of their groups."""
        parts = [part._replace(desc=described(part)) for part in self.parts]
        return self._with_new_parts(self.part, parts)

    def with_groups(self, new_names: Mapping[str, str]) -> Calls:
        """Return the calls with other names of their groups: name -> new name."""
        parts = [part._replace(group=new_names.get(part.group, part.group)) for part in self.parts]
        return self._with_new_parts(self.part, parts)

    def _with_new_parts(self, part: NDArray[np.int64], parts: Iterable[CallPart]) -> Calls:
        """Return the calls with other parts, and the indices of these."""
        return Calls.of_columns(parts, part, self.record, self.seq, self.calls, self.created_ns)

    # -- columns ----------------------------------------------------------------------------------
    def flags(self, condition: Callable[[CallPart], object]) -> Flags:
        """Tell of each call whether a condition holds for its part."""
        holds = [bool(condition(part)) for part in self.parts]
        return self.per_part(holds, np.bool_)

    def per_part(self, values: Sequence[object], dtype: type[np.generic] = np.int64) -> NDArray:  # type: ignore[type-arg]
        """Return the value of each call's part.

        Args:
            values: Of each part.
            dtype: Of the column.
        """
        return np.array(values, dtype)[self.part]

    @cached_property
    def pair(self) -> Flags:
        """Which calls are sends or receives."""
        return self.flags(lambda part: part.to >= 0)

    @cached_property
    def done(self) -> Flags:
        """Which calls are over."""
        return self.flags(lambda part: part.done)

    @cached_property
    def closes_batch(self) -> Flags:
        """Which records close batches."""
        return self.flags(lambda part: part.closes_batch)

    @cached_property
    def is_history(self) -> bool:
        """Whether some call is over."""
        return any(part.done for part in self.parts)

    @cached_property
    def places_of_part(self) -> list[Integers]:
        """Places of the calls of each part, ascending."""
        if not self.parts:
            return []
        order = np.argsort(self.part, kind="stable")
        ends = np.cumsum(np.bincount(self.part, minlength=len(self.parts)))
        return np.split(order, ends[:-1])

    @property
    def parts_and_places(self) -> Iterable[tuple[CallPart, Integers]]:
        """Each part, and the places of its calls, ascending."""
        return zip(self.parts, self.places_of_part, strict=True)

    def places(self, condition: Callable[[CallPart], object]) -> Integers:
        """Return the places of calls with parts for which a condition holds, ascending."""
        of_parts: list[Integers] = []
        for part, places in self.parts_and_places:
            if condition(part):
                of_parts.append(places)
        if not of_parts:
            return np.empty(0, np.int64)
        if len(of_parts) == 1:
            return of_parts[0]
        return np.sort(np.concatenate(of_parts))

    @cached_property
    def collectives_of_group(self) -> dict[str, Integers]:
        """Group -> places of its collectives, with records that close batches, ascending."""
        return self._places_of_groups(of_messages=False)

    @cached_property
    def messages_of_group(self) -> dict[str, Integers]:
        """Group -> places of its messages, ascending."""
        return self._places_of_groups(of_messages=True)

    def _places_of_groups(self, of_messages: bool) -> dict[str, Integers]:
        """Return the places of messages, or of what is none, of each group that has any."""
        pieces: dict[str, list[Integers]] = {}
        for part, places in self.parts_and_places:
            if part.pair == of_messages:
                pieces.setdefault(part.group, []).append(places)
        return {group: np.sort(np.concatenate(places)) for group, places in pieces.items()}

    def launches(self) -> list[Launch]:
        """Return the launch of each call."""
        kinds = [(part.group, part.to >= 0) for part in self.parts]
        launches: list[Launch] = []
        for index, seq in zip(self.part.tolist(), self.seq.tolist(), strict=True):
            group, is_message = kinds[index]
            launches.append((group, is_message, seq))
        return launches


def _first_places(part: NDArray[np.int64], count: int) -> Integers:
    """Return the first place of each index below ``count``; behind the end for those without."""
    first_places = np.full(count, len(part), np.int64)
    # of places that are written twice the last one stays
    first_places[part[::-1]] = np.arange(len(part) - 1, -1, -1)
    return first_places


NO_CALLS = Calls.of(())
