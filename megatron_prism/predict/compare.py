"""Compare layouts whose durations vary: which is faster, and how surely.

``compare`` takes priced worlds and returns a Comparison: quantiles of each, the chance that the
first beats each other, and the chance of each to be the fastest of all.  Iteration i of every
layout is drawn under the same network regime, everything else independently: a pair of draws is a
pair of runs on two clusters of one network.  Chances are of single iterations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from megatron_prism.core.errors import UsageError
from megatron_prism.core.files import rendered
from megatron_prism.predict.distributions import Quantile, proportion, quantile
from megatron_prism.predict.predict import (
    QUANTILES,
    VariabilityLike,
    check_takes_time,
    shown,
    spreads_of,
    worth,
)
from megatron_prism.predict.sampler import Sampler
from megatron_prism.replay.priced_graph import PricedGraph
from megatron_prism.replay.whatif import microbatch_count as microbatches

__all__ = ["Chance", "Comparison", "compare"]

_STRIDE = 0x9E3779B1  # between the seeds of layouts that are compared


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
    steady  : without variation, as ``replay`` has it
    times   : every 1/200 of the distribution from 0.5 % to 99.5 %
    slower  : the chance that the first layout's iteration is shorter; None for the first itself
    fastest : the chance to have the shortest iteration of all
    """

    name: str
    ranks: int
    microbatches: int
    tokens: int | None
    steady: int
    quantiles: tuple[Quantile, ...]
    times: tuple[float, ...]
    slower: Chance | None
    fastest: Chance


@dataclass(frozen=True)
class Provenance:
    """Where a layout's figures come from: its spreads, how its calls vary, its durations."""

    spreads: str
    calls: str
    durations: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Layouts as given; ``note`` says what makes them hard to compare, if anything does.

    rests_on : layout -> provenance
    """

    layouts: tuple[Layout, ...]
    samples: int
    seed: int
    note: str
    rests_on: Mapping[str, Provenance]

    def to_json(self) -> dict[str, object]:
        """What ``prism predict --against --json`` prints; times in ns."""
        return {"schema": "prism.comparison/1", **asdict(self)}

    def to_html(self) -> str:
        """One self-contained page."""
        return rendered("report.predict:render_comparison", self, str)


def compare(
    layouts: Mapping[str, PricedGraph],
    *,
    variability: VariabilityLike | Mapping[str, VariabilityLike] = "public",
    samples: int | None = None,
    seed: int = 0,
    levels: Sequence[float] = QUANTILES,
    progress: Callable[[float], object] | None = None,
) -> Comparison:
    """Draw as many iterations of each layout, the first one being what the others are held against.

    Args:
        layouts: name -> what ``price`` returned.
        variability: as of ``predict``, for all layouts or by name.
        samples: iterations of each; default as of ``predict``.
        seed: of the draws; the network's regimes are the same for all.
        levels: which quantiles, between 0 and 1.
        progress: is told which part is done, 0 to 1.

    Raises:
        UsageError: fewer than two layouts.
        PrismError: nothing in a layout takes time.
    """
    if len(layouts) < 2:
        raise UsageError("one layout has nothing to be compared with", fix="--against DIR")
    samplers, spreads = [], []
    for place, (name, priced) in enumerate(layouts.items()):
        check_takes_time(priced)
        asked = variability[name] if isinstance(variability, Mapping) else variability
        spread = spreads_of(priced, asked)
        own = seed + place * _STRIDE
        samplers.append(Sampler(priced.timeline, own, spread.calls, regime=seed))
        spreads.append(spread)
    count = min(worth(sampler, samples) for sampler in samplers)
    drawn = []
    for place, (sampler, spread) in enumerate(zip(samplers, spreads, strict=True)):
        drawn.append(sampler.draw(spread.variability, count).max(axis=1))
        if progress is not None:
            progress((place + 1) / len(samplers))
    best = np.min(drawn, axis=0)
    ties = np.sum([times == best for times in drawn], axis=0)
    found: list[Layout] = []
    for (name, priced), times in zip(layouts.items(), drawn, strict=True):
        first = drawn[0]
        beaten = float((first < times).sum() + 0.5 * (first == times).sum())
        programs, ordered = priced.graph.programs, np.sort(times)
        tokens = programs.source.get("tokens_per_iteration", "")
        found.append(
            Layout(
                name,
                programs.world.size,
                microbatches(programs),
                int(tokens) if re.fullmatch("[0-9]{1,18}", tokens) else None,
                priced.timeline.iteration_ns,
                tuple(quantile(ordered, level) for level in levels),
                shown(times),
                _chance(beaten, count) if found else None,
                _chance(float(((times == best) / ties).sum()), count),
            )
        )
    rests_on = {
        name: Provenance(spread.variability.source, spread.said, priced.prices.used())
        for (name, priced), spread in zip(layouts.items(), spreads, strict=True)
    }
    return Comparison(tuple(found), count, seed, _note(found), rests_on)


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
