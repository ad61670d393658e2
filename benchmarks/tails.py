"""How long do draws of a large world take?

``python benchmarks/tails.py [--keep DIR]``

Captures the dense 8,192-rank job of ``world_graph.py`` (``--keep``: or takes what is there) and, in
a fresh process each, builds the graph, prices it and draws iterations under the public spreads:
1,000 of 65,536 ranks, 10,000 of 8,192.  numba compiles in a process before that.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from report import ROOT, Row, finish
from world_graph import JOBS, capture

CODE = """
import dataclasses, json, resource, sys, time
import numpy as np
from megatron_prism import costs, graph, programs, stochastic
from megatron_prism.costs.machine import machine
from megatron_prism.costs.variability import variability
from megatron_prism.stochastic.bounds import bounds
made, size, count = programs.load(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
if size != made.world.size:
    world = dataclasses.replace(made.world, size=size)
    made = dataclasses.replace(made, world=world, program_of=world._along("pp", np.arange(size)))
start = time.perf_counter()
world_graph = graph.build(made)
sampler = stochastic.Sampler(world_graph, costs.price(world_graph, machine("h200")))
drawn = sampler.draw(variability("public"), count)
seconds = time.perf_counter() - start
start = time.perf_counter()
bounds(sampler, variability("public"), 0.95)
bounding = time.perf_counter() - start
rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
print(json.dumps([seconds, rss, bounding, *drawn.shape]))
"""


def measure(file: Path, size: int, count: int) -> list[float]:
    """[s, GB, s for the bounds, iterations, replicas]."""
    words = [sys.executable, "-c", CODE, str(file), str(size), str(count)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", type=Path, help="keep the slices in this folder")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        file = capture(JOBS["dense"], (args.keep or Path(temporary)) / "dense")
        measure(file, 8192, 100)
        for size, count in ((65_536, 1_000), (8_192, 10_000)):
            seconds, memory, bounding, drawn, replicas = measure(file, size, count)
            what = f"{size:,} ranks, {drawn:,} iterations of {replicas:,} replicas"
            rows += [
                Row(f"{what}: graph, prices, draws", seconds, "s", 60),
                Row(f"{size:,} ranks: memory", memory, "GB", 4),
                Row(f"{size:,} ranks: analytic bounds of one quantile", bounding, "s"),
            ]
    finish("Tails", rows)


if __name__ == "__main__":
    main()
