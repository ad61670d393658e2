"""One dry run of a script: it is started in a process group of its own, and stopped at its job.

In : a command with its environment, made by dry_run.py.  Out: the job, as ``dry_commands`` has
written it, or why there is none.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_prism.core.errors import UsageError
from megatron_prism.core.messages import progress
from megatron_prism.core.units import counted
from megatron_prism.emulate.processes.workers import Json, die_with_parent
from megatron_prism.features.scripts import confine

_SWIFT = re.compile(r"megatron (pt|sft|rlhf)\b")  # commands of ms-swift
_RAY_MODULES = r"verl\.trainer\.main_\w+|recipe\.\w+\.main_\w+|nemo_rl\.\S+"
_STARTS_ITSELF = re.compile(rf"{_SWIFT.pattern}|python\S* -m (?:{_RAY_MODULES})(?=\s|$)")
_MISSING = re.compile(r"(\S+): No such file or directory")


@dataclass(frozen=True)
class Execution:
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
            # all of its group may have ended
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return json.loads(job_file.read_text())

    def printed(self) -> str:
        """Return what the last run printed."""
        return (self.scratch / "printed").read_text(errors="replace")

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
                # a script that asks its user ends, where it would wait until the limit
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                # what it leaves in the background is stopped with it
                start_new_session=True,
                preexec_fn=prepare,
            )

    def _folder_that_it_needs(self) -> str:
        """Return the folder of the script, if it looks for what is there in the working folder."""
        beside = Path(self.environment["PRISM_DRY_FILE"]).parent
        for name in _MISSING.findall(self.printed()):
            is_beside = (beside / Path(name).name).is_file()
            if is_beside and Path(name).absolute().parent == Path.cwd() != beside.absolute():
                return str(beside)
        return ""

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
        folder = self._folder_that_it_needs()
        if folder:
            fix = f"cd {folder} before prism: the script takes files from the working folder"
        started = _started_by_others(self.scratch)
        if started:
            return _started_elsewhere(self.title, started)
        parts = [f"{self.title} {how} without a command that trains"]
        printed = [line for line in self.printed().splitlines() if line.strip()]
        parts += [f"it printed: {line[:200]}" for line in printed[-2:]]
        left_out = [text for kind, text in read_notes(self.scratch) if kind == "left out"]
        if left_out:
            shown = "; ".join(text[:60] for text in dict.fromkeys(left_out[-4:]))
            parts.append(f"{counted(len(left_out), 'command')} left out: {shown}")
        return UsageError("; ".join(parts), fix=fix)


def _group_lives(leader: int) -> bool:
    """Tell whether a process runs that the script has started in the background."""
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    return True


def _started_by_others(scratch: Path) -> str:
    """Return the command of a script that starts training in a way of its own; empty without one.

    ms-swift's ``megatron sft`` starts torchrun itself, and verl's trainers start ray.
    """
    for kind, text in read_notes(scratch):
        if kind == "left out" and _STARTS_ITSELF.match(text):
            return text
    return ""


def _started_elsewhere(title: str, command: str) -> UsageError:
    """Make the error of a script whose training is started by the program that it runs.

    Args:
        title: name of the script.
        command: of that program.
    """
    swift = _SWIFT.match(command)
    if swift is not None:
        return UsageError(
            f"{title} starts {swift[0]}, which starts torchrun itself",
            fix=f"torchrun --nproc-per-node 8 -m swift.cli._megatron.{swift[1]} and the arguments "
            f"of {swift[0]}, in its place",
        )
    module = command.split()[2]
    return UsageError(
        f"{title} starts {module}, whose ranks are started by ray: none has a command line",
        fix="the line of Megatron's part alone: torchrun --nproc-per-node 8 pretrain_gpt.py with "
        "the model's arguments",
    )


def _last_command(scratch: Path) -> str:
    """Return the command that the script runs now, or ran last."""
    try:
        text = (scratch / "at").read_text(errors="replace")
    except OSError:
        return "its start"
    return " ".join(text.split())[:80]


def read_notes(scratch: Path) -> list[tuple[str, str]]:
    """Read the notes of answered commands: kind and text of each."""
    notes = []
    for line in (scratch / "notes").read_text(errors="replace").splitlines():
        # a line that a process was killed in is cut
        with contextlib.suppress(ValueError):
            kind, text = json.loads(line)
            notes.append((kind, text))
    return notes
