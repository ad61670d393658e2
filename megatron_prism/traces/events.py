"""What was recorded of one rank: Kineto's traces, Nsight's SQLite, NCCL's Flight Recorder.

A Kineto trace is read in pieces: a piece ends where one event does, which is where it decodes, so a
trace of gigabytes takes the memory of what is kept of it, and one broken event is found where it
stands.  Kept are work on the device, when the host launched it, calls of torch.distributed, the
host's operators and the profiler's steps; Python frames, flows and counters are not.

Formats: "Trace Event Format" (Google, 2016) as libkineto/src/output_json.cpp @pytorch/kineto writes
it; arguments of calls: record_param_comms (torch/csrc/distributed/c10d/ParamCommsUtils.hpp @2.11).
Nsight Systems: "SQLite Schema Reference" of its User Guide.  Flight Recorder: FlightRecorder.hpp
and FlightRecorderDetail.hpp (torch/csrc/distributed/c10d @2.11).
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import os
import re
import sqlite3
import stat
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from megatron_prism.core import foreign
from megatron_prism.core.errors import PrismError, UsageError
from megatron_prism.hang import dumps

_PIECE = 1 << 23  # bytes that are decoded at once
_MOST_EVENT = 1 << 26  # bytes of one event, of what stands before the first and behind the last
_MOST = 1 << 36  # bytes of a whole trace, unpacked
_TRIES = 64  # places in a piece at which an event may end
_WINDOW = 1 << 18  # bytes in which the end of an event is looked for
_BETWEEN = re.compile(rb"\}\s{0,99},\s{0,99}\{")
_END = re.compile(rb"\}\s{0,99},?\s{0,99}\]")
_EMPTY = re.compile(rb"\s*\]")
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_MOST_TS = 4e15  # us, either side of 0: what 64 bits of ns hold
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "concurrent_kernel"}
_LAUNCH = {"cuda_runtime", "cuda_driver", "runtime", "driver", "hip_runtime", "privateuse1_runtime"}
_HOST = {"cpu_op", "user_annotation", "operator"}
_STEP = re.compile(r"ProfilerStep\s?#(\d+)")
_RANK = re.compile(r"rank[-_]?(\d+)", re.IGNORECASE)
FIX = "a trace that torch.profiler's export_chrome_trace or nsys export --type sqlite wrote"
Groups = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class HostCall:
    """A span of the host in which it asks for communication.

    name   : ``c10d::allreduce_``, ``record_param_comms``, ``nccl:all_reduce``, ``gloo:…``
    fields : of its arguments, as the profiler names them
    """

    name: str
    thread: int
    start: int
    end: int
    fields: Mapping[str, object]


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
    cut off, or larger than it may be."""
    with foreign.reading(path, "a trace", FIX) as place:
        if not stat.S_ISREG(os.stat(place).st_mode):
            raise ValueError("it is no regular file")
        with open(place, "rb") as file:
            start = file.read(16)
        if start == b"SQLite format 3\0":
            return _read_nsight(place)
        return [_read_kineto(place, start[:2] == b"\x1f\x8b")]


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

    def on_host(
        self,
        name: str,
        start: int,
        end: int,
        thread: int,
        fields: Mapping[str, object] | None = None,
    ) -> None:
        """A span of the host: a step, a call, or an operator."""
        if (step := _STEP.match(name)) is not None:
            self.found.steps.append((int(step[1]), start, end))
        elif name.startswith(("c10d::", "nccl:", "gloo:")) or name == "record_param_comms":
            self.found.calls.append(HostCall(name, thread, start, end, fields or {}))
        else:
            self.host.extend((start, end, thread))

    def done(self) -> Recorded:
        found = self.found
        device = np.frombuffer(self.device, np.int64).reshape(-1, 5)
        found.device = device[np.argsort(device[:, 0], kind="stable")]
        launch = np.frombuffer(self.launch, np.int64).reshape(-1, 3)
        found.launch = launch[np.argsort(launch[:, 0], kind="stable")]
        if not len(device):
            found.host = _innermost(np.frombuffer(self.host, np.int64).reshape(-1, 3))
        found.names = tuple(self.names)
        found.calls.sort(key=lambda call: (call.start, -call.end))
        found.steps.sort(key=lambda step: step[1])
        if found.rank is None and (named := _RANK.search(Path(found.path).name)):
            found.rank = int(named[1])
        return found


def _shift(found: Recorded, base: int) -> None:
    """Add ``base`` ns to all times; one that 64 bits do not hold is none."""
    if abs(base) >= 1 << 61:
        return
    for table in (found.device, found.host):
        table[:, :2] += base
    found.launch[:, 1] += base
    found.steps = [(number, start + base, end + base) for number, start, end in found.steps]
    found.calls = [replace(c, start=c.start + base, end=c.end + base) for c in found.calls]


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
    ts: float | str | None = None
    dur: float | str | None = None
    pid: int | str | None = None
    tid: int | str | None = None
    args: msgspec.Raw = msgspec.Raw(b"")


