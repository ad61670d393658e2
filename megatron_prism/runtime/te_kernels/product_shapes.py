"""How many products of experts have a shape for which cuBLASLt chooses a kernel anew.

cuBLASLt keeps what it chose for the last 8,192 shapes (cuBLAS documentation, heuristics cache).
The tokens of an expert are a side of its products, and they vary.  Assumed: they are distributed
exponentially, so that their deviation is their mean, and each is drawn for itself.  Then the part
of shapes that the cache has lost follows from its size (H. Che, Y. Tung and Z. Wang, Hierarchical
Web Caching Systems, 2002, equation 3): a shape is lost that was not drawn again for as long as it
takes to draw as many others as the cache holds.
"""

from __future__ import annotations

import functools

import numpy as np

_CACHED_SHAPES = 8_192
# of an expert's two layers: the forward, the gradient of the input and that of the weight
_PRODUCTS_OF_EXPERT = 6
# numbers of tokens, in means, at the middle of equal steps; more than 16 means have a probability
# of 1e-7
_STEP = 0.01
_TOKENS = np.arange(0.5 * _STEP, 16, _STEP)


@functools.cache
def unseen_share(mean_tokens: float) -> float:
    """Return the part of an expert's products whose shape is not among the cached ones.

    Args:
        mean_tokens: that an expert gets in a microbatch.
    """
    cached_counts = _CACHED_SHAPES / _PRODUCTS_OF_EXPERT
    densities = np.exp(-_TOKENS)

    # draws, in means, until the cache has been filled with others
    few_draws, many_draws = 1e-6, 1e9
    while many_draws / few_draws > 1.0001:
        draws = np.sqrt(few_draws * many_draws)
        distinct_counts = -np.expm1(-draws * densities).sum() * _STEP * mean_tokens
        if distinct_counts < cached_counts:
            few_draws = draws
        else:
            many_draws = draws
    lost = densities * np.exp(-few_draws * densities)
    return float(lost.sum() * _STEP)
