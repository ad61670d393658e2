"""A sweep as text, CSV and page: every point in its place, or why it fell."""

from __future__ import annotations

import csv
import io
import re
import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from megatron_prism.core import job_settings
from megatron_prism.core.columns import columns, folded
from megatron_prism.core.rendering import Renderer, renders
from megatron_prism.core.units import counted, format_bytes, format_share
from megatron_prism.features.sweep.space import text as axis_text
from megatron_prism.features.sweep.sweep import Row, Sweep, front
from megatron_prism.replay.timeline import mean_parts
from megatron_prism.report.page import Data, render_page

_SCRIPT = Path(__file__).with_name("sweep.js")
_SHOWN = 25  # rows of the table on a terminal
_REASONS = 20


def _seconds(ns: float) -> str:
    return f"{ns / 1e9:.3f}"


def _share(part: float | None) -> str:
    return "unknown" if part is None else format_share(part)


def render_text(sweep: Sweep) -> str:
    """The ranked table, the command line of the first, and why the others fell."""
    lines = [f"{sweep.recipe} on {sweep.machine}: {len(sweep.rows) + len(sweep.dropped)} points, "
             f"{len(sweep.rows)} run, by {sweep.objective}"]  # fmt: skip
    if sweep.rows:
        lines += [
            "",
            *columns([_head(sweep), *(_cells(sweep, row) for row in sweep.rows[:_SHOWN])], left=0),
        ]
        if len(sweep.rows) > _SHOWN:
            lines.append(f"… and {len(sweep.rows) - _SHOWN} more: --csv FILE or --json has all")
        if sum(row.rank == 1 for row in sweep.rows) > 1:
            lines.append("= no two layouts of a rank surely differ (95 %)")
        if any(_is_hosts(row) for row in sweep.rows):
            lines += folded(_OVER_HOSTS)
        lines += ["", f"memory: device bytes, {sweep.memory_provenance}"]
        lines += [f"start the first: {command(sweep, sweep.rows[0])}"]
    lines += ["", *_fell(sweep)] if sweep.dropped else []
    return "\n".join(lines) + "\n"


def _head(sweep: Sweep) -> list[str]:
    more = [name for place, name in enumerate(("p95", "cost"))
            if any(_more(row)[place] is not None for row in sweep.rows)]  # fmt: skip
    return ["rank", *sweep.axes, "s/iteration", "to the first", "best", "tokens/s/GPU", "MFU",
            "bubble", "exposed", "memory", "headroom", *more]  # fmt: skip


def _more(row: Row) -> tuple[str | None, str | None]:
    """Its p95 and its cost, where they are asked for."""
    p95, cost = row.result["p95_ns"], row.cost
    return None if p95 is None else _seconds(p95), None if cost is None else f"{cost:,.2f}"


_OVER_HOSTS = (
    "a range of s/iteration is that of hosts that were measured: the host decides there, and the "
    "order is by the mean over all of them; prism calibrate --host takes 10 s, "
    "and host_index of a machine's file says what it finds"
)


def _is_hosts(row: Row) -> bool:
    """Whether the host decides how long an iteration of the layout takes."""
    first = row.result.get("headline")
    return first is not None and bool(first["host_decides"])


def _iteration(row: Row) -> str:
    """Seconds, or a range over hosts."""
    if not _is_hosts(row):
        return _seconds(row.result["iteration_ns"])
    first = row.result["headline"]
    return f"{_seconds(first['low_ns'])} to {_seconds(first['high_ns'])}"


def _slower(row: Row) -> str:
    return "" if row.slower == (0, 0, 0) else "{:+.1%} ({:+.1%} to {:+.1%})".format(*row.slower)


def _cells(sweep: Sweep, row: Row) -> list[str]:
    one, memory = row.result, row.result["memory"]
    cells = [
        f"{row.rank}{'=' if row.equal else ''}",
        *(axis_text(one["axes"][axis]) for axis in sweep.axes),
        _iteration(row),
        _slower(row),
        f"{row.best:.0%}",
        "unknown" if one["tokens_per_gpu"] is None else f"{one['tokens_per_gpu']:,.1f}",
        _share(one["mfu"]), _share(one["bubble"]), _share(one["exposed"]),
        format_bytes(memory["bytes"]),
        "unknown" if sweep.limit is None else format_bytes(sweep.limit - memory["bytes"]),
    ]  # fmt: skip
    more = zip(("p95", "cost"), _more(row), strict=True)
    return cells + [text or "unknown" for name, text in more if name in _head(sweep)]


def command(sweep: Sweep, row: Row) -> str:
    """What starts a point's job."""
    return shlex.join(sweep.commands[row.result["key"]])


