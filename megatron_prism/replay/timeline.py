"""The timeline of a world: spans per class, and what the time went into.

In : a WorldGraph and Prices.  Out: Timeline, a value that reports draw and tests compare.  Several
iterations are replayed in a row; figures are of the last one, when the pipeline no longer remembers
that the first began from rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from megatron_prism.core.errors import PrismError
from megatron_prism.core.ops import CODE
from megatron_prism.core.rendering import renderer_of
from megatron_prism.graph import loops
from megatron_prism.graph.issue_graph import (
    COMPUTE,
    HOST,
    LEAD,
    MEET,
    SENT,
    IssueGraph,
    build_issue_graph,
)
from megatron_prism.graph.world_graph import WorldGraph
from megatron_prism.replay.costs import Prices


def evaluate(dag: IssueGraph, durations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(start, end) of every node in ns, int64 [n] each; ``durations`` int64 [n], none negative.

    PrismError if some nodes wait for each other.
    """
    if "order" in vars(dag):
        dag.check_ends()
        return loops.longest(dag.order, dag.start, dag.before, durations)
    # one pass finds the order and the times
    vars(dag)["order"], *times = loops.timed(np.diff(dag.start), *dag.followers, durations)
    dag.check_ends()
    return times[0], times[1]


def critical_path(dag: IssueGraph, end: np.ndarray) -> list[int]:
    """Nodes from the beginning to the last end, each the reason for the start of the next."""
    if not len(dag):
        return []
    found: list[int] = loops.path(dag.start, dag.before, end, int(np.argmax(end))).tolist()
    return found


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


