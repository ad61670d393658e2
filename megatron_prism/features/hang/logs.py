"""Read job logs: what watchdogs, processes that end and launchers print, as dumps and events.

In : log files of one or many ranks, mixed, perhaps packed or cut, with any launcher's prefix.  Out:
a DumpSet: of each rank that speaks the calls that its watchdog names, its counters, and what
happened to it (``RankEvent``).  ``log_grammar`` says what lines mean, ``log_errors`` reads
tracebacks, ``attempts`` leaves out what earlier attempts of the job printed.

A log names the group of a call, not its members: these are those of Megatron's parallel sizes,
where the log has them, else the ranks that speak of that group.  A watchdog speaks of one group.
Of the others a rank that waits is taken to have come to all calls there, so nothing is said against
it; a rank whose watchdog is silent waits for nobody.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from megatron_prism.core import code_files, foreign
from megatron_prism.core.errors import DumpError, PrismError
from megatron_prism.core.world import World, ranks_text
from megatron_prism.features.hang import log_grammar, log_lines
from megatron_prism.features.hang.attempts import Record, last_attempt
from megatron_prism.features.hang.calls import Calls, Entry
from megatron_prism.features.hang.dumps import (
    UNNAMED,
    Dump,
    DumpSet,
    Group,
    RankEvent,
    RankWait,
    Status,
    has_dumps,
    rank_of_name,
    read,
)
from megatron_prism.features.hang.launchers import Exit, FailureTable, is_of_launcher
from megatron_prism.features.hang.log_errors import LOGGED, Raised, Tracebacks
from megatron_prism.features.hang.log_kinds import Says
from megatron_prism.features.hang.log_lines import Differ, LoggedCall
from megatron_prism.features.hang.ras import parse_ras

_MOST = 1 << 31  # bytes of one log
_HEAD = 1 << 16  # bytes by which a log is told from other files
_HOLE = 1 << 26  # bytes of NULs in front of a log that was cut in place
_CONTROLS = re.compile(rb"[\x01-\x06\x0e-\x1a\x1c-\x1f]")
_CONTROL = 50  # bytes of a text, of which at most one is a control character
_RUNS = 8  # runs of NULs in the head of a log, at most
FIX = "name what the job printed: prism hang --logs job.log, or one file per rank"

_ATTEMPT = re.compile(r"(?:^|/)attempt_(\d{1,4})(?:/|$)")  # folders of torchrun --log-dir
_NATIVE = re.compile(r"^\s*#\d+ (\S+) from (\S+):(\d+)")
_THREAD = re.compile(r'Thread (?:0x)?\w+ \([\w+]+\): ?"?(\w*)')  # what py-spy dump prints
_PLACE = re.compile(r"^\s+([\w<>.]+) \((\S+?):(\d+)\)$")
_SIZE = re.compile(r"([a-z-]+(?: size)?(?:-\w+ size)?): (\d+)")
_SIZES = {
    "world size": "size",
    "context-parallel size": "cp",
    "tensor-model-parallel size": "tp",
    "pipeline-model-parallel size": "pp",
}
_ARGUMENT = re.compile(r"^\s*(expert_model_parallel_size|expert_tensor_parallel_size) \.+ (\d+)$")
_BASES = {
    "all_gather": "_ALLGATHER_BASE",
    "reduce_scatter": "_REDUCE_SCATTER_BASE",
    "all_to_all": "ALLTOALL_BASE",
}
_STEPS = {
    "recv_forward": ("recv", -1),
    "send_forward": ("send", 1),
    "recv_backward": ("recv", 1),
    "send_backward": ("send", -1),
}
_EVIDENCE = 4  # lines of evidence that are shown
_MOST_PARTS = 4096  # tasks of one line
_OF_JOB = (Says.EVIDENCE, Says.STARTS, Says.DEDUPLICATED, Says.ABSENT)
_OF_LAUNCHERS = (
    Says.REPORT,
    Says.ROOT_CAUSE,
    Says.EXITED,
    Says.WORKER_DIED,
    Says.TASKS,
    Says.LAUNCHER_ENDS,
    Says.ACTOR_DIED,
    Says.PROCESS,
)


@dataclass(frozen=True)
class _Counts:
    """Counters of one group; ``failed``: the number of the call that timed out, -1 if none did."""

    group: str
    enqueued: int
    completed: int
    failed: int
    group_rank: int


@dataclass(frozen=True)
class Died:
    """The process of a rank ended, by what a launcher says.

    A watchdog ends its process, too: of a rank whose watchdog spoke it says nothing.
    """

    text: str


@dataclass(frozen=True)
class _Fired:
    """The watchdog of a rank took its process down; another line names the call."""


@dataclass
class _Speaker:
    """What one rank printed: its calls, (enqueued, completed) by group, what happened to it."""

    calls: list[LoggedCall] = field(default_factory=list)
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    group_ranks: dict[str, int] = field(default_factory=dict)
    stack: list[str] = field(default_factory=list)  # of its main thread, innermost first
    events: list[RankEvent] = field(default_factory=list)
    fired: bool = False  # whether its watchdog took it down, whatever line names the call


def op_type(name: str) -> str:
    """What a watchdog calls a collective of ours or of the recorder's."""
    return _BASES.get(name, name.replace("_", "").upper())


