"""What attention computes, where tensors have values (tier cpu): torch's, with TE's masks.

In : q, k, v in TE's layouts, a mask (True: hidden), and ``o``: form, mask_type, scale, dropout,
seqlens, shift, window.  ``sink`` is one more logit a head (softmax_type ``off-by-one``: 0,
``learnable``: a parameter).
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch.nn.functional import dropout, scaled_dot_product_attention

__all__ = ["attention_values"]


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
