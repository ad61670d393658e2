"""How far off are segments that were never run?  Tier ``meta`` against the same ranks on a GPU.

``python -m benchmarks.accuracy.segments META MEASURED [--machine h200] [--table FILE.json]
[--job NAME] [--phases forward,backward] [--json OUT]``

META and MEASURED are folders of slices of the same job, captured with ``--prism-tier meta`` and on
a GPU; ranks that both have are compared.  Each rank's time in kernels by phase: forward and
backward as the median of its microbatches, the rest of an iteration as one sum.  Slices whose
``host`` time is apart hold kernels alone; older ones also where the GPU waited for its host.  OUT
keeps rows of other jobs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import megatron_prism as prism
from megatron_prism.core.programs import program
from megatron_prism.core.programs.ops import CODE, PHASE_NAMES
from megatron_prism.core.programs.program import Program
from megatron_prism.replay.costs.kernels import parts_of, table_of
from megatron_prism.replay.costs.machine import Machine, machine


def by_phase(program: Program, ns: np.ndarray) -> dict[str, float]:
    """ms: ``forward`` and ``backward`` of the median microbatch, ``optimizer``, ``rest``."""
    each: dict[str, dict[Any, int]] = defaultdict(lambda: defaultdict(int))
    for i in np.flatnonzero(program.ops["name"] == CODE["compute"]).tolist():
        row = program.ops[i]
        phase = PHASE_NAMES[row["phase"]]
        step = (int(row["microbatch"]), int(row["chunk"])) if phase in _STEPS else ""
        each[phase if phase in (*_STEPS, "optimizer") else "rest"][step] += int(ns[i])
    return {phase: median(steps.values()) / 1e6 for phase, steps in each.items()}


_STEPS = ("forward", "backward")


def by_roofline(program: Program, hardware: Machine) -> dict[str, float]:
    """Part of each phase's time that the table does not have."""
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for row in program.ops[program.ops["name"] == CODE["compute"]]:
        note, work = program.strings[row["note"]], [int(row[c]) for c in _WORK]
        parts = parts_of(note, *work, hardware, table_of(hardware))
        phase = PHASE_NAMES[row["phase"]]
        total = found[phase if phase in (*_STEPS, "optimizer") else "rest"]
        total[0] += round(parts.products + parts.data_movers)
        total[1] += parts.roof
    return {phase: roof / max(1, table + roof) for phase, (table, roof) in found.items()}


def segments_ns(world: prism.PricedGraph, rank: int) -> np.ndarray:
    """ns of every op of ``rank`` that is a segment."""
    return world.prices.compute[int(world.graph.classes.of[rank])]


_WORK = ("flops", "traffic", "kernels")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("meta", type=Path)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--table", default=None)
    parser.add_argument("--job", default="")
    parser.add_argument("--phases", default="forward,backward,optimizer,rest")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    hardware = machine(args.machine)
    table = dataclasses.replace(hardware, ops=args.table or hardware.ops)
    rows = []
    world = prism.price(prism.load(args.meta), machine=table)
    print(f"{'rank':>4} {'phase':10} {'measured':>10} {'op table':>18} {'lacks':>6}")
    for path in sorted(args.meta.glob("slice-*.prism")):
        if not (args.measured / path.name).exists():
            continue
        (shapes,) = program.load(path).programs
        (real,) = program.load(args.measured / path.name).programs
        truth = by_phase(real, real.ops["ns"])
        guess = by_phase(shapes, segments_ns(world, shapes.rank))
        lacks, alone = by_roofline(shapes, table), bool((real.ops["host"] >= 0).any())
        for phase, ms in truth.items():
            if phase not in args.phases.split(","):
                continue
            said = guess.get(phase, 0.0)
            print(
                f"{shapes.rank:4} {phase:10} {ms:8.3f}ms {said:8.3f}ms"
                f" {100 * (said / ms - 1):+6.1f} % {lacks.get(phase, 0):6.1%}"
            )
            times = {"measured_ms": ms, "table_ms": said}
            rows.append({"job": args.job, "rank": shapes.rank, "phase": phase,
                         **{key: round(value, 4) for key, value in times.items()},
                         "lacks": round(lacks.get(phase, 0), 4),
                         "kernels_alone": alone})  # fmt: skip
    if args.json is not None:
        if args.json.exists():
            kept = json.loads(args.json.read_text(encoding="utf-8"))["rows"]
            rows = [row for row in kept if row["job"] != args.job] + rows
        lines = ",\n".join(map(json.dumps, rows))
        args.json.write_text(f'{{"rows": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
