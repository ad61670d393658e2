"""How long does a command take, and how much memory do it and its children hold at once? (Linux)

``measure(argv)`` runs it to its end.  ``peak_rss`` adds resident pages of all processes, so pages
they share (libraries) count once for each.
"""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PERIOD = 0.05  # seconds between two looks


@dataclass(frozen=True)
class Measured:
    """Bytes, seconds, and what the command said."""

    seconds: float
    cpu_seconds: float
    peak_rss: int
    status: int
    output: str


def _tree(root: int) -> list[int]:
    """Process ids of ``root`` and everything below it."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found.extend(parents.get(pid, []))
    return found


def _memory(pid: int) -> int:
    """Resident bytes of one process; 0 if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * resource.getpagesize()


def measure(
    argv: Sequence[str],
    cwd: Path,
    env: Mapping[str, str] | None = None,
    errors: int = subprocess.STDOUT,
) -> Measured:
    """Run ``argv`` in ``cwd`` with ``env`` added to the environment.

    Args:
        argv: Of the process.
        cwd: Its folder.
        env: Variables that it gets in addition.
        errors: Where its stderr goes, as for ``subprocess.Popen``; by default into the output.
    """
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with subprocess.Popen(
        argv,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=errors,
    ) as process:
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        output, rss = b"", 0
        while process.poll() is None:
            rss = max(rss, sum(map(_memory, _tree(process.pid))))
            output += process.stdout.read() or b""
            time.sleep(PERIOD)
        seconds = time.perf_counter() - start
        os.set_blocking(process.stdout.fileno(), True)
        output += process.stdout.read() or b""
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Measured(seconds, cpu, rss, process.returncode, output.decode(errors="replace"))
