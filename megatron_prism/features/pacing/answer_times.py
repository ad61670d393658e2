"""When virtual ranks answer local ones: the rest of the world as a few sums and one maximum.

In : a WorldGraph in which every local rank is a class of its own (``build(apart=…)``), and Prices.
Out: AnswerTimes.  A *local interaction* is a meeting of a local rank with at least one virtual
one. Between local interactions virtual ranks meet only each other and compute for fixed times, so
the end E of interaction j is

    E_j = max(T_j + c_j, max over terms (i, w): E_i + w)

where T_j is when the last of its local members comes to it, c_j what the meeting costs, and w the
longest way from the end of i to the end of j over virtual ranks alone that passes no other local
interaction (the transfer of a max-plus system with the local ranks cut out: Baccelli et al. 1992,
ch. 2).  Cutting at the *ends* of interactions keeps the terms few: whoever met the local rank since
is behind that meeting.

Pruning (``_bound``).  A term (i, w) is dropped if another term (k, v) of the same maximum always
reaches it: E_k >= E_i + b and b + v >= w.  Bounds b are longest ways from i to k over interactions:
through the terms of each, and through what the local rank itself waits for before it comes to one
(its computing taken as 0).  Dropping such a term changes no maximum whatever the local ranks do,
since computing never takes less than 0.

Two or three iterations are followed, and the last one's terms are the table; terms that reach into
earlier iterations say how many back.  A virtual rank that nothing holds back for so long (it never
waits for whatever waits for the local ranks) has a clock of its own, which no such table holds:
``loose`` counts the interactions that such a rank could delay.  Megatron's iterations have none:
the gradient norm joins all ranks of a model, the gradients all replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_prism.core.errors import PrismError
from megatron_prism.graph import loops
from megatron_prism.graph.issue_graph import MEET, IssueGraph, build_issue_graph
from megatron_prism.graph.world_graph import WorldGraph
from megatron_prism.replay.costs import Prices
from megatron_prism.replay.timeline import durations_of

START = -1  # the beginning of time, before any interaction
_BOUNDS = 1 << 25  # bounds that are kept


class _Given(NamedTuple):
    """What ``_carry`` reads, as arrays for numba.

    order    : int64 [n], nodes after all of their predecessors
    start    : int64 [n + 1], slices of ``before``
    before   : int64 [edges], predecessors of each node
    held     : int64 [n], ns that a node takes; 0 of a local rank's own
    cut      : int64 [n], 1 at local interactions
    local    : int64 [n], 1 at nodes of local ranks
    window   : interactions back to which bounds are kept
    """

    order: np.ndarray
    start: np.ndarray
    before: np.ndarray
    held: np.ndarray
    cut: np.ndarray
    local: np.ndarray
    window: int


class _Written(NamedTuple):
    """What ``_carry`` writes, as arrays for numba.

    cause, weight : int64 [room], terms of all nodes, one after the other
    first, length, shift : int64 [n], slice of the terms of a node and what is added to each
                    weight; of a cut node its own floor
    number   : int64 [n], which interaction a cut node is
    since    : int64 [n], ns at least from the beginning of time to the end of a cut node
    bounds   : int64 [interactions * window], at ``window * number[k] + d`` how long at least from
               the end of the interaction d places before k to the end of k, -1: unknown
    mark     : int64 [n], place of a cause among those gathered, counted from 1
    brought_first, brought_length : int64 [n], slice of what virtual ranks bring to a cut node
    causes, weights : int64 [widest], the terms of the node in hand
    done     : int64 [3]: nodes, interactions, entries of ``cause``
    """

    cause: np.ndarray
    weight: np.ndarray
    first: np.ndarray
    length: np.ndarray
    shift: np.ndarray
    number: np.ndarray
    since: np.ndarray
    bounds: np.ndarray
    mark: np.ndarray
    brought_first: np.ndarray
    brought_length: np.ndarray
    causes: np.ndarray
    weights: np.ndarray
    done: np.ndarray


def _zeros(size: int) -> np.ndarray:
    return np.zeros(size, dtype=np.int64)


def _room(nodes: int, interactions: int, window: int) -> _Written:
    """Make room for a first part of the terms; ``terms`` doubles it as often as needed."""
    widest = interactions + 2  # terms of a node: no cause twice
    return _Written(
        cause=_zeros(4 * (nodes + widest)),
        weight=_zeros(4 * (nodes + widest)),
        first=_zeros(nodes),
        length=_zeros(nodes),
        shift=_zeros(nodes),
        number=_zeros(nodes),
        since=_zeros(nodes),
        bounds=np.full(interactions * window, -1, dtype=np.int64),
        mark=_zeros(nodes),
        brought_first=_zeros(nodes),
        brought_length=_zeros(nodes),
        causes=_zeros(widest),
        weights=_zeros(widest),
        done=_zeros(3),
    )


def terms(
    dag: IssueGraph, durations: np.ndarray, cut: np.ndarray, free: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(int64 [n + 1] slices of, int64 cause, int64 weight): what virtual ranks bring to each node.

    Only cut nodes have any.  ``cut`` bool [n]: local interactions; ``free`` bool [n]: nodes of
    local ranks, which take no time.  A cause is a node, or START.
    """
    interactions = int(cut.sum())
    window = max(1, min(interactions, _BOUNDS // max(1, interactions)))
    # local ranks run at their own pace, so that their nodes have no length
    held = np.where(free, 0, durations)
    given = _Given(
        order=dag.order,
        start=dag.start,
        before=dag.before,
        held=held,
        cut=cut.astype(np.int64),
        local=free.astype(np.int64),
        window=window,
    )
    written = _room(len(dag), interactions, window)
    while True:
        loops.run(_carry, list(given), list(written))
        nodes_done = written.done[0]
        if nodes_done == len(dag.order):
            break
        # the terms have filled their room: it is doubled, and the loop goes on where it stopped
        cause = np.concatenate([written.cause, np.zeros_like(written.cause)])
        weight = np.concatenate([written.weight, np.zeros_like(written.weight)])
        written = written._replace(cause=cause, weight=weight)
    lengths = written.brought_length
    start = np.concatenate(([0], np.cumsum(lengths)))
    places_ahead = np.repeat(written.brought_first - start[:-1], lengths)
    place = places_ahead + np.arange(start[-1])
    return start, written.cause[place], written.weight[place]


def _carry(  # type: ignore[no-untyped-def]
    order,
    start,
    before,
    held,
    cut,
    local,
    window,
    cause,
    weight,
    first,
    length,
    shift,
    number,
    since,
    bounds,
    mark,
    brought_first,
    brought_length,
    causes,
    weights,
    done,
):
    """Carry terms from node to node; arguments as in ``_Given`` and ``_Written``.

    Returns early where ``cause`` has no room for another node; ``done`` says where to go on.
    """
    interactions, size = done[1], done[2]
    for place in range(done[0], len(order)):
        if size + 2 * len(causes) > len(cause):  # no room for this node: it goes on from here
            done[0], done[1], done[2] = place, interactions, size
            return
        node = order[place]
        a, b = start[node], start[node + 1]
        if cut[node]:
            # what virtual ranks bring, without the local ranks' own way
            count = _gather(
                a,
                b,
                before,
                cut,
                local,
                1,
                cause,
                weight,
                first,
                length,
                shift,
                mark,
                causes,
                weights,
            )
            count = _prune(count, causes, weights, number, since, bounds, window)
            brought_first[node], brought_length[node] = size, count
            for t in range(count):
                cause[size + t] = causes[t]
                weight[size + t] = weights[t] + held[node]
            size += count
        elif b - a == 1 and not cut[before[a]]:
            # one predecessor: its terms, later by what the node takes
            predecessor = before[a]
            first[node] = first[predecessor]
            length[node] = length[predecessor]
            shift[node] = shift[predecessor] + held[node]
            continue
        # by all members, local ranks computing for no time: the largest of each cause
        count = _gather(
            a,
            b,
            before,
            cut,
            local,
            0,
            cause,
            weight,
            first,
            length,
            shift,
            mark,
            causes,
            weights,
        )
        if cut[node]:
            # the floor of an interaction
            for t in range(count):
                weights[t] += held[node]
            number[node] = interactions
            since[node] = _bound(
                count, interactions, window, causes, weights, number, since, bounds
            )
            interactions += 1
        else:
            count = _prune(count, causes, weights, number, since, bounds, window)
            first[node], length[node], shift[node] = size, count, held[node]
            for t in range(count):
                cause[size + t] = causes[t]
                weight[size + t] = weights[t]
            size += count
    done[0], done[1], done[2] = len(order), interactions, size


def _gather(  # type: ignore[no-untyped-def]
    a,
    b,
    before,
    cut,
    local,
    virtual_only,
    cause,
    weight,
    first,
    length,
    shift,
    mark,
    causes,
    weights,
):
    """The terms of the predecessors a..b, the largest of each cause, into ``causes``, ``weights``;
    returns how many.
    """
    count = 0
    start_place = -1  # of the term of START
    for edge in range(a, b):
        predecessor = before[edge]
        if virtual_only and local[predecessor]:
            continue
        if cut[predecessor]:
            # an interaction is a cause itself: what came before it goes no further
            if mark[predecessor] == 0:
                causes[count], weights[count] = predecessor, 0
                count += 1
                mark[predecessor] = count
            continue
        for t in range(first[predecessor], first[predecessor] + length[predecessor]):
            i, w = cause[t], weight[t] + shift[predecessor]
            # START has no mark, as it is no node
            if i < 0:
                if start_place < 0:
                    causes[count], weights[count] = i, w
                    start_place = count
                    count += 1
                elif weights[start_place] < w:
                    weights[start_place] = w
            elif mark[i] == 0:
                causes[count], weights[count] = i, w
                count += 1
                mark[i] = count
            elif weights[mark[i] - 1] < w:
                weights[mark[i] - 1] = w
    # the marks are cleared for the next node
    for t in range(count):
        if causes[t] >= 0:
            mark[causes[t]] = 0
    if a == b:  # a first node: it waits for the beginning of time alone
        causes[0], weights[0] = -1, 0
        count = 1
    return count


def _bound(  # type: ignore[no-untyped-def]
    count, k, window, causes, weights, number, since, bounds
):
    """Fill the bounds of interaction ``k`` from its floor; returns how long since the start."""
    oldest = 0
    for t in range(count):
        i, w = causes[t], weights[t]
        if i < 0:
            oldest = max(oldest, w)
            continue
        oldest = max(oldest, w + since[i])
        back = k - number[i]
        if back < window:
            bounds[window * k + back] = max(bounds[window * k + back], w)
        # what lies before the cause lies before k, too, by its own bound and the weight
        for d in range(1, window - back):
            bound_of_cause = bounds[window * number[i] + d]
            if bound_of_cause >= 0 and bound_of_cause + w > bounds[window * k + back + d]:
                bounds[window * k + back + d] = bound_of_cause + w
    return oldest


def _prune(  # type: ignore[no-untyped-def]
    count, causes, weights, number, since, bounds, window
):
    """Without terms that another term always reaches; returns how many are left."""
    latest = 0
    for x in range(1, count):
        if causes[x] >= 0 and (causes[latest] < 0 or number[causes[x]] > number[causes[latest]]):
            latest = x
    # the latest cause reaches most of the others, so it is asked first
    causes[0], causes[latest] = causes[latest], causes[0]
    weights[0], weights[latest] = weights[latest], weights[0]
    left = 0
    for x in range(count):
        i, w = causes[x], weights[x]
        reached = False
        for y in range(count):
            # those before x that were dropped are overwritten by the ones that reach them or others
            if y == x or (left <= y < x):
                continue
            k, v = causes[y], weights[y]
            if k < 0 or k == i:
                continue
            if i < 0:
                reached = since[k] + v >= w
            else:
                back = number[k] - number[i]
                bound = -1
                if 0 < back < window:
                    bound = bounds[window * number[k] + back]
                reached = bound >= 0 and bound + v >= w
            if reached:
                break
        if not reached:
            causes[left], weights[left] = i, w
            left += 1
    return left


_UNROLLED = (2, 3)  # iterations; the second where two do not settle


@dataclass(frozen=True)
class AnswerTimes:
    """The interactions of the local ranks in one iteration, in an order in which they can happen.

    local  : the local ranks
    member : int32 [members], index into ``local``: who takes part in which interaction
    op     : int32 [members], its op there
    of     : int32 [members], the interaction
    own    : int64 [interactions], ns from the last local arrival to the end: c_j above
    loose  : how many interactions also depend on the beginning of time (see the module)
    start  : int64 [interactions + 1], slices of the next three
    cause  : int32 [terms], an interaction
    back   : int32 [terms], in which iteration: 0 this one, 1 the one before, …
    weight : int64 [terms], ns from the end of ``cause`` to the end of this interaction
    """

    local: tuple[int, ...]
    member: np.ndarray
    op: np.ndarray
    of: np.ndarray
    own: np.ndarray
    loose: int
    start: np.ndarray
    cause: np.ndarray
    back: np.ndarray
    weight: np.ndarray

    def __len__(self) -> int:
        return len(self.own)

    def ends(self, arrivals: np.ndarray, before: Sequence[np.ndarray] = ()) -> np.ndarray:
        """int64 [interactions]: when each ends, given when its last local member came to it.

        ``before``: the ends in earlier iterations, the latest first; without them their terms are
        left out, as in a first iteration.
        """
        ends = np.zeros(len(self), dtype=np.int64)
        ends_by_iteration = (ends, *before)
        for interaction in range(len(self)):
            end = int(arrivals[interaction] + self.own[interaction])
            for term in range(self.start[interaction], self.start[interaction + 1]):
                back = self.back[term]
                if back >= len(ends_by_iteration):
                    continue
                end_of_cause = ends_by_iteration[back][self.cause[term]]
                end = max(end, int(end_of_cause + self.weight[term]))
            ends[interaction] = end
        return ends


def build_answer_times(graph: WorldGraph, prices: Prices, local: Sequence[int]) -> AnswerTimes:
    """What the virtual ranks of ``graph`` answer to the ``local`` ranks.

    PrismError if the job hangs, or a local rank is not a class of its own.
    """
    classes = [int(graph.classes.of[rank]) for rank in local]
    for rank, cls in zip(local, classes, strict=True):
        if graph.classes.counts[cls] != 1:
            raise PrismError(
                f"rank {rank} is one of several in its class",
                fix="price(what_if=WhatIf(alone=…))",
            )
    for unrolled in _UNROLLED:
        table = _table(graph, prices, local, classes, unrolled)
        if not table.loose:
            break
    return table


def _table(
    graph: WorldGraph, prices: Prices, local: Sequence[int], classes: list[int], unrolled: int
) -> AnswerTimes:
    """The last of ``unrolled`` iterations."""
    dag = build_issue_graph(graph, unrolled)
    dag.check_ends()
    durations = durations_of(dag, prices)
    cut, free = cuts(dag, classes)
    start, cause, weight = terms(dag, durations, cut, free)

    # the interactions of the last iteration, in an order in which they can happen
    last = unrolled - 1
    nodes = dag.order[cut[dag.order]]
    nodes = nodes[dag.iteration[nodes] == last]
    number = np.full(len(prices.collective_ns), -1, dtype=np.int64)  # op -> interaction
    number[dag.op[nodes]] = np.arange(len(nodes))

    # their terms; one of START belongs to a rank that nothing holds back
    chosen = [np.empty(0, dtype=np.int64)]
    lengths = list[int]()
    loose = 0
    for node in nodes:
        places = np.arange(start[node], start[node + 1])
        with_cause = places[cause[places] != START]
        if len(with_cause) != len(places):
            loose += 1
        chosen.append(with_cause)
        lengths.append(len(with_cause))
    places = np.concatenate(chosen)
    causes = cause[places]

    member, op, interaction = _members(dag, classes, cut, number)
    return AnswerTimes(
        local=tuple(local),
        member=member,
        op=op,
        of=interaction,
        own=durations[nodes],
        loose=loose,
        start=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        cause=number[dag.op[causes]].astype(np.int32),
        back=(last - dag.iteration[causes]).astype(np.int32),
        weight=weight[places],
    )


def _members(
    dag: IssueGraph, classes: list[int], cut: np.ndarray, number: np.ndarray
) -> np.ndarray:
    """int32 [3, members]: place among the local ranks, op, and interaction of each member."""
    members = [np.empty((3, 0), dtype=np.int64)]
    for index, cls in enumerate(classes):
        node_of_op = dag.node_of[cls][-1]
        has_op = dag.ready_of[cls][-1] >= 0
        ops = np.flatnonzero(has_op & cut[node_of_op])
        interactions = number[dag.op[node_of_op[ops]]]
        members.append(np.stack([np.full(len(ops), index), ops, interactions]))
    return np.concatenate(members, axis=1).astype(np.int32)


def cuts(dag: IssueGraph, classes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """bool [n] each: the local interactions; what takes no time of its own because it is local.

    Meetings of local ranks alone are real: virtual ones notice them through the local ranks only.
    """
    of_local = np.isin(dag.owner, list(classes))
    members = np.diff(dag.start)
    node_of_edge = np.repeat(np.arange(len(dag)), members)
    local_edges = np.bincount(node_of_edge, weights=of_local[dag.before], minlength=len(dag))
    local_members = local_edges.astype(np.int64)
    meets = (dag.kind == MEET) & (local_members > 0)
    all_local = meets & (local_members == members)
    return meets & (local_members < members), of_local | all_local
