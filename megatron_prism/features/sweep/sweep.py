"""``sweep``: enumerate the layouts of a job, drop what cannot run, time the others, rank them.

Everything that is found lies in a folder, so the same call goes on after an interruption, and
another sweep into the folder uses its slices:

    slices/FAMILY/dpN-mM/   captured ranks
    results/RUN/KEY.json    figures of a point, by machine and limits

Two filters come before any capture: what Megatron refuses (asked of Megatron itself), and a lower
bound of the memory of the first stage: a point that falls by it would be out of memory for certain.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_prism import __version__
from megatron_prism.core.errors import UsageError
from megatron_prism.core.files import claimed
from megatron_prism.core.jobs import recipe as recipes
from megatron_prism.core.jobs.megatron_source import megatron_release, versions
from megatron_prism.core.jobs.recipe import Recipe
from megatron_prism.core.rendering import renderer_of
from megatron_prism.core.units import counted, format_bytes
from megatron_prism.features.sweep import space
from megatron_prism.features.sweep.evaluate import FAILED, Figures, SweepSettings, run, timeline_of
from megatron_prism.features.sweep.layout import JobLayout, RecipeLayout
from megatron_prism.features.sweep.recipe_server import CaptureServer
from megatron_prism.features.sweep.space import Job, Script, SweepPoint, Value
from megatron_prism.memory import nccl_buffers
from megatron_prism.memory.recipe_bound import memory_bound
from megatron_prism.replay.costs.machine import default_machine, named_in
from megatron_prism.replay.costs.machine import machine as read_machine
from megatron_prism.replay.rates import cost_of_tokens
from megatron_prism.replay.timeline import Timeline
from megatron_prism.replay.uncertainty.differences import standings
from megatron_prism.replay.uncertainty.headline import over_hosts

MEGATRON, MEMORY = "Megatron's checks", "memory bound"
_AT_ONCE = 64  # recipes of a request
_ASKED = 8  # trials before Optuna hears of them
OBJECTIVES = ("time", "tokens_per_gpu", "p95", "cost")

Axes = Mapping[str, Sequence[Value] | str] | Sequence[str]


@dataclass(frozen=True)
class Row:
    """A point in its place.

    rank   : 1 + the number of points of the groups before (``differences.standings``)
    equal  : whether others have this rank too
    cost   : money for 10^9 tokens, None without a price
    slower : than the first, as a part of it: expected, and the ends of its interval
    best   : chance to be the best of all
    """

    rank: int
    equal: bool
    result: Figures
    cost: float | None
    slower: tuple[float, float, float] = (0.0, 0.0, 0.0)
    best: float = 0.0

    @property
    def name(self) -> str:
        axes = self.result["axes"].items()
        return " ".join(f"{axis}={space.text(value)}" for axis, value in axes)


@dataclass(frozen=True)
class Sweep:
    """Every point of a sweep, ranked or with the reason why it fell.

    rows    : evaluated points, best first
    dropped : the others, in the order of the axes
    commands: script and arguments, by key of a point
    replayed: makes the timeline of a point again, by its key, from the slices in its folder
    """

    recipe: str
    objective: str
    machine: str
    limit: int | None
    axes: Mapping[str, Sequence[Value]]
    rows: tuple[Row, ...]
    dropped: tuple[SweepPoint, ...]
    commands: Mapping[str, Sequence[str]]
    replayed: Callable[[str], Timeline] | None = None

    @property
    def memory_provenance(self) -> str:
        """What the points' ``memory.bytes`` are made of."""
        calibration = nccl_buffers.read(nccl_buffers.DEFAULT)
        elsewhere = named_in(self.machine) != named_in(calibration.source)
        if not elsewhere:
            return calibration.provenance()
        return f"{calibration.provenance()}; not measured on {self.machine}: extrapolated"

    def to_json(self) -> dict[str, object]:
        """What ``prism sweep --json`` prints; times in ns, memory in bytes."""
        return {
            "schema": "prism.sweep/1",
            "recipe": self.recipe,
            "objective": self.objective,
            "machine": self.machine,
            "limit": self.limit,
            "memory_provenance": self.memory_provenance,
            "axes": {axis: list(values) for axis, values in self.axes.items()},
            "points": [
                {
                    "rank": row.rank,
                    "equal": row.equal,
                    "slower": row.slower,
                    "best": row.best,
                    **row.result,
                    "cost": row.cost,
                    "command": " ".join(self.commands[row.result["key"]]),
                }
                for row in self.rows
            ],
            "dropped": [
                {"axes": dict(p.axes), "by": p.by, "reason": p.reason} for p in self.dropped
            ],
        }

    def to_text(self) -> str:
        """The tables that ``prism sweep`` prints."""
        text: str = renderer_of(self).text(self)
        return text

    def to_csv(self) -> str:
        """One line per point, also of those that fell, with its command line."""
        table: str = renderer_of(self).table(self)
        return table

    def to_html(self, links: Mapping[str, str] | None = None) -> str:
        """A page for any browser: time against memory, axes against both, the table, the first two
        side by side.  ``links``: key of a point -> where the page of its timeline is.
        """
        page: str = renderer_of(self).page(self, links or {})
        return page

    def timeline(self, place: int) -> Timeline:
        """The timeline of the point in a place of the order, from 1.  UsageError if none is."""
        if not 1 <= place <= len(self.rows):
            message = f"there is no place {place}: {counted(len(self.rows), 'point')} ranked"
            raise UsageError(message, fix="timeline(1), of the first")
        assert self.replayed is not None, "a sweep that prism.sweep made has it"
        return self.replayed(str(self.rows[place - 1].result["key"]))


