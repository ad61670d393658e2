"""The step time of drawn batches: how it spreads, who waits for whom, what a fair deal would win.

In : ``LengthCurves`` and ``Batches``.  Out: ``StepTimes``.
"""

from __future__ import annotations

import dataclasses
import heapq
from dataclasses import dataclass

import numpy as np

from megatron_prism.features.uneven.length_curves import (
    LengthCurves,
    polynomial_weights,
    share_outside,
)
from megatron_prism.features.uneven.samples import Batches
from megatron_prism.graph.issue_graph import COMPUTE
from megatron_prism.replay.timeline import evaluate


@dataclass(frozen=True)
class StepTimes:
    """Step times of drawn batches.

    Attributes:
        step_ns: int64 [iterations].
        equal_ns: A step whose samples all have the mean length (and the mean of squares).
        wait_ns: float64 [dp, dp]: how long a dp rank waits in a mean step for each other one.
        last_share: float64 [dp], part of the steps in which no dp rank ends its last microbatch
            later, and some end it earlier.
        balanced_ns: int64 [iterations], if the same microbatches were dealt to dp ranks so that
            each has equal work.
        outside: Part of the microbatches that is shorter or longer than every capture.
        lengths: Captured tokens of a sample, ascending.
        sources: What the times are based on.
    """

    step_ns: np.ndarray
    equal_ns: int
    wait_ns: np.ndarray
    last_share: np.ndarray
    balanced_ns: np.ndarray
    outside: float
    lengths: tuple[int, ...]
    sources: tuple[str, ...]

    def at_share(self, share: float) -> int:
        """Return the step time that this share of the steps does not exceed, ns."""
        step_ns = np.quantile(self.step_ns, share, method="inverted_cdf")
        return int(step_ns)

    @property
    def spread(self) -> float:
        """How many times as long the 95th percentile of the steps is as the 5th."""
        short_ns = max(1, self.at_share(0.05))
        return self.at_share(0.95) / short_ns

    @property
    def mean_wait_ns(self) -> float:
        """How long a mean dp rank waits in a mean step for others."""
        wait_of_dp = self.wait_ns.sum(axis=1)
        return float(wait_of_dp.mean())

    @property
    def balanced_gain(self) -> float:
        """Part of the mean step that a fair deal of the same microbatches saves."""
        mean_ns = max(1.0, float(self.step_ns.mean()))
        return 1 - float(self.balanced_ns.mean()) / mean_ns


@dataclass(frozen=True)
class _Step:
    """One evaluated step.

    Attributes:
        ns: How long it takes.
        end: int64 [dp], when each dp rank has ended its last microbatch, ns.
        node_end: int64 [nodes], ns.
    """

    ns: int
    end: np.ndarray
    node_end: np.ndarray


def step_times(curves: LengthCurves, batches: Batches) -> StepTimes:
    """Evaluate the step of every drawn batch.

    Args:
        curves: Durations at all lengths.
        batches: The drawn samples.

    Raises:
        PrismError: The job hangs.
    """
    dp_ranks = batches.tokens.shape[1]
    step_ns = np.empty(len(batches), dtype=np.int64)
    balanced_ns = np.empty(len(batches), dtype=np.int64)
    wait_ns = np.zeros((dp_ranks, dp_ranks))
    last_count = np.zeros(dp_ranks)
    for iteration in range(len(batches)):
        tokens = batches.tokens[iteration]
        squares = batches.squares[iteration]
        step = _evaluate(curves, tokens, squares)
        step_ns[iteration] = step.ns
        wait_ns += _waits(curves, step)
        is_last = step.end == step.end.max()
        # nobody waits where all end together
        if not is_last.all():
            last_count[is_last] += 1

        # the same microbatches, each dp rank with as much work
        dealt_tokens, dealt_squares = deal_fairly(curves, tokens, squares)
        balanced_step = _evaluate(curves, dealt_tokens, dealt_squares)
        balanced_ns[iteration] = balanced_step.ns

    # all samples alike
    mean_tokens, mean_squares = batches.mean_samples(batches.tokens.shape[1:])
    equal_step = _evaluate(curves, mean_tokens, mean_squares)
    return StepTimes(
        step_ns=step_ns,
        equal_ns=equal_step.ns,
        wait_ns=wait_ns / len(batches),
        last_share=last_count / len(batches),
        balanced_ns=balanced_ns,
        outside=share_outside(curves.lengths, batches),
        lengths=curves.lengths,
        sources=curves.timeline.prices.used(),
    )


def _evaluate(curves: LengthCurves, tokens: np.ndarray, squares: np.ndarray) -> _Step:
    """Evaluate one step of these samples; the one before had the same."""
    timeline = curves.timeline
    dag = timeline.dag
    durations = curves.nodes_at(tokens, squares)
    start, end = evaluate(dag, durations)
    changed = dataclasses.replace(timeline, node_start=start, node_end=end, links=None)

    # when the last microbatch of each dp rank is over
    nodes = _segments_of_microbatches(curves)
    dp_of_nodes = curves.dp[nodes]
    end_of_dp = np.zeros(len(tokens), dtype=np.int64)
    np.maximum.at(end_of_dp, dp_of_nodes, end[nodes])
    return _Step(changed.iteration_ns, end_of_dp, end)


