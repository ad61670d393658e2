"""How far off is the predicted iteration time?  Real and predicted back to back on one machine.

``python benchmarks/accuracy.py SCRIPTS [--configs a,b] [--json OUT] [--work DIR]
[--real-steps N] [--alone-steps N] [--more "--global-batch-size 8"]`` (``tails_reality.py``
wants 213 and 47 steps or more, and short ones)

SCRIPTS holds stock ``pretrain_gpt.py`` and its siblings of Megatron-LM tag core_v0.19.0.  On a host
with 4 GPUs, for every configuration: the real job on 4 GPUs; then every rank alone on one GPU with
``--prism-capture`` (four of them side by side, each on a GPU of its own).  ``prism calibrate`` runs
once.  Prediction is the replay of those slices with those calls; nothing is fitted to real runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from groundtruth import COMMON, CONFIGS, LOCAL, MOE, NUM_RANKS, TE

import megatron_prism as prism
from megatron_prism.core.errors import PrismError
from megatron_prism.replay.costs.collectives import Calibration, read_calibration

REAL_STEPS, ALONE_STEPS, WARM_UP = 12, 8, 3
LR_STEPS = 1000  # of every job, however short: what has learned as much is as fast
LLAMA_7B = """
--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --num-query-groups 32
--ffn-hidden-size 11008 --seq-length 4096 --max-position-embeddings 4096
"""
JOBS = {
    **CONFIGS,
    "llama7b_tp4_mb1": f"{TE} {LLAMA_7B} --tensor-model-parallel-size 4 --global-batch-size 8",
    "llama7b_tp4_mb2": f"{TE} {LLAMA_7B} --tensor-model-parallel-size 4 --micro-batch-size 2"
    " --global-batch-size 16",
    "llama7b_dp2tp2": f"{TE} {LLAMA_7B} --tensor-model-parallel-size 2 --global-batch-size 8",
}
SP, PP2 = "--sequence-parallel", "--pipeline-model-parallel-size 2"
LLAMA3_8B = """
--num-layers 32 --vocab-size 128256 --seq-length 8192 --max-position-embeddings 8192
--rotary-base 500000 --global-batch-size 16
"""
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
JOBS8 = {
    "tp2pp2dp2vp2ov": f"{TE} --tensor-model-parallel-size 2 {SP} {PP2} {OVERLAP}"
    " --num-layers-per-virtual-pipeline-stage 4",
    "tp4pp2": f"{TE} --tensor-model-parallel-size 4 {SP} {PP2}",
    "tp8": f"{TE} --tensor-model-parallel-size 8 {SP}",
    "pp8vp2": f"{TE} --pipeline-model-parallel-size 8 --num-layers-per-virtual-pipeline-stage 1",
    "dp8ov": f"{TE} --num-layers 8 {OVERLAP}",
    "moe_ep8": f"{TE} {MOE.replace('parallel-size 4', 'parallel-size 8')}",
    "cp2tp2dp2": f"{TE} --context-parallel-size 2 --tensor-model-parallel-size 2 {SP}",
    "cp2tp2dp2_fp8": f"{TE} --context-parallel-size 2 --tensor-model-parallel-size 2 {SP}"
    " --fp8-format hybrid",
    "llama3_8b_tp4dp2": f"{TE} {LLAMA3_8B} --tensor-model-parallel-size 4 {SP} {OVERLAP}",
}
TWO = "--tensor-model-parallel-size 2"
MORE = {  # context parallelism and FP8: by name only, none of the nine jobs
    "te_cp2tp2": f"{TE} --context-parallel-size 2 {TWO} {SP}",
    "te_cp2tp2_fp8": f"{TE} --context-parallel-size 2 {TWO} {SP} --fp8-format hybrid",
    "te_cp2": f"{TE} --context-parallel-size 2",
    "te_cp2_fp8": f"{TE} --context-parallel-size 2 --fp8-format hybrid",
}
JOBS2 = {  # what two GPUs can say about the same effects
    "tp2": f"{LOCAL} {TWO}",
    "pp2": f"{LOCAL} {PP2}",
    "dp2ov": f"{LOCAL} --num-layers 8 {OVERLAP}",
    "te_tp2sp": f"{TE} {TWO} {SP}",
    "te_pp2vp2": f"{TE} {PP2} --num-layers-per-virtual-pipeline-stage 4",
    "te_moe_ep2": f"{TE} {MOE.replace('parallel-size 4', 'parallel-size 2')}",
    "llama7b_tp2": f"{TE} {LLAMA_7B} {TWO} --num-layers 16 --global-batch-size 8",
}
EVERY = {2: JOBS2, 4: JOBS, 8: JOBS8}  # by GPUs
BOUND_MEAN, BOUND_MAX = 2.0, 5.0  # percent


class Sitting:
    """One machine, one sitting: real runs, captures and the calibration go to ``work``.

    num_ranks : ranks of the jobs, each on a GPU of its own
    """

    num_ranks = NUM_RANKS
    more: tuple[str, ...] = ()  # arguments of every job, behind its own

    def __init__(
        self,
        scripts: Path,
        work: Path,
        real_steps: int = REAL_STEPS,
        alone_steps: int = ALONE_STEPS,
    ) -> None:
        self.script, self.work = str(scripts / "pretrain_gpt.py"), work
        self.real_steps, self.alone_steps = real_steps, alone_steps
        root = Path(__file__).resolve().parent.parent
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

    def real(self, config: str) -> list[float]:
        """Iteration times of the real job, ms, without the warm-up; empty if it failed."""
        folder = self.work / f"{config}-real"
        program = str(Path(__file__).with_name("real_steps.py"))
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(self.num_ranks), program, str(folder)]
        self._start(folder.name, [*launcher, *self.job(config, self.real_steps)]).wait()
        file = folder / "rank-0.json"
        if not file.exists():
            return []
        return json.loads(file.read_text())["iteration_ms"][WARM_UP:]

    def capture(self, config: str) -> Path:
        """Every rank alone, each on a GPU of its own."""
        folder = self.work / f"{config}-slices"
        running = []
        for rank in range(self.num_ranks):
            ours = ["--prism-world-size", str(self.num_ranks), "--prism-ranks", str(rank)]
            ours += ["--prism-capture", str(folder)]
            words = [
                "-m",
                "megatron_prism",
                "run",
                *ours,
                "--",
                *self.job(config, self.alone_steps),
            ]
            name = f"{config}-alone-{rank}"
            running.append(
                self._start(name, words, CUDA_VISIBLE_DEVICES=gpus_of([rank], self.num_ranks))
            )
        for process in running:
            process.wait()
        return folder

    def calibrate(self) -> Calibration:
        """Calls among this host's GPUs; those of an earlier run in the same folder, if any."""
        file = self.work / "calibration.json"
        if file.exists():
            return read_calibration(file)
        words = ["-m", "megatron_prism", "calibrate", "-o", str(file)]
        words += [f"processes={min(self.num_ranks, NUM_RANKS)}"]
        self._start("calibrate", words).wait()
        return read_calibration(file)


