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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_prism.core.errors import (
    MissingSlicesError,
    NotTrainedError,
    PrismError,
    UsageError,
)
from megatron_prism.core.jobs.megatron_source import megatron_release
from megatron_prism.core.programs.program import save
from megatron_prism.core.programs.slices import WORLD, SliceStore, assemble
from megatron_prism.core.units import counted, format_bytes
from megatron_prism.core.world import STAGES, World, format_ranks
from megatron_prism.emulate.capture import kept_capture
from megatron_prism.emulate.command_line import options as flags
from megatron_prism.emulate.jobs import estimate
from megatron_prism.emulate.preflight import first_look
from megatron_prism.emulate.preflight.obstacles import Obstacles
from megatron_prism.emulate.preflight.unknown_flags import ARGUMENTS_ALONE
from megatron_prism.emulate.processes import workers

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_prism.emulate.jobs.estimate import Estimator

_LAYOUT = ("tp", "cp", "dp", "pp", "ep", "etp")  # parallel sizes of a world
_CHECKING = "Megatron reads the job's arguments"
STEPS = 12  # of a capture with times: two warm up, nine count, the last ends them
# tier meta: one warms up, one counts, one of an MoE job has other loads of the experts, the last
# ends it; a job without experts ends behind the second
STEPS_OF_SHAPES = 4
_SETTLED = (  # by ``Job.words`` for every rank
    "--prism-emulate",
    "--prism-world-size",
    "--prism-ranks",
    "--prism-capture",
    "--prism-tier",
    "--prism-force",
    "--prism-pace",
    "--prism-slow",
    "--prism-job-flags",
    "--prism-steps",
    first_look.CHECK,
)


@dataclass(frozen=True)
class Job:
    """What a user starts: a script with its own arguments and ours, and what they amount to.

    words : the script and its arguments
    ours  : ``--prism-…`` flags for every rank
    tier  : cuda, cpu or meta
    source : what its slices will say of it, of a recipe's job; of others only their workers know
    shares_start : whether its ranks may be forks of a process that has started Megatron
    """

    words: tuple[str, ...]
    ours: tuple[str, ...]
    world: World
    tier: str
    source: Mapping[str, str] = field(default_factory=dict)
    shares_start: bool = True

    @classmethod
    def of(cls, script: str, argv: Sequence[str], world: World, tier: str) -> Job:
        """The job whose command line ``argv`` may hold flags of ours; PRISM_ARGS come before."""
        given = [*flags.words_of(os.environ), *argv]
        ours, rest = flags.split(given)
        # the capture says these flags itself for each rank
        kept = [word for name, words in ours if name not in _SETTLED for word in words]
        if "--prism-out" in kept:
            raise UsageError(
                "--prism-out is of one run, and a capture runs every rank for itself",
                fix="leave it out; prism memory and prism replay read what was captured",
            )
        return cls((script, *rest), tuple(kept), world, tier or _best())

    def command(self, rank: int, folder: Path | None = None) -> list[str]:
        """Of Python, to run ``rank``, captured into ``folder``."""
        # shapes are the same in every step; times need some to warm up
        steps = STEPS_OF_SHAPES if self.tier == "meta" else STEPS
        return [
            "-m",
            "megatron_prism",
            "run",
            *self.ours,
            "--prism-world-size",
            str(self.world.size),
            "--prism-ranks",
            str(rank),
            *([] if folder is None else ["--prism-capture", str(folder)]),
            *([] if self.source else ["--prism-steps", str(steps)]),  # a recipe is short
            "--prism-tier",
            self.tier,
            "--",
            *self.words,
        ]

    @property
    def question(self) -> list[str]:
        """All words that tell this job's capture from another's."""
        return [*self.ours, self.tier, str(self.world), "--", *self.words]

    def checking_command(self) -> list[str]:
        """Return the words for Python to end once Megatron has validated the arguments."""
        return [
            *("-m", "megatron_prism", "run", *self.ours),
            *("--prism-world-size", str(self.world.size), "--prism-ranks", "0"),
            *("--prism-tier", "meta", first_look.CHECK, "--", *self.words),
        ]

    def title(self, rank: int) -> str:
        """Of a rank, for a bar."""
        return f"stage {self.world.coordinates(rank).pp}  rank {rank:,}"


