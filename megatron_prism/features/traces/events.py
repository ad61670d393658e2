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
    "op": "Collective name",
    "group": "Process Group Name",
    "members": "Group size",
    "num_in": "In msg nelems",
    "num_out": "Out msg nelems",
    "dims": "Input Dims",
    "types": "Input type",
    "inputs": "Concrete Inputs",
}


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
        # an export of Nsight Systems
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
        # names repeat thousands of times: a number each
        code = self.names.setdefault(name, len(self.names))
        self.device.extend((start, end, self.thread(("stream", stream)), correlation, code))

    def on_host(self, name: str, start: int, end: int, tid: object, args: msgspec.Raw) -> None:
        """A span of the host: a step, a call, or an operator."""
        # the profiler's own steps are iterations
        if (step := _STEP.match(name)) is not None:
            self.found.steps.append((int(step[1]), start, end))
        elif _CALL.match(name):
            fields = CallArgs()
            try:
                if args:
                    fields = _CALL_ARGS.decode(args)
            # a call without its arguments is still a call
            except (msgspec.DecodeError, RecursionError):
                fields = CallArgs()
            self.found.calls.append(HostCall(name, self.thread(tid), start, end, fields))
        else:
            self.host.extend((start, end, self.thread(tid)))

    def done(self, base: int = 0) -> Recorded:
        """What was recorded, ``base`` ns later where 64 bits hold that."""
        found = self.found
        # times of a damaged file would overflow
        if abs(base) >= 1 << 61:
            base = 0
        device = np.frombuffer(self.device, np.int64).reshape(-1, 5)
        found.device = device[np.argsort(device[:, 0], kind="stable")]
        launch = np.frombuffer(self.launch, np.int64).reshape(-1, 3)
        found.launch = launch[np.argsort(launch[:, 0], kind="stable")]
        # a trace of the CPU: its operators are the work
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
        # the trace itself does not say whose it is
        if found.rank is None and (named := _RANK.search(Path(found.path).name)):
            found.rank = int(named[1])
        return found


def _innermost(host: np.ndarray) -> np.ndarray:
    """Operators that hold no other of their thread, by start."""
    host = host[np.lexsort((-host[:, 1], host[:, 0], host[:, 2]))]
    # in order of thread and start: an operator that ends before the next begins holds none
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
    trace = read
    # chrome's format allows the list of events alone
    if isinstance(read, list):
        trace = _Trace(read)
    sink = _Sink(path)
    for event in trace.traceEvents:
        _keep(sink, event)
    recorded = sink.done(trace.baseTimeNanoseconds)
    world = trace.distributedInfo or _Distributed()
    # else the rank of the file's name counts
    if world.rank is not None:
        recorded.rank = world.rank
    recorded.world, recorded.node = world.world_size, trace.host_name
    groups = {}
    for config in world.pg_config or ():
        groups[str(config.pg_name)] = config.pg_desc, config.ranks
    recorded.groups = groups
    recorded.gpu = ""
    if trace.deviceProperties:
        recorded.gpu = trace.deviceProperties[0].name
    return recorded


def _keep(sink: _Sink, event: _Event) -> None:
    """Put one event where it belongs."""
    kind = _KINDS.get(event.cat.lower())
    # no complete span, or of no interest
    if event.ph != "X" or kind is None:
        return None
    length = event.dur or 0.0
    if event.ts is None or not abs(event.ts) < _MOST_TS or not 0 <= length < _MOST_TS:
        return sink.drop(_BACKWARDS)
    # us with fractions -> whole ns
    begin, name = round(event.ts * 1000), str(event.name)
    end = begin + round(length * 1000)
    if kind == _HOST:
        return sink.on_host(name, begin, end, event.tid, event.args)
    args = _DeviceArgs()
    try:
        if event.args:
            args = _DEVICE_ARGS.decode(event.args)
    except (msgspec.DecodeError, RecursionError):
        return sink.drop("events whose arguments cannot be read")
    correlation = args.correlation
    # work that nothing on the host launched
    if correlation is None:
        correlation = -1
    if abs(correlation) >= 1 << 62:
        return sink.drop("events whose arguments cannot be read")
    if kind == _LAUNCH:
        return sink.launch.extend((correlation, begin, sink.thread(event.tid)))
    stream: object = args.stream
    # kineto's threads of a device are its streams
    if stream is None:
        stream = event.tid
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

    export = _Export(path, base, tables)
    export.read_device()
    export.read_launches()
    export.read_ranges()
    about = {"gpu": "", "node": "", "since": ""}
    for name, query in _ABOUT.items():
        with contextlib.suppress(sqlite3.OperationalError):  # an export without this table
            about[name] = str((base.execute(f"SELECT {query}").fetchone() or [""])[0])
    since, base_ns = about["since"], 0
    # ns since the epoch, in 64 bits
    if since.isdecimal() and len(since) < 20:
        base_ns = int(since)
    ranks = []
    for _, sink in sorted(export.sinks.items()):
        # a process without work on a device is a launcher, or loads data
        if sink.device:
            recorded = sink.done(base_ns)
            recorded.gpu, recorded.node = about["gpu"], about["node"]
            ranks.append(recorded)
    return ranks


