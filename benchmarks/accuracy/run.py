"""Compare emulation with real jobs on one machine: time and memory.

``python -m benchmarks.accuracy.run SCRIPTS [--gpus 4] [--configs a,b] [--rounds 4] [--steps 5]
[--beside 5] [--alone-steps 11] [--between 5] [--more "--global-batch-size 8"]
[--json OUT] [--work DIR]``

SCRIPTS holds stock ``pretrain_gpt.py`` and its siblings of Megatron-LM tag core_v0.19.0; the jobs
are those of ``jobs.py``.  OUT gets one record more for every configuration: date, machine, commit,
the predicted time with its interval, the real and the emulated iterations, memory.

Shared hosts drift by a tenth and more within a minute, so a real run and an emulated one that come
one after the other do not see the same host.  Here the processes of the real job and of the
emulated ranks stay in memory side by side (each rank on the GPU that it has in the job), and only
one job makes train steps at a time: a few of the real one, a few of the other, and again
(``turnstile.py``).  For every configuration:

1. a turn of the real job, all of the captures (each rank alone), another turn of the real job: what
   the replay of these slices is compared with (``--rounds 0 --beside 105 --alone-steps 47`` is what
   ``tails_reality.py`` needs).  With ``--between N`` captures and the real job alternate after N
   steps, so that both see the host drift; iterations in which captures stop are left out;
2. ``--rounds`` turns of the real job, and of every rank alone with paced peers.

Ranks begin their rounds after as many train steps as the real job has made.  Every
process keeps to one share of the cores, a rank alone to that of its twin in the real job
(TURNS_PLACES of ``turnstile.py``).  The first iteration of a turn does not count.  Errors are of
medians; beside them the spread of the real job's turns, and of the emulated ones.  One ``prism
calibrate`` comes first, unless the work folder has its ``calibration.json``; nothing is fitted to
the real runs.

Not run on GPUs since it was joined from several runners: the parts that measure are unchanged.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import megatron_prism as prism
from benchmarks.accuracy.jobs import COMMON, EVERY, MORE, NUM_RANKS
from benchmarks.report import commit, machine
from megatron_prism.core.errors import PrismError
from megatron_prism.core.programs.gpu_state import GPU_CLOCK
from megatron_prism.core.programs.slices import open_programs
from megatron_prism.replay.costs.collectives import Calibration, read_calibration
from megatron_prism.runtime.recorder.gpu_clock import sampler

WARM_UP = 3  # iterations
LR_STEPS = 1000  # of every job, however short: what has learned as much is as fast
# percent, mean and most: ours of a replay; PrismLLM's published errors of paced ranks
REPLAY, PACED = (2.0, 5.0), (0.58, 1.98)
KEPT = ("allocated_peak", "reserved_peak", "device_bytes")  # of a rank
ENDLESS = 1000  # train steps of a job that is stopped by us
PATIENCE_S = 150.0  # for one turn, start-up included


@dataclass
class Runner:
    """One job, whose launcher is ``process``, and what it has done so far."""

    folder: Path
    num_ranks: int
    process: subprocess.Popen[bytes]
    steps: int = 0
    turns: list[list[float]] = field(default_factory=list)  # ms of each turn's iterations

    def open(self, steps: int) -> None:
        """Let everybody make ``steps`` train steps in all; 0 starts the program."""
        new = self.folder / "go.new"
        new.write_text(str(steps))
        new.replace(self.folder / "go")

    def stopped(self) -> bool:
        """Whether everybody has come to rest after the steps they may make."""
        files = sorted(self.folder.glob("rank-*.json"))
        found = [json.loads(file.read_text())["steps"] for file in files]
        return len(found) == self.num_ranks and all(steps >= self.steps for steps in found)

    def wait(self) -> bool:
        """Until everybody has; False if somebody ended, or it takes too long."""
        until = time.monotonic() + PATIENCE_S
        while not self.stopped():
            ended = self.process.poll() is not None
            if time.monotonic() > until or ended and not self.stopped():
                return False
            time.sleep(0.01)
        return True

    def lead(self) -> list[float]:
        """ms from start to start of the first rank's iterations; the last of a turn runs to its
        stop."""
        file = min(self.folder.glob("rank-*.json"))
        stored = json.loads(file.read_text())
        starts = [*stored["starts_ns"], stored["stopped_ns"]]
        return [(b - a) / 1e6 for a, b in zip(starts, starts[1:], strict=False)]

    def memory(self) -> list[dict[str, Any]]:
        """Peaks by rank, bytes."""
        files = sorted(self.folder.glob("rank-*.json"))
        return [{k: json.loads(file.read_text()).get(k, 0) for k in KEPT} for file in files]

    def end(self) -> None:
        """Whatever still runs is stopped."""
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


class Turns:
    """Jobs that take turns on one machine; logs, slices and the calibration go to ``work``.

    gpus : of the machine, and ranks of the jobs, each on a GPU of its own
    """

    steps = 5  # of a turn
    beside = 5  # of the real job's turns before and after the captures
    between = 0  # of turns in which captures and the real job alternate
    alone_steps = 11  # of a capture
    more: tuple[str, ...] = ()  # arguments of every job, behind its own
    spans: tuple[tuple[int, int], ...] = ()  # of the real job's turns, ns of ``time.time_ns``

    def __init__(self, scripts: Path, work: Path, gpus: int) -> None:
        self.script, self.work, self.num_ranks = str(scripts / "pretrain_gpt.py"), work, gpus
        root = Path(__file__).resolve().parents[2]
        paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
        self.environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": paths}
        self.environment.setdefault("OMP_NUM_THREADS", "4")

    def job(self, config: str, steps: int) -> list[str]:
        """The script and its arguments."""
        length = ["--train-iters", str(steps), "--lr-decay-iters", str(LR_STEPS)]
        own = {**EVERY[self.num_ranks], **MORE}[config].split()
        return [self.script, *COMMON.split(), *own, *self.more, *length]

    def _start(self, name: str, words: list[str], **environment: str) -> subprocess.Popen[bytes]:
        with open(self.work / f"{name}.log", "wb") as log:
            return subprocess.Popen(
                [sys.executable, *words],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self.environment, **environment},
            )

    def calibrate(self) -> Calibration:
        """Calls among this host's GPUs; those of an earlier run in the same folder, if any."""
        file = self.work / "calibration.json"
        if file.exists():
            return read_calibration(file)
        words = ["-m", "megatron_prism", "calibrate", "-o", str(file)]
        words += ["--processes", str(min(self.num_ranks, NUM_RANKS))]
        self._start("calibrate", words).wait()
        return read_calibration(file)

    def runner(self, name: str, launcher: list[str], program: list[str], ranks: int = 1,
               **environment: str) -> Runner:  # fmt: skip
        """Start ``program`` behind a turnstile, where it waits."""
        folder = self.work / f"{name}-turns"
        folder.mkdir(parents=True)
        gate = [str(Path(__file__).with_name("turnstile.py")), str(folder)]
        environment["TURNS_PLACES"] = str(self.num_ranks)
        process = self._start(f"{name}-log", [*launcher, *gate, *program], **environment)
        return Runner(folder, ranks, process)

    def real_job(self, config: str) -> Runner:
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(self.num_ranks)]
        return self.runner(f"{config}-real", launcher, self.job(config, ENDLESS), self.num_ranks)

    def emulated(self, name: str, rank: int, config: str, steps: int, *ours: str) -> Runner:
        """One emulated rank, on the GPU that it has in the job; behind that are the GPUs to which
        words go that keep the links awake."""
        name, count = f"{name}-{rank}", self.num_ranks
        words = ["-m", "megatron_prism", "run", "--prism-world-size", str(count)]
        words += ["--prism-ranks", str(rank), "--prism-force", *ours]
        words += ["--prism-out", str(self.work / name), "--", *self.job(config, steps)]
        gpus = ",".join(str((rank + i) % count) for i in range(count))
        return self.runner(name, [], words, CUDA_VISIBLE_DEVICES=gpus, TURNS_PLACE=str(rank))

    def captures(self, config: str, folder: Path) -> list[Runner]:
        """Every rank alone, to be captured into ``folder``."""
        flags, steps = ["--prism-capture", str(folder)], self.alone_steps
        name = f"{config}-capture"
        return [self.emulated(name, r, config, steps, *flags) for r in range(self.num_ranks)]

    def paced_ranks(self, config: str) -> list[Runner]:
        """Every rank alone, with paced peers."""
        flags, name = ["--prism-pace", str(self.work / f"{config}-slices")], f"{config}-paced"
        return [self.emulated(name, r, config, ENDLESS, *flags) for r in range(self.num_ranks)]


