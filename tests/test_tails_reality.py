"""The benchmark that holds tails against real runs, on runs that are drawn here."""

import dataclasses
import pathlib
import sys

import numpy as np
import pytest

from megatron_prism.errors import PrismError
from megatron_prism.ops import Op
from megatron_prism.program import Program
from megatron_prism.programs import Programs
from megatron_prism.world import World

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def reality(monkeypatch):
    if not BENCHMARKS.exists():
        pytest.skip("benchmarks are in the checkout only")
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    import tails_reality

    return tails_reality


def captured(rng, iterations, segments=100, step=0.03):
    """Two data-parallel ranks that compute 2 ms a segment."""
    made = []
    for rank in range(2):
        factors = rng.lognormal(0, step, (iterations, 1)) * rng.lognormal(
            0, 0.05, (iterations, segments)
        )
        ops = [Op("compute", ns=2_000_000)] * segments
        ops.append(Op("all_reduce", "default_pg", "fp32", 1, 1, "sum"))
        samples = np.round(2e6 * factors).astype(np.int64)
        made.append(dataclasses.replace(Program.from_ops(rank, ops), samples=samples))
    return Programs.one_per_rank(made, World(2))


def test_a_run_like_the_slices_is_met(reality):
    rng = np.random.default_rng(0)
    steps = rng.lognormal(0, 0.03, (300, 2)).max(axis=1)
    found = reality.judge(captured(rng, 60), None, (200.0 * steps).tolist())
    assert abs(found["p50_percent"]) < 1.0
    assert abs(found["p95_percent"]) < 2.0
    assert found["ks"] < 0.15
    assert found["p95_is_known"]
    assert found["timed_iterations"] == 60


def test_a_run_that_is_not_like_them_is_missed(reality):
    rng = np.random.default_rng(1)
    steps = rng.lognormal(0, 0.15, 50)
    found = reality.judge(captured(rng, 60), None, (220.0 * steps).tolist())
    assert found["ks"] > 0.15
    assert found["p50_percent"] < -2
    assert not found["p95_is_known"]


def test_slices_without_times_are_refused(reality):
    bare = captured(np.random.default_rng(2), 1)
    with pytest.raises(PrismError, match="hold no repeated times"):
        reality.judge(bare, None, [200.0])
