"""``prism predict``: how long do iterations take when durations vary?

In : programs, a machine, spreads.  Out: quantiles of the iteration time with their intervals, what
moves them, and where a slow GPU hurts; as a page of text or JSON.  Without torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

from megatron_prism import cli_settings, units
from megatron_prism.artefact import whole_file
from megatron_prism.cli_output import console, print_json, print_table, progress
from megatron_prism.errors import PrismError, UnitError, UsageError

__all__ = ["predict"]

_MOST_SAMPLES = 5_000_000
_RUN = ("iterations", "deadline", "mtbf", "checkpoint", "checkpoint_cost", "restart")


def predict(args: argparse.Namespace) -> int:
    """The distribution of the iteration time over clusters and iterations, after PRISM.

    prism predict DIR
    prism predict DIR machine=h200 calibration=h200x4.json variability=mine.json seed=1 slow=1.2

    variability= is fitted (to the timed iterations of DIR), the name of shipped spreads or a JSON
    file like costs/variability/public.json; samples= how many iterations of the whole world are
    drawn; slow= the factor of the one slow GPU.

    prism predict DIR iterations=500K deadline=30d mtbf=3h checkpoint_cost=30s restart=10min

    The whole run: mtbf= of the job, checkpoint= the time between two (or best).  --html adds what
    single calls, slow GPUs, a hot node and other world sizes do to p95.
    """
    from megatron_prism import costs, graph
    from megatron_prism.costs.collective import read_calibration
    from megatron_prism.costs.machine import machine
    from megatron_prism.slices import open_programs

    settings = _settings(args.settings)
    if args.html is not None and os.path.lexists(args.html) and not args.force:
        raise UsageError(f"{args.html} exists and is not overwritten", fix="--force")
    programs = open_programs(args.programs)
    own = settings["machine"] or cli_settings.machine_of(programs)
    hardware = machine(own)
    measured = read_calibration(settings["calibration"]) if settings["calibration"] else None
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
            fix=f"prism check {args.programs}",
        )

    def pricing(graph: Any) -> Any:
        return costs.price(graph, hardware, measured)

    result, run, study, prices = _answers(
        args, settings, made, spread, pricing, hardware.gpus_per_node
    )
    if args.json:
        more = {"run": run, "study": study}
        shown = {name: None if v is None else dataclasses.asdict(v) for name, v in more.items()}
        print_json({**_plain(result), **shown, "durations": prices.used()})
        return 0
    _print(result, made, spread)
    console().print("durations: " + "\n           ".join(prices.used()))
    if study is not None:
        _print_study(study)
    if run is not None:
        _print_run(run)
    return 0


def _answers(
    args: argparse.Namespace,
    settings: dict[str, Any],
    made: Any,
    spread: Any,
    pricing: Callable[[Any], Any],
    gpus_per_node: int,
) -> tuple[Any, Any, Any, Any]:
    """(the prediction, of a whole run if one is described, the what-ifs if there is a page, the
    prices)."""
    from megatron_prism import stochastic
    from megatron_prism.report import distribution

    plan, run, study = _plan(settings), None, None
    prices = pricing(made)
    with progress("drawing iterations") as told:
        result = stochastic.predict(
            made,
            prices,
            spread,
            samples=settings["samples"],
            seed=settings["seed"],
            slow_by=settings["slow"],
            progress=told,
        )
    if plan is not None:
        with progress("drawing clusters") as told:
            sampler = stochastic.Sampler(made, prices, settings["seed"])
            run = stochastic.predict_run(sampler, spread, plan, progress=told)
    if args.html is not None:
        with progress("what if") as told, whole_file(args.html, force=args.force) as file:
            sampler = stochastic.Sampler(made, prices, settings["seed"])
            study = stochastic.study(sampler, spread, gpus_per_node, pricing, told)
            page = distribution.render(result, str(made.programs.world), study, run)
            file.write(page.encode())
    return result, run, study, prices


def _spread(name: str, programs: Any) -> Any:
    from megatron_prism.costs.fitted import fitted
    from megatron_prism.costs.variability import variability

    if name == "fitted":
        return fitted(programs, variability("public"))
    return variability(name)


def _duration(text: str) -> float:
    """ns; ``30d`` as well."""
    days = text.strip().removesuffix("d")
    try:
        ns = float(days) * 24 * 3600e9 if days != text.strip() else float(units.parse_ns(text))
    except ValueError:
        ns = math.nan
    if not math.isfinite(ns):
        raise UnitError(f"{text!r} is no duration", fix="write it like 30d, 3h, 10min, 30s")
    return ns


def _plan(settings: dict[str, Any]) -> Any:
    """The run that was asked for, if one was."""
    from megatron_prism.stochastic.whole_run import Plan

    given = {key: settings[key] for key in _RUN if settings.get(key) is not None}
    if not given:
        return None
    if "iterations" not in given:
        raise UsageError(f"{', '.join(given)} of how many iterations?", fix="iterations=500000")
    interval = given.get("checkpoint")
    return Plan(
        given["iterations"],
        given.get("deadline"),
        given.get("mtbf"),
        None if interval == "best" else interval,
        given.get("checkpoint_cost", 0.0),
        given.get("restart", 0.0),
    )


def _settings(words: Sequence[str]) -> dict[str, Any]:
    defaults = {"machine": None, "calibration": None, "variability": "public"}
    defaults |= {"samples": None, "seed": 0, "slow": 1.2}
    keys = {
        **dict.fromkeys(("machine", "calibration", "variability"), str),
        "samples": cli_settings.count(0, _MOST_SAMPLES, "samples=100K; more take hours"),
        "seed": cli_settings.count(0, 1 << 62, "seed=2"),
        "slow": cli_settings.number("slow=1.2"),
        **dict.fromkeys(("deadline", "mtbf", "checkpoint_cost", "restart"), _duration),
        "iterations": cli_settings.count(1, 1 << 40, "iterations=500000"),
        "checkpoint": lambda text: text if text == "best" else _duration(text),
    }
    return {**defaults, **cli_settings.read(words, keys, "predict")}


def _plain(result: Any) -> dict[str, Any]:
    """JSON: times in ns; a quantile that the samples do not reach is null."""
    return {"schema": "prism.prediction/1", **dataclasses.asdict(result)}


def _ms(ns: float | None) -> str:
    return "unknown" if ns is None or ns != ns else f"{ns / 1e6:,.1f} ms"


def _print(result: Any, graph: Any, spread: Any) -> None:
    out = console()
    out.print(f"{graph}")
    out.print(f"  without variation  {_ms(result.steady)}  (the longest path)")
    out.print(
        f"  drawn              {result.samples:,} iterations, seed {result.seed}; the slowest"
    )
    out.print(f"                     of {result.replicas:,} copies of the model counts")
    rows = []
    for one, bound in zip(result.quantiles, result.bounds, strict=True):
        over = "" if one.ns is None else f"{100 * (one.ns / result.steady - 1):+.1f} %"
        between = f"needs {one.needed:,} samples"
        if one.ns is not None:
            between = f"{_ms(one.low)} to {_ms(one.high)}"
        surely = f"{_ms(bound.low)} to {_ms(bound.high)}"
        rows.append((f"p{100 * one.level:g}", _ms(one.ns), over, between, surely))
    print_table(("iteration", "", "over the path", "95 % interval", "analytic bounds"), rows)
    p95 = next((one.ns for one in result.quantiles if one.level == 0.95), None)
    if p95 is not None:
        out.print("\nwhat moves p95")
        rows = [
            (f"{part} spread {getattr(spread, part):.2g} halved", _ms(ns),
             _ms(ns - result.halved_from))
            for part, ns in sorted(result.halved.items(), key=lambda item: item[1])
            if getattr(spread, part)
        ]  # fmt: skip
        rows += [
            (
                f"one GPU of class {index} {result.slow_by:g} x slower",
                _ms(ns),
                _ms(ns - result.slow_from),
            )
            for index, ns in result.slow.items()
        ]
        print_table(("if", "p95", "change"), rows)
    out.print(f"\nspreads: {result.source}")
    out.print("not in it: contention, drift of a rank between two calls")


def _print_study(study: Any) -> None:
    out = console()
    out.print("\np95 if a spread were half, or twice as large")
    rows = [(bar.what, _ms(bar.halved), _ms(bar.doubled)) for bar in study.tornado]
    print_table(("what varies", "half", "twice"), rows)
    placed, hot = study.placement, study.hot
    out.print(f"\none slow GPU, best and worst class; node {hot.node} hot ({hot.ranks} GPUs)")
    rows = [
        (f"x {factor:g}", _ms(min(row)), _ms(max(row)), f"{gain:.3f}", _ms(all_))
        for factor, row, gain, (_, all_) in zip(
            placed.factors, placed.p95, placed.gain, hot.p95, strict=True
        )
    ]
    print_table(("slower", "best p95", "worst p95", "worst / best", "hot node"), rows)
    if study.scale:
        out.print("\nother worlds")
        rows = [(f"{p.ranks:,}", _ms(p.steady), _ms(p.p50), _ms(p.p95)) for p in study.scale]
        print_table(("ranks", "without variation", "p50", "p95"), rows)
    out.print(study.note)


def _long(ns: float | None) -> str:
    """Days, hours, minutes or seconds."""
    if ns is None:
        return "none"
    for name, size in (("days", 86_400e9), ("h", 3_600e9), ("min", 60e9)):
        if ns >= 2 * size:
            return f"{ns / size:,.1f} {name}"
    return f"{ns / 1e9:,.3g} s"


def _print_run(run: Any) -> None:
    out = console()
    plan = run.plan
    out.print(f"\n{plan.iterations:,} iterations of {_ms(run.iteration)} on average")
    rows = [("iterations alone", _long(run.work)), ("mean, all included", _long(run.mean))]
    rows += [(f"p{100 * level:g}", _long(ns)) for level, ns in run.quantiles]
    rows.append(("failures", f"{run.failures:,.1f}"))
    if run.interval is not None:
        said = f"{_long(run.interval)} of work"
        if run.young is not None:
            best = f"best {_long(run.best)}, Young {_long(run.young)}, Daly {_long(run.daly)}"
            said = f"{said} ({best})"
        rows.append(("between checkpoints", said))
    if run.chance is not None:
        low, high = 100 * run.chance_low, 100 * run.chance_high
        said = f"{100 * run.chance:.1f} %, 95 % interval {low:.1f} to {high:.1f} %"
        rows.append((f"by the deadline, {_long(plan.deadline)}", said))
    print_table(("the whole run", ""), rows)
