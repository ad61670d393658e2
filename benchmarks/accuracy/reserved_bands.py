"""Bytes of segments of real processes, and the band between which nine of ten are expected.

``python -m benchmarks.accuracy.reserved_bands SCRIPTS [JOB …]``

SCRIPTS holds stock ``pretrain_gpt.py`` and its siblings of Megatron-LM tag core_v0.19.0.  Every job
of ``results/h200_one_gpu_unseen.json`` is captured on tier ``meta``; ``prism fit`` draws how fast
its host is (a minute of one core a job).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.accuracy.life_parts import fitted
from benchmarks.report import RESULTS, Row, finish

SHARE = 90  # percent of processes that a band is for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scripts", type=Path)
    parser.add_argument("jobs", nargs="*", metavar="JOB")
    args = parser.parse_args()
    jobs = json.loads((RESULTS / "h200_one_gpu_unseen.json").read_text())["jobs"]
    script = args.scripts.resolve() / "pretrain_gpt.py"
    rows = []
    num_inside = 0
    names = args.jobs or list(jobs)
    for name in names:
        real = jobs[name]["reserved"]
        with tempfile.TemporaryDirectory() as folder:
            answer = fitted(script, jobs[name]["arguments"], Path(folder))
        (risk,) = answer["risks"].values()
        # of a job of one rank: as if its device kept up with the host
        (figures,) = answer["classes"].values()
        keeps_up = figures["peak_reserved"]
        low, high = risk["reserved_band"]
        is_inside = low <= real <= high
        num_inside += is_inside
        place = "inside" if is_inside else "outside"
        draws_low, draws_high = risk["reserved_at"]["0.05"], risk["reserved_at"]["0.95"]
        print(
            f"{name}: {real:,} B real, {place}: {low:,} to {high:,} B in {risk['draws']} draws; "
            f"the draws alone {draws_low:,} to {draws_high:,} B; "
            f"{keeps_up:,} B if the device keeps up with the host",
            flush=True,
        )
        percent_off = 100 * abs(keeps_up / real - 1)
        rows.append(Row(f"{name}: off a device that keeps up", percent_off, "%"))
        rows.append(Row(f"{name}: width of the band", 100 * (high - low) / real, "%"))
    percent = 100 * num_inside / len(names)
    rows.append(Row("real figures inside the band", percent, "%", SHARE, at_least=True))
    finish("Reserved bytes of jobs of one GPU", rows)


if __name__ == "__main__":
    main()
