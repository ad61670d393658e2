"""The timeline of a world: spans per class, and what the time went into.

In : a WorldGraph and Prices.  Out: Timeline, a value that reports draw and tests compare.  Several
iterations are replayed in a row; figures are of the last one, when the pipeline no longer remembers
that the first began from rest.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from megatron_prism.core.errors import PrismError
from megatron_prism.core.programs.ops import CODE
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
    """Find when every node starts and ends.

    Args:
        dag: The nodes.
        durations: int64 [n], ns of every node, none negative.

    Returns:
        int64 [n] twice, ns.

    Raises:
        PrismError: Some nodes wait for each other.
    """
    if "order" in vars(dag):
        dag.check_ends()
        return loops.longest(dag.order, dag.start, dag.before, durations)

    # one pass finds the order and the times
    waits = np.diff(dag.start)
    order, start, end = loops.timed(waits, *dag.followers, durations)
    vars(dag)["order"] = order
    dag.check_ends()
    return start, end


def critical_path(dag: IssueGraph, end: np.ndarray) -> list[int]:
    """List nodes from the beginning to the last end, each the reason for the start of the next."""
    if not len(dag):
        return []
    last = int(np.argmax(end))
    nodes: list[int] = loops.path(dag.start, dag.before, end, last).tolist()
    return nodes


SPAN = np.dtype(
    [
        ("op", "i4"),  # index in the class's program
        ("lane", "i2"),  # index into Timeline.lanes: a stream, or a group's own stream
        ("ready", "i8"),  # ns: when the rank was ready for the op; equals start for compute
        ("start", "i8"),  # ns: when the op began, all members being ready
        ("end", "i8"),
    ]
)


@dataclass(frozen=True)
class Account:
    """Where one class's iteration went, ns; the parts add up to ``total``.

    Attributes:
        total: The whole iteration.
        compute: Kernels ran on the main stream.
        exposed: Group description -> the main stream waited for calls of the group to move data.
        waiting: Group description -> the main stream waited for other ranks to come to calls.
        idle: Nothing of that: the host was late, or the iteration was over on this rank.
        over: The part of ``idle`` behind the last work of this rank, its host's included.
    """

    total: int
    compute: int
    exposed: Mapping[str, int]
    waiting: Mapping[str, int]
    idle: int
    over: int


def mean_parts(accounts: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Divide an iteration into what a mean rank does, ns; the parts add up to the iteration.

    Args:
        accounts: Of every class the fields of Account and ``count``, how many ranks it has.

    Returns:
        ns by ``compute``, ``exposed GROUP`` (communication that nothing hides), ``waiting GROUP``
        (for the ranks of that group to come) and ``idle``.
    """
    ns_of_part: dict[str, float] = defaultdict(float)
    rows = list(accounts)
    ranks = sum(row["count"] for row in rows) or 1
    for row in rows:
        share = row["count"] / ranks
        ns_of_part["compute"] += row["compute"] * share
        for column in ("exposed", "waiting"):
            for group, ns in row[column].items():
                ns_of_part[f"{column} {group}"] += ns * share
        ns_of_part["idle"] += row["idle"] * share
    return dict(ns_of_part)


class Step(NamedTuple):
    """One piece of the critical path, ns since the iteration began.

    Attributes:
        owner: The class; -1 for a call.
        op: The class's op, or the number of a matched call.
        start: Its begin.
        end: Its end.
        host: Whether the host issued the op; else the device ran it.
    """

    owner: int
    op: int
    start: int
    end: int
    host: bool = False


@dataclass(frozen=True)
class Links:
    """The links of each matched call.

    Attributes:
        start: int64 [matched calls + 1], slices of ``of``.
        of: int64, the links.
    """

    start: np.ndarray
    of: np.ndarray

    def __len__(self) -> int:
        """Count the links."""
        return int(self.of.max(initial=-1)) + 1


