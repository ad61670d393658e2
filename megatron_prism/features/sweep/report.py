"""A sweep as text, CSV and page: every point in its place, or why it fell."""

from __future__ import annotations

import csv
import io
import re
import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from megatron_prism.core.columns import columns, folded
from megatron_prism.core.jobs import job_settings
from megatron_prism.core.rendering import Renderer, renders
from megatron_prism.core.units import counted, format_bytes, format_share
from megatron_prism.features.sweep.space import Value
from megatron_prism.features.sweep.space import text as axis_text
from megatron_prism.features.sweep.sweep import Row, Sweep, front
from megatron_prism.replay.timeline import mean_parts
from megatron_prism.report.page import Data, render_page

_SCRIPT = Path(__file__).with_name("sweep.js")
_MAX_ROWS = 25  # rows of the table on a terminal
_MAX_REASONS = 20
_HEAD = (
    "s/iteration",
    "to the first",
    "best",
    "tokens/s/GPU",
    "MFU",
    "bubble",
    "exposed",
    "memory",
    "headroom",
)
_OVER_HOSTS = (
    "a range of s/iteration is that of hosts that were measured: the host decides there, and the "
    "order is by the mean over all of them; prism calibrate --host takes 10 s, "
    "and host_index of a machine's file says what it finds"
)


# -- text -----------------------------------------------------------------------------------------
def render_text(sweep: Sweep) -> str:
    """Write the ranked table, the command line of the first, and why the others fell."""
    point_count = len(sweep.rows) + len(sweep.dropped)
    points = f"{point_count} points, {len(sweep.rows)} run, by {sweep.objective}"
    lines = [f"{sweep.recipe} on {sweep.machine}: {points}"]
    if sweep.rows:
        lines += _ranked_lines(sweep)
    if sweep.dropped:
        lines += ["", *_dropped_lines(sweep)]
    return "\n".join(lines) + "\n"


def _ranked_lines(sweep: Sweep) -> list[str]:
    """Return the table of points that run, and what is to be said of it."""
    cells = [_cells(sweep, row) for row in sweep.rows[:_MAX_ROWS]]
    lines = ["", *columns([_head(sweep), *cells], left=0)]
    if len(sweep.rows) > _MAX_ROWS:
        lines.append(f"… and {len(sweep.rows) - _MAX_ROWS} more: --csv FILE or --json has all")
    # several share the first place
    if sum(row.rank == 1 for row in sweep.rows) > 1:
        lines.append("= no two layouts of a rank surely differ (95 %)")
    # the order depends on how fast the host is
    if any(_host_decides(row) for row in sweep.rows):
        lines += folded(_OVER_HOSTS)
    lines += ["", f"memory: device bytes, {sweep.memory_provenance}"]
    lines.append(f"start the first: {command(sweep, sweep.rows[0])}")
    return lines


def _has_p95(sweep: Sweep) -> bool:
    """Tell whether the 95 % quantile of some point is known."""
    return any(row.result["p95_ns"] is not None for row in sweep.rows)


def _has_cost(sweep: Sweep) -> bool:
    """Tell whether a price was given."""
    return any(row.cost is not None for row in sweep.rows)


def _head(sweep: Sweep) -> list[str]:
    head = ["rank", *sweep.axes, *_HEAD]
    # columns that some objectives have alone
    if _has_p95(sweep):
        head.append("p95")
    if _has_cost(sweep):
        head.append("cost")
    return head


_UNKNOWN = "unknown"


