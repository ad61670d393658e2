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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_prism.graph import loops
from megatron_prism.graph.issue_graph import JOIN, LEAD, IssueGraph
from megatron_prism.graph.world_graph import WorldGraph
from megatron_prism.predict.distributions import Distribution, largest
from megatron_prism.predict.variability import CallSpread, Variability
from megatron_prism.replay import timeline
from megatron_prism.replay.timeline import Timeline


def _together(graph: WorldGraph) -> int:
    """Ranks of a stage that make up one replica."""
    world = graph.programs.world
    etp = world.tp if world.etp is None else world.etp
    return math.lcm(world.tp * world.cp, etp * world.ep)


def replicas(graph: WorldGraph) -> tuple[int, tuple[int, ...]]:
    """(independent replicas, members of each class in one)."""
    world = graph.programs.world
    count = max(1, world.size // (world.pp * _together(graph)))
    if any(ranks % count for ranks in graph.classes.counts):
        count = 1  # not alike: the whole world waits for all of itself
    return count, tuple(ranks // count for ranks in graph.classes.counts)


def replica_of(graph: WorldGraph, ranks: np.ndarray) -> np.ndarray:
    """The replica that each rank is in."""
    world = graph.programs.world
    if replicas(graph)[0] == 1:
        return np.zeros(len(ranks), dtype=np.int64)
    tp, cp, dp = (np.asarray(world._along(axis, ranks)) for axis in ("tp", "cp", "dp"))
    return np.asarray((tp + world.tp * (cp + world.cp * dp)) // _together(graph))


LANES = 512  # a power of two
ROWS = 256  # times LANES draws of each kind.  A node's are LANES in a row, from where a hash says:
# nodes that share some of them do so in different iterations
_FEW = 8  # predecessors up to which implied waits are looked for three steps back
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
        slots, run = int(self.slot.max(initial=0)) + 1, loops._compiled(_latest)

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
                if after == first:
                    latest[:] = np.float32(0.0)
                else:
                    one, less = late[before[first]], spare[first]
                    other, gap = late[before[first + 1]], spare[first + 1]
                    for lane in range(LANES):
                        x, y = one[lane] - less, other[lane] - gap
                        latest[lane] = x if x > y else y
                for edge in range(first + 2, after):
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
    """Compact form of ``dag``, whose nodes take ``durations`` (ns) in the replay."""
    waits = _points_gone(dag, _implied_gone(dag))
    begin, end = timeline.evaluate(dag, durations)
    place = np.empty(len(dag), dtype=np.int64)
    place[dag.order] = np.arange(len(dag))
    kept = np.fromiter(waits, dtype=np.int64, count=len(waits))
    order = kept[np.lexsort((place[kept], begin[kept]))]
    slot, last = _slots(order.tolist(), waits)
    counts = [len(waits[n]) for n in order.tolist()]
    before = np.array([p for n in order.tolist() for p in waits[n]], dtype=np.int64)
    owner = dag.owner[order].astype(np.int64)
    ends = _ends(dag, order, waits)
    until = [int(end[order[ends == which]].max(initial=0)) for which in (0, 1, 2)]
    return Paths(
        lasts=durations[order].astype(np.float64),
        row=np.where(owner < 0, classes, owner + (classes + 1) * (dag.kind[order] >= LEAD)),
        node=order,
        slot=np.array([slot[n] for n in order.tolist()], dtype=np.int64),
        start=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        before=np.array([slot[p] for p in before.tolist()], dtype=np.int64),
        spare=(np.repeat(begin[order], counts) - end[before]).astype(np.float32),
        ends=ends,
        margin=(np.array(until)[ends] - end[order]).astype(np.float32),
        steady=until[2] - until[1],
    )


def _ends(dag: IssueGraph, order: np.ndarray, waits: dict[int, list[int]]) -> np.ndarray:
    """uint8 [n]: which nodes nothing of their own iteration waits for, of the last two."""
    within = {p for node, before in waits.items() for p in before
              if dag.iteration[p] == dag.iteration[node]}  # fmt: skip
    back = int(dag.iteration.max(initial=0)) - dag.iteration[order]
    last = np.array([node not in within for node in order.tolist()], dtype=bool)
    return np.where(last & (back < 2), 2 - back, 0).astype(np.uint8)


def _implied_gone(dag: IssueGraph) -> dict[int, list[int]]:
    """node -> predecessors, of nodes that are kept: waits that another wait implies are left out
    (looked for three steps back), and so are points in time that wait for one node only."""
    start, before = dag.start.tolist(), dag.before.tolist()
    point = (dag.kind == JOIN).tolist()
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


def _points_gone(dag: IssueGraph, waits: dict[int, list[int]]) -> dict[int, list[int]]:
    """``waits`` without points in time that one node of the same iteration waits for: it waits for
    what they wait for."""
    readers = Counter(p for before in waits.values() for p in before)
    point, iteration = dag.kind == JOIN, dag.iteration
    kept = dict(waits)
    for node, before in waits.items():
        inner = [p for p in before if point[p] and readers[p] == 1]
        inner = [p for p in inner if iteration[p] == iteration[node]]
        if inner:
            kept[node] = sorted({*before, *(q for p in inner for q in kept[p])} - {*inner})
            for p in inner:
                del kept[p]
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
        self.replicas, self.members = replicas(self.graph)
        self.op = timeline.dag.op
        self._table: tuple[Any, np.ndarray] = (None, np.zeros((ROWS, LANES), np.float32))
        self.paths = build(timeline.dag, timeline.durations, len(self.members))
        self.crossing = self._crossing()
        self.kind = self._kinds()

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
        if not self.hosted or np.ptp(curve[1]) == 0:
            return found
        for index, members in enumerate(self.members):
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

    def _kinds(self) -> np.ndarray:
        """int64 [nodes]: place of a node's distribution in ``shapes``."""
        meets = self.paths.row == len(self.members)
        found = np.where(meets, 0, 1)
        if self.calls is not None:
            kind = self.calls.kind[self.op[self.paths.node[meets]]]
            found[meets] = np.where(kind >= 0, kind + 2, 0)
        return found

    def _crossing(self) -> np.ndarray:
        """bool [nodes]: meetings of groups that have members in several replicas."""
        found = np.zeros(len(self.paths.lasts), dtype=bool)
        nodes = np.flatnonzero(self.paths.row == len(self.members))
        several = self.graph.calls_where(
            lambda kind: not kind.is_pair and np.ptp(replica_of(self.graph, kind.ranks)) > 0
        )
        found[nodes] = several[self.op[self.paths.node[nodes]]]
        return found