@dataclass(frozen=True)
class Timeline:
    """The replayed world: ``prism.replay(programs)``.

    Attributes:
        graph: The joined programs.
        prices: Durations of their ops and calls.
        dag: Which node waits for which.
        node_start: int64 [nodes], ns.
        node_end: int64 [nodes], ns.
        iterations: How many in a row, of which figures are of the last.
        links: Links that calls shared; None: no call held another one up.
    """

    graph: WorldGraph
    prices: Prices
    dag: IssueGraph
    node_start: np.ndarray
    node_end: np.ndarray
    iterations: int
    links: Links | None = None

    def __repr__(self) -> str:
        """Show the world and the iteration's duration."""
        return f"<Timeline of {self.graph.programs.world}: {self.iteration_ns:,} ns>"

    def ops(self, rank: int) -> list[dict[str, object]]:
        """List every op of a rank in the last iteration, in order of issue; ns since it began.

        ``ready`` is when the rank was ready for a call, ``start`` when all members were, ``ns``
        what lies between start and end.  The ten that take longest:
        ``sorted(timeline.ops(0), key=lambda row: -row["ns"])[:10]``.
        """
        index = int(self.graph.classes.of[rank])
        program = self.graph.program_list[index]
        rows: list[dict[str, object]] = []
        for number, _, ready, start, end in self.spans(index).tolist():
            op = program[number]
            row = {
                "index": number,
                "step": op.label,
                "op": op.name,
                "group": op.group,
                "ready": ready,
                "start": start,
                "end": end,
                "ns": end - start,
                "bytes": int(program.num_bytes[number]),
                "site": op.site,
                "note": op.note,
            }
            rows.append(row)
        return rows

    def to_rows(self) -> list[dict[str, object]]:
        """Give a row for every class of ranks: where its iteration went, ns."""
        rows: list[dict[str, object]] = []
        for index, count in enumerate(self.graph.classes.counts):
            row: dict[str, object] = {"class": self.graph.class_name(index), "count": count}
            row.update(vars(self.account(index)))
            rows.append(row)
        return rows

    @property
    def begin(self) -> int:
        """When the last iteration began: the end of the one before, ns."""
        return self._begin_of(self.iterations - 1)

    def _begin_of(self, iteration: int) -> int:
        """Give the end of the iteration before, ns; 0 for the first one."""
        if iteration == 0:
            return 0
        return self.ends[iteration - 1]

    @cached_property
    def iteration_ns(self) -> int:
        """Duration of the last iteration."""
        return self.ends[-1] - self.begin

    def iteration_with(self, durations: np.ndarray) -> int:
        """Give the ns of an iteration if nodes took other durations.

        Args:
            durations: int64 [nodes], ns (``durations_of``).
        """
        start, end = evaluate(self.dag, durations)
        changed = dataclasses.replace(self, node_start=start, node_end=end, links=None)
        return changed.iteration_ns

    @cached_property
    def ends(self) -> list[int]:
        """When each iteration was over on the last rank, ns."""
        ends: list[int] = []
        for iteration in range(self.iterations):
            node_ends = self.node_end[self.dag.iteration == iteration]
            ends.append(int(node_ends.max(initial=0)))
        return ends

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        """Names of the tracks: streams, then groups."""
        names: dict[str, None] = {"main": None}
        for program in self.graph.program_list:
            is_segment = program.ops["name"] == CODE["compute"]
            streams = np.unique(program.ops["stream"][is_segment])
            names.update(dict.fromkeys(program.strings[code] for code in streams))
        # groups behind all streams
        for program in self.graph.program_list:
            names.update(dict.fromkeys(program.groups()))
        return tuple(names)

    @cached_property
    def _spans_of_classes(self) -> dict[tuple[int, int], np.ndarray]:
        """Spans by class and iteration, as they are asked for."""
        return {}

    def spans(self, index: int, iteration: int = -1) -> np.ndarray:
        """Give the ops of a class in order of issue, ns since the iteration began.

        Args:
            index: The class.
            iteration: Its number; negative: from the end.

        Returns:
            SPAN [n], not to be changed.
        """
        key = index, iteration
        if key not in self._spans_of_classes:
            self._spans_of_classes[key] = self._make_spans(index, iteration % self.iterations)
        return self._spans_of_classes[key]

    def _make_spans(self, index: int, iteration: int) -> np.ndarray:
        """Make the spans of a class; iterations count from 0."""
        program = self.graph.program_list[index]
        node_of_op = self.dag.node_of[index][iteration]
        ops = np.flatnonzero(node_of_op >= 0)
        rows, nodes = program.ops[ops], node_of_op[ops]

        # segments lie on their streams, calls on those of their groups
        lane_of_name = {name: lane for lane, name in enumerate(self.lanes)}
        lanes = [lane_of_name.get(text, 0) for text in program.strings]
        is_segment = rows["name"] == CODE["compute"]
        tracks = np.where(is_segment, rows["stream"], rows["group"])
        spans = np.empty(len(ops), dtype=SPAN)
        spans["op"] = ops
        spans["lane"] = np.array(lanes, dtype=np.int16)[tracks]
        spans["start"] = self.node_start[nodes]
        spans["end"] = self.node_end[nodes]

        # a rank is ready for a call when the node before it ends
        ready_nodes = self.dag.ready_of[index][iteration][ops]
        is_call = ready_nodes >= 0
        spans["ready"] = np.where(is_call, self.node_end[ready_nodes], spans["start"])
        begin = self._begin_of(iteration)
        for name in ("ready", "start", "end"):
            spans[name] -= begin
        spans.flags.writeable = False
        return spans

    def host_spans(self, index: int, iteration: int = -1) -> np.ndarray:
        """Give what the host of a class issues, ns since the iteration began.

        Args:
            index: The class.
            iteration: Its number; negative: from the end.

        Returns:
            int64 [n, 3]: op, start, end; none if the slices do not say how long the host takes.
        """
        iteration %= self.iterations
        is_class = self.dag.owner == index
        is_asked = is_class & (self.dag.iteration == iteration)
        lead_nodes = np.flatnonzero(is_asked & (self.dag.kind == LEAD))
        host_nodes = np.flatnonzero(is_asked & (self.dag.kind == HOST))

        # an op that has a lead begins with it
        lead_ops, lead_starts = self.dag.op[lead_nodes], self.node_start[lead_nodes]
        start_of_lead = dict(zip(lead_ops.tolist(), lead_starts.tolist(), strict=True))
        begin = self._begin_of(iteration)
        columns = [self.dag.op, self.node_start, self.node_end]
        host_columns = [column[host_nodes].tolist() for column in columns]
        rows: list[tuple[int, int, int]] = []
        for op, host_start, end in zip(*host_columns, strict=True):
            start = start_of_lead.get(op, host_start)
            rows.append((op, start - begin, end - begin))
        return np.array(rows, dtype=np.int64).reshape(-1, 3)

    @cached_property
    def _host_ends(self) -> np.ndarray:
        """When each class's host has issued the last iteration, ns since its begin; 0: none."""
        last = self.iterations - 1
        is_last = self.dag.iteration == last
        is_host = self.dag.kind == HOST
        is_asked = is_last & is_host
        owners = self.dag.owner[is_asked]
        node_ends = self.node_end[is_asked]
        node_ends -= self._begin_of(last)
        class_count = len(self.graph.program_list)
        host_ends = np.zeros(class_count, dtype=np.int64)
        np.maximum.at(host_ends, owners, node_ends)
        return host_ends

    def account(self, index: int) -> Account:
        """Say where the last iteration of a class went."""
        spans, total, lanes = self.spans(index), self.iteration_ns, self.lanes
        main = spans[spans["lane"] == lanes.index("main")]
        names = self.graph.program_list[index].ops["name"][spans["op"]]
        calls = spans[names != CODE["compute"]]
        calls = calls[np.argsort(calls["end"], kind="stable")]

        # what a rank began before the others had ended the last iteration was accounted there; the
        # iteration's end closes the last gap
        starts = np.append(main["start"].clip(0, total), total)
        ends = np.append(main["end"].clip(0, total), total)
        call_columns = [calls[key].astype(np.int64) for key in ("lane", "ready", "start", "end")]
        exposed, waiting = np.zeros((2, len(lanes)), dtype=np.int64)
        idle_and_computing = np.zeros(2, dtype=np.int64)
        outputs = [exposed, waiting, idle_and_computing]
        loops.run(_explained, [starts, ends, *call_columns], outputs, loops.SHORT)
        idle, computing = idle_and_computing.tolist()

        # the rank that ends last is never over: it is idle while its host is late
        last_end = spans["end"].max(initial=self._host_ends[index])
        over = max(0, total - int(last_end))
        exposed_of_group = {lanes[lane]: int(exposed[lane]) for lane in np.flatnonzero(exposed)}
        waiting_of_group = {lanes[lane]: int(waiting[lane]) for lane in np.flatnonzero(waiting)}
        return Account(total, computing, exposed_of_group, waiting_of_group, idle, over)

    def critical_path(self) -> list[Step]:
        """List what decides the last iteration: steps that follow each other without a gap.

        ``owner`` is a class of ranks (``graph.class_name``) and ``op`` an index into its program
        (``graph.program_list[owner][op]``); -1 and the number of a call that several ranks make.
        """
        return self._path

    @cached_property
    def _path(self) -> list[Step]:
        """The critical path of the last iteration."""
        dag = self.dag
        path = np.array(critical_path(dag, self.node_end), dtype=np.int64)
        takes_time = np.isin(dag.kind[path], (COMPUTE, MEET, SENT, LEAD, HOST))
        is_last = dag.iteration[path] == self.iterations - 1
        path = path[takes_time & is_last]
        owners, ops, kinds = dag.owner[path], dag.op[path], dag.kind[path]

        # a send into buffers is its matched call
        call_of_send = dict(dag.sent.tolist())
        for place in np.flatnonzero(kinds == SENT).tolist():
            owners[place] = -1
            ops[place] = call_of_send[int(path[place])]
        starts = np.maximum(self.node_start[path] - self.begin, 0)
        ends = np.maximum(self.node_end[path] - self.begin, 0)
        is_host = np.isin(kinds, (LEAD, HOST))
        columns = [column.tolist() for column in (owners, ops, starts, ends, is_host)]
        return [Step(*row) for row in zip(*columns, strict=True)]

    def slack(self) -> list[int]:
        """Give by how much all computing of each class could be late without delaying the end, ns.

        The smallest distance from any segment of the class to the longest path through it.
        """
        # how long from the end of each node to the end of all: the longest path, backwards
        backwards = self.dag.order[::-1]
        tail, _ = loops.longest(backwards, *self.dag.followers, self.durations)
        end = int(self.node_end.max(initial=0))
        segments = np.flatnonzero(self.dag.kind == COMPUTE)
        path_ns = self.node_end + tail
        distances = end - path_ns[segments]
        slack = np.full(len(self.graph.classes), end, dtype=np.int64)
        np.minimum.at(slack, self.dag.owner[segments], distances)
        return slack.tolist()

    @cached_property
    def durations(self) -> np.ndarray:
        """Of every node, ns."""
        return np.asarray(self.node_end - self.node_start)

    def to_json(self) -> dict[str, object]:
        """Give what ``prism replay --json`` prints; times in ns, each with its basis."""
        values: dict[str, object] = renderer_of(self).values(self)
        return values

    def to_text(self, verbose: bool = False) -> str:
        """Give what ``prism replay`` prints; ``verbose``: also what the data are based on."""
        text: str = renderer_of(self).text(self, verbose)
        return text

    def to_html(self) -> str:
        """Give one self-contained page with the diagram, for any browser."""
        page: str = renderer_of(self).page(self)
        return page

    def to_chrome_trace(self) -> str:
        """Give a Chrome trace, for ui.perfetto.dev."""
        trace: str = renderer_of(self).trace(self)
        return trace