class _Export:
    """The tables of an export, read into a sink for each process."""

    def __init__(self, path: Path, base: sqlite3.Connection, tables: set[str]) -> None:
        self._path, self._base, self._tables = path, base, tables
        self._texts = dict(self._rows("StringIds", "id", "value"))
        self.sinks: dict[int, _Sink] = {}

    def _rows(self, table: str, numbers: str, *columns: str) -> list[tuple[Any, ...]]:
        """Rows whose ``numbers`` are of 63 bits: SQLite keeps anything in any column."""
        if table not in self._tables:
            return []
        conditions = []
        for name in numbers.split(", "):
            bounds = f"BETWEEN -{1 << 62} AND {1 << 62}"
            conditions.append(f"typeof({name}) = 'integer' AND {name} {bounds}")
        selected = ", ".join((numbers, *columns))
        where = " AND ".join(conditions)
        return self._base.execute(f"SELECT {selected} FROM {table} WHERE {where}").fetchall()

    def _sink(self, process: int) -> _Sink:
        """The sink of a process, by its global id or that of a thread."""
        number = process >> 24
        if number not in self.sinks:
            self.sinks[number] = _Sink(self._path)
        return self.sinks[number]

    def read_device(self) -> None:
        """Kernels, copies and fills."""
        for table, name in _WORK.items():
            usual = table.rpartition("_")[2].lower()
            columns = "start", "end", "correlationId", "streamId", name
            rows = self._rows(table, "globalPid", *columns)
            for process, start, end, correlation, stream, text in rows:
                sink, numbers = self._sink(process), (start, end, correlation)
                if not all(map(_is_number, numbers)) or end < start:
                    sink.drop(_BACKWARDS)
                    continue
                label = str(self._texts.get(text, usual))
                sink.on_device(label, start, end, stream, correlation)

    def read_launches(self) -> None:
        """Calls of the CUDA runtime."""
        rows = self._rows("CUPTI_ACTIVITY_KIND_RUNTIME", "correlationId, start, globalTid")
        for correlation, start, thread in rows:
            sink = self._sink(thread)
            sink.launch.extend((correlation, start, sink.thread(thread % (1 << 24))))

    def read_ranges(self) -> None:
        """NVTX ranges: iterations, calls and operators."""
        rows = self._rows("NVTX_EVENTS", "start, end, globalTid", "text", "textId")
        for start, end, thread, text, number in rows:
            # a registered text is in the table of strings
            if text is None:
                text = self._texts.get(number, "")
            label = str(text)
            sink = self._sink(thread)
            step = _NVTX_STEP.fullmatch(label)
            if step is not None:
                sink.found.steps.append((int(step[1]), start, end))
                continue
            arguments = b""
            # sizes are in the text of a range that torch emits with shapes
            sizes = _NVTX_SIZES.search(label)
            if sizes:
                arguments = f'{{"Input Dims": {sizes[1]}}}'.encode()
            name = label.partition(", ")[0]
            sink.on_host(name, start, end, thread % (1 << 24), msgspec.Raw(arguments))


def _is_number(value: object) -> bool:
    """Whether it is an integer that sums of it with another cannot leave 64 bits."""
    return isinstance(value, int) and abs(value) < 1 << 62


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
                value: object
                plain = data[:64].lstrip()[:1] in (b"{", b"[")
                if plain:
                    value = foreign.value_of_json(data)
                else:
                    value = foreign.unpickled(data)
                dump = dumps.of_value(value, rank)
                times = {row.record_id: row for row in foreign.shaped(value, _TimedDump).entries}
        entries = [entry for entry in dump.entries if entry.done]
        if not any(times[entry.record].duration_ms for entry in entries if entry.record in times):
            advice = "start the job with TORCH_NCCL_ENABLE_TIMING=1, and dump all entries"
            raise UsageError(f"{path} does not say how long calls took", fix=advice)
        ranks[rank] = entries, *_of_dump(path, dump, entries, times)
    desc, count = _shared_mark([entries for entries, *_ in ranks.values()])
    for entries, recorded, asked in ranks.values():
        recorded.steps = _steps(entries, recorded, asked, desc, count)
    return [recorded for _, recorded, _ in ranks.values()]


