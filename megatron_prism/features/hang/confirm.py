"""Confirm a verdict by running the suspects' real code into the state of the dumps.

In : a job, the programs of its world, the dumps, and ``hypotheses.Confirmation``.  Every culprit is
run for a few iterations by Megatron's own code, alone and captured, its peers virtual
and held against the programs.  Out: lines for people and whether the verdict is confirmed: the code
makes the calls of its dump up to the place, the call there is the one that its peers wait in, and
without the fault it goes on and takes its optimizer steps (the counterfactual).
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from megatron_prism.core.errors import PrismError
from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Programs, load
from megatron_prism.core.programs.slices import SliceStore
from megatron_prism.core.units import counted
from megatron_prism.emulate.command_line import options as flags
from megatron_prism.emulate.jobs.script_job import Job
from megatron_prism.emulate.processes import workers

if TYPE_CHECKING:
    from megatron_prism.features.hang.calls import Entry
    from megatron_prism.features.hang.dumps import DumpSet
    from megatron_prism.features.hang.hypotheses import Confirmation
    from megatron_prism.features.hang.verdict import Diagnosis

_MAX_RUNS = 4  # culprits that are run


@dataclasses.dataclass(frozen=True)
class Trial:
    """What running the culprits' code brought.

    Attributes:
        lines: What was found.
        confirmed: Whether it bears the verdict out; None if it says nothing.
    """

    lines: tuple[str, ...]
    confirmed: bool | None


@dataclasses.dataclass(frozen=True)
class RankRun:
    """A run of one rank's code.

    Attributes:
        calls: Those of an iteration of the real code.
        release: Of Megatron.
        error: Why it stopped; empty if it did not.
    """

    calls: list[Op]
    release: str
    error: str = ""


@dataclasses.dataclass(frozen=True)
class _Opinion:
    """What the run of one culprit says.

    Attributes:
        lines: In words.
        fits: Whether the code does what the verdict says of the rank.
    """

    lines: list[str]
    fits: bool


@dataclasses.dataclass(frozen=True)
class _Agreement:
    """How far a rank's dump and its code agree before the place in question.

    Attributes:
        recorded: Calls of the iteration that the dump has before the place.
        equal: How many of them, going backwards, the code makes too.
    """

    recorded: int
    equal: int


def confirm(
    job: Job,
    programs: Programs,
    path: Path,
    dumps: DumpSet,
    verdict: Diagnosis,
    placed: Confirmation,
    console: Console,
) -> Trial:
    """Run the culprits for real.

    Args:
        job: The job.
        programs: Of its world.
        path: Where ``programs`` are, for the workers.
        dumps: Of the job.
        verdict: On the dumps.
        placed: Where in the programs the culprits stand.
        console: For progress.
    """
    if not placed.stops:
        return Trial(("no place is known to run a suspect's code to",), None)
    lines: list[str] = []
    all_fit = placed.confirmed is not False
    for rank, index in list(placed.stops.items())[:_MAX_RUNS]:
        run = _run(job, path, rank, console)
        opinion = _judge(programs, dumps, verdict, rank, index, job, run)
        lines += opinion.lines
        all_fit = all_fit and opinion.fits
    if len(placed.stops) > _MAX_RUNS:
        lines.append(f"{len(placed.stops) - _MAX_RUNS} more culprits were not run")
    if not all_fit:
        return Trial((*lines, "REFUTED"), False)
    if placed.confirmed:
        return Trial((*lines, "CONFIRMED"), True)
    return Trial((*lines, "the code bears it out; the programs were not driven"), None)


def script_job(words: Sequence[str], ours: Sequence[str], dumps: DumpSet) -> Job:
    """Return the job of a script's command line.

    Args:
        words: The script and its own arguments.
        ours: ``--prism-*`` flags.  Without --prism-world-size among them the job is as large as the
            largest group in the dumps.
        dumps: Of the job.

    Raises:
        UsageError: As of ``prism run``.
    """
    last_rank = max(_ranks_in_groups(dumps))
    flag_words = ["--prism-world-size", str(1 + last_rank), *ours, *words[1:]]
    options = flags.from_command_line(["--prism-emulate", *flag_words])
    assert options is not None, "--prism-emulate is among them"
    tier = "" if options.tier == "auto" else options.tier
    return Job.of(words[0], [*ours, *words[1:]], options.world, tier)


def _ranks_in_groups(dumps: DumpSet) -> set[int]:
    """Return the ranks that some dump names as a member of a group."""
    ranks: set[int] = set()
    for dump in dumps.dumps.values():
        for group in dump.groups.values():
            ranks.update(group.ranks)
    return ranks


def _run(job: Job, path: Path, rank: int, console: Console) -> RankRun:
    """Run the code of a rank, and ask whether its peers would call otherwise."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "slices")
        words = job.command(rank, folder)
        end_of_flags = words.index("--")
        words[end_of_flags:end_of_flags] = ["--prism-world", str(path)]
        try:
            workers.run([workers.RankTask(rank, f"rank {rank:,}", words)], console)
            captured = load(SliceStore(folder, job.world, {}).path(rank))
        except PrismError as error:
            return RankRun([], "unknown", error.message)
        calls = [op for op in captured.programs[0] if op.group]
        return RankRun(calls, captured.source.get("megatron_core", "unknown"))


