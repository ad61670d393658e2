"""LayerNorm and RMSNorm as one kernel each.

Saved: input, mean and reciprocal deviation in fp32 (pytorch/ops/basic/layer_norm.py:221 @v2.9),
input and reciprocal deviation (ops/basic/rmsnorm.py:202 @v2.9); the weight lives in the module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from megatron_prism.runtime.devices.kernels import fused
from megatron_prism.runtime.te.base import TransformerEngineBaseModule, cast_if_needed

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import AutogradContext, Device, Grads, Weight

__all__ = ["LayerNorm", "Norm", "RMSNorm", "norm_backward", "norm_forward"]

# Kernels of backward in bf16 (ln_bwd_semi_cuda_kernel.cu, rmsnorm_bwd_semi_cuda_kernel.cu @v2.20):
# width -> (blocks that fit on a processor of an H100, blocks of a row).  How many fit follows from
# registers and was measured (h100_layer_memory.json); 768 and 2,304 to 65,536 as their neighbours.
_PROCESSORS = 132
_TUNED: dict[bool, dict[int, tuple[int, int]]] = {  # is it RMSNorm
    False: {768: (3, 1), 1024: (2, 1), 1536: (5, 1), 2048: (4, 1), 2304: (4, 1), 3072: (3, 1),
            3840: (2, 1), 4096: (2, 1), 5120: (2, 1), 6144: (1, 1), 8192: (2, 2), 10240: (2, 2),
            12288: (3, 4), 12800: (3, 5), 15360: (2, 4), 16384: (2, 4), 18432: (2, 4),
            20480: (2, 4), 24576: (1, 4), 25600: (2, 5), 30720: (1, 4), 32768: (1, 4),
            40960: (1, 4), 49152: (1, 8), 65536: (1, 8)},
    True: {512: (6, 1), 768: (4, 1), 1024: (3, 1), 2048: (5, 1), 4096: (3, 1), 8192: (2, 1)},
}  # fmt: skip
_GENERAL = {  # of up to so many columns -> blocks on a processor, rows at once
    False: {128: (10, 4), 512: (4, 4), 1024: (2, 4), 2048: (4, 1), 4096: (2, 1)},
    True: {128: (12, 4), 512: (6, 4), 1024: (3, 4), 2048: (5, 1), 4096: (3, 1)},
}

Statistics = tuple[torch.Tensor | None, torch.Tensor]


class Norm:
    """Which norm: kind, epsilon, and whether gamma is stored minus one."""

    def __init__(self, kind: str, eps: float, zero_centered: bool) -> None:
        self.rms, self.eps, self.zero_centered = kind == "RMSNorm", eps, zero_centered


def norm_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: Norm,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(output, mean or None, reciprocal deviation) of rows ``x``; on ``meta`` into ``out``."""
    rows = x.shape[0]
    if x.is_meta:
        out = x.new_empty(x.shape) if out is None else out
        fused("norm", 0, x, out)
        mean = None if norm.rms else x.new_empty(rows, dtype=torch.float32)
        return out, mean, x.new_empty(rows, dtype=torch.float32)
    wide = x.float()
    mean = None if norm.rms else wide.mean(-1)
    centered = wide if mean is None else wide - mean[:, None]
    rstd = torch.rsqrt(centered.square().mean(-1) + norm.eps)
    out = centered * rstd[:, None] * (weight.float() + norm.zero_centered)
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype), mean, rstd


def norm_backward(
    grad: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    stats: Statistics,
    norm: Norm,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(dx, dgamma, dbeta or None)."""
    mean, rstd = stats
    if x.is_meta:
        dbeta = None if norm.rms else weight.new_empty(weight.shape)
        fused("norm_backward", 0, grad, x, x)
        found = x.new_empty(x.shape), weight.new_empty(weight.shape), dbeta
        sums = (1 if norm.rms else 2) * _blocks(norm.rms, *x.shape) * x.shape[1]
        x.new_empty(sums, dtype=torch.float32)
        return found
    assert grad is not None, "shapes alone do without the output's gradient"
    wide, dy = x.float(), grad.float()
    xhat = (wide if mean is None else wide - mean[:, None]) * rstd[:, None]
    scaled = dy * (weight.float() + norm.zero_centered)
    dx = scaled - xhat * (scaled * xhat).mean(-1, keepdim=True)
    if not norm.rms:
        dx = dx - scaled.mean(-1, keepdim=True)
    dbeta = None if norm.rms else dy.sum(0).to(weight.dtype)
    return (dx * rstd[:, None]).to(x.dtype), (dy * xhat).sum(0).to(weight.dtype), dbeta


def _blocks(rms: bool, rows: int, width: int) -> int:
    """Blocks that add up the weights' gradients, each for itself in fp32."""
    if width in _TUNED[rms]:
        fit, of_a_row = _TUNED[rms][width]
        return _PROCESSORS * fit // of_a_row
    kernels = _GENERAL[rms]
    columns = min((size for size in kernels if size >= width), default=max(kernels))
    fit, at_once = kernels[columns]
    return min(-(-rows // at_once), _PROCESSORS * fit // -(-width // columns))


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, norm: Norm
    ) -> torch.Tensor:
        rows = x.contiguous().view(-1, weight.numel())
        out, mean, rstd = norm_forward(
            rows, weight.reshape(-1), None if bias is None else bias.reshape(-1), norm
        )
        ctx.save_for_backward(rows, *([] if mean is None else [mean]), rstd)
        ctx.weight, ctx.norm, ctx.shape = weight, norm, x.shape
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: AutogradContext, grad: torch.Tensor) -> Grads:
        rows, *mean, rstd = ctx.saved_tensors
        weight = ctx.weight
        stats = (mean[0] if mean else None, rstd)
        dx, dgamma, dbeta = norm_backward(
            grad.reshape(rows.shape).contiguous(), rows, weight.reshape(-1), stats, ctx.norm
        )
        dbeta = None if dbeta is None else dbeta.view(weight.shape)
        return dx.view(ctx.shape), dgamma.view(weight.shape), dbeta, None


class _NormModule(TransformerEngineBaseModule):
    kind = ""
    weight: Weight

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: Device = "cuda",
        dtype: torch.dtype | None = None,
        **ignored: object,
    ) -> None:
        super().__init__()
        shape = normalized_shape if normalized_shape is not None else hidden_size
        assert shape is not None, "a norm of no dimensions"
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.norm = Norm(self.kind, eps, zero_centered_gamma)
        self.sequence_parallel = bool(sequence_parallel)
        dtype = dtype or params_dtype
        gamma = torch.nn.init.zeros_ if zero_centered_gamma else torch.nn.init.ones_
        self.add_parameter("weight", shape, dtype, device, gamma)
        if self.kind == "LayerNorm":
            self.add_parameter("bias", shape, dtype, device, torch.nn.init.zeros_)
        self.reset_parameters(defer_init=device == "meta")
        if sequence_parallel is not None:
            for param in self.parameters():
                setattr(param, "sequence_parallel", sequence_parallel)  # noqa: B010

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimensions."""
        if math.prod(self.weight.shape) == 0:
            return x
        x = cast_if_needed(x, torch.get_autocast_dtype("cuda")) if _autocasting() else x
        return _Normalize.apply(x, self.weight, getattr(self, "bias", None), self.norm)


def _autocasting() -> bool:
    return torch.is_autocast_enabled("cuda")


class LayerNorm(_NormModule):
    """pytorch/module/layernorm.py @v2.9."""

    kind = "LayerNorm"


class RMSNorm(_NormModule):
    """pytorch/module/rmsnorm.py @v2.9."""

    kind = "RMSNorm"
