"""Between what must a quantile of the iteration time lie?  Analytic, in milliseconds.

In : a Sampler's paths, a Variability, a level.  Out: Bounds; the distance between them is the
stated error of this solver.

Low: an iteration is at least the longest path in which all computing takes a factor that, in some
replica, every class has a rank above, and all calls one that the network is above; both with chance
1 - level.  Single calls and segments count with a factor that one in 740 is below.
High: an iteration is at most the longest path in which *all* computing takes the largest factor of
all ranks of the world and all calls the network's, plus what single calls and segments exceed x
times their price by, summed over all of them (Meilijson & Nadas 1979: for any x, whatever the
dependence; Markov's inequality makes a quantile of it).  Each of the three parts may fail with a
third of 1 - level, so together they hold with ``level`` (Bonferroni).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatron_prism.costs.distribution import Distribution, probabilities
from megatron_prism.costs.variability import Variability
from megatron_prism.stochastic.sampler import Sampler

__all__ = ["Bounds", "bounds"]

_RARE = np.array([-3.0])
_SPLITS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
_TRIES = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0)


@dataclass(frozen=True)
class Bounds:
    """low <= quantile ``level`` <= high, ns."""

    level: float
    low: float
    high: float


def bounds(sampler: Sampler, spread: Variability, level: float) -> Bounds:
    """Bounds of one quantile of the iteration time of the whole world."""
    return Bounds(level, _low(sampler, spread, level), _high(sampler, spread, level))


def _score(tail: float, of: int = 1) -> float:
    """The standard normal score that the largest of ``of`` draws exceeds with chance ``tail``."""
    one = -math.expm1(math.log1p(-tail) / of)  # of a single draw
    low, high = -9.0, 9.0
    for _ in range(60):
        middle = (low + high) / 2
        if math.erfc(middle / math.sqrt(2)) / 2 > one:
            low = middle
        else:
            high = middle
    return high


def _at(curve: tuple[np.ndarray, np.ndarray], score: float) -> float:
    return float(np.interp(score, *curve))


def _high(sampler: Sampler, spread: Variability, level: float) -> float:
    kinds = _kinds(sampler, spread)
    still = all(_still(one) for _, one, _, _ in kinds)
    hosted = sampler.hosted and not _still(spread.of("host"))
    part = (1 - level) / (2 + hosted + (not still))
    ranks = sampler.replicas * sum(sampler.members)
    compute = _at(spread.curve("gpu", "step"), _score(part, ranks))
    network = _at(spread.curve("network"), _score(part))
    hosts = _at(spread.curve("host"), _score(part, ranks)) if hosted else 1.0
    if still:
        return sampler.steady(compute, network, hosts)
    found = []
    for score in _TRIES:
        over, excess = 0.0, {True: 1.0, False: 1.0}
        for call, one, by, total in kinds:
            reached = 1 + by * (float(one.at(np.array([score]))[0]) - 1)
            excess[call] = max(excess[call], reached)
            over += (network if call else compute) * total * by * _beyond(one, score)
        # any replica may be the slowest: the sum over all of them
        over *= sampler.replicas
        path = sampler.steady(compute * excess[False], network * excess[True], hosts)
        found.append(path + over / part)
    return min(found)


def _kinds(sampler: Sampler, spread: Variability) -> list[tuple[bool, Distribution, float, float]]:
    """(are they calls, their own factors, how much of the deviation counts, ns in total) of every
    kind of node that takes time."""
    found = []
    for number, one in enumerate(sampler.shapes(spread)):
        hosts = sampler.paths.row > len(sampler.members)  # they have no factors of their own
        total = float(sampler.paths.lasts[(sampler.kind == number) & ~hosts].sum())
        if total:
            by = spread.calls_by if number > 1 else 1.0
            found.append((number != 1, one, by, total))
    return found


def _still(one: Distribution) -> bool:
    return float(np.ptp(one.at(np.array([-8.0, 8.0])))) == 0


def _beyond(one: Distribution, score: float) -> float:
    """E (X - x)+ where x is the value at ``score``."""
    grid = np.linspace(score, 9, 2001)
    values = one.at(grid)
    density = np.exp(-grid * grid / 2) / math.sqrt(2 * math.pi)
    over = (values - values[0]) * density
    return float(((over[1:] + over[:-1]) / 2 * np.diff(grid)).sum())


def _low(sampler: Sampler, spread: Variability, level: float) -> float:
    """The best of several splits of the chance between computing and the network."""
    rank, network = spread.curve("gpu", "step"), spread.curve("network")
    least = [1.0, 1.0]  # of segments, of calls
    for call, one, by, _ in _kinds(sampler, spread):
        least[call] = min(least[call], 1 + by * (float(one.at(_RARE)[0]) - 1))
    hosts = min(1.0, float(spread.of("host").at(_RARE)[0]))
    members = np.array(sampler.members, dtype=float)
    scores = np.linspace(-9, 9, 1801)
    logs = np.log(np.maximum(probabilities(scores), 1e-300))
    # the chance that every class of a replica has a rank above each score; that some replica has
    every = np.prod(-np.expm1(logs[:, None] * members), axis=1)
    some = -np.expm1(sampler.replicas * np.log1p(-np.minimum(every, 1 - 1e-16)))
    found = 0.0
    for share in _SPLITS:
        above = 1 - (1 - level) ** share  # the network is above this quantile of its own
        score = float(scores[some >= (1 - level) ** (1 - share)].max(initial=-9.0))
        quiet = float(np.interp(above, probabilities(scores), scores))
        reached = sampler.steady(_at(rank, score) * least[0], _at(network, quiet) * least[1], hosts)
        found = max(found, reached)
    return found
