"""Fields of a c10d call as an op.

In : the group, our name of the collective and the arguments of the ``ProcessGroup`` method.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

import torch

from megatron_prism.core.ops import SHARED
from megatron_prism.runtime.answers import reduce_op_name
from megatron_prism.runtime.process_group import arguments

if TYPE_CHECKING:
    from megatron_prism.runtime.listeners import Args, Kwargs
    from megatron_prism.runtime.process_group import PrismGroup

__all__ = ["Fields", "details"]

DTYPE = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
    torch.float8_e4m3fn: "fp8e4m3",
    torch.float8_e5m2: "fp8e5m2",
}
_SHOWN = 4  # tensors of a coalesced call whose shapes are written out


Splits = tuple[tuple[int, ...], tuple[int, ...]]  # to and from every member


class Fields(TypedDict, total=False):
    """What ``Builder.add`` is told of an op, besides its name and its labels."""

    group: str
    dtype: str
    num_in: int
    num_out: int
    reduce: str
    peer: int
    root: int
    splits: Splits | None
    handle: int
    batch: int
    shape: str
    site: str
    note: str
    ns: int
    flops: int
    traffic: int
    kernels: int


def details(group: PrismGroup, op: str, args: Args, kwargs: Kwargs) -> Fields:
    """The fields of an op from the arguments of the c10d call."""
    ins, outs = arguments(op, args)
    tensor = next(iter(ins or outs), None)
    fields: Fields = {}
    if tensor is not None:
        fields["dtype"] = DTYPE.get(tensor.dtype, "")
        fields["num_in"] = sum(t.numel() for t in ins) if ins else -1
        fields["num_out"] = sum(t.numel() for t in outs) if outs else -1
        fields["shape"] = _shapes(ins or outs)
    opts = kwargs.get("opts", args[-1] if args else None)
    if op in ("all_reduce", "reduce_scatter", "reduce"):
        fields["reduce"] = reduce_op_name(opts.reduceOp) if hasattr(opts, "reduceOp") else "sum"
    if op in ("broadcast", "reduce", "gather", "scatter"):
        fields["root"] = int(getattr(opts, "rootRank", 0))
    if op in ("send", "recv"):
        # (tensors, peer, tag); a receive from any source has no peer: the next rank stands for it
        peer = args[1] if len(args) > 2 else group.rank() + 1
        fields["peer"] = _nearest(peer - group.rank(), group.size())
    if op == "all_to_all":
        fields["splits"] = _splits(group, args)
    elif op == "all_gather":
        fields["splits"] = _uneven(group, args)
    return fields


def _nearest(offset: int, size: int) -> int:
    """``offset`` in a ring of ``size``, by the shorter way (forwards where both are alike)."""
    offset %= size
    return offset - size if offset > size // 2 else offset


def _splits(group: PrismGroup, args: Args) -> Splits | None:
    """(rows to, rows from) every member where they are facts: mirrored peers send what we send, and
    that is nobody's split."""
    known = group.all_local or group.world.shapes_only
    if len(args) < 4 or not known or not (len(args[2]) and len(args[3])):
        return None
    return tuple(map(int, args[3])), tuple(map(int, args[2]))


def _uneven(group: PrismGroup, args: Args) -> Splits | None:
    """(elements to, elements from) every member of a gather into tensors of several sizes, where
    all know them: whole parameters belong to single ranks (layer_wise_optimizer.py:763 @0.19.0).
    Of experts' tokens (mappings.py:153 @0.19.0) mirrored peers have as many as we have."""
    lists, shards = args[0], args[1]
    if not (group.all_local or SHARED in group.desc):
        return None
    if torch.is_tensor(lists) or len(lists) != 1 or torch.is_tensor(lists[0]):
        return None
    sizes = tuple(out.numel() for out in lists[0])
    return ((shards[0].numel(),) * len(sizes), sizes) if len(set(sizes)) > 1 else None


def _shapes(tensors: Sequence[torch.Tensor]) -> str:
    words = ["x".join(map(str, t.shape)) or "1" for t in tensors[:_SHOWN]]
    more = len(tensors) - _SHOWN
    return ",".join(words) + (f",+{more}" if more > 0 else "")
