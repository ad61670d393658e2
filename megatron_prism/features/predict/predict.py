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

from megatron_prism.core.errors import PrismError, UsageError
from megatron_prism.core.jobs import job_settings
from megatron_prism.core.programs.program import Programs
from megatron_prism.core.rendering import renderer_of
from megatron_prism.features.predict.distributions import Quantile, quantile
from megatron_prism.features.predict.sampler import Sampler
from megatron_prism.features.predict.step_draws import InputEffect, StepDraws
from megatron_prism.features.predict.variability import (
    PARTS,
    CallSpread,
    Variability,
    call_spread,
    fitted,
    is_timed,
)
from megatron_prism.features.predict.variability import read_variability as shipped
from megatron_prism.replay.drawn_steps import DrawnSteps
from megatron_prism.replay.priced_graph import (
    CalibrationLike,
    MachineLike,
    PricedGraph,
    WhatIf,
    price,
)
from megatron_prism.replay.uncertainty.interval import interval
from megatron_prism.replay.uncertainty.plausibility import check_plausible

QUANTILES = (0.05, 0.5, 0.95, 0.99)
FEWEST = 100
_MAX_DRAWS = 1 << 19  # replicas that a prediction draws, if nobody says how many iterations
_DRAWS_OF_WHAT_IF = 1 << 16  # of a what-if of all replicas
_MAX_SLOW = 1000  # times: beyond it, a GPU is not slow but stuck
_MAX_SAMPLES = 5_000  # iterations, if nobody says how many
_MIN_SAMPLES = 1_000
_MIN_SAMPLES_OF_WHAT_IF = 400
_MAX_NODES = 5e10  # visits of nodes that a prediction may cost, about a minute
_TIMES = 199  # quantiles of ``times``
_MAX_CLASSES = 64  # in which one rank is made slow: those that compute longest
VariabilityLike = str | Variability | None
Progress = Callable[[str, float], object]  # what is done, and which part of it, 0 to 1


