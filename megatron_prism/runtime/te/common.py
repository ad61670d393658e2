"""Collectives of the layers (pytorch/distributed.py @v2.9); names that are refused when used."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import distributed as dist

from megatron_prism.core.errors import UnsupportedError

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import Group

__all__ = [
    "Lazy",
    "absent_class",
    "absent_function",
    "allreduce",
    "gather_along_first_dim",
    "group_rank",
    "group_size",
    "reduce_scatter_along_first_dim",
    "refuse",
    "release",
    "since",
]


# Whose memory the modules have.  Where another one keeps something else, they ask ``since``.
release = (2, 17)


def since(major: int, minor: int) -> bool:
    """Whether the release that is stood in for has what came with this one."""
    return release >= (major, minor)


_FIX = "leave that option out, or use --prism-tier cuda with the real Transformer Engine"


def refuse(what: str, fix: str = _FIX) -> NoReturn:
    """Raise UnsupportedError that names ``what``."""
    raise UnsupportedError(f"the virtual Transformer Engine has no {what}", fix=fix)


def absent_function(name: str, fix: str = _FIX) -> Callable[..., NoReturn]:
    """A function that refuses to run."""

    def absent(*args: object, **kwargs: object) -> NoReturn:
        refuse(name, fix)

    absent.__name__ = absent.__qualname__ = name.rpartition(".")[2]
    return absent


def absent_class(name: str, *bases: type, fix: str = _FIX) -> type:
    """A class that isinstance() and annotations can name, and that refuses to be made."""

    def new(cls: type, *args: object, **kwargs: object) -> NoReturn:
        refuse(name, fix)

    return type(name.rpartition(".")[2], bases, {"__new__": new})


class Lazy(types.ModuleType):
    """A module each of whose public names is an absent class, made when it is first asked for."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("_"):
            raise AttributeError(name)
        # Megatron's uses of te.pytorch.ops, the one module of this kind
        fix = "leave --use-transformer-engine-op-fuser and --use-te-activation-func out"
        made = absent_class(f"{self.__name__}.{name}", fix=fix)
        setattr(self, name, made)
        return made


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
