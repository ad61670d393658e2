"""Which of several layouts is faster, when durations vary?

In : a Sampler and a Variability for each.  Out: Comparison: quantiles of each, the chance that the
first beats each other, and the chance of each to be the fastest of all.  Iteration i of every
layout is drawn under the same network regime, everything else independently: a pair of draws is a
pair of runs on two clusters of one network.  Chances are of single iterations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_prism.costs.variability import Variability
from megatron_prism.errors import UsageError
from megatron_prism.replay.reschedule import count as microbatches
from megatron_prism.stochastic.predict import QUANTILES, worth
from megatron_prism.stochastic.quantiles import Quantile, proportion, quantile
from megatron_prism.stochastic.sampler import Sampler

__all__ = ["Chance", "Comparison", "Layout", "compare"]


@dataclass(frozen=True)
class Chance:
    """A chance with its 95 % interval; draws that are equal count half."""

    share: float
    low: float
    high: float


@dataclass(frozen=True)
class Layout:
    """One of them.  Times in ns.

    tokens  : of an iteration, None if the programs do not say
    steady  : the longest path without variation
    times   : every 1/200 of the distribution from 0.5 % to 99.5 %
    slower  : the chance that the first layout's iteration is shorter; None for the first itself
    fastest : the chance to have the shortest iteration of all
    """

    name: str
    ranks: int
    microbatches: int
    tokens: int | None
    steady: float
    quantiles: tuple[Quantile, ...]
    times: tuple[float, ...]
    slower: Chance | None
    fastest: Chance


@dataclass(frozen=True)
class Comparison:
    """Layouts as given; ``note`` says what makes them hard to compare, if anything does."""

    layouts: tuple[Layout, ...]
    samples: int
    seed: int
    note: str


def compare(
    samplers: Mapping[str, tuple[Sampler, Variability]],
    samples: int | None = None,
    levels: Sequence[float] = QUANTILES,
    progress: Callable[[float], object] | None = None,
) -> Comparison:
    """Draw as many iterations of each, the first one being what the others are held against.

    UsageError for fewer than two layouts, or samplers that do not share their network's regimes.
    """
    if len(samplers) < 2:
        raise UsageError("one layout has nothing to be compared with", fix="--against DIR")
    if len({sampler.regime for sampler, _ in samplers.values()}) > 1:
        raise UsageError("samplers of different networks", fix="Sampler(…, regime=seed)")
    count = min(worth(sampler, samples) for sampler, _ in samplers.values())
    drawn = []
    for place, (sampler, spread) in enumerate(samplers.values()):
        drawn.append(sampler.draw(spread, count).max(axis=1))
        if progress is not None:
            progress((place + 1) / len(samplers))
    best = np.min(drawn, axis=0)
    ties = np.sum([times == best for times in drawn], axis=0)
    layouts = []
    for (name, (sampler, _)), times in zip(samplers.items(), drawn, strict=True):
        first = drawn[0]
        beaten = float((first < times).sum() + 0.5 * (first == times).sum())
        programs, ordered = sampler.graph.programs, np.sort(times)
        tokens = programs.source.get("tokens_per_iteration", "")
        layouts.append(
            Layout(
                name,
                programs.world.size,
                microbatches(programs),
                int(tokens) if re.fullmatch("[0-9]{1,18}", tokens) else None,
                sampler.steady(),
                tuple(quantile(ordered, level) for level in levels),
                tuple(np.quantile(times, np.linspace(0.005, 0.995, 199)).tolist()),
                _chance(beaten, count) if layouts else None,
                _chance(float(((times == best) / ties).sum()), count),
            )
        )
    seed = next(iter(samplers.values()))[0].regime
    return Comparison(tuple(layouts), count, seed, _note(layouts))


def _chance(hits: float, of: int) -> Chance:
    low, high = proportion(hits, of)
    return Chance(hits / of, low, high)


def _note(layouts: Sequence[Layout]) -> str:
    tokens = {one.tokens for one in layouts}
    ranks = {one.ranks for one in layouts}
    found = []
    if len(tokens) > 1:
        found.append("iterations of different numbers of tokens")
    elif None in tokens:
        found.append("the programs do not say how many tokens an iteration has")
    if len(ranks) > 1:
        found.append("worlds of different sizes")
    return "; ".join(found)
