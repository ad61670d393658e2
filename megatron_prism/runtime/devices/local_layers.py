"""The norm and the attention of Megatron's local layers, without apex and Transformer Engine.

``emulate.patches.without_cuda`` puts them in place.  (Transformer Engine, for jobs that
ask for it, is the package ``runtime.te_kernels``.)  Values are right on the CPU; on the meta device
only shapes are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import distributed as dist
from torch.nn import functional

from megatron_prism.runtime.devices.kernels import fused

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import AutogradContext


class ModelConfig(Protocol):
    """What a norm asks of Megatron's TransformerConfig."""

    normalization: str
    layernorm_zero_centered_gamma: bool
    use_cpu_initialization: bool
    params_dtype: torch.dtype
    sequence_parallel: bool


class SequenceParallelNorm(torch.nn.Module):
    """Stands in for apex's FusedLayerNorm / TE's norms under sequence parallelism.

    Input and output ``[tokens, micro-batch, hidden]``.  Weights carry ``sequence_parallel``, so
    that finalize_model_grads reduces their gradients over tensor-parallel ranks, as for the real
    ones.
    """

    def __init__(self, config: ModelConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.shape, self.eps = (hidden_size,), eps
        self.rms = config.normalization == "RMSNorm"
        self.zero_centered = config.layernorm_zero_centered_gamma
        device = torch.cuda.current_device() if not config.use_cpu_initialization else "cpu"
        start = torch.zeros if self.zero_centered else torch.ones
        self.weight = torch.nn.Parameter(
            start(hidden_size, device=device, dtype=config.params_dtype)
        )
        self.bias = None
        if not self.rms:
            self.bias = torch.nn.Parameter(
                torch.zeros(hidden_size, device=device, dtype=config.params_dtype)
            )
        for parameter in self.parameters():
            setattr(parameter, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.weight + 1 if self.zero_centered else self.weight
        if self.rms:
            return functional.rms_norm(hidden, self.shape, weight, self.eps)
        return functional.layer_norm(hidden, self.shape, weight, self.bias, self.eps)


class _GatherSequence(torch.autograd.Function):
    """All-gather over the context-parallel group forward, reduce-scatter backward (dim 0)."""

    @staticmethod
    def forward(
        ctx: AutogradContext, tensor: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.group, ctx.tokens = group, tensor.shape[0]
        out = tensor.new_empty(tensor.shape[0] * group.size(), *tensor.shape[1:])
        dist.all_gather_into_tensor(out, tensor.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: AutogradContext, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        out = grad.new_empty(ctx.tokens, *grad.shape[1:])
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None


def context_parallel_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: dist.ProcessGroup,
    scale: float,
) -> torch.Tensor:
    """Stands in for TEDotProductAttention with ``cp_comm_type all_gather`` (causal, no dropout).

    query ``[s/cp, b, heads, d]``, key and value ``[s/cp, b, groups, d]``; returns ``[s/cp, b,
    heads*d]``.  Each rank holds chunks r and 2cp-1-r of the sequence, as get_batch_on_this_cp_rank
    deals them (core/utils.py), so the causal mask follows the true positions.
    """
    n, rank, tokens = group.size(), group.rank(), query.shape[0]
    keys, values = _GatherSequence.apply(key, group), _GatherSequence.apply(value, group)
    half = tokens // 2
    chunks = torch.arange(2 * n * half, device=query.device).view(2 * n, half)
    of_rank = [torch.cat([chunks[r], chunks[2 * n - 1 - r]]) for r in range(n)]
    mask = torch.cat(of_rank)[None, :] <= of_rank[rank][:, None]
    q, k, v = (t.permute(1, 2, 0, 3) for t in (query, keys, values))
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.permute(2, 0, 1, 3).reshape(tokens, query.shape[1], -1)


class FlashAttention(torch.autograd.Function):
    """Stands in for fused (flash) attention on shapes: what it allocates and saves, no values.

    query ``[s, b, heads, d]``, key and value ``[s_k, b, groups, d]`` -> ``[s, b, heads * d]``.
    Saved for backward: query, key, value, the output and the log-sum-exp in fp32 ``[b, heads, s]``,
    as flash attention and cuDNN's fused attention do; the s x s scores never exist.
    """

    @staticmethod
    def forward(
        ctx: AutogradContext, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        s, b, heads, _ = query.shape
        out = query.new_empty(s, b, heads * value.shape[-1])
        log_sum_exp = query.new_empty(b, heads, s, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, log_sum_exp)
        pairs = b * heads * s * key.shape[0] * (query.shape[-1] + value.shape[-1])
        fused("attention", pairs, query, key, value, out)  # two products, causal
        return out

    @staticmethod
    def backward(ctx: AutogradContext, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        s, b, heads, size = query.shape
        pairs = b * heads * s * key.shape[0] * (size + value.shape[-1])
        fused("attention_backward", pairs * 5 // 2, query, key, value, grad)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
