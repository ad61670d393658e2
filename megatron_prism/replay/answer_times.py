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

import numpy as np

from megatron_prism.core.errors import PrismError
from megatron_prism.graph import loops
from megatron_prism.graph.issue_graph import MEET, IssueGraph, build_issue_graph
from megatron_prism.graph.world_graph import WorldGraph
from megatron_prism.replay.costs import Prices
from megatron_prism.replay.timeline import durations_of

START = -1  # the beginning of time, before any interaction
_BOUNDS = 1 << 25  # bounds that are kept


def terms(
    dag: IssueGraph, durations: np.ndarray, cut: np.ndarray, free: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(int64 [n + 1] slices of, int64 cause, int64 weight): what virtual ranks bring to each node.

    Only cut nodes have any.  ``cut`` bool [n]: local interactions; ``free`` bool [n]: nodes of
    local ranks, which take no time.  A cause is a node, or START.
    """
    n = len(dag)
    held = np.where(free, 0, durations)
    mine = free.astype(np.int64)
    count = int(cut.sum())
    widest = count + 2  # terms of one node: no cause twice
    window = max(1, min(count, _BOUNDS // max(1, count)))
    given = [dag.order, dag.start, dag.before, held, cut.astype(np.int64), mine, window]
    cause, weight = (np.zeros(4 * (n + widest), dtype=np.int64) for _ in range(2))
    first, length, shift = (np.zeros(n, dtype=np.int64) for _ in range(3))
    number, since, mark = (np.zeros(n, dtype=np.int64) for _ in range(3))
    bounds = np.full(count * window, -1, dtype=np.int64)
    found_first, found_length = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    one, two = np.zeros(widest, dtype=np.int64), np.zeros(widest, dtype=np.int64)
    done = np.zeros(3, dtype=np.int64)  # nodes, interactions, entries of ``cause``
    while True:
        loops.run(
            _carry,
            given,
            [
                cause,
                weight,
                first,
                length,
                shift,
                number,
                since,
                bounds,
                mark,
                found_first,
                found_length,
                one,
                two,
                done,
            ],
        )
        if done[0] == len(dag.order):
            break
        cause, weight = (np.concatenate([a, np.zeros_like(a)]) for a in (cause, weight))
    start = np.concatenate(([0], np.cumsum(found_length)))
    where = np.repeat(found_first - start[:-1], found_length) + np.arange(start[-1])
    return start, cause[where], weight[where]


def _carry(  # type: ignore[no-untyped-def]
    order,
    start,
    before,
    held,
    cut,
    mine,
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
    found_first,
    found_length,
    one,
    two,
    done,
):
    """``first``, ``length``, ``shift``: the terms of a node, for a cut node its own floor;
    ``found_*``: of a cut node what virtual ranks bring; ``bounds[window * number[k] + d]``: how
    long at least from the end of the interaction d places before k to the end of k, -1: unknown.
    """
    count, size = done[1], done[2]
    for at in range(done[0], len(order)):
        if size + 2 * len(one) > len(cause):  # more room is needed, and the rest goes on from here
            done[0], done[1], done[2] = at, count, size
            return
        node = order[at]
        a, b = start[node], start[node + 1]
        if cut[node]:
            m = _gather(
                a, b, before, cut, mine, 1, cause, weight, first, length, shift, mark, one, two
            )
            m = _prune(m, one, two, number, since, bounds, window)
            found_first[node], found_length[node] = size, m
            for t in range(m):
                cause[size + t], weight[size + t] = one[t], two[t] + held[node]
            size += m
            m = _gather(
                a, b, before, cut, mine, 0, cause, weight, first, length, shift, mark, one, two
            )
            for t in range(m):  # the floor
                two[t] += held[node]
            number[node] = count
            since[node] = _bound(m, count, window, one, two, number, since, bounds)
            count += 1
        elif b - a == 1 and not cut[before[a]]:
            p = before[a]
            first[node], length[node], shift[node] = first[p], length[p], shift[p] + held[node]
        else:
            m = _gather(
                a, b, before, cut, mine, 0, cause, weight, first, length, shift, mark, one, two
            )
            m = _prune(m, one, two, number, since, bounds, window)
            first[node], length[node], shift[node] = size, m, held[node]
            for t in range(m):
                cause[size + t], weight[size + t] = one[t], two[t]
            size += m
    done[0], done[1], done[2] = len(order), count, size


def _gather(  # type: ignore[no-untyped-def]
    a, b, before, cut, mine, virtual_only, cause, weight, first, length, shift, mark, one, two
):
    """The terms of the predecessors a..b, the largest of each cause, into ``one`` and ``two``."""
    m, start_at = 0, -1
    for edge in range(a, b):
        p = before[edge]
        if virtual_only and mine[p]:
            continue
        if cut[p]:
            if mark[p] == 0:
                one[m], two[m] = p, 0
                m += 1
                mark[p] = m
            continue
        for t in range(first[p], first[p] + length[p]):
            i, w = cause[t], weight[t] + shift[p]
            if i < 0:
                if start_at < 0:
                    one[m], two[m] = i, w
                    start_at = m
                    m += 1
                elif two[start_at] < w:
                    two[start_at] = w
            elif mark[i] == 0:
                one[m], two[m] = i, w
                m += 1
                mark[i] = m
            elif two[mark[i] - 1] < w:
                two[mark[i] - 1] = w
    for t in range(m):
        if one[t] >= 0:
            mark[one[t]] = 0
    if a == b:
        one[0], two[0] = -1, 0
        m = 1
    return m


def _bound(m, k, window, one, two, number, since, bounds):  # type: ignore[no-untyped-def]
    """Fill the bounds of interaction ``k`` from its floor; returns how long since the start."""
    oldest = 0
    for t in range(m):
        i, w = one[t], two[t]
        if i < 0:
            oldest = max(oldest, w)
            continue
        oldest = max(oldest, w + since[i])
        back = k - number[i]
        if back < window:
            bounds[window * k + back] = max(bounds[window * k + back], w)
        for d in range(1, window - back):
            known = bounds[window * number[i] + d]
            if known >= 0 and known + w > bounds[window * k + back + d]:
                bounds[window * k + back + d] = known + w
    return oldest


def _prune(m, one, two, number, since, bounds, window):  # type: ignore[no-untyped-def]
    """Without terms that another term always reaches; returns how many are left."""
    latest = 0
    for x in range(1, m):
        if one[x] >= 0 and (one[latest] < 0 or number[one[x]] > number[one[latest]]):
            latest = x
    # the latest cause reaches most of the others, so it is asked first
    one[0], one[latest] = one[latest], one[0]
    two[0], two[latest] = two[latest], two[0]
    left = 0
    for x in range(m):
        i, w, kept = one[x], two[x], True
        for y in range(m):
            # those before x that were dropped are overwritten by the ones that reach them or others
            if y == x or (left <= y < x):
                continue
            k, v = one[y], two[y]
            if k < 0 or k == i:
                continue
            if i < 0:
                reached = since[k] + v >= w
            else:
                back = number[k] - number[i]
                known = bounds[window * number[k] + back] if 0 < back < window else -1
                reached = known >= 0 and known + v >= w
            if reached:
                kept = False
                break
        if kept:
            one[left], two[left] = i, w
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
        found = np.zeros(len(self), dtype=np.int64)
        earlier = (found, *before)
        for j in range(len(self)):
            end = int(arrivals[j] + self.own[j])
            for t in range(self.start[j], self.start[j + 1]):
                if self.back[t] < len(earlier):
                    cause = earlier[self.back[t]][self.cause[t]]
                    end = max(end, int(cause + self.weight[t]))
            found[j] = end
        return found


def build_answer_times(graph: WorldGraph, prices: Prices, local: Sequence[int]) -> AnswerTimes:
    """What the virtual ranks of ``graph`` answer to the ``local`` ranks.

    PrismError if the job hangs, or a local rank is not a class of its own.
    """
    classes = [int(graph.classes.of[rank]) for rank in local]
    crowded = [r for r, c in zip(local, classes, strict=True) if graph.classes.counts[c] != 1]
    if crowded:
        raise PrismError(
            f"rank {crowded[0]} is one of several in its class",
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
    cut, mine = cuts(dag, classes)
    start, cause, weight = terms(dag, durations, cut, mine)
    last = unrolled - 1
    nodes = dag.order[cut[dag.order]]
    nodes = nodes[dag.iteration[nodes] == last]
    number = np.full(len(prices.collective_ns), -1, dtype=np.int64)
    number[dag.op[nodes]] = np.arange(len(nodes))
    chosen = [np.arange(start[n], start[n + 1]) for n in nodes]
    known = [c[cause[c] != START] for c in chosen]
    every = np.concatenate([*known, np.empty(0, dtype=np.int64)])
    causes = cause[every]
    members = [np.empty((3, 0), dtype=np.int64)]
    for index, cls in enumerate(classes):
        where = dag.node_of[cls][-1]
        ops = np.flatnonzero((dag.ready_of[cls][-1] >= 0) & cut[where])
        members.append(np.stack([np.full(len(ops), index), ops, number[dag.op[where[ops]]]]))
    member, op, of = np.concatenate(members, axis=1).astype(np.int32)
    return AnswerTimes(
        tuple(local),
        member,
        op,
        of,
        durations[nodes],
        sum(len(a) != len(b) for a, b in zip(chosen, known, strict=True)),
        np.concatenate(([0], np.cumsum([len(c) for c in known]))).astype(np.int64),
        number[dag.op[causes]].astype(np.int32),
        (last - dag.iteration[causes]).astype(np.int32),
        weight[every],
    )


def cuts(dag: IssueGraph, classes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """bool [n] each: the local interactions; what takes no time of its own because it is local.

    Meetings of local ranks alone are real: virtual ones notice them through the local ranks only.
    """
    mine = np.isin(dag.owner, list(classes))
    counts = np.diff(dag.start)
    of = np.repeat(np.arange(len(dag)), counts)
    local = np.bincount(of, weights=mine[dag.before], minlength=len(dag)).astype(np.int64)
    meets = (dag.kind == MEET) & (local > 0)
    return meets & (local < counts), mine | (meets & (local == counts))
