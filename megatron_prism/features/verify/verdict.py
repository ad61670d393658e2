"""A job's small copy beside its reference, the first difference, and the flag that makes it.

In : the job's command line and world.  Out: a ``Verdict``.  The reference is one rank without any
part of the composition, or the copy of another command line.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from megatron_prism.core.errors import UnsupportedError, UsageError
from megatron_prism.core.units import counted
from megatron_prism.core.world import World
from megatron_prism.features.verify import shrink
from megatron_prism.features.verify.compare import INITIAL, LayoutComparison, LayoutDifference
from megatron_prism.features.verify.kept import Kept, UndecidedError
from megatron_prism.features.verify.ranks import RankError, Server
from megatron_prism.features.verify.shrink import SmallRun

Say = Callable[[str], None]
Compare = Callable[[str, SmallRun], LayoutComparison]  # a run, under a name, with the reference
_NOT_HERE = (
    "fused and attention kernels' own arithmetic, FP8 and FP4, NVLS and SHARP reductions, DeepEP"
)


@dataclass(frozen=True)
class Line:
    """A command line: script and arguments, of what world, whether that says its data-parallel
    size, and by which Python.
    """

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
    unnamed   : parameters that no checkpoint names -> [elements, whether no gradient reaches them]
    not_compared : sentences on what runs may have and what was not compared
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
    unnamed: dict[str, tuple[int, bool]] = field(default_factory=dict)
    not_compared: list[str] = field(default_factory=list)
    run: str = ""
    reports: list[LayoutDifference] = field(default_factory=list)

    @property
    def asked(self) -> list[list[str]]:
        """Changes of what the command line says, not of defaults."""
        typed = {word.partition("=")[0] for word in self.words}
        asked = []
        for change in self.changes:
            flag = "--" + change[0].replace("_", "-")
            if any(word.startswith(flag) for word in typed):
                asked.append(change)
        return asked

    @property
    def not_checked(self) -> str:
        """What no run without a GPU can check: of every job, and of this one."""
        kernels = [name for name, _, _, why in self.asked if why in shrink.NOT_CHECKED]
        sentences = [_NOT_HERE]
        if kernels:
            sentences.append(f"of this job {', '.join(kernels)}")
        # parameters that no checkpoint names
        for name, (elements, is_idle) in self.unnamed.items():
            idle = ""
            if is_idle:
                idle = ", no gradient reaches it"
            sentences.append(f"{name} ({elements:,} elements that no checkpoint names{idle})")
        return "; ".join([*sentences, *self.not_compared])

    def to_json(self) -> dict[str, object]:
        """Return all fields; a number that is none is its name, as JSON has no word for it."""
        shown = {
            "world": str(self.world),
            "copy": str(self.copy),
            "changes": self.asked,
            "not_checked": self.not_checked,
        }
        return {name: _finite(value) for name, value in {**asdict(self), **shown}.items()}


def _finite(value: object) -> object:
    """Return the same with NaN and infinity as text."""
    # JSON has no NaN and no infinity
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return value


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
        line: of the job.
        against: another line whose copy is the reference; None: one rank alone.
        folder: for what ranks keep.
        say: tells the user how far it is.
        bisect: whether to look for the flag that makes a difference.
        resume: whether other layouts go on from checkpoints, too.
        precise: whether all runs compute in float64.

    Raises:
        UsageError: the job cannot be shrunk, or Megatron refuses it.
    """
    copy = _copy(line)
    verdict = Verdict(line.words, line.world, copy)
    layers = 4
    if against is None:
        layers = 2
    job = SmallRun(folder, line.words, line.world, copy, copy, layers=layers, precise=precise)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Server(line.python))

        def kept(name: str, run: SmallRun, by: Server = server, title: str = "the copy") -> Kept:
            say(f"{name}: {counted(run.world.size, 'rank')}")
            place = by.run(replace(run, folder=folder / name.replace(" ", "-")))
            return Kept(place, run.world, title)

        try:
            # the reference is one rank that has all parts left out, or the copy of another line
            if against is None:
                alone = shrink.one_rank(copy)
                second, by = replace(job, world=alone, left_out=tuple(shrink.PARTS)), server
                title = "one rank alone"
            else:
                its, words = _copy(against), against.words
                second = replace(job, words=words, job=against.world, copy=its, world=its)
                by = stack.enter_context(Server(against.python))
                title = "the other job"
            name = "copy"
            copied = kept(name, replace(job, saves=resume))
            name = "other job"
            if against is None:
                name = "reference"
            reference = kept(name, second, by, title)
            rounded_name = f"{name} rounded otherwise"
            rounded = kept(rounded_name, replace(second, rounded=True), by, f"the {rounded_name}")
        except RankError as error:
            # Megatron refused the arguments, so that the line is wrong
            if error.kind in _REFUSALS or error.exit_code == 2:
                raise UsageError(f"the {name} is refused: {error.message}", error.fix) from None
            verdict.why = f"the {name} failed: {error.message}"
            return verdict
        _judge(verdict, LayoutComparison(copied, reference, rounded, verdict.iterations))

        def compare(name: str, run: SmallRun) -> LayoutComparison:
            return LayoutComparison(kept(name, run), reference, rounded, run.iterations)

        first = verdict.difference
        if first is not None and not precise and _is_near(first):
            say("a difference that roundings may make: decided in float64")
            folder /= "float64"
            return verify(line, against, folder, say, bisect=bisect, resume=resume, precise=True)
        # only against one rank is each flag of the job a suspect
        if first is not None and bisect and against is None:
            _bisect(verdict, job, compare)
        if verdict.same and resume:
            _resume(verdict, job, compare)
    return verdict