def capture_command_line(
    script: str,
    argv: Sequence[str],
    folder: Path,
    console: Console,
    *,
    force: bool = False,
    obstacles: Obstacles | None = None,
    estimator: Estimator | None = None,
) -> None:
    """Record what a script does on the ranks that are asked for, else on all that its world needs.

    Args:
        script: of the job.
        argv: its arguments, flags of ours among them.
        folder: of the slices.
        console: gets the talk.
        force: whether to drop what is in the folder first.
        obstacles: that the launch line has; with any the job is checked and not captured.
        estimator: as of ``capture``.

    Raises:
        UsageError: a bad command line, with all that stops the job.
    """
    obstacles = Obstacles() if obstacles is None else obstacles
    given = _options_of(argv, folder, obstacles)
    # a job that cannot run is looked at, so that one list has all that stops it; one without data
    # would be refused by its ranks, of which each starts Megatron first
    if given is None or len(obstacles) or first_look.may_lack_data(script, argv):
        check_command_line(script, argv, console, obstacles).obstacles.raise_all()
    assert given is not None, "without options there is an obstacle"
    job = Job.of(script, argv, given.world, "" if given.tier == "auto" else given.tier)
    job = replace(job, shares_start=given.ranks_share_start)
    force = force or given.force
    whole = given.stages
    capture(job, folder, given.ranks, console, whole=whole, force=force, estimator=estimator)


def _options_of(argv: Sequence[str], folder: Path, obstacles: Obstacles) -> flags.Options | None:
    """Read our flags of a job that is to be captured.

    Args:
        argv: the job's arguments, flags of ours among them.
        folder: of the slices.
        obstacles: gets what is wrong with the flags.

    Returns:
        The options; None where something is wrong.
    """
    words = [*flags.words_of(os.environ), *argv]
    # a size of the world from a flag, a recipe or a launcher
    names = {word.partition("=")[0] for word in words}
    says_size = names & {"--prism-world-size", "--prism-recipe"} or os.environ.get("WORLD_SIZE")
    if not says_size and not obstacles.world_is_guessed:
        # the smallest world that fits its parallel sizes is hardly the one that is meant
        obstacles.add(
            "nobody says how many ranks the job has",
            "torchrun --nnodes N --nproc-per-node 8 before the script, or --prism-world-size N",
        )
        obstacles.world_is_guessed = True
        return None
    before = ["--prism-emulate", "--prism-capture", str(folder), "--prism-ranks", STAGES]
    with obstacles.noting():
        return flags.from_command_line([*before, *argv])
    return None


@dataclass(frozen=True)
class Check:
    """What is known of a job before any rank runs.

    Attributes:
        name: of the script.
        world: None where a number of it is an obstacle.
        tier: of the capture.
        stand_ins: lines about what stands in for files that are not here.
        obstacles: what stops the job.
    """

    name: str
    world: World | None
    tier: str
    stand_ins: Sequence[str]
    obstacles: Obstacles

    def as_json(self) -> dict[str, object]:
        """Return the check as ``--json`` prints it."""
        obstacles = [
            {"message": obstacle.message, "fix": obstacle.fix} for obstacle in self.obstacles
        ]
        layout = None
        if self.world is not None:
            layout = {axis: getattr(self.world, axis) for axis in _LAYOUT}
        return {
            "script": self.name,
            "ranks": None if self.world is None else self.world.size,
            "layout": layout,
            "tier": self.tier,
            "stand_ins": list(self.stand_ins),
            "obstacles": obstacles,
            "stops": bool(obstacles),
        }


