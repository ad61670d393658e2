"""``prism predict``: how long do iterations take when durations vary?

In : programs, a machine, spreads.  Out: quantiles of the iteration time with their intervals, what
moves them, and where a slow GPU hurts; as a page of text or JSON.  Without torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_prism import cli_settings
from megatron_prism.artefact import whole_file
from megatron_prism.cli_output import (
    check_outputs,
    console,
    print_json,
    progress,
    warn_without_times,
)
from megatron_prism.cli_predict_settings import plan, refuse_unused, settings_of
from megatron_prism.cli_predict_text import show, show_case, show_comparison, show_run, show_study
from megatron_prism.errors import PrismError, UsageError

__all__ = ["predict"]

_STRIDE = 0x9E3779B1  # between the seeds of layouts that are compared


def predict(args: argparse.Namespace) -> int:
    """The distribution of the iteration time over clusters and iterations, after PRISM.

    prism predict DIR
    prism predict DIR machine=h200 calibration=h200x4.json variability=mine.json seed=1 slow=1.2

    variability= is fitted (to the timed iterations of DIR: the default if there are five), the
    name of shipped spreads (the default elsewhere, with --against and case=: public) or a JSON file
    like costs/variability/public.json; samples= how many iterations of the whole world are
    drawn; slow= how many times as long the one slow GPU computes (0.5: twice as fast, as in prism
    replay).  Calls that calibration= has samples of vary as those do.

    prism predict DIR iterations=500K deadline=30d mtbf=3h checkpoint_cost=30s restart=10min

    The whole run: mtbf= of the job, checkpoint= the time between two (or best).  --html adds what
    single calls, slow GPUs, a hot node and other world sizes do to p95.

    prism predict A --against B --against C

    Layouts side by side under one network: quantiles of each, and how often A is faster.
    A, B and C are slices, or names of shipped recipes, which are captured now; A,machine=b200 is
    A on another machine.

    prism predict A case=hot-node

    PRISM's published use cases: large, calls, hot-node, slow-rank, kernels (recipes/README.md).
    """
    settings = settings_of(args.settings)
    if args.html is not None:
        check_outputs([Path(args.html)], args.force, [args.programs, *(args.against or ())])
    if not args.programs:
        raise UsageError("predict what?", fix="prism predict DIR")
    refuse_unused(settings, bool(args.against))
    if args.against or settings["case"] is not None:  # compared under the same spreads
        settings["variability"] = settings["variability"] or "public"
    if args.against:
        return _against(args, settings)
    if settings["case"] is not None:
        return _case(args, settings)
    job = _job(args.programs, settings)
    result, run, study = _answers(args, settings, job)
    if args.json:
        more = {"run": run, "study": study}
        shown = {name: None if v is None else dataclasses.asdict(v) for name, v in more.items()}
        print_json({**_plain(result), **shown, "durations": job.prices.used(), "calls": job.said})
        return 0
    show(result, job.graph, job.spread, job.said)
    console().print("durations: " + "\n           ".join(job.prices.used()))
    if study is not None:
        show_study(study)
    if run is not None:
        show_run(run)
    return 0


@dataclasses.dataclass(frozen=True)
class _Job:
    """What there is to predict: a world with prices and spreads.

    calls : of calls that were sampled; said: in words, also if there are none
    """

    graph: Any
    pricing: Callable[[Any], Any]
    prices: Any
    spread: Any
    calls: Any
    said: str
    gpus_per_node: int


def _job(path: str, settings: dict[str, Any]) -> _Job:
    """PrismError if its calls do not match, UsageError for what is not of its machine."""
    from megatron_prism import costs, graph, stochastic
    from megatron_prism.costs.collective import read_calibration
    from megatron_prism.costs.machine import machine
    from megatron_prism.replay import overlap

    programs = _programs(path)
    own = settings["machine"] or cli_settings.machine_of(programs)
    hardware, file = machine(own), settings["calibration"]
    measured = read_calibration(file) if file else None
    if measured is not None:
        cli_settings.check_calibration(measured.source, own)
    cli_settings.check_machine(programs, settings["machine"])
    spread = _spread(settings["variability"], programs)
    made = graph.build(programs)
    found = made.check()
    if found:
        raise PrismError(
            f"{len(found)} calls do not match, so there is nothing to predict; the first:\n"
            f"{found[0]}",
            fix=f"prism check {path}",
        )

    def pricing(graph: Any) -> Any:
        return overlap.priced(graph, costs.price(graph, hardware, measured), measured)

    prices = pricing(made)
    if not prices.used():
        raise PrismError(
            f"nothing in {path} takes time, so there is nothing to predict",
            fix=f"prism show {path}",
        )
    calls = stochastic.call_spread(made, prices, hardware, file) if file else None
    said = calls.source if calls is not None else f"all vary as {spread.name} says"
    if file and calls is None:
        said += f" ({file} has no samples of this job's calls)"
    return _Job(made, pricing, prices, spread, calls, said, hardware.gpus_per_node)


def _programs(path: str) -> Any:
    """What is in ``path``; a shipped recipe of that name is captured now, for this once."""
    from megatron_prism import recipe as recipes
    from megatron_prism.slices import open_programs

    if os.path.exists(path) or path not in recipes.shipped():
        programs = open_programs(path)
        warn_without_times(programs)
        return programs
    from megatron_prism.plugin import capture

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "slices"
        return capture.capture(recipes.load(path, []), folder, console=console(stderr=True))


def _against(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    """Layouts side by side."""
    from megatron_prism import stochastic
    from megatron_prism.report import comparison

    names = [args.programs, *args.against]
    asked = [_with(name, settings) for name in names]
    same = {(os.path.realpath(path), *map(str, own.items())) for path, own in asked}
    if len(same) < len(names):
        raise UsageError("a layout is compared with itself", fix="name each once")
    jobs = {name: _job(*one) for name, one in zip(names, asked, strict=True)}
    seed, samplers = settings["seed"], {}
    for place, (name, job) in enumerate(jobs.items()):
        own = stochastic.Sampler(job.graph, job.prices, seed + place * _STRIDE, job.calls, seed)
        samplers[name] = own, job.spread
    with progress("drawing iterations") as told:
        found = stochastic.compare(samplers, settings.get("samples"), progress=told)
    if args.html is not None:
        with whole_file(args.html, force=args.force) as file:
            file.write(comparison.render(found).encode(errors="backslashreplace"))
    if args.json:
        spreads = {n: {"spreads": j.spread.source, "calls": j.said, "durations": j.prices.used()}
                   for n, j in jobs.items()}  # fmt: skip
        shown = dataclasses.asdict(found)
        print_json({"schema": "prism.comparison/1", **shown, "rests_on": spreads})
        return 0
    show_comparison(found, {name: (job.spread.source, job.said) for name, job in jobs.items()})
    return 0


def _with(name: str, settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(path, settings) of ``DIR`` or ``DIR,machine=b200``: what differs for this layout alone."""
    path, *words = [name] if os.path.exists(name) else name.split(",")
    if not path or "" in words:
        raise UsageError(f"--against {name!r} names no layout", fix="--against DIR,machine=b200")
    keys = dict.fromkeys(("machine", "calibration", "variability"), cli_settings.name)
    return path, {**settings, **cli_settings.read(words, keys, "predict --against")}


