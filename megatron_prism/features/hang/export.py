"""Write the dumps that the Flight Recorder would have left of a stalled job.

In : ``graph.stall.StalledJob``.  Out: values in the format of torch 2.13 (version 2.10), or files,
for ``dumps.read`` and for torch's own ``torchfrtrace``.  The counters, states and names are
ProcessGroupNCCL's, and so is the record that closes a batch (``nccl:coalesced``); clocks count
issued calls, since a standstill knows no time.
"""

from __future__ import annotations

import os
import pickle
import re
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from megatron_prism.core.collectives import BY_NAME
from megatron_prism.core.errors import UsageError
from megatron_prism.core.files import check_writable
from megatron_prism.core.ops import DTYPE_WORDS, IS_NCCL, IS_PAIR, NAMES, Op
from megatron_prism.core.program import Program
from megatron_prism.graph.stall import StalledJob

if TYPE_CHECKING:
    from typing_extensions import Unpack

Row = dict[str, Any]  # an entry, or a part of one, as torch writes it


class ExportSettings(TypedDict, total=False):
    """Settings of ``dump_of``."""

    active_only: bool
    stacks: bool
    timing: bool
    last: int


_HIDDEN = ".dumps-partial-"  # what a writer that was killed leaves behind
_CLOSING = {"all_gather": "ALLGATHER_coalesced", "reduce_scatter": "REDUCE_SCATTER_coalesced"}


def write(
    state: StalledJob,
    folder: str | os.PathLike[str],
    *,
    force: bool = False,
    **how: Unpack[ExportSettings],
) -> Path:
    """A file ``_dump_R`` per rank that leaves a dump, all or none; ``how`` as in ``dump_of``.

    UsageError as from ``check_free``; ``force`` replaces older dumps and touches nothing else.
    """
    folder = Path(folder)
    check_free(folder, force)
    folder.mkdir(parents=True, exist_ok=True)
    # half of them would be another hang, so they are moved in when all are there
    with tempfile.TemporaryDirectory(prefix=_HIDDEN, dir=folder) as hidden:
        for rank, value in dumps_of(state, **how):
            Path(hidden, f"_dump_{rank}").write_bytes(pickle.dumps(value, protocol=2))
        for path in folder.iterdir():
            if re.fullmatch(r"_dump_\d+", path.name) and path.is_file():
                path.unlink()
        for path in Path(hidden).iterdir():
            path.rename(folder / path.name)
    return folder


def check_free(folder: Path, force: bool) -> None:
    """UsageError unless dumps may be written into ``folder``: an empty or a new one, or any with
    ``force``.
    """
    check_writable(folder)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is no folder", fix="name another one with -o DIR")
    there = folder.iterdir() if folder.exists() and not force else ()
    if any(not path.name.startswith((_HIDDEN, ".claim")) for path in there):
        raise UsageError(f"{folder} is not empty", fix="--force, or another folder")


def dumps_of(
    state: StalledJob, **how: Unpack[ExportSettings]
) -> Iterator[tuple[int, dict[str, object]]]:
    """(rank, its dump) of every rank that leaves one; ``how`` as in ``dump_of``."""
    for rank in range(state.programs.world.size):
        fault = state.faults.get(rank)
        if fault is None or not fault.silent:
            yield rank, dump_of(state, rank, **how)


def dump_of(
    state: StalledJob,
    rank: int,
    *,
    active_only: bool = False,
    stacks: bool = True,
    timing: bool = False,
    last: int = 0,
) -> dict[str, object]:
    """The dump of ``rank`` as torch would pickle it.

    active_only : only what is outstanding (Megatron's default);  stacks : one frame, the op's site
    timing      : what has started is known to have (TORCH_NCCL_ENABLE_TIMING)
    last        : so many calls before the first that is outstanding, and from it on; 0 is all
    """
    writer = _Writer(state, rank, timing)
    entries = writer.entries(last)
    if active_only:
        entries = [e for e in entries if not e["retired"]]
    if not stacks:
        entries = [{k: v for k, v in e.items() if k != "frames"} for e in entries]
    return {
        "version": "2.10",
        "comm_lib_version": "2.27.3",
        "pg_config": writer.config,
        "pg_status": writer.status,
        "entries": entries,
    }


_KEYS = (
    "record_id", "pg_id", "process_group", "collective_seq_id", "p2p_seq_id", "op_id",
    "profiling_name", "time_created_ns", "input_sizes", "input_dtypes", "output_sizes",
    "output_dtypes", "state", "time_discovered_started_ns", "time_discovered_completed_ns",
    "retired", "timeout_ms", "is_p2p", "thread_name", "thread_id", "frames",
)  # fmt: skip