def sweep(
    recipe: Recipe | Script | str | os.PathLike[str],
    axes: Axes,
    out: str | os.PathLike[str],
    *,
    machine: str | None = None,
    limit: int | None = None,
    objective: str = "",
    price: float | None = None,
    workers: int | None = None,
    address: str = "",
    trials: int = 0,
    told: Callable[[str], None] | None = None,
) -> Sweep:
    """Rank the layouts of a recipe's job; goes on with what is in ``out`` already.

    Args:
        recipe: a Recipe, the name of a shipped one, or a YAML file; or a stock Script.
        axes: axis -> values (``{"tp": [1, 2], "pp": "auto"}``), or words (``["tp=1,2"]``).
        out: folder of slices and results.
        machine: name of a shipped one, or a JSON file like it; None: the recipe's hardware.name.
        limit: bytes of device memory; None: ``device_memory`` of ``machine``, if it has one.
        objective: time, tokens_per_gpu, p95 or cost; "": time, or tokens_per_gpu where batch or
            world differ between points.
        price: of a GPU for an hour.
        workers: local processes; default 2.
        address: of a Ray cluster whose machines share ``out``; ``local`` starts one here.
        trials: of as many points, which Optuna asks for one after the other; 0: of all.
        told: called with a line of text about what is being done.

    Raises:
        UsageError: no such axis, objective or machine.
    """
    job: Job
    if isinstance(recipe, Script):
        job = recipe
    else:
        job = recipes.given(recipe)
    folder = Path(out)
    tell = told or _tell_nobody
    values = _values_of(axes, job, bool(trials))
    objective = _checked_objective(objective or _natural(values), price)
    if not machine:
        hardware = ""
        if isinstance(job, Recipe):
            hardware = job.hardware.name
        machine = default_machine("", hardware)
    nodes = read_machine(machine)
    if limit is None:
        limit = nodes.device_memory or None
    settings = SweepSettings(
        folder.absolute(), machine, limit, nccl_buffers.DEFAULT, objective == "p95"
    )
    execute = partial(run, settings=settings, workers=workers or 2, address=address)

    def evaluated(points: list[SweepPoint]) -> Sweep:
        tell(f"{len(points)} points")
        # first what costs nothing: points that cannot be
        points = _pruned(points, settings, tell)
        to_run = [point for point in points if not point.by]
        results = _results(to_run, settings, execute, tell)
        layouts = {point.key: point.layout for point in to_run if point.layout is not None}
        complete = [result for result in results.values() if "by" not in result]
        return Sweep(
            job.name,
            objective,
            nodes.name,
            limit,
            values,
            tuple(ranked(complete, objective, price)),
            tuple(_dropped(points, results)),
            {key: layout.command() for key, layout in layouts.items()},
            lambda key: timeline_of(layouts[key], settings),
        )

    with claimed(folder, inside=True):
        if trials:
            return _searched(job, values, trials, objective, evaluated)
        return evaluated(space.points(job, values))


