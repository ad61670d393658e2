"""A healthy job checks clean: every kind of configuration that Megatron trains, captured on shapes
and joined, has no mismatch; and its programs do the work that arithmetic says."""

import copy
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from test_predict_is_replay import assert_one_answer

from megatron_prism.core import recipe as recipes
from megatron_prism.core import slices
from megatron_prism.core.recipe import check
from megatron_prism.core.slices import SliceStore
from megatron_prism.emulate import recipe_job
from megatron_prism.graph import world_graph
from megatron_prism.replay.priced_graph import price

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.megatron, pytest.mark.slow]

sys.path.insert(0, str(Path(__file__).parent))
import forks  # noqa: E402

BASE = """
    prism.tier=meta prism.transformer_impl=transformer_engine train.data=mock train.bf16=true
    train.iterations=1 train.micro_batch_size=1 model.num_layers=4 model.hidden_size=64
    model.ffn_hidden_size=128 model.num_attention_heads=8 model.seq_length=32
    model.vocab_size=1000
""".split()
# words -> the recipe's keys; any other word is a key=value of its own
SHORT = {
    "tp": "parallel.tp",
    "pp": "parallel.pp",
    "vpp": "parallel.vpp",
    "cp": "parallel.cp",
    "ep": "parallel.ep",
    "etp": "parallel.etp",
    "world": "parallel.world_size",
    "layers": "model.num_layers",
    "first": "parallel.num_layers_in_first_pipeline_stage",
    "last": "parallel.num_layers_in_last_pipeline_stage",
    "layout": "model.extra.pipeline_model_parallel_layout",
    "experts": "model.num_experts",
}
FLAGS = {
    "sp": "parallel.sequence_parallel=true",
    "zero1": "train.use_distributed_optimizer=true",
    "overlap": "train.overlap_grad_reduce=true",
    # the first iteration has nothing to gather yet
    "gather": "train.overlap_param_gather=true train.iterations=2",
    "untied": "model.untie_embeddings_and_output_weights=true",
    "moe": "model.num_experts=8 model.moe_ffn_hidden_size=96",
    "pad": "model.moe_expert_capacity_factor=1.0 model.moe_pad_expert_input_to_capacity=true",
}
DENSE = """
tp2: world=2 tp=2
tp4_sp: world=4 tp=4 sp
pp2: world=2 pp=2
pp4: world=4 pp=4 m=8
pp8_few: world=8 pp=8 layers=8 m=2
dp8: world=8
dp8_zero1: world=8 zero1
dp8_overlap: world=8 overlap
dp8_zero1_overlap: world=8 zero1 overlap
dp8_zero1_gather: world=8 zero1 overlap gather
tp2pp2: world=8 tp=2 pp=2 zero1
tp2pp2_sp_overlap: world=8 tp=2 pp=2 sp zero1 overlap gather
pp2vpp2: world=2 pp=2 vpp=2 m=4
pp4vpp2: world=8 pp=4 vpp=2 layers=8 m=8 zero1 overlap
pp4vpp3: world=4 pp=4 vpp=3 layers=12 m=4
tp2pp2vpp2_gather: world=16 tp=2 pp=2 vpp=2 m=4 sp zero1 overlap gather
cp2: world=2 cp=2
cp4_zero1: world=8 cp=4 zero1
tp2cp2_sp: world=8 tp=2 cp=2 sp
cp2pp2: world=8 cp=2 pp=2 zero1 overlap
tp2cp2pp2vpp2: world=16 tp=2 cp=2 pp=2 vpp=2 m=4 sp zero1 overlap
pp4_ends: world=4 pp=4 layers=8 first=1 last=3 m=4
pp2_account: world=2 pp=2 layers=6 parallel.account_for_embedding_in_pipeline_split=true \
 parallel.account_for_loss_in_pipeline_split=true
pp4_layout: world=4 pp=4 layers=5 layout=Et|tt|t|tL m=4
pp2vpp2_layout: world=4 pp=2 vpp=2 layers=5 layout=Et|t|tt|tL m=4
pp4_untied: world=8 pp=4 untied m=4
pp1_untied: world=2 untied
recompute_full: world=4 tp=2 pp=2 sp train.recompute_granularity=full \
 train.recompute_method=uniform train.recompute_num_layers=1
recompute_block: world=4 tp=2 pp=2 train.recompute_granularity=full \
 train.recompute_method=block train.recompute_num_layers=1
recompute_selective: world=4 tp=2 pp=2 sp train.recompute_granularity=selective
gqa: world=8 tp=4 sp model.num_query_groups=2
learned_positions: world=4 pp=2 model.position_embedding_type=learned_absolute \
 model.normalization=LayerNorm model.swiglu=false model.add_bias_linear=true
fp32: world=4 tp=2 pp=2 train.bf16=false
fp16_buckets: world=4 pp=2 train.grad_reduce_in_fp32=false zero1 overlap
local: world=8 tp=2 pp=2 prism.transformer_impl=local_flash zero1
other_order: world=16 tp=2 pp=2 sp parallel.order=tp-cp-ep-pp-dp
sgd: world=4 tp=2 pp=2 train.optimizer=sgd
one_microbatch: world=8 tp=2 pp=2 m=1 train.micro_batch_size=2
large: world=64 tp=2 pp=4 cp=2 sp m=8 zero1 overlap gather
"""
EXPERTS = """
ep2: world=2 ep=2 moe
ep4dp8: world=8 ep=4 moe zero1
ep2_tp2_sp: world=4 tp=2 ep=2 moe sp
ep4_tp2_etp1: world=8 tp=2 ep=4 etp=1 moe sp zero1
ep2_pp2vpp2: world=8 pp=2 vpp=2 ep=2 m=4 moe zero1 overlap
ep2_cp2: world=4 cp=2 ep=2 moe
ep8_tp2pp2: world=32 tp=2 pp=2 ep=8 etp=1 moe sp zero1 overlap gather
moe_grouped: world=4 ep=2 pp=2 moe model.moe_grouped_gemm=true
moe_padded: world=8 ep=4 pp=2 moe pad
moe_every_other: world=8 pp=2 ep=2 moe model.moe_layer_freq=2
moe_shared: world=4 ep=2 tp=2 sp moe model.moe_shared_expert_intermediate_size=64
moe_aux: world=4 ep=4 moe model.moe_aux_loss_coeff=0.01 model.moe_z_loss_coeff=0.001
moe_recompute: world=8 ep=2 pp=2 tp=2 sp moe train.recompute_granularity=full \
 train.recompute_method=uniform train.recompute_num_layers=1
"""


