"""What does one rank's device do before what?  A program read once, in the order of issue.

In : a program, and the sizes of its groups.  Out: Issue: the nodes of one class and what each waits
for, with the meetings left open.  ``dag`` says which rules hold and joins the classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from megatron_prism.core.ops import CODE, IS_COLLECTIVE, IS_PAIR
from megatron_prism.core.program import Program

__all__ = ["COMPUTE", "HOST", "JOIN", "LEAD", "NOTHING", "Issue", "issue"]

COMPUTE, JOIN = 0, 1  # a segment, a point in time (2 is a meeting)
LEAD, HOST = 3, 4  # the host's time for an op until the device may begin it, and after that
_WAIT, _RECORD, _HOST = CODE["wait"], CODE["record"], CODE["host_wait"]
_COMPUTE, _BARRIER = CODE["compute"], CODE["barrier"]
_EMPTY: list[int] = []  # never changed
_TALKS = (IS_COLLECTIVE | IS_PAIR).tolist()


@dataclass(frozen=True)
class Issue:
    """The nodes of one class, numbered from 0.  ``-1 - k`` is the meeting of call ``k``, where
    k = iteration * ops + op.

    kind, op, iteration : per node; op is -1 for JOINs
    start, before       : before[start[i]:start[i + 1]], nodes and meetings that end before node i
    calls, ready        : the calls, and the node at which this rank is ready for each
    node                : int64 [iterations * ops], node or meeting of every op; ``NOTHING``: none
    ready_of            : int64 [iterations * ops], as ``ready``; NOTHING for ops that are no calls
    """

    kind: np.ndarray
    op: np.ndarray
    iteration: np.ndarray
    start: np.ndarray
    before: np.ndarray
    calls: np.ndarray
    ready: np.ndarray
    node: np.ndarray
    ready_of: np.ndarray


NOTHING = np.iinfo(np.int64).max


def issue(program: Program, sizes: Mapping[str, int], iterations: int) -> Issue:
    """``iterations`` iterations of ``program``, one straight after the other."""
    reader = _Reader(program, sizes, iterations)
    for iteration in range(iterations):
        reader.read(iteration)
    return reader.build()


@dataclass
class _Columns:
    """The columns of a program as lists, which Python reads faster than arrays."""

    names: list[int]
    streams: list[int]
    comms: list[int]  # which of NCCL's streams a call runs on
    handles: list[int]
    batches: list[int]
    device: set[int]  # host waits for the whole device, not for one stream
    members: dict[int, list[int]] = field(default_factory=dict)  # batch -> its ops


class _Reader:
    """Where the rank stands: what the next op of each queue must wait for."""

    def __init__(self, program: Program, sizes: Mapping[str, int], iterations: int) -> None:
        self.columns = _columns(program, sizes)
        self.length = len(program)
        self.op: list[int] = []
        self.kind: list[int] = []
        self.begins: list[int] = []  # the first node of every iteration
        self.before: list[list[int]] = []
        self.node = [NOTHING] * (self.length * iterations)
        self.ready_of = [NOTHING] * (self.length * iterations)
        self.calls: list[int] = []
        self.ready: list[int] = []
        self.streams: dict[int, list[int]] = {}
        self.comms: dict[int, list[int]] = {}
        self.handles: dict[int, list[int]] = {}
        self.host = -1  # what the host has done or waited for last
        self.hosted = program.knows_host

    def read(self, iteration: int) -> None:
        """The next iteration."""
        columns, base = self.columns, iteration * self.length
        streams, members = self.streams, columns.members
        self.begins.append(len(self.op))
        self.handles = {}
        barriers: set[int] = set()
        rows = zip(columns.names, columns.streams, columns.batches, strict=True)
        for i, (name, stream, batch) in enumerate(rows):
            if name == _COMPUTE:
                if self.hosted:
                    node = self._segment(i, stream)
                else:
                    node = self._add(i, self._queue(stream))
                    streams[stream] = [node]
                self.node[base + i] = node
            elif _TALKS[name]:
                together = [i] if batch < 0 else members[batch]
                if together[0] == i:  # the rest of a batch was issued with its first
                    if self.hosted:
                        held = [self.host] if self.host >= 0 else []
                        self.host = self._add(i, held, HOST)
                    self._call(stream, together, base)
                    if name == _BARRIER and columns.handles[i] < 0:
                        self._host_wait(stream, False)
                    elif name == _BARRIER:
                        barriers.add(columns.handles[i])
            elif name == _WAIT:
                queue, ends = self._queue(stream), self.handles.get(columns.handles[i], _EMPTY)
                if ends != queue:
                    streams[stream] = list(dict.fromkeys([*queue, *ends]))
                if columns.handles[i] in barriers:  # WorkNCCL blocks the host there, too
                    self._host_wait(stream, False)
            elif name == _RECORD:
                self.handles[columns.handles[i]] = self._queue(stream)
            elif name == _HOST:
                self._host_wait(stream, i in columns.device)

    def _add(self, op: int, before: list[int], kind: int = COMPUTE) -> int:
        """A node: a segment, or a JOIN if op is -1."""
        self.op.append(op)
        self.kind.append(JOIN if op < 0 else kind)
        self.before.append(before)
        return len(self.op) - 1

    def _segment(self, op: int, stream: int) -> int:
        """The node of a segment between the two in which the host issues it."""
        lead = len(self.op)
        queue = self.streams.get(stream, _EMPTY)
        self.op += (op, op, op)
        self.kind += (LEAD, COMPUTE, HOST)
        self.before += ([self.host] if self.host >= 0 else [], [*queue, lead], [lead])
        self.streams[stream] = [lead + 1]
        self.host = lead + 2
        return lead + 1

    def _queue(self, stream: int) -> list[int]:
        """What the next op on ``stream`` waits for; not to be changed."""
        queue, host = self.streams.get(stream, _EMPTY), self.host
        return queue if host < 0 or host in queue else [*queue, host]

    def _call(self, stream: int, batch: list[int], base: int) -> None:
        """One call to NCCL: a collective, a message, or a batch of them."""
        comm = self.columns.comms[batch[0]]
        queue = self._queue(stream)
        last = self.comms.get(comm)
        if last is not None and last != queue:
            queue = queue + [n for n in last if n not in queue]
        ready = self._add(-1, queue)
        if len(batch) == 1:
            end = [self._joins(batch[0], base, ready)]
        else:
            end = [self._add(-1, [self._joins(i, base, ready) for i in batch])]
        self.comms[comm] = end
        handles = self.columns.handles
        for i in batch:
            if handles[i] >= 0:
                self.handles[handles[i]] = end
            else:
                self.streams[stream] = end

    def _joins(self, op: int, base: int, ready: int) -> int:
        """The meeting of a call for which ``ready`` is the node."""
        call = base + op
        self.calls.append(call)
        self.ready.append(ready)
        self.node[call], self.ready_of[call] = -1 - call, ready
        return -1 - call

    def _host_wait(self, stream: int, device: bool) -> None:
        waits = list(self.streams.get(stream, ()))
        if device:
            for queue in [*self.streams.values(), *self.comms.values()]:
                waits += queue
        if waits:
            earlier = [self.host] if self.host >= 0 else []
            self.host = self._add(-1, list(dict.fromkeys([*waits, *earlier])))

    def build(self) -> Issue:
        lengths = np.fromiter(map(len, self.before), dtype=np.int64, count=len(self.before))
        op = np.array(self.op, dtype=np.int64)
        counts = np.diff([*self.begins, len(op)])
        return Issue(
            np.array(self.kind, dtype=np.uint8),
            op,
            np.repeat(np.arange(len(counts), dtype=np.int32), counts),
            np.concatenate(([0], np.cumsum(lengths))),
            np.array(list(chain.from_iterable(self.before)), dtype=np.int64),
            np.array(self.calls, dtype=np.int64),
            np.array(self.ready, dtype=np.int64),
            np.array(self.node, dtype=np.int64),
            np.array(self.ready_of, dtype=np.int64),
        )


def _columns(program: Program, sizes: Mapping[str, int]) -> _Columns:
    ops, strings = program.ops, program.strings
    # 1 further and 1 back are the same pair in a group of two, and share its stream
    size_of = np.array([max(1, sizes.get(text, 1)) for text in strings], dtype=np.int64)
    waits = np.flatnonzero(ops["name"] == _HOST).tolist()
    alone = IS_PAIR[ops["name"]] & (ops["batch"] < 0)
    place = np.where(alone, 1 + ops["peer"] % size_of[ops["group"]], 0)
    batches = ops["batch"].tolist()
    members: dict[int, list[int]] = {}
    for i in np.flatnonzero(ops["batch"] >= 0).tolist():
        members.setdefault(batches[i], []).append(i)
    return _Columns(
        ops["name"].tolist(),
        ops["stream"].tolist(),
        (ops["group"].astype(np.int64) << 40 | place).tolist(),
        ops["handle"].tolist(),
        batches,
        {i for i in waits if strings[ops["note"][i]] == "device"},
        members,
    )
