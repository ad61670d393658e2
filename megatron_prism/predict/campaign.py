"""Predict whether N iterations finish by a deadline, with failures, checkpoints and restarts.

In : a Sampler, a Variability, a Plan.  Out: RunPrediction.  A run has one cluster, whose slow GPUs
stay slow: its iterations add up to N times its own mean, so clusters are drawn, and iterations of
each.  Failures of the job come at random, ``mtbf`` apart on average (exponential); each throws away
what was done since the last checkpoint and takes a restart, which may fail too.  The time between
two checkpoints is a renewal: its mean is Daly's closed form (2006, eq. 14), its distribution is
drawn exactly: how many failures (negative binomial), when each of them came (cut exponential).

Not in it: failures that come in bursts, repairs that leave fewer GPUs, checkpoints written beside
the training.  Times are floats (ns).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_prism.core.errors import PrismError, UsageError
from megatron_prism.predict.distributions import proportion
from megatron_prism.predict.sampler import Sampler
from megatron_prism.predict.variability import Variability

__all__ = [
    "Campaign",
    "RunPrediction",
    "best_interval",
    "check_campaign",
    "daly",
    "expected",
    "finish",
    "predict_run",
    "young",
]

_CLUSTERS, _ITERATIONS = 48, 24  # that are drawn
_RUNS = 10_000
_HOPELESS = 30.0  # times the mtbf between checkpoints: e^30 tries
_FAILURES = 50_000  # of a run on average: each one is drawn, in every run
_FEW = 1000  # iterations up to which their times are added one by one, not as a normal
_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Campaign:
    """A run; durations in ns.

    deadline   : from the start; None: only how long it takes
    mtbf       : of the whole job; None: it never fails
    interval   : of work between checkpoints; None: the best one
    checkpoint : what writing one takes; restart: from a failure to the first new iteration
    """

    iterations: int
    deadline: float | None = None
    mtbf: float | None = None
    interval: float | None = None
    checkpoint: float = 0.0
    restart: float = 0.0


@dataclass(frozen=True)
class RunPrediction:
    """chance : of finishing by the deadline, with a 95 % interval; None without a deadline
    quantiles : (level, ns) of the time to the last iteration
    iteration : mean ns of an iteration
    work      : mean ns of all iterations alone
    failures  : mean number of them
    interval  : ns of work between checkpoints; best: the one with the least mean time; young, daly:
                the approximations; None where nothing fails
    expected  : mean ns in closed form, to hold against ``mean``, that of the draws
    """

    plan: Campaign
    chance: float | None
    chance_low: float | None
    chance_high: float | None
    quantiles: tuple[tuple[float, float], ...]
    mean: float
    iteration: float
    work: float
    failures: float
    interval: float | None
    best: float | None
    young: float | None
    daly: float | None
    expected: float


def young(checkpoint: float, mtbf: float) -> float:
    """Young's interval (1974), ns of work."""
    return math.sqrt(2 * checkpoint * mtbf)


def daly(checkpoint: float, mtbf: float) -> float:
    """Daly's interval of higher order (2006, eq. 37), ns of work."""
    if checkpoint >= 2 * mtbf:
        return mtbf
    part = checkpoint / (2 * mtbf)
    return young(checkpoint, mtbf) * (1 + math.sqrt(part) / 3 + part / 9) - checkpoint


def best_interval(checkpoint: float, mtbf: float) -> float:
    """The interval of work with the least mean time, exactly: x of (1 - x) e^x = e^-c, where x is
    the interval and c the checkpoint in mtbfs (Daly's eq. 14 with its derivative 0)."""
    low, high = 0.0, 1.0
    for _ in range(100):
        x = (low + high) / 2
        if x < 1 and math.log1p(-x) + x > -checkpoint / mtbf:
            low = x
        else:
            high = x
    return low * mtbf


def expected(work: float, plan: Campaign, interval: float) -> float:
    """Mean ns to do ``work``, checkpoints, failures and restarts included; the last stretch ends
    the run, without a checkpoint."""
    stretches, last = _stretches(work, interval)
    if plan.mtbf is None:
        return work + stretches * plan.checkpoint

    def one(length: float) -> float:
        assert plan.mtbf is not None
        return plan.mtbf * math.exp(plan.restart / plan.mtbf) * math.expm1(length / plan.mtbf)

    return stretches * one(interval + plan.checkpoint) + one(last)


