"""``prism uneven``: what comes of inputs that differ between ranks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_prism.cli import arguments, what_ifs
from megatron_prism.cli.command import (
    CALIBRATION,
    LIMIT,
    MACHINE,
    PROGRAMS,
    Command,
    HelpGroup,
    settings,
)
from megatron_prism.cli.memory_arguments import limit_of
from megatron_prism.cli.output import Answer
from megatron_prism.core.errors import UsageError
from megatron_prism.features.uneven.kinds import InputKind

if TYPE_CHECKING:
    from megatron_prism.core.world import World
    from megatron_prism.features.uneven.drawn import DrawnRun
    from megatron_prism.features.uneven.inputs import UnevenInput
    from megatron_prism.features.uneven.iterations import IterationOutcome
    from megatron_prism.features.uneven.mixed_lengths import LengthCaptures
    from megatron_prism.features.uneven.outcome import Outcome
    from megatron_prism.features.uneven.rank_programs import Sources
    from megatron_prism.features.uneven.samples import Batches

_CAPTURE, _ITERATIONS, _SEED = "capture", "iterations", "seed"
_KEYS = (*(kind.value for kind in InputKind), _CAPTURE)


@dataclass(frozen=True)
class _Words:
    """The words of the command.

    Attributes:
        inputs: Kind -> its words, without their key.
        captures: Folders of the job at other lengths.
        iterations: Of a run; None: not said.
        seed: Of the draws; None: not said.
    """

    inputs: dict[InputKind, list[str]]
    captures: list[str]
    iterations: int | None
    seed: int | None


def uneven(args: argparse.Namespace) -> Answer:
    """Do calls still match if some ranks get other lengths, fewer microbatches, or no more data?

    prism uneven DIR microbatches=dp=3:7
    prism uneven DIR loader=dp=3:5
    prism uneven DIR lengths=dp=1:4096,2048,4096,1024 capture=DIR2048 capture=DIR1024
    prism uneven DIR programs=dp=0:EVALUATION

    DIR is a capture in which all ranks get the same.  Exit status 1 if the job would hang or its
    calls do not fit, with the first call and its line in Megatron, and the smallest example.

    What ranks get (each as often as needed; a rank in one of them):
      microbatches=RANKS:N      their loop has N turns: captured steps in the order of Megatron's
                                scheduler
      loader=RANKS:N            their data iterator raises StopIteration after N microbatches
      lengths=RANKS:L,L,…       tokens of a sample, of each microbatch (of several iterations one
                                after the other), or one for all
      lengths=FILE              the same, a line for each dp rank: {"dp": 1, "lengths": [4096]}
      lengths=FILE              how often lengths occur: {"length": 4096, "count": 17}, or packed
                                {"documents": [1000, 3096]}; "dp": 1 for that dp rank alone
      lengths=DATA.idx          the documents of a data set, packed as Megatron packs them
      iterations=N seed=N       how many iterations are drawn (200), and with which seed
      capture=DIR               the job at another --seq-length; two or more say what lengths in
                                between do, and how long steps take
      programs=RANKS:DIR        they do what was captured in DIR: another kind of batch, images, an
                                evaluation
    """
    from megatron_prism.core.programs.slices import open_programs
    from megatron_prism.features.uneven.iterations import examine_iterations
    from megatron_prism.features.uneven.mixed_lengths import LengthCaptures
    from megatron_prism.features.uneven.rank_programs import Sources

    words = _words(args.settings)
    captured = open_programs(args.programs)
    drawn_file = _drawn_file(words)
    inputs = _inputs(words, captured.world)
    captures = [open_programs(path) for path in words.captures]
    lengths = None
    has_lengths = any(uneven_input.kind is InputKind.LENGTHS for uneven_input in inputs)
    if drawn_file or has_lengths:
        lengths = LengthCaptures(captured, captures)
    elif captures or words.iterations is not None:
        word = _CAPTURE if captures else _ITERATIONS
        raise UsageError(f"{word}= without lengths=", fix="lengths=dp=1:4096,2048")
    sources = Sources(captured, what_ifs.with_microbatches, open_programs, lengths)
    batches = None
    if lengths is not None:
        batches = _batches(words, drawn_file, inputs, lengths)
    if batches is not None:
        return _answer_of_run(args, sources, batches)
    # calls match or not, whatever the GPU
    for name in (MACHINE, CALIBRATION, LIMIT):
        flag = name[0][0]
        if getattr(args, flag.removeprefix("--")) is not None:
            fix = "lengths=FILE iterations=200"
            raise UsageError(f"{flag} is of a run of drawn batches", fix=fix)
    decisive = examine_iterations(sources, inputs)
    return _answer(decisive)


def _answer(decisive: IterationOutcome) -> Answer:
    """Write what comes of inputs."""
    outcome = decisive.outcome
    rows = _rows(outcome)
    place = {"iteration": decisive.iteration, "iterations": decisive.iterations}
    head = ""
    if decisive.iterations > 1:
        head = f"iteration {decisive.iteration} of {decisive.iterations}: "
        if not outcome.stops:
            head = f"{decisive.iterations} iterations, {decisive.distinct} of them different: "
    return Answer(
        lambda: {**_as_json(outcome), **place},
        lambda: print(head + text_of(outcome)),
        lambda: rows,
        status=int(outcome.stops),
    )


def _answer_of_run(args: argparse.Namespace, sources: Sources, batches: Batches) -> Answer:
    """Write what comes of the samples of a run."""
    from megatron_prism.features.uneven import drawn

    limit = limit_of(args.limit) or 0
    run = drawn.examine_run(sources, batches, args.machine, args.calibration, limit)
    stopping = _answer(run.calls)
    # what stops the job comes before how long its steps take
    if run.calls.outcome.stops:
        return stopping
    return Answer(
        lambda: {**stopping.value(), "drawn": drawn.to_json(run)},
        lambda: print(drawn.to_text(run)),
        lambda: _rows_of_run(run),
    )


def _rows_of_run(run: DrawnRun) -> list[dict[str, object]]:
    """Make a row for each iteration of a run."""
    rows: list[dict[str, object]] = []
    if run.times is None:
        return rows
    longest = run.batches.tokens.max(axis=(1, 2))
    columns = (longest, run.times.step_ns, run.times.balanced_ns)
    values = zip(*[column.tolist() for column in columns], strict=True)
    for number, (longest_sample, step_ns, balanced_ns) in enumerate(values, 1):
        rows.append(
            {
                "iteration": number,
                "longest_sample": longest_sample,
                "step_ns": step_ns,
                "balanced_ns": balanced_ns,
            }
        )
    return rows


def _drawn_file(words: _Words) -> str:
    """Take the file from which samples are drawn out of the words; "": there is none.

    Raises:
        UsageError: There are other inputs beside it, or ``seed=`` without it.
    """
    from megatron_prism.features.uneven.samples import holds_lists

    lengths = words.inputs.get(InputKind.LENGTHS, [])
    files: list[str] = []
    for text in lengths:
        if os.path.isfile(text) and (text.endswith(".idx") or not holds_lists(text)):
            files.append(text)
    if not files:
        if words.seed is not None:
            raise UsageError(
                "seed= without a file from which samples are drawn", fix="leave it out"
            )
        return ""
    if len(lengths) > 1 or len(words.inputs) > 1:
        raise UsageError(
            f"{files[0]} says what all ranks get, and there is another input",
            fix="one of them after the other",
        )
    del words.inputs[InputKind.LENGTHS]
    return files[0]


def _batches(
    words: _Words,
    drawn_file: str,
    inputs: Sequence[UnevenInput],
    lengths: LengthCaptures,
) -> Batches | None:
    """Make the samples of a run; None: no run is asked for, but one of its iterations.

    Raises:
        UsageError: ``iterations=`` beside another input, or another number than is listed, or
            ``seed=`` beside a data set.
    """
    from megatron_prism.features.uneven import drawn

    wanted = words.iterations
    # Megatron shuffles the data set by the job's own seed
    if drawn_file.endswith(".idx") and words.seed is not None:
        raise UsageError(
            "seed= beside a data set, which the job's --seed shuffles", fix="leave it out"
        )
    if drawn_file:
        iterations = wanted or drawn.DEFAULT_ITERATIONS
        return drawn.batches_of_file(drawn_file, lengths, iterations, words.seed or 0)
    if wanted is None:
        return None
    if any(uneven_input.kind is not InputKind.LENGTHS for uneven_input in inputs):
        raise UsageError("iterations= beside another input than lengths=", fix="leave it out")
    batches = drawn.batches_of_lists(inputs, lengths)
    if len(batches) != wanted:
        raise UsageError(
            f"lengths of {len(batches)} iterations are listed, not of {wanted}",
            fix=f"iterations={len(batches)}",
        )
    return batches


def _words(given: Sequence[str]) -> _Words:
    """Read the words; UsageError if there is no input among them."""
    readers: dict[str, arguments.Reader] = dict.fromkeys(_KEYS, arguments.name)
    readers[_ITERATIONS] = arguments.count(1, 1_000_000, "iterations=200")
    readers[_SEED] = arguments.count(0, 1 << 62, "seed=1")
    values = arguments.read(given, readers, "uneven", several=_KEYS)
    inputs = {kind: values[kind.value] for kind in InputKind if kind.value in values}
    words = _Words(inputs, values.get(_CAPTURE, []), values.get(_ITERATIONS), values.get(_SEED))
    if not inputs:
        raise UsageError("no rank gets another input", fix="prism uneven DIR microbatches=dp=1:3")
    return words


def _inputs(words: _Words, world: World) -> list[UnevenInput]:
    """Make the inputs that the words say."""
    from megatron_prism.features.uneven.inputs import read_input, read_lengths_file

    inputs: list[UnevenInput] = []
    for kind in InputKind:
        for text in words.inputs.get(kind, []):
            # a file of lengths
            if kind is InputKind.LENGTHS and os.path.isfile(text):
                inputs += read_lengths_file(text, world)
                continue
            inputs.append(read_input(kind, text, world))
    return inputs


def text_of(outcome: Outcome) -> str:
    """Write an outcome for a terminal."""
    lines = [*outcome.counts]
    if outcome.verdict == "matched":
        lines.append("every call is matched: the job goes on")
        return "\n".join(lines)
    words = " ".join(map(str, outcome.smallest))
    lines.append(f"the job stops; smallest example: {words}")
    for finding in outcome.findings:
        lines += ["", str(finding)]
    if outcome.diagnosis is not None:
        lines += ["", str(outcome.diagnosis)]
    if outcome.advice:
        lines += ["", f"why: {outcome.advice}"]
    return "\n".join(lines)


def _as_json(outcome: Outcome) -> dict[str, object]:
    """Make the JSON form of an outcome."""
    diagnosis = None
    if outcome.diagnosis is not None:
        diagnosis = outcome.diagnosis.to_json()
    return {
        "schema": "prism.uneven/1",
        "verdict": outcome.verdict,
        "inputs": list(map(str, outcome.inputs)),
        "smallest": list(map(str, outcome.smallest)),
        "counts": list(outcome.counts),
        "findings": _rows(outcome),
        "diagnosis": diagnosis,
        "advice": outcome.advice,
    }


def _rows(outcome: Outcome) -> list[dict[str, object]]:
    """Make a row for each finding."""
    rows: list[dict[str, object]] = []
    for finding in outcome.findings:
        rows.append(
            {
                "kind": finding.kind,
                "group": finding.group,
                "ranks": list(finding.ranks),
                "call": finding.number,
                "picture": finding.picture,
                "likely": finding.likely,
            }
        )
    return rows


_LIMIT = LIMIT[0], {**LIMIT[1], "help": "memory of a GPU that drawn batches may exceed"}
_INPUTS = settings("what ranks get: microbatches=dp=3:7, loader=dp=3:5, lengths=dp=1:4096,2048")
COMMANDS = {
    "uneven": Command(
        uneven,
        (PROGRAMS, _INPUTS, MACHINE, CALIBRATION, _LIMIT),
        group=HelpGroup.DEBUG,
        programs=0,
        shows_progress=True,
    ),
}
