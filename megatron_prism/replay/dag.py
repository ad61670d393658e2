"""Who waits for whom?  The world graph as a directed acyclic graph of nodes that take time.

In : a WorldGraph (and how many iterations in a row).  Out: Dag.  CUDA's rules, which do not depend
on times, so the graph is built once and evaluated for any durations:

* ops on a stream run one after the other; each group has a stream of its own for its calls, and
  each pair of ranks one for sends and receives that are not batched (ProcessGroupNCCL)
* a call starts when its issuing stream and its group's stream get there, on every member; all
  members end it together.  A batch of sends and receives starts as one and ends as one
* the host issues ahead without limit, except that ``host_wait`` holds it until the device is done

A cycle means that the job hangs: ``order`` then holds fewer nodes than there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from megatron_prism.graph import WorldGraph
from megatron_prism.ops import CODE, IS_COLLECTIVE, IS_PAIR

__all__ = ["COMPUTE", "JOIN", "MEET", "Dag", "build"]

COMPUTE, MEET, JOIN = 0, 1, 2  # a segment, a rendezvous, a point in time
_WAIT, _RECORD, _HOST = CODE["wait"], CODE["record"], CODE["host_wait"]
_COMPUTE = CODE["compute"]


@dataclass(frozen=True)
class Dag:
    """Nodes and their predecessors.

    kind      : uint8 [n], COMPUTE, MEET or JOIN (which takes no time)
    owner     : int32 [n], the class of a COMPUTE node, else -1
    op        : int64 [n], op index of a COMPUTE node, rendezvous of a MEET node, else -1
    iteration : int32 [n]
    start     : int64 [n + 1], slices of ``before``
    before    : int64 [edges], the nodes that must end first
    order     : int64 [m], nodes such that predecessors come first; m < n if the job hangs
    issued    : per class and iteration: op -> node after which the op was issued (-1: none)
    """

    kind: np.ndarray
    owner: np.ndarray
    op: np.ndarray
    iteration: np.ndarray
    start: np.ndarray
    before: np.ndarray
    order: np.ndarray
    node_of: tuple[tuple[np.ndarray, ...], ...]
    ready_of: tuple[tuple[np.ndarray, ...], ...]

    def __len__(self) -> int:
        return len(self.kind)

    def predecessors(self, node: int) -> np.ndarray:
        """The nodes that must end before ``node`` starts."""
        return self.before[self.start[node] : self.start[node + 1]]


def build(graph: WorldGraph, iterations: int = 1) -> Dag:
    """The dependencies of ``iterations`` iterations, one straight after the other."""
    return _Builder(graph, iterations).build()


@dataclass
class _Rank:
    """Where one class stands while its program is read: pending predecessors of everything."""

    streams: dict[int, list[int]] = field(default_factory=dict)
    comms: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    handles: dict[int, list[int]] = field(default_factory=dict)
    host: list[int] = field(default_factory=list)


class _Builder:
    def __init__(self, graph: WorldGraph, iterations: int) -> None:
        self.graph, self.iterations = graph, iterations
        self.kind: list[int] = []
        self.owner: list[int] = []
        self.op: list[int] = []
        self.of_iteration: list[int] = []
        self.before: list[list[int]] = []
        self.meet: dict[int, int] = {}  # rendezvous of this iteration -> node

    def node(self, kind: int, owner: int, op: int, iteration: int, before: list[int]) -> int:
        self.kind.append(kind)
        self.owner.append(owner)
        self.op.append(op)
        self.of_iteration.append(iteration)
        self.before.append(before)
        return len(self.kind) - 1

    def build(self) -> Dag:
        ranks = [_Rank() for _ in self.graph.program_list]
        nodes: list[list[np.ndarray]] = [[] for _ in ranks]
        ready: list[list[np.ndarray]] = [[] for _ in ranks]
        for iteration in range(self.iterations):
            self.meet = {}
            for index, rank in enumerate(ranks):
                rank.handles = {}
                found, at = self._read(index, rank, iteration)
                nodes[index].append(found)
                ready[index].append(at)
        lengths = np.array([len(b) for b in self.before], dtype=np.int64)
        start = np.concatenate(([0], np.cumsum(lengths)))
        before = np.array([p for b in self.before for p in b], dtype=np.int64)
        return Dag(
            np.array(self.kind, dtype=np.uint8),
            np.array(self.owner, dtype=np.int32),
            np.array(self.op, dtype=np.int64),
            np.array(self.of_iteration, dtype=np.int32),
            start,
            before,
            _order(start, before),
            tuple(map(tuple, nodes)),
            tuple(map(tuple, ready)),
        )

    def _read(self, index: int, rank: _Rank, iteration: int) -> tuple[np.ndarray, np.ndarray]:
        """(node of every op, node at which it was ready), -1 where there is none."""
        program = self.graph.program_list[index]
        ops = program.ops
        names, streams = ops["name"].tolist(), ops["stream"].tolist()
        groups, handles = ops["group"].tolist(), ops["handle"].tolist()
        batches, peers = ops["batch"].tolist(), ops["peer"].tolist()
        of = self.graph.rendezvous.of[index].tolist()
        talks, pairs = IS_COLLECTIVE.tolist(), IS_PAIR.tolist()
        found = np.full(len(names), -1, dtype=np.int64)
        ready_at = np.full(len(names), -1, dtype=np.int64)
        everything = _device_waits(program)
        members: dict[int, list[int]] = {}
        for i in np.flatnonzero(ops["batch"] >= 0).tolist():
            members.setdefault(batches[i], []).append(i)
        for i, (name, stream) in enumerate(zip(names, streams, strict=True)):
            if name == _COMPUTE:
                node = self.node(COMPUTE, index, i, iteration, self._queue(rank, stream))
                rank.streams[stream] = [node]
                found[i] = node
            elif talks[name] or pairs[name]:
                together = members.get(batches[i], [i])
                if together[0] == i:  # the rest of a batch was issued with its first
                    comm = (groups[i], peers[i] if pairs[name] and batches[i] < 0 else 0)
                    self._call(rank, stream, comm, together, of, handles, iteration, found,
                               ready_at)  # fmt: skip
            elif name == _WAIT:
                queue = self._queue(rank, stream)
                rank.streams[stream] = [*queue, *rank.handles.get(handles[i], ())]
            elif name == _RECORD:
                rank.handles[handles[i]] = list(self._queue(rank, stream))
            elif name == _HOST:
                self._host_wait(rank, stream, i in everything, iteration)
        return found, ready_at

    def _queue(self, rank: _Rank, stream: int) -> list[int]:
        """What the next op on ``stream`` waits for."""
        queue = rank.streams.get(stream, [])
        return [*queue, *(n for n in rank.host if n not in queue)] if rank.host else list(queue)

    def _call(
        self,
        rank: _Rank,
        stream: int,
        comm: tuple[int, int],
        batch: list[int],
        of: list[int],
        handles: list[int],
        iteration: int,
        found: np.ndarray,
        ready_at: np.ndarray,
    ) -> None:
        """One call to NCCL: a collective, a message, or a batch of them."""
        before = list(dict.fromkeys([*self._queue(rank, stream), *rank.comms.get(comm, ())]))
        ready = self.node(JOIN, -1, -1, iteration, before)
        ends = []
        for i in batch:
            number = of[i]
            node = self.meet.get(number)
            if node is None:
                node = self.meet[number] = self.node(MEET, -1, number, iteration, [])
            self.before[node].append(ready)
            ends.append(node)
            found[i], ready_at[i] = node, ready
        end = ends[0] if len(ends) == 1 else self.node(JOIN, -1, -1, iteration, ends)
        rank.comms[comm] = [end]
        waits = False
        for i in batch:
            if handles[i] >= 0:
                rank.handles[handles[i]] = [end]
            else:
                waits = True
        if waits:
            rank.streams[stream] = [end]

    def _host_wait(self, rank: _Rank, stream: int, everything: bool, iteration: int) -> None:
        if everything:
            waits = [n for queue in rank.streams.values() for n in queue]
            waits += [n for queue in rank.comms.values() for n in queue]
        else:
            waits = rank.streams.get(stream, [])
        if waits or rank.host:
            together = list(dict.fromkeys([*waits, *rank.host]))
            rank.host = [self.node(JOIN, -1, -1, iteration, together)]


def _device_waits(program: object) -> set[int]:
    """Host waits for the whole device, not for one stream."""
    ops, strings = program.ops, program.strings  # type: ignore[attr-defined]
    waits = np.flatnonzero(ops["name"] == _HOST)
    return {int(i) for i in waits if strings[ops["note"][i]] == "device"}


def _order(start: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Predecessors first (Kahn); nodes on and behind a cycle are left out."""
    n = len(start) - 1
    waiting = np.diff(start).tolist()
    owners = np.repeat(np.arange(n), np.diff(start))
    by = np.argsort(before, kind="stable")
    after = owners[by].tolist()
    first = np.searchsorted(before[by], np.arange(n + 1)).tolist()
    stack = [i for i in range(n) if not waiting[i]]
    order = []
    while stack:
        node = stack.pop()
        order.append(node)
        for next_one in after[first[node] : first[node + 1]]:
            waiting[next_one] -= 1
            if not waiting[next_one]:
                stack.append(next_one)
    return np.array(order, dtype=np.int64)
