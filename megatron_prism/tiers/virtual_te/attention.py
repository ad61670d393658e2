"""DotProductAttention as one flash-like kernel.

Saved: q, k, v, out, cu_seqlens, softmax statistics in fp32 (pytorch/attention/
dot_product_attention/backends.py:1306-1318 @v2.9, FusedAttnFunc).  q, k, v become contiguous unless
they are slices of one packed tensor (dot_product_attention/utils.py, get_qkv_layout).  On the CPU
the values come from torch's attention, run again in backward.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from megatron_prism.tiers.virtual_te.announce import announce_attention
from megatron_prism.tiers.virtual_te.base import TransformerEngineBaseModule
from megatron_prism.tiers.virtual_te.context_parallel import (
    COMM_TYPES,
    context_attention,
    context_size,
)
from megatron_prism.tiers.virtual_te.unsupported import refuse

__all__ = ["DotProductAttention", "SplitAlongDim"]

_MASKS = {
    "no_mask",
    "causal",
    "arbitrary",
    "padding",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
}


def _packed(tensors: tuple[torch.Tensor, ...]) -> bool:
    """Are these q, k, v of one tensor, interleaved per head?"""
    first = tensors[0]
    storage = first.untyped_storage()._cdata
    size = first.shape[-1]
    return all(
        t.untyped_storage()._cdata == storage
        and t.shape == first.shape
        and t.stride() == first.stride()
        and t.storage_offset() in (i * size, i * size * t.shape[-2])
        for i, t in enumerate(tensors)
    )


def _heads_first(t: torch.Tensor, form: str) -> torch.Tensor:
    return t.permute(1, 2, 0, 3) if form == "sbhd" else t.permute(0, 2, 1, 3)


def _attend(q: Any, k: Any, v: Any, mask: Any, o: SimpleNamespace, causal: bool) -> torch.Tensor:
    """[b, h, s, d] attention."""
    if causal and q.shape[2] != k.shape[2]:  # TE's causal mask is aligned top left; so is torch's
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(o.shift(q, k))
        causal = False
    return scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=o.dropout,
        is_causal=causal and mask is None,
        scale=o.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _values(q: Any, k: Any, v: Any, mask: Any, o: SimpleNamespace) -> torch.Tensor:
    """The output in the layout of ``q``; differentiable."""
    causal = "causal" in o.mask_type
    if o.form == "thd":
        pieces = []
        bounds_q, bounds_k = o.seqlens[0].tolist(), o.seqlens[1].tolist()
        for i in range(len(bounds_q) - 1):
            a = q[bounds_q[i] : bounds_q[i + 1]].transpose(0, 1)[None]
            b, c = (t[bounds_k[i] : bounds_k[i + 1]].transpose(0, 1)[None] for t in (k, v))
            pieces.append(_attend(a, b, c, None, o, causal)[0].transpose(0, 1))
        return torch.cat(pieces)
    keep = None if mask is None or o.mask_type in ("no_mask", "causal") else ~mask
    if keep is not None and causal:
        keep = (
            keep
            & torch.ones(
                q.shape[0 if o.form == "sbhd" else 1],
                k.shape[0 if o.form == "sbhd" else 1],
                dtype=torch.bool,
            ).tril()
        )
        causal = False
    out = _attend(*(_heads_first(t, o.form) for t in (q, k, v)), keep, o, causal)
    return out.permute(2, 0, 1, 3) if o.form == "sbhd" else out.permute(0, 2, 1, 3)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, mask: Any, o: SimpleNamespace) -> torch.Tensor:
        ctx.packed = _packed((q, k, v))
        if not ctx.packed:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        # the fused kernel reads cu_seqlens; the mask itself lives no longer than forward
        ctx.o, ctx.mask, ctx.rng = o, None if q.is_meta else mask, None
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        tokens = q.shape[0] if o.form == "thd" else q.shape[0] * q.shape[1]
        statistics = q.new_empty(tokens * q.shape[-2], dtype=torch.float32)
        if not q.is_meta:
            if o.dropout:
                ctx.rng = torch.get_rng_state()
            out.copy_(_values(q, k, v, mask, o))
        else:
            announce_attention("attention", 2, q, k, v, out, o)
        ctx.save_for_backward(q, k, v, out, statistics, *o.seqlens)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, *_ = ctx.saved_tensors
        grad = grad.contiguous()
        if q.is_meta:
            announce_attention("attention_backward", 5, q, k, v, grad, ctx.o)
            if ctx.packed:
                *rows, heads, size = q.shape
                dqkv = q.new_empty(*rows, heads, 3 * size)
                return (*dqkv.split(size, dim=-1), None, None)
            return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), None, None
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        state = torch.get_rng_state()
        if ctx.rng is not None:
            torch.set_rng_state(ctx.rng)
        with torch.enable_grad():
            out = _values(*leaves, ctx.mask, ctx.o)
        torch.set_rng_state(state)
        return (*torch.autograd.grad(out, leaves, grad), None, None)


class SplitAlongDim(torch.autograd.Function):
    """Views in forward, one concatenation in backward (attention/.../utils.py, SplitAlongDim)."""

    @staticmethod
    def forward(ctx: Any, mixed: torch.Tensor, dim: int, sizes: Any, squeeze: bool = False) -> Any:
        ctx.dim, ctx.squeeze = dim, squeeze
        parts = torch.split(mixed, sizes, dim=dim)
        return tuple(p.squeeze(dim) for p in parts) if squeeze else parts

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        parts = [g.unsqueeze(ctx.dim) for g in grads] if ctx.squeeze else list(grads)
        return torch.cat(parts, dim=ctx.dim), None, None, None


class DotProductAttention(TransformerEngineBaseModule):
    """pytorch/attention/dot_product_attention/dot_product_attention.py:154 @v2.9."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: Any = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        **rest: Any,
    ) -> None:
        super().__init__()
        if softmax_type != "vanilla":
            refuse(f"attention with softmax_type {softmax_type!r}")
        if return_max_logit:
            refuse("attention that returns the largest logit (qk-clip)")
        if window_size not in (None, (-1, -1), [-1, -1], (-1, 0), [-1, 0]):
            refuse("sliding-window attention")
        self.qkv_format, self.attn_mask_type = qkv_format, attn_mask_type
        self.attention_dropout, self.get_rng_state_tracker = (
            attention_dropout,
            get_rng_state_tracker,
        )
        self.layer_number, self.attention_type = layer_number, attention_type
        size = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(size)
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        """Whose keys and values belong to the same sequence, and how they come here."""
        if cp_comm_type not in COMM_TYPES and cp_group is not None:
            refuse(
                f"context parallelism of type {cp_comm_type!r}",
                fix=f"--cp-comm-type {', '.join(COMM_TYPES[:-1])} or {COMM_TYPES[-1]}",
            )
        self.cp_group, self.cp_global_ranks = cp_group, cp_global_ranks
        self.cp_stream, self.cp_comm_type = cp_stream, cp_comm_type

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Any = None,
        cu_seqlens_kv: Any = None,
        attn_mask_type: str | None = None,
        core_attention_bias: Any = None,
        alibi_slopes: Any = None,
        checkpoint_core_attention: bool = False,
        inference_params: Any = None,
        **rest: Any,
    ) -> torch.Tensor:
        """[s, b, h·d] (``sbhd``), [b, s, h·d] (``bshd``) or [t, h·d] (``thd``)."""
        if core_attention_bias is not None or alibi_slopes is not None:
            refuse("attention with a bias")
        if inference_params is not None:
            refuse("attention with a key-value cache")
        form = qkv_format or self.qkv_format
        mask_type = (attn_mask_type or self.attn_mask_type).replace(
            "causal,padding", "padding_causal"
        )
        if mask_type not in _MASKS:
            refuse(f"attention mask {mask_type!r}")
        bottom = "bottom_right" in mask_type
        o = SimpleNamespace(
            form=form,
            mask_type=mask_type,
            scale=self.softmax_scale,
            dropout=self.attention_dropout if self.training else 0.0,
            seqlens=() if cu_seqlens_q is None else (cu_seqlens_q, cu_seqlens_kv),
            shift=lambda q, k: k.shape[2] - q.shape[2] if bottom else 0,
        )
        qkv, tracker = (query_layer, key_layer, value_layer), self.get_rng_state_tracker
        with tracker().fork() if o.dropout and tracker is not None else nullcontext():
            if context_size(self.cp_group) > 1:
                where = (self.cp_group, self.cp_global_ranks, self.cp_comm_type)
                out = context_attention(qkv, o, *where, whole=_Attention.apply)
            else:
                out = _Attention.apply(*qkv, attention_mask, o)
        return out.view(*out.shape[:-2], -1)
