"""Kernels that take every row by itself: LayerNorm, RMSNorm, the rotary embedding, the loss.

Saved by the norms: input, mean and reciprocal deviation in fp32 (pytorch/ops/basic/
layer_norm.py:221 @v2.9), input and reciprocal deviation (ops/basic/rmsnorm.py:202 @v2.9); the
weight lives in the module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from megatron_prism.runtime.devices.kernels import fused
from megatron_prism.runtime.te.base import TransformerEngineBaseModule, cast_if_needed
from megatron_prism.runtime.te.distributed import gather_along_first_dim, group_rank, group_size
from megatron_prism.runtime.te.unsupported import absent_function, refuse, since

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import (
        AutogradContext,
        Device,
        Grads,
        Group,
        Weight,
    )

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
        fused("norm_backward" if norm.rms else "layer_norm_backward", 0, grad, x, x)
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


# -- rotary embedding ------------------------------------------------------------------------------

apply_fused_qkv_rotary_pos_emb = absent_function("apply_fused_qkv_rotary_pos_emb")


def _on_this_rank(freqs: torch.Tensor, length: int, cp_size: int, cp_rank: int) -> torch.Tensor:
    """Rows of this context-parallel rank: chunks r and 2n-1-r (rope.py:347 @v2.9)."""
    if cp_size == 1:
        return freqs[:length]
    half = length // 2
    last = 2 * cp_size - 1 - cp_rank
    return torch.cat(
        [freqs[cp_rank * half : (cp_rank + 1) * half], freqs[last * half : (last + 1) * half]]
    )


def _rotate(t: torch.Tensor, freqs: torch.Tensor, interleaved: bool, back: bool) -> torch.Tensor:
    """``t`` [..., d] rotated by ``freqs``; ``back`` applies the transpose."""
    size = freqs.shape[-1]
    wide, rest = t[..., :size].float(), t[..., size:]
    cos, sin = freqs.cos(), freqs.sin()
    if back:
        wide_sin = wide * sin
        turned = -_half(wide_sin, interleaved)
    else:
        turned = _half(wide, interleaved) * sin
    return torch.cat([(wide * cos + turned).to(t.dtype), rest], dim=-1)


def _half(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


Options = tuple[str, bool, int, int]  # layout, interleaved, cp size and rank


def _apply(
    t: torch.Tensor, freqs: torch.Tensor, seqlens: torch.Tensor, opts: Options, back: bool
) -> torch.Tensor:
    if t.is_meta:
        fused("rope", 0, t, t)
        return t.new_empty(t.shape)
    form, interleaved, cp_size, cp_rank = opts
    if form == "thd":
        parts = torch.split(t, ((seqlens[1:] - seqlens[:-1]) // cp_size).tolist())
        turned = [
            _rotate(p, _on_this_rank(freqs, p.shape[0], cp_size, cp_rank)[:, 0], interleaved, back)
            for p in parts
        ]
        return torch.cat(turned)
    if form == "bshd":
        freqs = _on_this_rank(freqs, t.shape[1], cp_size, cp_rank).transpose(0, 1)
    else:
        freqs = _on_this_rank(freqs, t.shape[0], cp_size, cp_rank)
    return _rotate(t, freqs, interleaved, back)


class _RoPE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        t: torch.Tensor,
        freqs: torch.Tensor,
        seqlens: torch.Tensor,
        opts: Options,
    ) -> torch.Tensor:
        freqs = freqs.float()
        ctx.save_for_backward(freqs, seqlens)
        ctx.opts = opts
        return _apply(t, freqs, seqlens, opts, back=False)

    @staticmethod
    def backward(ctx: AutogradContext, grad: torch.Tensor) -> Grads:
        freqs, seqlens = ctx.saved_tensors
        return _apply(grad, freqs, seqlens, ctx.opts, back=True), None, None, None


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: object = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """``t`` with rotary embedding ``freqs`` [s, 1, 1, d] applied; Megatron only asks for fused."""
    if start_positions is not None:
        refuse("rotary embedding with start_positions")
    return _RoPE.apply(t, freqs, cu_seqlens, (tensor_format, interleaved, cp_size, cp_rank))


# -- cross entropy ---------------------------------------------------------------------------------

# The loss and its gradient in one pass.  Saved: the logits' storage, which holds the gradient after
# forward (pytorch/cross_entropy.py:74 @v2.9); from v2.18 on the gradient in fp32 beside them; from
# v2.20 on a copy of them and two fp32 numbers a row.  Three fp32 numbers a row travel between
# tensor-parallel ranks, from v2.20 on four (pytorch/triton/cross_entropy.py @v2.9, v2.18, v2.20).


def _forward_values(
    x: torch.Tensor, target: torch.Tensor, group: Group, ignore: int
) -> torch.Tensor:
    """Loss per row; ``x`` becomes d loss / d x."""
    wide, width = x.float(), x.shape[1]
    local = target - group_rank(group) * width
    mine = (local >= 0) & (local < width) & (target != ignore)
    at = local.clamp(0, width - 1)[:, None]
    top = wide.max(-1).values
    chosen = torch.where(mine, wide.gather(1, at)[:, 0], float("-inf"))
    facts = torch.stack([top, (wide - top[:, None]).exp().sum(-1), chosen], dim=-1)
    parts = gather_along_first_dim(facts[None], group)[0]
    top = parts[..., 0].max(0).values
    total = (parts[..., 1] * (parts[..., 0] - top).exp()).sum(0)
    loss = total.log() + top - parts[..., 2].max(0).values
    grad = (wide - top[:, None]).exp() / total[:, None]
    grad.scatter_add_(1, at, -mine.float()[:, None])
    skipped = target == ignore
    x.copy_(grad.masked_fill(skipped[:, None], 0.0))
    return loss.masked_fill(skipped, 0.0)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        logits: torch.Tensor,
        target: torch.Tensor,
        label_smoothing: float = 0.0,
        reduce_loss: bool = False,
        group: Group = None,
        ignore_idx: int = -100,
        is_cg_capturable: bool = False,
    ) -> torch.Tensor:
        if label_smoothing:
            refuse("cross entropy with label smoothing")
        logits, parallel = logits.contiguous().detach(), group_size(group) > 1
        rows = logits.view(-1, logits.shape[-1])
        loss = rows.new_empty(rows.shape[0], dtype=torch.float32)
        if logits.is_meta:
            copied, numbers = since(2, 20), 4 if since(2, 20) else 3
            kept = logits
            if since(2, 18):
                kept = torch.empty_like(logits, dtype=logits.dtype if copied else torch.float32)
            ctx.statistics = loss.new_empty(2 * len(loss)) if copied else None
            facts = loss.new_empty(1, numbers * len(loss) if parallel or not copied else 0)
            fused("cross_entropy", 0, logits, kept)
            if parallel:
                gather_along_first_dim(facts, group)
            logits = kept
        else:
            loss = _forward_values(rows, target.reshape(-1), group, ignore_idx)
        ctx.save_for_backward(logits)
        ctx.reduced = rows.shape[0] if reduce_loss else 0
        return loss.mean() if reduce_loss else loss.view(target.shape)

    @staticmethod
    def backward(ctx: AutogradContext, grad: torch.Tensor) -> Grads:
        (logits,) = ctx.saved_tensors
        if not logits.is_meta:
            scale = grad / ctx.reduced if ctx.reduced else grad[..., None]
            logits.copy_(logits.float() * scale)
        return logits, None, None, None, None, None, None


parallel_cross_entropy = _CrossEntropy.apply
