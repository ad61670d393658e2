"""Local pairs, the price of the attach, a slow peer: is what the real ranks feel the real job's?

``python benchmarks/hybrid_checks.py SCRIPTS --check pairs,overhead,straggler [--config pp4]
[--steps 8] [--pairs 0,1:2,3] [--slow 1] [--factors 1.16,1.40,2.03] [--work DIR] [--json OUT]``

On 4 GPUs, back to back with the plain job:

* ``pairs``: two real ranks of torchrun with paced peers, two such pairs side by side
* ``overhead``: every rank local under ``--prism-emulate`` and the plain job, in turns, twice each
* ``straggler``: rank ``--slow`` of the real job slowed by a spin kernel (``slow_rank.py``), and the
  other ranks alone beside a virtual one as slow (``--prism-slow``)

A ``calibration.json`` in the work folder is used; ``--calibrate`` makes it first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from accuracy import WARM_UP, gpus_of
from groundtruth import NUM_RANKS
from hybrid import Hybrid, steps_of

import megatron_prism as prism

OVERHEAD, STRAGGLER = 0.3, 5.0  # percent


class Checks(Hybrid):
    """A sitting of shorter runs."""

    def __init__(self, scripts: Path, work: Path, config: str, steps: int) -> None:
        super().__init__(scripts, work, NUM_RANKS)
        self.config, self.steps = config, steps
        self.real_steps = self.alone_steps = steps

    def plain(self, name: str, *slow: str) -> float | None:
        """ms of an iteration of the plain job, its rank ``slow[0]`` ``slow[1]`` times as slow."""
        folder = self.work / f"{name}-{self.config}"
        here = Path(__file__)
        program = [str(here.with_name("slow_rank.py")), *slow] if slow else []
        program = program or [str(here.with_name("real_steps.py"))]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        launcher += [str(NUM_RANKS), *program, str(folder)]
        self._start(folder.name, [*launcher, *self.job(self.config, self.steps)]).wait()
        file = folder / "rank-0.json"
        return (
            _median(json.loads(file.read_text())["iteration_ms"][WARM_UP:])
            if file.exists()
            else None
        )

    def emulated(self, name: str, local: list[list[int]], ours: list[str]) -> list[dict[str, Any]]:
        """Summaries of the ranks of ``local``, whose lists run side by side."""
        running, files = [], []
        for ranks in local:
            folder = self.work / f"{name}-{self.config}-{ranks[0]}"
            words = ["-m", "megatron_prism", "run", "--prism-world-size", str(NUM_RANKS)]
            words += ["--prism-ranks", ",".join(map(str, ranks)), "--prism-out", str(folder)]
            words += ["--prism-force", *ours, "--", *self.job(self.config, self.steps)]
            if len(ranks) > 1:
                launcher = ["-m", "torch.distributed.run", "--standalone"]
                words = [*launcher, "--nproc-per-node", str(len(ranks)), *words]
            gpus = gpus_of(ranks, NUM_RANKS)
            running.append(self._start(folder.name + "-log", words, CUDA_VISIBLE_DEVICES=gpus))
            files += [folder / f"rank-{rank:06d}.json" for rank in ranks]
        for process in running:
            process.wait()
        return [json.loads(file.read_text()) if file.exists() else {} for file in files]

    def replayed(self, slow: str = "", factor: str = "1") -> float:
        """ms of an iteration that the slices say, rank ``slow`` ``factor`` times as slow."""
        programs = prism.load(self.work / f"{self.config}-slices")
        file = self.work / "calibration.json"
        changed = prism.WhatIf(slow={slow: factor} if slow else {})
        calibration = file if file.exists() else None
        return prism.replay(programs, calibration=calibration, what_if=changed).iteration_ns / 1e6

    def pace(self) -> list[str]:
        """The flags of a paced run on this sitting's slices, which are captured first."""
        folder = self.work / f"{self.config}-slices"
        if not folder.is_dir():
            self.capture(self.config)
        file = self.work / "calibration.json"
        if file.exists():
            (folder / file.name).write_text(file.read_text())
        return ["--prism-pace", str(folder)]


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _percent(found: float | None, real: float | None) -> float | None:
    return None if found is None or real is None else round(100 * (found / real - 1), 2)


