"""The slices of a launch line: captured into a folder that is named after the line.

A folder of slices keeps the line that it was captured from, so that advice can repeat it.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_prism.cli.output import console

if TYPE_CHECKING:
    from megatron_prism.emulate.jobs.estimate import Estimator
    from megatron_prism.emulate.preflight.obstacles import Obstacles
    from megatron_prism.replay.timeline import Timeline

_LINE_FILE = ".line"


def keep_line(folder: Path, words: Sequence[str]) -> None:
    """Keep in ``folder`` the launch line, or the recipe and its settings, that it has slices of."""
    file = folder / _LINE_FILE
    try:
        file.write_text(f"{shlex.join(words)}\n", encoding="utf-8")
    except OSError as error:  # slices of others may be read, not written to
        console(stderr=True).print(f"the line is not kept in {folder}: {error.strerror or error}")


def kept_line(folder: Path) -> list[str]:
    """Return the words that ``keep_line`` kept in ``folder``; none where it has no such file."""
    file = folder / _LINE_FILE
    return shlex.split(file.read_text(encoding="utf-8")) if file.is_file() else []


def estimate_note(
    folder: Path, assumes: str, iteration_ns: int | None, device_bytes: int | None = None
) -> str:
    """Return a line about the estimate that was printed while a job was captured.

    Args:
        folder: of the slices.
        assumes: machine and host of the answer, in words.
        iteration_ns: of the answer.
        device_bytes: of the answer; None: it has none.

    Returns:
        How far off it was; "" where there was none, or none of this machine and host.
    """
    from megatron_prism.emulate.jobs import estimate

    printed_estimate = estimate.kept(folder)
    # there was none, or it was of another machine or host than the answer
    if printed_estimate is None or printed_estimate.machine != assumes:
        return ""
    return f"{printed_estimate.compared(device_bytes, iteration_ns)}\n"


def timeline_note(folder: str, timeline: Timeline) -> str:
    """Return the same of an answer that is a timeline of the slices in ``folder``."""
    from megatron_prism.replay.uncertainty.headline import headline

    first = headline(timeline)
    return estimate_note(Path(folder), first.assumes, first.iteration_ns)


def estimator_of(machine: str | None) -> Estimator:
    """Return what estimates a job on a machine while its ranks run, and prints it."""
    from megatron_prism.emulate.jobs.estimate import Estimator

    return Estimator(console(stderr=True), machine)


def capture_line(
    job: Sequence[str],
    flags: Sequence[str],
    line: Sequence[str],
    obstacles: Obstacles | None = None,
    estimator: Estimator | None = None,
) -> Path:
    """Capture the job of a launch line, unless its folder is complete.

    Args:
        job: the training script and its arguments.
        flags: ``--prism-*`` flags of the job.
        line: the words that the user typed.
        obstacles: that the line has; with any the job is checked and not captured.
        estimator: estimates what the job needs while its ranks run.

    Returns:
        The folder of slices, in the working folder.
    """
    from megatron_prism.emulate.jobs import script_job

    # the folder's name is that of the question: the same line finds it again
    digest = hashlib.sha1("\0".join((*flags, *job)).encode()).hexdigest()[:8]
    folder = Path(f"prism-{digest}")
    talk = console(stderr=True)
    script, *script_arguments = job
    words = [*flags, *script_arguments]
    script_job.capture_command_line(
        script, words, folder, talk, obstacles=obstacles, estimator=estimator
    )
    keep_line(folder, line)
    talk.print(f"prism: {folder} is kept: the next question about this line reads it")
    return folder
