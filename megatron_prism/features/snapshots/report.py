"""A memory snapshot beside slices of its job, or beside an earlier one, as text and as a page."""

from __future__ import annotations

from pathlib import Path

from megatron_prism.core.columns import columns, folded
from megatron_prism.core.rendering import Renderer, renders
from megatron_prism.core.units import format_bytes
from megatron_prism.features.snapshots.snapshot import (
    RankedSnapshots,
    Snapshot,
    SnapshotComparison,
    SnapshotGrowth,
)
from megatron_prism.memory import peaks
from megatron_prism.report import words
from megatron_prism.report.memory import class_data, render_memory_page
from megatron_prism.report.memory_tables import KINDS
from megatron_prism.report.page import render_page

_SCRIPT = Path(__file__).with_name("snapshot.js")
Found = SnapshotGrowth | SnapshotComparison | RankedSnapshots
_SHOWN = 12  # lines of what has grown


def render_text(found: Found) -> str:
    """Ends in a newline."""
    if isinstance(found, RankedSnapshots):
        return _ranks(found)
    return _growth(found) if isinstance(found, SnapshotGrowth) else _alignment(found)


def render_html(found: Found) -> str:
    """What one process, or the worst of several, holds more; a row for each."""
    every = found.answers if isinstance(found, RankedSnapshots) else {"": found}
    data = {"answers": {name: one.to_json() for name, one in every.items()}}
    grown = isinstance(next(iter(every.values())), SnapshotGrowth)
    title = "What a process holds more" if grown else "A real process beside the slices of its job"
    about, text = "memory snapshots", found.to_text()
    return render_page("prism compare", title, about, _SCRIPT, data, text, ("memory.js",))


def _growth(found: SnapshotGrowth) -> str:
    """What one process holds more, by line."""
    head = f"{found.num_bytes:+,} B"
    if found.iterations:
        head += f", iterations {', '.join(map(str, found.iterations))}"
    lines = [head]
    if any(len(steps) > 1 for steps in found.steps):
        lines.append(f"{found.leaking:,} B are of lines that grow each time")
    for one, steps in zip(found.grown[:_SHOWN], found.steps, strict=False):
        each = f" ({', '.join(f'{step:+,}' for step in steps)})" if len(steps) > 1 else ""
        rate = found.rate(steps)
        lines += folded(f"  {one.num_bytes:+,} B{each} in {one.count:+} tensors"
                        f"{f', {rate:+,.0f} B an iteration' if rate else ''}, {KINDS[one.kind]}: "
                        f"{one.module} {one.site}", 6)  # fmt: skip
    return "\n".join(lines) + "\n"


def _ranks(found: RankedSnapshots) -> str:
    """A line for each process, and the page of the one that differs most."""
    rows, answers = list[list[str]](), found.answers
    for name, one in answers.items():
        if isinstance(one, SnapshotGrowth):
            head = ["", "holds more, B", "lines that grow each time, B"]
            rows.append([name, f"{one.num_bytes:+,}", f"{one.leaking:,}"])
        else:
            head = ["", "real, B", "slices, B", "of rank", "in both", "in order"]
            common, aligned = _shares(one)
            sizes = [f"{each.num_bytes:,}" for each in (one.real, one.emulated)]
            rows.append([name, *sizes, str(one.rank), common, aligned])
    worst = max(answers, key=lambda name: answers[name].difference)
    return "\n".join([*columns([head, *rows]), "", f"{worst}:", answers[worst].to_text()])


def _alignment(found: SnapshotComparison) -> str:
    """Categories side by side, how much is alike, and the first difference."""
    real, emulated = found.real.by_kind, found.emulated.by_kind
    rows = [["bytes", "real", "slices", "slices - real"]]
    total = found.real.num_bytes, found.emulated.num_bytes
    for what, a, b in (*((KINDS[k], real[k], emulated[k]) for k in real), ("= peak", *total)):
        if a or b:
            rows.append([what, f"{a:,}", f"{b:,}", f"{b - a:+,}"])
    common, aligned = _shares(found)
    lines = [
        *columns(rows),
        f"beside the slices of rank {found.rank}",
        *folded(f"{common} of the bytes at the real peak are blocks of the slices, too; {aligned} "
                "of what the iteration asks for comes in the same order", 0),
    ]  # fmt: skip
    return "\n".join([*lines, *_first(found)]) + "\n"


def _shares(found: SnapshotComparison) -> tuple[str, str]:
    """Of the bytes at the peak, and of those asked for in order."""
    pairs = (found.common, found.real.num_bytes), (found.aligned, found.asked)
    one, other = (f"{100 * part / max(whole, 1):.2f} %" for part, whole in pairs)
    return one, other


def _first(found: SnapshotComparison) -> list[str]:
    if not found.only_real and not found.only_emulated:
        return []
    step = (*found.only_real, *found.only_emulated)[0].step
    lines = [f"first difference, in {step}:"]
    for what, requests in (("real  ", found.only_real), ("slices", found.only_emulated)):
        shown: dict[tuple[int, str], int] = {}
        for one in requests:
            shown[one.num_bytes, one.site] = shown.get((one.num_bytes, one.site), 0) + 1
        for (size, site), count in list(shown.items())[:4]:
            lines += folded(f"  only {what} {size:,} B x {count}  {site or 'no Python frame'}", 6)
    return lines


def render_snapshot(name: str, taken: Snapshot) -> str:
    """The page of a real process; ``name``: of its file."""
    top, most = peaks.known_peak(taken.program), taken.peak_reserved or taken.reserved
    iteration = taken.iterations[top.index]
    label = words.step(top.op.phase, top.op.microbatch, top.op.chunk)
    levels = (most, None, 0, 0)
    one = class_data(
        name, taken.program, levels, f"iteration {iteration}, {label}", taken.iterations
    )
    about, limit = [], None
    if taken.failed is not None:
        limit = taken.reserved + taken.failed.device_free
        free, largest = map(format_bytes, taken.free)
        fits = "fit" if taken.fits_expandable() else "do not fit either"
        about = [f"{taken.failed.size:,} B do not fit in iteration {taken.failed.iteration}, "
                  f"{taken.failed.label} {taken.failed.site}.",
                  f"{format_bytes(taken.reserved)} are reserved; {free} of them are free blocks, "
                  f"the largest {largest}. With expandable segments the same requests "
                  f"{fits}."]  # fmt: skip
    verdict = "Out of memory" if taken.failed is not None else ""
    data = {"limit": limit, "verdict": verdict, "about": about, "changes": [], "classes": [one]}
    rows = [["allocated", "measured: blocks that the allocator gave, by the lines that asked"],
            ["reserved", "measured: segments of the allocator; by its rules "
             f"{format_bytes(taken.modelled)} of these requests"]]  # fmt: skip
    about_process = f"a real process, iterations 1 to {taken.iterations[-1]}"
    return render_memory_page(name, about_process, data, rows)


@renders(SnapshotComparison, SnapshotGrowth, RankedSnapshots)
class SnapshotRenderer(Renderer):
    """Writes what snapshots of real processes say."""

    text = staticmethod(render_text)
    page = staticmethod(render_html)
