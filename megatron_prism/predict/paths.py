"""Evaluate the last iteration of a replica for many draws of its factors at once.

In : a Dag of several iterations and its durations.  Out: Paths; ``longest(factors, …)`` -> ns from
the end of the iteration before to the end of the last, per draw, as ``Timeline.iteration_ns`` has
it.  Who waits for whom never changes, so the graph is made small once: points in time that wait for
one thing are that thing, waits that others imply go, and nodes keep their end only until the last
one that waits for it is done.  Draws are evaluated ``LANES`` at a time, side by side.  Times are
floats (ns); without variation they are sums of whole numbers, hence exact below 2^53.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from megatron_prism.replay import dag as dags
from megatron_prism.replay import kernels, maxplus

__all__ = ["LANES", "Paths", "build"]

LANES = 128  # a power of two
ROWS = 4096  # draws of a node's own factor, a power of two; nodes pick a row by a hash
_FEW = 8  # predecessors up to which implied waits are looked for three steps back
THREADS = 2


@dataclass(frozen=True)
class Paths:
    """Nodes in an order in which predecessors come first.

    lasts : float64 [n] ns
    row   : int64 [n], which factor a node takes: its class; the number of classes for meetings;
            that, one and its class for the host's time
    node  : int64 [n], the node of the Dag
    slot  : int64 [n], where its end is kept; start, before: slots of its predecessors
    ends  : uint8 [n], 2: the last iteration may end with it, 1: the one before may, 0: neither
    """

    lasts: np.ndarray
    row: np.ndarray
    node: np.ndarray
    slot: np.ndarray
    start: np.ndarray
    before: np.ndarray
    ends: np.ndarray

    def longest(
        self,
        factors: np.ndarray,
        share: np.ndarray,
        table: np.ndarray,
        kind: np.ndarray,
        crossing: np.ndarray,
        seeds: tuple[int, int],
    ) -> np.ndarray:
        """ns, float64 [replicas, iterations].

        factors  : float64 [rows, replicas, iterations], by ``row``
        share    : float64 [n]: how much of its own factor's deviation a node takes; 0: none
        table    : float64 [kinds * ROWS, LANES], draws of own factors
        kind     : int64 [n], whose draws a node takes
        crossing : bool [n], meetings between replicas: one draw of an iteration for all of them
        seeds    : of what each replica draws, and of what all share
        """
        rows, replicas, count = factors.shape
        width, long = _lanes(count)
        blocks = -(-replicas * long // LANES)
        padded = np.ones((rows, blocks * LANES))
        own = padded[:, : replicas * long].reshape(rows, replicas, long)
        own[:, :, :count] = factors
        lanes = np.ascontiguousarray(padded.reshape(rows, blocks, LANES).swapaxes(0, 1))
        whole = _with_shared(table, width) if share.any() else table
        found = np.zeros((blocks, LANES))
        slots = int(self.slot.max(initial=0)) + 1
        given = (self.lasts, self.row, self.slot, self.ends, self.start, self.before, share, whole)
        run = kernels._compiled(_longest)

        def part(first: int, last: int) -> None:
            if first < last:
                where = (seeds[0] + first, seeds[1], first, max(1, long // LANES))
                run(*given, kind, crossing, lanes[first:last], *where, slots, found[first:last])

        edges = [blocks * i // THREADS for i in range(THREADS + 1)]
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(part, edges[:-1], edges[1:]))
        return found.ravel()[: replicas * long].reshape(replicas, long)[:, :count]


def _lanes(count: int) -> tuple[int, int]:
    """(lanes of one replica in a block, lanes of a replica in all)."""
    width = min(LANES, 1 << (count - 1).bit_length())
    return width, -(-count // width) * width


def _with_shared(table: np.ndarray, width: int) -> np.ndarray:
    """``table``, and below it what meetings between replicas take: the same draws in all parts of
    a block."""
    shared = np.tile(table[:, :width], (1, LANES // width)).reshape(-1, ROWS, LANES)
    return np.concatenate([table, shared[:, ::-1].reshape(-1, LANES)])


def _longest(  # type: ignore[no-untyped-def]
    lasts, row, slot, ends, start, before, share, table, kind, crossing, factors,
    seed, shared, place, period, slots, found,
):  # fmt: skip
    end, latest, earlier = np.zeros((slots, LANES)), np.zeros(LANES), np.zeros(LANES)
    others = len(table) // 2  # where the draws begin that replicas share
    for block in range(len(found)):
        top = found[block]
        earlier[:] = 0.0
        for node in range(len(lasts)):
            last, own, to = lasts[node], factors[block, row[node]], end[slot[node]]
            first, after = start[node], start[node + 1]
            if first == after:
                for lane in range(LANES):
                    latest[lane] = 0.0
            else:
                source = end[before[first]]
                for lane in range(LANES):
                    latest[lane] = source[lane]
                for edge in range(first + 1, after):
                    source = end[before[edge]]
                    for lane in range(LANES):
                        if source[lane] > latest[lane]:
                            latest[lane] = source[lane]
            if share[node] != 0.0:
                if crossing[node]:
                    mixed = node * 40503 + ((place + block) % period + shared) * 30011
                else:
                    mixed = node * 40503 + (seed + block) * 30011
                mixed = (mixed ^ (mixed >> 7)) * 7919
                pick = ((mixed ^ (mixed >> 11)) & (ROWS - 1)) + kind[node] * ROWS
                if crossing[node]:
                    pick += others
                draws, part = table[pick], share[node]
                for lane in range(LANES):
                    to[lane] = latest[lane] + last * own[lane] * (1 + part * (draws[lane] - 1))
            else:
                for lane in range(LANES):
                    to[lane] = latest[lane] + last * own[lane]
            if ends[node]:
                last_of = top if ends[node] == 2 else earlier
                for lane in range(LANES):
                    if to[lane] > last_of[lane]:
                        last_of[lane] = to[lane]
        for lane in range(LANES):
            top[lane] -= earlier[lane]


def build(dag: dags.Dag, durations: np.ndarray, classes: int) -> Paths:
    """``dag`` made small; ``durations`` decide only the order in which nodes are visited."""
    waits = _implied_gone(dag)
    begin, _ = maxplus.evaluate(dag, durations)
    place = np.empty(len(dag), dtype=np.int64)
    place[dag.order] = np.arange(len(dag))
    kept = np.fromiter(waits, dtype=np.int64, count=len(waits))
    order = kept[np.lexsort((place[kept], begin[kept]))]
    slot, last = _slots(order.tolist(), waits)
    edges = [[slot[p] for p in waits[n]] for n in order.tolist()]
    owner = dag.owner[order].astype(np.int64)
    return Paths(
        lasts=durations[order].astype(np.float64),
        row=np.where(owner < 0, classes, owner + (classes + 1) * (dag.kind[order] >= dags.LEAD)),
        node=order,
        slot=np.array([slot[n] for n in order.tolist()], dtype=np.int64),
        start=np.concatenate(([0], np.cumsum([len(e) for e in edges]))).astype(np.int64),
        before=np.array([p for e in edges for p in e], dtype=np.int64),
        ends=_ends(dag, order, waits),
    )


def _ends(dag: dags.Dag, order: np.ndarray, waits: dict[int, list[int]]) -> np.ndarray:
    """uint8 [n]: which nodes nothing of their own iteration waits for, of the last two."""
    within = {p for node, before in waits.items() for p in before
              if dag.iteration[p] == dag.iteration[node]}  # fmt: skip
    back = int(dag.iteration.max(initial=0)) - dag.iteration[order]
    last = np.array([node not in within for node in order.tolist()], dtype=bool)
    return np.where(last & (back < 2), 2 - back, 0).astype(np.uint8)


def _implied_gone(dag: dags.Dag) -> dict[int, list[int]]:
    """node -> predecessors, of nodes that are kept: waits that another wait implies are left out
    (looked for three steps back), and so are points in time that wait for one node only."""
    start, before = dag.start.tolist(), dag.before.tolist()
    point = (dag.kind == dags.JOIN).tolist()
    found: list[Sequence[int]] = [()] * len(dag)
    kept: dict[int, list[int]] = {}
    for node in dag.order.tolist():
        waits: set[int] = set()
        for p in before[start[node] : start[node + 1]]:
            waits.add(found[p][0] if point[p] and len(found[p]) == 1 else p)
        if len(waits) > 1:
            deep = len(waits) <= _FEW
            for p in list(waits):
                _discard(waits, found[p], found, 2 if deep else 0)
        found[node] = sorted(waits)
        if not (point[node] and len(waits) == 1):
            kept[node] = found[node]
    return kept


def _discard(waits: set[int], nodes: Sequence[int], found: list[Sequence[int]], deep: int) -> None:
    for node in nodes:
        waits.discard(node)
        if deep and len(found[node]) <= _FEW:
            _discard(waits, found[node], found, deep - 1)


def _slots(order: list[int], waits: dict[int, list[int]]) -> tuple[dict[int, int], dict[int, int]]:
    """(node -> slot, node -> the last node that reads it)."""
    last = {p: i for i, node in enumerate(order) for p in waits[node]}
    free: list[int] = []
    slot: dict[int, int] = {}
    most = 0
    for i, node in enumerate(order):
        if free:
            slot[node] = free.pop()
        else:
            slot[node], most = most, most + 1
        free += [slot[p] for p in waits[node] if last[p] == i]
        if node not in last:
            free.append(slot[node])
    return slot, last