def _tell_nobody(text: str) -> None:
    """Take a line of text about what is being done, where nobody reads it."""


def _values_of(axes: Axes, job: Job, by_trials: bool) -> dict[str, tuple[Value, ...]]:
    """Axis -> values; UsageError where there are none, or too many for a sweep of all."""
    words = axes
    if isinstance(axes, Mapping):
        words = [_word(axis, axis_values) for axis, axis_values in axes.items()]
    values = space.parse_axes(list(words), job)
    if not values:
        raise UsageError("a sweep needs axes", fix="tp=1,2,4,8 pp=auto")
    combinations = space.sizes(values)
    if combinations > space.MOST and not by_trials:
        raise UsageError(
            f"{combinations:,} combinations are more than {space.MOST:,}",
            fix="fewer values, or --trials 200: Optuna picks as many",
        )
    return values


def _checked_objective(objective: str, price: float | None) -> str:
    """Return ``objective``; UsageError where there is none of this name, or it needs a price."""
    if objective not in OBJECTIVES:
        raise UsageError(f"no objective {objective}", fix=f"one of {', '.join(OBJECTIVES)}")
    if objective == "cost" and price is None:
        raise UsageError("--objective cost needs a price", fix="--price 2.5, of a GPU for an hour")
    return objective


def _dropped(points: Sequence[SweepPoint], results: Mapping[str, Figures]) -> Iterator[SweepPoint]:
    """The points that were left out before they ran, or that a run has shown to be impossible."""
    for point in points:
        result = results.get(point.key, {})
        # it was left out before it ran
        if point.by:
            yield point
        # its run has shown that it is impossible
        elif "by" in result:
            yield point.dropped(result["by"], result["reason"])


def _searched(
    job: Job,
    values: Mapping[str, Sequence[Value]],
    trials: int,
    objective: str,
    evaluated: Callable[[list[SweepPoint]], Sweep],
) -> Sweep:
    """The sweep of the points that Optuna asks for; it hears of some before it asks for others.

    The same trials in every run, since results are: what was interrupted goes on with them.
    """
    try:
        optuna: Any = import_module("optuna")
    except ImportError:
        fix = "pip install megatron_prism[sweep], or a smaller space without trials="
        raise UsageError(f"--trials {trials} needs Optuna", fix=fix) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # a fixed seed: an interrupted sweep asks for the same points again
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    points: dict[str, SweepPoint] = {}
    evaluation = None
    for start in range(0, trials, _ASKED):
        asked = []
        for _ in range(min(_ASKED, trials - start)):
            trial = study.ask()
            axes = {}
            for axis, choices in values.items():
                axes[axis] = trial.suggest_categorical(axis, choices)
            point = space.point_of(job, axes)
            asked.append((trial, point.key))
            points.setdefault(point.key, point)
        # all until now, of which most have results already
        evaluation = evaluated(list(points.values()))
        scores = {row.result["key"]: _score(row.result, objective) for row in evaluation.rows}
        for trial, key in asked:
            # a point without a result fits not, or failed
            if key in scores:
                study.tell(trial, scores[key])
            else:
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    assert evaluation is not None, "at least one trial"
    return evaluation


