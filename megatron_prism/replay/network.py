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
    """Find the links of every matched call.

    Calls whose group (or pair) is on one node go inside, others over the network, for the lowest
    rank of a class as for all of it.

    Returns:
        Links, numbered ``4 c + 2 net + in``: of class c, inside the node or to the network, out of
        the rank or into it.
    """
    matched_calls, call_kinds = graph.matched_calls, graph.call_kinds
    num_members = np.diff(matched_calls.start)
    call_of_member = np.repeat(np.arange(len(matched_calls), dtype=np.int64), num_members)

    # the first link of each member
    spans_nodes = [kind.spans(gpus_per_node) for kind in call_kinds.kinds]
    uses_network = np.array(spans_nodes, dtype=np.int64)[call_kinds.of]
    base = 4 * matched_calls.classes.astype(np.int64) + 2 * uses_network

    # a send goes out, a receive comes in, a collective does both
    names = np.array([kind.name for kind in call_kinds.kinds])[call_kinds.of]
    sends = names != "recv"
    receives = names != "send"
    calls = np.concatenate([call_of_member[sends], call_of_member[receives]])
    links = np.concatenate([base[sends] + _OUT, base[receives] + _IN])
    by_call = np.argsort(calls, kind="stable")
    start = np.searchsorted(calls[by_call], np.arange(len(matched_calls) + 1))
    return Links(start.astype(np.int64), links[by_call])


LEAF_NODES = 32  # below a leaf switch, if the machine does not say: NVIDIA's scalable unit


@dataclass(frozen=True)
class Topology:
    """The network between nodes: every GPU has its own NIC, NICs of a place in the node one rail.

    Attributes:
        oversubscription: NICs below a leaf switch over its links upwards, in bandwidth; 1: rails,
            whose switches delay no call.
        leaf_nodes: Nodes below a leaf switch, in order of rank.
    """

    oversubscription: float = 1.0
    leaf_nodes: int = LEAF_NODES

    def __str__(self) -> str:
        """Describe the network in a few words."""
        if self.oversubscription == 1:
            return "rails, a NIC for every GPU"
        return f"fat tree, {self.oversubscription:g} to 1 above leaves of {self.leaf_nodes:,} nodes"


_MOST_OVERSUBSCRIBED = 1000


def read_topology(text: str, machine: Machine) -> Topology:
    """Read a network.

    Args:
        text: ``rails`` or ``fat-tree:2``; ``fat-tree``: as oversubscribed as the machine's file
            says.
        machine: The machine.

    Raises:
        UsageError: The text is something else, or the machine has no network.
    """
    kind, _, factor_text = text.partition(":")
    # a machine of one node
    if not machine.network_rate:
        raise UsageError(
            f"{machine.name} has no network between nodes: none can be reached over {text}",
            fix="a machine with one: --machine h200",
        )
    if kind == "rails" and not factor_text:
        return Topology()
    try:
        factor = float(factor_text or machine.oversubscription or "1")
    except ValueError:
        factor = math.nan
    if kind != "fat-tree" or not 1 <= factor <= _MOST_OVERSUBSCRIBED:
        raise UsageError(
            f"network={text} is no network",
            fix="network=rails, network=fat-tree:2 (two NICs for one link above the leaf "
            "switches), network=none",
        )
    return Topology(factor, machine.leaf_nodes or LEAF_NODES)


@dataclass(frozen=True)
class BusyLink:
    """A link of every rank of a class.

    Attributes:
        owner: The class.
        network: Whether it goes to the network, not inside the node.
        into: Whether it goes into the rank.
        busy: The part of the iteration in which it moves data.
        shared: The part in which several calls are on it.
    """

    owner: int
    network: bool
    into: bool
    busy: float
    shared: float


def busy_links(timeline: Timeline, links: Links) -> list[BusyLink]:
    """List all links that calls of the last iteration are on, the busiest first."""
    issue_graph = timeline.dag
    is_last = issue_graph.iteration == timeline.iterations - 1
    meetings = np.flatnonzero((issue_graph.kind == MEET) & is_last)

    # every link of every call of the iteration, and when the call is on it
    calls = issue_graph.op[meetings]
    counts = np.diff(links.start)[calls]
    first_entries = np.cumsum(counts) - counts
    slots = np.repeat(links.start[calls] - first_entries, counts)
    link_of_entry = links.of[slots + np.arange(len(slots))]
    meeting_of_entry = np.repeat(meetings, counts)
    begin = timeline.node_start[meeting_of_entry]
    end = timeline.node_end[meeting_of_entry]

    iteration_ns = max(1, timeline.iteration_ns)
    busy = []
    for link in np.unique(link_of_entry).tolist():
        # how many calls are on the link between any two of its moments
        is_on_link = link_of_entry == link
        times = np.concatenate([begin[is_on_link], end[is_on_link]])
        by_time = np.argsort(times, kind="stable")
        changes = np.where(by_time < is_on_link.sum(), 1, -1)
        num_users = np.cumsum(changes)[:-1]
        spans_ns = np.diff(times[by_time])
        busy_ns = spans_ns[num_users >= 1].sum()
        shared_ns = spans_ns[num_users >= 2].sum()

        owner, place = divmod(link, 4)
        row = BusyLink(
            owner=owner,
            network=place >= 2,
            into=place % 2 == _IN,
            busy=float(busy_ns / iteration_ns),
            shared=float(shared_ns / iteration_ns),
        )
        busy.append(row)
    return sorted(busy, key=lambda link: -link.busy)


SHARES = 720_720  # divisible by 1 … 16


