"""Does a prediction put layouts of one model in the order of the real jobs?

``python -m benchmarks.accuracy.layout_order``

Reads the stored real jobs of ``benchmarks/results`` (every file with predicted times), groups those
of the same
model, sequence and precision, and compares the order by time per sample, real and predicted, by
Kendall's tau.  The predictions come from ranks captured alone on the same GPUs, not from tier
``meta``, which ``prism sweep`` uses; batches of layouts differ.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from benchmarks.accuracy.jobs import COMMON, EVERY, MORE
from benchmarks.report import ROOT

SITTINGS = {
    **{f"h200_x4_{name}": 4 for name in ("nine", "between", "iteration_time", "paced", "turns")},
    **{
        f"h200_x2_{name}": 2 for name in ("again", "behind", "between", "links", "pauses", "steady")
    },
}
MODEL = ("--num-layers", "--hidden-size", "--ffn-hidden-size", "--seq-length", "--num-experts",
         "--transformer-impl", "--fp8-format")  # fmt: skip
Score = tuple[float, float]  # ms per sample: real, predicted


def flags(config: str, more: str | None, gpus: int) -> dict[str, str]:
    """Flag -> its value; the last one counts."""
    words = shlex.split(f"{COMMON} {(EVERY[gpus] | MORE)[config]} {more or ''}")
    pairs = zip(words, [*words[1:], "--"], strict=True)
    return {a: "" if b.startswith("--") else b for a, b in pairs if a.startswith("--")}


def groups(name: str, gpus: int) -> dict[tuple[str, ...], list[Score]]:
    """Scores of the layouts of each model in one sitting; the mean of a layout's repetitions."""
    rows: list[dict[str, Any]] = json.loads(
        (ROOT / "benchmarks" / "results" / f"{name}.json").read_text()
    )["rows"]
    found: dict[tuple[str, ...], dict[str, list[Score]]] = {}
    for row in rows:
        given = flags(row["config"], row.get("more"), gpus)
        batch = int(given["--global-batch-size"])
        model = tuple(given.get(flag, "") for flag in MODEL)
        layout = found.setdefault(model, {}).setdefault(row["config"], [])
        layout.append((row["real_ms"] / batch, row["predicted_ms"] / batch))
    return {
        model: [
            (sum(real for real, _ in all_) / len(all_), sum(said for _, said in all_) / len(all_))
            for all_ in layouts.values()
        ]
        for model, layouts in found.items()
        if len(layouts) > 1
    }


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float:
    """tau-b of two scores of the same things: 1 the same order, -1 the opposite one.

    Source: Kendall, The treatment of ties in ranking problems, Biometrika 33 (1945), 239-251.
    """
    both = ties_one = ties_other = pairs = 0
    for i in range(len(one)):
        for j in range(i):
            a = (one[i] > one[j]) - (one[i] < one[j])
            b = (other[i] > other[j]) - (other[i] < other[j])
            both += a * b
            ties_one += a == 0
            ties_other += b == 0
            pairs += 1
    scale = ((pairs - ties_one) * (pairs - ties_other)) ** 0.5
    return both / scale if scale else 0.0


def main() -> None:
    """Print tau of every group, and of all pairs together."""
    right = pairs = 0
    for name, gpus in SITTINGS.items():
        for model, scores in groups(name, gpus).items():
            real, said = zip(*scores, strict=True)
            count = len(scores) * (len(scores) - 1) // 2
            tau = kendall_tau(real, said)
            pairs, right = pairs + count, right + round((tau + 1) / 2 * count)
            print(f"{name} {' '.join(filter(None, model))}: {len(scores)} layouts, tau {tau:.2f}")
    print(f"{right} of {pairs} pairs in the real order, tau {(2 * right - pairs) / pairs:.2f}")


if __name__ == "__main__":
    main()
