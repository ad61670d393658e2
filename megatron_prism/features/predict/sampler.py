"""Draw whole iterations of a replayed world; the slowest replica counts.

A draw is a replay with other durations: of as many iterations as the timeline has, each rank's
factor the same in all of them, and what counts is the time from the end of the last but one to the
end of the last.  So without variation every draw is ``Timeline.iteration_ns``, exactly.

A *replica* is one copy of the model: the ranks that talk to each other in every layer and along the
pipeline (tp x cp, etp x ep, pp).  Ranks of one class in a replica wait for each other all the time,
so their computing takes the slowest one's factor: the largest of as many draws, by order
statistics.  Replicas meet only at the end of an iteration, which takes as long as the slowest of
them; all of them are drawn, under one network regime per iteration.

Approximated: calls between replicas are priced but do not make a replica wait within the iteration;
ranks of a class do not drift between two calls.  Where replicas are not alike the whole world is
taken as one: exact if every rank is a class of its own, else a little slow.  Every replica has a
random stream of its own, so what-ifs that change one replica draw only that one, and change
nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_prism.features.predict.distributions import Distribution, largest
from megatron_prism.features.predict.variability import CallSpread, Variability
from megatron_prism.graph import loops
from megatron_prism.graph.issue_graph import JOIN, LEAD, IssueGraph
from megatron_prism.graph.world_graph import CallKind, WorldGraph
from megatron_prism.replay import timeline
from megatron_prism.replay.timeline import Timeline


def replicas(graph: WorldGraph) -> tuple[int, int, tuple[int, ...]]:
    """(independent replicas, ranks of a stage that make up one, members of each class in one)."""
    world = graph.programs.world
    etp = world.tp if world.etp is None else world.etp
    together = math.lcm(world.tp * world.cp, etp * world.ep)
    count = max(1, world.size // (world.pp * together))
    if any(ranks % count for ranks in graph.classes.counts):
        count = 1  # not alike: the whole world waits for all of itself
    return count, together, tuple(ranks // count for ranks in graph.classes.counts)


LANES = 512  # a power of two
ROWS = 256  # times LANES draws of each kind.  A node's are LANES in a row, from where a hash says:
# nodes that share some of them do so in different iterations
THREADS = 2


@dataclass(frozen=True)
class Paths:
    """Nodes in an order in which predecessors come first, and how much later than in the replay
    each of them ends.

    That is kept as float32, so nothing is rounded where nothing varies.

    lasts  : float64 [n] ns
    row    : int64 [n], which factor a node takes: its class; the number of classes for meetings;
             that, one and its class for the host's time
    node   : int64 [n], the node of the IssueGraph
    slot   : int64 [n], where its end is kept; start, before: slots of its predecessors
    spare  : float32 [edges] ns, by how much the predecessor may be late without delaying the node
    ends   : uint8 [n], 2: the last iteration may end with it, 1: the one before may, 0: neither
    margin : float32 [n] ns, of ``ends``: by how much it may be late without being the end
    steady : ns of the last iteration where nothing varies
    """

    lasts: np.ndarray
    row: np.ndarray
    node: np.ndarray
    slot: np.ndarray
    start: np.ndarray
    before: np.ndarray
    spare: np.ndarray
    ends: np.ndarray
    margin: np.ndarray
    steady: int

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
        table    : float32 [kinds * ROWS, LANES], deviations from 1 of own factors
        kind     : int64 [n], whose draws a node takes
        crossing : bool [n], meetings between replicas: one draw of an iteration for all of them
        seeds    : of what each replica draws, and of what all share
        """
        rows, replicas, count = factors.shape
        width, long = _lanes(count)
        blocks = -(-replicas * long // LANES)
        padded = np.zeros((rows, blocks * LANES), np.float32)
        own = padded[:, : replicas * long].reshape(rows, replicas, long)
        own[:, :, :count] = factors - 1
        lanes = np.ascontiguousarray(padded.reshape(rows, blocks, LANES).swapaxes(0, 1))
        found = np.zeros((blocks, LANES), np.float32)
        given = (
            *(self.lasts.astype(np.float32), self.row, self.slot, self.ends, self.margin),
            *(self.start, self.before, self.spare, share.astype(np.float32), table.ravel(), kind),
            crossing,
        )
        slots, run = int(self.slot.max(initial=0)) + 1, loops.compiled_function(_latest)

        def part(first: int, last: int) -> None:
            if first < last:
                where = (seeds[0] + first, seeds[1], first, max(1, long // LANES), width)
                run(*given, lanes[first:last], *where, slots, found[first:last])

        edges = [blocks * i // THREADS for i in range(THREADS + 1)]
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(part, edges[:-1], edges[1:]))
        late = found.ravel()[: replicas * long].reshape(replicas, long)[:, :count]
        return self.steady + late.astype(float)


def _lanes(count: int) -> tuple[int, int]:
    """(lanes of one replica in a block, lanes of a replica in all)."""
    width = min(LANES, 1 << (count - 1).bit_length())
    return width, -(-count // width) * width


def _latest(  # type: ignore[no-untyped-def]
    lasts, row, slot, ends, margin, start, before, spare, share, draws, kind, crossing, factors,
    seed, shared, place, period, width, slots, found,
):  # fmt: skip
    late, latest = np.zeros((slots, LANES), np.float32), np.zeros(LANES, np.float32)
    earlier, none = np.zeros(LANES, np.float32), np.float32(-np.inf)
    of_kind, same = ROWS * LANES, np.zeros(LANES, np.float32)
    for block in range(len(found)):
        top = found[block]
        top[:] = none
        earlier[:] = none
        for node in range(len(lasts)):
            last, own, to = lasts[node], factors[block, row[node]], late[slot[node]]
            first, after = start[node], start[node + 1]
            if after == first + 1:
                begin = late[before[first]]
            else:
                begin = latest
                latest[:] = none if after > first else np.float32(0.0)
                for edge in range(first, after):
                    other, gap = late[before[edge]], spare[edge]
                    for lane in range(LANES):
                        x, y = latest[lane], other[lane] - gap
                        latest[lane] = x if x > y else y
            part = share[node]
            if part != 0.0:
                which = (place + block) % period + shared if crossing[node] else seed + block
                mixed = node * 40503 + which * 30011
                mixed = (mixed ^ (mixed >> 7)) * 7919
                pick = kind[node] * of_kind + (mixed ^ (mixed >> 11)) % (of_kind - LANES)
                drawn = draws[pick : pick + LANES]
                if crossing[node] and width < LANES:  # the same for all replicas in the block
                    for replica in range(0, LANES, width):
                        same[replica : replica + width] = drawn[:width]
                    drawn = same
                for lane in range(LANES):
                    mine = part * drawn[lane]
                    to[lane] = begin[lane] + last * (own[lane] + mine + own[lane] * mine)
            else:
                for lane in range(LANES):
                    to[lane] = begin[lane] + last * own[lane]
            if ends[node]:
                last_of, gap = top if ends[node] == 2 else earlier, margin[node]
                for lane in range(LANES):
                    x, y = last_of[lane], to[lane] - gap
                    last_of[lane] = x if x > y else y
        for lane in range(LANES):
            if earlier[lane] != none:
                top[lane] -= earlier[lane]


def build(dag: IssueGraph, durations: np.ndarray, classes: int) -> Paths:
    """Compact form of ``dag``, whose nodes take ``durations`` (ns) in the replay: without points in
    time that wait for one node only.
    """
    begin, end = timeline.evaluate(dag, durations)
    counts, nodes = np.diff(dag.start), np.arange(len(dag))
    point = (dag.kind == JOIN) & (counts == 1)
    stands_for = nodes.copy()
    stands_for[point] = dag.before[dag.start[:-1][point]]
    while (further := stands_for[stands_for] != stands_for).any():
        stands_for[further] = stands_for[stands_for[further]]
    place = np.empty(len(dag), dtype=np.int64)
    place[dag.order] = nodes
    order = nodes[~point][np.lexsort((place[~point], begin[~point]))]
    counts = counts[order]
    start = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    edges = np.repeat(dag.start[order] - start[:-1], counts) + np.arange(start[-1])
    before, reader = stands_for[dag.before[edges]], np.repeat(order, counts)
    slot = np.array(_slots(order.tolist(), start.tolist(), before.tolist()))
    # which nodes nothing of their own iteration waits for, of the last two
    back = int(dag.iteration.max(initial=0)) - dag.iteration
    within = before[dag.iteration[before] == dag.iteration[reader]]
    ends = np.where(np.isin(order, within) | (back[order] > 1), 0, 2 - back[order])
    until = [int(end[order[ends == which]].max(initial=0)) for which in (0, 1, 2)]
    owner = dag.owner[order].astype(np.int64)
    return Paths(
        lasts=durations[order].astype(np.float64),
        row=np.where(owner < 0, classes, owner + (classes + 1) * (dag.kind[order] >= LEAD)),
        node=order,
        slot=slot[order],
        start=start,
        before=slot[before],
        spare=(begin[reader] - end[before]).astype(np.float32),
        ends=ends.astype(np.uint8),
        margin=(np.array(until)[ends] - end[order]).astype(np.float32),
        steady=until[2] - until[1],
    )


def _slots(order: list[int], start: list[int], before: list[int]) -> list[int]:
    """Of every node where its end is kept, until the last node that reads it."""
    last = dict(zip(before, np.repeat(np.arange(len(order)), np.diff(start)).tolist(), strict=True))
    free, slot, most = list[int](), [0] * (1 + max(order, default=0)), 0
    for i, node in enumerate(order):
        if not free:
            free, most = [most], most + 1
        slot[node] = free.pop()
        free += [slot[p] for p in {*before[start[i] : start[i + 1]]} if last[p] == i]
        if node not in last:
            free.append(slot[node])
    return slot


_AT_ONCE = 1 << 16  # draws whose factors are kept at a time
# streams beside the replicas'
_NETWORK, _TABLE, _HOSTS = ((1 << 40) + i for i in range(1, 4))
_Curve = tuple[np.ndarray, np.ndarray]  # standard normal scores, values


class Sampler:
    """Draws iterations.  The same seed gives the same draws.

    timeline : of one or more iterations; of two, an iteration follows another one
    replicas : independent copies of the model
    members  : ranks of each class in one of them
    calls    : distributions of calls that were sampled; the others have the Variability's
    """

    def __init__(
        self,
        timeline: Timeline,
        seed: int = 0,
        calls: CallSpread | None = None,
    ) -> None:
        self.timeline, self.graph, self.seed = timeline, timeline.graph, seed
        self.calls = calls
        self.replicas, self._together, self.members = replicas(self.graph)
        self._table: tuple[Any, np.ndarray] = (None, np.zeros((ROWS, LANES), np.float32))
        self.paths = build(timeline.dag, timeline.durations, len(self.members))
        meets = self.paths.row == len(self.members)
        calls_of = timeline.dag.op[self.paths.node[meets]]
        self.kind = np.where(meets, 0, 1)  # place of a node's distribution in ``shapes``
        if calls is not None:
            self.kind[meets] = np.where(calls.kind >= 0, calls.kind + 2, 0)[calls_of]
        # meetings of groups that have members in several replicas
        self.crossing = np.zeros(len(meets), dtype=bool)
        self.crossing[meets] = self.graph.calls_where(self._crosses)[calls_of]

    @property
    def hosted(self) -> bool:
        """Whether the host's time is apart for any class."""
        return bool((self.paths.row > len(self.members)).any())

    def draw(
        self,
        spread: Variability,
        count: int,
        *,
        slow: Mapping[int, float] | None = None,
        replicas: range | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> np.ndarray:
        """ns, float64 [count, replicas]: how long each replica takes in each iteration; every
        iteration is one of another cluster.

        slow     : class -> how many times as long one of its ranks in each replica computes
        replicas : which of them; default all, and there may be more than the world has
        """
        rank, host = spread.curve("gpu", "step"), spread.curve("host")
        which = range(self.replicas) if replicas is None else replicas
        rng = np.random.default_rng([self.seed, _NETWORK])
        network = np.interp(rng.standard_normal(count), *spread.curve("network"))
        table, shares = self._tables(spread)
        found, classes = np.empty((count, len(which))), len(self.members)
        together = max(1, _AT_ONCE // max(1, count))
        for first in range(0, len(which), together):
            part = which[first : first + together]
            factors = np.empty((2 * classes + 1, len(part), count))
            for place, replica in enumerate(part):
                factors[:classes, place] = self._computing(rank, count, replica, slow or {})
                factors[classes + 1 :, place] = self._issuing(host, count, replica)
                factors[classes, place] = network
            seeds = part[0] * 1_000_003, 0
            times = self.paths.longest(factors, shares, table, self.kind, self.crossing, seeds)
            found[:, first : first + len(part)] = times.T
            if progress is not None:
                progress(len(part) * count)
        return found

    def _computing(
        self, curve: _Curve, count: int, replica: int, slow: Mapping[int, float]
    ) -> np.ndarray:
        """float64 [classes, count]: the slowest member's factor."""
        found = np.zeros((len(self.members), count))
        for index, members in enumerate(self.members):
            rng = np.random.default_rng([self.seed, replica, index])
            if index in slow:
                found[index] = slow[index] * np.interp(largest(rng, 1, (count,)), *curve)
                members -= 1
            if members:
                rest = np.interp(largest(rng, members, (count,)), *curve)
                np.maximum(found[index], rest, out=found[index])
        return found

    def _issuing(self, curve: _Curve, count: int, replica: int) -> np.ndarray:
        """float64 [classes, count]: the factor of the slowest member's host."""
        found = np.ones((len(self.members), count))
        for index, members in enumerate(self.members if self.hosted and np.ptp(curve[1]) else ()):
            rng = np.random.default_rng([self.seed, _HOSTS, replica, index])
            found[index] = np.interp(largest(rng, members, (count,)), *curve)
        return found

    def _tables(self, spread: Variability) -> tuple[np.ndarray, np.ndarray]:
        """(deviations of own factors from 1, how much of them counts)."""
        shapes = self.shapes(spread)
        vary = np.array([float(np.ptp(one.at(np.array([-8.0, 8.0])))) > 0 for one in shapes])
        if self._table[0] != shapes:  # a million draws each: kept for the next call
            rng = np.random.default_rng([self.seed, _TABLE])
            parts = [
                one.at(rng.standard_normal((ROWS, LANES))) if any_ else np.ones((ROWS, LANES))
                for one, any_ in zip(shapes, vary.tolist(), strict=True)
            ]
            self._table = shapes, (np.concatenate(parts) - 1).astype(np.float32)
        own = np.where(self.kind > 1, spread.calls_by, 1.0) * vary[self.kind]
        hosts = self.paths.row > len(self.members)  # they vary as a whole
        return self._table[1], own * ((self.paths.lasts > 0) & ~hosts)

    def shapes(self, spread: Variability) -> tuple[Distribution, ...]:
        """Distributions of own factors: of calls, of segments, of each kind of sampled calls."""
        sampled = () if self.calls is None else self.calls.shapes
        return (spread.of("call"), spread.of("segment"), *sampled)

    def _crosses(self, kind: CallKind) -> bool:
        """Whether a group has members in several replicas."""
        if kind.is_pair or self.replicas == 1:
            return False
        world = self.graph.programs.world
        tp, cp, dp = (np.asarray(world._along(axis, kind.ranks)) for axis in ("tp", "cp", "dp"))
        places = (tp + world.tp * (cp + world.cp * dp)) // self._together
        return bool(np.ptp(places) > 0)
