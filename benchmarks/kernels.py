"""Where two recorded turns of one rank spend the device's time, by kind of kernel.

``python benchmarks/kernels.py REAL/kernels-0.json EMULATED/kernels-0.json`` (what ``turns.py
--kernels`` keeps in its work folder) prints for every kind how many kernels ran and for how many
ms, then the kernels whose sums differ most, and how long nothing ran.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

Kernel = tuple[str, int, int, int]  # name, stream, start in ns, ns
KINDS = (
    ("collectives", r"nccl|prism_"),
    ("attention", r"flash|fmha|cudnn.*sdpa|softmax"),
    ("products", r"gemm|nvjet|cutlass|cublas"),
    ("words", r"^Memcpy PtoP"),  # of a rank alone, which keep links awake
    ("copies", r"^Mem(cpy|set)"),
)


def kind(name: str) -> str:
    """What a kernel is for."""
    found = (label for label, pattern in KINDS if re.search(pattern, name, re.IGNORECASE))
    return next(found, "others")


def sums(kernels: Iterable[Kernel]) -> dict[str, list[float]]:
    """By kernel: how many, ms in all."""
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for name, _, _, ns in kernels:
        found[name][0] += 1
        found[name][1] += ns / 1e6
    return found


def idle(kernels: Sequence[Kernel]) -> float:
    """ms between the first start and the last end in which no kernel ran."""
    gaps, end = 0, kernels[0][2] if kernels else 0
    for _, _, start, ns in sorted(kernels, key=lambda kernel: kernel[2]):
        gaps += max(0, start - end)
        end = max(end, start + ns)
    return gaps / 1e6


def by_kind(found: dict[str, list[float]]) -> dict[str, list[float]]:
    """Sums of sums, by kind."""
    kinds: dict[str, list[float]] = {label: [0, 0.0] for label in [*dict(KINDS), "others"]}
    for name, (count, ms) in found.items():
        kinds[kind(name)][0] += count
        kinds[kind(name)][1] += ms
    return kinds


def compare(real: Sequence[Kernel], other: Sequence[Kernel], most: int = 8) -> list[str]:
    """Lines to print; kernels of both runs are matched by their names."""
    sides = sums(real), sums(other)
    pairs = [by_kind(side) for side in sides]
    lines = [_line(label, pairs[0][label], pairs[1][label]) for label in pairs[0]]
    lines.append(f"{'idle':>12}          {idle(real):10.2f}         {idle(other):10.2f} ms")
    names = [name for name in {*sides[0], *sides[1]} if kind(name) != "collectives"]
    none = [0, 0.0]
    differs = {name: sides[1].get(name, none)[1] - sides[0].get(name, none)[1] for name in names}
    worst = sorted(names, key=lambda name: -abs(differs[name]))[:most]
    return lines + [
        _line("", *(side.get(name, none) for side in sides)) + f"  {name[:80]}" for name in worst
    ]


def _line(label: str, real: Sequence[float], other: Sequence[float]) -> str:
    found = (f"{count:7.0f} x {ms:10.2f}" for count, ms in (real, other))
    return f"{label:>12}" + "".join(found) + f" ms {other[1] - real[1]:+9.2f}"


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    real, other = (json.loads(Path(name).read_text()) for name in sys.argv[1:])
    print("\n".join(compare(real, other)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
