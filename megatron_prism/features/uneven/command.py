"""``prism uneven``: what comes of inputs that differ between ranks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_prism.cli import arguments, what_ifs
from megatron_prism.cli.command import PROGRAMS, Command, HelpGroup, settings
from megatron_prism.cli.output import Answer
from megatron_prism.core.errors import UsageError
from megatron_prism.features.uneven.kinds import InputKind

if TYPE_CHECKING:
    from megatron_prism.core.world import World
    from megatron_prism.features.uneven.inputs import UnevenInput
    from megatron_prism.features.uneven.outcome import Outcome

_CAPTURE = "capture"
_KEYS = (*(kind.value for kind in InputKind), _CAPTURE)


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
      capture=DIR               the job at another --seq-length, for each length that occurs
      programs=RANKS:DIR        they do what was captured in DIR: another kind of batch, images, an
                                evaluation
    """
    from megatron_prism.core.slices import open_programs
    from megatron_prism.features.uneven.iterations import examine_iterations
    from megatron_prism.features.uneven.mixed_lengths import LengthCaptures
    from megatron_prism.features.uneven.rank_programs import Sources

    words = _words(args.settings)
    captured = open_programs(args.programs)
    inputs = _inputs(words, captured.world)
    captures = [open_programs(path) for path in words.get(_CAPTURE, [])]
    lengths = None
    if any(uneven_input.kind is InputKind.LENGTHS for uneven_input in inputs):
        lengths = LengthCaptures(captured, captures)
    elif captures:
        raise UsageError("capture= without lengths=", fix="lengths=dp=1:4096,2048")
    sources = Sources(captured, what_ifs.with_microbatches, open_programs, lengths)
    decisive = examine_iterations(sources, inputs)
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


def _words(given: Sequence[str]) -> dict[str, list[str]]:
    """Read the words; UsageError if there is no input among them."""
    readers = dict.fromkeys(_KEYS, arguments.name)
    words: dict[str, list[str]] = arguments.read(given, readers, "uneven", several=_KEYS)
    if not words.keys() - {_CAPTURE}:
        raise UsageError("no rank gets another input", fix="prism uneven DIR microbatches=dp=1:3")
    return words


def _inputs(words: dict[str, list[str]], world: World) -> list[UnevenInput]:
    """Make the inputs that the words say."""
    from megatron_prism.features.uneven.inputs import read_input, read_lengths_file

    inputs: list[UnevenInput] = []
    for kind in InputKind:
        for text in words.get(kind.value, []):
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


_INPUTS = settings("what ranks get: microbatches=dp=3:7, loader=dp=3:5, lengths=dp=1:4096,2048")
COMMANDS = {
    "uneven": Command(
        uneven, (PROGRAMS, _INPUTS), group=HelpGroup.DEBUG, programs=0, shows_progress=True
    ),
}
