"""Tensors of the host that have a shape and take no memory, on tier meta.

A job that offloads copies large tensors of the device to its host, and computes with the copies
there (``HybridDeviceOptimizer``: parameters in fp32, gradients and states of Adam).  On tier meta
nothing is in them.  Such a copy is a tensor of the CPU whose elements are all the same one; what an
operator makes of copies is one, too, and what it writes into them is dropped.  Their bytes count as
what the job needs of its host.

Pinned memory counts as asked for; CUDA's host allocator may round each piece up to a power of two.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from torch._ops import OpOverload

Options = Mapping[str, Any] | None  # of an operator
LEAST_BYTES = 1 << 20  # of a tensor on the host; a smaller one is a real one


def is_large(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether a new tensor on the host should have a shape only: it is of many numbers, which
    count nothing and are no places.
    """
    return dtype.is_floating_point and _num_bytes(shape, dtype) >= LEAST_BYTES


def _num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


class _Gone(weakref.ref[torch.UntypedStorage]):
    """A weak reference that knows its storage's address."""

    __slots__ = ("key",)
    key: int


class HostShapes:
    """The tensors of one process that are on its host and take no memory.

    now  : bytes that those alive would take
    high : the most that they would have taken at once
    """

    def __init__(self) -> None:
        self.now = self.high = 0
        self._alive: dict[int, tuple[int, _Gone]] = {}  # storage's address -> (bytes, its end)

    def __bool__(self) -> bool:
        return bool(self._alive)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is one of them."""
        return not tensor.is_meta and tensor.untyped_storage()._cdata in self._alive

    def make(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new one, of zeros where it is read."""
        element = torch.zeros((), dtype=dtype, device="cpu")
        storage = element.untyped_storage()
        num_bytes = _num_bytes(shape, dtype)
        gone = _Gone(storage, self._free)
        gone.key = storage._cdata
        self._alive[gone.key] = num_bytes, gone
        self.now += num_bytes
        self.high = max(self.high, self.now)
        return element.expand(shape)

    def _free(self, gone: _Gone) -> None:
        num_bytes, _ = self._alive.pop(gone.key)
        self.now -= num_bytes

    def concerned(self, args: Sequence[object], kwargs: Options) -> bool:
        """Whether an operator of these arguments works on the host, and on one of them."""
        device = (kwargs or {}).get("device")
        # a copy to another device belongs to remap.py
        if device is not None and torch.device(device).type != "cpu":
            return False
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        # the device's operators have tier meta's own answers
        if any(tensor.is_meta for tensor in tensors):
            return False
        return any(self.holds(tensor) for tensor in tensors)

    def answer(self, func: OpOverload, args: Sequence[object], kwargs: Options) -> object:
        """What ``func`` gives of shapes: results that are large take no memory either."""
        originals: dict[int, torch.Tensor] = {}  # id of a shape -> the argument that it stands for
        shapes: list[torch.Tensor] = []  # they live as long as their ids are used

        def as_shape(leaf: object) -> object:
            if isinstance(leaf, torch.Tensor):
                shape = torch.empty_like(leaf, device="meta", memory_format=torch.contiguous_format)
                originals[id(shape)] = leaf
                shapes.append(shape)
                return shape
            # where a new tensor is asked for
            if isinstance(leaf, torch.device):
                return torch.device("meta")
            return leaf

        def as_host(leaf: object) -> object:
            # what is written in place is the argument itself
            if id(leaf) in originals:
                return originals[id(leaf)]
            if isinstance(leaf, torch.Tensor) and leaf.is_meta:
                return self._result(leaf)
            return leaf

        # a shape is in no memory that could be pinned
        options = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}
        try:
            shape_args, shape_options = tree_map(as_shape, (tuple(args), options))
            out = func(*shape_args, **shape_options)
        except (RuntimeError, NotImplementedError):
            # it reads an element, or its shape depends on values: those of zeros
            return func(*args, **(kwargs or {}))
        return tree_map(as_host, out)

    def _result(self, shape: torch.Tensor) -> torch.Tensor:
        """A tensor of the host like ``shape``."""
        # of whatever type: a comparison of shapes knows no more than they do
        if _num_bytes(shape.shape, shape.dtype) >= LEAST_BYTES:
            return self.make(shape.shape, shape.dtype)
        return torch.zeros(shape.shape, dtype=shape.dtype, device="cpu")