class _Table:
    """The calls of one program in some groups, numbered as ProcessGroupNCCL and its recorder do.

    index: of the op; batch: -1 alone; seq: of a message among messages, else among collectives;
    record: of the recorder; closes: whether the record that closes its batch follows;
    among_messages: whether it is a collective of a group that has messages, too
    """

    def __init__(self, program: Program, known: Collection[str]) -> None:
        ops = program.ops
        talks = np.flatnonzero(IS_NCCL[ops["name"]])
        self.groups = [program.strings[g] for g in ops["group"][talks].tolist()]
        mine = [at for at, name in enumerate(self.groups) if name in known]
        self.index = talks[mine]
        self.groups = [self.groups[at] for at in mine]
        self.batch = ops["batch"][self.index]
        self.pair = IS_PAIR[ops["name"][self.index]]
        self.place = np.array([list(known).index(name) for name in self.groups], int)
        self.among_messages = np.isin(self.place, self.place[self.pair]) & ~self.pair
        self.messaging = sorted({n for n, p in zip(self.groups, self.pair, strict=True) if p})
        last = {b: i for i, b in zip(talks.tolist(), ops["batch"][talks].tolist(), strict=True)}
        counts, launched, record = Counter[tuple[str, bool]](), set[int](), 0
        rows = []
        columns = (self.groups, self.pair.tolist(), self.batch.tolist(), self.index.tolist())
        for name, pair, batch, index in zip(*columns, strict=True):
            if batch < 0 or batch not in launched:  # a batch is one launch
                counts[name, pair] += 1
                launched.add(batch)
            closes = batch >= 0 and last[batch] == index
            rows.append((counts[name, False], counts[name, True], record, closes))
            record += 1 + closes
        numbers = list(zip(*rows, strict=True)) or [(), (), (), ()]
        self.collectives, self.messages, self.record, self.closes = map(list, numbers)
        self.seq = np.where(self.pair, self.messages, self.collectives)


