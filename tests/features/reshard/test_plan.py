"""What ranks plan becomes one answer."""

import pathlib

import pytest

from megatron_prism.core.world import World
from megatron_prism.features.reshard.metadata import Checkpoint, StoredTensor
from megatron_prism.features.reshard.plan import combine
from megatron_prism.features.reshard.ranks import representatives

STATES = "optimizer.state.exp_avg.a"


def checkpoint(*names):
    stored = {name: StoredTensor((8,), "bfloat16") for name in names}
    return Checkpoint(pathlib.Path("ck"), stored, {"__0_0.distcp": 4000})


def told(rank, refusal="", **matches):
    """What a rank tells: name -> how it matches."""
    requests = []
    for key, match in matches.items():
        stored = () if match == "missing" else (8,)
        dtype = "" if match == "missing" else "torch.bfloat16"
        row = {"key": key, "shape": (8,), "dtype": "torch.bfloat16", "match": match}
        requests.append({**row, "stored_shape": stored, "stored_dtype": dtype})
    return {
        "rank": rank,
        "requests": requests,
        "file_bytes": {"__0_0.distcp": 3000},
        "taken_bytes": 16,
        "largest_shard_bytes": 1500,
        "load_peak": 64,
        "stand_in": False,
        "refusal": refusal,
        "shifted_states": {},
    }


def combined(plans, names=("a", "b"), world=None, **changed):
    settings = {"covers_all": True, "without_optimizer": None, "read_rate": None, **changed}
    return combine(checkpoint(*names), world or World(2, tp=2), plans, **settings)


def test_names_that_no_rank_asks_for_are_the_checkpoints_alone():
    plan = combined([told(0, a="same"), told(1, a="same")])
    assert plan.unexpected == ("b",)
    assert plan.num_same == 1
    assert plan.loads


def test_nobody_knows_them_where_ranks_were_left_out_or_ended_before_they_asked():
    assert combined([told(0, a="same")], covers_all=False).unexpected is None
    refused = combined([told(0, a="same"), told(1, refusal="RuntimeError: no")])
    assert refused.unexpected is None


def test_a_refusal_of_one_rank_is_that_of_the_job():
    plan = combined([told(0, a="same"), told(1, refusal="KeyError: c", a="same", c="missing")])
    assert not plan.loads
    assert plan.refusal == "KeyError: c"
    assert [(tensor.key, tensor.match) for tensor in plan.tensors] == [("c", "missing")]
    assert "missing (refused): 1" in plan.to_text()


@pytest.mark.parametrize(("without", "said"), [(True, "it loads"), (False, "does without states")])
def test_what_happens_without_states_is_said(without, said):
    plan = combined([told(0, refusal="RuntimeError: buckets")], without_optimizer=without)
    assert said in plan.to_text()


def test_states_go_on_where_the_job_asks_for_them_and_all_is_there():
    names = ("a", STATES)
    assert combined([told(0, **{"a": "same", STATES: "same"})], names).states_survive
    assert not combined([told(0, a="same")], names).states_survive
    refused = [told(0, refusal="no", **{"a": "same", STATES: "same"})]
    assert not combined(refused, names).states_survive


def test_the_time_is_that_of_all_ranks_at_the_file_systems_rate():
    plan = combined([told(0, a="same"), told(2, a="same")], world=World(4, tp=4), read_rate=1000)
    assert plan.total_read_bytes == 12_000
    assert plan.seconds == 12.0
    assert "12.0 s" in plan.to_text()
    assert combined([told(0, a="same")]).seconds is None


def test_ranks_of_a_large_job_stand_for_their_stage_and_experts():
    world = World(64, tp=4, pp=4, ep=2)
    ranks = representatives(world)
    places = {(world.coordinates(rank).pp, world.coordinates(rank).ep) for rank in ranks}
    assert len(ranks) == len(places) == 8
    assert representatives(World(8, tp=4)) == tuple(range(8))


def test_states_that_the_next_save_shifts_are_named():
    """Of all ranks together; where none are, nothing is said."""
    first, second = told(0, a="same"), told(1, a="same")
    assert "saved again" not in combined([first, second]).to_text()
    first["shifted_states"] = {"embedding.weight": 64}
    second["shifted_states"] = {"layers.1.weight": 1}
    plan = combined([first, second])
    assert plan.to_json()["shifted_states"] == {"embedding.weight": 64, "layers.1.weight": 1}
    text = plan.to_text()
    assert "states of 2 parameters are lost" in text
    assert "embedding.weight  by 64 elements" in text
    assert "layers.1.weight  by 1 element\n" in text


@pytest.mark.parametrize(
    ("stand_in", "states", "assumed"),
    [
        (True, "optimizer.state.exp_avg.decoder.layers.mlp.experts.linear_fc1.weight", True),
        # the arguments say it
        (False, "optimizer.state.exp_avg.decoder.layers.mlp.experts.linear_fc1.weight", False),
        # one optimizer in any layout
        (True, "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight", False),
        # nobody asks for them
        (True, "decoder.layers.mlp.experts.linear_fc1.weight", False),
    ],
)
def test_whether_experts_had_an_optimizer_of_their_own_is_assumed_without_arguments(
    stand_in, states, assumed
):
    plan = told(0, **{states: "same"})
    plan["stand_in"] = stand_in
    reshard = combined([plan], names=(states,), world=World(1))
    assert reshard.to_json()["optimizers_assumed"] == assumed
    said = "if both jobs have expert parallelism or neither has" in reshard.to_text()
    assert said == assumed
