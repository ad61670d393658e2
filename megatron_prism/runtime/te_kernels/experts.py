"""The fused router, and the losses that balance it (csrc/extensions/router.cpp)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from megatron_prism.runtime.devices.kernels import fused
from megatron_prism.runtime.te_kernels.table import (
    WITHOUT_VALUES,
    Values,
    fill,
    gradient,
    kernel,
    new,
    refuse,
    since,
    tensors_in,
)

_TINY = 1e-20  # beside a sum of scores (common/fused_router/utils.h @v2.9)
Choice = Callable[[Tensor], Tensor]


def _between(logits: Tensor) -> torch.dtype:
    """What the router keeps for backward is fp32 from 2.13 on."""
    return torch.float32 if since(2, 13) else logits.dtype


def _map(logits: Tensor, bitmap: Values) -> Tensor:
    """A byte for each expert, or a bit (allocate_routing_map, router.cpp:28 @v2.18)."""
    *tokens, experts = logits.shape
    if bitmap is None or not int(bitmap):
        return new([*tokens, experts], torch.bool)
    if not logits.is_meta:
        refuse("of the router with a bitmap_u8 map", WITHOUT_VALUES)
    return new([*tokens, -(-experts // 8)])


def _best(scores: Tensor, topk: int, groups: int | None, group_topk: int | None) -> Tensor:
    """Which experts each token takes; of the best ``group_topk`` groups where there are any."""
    if group_topk:
        grouped = scores.unflatten(-1, (groups or 1, -1))
        worth = grouped.topk(topk // group_topk, -1).values.sum(-1)
        taken = torch.zeros_like(worth, dtype=torch.bool)
        taken.scatter_(-1, worth.topk(group_topk, -1).indices, True)
        scores = grouped.masked_fill(~taken.unsqueeze(-1), float("-inf")).flatten(-2)
    best = torch.zeros_like(scores, dtype=torch.bool)
    return best.scatter_(-1, scores.topk(topk, -1).indices, True)


def _routed(x: Tensor, topk: int, pre: bool, function: str, best: Choice) -> tuple[Tensor, Tensor]:
    """(probabilities, which experts) of logits in fp32, differentiable in the first."""
    if function == "softmax":
        scores = x.softmax(-1) if pre else x
        chosen = best(scores.detach())
        if pre:
            return scores * chosen, chosen
        return x.masked_fill(~chosen, float("-inf")).softmax(-1), chosen
    scores = x.sigmoid() if function == "sigmoid" else functional.softplus(x).sqrt()
    chosen = best(scores.detach())
    out = scores * chosen
    return (out / (out.sum(-1, keepdim=True) + _TINY) if topk > 1 else out), chosen


def _scores(x: Tensor, topk: int, function: str) -> Tensor:
    """Of all experts, for the losses that balance them."""
    everyone = torch.ones_like(x, dtype=torch.bool)
    return _routed(x, topk, True, function, lambda scores: everyone)[0]


@kernel()
def fused_topk_with_score_function_fwd(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
    routing_map_format: Values = None,
    topk_indices: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """router.cpp:65 @v2.18; tier cpu keeps the logits, of which backward makes all else again"""
    probs = new(logits.shape, logits.dtype)
    chosen = _map(logits, routing_map_format) if topk_indices is None else topk_indices
    out = probs, chosen, new(logits.shape, _between(logits))
    fused("router_topk", 0, logits, *out)
    if logits.is_meta:
        return out

    def best(scores: Tensor) -> Tensor:
        biased = scores if expert_bias is None else scores + expert_bias.float()
        return _best(biased, topk, num_groups, group_topk)

    values, taken = _routed(logits.float(), topk, use_pre_softmax, score_function, best)
    fill(probs, lambda: values * (scaling_factor or 1.0))
    return probs, fill(chosen, lambda: taken), fill(out[2], lambda: logits)


@kernel()
def fused_score_for_moe_aux_loss_fwd(
    logits: Tensor, topk: int, score_function: str, routing_map_format: Values = None
) -> tuple[Tensor, ...]:
    """router.cpp:221 @v2.18; tier cpu keeps the logits"""
    kind = _between(logits)
    out = new(logits.shape, kind), _map(logits, routing_map_format), new(logits.shape, kind)
    fused("router_scores", 0, logits, *out)
    fill(out[0], lambda: _scores(logits.float(), topk, score_function))
    fill(out[1], lambda: _best(out[0], topk, None, None))
    fill(out[2], lambda: logits)
    return out


def _backward(name: str, tensors: list[Tensor], value: Callable[[], Tensor]) -> Tensor | None:
    """Into a tensor that Python makes; until 2.12 C++ makes it."""
    if since(2, 13):
        fused(name, 0, *tensors)
        fill(tensors[-1], value)
        return None
    out = new(tensors[-1].shape, tensors[-1].dtype)
    fused(name, 0, *tensors, out)
    return fill(out, value)


@kernel()
def fused_topk_with_score_function_bwd(*args: Values) -> Tensor | None:
    """router.cpp:157 @v2.18"""
    chosen, logits, grad, *_ = tensors = tensors_in(args)
    last = next(i for i, a in enumerate(args) if a is tensors[-1])
    topk, pre, scale, function, *_ = args[last + 1 :]

    def probs(x: Tensor) -> Tensor:
        return _routed(x, topk, pre, function, lambda scores: chosen)[0] * (scale or 1.0)

    return _backward("router_topk_backward", tensors, lambda: gradient(probs, logits, grad))


@kernel()
def fused_score_for_moe_aux_loss_bwd(
    num_tokens: int = 0,
    num_experts: int = 0,
    *,
    intermediate_output: Tensor,
    grad_scores: Tensor,
    topk: int,
    score_function: str,
    grad_logits: Tensor | None = None,
) -> Tensor | None:
    """router.cpp:269 @v2.18"""
    tensors = tensors_in((intermediate_output, grad_scores, grad_logits))
    return _backward(
        "router_scores_backward",
        tensors,
        lambda: gradient(
            lambda x: _scores(x, topk, score_function), intermediate_output, grad_scores
        ),
    )


@kernel("fused_moe_aux_loss_fwd", "fused_moe_aux_loss_fwd_graph_safe")
def aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: Values,
    num_experts: int,
    num_rows: int,
    num_cols: int,
    topk: int,
    coeff: float,
) -> tuple[Tensor, Tensor]:
    """router.cpp:299, :324 @v2.18: the loss, and what backward needs: two numbers since 2.16"""
    fused("router_aux_loss", 0, probs, tokens_per_expert)
    loss, kept = new((), probs.dtype), new(2 if since(2, 16) else (), torch.float32)
    if not probs.is_meta:
        kept.fill_(num_experts * coeff / (topk * float(total_num_tokens) ** 2))
        fill(loss, lambda: (probs.float().sum(0) * tokens_per_expert).sum() * kept.view(-1)[0])
    return loss, kept


@kernel()
def fused_moe_aux_loss_bwd(
    Const_buf: Tensor,
    tokens_per_expert: Tensor,
    num_rows: int,
    num_cols: int,
    grad_aux_loss: Tensor,
) -> Tensor:
    """router.cpp:355 @v2.18"""
    out = new((num_rows, num_cols), grad_aux_loss.dtype)
    fused("router_aux_loss_backward", 0, tokens_per_expert, out)
    return fill(
        out,
        lambda: (tokens_per_expert * Const_buf.view(-1)[0] * grad_aux_loss.float()).expand(
            num_rows, num_cols
        ),
    )
