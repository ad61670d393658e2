"""The fused router, and the losses that balance it (csrc/extensions/router.cpp)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_prism.runtime.devices.kernels import fused
from megatron_prism.runtime.te_kernels.table import kernel, new, since, tensors_in


def _between(logits: Tensor) -> torch.dtype:
    """What the router keeps for backward is fp32 from 2.13 on."""
    return torch.float32 if since(2, 13) else logits.dtype


def _map(logits: Tensor, bitmap: Any) -> Tensor:
    """A byte for each expert, or a bit (allocate_routing_map, router.cpp:28 @v2.18)."""
    *tokens, experts = logits.shape
    bits = bitmap is not None and int(bitmap)
    return new([*tokens, -(-experts // 8)]) if bits else new([*tokens, experts], torch.bool)


@kernel()
def fused_topk_with_score_function_fwd(
    logits: Tensor, topk: int, use_pre_softmax: bool, num_groups: object = None,
    group_topk: object = None, scaling_factor: object = None, score_function: str = "softmax",
    expert_bias: object = None, routing_map_format: Any = None, topk_indices: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """router.cpp:65 @v2.18"""
    probs = new(logits.shape, logits.dtype)
    chosen = _map(logits, routing_map_format) if topk_indices is None else topk_indices
    out = probs, chosen, new(logits.shape, _between(logits))
    fused("router_topk", 0, logits, *out)
    return out


@kernel()
def fused_score_for_moe_aux_loss_fwd(
    logits: Tensor, topk: int, score_function: str, routing_map_format: Any = None
) -> tuple[Tensor, ...]:
    """router.cpp:221 @v2.18"""
    wide = _between(logits)
    out = new(logits.shape, wide), _map(logits, routing_map_format), new(logits.shape, wide)
    fused("router_scores", 0, logits, *out)
    return out


def _backward(name: str, *args: object, **options: object) -> Tensor | None:
    """Into a tensor that Python makes; until 2.12 C++ makes it."""
    tensors = tensors_in((*args, *options.values()))
    if since(2, 13):
        fused(name, 0, *tensors)
        return None
    out = new(tensors[-1].shape, tensors[-1].dtype)
    fused(name, 0, *tensors, out)
    return out


@kernel()
def fused_topk_with_score_function_bwd(*args: object, **options: object) -> Tensor | None:
    """router.cpp:157 @v2.18"""
    return _backward("router_topk_backward", *args, **options)


@kernel()
def fused_score_for_moe_aux_loss_bwd(*args: object, **options: object) -> Tensor | None:
    """router.cpp:269 @v2.18"""
    return _backward("router_scores_backward", *args, **options)


@kernel("fused_moe_aux_loss_fwd", "fused_moe_aux_loss_fwd_graph_safe")
def aux_loss(
    probs: Tensor, tokens_per_expert: Tensor, *rest: object, **options: object
) -> tuple[Tensor, Tensor]:
    """router.cpp:299, :324 @v2.18: the loss, and what backward needs: two numbers since 2.16"""
    fused("router_aux_loss", 0, probs, tokens_per_expert)
    return new((), probs.dtype), new(2 if since(2, 16) else (), torch.float32)


@kernel()
def fused_moe_aux_loss_bwd(
    Const_buf: Tensor, tokens_per_expert: Tensor, num_rows: int, num_cols: int,
    grad_aux_loss: Tensor,
) -> Tensor:  # fmt: skip
    """router.cpp:355 @v2.18"""
    out = new((num_rows, num_cols), grad_aux_loss.dtype)
    fused("router_aux_loss_backward", 0, tokens_per_expert, out)
    return out
