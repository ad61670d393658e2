"""Memory without a GPU, against that of real runs on four: allocated, reserved, device.

``python -m benchmarks.accuracy.meta_peaks SCRIPTS [CONFIG:RANK … | all] [--json OUT]``

SCRIPTS holds stock ``pretrain_gpt.py`` and its siblings of Megatron-LM tag core_v0.19.0.  Every
rank named (default: ten; all: 24, eight minutes) is captured alone on tier
``meta`` with the arguments of the real 4 x H200 runs whose figures are in
``results/h200_x4_real_peaks.json``: three steps, 20 seconds each on one core.  Reserved and device
bytes are what ``prism memory`` says of the slice: midway between a device that keeps up with its
host and a host that is far ahead; the two ends are printed, too.
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
from benchmarks.accuracy.jobs import COMMON, CONFIGS
from benchmarks.report import ROOT, Row, finish

REAL = json.loads((Path(__file__).parents[1] / "results" / "h200_x4_real_peaks.json").read_text())
WANTED = ("pp4:0", "pp4:1", "pp4:2", "pp4:3", "tp2pp2:0", "tp2pp2:2", "dp4ov:0", "te_tp4sp:0",
          "te_tp2pp2vp2:0", "te_tp2pp2vp2:2")  # fmt: skip
LEVELS = {"allocated": "peaks", "reserved": "reserved", "device": "device"}  # -> name in REAL
MOE = "te_moe_ep4"  # mirrored peers route as the rank itself does


def bound(config: str, level: str) -> float | None:
    """Percent; None: only reported."""
    if level != "allocated" or config == MOE:
        return None
    return 2.0 if config.startswith("te_") else 0.5


def figures(script: Path, config: str, rank: int, out: Path) -> dict[str, Any]:
    """Bytes of one rank alone, as a class of ``prism memory``."""
    words = [sys.executable, "-m", "megatron_prism", "run", "--prism-world-size", "4",
             "--prism-ranks", str(rank), "--prism-tier", "meta", "--prism-capture", str(out), "--",
             str(script), *COMMON.split(), *CONFIGS[config].split(), "--train-iters", "3",
             "--num-workers", "0"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode:
        raise SystemExit(f"{config}:{rank} failed:\n{done.stderr[-1500:]}")
    made = prism.peak_memory(prism.load(out / f"slice-{rank:06d}.prism"))
    (one,) = made.classes.values()
    return dict(one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scripts", type=Path)
    parser.add_argument("ranks", nargs="*", default=WANTED, metavar="CONFIG:RANK")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    every = [f"{config}:{rank}" for config in CONFIGS for rank in range(4)]
    rows, kept = [], []
    for name in every if list(args.ranks) == ["all"] else args.ranks:
        config, _, rank = name.partition(":")
        with tempfile.TemporaryDirectory() as place:
            script = args.scripts.resolve() / "pretrain_gpt.py"
            ours = figures(script, config, int(rank), Path(place) / "out")
        least, most = ours["reserved_between"]
        kept.append({"config": config, "rank": int(rank), "reserved_between": [least, most]})
        for level, key in LEVELS.items():
            real, found = REAL[key][config][int(rank)], ours[f"peak_{level}"]
            kept[-1][level] = found
            off = 100 * (found / real - 1)
            rows.append(
                Row(f"{name}: {level}, off the real run", abs(off), "%", bound(config, level))
            )
            print(f"{name} {level}: {found:,} B here, {real:,} B real, {off:+.3f} %", flush=True)
        real = REAL["reserved"][config][int(rank)]
        ends = " to ".join(f"{100 * (end / real - 1):+.1f}" for end in (least, most))
        print(f"{name} reserved between: {ends} %", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"ranks": kept}, indent=1) + "\n")
    finish("Memory without a GPU", rows)


if __name__ == "__main__":
    main()
