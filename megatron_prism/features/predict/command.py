"""``prism predict``: how long iterations take when durations vary.

Prints quantiles of the iteration time with their intervals, what moves them, and where a slow GPU
hurts.  Without torch.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from megatron_prism.cli import arguments, what_ifs
from megatron_prism.cli.command import (
    CALIBRATION,
    MACHINE,
    PROGRAMS,
    VERBOSE,
    WHAT_IFS,
    Command,
    HelpGroup,
    file_option,
    option,
)
from megatron_prism.cli.output import Answer, console, print_table, steps
from megatron_prism.core.columns import folded
from megatron_prism.core.units import format_change, format_ns

if TYPE_CHECKING:
    from megatron_prism.features.predict.predict import Prediction


def ms(ns: float | None) -> str:
    """``1,234.5 ms``."""
    return "unknown" if ns is None or ns != ns else f"{ns / 1e6:,.1f} ms"


def _change(ns: float) -> str:
    shown = ms(ns)
    return shown.removeprefix("-") if shown == "-0.0 ms" else f"{'+' if ns > 0 else ''}{shown}"


Rows = list[tuple[str, ...]]


def show(result: Prediction, verbose: bool) -> None:
    """The prediction; ``verbose``: also what every time rests on."""
    out = console()
    out.print(result.graph)
    out.print(f"  without variation  {format_ns(round(result.steady))}  (as prism replay has it)")
    if result.steady_high > result.steady_low:
        low, high = (format_ns(round(ns)) for ns in (result.steady_low, result.steady_high))
        between = f"{low} to {high}"
        print(f"                     {between}, nine times in ten")
    out.print(
        f"  drawn              {result.samples:,} iterations, seed {result.seed}; the slowest"
    )
    out.print(f"                     of {result.replicas:,} copies of the model counts")
    rows: Rows = [
        (f"p{100 * one.level:g}", ms(one.ns), "", f"needs {one.needed:,} samples")
        if one.ns is None else
        (f"p{100 * one.level:g}", ms(one.ns), format_change(one.ns / result.steady - 1),
         f"{ms(one.low)} to {ms(one.high)}")
        for one in result.quantiles
    ]  # fmt: skip
    print_table(("iteration", "", "over that", "95 % interval of the draws"), rows)
    p95 = next((one.ns for one in result.quantiles if one.level == 0.95), None)
    if p95 is not None:
        out.print("\nwhat moves p95")
        halved = sorted(result.halved.items(), key=lambda item: item[1])
        spreads = {part: getattr(result.variability, part) for part, _ in halved}
        moves = [(f"{part} spread {spreads[part]:.2g} halved", ns - result.halved_from)
                 for part, ns in halved if spreads[part]]  # fmt: skip
        moves += [(f"one GPU of {result.classes[index]} takes {result.slow_by:g} x as long",
                   ns - result.slow_from) for index, ns in result.slow.items()]  # fmt: skip
        rows = [(what, ms(p95 + change), _change(change)) for what, change in moves]
        print_table(("if", "p95", "change"), rows)
    print()
    for text in (f"spreads: {result.source}", f"calls: {result.calls}"):
        print(*folded(text), sep="\n")
    short = dict.fromkeys(text.partition(" (")[0] for text in result.durations)
    for number, text in enumerate(result.durations if verbose else short):
        print(*folded(f"{' ' * 11 if number else 'durations: '}{text}", 11), sep="\n")
    out.print("not in it: contention, drift of a rank between two calls")


def predict(args: argparse.Namespace) -> Answer:
    """The distribution of the iteration time over clusters and iterations, after PRISM.

    prism predict DIR
    prism predict DIR --machine h200 --calibration h200x4.json --variability mine.json --seed 1
    prism predict DIR dp=64 host=1.4        what-ifs, as prism replay has them

    --variability is how much times vary: fitted, as in the timed iterations of DIR (the default if
    it has five of them); public, as in published measurements (the default else); or a file like
    variability/public.json.  --samples says how many iterations of the whole world are drawn,
    --slow how many times as long the one slow GPU computes (0.5: half as long).  Calls that
    --calibration has samples of vary as those do.  DIR may be the name of a shipped recipe, which
    is captured now.
    """
    from megatron_prism.features.predict.predict import predict

    how = {"machine": args.machine, "calibration": args.calibration}
    programs = what_ifs.open_job(args.programs)
    priced = what_ifs.priced(programs, args.settings, "predict", **how)
    with steps() as progress:
        found = predict(
            priced,
            variability=args.variability,
            samples=args.samples,
            seed=args.seed,
            slow_by=args.slow,
            progress=progress,
        )

    def page() -> None:
        show(found, args.verbose)
        print(what_ifs.machine_note(programs, args.machine), end="")

    rows = [dataclasses.asdict(one) for one in found.quantiles]
    return Answer(found.to_json, page, lambda: rows, html=found.to_html)


COMMANDS = {
    "predict": Command(
        predict,
        (
            PROGRAMS,
            WHAT_IFS,
            MACHINE,
            CALIBRATION,
            option("variability", arguments.name, "NAME", "fitted, public, or a file"),
            option(
                "samples",
                arguments.count(1, 5_000_000, "--samples 100K; more take hours"),
                "N",
                "iterations to draw",
            ),
            option("seed", arguments.count(0, 1 << 62, "--seed 2"), "N", "of the draws", default=0),
            option(
                "slow", arguments.number("--slow 1.2"), "1.2", "of the one slow GPU", default=1.2
            ),
            file_option("--html", "page to write, with all what-ifs"),
            VERBOSE,
        ),
        group=HelpGroup.ASK,
        programs=0,
        shows_progress=True,
    ),
}
