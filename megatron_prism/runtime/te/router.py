"""The fused router: scores and the best experts of every token, one kernel each way.

Saved: the routing map and the scores in the logits' type, of the scores for the balancing loss only
those, of the loss one number and the counts (pytorch/router.py, pytorch/csrc/extensions/router.cpp
@v2.9).  The score function sqrtsoftplus is of later releases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_prism.runtime.devices.work import fused
from megatron_prism.runtime.te.unsupported import refuse

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import Context, Grads

__all__ = [
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
]

_TINY = 1e-20  # beside a sum of scores (common/fused_router/utils.h @v2.9)


def _check(score_function: str) -> None:
    if score_function not in ("softmax", "sigmoid"):
        refuse(f"fused router with the score function {score_function}")


def _best(
    scores: torch.Tensor, topk: int, groups: int | None, group_topk: int | None
) -> torch.Tensor:
    """Which experts each token takes; within the best ``group_topk`` groups where there are any."""
    if group_topk:
        assert groups is not None, "group_topk without num_groups"
        grouped = scores.view(scores.shape[0], groups, -1)
        worth = grouped.topk(topk // group_topk, dim=-1).values.sum(-1)
        chosen = torch.zeros_like(worth, dtype=torch.bool)
        chosen.scatter_(1, worth.topk(group_topk, dim=-1).indices, True)
        scores = grouped.masked_fill(~chosen.unsqueeze(-1), float("-inf")).view_as(scores)
    best = torch.zeros_like(scores, dtype=torch.bool)
    return best.scatter_(1, scores.topk(topk, dim=1).indices, True)


def _softmax_backward(grad: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return out * (grad - (grad * out).sum(-1, keepdim=True))


def _sigmoid_backward(
    grad: torch.Tensor, out: torch.Tensor, kept: torch.Tensor, shared: bool
) -> torch.Tensor:
    """Of ``out``, divided by the sum of those ``kept`` if it is ``shared`` among them."""
    if shared:
        total = (out * kept).sum(-1, keepdim=True) + _TINY
        grad = (grad - (grad * out * kept).sum(-1, keepdim=True) / total) / total
    return grad * kept * out * (1 - out)


class _TopK(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        logits: torch.Tensor,
        bias: torch.Tensor | None,
        opts: tuple[int, bool, int | None, int | None, float, str],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        topk, pre_softmax, groups, group_topk, scale, function = opts
        probs, kept = torch.empty_like(logits), torch.empty_like(logits, dtype=torch.bool)
        between = torch.empty_like(logits)
        if not logits.is_meta:
            x = logits.float()
            if function == "sigmoid":
                scores = x.sigmoid()
                worth = scores if bias is None else scores + bias.float()
                kept.copy_(_best(worth, topk, groups, group_topk))
                out = scores * kept
                out = out / (out.sum(-1, keepdim=True) + _TINY) if topk > 1 else out
            elif pre_softmax:
                scores = x.softmax(-1)
                kept.copy_(_best(scores, topk, groups, group_topk))
                out = scores * kept
            else:
                kept.copy_(_best(x, topk, groups, group_topk))
                out = scores = x.masked_fill(~kept, float("-inf")).softmax(-1)
            probs.copy_(out * scale)
            between.copy_(scores)
        else:
            fused("router_topk", 0, logits, probs, kept, between)
        ctx.save_for_backward(kept, between)
        ctx.topk, ctx.scale, ctx.function = topk, scale, function
        ctx.mark_non_differentiable(kept)
        return probs, kept

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor, _: object) -> Grads:
        kept, between = ctx.saved_tensors
        grad_logits = torch.empty_like(between)
        if not grad.is_meta:
            d, scores = grad.float() * kept * ctx.scale, between.float()
            if ctx.function == "sigmoid":
                d = _sigmoid_backward(d, scores, kept, ctx.topk > 1)
            else:
                d = _softmax_backward(d, scores)
            grad_logits.copy_(d)
        else:
            fused("router_topk_backward", 0, grad, kept, between, grad_logits)
        return grad_logits, None, None


def fused_topk_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(probabilities, map of the experts) of every token."""
    _check(score_function)
    scale = 1.0 if scaling_factor is None else scaling_factor
    opts = (topk, use_pre_softmax, num_groups, group_topk, scale, score_function)
    shape = logits.shape
    probs, kept = _TopK.apply(logits.view(-1, shape[-1]), expert_bias, opts)
    return probs.view(shape), kept.view(shape)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, logits: torch.Tensor, topk: int, function: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores, kept = torch.empty_like(logits), torch.empty_like(logits, dtype=torch.bool)
        between = torch.empty_like(logits)
        if not logits.is_meta:
            x = logits.float()
            out = x.softmax(-1) if function == "softmax" else x.sigmoid()
            between.copy_(out)
            if function == "sigmoid" and topk > 1:
                out = out / (out.sum(-1, keepdim=True) + _TINY)
            kept.copy_(_best(out, topk, None, None))
            scores.copy_(out)
        else:
            fused("router_scores", 0, logits, scores, kept, between)
        ctx.save_for_backward(between)
        ctx.topk, ctx.function = topk, function
        ctx.mark_non_differentiable(kept)
        return kept, scores

    @staticmethod
    def backward(ctx: Context, _: object, grad: torch.Tensor) -> Grads:
        (between,) = ctx.saved_tensors
        grad_logits = torch.empty_like(between)
        if not grad.is_meta:
            d, out = grad.float(), between.float()
            if ctx.function == "softmax":
                d = _softmax_backward(d, out)
            else:
                d = _sigmoid_backward(d, out, torch.ones_like(out), ctx.topk > 1)
            grad_logits.copy_(d)
        else:
            fused("router_scores_backward", 0, grad, between, grad_logits)
        return grad_logits, None, None


def fused_compute_score_for_moe_aux_loss(
    logits: torch.Tensor, topk: int, score_function: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(map of the experts, scores) for the balancing loss."""
    _check(score_function)
    shape = logits.shape
    kept, scores = _Scores.apply(logits.view(-1, shape[-1]), topk, score_function)
    return kept.view(shape), scores.view(shape)


class _AuxLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        probs: torch.Tensor,
        counts: torch.Tensor,
        opts: tuple[int | torch.Tensor, int, int, float],
    ) -> torch.Tensor:
        total, experts, topk, coeff = opts
        factor, loss = probs.new_empty((), dtype=torch.float32), probs.new_empty(())
        if not probs.is_meta:
            factor.fill_(experts * coeff / (topk * float(total) ** 2))
            loss.copy_((probs.float().sum(0) * counts).sum() * factor)
        else:
            fused("router_aux_loss", 0, probs, counts)
        ctx.save_for_backward(factor, counts)
        ctx.shape = probs.shape
        return loss

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> Grads:
        factor, counts = ctx.saved_tensors
        grad_probs = grad.new_empty(ctx.shape)
        if not grad.is_meta:
            grad_probs.copy_((counts * factor * grad.float()).expand(ctx.shape))
        else:
            fused("router_aux_loss_backward", 0, counts, grad_probs)
        return grad_probs, None, None


def fused_moe_aux_loss(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int | torch.Tensor,
    num_experts: int,
    topk: int,
    coeff: float,
) -> torch.Tensor:
    """The balancing loss, one number."""
    return _AuxLoss.apply(probs, tokens_per_expert, (total_num_tokens, num_experts, topk, coeff))
