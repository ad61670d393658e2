"""What do gloo and NCCL do with two calls that should be one and differ?

``python -m benchmarks.tools.mismatch gloo`` (no GPU, two minutes) or ``nccl`` (2 GPUs, four
minutes) starts two processes for every case and prints, for each rank, whether its call passes (and
with which values), hangs for some seconds, or raises, and what.  What torch 2.13 and 2 x H200 gave
is in ``runtime/call_check.py`` and ``tests/hang/test_real_ranks.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

FLOAT, WHOLE, HALF = torch.float32, torch.int32, torch.bfloat16
SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
PATIENCE_S = 6
Call = Callable[[int], Any]  # rank -> (work, the tensor whose values are shown)


def made(n: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return torch.full((n,), float(rank + 1), device=device).to(dtype)


def reduced(n: int, dtype: torch.dtype = FLOAT, op: Any = SUM) -> Call:
    return lambda rank: (dist.all_reduce(x := made(n, dtype, rank), op=op, async_op=True), x)


def spread(n: int, dtype: torch.dtype = FLOAT, root: int = 0) -> Call:
    return lambda rank: (dist.broadcast(x := made(n, dtype, rank), root, async_op=True), x)


def gathered(n: int, dtype: torch.dtype = FLOAT) -> Call:
    def call(rank: int) -> Any:
        both = made(2 * n, dtype, -1)
        return dist.all_gather_into_tensor(both, made(n, dtype, rank), async_op=True), both

    return call


def scattered(n: int) -> Call:
    def call(rank: int) -> Any:
        mine = made(n, FLOAT, -1)
        return dist.reduce_scatter_tensor(mine, made(2 * n, FLOAT, rank), async_op=True), mine

    return call


def exchanged(to: list[int], back: list[int]) -> Call:
    def call(rank: int) -> Any:
        mine, sent = made(sum(back), FLOAT, -1), made(sum(to), FLOAT, rank)
        return dist.all_to_all_single(mine, sent, back, to, async_op=True), mine

    return call


def message(n: int, dtype: torch.dtype = FLOAT) -> Call:
    def call(rank: int) -> Any:
        mine = made(n, dtype, rank)
        return (dist.irecv(mine, 0) if rank else dist.isend(mine, 1)), mine

    return call


SIZES = {  # elements and dtype of rank 0, of rank 1
    "4, 5 floats": ((4, FLOAT), (5, FLOAT)),
    "5, 4 floats": ((5, FLOAT), (4, FLOAT)),
    "5, 6 floats": ((5, FLOAT), (6, FLOAT)),
    "4, 4,194,304 floats": ((4, FLOAT), (1 << 22, FLOAT)),
    "1,024 fp32, 1,024 int32": ((1024, FLOAT), (1024, WHOLE)),
    "1,024 fp32, 1,024 bf16": ((1024, FLOAT), (1024, HALF)),
    "1,024 fp32, 2,048 bf16": ((1024, FLOAT), (2048, HALF)),
    "healthy": ((8, FLOAT), (8, FLOAT)),
}
SIZED = {"all_reduce": reduced, "send": message, "all_gather": gathered, "broadcast": spread}
CASES: dict[str, tuple[Call, Call]] = {  # what rank 0 calls, what rank 1 calls
    **{f"{name} {what}": (call(*mine), call(*theirs))
       for name, call in SIZED.items() for what, (mine, theirs) in SIZES.items()},
    "all_reduce sum, max": (reduced(8), reduced(8, op=MAX)),
    "broadcast root 0, 1": (spread(8), spread(8, root=1)),
    "reduce_scatter 4, 6": (scattered(4), scattered(6)),
    "all_to_all 1+3, 3 expected": (exchanged([1, 3], [1, 2]), exchanged([2, 1], [2, 1])),
    "all_reduce, broadcast": (reduced(8), spread(8)),
    "broadcast, all_reduce": (spread(8), reduced(8)),
    "all_reduce, all_gather": (reduced(8), gathered(8)),
}  # fmt: skip


def rank_main(backend: str, case: str) -> None:
    rank = int(os.environ["RANK"])
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend)
    dist.all_reduce(made(8, FLOAT, rank))  # everybody is connected before the case
    said, begin = "hangs", time.monotonic()
    try:
        work, mine = CASES[case][rank](rank)
        if backend == "gloo" and "send" in case:  # it learns of its end only where one waits
            done = work.wait(timedelta(seconds=PATIENCE_S)) is not False
        else:
            while not (done := work.is_completed()) and time.monotonic() - begin < PATIENCE_S:
                time.sleep(0.02)
        if done:
            said = f"passes {mine[:6].float().tolist()}"
    except Exception as error:
        if time.monotonic() - begin < PATIENCE_S - 0.1:
            said = f"raises {type(error).__name__}: {str(error).splitlines()[0][:120]}"
    print(f"{case}: rank {rank} {said}", flush=True)
    time.sleep(1)  # the other side shall not see a connection that is closed
    os._exit(0)  # a call that hangs would hold the destructors


def main() -> None:
    backend, *case = sys.argv[1:]
    if case:
        rank_main(backend, case[0])
    for number, name in enumerate(CASES):
        env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29600 + number),
               "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}  # fmt: skip
        words = [sys.executable, __file__, backend, name]
        ranks = [subprocess.Popen(words, env={**env, "RANK": str(rank)}, stderr=subprocess.PIPE,
                                  text=True) for rank in range(2)]  # fmt: skip
        for rank, process in enumerate(ranks):
            _, errors = process.communicate()
            if process.returncode:
                last = (errors.strip().splitlines() or ["?"])[-1]
                print(f"{name}: rank {rank} ends {process.returncode}: {last[:150]}", flush=True)


if __name__ == "__main__":
    main()