_NEAR = 30  # times what is allowed: sums that cancel may be this far off by roundings alone
_REFUSALS = (
    "AssertionError",
    "ValueError",
    "NotImplementedError",
    "UnsupportedError",
    "ImportError",
    "ModuleNotFoundError",
)


def _is_near(difference: LayoutDifference) -> bool:
    """Whether roundings alone may make a difference."""
    error = difference.error
    return error is not None and 0 < error < _NEAR * difference.tolerance


def _copy(line: Line) -> World:
    wide = "--no-overlap-p2p-communication" in line.words
    return shrink.small_world(line.world, line.dp_known, wide)


def _judge(verdict: Verdict, compared: LayoutComparison) -> None:
    """Put what was found between the copy and its reference into the verdict."""
    reference = compared.reference
    try:
        facts = compared.job.facts
        verdict.changes, verdict.parts = facts[0]["changes"], facts[0]["parts"]
        verdict.unnamed = _unnamed(compared.job)
        if not reference.losses:
            raise UnsupportedError(
                f"{reference.title} says no loss", fix="a script that uses pretrain()"
            )
        verdict.tolerance = compared.tolerance
        verdict.difference = compared.first()
        verdict.same = verdict.difference is None
        verdict.reports = compared.reports()
    except UndecidedError as error:
        verdict.same, verdict.why = None, error.message
    verdict.worst, verdict.not_compared = compared.worst, compared.not_compared
    # runs that cannot be compared have no numbers of values either
    if verdict.why:
        return
    # other initial values make every later difference
    if verdict.difference is not None and verdict.difference.what == INITIAL:
        verdict.same, verdict.why = None, "the two do not start from the same parameters"
    verdict.counts = {
        "losses": len(reference.losses),
        "gradients": len(reference.tensors("gradient", 1)) * verdict.iterations,
        "parameters": len(reference.tensors("parameter", 0)) * 2,
    }


def _unnamed(run: Kept) -> dict[str, tuple[int, bool]]:
    """Return name -> elements that no checkpoint names, and whether no gradient reaches them."""
    unnamed: dict[str, tuple[int, bool]] = {}
    for facts in run.facts:
        for name, (elements, is_idle) in facts["unnamed"].items():
            # idle on all ranks, or not idle at all
            highest, was_idle = unnamed.get(name, (0, True))
            unnamed[name] = max(highest, elements), was_idle and is_idle
    return unnamed


def _resume(verdict: Verdict, job: SmallRun, compare: Compare) -> None:
    """Ranks without tp, pp and cp go on from the copy's checkpoint for an iteration, and the copy
    from theirs.  They keep ep: with it Megatron has an optimizer for experts of its own.
    """
    alone = [part for part in shrink.PARTS if part != "--use-distributed-optimizer"]
    few = replace(shrink.one_rank(job.copy), size=job.copy.ep, ep=job.copy.ep)
    elsewhere = replace(job, world=few, left_out=alone, saves=True)
    runs = [("copy", job), ("resumed elsewhere", elsewhere), ("resumed by the copy", job)]
    # each run goes on from where the one before it wrote
    for at, ((before, _), (name, run)) in enumerate(itertools.pairwise(runs), 1):
        folder = str(job.folder / before.replace(" ", "-"))
        try:
            compared = compare(name, replace(run, resumed=(folder, at), iterations=at + 1))
        except RankError as error:
            verdict.same, verdict.why = None, f"{name} from iteration {at}: {error.message}"
            return
        try:
            verdict.difference = compared.first(at)
        except UndecidedError as error:
            verdict.same, verdict.why = None, f"{name} from iteration {at}: {error.message}"
            return
        verdict.worst[name] = max(compared.worst.values())
        if verdict.difference is not None:
            verdict.same, verdict.run = False, f"{name} from iteration {at} ({few})"
            return


def _bisect(verdict: Verdict, job: SmallRun, compare: Compare) -> None:
    """Leave out one part after the other, until the difference is gone without one."""
    assert verdict.difference is not None
    iterations = max(1, verdict.difference.iteration)
    for part in verdict.parts:
        smaller_world = shrink.without(verdict.copy, part)
        if part not in shrink.PARTS and smaller_world is None:
            continue
        run = replace(
            job, left_out=(part,), iterations=iterations, world=smaller_world or job.world
        )
        verdict.tried.append(part)
        try:
            first = compare(f"without {part.lstrip('-')}", run).first()
        except (RankError, UndecidedError):
            continue  # Megatron refuses the rest, or it does not come to its end
        if first is None:
            verdict.culprits.append(part)
            return