def _case(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    """One of the published use cases."""
    from megatron_prism import stochastic

    if args.html is not None:
        raise UsageError("a case has no page", fix=f"leave out --html, or case={settings['case']}")
    if settings["case"] not in stochastic.CASES:
        stochastic.answer(settings["case"], None, None, 0)  # type: ignore[arg-type] - refuses it
    job = _job(args.programs, settings)
    with progress("drawing iterations"):
        sampler = stochastic.Sampler(job.graph, job.prices, settings["seed"], job.calls)
        found = stochastic.answer(settings["case"], sampler, job.spread, job.gpus_per_node)
    if args.json:
        rests = {"spreads": job.spread.source, "calls": job.said, "durations": job.prices.used()}
        print_json({"schema": "prism.case/1", **dataclasses.asdict(found), "rests_on": rests})
        return 0
    show_case(found, f"{job.spread.name}: {job.spread.source}")
    return 0


def _answers(args: argparse.Namespace, settings: dict[str, Any], job: _Job) -> tuple[Any, Any, Any]:
    """(the prediction, of a whole run if one is described, the what-ifs if there is a page)."""
    from megatron_prism import stochastic
    from megatron_prism.report import distribution

    asked, run, study = plan(settings), None, None
    with progress("drawing iterations") as told:
        result = stochastic.predict(
            job.graph,
            job.prices,
            job.spread,
            samples=settings.get("samples"),
            seed=settings["seed"],
            slow_by=settings.get("slow", 1.2),
            calls=job.calls,
            progress=told,
        )
    given = job.graph, job.prices, settings["seed"], job.calls
    if asked is not None:
        with progress("drawing clusters") as told:
            sampler = stochastic.Sampler(*given)
            run = stochastic.predict_run(sampler, job.spread, asked, progress=told)
    if args.html is not None:
        with progress("what if") as told, whole_file(args.html, force=args.force) as file:
            sampler = stochastic.Sampler(*given)
            study = stochastic.study(sampler, job.spread, job.gpus_per_node, job.pricing, told)
            page = distribution.render(result, str(job.graph.programs.world), study, run)
            file.write(page.encode(errors="backslashreplace"))
    return result, run, study


def _spread(name: str | None, programs: Any) -> Any:
    """What was asked for; without a name what the slices say, if they say anything."""
    from megatron_prism.costs.fitted import fitted, is_timed
    from megatron_prism.costs.variability import variability

    if name == "fitted" or name is None and is_timed(programs):
        return fitted(programs, variability("public"))
    return variability(name or "public")


def _plain(result: Any) -> dict[str, Any]:
    """JSON: times in ns; a quantile that the samples do not reach is null."""
    return {"schema": "prism.prediction/1", **dataclasses.asdict(result)}
