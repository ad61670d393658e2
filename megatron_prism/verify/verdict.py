"""A job's small copy beside its reference, the first difference, and the flag that makes it.

In : the job's command line and world.  Out: a ``Verdict``.  The reference is one rank without any
part of the composition, or the copy of another command line.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from megatron_prism.core.errors import UnsupportedError, UsageError
from megatron_prism.core.units import counted
from megatron_prism.core.world import World
from megatron_prism.verify import shrink
from megatron_prism.verify.compare import Kept, LayoutComparison, LayoutDifference
from megatron_prism.verify.ranks import RankError, Server
from megatron_prism.verify.shrink import SmallRun

Say = Callable[[str], None]
Compare = Callable[[str, SmallRun], LayoutComparison]  # a run, under a name, with the reference
_NOT_HERE = (
    "fused and attention kernels' own arithmetic, FP8 and FP4, NVLS and SHARP reductions, DeepEP"
)


@dataclass(frozen=True)
class Line:
    """A command line: script and arguments, of what world, whether that says its data-parallel
    size, and by which Python."""

    words: tuple[str, ...]
    world: World
    dp_known: bool
    python: str


@dataclass
class Verdict:
    """``same`` is None where it could not be decided, and ``why`` says why.

    changes   : [argument, before, after, reason] of the copy
    parts     : of the composition, which can be left out
    culprits  : parts without which the difference is gone
    worst     : kind of value, or run -> the largest share of its tolerance that an error took
    counts    : kind of value -> how many were compared
    run       : which run differs, where it is not the copy from its beginning
    reports   : figures that Megatron reports otherwise; they do not make another job
    """

    words: tuple[str, ...]
    world: World
    copy: World
    changes: list[list[str]] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    same: bool | None = None
    why: str = ""
    difference: LayoutDifference | None = None
    culprits: list[str] = field(default_factory=list)
    tried: list[str] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    tolerance: float = 0.0
    iterations: int = shrink.ITERATIONS
    unnamed: int = 0
    run: str = ""
    reports: list[LayoutDifference] = field(default_factory=list)

    @property
    def asked(self) -> list[list[str]]:
        """Changes of what the command line says, not of defaults."""
        typed = {word.partition("=")[0] for word in self.words}
        return [one for one in self.changes
                if any(w.startswith("--" + one[0].replace("_", "-")) for w in typed)]  # fmt: skip

    @property
    def not_checked(self) -> str:
        """What no run without a GPU can check: of every job, and of this one."""
        kernels = [name for name, _, _, why in self.asked if why in shrink.NOT_CHECKED]
        text = _NOT_HERE + (f"; of this job {', '.join(kernels)}" if kernels else "")
        unnamed = f"; {self.unnamed:,} parameters that checkpoints do not name"
        return text + (unnamed if self.unnamed else "")

    def to_json(self) -> dict[str, object]:
        shown = {"world": str(self.world), "copy": str(self.copy), "changes": self.asked,
                 "not_checked": self.not_checked}  # fmt: skip
        return {**asdict(self), **shown}


def verify(
    line: Line,
    against: Line | None,
    folder: Path,
    say: Say,
    *,
    bisect: bool,
    resume: bool = False,
    precise: bool = False,
) -> Verdict:
    """Run the copy of ``line`` beside its reference, or beside the copy of ``against``.

    Args:
        folder: for what ranks keep.
        say: tells the user how far it is.
        bisect: whether to look for the flag that makes a difference.
        resume: whether other layouts go on from checkpoints, too.
        precise: whether all runs compute in float64.

    Raises UsageError for a job that cannot be shrunk or that Megatron refuses.
    """
    copy = _copy(line)
    verdict = Verdict(line.words, line.world, copy)
    layers = 2 if against is None else 4
    job = SmallRun(folder, line.words, line.world, copy, copy, layers=layers, precise=precise)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Server(line.python))

        def kept(name: str, run: SmallRun, by: Server = server) -> Kept:
            say(f"{name}: {counted(run.here.size, 'rank')}")
            place = by.run(replace(run, folder=folder / name.replace(" ", "-")))
            return Kept(place, run.here)

        try:
            if against is None:
                one = shrink.one_rank(copy)
                second, by = replace(job, here=one, left_out=tuple(shrink.PARTS)), server
            else:
                its, words = _copy(against), against.words
                second = replace(job, words=words, job=against.world, copy=its, here=its)
                by = stack.enter_context(Server(against.python))
            name = "copy"
            found = kept(name, replace(job, saves=resume))
            name = "reference" if against is None else "other job"
            other = kept(name, second, by)
            rounded = kept(f"{name} rounded otherwise", replace(second, rounded=True), by)
        except RankError as error:
            if error.kind in _REFUSALS or error.exit_code == 2:
                raise UsageError(f"the {name} is refused: {error.message}", error.fix) from None
            verdict.why = f"the {name} failed: {error.message}"
            return verdict
        _judge(verdict, LayoutComparison(found, other, rounded, verdict.iterations))

        def compare(name: str, run: SmallRun) -> LayoutComparison:
            return LayoutComparison(kept(name, run), other, rounded, run.iterations)

        first = verdict.difference
        if first is not None and 0 < first.error < _NEAR * first.tolerance and not precise:
            say("near the tolerance: decided in float64")
            folder /= "float64"
            return verify(line, against, folder, say, bisect=bisect, resume=resume, precise=True)
        if first is not None and bisect and against is None:
            _bisect(verdict, job, compare)
        if verdict.same and resume:
            _resume(verdict, job, compare)
    return verdict


_NEAR = 30  # times what is allowed: sums that cancel may be this far off by roundings alone
_REFUSALS = ("AssertionError", "ValueError", "NotImplementedError", "UnsupportedError",
             "ImportError", "ModuleNotFoundError")  # fmt: skip


def _copy(line: Line) -> World:
    wide = "--no-overlap-p2p-communication" in line.words
    return shrink.small_world(line.world, line.dp_known, wide)


def _judge(verdict: Verdict, compared: LayoutComparison) -> None:
    facts, other = compared.job.facts, compared.other
    verdict.changes, verdict.parts = facts[0]["changes"], facts[0]["parts"]
    verdict.unnamed = max(one["unnamed"] for one in facts)
    if not other.losses:
        raise UnsupportedError("the reference says no loss", fix="a script that uses pretrain()")
    first = verdict.difference = compared.first()
    verdict.reports = compared.reports()
    verdict.worst, verdict.tolerance = compared.worst, compared.tolerance
    verdict.same = first is None
    if first is not None and first.what == "initial parameter":
        verdict.same, verdict.why = None, "the two do not start from the same parameters"
    verdict.counts = {
        "losses": len(other.losses),
        "gradients": len(other.tensors("gradient", 1)) * verdict.iterations,
        "parameters": len(other.tensors("parameter", 0)) * 2,
    }


def _resume(verdict: Verdict, job: SmallRun, compare: Compare) -> None:
    """Ranks without tp, pp and cp go on from the copy's checkpoint for an iteration, and the copy
    from theirs.  They keep ep: with it Megatron has an optimizer for experts of its own."""
    alone = [part for part in shrink.PARTS if part != "--use-distributed-optimizer"]
    few = replace(shrink.one_rank(job.copy), size=job.copy.ep, ep=job.copy.ep)
    elsewhere = replace(job, here=few, left_out=alone, saves=True)
    runs = [("copy", job), ("resumed elsewhere", elsewhere), ("resumed by the copy", job)]
    for at, ((before, _), (name, run)) in enumerate(itertools.pairwise(runs), 1):
        folder = str(job.folder / before.replace(" ", "-"))
        try:
            compared = compare(name, replace(run, resumed=(folder, at), iterations=at + 1))
        except RankError as error:
            verdict.same, verdict.why = None, f"{name} from iteration {at}: {error.message}"
            return
        verdict.difference = compared.first(at)
        verdict.worst[name] = max(compared.worst.values())
        if verdict.difference is not None:
            verdict.same, verdict.run = False, f"{name} from iteration {at} ({few})"
            return


def _bisect(verdict: Verdict, job: SmallRun, compare: Compare) -> None:
    """Leave out one part after the other, until the difference is gone without one."""
    assert verdict.difference is not None
    iterations = max(1, verdict.difference.iteration)
    for part in verdict.parts:
        here = shrink.without(verdict.copy, part)
        if part not in shrink.PARTS and here is None:
            continue
        run = replace(job, left_out=(part,), iterations=iterations, here=here or job.here)
        verdict.tried.append(part)
        try:
            compared = compare(f"without {part.lstrip('-')}", run)
        except RankError:
            continue  # Megatron refuses the rest
        if compared.first() is None:
            verdict.culprits.append(part)
            return