def _standing(stack: list[str]) -> Iterator[RankEvent]:
    """Where a stack of py-spy says that a host stands: in a call of torch.distributed or of its
    store, or at work of its own.
    """
    calls = [frame for frame in stack if "torch/distributed" in frame]
    # c10d_logger.py wraps most functions: it says nothing of the call
    calls = [frame for frame in calls if not frame.startswith("wrapper ")] or calls
    own = [frame for frame in stack if "torch/distributed" not in frame]
    if calls:
        outer = stack[stack.index(calls[-1]) + 1 :]
        site = "its script"
        for frame in outer:
            if "torch/distributed" not in frame:
                site = frame
                break
        yield RankEvent("in a call", f"{calls[-1].partition(' ')[0]} of {site}: its stack")
    elif own:
        yield RankEvent("at work", " < ".join(own[:4]))


def read_folder(folder: Path) -> DumpSet:
    """What lies in ``folder``: dumps, answers of torch's HTTP handler, logs; a rank's dump says
    more than its log.  DumpError if there is nothing of them.
    """
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    logs = [path for path in paths if path.is_file() and is_log(path)]
    if logs and not has_dumps(folder):
        return read_logs(logs)
    dumps = read(folder)
    if not logs:
        return dumps
    with contextlib.suppress(DumpError):  # none of its lines is of a rank
        return together(dumps, logs)
    return dumps


def together(dumps: DumpSet | None, logs: Sequence[str | os.PathLike[str]]) -> DumpSet:
    """Dumps and logs of one job as one observation."""
    if not logs:
        assert dumps is not None, "dumps or logs"
        return dumps
    logged = read_logs(logs)
    if dumps is None:
        return logged
    waits = tuple(wait for wait in logged.waits if wait.rank not in dumps.dumps)
    dump_of_rank = {**logged.dumps, **dumps.dumps}
    return DumpSet(
        dump_of_rank,
        dumps.unreadable,
        logged.events,
        logged.evidence,
        waits,
        logged.differ,
        logged.absent,
        logged.logged,
        logged.world,
        logged.cut_log,
    )


def is_log(path: Path) -> bool:
    """Whether a file is text without being JSON, by its first bytes.

    Runs of NULs are those of a log that was cut in place, or of a disk that was full; a file in
    which they stand everywhere is none.
    """
    try:
        data = foreign.first_bytes(path, _HEAD)
        if not data.strip(b"\0") and len(data) == _HEAD:
            data = foreign.first_bytes(path, _HOLE)
    except OSError:
        return False
    pieces = [piece for piece in data.split(b"\0") if piece]
    if not 0 < len(pieces) <= _RUNS or _CONTROL * len(_CONTROLS.findall(data)) > len(data):
        return False
    return pieces[0].lstrip()[:1] not in (b"{", b"\x80")


def read_logs(paths: Iterable[str | os.PathLike[str]]) -> DumpSet:
    """All ranks that speak in ``paths``.  DumpError if none does."""
    job = _Job()
    for number, path in enumerate(map(Path, paths)):
        with foreign.reading(path, "a log", FIX, error=DumpError):
            data, cut = foreign.read_to_cut(path, _MOST, 1000)
        if cut:
            job.notes.append(f"{path.name} is cut off: it is read up to there")
        owner = rank_of_name(path.name)
        attempt = _ATTEMPT.search(str(path.parent))
        log = _Log(job, number, owner, int(attempt[1]) if attempt else 0)
        log.read(data.decode(errors="replace"))
        if cut and log.speakers.owner is None:
            job.cut_log = True
    if not job.says_anything:
        raise DumpError(
            "no line of these logs is of a rank: [rank12]: …, or a rank in its name", fix=FIX
        )
    return job.dumps()


class _Noted(NamedTuple):
    """What a line says of a rank, before the whole file is read.

    Attributes:
        rank: The rank.
        line: Number of the line.
        starts: How often the job had started in the file before the line.
        fired_s: When a watchdog fired, in seconds of the year; -1: none did.
        value: What the line says.
    """

    rank: int
    line: int
    starts: int
    fired_s: float
    value: object


