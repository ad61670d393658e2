"""``prism capture``, ``show`` and ``check``: programs of a world.

In : a recipe, or programs as a folder of slices, a file or a text.  Nothing here imports torch;
only ``capture`` starts processes that do.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_prism.cli import arguments
from megatron_prism.cli.command import (
    OUT,
    OVERRIDES,
    PROGRAMS,
    RECIPE_OR_JOB,
    Command,
    HelpGroup,
    ProgramCheck,
    option,
    switch,
)
from megatron_prism.cli.job_slices import keep_line
from megatron_prism.cli.output import Answer, console, print_table
from megatron_prism.core import feature
from megatron_prism.core.errors import UsageError, refuse
from megatron_prism.core.units import counted, format_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from megatron_prism.core.programs.ops import Op
    from megatron_prism.core.programs.program import Programs

_AROUND = 6  # ops before and after what ``--around`` names
_MAX_LABELS = 8  # steps that a message names
_NOTE = 60  # characters of a note and its name


def capture(args: argparse.Namespace) -> Answer:
    """Record what one rank per stage does in an iteration, into a folder of slices.

    prism capture llama3-70b_1024gpu_tp8pp4vp5_h200 -o llama [key=value ...]
    prism capture -o mine torchrun --nnodes 128 --nproc-per-node 8 pretrain_gpt.py <its arguments>
    prism capture -o mine --prism-world-size 1024 -- pretrain_gpt.py <its arguments>

    A slice that is finished is kept: start the same command again after an interruption and it goes
    on from there.  world.prism in the folder is the whole world; see prism show and check.

    --check ends when it is known what stops the job: each thing with its fix, exit status 1.

    A script runs as it is, once for every rank that is needed: as many at once as there are cores,
    or one on a GPU.  --prism-tier meta needs no GPU and is the default where there is none.  The
    last arguments stop it after a few iterations.  The flags are those of prism run.
    """
    # the job is looked at, and nothing runs
    if args.check:
        return _check_job(args)
    # an obstacle of the launch line leaves no script
    if args.obstacles and not args.job:
        args.obstacles.raise_all()
    _refuse_capture(args)
    out: Path = args.out
    talk = console(stderr=args.json)
    if args.job:
        from megatron_prism.emulate.jobs import script_job
        from megatron_prism.emulate.jobs.estimate import Estimator

        script, *own_arguments = args.job
        words = [*args.ours, *own_arguments]
        script_job.capture_command_line(
            script,
            words,
            out,
            talk,
            force=args.force,
            obstacles=args.obstacles,
            estimator=Estimator(talk),
        )
        line = [*args.given, *args.line]
    else:
        from megatron_prism.core.jobs import recipe as recipes
        from megatron_prism.emulate.jobs import recipe_job

        recipe = recipes.load(args.recipe, args.settings)
        recipe_job.capture(recipe, out, force=args.force, console=talk)
        line = [args.recipe, *args.settings]
    # later advice repeats the line
    keep_line(out, line)

    # the progress has said all that people want to know
    return Answer(
        lambda: _Classes(str(out)).value(),
        lambda: None,
        lambda: _Classes(str(out)).rows(),
        next=f"prism fit {out}",
    )


def _refuse_capture(args: argparse.Namespace) -> None:
    """Raise UsageError for a capture of nothing, of two things, or to nowhere."""
    nothing_fix = "prism capture RECIPE -o DIR, or -o DIR -- pretrain_gpt.py …"
    too_much = args.recipe or " ".join(args.settings[:1])
    refuse(
        (args.out is None, "a capture needs a folder", "-o DIR"),
        (not args.job and args.recipe is None, "capture what?", nothing_fix),
        (
            args.job and (args.recipe or args.settings),
            f"{too_much} does not go with a script",
            "prism capture -o DIR -- SCRIPT",
        ),
    )


def _check_job(args: argparse.Namespace) -> Answer:
    """Answer what stops the job of a launch line, before any rank runs."""
    from megatron_prism.emulate.jobs import script_job

    refuse((not args.line, "--check is of a launch line", "prism capture --check torchrun …"))
    # an obstacle of the line leaves no job to look at
    check = script_job.Check("", None, "", (), args.obstacles)
    if args.job:
        script, *own_arguments = args.job
        words = [*args.ours, *own_arguments]
        talk = console(stderr=args.json)
        check = script_job.check_command_line(script, words, talk, args.obstacles)

    def page() -> None:
        for text in check.stand_ins:
            print(text)
        if len(check.obstacles):
            print(counted(len(check.obstacles), "thing"), "that would stop this job:")
        for number, obstacle in enumerate(check.obstacles, 1):
            print(f"{number:3}. {obstacle.message}")
            if obstacle.fix:
                print(f"     fix: {obstacle.fix}")
        if not len(check.obstacles):
            print("nothing stops this job")

    def rows() -> list[dict[str, object]]:
        return [{"message": found.message, "fix": found.fix} for found in check.obstacles]

    return Answer(check.as_json, page, rows, status=int(len(check.obstacles) > 0))


def show(args: argparse.Namespace) -> Answer:
    """Show programs: which ranks are equivalent and why, or the ops of some ranks.

    prism show DIR
    prism show DIR --rank 0 --around 2F0    ops of rank 0 near microbatch 2's forward of chunk 0
    prism show DIR --rank pp=1,tp=0 --group pp
    prism show DIR --text > world.txt       everything in the text form, which all commands read

    A step is written as microbatch, letter and chunk: 2F0 is microbatch 2's forward of chunk 0 (F
    forward, B backward, W weight gradients, O optimizer, G synchronisation, - between them).
    """
    from megatron_prism.core.programs.program_text import dump
    from megatron_prism.core.programs.slices import open_programs

    asked = [key for key in ("rank", "around", "group") if getattr(args, key) is not None]
    beside_text = ""
    if args.json:
        beside_text = "--json"
    elif asked:
        beside_text = f"--{asked[0]}"
    # a text is of the whole world, and steps or groups are of a rank
    refuse(
        (
            args.text and beside_text,
            f"--text is all of them, and {beside_text} not",
            "leave one out",
        ),
        (
            args.rank is None and asked,
            f"{beside_text} shows ops of a rank",
            f"--rank 0 {beside_text} …",
        ),
    )
    # the text form, for a file
    if args.text:
        programs = open_programs(args.programs)
        return Answer(lambda: None, lambda: print(dump(programs), end=""))
    if args.rank is None:
        return _show_classes(args.programs)
    programs = open_programs(args.programs)
    ops_of_rank: dict[int, dict[int, Op]] = {}
    for rank in programs.world.select(args.rank):
        ops_of_rank[rank] = _chosen_ops(programs, rank, args.around, args.group)

    def page() -> None:
        for rank, ops in ops_of_rank.items():
            _print_ops(programs, rank, ops)

    def rows() -> list[dict[str, object]]:
        values: list[dict[str, object]] = []
        for rank, ops in ops_of_rank.items():
            for index, op in ops.items():
                head = {"rank": rank, "index": index, "step": op.label}
                values.append({**head, **dataclasses.asdict(op)})
        return values

    return Answer(rows, page, rows)


class _Classes:
    """The equivalent ranks of a world and their programs."""

    def __init__(self, path: str) -> None:
        from megatron_prism.core.programs.slices import open_programs
        from megatron_prism.graph import world_graph

        self.graph = world_graph.build(open_programs(path))
        self.source = self.graph.programs.source

    def rows(self) -> list[dict[str, object]]:
        """Return a row for each class; ``peak_bytes`` is null where none was recorded."""
        from megatron_prism.core.world import format_ranks

        classes = self.graph.classes
        values: list[dict[str, object]] = []
        for index, program in enumerate(self.graph.program_list):
            value = {
                "class": index,
                "ranks": format_ranks(classes.ranks(index).tolist()),
                "count": classes.counts[index],
                "captured_as": program.rank,
                "ops": len(program),
                "peak_bytes": program.peak_bytes() if len(program.allocations) else None,
                "reason": classes.reasons[index],
                "counts": dict(program.counts()),
            }
            values.append(value)
        return values

    def _short_source(self) -> dict[str, str]:
        """Give what the world is of, with a word in place of each line of settings."""
        from megatron_prism.core.jobs import job_settings

        return {key: job_settings.short(text) for key, text in self.source.items()}

    def value(self) -> dict[str, object]:
        """Return all as one value."""
        world = str(self.graph.programs.world)
        return {"world": world, "source": self._short_source(), "classes": self.rows()}

    def page(self) -> None:
        """Print what the world is of, and a table of classes."""
        out = console()
        out.print(str(self.graph))
        width = max(map(len, self.source), default=0)
        for key, text in self._short_source().items():
            out.print(f"  {key:<{width}}  {text}")
        head = ("class", "count", "captured as", "ops", "live peak", "because of", "ranks")
        print_table(head, [_class_cells(row) for row in self.rows()])


def _class_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a class."""
    peak = "not recorded" if row["peak_bytes"] is None else format_bytes(row["peak_bytes"])
    return (
        str(row["class"]),
        f"{row['count']:,}",
        f"rank {row['captured_as']}",
        f"{row['ops']:,}",
        peak,
        str(row["reason"]),
        str(row["ranks"]),
    )


