"""What the tokens of two jobs cost.

In : the replays of both, and the price of a GPU.  Out: ``TokenCost``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_prism.replay.rates import cost_of_tokens, tokens_of
from megatron_prism.replay.timeline import Timeline
from megatron_prism.replay.uncertainty.differences import UncertainTime


@dataclass(frozen=True)
class TokenCost:
    """The money for 10^9 tokens of both.

    Attributes:
        prices: Of a GPU of A and of B for an hour.
        a: Of A.
        b: Of B.
        first_cheaper: The chance that A's tokens cost less.
    """

    prices: tuple[float, float]
    a: float
    b: float
    first_cheaper: float


def token_cost(
    timelines: tuple[Timeline, Timeline],
    tokens_per_gpu_s: tuple[float, float],
    prices: tuple[float, float],
    estimates: Sequence[UncertainTime],
    same_kernels: bool,
) -> TokenCost:
    """Return what tokens of both cost; both say how many an iteration has.

    Args:
        timelines: Of both.
        tokens_per_gpu_s: Tokens that a GPU of each trains a second.
        prices: Of a GPU of each for an hour.
        estimates: Of their iterations.
        same_kernels: As of ``UncertainTime.compared``.
    """
    uncertain_costs: list[UncertainTime] = []
    for timeline, estimate, price in zip(timelines, estimates, prices, strict=True):
        programs = timeline.graph.programs
        # the price is that of one GPU's hour, so it buys one GPU's share of the tokens
        tokens_of_gpu = tokens_of(programs) / programs.world.size
        uncertain_costs.append(estimate.scaled(price / tokens_of_gpu))
    uncertain_a, uncertain_b = uncertain_costs
    difference = uncertain_a.compared(uncertain_b, same_kernels=same_kernels)
    cost_a, cost_b = map(cost_of_tokens, tokens_per_gpu_s, prices)
    return TokenCost(prices, cost_a, cost_b, difference.first_faster)
