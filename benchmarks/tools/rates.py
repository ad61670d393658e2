"""How fast are matrix products, attention, memory and calls on this host's GPUs?

``torchrun --nproc-per-node 4 benchmarks/tools/rates.py OUT.json``

The rates that ``replay/costs/machines/*.json`` give a roofline, and the calls that
``replay/costs/collectives.py`` is held against (``tests/replay/test_collectives_model.py``).
Everything is timed on the device while the host runs ahead, as in a training job: matrix products
first, which keep the device busy, then one call so that all ranks start together, then ``REPEAT``
of what is measured between two events; the median of 5.
"""

# ruff: noqa: B023 - every closure is called before its loop goes on
from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional

REPEAT, ROUNDS = 20, 5
SIZES = [2**k for k in range(14, 29, 2)]  # bytes of a message, as nccl-tests counts it
# (m, k, n) of products of Megatron jobs: Llama-3-8B, 70B and 405B by tp 8, GPT-3 by tp 8 and 1
GEMMS = [
    (8192, 8192, 1280), (8192, 1024, 8192), (8192, 8192, 7168), (8192, 3584, 8192),
    (8192, 4096, 6144), (8192, 4096, 28672), (8192, 14336, 4096), (8192, 16384, 2304),
    (8192, 16384, 13312), (8192, 8192, 16032), (4096, 12288, 4608), (4096, 12288, 6144),
    (4096, 6144, 12288), (4096, 1536, 12288), (4096, 2048, 6144), (4096, 8192, 2048),
    (16384, 16384, 16384),
]  # fmt: skip
HEADS = [(1, 8, 8192, 128), (1, 16, 8192, 128), (1, 12, 4096, 128), (4, 16, 4096, 128)]


def bf16(*shape: int) -> torch.Tensor:
    """Noise: products of zeros are faster."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def clock(step: Callable[[], Any], busy: torch.Tensor, group: Any, products: int) -> float:
    """us of one step."""
    found = []
    for _ in range(3):
        step()
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        dist.barrier(group=group)
        for _ in range(products):
            busy @ busy
        dist.all_reduce(busy[:1, :64].clone(), group=group)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPEAT):
            step()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / REPEAT)
    return statistics.median(found)


def calls(rank: int, world: int, busy: torch.Tensor) -> list[dict[str, Any]]:
    """Calls among 2, 4, … ranks, each behind a kernel of 64 elements, whose time is taken off."""
    found = []
    for size in [n for n in (2, 4, 8) if n <= world]:
        group = dist.new_group(list(range(size)))
        if rank >= size:
            continue
        small = bf16(64)
        alone = clock(lambda: small.add_(1), busy, group, 2)
        for num_bytes in SIZES:
            whole, part = bf16(num_bytes // 2), bf16(num_bytes // 2 // size)
            other = whole.clone()
            for name, call in {
                "all_reduce": lambda: dist.all_reduce(whole, group=group),
                "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
                "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
                "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
            }.items():

                def step(call: Callable[[], Any] = call) -> None:
                    small.add_(1)
                    call()

                us = clock(step, busy, group, 8) - alone
                found.append({"op": name, "ranks": size, "bytes": num_bytes, "ns": round(us * 1e3)})
    dist.barrier()
    return found


def kernels(busy: torch.Tensor) -> dict[str, list[dict[str, Any]]]:
    """Products and attention in TFLOP/s, elementwise kernels in GB/s."""

    def us(step: Callable[[], Any]) -> float:
        return clock(step, busy, None, 2)

    found: dict[str, list[dict[str, Any]]] = {"gemm": [], "attention": [], "memory": []}
    for m, k, n in GEMMS:
        x, weight, grad = bf16(m, k), bf16(n, k), bf16(m, n)
        work = 2 * m * k * n / 1e6
        row = {"m": m, "k": k, "n": n, "forward": work / us(lambda: x @ weight.t())}
        row["wgrad"] = work / us(lambda: grad.t() @ x)
        found["gemm"].append({key: round(value) for key, value in row.items()})
    for b, h, s, d in HEADS:
        q, k, v = (bf16(b, h, s, d).requires_grad_() for _ in range(3))

        def forward() -> torch.Tensor:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        grad, once = torch.randn_like(forward()), us(forward)
        both = us(lambda: torch.autograd.grad(forward(), (q, k, v), grad))
        work = 2 * b * h * s * s * d / 1e6
        found["attention"].append(
            {"shape": [b, h, s, d], "forward": round(work / once),
             "backward": round(2.5 * work / (both - once))}
        )  # fmt: skip
    for numel in (2**22, 2**24, 2**26, 2**28):
        x, y = bf16(numel), bf16(numel)
        add = us(lambda: torch.add(x, y, out=y))
        rows = x.view(-1, 4096)
        norm = us(lambda: functional.rms_norm(rows, (4096,)))
        found["memory"] += [
            {"kernel": "add", "elements": numel, "GB/s": round(6 * numel / add / 1e3)},
            {"kernel": "rms_norm", "elements": numel, "GB/s": round(4 * numel / norm / 1e3)},
        ]
    one = torch.zeros(2**27, device="cuda", requires_grad=True)
    one.grad = torch.ones_like(one)
    adam = us(torch.optim.Adam([one], fused=True).step)
    found["memory"].append(
        {"kernel": "fused Adam", "elements": 2**27, "GB/s": round(28 * 2**27 / adam / 1e3)}
    )
    return found


def products_of_fp32(busy: torch.Tensor) -> dict[str, list[dict[str, Any]]]:
    """TFLOP/s of a layer's product and its two gradients, of fp32 operands as TF32 and as fp32."""
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in ("tf32", "fp32"):
        torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
        found[kind] = []
        for m, k, n in GEMMS:
            x, weight, grad = (
                torch.randn(*shape, device="cuda") for shape in ((m, k), (n, k), (m, n))
            )
            work = 2 * m * k * n / 1e6
            products = {
                "forward": lambda: x @ weight.t(),
                "dgrad": lambda: grad @ weight,
                "wgrad": lambda: grad.t() @ x,
            }
            row: dict[str, Any] = {"m": m, "k": k, "n": n}
            for name, product in products.items():
                row[name] = round(work / clock(product, busy, None, 2), 1)
            found[kind].append(row)
    torch.backends.cuda.matmul.allow_tf32 = False
    return found


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    busy = bf16(8192, 8192)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "nvls": os.environ.get("NCCL_NVLS_ENABLE", "default"),
        "calls": calls(rank, world, busy),
    }
    found |= kernels(busy)
    found |= products_of_fp32(busy)
    if rank == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
