"""MoE permutation: one kernel each way.

Saved: only the row map, except that merging with probabilities needs its input too
(pytorch/permutation.py:295, 376-378, 678 @v2.9).  The map has TE's size, [tokens, 2·experts+1]
int32; its contents are ours: in column e the row that the token has in expert e's block, or -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from megatron_prism.runtime.devices.work import fused
from megatron_prism.runtime.te.unsupported import absent_function, refuse

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import Context, Grads

__all__ = [
    "moe_permute",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
]

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
        ctx: Context, x: torch.Tensor, routing: torch.Tensor, count: int, probs: torch.Tensor | None
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
        ctx: Context, grad: torch.Tensor, _: object, grad_probs: torch.Tensor | None
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
        ctx: Context,
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
    def backward(ctx: Context, grad: torch.Tensor) -> Grads:
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
        ctx: Context,
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
    def backward(ctx: Context, grad: torch.Tensor, grad_probs: torch.Tensor | None) -> Grads:
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
