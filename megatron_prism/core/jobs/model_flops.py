"""What a recipe's iteration computes: tokens and floating-point operations of its model."""

from __future__ import annotations

from megatron_prism.core.jobs.recipe import Recipe

# layers that this module does not know
_OTHER = ("experimental_attention_variant", "attention_output_gate", "moe_latent_size")


def of_recipe(recipe: Recipe) -> dict[str, str]:
    """``tokens_per_iteration`` and, of the models that recipes name, ``model_flops_per_iteration``:
    what a slice says of its job.
    """
    m, tokens = recipe, recipe.global_batch_size * recipe.seq_length
    figures = {"tokens_per_iteration": str(tokens)}
    has_other_parts = m.multi_latent_attention or m.mtp_num_layers or m.is_hybrid
    if has_other_parts or any(m.flags.get(key) for key in _OTHER):
        return figures
    query, keys = m.head_size * m.num_attention_heads, m.head_size * m.groups
    # projections; scores and their product with the values, half of which a causal mask leaves
    attention = m.hidden_size * (2 * query + 2 * keys) + m.seq_length * query
    logits = m.hidden_size * recipe.padded_vocab_size
    flops = 6 * tokens * (m.num_layers * attention + _mlp(m) + logits)
    return {**figures, "model_flops_per_iteration": str(flops)}


def _mlp(m: Recipe) -> int:
    """Multiplications per token in all MLPs and experts."""
    ffn, products = m.ffn_size, 3 if m.swiglu else 2
    every = range(m.num_layers)
    if not m.num_experts:
        experts = [False for _ in every]
    # every n-th layer has experts, or a list says which
    elif isinstance(m.moe_layer_freq, int):
        experts = [i % m.moe_layer_freq == 0 for i in every]
    else:
        experts = [bool(m.moe_layer_freq[i]) for i in every]
    routed = (m.moe_ffn_hidden_size or ffn) * m.moe_router_topk
    shared = m.moe_shared_expert_intermediate_size or 0
    num_moe = sum(experts)
    width = num_moe * (routed + shared) + (len(experts) - num_moe) * ffn
    return int(m.hidden_size * products * width)
