"""``prism predict``: how long iterations take when durations vary.

Prints quantiles of the iteration time with their intervals, what moves them, and where a slow GPU
hurts, as text, JSON or a page; or compares layouts.  Without torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_prism.cli import arguments
from megatron_prism.cli.output import (
    check_outputs,
    console,
    print_table,
    progress,
    steps,
    warn_without_times,
    write_data,
    write_outputs,
)
from megatron_prism.core import units
from megatron_prism.core.errors import UsageError

if TYPE_CHECKING:
    from megatron_prism.core.program import Programs
    from megatron_prism.predict import Comparison, Prediction, Study
    from megatron_prism.predict.predict import Chance

_MOST_SAMPLES = 5_000_000
_DEFAULTS = {"machine": None, "calibration": None, "variability": None, "host": None}


def settings_of(words: Sequence[str]) -> dict[str, Any]:
    """What each key was given, and defaults; ``samples`` and ``slow`` have none."""
    keys = {
        **dict.fromkeys(_DEFAULTS, arguments.name),
        "samples": arguments.count(1, _MOST_SAMPLES, "samples=100K; more take hours"),
        "seed": arguments.count(0, 1 << 62, "seed=2"),
        "slow": arguments.number("slow=1.2"),
    }
    return {**_DEFAULTS, "seed": 0, **arguments.read(words, keys, "predict")}


def ms(ns: float | None) -> str:
    """``1,234.5 ms``."""
    return "unknown" if ns is None or ns != ns else f"{ns / 1e6:,.1f} ms"


def _change(ns: float) -> str:
    shown = ms(ns)
    return shown.removeprefix("-") if shown == "-0.0 ms" else f"{'+' if ns > 0 else ''}{shown}"


Rows = list[tuple[str, ...]]


def show(result: Prediction, verbose: bool) -> None:
    """The prediction; ``verbose``: also what every time rests on."""
    out, spread = console(), result.variability
    out.print(result.graph)
    out.print(
        f"  without variation  {units.format_ns(round(result.steady))}  (as prism replay has it)"
    )
    if result.steady_high > result.steady_low:
        low, high = (units.format_ns(round(ns)) for ns in (result.steady_low, result.steady_high))
        between = f"{low} to {high}"
        out.print(f"                     {between}, nine times in ten: prism replay says why")
    out.print(
        f"  drawn              {result.samples:,} iterations, seed {result.seed}; the slowest"
    )
    out.print(f"                     of {result.replicas:,} copies of the model counts")
    rows: Rows = []
    for one in result.quantiles:
        over = "" if one.ns is None else units.format_change(one.ns / result.steady - 1)
        between = f"needs {one.needed:,} samples"
        if one.ns is not None:
            between = f"{ms(one.low)} to {ms(one.high)}"
        rows.append((f"p{100 * one.level:g}", ms(one.ns), over, between))
    print_table(("iteration", "", "over that", "95 % interval of the draws"), rows)
    p95 = next((one.ns for one in result.quantiles if one.level == 0.95), None)
    if p95 is not None:
        out.print("\nwhat moves p95")
        rows = [
            (f"{part} spread {getattr(spread, part):.2g} halved",
             ms(p95 + ns - result.halved_from), _change(ns - result.halved_from))
            for part, ns in sorted(result.halved.items(), key=lambda item: item[1])
            if getattr(spread, part)
        ]  # fmt: skip
        rows += [
            (
                f"one GPU of {result.classes[index]} takes {result.slow_by:g} x as long",
                ms(p95 + ns - result.slow_from),
                _change(ns - result.slow_from),
            )
            for index, ns in result.slow.items()
        ]
        print_table(("if", "p95", "change"), rows)
    out.print(f"\nspreads: {result.source}")
    out.print(f"calls: {result.calls}")
    if verbose:
        out.print("durations: " + "\n           ".join(result.durations))
    else:
        short = dict.fromkeys(text.partition(" (")[0] for text in result.durations)
        out.print("durations: " + "\n           ".join(short) + " (-v says more)")
    out.print("not in it: contention, drift of a rank between two calls")


def show_study(study: Study) -> None:
    """What-ifs."""
    out = console()
    placed, hot = study.placement, study.hot
    factors = [f"x {factor:g}" for factor in placed.factors]
    if len(placed.classes) == 1:
        out.print("\none slow GPU; there is one class")
        rows: Rows = [(factor, ms(p95)) for factor, (p95,) in zip(factors, placed.p95, strict=True)]
        print_table(("slower", "p95"), rows)
    else:
        out.print("\none slow GPU, best and worst class")
        rows = [
            (factor, ms(min(row)), ms(max(row)), f"{gain:.3f}")
            for factor, row, gain in zip(factors, placed.p95, placed.gain, strict=True)
        ]
        print_table(("slower", "best p95", "worst p95", "worst / best"), rows)
    out.print(f"\none hot node ({hot[0].ranks} GPUs), of each kind that there is")
    nodes = [dict(node.p95) for node in hot]
    rows = [(f"x {factor:g}", *(ms(node[factor]) for node in nodes)) for factor in placed.factors]
    print_table(("slower", *(f"node {node.node}" for node in hot)), rows)
    if study.scale:
        out.print("\nother worlds")
        rows = [(f"{p.ranks:,}", ms(p.steady), ms(p.p50), ms(p.p95)) for p in study.scale]
        print_table(("ranks", "without variation", "p50", "p95"), rows)
    out.print(study.note)


def _percent(one: Chance) -> str:
    return f"{100 * one.share:.1f} % ({100 * one.low:.1f} to {100 * one.high:.1f} %)"


def show_comparison(found: Comparison, verbose: bool) -> None:
    """Layouts side by side; ``verbose``: also what each rests on."""
    out = console()
    first = found.layouts[0].name
    out.print(f"{found.samples:,} iterations each, one network for all, seed {found.seed}\n")
    head = ["layout", "ranks", "microbatches", "no variation"]
    head += [f"p{100 * one.level:g}" for one in found.layouts[0].quantiles]
    rows = [
        (
            one.name,
            f"{one.ranks:,}",
            f"{one.microbatches:,}",
            ms(one.steady),
            *(ms(q.ns) for q in one.quantiles),
        )
        for one in found.layouts
    ]
    print_table(head, rows)
    out.print("\n95 % intervals")
    rows = [
        (one.name, *("unknown" if q.ns is None else f"{ms(q.low)} to {ms(q.high)}"
                     for q in one.quantiles))
        for one in found.layouts
    ]  # fmt: skip
    print_table([head[0], *head[4:]], rows)
    out.print()
    rows = [
        (one.name, "" if one.slower is None else _percent(one.slower), _percent(one.fastest))
        for one in found.layouts
    ]
    print_table(("layout", f"{first} is faster", "fastest of all"), rows)
    if found.note:
        out.print(f"\nbeware: {found.note}")
    said: dict[str, list[str]] = {}
    for name, one in found.rests_on.items():
        said.setdefault(f"  spreads: {one.spreads}\n  calls: {one.calls}", []).append(name)
    for text, names in said.items():
        out.print(f"\n{', '.join(names)}\n{text}")


def predict(args: argparse.Namespace) -> int:
    """The distribution of the iteration time over clusters and iterations, after PRISM.

    prism predict DIR
    prism predict DIR machine=h200 calibration=h200x4.json variability=mine.json seed=1 slow=1.2

    variability=fitted      how much times vary: as in the timed iterations of DIR.  The default if
                            it has five of them
    variability=public      as in published measurements.  The default else, and with --against
    variability=mine.json   a file like predict/variability/public.json
    samples=2000            how many iterations of the whole world are drawn
    slow=1.2                how many times as long the one slow GPU computes (0.5: half as long)
    host=1.4                the index of the hosts, as in prism replay

    Calls that calibration= has samples of vary as those do.

    prism predict A --against B --against C

    Layouts side by side under one network: quantiles of each, and how often A is faster.
    A, B and C are slices, or names of shipped recipes, which are captured now; A,machine=b200 is
    A on another machine.
    """
    settings = settings_of(args.settings)
    check_outputs([args.html], args.force, [args.programs, *(args.against or ())])
    if not args.programs:
        raise UsageError("predict what?", fix="prism predict DIR")
    if args.against:
        if settings.get("slow") is not None:
            raise UsageError("slow with --against", fix="predict each layout alone for that")
        return _against(args, settings)
    found = _predict(args, settings)
    write_outputs(args.force, (args.html, found.to_html))
    if write_data(args, found.to_json(), [dataclasses.asdict(one) for one in found.quantiles]):
        return 0
    show(found, args.verbose)
    if found.study is not None:
        show_study(found.study)
    return 0


def _programs(path: str) -> Programs:
    """What is in ``path``; a shipped recipe of that name is captured now, for this once."""
    from megatron_prism.core import recipe
    from megatron_prism.core.slices import open_programs

    if os.path.exists(path) or path not in recipe.shipped():
        programs = open_programs(path)
        warn_without_times(programs)
        return programs
    from megatron_prism.emulate import recipe_job

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "slices"
        return recipe_job.capture(recipe.load(path, []), folder, console=console(stderr=True))


def _predict(args: argparse.Namespace, settings: dict[str, Any]) -> Prediction:
    """The distribution; what-ifs too if there is a page."""
    from megatron_prism.predict import predict
    from megatron_prism.replay.priced_graph import WhatIf

    programs = _programs(args.programs)
    with steps() as told:
        return predict(
            programs,
            machine=settings["machine"],
            calibration=settings["calibration"],
            what_if=WhatIf(host=settings["host"]),
            variability=settings["variability"],
            samples=settings.get("samples"),
            seed=settings["seed"],
            slow_by=settings.get("slow", 1.2),
            what_ifs=args.html is not None,
            progress=told,
        )


def _against(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    """Layouts side by side."""
    from megatron_prism.predict import compare
    from megatron_prism.replay.priced_graph import WhatIf, price

    names = [args.programs, *args.against]
    asked = {name: _with(name, settings) for name in names}
    same = {(os.path.realpath(path), *map(str, own.items())) for path, own in asked.values()}
    if len(same) < len(names):
        raise UsageError("a layout is compared with itself", fix="name each once")
    layouts = {
        name: price(
            _programs(path),
            machine=own["machine"],
            calibration=own["calibration"],
            what_if=WhatIf(host=own["host"]),
        )  # fmt: skip
        for name, (path, own) in asked.items()
    }
    with progress("drawing iterations") as told:
        found = compare(
            layouts,
            variability={name: own["variability"] or "public" for name, (_, own) in asked.items()},
            samples=settings.get("samples"),
            seed=settings["seed"],
            progress=told,
        )
    write_outputs(args.force, (args.html, found.to_html))
    if write_data(args, found.to_json(), [dataclasses.asdict(one) for one in found.layouts]):
        return 0
    show_comparison(found, args.verbose)
    return 0


def _with(name: str, settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(path, settings) of ``DIR`` or ``DIR,machine=b200``: what differs for this layout alone."""
    path, *words = [name] if os.path.exists(name) else name.split(",")
    if not path or "" in words:
        raise UsageError(f"--against {name!r} names no layout", fix="--against DIR,machine=b200")
    keys = dict.fromkeys(_DEFAULTS, arguments.name)
    return path, {**settings, **arguments.read(words, keys, "predict --against")}