def _steps(
    entries: list[Entry], recorded: Recorded, asked: Mapping[int, int], desc: str, count: int
) -> list[tuple[int, int, int]]:
    """Iterations of a rank as (number, begin, end) in ns; the last one is -1, as it is not whole.

    Args:
        entries: Calls of the rank that ended.
        recorded: The same rank.
        asked: Record of a call -> when the host asked for it.
        desc: Of the groups whose collectives mark iterations.
        count: Of them in an iteration.
    """
    marks = []
    for entry in entries:
        if entry.desc == desc and not entry.pair and entry.seq % count == 0:
            marks.append(entry)
    steps = []
    for mark, next_mark in itertools.pairwise(marks):
        begin, end = asked[mark.record] + 1, asked[next_mark.record] + 1
        steps.append((mark.seq // count, begin, end))
    # what follows the last mark is a part of an iteration
    if marks:
        last = asked[marks[-1].record]
        if recorded.calls[-1].end > last:
            steps.append((-1, last + 1, 1 << 62))
    if not steps:
        return []
    # nobody knows whether the last iteration is whole
    _, begin, end = steps[-1]
    return [*steps[:-1], (-1, begin, end)]


def _of_dump(
    path: Path, dump: dumps.Dump, entries: list[Entry], times: Mapping[int, _Timed]
) -> tuple[Recorded, dict[int, int]]:
    """One rank, and when it asked for each call; a call's kernel is what its duration says."""
    sink = _Sink(path)
    end_of_group: dict[str, int] = {}
    asked: dict[int, int] = {}
    now = 0
    for entry in entries:
        # no two calls at a time: their order is that of the records
        now = max(now + 1, entry.created_ns)
        asked[entry.record] = now
        dtype = ""
        if entry.dtypes:
            dtype = entry.dtypes[0]
        args = CallArgs(
            entry.op,
            dtype,
            entry.group,
            num_in=sum(entry.numbers[0]),
            num_out=sum(entry.numbers[1]),
            inputs=["", "", str(entry.to)],
        )
        sink.found.calls.append(HostCall(f"nccl:{entry.op}", 0, now, now, args))
        timed = times.get(entry.record)
        # the dump does not say how long it took
        if timed is None or timed.duration_ms is None:
            continue
        length = round(1e6 * min(max(timed.duration_ms, 0.0), 1e9))
        end = max(now, end_of_group.get(entry.group, 0)) + length
        # it was not over when the watchdog looked the time before
        seen = timed.time_discovered_completed_ns
        if seen:
            end = max(end, min(seen - _POLL, now + (1 << 50)))
        end_of_group[entry.group] = end
        sink.launch.extend((entry.record, now, 0))
        sink.on_device("nccl: by its Flight Recorder", end - length, end, 0, entry.record)
    recorded = sink.done()
    recorded.rank = dump.rank
    recorded.groups = {name: (group.desc, group.ranks) for name, group in dump.groups.items()}
    recorded.world = max((len(group.ranks) for group in dump.groups.values()), default=0)
    recorded.dropped[_ASSUMED] = len(entries)
    return recorded, asked


def _shared_mark(ranks: list[list[Entry]]) -> tuple[str, int]:
    """(description of groups, how many of their collectives an iteration has), the fewest that are
    the same on all ranks.
    """
    counts = []
    for entries in ranks:
        # the last period of the calls is one iteration
        period = entries[len(entries) - _period(entries) :]
        groups = {(entry.desc, entry.group) for entry in entries}
        # a rank with several groups of a description has no single count for it
        groups_of_desc = Counter(desc for desc, _ in groups)
        calls = Counter(entry.desc for entry in period if not entry.pair)
        marks = set()
        for desc, number in groups_of_desc.items():
            if number == 1 and calls[desc]:
                marks.add((desc, calls[desc]))
        counts.append(marks)
    shared = set.intersection(*counts)
    if not shared:
        message = "no group of the dumps has the same collectives in every iteration of every rank"
        fix = "dump all ranks of the same iterations; TORCH_NCCL_TRACE_BUFFER_SIZE=20000 holds more"
        raise PrismError(message, fix=fix)
    return min(shared, key=lambda mark: (mark[1], mark[0]))


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
        message = "the calls of a dump do not repeat: it has less than two whole iterations"
        raise PrismError(message, fix="TORCH_NCCL_TRACE_BUFFER_SIZE=20000 holds more of them")
    return best - borders[best - 1]
