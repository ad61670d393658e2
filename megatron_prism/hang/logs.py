"""Read job logs: what watchdogs, processes that end and launchers print, as dumps and events.

In : log files of one or many ranks, mixed, perhaps gzip, with any launcher's prefix.  Out: a
DumpSet: of each rank that speaks the calls that its watchdog names, its counters, and what happened
to it (``RankEvent``).  A log names the group of a call, not its members: these are those of
Megatron's parallel sizes, where the log has them, else the ranks that speak of that group.

A watchdog speaks of one group.  Of the others a rank that waits is taken to have come to all calls
there, so nothing is said against it; a rank whose watchdog is silent waits for nobody.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_prism.core import foreign
from megatron_prism.core.collectives import TABLE
from megatron_prism.core.errors import DumpError, PrismError
from megatron_prism.core.world import World
from megatron_prism.hang.dumps import (
    UNNAMED,
    Dump,
    DumpSet,
    Entry,
    Group,
    RankEvent,
    Status,
    has_dumps,
    rank_of_name,
    read,
)
from megatron_prism.hang.ras import parse_ras

_MOST = 1 << 31  # bytes of one log
FIX = "name what the job printed: prism hang --logs job.log, or one file per rank"

_RANK = re.compile(r"\[rank(\d{1,9})\]:?\s?")
_TASK = re.compile(r"^\s*(\d{1,6}): ")  # srun --label
_GROUP = re.compile(
    r"\[PG (?:ID (?P<id>\d+) )?(?:PG )?(?:GUID )?(?P<name>[^\s()\]]+)\s?(?:\((?P<desc>[^)]*)\))? "
    r"Rank (?P<rank>\d+)\]"
)
_ALONE = re.compile(r"\[Rank (\d{1,9})\]")
_CAUGHT = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\((?P<body>.*?)\) ran for \d+"
)
_BODY = re.compile(r"(SeqNum|OpType|NumelIn|NumelOut|Timeout\(ms\))=(\w+)")
_COUNTS = re.compile(
    r"last enqueued (?:NCCL )?work: (-?\d+), (?:last started (?:NCCL )?work: -?\d+, )?"
    r"last completed (?:NCCL )?work: (-?\d+)", re.IGNORECASE
)  # fmt: skip
_FAILED = re.compile(
    r"(?:at work sequence id|at NCCL work|at work|detected by watchdog at work): (\d+)"
)
_DESYNC = re.compile(r"\[([\d, ]+)\] (?:finished|joined|got|never)[^\n]*?didn't (join|finish) "
                     r"collective #(\d+)")  # fmt: skip
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_NATIVE = re.compile(r"^\s*#\d+ (\S+) from (\S+):(\d+)")
_RAISED = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Iteration|Timeout)\b")
_OOM = re.compile(r"out of memory", re.IGNORECASE)
_OUTSIDE = re.compile(
    r"gloo.*Timed out waiting|Timed out waiting \d+ms|Wait timeout|Socket Timeout|"
    r"DistStoreError|wait timeout after|timed out.*(?:store|TCPStore|barrier)", re.IGNORECASE
)  # fmt: skip
_AFTER = re.compile(
    r"Connection (?:closed|reset)|Broken pipe|Socket|NCCL|DistBackend|ChildFailed|SignalException|"
    r"SystemExit|KeyboardInterrupt|collective operation timeout|recvValue failed", re.IGNORECASE
)  # fmt: skip
_THREAD = re.compile(r'Thread (?:0x)?\w+ \([\w+]+\): ?"?(\w*)')  # what py-spy dump prints
_PLACE = re.compile(r"^\s+([\w<>.]+) \((\S+?):(\d+)\)$")
_HEARTBEAT = re.compile(r"\[RankMonitorServer:(\d+)\] (Did not get \w+ heartbeat\. Waited [\d.]+)")
_DEVICE = re.compile(r"thread terminated with exception: (CUDA error: .*)")
_NETWORK = re.compile(
    r"NET/\w+ ?: .*(?:status=|error|timed out|refused).*|NVRM: Xid .*|"
    r"\[\d+\] is setting up NCCL communicator and retrieving ncclUniqueId from \[\d+\]"
)
_KILLED = re.compile(r"oom[-_ ]kill|Out of memory: Killed process", re.IGNORECASE)
_TABLE = re.compile(r"\s*(rank|exitcode)\s*: (-?\d+)")
_SIGNALS = {-9: "killed (SIGKILL)", -11: "crashed (SIGSEGV)", -7: "crashed (SIGBUS)",
            -4: "crashed (SIGILL)", -8: "crashed (SIGFPE)"}  # fmt: skip
_SIZES = {"world size": "size", "context-parallel size": "cp", "tensor-model-parallel size": "tp",
          "pipeline-model-parallel size": "pp"}  # fmt: skip
_ARGUMENT = re.compile(r"^\s*(expert_model_parallel_size|expert_tensor_parallel_size) \.+ (\d+)$")
_BASES = {"all_gather": "_ALLGATHER_BASE", "reduce_scatter": "_REDUCE_SCATTER_BASE",
          "all_to_all": "ALLTOALL_BASE"}  # fmt: skip
_OPS = {row.name.replace("_", "").upper(): row.name for row in TABLE}
_OPS |= {"ALLGATHER_COALESCED": "all_gather", "REDUCE_SCATTER": "reduce_scatter"}
_OPS |= {word: name for name, word in _BASES.items()}
_STEPS = {"recv_forward": ("recv", -1), "send_forward": ("send", 1),
          "recv_backward": ("recv", 1), "send_backward": ("send", -1)}  # fmt: skip


@dataclass
class _Call:
    """A call that timed out; ``stack`` is torch's of the failed collective, innermost first."""

    seq: int
    op: str = ""
    numbers: tuple[int, int] = (-1, -1)
    timeout_ms: int = -1
    group: str = ""
    stack: list[str] = field(default_factory=list)

    @property
    def signature(self) -> tuple[int, str, tuple[int, int], int]:
        return self.seq, self.op, self.numbers, self.timeout_ms