class _DeviceArgs(msgspec.Struct, gc=False):
    stream: int | str | None = None
    correlation: int | str | None = None
    device: int | str | None = None


class _Group(msgspec.Struct):
    pg_name: str | int
    ranks: tuple[int, ...] = ()
    pg_desc: str = ""


class _Distributed(msgspec.Struct):
    rank: int | None = None
    world_size: int = 0
    pg_config: list[_Group] | None = None


class _Head(msgspec.Struct):
    """What a trace says beside its events."""

    distributedInfo: _Distributed | None = None
    host_name: str = ""
    baseTimeNanoseconds: int = 0
    deviceProperties: list[dict[str, object]] | None = None


_DECODER = msgspec.json.Decoder(list[_Event])
_ARGS = msgspec.json.Decoder(_DeviceArgs, strict=False)


def _read_kineto(path: Path, packed: bool) -> Recorded:
    sink = _Sink(path)
    with open(path, "rb") as raw:
        file: BinaryIO = gzip.GzipFile(fileobj=raw) if packed else raw  # type: ignore[assignment]
        try:
            around = b""
            for around, events in _pieces(file):  # noqa: B007 - of the last
                for event in events:
                    _keep(sink, event)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"it is cut off or damaged: {error}") from None
    head = foreign.shaped(foreign.value_of_json(around), _Head) if around else _Head()
    found, told = sink.done(), head.distributedInfo or _Distributed()
    found.rank = told.rank if told.rank is not None else found.rank
    found.world, found.node = told.world_size, head.host_name
    found.groups = {str(one.pg_name): (one.pg_desc, one.ranks) for one in told.pg_config or ()}
    properties = (head.deviceProperties or [{}])[0]
    found.gpu = str(properties.get("name", ""))
    _shift(found, head.baseTimeNanoseconds)
    return found


def _pieces(file: BinaryIO) -> Iterator[tuple[bytes, list[_Event]]]:
    """(all but the events: known with the last piece; events) in the order of the file."""
    data, read = file.read(_PIECE), 0
    while not (found := _EVENTS.search(data)) and data.lstrip()[:1] != b"[":
        more = file.read(_PIECE)
        if not more or len(data) > _MOST_EVENT:
            raise ValueError("it has no traceEvents")
        data += more
    head = data[: found.end()] if found else b""
    rest = data[found.end() :] if found else data.lstrip()[1:]
    ended = False
    while not ended:
        more = file.read(_PIECE)
        ended, read = not more, read + len(more)
        if read > _MOST:
            raise ValueError(f"it unpacks to more than {_MOST:,} bytes")
        rest += more
        if ended:
            break
        events, rest = _split(rest)
        if events:
            yield b"", events
        elif len(rest) > _MOST_EVENT:
            raise ValueError(f"one of its events has more than {_MOST_EVENT:,} bytes")
    events, tail = _last(rest)
    yield head + b"]" + tail if head else b"", events


def _split(data: bytes) -> tuple[list[_Event], bytes]:
    """The events that end in ``data``, and what is left of it."""
    until = len(data)
    for _ in range(_TRIES):
        found = list(_BETWEEN.finditer(data, max(0, until - _WINDOW), until))
        if not found:
            break
        until, at = found[-1].start() + 1, found[-1].end() - 1
        try:
            return _decoded(b"[" + data[:until] + b"]"), data[at:]
        except _NotHere:
            continue
    return [], data


class _NotHere(Exception):
    """No event ends here."""