def build_timeline(
    graph: WorldGraph, prices: Prices, iterations: int = 2, buffered: int = 0
) -> Timeline:
    """Replay iterations without contention.

    Args:
        graph: The joined programs.
        prices: Durations of their ops and calls.
        iterations: How many in a row.
        buffered: Bytes to a peer that do not wait for it (``build_issue_graph``).

    Raises:
        PrismError: The job hangs, or takes longer than 64 bits of ns hold.
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
    """Give the duration of every node, int64 [n]."""
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
        dag: The nodes.
        calls: The number of every matched call.
        columns: Kind of node -> of every class the number of every op.
        default: The number of nodes of other kinds.
    """
    numbers = np.full(len(dag), default, dtype=np.int64)
    is_call = dag.kind == MEET
    numbers[is_call] = calls[dag.op[is_call]]

    # a send into buffers has its matched call's
    sends, calls_of_sends = dag.sent[:, 0], dag.sent[:, 1]
    numbers[sends] = calls[calls_of_sends]

    # ops of all classes, one class after the other
    for kind, numbers_of_classes in columns.items():
        is_kind = dag.kind == kind
        lengths = [len(class_numbers) for class_numbers in numbers_of_classes]
        first_ops = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        all_numbers = np.concatenate([*numbers_of_classes, np.empty(0, dtype=np.int64)])
        places = first_ops[dag.owner[is_kind]] + dag.op[is_kind]
        numbers[is_kind] = all_numbers[places]
    return numbers


