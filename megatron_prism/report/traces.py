"""What ``prism import`` and ``prism compare`` print."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron_prism.core import units

if TYPE_CHECKING:
    from megatron_prism.traces.variance import Variation

__all__ = ["render_variation"]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns two spaces apart, the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]


def format_ns(ns: float) -> str:
    """A time in whole ns."""
    return units.format_ns(round(ns))


def _percent(part: float) -> str:
    return "unknown" if math.isnan(part) else f"{100 * part:.2g} %"


def render_variation(found: Variation) -> str:
    """Measured against replayed, what varies, who stands out, what did not align."""
    took, again = np.array(found.iteration_ns), np.array(found.replayed_ns)
    mean = took.mean()
    lines = [
        f"{len(found.ranks)} ranks x {len(found.numbers)} iterations, each "
        f"{format_ns(mean)} (median {format_ns(float(np.median(took)))})",
        f"replayed with each iteration's own times  {format_ns(again.mean())}  "
        f"{100 * (again.mean() / mean - 1):+.1f} %",
        f"with every time at its mean               {format_ns(found.typical_ns)}  "
        f"{100 * (found.typical_ns / mean - 1):+.1f} %, without what variation costs",
        "",
    ]
    rows = [
        (
            one.name,
            _percent(one.spread),
            f"{_percent(one.low)} to {_percent(one.high)}" if not math.isnan(one.spread) else "",
        )
        for one in found.components
    ]
    lines += table(("varies between", "spread", "90 % interval"), rows)
    if found.groups:
        lines.append("")
        heads = (
            "calls of an iteration",
            "calls",
            "on the wire",
            "waiting for the last",
            "most often last",
        )
        cells = [
            (
                f"{one.op} {one.group}",
                f"{one.calls:.3g}",
                format_ns(one.wire_ns),
                format_ns(one.skew_ns),
                f"rank {one.last} ({100 * one.part:.0f} %)" if one.last >= 0 else "not traced",
            )
            for one in found.groups
        ]
        lines += table(heads, cells)
    lines.append("")
    for one in found.findings:
        if one.kind == "iteration":
            lines.append(
                f"slow {one.what}, {one.factor:.2f} times as long as usual "
                f"({format_ns(one.effect_ns)} more)"
            )
        elif one.kind == "drift":
            lines.append(
                f"drift: {one.what} computes {one.factor:.2f} times as long at the end "
                "as at the beginning"
            )
        else:
            less, left = one.effect_ns / found.typical_ns, found.typical_ns - one.effect_ns
            lines.append(
                f"slow {one.kind}: {one.what} computes {one.factor:.2f} times as long as those "
                f"that run the same; without that an iteration would take {format_ns(left)} "
                f"({-100 * less:+.1f} %)"
            )
    if not found.findings:
        lines.append("no GPU, node or iteration stands out")
    lines += [f"note: {note}" for note in found.notes]
    return "\n".join(lines) + "\n"
