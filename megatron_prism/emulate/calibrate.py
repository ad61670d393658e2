"""``prism calibrate``: measure this host's calls, for ``prism replay … calibration=FILE``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from megatron_prism.core.errors import PrismError, UsageError
from megatron_prism.core.files import check_writable, write_whole
from megatron_prism.core.units import counted

HOST_S = 10  # for the host's index
LIMIT_S = 240  # of a stage
# stage -> its environment: what runs side by side needs hardware queues of its own, or each waits
# for the other; calls by themselves are measured as the user has it
STAGES: dict[str, dict[str, str]] = {
    "calls": {},
    "overlap": {"CUDA_DEVICE_MAX_CONNECTIONS": "32"},
}


def calibrate(out: Path, num_processes: int | None, *, force: bool, console: Console) -> None:
    """Start one process per device (``num_processes``: default all, or 2 on CPUs) and write
    ``out``.  One GPU alone tells how long NCCL keeps the host, and no call's own time.

    UsageError if ``out`` is taken or there is nothing to measure; PrismError if a process failed.
    """
    if out.exists() and not force:
        raise UsageError(f"{out} exists and is not overwritten", fix="--force, or another name")
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise UsageError(f"cannot write a file {out}", fix="name another with -o FILE.json")
    check_writable(out.absolute().parent, "-o FILE.json")  # before the minute that it takes
    import torch

    from megatron_prism.emulate import host_benchmark

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    count = (devices or 2) if num_processes is None else num_processes
    if count < 1 + (not devices):
        message = f"calls among {counted(count, 'process')} without a GPU take no time"
        raise UsageError(message, fix="processes=2, or prism calibrate --host for this host alone")
    if devices and count > devices:
        raise UsageError(f"{count} processes for {devices} devices", fix=f"processes={devices}")
    where = f"{count} GPUs through NCCL" if devices else f"{count} CPU processes through gloo"
    what = f"calls among {where}; this takes about a minute"
    if count == 1:
        what = "how long NCCL keeps this host for a call, with one GPU"
    console.print(f"measuring {what}")
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "calibration.json"
        for stage in STAGES if devices > 1 and count > 1 else ("calls",):
            _run(stage, count, part)
        console.print(f"measuring this host for {HOST_S} s")
        index = json.loads(host_benchmark.measure(HOST_S).to_json())
        # rows of it one a line, as the processes wrote them
        text = part.read_text().rstrip().removesuffix("}").rstrip()
        write_whole(out, f"{text},\n {json.dumps(index)[1:-1]}\n}}\n", force=True)
    console.print(f"wrote {out}")
    if count == 1:
        console.print(
            "not measured with one GPU: what calls take, how much they and computing slow each "
            "other down, and which sends wait. Replays model these, and their interval says so.\n"
            "fix: prism calibrate on two or more GPUs"
        )


def _run(stage: str, count: int, part: Path) -> None:
    """One stage, in ``count`` processes; PrismError if one failed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(count), "-m", "megatron_prism.emulate.calibrate_rank"]
    try:
        done = subprocess.run(
            [*command, str(part), stage],
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
            env={**os.environ, **STAGES[stage]},
        )
    except subprocess.TimeoutExpired as error:
        what = f"the calibration made no end within {LIMIT_S} s"
        raise PrismError(what, fix="are all GPUs free and healthy?") from error
    if done.returncode or not part.exists():
        what = f"a process of the calibration failed:\n{done.stderr[-1500:]}"
        raise PrismError(what, fix="run nvidia-smi: are all GPUs free and healthy?")
