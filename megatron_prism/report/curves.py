"""What is drawn over time?  Live memory of a class, its spans, and the way of the critical path.

Plain numpy columns, thinned to what a screen can show: a million spans are a page of megabytes, so
above a budget the tiny ones of a lane and step become one.  Nothing here knows about HTML.
"""

from __future__ import annotations

import numpy as np

from megatron_prism.core.ops import CODE
from megatron_prism.replay.timeline import Timeline

__all__ = ["live_memory", "merge", "path_rows", "step_codes"]

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
    meet, begin = timeline.graph.rendezvous, timeline.ends[-2] if timeline.iterations > 1 else 0
    rows: list[list[int]] = []
    for owner, number, start, end, _ in timeline.critical_path():
        if owner < 0:
            members = [index for index, _ in meet.meeting(number)]
            owner = rows[-1][0] if rows and rows[-1][0] in members else members[0]
        start, end = max(start - begin, 0), end - begin
        if rows and rows[-1][0] == owner and rows[-1][2] == start:
            rows[-1][2] = end
        elif end > start:
            rows.append([owner, start, end])
    return np.array(rows, dtype=np.int64).reshape(-1, 3)