def recipe_of(line, base):
    """(name, recipe) of ``name: words``; loading 53 of them from YAML would take 6 s."""
    name, _, text = line.partition(": ")
    found, microbatches = copy.deepcopy(base), 2
    for word in " ".join(FLAGS.get(word, word) for word in text.split()).split():
        key, _, value = word.partition("=")
        if key == "m":
            microbatches = int(value)
            continue
        section, *names = SHORT.get(key, key).split(".")
        target = getattr(found, section)
        if len(names) == 2:
            target.extra[names[1]] = value
        else:
            assert hasattr(target, names[0]), word
            setattr(target, names[0], yaml.safe_load(value))
    found.train.global_batch_size = microbatches * found.train.micro_batch_size * found.world.dp
    found.name = name
    check(found)
    return name, found


LINES = [line for line in (DENSE + EXPERTS).splitlines() if line]
LOADED = recipes.load("tiny-gpt_1cpu", BASE)
RECIPES = dict(recipe_of(line, LOADED) for line in LINES)


PP = "PIPELINE_MODEL_PARALLEL_GROUP"
PARAMETERS = {}  # (name, rank) -> parameters that Megatron built there


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """name -> folder of slices, or what went wrong."""
    jobs, names, folders = [], [], {}
    for name, recipe in RECIPES.items():
        store = SliceStore(
            tmp_path_factory.mktemp(name), recipe.world, recipe_job.source_of(recipe)
        )
        store.prepare(False)
        folders[name] = store.folder
        for rank in recipe_job.ranks_of(recipe):
            jobs.append((recipe, rank, store))
            names.append(name)
    for index, answer in forks.capture(jobs).items():
        if "error" in answer:
            folders[names[index]] = answer["error"]
        else:
            PARAMETERS[names[index], jobs[index][1]] = answer["summary"]["parameters"]
    return folders


def world_of(worlds, name):
    found = worlds[name]
    assert isinstance(found, Path), found
    return world_graph.build(slices.assemble(found))


def test_there_are_enough_configurations():
    assert len(RECIPES) >= 40


@pytest.mark.parametrize("name", RECIPES)
def test_a_healthy_world_is_clean(worlds, name):
    made = world_of(worlds, name)
    assert [str(finding) for finding in made.check()] == []
    assert len(made.classes) <= RECIPES[name].world.pp


