"""End a real launcher that would start an emulated job as if it were the real one.

torchrun on several hosts waits for the other hosts, and an emulation has one.  This package is
attached in the launcher's own process, and can say so at once.  A launch on one host passes.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_prism.core.errors import UsageError
from megatron_prism.core.units import counted
from megatron_prism.emulate.command_line import options
from megatron_prism.emulate.command_line.launch_line import BY_NAME, LaunchLine, read_line
from megatron_prism.emulate.rank import exit_status

_ALL_LOCAL = ("record", "fault", "fault_plan", "world")  # uses of a job whose ranks are all real


def check(process: Sequence[str]) -> None:
    """End this process, with the line to type, if it is a launcher that asks for several hosts.

    Args:
        process: its command line, Python first (``sys.orig_argv``).
    """
    line = read_line(["python", *process[1:]], os.environ)
    # the first launcher is this process; a launcher behind it is what this process would start
    launcher = None
    if line.launchers:
        launcher = BY_NAME.get(line.launchers[0])
    if launcher is None or not launcher.counts or not line.ranks:
        return
    try:
        check_launch(line, os.environ)
    except UsageError as error:
        fix = to_type(_line_from_launcher(process), os.environ)
        exit_status.report(UsageError(error.message, fix=fix))
        raise SystemExit(error.exit_code) from None


def _line_from_launcher(process: Sequence[str]) -> list[str]:
    """Return the words of a process from its launcher on, as one types them.

    Args:
        process: its command line, which names a launcher.
    """
    place = 0
    while Path(process[place]).name not in BY_NAME:
        place += 1
    name = Path(process[place]).name
    words = [name, *process[place + 1 :]]
    # a module, such as torch.distributed.run
    if "." in name:
        return ["python", "-m", *words]
    return words


def check_launch(line: LaunchLine, env: Mapping[str, str]) -> None:
    """UsageError for a launch whose processes are not the ranks that the emulation names."""
    job_words = [*line.words[1:]]
    # each process starts with prism run, which implies it
    if line.words[:2] == ("-m", "megatron_prism"):
        job_words.insert(0, "--prism-emulate")
    ranks = line.ranks or 1
    ranks_of_host = line.per_host or 1
    # the variables that the launcher would set in its first process
    variables = {
        "RANK": "0",
        "TORCHELASTIC_RUN_ID": "",
        "LOCAL_WORLD_SIZE": str(ranks_of_host),
        "WORLD_SIZE": str(ranks),
    }
    emulation = options.from_command_line(job_words, {**env, **variables})
    if emulation is None or ranks <= ranks_of_host:
        return

    # these flags are of jobs whose ranks all run, or name those that do
    flags_given = {word.partition("=")[0] for word in (*options.words_of(env), *job_words)}
    flags_of_real_ranks = {f"--prism-{name.replace('_', '-')}" for name in (*_ALL_LOCAL, "ranks")}
    if flags_of_real_ranks & flags_given:
        return
    other_hosts = counted(ranks // ranks_of_host - 1, "other host")
    raise UsageError(
        f"{line.launchers[-1]} would wait for {other_hosts}, and an emulated job needs none"
    )


def to_type(words: Sequence[str], env: Mapping[str, str]) -> str:
    """The line that emulates what a launch line with flags of ours would start."""
    flags_of_line, line = options.split(words)
    flags_of_environment, _ = options.split(options.words_of(env))
    flags = [*flags_of_environment, *flags_of_line]
    captures = [words_of_flag for name, words_of_flag in flags if name == "--prism-capture"]
    folder = ""
    if captures:
        folder = options.value_of("--prism-capture", captures[0])

    # the command says these itself
    said_by_command = ["--prism-emulate", "--prism-capture"]
    command = ["prism", "run"]
    if folder:
        # prism capture chooses the ranks itself
        said_by_command.append("--prism-ranks")
        command = ["prism", "capture", "-o", folder]
    prism_words = []
    for name, words_of_flag in flags:
        if name not in said_by_command:
            prism_words += words_of_flag
    return shlex.join([*command, *prism_words, *line])
