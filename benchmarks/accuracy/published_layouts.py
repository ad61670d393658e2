"""In which order does a replay without a GPU put layouts that others measured?

``python -m benchmarks.accuracy.published_layouts DIR [GROUP …]``

``results/published_layouts.json`` has groups of layouts of one model, each with its source and what
was measured: seconds of an iteration, or tokens a second and GPU.  Each layout is captured on tier
``meta`` (slices are kept in DIR, and taken from it), and replayed on its machine.  Nothing is
fitted.  Of all pairs of a group: said to differ and right, and wrong; said to be equal; and how
often the measured ratio lies in the 95 % interval of the predicted one.  tau is Kendall's.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import combinations
from pathlib import Path

import numpy as np

from benchmarks.accuracy.tables import kendall_tau, signed, stored
from megatron_prism.core.errors import PrismError, UsageError
from megatron_prism.core.jobs import recipe as recipes
from megatron_prism.features.sweep.evaluate import SweepSettings, timeline_of
from megatron_prism.features.sweep.layout import RecipeLayout
from megatron_prism.features.sweep.space import parse_axes, point_of
from megatron_prism.memory import nccl_buffers
from megatron_prism.replay.uncertainty.differences import UncertainTime, drawn


def predicted(
    base: str, settings: str, axes: str, machine: str, folder: Path
) -> tuple[RecipeLayout, UncertainTime]:
    """A layout and its iteration."""
    job = recipes.load(base, settings.split())
    values = parse_axes(axes.split(), job)
    point = point_of(job, {axis: value for axis, (value,) in values.items()})
    layout = point.layout
    if not isinstance(layout, RecipeLayout):
        raise UsageError(point.reason, fix="see published_layouts.json")
    how = SweepSettings(folder.absolute(), machine, None, nccl_buffers.DEFAULT)
    return layout, UncertainTime.of_timeline(timeline_of(layout, how))


def compared(pairs: list[tuple[float, UncertainTime]]) -> str:
    """The cells of a group's row."""
    times = drawn([one for _, one in pairs])
    right = wrong = equal = inside = 0
    for (i, (real, _)), (j, (other, _)) in combinations(enumerate(pairs), 2):
        low, high = np.quantile(times[:, j] / times[:, i], [0.025, 0.975])
        same = low <= 1 <= high
        equal += same
        right += not same and (low > 1) == (other > real)
        wrong += not same and (low > 1) != (other > real)
        inside += low <= other / real <= high
    count = len(pairs) * (len(pairs) - 1) // 2
    tau = kendall_tau([real for real, _ in pairs], [one.ns for _, one in pairs])
    off = statistics.median(one.ns / real - 1 for real, one in pairs)
    return (f"{len(pairs)} | {count} | {right} | {wrong} | {equal} | {inside / count:.0%} | "
            f"{tau:.2f} | {signed(off, 0)}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("groups", nargs="*", help="all")
    args = parser.parse_args()
    lines = []
    for group in stored("published_layouts")["groups"]:
        if args.groups and group["name"] not in args.groups:
            continue
        pairs = []
        for row in group["rows"]:
            job = (group[key] for key in ("base", "settings"))
            try:
                layout, time = predicted(*job, row["axes"], row["machine"], args.folder)
            except PrismError as error:
                print(f"{group['name']} {row['axes']}: {error}", flush=True)
                continue
            tokens = layout.global_batch_size * layout.recipe.seq_length
            real = row.get("seconds") or tokens / layout.world.size / row["tokens_per_gpu"]
            of_token = layout.world.size / tokens
            pairs.append((1e9 * real * of_token, time.scaled(of_token)))
            print(json.dumps({"group": group["name"], "axes": row["axes"], "real_s": real,
                              "predicted_s": time.ns / 1e9}), flush=True)  # fmt: skip
        if len(pairs) > 1:
            lines.append(f"| {group['name']} | {compared(pairs)} |")
    head = ("group", "layouts", "pairs", "right", "wrong", "equal", "inside", "tau", "median error")
    print(f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines, sep="\n")


if __name__ == "__main__":
    main()
