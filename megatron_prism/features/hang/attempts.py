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

    file, line : where it stands
    fired_s    : when a watchdog fired, in seconds of the year; -1: not known, or none did
    issued_s   : when the call was issued that timed out; -1 likewise
    call       : (group, number) of a call that timed out; "" where the group is not known
    start      : how often the job had started in that file before the line
    attempt    : what the path of the file says: attempt_1 of torchrun
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
    kept = [record for record in records if record.attempt == latest]
    kept = _of_last_start(kept)
    return _of_last_times(_of_last_calls(kept))


def _of_last_start(records: Sequence[Record[T]]) -> list[Record[T]]:
    """Drop what stands before the last start in its file, if anything stands after it."""
    starts: dict[int, int] = defaultdict(int)
    for record in records:
        starts[record.file] = max(starts[record.file], record.start)
    return [record for record in records if record.start == starts[record.file]]


def _of_last_calls(records: Sequence[Record[T]]) -> list[Record[T]]:
    """Drop what ranks printed before they waited in another call of the same group."""
    last = _last_calls(records)
    early: set[tuple[str, int]] = set()
    for record in records:
        if record.call is None or not record.call[0]:
            continue
        if record.call[1] != last[record.rank, record.call[0]]:
            early.add(record.call)
    # also of ranks that spoke in that attempt alone
    return _without(records, {id(record) for record in records if record.call in early})


def _last_calls(records: Iterable[Record[T]]) -> Mapping[tuple[int, str], int]:
    """(rank, group) -> the number of the call in which its watchdog fired last."""
    found: dict[tuple[int, str], tuple[float, int]] = {}
    for record in records:
        if record.call is not None and record.call[0]:
            key = record.rank, record.call[0]
            # files are in no order: times decide where both are known
            if key not in found or record.fired_s < 0 or record.fired_s >= found[key][0]:
                found[key] = record.fired_s, record.call[1]
    return {key: number for key, (_, number) in found.items()}


def _of_last_times(records: Sequence[Record[T]]) -> list[Record[T]]:
    """Drop what was printed before the last calls were issued."""
    timed = [record for record in records if record.fired_s >= 0 and record.issued_s >= 0]
    timed.sort(key=lambda record: record.issued_s)
    calls = {record.call for record in timed}
    boundary = -1
    for place in range(1, len(timed)):
        fired = max(record.fired_s for record in timed[:place])
        gap = timed[place].issued_s - fired
        before = {record.call for record in timed[:place]}
        after = {record.call for record in timed[place:]}
        # the same call on both sides: a clock is wrong, or it does no harm
        if _APART_S < gap < _WEEK_S and before.isdisjoint(after):
            boundary = place
    if boundary < 0 or len(calls) < 2:
        return list(records)
    gone = {(record.rank, record.call) for record in timed[:boundary]}
    return _without(records, {id(r) for r in records if (r.rank, r.call) in gone})


def _without(records: Sequence[Record[T]], gone: set[int]) -> list[Record[T]]:
    """Drop records, and what stands in their files before them, or in files without any other
    call.
    """
    if not gone:
        return list(records)
    last_gone: dict[int, int] = {}
    first_kept: dict[int, int] = {}
    for record in records:
        if id(record) in gone:
            last_gone[record.file] = max(last_gone.get(record.file, 0), record.line)
        elif record.call is not None:
            first_kept[record.file] = min(first_kept.get(record.file, 1 << 60), record.line)
    kept = []
    for record in records:
        end = last_gone.get(record.file, -1)
        only_gone = record.file in last_gone and record.file not in first_kept
        before = record.line <= end < first_kept.get(record.file, -1)
        if not (id(record) in gone or only_gone or before):
            kept.append(record)
    return kept