class _Log:
    """Reads one file into the records of the job."""

    def __init__(self, job: _Job, number: int, owner: int | None, attempt: int) -> None:
        self.job, self.number, self.owner, self.attempt = job, number, owner, attempt
        self.starts = 0
        self.sized = False  # whether the job's sizes were printed
        self.line = 0
        self.fired_s = -1.0  # of the line that is read
        self.calls: dict[int, list[LoggedCall]] = defaultdict(list)
        self.tracebacks: dict[int, Tracebacks] = defaultdict(Tracebacks)
        self.main_thread: set[int] = set()  # ranks of which that stack is being read
        self.native: LoggedCall | None = None  # the call of which torch's stack is being read
        # of lines of which nobody knows the rank, by processes as launchers name them
        self.unmarked: dict[str, Tracebacks] = defaultdict(Tracebacks)
        self.noted: list[_Noted] = []
        self.failures = FailureTable(number)
        self.launcher_ends = False  # whether the launcher ends what still runs
        self.actor_died = False  # whether the next process that is named is of a dead actor

    def read(self, text: str) -> None:
        """Read all lines; their records go to the job."""
        self._read_ras(text)
        lines = log_lines.logical_lines(text)
        speakers = log_lines.Speakers(lines, self.owner)
        if speakers.owner is not None and any(lines):
            self.job.logged.add(speakers.owner)
        self.speakers = speakers
        for self.line, line in enumerate(lines):
            self._read_sizes(line)
            rank, rest = speakers.of(line)
            self._statements(rank, rest)
            # frames of torch's stack have no prefix of their own
            frame = _NATIVE.match(rest) if self.native is not None else None
            if frame is not None and self.native is not None:
                self.native.stack.append(frame[1])
            # a line of the rank whose stack is read: more frames may follow; of another: none do
            elif rank is not None and self.native not in self.calls[rank]:
                self.native = None
            if rank is not None:
                self.job.logged.add(rank)
                self._python(rank, rest)
            # torchrun's table says whose its traceback is
            elif "traceback :" not in line:
                process, message = speakers.unknown_process(rest)
                self.unmarked[process].read(message)
        self._hand_over()

    def _hand_over(self) -> None:
        """Give the job what the file says, once all lines are read.

        A record waits until then: the group of its call may be named by a later line.
        """
        for name in sorted(self.speakers.numbering_groups):
            note = f"ranks as {name} numbers them: no line has their numbers in the job"
            if note not in self.job.notes:
                self.job.notes.append(note)
        self.job.records += map(self._record_of, self.noted)
        for process, tracebacks in self.unmarked.items():
            self._hand_over_unmarked(process, tracebacks)

    def _record_of(self, noted: _Noted) -> Record[object]:
        """Return the record of a noted line, with the call that timed out and its begin."""
        value = noted.value
        call: tuple[str, int] | None = None
        issued_s = -1.0
        if isinstance(value, LoggedCall):
            call = value.group, value.seq
            # the watchdog fires when the call has run for so long
            if noted.fired_s >= 0 and value.ran_ms >= 0:
                issued_s = noted.fired_s - value.ran_ms / 1e3
        # counters of a group, with the number of the call that timed out
        elif isinstance(value, _Counts) and value.failed >= 0:
            call = value.group, value.failed
        return Record(
            rank=noted.rank,
            file=self.number,
            line=noted.line,
            value=value,
            fired_s=noted.fired_s,
            issued_s=issued_s,
            call=call,
            start=noted.starts,
            attempt=self.attempt,
        )

    def _hand_over_unmarked(self, process: str, tracebacks: Tracebacks) -> None:
        """Give the job the exceptions of a process whose rank no line says.

        torch marks lines from init_process_group on: what ended a rank before has no mark.
        """
        speaker = "a process whose rank is not printed"
        if process:
            speaker += f" ({process})"
        for raised in tracebacks.raised:
            if raised.handled:
                continue
            if raised.kind in ("exception", "out of memory"):
                self.job.unmarked.append(f"{speaker}: {raised.text}")
            # the process ended because its peers had: it is no cause
            elif raised.says_others_are_gone:
                self.job.unmarked_gone.append(f"{speaker}: {raised.text}")

    def _note(self, rank: int, value: object) -> None:
        """Note what the line that is being read says of a rank."""
        self.noted.append(_Noted(rank, self.line, self.starts, self.fired_s, value))

    # -- lines of the job -------------------------------------------------------------------------
    def _read_ras(self, text: str) -> None:
        """Read a report of NCCL's RAS, if the file is one."""
        if "launched up to operation" in text or '"collective_counts"' in text:
            with contextlib.suppress(ValueError):
                report = parse_ras(text)
                self.job.evidence += [f"RAS: {row}" for row in (*report.lost, *report.behind)]

    def _read_sizes(self, line: str) -> None:
        """Read Megatron's parallel sizes."""
        if "using world size" in line:
            for name, size in _SIZE.findall(line[line.index("using world size") :]):
                name = name.removeprefix("using ")
                if name in _SIZES:
                    self.job.sizes[_SIZES[name]] = int(size)
            world = re.search(r"world size: (\d+)", line)
            if world is not None:
                self.job.sizes["size"] = int(world[1])
        elif (argument := _ARGUMENT.match(line)) is not None:
            self.job.sizes["ep" if "model" in argument[1] else "etp"] = int(argument[2])

    def _read_exit(self, match: re.Match[str], text: str) -> None:
        """Read how the process of a rank ended, by Composer or mpirun."""
        rank = int(match["rank"])
        fields = match.groupdict()
        if "signal" not in fields:
            end = Exit(rank, int(match["code"]), "Composer", (self.number, -1))
        elif self.speakers.has_torchrun:
            # its process is a node
            self.job.evidence.append(text[match.start() :].strip()[:200])
            return
        # mpirun names the process that ended first
        else:
            end = Exit(rank, -int(match["signal"]), "mpirun", (self.number, -2), is_first=True)
        self._note(rank, end)

    def _read_tasks(self, match: re.Match[str], text: str) -> None:
        """Read which tasks srun saw end, and by what."""
        tasks: list[int] = []
        for part in match["tasks"].split(",")[:_MOST_PARTS]:
            first, _, last = part.partition("-")
            if first.isdecimal() and (not last or last.isdecimal()):
                last_task = int(last or first)
                tasks += range(int(first), last_task + 1)[:_MOST_PARTS]

        # srun itself kills the others when one has failed
        is_killed_with_others = match["cause"] == "Killed" and len(tasks) > 1
        ended_by_launcher = self.launcher_ends or is_killed_with_others
        ranks = [self.speakers.rank_of_task(task) for task in tasks]
        if ended_by_launcher or None in ranks:
            self.job.evidence.append(text[match.start() :].strip()[:200])
            return
        for rank in ranks:
            assert rank is not None
            self.job.logged.add(rank)
            self._note(rank, RankEvent("killed", f"{match['cause']} (srun)"))

    def _read_process(self, match: re.Match[str], noun: str) -> None:
        """Read the process of an actor, or of a worker, of Ray that died."""
        self.actor_died = False
        rank = self.speakers.rank_of_process(int(match["pid"]))
        if rank is None:
            self.job.evidence.append(f"{noun} of Ray died, process {match['pid']}")
        else:
            self._note(rank, Died("its actor died (Ray)"))

    def _start(self, text: str) -> None:
        """Count the starts of the job; what a log has before its first one may be another node's,
        whose log stands in front.
        """
        sizes = text.startswith("using world size")
        if not sizes or self.sized:
            self.starts += 1
            self.unmarked.clear()
            self.launcher_ends = False  # that was the attempt before
        self.sized |= sizes

    # -- lines of torch ---------------------------------------------------------------------------
    def _statements(self, rank: int | None, text: str) -> None:
        """Read what a line says, of ``rank`` if it has one."""
        clock = log_lines.TIME.search(text)
        self.fired_s = -1.0 if clock is None else _second_of_year(clock)
        group = log_lines.GROUP.search(text)
        name = "" if group is None else group["name"]
        if group is not None and group["desc"]:
            self.job.descs[name] = group["desc"]
        for says, match in log_grammar.statements(text):
            if says in _OF_LAUNCHERS:
                self._launcher(says, match, text)
            elif says in _OF_JOB:
                self._of_job(says, match, rank)
            elif rank is not None:
                self._of_rank(rank, says, match, text, group)
            elif says is Says.DIFFER:
                # the rank that prints it is the first one that the line names, in its group
                self._note(int(match["rank"]), _differ(None, match))
            elif says is Says.KILLED:
                # nobody knows whose process it was
                self.job.evidence.append(text.strip()[:200])

    def _of_job(self, says: Says, match: re.Match[str], rank: int | None) -> None:
        """Read what a line says of the job, whoever prints it."""
        if says is Says.EVIDENCE:
            self.job.evidence.append(_evidence(match, rank))
        elif says is Says.STARTS:
            self._start(match[0])
        elif says is Says.DEDUPLICATED:
            self.job.deduplicated = True
        elif says is Says.ABSENT:
            numbers = re.findall(r"\d+", match["ranks"])
            self.job.absent |= set(map(int, numbers))

    def _of_rank(
        self,
        rank: int,
        says: Says,
        match: re.Match[str],
        text: str,
        group: re.Match[str] | None,
    ) -> None:
        """Read what a rank says of itself."""
        if says is Says.CALL:
            self._call(rank, log_lines.call_of(match, text), group)
        elif says is Says.COUNTS and group is not None:
            self._counts(rank, match, text, group)
        elif says is Says.FAILED and group is not None:
            self._failed_call(rank, int(match[1]), text, group)
        elif says is Says.FIRED:
            self._note(rank, _Fired())
        elif says is Says.NATIVE_STACK:
            self.native = self.calls[rank][-1] if self.calls[rank] else None
        elif says is Says.DIFFER:
            self._note(rank, _differ(rank, match))
        elif says is Says.PEER_GONE:
            self._note(rank, Raised("", match[1]))
        elif says is Says.JOINED:
            self.job.joined = int(match[1][:9])
        elif says is Says.DEVICE:
            self._note(rank, RankEvent("exception", f"{match[1][:200]} in its NCCL watchdog"))
        elif says is Says.KILLED:
            self._note(rank, RankEvent("killed", text.strip()[-200:]))

    def _launcher(self, says: Says, match: re.Match[str], text: str) -> None:
        """Read a line of a launcher: it names ranks in its own way."""
        if says is Says.REPORT:
            name = "time"
            value = match["time"]
            if value is None:
                name = match["name"]
                value = match["value"]
            failure = self.failures.read(name, value)
            if failure is not None:
                self._note(failure.rank, failure)
        elif says is Says.ROOT_CAUSE:
            self.failures.begin_first()
        elif says is Says.EXITED:
            self._read_exit(match, text)
        elif says is Says.WORKER_DIED:
            self._read_process(match, "a worker")
        elif says is Says.TASKS:
            self._read_tasks(match, text)
        elif says is Says.LAUNCHER_ENDS:
            self.launcher_ends = True
        elif says is Says.ACTOR_DIED:
            self.actor_died = True
        elif says is Says.PROCESS and self.actor_died:
            self._read_process(match, "an actor")

    def _call(self, rank: int, call: LoggedCall, group: re.Match[str] | None) -> None:
        """Note a call that timed out; several lines speak of one."""
        if group is not None:
            call.group, call.group_rank = group["name"], int(group["rank"])
        if call.seq < 0:
            kind = call.kind or "a call"
            self.job.evidence.append(f"rank {rank} waits in {kind}; its number is not printed")
            return
        for earlier in self.calls[rank]:
            if earlier.seq == call.seq and (not call.group or earlier.group in ("", call.group)):
                earlier.group = earlier.group or call.group
                earlier.group_rank = max(earlier.group_rank, call.group_rank)
                # a line that was cut has the number alone
                if not earlier.kind:
                    earlier.kind, earlier.elements = call.kind, call.elements
                    earlier.timeout_ms, earlier.ran_ms = call.timeout_ms, call.ran_ms
                earlier.op = earlier.op or call.op
                return
        self.calls[rank].append(call)
        self._note(rank, call)

    def _failed_call(self, rank: int, number: int, text: str, group: re.Match[str]) -> None:
        """Note the number of a call that timed out, where the line's counters cannot be read."""
        # the line is cut off in the number: it may have more digits
        if text.endswith(str(number)):
            return
        # the counters say the same, and how far the rank is
        has_counters = any(says is Says.COUNTS for says, _ in log_grammar.statements(text))
        if not has_counters:
            self._call(rank, LoggedCall(number), group)

    def _counts(self, rank: int, match: re.Match[str], text: str, group: re.Match[str]) -> None:
        """Note counters; the call that failed is of their group."""
        failed = -1
        for says, statement in log_grammar.statements(text):
            if says is Says.FAILED:
                failed = int(statement[1])
                break
        completed = int(match[2])
        # the line is cut off in the number: the call before the failed one was the last to end
        is_cut = text.endswith(match[2]) and str(failed - 1).startswith(match[2])
        if is_cut and completed < failed - 1:
            completed = failed - 1
        counts = _Counts(group["name"], int(match[1]), completed, failed, int(group["rank"]))
        for call in self.calls[rank]:
            if call.seq == failed and call.group in ("", counts.group):
                call.group, call.group_rank = counts.group, counts.group_rank
        self._note(rank, counts)

    # -- lines of Python --------------------------------------------------------------------------
    def _python(self, rank: int, line: str) -> None:
        """Read tracebacks, and what py-spy printed of the main thread."""
        tracebacks = self.tracebacks[rank]
        if tracebacks.raised and log_grammar.is_iteration(line):
            tracebacks.goes_on()
        raised = tracebacks.read(line)
        if raised is not None:
            self._note(rank, raised)
        thread = _THREAD.search(line)
        place = _PLACE.match(line)
        if thread is not None and thread[1] == "MainThread":
            self.main_thread.add(rank)
        elif thread is not None:
            self.main_thread.discard(rank)
        elif rank in self.main_thread and place is not None:
            path = code_files.without_environment(place[2])
            self.job.stacks[rank].append(f"{place[1]} ({path}:{place[3]})")


