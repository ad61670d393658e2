"""A job's small copy beside its reference, the first difference, and the flag that makes it.

In : the job's command line and world.  Out: a ``Verdict``.  The reference is one rank without any
part of the composition, or the copy of another command line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_prism.core.errors import UnsupportedError, UsageError
from megatron_prism.core.units import counted
from megatron_prism.core.world import World
from megatron_prism.verify import shrink
from megatron_prism.verify.compare import Kept, LayoutComparison, LayoutDifference
from megatron_prism.verify.ranks import RankError, Server
from megatron_prism.verify.shrink import SmallRun

Say = Callable[[str], None]
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
    worst     : kind of value -> the largest share of its tolerance that an error took
    counts    : kind of value -> how many were compared
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
        return {
            "same": self.same, "why": self.why, "world": str(self.world), "copy": str(self.copy),
            "difference": self.difference and self.difference.to_json(),
            "culprits": self.culprits, "tried": self.tried, "parts": self.parts,
            "changes": self.asked, "not_checked": self.not_checked, "worst": self.worst,
            "counts": self.counts, "tolerance": self.tolerance, "iterations": self.iterations,
        }  # fmt: skip


def verify(line: Line, against: Line | None, folder: Path, say: Say, *, bisect: bool) -> Verdict:
    """Run the copy of ``line`` beside its reference, or beside the copy of ``against``.

    Args:
        folder: for what ranks keep.
        say: tells the user how far it is.
        bisect: whether to look for the flag that makes a difference.

    Raises UsageError for a job that cannot be shrunk or that Megatron refuses.
    """
    copy = _copy(line)
    verdict = Verdict(line.words, line.world, copy)
    layers = 2 if against is None else 4
    job = SmallRun(folder, line.words, line.world, copy, copy, layers=layers)
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
            name = "reference" if against is None else "other job"
            other = kept(name, second, by)
            rounded = kept(f"{name} rounded otherwise", replace(second, rounded=True), by)
            name = "copy"
            found = kept(name, job)
        except RankError as error:
            if error.kind in _REFUSALS or error.exit_code == 2:
                raise UsageError(f"the {name} is refused: {error.message}", error.fix) from None
            verdict.why = f"the {name} failed: {error.message}"
            return verdict
        _judge(verdict, found, other, rounded)
        if verdict.difference is not None and bisect and against is None:
            _bisect(verdict, job, other, rounded, kept)
    return verdict


_REFUSALS = ("AssertionError", "ValueError", "NotImplementedError", "UnsupportedError")


def _copy(line: Line) -> World:
    wide = "--no-overlap-p2p-communication" in line.words
    return shrink.small_world(line.world, line.dp_known, wide)


def _comparison(found: Kept, other: Kept, rounded: Kept, iterations: int) -> LayoutComparison:
    count = len([place for place in other.losses if place[0] == 1]) or 1
    terms = count * shrink.SEQUENCE * shrink.HIDDEN
    return LayoutComparison(found, other, rounded, iterations, terms, count // found.world.dp)


def _judge(verdict: Verdict, found: Kept, other: Kept, rounded: Kept) -> None:
    facts = found.facts[0]
    verdict.changes, verdict.parts = facts["changes"], facts["parts"]
    verdict.unnamed = max(one["unnamed"] for one in found.facts)
    compared = _comparison(found, other, rounded, verdict.iterations)
    if not other.losses:
        raise UnsupportedError("the reference says no loss", fix="a script that uses pretrain()")
    verdict.difference = compared.first()
    verdict.worst, verdict.tolerance = compared.worst, compared.tolerance
    verdict.same = verdict.difference is None
    if not verdict.same and verdict.difference.what == "initial parameter":  # type: ignore[union-attr]
        verdict.same = None
        verdict.why = "the two do not start from the same parameters"
    verdict.counts = {
        "losses": len(other.losses),
        "gradients": len(other.tensors("gradient", 1)) * verdict.iterations,
        "parameters": len(other.tensors("parameter", 0)) * 2,
    }


def _bisect(
    verdict: Verdict,
    job: SmallRun,
    other: Kept,
    rounded: Kept,
    kept: Callable[[str, SmallRun], Kept],
) -> None:
    """Leave out one part after the other, until the difference is gone without one."""
    assert verdict.difference is not None
    iterations = max(1, verdict.difference.iteration)
    for part in verdict.parts:
        here = shrink.without(verdict.copy, part)
        if part not in shrink.PARTS and here is None:
            continue
        run = replace(job, left_out=(part,), iterations=iterations)
        if here is not None:
            run = replace(run, here=here)
        verdict.tried.append(part)
        try:
            found = kept(f"without {part.lstrip('-')}", run)
        except RankError:
            continue  # Megatron refuses the rest
        if _comparison(found, other, rounded, iterations).first() is None:
            verdict.culprits.append(part)
            return
