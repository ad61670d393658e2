"""What would the fused attention kernel have done?  Flops and bytes, announced to the recorder."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megatron_prism.runtime.devices.work import fused

__all__ = ["announce_attention"]


def announce_attention(
    name: str,
    products: int,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    out: torch.Tensor,
    o: SimpleNamespace,
) -> None:
    """One kernel of ``products`` matrix products per head (2 forward, 5 backward) on ``meta``.

    A causal mask halves them; a window leaves as many keys a query as it is wide.  Ranks of a
    context-parallel ring hold the first and the last part of the sequence each, so that every block
    costs half a full one (Megatron's load balancing).
    """
    if not q.is_meta or k is None or v is None:
        return
    heads, size = q.shape[-2], q.shape[-1]
    if o.form == "thd":
        pairs = q.shape[0] * k.shape[0]  # an upper bound: sequences do not see each other
    else:
        sequence, batch = o.form.index("s"), o.form.index("b")
        pairs = q.shape[batch] * q.shape[sequence] * k.shape[sequence]
    if "causal" in o.mask_type:
        pairs //= 2
    left, right = getattr(o, "window", (-1, -1))
    if left >= 0:
        causal = "causal" in o.mask_type
        width = left + 1 + (0 if causal else k.shape[0] if right < 0 else right)
        queries = q.shape[0] if o.form == "thd" else q.shape[0] * q.shape[1]
        pairs = min(pairs, queries * width)
    fused(name, products * heads * pairs * (size + v.shape[-1]), q, k, v, out)
