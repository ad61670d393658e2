"""DotProductAttention: as one flash-like kernel, or as two products with a softmax between them.

Saved: q, k, v, out, cu_seqlens, softmax statistics in fp32 (pytorch/attention/
dot_product_attention/backends.py:1306-1318 @v2.9, FusedAttnFunc).  q, k, v become contiguous unless
they are slices of one packed tensor (dot_product_attention/utils.py, get_qkv_layout).  On the CPU
the values come from torch's attention, run again in backward.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.nn.functional import dropout, scaled_dot_product_attention

from megatron_prism.runtime.devices import kernels
from megatron_prism.runtime.te.base import TransformerEngineBaseModule
from megatron_prism.runtime.te.context_parallel import (
    COMM_TYPES,
    announce_attention,
    context_attention,
    context_size,
)
from megatron_prism.runtime.te.unsupported import refuse, since

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from megatron_prism.runtime.devices.signatures import (
        AutogradContext,
        Grads,
        Group,
        Groups,
        Trackers,
    )


def _heads_first(t: torch.Tensor, form: str) -> torch.Tensor:
    return t.permute(1, 2, 0, 3) if form == "sbhd" else t.permute(0, 2, 1, 3)


def _window(rows: int, columns: int, o: SimpleNamespace) -> torch.Tensor | None:
    """bool [rows, columns]: the keys that a sliding window lets each query see; None: all."""
    left, right = o.window
    if left < 0 and right < 0:
        return None
    distance = torch.arange(columns) - torch.arange(rows)[:, None] - (columns - rows)
    keep = distance >= -left if left >= 0 else torch.ones_like(distance, dtype=torch.bool)
    return keep & (distance <= right) if right >= 0 else keep


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    o: SimpleNamespace,
    causal: bool,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """[b, h, s, d] attention."""
    window = _window(q.shape[2], k.shape[2], o)
    if causal and (q.shape[2] != k.shape[2] or window is not None or sink is not None):
        # TE's causal mask is aligned top left; so is torch's
        below = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(o.shift(q, k))
        mask, causal = below if mask is None else mask & below, False
    if window is not None:
        mask = window if mask is None else mask & window
    if sink is not None:
        return _attend_sink(q, k, v, mask, o, sink)
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


def _attend_sink(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    o: SimpleNamespace,
    sink: torch.Tensor,
) -> torch.Tensor:
    """The same with one more logit a head, ``sink``, that takes its share and brings no value."""
    times = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(times, dim=1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2)).float() * o.scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    more = sink.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    shares = torch.cat([scores, more], dim=-1).softmax(dim=-1)[..., :-1]
    return dropout(shares, o.dropout).to(v.dtype) @ v


def attention_values(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    o: SimpleNamespace,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """The output in the layout of ``q``; differentiable."""
    causal = "causal" in o.mask_type
    if o.form == "thd":
        pieces = []
        bounds_q, bounds_k = o.seqlens[0].tolist(), o.seqlens[1].tolist()
        for i in range(len(bounds_q) - 1):
            a = q[bounds_q[i] : bounds_q[i + 1]].transpose(0, 1)[None]
            b, c = (t[bounds_k[i] : bounds_k[i + 1]].transpose(0, 1)[None] for t in (k, v))
            pieces.append(_attend(a, b, c, None, o, causal, sink)[0].transpose(0, 1))
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
    q, k, v = (_heads_first(t, o.form) for t in (q, k, v))
    out = _attend(q, k, v, keep, o, causal, sink)
    return out.permute(2, 0, 1, 3) if o.form == "sbhd" else out.permute(0, 2, 1, 3)


_DEVICE = "cuda"  # what the tier has in its place
_SOFTMAX = ("vanilla", "off-by-one", "learnable")
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


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        o: SimpleNamespace,
        sink: torch.Tensor | None = None,
    ) -> torch.Tensor:
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
            out.copy_(attention_values(q, k, v, mask, o, sink))
        else:
            announce_attention("attention", 2, q, k, v, out, o)
        ctx.sinks, ctx.learned = sink is not None, sink is not None and sink.requires_grad
        more = (*o.seqlens, sink) if ctx.sinks else o.seqlens
        ctx.save_for_backward(q, k, v, out, statistics, *more)
        return out

    @staticmethod
    def backward(ctx: AutogradContext, grad: torch.Tensor) -> Grads:
        q, k, v, *_, last = ctx.saved_tensors
        sink = last if ctx.sinks else None
        grad = grad.contiguous()
        if q.is_meta:
            of_sink = sink.new_empty(sink.shape) if sink is not None and ctx.learned else None
            if ctx.packed:
                *rows, heads, size = q.shape
                found = q.new_empty(*rows, heads, 3 * size).split(size, dim=-1)
            else:
                found = tuple(t.new_empty(t.shape) for t in (q, k, v))
            announce_attention("attention_backward", 5, q, k, v, grad, ctx.o)
            return (*found, None, None, of_sink)
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        leaf = sink if sink is None else sink.detach().requires_grad_()
        state = torch.get_rng_state()
        if ctx.rng is not None:
            torch.set_rng_state(ctx.rng)
        with torch.enable_grad():
            out = attention_values(leaves[0], leaves[1], leaves[2], ctx.mask, ctx.o, leaf)
        torch.set_rng_state(state)
        if leaf is not None and ctx.learned:
            leaves.append(leaf)
        found = torch.autograd.grad(out, leaves, grad)
        return (*found[:3], None, None, found[3] if ctx.learned else None)


class SplitAlongDim(torch.autograd.Function):
    """Views in forward, one concatenation in backward (attention/.../utils.py, SplitAlongDim)."""

    @staticmethod
    def forward(
        ctx: AutogradContext, mixed: torch.Tensor, dim: int, sizes: list[int], squeeze: bool = False
    ) -> tuple[torch.Tensor, ...]:
        ctx.dim, ctx.squeeze = dim, squeeze
        parts = torch.split(mixed, sizes, dim=dim)
        return tuple(p.squeeze(dim) for p in parts) if squeeze else parts

    @staticmethod
    def backward(ctx: AutogradContext, *grads: torch.Tensor) -> Grads:
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
        window_size: Sequence[int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Trackers | None = None,
        tp_group: Group = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Groups = None,
        cp_global_ranks: Sequence[int] | None = None,
        cp_stream: torch.cuda.Stream | None = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        **rest: object,
    ) -> None:
        super().__init__()
        if softmax_type not in _SOFTMAX:
            refuse(f"attention with softmax_type {softmax_type!r}")
        self.return_max_logit = return_max_logit
        self.window_size = (-1, -1) if window_size is None else tuple(window_size)
        self.qkv_format, self.attn_mask_type = qkv_format, attn_mask_type
        self.attention_dropout, self.get_rng_state_tracker = (
            attention_dropout,
            get_rng_state_tracker,
        )
        self.layer_number, self.attention_type = layer_number, attention_type
        size = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(size)
        self._make_sink(softmax_type, num_attention_heads // max(1, tp_size), get_rng_state_tracker)
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def _make_sink(self, softmax_type: str, heads: int, tracker: Trackers | None) -> None:
        """One more logit a head: none, 0, or learned (dot_product_attention.py:464 @v2.9)."""
        self.softmax_type, self.softmax_offset = softmax_type, None
        if softmax_type == "off-by-one":
            self.softmax_offset = torch.zeros(heads, device=_DEVICE)
        elif softmax_type == "learnable":
            del self.softmax_offset
            with tracker().fork() if tracker is not None else nullcontext():
                values = torch.empty(heads, device=_DEVICE).normal_(mean=0.0, std=0.023)
            self.register_parameter("softmax_offset", torch.nn.Parameter(values))

    def set_context_parallel_group(
        self,
        cp_group: Groups,
        cp_global_ranks: Sequence[int] | None,
        cp_stream: torch.cuda.Stream | None,
        cp_comm_type: str = "p2p",
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
        attention_mask: torch.Tensor | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        attn_mask_type: str | None = None,
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: object = None,
        **rest: object,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """[s, b, h·d] (``sbhd``), [b, s, h·d] (``bshd``) or [t, h·d] (``thd``); with
        ``return_max_logit`` the largest logit of each head beside it."""
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
        parallel = context_size(self.cp_group) > 1
        windowed = self.window_size[0] >= 0 or self.window_size[1] > 0
        if parallel and (windowed or self.softmax_offset is not None):
            refuse(
                "a sliding window or a softmax offset under context parallelism",
                fix="drop --context-parallel-size, or the window and the offset",
            )
        o = SimpleNamespace(
            form=form,
            mask_type=mask_type,
            scale=self.softmax_scale,
            dropout=self.attention_dropout if self.training else 0.0,
            seqlens=() if cu_seqlens_q is None else (cu_seqlens_q, cu_seqlens_kv),
            shift=lambda q, k: k.shape[2] - q.shape[2] if bottom else 0,
            window=self.window_size if windowed else (-1, -1),
        )
        qkv, tracker = (query_layer, key_layer, value_layer), self.get_rng_state_tracker
        largest = _largest_logits(*qkv[:2], o, parallel) if self.return_max_logit else None
        forked = tracker().fork() if o.dropout and tracker is not None else nullcontext()
        sink = self.softmax_offset
        kind = o.kernel = backend(*qkv, o, parallel, sink is not None)
        if form != "thd" and kind == "unfused":
            if not _packed(qkv):
                query_layer, key_layer, value_layer = (t.contiguous() for t in qkv)
            qkv = (query_layer, key_layer, value_layer)
            cross = self.attention_type == "cross"
            out = unfused_attention(*qkv, attention_mask, o, sink, cross, forked)
            return out if largest is None else (out, largest)
        turned = kind == "flash" and form == "sbhd"
        if turned:  # flash-attn knows bshd alone, so copies come and go (backends.py:860 @v2.17)
            query_layer, key_layer, value_layer = (t.transpose(0, 1).contiguous() for t in qkv)
            qkv, o.form = (query_layer, key_layer, value_layer), "bshd"
        with forked:
            if parallel:
                where = (self.cp_group, self.cp_global_ranks, self.cp_comm_type)
                out = context_attention(qkv, o, *where, whole=_Attention.apply)
            else:
                out = _Attention.apply(*qkv, attention_mask, o, sink)
        if turned:
            out = out.transpose(0, 1).contiguous()
        out = out.view(*out.shape[:-2], -1)
        return out if largest is None else (out, largest)


def _largest_logits(
    query: torch.Tensor, key: torch.Tensor, o: SimpleNamespace, parallel: bool
) -> torch.Tensor:
    """float32 [heads]: what the kernels find beside their sums (``return_max_logit`` @v2.9).  Of
    values the logits are made once more, so only small jobs should ask."""
    heads = query.shape[-2]
    if query.is_meta:
        return torch.empty(heads, dtype=torch.float32, device=query.device)
    if parallel or o.form == "thd" or o.window != (-1, -1):
        refuse(
            "the largest logit with context parallelism, packed sequences or a window",
            fix="--prism-tier meta, or leave --qk-clip and --log-max-attention-logit out",
        )
    order = (1, 2, 0, 3) if o.form == "sbhd" else (0, 2, 1, 3)
    with torch.no_grad():
        q, k = query.permute(order).float(), key.permute(order).float()
        logits = q @ k.repeat_interleave(heads // k.shape[1], 1).transpose(-1, -2) * o.scale
        if "causal" in o.mask_type:
            later = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1 + o.shift(q, k))
            logits.masked_fill_(later, float("-inf"))
        return logits.amax((0, 2, 3))


# -- as two products with a softmax between them ---------------------------------------------------

# The products, the mask, the dropout and their order are those of UnfusedDotProductAttention
# (dot_product_attention/backends.py:193 @v2.9), in torch's own operators: they allocate, keep and
# free what they do on a GPU.  The softmax kernel keeps its result alone and writes its gradient
# over the one it is given, from v2.19 on beside it (csrc/extensions/softmax.cpp).

_HALVES = (torch.float16, torch.bfloat16)
_LONGEST_ROW = 16384


def _allowed(name: str) -> bool:
    return bool(int(os.environ.get(f"NVTE_{name}_ATTN", "1")))


def backend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: SimpleNamespace,
    parallel: bool,
    sink: bool,
) -> str:
    """``fused`` (cuDNN), ``flash`` or ``unfused``: what TE would choose on Hopper.

    o        : mask_type, form, dropout and window of the call
    parallel : is the sequence spread over ranks?
    sink     : has the softmax one more logit?

    Source: get_attention_backend, dot_product_attention/utils.py:283 @v2.9, with flash-attn 2 and
    cuDNN 9, and csrc's nvte_get_fused_attn_backend for the shapes that cuDNN takes.
    """
    rows, columns = (t.shape[o.form.index("s")] if o.form != "thd" else 0 for t in (q, k))
    windowed = o.window[0] != -1 or o.window[1] not in (-1, 0)
    sizes = (q.shape[-1], v.shape[-1])
    kernel = q.dtype in _HALVES and o.mask_type != "arbitrary"
    fused = _allowed("FUSED") and kernel and all(size % 8 == 0 and size <= 256 for size in sizes)
    fused = fused and not (windowed and (o.dropout or rows > columns))
    flash = _allowed("FLASH") and kernel and not sink and max(sizes) <= 256
    flash = flash and not (o.mask_type in ("causal", "padding_causal") and rows != columns)
    if fused:
        return "fused"
    if flash:
        return "flash"
    return "unfused" if _allowed("UNFUSED") and not parallel else "fused"


class _MaskedSoftmax(torch.autograd.Function):
    """ScaledMaskedSoftmax and ScaledSoftmax (dot_product_attention/softmax.py @v2.9), scale 1."""

    @staticmethod
    def forward(
        ctx: AutogradContext, scores: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        one = torch.ones(())
        results = kernels.masked_softmax(scores, mask, one)
        ctx.save_for_backward(results, one)
        return results

    @staticmethod
    def backward(ctx: AutogradContext, grad: torch.Tensor) -> Grads:
        results, one = ctx.saved_tensors
        if since(2, 19):
            grad = grad.clone()
        return kernels.masked_softmax_backward(grad, results, one), None


@functools.cache
def _causal_mask(rows: int, columns: int, diagonal: int, device: torch.device) -> torch.Tensor:
    """bool, kept for the whole run, as TE keeps it."""
    return torch.triu(torch.ones(rows, columns, dtype=torch.bool, device=device), diagonal)


def _has_kernel(scores: torch.Tensor, mask: torch.Tensor, mask_type: str) -> bool:
    """FusedScaleMaskSoftmax.is_kernel_available."""
    batch, heads, rows, columns = scores.shape
    if os.environ.get("NVTE_MASKED_SOFTMAX_FUSION", "1") == "0" or scores.dtype not in _HALVES:
        return False
    if not 16 < columns < _LONGEST_ROW or columns % 8 or rows == 1:
        return False
    if mask_type == "causal" and rows != columns:
        return False
    if rows % 4 or batch * heads % 4:
        return False
    reads_mask = "padding" in mask_type or mask_type == "arbitrary"
    if reads_mask and (mask.shape[0] not in (1, batch) or mask.shape[1:] != (1, rows, columns)):
        return False
    return rows % kernels.batches_per_block(rows, columns, batch, heads) == 0


def _softmax(scores: torch.Tensor, mask: torch.Tensor, mask_type: str) -> torch.Tensor:
    """FusedScaleMaskSoftmax of ``scores`` [b, h, sq, sk]."""
    if _has_kernel(scores, mask, mask_type):
        return _MaskedSoftmax.apply(scores, mask if mask_type != "no_mask" else None)
    dtype = scores.dtype
    if dtype in _HALVES:
        scores = scores.float()
    if mask_type in ("causal", "causal_bottom_right"):
        rows, columns = scores.shape[2:]
        diagonal = columns - rows + 1 if "bottom_right" in mask_type else 1
        mask = torch.logical_or(mask, _causal_mask(rows, columns, diagonal, scores.device))
    if mask_type != "no_mask":
        scores.masked_fill_(mask, -10000.0)
    return torch.nn.functional.softmax(scores, dim=-1).to(dtype)


def _full_mask(
    rows: int, columns: int, mask: Any, o: SimpleNamespace, cross: bool, device: torch.device
) -> tuple[str, torch.Tensor]:
    """(type, bool [b or 1, 1, sq, sk], true where masked) of get_full_mask, utils.py:1208 @v2.9."""
    mask_type, window = o.mask_type, o.window
    changed = window[0] != -1 or window[1] not in (-1, 0)
    right = 0 if "causal" in mask_type else window[1]
    left = columns if window[0] == -1 else window[0]
    right = rows if right == -1 else right
    shift: int | torch.Tensor = 0
    if "padding" in mask_type:
        of_rows, of_columns = mask if cross else (mask, mask)
        mask = torch.logical_or(of_rows.squeeze(1).unsqueeze(3), of_columns)
        there = mask.logical_not()
        seen_rows, seen_columns = there[:, 0, :, 0].sum(dim=1), there[:, 0, 0, :].sum(dim=1)
        if "causal" not in mask_type or "bottom_right" in mask_type:
            shift = (seen_columns - seen_rows).view(-1, 1, 1, 1)
        del there
    elif mask_type != "causal":
        shift = columns - rows
    places = functools.partial(torch.arange, dtype=torch.int32, device=device)
    distance = places(rows).view(1, 1, rows, 1) - places(columns).view(1, 1, 1, columns)
    from_left, from_right = distance + (shift - left), distance + (shift + right)
    outside = torch.logical_not((from_left <= 0) & ~(from_right < 0))
    whole = outside if mask is None else torch.logical_or(outside, mask)
    return "arbitrary" if changed else mask_type, whole


def unfused_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Any,
    o: SimpleNamespace,
    sink: torch.Tensor | None,
    cross: bool,
    dropout_context: AbstractContextManager[object],
) -> torch.Tensor:
    """The output, heads and their size as one dimension, in the layout of ``q``.

    q, k, v : [s, b, h, d] (``o.form`` sbhd) or [b, s, h, d] (bshd); fewer heads in k and v: groups
    mask    : bool, true where masked; of ``padding`` types [b, 1, 1, s], two of them for ``cross``

    Local names live as long as those of TE's function, and with them their tensors.
    """
    if o.form == "bshd":
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    rows, batch, heads, columns = q.shape[0], q.shape[1], q.shape[2], k.shape[0]
    mask_type, mask = _full_mask(rows, columns, mask, o, cross, q.device)
    if k.shape[2] != heads:
        k, v = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (k, v))
    scores = torch.empty(batch * heads, rows, columns, dtype=q.dtype, device=q.device)
    q, k = q.reshape(rows, batch * heads, -1), k.reshape(columns, batch * heads, -1)
    keys = k.transpose(0, 1).transpose(1, 2)
    scores = torch.baddbmm(scores, q.transpose(0, 1), keys, beta=0.0, alpha=o.scale)
    scores = scores.view(batch, heads, rows, columns)
    if sink is not None:
        last = sink.to(scores.dtype).view(1, -1, 1, 1).expand(batch, -1, rows, -1)
        scores = torch.cat([scores, last], dim=-1)
        mask = functional.pad(mask, (0, 1), mode="constant", value=False)
        mask_type = "arbitrary"
    shares = _softmax(scores, mask, mask_type)
    if "padding" in mask_type:
        shares = shares.masked_fill(mask, 0)
    if sink is not None:
        shares = shares[..., :-1]
    with dropout_context:
        shares = functional.dropout(shares, o.dropout)
    v = v.reshape(columns, batch * heads, -1)
    shares = shares.reshape(batch * heads, rows, -1)
    out = torch.bmm(shares, v.transpose(0, 1)).view(batch, heads, rows, -1)
    order = (2, 0, 1, 3) if o.form == "sbhd" else (0, 2, 1, 3)
    out = out.permute(*order).contiguous()
    return out.view(*out.shape[:2], -1)
