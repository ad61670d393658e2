"""Tails: closed forms, a simulation of every rank, seeds, and what is refused."""

import dataclasses
import json
import math
import statistics

import numpy as np
import pytest
from helpers.pricing import priced
from helpers.spreads import ALL, TP, pipeline, same, spread, still

from megatron_prism.core.errors import UsageError
from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.core.world import World
from megatron_prism.features.predict.distributions import Distribution, quantile
from megatron_prism.features.predict.predict import predict
from megatron_prism.features.predict.sampler import Sampler
from megatron_prism.features.predict.variability import read_variability
from megatron_prism.graph.issue_graph import build_issue_graph
from megatron_prism.replay import timeline

NORMAL = statistics.NormalDist()


def test_a_chain_is_the_lognormal_itself():
    made = still(same(World(1), [Op("compute", ns=600_000), Op("compute", ns=400_000)]))
    found = predict(made, variability=spread(gpu=0.1), samples=40_000)
    assert found.steady == 1_000_000
    for one in found.quantiles:
        expected = 1e6 * math.exp(0.1 * NORMAL.inv_cdf(one.level))
        assert one.low <= one.ns <= one.high
        assert one.ns == pytest.approx(expected, rel=0.006)


@pytest.mark.parametrize(
    ("world", "n"), [(World(64), 64), (World(8, tp=8), 8), (World(64, tp=8), 64)]
)
def test_the_slowest_of_n_ranks(world, n):
    ops = [Op("compute", ns=1_000_000), Op("all_reduce", TP, "bf16", 1, 1, "sum"),
           Op("all_reduce", ALL, "bf16", 1, 1, "sum")]  # fmt: skip
    made = still(same(world, ops))
    found = predict(made, variability=spread(gpu=0.06, step=0.08), samples=20_000)
    for one in found.quantiles:
        expected = 1e6 * math.exp(0.1 * NORMAL.inv_cdf(one.level ** (1 / n)))
        assert one.ns == pytest.approx(expected, rel=0.01)


def test_one_regime_moves_all_calls_of_an_iteration():
    ops = [Op("all_reduce", ALL, "bf16", 1, 1, "sum") for _ in range(50)]
    made = priced(same(World(4), ops), 20_000).timeline
    together = Sampler(made).draw(spread(network=0.1), 20_000)[:, 0]
    apart = Sampler(made).draw(spread(call=0.1), 20_000)[:, 0]
    assert np.std(together) == pytest.approx(1e6 * 0.1, rel=0.05)
    assert np.std(apart) == pytest.approx(1e6 * 0.1 / math.sqrt(50), rel=0.1)


def every_rank(world, sigma, count, seed):
    """Iteration times with a factor for every single rank, each a class of its own."""
    rng = np.random.default_rng(seed)
    programs = pipeline(world)
    own = [
        Program.from_ops(rank, [*programs.of(rank), Op("mark", note=str(rank))])
        for rank in range(world.size)
    ]
    world_graph = still(Programs.one_per_rank(own, world))
    made, prices = world_graph.graph, world_graph.prices
    assert len(made.classes) == world.size
    dag, found = build_issue_graph(made), []
    for _ in range(count):
        factors = np.exp(sigma * rng.standard_normal(world.size))
        compute = tuple(
            np.round(ns * factors[rank]).astype(np.int64)
            for ns, rank in zip(prices.compute, made.classes.representatives, strict=True)
        )
        drawn = timeline.durations_of(dag, dataclasses.replace(prices, compute=compute))
        found.append(timeline.evaluate(dag, drawn)[1].max())
    return np.sort(found)


@pytest.mark.parametrize(
    "world", [World(8, tp=2, pp=2), World(16, tp=2, pp=4), World(128, tp=4, pp=4)], ids=str
)
def test_classes_have_the_distribution_of_all_ranks(world):
    """Two-sample Kolmogorov-Smirnov at 1 %, and moments."""
    count = 300
    ranks = every_rank(world, 0.1, count, seed=1)
    made = still(pipeline(world)).timeline
    classes = np.sort(Sampler(made, 2).draw(spread(gpu=0.1), 8000).max(axis=1))
    points = np.concatenate([ranks, classes])
    below = [np.searchsorted(x, points, side="right") / len(x) for x in (ranks, classes)]
    distance = np.abs(below[0] - below[1]).max()
    assert distance < 1.63 * math.sqrt(1 / count + 1 / len(classes))
    assert ranks.mean() == pytest.approx(classes.mean(), rel=0.01)
    assert ranks.std() == pytest.approx(classes.std(), rel=0.15)


