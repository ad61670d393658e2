"""Collectives of the layers (pytorch/distributed.py @v2.9: 880 reduce-scatter, 1573 gather)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import Group

__all__ = [
    "allreduce",
    "gather_along_first_dim",
    "group_rank",
    "group_size",
    "reduce_scatter_along_first_dim",
]

Answer = tuple[torch.Tensor, dist.Work | None]


def group_size(group: Group) -> int:
    """Members of ``group``; 1 without torch.distributed or without a group."""
    if group is None or not dist.is_initialized():
        return 1
    return dist.get_world_size(group)


def group_rank(group: Group) -> int:
    return 0 if group is None or not dist.is_initialized() else dist.get_rank(group)


def gather_along_first_dim(inp: torch.Tensor, group: Group, async_op: bool = False) -> Answer:
    """(all members' ``inp``, work handle); ``inp`` itself in a group of one."""
    size = group_size(group)
    if size == 1:
        return inp, None
    out = inp.new_empty(inp.shape[0] * size, *inp.shape[1:])
    work = dist.all_gather_into_tensor(out, inp.contiguous(), group=group, async_op=async_op)
    return out, work


def reduce_scatter_along_first_dim(
    inp: torch.Tensor, group: Group, async_op: bool = False
) -> Answer:
    """(this member's rows of the sum, work handle)."""
    size = group_size(group)
    if size == 1:
        return inp, None
    out = inp.new_empty(inp.shape[0] // size, *inp.shape[1:])
    work = dist.reduce_scatter_tensor(out, inp.contiguous(), group=group, async_op=async_op)
    return out, work


def allreduce(inp: torch.Tensor, group: Group, async_op: bool = False) -> Answer:
    """(the sum, in place; work handle)."""
    if group_size(group) == 1:
        return inp, None
    return inp, dist.all_reduce(inp, group=group, async_op=async_op)
