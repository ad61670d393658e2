"""What do PRISM's published use cases come to here?  One at a time, on any job and any spreads.

In : a Sampler, a Variability, the GPUs of a node.  Out: Answer: rows of what was asked and what
came out, beside what was published (arXiv 2510.15596, versions 1 and 2; facts as read from its
abstracts and notes).  None of the publications says how slow its slow GPU or node was, nor its
jobs: so the question is which slowness gives their figure here.  Two use cases need no module:
layouts and next-generation machines are ``compare``.  Two cannot be asked: validation (its 748 runs
are Meta's) and scheduling (a simulation of 1,280 GPUs whose jobs were not published).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_prism.costs.variability import Variability
from megatron_prism.errors import UsageError
from megatron_prism.stochastic import whatifs
from megatron_prism.stochastic.predict import p95
from megatron_prism.stochastic.sampler import Sampler

__all__ = ["CASES", "Answer", "answer"]

LARGE = 65_536  # ranks of the production run
_DRAWS = 1 << 21  # replicas times iterations of it
_FACTORS = (1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.4, 1.5, 1.75, 2.0, 3.0)
_TAILS = ((0.01, 10.0), (0.05, 10.0), (0.05, 3.0))  # chance, how many times as long
_COUNT = 500


@dataclass(frozen=True)
class Answer:
    """name, published : which case, and what its publication says
    head, rows         : a table; reached: whether what was published came out, None: some of it, or
                         there was no figure
    note               : what was assumed
    """

    name: str
    published: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    reached: bool | None
    note: str


def answer(name: str, sampler: Sampler, spread: Variability, gpus_per_node: int) -> Answer:
    """The answer to one of CASES.  UsageError for another name."""
    if name not in CASES:
        raise UsageError(f"there is no case {name}", fix=f"case={', case='.join(CASES)}")
    return CASES[name](sampler, spread, gpus_per_node)


def _count(sampler: Sampler) -> int:
    return max(200, min(_COUNT, (1 << 17) // sampler.replicas))


def _large(sampler: Sampler, spread: Variability, gpus_per_node: int) -> Answer:
    own = sampler.graph.programs.world.size // sampler.replicas
    replicas = max(1, LARGE // own)
    count = max(200, min(1000, _DRAWS // replicas))
    times = sampler.draw(spread, count, replicas=range(replicas)).max(axis=1)
    low, middle, high = np.quantile(times, (0.05, 0.5, 0.95)).tolist()
    lost = middle / sampler.steady() - 1
    figures = (  # what, published, here, how far off it may be
        ("p5, of p50", 0.989, low / middle, 0.005, "{:.3f}"),
        ("p95, of p50", 1.027, high / middle, 0.005, "{:.3f}"),
        ("time over no variation", 9.0, 100 * lost, 3.0, "{:.1f} %"),
    )
    alike = [abs(here - published) <= off for _, published, here, off, _ in figures]
    rows = tuple(
        (what, text.format(published), text.format(here), "as published" if same else "")
        for (what, published, here, _, text), same in zip(figures, alike, strict=True)
    )
    note = (
        f"{replicas:,} replicas of {own} ranks, {count} iterations; calls as captured; alike: "
        "quantiles within 0.005, time within 3 points"
    )
    said = "18.6 / 18.8 / 19.3 s at 64K+ GPUs (v2); 9 % of GPU time, 20 extra days (v1, v2)"
    reached = all(alike) or (None if any(alike) else False)
    return Answer("large", said, ("what", "published", "here", ""), rows, reached, note)


def _calls(sampler: Sampler, spread: Variability, gpus_per_node: int) -> Answer:
    count = max(1000, _count(sampler))
    rows = []
    for chance, factor in ((0.0, 1.0), *_TAILS):
        odd = dataclasses.replace(spread, slow_network=(chance, factor))
        times = np.sort(sampler.draw(odd, count).max(axis=1)) / 1e6
        cells = (f"{np.quantile(times, level):,.1f} ms" for level in (0.5, 0.95, 0.99))
        rows.append((f"x {factor:g} with chance {100 * chance:g} %", *cells))
    said = "tails of calls between nodes reach ten times their mean (v2 notes)"
    note = "all calls of such an iteration are slower; which calls, and how often, is not published"
    return Answer("calls", said, ("iterations whose calls take", "p50", "p95", "p99"),
                  tuple(rows), None, note)  # fmt: skip


def _hot(sampler: Sampler, spread: Variability, gpus_per_node: int) -> Answer:
    each = sampler.draw(spread, _count(sampler))
    usual = p95(each.max(axis=1))
    found = whatifs.hot_node(sampler, spread, each, 0, gpus_per_node, _FACTORS)
    over = [100 * (value / usual - 1) for _, value in found.p95]
    inside = [9 <= one <= 35 for one in over]
    rows = _marked(over, inside, "+{:.1f} %")
    said = "one degraded node: +9 to +35 % (v2)"
    note = f"node 0, {found.ranks} GPUs, p95 against {usual / 1e6:,.1f} ms"
    return Answer("hot-node", said, ("its GPUs slower", "p95", ""), rows, any(inside), note)


def _stages(sampler: Sampler, spread: Variability, gpus_per_node: int) -> Answer:
    each = sampler.draw(spread, _count(sampler))
    found = whatifs.placement(sampler, spread, each, _FACTORS)
    gains = [100 * (gain - 1) for gain in found.gain]
    inside = [8.0 <= one <= 15.6 for one in gains]
    rows = _marked(gains, inside, "{:.1f} % from best to worst stage")
    said = "p95 differs by 8.0 to 15.6 % with the stage of a slow rank (v2), up to 1.26 x (v1)"
    most = 1 + max(gains) / 100
    note = f"one slow GPU in each of {len(found.classes)} classes; at most {most:.3f} x"
    return Answer("slow-rank", said, ("it is slower", "p95", ""), rows, any(inside), note)


def _marked(
    values: Sequence[float], inside: Sequence[bool], text: str
) -> tuple[tuple[str, ...], ...]:
    """A row for each factor; which are in the published range."""
    return tuple(
        (f"x {factor:g}", text.format(value), "as published" if within else "")
        for factor, value, within in zip(_FACTORS, values, inside, strict=True)
    )


def _kernels(sampler: Sampler, spread: Variability, gpus_per_node: int) -> Answer:
    bars = [bar for bar in whatifs.tornado(sampler, spread, _count(sampler)) if " in " in bar.what]
    rows = tuple(
        (bar.what, *(f"{(p95 - bar.base) / 1e6:+,.2f} ms" for p95 in (bar.halved, bar.doubled)))
        for bar in bars
    )
    first = bars[0].what if bars else ""
    reached = first.startswith(("all_gather", "reduce_scatter")) if bars else None
    said = "AllGather and ReduceScatter contribute most to the variability of a step (v1)"
    note = "p95 if the spread of these calls alone were half, or twice as large; strongest first"
    return Answer("kernels", said, ("calls", "half", "twice"), rows, reached, note)


CASES: dict[str, Callable[[Sampler, Variability, int], Answer]] = {
    "large": _large,
    "calls": _calls,
    "hot-node": _hot,
    "slow-rank": _stages,
    "kernels": _kernels,
}
