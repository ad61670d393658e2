"""How far off an estimate is that ``prism fit`` prints while ranks run: ``python -m
benchmarks.accuracy.estimates CHECKOUT OUT.json [JOB …]``.

CHECKOUT is one of Megatron-LM core_v0.19.0.  Every job is asked for once, on tier meta; its
estimate is compared with the answer behind it.  A job that is in OUT.json is not run again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_COMMON = """
--bf16 --use-mcore-models --transformer-impl transformer_engine --use-distributed-optimizer
--overlap-grad-reduce --overlap-param-gather --normalization RMSNorm --swiglu
--disable-bias-linear --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0
--micro-batch-size 1 --mock-data --tokenizer-type NullTokenizer --train-iters 100 --lr 1e-4
--eval-iters 0 --cross-entropy-loss-fusion --cross-entropy-fusion-impl native
"""
_LLAMA_8B = """
--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--group-query-attention --num-query-groups 8 --vocab-size 128256
--untie-embeddings-and-output-weights --seq-length 8192 --max-position-embeddings 8192
"""
_LLAMA_70B = """
--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64
--group-query-attention --num-query-groups 8 --vocab-size 128256
--untie-embeddings-and-output-weights --seq-length 8192 --max-position-embeddings 8192
--sequence-parallel
"""
_MIXTRAL = """
--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--group-query-attention --num-query-groups 8 --vocab-size 32000
--untie-embeddings-and-output-weights --seq-length 4096 --max-position-embeddings 4096
--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --expert-model-parallel-size 8
"""
_QWEN_30B = """
--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32
--kv-channels 128 --group-query-attention --num-query-groups 4 --qk-layernorm --vocab-size 151936
--untie-embeddings-and-output-weights --seq-length 4096 --max-position-embeddings 4096
--num-experts 128 --moe-ffn-hidden-size 768 --moe-router-topk 8 --moe-grouped-gemm
--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss
--moe-aux-loss-coeff 1e-3 --moe-permute-fusion --moe-router-dtype fp32
--expert-model-parallel-size 8
"""
JOBS = {  # name -> (nodes of 8 GPUs, arguments)
    "Llama-3-8B, 8 GPUs, tp 2": (
        1,
        f"{_LLAMA_8B} --tensor-model-parallel-size 2 --sequence-parallel --global-batch-size 16",
    ),
    "Llama-3-8B, 16 GPUs, tp 1": (2, f"{_LLAMA_8B} --global-batch-size 32"),
    "Llama-3-8B, 64 GPUs, tp 2 cp 2": (
        8,
        f"{_LLAMA_8B} --tensor-model-parallel-size 2 --sequence-parallel "
        "--context-parallel-size 2 --global-batch-size 64",
    ),
    "Llama-3-8B, 64 GPUs, pp 2": (
        8,
        f"{_LLAMA_8B} --pipeline-model-parallel-size 2 --global-batch-size 128",
    ),
    "Llama-3-8B, 16 GPUs, full recomputation": (
        2,
        f"{_LLAMA_8B} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --global-batch-size 32",
    ),
    "Llama-3-70B, 512 GPUs, tp 8 pp 4": (
        64,
        f"{_LLAMA_70B} --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 "
        "--global-batch-size 256",
    ),
    "Llama-3-70B, 64 GPUs, tp 8": (
        8,
        f"{_LLAMA_70B} --tensor-model-parallel-size 8 --global-batch-size 16 "
        "--recompute-granularity selective --recompute-modules core_attn",
    ),
    "Llama-3-70B, 512 GPUs, tp 4 pp 4 vpp 2": (
        64,
        f"{_LLAMA_70B} --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 "
        "--num-virtual-stages-per-pipeline-rank 2 --global-batch-size 512",
    ),
    "Mixtral 8x7B, 64 GPUs, ep 8": (8, f"{_MIXTRAL} --global-batch-size 128"),
    "Mixtral 8x7B, 128 GPUs, tp 2 pp 4 ep 8": (
        16,
        f"{_MIXTRAL} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 "
        "--sequence-parallel --global-batch-size 128",
    ),
    "Qwen3-30B-A3B, 64 GPUs, ep 8": (8, f"{_QWEN_30B} --global-batch-size 64"),
    "Qwen3-30B-A3B, 64 GPUs, pp 2 ep 8": (
        8,
        f"{_QWEN_30B} --pipeline-model-parallel-size 2 --global-batch-size 128",
    ),
}


def measure(nodes: int, arguments: str, checkout: Path) -> dict[str, object]:
    """Ask once for a job.

    Returns:
        Estimate and answer: bytes of the device, ns; s of the command, and s after which the
        estimate was printed.
    """
    line = ["torchrun", "--nnodes", str(nodes), "--nproc-per-node", "8"]
    line += [str(checkout / "pretrain_gpt.py"), *_COMMON.split(), *arguments.split()]
    words = [sys.executable, "-m", "megatron_prism", "fit", "--json", "--machine", "h100"]
    words += ["--limit", "80GB", "--prism-tier", "meta", *line]
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(checkout)]).lstrip(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        assert process.stdout is not None
        estimate_s = None
        said: list[str] = []
        for text in process.stderr:
            said.append(text)
            if "estimate" in text:
                estimate_s = round(time.monotonic() - begin, 1)
        printed = process.stdout.read()
        process.wait()
        files = list(Path(folder).glob("prism-*/.estimate"))
        if not printed or not files:
            return {"failed": "".join(said)[-1500:]}
        answer = json.loads(printed)
        estimate = json.loads(files[0].read_text())
    return {
        "layers": estimate["layers"],
        "estimate": [estimate["device_bytes"], estimate["iteration_ns"]],
        "answer": [answer["limit"] + answer["over"], answer["iteration_ns"]],
        "estimate_s": estimate_s,
        "whole_s": round(time.monotonic() - begin, 1),
    }


def main(words: list[str]) -> int:
    """Measure jobs and keep what was measured."""
    checkout, out = Path(words[0]).resolve(), Path(words[1])
    results = json.loads(out.read_text()) if out.exists() else {}
    for name in words[2:] or JOBS:
        if name in results and "failed" not in results[name]:
            continue
        results[name] = measure(*JOBS[name], checkout)
        print(name, results[name], flush=True)
        out.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
