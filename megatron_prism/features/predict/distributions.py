"""Distributions of durations, fitted from samples; quantiles with intervals that cover.

In : positive samples.  Out: Distribution: normal, gamma or lognormal, whichever is nearest in the
Kolmogorov-Smirnov sense, else the samples themselves.  After PRISM (arXiv 2510.15596), which
chooses among the same three.  A distribution is read at standard normal scores (0: the median,
1.645: p95), so that the largest of n draws is one reading: see ``largest``.

What counts as a fit: the distance is below the 1 % point of the Lilliefors test, 1.031 / sqrt(n)
(parameters come from the same samples; tabled for the normal, asymptotic, used for all three).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np

from megatron_prism.core.errors import PrismError
from megatron_prism.core.units import format_percent

_TAIL = 10  # draws that must lie beyond a quantile for it to be known
_OUTSIDE = 0.05  # chance that an interval does not hold the true quantile


@dataclass(frozen=True)
class Quantile:
    """One quantile with its 95 % confidence interval.

    Attributes:
        level: Between 0 and 1.
        ns: None where the draws do not reach that far.
        low: Where the interval begins, ns.
        high: Where it ends, ns.
        needed: How many draws it takes.
    """

    level: float
    ns: float | None
    low: float | None
    high: float | None
    needed: int


def needed(level: float) -> int:
    """Return how many draws it takes to know the quantile ``level``."""
    smaller_side = min(level, 1 - level)
    return math.ceil(round(_TAIL / smaller_side, 6))


def quantile(times: np.ndarray, level: float) -> Quantile:
    """Return a quantile, and the narrowest pair of order statistics that surely holds it.

    Surely: in 95 % of repetitions or, where draws are few, more.

    Args:
        times: Draws in ns, ascending.
        level: Between 0 and 1.
    """
    count = len(times)
    needed_count = needed(level)
    # a quantile that rests on a few draws would look as sure as the others
    if count < needed_count:
        return Quantile(level, None, None, None, needed_count)
    chance_of_at_most = _binomial(count, level)
    # places: the true quantile is above times[low] and at most times[high]
    low = int(np.searchsorted(chance_of_at_most, _OUTSIDE / 2, side="right")) - 1
    high = int(np.searchsorted(chance_of_at_most, 1 - _OUTSIDE / 2))
    place = min(count - 1, math.floor(count * level))
    low_ns = float(times[max(0, low)])
    high_ns = float(times[min(count - 1, high)])
    return Quantile(level, float(times[place]), low_ns, high_ns, needed_count)


def _binomial(n: int, p: float) -> np.ndarray:
    """Return the chance of at most k successes of n: float64 [n + 1]."""
    k = np.arange(n + 1)
    steps = np.log(np.arange(n, 0, -1)) - np.log(np.arange(1, n + 1))
    log_choices = np.concatenate(([0.0], np.cumsum(steps)))
    log_chances = log_choices + k * math.log(p) + (n - k) * math.log1p(-p)
    return np.cumsum(np.exp(log_chances))


KINDS = ("normal", "gamma", "lognormal", "empirical")
_CANDIDATES = KINDS[:3]
FEWEST = 5  # samples below which nothing is fitted
ENOUGH = 100  # samples from which on they may stand for themselves
_LILLIEFORS = 1.031
_FLOOR = 1e-3  # of the median: no factor is below, whatever a normal's lower tail says
_Z = np.linspace(-9, 9, 3601)


@dataclass(frozen=True)
class Distribution:
    """A distribution of durations, or of factors of them.

    Attributes:
        kind: One of KINDS.
        numbers: normal (mean, sd), gamma (shape, scale), lognormal (mean and sd of the logarithm),
            empirical (ascending samples).
        samples: How many it was fitted to; 0: given, not fitted.
        distance: Kolmogorov-Smirnov distance to them, 0 if given.
        note: What a reader must know: widened, the tail unknown; empty if nothing.
    """

    kind: str
    numbers: tuple[float, ...]
    samples: int = 0
    distance: float = 0.0
    note: str = ""

    def at(self, scores: np.ndarray) -> np.ndarray:
        """Return values at standard normal scores; never below a thousandth of the median."""
        if self.kind == "lognormal":
            return np.exp(self.numbers[0] + self.numbers[1] * scores)
        if self.kind == "normal":
            mean, sd = self.numbers
            return np.maximum(mean + sd * scores, _FLOOR * mean)
        if self.kind == "gamma":
            shape, scale = self.numbers
            x, chances = _gamma(shape)
            values: np.ndarray = scale * np.interp(probabilities(scores), chances, x)
            return values
        count = len(self.numbers)
        even_chances = (np.arange(count) + 0.5) / count
        samples: np.ndarray = np.interp(probabilities(scores), even_chances, self.numbers)
        return samples

    def below(self, values: np.ndarray) -> np.ndarray:
        """Return the chance of at most ``values``."""
        if self.kind == "lognormal":
            mean, sd = self.numbers
            return probabilities((np.log(values) - mean) / max(sd, 1e-12))
        if self.kind == "normal":
            mean, sd = self.numbers
            return probabilities((values - mean) / max(sd, 1e-300))
        if self.kind == "gamma":
            shape, scale = self.numbers
            x, chances = _gamma(shape)
            chance: np.ndarray = np.interp(np.asarray(values) / scale, x, chances)
            return chance
        return np.searchsorted(self.numbers, values, side="right") / len(self.numbers)

    @property
    def spread(self) -> float:
        """Half the way from score -1 to score 1, over the median: the relative deviation."""
        low, median, high = self.at(np.array([-1.0, 0.0, 1.0])).tolist()
        return float((high - low) / 2 / median)

    def __str__(self) -> str:
        """Say the distribution, and how well it fits."""
        text = f"{self.kind}, spread {format_percent(self.spread)}"
        if self.samples:
            text += f", {self.samples} samples, KS {self.distance:.3f}"
        return f"{text} ({self.note})" if self.note else text


def fit(samples: Iterable[float], what: str = "the duration", enough: int = ENOUGH) -> Distribution:
    """Fit a distribution to samples.

    Args:
        samples: Durations, or factors of them.
        what: The samples are, for messages.
        enough: So many samples that no candidate fits stand for themselves.  Fewer are widened: a
            lognormal whose tail reaches the slowest one seen.

    Raises:
        PrismError: Fewer than 5 samples, or such as are not finite or not above 0.
    """
    values = np.sort(np.asarray(list(samples), dtype=np.float64))
    _check_samples(values, what)
    count = len(values)
    # without a spread neither a gamma's shape nor a distance is defined
    if values[0] == values[-1]:
        logarithm = math.log(values[0])
        return Distribution("lognormal", (logarithm, 0.0), count, 0.0, "all samples equal")
    candidates: list[Distribution] = []
    for kind in _CANDIDATES:
        candidate = Distribution(kind, _numbers(kind, values), count)
        far = distance(candidate, values)
        candidates.append(dataclasses.replace(candidate, distance=far))
    nearest = min(candidates, key=lambda candidate: candidate.distance)
    if nearest.distance <= _LILLIEFORS / math.sqrt(count):
        return nearest
    reason = f"none of normal, gamma, lognormal fits: the nearest is {nearest.distance:.2f} away"

    # many samples stand for themselves
    if count >= enough:
        note = f"{reason}; samples as they are, nothing known beyond the slowest"
        return Distribution("empirical", tuple(values.tolist()), count, 0.0, note)
    wide = Distribution("lognormal", _widened_to_extremes(values), count)
    note = f"{reason}; widened to the extremes seen"
    return dataclasses.replace(wide, distance=distance(wide, values), note=note)


def _check_samples(values: np.ndarray, what: str) -> None:
    """Raise PrismError for ascending samples to which nothing can be fitted."""
    count = len(values)
    if count < FEWEST:
        message = f"{what} has {count} samples; a distribution needs {FEWEST} at least"
        raise PrismError(message, fix="time more iterations, or --variability public")
    is_duration = np.isfinite(values) & (values > 0)
    if not is_duration.all():
        first_wrong = values[~is_duration][0]
        message = f"{what} has a sample of {first_wrong:g}, and durations are above 0"
        raise PrismError(message, fix="capture again, or leave that sample out")


def _widened_to_extremes(values: np.ndarray) -> tuple[float, float]:
    """Return a lognormal, as mean and sd of the logarithm, that reaches the extremes of samples."""
    median = math.log(float(np.median(values)))
    # the score of the slowest of so many draws
    score = float(np.interp(1 - 0.5 / len(values), probabilities(_Z), _Z))
    farther = max(math.log(values[-1]) - median, median - math.log(values[0]))
    return median, max(farther / score, float(np.log(values).std()))


def _numbers(kind: str, values: np.ndarray) -> tuple[float, float]:
    """Fit by maximum likelihood; a gamma's shape by Minka's approximation (2002, to 1.5 %)."""
    if kind == "normal":
        return float(values.mean()), float(values.std(ddof=1))
    logs = np.log(values)
    if kind == "lognormal":
        return float(logs.mean()), float(logs.std(ddof=1))
    s = max(math.log(values.mean()) - float(logs.mean()), 1e-12)
    shape = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    return shape, float(values.mean()) / shape


def distance(distribution: Distribution, values: np.ndarray) -> float:
    """Return the Kolmogorov-Smirnov distance: the largest gap to ascending ``values``."""
    count = len(values)
    below = distribution.below(values)
    steps = np.arange(count + 1) / count
    return float(max((steps[1:] - below).max(), (below - steps[:-1]).max()))


@dataclass(frozen=True)
class _NormalTable:
    """Chances of less than each of the scores _Z, and their logarithms; precise in both tails."""

    chances: np.ndarray
    logarithms: np.ndarray


@cache
def _normal() -> _NormalTable:
    tail = np.array([math.erfc(abs(z) / math.sqrt(2)) / 2 for z in _Z.tolist()])
    is_above = _Z > 0
    chances = np.where(is_above, 1 - tail, tail)
    logarithms = np.where(is_above, np.log1p(-tail), np.log(tail))
    return _NormalTable(chances, logarithms)


def probabilities(scores: np.ndarray) -> np.ndarray:
    """Return the chance of at most these standard normal scores."""
    chances: np.ndarray = np.interp(scores, _Z, _normal().chances)
    return chances


def largest(rng: np.random.Generator, of: int, shape: tuple[int, ...]) -> np.ndarray:
    """Draw scores of the largest of ``of`` independent draws: exact, one random number each."""
    if of == 1:
        return rng.standard_normal(shape)
    logarithms = -rng.standard_exponential(shape) / of
    return np.interp(logarithms, _normal().logarithms, _Z)


@cache
def _gamma(shape: float) -> tuple[np.ndarray, np.ndarray]:
    """Return x, and the chance of at most x, of a gamma of scale 1.

    The density is summed over u = ln(x / shape), so that one without bound at 0 is no trouble.
    """
    # beyond these bounds the density is nothing
    if shape < 30:
        low, high = -(60 / shape + 1), math.log(60 / shape + 8)
    else:
        low, high = -math.sqrt(150 / shape), math.sqrt(150 / shape)
    u = np.linspace(low, high, 8001)
    density = np.exp(shape * (u + 1 - np.exp(u)))
    sums = np.concatenate(([0.0], np.cumsum(density[1:] + density[:-1])))
    return shape * np.exp(u), sums / sums[-1]
