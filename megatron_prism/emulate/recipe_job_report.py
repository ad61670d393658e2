"""What does the main job print?  A heading, a table of stages, communication by group, and how to
read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from megatron_prism.core.recipe_schema import Recipe
from megatron_prism.core.units import format_bytes

if TYPE_CHECKING:
    from megatron_prism.emulate.signatures import Summary

__all__ = ["body", "head"]


def head(recipe: Recipe, ranks: Sequence[int], console: Console) -> None:
    """Before the work: which job, and what is real of it."""
    title = f" on {recipe.hardware.name}" if recipe.hardware.name else ""
    console.print(f"{recipe.name}: {recipe.world}{title}")
    for key, value in recipe.derived().items():
        console.print(f"  {key:<20} {value}")
    virtual = recipe.world.size - len(ranks)
    console.print(f"  {'real here':<20} {len(ranks)} ranks; {virtual:,} are virtual")


def body(recipe: Recipe, summaries: Sequence[Summary], wall_s: float, console: Console) -> None:
    """After the work: per stage parameters, memory and p2p; then communication by group."""
    _stages(recipe, summaries, console)
    _communication(summaries, console)
    first = summaries[0]
    console.print(f"memory: {first['memory']['provenance']}")
    losses = [s for s in summaries if any(x is not None for x in s["losses"])]
    for summary in losses:
        values = [x for x in summary["losses"] if x is not None]
        shown = f"{values[0]:.4f} -> {values[-1]:.4f} over {len(values)} iterations"
        console.print(f"loss at stage {summary['stage']}: {shown}")
    console.print(f"communication: counted here, every call of {first['communication_of']}")
    console.print(f"megatron-core {first['megatron_core']}, tier {first['tier']}")
    for stand_in in first["stand_ins"]:
        console.print(f"  stand-in  {stand_in}")
    rss = max(s["host_peak_rss"] for s in summaries)
    console.print(f"{wall_s:.1f} s, at most {format_bytes(rss)} of host memory per worker")


def _calls(summary: Summary, op: str) -> int:
    return sum(row["calls"] for row in summary["communication"] if row["op"] == op)


def _stages(recipe: Recipe, summaries: Sequence[Summary], console: Console) -> None:
    table = Table(title="Per stage, one iteration")
    table.add_column("stage")
    table.add_column("layers by chunk")
    for name in ("rank", "parameters", "live peak"):
        table.add_column(name, justify="right")
    table.add_column("peak in")
    for name in ("sends", "receives", "s / iteration here"):
        table.add_column(name, justify="right")
    for summary in summaries:
        peak = max(summary["memory"]["peaks"], key=lambda p: p["bytes"], default=None)
        where = ", ".join(f"{k} {v}" for k, v in peak["at"].items()) if peak else "unknown"
        layers = "+".join(str(n) for n in recipe.layers_of(summary["stage"]))
        table.add_row(
            str(summary["stage"]),
            layers or "custom layout",
            f"{summary['rank']:,}",
            f"{summary['parameters']:,}",
            format_bytes(peak["bytes"]) if peak else "unknown",
            where,
            f"{_calls(summary, 'send'):,}",
            f"{_calls(summary, 'recv'):,}",
            f"{summary['iteration_s'][-1]:.2f}",
        )
    _print(table, console)


def _communication(summaries: Sequence[Summary], console: Console) -> None:
    """Calls and bytes by group; stages that communicate alike share a row."""
    rows: dict[tuple[str, int, str, int, int], list[str]] = {}
    for summary in summaries:
        for row in summary["communication"]:
            key = (row["group"], row["group_size"], row["op"], row["calls"], row["bytes"])
            rows.setdefault(key, []).append(str(summary["stage"]))
    table = Table(title="Communication of one rank, one iteration")
    table.add_column("group")
    table.add_column("ranks", justify="right")
    table.add_column("collective")
    table.add_column("calls", justify="right")
    table.add_column("message bytes", justify="right")
    table.add_column("stages")
    everywhere = len(summaries)
    for (group, size, op, calls, num_bytes), stages in sorted(
        rows.items(), key=lambda item: (-item[0][4], item[0][0], item[0][2], item[1])
    ):
        shown = "all" if len(stages) == everywhere and everywhere > 1 else ", ".join(stages)
        table.add_row(group, f"{size:,}", op, f"{calls:,}", format_bytes(num_bytes), shown)
    _print(table, console)


def _print(table: Table, console: Console) -> None:
    """On a narrow terminal cells fold: a number that is cut says something else."""
    for column in table.columns:
        column.overflow = "fold"
    console.print(table)