def _second_of_year(clock: re.Match[str]) -> float:
    """The time in front of a line of c10's logging; months as if they had 31 days."""
    month, day, hour, minute, second = map(int, clock.groups())
    return float((((month * 31 + day) * 24 + hour) * 60 + minute) * 60 + second)


def _evidence(match: re.Match[str], rank: int | None) -> str:
    """A line of evidence, with whose it is."""
    groups = match.groupdict()
    if "monitored" in groups:
        return f"rank monitor of rank {groups['monitored']}: {groups['text']}"
    if groups.get("local") is not None:
        return f"local rank {groups['local']} {groups['exits'].strip()[:200]}"
    if "late" in groups:
        return " ".join(groups["late"].split())
    text = match[0].strip()[:200]
    if "didn't" in text:
        return f"desync report: {text.removeprefix('desync report: ')}"
    if groups.get("horovod") is not None:
        return f"Horovod: {groups['horovod']} of a tensor"
    if groups.get("own") is not None:
        text = groups["own"].strip()[:200]
    if rank is not None and ("own" in groups or text.startswith("ProcessGroup")):
        return f"rank {rank}: {text}"
    return text


def _differ(speaker: int | None, match: re.Match[str]) -> Differ:
    """What torch's own check of collectives says."""
    other = -1 if match["other"] is None else int(match["other"])
    call, others = log_lines.fingerprint(match["call"]), log_lines.fingerprint(match["others"])
    return Differ(speaker, int(match["rank"]), call, other, others)


