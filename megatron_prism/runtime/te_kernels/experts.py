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


def _kept_dtype(logits: Tensor) -> torch.dtype:
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
        # a group is worth the sum of its best experts, as many as a token takes of each group
        grouped = scores.unflatten(-1, (groups or 1, -1))
        best_of_group = grouped.topk(topk // group_topk, -1).values
        worth_of_group = best_of_group.sum(-1)
        best_groups = worth_of_group.topk(group_topk, -1).indices
        is_best_group = torch.zeros_like(worth_of_group, dtype=torch.bool)
        is_best_group.scatter_(-1, best_groups, True)
        in_other_group = ~is_best_group.unsqueeze(-1)
        scores = grouped.masked_fill(in_other_group, float("-inf")).flatten(-2)
    best_experts = scores.topk(topk, -1).indices
    is_best = torch.zeros_like(scores, dtype=torch.bool)
    return is_best.scatter_(-1, best_experts, True)


def _routed(x: Tensor, topk: int, pre: bool, function: str, best: Choice) -> tuple[Tensor, Tensor]:
    """(probabilities, which experts) of logits in fp32, differentiable in the first."""
    if function == "softmax" and not pre:  # over the experts that the token takes
        chosen = best(x.detach())
        return x.masked_fill(~chosen, float("-inf")).softmax(-1), chosen
    if function == "softmax":
        scores = x.softmax(-1)
    elif function == "sigmoid":
        scores = x.sigmoid()
    else:
        scores = functional.softplus(x).sqrt()
    chosen = best(scores.detach())
    probabilities = scores * chosen
    # scores of softmax add up to 1 over all experts, and stay so; other scores are divided by the
    # sum of those that the token takes
    if function != "softmax" and topk > 1:
        probabilities = probabilities / (probabilities.sum(-1, keepdim=True) + _TINY)
    return probabilities, chosen


def _scores(x: Tensor, topk: int, function: str) -> Tensor:
    """Of all experts, for the losses that balance them."""
    every_expert = torch.ones_like(x, dtype=torch.bool)
    probabilities, _ = _routed(x, topk, True, function, lambda scores: every_expert)
    return probabilities


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
    chosen = topk_indices
    # the caller may give a tensor of indices
    if chosen is None:
        chosen = _map(logits, routing_map_format)
    saved = new(logits.shape, _kept_dtype(logits))
    fused("router_topk", 0, logits, probs, chosen, saved)
    if logits.is_meta:
        return probs, chosen, saved

    def best(scores: Tensor) -> Tensor:
        biased = scores if expert_bias is None else scores + expert_bias.float()
        return _best(biased, topk, num_groups, group_topk)

    values, is_chosen = _routed(logits.float(), topk, use_pre_softmax, score_function, best)
    fill(probs, lambda: values * (scaling_factor or 1.0))
    fill(chosen, lambda: is_chosen)
    fill(saved, lambda: logits)
    return probs, chosen, saved


@kernel()
def fused_score_for_moe_aux_loss_fwd(
    logits: Tensor, topk: int, score_function: str, routing_map_format: Values = None
) -> tuple[Tensor, ...]:
    """router.cpp:221 @v2.18; tier cpu keeps the logits"""
    dtype = _kept_dtype(logits)
    scores = new(logits.shape, dtype)
    chosen = _map(logits, routing_map_format)
    saved = new(logits.shape, dtype)
    fused("router_scores", 0, logits, scores, chosen, saved)
    fill(scores, lambda: _scores(logits.float(), topk, score_function))
    fill(chosen, lambda: _best(scores, topk, None, None))
    fill(saved, lambda: logits)
    return scores, chosen, saved


def _backward(name: str, tensors: list[Tensor], value: Callable[[], Tensor]) -> Tensor | None:
    """Into a tensor that Python makes; until 2.12 C++ makes it."""
    if since(2, 13):
        fused(name, 0, *tensors)
        fill(tensors[-1], value)
        return None
    grad = tensors[-1]
    out = new(grad.shape, grad.dtype)
    fused(name, 0, *tensors, out)
    return fill(out, value)


@kernel()
def fused_topk_with_score_function_bwd(*args: Values) -> Tensor | None:
    """router.cpp:157 @v2.18"""
    tensors = tensors_in(args)
    chosen, logits, grad = tensors[:3]
    # the last tensor is followed by numbers, whose count differs between releases
    last_place = 0
    while args[last_place] is not tensors[-1]:
        last_place += 1
    topk, pre, scale, function, *_ = args[last_place + 1 :]

    def probs(x: Tensor) -> Tensor:
        probabilities, _ = _routed(x, topk, pre, function, lambda scores: chosen)
        return probabilities * (scale or 1.0)

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

    def scores(x: Tensor) -> Tensor:
        return _scores(x, topk, score_function)

    def value() -> Tensor:
        return gradient(scores, intermediate_output, grad_scores)

    return _backward("router_scores_backward", tensors, value)


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
    loss = new((), probs.dtype)
    saved = new(2 if since(2, 16) else (), torch.float32)
    # values: the loss is a sum over experts of their share of tokens and of probability
    if not probs.is_meta:
        factor = num_experts * coeff / (topk * float(total_num_tokens) ** 2)
        saved.fill_(factor)
        fill(loss, lambda: (probs.float().sum(0) * tokens_per_expert).sum() * saved.view(-1)[0])
    return loss, saved


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

    def value() -> Tensor:
        factor = Const_buf.view(-1)[0]
        row = tokens_per_expert * factor * grad_aux_loss.float()
        return row.expand(num_rows, num_cols)

    return fill(out, value)
