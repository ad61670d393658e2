"""What is said of gradients that differ, on two runs written by hand."""

import json

import numpy as np
import pytest

from megatron_prism.core.world import World
from megatron_prism.features.verify.compare import LayoutComparison
from megatron_prism.features.verify.kept import Kept, UndecidedError

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


# -- runs that differ in what they have --------------------------------------------------------

NAME, SMALL = "layers.0.linear.weight", "layers.0.softmax_offset"


class Written:
    """A run of one or more ranks, written by hand, that a test changes before it is written."""

    def __init__(self, world, title):
        self.world, self.title = world, title
        self.tensors = {rank: self._tensors(rank) for rank in range(world.size)}
        self.facts = {rank: self._facts(rank) for rank in range(world.size)}
        # a norm is summed over these ranks, of which a copy is counted on the first alone
        self.groups = {rank: list(range(world.size)) for rank in range(world.size)}

    def _tensors(self, rank):
        """(kind, iteration, name) -> (offset, whole shape, data)."""
        tensors = {}
        half = slice(2 * (rank % 2), 2 * (rank % 2) + 2) if self.world.tp > 1 else slice(0, 4)
        offset = [half.start, 0]
        for name, values in {NAME: RIGHT, SMALL: 1e-5 * RIGHT}.items():
            part = values[half]
            for kind, iteration, data in [
                ("parameter", 0, np.zeros_like(part)), ("gradient", 1, part),
                ("exp_avg", 1, 0.1 * part), ("exp_avg_sq", 1, part**2),
                ("parameter", 1, -1e-3 * np.sign(part)), ("counted 0", 1, np.ones_like(part)),
            ]:  # fmt: skip
                tensors[kind, iteration, name] = offset, list(values.shape), data
        return tensors

    def _facts(self, rank):
        norm = float(np.linalg.norm(RIGHT))
        return {
            "rank": rank, "norms": {"1": norm}, "routed": {"1 1": [8, 8]}, "reported": [],
            "losses": [[1, k, {"lm loss": [5.0 * 8, 8]}] for k in range(16 // self.world.dp)],
        }  # fmt: skip

    def keep(self, folder):
        folder.mkdir()
        for rank, facts in self.facts.items():
            tensors = self.tensors[rank]
            described = []
            for (kind, iteration, name), (offset, whole, _) in tensors.items():
                described.append([kind, iteration, name, offset, whole])
            calls = [[1, "counted 0", self.groups[rank], facts.pop("nameless", 0)]]
            text = json.dumps({"tensors": described, "norm_calls": calls, **facts})
            (folder / f"rank-{rank}.json").write_text(text)
            np.savez(folder / f"rank-{rank}.npz", *(data for *_, data in tensors.values()))
        return Kept(folder, self.world, self.title)


@pytest.fixture
def runs(tmp_path):
    """The copy, the reference and the reference rounded otherwise; ``compare()`` compares them."""

    class Runs:
        copy = Written(World(2, tp=2), "the copy")
        alone = Written(World(1), "one rank alone")
        rounded = Written(World(1), "the reference rounded otherwise")

        def compare(self):
            kept = [run.keep(tmp_path / run.title.replace(" ", "-"))
                    for run in (self.copy, self.alone, self.rounded)]  # fmt: skip
            self.comparison = LayoutComparison(*kept, 1)
            return self.comparison.first()

    return Runs()


def test_two_runs_that_have_all_alike_are_the_same(runs):
    assert runs.compare() is None
    assert runs.comparison.not_compared == []


@pytest.mark.parametrize("times", [0, 2])
def test_a_part_that_vanishes_in_the_norm_is_named_with_its_rank(runs, times):
    offset, whole, count = runs.copy.tensors[1]["counted 0", 1, SMALL]
    runs.copy.tensors[1]["counted 0", 1, SMALL] = offset, whole, times * count
    found = runs.compare()
    assert (found.what, found.where, found.place) == ("gradient norm", SMALL, "rank 1, [2:4, 0:6]")
    assert found.notes == (f"counted {times} times in the norm of rank 0, not 1 times",)


def test_a_copy_that_is_counted_on_each_rank_is_named(runs):
    for rank in (0, 1):
        for kind, iteration, name in [*runs.copy.tensors[rank]]:
            if name == SMALL:
                _, whole, data = runs.alone.tensors[0][kind, iteration, name]
                runs.copy.tensors[rank][kind, iteration, name] = [0, 0], whole, data
    found = runs.compare()
    assert (found.what, found.where) == ("gradient norm", SMALL)
    assert found.notes == ("counted 2 times in the norm of rank 0, not 1 times",)


def test_ranks_that_are_left_out_of_the_group_of_the_norm_are_named(runs):
    runs.copy.groups = {0: [0], 1: [1]}
    found = runs.compare()
    assert (found.what, found.where, found.place) == ("gradient norm", NAME, "rank 1, [2:4, 0:6]")


def test_a_norm_of_other_tensors_is_said_not_to_be_known_by_parameter(runs):
    runs.copy.facts[1]["nameless"] = 7
    assert runs.compare() is None
    (sentence,) = runs.comparison.not_compared
    assert sentence == "which parameters are in the gradient norm: not known of the copy"


def renamed(run, kinds=("parameter", "gradient", "exp_avg", "exp_avg_sq", "counted 0")):
    """Give a parameter another name on each rank."""
    for tensors in run.tensors.values():
        for kind, iteration, name in [*tensors]:
            if name == SMALL and kind in kinds:
                tensors[kind, iteration, "layers.2.softmax_offset"] = tensors.pop(
                    (kind, iteration, name)
                )


def test_a_parameter_of_one_run_only_is_named_on_either_side(runs):
    renamed(runs.copy)
    found = runs.compare()
    assert (found.what, found.where, found.place) == ("parameter names", SMALL, "no rank")
    assert (found.error, found.notes) == (None, ("in one rank alone only",))
    assert found.as_well == (1, 3)


def test_a_parameter_of_the_copy_only_is_named(runs):
    for run in (runs.alone, runs.rounded):
        for key in [*run.tensors[0]]:
            if key[2] == SMALL:
                del run.tensors[0][key]
    found = runs.compare()
    assert (found.where, found.place) == (SMALL, "ranks 0,1")
    assert found.notes == ("in the copy only",)


@pytest.mark.parametrize("kind", ["gradient", "exp_avg", "exp_avg_sq", "parameter"])
def test_a_value_that_one_rank_lacks_is_named_with_the_rank(runs, kind):
    del runs.copy.tensors[1][kind, 1, SMALL]
    found = runs.compare()
    assert (found.what, found.where, found.error) == (kind, SMALL, None)
    assert found.notes == ("12 of 24 elements are on no rank of the copy",)


def test_a_copy_of_a_value_that_one_rank_lacks_is_named_with_the_rank(runs):
    for rank in (0, 1):
        runs.copy.tensors[rank].update(
            {key: value for key, value in runs.alone.tensors[0].items() if key[2] == SMALL}
        )
    del runs.copy.tensors[1]["gradient", 1, SMALL]
    found = runs.compare()
    assert (found.what, found.place) == ("gradient", "rank 1")
    assert found.notes == ("the rank has the parameter and no gradient of it",)


def test_another_shape_is_named(runs):
    for tensors in runs.copy.tensors.values():
        for key, (offset, _, data) in [*tensors.items()]:
            if key[2] == SMALL:
                tensors[key] = offset, [4, 3], data[:, :3]
    found = runs.compare()
    assert (found.what, found.where) == ("parameter names", SMALL)
    assert found.notes == ("shape [4, 3] in place of [4, 6]",)


def test_a_run_without_any_tensor_lacks_all_of_them(runs):
    runs.copy.tensors = {rank: {} for rank in runs.copy.tensors}
    found = runs.compare()
    assert (found.what, found.notes) == ("parameter names", ("in one rank alone only",))
    assert found.as_well == (1, 2)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda runs: runs.copy.facts[1]["norms"].clear(),
         "rank 1 of the copy trained 0 of 1 iterations"),
        (lambda runs: runs.alone.facts[0]["norms"].clear(),
         "rank 0 of one rank alone trained 0 of 1 iterations"),
        (lambda runs: runs.rounded.tensors[0].pop(("gradient", 1, SMALL)),
         "the reference rounded otherwise has another gradient layers.0.softmax_offset"),
    ],
)  # fmt: skip
def test_a_run_that_ended_early_is_not_decided(runs, change, sentence):
    change(runs)
    with pytest.raises(UndecidedError) as error:
        runs.compare()
    assert error.value.message == sentence


