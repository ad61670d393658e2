"""What do the entries of one dump say?  Foreign dictionaries as ``Entry`` values, checked.

In : the list of a dump's entries, of any version.  Out: a tuple of Entry.  DumpError names the
entry that is none.  A thousand dumps hold millions, nearly all alike but for their numbers: what
torch writes since 2.5 is read by columns, anything else entry by entry; both say the same.
"""

from __future__ import annotations

import functools
import operator
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from megatron_prism.core.collectives import TABLE
from megatron_prism.core.errors import DumpError
from megatron_prism.hang.dumps import Entry

__all__ = ["aborted", "entries_of", "integer", "of_batches", "typed"]

T = TypeVar("T")
Row = Mapping[str, Any]  # one entry as torch, or whoever wrote the file, has it: unchecked

_NAMES = {row.recorder: row.name for row in TABLE} | {row.name: row.name for row in TABLE}
_NAMES |= {method: row.name for row in TABLE for method in row.methods}
_NAMES |= {"_broadcast_oop": "broadcast", "_reduce_oop": "reduce", "ALLGATHER_coalesced":
           "all_gather", "REDUCE_SCATTER_coalesced": "reduce_scatter", "all_to_allv": "all_to_all",
           "all_reduce_barrier": "barrier", "all_gather_into_tensor_coalesced": "all_gather",
           "_all_gather_base_coalesced": "all_gather"}  # fmt: skip


def entries_of(raw: Sequence[Row]) -> tuple[Entry, ...]:
    """All entries, in the order of the dump."""
    return (_columns(raw) if raw else ()) or tuple(_entry(e, i) for i, e in enumerate(raw))


_COUNTED = operator.itemgetter(
    "record_id", "time_created_ns", "timeout_ms", "collective_seq_id", "p2p_seq_id"
)
_SAID = operator.itemgetter(
    "process_group", "profiling_name", "state", "retired",
    "input_sizes", "output_sizes", "input_dtypes", "output_dtypes",
)  # fmt: skip


def _columns(raw: Sequence[Row]) -> tuple[Entry, ...]:
    """The same in 2.2 us an entry instead of 3.6; nothing if a single one is unusual."""
    kinds: dict[object, Entry] = {}
    like = []
    try:
        columns = list(zip(*map(_COUNTED, raw), strict=True))
        for number, row in enumerate(raw):
            group, name, state, done, ins, outs, words, others = _SAID(row)
            frames = row.get("frames")
            site = (frames[0]["filename"], frames[0]["line"]) if frames else None
            sizes = tuple(map(tuple, ins)), tuple(map(tuple, outs))
            key = (group, name, state, done, sizes, tuple(words), tuple(others), site)
            kind = kinds.get(key)
            if kind is None:
                kind = kinds[key] = _entry(row, number)
            like.append(kind)
    except (DumpError, KeyError, TypeError, ValueError, IndexError):
        return ()  # let ``_entry`` say which
    for column in columns:
        if (
            set(map(type, column)) != {int}
            or not -(1 << 63) <= min(column) <= max(column) < 1 << 63
        ):
            return ()
    record, created, timeout, calls, messages = columns
    said = dict(zip(Entry._fields, zip(*like, strict=True), strict=True))
    seq = [m if to >= 0 else c for m, to, c in zip(messages, said["to"], calls, strict=True)]
    said |= {"record": record, "created_ns": created, "timeout_ms": timeout, "calls": calls}
    return tuple(map(Entry._make, zip(*(said | {"seq": tuple(seq)}).values(), strict=True)))


def of_batches(entries: tuple[Entry, ...], ended: Collection[str] = ()) -> tuple[Entry, ...]:
    """With the state of its batch for what was issued in one (``batch_isend_irecv``, coalesced).

    ended : groups in which, by their counters, everything that was issued is over

    torch never updates these records themselves: they stay "scheduled" for good, also among the
    outstanding ones, and only the record that closes the batch ends (pytorch issue 137969).
    """
    ends = [at for at, entry in enumerate(entries) if entry.op == "coalesced"]
    if not ends and any(entry.done for entry in entries):
        return entries
    made, closed, cut = list(entries), set(ends), 0
    before: dict[str, list[int]] = {}  # records of each group since its last batch
    for end, last in enumerate(made):
        since = before.setdefault(last.group, [])
        if last.op != "coalesced":
            since.append(end)
            continue
        before[last.group] = []
        if not since or not made[since[-1]].pair and made[since[-1]].seq != last.seq:
            continue  # before torch 2.7 what is inside a batch of collectives has no record
        launch = made[since[-1]].launch
        while since and made[since[-1]].launch == launch:
            at = since.pop()
            closed.add(at)
            made[at] = made[at]._replace(state=last.state, done=last.done)
            if not at and last.done and made[0].record > 0:
                cut = end + 1  # the ring may hold only the end of it, which is like no sibling's
    if any(entry.done for entry in made):
        return tuple(made[cut:])
    # only what is outstanding: batches that ended are left without the record that says so
    issued = Counter(e.launch for at, e in enumerate(made) if at not in closed and e.seq >= 0)
    batched = {group for (group, pair, _), count in issued.items() if pair and count > 1}
    batched |= {made[at].group for at in closed if made[at].pair} | set(ended)
    return tuple(e for at, e in enumerate(made) if at in closed or e.state != "scheduled" or (
        issued[e.launch] < 2 and not (e.pair and e.group in batched)))  # fmt: skip


