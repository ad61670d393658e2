"""The timeline of a world: spans per class, and what the time went into.

In : a WorldGraph and Prices.  Out: Timeline, a value that reports draw and tests compare.  Several
iterations are replayed in a row; figures are of the last one, when the pipeline no longer remembers
that the first began from rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_prism.core.errors import PrismError
from megatron_prism.core.ops import CODE, NAMES
from megatron_prism.core.results import rendered
from megatron_prism.graph.world_graph import WorldGraph
from megatron_prism.replay import kernels, maxplus
from megatron_prism.replay.costs import Prices
from megatron_prism.replay.dag import COMPUTE, HOST, LEAD, MEET, Dag, build

__all__ = ["SPAN", "Account", "Step", "Timeline", "replay"]

SPAN = np.dtype(
    [
        ("op", "i4"),  # index in the class's program
        ("lane", "i2"),  # index into Timeline.lanes: a stream, or a group's own stream
        ("ready", "i8"),  # ns: when this rank was ready for it; equals start for compute
        ("start", "i8"),  # ns: when it began, everybody being ready
        ("end", "i8"),
    ]
)


@dataclass(frozen=True)
class Account:
    """Where one class's iteration went, ns; the parts add up to ``total``.

    compute : kernels ran on the main stream
    exposed : group description -> the main stream waited for calls of this group to move data
    waiting : group description -> the main stream waited for other ranks to come to them
    idle    : nothing of that: the host was late, or the iteration was over here
    """

    total: int
    compute: int
    exposed: Mapping[str, int]
    waiting: Mapping[str, int]
    idle: int


class Step(NamedTuple):
    """One piece of the critical path, ns.

    owner : the class; -1 for a call
    op    : its op, or the rendezvous of a call
    host  : the host issued the op; else the device ran it
    """

    owner: int
    op: int
    start: int
    end: int
    host: bool = False


@dataclass(frozen=True)
class Timeline:
    """The replayed world.

    begin, end : of the last iteration, ns since the start of the replay
    """

    graph: WorldGraph
    prices: Prices
    dag: Dag
    node_start: np.ndarray
    node_end: np.ndarray
    iterations: int

    @cached_property
    def iteration_ns(self) -> int:
        """Duration of one iteration: from the end of the one before to its own end."""
        return self.ends[-1] - (self.ends[-2] if self.iterations > 1 else 0)

    @cached_property
    def ends(self) -> list[int]:
        """When each iteration was over on the last rank, ns."""
        return [
            int(self.node_end[self.dag.iteration == i].max(initial=0))
            for i in range(self.iterations)
        ]

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        """Names of the tracks: streams, then groups."""
        names: dict[str, None] = {"main": None}
        for program in self.graph.program_list:
            used = np.unique(program.ops["stream"][program.ops["name"] == CODE["compute"]])
            names |= dict.fromkeys(program.strings[code] for code in used)
        for program in self.graph.program_list:
            names |= dict.fromkeys(program.groups())
        return tuple(names)

    def spans(self, index: int, iteration: int = -1) -> np.ndarray:
        """SPAN [n] of class ``index``, in order of issue, ns since the iteration began."""
        program = self.graph.program_list[index]
        nodes = self.dag.node_of[index][iteration]
        ready = self.dag.ready_of[index][iteration]
        there = np.flatnonzero(nodes >= 0)
        lane = {name: i for i, name in enumerate(self.lanes)}
        texts = np.array([lane.get(text, 0) for text in program.strings], dtype=np.int16)
        ops = program.ops[there]
        found = np.empty(len(there), dtype=SPAN)
        found["op"] = there
        compute = ops["name"] == CODE["compute"]
        found["lane"] = texts[np.where(compute, ops["stream"], ops["group"])]
        found["start"], found["end"] = self.node_start[nodes[there]], self.node_end[nodes[there]]
        waits = ready[there]
        found["ready"] = np.where(waits >= 0, self.node_end[waits], found["start"])
        begin = self.ends[iteration - 1] if iteration % self.iterations else 0
        for name in ("ready", "start", "end"):
            found[name] -= begin
        return found

    def host_spans(self, index: int, iteration: int = -1) -> np.ndarray:
        """int64 [n, 3]: (op, start, end) of what the host of class ``index`` issues, ns since the
        iteration began; none if the slices do not say how long that takes."""
        iteration %= self.iterations
        mine = (self.dag.owner == index) & (self.dag.iteration == iteration)
        lead, host = (np.flatnonzero(mine & (self.dag.kind == kind)) for kind in (LEAD, HOST))
        start = dict(zip(self.dag.op[lead].tolist(), self.node_start[lead].tolist(), strict=True))
        columns = (self.dag.op, self.node_start, self.node_end)
        rows = zip(*(column[host].tolist() for column in columns), strict=True)
        begin = self.ends[iteration - 1] if iteration else 0
        found = [(op, start.get(op, since) - begin, end - begin) for op, since, end in rows]
        return np.array(found, dtype=np.int64).reshape(-1, 3)

    def account(self, index: int) -> Account:
        """Where the last iteration of class ``index`` went."""
        return _Accountant(self, index).account()

    def critical_path(self) -> list[Step]:
        """What decides the last iteration."""
        path = maxplus.critical_path(self.dag, self.node_end)
        dag, last = self.dag, self.iterations - 1
        return [
            Step(int(dag.owner[n]), int(dag.op[n]), int(self.node_start[n]),
                 int(self.node_end[n]), bool(dag.kind[n] in (LEAD, HOST)))
            for n in path
            if dag.iteration[n] == last and dag.kind[n] in (COMPUTE, MEET, LEAD, HOST)
        ]  # fmt: skip

    def slack(self) -> list[int]:
        """Per class: by how much all its computing could be late without delaying the end, ns.

        The smallest distance from any of its segments to the longest path through it.
        """
        tail = kernels.tails(self.dag.order, self.dag.start, self.dag.before, self.durations)
        end = int(self.node_end.max(initial=0))
        segments = np.flatnonzero(self.dag.kind == COMPUTE)
        found = np.full(len(self.graph.classes), end, dtype=np.int64)
        late = end - (self.node_end + tail)[segments]
        np.minimum.at(found, self.dag.owner[segments], late)
        return found.tolist()

    @cached_property
    def durations(self) -> np.ndarray:
        """Of every node, ns."""
        return np.asarray(self.node_end - self.node_start)

    def to_json(self) -> dict[str, object]:
        """The figures that ``prism replay --json`` prints; times in ns, each with its basis."""
        return rendered("report.figures:to_json", self, dict)

    def to_text(self) -> str:
        """The page that ``prism replay`` prints."""
        return rendered("report.text:render", self, str)

    def to_html(self) -> str:
        """One self-contained page with the diagram, for any browser."""
        return rendered("report.html:render", self, str)

    def to_chrome_trace(self) -> str:
        """A Chrome trace, for ui.perfetto.dev."""
        return rendered("report.perfetto:render", self, str)


def replay(graph: WorldGraph, prices: Prices, iterations: int = 2) -> Timeline:
    """Replay ``iterations`` iterations without contention.  PrismError if the job hangs."""
    dag = build(graph, iterations)
    durations = durations_of(dag, prices)
    if durations.sum(dtype=float) > 1 << 62:
        raise PrismError(
            "together the ops take longer than 64 bits of nanoseconds hold, 146 years",
            fix="look for the long ones: prism show DIR --text",
        )
    start, end = maxplus.evaluate(dag, durations)
    return Timeline(graph, prices, dag, start, end, iterations)


def durations_of(dag: Dag, prices: Prices) -> np.ndarray:
    """The duration of every node, int64 [n]."""
    found = np.zeros(len(dag), dtype=np.int64)
    meets = dag.kind == MEET
    found[meets] = prices.meetings[dag.op[meets]]
    for kind, columns in ((COMPUTE, prices.compute), (LEAD, prices.lead), (HOST, prices.host)):
        chosen = dag.kind == kind
        first = np.concatenate(([0], np.cumsum([len(ns) for ns in columns]))).astype(np.int64)
        every = np.concatenate([*columns, np.empty(0, dtype=np.int64)])
        found[chosen] = every[first[dag.owner[chosen]] + dag.op[chosen]]
    return found


class _Accountant:
    """Walks the main stream of one class and says what each gap was."""

    def __init__(self, timeline: Timeline, index: int) -> None:
        self.timeline = timeline
        self.spans = timeline.spans(index)
        self.program = timeline.graph.program_list[index]

    def account(self) -> Account:
        lanes = self.timeline.lanes
        total = self.timeline.iteration_ns
        main = self.spans[self.spans["lane"] == lanes.index("main")]
        calls = self.spans[self.program.ops["name"][self.spans["op"]] != CODE["compute"]]
        calls = calls[np.argsort(calls["end"], kind="stable")]
        exposed: dict[str, int] = {}
        waiting: dict[str, int] = {}
        at, idle = 0, 0
        # what a rank began before the others had ended the last iteration was accounted there
        starts = [*main["start"].clip(0, total).tolist(), total]
        ends = [*main["end"].clip(0, total).tolist(), total]
        for start, end in zip(starts, ends, strict=True):
            gap, at_gap = start - at, at
            if gap > 0:
                idle += gap - self._explain(calls, at_gap, start, exposed, waiting)
            at = max(at, end)
        compute = sum(end - start for start, end in zip(starts, ends, strict=True))
        return Account(total, compute, exposed, waiting, idle)

    def _explain(
        self,
        calls: np.ndarray,
        begin: int,
        end: int,
        exposed: dict[str, int],
        waiting: dict[str, int],
    ) -> int:
        """How much of the gap [begin, end) the calls that end in it explain, ns."""
        first = np.searchsorted(calls["end"], begin, side="right")
        last = np.searchsorted(calls["end"], end, side="right")
        explained, at = 0, begin
        for call in calls[first:last]:
            group = self.timeline.lanes[call["lane"]]
            wait = max(0, min(int(call["start"]), end) - max(at, int(call["ready"])))
            move = max(0, min(int(call["end"]), end) - max(at, int(call["start"])))
            if wait:
                waiting[group] = waiting.get(group, 0) + wait
            if move:
                exposed[group] = exposed.get(group, 0) + move
            explained += wait + move
            at = max(at, int(call["end"]))
        return explained


def name_of(timeline: Timeline, index: int, op: int) -> str:
    """What op ``op`` of class ``index`` is called in outputs."""
    return NAMES[int(timeline.graph.program_list[index].ops["name"][op])]
