"""LayerNormLinear in FP8: the norm's output is cast, the rest is Linear's.

Shapes only (pytorch/module/layernorm_linear.py:250-560 @v2.20.2).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from megatron_prism.runtime.te import linear_fp8
from megatron_prism.runtime.te.base import clear
from megatron_prism.runtime.te.norm import norm_backward, norm_forward

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import Context, Grads, Weight
    from megatron_prism.runtime.te.quantized import Quantized

__all__ = ["LayerNormLinearFP8"]


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
        ctx: Context,
        inp: torch.Tensor,
        gamma: torch.Tensor,
        beta: torch.Tensor | None,
        weight: Weight,
        bias: torch.Tensor | None,
        opts: SimpleNamespace,
    ) -> torch.Tensor:
        rows = inp.reshape(-1, inp.shape[-1])
        linear_fp8.check_dims(rows, weight, opts.fp8.weights[0].kind)
        normed, mean, rstd = norm_to_fp8(rows, opts, gamma, beta)
        out, kept, cast, stays = linear_fp8.forward(normed, weight, opts)
        del normed
        rest = (bias, gamma, kept, mean, rstd)
        linear_fp8.remember(ctx, opts, inp, (cast, stays), weight, rows, *rest)
        return out.view(-1, *inp.shape[1:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> Grads:
        opts, wants = ctx.opts, ctx.needs_input_grad
        x, cast, _, gamma, normed, mean, rstd = linear_fp8.recall(ctx)
        needs = (any(wants[:3]), wants[3], wants[4])
        dnormed, dweight, dbias, held = linear_fp8.backward(
            grad, normed, opts.weight, cast, opts, needs
        )
        if needs[1] and opts.delayed is None:
            normed.clear()
        dx, dgamma, dbeta = norm_backward(dnormed, x, gamma, (mean, rstd), opts.norm)
        clear(mean, rstd)
        linear_fp8.update(opts)
        del held
        return dx.view(ctx.shape), dgamma, dbeta, dweight, dbias, None
