"""How long do whole commands take, from start to end, and how much memory do they hold?

``python -m benchmarks.speed.commands recipe [RECIPE key=value …]``: ``prism emulate``; without
words Llama-3-70B on 1,024 GPUs, with interleaved stages as in the recipe and with plain ones.
``python -m benchmarks.speed.commands script MEGATRON_CHECKOUT [--tier meta]``: the checkout's
unchanged ``pretrain_gpt.py`` with a small model at TP8 PP16 CP2, as rank 40,000 of 65,536, for
three iterations on a CPU with real values; its summary says how many optimizer steps were applied.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.process_tree import measure
from benchmarks.report import ROOT, Row, finish

PRISM = [sys.executable, "-W", "ignore", "-m", "megatron_prism"]
RECIPES = ["llama3-70b_1024gpu_tp8pp4vp5_h200", "llama3-70b_1024gpu_tp8pp4vp5_h200 vpp=null"]
WORLD, RANK, STEPS = 65_536, 40_000, 3
JOB = f"""
--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --context-parallel-size 2
--sequence-parallel --use-distributed-optimizer --num-layers 16 --hidden-size 64
--num-attention-heads 8 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1
--global-batch-size 4096 --train-iters {STEPS} --lr 1e-3 --bf16 --mock-data
--tokenizer-type NullTokenizer --vocab-size 1000 --transformer-impl local
--attention-backend unfused --eval-iters 0 --eval-interval 1000 --log-interval 1 --num-workers 0
--no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion
--no-rope-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
"""


def rows_of(name: str, argv: list[str], cwd: Path, seconds: float, memory: float) -> list[Row]:
    """Wall time (bound in s), processor time, and memory of all processes (bound in GB)."""
    done = measure([*PRISM, *argv], cwd, {"OMP_NUM_THREADS": "1"})
    if done.status:
        raise SystemExit(f"{done.output}\n{name} ended with {done.status}")
    return [
        Row(f"{name}: wall time", done.seconds, "s", seconds),
        Row(f"{name}: processor time", done.cpu_seconds, "s"),
        Row(f"{name}: memory of all processes", done.peak_rss / 1e9, "GB", memory),
    ]


def script(checkout: Path, tier: str) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        ours = f"run --prism-world-size {WORLD} --prism-ranks {RANK} --prism-tier {tier}".split()
        words = [*ours, "--prism-out", f"{folder}/out", "pretrain_gpt.py", *JOB.split()]
        rows = rows_of(f"rank {RANK:,} of {WORLD:,}", words, checkout.resolve(), 20, 2)
        (summary,) = Path(folder).rglob("rank-*.json")
        steps = json.loads(summary.read_text())["trained"]["steps"]
    return [*rows, Row("optimizer steps applied", steps, "", STEPS, at_least=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("recipe", "script"))
    parser.add_argument("words", nargs="*", help="recipe and overrides, or a checkout of Megatron")
    parser.add_argument("--tier", default="cpu", choices=("cpu", "meta"))
    args = parser.parse_args()
    if args.what == "script":
        finish("a stock script", script(Path(args.words[0]), args.tier))
    jobs = [" ".join(args.words)] if args.words else RECIPES
    finish("prism emulate, one rank per pipeline stage, no GPU",
           [row for job in jobs for row in rows_of(job, ["emulate", *job.split()], ROOT, 60, 2)]
           )  # fmt: skip


if __name__ == "__main__":
    main()
