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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_prism.core.ops import IS_PAIR
from megatron_prism.predict import paths
from megatron_prism.predict.calls import CallSpread
from megatron_prism.predict.distribution import Distribution, largest
from megatron_prism.predict.replicas import replica_of, replicas
from megatron_prism.predict.spreads import Variability
from megatron_prism.replay.timeline import Timeline

__all__ = ["Sampler", "Slow"]

Slow = Mapping[int, tuple[int, float]]  # class -> (how many of its ranks, factor)
_AT_ONCE = 1 << 16  # draws whose factors are kept at a time
# streams beside the replicas'
_CLUSTER, _NETWORK, _TABLE, _HOSTS = ((1 << 40) + i for i in range(4))


@dataclass(frozen=True)
class _Factors:
    """Values at standard normal scores: of a rank's computing in an iteration, of its GPU alone, of
    its step alone, of the network, of its host in an iteration."""

    rank: tuple[np.ndarray, np.ndarray]
    gpu: tuple[np.ndarray, np.ndarray]
    step: tuple[np.ndarray, np.ndarray]
    network: tuple[np.ndarray, np.ndarray]
    host: tuple[np.ndarray, np.ndarray]


class Sampler:
    """Draws iterations.  The same seed gives the same draws.

    timeline : of one or more iterations; of two, an iteration follows another one
    replicas : independent copies of the model
    members  : ranks of each class in one of them
    calls    : distributions of calls that were sampled; the others have the Variability's
    regime   : seed of the network's regimes, if another than ``seed``
    """

    def __init__(
        self,
        timeline: Timeline,
        seed: int = 0,
        calls: CallSpread | None = None,
        regime: int | None = None,
    ) -> None:
        self.timeline, self.graph, self.seed = timeline, timeline.graph, seed
        self.calls, self.regime = calls, seed if regime is None else regime
        self.replicas, self.members = replicas(self.graph)
        self.op = timeline.dag.op
        self._table: tuple[Any, np.ndarray] = (None, self._still())
        self.paths = paths.build(timeline.dag, timeline.durations, len(self.members))
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
        slow: Slow | None = None,
        share: np.ndarray | None = None,
        calm: Mapping[int, float] | None = None,
        replicas: range | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> np.ndarray:
        """ns, float64 [count, replicas]: how long each replica takes in each iteration; every
        iteration is one of another cluster.

        slow     : ranks of one replica, computing slower
        share    : float64 [nodes of ``paths``], how much of a node's own deviation counts;
                   default 1 for all
        calm     : class -> how much of its ranks' deviations counts
        replicas : which of them; default all, and there may be more than the world has
        """
        shapes = _shapes(spread)
        which = range(self.replicas) if replicas is None else replicas
        network = self._network(shapes, count)
        table, shares = self._tables(spread, share)
        found = np.empty((count, len(which)))
        together = max(1, _AT_ONCE // max(1, count))
        for first in range(0, len(which), together):
            part = which[first : first + together]
            classes = len(self.members)
            factors = np.empty((2 * classes + 1, len(part), count))
            for place, replica in enumerate(part):
                factors[:classes, place] = self._computing(shapes.rank, count, replica, slow or {})
                factors[classes + 1 :, place] = self._issuing(shapes.host, count, replica)
                for index, part_of in (calm or {}).items():
                    for row in (index, classes + 1 + index):
                        factors[row, place] = 1 + part_of * (factors[row, place] - 1)
                factors[classes, place] = network
            times = self._run(factors, shares, table, (part[0] * 1_000_003, 0))
            found[:, first : first + len(part)] = times.T
            if progress is not None:
                progress(len(part) * count)
        return found

    def of_cluster(self, spread: Variability, cluster: int, count: int) -> np.ndarray:
        """ns, float64 [count]: iterations of one and the same cluster, whose GPUs stay as they are
        from iteration to iteration."""
        shapes = _shapes(spread)
        rng = np.random.default_rng([self.seed, _CLUSTER, cluster])
        network = np.interp(rng.standard_normal(count), *shapes.network)
        table, shares = self._tables(spread, None)
        slowest = np.zeros(count)
        together = max(1, _AT_ONCE // count)
        for first in range(0, self.replicas, together):
            width = min(together, self.replicas - first)
            classes = len(self.members)
            factors = np.empty((2 * classes + 1, width, count))
            factors[classes] = network
            for place in range(width):
                seed = (cluster + 1) * 104_729 + first + place
                factors[classes + 1 :, place] = self._issuing(shapes.host, count, seed)
            for index, members in enumerate(self.members):
                gpus = np.interp(rng.standard_normal((width, members)), *shapes.gpu)
                worst = np.zeros((width, count))
                for member in range(members):
                    steps = np.interp(rng.standard_normal((width, count)), *shapes.step)
                    np.maximum(worst, gpus[:, member, None] * steps, out=worst)
                factors[index] = worst
            seeds = ((cluster + 1) * 7_919 + first * 1_000_003, cluster + 1)
            times = self._run(factors, shares, table, seeds)
            np.maximum(slowest, times.max(axis=0), out=slowest)
        return slowest

    def _network(self, shapes: _Factors, count: int) -> np.ndarray:
        rng = np.random.default_rng([self.regime, _NETWORK])
        return np.asarray(np.interp(rng.standard_normal(count), *shapes.network))

    def _computing(
        self, curve: tuple[np.ndarray, np.ndarray], count: int, replica: int, slow: Slow
    ) -> np.ndarray:
        """float64 [classes, count]: the slowest member's factor."""
        found = np.empty((len(self.members), count))
        for index, members in enumerate(self.members):
            rng = np.random.default_rng([self.seed, replica, index])
            few, factor = slow.get(index, (0, 1.0))
            few = min(few, members)
            worst = np.zeros(count)
            if few:
                worst = factor * np.interp(largest(rng, few, (count,)), *curve)
            if members > few:
                rest = np.interp(largest(rng, members - few, (count,)), *curve)
                np.maximum(worst, rest, out=worst)
            found[index] = worst
        return found

    def _issuing(
        self, curve: tuple[np.ndarray, np.ndarray], count: int, replica: int
    ) -> np.ndarray:
        """float64 [classes, count]: the factor of the slowest member's host."""
        found = np.ones((len(self.members), count))
        if not self.hosted or np.ptp(curve[1]) == 0:
            return found
        for index, members in enumerate(self.members):
            rng = np.random.default_rng([self.seed, _HOSTS, replica, index])
            found[index] = np.interp(largest(rng, members, (count,)), *curve)
        return found

    def _tables(
        self, spread: Variability, share: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(own factors, how much of them counts)."""
        shapes = self.shapes(spread)
        vary = np.array([float(np.ptp(one.at(np.array([-8.0, 8.0])))) > 0 for one in shapes])
        if self._table[0] != shapes:  # a million draws each: kept for the next call
            rng = np.random.default_rng([self.seed, _TABLE])
            parts = [
                one.at(rng.standard_normal((paths.ROWS, paths.LANES))) if any_ else self._still()
                for one, any_ in zip(shapes, vary.tolist(), strict=True)
            ]
            self._table = shapes, np.concatenate(parts)
        own = np.where(self.kind > 1, spread.calls_by, 1.0) * vary[self.kind]
        hosts = self.paths.row > len(self.members)  # they vary as a whole
        own = own * ((self.paths.lasts > 0) & ~hosts)
        return self._table[1], own * (1.0 if share is None else share)

    def shapes(self, spread: Variability) -> tuple[Distribution, ...]:
        """Distributions of own factors: of calls, of segments, of each kind of sampled calls."""
        sampled = () if self.calls is None else self.calls.shapes
        return (spread.of("call"), spread.of("segment"), *sampled)

    def _still(self) -> np.ndarray:
        return np.ones((paths.ROWS, paths.LANES))

    def _run(
        self,
        factors: np.ndarray,
        share: np.ndarray,
        table: np.ndarray,
        seeds: tuple[int, int],
    ) -> np.ndarray:
        given = (factors, share.astype(float), table, self.kind, self.crossing, seeds)
        return self.paths.longest(*given)

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
        meet, known = self.graph.rendezvous, {}
        firsts = meet.start[self.op[self.paths.node[nodes]]]
        owners, ops = meet.classes[firsts].tolist(), meet.ops[firsts].tolist()
        for node, owner, op in zip(nodes.tolist(), owners, ops, strict=True):
            row = self.graph.program_list[owner].ops[op]
            key = owner, int(row["group"])
            if key not in known:
                name = self.graph.program_list[owner].strings[key[1]]
                rank = self.graph.classes.representatives[owner]
                ranks = replica_of(self.graph, self.graph.groups[name].group(rank))
                known[key] = bool((ranks != ranks[0]).any())
            found[node] = known[key] and not IS_PAIR[row["name"]]
        return found


def _shapes(spread: Variability) -> _Factors:
    return _Factors(
        spread.curve("gpu", "step"),
        spread.curve("gpu"),
        spread.curve("step"),
        spread.curve("network"),
        spread.curve("host"),
    )
