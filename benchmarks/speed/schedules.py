"""How long does it take to record every stage's schedule from Megatron's scheduler?

Fresh from import: seconds for all stages, microseconds per op, and the longest path through them.
"""

from __future__ import annotations

import time
import warnings

from benchmarks.report import Row, finish

warnings.simplefilter("ignore")  # of packages that Megatron would rather have
from megatron_prism.emulate.schedule import schedules  # noqa: E402
from megatron_prism.replay.timeline import schedule_timeline  # noqa: E402

SECONDS = 5.0  # all stages of the largest
PER_OP = 40.0  # microseconds
CASES = [
    ("PP16 VP4, 256 microbatches", (16, 4, 256), {}),
    ("PP16 VP4, 256 microbatches, warm-up flush", (16, 4, 256), {"warmup_flush": True}),
    ("PP16 VP4, 256 microbatches, no overlap", (16, 4, 256), {"overlap_p2p": False}),
    ("PP16, 256 microbatches", (16, None, 256), {}),
]


def main() -> None:
    rows = []
    for name, sizes, switches in CASES:
        start = time.perf_counter()
        programs = schedules(*sizes, **switches)
        took = time.perf_counter() - start
        ops = sum(map(len, programs.programs))
        rows.append(Row(f"{name}: all stages", took, "s", SECONDS))
        rows.append(Row(f"  an op ({ops:,})", took / ops * 1e6, "us", PER_OP))
        if name == CASES[0][0]:
            start = time.perf_counter()
            schedule_timeline(programs)
            rows.append(Row("  longest path in units", time.perf_counter() - start, "s"))
    finish("Schedules without a model", rows)


if __name__ == "__main__":
    main()