def check_command_line(
    script: str, argv: Sequence[str], console: Console, obstacles: Obstacles
) -> Check:
    """Collect what stops a job: Megatron reads and validates its arguments, and builds no model.

    Args:
        script: of the job.
        argv: its arguments, flags of ours among them.
        console: gets what was understood.
        obstacles: that are known already; gets more.

    Raises:
        UsageError: the sizes or flags do not even give a smallest world, so that Megatron cannot
            read the arguments.
    """
    given = None
    if not obstacles.world_is_guessed:
        given = _options_of(argv, Path("slices"), obstacles)

    # Megatron reads the other arguments in the smallest world that fits, if the wanted one is
    # unknown or does not fit
    world, tier = None, "meta"
    words = list(argv)
    if given is not None:
        world = given.world
        tier = _best() if given.tier == "auto" else given.tier
    else:
        try:
            size = flags.smallest_world_size(argv)
            checked = flags.from_command_line(
                ["--prism-emulate", *argv, "--prism-world-size", str(size), "--prism-ranks", "0"]
            )
        except UsageError as error:
            obstacles.note(error)
            obstacles.raise_all()
            raise
        assert checked is not None, "--prism-emulate is among the words"
        given = checked

    job = Job.of(script, words, given.world, "meta")
    name = _name_of(job.words)
    understood = "its world is not known" if world is None else str(world)
    console.print(f"{name}: {understood}, tier {tier}")
    task = workers.RankTask(0, _CHECKING, [*job.checking_command()])
    stand_ins: list[str] = []
    try:
        (answer,) = workers.run([task], console, 1, doing=_CHECKING)
    except PrismError as error:  # the script's own: a module that is not here
        obstacles.note(_without_rank(error))
    else:
        stand_ins = answer["stand_ins"]
        for message, fix in answer["obstacles"]:
            # the job's own Megatron, which is not here, may take what this one refuses
            if script == str(ARGUMENTS_ALONE):
                message = f"megatron-core {megatron_release()}, installed here: {message}"
            obstacles.add(message, fix)
    return Check(name, world, tier, stand_ins, obstacles)


def _without_rank(error: PrismError) -> PrismError:
    """Return an error of the worker that looks at the arguments, which is no rank of the job."""
    message = error.message.removeprefix("rank 0: ").removeprefix("rank 0 failed: ")
    fix = error.fix
    if isinstance(error, NotTrainedError):
        # the process has printed why it ended: it may be a program of another kind
        fix = "correct what the script says, or name the script that trains"
    return PrismError(message, fix=fix)


