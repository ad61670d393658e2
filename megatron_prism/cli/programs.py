"""``prism capture``, ``show``, ``diff``, ``check`` …: programs of a world.

In : a recipe, or programs as a folder of slices, a file or a text.  Out: a page of text or JSON.
Nothing here imports torch; only ``capture`` starts processes that do.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_prism.cli.output import check_outputs, console, print_table, write_data
from megatron_prism.core import job_settings
from megatron_prism.core.errors import UsageError
from megatron_prism.core.units import counted, format_share

if TYPE_CHECKING:
    from megatron_prism.core.ops import Op
    from megatron_prism.core.program import Program, Programs

_AROUND = 6  # ops before and after what ``around=`` names


def capture(args: argparse.Namespace) -> int:
    """Record what one rank per stage does in an iteration, into a folder of slices.

    prism capture llama3-70b_1024gpu_tp8pp4vp5_h200 -o llama [key=value ...]
    prism capture -o mine torchrun --nnodes 128 --nproc-per-node 8 pretrain_gpt.py <its arguments>
    prism capture -o mine --prism-world-size 1024 -- pretrain_gpt.py <its arguments>

    A slice that is finished is kept: start the same command again after an interruption and it goes
    on from there.  world.prism in the folder is the whole world; see prism show, classes and check.

    A script runs as it is, once for every rank that is needed: as many at once as there are cores,
    or one on a GPU.  --prism-tier meta needs no GPU and is the default where there is none.  The
    last arguments stop it after a few iterations.  The flags are those of prism run.
    """
    if args.out is None:
        raise UsageError("a capture needs a folder", fix="-o DIR")
    if args.job:
        return _capture_script(args)
    if args.recipe is None:
        raise UsageError(
            "capture what?", fix="prism capture RECIPE -o DIR, or -o DIR -- pretrain_gpt.py …"
        )
    from megatron_prism.core import recipe as recipes
    from megatron_prism.emulate import recipe_job

    recipe = recipes.load(args.recipe, args.settings)
    talk = console(stderr=args.json)
    captured = recipe_job.capture(recipe, args.out, force=args.force, console=talk)
    _given_programs(args, captured)
    return 0


def _capture_script(args: argparse.Namespace) -> int:
    from megatron_prism.emulate import script_job

    (script, *rest), words = args.job, args.ours
    if args.recipe is not None or args.settings:
        word = args.recipe or args.settings[0]
        raise UsageError(f"{word} does not go with a script", fix="prism capture -o DIR -- SCRIPT")
    talk = console(stderr=args.json)
    script_job.capture_command_line(script, [*words, *rest], args.out, talk, force=args.force)
    if args.json or args.csv:
        from megatron_prism.core.slices import open_programs

        _given_programs(args, open_programs(args.out))
    return 0


def show(args: argparse.Namespace) -> int:
    """Show programs: how many ops of which kind, or the ops of some ranks.

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
    if args.text and (given or args.json):
        other = "--json" if args.json else f"--{given[0]}"
        raise UsageError(f"--text is all of them, and {other} not", fix="leave one out")
    programs = open_programs(args.programs)
    if args.text:
        print(dump(programs), end="")
        return 0
    if args.rank is None:
        if given:
            raise UsageError(f"--{given[0]} shows ops of a rank", fix=f"--rank 0 --{given[0]} …")
        if not _given_programs(args, programs):
            _overview(programs)
        return 0
    found = {
        rank: _ops(programs, rank, args.around, args.group)
        for rank in programs.world.select(args.rank)
    }
    rows = [
        {"rank": rank, "index": index, "step": op.label, **dataclasses.asdict(op)}
        for rank, ops in found.items()
        for index, op in ops.items()
    ]
    if not write_data(args, rows, rows):
        for rank, ops in found.items():
            _print_ops(programs, rank, ops)
    return 0


def _given_programs(args: argparse.Namespace, programs: Programs) -> bool:
    """``given`` a line for every program; ``peak_bytes`` is null where none was recorded."""
    from megatron_prism.core.world import format_ranks

    rows: list[dict[str, object]] = [
        {
            "ranks": format_ranks(programs.ranks_of(index).tolist()),
            "captured_as": program.rank,
            "ops": len(program),
            "peak_bytes": _peak(program),
            "counts": dict(program.counts()),
        }
        for index, program in enumerate(programs.programs)
    ]
    source = {key: job_settings.short(value) for key, value in programs.source.items()}
    value = {"world": str(programs.world), "source": source, "programs": rows}
    return write_data(args, value, rows)


