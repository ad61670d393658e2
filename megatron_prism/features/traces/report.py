"""What ``prism import`` and ``prism compare`` print."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from megatron_prism.core import units
from megatron_prism.core.columns import columns
from megatron_prism.core.rendering import Renderer, renders
from megatron_prism.features.traces.compare import Difference, Times, TraceComparison
from megatron_prism.features.traces.variance import Component, GroupTime, Outlier, Variation
from megatron_prism.report.chrome_trace import TrackOf, render_tracks
from megatron_prism.report.replay import render_html

_MOST_ROWS = 12  # of what differs most


def format_ns(ns: float) -> str:
    """Write a time in whole ns."""
    return units.format_ns(round(ns))


def _percent(part: float) -> str:
    if math.isnan(part):
        return "unknown"
    return units.format_percent(part)


# -- what varies ----------------------------------------------------------------------------------
def render_variation(variation: Variation) -> str:
    """Measured against replayed, what varies, who stands out, what did not align."""
    lines = _iterations(variation)
    lines.append("")
    lines += columns([("varies between", "spread", "90 % interval"), *_spreads(variation)])
    if variation.groups:
        lines += ["", *_groups(variation.groups)]

    lines.append("")
    lines.extend(_finding(finding, variation.typical_ns) for finding in variation.findings)
    if not variation.findings:
        lines.append("no GPU, node or iteration stands out")
    lines.extend(f"note: {note}" for note in variation.notes)
    return "\n".join(lines) + "\n"


def _iterations(variation: Variation) -> list[str]:
    """Say how long an iteration was, and how long its replays are."""
    measured_ns, replayed_ns = np.array(variation.iteration_ns), np.array(variation.replayed_ns)
    mean_ns, median_ns = measured_ns.mean(), float(np.median(measured_ns))
    replayed = replayed_ns.mean() / mean_ns - 1
    typical = variation.typical_ns / mean_ns - 1
    return [
        f"{len(variation.ranks)} ranks x {len(variation.numbers)} iterations, each "
        f"{format_ns(mean_ns)} (median {format_ns(median_ns)})",
        f"replayed with each iteration's own times  {format_ns(replayed_ns.mean())}  "
        f"{units.format_change(replayed)}",
        f"with every time at its mean               {format_ns(variation.typical_ns)}  "
        f"{units.format_change(typical)}, without what variation costs",
    ]


def _spreads(variation: Variation) -> list[tuple[str, ...]]:
    return [
        (component.name, _percent(component.spread), _interval(component))
        for component in variation.components
    ]


def _interval(component: Component) -> str:
    if math.isnan(component.spread):
        return ""
    return f"{_percent(component.low)} to {_percent(component.high)}"


def _groups(groups: tuple[GroupTime, ...]) -> list[str]:
    """Write the table of calls by group and kind."""
    head = (
        "calls of an iteration",
        "calls",
        "on the wire",
        "waiting for the last",
        "most often last",
    )
    rows = []
    for group in groups:
        last = "not traced"
        if group.last >= 0:
            last = f"rank {group.last} ({100 * group.part:.0f} %)"
        times = format_ns(group.wire_ns), format_ns(group.skew_ns)
        rows.append((f"{group.op} {group.group}", f"{group.calls:.3g}", *times, last))
    return columns([head, *rows])


def _finding(outlier: Outlier, typical_ns: float) -> str:
    """Say what stands out and what it costs."""
    times = f"{outlier.factor:.2f} times as long"
    if outlier.kind == "iteration":
        longer = format_ns(outlier.effect_ns)
        return f"slow {outlier.what}, {times} as usual ({longer} more)"
    if outlier.kind == "drift":
        return f"drift: {outlier.what} computes {times} at the end as at the beginning"

    # a GPU or a node
    without_ns = format_ns(typical_ns - outlier.effect_ns)
    change = -100 * outlier.effect_ns / typical_ns
    return (
        f"slow {outlier.kind}: {outlier.what} computes {times} as those that run the same; "
        f"without that an iteration would take {without_ns} ({change:+.1f} %)"
    )


# -- a prediction beside the real job -------------------------------------------------------------
class _Table(NamedTuple):
    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]


_CALLS = (
    "calls of rank",
    "captured",
    "traced",
    "with a kernel",
    "need none",
    "lack theirs",
    "paired",
)
_HEAD = ("predicted", "real", "difference", "of the real iteration")


def _difference(difference: Difference, iteration_ns: float) -> tuple[str, ...]:
    """Write a row of a table of times."""
    what = difference.what
    if difference.count > 1:
        what = f"{what} x {difference.count}"
    return (
        what,
        format_ns(difference.predicted),
        format_ns(difference.real),
        f"{difference.error / 1e6:+,.3f} ms",
        units.format_change(difference.error / iteration_ns),
    )


def _headline(times: Times) -> list[str]:
    error = times.predicted_ns / times.real_ns - 1
    variation_ms = (times.replayed_ns - times.real_ns) / 1e6
    return [
        f"an iteration: predicted {format_ns(times.predicted_ns)}, "
        f"real {format_ns(times.real_ns)}, {units.format_change(error)}",
        "of which the traces, replayed with every time at its mean, explain all but "
        f"{variation_ms:+,.3f} ms, which is variation",
    ]


def _pairings(comparison: TraceComparison) -> _Table:
    """Make the table of calls, a row per rank; its title says what is not paired."""
    rows = []
    first_problems = []
    for pairing in comparison.pairings:
        counts = pairing.captured, pairing.traced, pairing.kernels, pairing.bare, pairing.lost
        cells = [f"{count:,}" for count in counts]
        share = units.format_share(pairing.share, 1)
        rows.append((str(pairing.rank), *cells, f"{len(pairing.pairs):,} ({share})"))
        if pairing.first:
            first_problems.append(f"rank {pairing.rank}: {pairing.first}")
    return _Table("\n".join(first_problems), _CALLS, rows)


def _tables(times: Times) -> list[_Table]:
    """Make the tables of times: where each rank's iteration goes, and what differs most."""
    tables = []
    for rank in times.ranks:
        parts = [part for part in rank.parts if part.predicted or part.real]
        part_rows = [_difference(part, times.real_ns) for part in parts]
        title = f"rank {rank.rank}: where its iteration goes"
        tables.append(_Table(title, ("part", *_HEAD), part_rows))

        ops = [op for op in rank.ops if op.error]
        op_rows = [_difference(op, times.real_ns) for op in ops[:_MOST_ROWS]]
        if op_rows:
            title = f"rank {rank.rank}: what differs most"
            tables.append(_Table(title, ("paired", *_HEAD), op_rows))
    return tables


