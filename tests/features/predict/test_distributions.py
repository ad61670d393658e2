"""Fits: closed forms of the gamma, the largest of n, who is chosen, and what is refused."""

import dataclasses
import math
import statistics

import numpy as np
import pytest

from megatron_prism.core.errors import PrismError, ProgramError
from megatron_prism.core.programs import program
from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.core.world import World
from megatron_prism.features.predict.distributions import (
    Distribution,
    distance,
    fit,
    largest,
    probabilities,
)
from megatron_prism.features.predict.variability import Variability, fitted, read_variability

NORMAL = statistics.NormalDist()
X = np.array([0.05, 0.3, 1.0, 2.0, 5.0, 12.0])


def test_the_gamma_has_its_closed_forms():
    """Shape 1 is the exponential, shape 3 Erlang's, shape 1/2 a squared normal."""
    assert Distribution("gamma", (1.0, 1.0)).below(X) == pytest.approx(1 - np.exp(-X), abs=1e-5)
    erlang = 1 - np.exp(-X) * (1 + X + X * X / 2)
    assert Distribution("gamma", (3.0, 1.0)).below(X) == pytest.approx(erlang, abs=1e-5)
    square = [math.erf(math.sqrt(x)) for x in X]
    assert Distribution("gamma", (0.5, 1.0)).below(X) == pytest.approx(square, abs=1e-4)
    narrow = Distribution("gamma", (400.0, 1 / 400))
    assert narrow.spread == pytest.approx(0.05, rel=0.01)


@pytest.mark.parametrize(
    "one",
    [
        Distribution("normal", (1.0, 0.05)),
        Distribution("gamma", (4.0, 0.25)),
        Distribution("lognormal", (0.0, 0.3)),
    ],
    ids=lambda one: one.kind,
)
def test_quantiles_are_the_inverse_of_chances(one):
    scores = np.linspace(-2.5, 3.5, 25)
    assert one.below(one.at(scores)) == pytest.approx(probabilities(scores), abs=1e-4)


@pytest.mark.parametrize("of", [1, 2, 64, 65_536])
def test_the_largest_of_n(of):
    found = np.sort(largest(np.random.default_rng(0), of, (20_000,)))
    for level in (0.05, 0.5, 0.95):
        expected = NORMAL.inv_cdf(level ** (1 / of))
        assert np.quantile(found, level) == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("kind", ["normal", "gamma", "lognormal"])
def test_what_was_drawn_from_fits(kind):
    rng = np.random.default_rng(1)
    drawn = {
        "normal": rng.normal(10, 0.5, 3000),
        "gamma": rng.gamma(2.0, 3.0, 3000),
        "lognormal": rng.lognormal(1.0, 0.8, 3000),
    }[kind]
    found = fit(drawn)
    assert found.distance <= 1.031 / math.sqrt(3000)
    assert found.distance == pytest.approx(distance(found, np.sort(drawn)))
    assert found.at(np.array([1.645]))[0] == pytest.approx(np.quantile(drawn, 0.95), rel=0.05)
    if kind != "normal":  # a narrow normal is a gamma and a lognormal as well
        assert found.kind == kind


def test_heavy_tails_stand_for_themselves_or_are_widened():
    rng = np.random.default_rng(2)
    heavy = 1 + rng.pareto(1.1, 400)
    many = fit(heavy)
    assert many.kind == "empirical"
    assert "nothing known beyond the slowest" in many.note
    assert many.at(np.array([0.0]))[0] == pytest.approx(np.median(heavy), rel=0.01)
    few = fit([1.0] * 15 + [1.01, 1.02, 9.0])
    assert few.kind == "lognormal"
    assert "widened" in few.note
    assert few.at(np.array([2.0]))[0] >= 9.0 * 0.9


def test_products_and_slow_ones():
    mixed = Variability(
        "", 0.05, 0.08, 0, 0, "", shapes={"step": Distribution("gamma", (156.25, 1 / 156.25))}
    )
    scores, values = mixed.curve("gpu", "step")
    rng = np.random.default_rng(3)
    drawn = rng.lognormal(0, 0.05, 200_000) * rng.gamma(156.25, 1 / 156.25, 200_000)
    for level in (0.05, 0.5, 0.95, 0.999):
        found = np.interp(NORMAL.inv_cdf(level), scores, values)
        assert found == pytest.approx(np.quantile(drawn, level), rel=0.005)
    slow = dataclasses.replace(mixed, shapes={}, slow_gpu=(0.01, 2.0))
    scores, values = slow.curve("gpu")
    assert np.interp(NORMAL.inv_cdf(0.995), scores, values) == pytest.approx(2.0, rel=0.02)
    assert np.interp(0.0, scores, values) == pytest.approx(1.0, rel=0.01)
    half = mixed.scaled("step", 0.5).of("step")
    assert half.spread == pytest.approx(mixed.of("step").spread / 2, rel=0.02)


def sampled(ranks, iterations, segments=200, step=0.04, noise=0.1, gpu=0.0):
    rng = np.random.default_rng(4)
    found = []
    for rank in range(ranks):
        steps = rng.lognormal(gpu * rng.standard_normal(), step, (iterations, 1))
        samples = 1e6 * steps * rng.lognormal(0, noise, (iterations, segments))
        program = Program.from_ops(rank, [Op("compute", ns=1_000_000)] * segments)
        found.append(dataclasses.replace(program, samples=samples.astype(np.int64)))
    return found


def test_spreads_are_found_in_slices(tmp_path):
    every = Programs.one_per_rank(sampled(8, 25), World(8))
    path = program.save(every, tmp_path / "w.prism")
    found = fitted(program.load(path), read_variability("public"))
    assert found.step == pytest.approx(0.04, rel=0.25)
    assert found.segment == pytest.approx(0.1, rel=0.1)
    assert found.gpu == 0.0  # each has its own times
    assert "8 ranks" in found.source
    part = Programs(World(64), tuple(sampled(8, 25, gpu=0.2)), np.arange(64) // 8)
    assert fitted(part, read_variability("public")).gpu == pytest.approx(0.2, rel=0.6)
    one = Programs(World(2), tuple(sampled(1, 25)), np.zeros(2))
    assert fitted(one, read_variability("public")).gpu == read_variability("public").gpu


def test_samples_of_another_program_are_refused(tmp_path):
    one = dataclasses.replace(sampled(1, 5)[0], samples=np.ones((5, 3), dtype=np.int64))
    path = program.save(Programs(World(1), (one,), np.zeros(1)), tmp_path / "w.prism")
    with pytest.raises(ProgramError, match="samples of program 0"):
        program.load(path)


def test_slices_without_samples_or_with_bad_ones():
    bare = Programs(World(1), (Program.from_ops(0, [Op("compute", ns=1)]),), np.zeros(1))
    with pytest.raises(PrismError, match="hold no repeated times"):
        fitted(bare, read_variability("public"))
    one = sampled(1, 5)[0]
    bad = dataclasses.replace(one, samples=-one.samples)
    with pytest.raises(PrismError, match="or a negative one"):
        fitted(Programs(World(1), (bad,), np.zeros(1)), read_variability("public"))
