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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from megatron_prism.core.errors import UsageError
from megatron_prism.core.files import check_writable
from megatron_prism.core.programs.collectives import BY_NAME
from megatron_prism.core.programs.ops import DTYPE_WORDS, IS_NCCL, IS_PAIR, NAMES, Op
from megatron_prism.core.programs.program import Program
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


_HIDDEN = ".dumps-partial-"  # folder of a writer that is at work, or was killed
_CLOSING = {"all_gather": "ALLGATHER_coalesced", "reduce_scatter": "REDUCE_SCATTER_coalesced"}
_TICK_NS = 1_000_000  # between two records: a standstill knows no time
_TIMEOUT_MS = 600_000
_MESSAGES = ("send", "recv")


def write(
    state: StalledJob,
    folder: str | os.PathLike[str],
    *,
    force: bool = False,
    **how: Unpack[ExportSettings],
) -> Path:
    """Write a file ``_dump_R`` per rank that leaves a dump, all or none.

    Args:
        state: The stalled job.
        folder: Where to.
        force: Replace older dumps; nothing else is touched.
        how: As in ``dump_of``.

    Raises:
        UsageError: As from ``check_free``.
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
    """Check that dumps may be written into a folder: an empty or a new one, or any with ``force``.

    Raises:
        UsageError: If they may not.
    """
    check_writable(folder)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is no folder", fix="name another one with -o DIR")
    if force or not folder.exists():
        return
    for path in folder.iterdir():
        if not path.name.startswith((_HIDDEN, ".claim")):
            raise UsageError(f"{folder} is not empty", fix="--force, or another folder")


def dumps_of(
    state: StalledJob, **how: Unpack[ExportSettings]
) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield each rank that leaves a dump, and its dump; ``how`` as in ``dump_of``."""
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
    """Return the dump of a rank as torch would pickle it.

    Args:
        state: The stalled job.
        rank: The rank.
        active_only: Only what is outstanding (Megatron's default).
        stacks: One frame of each call, the op's site.
        timing: What has started is known to have (TORCH_NCCL_ENABLE_TIMING).
        last: So many calls before the first that is outstanding, and from it on; 0 is all.
    """
    writer = _Writer(state, rank, timing)
    entries = writer.entries(last)
    if active_only:
        entries = [entry for entry in entries if not entry["retired"]]
    if not stacks:
        entries = [_without_frames(entry) for entry in entries]
    return {
        "version": "2.10",
        "comm_lib_version": "2.27.3",
        "pg_config": writer.config,
        "pg_status": writer.status,
        "entries": entries,
    }


def _without_frames(entry: Row) -> Row:
    return {key: value for key, value in entry.items() if key != "frames"}


# of an entry, in torch's order
_KEYS = (
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
)


@dataclass(frozen=True)
class _Numbers:
    """Numbers of calls, in the order of issue, as ProcessGroupNCCL and its recorder count.

    Attributes:
        collectives: Collectives of the call's group up to it, from 1.
        messages: Messages of the call's group up to it, from 1.
        records: Number of its record, from 0.
        closes: Whether the record that closes its batch follows.
    """

    collectives: list[int]
    messages: list[int]
    records: list[int]
    closes: list[bool]


def _numbered(
    groups: Iterable[str],
    is_message: Iterable[bool],
    batches: Iterable[int],
    indices: Iterable[int],
    last_of_batch: Mapping[int, int],
) -> _Numbers:
    """Number calls.

    Args:
        groups: Description of each call's group.
        is_message: Whether each is a send or a receive.
        batches: The batch of each; -1: none.
        indices: Op of each.
        last_of_batch: Batch -> its last op, of calls in all groups.
    """
    numbers = _Numbers([], [], [], [])
    counts = Counter[tuple[str, bool]]()
    counted_batches: set[int] = set()
    record = 0
    for name, is_pair, batch, index in zip(groups, is_message, batches, indices, strict=True):
        # a batch is one launch
        if batch < 0 or batch not in counted_batches:
            counts[name, is_pair] += 1
            counted_batches.add(batch)
        closes = batch >= 0 and last_of_batch[batch] == index
        numbers.collectives.append(counts[name, False])
        numbers.messages.append(counts[name, True])
        numbers.records.append(record)
        numbers.closes.append(closes)
        record += 2 if closes else 1
    return numbers


