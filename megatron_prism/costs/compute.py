"""How long does a compute segment take?  What was measured, else the roofline of its kernels.

In : a program and a machine.  Out: ns per op and where they are from.  The roofline gives a kernel
the larger of flops / rate and bytes / rate, and never less than the shortest kernel (Williams,
Waterman & Patterson 2009).  Segments recorded on the meta tier name their kernels; those without
names are treated as one.
"""

from __future__ import annotations

import re

import numpy as np

from megatron_prism.costs.machine import Machine
from megatron_prism.ops import CODE
from megatron_prism.program import Program

__all__ = ["MEASURED", "NONE", "ROOFLINE", "compute_ns"]

MEASURED, ROOFLINE, NONE = 0, 1, 2
_MOST_NS = 1 << 59  # 18 years: what follows from it still fits into 64 bits
_KERNEL = re.compile(
    r"(?P<name>[^(;]+)\([^)]*\)(?P<dtype>\w*):(?P<flops>\d+):(?P<bytes>\d+)(?:\*(?P<count>\d+))?"
)
_TORCH = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "fp8",
          "float8_e5m2": "fp8"}  # fmt: skip


def compute_ns(program: Program, machine: Machine) -> tuple[np.ndarray, np.ndarray]:
    """(ns int64 [n], source uint8 [n]) of every op; 0 and NONE for what is no segment."""
    ns = np.zeros(len(program), dtype=np.int64)
    source = np.full(len(program), NONE, dtype=np.uint8)
    compute = np.flatnonzero(program.ops["name"] == CODE["compute"])
    ops = program.ops[compute]
    measured = ops["ns"] >= 0
    ns[compute[measured]] = ops["ns"][measured]
    source[compute[measured]] = MEASURED
    rest, rows = compute[~measured], ops[~measured]
    columns = [rows[name].tolist() for name in ("note", "flops", "traffic", "kernels")]
    known: dict[tuple[int, ...], int] = {}
    found = []
    for key in zip(*columns, strict=True):
        if key not in known:
            known[key] = min(_segment(program.strings[key[0]], *key[1:], machine), _MOST_NS)
        found.append(known[key])
    ns[rest] = found
    source[rest] = ROOFLINE
    return ns, source


def _segment(note: str, flops: int, traffic: int, kernels: int, machine: Machine) -> int:
    """ns of one segment by its kernels; what they leave of its flops and bytes is one more."""
    flops, traffic = max(0, flops), max(0, traffic)
    total, kernels = 0, max(1, kernels)
    for match in _KERNEL.finditer(note):
        count = int(match["count"] or 1)
        total += count * _kernel(match["name"].strip(), int(match["flops"]), int(match["bytes"]),
                                 match["dtype"], machine)  # fmt: skip
        flops -= count * int(match["flops"])
        traffic -= count * int(match["bytes"])
        kernels -= count
    if kernels > 0:
        rest = _kernel("", max(0, flops), max(0, traffic), "bfloat16", machine)
        total += max(rest, kernels * machine.kernel_ns)
    return total


def _kernel(name: str, flops: int, num_bytes: int, dtype: str, machine: Machine) -> int:
    rate = machine.flops.get(_TORCH.get(dtype, "bf16"), machine.flops["bf16"])
    if _TORCH.get(dtype, "bf16") in ("bf16", "fp16"):
        rate = machine.flops.get(name, rate)  # attention, attention_backward
    work = max(flops / rate, num_bytes / machine.memory_rate)
    return max(machine.kernel_ns, round(work * 1e9))
