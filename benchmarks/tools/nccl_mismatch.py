"""What does NCCL do with two calls that should be one and differ?  On 2 GPUs.

``python -m benchmarks.tools.nccl_mismatch`` starts two processes for every case and prints, for
each rank, whether its call passes (and with which values), hangs for 6 s, or raises.  What it gave
on 2 x H200 is in ``call_check.nccl_lets_through`` and ``tests/hang/test_real_ranks.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import torch
from torch import distributed as dist

FLOAT = torch.float32
CASES = {  # elements and dtype of rank 0, of rank 1
    "4 floats, 5 floats": (4, FLOAT, 5, FLOAT),
    "5 floats, 6 floats": (5, FLOAT, 6, FLOAT),
    "4 floats, 4,194,304 floats": (4, FLOAT, 1 << 22, FLOAT),
    "1,024 fp32, 1,024 int32": (1024, FLOAT, 1024, torch.int32),
    "1,024 fp32, 2,048 bf16": (1024, FLOAT, 2048, torch.bfloat16),
}
OPS = ("all_reduce", "send", "all_gather")
PATIENCE_S = 6


def rank_main(case: str, op: str) -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    dist.all_reduce(torch.ones(8, device="cuda"))  # the communicator is there before the case
    torch.cuda.synchronize()
    count, dtype = CASES[case][2 * rank : 2 * rank + 2]
    mine = torch.full((count,), float(rank + 1), device="cuda").to(dtype)
    both = torch.zeros(2 * count, dtype=dtype, device="cuda")
    if op == "all_reduce":
        dist.all_reduce(mine)
    elif op == "all_gather":
        dist.all_gather_into_tensor(both, mine)
    elif rank == 0:
        dist.send(mine, 1)
    else:
        dist.recv(mine, 0)
    end, begin = torch.cuda.Event(), time.monotonic()
    end.record()
    while not end.query() and time.monotonic() - begin < PATIENCE_S:
        time.sleep(0.05)
    said = "hangs"
    if end.query():
        said = f"passes {(both if op == 'all_gather' else mine)[:8].float().tolist()}"
    print(f"{op}: {case}: rank {rank} {said}", flush=True)
    os._exit(0)  # a call that hangs would hold the destructors


def main() -> None:
    if len(sys.argv) == 3:
        rank_main(sys.argv[1], sys.argv[2])
    for case in CASES:
        for op in OPS:
            words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
            words += ["--master-port", "29777", __file__, case, op]
            subprocess.run(words, check=False, timeout=60, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