def _decoded(text: bytes) -> list[_Event]:
    try:
        return _DECODER.decode(text)
    except msgspec.ValidationError as error:
        raise ValueError(f"an event of it is none: {error}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise _NotHere(str(error)) from None


def _last(data: bytes) -> tuple[list[_Event], bytes]:
    """The last events, and what stands behind the end of their array."""
    why = ""
    for found in itertools.islice(_END.finditer(data), _TRIES):
        try:
            return _decoded(b"[" + data[: found.start() + 1] + b"]"), data[found.end() :]
        except _NotHere as error:
            why = f": {error}"
    if (empty := _EMPTY.match(data)) is not None:
        return [], data[empty.end() :]
    raise ValueError(f"it ends in the middle of its events{why}")


def _keep(sink: _Sink, event: _Event) -> None:
    """Put one event where it belongs."""
    if event.ph != "X":
        return None
    cat = event.cat.lower()
    device, launch = cat in _DEVICE, cat in _LAUNCH
    if not device and not launch and cat not in _HOST:
        return None
    try:
        start, length = float(event.ts or 0), float(event.dur or 0)
    except ValueError:
        return sink.drop("events whose time is no number")
    if not abs(start) < _MOST_TS or not 0 <= length < _MOST_TS or event.ts is None:
        return sink.drop("events that end before they begin, or without a time")
    begin = round(start * 1000)
    name = str(event.name)
    if not device and not launch:
        asks = name.startswith(("c10d::", "nccl:", "gloo:")) or name == "record_param_comms"
        fields = _fields(event.args) if asks else None
        sink.on_host(name, begin, begin + round(length * 1000), sink.thread(event.tid), fields)
        return None
    try:
        args = _ARGS.decode(event.args) if event.args else _DeviceArgs()
        correlation = int(args.correlation if args.correlation is not None else -1)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return sink.drop("events whose arguments cannot be read")
    if abs(correlation) >= 1 << 62:
        return sink.drop("events whose arguments cannot be read")
    if launch:
        sink.launch.extend((correlation, begin, sink.thread(event.tid)))
        return None
    stream = event.tid if args.stream is None else args.stream
    code = sink.names.setdefault(name, len(sink.names))
    end = begin + round(length * 1000)
    sink.device.extend((begin, end, sink.thread(("stream", stream)), correlation, code))
    return None


def _fields(args: msgspec.Raw) -> Mapping[str, object]:
    try:
        value = msgspec.json.decode(args) if args else {}
    except (msgspec.DecodeError, RecursionError):
        value = {}
    return value if isinstance(value, dict) else {}


# -- Nsight Systems -------------------------------------------------------------------------------
_NVTX_STEP = re.compile(
    r"(?:ProfilerStep\s?#|(?:train_)?(?:iteration|iter|step)[ _#:]*)(\d+)", re.I
)
_NVTX_SIZES = re.compile(r", sizes = (\[[][\d, ]*\])")
_PROCESS = 1 << 24  # a global thread id is process and thread, of so many bits each
_WORK = (
    ("CUPTI_ACTIVITY_KIND_KERNEL", "COALESCE(demangledName, shortName)"),
    ("CUPTI_ACTIVITY_KIND_MEMCPY", "NULL"),
    ("CUPTI_ACTIVITY_KIND_MEMSET", "NULL"),
)
_ABOUT = (
    ("gpu", "TARGET_INFO_GPU", "name FROM TARGET_INFO_GPU"),
    ("node", "TARGET_INFO_SYSTEM_ENV", "value FROM TARGET_INFO_SYSTEM_ENV WHERE name = 'Hostname'"),
    ("since", "TARGET_INFO_SESSION_START_TIME", "utcEpochNs FROM TARGET_INFO_SESSION_START_TIME"),
)


def _read_nsight(path: Path) -> list[Recorded]:
    try:
        uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as base:
            base.execute("PRAGMA trusted_schema = OFF")
            return _of_processes(path, base)
    except sqlite3.Error as error:
        raise ValueError(f"it is no export of Nsight Systems, or is damaged: {error}") from None


def _of_processes(path: Path, base: sqlite3.Connection) -> list[Recorded]:
    """One rank per process that launched work on a device."""
    tables = {name for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type='table'")}
    if not tables & {table for table, _ in _WORK}:
        raise ValueError("it has no work on a device: nsys profile --trace=cuda,nvtx")
    texts = dict(base.execute("SELECT id, value FROM StringIds")) if "StringIds" in tables else {}
    sinks: dict[int, _Sink] = {}

    def sink(process: int) -> _Sink:
        return sinks.setdefault(process >> 24, _Sink(path))

    for table, name in _WORK:
        if table in tables:
            _read_work(base, table, name, texts, sink)
    if "CUPTI_ACTIVITY_KIND_RUNTIME" in tables:
        query = "SELECT correlationId, start, globalTid FROM CUPTI_ACTIVITY_KIND_RUNTIME"
        for correlation, start, thread in _whole(base.execute(query), 3):
            one = sink(thread)
            one.launch.extend((correlation, start, one.thread(thread % _PROCESS)))
    if "NVTX_EVENTS" in tables:
        _read_ranges(base, texts, sink)
    ranks = [one.done() for _, one in sorted(sinks.items()) if one.device]
    about = {
        name: str(row[0])
        for name, table, query in _ABOUT
        if table in tables and (row := base.execute(f"SELECT {query}").fetchone())
    }
    since = about.get("since", "")
    for found in ranks:
        found.gpu, found.node = about.get("gpu", ""), about.get("node", "")
        _shift(found, int(since) if since.isdecimal() and len(since) < 20 else 0)
    return ranks


def _read_work(
    base: sqlite3.Connection, table: str, name: str, texts: Mapping[int, str],
    sink: Callable[[int], _Sink],
) -> None:  # fmt: skip
    """Kernels, copies or fills of the device."""
    query = f"SELECT globalPid, start, end, streamId, correlationId, {name} FROM {table}"
    for process, start, end, stream, correlation, text in _whole(base.execute(query), 1):
        one = sink(process)
        if not _numbers(start, end, correlation) or end < start:
            one.drop("events that end before they begin, or without a time")
            continue
        label = str(texts.get(text, table.rpartition("_")[2].lower()))
        code = one.names.setdefault(label, len(one.names))
        one.device.extend((start, end, one.thread(("stream", stream)), correlation, code))


def _read_ranges(
    base: sqlite3.Connection, texts: Mapping[int, str], sink: Callable[[int], _Sink]
) -> None:
    """NVTX: steps, calls and operators of the host."""
    query = "SELECT start, end, globalTid, text, textId FROM NVTX_EVENTS WHERE end IS NOT NULL"
    for start, end, thread, text, number in _whole(base.execute(query), 3):
        label = str(text if text is not None else texts.get(number, ""))
        one = sink(thread)
        if (step := _NVTX_STEP.fullmatch(label)) is not None:
            one.found.steps.append((int(step[1]), start, end))
            continue
        sizes = _NVTX_SIZES.search(label)
        fields = {"Input Dims": msgspec.json.decode(sizes[1])} if sizes else {}
        name = label.partition(", ")[0]
        one.on_host(name, start, end, one.thread(thread % _PROCESS), fields)


def _whole(rows: Iterable[tuple[Any, ...]], count: int) -> Iterator[tuple[Any, ...]]:
    """Rows whose first ``count`` columns are numbers that can be used."""
    return (row for row in rows if _numbers(*row[:count]))


def _numbers(*values: object) -> bool:
    """Whether they are whole numbers of 63 bits: SQLite keeps anything in any column."""
    return all(isinstance(value, int) and abs(value) < 1 << 62 for value in values)


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
        ranks[rank] = _of_dump(path, dump, entries, times), entries
    desc, count = _shared_mark([entries for _, entries in ranks.values()])
    for found, entries in ranks.values():
        marks = [e for e in entries if e.desc == desc and not e.pair and e.seq % count == 0]
        asked = {call.fields["record"]: call.end for call in found.calls}
        steps = [
            (one.seq // count, asked[one.record] + 1, asked[other.record] + 1)
            for one, other in itertools.pairwise(marks)
        ]
        if marks and found.calls[-1].end > (last := asked[marks[-1].record]):
            steps.append((-1, last + 1, 1 << 62))
        found.steps = [*steps[:-1], (-1, *steps[-1][1:])] if steps else []
    return [found for found, _ in ranks.values()]


def _of_dump(
    path: Path, dump: dumps.Dump, entries: list[dumps.Entry], times: Mapping[int, _Timed]
) -> Recorded:
    """One rank; a call's kernel is what its duration says."""
    sink, now, over = _Sink(path), 0, dict[str, int]()
    sink.names["nccl: by its Flight Recorder"] = 0
    for entry in entries:
        now = max(now + 1, entry.created_ns)
        fields = {
            "record": entry.record,
            "Collective name": entry.op,
            "dtype": entry.dtypes[0] if entry.dtypes else "",
            "In msg nelems": sum(entry.numbers[0]),
            "Out msg nelems": sum(entry.numbers[1]),
            "Process Group Name": entry.group,
            f"nccl:{entry.op}/Concrete Inputs": ["", "", str(entry.to)],
        }
        sink.on_host(f"nccl:{entry.op}", now, now, 0, fields)
        took = times[entry.record] if entry.record in times else _Timed(entry.record)
        if took.duration_ms is None:
            continue
        length = round(1e6 * min(max(took.duration_ms, 0.0), 1e9))
        end = max(now, over.get(entry.group, 0)) + length
        if seen := took.time_discovered_completed_ns:
            end = max(end, min(seen - _POLL, now + (1 << 50)))
        over[entry.group] = end
        sink.launch.extend((entry.record, now, 0))
        sink.device.extend((end - length, end, 0, entry.record, 0))
    found = sink.done()
    found.rank = dump.rank
    found.groups = {name: (one.desc, one.ranks) for name, one in dump.groups.items()}
    found.world = max((len(one.ranks) for one in dump.groups.values()), default=0)
    found.dropped[_ASSUMED] = len(entries)
    return found


def _shared_mark(ranks: list[list[dumps.Entry]]) -> tuple[str, int]:
    """(description of groups, how many of their collectives an iteration has), the fewest that are
    the same on all ranks."""
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


def _period(entries: list[dumps.Entry]) -> int:
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
