"""parallel_cross_entropy: the loss and its gradient in one pass, in place of the logits.

Saved: the logits' storage, which holds the gradient after forward (pytorch/cross_entropy.py:74
@v2.9); three fp32 numbers a row travel between tensor-parallel ranks
(pytorch/triton/cross_entropy.py @v2.9).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_prism.runtime.devices.kernels import fused
from megatron_prism.runtime.te.common import gather_along_first_dim, group_rank, group_size, refuse

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
        logits = logits.contiguous().detach()
        rows = logits.view(-1, logits.shape[-1])
        loss = rows.new_empty(rows.shape[0], dtype=torch.float32)
        if logits.is_meta:
            fused("cross_entropy", 0, logits, logits)
            facts = rows.new_empty(1, 3 * rows.shape[0], dtype=torch.float32)
            if group_size(group) > 1:
                gather_along_first_dim(facts, group)
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
