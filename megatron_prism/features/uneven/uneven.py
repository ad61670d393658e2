"""What comes of inputs that differ between ranks: calls that match or not, time and memory.

In : programs of equal ranks, and words that say what some ranks get.  Out: ``UnevenResult``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_prism.cli import arguments, what_ifs
from megatron_prism.core.errors import UsageError
from megatron_prism.core.programs.program import Programs
from megatron_prism.core.programs.slices import open_programs
from megatron_prism.core.units import counted
from megatron_prism.core.world import World
from megatron_prism.features.uneven import drawn
from megatron_prism.features.uneven.drawn import DrawnRun
from megatron_prism.features.uneven.input_ranges import InputRange, Search, read_range, search
from megatron_prism.features.uneven.inputs import (
    UnevenInput,
    join_counts,
    read_input,
    read_lengths_file,
)
from megatron_prism.features.uneven.iterations import IterationOutcome, examine_iterations
from megatron_prism.features.uneven.kinds import InputKind
from megatron_prism.features.uneven.mixed_lengths import LengthCaptures
from megatron_prism.features.uneven.outcome import Outcome
from megatron_prism.features.uneven.rank_programs import Sources
from megatron_prism.features.uneven.samples import Batches, holds_lists

_CAPTURE, _ITERATIONS, _SEED = "capture", "iterations", "seed"
_KEYS = (*(kind.value for kind in InputKind), _CAPTURE)


@dataclass(frozen=True)
class _Words:
    """What ranks get, in words.

    Attributes:
        inputs: Kind -> ``RANKS:VALUE`` words, or files.
        captures: Folders of the job at other lengths.
        iterations: Of a run, or draws; None: not said.
        seed: Of the draws; None: not said.
    """

    inputs: dict[InputKind, list[str]]
    captures: Sequence[str]
    iterations: int | None
    seed: int | None


@dataclass(frozen=True)
class UnevenResult:
    """What comes of the inputs.

    Attributes:
        calls: Of one iteration or of several; None: combinations were searched.
        search: Of combinations; None: nothing was drawn from a range.
        run: Times and memory of a run; None: no run is asked for, or it stops.
    """

    calls: IterationOutcome | None
    search: Search | None = None
    run: DrawnRun | None = None

    @property
    def outcome(self) -> Outcome:
        """Whether the job stops, and how."""
        if self.search is not None:
            return self.search.outcome
        assert self.calls is not None  # one of both is there
        return self.calls.outcome

    @property
    def stops(self) -> bool:
        """Whether the job hangs or its calls do not fit."""
        return self.outcome.stops

    def to_text(self) -> str:
        """Write it for a terminal."""
        if self.run is not None:
            return drawn.to_text(self.run)
        if self.search is not None:
            return _text_of_search(self.search)
        head = ""
        if self.calls is not None and self.calls.iterations > 1:
            head = f"iteration {self.calls.iteration} of {self.calls.iterations}: "
            if not self.stops:
                distinct = self.calls.distinct
                head = f"{self.calls.iterations} iterations, {distinct} of them different: "
        return head + text_of(self.outcome)

    def to_json(self) -> dict[str, object]:
        """Make its JSON form."""
        value = _as_json(self.outcome)
        if self.calls is not None:
            value["iteration"] = self.calls.iteration
            value["iterations"] = self.calls.iterations
        if self.search is not None:
            value["search"] = {
                "iterations": self.search.iterations,
                "examined": self.search.examined,
                "drawn": self.search.drawn,
                "stopping": self.search.stopping,
                "refused": self.search.refused,
                "refusal": self.search.refusal,
            }
        if self.run is not None:
            value["drawn"] = drawn.to_json(self.run)
        return value

    def rows(self) -> list[dict[str, object]]:
        """Make a row for each iteration of a run, or for each finding."""
        if self.run is not None:
            return _rows_of_run(self.run)
        return _rows(self.outcome)


@dataclass(frozen=True)
class Question:
    """What the words ask.

    Attributes:
        sources: Where programs come from.
        inputs: What ranks get.
        ranges: Of what is drawn.
        batches: Samples of a run; None: no run is asked for.
        iterations: That are asked for; None: nobody says how many.
        seed: Of the draws; None: nobody says.
    """

    sources: Sources
    inputs: Sequence[UnevenInput]
    ranges: Sequence[InputRange]
    batches: Batches | None
    iterations: int | None
    seed: int | None


def read_question(captured: Programs, words: Sequence[str]) -> Question:
    """Read the words of the command.

    Args:
        captured: Of a job whose ranks all get the same.
        words: As of ``uneven``.

    Raises:
        UsageError: Words that do not go together, or name no ranks.
        PrismError: Captures cannot be had.
    """
    asked = _read(words)
    drawn_file = _drawn_file(asked)
    inputs, ranges = _inputs(asked, captured.world, drawn_file)
    captures = [open_programs(path) for path in asked.captures]
    lengths = None
    if InputKind.LENGTHS in asked.inputs:
        lengths = LengthCaptures(captured, captures)
    elif captures:
        raise UsageError("capture= without lengths=", fix="lengths=dp=1:4096,2048")
    batches = None
    if lengths is not None and not ranges:
        batches = _batches(asked, drawn_file, inputs, lengths)
    sources = Sources(captured, what_ifs.with_microbatches, open_programs, lengths)
    return Question(sources, inputs, ranges, batches, asked.iterations, asked.seed)


def uneven(
    captured: Programs,
    words: Sequence[str],
    *,
    machine: str | None = None,
    calibration: str | None = None,
    limit: int = 0,
) -> UnevenResult:
    """Find whether calls still match if inputs of ranks differ, and what a run needs.

    Args:
        captured: Of a job whose ranks all get the same.
        words: What ranks get, as the command takes it: ``microbatches=dp=3:7``, ``loader=dp=3:5``,
            ``lengths=dp=1:4096,2048`` or ``lengths=FILE`` with ``capture=DIR``,
            ``programs=dp=0:DIR``, ``iterations=200``, ``seed=1``.
        machine: As of ``price``; of a run of drawn batches alone.
        calibration: As of ``price``; of such a run alone.
        limit: Memory of a GPU, bytes; of such a run alone.  0: nobody says.

    Raises:
        UsageError: Words that do not go together, or name no ranks.
        PrismError: Programs of the inputs cannot be had.
    """
    return answer_question(read_question(captured, words), machine, calibration, limit)


def answer_question(
    question: Question, machine: str | None, calibration: str | None, limit: int
) -> UnevenResult:
    """Answer what ``read_question`` read; arguments and errors as of ``uneven``."""
    sources = question.sources
    if question.batches is not None:
        run = drawn.examine_run(sources, question.batches, machine, calibration, limit)
        # what stops the job comes before how long its steps take
        if run.calls.outcome.stops:
            return UnevenResult(run.calls)
        return UnevenResult(run.calls, run=run)
    # calls match or not, whatever the GPU
    options = {"--machine": machine, "--calibration": calibration, "--limit": limit}
    for flag, value in options.items():
        if value:
            fix = "lengths=FILE iterations=200"
            raise UsageError(f"{flag} is of a run of drawn batches", fix=fix)
    inputs, ranges = question.inputs, question.ranges
    if ranges:
        iterations = question.iterations or drawn.DEFAULT_ITERATIONS
        seed = question.seed or 0
        return UnevenResult(None, search(sources, inputs, ranges, iterations, seed))
    # other inputs are of one iteration: left unread, the word would seem to be heard
    if question.iterations is not None:
        raise UsageError("iterations= without lengths=", fix="lengths=dp=1:4096,2048")
    return UnevenResult(examine_iterations(sources, inputs))


# -- words -----------------------------------------------------------------------------------------
def _read(words: Sequence[str]) -> _Words:
    """Read the words; UsageError if there is no input among them."""
    readers: dict[str, Callable[[str], object]] = dict.fromkeys(_KEYS, arguments.name)
    readers[_ITERATIONS] = arguments.count(1, 1_000_000, "iterations=200")
    readers[_SEED] = arguments.count(0, 1 << 62, "seed=1")
    values = arguments.read(words, readers, "uneven", several=_KEYS)
    inputs = {kind: values[kind.value] for kind in InputKind if kind.value in values}
    if not inputs:
        raise UsageError("no rank gets another input", fix="prism uneven DIR microbatches=dp=1:3")
    captures = values.get(_CAPTURE, [])
    return _Words(inputs, captures, values.get(_ITERATIONS), values.get(_SEED))


def draws_lengths(words: Sequence[str]) -> bool:
    """Say whether words name a file from which lengths are drawn, so that a seed decides them."""
    for word in words:
        key, _, text = word.partition("=")
        if key == InputKind.LENGTHS.value and _is_drawn_file(text):
            return not text.endswith(".idx")
    return False


def _is_drawn_file(text: str) -> bool:
    """Say whether a value of ``lengths=`` is a file that does not list lengths in their order."""
    return os.path.isfile(text) and (text.endswith(".idx") or not holds_lists(text))


def _drawn_file(words: _Words) -> str:
    """Find the file from which samples are drawn; "": there is none.

    Raises:
        UsageError: There are other inputs beside it.
    """
    lengths = words.inputs.get(InputKind.LENGTHS, [])
    files: list[str] = []
    for text in lengths:
        if _is_drawn_file(text):
            files.append(text)
    if not files:
        return ""
    if len(lengths) > 1 or len(words.inputs) > 1:
        raise UsageError(
            f"{files[0]} says what all ranks get, and there is another input",
            fix="one of them after the other",
        )
    return files[0]


def _inputs(
    words: _Words, world: World, drawn_file: str
) -> tuple[list[UnevenInput], list[InputRange]]:
    """Make the inputs that the words say, and the ranges of what is drawn.

    Raises:
        UsageError: ``seed=`` where nothing is drawn.
    """
    inputs: list[UnevenInput] = []
    ranges: list[InputRange] = []
    for kind in InputKind:
        for text in words.inputs.get(kind, []):
            if text == drawn_file:
                continue
            # a file of lengths
            if kind is InputKind.LENGTHS and os.path.isfile(text):
                inputs += read_lengths_file(text, world)
                continue
            input_range = read_range(kind, text, world)
            if input_range is not None:
                ranges.append(input_range)
            else:
                inputs.append(read_input(kind, text, world))
    if words.seed is not None and not drawn_file and not ranges:
        raise UsageError("seed= without a file or a range from which is drawn", fix="leave it out")
    return join_counts(inputs), ranges


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
    if any(uneven_input.count >= 0 for uneven_input in inputs):
        raise UsageError("iterations= beside another number of microbatches", fix="leave it out")
    batches = drawn.batches_of_lists(inputs, lengths)
    if len(batches) != wanted:
        raise UsageError(
            f"lengths of {len(batches)} iterations are listed, not of {wanted}",
            fix=f"iterations={len(batches)}",
        )
    return batches


# -- forms -----------------------------------------------------------------------------------------
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


def _text_of_search(result: Search) -> str:
    """Write what a search found for a terminal."""
    draws = counted(result.drawn, "draw")
    if result.drawn < result.iterations:
        draws += f" of {result.iterations:,}"
    combinations = counted(result.examined, "different combination")
    head = f"{draws}, {combinations} examined"
    if result.outcome.stops:
        head += f": {result.stopping:,} of the draws stop"
    else:
        head += ": all match"
    lines = [head]
    # ends of the ranges, which no draw had, may be refused alone
    if result.refusal and not result.refused:
        lines.append(f"a combination of the ranges' ends cannot be had: {result.refusal}")
    elif result.refusal:
        lines.append(f"{counted(result.refused, 'draw')} cannot be had: {result.refusal}")
    if result.outcome.stops:
        lines += ["", text_of(result.outcome)]
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