def test_a_rank_that_kept_nothing_is_not_decided(runs, tmp_path):
    kept = runs.copy.keep(tmp_path / "copy")
    (tmp_path / "copy" / "rank-1.json").unlink()
    with pytest.raises(UndecidedError, match="rank 1 of the copy ended before"):
        LayoutComparison(kept, kept, kept, 1).first()


def not_a_number(run, rank, kind="gradient"):
    offset, whole, data = run.tensors[rank][kind, 1, NAME]
    run.tensors[rank][kind, 1, NAME] = offset, whole, np.where(np.arange(6) == 3, np.nan, data)


def test_nan_in_the_copy_alone_is_a_difference(runs):
    not_a_number(runs.copy, 1)
    found = runs.compare()
    assert (found.what, found.where, found.place) == ("gradient", NAME, "rank 1, [2:4, 0:6]")
    assert found.notes == ("NaN or infinity in the copy only",)


def test_nan_in_the_reference_alone_is_a_difference(runs):
    not_a_number(runs.alone, 0)
    assert runs.compare().notes == ("NaN or infinity in one rank alone only",)


def test_nan_in_both_runs_is_not_decided(runs):
    for run, rank in ((runs.copy, 0), (runs.alone, 0)):
        not_a_number(run, rank)
    with pytest.raises(UndecidedError, match="the copy and one rank alone have NaN"):
        runs.compare()


