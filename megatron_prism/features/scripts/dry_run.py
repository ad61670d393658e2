"""Run a shell script that starts a job dry, to learn the line that it starts.

The script runs in Bash as it is.  A folder first in PATH answers the commands that launch, train or
do harm (``dry_commands``); a trap looks at each command before it runs, so that neither a path nor
a redirection goes by; where the kernel can, it confines the rest (``confine``).  The first command
that would train ends it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import megatron_prism
from megatron_prism.core.errors import UsageError
from megatron_prism.emulate.command_line.script_options import ScriptOptions
from megatron_prism.emulate.processes.workers import Json
from megatron_prism.features.scripts import batch_script, confine, dry_commands
from megatron_prism.features.scripts.attempts import Attempts, same_job
from megatron_prism.features.scripts.execution import Execution, read_notes

_NOTES_SHOWN = {  # kind of note -> how the line about it begins
    "kept": "not written, for it is there, perhaps of an earlier dry run",
    "left out": "left out",
}
_MOST_NOTES = 12  # of a kind in one line
_GPUS = (8, 4)  # of a host, where nobody says it: does the job depend on it?
_PRELUDE = Path(__file__).with_name("dry_run.sh")  # Bash reads it first
_OWN = re.compile(  # variables that are no settings of the job, or of this place alone
    r"(BASH|PRISM_|__prism_|SLURM|PBS_|LSB_|OMPI_|PMI|LD_|HOSTNAME$|(SHLVL|PWD|OLDPWD|PATH|_|TMPDIR|HOME|"
    r"RANK|WORLD_SIZE|LOCAL_RANK|NODE_RANK|GROUP_RANK|JOB_ID|MASTER_ADDR|MASTER_PORT|LS_SUBCWD|"
    r"CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS|PET_\w+)$|.*(KEY|TOKEN|SECRET|PASSW|WANDB))"
)


@dataclass(frozen=True)
class DryRun:
    """What a script would start.

    Attributes:
        line: words of the launch line.
        variables: set by the script for the line.
        known: variables of the scheduler that the script was run with.
        notes: lines about where numbers come from, and what was left out.
        text: of the script or manifest that ``line`` queues, else empty.
    """

    line: tuple[str, ...]
    variables: Mapping[str, str]
    known: Mapping[str, str]
    notes: tuple[str, ...]
    text: str = ""


@dataclass(frozen=True)
class _Script:
    """A script that is to run.

    Attributes:
        words: that Bash is started with, the script first, or ``-c`` and a text.
        file: path of the script; of ``-c`` its text.
        text: of the script.
        title: name of the script in messages.
        inline: whether the text stands on the command line (``-c``).
        is_here: whether the script is a file of this machine.
        allocation: hosts and processes, as far as the script says them.
        settings: variables that the line sets.
    """

    words: list[str]
    file: str
    text: str
    title: str
    inline: bool
    is_here: bool
    allocation: batch_script.Allocation
    settings: Mapping[str, str]


def dry_run(
    shell: Sequence[str],
    before: Sequence[str],
    given: Mapping[str, str],
    options: ScriptOptions | None = None,
    text: str = "",
) -> DryRun:
    """Run ``shell`` dry.

    Args:
        shell: words of a shell or of sbatch, and its script with its arguments.
        before: launchers that would start the shell.
        given: variables that their line sets.
        options: how the script is run.
        text: of the script or manifest, where it is in no file.

    Returns:
        The line of the job, and what is to know of it.

    Raises:
        UsageError: the script reads variables that nobody can know but the user, or starts no job.
    """
    if shutil.which("bash") is None:
        raise UsageError("there is no bash to run the script with", fix="its launch line instead")
    if options is None:
        options = ScriptOptions()
    script = _find_script(shell, given, text)

    with tempfile.TemporaryDirectory(prefix="prism-dry-") as place:
        scratch = Path(place)
        words = script.words
        mapped_text = options.paths.in_text(script.text)
        if not script.inline and (not script.is_here or mapped_text != script.text):
            # a script that another one queues, or that has other paths here
            words = _copy(script, mapped_text, scratch)
        words = [options.paths.in_text(word) for word in words]
        of_scheduler = _known_variables(script, scratch)
        unknown = _unknown_variables(script, of_scheduler, words)
        known = {**of_scheduler, **dict.fromkeys(unknown, "1")}
        hosts = batch_script.hosts_of(script.allocation)
        environment = _environment(scratch, known, hosts)
        environment["PRISM_DRY_LINE"] = json.dumps(list(before))
        environment["PRISM_DRY_SCRIPT"] = options.python
        environment["PRISM_DRY_FILE"] = script.file
        environment["PRISM_DRY_HOME"] = os.getcwd()
        # no folder is foreign then: without a home it is ``/``
        if options.writes:
            environment["PRISM_DRY_HOME"] = ""

        run = Execution(["bash", *words], scratch, environment, script.title, options.limit_s)
        said_gpus = options.gpus or script.allocation.gpus
        gpus = said_gpus or _GPUS[0]

        def with_text(text: str) -> list[str]:
            return ["bash", *map(options.paths.in_text, _copy(script, text, scratch))]

        attempts = Attempts(run, gpus, with_text, options)
        job = attempts.job(mapped_text)
        notes = read_notes(scratch)
        asks_gpus = any(kind == "asked" for kind, _ in notes)
        # files that the script has read say some of the variables
        sourced_text = batch_script.sourced_by_run(scratch)
        if unknown:
            unknown = _unknown_variables(script, of_scheduler, words, sourced_text)
        needless = attempts.ask(job, unknown, mapped_text)
        # the script asks what nobody says: does another number make another job?
        if asks_gpus and not said_gpus:
            _check_gpus(attempts.run, job, options)

    lines = [*attempts.notes, *_lines_about(script, of_scheduler, notes)]
    if needless:
        lines.append(f"{', '.join(needless)}: not set here, which changes nothing")
    variables = {}
    for name, value in job["env"].items():
        if not _OWN.match(name) and attempts.run.environment.get(name) != value:
            variables[name] = value
    line = [options.paths.in_text(word) for word in _paths_from_here(job["line"], job["cwd"])]
    variables = {name: options.paths.in_text(value) for name, value in variables.items()}
    return DryRun(tuple(line), variables, known, tuple(lines), job["text"])


def _with_its_own_name(text: str, file: str) -> str:
    """Change the text of a script that runs as a copy: it looks beside itself where it lies.

    Args:
        text: of the script.
        file: its own path.
    """
    own_path = os.path.abspath(file)
    name = r"\$(?:0\b|\{0\}|BASH_SOURCE\b(?!\[)|\{BASH_SOURCE(?:\[0\])?\})"
    return re.sub(name, lambda _: own_path, text)


def _check_gpus(run: Execution, job: Json, options: ScriptOptions) -> None:
    """Refuse a script that starts another job on hosts with another number of GPUs.

    Args:
        run: of the script.
        job: that the script starts on hosts of ``_GPUS[0]``.
        options: get the refusal, or raise it.
    """
    other_job = job
    with contextlib.suppress(UsageError):  # it refuses to run with another number
        other_job = run.job_with_gpus(_GPUS[1])
    if same_job(other_job, job, options):
        return
    options.ask(
        UsageError(f"{run.title} asks how many GPUs a host has", fix="--prism-gpus-per-node 8")
    )


def _find_script(shell: Sequence[str], given: Mapping[str, str], text: str) -> _Script:
    """Find the script in the words of a shell, of sbatch or of kubectl.

    Args:
        shell: the words.
        given: variables that the line sets, which win over those of the words.
        text: of the script or manifest, where it is in no file.

    Raises:
        UsageError: there is no such script, or it has line ends of Windows.
    """
    allocation = None
    settings = dict(given)
    words = dry_commands.script_words(shell)
    if shell[0] == "kubectl":
        manifest = text or dry_commands.submitted(shell, str)
        command, allocation, operator_variables = batch_script.manifest_job(manifest)
        words = ["-c", shlex.join(command)]
        settings = {**operator_variables, **given}
    elif dry_commands.submits(shell):
        settings = {**batch_script.exported(shell[1:]), **given}

    file = next((word for word in words if not word.startswith("-")), "")
    # short options may be joined: -lc
    inline = "-c" in words or bool(re.fullmatch(r"-\w*c", words[0] if words else ""))
    is_here = not inline and os.path.isfile(file)
    if not (inline or is_here or text):
        raise UsageError(f"there is no script {file}", fix="the path of the script, or its line")

    title = shlex.join(shell)[:60]
    if is_here:
        title = file
        # Bash would name a command that ends with an unseen character
        if b"\r\n" in Path(file).read_bytes():
            raise UsageError(
                f"{file} has line ends of Windows, which Bash takes for parts of words",
                fix=f"sed -i 's/\\r$//' {shlex.quote(file)}",
            )
        text = Path(file).read_text(errors="replace")
    elif inline:
        text = file
    if allocation is None:
        options = [word for word in shell[1:] if word not in words]
        allocation = batch_script.allocation(text, options)
    return _Script(words, file, text, title, inline, is_here, allocation, settings)


def _copy(script: _Script, text: str, scratch: Path) -> list[str]:
    """Make a copy of a script with another text.

    Args:
        script: the script.
        text: of the copy.
        scratch: folder of the dry run.

    Returns:
        The words for Bash to run the copy with.
    """
    if script.inline:
        return _replaced(script.words, script.text, text)
    if script.is_here:
        text = _with_its_own_name(text, script.file)
    file = scratch / "script"
    file.write_text(text)
    if script.file in script.words:
        return _replaced(script.words, script.file, str(file))
    return [str(file), *script.words[1:]]


def _replaced(words: Sequence[str], word: str, other: str) -> list[str]:
    """Return words with another one in the place of a word."""
    changed = list(words)
    changed[changed.index(word)] = other
    return changed


def _known_variables(script: _Script, scratch: Path) -> dict[str, str]:
    """Collect the variables to run a script with: of its scheduler and of its line.

    Args:
        script: the script.
        scratch: folder of the dry run.
    """
    of_scheduler = batch_script.variables(script.allocation, str(scratch / "hosts"), os.getcwd())
    known = {name: value for name, value in of_scheduler.items() if name not in os.environ}
    known.update(script.settings)
    return known


def _unknown_variables(
    script: _Script, settings: Mapping[str, str], words: Sequence[str], sourced_text: str = ""
) -> list[str]:
    """Find the sizes of the job that a script reads, and that nothing says.

    Args:
        script: the script.
        settings: variables that it is run with.
        words: that Bash is started with.
        sourced_text: of files that it has read in a run.
    """
    folder = Path() if script.inline else Path(script.file).parent
    texts = "\n".join([batch_script.sourced(script.text, folder), *words[1:], sourced_text])
    return batch_script.unknown(script.text, {**settings, **os.environ}, texts)


def _lines_about(
    script: _Script, known: Mapping[str, str], notes: Sequence[tuple[str, str]]
) -> list[str]:
    """Say where the numbers of a job come from, and what the dry run left out."""
    lines = []
    # numbers of the scheduler that the script reads
    read = {name for name, _ in batch_script.READ.findall(script.text)}
    sources = []
    for name in sorted(read & set(known)):
        if known[name].isdigit() and name not in batch_script.HERE:
            sources.append(f"{name}={known[name]}")
    if sources and script.allocation.source:
        lines.append(f"{', '.join(sources)}: {script.allocation.source}")

    # commands that did not run
    for shown_kind, beginning in _NOTES_SHOWN.items():
        texts = list(dict.fromkeys(text for kind, text in notes if kind == shown_kind))
        if not texts:
            continue
        shown = "; ".join(text[:80] for text in texts[:_MOST_NOTES])
        if len(texts) > _MOST_NOTES:
            shown += f"; {len(texts) - _MOST_NOTES} more"
        lines.append(f"{beginning}: {shown}")

    if not confine.available():
        lines.append("this kernel has no Landlock: commands were left out by their names alone")
    return lines


def _environment(scratch: Path, known: Mapping[str, str], hosts: list[str]) -> dict[str, str]:
    """Make the environment of a script: the folder of answered commands is first in PATH.

    Args:
        scratch: folder of the dry run, which gets what the commands need.
        known: variables to run the script with.
        hosts: names of the job's hosts.
    """
    folder = scratch / "bin"
    folder.mkdir()
    (scratch / "tmp").mkdir()
    (scratch / "notes").touch()
    (scratch / "hosts").write_text("".join(f"{name}\n" for name in hosts))

    # one program answers all commands; links to it have their names
    root = str(Path(megatron_prism.__file__).parent.parent)
    program = f"import sys, runpy; sys.path.insert(0, {root!r}); "
    program += "runpy.run_module('megatron_prism.features.scripts.dry_commands', "
    program += "run_name='__main__')"
    python = shlex.quote(sys.executable)
    answer = scratch / "answer"
    answer.write_text(f'#!/bin/sh\nexec {python} -ISc {shlex.quote(program)} "${{0##*/}}" "$@"\n')
    answer.chmod(0o755)
    for name in {*dry_commands.NAMES, "rewrite"}:
        (folder / name).symlink_to(answer)

    path = os.environ.get("PATH", os.defpath)
    environment = {name: value for name, value in os.environ.items() if name != "PRISM_ARGS"}
    environment.update(known)
    environment.update(
        {
            "PATH": f"{folder}:{path}",
            "BASH_ENV": str(_PRELUDE),
            "TMPDIR": str(scratch / "tmp"),
            "PRISM_DRY": str(scratch),
            "PRISM_DRY_PATH": path,
            "PRISM_DRY_HOSTS": ",".join(hosts),
        }
    )
    if confine.available():
        environment["PRISM_DRY_CONFINED"] = "1"
    return environment


def _paths_from_here(line: Sequence[str], folder: str) -> list[str]:
    """Change the Python files of ``line``, which are named from ``folder``, to paths from here."""
    # the script may have changed its folder before the job, which prism starts from here
    if Path(folder) == Path.cwd():
        return list(line)
    words = []
    for word in line:
        if word.endswith(".py") and Path(folder, word).is_file():
            word = str(Path(folder, word))
        words.append(word)
    return words
