"""Recipes whose programs are healthy by Megatron itself."""

import copy

import yaml

from megatron_prism.core import recipe as recipes
from megatron_prism.core.recipe import check

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
    "layout": "parallel.pipeline_model_parallel_layout",
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


PLAIN = [
    name
    for name, recipe in RECIPES.items()
    if not recipe.train.recompute_granularity and recipe.model.moe_layer_freq == 1
]
