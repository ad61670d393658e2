"""``prism verify``: whether a layout computes what one rank alone computes."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_prism.cli.command import Command, HelpGroup, file_option, switch
from megatron_prism.cli.output import Answer, console, deliver
from megatron_prism.core.errors import UsageError
from megatron_prism.core.units import counted

if TYPE_CHECKING:
    from megatron_prism.features.verify.verdict import Line, Verdict

_SCRIPT = Path(__file__).with_name("verify.js")
_UNDECIDED = 3
_WIDTH = 13


def verify(args: argparse.Namespace) -> int:
    """Does a layout compute what one rank alone computes?  Trains a small copy on the CPU.

    prism verify -- pretrain_gpt.py <the job's own arguments>
    prism verify torchrun --nnodes 128 --nproc-per-node 8 pretrain_gpt.py <the same>
    prism verify --against "--overlap-grad-reduce" -- pretrain_gpt.py <the same>

    The copy has the job's composition (a dimension above 1 is 2) with few layers, narrow, float32.
    Compared are losses, gradients by name, their norm, routing, parameters, Adam's states.
    Exit status: 0 the same, 1 another job, 3 not decided.
    """
    from megatron_prism.features.verify import verdict
    from megatron_prism.report.page import render_page

    if not args.job:
        raise UsageError("verify which job?", fix="prism verify -- pretrain_gpt.py <its arguments>")
    line = line_of(args.ours, args.job)
    against = None
    # the reference is one rank alone, or the copy of another line
    reference = "one rank alone"
    if args.against:
        against = _other(args.against, line, args)
        reference = "the other job"
    talk = console(stderr=args.json or bool(args.csv))
    with tempfile.TemporaryDirectory(prefix="prism-verify-") as temporary:
        folder = args.keep or Path(temporary)
        judged = verdict.verify(
            line,
            against,
            folder,
            talk.print,
            bisect=not args.no_bisect,
            resume=args.resume,
            precise=args.precise,
        )
    text = "\n".join(_page(judged, reference))
    rows = []
    for argument, before, after, why in judged.asked:
        rows.append({"argument": argument, "before": before, "after": after, "why": why})
    data = judged.to_json()
    # without a verdict: neither the same nor another job
    status = _UNDECIDED
    if judged.same is not None:
        status = int(not judged.same)
    answer = Answer(
        lambda: data,
        lambda: talk.print(text),
        lambda: rows,
        status=status,
        html=lambda: render_page(
            "prism verify",
            str(judged.world),
            f"copy: {judged.copy}",
            _SCRIPT,
            {**data, "text": text, "other": reference},
            text,
        ),
    )
    return deliver(args, answer)


def line_of(prism_flags: Sequence[str], job: Sequence[str], python: str = sys.executable) -> Line:
    """A job of our flags and of a script with its arguments."""
    from megatron_prism.emulate.command_line import options
    from megatron_prism.features.verify.verdict import Line

    flags, megatron_words = options.split(list(job[1:]))
    words = list(prism_flags)
    for _, words_of_flag in flags:
        words += words_of_flag
    env = {k: v for k, v in os.environ.items() if k not in ("LOCAL_WORLD_SIZE", "PRISM_ARGS")}
    job_options = options.from_command_line(["--prism-emulate", *words, *megatron_words], env)
    assert job_options is not None, "--prism-emulate is among them"
    # a line without a size of the world does not say the size of dp
    dp_known = "WORLD_SIZE" in env
    for word in words:
        dp_known = dp_known or word.startswith("--prism-world-size")
    script = job[0]
    # ranks of the copy run in folders of their own
    if script != "-m":
        script = str(Path(script).resolve())
    return Line((script, *megatron_words), job_options.world, dp_known, python)


def _other(text: str, line: Line, args: argparse.Namespace) -> Line:
    """Another line with a script, or flags for the end of this one."""
    from megatron_prism.emulate.command_line.job_line import job_of

    words = shlex.split(text)
    if not any(word.endswith(".py") for word in words):
        return line_of(args.ours, [*line.words, *words])
    # another environment, such as one with another Megatron
    python = sys.executable
    if re.search(r"/python[\d.]*$", words[0]):
        python = words[0]
    prism_flags, job = job_of(words, args.ours)
    return line_of([*args.ours, *prism_flags], job, python)


def _page(verdict: Verdict, reference: str) -> list[str]:
    """The verdict as lines of text."""
    lines = [f"job: {verdict.world}", f"copy: {verdict.copy}", *_changes(verdict)]
    lines.append(_row("not checked", verdict.not_checked))
    # runs that were not compared have no counts
    if verdict.counts:
        counts = ", ".join(f"{n:,} {kind}" for kind, n in verdict.counts.items())
        lines.append(_row("compared", f"{counts} in {counted(verdict.iterations, 'iteration')}"))
        rule = "roundings of sums; more where one of each parameter moves a value farther"
        lines.append(_row("tolerance", f"{verdict.tolerance:.1e} of a value: {rule}"))
    # how near the values came to the bound
    shares = [f"{kind} {share:.0%}" for kind, share in verdict.worst.items() if share]
    if shares and verdict.same:
        lines.append(_row("largest", ", ".join(shares) + " of the tolerance"))
    for report in verdict.reports:
        place = f"{report.where} of iteration {report.iteration}"
        lines.append(_row("reported", f"{place}: {report.notes[0]}"))
    # no verdict, with what was seen until then
    if verdict.same is None:
        return [*lines, f"not decided: {verdict.why}", *_difference(verdict)]
    if verdict.same:
        return [*lines, f"same: it computes what {reference} computes"]
    sentence = f"differs from {reference}"
    # a run that was resumed; the copy from its beginning has no name
    if verdict.run:
        sentence = f"{verdict.run}: {sentence}"
    lines += [sentence, *_difference(verdict)]
    # the flag without which the difference is gone
    if verdict.culprits:
        lines.append(_row("gone without", ", ".join(verdict.culprits)))
    elif verdict.tried:
        lines.append(_row("gone without", f"none of {', '.join(verdict.tried)}"))
    return lines


def _row(name: str, text: object) -> str:
    return f"  {name:<{_WIDTH}}{text}"


def _changes(verdict: Verdict) -> list[str]:
    """Lines on the arguments that the copy has not, or has of another size, a line a reason."""
    names_of_reason: dict[str, list[str]] = {}
    for name, before, after, why in verdict.asked:
        text = name
        # sizes are shrunk, everything else is left out
        if why == "sizes":
            text = f"{name} {before} -> {after}"
        names_of_reason.setdefault(why, []).append(text)
    lines = []
    for why, names in names_of_reason.items():
        text = ", ".join(names)
        if why == "sizes":
            lines.append(_row("sizes", text))
        else:
            lines.append(_row("without", f"{why}: {text}"))
    return lines


def _difference(verdict: Verdict) -> list[str]:
    """Lines on the first difference, and how many more there are."""
    first = verdict.difference
    if first is None:
        return []
    remarks = []
    # a value that one run has not is off by no number
    if first.error is not None:
        remarks.append(f"{first.error:.2g} off, {first.tolerance:.1g} allowed")
    num_also, num_compared = first.as_well
    if num_compared:
        remarks.append(f"{num_also} more of {num_compared}")
    lines = [f"  first: {first.what} of iteration {first.iteration}, {first.where} ({first.place})"]
    if remarks:
        lines.append("    " + "; ".join(remarks))
    return [*lines, *(f"    {note}" for note in first.notes)]


COMMANDS = {
    "verify": Command(
        verify,
        (
            (
                ("--against",),
                {"metavar": "FLAGS", "help": "further flags, or another command line"},
            ),
            (
                ("--keep",),
                {"metavar": "DIR", "type": Path, "help": "folder for records and output of ranks"},
            ),
            file_option("--html", "the verdict as a page"),
            switch("--precise", "compute in float64"),
            switch("--no-bisect", "do not look for the flag that makes the difference"),
            switch("--resume", "also resume from a checkpoint in another layout"),
        ),
        group=HelpGroup.ASK,
        job=True,
    ),
}