def _judge(
    programs: Programs,
    dumps: DumpSet,
    verdict: Diagnosis,
    rank: int,
    index: int,
    job: Job,
    run: RankRun,
) -> _Opinion:
    """Tell whether the code does what the verdict says of a rank at an op of its program.

    Args:
        programs: Of the world.
        dumps: Of the job.
        verdict: On the dumps.
        rank: A culprit.
        index: The op at which it stands.
        job: The job.
        run: What its code did.
    """
    ops = list(programs.of(rank))
    calls_before = sum(bool(op.group) for op in ops[:index])
    expected_calls = [op for op in ops[index:] if op.group]
    text = f"rank {rank}'s real code ran on tier {job.tier} (megatron-core {run.release}): "
    lines = [f"{text}{len(run.calls):,} calls, held against its peers: {run.error or 'all fit'}"]
    agreement = _agreement(dumps, verdict, rank, run.calls[:calls_before])
    if agreement.recorded:
        lines.append(
            f"{agreement.equal} of the {agreement.recorded} calls before the place are those of "
            "its dump"
        )
    if calls_before >= len(run.calls) or not expected_calls:
        lines.append("at that place the iteration is over")
        return _Opinion(lines, False)

    # the call that it comes to, and the call of the programs
    call, expected = run.calls[calls_before], expected_calls[0]
    is_expected = (call.name, call.group) == (expected.name, expected.group)
    text = f"it comes to {call.name} of {call.group} at {call.site}"
    if not is_expected:
        text += ", not where the dumps say"
    lines.append(text)
    waiting = 0
    for victim in verdict.victims:
        if (victim.op, victim.group) == (call.name, call.group):
            waiting += 1
    text = f"{waiting} of {counted(len(verdict.victims), 'victim')} wait in such a call; "
    lines.append(text + "without the fault the code went on to its last step")
    fits = is_expected and agreement.recorded == agreement.equal and not run.error
    return _Opinion(lines, fits)


def _agreement(dumps: DumpSet, verdict: Diagnosis, rank: int, calls: Sequence[Op]) -> _Agreement:
    """Compare a rank's dump with its code's calls before the place, from the place backwards."""
    dump = dumps.dumps.get(rank)
    if dump is None:
        return _Agreement(0, 0)
    entries = [entry for entry in dump.entries if entry.op != "coalesced"]
    # without a history nothing can be compared
    if not any(entry.done for entry in entries):
        return _Agreement(0, 0)
    kind_of_rank = _first_kinds(verdict)
    recorded_calls: list[tuple[str, str]] = []
    for entry in entries:
        if _is_place(entry, kind_of_rank[rank], verdict):
            break
        if entry.group in dump.groups:
            recorded_calls.append((entry.op, entry.desc))
    descs = {group.desc for group in dump.groups.values()}
    code_calls = [(op.name, op.group) for op in calls if op.group in descs]

    pairs = zip(reversed(recorded_calls), reversed(code_calls), strict=False)
    equal = 0
    for recorded_call, code_call in pairs:
        if recorded_call != code_call:
            break
        equal += 1
    return _Agreement(min(len(code_calls), len(recorded_calls)), equal)


def _first_kinds(verdict: Diagnosis) -> Mapping[int, str]:
    """Return what each culprit is: rank -> kind; the first that is told of a rank."""
    kinds: dict[int, str] = {}
    for culprit in verdict.culprits:
        kinds.setdefault(culprit.rank, culprit.kind)
    return kinds


def _is_place(entry: Entry, kind: str, verdict: Diagnosis) -> bool:
    """Tell whether an entry is the call in question of a dump, or behind it."""
    # the host stands behind all that its dump has
    if kind == "host stuck":
        return False
    if kind == "device stuck":
        return not entry.done
    return entry.desc == verdict.group and not entry.pair and entry.seq >= verdict.seq
