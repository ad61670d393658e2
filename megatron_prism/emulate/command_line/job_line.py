"""The job of a line as people type it: the script, its words, and our flags for its world.

A line of launchers is read; one that ends in a shell script is run dry first.  The variables that
the line sets for the job are set in this process, whose children are the job's ranks.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from megatron_prism.core import feature
from megatron_prism.core.errors import UsageError
from megatron_prism.core.jobs.megatron_source import megatron_release
from megatron_prism.core.units import counted
from megatron_prism.emulate.command_line import options
from megatron_prism.emulate.command_line.launch_line import LaunchLine, read_line
from megatron_prism.emulate.command_line.path_map import PathMap
from megatron_prism.emulate.command_line.script_options import ScriptOptions
from megatron_prism.emulate.preflight.obstacles import Obstacles
from megatron_prism.emulate.preflight.unknown_flags import ARGUMENTS_ALONE, without_option

_VERSION_PARTS = ("MAJOR", "MINOR", "PATCH")  # of megatron.core.package_info
_STOCK = ("pretrain_gpt.py",)  # scripts of Megatron for which that file stands
_DEEPEST = 4  # scripts that are submitted, one by the other
_FOLDERS_ABOVE = 4  # a launch script, from which the script that trains is looked for


def job_of(
    words: Sequence[str], flags_given: Sequence[str], obstacles: Obstacles | None = None
) -> tuple[list[str], list[str]]:
    """Read the job of a launch line.

    Args:
        words: the launch line; empty where there is none.
        flags_given: flags of ours that the user gave, which win.
        obstacles: gets what the user has to say or correct, where reading goes on with a
            placeholder; without it the first of these is raised.

    Returns:
        Flags of ours for the world of the job; the script and its arguments.  Both are empty where
        an obstacle leaves no job to look at.

    Raises:
        UsageError: there is no script, or a launcher does not say its number, and nobody collects
            obstacles.
    """
    if obstacles is None:
        return _read_job(words, flags_given, None)
    with obstacles.noting():
        return _read_job(words, flags_given, obstacles)
    return [], []


def _read_job(
    words: Sequence[str], user_flags: Sequence[str], obstacles: Obstacles | None
) -> tuple[list[str], list[str]]:
    """Read the job of a launch line as ``job_of`` does; raises what leaves no job to look at."""
    paths = PathMap.parse(options.values_of("--prism-map", user_flags))
    words = [paths.in_text(word) for word in words]
    line = read_line(words, os.environ)

    script = _launching_script(line)
    if script:
        line = _as_shell(line)
    if line.shell:
        line = _run_dry(line, user_flags, script, obstacles)
    if not line.words:
        return [], []

    # what the line says of ranks is known without its script, which may be elsewhere
    job_flags = shlex.split(options.value_of("--prism-job-flags", user_flags))
    line = replace(line, words=tuple(_without_replaced(line.words, job_flags)))
    flags_given = [*options.words_of(os.environ), *user_flags, *line.words, *job_flags]
    if obstacles is None:
        own_flags = line.flags(flags_given)
    else:
        own_flags = _flags_or_obstacle(line, flags_given, obstacles)
    job = [*_script(line.words, obstacles, _folders_above(words)), *job_flags]
    if line.launchers:
        _tell(_summary(line))
    size = options.value_of("--prism-world-size", user_flags)
    if line.ranks and size and size != str(line.ranks):
        _tell(f"--prism-world-size {size} counts, not the {line.ranks:,} ranks of the line")
    os.environ.update(line.variables)
    return own_flags, job


def _flags_or_obstacle(
    line: LaunchLine, flags_given: Sequence[str], obstacles: Obstacles
) -> list[str]:
    """Return our flags for the world of a line; what it does not say is an obstacle."""
    try:
        return line.flags(flags_given)
    except UsageError as error:
        obstacles.note(error)
        obstacles.world_is_guessed = True
        return []


def _launching_script(line: LaunchLine) -> str:
    """Return the script of Python that starts the launcher of a line; empty where none does."""
    script = line.words[0] if line.words and line.words[0].endswith(".py") else ""
    reader = _script_reader()
    if script and line.ranks is None and reader is not None and reader.starts_launcher(script):
        return script
    return ""


def _as_shell(line: LaunchLine) -> LaunchLine:
    """Return the line of a script of Python that starts a launcher as that of a shell script."""
    shell = ("bash", "-c", shlex.join(["python", *line.words]))
    return replace(line, words=(), shell=shell, before=(), launchers=())


def _script_reader() -> ModuleType | None:
    """Return the module of the feature that reads scripts, if one is installed."""
    readers = feature.modules("launcher")
    return readers[0] if readers else None


def _run_dry(
    line: LaunchLine,
    user_flags: Sequence[str],
    script: str,
    obstacles: Obstacles | None,
    text: str = "",
    depth: int = 0,
) -> LaunchLine:
    """Find the line that a shell script, or a script that it submits, would start its job with.

    Args:
        line: the line of the script.
        user_flags: flags of ours that the user gave.
        script: of Python that starts the launcher, if one does.
        obstacles: gets what only the user can say; None raises that.
        text: of the submitted script, where it is known.
        depth: how many scripts have submitted this one.
    """
    reader = _script_reader()
    if reader is None:
        raise UsageError(
            f"{shlex.join(line.shell)} is a script, which this prism does not read",
            fix="the line that the script starts the job with",
        )
    dry_options = ScriptOptions.parse(user_flags, script, obstacles)
    run = reader.dry_run(line.shell, line.before, line.variables, dry_options, text)
    started = read_line(run.line, {**os.environ, **run.known, **run.variables})

    settings = [f"{name}={value}" for name, value in run.variables.items()]
    start = ["env", *settings] if settings else []
    _tell(f"{shlex.join(line.shell)} starts: {shlex.join([*start, *run.line])}")
    for note in run.notes:
        _tell(note)
    variables = {**line.variables, **run.variables, **started.variables}
    started = replace(started, variables=variables)
    launching_script = _launching_script(started)
    if launching_script and launching_script != script:
        started = _as_shell(started)
    if not started.shell:
        return started
    if depth == _DEEPEST:
        raise UsageError("scripts that submit scripts do not end", fix="the last one's own line")
    return _run_dry(started, user_flags, launching_script, obstacles, run.text, depth + 1)


def _tell(text: str) -> None:
    print(f"prism: {text}", file=sys.stderr, flush=True)


def _without_replaced(words: Sequence[str], job_flags: Sequence[str]) -> list[str]:
    """Leave options out that the job's flags say again: Megatron's parser refuses some twice.

    Args:
        words: of the job's program.
        job_flags: that replace options of the job.
    """
    kept_words = list(words)
    for flag, following in itertools.pairwise([*job_flags, "--"]):
        if not flag.startswith("--"):
            continue
        option, _, value = flag.partition("=")
        names = [word.partition("=")[0] for word in kept_words]
        # an option that the line repeats collects its values
        if names.count(option) != 1:
            continue
        has_value = bool(value) or not following.startswith("--")
        # --option=VALUE has no further values
        if has_value and option in kept_words:
            kept_words = without_option(option, kept_words, _is_override)
        else:
            del kept_words[names.index(option)]
    return kept_words


def _is_override(word: str) -> bool:
    """Tell whether a word is an override of Hydra, which belongs to no option: model.tp=2."""
    return "=" in word


def _summary(line: LaunchLine) -> str:
    """``srun, docker are not started; 64 ranks, 8 on a host: --ntasks 64 of srun``."""
    verb = "is" if len(line.launchers) == 1 else "are"
    text = f"{', '.join(line.launchers)} {verb} not started here"
    if line.ranks is None:
        return text
    host = f", {line.per_host} on a host" if line.per_host else ""
    return f"{text}; {counted(line.ranks, 'rank')}{host}: {line.source}"


def _folders_above(words: Sequence[str]) -> list[Path]:
    """Return the folders that the files of a launch line are in, and those above, nearest first.

    A launch script names the script that trains from its own folder or from its checkout's.
    """
    folders: list[Path] = []
    for word in words:
        if os.path.isfile(word):
            folders += Path(word).resolve().parents[:_FOLDERS_ABOVE]
    return list(dict.fromkeys(folders))


def _script(
    words: Sequence[str], obstacles: Obstacles | None, folders: Sequence[Path] = ()
) -> list[str]:
    """Check that the script of a job is here.

    One that is named by a path of another machine is the file of its name in the working folder.

    Args:
        words: the script, or ``-m`` and a module, and its arguments.
        obstacles: gets that it is not here, where a file of its name is near: the job is looked at
            with that one.
        folders: in which a script may be whose path is relative.

    Returns:
        The words, with the script's path here.

    Raises:
        UsageError: there is no such script or module.
    """
    if words[0] == "-m":
        name = words[1] if len(words) > 1 else ""
        if not name or not _module_exists(name):
            raise UsageError(f"there is no module {name}", fix="PYTHONPATH=CHECKOUT before prism")
        return list(words)
    script, *arguments = words
    if os.path.isfile(script):
        return list(words)
    local_file = Path(Path(script).name)
    folder = str(Path(script).parent)
    other_path = f"{folder}=CHECKOUT"
    # a path that is a name alone, perhaps behind an empty variable
    if folder in (".", "/"):
        other_path = f"{script}=CHECKOUT/{local_file}"
    if local_file.is_file() and local_file.suffix == ".py":
        _tell(
            f"{script} is not here; {local_file} of this folder is taken, and its Megatron "
            f"({_release_beside(local_file)}); another one: --prism-map {other_path}"
        )
        return [str(local_file), *arguments]
    near = _near(script, folders)
    if near is None:
        missing = UsageError(
            f"there is no script {script}",
            fix=f"--prism-map {other_path}, or start in the checkout that has it",
        )
        # the Megatron that is installed says what else would stop the job
        if obstacles is None or local_file.name not in _STOCK or not _has_training():
            raise missing
        obstacles.note(missing)
        return [str(ARGUMENTS_ALONE), *arguments]
    missing = UsageError(f"there is no script {script}", fix=f"--prism-map {script}={near}")
    if obstacles is None:
        raise missing
    obstacles.note(missing)
    return [str(near), *arguments]


def _has_training() -> bool:
    """Tell whether an installed Megatron has the part that reads arguments; nothing is imported."""
    if find_spec("megatron") is None:
        return False
    return find_spec("megatron.training") is not None


def _near(script: str, script_folders: Sequence[Path] = ()) -> Path | None:
    """Find the file of a script's name in a checkout that is near, as people have it.

    Args:
        script: its path, of another machine or from another folder.
        script_folders: from which it is looked for first, by the whole path that the line has.
    """
    path = Path(script)
    if path.suffix != ".py":
        return None
    for folder in script_folders:
        if not path.is_absolute() and (folder / path).is_file():
            return (folder / path).resolve()
    folders = [Path(folder) for folder in os.environ.get("PYTHONPATH", "").split(":") if folder]
    folders += [*sorted(Path().glob("*/")), Path(".."), *sorted(Path("..").glob("*/"))]
    # the script of a folder of the checkout is below the same folder here
    endings = [Path(*path.parts[place:]) for place in range(len(path.parts))]
    for folder in folders:
        for ending in endings:
            file = folder / ending
            if not ending.is_absolute() and file.is_file():
                return file
    return None


def _release_beside(script: Path) -> str:
    """Return the release of the Megatron that a script beside ``megatron/core`` runs with."""
    file = script.resolve().parent / "megatron" / "core" / "package_info.py"
    if not file.is_file():
        return megatron_release()
    text = file.read_text(errors="replace")
    parts = [re.search(rf"^{name} = (\d+)", text, re.MULTILINE) for name in _VERSION_PARTS]
    return ".".join(part[1] for part in parts if part is not None) or megatron_release()


def _module_exists(name: str) -> bool:
    """Tell whether there is such a file; nothing of it is imported."""
    path = Path(*name.split("."))
    endings = (path.with_suffix(".py"), path / "__main__.py")
    folders = [".", *sys.path]
    # an editable install is in no folder of the path
    package = find_spec(path.parts[0])
    if package is not None:
        locations = package.submodule_search_locations or ()
        folders += [str(Path(location).parent) for location in locations]
    for folder in folders:
        if any((Path(folder) / ending).is_file() for ending in endings):
            return True
    return False
