"""Read Flight Recorder dumps: safely, in parallel, as entries, groups and status.

``pg_status`` and entries count from 1; sequence numbers are per group, as ProcessGroupNCCL counts.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import re
import signal
import threading
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Generator, Iterable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path

import msgspec
import numpy as np

from megatron_prism.core import foreign
from megatron_prism.core.errors import DumpError, shown
from megatron_prism.core.files import no_collector
from megatron_prism.core.foreign import bounded_memory
from megatron_prism.features.hang import cut_json, recorded
from megatron_prism.features.hang.calls import NO_CALLS, CallPart, Calls, Flags, Launch
from megatron_prism.features.hang.log_lines import Differ
from megatron_prism.features.hang.recorded import LARGEST, Int64, RawCall, RecordedCalls

UNNAMED = "a group without a name"  # desc of one that a log does not name


@dataclass(frozen=True, slots=True)
class Group:
    """One process group: its name, Megatron's group_desc, its global ranks in group order.

    partial : of a log that does not say who belongs to it: these are the ranks that speak of it
    """

    name: str
    desc: str
    ranks: tuple[int, ...]
    partial: bool = False


@dataclass(frozen=True, slots=True)
class Status:
    """Last call of a group that this rank enqueued, saw start (-1: unknown) and saw complete."""

    enqueued: int
    started: int
    completed: int


@dataclass(frozen=True, slots=True)
class Dump:
    """One rank's dump; ``notes`` says what it lacks.

    ids     : this rank's number of a group -> the group's name, as its calls say
    unnamed : numbers of which it does not say whose they are -> their counters
    messages : all sends and receives since the job began, where these are left of a dump of
               outstanding calls: torch never ends the records inside a batch
    assumed : groups whose counters it does not have: it is taken to have come to all calls
    is_cut  : its file ends too early: it has the counters, and of the calls those that ended before
              the cut
    written_ns : when its file was written, by the clock of its calls; 0 if that is not known
    """

    rank: int
    version: str
    groups: Mapping[str, Group]
    status: Mapping[str, Status]
    entries: Calls
    notes: tuple[str, ...] = ()
    ids: Mapping[str, str] = field(default_factory=dict)
    unnamed: Mapping[str, Status] = field(default_factory=dict)
    written_ns: int = 0
    messages: Calls = field(default_factory=lambda: NO_CALLS)
    assumed: frozenset[str] = frozenset()
    is_cut: bool = False


@dataclass(frozen=True)
class RankEvent:
    """What a log says of a rank.

    kind: exception, out of memory, killed; handled: an exception after which the rank went on;
    logged: one that perhaps did not end it; outside: it waited for others in a call outside NCCL;
    or where its stack is: in a call of torch.distributed, at work.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class RankWait:
    """The call in which a rank waits, as its log names it; ``desc``: of the group."""

    rank: int
    op: str
    seq: int
    desc: str


@dataclass(frozen=True)
class DumpSet:
    """The dumps of a folder by rank, and what logs say beside them.

    unreadable : rank -> why its file could not be read
    events     : rank -> what became of it, by its log
    evidence   : what logs say of the job
    waits      : the calls that timed out, by what watchdogs print
    differ     : calls that differ, by torch's own check
    absent     : ranks that did not come to a monitored barrier, by what the others print
    logged     : ranks of which there is a line in a log
    world      : how many ranks the job has, by its log; 0: it does not say so
    cut_log    : whether a log of several ranks ends too early: more of them may have spoken in it
    """

    dumps: Mapping[int, Dump]
    unreadable: Mapping[int, str] = field(default_factory=dict)
    events: Mapping[int, tuple[RankEvent, ...]] = field(default_factory=dict)
    evidence: tuple[str, ...] = ()
    waits: tuple[RankWait, ...] = ()
    differ: tuple[Differ, ...] = ()
    absent: tuple[int, ...] = ()
    logged: frozenset[int] = frozenset()
    world: int = 0
    cut_log: bool = False

    @cached_property
    def listed(self) -> Mapping[str, Counter[Group]]:
        """Group name -> how many dumps list which members, of those that list any."""
        same: Counter[tuple[str, int]] = Counter()  # mostly one object: hashing its ranks is slow
        objects: dict[int, Group] = {}
        for dump in self.dumps.values():
            for name, group in dump.groups.items():
                if group.ranks:
                    same[name, id(group)] += 1
                    objects[id(group)] = group
        found: dict[str, Counter[Group]] = defaultdict(Counter)
        for (name, number), count in same.items():
            found[name][objects[number]] += count
        return found


