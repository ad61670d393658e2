"""What of a job's memory nobody has measured: by name, with how far the truth may be from it.

A figure of tier meta is exact where what allocates is known from its source.  Where it is not, the
figure stays and says so: in the summary of a run, in ``prism memory`` and in its baselines.
``memory_bound`` is what a recipe needs at least, before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_prism.core import job_settings

if TYPE_CHECKING:
    from megatron_prism.core.recipe import Recipe

__all__ = ["Estimate", "described", "estimates", "memory_bound"]

_Settings = Mapping[str, str]


@dataclass(frozen=True)
class Estimate:
    """``what`` is not known; the truth is between ``low`` and ``high`` percent off the figure."""

    what: str
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:+g} to {self.high:+g} % ({self.what})"


def _has(settings: _Settings, *names: str) -> bool:
    return any(settings.get(name, "0") not in ("0", "None", "False") for name in names)


def _routes(settings: _Settings) -> bool:
    """Whether the router's choices decide how large tensors are."""
    experts = _has(settings, "num_experts", "num_moe_experts")
    return experts and not _has(settings, "moe_pad_expert_input_to_capacity")


def _captures_graphs(settings: _Settings) -> bool:
    graphs = settings.get("cuda_graph_impl", "none") not in ("none", "None")
    return graphs or _has(settings, "enable_cuda_graph", "external_cuda_graph")


def _packs_unfused(settings: _Settings) -> bool:
    packed = _has(settings, "sft", "sequence_packing_scheduler", "use_packed_sequence")
    return packed and settings.get("attention_backend") == "unfused"


_RULES: tuple[tuple[Callable[[_Settings], bool], Estimate], ...] = (
    # of NVIDIA's published peaks of MoE jobs (docs/accuracy.md)
    (_routes, Estimate("routing: other ranks send experts as many tokens as this one", -15, 10)),
    # one job is known: 2 % above the figure without graphs (docs/accuracy.md)
    (_captures_graphs, Estimate("CUDA graphs: what they keep is not counted", 0, 10)),
    # scores and their mask, of the longest sequence
    (_packs_unfused, Estimate("unfused attention of packed sequences: counted as fused", 0, 150)),
)


def estimates(arguments: str | None) -> tuple[Estimate, ...]:
    """What is not known of a job with these settings (``job_settings``'s line of text)."""
    found = job_settings.values(arguments or "")
    plain = {name.removeprefix("--").replace("-", "_").rpartition(".")[2]: text or "True"
             for name, text in found.items()}  # fmt: skip
    return tuple(estimate for applies, estimate in _RULES if applies(plain))


def described(provenance: str, found: tuple[Estimate, ...]) -> str:
    """``provenance`` of a figure that ``found`` are part of."""
    return provenance if not found else f"estimated, {'; '.join(map(str, found))}; {provenance}"


def memory_bound(recipe: Recipe) -> int:
    """Bytes that a rank of the first stage surely has allocated at its peak: the large matrices,
    their gradients and optimizer state, and what every layer must keep for backward.

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
    if m.multi_latent_attention:  # what is compressed is on every rank
        of_head, rope = m.num_attention_heads // p.tp, m.qk_pos_emb_head_dim
        down = m.hidden_size * ((m.q_lora_rank or 0) + m.kv_lora_rank + rope)
        up = (m.q_lora_rank or m.hidden_size) * (m.qk_head_dim + rope)
        up += m.kv_lora_rank * (m.qk_head_dim + m.v_head_dim) + m.hidden_size * m.v_head_dim
        attention = down + of_head * up
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
        if m.multi_latent_attention:
            query, keys = m.num_attention_heads * m.v_head_dim, 0
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
