"""A real job over gloo that is recorded, and its ranks alone with what their peers delivered.

The job is ``pretrain_tiny`` under a hook: every module's outputs, and the gradients of these, are
folded into a CRC-32 for each iteration.  Equal ones mean that forward and backward were the same to
the bit, also where losses and gradient norms are made of replayed calls.  Processes are forks of
one that has imported torch.

    PYTHONPATH=tests python -m helpers.replayed_ranks 16 0,5,14 --tensor-model-parallel-size 2 …

trains a job of 16 processes and runs ranks 0, 5 and 14 alone; a line each says what is equal.
"""

import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from functools import partial
from pathlib import Path

from helpers.pretrain import JOB, SCRIPT
from helpers.stock_jobs import PREPARED

PAYLOAD = ["--prism-record", "rec", "--prism-payload", "all"]
EQUAL = ("losses", "grad_norm", "forward", "backward", "modules", "gradients")


def train(place, out, flags, processes=1):
    """Iterations of every rank of a run with ``flags``: {rank: {number: what it came to}}."""
    words = [*flags, "--prism-emulate", "--prism-tier", "cpu", "--prism-out", out]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__],
        input=json.dumps([processes, out, words]), cwd=place, capture_output=True, text=True,
        check=False, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)},
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


def launch(processes, out, words):
    """Fork the ranks of a job as torchrun starts them; exit status 1 if one fails."""
    for name in PREPARED if processes > 4 else PREPARED[:1]:  # they take as long as a rank
        importlib.import_module(name)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    size = str(processes)
    environment = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "localhost",
                   "MASTER_PORT": port}  # fmt: skip
    for rank in range(processes):
        if not os.fork():
            if processes > 1:
                os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
            run(out, words)
    statuses = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(processes)]
    return any(statuses)


def run(out, words):
    """Be one rank: train, and write down what was folded."""
    found, place = {}, os.getcwd()
    follow(found)
    sys.argv = ["prism", "run", "--", str(SCRIPT), *words]
    try:
        runpy.run_module("megatron_prism", run_name="__main__", alter_sys=True)
    finally:
        Path(place, f"{out}-{os.environ['RANK']}").write_text(json.dumps(found))


def follow(found):
    """Fold what every module gives, and its gradient, into ``found``, by iteration."""
    import torch
    from torch.utils import _pytree as pytree

    def iteration():
        from megatron.training.global_vars import get_args

        return getattr(get_args(), "curr_iteration", -1)

    def fold(kind, counts, tensor):
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        one = found.setdefault(iteration(), Counter())
        one[kind] = zlib.crc32(data, one[kind])
        one[counts] += 1

    def called(module, args, output):
        for one in pytree.tree_leaves(output):
            if isinstance(one, torch.Tensor) and one.is_floating_point():
                fold("forward", "modules", one)
                if one.grad_fn is not None:  # biases are given, too
                    one.register_hook(partial(fold, "backward", "gradients"))

    torch.nn.modules.module.register_module_forward_hook(called)


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
            differ = [f"{key} of {n}" for n, one in real[rank].items() for key in EQUAL
                      if one[key] != its[n][key]]  # fmt: skip
            sums = Counter()
            for one in its.values():
                sums.update({key: one[key] for key in ("modules", "gradients")})
            verdict = f"differ: {', '.join(differ)}" if differ else "equal to the bit"
            print(f"rank {rank}: {len(its)} iterations, {sums['modules']} outputs of modules and "
                  f"{sums['gradients']} gradients: {verdict}", flush=True)  # fmt: skip
            bad += bool(differ)
    return bad > 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) if sys.argv[1:] else launch(*json.load(sys.stdin)))