def calls_of(recorded_calls: RecordedCalls) -> Calls:
    """Return recorded calls, in the order of the dump."""
    is_message = np.array([part.call.to >= 0 for part in recorded_calls.parts], np.bool_)

    # a message is counted among the messages of its group
    seqs = recorded_calls.collectives
    if is_message.any():
        is_message_of_call = is_message[recorded_calls.part]
        seqs = np.where(is_message_of_call, recorded_calls.messages, recorded_calls.collectives)

    # calls of a group that was aborted and made again may read the same
    return Calls.of_columns(
        [part.call for part in recorded_calls.parts],
        recorded_calls.part,
        recorded_calls.records,
        seqs,
        recorded_calls.collectives,
        recorded_calls.created_ns,
    )


def of_batches(calls: Calls, ended: Collection[str] = ()) -> Calls:
    """With the state of its batch for what was issued in one (``batch_isend_irecv``, coalesced).

    ended : groups in which, by their counters, everything that was issued is over

    torch never updates these records themselves: they stay "scheduled" for good, also among the
    outstanding ones, and only the record that closes the batch ends (pytorch issue 137969).
    """
    closing_groups = {part.group for part in calls.parts if part.closes_batch}
    if not closing_groups and calls.is_history:
        return calls
    changed: dict[int, CallPart] = {}
    closed = np.zeros(len(calls), np.bool_)
    first_kept = 0
    for group in closing_groups:
        batches = _batches_of_group(calls, group)
        for batch in batches:
            closed[batch.closing] = True
            closing = calls.parts[calls.part[batch.closing]]
            for place in batch.members:
                closed[place] = True
                part = calls.parts[calls.part[place]]
                changed[place] = part._replace(state=closing.state, done=closing.done)

            # the ring may hold only the end of it, which is like no sibling's
            if 0 in batch.members and closing.done and calls.record[0] > 0:
                first_kept = batch.closing + 1
    with_states = calls.with_parts(changed)
    if with_states.is_history:
        return with_states[first_kept:]
    return with_states.taken(_outstanding(with_states, closed, ended))


@dataclass(frozen=True)
class _Batch:
    """A batch whose closing record is there.

    Attributes:
        closing: Place of the record that closes it.
        members: Places of the calls that were issued in it; none where they have no records.
    """

    closing: int
    members: list[int]


def _batches_of_group(calls: Calls, group: str) -> list[_Batch]:
    """Return the batches of a group whose closing records are there, in their order."""
    places: list[int] = calls.places(lambda part: part.group == group).tolist()
    closes_batch = calls.closes_batch[places].tolist()
    is_message = calls.pair[places].tolist()
    seqs = calls.seq[places].tolist()
    batches: list[_Batch] = []
    first_since = 0
    for end, closes in enumerate(closes_batch):
        if not closes:
            continue
        members: list[int] = []
        last = end - 1

        # before torch 2.7 what is inside a batch of collectives has no record
        has_records = last >= first_since and (is_message[last] or seqs[last] == seqs[end])
        if has_records:
            launch = is_message[last], seqs[last]
            while last >= first_since and (is_message[last], seqs[last]) == launch:
                members.append(places[last])
                last -= 1
        batches.append(_Batch(places[end], members))
        first_since = end + 1
    return batches


