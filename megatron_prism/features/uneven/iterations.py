"""Lengths of many iterations, examined one iteration after the other.

In : inputs, of which some have lengths for the microbatches of several iterations.  Out: the first
iteration in which the job stops, or that all calls are matched in all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_prism.core.errors import UsageError
from megatron_prism.features.uneven.inputs import UnevenInput
from megatron_prism.features.uneven.kinds import InputKind
from megatron_prism.features.uneven.outcome import Outcome, examine
from megatron_prism.features.uneven.rank_programs import Sources
from megatron_prism.features.uneven.samples import Batches
from megatron_prism.graph import world_graph


@dataclass(frozen=True)
class IterationOutcome:
    """The iteration that decides.

    Attributes:
        outcome: What comes of its inputs.
        iteration: Its number, from 1: the first that stops, else the last.
        iterations: How many there are.
        distinct: How many of them that were examined have different inputs.
    """

    outcome: Outcome
    iteration: int
    iterations: int
    distinct: int


_MOST_OPS = 60_000  # that programs of drawn iterations have together: some 10 s


def examine_iterations(sources: Sources, inputs: Sequence[UnevenInput]) -> IterationOutcome:
    """Find the first iteration in which the job stops.

    Args:
        sources: Where programs come from.
        inputs: What the ranks get; lengths may be those of several iterations.

    Raises:
        UsageError: Lengths are of different numbers of iterations.
        PrismError: The calls of the captured programs do not fit together, without any input; or as
            ``examine``.
    """
    world_graph.build(sources.captured).check_fits()
    per_iteration = split_iterations(sources, inputs)
    outcomes: dict[tuple[UnevenInput, ...], Outcome] = {}
    for number, iteration_inputs in enumerate(per_iteration, 1):
        outcome = outcomes.get(iteration_inputs)
        # iterations with the same lengths end alike
        if outcome is None:
            outcome = examine(sources, iteration_inputs)
            outcomes[iteration_inputs] = outcome
        if outcome.stops or number == len(per_iteration):
            return IterationOutcome(outcome, number, len(per_iteration), len(outcomes))
    raise UsageError("no rank gets another input", fix="prism uneven DIR microbatches=dp=1:3")


def examine_batches(sources: Sources, batches: Batches) -> IterationOutcome:
    """Find a drawn iteration in which the job stops.

    The iteration with the longest sample and the one with the shortest come first, then the others
    in their order, as many as can be examined in some seconds.

    Args:
        sources: Where programs come from.
        batches: The drawn samples.

    Returns:
        The first that stops, else the last that was examined; ``distinct`` says how many were.

    Raises:
        PrismError: As ``examine_iterations``.
    """
    world_graph.build(sources.captured).check_fits()
    world = sources.captured.world
    ops = sum(len(program) for program in sources.captured.programs) * world.dp
    most = max(1, _MOST_OPS // max(1, ops))
    longest = int(batches.tokens.max(axis=(1, 2)).argmax())
    shortest = int(batches.tokens.min(axis=(1, 2)).argmin())
    order = dict.fromkeys((longest, shortest, *range(len(batches))))
    seen: set[bytes] = set()
    for iteration in order:
        lengths = batches.tokens[iteration].tobytes()
        # iterations with the same lengths end alike
        if lengths in seen:
            continue
        seen.add(lengths)
        outcome = examine(sources, batches.inputs_of(iteration, world))
        last = iteration
        if outcome.stops or len(seen) >= most:
            break
    return IterationOutcome(outcome, last + 1, len(batches), len(seen))


def split_iterations(
    sources: Sources, inputs: Sequence[UnevenInput]
) -> list[tuple[UnevenInput, ...]]:
    """Give each iteration its part of the lengths; inputs without lengths are alike in all.

    Args:
        sources: Of the captures; without lengths there is one iteration.
        inputs: As they were typed: lengths of all iterations, one behind the other.

    Raises:
        UsageError: Lengths are of different numbers of iterations, or end within one.
    """
    # lengths without captures are refused where they are applied
    if sources.lengths is None:
        return [tuple(inputs)]
    microbatches = sources.lengths.microbatches
    iterations = 1
    for uneven_input in inputs:
        # ranks with another number of microbatches have one iteration
        if uneven_input.count >= 0:
            continue
        whole, rest = divmod(len(uneven_input.lengths), microbatches)
        if whole and rest:
            raise UsageError(
                f"{len(uneven_input.lengths)} lengths for iterations of {microbatches} "
                "microbatches: the last iteration lacks some",
                fix=f"a multiple of {microbatches} lengths",
            )
        # of one iteration, one length for all microbatches, or too few, which is refused later
        if whole < 2:
            continue
        if iterations not in (1, whole):
            raise UsageError(
                f"{uneven_input.kind.value}= has lengths of {iterations} and of {whole} iterations",
                fix=f"as many lengths for all ranks, a multiple of {microbatches}",
            )
        iterations = whole
    per_iteration: list[tuple[UnevenInput, ...]] = []
    for iteration in range(iterations):
        first = iteration * microbatches
        iteration_inputs: list[UnevenInput] = []
        for uneven_input in inputs:
            is_list = uneven_input.kind is InputKind.LENGTHS and uneven_input.count < 0
            if is_list and len(uneven_input.lengths) > microbatches:
                own_lengths = uneven_input.lengths[first : first + microbatches]
                uneven_input = dataclasses.replace(uneven_input, lengths=own_lengths)
            iteration_inputs.append(uneven_input)
        per_iteration.append(tuple(iteration_inputs))
    return per_iteration
