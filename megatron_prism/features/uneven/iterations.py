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


def split_iterations(
    sources: Sources, inputs: Sequence[UnevenInput]
) -> list[tuple[UnevenInput, ...]]:
    """Give each iteration its part of the lengths; other inputs are those of all iterations.

    Raises:
        UsageError: Lengths are of different numbers of iterations.
    """
    # lengths without captures are refused where they are applied
    if sources.lengths is None:
        return [tuple(inputs)]
    microbatches = sources.lengths.microbatches
    iterations = 1
    for uneven_input in inputs:
        whole, rest = divmod(len(uneven_input.lengths), microbatches)
        if whole and rest:
            raise UsageError(
                f"{len(uneven_input.lengths)} lengths for iterations of {microbatches} "
                "microbatches: the last iteration lacks some",
                fix=f"a multiple of {microbatches} lengths",
            )
        # of one iteration, or one length for all microbatches
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
            if uneven_input.kind is InputKind.LENGTHS and len(uneven_input.lengths) > microbatches:
                own_lengths = uneven_input.lengths[first : first + microbatches]
                uneven_input = dataclasses.replace(uneven_input, lengths=own_lengths)
            iteration_inputs.append(uneven_input)
        per_iteration.append(tuple(iteration_inputs))
    return per_iteration
