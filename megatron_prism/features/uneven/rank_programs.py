"""The programs of ranks whose inputs differ.

In : Programs of equal ranks, and inputs of some of them.  Out: UnevenWorld: programs in which these
ranks run others, and the op before which a rank with an empty loader stops.  Other numbers of
microbatches are captured steps in the order of Megatron's scheduler; other lengths and other
batches are captures of their own.  Nothing here knows times or memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_prism.core.errors import ProgramError, UsageError
from megatron_prism.core.programs.ops import CODE, PHASE_NAMES
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.features.uneven.expert_dispatch import DispatchRule, unequal_dispatches
from megatron_prism.features.uneven.inputs import UnevenInput
from megatron_prism.features.uneven.kinds import InputKind
from megatron_prism.features.uneven.mixed_lengths import LengthCaptures
from megatron_prism.features.uneven.stage_messages import crossing_finding
from megatron_prism.graph.matching import Finding
from megatron_prism.graph.stall import RankFault

_FORWARD = PHASE_NAMES.index("forward")
Scheduler = Callable[[Programs, int], Programs]  # programs with another number of microbatches
Opener = Callable[[str], Programs]


@dataclass(frozen=True)
class Sources:
    """Where programs of other inputs come from.

    Attributes:
        captured: The programs of equal ranks.
        with_microbatches: Makes programs with another number of microbatches.
        open_capture: Opens another capture.
        lengths: Captures of the job at several lengths; None: there are none.
    """

    captured: Programs
    with_microbatches: Scheduler
    open_capture: Opener
    lengths: LengthCaptures | None = None


@dataclass(frozen=True)
class UnevenWorld:
    """Programs of ranks with uneven inputs.

    Attributes:
        programs: Of all ranks.
        faults: Ranks that stop because their loader is empty.
        broken_rules: What does not fit though the sizes of all calls do.
    """

    programs: Programs
    faults: Mapping[int, RankFault] = field(default_factory=dict)
    broken_rules: tuple[Finding, ...] = ()


def apply_inputs(sources: Sources, inputs: Sequence[UnevenInput]) -> UnevenWorld:
    """Give ranks the programs of their inputs.

    Args:
        sources: Where the programs come from.
        inputs: What the ranks get.

    Raises:
        UsageError: A rank has two inputs.
        ProgramError: A program cannot be had: the scheduler refuses the number of microbatches, a
            length was not captured, another capture is of another world.
    """
    _check_ranks_once(inputs)
    programs = sources.captured
    faults: dict[int, RankFault] = {}
    for uneven_input in inputs:
        kind = uneven_input.kind
        if kind is InputKind.LOADER:
            faults |= _faults_of_loader(sources.captured, uneven_input, uneven_input.count)
            continue
        if kind is InputKind.MICROBATCHES:
            other = sources.with_microbatches(sources.captured, uneven_input.count)
        elif kind is InputKind.PROGRAMS:
            other = _other_capture(sources, uneven_input.path)
        else:
            other = _mixed_lengths(sources, uneven_input)
        if uneven_input.loader >= 0:
            faults |= _faults_of_loader(other, uneven_input, uneven_input.loader)
        programs = _with_ranks(programs, other, uneven_input.ranks)
    broken_rules: list[Finding] = []
    kinds = {uneven_input.kind for uneven_input in inputs}
    if InputKind.LENGTHS in kinds and sources.lengths is not None:
        broken_rules += _broken_rules(sources.lengths, programs)
    return UnevenWorld(programs, faults, tuple(broken_rules))


def _broken_rules(captures: LengthCaptures, programs: Programs) -> Iterator[Finding]:
    """Find what goes wrong with other lengths though the sizes of all calls fit.

    Args:
        captures: Of one job at several lengths.
        programs: Of all ranks, with their lengths.
    """
    for rank, crossing in captures.crossings():
        yield crossing_finding(programs, rank, crossing)
    if captures.dispatch_rule is DispatchRule.EQUAL:
        yield from unequal_dispatches(programs)


def _check_ranks_once(inputs: Sequence[UnevenInput]) -> None:
    """Raise UsageError if a rank is named by two inputs."""
    input_of_rank: dict[int, UnevenInput] = {}
    for uneven_input in inputs:
        for rank in uneven_input.ranks:
            if rank in input_of_rank:
                raise UsageError(
                    f"rank {rank} has two inputs: {input_of_rank[rank]} and {uneven_input}",
                    fix="name each rank in one input",
                )
            input_of_rank[rank] = uneven_input


def _with_ranks(programs: Programs, other: Programs, ranks: Sequence[int]) -> Programs:
    """Let some ranks run what they run in another world."""
    program_of = programs.program_of.copy()
    chosen = list(ranks)
    program_of[chosen] = other.program_of[chosen] + len(programs.programs)
    all_programs = (*programs.programs, *other.programs)
    return dataclasses.replace(programs, programs=all_programs, program_of=program_of)


def _other_capture(sources: Sources, path: str) -> Programs:
    """Open another capture; ProgramError unless it is of the same world."""
    other = sources.open_capture(path)
    world = sources.captured.world
    # ranks of another world have other groups, in which their calls could not meet
    if other.world != world or dict(other.groups) != dict(sources.captured.groups):
        raise ProgramError(
            f"{path} is of another world: {other.world}, not {world}",
            fix="capture the other input with the same sizes",
        )
    return other


def _mixed_lengths(sources: Sources, uneven_input: UnevenInput) -> Programs:
    """Make programs of samples of other lengths; UsageError without captures of them."""
    if sources.lengths is None:
        raise UsageError(
            f"{uneven_input}: no capture says what other lengths do",
            fix="capture=DIR for each length: prism capture … seq_length=2048 -o DIR",
        )
    captures = sources.lengths
    if uneven_input.count >= 0:
        captures = captures.of_count(uneven_input.count, sources.with_microbatches)
    return captures.programs_of(uneven_input.lengths)


# -- a loader that ends ----------------------------------------------------------------------------
def _faults_of_loader(
    programs: Programs, uneven_input: UnevenInput, microbatch: int
) -> dict[int, RankFault]:
    """Find where ranks stop if their data iterator has fewer microbatches than the iteration.

    The first and the last stage read data (pretrain_gpt.py get_batch); of a tensor-parallel group
    the rank that broadcasts (training/utils.py get_batch_on_this_tp_rank), if the batch is
    broadcast.

    Args:
        programs: That the ranks run.
        uneven_input: Of the ranks.
        microbatch: The first one that the iterator does not have.

    Raises:
        ProgramError: No named rank would read the microbatch that is missing.
    """
    world = programs.world
    faults: dict[int, RankFault] = {}
    for rank in uneven_input.ranks:
        stage = world.coordinates(rank).pp
        if stage not in (0, world.pp - 1):
            continue
        chunk = world.chunks - 1
        if stage == 0:
            chunk = 0
        program = programs.of(rank)
        op = _first_forward_op(program, microbatch, chunk)
        if op is not None and _reads_batch(programs, rank, program, op):
            faults[rank] = RankFault(host=op)
    if not faults:
        raise ProgramError(
            f"{uneven_input}: none of these ranks reads microbatch {microbatch}",
            fix="name ranks of the first or last stage, and fewer microbatches than an iteration "
            "has (counted from 0)",
        )
    return faults


def _first_forward_op(program: Program, microbatch: int, chunk: int) -> int | None:
    """Find the first op of the forward of a microbatch in a chunk; None: there is none."""
    ops = program.ops
    is_forward = (ops["phase"] == _FORWARD) & (ops["microbatch"] == microbatch)
    # without chunks the column is -1
    is_chunk = (ops["chunk"] == chunk) | (ops["chunk"] < 0)
    places = np.flatnonzero(is_forward & is_chunk)
    if not places.size:
        return None
    return int(places[0])


def _reads_batch(programs: Programs, rank: int, program: Program, op: int) -> bool:
    """Say whether a rank reads the batch itself, and does not get it by a broadcast."""
    row = program.ops[op]
    if row["name"] != CODE["broadcast"]:
        return True
    group = programs.world.group(rank, program.strings[row["group"]])
    return group is not None and group[int(row["root"])] == rank
