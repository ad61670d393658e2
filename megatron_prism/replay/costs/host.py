"""How long the host takes to issue an op: measured for segments, calibrated for calls.

In : a program whose segments say it (``host``), and a calibration.  Out: ns per op.  What a call
takes is NCCL's part alone: Python's way to it is in the segment before, measured with it.

Hosts differ, so a host has an index (``host_index``).  Slices keep that of the host that captured
them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

import numpy as np

from megatron_prism.core.ops import CODE, IS_CALL, NAMES, PHASE_NAMES, STEPS
from megatron_prism.core.program import Program
from megatron_prism.core.slices import HOST_INDEX
from megatron_prism.replay.costs.collectives import Calibration

# Without a calibration: about what `prism calibrate` found on 4 x H200, 20 to 25 us (2026-11-21,
# ``host_of_calls`` of benchmarks/results/h200_x4_paced.json)
CALL_NS = 20_000

# Slices without a GPU have a host's time by its calls of Python and its kernels
# (runtime/recorder/python_calls.py).  Where calls were not counted, kernels alone say it: slices of
# earlier versions, and captures under another profiler.  The optimizer's start in loops of C++
KERNEL_NS, LOOP_NS = 65_000, 10_000
_BY_PYTHON = np.isin(PHASE_NAMES, STEPS)
# of the hosts that the time is of, which nobody measured: between two kinds of NVIDIA's, 0.6 and
# 0.9; a dense and an MoE job on two H100 whose hosts have a known index say 0.66 and 0.69
MODELLED_INDEX = 0.7
MODELLED = "modelled: the host's time by its "
BY_KERNELS = "host_by_kernels"  # key of ``Programs.source``: no calls were counted


def with_modelled_host(program: Program) -> Program:
    """The program with a host's time for each segment."""
    if program.knows_host:
        return program
    ops = program.ops.copy()
    mine = (ops["name"] == CODE["compute"]) & (ops["kernels"] >= 0)
    each = np.where(_BY_PYTHON[ops["phase"]], KERNEL_NS, LOOP_NS)
    ops["host"] = np.where(mine, ops["kernels"] * each, -1)
    ops["lead"] = np.where(mine, each, -1)
    return dataclasses.replace(program, ops=ops)


ON_TARGET = "on the target's host"


def host_scaled(factor: str) -> str:
    """What provenances of a host's time say once it is scaled to the target's host."""
    return f"{factor} x as long {ON_TARGET}"


def indices_of(source: Mapping[str, str]) -> dict[int, float]:
    """Rank -> index of the host that captured it, as far as the slices say; a file may lie."""
    found = {}
    for word in source.get(HOST_INDEX, "").split():
        rank, _, index = word.partition("=")
        if rank.isdigit() and re.fullmatch(r"\d{1,4}(\.\d{1,6})?", index) and float(index):
            found[int(rank)] = float(index)
    return found


def host_spread(programs: Iterable[Program]) -> float | None:
    """Relative standard deviation of what a rank's host takes for an iteration, the largest; None
    if no program has two iterations.
    """
    hosts = [one.hosts for one in programs if len(one.hosts) > 1]
    return max((float(one.std(ddof=1) / max(1.0, one.mean())) for one in hosts), default=None)


def host_sources(
    calibration: Calibration, where: str, source: Mapping[str, str]
) -> tuple[str, str]:
    """Provenance of the host's time for segments, and for calls; ``source`` of the programs."""
    calls = (
        f"measured: the host's time for calls ({calibration.source})"
        if calibration.host
        else f"assumed: {CALL_NS // 1000} us of the host for a call"
    )
    if where == "meta":
        by = "kernels alone" if BY_KERNELS in source else "calls of Python and its kernels"
        return MODELLED + by, calls
    return f"measured: the host's time for segments ({where})", calls


def right_after(program: Program) -> np.ndarray:
    """bool [n]: calls before which no kernel was launched since the call before them, such as the
    broadcasts of a batch.  What they need is still in the CPU's caches.
    """
    ops = program.ops
    calls = np.flatnonzero(IS_CALL[ops["name"]])
    kernels = (ops["ns"] > 0) & (ops["name"] == NAMES.index("compute"))
    launched = np.concatenate(([0], np.cumsum(kernels)))
    found = np.zeros(len(ops), dtype=bool)
    found[calls[1:]] = launched[calls[1:]] == launched[calls[:-1]]
    return found & program.knows_host


def call_ns(program: Program, calibration: Calibration, default: int) -> np.ndarray:
    """int64 [n]: what NCCL keeps the host for each call, 0 for other ops; of a batch every message
    has its share.  ``default`` where nothing was measured.
    """
    ops = program.ops
    found, again = np.zeros(len(ops), dtype=np.int64), right_after(program)
    calls = np.flatnonzero(IS_CALL[ops["name"]])
    columns = (
        ops["name"][calls],
        ops["batch"][calls] >= 0,
        ops["handle"][calls] >= 0,
        again[calls],
    )
    kinds = list(zip(*(column.tolist() for column in columns), strict=True))
    took = {
        kind: calibration.host_ns("message", True, default)
        if kind[1]
        else calibration.host_ns(NAMES[kind[0]], kind[2], default, kind[3])
        for kind in set(kinds)
    }
    found[calls] = [took[kind] for kind in kinds]
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
    talks = IS_CALL[ops["name"]] & (ops["host"] < 0)  # others a CUDA graph launches
    source[talks] = first + 1
    ns[talks] = calls[talks]
    batched = np.flatnonzero(ops["batch"] >= 0)
    _, owner, which = np.unique(ops["batch"][batched], return_index=True, return_inverse=True)
    parts = ns[batched]
    ns[batched] = 0
    np.add.at(ns, batched[owner][which.ravel()], parts)
    return lead, ns, source
