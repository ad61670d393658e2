"""``prism fit``: does it fit, what is the peak made of, and which flag makes it fit."""

from __future__ import annotations

import argparse
import pickle
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_prism.cli import arguments, what_ifs
from megatron_prism.cli.command import (
    ALLOC,
    CALIBRATION,
    DEVICE,
    DRAWS,
    HEADROOM,
    LIMIT,
    MACHINE,
    PROGRAMS,
    WHAT_IFS,
    Command,
    HelpGroup,
    file_option,
    option,
)
from megatron_prism.cli.file_answers import answer_about_files
from megatron_prism.cli.job_slices import estimate_note, kept_line
from megatron_prism.cli.memory_arguments import draws_of, warn_absent
from megatron_prism.cli.output import Answer, check_outputs
from megatron_prism.core.errors import UsageError
from megatron_prism.features.fit.candidates import JOB_FLAGS

if TYPE_CHECKING:
    from megatron_prism.core.programs.program import Program, Programs
    from megatron_prism.features.fit.fit import Fit
    from megatron_prism.replay.priced_graph import PricedGraph

# "try" is no name in Python, where agents call the command
_TRY_HELP = "capture the job with further changes, too"
_TRY = (("--try",), {"action": "store_true", "dest": "try_changes", "help": _TRY_HELP})


def fit(args: argparse.Namespace) -> Answer:
    """Does the job fit into its GPUs, what is the peak made of, and which flag makes it fit?

    prism fit DIR --limit 80GB
    prism fit DIR dp=64 microbatches=32     what-ifs, as prism replay has them
    prism fit --limit 80GB torchrun --nnodes 128 --nproc-per-node 8 pretrain_gpt.py <its arguments>
    prism fit DIR lengths=FILE capture=DIR2 iterations=3000     samples of other lengths, as
                                            prism uneven has them
    prism fit DIR --class pp=3 --top 20 -o peak.pickle      for pytorch.org/memory_viz
    prism fit DIR --draws 500 --routing zipf:1 [--capacity 1.25]      an MoE job's routing
    prism fit DIR --oom "Tried to allocate 17.58 GiB …"     which request of the job it was
    prism fit DIR --free 6GiB [--try]                       what frees memory of a job that fits
    prism fit SNAPSHOT          a real process (torch.cuda.memory._snapshot, .gz, .xz)

    Exit status 1: it does not fit, or a later iteration may run out (at risk).  Without --limit it
    is the memory of the machine.  80GB is what a card sold as 80 GB has.  Each change of flags was
    tried on the slices: its memory by the allocator's rules, its time by replaying the forwards
    that run again.  --try captures the job's line again with further changes: the optimizer's
    precision, optimizer or activations on the host, virtual stages, single layers again, and pairs.

    --device is a shipped calibration of context, libraries and NCCL (default h200), a file of
    benchmarks/tools/device_memory.py, or none: the limit is then held against
    reserved bytes.  --draws takes slices of tier meta; --routing uniform, zipf:A, or a folder of
    --prism-record.
    """
    from megatron_prism.features.fit.fit import fit as fit_programs
    from megatron_prism.features.fit.oom_answer import explain_error
    from megatron_prism.memory.job_peaks import first_program

    path = args.programs
    check_outputs([args.out], args.force, [path])
    if args.free == 0:
        raise UsageError("--free of nothing", fix="--free 6GiB")
    answer = answer_about_files("fit", args, [path], [args.settings])
    if answer is not None:
        return answer
    programs = what_ifs.open_job(path, partial=True)
    job: Programs | PricedGraph = programs
    # memory and time are those of the job that the what-ifs make
    if args.settings:
        how = {"machine": args.machine, "calibration": args.calibration}
        job = what_ifs.priced(programs, args.settings, "fit", **how)
        programs = job.graph.programs
    if args.oom is not None:
        return explain_error(args, job)
    warn_absent(programs)
    settings = {
        "machine": args.machine,
        "calibration": args.calibration,
        "alloc_conf": args.alloc or "",
        "device": None if args.device == "none" else args.device,
    }
    result = fit_programs(
        job,
        limit=args.limit,
        headroom=args.headroom or 0,
        draws=draws_of(args),
        free=args.free or 0,
        **settings,
    )
    if args.try_changes:
        result = _with_trials(args, result, partial(fit_programs, with_changes=False, **settings))
    name = args.of_class or result.worst
    if name not in result.memory.classes:
        raise UsageError(f"there is no class {name}", fix=f"use {', '.join(result.memory.classes)}")
    if args.out is not None:
        _write_snapshot(args, first_program(programs, result.memory.classes[name]))
    note = what_ifs.machine_note(programs, args.machine)
    # an estimate is of the job as captured
    if args.line and not args.settings and result.headline is not None:
        need = result.limit + result.over
        assumes = result.headline.assumes
        note += estimate_note(Path(path), assumes, result.iteration_ns, need)
    return Answer(
        result.to_json,
        lambda: print(result.to_text(name, args.top) + note, end=""),
        result.to_rows,
        next=_next(args, result, programs),
        status=int(not (result.frees_enough if result.free else result.fits)),
        html=result.to_html,
    )


def _write_snapshot(args: argparse.Namespace, program: Program) -> None:
    """What pytorch.org/memory_viz shows of one class."""
    from megatron_prism.core.files import whole_file
    from megatron_prism.memory import peaks

    with whole_file(args.out, force=args.force) as file:
        pickle.dump(peaks.viz_snapshot(program), file)
    print(f"wrote {args.out}: open it at https://pytorch.org/memory_viz", file=sys.stderr)


_VARIABLE = re.compile(r"[A-Z_0-9]+=\S+ ")


