"""How much host time does a paced call take, beside one to NCCL?  On one GPU.

``python -m benchmarks.speed.pacing_overhead [--json OUT]``

The same calls through ``torch.distributed``: to NCCL in a group of one, and to a virtual group of
four whose pacing ends at once.  us of host time a call, median of several runs; a job that is bound
by its host runs slower under pacing by the difference times its calls.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

CALLS, RUNS = 100, 15  # few enough for the launch queue: the host is timed, not the device


def nccl() -> Any:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29611"}
    dist.init_process_group("nccl", rank=0, world_size=1)
    return None


def paced() -> Any:
    from megatron_prism.replay.answer_times import AnswerTimes
    from megatron_prism.runtime import virtual_world
    from megatron_prism.runtime.pacing.device import Launcher, Streams
    from megatron_prism.runtime.pacing.pacer import PacedCall, Pacer
    from megatron_prism.runtime.values import Values

    device = torch.device("cuda", 0)
    world = virtual_world.start(
        virtual_world.VirtualWorld(4, 0, [0], Values(), device, backend="nccl")
    )
    group = dist.new_group(list(range(4)), group_desc="TP")
    one, none = np.zeros(1, np.int32), np.zeros(0, np.int32)
    ends = np.zeros(2, np.int64)
    table = AnswerTimes((0,), one, one, one, ends[:1], 0, ends, none, none, none)

    class Always(Pacer):
        def _expected(self, group: Any, op: str) -> PacedCall:
            return PacedCall(op, "TP", 0, 4)

    launcher = Launcher(table, [[0]], device)
    pacer = Always([], launcher, Streams(launcher.driver, device))
    world.listen(pacer)
    pacer.begin()
    return group


def measure(group: Any) -> dict[str, float]:
    part, whole = torch.ones(64, device="cuda"), torch.ones(256, device="cuda")
    whole = whole if group is not None else whole[:64]

    def call(asynchronous: bool, scatter: bool = False) -> Callable[[], None]:
        def run() -> None:
            if scatter:
                work = dist.reduce_scatter_tensor(part, whole, group=group, async_op=asynchronous)
            else:
                work = dist.all_gather_into_tensor(whole, part, group=group, async_op=asynchronous)
            if work is not None:
                work.wait()

        return run

    found = {}
    for name, one in (
        ("all_reduce", lambda: dist.all_reduce(part, op=dist.ReduceOp.AVG, group=group)),
        ("all_gather", call(False)),
        ("all_gather, asynchronous", call(True)),
        ("reduce_scatter", call(False, scatter=True)),
        ("reduce_scatter, asynchronous", call(True, scatter=True)),
    ):
        times = []
        for _ in range(RUNS + 1):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS):
                one()
            times.append((time.perf_counter() - begin) / CALLS * 1e6)
        found[name] = round(statistics.median(times[1:]), 1)
    torch.cuda.synchronize()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=("nccl", "paced"))
    args = parser.parse_args()
    if args.one:
        torch.cuda.set_device(0)
        print(json.dumps(measure({"nccl": nccl, "paced": paced}[args.one]())), flush=True)
        os._exit(0)
    rows: dict[str, dict[str, float]] = {}
    for name in ("nccl", "paced"):
        words = [sys.executable, __file__, "--one", name]
        done = subprocess.run(words, stdout=subprocess.PIPE, check=True)
        rows[name] = json.loads(done.stdout.splitlines()[-1])
    print(
        f"{'us of host time a call':28} {'NCCL':>8} {'paced':>8}   {torch.cuda.get_device_name()}"
    )
    for call, us in rows["nccl"].items():
        print(f"{call:28} {us:8.1f} {rows['paced'][call]:8.1f}")
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
