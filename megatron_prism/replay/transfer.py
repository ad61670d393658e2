"""What does each local interaction owe to earlier ones?  The loop behind ``release``.

In : a Dag, its durations, and which nodes are cut out.  Out: terms (cause, ns) of every cut node.
Terms are carried from node to node, predecessors first.  Most nodes have one predecessor, and share
its terms with a shift.  As in ``kernels``, one source runs interpreted and compiled.
"""

from __future__ import annotations

import numpy as np

from megatron_prism.replay import kernels
from megatron_prism.replay.dag import Dag

__all__ = ["START", "terms"]

START = -1  # the beginning of time, before any interaction
_BOUNDS = 1 << 25  # bounds that are kept


def terms(
    dag: Dag, durations: np.ndarray, cut: np.ndarray, free: np.ndarray
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
        kernels.run(
            _carry,
            given,
            [cause, weight, first, length, shift, number, since, bounds, mark, found_first,
             found_length, one, two, done],
        )  # fmt: skip
        if done[0] == len(dag.order):
            break
        cause, weight = (np.concatenate([a, np.zeros_like(a)]) for a in (cause, weight))
    start = np.concatenate(([0], np.cumsum(found_length)))
    where = np.repeat(found_first - start[:-1], found_length) + np.arange(start[-1])
    return start, cause[where], weight[where]


def _carry(  # type: ignore[no-untyped-def]
    order, start, before, held, cut, mine, window,
    cause, weight, first, length, shift, number, since, bounds, mark, found_first,
    found_length, one, two, done,
):  # fmt: skip
    """``first``, ``length``, ``shift``: the terms of a node, for a cut node its own floor;
    ``found_*``: of a cut node what virtual ranks bring; ``bounds[window * number[k] + d]``: how
    long at least from the end of the interaction d places before k to the end of k, -1: unknown."""
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
