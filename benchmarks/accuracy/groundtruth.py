"""Does every rank train alone on one GPU, with the real run's peak memory?

``python -m benchmarks.accuracy.groundtruth SCRIPTS [REAL.json] [--configs a,b] [--json OUT]``

SCRIPTS holds stock ``pretrain_gpt.py`` and its siblings of Megatron-LM tag core_v0.19.0.  REAL.json
maps a configuration to the ``max_memory_allocated`` of each rank of a real 4-GPU run of the same
arguments (bytes; by default ``results/h200_x4_real_peaks.json``; ``real_rank.py`` measures others).
Each rank is emulated in a process of its own, several side by side on one GPU: memory does not
mind, times would.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.accuracy.jobs import COMMON, CONFIGS, NUM_RANKS
from benchmarks.report import RESULTS, ROOT

BOUND_PERCENT = 0.01
ITERATIONS = 4  # Adam's states exist after the first, so the peak no longer grows after the second


@dataclass(frozen=True)
class Rank:
    """What an emulated rank came to, beside the real one; bytes."""

    config: str
    rank: int
    real: int
    steps: int = 0
    emulated: int = 0

    @property
    def percent(self) -> float:
        return 100 * (self.emulated / self.real - 1)

    @property
    def ok(self) -> bool:
        return self.steps == ITERATIONS and abs(self.percent) <= BOUND_PERCENT


def emulate(script: Path, work: Path, one: Rank, gpu: int) -> Rank:
    """Train a rank alone on a GPU of this host; one that did not train has no steps."""
    out = work / f"{one.config}-{one.rank}"
    words = [sys.executable, "-m", "megatron_prism", "run", "--prism-world-size", str(NUM_RANKS),
             "--prism-ranks", str(one.rank), "--prism-out", str(out), "--", str(script),
             *COMMON.split(), *CONFIGS[one.config].split(), "--train-iters",
             str(ITERATIONS)]  # fmt: skip
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "4",
                   "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": str(gpu)}  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    file = out / f"rank-{one.rank:06d}.json"
    if not file.exists():
        print(f"{one.config} rank {one.rank} did not train:\n{done.stderr[-1000:]}",
              file=sys.stderr)  # fmt: skip
        return one
    summary = json.loads(file.read_text())
    peak = summary["memory"]["allocated_peak"] or 0
    return Rank(one.config, one.rank, one.real, summary["trained"]["steps"], peak)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scripts", type=Path)
    parser.add_argument("real", type=Path, nargs="?", default=RESULTS / "h200_x4_real_peaks.json")
    parser.add_argument("--configs", default=",".join(CONFIGS))
    parser.add_argument("--side-by-side", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args()
    real = json.loads(args.real.read_text())["peaks"]
    script, num_gpus = args.scripts.resolve() / "pretrain_gpt.py", torch.cuda.device_count()
    wanted = [Rank(config, rank, real[config][rank])
              for config in args.configs.split(",") for rank in range(NUM_RANKS)]  # fmt: skip
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(args.side_by_side) as pool:
        done = list(pool.map(lambda one: emulate(script, Path(place), one, one.rank % num_gpus),
                             wanted))  # fmt: skip
    table = Table("configuration", "rank", "steps", "real bytes", "emulated", "difference", "%", "")
    for one in done:
        cells = one.config, one.rank, one.steps, f"{one.real:,}", f"{one.emulated:,}"
        table.add_row(*map(str, cells), f"{one.emulated - one.real:+,}", f"{one.percent:+.4f}",
                      "ok" if one.ok else "missed")  # fmt: skip
    Console(width=130).print(table)
    met = sum(one.ok for one in done)
    print(f"{met} of {len(done)} ranks trained within {BOUND_PERCENT} %")
    if args.json is not None:
        rows = [{**vars(one), "percent": round(one.percent, 5), "ok": one.ok} for one in done]
        args.json.write_text(json.dumps({"ranks": rows}, indent=1) + "\n")
    return 0 if met == len(done) else 1


if __name__ == "__main__":
    sys.exit(main())
