"""How a benchmark says what it found: one table with bounds, and exit status 1 if one is missed."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_LOAD = os.getloadavg()[0]  # of others: a busy machine explains a slow figure
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Row:
    """One measurement; ``bound`` is the most it may be (None: shown for comparison)."""

    what: str
    measured: float
    unit: str
    bound: float | None = None
    at_least: bool = False

    @property
    def ok(self) -> bool:
        if self.bound is None:
            return True
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound


def child(code: str, *words: object, env: Mapping[str, str] | None = None) -> Any:
    """What ``code`` prints last, as JSON, in a Python of its own."""
    argv = [sys.executable, "-W", "ignore", "-c", code, *map(str, words)]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, env=env)
    if done.returncode:
        raise SystemExit(done.stderr[-1500:])
    return json.loads(done.stdout.splitlines()[-1])


def machine() -> str:
    """Processor, how many of them, GPU if there is one, and the versions that matter."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [
            line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        name = models[0].partition(":")[2].strip() if models else name
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}, " + ", ".join(
        f"{package} {_version(package)}" for package in ("torch", "megatron-core")
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """The commit of this checkout, with a plus sign if it has changes."""
    try:
        head = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip()


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"


def finish(title: str, rows: Sequence[Row]) -> None:
    """Print the table and leave the program: 0 if every bound was kept, else 1."""
    table = Table(title=title, title_justify="left", caption_justify="left")
    for column in ("what", "measured", "bound", ""):
        table.add_column(column, justify="left" if column in ("what", "") else "right")
    for row in rows:
        sign = ">=" if row.at_least else "<="
        bound = "" if row.bound is None else f"{sign} {_number(row.bound)} {row.unit}"
        verdict = "" if row.bound is None else ("ok" if row.ok else "missed")
        table.add_row(row.what, f"{_number(row.measured)} {row.unit}", bound, verdict)
    table.caption = (
        f"{machine()}\n{datetime.date.today()}, commit {commit()}, load {_LOAD:.1f} at the start"
    )
    Console(width=None if sys.stdout.isatty() else 120, highlight=False).print(table)
    raise SystemExit(0 if all(row.ok for row in rows) else 1)