def _show_classes(path: str) -> Answer:
    """Answer which ranks of a world are equivalent."""
    classes = _Classes(path)
    return Answer(classes.value, classes.page, classes.rows, next=f"prism fit {path}")


def _chosen_ops(
    programs: Programs, rank: int, around: str | None, group: str | None
) -> dict[int, Op]:
    """Return the ops of a rank that are meant, by their place in its program.

    Args:
        programs: Of the world.
        rank: The rank.
        around: Only near this step.
        group: Only calls in this group.
    """
    from megatron_prism.core.groups import named_group

    ops = list(programs.of(rank))
    places = range(len(ops))
    # a short name such as dp fits several groups
    chosen_groups: set[str] | None = None
    # the user names a group in short
    if group is not None:
        groups = sorted({op.group for op in ops if op.group})
        chosen_groups = {name for name in groups if named_group(group, name)}
        if not chosen_groups:
            fix = f"there are {', '.join(groups) or 'none'}"
            raise UsageError(f"rank {rank} has no call in a group {group}", fix=fix)
    # "2F" is chunk 0, as in a pipeline without interleaving
    if around is not None:
        # all ops of the step, which need not be together
        near = [place for place, op in enumerate(ops) if around in (op.label, f"{op.label}0")]
        if not near:
            labels = list(dict.fromkeys(op.label for op in ops))
            fix = f"there are {', '.join(labels[:_MAX_LABELS])} …"
            raise UsageError(f"rank {rank} has no step {around}", fix=fix)
        last = min(len(ops), near[-1] + _AROUND + 1)
        places = range(max(0, near[0] - _AROUND), last)
    chosen: dict[int, Op] = {}
    for place in places:
        if chosen_groups is None or ops[place].group in chosen_groups:
            chosen[place] = ops[place]
    return chosen


