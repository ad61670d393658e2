"""How near are predictions without any GPU to what others published of large H100 jobs?

``python -m benchmarks.accuracy.published [JOB …] [--keep DIR]``

Each job is captured on tier ``meta``, one rank per pipeline stage, and replayed on ``machine=h100``
(DGX H100).  Nothing is fitted to the published figures: kernels take the roofline of rates that
were measured on H200 (``rates.py``), calls take NCCL's own estimate.  Of what a source does not say
(micro batch, interleaving) the fastest prediction that fits in 80 GB is taken, as people who tune a
job do; the rest is written down (``assumed``).  Model flops are counted as Megatron counts them
(training.py num_floating_point_operations @core_r0.8.0: attention not halved), so that TFLOP/s/GPU
compare.  ``predict`` is the same on GPUs, hosts and calls that vary as ``variability=public`` says:
of thousands of GPUs that wait for each other the slowest counts.  Where the host decides, the
replay is of NVIDIA's hosts, and ``hosts`` has what the headline says of all measured ones: nobody
knows the host of a report by others.  Prints the table of docs/measurements.md; writes the rows of
the named jobs, or of all, into results/published_h100.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import megatron_prism as prism
from benchmarks.report import RESULTS, commit, machine
from benchmarks.speed.worlds import capture
from megatron_prism.replay.uncertainty.headline import headline

RESULT = RESULTS / "published_h100.json"
MACHINE = "h100"
SCALING = "Megatron-LM README, weak scaling, Megatron-Core r0.8.0 (images/model_table.png)"
MIXTRAL = "Megatron-LM megatron/core/transformer/moe/README.md @core_r0.16: 468 TFLOPS, MCore v0.9"
LLAMA = "Llama 3 paper (arXiv 2407.21783), table 4: 430 TFLOP/s per GPU"
ISSUE = (
    "github.com/NVIDIA/Megatron-LM/issues/756, 2024-04-06: iterations 43 to 45 take 5,445, 5,534 "
    "and 5,719 ms, of which the median counts"
)
NOT_SAID = "rope, no recomputation assumed; --tp-comm-overlap is not modelled"
SAMPLES = 200  # iterations of a prediction, whose median is taken
MEMORY = 72e9  # live bytes that leave room in 80 GB for NCCL, the context and the allocator


@dataclass(frozen=True)
class Job:
    """A published job.

    tflops : model TFLOP/s per GPU, published
    base   : recipe; settings : what is different in this job
    open   : settings that the source does not say, one of which is taken
    """

    name: str
    gpus: int
    split: str
    tflops: float
    source: str
    base: str
    settings: str
    assumed: str = ""
    open: tuple[str, ...] = ("",)


def gpt(name: str, heads: int, hidden: int, layers: int, tp: int, pp: int, batch: int,
        tflops: float) -> Job:  # fmt: skip
    """A row of Megatron-LM's weak scaling: dp 48, 4,096 tokens, a vocabulary of 131,072."""
    words = (
        f"num_layers={layers} hidden_size={hidden} ffn_hidden_size={4 * hidden} "
        f"num_attention_heads={heads} num_query_groups={heads} seq_length=4096 "
        "vocab_size=131072 normalization=LayerNorm swiglu=false "
        f"rotary_base=10000 add_bias_linear=true tp={tp} "
        f"world_size={48 * tp * pp} pp={pp} cp=1 "
        f"sequence_parallel={str(tp > 1).lower()} "
        f"global_batch_size={batch} recompute_granularity=null"
    )
    if pp == 1:
        free: tuple[str, ...] = ("micro_batch_size=1", "micro_batch_size=4")
    else:
        free = ("vpp=null", f"vpp={layers // pp}")
    return Job(f"GPT {name}", 48 * tp * pp, f"tp {tp} pp {pp}", tflops, SCALING,
               "llama3-8b_64gpu_tp4cp2_h200", words, NOT_SAID, free)  # fmt: skip


JOBS = [
    gpt("1.7B", 16, 2048, 24, 1, 1, 192, 408.8),
    gpt("7.1B", 32, 4096, 30, 2, 1, 192, 465.9),
    gpt("16B", 48, 6144, 32, 4, 1, 192, 489.1),
    gpt("32B", 56, 7168, 48, 8, 1, 192, 459.6),
    gpt("70B", 64, 8192, 84, 8, 2, 384, 419.7),
    gpt("177B", 96, 12288, 96, 8, 6, 1152, 432.8),
    Job(
        "Mixtral 8x7B",
        64,
        "tp 1 ep 8 pp 4 vpp 8",
        468.0,
        MIXTRAL,
        "mixtral-8x7b_256gpu_pp4vp8ep8_h200",
        "world_size=64",
        "tokens balanced over experts",
    ),  # fmt: skip
    Job(
        "Mixtral 8x7B of others",
        16,
        "tp 2 ep 8",
        236.0,
        ISSUE,
        "mixtral-8x7b_256gpu_pp4vp8ep8_h200",
        "world_size=16 tp=2 pp=1 vpp=null ep=8 sequence_parallel=true seq_length=2048 "
        "global_batch_size=128 overlap_grad_reduce=false overlap_param_gather=false",
        "tokens balanced over experts; micro batch 1, distributed optimizer assumed; Megatron-LM "
        "ba773259, grouped_gemm 1.0.0; the host is not known",
    ),  # fmt: skip
    Job(
        "Llama 3 405B",
        8192,
        "tp 8 pp 16",
        430.0,
        LLAMA,
        "llama3-405b_8192gpu_tp8pp16vp8_h200",
        "",
        "Meta's own framework; vpp 8, micro batch 1, batch 2,048 x 8,192 tokens assumed",
    ),  # fmt: skip
]


