"""What was recorded of one rank: Kineto's traces, Nsight's SQLite, NCCL's Flight Recorder.

Kept are work on the device, when the host launched it, calls of torch.distributed, the host's
operators and the profiler's steps; Python frames, flows and counters are not.

Formats: "Trace Event Format" (Google, 2016) as libkineto/src/output_json.cpp @pytorch/kineto writes
it; arguments of calls: record_param_comms (torch/csrc/distributed/c10d/ParamCommsUtils.hpp @2.11).
Nsight Systems: "SQLite Schema Reference" of its User Guide.  Flight Recorder: FlightRecorder.hpp
and FlightRecorderDetail.hpp (torch/csrc/distributed/c10d @2.11).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sqlite3
import stat
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megatron_prism.core import foreign
from megatron_prism.core.errors import PrismError, UsageError
from megatron_prism.features.hang import dumps
from megatron_prism.features.hang.calls import Entry

_MOST = 1 << 33  # bytes of a trace, unpacked
_MOST_TS = 4e15  # us, either side of 0: what 64 bits of ns hold
_DEVICE, _LAUNCH, _HOST = range(3)
_KINDS = dict.fromkeys(("kernel", "gpu_memcpy", "gpu_memset", "concurrent_kernel"), _DEVICE)
_KINDS |= dict.fromkeys(
    ("cuda_runtime", "cuda_driver", "runtime", "driver", "hip_runtime", "privateuse1_runtime"),
    _LAUNCH,
)
_KINDS |= dict.fromkeys(("cpu_op", "user_annotation", "operator"), _HOST)
_STEP = re.compile(r"ProfilerStep\s?#(\d+)")
_CALL = re.compile(r"c10d::|nccl:|gloo:|record_param_comms$")
_RANK = re.compile(r"rank[-_]?(\d+)", re.IGNORECASE)
FIX = "a trace that torch.profiler's export_chrome_trace or nsys export --type sqlite wrote"
_BACKWARDS = "events that end before they begin, or without a time"
Groups = Mapping[str, tuple[str, tuple[int, ...]]]
_NAMES = {
    "op": "Collective name", "group": "Process Group Name", "members": "Group size",
    "num_in": "In msg nelems", "num_out": "Out msg nelems", "dims": "Input Dims",
    "types": "Input type", "inputs": "Concrete Inputs",
}  # fmt: skip


class CallArgs(msgspec.Struct, gc=False, rename=_NAMES):
    """Arguments of a call, as the profiler has them."""

    op: str = ""
    dtype: str = ""
    group: str = ""
    members: int = 0
    num_in: int | None = None
    num_out: int | None = None
    dims: list[Any] = []
    types: list[Any] = []
    inputs: list[Any] = []


@dataclass(frozen=True)
class HostCall:
    """A span of the host in which it asks for communication.

    name : ``c10d::allreduce_``, ``record_param_comms``, ``nccl:all_reduce``, ``gloo:…``
    """

    name: str
    thread: int
    start: int
    end: int
    args: CallArgs


@dataclass
class Recorded:
    """One rank; times are ns since the epoch, or since the profiler's own beginning.

    groups  : torch's name of a process group -> (description, ranks)
    steps   : (number, start, end) of the profiler's steps, by start; -1: of one that is cut off
    device  : int64 [n, 5]: start, end, stream, correlation, name, by start
    launch  : int64 [m, 3]: correlation, start, thread, by correlation
    host    : int64 [k, 3]: start, end, thread of the host's innermost operators, by start; none
              where there is a device
    calls   : by start
    names   : what ``device`` indexes
    dropped : what was no event that could be used, and how many
    """

    path: str
    rank: int | None = None
    world: int = 0
    node: str = ""
    gpu: str = ""
    groups: Groups = field(default_factory=dict)
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    device: np.ndarray = field(default_factory=lambda: np.empty((0, 5), np.int64))
    launch: np.ndarray = field(default_factory=lambda: np.empty((0, 3), np.int64))
    host: np.ndarray = field(default_factory=lambda: np.empty((0, 3), np.int64))
    calls: list[HostCall] = field(default_factory=list)
    names: tuple[str, ...] = ()
    dropped: dict[str, int] = field(default_factory=dict)


def read_trace(path: str | os.PathLike[str]) -> list[Recorded]:
    """The ranks in a trace: one of Kineto, each process of Nsight.  UsageError for what is none,
    cut off, or larger than it may be.
    """
    with foreign.reading(path, "a trace", FIX) as place:
        if not stat.S_ISREG(os.stat(place).st_mode):
            raise ValueError("it is no regular file")
        with open(place, "rb") as file:
            start = file.read(16)
        if start == b"SQLite format 3\0":
            return _read_nsight(place)
        return [_read_kineto(place)]


class _Sink:
    """Collects what is kept, column by column."""

    def __init__(self, path: Path) -> None:
        self.found = Recorded(str(path))
        self.device, self.launch, self.host = array("q"), array("q"), array("q")
        self.names: dict[str, int] = {}
        self.threads: dict[object, int] = {}

    def thread(self, tid: object) -> int:
        return self.threads.setdefault(tid, len(self.threads))

    def drop(self, why: str) -> None:
        self.found.dropped[why] = self.found.dropped.get(why, 0) + 1

    def on_device(self, name: str, start: int, end: int, stream: object, correlation: int) -> None:
        code = self.names.setdefault(name, len(self.names))
        self.device.extend((start, end, self.thread(("stream", stream)), correlation, code))

    def on_host(self, name: str, start: int, end: int, tid: object, args: msgspec.Raw) -> None:
        """A span of the host: a step, a call, or an operator."""
        if (step := _STEP.match(name)) is not None:
            self.found.steps.append((int(step[1]), start, end))
        elif _CALL.match(name):
            try:
                fields = _CALL_ARGS.decode(args) if args else CallArgs()
            except (msgspec.DecodeError, RecursionError):
                fields = CallArgs()
            self.found.calls.append(HostCall(name, self.thread(tid), start, end, fields))
        else:
            self.host.extend((start, end, self.thread(tid)))

    def done(self, base: int = 0) -> Recorded:
        """What was recorded, ``base`` ns later where 64 bits hold that."""
        found, base = self.found, base if abs(base) < 1 << 61 else 0
        device = np.frombuffer(self.device, np.int64).reshape(-1, 5)
        found.device = device[np.argsort(device[:, 0], kind="stable")]
        launch = np.frombuffer(self.launch, np.int64).reshape(-1, 3)
        found.launch = launch[np.argsort(launch[:, 0], kind="stable")]
        if not len(device):
            found.host = _innermost(np.frombuffer(self.host, np.int64).reshape(-1, 3))
        for table in (found.device, found.host):
            table[:, :2] += base
        found.launch[:, 1] += base
        found.names = tuple(self.names)
        found.calls = [replace(c, start=c.start + base, end=c.end + base) for c in found.calls]
        found.calls.sort(key=lambda call: (call.start, -call.end))
        found.steps = sorted(
            ((number, start + base, end + base) for number, start, end in found.steps),
            key=lambda step: step[1],
        )
        if found.rank is None and (named := _RANK.search(Path(found.path).name)):
            found.rank = int(named[1])
        return found


def _innermost(host: np.ndarray) -> np.ndarray:
    """Operators that hold no other of their thread, by start."""
    host = host[np.lexsort((-host[:, 1], host[:, 0], host[:, 2]))]
    following = np.append(host[1:, 0], np.iinfo(np.int64).max)
    last = np.append(host[1:, 2] != host[:-1, 2], True)[: len(host)]
    host = host[last | (following >= host[:, 1])]
    return host[np.argsort(host[:, 0], kind="stable")]


# -- Kineto ---------------------------------------------------------------------------------------
class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str | int | None = ""
    ts: float | None = None
    dur: float | None = None
    tid: int | str | None = None
    args: msgspec.Raw = msgspec.Raw(b"")


class _DeviceArgs(msgspec.Struct, gc=False):
    stream: int | str | None = None
    correlation: int | None = None


class _Group(msgspec.Struct):
    pg_name: str | int
    ranks: tuple[int, ...] = ()
    pg_desc: str = ""


class _Distributed(msgspec.Struct):
    rank: int | None = None
    world_size: int = 0
    pg_config: list[_Group] | None = None


class _Device(msgspec.Struct):
    name: str = ""


class _Trace(msgspec.Struct):
    traceEvents: list[_Event]
    distributedInfo: _Distributed | None = None
    host_name: str = ""
    baseTimeNanoseconds: int = 0
    deviceProperties: list[_Device] | None = None


_TRACE = msgspec.json.Decoder(_Trace | list[_Event], strict=False)
_DEVICE_ARGS = msgspec.json.Decoder(_DeviceArgs, strict=False)
_CALL_ARGS = msgspec.json.Decoder(CallArgs, strict=False)


def _read_kineto(path: Path) -> Recorded:
    read = _TRACE.decode(foreign.read_unpacked(path, _MOST))
    trace = _Trace(read) if isinstance(read, list) else read
    sink = _Sink(path)
    for event in trace.traceEvents:
        _keep(sink, event)
    found, world = sink.done(trace.baseTimeNanoseconds), trace.distributedInfo or _Distributed()
    found.rank = world.rank if world.rank is not None else found.rank
    found.world, found.node = world.world_size, trace.host_name
    found.groups = {str(one.pg_name): (one.pg_desc, one.ranks) for one in world.pg_config or ()}
    found.gpu = trace.deviceProperties[0].name if trace.deviceProperties else ""
    return found


def _keep(sink: _Sink, event: _Event) -> None:
    """Put one event where it belongs."""
    kind = _KINDS.get(event.cat.lower())
    if event.ph != "X" or kind is None:
        return None
    length = event.dur or 0.0
    if event.ts is None or not abs(event.ts) < _MOST_TS or not 0 <= length < _MOST_TS:
        return sink.drop(_BACKWARDS)
    begin, name = round(event.ts * 1000), str(event.name)
    end = begin + round(length * 1000)
    if kind == _HOST:
        return sink.on_host(name, begin, end, event.tid, event.args)
    try:
        args = _DEVICE_ARGS.decode(event.args) if event.args else _DeviceArgs()
    except (msgspec.DecodeError, RecursionError):
        return sink.drop("events whose arguments cannot be read")
    correlation = -1 if args.correlation is None else args.correlation
    if abs(correlation) >= 1 << 62:
        return sink.drop("events whose arguments cannot be read")
    if kind == _LAUNCH:
        return sink.launch.extend((correlation, begin, sink.thread(event.tid)))
    stream = event.tid if args.stream is None else args.stream
    return sink.on_device(name, begin, end, stream, correlation)


# -- Nsight Systems -------------------------------------------------------------------------------
_NVTX_STEP = re.compile(
    r"(?:ProfilerStep\s?#|(?:train_)?(?:iteration|iter|step)[ _#:]*)(\d+)", re.I
)
_NVTX_SIZES = re.compile(r", sizes = (\[[][\d, ]*\])")
_WORK = {
    "CUPTI_ACTIVITY_KIND_KERNEL": "COALESCE(demangledName, shortName)",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "NULL",
    "CUPTI_ACTIVITY_KIND_MEMSET": "NULL",
}
_ABOUT = {
    "gpu": "name FROM TARGET_INFO_GPU",
    "node": "value FROM TARGET_INFO_SYSTEM_ENV WHERE name = 'Hostname'",
    "since": "utcEpochNs FROM TARGET_INFO_SESSION_START_TIME",
}


def _read_nsight(path: Path) -> list[Recorded]:
    try:
        uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as base:
            base.execute("PRAGMA trusted_schema = OFF")
            return _of_processes(path, base)
    except sqlite3.Error as error:
        raise ValueError(f"it is no export of Nsight Systems, or is damaged: {error}") from None


def _of_processes(path: Path, base: sqlite3.Connection) -> list[Recorded]:
    """One rank per process that launched work on a device.

    A global id of a thread is its process and its own number, of 24 bits.
    """
    tables = {name for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type='table'")}
    if not tables & _WORK.keys():
        raise ValueError("it has no work on a device: nsys profile --trace=cuda,nvtx")

    def rows(table: str, numbers: str, *others: str) -> list[tuple[Any, ...]]:
        """Rows whose ``numbers`` are of 63 bits: SQLite keeps anything in any column."""
        if table not in tables:
            return []
        which = " AND ".join(
            f"typeof({name}) = 'integer' AND {name} BETWEEN -{1 << 62} AND {1 << 62}"
            for name in numbers.split(", ")
        )
        columns = ", ".join((numbers, *others))
        return base.execute(f"SELECT {columns} FROM {table} WHERE {which}").fetchall()

    texts = dict(rows("StringIds", "id", "value"))
    sinks: dict[int, _Sink] = {}

    def sink(process: int) -> _Sink:
        return sinks.setdefault(process >> 24, _Sink(path))

    for table, name in _WORK.items():
        usual = table.rpartition("_")[2].lower()
        columns = "start", "end", "correlationId", "streamId", name
        for process, start, end, correlation, stream, text in rows(table, "globalPid", *columns):
            one, numbers = sink(process), (start, end, correlation)
            if not all(isinstance(n, int) and abs(n) < 1 << 62 for n in numbers) or end < start:
                one.drop(_BACKWARDS)
                continue
            one.on_device(str(texts.get(text, usual)), start, end, stream, correlation)
    for correlation, start, thread in rows(
        "CUPTI_ACTIVITY_KIND_RUNTIME", "correlationId, start, globalTid"
    ):
        sink(thread).launch.extend((correlation, start, sink(thread).thread(thread % (1 << 24))))
    for start, end, thread, text, number in rows(
        "NVTX_EVENTS", "start, end, globalTid", "text", "textId"
    ):
        label = str(text if text is not None else texts.get(number, ""))
        if (step := _NVTX_STEP.fullmatch(label)) is not None:
            sink(thread).found.steps.append((int(step[1]), start, end))
            continue
        sizes = _NVTX_SIZES.search(label)
        args = msgspec.Raw(f'{{"Input Dims": {sizes[1]}}}'.encode() if sizes else b"")
        name = label.partition(", ")[0]
        sink(thread).on_host(name, start, end, thread % (1 << 24), args)
    about = {"gpu": "", "node": "", "since": ""}
    for name, query in _ABOUT.items():
        with contextlib.suppress(sqlite3.OperationalError):  # an export without this table
            about[name] = str((base.execute(f"SELECT {query}").fetchone() or [""])[0])
    since = about["since"]
    base_ns = int(since) if since.isdecimal() and len(since) < 20 else 0
    ranks = [one.done(base_ns) for _, one in sorted(sinks.items()) if one.device]
    for found in ranks:
        found.gpu, found.node = about["gpu"], about["node"]
    return ranks


# -- Flight Recorder ------------------------------------------------------------------------------
_POLL = 100_000_000  # ns: how often the watchdog looks for calls that ended (ProcessGroupNCCL.cpp)
_ASSUMED = (
    "calls are assumed to begin when asked for, or when the one before them in their group ends, "
    "as the Flight Recorder does not say; what lies between calls counts as computing"
)


class _Timed(msgspec.Struct):
    """What an entry says of times."""

    record_id: int
    duration_ms: float | None = None
    time_discovered_completed_ns: int | None = None


class _TimedDump(msgspec.Struct):
    entries: list[_Timed]


def read_dumps(folder: Path) -> list[Recorded]:
    """The ranks of a folder of dumps whose calls have times.

    A dump has when the host asked for each call and how long it took on the device, but not when it
    began: then, or when the one before it in its group ended, unless it was still on its way the
    last time that the watchdog looked.  Iterations are the period of the calls.  They end where
    every rank is behind the same call of groups of one description, the rarest that all ranks have.

    Raises:
        UsageError: there are no dumps, they have no times, or less than two iterations.
    """
    try:
        files = dumps.dump_files(folder)
    except PrismError as error:
        fix = "files *.json, *.json.gz or *.sqlite, or dumps named _dump_0"
        raise UsageError(f"{folder} holds no traces: {error.message}", fix=fix) from error
    ranks = {}
    for rank, path in sorted(files.items()):
        with foreign.reading(path, "a Flight Recorder dump", dumps.FIX) as place:
            data = foreign.read_bytes(place, 1 << 28)
            with foreign.bounded_memory(len(data)):
                plain = data[:64].lstrip()[:1] in (b"{", b"[")
                value = foreign.value_of_json(data) if plain else foreign.unpickled(data)
                dump = dumps.of_value(value, rank)
                times = {row.record_id: row for row in foreign.shaped(value, _TimedDump).entries}
        entries = [entry for entry in dump.entries if entry.done]
        if not any(times[entry.record].duration_ms for entry in entries if entry.record in times):
            advice = "start the job with TORCH_NCCL_ENABLE_TIMING=1, and dump all entries"
            raise UsageError(f"{path} does not say how long calls took", fix=advice)
        ranks[rank] = entries, *_of_dump(path, dump, entries, times)
    desc, count = _shared_mark([entries for entries, *_ in ranks.values()])
    for entries, found, asked in ranks.values():
        marks = [e for e in entries if e.desc == desc and not e.pair and e.seq % count == 0]
        steps = [
            (one.seq // count, asked[one.record] + 1, asked[other.record] + 1)
            for one, other in itertools.pairwise(marks)
        ]
        if marks and found.calls[-1].end > (last := asked[marks[-1].record]):
            steps.append((-1, last + 1, 1 << 62))
        found.steps = [*steps[:-1], (-1, *steps[-1][1:])] if steps else []
    return [found for _, found, _ in ranks.values()]


def _of_dump(
    path: Path, dump: dumps.Dump, entries: list[Entry], times: Mapping[int, _Timed]
) -> tuple[Recorded, dict[int, int]]:
    """One rank, and when it asked for each call; a call's kernel is what its duration says."""
    sink, now, over, asked = _Sink(path), 0, dict[str, int](), dict[int, int]()
    for entry in entries:
        asked[entry.record] = now = max(now + 1, entry.created_ns)
        args = CallArgs(
            entry.op, entry.dtypes[0] if entry.dtypes else "", entry.group,
            num_in=sum(entry.numbers[0]), num_out=sum(entry.numbers[1]),
            inputs=["", "", str(entry.to)],
        )  # fmt: skip
        sink.found.calls.append(HostCall(f"nccl:{entry.op}", 0, now, now, args))
        took = times[entry.record] if entry.record in times else _Timed(entry.record)
        if took.duration_ms is None:
            continue
        length = round(1e6 * min(max(took.duration_ms, 0.0), 1e9))
        end = max(now, over.get(entry.group, 0)) + length
        if seen := took.time_discovered_completed_ns:
            end = max(end, min(seen - _POLL, now + (1 << 50)))
        over[entry.group] = end
        sink.launch.extend((entry.record, now, 0))
        sink.on_device("nccl: by its Flight Recorder", end - length, end, 0, entry.record)
    found = sink.done()
    found.rank = dump.rank
    found.groups = {name: (one.desc, one.ranks) for name, one in dump.groups.items()}
    found.world = max((len(one.ranks) for one in dump.groups.values()), default=0)
    found.dropped[_ASSUMED] = len(entries)
    return found, asked


