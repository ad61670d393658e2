"""One rank of a real job of which one is slow: there every microbatch takes FACTOR times as long.

``torchrun --nproc-per-node 4 benchmarks/accuracy/slow_rank.py RANK FACTOR pretrain_gpt.py
<arguments>``: on RANK a kernel behind every forward and every backward step spins for FACTOR - 1
times as long as that step took on the device.  Where a step waits for others inside (tensor or
expert parallel) that would count as its own time, so take a job without.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_SOURCE = r"""
static __device__ long long now() {
  long long t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t;
}
extern "C" __global__ void stamp(long long* at) { *at = now(); }
extern "C" __global__ void spin(long long* at, double more) {
  long long until = now();
  until += (long long)((until - *at) * more);
  while (now() < until) __nanosleep(100);
}
"""


def install(factor: float) -> None:
    """Slow this process's microbatches down."""
    from megatron.core.pipeline_parallel import schedules

    kernels: dict[str, Any] = {}

    def slowed(step: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*args: Any, **kwargs: Any) -> Any:
            if not kernels:
                kernels["at"] = torch.zeros(1, dtype=torch.int64, device="cuda")
                for name in ("stamp", "spin"):
                    kernels[name] = torch.cuda._compile_kernel(_SOURCE, name)
            at = kernels["at"]
            kernels["stamp"](args=[at])
            found = step(*args, **kwargs)
            kernels["spin"](args=[at, factor - 1])
            return found

        return slow

    for name in ("forward_step", "backward_step"):
        setattr(schedules, name, slowed(getattr(schedules, name)))


if __name__ == "__main__":
    rank, factor = int(sys.argv[1]), float(sys.argv[2])
    sys.argv = sys.argv[3:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    if int(os.environ["RANK"]) == rank:
        install(factor)
    runpy.run_path(sys.argv[0], run_name="__main__")
