"""``prism predict``: how long iterations take when durations vary.

Prints quantiles of the iteration time with their intervals, what moves them, and where a slow GPU
hurts.  Without torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
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
from megatron_prism.core import feature
from megatron_prism.core.columns import folded
from megatron_prism.core.units import format_change, format_ns

if TYPE_CHECKING:
    from megatron_prism.core.programs.program import Programs
    from megatron_prism.features.predict.distributions import Quantile
    from megatron_prism.features.predict.predict import Prediction
    from megatron_prism.replay.drawn_steps import DrawnSteps


def ms(ns: float | None) -> str:
    """Write a time as ``1,234.5 ms``."""
    if ns is None or math.isnan(ns):
        return "unknown"
    return f"{ns / 1e6:,.1f} ms"


def _change(ns: float) -> str:
    """Write a change of a time with its sign."""
    text = ms(ns)
    # a change below the last digit has no sign
    if text == "-0.0 ms":
        return "0.0 ms"
    return f"+{text}" if ns > 0 else text


Row = tuple[str, ...]
_INDENT = 11  # of the words behind ``durations: ``


def show(result: Prediction, verbose: bool) -> None:
    """Print the prediction; ``verbose``: also what every time rests on."""
    _show_head(result)
    steady_ns, over = result.steady, "over that"
    if result.inputs is not None:
        # with other inputs in each step the captured iteration is no measure
        over = "over the median step"
        steady_ns = result.inputs.median_ns
    rows = [_quantile_row(quantile, steady_ns) for quantile in result.quantiles]
    print_table(("iteration", "", over, "95 % interval of the draws"), rows)
    for quantile in result.quantiles:
        # with too few draws for p95 nothing can be said of what moves it
        if quantile.level == 0.95 and quantile.ns is not None:
            console().print("\nwhat moves p95")
            print_table(("if", "p95", "change"), _what_if_rows(result, quantile.ns))
            break
    print()
    print(*folded(f"spreads: {result.source}"), sep="\n")
    print(*folded(f"calls: {result.calls}"), sep="\n")
    durations = list(result.durations)
    # without what stands in parentheses several are alike
    if not verbose:
        durations = list(dict.fromkeys(text.partition(" (")[0] for text in durations))
    for number, text in enumerate(durations):
        label = " " * _INDENT if number else "durations: "
        print(*folded(f"{label}{text}", _INDENT), sep="\n")
    console().print("not in it: contention, drift of a rank between two calls")


def _show_head(result: Prediction) -> None:
    """Print the time without variation, and what was drawn."""
    out = console()
    out.print(result.graph)
    out.print(f"  without variation  {format_ns(round(result.steady))}  (as prism replay has it)")
    if result.steady_high > result.steady_low:
        low = format_ns(round(result.steady_low))
        high = format_ns(round(result.steady_high))
        print(f"                     {low} to {high}, nine times in ten")
    if result.inputs is not None:
        median = format_ns(result.inputs.median_ns)
        for number, line in enumerate(result.inputs.text.splitlines()):
            label = "" if number else "inputs"
            print(f"  {label:<19}{line}")
        print(f"                     {result.inputs.steps:,} different steps, median {median}")
    out.print(
        f"  drawn              {result.samples:,} iterations, seed {result.seed}; the slowest"
    )
    out.print(f"                     of {result.replicas:,} copies of the model counts")


def _quantile_row(quantile: Quantile, steady_ns: float) -> Row:
    """Return the row of a quantile."""
    name = f"p{100 * quantile.level:g}"
    if quantile.ns is None:
        return name, ms(None), "", f"needs {quantile.needed:,} samples"
    over_steady = format_change(quantile.ns / steady_ns - 1)
    return name, ms(quantile.ns), over_steady, f"{ms(quantile.low)} to {ms(quantile.high)}"


def _what_if_rows(result: Prediction, p95_ns: float) -> list[Row]:
    """Return a row for each change that was tried."""
    rows: list[Row] = []
    for part, ns in sorted(result.halved.items(), key=lambda item: item[1]):
        spread = getattr(result.variability, part)
        # half of no spread changes nothing
        if spread:
            change = ns - result.halved_from
            rows.append(
                (f"{part} spread {spread:.2g} halved", ms(p95_ns + change), _change(change))
            )
    if result.inputs is not None:
        for text, ns in result.inputs.changed.items():
            change = ns - result.inputs.changed_from
            rows.append((text, ms(p95_ns + change), _change(change)))
    for index, ns in result.slow.items():
        text = f"one GPU of {result.classes[index]} takes {result.slow_by:g} x as long"
        change = ns - result.slow_from
        rows.append((text, ms(p95_ns + change), _change(change)))
    return rows


def predict(args: argparse.Namespace) -> Answer:
    """The distribution of the iteration time over clusters and iterations, after PRISM.

    prism predict DIR
    prism predict DIR --machine h200 --calibration h200x4.json --variability mine.json --seed 1
    prism predict DIR dp=64 host=1.4        what-ifs, as prism replay has them
    prism predict DIR lengths=FILE capture=DIR2 [iterations=N]
                                            samples of other lengths, as prism uneven has them

    --variability sets how much times vary: fitted to the timed iterations of DIR (the default if it
    has five of them), public (published measurements; otherwise the default), or a file like
    variability/public.json.  --samples is the number of drawn iterations of the whole world, --slow
    the factor by which the one slow GPU computes longer (0.5: half as long).  Calls with samples in
    --calibration vary as these do.  DIR may be the name of a shipped recipe, which is captured now.
    """
    from megatron_prism.features.predict.predict import predict

    programs = what_ifs.open_job(args.programs)
    drawn = _drawn_steps(args, programs)
    if drawn is not None:
        priced = drawn.priced
    else:
        priced = what_ifs.priced(
            programs,
            args.settings,
            "predict",
            machine=args.machine,
            calibration=args.calibration,
        )
    with steps() as progress:
        result = predict(
            priced,
            variability=args.variability,
            samples=args.samples,
            seed=args.seed,
            slow_by=args.slow,
            steps=drawn,
            progress=progress,
        )

    def page() -> None:
        show(result, args.verbose)
        print(what_ifs.machine_note(programs, args.machine), end="")

    rows = [dataclasses.asdict(quantile) for quantile in result.quantiles]
    return Answer(result.to_json, page, lambda: rows, html=result.to_html)


def _drawn_steps(args: argparse.Namespace, programs: Programs) -> DrawnSteps | None:
    """Return the steps that words about inputs say; None: there are no such words."""
    for module in feature.modules("drawn_steps"):
        drawn: DrawnSteps | None
        drawn = module.read_steps(
            programs, args.settings, args.machine, args.calibration, args.seed
        )
        if drawn is not None:
            return drawn
    return None


_SAMPLES = option(
    "samples",
    arguments.count(1, 5_000_000, "--samples 100K; more take hours"),
    "N",
    "iterations to draw",
)
_SEED = option("seed", arguments.count(0, 1 << 62, "--seed 2"), "N", "seed of the draws", default=0)
_SLOW = option(
    "slow", arguments.number("--slow 1.2"), "1.2", "factor of the one slow GPU", default=1.2
)
_SPREADS = option("variability", arguments.name, "NAME", "spreads: fitted, public, or a file")


COMMANDS = {
    "predict": Command(
        predict,
        (
            PROGRAMS,
            WHAT_IFS,
            MACHINE,
            CALIBRATION,
            _SPREADS,
            _SAMPLES,
            _SEED,
            _SLOW,
            file_option("--html", "page to write, with all what-ifs"),
            VERBOSE,
        ),
        group=HelpGroup.ASK,
        programs=0,
        shows_progress=True,
    ),
}
