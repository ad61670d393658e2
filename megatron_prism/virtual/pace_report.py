"""Was the local rank answered on time?  What the device wrote down, put into words.

In : a Pacer after the run.  Out: plain numbers for the summary; times in us.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["summary"]

_LATE_NS = 5_000


def summary(pacer: Any) -> dict[str, Any]:
    """Counts of iterations, and what the last paced one waited for, by group.

    late : calls that ended later than their peers would have let them, because answering them took
           longer; nothing is hidden: the rank then runs behind the job by that much
    """
    tally = pacer.tally
    found: dict[str, Any] = {
        "iterations_paced": tally.paced,
        "strayed": tally.strayed[:5],
        "iterations_strayed": len(tally.strayed),
        "calls_outside": tally.extra,
    }
    stamps = pacer.launcher.stamps()
    if stamps["stuck"][0]:
        found["stuck"] = _name(pacer, int(stamps["stuck"][0]) - 1)
    slot = _last(pacer, stamps)
    if slot is None:
        return found
    came, went = stamps["came"][slot], stamps["went"][slot]
    ends = np.array(
        [stamps["end"][slot][one].max() for one in pacer.launcher.launches], dtype=np.int64
    )
    late = np.maximum(went - ends, 0)
    groups: dict[str, dict[str, float]] = {}
    for call, held in _first_calls(pacer):
        row = groups.setdefault(call.group, {"calls": 0, "held_us": 0.0, "late_us": 0.0})
        row["calls"] += 1
        row["held_us"] += (ends[held] - came[held]) / 1e3
        row["late_us"] += late[held] / 1e3
    return {
        **found,
        "late_calls": int((late > _LATE_NS).sum()),
        "late_us": float(late.sum() / 1e3),
        "groups": {name: {k: round(v, 1) for k, v in row.items()} for name, row in groups.items()},
    }


def _last(pacer: Any, stamps: dict[str, np.ndarray]) -> int | None:
    """The slot of the last iteration whose every end is known."""
    ring = stamps["tag"].shape[0]
    for iteration in range(pacer.iteration, max(-1, pacer.iteration - ring), -1):
        slot = iteration % ring
        if (stamps["tag"][slot] == iteration + 1).all():
            return slot
    return None


def _first_calls(pacer: Any) -> list[tuple[Any, int]]:
    """(call, launch), a batch once."""
    seen: dict[int, Any] = {}
    for call in pacer.calls:
        if call.launch >= 0:
            seen.setdefault(call.launch, call)
    return [(call, launch) for launch, call in seen.items()]


def _name(pacer: Any, launch: int) -> str:
    """``call 12: all_reduce of TENSOR_MODEL_PARALLEL_GROUP``."""
    for number, call in enumerate(pacer.calls):
        if call.launch == launch:
            return f"call {number}: {call.op} of {call.group}"
    return f"launch {launch}"
