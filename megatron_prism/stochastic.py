"""How long does an iteration take, and how long do the slow ones?  A distribution, not a number.

In : a WorldGraph, Prices and a Variability.  Out: Prediction: quantiles of the iteration time over
clusters and iterations, with confidence intervals.  After PRISM (arXiv 2510.15596): serial parts
add, parallel parts take the maximum, one draw per call for all that take part, one network regime
per iteration.

How it is computed.  A *replica* is one copy of the model: the ranks that talk to each other in
every layer and along the pipeline (tp x cp, etp x ep, pp).  Ranks of one class in a replica wait
for each other all the time, so their computing takes the slowest one's factor: the maximum of as
many draws.  Replicas meet only at the end of an iteration, so the iteration takes the slowest
replica: the quantile q of ``num`` replicas is the quantile ``q ** (1 / num)`` of one
(order statistics, exact for independent replicas).  Monte Carlo therefore samples single replicas.
Approximated: calls between replicas are priced but do not make a replica wait within the iteration;
ranks of a class do not drift between two calls.  Times are floats here (ns).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_prism.costs import Prices
from megatron_prism.costs.variability import PARTS, Variability
from megatron_prism.errors import PrismError, UsageError
from megatron_prism.graph import WorldGraph
from megatron_prism.replay import dag as dags
from megatron_prism.replay import kernels, timeline

__all__ = ["Prediction", "Quantile", "Sampler", "predict"]

QUANTILES = (0.05, 0.5, 0.95, 0.99)
_CALLS = 8192  # draws of the factor of a call, a power of two; calls pick one by a hash
_SLOW = 2000  # replicas with a slow rank that are drawn: one of them is enough to matter
_Z = 1.959964  # of a two-sided 95 % interval


@dataclass(frozen=True)
class Quantile:
    """One quantile of the iteration time, ns, with its 95 % confidence interval.

    ``ns`` is None where the samples do not reach that far; ``needed`` says how many would.
    """

    level: float
    ns: float | None
    low: float | None
    high: float | None
    needed: int


@dataclass(frozen=True)
class Prediction:
    """The distribution of the iteration time.

    steady    : ns without any variation (the longest path)
    replicas  : independent copies of the model
    samples   : single replicas that were drawn
    quantiles : of an iteration of the whole world
    halved    : part of the variability -> p95 if its spread were half, ns; None: too few samples
    slow      : class -> p95 if one of its ranks were ``slow_by`` slower, ns
    """

    steady: float
    replicas: int
    samples: int
    seed: int
    quantiles: tuple[Quantile, ...]
    halved: Mapping[str, float | None]
    slow: Mapping[int, float]
    slow_by: float
    source: str


class Sampler:
    """Draws iteration times of single replicas.  The same seed gives the same draws."""

    def __init__(self, graph: WorldGraph, prices: Prices, seed: int = 0) -> None:
        self.graph, self.seed = graph, seed
        self.replicas, self.members = _replicas(graph)
        made = dags.build(graph, 1)
        if len(made.order) < len(made):
            raise PrismError("the job hangs, so it has no iteration time", fix="prism check")
        self._flatten(made, timeline.durations_of(made, prices))

    def _flatten(self, made: dags.Dag, durations: np.ndarray) -> None:
        """Nodes in topological order, so that one sample is one pass over plain arrays."""
        order = made.order
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        counts = np.diff(made.start)[order]
        self._start = np.concatenate(([0], np.cumsum(counts)))
        parts = [made.before[made.start[n] : made.start[n + 1]] for n in order.tolist()]
        self._before = place[np.concatenate(parts)] if parts else np.empty(0, dtype=np.int64)
        owner = np.where(made.kind == dags.COMPUTE, made.owner, -2)
        owner = np.where(made.kind == dags.MEET, -1, owner)
        self._owner = owner[order].astype(np.int64)
        self._lasts = durations[order].astype(np.float64)

    def draw(
        self, spread: Variability, count: int, slow: tuple[int, float] | None = None
    ) -> np.ndarray:
        """Iteration times of ``count`` replicas, ns, ascending; ``slow`` (class, factor) makes one
        rank of a class slower."""
        rng = np.random.default_rng(self.seed)
        classes = len(self.members)
        sigma = math.hypot(spread.gpu, spread.step)
        factors = np.empty((count, classes))
        for index, members in enumerate(self.members):
            draws = np.exp(sigma * rng.standard_normal((count, members)))
            if slow is not None and slow[0] == index:
                draws[:, 0] *= slow[1]
            factors[:, index] = draws.max(axis=1)
        network = np.exp(spread.network * rng.standard_normal(count))
        calls = np.exp(spread.call * rng.standard_normal(_CALLS))
        found = np.empty(count)
        arguments = [self._lasts, self._owner, self._start, self._before, factors, network, calls]
        kernels._compiled(_samples)(*arguments, found)
        return np.sort(found)


def _samples(lasts, owner, start, before, factors, network, calls, found):  # type: ignore[no-untyped-def]
    n = len(lasts)
    end = np.zeros(n)
    for sample in range(len(found)):
        longest = 0.0
        for node in range(n):
            latest = 0.0
            for edge in range(start[node], start[node + 1]):
                if end[before[edge]] > latest:
                    latest = end[before[edge]]
            if owner[node] >= 0:
                latest += lasts[node] * factors[sample, owner[node]]
            elif owner[node] == -1:
                pick = (node * 40503 + sample * 30011 + (node ^ sample) * 7919) & (len(calls) - 1)
                latest += lasts[node] * network[sample] * calls[pick]
            end[node] = latest
            if latest > longest:
                longest = latest
        found[sample] = longest


def _replicas(graph: WorldGraph) -> tuple[int, tuple[int, ...]]:
    """(independent replicas, members of each class in one).  PrismError if they are not alike."""
    world = graph.programs.world
    etp = world.tp if world.etp is None else world.etp
    together = math.lcm(world.tp * world.cp, etp * world.ep)
    count = world.size // (world.pp * together)
    for index, ranks in enumerate(graph.classes.counts):
        if ranks % count:
            head = graph.classes.representatives[index]
            raise PrismError(
                f"the {count} replicas of the model are not alike: class {index} (rank {head} and "
                f"{ranks - 1} more) is not in each of them",
                fix="predict the world without its odd ranks; slow=FACTOR makes one slower",
            )
    return count, tuple(ranks // count for ranks in graph.classes.counts)


def needed(level: float, replicas: int) -> int:
    """How many replicas must be drawn to know this quantile of the slowest of ``replicas``."""
    return math.ceil(10 / min(1 - level ** (1 / replicas), level ** (1 / replicas)))


def quantile(times: np.ndarray, level: float, replicas: int) -> Quantile:
    """A quantile of the slowest of ``replicas``, from ascending times of single ones.

    The interval is that of the order statistic (binomial, normal approximation).
    """
    n, p = len(times), level ** (1 / replicas)
    wanted = needed(level, replicas)
    if n < wanted:
        return Quantile(level, None, None, None, wanted)
    half = _Z * math.sqrt(n * p * (1 - p))
    low, high = max(0, math.floor(n * p - half)), min(n - 1, math.ceil(n * p + half))
    at = min(n - 1, math.floor(n * p))
    return Quantile(level, float(times[at]), float(times[low]), float(times[high]), wanted)


def _with_one(times: np.ndarray, odd: np.ndarray, level: float, replicas: int) -> float:
    """The quantile if one replica is drawn from ``odd`` and the others from ``times``, ns."""
    points = np.union1d(times, odd)
    below = np.searchsorted(times, points, side="right") / len(times)
    chance = np.searchsorted(odd, points, side="right") / len(odd) * below ** (replicas - 1)
    return float(points[min(len(points) - 1, np.searchsorted(chance, level))])


def predict(
    graph: WorldGraph,
    prices: Prices,
    spread: Variability,
    *,
    samples: int | None = None,
    seed: int = 0,
    levels: Sequence[float] = QUANTILES,
    slow_by: float = 1.2,
) -> Prediction:
    """The distribution of an iteration's time.

    samples : single replicas to draw; default as many as the highest level needs
    Raises UsageError for levels outside (0, 1) or fewer than 100 samples, PrismError for worlds
    whose replicas are not alike.
    """
    if any(not 0 < level < 1 for level in levels) or slow_by <= 0:
        raise UsageError("quantiles are between 0 and 1, and slow is a factor", fix="slow=1.2")
    sampler = Sampler(graph, prices, seed)
    replicas = sampler.replicas
    count = samples or max(2000, *(needed(level, replicas) for level in levels))
    if count < 100:
        raise UsageError(f"{count} samples say little", fix="samples=2000")
    still = replace(spread, **dict.fromkeys(PARTS, 0.0))
    times = sampler.draw(spread, count)
    fewer = min(count, max(2000, needed(0.95, replicas)))
    halved = {}
    for part in PARTS:
        drawn = sampler.draw(replace(spread, **{part: getattr(spread, part) / 2}), fewer)
        halved[part] = quantile(drawn, 0.95, replicas).ns
    slow = {
        index: _with_one(times, sampler.draw(spread, _SLOW, (index, slow_by)), 0.95, replicas)
        for index in range(len(sampler.members))
    }
    return Prediction(
        steady=float(sampler.draw(still, 1)[0]),
        replicas=replicas,
        samples=count,
        seed=seed,
        quantiles=tuple(quantile(times, level, replicas) for level in levels),
        halved=halved,
        slow=slow,
        slow_by=slow_by,
        source=f"{spread.name}: {spread.source}",
    )