@pytest.mark.parametrize("name", RECIPES)
def test_a_prediction_without_variation_is_the_replay(worlds, name):
    assert_one_answer(price(slices.assemble(worlds[name]), machine="h200"))


def flops_of(recipe):
    """Forward and backward of every matrix product: 6 per weight and token, and causal flash
    attention's 2 s h forward and 5 s h backward per token and layer."""
    m = recipe.model
    h, tokens = m.hidden_size, recipe.train.global_batch_size * m.seq_length
    layer = 2 * h * h + 2 * h * recipe.num_query_groups * recipe.kv_channels
    gated = 3 if m.swiglu else 2
    if m.num_experts:
        layer += m.moe_router_topk * gated * h * m.moe_ffn_hidden_size + h * m.num_experts
        layer += gated * h * (m.moe_shared_expert_intermediate_size or 0)
    else:
        layer += gated * h * m.ffn_hidden_size
    weights = m.num_layers * layer + recipe.padded_vocab_size * h
    return 6 * tokens * weights + 7 * tokens * m.num_layers * m.seq_length * h


PLAIN = [
    name
    for name, recipe in RECIPES.items()
    if not recipe.train.recompute_granularity and recipe.model.moe_layer_freq == 1
]


@pytest.mark.parametrize("name", PLAIN)
def test_all_ranks_together_do_the_flops_of_the_model(worlds, name):
    """However the model is split: nothing is done twice, nothing is left out."""
    made = world_of(worlds, name)
    pairs = zip(made.program_list, made.classes.counts, strict=True)
    done = sum(int(p.ops["flops"].clip(0).sum()) * count for p, count in pairs)
    assert done == flops_of(RECIPES[name])


@pytest.mark.parametrize("name", [n for n in RECIPES if RECIPES[n].world.pp > 1])
def test_every_chunk_boundary_is_crossed_both_ways(worlds, name):
    recipe, made = RECIPES[name], world_of(worlds, name)
    chunks, stages = recipe.parallel.vpp or 1, recipe.world.pp
    for program in made.programs.programs:
        stage = recipe.world.coordinates(program.rank).pp
        crossings = recipe.num_microbatches * (2 * chunks - (stage in (0, stages - 1)))
        # with two stages one way goes through the world's group (p2p_communication.py:72 @0.16.1)
        pairs = [op for op in program if op.name in ("send", "recv")]
        pairs = [op for op in pairs if op.group != "CONTEXT_PARALLEL_GROUP"]
        for name in ("send", "recv"):
            assert len([op for op in pairs if op.name == name]) == crossings
        for op in pairs:
            assert op.group in (PP, "default_pg")
            away = abs(op.peer)
            assert away == 1 if op.group == PP else away * stages == recipe.world.size


@pytest.mark.parametrize("name", [n for n in RECIPES if RECIPES[n].world.dp > 1])
def test_every_gradient_is_reduced_once(worlds, name):
    recipe, made = RECIPES[name], world_of(worlds, name)
    for program in made.programs.programs:
        reduced = sum(
            op.num_in
            for op in program
            if op.name in ("all_reduce", "reduce_scatter") and "DATA_PARALLEL" in op.group
            and op.num_in > 1
        )  # fmt: skip
        parameters = PARAMETERS[name, program.rank]
        if recipe.train.use_distributed_optimizer:  # its buckets are padded
            assert parameters <= reduced <= parameters * 1.1 + 100_000
        else:
            assert reduced == parameters


# cuBLAS workspaces on Hopper: Transformer Engine's own and four of its grouped GEMM, and two of
# torch's own products (main thread, autograd)
WORKSPACES = 7 * 32 << 20


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_allocated_in_an_iteration_is_freed(worlds, name):
    """But for what the first iteration leaves behind: optimizer states and a workspace."""
    for program in world_of(worlds, name).programs.programs:
        live, before = program.live_bytes(), program.allocations["before"]
        assert live.min() >= 0
        start = program.allocations["bytes"][before == 0].sum()
        assert live[-1] <= start + 12 * PARAMETERS[name, program.rank] + WORKSPACES + (1 << 18)
        left = np.zeros(program.allocations["storage"].max() + 1, dtype=np.int64)
        np.add.at(left, program.allocations["storage"], program.allocations["bytes"])
        assert left.min() >= 0
