"""How much Python does a virtual collective cost?

Microseconds of one ``torch.distributed`` call on a group of 64 with one local member, as Megatron
issues it: on meta tensors (nothing is moved) and on 64 fp32 elements.  Median of several rounds;
torch's own checks and logging around the call are included, so nothing is left out.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import distributed as dist

from benchmarks.report import Row, finish
from megatron_prism.runtime import virtual_world
from megatron_prism.runtime.values import Values

RANKS, ELEMENTS, ROUNDS, CALLS = 64, 64, 15, 400
BOUNDS = {"meta": 10.0, "cpu": 30.0}  # us


def calls(device: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every collective that Megatron's training step issues."""
    one = torch.ones(ELEMENTS, device=device)
    all_of_them = torch.ones(RANKS * ELEMENTS, device=device)
    spread = torch.ones(RANKS * (ELEMENTS // RANKS), device=device)
    yield "all_reduce", lambda: dist.all_reduce(one, op=dist.ReduceOp.MAX)
    yield "all_reduce, sum", lambda: dist.all_reduce(one)
    yield "all_gather_into_tensor", lambda: dist.all_gather_into_tensor(all_of_them, one)
    yield "reduce_scatter_tensor", lambda: dist.reduce_scatter_tensor(one, all_of_them)
    yield "all_to_all_single", lambda: dist.all_to_all_single(one, spread)
    yield "broadcast", lambda: dist.broadcast(one, 0)
    yield "isend", lambda: dist.isend(one, 1).wait()
    yield "irecv", lambda: dist.irecv(one, 1).wait()
    yield "barrier", lambda: dist.barrier()


def microseconds(call: Callable[[], object]) -> float:
    """Median over the rounds of the mean of a round."""
    for _ in range(20):
        call()
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(rounds)


def main() -> None:
    """Measure, print, exit 1 if a bound is missed."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for device, bound in BOUNDS.items():
        moved = "nothing moved (meta)" if device == "meta" else f"{ELEMENTS} elements moved"
        virtual_world.start(
            virtual_world.VirtualWorld(RANKS, 3, (3,), Values(), torch.device(device))
        )
        for name, call in calls(device):
            rows.append(Row(f"{name}, {moved}", microseconds(call), "us", bound))
        virtual_world.stop()
    finish("Python per virtual collective", rows)


if __name__ == "__main__":
    main()