def _cells(sweep: Sweep, row: Row) -> list[str]:
    """Return the cells of a point, below those of ``_head``."""
    result = row.result
    memory_bytes = result["memory"]["bytes"]
    tokens = result["tokens_per_gpu"]
    headroom = _UNKNOWN
    if sweep.limit is not None:
        headroom = format_bytes(sweep.limit - memory_bytes)
    rank = f"{row.rank}"
    # others may be as quick: the measurements do not say which is first
    if row.equal:
        rank += "="
    tokens_text = _UNKNOWN
    if tokens is not None:
        tokens_text = f"{tokens:,.1f}"
    cells = [
        rank,
        *_axis_values(sweep, result["axes"]),
        _iteration(row),
        _slower(row),
        f"{row.best:.0%}",
        tokens_text,
        _share(result["mfu"]),
        _share(result["bubble"]),
        _share(result["exposed"]),
        format_bytes(memory_bytes),
        headroom,
    ]
    if _has_p95(sweep):
        p95_ns = result["p95_ns"]
        p95 = _UNKNOWN
        if p95_ns is not None:
            p95 = _seconds(p95_ns)
        cells.append(p95)
    if _has_cost(sweep):
        cost = _UNKNOWN
        if row.cost is not None:
            cost = f"{row.cost:,.2f}"
        cells.append(cost)
    return cells


def _axis_values(sweep: Sweep, axes: Mapping[str, Value]) -> list[str]:
    """Return a point's values in the order of the axes."""
    return [axis_text(axes[axis]) for axis in sweep.axes]


def _seconds(ns: float) -> str:
    return f"{ns / 1e9:.3f}"


def _share(part: float | None) -> str:
    if part is None:
        return _UNKNOWN
    return format_share(part)


def _host_decides(row: Row) -> bool:
    """Tell whether the host decides how long an iteration of the layout takes."""
    headline = row.result.get("headline")
    return headline is not None and bool(headline["host_decides"])


def _iteration(row: Row) -> str:
    """Write seconds, or a range over hosts."""
    if not _host_decides(row):
        return _seconds(row.result["iteration_ns"])
    headline = row.result["headline"]
    return f"{_seconds(headline['low_ns'])} to {_seconds(headline['high_ns'])}"


def _slower(row: Row) -> str:
    """Write by how much a point is slower than the first, with its interval."""
    # the first, or one that surely takes as long
    if row.slower == (0, 0, 0):
        return ""
    expected, low, high = row.slower
    return f"{expected:+.1%} ({low:+.1%} to {high:+.1%})"


def command(sweep: Sweep, row: Row) -> str:
    """Return what starts a point's job."""
    return shlex.join(sweep.commands[row.result["key"]])


def _dropped_lines(sweep: Sweep) -> list[str]:
    """Say how many points each filter dropped, and why.

    Reasons that differ in numbers alone share a line.
    """
    counts = Counter(point.by for point in sweep.dropped)
    lines = [f"{count} dropped: {filter_name}" for filter_name, count in counts.items()]
    texts_of_reason: dict[tuple[str, str], list[str]] = {}
    for point in sweep.dropped:
        # numbers differ from point to point, the reason does not
        reason = re.sub(r"\d[\d,.]*", "#", point.reason)
        texts_of_reason.setdefault((point.by, reason), []).append(f"{point.name}: {point.reason}")
    most_frequent = sorted(texts_of_reason.items(), key=lambda item: -len(item[1]))
    table = [("points", "by", "for example")]
    for (filter_name, _), texts in most_frequent[:_MAX_REASONS]:
        table.append((str(len(texts)), filter_name, texts[0]))
    width = max(len(filter_name) for _, filter_name, _ in table)
    lines.append("")
    for count_text, filter_name, example in table:
        lines.append(f"{count_text:>6}  {filter_name:<{width}}  {example}")
    hidden_count = len(most_frequent) - _MAX_REASONS
    if hidden_count > 0:
        lines.append(f"… and {hidden_count} more reasons: --csv FILE or --json has all")
    return lines


# -- CSV ------------------------------------------------------------------------------------------
_NUMBERS = (
    "iteration_ns",
    "low_ns",
    "high_ns",
    "p95_ns",
    "tokens_per_gpu",
    "mfu",
    "bubble",
    "exposed",
    "computing",
)
_LAST_COLUMNS = (
    "memory_bytes",
    "memory_level",
    "cost",
    "provenance",
    "command",
    "dropped_by",
    "reason",
)
_ONLY_RANKED = 5  # of the last columns, that a point which fell leaves empty


