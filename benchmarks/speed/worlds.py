"""How long do the graph, a replay and draws of a large world take, and how much memory?

``python -m benchmarks.speed.worlds graph|replay|tails [--keep DIR]``

Captures the slices of two 8,192-rank jobs (TP8 PP16 CP2; dense and MoE with EP8) on the meta tier
(``--keep``: or takes what is there) and measures in a fresh process each.  In larger worlds only
data parallelism grows: programs are those of 8,192 ranks, and so are the sizes of their
data-parallel calls.  numba compiles in a process before that, as it does once after an
installation.

graph  : loads, builds and checks the graph, and of the dense job in worlds of 256 to 1,048,576
replay : replays two iterations on one core: as they are, with one rank that computes twice as
         slowly, and the dense job in a world of 1,048,576 ranks; and the event engine alone
tails  : predicts the dense job under the public spreads, the one-at-a-time changes included: 1,000
         iterations of 65,536 ranks, 10,000 of 8,192
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import ROOT, Row, child, finish

COMMON = "world_size=8192 tp=8 pp=16 cp=2 vpp=null"
JOBS = {
    "dense": f"llama3-8b_64gpu_tp4cp2_h200 {COMMON} global_batch_size=1024",
    "MoE": f"mixtral-8x7b_256gpu_pp4vp8ep8_h200 {COMMON} ep=8 etp=8"
    " sequence_parallel=true global_batch_size=1024",
}
MANY = 1 << 20
LARGER = """
from benchmarks.speed.worlds import larger
made = larger(prism.load(sys.argv[1]), int(sys.argv[2]))
start = time.perf_counter()
"""
MEMORY = "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9"
GRAPH = f"""
import json, resource, sys, time
start = time.perf_counter()
from megatron_prism.core.programs import program as prism
from megatron_prism.graph import world_graph as graph
imported = time.perf_counter() - start
assert "torch" not in sys.modules
start = time.perf_counter()
prism.load(sys.argv[1])
loaded = time.perf_counter() - start
{LARGER}
world_graph = graph.build(made)
found = world_graph.check()
world_graph.matched_calls
built = time.perf_counter() - start
print(json.dumps([imported, loaded, built, {MEMORY}, len(found), len(world_graph.classes),
                  world_graph.num_ops()]))
"""
REPLAY = f"""
import json, resource, sys, time
import numpy as np
import megatron_prism as prism
from megatron_prism.replay import network
{LARGER}
slow = {{made.world.size // 2 + 149: 2}} if sys.argv[3] == "slow" else {{}}
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
    _, end = network.simulate_network(joined, durations, shared)
    rates.append(ops / (time.perf_counter() - start) / 1e6)
    equal = shared is not None or np.array_equal(end, replayed.node_end)
    assert equal and end.min() >= 0
print(json.dumps([seconds, *rates, {MEMORY}, len(world_graph.classes), ops]))
"""
TAILS = f"""
import json, resource, sys, time
import megatron_prism as prism
{LARGER}
found = prism.predict(made, machine="h200", variability="public", samples=int(sys.argv[3]))
print(json.dumps([time.perf_counter() - start, {MEMORY}, found.samples, found.replicas]))
"""


def capture(job: str, folder: Path) -> Path:
    """The world of ``job``; slices that are there are kept."""
    words = [sys.executable, "-m", "megatron_prism", "capture", *job.split(), "-o", str(folder)]
    subprocess.run(words, check=True, cwd=ROOT, stdout=sys.stderr)
    return folder / "world.prism"


def larger(made: Any, size: int) -> Any:
    """The same programs in a world of ``size`` ranks: sizes of calls as captured."""
    world = dataclasses.replace(made.world, size=size)
    return dataclasses.replace(made, world=world, program_of=world._along("pp", np.arange(size)))


def graph(files: dict[str, Path]) -> list[Row]:
    rows = []
    for name, file in files.items():
        importing, loading, building, memory, found, classes, ops = child(GRAPH, file, 8192)
        rows += [
            Row(f"{name}, 8,192 ranks in {classes} classes, {ops:,} ops: build, check and join",
                building, "s", 2),
            Row(f"{name}: memory of the process", memory, "GB", 1),
            Row(f"{name}: loading the saved graph", loading, "s", 0.5),
            Row(f"{name}: mismatches", found, "", 0),
            Row(f"{name}: import without torch", importing, "s", 0.3),
        ]  # fmt: skip
    for size in (1 << n for n in range(8, 21, 2)):
        _, _, building, memory, *_ = child(GRAPH, files["dense"], size)
        rows.append(Row(f"dense, {size:,} ranks: build", building, "s", 10))
    return [*rows, Row(f"{MANY:,} ranks: memory", memory, "GB", 2)]


def best(file: Path, size: int, slow: str = "") -> list[float]:
    """[s after loading, M ops/s, M ops/s with shared links, GB, classes, ops]: the best of three
    runs, since what slows a run down is others."""
    one = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    runs = [child(REPLAY, file, size, slow, env=one) for _ in range(3)]
    seconds, alone, shared, *rest = zip(*runs, strict=True)
    return [min(seconds), max(alone), max(shared), *(column[0] for column in rest)]


def replay(files: dict[str, Path]) -> list[Row]:
    best(files["dense"], 8192, "slow")  # large enough for every loop to be compiled
    rows = []
    for name, file in files.items():
        seconds, alone, shared, _, classes, ops = best(file, 8192)
        what = f"{name}, 8,192 ranks in {classes} classes"
        rows += [
            Row(f"{what}: graph, prices and two iterations", seconds, "s", 1),
            Row(f"{name}: event engine, {ops:,} ops", alone, "M ops/s", 1, at_least=True),
            Row(f"{name}: with shared links", shared, "M ops/s", 1, at_least=True),
        ]
        seconds, alone, _, memory, classes, ops = best(file, 8192, "slow")
        what = f"{name}, one slow rank, {classes} classes"
        rows += [
            Row(f"{what}: partition, graph, prices, replay", seconds, "s", 3),
            Row(f"{what}: event engine, {ops:,} ops", alone, "M ops/s", 1, at_least=True),
            Row(f"{what}: memory", memory, "GB", 2),
        ]
    seconds, _, _, memory, classes, _ = best(files["dense"], MANY)
    what = f"dense, {MANY:,} ranks in {classes} classes"
    return [*rows, Row(f"{what}: graph, prices and replay", seconds, "s", 10),
            Row(f"{what}: memory", memory, "GB", 2)]  # fmt: skip


def tails(files: dict[str, Path]) -> list[Row]:
    child(TAILS, files["dense"], 8192, 100)
    rows = []
    for size, count in ((65_536, 1_000), (8_192, 10_000)):
        seconds, memory, drawn, replicas = child(TAILS, files["dense"], size, count)
        what = f"{size:,} ranks, {drawn:,} iterations of {replicas:,} replicas"
        rows += [Row(f"{what}: prism.predict", seconds, "s", 60),
                 Row(f"{size:,} ranks: memory", memory, "GB", 4)]  # fmt: skip
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    what = {one.__name__: one for one in (graph, replay, tails)}
    parser.add_argument("what", choices=list(what))
    parser.add_argument("--keep", type=Path, help="keep the slices in this folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        base = args.keep or Path(temporary)
        names = ["dense"] if args.what == "tails" else list(JOBS)
        rows = what[args.what]({name: capture(JOBS[name], base / name) for name in names})
    finish(args.what, rows)