def aborted(raw: Sequence[Row]) -> set[int]:
    """Places of a group's last calls that are over because they were aborted, not because they
    ended: ProcessGroupNCCL looks once more whether a call ended before it retires it.

    Where the kernel ends with its communicator it looks as if it had: behind the time-out, and
    behind everything that this rank issued.
    """
    over = [at for at, row in enumerate(raw) if row.get("retired")]
    issued = max((_clock(row, "time_created_ns") for row in raw), default=0)
    ended, found = set[str](), set[int]()
    for at in reversed(over):
        row, group = raw[at], str(raw[at]["process_group"][0])
        if group in ended or not str(row.get("profiling_name", "")).startswith("nccl:"):
            continue
        end, limit = _clock(row, "time_discovered_completed_ns"), _clock(row, "timeout_ms") * 10**6
        late = 0 < limit <= end - _clock(row, "time_created_ns") and end > issued
        if row.get("state") != "completed" or late:
            found.add(at)
        else:
            ended.add(group)
    return found


def _clock(row: Row, key: str) -> int:
    value = row.get(key)
    return value if type(value) is int else 0


def typed(value: object, kind: type[T], what: str) -> T:
    """``value`` if it is a ``kind``; DumpError if not."""
    if not isinstance(value, kind):
        raise DumpError(f"{what} is a {type(value).__name__}, not a {kind.__name__}")
    return value


def integer(value: object, what: str, default: int = -1, entry: int = -1) -> int:
    """A number of 64 bits, also from text; DumpError names ``what`` is none."""
    if type(value) is int and -(1 << 63) <= value < 1 << 63:
        return value  # nearly always; there are millions of them
    if value is None:
        return default
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,19}", value):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or not -(1 << 63) <= value < 1 << 63:
        raise DumpError(f"entry {entry}: {what} is no number" if entry >= 0 else
                        f"{what} is no number")  # fmt: skip
    return int(value)


_PAIR = re.compile(r"(send|recv) (\d+)(->|<-)(\d+)")


@functools.lru_cache(1 << 14)
def _one(value: T) -> T:
    """The same object for equal values, so that a million entries share their sizes and sites."""
    return value


@functools.lru_cache(1 << 14)
def _called(text: str) -> tuple[str, int]:
    """(operation, group rank of the other side or -1) of a profiling_name."""
    word = text[:200].rpartition(":")[2]
    pair = _PAIR.match(word)
    return (pair[1], int(pair[4][:9])) if pair else (_NAMES.get(word, word), -1)


def _entry(row: Row, number: int) -> Entry:
    get = row.get
    group = get("process_group")
    if not isinstance(group, tuple | list) or len(group) != 2:
        raise DumpError(f"entry {number} has no process_group (name, description)")
    name = str(get("profiling_name", ""))
    op, to = _called(name)
    sizes = get("input_sizes")
    if not sizes and name.endswith("_coalesced"):
        op = "coalesced"  # what closes a batch of collectives
    calls = integer(get("collective_seq_id", get("seq_id")), "its sequence", entry=number)
    seq = integer(get("p2p_seq_id"), "p2p_seq_id", entry=number) if to >= 0 else calls
    state = str(get("state", ""))[:20]
    frames = get("frames") or []
    first = frames[0] if isinstance(frames, list) and frames else None
    site = f"{first.get('filename')}:{first.get('line')}"[:300] if isinstance(first, dict) else ""
    dtypes = tuple(map(str, (*(get("input_dtypes") or ()), *(get("output_dtypes") or ()))))
    return Entry(
        integer(get("record_id", get("id")), "record_id", number, number),
        str(group[0]),
        str(group[1])[:200],
        op,
        seq,
        calls,
        to,
        _one((_numbers(sizes), _numbers(get("output_sizes")))),
        _one(dtypes),
        state,
        bool(get("retired")) or state == "completed",
        _one(site),
        integer(get("timeout_ms"), "timeout_ms", entry=number),
        integer(get("time_created_ns"), "time_created_ns", entry=number),
    )


def _numbers(sizes: object) -> tuple[int, ...]:
    """Elements of each tensor."""
    found = []
    for shape in sizes if type(sizes) is list else typed(sizes or [], list, "sizes"):
        count = 1
        for side in shape if type(shape) is list else typed(shape, list, "a size"):
            count *= side if type(side) is int else integer(side, "a size")
        found.append(count if abs(count) < 1 << 63 else -1)
    return tuple(found)