def _fell(sweep: Sweep) -> list[str]:
    """How many points each filter dropped; reasons that differ in numbers alone share a line."""
    by = Counter(point.by for point in sweep.dropped)
    lines = [f"{count} dropped: {name}" for name, count in by.items()]
    alike: dict[tuple[str, str], list[str]] = {}
    for point in sweep.dropped:
        key = (point.by, re.sub(r"\d[\d,.]*", "#", point.reason))
        alike.setdefault(key, []).append(f"{point.name}: {point.reason}")
    order = sorted(alike.items(), key=lambda item: -len(item[1]))
    table = [("points", "by", "for example")]
    table += [(str(len(all_)), name, all_[0]) for (name, _), all_ in order[:_REASONS]]
    width = max(len(row[1]) for row in table)
    lines += ["", *(f"{n:>6}  {name:<{width}}  {said}" for n, name, said in table)]
    if len(order) > _REASONS:
        lines.append(f"… and {len(order) - _REASONS} more reasons: --csv FILE or --json has all")
    return lines


_NUMBERS = ("iteration_ns", "low_ns", "high_ns", "p95_ns", "tokens_per_gpu", "mfu", "bubble",
            "exposed", "computing")  # fmt: skip


def render_csv(sweep: Sweep) -> str:
    """Ranked points in order, then those that fell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    last = ("memory_bytes", "memory_level", "cost", "provenance", "command", "dropped_by", "reason")
    writer.writerow(["rank", "equal", "slower", "best", *sweep.axes, *_NUMBERS, *last])
    for row in sweep.rows:
        one = row.result
        axes = [axis_text(one["axes"][axis]) for axis in sweep.axes]
        numbers = ["" if one[name] is None else one[name] for name in _NUMBERS]
        cost = "" if row.cost is None else row.cost
        writer.writerow([row.rank, int(row.equal), row.slower[0], row.best, *axes, *numbers,
                         one["memory"]["bytes"], one["memory"]["level"], cost, one["provenance"],
                         command(sweep, row), "", ""])  # fmt: skip
    for point in sweep.dropped:
        axes = [axis_text(point.axes[axis]) for axis in sweep.axes]
        empty = [""] * (len(_NUMBERS) + 5)
        writer.writerow(["", "", "", "", *axes, *empty, point.by, point.reason])
    return out.getvalue()


def render_html(sweep: Sweep, links: Mapping[str, str]) -> str:
    """The page: the answer, time against memory, the table, and the first two points side by side.

    links : key of a point -> the page of its timeline
    """
    ran = counted(len(sweep.rows), "layout")
    first = _words(sweep.rows[0]) if sweep.rows else "no layout runs"
    title = f"{job_settings.job_name({'recipe': sweep.recipe})}: {first}"
    about = f"the first of {ran} by {sweep.objective}; {sweep.recipe} on {sweep.machine}"
    data, text = _page(sweep, links), render_text(sweep)
    return render_page("prism sweep", title, about, _SCRIPT, data, text)


def _words(row: Row) -> str:
    """``tp 4 · micro batch size 1``."""
    axes = row.result["axes"].items()
    return " · ".join(f"{axis} {axis_text(value)}".replace("_", " ") for axis, value in axes)


def _page(sweep: Sweep, links: Mapping[str, str]) -> Data:
    """What sweep.js draws; times in ns, memory in bytes."""
    best = {one["key"] for one in front([row.result for row in sweep.rows])}
    pair = [
        {"name": row.name, "ns": row.result["iteration_ns"],
         "parts": list(mean_parts(row.result["stages"]).items())}
        for row in (sweep.rows[:2] if len(sweep.rows) > 1 else ())
    ]  # fmt: skip
    groups = {what.partition(" ")[2] for one in pair for what, _ in one["parts"]}
    return {
        "objective": sweep.objective,
        "limit": sweep.limit,
        "axes": list(sweep.axes),
        "head": _head(sweep),
        "groups": sorted(groups - {""}),
        "rows": [
            {"rank": row.rank, "name": _words(row), "cells": _cells(sweep, row),
             "axes": [axis_text(row.result["axes"][axis]) for axis in sweep.axes],
             "ns": row.result["iteration_ns"], "low": row.result["low_ns"],
             "high": row.result["high_ns"], "slower": list(row.slower), "best": row.best,
             "tokens": row.result["tokens_per_gpu"], "mfu": row.result["mfu"],
             "memory": row.result["memory"]["bytes"], "front": row.result["key"] in best,
             "link": links.get(row.result["key"]), "command": command(sweep, row)}
            for row in sweep.rows
        ],
        "pair": pair,
        "dropped": [[p.name, p.by, p.reason] for p in sweep.dropped],
        "memory_from": sweep.memory_provenance,
    }  # fmt: skip


@renders(Sweep)
class SweepRenderer(Renderer):
    """Writes the points of a sweep."""

    text = staticmethod(render_text)
    page = staticmethod(render_html)
    table = staticmethod(render_csv)
