"""What is said of gradients that differ, on two runs written by hand."""

import json

import numpy as np
import pytest

from megatron_prism.core.world import World
from megatron_prism.verify.compare import Kept, LayoutComparison

RIGHT = np.random.default_rng(1).normal(size=(4, 6))
ROWS = 2  # of a rank


def written(folder, world, gradient_of, norm=1.0, loss=5.0, squares=1.0, z_loss=2.0):
    """A run whose ranks hold ``gradient_of(rank)``: (offset, data) of one matrix."""
    folder.mkdir()
    for rank in range(world.size):
        dp = world.coordinates(rank).dp
        parts = [("parameter", 0, [0, 0], np.zeros(RIGHT.shape)),
                 ("gradient", 1, *gradient_of(rank)),
                 ("exp_avg_sq", 1, [0, 0], squares * RIGHT**2)]  # fmt: skip
        facts = {
            "rank": rank, "norms": {"1": norm}, "routed": {}, 
            "reported": [[1, "z_loss", z_loss], [1, "iteration-time", 3.0 * world.size]],
            "losses": [[1, k, {"lm loss": [loss * 8 * (1 + dp + world.dp * k), 8]}]
                       for k in range(16 // world.dp)],
            "tensors": [[what, at, "layers.0.linear.weight", offset, list(RIGHT.shape)]
                        for what, at, offset, _ in parts],
        }  # fmt: skip
        (folder / f"rank-{rank}.json").write_text(json.dumps(facts))
        np.savez(folder / f"rank-{rank}.npz", *(data for *_, data in parts))
    return Kept(folder, world)


def first(tmp_path, world, gradient_of, **more):
    other = written(tmp_path / "other", World(1), lambda rank: ([0, 0], RIGHT))
    job = written(tmp_path / "job", world, gradient_of, **more)
    return LayoutComparison(job, other, other, 1).first()


def rows(rank):
    return [ROWS * (rank % 2), 0], RIGHT[ROWS * (rank % 2) :][:ROWS]


def test_shards_of_the_same_gradient_are_the_same(tmp_path):
    assert first(tmp_path, World(4, tp=2), rows) is None


def test_a_factor_is_the_size_of_groups(tmp_path):
    def doubled(rank):
        offset, data = rows(rank)
        return offset, 4 * data

    found = first(tmp_path, World(8, tp=2), doubled)
    assert found.what == "gradient"
    assert found.place == "rank 0, [0:2, 0:6]"
    assert found.notes == ("4 x: dp, or the number of microbatches",)


@pytest.mark.parametrize(("world", "axis"), [(World(2, tp=2), "tp"), (World(2), "dp")])
def test_a_gradient_that_ranks_have_in_parts_is_not_reduced(tmp_path, world, axis):
    part = np.random.default_rng(2).normal(size=RIGHT.shape)
    found = first(tmp_path, world, lambda rank: ([0, 0], part if rank else RIGHT - part))
    assert found.axes[0] == axis
    assert f"together over {axis}" in found.notes[-1]


def test_a_norm_that_counts_twice_says_so_of_its_square(tmp_path):
    found = first(tmp_path, World(2, tp=2), rows, norm=2**0.5)
    assert (found.what, found.iteration) == ("gradient norm", 1)
    assert found.notes[1].startswith("its square: 2 x: tp")


def test_a_state_of_the_optimizer_that_is_another_one_is_named(tmp_path):
    found = first(tmp_path, World(2, tp=2), rows, squares=3.0)
    assert (found.what, found.where) == ("exp_avg_sq", "layers.0.linear.weight")
    assert found.notes[0] == "3 x"


def test_losses_come_first(tmp_path):
    found = first(tmp_path, World(2), lambda rank: ([0, 0], 2 * RIGHT), loss=6.0)
    assert (found.what, found.where) == ("loss", "lm loss of microbatch 0")
    assert found.notes == ("6 in place of 5", "1.2 x")


def test_a_figure_that_is_reported_otherwise_has_its_name_and_is_no_other_job(tmp_path):
    other = written(tmp_path / "other", World(1), lambda rank: ([0, 0], RIGHT))
    job = written(tmp_path / "job", World(2, tp=2), rows, z_loss=4.0)
    compared = LayoutComparison(job, other, other, 1)
    assert compared.first() is None
    (one,) = compared.reports()
    assert (one.where, one.notes) == ("z_loss", ("4 in place of 2", "2 x: tp"))
