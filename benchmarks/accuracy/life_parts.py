"""Parts of a process's life without a GPU, against one H100.

``python -m benchmarks.accuracy.life_parts SCRIPTS [JOB …]``

SCRIPTS holds stock ``pretrain_gpt.py`` and its siblings of Megatron-LM tag core_v0.19.0.  Every job
of ``results/h100_life.json`` that is listed below is captured on tier ``meta`` with
``--prism-life``; ``prism fit`` says the peak of each part (half a minute of one core a job).
Checkpoints that the real jobs read are not there: loading is that of an assumed checkpoint of the
job's own layout.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, ROOT, Row, finish

BOUND = 0.5  # percent
JOBS = (
    "dense_save",
    "dense_async",
    "dense_load",
    "dense_load_noopt",
    "dense_precise",
    "dense_precise_load",
    "dense_offload",
    "moe_save",
    "moe_load",
)
# part of the real process -> of ours; of several of one name the first counts, and of its steps the
# third is a steady one
PARTS = {
    "model2": "model",
    "optimizer": "optimizer",
    "load": "load",
    "step 1": "first iteration",
    "step 3": "steady iteration",
    "evaluation": "evaluation",
    "save": "checkpoint",
    "end": "end",
}


def real_parts(job: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the parts of a real process, by our names, with what was allocated, mostly its peak."""
    seen: set[str] = set()
    for part in job["parts"]:
        name = PARTS.get(part["part"])
        if name is None or name in seen:
            continue
        seen.add(name)
        # behind the last part its peak is that of the steps before it
        yield name, part["allocated" if name == "end" else "peak"]


def fitted(script: Path, arguments: str, folder: Path, *flags: str) -> dict[str, Any]:
    """Return the answer of ``prism fit`` of a capture of a job of one GPU.

    Args:
        script: that is launched.
        arguments: of it.
        folder: for the slices.
        flags: of the capture.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = str(script.parent)
    prism = [sys.executable, "-m", "megatron_prism"]
    slices = str(folder / "slices")
    capture = [*prism, "capture", "-o", slices, *flags, "--prism-te-version", "2.20.2"]
    launch = ["torchrun", "--nproc-per-node", "1", str(script), "--num-workers", "0"]
    fit = [*prism, "fit", slices, "--limit", "140GB", "--json"]
    for command in ([*capture, *launch, *arguments.split()], fit):
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
        # fit ends with 1 where the job does not fit
        if done.returncode not in (0, 1) or not done.stdout:
            raise SystemExit(f"{arguments} failed:\n{done.stderr[-1500:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def our_parts(script: Path, arguments: str, folder: Path) -> dict[str, int | None]:
    """Return part -> bytes, of ``prism fit`` of a capture of the job."""
    checkpoint = str(folder / "checkpoint")
    words = re.sub(r"CHECKPOINT\d?", checkpoint, arguments)
    (life,) = fitted(script, words, folder, "--prism-life")["life"].values()
    parts: dict[str, int | None] = life["parts"]
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scripts", type=Path)
    parser.add_argument("jobs", nargs="*", metavar="JOB", default=JOBS)
    args = parser.parse_args()
    real = json.loads((RESULTS / "h100_life.json").read_text())
    rows = []
    for name in args.jobs:
        job = real["jobs"][name]
        with tempfile.TemporaryDirectory() as folder:
            script = args.scripts.resolve() / "pretrain_gpt.py"
            ours = our_parts(script, f"{real['arguments']} {job['arguments']}", Path(folder))
        for part, real_bytes in real_parts(job):
            our_bytes = ours.get(part)
            if our_bytes is None:
                print(f"{name} {part}: did not run here, {real_bytes:,} B real", flush=True)
                rows.append(Row(f"{name}: {part}, did not run", 100.0, "%", BOUND))
                continue
            percent = 100 * (our_bytes / real_bytes - 1)
            print(
                f"{name} {part}: {our_bytes:,} B here, {real_bytes:,} B real, {percent:+.4f} %",
                flush=True,
            )
            rows.append(Row(f"{name}: {part}, off the GPU", abs(percent), "%", BOUND))
    finish("Parts of a process's life without a GPU", rows)


if __name__ == "__main__":
    main()
