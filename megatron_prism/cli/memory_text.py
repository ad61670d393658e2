"""How does a change of memory read?  For people, and beside the line on GitHub."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from megatron_prism.core import units

if TYPE_CHECKING:
    from megatron_prism.memory.baseline import Change

__all__ = ["annotation", "describe", "exact"]

_SHOWN = 8  # origins of a growth


def exact(num_bytes: int) -> str:
    """``1.5 GiB (1,610,612,736 B)``."""
    return f"{units.format_bytes(num_bytes)} ({num_bytes:,} B)"


def describe(change: Change) -> str:
    """A few lines about one class."""
    head = f"{change.name} (ranks {change.ranks}): {change.what}"
    before, after = change.before or 0, change.after or 0  # None is said otherwise
    if change.what == "appeared":
        return f"{head}: {exact(after)}, and the baseline has no such class"
    if change.what == "vanished":
        return f"{head}: the baseline has {exact(before)}"
    grown = after - before
    if change.what == "leaks":
        return "\n".join([f"{head} {after:,} B an iteration", *_origins(change)])
    if change.what == "over":
        return (
            f"{head} the limit: {change.level} {exact(after)} (modelled), "
            f"{exact(grown)} above {exact(before)}"
        )
    lines = [f"{head} {grown:+,} B: {exact(before)} -> {exact(after)}"]
    if change.moved:
        lines.append(f"  peak moved: {change.moved}")
    if change.by_kind:
        lines.append("  " + ", ".join(f"{k} {v:+,} B" for k, v in change.by_kind.items()))
    return "\n".join([*lines, *_origins(change)])


def _origins(change: Change) -> list[str]:
    return [
        f"  {g.num_bytes:+15,} B  {g.kind:5}  {g.site or '?'}  {g.module}"
        for g in sorted(change.origins, key=lambda g: -abs(g.num_bytes))[:_SHOWN]
    ]


def annotation(change: Change, path: str) -> str:
    """``::error file=…,line=…::``: what GitHub shows beside the line that grew."""
    site = next((g.site for g in change.origins if g.num_bytes > 0 and g.site), "")
    file, _, line = site.rpartition(":")
    if file.startswith(("core/", "training/")):
        file = f"megatron/{file}"
    place = f"file={file},line={line}" if line.isdigit() else f"file={path}"
    text = describe(change).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return f"::error {place},title=prism memory {json.dumps(change.name)[1:-1]}::{text}"
