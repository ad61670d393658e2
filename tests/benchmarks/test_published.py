"""The table of published jobs is that of stored rows; kernels that never ran have its errors."""

import json
import re
from pathlib import Path

import pytest

from megatron_prism.replay.uncertainty.interval import RANGES

ROOT = Path(__file__).parents[2]
ROWS = json.loads((ROOT / "benchmarks/results/published_h100.json").read_text("utf-8"))["rows"]


def test_the_table_has_every_row_the_worst_included():
    page = (ROOT / "docs/measurements.md").read_text(encoding="utf-8")
    text = page.partition("## Published large jobs")[2]
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:]
    shown = [re.split(r"\s*\|\s*", line)[1:-1] for line in lines[: len(ROWS)]]
    assert len(ROWS) >= 5
    worst = {key: max(abs(row[key]) for row in ROWS) for key in ("error", "median_error")}
    for row, cells in zip(ROWS, shown, strict=True):
        error, median_error = (
            (f"**{text}**" if abs(row[key]) == worst[key] else text)
            for key in worst
            for text in [f"{100 * row[key]:+.0f} %".replace("-", "−")]
        )
        assert cells[:2] == [row["name"], f"{row['gpus']:,}"]
        figures = [f"{row['tflops']:.0f}", f"{row['predicted_tflops']:.0f}"]
        assert cells[3:7] == [*figures, error, median_error]
        # TFLOP/s on the slowest and the fastest host
        fastest_s, slowest_s = row.get("hosts_s", (1, 1))
        on_hosts = ""
        if fastest_s < slowest_s:
            flops = row["predicted_tflops"] * row["iteration_s"]
            on_hosts = f"{flops / slowest_s:.0f} to {flops / fastest_s:.0f}"
        assert cells[7] == on_hosts


def test_published_times_follow_from_model_flops():
    """GPT 177B by hand: 12 B s L h^2 (1 + 1 + s / h + 4 + V / (2 L h)), Megatron's count."""
    row = next(row for row in ROWS if row["name"] == "GPT 177B")
    h, layers, seq = 12288, 96, 4096
    flops = 12 * 1152 * seq * layers * h**2 * (1 + 1 + seq / h + 4 + 131072 / (2 * layers * h))
    assert abs(flops / 2304 / 432.8e12 / row["published_iteration_s"] - 1) < 1e-9


def test_a_job_whose_host_nobody_knows_lies_among_the_measured_hosts():
    row = next(row for row in ROWS if "of others" in row["name"])
    fastest_s, slowest_s = row["hosts_s"]
    assert fastest_s < row["published_iteration_s"] < slowest_s


def _waits_for_its_host(row):
    fastest_s, slowest_s = row.get("hosts_s", (1, 1))
    return fastest_s < slowest_s


@pytest.mark.parametrize("kind", ["op table", "op table and roofline", "roofline"])
def test_kernels_that_never_ran_are_given_the_error_that_was_found(kind):
    worst = max(abs(row["error"]) for row in ROWS if not _waits_for_its_host(row))
    range = next(one for one in RANGES if one.begins == f"modelled: {kind}")
    assert worst - 0.01 < range.high - 1 < worst + 0.05
