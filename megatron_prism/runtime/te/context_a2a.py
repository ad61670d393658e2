"""How do rows of all heads become all rows of some heads, and back?

One all-to-all per tensor, issued in the order of the tensors; while one travels the next is laid
out (pytorch/attention/dot_product_attention/context_parallel.py:261, flash_attn_a2a_communicate
@v2.9).  Rows arrive rank by rank, each rank's two chunks together; between the two functions they
are in the order of the sequence.  Tensors are [s, b, h, d] (``sbhd``) or [b, s, h, d] (``bshd``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from megatron_prism.runtime.te.comm import group_size
from megatron_prism.runtime.te.unsupported import refuse

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import Context, Grads, Group

__all__ = ["FromHeads", "ToHeads", "to_heads", "to_rows"]


Change = Callable[[torch.Tensor], torch.Tensor]


def _order(size: int, device: torch.device) -> torch.Tensor:
    """Arrived chunk at each place of the sequence: 0 2 4 .. 5 3 1."""
    ids = [*range(0, 2 * size, 2), *range(2 * size - 1, 0, -2)]
    return torch.tensor(ids, dtype=torch.int32, device=device)


def _order_back(size: int, device: torch.device) -> torch.Tensor:
    """Chunk of the sequence that leaves at each place: 0 last 1 last-but-one .."""
    ids = [i for rank in range(size) for i in (rank, 2 * size - 1 - rank)]
    return torch.tensor(ids, dtype=torch.int32, device=device)


def _exchange(
    tensors: list[torch.Tensor], prepare: Change, finish: Change, group: Group
) -> list[torch.Tensor]:
    inputs, outputs = list(tensors), list(tensors)
    works: list[dist.Work] = []
    for i in range(len(inputs) + 2):
        if 0 < i <= len(inputs):
            outputs[i - 1] = torch.empty_like(inputs[i - 1])
            work = dist.all_to_all_single(outputs[i - 1], inputs[i - 1], group=group, async_op=True)
            works.append(work)
        if i > 1:
            works[i - 2].wait()
            outputs[i - 2] = finish(outputs[i - 2])
        if i < len(inputs):
            inputs[i] = prepare(inputs[i])
    return outputs


def to_heads(tensors: list[torch.Tensor], form: str, group: Group) -> list[torch.Tensor]:
    """All rows of this rank's share of the heads."""
    size, dim = group_size(group), form.index("s")
    ids = _order(size, tensors[0].device)
    for t in tensors:
        if t.shape[-2] % size:
            refuse(f"{t.shape[-2]} attention heads over {size} context-parallel ranks")

    def prepare(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-2, (size, -1)).movedim(-3, 0).contiguous()

    def finish(x: torch.Tensor) -> torch.Tensor:
        x = x.movedim(0, dim).contiguous()
        x = x.view(*x.shape[:dim], 2 * size, -1, *x.shape[dim + 2 :])
        return torch.index_select(x, dim, ids).flatten(dim, dim + 1)

    return _exchange(tensors, prepare, finish, group)


def to_rows(tensors: list[torch.Tensor], form: str, group: Group) -> list[torch.Tensor]:
    """This rank's rows of all heads."""
    size, dim = group_size(group), form.index("s")
    ids = _order_back(size, tensors[0].device)

    def prepare(x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(dim, (2 * size, -1)).movedim(dim, 0).contiguous()
        return torch.index_select(x, 0, ids).unflatten(0, (size, 2))

    def finish(x: torch.Tensor) -> torch.Tensor:
        x = x.movedim(0, -3).movedim(0, dim).contiguous()
        return x.flatten(-3, -2).flatten(dim, dim + 1)

    return _exchange(tensors, prepare, finish, group)


class ToHeads(torch.autograd.Function):
    """Three tensors at once, so that their gradients leave in the same order."""

    @staticmethod
    def forward(
        ctx: Context, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: str, group: Group
    ) -> tuple[torch.Tensor, ...]:
        ctx.form, ctx.group = form, group
        return tuple(to_heads([q, k, v], form, group))

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> Grads:
        return (*to_rows(list(grads), ctx.form, ctx.group), None, None)


class FromHeads(torch.autograd.Function):
    """The output's way back."""

    @staticmethod
    def forward(ctx: Context, out: torch.Tensor, form: str, group: Group) -> torch.Tensor:
        ctx.form, ctx.group = form, group
        return to_rows([out], form, group)[0]

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> Grads:
        return to_heads([grad], ctx.form, ctx.group)[0], None, None
