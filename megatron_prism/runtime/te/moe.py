"""The fused router, permutation and padding of tokens.

Saved: the routing map and the scores in the logits' type, of the scores for the balancing loss only
those, of the loss one number and the counts (pytorch/router.py, pytorch/csrc/extensions/router.cpp
@v2.9).  The score function sqrtsoftplus is of later releases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from megatron_prism.runtime.devices.kernels import fused
from megatron_prism.runtime.devices.moe_dispatch import counts
from megatron_prism.runtime.te.fp8 import FP8GlobalStateManager
from megatron_prism.runtime.te.unsupported import absent_function, refuse

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import AutogradContext, Grads

moe_permute_and_pad_with_probs = absent_function("moe_permute_and_pad_with_probs")


def _row_map(routing: torch.Tensor) -> torch.Tensor:
    tokens, experts = routing.shape
    out = routing.new_empty(tokens, 2 * experts + 1, dtype=torch.int32)
    if not routing.is_meta:
        chosen = routing.bool()
        rows = chosen.t().reshape(-1).cumsum(0).view(experts, tokens).t() - 1
        out[:, :experts] = torch.where(chosen, rows, -1)
        out[:, experts:] = 0
    return out


def _where(row_map: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(row, token, expert) of every pair that is kept."""
    rows = row_map[:, : row_map.shape[1] // 2]
    token, expert = ((rows >= 0) & (rows < limit)).nonzero(as_tuple=True)
    return rows[token, expert].long(), token, expert


def _take(x: torch.Tensor, row_map: torch.Tensor, count: int) -> torch.Tensor:
    out = x.new_empty(count, x.shape[1])
    if not x.is_meta:
        row, token, _ = _where(row_map, count)
        out[row] = x[token]
    else:
        fused("permute", 0, out, out)
    return out


def _give_back(
    y: torch.Tensor, row_map: torch.Tensor, tokens: int, probs: torch.Tensor | None
) -> torch.Tensor:
    out = y.new_empty(tokens, y.shape[1])
    if not y.is_meta:
        row, token, expert = _where(row_map, y.shape[0])
        rows = y[row].float()
        if probs is not None:
            rows = rows * probs[token, expert].float()[:, None]
        out.copy_(torch.zeros(out.shape).index_add_(0, token, rows))
    else:
        fused("unpermute", 0, y, out)
    return out


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        x: torch.Tensor,
        routing: torch.Tensor,
        count: int,
        probs: torch.Tensor | None,
    ) -> Grads:
        if count is None or count < 0:
            if x.is_meta:
                refuse(
                    "permutation of an unknown number of rows on the meta tier",
                    "use the alltoall dispatcher, whose number of rows is known",
                )
            count = int(routing.sum())
        row_map = _row_map(routing)
        ctx.save_for_backward(row_map)
        ctx.tokens, ctx.experts = x.shape[0], routing.shape[1]
        taken = None
        if probs is not None:
            taken = probs.new_empty(count)
            if not x.is_meta:
                row, token, expert = _where(row_map, count)
                taken[row] = probs[token, expert]
        ctx.mark_non_differentiable(row_map)
        return _take(x, row_map, count), row_map, taken

    @staticmethod
    def backward(
        ctx: AutogradContext, grad: torch.Tensor, _: object, grad_probs: torch.Tensor | None
    ) -> Grads:
        (row_map,) = ctx.saved_tensors
        dprobs = None
        if ctx.needs_input_grad[3] and grad_probs is not None:
            dprobs = grad_probs.new_empty(ctx.tokens, ctx.experts)
            if not grad_probs.is_meta:
                row, token, expert = _where(row_map, grad.shape[0])
                dprobs.zero_()[token, expert] = grad_probs[row]
        return _give_back(grad, row_map, ctx.tokens, None), None, None, dprobs


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        y: torch.Tensor,
        row_map: torch.Tensor,
        probs: torch.Tensor | None,
        shape: Sequence[int] | None,
    ) -> torch.Tensor:
        ctx.with_probs, ctx.count = probs is not None, y.shape[0]
        ctx.save_for_backward(*((y, row_map, probs) if ctx.with_probs else (row_map,)))
        tokens = y.shape[0] if shape is None else shape[0]
        return _give_back(y, row_map, tokens, probs)

    @staticmethod
    def backward(ctx: AutogradContext, grad: torch.Tensor) -> Grads:
        if not ctx.with_probs:
            (row_map,) = ctx.saved_tensors
            return _take(grad, row_map, ctx.count), None, None, None
        y, row_map, probs = ctx.saved_tensors
        dy, dprobs = y.new_empty(y.shape), probs.new_empty(probs.shape)
        if not grad.is_meta:
            row, token, expert = _where(row_map, ctx.count)
            rows = grad[token].float()
            dy[row] = (rows * probs[token, expert].float()[:, None]).to(y.dtype)
            dprobs.zero_()[token, expert] = (rows * y[row].float()).sum(-1).to(probs.dtype)
        return dy, None, dprobs, None


