"""Recipes: jobs described in YAML, with their schema, checks and errors.

In : a path or the name of a shipped recipe, and ``section.key=value`` overrides.  Out: the
dataclasses of this module.  This is the only module that imports OmegaConf; none of its types leave
it.  OmegaConf is strict about types and keys; what it would take silently (a token without ``=``,
octal ``012``, base-60 ``1:30``) is refused here.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, get_type_hints

from omegaconf import DictConfig, OmegaConf, errors
from yaml import YAMLError

from megatron_prism.core import foreign
from megatron_prism.core.errors import RecipeError, UsageError, WorldError, did_you_mean
from megatron_prism.core.megatron_source import engine_release
from megatron_prism.core.world import (
    DEFAULT_ORDER,
    MOST_EXPERTS,
    MOST_LAYERS,
    MOST_MICROBATCHES,
    World,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def chunks_of(layout: str) -> list[str]:
    """``Et*2|(t|)*2L`` as the layers of every chunk: Ett, t, t, L
    (core/transformer/pipeline_parallel_layer_layout.py:283 @0.19.0)."""
    text = layout.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d{1,4})", r"(.)\*(\d{1,4})"):
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    return text.split("|")


def layer_rules(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(message, fix) where the layers do not split."""
    m, p = recipe.model, recipe.parallel
    ends = (p.num_layers_in_first_pipeline_stage, p.num_layers_in_last_pipeline_stage)
    standalone = p.account_for_embedding_in_pipeline_split + p.account_for_loss_in_pipeline_split
    if (layout := p.pipeline_model_parallel_layout) is not None:
        yield from _layout_rules(recipe, layout, any(ends) or bool(standalone))
        return
    if any(ends) and standalone:
        yield (
            "both ways of splitting layers unevenly are set: num_layers_in_…_pipeline_stage and "
            "account_for_…_in_pipeline_split",
            "drop one of them",
        )
    if any(ends):
        middle = m.num_layers - sum(end or 0 for end in ends)
        stages = p.pp - sum(end is not None for end in ends)
        if stages < 0 or middle < 0 or (middle % stages if stages else middle):
            yield (
                f"{m.num_layers} layers less {' and '.join(str(e) for e in ends if e)} at the ends "
                f"leave {middle} for {stages} stages",
                "change parallel.num_layers_in_first_pipeline_stage or …_last_…",
            )
        uneven = [n for n in (*ends, middle // stages if stages else None) if n]
    else:
        uneven = [m.num_layers + standalone]
    chunks = p.vpp or 1
    pieces = chunks if any(ends) else p.pp * chunks
    for number in uneven:
        if number % pieces:
            what = f"pp {p.pp} x vpp {p.vpp}" if p.vpp else f"pp {p.pp}"
            unit = f" + {standalone} for embedding and loss = {number}" if standalone else ""
            whole = [n * pieces - standalone for n in (number // pieces, number // pieces + 1)]
            near = " or ".join(str(n) for n in whole if n > 0)
            near = f"{near} layers there" if any(ends) else f"model.num_layers={near}"
            yield (
                f"{number - standalone} layers{unit} do not split over "
                + (f"vpp {p.vpp}" if any(ends) else f"{what} = {pieces} chunks"),
                f"use {near}, or change parallel.pp or parallel.vpp",
            )


def _layout_rules(recipe: Recipe, layout: str, uneven: bool) -> Iterator[tuple[str, str]]:
    m, p = recipe.model, recipe.parallel
    key = "parallel.pipeline_model_parallel_layout"
    chunks = chunks_of(layout)
    if unknown := set("".join(chunks)) - set("EtmL"):
        yield f"{key}: {min(unknown)} is no layer", "E, t, m and L, with | between the chunks"
    if uneven:
        yield f"{key} and another way of splitting layers are set", "drop one of them"
    count, layers = len(chunks), "".join(chunks).count("t")
    if count % p.pp or count // p.pp != (p.vpp or 1):
        vpp = "null" if count == p.pp else count // p.pp
        yield (
            f"{key} has {count} chunks, but pp {p.pp} x vpp {p.vpp or 1} are {p.pp * (p.vpp or 1)}",
            f"use parallel.vpp={vpp}" if count % p.pp == 0 else f"use a multiple of {p.pp} chunks",
        )
    if layers != m.num_layers:
        yield f"{key} has {layers} layers, the model {m.num_layers}", f"model.num_layers={layers}"


def describe(recipe: Recipe) -> str:
    """``4 = 80 / (pp 4 x vpp 5)``, or every stage's chunks where they differ."""
    p = recipe.parallel
    if p.pipeline_model_parallel_layout is not None:
        return p.pipeline_model_parallel_layout
    stages = [recipe.layers_of(stage) for stage in range(p.pp)]
    if len({n for chunks in stages for n in chunks}) == 1:
        over = f"pp {p.pp}" + (f" x vpp {p.vpp}" if p.vpp else "")
        return f"{stages[0][0]} = {recipe.model.num_layers} / ({over})"
    middle = stages[1] if p.pp > 2 else None
    words = [f"first stage {_chunks(stages[0])}"]
    if middle is not None:
        words.append(f"middle stages {_chunks(middle)}")
    return ", ".join([*words, f"last stage {_chunks(stages[-1])}"])


def _chunks(layers: tuple[int, ...]) -> str:
    if len(set(layers)) == 1:
        return f"{layers[0]}" + (f" x {len(layers)}" if len(layers) > 1 else "")
    return "+".join(map(str, layers))


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
              "max_position_embeddings", "num_experts", "moe_ffn_hidden_size", "moe_router_topk",
              "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
              "mtp_num_layers", "mamba_state_dim", "mamba_head_dim", "mamba_num_groups",
              "mamba_num_heads"),
    "train": ("micro_batch_size", "global_batch_size", "iterations", "recompute_num_layers"),
    "parallel": ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
}  # fmt: skip

FRACTIONS = ("attention_dropout", "hidden_dropout", "rotary_percent")  # of model; 1.0 included
NETWORK = re.compile(r"(?:rails|fat-tree(?::\d{1,3}(?:\.\d{1,3})?)?)?")  # of hardware
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
)


_MOST = {"num_layers": MOST_LAYERS, "num_experts": MOST_EXPERTS, "iterations": 1 << 30}


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
            most = _MOST.get(name, (1 << 31) - 1)  # tensors of larger sizes overflow in torch
            if value is not None and value > most:
                raise RecipeError(f"{section}.{name} is {value}", fix=f"use at most {most}")
    for rule in (_numbers, _extra):
        for message, fix in rule(recipe):
            raise RecipeError(message, fix=fix)
    _world(recipe)  # parallel sizes first
    for rules in (_model, _hybrid, _experts, _batches, layer_rules, _training):
        for message, fix in rules(recipe):
            raise RecipeError(message, fix=fix)


def _world(recipe: Recipe) -> None:
    """A WorldError says which sizes do not fit, in the keys of a recipe what to type instead."""
    try:
        recipe.world  # noqa: B018
    except WorldError as error:
        here = re.sub(r"\b(size|tp|cp|pp|ep|etp|vpp|order)=", r"parallel.\1=", error.fix or "")
        fix = here.replace("parallel.size=", "parallel.world_size=")
        raise WorldError(error.message, fix=_that_run(recipe, fix)) from None


def _that_run(recipe: Recipe, fix: str) -> str:
    """``fix`` without the sizes that the rest of the recipe refuses (heads, batches), if it takes
    any of them."""
    sizes, keep, axes = fix.partition(", or keep ")
    ranks = axes.partition(" with ")[0]
    kept = []
    for part in (sizes, axes):
        words = re.findall(r"parallel\.\w+=\d+", part)
        kept.append(" or ".join(word for word in words if _runs(recipe, word)))
    if not any(kept):
        return fix
    kept[1] = kept[1] and f"keep {ranks} with {kept[1]}"
    return ", or ".join(filter(None, kept))


def _runs(recipe: Recipe, word: str) -> bool:
    """Whether ``parallel.KEY=NUMBER`` makes a recipe that can be built."""
    key, _, value = word.removeprefix("parallel.").partition("=")
    sizes: dict[str, Any] = {key: int(value)}
    try:
        replace(recipe, parallel=replace(recipe.parallel, **sizes))
    except (RecipeError, WorldError):
        return False
    return True


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
    if (version := recipe.prism.te_version) is not None:
        try:
            engine_release(version)
        except UsageError as error:
            yield f"prism.te_version: {error.message}", error.fix or ""
    if not NETWORK.fullmatch(recipe.hardware.network):
        yield (f"hardware.network: {recipe.hardware.network!r} is no network",
               "use rails, or fat-tree:2")  # fmt: skip
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


def _hybrid(recipe: Recipe) -> Iterator[tuple[str, str]]:
    m, p = recipe.model, recipe.parallel
    if (pattern := m.hybrid_override_pattern) is None:
        return
    key = "model.hybrid_override_pattern"
    if unknown := set(pattern) - set("M*-E"):
        yield f"{key}: {min(unknown)} is no layer", "M, *, - and E, one for each layer"
    if len(pattern) != m.num_layers:
        fix = f"model.num_layers={len(pattern)}"
        yield f"{key} has {len(pattern)} layers, the model {m.num_layers}", fix
    if p.vpp or p.pipeline_model_parallel_layout or m.multi_latent_attention or m.mtp_num_layers:
        yield (
            f"{key} with interleaving, a layout, latent attention or MTP",
            "run the job's own script: prism run --prism-ranks 0 -- pretrain_hybrid.py …",
        )
    if recipe.prism.transformer_impl != "transformer_engine" or recipe.prism.tier == "cpu":
        yield f"{key}: its layers are Transformer Engine's, as shapes", "prism.tier=meta"


def _model(recipe: Recipe) -> Iterator[tuple[str, str]]:
    m, p = recipe.model, recipe.parallel
    if m.kv_channels is None and m.hidden_size % m.num_attention_heads:
        yield (
            f"hidden_size {m.hidden_size} is not divisible by {m.num_attention_heads} heads",
            "change model.num_attention_heads, or give model.kv_channels",
        )
    if m.multi_latent_attention and m.position_embedding_type != "rope":
        yield (
            f"latent attention with position_embedding_type {m.position_embedding_type}",
            "set model.position_embedding_type=rope",
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
    if recipe.num_microbatches > MOST_MICROBATCHES:
        yield (
            f"{recipe.num_microbatches:,} microbatches an iteration",
            f"use train.global_batch_size={MOST_MICROBATCHES * one} or less",
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


@dataclass
class Model:
    """The GPT model, by the names of Megatron's arguments (training/arguments.py @core_v0.16.1)."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int  # tokens of one sample
    vocab_size: int  # before padding
    ffn_hidden_size: int | None = None  # None: 4 x hidden_size, as Megatron
    num_query_groups: int | None = None  # None: one key/value head per attention head
    kv_channels: int | None = None  # None: hidden_size / num_attention_heads
    make_vocab_size_divisible_by: int = 128
    max_position_embeddings: int | None = None  # None: seq_length
    normalization: str = "LayerNorm"
    norm_epsilon: float = 1e-5
    qk_layernorm: bool = False
    swiglu: bool = False
    position_embedding_type: str = "learned_absolute"
    rotary_base: int = 10000
    rotary_percent: float = 1.0
    use_rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    untie_embeddings_and_output_weights: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    attention_dropout: float = 0.1
    hidden_dropout: float = 0.1
    init_method_std: float = 0.02

    multi_latent_attention: bool = False
    q_lora_rank: int | None = None  # of latent attention; None: queries are not compressed
    kv_lora_rank: int = 32  # this and the next three: of latent attention
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    mtp_num_layers: int | None = None  # layers that predict further tokens; None: none
    mtp_loss_scaling_factor: float = 0.1

    # a layer each: M Mamba, * attention, - MLP, E experts; None: a transformer
    hybrid_override_pattern: str | None = None
    mamba_state_dim: int = 128
    mamba_head_dim: int = 64
    mamba_num_groups: int = 8
    mamba_num_heads: int | None = None  # None: 2 x hidden_size / mamba_head_dim

    num_experts: int | None = None  # None: a dense model
    moe_ffn_hidden_size: int | None = None  # None: ffn_hidden_size
    moe_layer_freq: Any = 1  # every n-th layer, or a list of 0 and 1 per layer
    moe_router_topk: int = 2
    moe_router_load_balancing_type: str = "aux_loss"
    moe_router_score_function: str = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_dtype: str | None = None
    moe_router_force_load_balancing: bool = False
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float | None = None
    moe_grouped_gemm: bool = False
    moe_token_dispatcher_type: str = "alltoall"
    moe_permute_fusion: bool = False
    moe_expert_capacity_factor: float | None = None
    moe_pad_expert_input_to_capacity: bool = False
    moe_shared_expert_intermediate_size: int | None = None

    extra: dict[str, Any] = field(default_factory=dict)  # verbatim to TransformerConfig


@dataclass
class Parallel:
    """How the job is split over its ranks."""

    world_size: int
    tp: int = 1
    pp: int = 1
    vpp: int | None = None  # model chunks per stage; None: no interleaving
    cp: int = 1
    ep: int = 1
    etp: int | None = None  # None: tp
    sequence_parallel: bool = False
    order: str = DEFAULT_ORDER
    # which stages get more or fewer layers (transformer_block.py get_num_layers_to_build
    # @core_v0.16.1)
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    pipeline_model_parallel_layout: str | None = None  # of every chunk: Et*2|t*3|t*3|t*2L


@dataclass
class Train:
    """One training run: batches, precision, optimizer, overlap, recomputation."""

    micro_batch_size: int = 1  # sequences
    global_batch_size: int = 1  # sequences
    iterations: int = 3
    bf16: bool = True
    fp8: str | None = None  # recipe: delayed, tensorwise, blockwise or mxfp8; None: no FP8
    optimizer: str = "adam"
    lr: float = 1e-4
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    use_distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    grad_reduce_in_fp32: bool = True
    recompute_granularity: str | None = None  # full or selective
    recompute_method: str | None = None  # uniform or block, with full only
    recompute_num_layers: int | None = None
    seed: int = 1234
    data: str = "mock"  # or the path of a text file, read as bytes


@dataclass
class Prism:
    """What to emulate, and where: the same as the --prism-* flags."""

    ranks: str | None = None  # a selector; None: one representative rank per stage
    tier: str = "auto"
    values: str = "mirror"
    out: str | None = None  # artefact folder
    # local: Megatron's own layers; local_flash: the same, on meta without the s x s scores
    transformer_impl: str = "transformer_engine"
    te_version: str | None = None  # the Transformer Engine that tier meta must have; None: any


@dataclass
class Hardware:
    """What the job is meant for: the GPU of a machine that prism replay knows (H200), whose times
    its ops get; another one, for which prism replay asks; CPU or nothing: the default machine.
    ``network``: between its nodes, as ``network=`` of prism replay, which has the last word.
    ``gpus_per_node``: ranks on each host; None: as many as the machine has."""

    name: str = ""
    network: str = ""
    gpus_per_node: int | None = None


@dataclass
class Recipe:
    """One job.  Building it checks it: RecipeError or WorldError, with arithmetic and fix."""

    model: Model
    parallel: Parallel
    train: Train = field(default_factory=Train)
    prism: Prism = field(default_factory=Prism)
    hardware: Hardware = field(default_factory=Hardware)
    name: str = ""  # empty: the name of the file

    def __post_init__(self) -> None:
        check(self)

    @property
    def world(self) -> World:
        """The job's ranks.  WorldError when the sizes do not fit."""
        p = self.parallel
        node = self.hardware.gpus_per_node
        return World(p.world_size, p.tp, p.cp, p.pp, p.ep, p.etp, p.vpp, p.order, node)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one rank in one iteration."""
        return self.train.global_batch_size // (self.train.micro_batch_size * self.world.dp)

    @property
    def ffn_hidden_size(self) -> int:
        return self.model.ffn_hidden_size or 4 * self.model.hidden_size

    @property
    def kv_channels(self) -> int:
        return self.model.kv_channels or self.model.hidden_size // self.model.num_attention_heads

    @property
    def num_query_groups(self) -> int:
        return self.model.num_query_groups or self.model.num_attention_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding (training/tokenizer/tokenizer.py _vocab_size_with_padding)."""
        multiple = self.model.make_vocab_size_divisible_by * self.parallel.tp
        return -(-self.model.vocab_size // multiple) * multiple

    def layers_of(self, stage: int) -> tuple[int, ...]:
        """Transformer layers of each chunk of a stage, as Megatron will split them.

        core/transformer/transformer_block.py get_num_layers_to_build @core_v0.16.1.
        """
        m, p = self.model, self.parallel
        if p.pipeline_model_parallel_layout is not None:
            split = chunks_of(p.pipeline_model_parallel_layout)[stage :: p.pp]
            return tuple(chunk.count("t") for chunk in split)
        chunks, last = p.vpp or 1, p.pp - 1
        ends = {0: p.num_layers_in_first_pipeline_stage, last: p.num_layers_in_last_pipeline_stage}
        given = [n for n in ends.values() if n is not None]
        if (own := ends.get(stage)) is not None:
            layers = own
        elif given:
            layers = (m.num_layers - sum(given)) // (p.pp - len(given))
        else:
            extra = p.account_for_embedding_in_pipeline_split + p.account_for_loss_in_pipeline_split
            layers = (m.num_layers + extra) // p.pp
        each = [layers // chunks] * chunks
        if stage == 0:
            each[0] -= p.account_for_embedding_in_pipeline_split
        if stage == last:
            each[-1] -= p.account_for_loss_in_pipeline_split
        return tuple(each)

    def derived(self) -> dict[str, str]:
        """What follows from the recipe, each with its arithmetic, for people."""
        m, p, t, world = self.model, self.parallel, self.train, self.world
        rows = {"dp": f"{world.dp} = {world.size} / (tp {p.tp} x cp {p.cp} x pp {p.pp})"}
        if m.num_experts:
            rows["expert dp"] = (
                f"{world.edp} = {world.size} / (etp {world.etp} x ep {p.ep} x pp {p.pp})"
            )
        rows["microbatches"] = (
            f"{self.num_microbatches} = {t.global_batch_size} / "
            f"(micro batch {t.micro_batch_size} x dp {world.dp})"
        )
        rows["layers per chunk"] = describe(self)
        rows["vocabulary"] = f"{self.padded_vocab_size:,} (padded from {m.vocab_size:,})"
        rows["tokens per iteration"] = (
            f"{t.global_batch_size * m.seq_length:,} = {t.global_batch_size} x {m.seq_length}"
        )
        return rows


_OVERRIDE = re.compile(r"(?P<key>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)=(?P<value>.*)", re.DOTALL)
# YAML 1.1 reads these as base 8 and base 60; nobody who writes a recipe means that
_ODD_NUMBER = re.compile(r"[-+]?0\d+|[-+]?\d+(?::[0-5]?\d)+")
_LINE = re.compile(r"^\s*(?:-\s+)?(?:[\w.]+\s*:\s+)?(?P<value>[-+\d:]+)\s*(?:#.*)?$")


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, apply ``section.key=value`` overrides, check everything.

    ``path`` is a file, or the name of a shipped recipe with or without ``.yaml``.  A relative
    ``train.data`` is looked up beside the recipe, then here.  Raises RecipeError or WorldError.
    """
    file = find(path)
    config = _merge(OmegaConf.structured(Recipe), _read(file), f"{file}")
    for token in overrides:
        config = _merge(config, _override(token), f"override {token!r}")
    recipe = _plain(config, file)
    recipe.name = recipe.name or file.stem
    if recipe.train.data != "mock":
        recipe.train.data = str(_data_file(recipe.train.data, file))
    return recipe


def load_prism_section(path: str | Path) -> dict[str, object]:
    """What a file says for the --prism-* flags: the keys of ``prism:`` it sets, and ``world_size``.

    The file may be a whole recipe or hold only these sections.  Raises RecipeError.
    """
    file = find(path)
    given = _read(file)
    _merge(OmegaConf.structured(Recipe), given, f"{file}")  # for its errors
    with _refused(str(file)):
        held = OmegaConf.to_container(given.get("prism") or OmegaConf.create({}), resolve=True)
    section = {str(key): value for key, value in held.items()} if isinstance(held, dict) else {}
    if (parallel := given.get("parallel")) is not None and "world_size" in parallel:
        section["world_size"] = parallel.world_size
    if section.get("ranks") is not None:
        section["ranks"] = str(section["ranks"])
    return section


def given(recipe: Recipe | str | os.PathLike[str]) -> Recipe:
    """``recipe`` itself, or the one of that name or file."""
    return recipe if isinstance(recipe, Recipe) else load(os.fspath(recipe))


def shipped() -> dict[str, Path]:
    """Name -> file of the recipes that come with the package, installed or in a checkout."""
    package = Path(__file__).parents[1]
    for folder in (package / "recipes", package.parent / "recipes"):
        if files := sorted(folder.glob("*.yaml")):
            return {file.stem: file for file in files}
    return {}


def summary(path: str | Path) -> str:
    """The first comment line of a recipe: what it shows."""
    first = Path(path).read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def find(path: str | Path) -> Path:
    """The file meant: itself, or a shipped recipe by name.  RecipeError naming the closest ones."""
    file = Path(path)
    with contextlib.suppress(ValueError, OSError):  # a name too long, a null byte in it
        if file.is_file():
            return file
    known = shipped()
    if (name := file.name.removesuffix(".yaml")) in known and file.parent.name in ("", "recipes"):
        return known[name]
    otherwise = "see the shipped ones: prism recipes"
    fix = did_you_mean(name, known, otherwise, most=2, cutoff=0.4)
    raise RecipeError(f"there is no recipe {path}", fix=fix)


def keys(section: type[DataclassInstance] = Recipe, prefix: str = "") -> dict[str, object]:
    """Every key a recipe may set, dotted, in the order of the schema -> the type of its values."""
    hints = get_type_hints(section)
    found: dict[str, object] = {}
    for item in fields(section):
        kind = hints[item.name]
        key = f"{prefix}{item.name}"
        found |= keys(kind, f"{key}.") if _is_section(kind) else {key: kind}
    return found


def _is_section(kind: object) -> TypeGuard[type[DataclassInstance]]:
    return isinstance(kind, type) and is_dataclass(kind)


def _read(file: Path) -> DictConfig:
    with foreign.reading(file, "a recipe", "give the path of a YAML file", error=RecipeError):
        text = foreign.read_yaml(file)
    for number, line in enumerate(text.splitlines(), 1):
        if match := _LINE.match(line):
            _refuse_odd(match["value"], f"{file}, line {number}")
    try:
        with _refused(str(file)):
            config = OmegaConf.create(_plain_text(text, str(file)))
    except AssertionError:  # a number, a date: OmegaConf takes it for no text
        config = None
    if not isinstance(config, DictConfig):
        raise RecipeError(f"{file} is no recipe: it has no sections", fix="see prism recipes")
    return config


def _override(token: str) -> DictConfig:
    match = _OVERRIDE.fullmatch(token)
    if match is None:
        name, _, value = token.lstrip("-").partition("=")
        parts = [re.sub(r"\W+", "_", part.strip()) for part in name.split(".") if part.strip()]
        key = ".".join(parts) if len(parts) > 1 else f"{parts[0]}.KEY" if parts else "section.key"
        close = difflib.get_close_matches(key, keys(), n=1, cutoff=0.6) if len(parts) > 1 else []
        why = "an override has no dashes" if token.startswith("-") else "an override is key=value"
        raise RecipeError(
            f"{token!r}: {why}", fix=f"write {close[0] if close else key}={value or 'VALUE'}"
        )
    _refuse_odd(match["value"], f"override {token!r}")
    where = f"override {token!r}"
    with _refused(where, fix="quote the value for YAML and for the shell"):
        _plain_text(match["value"], where)
        return OmegaConf.from_dotlist([token])


_CALL = re.compile(r"\$\{(?:[^{}]|\$\{[^{}]*\})*:")
_REFERENCES = 16  # each may have two in it, and so on


def _plain_text(text: str, where: str) -> str:
    """The same YAML, if it looks up nothing but the recipe's own keys: a recipe that is passed on
    must not copy the reader's environment into an artefact."""
    scalars = foreign.scalars_of_yaml(text)
    if any(_CALL.search(scalar) for scalar in scalars):
        raise RecipeError(
            f"{where}: ${{…:…}} calls a function of OmegaConf, which a recipe may not",
            fix="write the value itself, or ${section.key} for another one of the recipe",
        )
    if sum(scalar.count("${") for scalar in scalars) > _REFERENCES:
        raise RecipeError(f"{where} has more than {_REFERENCES} ${{…}}", fix="write the values")
    return text


@contextlib.contextmanager
def _refused(where: str, fix: str = "correct the marked place") -> Iterator[None]:
    """Say what OmegaConf and YAML do not take as a RecipeError."""
    try:
        yield
    except errors.ConfigKeyError as error:
        raise _unknown(str(error.full_key), where) from None
    except errors.MissingMandatoryValue as error:
        key = str(error.full_key)
        if _is_section(kind := get_type_hints(Recipe).get(key)):
            key = next(iter(keys(kind, f"{key}.")))
        raise RecipeError(
            f"{where}: {key} is missing", fix=f"add {key}=VALUE, or put it there"
        ) from None
    except errors.GrammarParseError as error:
        said = str(error).partition("\n")[0]
        raise RecipeError(f"{where}: {said}", fix="write $ as \\$ where it is text") from None
    except errors.OmegaConfBaseException as error:
        raise _wrong_type(error, where) from None
    except YAMLError as error:
        raise RecipeError(f"{where} is no YAML: {error}", fix=fix) from None
    except (
        TypeError,
        ValueError,
        OverflowError,
        RecursionError,
    ) as error:  # a list where a mapping is
        said = str(error).partition("\n")[0] or type(error).__name__
        raise RecipeError(f"{where}: {said}", fix="give the key a value of its type") from None


def _refuse_odd(value: str, where: str) -> None:
    if _ODD_NUMBER.fullmatch(value):
        plain = value.lstrip("+-").lstrip("0") or "0"
        fix = f"write '{value}' in quotes if it is text" if ":" in value else f"write {plain}"
        base = 60 if ":" in value else 8
        raise RecipeError(f"{where}: YAML reads {value} as a number in base {base}", fix=fix)


def _merge(config: DictConfig, more: DictConfig, where: str) -> DictConfig:
    with _refused(where):
        merged = OmegaConf.merge(config, more)
    assert isinstance(merged, DictConfig)
    return merged


def _plain(config: DictConfig, file: Path) -> Recipe:
    with _refused(str(file)):
        recipe = OmegaConf.to_object(config)
    assert isinstance(recipe, Recipe)
    return recipe


_SPELLED = {"tensor": "tp", "pipeline": "pp", "virtual": "vpp", "context": "cp",
            "expert_tensor": "etp", "expert": "ep"}  # fmt: skip


def _unknown(key: str, where: str) -> RecipeError:
    """An unknown key: the same name in another section, or a name like it."""
    known, leaf = keys(), key.rpartition(".")[2]
    close = [name for name in known if name.rpartition(".")[2] == leaf]
    sections = [item.name for item in fields(Recipe)]
    if leaf in RENAMED:  # Megatron's own word
        close = [RENAMED[leaf]]
    elif spelled := [axis for word, axis in _SPELLED.items() if leaf.startswith(word)]:
        close = close or [f"parallel.{spelled[0]}"]
    close = close or difflib.get_close_matches(key, [*known, *sections], n=2, cutoff=0.75)
    fix = f"did you mean {' or '.join(close)}?"
    fix = fix if close else f"the sections are {', '.join(sections)}"
    taken = {*RENAMED, *(name.rpartition(".")[2] for name in known)}
    if key.startswith("model.") and leaf not in taken:
        verbatim = f"a field of TransformerConfig goes to model.extra.{leaf}"
        fix = f"{fix} Or: {verbatim}" if close else verbatim
    return RecipeError(f"{where}: a recipe has no {key}", fix=fix)


def _wrong_type(error: errors.OmegaConfBaseException, where: str) -> RecipeError:
    """OmegaConf's own words, its first line, with what to type for the slips we know."""
    said = str(error).partition("\n")[0].replace("'", "")
    key = error.full_key or ""
    number = re.search(r"Value ([-+\d.eE]+) of type float", said)
    if number and "Integer" in said:
        value = float(number[1])
        fix = f"write {key}={value:.0f}" if value.is_integer() else f"{key} is a whole number"
        return RecipeError(f"{where}: {key}: {number[1]} is no whole number to YAML", fix=fix)
    if "is not a subclass of" in said:
        what = f"{where}: {key} is" if key else f"{where}: this is"  # OmegaConf may not say which
        return RecipeError(
            f"{what} a section, not a value",
            fix=f"set one of its keys, as {key}.KEY=VALUE" if key else "write train.lr=1e-4",
        )
    return RecipeError(f"{where}: {key}: {said}", fix=f"give {key} a value of the type named")


def _data_file(data: str, file: Path) -> Path:
    for place in (file.parent / data, Path(data)):
        with contextlib.suppress(ValueError, OSError):  # a name too long, a null byte in it
            if place.is_file():
                return place.resolve()
    raise RecipeError(
        f"train.data: there is no file {data}, neither beside {file.name} nor here",
        fix="give the path of a text file, or train.data=mock",
    )