def _outstanding(calls: Calls, closed: Flags, ended: Collection[str]) -> Flags:
    """Tell which calls of a dump of outstanding calls are outstanding.

    Batches that ended are left without the record that says so.

    Args:
        calls: The calls.
        closed: Which of them belong to a batch whose closing record is there.
        ended: Groups in which, by their counters, everything that was issued is over.
    """
    launches = calls.launches()
    is_closed = closed.tolist()
    issued: Counter[Launch] = Counter()
    for place, launch in enumerate(launches):
        if not is_closed[place] and launch[2] >= 0:
            issued[launch] += 1

    # groups of which some message is in a batch
    batched = set(ended)
    for (group, is_message, _), count in issued.items():
        if is_message and count > 1:
            batched.add(group)
    for place in np.flatnonzero(closed & calls.pair).tolist():
        batched.add(launches[place][0])

    kept = closed | calls.flags(lambda part: part.state != "scheduled")
    for place in np.flatnonzero(~kept).tolist():
        group, is_message, _ = launches[place]
        is_in_batch = is_message and group in batched
        kept[place] = issued[launches[place]] < 2 and not is_in_batch
    return kept


def _whole_messages(calls: Calls) -> Calls:
    """Return its messages, if all of them are there: in batches, and none ended by its record."""
    if calls.is_history:
        return NO_CALLS
    messages = calls.taken(calls.pair)
    for places in messages.messages_of_group.values():
        # messages of one batch have one number; the next batch has the next
        steps = np.diff(messages.seq[places], prepend=0)
        if not np.isin(steps, (0, 1)).all():
            return NO_CALLS
    return messages


def aborted(calls: RecordedCalls) -> list[int]:
    """Find calls that are over because they were aborted, not because they ended.

    ProcessGroupNCCL looks once more whether a call ended before it retires it.  Where the kernel
    ends with its communicator it looks as if it had: behind the time-out, and behind everything
    that this rank issued.

    Returns:
        Places of the last calls of groups.
    """
    last_issued_ns = calls.created_ns.max(initial=0)
    end_ns = np.maximum(calls.ended_ns, 0)
    waited_ns = end_ns - np.maximum(calls.created_ns, 0)
    parts_of_group: dict[str, list[int]] = defaultdict(list)
    limits_ns: list[int] = []
    for index, part in enumerate(calls.parts):
        # longer than any clock: such a limit is never over
        limits_ns.append(min(part.call.timeout_ms * 10**6, LARGEST))
        if part.is_retired and part.is_nccl:
            parts_of_group[part.call.group].append(index)
    limit_ns = np.array(limits_ns, np.int64)[calls.part]
    is_late = (limit_ns > 0) & (waited_ns >= limit_ns) & (end_ns > last_issued_ns)
    is_completed = np.array([part.call.state == "completed" for part in calls.parts], np.bool_)
    is_over = ~is_completed[calls.part] | is_late

    places: list[int] = []
    for indices in parts_of_group.values():
        # what a group made before a call that ended did end
        of_group = np.flatnonzero(np.isin(calls.part, indices))
        ended = np.flatnonzero(~is_over[of_group])
        first_aborted = 0
        if len(ended):
            first_aborted = int(ended[-1]) + 1
        places += of_group[first_aborted:].tolist()
    return places


_ENDING = r"(?:\.(?:json|pkl|pickle|trace|bin|pt))?(?:\.gz)?$"
_FILE = re.compile(r"(?:^|\D)(\d{1,9})" + _ENDING)
# of a world's rank, not of a node's, a local or a stage's one: those have a word in front
_RANK = re.compile(
    r"(?:^_?|[^a-z_]_?|(?:trace|dump|global)[_-])rank[_-]?(\d{1,9})(?!\d)", re.IGNORECASE
)
_PLAIN = re.compile(r"[^.]*" + _ENDING)
_LOOSE = re.compile(r"(?<!local)(?<!local[_-])rank[_-]?(\d{1,9})(?!\d)", re.IGNORECASE)
_OF_NODE = re.compile(r"(?:node|machine|host|agent|local)[_-]?rank[_=-]?\d{1,9}", re.IGNORECASE)
_PACKED = re.compile(r"\.(?:tgz|zst|xz|bz2|lz4|zip|tar)$|\.tar\.gz$")
_LIMIT = 1 << 28  # bytes of one file; full dumps with C++ stacks are a few MB
FIX = "name the folder that the job's recorders wrote into (TORCH_FR_DUMP_TEMP_FILE)"