class _Table:
    """The calls of one program in some groups, numbered as ProcessGroupNCCL and its recorder do.

    Attributes:
        index: Op of each call.
        groups: Description of each call's group.
        place: Number of each call's group among the groups.
        batch: Batch of each call; -1: alone.
        pair: Whether each is a message.
        numbers: Of the calls.
        seq: Number of a message among messages, else among collectives.
        among_messages: Whether each is a collective of a group that has messages, too.
        messaging: Groups that have messages, sorted.
    """

    def __init__(self, program: Program, group_names: Iterable[str]) -> None:
        ops = program.ops
        calls = np.flatnonzero(IS_NCCL[ops["name"]])
        place_of_group = {name: place for place, name in enumerate(group_names)}
        place_of_code = np.array([place_of_group.get(text, -1) for text in program.strings], int)

        # a batch may end with a call in a group that is not among these
        batches = ops["batch"][calls].tolist()
        last_of_batch = dict(zip(batches, calls.tolist(), strict=True))

        places = place_of_code[ops["group"][calls]]
        self.index = calls[places >= 0]
        self.place = places[places >= 0]
        self.groups = [program.strings[code] for code in ops["group"][self.index].tolist()]
        self.batch = ops["batch"][self.index]
        self.pair = IS_PAIR[ops["name"][self.index]]
        self.among_messages = np.isin(self.place, self.place[self.pair]) & ~self.pair
        messaging_groups = {self.groups[row] for row in np.flatnonzero(self.pair).tolist()}
        self.messaging = sorted(messaging_groups)
        self.numbers = _numbered(
            self.groups,
            self.pair.tolist(),
            self.batch.tolist(),
            self.index.tolist(),
            last_of_batch,
        )
        self.seq = np.where(self.pair, self.numbers.messages, self.numbers.collectives)


