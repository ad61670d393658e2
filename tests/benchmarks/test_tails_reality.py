"""The benchmark that holds tails against real runs, on runs that are drawn here."""

import dataclasses

import numpy as np
import pytest

from benchmarks.accuracy import tails_reality
from megatron_prism.core.errors import PrismError
from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.core.world import World
from megatron_prism.features.predict.variability import fitted, read_variability


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


def test_a_run_like_the_slices_is_met():
    rng = np.random.default_rng(0)
    steps = rng.lognormal(0, 0.03, (300, 2)).max(axis=1)
    found = tails_reality.judge(captured(rng, 60), None, (200.0 * steps).tolist())
    assert abs(found["p50_percent"]) < 1.0
    assert abs(found["p95_percent"]) < 2.0
    assert found["ks"] < 0.15
    assert found["p95_is_known"]
    assert found["timed_iterations"] == 60


def test_a_run_that_is_not_like_them_is_missed():
    rng = np.random.default_rng(1)
    steps = rng.lognormal(0, 0.15, 50)
    found = tails_reality.judge(captured(rng, 60), None, (220.0 * steps).tolist())
    assert found["ks"] > 0.15
    assert found["p50_percent"] < -2
    assert not found["p95_is_known"]


def test_slices_without_times_are_refused():
    bare = captured(np.random.default_rng(2), 1)
    with pytest.raises(PrismError, match="hold no repeated times"):
        tails_reality.judge(bare, None, [200.0])


def test_segments_that_wait_for_the_host_say_nothing_of_the_device():
    """Half of the time has gaps of the host that vary a lot; the other half hardly varies."""
    rng = np.random.default_rng(4)
    made = captured(rng, 60, step=0.0)
    changed = []
    for one in made.programs:
        samples, ops = one.samples.copy(), one.ops.copy()
        compute = np.flatnonzero(ops["name"] == 0)
        samples[:, ::2] = 3e6 * rng.lognormal(0, 0.5, samples[:, ::2].shape)
        samples[:, 1::2] = 2e6 * rng.lognormal(0, 0.01, samples[:, 1::2].shape)
        ops["host"][compute] = 1_000_000
        changed.append(dataclasses.replace(one, ops=ops, samples=samples))
    found = fitted(dataclasses.replace(made, programs=tuple(changed)), read_variability("public"))
    assert found.segment == pytest.approx(0.01, rel=0.1)
    assert found.step < 0.005
    assert "of the time, in which the device waits for the host" in found.source


@pytest.mark.parametrize("factor", [1.2, 3.0])
def test_single_iterations_that_wait_for_the_host_are_left_out(factor):
    """One sample in eight is longer than the rest of its iteration says."""
    rng = np.random.default_rng(5)
    made = captured(rng, 60, step=0.03)
    changed = []
    for one in made.programs:
        ops = one.ops.copy()
        ops["host"][ops["name"] == 0] = 1_000_000
        steps = rng.lognormal(0, 0.03, (60, 1))
        samples = 2e6 * steps * rng.lognormal(0, 0.01, one.samples.shape)
        samples[rng.random(samples.shape) < 1 / 8] *= factor
        changed.append(dataclasses.replace(one, ops=ops, samples=samples))
    found = fitted(dataclasses.replace(made, programs=tuple(changed)), read_variability("public"))
    assert found.segment == pytest.approx(0.01, rel=0.15)
    assert found.step == pytest.approx(0.03, rel=0.3)
    unknown = [dataclasses.replace(one, ops=old.ops)  # nobody says that it was the host
               for one, old in zip(changed, made.programs, strict=True)]  # fmt: skip
    found = fitted(dataclasses.replace(made, programs=tuple(unknown)), read_variability("public"))
    assert found.segment > 0.015


def test_a_device_that_always_waits_for_its_host_says_nothing_of_itself():
    rng = np.random.default_rng(6)
    made, public = captured(rng, 60, step=0.0), read_variability("public")
    changed = []
    for one in made.programs:
        ops = one.ops.copy()
        ops["host"][ops["name"] == 0] = 3_000_000
        ops["ns"][ops["name"] == 0] = 1_000_000
        samples = 3e6 * rng.lognormal(0, 0.3, one.samples.shape)
        hosts = np.rint(1e8 * rng.lognormal(0, 0.04, 60)).astype(np.int64)
        changed.append(dataclasses.replace(one, ops=ops, samples=samples, hosts=hosts))
    found = fitted(dataclasses.replace(made, programs=tuple(changed)), public)
    assert (found.step, found.segment) == (public.step, public.segment)
    assert found.host == pytest.approx(0.04, rel=0.2)
    assert "without 100 % of the time" in found.source
    assert "device, calls and" in found.source
    few = dataclasses.replace(made.programs[1], samples=made.programs[1].samples[:3])
    found = fitted(dataclasses.replace(made, programs=(changed[0], few)), public)
    assert (found.step, found.segment) == (public.step, public.segment)  # three say too little


def test_gpus_are_compared_where_none_of_them_waits_for_its_host():
    """Eight alike ranks of sixteen: hosts differ by a fifth, GPUs by a hundredth."""
    rng, alike = np.random.default_rng(7), []
    for rank in range(8):
        gpu, host = rng.lognormal(0, 0.01), rng.lognormal(0, 0.2)
        program = Program.from_ops(rank, [Op("compute", ns=2_000_000)] * 100)
        ops = program.ops.copy()
        ops["host"], ops["ns"] = 1_000_000, np.round(2e6 * gpu)
        samples = 2e6 * gpu * rng.lognormal(0, 0.005, (20, 100))
        samples[:, ::2] = 4e6 * host * rng.lognormal(0, 0.005, (20, 50))
        alike.append(dataclasses.replace(program, ops=ops, samples=samples.astype(np.int64)))
    some = Programs(World(16), tuple(alike), np.arange(16) // 2)
    assert fitted(some, read_variability("public")).gpu < 0.02


def test_segments_of_no_time_are_no_measure_of_the_others():
    rng = np.random.default_rng(8)
    made, changed = captured(rng, 60), []
    for one in made.programs:
        empty = [Op("compute", ns=0)] * 120
        ops = [Op("compute", ns=2_000_000)] * 100
        program = Program.from_ops(one.rank, [*empty, *ops])
        rows = program.ops.copy()
        rows["host"] = 1000
        samples = np.hstack([np.zeros((60, 120), dtype=np.int64), one.samples])
        changed.append(dataclasses.replace(program, ops=rows, samples=samples))
    found = fitted(dataclasses.replace(made, programs=tuple(changed)), read_variability("public"))
    assert found.step == pytest.approx(0.03, rel=0.3)
