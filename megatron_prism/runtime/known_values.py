"""What is known of values on tier meta, where tensors have shapes only.

A one-element tensor that was made of numbers on the host (a learning rate, a loss scale) keeps its
number, and so does what is computed from such tensors alone.  Everything else depends on data, and
is ``Unknown`` where it is read.

The number lies in a cell, a list of one host tensor, that a tensor and its views share; ``[None]``
once somebody wrote what nobody knows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["PLACEHOLDER", "Unknown", "UnknownCount", "follow", "forget", "learn", "value_of"]

PLACEHOLDER = 2.0
_CELL = "_prism_known"


class Unknown(float):
    """A number that depends on data: finite and positive for what computes with it, ``unknown``
    where it, or what was computed from it, is printed."""

    def __format__(self, spec: str) -> str:
        width = re.match(r"(?:.?[<>=^])?[-+ ]?#?0?(\d+)", spec)
        return f"{'unknown':>{width[1] if width else 0}}"

    def __repr__(self) -> str:
        return "unknown"

    __str__ = __repr__

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float.__add__(self, 0.0),)  # its reader may not have this class


def _computes(name: str) -> Callable[..., object]:
    original = getattr(float, name)

    def method(self: Unknown, *others: object) -> object:
        found = original(self, *others)
        return Unknown(found) if isinstance(found, float) else found

    return method


for _name in ("add", "sub", "mul", "truediv", "pow", "floordiv", "mod"):
    for _kind in (f"__{_name}__", f"__r{_name}__"):
        setattr(Unknown, _kind, _computes(_kind))
for _kind in ("__neg__", "__pos__", "__abs__"):
    setattr(Unknown, _kind, _computes(_kind))


class UnknownCount(int):
    """A whole number that depends on data: 0, also for what computes with it."""


def value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The value of a meta tensor on the host, if it has a known one."""
    cell = getattr(tensor, _CELL, None)
    return None if cell is None or cell[0] is None else cell[0].reshape(tensor.shape)


def learn(tensor: torch.Tensor, data: object) -> None:
    """``tensor`` was made of ``data``: numbers of the host, or something unknown."""
    if tensor.is_meta and tensor.numel() == 1:
        leaf = data
        while isinstance(leaf, (list, tuple)):
            leaf = leaf[0]
        if isinstance(leaf, (int, float)) and not isinstance(leaf, Unknown | UnknownCount):
            _keep(tensor, torch.tensor(leaf, dtype=tensor.dtype, device="cpu"))


def forget(tensor: torch.Tensor) -> None:
    """Something unknown was written to ``tensor``."""
    cell = getattr(tensor, _CELL, None)
    if cell is not None:
        cell[0] = None


def follow(
    func: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any], out: object
) -> None:
    """``func`` of meta tensors gave ``out``: what is known of that, and of what it wrote to."""
    for arg in (*args, *kwargs.values()):  # nearly all calls end here
        if getattr(arg, _CELL, None) or (
            isinstance(arg, (list, tuple)) and any(getattr(one, _CELL, None) for one in arg)
        ):
            break
    else:
        return
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    name = getattr(func, "__name__", "")
    writes = (name.endswith("_") and not name.endswith("__")) or name[:3] == "__i"
    if "out" in kwargs or name in ("__setitem__", "__set__"):  # in part, perhaps
        for one in tensors:
            forget(one)
        return
    if not writes and (not isinstance(out, torch.Tensor) or out.numel() != 1):
        return
    values = [value_of(one) for one in tensors]
    if any(value is None for value in values):
        for one in tensors if name[:1] == "_" else tensors[:1]:  # _amp_…_ writes to the others too
            if writes:
                forget(one)
        return
    pairs = zip(tensors, values, strict=True)
    copies = {id(one): value.clone() for one, value in pairs if value is not None}

    def on_host(leaf: object) -> object:
        if isinstance(leaf, torch.Tensor):
            return copies[id(leaf)]
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    try:
        with torch.no_grad():
            args, kwargs = tree_map(on_host, (tuple(args), dict(kwargs)))
            found = func(*args, **kwargs)
    except Exception:  # an operator that the host lacks: nothing is known then
        found = None
    if writes:
        _keep(tensors[0], copies[id(tensors[0])] if found is not None else None)
    elif isinstance(found, torch.Tensor) and found.numel() == 1:
        assert isinstance(out, torch.Tensor)
        if out.untyped_storage()._cdata == tensors[0].untyped_storage()._cdata:
            setattr(out, _CELL, getattr(tensors[0], _CELL))
        else:
            _keep(out, found)


def _keep(tensor: torch.Tensor, value: torch.Tensor | None) -> None:
    value = None if value is None else value.reshape(())
    cell = getattr(tensor, _CELL, None)
    if cell is None:
        setattr(tensor, _CELL, [value])
    else:
        cell[0] = value
