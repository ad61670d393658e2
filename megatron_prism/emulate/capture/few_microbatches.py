"""A capture of shapes runs the few microbatches of an iteration that all others follow from.

In : the job's sizes and settings, then the program of the few.  Out: how many run, then the program
of all.  Megatron's scheduler says both (``replay.microbatches``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_prism.core.programs.ops import IS_NCCL
from megatron_prism.core.programs.program import WHAT_IF, Program, Programs
from megatron_prism.core.world import World

_SCHEDULE = {  # Megatron's settings that change the order, and what ``schedules`` calls them
    "microbatch_group_size_per_vp_stage": "group_size",
    "overlap_p2p_comm": "overlap_p2p",
    "overlap_p2p_comm_warmup_flush": "warmup_flush",
    "overlap_moe_expert_parallel_comm": "ep_overlap",
}
_VARIES = ("rampup_batch_size", "step_batch_size_schedule")  # the number of microbatches
_WORTH = 2  # times as many microbatches: fewer take hardly less time


def few_of(world: World, rank: int, wanted: int, settings: Mapping[str, Any]) -> int:
    """Return how many microbatches a capture runs: all where few would save little.

    The first stage warms up longest: what is enough for it keeps messages' buffers exact.

    Args:
        world: of the job.
        rank: the rank that is captured.
        wanted: microbatches of the job.
        settings: of the job, by Megatron's names.
    """
    few = fewest(world, wanted, settings, tuple({0, world.coordinates(rank).pp}))
    if few * _WORTH > wanted:
        return wanted
    return few


def fewest(
    world: World, wanted: int, settings: Mapping[str, object], stages: tuple[int, ...] | None = None
) -> int:
    """The smallest number of microbatches that ``wanted`` follow from, on ``stages`` or on all;
    ``wanted`` if none do.
    """
    from megatron_prism.core.errors import UsageError

    if any(settings.get(name) for name in _VARIES):
        return wanted
    try:
        few = _fewest(world.pp, world.vpp, wanted, stages, _schedule_of(settings))
    except UsageError:  # Megatron refuses the job itself, in its words
        return wanted
    # weight gradients of the last microbatches come together: the few must have others before them
    if settings.get("defer_embedding_wgrad_compute"):
        num_deferred = settings.get("wgrad_deferral_limit", 0)
        if not isinstance(num_deferred, int) or not 0 < num_deferred < few - 1:
            return wanted
    return few


def share_first_stage(world: World, wanted: int, settings: Mapping[str, object]) -> None:
    """Find out what every rank asks for, in the process that its ranks are forked from.

    Args:
        world: of the job.
        wanted: microbatches of the job.
        settings: of the job, by Megatron's names.
    """
    fewest(world, wanted, settings, (0,))


def _schedule_of(settings: Mapping[str, object]) -> tuple[tuple[str, object], ...]:
    """Return what Megatron's settings say of the order, as ``schedules`` calls it."""
    schedule = []
    for name, parameter in _SCHEDULE.items():
        value = settings.get(name)
        if value is not None:
            schedule.append((parameter, value))
    return tuple(schedule)


@functools.cache
def _fewest(
    pp: int,
    vpp: int | None,
    wanted: int,
    stages: tuple[int, ...] | None,
    schedule: tuple[tuple[str, Any], ...],
) -> int:
    from megatron_prism.emulate.schedule import schedules  # Megatron, seconds to import
    from megatron_prism.replay.microbatches.order import fewest_microbatches

    # what is too few for the first stage is too few for it and others; all ranks ask for the first
    at_least = 1
    if stages is not None and 0 in stages and set(stages) != {0}:
        at_least = _fewest(pp, vpp, wanted, (0,), schedule)
    return fewest_microbatches(
        pp, vpp, wanted, schedules, stages, at_least=at_least, **dict(schedule)
    )


def of_all(
    program: Program, world: World, wanted: int, source: Mapping[str, str]
) -> tuple[Program, dict[str, str]]:
    """(the program of ``wanted`` microbatches, ``source`` as it is of them and says so);
    ProgramError if it does not follow from ``program``, which has few.
    """
    from megatron_prism.emulate.schedule import with_microbatches

    everyone = np.zeros(world.size, dtype=np.int32)
    captured = Programs(world, (program,), everyone, source=source)
    count = captured.num_microbatches
    with_all = with_microbatches(captured, wanted)
    source_of_all = dict(with_all.source)
    # nobody has asked for another number
    source_of_all[WHAT_IF] = source_of_all[WHAT_IF].replace(
        f"{wanted} microbatches instead of {count}: captured steps",
        f"{count} of {wanted} microbatches ran, whose steps stand for all",
    )
    return _counted_as_all(program, with_all.programs[0]), source_of_all


def _counted_as_all(few: Program, complete: Program) -> Program:
    """``complete`` with the calls that its earlier iterations make; those that ran had ``few``."""
    earlier = few.calls_before()
    num_iterations = earlier.get("", 0)
    place_of_text = {text: place for place, text in enumerate(complete.strings)}
    rows = []
    for desc, num_calls in earlier.items():
        # a group that no longer occurs counts nothing
        if desc in place_of_text:
            added_calls = _of_nccl(complete, desc) - _of_nccl(few, desc)
            rows.append((place_of_text[desc], num_calls + num_iterations * added_calls))
    return dataclasses.replace(complete, earlier=np.array(rows, np.int64).reshape(-1, 2))


def _of_nccl(program: Program, group: str) -> int:
    """How many collectives of ``group`` its communicator counts."""
    return int(IS_NCCL[program.ops["name"][program.collectives(group)]].sum())
