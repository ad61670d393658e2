"""``replay dp=`` of stock jobs against captures of those jobs.

    python -m benchmarks.accuracy.replicas MEGATRON_CHECKOUT [LAYOUT …] [--keep DIR]

Captures ``pretrain_gpt.py`` of every layout on 2, 8 and 32 replicas on tier meta, and asks each
capture for the other two.  The slow half of ``tests/metamorphic``: ten minutes of one core for all.
Prints the largest error of time, and of allocated and reserved bytes, by layout; exits 1 if one is
above its bound.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_prism.core.errors import ProgramError
from megatron_prism.core.programs.program import Programs
from megatron_prism.core.programs.slices import open_programs
from megatron_prism.memory.blocks import reserved
from megatron_prism.memory.peaks import known_peak
from megatron_prism.replay.priced_graph import replay
from megatron_prism.replay.replicas import with_data_parallel

SIZES = (2, 8, 32)  # replicas
MACHINE = "h100"
BOUNDS = {"time": 0.06, "allocated": 0.001, "reserved": 0.12}  # parts of the captured figure
JOB = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 512 "
    "--max-position-embeddings 512 --micro-batch-size 1 --train-iters 3 --lr 1e-4 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 32000 --eval-iters 0 --eval-interval 100 "
    "--attention-dropout 0 --hidden-dropout 0 --no-create-attention-mask-in-dataloader"
)
_SHARED = "--use-distributed-optimizer"
_MOE = (
    "--num-experts 8 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
    "--moe-router-topk 2 --moe-grouped-gemm --disable-bias-linear"
)
LAYOUTS = {  # name -> (ranks of a replica, flags)
    "dense": (1, f"--bf16 {_SHARED}"),
    "tp2": (2, f"--bf16 {_SHARED} --tensor-model-parallel-size 2 --sequence-parallel "
               "--overlap-grad-reduce --overlap-param-gather"),
    "pp2": (2, f"--bf16 {_SHARED} --pipeline-model-parallel-size 2"),
    "moe": (2, f"--bf16 {_SHARED} --pipeline-model-parallel-size 2 {_MOE}"),
    "fp16": (1, f"--fp16 {_SHARED}"),
    "fp8": (1, f"--bf16 {_SHARED} --fp8-format hybrid --fp8-recipe delayed --fp8-param-gather"),
    "precision": (1, f"--bf16 {_SHARED} --use-precision-aware-optimizer --exp-avg-dtype bf16 "
                     "--exp-avg-sq-dtype bf16 --main-params-dtype fp16"),
    "whole": (1, "--bf16"),
    "fsdp": (1, f"--bf16 {_SHARED} --use-megatron-fsdp --no-gradient-accumulation-fusion "
                "--data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor"),
}  # fmt: skip
REFUSED = {"fsdp", "fp8"}


def captured(checkout: Path, layout: str, dp: int, folder: Path) -> Programs:
    """The job of a layout on ``dp`` replicas, captured into ``folder`` unless it is there."""
    if not folder.exists():
        replica, flags = LAYOUTS[layout]
        size = replica * dp
        subprocess.run(
            [sys.executable, "-m", "megatron_prism", "capture", "-o", str(folder),
             "--prism-tier", "meta", "--prism-world-size", str(size), "--", "pretrain_gpt.py",
             *JOB.split(), *flags.split(), "--global-batch-size", str(4 * dp)],
            check=True, cwd=checkout, stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    return open_programs(folder)


def figures(programs: Programs) -> dict[str, list[int]]:
    """ns of an iteration; allocated and reserved bytes of every program."""
    return {
        "time": [replay(programs, machine=MACHINE).iteration_ns],
        "allocated": [known_peak(one).num_bytes for one in programs.programs],
        "reserved": [sum(reserved(one)) // 2 for one in programs.programs],
    }


def errors(jobs: dict[int, Programs]) -> dict[str, float]:
    """Of each figure the largest error, as a part of the captured one; ProgramError if refused."""
    real = {dp: figures(programs) for dp, programs in jobs.items()}
    found = dict.fromkeys(BOUNDS, 0.0)
    for before, after in itertools.permutations(jobs, 2):
        asked = figures(with_data_parallel(jobs[before], after))
        for name, values in asked.items():
            parts = [abs(a / b - 1) for a, b in zip(values, real[after][name], strict=True)]
            found[name] = max(found[name], *parts)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", default=[*LAYOUTS])
    parser.add_argument("--keep", type=Path, help="where slices are and stay")
    args = parser.parse_args()
    good = True
    with contextlib.ExitStack() as stack:
        place = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        print("layout      " + "  ".join(f"{name:>10}" for name in BOUNDS))
        for layout in args.layouts:
            jobs = {dp: captured(args.checkout, layout, dp, place / f"{layout}-{dp}")
                    for dp in SIZES}  # fmt: skip
            try:
                found = errors(jobs)
            except ProgramError as error:
                good = good and layout in REFUSED
                print(f"{layout:<12}refused: {error.message[:60]}…")
                continue
            good = good and layout not in REFUSED
            good = good and all(found[name] <= bound for name, bound in BOUNDS.items())
            print(f"{layout:<12}" + "  ".join(f"{100 * found[name]:>8.2f} %" for name in BOUNDS))
    print("bounds      " + "  ".join(f"{100 * bound:>8.2f} %" for bound in BOUNDS.values()))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