def render_comparison(comparison: TraceComparison) -> str:
    """Predicted against real, by part and by op."""
    pairings = _pairings(comparison)
    lines = columns([pairings.head, *pairings.rows])
    if pairings.title:
        lines.append(pairings.title)
    if comparison.times is not None:
        lines += ["", *_headline(comparison.times)]
        for table in _tables(comparison.times):
            lines += ["", table.title, *columns([table.head, *table.rows])]
    if comparison.notes:
        lines.append("")
        lines.extend(f"note: {note}" for note in comparison.notes)
    return "\n".join(lines) + "\n"


def render_page(comparison: TraceComparison) -> str:
    """Write a page: of the prediction and of the traces, replayed with every time at its mean."""
    times = comparison.compared
    tables = [_pairings(comparison), *_tables(times)]
    notes = (*_headline(times), *comparison.notes)
    return render_html(times.predicted, "predicted", ("real", times.real), tables, notes)


def render_pairs(comparison: TraceComparison) -> str:
    """Draw the predicted and the real timeline of every traced rank, one below the other."""
    times = comparison.compared
    rows = []
    for rank in times.ranks:
        for what, timeline in (("predicted", times.predicted), ("real", times.real)):
            class_number = int(timeline.graph.classes.of[rank.rank])
            rows.append(TrackOf(timeline, class_number, f"rank {rank.rank}, {what}"))
    about = {
        "made_by": "prism compare",
        "predicted_ns": times.predicted_ns,
        "real_ns": times.real_ns,
    }
    return render_tracks(rows, about)


@renders(TraceComparison)
class TraceComparisonRenderer(Renderer):
    """Writes real traces beside their prediction."""

    text = staticmethod(render_comparison)
    page = staticmethod(render_page)
    trace = staticmethod(render_pairs)


@renders(Variation)
class VariationRenderer(Renderer):
    """Writes what varies in a real job."""

    text = staticmethod(render_variation)
