"""Shapes of the results of simple operators.

torch's own answer on ``meta`` is Python for elementwise operators, 20 to 120 us a call, and 5 us
more than need be for ``new_empty`` (2.11 and 2.13, AMD EPYC); where tensors are of one type and
laid out row by row it is an empty tensor, 2 us.  Everything else is left to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch._ops import OpOverload

__all__ = ["answer"]

Args = Sequence[Any]  # of an operator: tensors, numbers, lists
Kwargs = Mapping[str, Any] | None
Answer = Callable[[Args, Kwargs], torch.Tensor | None]

_META = torch.device("meta")
_KNOWN = frozenset(("alpha", "approximate"))  # keywords that change no shape and no type
_aten = torch.ops.aten


def answer(func: OpOverload) -> Answer | None:
    """What makes the result of ``func`` from (args, kwargs), or None where torch is to be asked."""
    return _ANSWERS.get(func)


def _rows(tensor: torch.Tensor) -> bool:
    """Whether it is on meta, of floats, and no stride is smaller than one further right: then what
    torch makes of it is contiguous."""
    if not tensor.is_meta or not tensor.dtype.is_floating_point:
        return False
    if tensor.is_contiguous():
        return True
    strides = tensor.stride()
    return strides[-1] > 0 and all(a >= b for a, b in zip(strides, strides[1:], strict=False))


def _fits(args: Args, kwargs: Kwargs, one_type: bool) -> bool:
    """Whether all tensors are like the first, in rows; numbers always are."""
    if kwargs and not _KNOWN.issuperset(kwargs):
        return False
    first = args[0]
    if not isinstance(first, torch.Tensor) or not _rows(first):
        return False
    for other in args[1:]:
        if isinstance(other, torch.Tensor):
            if other.shape != first.shape or not _rows(other):
                return False
            if one_type and other.dtype != first.dtype:
                return False
        elif not isinstance(other, (int, float)):
            return False
    return True


def _alike(args: Args, kwargs: Kwargs) -> torch.Tensor | None:
    if not _fits(args, kwargs, one_type=True):
        return None
    return torch.empty(args[0].shape, dtype=args[0].dtype, device=_META)


def _in_place(args: Args, kwargs: Kwargs) -> torch.Tensor | None:
    return args[0] if _fits(args, kwargs, one_type=False) else None


def _new_empty(args: Args, kwargs: Kwargs) -> torch.Tensor | None:
    like = args[0]
    if not like.is_meta or kwargs and kwargs.keys() != {"dtype"}:
        return None
    return torch.empty(args[1], dtype=kwargs["dtype"] if kwargs else like.dtype, device=_META)


def _cat(args: Args, kwargs: Kwargs) -> torch.Tensor | None:
    parts, dim = args[0], args[1] if len(args) > 1 else 0
    first = parts[0]
    rank = first.dim()
    if kwargs or not 0 < rank < 4 or not _rows(first):  # four might be channels_last
        return None
    shape = list(first.shape)
    for other in parts[1:]:
        if other.dim() != rank or other.dtype != first.dtype or not _rows(other):
            return None
        own = list(other.shape)
        shape[dim], own[dim] = shape[dim] + own[dim], shape[dim] + own[dim]
        if own != shape:
            return None
    return torch.empty(shape, dtype=first.dtype, device=_META)


_ANSWERS: dict[OpOverload, Answer] = {
    _aten.new_empty.default: _new_empty,
    _aten.cat.default: _cat,
    **dict.fromkeys(
        (
            _aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor,
            _aten.rsub.Scalar, _aten.pow.Tensor_Scalar, _aten.neg.default, _aten.exp.default,
            _aten.sqrt.default, _aten.rsqrt.default, _aten.tanh.default, _aten.silu.default,
            _aten.sigmoid.default, _aten.gelu.default, _aten.silu_backward.default,
            _aten.sigmoid_backward.default, _aten.tanh_backward.default,
            _aten.gelu_backward.default,
        ),
        _alike,
    ),
    **dict.fromkeys(
        (_aten.add_.Tensor, _aten.sub_.Tensor, _aten.mul_.Tensor, _aten.div_.Tensor), _in_place
    ),
}  # fmt: skip