def read_in_process(folder: str | os.PathLike[str]) -> DumpSet:
    """All dumps in ``folder``.  DumpError if there is none to read, or one that is hostile."""
    found = dump_files(Path(folder))
    # values without cycles by the million: looking for cycles would cost more than reading
    with bounded_memory(max(file.stat().st_size for file in found.values())), no_collector():
        return gather((rank, load(rank, file)) for rank, file in sorted(found.items()))


def load(rank: int, file: Path) -> Dump | DumpError:
    """One dump, or why it cannot be read."""
    try:
        made = parse(_bytes(file), rank, str(file))
        return replace(made, rank=_named_otherwise(made), written_ns=file.stat().st_mtime_ns)
    except DumpError as error:
        return error


def _named_otherwise(dump: Dump) -> int:
    """Its rank, or where that is no rank of its groups, such as a port, the one in all of them."""
    groups = [set(group.ranks) for group in dump.groups.values() if group.ranks]
    # a dump whose name has a rank of its groups is believed; `_is_of` checks it
    if not groups or dump.rank in set.union(*groups):
        return dump.rank
    own = set.intersection(*groups)
    return own.pop() if len(own) == 1 else dump.rank


def gather(loaded: Iterable[tuple[int, Dump | DumpError]]) -> DumpSet:
    """The set of (rank, dump or why there is none), ranks ascending.  DumpError as ``read``."""
    dumps, broken = {}, {}
    for rank, found in loaded:
        # a file that tries to run code is an attack: its neighbours are not trusted either
        if isinstance(found, HostileError):
            raise found
        if isinstance(found, DumpError):
            broken[rank] = found.message
        else:
            _is_of(found)
            # dumps of two hangs in one folder would be judged as one
            if found.rank in dumps:
                raise DumpError(
                    f"two files are of rank {found.rank}",
                    fix="keep the dumps of one hang per folder",
                )
            dumps[found.rank] = found
    if not dumps:
        raise DumpError(next(iter(broken.values())), fix=FIX)
    return DumpSet(dumps, broken)


def _is_of(dump: Dump) -> None:
    """A dump under another rank's name would make that rank the culprit: DumpError.

    Nothing in it says whose it is, but whoever calls in a group is a member of it.
    """
    used_names = {part.group for part in dump.entries.parts}
    for name, status in dump.status.items():
        if status.enqueued > 0:
            used_names.add(name)
    members_of_used: list[tuple[int, ...]] = []
    for name in used_names & dump.groups.keys():
        if dump.groups[name].ranks:
            members_of_used.append(dump.groups[name].ranks)
    foreign_groups = [members for members in members_of_used if dump.rank not in members]
    if not foreign_groups:
        return

    # whoever wrote it is a member of all of them
    possible_ranks = set(foreign_groups[0]).intersection(*members_of_used)
    writer = f"one of the ranks {sorted(foreign_groups[0])[:8]}"
    if len(possible_ranks) == 1:
        writer = f"rank {min(possible_ranks)}"
    raise DumpError(
        f"the dump that is named as rank {dump.rank}'s was written by {writer}: it has calls of "
        f"groups without rank {dump.rank}",
        fix="name every file after the global rank that wrote it, such as _dump_517",
    )


class HostileError(DumpError):
    """It tried to run code: nothing else of the folder is read."""


