"""End a real launcher that would start an emulated job as if it were the real one.

torchrun on several hosts waits for the others, and so many processes as the job has ranks are not
what an emulation needs.  We are attached in the launcher's own process and can say so at once.
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
    """End this process, with the line to type, if it is such a launcher.

    Args:
        process: its command line, Python first (``sys.orig_argv``).
    """
    line = read_line(["python", *process[1:]], os.environ)
    own = BY_NAME.get(line.launchers[0]) if line.launchers else None  # not one among its words
    if own is None or not own.counts or not line.ranks:
        return
    try:
        check_launch(line, os.environ)
    except UsageError as error:
        named = BY_NAME.keys() & {Path(word).name for word in process}
        start = next(i for i, word in enumerate(process) if Path(word).name in named)
        words = [Path(process[start]).name, *process[start + 1 :]]
        module = ["python", "-m"] if "." in words[0] else []
        exit_status.report(UsageError(error.message, fix=to_type([*module, *words], os.environ)))
        raise SystemExit(error.exit_code) from None


def check_launch(line: LaunchLine, env: Mapping[str, str]) -> None:
    """UsageError for a launch whose processes are not the ranks that the emulation names."""
    words = line.words[1:]
    ranks, each = line.ranks or 1, line.per_host or 1
    started = {"TORCHELASTIC_RUN_ID": "", "LOCAL_WORLD_SIZE": str(each), "WORLD_SIZE": str(ranks)}
    named = options.from_command_line(words, {**env, "RANK": "0", **started})
    given = [word.partition("=")[0] for word in (*options.words_of(env), *words)]
    uses = {f"--prism-{name.replace('_', '-')}" for name in (*_ALL_LOCAL, "ranks")}
    if named is not None and ranks > each and not uses & set(given):
        raise UsageError(
            f"{line.launchers[-1]} would wait for {counted(ranks // each - 1, 'other host')}, and "
            "an emulated job needs none"
        )


def to_type(words: Sequence[str], env: Mapping[str, str]) -> str:
    """The line that emulates what a launch line with flags of ours would start."""
    inside, line = options.split(words)
    flags = [*options.split(options.words_of(env))[0], *inside]
    left = ["--prism-emulate", "--prism-capture"]
    captures = [words_of_flag for name, words_of_flag in flags if name == "--prism-capture"]
    capture = ""
    if captures:
        capture = options.value_of("--prism-capture", captures[0])
    start = ["prism", "run"]
    # prism capture chooses the ranks itself
    if capture:
        left.append("--prism-ranks")
        start = ["prism", "capture", "-o", capture]
    prism_words = []
    for name, words_of_flag in flags:
        if name not in left:
            prism_words += words_of_flag
    return shlex.join([*start, *prism_words, *line])
