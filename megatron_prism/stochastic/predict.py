"""How long do iterations take, what moves the slow ones, and where does a slow GPU hurt?

In : a WorldGraph, Prices and a Variability.  Out: Prediction: quantiles of the iteration time over
clusters and iterations, with confidence intervals, and the same after one change at a time.
Variance does not add up along a graph of maxima, so every change is simulated, not derived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_prism.costs import Prices
from megatron_prism.costs.variability import PARTS, Variability
from megatron_prism.errors import UsageError
from megatron_prism.graph import WorldGraph
from megatron_prism.stochastic.bounds import Bounds, bounds
from megatron_prism.stochastic.calls import CallSpread
from megatron_prism.stochastic.quantiles import Quantile, quantile
from megatron_prism.stochastic.sampler import Sampler, Slow

__all__ = ["QUANTILES", "Prediction", "busiest", "p95", "predict", "with_slow", "worth"]

QUANTILES = (0.05, 0.5, 0.95, 0.99)
FEWEST = 100
_DRAWS = 1 << 20  # replicas that a prediction draws, if nobody says how many iterations
_FEW_DRAWS = 1 << 17  # of a what-if of all replicas
_SLOWEST = 1000  # times: beyond it, a GPU is not slow but stuck
_MOST, _LEAST = 10_000, 1_000  # iterations
_LEAST_WHATIF = 400
_NODES = 5e10  # visits of nodes that a prediction may cost, about a minute
CLASSES = 64  # in which one rank is made slow: those that compute longest


@dataclass(frozen=True)
class Prediction:
    """The distribution of the iteration time.

    steady    : ns without any variation (the longest path)
    replicas  : independent copies of the model
    samples   : iterations of the whole world that were drawn
    quantiles : of an iteration
    bounds    : per quantile, analytic: the true one is between them
    times     : every 1/200 of the distribution from 0.5 % to 99.5 %, ns
    halved    : part of the variability -> p95 if its spread were half, ns
    halved_from : p95 of as few draws as ``halved`` rests on, to compare with
    slow      : class -> p95 if one of its ranks took ``slow_by`` times as long, ns; of the 64
                classes that compute longest; slow_from: p95 without, of the same draws
    """

    steady: float
    replicas: int
    samples: int
    seed: int
    quantiles: tuple[Quantile, ...]
    bounds: tuple[Bounds, ...]
    times: tuple[float, ...]
    halved: Mapping[str, float]
    halved_from: float
    slow: Mapping[int, float]
    slow_from: float
    slow_by: float
    source: str


def predict(
    graph: WorldGraph,
    prices: Prices,
    spread: Variability,
    *,
    samples: int | None = None,
    seed: int = 0,
    levels: Sequence[float] = QUANTILES,
    slow_by: float = 1.2,
    calls: CallSpread | None = None,
    progress: Callable[[float], object] | None = None,
) -> Prediction:
    """The distribution of an iteration's time.

    calls    : what samples say of single calls
    samples  : iterations to draw; default 1,000 to 10,000, fewer the more replicas there are
    progress : is told the part of the work that is done, 0 to 1
    UsageError for levels outside (0, 1) or fewer than 100 samples, PrismError if the job hangs.
    """
    if any(not 0 < level < 1 for level in levels) or not 0 < slow_by <= _SLOWEST:
        raise UsageError(f"slow is a factor up to {_SLOWEST:,}, quantiles < 1", fix="slow=1.2")
    sampler = Sampler(graph, prices, seed, calls)
    count, affordable = worth(sampler, samples), _affordable(sampler)
    few, chosen = min(count, max(_LEAST_WHATIF, _FEW_DRAWS // sampler.replicas)), busiest(sampler)
    tried = min(count, max(_LEAST_WHATIF, affordable // 8 // len(chosen)))
    parts = [part for part in PARTS if part != "host" or sampler.hosted and spread.host]
    work = count * sampler.replicas + (len(parts) * sampler.replicas * few) + len(chosen) * tried
    done = 0

    def more(draws: int) -> None:
        nonlocal done
        done += draws
        if progress is not None:
            progress(done / work)

    each = sampler.draw(spread, count, progress=more)
    times = np.sort(each.max(axis=1))
    halved = {
        part: p95(sampler.draw(spread.scaled(part, 0.5), few, progress=more).max(axis=1))
        for part in parts
    }
    slow = {
        index: p95(with_slow(sampler, spread, each[:tried], {0: {index: (1, slow_by)}}, more))
        for index in chosen
    }
    return Prediction(
        steady=sampler.steady(),
        replicas=sampler.replicas,
        samples=count,
        seed=seed,
        quantiles=tuple(quantile(times, level) for level in levels),
        bounds=tuple(bounds(sampler, spread, level) for level in levels),
        times=tuple(np.quantile(times, np.linspace(0.005, 0.995, 199)).tolist()),
        halved=halved,
        halved_from=p95(each[:few].max(axis=1)),
        slow=slow,
        slow_from=p95(each[:tried].max(axis=1)),
        slow_by=slow_by,
        source=f"{spread.name}: {spread.source}",
    )


def _affordable(sampler: Sampler) -> int:
    """Replicas that a prediction may draw."""
    return int(min(_DRAWS, _NODES / max(1, len(sampler.paths.lasts))))


def worth(sampler: Sampler, samples: int | None) -> int:
    """How many iterations to draw, if nobody says how many (``samples``).  UsageError for few."""
    count = samples or min(_MOST, max(_LEAST, _affordable(sampler) // sampler.replicas))
    if count < FEWEST:
        raise UsageError(f"{count} samples say little", fix="samples=2000")
    return count


def busiest(sampler: Sampler) -> list[int]:
    """The 64 classes that compute longest, ascending."""
    rows, lasts = sampler.paths.row, sampler.paths.lasts
    total = np.bincount(rows, lasts, minlength=len(sampler.members))[: len(sampler.members)]
    return sorted(np.argsort(-total, kind="stable")[:CLASSES].tolist())


def p95(times: np.ndarray) -> float:
    """The 95 % quantile, as ``quantile`` picks it."""
    return float(np.sort(times)[min(len(times) - 1, int(0.95 * len(times)))])


def with_slow(
    sampler: Sampler,
    spread: Variability,
    each: np.ndarray,
    slow: Mapping[int, Slow],
    progress: Callable[[int], object] | None = None,
) -> np.ndarray:
    """Iteration times, ns [count], if some ranks of some replicas are slow: those are drawn again,
    the others are as in ``each`` [count, replicas]."""
    others = np.delete(each, list(slow), axis=1)
    found = others.max(axis=1) if others.size else np.zeros(len(each))
    for replica, what in slow.items():
        one = sampler.draw(
            spread, len(each), slow=what, replicas=range(replica, replica + 1), progress=progress
        )
        np.maximum(found, one[:, 0], out=found)
    return found
