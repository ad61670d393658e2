"""How large do the gradients of a rank alone get, beside the real job's?

``emulated_norms.py MEGATRON_CHECKOUT [--steps 20]`` runs the checkout's pretrain_gpt.py on the CPU:
16 layers of width 256 as tp 1, as each rank of tp 2 alone, and as two processes; 80 layers of width
128 as rank 0 of tp 8 and as tp 1 (six steps).  Prints the losses of the first and the last step and
the range of Megatron's gradient norms.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

JOB = """
--seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3
--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
--untie-embeddings-and-output-weights --mock-data --tokenizer-type NullTokenizer --vocab-size 512
--use-distributed-optimizer --no-gradient-accumulation-fusion --eval-iters 0 --eval-interval 1000
--log-interval 1 --attention-dropout 0 --hidden-dropout 0 --transformer-impl local
--no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion
"""
WIDE = "--num-layers 16 --hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 512"
DEEP = "--num-layers 80 --hidden-size 128 --num-attention-heads 8 --ffn-hidden-size 256"
CASES = (  # what, world size, local ranks, steps (None: --steps), arguments
    ("16 layers, tp 1", 1, "0", None, WIDE),
    ("16 layers, tp 2, rank 0 alone", 2, "0", None, f"{WIDE} --tensor-model-parallel-size 2"),
    ("16 layers, tp 2, rank 1 alone", 2, "1", None, f"{WIDE} --tensor-model-parallel-size 2"),
    ("16 layers, tp 2, two processes", 2, "0,1", None, f"{WIDE} --tensor-model-parallel-size 2"),
    ("80 layers, tp 1", 1, "0", 6, DEEP),
    ("80 layers, tp 8 sp, rank 0 alone", 8, "0", 6,
     f"{DEEP} --tensor-model-parallel-size 8 --sequence-parallel"),
)  # fmt: skip


def train(script: Path, world: int, ranks: str, steps: int, job: str) -> tuple[list[float], ...]:
    """(losses, gradient norms) of every step, as Megatron's log has them."""
    count = len(ranks.split(","))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    words = [sys.executable, "-W", "ignore", *(launcher if count > 1 else []), "-m"]
    words += ["megatron_prism", "run", "--prism-world-size", str(world), "--prism-ranks", ranks]
    words += ["--prism-tier", "cpu", "--", str(script), *JOB.split(), *job.split()]
    words += ["--train-iters", str(steps)]
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{done.stderr[-3000:]}\n{script} ended with {done.returncode}")
    log = done.stdout + done.stderr
    return tuple(
        [float(found) for found in re.findall(rf"{what}: +([0-9.Ee+-]+|inf|nan) +\|", log)]
        for what in ("lm loss", "grad norm")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="a Megatron-LM checkout, with pretrain_gpt.py")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    for what, world, ranks, steps, job in CASES:
        script = args.checkout.resolve() / "pretrain_gpt.py"
        losses, norms = train(script, world, ranks, steps or args.steps, job)
        print(f"{what}: loss {losses[0]:.2f} to {losses[-1]:.2f}, "
              f"norm {norms[0]:.0f}, {norms[3]:.0f} in step 4, "
              f"{min(norms):.0f} to {max(norms):.0f} in all {len(norms)}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