@dataclass
class _Speaker:
    """What one rank printed: its calls, (enqueued, completed) by group, its last traceback."""

    calls: list[_Call] = field(default_factory=list)
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    frames: list[str] | None = None  # of a traceback that has not ended
    stack: list[str] = field(default_factory=list)  # of its main thread, innermost first
    in_main: bool = False  # whether the lines are that stack's
    events: list[RankEvent] = field(default_factory=list)


def op_type(name: str) -> str:
    """What a watchdog calls a collective of ours or of the recorder's."""
    return _BASES.get(name, name.replace("_", "").upper())


def _standing(stack: list[str]) -> Iterator[RankEvent]:
    """Where a stack of py-spy says that a host stands: in a call of torch.distributed or of its
    store, or at work of its own."""
    calls = [frame for frame in stack if "torch/distributed" in frame]
    own = [frame for frame in stack if "torch/distributed" not in frame]
    if calls:
        site = next(iter(stack[stack.index(calls[-1]) + 1 :]), "its script")
        yield RankEvent("in a call", f"{calls[-1].partition(' ')[0]} of {site}: its stack")
    elif own:
        yield RankEvent("at work", " < ".join(own[:4]))


def read_folder(folder: Path) -> DumpSet:
    """What lies in ``folder``: dumps, answers of torch's HTTP handler, logs; a rank's dump says
    more than its log.  DumpError if there is nothing of them."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    logs = [path for path in paths if path.is_file() and is_log(path)]
    if logs and not has_dumps(folder):
        return read_logs(logs)
    found = read(folder)
    if not logs:
        return found
    with contextlib.suppress(DumpError):  # none of its lines is of a rank
        return together(found, logs)
    return found


def together(dumps: DumpSet | None, logs: Sequence[str | os.PathLike[str]]) -> DumpSet:
    """Dumps and logs of one job as one observation."""
    if not logs:
        assert dumps is not None, "dumps or logs"
        return dumps
    said = read_logs(logs)
    found = DumpSet({}) if dumps is None else dumps
    return DumpSet({**said.dumps, **found.dumps}, found.unreadable, said.events, said.evidence)


def is_log(path: Path) -> bool:
    """Whether a file is text without being JSON, by its first bytes."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            data = file.read(4096)
    except OSError:
        return False
    return bool(data) and b"\0" not in data and data.lstrip()[:1] not in (b"{", b"\x80")