def predict(folder: Path, calibration: Calibration) -> dict[str, float]:
    """Predicted iteration time and the printed interval, ms."""
    found = prism.replay(prism.load(folder), calibration=calibration).to_json()
    names = {"predicted_ms": "iteration_ns", "low_ms": "low_ns", "high_ms": "high_ns"}
    return {name: found[key] / 1e6 for name, key in names.items() if found.get(key) is not None}


def everybody(runners: Sequence[Runner]) -> bool:
    """Wait for all; False if one ended."""
    found = [runner.wait() for runner in runners]
    return all(found)


def together(runners: Sequence[Runner], steps: int, skipped: int = 1) -> bool:
    """One turn of several jobs that run side by side on GPUs of their own."""
    before = [runner.steps for runner in runners]
    for runner in runners:
        runner.steps += steps
        runner.open(runner.steps)
    fine = everybody(runners)
    if fine:
        for runner, begun in zip(runners, before, strict=True):
            runner.turns.append(runner.lead()[begun:][skipped:])
    return fine


def captured(turns: Turns, real: Runner, runners: Sequence[Runner]) -> bool:
    """Phase 1: the captures, between two turns of the real job."""
    try:
        for runner in (real, *runners):
            runner.open(0)
        fine = everybody((real, *runners))  # booted, none has begun
        begin = time.time_ns()
        fine = fine and together([real], WARM_UP + turns.beside, WARM_UP)
        turns.spans = ((begin + (time.time_ns() - begin) // 2, time.time_ns()),)
        for _ in range((turns.alone_steps - 1) // turns.between if turns.between else 0):
            fine = fine and together(runners, turns.between)
            fine = fine and together([real], turns.between)
        for runner in runners if fine else ():
            runner.open(ENDLESS)
        fine = fine and not any(runner.process.wait(PATIENCE_S) for runner in runners)
    except subprocess.TimeoutExpired:
        return False
    finally:
        for runner in runners:
            runner.end()
    return fine and together([real], turns.beside)


def rounds(
    turns: Turns, groups: Sequence[Sequence[Runner]], count: int, learned: int = WARM_UP
) -> bool:
    """Phase 2: ``count`` turns of everybody, each after ``learned`` steps or more.

    GPUs at their power limit are as fast as their data let them, and data change as a model learns.
    """
    for group in groups:
        for runner in group:
            runner.open(runner.steps)
    begun = everybody([runner for group in groups for runner in group])
    for group in groups:
        fresh = [runner for runner in group if not runner.steps]
        begun = begun and together(fresh, learned)
        for runner in fresh:
            runner.turns = []
    return begun and all(together(group, turns.steps) for _ in range(count) for group in groups)


def of_captures(folder: Path) -> list[dict[str, Any]]:
    """What each slice has of an iteration: ms of its device and host, and of the timed ones."""
    return [
        {
            "rank": one.rank,
            "device_ms": round(float(one.ops["ns"].clip(0).sum()) / 1e6, 2),
            "host_ms": round(float(one.ops["host"].clip(0).sum()) / 1e6, 2),
            "timed_ms": (one.samples.sum(axis=1) / 1e6).round(1).tolist(),
        }
        for one in open_programs(folder).programs
    ]


def median(turns: Sequence[Sequence[float]]) -> float | None:
    every = [ms for turn in turns for ms in turn]
    return statistics.median(every) if every else None


def spread(turns: Sequence[Sequence[float]]) -> float | None:
    """How far apart the medians of turns are, percent of the median."""
    medians = [statistics.median(turn) for turn in turns if turn]
    whole = median(turns)
    return 100 * (max(medians) - min(medians)) / whole if whole else None


def percent(found: float | None, real: float | None) -> float | None:
    return None if not found or not real else 100 * (found / real - 1)


def replayed(turns: Turns, config: str, real: Runner) -> dict[str, Any]:
    """Slices that are captured in turns with the real job, and their replay beside it."""
    folder = turns.work / f"{config}-slices"
    samplers = [sampler(device) for device in range(turns.num_ranks)]
    row: dict[str, Any] = {"captured": captured(turns, real, turns.captures(config, folder))}
    for one in filter(None, samplers):
        one.stop()
    row["clocks"] = [str(one.state(turns.spans)) for one in samplers if one is not None]
    row["real_ms"] = median(real.turns)
    row["spread_percent"] = spread(real.turns)
    row["iterations_ms"] = [ms for turn in real.turns for ms in turn]
    folder.mkdir(exist_ok=True)
    written = turns.calibrate()
    shutil.copy(turns.work / "calibration.json", folder)
    try:
        if row["captured"]:  # ranks without a slice would run somebody else's
            row["captures"] = of_captures(folder)
            row["capture_clocks"] = open_programs(folder).source.get(GPU_CLOCK, "")
            row |= predict(folder, written)
    except (PrismError, OSError) as error:
        print(f"{config}: {error}", file=sys.stderr)
    return row


def measure(turns: Turns, config: str, args: argparse.Namespace) -> dict[str, Any]:
    """One configuration."""
    begin = time.time()
    row: dict[str, Any] = {"config": config, "more": " ".join(turns.more), "whole": True}
    # all start now, which takes long; GPUs hold only what has been opened
    real = turns.real_job(config)
    groups = {"real": [real], "paced": turns.paced_ranks(config)}
    try:
        row |= replayed(turns, config, real)
        learned, real.turns = real.steps, []
        if args.rounds and row["captured"]:  # ranks without slices would wait for nothing
            row["whole"] = rounds(turns, list(groups.values()), args.rounds, learned)
            row["groups"] = {
                name: [{"turns_ms": list(r.turns), "memory": r.memory()} for r in group]
                for name, group in groups.items()
            }
            row["nccl"] = nccl_of(turns.work, config, turns.num_ranks)
    finally:
        for runner in (one for group in groups.values() for one in group):
            runner.end()
    row["took_s"] = round(time.time() - begin, 1)
    return row


def nccl_of(work: Path, config: str, num_ranks: int) -> list[int | None]:
    """Bytes that NCCL would take for each rank, as the summaries of its captures say."""
    found = []
    for rank in range(num_ranks):
        files = list((work / f"{config}-capture-{rank}").glob("rank-*.json"))
        found.append(json.loads(files[0].read_text())["memory"].get("nccl") if files else None)
    return found


def memory_lines(row: dict[str, Any]) -> list[str]:
    """A line for each of the three levels; none without rounds."""
    groups = row.get("groups") or {}
    real = [one for runner in groups.get("real", ()) for one in runner.get("memory", ())]
    paced = [one for runner in groups.get("paced", ()) for one in runner.get("memory", ())]
    if not real or len(real) != len(paced):
        return []
    pairs = list(zip(real, paced, strict=True))
    lines = [_line(f"{level} peak", [(a[f"{level}_peak"], b[f"{level}_peak"]) for a, b in pairs])
             for level in ("allocated", "reserved")]  # fmt: skip
    held = [[(one.get("device_bytes") or {}).get("own") for one in pair] for pair in pairs]
    parts = row.get("nccl") or [None] * len(held)
    device = [(one, other + nccl) for (one, other), nccl in zip(held, parts, strict=True)
              if None not in (one, other, nccl)]  # fmt: skip
    what = "device, with NCCL's part (modelled)"
    lines.append(_line(what, device) if device else f"  {what}: not told by the driver")
    return lines


def _line(what: str, pairs: Sequence[tuple[int, int]]) -> str:
    found = (f"{b - a:+,} B ({100 * (b / a - 1):+.2f} %)" if a else "-" for a, b in pairs)
    return f"  {what}, paced ranks: {', '.join(found)}"


def table(rows: Sequence[dict[str, Any]]) -> int:
    """Print the figures; 0 if every bound was met."""
    replays, felt = [], []
    whole, paced = bool(rows), False
    for row in rows:
        whole = whole and row.get("captured", False) and row.get("whole", False)
        error = percent(row.get("predicted_ms"), row.get("real_ms"))
        replays += [] if error is None else [error]
        print(f"{row['config']}: real beside captures {_ms(row.get('real_ms'))}, "
              f"replayed {_ms(row.get('predicted_ms'))} ({_percent(error)})")  # fmt: skip
        turns = {k: [one["turns_ms"] for one in v] for k, v in row.get("groups", {}).items()}
        paced = paced or bool(turns)
        whole = whole and all(all(runs) for runs in turns.values())
        base = median(turns["real"][0]) if turns else None
        for name, runs in turns.items():
            medians = [median(run) for run in runs]
            errors = [percent(ms, base) for ms in medians]
            felt += [e for e in errors if e is not None] if name == "paced" else []
            print(f"  {name}: {', '.join(map(_ms, medians))} "
                  f"({', '.join(map(_percent, errors))}), "
                  f"spread {', '.join(_percent(spread(run)) for run in runs)}")  # fmt: skip
        for line in memory_lines(row):
            print(line)
    ends = []
    for name, errors, (mean, most) in (("replay", replays, REPLAY), ("paced", felt, PACED)):
        if errors:
            average, worst = statistics.fmean(map(abs, errors)), max(map(abs, errors))
            print(f"{name}: mean |error| {average:.2f} % (bound {mean}), "
                  f"most {worst:.2f} % ({most})")  # fmt: skip
            ends.append(average <= mean and worst <= most)
    return 0 if whole and len(ends) == 1 + paced and all(ends) else 1


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f} %"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scripts", type=Path)
    parser.add_argument("--gpus", type=int, choices=tuple(EVERY), default=NUM_RANKS)
    parser.add_argument("--configs", help="by default all of that many GPUs")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=Turns.steps, help="of a turn")
    parser.add_argument("--beside", type=int, default=Turns.beside, help="of turns of phase 1")
    parser.add_argument("--between", type=int, default=0, help="alternate in the captures, too")
    parser.add_argument("--alone-steps", type=int, default=11, help="of a capture")
    parser.add_argument("--more", default="", help="arguments that every job gets, too")
    parser.add_argument("--work", type=Path, help="keep logs and slices in this folder")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the jobs are ended, too
    rows: list[dict[str, Any]] = []
    there = args.json is not None and args.json.exists()
    kept = json.loads(args.json.read_text())["rows"] if there else []  # records are appended
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        turns = Turns(args.scripts, work, args.gpus)
        turns.steps, turns.beside = args.steps, args.beside
        turns.alone_steps, turns.between = args.alone_steps, args.between
        turns.more = tuple(args.more.split())
        turns.calibrate()
        for config in (args.configs or ",".join(EVERY[turns.num_ranks])).split(","):
            row = {"date": f"{datetime.date.today()}", "machine": machine(), "commit": commit()}
            rows.append(row | measure(turns, config, args))
            table(rows[-1:])
            if args.json is not None:  # what is there is worth having if the rest fails
                args.json.write_text(json.dumps({"rows": [*kept, *rows]}, indent=1) + "\n")
    return table(rows)


if __name__ == "__main__":
    sys.exit(main())
