"""Lengths in questions of other commands: ``prism predict``, ``prism replay``, ``prism fit``.

Where their words have ``lengths=``, the words are those of ``prism uneven``, and one run of drawn
batches answers: ``replay`` shows its times, ``fit`` its memory, and ``predict`` draws from its
steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_prism.cli import what_ifs
from megatron_prism.cli.file_answers import FileAnswer
from megatron_prism.cli.output import Answer
from megatron_prism.core.errors import UsageError
from megatron_prism.core.programs.program import Programs
from megatron_prism.core.units import format_bytes
from megatron_prism.features.uneven import drawn, uneven
from megatron_prism.memory.job_peaks import needed, peak_memory
from megatron_prism.replay.costs.machine import usable_memory
from megatron_prism.replay.drawn_steps import DrawnSteps
from megatron_prism.replay.priced_graph import price

_KEY = "lengths"
# options of ``prism fit`` that say nothing of a run of drawn batches
_OPTIONS_OF_ONE_BATCH = ("oom", "free", "draws", "try_changes", "of_class", "out", "html")


def read_steps(
    programs: Programs,
    words: Sequence[str],
    machine: str | None,
    calibration: str | None,
    seed: int,
) -> DrawnSteps | None:
    """Make the steps of a run of drawn batches; None: the words say nothing of lengths.

    Args:
        programs: Of the job whose samples have one length.
        words: As of ``prism uneven``.
        machine: As of ``price``.
        calibration: As of ``price``.
        seed: Of the draws; the samples of a data set are shuffled by the job's own.

    Raises:
        UsageError: The words say no run, or there is one capture alone.
        ProgramError: The job stops with these lengths.
    """
    if not any(word.startswith(f"{_KEY}=") for word in words):
        return None
    seeded = list(words)
    # a list has no seed, nor a data set; a seed among the words is what the user typed
    has_seed = any(word.startswith("seed=") for word in words)
    if uneven.draws_lengths(words) and not has_seed:
        seeded.append(f"seed={seed}")
    question = _question_of_run(programs, seeded, "predict")
    batches = question.batches
    assert batches is not None  # of a run
    return drawn.steps_of_run(question.sources, batches, machine, calibration)


def replay(
    args: argparse.Namespace, paths: Sequence[str], what_ifs_of_path: Sequence[Sequence[str]]
) -> Answer:
    """Answer for ``prism replay``: step times of the batches."""
    (path,), (words,) = paths, what_ifs_of_path
    # the option, in place of the word
    if args.iterations is not None:
        words = [*words, f"iterations={args.iterations}"]
    for name in ("html", "trace"):
        if getattr(args, name) is not None:
            raise UsageError(
                f"--{name} shows one iteration, and lengths= draws many",
                fix="--csv FILE has a row for each of them",
            )
    question = _question_of_run(what_ifs.open_job(path), words, "replay")
    result = uneven.answer_question(question, args.machine, args.calibration, limit=0)
    return _answer(result, drawn.RunPart.TIMES)


def fit(
    args: argparse.Namespace, paths: Sequence[str], what_ifs_of_path: Sequence[Sequence[str]]
) -> Answer:
    """Answer for ``prism fit``: the peak of the longest samples, and how often it is too much.

    Tensors may take what the limit leaves beside the segments, NCCL and the context of the job as
    it was captured.
    """
    (path,), (words,) = paths, what_ifs_of_path
    for name in _OPTIONS_OF_ONE_BATCH:
        if getattr(args, name):
            flag = {"try_changes": "try", "of_class": "class"}.get(name, name)
            raise UsageError(
                f"--{flag} is of a job whose samples have one length",
                fix=f"prism fit {path} --{flag}, without lengths=",
            )
    programs = what_ifs.open_job(path)
    question = _question_of_run(programs, words, "fit")
    # whose memory the limit is
    machine = price(programs, machine=args.machine, calibration=args.calibration).machine
    limit_bytes, _ = usable_memory(args.limit, machine, args.headroom or 0)
    device = args.device
    if device == "none":
        device = None
    report = peak_memory(programs, alloc_conf=args.alloc or "", device=device)
    beside_tensors = 0
    for figures in report.classes.values():
        own_bytes = needed(figures) - figures["peak_allocated"]
        beside_tensors = max(beside_tensors, own_bytes)
    # every iteration would fail, whatever its samples
    if beside_tensors >= limit_bytes:
        raise UsageError(
            f"segments, NCCL and the context take {format_bytes(beside_tensors)} of "
            f"{format_bytes(limit_bytes)}",
            fix="a larger --limit",
        )
    limit_of_tensors = limit_bytes - beside_tensors
    result = uneven.answer_question(question, args.machine, args.calibration, limit_of_tensors)
    note = (
        f"limit         {format_bytes(limit_bytes)}, of which segments beyond tensors, NCCL and "
        f"the context take {format_bytes(beside_tensors)}, as captured"
    )
    run = result.run
    if run is None or result.stops:
        return _answer(result, drawn.RunPart.MEMORY)
    if run.memory is None:
        raise UsageError(
            "these captures do not say what memory other lengths need",
            fix="two captures or more, on tier meta, that ask for the same storages: capture=DIR",
        )
    runs_out = len(run.memory.failing) > 0
    return _answer(result, drawn.RunPart.MEMORY, status=int(runs_out), note=note)


def _answer(
    result: uneven.UnevenResult, part: drawn.RunPart, status: int = 0, note: str = ""
) -> Answer:
    """Make the answer of a command that shows one part of a run.

    Args:
        result: Of a run.
        part: What is shown.
        status: Exit status, where the job goes on.
        note: The last line of the text.
    """
    # what stops the job comes first
    if result.stops:
        return Answer(result.to_json, lambda: print(result.to_text()), result.rows, status=1)
    run = result.run
    assert run is not None  # words that say no run are refused
    text = drawn.to_text(run, part)
    if note:
        text += f"\n{note}"
    return Answer(result.to_json, lambda: print(text), result.rows, status=status)


def _is_no_file(paths: Sequence[str]) -> bool:
    """Say that no file asks for these answers, but words alone."""
    return False


def _question_of_run(programs: Programs, words: Sequence[str], command: str) -> uneven.Question:
    """Read the words of a command that draws from the samples of a run alone.

    Raises:
        UsageError: The words say one iteration, or as ``read_question``.
    """
    question = uneven.read_question(programs, words)
    if question.batches is None:
        raise UsageError(
            f"prism {command} draws from the samples of a run, and these words say one iteration",
            fix="lengths=FILE, or lengths of all iterations and how many there are",
        )
    return question


FILE_ANSWERS = (
    FileAnswer("replay", _is_no_file, replay, key=_KEY),
    FileAnswer("fit", _is_no_file, fit, key=_KEY),
)
