"""How long does Megatron take to make its process groups in a virtual world, and how much memory?

``initialize_model_parallel`` at TP8 PP16 CP2 EP8 for one rank in the middle of 1,024, 8,192 and
65,536 ranks; each measurement in a process of its own, the best of three (the machine's own noise
only ever adds).
"""

from __future__ import annotations

import argparse

from benchmarks.report import Row, child, finish

SIZES = {"tp": 8, "pp": 16, "cp": 2, "ep": 8}
BOUNDS = {8_192: 0.1, 65_536: 1.0}  # seconds
MEMORY = 20  # MB, at any size

CHILD = """
import gc, json, resource, sys, time
import torch
from megatron_prism.emulate import import_hooks as hooks
from megatron_prism.emulate import patch
from megatron_prism.emulate.patches import startup
from megatron_prism.runtime import virtual_world
from megatron_prism.runtime.values import Values

size = int(sys.argv[1])
rank = size * 5 // 8
world = virtual_world.VirtualWorld(size, rank, (rank,), Values(), torch.device("cpu"))
context = patch.PatchContext(None, None, meta=False, local_ranks=(rank,), rank=rank)
patch.apply(tuple(one for one in startup.PATCHES if one.name == "fast-groups"), context)
from megatron.core import parallel_state

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

gc.collect()
before, peak_before = resident(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
virtual_world.start(world)
parallel_state.initialize_model_parallel(
    tensor_model_parallel_size=8,
    pipeline_model_parallel_size=16,
    context_parallel_size=2,
    expert_model_parallel_size=8,
    expert_tensor_parallel_size=1,
    create_gloo_process_groups=True,
)
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
result = {
    "seconds": seconds,
    "megabytes": (resident() - before) / 1e6,
    "peak_megabytes": (peak - peak_before) * 1024 / 1e6,
}
print(json.dumps(result))
"""


def main() -> None:
    """Measure, print, exit 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rows = []
    for size in (1_024, 8_192, 65_536):
        runs = [child(CHILD, size) for _ in range(args.rounds)]
        seconds = min(run["seconds"] for run in runs)
        rows.append(Row(f"{size:,} ranks: time", seconds, "s", BOUNDS.get(size)))
        for key, name in (("megabytes", "memory kept"), ("peak_megabytes", "memory, peak")):
            most = min(run[key] for run in runs)
            rows.append(Row(f"{size:,} ranks: {name}", most, "MB", MEMORY))
    finish("process groups at TP8 PP16 CP2 EP8 (gloo twins included)", rows)


if __name__ == "__main__":
    main()
