"""Inputs that are drawn from a range, and the search for a combination that stops the job.

In : ranges of counts or lengths for some ranks.  Out: ``Search``: the first combination in which
calls do not match or ranks wait, its smallest example, and how many of the draws stop.

All ranks of a dp rank get the same draw, as they share its batch.  Before the draws come those
combinations in which one dp rank alone is at one end of its range, because a difference between two
ranks is enough for most hangs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_prism.core.errors import PrismError, UsageError
from megatron_prism.core.world import World
from megatron_prism.features.uneven.inputs import UnevenInput, split_word
from megatron_prism.features.uneven.kinds import InputKind
from megatron_prism.features.uneven.outcome import Outcome, examine, judge
from megatron_prism.features.uneven.rank_programs import Sources, apply_inputs
from megatron_prism.graph import world_graph

_RANGE = re.compile(r"(\d{1,9})-(\d{1,9})")
_MOST_OPS = 200_000  # that programs of all combinations have together: some 20 s
_EXAMPLES = {
    InputKind.MICROBATCHES: "microbatches=dp=1:6-8",
    InputKind.LOADER: "loader=dp=1:6-8",
    InputKind.LENGTHS: "lengths=dp=1:1024-4096",
}


@dataclass(frozen=True)
class InputRange:
    """A range from which some ranks draw.

    Attributes:
        kind: What is drawn: microbatches, loader, or lengths.
        ranks: The ranks, ascending; those of one dp rank draw together.
        low: The smallest count or length.
        high: The largest.
    """

    kind: InputKind
    ranks: tuple[int, ...]
    low: int
    high: int


@dataclass(frozen=True)
class Search:
    """What the search found.

    Attributes:
        outcome: Of the first combination that stops, else of the last.
        examined: How many different combinations were examined.
        drawn: How many draws these are, of all.
        iterations: How many draws were asked for.
        stopping: How many of ``drawn`` stop.
        refused: How many of ``drawn`` Megatron refuses, or no capture says.
        refusal: Why the first of these is refused; "": none is.
    """

    outcome: Outcome
    examined: int
    drawn: int
    iterations: int
    stopping: int
    refused: int
    refusal: str


def read_range(kind: InputKind, text: str, world: World) -> InputRange | None:
    """Read a word whose value is a range.

    Args:
        kind: The word's key.
        text: ``RANKS:LOW-HIGH``.
        world: The world of the ranks.

    Returns:
        None: its value is no range.

    Raises:
        UsageError: The range is empty.
        WorldError: There are no such ranks.
    """
    # another capture is no number
    if kind not in _EXAMPLES:
        return None
    selector, value = split_word(kind, text)
    ends = _RANGE.fullmatch(value)
    if ends is None:
        return None
    low, high = map(int, ends.groups())
    if low > high:
        raise UsageError(f"{kind.value}={text}: {value} is empty", fix=_EXAMPLES[kind])
    # a loader may have nothing; no microbatch and no length may be 0
    if low == 0 and kind is not InputKind.LOADER:
        raise UsageError(f"{kind.value}={text}: {value} begins with 0", fix=_EXAMPLES[kind])
    return InputRange(kind, world.select(selector), low, high)


def search(
    sources: Sources,
    fixed: Sequence[UnevenInput],
    ranges: Sequence[InputRange],
    iterations: int,
    seed: int,
) -> Search:
    """Look for a combination of draws that stops the job.

    Args:
        sources: Where programs come from.
        fixed: Inputs that are not drawn.
        ranges: What is drawn.
        iterations: How many draws.
        seed: Of the draws.

    Raises:
        UsageError: A rank is in two ranges of one kind, or no captured length is in a range.
        PrismError: No combination can be had.
    """
    # what stops equal ranks would stop every draw, and seem to come of its inputs
    world_graph.build(sources.captured).check_fits()
    units = _units(sources, ranges)
    ops = sum(len(program) for program in sources.captured.programs)
    # each dp rank may have a program of its own
    most = max(10, _MOST_OPS // max(1, ops * min(sources.captured.world.dp, len(units))))
    count_of: dict[tuple[UnevenInput, ...], int] = {}
    for inputs in _corners(sources, units):
        count_of.setdefault((*fixed, *inputs), 0)
    generator = np.random.default_rng(seed)
    for _ in range(iterations):
        drawn_inputs = (*fixed, *_inputs(sources, units, generator))
        count_of[drawn_inputs] = count_of.get(drawn_inputs, 0) + 1

    stopping_outcome: Outcome | None = None
    last_outcome: Outcome | None = None
    refusals: list[PrismError] = []
    drawn = stopping = refused = examined = 0
    for inputs, count in list(count_of.items())[:most]:
        drawn += count
        try:
            # the smallest example is looked for once
            if stopping_outcome is None:
                outcome = examine(sources, inputs)
            else:
                outcome = judge(apply_inputs(sources, inputs))
        # a combination that cannot be had says nothing of the others
        except PrismError as error:
            refusals.append(error)
            refused += count
            continue
        examined += 1
        last_outcome = outcome
        if outcome.stops:
            stopping += count
            stopping_outcome = stopping_outcome or outcome
    decisive = stopping_outcome or last_outcome
    if decisive is None:
        raise refusals[0]
    refusal = ""
    if refusals:
        refusal = str(refusals[0]).splitlines()[0]
    return Search(decisive, examined, drawn, iterations, stopping, refused, refusal)


# -- combinations ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Unit:
    """The ranks of one dp rank, and what they draw from.

    Attributes:
        ranks: The ranks.
        options: Kind -> counts, or lengths of a microbatch.
    """

    ranks: tuple[int, ...]
    options: dict[InputKind, tuple[int, ...]]


def _units(sources: Sources, ranges: Sequence[InputRange]) -> list[_Unit]:
    """Put the ranges of each dp rank together."""
    world = sources.captured.world
    units: dict[tuple[int, ...], _Unit] = {}
    for input_range in ranges:
        options = _options(sources, input_range)
        ranks_of_dp: dict[int, list[int]] = {}
        for rank in input_range.ranks:
            ranks_of_dp.setdefault(world.coordinates(rank).dp, []).append(rank)
        for ranks in ranks_of_dp.values():
            unit = units.setdefault(tuple(ranks), _Unit(tuple(ranks), {}))
            if input_range.kind in unit.options:
                raise UsageError(
                    f"rank {ranks[0]} is in two ranges of {input_range.kind.value}=",
                    fix="one range for each rank",
                )
            unit.options[input_range.kind] = options
    return list(units.values())


def _options(sources: Sources, input_range: InputRange) -> tuple[int, ...]:
    """List what a range has; of lengths those that were captured."""
    low, high = input_range.low, input_range.high
    if input_range.kind is not InputKind.LENGTHS:
        return tuple(range(low, high + 1))
    captures = sources.lengths
    captured: list[int] = []
    if captures is not None:
        captured = sorted(captures.by_length)
    options = tuple(length for length in captured if low <= length <= high)
    if not options:
        raise UsageError(
            f"no capture is of {low} to {high} tokens", fix="capture=DIR of a length in the range"
        )
    return options


def _corners(sources: Sources, units: Sequence[_Unit]) -> Iterator[tuple[UnevenInput, ...]]:
    """Make combinations in which one dp rank alone is at one end of its ranges.

    Units with the same options are alike, so the first of them stands for all.
    """
    seen: set[tuple[tuple[InputKind, tuple[int, ...]], ...]] = set()
    for unit in units:
        kinds = tuple(unit.options.items())
        if kinds in seen:
            continue
        seen.add(kinds)
        for kind, options in kinds:
            for end in (options[0], options[-1]):
                yield _merged(_inputs_of_unit(sources, unit, {kind: end}))


def _inputs(
    sources: Sources, units: Sequence[_Unit], generator: np.random.Generator
) -> tuple[UnevenInput, ...]:
    """Draw one combination."""
    inputs: list[UnevenInput] = []
    for unit in units:
        chosen: dict[InputKind, int] = {}
        for kind, options in unit.options.items():
            if kind is not InputKind.LENGTHS:
                chosen[kind] = int(generator.choice(options))
        inputs += _inputs_of_unit(sources, unit, chosen, generator)
    return _merged(inputs)


def _inputs_of_unit(
    sources: Sources,
    unit: _Unit,
    chosen: dict[InputKind, int],
    generator: np.random.Generator | None = None,
) -> list[UnevenInput]:
    """Make the inputs of one dp rank; none of what it does as captured.

    Args:
        sources: Where programs come from.
        unit: The ranks of the dp rank.
        chosen: Kind -> count; of lengths that of all microbatches.
        generator: Draws a length for each microbatch; None: none is drawn.
    """
    usual_count = sources.captured.num_microbatches
    count = chosen.get(InputKind.MICROBATCHES, usual_count)
    inputs: list[UnevenInput] = []
    # a loader with as many microbatches as the loop has turns, or more, does not end
    loader = chosen.get(InputKind.LOADER, count)
    if loader >= count:
        loader = -1
    lengths: tuple[int, ...] = ()
    if InputKind.LENGTHS in chosen:
        lengths = (chosen[InputKind.LENGTHS],) * count
    elif generator is not None and InputKind.LENGTHS in unit.options:
        lengths = tuple(generator.choice(unit.options[InputKind.LENGTHS], size=count).tolist())
    if lengths:
        own_count = -1
        if count != usual_count:
            own_count = count
        inputs.append(
            UnevenInput(InputKind.LENGTHS, unit.ranks, own_count, lengths=lengths, loader=loader)
        )
    elif count != usual_count:
        inputs.append(UnevenInput(InputKind.MICROBATCHES, unit.ranks, count, loader=loader))
    elif loader >= 0:
        inputs.append(UnevenInput(InputKind.LOADER, unit.ranks, loader))
    return inputs


def _merged(inputs: Sequence[UnevenInput]) -> tuple[UnevenInput, ...]:
    """Put ranks with the same input together."""
    ranks_of: dict[UnevenInput, list[int]] = {}
    for uneven_input in inputs:
        key = dataclasses.replace(uneven_input, ranks=())
        ranks_of.setdefault(key, []).extend(uneven_input.ranks)
    merged: list[UnevenInput] = []
    for key, ranks in ranks_of.items():
        merged.append(dataclasses.replace(key, ranks=tuple(sorted(ranks))))
    return tuple(merged)
