"""The products of Linear, and of LayerNormLinear, in FP8: shapes only.

Both operands are cast; the input is kept for backward by columns, or by rows where it must be
gathered again and rows are all that can travel (pytorch/module/linear.py:470-640 @v2.20.2,
layernorm_linear.py:250-560 @v2.20.2).  Temporaries live as long as TE's: the un-gathered
gradient in high precision and the un-scattered product until the end, the input's values by
columns from behind the first product on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from megatron_prism.runtime.devices.kernels import fused
from megatron_prism.runtime.te.base import (
    cast_if_needed,
    clear,
    get_workspace,
    keep,
    kept,
    now_or_later,
    quantized_weight,
)
from megatron_prism.runtime.te.distributed import allreduce, reduce_scatter_along_first_dim
from megatron_prism.runtime.te.fp8 import FP8GlobalStateManager, Quantized, Quantizer
from megatron_prism.runtime.te.parameters_fp8 import gather_quantized
from megatron_prism.runtime.te.row_kernels import norm_backward, norm_forward

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import AutogradContext, Grads, Handle, Weight
    from megatron_prism.runtime.te.fp8 import Quantized

Input = torch.Tensor | Quantized


def check_dims(x: torch.Tensor, weight: torch.Tensor, kind: str) -> None:
    """assert_dim_for_fp8_exec (pytorch/utils.py:704 @v2.20.2), and what MXFP8 casts
    (csrc/quantizer.cpp, MXFP8Quantizer::create_tensor)."""
    for tensor in (x, weight):
        rows, width = math.prod(tensor.shape[:-1]), tensor.shape[-1]
        if rows % 8 or width % 16:
            raise ValueError(
                "FP8 execution requires the product of all dimensions except the last to be "
                f"divisible by 8 and the last dimension to be divisible by 16, but got tensor "
                f"with dims={list(tensor.shape)}"
            )
        if kind == "mxfp8" and (rows % 32 or width % 32):
            raise RuntimeError(
                "MXFP8 requires tensor dims that are divisible by 32 "
                f"(got shape={tuple(tensor.shape)})"
            )


def check_inner(length: int) -> None:
    """An operand's rows begin at multiples of 16 bytes, and both lie along the contracted
    dimension (common/gemm/cublaslt_gemm.cu, CanonicalizeGemmInput)."""
    if length % 16:
        raise RuntimeError(
            "Leading dimension requirement on A for FP8 GEMM. Caller must pad. (FP8 in backward "
            f"contracts over output features and over tokens, here {length}: not divisible by 16)"
        )


def product(
    left: torch.Tensor | None,
    right: torch.Tensor | None,
    flops: int,
    shape: tuple[int, ...],
    opts: SimpleNamespace,
    *scales: torch.Tensor | None,
) -> torch.Tensor:
    """One FP8 product with a result in high precision.

    scales : of gathered MXFP8 operands: reordered for each product, where those of others are
             when they are cast (optimize_for_gemm, module/linear.py:2592 @v2.20.2)
    """
    assert left is not None, "an FP8 operand was dropped too early"
    assert right is not None, "an FP8 operand was dropped too early"
    reordered = _reordered(scales)
    out = left.new_empty(shape, dtype=opts.dtype)
    fused("gemm", flops, left, right, out)
    del reordered
    return out


def _reordered(scales: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [torch.empty_like(s) for s in scales if s is not None and s.element_size() == 1]


def forward(
    x: Input, weight: Weight, opts: SimpleNamespace
) -> tuple[torch.Tensor, Input | None, Quantized, bool]:
    """(output rows, the input to keep, the weight in FP8, whether that stays).

    x : rows; the norm's output in FP8 for LayerNormLinear
    """
    get_workspace(weight)
    local, total = _forward_input(x, opts)
    q = opts.fp8.weights[0]
    q.set_usage(True, opts.weight_columns)
    cast, stays = quantized_weight(opts.module, weight, q, opts.first, "weight")
    rows, width = total.shape
    features = weight.shape[0]
    out = product(
        total.rows, cast.rows, 2 * rows * width * features, (rows, features), opts,
        total.row_scales if opts.gathers else None,
    )  # fmt: skip
    if opts.gathers:
        total.clear()
    del total
    if opts.mode == "row" and opts.size > 1:
        communicate = reduce_scatter_along_first_dim if opts.sp else allreduce
        out, _ = communicate(out, opts.group)
    if not opts.keeps_input:
        return out, None, cast, stays
    if opts.original is not None:
        return out, opts.original, cast, stays
    if opts.gathers and opts.fp8.inputs[0].only_rows_gather:
        local.update_usage(rows=True, columns=False)
    else:
        local.update_usage(rows=False, columns=True)
    return out, local, cast, stays


def _forward_input(x: Input, opts: SimpleNamespace) -> tuple[Quantized, Quantized]:
    """(this rank's input in FP8, the gathered one)."""
    q: Quantizer = opts.fp8.inputs[0]
    q.group = opts.group if opts.gathers else None
    if isinstance(x, torch.Tensor):
        columns = opts.keeps_input and opts.original is None
        q.set_usage(True, columns and not (opts.gathers and q.only_rows_gather))
        x = q(x)
    if not opts.gathers:
        return x, x
    q.set_usage(True, False)
    total, _ = gather_quantized(x, opts.group, q)
    return x, total


def backward(
    wide: torch.Tensor,
    x: Input,
    weight: Weight,
    cast: Quantized,
    opts: SimpleNamespace,
    needs: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, object]:
    """(dx rows, dweight, dbias, what TE holds on to until it returns).

    wide : gradient of the output; x, cast : what ``forward`` kept; needs : (dx, dweight, dbias)
    """
    wide = wide.reshape(-1, wide.shape[-1]).contiguous()
    grad, dbias = _grad_output(wide, opts, needs)
    total, arriving = _backward_input(x, opts) if needs[1] else (None, None)
    dx = whole = leaving = None
    if needs[0]:
        cast.update_usage(columns=True)
        rows, width = grad.shape
        check_inner(width)
        features = weight.shape[1]
        whole = dx = product(
            grad.rows, cast.columns, 2 * rows * width * features, (rows, features), opts,
            grad.row_scales if opts.mode == "row" and opts.sp else None,
        )  # fmt: skip
        if opts.mode == "column" and opts.size > 1:
            communicate = reduce_scatter_along_first_dim if opts.sp else allreduce
            dx, leaving = communicate(whole, opts.group, async_op=True)
    dweight = None
    if total is not None:
        if arriving is not None:
            arriving.wait()
        arriving = None
        dweight = _weight_gradient(weight, total, grad, opts)
        if opts.delayed is None:
            if opts.original is None or opts.gathers:
                total.clear()
            if opts.sp and opts.mode in ("row", "column"):
                grad.clear()
    if leaving is not None:
        leaving.wait()
    return dx, dweight, dbias, (wide, whole, total, grad)


def _grad_output(
    wide: torch.Tensor, opts: SimpleNamespace, needs: Sequence[bool]
) -> tuple[Quantized, torch.Tensor | None]:
    """(the output's gradient in FP8, gathered if it is sharded; the bias's) (base.py:1688)."""
    q: Quantizer = opts.fp8.grads[0]
    sharded = opts.mode == "row" and opts.sp
    q.set_usage(True, needs[1] or needs[2])
    q.group = opts.group if sharded else None
    dbias = wide.new_empty(wide.shape[1]) if needs[2] else None
    if not sharded:
        return q(wide), dbias
    return gather_quantized(wide, opts.group, q)[0], dbias


def _backward_input(x: Input, opts: SimpleNamespace) -> tuple[Quantized, Handle | None]:
    """(the input in FP8, gathered if it is sharded; handle or None) (linear.py:1307 @v2.20.2)."""
    q: Quantizer = opts.fp8.inputs[0]
    q.group = opts.group if opts.gathers else None
    if isinstance(x, torch.Tensor):  # save_original_input
        q.set_usage(q.only_rows_gather, not (q.only_rows_gather and opts.gathers))
        x = q(x)
    if not opts.gathers:
        return x, None
    q.set_usage(q.only_rows_gather, not q.only_rows_gather)
    return gather_quantized(x, opts.group, q, async_op=True)


def _weight_gradient(
    weight: Weight, total: Quantized, grad: Quantized, opts: SimpleNamespace
) -> torch.Tensor | None:
    """Added to ``main_grad``, returned, or left for ``backward_dw``."""
    total.update_usage(columns=True)
    grad.update_usage(columns=True)
    rows, width = grad.shape
    check_inner(rows)
    flops = 2 * rows * width * weight.shape[1]

    def compute() -> torch.Tensor | None:
        dy, x = grad.columns, total.columns
        scales = (
            grad.column_scales if opts.mode == "row" and opts.sp else None,
            total.column_scales if opts.gathers else None,
        )
        if not opts.fuse_wgrad:
            return product(dy, x, flops, tuple(weight.shape), opts, *scales)
        reordered = _reordered(scales)
        fused("gemm", flops, dy, x, weight.main_grad)
        del reordered
        return None

    (found,) = now_or_later([weight], opts, lambda: [compute()])
    return found


def update(opts: SimpleNamespace) -> None:
    """The first layer's backward is the last: amaxes of all gradients are there."""
    if opts.first_module:
        FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)


