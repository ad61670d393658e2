"""How long does a command take, and how much memory do it and its children hold at once? (Linux)

``measure(argv)`` runs it to its end.  ``peak_rss`` adds resident pages of all processes, so pages
they share (libraries) count once for each; ``peak_pss`` shares them out, which is what the machine
really holds.
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
    peak_pss: int
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


def _memory(pid: int) -> tuple[int, int]:
    """(resident, proportional) bytes of one process; zeros if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0, 0
    sizes = {line.split()[0]: int(line.split()[1]) * 1024 for line in lines[1:]}
    return sizes.get("Rss:", 0), sizes.get("Pss:", 0)


def measure(argv: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None) -> Measured:
    """Run ``argv`` in ``cwd`` with ``env`` added to the environment."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with subprocess.Popen(
        argv,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        output, rss, pss = b"", 0, 0
        while process.poll() is None:
            sizes = [_memory(pid) for pid in _tree(process.pid)]
            rss = max(rss, sum(size[0] for size in sizes))
            pss = max(pss, sum(size[1] for size in sizes))
            output += process.stdout.read() or b""
            time.sleep(PERIOD)
        seconds = time.perf_counter() - start
        os.set_blocking(process.stdout.fileno(), True)
        output += process.stdout.read() or b""
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Measured(seconds, cpu, rss, pss, process.returncode, output.decode(errors="replace"))
