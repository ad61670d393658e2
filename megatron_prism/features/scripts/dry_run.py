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
from megatron_prism.emulate.launch_line import is_file, read_line
from megatron_prism.emulate.workers import Json, die_with_parent
from megatron_prism.features.scripts import batch_script, confine, dry_commands

_SHOWN = {  # kind of note -> what is said of it
    "kept": "not written, for it is there, perhaps of an earlier dry run",
    "left out": "left out",
}
_GPUS = (8, 4)  # of a host, where nobody says it: does the job depend on it?
MOST_S = 20.0  # a script that has not started its job until then waits for something
_PRELUDE = Path(__file__).with_name("dry_run.sh")  # Bash reads it first
_OWN = re.compile(  # variables that are no settings of the job, or of this place alone
    r"(BASH|PRISM_|SLURM|PBS_|LSB_|OMPI_|PMI|LD_|HOSTNAME$|(SHLVL|PWD|OLDPWD|PATH|_|TMPDIR|HOME|"
    r"RANK|WORLD_SIZE|LOCAL_RANK|NODE_RANK|GROUP_RANK|JOB_ID|MASTER_ADDR|MASTER_PORT|LS_SUBCWD|"
    r"CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS|PET_\w+)$|.*(KEY|TOKEN|SECRET|PASSW|WANDB))"
)


@dataclass(frozen=True)
class DryRun:
    """What a script would start.

    line     : words of the launch line
    variables: that the script has set for it
    known    : variables of the scheduler that it was run with
    notes    : lines about where numbers come from, and what was left out
    text     : of the script or manifest that ``line`` queues, else empty
    """

    line: tuple[str, ...]
    variables: Mapping[str, str]
    known: Mapping[str, str]
    notes: tuple[str, ...]
    text: str = ""


def dry_run(
    shell: Sequence[str],
    before: Sequence[str],
    given: Mapping[str, str],
    gpus: str,
    python: str = "",
    writes: bool = False,
    text: str = "",
) -> DryRun:
    """Run ``shell`` dry.

    Args:
        shell: words of a shell or of sbatch, and its script with its arguments.
        before: launchers that would start the shell.
        given: variables that their line sets.
        gpus: of each host, where the user said it, else empty.
        python: the script of Python in ``shell`` that starts the launcher, if one does.
        writes: whether new files and folders may be made outside of the working folder.
        text: of the script or manifest, where it is in no file.

    Raises:
        UsageError: it reads variables that nobody can know but the user, or starts no job.
    """
    if shutil.which("bash") is None:
        raise UsageError("there is no bash to run the script with", fix="its launch line instead")
    alloc, words = None, dry_commands.script_words(shell)
    if shell[0] == "kubectl":
        manifest = text or dry_commands.submitted(shell, str)
        command, alloc, operator = batch_script.manifest_job(manifest)
        words, given = ["-c", shlex.join(command)], {**operator, **given}
    elif dry_commands.submits(shell):
        given = {**batch_script.exported(shell[1:]), **given}
    script = next((word for word in words if not word.startswith("-")), "")
    inline = "-c" in words or bool(re.fullmatch(r"-\w*c", words[0] if words else ""))
    here = not inline and is_file(script)
    if not (inline or here or text):
        raise UsageError(f"there is no script {script}", fix="the path of the script, or its line")
    title = script if here else shlex.join(shell)[:60]
    if here and b"\r\n" in Path(script).read_bytes():
        what = f"{script} has line ends of Windows, which Bash takes for parts of words"
        raise UsageError(what, fix=f"sed -i 's/\\r$//' {shlex.quote(script)}")
    text = Path(script).read_text(errors="replace") if here else script if inline else text
    if alloc is None:
        alloc = batch_script.allocation(text, [word for word in shell[1:] if word not in words])
    with tempfile.TemporaryDirectory(prefix="prism-dry-") as place:
        scratch = Path(place)
        if not (inline or here):
            script = str(scratch / "script")
            Path(script).write_text(text)
            words = [script, *words[1:]]
        known = batch_script.variables(alloc, str(scratch / "hosts"), os.getcwd())
        known = {name: value for name, value in known.items() if name not in os.environ}
        known |= given
        settings = batch_script.sourced(text, Path() if inline else Path(script).parent)
        settings = "\n".join([settings, *words[1:]])
        if missing := batch_script.unknown(text, {**known, **os.environ}, settings):
            raise UsageError(
                f"{title} reads {', '.join(missing)}, and nothing here says "
                f"{'it' if len(missing) == 1 else 'them'}",
                fix=" ".join(f"{name}=N" for name in missing) + " before prism",
            )
        environment = _environment(scratch, known, batch_script.hosts_of(alloc)) | {
            "PRISM_DRY_LINE": json.dumps(list(before)),
            "PRISM_DRY_SCRIPT": python,
            "PRISM_DRY_FILE": script,
            "PRISM_DRY_HOME": "" if writes else os.getcwd(),
        }

        def job_with(gpus: object) -> Json:
            (scratch / "job").unlink(missing_ok=True)
            with progress(lambda: f"{title}: dry run, at: {_at(scratch)}"):
                return _run(["bash", *words], scratch, environment | {"PRISM_DRY_GPUS": str(gpus)},
                            title)  # fmt: skip

        said = gpus or alloc.gpus
        job = job_with(said or _GPUS[0])
        notes = _notes(scratch)
        other = job
        if not said and any(kind == "asked" for kind, _ in notes):
            with contextlib.suppress(UsageError):  # it refuses to run with another number
                other = job_with(_GPUS[1])
        if _sizes(other) != _sizes(job):
            raise UsageError(f"{title} asks how many GPUs a host has",
                             fix="--prism-gpus-per-node 8")  # fmt: skip
    read = {name for name, _ in batch_script.READ.findall(text)} & set(known)
    sources = [f"{name}={known[name]}" for name in sorted(read) if known[name].isdigit()
               and name not in batch_script.HERE]  # fmt: skip
    lines = [f"{', '.join(sources)}: {alloc.said}"] if sources and alloc.said else []
    for wanted, what in _SHOWN.items():
        if found := list(dict.fromkeys(one for kind, one in notes if kind == wanted)):
            more = f"; {len(found) - 12} more" if len(found) > 12 else ""
            lines.append(f"{what}: {'; '.join(one[:80] for one in found[:12])}{more}")
    if not confine.available():
        lines.append("this kernel has no Landlock: commands were left out by their names alone")
    changed = {name: value for name, value in job["env"].items()
               if not _OWN.match(name) and environment.get(name) != value}  # fmt: skip
    line = tuple(_at_home(job["line"], job["cwd"]))
    return DryRun(line, changed, known, tuple(lines), job["text"])


