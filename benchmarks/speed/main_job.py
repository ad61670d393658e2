"""What does the main job cost?  ``prism emulate`` on a recipe, from start to end, on this machine.

Wall seconds and peak memory of the whole process tree.  Without arguments: Llama-3-70B on 1,024
GPUs, with interleaved stages as in the recipe and with plain ones.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.process_tree import measure
from benchmarks.report import ROOT, Row, finish

JOBS = [
    ["llama3-70b_1024gpu_tp8pp4vp5_h200"],
    ["llama3-70b_1024gpu_tp8pp4vp5_h200", "vpp=null"],
]
SECONDS, MEMORY = 60, 2.0  # GB


def main() -> None:
    """Measure, print, exit 1 if a bound is missed or the job fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("job", nargs="*", help="recipe and key=value overrides (default: both)")
    args = parser.parse_args()
    rows = []
    for job in [args.job] if args.job else JOBS:
        done = measure([sys.executable, "-m", "megatron_prism", "emulate", *job], ROOT)
        if done.status:
            raise SystemExit(f"{done.output}\n{' '.join(job)} ended with {done.status}")
        name = " ".join(job)
        rows += [
            Row(f"{name}: wall time", done.seconds, "s", SECONDS),
            Row(f"{name}: CPU time", done.cpu_seconds, "s"),
            Row(f"{name}: memory of all processes", done.peak_rss / 1e9, "GB", MEMORY),
        ]
    finish("prism emulate, one rank per pipeline stage, no GPU", rows)


if __name__ == "__main__":
    main()
