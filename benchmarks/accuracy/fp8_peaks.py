"""Peak memory in FP8 without a GPU, recipe by recipe, against that of one H200.

``python -m benchmarks.accuracy.fp8_peaks SCRIPTS [JOB … ]``

SCRIPTS holds stock ``pretrain_gpt.py`` and its siblings of Megatron-LM tag core_v0.19.0.  Every job
of ``results/h200_fp8_peaks.json`` (default: all 15, four minutes of one core) is captured on tier
``meta`` as rank 0 of 2, as it was emulated on the GPU with the real Transformer Engine.  Figures of
the GPU were read by hand: ``torch.cuda.max_memory_allocated`` of the fourth ``train_step``, reset
before it, of ``prism run --prism-world-size 2 --prism-ranks 0`` with the arguments in that file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import megatron_prism as prism
from benchmarks.report import ROOT, Row, finish

REAL = json.loads((Path(__file__).parents[1] / "results" / "h200_fp8_peaks.json").read_text())
BOUND = 0.1  # percent


def peak(script: Path, arguments: str, out: Path) -> int:
    """Allocated bytes at the peak of the captured iteration."""
    words = [sys.executable, "-m", "megatron_prism", "run", "--prism-world-size", "2",
             "--prism-ranks", "0", "--prism-tier", "meta", "--prism-capture", str(out), "--",
             str(script), *REAL["arguments"].split(), *arguments.split(), "--train-iters", "3",
             "--num-workers", "0"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode:
        raise SystemExit(f"{arguments} failed:\n{done.stderr[-1500:]}")
    (one,) = prism.peak_memory(prism.load(out / "slice-000000.prism")).classes.values()
    return int(one["peak_allocated"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scripts", type=Path)
    parser.add_argument("jobs", nargs="*", default=list(REAL["jobs"]), metavar="JOB")
    args = parser.parse_args()
    rows = []
    for name in args.jobs:
        job = REAL["jobs"][name]
        with tempfile.TemporaryDirectory() as place:
            script = args.scripts.resolve() / "pretrain_gpt.py"
            ours = peak(script, job["arguments"], Path(place) / "out")
        off = 100 * (ours / job["peak"] - 1)
        rows.append(Row(f"{name}: allocated, off the GPU", abs(off), "%", BOUND))
        print(f"{name}: {ours:,} B here, {job['peak']:,} B real, {off:+.4f} %", flush=True)
    finish("Peak memory in FP8 without a GPU", rows)


if __name__ == "__main__":
    main()
