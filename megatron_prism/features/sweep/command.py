"""``prism sweep``: the layouts of a job, ranked, before it is submitted."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_prism.cli import arguments
from megatron_prism.cli.command import (
    LIMIT,
    MACHINE,
    OUT,
    RECIPE_OR_JOB,
    Command,
    HelpGroup,
    file_option,
    option,
    settings,
)
from megatron_prism.cli.memory_arguments import limit_of
from megatron_prism.cli.output import Answer, console, write_outputs
from megatron_prism.core.errors import UsageError
from megatron_prism.core.files import write_whole

if TYPE_CHECKING:
    from megatron_prism.features.sweep.space import Script
    from megatron_prism.features.sweep.sweep import Sweep


def sweep(args: argparse.Namespace) -> Answer:
    """Rank the layouts of a recipe's job: time, memory, and the command line to start each with.

    prism sweep RECIPE tp=1,2,4,8 pp=auto vpp=1,2,5 micro_batch_size=1,2 recompute=none,full -o DIR
    prism sweep tp=1,2 pp=2,4 -o DIR --prism-world-size 64 -- pretrain_gpt.py <its arguments>

    An axis is tp, pp, vpp, cp, ep, etp, dp, world_size, micro_batch_size, global_batch_size,
    recompute, Megatron's name of one of them, or any other of its flags (fp8=none,hybrid).  auto
    tries all sizes that divide.  Points are dropped by Megatron's own checks, by a lower bound of
    their memory, and by the memory of their stages; each is listed with its reason.

    --machine is that of prism replay; default: the recipe's.  --limit is the device's memory;
    default: the machine's.  --objective is time, tokens_per_gpu, p95 or cost (with --price, of a
    GPU for an hour).  --workers are local processes; --address a Ray cluster instead (auto,
    ray://HOST:10001), or local: start Ray here.  In a space too large for a grid, Optuna chooses
    --trials points.

    The same command continues after an interruption; another sweep into DIR uses its slices.  Exit
    status 1: no point can run.
    """
    from megatron_prism.features.sweep.sweep import sweep as run

    given, job = list(args.settings), args.recipe
    if args.job:
        given, job = ([job, *given] if job else given), _script(args)
    elif job is None:
        fix = "prism sweep RECIPE tp=1,2 -o DIR, or tp=1,2 -o DIR -- pretrain_gpt.py …"
        raise UsageError("a sweep of what?", fix=fix)
    how = _own(args)
    if args.limit is not None:
        how["limit"] = limit_of(args.limit)
    if args.out is None:
        raise UsageError("a sweep needs a folder to keep slices and results in", fix="-o DIR")
    talk = console(stderr=True)
    made = run(job, given, args.out, told=lambda text: talk.print(f"prism: {text}"), **how)
    write_outputs(args.force, (args.csv, made.to_csv))
    places = [str(args.out / row.result["slices"]) for row in made.rows[:2]]
    words = ["prism", "compare" if len(places) > 1 else "fit", *places]
    return Answer(
        made.to_json,
        lambda: print(made.to_text(), end=""),
        next=shlex.join(words) if places else "",
        status=0 if made.rows else 1,
        html=lambda: made.to_html(_write_timelines(made, args.html)),
    )


_OWN = ("machine", "limit", "objective", "price", "address", "trials", "workers")
_TIMELINES = 10  # of the first points, beside those that nothing beats in time and memory


def _own(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were given."""
    return {key: value for key in _OWN if (value := getattr(args, key)) is not None}


def _write_timelines(made: Sweep, page: Path) -> dict[str, str]:
    """Write ``PAGE_timelines/RANK.html`` of the points that matter; key -> where it is."""
    from megatron_prism.features.sweep.sweep import front

    folder = page.with_name(f"{page.stem}_timelines")
    best = {one["key"] for one in front([row.result for row in made.rows])}
    links = {}
    for place, row in enumerate(made.rows, 1):
        if place <= _TIMELINES or row.result["key"] in best:
            folder.mkdir(exist_ok=True)
            path = folder / f"{place}.html"
            write_whole(path, made.timeline(place).to_html(), force=True)
            links[row.result["key"]] = f"{folder.name}/{path.name}"
    return links


def _script(args: argparse.Namespace) -> Script:
    from megatron_prism.emulate.options import from_command_line, split
    from megatron_prism.features.sweep.space import Script

    script, *words = args.job
    ours, rest = split(words)
    made = Script(script, tuple(rest), (*args.ours, *(word for _, one in ours for word in one)))
    from_command_line(
        ["--prism-emulate", "--prism-ranks", "0", *made.ours]
    )  # a typo is of no point
    return made


COMMANDS = {
    "sweep": Command(
        sweep,
        (
            RECIPE_OR_JOB,
            settings("axes: tp=1,2,4 pp=auto"),
            OUT,
            MACHINE,
            LIMIT,
            option("objective", arguments.name, "NAME", "time, tokens_per_gpu, p95 or cost"),
            option("price", arguments.number("--price 2.5"), "2.5", "price of a GPU for an hour"),
            option(
                "workers",
                arguments.count(1, 1 << 10, "--workers 2"),
                "N",
                "number of local processes",
            ),
            option(
                "address",
                arguments.name,
                "ADDRESS",
                "address of a Ray cluster; local: start Ray here",
            ),
            option(
                "trials",
                arguments.count(1, 100_000, "--trials 200"),
                "N",
                "number of points that Optuna chooses",
            ),
            file_option("--html", "page: time against memory"),
        ),
        group=HelpGroup.ASK,
        job=True,
    ),
}
