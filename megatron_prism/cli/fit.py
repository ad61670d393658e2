"""``prism fit``: does it fit, what is the peak made of, and which flag makes it fit."""

from __future__ import annotations

import argparse
import pickle
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_prism.cli import snapshot
from megatron_prism.cli.output import Answer, check_outputs
from megatron_prism.cli.what_ifs import machine_note
from megatron_prism.core.errors import UsageError

if TYPE_CHECKING:
    from megatron_prism.ask.fit import Fit
    from megatron_prism.core.program import Program, Programs
    from megatron_prism.memory.baseline import Draws


def fit(args: argparse.Namespace) -> Answer:
    """Does the job fit into its GPUs, what is the peak made of, and which flag makes it fit?

    prism fit DIR --limit 80GB
    prism fit --limit 80GB torchrun --nnodes 128 --nproc-per-node 8 pretrain_gpt.py <its arguments>
    prism fit DIR --class pp=3 --top 20 -o peak.pickle      for pytorch.org/memory_viz
    prism fit DIR --draws 500 --routing zipf:1 [--capacity 1.25]      an MoE job's routing
    prism fit DIR --oom "Tried to allocate 17.58 GiB …"     which request of the job it was
    prism fit SNAPSHOT          a real process (torch.cuda.memory._snapshot, .gz, .xz)

    Exit status 1: it does not fit, or a later iteration may run out (at risk).  Without --limit it
    is the memory of the machine.  80GB is what a card sold as 80 GB has.  Each change of flags was
    tried on the slices: its memory by the allocator's rules, its time by replaying the forwards
    that run again.  --device is a shipped calibration of context, libraries and NCCL (default
    h200), a file of benchmarks/tools/device_memory.py, or none: the limit is then held against
    reserved bytes.  --draws takes slices of tier meta; --routing uniform, zipf:A, or a folder of
    --prism-record.
    """
    from megatron_prism.ask.fit import fit as fit_programs
    from megatron_prism.core.slices import open_programs
    from megatron_prism.memory.baseline import first_program

    path = args.programs
    check_outputs([args.out], args.force, [path])
    if snapshot.is_snapshot(path):
        return snapshot.explain(path, args.top)
    programs = open_programs(path, partial=True)
    if args.oom is not None:
        return snapshot.explain_error(args, programs)
    warn_absent(programs)
    found = fit_programs(
        programs,
        limit=args.limit,
        headroom=args.headroom or 0,
        machine=args.machine,
        calibration=args.calibration,
        alloc_conf=args.alloc or "",
        device=None if args.device == "none" else args.device,
        draws=draws_of(args),
    )
    name = args.of_class or found.worst
    if name not in found.memory.classes:
        raise UsageError(f"there is no class {name}", fix=f"use {', '.join(found.memory.classes)}")
    if args.out is not None:
        _write_snapshot(args, first_program(programs, found.memory.classes[name]))
    note = machine_note(programs, args.machine)
    return Answer(
        found.to_json,
        lambda: print(found.to_text(name, args.top) + note, end=""),
        found.to_rows,
        next=_next(args, found, programs),
        status=int(not found.fits),
        html=found.to_html,
    )


def warn_absent(programs: Programs) -> None:
    """Say which ranks have no slice."""
    from megatron_prism.core.world import format_ranks

    if programs.absent:
        ranks = format_ranks(programs.absent)
        print(f"prism: ranks {ranks} are left out: their stages have no slice", file=sys.stderr)


def draws_of(args: argparse.Namespace) -> Draws | None:
    """What is to be drawn; UsageError for words that need ``--draws`` without it."""
    from megatron_prism.memory import routing
    from megatron_prism.memory.baseline import Draws
    from megatron_prism.replay.costs.machine import device_limit

    if args.draws is None:
        for key in ("routing", "capacity"):
            if getattr(args, key) is not None:
                raise UsageError(f"--{key} belongs to --draws", fix="--draws 500 --routing zipf:1")
        return None
    if args.capacity is not None and args.capacity <= 0:
        raise UsageError(f"--capacity {args.capacity:g} leaves no token", fix="--capacity 1.25")
    limit = None if args.limit is None else device_limit(args.limit)[0] - (args.headroom or 0)
    return Draws(routing.law(args.routing or "uniform"), args.draws, args.capacity, limit)


def _write_snapshot(args: argparse.Namespace, program: Program) -> None:
    """What pytorch.org/memory_viz shows of one class."""
    from megatron_prism.core.files import whole_file
    from megatron_prism.memory import peaks

    with whole_file(args.out, force=args.force) as file:
        pickle.dump(peaks.viz_snapshot(program), file)
    print(f"wrote {args.out}: open it at https://pytorch.org/memory_viz", file=sys.stderr)


_MORE = "--prism-job-flags"
_LINE = ".line"  # in a folder of slices: what it was captured from


def keep_line(folder: Path, words: Sequence[str]) -> None:
    """Keep the launch line, or the recipe and its settings, whose slices ``folder`` has."""
    (folder / _LINE).write_text(f"{shlex.join(words)}\n", encoding="utf-8")


def _next(args: argparse.Namespace, found: Fit, programs: Programs) -> str:
    """What to type next: how long it takes, the change that fits, captured for certain, or other
    layouts where no change is enough."""
    from megatron_prism.emulate import options
    from megatron_prism.emulate.launch_line import split_line

    machine = ["--machine", args.machine] if args.machine else []
    limit = ["--limit", args.limit] if args.limit else []
    best = next((one for one in found.changes if one.fits), None)
    folder, recipe = Path(args.programs), programs.source.get("recipe")
    text = file.read_text(encoding="utf-8") if (file := folder / _LINE).is_file() else ""
    line = [*args.given, *args.line] or shlex.split(text) or ([recipe] if recipe else [])
    ask = ["prism", "fit", *limit, *machine]
    if found.fits or not (best or line):
        return shlex.join(["prism", "replay", str(args.programs), *machine])
    if best is None:
        job, line = (_held(line), []) if recipe else ([], line)
        axes, out = ["tp=auto", "pp=auto"], f"{folder}-layouts"
        return shlex.join(["prism", "sweep", *job, *axes, *limit, *machine, "-o", out, *line])
    variable, _, value = best.words.partition("=")
    if variable == "PYTORCH_CUDA_ALLOC_CONF":
        return shlex.join([*ask, str(args.programs), "--alloc", value])
    if recipe is not None:
        out = f"{folder}-changed"
        capture = ["prism", "capture", *line, *shlex.split(best.words), "-o", out]
        return f"{shlex.join(capture)} && {shlex.join([*ask, out])}"
    ours, _ = split_line(line, options.alone())
    kept = [word for name, words in options.split(ours)[0] if name != _MORE for word in words]
    more = f"{options.value_of(_MORE, ours)} {best.words}".strip()
    return shlex.join([*ask, *kept, _MORE, more, *(line[len(ours) :] or ["torchrun", "…"])])


def _held(line: Sequence[str]) -> list[str]:
    """A recipe and those of its settings that a sweep of tp and pp holds."""
    from megatron_prism.core.recipe import OTHER_NAMES, SHORT

    names = [OTHER_NAMES.get(key := word.partition("=")[0], key) for word in line]
    free = {SHORT["tp"], SHORT["pp"], *(one for one in names if "." in one)} - {SHORT["world_size"]}
    settings = zip(line[1:], names[1:], strict=True)
    return [line[0], *(word for word, name in settings if name not in free)]