class _Writer:
    """One rank's calls.

    Attributes:
        config: Number of a group -> the group, as torch writes it.
        calls: What the rank's program issues.
        count: How many of the calls the rank has issued.
        done: Which of these the recorder saw end.
        started: Which of these the recorder saw start.
        status: Counters of each group.
    """

    def __init__(self, state: StalledJob, rank: int, timing: bool) -> None:
        self.state = state
        self.rank = rank
        self.timing = timing
        self.program = state.programs.of(rank)
        self.number = int(state.programs.program_of[rank])
        self.config = self._config()
        self.ids: dict[str, int] = {}  # description -> place of the group among the rank's
        self.group_of_entry: dict[str, tuple[str, str]] = {}  # description -> (number, description)
        for place, (number, config) in enumerate(self.config.items()):
            self.ids[config["desc"]] = place
            self.group_of_entry[config["desc"]] = (number, config["desc"])
        self.calls = self._calls()

        # a rank that fails blindly records nothing of what comes behind
        issued = state.issued[rank]
        fault = state.faults.get(rank)
        seen = issued
        if fault is not None and fault.blind is not None:
            seen = fault.blind
        self.count = int(np.searchsorted(self.calls.index, issued))
        index = self.calls.index[: self.count]
        is_seen = index < seen
        self.done = np.frombuffer(bytes(state.done[rank]), bool)[index] & is_seen
        self.started = np.frombuffer(bytes(state.ready[rank]), bool)[index] & is_seen & timing
        self.status = self._counters()

    def _config(self) -> dict[str, dict[str, str]]:
        """Return the groups of the rank: number -> group; they are numbered by descriptions."""
        state = self.state
        config: dict[str, dict[str, str]] = {}
        first_number = 0
        for name, group in state.groups.items():
            place = int(group.group_of[self.rank])
            if place >= 0:
                # all members write the same
                if (name, place) not in state.said:
                    state.said[name, place] = str(group.group(self.rank).tolist())
                number = str(first_number + place)
                config[number] = {"name": number, "desc": name, "ranks": state.said[name, place]}
            first_number += len(group.start) - 1
        return config

    def _calls(self) -> _Table:
        """Return the calls of the rank's program, which all ranks share that run it."""
        key = ("calls", self.number, *self.ids)
        if key not in self.state.said:
            self.state.said[key] = _Table(self.program, self.ids)
        table: _Table = self.state.said[key]
        return table

    def _counters(self) -> dict[str, dict[str, int]]:
        """Return of each group the last call issued, started and, of those without a gap, ended."""
        groups = self.calls.place[: self.count]
        seq = self.calls.seq[: self.count]
        status: dict[str, dict[str, int]] = {}
        for place in self.ids.values():
            is_of_group = groups == place
            ended = seq[is_of_group & self.done]
            gaps = np.flatnonzero(np.diff(ended) > 1)
            if len(gaps):
                ended = ended[: gaps[0] + 1]
            status[str(place)] = {
                "last_enqueued_collective": _last(seq[is_of_group]),
                "last_started_collective": _last(seq[is_of_group & self.started]),
                "last_completed_collective": _last(ended),
            }
        return status

    def entries(self, last: int = 0) -> list[Row]:
        """Return entries of all calls, or of some.

        Ranks that stand alike in the same program differ in the names of their groups alone.

        Args:
            last: Entries of the first ``last`` outstanding calls and as many before them, with
                whole batches, and collectives of groups that also have messages: these are counted
                by their records.  0: all.
        """
        state, rank = self.state, self.rank
        if rank in state.faults:
            return self._entries(last)
        neighbours: list[tuple[str, int, int]] = []
        for name in self.calls.messaging:
            group = state.groups[name]
            neighbours.append((name, int(group.position[rank]), len(group.group(rank))))
        flags = (bytes(state.done[rank]), bytes(state.ready[rank]), state.issued[rank])
        setting = ("entries", self.number, last, self.timing)
        key = (*setting, *flags, tuple(neighbours), tuple(self.ids))
        if key not in state.said:
            state.said[key] = self._entries(last)
        entries: list[Row] = []
        for entry in state.said[key]:
            _, desc = entry["process_group"]
            entries.append(entry | {"process_group": self.group_of_entry[desc]})
        return entries

    def _entries(self, last: int) -> list[Row]:
        is_written = self._window(last) if last else np.ones(self.count, bool)
        batch = self.calls.batch[: self.count]
        is_written |= (batch >= 0) & np.isin(batch, batch[is_written])
        entries: list[Row] = []
        for row in np.flatnonzero(is_written).tolist():
            entry = self._entry(row)
            entries.append(entry)
            if self.calls.numbers.closes[row]:
                entries.append(self._closing(entry, row))
        return entries

    def _window(self, last: int) -> np.ndarray:
        """Tell which calls are among ``last`` outstanding ones and ``last`` before them."""
        outstanding = np.flatnonzero(~self.done)
        first = self.count
        if len(outstanding):
            first = int(outstanding[0])
        end = self.count
        if len(outstanding) >= last:
            end = int(outstanding[last - 1]) + 1
        is_written = np.zeros(self.count, bool)
        is_written[max(0, first - last) : end] = True
        is_written |= self.calls.among_messages[: self.count]
        return is_written

    def _closing(self, last: Row, row: int) -> Row:
        """Return the record of a batch as a whole (ProcessGroupNCCL::endCoalescing)."""
        rows = np.flatnonzero(self.calls.batch == self.calls.batch[row])
        done = bool(self.done[rows].all())
        started = bool(self.started[rows].all())
        op = self.program[int(self.calls.index[rows[0]])]
        return last | {
            "record_id": last["record_id"] + 1,
            "op_id": last["op_id"] + 1,
            "profiling_name": f"nccl:{_CLOSING.get(op.name, 'coalesced')}",
            "time_created_ns": last["time_created_ns"] + _TICK_NS,
            "input_sizes": [],
            "input_dtypes": [],
            "output_sizes": [],
            "output_dtypes": [],
            "state": _state(done, started),
            "retired": done,
        }

    def _entry(self, row: int) -> Row:
        """Return the entry of a call."""
        calls = self.calls
        done = bool(self.done[row])
        started = bool(self.started[row])
        # torch only updates the record that closes the batch
        if calls.batch[row] >= 0:
            done = started = False
        index = int(calls.index[row])
        record = calls.numbers.records[row]
        group = calls.groups[row]
        entry = self._shared_entry(index).copy()
        entry["record_id"] = record
        entry["op_id"] = record + 1
        entry["pg_id"] = self.ids[group]
        entry["process_group"] = self.group_of_entry[group]
        entry["collective_seq_id"] = calls.numbers.collectives[row]
        entry["p2p_seq_id"] = calls.numbers.messages[row]
        if calls.pair[row]:
            entry["profiling_name"] = self._message_name(index)
        entry["time_created_ns"] = (record + 1) * _TICK_NS
        entry["state"] = _state(done, started)
        entry["retired"] = done
        return entry

    def _shared_entry(self, index: int) -> Row:
        """Return what all ranks of this program write of an op, in torch's order of keys."""
        key = ("entry", self.number, index)
        entry: Row | None = self.state.said.get(key)
        if entry is None:
            op = self.program[index]
            is_message = op.name in _MESSAGES
            inputs, outputs = _sizes(op)
            dtype = DTYPE_WORDS.get(op.dtype, "Float")
            entry = dict.fromkeys(_KEYS) | {
                "input_sizes": inputs,
                "input_dtypes": [dtype] * len(inputs),
                "output_sizes": outputs,
                "output_dtypes": [dtype] * len(outputs),
                "timeout_ms": _TIMEOUT_MS,
                "is_p2p": is_message,
                "thread_name": "",
                "thread_id": "0",
                "profiling_name": "" if is_message else _collective_name(op.name),
                "frames": _frames(op.site),
            }
            self.state.said[key] = entry
        return entry

    def _message_name(self, index: int) -> str:
        """Return torch's name of a message, with the ranks of both sides in the group."""
        op = self.program.ops[index]
        name = NAMES[op["name"]]
        group = self.state.groups[self.program.strings[op["group"]]]
        own_place = int(group.position[self.rank])
        peer_place = (own_place + int(op["peer"])) % len(group.group(self.rank))
        arrow = "->" if name == "send" else "<-"
        return f"nccl:{name} {own_place}{arrow}{peer_place}"


def _last(numbers: np.ndarray) -> int:
    return int(numbers[-1]) if len(numbers) else -1


def _state(done: bool, started: bool) -> str:
    """Return the recorder's word for how far a call is."""
    if done:
        return "completed"
    return "started" if started else "scheduled"


def _collective_name(name: str) -> str:
    """Return torch's name of a collective."""
    # NCCL has no barrier: torch reduces a tensor of one element
    recorded = "all_reduce_barrier" if name == "barrier" else BY_NAME[name].recorder
    return f"nccl:{recorded}"


def _sizes(op: Op) -> tuple[list[list[int]], list[list[int]]]:
    """Return the shapes of inputs and of outputs; a program knows numbers of elements only."""
    if op.name == "barrier":
        return [[1]], [[1]]
    input_count = op.num_in if op.num_in >= 0 else op.num_out
    output_count = op.num_out if op.num_out >= 0 else op.num_in
    return [[max(0, input_count)]], [[max(0, output_count)]]


def _frames(site: str) -> list[Row]:
    """Return the stack of a call: the line that the program names, if it names one."""
    file, _, line = site.rpartition(":")
    if not file or not line.isdigit():
        return []
    return [{"name": "", "filename": file, "line": int(line)}]
