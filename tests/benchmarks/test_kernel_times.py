"""Recorded kernels of two runs, compared by kind."""

import json

import pytest

from benchmarks.accuracy import kernels as kernel_times

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
def kernels():
    return kernel_times


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


def test_calls_beside_computing_and_gaps_are_told_apart(kernels):
    us = 1_000
    ran = [
        ("nvjet", 7, 0, 100 * us), ("add", 8, 90 * us, 60 * us),  # computes until 150
        ("ncclA", 9, 20 * us, 100 * us), ("ncclB", 9, 130 * us, 80 * us),  # a quarter beside
        ("ncclC", 9, 300 * us, 10 * us), ("nvjet", 7, 316 * us, 4 * us),
        ("ncclD", 9, 322 * us, 90 * us), ("Memcpy PtoP", 9, 420 * us, us),
    ]  # fmt: skip
    assert kernels.calls(ran) == {"alone": [2, 82.5, 85.0, 87.5], "beside": [1, 100, 100, 100]}
    found = kernels.gaps([one for one in ran if "PtoP" not in one[0]])
    assert found == {
        "call to call": {"count": 1, "ms": 0.09, "median_us": 90.0, "long_ms": 0.09},
        "call to computing": {"count": 1, "ms": 0.01, "median_us": 6.0, "long_ms": 0.0},
        "computing to call": {"count": 1, "ms": 0.0, "median_us": 2.0, "long_ms": 0.0},
    }
    whole = kernels.summary(ran, 1)
    assert whole["gaps"] == found
    assert whole["calls"] == kernels.calls(ran)
    assert whole["ms"]["idle"] == 0.1
    assert kernels.calls([("ncclE", 9, 0, 70 * us)]) == {"alone": [1, 70, 70, 70]}
    lines = kernels.compare(ran, ran[:2])
    assert any("beside" in line and "1 x 100, 100, 100 us" in line for line in lines)


def test_products_are_told_apart_by_their_place_in_an_iteration(kernels):
    ms = 1_000_000
    steps = [[1, 2, 3, 4], [3, 2, 1, 4]]  # of one product, four times an iteration
    ran = [("gemmA", 7, 100 * ms * (4 * i + k), value * ms)
           for i, each in enumerate(steps) for k, value in enumerate(each)]  # fmt: skip
    ran += [("gemmB", 7, 5 * ms, ms), ("add", 7, 6 * ms, ms), ("add", 7, 999 * ms, ms)]
    assert kernels.products(ran[::-1], 2, 4) == [2.0, 2.0, 2.0, 4.0]  # gemmB ran once: left out
    assert kernels.products(ran, 2, 2) == [4.0, 6.0]
    slower = [(name, stream, start, 2 * ns) for name, stream, start, ns in ran]
    (line,) = (one for one in kernels.compare(ran, slower, 2) if "eighths" in one)
    assert line.endswith("2.000, -, 2.000, -, 2.000, -, 2.000, -")
    assert not any("eighths" in one for one in kernels.compare(ran, slower))
