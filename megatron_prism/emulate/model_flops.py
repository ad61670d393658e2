"""How many flops does one iteration of the model take?  What MFU is a share of.

Counted as Megatron's log does (training/training.py num_floating_point_operations @core_v0.16.1 and
@core_v0.19.0): products of layers and logits, forward and twice that backward, attention under a
causal mask, nothing recomputed.
"""

from __future__ import annotations

import sys

from megatron_prism.core.recipe_schema import Model, Recipe

__all__ = ["of_recipe", "of_running_job"]

# of model.extra, where recipes let it through: layers that this module does not know
_OTHER = ("experimental_attention_variant", "attention_output_gate", "moe_latent_size")


def of_recipe(recipe: Recipe) -> dict[str, str]:
    """``tokens_per_iteration`` and, of the models that recipes name, ``model_flops_per_iteration``:
    what a slice says of its job."""
    m = recipe.model
    tokens = recipe.train.global_batch_size * m.seq_length
    found = {"tokens_per_iteration": str(tokens)}
    if any(m.extra.get(key) for key in _OTHER):
        return found
    query = recipe.kv_channels * m.num_attention_heads
    keys = recipe.kv_channels * recipe.num_query_groups
    # projections; scores and their product with the values, half of which a causal mask leaves
    attention = m.hidden_size * (2 * query + 2 * keys) + m.seq_length * query
    logits = m.hidden_size * recipe.padded_vocab_size
    flops = 6 * tokens * (m.num_layers * attention + _mlp(m) + logits)
    return {**found, "model_flops_per_iteration": str(flops)}


def _mlp(m: Model) -> int:
    """Multiplications per token in all MLPs and experts."""
    ffn, products = m.ffn_hidden_size or 4 * m.hidden_size, 3 if m.swiglu else 2
    every = range(m.num_layers)
    if not m.num_experts:
        experts = [False for _ in every]
    elif isinstance(m.moe_layer_freq, int):
        experts = [i % m.moe_layer_freq == 0 for i in every]
    else:
        experts = [bool(m.moe_layer_freq[i]) for i in every]
    routed = (m.moe_ffn_hidden_size or ffn) * m.moe_router_topk
    shared = m.moe_shared_expert_intermediate_size or 0
    width = sum(routed + shared if moe else ffn for moe in experts)
    return m.hidden_size * products * width


def of_running_job() -> dict[str, str]:
    """The same of the stock job that trains in this process, as Megatron itself counts it; empty
    if none does."""
    training = sys.modules.get("megatron.training.training")
    calculator = sys.modules.get("megatron.core.num_microbatches_calculator")
    if training is None or calculator is None:
        return {}
    args, batch = training.get_args(), calculator.get_current_global_batch_size()
    flops = round(training.num_floating_point_operations(args, batch))
    return {
        "tokens_per_iteration": str(batch * args.seq_length),
        "model_flops_per_iteration": str(flops),
    }
