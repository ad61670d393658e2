"""A memory snapshot beside slices of its job, or beside an earlier one, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_prism.report.columns import columns, folded
from megatron_prism.report.fit import KINDS

if TYPE_CHECKING:
    from megatron_prism.memory.snapshot import SnapshotComparison, SnapshotGrowth

_SHOWN = 12  # lines of what has grown


def render_growth(found: SnapshotGrowth) -> str:
    """What one process holds more, by line."""
    lines = [f"{found.num_bytes:+,} B"]
    for one in found.grown[:_SHOWN]:
        lines += folded(f"  {one.num_bytes:+,} B in {one.count:+} tensors, {KINDS[one.kind]}: "
                        f"{one.module} {one.site}", 6)  # fmt: skip
    return "\n".join(lines) + "\n"


def render_alignment(found: SnapshotComparison) -> str:
    """Categories side by side, how much is alike, and the first difference."""
    real, emulated = found.real.by_kind, found.emulated.by_kind
    rows = [["bytes", "real", "slices", "slices - real"]]
    total = found.real.num_bytes, found.emulated.num_bytes
    for what, a, b in (*((KINDS[k], real[k], emulated[k]) for k in real), ("= peak", *total)):
        if a or b:
            rows.append([what, f"{a:,}", f"{b:,}", f"{b - a:+,}"])
    common, aligned = _percent(found.common, total[0]), _percent(found.aligned, found.asked)
    lines = [
        *columns(rows),
        *folded(f"{common} of the bytes at the real peak are blocks of the slices, too; {aligned} "
                "of what the iteration asks for comes in the same order", 0),
    ]  # fmt: skip
    return "\n".join([*lines, *_first(found)]) + "\n"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.2f} %"


def _first(found: SnapshotComparison) -> list[str]:
    if not found.only_real and not found.only_emulated:
        return []
    step = (*found.only_real, *found.only_emulated)[0].step
    lines = [f"first difference, in {step}:"]
    for what, requests in (("real  ", found.only_real), ("slices", found.only_emulated)):
        shown: dict[tuple[int, str], int] = {}
        for one in requests:
            shown[one.num_bytes, one.site] = shown.get((one.num_bytes, one.site), 0) + 1
        lines += (f"  only {what} {size:,} B x {count}  {site or 'no Python frame'}"
                  for (size, site), count in list(shown.items())[:4])  # fmt: skip
    return lines