class _Writer:
    """One rank's calls."""

    def __init__(self, state: StalledJob, rank: int, timing: bool) -> None:
        self.state, self.rank, self.timing = state, rank, timing
        self.program, self.number = state.programs.of(rank), int(state.programs.program_of[rank])
        self.config: dict[str, dict[str, str]] = {}
        first = 0  # groups are numbered in the order of descriptions
        for name, group in state.groups.items():
            if (place := int(group.group_of[rank])) >= 0:
                number = str(first + place)
                if (name, place) not in state.said:
                    state.said[name, place] = str(group.group(rank).tolist())
                ranks = state.said[name, place]
                self.config[number] = {"name": number, "desc": name, "ranks": ranks}
            first += len(group.start) - 1
        self.ids = {config["desc"]: i for i, config in enumerate(self.config.values())}
        self.named = {c["desc"]: (number, c["desc"]) for number, c in self.config.items()}
        key = ("calls", self.number, *self.ids)
        if key not in state.said:
            state.said[key] = _Table(self.program, self.ids)
        self.calls: _Table = state.said[key]
        fault = state.faults.get(rank)
        seen = state.issued[rank] if fault is None or fault.blind is None else fault.blind
        self.count = int(np.searchsorted(self.calls.index, state.issued[rank]))
        index = self.calls.index[: self.count]
        self.done, self.started = (
            np.frombuffer(bytes(flags[rank]), bool)[index] & (index < seen)
            for flags in (state.done, state.ready)
        )
        self.started &= timing
        self.status = self._counters()

    def _counters(self) -> dict[str, dict[str, int]]:
        """Per group the last call that was issued, started and, of those without a gap, ended."""
        groups, seq = self.calls.place[: self.count], self.calls.seq[: self.count]
        found = {}
        for place in self.ids.values():
            mine = groups == place
            ended = seq[mine & self.done]
            gaps = np.flatnonzero(np.diff(ended) > 1)
            last = {
                "enqueued": seq[mine],
                "started": seq[mine & self.started],
                "completed": ended[: gaps[0] + 1] if len(gaps) else ended,
            }
            found[str(place)] = {
                f"last_{what}_collective": int(numbers[-1]) if len(numbers) else -1
                for what, numbers in last.items()
            }
        return found

    def entries(self, last: int = 0) -> list[Row]:
        """All calls; or the first ``last`` of those that are outstanding and as many before them,
        with whole batches, and collectives of groups that also have messages: these are counted
        by their records.  Ranks that stand alike in the same program differ in the names of their
        groups alone.
        """
        state, rank = self.state, self.rank
        if rank in state.faults:
            return self._entries(last)
        pairs = tuple(
            (name, int(state.groups[name].position[rank]), len(state.groups[name].group(rank)))
            for name in self.calls.messaging
        )
        stands = (bytes(state.done[rank]), bytes(state.ready[rank]), state.issued[rank])
        key = ("entries", self.number, last, self.timing, *stands, pairs, tuple(self.ids))
        if key not in state.said:
            state.said[key] = self._entries(last)
        named = self.named
        return [row | {"process_group": named[row["process_group"][1]]} for row in state.said[key]]

    def _entries(self, last: int) -> list[Row]:
        keep = np.ones(self.count, bool)
        if last:
            waits = np.flatnonzero(~self.done)
            end = waits[last - 1] + 1 if len(waits) >= last else self.count
            keep[end:] = keep[: max(0, min([self.count, *waits[:1]]) - last)] = False
            keep |= self.calls.among_messages[: self.count]
        batch = self.calls.batch[: self.count]
        keep |= (batch >= 0) & np.isin(batch, batch[keep])
        found: list[Row] = []
        for row in np.flatnonzero(keep).tolist():
            found.append(self._entry(row))
            if self.calls.closes[row]:
                found.append(self._closing(found[-1], row))
        return found

    def _closing(self, last: Row, row: int) -> Row:
        """The record of a batch as a whole (ProcessGroupNCCL::endCoalescing)."""
        rows = np.flatnonzero(self.calls.batch == self.calls.batch[row])
        done, started = bool(self.done[rows].all()), bool(self.started[rows].all())
        op = self.program[int(self.calls.index[rows[0]])]
        return last | {
            "record_id": last["record_id"] + 1,
            "op_id": last["op_id"] + 1,
            "profiling_name": f"nccl:{_CLOSING.get(op.name, 'coalesced')}",
            "time_created_ns": last["time_created_ns"] + 1_000_000,
            "input_sizes": [],
            "input_dtypes": [],
            "output_sizes": [],
            "output_dtypes": [],
            "state": "completed" if done else "started" if started else "scheduled",
            "retired": done,
        }

    def _entry(self, row: int) -> Row:
        calls = self.calls
        batched = calls.batch[row] >= 0  # torch only updates the record that closes the batch
        done, started = (bool(flag[row]) and not batched for flag in (self.done, self.started))
        index, record, group = int(calls.index[row]), calls.record[row], calls.groups[row]
        found: Row = self._alike(index).copy()
        found["record_id"], found["op_id"] = record, record + 1
        found["pg_id"], found["process_group"] = self.ids[group], self.named[group]
        found["collective_seq_id"] = calls.collectives[row]
        found["p2p_seq_id"] = calls.messages[row]
        if calls.pair[row]:
            found["profiling_name"] = self._word(index)
        found["time_created_ns"] = (record + 1) * 1_000_000
        found["state"] = "completed" if done else "started" if started else "scheduled"
        found["retired"] = done
        return found

    def _alike(self, index: int) -> Row:
        """What all ranks of this program write of the op, in torch's order of keys."""
        key = ("entry", self.number, index)
        found = self.state.said.get(key)
        if found is None:
            op = self.program[index]
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
                "profiling_name": "" if op.name in ("send", "recv") else self._word(index),
                "frames": _frames(op.site),
            }
        return found

    def _word(self, index: int) -> str:
        op = self.program.ops[index]
        name = NAMES[op["name"]]
        if name not in ("send", "recv"):
            row = "all_reduce_barrier" if name == "barrier" else BY_NAME[name].recorder
            return f"nccl:{row}"
        group = self.state.groups[self.program.strings[op["group"]]]
        mine, size = int(group.position[self.rank]), len(group.group(self.rank))
        arrow = "->" if name == "send" else "<-"
        return f"nccl:{name} {mine}{arrow}{(mine + int(op['peer'])) % size}"


def _sizes(op: Op) -> tuple[list[list[int]], list[list[int]]]:
    if op.name == "barrier":
        return [[1]], [[1]]
    inputs = op.num_in if op.num_in >= 0 else op.num_out
    outputs = op.num_out if op.num_out >= 0 else op.num_in
    return [[max(0, inputs)]], [[max(0, outputs)]]


def _frames(site: str) -> list[Row]:
    file, _, line = site.rpartition(":")
    return [{"name": "", "filename": file, "line": int(line)}] if file and line.isdigit() else []
