"""Small stand-ins for parts that need a GPU library, each naming what it stands in for.

Used by ``emulate.patches.without_cuda`` on hosts without Transformer Engine and apex.  (The virtual
Transformer Engine, for jobs that ask for it, is the package ``runtime.te``.)  Values are right on
the CPU; on the meta device only shapes are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import distributed as dist
from torch.nn import functional

from megatron_prism.runtime.devices.kernels import fused

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import AutogradContext

__all__ = [
    "FlashAttention",
    "SequenceParallelNorm",
    "balanced_splits",
    "context_parallel_attention",
    "masked_select",
    "permute_shapes",
]


Permuted = tuple[torch.Tensor | None, ...]  # tokens, probs, index; more in later releases


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


@dataclass(frozen=True)
class Splits:
    """Token counts of one MoE layer on the host (numbers of token copies).

    sent, received   : to and from each expert-parallel rank, ``[ep]``
    received_tp      : from each expert-tensor-parallel rank, ``[tp]``
    table            : for each local expert by source rank, ``[tp * ep, local]``
    per_local_expert : ``[local]``
    """

    total: int
    sent: np.ndarray
    received: np.ndarray
    received_tp: np.ndarray
    table: torch.Tensor
    per_local_expert: torch.Tensor


def balanced_splits(
    total: int, num_experts: int, local: Sequence[int], ep_size: int, tp_size: int
) -> Splits:
    """Every expert gets its even share of ``total`` copies; the first ones take the remainder."""
    counts = np.full(num_experts, total // num_experts, dtype=np.int64)
    counts[: total % num_experts] += 1
    here = counts[list(local)]
    return Splits(
        total=total,
        sent=counts.reshape(ep_size, -1).sum(axis=1),
        received=np.full(ep_size, here.sum()),
        received_tp=np.full(tp_size, here.sum() * ep_size),
        table=torch.from_numpy(np.tile(here, (tp_size * ep_size, 1))),
        per_local_expert=torch.from_numpy(here * tp_size * ep_size),
    )


class _MaskedSelect(torch.autograd.Function):
    """``Tensor.masked_select`` on shapes: saves the mask; indices of 8 bytes pass, two an entry."""

    @staticmethod
    def forward(
        ctx: AutogradContext, values: torch.Tensor, mask: torch.Tensor, count: int
    ) -> torch.Tensor:
        ctx.save_for_backward(mask)
        where = mask.new_empty(count, mask.dim(), dtype=torch.int64)
        out = values.new_empty(count)
        fused("masked_select", 0, values, mask, where, out)
        return out

    @staticmethod
    def backward(ctx: AutogradContext, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        into = torch.zeros(mask.shape, dtype=grad.dtype, device=grad.device)
        fused("masked_select_backward", 0, grad, mask, into)
        return into, None, None


def masked_select(values: torch.Tensor, mask: torch.Tensor, count: int) -> torch.Tensor:
    """Stands in for ``values.masked_select(mask)`` where ``count`` entries of ``mask`` are true."""
    return _MaskedSelect.apply(values, mask, count)


def permute_shapes(
    original: Callable[..., Permuted],
    tokens: torch.Tensor,
    routing_map: torch.Tensor,
    probs: torch.Tensor | None = None,
    num_out_tokens: int | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
    **kwargs: object,
) -> Permuted:
    """Stands in for the masked selection of moe_utils.permute @0.16.1 on shapes.

    tokens ``[t, hidden]`` become ``[num_out_tokens, hidden]``; probs ``[t, experts]`` become
    ``[num_out_tokens]``.  Saved for backward: the index, as there.
    """
    newer = "tokens_per_expert" in inspect.signature(original).parameters  # 0.19: argsort, static
    if newer or fused or drop_and_pad or num_out_tokens is None:
        return original(tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad, **kwargs)
    index = torch.empty(int(num_out_tokens), dtype=torch.int64, device=tokens.device)
    chosen = None if probs is None else probs.T.contiguous().view(-1).index_select(0, index)
    return tokens.index_select(0, index), chosen, index
