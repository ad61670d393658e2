"""Who waits for whom?  The world graph as a directed acyclic graph of nodes that take time.

In : a WorldGraph (and how many iterations in a row).  Out: Dag.  CUDA's rules, which do not depend
on times, so the graph is built once and evaluated for any durations:

* ops on a stream run one after the other; each group has a stream of its own for its calls, and
  each pair of ranks one for sends and receives that are not batched (ProcessGroupNCCL)
* a call starts when its issuing stream and its group's stream get there, on every member; all
  members end it together.  A batch of sends and receives starts as one and ends as one
* the host issues ahead without limit, except that ``host_wait`` holds it until the device is done,
  and a barrier, or the wait for one, until its own stream is (ProcessGroupNCCL,
  WorkNCCL::synchronize); in programs that say how long it takes, it issues one op after the other,
  and nothing starts on the device before the host has launched it; what follows a segment on the
  device also waits until the host is through with the segment

A cycle means that the job hangs: ``order`` then holds fewer nodes than there are.  Programs are
read once each (``issue.py``); classes that run the same one are copies.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_prism.graph.world_graph import WorldGraph
from megatron_prism.replay import kernels
from megatron_prism.replay.issue import COMPUTE, HOST, JOIN, LEAD, NOTHING, Issue, issue

__all__ = ["COMPUTE", "HOST", "JOIN", "LEAD", "MEET", "Dag", "build"]

MEET = 2  # a rendezvous; the other kinds are of one class each


@dataclass(frozen=True)
class Dag:
    """Nodes and their predecessors: the nodes of class 0, of class 1, …, then the rendezvous.

    kind      : uint8 [n], COMPUTE, MEET, LEAD and HOST (the host issues an op) or
                JOIN (which takes no time)
    owner     : int32 [n], the class of a node; -1 for MEET
    op        : int64 [n], op index of a COMPUTE, LEAD or HOST node, the rendezvous of a MEET node,
                else -1
    iteration : int32 [n]
    start     : int64 [n + 1], slices of ``before``
    before    : int64 [edges], the nodes that must end first
    node_of   : per class and iteration: op -> its node (-1: none)
    ready_of  : per class and iteration: op -> the node at which its rank is ready for it (-1: none)
    """

    kind: np.ndarray
    owner: np.ndarray
    op: np.ndarray
    iteration: np.ndarray
    start: np.ndarray
    before: np.ndarray
    node_of: tuple[tuple[np.ndarray, ...], ...]
    ready_of: tuple[tuple[np.ndarray, ...], ...]

    def __len__(self) -> int:
        return len(self.kind)

    def predecessors(self, node: int) -> np.ndarray:
        """The nodes that must end before ``node`` starts."""
        return self.before[self.start[node] : self.start[node + 1]]

    @cached_property
    def followers(self) -> tuple[np.ndarray, np.ndarray]:
        """(int64 [n + 1] slices of, int64 [edges]) the nodes that wait for each node."""
        return kernels.transposed(self.start, self.before)

    @cached_property
    def order(self) -> np.ndarray:
        """int64 [m]: nodes such that predecessors come first; m < n if the job hangs."""
        return kernels.order(np.diff(self.start), *self.followers)


def build(graph: WorldGraph, iterations: int = 1) -> Dag:
    """The dependencies of ``iterations`` iterations, one straight after the other."""
    collects = gc.isenabled()
    gc.disable()  # hundreds of thousands of small lists, none of them garbage
    try:
        return _assemble(graph, _issues(graph, iterations), iterations)
    finally:
        if collects:
            gc.enable()


def _issues(graph: WorldGraph, iterations: int) -> list[Issue]:
    """Of every class; classes that run the same program in groups of the same sizes share it."""
    known: dict[object, Issue] = {}
    issues = []
    for program, rank in zip(graph.classes.programs, graph.classes.representatives, strict=True):
        names = graph.programs.programs[program].groups()
        sizes = {name: len(graph.groups[name].group(rank)) for name in names}
        key = (program, tuple(sizes.values()))
        if key not in known:
            known[key] = issue(graph.programs.programs[program], sizes, iterations)
        issues.append(known[key])
    return issues


def _assemble(graph: WorldGraph, issues: list[Issue], iterations: int) -> Dag:
    """Number the nodes of all classes, then their meetings, iteration after iteration."""
    meetings = len(graph.rendezvous)
    counts = [len(one.kind) for one in issues]
    base = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    local, n = int(base[-1]), int(base[-1]) + iterations * meetings
    parts, ready, meets, nodes, readies = [], [], [], [], []
    for one, own, of in zip(issues, base[:-1].tolist(), graph.rendezvous.of, strict=True):
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
    )  # fmt: skip


def _global(local: np.ndarray, own: int, numbers: np.ndarray) -> np.ndarray:
    """Nodes and meetings of one class as nodes of the whole; -1 for NOTHING."""
    meets = numbers[np.where(local < 0, -1 - local, 0)] if numbers.size else local
    return np.where(local == NOTHING, -1, np.where(local < 0, meets, local + own))
