"""How many thread blocks does NCCL run for a call?  From the profiler, on 4 GPUs.

``torchrun --nproc-per-node 4 benchmarks/tools/nccl_blocks.py OUT.json`` (half a minute).  Per call,
ranks and bytes: the kernel, its blocks, threads a block and shared memory.  ``nccl_blocks`` of
``emulate/pace.py`` fits what this gave on 4 x H200
(``benchmarks/results/h200_x4_nccl_blocks.json``).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.profiler import ProfilerActivity, profile

SIZES = tuple(1 << n for n in (12, 16, 20, 22, 24, 26, 28))  # bytes


def blocks(call: Callable[[], None]) -> list[Any]:
    """[kernel, blocks, threads, shared bytes] of the last NCCL kernel of ``call``."""
    call()
    torch.cuda.synchronize()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        call()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiled.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    found = [e for e in events if e.get("cat") == "kernel" and "nccl" in e["name"].lower()]
    if not found:
        return []
    last = found[-1]["args"]
    return [found[-1]["name"][:60], last["grid"][0], last["block"][0], last["shared memory"]]


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    size = dist.get_world_size()
    pairs = [dist.new_group([n, n + 1]) for n in range(0, size, 2)]
    found: dict[str, list[Any]] = {}

    def messages(*both: dist.P2POp) -> None:
        for work in dist.batch_isend_irecv(list(both)):
            work.wait()

    for num_bytes in SIZES:
        whole, other = (
            torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device="cuda") for _ in range(2)
        )
        for group, ranks in ((None, size), (pairs[rank // 2], 2)):
            part = torch.zeros(num_bytes // 2 // ranks, dtype=torch.bfloat16, device="cuda")
            calls: dict[str, Callable[[], Any]] = {
                "all_reduce": lambda g=group, w=whole: dist.all_reduce(w, group=g),
                "all_gather": lambda g=group, w=whole, p=part: dist.all_gather_into_tensor(
                    w, p, group=g
                ),
                "reduce_scatter": lambda g=group, w=whole, p=part: dist.reduce_scatter_tensor(
                    p, w, group=g
                ),
            }
            for name, call in calls.items():
                found[f"{name}/{ranks}/{num_bytes}"] = blocks(call)
        send = dist.P2POp(dist.isend, whole, rank ^ 1)
        recv = dist.P2POp(dist.irecv, other, rank ^ 1)
        one = send if rank % 2 == 0 else recv
        found[f"all_to_all/{size}/{num_bytes}"] = blocks(
            lambda o=other, w=whole: dist.all_to_all_single(o, w)
        )
        found[f"exchange/2/{num_bytes}"] = blocks(lambda s=send, r=recv: messages(s, r))
        found[f"send/2/{num_bytes}"] = blocks(lambda o=one: messages(o))
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
