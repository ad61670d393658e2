"""Memory of programs over an iteration, as pages draw it.

In : programs and their figures.  Out: what memory.js draws on the pages of ``prism fit``, of
``prism replay`` and of real processes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_prism.core.errors import UsageError
from megatron_prism.core.program import Program, Programs
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


def page_data(programs: Programs, made: job_peaks.MemoryReport, limit: int | None = None) -> Data:
    """Every class of ``made``; ``limit``: bytes of the device, None: those of the job's GPU, if
    it is known.
    """
    if limit is None:
        with contextlib.suppress(UsageError):
            limit = machine(machine_of(programs)).device_memory or None
    found = []
    for name, one in made.classes.items():
        program, beside = job_peaks.first_program(programs, one), job_peaks.beside_tensors(one)
        levels = (one["peak_reserved"], one.get("peak_device"), beside["nccl"], beside["context"])
        label = words.step(one["at"]["phase"], one["at"]["microbatch"], one["at"]["chunk"])
        title = f"{name}: {one['count']:,} ranks"
        found.append({**class_data(title, program, levels, label), "pools": beside["pools"],
                      "cached": max(0, beside["cache"])})  # fmt: skip
    return {"limit": limit, "verdict": "", "about": [], "changes": [], "classes": found}


def timeline_memory(programs: Programs) -> Data | str:
    """The same of a job that is replayed, or why there is none."""
    try:
        return page_data(programs, job_peaks.peak_memory(programs))
    except UsageError as error:
        return f"unknown: {error.message}"


def largest(memory: Data | str) -> int | None:
    """The most bytes of a rank, of the device if they are known."""
    ends = [] if isinstance(memory, str) else memory["classes"]
    return max((one["device"] or one["reserved"] for one in ends), default=None)


def render_memory_page(title: str, subtitle: str, memory: Data, rows: Sequence[object]) -> str:
    """Make a page of memory; ``rows`` say what its figures are made of."""
    data = {"memory": memory, "provenance": [["What the figures are made of", ["", ""], rows]]}
    text = "\n".join(f"{one['name']}: {format_bytes(one['allocated'])} allocated, "
                     f"{one['when']}" for one in memory["classes"])  # fmt: skip
    return render_page("prism fit", title, subtitle, _SCRIPT, data, text, ("memory.js",))


def class_data(
    name: str,
    program: Program,
    levels: tuple[int, int | None, int, int],
    when: str,
    iterations: Sequence[int] = (),
) -> Data:
    """One class; ``levels``: reserved, device, NCCL's and other bytes at the peak."""
    reserved, device, nccl, context = levels
    live, top = program.live_bytes(), peaks.known_peak(program)
    if top.earlier:
        when = f"an earlier iteration, {when}"
    most = int(live.argmax())
    chosen = _thinned(live, most)
    by_kind = peaks.live_by(program, lambda kind, module, site: kind, chosen)
    by_module = peaks.live_by(program, lambda kind, module, site: _part(module), chosen)
    at = int(np.flatnonzero(chosen == most)[0])
    largest = sorted(by_module, key=lambda part: -int(by_module[part][at]))
    rest = [by_module[part] for part in largest[_MODULES:]]
    kinds = [kind for kind in peaks.KINDS if kind in by_kind and by_kind[kind].any()]
    return {
        "name": name,
        "when": when,
        "where": f"{top.op.name} {top.site}".removeprefix("mark ").rstrip(),
        "allocated": top.num_bytes,
        "reserved": reserved,
        "device": device,
        "alive": int(live[most]),  # the most of the iteration whose requests are drawn
        "cached": max(0, reserved - top.num_bytes),
        "pools": 0,
        "nccl": nccl,
        "context": context,
        "parts": [[kind, size] for kind, size in top.by_kind.items() if size],
        "event": most,
        "events": chosen.tolist(),
        "kinds": kinds,
        "by_kind": [by_kind[kind].tolist() for kind in kinds],
        "modules": [*largest[:_MODULES], *(["all others"] if rest else [])],
        "by_module": [*(by_module[part].tolist() for part in largest[:_MODULES]),
                      *([np.sum(rest, axis=0).tolist()] if rest else [])],
        "steps": _steps(program, iterations),
        "top": [[h.kind, h.module, h.site, h.count, h.num_bytes] for h in top.holdings[:_TOP]],
    }  # fmt: skip


def _thinned(live: np.ndarray, most: int) -> np.ndarray:
    """Events: the lowest and the highest of each part of the history, and its peak and end."""
    parts = np.array_split(np.arange(live.size), min(_POINTS // 2, live.size))
    ends = [part[[live[part].argmin(), live[part].argmax()]] for part in parts]
    return np.unique(np.concatenate([*ends, [most, live.size - 1]]))


def _part(module: str) -> str:
    """A module without its chunk and its layer."""
    return re.sub(r"^chunk\d+(\.|$)|\[\d+\]$", "", module)


def _steps(program: Program, iterations: Sequence[int]) -> list[tuple[int, str, str]]:
    """(first event, label, words) of every step."""
    ends = peaks.ends_of_steps(program)
    firsts = np.unique(np.concatenate([[0], ends[:-1] + 1])) if len(ends) else np.empty(0, int)
    events = np.searchsorted(program.allocations["before"], firsts, side="left")
    found: dict[int, tuple[int, str, str]] = {}
    for event, first in zip(events.tolist(), firsts[firsts < len(program)].tolist(), strict=False):
        one = program[first]
        text = words.step(one.phase, one.microbatch, one.chunk)
        if iterations:
            text = f"iteration {iterations[first]}, {text}"
        if one.phase:
            found[event] = (event, one.label, text)
    return list(found.values())
