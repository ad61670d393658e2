"""What ``prism import`` and ``prism compare`` print."""

from __future__ import annotations

import math

import numpy as np

from megatron_prism.core import units
from megatron_prism.core.columns import columns
from megatron_prism.core.rendering import Renderer, renders
from megatron_prism.features.traces.compare import Difference, Times, TraceComparison
from megatron_prism.features.traces.variance import Outlier, Variation
from megatron_prism.report.chrome_trace import events_of, tracks_of
from megatron_prism.report.replay import render_html
from megatron_prism.report.trace_events import trace_file

_SHOWN = 12  # rows of what differs most


def format_ns(ns: float) -> str:
    """A time in whole ns."""
    return units.format_ns(round(ns))


def _percent(part: float) -> str:
    return "unknown" if math.isnan(part) else units.format_percent(part)


def render_variation(found: Variation) -> str:
    """Measured against replayed, what varies, who stands out, what did not align."""
    took, again = np.array(found.iteration_ns), np.array(found.replayed_ns)
    mean = took.mean()
    lines = [
        f"{len(found.ranks)} ranks x {len(found.numbers)} iterations, each "
        f"{format_ns(mean)} (median {format_ns(float(np.median(took)))})",
        f"replayed with each iteration's own times  {format_ns(again.mean())}  "
        f"{units.format_change(again.mean() / mean - 1)}",
        f"with every time at its mean               {format_ns(found.typical_ns)}  "
        f"{units.format_change(found.typical_ns / mean - 1)}, without what variation costs",
        "",
    ]
    rows = [(one.name, _percent(one.spread), "" if math.isnan(one.spread) else
             f"{_percent(one.low)} to {_percent(one.high)}")
            for one in found.components]  # fmt: skip
    lines += columns([("varies between", "spread", "90 % interval"), *rows])
    if found.groups:
        heads = ("calls of an iteration", "calls", "on the wire", "waiting for the last",
                 "most often last")  # fmt: skip
        cells = [(f"{one.op} {one.group}", f"{one.calls:.3g}", format_ns(one.wire_ns),
                  format_ns(one.skew_ns), "not traced" if one.last < 0 else
                  f"rank {one.last} ({100 * one.part:.0f} %)")
                 for one in found.groups]  # fmt: skip
        lines += ["", *columns([heads, *cells])]
    lines += ["", *(_finding(one, found.typical_ns) for one in found.findings)]
    if not found.findings:
        lines.append("no GPU, node or iteration stands out")
    lines += [f"note: {note}" for note in found.notes]
    return "\n".join(lines) + "\n"


def _finding(one: Outlier, typical_ns: float) -> str:
    if one.kind == "iteration":
        more = format_ns(one.effect_ns)
        return f"slow {one.what}, {one.factor:.2f} times as long as usual ({more} more)"
    computes = f"{one.what} computes {one.factor:.2f} times as long"
    if one.kind == "drift":
        return f"drift: {computes} at the end as at the beginning"
    return (f"slow {one.kind}: {computes} as those that run the same; without that an iteration "
            f"would take {format_ns(typical_ns - one.effect_ns)} "
            f"({-100 * one.effect_ns / typical_ns:+.1f} %)")  # fmt: skip


def _difference(one: Difference, whole: float) -> tuple[str, ...]:
    times = f"{one.what} x {one.count}" if one.count > 1 else one.what
    return (times, format_ns(one.predicted), format_ns(one.real),
            f"{one.error / 1e6:+,.3f} ms", units.format_change(one.error / whole))  # fmt: skip


def _headline(times: Times) -> list[str]:
    error = times.predicted_ns / times.real_ns - 1
    varies = times.replayed_ns - times.real_ns
    return [
        f"an iteration: predicted {format_ns(times.predicted_ns)}, "
        f"real {format_ns(times.real_ns)}, {units.format_change(error)}",
        "of which the traces, replayed with every time at its mean, explain all but "
        f"{varies / 1e6:+,.3f} ms, which is variation",
    ]


_CALLS = ("calls of rank", "captured", "traced", "with a kernel", "need none", "lack theirs",
          "paired")  # fmt: skip
_HEAD = ("predicted", "real", "difference", "of the real iteration")
_Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]


def _pairings(found: TraceComparison) -> _Table:
    """(what is not paired, head, rows): a row per rank."""
    rows = []
    for one in found.pairings:
        counts = (one.captured, one.traced, one.kernels, one.bare, one.lost, len(one.pairs))
        *cells, pairs = (f"{count:,}" for count in counts)
        rows.append((str(one.rank), *cells, f"{pairs} ({units.format_share(one.share, 1)})"))
    firsts = (f"rank {one.rank}: {one.first}" for one in found.pairings if one.first)
    return "\n".join(firsts), _CALLS, rows


def _tables(times: Times) -> list[_Table]:
    """(what it shows, head, rows) of every table of times."""
    made: list[_Table] = []
    for one in times.ranks:
        made.append((f"rank {one.rank}: where its iteration goes", ("part", *_HEAD),
                     [_difference(part, times.real_ns) for part in one.parts
                      if part.predicted or part.real]))  # fmt: skip
        rows = [op for op in one.ops if op.error][:_SHOWN]
        if rows:
            made.append((f"rank {one.rank}: what differs most", ("paired", *_HEAD),
                         [_difference(op, times.real_ns) for op in rows]))  # fmt: skip
    return made


def render_comparison(found: TraceComparison) -> str:
    """Predicted against real, by part and by op."""
    unpaired, head, rows = _pairings(found)
    lines = columns([head, *rows]) + [unpaired] * bool(unpaired)
    if found.times is not None:
        lines += ["", *_headline(found.times)]
        for said, head, rows in _tables(found.times):
            lines += ["", said, *columns([head, *rows])]
    lines += ["", *(f"note: {note}" for note in found.notes)] if found.notes else []
    return "\n".join(lines) + "\n"


def render_page(found: TraceComparison) -> str:
    """The same as a page: of the prediction and of the traces, replayed with every time at its
    mean.
    """
    times = found.compared
    tables, notes = [_pairings(found), *_tables(times)], (*_headline(times), *found.notes)
    return render_html(times.predicted, "predicted", ("real", times.real), tables, notes)


def render_pairs(comparison: TraceComparison) -> str:
    """The predicted and the real timeline of every traced rank, one below the other."""
    found = comparison.compared
    both = (("predicted", found.predicted), ("real", found.real))
    tracks = tracks_of(
        [
            (timeline, int(timeline.graph.classes.of[one.rank]), f"rank {one.rank}, {what}")
            for one in found.ranks
            for what, timeline in both
        ]
    )
    about = {
        "made_by": "prism compare",
        "predicted_ns": found.predicted_ns,
        "real_ns": found.real_ns,
        "iteration_begins_ns": max((track.early for track in tracks), default=0),
    }
    return trace_file(about, events_of(tracks))


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
