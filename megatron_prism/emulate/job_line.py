"""The job of a line as people type it: the script, its words, and our flags for its world.

A line of launchers is read; one that ends in a shell script is run dry first.  The variables that
the line sets for the job are set in this process, whose children are the job's ranks.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from megatron_prism.core import feature
from megatron_prism.core.errors import UsageError
from megatron_prism.core.units import counted
from megatron_prism.emulate.launch_line import LaunchLine, read_line
from megatron_prism.emulate.options import value_of, words_of

_DEEPEST = 4  # scripts that are submitted, one by the other


def job_of(words: Sequence[str], given: Sequence[str]) -> tuple[list[str], list[str]]:
    """(flags of ours for the world of the job, the script and its arguments).

    Args:
        words: the launch line; empty where there is none.
        given: flags of ours that the user gave, which win.

    Raises:
        UsageError: there is no script, or a launcher does not say its number.
    """
    line = read_line(words, os.environ)
    script = line.words[0] if line.words and line.words[0].endswith(".py") else ""
    reader = _script_reader()
    if script and line.ranks is None and reader is not None and reader.starts_launcher(script):
        shell = ("bash", "-c", shlex.join(["python", *line.words]))
        line = replace(line, shell=shell, before=(), launchers=())
    if line.shell:
        line = _run_dry(line, given, script)
    if not line.words:
        return [], []
    job = [*_script(line.words), *shlex.split(value_of("--prism-job-flags", given))]
    ours = line.flags([*words_of(os.environ), *given, *job])
    if line.launchers:
        _tell(_summary(line))
    size = value_of("--prism-world-size", given)
    if line.ranks and size and size != str(line.ranks):
        _tell(f"--prism-world-size {size} counts, not the {line.ranks:,} ranks of the line")
    os.environ.update(line.variables)
    return ours, job


def _script_reader() -> ModuleType | None:
    """Return the module of the feature that reads scripts, if one is installed."""
    readers = feature.modules("launcher")
    return readers[0] if readers else None


def _run_dry(
    line: LaunchLine, given: Sequence[str], script: str, text: str = "", depth: int = 0
) -> LaunchLine:
    """The line that a shell script would start its job with, or a script that it submits, whose
    ``text`` is known.
    """
    reader = _script_reader()
    if reader is None:
        raise UsageError(
            f"{shlex.join(line.shell)} is a script, which this prism does not read",
            fix="the line that the script starts the job with",
        )
    gpus = value_of("--prism-gpus-per-node", given)
    writes = "--prism-allow-writes" in given
    run = reader.dry_run(line.shell, line.before, line.variables, gpus, script, writes, text)
    started = read_line(run.line, {**os.environ, **run.known, **run.variables})
    settings = [f"{name}={value}" for name, value in run.variables.items()]
    start = ["env", *settings] if settings else []
    _tell(f"{shlex.join(line.shell)} starts: {shlex.join([*start, *run.line])}")
    for note in run.notes:
        _tell(note)
    variables = {**line.variables, **run.variables, **started.variables}
    started = replace(started, variables=variables)
    if started.shell and depth == _DEEPEST:
        raise UsageError("scripts that submit scripts do not end", fix="the last one's own line")
    return _run_dry(started, given, "", run.text, depth + 1) if started.shell else started


def _tell(text: str) -> None:
    print(f"prism: {text}", file=sys.stderr, flush=True)


def _summary(line: LaunchLine) -> str:
    """``srun, docker are not started; 64 ranks, 8 on a host: --ntasks 64 of srun``."""
    verb = "is" if len(line.launchers) == 1 else "are"
    text = f"{', '.join(line.launchers)} {verb} not started here"
    if line.ranks is None:
        return text
    host = f", {line.each} on a host" if line.each else ""
    return f"{text}; {counted(line.ranks, 'rank')}{host}: {line.source}"


def _script(words: Sequence[str]) -> list[str]:
    """``words``, whose script is here; one that is named by a path of another machine is the file
    of its name in the working folder.
    """
    if words[0] == "-m":
        if len(words) < 2 or not _module_exists(words[1]):
            name = words[1] if len(words) > 1 else ""
            raise UsageError(f"there is no module {name}", fix="PYTHONPATH=CHECKOUT before prism")
        return list(words)
    script, *rest = words
    if not os.path.isfile(script):
        here = Path(Path(script).name)
        if not here.is_file() or here.suffix != ".py":
            raise UsageError(
                f"there is no script {script}",
                fix="give the path of pretrain_gpt.py, or start in the checkout that has it",
            )
        _tell(f"{script} is not here; {here} of this folder is taken")
        script = str(here)
    return [script, *rest]


def _module_exists(name: str) -> bool:
    """Whether there is such a file; nothing of it is imported."""
    place = Path(*name.split("."))
    ends = (place.with_suffix(".py"), place / "__main__.py")
    package = find_spec(place.parts[0])  # an editable install is in no folder of the path
    places = package.submodule_search_locations if package is not None else None
    parents = [str(Path(one).parent) for one in places or ()]
    folders = (".", *sys.path, *parents)
    return any((Path(folder) / end).is_file() for folder in folders for end in ends)
