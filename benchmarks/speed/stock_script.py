"""How long does Megatron's own pretrain_gpt.py take as rank 40,000 of 65,536, on a CPU?

``stock_script.py MEGATRON_CHECKOUT`` runs the checkout's unchanged script with a small model at TP8
PP16 CP2 for three iterations with real values, and reads from its summary how many optimizer steps
were applied.  Whole-process seconds: imports, groups, data, training, exit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.process_tree import measure
from benchmarks.report import Row, finish

WORLD, RANK, STEPS = 65_536, 40_000, 3
SECONDS = 20
SIZES = "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --context-parallel-size 2"
ARGUMENTS = f"""
{SIZES} --sequence-parallel --use-distributed-optimizer --num-layers 16 --hidden-size 64
--num-attention-heads 8 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1
--global-batch-size 4096 --train-iters {STEPS} --lr 1e-3 --bf16 --mock-data
--tokenizer-type NullTokenizer --vocab-size 1000 --transformer-impl local
--attention-backend unfused --eval-iters 0 --eval-interval 1000 --log-interval 1 --num-workers 0
--no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion
--no-rope-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
"""


def main() -> None:
    """Measure, print, exit 1 if a bound is missed or the script fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="a Megatron-LM checkout, with pretrain_gpt.py")
    parser.add_argument("--tier", default="cpu", choices=("cpu", "meta"))
    args = parser.parse_args()
    script = args.checkout.resolve() / "pretrain_gpt.py"
    if not script.is_file():
        parser.error(f"{script} is not there: name a checkout of Megatron-LM (tag core_v0.19.0)")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        ours = f"--prism-world-size {WORLD} --prism-ranks {RANK} --prism-tier {args.tier}"
        command = [sys.executable, "-W", "ignore", "-m", "megatron_prism", "run"]
        command += [*ours.split(), "--prism-out", str(out), str(script), *ARGUMENTS.split()]
        print(f"{ours} {script.name}{ARGUMENTS}")
        done = measure(command, script.parent, {"OMP_NUM_THREADS": "1"})
        if done.status:
            raise SystemExit(f"{done.output}\n{script} ended with {done.status}")
        (summary,) = out.rglob("rank-*.json")
        steps = json.loads(summary.read_text())["trained"]["steps"]
    rows = [
        Row("whole process: wall time", done.seconds, "s", SECONDS),
        Row("the same: CPU time", done.cpu_seconds, "s"),
        Row("optimizer steps applied", steps, "", STEPS, at_least=True),
        Row("memory", done.peak_rss / 1e9, "GB"),
    ]
    finish(f"{script.name} as rank {RANK:,} of {WORLD:,}, tier {args.tier}", rows)


if __name__ == "__main__":
    main()