def _line_of(args: argparse.Namespace, programs: Programs) -> list[str]:
    """Return the launch line of a job, or its recipe and settings; empty where nobody knows."""
    recipe = programs.source.get("recipe")
    line = [*args.given, *args.line] or kept_line(Path(args.programs))
    if not line and recipe:
        line = [recipe]
    return line


def _with_trials(args: argparse.Namespace, result: Fit, fit_as_asked: Callable[..., Fit]) -> Fit:
    """Capture the job with further changes, into a folder beside its slices."""
    from megatron_prism.cli.output import console
    from megatron_prism.features.fit.trials import CapturedLine, with_trials

    if result.what_if:
        message = "--try captures the job as it is, and these programs are changed"
        raise UsageError(message, fix="prism fit DIR --try, without what-ifs")
    # a recipe's name alone does not say with which settings it was captured
    line = [*args.given, *args.line] or kept_line(Path(args.programs))
    if not line:
        message = f"{args.programs} does not say of which line it is"
        raise UsageError(message, fix="prism fit --try … torchrun … pretrain_gpt.py …")

    def weigh(programs: Programs) -> Fit:
        return fit_as_asked(programs, limit=result.limit)

    captured_line = CapturedLine(
        words=tuple(line),
        is_recipe="recipe" in result.programs.source,
        folder=Path(f"{args.programs}-changes"),
        console=console(stderr=True),
    )
    return with_trials(result, captured_line, weigh)


def _next(args: argparse.Namespace, result: Fit, programs: Programs) -> str:
    """What to type next: how long it takes, the change that fits, captured for certain, or other
    layouts where no change is enough.
    """
    from megatron_prism.emulate.command_line import options
    from megatron_prism.emulate.command_line.launch_line import split_line

    machine: list[str] = []
    if args.machine:
        machine = ["--machine", args.machine]
    limit: list[str] = []
    if args.limit:
        limit = ["--limit", args.limit]
    # the bound that frees as much, of which other slices do not know
    elif result.free:
        limit = ["--limit", f"{result.limit}B"]
    best = next((change for change in result.changes if change.fits), None)
    path = str(args.programs)
    folder = Path(path)
    recipe = programs.source.get("recipe")
    line = _line_of(args, programs)
    ask = ["prism", "fit", *limit, *machine]
    # a sweep captures its layouts, of which what-ifs say nothing
    nothing_to_try = best is None and (not line or args.settings)
    if result.fits or nothing_to_try:
        return shlex.join(["prism", "replay", path, *args.settings, *machine])
    if best is None:
        axes = ["tp=auto", "pp=auto"]
        options_of_sweep = [*axes, *limit, *machine, "-o", f"{folder}-layouts"]
        # a recipe stands in front of its axes, a launch line behind them
        if recipe:
            return shlex.join(["prism", "sweep", *_held(line), *options_of_sweep])
        return shlex.join(["prism", "sweep", *options_of_sweep, *line])
    variable, _, value = best.words.partition("=")
    if variable == "PYTORCH_CUDA_ALLOC_CONF":
        return shlex.join([*ask, path, *args.settings, "--alloc", value])
    # a variable of the environment stands before the command
    words, before = best.words, ""
    match = _VARIABLE.match(words)
    if match is not None:
        before, words = match[0], words[match.end() :]
    if recipe is not None:
        out = f"{folder}-changed"
        capture = ["prism", "capture", *line, *shlex.split(words), "-o", out]
        return f"{before}{shlex.join(capture)} && {shlex.join([*ask, out, *args.settings])}"
    ours, _ = split_line(line, options.alone())
    # the job's flags of ours, but for those that the change is joined to
    other_flags: list[str] = []
    for name, flag_words in options.split(ours)[0]:
        if name != JOB_FLAGS:
            other_flags += flag_words
    earlier = options.value_of(JOB_FLAGS, ours)
    job_flags = f"{earlier} {words}".strip()
    job = line[len(ours) :] or ["torchrun", "…"]
    asked = [*ask, *args.settings, *other_flags, JOB_FLAGS, job_flags, *job]
    return f"{before}{shlex.join(asked)}"


def _held(line: Sequence[str]) -> list[str]:
    """A recipe and those of its settings that a sweep of tp and pp holds."""
    from megatron_prism.core.jobs.recipe import OTHER_NAMES, SHORT

    recipe, *settings = line
    words = [recipe]
    for setting in settings:
        key = setting.partition("=")[0]
        name = OTHER_NAMES.get(key, key)
        is_size_of_world = name == SHORT["world_size"]
        # tp and pp are axes of the sweep; a name with a dot is none of Megatron's flags
        is_free = name in (SHORT["tp"], SHORT["pp"]) or "." in name
        if is_size_of_world or not is_free:
            words.append(setting)
    return words


COMMANDS = {
    "fit": Command(
        fit,
        (
            PROGRAMS,
            WHAT_IFS,
            LIMIT,
            HEADROOM,
            option("free", arguments.size, "6GiB", "memory to free, in place of a limit"),
            _TRY,
            MACHINE,
            CALIBRATION,
            ALLOC,
            DEVICE,
            option(
                "class",
                arguments.name,
                "CLASS",
                "class of ranks whose peak is shown",
                dest="of_class",
            ),
            option(
                "top",
                arguments.count(0, 10**9, "--top 12"),
                "N",
                "number of origins of the peak to show",
                default=8,
            ),
            *DRAWS,
            option(
                "oom", str, "TEXT", "text of an out-of-memory error, whose request is looked for"
            ),
            file_option("--html", "page to write, for any browser"),
            (("-o", "--out"), {"metavar": "FILE", "type": Path, "help": "snapshot to write"}),
        ),
        group=HelpGroup.ASK,
        programs=0,
        shows_progress=True,
        formerly=("memory explain",),
    ),
}
