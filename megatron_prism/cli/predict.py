"""``prism predict``: how long iterations take when durations vary.

Prints quantiles of the iteration time with their intervals, what moves them, and where a slow GPU
hurts, as text, JSON or a page.  Without torch.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from megatron_prism.cli import what_ifs
from megatron_prism.cli.output import (
    check_outputs,
    console,
    print_table,
    steps,
    write_data,
    write_outputs,
)
from megatron_prism.core import units

if TYPE_CHECKING:
    from megatron_prism.predict import Prediction


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


def predict(args: argparse.Namespace) -> int:
    """The distribution of the iteration time over clusters and iterations, after PRISM.

    prism predict DIR
    prism predict DIR --machine h200 --calibration h200x4.json --variability mine.json --seed 1
    prism predict DIR dp=64 host=1.4        what-ifs, as prism replay has them

    --variability is how much times vary: fitted, as in the timed iterations of DIR (the default if
    it has five of them); public, as in published measurements (the default else); or a file like
    predict/variability/public.json.  --samples says how many iterations of the whole world are
    drawn, --slow how many times as long the one slow GPU computes (0.5: half as long).  Calls that
    --calibration has samples of vary as those do.  DIR may be the name of a shipped recipe, which
    is captured now.
    """
    from megatron_prism.predict import predict

    check_outputs([args.html], args.force, [args.programs])
    how = {"machine": args.machine, "calibration": args.calibration}
    programs = what_ifs.open_job(args.programs)
    priced = what_ifs.priced(programs, args.settings, "predict", **how)
    with steps() as told:
        found = predict(
            priced,
            variability=args.variability,
            samples=args.samples,
            seed=args.seed,
            slow_by=args.slow,
            progress=told,
        )
    write_outputs(args.force, (args.html, found.to_html))
    if write_data(args, found.to_json(), [dataclasses.asdict(one) for one in found.quantiles]):
        return 0
    show(found, args.verbose)
    print(what_ifs.machine_note(programs, args.machine), end="")
    return 0