def dump_files(folder: Path) -> dict[int, Path]:
    """rank -> its file.  DumpError if there are none, or two of one rank."""
    if folder.is_file():
        raise DumpError(f"{folder} is a file", fix=f"name its folder: --dumps {folder.parent}")
    if not folder.is_dir():
        raise DumpError(f"there is no folder {folder}", fix=FIX)
    try:
        paths = sorted(folder.iterdir())
    except PermissionError as error:
        raise DumpError(f"cannot read {folder}: {error.strerror}", fix=FIX) from error
    there = [p for p in paths if _may_be_dump(p.name) and p.is_file()]
    if not there:
        raise DumpError(f"no file in {folder} has a name that ends in a rank", fix=_instead(paths))
    named = [_by_rank(there, word) for word in (_RANK, _LOOSE)]
    for found in named:  # the second: rank_3_20260817 of a job whose name stands in front
        if len(found) == len(there):
            return {rank: paths[0] for rank, paths in found.items()}
    rank, paths = next(row for row in named[0].items() if len(row[1]) > 1)
    raise DumpError(
        f"{paths[0].name} and {paths[1].name} in {folder} are both of rank {rank}",
        fix="keep the dumps of one hang per folder, each named after its global rank",
    )


def has_dumps(folder: Path) -> bool:
    """Whether a file there is named like a dump."""
    return folder.is_dir() and any(_may_be_dump(p.name) and p.is_file() for p in folder.iterdir())


def _may_be_dump(name: str) -> bool:
    """.nfs0012 is no dump of rank 12, rank_3.log none of rank 3."""
    worded = _RANK.search(name) and _PLAIN.match(name)
    return name[0] != "." and bool(_FILE.search(name) or worded)


def _by_rank(paths: list[Path], word: re.Pattern[str]) -> dict[int, list[Path]]:
    """rank -> its files; the rank stands behind the last ``word``, or at the end."""
    found: dict[int, list[Path]] = defaultdict(list)
    for path in paths:
        ends = _FILE.search(path.name)
        found[int((word.findall(path.name) or [ends[1] if ends else -1])[-1])].append(path)
    return found


def rank_of_name(name: str) -> int | None:
    """The global rank that a file's name has; None if it has none."""
    name = _OF_NODE.sub("", name)
    found = _RANK.findall(name) or _LOOSE.findall(name)
    return int(found[-1]) if found else None


def _instead(paths: list[Path]) -> str:
    """What to do about a folder in which no file is a dump."""
    # the name hides the rank, and `no dumps` would send the user to the recorder's settings
    if any(_PACKED.search(path.name) for path in paths):
        return "unpack the files: gunzip, unzstd or tar xf"
    inside = [p for p in paths if os.access(p, os.R_OK | os.X_OK) and has_dumps(p)]
    # a job may write a folder per node: name it, and not only refuse
    if len(inside) < 2:
        return f"name its folder {inside[0]}" if inside else FIX
    several = ", ".join(str(p) for p in inside[:4]) + (" …" if len(inside) > 4 else "")
    return f"one of its folders ({several}), or, if they are a folder per node, put all into one"


def _bytes(path: Path) -> bytes:
    try:
        # a checkpoint in the folder must not be read into memory as a dump
        if path.stat().st_size > _LIMIT:
            raise DumpError(f"{path} has more than {_LIMIT >> 20} MiB: no dump of one rank")
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            # a packed file of some KB may hold gigabytes: it is cut at the limit
            data = zlib.decompressobj(31).decompress(data, _LIMIT)
        if data[:5] == b"HTTP/":  # what curl -i saved of torch's worker server
            data = data.replace(b"\r\n", b"\n").partition(b"\n\n")[2]
        return data
    except (OSError, zlib.error) as error:
        raise DumpError(f"cannot read {path}: {error}", fix=FIX) from error


def parse(data: bytes, rank: int, where: str = "dump") -> Dump:
    """One dump out of the bytes of its file.  DumpError for anything that is none."""
    try:
        head = data[:64].lstrip()[:1]
        if head in (b"{", b"["):
            return _of_json(data, rank)
        value = _unpickled(data)
        if isinstance(value, _CutValue):
            return _before_cut(value, rank)
        return of_value(value, rank)
    except foreign.HostileValueError as error:
        fix = "do not open this file with anything else"
        raise HostileError(f"{where}: {error}", fix=fix) from error
    except (ValueError, MemoryError, RecursionError) as error:
        text = shown(str(error)[:500] or "it is too large")
        raise DumpError(f"{where} is no dump, or damaged: {text}", fix=FIX) from error


