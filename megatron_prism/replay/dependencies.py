"""The dependency graph: who waits for whom, as a directed acyclic graph of nodes that take time.

In : a WorldGraph (and how many iterations in a row).  Out: Dag.  CUDA's rules, which do not depend
on times, so the graph is built once and evaluated for any durations:

* ops on a stream run one after the other; each group has a stream of its own for its calls, and
  each pair of ranks one for sends and receives that are not batched (ProcessGroupNCCL)
* a call starts when its issuing stream and its group's stream get there, on every member; all
  members end it together.  A batch of sends and receives starts as one and ends as one
* with ``buffered``, a send ends without its receiver as long as NCCL's buffers hold what that has
  not received yet, each message in whole eighths of them; the receive still waits for both
* the host issues ahead without limit, except that ``host_wait`` holds it until the device is done,
  and a barrier, or the wait for one, until its own stream is (ProcessGroupNCCL,
  WorkNCCL::synchronize); in programs that say how long it takes, it issues one op after the other,
  and nothing starts on the device before the host has launched it; what follows a segment on the
  device also waits until the host is through with the segment

A cycle means that the job hangs: ``order`` then holds fewer nodes than there are.  Programs are
read once each (``Issue``); classes that run the same one are copies.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import numpy as np

from megatron_prism.core.ops import CODE, IS_COLLECTIVE, IS_PAIR
from megatron_prism.core.program import Program
from megatron_prism.graph.world_graph import WorldGraph
from megatron_prism.replay import loops

__all__ = ["COMPUTE", "Dag", "HOST", "JOIN", "LEAD", "MEET", "SENT", "build"]


COMPUTE, JOIN = 0, 1  # a segment, a point in time (2 is a meeting)
LEAD, HOST = 3, 4  # the host's time for an op until the device may begin it, and after that
_WAIT, _RECORD, _HOST = CODE["wait"], CODE["record"], CODE["host_wait"]
_COMPUTE, _BARRIER = CODE["compute"], CODE["barrier"]
SENT = 5  # a send that does not wait for its receiver
_SEND = CODE["send"]
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


def issue(program: Program, sizes: Mapping[str, int], iterations: int, buffered: int) -> Issue:
    """``iterations`` iterations of ``program``, one straight after the other; buffers of so many
    bytes hold what is on its way to a peer."""
    reader = _Reader(program, sizes, iterations, buffered)
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
    groups: list[int]
    device: set[int]  # host waits for the whole device, not for one stream
    members: dict[int, list[int]] = field(default_factory=dict)  # batch -> its ops


_STEPS = 8  # of NCCL's buffers (NCCL_STEPS): on H100 eight messages of up to 8 MiB fit into 64


class _Reader:
    """Where the rank stands: what the next op of each queue must wait for."""

    def __init__(
        self, program: Program, sizes: Mapping[str, int], iterations: int, buffered: int
    ) -> None:
        self.buffered = buffered
        self.peers = program.ops["peer"].tolist()
        self.bytes = program.bytes_in.tolist() if buffered else []
        self.held: dict[tuple[int, int], list[tuple[int, int]]] = {}  # bytes, meeting: on their way
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
        if self.buffered and self.columns.names[op] == _SEND and self.bytes[op] <= self.buffered:
            self.node[call] = self._sent(op, call, ready)
        return self.node[call]

    def _sent(self, op: int, call: int, ready: int) -> int:
        """The node of a send into NCCL's buffers, once they have room."""
        held = self.held.setdefault((self.columns.groups[op], self.peers[op]), [])
        waits, step = [ready], max(1, self.buffered // _STEPS)
        held.append((max(1, -(-self.bytes[op] // step)) * step, -1 - call))
        while sum(size for size, _ in held) > self.buffered:
            waits.append(held.pop(0)[1])
        return self._add(op, waits, SENT)

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
        ops["group"].tolist(),
        {i for i in waits if strings[ops["note"][i]] == "device"},
        members,
    )


MEET = 2  # a matched call; the other kinds are of one class each


@dataclass(frozen=True)
class Dag:
    """Nodes and their predecessors: the nodes of class 0, of class 1, …, then the matched calls.

    kind      : uint8 [n], COMPUTE, MEET, LEAD and HOST (the host issues an op) or
                JOIN (which takes no time)
    owner     : int32 [n], the class of a node; -1 for MEET
    op        : int64 [n], op of a COMPUTE, LEAD or HOST node, matched call of a MEET node,
                else -1
    iteration : int32 [n]
    start     : int64 [n + 1], slices of ``before``
    before    : int64 [edges], the nodes that must end first
    node_of   : per class and iteration: op -> its node (-1: none)
    ready_of  : per class and iteration: op -> the node at which its rank is ready for it (-1: none)
    sent      : int64 [sends, 2], nodes of sends into buffers, and their matched calls
    """

    kind: np.ndarray
    owner: np.ndarray
    op: np.ndarray
    iteration: np.ndarray
    start: np.ndarray
    before: np.ndarray
    node_of: tuple[tuple[np.ndarray, ...], ...]
    ready_of: tuple[tuple[np.ndarray, ...], ...]
    sent: np.ndarray = field(default_factory=lambda: np.empty((0, 2), dtype=np.int64))

    def __len__(self) -> int:
        return len(self.kind)

    def predecessors(self, node: int) -> np.ndarray:
        """The nodes that must end before ``node`` starts."""
        return self.before[self.start[node] : self.start[node + 1]]

    @cached_property
    def followers(self) -> tuple[np.ndarray, np.ndarray]:
        """(int64 [n + 1] slices of, int64 [edges]) the nodes that wait for each node."""
        return loops.transposed(self.start, self.before)

    @cached_property
    def order(self) -> np.ndarray:
        """int64 [m]: nodes such that predecessors come first; m < n if the job hangs."""
        return loops.order(np.diff(self.start), *self.followers)


def build(graph: WorldGraph, iterations: int = 1, buffered: int = 0) -> Dag:
    """The dependencies of ``iterations`` iterations, one straight after the other; ``buffered``:
    bytes on their way to a peer that NCCL's buffers hold, 0: sends wait for their receivers."""
    collects = gc.isenabled()
    gc.disable()  # hundreds of thousands of small lists, none of them garbage
    try:
        return _assemble(graph, _issues(graph, iterations, buffered), iterations)
    finally:
        if collects:
            gc.enable()


def _issues(graph: WorldGraph, iterations: int, buffered: int) -> list[Issue]:
    """Of every class; classes that run the same program in groups of the same sizes share it."""
    known: dict[object, Issue] = {}
    issues = []
    for program, rank in zip(graph.classes.programs, graph.classes.representatives, strict=True):
        names = graph.programs.programs[program].groups()
        sizes = {name: len(graph.groups[name].group(rank)) for name in names}
        key = (program, tuple(sizes.values()))
        if key not in known:
            known[key] = issue(graph.programs.programs[program], sizes, iterations, buffered)
        issues.append(known[key])
    return issues


def _assemble(graph: WorldGraph, issues: list[Issue], iterations: int) -> Dag:
    """Number the nodes of all classes, then their meetings, iteration after iteration."""
    meetings = len(graph.matched_calls)
    counts = [len(one.kind) for one in issues]
    base = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    local, n = int(base[-1]), int(base[-1]) + iterations * meetings
    parts, ready, meets, nodes, readies = [], [], [], [], []
    for one, own, of in zip(issues, base[:-1].tolist(), graph.matched_calls.of, strict=True):
        numbers = np.concatenate([local + i * meetings + of for i in range(iterations)])
        parts.append(_global(one.before, own, numbers))
        meets.append(numbers[one.calls])
        ready.append(own + one.ready)
        nodes.append(tuple(_global(one.node, own, numbers).reshape(iterations, -1)))
        readies.append(tuple(_global(one.ready_of, own, numbers).reshape(iterations, -1)))
    meet = np.concatenate([*meets, np.empty(0, dtype=np.int64)])
    arrivals = np.bincount(meet - local, minlength=n - local)
    lengths = np.concatenate([*(np.diff(one.start) for one in issues), arrivals])
    before = [*parts, np.concatenate([*ready, meet[:0]])[np.argsort(meet, kind="stable")]]
    numbers = np.arange(meetings, dtype=np.int64)
    sent = [
        np.stack([own + (mine := np.flatnonzero(one.kind == SENT)), of[one.op[mine]]], axis=1)
        for one, own, of in zip(issues, base[:-1].tolist(), graph.matched_calls.of, strict=True)
    ]
    return Dag(
        np.concatenate([*(one.kind for one in issues), np.full(n - local, MEET, dtype=np.uint8)]),
        np.concatenate([np.repeat(np.arange(len(issues), dtype=np.int32), counts),
                        np.full(n - local, -1, dtype=np.int32)]),
        np.concatenate([*(one.op for one in issues), np.tile(numbers, iterations)]),
        np.concatenate([*(one.iteration for one in issues),
                        np.repeat(np.arange(iterations, dtype=np.int32), meetings)]),
        np.concatenate(([0], np.cumsum(lengths))),
        np.concatenate(before),
        tuple(nodes),
        tuple(readies),
        np.concatenate([*sent, np.empty((0, 2), dtype=np.int64)]),
    )  # fmt: skip


def _global(local: np.ndarray, own: int, numbers: np.ndarray) -> np.ndarray:
    """Nodes and meetings of one class as nodes of the whole; -1 for NOTHING."""
    meets = numbers[np.where(local < 0, -1 - local, 0)] if numbers.size else local
    return np.where(local == NOTHING, -1, np.where(local < 0, meets, local + own))