def _peak(program: Program) -> int | None:
    return int(program.live_bytes().max(initial=0)) if len(program.allocations) else None


def _overview(programs: Programs) -> None:
    from megatron_prism.core.units import format_bytes
    from megatron_prism.core.world import format_ranks

    out = console()
    out.print(str(programs.world))
    width = max(map(len, programs.source), default=0)
    for key, value in programs.source.items():
        out.print(f"  {key:<{width}}  {job_settings.short(value)}")
    rows = []
    for index, program in enumerate(programs.programs):
        counts = ", ".join(f"{count:,} {name}" for name, count in program.counts().items())
        peak = _peak(program)
        shown = "not recorded" if peak is None else format_bytes(peak)
        rows.append((format_ranks(programs.ranks_of(index).tolist()), f"{len(program):,}", shown,
                     counts))  # fmt: skip
    print_table(("ranks", "ops", "live peak", "of which"), rows)


def _ops(programs: Programs, rank: int, around: str | None, group: str | None) -> dict[int, Op]:
    """The ops of ``rank`` that are meant, by their place in its program."""
    from megatron_prism.core.groups import named_group

    program = programs.of(rank)
    ops = list(program)
    wanted = range(len(ops))
    groups = sorted({op.group for op in ops if op.group})
    meant = {name for name in groups if group is not None and named_group(group, name)}
    if group is not None and not meant:
        raise UsageError(
            f"rank {rank} has no call in a group {group}",
            fix=f"there are {', '.join(groups) or 'none'}",
        )
    if around is not None:
        near = [
            i for i, op in enumerate(ops) if around in (op.label, op.label + "0")
        ]  # of one chunk
        if not near:
            labels = list(dict.fromkeys(op.label for op in ops))
            raise UsageError(
                f"rank {rank} has no step {around}", fix=f"there are {', '.join(labels[:8])} …"
            )
        wanted = range(max(0, near[0] - _AROUND), min(len(ops), near[-1] + _AROUND + 1))
    return {i: ops[i] for i in wanted if group is None or ops[i].group in meant}


def _print_ops(programs: Programs, rank: int, ops: dict[int, Op]) -> None:
    from megatron_prism.core.program_text import format_op

    as_rank = programs.of(rank).rank
    print(f"rank {rank}" + ("" if as_rank == rank else f" (captured as rank {as_rank})"))
    for index, op in ops.items():
        line = format_op(op)
        note = line.find(' note="')
        print(f"{index:6}  {line if note < 0 else line[: note + 60] + ' …'}")


def classes(args: argparse.Namespace) -> int:
    """Show which ranks are equivalent, and why each class is one.

    prism classes DIR
    """
    from megatron_prism.core.slices import open_programs
    from megatron_prism.core.world import format_ranks
    from megatron_prism.graph import world_graph as graph

    made = graph.build(open_programs(args.programs))
    found = made.classes
    rows = [
        {
            "class": index,
            "ranks": format_ranks(found.ranks(index).tolist()),
            "count": found.counts[index],
            "captured_as": made.program_list[index].rank,
            "ops": len(made.program_list[index]),
            "reason": found.reasons[index],
        }
        for index in range(len(found))
    ]
    if write_data(args, {"world": str(made.programs.world), "classes": rows}, rows):
        return 0
    console().print(str(made))
    print_table(
        ("class", "count", "captured as", "ops", "because of", "ranks"),
        [
            (str(r["class"]), f"{r['count']:,}", f"rank {r['captured_as']}", f"{r['ops']:,}",
             str(r["reason"]), str(r["ranks"]))
            for r in rows
        ],
    )  # fmt: skip
    return 0


