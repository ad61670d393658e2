"""Attention as two products with a softmax between them, and when TE chooses it.

The products, the mask, the dropout and their order are those of UnfusedDotProductAttention
(pytorch/attention/dot_product_attention/backends.py:193 @v2.9), in torch's own operators: they
allocate, keep and free what they do on a GPU.  The softmax kernel keeps its result alone and writes
its gradient over the one it is given, from v2.19 on beside it (csrc/extensions/softmax.cpp).
"""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from megatron_prism.runtime.devices import kernels
from megatron_prism.runtime.te.common import since

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from megatron_prism.runtime.devices.signatures import AutogradContext, Grads

__all__ = ["backend", "unfused_attention"]

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
