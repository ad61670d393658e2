"""Does every rank train alone on one GPU, with the real run's peak memory?

``python benchmarks/groundtruth.py SCRIPTS REAL.json [--configs a,b] [--side-by-side 4]``

SCRIPTS holds stock ``pretrain_gpt.py`` and its siblings of Megatron-LM tag core_v0.19.0.  REAL.json
maps a configuration to the ``max_memory_allocated`` of each rank of a real 4-GPU run of the same
arguments (bytes; ``benchmarks/results/h200_x4_real_peaks.json`` is ours).  Each rank is emulated in
a process of its own, several side by side on one GPU: memory does not mind, times would.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

BOUND_PERCENT = 0.01
NUM_RANKS = 4
ITERATIONS = 4  # Adam's states exist after the first, so the peak no longer grows after the second

COMMON = """
--num-layers 16 --hidden-size 4096 --num-attention-heads 32 --group-query-attention
--num-query-groups 8 --ffn-hidden-size 14336 --swiglu --disable-bias-linear
--normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights
--seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 32
--lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --bf16
--use-distributed-optimizer --no-gradient-accumulation-fusion --eval-iters 0 --eval-interval 1000
--log-interval 1 --attention-dropout 0 --hidden-dropout 0 --distributed-timeout-minutes 3
"""
LOCAL = (
    "--transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion"
)
TE = "--transformer-impl transformer_engine"
MOE = """
--num-layers 8 --hidden-size 2048 --ffn-hidden-size 4096 --num-attention-heads 16
--num-query-groups 4 --num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 4096
--moe-grouped-gemm --moe-token-dispatcher-type alltoall --expert-model-parallel-size 4
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
--overlap-grad-reduce --overlap-param-gather
"""
CONFIGS = {
    "tp2pp2": f"{LOCAL} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
    "pp4": f"{LOCAL} --pipeline-model-parallel-size 4",
    "dp4ov": f"{LOCAL} --num-layers 8 --overlap-grad-reduce --overlap-param-gather",
    "te_tp4sp": f"{TE} --tensor-model-parallel-size 4 --sequence-parallel",
    "te_tp2pp2vp2": f"{TE} --tensor-model-parallel-size 2 --sequence-parallel"
    " --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4",
    "te_moe_ep4": f"{TE} {MOE}",
}


@dataclass
class Run:
    """One emulated rank: its process, and what it came to."""

    config: str
    rank: int
    folder: Path
    process: subprocess.Popen[bytes]
    steps: int = 0
    peak: int = 0


def start(config: str, rank: int, scripts: Path, work: Path) -> Run:
    """Emulate one rank in the background; its log and artefact go to ``work``."""
    folder = work / f"{config}-{rank}"
    prism = ["--prism-world-size", str(NUM_RANKS), "--prism-ranks", str(rank)]
    job = [*COMMON.split(), *CONFIGS[config].split(), "--train-iters", str(ITERATIONS)]
    command = [sys.executable, "-m", "megatron_prism", "run", *prism, "--prism-out", str(folder)]
    root = Path(__file__).resolve().parent.parent
    environment = {
        **os.environ,
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }
    with open(work / f"{config}-{rank}.log", "wb") as log:
        process = subprocess.Popen(
            [*command, "--", str(scripts / "pretrain_gpt.py"), *job],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    return Run(config, rank, folder, process)


def collect(run: Run) -> None:
    """Read what a finished rank wrote; a rank that did not train wrote nothing."""
    file = run.folder / f"rank-{run.rank:06d}.json"
    if file.exists():
        summary = json.loads(file.read_text())
        run.steps = summary["trained"]["steps"]
        run.peak = summary["memory"]["allocated_peak"] or 0


def run_all(configs: list[str], scripts: Path, work: Path, side_by_side: int) -> list[Run]:
    """Every rank of every configuration, ``side_by_side`` at a time."""
    waiting = [(config, rank) for config in configs for rank in range(NUM_RANKS)]
    running: list[Run] = []
    done: list[Run] = []
    while waiting or running:
        while waiting and len(running) < side_by_side:
            running.append(start(*waiting.pop(0), scripts, work))
        for run in [r for r in running if r.process.poll() is not None]:
            running.remove(run)
            collect(run)
            done.append(run)
        time.sleep(0.2)
    return sorted(done, key=lambda r: (configs.index(r.config), r.rank))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scripts", type=Path)
    parser.add_argument("real", type=Path)
    parser.add_argument("--configs", default=",".join(CONFIGS))
    parser.add_argument("--side-by-side", type=int, default=4)
    args = parser.parse_args()
    real = json.loads(args.real.read_text())["peaks"]
    table = Table("configuration", "rank", "steps", "real bytes", "emulated", "difference", "%", "")
    missed = 0
    with tempfile.TemporaryDirectory() as work:
        runs = run_all(args.configs.split(","), args.scripts, Path(work), args.side_by_side)
        for run in runs:
            expected = real[run.config][run.rank]
            percent = 100 * (run.peak - expected) / expected
            ok = run.steps == ITERATIONS and abs(percent) <= BOUND_PERCENT
            missed += not ok
            table.add_row(
                run.config,
                str(run.rank),
                f"{run.steps} of {ITERATIONS}",
                f"{expected:,}",
                f"{run.peak:,}",
                f"{run.peak - expected:+,}",
                f"{percent:+.4f}",
                "ok" if ok else "missed",
            )
    Console(width=120).print(table)
    print(f"{len(runs) - missed} of {len(runs)} ranks trained within {BOUND_PERCENT} %")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
