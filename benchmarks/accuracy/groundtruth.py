"""Does every rank train alone on one GPU, with the real run's peak memory?

``python -m benchmarks.accuracy.groundtruth SCRIPTS [REAL.json] [--configs a,b] [--repeats 2]
[--json OUT]``

SCRIPTS holds stock ``pretrain_gpt.py`` and its siblings of Megatron-LM tag core_v0.19.0.  REAL.json
maps a configuration to the ``max_memory_allocated`` of each rank of an earlier real 4-GPU run of
the same arguments (bytes; ``benchmarks/results/h200_x4_real_peaks.json`` is ours).  Without it the
real runs are made here, which takes 4 GPUs; an MoE job then runs once more through
``--prism-record``, and its ranks replay that recording and are compared with the recorded run, for
two real MoE runs are not alike (``--repeats`` shows by how much).  Each rank is emulated in a
process of its own, several side by side on one GPU: memory does not mind, times would.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.accuracy.jobs import COMMON, CONFIGS, NUM_RANKS

BOUND_PERCENT = 0.01
ITERATIONS = 4  # Adam's states exist after the first, so the peak no longer grows after the second

RECORDED = ("te_moe_ep4",)  # their peaks follow what the peers route


@dataclass
class Run:
    """One emulated rank: its process, and what it came to."""

    config: str
    rank: int
    values: str
    folder: Path
    log: Path
    process: subprocess.Popen[bytes]
    steps: int = 0
    peak: int = 0


class Bench:
    """Starts processes of the jobs in ``scripts``; logs and artefacts go to ``work``."""

    def __init__(
        self, scripts: Path, work: Path, num_gpus: int, iterations: int, extra: Sequence[str] = ()
    ) -> None:
        self.script = str(scripts / "pretrain_gpt.py")
        self.work, self.num_gpus, self.iterations = work, num_gpus, iterations
        self.extra = extra  # appended to every job: Megatron's parser lets the last one win
        root = Path(__file__).resolve().parents[2]
        self.environment = {
            **os.environ,
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "OMP_NUM_THREADS": "4",
            "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
        }

    def job(self, config: str) -> list[str]:
        """The script and its arguments."""
        length = ["--train-iters", str(self.iterations)]
        return [self.script, *COMMON.split(), *CONFIGS[config].split(), *length, *self.extra]

    def _torchrun(self, name: str, command: list[str]) -> None:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(NUM_RANKS)]
        with open(self.work / f"{name}.log", "wb") as log:
            subprocess.run(
                [*launcher, *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                check=False,  # a failed run left no peaks, and that is what we look for
            )

    def real(self, config: str, number: int) -> list[int]:
        """Peaks of a plain real run."""
        folder = self.work / f"{config}-real-{number}"
        program = str(Path(__file__).with_name("real_rank.py"))
        self._torchrun(folder.name, [program, str(folder), *self.job(config)])
        return [_peak(folder / f"rank-{r}.json", folder) for r in range(NUM_RANKS)]

    def recorded(self, config: str) -> list[int]:
        """Peaks of a real run through ``--prism-record``: all ranks local."""
        folder = self.work / f"{config}-recorded"
        prism = ["--prism-world-size", str(NUM_RANKS), "--prism-out", str(folder)]
        prism += ["--prism-record", str(self.recording(config))]
        self._torchrun(
            folder.name, ["-m", "megatron_prism", "run", *prism, "--", *self.job(config)]
        )
        return [_peak(folder / f"rank-{r:06d}.json", folder) for r in range(NUM_RANKS)]

    def recording(self, config: str) -> Path:
        """Where the recording of ``config`` is, if it was made."""
        return self.work / f"{config}-recording"

    def start(self, config: str, rank: int, values: str, slot: int) -> Run:
        """Emulate one rank in the background, on the GPU of ``slot``."""
        folder = self.work / f"{config}-{rank}-{values.partition(':')[0]}"
        prism = ["--prism-world-size", str(NUM_RANKS), "--prism-ranks", str(rank)]
        prism += ["--prism-values", values, "--prism-out", str(folder)]
        command = [sys.executable, "-m", "megatron_prism", "run", *prism, "--", *self.job(config)]
        environment = dict(self.environment)
        if self.num_gpus > 1:
            environment["CUDA_VISIBLE_DEVICES"] = str(slot % self.num_gpus)
        log = folder.with_suffix(".log")
        with open(log, "wb") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=environment
            )
        return Run(config, rank, values, folder, log, process)

    def alone(self, wanted: list[tuple[str, int, str]], side_by_side: int) -> list[Run]:
        """Every (configuration, rank, values), ``side_by_side`` at a time."""
        slots: list[Run | None] = [None] * side_by_side
        done: list[Run] = []
        waiting = list(wanted)
        while waiting or any(slots):
            for slot, run in enumerate(slots):
                if run is not None and run.process.poll() is not None:
                    collect(run)
                    done.append(run)
                    slots[slot] = run = None
                if run is None and waiting:
                    slots[slot] = self.start(*waiting.pop(0), slot)
            time.sleep(0.2)
        return sorted(done, key=lambda run: wanted.index((run.config, run.rank, run.values)))


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-8:]) if log.exists() else ""


def _peak(file: Path, folder: Path) -> int:
    if not file.exists():
        print(_tail(folder.with_name(f"{folder.name}.log")), file=sys.stderr)
        raise SystemExit(f"the real run {folder.name} did not end well: nothing to compare with")
    stored = json.loads(file.read_text())
    return int(stored.get("memory", stored)["allocated_peak"] or 0)


def collect(run: Run) -> None:
    """Read what a finished rank wrote; a rank that did not train wrote nothing."""
    file = run.folder / f"rank-{run.rank:06d}.json"
    if not file.exists():
        print(f"{run.config} rank {run.rank} did not train:\n{_tail(run.log)}", file=sys.stderr)
        return
    summary = json.loads(file.read_text())
    run.steps = summary["trained"]["steps"]
    run.peak = summary["memory"]["allocated_peak"] or 0


def make_real(bench: Bench, configs: list[str], repeats: int) -> tuple[dict[str, Any], list[str]]:
    """Real runs made here: peaks to compare with by configuration, and how alike they were."""
    peaks: dict[str, Any] = {}
    notes = []
    for config in configs:
        runs = [bench.real(config, number) for number in range(repeats)]
        peaks[config] = runs[0]
        if repeats > 1:
            spread = max((max(p) - min(p)) / max(1, min(p)) for p in zip(*runs, strict=True))
            notes.append(f"{config}: {repeats} plain real runs differ by {100 * spread:.4f} %")
        if config in RECORDED:
            peaks[config] = bench.recorded(config)
            plain = zip(peaks[config], runs[0], strict=True)
            apart = max(abs(a - b) / max(1, b) for a, b in plain)
            notes.append(f"{config}: recorded and plain real run differ by {100 * apart:.4f} %")
        peaks[f"{config} plain"] = runs
    return peaks, notes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scripts", type=Path)
    parser.add_argument("real", type=Path, nargs="?")
    parser.add_argument("--configs", default=",".join(CONFIGS))
    parser.add_argument("--side-by-side", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=1, help="plain real runs of each job")
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--extra", default="", help="more arguments for every job, such as sizes")
    parser.add_argument("--work", type=Path, help="keep logs and recordings in this new folder")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args()
    configs = args.configs.split(",")
    unknown = [c for c in configs if c not in CONFIGS]
    if unknown:
        parser.error(f"no configuration {unknown[0]}; there are {', '.join(CONFIGS)}")
    num_gpus = torch.cuda.device_count()
    if args.real is None and num_gpus < NUM_RANKS:
        parser.error(f"real runs take {NUM_RANKS} GPUs, here are {num_gpus}: give REAL.json")
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=args.work is None)
        bench = Bench(args.scripts, work, num_gpus, args.iterations, shlex.split(args.extra))
        if args.real is None:
            real, notes = make_real(bench, configs, args.repeats)
        else:
            real, notes = json.loads(args.real.read_text())["peaks"], []
        wanted = [(c, r, _values(bench, c)) for c in configs for r in range(NUM_RANKS)]
        runs = bench.alone(wanted, args.side_by_side)
    return report(runs, real, notes, args)


def _values(bench: Bench, config: str) -> str:
    recording = bench.recording(config)
    return f"recorded:{recording}" if recording.is_dir() else "mirror"


def report(runs: list[Run], real: dict[str, Any], notes: list[str], args: Any) -> int:
    """Print the table, write the figures, and say whether all ranks met the bound."""
    columns = ("configuration", "rank", "values", "steps", "real bytes", "emulated", "difference")
    table = Table(*columns, "%", "")
    rows = []
    for run in runs:
        expected, values = real[run.config][run.rank], run.values.partition(":")[0]
        apart = run.peak - expected
        percent = 100 * apart / expected
        ok = run.steps == args.iterations and abs(percent) <= BOUND_PERCENT
        row = {"config": run.config, "rank": run.rank, "values": values, "steps": run.steps}
        row |= {"real": expected, "emulated": run.peak, "difference": apart}
        rows.append({**row, "percent": round(percent, 5), "ok": ok})
        table.add_row(
            run.config,
            str(run.rank),
            values,
            f"{run.steps} of {args.iterations}",
            f"{expected:,}",
            f"{run.peak:,}",
            f"{apart:+,}",
            f"{percent:+.4f}",
            "ok" if ok else "missed",
        )
    Console(width=130).print(table)
    met = sum(row["ok"] for row in rows)
    notes = [*notes, f"{met} of {len(rows)} ranks trained within {BOUND_PERCENT} %"]
    print("\n".join(notes))
    if args.json is not None:
        plain = {k: v for k, v in real.items() if k.endswith(" plain")}
        found = {"notes": notes, "ranks": rows, "real_runs": plain}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if met == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