def _print_ops(programs: Programs, rank: int, ops: Mapping[int, Op]) -> None:
    """Print ops of a rank, each in the text form of programs."""
    from megatron_prism.core.programs.program_text import format_op

    coordinates = programs.world.coordinates(rank)._asdict()
    text = f"rank {rank}: " + " ".join(f"{axis} {place}" for axis, place in coordinates.items())
    captured_rank = programs.of(rank).rank
    if captured_rank != rank:
        text += f", captured as rank {captured_rank}"
    print(text)
    for index, op in ops.items():
        line = format_op(op)
        note = line.find(' note="')
        # notes of kernels are long
        if note >= 0:
            line = line[: note + _NOTE] + " …"
        print(f"{index:6}  {line}")


def _feature_checks() -> list[ProgramCheck]:
    """Collect what features prove of programs."""
    checks: list[ProgramCheck] = []
    for module in feature.modules("checks"):
        checks += module.CHECKS
    return checks


def check(args: argparse.Namespace) -> Answer:
    """Do all ranks' calls fit together?  Explains every mismatch; exit status 1 if there is one.

    prism check DIR
    """
    # a feature's proof in place of the check of calls
    for feature_check in _feature_checks():
        if getattr(args, feature_check.name):
            return feature_check.function(args)
    return _check_calls(args)


def _check_calls(args: argparse.Namespace) -> Answer:
    """Answer whether all ranks' calls fit together."""
    from megatron_prism.core.programs.slices import open_programs
    from megatron_prism.features.hang import diagnose
    from megatron_prism.graph import world_graph

    graph = world_graph.build(open_programs(args.programs))
    rows: list[dict[str, object]] = []
    texts: list[str] = []
    for finding in graph.check():
        texts.append(f"\n{finding}")
        rows.append(
            {
                "kind": finding.kind,
                "group": finding.group,
                "ranks": finding.ranks,
                "call": finding.number,
                "picture": finding.picture,
                "likely": finding.likely,
            }
        )
    texts.append(f"\n{counted(len(rows), 'mismatch')}" if rows else "every call is matched")
    # calls that match may still wait in a circle
    if not rows:
        circle = diagnose.diagnose_graph(graph)
        if circle.verdict != "healthy":
            texts = [f"\nevery call is matched, and still: {circle}"]
            rows.append(
                {
                    "kind": circle.verdict,
                    "group": circle.group,
                    "ranks": [culprit.rank for culprit in circle.culprits],
                    "call": circle.seq,
                    "picture": "\n".join(circle.chain),
                    "likely": circle.headline(),
                }
            )
    return Answer(
        lambda: rows,
        lambda: print(graph, *texts, sep="\n"),
        lambda: rows,
        status=int(bool(rows)),
    )


COMMANDS = {
    "capture": Command(
        capture,
        (
            RECIPE_OR_JOB,
            OUT,
            switch("--check", "only say what stops the job, as one list with fixes"),
            OVERRIDES,
        ),
        group=HelpGroup.RUN,
        job=True,
        checks_job=True,
        shows_progress=True,
    ),
    "show": Command(
        show,
        (
            PROGRAMS,
            option("rank", arguments.name, "RANKS", "a rank, or a selector: pp=1,tp=0"),
            option(
                "around", arguments.name, "2F0", "ops near this step: microbatch, letter, chunk"
            ),
            option(
                "group",
                arguments.name,
                "GROUP",
                "calls of this group: tp, pp, dp, or its whole name",
            ),
            switch("--text", "print the whole text form"),
        ),
        group=HelpGroup.DEBUG,
        programs=0,
        shows_progress=True,
        formerly=("classes", "world"),
    ),
    "check": Command(
        check,
        (PROGRAMS, *(switch(f"--{row.name}", row.text) for row in _feature_checks())),
        group=HelpGroup.DEBUG,
        programs=0,
        shows_progress=True,
    ),
}
