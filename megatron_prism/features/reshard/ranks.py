"""The ranks of the new job that plan their reading, each in a worker process on tier meta."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_prism.core.errors import UsageError
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.core.world import World
from megatron_prism.emulate.command_line import options as job_options
from megatron_prism.emulate.processes import workers
from megatron_prism.features.reshard.metadata import read_checkpoint, stage
from megatron_prism.features.reshard.plan import Reshard, combine

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_prism.emulate.processes.workers import Json

FEW_RANKS = 8  # of a job whose ranks are all planned
_MOST_RANKS = 64  # of a larger one
_HAS_ENGINE = ("NVTE_DEBUG", "0")
_WITHOUT_OPTIMIZER = ("--no-load-optim", "--no-load-rng")


def reshard(
    path: Path,
    job: Sequence[str],
    flags: Sequence[str],
    console: Console,
    *,
    ranks: str | None = None,
    read_rate: int | None = None,
) -> Reshard:
    """Plan how the ranks of a job read a checkpoint.

    Args:
        path: of the checkpoint.
        job: the training script and its arguments.
        flags: ``--prism-*`` flags of the job.
        console: gets the progress.
        ranks: a selector; None: those whose parts differ in more than their place.
        read_rate: bytes a second of the file system.

    Raises:
        UsageError: there is no such checkpoint, or the line is no job.
        PrismError: a rank failed before it could load.
    """
    checkpoint = read_checkpoint(path)
    # words of the user come later, and win
    before = ["--prism-emulate", "--prism-tier", "meta", "--prism-ranks", "0"]
    parsed = job_options.from_command_line([*before, *flags, *job[1:]])
    if parsed is None:
        raise UsageError("reshard into which job?", fix="prism reshard DIR -- torchrun …")
    world = parsed.world
    chosen = representatives(world) if ranks is None else world.select(ranks)
    with tempfile.TemporaryDirectory(prefix="prism-reshard-") as staged:
        load = stage(checkpoint, Path(staged))
        plans = _planned(world, chosen, [*job, *load], flags, console)
        without_optimizer = None
        # states of the optimizer are what most often does not fit
        if any(plan["refusal"] for plan in plans):
            fewer = [*job, *load, *_WITHOUT_OPTIMIZER]
            again = _planned(world, chosen, fewer, flags, console)
            without_optimizer = not any(plan["refusal"] for plan in again)
    return combine(
        checkpoint,
        world,
        plans,
        covers_all=_covers(world, chosen),
        without_optimizer=without_optimizer,
        read_rate=read_rate,
    )


def representatives(world: World) -> tuple[int, ...]:
    """Return the ranks whose names of tensors make up those of the job.

    Stages and expert-parallel ranks have other tensors; ranks of one tensor-parallel or
    data-parallel group have other parts of the same ones.
    """
    # few ranks: each one's own reading is shown
    if world.size <= FEW_RANKS:
        return tuple(range(world.size))
    first_ranks: dict[tuple[int, int], int] = {}
    for rank in range(world.size):
        coordinates = world.coordinates(rank)
        first_ranks.setdefault((coordinates.pp, coordinates.ep), rank)
        # more stages and expert-parallel ranks than are worth the time
        if len(first_ranks) == _MOST_RANKS:
            break
    return tuple(sorted(first_ranks.values()))


def _covers(world: World, ranks: Sequence[int]) -> bool:
    """Return whether these ranks have every stage and every expert-parallel rank."""
    places = set()
    for rank in ranks:
        coordinates = world.coordinates(rank)
        places.add((coordinates.pp, coordinates.ep))
    return len(places) == world.pp * world.ep


def _planned(
    world: World,
    ranks: Sequence[int],
    job: Sequence[str],
    flags: Sequence[str],
    console: Console,
) -> list[Json]:
    """Return what each rank plans to read."""
    tasks = []
    for rank in ranks:
        words = ["-m", "megatron_prism", "run", *flags, "--prism-plan-load"]
        words += ["--prism-tier", "meta", "--prism-world-size", str(world.size)]
        words += ["--prism-ranks", str(rank), "--", *job]
        tasks.append(workers.RankTask(rank, f"rank {rank:,}", words))
    with ProcessChanges() as changes:
        # a variable of Transformer Engine says that the job has it: Megatron loads no states into
        # torch's own optimizer
        changes.set_item(os.environ, *_HAS_ENGINE)
        return workers.run(tasks, console)
