"""The page of a timeline: what replay.js draws.

In : Timeline, or two of them.  Out: HTML (page.py is its frame, replay.html its sections).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from megatron_prism.core.ops import CODE, PHASE_NAMES, label
from megatron_prism.replay.timeline import Timeline, mean_parts
from megatron_prism.report import text
from megatron_prism.report.metrics import Metrics, timeline_metrics
from megatron_prism.report.page import render_page

__all__ = ["live_memory", "merge", "page_data", "path_rows", "render", "step_codes"]


MERGED = np.dtype(
    [
        ("first", "i4"),  # index of the first span that it stands for
        ("count", "i4"),
        ("ready", "i8"),
        ("start", "i8"),
        ("end", "i8"),
    ]
)


def live_memory(timeline: Timeline, index: int, buckets: int) -> tuple[np.ndarray, np.ndarray]:
    """(ns int64 [n], live bytes int64 [n]) of class ``index``; empty if it recorded none.

    An allocation takes place when the op after it starts (a call: when the rank is ready for it).
    Thinned to the lowest and the highest of each of ``buckets`` slices of time.
    """
    program = timeline.graph.program_list[index]
    live = program.live_bytes()
    if not live.size:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    total, spans = timeline.iteration_ns, timeline.spans(index)
    when = np.full(len(program) + 1, -1, dtype=np.int64)
    compute = program.ops["name"][spans["op"]] == CODE["compute"]
    when[spans["op"]] = np.where(compute, spans["start"], spans["ready"])
    when[-1] = total
    at = np.maximum.accumulate(when.clip(0, total))[program.allocations["before"]]
    keep = np.zeros(live.size, dtype=bool)
    slot = at * buckets // max(total, 1)
    for order in (np.lexsort((live, slot)), np.lexsort((-live, slot))):
        first = np.append(True, np.diff(slot[order]) != 0)
        keep[order[first]] = True
    there = int(np.count_nonzero(program.allocations["before"] == 0))
    keep[: max(there - 1, 0)] = False  # what was there before the iteration is one number
    keep[max(there - 1, 0)] = keep[-1] = True
    return at[keep], live[keep]


def step_codes(timeline: Timeline, index: int, spans: np.ndarray) -> np.ndarray:
    """A number for every span that is equal for spans of one phase, microbatch and chunk."""
    rows = timeline.graph.program_list[index].ops[spans["op"]]
    codes = rows["phase"].astype(np.int64)
    for name in ("microbatch", "chunk"):
        column = rows[name].astype(np.int64)
        codes = codes * (int(column.max(initial=0)) + 2) + column + 1
    return np.asarray(codes)


def merge(spans: np.ndarray, codes: np.ndarray, epsilon: int) -> np.ndarray:
    """MERGED [n], by time; spans shorter than ``epsilon`` ns that share lane, step and slice of
    that width become one.  With 0 nothing is merged."""
    found = np.empty(len(spans), dtype=MERGED)
    found["first"], found["count"] = np.arange(len(spans)), 1
    for name in ("ready", "start", "end"):
        found[name] = spans[name]
    if not epsilon or not len(spans):
        return found
    tiny = spans["end"] - spans["ready"] < epsilon
    small = np.flatnonzero(tiny)
    slot = spans["ready"][small] // epsilon
    order = small[np.lexsort((spans["ready"][small], slot, codes[small], spans["lane"][small]))]
    keys = np.stack([spans["lane"][order], codes[order], spans["ready"][order] // epsilon])
    first = np.append(True, (np.diff(keys, axis=1) != 0).any(axis=0))[: len(order)]
    begin = np.flatnonzero(first)
    one = found[order[begin]]
    if len(begin):
        one["count"] = np.diff(np.append(begin, len(order)))
        one["start"] = np.minimum.reduceat(spans["start"][order], begin)
        one["end"] = np.maximum.reduceat(spans["end"][order], begin)
    together = np.concatenate([found[~tiny], one])
    return together[np.argsort(together["ready"], kind="stable")]


def path_rows(timeline: Timeline) -> np.ndarray:
    """int64 [n, 3]: (class, start, end) of the critical path; a call is shown where it was reached.

    Steps that follow each other in one class are one row.
    """
    meet, begin = timeline.graph.matched_calls, timeline.ends[-2] if timeline.iterations > 1 else 0
    rows: list[list[int]] = []
    for owner, number, start, end, _ in timeline.critical_path():
        if owner < 0:
            members = [index for index, _ in meet.members(number)]
            owner = rows[-1][0] if rows and rows[-1][0] in members else members[0]
        start, end = max(start - begin, 0), end - begin
        if rows and rows[-1][0] == owner and rows[-1][2] == start:
            rows[-1][2] = end
        elif end > start:
            rows.append([owner, start, end])
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


ROWS = 64  # classes that are drawn
TABLE = 256  # classes in tables
SPANS = 90_000  # spans of a page, about 2 MB
POINTS = 600  # of a memory curve
_NOTE = 160


def page_data(timeline: Timeline) -> dict[str, Any]:
    """The whole page as one value."""
    found = timeline_metrics(timeline)
    drawn = _drawn(found)
    names = _Names(timeline)
    spans = {index: timeline.spans(index) for index in drawn}
    codes = {index: step_codes(timeline, index, spans[index]) for index in drawn}
    epsilon, merged = 0, {i: merge(spans[i], codes[i], 0) for i in drawn}
    while sum(map(len, merged.values())) > SPANS and epsilon <= timeline.iteration_ns // 64:
        epsilon = 2 * epsilon or max(1, timeline.iteration_ns // 8192)
        merged = {i: merge(spans[i], codes[i], epsilon) for i in drawn}
    rows = [
        {
            "name": found.classes[index].name,
            "memory": [c.tolist() for c in live_memory(timeline, index, POINTS)],
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
        "parts": list(mean_parts(map(vars, found.classes)).items()),
    }


def _drawn(found: Metrics) -> list[int]:
    """The classes that are drawn: those most on the critical path, in their order."""
    ranked = sorted(found.classes, key=lambda one: (-one.critical, one.index))
    return sorted(one.index for one in ranked[:ROWS])


def _figures(found: Metrics) -> dict[str, Any]:
    value = asdict(found)
    value["exposed_by_group"] = found.mean("exposed")
    value["waiting_by_group"] = found.mean("waiting")
    value["all_classes"] = len(found.classes)
    value["classes"] = value["classes"][:TABLE]
    return value


def _path(timeline: Timeline, drawn: list[int]) -> list[list[int]]:
    place = {index: row for row, index in enumerate(drawn)}
    rows = path_rows(timeline)
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
        prices, of = self.timeline.prices, self.timeline.graph.matched_calls.of[index]
        rows = program.ops[spans["op"]]
        size = np.maximum(program.bytes_in, program.bytes_out)[spans["op"]]
        meeting = of[spans["op"]]
        called = prices.collective_source[meeting] if len(prices.collective_source) else 0
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


def render(timeline: Timeline, name: str = "", other: tuple[str, Timeline] | None = None) -> str:
    """The page; ``other``: what the timeline is compared with, and its name."""
    data, said = page_data(timeline), text.render(timeline)
    data |= {"name": name, "groups": data["lanes"], "other": None}
    if other is not None:
        data["other"] = {**page_data(other[1]), "name": other[0]}
        data["groups"] = list(dict.fromkeys([*data["lanes"], *data["other"]["lanes"]]))
        said += f"\n{other[0]}\n\n{text.render(other[1])}"
    world = str(timeline.graph.programs.world)
    return render_page("prism replay", world, "replay", data, said, ("diagram.js",))
