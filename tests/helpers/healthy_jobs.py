"""Recipes whose programs are healthy by Megatron itself."""

import dataclasses
from importlib import metadata

from megatron_prism.core.jobs import recipe as recipes

BASE = """
    prism.tier=meta transformer_impl=transformer_engine data_path=null bf16=true
    train_iters=1 micro_batch_size=1 num_layers=4 hidden_size=64
    ffn_hidden_size=128 num_attention_heads=8 seq_length=32
    vocab_size=1000
""".split()
SHORT = {
    "world": "world_size",
    "layers": "num_layers",
    "first": "decoder_first_pipeline_num_layers",
    "last": "decoder_last_pipeline_num_layers",
    "layout": "pipeline_model_parallel_layout",
}
FLAGS = {
    "sp": "sequence_parallel=true",
    "zero1": "use_distributed_optimizer=true",
    "overlap": "overlap_grad_reduce=true",
    # the first iteration has nothing to gather yet
    "gather": "overlap_param_gather=true train_iters=2",
    "untied": "untie_embeddings_and_output_weights=true",
    "moe": "num_experts=8 moe_ffn_hidden_size=96 moe_token_dispatcher_type=alltoall",
    "pad": "moe_expert_capacity_factor=1.0 moe_pad_expert_input_to_capacity=true",
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
pp2_account: world=2 pp=2 layers=6 account_for_embedding_in_pipeline_split=true \
 account_for_loss_in_pipeline_split=true
pp4_layout: world=4 pp=4 layers=5 layout=Et|tt|t|tL m=4
pp2vpp2_layout: world=4 pp=2 vpp=2 layers=5 layout=Et|t|tt|tL m=4
pp4_untied: world=8 pp=4 untied m=4
pp1_untied: world=2 untied
recompute_full: world=4 tp=2 pp=2 sp recompute_granularity=full \
 recompute_method=uniform recompute_num_layers=1
recompute_block: world=4 tp=2 pp=2 recompute_granularity=full \
 recompute_method=block recompute_num_layers=1
recompute_selective: world=4 tp=2 pp=2 sp recompute_granularity=selective
gqa: world=8 tp=4 sp num_query_groups=2
learned_positions: world=4 pp=2 position_embedding_type=learned_absolute \
 normalization=LayerNorm swiglu=false add_bias_linear=true
fp32: world=4 tp=2 pp=2 bf16=false
fp16_buckets: world=4 pp=2 grad_reduce_in_bf16=true zero1 overlap
local: world=8 tp=2 pp=2 transformer_impl=local zero1
other_order: world=16 tp=2 pp=2 sp use_tp_pp_dp_mapping=true
sgd: world=4 tp=2 pp=2 optimizer=sgd
one_microbatch: world=8 tp=2 pp=2 m=1 micro_batch_size=2
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
moe_grouped: world=4 ep=2 pp=2 moe moe_grouped_gemm=true
moe_padded: world=8 ep=4 pp=2 moe pad
moe_every_other: world=8 pp=2 ep=2 moe moe_layer_freq=2
moe_shared: world=4 ep=2 tp=2 sp moe moe_shared_expert_intermediate_size=64
moe_aux: world=4 ep=4 moe moe_aux_loss_coeff=0.01 moe_z_loss_coeff=0.001
moe_recompute: world=8 ep=2 pp=2 tp=2 sp moe recompute_granularity=full \
 recompute_method=uniform recompute_num_layers=1
"""


def recipe_of(line, base):
    """(name, recipe) of ``name: words``."""
    name, _, text = line.partition(": ")
    given, microbatches = {}, 2
    for word in " ".join(FLAGS.get(word, word) for word in text.split()).split():
        key, _, value = word.partition("=")
        if key == "m":
            microbatches = int(value)
        else:
            given[SHORT.get(key, key)] = value
    sizes = {key: int(given.get(key, 1)) for key in ("world_size", "tp", "pp", "cp")}
    replicas = sizes["world_size"] // (sizes["tp"] * sizes["pp"] * sizes["cp"])
    batch = microbatches * int(given.get("micro_batch_size", 1)) * replicas
    found = base.changed({**given, "global_batch_size": batch})
    return name, dataclasses.replace(found, name=name)


def names_with_new_settings(lines):
    """Names of the lines that set something which no line before sets.

    Of sizes that split the job the axis counts, not how many ranks it has; sizes of the model, the
    world and the batch do not count.
    """
    seen, names = set(), []
    for line in lines:
        name, _, text = line.partition(": ")
        settings = set()
        for word in text.split():
            key = word.partition("=")[0]
            if key in ("tp", "cp", "ep", "pp", "vpp"):
                settings.add(key)
            elif key not in ("world", "m", "layers", "micro_batch_size"):
                settings.add(word)
        if settings - seen:
            names.append(name)
        seen |= settings
    return names


LINES = [line for line in (DENSE + EXPERTS).splitlines() if line]
LOADED = recipes.load("tiny-gpt_1cpu", BASE)
EVERY = dict(recipe_of(line, LOADED) for line in LINES)
# Compositions are those of the first tested release; of a later one each setting is captured once,
# and the two largest compositions.
try:
    FIRST_RELEASE = metadata.version("megatron-core").startswith("0.16.")
except metadata.PackageNotFoundError:  # nothing is captured without it
    FIRST_RELEASE = True
LARGEST = ["large", "ep8_tp2pp2"]
CAPTURED = list(EVERY) if FIRST_RELEASE else [*names_with_new_settings(LINES), *LARGEST]
RECIPES = {name: EVERY[name] for name in CAPTURED}


PLAIN = [
    name
    for name, recipe in RECIPES.items()
    if not recipe.recompute_granularity and recipe.moe_layer_freq == 1
]