def _results(
    left: Sequence[SweepPoint],
    settings: SweepSettings,
    execute: Callable[..., None],
    tell: Callable[[str], None],
) -> dict[str, Figures]:
    """Return by key of a point its figures, or ``by`` and ``reason``.

    A result that failed or is damaged is removed, to be made again.
    """
    folder = settings.folder / "results" / _run_name(settings)
    missing = []
    for point in left:
        # a result of an earlier release lacks figures, and is made again
        if not _is_whole(_read(folder, point)):
            (folder / f"{point.key}.json").unlink(missing_ok=True)
            missing.append(point)
    families = _families(missing)
    tell(
        f"{len(left)} to evaluate, {len(left) - len(missing)} of them are there already; "
        f"{len(families)} distinct programs"
    )
    execute(families, results=folder, told=lambda done: tell(f"{done} of {len(missing)} evaluated"))
    # a sweep over other axes may have evaluated it
    return {point.key: {**_read(folder, point), "axes": dict(point.axes)} for point in left}


_ABSENT = "not evaluated"


def _read(results: Path, point: SweepPoint) -> Figures:
    """Read the result of a point; one that says ``_ABSENT`` where there is none."""
    try:
        figures: Figures = json.loads((results / f"{point.key}.json").read_text())
    except (OSError, ValueError):
        return {"key": point.key, "by": _ABSENT, "reason": "its result is not there"}
    return figures


def _is_whole(result: Figures) -> bool:
    """Whether a result can stay: figures of this release, or a reason that stays true."""
    if "by" in result:
        return result["by"] not in (FAILED, _ABSENT)
    # "headline" is the figure that releases learnt last
    return "headline" in result


def _word(axis: str, values: Sequence[Value] | str) -> str:
    if isinstance(values, str):
        return f"{axis}={values}"
    return f"{axis}={','.join(space.text(value) for value in values)}"


def _natural(axes: Mapping[str, Sequence[Value]]) -> str:
    """The objective where none is named."""
    varied = {axis for axis, values in axes.items() if len(values) > 1}
    # iterations of different batches, or on more GPUs, are not compared by their time
    if not varied.isdisjoint(("global_batch_size", "world_size", "dp")):
        return "tokens_per_gpu"
    return "time"


def _pruned(
    points: list[SweepPoint], settings: SweepSettings, tell: Callable[[str], None]
) -> list[SweepPoint]:
    """The points, most of the impossible ones with their reasons; Megatron is asked last, since it
    must be started for that.
    """
    # without a limit nothing is too large
    if settings.limit is not None:
        points = too_large(points, settings.limit)
    store = settings.folder / "megatron_checks.json"
    release = f"megatron-core {megatron_release()}"
    try:
        # what Megatron has said of a layout holds for its release
        refusals: dict[str, str] = json.loads(store.read_text()).get(release, {})
    except (OSError, ValueError):
        refusals = {}
    asked: dict[str, JobLayout] = {}
    for point in points:
        if not point.by and point.layout and point.key not in refusals:
            asked[point.key] = point.layout
    if asked:
        tell("asking Megatron")
        refusals |= _ask_megatron(asked)
        store.write_text(json.dumps({release: refusals}, indent=1))
    checked = []
    # a point keeps its first reason
    for point in points:
        refusal = refusals.get(point.key)
        if refusal and not point.by:
            point = point.dropped(MEGATRON, refusal)
        checked.append(point)
    return checked


def _ask_megatron(layouts: Mapping[str, JobLayout]) -> dict[str, str]:
    """Key -> what Megatron refuses of a layout, "" if nothing; a few layouts a process."""
    refusals: dict[str, str] = {}
    keys = list(layouts)
    with contextlib.closing(CaptureServer()) as server:
        for start in range(0, len(keys), _AT_ONCE):
            keys_of_part = keys[start : start + _AT_ONCE]
            part = [layouts[key] for key in keys_of_part]
            # a script says its layout by its words alone
            recipes = [layout.recipe for layout in part if isinstance(layout, RecipeLayout)]
            commands = [layout.command() for layout in part]
            sizes = [layout.world.size for layout in part]
            answers = server.check(recipes, commands, sizes)
            refusals |= zip(keys_of_part, answers, strict=True)
    return refusals


