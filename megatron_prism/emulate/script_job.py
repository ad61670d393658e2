"""Capture a stock script's job: every rank that its world needs, each in a worker process.

``prism capture -o DIR -- pretrain_gpt.py …`` and ``--prism-capture DIR --prism-ranks stages`` come
here, and so does pacing for the slices that it lacks.  Every worker is ``prism run`` of the script
as one rank.  This side imports neither Megatron nor, but for the question whether there is a GPU,
torch.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_prism.core.errors import MissingSlicesError, UsageError
from megatron_prism.core.program import save
from megatron_prism.core.slices import WORLD, SliceStore, assemble
from megatron_prism.core.units import counted, format_bytes
from megatron_prism.core.world import STAGES, World, format_ranks
from megatron_prism.emulate import kept_capture, workers
from megatron_prism.emulate import options as flags

if TYPE_CHECKING:
    from rich.console import Console

STEPS = 12  # of a capture with times: two warm up, nine count, the last ends them
# tier meta: one warms up, one counts, one of an MoE job has other loads of the experts, the last
# ends it; a job without experts ends behind the second
STEPS_OF_SHAPES = 4
_SETTLED = (  # by ``Job.words`` for every rank
    "--prism-emulate", "--prism-world-size", "--prism-ranks", "--prism-capture", "--prism-tier",
    "--prism-force", "--prism-pace", "--prism-slow", "--prism-job-flags", "--prism-steps",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What a user starts: a script with its own arguments and ours, and what they amount to.

    words : the script and its arguments
    ours  : ``--prism-…`` flags for every rank
    tier  : cuda, cpu or meta
    source : what its slices will say of it, of a recipe's job; of others only their workers know
    """

    words: tuple[str, ...]
    ours: tuple[str, ...]
    world: World
    tier: str
    source: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, script: str, argv: Sequence[str], world: World, tier: str) -> Job:
        """The job whose command line ``argv`` may hold flags of ours; PRISM_ARGS come before."""
        given = [*flags.words_of(os.environ), *argv]
        ours, rest = flags.split(given)
        kept = [word for name, words in ours if name not in _SETTLED for word in words]
        if "--prism-out" in kept:
            raise UsageError(
                "--prism-out is of one run, and a capture runs every rank for itself",
                fix="leave it out; prism memory and prism replay read what was captured",
            )
        return cls((script, *rest), tuple(kept), world, tier or _best())

    def command(self, rank: int, folder: Path | None = None) -> list[str]:
        """Of Python, to run ``rank``, captured into ``folder``."""
        steps = STEPS_OF_SHAPES if self.tier == "meta" else STEPS
        return [
            "-m", "megatron_prism", "run", *self.ours,
            "--prism-world-size", str(self.world.size), "--prism-ranks", str(rank),
            *([] if folder is None else ["--prism-capture", str(folder)]),
            *([] if self.source else ["--prism-steps", str(steps)]),  # a recipe is short
            "--prism-tier", self.tier, "--", *self.words,
        ]  # fmt: skip

    @property
    def question(self) -> list[str]:
        """All words that tell this job's capture from another's."""
        return [*self.ours, self.tier, str(self.world), *self.words]

    def title(self, rank: int) -> str:
        """Of a rank, for a bar."""
        return f"stage {self.world.coordinates(rank).pp}  rank {rank:,}"


def capture_command_line(
    script: str, argv: Sequence[str], folder: Path, console: Console, *, force: bool = False
) -> None:
    """Record what ``script`` with ``argv``, flags of ours among it, does on the ranks that are
    asked for, else on all that its world needs.  UsageError for a bad command line.
    """
    words = [*flags.words_of(os.environ), *argv]
    says = ("--prism-world-size", "--prism-recipe")
    if not (os.environ.get("WORLD_SIZE") or any(one.partition("=")[0] in says for one in words)):
        # the smallest world that fits its parallel sizes is hardly the one that is meant
        raise UsageError(
            "nobody says how many ranks the job has",
            fix="torchrun --nnodes N --nproc-per-node 8 before the script, or --prism-world-size N",
        )
    before = ["--prism-emulate", "--prism-capture", str(folder), "--prism-ranks", STAGES]
    given = flags.from_command_line([*before, *argv])
    assert given is not None, "--prism-emulate is among them"
    job = Job.of(script, argv, given.world, "" if given.tier == "auto" else given.tier)
    capture(job, folder, given.ranks, console, whole=given.stages, force=force or given.force)