def test_a_norm_of_nothing_is_a_number(runs):
    for run in (runs.copy, runs.alone, runs.rounded):
        for rank, facts in run.facts.items():
            facts["norms"]["1"] = 0.0
            for name in (NAME, SMALL):
                offset, whole, data = run.tensors[rank]["gradient", 1, name]
                run.tensors[rank]["gradient", 1, name] = offset, whole, 0 * data
    assert runs.compare() is None


def test_a_norm_in_one_run_alone_is_a_difference(runs):
    runs.copy.facts[1]["norms"]["1"] = None
    found = runs.compare()
    assert (found.what, found.place) == ("gradient norm", "rank 1")
    assert found.notes == ("in one rank alone only",)


def test_a_loss_of_another_tensor_rank_is_compared(runs):
    runs.copy.facts[1]["losses"][3][2]["lm loss"] = [41.0, 8]
    found = runs.compare()
    assert (found.what, found.where, found.place) == ("loss", "lm loss of microbatch 3", "rank 1")


def test_a_loss_or_layer_of_one_run_alone_is_named(runs):
    runs.copy.facts[1]["losses"][3][2]["mtp_1 loss"] = [41.0, 8]
    assert runs.compare().notes == ("in the copy only",)


@pytest.mark.parametrize(
    ("routed", "note"),
    [({"1 1": [8, 8], "1 2": [8, 8]}, "routed in the copy only"),
     ({}, "routed in one rank alone only"), ({"1 1": [8, 8, 8]}, "3 experts in place of 2")],
)  # fmt: skip
def test_routing_that_one_run_has_not_is_named(runs, routed, note):
    for facts in runs.copy.facts.values():
        facts["routed"] = routed
    found = runs.compare()
    assert (found.what, found.notes) == ("routing", (note,))


def test_a_value_that_roundings_cover_is_said_not_to_be_compared(runs):
    for run in (runs.copy, runs.alone, runs.rounded):
        for rank in run.tensors:
            offset, whole, data = run.tensors[rank]["gradient", 1, SMALL]
            run.tensors[rank]["gradient", 1, SMALL] = offset, whole, 1e-5 * data
    assert runs.compare() is None
    assert runs.comparison.not_compared == [f"gradient of {SMALL}: not above roundings"]
