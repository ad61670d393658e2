"""Other numbers of microbatches than captured, against captures of them: random stock jobs.

``python -m benchmarks.accuracy.microbatches SCRIPT [--jobs 40] [--seed 0] [--csv FILE]``

SCRIPT is Megatron's pretrain_gpt.py.  Every job combines overlapped gradients and parameters,
buckets, chunks, uneven stages, MTP, experts, context parallelism, FP8, recomputation and deferred
embedding gradients (``tests/helpers/compositions.py``), and is captured with two numbers of
microbatches, on tier meta without a GPU.  Each is made from the other and compared op by op, and by
the replayed iteration; ``--csv`` adds a row a job to a file.  Exits 1 if a time is off by more than
1 %.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from helpers import compositions  # noqa: E402

import megatron_prism as prism  # noqa: E402

BOUND = 0.01
AT_ONCE = 4  # jobs


def main() -> int:
    """Print a line a job; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("script", type=Path)
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    jobs = [compositions.draw(args.seed + i) for i in range(args.jobs)]
    with tempfile.TemporaryDirectory() as place:
        folder = args.keep or Path(place)
        worst, refused = 0.0, 0
        for start in range(0, len(jobs), AT_ONCE):
            some = jobs[start : start + AT_ONCE]
            found = compositions.captured(some, folder / str(start), args.script)
            for number, (job, pair) in enumerate(zip(some, found, strict=True), args.seed + start):
                text, off = row(pair)
                if args.csv is not None:
                    with args.csv.open("a", newline="") as file:
                        csv.writer(file, lineterminator="\n").writerow(
                            [number, job.pp, job.vpp, job.tp, job.cp, job.few, job.many,
                             text, job.flags]
                        )  # fmt: skip
                refused += off is None
                worst = max(worst, off or 0.0)
                print(f"{text:<46} pp {job.pp} vpp {job.vpp} tp {job.tp} cp {job.cp} "
                      f"{job.few} <-> {job.many} {job.flags}", flush=True)  # fmt: skip
    compared = len(jobs) - refused
    print(f"{compared} jobs, both ways: at most {worst:.3%} off; {refused} not captured")
    return int(worst > BOUND or not compared)


def row(pair: object) -> tuple[str, float | None]:
    """What to say of a job, and the larger of its two errors; None if it was not captured."""
    if not isinstance(pair, tuple):
        last = [line for line in str(pair).splitlines() if "Error" in line] or ["failed"]
        return f"not captured: {last[-1][:300]}", None
    few, many = pair
    try:
        unlike = [*compositions.unlike(few, many), *compositions.unlike(many, few)]
        off = max(_off(few, many), _off(many, few))
    except prism.PrismError as error:
        return f"REFUSED: {error.message}", 1.0
    equal = "op by op" if not unlike else "; ".join(unlike[:3])
    return f"{off:.3%} off, {equal}", off


def _off(given: object, wanted: object) -> float:

    made = prism.with_microbatches(given, wanted.num_microbatches)
    times = [prism.replay(one, machine="h100").iteration_ns for one in (made, wanted)]
    return abs(times[0] / times[1] - 1)


if __name__ == "__main__":
    sys.exit(main())
