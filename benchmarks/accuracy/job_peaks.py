"""Memory of single ranks without a GPU, job by job, against that of GPUs.

``python -m benchmarks.accuracy.job_peaks RESULTS SCRIPTS [JOB …]``

SCRIPTS holds stock ``pretrain_gpt.py`` and its siblings of Megatron-LM tag core_v0.19.0.  Every job
of ``results/RESULTS.json`` is emulated alone on tier ``meta`` with the arguments of the real run:

h200_fp8_peaks     : 15 jobs, 13 of them in FP8, emulated on one GPU (four minutes of one core)
h100_stock_peaks   : 23 configurations after Megatron-LM's examples (fifteen minutes)
h100_graph_peaks   : 14 jobs with CUDA graphs (three minutes), reserved bytes, too
h100_life          : six plain jobs of one GPU, four of them near its limit (ten minutes), with the
                     reserved and device bytes of their steps
h200_fourteen_alone : fourteen jobs and two variants of one H200 (six minutes), allocated bytes as
                     torch counts them, reserved and device bytes, too
h200_x4_real_peaks : the 24 ranks of six real 4-GPU jobs, ``CONFIG:RANK`` (eight minutes), reserved
                     and device bytes, too.  Reserved is midway between a device that keeps up with
                     its host and a host that is far ahead; both ends are printed
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import megatron_prism as prism
from benchmarks.accuracy.jobs import COMMON, CONFIGS, NUM_RANKS
from benchmarks.report import RESULTS, ROOT, Row, finish

BOUND = 0.1  # percent, of allocated bytes
REAL_JOBS = "h200_x4_real_peaks"
WHOLE_LIVES = "h100_life"
ALONE = "h200_fourteen_alone"
PLAIN_LIVES = ("dense_save", "moe_save", "l_fp8_13", "l_bf16_13", "moe12")
MOE = "te_moe_ep4"  # mirrored peers route as the rank itself does: only reported


def jobs_of(name: str) -> dict[str, dict[str, Any]]:
    """Job -> world, rank, arguments, bound (percent) and the real bytes by level."""
    if name == WHOLE_LIVES:
        return plain_lives()
    if name == ALONE:
        return jobs_alone()
    real = json.loads((RESULTS / f"{name}.json").read_text())
    if name == REAL_JOBS:
        return {
            f"{config}:{rank}": {
                "world": NUM_RANKS, "rank": rank, "arguments": f"{COMMON} {flags}",
                "bound": None if config == MOE else 2.0 if config.startswith("te_") else 0.5,
                "real": {level: real[key][config][rank] for level, key in
                         (("allocated", "peaks"), ("reserved", "reserved"), ("device", "device"))},
            }
            for config, flags in CONFIGS.items() for rank in range(NUM_RANKS)
        }  # fmt: skip
    shared = {"world": 2, "rank": 0, "bound": BOUND, "whole_run": real.get("whole_run", False),
              "te_version": real.get("te_version")}  # fmt: skip
    return {
        name: {**shared, **job, "arguments": f"{real['arguments']} {job['arguments']}",
               "real": {"allocated": job["peak"]}
               | ({"reserved": job["reserved"]} if "reserved" in job else {})}
        for name, job in real["jobs"].items()
    }  # fmt: skip


def plain_lives() -> dict[str, dict[str, Any]]:
    """The jobs of a whole life that neither load nor offload, by what their steps took."""
    real = json.loads((RESULTS / f"{WHOLE_LIVES}.json").read_text())
    jobs = {}
    for name in PLAIN_LIVES:
        job = real["jobs"][name]
        steps = [part for part in job["parts"] if part["part"].startswith("step")]
        # what saves does so behind the third step, and empties the cache
        last = steps[2]
        words = re.sub(r"--(save|save-interval|ckpt-format) \S+", "", job["arguments"])
        jobs[name] = {
            "world": 1,
            "rank": 0,
            "arguments": f"{real['arguments']} {words}",
            "bound": BOUND,
            "te_version": "2.20.2",
            "real": {
                "allocated": last["peak"],
                "reserved": last["reserved_peak"],
                "device": last["used"],
            },
        }
    return jobs


def jobs_alone() -> dict[str, dict[str, Any]]:
    """The jobs of one GPU whose bytes are kept as torch counts them."""
    real = json.loads((RESULTS / f"{ALONE}.json").read_text())
    jobs = {}
    for name, job in real["jobs"].items():
        words = job["arguments"]
        # saving frees what it takes, and a peak of steps is compared
        if "--save " in words:
            words = re.sub(r"--(save|save-interval|ckpt-format) \S+", "", words)
            words = words.replace("--async-save --ckpt-fully-parallel-save", "")
        levels = {"allocated": job["peak"], "reserved": job["reserved"]}
        if "device" in job:
            levels["device"] = job["device"]
        jobs[name] = {
            "world": 1,
            "rank": 0,
            "arguments": f"{real['arguments']} {words}",
            "bound": BOUND,
            "te_version": real["te_version"],
            "environment": job.get("environment", {}),
            "counts_blocks": True,
            "real": levels,
        }
    return jobs


def figures(script: Path, job: dict[str, Any], out: Path) -> dict[str, Any]:
    """Bytes of the job's rank alone, as a class of ``prism memory``; of the whole run where that
    was measured."""
    rank = job["rank"]
    release = ["--prism-te-version", job["te_version"]] if job.get("te_version") else []
    capture = [] if job.get("whole_run") else ["--prism-capture", str(out / "slices")]
    # a job of samples ends by them
    iterations = [] if "--train-samples" in job["arguments"] else ["--train-iters", "3"]
    words = [sys.executable, "-m", "megatron_prism", "run", "--prism-world-size", str(job["world"]),
             "--prism-ranks", str(rank), "--prism-tier", "meta", *release, *capture, "--prism-out",
             str(out / "summary"), "--", str(script), *iterations, "--num-workers", "0",
             *job["arguments"].split()]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment |= job.get("environment", {})
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode:
        raise SystemExit(f"{job['arguments']} failed:\n{done.stderr[-1500:]}")
    if job.get("whole_run"):
        summary = json.loads((out / "summary" / f"rank-{rank:06}.json").read_text())
        memory = summary["memory"]
        between = memory["reserved_between"]
        return {"peak_allocated": memory["allocated_peak"], "peak_reserved": sum(between) / 2,
                "reserved_between": between}  # fmt: skip
    programs = prism.load(out / "slices" / f"slice-{rank:06}.prism")
    if job.get("counts_blocks"):
        fit = prism.fit(programs, machine="h200", with_changes=False)
        ((name, figures_of_class),) = fit.memory.classes.items()
        return {**figures_of_class, "peak_allocated": fit.as_torch_counts(name)}
    (one,) = prism.peak_memory(programs).classes.values()
    return dict(one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "results",
        choices=(
            "h200_fp8_peaks",
            "h100_stock_peaks",
            "h100_graph_peaks",
            WHOLE_LIVES,
            ALONE,
            REAL_JOBS,
        ),
    )
    parser.add_argument("scripts", type=Path)
    parser.add_argument("jobs", nargs="*", metavar="JOB")
    args = parser.parse_args()
    rows, jobs = [], jobs_of(args.results)
    for name in args.jobs or jobs:
        job = jobs[name]
        with tempfile.TemporaryDirectory() as place:
            ours = figures(args.scripts.resolve() / "pretrain_gpt.py", job, Path(place) / "out")
        for level, real in job["real"].items():
            here = ours[f"peak_{level}"]
            off = 100 * (here / real - 1)
            bound = job["bound"] if level == "allocated" else None
            rows.append(Row(f"{name}: {level}, off the GPU", abs(off), "%", bound))
            print(f"{name} {level}: {here:,.0f} B here, {real:,} B real, {off:+.4f} %", flush=True)
            if level == "reserved":
                low, high = (100 * (end / real - 1) for end in ours["reserved_between"])
                print(f"{name} reserved between: {low:+.1f} to {high:+.1f} %", flush=True)
    finish("Memory of a rank without a GPU", rows)


if __name__ == "__main__":
    main()
