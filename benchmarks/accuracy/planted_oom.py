"""An out-of-memory of one class of a 1,024-rank job: predicted without a GPU, met on one.

``python -m benchmarks.accuracy.planted_oom plan SCRIPTS PLAN.json [--work DIR]``     no GPU, four
minutes
``python -m benchmarks.accuracy.planted_oom run SCRIPTS PLAN.json [--json OUT]``      one GPU, a
minute

The job has an uneven pipeline (3, 2, 2 and 1 layers), so its first stage needs more than the
second.  ``plan`` captures one rank of every stage on tier meta, sets a limit between the peaks of
the two hungriest classes and writes down what ``prism memory check --limit`` says: which class runs
out of memory, in which step, at which line, and by how many bytes the limit is too low.  The limit
falls into the middle of the largest request of the first class beyond the second's peak, so that a
model that is off by less than half of it is right.  ``run`` starts side by side on one GPU, with
the allocator limited: the class that shall run out (and compares where it does), the one that shall
not, and the first with the limit raised by the reported bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from megatron_prism.core import program
from megatron_prism.core.program import Program
from megatron_prism.memory import peaks
from megatron_prism.memory.allocator import Settings

HERE = Path(__file__).resolve().parent
WORLD, STAGES = 1024, 4
CONF = "expandable_segments:True"
JOB = """
--transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion
--num-layers 8 --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 1
--hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336 --swiglu
--disable-bias-linear --normalization RMSNorm --position-embedding-type rope
--untie-embeddings-and-output-weights --seq-length 8192 --max-position-embeddings 8192
--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --micro-batch-size 1
--global-batch-size 256 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 32000
--bf16 --use-distributed-optimizer --no-gradient-accumulation-fusion --eval-iters 0
--eval-interval 1000 --log-interval 1 --attention-dropout 0 --hidden-dropout 0
--distributed-timeout-minutes 3 --train-iters 3 --num-workers 0
"""
RAN_OUT = re.compile(
    r"ran out of device memory in (?:iteration \d+, )?phase (\w+), microbatch (\d+)"
    r"(?:, chunk \d+)?(?:, at (\S+))?"
)


def command(rank: int, *ours: str) -> list[str]:
    """One rank of the job alone."""
    return [sys.executable, "-m", "megatron_prism", "run", "--prism-world-size", str(WORLD),
            "--prism-ranks", str(rank), *ours, "--", str(HERE / "limited_job.py"),
            *JOB.split()]  # fmt: skip


def environment(scripts: Path, limit: int = 0) -> dict[str, str]:
    script = str(scripts.resolve() / "pretrain_gpt.py")
    paths = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": paths, "LIMIT_BYTES": str(limit), "LIMITED_SCRIPT": script,
            "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": "ignore",
            "PYTORCH_CUDA_ALLOC_CONF": CONF, "PYTORCH_ALLOC_CONF": CONF}  # fmt: skip


# -- without a GPU --------------------------------------------------------------------------------
def plan(scripts: Path, file: Path, work: Path) -> None:
    """Capture, predict, write ``file``."""
    found = {}
    for stage in range(STAGES):
        rank = stage * WORLD // STAGES
        slices = work / "slices"
        path = slices / f"slice-{rank:06d}.prism"
        if not path.exists():
            words = command(rank, "--prism-tier", "meta", "--prism-capture", str(slices))
            done = subprocess.run(words, env=environment(scripts), capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"rank {rank} failed:\n{done.stderr[-2000:]}")
        found[rank] = program.load(path).programs[0]
    made = predicted(found)
    file.write_text(json.dumps(made, indent=1) + "\n")
    print(json.dumps(made, indent=1))


def predicted(found: dict[int, Program]) -> dict[str, Any]:
    """The limit, and what happens with it."""
    settings = Settings.parse(CONF)
    tops = {rank: peaks.peak(program) for rank, program in found.items()}
    order = sorted(found, key=lambda rank: -tops[rank].num_bytes)
    first, second = order[:2]
    replay = peaks.allocator.replay_requests
    reserved = {rank: replay(peaks.changes(found[rank]), settings).peak_reserved
                for rank in order}  # fmt: skip
    limit = _limit(found[first], reserved[second])
    out = peaks.overflow(found[first], limit, settings)
    if out is None or out.op is None or peaks.overflow(found[second], limit, settings):
        raise SystemExit("no limit between the two peaks stops the first class alone")
    return {
        "limit": limit,
        "over": first,
        "under": second,
        "allocated": {rank: tops[rank].num_bytes for rank in order},
        "reserved": reserved,
        "phase": out.op.phase,
        "microbatch": out.op.microbatch,
        "site": out.site,
        "request": out.size,
        "raise_by": reserved[first] - limit,
    }


def _limit(program: Program, above: int) -> int:
    """In the middle of the largest step of a forward beyond ``above`` that reaches a new height
    (in a backward the line of Megatron would be that of the schedule)."""
    live, events = program.live_bytes(), program.allocations
    rows = zip(live.tolist(), events["bytes"].tolist(), events["before"].tolist(), strict=True)
    high, best = 0, (0, 0)
    for now, change, before in rows:
        forward = program[min(before, len(program) - 1)].phase == "forward"
        if forward and now > high and now - change > 1.02 * above:
            best = max(best, (change, now - change // 2))
        high = max(high, now)
    return best[1]


# -- on one GPU -----------------------------------------------------------------------------------
def run(scripts: Path, made: dict[str, Any], work: Path) -> tuple[list[dict[str, Any]], int]:
    """All three at once; (rows, how many were not as predicted)."""
    over, under, limit = made["over"], made["under"], made["limit"]
    jobs = {
        "over": (over, limit),
        "under": (under, limit),
        "raised": (over, limit + made["raise_by"]),
    }
    running = {}
    for name, (rank, bytes_) in jobs.items():
        words = command(rank, "--prism-tier", "cuda", "--prism-out", str(work / name))
        log = open(work / f"{name}.log", "wb")  # noqa: SIM115 - closed with the process
        running[name] = subprocess.Popen(
            words, env=environment(scripts, bytes_), stdout=log, stderr=log
        )
    rows, wrong = [], 0
    for name, process in running.items():
        rank, bytes_ = jobs[name]
        status = process.wait()
        text = (work / f"{name}.log").read_text(errors="replace")
        row: dict[str, Any] = {"job": name, "rank": rank, "limit": bytes_, "status": status}
        row |= _memory(work / name / f"rank-{rank:06d}.json", made["allocated"][str(rank)])
        match = RAN_OUT.search(text)
        if match:
            row |= {"phase": match[1], "microbatch": int(match[2]), "site": match[3] or ""}
            row["said"] = text[match.start() - 60 : match.end() + 400]
        good = status == 0
        if name == "over":
            good = status == 1 and all(row.get(k) == made[k] for k in ("phase", "microbatch"))
            row["same_line"] = row.get("site") == made["site"]
        row["as_predicted"] = good
        wrong += not good or row.get("same_line") is False
        if not good:
            row["log"] = text[-1500:]
        rows.append(row)
    return rows, wrong


def _memory(file: Path, predicted_bytes: int) -> dict[str, Any]:
    """Peaks of a job that ended well, and how far off the prediction without a GPU was."""
    if not file.exists():
        return {}
    stored = json.loads(file.read_text())["memory"]
    kept = ("allocated_peak", "reserved_peak", "device_used", "nccl_reserve", "by_phase")
    found = {key: stored[key] for key in kept if stored.get(key)}
    found["predicted_percent"] = 100 * (predicted_bytes / stored["allocated_peak"] - 1)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=("plan", "run"))
    parser.add_argument("scripts", type=Path)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--work", type=Path, help="keep slices and logs in this folder")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        if args.action == "plan":
            plan(args.scripts, args.plan, work)
            return 0
        begin, made = time.time(), json.loads(args.plan.read_text())
        rows, wrong = run(args.scripts, made, work)
        found = {"plan": made, "rows": rows, "took_s": round(time.time() - begin, 1)}
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