def check(args: argparse.Namespace) -> int:
    """Do all ranks' calls fit together?  Explains every mismatch; exit status 1 if there is one.

    prism check DIR
    """
    from megatron_prism.core.slices import open_programs
    from megatron_prism.graph import world_graph as graph
    from megatron_prism.hang import diagnose

    made = graph.build(open_programs(Path(args.programs)))
    found = made.check()
    # calls that match may still wait in a circle
    circle = None if found else diagnose.diagnose_graph(made)
    if circle is not None and circle.verdict == "healthy":
        circle = None
    rows: list[dict[str, object]] = [
        {"kind": f.kind, "group": f.group, "ranks": f.ranks, "call": f.number,
         "picture": f.picture, "likely": f.likely}
        for f in found
    ]  # fmt: skip
    if circle is not None:
        ranks = [culprit.rank for culprit in circle.culprits]
        rows.append({"kind": circle.verdict, "group": circle.group, "ranks": ranks,
                     "call": circle.seq, "picture": "\n".join(circle.chain),
                     "likely": circle.headline()})  # fmt: skip
    if write_data(args, rows, rows):
        return 1 if rows else 0
    print(made)
    for finding in found:
        print(f"\n{finding}")
    if circle is not None:
        print(f"\nevery call is matched, and still: {circle}")
        return 1
    count = f"{len(found)} mismatch{'es' * (len(found) != 1)}"
    print(f"\n{count}" if found else "every call is matched")
    return 1 if found else 0


def calibrate(args: argparse.Namespace) -> int:
    """Measure how long calls take among this host's devices, for prism replay, predict and pacing.

    prism calibrate -o h200x4.json [--processes 4]
    prism calibrate --host [-o HOST.json] [--seconds 10]
    prism calibrate --from-nccl-tests all_reduce_perf.txt all_gather_perf.json -o dgx.json

    --host measures this host alone, without a GPU: how fast it issues work, for host= of prism
    replay and predict.  The first line does so too; on GPUs also how long NCCL keeps the host for a
    call, and how much calls and computing slow each other down.  The last line takes what
    nccl-tests measured, on any number of hosts; --node-gpus 72 says how many GPUs NVLink joins
    where that is more than a host has.
    """
    if args.host:
        return _host(args)
    if args.out is None:
        raise UsageError("a calibration needs a file to write", fix="-o FILE.json")
    if args.from_nccl_tests:
        return _from_nccl_tests(args)
    from megatron_prism.emulate import calibrate as calibrating

    talk = console(stderr=args.json)
    calibrating.calibrate(args.out, args.processes, force=args.force, console=talk)
    write_data(args, json.loads(args.out.read_text(encoding="utf-8")))
    return 0


def _host(args: argparse.Namespace) -> int:
    """The index of this host: printed, and written if a file is named."""
    from megatron_prism.core.files import write_whole
    from megatron_prism.emulate import host_benchmark

    check_outputs([args.out], args.force)
    out = console(stderr=args.json)
    out.print(f"measuring this host for {args.seconds} s")
    found = host_benchmark.measure(args.seconds)
    out.print(
        f"host index {found.index:.3f}, spread {format_share(found.spread, 0)}: {found.source}"
    )
    for name, times in found.parts.items():
        out.print(f"  {name:<9} {times:.3f} x as long as the reference host")
    if args.out is not None:
        write_whole(args.out, found.to_json(), force=args.force)
        out.print(f"wrote {args.out}; prism replay DIR host={args.out}")
    write_data(args, json.loads(found.to_json()))
    return 0


def _from_nccl_tests(args: argparse.Namespace) -> int:
    from megatron_prism.core.files import write_whole
    from megatron_prism.replay.costs import nccl_tests

    check_outputs([args.out], args.force, args.from_nccl_tests)
    runs = [nccl_tests.read(file) for file in args.from_nccl_tests]
    stored = nccl_tests.calibration(runs, args.node_gpus)
    write_whole(args.out, json.dumps(stored, indent=1) + "\n", force=args.force)
    out = console(stderr=args.json)
    for run in runs:
        where = "one host" if run.per_node == run.ranks else f"{run.per_node} per host"
        out.print(
            f"{run.path}: {run.op}, {counted(run.ranks, 'rank')}, {where}, "
            f"{counted(len(run.rows), 'size')}"
        )
    out.print(f"wrote {args.out}: {stored['source']}")
    write_data(args, stored)
    return 0
