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
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from megatron_prism.core.errors import PrismError
from megatron_prism.core.ops import Op
from megatron_prism.core.program import Programs, load
from megatron_prism.core.slices import SliceStore
from megatron_prism.core.units import counted
from megatron_prism.emulate import options as flags
from megatron_prism.emulate import workers
from megatron_prism.emulate.script_job import Job

if TYPE_CHECKING:
    from megatron_prism.features.hang.dumps import DumpSet, Entry
    from megatron_prism.features.hang.hypotheses import Confirmation
    from megatron_prism.features.hang.verdict import Diagnosis

_MOST = 4  # culprits that are run


@dataclasses.dataclass(frozen=True)
class Trial:
    """lines: what was found; confirmed: None if it says nothing."""

    lines: tuple[str, ...]
    confirmed: bool | None


@dataclasses.dataclass(frozen=True)
class RankRun:
    """calls: those of an iteration of the real code; error: why it stopped, "" if it did not."""

    calls: list[Op]
    release: str
    error: str = ""


def confirm(
    job: Job, programs: Programs, path: Path, dumps: DumpSet, verdict: Diagnosis,
    placed: Confirmation, console: Console,
) -> Trial:  # fmt: skip
    """Run the culprits for real.  ``path``: where ``programs`` are, for the workers."""
    if not placed.stops:
        return Trial(("no place is known to run a suspect's code to",), None)
    lines, right = list[str](), True
    for rank, index in list(placed.stops.items())[:_MOST]:
        more, fits = _judge(
            programs, dumps, verdict, rank, index, job, _run(job, path, rank, console)
        )
        lines += more
        right &= fits
    if len(placed.stops) > _MOST:
        lines.append(f"{len(placed.stops) - _MOST} more culprits were not run")
    right &= placed.confirmed is not False
    lines.append("REFUTED" if not right else "CONFIRMED" if placed.confirmed else
                 "the code bears it out; the programs were not driven")  # fmt: skip
    return Trial(tuple(lines), right if placed.confirmed is not None or not right else None)


def script_job(words: Sequence[str], ours: Sequence[str], dumps: DumpSet) -> Job:
    """The job of a script's command line; without --prism-world-size it is as large as the largest
    group in the dumps.  UsageError as of ``prism run``.
    """
    size = 1 + max(max(g.ranks) for d in dumps.dumps.values() for g in d.groups.values() if g.ranks)
    given = ["--prism-world-size", str(size), *ours, *words[1:]]
    options = flags.from_command_line(["--prism-emulate", *given])
    assert options is not None, "--prism-emulate is among them"
    tier = "" if options.tier == "auto" else options.tier
    return Job.of(words[0], [*ours, *words[1:]], options.world, tier)


def _run(job: Job, path: Path, rank: int, console: Console) -> RankRun:
    """What the rank's own slice holds, and whether its peers would call otherwise."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "slices")
        words = job.command(rank, folder)
        at = words.index("--")
        words[at:at] = ["--prism-world", str(path)]
        try:
            workers.run([workers.RankTask(rank, f"rank {rank:,}", words)], console)
            found = load(SliceStore(folder, job.world, {}).path(rank))
        except PrismError as error:
            return RankRun([], "unknown", error.message)
        calls = [op for op in found.programs[0] if op.group]
        return RankRun(calls, found.source.get("megatron_core", "unknown"))


def _judge(
    programs: Programs, dumps: DumpSet, verdict: Diagnosis, rank: int, index: int, job: Job,
    run: RankRun,
) -> tuple[list[str], bool]:  # fmt: skip
    """(lines, whether the code does what the verdict says of ``rank`` at op ``index``)."""
    ops = list(programs.of(rank))
    expected = next((op for op in ops[index:] if op.group), None)
    at = sum(bool(op.group) for op in ops[:index])
    lines = [f"rank {rank}'s real code ran on tier {job.tier} (megatron-core {run.release}): "
             f"{len(run.calls):,} calls, held against its peers: {run.error or 'all fit'}"
             ]  # fmt: skip
    seen, alike = _history(dumps, verdict, rank, run.calls[:at])
    if seen:
        lines.append(f"{alike} of the {seen} calls before the place are those of its dump")
    if at >= len(run.calls) or expected is None:
        lines.append("at that place the iteration is over")
        return lines, False
    now = run.calls[at]
    same = (now.name, now.group) == (expected.name, expected.group)
    lines.append(f"it comes to {now.name} of {now.group} at {now.site}"
                 + ("" if same else ", not where the dumps say"))  # fmt: skip
    waits = sum((v.op, v.group) == (now.name, now.group) for v in verdict.victims)
    lines.append(f"{waits} of {counted(len(verdict.victims), 'victim')} wait in such a call; "
                 "without the fault the code went on to its last step")  # fmt: skip
    return lines, same and seen == alike and not run.error


def _history(dumps: DumpSet, verdict: Diagnosis, rank: int, calls: list[Op]) -> tuple[int, int]:
    """(calls of the iteration that the rank's dump has before the place, how many of them, going
    backwards, the code makes too); (0, 0) without a history.
    """
    dump = dumps.dumps.get(rank)
    entries = [e for e in dump.entries if e.op != "coalesced"] if dump is not None else []
    if dump is None or not any(e.done for e in entries):
        return 0, 0
    kind = next(c.kind for c in verdict.culprits if c.rank == rank)
    at = next((i for i, e in enumerate(entries) if _is_place(e, kind, verdict)), len(entries))
    names = [(e.op, e.desc) for e in entries[:at] if e.group in dump.groups]
    known = {group.desc for group in dump.groups.values()}
    mine = [(op.name, op.group) for op in calls if op.group in known]
    count = min(len(mine), len(names))
    same = next((i for i in range(count) if names[-1 - i] != mine[-1 - i]), count)
    return count, same


def _is_place(entry: Entry, kind: str, verdict: Diagnosis) -> bool:
    """Whether it is the call in question of a dump, or behind it."""
    if kind in ("device stuck", "host stuck"):
        return kind == "device stuck" and not entry.done
    return entry.desc == verdict.group and not entry.pair and entry.seq >= verdict.seq