def gpus_of(ranks: Sequence[int], count: int) -> str:
    """The GPUs of local ranks, and behind them their neighbours, to which words go that keep
    the links awake."""
    behind = [(ranks[-1] + i) % count for i in range(1, count)]
    return ",".join(map(str, [*ranks, *(gpu for gpu in behind if gpu not in ranks)]))


def predict(folder: Path, calibration: Calibration) -> float:
    """Predicted iteration time, ms."""
    return prism.replay(prism.load(folder), calibration=calibration).iteration_ns / 1e6


def measure(sitting: Sitting, config: str) -> dict[str, Any]:
    """The real job and the captures of one configuration."""
    begin = time.time()
    real = sitting.real(config)
    sitting.capture(config)
    row: dict[str, Any] = {"config": config, "iterations_ms": real, "real_ms": None}
    if real:
        row["real_ms"] = statistics.median(real)
        row["spread_percent"] = 100 * (max(real) - min(real)) / row["real_ms"]
    row["predicted_ms"], row["took_s"] = None, round(time.time() - begin, 1)
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def table(rows: list[dict[str, Any]]) -> int:
    """Print what was found; 0 if both bounds were met."""
    head = f"{'configuration':18} {'real ms':>9} {'spread':>8} {'predicted':>10} {'error':>8}"
    print(head)
    errors = []
    for row in rows:
        if row.get("predicted_ms") is None or row["real_ms"] is None:
            print(f"{row['config']:18} {'failed':>9}")
            continue
        errors.append(100 * (row["predicted_ms"] / row["real_ms"] - 1))
        print(
            f"{row['config']:18} {row['real_ms']:9.1f} {row['spread_percent']:7.2f}% "
            f"{row['predicted_ms']:10.1f} {errors[-1]:+7.2f}%"
        )
    if not errors:
        return 1
    mean = statistics.fmean(abs(e) for e in errors)
    worst = max(abs(e) for e in errors)
    print(f"mean |error| {mean:.2f} % (bound {BOUND_MEAN}), maximum {worst:.2f} % ({BOUND_MAX})")
    whole = len(errors) == len(rows)
    return 0 if whole and mean <= BOUND_MEAN and worst <= BOUND_MAX else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scripts", type=Path)
    parser.add_argument("--configs", default=",".join(JOBS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", type=Path, help="keep logs and slices in this folder")
    parser.add_argument("--more", default="", help="arguments that every job gets, too")
    parser.add_argument("--real-steps", type=int, default=REAL_STEPS)
    parser.add_argument("--alone-steps", type=int, default=ALONE_STEPS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        sitting = Sitting(args.scripts, work, args.real_steps, args.alone_steps)
        sitting.more = tuple(args.more.split())
        calibration = sitting.calibrate()
        rows = [measure(sitting, config) for config in args.configs.split(",")]
        for row in rows:
            try:
                row["predicted_ms"] = predict(work / f"{row['config']}-slices", calibration)
            except (PrismError, OSError) as error:  # the other rows are still worth having
                print(f"{row['config']}: {error}", file=sys.stderr)
    if args.json is not None:
        args.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    return table(rows)


if __name__ == "__main__":
    sys.exit(main())
