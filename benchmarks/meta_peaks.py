"""Peaks of allocated memory without a GPU, against those of real runs on four.

``python benchmarks/meta_peaks.py SCRIPTS [CONFIG:RANK …]``

SCRIPTS holds stock ``pretrain_gpt.py`` and its siblings of Megatron-LM tag core_v0.19.0.  Every
rank named (default: the ten of the README) runs alone on tier ``meta`` with the arguments of the
real 4 x H200 runs whose peaks are in ``results/h200_x4_real_peaks.json``: three steps, half a
minute each on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from groundtruth import COMMON, CONFIGS
from report import ROOT, Row, finish

REAL = json.loads((Path(__file__).parent / "results" / "h200_x4_real_peaks.json").read_text())
WANTED = ("pp4:0", "pp4:1", "pp4:2", "pp4:3", "tp2pp2:0", "tp2pp2:2", "dp4ov:0", "te_tp4sp:0",
          "te_tp2pp2vp2:0", "te_tp2pp2vp2:2")  # fmt: skip
BOUNDS = {True: 2.0, False: 0.5}  # percent; with Transformer Engine, with local layers


def peak(script: Path, config: str, rank: int, out: Path) -> int:
    """Bytes of one rank alone."""
    words = [sys.executable, "-m", "megatron_prism", "run", "--prism-world-size", "4",
             "--prism-ranks", str(rank), "--prism-tier", "meta", "--prism-out", str(out), "--",
             str(script), *COMMON.split(), *CONFIGS[config].split(), "--train-iters", "3",
             "--num-workers", "0"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode:
        raise SystemExit(f"{config}:{rank} failed:\n{done.stderr[-1500:]}")
    return json.loads((out / f"rank-{rank:06d}.json").read_text())["memory"]["allocated_peak"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scripts", type=Path)
    parser.add_argument("ranks", nargs="*", default=WANTED, metavar="CONFIG:RANK")
    args = parser.parse_args()
    rows = []
    for name in args.ranks:
        config, _, rank = name.partition(":")
        with tempfile.TemporaryDirectory() as place:
            script = args.scripts.resolve() / "pretrain_gpt.py"
            ours = peak(script, config, int(rank), Path(place) / "out")
        real = REAL["peaks"][config][int(rank)]
        print(f"{name}: {ours:,} B here, {real:,} B real, {ours - real:+,}", flush=True)
        off = 100 * abs(ours / real - 1)
        rows.append(Row(f"{name}: off the real peak", off, "%", BOUNDS[config.startswith("te_")]))
    finish("Peaks without a GPU", rows)


if __name__ == "__main__":
    main()
