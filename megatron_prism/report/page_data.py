"""What does the page draw?  ``page_data(timeline)`` -> a JSON-ready value; page.js reads it.

::

    figures   the numbers (figures.Figures)
    lanes     names of the lanes; the first is the main stream
    kinds     what spans are: [op, phase, group, bytes, site, note, provenance], interned
    steps     names of steps ("2F0"), interned; sources: provenance, in words
    rows      per drawn class: name, memory [ns, bytes], and per lane its spans as columns
              lane, kind, step, count, ready (differences), wait (ready to start), run (to the end)
    path      the critical path as columns: row, start, run
    merged    ns below which spans were merged; 0 if none were
    missing   classes that are not drawn
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from megatron_prism.core.ops import PHASE_NAMES, label
from megatron_prism.replay.timeline import Timeline
from megatron_prism.report import curves
from megatron_prism.report.figures import Figures, figures

__all__ = ["page_data"]

ROWS = 64  # classes that are drawn
TABLE = 256  # classes in tables
SPANS = 90_000  # spans of a page, about 2 MB
POINTS = 600  # of a memory curve
_NOTE = 160


def page_data(timeline: Timeline) -> dict[str, Any]:
    """The whole page as one value."""
    found = figures(timeline)
    drawn = _drawn(found)
    names = _Names(timeline)
    spans = {index: timeline.spans(index) for index in drawn}
    codes = {index: curves.step_codes(timeline, index, spans[index]) for index in drawn}
    epsilon, merged = 0, {i: curves.merge(spans[i], codes[i], 0) for i in drawn}
    while sum(map(len, merged.values())) > SPANS and epsilon <= timeline.iteration_ns // 64:
        epsilon = 2 * epsilon or max(1, timeline.iteration_ns // 8192)
        merged = {i: curves.merge(spans[i], codes[i], epsilon) for i in drawn}
    rows = [
        {
            "name": found.classes[index].name,
            "memory": [c.tolist() for c in curves.live_memory(timeline, index, POINTS)],
            "lanes": names.lanes(index, spans[index], merged[index]),
        }
        for index in drawn
    ]
    return {
        "figures": _figures(found),
        "lanes": list(timeline.lanes),
        "rows": rows,
        "kinds": list(names.kinds),
        "steps": list(names.steps),
        "sources": list(timeline.prices.sources),
        "path": _path(timeline, drawn),
        "merged": epsilon,
        "missing": len(found.classes) - len(drawn),
    }


def _drawn(found: Figures) -> list[int]:
    """The classes that are drawn: those most on the critical path, in their order."""
    ranked = sorted(found.classes, key=lambda one: (-one.critical, one.index))
    return sorted(one.index for one in ranked[:ROWS])


def _figures(found: Figures) -> dict[str, Any]:
    value = asdict(found)
    value["exposed_by_group"] = found.mean("exposed")
    value["waiting_by_group"] = found.mean("waiting")
    value["all_classes"] = len(found.classes)
    value["classes"] = value["classes"][:TABLE]
    return value


def _path(timeline: Timeline, drawn: list[int]) -> list[list[int]]:
    place = {index: row for row, index in enumerate(drawn)}
    rows = curves.path_rows(timeline)
    owners = [place.get(owner, -1) for owner in rows[:, 0].tolist()]
    return [owners, rows[:, 1].tolist(), (rows[:, 2] - rows[:, 1]).tolist()]


class _Names:
    """Interns what spans are called, over all classes."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.kinds: dict[tuple[Any, ...], int] = {}
        self.steps: dict[str, int] = {}

    def lanes(self, index: int, spans: np.ndarray, merged: np.ndarray) -> list[dict[str, Any]]:
        """The columns of every lane of class ``index``."""
        kinds, steps = self._names(index, spans[merged["first"]])
        lanes = spans["lane"][merged["first"]]
        found = []
        for lane in np.unique(lanes).tolist():
            mine = np.flatnonzero(lanes == lane)
            one = merged[mine]
            found.append(
                {
                    "lane": lane,
                    "kind": kinds[mine].tolist(),
                    "step": steps[mine].tolist(),
                    "count": one["count"].tolist() if (one["count"] > 1).any() else [],
                    "ready": np.diff(one["ready"], prepend=0).tolist(),
                    "wait": (one["start"] - one["ready"]).tolist(),
                    "run": (one["end"] - one["start"]).tolist(),
                }
            )
        return found

    def _names(self, index: int, spans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(kind, step) of every span, int64 [n]."""
        program = self.timeline.graph.program_list[index]
        prices, of = self.timeline.prices, self.timeline.graph.rendezvous.of[index]
        rows = program.ops[spans["op"]]
        size = np.maximum(program.bytes_in, program.bytes_out)[spans["op"]]
        meeting = of[spans["op"]]
        called = prices.meeting_source[meeting] if len(prices.meeting_source) else 0
        source = np.where(meeting >= 0, called, prices.compute_source[index][spans["op"]])
        columns = [rows[c].tolist() for c in ("name", "phase", "group", "site", "note")]
        known: dict[tuple[int, ...], int] = {}
        kinds, steps = [], []
        keys = zip(*columns, size.tolist(), source.tolist(), strict=True)
        for op, key in zip(spans["op"].tolist(), keys, strict=True):
            if key not in known:
                one = program[op]
                kind = (
                    one.name,
                    one.phase,
                    one.group,
                    key[-2],
                    one.site,
                    one.note[:_NOTE],
                    key[-1],
                )
                known[key] = self.kinds.setdefault(kind, len(self.kinds))
            kinds.append(known[key])
        parts = zip(columns[1], rows["microbatch"].tolist(), rows["chunk"].tolist(), strict=True)
        words: dict[tuple[int, int, int], int] = {}
        for part in parts:
            if part not in words:
                text = label(PHASE_NAMES[part[0]], part[1], part[2])
                words[part] = self.steps.setdefault(text, len(self.steps))
            steps.append(words[part])
        return np.array(kinds, dtype=np.int64), np.array(steps, dtype=np.int64)
