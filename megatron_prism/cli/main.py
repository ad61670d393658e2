"""The ``prism`` command: its subcommands, their arguments and help.

One table of commands; each is a function of at most 40 lines whose docstring is its help.  stdout
gets the result, stderr the talk.  Exit status: 0 done, 1 a finding (such as a job that did not
train), 2 bad usage, 70 a mistake of ours.
A command answers with an ``Answer``, which is delivered here, or prints and returns its status.
Nothing here imports torch: a command imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import inspect
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import megatron_prism
from megatron_prism.cli import arguments
from megatron_prism.cli.compare import compare
from megatron_prism.cli.fit import fit, keep_line
from megatron_prism.cli.hang import hang, has_observation
from megatron_prism.cli.memory import ACTIONS, memory
from megatron_prism.cli.output import (
    Answer,
    check_outputs,
    check_working_directory,
    console,
    deliver,
    output_failed,
    prepare,
    print_table,
    visible,
)
from megatron_prism.cli.patches import patches
from megatron_prism.cli.predict import predict
from megatron_prism.cli.programs import calibrate, capture, check, show
from megatron_prism.cli.replay import replay
from megatron_prism.cli.sweep import sweep
from megatron_prism.cli.traces import import_
from megatron_prism.cli.verify import verify
from megatron_prism.core.columns import folded
from megatron_prism.core.errors import PrismError, UnitError, UsageError, did_you_mean
from megatron_prism.core.files import unwinding
from megatron_prism.core.megatron_source import UNKNOWN, megatron_release
from megatron_prism.core.messages import last_resort, progress

OUT = ("-o", "--out"), {"metavar": "DIR", "type": Path, "help": "artefact folder to write"}
FORCE = ("--force",), {"action": "store_true", "help": "replace an artefact that is there"}
PROGRAMS = ("programs",), {"metavar": "PATH", "help": "folder of slices, file of programs, or text"}
RECIPE = ("recipe",), {"metavar": "RECIPE", "help": "a YAML file, or a shipped recipe"}
RECIPE_OR_JOB = RECIPE[0], {**RECIPE[1], "nargs": "?"}
JSON = ("--json",), {"action": "store_true", "help": "print the result as JSON"}
CSV = ("--csv",), {"metavar": "FILE", "type": Path, "help": "its table to write, one row a line"}


Argument = tuple[tuple[str, ...], dict[str, Any]]  # as add_argument takes it


def _file(flag: str, text: str) -> Argument:
    """An option that names a file."""
    return (flag,), {"metavar": "FILE", "type": Path, "help": text}


def _switch(flag: str, text: str) -> Argument:
    """An option without a value."""
    return (flag,), {"action": "store_true", "help": text}


def _option(name: str, reader: arguments.Reader, metavar: str, text: str, **more: Any) -> Argument:
    """An option whose value ``reader`` reads."""

    def read(word: str) -> object:
        try:
            return reader(word)
        except UnitError as error:
            raise UsageError(f"--{name} {word}: {error.message}", fix=error.fix) from error

    return (f"--{name}",), {"type": read, "metavar": metavar, "help": text, **more}


MACHINE = _option("machine", arguments.name, "NAME", "a shipped machine, or a JSON file like it")
CALIBRATION = _option("calibration", arguments.name, "FILE", "what prism calibrate wrote")
LIMIT = _option("limit", arguments.limit, "80GB", "of a GPU's memory; default: the machine's")
HEADROOM = _option("headroom", arguments.size, "4GiB", "of the limit that stays free")
DEVICE = _option("device", arguments.name, "NAME", "of context, libraries and NCCL, or none",
                 default="h200")  # fmt: skip
ALLOC = _option("alloc", arguments.name, "OPTIONS", "the job's PYTORCH_CUDA_ALLOC_CONF")
DRAWS = (
    _option("draws", arguments.count(1, 100_000, "--draws 500"), "N", "iterations of an MoE job"),
    _option("routing", arguments.name, "LAW", "uniform, zipf:A, or a folder of --prism-record"),
    _option("capacity", arguments.number("--capacity 1.25"), "1.25", "of experts, then dropped"),
)
VERBOSE = (("-v", "--verbose"), {"action": "store_true", "help": "also what the result rests on"})


def _settings(text: str) -> Argument:
    return ("settings",), {"nargs": "*", "metavar": "key=value", "help": text}


WHAT_IFS = _settings("what if: slow=517:1.2, dp=64, microbatches=32")
OVERRIDES = _settings("change a flag of the recipe: tp=4, seq_length=4096")


def run(argv: Sequence[str]) -> int:
    """Run a training script as one rank of its large job; all other ranks are virtual.

    prism run [--prism-...] -- pretrain_gpt.py <the job's own arguments>
    prism run [--prism-...] torchrun --nnodes 128 --nproc-per-node 8 pretrain_gpt.py <the same>

    --prism-emulate is implied.  Launchers before the script are not started: their options say how
    many ranks there are.  The same script started with python or torchrun and --prism-emulate
    among its arguments does the same.
    """
    if not argv or argv[0] in ("-h", "--help"):
        from megatron_prism.emulate import options as flags

        flags.add_flags(parser("run")).print_help()
        return 0 if argv else 2
    from megatron_prism.emulate import launch

    return launch.run_script(list(argv))


def emulate(args: argparse.Namespace) -> Answer:
    """Run a recipe: build the model with megatron-core and train one rank per stage, no GPU needed.

    RECIPE is a YAML file or the name of a shipped recipe (prism recipes).  Prints, per stage,
    parameters, communication by group and the peak of live memory; -o keeps it all in a folder.
    """
    from megatron_prism.core import recipe as recipes

    recipe = recipes.load(args.recipe, args.settings)
    out = args.out or (Path(recipe.prism.out) if recipe.prism.out else None)
    from megatron_prism.emulate import recipe_job

    result = recipe_job.emulate(
        recipe, out, force=args.force, console=console(stderr=args.json), verbose=args.verbose
    )
    return Answer(result.to_json, lambda: None, lambda: [dict(one) for one in result.ranks])


def recipes(args: argparse.Namespace) -> Answer:
    """List the recipes that come with the package, one line each."""
    from megatron_prism.core import recipe

    shows = {name: recipe.summary(file) for name, file in recipe.shipped().items()}
    return Answer(
        lambda: shows,
        lambda: print_table(("recipe", "what it shows"), shows.items()),
        lambda: [{"recipe": name, "shows": text} for name, text in shows.items()],
    )


def mcp(args: argparse.Namespace) -> int:
    """Serve the questions to agents, on stdin and stdout (Model Context Protocol).

    prism mcp                 does it fit, how long and why, who hangs, which calls
    prism mcp --run           also captures jobs and evaluates layouts: runs their code here

    The tools' arguments are those of the commands; a job is named by its folder of slices.
    """
    from megatron_prism.cli.mcp_server import server

    server(args.run, parser, ask).run()
    return 0


@dataclass(frozen=True)
class Command:
    """One row: the function, its arguments for argparse; ``raw`` gets the words unparsed; ``job``
    takes a launch line, and the flags of ``prism run`` before it; ``programs``: place of a word in
    whose stead a launch line may stand, whose job is then captured."""

    function: Callable[..., Answer | int]
    arguments: tuple[Argument, ...] = ()
    raw: bool = False
    job: bool = False
    programs: int | None = None

    @property
    def summary(self) -> str:
        """What it does, in a line."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    @property
    def takes_line(self) -> bool:
        """Whether a launch line may be among its words."""
        return self.job or self.programs is not None


