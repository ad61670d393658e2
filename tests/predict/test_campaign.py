"""Deadlines: closed forms of renewals, the best interval, chances, and what is refused."""

import dataclasses
import json
import math

import numpy as np
import pytest
from helpers.pricing import priced

from megatron_prism.cli import main as cli
from megatron_prism.core.errors import PrismError, UsageError
from megatron_prism.core.ops import Op
from megatron_prism.core.program import Program, Programs
from megatron_prism.core.world import World
from megatron_prism.predict import Sampler, campaign
from megatron_prism.predict.campaign import Campaign
from megatron_prism.predict.variability import Variability

S = 1e9
PLAN = Campaign(1000, mtbf=3600 * S, interval=600 * S, checkpoint=30 * S, restart=120 * S)


def sampler(ns=1_000_000_000, size=1):
    program = Program.from_ops(0, [Op("compute", ns=ns)])
    return Sampler(priced(Programs(World(size), (program,), np.zeros(size))).timeline)


def spread(**parts):
    return Variability("test", **{**dict.fromkeys(("gpu", "step", "call", "network"), 0.0), **parts,
                                  "source": ""})  # fmt: skip


@pytest.mark.parametrize("plan", [
    PLAN,
    dataclasses.replace(PLAN, mtbf=600 * S),
    dataclasses.replace(PLAN, restart=0.0, checkpoint=0.0, interval=100 * S),
    dataclasses.replace(PLAN, interval=1e6 * S, mtbf=20_000 * S),
], ids=["usual", "often", "free", "no checkpoint"])  # fmt: skip
def test_draws_have_the_mean_of_the_closed_form(plan):
    work = np.full(20_000, 10_000 * S)
    took, failures = campaign.finish(work, plan, plan.interval, np.random.default_rng(0))
    mean = campaign.expected(10_000 * S, plan, plan.interval)
    assert took.mean() == pytest.approx(mean, abs=4 * took.std() / math.sqrt(len(took)))
    # failures are a Poisson stream: as many as mtbfs went by
    assert failures.mean() == pytest.approx(mean / plan.mtbf, rel=0.02)


def test_a_stretch_has_the_distribution_of_a_simulation_step_by_step():
    """One stretch, played failure by failure; a two-sample Kolmogorov-Smirnov at 1 %."""
    rng = np.random.default_rng(1)
    plan = Campaign(1, mtbf=500 * S, restart=100 * S)

    def get_through(length):
        spent = 0.0
        while (failure := rng.exponential(500 * S)) < length:
            spent += failure + get_through(100 * S)
        return spent + length

    played = np.sort([get_through(700 * S) for _ in range(3000)])
    drawn, _ = campaign.finish(np.full(6000, 700 * S), plan, math.inf, rng)
    points = np.concatenate([played, drawn])
    below = [np.searchsorted(np.sort(x), points, side="right") / len(x) for x in (played, drawn)]
    assert np.abs(below[0] - below[1]).max() < 1.63 * math.sqrt(1 / 3000 + 1 / 6000)


@pytest.mark.parametrize("checkpoint", [1.0, 30.0, 600.0, 5000.0])
def test_the_best_interval_is_best_and_daly_is_near(checkpoint):
    mtbf = 3600.0

    def cost(x):
        return math.expm1((x + checkpoint) / mtbf) / x

    best = campaign.best_interval(checkpoint, mtbf)
    assert cost(best) <= min(cost(best * 0.99), cost(best * 1.01))
    if checkpoint < 100:
        assert campaign.daly(checkpoint, mtbf) == pytest.approx(best, rel=0.01)
        assert campaign.young(checkpoint, mtbf) == pytest.approx(best, rel=0.2)


def test_chances_against_the_normal():
    """No failures, steps of 10 %: N iterations are a normal; the deadline at its 84 % point."""
    n, sigma = 10_000, 0.1
    mean = math.exp(sigma**2 / 2)
    deadline = n * mean * S * (1 + 1e-3)
    found = campaign.predict_run(sampler(), spread(step=sigma), Campaign(n, deadline=deadline))
    assert found.iteration == pytest.approx(mean * S, rel=0.01)
    assert found.failures == 0
    assert found.interval is None
    assert found.mean == pytest.approx(found.expected)
    # 0.1 % is one standard deviation of the sum, but 1,152 draws know the mean to 0.3 % only
    assert found.chance_low <= found.chance <= found.chance_high


def test_clusters_do_not_average_out():
    wide = campaign.predict_run(sampler(), spread(gpu=0.1), Campaign(100_000))
    narrow = campaign.predict_run(sampler(), spread(step=0.1), Campaign(100_000))

    def width(found):
        levels = dict(found.quantiles)
        return (levels[0.95] - levels[0.05]) / found.work

    assert width(wide) == pytest.approx(2 * 1.645 * 0.1, rel=0.35)  # of 48 clusters
    assert width(narrow) == pytest.approx(2 * 1.645 * 0.1 / math.sqrt(100_000), rel=0.1)


def test_what_cannot_be_is_refused():
    for change, says in [
        ({"iterations": 0}, "a run has iterations"),
        ({"deadline": 1.0}, "before the end of the first iteration"),
        ({"mtbf": -1.0}, "mtbf is -1"),
        ({"restart": -1.0}, "a cost is negative"),
    ]:
        with pytest.raises(UsageError, match=says):
            campaign.predict_run(sampler(), spread(), dataclasses.replace(PLAN, **change))
    rare = dataclasses.replace(PLAN, mtbf=10 * S, interval=3600 * S)
    with pytest.raises(PrismError, match="never gets through"):
        campaign.predict_run(sampler(), spread(), rare)


TEXT = "prism-program 1\nworld size=4\nprogram ranks=0-3\n0F compute ns=5s\n"
RUN = ["iterations=500K", "mtbf=3h", "checkpoint_cost=30s", "restart=10min"]


def test_the_command(tmp_path, capsys):
    path = tmp_path / "w.txt"
    path.write_text(TEXT)
    words = ["predict", str(path), "samples=100", *RUN]
    assert cli.main([*words, "deadline=40d", "checkpoint=best"]) == 0
    out = capsys.readouterr().out
    assert "by the deadline" in out
    assert "Young" in out
    chances = []
    for deadline in ("30d", "40d", "60d"):
        assert cli.main([*words, f"deadline={deadline}", "--json"]) == 0
        chances.append(json.loads(capsys.readouterr().out)["run"]["chance"])
    assert chances[0] < 0.02
    assert chances == sorted(chances)
    assert chances[2] > 0.99
    assert cli.main(["predict", str(path), "deadline=40d"]) == 2
    assert "iterations=500000" in capsys.readouterr().err
    assert cli.main([*words, "deadline=soon"]) == 2
    assert "30d" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("mtbf=1ms checkpoint_cost=30s restart=10min", "never gets through"),
        ("mtbf=20s checkpoint_cost=30s restart=10min", "would fail"),
        ("mtbf=40s checkpoint_cost=1s restart=10min", "would fail"),
        ("mtbf=infd checkpoint_cost=30s", "is no duration"),
        ("deadline=30", "with a unit: 30d, 30h"),
        ("deadline=1e3", "with a unit: 1e3d"),
        ("deadline=infd", "is no duration"),
        ("deadline=nand", "is no duration"),
    ],
)
def test_runs_that_cannot_be_say_so(words, says, tmp_path, capsys):
    """Each of these ended in a traceback, or took all memory."""
    path = tmp_path / "w.txt"
    path.write_text(TEXT)
    assert cli.main(["predict", str(path), "samples=100", "iterations=500K", *words.split()]) > 0
    assert says in capsys.readouterr().err
