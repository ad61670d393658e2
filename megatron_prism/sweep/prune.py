"""Why points cannot run, found before anything is captured.

Two filters: what Megatron refuses (asked of Megatron itself), and a lower bound of the memory of
the first stage: a point that falls by it would be out of memory for certain.  The bound counts the
large matrices, their gradients and optimizer state, and what every layer must keep for backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_prism.core.recipe import Recipe
from megatron_prism.core.units import format_bytes
from megatron_prism.emulate.recipe_flags import megatron_flags
from megatron_prism.emulate.recipe_server import CaptureServer
from megatron_prism.sweep.space import SweepPoint

__all__ = ["MEGATRON", "MEMORY", "memory_bound", "refused_by_megatron", "too_large"]

MEGATRON, MEMORY = "Megatron's checks", "memory bound"
_AT_ONCE = 64  # recipes of a request


def refused_by_megatron(points: Sequence[SweepPoint], server: CaptureServer) -> list[SweepPoint]:
    """The points, those that Megatron refuses with its words."""
    left = [point for point in points if not point.by and point.recipe is not None]
    refusals: dict[str, str] = {}
    for start in range(0, len(left), _AT_ONCE):
        some = left[start : start + _AT_ONCE]
        asked = [point.recipe for point in some if point.recipe is not None]
        said = server.check(asked, [megatron_flags(recipe) for recipe in asked])
        refusals |= dict(zip((point.key for point in some), said, strict=True))
    return [
        point.dropped(MEGATRON, refusals[point.key]) if refusals.get(point.key) else point
        for point in points
    ]


def too_large(points: Sequence[SweepPoint], limit: int) -> list[SweepPoint]:
    """The points, those whose first stage exceeds ``limit`` bytes with what it needs."""
    found = []
    for point in points:
        if not point.by and point.recipe is not None:
            least = memory_bound(point.recipe)
            if least > limit:
                said = f"needs at least {format_bytes(least)}, limit {format_bytes(limit)}"
                point = point.dropped(MEMORY, said)
        found.append(point)
    return found


def memory_bound(recipe: Recipe) -> int:
    """Bytes that a rank of the first stage surely has allocated at its peak.

    Matrices only: norms, biases, workspaces and the allocator come on top.  Precision-aware
    optimizers and FP8 parameters would need less, so with settings that this does not know
    (``model.extra``, FP8) only weights and gradients in two bytes count.
    """
    layers = sum(recipe.layers_of(0))
    known = not recipe.model.extra and not recipe.train.fp8
    dense, experts = _matrices(recipe, layers)
    t, world = recipe.train, recipe.world
    weight = 2 if t.bf16 else 4
    grad = 4 if t.grad_reduce_in_fp32 or not t.bf16 else 2
    state = (12 if t.bf16 else 8) if t.optimizer == "adam" else 0
    if not known:
        return (dense + experts) * 4
    total = (dense + experts) * (weight + grad)
    # the distributed optimizer splits over dp x cp, experts' over expert dp
    split = (world.dp * world.cp, world.edp) if t.use_distributed_optimizer else (1, 1)
    total += dense * state // split[0] + experts * state // split[1]
    return total + _activations(recipe)


def _matrices(recipe: Recipe, layers: int) -> tuple[int, int]:
    """(elements of a rank's large matrices outside experts, in experts) of the first stage."""
    m, p = recipe.model, recipe.parallel
    query = recipe.kv_channels * m.num_attention_heads
    keys = recipe.kv_channels * recipe.num_query_groups
    attention = m.hidden_size * (2 * query + 2 * keys) // p.tp
    products = 3 if m.swiglu else 2
    mlp = m.hidden_size * recipe.ffn_hidden_size * products // p.tp
    embedding = recipe.padded_vocab_size * m.hidden_size // p.tp
    if p.pp == 1 and m.untie_embeddings_and_output_weights:
        embedding *= 2
    if not m.num_experts:
        return layers * (attention + mlp) + embedding, 0
    if m.moe_layer_freq != 1:  # which layers of this stage have experts is Megatron's to say
        return layers * attention + embedding, 0
    width = (m.moe_ffn_hidden_size or recipe.ffn_hidden_size) // (p.etp or p.tp)
    experts = m.num_experts // p.ep * m.hidden_size * width * products
    return layers * attention + embedding, layers * experts


def _activations(recipe: Recipe) -> int:
    """Bytes that the layers of the first stage keep when it has most microbatches in flight."""
    m, p, t = recipe.model, recipe.parallel, recipe.train
    tokens = m.seq_length // p.cp * t.micro_batch_size
    element = 2 if t.bf16 else 4
    boundary = tokens * m.hidden_size // (p.tp if p.sequence_parallel else 1)
    kept = boundary  # the layer's input
    if t.recompute_granularity is None and not m.num_experts:
        query = recipe.kv_channels * m.num_attention_heads
        keys = recipe.kv_channels * recipe.num_query_groups
        wide = recipe.ffn_hidden_size * (2 if m.swiglu else 1)
        kept += boundary + tokens * (query + 2 * keys + wide) // p.tp
    chunks = recipe.layers_of(0)
    if not chunks:
        return 0
    one = min(chunks) * kept * element
    if t.recompute_granularity == "full":
        per_group = t.recompute_num_layers or 1
        kept_layers = min(chunks) // per_group if t.recompute_method == "uniform" else 0
        one = kept_layers * boundary * element
    vpp, count = p.vpp or 1, recipe.num_microbatches
    ahead = (p.pp - 1) * 2 + (vpp - 1) * p.pp if p.vpp and p.pp > 1 else p.pp - 1
    return min(ahead + 1, count * vpp) * one
