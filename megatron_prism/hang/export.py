"""Write the dumps that the Flight Recorder would have left of a stalled job.

In : ``quiescence.Standstill``.  Out: values in the format of torch 2.13 (version 2.10), or files,
for ``flight_recorder.read`` and for torch's own ``torchfrtrace``.  The counters, states and names
are ProcessGroupNCCL's, and so is the record that closes a batch (``nccl:coalesced``); clocks count
issued calls, since a standstill knows no time.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from megatron_prism.core.collectives import BY_NAME
from megatron_prism.core.errors import UsageError
from megatron_prism.core.files import check_writable
from megatron_prism.core.ops import IS_COLLECTIVE, IS_PAIR, Op
from megatron_prism.graph.stall import StalledJob

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["DTYPE_WORDS", "check_free", "dump_of", "dumps_of", "write"]

DTYPE_WORDS = {
    "bf16": "BFloat16", "fp16": "Half", "fp32": "Float", "fp64": "Double", "int64": "Long",
    "int32": "Int", "int16": "Short", "int8": "Char", "uint8": "Byte", "bool": "Bool",
    "fp8e4m3": "Float8_e4m3fn", "fp8e5m2": "Float8_e5m2",
}  # fmt: skip
Row = dict[str, Any]  # an entry, or a part of one, as torch writes it


class ExportSettings(TypedDict, total=False):
    """Settings of ``dump_of``."""

    active_only: bool
    stacks: bool
    timing: bool
    version: str
    last: int


_TALK = IS_COLLECTIVE | IS_PAIR
_HIDDEN = ".dumps-partial-"  # what a writer that was killed leaves behind
_CLOSING = {"all_gather": "ALLGATHER_coalesced", "reduce_scatter": "REDUCE_SCATTER_coalesced"}


def write(
    state: StalledJob,
    folder: str | os.PathLike[str],
    *,
    prefix: str = "_dump_",
    as_json: bool = False,
    force: bool = False,
    **how: Unpack[ExportSettings],
) -> Path:
    """One file per rank that leaves a dump, all or none; ``how`` as in ``dump_of``.

    UsageError as from ``check_free``; ``force`` replaces older dumps and touches nothing else.
    """
    folder = Path(folder)
    check_free(folder, force)
    folder.mkdir(parents=True, exist_ok=True)
    # half of them would be another hang, so they are moved in when all are there
    with tempfile.TemporaryDirectory(prefix=_HIDDEN, dir=folder) as hidden:
        for rank, value in dumps_of(state, **how):
            if as_json:
                name, data = f"{rank}.json", json.dumps(value | {"nccl_comm_state": {}}).encode()
            else:
                name, data = str(rank), pickle.dumps(value, protocol=2)
            Path(hidden, f"{prefix}{name}").write_bytes(data)
        for path in folder.iterdir():
            if re.fullmatch(rf"{re.escape(prefix)}\d+(\.json)?", path.name) and path.is_file():
                path.unlink()
        for path in Path(hidden).iterdir():
            path.rename(folder / path.name)
    return folder


def check_free(folder: Path, force: bool) -> None:
    """UsageError unless dumps may be written into ``folder``: an empty or a new one, or any with
    ``force``."""
    check_writable(folder)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder", fix="name another one with -o DIR")
    if not force and any(
        not path.name.startswith((_HIDDEN, ".claim")) for path in folder.iterdir()
    ):
        raise UsageError(f"{folder} is not empty", fix="--force, or another folder")


def dumps_of(
    state: StalledJob, **how: Unpack[ExportSettings]
) -> Iterator[tuple[int, dict[str, object]]]:
    """(rank, its dump) of every rank that leaves one; ``how`` as in ``dump_of``."""
    names = _numbers(state)
    for rank in range(state.programs.world.size):
        fault = state.faults.get(rank)
        if fault is None or not fault.silent:
            yield rank, dump_of(state, rank, names, **how)


def _numbers(state: StalledJob) -> dict[tuple[str, int], int]:
    """(description, number of the group) -> its name, counting in the order of descriptions."""
    keys = [(name, i) for name, group in state.groups.items() for i in range(len(group.start) - 1)]
    return {key: number for number, key in enumerate(keys)}


def dump_of(
    state: StalledJob,
    rank: int,
    names: dict[tuple[str, int], int] | None = None,
    *,
    active_only: bool = False,
    stacks: bool = True,
    timing: bool = False,
    version: str = "2.10",
    last: int = 0,
) -> dict[str, object]:
    """The dump of ``rank`` as torch would pickle it.

    active_only : only what is outstanding (Megatron's default);  stacks : one frame, the op's site
    timing      : what has started is known to have (TORCH_NCCL_ENABLE_TIMING)
    last        : about as many calls, and all that is outstanding, as of a short ring; 0 is all
    """
    names = _numbers(state) if names is None else names
    writer = _Writer(state, rank, names, timing)
    entries = writer.entries(last)
    if active_only:
        entries = [e for e in entries if not e["retired"]]
    if not stacks:
        entries = [{k: v for k, v in e.items() if k != "frames"} for e in entries]
    library = "comm_lib_version" if version == "2.10" else "nccl_version"
    return {
        "version": version,
        library: "2.27.3",
        "pg_config": writer.config,
        "pg_status": writer.status,
        "entries": entries,
    }


_STEP = 64  # ops; ranks of one program that stand near each other share what is counted before
_KEYS = [
    "record_id",
    "pg_id",
    "process_group",
    "collective_seq_id",
    "p2p_seq_id",
    "op_id",
    "profiling_name",
    "time_created_ns",
    "input_sizes",
    "input_dtypes",
    "output_sizes",
    "output_dtypes",
    "state",
    "time_discovered_started_ns",
    "time_discovered_completed_ns",
    "retired",
    "timeout_ms",
    "is_p2p",
    "thread_name",
    "thread_id",
    "frames",
]


class _Writer:
    """One rank's calls, counted as NCCL counts them."""

    def __init__(
        self, state: StalledJob, rank: int, names: dict[tuple[str, int], int], timing: bool
    ) -> None:
        self.state, self.rank, self.names, self.timing = state, rank, names, timing
        self.program = state.programs.of(rank)
        self.config: dict[str, dict[str, str]] = {}
        self.status: dict[str, dict[str, int]] = {}
        self.collectives: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()
        for place, (name, group) in enumerate(
            (n, g) for n, g in state.groups.items() if g.group_of[rank] >= 0
        ):
            number = str(names[name, int(group.group_of[rank])])
            key = (name, int(group.group_of[rank]))
            if key not in state.said:
                state.said[key] = str(group.group(rank).tolist())
            ranks = state.said[key]
            self.config[number] = {"name": number, "desc": name, "ranks": ranks}
            self.status[str(place)] = {
                f"last_{w}_collective": -1 for w in ("enqueued", "started", "completed")
            }
        self.ids = {config["desc"]: i for i, config in enumerate(self.config.values())}
        self.named = {c["desc"]: (number, c["desc"]) for number, c in self.config.items()}
        self.fault = state.faults.get(rank)

    def entries(self, last: int = 0) -> list[Row]:
        """The records of about the ``last`` calls.  Ranks that stand alike in the same program
        differ in the names of their groups alone."""
        state, rank = self.state, self.rank
        if self.fault is not None:
            return self._entries(last)
        own = int(state.programs.program_of[rank])
        if ("pairs", own) not in state.said:
            ops = self.program.ops
            codes = np.unique(ops["group"][IS_PAIR[ops["name"]]])
            state.said["pairs", own] = [self.program.strings[code] for code in codes.tolist()]
        pairs = tuple(
            (name, int(state.groups[name].position[rank]), len(state.groups[name].group(rank)))
            for name in state.said["pairs", own]
            if name in self.ids
        )
        stands = (bytes(state.done[rank]), bytes(state.ready[rank]), state.issued[rank])
        key = ("entries", own, last, self.timing, *stands, pairs, tuple(self.ids))
        if key not in state.said:
            state.said[key] = self._entries(last), self.status
        rows, status = state.said[key]
        self.status = {place: dict(one) for place, one in status.items()}
        named = self.named
        return [row | {"process_group": named[row["process_group"][1]]} for row in rows]

    def _entries(self, last: int) -> list[Row]:
        found: list[Row] = []
        first, record = self._skip(last) if last else (0, 0)
        names = self.program.ops["name"]
        launched: set[int] = set()
        batches = self.program.ops["batch"]
        inside: dict[int, list[int]] = {}
        for index in np.flatnonzero(_TALK[names] & (batches >= 0)).tolist():
            inside.setdefault(int(batches[index]), []).append(index)
        for index in range(first, self.state.issued[self.rank]):
            if _TALK[names[index]]:
                key = (int(self.state.programs.program_of[self.rank]), index)
                op = self.state.said.get(key) or self.program[index]
                self.state.said[key] = op
                if op.group in self.ids:
                    found.append(self._entry(op, index, record + len(found), launched))
                    if op.batch >= 0 and inside[op.batch][-1] == index:
                        found.append(self._closing(found[-1], inside[op.batch]))
        return found

    def _skip(self, last: int) -> tuple[int, int]:
        """(the first op that is written, how many records are before it), what came before it
        counted: once for all ranks that run the same program."""
        state, end = self.state, self.state.issued[self.rank]
        names, batches = self.program.ops["name"][:end], self.program.ops["batch"]
        talks = np.flatnonzero(_TALK[names])
        done = np.frombuffer(bytes(state.done[self.rank][:end]), bool)
        held = talks[~done[talks]]
        kept = [end, *talks[-last:][:1].tolist(), *held[:1].tolist()]
        if self.fault is not None and self.fault.blind is not None:
            kept.append(self.fault.blind)
        first = min(kept) // _STEP * _STEP
        while 0 < first < end and batches[first] >= 0 and batches[first] == batches[first - 1]:
            first -= 1
        key = ("skipped", int(state.programs.program_of[self.rank]), first)
        if key not in state.said:
            state.said[key] = self._counted(first)
        collectives, messages, completed, record = state.said[key]
        self.collectives, self.messages = Counter(collectives), Counter(messages)
        for name, seq in completed.items():
            status = self.status[str(self.ids[name])]
            status["last_enqueued_collective"] = status["last_completed_collective"] = seq
            status["last_started_collective"] = seq if self.timing else -1
        return first, record

    def _counted(self, first: int) -> tuple[Counter[str], Counter[str], dict[str, int], int]:
        """(collectives, messages, last number of either, records) of the ops before ``first``."""
        collectives, messages, completed = Counter[str](), Counter[str](), dict[str, int]()
        launched, record = set[int](), 0
        ops = self.program.ops[:first]
        rows = ops[_TALK[ops["name"]]]
        columns = (rows["name"], rows["group"], rows["batch"])
        for name, group, batch in zip(*(c.tolist() for c in columns), strict=True):
            desc = self.program.strings[group]
            if desc not in self.ids:
                continue
            counts = messages if IS_PAIR[name] else collectives
            record += 1
            if batch < 0 or batch not in launched:
                counts[desc] += 1
                record += batch >= 0  # the record that closes it
                launched.add(batch)
            completed[desc] = counts[desc]
        return collectives, messages, completed, record

    def _closing(self, last: Row, indices: list[int]) -> Row:
        """The record of a batch as a whole (ProcessGroupNCCL::endCoalescing)."""
        progress = [self._progress(index) for index in indices]
        done, started = (all(seen) for seen in zip(*progress, strict=True))
        return last | {
            "record_id": last["record_id"] + 1,
            "op_id": last["op_id"] + 1,
            "profiling_name": f"nccl:{_CLOSING.get(self.program[indices[0]].name, 'coalesced')}",
            "time_created_ns": last["time_created_ns"] + 1_000_000,
            "input_sizes": [],
            "input_dtypes": [],
            "output_sizes": [],
            "output_dtypes": [],
            "state": "completed" if done else "started" if started else "scheduled",
            "retired": done,
        }

    def _entry(self, op: Op, index: int, record: int, launched: set[int]) -> Row:
        pair = op.name in ("send", "recv")
        counts = self.messages if pair else self.collectives
        if op.batch < 0 or op.batch not in launched:  # a batch is one launch
            counts[op.group] += 1
            launched.add(op.batch)
        done, started = self._progress(index)
        self._account(op, counts[op.group], done, started)
        if op.batch >= 0:  # torch only updates the record that closes the batch
            done = started = False
        return self._alike(op, index) | {
            "record_id": record,
            "pg_id": self.ids[op.group],
            "process_group": self.named[op.group],
            "collective_seq_id": self.collectives[op.group],
            "p2p_seq_id": self.messages[op.group],
            "op_id": record + 1,
            "profiling_name": self._word(op),
            "time_created_ns": (record + 1) * 1_000_000,
            "state": "completed" if done else "started" if started else "scheduled",
            "retired": done,
        }

    def _alike(self, op: Op, index: int) -> Row:
        """What all ranks of this program write of the op, in torch's order of keys."""
        key = ("entry", int(self.state.programs.program_of[self.rank]), index)
        found = self.state.said.get(key)
        if found is None:
            inputs, outputs = _sizes(op)
            found = self.state.said[key] = dict.fromkeys(_KEYS) | {
                "input_sizes": inputs,
                "input_dtypes": [DTYPE_WORDS.get(op.dtype, "Float")] * len(inputs),
                "output_sizes": outputs,
                "output_dtypes": [DTYPE_WORDS.get(op.dtype, "Float")] * len(outputs),
                "timeout_ms": 600_000,
                "is_p2p": op.name in ("send", "recv"),
                "thread_name": "",
                "thread_id": "0",
                "frames": _frames(op.site),
            }
        return found

    def _progress(self, index: int) -> tuple[bool, bool]:
        """(seen complete, seen to start)."""
        fault = self.fault
        blind = fault is not None and fault.blind is not None and index >= fault.blind
        done = bool(self.state.done[self.rank][index]) and not blind
        return done, self.timing and not blind and bool(self.state.ready[self.rank][index])

    def _account(self, op: Op, seq: int, done: bool, started: bool) -> None:
        status = self.status[str(self.ids[op.group])]
        status["last_enqueued_collective"] = seq
        if done and status["last_completed_collective"] in (-1, seq - 1, seq):
            status["last_completed_collective"] = seq
        if started:
            status["last_started_collective"] = seq

    def _word(self, op: Op) -> str:
        if op.name not in ("send", "recv"):
            row = "all_reduce_barrier" if op.name == "barrier" else BY_NAME[op.name].recorder
            return f"nccl:{row}"
        group = self.state.groups[op.group]
        mine, size = int(group.position[self.rank]), len(group.group(self.rank))
        arrow = "->" if op.name == "send" else "<-"
        return f"nccl:{op.name} {mine}{arrow}{(mine + op.peer) % size}"


def _sizes(op: Op) -> tuple[list[list[int]], list[list[int]]]:
    if op.name == "barrier":
        return [[1]], [[1]]
    inputs = op.num_in if op.num_in >= 0 else op.num_out
    outputs = op.num_out if op.num_out >= 0 else op.num_in
    return [[max(0, inputs)]], [[max(0, outputs)]]


def _frames(site: str) -> list[Row]:
    file, _, line = site.rpartition(":")
    return [{"name": "", "filename": file, "line": int(line)}] if file and line.isdigit() else []
