"""Does ``prism sweep`` put layouts in the order that others measured, and drop those that fell?

``python -m benchmarks.accuracy.published_layouts DATA OUT [FILE…]``

DATA is ``data/`` of a checkout of Aleph-Alpha/NeurIPS-WANT-submission-efficient-parallelization-
layouts: every run of Hagemann et al., Efficient Parallelization Layouts for Large-Scale Distributed
Model Training (arXiv 2311.05610), LLaMA 13B, 30B and 65B on 32 to 256 A100 of 80 GB.  Their runs
with FlashAttention 2, a fused norm and no recomputation are compared; a file may be named to take
it alone.  Sweeps are kept in OUT and go on there.  Needs openpyxl.

Of the runs this is known: 2,048 sequences of 2,048 tokens or 512 of 8,192, and a vocabulary of
128,000 (their MFU gives both).  The trainer was another one than Megatron, with the same layouts
(1F1B, tensor and sequence parallelism, ZeRO-1).  A100 is not one of the shipped machines:
``MACHINE`` has published rates.
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.accuracy.tables import kendall_tau
from megatron_prism.core import recipe as recipes
from megatron_prism.sweep.sweep import sweep

MODELS = {  # hidden size, layers, heads, ffn: LLaMA (arXiv 2302.13971)
    "13B": (5120, 40, 40, 13824),
    "30B": (6656, 60, 52, 17920),
    "65B": (8192, 80, 64, 22016),
}
MACHINE = {
    "name": "8 x A100 SXM 80 GB per node, NVLink 3, 200 Gbit/s per GPU",
    "gpus_per_node": 8, "generation": "ampere", "link": "nvlink",
    "flops": {"bf16": 250e12, "fp16": 250e12, "fp32": 19e12, "attention": 190e12,
              "attention_backward": 160e12},
    "peak": 312e12, "memory_rate": 1.5e12, "kernel_ns": 1900, "link_rate": 230e9, "nvls_rate": 0,
    "network_rate": 22e9, "call_ns": 600, "device_memory": 84_987_740_160,
    "source": "data sheet (312 TFLOP/s, 2.039 TB/s, 600 GB/s of NVLink); 80 % of it for products, "
              "74 % for memory; attention: FlashAttention 2 (arXiv 2307.08691); network: 88 % of "
              "200 Gbit/s, assumed",
}  # fmt: skip
AXES = {
    "tp": "model_parallel_size",
    "pp": "pipe_parallel_size",
    "micro_batch_size": "micro_batch_size",
    "sequence_parallel": "sequence_parallel",
}
Layout = tuple[Any, ...]


def measured(path: Path) -> dict[Layout, float | None]:
    """Layout, by AXES -> seconds of an iteration; None where it ran out of memory."""
    openpyxl: Any = import_module("openpyxl")
    _, head, *rows = openpyxl.load_workbook(path, read_only=True).active.iter_rows(values_only=True)
    found: dict[Layout, float | None] = {}
    for row in rows:
        one = dict(zip(head, row, strict=True))
        plain = str(one["kernel"]).endswith("RMS kernel")
        plain &= one["activation_checkpointing_type"] == "disabled"
        layout = tuple(one.get(name, False) for name in AXES.values())
        time = str(one["Average Step Time"])
        if plain and not (layout[0] == 1 and layout[3]) and time != "Other Error":
            found[layout] = None if time == "OOM Error" else float(time.replace(",", ""))
    return found


def compare(path: Path, out: Path) -> dict[str, Any]:
    """One file's runs, and the sweep of the same grid."""
    _, model, *_ = path.name.split("_")
    hidden, layers, heads, ffn = MODELS[model]
    long = "8k" in path.name
    gpus = int(path.name.partition("_GPUs")[0].rpartition("_")[2])
    settings = (
        f"num_layers={layers} hidden_size={hidden} ffn_hidden_size={ffn} "
        f"num_attention_heads={heads} num_query_groups={heads} "
        f"seq_length={8192 if long else 2048} vocab_size=128000 "
        f"rotary_base=10000 world_size={gpus} tp=1 cp=1 "
        f"sequence_parallel=false global_batch_size={512 if long else 2048} "
        "recompute_granularity=null"
    )
    recipe = recipes.load("llama3-8b_64gpu_tp4cp2_h200", settings.split())
    real = measured(path)
    axes = {axis: sorted({layout[i] for layout in real}) for i, axis in enumerate(AXES)}
    machine = out / "a100.json"
    machine.write_text(json.dumps(MACHINE))
    made = sweep(recipe, axes, out / f"{model}{'_8k' * long}", machine=str(machine),
                       objective="time", told=print)  # fmt: skip
    said = {tuple(row.result["axes"][axis] for axis in AXES): row.result["iteration_ns"] / 1e9
            for row in made.rows}  # fmt: skip
    fell = {tuple(point.axes[axis] for axis in AXES) for point in made.dropped}
    both = [layout for layout in real if real[layout] and layout in said]
    times = [(real[layout] or 0.0, said[layout]) for layout in both]
    best = min(time for time in real.values() if time)
    first = min(both, key=lambda layout: said[layout])
    return {
        "file": path.stem,
        "layouts": len(real),
        "ran": sum(time is not None for time in real.values()),
        "fit alike": sum((time is None) == (layout in fell) for layout, time in real.items()),
        "ran, said not to fit": sum(bool(real[layout]) and layout in fell for layout in real),
        "compared": len(both),
        "tau": kendall_tau(*zip(*times, strict=True)),
        "first costs": (real[first] or 0.0) / best - 1,
        "predicted / real": sorted(b / a for a, b in times)[len(times) // 2],
    }


def main() -> None:
    """Compare every file; print a line each and all of it as JSON into OUT."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("files", nargs="*")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    paths = [args.data / name for name in args.files] or sorted(args.data.rglob("*.xlsx"))
    found = []
    for path in paths:
        found.append(compare(path, args.out))
        print(json.dumps(found[-1]), flush=True)
    (args.out / "published_layouts.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