def _segments_of_microbatches(curves: LengthCurves) -> np.ndarray:
    """List the segments of all microbatches in the last iteration, int64 [nodes]."""
    dag = curves.timeline.dag
    last_iteration = curves.timeline.iterations - 1
    is_asked = dag.iteration == last_iteration
    is_asked &= curves.microbatch >= 0
    is_asked &= dag.kind == COMPUTE
    return np.flatnonzero(is_asked)


def _in_order(values: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Put the values of microbatches, [dp, microbatches], into another order."""
    flat_values = values.reshape(-1)
    reordered: np.ndarray = flat_values[order].reshape(values.shape)
    return reordered


def _waits(curves: LengthCurves, step: _Step) -> np.ndarray:
    """Say how long each dp rank waits for each other one in a step, float64 [dp, dp], ns.

    Calls of microbatches that dp ranks share wait for the last of their members; behind the
    microbatches all dp ranks wait for the last one, to add up gradients.
    """
    dp_ranks = len(step.end)
    waits = np.zeros((dp_ranks, dp_ranks))
    timeline, shared = curves.timeline, curves.shared
    last_iteration = timeline.iterations - 1
    iteration_of_call = timeline.dag.iteration[shared.node]
    calls = np.flatnonzero(iteration_of_call == last_iteration)
    ready = step.node_end[shared.ready]
    for call in calls.tolist():
        first, behind = shared.start[call], shared.start[call + 1]
        members = shared.dp[first:behind]
        ready_ns = ready[first:behind]
        last_member = ready_ns.argmax()
        awaited = members[last_member]
        np.add.at(waits[:, awaited], members, ready_ns[last_member] - ready_ns)

    # a dp rank has several classes of ranks, stages say; a mean one is meant
    classes = len(timeline.graph.classes)
    waits *= dp_ranks / classes

    # behind the microbatches
    last_dp_rank = step.end.argmax()
    waits[:, last_dp_rank] += step.end[last_dp_rank] - step.end
    return waits


# -- a fair deal -----------------------------------------------------------------------------------
def _work_of_microbatches(
    curves: LengthCurves, tokens: np.ndarray, squares: np.ndarray
) -> np.ndarray:
    """Say how long the busiest class computes for each microbatch, float64 [dp, microbatches]."""
    nodes = _segments_of_microbatches(curves)
    nodes = nodes[curves.dp[nodes] == 0]
    class_of_node = curves.timeline.dag.owner[nodes]
    ns_of_node = curves.durations[:, nodes].sum(axis=0)
    ns_of_class = np.bincount(class_of_node, ns_of_node)
    busiest_class = ns_of_class.argmax()
    own_nodes = nodes[class_of_node == busiest_class]
    ns_at_lengths = curves.durations[:, own_nodes].sum(axis=1)
    _, microbatches = tokens.shape
    work_at_lengths = ns_at_lengths / microbatches
    weights = polynomial_weights(curves.lengths, tokens, squares)
    work: np.ndarray = np.tensordot(work_at_lengths, weights, axes=1)
    return work


def deal_fairly(
    curves: LengthCurves, tokens: np.ndarray, squares: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Deal the microbatches of an iteration so that each dp rank has equal work.

    Args:
        curves: Durations at all lengths.
        tokens: int64 [dp, microbatches].
        squares: float64 [dp, microbatches], as in ``Batches``.

    Returns:
        Both, dealt.
    """
    work = _work_of_microbatches(curves, tokens, squares)
    order = fair_deal(work)
    return _in_order(tokens, order), _in_order(squares, order)


def fair_deal(work: np.ndarray) -> np.ndarray:
    """Deal microbatches to dp ranks so that each has as many as before and all equal work.

    The longest first, each to the dp rank with the least work so far.

    Args:
        work: float64 [dp, microbatches].

    Returns:
        int64 [dp * microbatches], the microbatch (row by row of ``work``) at each place; those of
        a dp rank stay in their order.
    """
    dp_ranks, microbatches = work.shape
    flat_work = work.reshape(-1)
    dealt: list[list[int]] = [[] for _ in range(dp_ranks)]
    heap = [(0.0, dp_rank) for dp_rank in range(dp_ranks)]
    longest_first = np.argsort(-flat_work, kind="stable")
    for microbatch in longest_first.tolist():
        own_work, dp_rank = heapq.heappop(heap)
        dealt[dp_rank].append(microbatch)
        own_work += float(flat_work[microbatch])
        # a full rank gets no more
        if len(dealt[dp_rank]) < microbatches:
            heapq.heappush(heap, (own_work, dp_rank))
    order: list[int] = []
    for own_microbatches in dealt:
        own_microbatches.sort()
        order += own_microbatches
    return np.array(order, dtype=np.int64)