@pytest.mark.parametrize(("level", "n"), [(0.5, 200), (0.95, 400), (0.95, 3000), (0.99, 2000)])
def test_intervals_cover(level, n):
    """A nominal 95 % interval holds the true quantile in 93 to 97 % of many repetitions."""
    rng = np.random.default_rng(0)
    truth, inside, repetitions = -math.log(1 - level), 0, 4000
    for draws in np.sort(rng.standard_exponential((repetitions, n)), axis=1):
        one = quantile(draws, level)
        inside += one.low <= truth <= one.high
    assert 0.93 <= inside / repetitions <= 0.97


def test_seeds_and_spreads():
    made = still(pipeline(World(8, tp=2, pp=2)))
    first, again = (predict(made, variability=spread(gpu=0.1), seed=5) for _ in range(2))
    assert first == again
    assert predict(made, variability=spread(gpu=0.1), seed=6) != first
    p95 = first.quantiles[2].ns
    assert first.halved["gpu"] < p95
    assert first.halved["call"] == pytest.approx(p95, rel=0.02)
    assert first.slow[1] > first.slow[0]  # the last stage has twice the work
    assert first.slow[1] > p95


def test_replicas_that_are_not_alike_are_one():
    programs = pipeline(World(8, tp=2, pp=2))
    odd = dataclasses.replace(
        programs,
        programs=(*programs.programs, Program.from_ops(5, [*programs.of(5), Op("compute", ns=1)])),
        program_of=np.where(np.arange(8) == 5, 2, programs.program_of),
    )
    sampler = Sampler(still(odd).timeline)
    assert sampler.replicas == 1
    assert sum(sampler.members) == 8
    whole = predict(still(programs), variability=spread(gpu=0.1)).quantiles[2].ns
    odd_one = predict(still(odd), variability=spread(gpu=0.1)).quantiles[2].ns
    assert odd_one == pytest.approx(whole, rel=0.02)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gpu": -1}, "gpu: expected `float` >= 0.0"),
        ({"gpu": "x"}, "gpu: expected `float`, got `str`"),
        ({"step": 2}, "step: expected `float` <= 1.0"),
        ({"what": 1}, "what: unknown"),
    ],
)
def test_files_of_variability(tmp_path, change, says):
    good = dataclasses.asdict(read_variability("public"))
    del good["shapes"], good["calls_by"]
    path = tmp_path / "v.json"
    path.write_text(json.dumps(good))
    assert read_variability(path) == read_variability("public")
    path.write_text(json.dumps(good | change))
    with pytest.raises(UsageError, match=says):
        read_variability(path)
    path.write_text("{")
    with pytest.raises(UsageError, match="no JSON"):
        read_variability(path)
    with pytest.raises(UsageError, match="cannot read a file of spreads"):
        read_variability(tmp_path / "none")


def test_the_slowest_of_n_exponentials_and_a_sum_of_normals():
    ops = [Op("compute", ns=1_000_000), Op("all_reduce", ALL, "bf16", 1, 1, "sum")]
    made = still(same(World(32), ops))
    exponential = Distribution("gamma", (1.0, 1.0))
    shaped = dataclasses.replace(spread(gpu=0.5), shapes={"gpu": exponential})
    drawn = Sampler(made.timeline).draw(shaped, 20_000).max(axis=1)
    harmonic = sum(1 / k for k in range(1, 33))
    assert drawn.mean() == pytest.approx(1e6 * harmonic, rel=0.01)
    made = still(same(World(1), [Op("compute", ns=10_000)] * 100))
    normal = Distribution("normal", (1.0, 0.2))
    shaped = dataclasses.replace(spread(), segment=0.2, shapes={"segment": normal})
    drawn = Sampler(made.timeline).draw(shaped, 20_000)[:, 0]
    assert drawn.mean() == pytest.approx(1e6, rel=0.002)
    assert drawn.std() == pytest.approx(1e6 * 0.02, rel=0.05)


def test_worlds_of_many_classes_try_the_busiest():
    ops = [Op("all_reduce", ALL, "bf16", 1, 1, "sum")]
    own = [Program.from_ops(rank, [Op("compute", ns=1000 + rank), *ops]) for rank in range(100)]
    made = still(Programs.one_per_rank(own, World(100)))
    found = predict(made, variability=spread(gpu=0.01), samples=200)
    assert sorted(found.slow) == list(range(36, 100))
    assert min(found.slow.values()) > found.slow_from


def test_calls_of_several_replicas_are_drawn_once():
    """A call of all 16 replicas is no maximum of 16 draws; calls inside replicas are."""
    for group, shared in ((ALL, True), (TP, False)):
        ops = [Op("all_reduce", group, "bf16", 1, 1, "sum")]
        made = priced(same(World(32, tp=2), ops), 1_000_000).timeline
        for count in (20, 1000):
            each = Sampler(made).draw(spread(call=0.1), count)
            assert each.shape == (count, 16)
            together = np.ptp(each, axis=1)
            assert (together == 0).all() if shared else (together > 0).all()
            assert np.std(each[:, 0]) == pytest.approx(1e5, rel=0.45 if count == 20 else 0.1)
