"""Tier meta keeps in every layer what a GPU kept (``benchmarks/accuracy/layer_memory.py``)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

DATA = Path(__file__).parents[2] / "benchmarks" / "results" / "h100_layer_memory.json"
FIGURES = {"forward": 100e6, "forward_peak": 150e6, "backward_peak": 200e6, "left": 50e6}


def test_rows_are_compared_by_their_largest_difference(capsys, monkeypatch, tmp_path):
    layer_memory = pytest.importorskip("benchmarks.accuracy.layer_memory")
    real = {"rows": {"a": FIGURES, "b": FIGURES, "c": {"failed": "no backend"}}}
    ours = {"rows": {"a": FIGURES, "b": {**FIGURES, "forward": 110e6}, "c": FIGURES}}
    found = {name: off for name, off, _ in layer_memory.compare(real, ours)}
    assert found == {"a": 0.0, "b": 5.0, "c": None}
    paths = [tmp_path / "real.json", tmp_path / "ours.json"]
    for path, what in zip(paths, (real, ours), strict=True):
        path.write_text(json.dumps(what))
    monkeypatch.setattr(sys, "argv", ["layer_memory", "compare", *map(str, paths)])
    assert layer_memory.main() == 1
    assert "1 of 2 rows within 0.5 %; 1 failed" in capsys.readouterr().out


@pytest.mark.megatron
@pytest.mark.slow
def test_tier_meta_against_the_gpu():
    core = pytest.importorskip("megatron.core")
    if not core.__version__.startswith("0.19"):
        pytest.skip("the GPU ran megatron-core 0.19, whose layers keep other tensors")
    words = [sys.executable, "-m", "benchmarks.accuracy.layer_memory", "compare", str(DATA)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=DATA.parents[2], check=False)
    assert done.returncode == 0, done.stdout[-4000:]