def _of_json(data: bytes, rank: int) -> Dump:
    """Read a dump that is written as JSON."""
    try:
        raw = msgspec.json.decode(data, type=_RawDump, strict=False)
    except msgspec.ValidationError:
        # the plain value tells what is wrong with it, and where
        return of_value(foreign.value_of_json(data), rank)
    except (msgspec.DecodeError, RecursionError):
        return _of_cut_json(data, rank)
    return _of_raw(raw, rank)


def _of_cut_json(data: bytes, rank: int) -> Dump:
    """Read a dump in JSON up to its cut.

    torch sorts the keys: the calls come before the counters and the version.

    Raises:
        ValueError: It is not cut, or nothing before the cut tells anything.
    """
    try:
        foreign.value_of_json(data)
    except ValueError as damage:
        try:
            value = _CutValue(cut_json.before_cut(data))
        except ValueError:
            raise damage from None
    keys = list(value)
    is_sorted = "entries" in keys and "version" not in keys
    if not is_sorted:
        return _before_cut(value, rank)

    # counters are whole only if another key follows them
    if keys[-1] == "pg_status":
        del value["pg_status"]
    if not value["entries"]:
        raise ValueError("it is cut off before the end of its first call")
    return _ended_before_cut({**value, "version": _ANY_VERSION}, rank)


class _CutValue(dict[object, object]):
    """What stands before the cut of a dump."""


def _unpickled(data: bytes) -> object:
    """Read the value of a pickle; of one that is cut what stands before the cut."""
    try:
        return foreign.unpickled(data, recorded.check_groups)
    except foreign.HostileValueError:
        raise
    except ValueError as damage:
        try:
            return _CutValue(foreign.unpickled_to_cut(data, recorded.check_groups))
        except foreign.HostileValueError:
            raise
        except ValueError:
            raise damage from None


def _before_cut(value: _CutValue, rank: int) -> Dump:
    """Read a dump to its cut: the counters, and the calls that ended.

    What was outstanding stands at the end of a recorder, behind the cut, or is not whole: a batch
    whose closing record is lost looks outstanding for good.  The counters say how many calls those
    are.

    Raises:
        ValueError: The counters are behind the cut: nothing says how far the rank has come.
    """
    keys = list(value)
    if "pg_status" not in keys or not value["pg_status"] or keys[-1] == "pg_status":
        raise ValueError("it is cut off before the end of its counters, pg_status")
    return _ended_before_cut(value, rank)


def _ended_before_cut(value: Mapping[object, object], rank: int) -> Dump:
    """Read the calls of a dump that ended before its cut."""
    dump = of_value(value, rank)
    ended = dump.entries.taken(dump.entries.done)
    return replace(dump, entries=ended, messages=NO_CALLS, is_cut=True)


_ANY_VERSION = "2.10"  # of a dump whose version stands behind its cut: all are read alike


class _RawGroup(msgspec.Struct):
    ranks: str | list[Int64] = ""
    desc: str | None = ""


class _RawStatus(msgspec.Struct):
    last_enqueued_collective: Int64 | None = None
    last_started_collective: Int64 | None = None
    last_completed_collective: Int64 | None = None


class _RawHead(msgspec.Struct):
    """A dump of which the calls are read as columns."""

    version: str = ""
    pg_config: dict[str | int, _RawGroup | str] | None = None
    pg_status: dict[str | int, _RawStatus] | None = None
    entries: object = None


class _RawDump(_RawHead):
    """A dump of which each call is converted."""

    entries: list[RawCall] | None = None