@dataclass(frozen=True)
class Prediction:
    """The distribution of the iteration time.

    Attributes:
        steady: ns without any variation, as ``replay`` has it.
        steady_low: Where that may begin on the job's machine (``replay.uncertainty.interval``): all
            quantiles move with it.
        steady_high: Where that may end.
        replicas: Independent copies of the model.
        samples: Iterations of the whole world that were drawn.
        seed: Of the draws.
        quantiles: Of an iteration.
        times: Every 1/200 of the distribution from 0.5 % to 99.5 %, ns.
        halved: Part of the variability -> p95 if its spread were half, ns.
        halved_from: p95 of as few draws as ``halved`` rests on, to compare with.
        slow: Class -> p95 if one of its ranks took ``slow_by`` times as long, ns; of the 64 classes
            that compute longest.
        slow_from: p95 without, of the same draws.
        slow_by: How many times as long.
        source: Of the spreads.
        calls: How calls vary.
        durations: Provenance of what varies.
        world: The job and its sizes; not part of the JSON, as all that follow.
        graph: How many classes and ops it has.
        classes: Names of the classes in ``slow``.
        variability: The spreads.
        draws: float64 [samples], ns ascending.
        inputs: What inputs that differ between iterations do; None: all iterations have the same.
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
    inputs: InputEffect | None = field(default=None, kw_only=True)

    def to_json(self) -> dict[str, object]:
        """Return what ``prism predict --json`` prints.

        Times are in ns; a quantile that the samples do not reach is null.
        """
        large = {"draws": None, "variability": None}  # never copied
        small = dataclasses.replace(self, **large)  # type: ignore[arg-type]
        value = dataclasses.asdict(small)
        for key in (*large, "world", "graph", "classes"):
            del value[key]
        return {"schema": "prism.prediction/1", **value}

    def to_html(self) -> str:
        """Write one self-contained page with the distribution."""
        page: str = renderer_of(self).page(self)
        return page


def _variability(asked: VariabilityLike, programs: Programs) -> Variability:
    """Return spreads; without a wish what the slices say, if their iterations were timed."""
    if isinstance(asked, Variability):
        return asked
    # times of the job itself say more of it than published ones of other machines
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
    steps: DrawnSteps | None = None,
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
        steps: of this job with other inputs in each iteration, from which is drawn; ``machine``,
            ``calibration`` and ``what_if`` are then theirs.
        progress: is told what is being done and which part of it is done, 0 to 1.

    Raises:
        UsageError: levels outside (0, 1), fewer than 100 samples.
        PrismError: the calls do not fit together, or nothing takes time.
    """
    if any(not 0 < level < 1 for level in levels) or not 0 < slow_by <= _MAX_SLOW:
        raise UsageError(f"slow is a factor up to {_MAX_SLOW:,}, quantiles < 1", fix="--slow 1.2")
    priced = programs
    if steps is not None:
        priced = steps.priced
    if not isinstance(priced, PricedGraph):
        priced = price(priced, machine=machine, calibration=calibration, what_if=what_if)
    _check(priced)
    spread = _variability(variability, priced.programs)
    calls = _calls(priced)
    sampler = Sampler(priced.timeline, seed, calls.spread)
    draws: Sampler | StepDraws = sampler
    steps_drawn = 1
    if steps is not None:
        draws = StepDraws(sampler, steps)
        steps_drawn = draws.steps
    plan = _plan(sampler, spread, samples, steps_drawn)
    done = 0

    def count_draws(draws: int) -> None:
        nonlocal done
        done += draws
        if progress is not None:
            progress("drawing iterations", done / plan.draws(sampler.replicas))

    # float64 [iterations, replicas]
    times_of_replica = draws.draw(spread, plan.samples, progress=count_draws)
    times = np.sort(times_of_replica.max(axis=1))
    halved: dict[str, float] = {}
    for part in plan.halved_parts:
        half = spread.scaled(part, 0.5)
        drawn = draws.draw(half, plan.samples_of_halved, progress=count_draws)
        halved[part] = p95(drawn.max(axis=1))

    # a slow rank is one of the first replica, which is drawn again
    slow: dict[int, float] = {}
    # a job of one replica has no others: 0
    other_replicas = times_of_replica[: plan.samples_of_slow, 1:].max(axis=1, initial=0)
    for index in plan.slow_classes:
        drawn = draws.draw(
            spread,
            plan.samples_of_slow,
            slow={index: slow_by},
            replicas=range(1),
            progress=count_draws,
        )
        slow[index] = p95(np.maximum(drawn[:, 0], other_replicas))
    between = interval(priced.timeline)
    halved_from = p95(times_of_replica[: plan.samples_of_halved].max(axis=1))
    inputs: InputEffect | None = None
    if isinstance(draws, StepDraws):
        changed: dict[str, float] = {}
        for text, durations in draws.changes().items():
            drawn = draws.draw(spread, plan.samples_of_halved, durations=durations)
            changed[text] = p95(drawn.max(axis=1))
        inputs = InputEffect(draws.text, draws.steps, draws.median_ns(), changed, halved_from)
    return Prediction(
        steady=priced.timeline.iteration_ns,
        steady_low=between.low_ns,
        steady_high=between.high_ns,
        replicas=sampler.replicas,
        samples=plan.samples,
        seed=sampler.seed,
        quantiles=tuple(quantile(times, level) for level in levels),
        times=tuple(np.quantile(times, np.linspace(0.005, 0.995, _TIMES)).tolist()),
        halved=halved,
        halved_from=halved_from,
        slow=slow,
        slow_from=p95(times_of_replica[: plan.samples_of_slow].max(axis=1)),
        slow_by=slow_by,
        source=f"{spread.name}: {spread.source}",
        calls=calls.source,
        durations=priced.prices.used(),
        world=job_settings.title(priced.programs.source, priced.graph.programs.world),
        graph=str(priced.graph),
        classes={index: priced.graph.class_name(index) for index in plan.slow_classes},
        variability=spread,
        draws=times,
        inputs=inputs,
    )


