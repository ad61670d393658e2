"""A real job over gloo that is recorded, and its ranks alone with what their peers delivered.

The job is ``pretrain_tiny`` under a hook: every module's outputs, and the gradients of these, are
folded into a CRC-32 for each iteration.  Equal ones mean that forward and backward were the same to
the bit, also where losses and gradient norms are made of replayed calls.

    PYTHONPATH=tests python -m helpers.replayed_ranks 16 0,5,14 --tensor-model-parallel-size 2 …

trains a job of 16 processes and runs ranks 0, 5 and 14 alone; a line each says what is equal.
"""

import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from functools import partial
from pathlib import Path

from helpers.pretrain import JOB, SCRIPT

PAYLOAD = ["--prism-record", "rec", "--prism-payload", "all"]
FIT_ALONE = ("losses", "grad_norm", "forward", "backward", "modules", "gradients")


def train(place, out, flags, processes=1):
    """Iterations of every rank of a run with ``flags``: {rank: {number: what it came to}}."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [sys.executable, *(torchrun if processes > 1 else []), __file__, *flags,
         "--prism-emulate", "--prism-tier", "cpu", "--prism-out", out],
        cwd=place, capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
             "PYTHONPATH": os.pathsep.join(sys.path), "REPLAYED": f"{place}/{out}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for file in Path(place, out).glob("rank-*.json"):
        summary = json.loads(file.read_text())
        folded = json.loads(Path(f"{place}/{out}-{summary['rank']}").read_text())
        found[summary["rank"]] = {
            one["number"]: {"losses": one["losses"], "grad_norm": one["grad_norm"],
                            **folded.get(str(one["number"] - 1), {})}
            for one in summary["iterations"]
        }  # fmt: skip
    return found


def fold(found, kind, counts, iteration, tensor):
    import torch

    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    one = found.setdefault(iteration(), Counter())
    one[kind] = zlib.crc32(data, one[kind])
    one[counts] += 1


def follow(found):
    """Fold what every module gives, and its gradient, into ``found``, by iteration."""
    import torch
    from torch.utils import _pytree as pytree

    def iteration():
        from megatron.training.global_vars import get_args

        return getattr(get_args(), "curr_iteration", -1)

    def called(module, args, output):
        for one in pytree.tree_leaves(output):
            if isinstance(one, torch.Tensor) and one.is_floating_point():
                fold(found, "forward", "modules", iteration, one)
                if one.grad_fn is not None:  # biases are given, too
                    one.register_hook(partial(fold, found, "backward", "gradients", iteration))

    torch.nn.modules.module.register_module_forward_hook(called)


def job():
    found = {}
    import torch  # noqa: F401 - attaches prism, which says which rank this is

    follow(found)
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        Path(f"{os.environ['REPLAYED']}-{os.environ['RANK']}").write_text(json.dumps(found))


def main(processes, ranks, *flags):
    """Print a line per rank; exit status 1 if one differs."""
    flags, bad = [*JOB, *flags], 0
    with tempfile.TemporaryDirectory() as place:
        begin = time.monotonic()
        real = train(place, "job", [*flags, *PAYLOAD], int(processes))
        size = sum(file.stat().st_size for file in Path(place, "rec").iterdir())
        print(f"{processes} processes, {time.monotonic() - begin:.0f} s, {size:,} bytes recorded")
        for rank in map(int, ranks.split(",")):
            alone = ["--prism-world-size", processes, "--prism-ranks", str(rank),
                     "--prism-values", "recorded:rec"]  # fmt: skip
            (its,) = train(place, f"alone-{rank}", [*flags, *alone]).values()
            differ = [f"{key} of {n}" for n, one in real[rank].items() for key in FIT_ALONE
                      if one[key] != its[n][key]]  # fmt: skip
            sums = Counter()
            for one in its.values():
                sums.update({key: one[key] for key in ("modules", "gradients")})
            said = f"differ: {', '.join(differ)}" if differ else "equal to the bit"
            print(f"rank {rank}: {len(its)} iterations, {sums['modules']} outputs of modules and "
                  f"{sums['gradients']} gradients: {said}")  # fmt: skip
            bad += bool(differ)
    return bad > 0


if __name__ == "__main__":
    sys.exit(job() if "REPLAYED" in os.environ else main(*sys.argv[1:]))