def _explained(  # type: ignore[no-untyped-def]
    starts, ends, lane, ready, began, ended, exposed, waiting, idle_and_computing
):
    """Say what the gaps between spans of the main stream are.

    What a call that ends in a gap waited for others, and moved data, is of the call's lane, and
    nothing else is idle.

    Args:
        starts: When the spans of the main stream begin, in their order, and the iteration's end.
        ends: When they end.
        lane: The lane of each call; calls come as they end.
        ready: When the rank was ready for each.
        began: When all members were.
        ended: When each ended.
        exposed: Gets the ns of every lane in which data moved.
        waiting: Gets the ns of every lane in which the rank waited for others.
        idle_and_computing: Gets both, ns.
    """
    call = explained = 0
    for span in range(len(starts)):
        start = starts[span]
        idle, gap_start = max(0, start - explained), explained

        # calls that ended beside computing explain nothing
        while call < len(ended) and ended[call] <= gap_start:
            call += 1

        # each call explains what no earlier one did
        while call < len(ended) and ended[call] <= start and gap_start < start:
            wait = max(0, min(began[call], start) - max(explained, ready[call]))
            move = max(0, min(ended[call], start) - max(explained, began[call]))
            waiting[lane[call]] += wait
            exposed[lane[call]] += move
            idle -= wait + move
            explained = max(explained, ended[call])
            call += 1
        idle_and_computing[0] += idle
        idle_and_computing[1] += ends[span] - start
        explained = max(gap_start, ends[span])
