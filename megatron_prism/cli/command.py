"""What a command is, and the arguments that several commands share.

A feature's ``command.py`` has ``COMMANDS``: name -> ``Command``.  ``cli.main`` collects these
beside the commands of core (``cli.jobs``).
"""

from __future__ import annotations

import argparse
import enum
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megatron_prism.cli import arguments
from megatron_prism.cli.output import Answer
from megatron_prism.core.errors import UnitError, UsageError

Argument = tuple[tuple[str, ...], dict[str, Any]]  # names and settings of argparse's add_argument


class HelpGroup(enum.Enum):
    """Part of the overview of ``prism --help`` in which a command stands."""

    RUN = "run a rank of the job"
    ASK = "ask"
    DEBUG = "debug"
    MAINTAIN = "maintain"


@dataclass(frozen=True)
class Command:
    """One command of ``prism``.

    Args:
        function: answers; its docstring is the help.
        arguments: what argparse reads, beside --csv, --force and --json.
        group: part of the overview.
        takes_common: whether the command has --csv, --force and --json.
        raw: the function gets the words unparsed.
        job: a launch line may stand behind the words; its flags of ``prism run`` go before it.
        programs: place among the words at which folders of slices stand; a launch line in place of
            that word is captured first.  None: the command reads no programs.
        observes: whether the words name dumps or logs of a job; a launch line beside them is not
            captured.
        checks_job: the function itself takes the obstacles of a launch line (``args.obstacles``).
        shows_progress: print a line while the command works.
        formerly: earlier spellings of the command, such as ``memory diff``.
    """

    function: Callable[..., Answer | int]
    arguments: tuple[Argument, ...] = ()
    group: HelpGroup = HelpGroup.ASK
    takes_common: bool = True
    raw: bool = False
    job: bool = False
    programs: int | None = None
    observes: Callable[[list[str]], bool] | None = None
    checks_job: bool = False
    shows_progress: bool = False
    formerly: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """First line of the help."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    @property
    def takes_line(self) -> bool:
        """Whether a launch line may stand among the words."""
        return self.job or self.programs is not None

    def captures(self, words: list[str]) -> bool:
        """Whether the job of a launch line behind ``words`` is captured before the command runs."""
        if self.programs is None:
            return False
        return self.observes is None or not self.observes(words)


@dataclass(frozen=True)
class ProgramCheck:
    """A question of ``prism check`` that a feature answers, behind a switch of its own.

    Args:
        name: of the switch, without dashes.
        text: help of the switch.
        function: answers, instead of the check of calls.
    """

    name: str
    text: str
    function: Callable[..., Answer]


def file_option(flag: str, text: str) -> Argument:
    """Make an option that names a file."""
    return (flag,), {"metavar": "FILE", "type": Path, "help": text}


def switch(flag: str, text: str) -> Argument:
    """Make an option without a value."""
    return (flag,), {"action": "store_true", "help": text}


def option(name: str, reader: arguments.Reader, metavar: str, text: str, **more: Any) -> Argument:
    """Make an option with a value.

    Args:
        name: of the option, without dashes.
        reader: reads the value; its UnitError becomes a UsageError that names the option.
        metavar: name of the value in the help.
        text: help of the option.
        **more: further settings of argparse's add_argument.
    """

    def read(word: str) -> object:
        try:
            return reader(word)
        except UnitError as error:
            raise UsageError(f"--{name} {word}: {error.message}", fix=error.fix) from error

    return (f"--{name}",), {"type": read, "metavar": metavar, "help": text, **more}


def settings(text: str) -> Argument:
    """Make the argument that takes ``key=value`` words."""
    return ("settings",), {"nargs": "*", "metavar": "key=value", "help": text}


OUT = ("-o", "--out"), {"metavar": "DIR", "type": Path, "help": "artefact folder to write"}
FORCE = ("--force",), {"action": "store_true", "help": "overwrite an existing artefact"}
JSON = ("--json",), {"action": "store_true", "help": "print the result as JSON"}
CSV = ("--csv",), {"metavar": "FILE", "type": Path, "help": "write the table as CSV"}
PROGRAMS = ("programs",), {"metavar": "PATH", "help": "folder of slices, file of programs, or text"}
RECIPE = ("recipe",), {"metavar": "RECIPE", "help": "a YAML file, or a shipped recipe"}
RECIPE_OR_JOB = RECIPE[0], {**RECIPE[1], "nargs": "?"}
MACHINE = option("machine", arguments.name, "NAME", "a shipped machine, or a JSON file like it")
CALIBRATION = option("calibration", arguments.name, "FILE", "what prism calibrate wrote")
LIMIT = option("limit", arguments.limit, "80GB", "memory of a GPU; default: the machine's")
HEADROOM = option("headroom", arguments.size, "4GiB", "part of the limit that stays free")
DEVICE = option(
    "device",
    arguments.name,
    "NAME",
    "calibration of context, libraries and NCCL, or none",
    default="h200",
)
ALLOC = option("alloc", arguments.name, "OPTIONS", "the job's PYTORCH_CUDA_ALLOC_CONF")
DRAWS = (
    option(
        "draws",
        arguments.count(1, 100_000, "--draws 500"),
        "N",
        "number of iterations of an MoE job to draw",
    ),
    option(
        "routing",
        arguments.name,
        "LAW",
        "routing of the draws: uniform, zipf:A, a JSON file of tokens by expert, or a folder of "
        "--prism-record",
    ),
    option(
        "capacity",
        arguments.number("--capacity 1.25"),
        "1.25",
        "capacity factor of experts; tokens beyond it are dropped",
    ),
)
VERBOSE = (
    ("-v", "--verbose"),
    {"action": "store_true", "help": "also print what the result is based on"},
)
WHAT_IFS = settings("what if: slow=517:1.2, dp=64, microbatches=32")
OVERRIDES = settings("change a flag of the recipe: tp=4, seq_length=4096")


class CommandParser(argparse.ArgumentParser):
    """argparse's parser, which raises UsageError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with argparse's message."""
        # argparse counts optional words as missing too
        message = message.replace(", key=value", "")
        raise UsageError(f"{self.prog}: {message}", fix=f"see {self.prog} --help")


def make_parser(name: str, command: Command) -> CommandParser:
    """Make what reads the words of ``command``, whose name is ``name``."""
    parser = CommandParser(
        prog=f"prism {name}",
        description=inspect.getdoc(command.function),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # ``main._parse`` takes ``--seq-length=4096`` as a setting: a prefix of ours must not
        allow_abbrev=False,
    )
    shared = (CSV, FORCE, JSON) if command.takes_common else ()
    for flags, how in (*command.arguments, *shared):
        parser.add_argument(*flags, **how)
    return parser