def mean_parts(accounts: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """ns of an iteration by what a mean rank does; adds up to the iteration.

    ``compute``, ``exposed GROUP`` (communication that nothing hides), ``waiting GROUP`` (for the
    ranks of that group to come) and ``idle``.

    Args:
        accounts: of classes, the fields of Account and ``count``, how many ranks each has.
    """
    total: dict[str, float] = defaultdict(float)
    rows = list(accounts)
    ranks = sum(one["count"] for one in rows) or 1
    for one in rows:
        part = one["count"] / ranks
        total["compute"] += one["compute"] * part
        for what in ("exposed", "waiting"):
            for group, ns in one[what].items():
                total[f"{what} {group}"] += ns * part
        total["idle"] += one["idle"] * part
    return dict(total)


class Step(NamedTuple):
    """One piece of the critical path, ns since the iteration began.

    owner : the class; -1 for a call
    op    : its op, or the number of a matched call
    host  : the host issued the op; else the device ran it
    """

    owner: int
    op: int
    start: int
    end: int
    host: bool = False


@dataclass(frozen=True)
class Links:
    """start : int64 [matched calls + 1], slices of ``of``: the links of each matched call."""

    start: np.ndarray
    of: np.ndarray

    def __len__(self) -> int:
        return int(self.of.max(initial=-1)) + 1


@dataclass(frozen=True)
class Timeline:
    """The replayed world: ``prism.replay(programs)``.

    iterations : how many, of which figures are of the last
    links      : that calls shared (``Links``); None: nobody held anybody up
    """

    graph: WorldGraph
    prices: Prices
    dag: IssueGraph
    node_start: np.ndarray
    node_end: np.ndarray
    iterations: int
    links: Links | None = None

    def __repr__(self) -> str:
        return f"<Timeline of {self.graph.programs.world}: {self.iteration_ns:,} ns>"

    def ops(self, rank: int) -> list[dict[str, object]]:
        """Every op of a rank in the last iteration, in order of issue, as rows; ns since it began.

        ``ready`` is when the rank was ready for a call, ``start`` when everybody was, ``ns`` what
        lies between start and end.  The ten that take longest:
        ``sorted(timeline.ops(0), key=lambda row: -row["ns"])[:10]``.
        """
        index = int(self.graph.classes.of[rank])
        program = self.graph.program_list[index]
        found = []
        for at, _, ready, start, end in self.spans(index).tolist():
            op = program[at]
            found.append({"index": at, "step": op.label, "op": op.name, "group": op.group,
                          "ready": ready, "start": start, "end": end, "ns": end - start,
                          "bytes": int(program.num_bytes[at]), "site": op.site,
                          "note": op.note})  # fmt: skip
        return found

    def to_rows(self) -> list[dict[str, object]]:
        """A row for every class of ranks: where its iteration went, ns."""
        classes = self.graph.classes
        return [{"class": self.graph.class_name(index), "count": count,
                 **vars(self.account(index))}
                for index, count in enumerate(classes.counts)]  # fmt: skip

    @property
    def begin(self) -> int:
        """When the last iteration began: the end of the one before, ns."""
        return self.ends[-2] if self.iterations > 1 else 0

    @cached_property
    def iteration_ns(self) -> int:
        """Duration of the last iteration."""
        return self.ends[-1] - self.begin

    def iteration_with(self, durations: np.ndarray) -> int:
        """ns of an iteration if nodes took ``durations``, int64 [nodes] (``durations_of``)."""
        start, end = evaluate(self.dag, durations)
        other = Timeline(self.graph, self.prices, self.dag, start, end, self.iterations)
        return other.iteration_ns

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

    @cached_property
    def _known_spans(self) -> dict[tuple[int, int], np.ndarray]:
        return {}

    def spans(self, index: int, iteration: int = -1) -> np.ndarray:
        """SPAN [n] of class ``index``, in order of issue, ns since the iteration began; not to be
        changed.
        """
        if (index, iteration) not in self._known_spans:
            self._known_spans[index, iteration] = self._spans(index, iteration)
        return self._known_spans[index, iteration]

    def _spans(self, index: int, iteration: int) -> np.ndarray:
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
        found.flags.writeable = False
        return found

    def host_spans(self, index: int, iteration: int = -1) -> np.ndarray:
        """int64 [n, 3]: (op, start, end) of what the host of class ``index`` issues, ns since the
        iteration began; none if the slices do not say how long that takes.
        """
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
        spans, total, lanes = self.spans(index), self.iteration_ns, self.lanes
        main = spans[spans["lane"] == lanes.index("main")]
        calls = spans[self.graph.program_list[index].ops["name"][spans["op"]] != CODE["compute"]]
        calls = calls[np.argsort(calls["end"], kind="stable")]
        # what a rank began before the others had ended the last iteration was accounted there
        starts, ends = (np.append(main[key].clip(0, total), total) for key in ("start", "end"))
        columns = [calls[key].astype(np.int64) for key in ("lane", "ready", "start", "end")]
        exposed, waiting = np.zeros((2, len(lanes)), dtype=np.int64)
        rest = np.zeros(2, dtype=np.int64)
        loops.run(_explained, [starts, ends, *columns], [exposed, waiting, rest], loops.SHORT)
        moved, waited = (
            {lanes[i]: int(ns[i]) for i in np.flatnonzero(ns)} for ns in (exposed, waiting)
        )
        return Account(total, int(rest[1]), moved, waited, int(rest[0]))

    def critical_path(self) -> list[Step]:
        """What decides the last iteration: steps that follow each other without a gap.

        ``owner`` is a class of ranks (``graph.class_name``) and ``op`` an index into its program
        (``graph.program_list[owner][op]``); -1 and the number of a call that several ranks make.
        """
        return self._path

    @cached_property
    def _path(self) -> list[Step]:
        dag = self.dag
        path = np.array(critical_path(dag, self.node_end), dtype=np.int64)
        kinds = np.isin(dag.kind[path], (COMPUTE, MEET, SENT, LEAD, HOST))
        path = path[kinds & (dag.iteration[path] == self.iterations - 1)]
        owner, op = dag.owner[path], dag.op[path]
        if len(dag.sent):
            sent = dict(dag.sent.tolist())
            for place in np.flatnonzero(dag.kind[path] == SENT).tolist():
                owner[place], op[place] = -1, sent[int(path[place])]
        host = np.isin(dag.kind[path], (LEAD, HOST))
        times = np.stack([self.node_start, self.node_end])[:, path] - self.begin
        columns = (owner, op, *np.maximum(times, 0), host)
        return list(map(Step, *(column.tolist() for column in columns)))

    def slack(self) -> list[int]:
        """Per class: by how much all its computing could be late without delaying the end, ns.

        The smallest distance from any of its segments to the longest path through it.
        """
        # how long from the end of each node to the end of all: the longest path, backwards
        tail, _ = loops.longest(self.dag.order[::-1], *self.dag.followers, self.durations)
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
        values: dict[str, object] = renderer_of(self).values(self)
        return values

    def to_text(self, verbose: bool = False) -> str:
        """The page that ``prism replay`` prints; ``verbose`` says what the data are based on."""
        text: str = renderer_of(self).text(self, verbose)
        return text

    def to_html(self) -> str:
        """One self-contained page with the diagram, for any browser."""
        page: str = renderer_of(self).page(self)
        return page

    def to_chrome_trace(self) -> str:
        """A Chrome trace, for ui.perfetto.dev."""
        trace: str = renderer_of(self).trace(self)
        return trace


def build_timeline(
    graph: WorldGraph, prices: Prices, iterations: int = 2, buffered: int = 0
) -> Timeline:
    """Replay ``iterations`` iterations without contention; ``buffered``: bytes to a peer that do
    not wait for it (``build_issue_graph``).  PrismError if the job hangs.
    """
    dag = build_issue_graph(graph, iterations, buffered)
    durations = durations_of(dag, prices)
    if durations.sum(dtype=float) > 1 << 62:
        raise PrismError(
            "together the ops take longer than 64 bits of nanoseconds hold, 146 years",
            fix="look for the long ones: prism show DIR --text",
        )
    start, end = evaluate(dag, durations)
    return Timeline(graph, prices, dag, start, end, iterations)


def durations_of(dag: IssueGraph, prices: Prices) -> np.ndarray:
    """The duration of every node, int64 [n]."""
    columns = {COMPUTE: prices.compute, LEAD: prices.lead, HOST: prices.host}
    return of_nodes(dag, prices.collective_ns, columns)


def of_nodes(
    dag: IssueGraph,
    calls: np.ndarray,
    columns: Mapping[int, Sequence[np.ndarray]],
    default: int = 0,
) -> np.ndarray:
    """Gather a number for every node, int64 [n].

    Args:
        dag: whose nodes.
        calls: of every matched call.
        columns: kind of node -> per class, of every op.
        default: of nodes of other kinds.
    """
    found = np.full(len(dag), default, dtype=np.int64)
    meets = dag.kind == MEET
    found[meets] = calls[dag.op[meets]]
    found[dag.sent[:, 0]] = calls[dag.sent[:, 1]]
    for kind, each in columns.items():
        chosen = dag.kind == kind
        first = np.concatenate(([0], np.cumsum([len(one) for one in each]))).astype(np.int64)
        every = np.concatenate([*each, np.empty(0, dtype=np.int64)])
        found[chosen] = every[first[dag.owner[chosen]] + dag.op[chosen]]
    return found


def _explained(  # type: ignore[no-untyped-def]
    starts, ends, lane, ready, began, ended, exposed, waiting, rest
):
    """Says what the gaps between spans of the main stream were: what a call that ends in a gap
    waited for others, and moved data, is of its lane, and nothing else is idle.

    Calls come as they end.  ``rest``: idle, computing.
    """
    first = at = 0
    for k in range(len(starts)):
        start = starts[k]
        idle, before = max(0, start - at), at
        while first < len(ended) and ended[first] <= before:
            first += 1
        while first < len(ended) and ended[first] <= start and before < start:
            wait = max(0, min(began[first], start) - max(at, ready[first]))
            move = max(0, min(ended[first], start) - max(at, began[first]))
            waiting[lane[first]] += wait
            exposed[lane[first]] += move
            idle -= wait + move
            at = max(at, ended[first])
            first += 1
        rest[0] += idle
        rest[1] += ends[k] - start
        at = max(before, ends[k])
