"""Report whether the local rank was answered on time, from what the device wrote down.

In : a Pacer after the run, and the stamps of its launcher.  Out: plain numbers for the
summary; times in us.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from megatron_prism.runtime.pacing.kernel_source import RING

if TYPE_CHECKING:
    from megatron_prism.runtime.pacing.pacer import PacedCall, Pacer

__all__ = ["at_once", "summary"]

_LATE_NS = 5_000
# From coming to a call to its kernel on a device that has nothing else to do, beyond the least that
# a launch takes: Python's part took more than 30 us on a shared host (H200, 2026-11-22).
_AT_ONCE_NS = 60_000


def summary(
    pacer: Pacer, stamps: dict[str, np.ndarray], predicted: Mapping[str, float]
) -> dict[str, object]:
    """Counts of iterations, and what the last paced one waited for, by group.

    late       : calls that ended later than their peers would have let them, because answering them
                 took longer; nothing is hidden: the rank then runs behind the job by that much
    host_bound : calls that began on the device as soon as the host issued them: the device had
                 nothing left to do and waited for Python, so a faster host would be felt
    iteration  : from the first call of the iteration before to the same call of the last one
    held_us    : from coming to a call to its end; ``predicted_us`` the same in the replay, in which
                 this rank is as fast as its slice; ``predicted`` has them by group
    """
    tally = pacer.tally
    found: dict[str, object] = {
        "iterations_paced": tally.paced,
        "strayed": tally.strayed[:5],
        "iterations_strayed": len(tally.strayed),
        "calls_outside": tally.extra,
    }
    if stamps["stuck"][0]:
        found["stuck"] = _name(pacer, int(stamps["stuck"][0]) - 1)
    if pacer.launcher.shared is not None:
        found["clock"] = pacer.launcher.clock()
    iteration = _last(pacer, stamps)
    if iteration is None:
        return found
    slot = iteration % RING
    came, went, until = (stamps[name][slot] for name in ("came", "went", "until"))
    late = np.maximum(went - until, 0)
    groups: dict[str, dict[str, float]] = {}
    for call, launch in _first_calls(pacer):
        row = groups.setdefault(call.group, {"calls": 0, "held_us": 0.0, "late_us": 0.0})
        row["calls"] += 1
        row["held_us"] += (until[launch] - came[launch]) / 1e3
        row["late_us"] += late[launch] / 1e3
    for name, us in predicted.items():
        if name in groups:
            groups[name]["predicted_us"] = us
    issued = np.array(pacer.issued[slot])
    return {
        **found,
        "calls_paced": len(came),
        "late_calls": int((late > _LATE_NS).sum()),
        "late_us": float(late.sum() / 1e3),
        "iteration_us": _felt_us(pacer, stamps, iteration),
        "host_bound": int(at_once(issued, came, pacer.lags).sum()),
        "groups": {name: {k: round(v, 1) for k, v in row.items()} for name, row in groups.items()},
    }


def at_once(
    issued: np.ndarray, came: np.ndarray, lags: list[tuple[int, int]], within: int = _AT_ONCE_NS
) -> np.ndarray:
    """bool [launches]: began within ``within`` ns of the time that a launch takes at best.

    issued : the host's clock when the host came to each, came: the device's when that did
    lags   : (host's clock, ns from there to the device's when an idle device begins a launch) at
             the beginning and the end of the run; clocks drift evenly between them
    """
    times, least = np.array(lags, dtype=np.int64).T
    # differences first: the device's clock has more digits than a float
    expected = np.interp(issued - times[0], times - times[0], (least - least[0]).astype(float))
    found: np.ndarray = (came - issued - least[0]) - expected <= within
    return found


def _felt_us(pacer: Pacer, stamps: dict[str, np.ndarray], iteration: int) -> float | None:
    """From the first call of the iteration before to its own; None if that one was not paced."""
    before = (iteration - 1) % RING
    if iteration < 1 or (stamps["tag"][before][pacer.launcher.launches[0]] != iteration).any():
        return None
    first = stamps["came"][:, 0]
    return float(first[iteration % RING] - first[before]) / 1e3


def _last(pacer: Pacer, stamps: dict[str, np.ndarray]) -> int | None:
    """The last iteration whose every end is known."""
    ours = [j for one in pacer.launcher.launches for j in one]
    for iteration in range(pacer.iteration, max(-1, pacer.iteration - RING), -1):
        if ours and (stamps["tag"][iteration % RING][ours] == iteration + 1).all():
            return iteration
    return None


def _first_calls(pacer: Pacer) -> list[tuple[PacedCall, int]]:
    """(call, launch), a batch once."""
    seen: dict[int, PacedCall] = {}
    for call in pacer.calls:
        if call.launch >= 0:
            seen.setdefault(call.launch, call)
    return [(call, launch) for launch, call in seen.items()]


def _name(pacer: Pacer, launch: int) -> str:
    """``call 12: all_reduce of TENSOR_MODEL_PARALLEL_GROUP``."""
    for number, call in enumerate(pacer.calls):
        if call.launch == launch:
            return f"call {number}: {call.op} of {call.group}"
    return f"launch {launch}"