COMMANDS = {  # name -> what argparse needs
    "run": Command(run, raw=True),
    "emulate": Command(emulate, (RECIPE, OUT, VERBOSE, OVERRIDES)),
    "capture": Command(capture, (RECIPE_OR_JOB, OUT, OVERRIDES), job=True),
    "show": Command(show, (PROGRAMS,
        _option("rank", arguments.name, "RANKS", "a rank, or a selector: pp=1,tp=0"),
        _option("around", arguments.name, "2F0", "near this step: microbatch, letter, chunk"),
        _option("group", arguments.name, "GROUP", "calls in it: tp, pp, dp, or its whole name"),
        _switch("--text", "print the whole text form")), programs=0),
    "verify": Command(verify, (
        (("--against",), {"metavar": "FLAGS", "help": "flags more, or another command line"}),
        (("--keep",), {"metavar": "DIR", "type": Path, "help": "what ranks kept and printed"}),
        _file("--html", "the verdict as a page"), _switch("--precise", "compute in float64"),
        _switch("--no-bisect", "do not look for the flag"),
        _switch("--resume", "another layout goes on from a checkpoint, too")),
          job=True),
    "check": Command(check, (PROGRAMS,), programs=0),
    "hang": Command(hang, ((("programs",), {**PROGRAMS[1], "nargs": "?"}),
        _settings("fault=KIND@…, or changes of --recipe"),
        _option("plan", arguments.name, "FILE", "of faults", action="append", default=[]),
        _option("seed", arguments.count(0, 10**18, "--seed 0"), "N", "of ranks that are drawn",
          default=None), _file("--truth", "what was planted, to write"),
        (("--dumps",), {"metavar": "DIR", "help": "folder of Flight Recorder dumps"}),
        (("--logs",), {"metavar": "FILE", "nargs": "+", "help": "what the job printed"}),
        (("--then",), {"metavar": "DIR2", "help": "dumps of the same job some seconds later"}),
        _switch("--live", "of the job that runs on this host"),
        (("--watch",), {"metavar": "60s", "help": "look again so often"}),
        _file("--ras", "what ncclras printed, instead of asking"),
        _file("--prometheus", "of its collector"),
        (("--programs",), {"dest": "of", "metavar": "PATH", "help": "of the dumps' job"}),
        (("--recipe",), {"metavar": "NAME", "help": "of the dumps' job, captured now"}),
        _switch("--confirm", "run the suspects' real code"),
        (("-o", "--out"), {"metavar": "DIR", "help": "folder for the dumps of planted faults"}),
        _file("--markdown", "it, for an issue"), _file("--html", "the verdict as a page"),
        _file("--trace", "for ui.perfetto.dev")), job=True, programs=0),
    "fit": Command(fit, (PROGRAMS, LIMIT, HEADROOM, MACHINE, CALIBRATION, ALLOC, DEVICE,
        _option("class", arguments.name, "CLASS", "whose peak to show", dest="of_class"),
        _option("top", arguments.count(0, 10**9, "--top 12"), "N", "origins of the peak",
          default=8), *DRAWS,
        _option("oom", str, "TEXT", "of an out-of-memory error: which request it was"),
        _file("--html", "page to write, for any browser"),
        (("-o", "--out"), {"metavar": "FILE", "type": Path, "help": "snapshot to write"})),
          programs=0),
    "compare": Command(compare, (
        (("paths",), {"metavar": "PATH|key=value", "nargs": "+", "help": "A, then B"}), MACHINE,
        CALIBRATION,
        _option("norm", arguments.number("--norm 1e-3"), "1e-3", "of recordings", default=0.0),
        _switch("--exit-code", "status 1 if anything differs"),
        _file("--html", "page to write, for any browser"),
        _file("--trace", "trace with both, for ui.perfetto.dev")), programs=1),
    "replay": Command(replay, (PROGRAMS, WHAT_IFS, MACHINE, CALIBRATION,
        _option("iterations", arguments.count(1, 100, "--iterations 2 is settled"), "N",
          "in a row, of which the last is shown", default=2),
        _file("--html", "page to write, for any browser"),
        _file("--trace", "trace to write, for ui.perfetto.dev"), VERBOSE), programs=0),
    "predict": Command(predict, (PROGRAMS, WHAT_IFS, MACHINE, CALIBRATION,
        _option("variability", arguments.name, "NAME", "fitted, public, or a file"),
        _option("samples", arguments.count(1, 5_000_000, "--samples 100K; more take hours"), "N",
          "iterations to draw"),
        _option("seed", arguments.count(0, 1 << 62, "--seed 2"), "N", "of the draws", default=0),
        _option("slow", arguments.number("--slow 1.2"), "1.2", "of the one slow GPU", default=1.2),
        _file("--html", "page to write, with all what-ifs"), VERBOSE), programs=0),
    "import": Command(import_, (
        (("traces",), {"metavar": "TRACE", "nargs": "+", "help": "files, or folders of them"}),
        (("--slices",), {"metavar": "DIR", "help": "captured programs of the same job"}), OUT)),
    "sweep": Command(sweep, (RECIPE_OR_JOB,
        _settings("axes: tp=1,2,4 pp=auto"), OUT, MACHINE, LIMIT,
        _option("objective", arguments.name, "NAME", "time, tokens_per_gpu, p95 or cost"),
        _option("price", arguments.number("--price 2.5"), "2.5", "of a GPU for an hour"),
        _option("workers", arguments.count(1, 1 << 10, "--workers 2"), "N", "processes here"),
        _option("address", arguments.name, "ADDRESS", "of a Ray cluster; local: Ray here"),
        _option("trials", arguments.count(1, 100_000, "--trials 200"), "N", "Optuna picks"),
        _option("part", arguments.name, "I/N", "of the points, for --join"),
        _file("--html", "page: time against memory"),
        (("--slurm",), {"metavar": "N", "type": int, "help": "write an array job of N parts"}),
        _switch("--join", "rank what the parts have found")),
          job=True),
    "memory": Command(memory, ((("action",), {"choices": ACTIONS}), PROGRAMS,
        _file("--baseline", "what to check against, or to update"),
        _option("real", arguments.name, "SNAPSHOT", "of a real run of the job", action="append"),
        _option("tol", arguments.size, "1MiB", "growth that is still none", default=0), LIMIT,
        HEADROOM, _option("leak", arguments.size, "1MiB", "what an iteration may leave behind"),
        ALLOC, DEVICE, *DRAWS, (("-o", "--out"), {"metavar": "FILE", "help": "baseline to record"}),
        _switch("--github", "also annotate, for GitHub Actions")),
          programs=1),
    "calibrate": Command(calibrate, (
        (("-o", "--out"), {"metavar": "FILE", "type": Path, "help": "calibration to write"}),
        _switch("--host", "this host alone, without a GPU"),
        (("--from-nccl-tests",), {"nargs": "+", "metavar": "FILE", "help": "their output"}),
        _option("processes", arguments.count(0, 9999, "--processes 4"), "N", "one a GPU"),
        _option("seconds", arguments.count(1, 3600, "--seconds 10"), "N", "of --host", default=10),
        _option("node-gpus", arguments.count(1, 9999, "--node-gpus 72"), "N",
          "that NVLink joins, with --from-nccl-tests"))),
    "recipes": Command(recipes),
    "patches": Command(patches, (_option("megatron", str, "DIR", "a checkout of Megatron-LM"),)),
    "mcp": Command(mcp, (_switch("--run", "also capture jobs and evaluate layouts"),)),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.  An error is printed, never its traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None and words[:1] != ["run"]:
        del sys.argv[1:]  # a command that asks Megatron is no job, though its words name one
    prepare()
    try:
        check_working_directory()
        status = _dispatch(words)
        sys.stdout.flush()  # here, where a full disk has a name
        return status
    except PrismError as error:
        print(f"prism: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("prism: interrupted", file=sys.stderr)
        return 130
    except OSError as error:  # `prism show … | head`, a full disk, a place that cannot be used
        failed = output_failed(error)
        return _unexpected(error, words) if failed is None else failed
    except Exception as error:
        by_signal = _ended_by(error)
        return _unexpected(error, words) if by_signal is None else by_signal


def _unexpected(error: Exception, words: list[str]) -> int:
    """The exit status of a mistake of ours; one of a script is raised, as Python says it."""
    if words[:1] == ["run"]:
        raise error
    return last_resort(error, f"prism {' '.join(words)}")


def _ended_by(error: BaseException | None) -> int | None:
    """Exit status of the signal in whose unwinding the error came up, as argparse's do; None: of no
    signal."""
    while (error := error and error.__context__) is not None:
        if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > 128:
            return error.code
        if isinstance(error, KeyboardInterrupt):
            return 130
    return None


# what a command was called -> what it is called now, with the words behind it
_RENAMED = {"memory explain": "fit", "memory diff": "compare", "diff": "compare", "classes": "show",
            "world": "show"}  # fmt: skip


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if words else 2
    if words[0] == "--version":
        print(_version())
        return 0
    name, rest = words[0], words[1:]
    for old, new in _RENAMED.items():
        if f"{' '.join(words)} ".startswith(f"{old} "):
            fix = " ".join(["prism", new, *map(_as_option, words[len(old.split()) :])])
            raise UsageError(f"prism {old} is now prism {new}", fix=fix)
    if name not in COMMANDS:
        fix = did_you_mean(name, COMMANDS, f"use one of {', '.join(COMMANDS)}")
        raise UsageError(f"there is no command {name}", fix=fix)
    command = COMMANDS[name]
    if command.raw:
        return command.function(rest)  # type: ignore[return-value]
    if {"-h", "--help"} & set(_split_at_line(name, rest)[0]):
        parser(name).print_help()
        return 0
    asks = command.programs is not None or name == "capture"
    working = progress(lambda: name) if asks else contextlib.nullcontext()
    with unwinding(), visible(), working:
        args, answer = ask(name, rest)
        return answer if isinstance(answer, int) else deliver(args, answer)


def ask(name: str, words: list[str]) -> tuple[argparse.Namespace, Answer | int]:
    """The arguments of command ``name`` and what it answers; files that cannot be written are
    refused before the work."""
    args = read_words(name, words)
    outputs = [getattr(args, one, None) for one in ("csv", "html", "trace")]
    inputs = getattr(args, "paths", None) or [getattr(args, "programs", None)]
    check_outputs(outputs, getattr(args, "force", False), [one for one in inputs if one])
    return args, COMMANDS[name].function(args)


def _as_option(word: str) -> str:
    """``limit=80GB`` as ``--limit 80GB``; other words as the shell takes them."""
    key, equals, value = word.partition("=")
    if equals and key.replace("_", "").isalpha():
        return f"--{key.replace('_', '-')} {shlex.quote(value)}"
    return shlex.quote(word)


def _split_at_line(name: str, words: list[str]) -> tuple[list[str], list[str]]:
    """(words of command ``name``, a launch line) in ``words``."""
    if not COMMANDS[name].takes_line:
        return words, []
    from megatron_prism.emulate import options
    from megatron_prism.emulate.launch_line import split_line

    actions = parser(name)._actions
    alone = {option for one in actions if one.nargs == 0 for option in one.option_strings}
    return split_line(words, alone | options.alone())


def read_words(name: str, words: list[str]) -> argparse.Namespace:
    """The arguments of command ``name``, behind which a launch line may stand.

    ``job`` gets the script of that line and its arguments, ``ours`` the flags of ``prism run``.  A
    command that reads programs gets those of the job, captured now, unless it reads dumps or logs
    of the job.
    """
    rest, line = _split_at_line(name, words)
    job, ours, given = list[str](), list[str](), list[str]()
    if line:
        from megatron_prism.emulate import options
        from megatron_prism.emulate.job_line import job_of

        flags, rest = options.split(rest)
        given = [word for _, some in flags for word in some]
        launched, job = job_of(line, given)
        ours = [*given, *launched]
        if not job:
            fix = f"prism {name} … torchrun … pretrain_gpt.py …"
            raise UsageError(f"no script stands in {shlex.join(line)}", fix=fix)
    place = COMMANDS[name].programs
    if job and place is not None and not has_observation(rest):
        _parse(name, [*rest[:place], "SLICES", *rest[place:]])  # what is wrong there is said first
        folder = _captured(job, ours, [*given, *line])
        rest = [*rest[:place], str(folder), *rest[place:]]
        job = []
    args = _parse(name, rest)
    args.job, args.ours, args.line, args.given = job, ours, line, given
    return args


def _captured(job: Sequence[str], ours: Sequence[str], line: Sequence[str]) -> Path:
    """The folder of slices of a script's job, which is captured unless it is there; ``line``: from
    which."""
    from megatron_prism.emulate import script_job

    digest = hashlib.sha1("\0".join((*ours, *job)).encode()).hexdigest()[:8]
    folder = Path(f"prism-{digest}")
    talk = console(stderr=True)
    script_job.capture_command_line(job[0], [*ours, *job[1:]], folder, talk)
    keep_line(folder, line)
    talk.print(f"prism: {folder} is kept: the next question about this line reads it")
    return folder


class _Parser(argparse.ArgumentParser):
    """argparse, with its errors as ours."""

    def error(self, message: str) -> NoReturn:
        # argparse counts optional words as missing too
        message = message.replace(", key=value", "")
        raise UsageError(f"{self.prog}: {message}", fix=f"see {self.prog} --help")


def parser(name: str) -> _Parser:
    """What reads the words of command ``name``."""
    made = _Parser(
        prog=f"prism {name}",
        description=inspect.getdoc(COMMANDS[name].function),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    common = () if name in ("run", "mcp") else (CSV, FORCE, JSON)
    for flags, settings in (*COMMANDS[name].arguments, *common):
        made.add_argument(*flags, **settings)
    return made


def _parse(name: str, words: list[str]) -> argparse.Namespace:
    """The arguments of command ``name``; options and key=value words may come in any order."""
    reader = parser(name)
    options = [flag for action in reader._actions for flag in action.option_strings]
    for word in words:
        if (now := _as_option(word)) != shlex.quote(word) and now.partition(" ")[0] in options:
            raise UsageError(f"{word} is an option of prism {name}", fix=now)
    for action in reader._actions:
        if action.metavar == "FLAGS" and (own := {*action.option_strings} & {*words[:-1]}):
            at = words.index(own.pop())  # argparse takes a lone flag for one of its own
            words = [*words[:at], f"{words[at]}={words[at + 1]}", *words[at + 2 :]]
    args, rest = reader.parse_known_intermixed_args(words)
    takes_settings = hasattr(args, "settings")
    for word, following in zip(rest, [*rest, "…"][1:], strict=True):
        if "=" in word and takes_settings:
            args.settings.append(word)  # --seq-length=4096, as Megatron has it
            continue
        if word in ("--against", "--explain"):
            raise UsageError(f"prism {name} {word} is now prism compare", fix="prism compare A B")
        fix = f"see prism {name} --help"
        if takes_settings and word.startswith("--"):
            fix = f"of the job itself: {word[2:].replace('-', '_')}={following}"
        from megatron_prism.emulate.launch_line import BY_NAME

        fix = did_you_mean(word, [*options, *BY_NAME], fix, cutoff=0.7)
        raise UsageError(f"prism {name} has no option {word}", fix=fix)
    return args


GROUPS = {
    "run a rank of the job": ("run", "emulate", "capture", "import", "recipes"),
    "ask": ("fit", "replay", "compare", "sweep", "predict", "verify"),
    "debug": ("hang", "check", "show"),
    "maintain": ("memory", "calibrate", "patches", "mcp"),
}


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: prism COMMAND …"]
    for group, names in GROUPS.items():
        lines += ["", group]
        for name in names:
            lines += folded(f"  {name:{width}}  {COMMANDS[name].summary}", width + 4)
    return "\n".join([*lines, "", "prism COMMAND --help says more; prism --version says which."])


def _version() -> str:
    release = megatron_release()
    core = "no megatron-core" if release == UNKNOWN else f"megatron-core {release}"
    try:
        torch = f"torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        torch = "no torch"
    return f"prism {megatron_prism.__version__} ({core}, {torch})"