def of_value(value: object, rank: int) -> Dump:
    """Read a dump out of the value that torch pickles.  ValueError if it is none."""
    head = foreign.shaped(value, _RawHead, strict=False)
    calls = recorded.of_rows(head.entries or [])
    if calls is None:
        # what each call says is converted, and may be written once for all of them
        recorded.check_calls(value)
        return _of_raw(foreign.shaped(value, _RawDump, strict=False), rank)
    return _of_head(head, calls, rank)


def _of_raw(raw: _RawDump, rank: int) -> Dump:
    """Read a dump of which each call is converted."""
    return _of_head(raw, recorded.of_calls(raw.entries or []), rank)


def _of_head(head: _RawHead, calls: RecordedCalls, rank: int) -> Dump:
    """Read a dump, given its calls.

    Raises:
        ValueError: Its version is not known, or a group cannot be.
    """
    version = head.version
    if not re.fullmatch(r"2\.[0-9]{1,3}", version):
        raise ValueError(f"has version {version[:20]!r}; versions 2.0 to 2.10 are read")
    groups: dict[str, Group] = {}
    for name, config in (head.pg_config or {}).items():
        if config != "[]":
            groups[str(name)] = _group(str(name), config)
    status: dict[str, Status] = {}
    for number, raw_status in (head.pg_status or {}).items():
        status[str(number)] = _status(raw_status)

    # groups that were aborted and made again
    notes: list[str] = []
    dead = _aborted_ids(calls, status, len(groups))
    if dead:
        calls = calls.without_groups(dead)
        status = {number: counters for number, counters in status.items() if number not in dead}
        notes.append("calls of groups that were aborted and made again are left out")

    # calls, by their records and by the batches in which they were issued
    entries = calls_of(calls)
    aborted_places = aborted(calls)
    if aborted_places:
        marked: dict[int, CallPart] = {}
        for place in aborted_places:
            marked[place] = calls.parts[calls.part[place]].call._replace(done=False)
        entries = entries.with_parts(marked)
        notes.append("calls that were aborted count as outstanding")
    if (np.diff(calls.records) < 0).any():
        entries = entries.taken(np.argsort(entries.record, kind="stable"))
    names = _names_of_ids(status, groups, calls)
    named = {names[number]: counters for number, counters in status.items() if number in names}
    messages = _whole_messages(entries)
    ended = [
        name for name, counters in named.items() if 0 <= counters.enqueued == counters.completed
    ]
    entries = of_batches(entries, ended)

    # counters of groups of which nothing says the name
    unnamed = {number: counters for number, counters in status.items() if number not in names}
    if unnamed:
        notes.append(f"pg_status of {len(unnamed)} groups cannot be named")
    if not status:
        notes.append("no pg_status")
    return Dump(
        rank,
        version,
        groups,
        named,
        entries,
        tuple(notes),
        names,
        unnamed,
        messages=messages,
    )


def _status(raw: _RawStatus) -> Status:
    """Read the counters of a group; -1 where one is not known."""
    numbers = (
        raw.last_enqueued_collective,
        raw.last_started_collective,
        raw.last_completed_collective,
    )
    enqueued, started, completed = map(_known, numbers)
    return Status(enqueued, started, completed)


def _known(number: int | None) -> int:
    """Write -1 for a number that is not known."""
    return -1 if number is None else number


def _group(name: str, config: _RawGroup | str) -> Group:
    if isinstance(config, str):
        raise ValueError(f"pg_config {name:.20}: expected an object, not a str")
    ranks = config.ranks if isinstance(config.ranks, str) else tuple(config.ranks)
    return _shared_group(name, (config.desc or "")[:200], ranks)


@lru_cache(maxsize=4096)  # thousands of dumps say the same of their largest groups
def _shared_group(name: str, desc: str, ranks: str | tuple[int, ...]) -> Group:
    numbers = re.findall(r"-?[0-9]{1,9}", ranks) if isinstance(ranks, str) else ranks
    members = tuple(map(int, numbers))
    if len(set(members)) != len(members) or any(not 0 <= r < 1 << 31 for r in members):
        raise ValueError(f"group {name:.20} has members that cannot be")
    return Group(name, desc, members)


