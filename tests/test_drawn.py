"""One drawn iteration as prices: a replay of them takes what was drawn, and only those are slow."""

import dataclasses

import numpy as np
import pytest

from megatron_prism import costs, graph, stochastic
from megatron_prism.costs.machine import machine
from megatron_prism.costs.variability import Variability, variability
from megatron_prism.errors import UsageError
from megatron_prism.ops import Op
from megatron_prism.program import Program
from megatron_prism.programs import Programs
from megatron_prism.replay import dag as dags
from megatron_prism.replay import maxplus, release, timeline
from megatron_prism.stochastic.calls import CallSpread
from megatron_prism.stochastic.drawn import read_draw
from megatron_prism.world import World

TP, PP, DP = "TENSOR_MODEL_PARALLEL_GROUP", "PIPELINE_MODEL_PARALLEL_GROUP", "DATA_PARALLEL_GROUP"
ALL = Variability("all", 0.08, 0.05, 0.1, 0.1, "", segment=0.05)


def pipeline(world, microbatches=3):
    """Two stages that hand microbatches on, tp calls inside, one dp call at the end."""
    made = []
    for stage in range(2):
        ops = []
        for microbatch in range(microbatches):
            message = {"group": PP, "dtype": "bf16", "peer": 1, "microbatch": microbatch}
            work = [Op("compute", ns=2_000_000 + 300_000 * stage, phase="forward"),
                    Op("all_reduce", TP, "bf16", 1 << 20, 1 << 20, "sum")]  # fmt: skip
            if stage == 0:
                ops += [*work, Op("send", num_in=1 << 20, **message)]
            else:
                ops += [Op("recv", num_out=1 << 20, **message), *work]
        ops.append(Op("all_reduce", DP, "fp32", 1 << 20, 1 << 20, "sum"))
        ops.append(Op("all_reduce", "default_pg", "fp32", 1, 1, "sum"))  # the gradient norm
        made.append(Program.from_ops(stage, ops))
    return Programs(world, tuple(made), world._along("pp", np.arange(world.size)))


def pricing(world_graph):
    return costs.price(world_graph, machine("h200"))


def path(world_graph, prices):
    """The longest path of one iteration, ns."""
    dag = dags.build(world_graph, 1)
    return int(maxplus.evaluate(dag, timeline.durations_of(dag, prices))[1].max())


def sampled(world_graph, prices):
    """Half of the calls were sampled."""
    kind = np.where(np.arange(len(prices.meetings)) % 2, 0, -1)
    shape = stochastic.calls.Distribution("lognormal", (0.0, 0.2))
    return CallSpread(kind, (shape,), "made up")


@pytest.mark.parametrize("world", [World(8, tp=2, pp=2), World(64, tp=2, pp=2)], ids=str)
@pytest.mark.parametrize("calls", [None, sampled])
@pytest.mark.parametrize("count", [3, 100, 700])
def test_the_factors_of_a_draw_are_those_that_made_it(world, calls, count):
    made = graph.build(pipeline(world))
    prices = pricing(made)
    given = calls(made, prices) if calls else None
    sampler = stochastic.Sampler(made, prices, 5, given)
    times = sampler.draw(ALL, count)
    dag = dags.build(made, 1)
    base = timeline.durations_of(dag, prices).astype(float)
    for replica, iteration in ((0, 0), (sampler.replicas - 1, count - 1), (1, count // 2)):
        factors = sampler.at(ALL, count, iteration, replica)
        lasts = base.copy()
        lasts[sampler.paths.node] *= factors
        _, ends = maxplus.evaluate(dag, np.rint(lasts * 1000).astype(np.int64))
        assert ends.max() / 1000 == pytest.approx(times[iteration, replica], rel=1e-6)


@pytest.mark.parametrize("level", [None, 0.5, 0.99])
@pytest.mark.parametrize("local", [[0], [3, 9]])
def test_a_replay_of_it_takes_what_was_drawn(level, local):
    programs = pipeline(World(32, tp=2, pp=2))
    found = stochastic.drawn(programs, pricing, ALL, local, 3, level)
    assert not found.graph.check()
    for rank in local:
        assert found.graph.classes.counts[int(found.graph.classes.of[rank])] == 1
    assert path(found.graph, found.prices) == pytest.approx(found.ns, rel=0.02)
    table = release.releases(found.graph, found.prices, local)
    assert table.loose == 0
    assert "seed 3" in found.prices.sources[0]


def test_quantiles_are_those_of_the_distribution():
    programs = pipeline(World(32, tp=2, pp=2))
    levels = (0.05, 0.5, 0.99)
    times = [stochastic.drawn(programs, pricing, ALL, [0], 1, one).ns for one in levels]
    made = graph.build(programs)
    sampler = stochastic.Sampler(made, pricing(made), 99)
    wanted = np.quantile(sampler.draw(ALL, 20_000).max(axis=1), levels)
    assert times == pytest.approx(wanted.tolist(), rel=0.01)
    again = stochastic.drawn(programs, pricing, ALL, [0], 1, 0.99)
    assert again.ns == times[2]


def test_only_what_varies_is_drawn():
    """Nothing: the prices are those of the world.  The network: all calls by one factor."""
    programs = pipeline(World(8, tp=2, pp=2))
    still = dataclasses.replace(ALL, gpu=0.0, step=0.0, call=0.0, network=0.0, segment=0.0)
    found = stochastic.drawn(programs, pricing, still, [0], 0)
    plain = pricing(found.graph)
    assert (found.prices.meetings == plain.meetings).all()
    assert all((a == b).all() for a, b in zip(found.prices.compute, plain.compute, strict=True))
    shaken = stochastic.drawn(programs, pricing, dataclasses.replace(still, network=0.3), [0], 0)
    factors = shaken.prices.meetings / np.maximum(plain.meetings, 1)
    chosen = plain.meetings > 0
    assert np.ptp(factors[chosen]) < 1e-3
    assert abs(factors[chosen].mean() - 1) > 0.01


def test_the_public_spreads():
    found = stochastic.drawn(
        pipeline(World(32, tp=2, pp=2)), pricing, variability("public"), [0], 1
    )
    assert found.ns > found.steady * 0.98


@pytest.mark.parametrize(
    ("text", "found"),
    [("7", (7, None)), ("7:p99", (7, 0.99)), ("0:0.5", (0, 0.5)), ("12:p99.9", (12, 0.999))],
)
def test_how_a_draw_is_named(text, found):
    assert read_draw(text) == found


@pytest.mark.parametrize("text", ["", "x", "-1", "7:", "7:2", "7:p0", "7:pp", "7:0.9999999"])
def test_what_names_no_draw(text):
    with pytest.raises(UsageError, match=r"names no draw|it takes"):
        read_draw(text)
