"""How long does it take to record every stage's schedule from Megatron's scheduler?

Fresh from import: seconds for all stages, microseconds per op, and the longest path through them.
"""

from __future__ import annotations

import argparse
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
LARGE = ("PP64 VP4, 1024 microbatches", (64, 4, 1024), {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help=f"also {LARGE[0]}")
    rows = []
    for name, sizes, switches in [*CASES, LARGE] if parser.parse_args().large else CASES:
        start = time.perf_counter()
        programs = schedules(*sizes, **switches)
        took = time.perf_counter() - start
        ops = sum(map(len, programs.programs))
        bounded = name != LARGE[0]
        rows.append(Row(f"{name}: all stages", took, "s", SECONDS if bounded else None))
        rows.append(Row(f"  an op ({ops:,})", took / ops * 1e6, "us", PER_OP))
        if name == CASES[0][0]:
            start = time.perf_counter()
            schedule_timeline(programs)
            rows.append(Row("  longest path in units", time.perf_counter() - start, "s"))
    finish("Schedules without a model", rows)


if __name__ == "__main__":
    main()
