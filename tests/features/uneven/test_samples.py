"""Samples that a file says, and batches that are drawn from them."""

import json

import numpy as np
import pytest

from megatron_prism.core.errors import UsageError
from megatron_prism.core.world import World
from megatron_prism.features.uneven.inputs import read_input
from megatron_prism.features.uneven.kinds import InputKind
from megatron_prism.features.uneven.samples import collate, draw, holds_lists, listed, read_law

WORLD = World(4, pp=2)


def law_of(folder, *rows):
    file = folder / "law.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return read_law(file, WORLD)


def test_lengths_occur_as_often_as_the_file_says(tmp_path):
    law = law_of(tmp_path, {"length": 10, "count": 3}, {"length": 50})
    batches = draw(law, (4000, 2, 1), 1, seed=0)
    assert set(np.unique(batches.tokens)) == {10, 50}
    assert (batches.tokens == 10).mean() == pytest.approx(0.75, abs=0.02)
    assert np.array_equal(batches.squares, batches.tokens.astype(float) ** 2)


def test_a_dp_rank_can_have_lengths_of_its_own(tmp_path):
    batches = draw(law_of(tmp_path, {"length": 10}, {"length": 70, "dp": 1}), (9, 2, 3), 2, seed=0)
    assert (batches.tokens[:, 0] == 10).all()
    assert (batches.tokens[:, 1] == 70).all()


def test_a_seed_decides_the_draws(tmp_path):
    law = law_of(tmp_path, *({"length": length} for length in range(1, 99)))
    first, again, other = (draw(law, (5, 2, 3), 1, seed).tokens for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_packed_documents_attend_to_themselves(tmp_path):
    law = law_of(tmp_path, {"documents": [30, 10]}, {"documents": [40]})
    batches = draw(law, (50, 2, 1), 1, seed=0)
    assert (batches.tokens == 40).all()
    assert set(batches.squares.ravel()) == {1000.0, 1600.0}
    assert law.is_packed


def test_samples_of_a_microbatch_are_padded_to_the_longest():
    tokens = np.array([[[[3, 5]]]])
    padded = collate(tokens, tokens**2, False, "")
    assert (padded.tokens.item(), padded.squares.item()) == (5, 25.0)
    # packed samples are equally long, and attention takes what it takes for each
    packed = collate(np.array([[[[5, 5]]]]), np.array([[[[25, 13]]]]), True, "")
    assert (packed.tokens.item(), packed.squares.item()) == (5, 19.0)


def test_lists_are_lengths_of_iterations_in_their_order():
    words = ("dp=1:1,2,3,4", "dp=0:7")
    inputs = [read_input(InputKind.LENGTHS, word, WORLD) for word in words]
    batches = listed(inputs, WORLD, 2, 9, "")
    assert batches.tokens.tolist() == [[[7, 7], [1, 2]], [[7, 7], [3, 4]]]
    back = batches.inputs_of(1, WORLD)
    assert [str(own) for own in back] == ["lengths=0,2:7,7", "lengths=1,3:3,4"]


def test_one_batch_is_of_all_ranks_of_a_dp_rank():
    with pytest.raises(UsageError, match="some ranks of dp rank 1"):
        listed([read_input(InputKind.LENGTHS, "1:4,4", WORLD)], WORLD, 2, 9, "")


def test_lists_and_laws_are_told_apart(tmp_path):
    for row, is_list in (({"dp": 0, "lengths": [3]}, True), ({"length": 3}, False)):
        file = tmp_path / "file"
        file.write_text("\n" + json.dumps(row))
        assert holds_lists(file) is is_list


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"count": 3}],
        [{"length": 0}],
        [{"length": 4, "count": 0}],
        [{"length": 4, "documents": [4]}],
        [{"length": 4}, {"documents": [4]}],
        [{"documents": []}],
        [{"length": 4, "dp": 2}],
        [{"length": 4, "dp": 1}],
        [{"length": "4"}],
    ],
)
def test_a_file_without_lengths_is_refused(tmp_path, rows):
    with pytest.raises(UsageError, match=r"law\.jsonl"):
        law_of(tmp_path, *rows)
