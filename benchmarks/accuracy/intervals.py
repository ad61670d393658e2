"""How often does the real iteration lie in the interval that a replay prints?

``python -m benchmarks.accuracy.intervals``

Every stored pair of a prediction and a real run counts: replays of slices that one GPU gave (all
sittings of ``results/h200_x*``, good ones and bad ones), jobs of one GPU's slices against machines
of other days (``ELSEWHERE``), and jobs without any GPU: published ones, and those of
``kept``, whose slices are stored.  Those of the others are not, so their graphs cannot be
evaluated again: an iteration is ``predicted + max(device, host) - max(device, host)`` of the
slowest rank, with the same ranges (``replay.uncertainty.interval``) on the device's and the host's
time of its captures.
What is not stored is left out (calls, overlap), which makes these intervals narrower than the
printed ones.  Where a sitting kept no host's time, the share of the prediction that other sittings
of the same job have is taken (``host of``).

Also prints what the ranges rest on: medians of the same real job in several sittings.
Exit status 1 below 90 %.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.accuracy import kept as kept_slices
from benchmarks.report import RESULTS, Row, finish
from megatron_prism.replay.uncertainty.interval import (
    CLOCKS,
    HOST_FACTOR,
    RANGES,
    Interval,
    Uncertainty,
    combined,
)

CALLS = 1.16  # NCCL keeps the host for 15 to 18 % of the rest, which ``host_ms`` has not
HOST_BOUND = 0.9  # of the prediction: from here on the host decides
# host_ms that docs/measurements.md tells of sittings whose files have none
TOLD = {("tp2pp2", "h200_x4_paced"): 1770.0, ("pp4 --global-batch-size 16", "h200_x4_turns"): 811.0}


@dataclass(frozen=True)
class Pair:
    """A prediction and a real run.

    device_ms, host_ms : of the slowest captured rank, an iteration; 0: unknown, or none
    on_path            : part of the prediction in which GPUs wait for Python, where that is stored
    kernels, calls     : parts of the prediction that are modelled
    overlap            : what overlap that nobody measured may add, as a part of the prediction
    """

    job: str
    where: str
    predicted_ms: float
    real_ms: float
    device_ms: float = 0.0
    host_ms: float = 0.0
    on_path: float = 0.0
    kernels: float = 0.0
    calls: float = 0.0
    overlap: float = 0.0

    @property
    def host(self) -> float:
        """What the host takes, as a part of the prediction."""
        return self.on_path or self.host_ms / self.predicted_ms

    @property
    def waits_for_python(self) -> bool:
        return self.on_path > 0.5 or self.host >= HOST_BOUND

    def interval(self) -> Interval:
        """What a replay would have printed, in ns."""
        device = self.device_ms
        if not device and not self.kernels:
            device = (1 - self.on_path) * self.predicted_ms
            device = 0.0 if self.host_ms and self.waits_for_python else device
        host, base = self.host_ms, max(device, self.host_ms)

        def moved(device_by: float = 1.0, host_by: float = 1.0) -> float:
            if self.on_path:
                waits = self.on_path * self.predicted_ms
                return waits * (host_by - 1) + device * (device_by - 1)
            return max(device * device_by, host * host_by) - base

        ends = {
            "host": (moved(host_by=1 / HOST_FACTOR), moved(host_by=HOST_FACTOR)),
            "clocks": (moved(CLOCKS.low), moved(CLOCKS.high)),
            "overlap": (0.0, self.overlap * self.predicted_ms),
        }
        for begins, share in (("modelled: roofline", self.kernels), ("modelled: NCCL", self.calls)):
            one = next(one for one in RANGES if one.begins == begins)
            part = share * self.predicted_ms
            ends[one.what] = (part * (one.low - 1), part * (one.high - 1))
        sources = [
            Uncertainty(what, round(-1e6 * low), round(1e6 * high), "")
            for what, (low, high) in ends.items()
        ]
        return combined(round(1e6 * self.predicted_ms), sources)

    @property
    def error(self) -> float:
        """Of the prediction."""
        return self.predicted_ms / self.real_ms - 1

    @property
    def holds(self) -> bool:
        found = self.interval()
        return found.low_ns <= 1e6 * self.real_ms <= found.high_ns

    @property
    def width(self) -> float:
        """Of the interval, as a part of the prediction."""
        found = self.interval()
        return (found.high_ns - found.low_ns) / (1e6 * self.predicted_ms)


def elsewhere(job: str, error: float, host: float = 0.0, **more: float) -> Pair:
    """A pair of which the error of the prediction is known, and the host's share of its path."""
    return Pair(job, "elsewhere", 100.0, 100.0 / (1 + error), on_path=host, **more)


# Slices of one GPU against real jobs of other machines and days, none of which they had seen: six
# of 4 x H200, three of NVIDIA's published 8 x H100; the path of jobs that wait for Python is all
# host but where it is known
ELSEWHERE = [
    elsewhere("pipeline, 4 x H200", -0.018),
    elsewhere("another pipeline, 4 x H200", -0.007),
    # its host's time is not kept: as in the median of the seven that are (33 to 90 %, ``captured``
    # and h200_x2_between)
    elsewhere("context parallelism, 4 x H200", -0.077, device_ms=100.0, host_ms=77.0),
    elsewhere("waits for Python, 4 x H200", 0.16, host=1.0),
    elsewhere("waits for Python, 4 x H200 (2)", 0.22, host=1.0),
    elsewhere("waits for Python, 4 x H200 (3)", 0.67, host=1.0),
    elsewhere("7B pipeline, 8 x H100", 0.014),
    # -10.7 % when the model of calls ignored that; with it calls take 4.6 % more, and of the same
    # job on tier meta 12 % are exposed calls and 3.7 % overlap that nobody measured
    elsewhere("7B tp 4, 8 x H100, NCCL_ALGO=Ring", -0.066, calls=0.118, overlap=0.037),
    elsewhere("MoE with MLA, 8 x H100", 0.125, host=0.61),
]


