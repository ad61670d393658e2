"""Replays of slices that are kept in ``benchmarks/results``, beside real iterations.

Slices are kept as text and without memory:

captured.json.gz    : of ranks that were captured alone on a GPU (``run.py``), with the calibration
                      and host index of their sitting, of some jobs also of tier ``meta``, and
                      functional tests of one H100 on a shared host, with NVIDIA's time on its own
without_gpu.json.gz : of tier ``meta``; ``tests``: Megatron-LM's functional tests whose name has an
                      even crc32 and that publish iteration times on 8 x H100 (``functional_tests
                      run TREE OUT.csv --half even --time h100 --work WORK``, then ``python -m
                      benchmarks.accuracy.kept WORK OUT.csv``; the odd half is for a last look).
                      NVIDIA recorded them on two kinds of hosts: ``faster`` (commit 4e85d74ae9 of
                      Megatron-LM, 2026-04-14), and on ``slower`` ones where the test was recorded
                      with 5fe3f06658 or cd4afffa64; ``earlier`` (2025-10-21) where never again
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import megatron_prism as prism
from benchmarks.report import RESULTS
from megatron_prism.core.programs.program_text import dump, parse
from megatron_prism.replay.costs.host_index import REFERENCE, HostIndex
from megatron_prism.replay.uncertainty.differences import UncertainTime, of_sources
from megatron_prism.replay.uncertainty.interval import interval

FASTER = 0.6  # index of NVIDIA's faster hosts, of which the model of the host's time is
CAPTURED, WITHOUT_GPU = RESULTS / "captured.json.gz", RESULTS / "without_gpu.json.gz"


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
    estimate: UncertainTime | None = None  # of slices that are kept

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


def read(file: Path) -> Any:
    return json.loads(gzip.decompress(file.read_bytes()))


def evaluated(
    job: str,
    where: str,
    text: str,
    machine: str,
    real: float,
    index: float,
    calibration: Any = None,
) -> Found:
    """The replay of slices beside ``real`` ns; ``index``: of the job's host, 0: unknown."""
    what_if = file = None
    with TemporaryDirectory() as folder:
        if index:
            what_if = prism.WhatIf(host=Path(folder) / "host.json")
            made = HostIndex(index, 0.15, dict.fromkeys(REFERENCE, index), where)
            what_if.host.write_text(made.to_json(), encoding="utf-8")  # type: ignore[union-attr]
        if calibration:
            file = Path(folder) / "calibration.json"
            file.write_text(json.dumps(calibration))
        timeline = prism.replay(parse(text), machine=machine, calibration=file, what_if=what_if)
    between, host = interval(timeline), timeline.to_json()["host"]
    sources = of_sources(timeline.iteration_ns, map(vars, between.sources))
    return Found(job, where, timeline.iteration_ns, between.low_ns, between.high_ns, real,
                 float(host or 0), sources)  # type: ignore[arg-type]  # fmt: skip


def captured(where: str = "") -> Iterator[Found]:
    """Captured ranks; ``where``: of one sitting only."""
    stored = read(CAPTURED)
    for job in (one for one in stored["jobs"] if where in ("", one["where"])):
        calibration = stored["calibrations"][job["calibration"]] if job["calibration"] else None
        yield evaluated(job["name"], job["where"], job["program"], "h100",
                        1e6 * median(job["real_ms"]), job["index"], calibration)  # fmt: skip


def functional_tests(hosts: str = "faster", named: bool = False) -> Iterator[Found]:
    """``hosts``: "faster", "slower" or "earlier"; ``named``: their index is known, which follows
    from the tests that ran on both kinds."""
    rows = sorted(read(WITHOUT_GPU)["tests"].items())
    times = [row["seconds"] for _, row in rows]
    both = [of["slower"] / of["faster"] for of in times if {"slower", "faster"} <= set(of)]
    index = FASTER * (median(both) if hosts == "slower" else 1)
    for name, row in rows:
        if hosts in row["seconds"]:
            real = 1e9 * row["seconds"][hosts]
            known = index if named else 0.0
            yield evaluated(name, f"{hosts} hosts", row["program"], "h100", real, known)


def graphs() -> Iterator[Found]:
    """Jobs of one GPU with CUDA graphs, by the index of their sitting (``host_constants``)."""
    for name, row in sorted(read(WITHOUT_GPU)["graphs"].items()):
        real_ns = 1e6 * median(row["real_ms"])
        yield evaluated(name, row["where"], row["program"], "h100", real_ns, row["index"])


def bare(slices: Path) -> str:
    """The text of programs without what memory they take."""
    programs = prism.load(slices)
    made = (dataclasses.replace(p, allocations=p.allocations[:0]) for p in programs.programs)
    return dump(dataclasses.replace(programs, programs=tuple(made)))


def store(work: Path, rows: Path) -> None:
    """Keep the slices of tests that OUT.csv has times of; equal values are equal files."""
    found = read(WITHOUT_GPU)
    for row in csv.DictReader(rows.open(newline="")):
        if row["seconds"] and row["test"] in found["tests"]:
            slices = work / f"{row['test'].replace('/', '_')}.slices"
            found["tests"][row["test"]]["program"] = bare(slices)
    text = json.dumps(found, indent=1, sort_keys=True).encode()
    WITHOUT_GPU.write_bytes(gzip.compress(text, mtime=0))


if __name__ == "__main__":
    store(Path(sys.argv[1]), Path(sys.argv[2]))
