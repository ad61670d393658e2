"""How long every op takes at lengths between captured ones.

In : captures of one job at several lengths.  Out: ``LengthCurves``: durations of all nodes of the
world's graph for any samples.

Captures whose ops are equal have equal graphs, so a node has a duration at each captured length.
Between these it lies on the polynomial through the three captured lengths next to it (the straight
line through two, if there are no more): matrix products grow with the tokens of a sample, attention
with their square.  Of packed documents attention grows with the sum of the squares of their
lengths: the quadratic part of the polynomial is that of attention.  A call of ranks whose lengths
differ takes as long as for the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_prism.core.errors import ProgramError
from megatron_prism.core.programs.ops import CODE
from megatron_prism.core.programs.program import Program
from megatron_prism.features.uneven.mixed_lengths import LengthCaptures, sequence_length
from megatron_prism.features.uneven.samples import Batches
from megatron_prism.graph.issue_graph import MEET
from megatron_prism.replay.priced_graph import PricedGraph, WhatIf, price
from megatron_prism.replay.timeline import Timeline, durations_of
from megatron_prism.replay.whatif import Edit

_POINTS = 3  # through which a polynomial goes
_MEASURED_TIERS = ("cpu", "cuda")  # whose segments have the noise of one measurement
_FIX = "captures at three lengths: capture=DIR capture=DIR"


@dataclass(frozen=True)
class SharedCalls:
    """Calls of microbatches in which several dp ranks take part.

    Attributes:
        node: int64 [calls].
        start: int64 [calls + 1], slices of the others.
        dp: int64 [members], the dp rank of each member.
        ready: int64 [members], the node at which each is ready for the call.
    """

    node: np.ndarray
    start: np.ndarray
    dp: np.ndarray
    ready: np.ndarray

    def __len__(self) -> int:
        """Count the calls."""
        return len(self.node)


@dataclass(frozen=True)
class LengthCurves:
    """Durations of all nodes of a world at several lengths.

    Attributes:
        lengths: Tokens of a sample of each capture, ascending.
        priced: The job's own capture, in which dp ranks are classes of their own.
        durations: int64 [lengths, nodes], ns.
        dp: int64 [nodes], the dp rank; of a call that several share, any of them.
        microbatch: int64 [nodes]; -1: none, such nodes do not depend on lengths.
        shared: Calls of microbatches in which several dp ranks take part.
    """

    lengths: tuple[int, ...]
    priced: PricedGraph
    durations: np.ndarray
    dp: np.ndarray
    microbatch: np.ndarray
    shared: SharedCalls

    @property
    def timeline(self) -> Timeline:
        """When everything happens in the job's own capture."""
        return self.priced.timeline

    def nodes_at(self, tokens: np.ndarray, squares: np.ndarray) -> np.ndarray:
        """Give the duration of every node in an iteration, int64 [nodes], ns.

        Args:
            tokens: int64 [dp, microbatches], tokens of a sample.
            squares: float64 [dp, microbatches], as in ``Batches``.
        """
        weights = polynomial_weights(self.lengths, tokens, squares)
        durations: np.ndarray = self.durations[self._usual].copy()
        places = np.flatnonzero(self.microbatch >= 0)
        dp = self.dp[places]
        microbatch = self.microbatch[places]
        own_weights = weights[:, dp, microbatch]
        durations[places] = self._interpolated(places, own_weights)

        # a call that several dp ranks share takes as long as for the longest
        shared = self.shared
        if not len(shared):
            return durations
        num_members = np.diff(shared.start)
        calls = np.repeat(shared.node, num_members)
        microbatch = self.microbatch[calls]
        member_weights = weights[:, shared.dp, microbatch]
        ns_of_members = self._interpolated(calls, member_weights)
        firsts = shared.start[:-1]
        durations[shared.node] = np.maximum.reduceat(ns_of_members, firsts)
        return durations

    @property
    def _usual(self) -> int:
        """The place of the job's own length among ``lengths``."""
        programs = self.timeline.graph.programs
        return self.lengths.index(sequence_length(programs))

    def _interpolated(self, nodes: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Weigh the durations of nodes: int64 [nodes], not below 0."""
        parts = self.durations[:, nodes] * weights
        ns = parts.sum(axis=0)
        np.rint(ns.clip(0), out=ns)
        whole_ns: np.ndarray = ns.astype(np.int64)
        return whole_ns


def polynomial_weights(
    lengths: Sequence[int], tokens: np.ndarray, squares: np.ndarray
) -> np.ndarray:
    """Weigh captured lengths so that they give what is in between.

    Args:
        lengths: Captured tokens of a sample, ascending; at least two.
        tokens: int64 [...], tokens of samples.
        squares: float64 [...], sums of the squares of the lengths of their documents.

    Returns:
        float64 [lengths, ...].
    """
    captured = np.array(lengths, dtype=np.float64)
    points = min(_POINTS, len(captured))
    flat_tokens = tokens.reshape(-1).astype(np.float64)
    flat_squares = squares.reshape(-1)
    weights = np.zeros((len(captured), len(flat_tokens)))

    # the three captured lengths around a sample: its neighbours, and the nearer one beside these
    firsts = _first_points(captured, flat_tokens, points)
    for first in np.unique(firsts).tolist():
        samples = np.flatnonzero(firsts == first)
        sample_tokens = flat_tokens[samples]
        missing_squares = flat_squares[samples] - sample_tokens**2
        near = range(first, first + points)
        for place in near:
            numerator = np.ones(len(samples))
            denominator = 1.0
            for other in near:
                if other == place:
                    continue
                numerator *= sample_tokens - captured[other]
                denominator *= captured[place] - captured[other]
            # what packed documents lack of the square of the sample's length
            if points == _POINTS:
                numerator += missing_squares
            weights[place, samples] = numerator / denominator
    return weights.reshape(len(captured), *tokens.shape)


def _first_points(captured: np.ndarray, tokens: np.ndarray, points: int) -> np.ndarray:
    """Find the first of the captured lengths through which each sample's polynomial goes."""
    last = len(captured) - 1
    upper = np.searchsorted(captured, tokens)
    lower = upper.clip(1, last) - 1
    if points < _POINTS:
        return lower.clip(0, last + 1 - points)

    # the third one lies below the neighbours where that one is nearer
    one_below = (lower - 1).clip(0)
    one_above = (lower + 2).clip(max=last)
    distance_below = tokens - captured[one_below]
    distance_above = captured[one_above] - tokens
    is_below_nearer = distance_below < distance_above
    is_below_nearer |= lower + 2 > last
    firsts = np.where(is_below_nearer, one_below, lower)
    return firsts.clip(0, last + 1 - points)


def make_curves(
    captures: LengthCaptures, machine: str | None = None, calibration: str | None = None
) -> LengthCurves:
    """Price all captures and find what each node of their graph belongs to.

    Args:
        captures: Of one job at several lengths.
        machine: As of ``price``.
        calibration: As of ``price``.

    Raises:
        ProgramError: Captures do different ops, or there is one alone.
        PrismError: As ``price``.
    """
    lengths = tuple(sorted(captures.by_length))
    if len(lengths) < 2:
        raise ProgramError(
            f"one capture, of {lengths[0]} tokens, does not say how long other samples take",
            fix=_FIX,
        )
    # a node has a duration at each length only if all captures have that node
    captures.check_aligned()
    world = captures.captured.world
    # dp ranks that run the same are one class, in which all take one length
    edits: list[Edit] = []
    for dp_rank in range(world.dp):
        edits.append(Edit(ranks=world.select(f"dp={dp_rank}")))
    apart = WhatIf(edits=tuple(edits))
    priced_of_length: dict[int, PricedGraph] = {}
    for length in lengths:
        programs = captures.by_length[length]
        priced_of_length[length] = price(
            programs, machine=machine, calibration=calibration, what_if=apart
        )
    usual = sequence_length(captures.captured)
    priced = priced_of_length[usual]
    timeline = priced.timeline
    rows: list[np.ndarray] = []
    for length in lengths:
        other = priced_of_length[length].timeline
        if not np.array_equal(other.dag.before, timeline.dag.before):
            raise ProgramError(
                f"with {length} tokens other ops wait for each other than with {usual}",
                fix="captures of lengths that are closer to each other",
            )
        rows.append(durations_of(other.dag, other.prices))
    durations = np.array(rows)
    dp, microbatch, shared = _owners_of_nodes(captures, timeline)
    # times that were not measured have no noise
    if timeline.graph.programs.source.get("tier") in _MEASURED_TIERS:
        durations = _without_noise(timeline, durations, microbatch)
    return LengthCurves(lengths, priced, durations, dp, microbatch, shared)


def _without_noise(timeline: Timeline, durations: np.ndarray, microbatch: np.ndarray) -> np.ndarray:
    """Take medians of what was measured several times.

    Microbatches of one capture have one length, so that an op takes as long in each of them; what
    belongs to no microbatch takes as long in each capture.

    Args:
        timeline: In which dp ranks are classes of their own.
        durations: int64 [lengths, nodes], ns.
        microbatch: int64 [nodes]; -1: none.
    """
    dag = timeline.dag
    pooled = durations.copy()
    outside = np.flatnonzero(microbatch < 0)
    pooled[:, outside] = np.median(durations[:, outside], axis=0)
    is_measured = (microbatch >= 0) & (dag.kind != MEET)
    num_kinds = 1 + int(dag.kind.max())
    for number, program in enumerate(timeline.graph.program_list):
        kind_of_op = _kinds_of_ops(program)
        is_own = is_measured & (dag.owner == number)
        nodes = np.flatnonzero(is_own)
        ops, kinds_of_nodes = dag.op[nodes], dag.kind[nodes]
        kinds = kind_of_op[ops] * num_kinds + kinds_of_nodes
        for kind in np.unique(kinds).tolist():
            same_nodes = nodes[kinds == kind]
            medians = np.median(durations[:, same_nodes], axis=1)
            pooled[:, same_nodes] = medians[:, None]
    return pooled


def _kinds_of_ops(program: Program) -> np.ndarray:
    """Number the ops; the same op of other microbatches has the same number.

    Two ops are the same if both are the k-th op of a step of their phase and chunk, do the same and
    are from the same line.
    """
    ops = program.ops
    count_of_step: dict[tuple[int, int, int], int] = {}
    number_of_key: dict[tuple[int, ...], int] = {}
    numbers = np.empty(len(program), dtype=np.int64)
    for place, row in enumerate(ops):
        phase, chunk = int(row["phase"]), int(row["chunk"])
        step = phase, chunk, int(row["microbatch"])
        position = count_of_step.get(step, 0)
        count_of_step[step] = position + 1
        key = phase, chunk, position, int(row["name"]), int(row["site"])
        number = number_of_key.setdefault(key, len(number_of_key))
        numbers[place] = number
    return numbers


def _owners_of_nodes(
    captures: LengthCaptures, timeline: Timeline
) -> tuple[np.ndarray, np.ndarray, SharedCalls]:
    """Find the dp rank and the microbatch of every node, and the calls that dp ranks share.

    Args:
        captures: Of one job at several lengths.
        timeline: In which dp ranks are classes of their own.
    """
    graph, dag = timeline.graph, timeline.dag
    world = graph.programs.world
    dp_of_class: list[int] = []
    for rank in graph.classes.representatives:
        dp_of_class.append(world.coordinates(rank).dp)
    microbatch_of_class: list[np.ndarray] = []
    for program in graph.program_list:
        microbatch_of_class.append(_length_of_ops(captures, program))

    # nodes of one rank
    dp = np.zeros(len(dag), dtype=np.int64)
    microbatch = np.full(len(dag), -1, dtype=np.int64)
    is_call = dag.kind == MEET
    for number, microbatches in enumerate(microbatch_of_class):
        nodes = np.flatnonzero(~is_call & (dag.owner == number))
        dp[nodes] = dp_of_class[number]
        microbatch[nodes] = microbatches[dag.op[nodes]]

    # calls are of all their members
    shared_nodes: list[int] = []
    starts = [0]
    dp_of_members: list[int] = []
    ready_of_members: list[int] = []
    for node in np.flatnonzero(is_call).tolist():
        call = int(dag.op[node])
        iteration = int(dag.iteration[node])
        members = graph.matched_calls.members(call)
        first_class, first_op = members[0]
        dp[node] = dp_of_class[first_class]
        microbatch[node] = microbatch_of_class[first_class][first_op]
        dp_ranks = {dp_of_class[number] for number, _ in members}
        # it follows no length, or that of its one dp rank
        if microbatch[node] < 0 or len(dp_ranks) == 1:
            continue
        shared_nodes.append(node)
        for number, op in members:
            ready_of_class = dag.ready_of[number][iteration]
            ready_of_members.append(int(ready_of_class[op]))
            dp_of_members.append(dp_of_class[number])
        starts.append(len(dp_of_members))
    columns = (shared_nodes, starts, dp_of_members, ready_of_members)
    shared = SharedCalls(*[np.array(column, dtype=np.int64) for column in columns])
    return dp, microbatch, shared


def _length_of_ops(captures: LengthCaptures, program: Program) -> np.ndarray:
    """Say whose length each op of a program follows: int64 [ops], -1: that of no microbatch."""
    microbatches = captures.microbatch_of_ops(program)
    # a message whose shape is not sent ahead always has the job's length
    if not captures.lengths_vary:
        is_outside = program.ops["microbatch"] < 0
        is_message = np.isin(program.ops["name"], (CODE["send"], CODE["recv"]))
        microbatches = np.where(is_outside & is_message, -1, microbatches)
    return microbatches


def share_outside(lengths: Sequence[int], batches: Batches) -> float:
    """Say which part of the microbatches is shorter or longer than every capture."""
    is_outside = (batches.tokens < lengths[0]) | (batches.tokens > lengths[-1])
    return float(is_outside.mean())
