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

from megatron_prism.core.programs.ops import CODE, IS_CALL, NAMES, PHASE_NAMES, STEPS
from megatron_prism.core.programs.program import Program
from megatron_prism.core.programs.slices import HOST_INDEX
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
    is_counted = (ops["name"] == CODE["compute"]) & (ops["kernels"] >= 0)
    kernel_ns = np.where(_BY_PYTHON[ops["phase"]], KERNEL_NS, LOOP_NS)
    ops["host"] = np.where(is_counted, ops["kernels"] * kernel_ns, -1)
    # the device may begin once the first kernel is launched
    ops["lead"] = np.where(is_counted, kernel_ns, -1)
    return dataclasses.replace(program, ops=ops)


ON_TARGET = "on the target's host"
# of the lead that a faster host would leave if its first launch alone decided: six traced ranks on
# H100, 0.4 to 0.9 times as long, have between 0.5 and 0.8 (benchmarks/results/h100_leads.json)
_OF_FIRST_LAUNCHES = 0.6


def host_scaled(factor: str) -> str:
    """What provenances of a host's time say once it is scaled to the target's host."""
    return f"{factor} x as long {ON_TARGET}"


def on_other_host(
    lead_ns: np.ndarray, rest_ns: np.ndarray, device_ns: np.ndarray, factor: float
) -> tuple[np.ndarray, np.ndarray]:
    """Say what a host takes for segments that is slower or faster by a factor.

    The lead of a segment is the largest delay of a launch: how long the host takes until then, less
    what the device has to do before.  Another host changes the first term alone.

    Args:
        lead_ns: int64 [ops], the host's time until the device may begin.
        rest_ns: int64 [ops], from then on.
        device_ns: int64 [ops], what the device takes.
        factor: how many times as long the other host takes for everything.

    Returns:
        Both of the other host, int64 [ops] each.
    """
    whole_ns = lead_ns + rest_ns
    new_whole_ns = np.rint(whole_ns * factor)
    # what the host does for longer than the device works is behind the last launch
    covered_ns = np.minimum(rest_ns, device_ns)
    last_launch_ns = lead_ns + covered_ns

    # One launch is later than all others, and some of the device's work is before that launch.
    # Where the lead is what the launches take longer than the device, it is the last launch, and
    # the work is all that covers the rest; the less of the lead this explains, the earlier it is.
    excess_ns = last_launch_ns - device_ns
    explained = excess_ns / np.maximum(lead_ns, 1)
    explained = np.clip(explained, 0.0, 1.0)
    work_before_ns = covered_ns * explained
    latest_launch_ns = lead_ns + work_before_ns
    new_lead_ns = latest_launch_ns * factor - work_before_ns

    # on a faster host one of the first launches comes to be the latest
    early_ns = lead_ns * factor * _OF_FIRST_LAUNCHES
    new_lead_ns = np.maximum(new_lead_ns, early_ns)
    # on a slower one the device may come to wait for the last launch
    late_ns = last_launch_ns * factor - device_ns
    new_lead_ns = np.maximum(new_lead_ns, late_ns)

    new_lead_ns = np.minimum(np.rint(new_lead_ns), new_whole_ns)
    new_rest_ns = new_whole_ns - new_lead_ns
    return new_lead_ns.astype(np.int64), new_rest_ns.astype(np.int64)


def indices_of(source: Mapping[str, str]) -> dict[int, float]:
    """Rank -> index of the host that captured it, as far as the slices say; a file may lie."""
    indices = {}
    for word in source.get(HOST_INDEX, "").split():
        rank, _, index = word.partition("=")
        if rank.isdigit() and re.fullmatch(r"\d{1,4}(\.\d{1,6})?", index) and float(index):
            indices[int(rank)] = float(index)
    return indices


def host_spread(programs: Iterable[Program]) -> float | None:
    """Relative standard deviation of what a rank's host takes for an iteration, the largest; None
    if no program has two iterations.
    """
    spreads = []
    for program in programs:
        host_ns_of_iterations = program.hosts
        if len(host_ns_of_iterations) > 1:
            deviation_ns = host_ns_of_iterations.std(ddof=1)
            spreads.append(float(deviation_ns / max(1.0, host_ns_of_iterations.mean())))
    return max(spreads, default=None)


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
    follows_call = np.zeros(len(ops), dtype=bool)
    follows_call[calls[1:]] = launched[calls[1:]] == launched[calls[:-1]]
    return follows_call & program.knows_host


def call_ns(program: Program, calibration: Calibration, default: int) -> np.ndarray:
    """int64 [n]: what NCCL keeps the host for each call, 0 for other ops; of a batch every message
    has its share.  ``default`` where nothing was measured.
    """
    ops = program.ops
    again = right_after(program)
    calls = np.flatnonzero(IS_CALL[ops["name"]])
    columns = (
        ops["name"][calls],
        ops["batch"][calls] >= 0,
        ops["handle"][calls] >= 0,
        again[calls],
    )
    kinds = list(zip(*(column.tolist() for column in columns), strict=True))
    ns_of_kind: dict[tuple[int, ...], int] = {}
    for kind in set(kinds):
        name, is_of_batch, is_asynchronous, is_again = kind
        if is_of_batch:
            ns_of_kind[kind] = calibration.host_ns("message", True, default)
        else:
            ns_of_kind[kind] = calibration.host_ns(NAMES[name], is_asynchronous, default, is_again)
    host = np.zeros(len(ops), dtype=np.int64)
    host[calls] = [ns_of_kind[kind] for kind in kinds]
    return host


def host_ns(
    program: Program, calibration: Calibration, first: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(until the device may begin, from then on: int64 [n] ns; source uint8 [n]).

    ``first`` is the number of the segments' provenance.

    0 throughout if the program does not know its segments' host time.  A batch is issued with its
    first message.
    """
    ops = program.ops
    segment_ns = np.maximum(ops["host"], 0)
    lead = np.clip(ops["lead"], 0, segment_ns)
    ns = segment_ns - lead
    source = np.full(len(ops), first, dtype=np.uint8)
    if not program.knows_host:
        return lead, ns, source
    calls = call_ns(program, calibration, CALL_NS)
    is_issued = IS_CALL[ops["name"]] & (ops["host"] < 0)  # others a CUDA graph launches
    source[is_issued] = first + 1
    ns[is_issued] = calls[is_issued]
    # the messages of a batch have their time at the first of them
    batched = np.flatnonzero(ops["batch"] >= 0)
    _, owner, which = np.unique(ops["batch"][batched], return_index=True, return_inverse=True)
    parts = ns[batched]
    ns[batched] = 0
    np.add.at(ns, batched[owner][which.ravel()], parts)
    return lead, ns, source