class _Job:
    """What all logs say, and the dumps that come of it."""

    def __init__(self) -> None:
        self.records: list[Record[object]] = []
        self.ranks: dict[int, _Speaker] = defaultdict(_Speaker)
        self.stacks: dict[int, list[str]] = defaultdict(list)
        self.descs: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        self.exits: list[Exit] = []  # by reports of launchers
        self.joined = 0  # how many ranks the job has, by its store
        self.gone: dict[str, list[int]] = defaultdict(list)  # what says that others are gone
        self.unmarked: list[str] = []  # exceptions of processes that nobody names
        self.unmarked_gone: list[str] = []  # of those what says that others are gone
        self.evidence: list[str] = []
        self.notes: list[str] = []  # what the logs lack
        self.logged: set[int] = set()
        self.absent: set[int] = set()
        self.differ: list[Differ] = []
        self.deduplicated = False
        self.cut_log = False

    def dumps(self) -> DumpSet:
        """The observation of the last attempt."""
        self._tell_ranks()
        self._settle_groups()
        self._tell_unlike_sizes()
        self._level()
        groups = self._groups()
        dumps = self._dumps(groups)
        events = {}
        for rank in sorted(self.logged):
            speaker = self.ranks[rank]
            happened = (*speaker.events, *_standing(speaker.stack))
            if happened:
                events[rank] = happened
        self.evidence += dict.fromkeys(self.unmarked)
        for end in self.exits:
            self._add_first_failure(end)
        # behind a time-out all connections close: then it says nothing
        if not any(speaker.calls or speaker.counts for speaker in self.ranks.values()):
            for text, ranks in self.gone.items():
                ranks_of_text = sorted(set(ranks))
                self.evidence.append(f"{ranks_text(ranks_of_text)}: {text}")
            self.evidence += dict.fromkeys(self.unmarked_gone)
        if self.deduplicated:
            self.notes.append("Ray left out like lines of other ranks: RAY_DEDUP_LOGS=0 shows all")
        lines = list(dict.fromkeys(self.evidence))
        evidence = (*self.notes, *lines[:_EVIDENCE])
        return DumpSet(
            dumps,
            events=events,
            evidence=evidence,
            waits=tuple(self._waits(groups)),
            differ=tuple(self.differ),
            absent=tuple(sorted(self.absent)),
            logged=frozenset(self.logged),
            world=self.sizes.get("size", self.joined),
            cut_log=self.cut_log,
        )

    @property
    def says_anything(self) -> bool:
        """Whether a line is of a rank, or says something of the job."""
        is_of_rank = bool(self.logged or self.absent or self.records)
        return is_of_rank or bool(self.evidence or self.unmarked or self.unmarked_gone)

    def _add_first_failure(self, end: Exit) -> None:
        """Add the exit code of the first rank of a node that ended, if nothing else says how.

        Watchdogs end their process by SIGABRT; signals have events of their own.
        """
        speaker = self.ranks[end.rank]
        is_chosen = end.code > 0 and not end.signal
        if not end.is_first or not is_chosen or speaker.calls or speaker.events:
            return
        text = f"rank {end.rank} ended first on its node, with exit code {end.code}"
        self.evidence.append(f"{text} ({end.launcher})")

    def _tell_exits(self) -> None:
        """Give ranks what launchers say of their ends."""
        for end in self.exits:
            if not end.text:
                continue
            self.logged.add(end.rank)
            if is_of_launcher(end, self.exits):
                text = f"rank {end.rank} was {end.text} behind another: perhaps by its launcher"
                self.evidence.append(text)
            else:
                self.ranks[end.rank].events.append(RankEvent("killed", end.text))

    def _tell_ranks(self) -> None:
        """Give each rank what it printed in the last attempt."""
        kept = last_attempt(self.records)
        if len(kept) < len(self.records):
            self.notes.append("the logs are of several attempts of the job: the last one is judged")
        for rank in self.logged:
            self.ranks[rank].stack = self.stacks[rank]
        died: list[tuple[int, Died]] = []
        for record in kept:
            value = record.value
            if isinstance(value, Differ):
                self.differ.append(value)
            elif isinstance(value, Exit):
                self.exits.append(value)
            elif isinstance(value, Died):
                died.append((record.rank, value))
            elif isinstance(value, Raised):
                self._tell_exception(record.rank, value)
            else:
                self._tell_own(self.ranks[record.rank], value)
        self._tell_exits()
        for rank, death in died:
            speaker = self.ranks[rank]
            # its watchdog spoke, or may have: Ray leaves out lines that are alike
            if speaker.calls or speaker.counts or self.deduplicated:
                self.evidence.append(f"rank {rank}: {death.text}")
            else:
                speaker.events.append(RankEvent("killed", death.text))

    def _tell_own(self, speaker: _Speaker, value: object) -> None:
        """Give a rank what its lines say of its calls, and of what happened to it."""
        if isinstance(value, LoggedCall):
            self._add_call(speaker, value)
        elif isinstance(value, _Counts):
            speaker.counts[value.group] = value.enqueued, value.completed
            speaker.group_ranks[value.group] = value.group_rank
        elif isinstance(value, _Fired):
            speaker.fired = True
        elif isinstance(value, RankEvent):
            speaker.events.append(value)

    def _tell_exception(self, rank: int, raised: Raised) -> None:
        """Give a rank an exception: as its own, as one that it handled, or as word of others."""
        events = self.ranks[rank].events
        if raised.handled:
            kind = "logged" if raised.handled == LOGGED else "handled"
            events.append(RankEvent(kind, f"{raised.text} ({raised.handled})"))
        elif raised.kind:
            events.append(RankEvent(raised.kind, raised.text))
        elif raised.says_others_are_gone:
            self.gone[raised.text].append(rank)

    @staticmethod
    def _add_call(speaker: _Speaker, call: LoggedCall) -> None:
        """Add a call, unless another log of the rank has it."""
        for earlier in speaker.calls:
            if earlier.seq == call.seq and earlier.group == call.group:
                return
        speaker.calls.append(call)
        if call.group:
            speaker.group_ranks.setdefault(call.group, call.group_rank)

    # -- groups -----------------------------------------------------------------------------------
    def _settle_groups(self) -> None:
        """Find the group of each call of which no line names it, and set apart groups that share a
        name.

        A call without a name is one of a named group if that alone has such a call and the rank
        fits into it; else it is in a group with those that print the same call.  Such a call did
        not end, and all before it did.
        """
        self._part_names()
        named_calls: list[LoggedCall] = []
        for speaker in self.ranks.values():
            named_calls += [call for call in speaker.calls if call.group]
        for call_of_rank in self._unnamed_calls():
            candidates: set[str] = set()
            for named in named_calls:
                if all(call.is_like(named) for call in call_of_rank.values()):
                    candidates.add(named.group)
            name = min(candidates, default="")

            # one named group alone has such a call, and these ranks may be its members
            if len(candidates) == 1 and self._fits(name, call_of_rank):
                for call in call_of_rank.values():
                    call.group = name
            else:
                self._name_group(call_of_rank)
        self._count_calls()

    def _unnamed_calls(self) -> list[dict[int, LoggedCall]]:
        """Put calls that no line gives a group together with those that may be the same one.

        Returns:
            One dictionary a call: rank -> the call as this rank prints it.
        """
        alike_calls: list[dict[int, LoggedCall]] = []
        for rank, speaker in sorted(self.ranks.items()):
            for call in speaker.calls:
                if not call.group:
                    self._put_with_alike(alike_calls, rank, call)
        return alike_calls

    @staticmethod
    def _put_with_alike(
        alike_calls: list[dict[int, LoggedCall]], rank: int, call: LoggedCall
    ) -> None:
        """Add the call of a rank to the first ones that are like it, else by itself."""
        for call_of_rank in alike_calls:
            # a rank makes a call once
            if rank in call_of_rank:
                continue
            if all(call.is_like(earlier) for earlier in call_of_rank.values()):
                call_of_rank[rank] = call
                return
        alike_calls.append({rank: call})

    def _count_calls(self) -> None:
        """Give ranks whose lines have no counters those that their calls tell."""
        # how far ranks are that wait for the same call and print counters
        last_of_call: dict[tuple[str, int], int] = {}
        for speaker in self.ranks.values():
            for name, (last, ended) in speaker.counts.items():
                key = name, ended + 1
                known_last = last_of_call.get(key, last)
                last_of_call[key] = max(last, known_last)
        for speaker in self.ranks.values():
            for call in speaker.calls:
                # a line without counters: at least this, and nothing says that it is less than
                # what others have that wait for the same call
                ended = call.seq - 1
                key = call.group, call.seq
                last = last_of_call.get(key, call.seq)
                counters = last, ended
                speaker.counts.setdefault(call.group, counters)

    def _tell_unlike_sizes(self) -> None:
        """Show calls of one number and kind, of groups without a name, whose sizes differ."""
        ranks_of_size: dict[tuple[int, str], dict[int, list[int]]] = {}
        for rank, speaker in sorted(self.ranks.items()):
            for call in speaker.calls:
                is_unnamed = self.descs.get(call.group) == UNNAMED
                elements = max(call.elements)
                if is_unnamed and elements >= 0:
                    sizes = ranks_of_size.setdefault((call.seq, call.op), {})
                    sizes.setdefault(elements, []).append(rank)
        for (number, op), sizes in ranks_of_size.items():
            if len(sizes) < 2:
                continue
            parts = [f"{ranks_text(ranks)} with {size}" for size, ranks in sorted(sizes.items())]
            self.evidence.append(
                f"{op or 'call'} #{number}: {', '.join(parts)} elements; one call whose sizes "
                "differ, or calls of groups that the log does not name"
            )

    def _level(self) -> None:
        """Forget of a call what not all of its members print, and share what one alone prints.

        A kind or a size that a line does not show is no other one than that of the other members.
        """
        prints_of_call: dict[tuple[str, int], list[LoggedCall]] = defaultdict(list)
        for speaker in self.ranks.values():
            for call in speaker.calls:
                prints_of_call[call.group, call.seq].append(call)
        for prints in prints_of_call.values():
            kinds = {call.op for call in prints if call.op}
            all_have_sizes = all(min(call.elements) >= 0 for call in prints)
            for call in prints:
                # the others know its kind, and agree about it
                if not call.op and len(kinds) == 1:
                    call.op = min(kinds)
                if not all_have_sizes:
                    call.elements = (-1, -1)

    def _members(self, name: str) -> dict[int, int]:
        """Global rank -> its number in the group, of those that speak of it."""
        return {
            rank: speaker.group_ranks[name]
            for rank, speaker in self.ranks.items()
            if name in speaker.group_ranks
        }

    def _fits(self, name: str, calls: Mapping[int, LoggedCall]) -> bool:
        """Whether ranks whose lines name no group may all be in that one, by their numbers."""
        numbers = {rank: call.group_rank for rank, call in calls.items()}
        return _is_one_group({**self._members(name), **numbers})

    def _name_group(self, calls: Mapping[int, LoggedCall]) -> None:
        """Give calls that no line names a group: one for all, or one for each rank where their
        numbers in their groups show that these are several.
        """
        number_of_rank = {rank: call.group_rank for rank, call in calls.items()}
        is_one_group = _is_one_group(number_of_rank)
        first = min(calls)
        for rank, call in calls.items():
            owner = first if is_one_group else rank
            call.group = f"of #{call.seq} on rank {owner}"
            # several calls of one rank may have one number in groups of their own
            while call.group in self.descs:
                call.group += "'"
        for call in calls.values():
            self.descs[call.group] = UNNAMED

    def _part_names(self) -> None:
        """Set apart groups of one name: to torch 2.3 each process counts its groups by itself."""
        names = {name for speaker in self.ranks.values() for name in speaker.group_ranks}
        for name in sorted(names):
            members = self._members(name)
            if _is_one_group(members):
                continue
            # each of these ranks speaks of a group of its own
            for rank in members:
                speaker = self.ranks[rank]
                new_name = f"{name} of rank {rank}"
                self.descs[new_name] = self.descs.get(name, f"group {name}")
                speaker.group_ranks[new_name] = speaker.group_ranks.pop(name)
                if name in speaker.counts:
                    speaker.counts[new_name] = speaker.counts.pop(name)
                for call in speaker.calls:
                    if call.group == name:
                        call.group = new_name

    def _world(self) -> World | None:
        try:
            return World(**self.sizes) if "size" in self.sizes else None  # type: ignore[arg-type]
        except PrismError:
            return None

    def _desc(self, name: str) -> str:
        """What a group is called: its description, else its name."""
        if name in self.descs:
            return self.descs[name]
        return "default_pg" if name == "0" else f"group {name}"

    def _groups(self) -> Mapping[str, Group]:
        """Name -> the group, with its members where the job's sizes tell them."""
        world = self._world()
        speakers: dict[str, set[int]] = defaultdict(set)
        for rank, speaker in self.ranks.items():
            for name in speaker.counts:
                speakers[name].add(rank)
        groups = {}
        for name, ranks in speakers.items():
            desc = self._desc(name)
            is_default = desc == "default_pg"
            members: Sequence[int] | None = None
            # a rank beyond the sizes is of another job, or these are
            if world is not None and max(ranks) < world.size:
                try:
                    members = world.group(min(ranks), desc)
                except (PrismError, KeyError):
                    members = range(world.size) if is_default else None
            # only the ranks that speak of the group are known; whoever speaks is in the default one
            if not members:
                speaking_ranks = self.ranks.keys() if is_default else ranks
                groups[name] = Group(name, desc, tuple(sorted(speaking_ranks)), True)
            elif set(members) >= ranks:
                groups[name] = Group(name, desc, tuple(members))
        return groups

    # -- dumps ------------------------------------------------------------------------------------
    def _dumps(self, groups: Mapping[str, Group]) -> dict[int, Dump]:
        """A dump for each rank of whose calls something is known, or that failed."""
        enqueued: dict[str, int] = {}  # the last call of a group that anybody names
        completed: dict[str, int] = {}
        for speaker in self.ranks.values():
            for name, (last, ended) in speaker.counts.items():
                enqueued[name] = max(enqueued.get(name, 0), last)
                completed[name] = min(completed.get(name, ended), ended)
        has_sizes = self._world() is not None
        dumps: dict[int, Dump] = {}
        for rank, speaker in sorted(self.ranks.items()):
            own = {name: group for name, group in groups.items() if rank in group.ranks}
            status: dict[str, Status] = {}
            for name, (last, ended) in speaker.counts.items():
                status[name] = Status(last, -1, ended)
            unknown = own.keys() - status.keys()
            waits = any(counters.enqueued > counters.completed for counters in status.values())
            says_nothing = not speaker.counts and not _failed(speaker)

            # nothing is said against a rank that waits: it came to all calls elsewhere
            if waits or speaker.fired:
                for name in unknown & enqueued.keys():
                    status[name] = Status(enqueued[name], -1, completed[name])
            # it says nothing of its calls: as if it had left no dump
            elif says_nothing and (has_sizes or speaker.stack):
                continue
            entries = Calls.of(self._entries(rank, speaker, own))
            dumps[rank] = Dump(
                rank, "log", own, status, entries, ("a log, no dump",), assumed=frozenset(unknown)
            )
        return dumps

    def _waits(self, groups: Mapping[str, Group]) -> Iterator[RankWait]:
        """The calls that timed out, as their ranks name them."""
        for rank, speaker in sorted(self.ranks.items()):
            for call in speaker.calls:
                yield RankWait(rank, _operation(call), call.seq, self._desc(call.group))

    def _entries(
        self, rank: int, speaker: _Speaker, groups: Mapping[str, Group]
    ) -> Iterator[Entry]:
        """The calls of a rank as a recorder would have them."""
        for place, call in enumerate(speaker.calls):
            group = groups.get(call.group)
            if group is None:
                continue
            numbers = _numbers(call, group)
            if group.desc.startswith("PIPELINE") or call.kind in ("SEND", "RECV"):
                yield from _messages(place, rank, call, group, numbers)
                continue
            op = _operation(call)
            if op == "coalesced":
                op = "call"
            yield _entry(place, call, group, op, -1, numbers)