def _check(priced: PricedGraph) -> None:
    """Raise PrismError for a world of which nothing can be predicted."""
    if not priced.prices.used():
        path = priced.programs.path or "DIR"
        text = f"nothing in {path} takes time, so there is nothing to predict"
        raise PrismError(text, fix=f"prism show {path}")
    # factors of the user's own may be implausible
    if not priced.what_if.slow and not priced.what_if.faster:
        check_plausible(priced.timeline)


@dataclass(frozen=True)
class _Calls:
    """How calls vary.

    Attributes:
        spread: Of calls that the calibration has samples of, if there are any.
        source: In words.
    """

    spread: CallSpread | None
    source: str


def _calls(priced: PricedGraph) -> _Calls:
    """Find out how calls vary."""
    as_spreads = "all vary as the spreads say"
    file = "" if priced.calibration is None else priced.calibration.path
    if not file:
        return _Calls(None, as_spreads)
    spread = call_spread(priced.graph, priced.prices, priced.machine, file)
    if spread is None:
        return _Calls(None, f"{as_spreads} ({file} has no samples of this job's calls)")
    return _Calls(spread, spread.source)


@dataclass(frozen=True)
class _Plan:
    """What a prediction draws.

    Attributes:
        samples: Iterations of the whole world.
        samples_of_halved: Iterations of the whole world with one spread halved.
        samples_of_slow: Iterations of one replica with a slow rank.
        halved_parts: Which spreads are halved.
        slow_classes: Which classes have the slow rank.
    """

    samples: int
    samples_of_halved: int
    samples_of_slow: int
    halved_parts: tuple[str, ...]
    slow_classes: tuple[int, ...]

    def draws(self, replicas: int) -> int:
        """Return how many iterations of a replica are drawn in all."""
        halved = len(self.halved_parts) * replicas * self.samples_of_halved
        slow = len(self.slow_classes) * self.samples_of_slow
        return self.samples * replicas + halved + slow


def _plan(
    sampler: Sampler, spread: Variability, asked_samples: int | None, steps: int = 1
) -> _Plan:
    """Plan what is drawn: as much as a minute allows, unless a number is asked for.

    Args:
        sampler: Draws the iterations.
        spread: How much durations vary.
        asked_samples: Iterations that are asked for; None: none are.
        steps: How many steps with other inputs the iterations are of.
    """
    visits_of_draw = max(1, len(sampler.paths.lasts))
    affordable_draws = int(min(_MAX_DRAWS, _MAX_NODES / visits_of_draw))
    samples = asked_samples
    # an iteration has a draw of each replica, so a job of many gets fewer iterations
    if not samples:
        samples = min(_MAX_SAMPLES, max(_MIN_SAMPLES, affordable_draws // sampler.replicas))
    if samples < FEWEST:
        raise UsageError(f"{samples} samples say little", fix="--samples 2000")
    halved_samples = max(_MIN_SAMPLES_OF_WHAT_IF, _DRAWS_OF_WHAT_IF // sampler.replicas)
    # each class is slow in every step once
    slow_classes = _busiest(sampler, max(1, _MAX_CLASSES // steps))
    slow_samples = max(_MIN_SAMPLES_OF_WHAT_IF, affordable_draws // 8 // len(slow_classes))
    # a host that is never late cannot vary less
    parts = list(PARTS)
    if not sampler.hosted or not spread.host:
        parts.remove("host")
    return _Plan(
        samples,
        min(samples, halved_samples),
        min(samples, slow_samples),
        tuple(parts),
        tuple(slow_classes),
    )


def _busiest(sampler: Sampler, most: int) -> list[int]:
    """Return the classes that compute longest, at most this many, ascending."""
    class_count = len(sampler.members)
    ns_of_row = np.bincount(sampler.paths.structure.row, sampler.paths.lasts, minlength=class_count)
    longest_first = np.argsort(-ns_of_row[:class_count], kind="stable")
    return sorted(longest_first[:most].tolist())


def p95(times: np.ndarray) -> float:
    """Return the 95 % quantile, as ``quantile`` picks it."""
    place = min(len(times) - 1, int(0.95 * len(times)))
    return float(np.sort(times)[place])
