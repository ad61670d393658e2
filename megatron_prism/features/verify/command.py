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
    against = _other(args.against, line, args) if args.against else None
    talk = console(stderr=args.json or bool(args.csv))
    with tempfile.TemporaryDirectory(prefix="prism-verify-") as temporary:
        folder = args.keep or Path(temporary)
        found = verdict.verify(
            line,
            against,
            folder,
            talk.print,
            bisect=not args.no_bisect,
            resume=args.resume,
            precise=args.precise,
        )
    other = "the other job" if against else "one rank alone"
    text = "\n".join(_page(found, other))
    rows = [{"argument": n, "before": a, "after": b, "why": w} for n, a, b, w in found.asked]
    data = found.to_json()
    answer = Answer(
        lambda: data,
        lambda: talk.print(text),
        lambda: rows,
        status=_UNDECIDED if found.same is None else int(not found.same),
        html=lambda: render_page(
            "prism verify",
            str(found.world),
            f"copy: {found.copy}",
            _SCRIPT,
            {**data, "text": text, "other": other},
            text,
        ),
    )
    return deliver(args, answer)


def line_of(ours: Sequence[str], job: Sequence[str], python: str = sys.executable) -> Line:
    """A job of our flags and of a script with its arguments."""
    from megatron_prism.emulate import options
    from megatron_prism.features.verify.verdict import Line

    flags, rest = options.split(list(job[1:]))
    words = [*ours, *(word for _, some in flags for word in some)]
    env = {k: v for k, v in os.environ.items() if k not in ("LOCAL_WORLD_SIZE", "PRISM_ARGS")}
    given = options.from_command_line(["--prism-emulate", *words, *rest], env)
    assert given is not None, "--prism-emulate is among them"
    sized = any(word.startswith("--prism-world-size") for word in words) or "WORLD_SIZE" in env
    script = job[0] if job[0] == "-m" else str(Path(job[0]).resolve())
    return Line((script, *rest), given.world, sized, python)


def _other(text: str, line: Line, args: argparse.Namespace) -> Line:
    """Another line with a script, or flags for the end of this one."""
    from megatron_prism.emulate.job_line import job_of

    words = shlex.split(text)
    if not any(word.endswith(".py") for word in words):
        return line_of(args.ours, [*line.words, *words])
    python = words[0] if re.search(r"/python[\d.]*$", words[0]) else sys.executable
    ours, job = job_of(words, args.ours)
    return line_of([*args.ours, *ours], job, python)


def _page(found: Verdict, other: str) -> list[str]:
    """The verdict as lines of text."""

    def row(name: str, text: object) -> str:
        return f"  {name:<{_WIDTH}}{text}"

    reasons: dict[str, list[str]] = {}
    for name, before, after, why in found.asked:
        sizes = why == "sizes"
        reasons.setdefault(why, []).append(f"{name} {before} -> {after}" if sizes else name)
    lines = [f"job: {found.world}", f"copy: {found.copy}"]
    for why, names in reasons.items():
        text = ", ".join(names)
        lines.append(row("sizes", text) if why == "sizes" else row("without", f"{why}: {text}"))
    lines.append(row("not checked", found.not_checked))
    percent = {kind: f"{kind} {share:.0%}" for kind, share in found.worst.items() if share}
    if found.counts:
        counts = ", ".join(f"{n:,} {kind}" for kind, n in found.counts.items())
        lines.append(row("compared", f"{counts} in {counted(found.iterations, 'iteration')}"))
        rule = "roundings of sums; more where one of each parameter moves a value farther"
        lines.append(row("tolerance", f"{found.tolerance:.1e} of a value: {rule}"))
    if percent and found.same:
        lines.append(row("largest", ", ".join(percent.values()) + " of the tolerance"))
    lines += [
        row("reported", f"{one.where} of iteration {one.iteration}: {one.notes[0]}")
        for one in found.reports
    ]
    if found.same is None:
        return [*lines, f"not decided: {found.why}", *_difference(found)]
    if found.same:
        return [*lines, f"same: it computes what {other} computes"]
    who = f"{found.run}: " if found.run else ""
    lines += [f"{who}differs from {other}", *_difference(found)]
    if found.culprits:
        lines.append(row("gone without", ", ".join(found.culprits)))
    elif found.tried:
        lines.append(row("gone without", f"none of {', '.join(found.tried)}"))
    return lines


def _difference(found: Verdict) -> list[str]:
    first = found.difference
    if first is None:
        return []
    more, of = first.as_well
    rest = f"{more} more of {of}" if of else ""
    lines = [f"  first: {first.what} of iteration {first.iteration}, {first.where} ({first.place})"]
    # a value that one run has not is off by no number
    if first.error is not None:
        off = f"{first.error:.2g} off, {first.tolerance:.1g} allowed"
        rest = f"{off}; {rest}" if rest else off
    if rest:
        lines.append(f"    {rest}")
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
