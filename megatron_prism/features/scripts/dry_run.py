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
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import megatron_prism
from megatron_prism.core.errors import UsageError
from megatron_prism.core.messages import progress
from megatron_prism.core.units import counted
from megatron_prism.emulate.launch_line import read_line
from megatron_prism.emulate.script_options import ScriptOptions
from megatron_prism.emulate.workers import Json, die_with_parent
from megatron_prism.features.scripts import batch_script, confine, dry_commands

_NOTES_SHOWN = {  # kind of note -> how the line about it begins
    "kept": "not written, for it is there, perhaps of an earlier dry run",
    "left out": "left out",
}
_MOST_NOTES = 12  # of a kind in one line
_GPUS = (8, 4)  # of a host, where nobody says it: does the job depend on it?
_PRELUDE = Path(__file__).with_name("dry_run.sh")  # Bash reads it first
_OWN = re.compile(  # variables that are no settings of the job, or of this place alone
    r"(BASH|PRISM_|SLURM|PBS_|LSB_|OMPI_|PMI|LD_|HOSTNAME$|(SHLVL|PWD|OLDPWD|PATH|_|TMPDIR|HOME|"
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
        words, file = script.words, script.file
        mapped_text = options.paths.in_text(script.text)
        if not script.inline and (not script.is_here or mapped_text != script.text):
            # a script that another one queues, or that has other paths here
            if script.is_here:
                mapped_text = _with_its_own_name(mapped_text, file)
            file = str(scratch / "script")
            Path(file).write_text(mapped_text)
            words = [file, *words[1:]]
        words = [options.paths.in_text(word) for word in words]
        known = _known_variables(script, scratch, file, words, options)
        hosts = batch_script.hosts_of(script.allocation)
        environment = _environment(scratch, known, hosts)
        environment["PRISM_DRY_LINE"] = json.dumps(list(before))
        environment["PRISM_DRY_SCRIPT"] = options.python
        environment["PRISM_DRY_FILE"] = script.file
        environment["PRISM_DRY_HOME"] = os.getcwd()
        if options.writes:
            environment["PRISM_DRY_HOME"] = ""

        run = _Execution(["bash", *words], scratch, environment, script.title, options.limit_s)
        said_gpus = options.gpus or script.allocation.gpus
        job = run.job_with_gpus(said_gpus or _GPUS[0])
        notes = _notes(scratch)
        asks_gpus = any(kind == "asked" for kind, _ in notes)
        # the script asks what nobody says: does another number make another job?
        if asks_gpus and not said_gpus:
            _check_gpus(run, job, options)

    lines = _lines_about(script, known, notes)
    variables = {}
    for name, value in job["env"].items():
        if not _OWN.match(name) and environment.get(name) != value:
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


def _check_gpus(run: _Execution, job: Json, options: ScriptOptions) -> None:
    """Refuse a script that starts another job on hosts with another number of GPUs.

    Args:
        run: of the script.
        job: that the script starts on hosts of ``_GPUS[0]``.
        options: get the refusal, or raise it.
    """
    other_job = job
    with contextlib.suppress(UsageError):  # it refuses to run with another number
        other_job = run.job_with_gpus(_GPUS[1])
    if _sizes(other_job) == _sizes(job):
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


def _known_variables(
    script: _Script,
    scratch: Path,
    file: str,
    words: Sequence[str],
    options: ScriptOptions,
) -> dict[str, str]:
    """Collect the variables to run a script with.

    Args:
        script: the script.
        scratch: folder of the dry run.
        file: path of the script.
        words: that Bash is started with.
        options: get the sizes of the job that nothing says, for which placeholders stand then.

    Raises:
        UsageError: the script reads sizes of the job that nothing says, and nobody collects that.
    """
    of_scheduler = batch_script.variables(script.allocation, str(scratch / "hosts"), os.getcwd())
    known = {name: value for name, value in of_scheduler.items() if name not in os.environ}
    known.update(script.settings)

    folder = Path() if script.inline else Path(script.file).parent
    settings_text = "\n".join([batch_script.sourced(script.text, folder), *words[1:]])
    unknown = batch_script.unknown(script.text, {**known, **os.environ}, settings_text)
    if unknown:
        pronoun = "it" if len(unknown) == 1 else "them"
        options.ask(
            UsageError(
                f"{script.title} reads {', '.join(unknown)}, and nothing here says {pronoun}",
                fix=" ".join(f"{name}=N" for name in unknown) + " before prism",
            )
        )
        known.update(dict.fromkeys(unknown, "1"))
    return known


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


def _sizes(job: Json) -> tuple[object, ...]:
    """Return what two runs of a script have in common that start the same job."""
    line = read_line(job["line"], job["env"])
    return line.words, line.shell, line.ranks, line.per_host, job["text"]


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


@dataclass(frozen=True)
class _Execution:
    """A script as it is run, perhaps several times.

    Attributes:
        words: the command.
        scratch: folder of the dry run.
        environment: of the command.
        title: name of the script in messages.
        limit_s: seconds after which a run without a job is stopped.
    """

    words: Sequence[str]
    scratch: Path
    environment: Mapping[str, str]
    title: str
    limit_s: float

    def job_with_gpus(self, gpus: object) -> Json:
        """Run the script as on hosts of so many GPUs, until it starts its job.

        Whatever the script has started is stopped then.

        Returns:
            The job, as ``dry_commands`` has written it.

        Raises:
            UsageError: the script ended or took too long without a job.
        """
        job_file = self.scratch / "job"
        job_file.unlink(missing_ok=True)
        process = self._start(gpus)
        start_s = time.monotonic()
        try:
            with progress(lambda: f"{self.title}: dry run, at: {_last_command(self.scratch)}"):
                while not job_file.exists():
                    # asked first: the job may be written between the two questions
                    ended = process.poll() is not None and not _group_lives(process.pid)
                    timed_out = time.monotonic() - start_s > self.limit_s
                    if (ended and not job_file.exists()) or timed_out:
                        raise self._no_job(ended)
                    time.sleep(0.02)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return json.loads(job_file.read_text())

    def _start(self, gpus: object) -> subprocess.Popen[bytes]:
        """Start the script in a process group of its own, confined where the kernel can."""
        home = Path(self.environment["PRISM_DRY_HOME"] or "/")

        def prepare() -> None:
            die_with_parent()
            if confine.available():
                confine.confine(self.scratch, home)

        with (self.scratch / "printed").open("wb") as printed:
            return subprocess.Popen(
                self.words,
                env={**self.environment, "PRISM_DRY_GPUS": str(gpus)},
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                start_new_session=True,
                preexec_fn=prepare,
            )

    def _no_job(self, ended: bool) -> UsageError:
        """Make the error of a script that has started no job.

        Args:
            ended: whether it has ended, and was not stopped.
        """
        fix = "the line that starts Megatron: prism … torchrun …"
        how = "ended"
        if not ended:
            how = f"ran for {self.limit_s:g} s, at last: {_last_command(self.scratch)},"
            fix = f"--prism-dry-run-limit {6 * self.limit_s:g}, or {fix}"
        parts = [f"{self.title} {how} without a command that trains"]
        printed = (self.scratch / "printed").read_text(errors="replace").strip().splitlines()
        parts += [f"it printed: {line[:200]}" for line in printed[-2:]]
        left_out = [text[:60] for kind, text in _notes(self.scratch) if kind == "left out"]
        if left_out:
            shown = "; ".join(left_out[-4:])
            parts.append(f"{counted(len(left_out), 'command')} left out: {shown}")
        return UsageError("; ".join(parts), fix=fix)


def _group_lives(leader: int) -> bool:
    """Tell whether a process runs that the script has started in the background."""
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    return True


def _last_command(scratch: Path) -> str:
    """Return the command that the script runs now, or ran last."""
    try:
        text = (scratch / "at").read_text(errors="replace")
    except OSError:
        return "its start"
    return " ".join(text.split())[:80]


def _notes(scratch: Path) -> list[tuple[str, str]]:
    """Read the notes of answered commands: kind and text of each."""
    notes = []
    for line in (scratch / "notes").read_text(errors="replace").splitlines():
        # a line that a process was killed in is cut
        with contextlib.suppress(ValueError):
            kind, text = json.loads(line)
            notes.append((kind, text))
    return notes


def _paths_from_here(line: Sequence[str], folder: str) -> list[str]:
    """Change the Python files of ``line``, which are named from ``folder``, to paths from here."""
    if Path(folder) == Path.cwd():
        return list(line)
    words = []
    for word in line:
        if word.endswith(".py") and Path(folder, word).is_file():
            word = str(Path(folder, word))
        words.append(word)
    return words