def render_csv(sweep: Sweep) -> str:
    """Write ranked points in order, then those that fell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["rank", "equal", "slower", "best", *sweep.axes, *_NUMBERS, *_LAST_COLUMNS])
    for row in sweep.rows:
        result = row.result
        expected_slower, _, _ = row.slower
        # csv writes an empty cell for None
        numbers = [result[name] for name in _NUMBERS]
        last = [
            result["memory"]["bytes"],
            result["memory"]["level"],
            row.cost,
            result["provenance"],
            command(sweep, row),
            "",
            "",
        ]
        first = [row.rank, int(row.equal), expected_slower, row.best]
        writer.writerow([*first, *_axis_values(sweep, result["axes"]), *numbers, *last])
    for point in sweep.dropped:
        # a point that fell has no figures
        empty = [""] * (len(_NUMBERS) + _ONLY_RANKED)
        axes = _axis_values(sweep, point.axes)
        writer.writerow(["", "", "", "", *axes, *empty, point.by, point.reason])
    return out.getvalue()


# -- page -----------------------------------------------------------------------------------------
def render_html(sweep: Sweep, links: Mapping[str, str]) -> str:
    """Write the page: the answer, time against memory, the table, the first two side by side.

    Args:
        sweep: The points.
        links: Key of a point -> the page of its timeline.
    """
    layouts = counted(len(sweep.rows), "layout")
    # no point has run
    answer = "no layout runs"
    if sweep.rows:
        answer = _words(sweep.rows[0])
    title = f"{job_settings.job_name({'recipe': sweep.recipe})}: {answer}"
    about = f"the first of {layouts} by {sweep.objective}; {sweep.recipe} on {sweep.machine}"
    return render_page(
        "prism sweep", title, about, _SCRIPT, _page_data(sweep, links), render_text(sweep)
    )


def _words(row: Row) -> str:
    """Say a layout: ``tp 4 · micro batch size 1``."""
    words: list[str] = []
    for axis, value in row.result["axes"].items():
        words.append(f"{axis} {axis_text(value)}".replace("_", " "))
    return " · ".join(words)


def _page_data(sweep: Sweep, links: Mapping[str, str]) -> Data:
    """Return what sweep.js draws; times in ns, memory in bytes."""
    results = [row.result for row in sweep.rows]
    front_keys = {result["key"] for result in front(results)}
    rows: list[Data] = []
    for row in sweep.rows:
        data = _row_data(sweep, row)
        data["front"] = row.result["key"] in front_keys
        data["link"] = links.get(row.result["key"])
        data["command"] = command(sweep, row)
        rows.append(data)

    # the first two side by side, where there are two
    pair: list[Data] = []
    groups: set[str] = set()
    if len(sweep.rows) > 1:
        for row in sweep.rows[:2]:
            parts = list(mean_parts(row.result["stages"]).items())
            pair.append({"name": row.name, "ns": row.result["iteration_ns"], "parts": parts})
            # ``exposed GROUP``: the page explains the groups that it names
            groups.update(part.partition(" ")[2] for part, _ in parts)
    return {
        "objective": sweep.objective,
        "limit": sweep.limit,
        "axes": list(sweep.axes),
        "head": _head(sweep),
        "groups": sorted(groups - {""}),
        "rows": rows,
        "pair": pair,
        "dropped": [[point.name, point.by, point.reason] for point in sweep.dropped],
        "memory_from": sweep.memory_provenance,
    }


def _row_data(sweep: Sweep, row: Row) -> Data:
    """Return what sweep.js draws of one point."""
    result = row.result
    return {
        "rank": row.rank,
        "name": _words(row),
        "cells": _cells(sweep, row),
        "axes": _axis_values(sweep, result["axes"]),
        "ns": result["iteration_ns"],
        "low": result["low_ns"],
        "high": result["high_ns"],
        "slower": list(row.slower),
        "best": row.best,
        "tokens": result["tokens_per_gpu"],
        "mfu": result["mfu"],
        "memory": result["memory"]["bytes"],
    }


@renders(Sweep)
class SweepRenderer(Renderer):
    """Writes the points of a sweep."""

    text = staticmethod(render_text)
    page = staticmethod(render_html)
    table = staticmethod(render_csv)
