"""Rotary position embedding as one kernel.

Saved: the frequencies (and cu_seqlens), not the input (pytorch/attention/rope.py:152 @v2.9).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_prism.runtime.devices.work import fused
from megatron_prism.runtime.te.unsupported import absent_function, refuse

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import Context, Grads

__all__ = ["apply_rotary_pos_emb"]

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
        ctx: Context, t: torch.Tensor, freqs: torch.Tensor, seqlens: torch.Tensor, opts: Options
    ) -> torch.Tensor:
        freqs = freqs.float()
        ctx.save_for_backward(freqs, seqlens)
        ctx.opts = opts
        return _apply(t, freqs, seqlens, opts, back=False)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> Grads:
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