def _stretches(work: float, interval: float) -> tuple[int, float]:
    """(those that end with a checkpoint, ns of the last one)."""
    count = max(0, math.ceil(work / interval) - 1) if math.isfinite(interval) else 0
    return count, work - count * interval if count else work


def finish(
    work: np.ndarray, plan: Campaign, interval: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(ns to the end, failures) of a run for each ``work``, ns."""
    pairs = [_stretches(one, interval) for one in work.tolist()]
    count, last = np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])
    took = work + count * plan.checkpoint
    if plan.mtbf is None:
        return took, np.zeros(len(work), dtype=np.int64)
    full = np.full(len(work), interval + plan.checkpoint if count.any() else 1.0)
    failures = np.zeros(len(work), dtype=np.int64)
    for stretches, length in ((count, full), (np.ones_like(count), last)):
        failed = _failures(stretches, length / plan.mtbf, rng)
        took += _wasted(failed, length, plan.mtbf, rng)
        failures += failed
    if plan.restart:
        ratio = np.full(len(work), plan.restart / plan.mtbf)
        again = _failures(failures, ratio, rng)
        took += failures * plan.restart
        took += _wasted(again, np.full(len(work), plan.restart), plan.mtbf, rng)
        failures = failures + again
    return took, failures


def _failures(count: np.ndarray, ratio: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Failures until ``count`` stretches of ``ratio`` mtbfs each have been got through."""
    found = np.zeros(len(count), dtype=np.int64)
    some = count > 0
    found[some] = rng.negative_binomial(count[some], np.exp(-ratio[some]))
    return found


def _wasted(
    failed: np.ndarray, length: np.ndarray, mtbf: float, rng: np.random.Generator
) -> np.ndarray:
    """ns thrown away by that many failures in stretches of ``length``."""
    found = np.zeros(len(failed))
    ends = np.cumsum(failed)
    first = 0
    while first < len(failed):  # some runs at a time, so that memory stays small
        before = ends[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + _AT_ONCE, side="right")))
        part = slice(first, last)
        reach = np.repeat(-np.expm1(-length[part] / mtbf), failed[part])
        lost = -mtbf * np.log1p(-rng.random(len(reach)) * reach)
        owner = np.repeat(np.arange(last - first), failed[part])
        found[part] = np.bincount(owner, lost, minlength=last - first)
        first = last
    return found


def predict_run(
    sampler: Sampler,
    spread: Variability,
    plan: Campaign,
    *,
    progress: Callable[[float], object] | None = None,
) -> RunPrediction:
    """The distribution of the time that the run takes.

    UsageError for plans that cannot be: a deadline before the first iteration, checkpoints so rare
    that the job never gets to one.
    """
    check_campaign(plan)
    drawn = np.empty((_CLUSTERS, _ITERATIONS))
    for cluster in range(_CLUSTERS):
        drawn[cluster] = sampler.of_cluster(spread, cluster, _ITERATIONS)
        if progress is not None:
            progress((cluster + 1) / _CLUSTERS)
    mean = float(drawn.mean())
    if plan.deadline is not None and plan.deadline < drawn.min():
        raise UsageError(
            f"the deadline, {plan.deadline / 1e9:g} s, is before the end of the first iteration, "
            f"which takes {mean / 1e9:.3g} s",
            fix="deadline=30d",
        )
    interval, best = _interval(plan, mean)
    rng = np.random.default_rng([sampler.seed, 1 << 41])
    which = np.arange(_RUNS) % _CLUSTERS
    alike = spread.of("gpu").spread == 0 and spread.slow_gpu[0] == 0
    work = _work(drawn, which, plan.iterations, rng, alike)
    _check_failures(expected(float(work.mean()), plan, interval), plan)
    took, failures = finish(work, plan, interval, rng)
    chance, low, high = None, None, None
    if plan.deadline is not None:
        chance, low, high = _chance(took <= plan.deadline, which)
    failing = plan.mtbf is not None and plan.checkpoint > 0
    return RunPrediction(
        plan,
        chance,
        low,
        high,
        quantiles=tuple((q, float(np.quantile(took, q))) for q in (0.05, 0.5, 0.95, 0.99)),
        mean=float(took.mean()),
        iteration=mean,
        work=float(work.mean()),
        failures=float(failures.mean()),
        interval=interval if math.isfinite(interval) else None,
        best=best,
        young=young(plan.checkpoint, plan.mtbf or 0.0) if failing else None,
        daly=daly(plan.checkpoint, plan.mtbf or 1.0) if failing else None,
        expected=expected(float(work.mean()), plan, interval),
    )


