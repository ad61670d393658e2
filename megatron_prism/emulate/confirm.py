"""Confirm a verdict by running the suspects' real code into the state of the dumps.

In : a recipe or a stock script's job, the programs of its world, the dumps, and
``hang.hypotheses.Confirmation``.  Every culprit is trained for a few iterations by Megatron's own
code, alone, its peers virtual and held against the programs.  Out: lines for people and whether the
verdict is confirmed: the code makes the calls of its dump up to the place, the call there is the
one that its peers wait in, and without the fault it goes on and takes its optimizer steps (the
counterfactual).
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from megatron_prism.core.errors import PrismError
from megatron_prism.core.ops import Op
from megatron_prism.core.program import Programs, load
from megatron_prism.core.recipe import Recipe
from megatron_prism.core.slices import SliceStore
from megatron_prism.core.units import counted
from megatron_prism.emulate import options as flags
from megatron_prism.emulate import recipe_script, workers
from megatron_prism.emulate.call_guard import CallGuard
from megatron_prism.emulate.options import HangOptions
from megatron_prism.emulate.script_job import Job
from megatron_prism.emulate.session import Session
from megatron_prism.emulate.workers import Json
from megatron_prism.runtime.call_check import frames
from megatron_prism.runtime.recorder.recorder import details

if TYPE_CHECKING:
    from megatron_prism.emulate.session import Run
    from megatron_prism.hang.dumps import DumpSet, Entry
    from megatron_prism.hang.hypotheses import Confirmation
    from megatron_prism.hang.verdict import Diagnosis
    from megatron_prism.runtime.listeners import Args, Kwargs
    from megatron_prism.runtime.process_group import PrismGroup

_ITERATION = 2  # the first steady one


class Witness(CallGuard):
    """Follows calls as a CallGuard does; ``said`` is what it has seen."""

    def __init__(self, run: Run, programs: Path, call: int) -> None:
        super().__init__(run.options, HangOptions((), 0, False, programs, True), run.tier, None)
        self.call = call  # how many calls of the iteration come before the one in question
        self.calls: list[dict[str, object]] = []
        self.frames: list[str] = []
        self.differs: list[str] = []

    def _check(self, group: PrismGroup, op: str, args: Args, kwargs: Kwargs, site: str) -> None:
        if self.iteration == _ITERATION:
            if len(self.calls) == self.call:
                self.frames = frames()
            fields = details(group, op, args, kwargs)
            kept = {k: v for k, v in fields.items() if k in ("dtype", "num_in", "num_out")}
            self.calls.append({"name": op, "group": group.desc, "site": site, **kept})
        super()._check(group, op, args, kwargs, site)

    def _fail(self, kind: str, call: Op, number: int, *more: Any) -> None:
        found = more[1] if len(more) > 1 else ()
        self.differs.append(f"{call.name} #{number + 1} of {call.group}: {'; '.join(found)}")

    def summary(self) -> dict[str, object]:
        """Plain values: calls, frames at the call in question, what peers would call otherwise."""
        return {"calls": self.calls, "frames": self.frames, "differs": self.differs,
                "compared": self._compared}  # fmt: skip


_STEPS = 3
_MOST = 4  # culprits that are run


@dataclasses.dataclass(frozen=True)
class Trial:
    """lines: what was found; confirmed: None if it says nothing."""

    lines: tuple[str, ...]
    confirmed: bool | None


def confirm(
    job: Recipe | Job,
    programs: Programs,
    path: Path,
    dumps: DumpSet,
    verdict: Diagnosis,
    placed: Confirmation,
    console: Console,
) -> Trial:
    """Run the culprits for real.  ``path``: where ``programs`` are, for the workers."""
    if not placed.stops:
        return Trial(("no place is known to run a suspect's code to",), None)
    lines: list[str] = []
    good = []
    for rank, index in list(placed.stops.items())[:_MOST]:
        if isinstance(job, Job):
            said = _run_script(job, path, rank, console)
        else:
            said = _run(job, programs, path, rank, index, console)
        more, right = _judge(programs, dumps, verdict, rank, index, said)
        lines += more
        good.append(right)
    if len(placed.stops) > _MOST:
        lines.append(f"{len(placed.stops) - _MOST} more culprits were not run")
    whole = all(good) and placed.confirmed is not False
    lines.append("CONFIRMED" if whole and placed.confirmed else "REFUTED" if not whole else
                 "the code bears it out; the programs were not driven")  # fmt: skip
    return Trial(tuple(lines), whole if placed.confirmed is not None or not whole else None)


def script_job(words: Sequence[str], ours: Sequence[str], dumps: DumpSet) -> Job:
    """The job of a script's command line; without --prism-world-size it is as large as the largest
    group in the dumps.  UsageError as of ``prism run``."""
    size = 1 + max(max(g.ranks) for d in dumps.dumps.values() for g in d.groups.values() if g.ranks)
    given = ["--prism-world-size", str(size), *ours, *words[1:]]
    options = flags.from_command_line(["--prism-emulate", *given])
    assert options is not None, "--prism-emulate is among them"
    tier = "" if options.tier == "auto" else options.tier
    return Job.of(words[0], [*ours, *words[1:]], options.world, tier)


def _run_script(job: Job, path: Path, rank: int, console: Console) -> Json:
    """The same of a script: what the rank's own slice holds, and what its peers would call
    otherwise."""
    calls, differs, steps, release = list[dict[str, object]](), list[str](), 0, "unknown"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "slices")
        words = job.command(rank, folder)
        at = words.index("--")
        words[at:at] = ["--prism-world", str(path)]
        try:
            workers.run([workers.RankTask(rank, f"rank {rank:,}", words)], console)
            found = load(SliceStore(folder, job.world, {}).path(rank))
            (program,) = found.programs
            kept = ("name", "group", "site", "dtype", "num_in", "num_out")
            calls = [{k: getattr(op, k) for k in kept} for op in program if op.group]
            steps, release = _STEPS, found.source.get("megatron_core", release)
        except PrismError as error:
            differs.append(error.message)
    return {
        "tier": job.tier,
        "megatron_core": release,
        "steps": steps,
        "witness": {"calls": calls, "frames": [], "differs": differs, "compared": len(calls)},
    }


def _run(
    recipe: Recipe, programs: Programs, path: Path, rank: int, index: int, console: Console
) -> Json:
    """The summary of the rank's worker, with what its witness saw."""
    recipe = recipe.changed(train_iters=_STEPS)
    before = sum(bool(op.group) for op in list(programs.of(rank))[:index])
    words = ["-m", "megatron_prism.emulate.confirm", str(path), str(before), str(rank)]
    task = workers.RankTask(rank, f"rank {rank:,}", [*words, *recipe.words()])
    (summary,) = workers.run([task], console)
    return summary


