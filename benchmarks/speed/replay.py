"""How long does it take to replay a world, and how fast is the event engine?

``python -m benchmarks.speed.replay [--keep DIR]``

Captures the two 8,192-rank jobs of ``world_graph.py`` (``--keep``: or takes what is there) and
replays two iterations of them, in a fresh process each, on one core: as they are, with one rank
that computes twice as slowly, and the dense one in a world of 1,048,576 ranks.  numba compiles in
a process before that, as it does once after an installation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.report import ROOT, Row, finish
from benchmarks.speed.world_graph import captured

MANY = 1 << 20
RUNS = 3  # the best of them counts: what slows a run down is others
CODE = """
import dataclasses, json, resource, sys, time
import numpy as np
import megatron_prism as prism
from megatron_prism.replay import network
what, size = sys.argv[2], int(sys.argv[3])
made = prism.load(sys.argv[1])
if size != made.world.size:
    world = dataclasses.replace(made.world, size=size)
    made = dataclasses.replace(made, world=world, program_of=world._along("pp", np.arange(size)))
start = time.perf_counter()
slow = {size // 2 + 149: 2} if what == "slow" else {}
priced = prism.price(made, machine="h200", what_if=prism.WhatIf(slow=slow))
replayed = priced.timeline
seconds = time.perf_counter() - start
rates = []
joined, durations = replayed.dag, replayed.durations
world_graph, h200 = priced.graph, priced.machine
ops = 2 * sum(map(len, world_graph.program_list))
network.simulate_network(joined, durations)  # importing numba takes 0.3 s, once
for shared in (None, network.ports(world_graph, h200.gpus_per_node)):
    start = time.perf_counter()
    outcome = network.simulate_network(joined, durations, shared)
    rates.append(ops / (time.perf_counter() - start) / 1e6)
    equal = shared is not None or np.array_equal(outcome.end, replayed.node_end)
    assert equal and not outcome.hangs
rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
print(json.dumps([seconds, *rates, rss, len(world_graph.classes), ops]))
"""


def measure(file: Path, what: str, size: int) -> list[float]:
    """[s after loading, M ops/s, M ops/s with shared links, GB, classes, ops]: the best runs."""
    words = [sys.executable, "-c", CODE, str(file), what, str(size)]
    one = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    runs = []
    for _ in range(RUNS):
        done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT, env=one)
        runs.append(json.loads(done.stdout))
    seconds, alone, shared, *rest = zip(*runs, strict=True)
    return [min(seconds), max(alone), max(shared), *(column[0] for column in rest)]


def main() -> None:
    rows = []
    with captured(__doc__.partition("\n")[0]) as files:
        measure(files["dense"], "slow", 8192)  # large enough for every loop to be compiled
        for name, file in files.items():
            seconds, alone, shared, _, classes, ops = measure(file, "", 8192)
            what = f"{name}, 8,192 ranks in {int(classes)} classes"
            rows += [
                Row(f"{what}: graph, prices and two iterations", seconds, "s", 1),
                Row(f"{name}: event engine, {int(ops):,} ops", alone, "M ops/s", 1, at_least=True),
                Row(f"{name}: with shared links", shared, "M ops/s", 1, at_least=True),
            ]
            seconds, alone, _, memory, classes, ops = measure(file, "slow", 8192)
            what = f"{name}, one slow rank, {int(classes)} classes"
            rows += [
                Row(f"{what}: partition, graph, prices, replay", seconds, "s", 3),
                Row(f"{what}: event engine, {int(ops):,} ops", alone, "M ops/s", 1, at_least=True),
                Row(f"{what}: memory", memory, "GB", 2),
            ]
        seconds, _, _, memory, classes, _ = measure(files["dense"], "", MANY)
        what = f"dense, {MANY:,} ranks in {int(classes)} classes"
        rows += [Row(f"{what}: graph, prices and replay", seconds, "s", 10),
                 Row(f"{what}: memory", memory, "GB", 2)]  # fmt: skip
    finish("Replay", rows)


if __name__ == "__main__":
    main()
