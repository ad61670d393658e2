"""Predict the distribution of the iteration time, and what moves its tail.

``predict`` takes programs, draws iterations of the priced world and returns a Prediction: quantiles
of the iteration time over clusters and iterations, with confidence intervals, and the same after
one change at a time.  Variance does not add up along a graph of maxima, so every change is
simulated with the same random numbers.  Without variation every quantile is the iteration time of
``replay``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_prism.core import job_settings
from megatron_prism.core.errors import PrismError, UsageError
from megatron_prism.core.program import Programs
from megatron_prism.core.rendering import renderer_of
from megatron_prism.features.predict.distributions import Quantile, quantile
from megatron_prism.features.predict.sampler import Sampler
from megatron_prism.features.predict.variability import (
    PARTS,
    Variability,
    call_spread,
    fitted,
    is_timed,
)
from megatron_prism.features.predict.variability import read_variability as shipped
from megatron_prism.replay.interval import interval
from megatron_prism.replay.plausibility import check_plausible
from megatron_prism.replay.priced_graph import (
    CalibrationLike,
    MachineLike,
    PricedGraph,
    WhatIf,
    price,
)

QUANTILES = (0.05, 0.5, 0.95, 0.99)
FEWEST = 100
_DRAWS = 1 << 19  # replicas that a prediction draws, if nobody says how many iterations
_FEW_DRAWS = 1 << 16  # of a what-if of all replicas
_SLOWEST = 1000  # times: beyond it, a GPU is not slow but stuck
_MOST, _LEAST = 5_000, 1_000  # iterations
_LEAST_WHATIF = 400
_NODES = 5e10  # visits of nodes that a prediction may cost, about a minute
_SHOWN = 199  # quantiles of ``times``
_CLASSES = 64  # in which one rank is made slow: those that compute longest
VariabilityLike = str | Variability | None
Progress = Callable[[str, float], object]  # what is done, and which part of it, 0 to 1


@dataclass(frozen=True)
class Prediction:
    """The distribution of the iteration time.

    steady    : ns without any variation, as ``replay`` has it, and where that may lie on the job's
                machine (``replay.interval``): all quantiles move with it
    replicas  : independent copies of the model
    samples   : iterations of the whole world that were drawn
    quantiles : of an iteration
    times     : every 1/200 of the distribution from 0.5 % to 99.5 %, ns
    halved    : part of the variability -> p95 if its spread were half, ns
    halved_from : p95 of as few draws as ``halved`` rests on, to compare with
    slow      : class -> p95 if one of its ranks took ``slow_by`` times as long, ns; of the 64
                classes that compute longest; slow_from: p95 without, of the same draws
    source    : of the spreads; calls: how calls vary; durations: provenance of what varies
    world     : the job and its sizes; graph: how many classes and ops it has; classes: names of
                those in ``slow``; none is part of the JSON
    draws     : float64 [samples], ns ascending; not part of the JSON
    """

    steady: int
    steady_low: int
    steady_high: int
    replicas: int
    samples: int
    seed: int
    quantiles: tuple[Quantile, ...]
    times: tuple[float, ...]
    halved: Mapping[str, float]
    halved_from: float
    slow: Mapping[int, float]
    slow_from: float
    slow_by: float
    source: str
    calls: str
    durations: tuple[str, ...]
    world: str
    graph: str = field(kw_only=True)
    classes: Mapping[int, str] = field(kw_only=True)
    variability: Variability = field(kw_only=True)
    draws: np.ndarray = field(kw_only=True, repr=False, compare=False)

    def to_json(self) -> dict[str, object]:
        """What ``prism predict --json`` prints: times in ns; a quantile that the samples do not
        reach is null.
        """
        hidden = {"draws": None, "variability": None}
        found = dataclasses.asdict(dataclasses.replace(self, **hidden))  # type: ignore[arg-type]
        for key in (*hidden, "world", "graph", "classes"):
            found.pop(key)
        return {"schema": "prism.prediction/1", **found}

    def to_html(self) -> str:
        """One self-contained page with the distribution."""
        page: str = renderer_of(self).page(self)
        return page


def _variability(asked: VariabilityLike, programs: Programs) -> Variability:
    """What was asked for; None: what the slices say, if their iterations were timed."""
    if isinstance(asked, Variability):
        return asked
    if asked == "fitted" or (asked is None and is_timed(programs)):
        return fitted(programs, shipped("public"))
    return shipped(asked or "public")


def predict(
    programs: Programs | PricedGraph,
    *,
    machine: MachineLike | None = None,
    calibration: CalibrationLike | None = None,
    what_if: WhatIf | None = None,
    variability: VariabilityLike = None,
    samples: int | None = None,
    seed: int = 0,
    levels: Sequence[float] = QUANTILES,
    slow_by: float = 1.2,
    progress: Progress | None = None,
) -> Prediction:
    """Predict the distribution of an iteration's time.

    Args:
        programs: as of ``price``, or what it returned, which has the next three.
        machine: as of ``price``.
        calibration: as of ``price``; calls that it has samples of vary as those do.
        what_if: as of ``price``.
        variability: how much everything else varies: "fitted" (to the timed iterations of the
            slices: the default if there are five or more), the name of shipped spreads ("public",
            the default elsewhere), a JSON file like them, or a Variability.
        samples: iterations to draw; default 1,000 to 5,000, fewer the more replicas there are.
        seed: of the draws.
        levels: which quantiles, between 0 and 1.
        slow_by: how many times as long the slow GPU of the what-ifs computes.
        progress: is told what is being done and which part of it is done, 0 to 1.

    Raises:
        UsageError: levels outside (0, 1), fewer than 100 samples.
        PrismError: the calls do not fit together, or nothing takes time.
    """
    if any(not 0 < level < 1 for level in levels) or not 0 < slow_by <= _SLOWEST:
        raise UsageError(f"slow is a factor up to {_SLOWEST:,}, quantiles < 1", fix="--slow 1.2")
    priced = programs
    if not isinstance(priced, PricedGraph):
        priced = price(priced, machine=machine, calibration=calibration, what_if=what_if)
    if not priced.prices.used():
        path = priced.programs.path or "DIR"
        what = f"nothing in {path} takes time, so there is nothing to predict"
        raise PrismError(what, fix=f"prism show {path}")
    if not (priced.what_if.slow or priced.what_if.faster):  # factors of the user's own
        check_plausible(priced.timeline)
    spread = _variability(variability, priced.programs)
    calls, file = None, "" if priced.calibration is None else priced.calibration.path
    if file:
        calls = call_spread(priced.graph, priced.prices, priced.machine, file)
    said = calls.source if calls is not None else "all vary as the spreads say"
    if file and calls is None:
        said += f" ({file} has no samples of this job's calls)"
    sampler = Sampler(priced.timeline, seed, calls)
    affordable = int(min(_DRAWS, _NODES / max(1, len(sampler.paths.lasts))))  # replicas
    count = samples or min(_MOST, max(_LEAST, affordable // sampler.replicas))
    if count < FEWEST:
        raise UsageError(f"{count} samples say little", fix="--samples 2000")
    few, chosen = min(count, max(_LEAST_WHATIF, _FEW_DRAWS // sampler.replicas)), _busiest(sampler)
    tried = min(count, max(_LEAST_WHATIF, affordable // 8 // len(chosen)))
    parts = [part for part in PARTS if part != "host" or sampler.hosted and spread.host]
    work = count * sampler.replicas + (len(parts) * sampler.replicas * few) + len(chosen) * tried
    done = 0

    def more(draws: int) -> None:
        nonlocal done
        done += draws
        if progress is not None:
            progress("drawing iterations", done / work)

    each = sampler.draw(spread, count, progress=more)
    times = np.sort(each.max(axis=1))
    halved = {
        part: p95(sampler.draw(spread.scaled(part, 0.5), few, progress=more).max(axis=1))
        for part in parts
    }
    slow, others = dict[int, float](), each[:tried, 1:].max(axis=1, initial=0)
    for index in chosen:  # in the first replica, which is drawn again
        one = sampler.draw(spread, tried, slow={index: slow_by}, replicas=range(1), progress=more)
        slow[index] = p95(np.maximum(one[:, 0], others))
    between = interval(priced.timeline)
    return Prediction(
        steady=priced.timeline.iteration_ns,
        steady_low=between.low_ns,
        steady_high=between.high_ns,
        replicas=sampler.replicas,
        samples=count,
        seed=sampler.seed,
        quantiles=tuple(quantile(times, level) for level in levels),
        times=tuple(np.quantile(times, np.linspace(0.005, 0.995, _SHOWN)).tolist()),
        halved=halved,
        halved_from=p95(each[:few].max(axis=1)),
        slow=slow,
        slow_from=p95(each[:tried].max(axis=1)),
        slow_by=slow_by,
        source=f"{spread.name}: {spread.source}",
        calls=said,
        durations=priced.prices.used(),
        world=job_settings.title(priced.programs.source, priced.graph.programs.world),
        graph=str(priced.graph),
        classes={index: priced.graph.class_name(index) for index in chosen},
        variability=spread,
        draws=times,
    )


def _busiest(sampler: Sampler) -> list[int]:
    """The 64 classes that compute longest, ascending."""
    rows, classes = sampler.paths.row, len(sampler.members)
    total = np.bincount(rows, sampler.paths.lasts, minlength=classes)[:classes]
    return sorted(np.argsort(-total, kind="stable")[:_CLASSES].tolist())


def p95(times: np.ndarray) -> float:
    """The 95 % quantile, as ``quantile`` picks it."""
    return float(np.sort(times)[min(len(times) - 1, int(0.95 * len(times)))])
