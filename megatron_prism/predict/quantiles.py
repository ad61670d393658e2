"""What do draws say about a quantile, and how surely?  Order statistics, without assumptions.

In : independent draws, ascending.  Out: Quantile.  The interval is between two order statistics:
how many of n draws lie below the true quantile is binomial, whatever the distribution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

__all__ = ["Quantile", "needed", "proportion", "quantile"]

_TAIL = 10  # draws that must lie beyond a quantile for it to be known
_OUTSIDE = 0.05
_Z = 1.959964  # of a two-sided 95 % interval


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
    that holds the true one in 95 % of repetitions or (where draws are few) more."""
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


def proportion(hits: float, of: int) -> tuple[float, float]:
    """95 % interval of a chance, seen ``hits`` times in ``of`` (Wilson 1927)."""
    share, spare = hits / of, _Z * _Z / of
    middle = (share + spare / 2) / (1 + spare)
    half = _Z * math.sqrt(share * (1 - share) / of + spare / of / 4) / (1 + spare)
    return max(0.0, middle - half), min(1.0, middle + half)
