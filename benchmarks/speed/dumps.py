"""How long does the verdict on a large job's dumps take, and how much memory?

``python -m benchmarks.speed.dumps [--keep DIR] [--ranks N] [--frames 12]``

Makes two dump sets of 1,024 ranks (TP8 PP8 DP16) in torch 2.13's format, 430 MB each: 2,000
calls a rank, the history of pipelined iterations with stacks and clocks.  They are synthetic.
With ``--frames 12`` every call has a stack of its own, as torch writes it: 1.8 GB each.
In one, rank 37 never comes to the last call of the world; in the other ranks 37 and 44 make their
last two calls the other way round, so that two tensor-parallel groups and the data-parallel groups
between them wait for each other: the verdict that has to look at most.  Each is judged in
a fresh process, by ``prism hang --dumps`` and by one process; the verdicts must be equal.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.process_tree import Measured, measure
from benchmarks.report import ROOT, Row, finish
from megatron_prism.core.world import World

ENTRIES, BEGIN_NS = 2000, 1_763_000_000_000_000_000
CULPRITS = {"host stuck": [37], "order": [37, 44]}
MICROBATCHES, LAYERS, ITERATIONS = 12, 3, 13
GROUPS = {"tp": "TENSOR_MODEL_PARALLEL_GROUP", "dp": "DATA_PARALLEL_GROUP_WITH_CP",
          "pp": "PIPELINE_MODEL_PARALLEL_GROUP", "world": "default_pg"}  # fmt: skip
SITES = [("forward", "core/tensor_parallel/layers.py", 512),
         ("forward", "core/tensor_parallel/mappings.py", 231),
         ("forward", "core/transformer/transformer_layer.py", 434),
         ("forward_step", "core/pipeline_parallel/schedules.py", 402)]  # fmt: skip
FRAMES = [[{"name": n, "filename": f"/opt/megatron/megatron/{f}", "line": line + 7 * i}
           for n, f, line in SITES] for i in range(8)]  # fmt: skip
Call = tuple[str, str, int, int, int]  # group, recorder's word, elements in and out, site


def iteration(stage: int, last: int) -> list[Call]:
    """The calls of a rank of ``stage``: messages, tensor-parallel pairs, gradients, the norm."""
    calls: list[Call] = []
    for way in (1, -1):
        before, after = stage - way, stage + way
        for _ in range(MICROBATCHES):
            if 0 <= before <= last:
                calls.append(("pp", f"recv {stage}<-{before}", 1 << 23, 1 << 23, 0))
            for layer in range(LAYERS):
                calls.append(("tp", "_all_gather_base", 1 << 20, 1 << 23, 1 + 2 * (way < 0)))
                calls.append(("tp", "_reduce_scatter_base", 1 << 23, 1 << 20, 2 + 2 * (layer > 0)))
            if 0 <= after <= last:
                calls.append(("pp", f"send {stage}->{after}", 1 << 23, 1 << 23, 5))
    return [*calls, ("dp", "_reduce_scatter_base", 1 << 28, 1 << 24, 6),
            ("world", "all_reduce", 1, 1, 7), ("tp", "all_reduce", 1 << 12, 1 << 12, 7),
            ("dp", "_all_gather_base", 1 << 24, 1 << 28, 6),
            ("world", "all_reduce", 1, 1, 7)]  # fmt: skip


def stack(site: int, frames: int) -> list[dict[str, Any]]:
    """The frames of a call: one list for all calls of a site, or ``frames`` of its own."""
    if not frames:
        return FRAMES[site]
    return [{"name": f"fn{i}", "filename": f"/opt/megatron/core/file{i}.py", "line": 100 + i}
            for i in range(frames)]  # fmt: skip


def dump(
    world: World, rank: int, names: dict[tuple[int, ...], int], fault: str, frames: int = 0
) -> dict[str, Any]:
    """What the recorder of ``rank`` holds when the job stands still."""
    mine = {"world": tuple(range(world.size))}
    mine |= {short: world.group(rank, GROUPS[short]) for short in ("tp", "dp", "pp")}
    calls = iteration(mine["pp"].index(rank), world.pp - 1) * ITERATIONS
    outstanding = {len(calls) - 1}
    is_culprit = rank in CULPRITS[fault]
    if fault == "host stuck" and is_culprit:
        calls, outstanding = calls[:-1], set()
    if fault == "order":  # on other streams: the host goes on, the devices wait in a ring
        calls = calls[:-1]
        x, y = len(calls) - 2, len(calls) - 1
        stuck: set[int] = set()
        for culprit in CULPRITS[fault]:
            stuck |= set(world.group(culprit, GROUPS["tp"]))
        outstanding = {x, y} if rank in stuck else {y} if stuck & set(mine["dp"]) else set()
        if is_culprit:
            calls[x], calls[y] = calls[y], calls[x]
    ids = {short: number for number, short in enumerate(GROUPS)}
    counts = {(short, kind): 0 for short in GROUPS for kind in (False, True)}
    first, entries = len(calls) - ENTRIES, []
    status = {short: [0, 0] for short in GROUPS}
    for place, (short, word, num_in, num_out, site) in enumerate(calls):
        pair, done = short == "pp", place not in outstanding
        counts[short, pair] += 1
        status[short][0] += 1
        status[short][1] += done
        if place < first:
            continue
        begin = BEGIN_NS + place * 1_500_000
        entries.append({
            "record_id": 80_000 + place, "pg_id": ids[short],
            "process_group": (str(names[mine[short]]), GROUPS[short]),
            "collective_seq_id": counts[short, False], "p2p_seq_id": counts[short, True],
            "op_id": status[short][0], "profiling_name": f"nccl:{word}",
            "time_created_ns": begin + rank * 1009,
            "input_sizes": [[num_in]], "input_dtypes": ["BFloat16"],
            "output_sizes": [[num_out]], "output_dtypes": ["BFloat16"],
            "state": "completed" if done else "scheduled",
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": begin + 900_000 if done else None,
            "retired": done, "timeout_ms": 600_000, "is_p2p": pair, "thread_name": "pt_autograd_0",
            "thread_id": "139872361", "frames": stack(site, frames)})  # fmt: skip
    return {
        "version": "2.10", "comm_lib_version": "2.27.3",
        "pg_config": {str(names[m]): {"name": str(names[m]), "desc": GROUPS[s],
                                      "ranks": str(list(m))} for s, m in mine.items()},
        "pg_status": {str(ids[s]): {"last_enqueued_collective": enqueued,
                                    "last_started_collective": -1,
                                    "last_completed_collective": completed}
                      for s, (enqueued, completed) in status.items()},
        "entries": entries,
    }  # fmt: skip


def write(folder: Path, size: int, fault: str, frames: int) -> int:
    """Bytes of the files of a job with ``fault``."""
    world = World(size, tp=8, pp=8)
    members = {world.group(r, GROUPS[s]) for s in ("tp", "dp", "pp") for r in range(size)}
    names = dict(zip([tuple(range(size)), *sorted(members)], itertools.count(), strict=False))
    folder.mkdir(parents=True)
    total = 0
    for rank in range(size):
        data = pickle.dumps(dump(world, rank, names, fault, frames), protocol=2)
        total += (folder / f"_dump_{rank}").write_bytes(data)
    return total


ALONE = """
import json, sys
from megatron_prism.features.hang import analyze, dumps
print(json.dumps(analyze.diagnose_dumps(dumps.read_in_process(sys.argv[1])).to_json()))
"""


def judged(folder: Path, alone: bool) -> Measured:
    code = ["-c", ALONE] if alone else ["-m", "megatron_prism", "hang", "--json", "--dumps"]
    # progress is no part of the JSON
    return measure([sys.executable, *code, str(folder)], ROOT, errors=subprocess.DEVNULL)


def rows_of(folder: Path, fault: str, ranks: int, frames: int) -> list[Row]:
    """Both ways of one set; made if it is not there."""
    if not folder.exists():
        write(folder, ranks, fault, frames)
    size = sum(file.stat().st_size for file in folder.iterdir())
    what = f"{fault}, {ranks:,} dumps, {size / 1e6:,.0f} MB"
    rows, said = [], []
    for alone in (False, True):
        found = judged(folder, alone)
        how = "one process" if alone else "prism hang"
        seconds, memory = (None, None) if alone else (30, 2)
        said.append(json.loads(found.output))
        rows += [
            Row(f"{what}: {how}", found.seconds, "s", seconds),
            Row(f"    processor time of {how}", found.cpu_seconds, "s"),
            Row(f"    memory of {how}, all processes", found.peak_rss / 1e9, "GB", memory),
        ]
    named = [culprit["rank"] for culprit in said[0]["culprits"]]
    right = said[0]["verdict"] == fault and named == CULPRITS[fault]
    return [*rows, Row("    right, and both alike", right and said[0] == said[1], "", 1, True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", type=Path, help="keep the dumps in this folder")
    parser.add_argument("--ranks", type=int, default=1024, help="a multiple of 64")
    parser.add_argument("--frames", type=int, default=0, help="of a stack of each call's own")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for fault in ("host stuck", "order"):
            folder = (args.keep or Path(temporary)) / fault.replace(" ", "_")
            rows += rows_of(folder, fault, args.ranks, args.frames)
    finish("Verdicts on large dump sets", rows)


if __name__ == "__main__":
    main()
