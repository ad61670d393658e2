"""NVIDIA's published H100 jobs of today, predicted without a GPU from their launch lines.

``python -m benchmarks.accuracy.summaries CHECKOUT --keep DIR [JOB …]``; ``… table`` prints alone

The rows are half of those for H100 in Megatron-Bridge's docs/performance-summary-archive.md: even
line numbers at 067f987.  Each is one of ``JOBS``: flags of Megatron-LM core_v0.19.0 that say what
the recipe of the row's release says (perf_recipes, scripts/performance before; 26.06: v0.6.0,
26.04.01: v0.5.0, 26.04: v0.4.0, 26.02: v0.3.0, 25.11: v0.2.0, 25.09: v0.1.0rc4).  ``prism capture``
makes slices in DIR on tier ``meta``, unless they are there; ``prism replay`` predicts the iteration
on ``machine=h100``.  Nothing is fitted to the published figures.  Appends to
``results/published_summaries.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, commit, machine

RESULT = RESULTS / "published_summaries.json"
COMMON = (
    "--normalization RMSNorm --untie-embeddings-and-output-weights --lr 1e-4 --mock-data "
    "--tokenizer-type NullTokenizer --bf16 --grad-reduce-in-bf16 --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather --eval-iters 0 --eval-interval 1000 "
    "--train-iters 50 --attention-dropout 0 --hidden-dropout 0 --cross-entropy-loss-fusion "
    "--cross-entropy-fusion-impl native --no-check-for-nan-in-loss-and-grad --manual-gc "
    "--manual-gc-interval 100 --no-create-attention-mask-in-dataloader --position-embedding-type "
    "rope"
)
FP8 = "--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather"
MOE = (
    "--moe-grouped-gemm --moe-router-force-load-balancing --moe-router-dtype fp32 "
    "--moe-permute-fusion"
)
LLAMA = (
    "--swiglu --disable-bias-linear --group-query-attention --num-query-groups 8 --rotary-base "
    "500000 --seq-length 8192 --max-position-embeddings 8192 --vocab-size 128255 "
)
LLAMA_8B = f"{LLAMA} --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 " + (
    "--num-attention-heads 32"
)
LLAMA_70B = f"{LLAMA} --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 " + (
    "--num-attention-heads 64"
)
LLAMA_405B = f"{LLAMA} --num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 " + (
    "--num-attention-heads 128"
)
QWEN = (
    "--swiglu --disable-bias-linear --group-query-attention --num-query-groups 4 --kv-channels 128 "
    "--rotary-base 1000000 --qk-layernorm --seq-length 4096 --max-position-embeddings 4096 "
    "--vocab-size 151935 --num-experts 128 --moe-router-topk 8 --moe-router-load-balancing-type "
    "aux_loss --moe-aux-loss-coeff 1e-3 --moe-router-fusion"
)
QWEN_30B = f"{QWEN} --num-layers 48 --hidden-size 2048 --num-attention-heads 32 " + (
    "--ffn-hidden-size 6144 --moe-ffn-hidden-size 768"
)
QWEN_235B = f"{QWEN} --num-layers 94 --hidden-size 4096 --num-attention-heads 64 " + (
    "--ffn-hidden-size 12288 --moe-ffn-hidden-size 1536"
)
GPT_OSS = (
    "--num-layers 36 --hidden-size 2880 --num-attention-heads 64 --group-query-attention "
    "--num-query-groups 8 --kv-channels 64 --ffn-hidden-size 2880 --moe-ffn-hidden-size 2880 "
    "--num-experts 128 --moe-router-topk 4 --quick-geglu --glu-linear-offset 1.0 "
    "--activation-func-clamp-value 7.0 --softmax-type learnable --window-size 127,0 "
    "--window-attn-skip-freq 2 --rotary-base 150000 --seq-length 4096 --max-position-embeddings "
    "4096 --vocab-size 201087 --moe-router-load-balancing-type none --no-bias-dropout-fusion"
)
NANO = (
    "--hybrid-layer-pattern MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME "
    "--hidden-size 2688 --mamba-num-heads 64 --mamba-head-dim 64 --mamba-state-dim 128 "
    "--mamba-num-groups 8 "
    "--kv-channels 128 --ffn-hidden-size 1856 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 2 --num-experts 128 --moe-ffn-hidden-size 1856 "
    "--moe-shared-expert-intermediate-size 3712 --moe-router-topk 6 "
    "--moe-router-topk-scaling-factor 2.5 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss "
    "--moe-aux-loss-coeff 1e-4 --squared-relu --disable-bias-linear --seq-length 8192 "
    "--max-position-embeddings 8192 --vocab-size 131071 --position-embedding-type none"
)
HYBRID_EP = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep"
SPLIT = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"


@dataclass(frozen=True)
class Job:
    """A job of the summaries.

    rows   : (line, global batch, tokens per second and GPU), as published
    queues : CUDA_DEVICE_MAX_CONNECTIONS
    open   : what the recipe of the row's release may have had otherwise
    """

    name: str
    gpus: int
    seq: int
    rows: tuple[tuple[int, int, float], ...]
    flags: str
    queues: int = 1
    script: str = "pretrain_gpt.py"
    open: str = ""


JOBS = (
    Job(
        "Llama 3 8B, FSDP, FP8", 8, 8192, ((628, 128, 14079),),
        f"{COMMON} --fp8-format hybrid --fp8-recipe tensorwise {LLAMA_8B} --micro-batch-size 1 "
        "--global-batch-size 128 "
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
        "--ckpt-format fsdp_dtensor --init-model-with-meta-device",
        queues=8, open="gathers parameters in BF16; the row's in FP8, with user buffers",
    ),
    Job(
        "Llama 3 70B, FP8", 64, 8192, ((308, 256, 1633), (590, 128, 1602)),
        f"{COMMON} {FP8} {LLAMA_70B} --tensor-model-parallel-size 4 --sequence-parallel "
        "--pipeline-model-parallel-size 8 --num-virtual-stages-per-pipeline-rank 5 "
        "--micro-batch-size 1 --global-batch-size 256",
        open="--tp-comm-overlap, which is not modelled",
    ),
    Job(
        "Llama 3.1 405B, FP8", 1024, 8192, ((106, 1536, 326), (630, 512, 302)),
        f"{COMMON} {FP8} {LLAMA_405B} --tensor-model-parallel-size 8 --sequence-parallel "
        "--pipeline-model-parallel-size 8 --num-virtual-stages-per-pipeline-rank 8 "
        f"--context-parallel-size 2 {SPLIT} --micro-batch-size 1 --global-batch-size 1536",
        open="--tp-comm-overlap, which is not modelled",
    ),
    Job(
        "Qwen3 30B-A3B, FP8, ep 16", 16, 4096, ((132, 1024, 8826), (248, 1024, 8960),
                                              (348, 1024, 8901)),
        f"{COMMON} {FP8} {MOE} {QWEN_30B} {HYBRID_EP} --moe-hybridep-num-sms 32 "
        "--expert-model-parallel-size 16 --micro-batch-size 1 --global-batch-size 1024",
        queues=32,
    ),
    Job(
        "Qwen3 30B-A3B, FP8, pp 2", 16, 4096, ((530, 1024, 5113),),
        f"{COMMON} {FP8} {MOE} {QWEN_30B} --moe-token-dispatcher-type flex "
        "--moe-flex-dispatcher-backend deepep --overlap-moe-expert-parallel-comm "
        "--delay-wgrad-compute --pipeline-model-parallel-size 2 "
        "--num-virtual-stages-per-pipeline-rank 12 --expert-model-parallel-size 8 "
        "--micro-batch-size 1 --global-batch-size 1024",
        queues=32,
    ),
    Job(
        "Qwen3 235B-A22B, FP8", 256, 4096,
        ((258, 8192, 1712), (454, 8192, 1611), (540, 8192, 1633), (594, 2048, 1575)),
        f"{COMMON} {FP8} {MOE} {QWEN_235B} --moe-token-dispatcher-type alltoall "
        "--overlap-moe-expert-parallel-comm --delay-wgrad-compute --tensor-model-parallel-size 2 "
        "--sequence-parallel --pipeline-model-parallel-size 8 "
        f"--num-virtual-stages-per-pipeline-rank 4 {SPLIT} --expert-model-parallel-size 32 "
        "--expert-tensor-parallel-size 1 --micro-batch-size 1 --global-batch-size 8192",
        queues=8,
    ),
    Job(
        "GPT-OSS 120B, BF16", 64, 4096,
        ((238, 1280, 5824), (338, 1280, 5810), (520, 1280, 5993), (592, 512, 5630)),
        f"{COMMON} {MOE} {GPT_OSS} --moe-router-fusion --moe-token-dispatcher-type alltoall "
        "--pipeline-model-parallel-size 4 --expert-model-parallel-size 8 --micro-batch-size 1 "
        "--recompute-granularity selective --recompute-modules layernorm moe_act "
        "--global-batch-size 1280",
        queues=32, open="line 592 says micro batch 4, its recipe (v0.2.0) 1",
    ),
    Job(
        "Nemotron 3 Nano 30B-A3B, FP8", 16, 8192,
        ((156, 1024, 14719), (276, 1024, 14336), (366, 1024, 14507)),
        f"{COMMON} {FP8} {MOE} {NANO} {HYBRID_EP} --moe-hybridep-num-sms 16 "
        "--cuda-graph-impl transformer_engine --te-rng-tracker --cuda-graph-scope mamba "
        "--recompute-granularity selective --recompute-modules moe layernorm core_attn moe_act "
        "--expert-model-parallel-size 8 --micro-batch-size 1 --global-batch-size 1024",
        queues=32, script="pretrain_hybrid.py",
    ),
)  # fmt: skip
PRISM = (sys.executable, "-m", "megatron_prism")
_MODEL = r"--(?:tensor-model|pipeline-model|context)-parallel-size (\d+)"  # ranks of a replica
# not expressed: Qwen3 30B-A3B of line 632, which drops tokens


def slices(job: Job, checkout: Path, base: Path) -> Path:
    """The slices of ``job``, captured unless they are there."""
    place = base / job.name.replace(", ", "-").replace(" ", "_")
    if not place.exists():
        launch = f"torchrun --nnodes {job.gpus // 8} --nproc-per-node 8"
        words = [*launch.split(), checkout / job.script, *job.flags.split()]
        env = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": str(job.queues)}
        argv = [*PRISM, "capture", "-o", place, "--", *words]
        subprocess.run(list(map(str, argv)), check=True, env=env)
    return place


def measure(job: Job, place: Path) -> list[dict[str, Any]]:
    """A row for each published one: seconds of an iteration."""
    known, rows = dict[int, dict[str, Any]](), []
    dp = job.gpus // math.prod(map(int, re.findall(_MODEL, job.flags)))
    whole, micro = (int(re.findall(rf"--{size}-batch-size (\d+)", job.flags)[0])
                    for size in ("global", "micro"))  # fmt: skip
    for line, batch, rate in job.rows:
        if batch not in known:
            more = [] if batch == whole else [f"microbatches={batch // dp // micro}"]
            words = ["replay", str(place), *more, "--machine", "h100", "--json"]
            known[batch] = json.loads(subprocess.check_output([*PRISM, *words]))
        found, published = known[batch], batch * job.seq / job.gpus / rate
        seconds = {k: found[f"{k}_ns"] / 1e9 for k in ("iteration", "low", "high")}
        rows.append({
            "job": job.name, "line": line, "gpus": job.gpus, "batch": batch, "open": job.open,
            "published": published, **seconds,
            "error": seconds["iteration"] / published - 1,
            **{key: found[key] for key in ("computing", "exposed", "bubble", "idle", "host")},
            "commit": commit(), "where": machine(),
        })  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The table of docs/measurements.md, and what it comes to."""
    lines = ["| line | job | H100 | batch | published | replay | error | interval |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    lines += [
        f"| {row['line']} | {row['job']} | {row['gpus']:,} | {row['batch']:,} | "
        f"{row['published']:.2f} s | {row['iteration']:.2f} s | {_signed(row['error'])} | "
        f"{row['low']:.1f} to {row['high']:.1f} s |"
        for row in sorted(rows, key=lambda one: one["line"])
    ]
    errors = sorted(abs(row["error"]) for row in rows)
    inside = sum(row["low"] <= row["published"] <= row["high"] for row in rows)
    widths = [(row["high"] - row["low"]) / row["iteration"] for row in rows]
    lines.append(
        f"\nMedian {100 * statistics.median(errors):.1f} %, most {100 * errors[-1]:.0f} %; "
        f"{inside} of {len(rows)} inside; width, median {100 * statistics.median(widths):.0f} %"
    )
    return "\n".join(lines)


def _signed(part: float) -> str:
    return f"{100 * part:+.0f} %".replace("-", "−")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", help="of Megatron-LM core_v0.19.0; table: print what is stored")
    parser.add_argument("names", nargs="*", metavar="JOB", help="words of the jobs' names; all")
    parser.add_argument("--keep", type=Path, default=Path("summaries"), help="slices' folder")
    args = parser.parse_args()
    rows = json.loads(RESULT.read_text()) if RESULT.exists() else []
    for job in JOBS if args.checkout != "table" else ():
        if args.names and not any(name in job.name for name in args.names):
            continue
        mine = measure(job, slices(job, Path(args.checkout), args.keep))
        rows = [row for row in rows if row["job"] != job.name] + mine
        RESULT.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
