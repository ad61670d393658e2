"""Jobs of two GPUs, replayed from slices that are kept, beside their real iterations.

``python -m benchmarks.accuracy.captured``

``results/captured.json.gz`` has, as text and without memory, slices of ranks that were captured
alone on a GPU (``run.py``), the calibration of their sitting without single samples, and real
iterations, ms.  Of some jobs it has slices of tier ``meta``, too, from before the real run, and of
Megatron's functional tests those of one H100 on a shared host, with NVIDIA's time on its own.
Prints the table of docs/accuracy.md.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.accuracy.without_gpu import Found, evaluated
from benchmarks.report import ROOT

STORED = ROOT / "benchmarks" / "results" / "captured.json.gz"


def stored() -> Any:
    return json.loads(gzip.decompress(STORED.read_bytes()))


def jobs(where: str = "") -> Iterator[Found]:
    """Each with the calibration and the host's index of its sitting, as far as there are any;
    ``where``: of one sitting only."""
    kept = stored()
    for job in (one for one in kept["jobs"] if where in ("", one["where"])):
        with TemporaryDirectory() as folder:
            calibration = None
            if job["calibration"]:
                calibration = Path(folder) / "calibration.json"
                calibration.write_text(json.dumps(kept["calibrations"][job["calibration"]]))
            yield evaluated(job["name"], job["where"], job["program"], "h100",
                            1e6 * median(job["real_ms"]), job["index"], calibration)  # fmt: skip


def main() -> None:
    found = list(jobs())
    for one in found:
        ms = (f"{ns / 1e6:,.0f}" for ns in (one.real, one.predicted, one.low, one.high))
        real, predicted, low, high = ms
        error = f"{100 * one.error:+.1f} %".replace("-", "−")
        inside = "" if one.holds else " **outside**"
        print(f"| {one.job} | {one.where} | {real} ms | {predicted} ms, {error} | "
              f"{low} to {high} ms{inside} | {one.host:.0%} |")  # fmt: skip
    errors = [abs(one.error) for one in found if one.where == "second sitting"]
    print(f"second sitting: mean {100 * fmean(errors):.1f} %, most {100 * max(errors):.1f} %")


if __name__ == "__main__":
    main()
