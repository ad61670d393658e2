"""What machines without measured kernels are given, against kernels that were measured.

``python -m benchmarks.accuracy.rooflines``

Every time of the shipped op tables is predicted by the roofline of the same machine.  Prints, by
kind and machine, how far off the median is and the root of the mean square of the logarithms.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import product

import numpy as np

from megatron_prism.replay.costs.kernels import OpTable, parts_of, read
from megatron_prism.replay.costs.machine import machine


def measured(table: OpTable) -> Iterator[tuple[str, str, float]]:
    """(kind, kernel as the recorder writes it, ns)."""
    for key, grid in table.grids.items():
        name, how, *_ = words = key.split()
        sizes = [np.exp(axis).round().astype(int).tolist() for axis in grid.axes]
        for at in product(*map(range, grid.ns.shape)):
            a, b, c = (size[i] for size, i in zip(sizes, at, strict=True))
            ns = math.exp(grid.ns[at]) if not math.isnan(grid.ns[at]) else 0.0
            if not ns or words[-1] != "bfloat16" or name == "bmm" or how == "flash2":
                continue
            if name == "gemm":
                work, moved = 2 * a * b * c, 2 * (a * c + c * b + a * b)
                yield "products", f"mm({a}x{c},{c}x{b})bfloat16:{work}:{moved}", ns
            else:
                work = (2 if name == "attention" else 5) * a * b * b * c
                yield name, f"{name}({b}x1x{a}x{c})bfloat16:{work}:0", ns
    for key, (sizes, times) in table.kernels.items():
        name, dtype = key.rsplit(maxsplit=1)
        for size, ns in zip(sizes.tolist(), times.tolist(), strict=True):
            yield "others, by bytes", f"{name.replace(' ', '_')}(){dtype}:0:{round(size)}", ns


def main() -> None:
    for name in ("h100", "h200"):
        bare = dataclasses.replace(machine(name), ops="")
        errors = defaultdict(list)
        for kind, kernel, ns in measured(read(name)):
            errors[kind].append(math.log(parts_of(kernel, 0, 0, 0, bare, None).roof / ns))
        for kind, all_ in errors.items():
            off = np.array(all_)
            print(f"| {kind}, {name.upper()} | {len(off)} | {np.exp(np.median(off)) - 1:+.0%} | "
                  f"{np.sqrt((off * off).mean()):.2f} |")  # fmt: skip


if __name__ == "__main__":
    main()
