"""Distributions of durations, fitted from samples; quantiles with intervals that cover.

In : positive samples.  Out: Distribution: normal, gamma or lognormal, whichever is nearest in the
Kolmogorov-Smirnov sense, else the samples themselves.  After PRISM (arXiv 2510.15596), which
chooses among the same three.  A distribution is read at standard normal scores (0: the median,
1.645: p95), so that the largest of n draws is one reading: see ``largest``.

What counts as a fit: the distance is below the 1 % point of the Lilliefors test, 1.031 / sqrt(n)
(parameters come from the same samples; tabled for the normal, asymptotic, used for all three).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np

from megatron_prism.core.errors import PrismError
from megatron_prism.core.units import format_percent

_TAIL = 10  # draws that must lie beyond a quantile for it to be known
_OUTSIDE = 0.05
_Z_95 = 1.959964  # of a two-sided 95 % interval


@dataclass(frozen=True)
class Quantile:
    """One quantile, ns, with its 95 % confidence interval.

    ``ns`` is None where the draws do not reach that far; ``needed`` says how many would.
    """

    level: float
    ns: float | None
    low: float | None
    high: float | None
    needed: int


def needed(level: float) -> int:
    """How many draws it takes to know the quantile ``level``."""
    return math.ceil(round(_TAIL / min(level, 1 - level), 6))


def quantile(times: np.ndarray, level: float) -> Quantile:
    """A quantile of ascending ``times``, with the narrowest pair of order statistics around it
    that holds the true one in 95 % of repetitions or (where draws are few) more.
    """
    n, wanted = len(times), needed(level)
    if n < wanted:
        return Quantile(level, None, None, None, wanted)
    below = _binomial(n, level)
    # ranks (from 0): the true quantile is above times[low] and at most times[high]
    low = int(np.searchsorted(below, _OUTSIDE / 2, side="right")) - 1
    high = int(np.searchsorted(below, 1 - _OUTSIDE / 2))
    low, high = max(0, low), min(n - 1, high)
    at = min(n - 1, math.floor(n * level))
    return Quantile(level, float(times[at]), float(times[low]), float(times[high]), wanted)


def _binomial(n: int, p: float) -> np.ndarray:
    """float64 [n + 1]: the chance of at most k successes of n."""
    k = np.arange(n + 1)
    steps = np.log(np.arange(n, 0, -1)) - np.log(np.arange(1, n + 1))
    choose = np.concatenate(([0.0], np.cumsum(steps)))
    return np.cumsum(np.exp(choose + k * math.log(p) + (n - k) * math.log1p(-p)))


KINDS = ("normal", "gamma", "lognormal", "empirical")
FEWEST = 5  # samples below which nothing is fitted
ENOUGH = 100  # samples from which on they may stand for themselves
_LILLIEFORS = 1.031
_FLOOR = 1e-3  # of the median: no factor is below, whatever a normal's lower tail says
_Z = np.linspace(-9, 9, 3601)


@dataclass(frozen=True)
class Distribution:
    """kind, and its numbers: normal (mean, sd), gamma (shape, scale), lognormal (mean and sd of
    the logarithm), empirical (ascending samples).

    samples  : how many it was fitted to; 0: given, not fitted
    distance : Kolmogorov-Smirnov distance to them, 0 if given
    note     : what a reader must know: widened, the tail unknown; empty if nothing
    """

    kind: str
    numbers: tuple[float, ...]
    samples: int = 0
    distance: float = 0.0
    note: str = ""

    def at(self, scores: np.ndarray) -> np.ndarray:
        """Values at standard normal scores; never below a thousandth of the median."""
        if self.kind == "lognormal":
            return np.exp(self.numbers[0] + self.numbers[1] * scores)
        if self.kind == "normal":
            mean, sd = self.numbers
            return np.maximum(mean + sd * scores, _FLOOR * mean)
        if self.kind == "gamma":
            shape, scale = self.numbers
            x, below = _gamma(shape)
            found: np.ndarray = scale * np.interp(probabilities(scores), below, x)
            return found
        n = len(self.numbers)
        even: np.ndarray = np.interp(probabilities(scores), (np.arange(n) + 0.5) / n, self.numbers)
        return even

    def below(self, values: np.ndarray) -> np.ndarray:
        """The chance of at most ``values``."""
        if self.kind == "lognormal":
            return probabilities((np.log(values) - self.numbers[0]) / max(self.numbers[1], 1e-12))
        if self.kind == "normal":
            return probabilities((values - self.numbers[0]) / max(self.numbers[1], 1e-300))
        if self.kind == "gamma":
            shape, scale = self.numbers
            found: np.ndarray = np.interp(np.asarray(values) / scale, *_gamma(shape))
            return found
        return np.searchsorted(self.numbers, values, side="right") / len(self.numbers)

    @property
    def spread(self) -> float:
        """Half the way from score -1 to score 1, over the median: the relative deviation."""
        low, middle, high = self.at(np.array([-1.0, 0.0, 1.0])).tolist()
        return float((high - low) / 2 / middle)

    def __str__(self) -> str:
        said = f"{self.kind}, spread {format_percent(self.spread)}"
        if self.samples:
            said += f", {self.samples} samples, KS {self.distance:.3f}"
        return f"{said} ({self.note})" if self.note else said


def fit(samples: Iterable[float], what: str = "the duration", enough: int = ENOUGH) -> Distribution:
    """The distribution of ``samples``.

    PrismError for fewer than 5, and for samples that are not finite or not above 0.  Samples that
    no candidate fits stand for themselves if there are ``enough``; fewer are widened: a lognormal
    whose tail reaches the slowest one seen.
    """
    values = np.sort(np.asarray(list(samples), dtype=np.float64))
    n = len(values)
    if n < FEWEST:
        message = f"{what} has {n} samples; a distribution needs {FEWEST} at least"
        raise PrismError(message, fix="time more iterations, or --variability public")
    if not np.isfinite(values).all() or values[0] <= 0:
        wrong = values[~(np.isfinite(values) & (values > 0))][0]
        message = f"{what} has a sample of {wrong:g}, and durations are above 0"
        raise PrismError(message, fix="capture again, or leave that sample out")
    if values[0] == values[-1]:
        return Distribution("lognormal", (math.log(values[0]), 0.0), n, 0.0, "all samples equal")
    found = [Distribution(kind, _numbers(kind, values), n) for kind in KINDS[:3]]
    far = [distance(one, values) for one in found]
    best = int(np.argmin(far))
    if far[best] <= _LILLIEFORS / math.sqrt(n):
        return Distribution(found[best].kind, found[best].numbers, n, far[best])
    why = f"none of normal, gamma, lognormal fits: the nearest is {far[best]:.2f} away"
    if n >= enough:
        note = f"{why}; samples as they are, nothing known beyond the slowest"
        return Distribution("empirical", tuple(values.tolist()), n, 0.0, note)
    middle = math.log(float(np.median(values)))
    score = float(np.interp(1 - 0.5 / n, probabilities(_Z), _Z))
    reach = max(math.log(values[-1]) - middle, middle - math.log(values[0])) / score
    wide = Distribution("lognormal", (middle, max(reach, float(np.log(values).std()))), n)
    return Distribution(
        wide.kind, wide.numbers, n, distance(wide, values), f"{why}; widened to the extremes seen"
    )


def _numbers(kind: str, values: np.ndarray) -> tuple[float, float]:
    """Maximum likelihood; the gamma's shape by Minka's approximation (2002, within 1.5 %)."""
    if kind == "normal":
        return float(values.mean()), float(values.std(ddof=1))
    logs = np.log(values)
    if kind == "lognormal":
        return float(logs.mean()), float(logs.std(ddof=1))
    s = max(math.log(values.mean()) - float(logs.mean()), 1e-12)
    shape = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    return shape, float(values.mean()) / shape


def distance(one: Distribution, values: np.ndarray) -> float:
    """Kolmogorov-Smirnov: the largest gap between ``one`` and ascending ``values``."""
    n, below = len(values), one.below(values)
    steps = np.arange(n + 1) / n
    return float(max((steps[1:] - below).max(), (below - steps[:-1]).max()))


@cache
def _normal() -> tuple[np.ndarray, np.ndarray]:
    """(chance of less, its logarithm) at the scores _Z; precise in both tails."""
    tail = np.array([math.erfc(abs(z) / math.sqrt(2)) / 2 for z in _Z.tolist()])
    below = np.where(_Z > 0, 1 - tail, tail)
    return below, np.where(_Z > 0, np.log1p(-tail), np.log(tail))


def probabilities(scores: np.ndarray) -> np.ndarray:
    """The chance of at most these standard normal scores."""
    found: np.ndarray = np.interp(scores, _Z, _normal()[0])
    return found


def largest(rng: np.random.Generator, of: int, shape: tuple[int, ...]) -> np.ndarray:
    """Scores of the largest of ``of`` independent draws: exact, one random number each."""
    if of == 1:
        return rng.standard_normal(shape)
    return np.interp(-rng.standard_exponential(shape) / of, _normal()[1], _Z)


@cache
def _gamma(shape: float) -> tuple[np.ndarray, np.ndarray]:
    """(x, chance of at most x) of a gamma of scale 1: its density summed over log x."""
    low = -(60 / shape + 1) if shape < 30 else -math.sqrt(150 / shape)
    high = math.log(60 / shape + 8) if shape < 30 else math.sqrt(150 / shape)
    u = np.linspace(low, high, 8001)
    # of u = ln(x / shape), so that a density without bound at 0 is no trouble
    density = np.exp(shape * (u + 1 - np.exp(u)))
    below = np.concatenate(([0.0], np.cumsum(density[1:] + density[:-1])))
    return shape * np.exp(u), below / below[-1]