def _best() -> str:
    """A GPU if there is one; else shapes, since no slice without a device has times."""
    if not kept_capture.gpu_devices():  # torch takes seconds to import
        return "meta"
    import torch

    return "cuda" if torch.cuda.is_available() else "meta"


def record(job: Job, folder: Path, ranks: Sequence[int]) -> None:
    """``capture`` of ``ranks`` alone, which says nothing."""
    from rich.console import Console

    capture(job, folder, ranks, Console(file=io.StringIO()), whole=False)


def capture(
    job: Job,
    folder: Path,
    ranks: Sequence[int],
    console: Console,
    *,
    whole: bool = True,
    force: bool = False,
    keep: bool = True,
) -> None:
    """Record an iteration of ``ranks`` of ``job`` into ``folder``; what is there is kept.

    Args:
        job: the script and its world.
        folder: of the slices.
        ranks: of its world.
        console: gets the talk.
        whole: whether to capture as well whom the world turns out to need, and to join the slices.
        force: whether to drop what is in the folder first.
        keep: whether to say where the slices are.

    Raises:
        UsageError: the folder holds slices of another job, or things that are no slices.
        PrismError, NotTrainedError: a rank failed; slices that were finished are kept.
    """
    store = SliceStore(folder, job.world, job.source, parsed=False)  # workers compare the rest
    if whole and not force and not job.source and _is_kept(job, folder, ranks, console):
        return
    with store.writing(force):
        at_once = 1 if job.tier == "cuda" else min(len(os.sched_getaffinity(0)), 8)
        if not job.source:
            name = job.words[1] if job.words[0] == "-m" else Path(job.words[0]).name
            console.print(f"{name}: {job.world}, tier {job.tier}")
            real = f"{counted(len(ranks), 'rank')} ({format_ranks(ranks)}), {at_once} at once"
            virtual = job.world.size - len(ranks)
            console.print(f"  {'real here':<20} {real}; {virtual:,} are virtual")

        def record(missing: Sequence[int]) -> list[workers.Json]:
            tasks = [
                workers.RankTask(
                    rank,
                    job.title(rank),
                    job.command(rank, folder),
                    log=folder.with_name(f"{folder.name}-rank-{rank}.log"),
                )
                for rank in missing
            ]
            return workers.run(tasks, console, at_once)

        start = time.perf_counter()
        there = set(store.ranks())
        if there >= set(ranks) and not job.source:  # of this very job?  its arguments say so
            record(ranks[:1])
        if whole:
            _, results = workers.capture_world(store, ranks, record, console)
        else:
            results = record([rank for rank in ranks if rank not in there])
            with contextlib.suppress(MissingSlicesError):  # some stages' ranks alone make no world
                save(assemble(folder), folder / WORLD, force=True)
        if whole and not job.source:
            imported = {path for result in results for path in result["files"]}
            kept_capture.keep(folder, job.question, imported, all_new=not there)
    for one in results:
        peak = "" if one["peak"] is None else f", {format_bytes(one['peak'])} allocated at the peak"
        console.print(f"rank {one['rank']:,}: {one['said']}{peak}")
    took = f"in {time.perf_counter() - start:.1f} s"
    console.print(f"wrote {folder} {took}" if keep else
                  f"captured {took}, for this once; to keep it: prism capture")  # fmt: skip


def _is_kept(job: Job, folder: Path, ranks: Sequence[int], console: Console) -> bool:
    """Whether ``folder`` was captured from this very job: same words, environment and files.

    Where it was captured from nearly this job, what differs is printed: a rank starts to compare.
    """
    differ = kept_capture.differences(folder, job.question)
    if differ is None:
        return False
    if differ:
        console.print(f"  {'compared':<20} {'; '.join(differ)}")
        return False
    slices = SliceStore(folder, job.world, {}).ranks()
    if not set(ranks) <= set(slices):
        return False
    console.print(f"{folder}: {counted(len(slices), 'slice')} of this very job, read as they are")
    return True
