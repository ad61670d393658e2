"""A world with another number of microbatches."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from fractions import Fraction

import numpy as np

from megatron_prism.core.errors import ProgramError
from megatron_prism.core.jobs import job_settings
from megatron_prism.core.programs.ops import CODE
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.replay.microbatches.arrangement import Arrangement
from megatron_prism.replay.microbatches.captured import CapturedCut
from megatron_prism.replay.microbatches.choice import MissingKindError, has_surroundings
from megatron_prism.replay.microbatches.cut import Cut
from megatron_prism.replay.microbatches.history import with_new_iteration
from megatron_prism.replay.microbatches.memory import ArrangedMemory
from megatron_prism.replay.microbatches.order import Order, Scheduler
from megatron_prism.replay.whatif import with_assumption

_MOST_OPS = 1 << 25  # 4 GB
_MOST_STEPS = 1 << 20  # of the scheduler's own run, 5 us and 2 KB each


def with_microbatches(programs: Programs, wanted: int, scheduler: Scheduler) -> Programs:
    """Make the world with another number of microbatches an iteration.

    Args:
        programs: The captured world.
        wanted: Microbatches of an iteration.
        scheduler: Runs Megatron's schedule without a model.

    Raises:
        UsageError: Megatron's scheduler refuses that number, in its words.
        ProgramError: The captured order is not that of Megatron's scheduler, or a kind of step that
            ``wanted`` microbatches have was not captured.
    """
    count = programs.num_microbatches
    if wanted == count:
        return programs
    if not count:
        raise ProgramError(
            "no op of the programs names a microbatch, so their number cannot be changed",
            fix="capture the job with that many",
        )
    deferred = _count_deferred(programs.source, min(count, wanted))
    _check_size(programs, count, wanted)

    # the scheduler must give the captured order before it says another one
    order = Order.of(programs, count, scheduler)
    captured_schedules, wanted_schedules = order.run(count), order.run(wanted)
    world = programs.world
    stages = [world.coordinates(program.rank).pp for program in programs.programs]
    cuts: list[CapturedCut] = []
    for program, stage in zip(programs.programs, stages, strict=True):
        schedule = captured_schedules[stage]
        cuts.append(CapturedCut(program, world, count, schedule, deferred))

    # join the captured pieces in the wanted order
    new_programs: list[Program] = []
    # stages of which some message's tensor has an end that the scheduler does not say
    unexplained_stages = set[int]()
    try:
        for cut, stage in zip(cuts, stages, strict=True):
            arrangement = Arrangement(cut, wanted_schedules[stage])
            memory = ArrangedMemory(arrangement)
            new_programs.append(_program_of(arrangement, memory))
            if not memory.follows_messages:
                unexplained_stages.add(stage)
    except MissingKindError as error:
        fewest = order.fewest(wanted)
        raise ProgramError(
            f"{count} microbatches have no {error}, which {wanted} microbatches need",
            fix=f"prism capture it with {fewest} microbatches: --global-batch-size, or "
            "global_batch_size of a recipe",
        ) from None

    # say so
    source = {**programs.source}
    if "microbatches" in source:
        source["microbatches"] = str(wanted)
    assumption = f"{wanted} microbatches instead of {count}: captured steps in the order of "
    if order.vpp is None:
        unexplained_stages.clear()
    doubt = _memory_doubt(captured_schedules, count, wanted_schedules, unexplained_stages)
    assumption += f"Megatron's scheduler{doubt}"
    world_of_wanted = dataclasses.replace(programs, programs=tuple(new_programs), source=source)
    return with_assumption(world_of_wanted, assumption, Fraction(wanted, count))


def _check_size(programs: Programs, count: int, wanted: int) -> None:
    """Raise ProgramError for more ops than fit, before they are made."""
    captured_ops = sum(len(program) for program in programs.programs)
    rounds = -(-wanted // count)
    ops = captured_ops * rounds
    if ops > _MOST_OPS or wanted * len(programs.programs) > _MOST_STEPS:
        raise ProgramError(
            f"{wanted:,} microbatches are {ops:,} ops, too many to hold", fix="fewer microbatches"
        )


def _memory_doubt(
    captured: Mapping[int, Cut],
    count: int,
    wanted: Mapping[int, Cut],
    unexplained_stages: Collection[int],
) -> str:
    """Say what is not known of memory; "" if all of it is.

    Args:
        captured: The captured schedule of each stage.
        count: Its microbatches.
        wanted: The wanted schedule of each stage.
        unexplained_stages: Stages of an interleaved schedule of which some message's tensor has an
            end that the scheduler does not say.
    """
    # the combined schedule holds tensors by nodes of its own, whose graphs nobody follows
    for schedule in wanted.values():
        if any(len(members) > 1 for members in schedule.members):
            return "; a forward beside a backward: peaks were up to 0.31 % off"
    # such a tensor lives as long as a captured one: too long or too short, unless a captured one
    # has the same steps around it
    for stage in sorted(unexplained_stages):
        if not has_surroundings(captured[stage], count, wanted[stage]):
            return (
                f"; {count} microbatches have no steady state of all stages: peaks may be off by "
                "two buffers of messages"
            )
    return ""


def _count_deferred(source: Mapping[str, str], fewest: int) -> int:
    """Count the first microbatches that leave a gradient to the end of the iteration.

    core/pipeline_parallel/utils.py drain_embedding_wgrad_compute has the limit; 0: all of them.

    Args:
        source: What the programs say of themselves.
        fewest: The smaller number of microbatches, captured or wanted.

    Raises:
        ProgramError: Every microbatch leaves one.
    """
    settings = job_settings.of_source(source)
    if "defer_embedding_wgrad_compute" not in settings:
        return 0
    limit = int(settings.get("wgrad_deferral_limit", 0))
    if not 0 < limit < fewest:
        raise ProgramError(
            f"with --defer-embedding-wgrad-compute and --wgrad-deferral-limit {limit} each of "
            f"{fewest} microbatches leaves a gradient to the end of the iteration, which is "
            "another one for every number of them",
            fix="capture the job with that many, or with a smaller limit than microbatches",
        )
    return limit


def _program_of(arrangement: Arrangement, arranged_memory: ArrangedMemory) -> Program:
    """Make the program of captured pieces in the order of the wanted schedule."""
    program = arrangement.captured.program
    ops = arrangement.ops()
    memory = arranged_memory.changes()

    # this renumbers the storages of the changes, too
    history = with_new_iteration(program, memory)

    # samples are of segments alone
    samples = program.samples
    if samples.size:
        is_segment = program.ops["name"] == CODE["compute"]
        segment_of_op = np.cumsum(is_segment) - 1
        segments = arrangement.source[is_segment[arrangement.source]]
        samples = samples[:, segment_of_op[segments]]

    # columns beside the changes of memory, if there are any
    streams, routed = program.streams, program.routed
    if len(streams):
        streams = streams[memory.captured]
    if len(routed):
        routed = routed[memory.captured]
    return dataclasses.replace(
        program,
        ops=ops,
        allocations=memory.allocations,
        samples=samples,
        history=history,
        streams=streams,
        routed=routed,
    )
