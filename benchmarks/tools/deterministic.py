"""What dropout and ``--deterministic-mode`` cost Transformer Engine's kernels on this GPU.

``python -m benchmarks.tools.deterministic OUT.json [--tier cuda|meta] [--only attention]``

One GPU, about 2 minutes, 30 GiB; torch, megatron-core and Transformer Engine.  Three tables:

attention : forward and backward of causal fused attention, with and without dropout and
            deterministic algorithms (``options`` of ``replay/costs/ops``)
empty     : ``torch.empty``, which deterministic algorithms fill
layers    : a layer of a 7B model with tp 4, forward and backward, and the kernels in it

``--tier meta`` runs the same without a GPU, which tries the script and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.accuracy import layer_memory
from benchmarks.tools.op_table import Bench

# (sequence, batch, heads, groups of heads, size of a head): tp 4 of 7B, 7B, small GPT, T5
SHAPES = ((8192, 2, 8, 2, 128), (4096, 1, 32, 32, 128), (2048, 4, 16, 16, 128),
          (4096, 2, 16, 16, 64), (1024, 8, 12, 12, 64), (512, 8, 12, 12, 64))  # fmt: skip
SIZES = tuple(1 << n for n in (12, 16, 20, 24, 26, 28, 30))
DROPOUT = 0.1
REPEATS = 20
NONE = "neither"
CASES = {
    NONE: (0.0, False),
    "dropout": (DROPOUT, False),
    "deterministic": (0.0, True),
    "dropout deterministic": (DROPOUT, True),
}


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """What ``--deterministic-mode`` sets, for what is built and run inside."""
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = str(int(not on))
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "1"


class Clock:
    """Median ns of a call, on the device where there is one."""

    def __init__(self, tier: str) -> None:
        self.cuda = tier == "cuda"
        self.bench = Bench("cuda", 600, dry=True) if self.cuda else None

    def __call__(self, call: Callable[[], Any]) -> float:
        for _ in range(3):
            call()
        if self.bench is None:
            begin = time.perf_counter_ns()
            call()
            return float(time.perf_counter_ns() - begin)
        return round(statistics.median(self.bench._between(call, REPEATS, 2_000_000)))

    def warm(self, seconds: float = 3) -> None:
        """Heat the GPU as a job does."""
        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) if self.cuda else None
        end = time.monotonic() + seconds
        while a is not None and time.monotonic() < end:
            for _ in range(20):
                torch.mm(a, a)
            torch.cuda.synchronize()


def attention(clock: Clock, device: str) -> list[dict[str, Any]]:
    """Rows of ns, and which of TE's backends ran."""
    from transformer_engine.pytorch import DotProductAttention

    found = []
    for s, b, heads, groups, d in SHAPES:
        for name, (dropout, on) in CASES.items():
            layer_memory._forget_backend()
            row: dict[str, Any] = {"shape": [s, b, heads, groups, d], "options": name}
            try:
                with deterministic(on):
                    module = DotProductAttention(
                        heads, d, num_gqa_groups=groups, attention_dropout=dropout,
                        qkv_format="sbhd", attn_mask_type="causal",
                    )  # fmt: skip
                    q, k, v = (
                        torch.randn(s, b, n, d, device=device, dtype=torch.bfloat16)
                        .requires_grad_() for n in (heads, groups, groups)
                    )  # fmt: skip
                    gradient = torch.randn_like(module(q, k, v))

                    def both() -> None:  # TE's graphs serve once
                        torch.autograd.grad(module(q, k, v), (q, k, v), gradient)  # noqa: B023

                    row["forward"] = clock(lambda: module(q, k, v))  # noqa: B023
                    row["backward"] = clock(both) - row["forward"]
                    if clock.cuda:
                        several = kernels(lambda: [both() for _ in range(REPEATS)])  # noqa: B023
                        row["kernels"] = [(one["name"], one["us"] / REPEATS) for one in several]
            except Exception as error:
                row["failed"] = repr(error)[:300]
            print({key: value for key, value in row.items() if key != "kernels"}, flush=True)
            found.append(row)
    return found


def empty(clock: Clock, device: str) -> list[list[float]]:
    """Bytes, ns of a deterministic ``torch.empty``."""
    with deterministic(True):
        return [
            [size, clock(lambda: torch.empty(size // 2, dtype=torch.bfloat16, device=device))]  # noqa: B023
            for size in SIZES
        ]


def kernels(call: Callable[[], Any]) -> list[dict[str, Any]]:
    """Kernels of a call: name, how many and their time in us, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        call()
        torch.cuda.synchronize()
    rows = [
        {"name": one.key[:120], "count": one.count, "us": round(one.self_device_time_total, 1)}
        for one in seen.key_averages() if one.self_device_time_total > 0
        and one.device_type == torch.autograd.DeviceType.CUDA
    ]  # fmt: skip
    return sorted(rows, key=lambda one: -float(one["us"]))


def layers(clock: Clock) -> list[dict[str, Any]]:
    """A layer as one rank of tp 4 has it: norms are whole, heads and features a fourth."""
    found = []
    for margin in ("0", "16"):
        for name, (dropout, on) in CASES.items():
            layer_memory._forget_backend()
            for way in ("FWD", "BWD"):
                os.environ[f"NVTE_{way}_LAYERNORM_SM_MARGIN"] = margin
            row: dict[str, Any] = {"options": name, "margin": margin}
            try:
                with deterministic(on):
                    step = _layer(dropout)
                    out = step()
                    gradient = torch.ones_like(out)

                    def both() -> None:
                        step().backward(gradient)  # noqa: B023

                    with torch.no_grad():
                        row["forward"] = clock(step)
                    row["both"] = clock(both)
                    if clock.cuda:
                        row["kernels"] = kernels(both)
            except Exception as error:
                row["failed"] = repr(error)[:300]
            print({key: value for key, value in row.items() if key != "kernels"}, flush=True)
            for one in row.get("kernels", ())[:22]:
                print(f"  {one['us']:9.1f} us {one['count']:3}  {one['name']}", flush=True)
            found.append(row)
            if name == NONE and margin == "16":
                break  # the margin alone
    return found


def _layer(dropout: float) -> Callable[[], torch.Tensor]:
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer import build_module

    made = layer_memory.config(
        hidden_size=4096, num_attention_heads=8, num_query_groups=2, kv_channels=128,
        ffn_hidden_size=4096, attention_dropout=dropout, hidden_dropout=dropout,
    )  # fmt: skip
    spec = specs.get_gpt_layer_with_transformer_engine_spec()
    module = build_module(spec, config=made, layer_number=1).cuda().bfloat16()
    x = torch.randn(8192, 2, 4096, device="cuda", dtype=torch.bfloat16).requires_grad_()
    return lambda: module(x, None)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out")
    parser.add_argument("--tier", default="cuda", choices=["cuda", "meta"])
    parser.add_argument("--only", choices=["attention", "layers"])
    args = parser.parse_args()
    found = layer_memory.start(args.tier)
    clock, device = Clock(args.tier), args.tier
    clock.warm()
    found["empty"] = empty(clock, device)
    print(found, flush=True)
    for name, rows in (
        ("attention", lambda: attention(clock, device)),
        ("layers", lambda: layers(clock)),
    ):
        if args.only not in (None, name):
            continue
        found[name] = rows()
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
