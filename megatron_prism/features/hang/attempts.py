"""Attempts of one job whose logs are mixed: what the last one printed is judged, and only that.

In : records of several logs, in their order.  Out: those of the last attempt.  A job that is
started again counts its calls from 1, so calls of two attempts say nothing of each other.

An attempt ends where a log says that the job starts, where a rank waits in another call of a group
in which it waited before (its watchdog takes the process down), and where a call was issued after
another rank's watchdog had fired.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

_DAY_S = 86_400
_APART_S = 60.0  # clocks of hosts, and a restart takes longer
_WEEK_S = 7 * _DAY_S  # logs further apart are of no two attempts


@dataclass(frozen=True)
class Record(Generic[T]):
    """What one line says.

    Attributes:
        rank: Of which it is.
        file: Number of the file.
        line: Number of the line.
        value: What the line says.
        fired_s: When a watchdog fired, in seconds of the year; -1: not known, or none did.
        issued_s: When the call was issued that timed out; -1 likewise.
        call: (group, number) of a call that timed out; the group is "" where it is not known.
        start: How often the job had started in that file before the line.
        attempt: What the path of the file says: attempt_1 of torchrun.
    """

    rank: int
    file: int
    line: int
    value: T
    fired_s: float = -1.0
    issued_s: float = -1.0
    call: tuple[str, int] | None = None
    start: int = 0
    attempt: int = 0


def last_attempt(records: Sequence[Record[T]]) -> list[Record[T]]:
    """Keep what the last attempt printed."""
    latest = max((record.attempt for record in records), default=0)
    of_latest = [record for record in records if record.attempt == latest]
    return _of_last_times(_of_last_calls(_of_last_start(of_latest)))


def _of_last_start(records: Sequence[Record[T]]) -> list[Record[T]]:
    """Drop what stands before the last start in its file, if anything stands after it."""
    starts: dict[int, int] = defaultdict(int)
    for record in records:
        starts[record.file] = max(starts[record.file], record.start)
    return [record for record in records if record.start == starts[record.file]]


def _of_last_calls(records: Sequence[Record[T]]) -> list[Record[T]]:
    """Drop what ranks printed before they waited in another call of the same group."""
    last_records = _last_records(records)
    early_calls: set[tuple[str, int]] = set()
    for record in records:
        if record.call is None or not record.call[0]:
            continue
        last = last_records[record.rank, record.call[0]]
        if record.call != last.call and not _is_queued_behind(record, last):
            early_calls.add(record.call)
    # also of ranks that spoke in that attempt alone
    dropped = {id(record) for record in records if record.call in early_calls}
    return _without(records, dropped)


def _is_queued_behind(first: Record[T], last: Record[T]) -> bool:
    """Tell whether the call of ``last`` is queued behind that of ``first``: both time out.

    A watchdog that does not take its process down prints each of them.
    """
    assert first.call is not None, "records of calls"
    assert last.call is not None, "records of calls"
    # no attempt follows so soon
    is_same_moment = first.fired_s >= 0 and 0 <= last.fired_s - first.fired_s < _APART_S
    return is_same_moment and first.call[1] < last.call[1]


def _last_records(records: Iterable[Record[T]]) -> Mapping[tuple[int, str], Record[T]]:
    """Return (rank, group) -> the record of the call in which the rank's watchdog fired last."""
    last_records: dict[tuple[int, str], Record[T]] = {}
    for record in records:
        if record.call is None:
            continue
        group, _ = record.call
        key = (record.rank, group)
        last = last_records.get(key)
        # files are in no order: times decide where both are known
        is_later = last is None or record.fired_s < 0 or record.fired_s >= last.fired_s
        if group and is_later:
            last_records[key] = record
    return last_records


def _of_last_times(records: Sequence[Record[T]]) -> list[Record[T]]:
    """Drop what was printed before the last calls were issued."""
    timed: list[Record[T]] = []
    for record in records:
        if record.fired_s >= 0 and record.issued_s >= 0:
            timed.append(record)
    timed.sort(key=lambda record: record.issued_s)
    calls = {record.call for record in timed}
    early_count = _count_before_last_break(timed)
    if early_count == 0 or len(calls) < 2:
        return list(records)
    early_calls = {(record.rank, record.call) for record in timed[:early_count]}
    dropped: set[int] = set()
    for record in records:
        if (record.rank, record.call) in early_calls:
            dropped.add(id(record))
    return _without(records, dropped)


def _count_before_last_break(timed: Sequence[Record[T]]) -> int:
    """Return how many records stand before the last break between two attempts; 0 without one.

    Args:
        timed: Records with both times, by the time of issue.
    """
    early_count = 0
    for place in range(1, len(timed)):
        last_fired_s = max(record.fired_s for record in timed[:place])
        gap_s = timed[place].issued_s - last_fired_s
        calls_before = {record.call for record in timed[:place]}
        calls_after = {record.call for record in timed[place:]}
        # the same call on both sides: a clock is wrong, or it does no harm
        if _APART_S < gap_s < _WEEK_S and calls_before.isdisjoint(calls_after):
            early_count = place
    return early_count


def _without(records: Sequence[Record[T]], dropped: set[int]) -> list[Record[T]]:
    """Drop records, and what stands in their files before them.

    Of a file without any other call nothing remains.

    Args:
        records: Of several files.
        dropped: Identities of records.
    """
    if not dropped:
        return list(records)
    last_dropped_line: dict[int, int] = {}
    first_kept_line: dict[int, int] = {}
    for record in records:
        file = record.file
        if id(record) in dropped:
            last_dropped_line[file] = max(last_dropped_line.get(file, 0), record.line)
        elif record.call is not None:
            first_kept_line[file] = min(first_kept_line.get(file, 1 << 60), record.line)

    remaining: list[Record[T]] = []
    for record in records:
        file = record.file
        last_dropped = last_dropped_line.get(file, -1)
        has_only_dropped = file in last_dropped_line and file not in first_kept_line
        is_before = record.line <= last_dropped < first_kept_line.get(file, -1)
        if id(record) not in dropped and not has_only_dropped and not is_before:
            remaining.append(record)
    return remaining
