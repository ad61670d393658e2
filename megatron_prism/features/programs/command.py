"""``prism capture``, ``show`` and ``check``: programs of a world.

In : a recipe, or programs as a folder of slices, a file or a text.  Nothing here imports torch;
only ``capture`` starts processes that do.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from megatron_prism.core import feature, job_settings
from megatron_prism.core.errors import UsageError, refuse
from megatron_prism.core.units import counted, format_bytes

if TYPE_CHECKING:
    from megatron_prism.core.ops import Op
    from megatron_prism.core.program import Programs

_AROUND = 6  # ops before and after what ``--around`` names


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
    if args.check:
        return _check_job(args)
    if args.obstacles and not args.job:
        args.obstacles.raise_all()
    refuse(
        (args.out is None, "a capture needs a folder", "-o DIR"),
        (not args.job and args.recipe is None, "capture what?",
         "prism capture RECIPE -o DIR, or -o DIR -- pretrain_gpt.py …"),
        (args.job and (args.recipe or args.settings),
         f"{args.recipe or ' '.join(args.settings[:1])} does not go with a script",
         "prism capture -o DIR -- SCRIPT"),
    )  # fmt: skip
    talk = console(stderr=args.json)
    if args.job:
        from megatron_prism.emulate import script_job

        (script, *rest), words = args.job, args.ours
        script_job.capture_command_line(
            script,
            [*words, *rest],
            args.out,
            talk,
            force=args.force,
            obstacles=args.obstacles,
        )
        line = [*args.given, *args.line]
    else:
        from megatron_prism.core import recipe as recipes
        from megatron_prism.emulate import recipe_job

        recipe = recipes.load(args.recipe, args.settings)
        recipe_job.capture(recipe, args.out, force=args.force, console=talk)
        line = [args.recipe, *args.settings]
    keep_line(args.out, line)
    out = str(args.out)
    return Answer(lambda: _classes(out).value(), lambda: None,
                  lambda: _classes(out).value()["classes"],
                  next=f"prism fit {out}")  # fmt: skip


def _check_job(args: argparse.Namespace) -> Answer:
    """Answer what stops the job of a launch line, before any rank runs."""
    from megatron_prism.emulate import script_job

    refuse((not args.line, "--check is of a launch line", "prism capture --check torchrun …"))
    if args.job:
        (script, *rest), words = args.job, args.ours
        talk = console(stderr=args.json)
        check = script_job.check_command_line(script, [*words, *rest], talk, args.obstacles)
    else:  # an obstacle of the line leaves no job to look at
        check = script_job.Check("", None, "", (), args.obstacles)

    def page() -> None:
        for text in check.stand_ins:
            print(text)
        for number, obstacle in enumerate(check.obstacles, 1):
            print(f"{number:3}. {obstacle.message}")
            if obstacle.fix:
                print(f"     fix: {obstacle.fix}")
        if not len(check.obstacles):
            print("nothing stops this job")

    return Answer(
        check.as_json,
        page,
        lambda: [
            {"message": obstacle.message, "fix": obstacle.fix} for obstacle in check.obstacles
        ],
        status=int(len(check.obstacles) > 0),
    )


def show(args: argparse.Namespace) -> Answer:
    """Show programs: which ranks are equivalent and why, or the ops of some ranks.

    prism show DIR
    prism show DIR --rank 0 --around 2F0    ops of rank 0 near microbatch 2's forward of chunk 0
    prism show DIR --rank pp=1,tp=0 --group pp
    prism show DIR --text > world.txt       everything in the text form, which all commands read

    A step is written as microbatch, letter and chunk: 2F0 is microbatch 2's forward of chunk 0 (F
    forward, B backward, W weight gradients, O optimizer, G synchronisation, - between them).
    """
    from megatron_prism.core.program_text import dump
    from megatron_prism.core.slices import open_programs

    given = [key for key in ("rank", "around", "group") if getattr(args, key) is not None]
    other = "--json" if args.json else f"--{given[0]}" if given else ""
    refuse(
        (args.text and other, f"--text is all of them, and {other} not", "leave one out"),
        (args.rank is None and given, f"{other} shows ops of a rank", f"--rank 0 {other} …"),
    )
    if args.text:
        programs = open_programs(args.programs)
        return Answer(lambda: None, lambda: print(dump(programs), end=""))
    if args.rank is None:
        return _classes(args.programs)
    programs = open_programs(args.programs)
    ops = {
        rank: _ops(programs, rank, args.around, args.group)
        for rank in programs.world.select(args.rank)
    }

    def page() -> None:
        for rank, each in ops.items():
            _print_ops(programs, rank, each)

    def rows() -> list[dict[str, object]]:
        return [
            {"rank": rank, "index": index, "step": op.label, **dataclasses.asdict(op)}
            for rank, each in ops.items()
            for index, op in each.items()
        ]

    return Answer(rows, page, rows)


def _classes(path: str) -> Answer:
    """The equivalent ranks of a world and their programs; ``peak_bytes`` is null where none was
    recorded.
    """
    from megatron_prism.core.slices import open_programs
    from megatron_prism.core.world import format_ranks
    from megatron_prism.graph import world_graph

    graph = world_graph.build(open_programs(path))
    classes, source = graph.classes, graph.programs.source

    def rows() -> list[dict[str, Any]]:
        return [
            {
                "class": index,
                "ranks": format_ranks(classes.ranks(index).tolist()),
                "count": classes.counts[index],
                "captured_as": program.rank,
                "ops": len(program),
                "peak_bytes": program.peak_bytes() if len(program.allocations) else None,
                "reason": classes.reasons[index],
                "counts": dict(program.counts()),
            }
            for index, program in enumerate(graph.program_list)
        ]

    def page() -> None:
        out = console()
        out.print(str(graph))
        width = max(map(len, source), default=0)
        for key, value in source.items():
            out.print(f"  {key:<{width}}  {job_settings.short(value)}")
        print_table(
            ("class", "count", "captured as", "ops", "live peak", "because of", "ranks"),
            [(str(r["class"]), f"{r['count']:,}", f"rank {r['captured_as']}", f"{r['ops']:,}",
              "not recorded" if r["peak_bytes"] is None else format_bytes(r["peak_bytes"]),
              str(r["reason"]), str(r["ranks"])) for r in rows()],
        )  # fmt: skip

    def value() -> dict[str, object]:
        short = {key: job_settings.short(one) for key, one in source.items()}
        return {"world": str(graph.programs.world), "source": short, "classes": rows()}

    return Answer(value, page, rows, next=f"prism fit {path}")


def _ops(programs: Programs, rank: int, around: str | None, group: str | None) -> dict[int, Op]:
    """The ops of ``rank`` that are meant, by their place in its program."""
    from megatron_prism.core.groups import named_group

    ops = list(programs.of(rank))
    groups = sorted({op.group for op in ops if op.group})
    meant = {name for name in groups if group is None or named_group(group, name)}
    if group is not None and not meant:
        raise UsageError(f"rank {rank} has no call in a group {group}",
                         fix=f"there are {', '.join(groups) or 'none'}")  # fmt: skip
    wanted = range(len(ops))
    if around is not None:
        near = [i for i, op in enumerate(ops) if around in (op.label, f"{op.label}0")]
        if not near:
            labels = list(dict.fromkeys(op.label for op in ops))
            raise UsageError(f"rank {rank} has no step {around}",
                             fix=f"there are {', '.join(labels[:8])} …")  # fmt: skip
        wanted = range(max(0, near[0] - _AROUND), min(len(ops), near[-1] + _AROUND + 1))
    return {i: ops[i] for i in wanted if group is None or ops[i].group in meant}


def _print_ops(programs: Programs, rank: int, ops: dict[int, Op]) -> None:
    from megatron_prism.core.program_text import format_op

    as_rank, world = programs.of(rank).rank, programs.world
    place = " ".join(f"{axis} {at}" for axis, at in world.coordinates(rank)._asdict().items())
    print(f"rank {rank}: {place}{'' if as_rank == rank else f', captured as rank {as_rank}'}")
    for index, op in ops.items():
        line = format_op(op)
        note = line.find(' note="')
        print(f"{index:6}  {line if note < 0 else line[: note + 60] + ' …'}")


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
    for feature_check in _feature_checks():
        if getattr(args, feature_check.name):
            return feature_check.function(args)
    return _check_calls(args)


def _check_calls(args: argparse.Namespace) -> Answer:
    """Answer whether all ranks' calls fit together."""
    from megatron_prism.core.slices import open_programs
    from megatron_prism.features.hang import diagnose
    from megatron_prism.graph import world_graph

    graph = world_graph.build(open_programs(args.programs))
    findings = graph.check()
    rows: list[dict[str, object]] = [
        {"kind": f.kind, "group": f.group, "ranks": f.ranks, "call": f.number,
         "picture": f.picture, "likely": f.likely}
        for f in findings
    ]  # fmt: skip
    texts = [f"\n{finding}" for finding in findings]
    texts.append(f"\n{counted(len(rows), 'mismatch')}" if rows else "every call is matched")
    if not findings:  # calls that match may still wait in a circle
        circle = diagnose.diagnose_graph(graph)
        if circle.verdict != "healthy":
            ranks = [culprit.rank for culprit in circle.culprits]
            rows = [{"kind": circle.verdict, "group": circle.group, "ranks": ranks,
                     "call": circle.seq, "picture": "\n".join(circle.chain),
                     "likely": circle.headline()}]  # fmt: skip
            texts = [f"\nevery call is matched, and still: {circle}"]
    return Answer(lambda: rows, lambda: print(graph, *texts, sep="\n"), lambda: rows,
                  status=int(bool(rows)))  # fmt: skip


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