def _sizes(job: Json) -> tuple[object, ...]:
    """What two runs of a script have in common that start the same job."""
    line = read_line(job["line"], job["env"])
    return line.words, line.shell, line.ranks, line.each, job["text"]


def _environment(scratch: Path, known: Mapping[str, str], hosts: list[str]) -> dict[str, str]:
    """That of the script: the folder of answered commands first in PATH."""
    folder = scratch / "bin"
    folder.mkdir()
    (scratch / "tmp").mkdir()
    (scratch / "notes").touch()
    (scratch / "hosts").write_text("".join(f"{name}\n" for name in hosts))
    root = str(Path(megatron_prism.__file__).parent.parent)
    start = f"import sys, runpy; sys.path.insert(0, {root!r}); "
    start += "runpy.run_module('megatron_prism.features.scripts.dry_commands', run_name='__main__')"
    answer = scratch / "answer"
    python = shlex.quote(sys.executable)
    answer.write_text(f'#!/bin/sh\nexec {python} -ISc {shlex.quote(start)} "${{0##*/}}" "$@"\n')
    answer.chmod(0o755)
    for name in {*dry_commands.NAMES, "rewrite"}:
        (folder / name).symlink_to(answer)
    path = os.environ.get("PATH", os.defpath)
    return {
        **{name: value for name, value in os.environ.items() if name != "PRISM_ARGS"},
        **known,
        "PATH": f"{folder}:{path}",
        "BASH_ENV": str(_PRELUDE),
        "TMPDIR": str(scratch / "tmp"),
        "PRISM_DRY": str(scratch),
        "PRISM_DRY_PATH": path,
        "PRISM_DRY_HOSTS": ",".join(hosts),
        **({"PRISM_DRY_CONFINED": "1"} if confine.available() else {}),
    }


def _run(
    words: Sequence[str],
    scratch: Path,
    environment: Mapping[str, str],
    title: str,
) -> Json:
    """The job that the script would start; whatever it has started is stopped then."""

    def prepare() -> None:
        die_with_parent()
        if confine.available():
            confine.confine(scratch, Path(environment["PRISM_DRY_HOME"] or "/"))

    with (scratch / "printed").open("wb") as printed:
        process = subprocess.Popen(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed,
            start_new_session=True, preexec_fn=prepare,
        )  # fmt: skip
    job, start = scratch / "job", time.monotonic()
    try:
        while not job.exists():
            ended = process.poll() is not None and not _group_lives(process.pid)
            if (ended and not job.exists()) or time.monotonic() - start > MOST_S:
                raise _no_job(title, ended, scratch)
            time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return json.loads(job.read_text())


def _group_lives(leader: int) -> bool:
    """Whether a process runs that the script has started in the background."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, 0)
        return True
    return False


def _no_job(title: str, ended: bool, scratch: Path) -> UsageError:
    what = "ended" if ended else f"ran for {MOST_S:.0f} s, at last: {_at(scratch)},"
    parts = [f"{title} {what} without a command that trains"]
    printed = (scratch / "printed").read_text(errors="replace").strip().splitlines()
    parts += [f"it printed: {line[:200]}" for line in printed[-2:]]
    if skipped := [text[:60] for kind, text in _notes(scratch) if kind == "left out"]:
        parts.append(f"{counted(len(skipped), 'command')} left out: {'; '.join(skipped[-4:])}")
    return UsageError("; ".join(parts), fix="the line that starts Megatron: prism … torchrun …")


def _at(scratch: Path) -> str:
    with contextlib.suppress(OSError):
        return " ".join((scratch / "at").read_text(errors="replace").split())[:80]
    return "its start"


def _notes(scratch: Path) -> list[tuple[str, str]]:
    """(kind, text) of each."""
    notes = list[tuple[str, str]]()
    for line in (scratch / "notes").read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            notes.append(tuple(json.loads(line)))
    return notes


def _at_home(line: Sequence[str], folder: str) -> list[str]:
    """``line`` with the Python files that it names in ``folder`` as paths from here."""
    here = Path(folder) == Path.cwd()
    files = {word for word in line if word.endswith(".py") and Path(folder, word).is_file()}
    return [str(Path(folder, word)) if word in files and not here else word for word in line]
