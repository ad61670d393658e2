"""Memory of programs over an iteration, as pages draw it.

In : programs and their figures.  Out: what memory.js draws on the pages of ``prism fit``, of
``prism replay`` and of real processes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_prism.core.errors import UsageError
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.core.units import format_bytes
from megatron_prism.memory import job_peaks, peaks
from megatron_prism.replay.costs.machine import machine
from megatron_prism.replay.priced_graph import machine_of
from megatron_prism.report import words
from megatron_prism.report.page import Data, render_page

_SCRIPT = Path(__file__).with_name("explain.js")
_POINTS = 600  # of a curve
_MODULES = 11  # of a curve, all others being one more
_TOP = 40  # origins of the table


@dataclass(frozen=True)
class PeakLevels:
    """Bytes of a class at its peak.

    Attributes:
        reserved: By the allocator.
        device: Of the device; None: not known.
        nccl: Of NCCL's buffers.
        context: Of context and libraries.
    """

    reserved: int
    device: int | None
    nccl: int
    context: int


def page_data(programs: Programs, report: job_peaks.MemoryReport, limit: int | None = None) -> Data:
    """Return every class of a report.

    Args:
        programs: Of the job.
        report: Its peaks.
        limit: Bytes of the device; None: those of the job's GPU, if it is known.
    """
    if limit is None:
        # there is no limit where no shipped machine describes the GPU
        with contextlib.suppress(UsageError):
            limit = machine(machine_of(programs)).device_memory or None
    classes: list[Data] = []
    for name, figures in report.classes.items():
        program = job_peaks.first_program(programs, figures)
        beside = job_peaks.beside_tensors(figures)
        levels = PeakLevels(
            figures["peak_reserved"],
            figures.get("peak_device"),
            beside["nccl"],
            beside["context"],
        )
        step = figures["at"]
        when = words.step(step["phase"], step["microbatch"], step["chunk"])
        data = class_data(f"{name}: {figures['count']:,} ranks", program, levels, when)
        data["pools"] = beside["pools"]
        data["cached"] = max(0, beside["cache"])
        classes.append(data)
    return {"limit": limit, "verdict": "", "about": [], "changes": [], "classes": classes}


def timeline_memory(programs: Programs) -> Data | str:
    """Return the same of a job that is replayed, or say why there is none."""
    try:
        return page_data(programs, job_peaks.peak_memory(programs))
    except UsageError as error:
        return f"unknown: {error.message}"


def largest(memory: Data | str) -> int | None:
    """Return the most bytes of a rank, of the device if they are known."""
    if isinstance(memory, str):
        return None
    sizes: list[int] = [data["device"] or data["reserved"] for data in memory["classes"]]
    return max(sizes, default=None)


def render_memory_page(title: str, subtitle: str, memory: Data, rows: Sequence[object]) -> str:
    """Make a page of memory; ``rows`` say what its figures are made of."""
    data = {"memory": memory, "provenance": [["What the figures are made of", ["", ""], rows]]}
    lines: list[str] = []
    for figures in memory["classes"]:
        allocated = format_bytes(figures["allocated"])
        lines.append(f"{figures['name']}: {allocated} allocated, {figures['when']}")
    text = "\n".join(lines)
    return render_page("prism fit", title, subtitle, _SCRIPT, data, text, ("memory.js",))


@dataclass(frozen=True)
class _Curves:
    """Live bytes of each part of a program, at some events."""

    names: list[str]
    bytes_of_part: list[list[int]]


def class_data(
    name: str,
    program: Program,
    levels: PeakLevels,
    when: str,
    iterations: Sequence[int] = (),
) -> Data:
    """Return what is drawn of one class.

    Args:
        name: Of the class.
        program: Of its first rank.
        levels: Bytes at the peak.
        when: The peak is.
        iterations: Of each op, where there are several.
    """
    live = program.live_bytes()
    peak = peaks.known_peak(program)
    # the peak is of an iteration before the one whose requests are drawn
    if peak.earlier:
        when = f"an earlier iteration, {when}"
    peak_event = int(live.argmax())
    events = _thinned(live, peak_event)
    kinds = _curves_of_kinds(program, events)
    modules = _curves_of_modules(program, events, peak_event)
    parts = [[kind, size] for kind, size in peak.by_kind.items() if size]
    top = [
        [holding.kind, holding.module, holding.site, holding.count, holding.num_bytes]
        for holding in peak.holdings[:_TOP]
    ]
    return {
        "name": name,
        "when": when,
        "where": f"{peak.op.name} {peak.site}".removeprefix("mark ").rstrip(),
        "allocated": peak.num_bytes,
        "reserved": levels.reserved,
        "device": levels.device,
        "alive": int(live[peak_event]),  # the most of the iteration whose requests are drawn
        "cached": max(0, levels.reserved - peak.num_bytes),
        "pools": 0,
        "nccl": levels.nccl,
        "context": levels.context,
        "parts": parts,
        "event": peak_event,
        "events": events.tolist(),
        "kinds": kinds.names,
        "by_kind": kinds.bytes_of_part,
        "modules": modules.names,
        "by_module": modules.bytes_of_part,
        "steps": _steps(program, iterations),
        "top": top,
    }


def _curves_of_kinds(program: Program, events: np.ndarray) -> _Curves:
    """Return live bytes of each kind that ever lives."""
    bytes_of_kind = peaks.live_by(program, lambda kind, module, site: kind, events)
    curves = _Curves([], [])
    for kind in peaks.KINDS:
        if kind in bytes_of_kind and bytes_of_kind[kind].any():
            curves.names.append(kind)
            curves.bytes_of_part.append(bytes_of_kind[kind].tolist())
    return curves


def _curves_of_modules(program: Program, events: np.ndarray, peak_event: int) -> _Curves:
    """Return live bytes of the modules that hold most at the peak, and of all others."""
    bytes_of_module = peaks.live_by(program, lambda kind, module, site: _part(module), events)
    peak_place = int(np.flatnonzero(events == peak_event)[0])
    largest_first = sorted(
        bytes_of_module, key=lambda part: -int(bytes_of_module[part][peak_place])
    )
    shown = largest_first[:_MODULES]
    curves = _Curves(shown, [bytes_of_module[part].tolist() for part in shown])
    other_modules = [bytes_of_module[part] for part in largest_first[_MODULES:]]
    if other_modules:
        curves.names.append("all others")
        curves.bytes_of_part.append(np.sum(other_modules, axis=0).tolist())
    return curves


def _thinned(live: np.ndarray, peak_event: int) -> np.ndarray:
    """Return the events of the lowest and the highest of each stretch, of the peak and the end."""
    stretches = np.array_split(np.arange(live.size), min(_POINTS // 2, live.size))
    events = [peak_event, live.size - 1]
    for stretch in stretches:
        events.append(int(stretch[live[stretch].argmin()]))
        events.append(int(stretch[live[stretch].argmax()]))
    return np.unique(events)


def _part(module: str) -> str:
    """Return a module without its chunk and the number of its parameters."""
    # a buffer is of the module whose parameters it has; earlier releases wrote module[48]
    in_buffer = re.sub(r"^buffer of \d+ parameters of |\[\d+\]$", "", module)
    return re.sub(r"^chunk\d+(\.|$)", "", in_buffer)


def _steps(program: Program, iterations: Sequence[int]) -> list[tuple[int, str, str]]:
    """Return (first event, label, words) of every step."""
    ends = peaks.ends_of_steps(program)
    first_ops = np.empty(0, int)
    # an op behind the end of a step begins the next one
    if len(ends):
        first_ops = np.unique([0, *(ends[:-1] + 1).tolist()])
    first_events = np.searchsorted(program.allocations["before"], first_ops, side="left")
    step_of_event: dict[int, tuple[int, str, str]] = {}
    for event, first_op in zip(first_events.tolist(), first_ops.tolist(), strict=True):
        # the last step ends with the program
        if first_op >= len(program):
            break
        op = program[first_op]
        text = words.step(op.phase, op.microbatch, op.chunk)
        if iterations:
            text = f"iteration {iterations[first_op]}, {text}"
        # ops outside of a step are drawn, but named nowhere
        if op.phase:
            step_of_event[event] = (event, op.label, text)
    return list(step_of_event.values())
