"""Where two recorded turns of one rank spend the device's time, by kind of kernel.

``python -m benchmarks.accuracy.kernels REAL/kernels-0.json EMULATED/kernels-0.json [STEPS]`` (what
``run.py --kernels`` keeps in its work folder) prints for every kind how many kernels ran and for
how many ms, how long nothing ran, quartiles of the calls with and without computing beside them,
with STEPS products by eighths of an iteration, and the kernels whose sums differ most.
``run.py`` keeps the same of every rank (``summary``).
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

CALL_NS, LONG_US = 60_000, 50  # calls that move much; gaps that the host made

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


def calls(kernels: Sequence[Kernel]) -> dict[str, list[float]]:
    """Calls of 60 us and more, ``alone`` and (at least half of their time) ``beside`` computing:
    [how many, quartiles in us]."""
    edges, so_far = _computing(kernels)
    found: dict[str, list[float]] = {"alone": [], "beside": []}
    for name, _, start, ns in kernels:
        if not _is_call(name) or ns < CALL_NS:
            continue
        begin, end = np.interp((start, start + ns), edges, so_far) if edges else (0, 0)
        found["beside" if 2 * (end - begin) >= ns else "alone"].append(ns / 1e3)
    return {
        which: [len(us), *(round(float(q), 1) for q in np.percentile(us, [25, 50, 75]))]
        for which, us in found.items()
        if us
    }


def products(kernels: Sequence[Kernel], steps: int, parts: int = 8) -> list[float]:
    """ms of products by part of an iteration.

    A product's part is its place among those of its name, so runs of other speeds compare; names
    whose number is no multiple of ``steps`` iterations are left out.
    """
    named: dict[str, list[int]] = defaultdict(list)
    for name, _, _, ns in sorted(kernels, key=lambda kernel: kernel[2]):
        named[name].append(ns)
    found = [0.0] * parts
    for name, each in named.items():
        a_step, left = divmod(len(each), steps)
        if kind(name) == "products" and not left:
            for number, ns in enumerate(each):
                found[number % a_step * parts // a_step] += ns / 1e6 / steps
    return [round(ms, 2) for ms in found]


def _computing(kernels: Sequence[Kernel]) -> tuple[list[int], list[int]]:
    """(where the device begins and ends to compute, ns it has computed by then), ascending."""
    edges: list[int] = []
    for start, end in sorted((k[2], k[2] + k[3]) for k in kernels if not _is_call(k[0])):
        if edges and start <= edges[-1]:
            edges[-1] = max(edges[-1], end)
        else:
            edges += [start, end]
    so_far = [0]
    for number, (before, after) in enumerate(itertools.pairwise(edges)):
        so_far.append(so_far[-1] + (after - before if number % 2 == 0 else 0))
    return edges, so_far[: len(edges)]


def gaps(kernels: Sequence[Kernel]) -> dict[str, dict[str, float]]:
    """Where nothing ran, by what ran before and behind: how many times, for how many ms, the median
    in us, and the ms of those longer than 50 us, which the host made."""
    found: dict[str, list[float]] = defaultdict(list)
    end, before = 0, ""
    for name, _, start, ns in sorted(kernels, key=lambda kernel: kernel[2]):
        what = "call" if _is_call(name) else "computing"
        if before and start > end:
            found[f"{before} to {what}"].append((start - end) / 1e3)
        if start + ns > end:
            end, before = start + ns, what
    return {
        which: {
            "count": len(us),
            "ms": round(sum(us) / 1e3, 2),
            "median_us": round(statistics.median(us), 2),
            "long_ms": round(sum(one for one in us if one > LONG_US) / 1e3, 2),
        }
        for which, us in sorted(found.items())
    }


def _is_call(name: str) -> bool:
    return kind(name) == "collectives"


def summary(kernels: Sequence[Kernel], steps: int) -> dict[str, Any]:
    """What a results file keeps of a recorded turn: ms by kind, calls, gaps, products."""
    own = [one for one in kernels if kind(one[0]) != "words"]
    ms = {label: round(total, 2) for label, (_, total) in by_kind(sums(kernels)).items()}
    return {"ms": {**ms, "idle": round(idle(own), 2)}, "calls": calls(own), "gaps": gaps(own),
            "products_by_eighths_ms": products(own, steps)}  # fmt: skip


def by_kind(found: dict[str, list[float]]) -> dict[str, list[float]]:
    """Sums of sums, by kind."""
    kinds: dict[str, list[float]] = {label: [0, 0.0] for label in [*dict(KINDS), "others"]}
    for name, (count, ms) in found.items():
        kinds[kind(name)][0] += count
        kinds[kind(name)][1] += ms
    return kinds


def compare(
    real: Sequence[Kernel], other: Sequence[Kernel], steps: int = 0, most: int = 8
) -> list[str]:
    """Lines to print; kernels of both runs are matched by their names."""
    sides = sums(real), sums(other)
    pairs = [by_kind(side) for side in sides]
    lines = [_line(label, pairs[0][label], pairs[1][label]) for label in pairs[0]]
    lines.append(f"{'idle':>12}          {idle(real):10.2f}         {idle(other):10.2f} ms")
    each = [calls([one for one in side if kind(one[0]) != "words"]) for side in (real, other)]
    for which in sorted({*each[0], *each[1]}):
        sides_us = (side.get(which, [0, 0, 0, 0]) for side in each)
        said = (f"{n:.0f} x {low:.0f}, {mid:.0f}, {high:.0f} us" for n, low, mid, high in sides_us)
        lines.append(f"calls {which:>6}" + "".join(f"{text:>30}" for text in said))
    if steps:
        pairs_ms = zip(products(real, steps), products(other, steps), strict=True)
        ratios = ", ".join(f"{b / a:.3f}" if a else "-" for a, b in pairs_ms)
        lines.append(f"products by eighths of an iteration, other/real: {ratios}")
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
    if len(sys.argv) not in (3, 4):
        print(__doc__, file=sys.stderr)
        return 2
    real, other = (json.loads(Path(name).read_text()) for name in sys.argv[1:3])
    print("\n".join(compare(real, other, int(sys.argv[3]) if sys.argv[3:] else 0)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
