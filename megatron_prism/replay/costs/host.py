"""How long the host takes to issue an op: measured for segments, calibrated for calls.

In : a program whose segments say it (``host``), and a calibration.  Out: ns per op.  What a call
takes is NCCL's part alone: Python's way to it is in the segment before, measured with it.
"""

from __future__ import annotations

import numpy as np

from megatron_prism.core.ops import IS_COLLECTIVE, IS_PAIR, NAMES
from megatron_prism.core.program import Program
from megatron_prism.replay.costs.collectives import Calibration

__all__ = ["CALL_NS", "call_ns", "host_ns", "host_sources", "right_after"]

# Without a calibration: about what `prism calibrate` found on 4 x H200, 20 to 25 us (2026-11-21,
# ``host_of_calls`` of benchmarks/results/h200_x4_paced.json)
CALL_NS = 20_000


def host_sources(calibration: Calibration, where: str) -> tuple[str, str]:
    """Provenance of the host's time for segments, and for calls."""
    calls = (
        f"measured: the host's time for calls ({calibration.source})"
        if calibration.host
        else f"assumed: {CALL_NS // 1000} us of the host for a call"
    )
    return f"measured: the host's time for segments ({where})", calls


def right_after(program: Program) -> np.ndarray:
    """bool [n]: calls before which no kernel was launched since the call before them, such as the
    broadcasts of a batch.  What they need is still in the CPU's caches."""
    ops = program.ops
    calls = np.flatnonzero(IS_COLLECTIVE[ops["name"]] | IS_PAIR[ops["name"]])
    launched = np.concatenate(([0], np.cumsum(ops["ns"] > 0)))
    found = np.zeros(len(ops), dtype=bool)
    found[calls[1:]] = launched[calls[1:]] == launched[calls[:-1]]
    return found & program.knows_host


def call_ns(program: Program, calibration: Calibration, default: int) -> np.ndarray:
    """int64 [n]: what NCCL keeps the host for each call, 0 for other ops; of a batch every message
    has its share.  ``default`` where nothing was measured."""
    ops = program.ops
    found, again = np.zeros(len(ops), dtype=np.int64), right_after(program)
    for i in np.flatnonzero(IS_COLLECTIVE[ops["name"]] | IS_PAIR[ops["name"]]).tolist():
        if ops["batch"][i] >= 0:
            found[i] = calibration.host_ns("message", True, default)
        else:
            later = bool(ops["handle"][i] >= 0)
            found[i] = calibration.host_ns(NAMES[ops["name"][i]], later, default, bool(again[i]))
    return found


def host_ns(
    program: Program, calibration: Calibration, first: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(until the device may begin, from then on: int64 [n] ns; source uint8 [n]).

    ``first`` is the number of the segments' provenance.

    0 throughout if the program does not know its segments' host time.  A batch is issued with its
    first message.
    """
    ops = program.ops
    whole = np.maximum(ops["host"], 0)
    lead = np.clip(ops["lead"], 0, whole)
    ns = whole - lead
    source = np.full(len(ops), first, dtype=np.uint8)
    if not program.knows_host:
        return lead, ns, source
    calls = call_ns(program, calibration, CALL_NS)
    talks = IS_COLLECTIVE[ops["name"]] | IS_PAIR[ops["name"]]
    source[talks] = first + 1
    ns[talks] = calls[talks]
    batches: dict[int, int] = {}
    for i in np.flatnonzero(ops["batch"] >= 0).tolist():
        owner = batches.setdefault(int(ops["batch"][i]), i)
        if owner != i:
            ns[owner] += ns[i]
            ns[i] = 0
    return lead, ns, source
