"""The least that a rank of a recipe needs, from its sizes alone: nothing is captured.

In : a recipe.  Out: bytes that are surely allocated at the peak of a rank of the first stage.
Matrices only: norms, biases, workspaces and the allocator come on top.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_prism.core.jobs.recipe import Recipe

_LESS = re.compile(  # flags of what needs less
    "fp8|fp4|dtype|precision_aware|offload|moe_latent|variant|fsdp|_freq|saved_activations"
)


@dataclass(frozen=True)
class _Matrices:
    """Elements of a rank's large matrices.

    Attributes:
        dense: outside experts.
        experts: in experts.
    """

    dense: int
    experts: int


def memory_bound(recipe: Recipe) -> int:
    """Return bytes that a rank of the first stage surely has allocated at its peak.

    These are the large matrices, their gradients and optimizer state, and what every layer keeps
    for its backward.  Precision-aware optimizers and FP8 parameters would need less, so with flags
    like theirs (``_LESS``) only weights and gradients in two bytes count.
    """
    # a layout that is spelt out: the embedding alone is counted
    is_spelt_out = bool(recipe.is_hybrid or recipe.pipeline_model_parallel_layout)
    layers = 0
    if not is_spelt_out:
        layers = _first_layers(recipe)
    matrices = _matrices(recipe, layers)
    elements = matrices.dense + matrices.experts
    if is_spelt_out or any(map(_LESS.search, recipe.flags)):
        return elements * 4

    # weights and gradients
    weight_bytes = 2 if recipe.bf16 else 4
    gradient_bytes = 2 if recipe.bf16 and recipe.grad_reduce_in_bf16 else 4
    held = elements * (weight_bytes + gradient_bytes)

    # Adam's two moments, and main parameters beside weights in bf16
    state_bytes = 0
    if recipe.optimizer == "adam":
        state_bytes = 12 if recipe.bf16 else 8
    dense_states = matrices.dense * state_bytes
    expert_states = matrices.experts * state_bytes
    # the distributed optimizer splits over dp x cp, experts' over expert dp
    if recipe.use_distributed_optimizer:
        world = recipe.world
        dense_states //= world.dp * world.cp
        expert_states //= world.edp
    return held + dense_states + expert_states + _activations(recipe, layers)


def _activations(recipe: Recipe, layers: int) -> int:
    """Return bytes that ``layers`` keep when the first stage has most microbatches in flight.

    These are their inputs; of dense layers that recompute no more than attention's core what their
    norms, products and activation need, too.
    """
    world = recipe.world
    tokens = recipe.seq_length // world.cp * recipe.micro_batch_size
    input_elements = tokens * recipe.hidden_size
    if recipe.sequence_parallel:
        input_elements //= world.tp
    kept_elements = input_elements

    # layers that run again keep inputs alone
    if recipe.recompute_granularity == "full":
        # groups of layers keep one input; of chosen layers nobody says here which
        if recipe.recompute_method == "uniform":
            layers //= recipe.recompute_num_layers or 1
        else:
            layers = 0
    elif not recipe.num_experts and recipe.recompute_modules in (None, ["core_attn"]):
        query = recipe.head_size * recipe.num_attention_heads
        keys = recipe.head_size * recipe.groups
        # latent attention keeps its values alone for sure
        if recipe.multi_latent_attention:
            query = recipe.num_attention_heads * recipe.v_head_dim
            keys = 0
        products = 3 if recipe.swiglu else 2
        split_elements = 2 * query + 2 * keys + recipe.ffn_size * products
        kept_elements = 4 * input_elements + tokens * split_elements // world.tp

    element_bytes = 2 if recipe.bf16 else 4
    in_flight = min(world.pp, recipe.num_microbatches)
    return int(layers * kept_elements * element_bytes * in_flight)


def _first_layers(recipe: Recipe) -> int:
    """Count the layers of the first stage; embedding and loss may count as one each."""
    first_stage = recipe.decoder_first_pipeline_num_layers
    if first_stage is not None:
        return int(first_stage)
    stages = recipe.world.pp
    last_stage = recipe.decoder_last_pipeline_num_layers or 0
    embedding = int(recipe.account_for_embedding_in_pipeline_split)
    loss = int(recipe.account_for_loss_in_pipeline_split)
    counted = recipe.num_layers - last_stage + embedding + loss
    sharing_stages = max(stages - bool(last_stage), 1)
    loss_here = loss * (stages == 1)
    return int(counted // sharing_stages - embedding - loss_here)


def _matrices(recipe: Recipe, layers: int) -> _Matrices:
    """Count the elements of a rank's large matrices in the first stage."""
    world = recipe.world
    products = 3 if recipe.swiglu else 2
    mlp = recipe.hidden_size * recipe.ffn_size * products // world.tp
    attention = _attention_elements(recipe)
    embedding = recipe.padded_vocab_size * recipe.hidden_size // world.tp
    # the only stage has the output layer, too
    if world.pp == 1 and recipe.untie_embeddings_and_output_weights:
        embedding *= 2
    if not recipe.num_experts:
        return _Matrices(layers * (attention + mlp) + embedding, 0)

    dense = layers * attention + embedding
    # which layers of this stage have experts is Megatron's to say
    if recipe.moe_layer_freq != 1:
        return _Matrices(dense, 0)
    width = (recipe.moe_ffn_hidden_size or recipe.ffn_size) // (world.etp or world.tp)
    layer_experts = recipe.num_experts // world.ep * recipe.hidden_size * width * products
    return _Matrices(dense, layers * layer_experts)


def _attention_elements(recipe: Recipe) -> int:
    """Count the elements of a layer's attention on a rank."""
    world = recipe.world
    if not recipe.multi_latent_attention:
        query = recipe.head_size * recipe.num_attention_heads
        keys = recipe.head_size * recipe.groups
        return int(recipe.hidden_size * (2 * query + 2 * keys) // world.tp)

    # what is compressed is on every rank, what a head has is split
    rank_heads = recipe.num_attention_heads // world.tp
    rope = recipe.qk_pos_emb_head_dim
    query_rank = recipe.q_lora_rank or 0
    down = recipe.hidden_size * (query_rank + recipe.kv_lora_rank + rope)
    up = (query_rank or recipe.hidden_size) * (recipe.qk_head_dim + rope)
    up += recipe.kv_lora_rank * (recipe.qk_head_dim + recipe.v_head_dim)
    up += recipe.hidden_size * recipe.v_head_dim
    return int(down + rank_heads * up)
