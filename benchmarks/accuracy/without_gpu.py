"""Iterations that are predicted from shapes alone, against real ones of others and of one GPU.

``python -m benchmarks.accuracy.without_gpu``
``python -m benchmarks.accuracy.without_gpu store WORK OUT.csv``

Slices of tier ``meta`` are kept in ``results/without_gpu.json.gz``, as text and without memory:

tests    : Megatron-LM's functional tests whose name has an even crc32 and that publish iteration
           times on 8 x H100 (``functional_tests run TREE OUT.csv --half even --time h100 --work
           WORK``, then ``store``).  The odd half is nobody's business but a last look's
one_gpu  : jobs of one process, with medians of 10 iterations on a GPU and the index of its host

Prints the two tables of docs/accuracy.md.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import megatron_prism as prism
from benchmarks.report import ROOT
from megatron_prism.core.program import Programs
from megatron_prism.core.program_text import dump, parse
from megatron_prism.replay.costs.host import REFERENCE, HostIndex
from megatron_prism.replay.interval import interval

STORED = ROOT / "benchmarks" / "results" / "without_gpu.json.gz"


@dataclass(frozen=True)
class Found:
    """A prediction and its interval beside a real iteration, ns."""

    job: str
    where: str
    predicted: int
    low: int
    high: int
    real: float
    host: float  # part of the critical path

    @property
    def waits_for_python(self) -> bool:
        return self.host > 0.5

    @property
    def width(self) -> float:
        """Of the interval, as a part of the prediction."""
        return (self.high - self.low) / self.predicted

    @property
    def error(self) -> float:
        return self.predicted / self.real - 1

    @property
    def holds(self) -> bool:
        return self.low <= self.real <= self.high


def stored() -> Any:
    return json.loads(gzip.decompress(STORED.read_bytes()))


def evaluated(
    job: str,
    where: str,
    text: str,
    machine: str,
    real: float,
    index: float,
    calibration: Path | None = None,
) -> Found:
    """The replay of slices beside ``real`` ns; ``index``: of the job's host, 0: unknown."""
    what_if = None
    with TemporaryDirectory() as folder:
        if index:
            parts = dict.fromkeys(REFERENCE, index)
            path = Path(folder) / "host.json"
            path.write_text(HostIndex(index, 0.15, parts, where).to_json(), encoding="utf-8")
            what_if = prism.WhatIf(host=path)
        timeline = prism.replay(
            parse(text), machine=machine, calibration=calibration, what_if=what_if
        )
    between, host = interval(timeline), timeline.to_json()["host"]
    return Found(job, where, timeline.iteration_ns, between.low_ns, between.high_ns, real,
                 float(host or 0))  # type: ignore[arg-type]  # fmt: skip


def tests() -> Iterator[Found]:
    """The functional tests."""
    for name, row in sorted(stored()["tests"].items()):
        yield evaluated(name, "8 x H100", row["program"], "h100", 1e9 * row["seconds"], 0.0)


def one_gpu() -> Iterator[Found]:
    """The jobs of one process, on each GPU that ran them."""
    for job in stored()["one_gpu"]:
        for real in job["real"]:
            where = f"{real['machine'].upper()}, index {real['index']}"
            yield evaluated(job["name"], where, job["program"], real["machine"], 1e6 * real["ms"],
                         real["index"])  # fmt: skip


def bare(programs: Programs) -> str:
    """The text of programs without what memory they take."""
    made = (dataclasses.replace(p, allocations=p.allocations[:0]) for p in programs.programs)
    return dump(dataclasses.replace(programs, programs=tuple(made)))


def store(work: Path, rows: Path) -> None:
    """Keep the tests that OUT.csv has times of."""
    found = stored()
    found["tests"] = {
        row["test"]: {
            "seconds": float(row["golden_seconds"]),
            "program": bare(prism.load(work / f"{row['test'].replace('/', '_')}.slices")),
        }
        for row in csv.DictReader(rows.open(newline=""))
        if row["golden_seconds"] and row["seconds"]
    }
    write(found)


def write(found: Any) -> None:
    """Equal values are equal files."""
    text = json.dumps(found, indent=1, sort_keys=True).encode()
    STORED.write_bytes(gzip.compress(text, mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store", nargs="?", choices=["store"])
    parser.add_argument("work", nargs="?", type=Path)
    parser.add_argument("rows", nargs="?", type=Path)
    args = parser.parse_args()
    if args.store:
        store(args.work, args.rows)
    found = list(tests())
    errors = [one.error for one in found]
    worst = max(found, key=lambda one: abs(one.error))
    print(f"{len(found)} functional tests: mean error {100 * mean(map(abs, errors)):.0f} %, median "
          f"{100 * median(errors):+.0f} %, worst {100 * worst.error:+.0f} % ({worst.job}); "
          f"{sum(one.holds for one in found)} inside their intervals")  # fmt: skip
    for one in [*sorted(found, key=lambda one: -abs(one.error))[:10], *one_gpu()]:
        ms = (f"{ns / 1e6:,.0f}" for ns in (one.real, one.predicted, one.low, one.high))
        real, predicted, low, high = ms
        error = f"{100 * one.error:+.0f} %".replace("-", "−")
        inside = "" if one.holds else " **outside**"
        print(f"| {one.job} | {one.where} | {real} ms | {predicted} ms, {error} | "
              f"{low} to {high} ms{inside} | {one.host:.0%} |")  # fmt: skip


if __name__ == "__main__":
    main()
