"""How long does the world graph take, and how does it grow with the world?

``python -m benchmarks.speed.world_graph [--keep DIR]``

Captures the slices of two 8,192-rank jobs (TP8 PP16 CP2; dense and MoE with EP8) on the meta tier,
then, in a fresh process each, loads them and builds and checks the graph.  For the growth curve the
dense programs run in worlds of 256 … 1,048,576 ranks (only data parallelism grows: the programs are
those of 8,192 ranks, and so are the sizes of their data-parallel calls).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report import ROOT, Row, finish

COMMON = "parallel.world_size=8192 parallel.tp=8 parallel.pp=16 parallel.cp=2 parallel.vpp=null"
JOBS = {
    "dense": f"llama3-8b_64gpu_tp4cp2_h200 {COMMON} train.global_batch_size=1024",
    "MoE EP8": f"mixtral-8x7b_256gpu_pp4vp8ep8_h200 {COMMON} parallel.ep=8 parallel.etp=8"
    " parallel.sequence_parallel=true train.global_batch_size=1024",
}
WORLDS = tuple(1 << n for n in range(8, 21, 2))
CODE = """
import dataclasses, json, resource, sys, time
start = time.perf_counter()
from megatron_prism.core import programs
from megatron_prism.graph import world_graph as graph
imported = time.perf_counter() - start
assert "torch" not in sys.modules
start = time.perf_counter()
made = programs.load(sys.argv[1])
loaded = time.perf_counter() - start
size = int(sys.argv[2])
if size != made.world.size:
    import numpy as np
    world = dataclasses.replace(made.world, size=size)
    stage = world._along("pp", np.arange(size))
    made = dataclasses.replace(made, world=world, program_of=stage)
start = time.perf_counter()
world_graph = graph.build(made)
found = world_graph.check()
world_graph.matched_calls
built = time.perf_counter() - start
rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
print(json.dumps([imported, loaded, built, rss, len(found), len(world_graph.classes),
                  world_graph.num_ops()]))
"""


def measure(file: Path, size: int) -> list[float]:
    """[import s, load s, build s, GB, findings, classes, ops], in a process of its own."""
    words = [sys.executable, "-c", CODE, str(file), str(size)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout)


def capture(job: str, folder: Path) -> Path:
    """The world of ``job``; slices that are there are kept."""
    words = [sys.executable, "-m", "megatron_prism", "capture", *job.split(), "-o", str(folder)]
    subprocess.run(words, check=True, cwd=ROOT, stdout=sys.stderr)
    return folder / "world.prism"


@contextlib.contextmanager
def captured(title: str) -> Iterator[dict[str, Path]]:
    """The worlds of JOBS by name; ``--keep DIR`` on the command line keeps their slices."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--keep", type=Path, help="keep the slices in this folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        base = args.keep or Path(temporary)
        yield {name: capture(job, base / name.split()[0]) for name, job in JOBS.items()}


def curve(points: list[tuple[int, float]]) -> str:
    """Seconds over ranks, a bar per world."""
    longest = max(seconds for _, seconds in points)
    return "\n".join(
        f"  {size:>9,} ranks {seconds:7.3f} s  {'#' * max(1, round(50 * seconds / longest))}"
        for size, seconds in points
    )


def main() -> None:
    rows = []
    with captured(__doc__.partition("\n")[0]) as files:
        for name, file in files.items():
            importing, loading, building, memory, found, classes, ops = measure(file, 8192)
            what = f"{name}, 8,192 ranks in {int(classes)} classes, {ops:,} ops"
            rows += [
                Row(f"{what}: build, check and join", building, "s", 2),
                Row(f"{name}: memory of the process", memory, "GB", 1),
                Row(f"{name}: loading the saved graph", loading, "s", 0.5),
                Row(f"{name}: mismatches", found, "", 0),
                Row(f"{name}: import without torch", importing, "s", 0.3),
            ]
        points = []
        for size in WORLDS:
            _, _, building, memory, found, _, _ = measure(files["dense"], size)
            points.append((size, building))
        rows.append(Row("1,048,576 ranks: build, check and join", building, "s", 10))
        rows.append(Row("1,048,576 ranks: memory", memory, "GB", 2))
    print("growth with data parallelism (dense):\n" + curve(points))
    finish("The world graph", rows)


if __name__ == "__main__":
    main()
