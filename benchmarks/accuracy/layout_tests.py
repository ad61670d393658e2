"""Megatron-LM's functional tests verified: does each layout compute what one rank computes?

``python -m benchmarks.accuracy.layout_tests TREE OUT.csv [--half even|odd|all] [--only RE]``

TREE is a checkout of Megatron-LM.  Each test that trains becomes a command line
(``functional_tests.command``), of which ``prism verify`` trains a small copy.  Tests that differ in
checkpoints, machines or how often they run are one composition, and one of them is tried.  A row is
added to OUT.csv at once, and tests that it has are skipped.  Exits 1 where one is not the same.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
import tempfile
import time
import zlib
from pathlib import Path

import yaml

from benchmarks.accuracy import functional_tests
from benchmarks.accuracy.layout_faults import first
from megatron_prism.core.errors import PrismError
from megatron_prism.features.verify.command import line_of
from megatron_prism.features.verify.verdict import verify

_OTHERS = re.compile(r"resume|1node|gb200|release|memory_speed|_sm\b|reruns|frozen|fsdp|no_mmap")
HEAD = ("test", "verdict", "said", "seconds")


def main() -> int:
    """Print and keep a row a test."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tree", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--half", choices=("even", "odd", "all"), default="all")
    parser.add_argument("--only", default=".")
    args = parser.parse_args()
    done = {row[0] for row in csv.reader(args.out.open())} if args.out.exists() else set()
    alarms = 0
    for file in sorted((args.tree / functional_tests.CASES).glob("*/*/model_config.yaml")):
        test = "/".join(file.parts[-3:-1])
        half = ("even", "odd")[zlib.crc32(test.encode()) % 2]
        if test in done or not re.search(args.only, test) or _OTHERS.search(test):
            continue
        if args.half not in (half, "all"):
            continue
        start = time.perf_counter()
        verdict, said = verified(args.tree, file)
        alarms += verdict == "differs"
        row = (test, verdict, said, f"{time.perf_counter() - start:.0f}")
        print(*row, sep="  ", flush=True)
        with args.out.open("a", newline="") as out:
            csv.writer(out).writerow(row)
    return int(alarms > 0)


def verified(tree: Path, file: Path) -> tuple[str, str]:
    """(same, differs, undecided, refused or not tried; what is said of it)."""
    config = yaml.safe_load(file.read_text())
    with tempfile.TemporaryDirectory() as place:
        job, why = functional_tests.command(file.parts[-3], config, 3, tree, Path(place))
        if not job:
            return "not tried", why
        size = str(functional_tests.world_size(config))
        try:
            line = line_of(["--prism-world-size", size], [str(tree / job[0]), *job[1:]])
            found = verify(line, None, Path(place), lambda text: None, bisect=False)
        except PrismError as error:
            return "refused", error.message[:200]
    return {True: "same", False: "differs", None: "undecided"}[found.same], first(found)


if __name__ == "__main__":
    sys.exit(main())