def main() -> None:
    """Be that worker: train the recipe as the rank, and say what its witness saw."""
    path, call, rank, *words = sys.argv[1:]
    recipe, emit = Recipe.of_words(words), workers.emitter()
    run = recipe_script.attached(Session(), recipe, int(rank))
    witness = Witness(run, Path(path), int(call))
    run.calls = (witness,)
    run.monitor.listen(witness, *run.monitor.listeners)
    summary = recipe_script.train(recipe, run)
    assert emit is not None, "a worker of emulate.workers"
    emit("result", result={**summary, "witness": witness.summary()})


def _judge(
    programs: Programs, dumps: DumpSet, verdict: Diagnosis, rank: int, index: int,
    summary: Json,
) -> tuple[list[str], bool]:  # fmt: skip
    said = summary["witness"]
    calls = [Op(**call) for call in said["calls"]]
    here = [i for i, op in enumerate(programs.of(rank)) if op.group and i >= index]
    expected = programs.of(rank)[here[0]] if here else None
    at = sum(bool(op.group) for op in list(programs.of(rank))[:index])
    lines = [f"rank {rank}'s real code ran on tier {summary['tier']} (megatron-core "
             f"{summary['megatron_core']}): {said['compared']:,} calls held against its peers, "
             + (f"{len(said['differs'])} differ: {said['differs'][0]}" if said["differs"]
                else "all fit")]  # fmt: skip
    seen, alike = _history(dumps, verdict, rank, calls[:at])
    if seen:
        lines.append(f"{alike} of the {seen} calls before the place are those of its dump")
    now = calls[at] if at < len(calls) else None
    right = not said["differs"] and seen == alike
    if now is None or expected is None:
        lines.append("at that place the iteration is over")
        return lines, False
    where = f"{now.name} of {now.group} at {now.site}"
    same = (now.name, now.group) == (expected.name, expected.group)
    lines.append(f"it comes to {where}" + ("" if same else ", not where the dumps say"))
    lines += [f"    {frame}" for frame in said["frames"]]
    waits = sum((v.op, v.group) == (now.name, now.group) for v in verdict.victims)
    lines.append(
        f"{waits} of {counted(len(verdict.victims), 'victim')} wait in such a call; "
        f"without the fault the code went on: {summary['steps']} of {_STEPS} steps"
    )
    return lines, right and same and summary["steps"] == _STEPS


def _history(dumps: DumpSet, verdict: Diagnosis, rank: int, calls: list[Op]) -> tuple[int, int]:
    """(calls of the iteration that the rank's dump has before the place, how many of them, going
    backwards, the code makes too); (0, 0) without a history."""
    dump = dumps.dumps.get(rank)
    entries = [e for e in dump.entries if e.op != "coalesced"] if dump is not None else []
    if dump is None or not any(e.done for e in entries):
        return 0, 0
    entries = entries[: _place(entries, verdict, rank)]
    names = [(e.op, e.desc) for e in entries if e.group in dump.groups]
    known = {group.desc for group in dump.groups.values()}
    mine = [(op.name, op.group) for op in calls if op.group in known]
    count = min(len(mine), len(names))
    same = next((i for i in range(count) if names[-1 - i] != mine[-1 - i]), count)
    return count, same


def _place(entries: list[Entry], verdict: Diagnosis, rank: int) -> int:
    """How many of the dump's calls come before the one in question."""
    kind = next(c.kind for c in verdict.culprits if c.rank == rank)
    for i, e in enumerate(entries):
        if kind == "device stuck":
            here = not e.done
        else:
            here = kind != "host stuck" and e.desc == verdict.group and not e.pair and (
                e.seq >= verdict.seq)  # fmt: skip
        if here:
            return i
    return len(entries)


if __name__ == "__main__":
    main()
