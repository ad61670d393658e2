"""How long does a compute segment take?  What was measured, else its kernels one by one.

In : a program and a machine.  Out: ns per op and where they are from.  Segments recorded on the
meta tier name their kernels.  A kernel takes what the machine's op table says (``op_table``); one
that the table lacks takes its roofline: the larger of flops / rate and bytes / rate, and never less
than the shortest kernel (Williams, Waterman & Patterson 2009).  Kernels without names are taken as
one.  A segment of which rooflines make up more than ``SLIGHT`` is said to rest on them too.
Products of a rank that does little else are slower, as the table says: the GPU's power is limited.
"""

from __future__ import annotations

import functools
import math
import re
from typing import NamedTuple

import numpy as np

from megatron_prism.core.ops import CODE, SLOWER
from megatron_prism.core.program import Program
from megatron_prism.replay.costs import op_table
from megatron_prism.replay.costs.machine import Machine
from megatron_prism.replay.costs.op_table import Kernel, OpTable

__all__ = ["MEASURED", "MIXED", "NONE", "OPS", "ROOFLINE", "SLIGHT", "Parts", "compute_ns",
           "parts_of", "table_of"]  # fmt: skip

MEASURED, ROOFLINE, NONE = 0, 1, 2
OPS, MIXED = 5, 6  # an op table; one and rooflines
SLIGHT = 0.05
_MOST_NS = 1 << 59  # 18 years: what follows from it still fits into 64 bits
_KERNEL = re.compile(
    r"(?P<name>[^(;]+)\((?P<shapes>[^)]*)\)(?P<dtype>\w*):(?P<flops>\d+):(?P<bytes>\d+)(?:\*(?P<count>\d+))?"
)
_SLOWER = re.compile(re.escape(SLOWER) + r"(\d{1,9}(?:\.\d{1,9})?); ")
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
    table = table_of(machine)
    known: dict[tuple[int, ...], Parts] = {}
    found = []
    for key in zip(*columns, strict=True):
        if key not in known:
            note, flops, traffic, kernels = key
            known[key] = parts_of(program.strings[note], flops, traffic, kernels, machine, table)
        found.append(known[key])
    slower = _slowdown(found, table)
    priced = {one: _priced(one, slower) for one in known.values()}
    ns[rest] = [priced[one][0] for one in found]
    source[rest] = [priced[one][1] for one in found]
    return ns, source


class Parts(NamedTuple):
    """ns of a segment: products and other kernels by the table, and what is a roofline."""

    products: float
    others: float
    roof: int


def _slowdown(parts: list[Parts], table: OpTable | None) -> float:
    """Factor of products under the power limit; it changes their share of the time, on which it
    depends."""
    products, others = sum(p.products for p in parts), sum(p.others + p.roof for p in parts)
    if table is None or not products:
        return 1.0
    factor = 1.0
    for _ in range(_ROUNDS):
        factor = table.slowdown(factor * products / (factor * products + others))
    return factor


_ROUNDS = 4  # the share hardly changes with the factor


def _priced(parts: Parts, slower: float) -> tuple[int, int]:
    """(ns, source)."""
    by_table = round(slower * parts.products + parts.others)
    share = parts.roof / max(1, by_table + parts.roof)
    code = ROOFLINE if not by_table else MIXED if share > SLIGHT else OPS
    return min(by_table + parts.roof, _MOST_NS), code


def table_of(machine: Machine) -> OpTable | None:
    """The machine's op table.  UsageError if there is no such table."""
    return _read(machine.ops) if machine.ops else None


_read = functools.lru_cache(maxsize=4)(op_table.read)


def parts_of(
    note: str, flops: int, traffic: int, kernels: int, machine: Machine, table: OpTable | None
) -> Parts:
    """One segment by its kernels; what they leave of its flops and bytes is one more."""
    flops, traffic = max(0, flops), max(0, traffic)
    products, others, roof, kernels = 0.0, 0.0, 0, max(1, kernels)
    for match in _KERNEL.finditer(note):
        count, name = int(match["count"] or 1), match["name"].strip()
        own = int(match["flops"]), int(match["bytes"])
        one = None
        if table is not None:
            one = table.ns(Kernel.parse(name, match["shapes"], match["dtype"], *own))
        if one is None:
            roof += count * _kernel(name, *own, match["dtype"], machine)
        elif name in op_table.PRODUCTS:
            products += count * one
        else:
            others += count * one
        flops -= count * own[0]
        traffic -= count * own[1]
        kernels -= count
    if kernels > 0:
        rest = _kernel("", max(0, flops), max(0, traffic), "bfloat16", machine)
        roof += max(rest, kernels * machine.kernel_ns)
    return _planted(note, Parts(products, others, roof))


def _planted(note: str, parts: Parts) -> Parts:
    """``parts`` as many times as long as faults say that were planted in the segment."""
    while match := _SLOWER.match(note):
        by, note = float(match[1]), note[match.end() :]
        parts = Parts(parts.products * by, parts.others * by, math.ceil(parts.roof * by))
    return parts


def _kernel(name: str, flops: int, num_bytes: int, dtype: str, machine: Machine) -> int:
    rate = machine.flops.get(_TORCH.get(dtype, "bf16"), machine.flops["bf16"])
    if _TORCH.get(dtype, "bf16") in ("bf16", "fp16"):
        rate = machine.flops.get(name, rate)  # attention, attention_backward
    work = max(flops / rate, num_bytes / machine.memory_rate)
    return max(machine.kernel_ns, round(work * 1e9))