def _name_of(words: Sequence[str]) -> str:
    """Return the name of a script, or of a module behind ``-m``."""
    if words[0] == "-m":
        return words[1]
    if words[0] == str(ARGUMENTS_ALONE):
        return "arguments alone"
    return Path(words[0]).name


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
    estimator: Estimator | None = None,
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
        estimator: estimates what the job needs while its ranks run; on tier meta.

    Raises:
        UsageError: the folder holds slices of another job, or things that are no slices.
        PrismError, NotTrainedError: a rank failed; slices that were finished are kept.
    """
    store = SliceStore(folder, job.world, job.source, parsed=False)  # workers compare the rest
    # slices of an earlier question about a whole launch line may be those of this one
    may_be_kept = whole and not force and not job.source
    if may_be_kept and _is_kept(job, folder, ranks, console):
        return
    copied = may_be_kept and _copied(job, folder, console)
    with store.writing(force):
        # ranks on one GPU would take each other's memory and time
        at_once = 1 if job.tier == "cuda" else min(len(os.sched_getaffinity(0)), 8)
        if not job.source:
            _say_what_runs(job, ranks, at_once, console)

        # what is there already needs no estimate, and recipes start in another way
        captured_before = set(store.ranks())
        if captured_before or job.source or job.tier != "meta" or not whole:
            estimator = None

        def record(missing: Sequence[int]) -> list[workers.Json]:
            tasks = [_task_of(job, rank, folder) for rank in missing]
            # ranks that the world turned out to need come later, and need no estimate
            if estimator is None or estimator.has_begun:
                return workers.run(tasks, console, at_once)
            # ranks with few layers run first
            short_tasks = estimator.tasks(tasks)
            all_tasks = [*short_tasks, *tasks]
            results = workers.run(all_tasks, console, at_once, finished=estimator.finished)
            return results[len(short_tasks) :]

        start = time.perf_counter()
        began_ns = time.time_ns()
        # are all slices there of this very job?  a rank compares its arguments with theirs
        is_all_there = captured_before >= set(ranks) and not job.source
        if is_all_there and not _is_of_this_job(record, ranks[:1], store, copied):
            captured_before = set()
        if whole:
            _, results = workers.capture_world(store, ranks, record, console)
        else:
            # these ranks alone: nobody asks for the others of their world
            results = record(sorted(set(ranks) - captured_before))
            with contextlib.suppress(MissingSlicesError):  # some stages' ranks alone make no world
                save(assemble(folder), folder / WORLD, force=True)
        if estimator is not None:
            _keep_estimate(estimator, folder)
        if whole and not job.source:
            _keep_question(job, folder, results, console, not captured_before, began_ns)
    _print_results(results, console)
    seconds = time.perf_counter() - start
    end = f"wrote {folder} in {seconds:.1f} s"
    if not keep:
        end = f"captured in {seconds:.1f} s, for this once; to keep it: prism capture"
    console.print(end)


def _say_what_runs(job: Job, ranks: Sequence[int], at_once: int, console: Console) -> None:
    """Print which ranks run here, how many at once, and how many are virtual."""
    console.print(f"{_name_of(job.words)}: {job.world}, tier {job.tier}")
    real = f"{counted(len(ranks), 'rank')} ({format_ranks(ranks)}), {at_once} at once"
    virtual = job.world.size - len(ranks)
    console.print(f"  {'real here':<20} {real}; {virtual:,} are virtual")


def _task_of(job: Job, rank: int, folder: Path) -> workers.RankTask:
    """Return what captures a rank."""
    return workers.RankTask(
        rank,
        job.title(rank),
        job.command(rank, folder),
        log=folder.with_name(f"{folder.name}-rank-{rank}.log"),
        forks=job.tier != "cuda",
        shares_start=job.shares_start and not job.source,
    )


def _is_of_this_job(
    record: Callable[[Sequence[int]], object],
    ranks: Sequence[int],
    store: SliceStore,
    copied: bool,
) -> bool:
    """Return whether slices that are there are of this job; copies of another job's are dropped.

    Args:
        record: starts ranks, of which each compares its arguments with those of the slices.
        ranks: to start.
        store: has the slices.
        copied: whether they are copies of those of a job with nearly these options.

    Raises:
        PrismError: a rank failed, or slices that are no copies are of another job.
    """
    try:
        record(ranks)
    except PrismError as error:
        # the options changed more than their names say: nothing of the neighbour stays
        if not copied or error.exit_code != UsageError.exit_code:
            raise
        store.prepare(force=True)
        return False
    return True


def _keep_estimate(estimator: Estimator, folder: Path) -> None:
    """Keep the estimate beside the slices, to say later how far off it was; else say why none."""
    estimator.say_reason()
    if estimator.result is not None:
        estimate.keep(folder, estimator.result)


def _keep_question(
    job: Job,
    folder: Path,
    results: Sequence[workers.Json],
    console: Console,
    all_new: bool,
    began_ns: int,
) -> None:
    """Keep what ``folder`` was captured from beside its slices: the same question is read then."""
    imported = set[str]()
    for result in results:
        imported.update(result["files"])
    try:
        kept_capture.keep(folder, job.question, imported, all_new=all_new, began_ns=began_ns)
    except OSError as error:  # the slices are whole: only the next question takes longer
        reason = error.strerror or str(error)
        console.print(f"  {'not kept':<20} what {folder} was captured from: {reason}")


def _print_results(results: Sequence[workers.Json], console: Console) -> None:
    """Print a line for each rank that was captured."""
    for result in results:
        line = f"rank {result['rank']:,}: {result['said']}"
        if result["peak"] is not None:
            line += f", {format_bytes(result['peak'])} allocated at the peak"
        console.print(line)


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
    # an interrupted capture lacks slices
    slices = SliceStore(folder, job.world, {}).ranks()
    if not set(ranks) <= set(slices):
        return False
    console.print(f"{folder}: {counted(len(slices), 'slice')} of this very job, read as they are")
    return True


def _copied(job: Job, folder: Path, console: Console) -> bool:
    """Whether the slices of a folder beside ``folder`` were copied into it: they are of a job whose
    other options change no iteration.  A rank compares its arguments with them afterwards.

    Where options of the nearest job change iterations, they are printed: that is why all ranks run.
    """
    if folder.exists():
        return False
    near = kept_capture.neighbour(folder, job.question)
    if near is None:
        return False
    if near.changing:
        options = ", ".join(near.changing)
        console.print(f"  {'captured anew':<20} {options}: not as in {near.folder.name}")
        return False
    try:
        kept_capture.copy_slices(near.folder, folder)
    except (OSError, UsageError) as error:  # a full disk, another run: all ranks run
        console.print(f"  {'captured anew':<20} {near.folder.name} cannot be copied: {error}")
        return False
    options = ", ".join(near.changed) or "the order of the words"
    console.print(f"  {'copied':<20} {near.folder.name}: no iteration depends on {options}")
    return True
