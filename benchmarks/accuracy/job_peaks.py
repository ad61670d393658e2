"""Peak memory of single ranks without a GPU, job by job, against that of one GPU.

``python -m benchmarks.accuracy.job_peaks RESULTS SCRIPTS [JOB … ]``

RESULTS is ``h200_fp8_peaks`` (15 jobs, 13 of them in FP8: four minutes of one core) or
``h100_stock_peaks`` (23 configurations after Megatron-LM's examples: fifteen minutes).  SCRIPTS
holds stock ``pretrain_gpt.py`` and its siblings of Megatron-LM tag core_v0.19.0.  Every job is
captured on tier ``meta`` as the rank that was emulated on the GPU with the real Transformer
Engine; its figure was read by hand, as ``about`` in the file says.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import megatron_prism as prism
from benchmarks.report import ROOT, Row, finish

RESULTS = Path(__file__).parents[1] / "results"
BOUND = 0.1  # percent


def peak(script: Path, real: dict[str, Any], job: dict[str, Any], out: Path) -> int:
    """Allocated bytes at the peak: of the captured iteration, or of the whole run if that was
    measured."""
    rank = job.get("rank", 0)
    release = ["--prism-te-version", real["te_version"]] if "te_version" in real else []
    words = [sys.executable, "-m", "megatron_prism", "run", "--prism-world-size",
             str(job.get("world", 2)), "--prism-ranks", str(rank), "--prism-tier", "meta", *release,
             "--prism-capture", str(out / "slices"), "--prism-out", str(out / "summary"), "--",
             str(script), *real["arguments"].split(), *job["arguments"].split(),
             "--train-iters", "3", "--num-workers", "0"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode:
        raise SystemExit(f"{job['arguments']} failed:\n{done.stderr[-1500:]}")
    if real.get("whole_run"):
        summary = json.loads((out / "summary" / f"rank-{rank:06}.json").read_text())
        return int(summary["memory"]["allocated_peak"])
    programs = prism.load(out / "slices" / f"slice-{rank:06}.prism")
    (one,) = prism.peak_memory(programs).classes.values()
    return int(one["peak_allocated"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", choices=("h200_fp8_peaks", "h100_stock_peaks"))
    parser.add_argument("scripts", type=Path)
    parser.add_argument("jobs", nargs="*", metavar="JOB")
    args = parser.parse_args()
    rows = []
    real = json.loads((RESULTS / f"{args.results}.json").read_text())
    for name in args.jobs or real["jobs"]:
        job = real["jobs"][name]
        with tempfile.TemporaryDirectory() as place:
            script = args.scripts.resolve() / "pretrain_gpt.py"
            ours = peak(script, real, job, Path(place) / "out")
        off = 100 * (ours / job["peak"] - 1)
        rows.append(Row(f"{name}: allocated, off the GPU", abs(off), "%", BOUND))
        print(f"{name}: {ours:,} B here, {job['peak']:,} B real, {off:+.4f} %", flush=True)
    finish("Peak memory of a rank without a GPU", rows)


if __name__ == "__main__":
    main()
