"""Which words does ``prism predict`` take, and which of them have an effect together?

In : the words.  Out: settings, a Plan of a whole run, or the UsageError that says what to leave
out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megatron_prism.cli import arguments
from megatron_prism.core import units
from megatron_prism.core.errors import UnitError, UsageError

__all__ = ["plan", "refuse_unused", "settings_of"]

_MOST_SAMPLES = 5_000_000
_RUN = ("iterations", "deadline", "mtbf", "checkpoint", "checkpoint_cost", "restart")
_DEFAULTS = {"machine": None, "calibration": None, "variability": None}


def settings_of(words: Sequence[str]) -> dict[str, Any]:
    """What each key was given, and defaults; ``samples``, ``slow`` and a run's keys have none."""
    keys = {
        **dict.fromkeys(("machine", "calibration", "variability"), arguments.name),
        "samples": arguments.count(1, _MOST_SAMPLES, "samples=100K; more take hours"),
        "seed": arguments.count(0, 1 << 62, "seed=2"),
        "slow": arguments.number("slow=1.2"),
        **dict.fromkeys(("deadline", "mtbf"), _span),
        **dict.fromkeys(("checkpoint_cost", "restart"), _duration),
        "iterations": arguments.count(1, 1 << 40, "iterations=500000"),
        "checkpoint": lambda text: text if text == "best" else _span(text),
    }
    return {**_DEFAULTS, "seed": 0, **arguments.read(words, keys, "predict")}


def refuse_unused(settings: dict[str, Any], against: bool) -> None:
    """UsageError for keys that a comparison does not look at."""
    given = [key for key in ("slow", *_RUN) if settings.get(key) is not None]
    if against and given:
        raise UsageError(
            f"{', '.join(given)} with --against", fix="predict each layout alone for that"
        )


def plan(settings: dict[str, Any]) -> Any:
    """The run that was asked for, if one was."""
    from megatron_prism.predict.whole_run import Plan

    given = {key: settings[key] for key in _RUN if settings.get(key) is not None}
    if not given:
        return None
    if "iterations" not in given:
        raise UsageError(f"{', '.join(given)} of how many iterations?", fix="iterations=500000")
    interval = given.get("checkpoint")
    return Plan(
        given["iterations"],
        given.get("deadline"),
        given.get("mtbf"),
        None if interval == "best" else interval,
        given.get("checkpoint_cost", 0.0),
        given.get("restart", 0.0),
    )


def _span(text: str) -> float:
    """ns, more than none."""
    if not (ns := _duration(text)):
        raise UnitError("that is no time at all", fix="a duration above 0: 30d, 3h, 10min")
    return ns


def _duration(text: str) -> float:
    """ns, 0 or more; ``30d`` as well."""
    text = text.strip()
    try:
        bare = math.isfinite(float(text)) and float(text) > 0
    except ValueError:
        bare = False
    if bare:  # nanoseconds elsewhere: nobody means them here
        raise UnitError(
            f"{text} of what?", fix=f"with a unit: {text}d, {text}h, {text}min, {text}s"
        )
    days = text.removesuffix("d")
    try:
        ns = float(days) * 24 * 3600e9 if days != text else float(units.parse_ns(text))
    except ValueError:
        ns = math.nan
    if not 0 <= ns < math.inf:
        raise UnitError(f"{text!r} is no duration", fix="write it like 30d, 3h, 10min, 30s")
    return ns