def pairs(sitting: Checks, args: argparse.Namespace) -> dict[str, Any]:
    """Errors of local pairs."""
    flags = sitting.pace()
    real = sitting.plain("plain")
    local = [[int(rank) for rank in pair.split(",")] for pair in args.pairs.split(":")]
    found = sitting.emulated("pairs", local, flags)
    felt = [_median(steps_of(one)) for one in found]
    return {
        "real_ms": real,
        "local": local,
        "felt_ms": felt,
        "errors_percent": [_percent(ms, real) for ms in felt],
        "pacing": [one.get("pacing") for one in found],
        "allocated_peak": [one.get("memory", {}).get("allocated_peak") for one in found],
    }


def overhead(sitting: Checks, args: argparse.Namespace) -> dict[str, Any]:
    """What ``--prism-emulate`` costs where nothing is virtual."""
    plain, ours = [], []
    for turn in range(2):
        plain.append(sitting.plain(f"plain-{turn}"))
        whole = sitting.emulated(f"ours-{turn}", [list(range(NUM_RANKS))], [])
        ours.append(_median(steps_of(whole[0])))
    known = [ms for ms in plain if ms is not None], [ms for ms in ours if ms is not None]
    medians = [_median(values) for values in known]
    more = _percent(medians[1], medians[0])
    return {"plain_ms": plain, "ours_ms": ours, "overhead_percent": more,
            "met": more is not None and more <= OVERHEAD}  # fmt: skip


def straggler(sitting: Checks, args: argparse.Namespace) -> dict[str, Any]:
    """By how much does a slow rank slow the job down?  Real, felt by every other rank, replayed.

    Bounded is the slowdown: the same run without a slow rank is what each is compared with, so a
    host that changes between sittings does not count."""
    flags = sitting.pace()
    others = [[rank] for rank in range(NUM_RANKS) if rank != int(args.slow)]

    def felt_of(name: str, more: list[str]) -> list[float | None]:
        return [_median(steps_of(one)) for one in sitting.emulated(name, others, [*flags, *more])]

    real_before, felt_before = sitting.plain("plain"), felt_of("beside", [])
    rows = []
    for factor in args.factors.split(","):
        real = sitting.plain(f"slow-{factor}", args.slow, factor)
        felt = felt_of(f"beside-{factor}", ["--prism-slow", f"{args.slow}:{factor}"])
        slowdown = _times(real, real_before)
        felt_slowdown = [_times(*pair) for pair in zip(felt, felt_before, strict=True)]
        errors = [_percent(one, slowdown) for one in felt_slowdown]
        rows.append({
            "factor": factor, "real_ms": real, "felt_ms": felt, "real_slowdown": slowdown,
            "felt_slowdown": felt_slowdown, "errors_percent": errors,
            "replayed_ms": sitting.replayed(args.slow, factor),
            "met": all(e is not None and abs(e) <= STRAGGLER for e in errors),
        })  # fmt: skip
    return {"slow": args.slow, "real_ms": real_before, "felt_ms": felt_before, "rows": rows}


def _times(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else round(after / before, 4)


CHECKS = {"pairs": pairs, "overhead": overhead, "straggler": straggler}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scripts", type=Path)
    parser.add_argument("--check", default="pairs", help=",".join(CHECKS))
    parser.add_argument("--config", default="pp4")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pairs", default="0,1:2,3")
    parser.add_argument("--slow", default="1", help="the slow rank")
    parser.add_argument("--factors", default="1.16,1.40,2.03")
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {"config": args.config, "steps": args.steps}
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        sitting = Checks(args.scripts, work, args.config, args.steps)
        if args.calibrate:
            sitting.calibrate()
        for name in args.check.split(","):
            found[name] = CHECKS[name](sitting, args)
            shown = {k: v for k, v in found[name].items() if k != "pacing"}
            print(name, args.config, json.dumps(shown), flush=True)
            if args.json is not None:  # what is there is worth having if the rest fails
                args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