def remember(
    ctx: AutogradContext,
    opts: SimpleNamespace,
    inp: torch.Tensor,
    cast: tuple[Quantized, bool],
    weight: Weight,
    x: Input | None,
    *rest: Input | None,
) -> None:
    """Keep for backward what ``forward`` gave: ``x``, the weight in FP8 (and whether that stays
    anyway), ``weight`` and ``rest``, in TE's order."""
    held, stays = cast
    if opts.keeps:
        keep(ctx, x, None if stays else held, weight, *rest)
    ctx.cast = held if stays else None
    ctx.opts, ctx.shape, opts.weight = opts, inp.shape, weight


def recall(ctx: AutogradContext) -> tuple[Any, ...]:
    """(x, the weight in FP8, *rest) of ``remember``."""
    x, cast, _, *rest = kept(ctx)
    cast, ctx.cast = cast or ctx.cast, None
    return x, cast, *rest


class LinearFP8(torch.autograd.Function):
    """_Linear (pytorch/module/linear.py:1811 @v2.20.2)."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        weight: Weight,
        inp: torch.Tensor,
        bias: torch.Tensor | None,
        opts: SimpleNamespace,
    ) -> torch.Tensor:
        x = cast_if_needed(inp.contiguous().view(-1, inp.shape[-1]), opts.dtype)
        check_dims(x, weight, opts.fp8.weights[0].kind)
        if opts.original is not None:
            opts.original = x
        out, local, cast, stays = forward(x, weight, opts)
        del x
        opts.original = None if opts.original is None else True
        remember(ctx, opts, inp, (cast, stays), weight, local, bias)
        return out.view(-1, *inp.shape[1:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: AutogradContext, grad: torch.Tensor) -> Grads:
        opts, wants = ctx.opts, ctx.needs_input_grad
        x, cast, _ = recall(ctx)
        needs = (wants[1], wants[0], wants[2])
        dx, dweight, dbias, held = backward(grad, x, opts.weight, cast, opts, needs)
        update(opts)
        del held
        return dweight, None if dx is None else dx.view(ctx.shape), dbias, None


def norm_to_fp8(
    x: torch.Tensor, opts: SimpleNamespace, gamma: torch.Tensor, beta: torch.Tensor | None
) -> tuple[Quantized, torch.Tensor | None, torch.Tensor]:
    """(norm's output in FP8, mean or None, reciprocal deviation).

    One kernel with delayed scaling, else the norm in high precision and a cast
    (csrc/extensions/normalization.cpp @v2.19).
    """
    q = opts.fp8.inputs[0]
    q.set_usage(True, opts.keeps_input and not (opts.gathers and q.only_rows_gather))
    q.group = opts.group if opts.gathers else None
    out = q.make_empty(tuple(x.shape), x)
    if q.kind == "delayed":
        _, mean, rstd = norm_forward(x, gamma, beta, opts.norm, out=out.rows)
        return out, mean, rstd
    wide, mean, rstd = norm_forward(x, gamma, beta, opts.norm)
    return q.fill(wide, out), mean, rstd


class LayerNormLinearFP8(torch.autograd.Function):
    """_LayerNormLinear (pytorch/module/layernorm_linear.py @v2.20.2)."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        inp: torch.Tensor,
        gamma: torch.Tensor,
        beta: torch.Tensor | None,
        weight: Weight,
        bias: torch.Tensor | None,
        opts: SimpleNamespace,
    ) -> torch.Tensor:
        rows = inp.contiguous().view(-1, inp.shape[-1])
        check_dims(rows, weight, opts.fp8.weights[0].kind)
        normed, mean, rstd = norm_to_fp8(rows, opts, gamma, beta)
        out, kept, cast, stays = forward(normed, weight, opts)
        del normed
        rest = (bias, gamma, kept, mean, rstd)
        remember(ctx, opts, inp, (cast, stays), weight, rows, *rest)
        return out.view(-1, *inp.shape[1:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: AutogradContext, grad: torch.Tensor) -> Grads:
        opts, wants = ctx.opts, ctx.needs_input_grad
        x, cast, _, gamma, normed, mean, rstd = recall(ctx)
        needs = (any(wants[:3]), wants[3], wants[4])
        dnormed, dweight, dbias, held = backward(grad, normed, opts.weight, cast, opts, needs)
        if needs[1] and opts.delayed is None:
            normed.clear()
        dx, dgamma, dbeta = norm_backward(dnormed, x, gamma, (mean, rstd), opts.norm)
        clear(mean, rstd)
        update(opts)
        del held
        return dx.view(ctx.shape), dgamma, dbeta, dweight, dbias, None
