"""How long do draws of a large world take?

``python -m benchmarks.speed.tails [--keep DIR]``

Captures the dense 8,192-rank job of ``world_graph.py`` (``--keep``: or takes what is there) and, in
a fresh process each, predicts it under the public spreads, the one-at-a-time changes included:
1,000 of 65,536 ranks, 10,000 of 8,192.  numba compiles in a process before that.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report import ROOT, Row, finish
from benchmarks.speed.world_graph import JOBS, capture

CODE = """
import dataclasses, json, resource, sys, time
import numpy as np
import megatron_prism as prism
made, size, count = prism.load(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
if size != made.world.size:
    world = dataclasses.replace(made.world, size=size)
    made = dataclasses.replace(made, world=world, program_of=world._along("pp", np.arange(size)))
start = time.perf_counter()
found = prism.predict(made, machine="h200", variability="public", samples=count)
seconds = time.perf_counter() - start
rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
print(json.dumps([seconds, rss, found.samples, found.replicas]))
"""


def measure(file: Path, size: int, count: int) -> list[float]:
    """[s, GB, iterations, replicas]."""
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
            seconds, memory, drawn, replicas = measure(file, size, count)
            what = f"{size:,} ranks, {drawn:,} iterations of {replicas:,} replicas"
            rows += [
                Row(f"{what}: prism.predict", seconds, "s", 60),
                Row(f"{size:,} ranks: memory", memory, "GB", 4),
            ]
    finish("Tails", rows)


if __name__ == "__main__":
    main()
