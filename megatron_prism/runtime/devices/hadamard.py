"""The Walsh-Hadamard transform of the last dimension, where its CUDA package is not installed.

As fast_hadamard_transform's: in float, zeros fill up to a power of two, one kernel each way, and
nothing is kept for backward but the factor.  That package's backward is its forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_prism.runtime.devices.work import fused

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import Context, Grads

__all__ = ["transform"]


class _Transform(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return _transformed(x, scale)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> Grads:
        return _transformed(grad, ctx.scale), None


def transform(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """``scale`` times ``x`` times the Hadamard matrix of its last dimension."""
    return _Transform.apply(x, scale)


def _transformed(x: torch.Tensor, scale: float) -> torch.Tensor:
    size, out = x.shape[-1], torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.is_meta:
        fused("hadamard", x.numel() * max(size - 1, 1).bit_length(), x, out)
        return out
    full = 1 << max(size - 1, 0).bit_length()
    rows = torch.nn.functional.pad(x.float(), (0, full - size)).reshape(-1, full)
    step = 1
    while step < full:
        pairs = rows.view(-1, full // (2 * step), 2, step)
        rows = torch.stack([pairs.sum(2), pairs[:, :, 0] - pairs[:, :, 1]], 2).view(-1, full)
        step *= 2
    return out.copy_((rows[:, :size] * scale).view_as(x))
