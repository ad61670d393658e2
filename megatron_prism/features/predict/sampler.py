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
from copy import copy
from dataclasses import dataclass

import numpy as np

from megatron_prism.core.world import World
from megatron_prism.features.predict.distributions import Distribution, largest
from megatron_prism.features.predict.variability import CallSpread, Variability
from megatron_prism.graph import loops
from megatron_prism.graph.issue_graph import JOIN, LEAD, IssueGraph
from megatron_prism.graph.world_graph import CallKind, WorldGraph
from megatron_prism.replay import timeline
from megatron_prism.replay.timeline import Timeline


@dataclass(frozen=True)
class Replicas:
    """How a world is made of independent copies of its model.

    Attributes:
        count: Copies.
        ranks_of_stage: Ranks of one pipeline stage of one copy.
        members: Ranks of each class in one copy.
    """

    count: int
    ranks_of_stage: int
    members: tuple[int, ...]


def replicas(graph: WorldGraph) -> Replicas:
    """Find the independent copies of the model in a world."""
    world = graph.programs.world
    etp = world.tp if world.etp is None else world.etp
    ranks_of_stage = math.lcm(world.tp * world.cp, etp * world.ep)
    count = max(1, world.size // (world.pp * ranks_of_stage))
    class_count = len(graph.classes)
    copies = replica_of_ranks(world, np.arange(world.size), ranks_of_stage)
    cells = np.bincount(graph.classes.of * count + copies, minlength=class_count * count)
    ranks_of_copy = cells.reshape(class_count, count)
    # copies that are not alike: the whole world waits for all of itself
    if np.ptp(ranks_of_copy, axis=1).any():
        count = 1
    members = tuple(ranks // count for ranks in graph.classes.counts)
    return Replicas(count, ranks_of_stage, members)


def replica_of_ranks(world: World, ranks: np.ndarray, ranks_of_stage: int) -> np.ndarray:
    """Say in which copy of the model ranks are, int64.

    Args:
        world: The world of the ranks.
        ranks: int64, of any stages.
        ranks_of_stage: Ranks of one pipeline stage of one copy.
    """
    tp = np.asarray(world._along("tp", ranks))
    cp = np.asarray(world._along("cp", ranks))
    dp = np.asarray(world._along("dp", ranks))
    copies: np.ndarray = (tp + world.tp * (cp + world.cp * dp)) // ranks_of_stage
    return copies


LANES = 512  # a power of two
# ROWS times LANES draws of each kind.  A node's are LANES in a row, from where a hash says: nodes
# that share some of them do so in different iterations
ROWS = 256
THREADS = 2


@dataclass(frozen=True)
class OwnFactors:
    """Factors that nodes have beside those of their rank or network.

    Attributes:
        share: float64 [nodes], how much of its own factor's deviation a node takes; 0: none.
        table: float32 [kinds * ROWS, LANES], deviations from 1.
        kind: int64 [nodes], whose draws a node takes.
        crossing: bool [nodes], meetings between replicas: one draw of an iteration for all of them.
    """

    share: np.ndarray
    table: np.ndarray
    kind: np.ndarray
    crossing: np.ndarray


@dataclass(frozen=True)
class Structure:
    """Nodes in an order in which predecessors come first, whatever time they take.

    Attributes:
        row: int64 [n], which factor a node takes: its class; the number of classes for meetings;
            that, one and its class for the host's time.
        node: int64 [n], the node of the IssueGraph.
        slot: int64 [n], where its end is kept.
        start: int64 [n + 1], the first of each node's edges.
        before: int64 [edges], slots of predecessors.
        before_node: int64 [edges], the predecessors as nodes of the IssueGraph.
        ends: uint8 [n], 2: the last iteration may end with it, 1: the one before may, 0: neither.
    """

    row: np.ndarray
    node: np.ndarray
    slot: np.ndarray
    start: np.ndarray
    before: np.ndarray
    before_node: np.ndarray
    ends: np.ndarray


@dataclass(frozen=True)
class Paths:
    """How much later each node ends than in the replay.

    Lateness is kept as float32: nothing is rounded where nothing varies.

    Attributes:
        structure: The order of the nodes.
        lasts: float64 [n] ns.
        spare: float32 [edges] ns, by how much the predecessor may be late without delaying the
            node.
        margin: float32 [n] ns, of ``ends``: by how much it may be late without being the end.
        steady: ns of the last iteration where nothing varies.
    """

    structure: Structure
    lasts: np.ndarray
    spare: np.ndarray
    margin: np.ndarray
    steady: int

    def longest(self, factors: np.ndarray, own: OwnFactors, seed: int) -> np.ndarray:
        """Return how long each replica takes in each iteration.

        Args:
            factors: float64 [rows, replicas, iterations], by ``row``.
            own: Factors of single nodes.
            seed: Of what each replica draws.

        Returns:
            float64 [replicas, iterations] ns.
        """
        rows, replica_count, iterations = factors.shape
        width, lanes_of_replica = _lanes(iterations)

        # blocks of LANES draws: all of the first replica, then of the second
        lane_count = replica_count * lanes_of_replica
        blocks = -(-lane_count // LANES)
        padded = np.zeros((rows, blocks * LANES), np.float32)
        deviations = padded[:, :lane_count].reshape(rows, replica_count, lanes_of_replica)
        deviations[:, :, :iterations] = factors - 1
        lanes = np.ascontiguousarray(padded.reshape(rows, blocks, LANES).swapaxes(0, 1))
        late = np.zeros((blocks, LANES), np.float32)

        structure = self.structure
        slot_count = int(structure.slot.max(initial=0)) + 1
        blocks_of_replica = max(1, lanes_of_replica // LANES)
        lasts = self.lasts.astype(np.float32)
        share = own.share.astype(np.float32)
        table = own.table.ravel()
        run = loops.compiled_function(_latest)

        def fill(first: int, last: int) -> None:
            """Fill some blocks of ``late``."""
            if first >= last:
                return
            run(
                lasts,
                structure.row,
                structure.slot,
                structure.ends,
                self.margin,
                structure.start,
                structure.before,
                self.spare,
                share,
                table,
                own.kind,
                own.crossing,
                lanes[first:last],
                seed + first,
                first,
                blocks_of_replica,
                width,
                slot_count,
                late[first:last],
            )

        bounds = [blocks * part // THREADS for part in range(THREADS + 1)]
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(fill, bounds[:-1], bounds[1:]))
        late_of_replica = late.ravel()[:lane_count].reshape(replica_count, lanes_of_replica)
        return self.steady + late_of_replica[:, :iterations].astype(float)


def _lanes(iterations: int) -> tuple[int, int]:
    """Return how many lanes one replica has in a block, and how many it has in all."""
    width = min(LANES, 1 << (iterations - 1).bit_length())
    return width, -(-iterations // width) * width


def _latest(  # type: ignore[no-untyped-def] # compiled by numba
    lasts,
    row,
    slot,
    ends,
    margin,
    start,
    before,
    spare,
    share,
    draws,
    kind,
    crossing,
    factors,
    seed,
    first_block,
    blocks_of_replica,
    width,
    slot_count,
    latest_ends,
):
    """Fill ``latest_ends`` [blocks, LANES]: how much later the last iteration ends.

    The arrays of ``Paths`` and ``OwnFactors`` come first.  Then ``factors`` [blocks, rows, LANES]:
    deviations from 1; of what the first of these blocks draws, and its number among all blocks;
    how many blocks a replica has, and how many lanes of a block.
    """
    never = np.float32(-np.inf)
    late = np.zeros((slot_count, LANES), np.float32)
    latest = np.zeros(LANES, np.float32)
    earlier_end = np.zeros(LANES, np.float32)
    repeated = np.zeros(LANES, np.float32)
    draws_of_kind = ROWS * LANES
    for block in range(len(latest_ends)):
        last_end = latest_ends[block]
        last_end[:] = never
        earlier_end[:] = never
        for node in range(len(lasts)):
            last = lasts[node]
            factor = factors[block, row[node]]
            end = late[slot[node]]

            # when the last of its predecessors ends; one is read in place
            first_edge = start[node]
            behind_edges = start[node + 1]
            if behind_edges == first_edge + 1:
                begin = late[before[first_edge]]
            else:
                begin = latest
                latest[:] = never if behind_edges > first_edge else np.float32(0.0)
                for edge in range(first_edge, behind_edges):
                    predecessor = late[before[edge]]
                    gap = spare[edge]
                    for lane in range(LANES):
                        late_by = predecessor[lane] - gap
                        latest[lane] = latest[lane] if latest[lane] > late_by else late_by

            # its own duration
            part = share[node]
            if part != 0.0:
                # replicas meet in one draw of an iteration; each has its own of all other nodes
                if crossing[node]:
                    number = (first_block + block) % blocks_of_replica
                else:
                    number = seed + block
                mixed = node * 40503 + number * 30011
                mixed = (mixed ^ (mixed >> 7)) * 7919
                offset = (mixed ^ (mixed >> 11)) % (draws_of_kind - LANES)
                position = kind[node] * draws_of_kind + offset
                drawn = draws[position : position + LANES]
                # the same for all replicas in the block
                if crossing[node] and width < LANES:
                    for lane in range(0, LANES, width):
                        repeated[lane : lane + width] = drawn[:width]
                    drawn = repeated
                for lane in range(LANES):
                    own = part * drawn[lane]
                    end[lane] = begin[lane] + last * (factor[lane] + own + factor[lane] * own)
            else:
                for lane in range(LANES):
                    end[lane] = begin[lane] + last * factor[lane]

            # whether an iteration ends with it
            if ends[node]:
                end_of_iteration = last_end if ends[node] == 2 else earlier_end
                gap = margin[node]
                for lane in range(LANES):
                    x = end_of_iteration[lane]
                    y = end[lane] - gap
                    end_of_iteration[lane] = x if x > y else y
        for lane in range(LANES):
            if earlier_end[lane] != never:
                last_end[lane] -= earlier_end[lane]


def build(dag: IssueGraph, durations: np.ndarray, classes: int) -> Paths:
    """Return a compact form of a graph, without points in time that wait for one node only.

    Args:
        dag: The graph.
        durations: int64 [nodes] ns that nodes take in the replay.
        classes: How many classes there are.
    """
    begin, _ = timeline.evaluate(dag, durations)
    edge_counts = np.diff(dag.start)
    nodes = np.arange(len(dag))
    is_point = (dag.kind == JOIN) & (edge_counts == 1)
    stands_for = _stands_for(dag, is_point)

    # by time; nodes of one time in the order of the graph
    position = np.empty(len(dag), dtype=np.int64)
    position[dag.order] = nodes
    order = nodes[~is_point][np.lexsort((position[~is_point], begin[~is_point]))]

    # edges, in that order
    edge_counts = edge_counts[order]
    start = np.concatenate(([0], np.cumsum(edge_counts))).astype(np.int64)
    edges = np.repeat(dag.start[order] - start[:-1], edge_counts) + np.arange(start[-1])
    before = stands_for[dag.before[edges]]
    reader = np.repeat(order, edge_counts)
    slot = np.array(_slots(order.tolist(), start.tolist(), before.tolist()))

    # of the last two iterations, the nodes that nothing of their own iteration waits for
    iterations_back = int(dag.iteration.max(initial=0)) - dag.iteration
    awaited_within = before[dag.iteration[before] == dag.iteration[reader]]
    is_no_end = np.isin(order, awaited_within) | (iterations_back[order] > 1)
    ends = np.where(is_no_end, 0, 2 - iterations_back[order])

    owner = dag.owner[order].astype(np.int64)
    row_of_owner = owner + (classes + 1) * (dag.kind[order] >= LEAD)
    structure = Structure(
        row=np.where(owner < 0, classes, row_of_owner),
        node=order,
        slot=slot[order],
        start=start,
        before=slot[before],
        before_node=before,
        ends=ends.astype(np.uint8),
    )
    return with_durations(structure, dag, durations)


def with_durations(structure: Structure, dag: IssueGraph, durations: np.ndarray) -> Paths:
    """Return the paths of a graph whose nodes take these times.

    The order of the nodes is one of any times, as predecessors come first in it.

    Args:
        structure: Of the graph.
        dag: The graph.
        durations: int64 [nodes] ns that nodes take in the replay.
    """
    begin, end = timeline.evaluate(dag, durations)
    order = structure.node
    ends = structure.ends
    reader = np.repeat(order, np.diff(structure.start))
    last_end = [int(end[order[ends == which]].max(initial=0)) for which in (0, 1, 2)]
    return Paths(
        structure=structure,
        lasts=durations[order].astype(np.float64),
        spare=(begin[reader] - end[structure.before_node]).astype(np.float32),
        margin=(np.array(last_end)[ends] - end[order]).astype(np.float32),
        steady=last_end[2] - last_end[1],
    )


def _stands_for(dag: IssueGraph, is_point: np.ndarray) -> np.ndarray:
    """Return the node that each node stands for: itself, or the one that a point waits for."""
    stands_for = np.arange(len(dag))
    stands_for[is_point] = dag.before[dag.start[:-1][is_point]]
    # points that wait for points
    while True:
        further = stands_for[stands_for] != stands_for
        if not further.any():
            return stands_for
        stands_for[further] = stands_for[stands_for[further]]


def _slots(order: list[int], start: list[int], before: list[int]) -> list[int]:
    """Return where each node's end is kept, until the last node that reads it."""
    reader_of_edge = np.repeat(np.arange(len(order)), np.diff(start)).tolist()
    last_reader = dict(zip(before, reader_of_edge, strict=True))
    free: list[int] = []
    slot = [0] * (1 + max(order, default=0))
    slot_count = 0
    for place, node in enumerate(order):
        if not free:
            free.append(slot_count)
            slot_count += 1
        slot[node] = free.pop()
        predecessors = {*before[start[place] : start[place + 1]]}
        free += [slot[read] for read in predecessors if last_reader[read] == place]
        if node not in last_reader:
            free.append(slot[node])
    return slot


_AT_ONCE = 1 << 16  # draws whose factors are kept at a time
# numbers of random streams beside the replicas'
_NETWORK = (1 << 40) + 1
_TABLE = (1 << 40) + 2
_HOSTS = (1 << 40) + 3
_SEED_OF_REPLICA = 1_000_003  # times the number of a replica
_SEED_OF_STEP = 1 << 62  # times the number of a step, above all seeds that one may ask for
_Curve = tuple[np.ndarray, np.ndarray]  # standard normal scores, values
# kinds of own factors; those of sampled calls follow
_CALL = 0
_SEGMENT = 1
_FIRST_SAMPLED = 2


@dataclass(frozen=True)
class _Table:
    """Draws of own factors, kept for the next call: a million of each shape.

    Attributes:
        shapes: The distributions.
        deviations: float32 [shapes * ROWS, LANES], from 1.
    """

    shapes: tuple[Distribution, ...] | None
    deviations: np.ndarray


_NO_TABLE = _Table(None, np.zeros((0, LANES), np.float32))


class Sampler:
    """Draws iterations.  The same seed gives the same draws.

    Attributes:
        timeline: Of one or more iterations; of two, an iteration follows another one.
        graph: Its world.
        seed: Of the draws.
        calls: Distributions of calls that were sampled; the others have the Variability's.
        replicas: Independent copies of the model.
        members: Ranks of each class in one of them.
    """

    def __init__(
        self,
        timeline: Timeline,
        seed: int = 0,
        calls: CallSpread | None = None,
    ) -> None:
        """Prepare to draw.

        Args:
            timeline: Of one or more iterations.
            seed: Of the draws.
            calls: Distributions of calls that were sampled.
        """
        self.timeline = timeline
        self.graph = timeline.graph
        self.seed = seed
        self.calls = calls
        copies = replicas(self.graph)
        self.replicas = copies.count
        self.members = copies.members
        self._ranks_of_stage = copies.ranks_of_stage
        self._table = _NO_TABLE
        self.paths = build(timeline.dag, timeline.durations, len(self.members))

        # each node's distribution: place in ``shapes``
        is_meeting = self.paths.structure.row == len(self.members)
        call_of_meeting = timeline.dag.op[self.paths.structure.node[is_meeting]]
        self.kind = np.where(is_meeting, _CALL, _SEGMENT)
        if calls is not None:
            kind_of_call = np.where(calls.kind >= 0, calls.kind + _FIRST_SAMPLED, _CALL)
            self.kind[is_meeting] = kind_of_call[call_of_meeting]
        # meetings of groups that have members in several replicas
        self.crossing = np.zeros(len(is_meeting), dtype=bool)
        self.crossing[is_meeting] = self.graph.calls_where(self._crosses)[call_of_meeting]

    def of_step(self, durations: np.ndarray, number: int) -> Sampler:
        """Return a sampler of the same job whose nodes take other times, with draws of its own.

        Args:
            durations: int64 [nodes], ns.
            number: Of the step; draws of unlike numbers are independent.
        """
        other = copy(self)
        other.seed = _SEED_OF_STEP * (number + 1) + self.seed
        dag = self.timeline.dag
        other.paths = with_durations(self.paths.structure, dag, durations)
        # that of this sampler has the draws of another seed
        other._table = _NO_TABLE
        return other

    @property
    def hosted(self) -> bool:
        """Whether the host's time is apart for any class."""
        return bool(self._is_host.any())

    @property
    def _is_host(self) -> np.ndarray:
        """Whether each node is the time of a host."""
        return self.paths.structure.row > len(self.members)

    def draw(
        self,
        spread: Variability,
        count: int,
        *,
        slow: Mapping[int, float] | None = None,
        replicas: range | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> np.ndarray:
        """Draw how long each replica takes in each iteration.

        Args:
            spread: How much durations vary.
            count: Iterations, each of another cluster.
            slow: Class -> how many times as long one of its ranks in each replica computes.
            replicas: Which of them; default all, and there may be more than the world has.
            progress: Is told how many draws are done.

        Returns:
            float64 [count, replicas] ns.
        """
        rank_curve = spread.curve("gpu", "step")
        host_curve = spread.curve("host")
        drawn_replicas = replicas
        if drawn_replicas is None:
            drawn_replicas = range(self.replicas)
        rng = np.random.default_rng([self.seed, _NETWORK])
        # the network is one for all replicas of an iteration
        network = np.interp(rng.standard_normal(count), *spread.curve("network"))
        own = self._own_factors(spread)
        class_count = len(self.members)
        times = np.empty((count, len(drawn_replicas)))
        replicas_at_once = max(1, _AT_ONCE // max(1, count))
        # rows of factors: computing of each class, the network, the host of each class
        for first in range(0, len(drawn_replicas), replicas_at_once):
            part = drawn_replicas[first : first + replicas_at_once]
            factors = np.empty((2 * class_count + 1, len(part), count))
            for place, replica in enumerate(part):
                computing = self._computing(rank_curve, count, replica, slow or {})
                factors[:class_count, place] = computing
                factors[class_count, place] = network
                factors[class_count + 1 :, place] = self._issuing(host_curve, count, replica)
            times_of_part = self.paths.longest(factors, own, part[0] * _SEED_OF_REPLICA)
            times[:, first : first + len(part)] = times_of_part.T
            if progress is not None:
                progress(len(part) * count)
        return times

    def _computing(
        self, curve: _Curve, count: int, replica: int, slow: Mapping[int, float]
    ) -> np.ndarray:
        """Draw the factor of each class's slowest member: float64 [classes, count]."""
        factors = np.zeros((len(self.members), count))
        for index, members in enumerate(self.members):
            rng = np.random.default_rng([self.seed, replica, index])
            others = members
            # one member is the slow one, the others vary as before
            if index in slow:
                factors[index] = slow[index] * np.interp(largest(rng, 1, (count,)), *curve)
                others -= 1
            if others:
                slowest = np.interp(largest(rng, others, (count,)), *curve)
                np.maximum(factors[index], slowest, out=factors[index])
        return factors

    def _issuing(self, curve: _Curve, count: int, replica: int) -> np.ndarray:
        """Draw the factor of the host of each class's slowest member: float64 [classes, count]."""
        factors = np.ones((len(self.members), count))
        # no host is apart, or none varies
        if not self.hosted or not np.ptp(curve[1]):
            return factors
        for index, members in enumerate(self.members):
            rng = np.random.default_rng([self.seed, _HOSTS, replica, index])
            factors[index] = np.interp(largest(rng, members, (count,)), *curve)
        return factors

    def _own_factors(self, spread: Variability) -> OwnFactors:
        """Draw factors of single nodes."""
        shapes = self.shapes(spread)
        ends = np.array([-8.0, 8.0])  # scores beyond which nothing is drawn
        varies = np.array([float(np.ptp(shape.at(ends))) > 0 for shape in shapes])
        # a what-if that leaves the shapes alone keeps the draws: what it changes is its own effect
        if self._table.shapes != shapes:
            rng = np.random.default_rng([self.seed, _TABLE])
            factors: list[np.ndarray] = []
            for shape, shape_varies in zip(shapes, varies.tolist(), strict=True):
                # what does not vary stays 1 exactly, so that a draw without variation is the replay
                if shape_varies:
                    factors.append(shape.at(rng.standard_normal((ROWS, LANES))))
                else:
                    factors.append(np.ones((ROWS, LANES)))
            deviations = (np.concatenate(factors) - 1).astype(np.float32)
            self._table = _Table(shapes, deviations)
        weight = np.where(self.kind >= _FIRST_SAMPLED, spread.calls_by, 1.0) * varies[self.kind]
        # hosts vary as a whole
        share = weight * ((self.paths.lasts > 0) & ~self._is_host)
        return OwnFactors(share, self._table.deviations, self.kind, self.crossing)

    def shapes(self, spread: Variability) -> tuple[Distribution, ...]:
        """Return distributions of own factors: calls, segments, each kind of sampled calls."""
        sampled = () if self.calls is None else self.calls.shapes
        return (spread.of("call"), spread.of("segment"), *sampled)

    def _crosses(self, kind: CallKind) -> bool:
        """Tell whether a group has members in several replicas."""
        # stages that send to each other are of one replica
        if kind.is_pair or self.replicas == 1:
            return False
        world = self.graph.programs.world
        copies = replica_of_ranks(world, kind.ranks, self._ranks_of_stage)
        return bool(np.ptp(copies) > 0)