def model_flops(recipe: Any) -> float:
    """Of one iteration, forward and backward, as Megatron counts them."""
    model = recipe
    hidden, layers, seq = model.hidden_size, model.num_layers, model.seq_length
    width = (model.kv_channels or hidden // model.num_attention_heads) * model.num_attention_heads
    groups = model.num_query_groups or model.num_attention_heads
    attention = (1 + groups / model.num_attention_heads + seq / hidden) * width / hidden
    ffn = (model.ffn_hidden_size or 4 * hidden) / hidden * (1.5 if model.swiglu else 1)
    experts = model.moe_router_topk if model.num_experts else 1
    per_token = attention + ffn * experts + model.vocab_size / (2 * layers * hidden)
    return 12.0 * recipe.global_batch_size * seq * layers * hidden**2 * per_token


def measure(job: Job, folder: Path) -> dict[str, Any]:
    """The row: published and predicted."""
    from megatron_prism.core.jobs import recipe as recipes

    recipe = recipes.load(job.base, job.settings.split())
    flops, tried, places = model_flops(recipe), {}, {}
    for number, choice in enumerate(job.open):
        place = folder.with_name(f"{folder.name}-{number}")
        if not place.exists():
            capture(f"{job.base} {job.settings} {choice}", place)
        places[choice] = place
        tried[choice] = prism.replay(prism.load(place), machine=MACHINE).to_json()
    peaks = {
        choice: max(one["peak_bytes"] for one in found["classes"])
        for choice, found in tried.items()
    }
    fits = [choice for choice in tried if peaks[choice] < MEMORY] or list(tried)
    taken = min(fits, key=lambda choice: tried[choice]["iteration_ns"])
    found = tried[taken]
    seconds = found["iteration_ns"] / 1e9
    tflops = flops / seconds / job.gpus / 1e12
    priced = prism.price(prism.load(places[taken]), machine=MACHINE)
    hosts = headline(priced.timeline)
    varied = prism.predict(priced, variability="public", samples=SAMPLES, levels=(0.5,))
    median = varied.quantiles[0].ns or 0.0
    return {
        **asdict(job),
        "taken": taken,
        "tried_s": {choice: one["iteration_ns"] / 1e9 for choice, one in tried.items()},
        "peak_live_bytes": peaks,
        "tokens_per_s_per_gpu": found["tokens_per_s"]["value"] / job.gpus,
        "iteration_s": seconds,
        "published_iteration_s": flops / job.gpus / job.tflops / 1e12,
        "predicted_tflops": tflops,
        "error": tflops / job.tflops - 1,
        "median_s": median / 1e9,
        "median_error": flops / (median / 1e9) / job.gpus / 1e12 / job.tflops - 1,
        **{key: found[key] for key in ("computing", "exposed", "bubble", "host")},
        "hosts_s": [hosts.low_ns / 1e9, hosts.high_ns / 1e9],
        "commit": commit(),
        "where": machine(),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The table of docs/measurements.md."""
    lines = [
        "| job | GPUs | split | published | replay | error | predict, median | measured hosts |",
        "|---|---|---|---|---|---|---|---|",
    ]
    worst = {key: max(abs(row[key]) for row in rows) for key in ("error", "median_error")}
    for row in rows:
        error, varied = (_percent(row[key], abs(row[key]) == worst[key]) for key in worst)
        split = f"{row['split']} {row['taken'].partition('.')[2]}".replace("_", " ").rstrip()
        lines.append(
            f"| {row['name']} | {row['gpus']:,} | {split} | {row['tflops']:.0f} | "
            f"{row['predicted_tflops']:.0f} | {error} | {varied} | {_on_hosts(row)} |"
        )
    return "\n".join(lines)


def _on_hosts(row: dict[str, Any]) -> str:
    """TFLOP/s on the slowest and on the fastest measured host; "" of rows before there were any."""
    if "hosts_s" not in row:
        return ""
    fastest_s, slowest_s = row["hosts_s"]
    # GPUs decide
    if fastest_s == slowest_s:
        return ""
    low, high = (row["predicted_tflops"] * row["iteration_s"] / s for s in (slowest_s, fastest_s))
    return f"{low:.0f} to {high:.0f}"


def _percent(part: float, worst: bool) -> str:
    text = f"{100 * part:+.0f} %".replace("-", "−")
    return f"**{text}**" if worst else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="JOB", help="words of the jobs' names; all")
    parser.add_argument(
        "--keep", type=Path, help="slices are kept in this folder, and taken from it"
    )
    args = parser.parse_args()
    rows = {row["name"]: row for row in json.loads(RESULT.read_text(encoding="utf-8"))["rows"]}
    with tempfile.TemporaryDirectory() as temporary:
        base = args.keep or Path(temporary)
        for job in JOBS:
            if args.names and not any(name in job.name for name in args.names):
                continue
            name = f"{job.name} {job.split}".replace(" ", "-")
            rows[job.name] = measure(job, base / name)
            tflops = rows[job.name]["predicted_tflops"]
            print(f"{name}: {tflops:.0f} of {job.tflops:.0f} TFLOP/s/GPU")
    in_order = [rows[job.name] for job in JOBS if job.name in rows]
    shown = {"machine": MACHINE, "where": machine(), "commit": commit(), "rows": in_order}
    RESULT.write_text(json.dumps(shown, indent=1) + "\n", encoding="utf-8")
    print(table(in_order))


if __name__ == "__main__":
    main()
