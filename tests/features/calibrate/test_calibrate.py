"""Calls that were sampled: a prediction has the samples' distribution, and nobody else's."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_prism.core.errors import PrismError, UsageError
from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.core.world import World
from megatron_prism.features.calibrate import calibrate
from megatron_prism.features.predict.sampler import Sampler
from megatron_prism.features.predict.variability import Variability, call_spread
from megatron_prism.replay.costs.collectives import read_calibration
from megatron_prism.replay.priced_graph import price, replay
from megatron_prism.replay.uncertainty.interval import interval

TP, DP = "TENSOR_MODEL_PARALLEL_GROUP", "DATA_PARALLEL_GROUP"
STILL = Variability("still", 0.0, 0.0, 0.0, 0.0, "")
SIZE = 1 << 20


def file(path, samples=None, ranks=2, op="all_reduce"):
    """A calibration in which ``SIZE`` bytes among two take 1 ms, with samples or without."""
    row = {"op": op, "ranks": ranks, "bytes": SIZE, "ns": 1_000_000}
    rows = [row | ({} if samples is None else {"samples": samples})]
    path.write_text(json.dumps({"format": 1, "source": "here", "collectives": rows}))
    return path


def drawn(programs, path, spread=STILL, count=4000):
    """(iteration times of every replica, the sampler)."""
    made = price(programs, machine="h200", calibration=path)
    calls = call_spread(made.graph, made.prices, made.machine, path)
    sampler = Sampler(made.timeline, calls=calls)
    return sampler.draw(spread, count), sampler


def alike(world, ops):
    return Programs(world, (Program.from_ops(0, ops),), np.zeros(world.size, dtype=np.int64))


CALL = Op("all_reduce", TP, "bf16", SIZE // 2, SIZE // 2, "sum")


def test_one_call_has_the_distribution_of_its_samples(tmp_path):
    samples = (1e6 * np.random.default_rng(0).lognormal(0, 0.2, 64)).round().tolist()
    times, sampler = drawn(alike(World(2, tp=2), [CALL]), file(tmp_path / "c.json", samples))
    found, middle = np.quantile(times, (0.05, 0.5, 0.95)), np.median(samples)
    assert found == pytest.approx(1e6 * np.quantile(samples, (0.05, 0.5, 0.95)) / middle, rel=0.08)
    assert found[1] == pytest.approx(1e6, rel=0.01)
    assert "100 % of the calls' time: 1 cells of 64 samples" in sampler.calls.source
    halved, _ = drawn(alike(World(2, tp=2), [CALL]), tmp_path / "c.json", STILL.scaled("call", 0.5))
    assert np.quantile(halved, 0.95) - 1e6 == pytest.approx((found[2] - 1e6) / 2, rel=0.1)


def test_a_call_between_replicas_is_one_draw_for_all_of_them(tmp_path):
    """Not the slowest of as many as there are replicas."""
    samples = (1e6 * np.random.default_rng(0).normal(1, 0.1, 64)).round().tolist()
    path = file(tmp_path / "c.json", samples, ranks=8)
    ops = [Op("all_reduce", DP, "bf16", SIZE // 2, SIZE // 2, "sum")]
    times, sampler = drawn(alike(World(8), ops), path)
    assert sampler.replicas == 8
    assert (times == times[:, :1]).all()
    assert times.std() == pytest.approx(1e5, rel=0.15)


def test_other_calls_vary_as_the_variability_says(tmp_path):
    path = file(tmp_path / "c.json", [1_000_000] * 64)
    gather = Op("all_gather", TP, "bf16", 1 << 22, 1 << 23)
    spread = Variability("calls", 0.0, 0.0, 0.1, 0.0, "")
    only, _ = drawn(alike(World(2, tp=2), [CALL]), path, spread)
    assert (only == 1e6).all()
    times, sampler = drawn(alike(World(2, tp=2), [CALL, gather]), path, spread)
    modelled = sampler.timeline.iteration_ns - 1e6
    assert times.std() == pytest.approx(0.1 * modelled, rel=0.1)


def test_the_nearest_size_is_taken(tmp_path):
    path = tmp_path / "c.json"
    wide = (1e6 * np.random.default_rng(1).normal(1, 0.1, 64)).round().tolist()
    rows = [
        {"op": "all_reduce", "ranks": 2, "bytes": SIZE, "ns": 10**6, "samples": [10**6] * 64},
        {"op": "all_reduce", "ranks": 2, "bytes": 64 * SIZE, "ns": 10**7, "samples": wide},
    ]
    path.write_text(json.dumps({"format": 1, "source": "here", "collectives": rows}))
    for times, varies in ((2, False), (32, True)):
        call = Op("all_reduce", TP, "bf16", times * SIZE // 2, times * SIZE // 2, "sum")
        found, _ = drawn(alike(World(2, tp=2), [call]), path)
        assert bool(found.std() > 1e3) is varies


def test_messages_of_both_ways_take_samples_of_exchanges(tmp_path):
    """As their prices do."""
    samples = (1e6 * np.random.default_rng(1).normal(1, 0.1, 64)).round().tolist()
    path = file(tmp_path / "c.json", samples, op="exchange")
    one = {"group": "PIPELINE_MODEL_PARALLEL_GROUP", "dtype": "bf16", "batch": 0, "peer": 1}
    ops = [Op("send", num_in=SIZE // 2, handle=0, **one),
           Op("recv", num_out=SIZE // 2, handle=1, **one),
           Op("wait", handle=0), Op("wait", handle=1)]  # fmt: skip
    times, _ = drawn(alike(World(2, pp=2), ops), path)
    assert times.std() > 5e4


@pytest.mark.parametrize(
    ("samples", "error", "says"),
    [
        ([1, 2], PrismError, "all_reduce of 1,048,576 bytes among 2 has 2 samples"),
        ([1e6, 0, 2e6, 1e6, 1e6], PrismError, "durations are above 0"),
        ([1e6, float("nan"), 2e6, 1e6, 1e6], UsageError, "no JSON"),
    ],
)
def test_samples_that_cannot_be(tmp_path, samples, error, says):
    with pytest.raises(error, match=says):
        drawn(alike(World(2, tp=2), [CALL]), file(tmp_path / "c.json", samples))


@pytest.fixture
def behind(monkeypatch, tmp_path):
    """``calibrate_calls.Behind`` on a CPU that keeps a GPU's time: a copy takes 40 us, a product
    100 and 7 more for each before it, a call what the test says."""
    clock = {"now": 0.0, "products": 0}

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock["now"]

        def elapsed_time(self, other):
            return (other.at - self.at) / 1e3  # ms

    class Copied(torch.Tensor):
        def copy_(self, other):
            clock["now"] += 40
            return self

    def compute(self):
        clock["now"] += 100 + 7 * clock["products"]  # its clock falls
        clock["products"] += 1

    def on_cpu(made):
        return lambda *size, **more: made(*size, **{**more, "device": "cpu"})

    for name in ("randn", "zeros", "tensor"):
        monkeypatch.setattr(torch, name, on_cpu(getattr(torch, name)))
    for name in ("synchronize", "_sleep"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(calibrate, "_PRODUCT", 8)
    monkeypatch.setattr(calibrate, "_COPIED", 8)
    monkeypatch.setattr(calibrate, "_HEAT_S", 0.0)
    monkeypatch.setattr(calibrate.CallTimer, "_compute", compute)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    made = calibrate.CallTimer()
    made._to = made._to.as_subclass(Copied)
    yield made, clock
    torch.distributed.destroy_process_group()


def test_a_call_takes_what_a_span_with_it_takes_more(behind):
    measure, clock = behind
    times = iter(range(10, 1000))

    def call():
        clock["now"] += next(times)

    # one makes connections; of the spans the first four count no more than that
    assert measure("all_reduce", call, 5, None) == [15_000, 16_000, 17_000, 18_000, 19_000]
    assert clock["products"] == 2 * (5 + 4)  # one before each span
    assert measure("send", lambda: None, 5, None) == []


def test_one_gpu_measures_what_calls_take_of_the_host(behind, monkeypatch, tmp_path):
    """Nothing that takes two; calls stay modelled in a replay with it."""
    step = calibrate._step
    monkeypatch.setattr(calibrate, "_step", lambda device: step("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(calibrate, "_REPEATS", 1)
    monkeypatch.setattr(calibrate, "_CALLS", 1)
    bench = SimpleNamespace(cuda=True, rank=0, size=1, samples_ns=lambda: behind[0])
    path = tmp_path / "one.json"
    path.write_text(calibrate._text(calibrate._calls_stage(bench)))
    found = read_calibration(path)
    assert {name for name, _ in found.host} == {
        "all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all",
    }  # fmt: skip
    assert (found.points, found.overlap, found.held) == ({}, {}, 0)
    work = Op("compute", ns=10**6, lead=10**4, host=10**5)
    # far longer on the wire than the host of this test takes, however busy it is
    large = dataclasses.replace(CALL, num_in=1 << 32, num_out=1 << 32)
    timeline = replay(alike(World(2, tp=2), [work, large]), machine="h100", calibration=path)
    assert any(text.startswith("modelled: NCCL") for text in timeline.prices.sources)
    assert any("calls (1 x NVIDIA H100" in text for text in timeline.prices.sources)
    assert {one.what for one in interval(timeline).sources} >= {"calls"}