def check_campaign(plan: Campaign) -> None:
    """UsageError for a plan that cannot be."""
    if plan.iterations < 1:
        raise UsageError("a run has iterations", fix="iterations=500000")
    for name in ("deadline", "mtbf", "interval"):
        value = getattr(plan, name)
        if value is not None and not value > 0:
            raise UsageError(f"{name} is {value:g} ns", fix="a duration above 0: 30d, 3h, 10min")
    if plan.checkpoint < 0 or plan.restart < 0:
        raise UsageError("a cost is negative", fix="checkpoint_cost=30s restart=10min")


def _check_failures(took: float, plan: Campaign) -> None:
    """PrismError for a run of ``took`` ns that fails more often than can be drawn."""
    if plan.mtbf is not None and took > _FAILURES * plan.mtbf:
        often = f"{took / plan.mtbf:,.0f} times, once in {plan.mtbf / 1e9:g} s"
        raise PrismError(f"the job would fail {often}; more than {_FAILURES:,} are not drawn",
                         fix="mtbf= of the whole job; restart= well below it")  # fmt: skip


def _interval(plan: Campaign, iteration: float) -> tuple[float, float | None]:
    """(ns of work between checkpoints, whole iterations; the best)."""
    best = None
    if plan.mtbf is not None:
        best = best_interval(plan.checkpoint, plan.mtbf) if plan.checkpoint else iteration
    chosen = plan.interval or best
    if chosen is None:
        return math.inf, None
    chosen = max(1, round(chosen / iteration)) * iteration
    longest = chosen + plan.checkpoint
    if plan.mtbf is not None and max(longest, plan.restart) > _HOPELESS * plan.mtbf:
        raise PrismError(
            f"with a failure every {plan.mtbf / 1e9:g} s on average the job never gets through "
            f"{max(longest, plan.restart) / 1e9:g} s without one",
            fix="checkpoint=best, or a job that fails less often",
        )
    return chosen, best


def _work(
    drawn: np.ndarray, which: np.ndarray, iterations: int, rng: np.random.Generator, alike: bool
) -> np.ndarray:
    """ns of all iterations of runs on the clusters ``which``; ``alike``: all clusters are.

    Few iterations are drawn again from the cluster's own; many add up to a normal about N times the
    cluster's mean.  A mean of few draws varies more than the truth: it is drawn in by as much.
    """
    if iterations <= _FEW:
        found = np.empty(len(which))
        for i, cluster in enumerate(which.tolist()):
            found[i] = drawn[cluster, rng.integers(0, drawn.shape[1], iterations)].sum()
        return found
    means, spreads = drawn.mean(axis=1), drawn.std(axis=1, ddof=1)
    seen, noise = means.var(ddof=1), float((spreads**2).mean()) / drawn.shape[1]
    kept = math.sqrt(max(0.0, 1 - noise / seen)) if seen > 0 and not alike else 0.0
    means = means.mean() + kept * (means - means.mean())
    wobble = math.sqrt(iterations) * spreads[which] * rng.standard_normal(len(which))
    return np.asarray(iterations * means[which] + wobble)


def _chance(met: np.ndarray, which: np.ndarray) -> tuple[float, float, float]:
    """(chance, its 95 % interval): runs of one cluster are no independent witnesses."""
    each = np.bincount(which, met) / np.bincount(which)
    chance, runs = float(met.mean()), len(met)
    between = float(each.var(ddof=1)) / len(each)
    worth = len(each) if not 0 < chance < 1 else chance * (1 - chance) / max(between, 1e-12)
    worth = int(min(runs, max(len(each), worth)))
    low, high = proportion(round(chance * worth), worth)
    return chance, low, high
