"""parallel_cross_entropy: the loss and its gradient in one pass.

Saved: the logits' storage, which holds the gradient after forward (pytorch/cross_entropy.py:74
@v2.9); from v2.18 on the gradient in fp32 beside them; from v2.20 on a copy of them and two fp32
numbers a row.  Three fp32 numbers a row travel between tensor-parallel ranks, from v2.20 on four
(pytorch/triton/cross_entropy.py @v2.9, v2.18 and v2.20).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_prism.runtime.devices.kernels import fused
from megatron_prism.runtime.te.common import (
    gather_along_first_dim,
    group_rank,
    group_size,
    refuse,
    since,
)

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import AutogradContext, Grads, Group

__all__ = ["parallel_cross_entropy"]


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
