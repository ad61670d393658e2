"""What are the critical path and the communication of a timeline made of?  Sums by kind.

In : Timeline.  Out: PathPart and Call, each with the provenance of its times.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from megatron_prism.core.ops import CODE, NAMES, PHASE_NAMES
from megatron_prism.replay.timeline import Timeline

__all__ = ["HOST_PART", "Call", "PathPart", "calls_of", "critical_by_class", "path_parts"]

HOST_PART = "host: "  # what begins so is a host that issues work


@dataclass(frozen=True)
class PathPart:
    """What the critical path is made of: ns of all steps of one kind, and how many."""

    phase: str
    what: str
    group: str
    source: str
    ns: int
    count: int


@dataclass(frozen=True)
class Call:
    """One kind of call of one group, per rank (the mean over the ranks that make it).

    ranks   : that make it
    calls   : per rank and iteration
    bytes   : per rank and iteration, messages as nccl-tests counts them
    moving  : ns from when everybody had come to the end
    waiting : ns from when the rank was ready to when everybody had come
    """

    group: str
    name: str
    ranks: int
    calls: float
    bytes: float
    moving: float
    waiting: float
    source: str


def _begin(timeline: Timeline) -> int:
    return timeline.ends[-2] if timeline.iterations > 1 else 0


def critical_by_class(timeline: Timeline) -> dict[int, int]:
    """Class -> ns of its computing, and of its host's issuing, on the critical path."""
    begin = _begin(timeline)
    found: dict[int, int] = defaultdict(int)
    for owner, _, start, end, _ in timeline.critical_path():
        found[owner] += end - max(start, begin)
    return found


def path_parts(timeline: Timeline) -> tuple[PathPart, ...]:
    """The critical path by (phase, op, group, provenance), largest first; sums to the iteration."""
    graph, prices, begin = timeline.graph, timeline.prices, _begin(timeline)
    meet = graph.rendezvous
    total: dict[tuple[str, str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for owner, number, start, end, host in timeline.critical_path():
        if owner >= 0:
            program, at = graph.program_list[owner], number
            source = (prices.host_source if host else prices.compute_source)[owner][number]
        else:
            first = int(meet.start[number])
            program, at = graph.program_list[meet.classes[first]], int(meet.ops[first])
            source = prices.meeting_source[number]
        row = program.ops[at]
        key = (
            PHASE_NAMES[row["phase"]] or "outside",
            HOST_PART + NAMES[row["name"]] if host else NAMES[row["name"]],
            program.strings[row["group"]],
            prices.sources[source],
        )
        total[key][0] += end - max(start, begin)
        total[key][1] += 1
    parts = [PathPart(*key, ns, count) for key, (ns, count) in total.items() if ns]
    return tuple(sorted(parts, key=lambda part: -part.ns))


def calls_of(timeline: Timeline) -> tuple[tuple[Call, ...], dict[str, float]]:
    """(calls by group and name, mean ns of communication per rank by source)."""
    graph, prices = timeline.graph, timeline.prices
    size = graph.programs.world.size
    sums: dict[tuple[str, str], np.ndarray] = defaultdict(lambda: np.zeros(5))
    sources: dict[tuple[str, str], set[str]] = defaultdict(set)
    busy: dict[str, float] = defaultdict(float)
    for index, program in enumerate(graph.program_list):
        count, spans = graph.classes.counts[index], timeline.spans(index)
        spans = spans[program.ops["name"][spans["op"]] != CODE["compute"]]
        message = np.maximum(program.bytes_in, program.bytes_out)
        rows = program.ops[spans["op"]]
        source = prices.meeting_source[graph.rendezvous.of[index][spans["op"]]]
        for name, group in sorted(
            set(zip(rows["name"].tolist(), rows["group"].tolist(), strict=True))
        ):
            mine = (rows["name"] == name) & (rows["group"] == group)
            chosen, key = spans[mine], (program.strings[group], NAMES[name])
            moving = chosen["end"] - chosen["start"]
            waited = chosen["start"] - chosen["ready"]
            sums[key] += count * np.array(
                [1, len(chosen), message[chosen["op"]].sum(), moving.sum(), waited.sum()]
            )
            for code in np.unique(source[mine]).tolist():
                sources[key].add(prices.sources[code])
                busy[prices.sources[code]] += (
                    float(moving[source[mine] == code].sum()) * count / size
                )
    calls = []
    for (group, name), sum_ in sums.items():
        count_, num_bytes, moving_, waiting = (sum_[1:] / sum_[0]).tolist()
        said = "; ".join(sorted(sources[group, name]))
        calls.append(Call(group, name, int(sum_[0]), count_, num_bytes, moving_, waiting, said))
    return tuple(sorted(calls, key=lambda call: -(call.moving + call.waiting) * call.ranks)), busy