def read_logs(paths: Iterable[str | os.PathLike[str]]) -> DumpSet:
    """All ranks that speak in ``paths``.  DumpError if none does."""
    reader = _Reader()
    for path in map(Path, paths):
        with foreign.reading(path, "a log", FIX, error=DumpError):
            data = foreign.read_unpacked(path, _MOST, 1000)
        reader.read(data.decode(errors="replace"), rank_of_name(path.name))
    if not reader.ranks and not reader.evidence:
        raise DumpError("no line of these logs is of a rank: [rank12]: …, or a rank in its name",
                        fix=FIX)  # fmt: skip
    return reader.dumps()


class _Reader:
    def __init__(self) -> None:
        self.ranks: dict[int, _Speaker] = defaultdict(_Speaker)
        self.descs: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        self.evidence: list[str] = []
        self.stack_of: int | None = None

    # -- lines ------------------------------------------------------------------------------------
    def read(self, text: str, owner: int | None) -> None:
        table: dict[str, int] = {}
        if "launched up to operation" in text or '"collective_counts"' in text:
            with contextlib.suppress(ValueError):
                report = parse_ras(text)
                self.evidence += [f"RAS: {line}" for line in (*report.lost, *report.behind)]
        for line in text.splitlines():
            if line.startswith("using world size"):
                found = re.findall(r"([a-z-]+(?: size)?(?:-\w+ size)?): (\d+)", line)
                self.sizes |= {_SIZES[k]: int(v) for k, v in found if k in _SIZES}
                world = re.search(r"world size: (\d+)", line)
                self.sizes |= {"size": int(world[1])} if world else {}
            elif (argument := _ARGUMENT.match(line)) is not None:
                self.sizes["ep" if "model" in argument[1] else "etp"] = int(argument[2])
            elif (row := _TABLE.match(line)) is not None:
                table[row[1]] = int(row[2])
                if len(table) == 2:
                    self._ended(table.pop("rank"), table.pop("exitcode"))
            elif (late := _DESYNC.search(line)) is not None:
                self.evidence.append(f"desync report: {late[0].strip()}")
            elif (beat := _HEARTBEAT.search(line)) is not None:
                self.evidence.append(f"rank monitor of rank {beat[1]}: {beat[2]}")
            elif (network := _NETWORK.search(line)) is not None:
                self.evidence.append(network[0].strip()[:200])
            rank, rest = self._whose(line, owner)
            if rank is None and _NATIVE.match(line):  # only its first line says whose it is
                rank = self.stack_of
            elif "Stack trace of the failed collective" in line:
                self.stack_of = rank
            if rank is not None:
                self._line(rank, rest)

    def _whose(self, line: str, owner: int | None) -> tuple[int | None, str]:
        """(global rank, what is left of the line)."""
        if (found := _RANK.search(line)) is not None:
            return int(found[1]), line[found.end() :]
        if owner is not None:
            return owner, line
        if (found := _TASK.match(line)) is not None:
            return int(found[1]), line[found.end() :]
        group = _GROUP.search(line)
        inner = group["rank"] if group else (_ALONE.search(line) or ["", ""])[1]
        return (int(inner), line) if inner and ("NCCL" in line or "Watchdog" in line) else (
            None, line)  # fmt: skip

    def _line(self, rank: int, line: str) -> None:
        me, group = self.ranks[rank], _GROUP.search(line)
        name = group["name"] if group else ""
        if group and group["desc"]:
            self.descs[name] = group["desc"]
        if (caught := _CAUGHT.search(line)) is not None:
            body = dict(_BODY.findall(caught["body"]))
            seq = int(body.get("SeqNum", -1))
            if all(call.seq != seq or name and call.group not in ("", name) for call in me.calls):
                sizes = int(body.get("NumelIn", -1)), int(body.get("NumelOut", -1))
                limit = int(body.get("Timeout(ms)", -1))
                me.calls.append(_Call(seq, body.get("OpType", ""), sizes, limit, name))
        if (counts := _COUNTS.search(line)) is not None and name:
            me.counts[name] = int(counts[1]), int(counts[2])
            if (failed := _FAILED.search(line)) is not None:
                mine = (c for c in me.calls if c.seq == int(failed[1]) and c.group in ("", name))
                for call in mine:
                    call.group = name
        elif me.calls and (frame := _NATIVE.match(line)) is not None:
            me.calls[-1].stack.append(frame[1])
        if _KILLED.search(line):
            me.events.append(RankEvent("killed", line.strip()[-200:]))
        if (device := _DEVICE.search(line)) is not None:
            me.events.append(RankEvent("exception", f"{device[1][:200]} in its NCCL watchdog"))
        if (thread := _THREAD.search(line)) is not None:
            me.in_main = thread[1] == "MainThread"
        elif me.in_main and (place := _PLACE.match(line)) is not None:
            me.stack.append(f"{place[1]} ({place[2].rpartition('site-packages/')[2]}:{place[3]})")
        self._traceback(me, line)

    def _traceback(self, me: _Speaker, line: str) -> None:
        if "Traceback (most recent call last)" in line:
            me.frames = []
        elif me.frames is not None and (frame := _FRAME.search(line)) is not None:
            me.frames.append(f"{frame[3]} ({frame[1].rpartition('site-packages/')[2]}:{frame[2]})")
        elif me.frames is not None and _RAISED.match(line.strip()):
            where = [f for f in reversed(me.frames) if "torch/distributed" not in f]
            calls = [f.partition(" ")[0] for f in me.frames if "torch/distributed" in f]
            site, text = (where or ["its script"])[0], line.strip()[:200]
            call = next((c for c in reversed(calls) if c != "wrapper"), "a call")
            me.frames = None
            if _OUTSIDE.search(text):
                me.events.append(RankEvent("outside", f"{call} of {site}: {text}"))
            elif _OOM.search(text):
                me.events.append(RankEvent("out of memory", f"{text} in {site}"))
            elif not _AFTER.search(text):
                me.events.append(RankEvent("exception", f"{text} in {site}"))

    def _ended(self, rank: int, code: int) -> None:
        """A row of torchrun's table: the agent ends the others by SIGTERM, watchdogs by SIGABRT."""
        if code in _SIGNALS:
            self.ranks[rank].events.append(
                RankEvent("killed", f"{_SIGNALS[code]} (torchrun's table)")
            )

    # -- dumps ------------------------------------------------------------------------------------
    def _assume_groups(self) -> None:
        """Put calls whose group no rank names (torch before 2.4 prints no group) into one group for
        each number, operation, size and time limit; that call did not end, all before it did."""
        calls = [(me, call) for me in self.ranks.values() for call in me.calls]
        named = {call.signature for _, call in calls if call.group}
        for me, call in calls:
            if not call.group and call.signature not in named:
                call.group = str(call.signature)
                self.descs[call.group] = UNNAMED
                me.counts.setdefault(call.group, (call.seq, call.seq - 1))

    def dumps(self) -> DumpSet:
        self._assume_groups()
        world, groups = self._world(), self._groups()
        spoken: dict[str, int] = defaultdict(int)  # the last call of a group that anybody names
        ended: dict[str, int] = {}
        for me in self.ranks.values():
            for name, (enqueued, completed) in me.counts.items():
                spoken[name] = max(spoken[name], enqueued)
                ended[name] = min(ended.get(name, completed), completed)
        made: dict[int, Dump] = {}
        for rank, me in sorted(self.ranks.items()):
            mine = {n: g for n, g in groups.items() if rank in g.ranks}
            status = {n: Status(e, -1, c) for n, (e, c) in me.counts.items()}
            entries, unknown = tuple(self._entries(rank, me, mine)), mine.keys() - status.keys()
            if any(s.enqueued > s.completed for s in status.values()):
                status |= {n: Status(last, -1, ended[n]) for n, last in spoken.items()
                           if n in unknown}  # fmt: skip
            elif (world is not None or me.stack) and not me.counts and not me.events:
                continue  # it says nothing of its calls: as if it had left no dump
            made[rank] = Dump(rank, "log", mine, status, entries, ("a log, no dump",),
                              assumed=frozenset(unknown))  # fmt: skip
        events = {r: (*me.events, *_standing(me.stack)) for r, me in self.ranks.items()
                  if me.events or me.stack}  # fmt: skip
        return DumpSet(made, events=events, evidence=tuple(dict.fromkeys(self.evidence))[:4])

    def _world(self) -> World | None:
        try:
            return World(**self.sizes) if "size" in self.sizes else None  # type: ignore[arg-type]
        except PrismError:
            return None

    def _groups(self) -> Mapping[str, Group]:
        """Name -> the group; the name that ranks print is one group's, whoever prints it."""
        world, speakers = self._world(), defaultdict[str, set[int]](set)
        for rank, me in self.ranks.items():
            for name in me.counts.keys() | {c.group for c in me.calls if c.group}:
                speakers[name].add(rank)
        found = {}
        for name, ranks in speakers.items():
            desc = self.descs.get(name, "default_pg" if name == "0" else name)
            spoken = Group(
                name, desc, tuple(sorted(self.ranks if desc == "default_pg" else ranks)), True
            )
            members: Sequence[int] | None = None
            if world is not None and max(ranks) < world.size:
                try:
                    members = world.group(min(ranks), desc)
                except (PrismError, KeyError):
                    members = range(world.size) if desc == "default_pg" else None
            if not members:
                found[name] = spoken
            elif set(members) >= ranks:
                found[name] = Group(name, desc, tuple(members))
        return found

    def _entries(self, rank: int, me: _Speaker, groups: Mapping[str, Group]) -> Iterator[Entry]:
        for place, call in enumerate(me.calls):
            group = groups.get(call.group)
            if group is None:
                continue
            ins, outs = call.numbers
            numbers = ((ins,), (outs,)) if ins > 0 else ((), ())
            op, more = _OPS.get(call.op, "call"), (call.timeout_ms, -1)
            if group.desc.startswith("PIPELINE") or call.op in ("SEND", "RECV"):
                at = group.ranks.index(rank)
                words = {w: s for frame in call.stack[:8] for w, s in _STEPS.items() if w in frame}
                for name, step in words.values():
                    to = (at + step) % len(group.ranks)
                    yield Entry(place, group.name, group.desc, name, call.seq, call.seq, to,
                                numbers, (), "scheduled", False, "", *more)  # fmt: skip
                continue
            if call.op == "COALESCED" and ins > 0 < outs:
                op = (
                    "reduce_scatter" if ins > outs else "all_gather" if outs > ins else "all_reduce"
                )
            yield Entry(place, group.name, group.desc, op, call.seq, call.seq, -1, numbers, (),
                        "scheduled", False, "", *more)  # fmt: skip