def replay_network(
    graph: WorldGraph,
    prices: Prices,
    iterations: int = 2,
    links: Links | None = None,
    buffered: int = 0,
) -> Timeline:
    """Replay iterations in a row with shared links, as ``timeline.build_timeline`` does without.

    Args:
        graph: The world graph.
        prices: What its ops take.
        iterations: How many iterations.
        links: The links that calls share; None: none.
        buffered: Bytes on their way to a peer that NCCL's buffers hold.

    Raises:
        PrismError: The job hangs.
    """
    issue_graph = build_issue_graph(graph, iterations, buffered)
    issue_graph.check_ends()
    durations = durations_of(issue_graph, prices)
    begin, end = simulate_network(issue_graph, durations, links)
    return Timeline(graph, prices, issue_graph, begin, end, iterations, links)


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
    num_nodes = len(dag)

    # the links of every node: port[start[i]:start[i + 1]]
    start = np.zeros(num_nodes + 1, dtype=np.int64)
    port = np.empty(0, dtype=np.int64)
    if links is not None:
        meetings = np.flatnonzero(dag.kind == MEET)  # all matched calls, once an iteration
        num_links = np.diff(links.start)
        start[1:][meetings] = num_links[dag.op[meetings]]
        start = np.cumsum(start)
        num_matched_calls = max(1, len(links.start) - 1)
        port = np.tile(links.of, len(meetings) // num_matched_calls)

    begin = np.full(num_nodes, -1, dtype=np.int64)
    end = np.full(num_nodes, -1, dtype=np.int64)
    users = np.zeros(int(port.max(initial=-1)) + 1, dtype=np.int64)
    node_columns = [np.zeros(num_nodes, dtype=np.int64) for _ in range(6)]
    inputs = [*dag.followers, durations, start, port]
    num_awaited = np.diff(dag.start)
    loops.run(_play, inputs, [num_awaited, begin, end, *node_columns, users])
    return begin, end


def _play(  # type: ignore[no-untyped-def]
    first,
    after,
    durations,
    start,
    port,
    waiting,
    begin,
    end,
    stack,
    due,
    left,
    rate,
    since,
    moving,
    users,
):
    """Play the events; numba compiles this loop for large graphs.

    Args:
        first: Per node: slices of ``after``.
        after: The nodes that wait for each node.
        durations: Per node: ns, alone on its links.
        start: Per node: slices of ``port``.
        port: The links of each node.
        waiting: Per node: how many predecessors have not ended.
        begin: Result, per node: ns; -1: never.
        end: Result, per node: ns; -1: never.
        stack: What begins now (a node) and what ends now (-1 - node).
        due: Per node: when it ends, as far as is known.
        left: Per node: work that is left, in 1 / SHARES ns.
        rate: Per node: work a ns; 0 before the first.
        since: Per node: the ns from which on ``left`` shrinks by ``rate``.
        moving: The nodes that are on links.
        users: Per link: how many nodes are on it.
    """
    heap = [(0, -1)]  # (when, node); an entry whose time is not ``due`` any more is skipped
    heap.pop()
    now = 0
    top = 0
    num_moving = 0
    changed = False  # whether a transfer came or went
    for node in range(len(waiting)):
        if waiting[node] == 0:
            stack[top] = node
            top += 1
    while True:
        # everything that begins or ends now
        while top:
            top -= 1
            entry = stack[top]
            begins = entry >= 0
            node = entry
            if not begins:
                node = -1 - entry
            is_shared = start[node] < start[node + 1] and durations[node] > 0
            if is_shared:
                changed = True
                for slot in range(start[node], start[node + 1]):
                    if begins:
                        users[port[slot]] += 1
                    else:
                        users[port[slot]] -= 1
            if begins:
                begin[node] = now
                if durations[node] == 0:
                    stack[top] = -1 - node
                    top += 1
                elif is_shared:
                    # its end depends on what else is on its links
                    left[node] = durations[node] * SHARES
                    rate[node] = 0
                    since[node] = now
                    moving[num_moving] = node
                    num_moving += 1
                else:
                    due[node] = now + durations[node]
                    heapq.heappush(heap, (due[node], node))
            else:
                end[node] = now
                for edge in range(first[node], first[node + 1]):
                    follower = after[edge]
                    waiting[follower] -= 1
                    if waiting[follower] == 0:
                        stack[top] = follower
                        top += 1
        # speeds change once a moment, after all that ends in it
        if changed and not (heap and heap[0][0] == now):
            changed = False
            num_moving = _share(
                now, heap, start, port, end, due, left, rate, since, moving, users, num_moving
            )
        if not heap:
            break
        now, node = heapq.heappop(heap)
        if due[node] == now:
            due[node] = -1
            stack[top] = -1 - node
            top += 1


def _share(  # type: ignore[no-untyped-def]
    now, heap, start, port, end, due, left, rate, since, moving, users, num_moving
):
    """Set new speeds, and ends, for all that is on links; return how many transfers are."""
    num_kept = 0
    for place in range(num_moving):
        node = moving[place]
        # transfers that have ended leave the list
        if end[node] >= 0:
            continue
        moving[num_kept] = node
        num_kept += 1
        most_users = 1
        for slot in range(start[node], start[node + 1]):
            most_users = max(most_users, users[port[slot]])
        speed = SHARES // most_users
        if rate[node] != speed:
            left[node] -= (now - since[node]) * rate[node]
            rate[node] = speed
            since[node] = now
            due[node] = now - (-left[node] // speed)  # rounded up
            heapq.heappush(heap, (due[node], node))
    return num_kept