def _failed(speaker: _Speaker) -> bool:
    """Whether something happened to a rank, other than an exception that may have ended nothing."""
    return any(event.kind not in ("handled", "logged") for event in speaker.events)


def _is_one_group(numbers: Mapping[int, int]) -> bool:
    """Whether ranks may be members of one group: their numbers there grow with them."""
    known_numbers = [number for _, number in sorted(numbers.items()) if number >= 0]
    return all(before < after for before, after in itertools.pairwise(known_numbers))


def _operation(call: LoggedCall) -> str:
    """Return the kind of a call.

    The watchdog calls several collectives of one launch COALESCED: then the sizes tell the kind,
    if the line has them.
    """
    inputs, outputs = call.elements
    if call.kind != "COALESCED" or inputs <= 0 or outputs <= 0:
        return call.op or "call"
    if inputs > outputs:
        return "reduce_scatter"
    return "all_gather" if outputs > inputs else "all_reduce"


def _numbers(call: LoggedCall, group: Group) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Elements of input and output, where they may be compared with those of other members.

    Of an all-to-all only those of all members are: one rank's splits need not be even.
    """
    inputs, outputs = call.elements
    alone = call.op == "all_to_all" and group.partial
    if inputs <= 0 or alone:
        return (), ()
    return (inputs,), (outputs,)


def _entry(
    place: int,
    call: LoggedCall,
    group: Group,
    op: str,
    peer: int,
    numbers: tuple[tuple[int, ...], tuple[int, ...]],
) -> Entry:
    """Return a call of a log as a recorder would have it: issued, and not ended.

    Args:
        place: Among the calls of its rank.
        call: Of the log.
        group: That makes it.
        op: What it does.
        peer: Place in the group of the other end of a message; -1 for a collective.
        numbers: Elements of input and output.
    """
    return Entry(
        place,
        group.name,
        group.desc,
        op,
        call.seq,
        call.seq,
        peer,
        numbers,
        (),
        "scheduled",
        False,
        "",
        call.timeout_ms,
        -1,
    )


def _messages(
    place: int,
    rank: int,
    call: LoggedCall,
    group: Group,
    numbers: tuple[tuple[int, ...], tuple[int, ...]],
) -> Iterator[Entry]:
    """The messages of a batch, as torch's stack names them: Megatron's functions say to whom."""
    at = group.ranks.index(rank)
    frames = " ".join(call.stack[:8])
    for word, (name, step) in _STEPS.items():
        if word not in frames:
            continue
        to = (at + step) % len(group.ranks)
        yield _entry(place, call, group, name, to, numbers)
