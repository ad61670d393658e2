"""Do the fields of a recipe fit each other?  A rule shows its arithmetic and what to type instead.

In : a recipe.  Out: nothing, or the first RecipeError (WorldError for parallel sizes).  These are
Megatron's own rules, checked here because Megatron checks them minutes later and one process at a
time; where a rule lives in Megatron is noted beside it (@core_v0.16.1).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_prism.core import recipe_layers
from megatron_prism.core.errors import RecipeError, WorldError

if TYPE_CHECKING:
    from megatron_prism.core.recipe_schema import Recipe

__all__ = ["CHOICES", "check"]

CHOICES = {
    "model.normalization": ("LayerNorm", "RMSNorm"),
    "model.position_embedding_type": ("learned_absolute", "rope", "none"),
    "model.moe_token_dispatcher_type": ("allgather", "alltoall", "flex"),
    "model.moe_router_score_function": ("softmax", "sigmoid"),
    "model.moe_router_dtype": (None, "fp32", "fp64"),
    "train.fp8": (None, "delayed", "tensorwise", "blockwise", "mxfp8"),
    "train.optimizer": ("adam", "sgd"),
    "train.recompute_granularity": (None, "full", "selective"),
    "train.recompute_method": (None, "uniform", "block"),
    "prism.tier": ("auto", "cuda", "cpu", "meta"),
    # recorded:PATH belongs to scripts: a recording is of their command line
    "prism.values": ("mirror", "noise"),
    "prism.transformer_impl": ("transformer_engine", "local", "local_flash"),
}
POSITIVE = {
    "model": ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size",
              "ffn_hidden_size", "num_query_groups", "kv_channels", "make_vocab_size_divisible_by",
              "max_position_embeddings", "num_experts", "moe_ffn_hidden_size", "moe_router_topk"),
    "train": ("micro_batch_size", "global_batch_size", "iterations", "recompute_num_layers"),
    "parallel": ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
}  # fmt: skip

FRACTIONS = ("attention_dropout", "hidden_dropout", "rotary_percent")  # of model; 1.0 included
# TransformerConfig's names of what a recipe says in a place of its own
RENAMED = {
    "tensor_model_parallel_size": "parallel.tp",
    "pipeline_model_parallel_size": "parallel.pp",
    "virtual_pipeline_model_parallel_size": "parallel.vpp",
    "context_parallel_size": "parallel.cp",
    "expert_model_parallel_size": "parallel.ep",
    "expert_tensor_parallel_size": "parallel.etp",
    "num_moe_experts": "model.num_experts",
    "layernorm_epsilon": "model.norm_epsilon",
}

# fields of TransformerConfig that need more than the model and the loop that a recipe stands for
BEYOND = (
    "cuda_graph_impl",
    "enable_cuda_graph",
    "fine_grained_activation_offloading",
    "heterogeneous_block_specs",
    "hybrid_context_parallel",
    "mtp_num_layers",
    "multi_latent_attention",
)


def check(recipe: Recipe) -> None:
    """RecipeError or WorldError for the first rule the recipe breaks."""
    for key, choices in CHOICES.items():
        section, name = key.split(".")
        value = getattr(getattr(recipe, section), name)
        if value not in choices:
            words = ["null" if choice is None else choice for choice in choices]
            raise RecipeError(f"{key}: {value!r} is no choice", fix=f"use {' or '.join(words)}")
    for section, names in POSITIVE.items():
        for name in names:
            value = getattr(getattr(recipe, section), name)
            if value is not None and value < 1:
                raise RecipeError(f"{section}.{name} is {value}", fix="use at least 1")
            if value is not None and value >= 1 << 31:  # tensors of such sizes overflow in torch
                most = (1 << 31) - 1
                raise RecipeError(f"{section}.{name} is {value}", fix=f"use at most {most}")
    for rule in (_numbers, _extra):
        for message, fix in rule(recipe):
            raise RecipeError(message, fix=fix)
    _world(recipe)  # parallel sizes first
    for rules in (_model, _experts, _batches, recipe_layers.rules, _training):
        for message, fix in rules(recipe):
            raise RecipeError(message, fix=fix)


def _world(recipe: Recipe) -> None:
    """A WorldError says which sizes do not fit, in the keys of a recipe what to type instead."""
    try:
        recipe.world  # noqa: B018
    except WorldError as error:
        here = re.sub(r"\b(size|tp|cp|pp|ep|etp|vpp|order)=", r"parallel.\1=", error.fix or "")
        fix = here.replace("parallel.size=", "parallel.world_size=")
        raise WorldError(error.message, fix=fix) from None


def _numbers(recipe: Recipe) -> Iterator[tuple[str, str]]:
    m, t = recipe.model, recipe.train
    if not (0 <= t.lr < math.inf):
        yield f"train.lr is {t.lr}", "use a number of at least 0"
    for section, part in (("model", m), ("train", t)):
        for name, value in vars(part).items():
            if isinstance(value, float) and not math.isfinite(value):
                yield f"{section}.{name} is {value}", "use a finite number"
    if m.init_method_std < 0:
        yield f"model.init_method_std is {m.init_method_std}", "use a number of at least 0"
    for name in FRACTIONS:
        if not 0 <= getattr(m, name) <= 1:
            yield f"model.{name} is {getattr(m, name)}", "use a number from 0 to 1"
    # training/initialize.py _set_random_seed: positive; numpy's are of 32 bits, stages add to it
    if not 1 <= t.seed < 1 << 31:
        yield f"train.seed is {t.seed}", f"use a number from 1 to {(1 << 31) - 1}"


def _extra(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """``model.extra`` would win over the key that everything else is derived from."""
    places = {name: f"{part}.{name}" for part in ("train", "parallel", "model")
              for name in vars(getattr(recipe, part))} | RENAMED  # fmt: skip
    for key, value in recipe.model.extra.items():
        if key in places:
            yield f"model.extra.{key}: the recipe has {places[key]}", f"{places[key]}={value}"
        if key in BEYOND and value not in (None, False, 0, "none"):
            yield (
                f"model.extra.{key}: recipes build a plain GPT, without that",
                "run the job's own script: prism run --prism-ranks 0 -- pretrain_gpt.py …",
            )


def _model(recipe: Recipe) -> Iterator[tuple[str, str]]:
    m, p = recipe.model, recipe.parallel
    if m.kv_channels is None and m.hidden_size % m.num_attention_heads:
        yield (
            f"hidden_size {m.hidden_size} is not divisible by {m.num_attention_heads} heads",
            "change model.num_attention_heads, or give model.kv_channels",
        )
    if m.num_attention_heads % recipe.num_query_groups:
        yield (
            f"{m.num_attention_heads} attention heads do not share {recipe.num_query_groups} "
            "query groups evenly",
            "set model.num_query_groups to a divisor of model.num_attention_heads",
        )
    split = {"model.num_attention_heads": m.num_attention_heads}
    if m.num_experts is None:
        split["model.ffn_hidden_size"] = recipe.ffn_hidden_size
    for name, value in split.items():
        if value % p.tp:
            yield (
                f"{name} {value} is not divisible by tp {p.tp}",
                f"set parallel.tp to a divisor of {value}, or change {name}",
            )
    groups = recipe.num_query_groups
    if groups % p.tp and p.tp % groups:
        yield (
            f"{groups} query groups and tp {p.tp}: neither divides the other",
            f"set parallel.tp to a divisor or a multiple of {groups}",
        )
    # core/transformer/transformer_config.py __post_init__
    if p.sequence_parallel and p.tp == 1:
        yield (
            "sequence_parallel splits activations over tp, but tp is 1",
            "set parallel.sequence_parallel=false, or parallel.tp to 2 or more",
        )
    pieces = (p.tp if p.sequence_parallel else 1) * (2 * p.cp if p.cp > 1 else 1)
    if m.seq_length % pieces:
        yield (
            f"seq_length {m.seq_length} is not divisible by {pieces} "
            f"(tp {p.tp if p.sequence_parallel else 1} x {2 if p.cp > 1 else 1} x cp {p.cp})",
            f"use model.seq_length={-(-m.seq_length // pieces) * pieces}",
        )
    if m.max_position_embeddings is not None and m.max_position_embeddings < m.seq_length:
        yield (
            f"max_position_embeddings {m.max_position_embeddings} < seq_length {m.seq_length}",
            f"set model.max_position_embeddings={m.seq_length}, or leave it out",
        )


def _experts(recipe: Recipe) -> Iterator[tuple[str, str]]:
    m, p = recipe.model, recipe.parallel
    if m.num_experts is None:
        if p.ep > 1:
            yield f"ep {p.ep} needs experts, but the model is dense", "set model.num_experts"
        return
    if m.num_experts % p.ep:
        yield (
            f"{m.num_experts} experts are not divisible by ep {p.ep}",
            f"set parallel.ep to a divisor of {m.num_experts}",
        )
    if m.moe_router_topk > m.num_experts:
        yield (
            f"moe_router_topk {m.moe_router_topk} of {m.num_experts} experts",
            f"set model.moe_router_topk to at most {m.num_experts}",
        )
    if p.tp > 1 and not p.sequence_parallel:  # core/transformer/moe/moe_layer.py forward, training
        yield (
            f"an MoE model with tp {p.tp} trains only with sequence parallelism",
            "set parallel.sequence_parallel=true",
        )


def _batches(recipe: Recipe) -> Iterator[tuple[str, str]]:
    t, p, dp = recipe.train, recipe.parallel, recipe.world.dp
    one = t.micro_batch_size * dp
    if t.global_batch_size % one:
        nearest = max(one, round(t.global_batch_size / one) * one)
        yield (
            f"global_batch_size {t.global_batch_size} is not divisible by "
            f"micro_batch_size {t.micro_batch_size} x dp {dp} = {one}",
            f"use train.global_batch_size={nearest}",
        )
    # core/pipeline_parallel/schedules.py:1007
    if p.vpp is not None and recipe.num_microbatches % p.pp:
        nearest = max(1, round(recipe.num_microbatches / p.pp)) * p.pp * one
        yield (
            f"the interleaved schedule takes microbatches in rounds of pp {p.pp}, but there are "
            f"{recipe.num_microbatches} = {t.global_batch_size} / "
            f"(micro batch {t.micro_batch_size} x dp {dp})",
            f"use train.global_batch_size={nearest}, or parallel.vpp=null",
        )


def _training(recipe: Recipe) -> Iterator[tuple[str, str]]:
    t = recipe.train
    # training/arguments.py validate_args
    if t.overlap_param_gather and not (t.use_distributed_optimizer and t.overlap_grad_reduce):
        yield (
            "overlap_param_gather needs use_distributed_optimizer and overlap_grad_reduce",
            "set train.use_distributed_optimizer=true train.overlap_grad_reduce=true",
        )
    if t.recompute_granularity == "full" and not (t.recompute_method and t.recompute_num_layers):
        yield (
            "recompute_granularity full needs a method and a number of layers",
            "set train.recompute_method=uniform train.recompute_num_layers=1",
        )
    if t.recompute_granularity != "full" and (t.recompute_method or t.recompute_num_layers):
        yield (
            "recompute_method and recompute_num_layers mean something with granularity full only",
            "set train.recompute_granularity=full, or drop the two",
        )
