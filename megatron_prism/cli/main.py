"""The ``prism`` command: parse the words, call one command, print its answer.

The commands are those of core (``cli.jobs``) and of the features that are installed; each is a
function whose docstring is its help.  stdout gets the result, stderr the talk.  Exit status: 0
done, 1 a finding (such as a job that did not train), 2 bad usage, 70 a mistake of prism.
A command answers with an ``Answer``, which is delivered here, or prints and returns its status.
Nothing here imports torch: a command imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata

import megatron_prism
from megatron_prism.cli import jobs
from megatron_prism.cli.command import Command, CommandParser, HelpGroup, make_parser
from megatron_prism.cli.job_slices import capture_line, estimator_of
from megatron_prism.cli.output import (
    Answer,
    check_outputs,
    check_working_directory,
    deliver,
    output_failed,
    prepare,
    visible,
)
from megatron_prism.core import feature
from megatron_prism.core.columns import folded
from megatron_prism.core.errors import PrismError, UsageError, did_you_mean
from megatron_prism.core.files import unwinding
from megatron_prism.core.messages import last_resort, progress


def _all_commands() -> dict[str, Command]:
    """Collect the commands of core and of every feature, by name."""
    commands = dict(jobs.COMMANDS)
    for module in feature.modules("command"):
        commands.update(module.COMMANDS)
    return commands


COMMANDS = _all_commands()


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
    """Return the exit status of a mistake of prism; an error of a script is raised again."""
    # the traceback of a training script is what its user needs
    if words[:1] == ["run"]:
        raise error
    return last_resort(error, f"prism {' '.join(words)}")


def _ended_by(error: BaseException | None) -> int | None:
    """Return the exit status of the signal in whose unwinding the error came up; else None."""
    # an error while cleaning up would hide from a scheduler that a signal ended the command
    while (error := error and error.__context__) is not None:
        if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > 128:
            return error.code
        if isinstance(error, KeyboardInterrupt):
            return 130
    return None


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if words else 2
    if words[0] == "--version":
        print(_version())
        return 0
    _refuse_former_names(words)
    name, command_words = words[0], words[1:]
    if name not in COMMANDS:
        fix = did_you_mean(name, COMMANDS, f"use one of {', '.join(COMMANDS)}")
        raise UsageError(f"there is no command {name}", fix=fix)
    command = COMMANDS[name]
    # the command reads its words itself, a job's own among them
    if command.raw:
        return command.function(command_words)  # type: ignore[return-value]
    # help is asked of the command, not of the job behind it
    if {"-h", "--help"} & set(_split_at_line(name, command_words)[0]):
        parser(name).print_help()
        return 0
    working = progress(lambda: name) if command.shows_progress else contextlib.nullcontext()
    with unwinding(), visible(), working:
        args, answer = ask(name, command_words)
        return answer if isinstance(answer, int) else deliver(args, answer)


def _refuse_former_names(words: list[str]) -> None:
    """UsageError for an earlier spelling of a command, with the line to type now."""
    for name, command in COMMANDS.items():
        for former in command.formerly:
            if not f"{' '.join(words)} ".startswith(f"{former} "):
                continue
            words_behind = words[len(former.split()) :]
            fix = " ".join(["prism", name, *map(_as_option, words_behind)])
            raise UsageError(f"prism {former} is now prism {name}", fix=fix)


def ask(name: str, words: list[str]) -> tuple[argparse.Namespace, Answer | int]:
    """Run a command; files that cannot be written are refused before the work.

    Args:
        name: of the command.
        words: behind the name.

    Returns:
        The arguments that the words were read as, and the answer.
    """
    args = read_words(name, words)
    outputs = [getattr(args, kind, None) for kind in ("csv", "html", "trace")]
    inputs = getattr(args, "paths", None) or [getattr(args, "programs", None)]
    check_outputs(outputs, getattr(args, "force", False), [path for path in inputs if path])
    return args, COMMANDS[name].function(args)


def _as_option(word: str) -> str:
    """``limit=80GB`` as ``--limit 80GB``; other words as the shell takes them."""
    key, equals, value = word.partition("=")
    if equals and key.replace("_", "").isalpha():
        return f"--{key.replace('_', '-')} {shlex.quote(value)}"
    return shlex.quote(word)


def _split_at_line(name: str, words: list[str]) -> tuple[list[str], list[str]]:
    """Split the words of command ``name`` from a launch line behind them."""
    # the words of other commands are their own
    if not COMMANDS[name].takes_line:
        return words, []
    from megatron_prism.emulate.command_line import options
    from megatron_prism.emulate.command_line.launch_line import split_line

    # flags without a value: the word behind one may begin the launch line
    switches = options.alone()
    switches.update(flag.replace("--prism-", "--") for flag in options.alone())
    for action in parser(name)._actions:
        if action.nargs == 0:
            switches.update(action.option_strings)
    return split_line(words, switches)


def read_words(name: str, words: list[str]) -> argparse.Namespace:
    """Read the words of command ``name``, behind which a launch line may stand.

    Returns:
        What argparse read.  ``obstacles`` has what stops the job of a command that captures it
        itself.  ``job`` has the script of the launch line and its arguments, ``ours``
        the flags of ``prism run``, ``line`` the launch line, ``given`` our flags among the words.
        A command that reads programs gets those of the job, captured now, unless it reads dumps or
        logs of the job.
    """
    command = COMMANDS[name]
    command_words, line = _split_at_line(name, words)
    # the script and its arguments; flags of ``prism run``: all, and those typed among the words
    job, job_flags, typed_flags = list[str](), list[str](), list[str]()
    obstacles, captures = None, False
    if line:
        from megatron_prism.emulate.command_line import options
        from megatron_prism.emulate.command_line.job_line import job_of
        from megatron_prism.emulate.preflight.obstacles import Obstacles

        command_words = _with_long_flags(name, command_words)
        flags, command_words = options.split(command_words)
        for _, flag_words in flags:
            typed_flags += flag_words
        captures = command.captures(command_words)
        # all that stops the job is said at once
        if captures or command.checks_job:
            obstacles = Obstacles()
        launched, job = job_of(line, typed_flags, obstacles)
        job_flags = [*typed_flags, *launched]
        # without a script there is nothing to capture: what is wrong with the line is said
        if obstacles is not None and not job and not command.checks_job:
            obstacles.raise_all()
        # the launch line has no script that runs
        if not job and not obstacles:
            fix = f"prism {name} … torchrun … pretrain_gpt.py …"
            raise UsageError(f"no script stands in {shlex.join(line)}", fix=fix)
    if job and captures:
        place = command.programs
        # wrong words of the command are said before the capture, in which SLICES stands for the job
        read = _parse(name, [*command_words[:place], "SLICES", *command_words[place:]])
        # a what-if has a value, so a word without one is a misspelled launcher
        for word in getattr(read, "settings", ()):
            if "=" not in word:
                raise _unknown_word(name, word, [], f"see prism {name} --help")
        estimator = None
        if hasattr(read, "machine"):
            estimator = estimator_of(read.machine)
        folder = capture_line(job, job_flags, [*typed_flags, *line], obstacles, estimator)
        command_words = [*command_words[:place], str(folder), *command_words[place:]]
        job = []
    args = _parse(name, command_words)
    args.job, args.ours, args.line, args.given = job, job_flags, line, typed_flags
    args.obstacles = obstacles
    return args


def _with_long_flags(name: str, words: list[str]) -> list[str]:
    """Write flags of a job that are given without ``prism-`` in full: ``--map`` is ``--prism-map``.

    Options of the command itself stay.
    """
    from megatron_prism.emulate.command_line.options import FLAGS

    own_options = parser(name)._option_string_actions
    full_words = []
    for word in words:
        flag, equals, value = word.partition("=")
        full_flag = f"--prism-{flag[2:]}"
        # a flag of the job under its short name, which the command does not use itself
        if flag.startswith("--") and flag not in own_options and full_flag in FLAGS:
            word = f"{full_flag}{equals}{value}"
        full_words.append(word)
    return full_words


def parser(name: str) -> CommandParser:
    """Make what reads the words of command ``name``."""
    return make_parser(name, COMMANDS[name])


def _parse(name: str, words: list[str]) -> argparse.Namespace:
    """Read the words of command ``name``; options and key=value words may come in any order."""
    reader = parser(name)
    options: list[str] = []
    for action in reader._actions:
        options += action.option_strings
    # an option without its dashes
    for word in words:
        as_option = _as_option(word)
        if as_option != shlex.quote(word) and as_option.partition(" ")[0] in options:
            raise UsageError(f"{word} is an option of prism {name}", fix=as_option)
    words = _joined_flags(reader, words)
    args, unread = reader.parse_known_intermixed_args(words)
    takes_settings = hasattr(args, "settings")
    for word, following in zip(unread, [*unread, "…"][1:], strict=True):
        if "=" in word and takes_settings:
            args.settings.append(word)  # --seq-length=4096, as Megatron has it
            continue
        if word in ("--against", "--explain"):
            raise UsageError(f"prism {name} {word} is now prism compare", fix="prism compare A B")
        fix = f"see prism {name} --help"
        if takes_settings and word.startswith("--"):
            fix = f"of the job itself: {word[2:].replace('-', '_')}={following}"
        raise _unknown_word(name, word, options, fix)
    return args


def _unknown_word(name: str, word: str, options: list[str], fix: str) -> UsageError:
    """Make the error of a word that is no option, no what-if and no launcher.

    Args:
        name: of the command.
        word: what was typed.
        options: of the command.
        fix: where no option and no launcher is close to the word.
    """
    from megatron_prism.emulate.command_line.launch_line import BY_NAME

    fix = did_you_mean(word, [*options, *BY_NAME], fix, cutoff=0.7)
    return UsageError(f"prism {name} has no option {word}", fix=fix)


def _joined_flags(reader: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """Join ``--against --flag`` as ``--against=--flag``, for options whose values are flags."""
    for action in reader._actions:
        if action.metavar != "FLAGS":
            continue
        named = set(action.option_strings) & set(words[:-1])
        if named:
            index = words.index(named.pop())  # argparse takes a lone flag for an option of prism
            joined = f"{words[index]}={words[index + 1]}"
            words = [*words[:index], joined, *words[index + 2 :]]
    return words


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: prism COMMAND …"]
    for group in HelpGroup:
        lines += ["", group.value]
        for name, command in COMMANDS.items():
            if command.group is group:
                lines += folded(f"  {name:{width}}  {command.summary}", width + 4)
    return "\n".join([*lines, "", "prism COMMAND --help says more; prism --version says which."])


def _version() -> str:
    from megatron_prism.core.jobs.megatron_source import UNKNOWN, megatron_release

    release = megatron_release()
    core = "no megatron-core" if release == UNKNOWN else f"megatron-core {release}"
    try:
        torch = f"torch {metadata.version('torch')}"
    # commands that read slices work without torch
    except metadata.PackageNotFoundError:
        torch = "no torch"
    return f"prism {megatron_prism.__version__} ({core}, {torch})"
