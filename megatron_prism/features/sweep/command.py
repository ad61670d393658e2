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

    axes, job = list(args.settings), args.recipe
    # a script's job: its words follow --
    if args.job:
        # the word that would be a recipe is an axis
        if job:
            axes.insert(0, job)
        job = _script(args)
    elif job is None:
        fix = "prism sweep RECIPE tp=1,2 -o DIR, or tp=1,2 -o DIR -- pretrain_gpt.py …"
        raise UsageError("a sweep of what?", fix=fix)
    choices = _choices(args)
    if args.limit is not None:
        choices["limit"] = limit_of(args.limit)
    if args.out is None:
        raise UsageError("a sweep needs a folder to keep slices and results in", fix="-o DIR")
    talk = console(stderr=True)
    ranking = run(job, axes, args.out, told=lambda text: talk.print(f"prism: {text}"), **choices)
    write_outputs(args.force, (args.csv, ranking.to_csv))
    status, next_command = 1, ""
    if ranking.rows:
        places = [str(args.out / row.result["slices"]) for row in ranking.rows[:2]]
        command = "fit"
        if len(places) > 1:
            command = "compare"
        status, next_command = 0, shlex.join(["prism", command, *places])
    return Answer(
        ranking.to_json,
        lambda: print(ranking.to_text(), end=""),
        next=next_command,
        status=status,
        html=lambda: ranking.to_html(_write_timelines(ranking, args.html)),
    )


_OWN = ("machine", "limit", "objective", "price", "address", "trials", "workers")
_TIMELINES = 10  # of the first points, beside those that nothing beats in time and memory


def _choices(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were typed."""
    # options that were not typed have the defaults of the function
    choices = {}
    for key in _OWN:
        value = getattr(args, key)
        if value is not None:
            choices[key] = value
    return choices


def _write_timelines(ranking: Sweep, page: Path) -> dict[str, str]:
    """Write ``PAGE_timelines/RANK.html`` of the points that matter; key -> where it is."""
    from megatron_prism.features.sweep.sweep import front

    folder = page.with_name(f"{page.stem}_timelines")
    results = [row.result for row in ranking.rows]
    unbeaten = {result["key"] for result in front(results)}
    links = {}
    for place, row in enumerate(ranking.rows, 1):
        # the first points, and all that no other beats in time and memory
        if place <= _TIMELINES or row.result["key"] in unbeaten:
            folder.mkdir(exist_ok=True)
            path = folder / f"{place}.html"
            write_whole(path, ranking.timeline(place).to_html(), force=True)
            links[row.result["key"]] = f"{folder.name}/{path.name}"
    return links


def _script(args: argparse.Namespace) -> Script:
    from megatron_prism.emulate.command_line.options import from_command_line, split
    from megatron_prism.features.sweep.space import Script

    script, *words = args.job
    flags, megatron_words = split(words)
    prism_words = list(args.ours)
    for _, words_of_flag in flags:
        prism_words += words_of_flag
    # a typo is of no point: it is refused before the sweep begins
    from_command_line(["--prism-emulate", "--prism-ranks", "0", *prism_words])
    return Script(script, tuple(megatron_words), tuple(prism_words))


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
