"""The small copy of a job: its world, its sizes, and what it does without."""

import argparse

import pytest

from megatron_prism.core.errors import UsageError
from megatron_prism.core.world import World
from megatron_prism.features.verify import shrink

SIZES = {"num_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "seq_length": 8192,
         "max_position_embeddings": 8192, "micro_batch_size": 1, "global_batch_size": 1024,
         "bf16": True, "num_layers_per_virtual_pipeline_stage": None, "moe_layer_freq": 1,
         "num_virtual_stages_per_pipeline_rank": None, "pipeline_model_parallel_layout": None,
         "decoder_first_pipeline_num_layers": None, "decoder_last_pipeline_num_layers": None,
         "account_for_embedding_in_pipeline_split": False, "sequence_parallel": False,
         "account_for_loss_in_pipeline_split": False, "use_distributed_optimizer": False,
         "tensor_model_parallel_size": 1}  # fmt: skip


DP_LAST = "tp-cp-ep-pp-dp"


@pytest.mark.parametrize(
    ("job", "known", "ranks", "has"),
    [
        (World(1024, tp=8, pp=4), True, 8, {"tp": 2, "pp": 2, "dp": 2}),
        (World(8, tp=8), True, 2, {"tp": 2, "dp": 1}),
        (World(8, tp=8), False, 4, {"tp": 2, "dp": 2}),
        (World(64, ep=8), True, 4, {"ep": 2, "edp": 2}),
        (World(8, ep=8), True, 2, {"ep": 2, "edp": 1}),
        (World(8, etp=2), True, 4, {"etp": 2, "edp": 2}),
        (World(2, etp=2), True, 2, {"etp": 2, "edp": 1}),
        (World(256, tp=2, pp=8, cp=2, ep=8, etp=1), True, 16, {"ep": 2, "etp": 1, "cp": 2}),
        (World(8, tp=4, pp=2, ep=2, etp=2, order=DP_LAST), True, 8, {"tp": 4, "ep": 2, "etp": 2}),
        (World(64, tp=2, pp=2, cp=2, etp=4, order=DP_LAST), True, 16, {"tp": 2, "cp": 2, "etp": 4}),
    ],
)
def test_a_dimension_above_one_stays_above_one(job, known, ranks, has):
    copy = shrink.small_world(job, known)
    assert copy.size == ranks
    assert {name: getattr(copy, name) for name in has} == has


def shrunk(world=None, **given):
    args = argparse.Namespace(**(SIZES | given))
    job = world or World(1024, tp=8, pp=4)
    return args, shrink.shrink(args, job, shrink.small_world(job, True), 3, 2)


@pytest.mark.parametrize(
    ("given", "layers", "others"),
    [
        ({}, 2, {}),
        ({"num_layers_per_virtual_pipeline_stage": 5}, 4,
         {"num_layers_per_virtual_pipeline_stage": 1}),
        ({"num_virtual_stages_per_pipeline_rank": 5}, 4,
         {"num_virtual_stages_per_pipeline_rank": 2}),
        ({"decoder_first_pipeline_num_layers": 11}, 3, {"decoder_first_pipeline_num_layers": 1}),
        ({"account_for_embedding_in_pipeline_split": True,
          "account_for_loss_in_pipeline_split": True}, 2, {}),
        ({"pipeline_model_parallel_layout": "Et*3|(tt|)*29,m|L", "mtp_num_layers": 2}, 4,
         {"pipeline_model_parallel_layout": "Et|t|t|tmL", "mtp_num_layers": 1}),
        ({"moe_layer_freq": [0, 0, 0] + [1] * 77}, 2, {"moe_layer_freq": [0, 1]}),
        ({"hybrid_override_pattern": "MMMM*-"}, 6, {"hybrid_override_pattern": "M*-M*-"}),
        ({"hybrid_layer_pattern": "|".join(["MEME*"] * 8) + "/*E/*E"}, 12,
         {"hybrid_layer_pattern": "ME*|ME*|ME*|ME*/*E"}),
    ],
)  # fmt: skip
def test_layers_are_as_few_as_the_stages_admit(given, layers, others):
    args, _ = shrunk(**given)
    assert args.num_layers == layers
    assert {name: getattr(args, name) for name in others} == others


@pytest.mark.parametrize(("given", "left"), [("sinkhorn", "none"), (["sinkhorn"], ["none"]),
                                             ("aux_loss", "aux_loss")])  # fmt: skip
def test_balancing_over_the_tokens_of_a_rank_is_left_out(given, left):
    args, _ = shrunk(moe_router_load_balancing_type=given)
    assert args.moe_router_load_balancing_type == left


@pytest.mark.parametrize(("groups", "left"), [(8, 2), (2, 1)])
def test_fewer_heads_of_keys_than_tp_stay_fewer(groups, left):
    args, _ = shrunk(group_query_attention=True, num_query_groups=groups)  # tp 8
    assert args.num_query_groups == left


def test_what_is_changed_is_said_with_its_reason():
    args, changes = shrunk()
    assert not args.bf16
    assert ["num_layers", "80", "2", "sizes"] in changes
    assert ["bf16", "True", "False", "number formats"] in changes
    assert args.global_batch_size == shrink.SAMPLES


def test_the_reference_has_no_part_of_the_composition():
    args, _ = shrunk(sequence_parallel=True, use_distributed_optimizer=True)
    copy = World(8, tp=2, pp=2)
    assert shrink.parts_of(args, copy) == [
        "--use-distributed-optimizer", "--sequence-parallel", "tp", "pp", "dp"
    ]  # fmt: skip
    shrink.lay_out(args, shrink.one_rank(copy), shrink.PARTS)
    assert shrink.parts_of(args, shrink.one_rank(copy)) == []


def test_a_part_that_is_a_dimension_is_left_out():
    copy = World(8, tp=2, pp=2)
    assert shrink.without(copy, "tp") == World(4, pp=2, etp=1)
    assert shrink.without(copy, "cp") is None


@pytest.mark.parametrize(("tp", "etp"), [(1, 2), (2, 1)])
def test_a_size_of_experts_of_their_own_is_left_out_as_a_part(tp, etp):
    args, _ = shrunk()
    copy = World(4, tp=tp, etp=etp)
    assert shrink.parts_of(args, copy)[0] == "etp"
    assert shrink.without(copy, "etp") == World(4, tp=tp)
    assert shrink.parts_of(args, World(4, tp=tp)) == [*(["tp"] if tp > 1 else []), "dp"]
    assert shrink.without(World(4, tp=tp), "etp") is None


@pytest.mark.parametrize("given", [{"use_torch_fsdp2": True}, {"use_legacy_models": True}], ids=str)
def test_what_it_does_not_know_is_refused_by_name(given):
    (name,) = given
    with pytest.raises(UsageError, match="--" + name.replace("_", "-")):
        shrunk(**given)


@pytest.mark.parametrize("name", ["use_megatron_fsdp", "use_torch_fsdp2"])
def test_a_refusal_of_fsdp_promises_nothing_of_it(name):
    with pytest.raises(UsageError) as error:
        shrunk(**{name: True})
    assert "of which that says nothing" in error.value.fix
    assert "same arithmetic" not in error.value.fix
