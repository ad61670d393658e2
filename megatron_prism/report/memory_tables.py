"""Tables of a job's peak memory, as text of a terminal's width."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from megatron_prism.core.columns import columns, folded
from megatron_prism.core.rendering import Renderer, renders
from megatron_prism.core.units import format_bytes
from megatron_prism.memory.job_peaks import (
    ClassMemoryFigures,
    DrawnFigures,
    MemoryReport,
    beside_tensors,
    needed,
)

KINDS = {
    "param": "weights",
    "grad": "gradients",
    "optim": "optimizer",
    "master": "master weights",
    "act": "activations",
    "comm": "communication",
    "tmp": "temporaries",
    "graph": "CUDA graphs",
    "work": "workspaces",
    "mask": "attention masks",
    "other": "other",
}
PARTS = {
    **KINDS,
    "pools": "CUDA graphs' pools beside tensors",
    "cache": "allocator's rounding and cache",
    "nccl": "NCCL",
    "context": "context and libraries",
}


def module_of(name: str) -> str:
    """Return a module without the chunk that it is in."""
    return re.sub(r"^chunk\d+(\.|(?=\[))", "", name) or "model"


def render_memory(memory: MemoryReport) -> str:
    """Write a line for every class, and where the figures are from."""
    lines = [memory.job["world"], *class_table(memory), "", *source_lines(memory)]
    return "\n".join(lines) + "\n"


def class_table(
    memory: MemoryReport,
    overruns: Collection[str] | None = None,
    at_risk: Collection[str] = (),
) -> Iterator[str]:
    """Make a line for every class.

    Args:
        memory: The peaks.
        overruns: The classes that do not fit; None: nobody asks.
        at_risk: The classes that may run out in a later iteration.
    """
    head = ["class", "ranks", "device", "allocated", "reserved", "NCCL"]
    if overruns is not None:
        head.append("fits")
    rows = [head]
    for name, figures in memory.classes.items():
        row = [
            name,
            f"{figures['count']:,}",
            _bytes(figures.get("peak_device")),
            _bytes(figures["peak_allocated"]),
            _bytes(figures["peak_reserved"]),
            _bytes(figures.get("nccl")),
        ]
        if overruns is not None:
            answer = "yes"
            if name in overruns:
                answer = "no"
            elif name in at_risk:
                answer = "at risk"
            row.append(answer)
        rows.append(row)
    yield from columns(rows)
    # below the table, what of it is estimated or drawn; a note once for all of its classes
    classes_of_note: dict[str, list[str]] = {}
    for name, figures in memory.classes.items():
        low_bytes, high_bytes = figures.get("nccl_between") or (0, 0)
        if low_bytes < high_bytes:
            between = f"NCCL {format_bytes(low_bytes)} to {format_bytes(high_bytes)}, estimated"
            note = f"{between}: more ranks or hosts than measured"
            classes_of_note.setdefault(note, []).append(name)
        drawn = figures.get("drawn")
        if drawn:
            yield from _drawn(name, drawn)
    for note, names in classes_of_note.items():
        yield from folded(f"{', '.join(names)}: {note}", 2)


def _bytes(size: int | None) -> str:
    return "unknown" if size is None else format_bytes(size)


def _drawn(name: str, drawn: DrawnFigures) -> Iterator[str]:
    """Say what the peaks of drawn iterations are."""
    law = drawn["law"]
    if drawn["capacity"] is not None:
        law += f", capacity {drawn['capacity']:g}"
    median, high = format_bytes(drawn["p50"]), format_bytes(drawn["p95"])
    levels = f"p50 {median}, p95 {high}, at most {format_bytes(drawn['most'])}"
    text = f"{name}: routing {law}, {drawn['draws']:,} iterations: allocated {levels}"
    yield from folded(text, 2)
    # chances are known where a limit was given
    if drawn["over"] is not None and drawn["group"] is not None:
        ranks, groups = 100 * drawn["over"], 100 * drawn["group"]
        text = f"  over the limit in an iteration: {ranks:.1f} % of the ranks, {groups:.1f} % of "
        yield from folded(text + "the groups that share the experts", 4)


def part_rows(figures: ClassMemoryFigures) -> list[list[str]]:
    """Return what adds up to the device's bytes, or to what is reserved without them."""
    rows: list[list[str]] = []
    for part, size in {**figures["by_category"], **beside_tensors(figures)}.items():
        if size:
            rows.append([f"  {PARTS[part]}", format_bytes(size)])
    level = "reserved" if figures.get("peak_device") is None else "device"
    return [*rows, [f"  = {level}", format_bytes(needed(figures))]]


def source_lines(memory: MemoryReport) -> Iterator[str]:
    """Say what the figures of each level are made of."""
    for level, source in memory.provenance.items():
        yield from folded(f"{level.removeprefix('peak_'):<10} {source}", 11)


@renders(MemoryReport)
class MemoryReportRenderer(Renderer):
    """Writes the peaks of every class of ranks."""

    text = staticmethod(render_memory)
