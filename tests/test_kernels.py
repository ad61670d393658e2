"""Recorded kernels of two runs, compared by kind."""

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
REAL = [
    ("nvjet_tst_128", 7, 0, 2_000_000),
    ("ncclDevKernel_AllReduce_Sum_bf16", 9, 1_000_000, 4_000_000),
    ("Memset (Device)", 7, 7_000_000, 1_000_000),
    ("nvjet_tst_128", 7, 8_000_000, 3_000_000),
]
PACED = [
    ("nvjet_tst_128", 7, 0, 2_000_000),
    ("prism_call", 9, 1_000_000, 4_500_000),
    ("nvjet_tst_128", 7, 8_000_000, 2_000_000),
]


@pytest.fixture
def kernels(monkeypatch):
    if not BENCHMARKS.exists():
        pytest.skip("benchmarks are in the checkout only")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("kernels")


def test_kinds_and_what_nothing_ran(kernels):
    real = kernels.by_kind(kernels.sums(REAL))
    assert real["products"] == [2, 5.0]
    assert real["collectives"] == [1, 4.0]
    assert real["copies"] == [1, 1.0]
    assert real["others"] == [0, 0.0]
    assert kernels.idle(REAL) == 2.0
    assert kernels.idle([]) == 0.0


def test_calls_of_nccl_are_held_against_ours(kernels, tmp_path, monkeypatch, capsys):
    lines = kernels.compare(REAL, PACED)
    (collectives,) = (line for line in lines if "collectives" in line)
    assert collectives.endswith("+0.50")
    (product,) = (line for line in lines if "nvjet" in line)
    assert "-1.00" in product
    files = [tmp_path / name for name in ("a.json", "b.json")]
    for file, side in zip(files, (REAL, PACED), strict=True):
        file.write_text(json.dumps(side))
    monkeypatch.setattr("sys.argv", ["kernels.py", *map(str, files)])
    assert kernels.main() == 0
    assert capsys.readouterr().out.splitlines() == lines
