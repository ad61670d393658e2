"""The products of GroupedLinear in FP8, one per local expert: shapes only.

Rows of each expert are cast by themselves, kept for backward by columns
(pytorch/module/grouped_linear.py:622, :1271 @v2.20.2, the path without GroupedTensor, which
Hopper takes with cuBLAS before 13.5).  TE allocates all experts' values in one piece where scales
are by block (csrc/extensions/cast.cpp, split_quantize @v2.19): the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from megatron_prism.runtime.devices.work import fused
from megatron_prism.runtime.te.base import get_workspace, now_or_later
from megatron_prism.runtime.te.layer_fp8 import keep, kept, quantized_weight
from megatron_prism.runtime.te.linear_fp8 import check_dims, update
from megatron_prism.runtime.te.quantized import Quantized, Quantizer

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import Context, Grads, Weight

__all__ = ["GroupedLinearFP8"]


def _split(x: torch.Tensor, splits: list[int], quantizers: list[Quantizer]) -> list[Quantized]:
    """Rows in FP8 by expert; in one piece where the counts are not known."""
    lengths = splits if sum(splits) == x.shape[0] else [x.shape[0]]
    return [q(rows) for q, rows in zip(quantizers, torch.split(x, lengths), strict=False)]


def _multiply(
    left: Sequence[torch.Tensor | None],
    right: Sequence[torch.Tensor | None],
    flops: int,
    out: torch.Tensor,
) -> None:
    fused("grouped_gemm", flops, *left, *right, out)


class GroupedLinearFP8(torch.autograd.Function):
    """_GroupedLinear (pytorch/module/grouped_linear.py:155 @v2.20.2)."""

    @staticmethod
    def forward(
        ctx: Context, inp: torch.Tensor, splits: list[int], opts: SimpleNamespace, *params: Weight
    ) -> torch.Tensor:
        x = inp.reshape(-1, inp.shape[-1])
        weights, biases = params[: opts.count], params[opts.count :]
        get_workspace(x, grouped=True)
        check_dims(x[:0], weights[0], opts.fp8.weights[0].kind)
        for q in opts.fp8.inputs:
            q.set_usage(True, opts.keeps_input and opts.original is None)
        parts = _split(x, splits, opts.fp8.inputs)
        casts = []
        for i, (q, weight) in enumerate(zip(opts.fp8.weights, weights, strict=True)):
            q.set_usage(True, opts.weight_columns)
            casts.append(quantized_weight(opts.module, weight, q, opts.first, f"weight{i}"))
        out = x.new_empty(x.shape[0], weights[0].shape[0])
        rows, held = [part.rows for part in parts], [cast.rows for cast, _ in casts]
        _multiply(rows, held, 2 * x.numel() * out.shape[1], out)
        for part in parts:
            if part.columns is not None:
                part.update_usage(rows=False, columns=True)
        inputs: Sequence[Quantized | torch.Tensor] = parts if opts.original is None else [inp]
        inputs = inputs if opts.keeps_input else []
        stay = [cast if stays else None for cast, stays in casts]
        if opts.keeps:
            keep(ctx, *inputs, *(None if stays else cast for cast, stays in casts), *biases)
        ctx.stay, ctx.num_parts, ctx.splits, ctx.opts = stay, len(inputs), splits, opts
        ctx.shape, ctx.weights, ctx.has_bias = inp.shape, weights, bool(biases)
        return out.view(*inp.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> Grads:
        opts, weights = ctx.opts, ctx.weights
        found = kept(ctx)
        inputs, casts = found[: ctx.num_parts], found[ctx.num_parts :][: opts.count]
        casts = [own or stays for own, stays in zip(casts, ctx.stay, strict=True)]
        ctx.stay = None
        del found
        wide = grad.reshape(-1, grad.shape[-1]).contiguous()
        dbiases = []
        if ctx.has_bias:
            dbiases = [weight.new_empty(weight.shape[0]) for weight in weights]
        grads = _split(wide, ctx.splits, opts.fp8.grads)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = wide.new_empty(wide.shape[0], weights[0].shape[1])
            for cast in casts:
                cast.update_usage(columns=True)
            rows, columns = [part.rows for part in grads], [cast.columns for cast in casts]
            _multiply(rows, columns, 2 * wide.numel() * dx.shape[1], dx)
            del rows, columns
            dx = dx.view(ctx.shape)
        dweights: list[torch.Tensor | None] = [None] * opts.count
        if ctx.needs_input_grad[3]:
            dweights = _weight_gradients(weights, inputs, grads, ctx.splits, opts)
        update(opts)
        return dx, None, None, *dweights, *dbiases


def _weight_gradients(
    weights: Sequence[Weight],
    inputs: Sequence[Quantized | torch.Tensor],
    grads: Sequence[Quantized],
    splits: list[int],
    opts: SimpleNamespace,
) -> list[torch.Tensor | None]:
    """Added to ``main_grad``, returned, or left for ``backward_dw``."""
    if opts.original is not None:
        for q in opts.fp8.inputs:
            q.set_usage(q.only_rows_gather, True)
        (whole,) = (one for one in inputs if isinstance(one, torch.Tensor))
        cast = _split(whole.reshape(-1, whole.shape[-1]), splits, opts.fp8.inputs)
    else:
        cast = [one for one in inputs if isinstance(one, Quantized)]
    flops = 2 * sum(part.shape[0] for part in grads) * weights[0].numel()

    def products() -> list[torch.Tensor | None]:
        mains = [weight.main_grad if opts.fuse_wgrad else None for weight in weights]
        out = mains if opts.fuse_wgrad else [torch.empty_like(weight) for weight in weights]
        left, right = [part.columns for part in grads], [part.columns for part in cast]
        fused("grouped_gemm", flops, *left, *right, *out)
        for part in cast:
            part.clear()
        return [None if opts.fuse_wgrad else made for made in out]

    return now_or_later(weights, opts, products, shared_dummy=False)