def _aborted_ids(calls: RecordedCalls, status: Mapping[str, Status], groups: int) -> set[str]:
    """pg_ids of groups whose names newer groups have; where no entry tells and every group was
    made again, all ids but the newest.
    """
    named = [(number, name) for number, name in calls.ids_and_names() if isinstance(number, int)]
    newest: dict[str, int] = {}
    for number, name in named:
        newest[name] = max(number, newest.get(name, number))
    old = [number for number, name in named if number < newest[name]]
    ids = sorted((i for i in status if i.isdecimal()), key=int)
    # one group and another that was made later, which pg_config lacks, look the same
    again = groups > 1 and len(ids) == len(status) > groups and len(ids) % groups == 0
    dead = set(ids[:-groups]) if again else set()
    if old:  # ids count up: those of groups without an entry are as old
        last = max(old)
        dead |= {i for i in status if i.isdecimal() and int(i) <= last} | set(map(str, old))
    return dead


def _names_of_ids(
    status: Mapping[str, Status], groups: Mapping[str, Group], calls: RecordedCalls
) -> dict[str, str]:
    """Return the number of each group that has counters -> its name, where that is known."""
    name_of_id = {str(number): name for number, name in calls.name_of_id().items()}
    called_names = set(name_of_id.values())
    unnamed_ids = [number for number in status if number not in name_of_id]
    unused_names = [name for name in groups if name not in called_names]
    are_numbers = all(text.isdecimal() for text in [*unnamed_ids, *unused_names])

    # both count up: the groups without a call come in the order of their names
    if len(unnamed_ids) == len(unused_names) and are_numbers:
        unnamed_ids.sort(key=int)
        unused_names.sort(key=int)
        name_of_id.update(zip(unnamed_ids, unused_names, strict=True))
    # a dump without calls in which the counters have the groups' names
    elif not name_of_id and set(unnamed_ids) <= set(unused_names):
        name_of_id.update(zip(unnamed_ids, unnamed_ids, strict=True))
    return {number: name for number, name in name_of_id.items() if number in status}


_MOST = 8  # processes
_AHEAD = 4  # dumps for each of them that are under way, so that none waits for the next
_EACH = 24  # dumps for which another process pays: it takes 0.3 s to start


def read(folder: str | os.PathLike[str], processes: int | None = None) -> DumpSet:
    """All dumps in ``folder``; by default as many processes as there are cores and work for.

    DumpError as ``read_in_process``, or if a process is killed.
    """
    files = dump_files(Path(folder))
    if processes is None:
        processes = min(_MOST, len(os.sched_getaffinity(0)), len(files) // _EACH)
    if processes < 2:
        return read_in_process(folder)
    # closed: after an error a generator lives as long as the error's frames, and its workers too
    with no_collector(), contextlib.closing(_loaded(files, processes)) as loaded:
        return gather(loaded)


_Loaded = Generator[tuple[int, Dump | DumpError], None, None]


def _loaded(files: dict[int, Path], processes: int) -> _Loaded:
    """(rank, its dump), ranks ascending; few are under way, so that none waits in memory."""
    todo, running = iter(sorted(files)), deque[tuple[int, Future[Dump | DumpError]]]()
    largest = max(file.stat().st_size for file in files.values())
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _start_worker) as pool:
        try:
            while True:
                for rank in itertools.islice(todo, _AHEAD * processes - len(running)):
                    running.append((rank, pool.submit(_load, rank, files[rank], largest)))
                if not running:
                    return
                rank, future = running.popleft()
                yield rank, future.result()
        except BrokenProcessPool as error:
            raise DumpError(
                f"a process that read the dumps in {next(iter(files.values())).parent} was killed",
                fix="free memory (2 GB for 1,024 dumps of 2,000 entries), then try again",
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Ctrl-C is the caller's; without the caller there is nothing to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _load(rank: int, file: Path, largest: int) -> Dump | DumpError:
    with bounded_memory(largest), no_collector():
        return load(rank, file)
