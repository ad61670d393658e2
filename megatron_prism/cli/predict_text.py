"""How does ``prism predict`` look as text?  Tables of quantiles, what-ifs and whole runs.

In : what ``stochastic`` found.  Out: lines on stdout; times in ms, unknown where draws do
not reach.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_prism.cli.output import console, print_table

if TYPE_CHECKING:
    from megatron_prism.predict import Comparison, Prediction, RunPrediction, Study
    from megatron_prism.predict.compare import Chance

__all__ = ["ms", "show", "show_comparison", "show_run", "show_study"]


def ms(ns: float | None) -> str:
    """``1,234.5 ms``."""
    return "unknown" if ns is None or ns != ns else f"{ns / 1e6:,.1f} ms"


def _change(ns: float) -> str:
    return f"{'+' if ns > 0 else ''}{ms(ns)}"


Rows = list[tuple[str, ...]]


def show(result: Prediction) -> None:
    """The prediction."""
    out, spread = console(), result.variability
    out.print(result.graph)
    out.print(f"  without variation  {ms(result.steady)}  (as prism replay has it)")
    out.print(
        f"  drawn              {result.samples:,} iterations, seed {result.seed}; the slowest"
    )
    out.print(f"                     of {result.replicas:,} copies of the model counts")
    rows: Rows = []
    for one in result.quantiles:
        over = "" if one.ns is None else f"{100 * (one.ns / result.steady - 1):+.1f} %"
        between = f"needs {one.needed:,} samples"
        if one.ns is not None:
            between = f"{ms(one.low)} to {ms(one.high)}"
        rows.append((f"p{100 * one.level:g}", ms(one.ns), over, between))
    print_table(("iteration", "", "over that", "95 % interval"), rows)
    p95 = next((one.ns for one in result.quantiles if one.level == 0.95), None)
    if p95 is not None:
        out.print("\nwhat moves p95")
        rows = [
            (f"{part} spread {getattr(spread, part):.2g} halved", ms(ns),
             _change(ns - result.halved_from))
            for part, ns in sorted(result.halved.items(), key=lambda item: item[1])
            if getattr(spread, part)
        ]  # fmt: skip
        rows += [
            (
                f"one GPU of class {index} takes {result.slow_by:g} x as long",
                ms(ns),
                _change(ns - result.slow_from),
            )
            for index, ns in result.slow.items()
        ]
        print_table(("if", "p95", "change"), rows)
    out.print(f"\nspreads: {result.source}")
    out.print(f"calls: {result.calls}")
    out.print("durations: " + "\n           ".join(result.durations))
    out.print("not in it: contention, drift of a rank between two calls")


def show_study(study: Study) -> None:
    """What-ifs."""
    out = console()
    out.print("\np95 if a spread were half, or twice as large")
    rows: Rows = [(bar.what, ms(bar.halved), ms(bar.doubled)) for bar in study.tornado]
    print_table(("what varies", "half", "twice"), rows)
    placed, hot = study.placement, study.hot
    factors = [f"x {factor:g}" for factor in placed.factors]
    if len(placed.classes) == 1:
        out.print("\none slow GPU; there is one class")
        rows = [(factor, ms(p95)) for factor, (p95,) in zip(factors, placed.p95, strict=True)]
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


def _long(ns: float | None) -> str:
    """Days, hours, minutes or seconds."""
    if ns is None:
        return "none"
    for name, size in (("days", 86_400e9), ("h", 3_600e9), ("min", 60e9)):
        if ns >= 2 * size:
            return f"{ns / size:,.1f} {name}"
    return f"{ns / 1e9:,.3g} s"


def show_run(run: RunPrediction) -> None:
    """A whole run."""
    out = console()
    plan = run.plan
    out.print(f"\n{plan.iterations:,} iterations of {ms(run.iteration)} on average")
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
        low, high = 100 * (run.chance_low or 0), 100 * (run.chance_high or 0)
        said = f"{100 * run.chance:.1f} %, 95 % interval {low:.1f} to {high:.1f} %"
        rows.append((f"by the deadline, {_long(plan.deadline)}", said))
    print_table(("the whole run", ""), rows)


def _percent(one: Chance) -> str:
    return f"{100 * one.share:.1f} % ({100 * one.low:.1f} to {100 * one.high:.1f} %)"


def show_comparison(found: Comparison) -> None:
    """Layouts side by side."""
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
    for name, one in found.rests_on.items():
        out.print(f"\n{name}\n  spreads: {one.spreads}\n  calls: {one.calls}")