class _SortChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        x: torch.Tensor,
        sizes: torch.Tensor,
        order: torch.Tensor,
        probs: torch.Tensor | None,
    ) -> Grads:
        row_map = x.new_empty(x.shape[0], dtype=torch.int32)  # old row of each new row
        if not x.is_meta:
            chunks = torch.arange(x.shape[0]).split([int(s) for s in sizes])
            row_map.copy_(torch.cat([chunks[int(i)] for i in order]))
        ctx.save_for_backward(row_map)
        if x.is_meta:
            fused("sort_chunks", 0, x, x)
            taken = None if probs is None else probs.new_empty(probs.shape)
            return x.new_empty(x.shape), taken
        rows = row_map.long()
        return x[rows], None if probs is None else probs[rows]

    @staticmethod
    def backward(
        ctx: AutogradContext, grad: torch.Tensor, grad_probs: torch.Tensor | None
    ) -> Grads:
        (row_map,) = ctx.saved_tensors
        dx = grad.new_empty(grad.shape)
        dprobs = None
        if ctx.needs_input_grad[3] and grad_probs is not None:
            dprobs = grad_probs.new_empty(grad_probs.shape)
        if not grad.is_meta:
            rows = row_map.long()
            dx[rows] = grad
            if dprobs is not None and grad_probs is not None:
                dprobs[rows] = grad_probs
        return dx, None, None, dprobs


def _only_mask(map_type: str) -> None:
    if map_type != "mask":
        refuse(f"permutation with map_type {map_type!r}", fix="map_type='mask', Megatron's own")


def moe_permute(
    inp: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int = -1,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows grouped by expert, row map)."""
    _only_mask(map_type)
    out, row_map, _ = _Permute.apply(inp, routing_map, num_out_tokens, None)
    return out, row_map


def moe_permute_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int = -1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows grouped by expert, their probabilities, row map)."""
    out, row_map, taken = _Permute.apply(inp, routing_map, num_out_tokens, probs)
    return out, taken, row_map


def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: Sequence[int] | None = None,
    map_type: str = "mask",
    probs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each token's rows, summed (weighted by ``merging_probs``)."""
    _only_mask(map_type)
    merging_probs = probs if merging_probs is None else merging_probs
    return _Unpermute.apply(inp, row_id_map, merging_probs, restore_shape)


def moe_sort_chunks_by_index(
    inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> torch.Tensor:
    """Chunks of ``split_sizes`` rows in the order ``sorted_index``."""
    return _SortChunks.apply(inp, split_sizes, sorted_index, None)[0]


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for rows and their probabilities."""
    return _SortChunks.apply(inp, split_sizes, sorted_index, probs)


class _Resize(torch.autograd.Function):
    """Rows copied to their places among other gaps, ``to`` of them in all."""

    @staticmethod
    def forward(
        ctx: AutogradContext, x: torch.Tensor, before: list[int], after: list[int]
    ) -> torch.Tensor:
        ctx.lengths = before, after
        return _copied(x, before, after)

    @staticmethod
    def backward(ctx: AutogradContext, grad: torch.Tensor) -> Grads:
        before, after = ctx.lengths
        return _copied(grad.contiguous(), after, before), None, None


def _copied(x: torch.Tensor, before: list[int], after: list[int]) -> torch.Tensor:
    out = x.new_zeros(sum(after), x.shape[-1]) if not x.is_meta else None
    if out is None:
        out = x.new_empty(sum(after), x.shape[-1])
        fused("fused_multi_row_padding", 0, x, out)
        return out
    pairs = zip(torch.split(out, after), torch.split(x, before), strict=True)
    for to, rows in pairs:
        length = min(len(to), len(rows))
        to[:length] = rows[:length]
    return out


def _padded(splits: list[int], align: int | None) -> list[int]:
    if align is None:  # (quantization.py:262 @v2.20.2)
        align = 32 if FP8GlobalStateManager.get_fp8_recipe().mxfp8() else 16
    padded = [-(-count // align) * align for count in splits]
    if padded == splits and counts["made_up"]:
        padded = [count + align * (i % 2 == 0) for i, count in enumerate(padded)]
    return padded


class _Padding(torch.nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size


class Fp8Padding(_Padding):
    """module/fp8_padding.py:74 @v2.20.2."""

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, list[int]]:
        """(padded rows, how many of each expert)."""
        padded = _padded(m_splits, self.align_size)
        if padded == m_splits:
            return inp, m_splits
        return _Resize.apply(inp.view(-1, inp.shape[-1]), m_splits, padded), padded


class Fp8Unpadding(_Padding):
    """module/fp8_unpadding.py:72 @v2.20.2."""

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> torch.Tensor:
        """The rows without their padding."""
        padded = _padded(m_splits, self.align_size)
        if padded == m_splits:
            return inp
        made: torch.Tensor = _Resize.apply(inp.view(-1, inp.shape[-1]), padded, m_splits)
        return made


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
        ctx: AutogradContext,
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
    def backward(ctx: AutogradContext, grad: torch.Tensor, _: object) -> Grads:
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
        ctx: AutogradContext, logits: torch.Tensor, topk: int, function: str
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
    def backward(ctx: AutogradContext, _: object, grad: torch.Tensor) -> Grads:
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
        ctx: AutogradContext,
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
    def backward(ctx: AutogradContext, grad: torch.Tensor) -> Grads:
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
