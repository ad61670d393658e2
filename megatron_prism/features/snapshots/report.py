"""A memory snapshot beside slices of its job, or beside an earlier one, as text and as a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron_prism.core.columns import columns, folded
from megatron_prism.core.rendering import Renderer, renders
from megatron_prism.core.units import format_bytes
from megatron_prism.features.snapshots.snapshot import (
    FailedRequest,
    RankedSnapshots,
    Request,
    Snapshot,
    SnapshotComparison,
    SnapshotGrowth,
)
from megatron_prism.memory.peaks import known_peak
from megatron_prism.report import words
from megatron_prism.report.memory import PeakLevels, class_data, render_memory_page
from megatron_prism.report.memory_tables import KINDS
from megatron_prism.report.page import Data, render_page

_SCRIPT = Path(__file__).with_name("snapshot.js")
SnapshotAnswer = SnapshotGrowth | SnapshotComparison | RankedSnapshots
_MAX_LINES = 12  # lines of what has grown
_MAX_REQUESTS = 4  # kinds of requests that one side lacks


def render_text(answer: SnapshotAnswer) -> str:
    """Write an answer, ending in a newline."""
    if isinstance(answer, RankedSnapshots):
        return _ranks(answer)
    if isinstance(answer, SnapshotGrowth):
        return _growth(answer)
    return _alignment(answer)


def render_html(answer: SnapshotAnswer) -> str:
    """Write a page of what one process, or the worst of several, holds more; a row for each."""
    answers: Mapping[str, SnapshotGrowth | SnapshotComparison] = {}
    if isinstance(answer, RankedSnapshots):
        answers = answer.answers
    else:
        answers = {"": answer}
    values = {name: rank_answer.to_json() for name, rank_answer in answers.items()}
    first = next(iter(answers.values()))
    title = "A real process beside the slices of its job"
    if isinstance(first, SnapshotGrowth):
        title = "What a process holds more"
    data = {"answers": values}
    text = answer.to_text()
    return render_page(
        "prism compare", title, "memory snapshots", _SCRIPT, data, text, ("memory.js",)
    )


def _growth(growth: SnapshotGrowth) -> str:
    """Say what one process holds more, by line."""
    head = f"{growth.num_bytes:+,} B"
    if growth.iterations:
        head += f", iterations {', '.join(map(str, growth.iterations))}"
    lines = [head]
    # several snapshots: what grows each time is suspected
    if any(len(steps) > 1 for steps in growth.steps):
        lines.append(f"{growth.leaking:,} B are of lines that grow each time")
    largest = zip(growth.grown[:_MAX_LINES], growth.steps, strict=False)
    for holding, steps in largest:
        text = f"  {holding.num_bytes:+,} B"
        # of several snapshots, what came between each two
        if len(steps) > 1:
            text += f" ({', '.join(f'{step:+,}' for step in steps)})"
        text += f" in {holding.count:+} tensors"
        rate = growth.rate(steps)
        if rate:
            text += f", {rate:+,.0f} B an iteration"
        text += f", {KINDS[holding.kind]}: {holding.module} {holding.site}"
        lines += folded(text, 6)
    return "\n".join(lines) + "\n"


def _ranks(ranked: RankedSnapshots) -> str:
    """Write a line for each process, and all of the one that differs most."""
    answers = ranked.answers
    rows: list[list[str]] = []
    head: list[str] = []
    for name, answer in answers.items():
        if isinstance(answer, SnapshotGrowth):
            head = ["", "holds more, B", "lines that grow each time, B"]
            rows.append([name, f"{answer.num_bytes:+,}", f"{answer.leaking:,}"])
        else:
            head = ["", "real, B", "slices, B", "of rank", "in both", "in order"]
            real, emulated = f"{answer.real.num_bytes:,}", f"{answer.emulated.num_bytes:,}"
            row = [name, real, emulated, str(answer.rank), _common(answer), _aligned(answer)]
            rows.append(row)
    worst = max(answers, key=lambda name: answers[name].difference)
    return "\n".join([*columns([head, *rows]), "", f"{worst}:", answers[worst].to_text()])


def _alignment(comparison: SnapshotComparison) -> str:
    """Write categories side by side, how much is alike, and the first difference."""
    real, emulated = comparison.real, comparison.emulated
    rows = [["bytes", "real", "slices", "slices - real"]]
    for kind in real.by_kind:
        rows += _sizes(KINDS[kind], real.by_kind[kind], emulated.by_kind[kind])
    rows += _sizes("= peak", real.num_bytes, emulated.num_bytes)
    text = f"{_common(comparison)} of the bytes at the real peak are blocks of the slices, too; "
    text += f"{_aligned(comparison)} of what the iteration asks for comes in the same order"
    lines = [
        *columns(rows),
        f"beside the slices of rank {comparison.rank}",
        *folded(text, 0),
        *_first_difference(comparison),
    ]
    return "\n".join(lines) + "\n"


def _sizes(name: str, real: int, emulated: int) -> list[list[str]]:
    """Return the row of a category; none where neither side has any."""
    if not real and not emulated:
        return []
    return [[name, f"{real:,}", f"{emulated:,}", f"{emulated - real:+,}"]]


def _common(comparison: SnapshotComparison) -> str:
    """Write the share of the bytes at the real peak that the slices have, too."""
    return _percent(comparison.common, comparison.real.num_bytes)


def _aligned(comparison: SnapshotComparison) -> str:
    """Write the share of the bytes asked for that come in the same order."""
    return _percent(comparison.aligned, comparison.asked)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.2f} %"


def _first_difference(comparison: SnapshotComparison) -> list[str]:
    """Say which requests of the first step that differs one side lacks."""
    requests = (*comparison.only_real, *comparison.only_emulated)
    if not requests:
        return []
    lines = [f"first difference, in {requests[0].step}:"]
    lines += _lacking("real  ", comparison.only_real)
    return lines + _lacking("slices", comparison.only_emulated)


def _lacking(side: str, requests: Iterable[Request]) -> list[str]:
    """Say requests that one side has alone; equal ones once."""
    counts: dict[tuple[int, str], int] = {}
    for request in requests:
        key = (request.num_bytes, request.site)
        counts[key] = counts.get(key, 0) + 1
    lines: list[str] = []
    for (size, site), count in list(counts.items())[:_MAX_REQUESTS]:
        lines += folded(f"  only {side} {size:,} B x {count}  {site or 'no Python frame'}", 6)
    return lines


def render_snapshot(name: str, snapshot: Snapshot) -> str:
    """Write the page of a real process; ``name``: of its file."""
    peak = known_peak(snapshot.program)
    reserved = snapshot.peak_reserved or snapshot.reserved
    levels = PeakLevels(reserved, device=None, nccl=0, context=0)
    step = words.step(peak.op.phase, peak.op.microbatch, peak.op.chunk)
    when = f"iteration {snapshot.iterations[peak.index]}, {step}"
    figures = class_data(name, snapshot.program, levels, when, snapshot.iterations)
    data: Data = {"limit": None, "verdict": "", "about": [], "changes": [], "classes": [figures]}
    # the device's limit is known only from a request that failed
    if snapshot.failed is not None:
        data["limit"] = snapshot.reserved + snapshot.failed.device_free
        data["verdict"] = "Out of memory"
        data["about"] = _about_failure(snapshot, snapshot.failed)
    modelled = format_bytes(snapshot.modelled)
    allocated_from = "measured: blocks that the allocator gave, by the lines that asked"
    reserved_from = "measured: segments of the allocator; by its rules "
    rows = [
        ["allocated", allocated_from],
        ["reserved", f"{reserved_from}{modelled} of these requests"],
    ]
    about_process = f"a real process, iterations 1 to {snapshot.iterations[-1]}"
    return render_memory_page(name, about_process, data, rows)


def _about_failure(snapshot: Snapshot, failed: FailedRequest) -> list[str]:
    """Say what did not fit, and whether fragmentation is to blame."""
    free, largest = map(format_bytes, snapshot.free)
    fits = "fit" if snapshot.fits_expandable() else "do not fit either"
    request = f"{failed.size:,} B do not fit in iteration {failed.iteration}, "
    reserved = f"{format_bytes(snapshot.reserved)} are reserved; {free} of them are free blocks, "
    return [
        f"{request}{failed.label} {failed.site}.",
        f"{reserved}the largest {largest}. With expandable segments the same requests {fits}.",
    ]


@renders(SnapshotComparison, SnapshotGrowth, RankedSnapshots)
class SnapshotRenderer(Renderer):
    """Writes what snapshots of real processes say."""

    text = staticmethod(render_text)
    page = staticmethod(render_html)
