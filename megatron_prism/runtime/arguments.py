"""Which tensors does a c10d call take, and how large is its message?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron_prism.runtime.signatures import Args

__all__ = ["arguments", "message_size", "size_of"]


def size_of(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of all of them."""
    return sum(t.numel() * t.element_size() for t in tensors)


def message_size(args: Args) -> int:
    """Bytes of the larger side of a call, as the table of collectives counts them."""
    first, second = args[0], args[1] if len(args) > 1 else None
    if isinstance(second, torch.Tensor):  # out, in, ..
        return max(first.nbytes, second.nbytes)
    if isinstance(second, list) or len(first) != 1:
        return max(size_of(_flat(first)), size_of(_flat(second)))
    size: int = first[0].nbytes
    return size


def _flat(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _flat(item)]
    return []


def arguments(op: str, args: Args) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(inputs, outputs) of a c10d call: outputs come first where there are two."""
    if op == "barrier":
        return [], []
    first = _flat(args[0])
    if op == "send":
        return first, []
    if op == "recv":
        return [], first
    if op in ("all_reduce", "broadcast", "reduce"):
        return first, first
    return _flat(args[1]), first
