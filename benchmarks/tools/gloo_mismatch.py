"""What does gloo do with two calls that should be one and differ?  Two processes, no GPU.

``python -m benchmarks.tools.gloo_mismatch`` prints, for each case and rank, whether its call passes
(and with which values), hangs for 4 s, or raises, and what.  What torch 2.13 gave is in
``call_check.gloo_does`` and ``tests/hang/test_real_ranks.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta

import torch
from torch import distributed as dist

FLOAT, WHOLE, HALF = torch.float32, torch.int32, torch.bfloat16
SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
PATIENCE_S = 4


def reduced(n, dtype=FLOAT, op=SUM):
    return lambda rank: dist.all_reduce(made(n, dtype, rank), op=op, async_op=True)


def spread(n, dtype=FLOAT, root=0):
    return lambda rank: dist.broadcast(made(n, dtype, rank), root, async_op=True)


def gathered(n, dtype=FLOAT):
    def call(rank):
        both = torch.zeros(2 * n, dtype=dtype)
        return dist.all_gather_into_tensor(both, made(n, dtype, rank), async_op=True)

    return call


def scattered(n):
    return lambda rank: dist.reduce_scatter_tensor(
        torch.zeros(n), made(2 * n, FLOAT, rank), async_op=True
    )


def exchanged(to, back):
    return lambda rank: dist.all_to_all_single(
        torch.zeros(sum(back)), made(sum(to), FLOAT, rank), back, to, async_op=True
    )


def message(n, dtype=FLOAT):
    def call(rank):
        tensor = made(n, dtype, rank)
        return dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)

    return call


def met(rank):
    return dist.barrier(async_op=True)


CASES = {  # what rank 0 calls, what rank 1 calls
    "all_reduce 4, 5": (reduced(4), reduced(5)),
    "all_reduce 5, 4": (reduced(5), reduced(4)),
    "all_reduce 5, 6": (reduced(5), reduced(6)),
    "all_reduce 4, 4194304": (reduced(4), reduced(1 << 22)),
    "all_reduce 1024 fp32, int32": (reduced(1024), reduced(1024, WHOLE)),
    "all_reduce 1024 fp32, 2048 bf16": (reduced(1024), reduced(2048, HALF)),
    "all_reduce 1024 fp32, 1024 bf16": (reduced(1024), reduced(1024, HALF)),
    "all_reduce sum, max": (reduced(8), reduced(8, op=MAX)),
    "broadcast 4, 5": (spread(4), spread(5)),
    "broadcast 5, 4": (spread(5), spread(4)),
    "broadcast fp32, int32": (spread(8), spread(8, WHOLE)),
    "broadcast root 0, 1": (spread(8), spread(8, root=1)),
    "all_gather 4, 5": (gathered(4), gathered(5)),
    "all_gather fp32, int32": (gathered(8), gathered(8, WHOLE)),
    "reduce_scatter 4, 6": (scattered(4), scattered(6)),
    "all_to_all 1+3, 3 expected": (exchanged([1, 3], [1, 2]), exchanged([2, 1], [2, 1])),
    "send 4, recv 5": (message(4), message(5)),
    "send 5, recv 4": (message(5), message(4)),
    "send fp32, recv int32": (message(8), message(8, WHOLE)),
    "all_reduce, broadcast": (reduced(8), spread(8)),
    "broadcast, all_reduce": (spread(8), reduced(8)),
    "all_reduce, all_gather": (reduced(8), gathered(8)),
    "all_reduce, barrier": (reduced(8), met),
    "healthy": (reduced(8), reduced(8)),
    "healthy send": (message(8), message(8)),
}


def made(n, dtype, rank):
    global mine
    mine = torch.full((n,), float(rank + 1)).to(dtype)
    return mine


def rank_main(case: str) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(8))  # everybody is connected before the case
    said = "hangs"
    begin = time.monotonic()
    try:
        work = CASES[case][rank](rank)
        if "send" in case:  # such a handle learns of its end only where one waits
            done = work.wait(timedelta(seconds=PATIENCE_S)) is not False
        else:
            while not (done := work.is_completed()) and time.monotonic() - begin < PATIENCE_S:
                time.sleep(0.02)
        if done:
            said = f"passes {mine[:6].float().tolist()}"
    except Exception as error:
        late = time.monotonic() - begin > PATIENCE_S - 0.1
        said = (
            "hangs"
            if late
            else f"raises {type(error).__name__}: {str(error).splitlines()[0][:120]}"
        )
    print(f"{case}: rank {rank} {said}", flush=True)
    time.sleep(1)  # the other side shall not see a connection that is closed
    os._exit(0)


def main() -> None:
    if len(sys.argv) == 2:
        rank_main(sys.argv[1])
    for number, case in enumerate(CASES):
        env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29600 + number),
               "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}  # fmt: skip
        words = [sys.executable, __file__, case]
        ranks = [subprocess.Popen(words, env={**env, "RANK": str(rank)}, stderr=subprocess.PIPE,
                                  text=True) for rank in range(2)]  # fmt: skip
        for number, rank in enumerate(ranks):
            rank.wait()
            if rank.returncode:
                last = (rank.stderr.read().strip().splitlines() or ["?"])[-1]
                print(f"{case}: rank {number} ends {rank.returncode}: {last[:150]}", flush=True)


if __name__ == "__main__":
    main()