def too_large(points: Sequence[SweepPoint], limit: int) -> list[SweepPoint]:
    """The points, those whose first stage exceeds ``limit`` bytes with what it needs."""
    checked = []
    for point in points:
        # the bound is of recipes: of a script nobody knows the model
        if not point.by and isinstance(point.layout, RecipeLayout):
            bound = memory_bound(point.layout.recipe)
            if bound > limit:
                reason = f"needs at least {format_bytes(bound)}, limit {format_bytes(limit)}"
                point = point.dropped(MEMORY, reason)
        checked.append(point)
    return checked


def _families(points: Sequence[SweepPoint]) -> list[list[SweepPoint]]:
    """Points that share slices, together and in their order."""
    families: dict[str, list[SweepPoint]] = {}
    for point in points:
        if point.layout is not None:
            families.setdefault(point.layout.family(), []).append(point)
    return list(families.values())


def _run_name(settings: SweepSettings) -> str:
    """Of results that may be compared: everything beside the points that decides them."""
    content = dataclasses.asdict(settings) | {"folder": "", "megatron": megatron_release()}
    content |= versions() | {"prism": __version__, "costs": vars(read_machine(settings.machine))}
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha1(text.encode()).hexdigest()[:12]


# -- the order ------------------------------------------------------------------------------------
def _cost(result: Figures, price: float | None) -> float | None:
    """Of 10^9 tokens; ``price`` is of a GPU for an hour."""
    tokens = result["tokens_per_gpu"]
    if price is None or not tokens:
        return None
    return cost_of_tokens(tokens, price)


def _score(result: Figures, objective: str) -> float:
    """Smaller is better."""
    if objective == "p95" and result["p95_ns"] is not None:
        return float(result["p95_ns"])
    if objective in ("tokens_per_gpu", "cost") and result["tokens_per_gpu"]:
        return 1e9 / float(result["tokens_per_gpu"])
    return float(result["iteration_ns"])


def _expected_ns(result: Figures) -> float:
    """The mean of an iteration over all measured hosts: a layout that waits for its host is as slow
    as on a host that nobody chose.
    """
    first = result.get("headline")
    # figures by hand have no headline
    if first is None:
        return float(result["iteration_ns"])
    return float(first["expected_ns"])


def _risky_score(result: Figures, objective: str) -> float:
    """``_score`` over all measured hosts."""
    iteration_ns = float(result["iteration_ns"]) or 1.0
    return _score(result, objective) * _expected_ns(result) / iteration_ns


def ranked(results: Sequence[Figures], objective: str, price: float | None = None) -> list[Row]:
    """Rank results, the best first.

    What is unknown of the machine is the same for all points.  Layouts that wait for their host
    count with the mean over measured hosts.
    """
    in_order = sorted(results, key=lambda row: (_risky_score(row, objective), str(row["key"])))
    estimates = []
    for result in in_order:
        expected_ns = _expected_ns(result)
        estimate = over_hosts(result["iteration_ns"], result["sources"], expected_ns)
        # from time to what the objective counts
        scale = _risky_score(result, objective) / (expected_ns or 1)
        estimates.append(estimate.scaled(scale))
    places = standings(estimates)
    groups = [place.group for place in places]
    rows = []
    for result, place in zip(in_order, places, strict=True):
        best_ns = estimates[0].ns or 1
        slower = place.slower_ns / best_ns, place.low_ns / best_ns, place.high_ns / best_ns
        rank = 1 + groups.index(place.group)
        equal = groups.count(place.group) > 1
        rows.append(Row(rank, equal, result, _cost(result, price), slower, place.best))
    return rows


def front(results: Sequence[Figures]) -> list[Figures]:
    """Points that no other one beats in both iteration time and memory, fastest first."""
    by_time = sorted(
        results, key=lambda result: (result["iteration_ns"], result["memory"]["bytes"])
    )
    unbeaten: list[Figures] = []
    for result in by_time:
        # by time: each later point must need less memory
        if not unbeaten or result["memory"]["bytes"] < unbeaten[-1]["memory"]["bytes"]:
            unbeaten.append(result)
    return unbeaten