def _shared_mark(ranks: list[list[Entry]]) -> tuple[str, int]:
    """(description of groups, how many of their collectives an iteration has), the fewest that are
    the same on all ranks.
    """
    counts = []
    for entries in ranks:
        period = entries[len(entries) - _period(entries) :]
        groups = {(entry.desc, entry.group) for entry in entries}
        alone = [desc for desc, number in Counter(desc for desc, _ in groups).items() if number < 2]
        calls = Counter(entry.desc for entry in period if not entry.pair)
        counts.append({(desc, calls[desc]) for desc in alone if calls[desc]})
    shared = set.intersection(*counts)
    if not shared:
        what = "no group of the dumps has the same collectives in every iteration of every rank"
        fix = "dump all ranks of the same iterations; TORCH_NCCL_TRACE_BUFFER_SIZE=20000 holds more"
        raise PrismError(what, fix=fix)
    return min(shared, key=lambda one: (one[1], one[0]))


def _period(entries: list[Entry]) -> int:
    """Calls of an iteration: the last calls repeat themselves after so many."""
    keys = [(e.group, e.op, e.numbers, e.to) for e in reversed(entries)]
    borders, best = [0] * len(keys), 0  # Knuth, Morris & Pratt, 1977
    for at in range(1, len(keys)):
        size = borders[at - 1]
        while size and keys[at] != keys[size]:
            size = borders[size - 1]
        borders[at] = size = size + (keys[at] == keys[size])
        if 2 * (at + 1 - size) <= at + 1:
            best = at + 1
    if 2 * best < len(keys) or not best:
        what = "the calls of a dump do not repeat: it has less than two whole iterations"
        raise PrismError(what, fix="TORCH_NCCL_TRACE_BUFFER_SIZE=20000 holds more of them")
    return best - borders[best - 1]