def _rows(stored: Any) -> Iterator[dict[str, Any]]:
    if isinstance(stored, dict):
        if "real_ms" in stored and "predicted_ms" in stored:
            yield stored
        stored = list(stored.values())
    if isinstance(stored, list):
        for one in stored:
            yield from _rows(one)


def _most(row: dict[str, Any], key: str) -> float:
    each = [one.get(f"{key}_ms", 0) for one in row.get("captures", ())]
    return float(max([*each, *row.get(f"{key}s_ms", ())], default=0))


def measured() -> list[Pair]:
    """Replays of slices that were captured beside the real job."""
    found, job = [], ""
    for path in sorted(RESULTS.glob("h200_x*.json")):
        for row in _rows(json.loads(path.read_text(encoding="utf-8"))):
            config = row.get("config")
            if config is not None:  # else the same job's ranks, captured another time
                more = " ".join(w for w in row.get("more", "").split(" --") if "lr" not in w)
                job = f"{config} {more}".strip()
            host = CALLS * (_most(row, "host") or TOLD.get((job, path.stem), 0.0))
            times = row["predicted_ms"], row["real_ms"], _most(row, "device"), host
            found.append(Pair(job, path.stem, *times))
    known: dict[str, list[float]] = defaultdict(list)
    for one in found:
        if one.host_ms:
            known[one.job.split()[0]].append(one.host_ms / one.predicted_ms)
    return [one if one.host_ms else _with_host(one, known) for one in found]


def _with_host(one: Pair, known: dict[str, list[float]]) -> Pair:
    """With the host's share that other sittings of the job have; nobody knows: all of it."""
    share = median(known.get(one.job.split()[0], [1.0]))
    return dataclasses.replace(one, host_ms=share * one.predicted_ms)


def published() -> list[Pair]:
    """Large jobs without any GPU."""
    rows = json.loads((RESULTS / "published_h100.json").read_text(encoding="utf-8"))["rows"]
    return [
        Pair(
            row["name"], "published", 1e3 * row["iteration_s"], 1e3 * row["published_iteration_s"],
            kernels=row["computing"] + row["bubble"], calls=row["exposed"],
            on_path=row.get("host", 0.0),
        )
        for row in rows
    ]  # fmt: skip


def between_sittings(pairs: list[Pair]) -> list[tuple[str, int, float, bool]]:
    """(job, sittings, longest over shortest real median, whether it waits for Python)."""
    by_job: dict[str, list[Pair]] = defaultdict(list)
    for one in pairs:
        by_job[one.job].append(one)
    return sorted(
        (job, len(each), max(o.real_ms for o in each) / min(o.real_ms for o in each),
         any(o.waits_for_python for o in each))
        for job, each in by_job.items() if len(each) > 1
    )  # fmt: skip


def main() -> None:
    pairs = measured()
    print("the same real job, longest over shortest median of all sittings")
    for job, count, ratio, host in between_sittings(pairs):
        print(f"  {job:60.60} {count:2} x {ratio:5.2f}  {'waits for Python' if host else ''}")
    shapes_alone: list[Pair | kept_slices.Found] = [
        *kept_slices.functional_tests(),
    ]
    kept = list(kept_slices.captured())
    everything = [*pairs, *ELSEWHERE, *published(), *shapes_alone, *kept]
    print("\nreal runs outside")
    for one in everything:
        if not one.holds:
            print(f"  {one.job:60.60} {one.where:14} {100 * one.error:+.1f} %")
    gpu, meta = [*pairs, *ELSEWHERE], [o for o in kept if o.where.endswith("tier meta")]
    beside = [o for o in kept if o not in meta]
    bare = [*published(), *shapes_alone, *meta]
    never = 1 / HOST_FACTOR  # below, the host does not decide even where it is that much slower
    kinds = {
        "all": everything,
        "a GPU's slices, no host decides": [o for o in gpu if o.host < never],
        "a GPU's slices, a slower host would": [o for o in gpu if o.host >= never
                                                and not o.waits_for_python],
        "a GPU's slices, Python decides": [o for o in gpu if o.waits_for_python],
        "a GPU's kept slices, its GPUs decide": [o for o in beside if not o.waits_for_python],
        "a GPU's kept slices, Python decides": [o for o in beside if o.waits_for_python],
        "no GPU, GPUs decide": [o for o in bare if not o.waits_for_python],
        "no GPU, Python decides": [o for o in bare if o.waits_for_python],
    }  # fmt: skip
    rows = []
    for name, each in kinds.items():
        share = 100 * sum(one.holds for one in each) / len(each)
        bound = 90 if name == "all" else None
        rows.append(Row(f"{name}: {len(each)} pairs hold", share, "%", bound, at_least=True))
        rows.append(Row("  median width", 100 * median(o.width for o in each), "%"))
    finish("intervals", rows)


if __name__ == "__main__":
    main()
