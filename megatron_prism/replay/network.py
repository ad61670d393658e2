"""Replay with shared links.

In : an IssueGraph, a duration for every node, and the links.  Out: when every node begins and ends,
also of a world that hangs; of a ``Topology`` also which links are busy for how long.  Discrete
events in whole nanoseconds; without links the result is ``timeline.evaluate``'s, to the last digit.

Links are shared as a fluid, in equal parts: of k transfers on a link each moves at 1/k of the speed
that it has alone, at the k of its fullest link.  NCCL's kernels run side by side and their packets
interleave, so none waits for another to end (which a FIFO per link would say, and which would order
messages in ways that hang jobs that do not hang).  What a transfer cannot use on one link because
another holds it up is not given to others: pessimistic where paths differ.  Work is counted in
1/720,720 ns, which 1 to 16 divide, so that shares are exact; more than 16 lose less than 1 ns per
45 us.  A transfer ends at the first whole nanosecond at which its work is done.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from megatron_prism.core.errors import UsageError
from megatron_prism.graph import loops
from megatron_prism.graph.issue_graph import MEET, IssueGraph, build_issue_graph
from megatron_prism.graph.world_graph import WorldGraph
from megatron_prism.replay.costs import Prices
from megatron_prism.replay.costs.machine import Machine
from megatron_prism.replay.timeline import Links, Timeline, durations_of

_OUT, _IN = 0, 1


def ports(graph: WorldGraph, gpus_per_node: int) -> Links:
    """Link ``4 c + 2 net + in``: of class c, inside the node or to the network, out of it or in.

    Calls whose group (or pair) is on one node go inside, others over the network, for the lowest
    rank of a class as for all of it.
    """
    meet, calls = graph.matched_calls, graph.call_kinds
    number = np.repeat(np.arange(len(meet), dtype=np.int64), np.diff(meet.start))
    across = np.array([kind.spans(gpus_per_node) for kind in calls.kinds], dtype=np.int64)
    names = np.array([kind.name for kind in calls.kinds])[calls.of]
    base = 4 * meet.classes.astype(np.int64) + 2 * across[calls.of]
    out, into = names != "recv", names != "send"
    owners = np.concatenate([number[out], number[into]])
    found = np.concatenate([base[out] + _OUT, base[into] + _IN])
    order = np.argsort(owners, kind="stable")
    start = np.searchsorted(owners[order], np.arange(len(meet) + 1))
    return Links(start.astype(np.int64), found[order])


LEAF_NODES = 32  # below a leaf switch, if the machine does not say: NVIDIA's scalable unit


@dataclass(frozen=True)
class Topology:
    """The network between nodes: every GPU has its own NIC, NICs of a place in the node one rail.

    oversubscription : NICs below a leaf switch over its links upwards, in bandwidth; 1: rails,
                       whose switches hold nobody up
    leaf_nodes       : nodes below a leaf switch, in order of rank
    """

    oversubscription: float = 1.0
    leaf_nodes: int = LEAF_NODES

    def __str__(self) -> str:
        if self.oversubscription == 1:
            return "rails, a NIC for every GPU"
        return f"fat tree, {self.oversubscription:g} to 1 above leaves of {self.leaf_nodes:,} nodes"


def read_topology(text: str, machine: Machine) -> Topology:
    """``rails`` or ``fat-tree:2``, on a machine; ``fat-tree``: as oversubscribed as the machine's
    file says.  UsageError for anything else.
    """
    kind, _, more = text.partition(":")
    fix = "network=rails, network=fat-tree:2 (two NICs for one link above the leaf switches), "
    fix += "network=none"
    if not machine.network_rate:
        what = f"{machine.name} has no network between nodes: none can be reached over {text}"
        raise UsageError(what, fix="a machine with one: --machine h200")
    if kind == "rails" and not more:
        return Topology()
    try:
        factor = float(more or machine.oversubscription or "1")
    except ValueError:
        factor = math.nan
    if kind != "fat-tree" or not 1 <= factor <= _MOST_OVER:
        raise UsageError(f"network={text} is no network", fix=fix)
    return Topology(factor, machine.leaf_nodes or LEAF_NODES)


_MOST_OVER = 1000


@dataclass(frozen=True)
class BusyLink:
    """A link of every rank of a class: which, and the part of the iteration in which it moves data.

    shared : the part in which several calls are on it
    """

    owner: int
    network: bool
    into: bool
    busy: float
    shared: float


def busy_links(timeline: Timeline, links: Links) -> list[BusyLink]:
    """All links that calls of the last iteration are on, the busiest first."""
    dag = timeline.dag
    last = np.flatnonzero((dag.kind == MEET) & (dag.iteration == timeline.iterations - 1))
    calls = dag.op[last]
    counts = np.diff(links.start)[calls]
    slots = np.repeat(links.start[calls] - np.cumsum(counts) + counts, counts)
    of = links.of[slots + np.arange(len(slots))]
    node = np.repeat(last, counts)
    begin, end = timeline.node_start[node], timeline.node_end[node]
    found = []
    for link in np.unique(of).tolist():
        mine = of == link
        times = np.concatenate([begin[mine], end[mine]])
        order = np.argsort(times, kind="stable")
        users = np.cumsum(np.where(order < mine.sum(), 1, -1))[:-1]
        spans = np.diff(times[order])
        busy, shared = (
            float(spans[users >= least].sum() / max(1, timeline.iteration_ns)) for least in (1, 2)
        )
        owner, place = divmod(link, 4)
        found.append(BusyLink(owner, place >= 2, place % 2 == _IN, busy, shared))
    return sorted(found, key=lambda one: -one.busy)


SHARES = 720_720  # divisible by 1 … 16


def replay_network(
    graph: WorldGraph,
    prices: Prices,
    iterations: int = 2,
    links: Links | None = None,
    buffered: int = 0,
) -> Timeline:
    """``iterations`` iterations in a row, as ``timeline.build_timeline``.  PrismError if the job
    hangs.
    """
    dag = build_issue_graph(graph, iterations, buffered)
    dag.check_ends()
    begin, end = simulate_network(dag, durations_of(dag, prices), links)
    return Timeline(graph, prices, dag, begin, end, iterations, links)


def simulate_network(
    dag: IssueGraph, durations: np.ndarray, links: Links | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Play the events.

    Args:
        dag: what waits for what; it may hang.
        durations: int64 [n] ns, of transfers that have their links alone.
        links: those that calls share.

    Returns:
        When every node began and ended, int64 [n] ns; -1: never.
    """
    n = len(dag)
    start, port = np.zeros(n + 1, dtype=np.int64), np.empty(0, dtype=np.int64)
    if links is not None:  # of every node: port[start[i]:start[i + 1]]
        meets = np.flatnonzero(dag.kind == MEET)  # iteration after iteration, all matched calls
        start[1:][meets] = np.diff(links.start)[dag.op[meets]]
        start = np.cumsum(start)
        port = np.tile(links.of, len(meets) // max(1, len(links.start) - 1))
    begin, end = np.full(n, -1, dtype=np.int64), np.full(n, -1, dtype=np.int64)
    users = np.zeros(int(port.max(initial=-1)) + 1, dtype=np.int64)
    nodes = [np.zeros(n, dtype=np.int64) for _ in range(6)]
    given = [*dag.followers, durations, start, port]
    loops.run(_play, given, [np.diff(dag.start), begin, end, *nodes, users])
    return begin, end


def _play(  # type: ignore[no-untyped-def]
    first, after, durations, start, port,
    waiting, begin, end, stack, due, left, rate, since, moving, users,
):  # fmt: skip
    """The loop.  ``stack`` holds what begins now (node) and what ends now (-1 - node), ``moving``
    the transfers that are on links.
    """
    heap = [(0, -1)]  # (when, node); an entry whose time is not ``due`` any more is skipped
    heap.pop()
    now = top = count = 0
    changed = False  # whether a transfer came or went
    for node in range(len(waiting)):
        if waiting[node] == 0:
            stack[top] = node
            top += 1
    while True:
        while top:
            top -= 1
            entry = stack[top]
            node = entry if entry >= 0 else -1 - entry
            shares = start[node] < start[node + 1] and durations[node] > 0
            if shares:
                changed = True
                for slot in range(start[node], start[node + 1]):
                    users[port[slot]] += 1 if entry >= 0 else -1
            if entry >= 0:
                begin[node] = now
                if durations[node] == 0:
                    stack[top] = -1 - node
                    top += 1
                elif shares:
                    left[node], rate[node], since[node] = durations[node] * SHARES, 0, now
                    moving[count] = node
                    count += 1
                else:
                    due[node] = now + durations[node]
                    heapq.heappush(heap, (due[node], node))
            else:
                end[node] = now
                for edge in range(first[node], first[node + 1]):
                    waiting[after[edge]] -= 1
                    if waiting[after[edge]] == 0:
                        stack[top] = after[edge]
                        top += 1
        if changed and not (heap and heap[0][0] == now):  # this moment is over
            changed = False
            count = _share(
                now, heap, start, port, end, due, left, rate, since, moving, users, count
            )
        if not heap:
            break
        now, node = heapq.heappop(heap)
        if due[node] == now:
            due[node] = -1
            stack[top] = -1 - node
            top += 1


def _share(  # type: ignore[no-untyped-def]
    now, heap, start, port, end, due, left, rate, since, moving, users, count
):
    """New speeds, and ends, for all that is on links; returns how many are."""
    kept = 0
    for place in range(count):
        node = moving[place]
        if end[node] >= 0:
            continue
        moving[kept] = node
        kept += 1
        most = 1
        for slot in range(start[node], start[node + 1]):
            most = max(most, users[port[slot]])
        speed = SHARES // most
        if rate[node] != speed:
            left[node] -= (now - since[node]) * rate[node]
            rate[node], since[node] = speed, now
            due[node] = now - (-left[node] // speed)
            heapq.heappush(heap, (due[node], node))
    return kept
