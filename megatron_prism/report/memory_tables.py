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

KINDS = {"param": "weights", "grad": "gradients", "optim": "optimizer", "act": "activations",
         "comm": "communication", "tmp": "temporaries", "graph": "CUDA graphs",
         "other": "other"}  # fmt: skip
PARTS = {
    **KINDS,
    "pools": "CUDA graphs' pools beside tensors",
    "cache": "allocator's rounding and cache",
    "nccl": "NCCL",
    "context": "context and libraries",
}


def module_of(name: str) -> str:
    """A module without the chunk that it is in."""
    return re.sub(r"^chunk\d+(\.|(?=\[))", "", name) or "model"


def render_memory(found: MemoryReport) -> str:
    """A line for every class, and where the figures are from."""
    lines = [found.job["world"], *class_table(found), "", *source_lines(found)]
    return "\n".join(lines) + "\n"


def class_table(
    memory: MemoryReport,
    overruns: Collection[str] | None = None,
    at_risk: Collection[str] = (),
) -> Iterator[str]:
    """Make a line for every class.

    Args:
        memory: the peaks.
        overruns: the classes that do not fit; None: nobody asks.
        at_risk: the classes that may run out in a later iteration.
    """
    head = ["class", "ranks", "device", "allocated", "reserved", "NCCL"]
    rows = [head if overruns is None else [*head, "fits"]]
    for name, one in memory.classes.items():
        sizes = (one.get("peak_device"), one["peak_allocated"], one["peak_reserved"],
                 one.get("nccl"))  # fmt: skip
        cells = ["unknown" if size is None else format_bytes(size) for size in sizes]
        if overruns is not None:
            answer = "yes"
            if name in overruns:
                answer = "no"
            elif name in at_risk:
                answer = "at risk"
            cells.append(answer)
        rows.append([name, f"{one['count']:,}", *cells])
    yield from columns(rows)
    alike: dict[str, list[str]] = {}
    for name, one in memory.classes.items():
        least, most = one.get("nccl_between") or (0, 0)
        if least < most:
            between = f"NCCL {format_bytes(least)} to {format_bytes(most)}, estimated"
            alike.setdefault(f"{between}: more ranks or hosts than measured", []).append(name)
        if drawn := one.get("drawn"):
            yield from _drawn(name, drawn)
    for text, names in alike.items():
        yield from folded(f"{', '.join(names)}: {text}", 2)


def _drawn(name: str, drawn: DrawnFigures) -> Iterator[str]:
    """About the peaks of drawn iterations."""
    capacity = "" if drawn["capacity"] is None else f", capacity {drawn['capacity']:g}"
    levels = (f"{word} {format_bytes(size)}" for word, size in (
        ("p50", drawn["p50"]), ("p95", drawn["p95"]), ("at most", drawn["most"])))  # fmt: skip
    yield from folded(f"{name}: routing {drawn['law']}{capacity}, {drawn['draws']:,} iterations: "
                      f"allocated {', '.join(levels)}", 2)  # fmt: skip
    if drawn["over"] is not None and drawn["group"] is not None:
        ranks, groups = 100 * drawn["over"], 100 * drawn["group"]
        yield from folded(f"  over the limit in an iteration: {ranks:.1f} % of the ranks, "
                          f"{groups:.1f} % of the groups that share the experts", 4)  # fmt: skip


def part_rows(one: ClassMemoryFigures) -> list[list[str]]:
    """What adds up to the device's bytes, or to what is reserved where those are unknown."""
    parts = {**one["by_category"], **beside_tensors(one)}
    rows = [[f"  {PARTS[what]}", format_bytes(size)] for what, size in parts.items() if size]
    level = "reserved" if one.get("peak_device") is None else "device"
    return [*rows, [f"  = {level}", format_bytes(needed(one))]]


def source_lines(memory: MemoryReport) -> Iterator[str]:
    """Say what the figures of each level are made of."""
    for level, source in memory.provenance.items():
        yield from folded(f"{level.removeprefix('peak_'):<10} {source}", 11)


@renders(MemoryReport)
class MemoryReportRenderer(Renderer):
    """Writes the peaks of every class of ranks."""

    text = staticmethod(render_memory)
