"""Memory and power of ranks that took turns: the paced ones beside those of the real job.

And how many of their calls were late.

``turns.py`` prints it.  Device memory is what the driver says that a process holds of its own GPU;
the paced rank lacks NCCL's part, which its capture's summary says (modelled from communicators that
were measured), so that is added.  Bytes in, percent and bytes out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["nccl_of", "said"]


def nccl_of(work: Path, config: str, num_ranks: int) -> list[int | None]:
    """Bytes that NCCL would take for each rank, as the summaries of its captures say."""
    found = []
    for rank in range(num_ranks):
        files = list((work / f"{config}-capture-{rank}").glob("rank-*.json"))
        found.append(json.loads(files[0].read_text())["memory"].get("nccl") if files else None)
    return found


def said(row: dict[str, Any]) -> list[str]:
    """A line for each of the three levels, for what the GPUs drew and for calls that ended later
    than their peers would have let them; none without rounds."""
    groups = row.get("groups") or {}
    real = [one for runner in groups.get("real", ()) for one in runner.get("memory", ())]
    paced = [one for runner in groups.get("paced", ()) for one in runner.get("memory", ())]
    if not real or len(real) != len(paced):
        return []
    pairs = list(zip(real, paced, strict=True))
    lines = [_line(f"{level} peak", [(a[f"{level}_peak"], b[f"{level}_peak"]) for a, b in pairs])
             for level in ("allocated", "reserved")]  # fmt: skip
    held = [[(one.get("device_bytes") or {}).get("own") for one in pair] for pair in pairs]
    parts = row.get("nccl") or [None] * len(held)
    device = [(one, other + nccl) for (one, other), nccl in zip(held, parts, strict=True)
              if None not in (one, other, nccl)]  # fmt: skip
    what = "device, with NCCL's part (modelled)"
    lines.append(_line(what, device) if device else f"  {what}: not told by the driver")
    power = [[_watts(one) for one in side] for side in (real, paced)]
    lines.append(f"  power, last turn: real {', '.join(power[0])}; paced {', '.join(power[1])}")
    return [*lines, f"  late calls, last iteration: {', '.join(_late(one) for one in paced)}"]


def _late(one: dict[str, Any]) -> str:
    found = one.get("paced") or {}
    if "late_us" not in found:
        return "-"
    late, whole = found["late_calls"], found["calls_paced"]
    return f"{late} of {whole} (all together {found['late_us'] / 1e3:.2f} ms)"


def _watts(one: dict[str, Any]) -> str:
    return f"{one['watts'][-1]:.0f} W" if one.get("watts") else "-"


def _line(what: str, pairs: Sequence[tuple[int, int]]) -> str:
    found = (f"{b - a:+,} B ({100 * (b / a - 1):+.2f} %)" if a else "-" for a, b in pairs)
    return f"  {what}, paced ranks: {', '.join(found)}"
