"""Does the predicted distribution of the iteration time hold against real iterations?

``python -m benchmarks.accuracy.tails_reality WORK CALIBRATION REAL.json [--json OUT]``

WORK is the folder that ``accuracy.py --work`` kept (``CONFIG-slices`` in it), CALIBRATION what
``prism calibrate`` wrote, REAL what ``accuracy.py --json`` wrote (``rows`` of ``config`` and
``iterations_ms``; ``--real-steps 213 --alone-steps 47``).  Spreads are fitted to every other timed
iteration of the slices and every other sample of the calls; nothing else varies (every GPU was
captured, and one sitting has one network regime).  The real run is only compared with; its first
``--skip`` iterations are left out (clocks and caches settle), and none of its slow ones.

Bounds: p50 within 2 %, p95 within 4.3 % (PRISM v2's figure), KS distance at most 0.15 (PRISM v1's
is 0.208).  What few iterations cannot say is printed with the figure: p95 of n iterations is known
from n = 200 on, a KS distance of n iterations to the truth itself is 0.87 / sqrt(n) on average,
and a real run that drifts has no one distribution.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import megatron_prism as prism
from megatron_prism.core.errors import PrismError
from megatron_prism.core.programs.program import Programs
from megatron_prism.features.predict.distributions import needed
from megatron_prism.features.predict.variability import fitted, read_variability
from megatron_prism.replay.costs.collectives import Calibration, read_calibration

BOUNDS = {"p50_percent": 2.0, "p95_percent": 4.3, "ks": 0.15}
DRAWS = 20_000


def half(programs: Programs) -> Programs:
    """The same slices with every other timed iteration."""
    kept = [dataclasses.replace(one, samples=one.samples[::2]) for one in programs.programs]
    return dataclasses.replace(programs, programs=tuple(kept))


def halved(file: Path, where: Path) -> Path:
    """The calibration with every other sample of each call."""
    stored = json.loads(file.read_text())
    for row in stored["collectives"]:
        if "samples" in row:
            row["samples"] = row["samples"][::2]
    path = where / "half.json"
    path.write_text(json.dumps(stored))
    return path


def judge(
    programs: Programs,
    calibration: Calibration | None,
    real_ms: list[float],
    file: Path | None = None,
) -> dict[str, Any]:
    """Errors in percent, the KS distance (of medians brought together too), and sample sizes."""
    none = {**dict.fromkeys(("gpu", "call", "network", "calls_by"), 0.0),
            **dict.fromkeys(("slow_gpu", "slow_network"), (0.0, 1.0))}  # fmt: skip
    base = dataclasses.replace(read_variability("public"), **none)
    spread = fitted(half(programs), base)
    if calibration is not None:  # its samples are those of ``file``
        calibration = dataclasses.replace(calibration, path="" if file is None else str(file))
    found = prism.predict(programs, calibration=calibration, variability=spread, samples=DRAWS)
    predicted = found.draws / 1e6
    real = np.sort(np.array(real_ms))

    def error(level: float) -> float:
        return 100 * float(np.quantile(predicted, level) / np.quantile(real, level) - 1)

    def distance(values: np.ndarray) -> float:
        below = np.searchsorted(values, real, side="right") / len(values)
        steps = np.arange(len(real) + 1) / len(real)
        return float(max((steps[1:] - below).max(), (below - steps[:-1]).max()))

    together = predicted * float(np.median(real) / np.median(predicted))
    return {
        "real_iterations": len(real),
        "timed_iterations": sum(len(one.samples[::2]) for one in programs.programs),
        "real_p50_ms": float(np.quantile(real, 0.5)),
        "real_p95_ms": float(np.quantile(real, 0.95)),
        "p50_percent": error(0.5),
        "p95_percent": error(0.95),
        "ks": distance(predicted),
        "ks_of_the_shape": distance(together),
        "ks_of_chance": 0.87 / len(real) ** 0.5,
        "p95_is_known": len(real) >= needed(0.95),
        "predicted_p50_ms": float(np.quantile(predicted, 0.5)),
        "predicted_p95_ms": float(np.quantile(predicted, 0.95)),
        "drift_percent": _drift(real_ms),
        "spreads": spread.source,
        "calls": found.calls,
    }


def _drift(real_ms: list[float]) -> float:
    """By how much the real run's second half is slower than its first: its draws are not alike."""
    middle = len(real_ms) // 2
    if not middle:
        return 0.0
    return 100 * float(np.median(real_ms[middle:]) / np.median(real_ms[:middle]) - 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("real", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--skip", type=int, default=10, help="of the real run, beside its warm-up")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        rows, missed = compare(args, halved(args.calibration, Path(place)))
    if args.json is not None:
        args.json.write_text(json.dumps({"bounds": BOUNDS, "rows": rows}, indent=1) + "\n")
    return 0 if rows and not missed else 1


def compare(args: argparse.Namespace, samples: Path) -> tuple[list[dict[str, Any]], int]:
    """(a row for every configuration, how many missed a bound), printed as they come."""
    calibration, rows, missed = read_calibration(args.calibration), [], 0
    print(
        f"{'configuration':18} {'n':>4} {'alone':>5} {'p50':>8} {'p95':>8} {'KS':>6} {'shape':>6} "
        f"{'chance':>6} {'drift':>7}"
    )
    for row in json.loads(args.real.read_text())["rows"]:
        folder = args.work / f"{row['config']}-slices"
        if not folder.is_dir() or not row["iterations_ms"]:
            print(f"{row['config']:18} no slices or no real iterations", file=sys.stderr)
            continue
        try:
            real = row["iterations_ms"][min(args.skip, len(row["iterations_ms"]) // 2) :]
            found = judge(prism.load(folder), calibration, real, samples)
        except PrismError as error:  # the other rows are still worth having
            print(f"{row['config']}: {error}", file=sys.stderr)
            missed += 1
            continue
        rows.append({"config": row["config"], **found})
        missed += any(abs(found[key]) > bound for key, bound in BOUNDS.items())
        mark = "" if found["p95_is_known"] else " p95 of too few iterations"
        print(
            f"{row['config']:18} {found['real_iterations']:4} {found['timed_iterations']:5} "
            f"{found['p50_percent']:+7.2f}% "
            f"{found['p95_percent']:+7.2f}% {found['ks']:6.3f} {found['ks_of_the_shape']:6.3f} "
            f"{found['ks_of_chance']:6.3f} {found['drift_percent']:+6.2f}%{mark}"
        )
    return rows, missed


if __name__ == "__main__":
    sys.exit(main())
