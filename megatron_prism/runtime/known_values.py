"""What is known of values on tier meta, where tensors have shapes only.

Control values keep their numbers: a tensor that was made of a few numbers on the host (a learning
rate, flags of what a job does), lengths that came from the host (where documents of a packed
sequence end, how many tokens each expert has), and what is computed from such tensors alone.
Everything else depends on data, and is ``Unknown`` where it is read.

The numbers lie in a cell: one for a tensor of one element and its views, else one for each, which
all end when somebody writes to one of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

PLACEHOLDER = 2.0
_CELL, _ASSERTED = "_prism_known", "_prism_asserted"
Args = Sequence[Any]
Options = Mapping[str, Any]
_MOST, _FEW = 1 << 22, 1 << 10  # elements of a tensor of lengths
_MADE = {torch.arange: _MOST, torch.zeros: _FEW}  # of integers: known as they are made


@dataclass
class _Cell:
    """The value of a tensor, on the host; ``valid`` is shared by all that see the same memory."""

    value: torch.Tensor
    valid: list[bool] = field(default_factory=lambda: [True])


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
    return cell.value.reshape(tensor.shape) if cell is not None and cell.valid[0] else None


def asserted(tensor: torch.Tensor) -> bool:
    """How an unknown truth value reads: ``all``'s as what asserts it expects."""
    return hasattr(tensor, _ASSERTED)


def learn(tensor: torch.Tensor, data: object) -> None:
    """``tensor`` was made of ``data``: numbers of the host, or something unknown."""
    few = tensor.is_meta and 0 < tensor.numel() <= _FEW
    if few and all(
        isinstance(one, int | float) and not isinstance(one, Unknown | UnknownCount)
        for one in tree_leaves([*data] if isinstance(data, list | tuple) else data)
    ):
        _keep(tensor, torch.tensor(data, dtype=tensor.dtype, device="cpu"))


def keep_lengths(tensor: torch.Tensor, host: torch.Tensor) -> None:
    """``tensor`` is the copy of ``host``, whose integers are lengths and no tokens: of 32 bits, few
    in a row (tokens of experts, transformer_engine/pytorch/ops/basic/grouped_linear.py:1044
    @2.20), or places of packed sequences, which say where these end."""
    if hasattr(host, "__tensor_flatten__"):  # lengths of a nested tensor
        for name in host.__tensor_flatten__()[0]:
            keep_lengths(getattr(tensor, name), getattr(host, name))
        return
    if host.device.type != "cpu" or not 0 < host.numel() <= _MOST:
        return
    few = host.dtype == torch.int64 and host.dim() == 1 and host.numel() <= _FEW
    if few or host.dtype == torch.int32 or _are_places(host):
        _keep(tensor, host.detach().clone())


def _are_places(host: torch.Tensor) -> bool:
    """Whether [1, tokens] count from 0 in each of one or more sequences."""
    if host.dtype != torch.int64 or host.dim() != 2 or len(host) != 1:
        return False
    row, before = host[0], torch.cat((host.new_tensor([-1]), host[0, :-1]))
    return bool(((row == before + 1) | (row == 0)).all())


def forget(tensor: torch.Tensor) -> None:
    """Something unknown was written to ``tensor``."""
    cell = getattr(tensor, _CELL, None)
    if cell is not None:
        cell.valid[0] = False


def _known(args: Args, kwargs: Options) -> bool:
    """Whether something may be known of a tensor among the arguments."""
    for arg in (*args, *kwargs.values()) if kwargs else args:
        if hasattr(arg, _CELL):
            return True
        if isinstance(arg, (list, tuple)) and any(hasattr(one, _CELL) for one in arg):
            return True
    return False


def _tensors(args: Args, kwargs: Options) -> list[torch.Tensor]:
    return [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]


def _computed(
    func: Callable[..., object], args: Args, kwargs: Options, shapes: bool = False
) -> tuple[object, dict[int, torch.Tensor]] | None:
    """(what ``func`` gives on the host, the values of its arguments after it by their ids); None if
    one is not known or the host lacks the operator.  ``shapes``: floats without a gradient may be
    anything, as what is known says where they go."""
    values = {id(one): (one, value_of(one)) for one in _tensors(args, kwargs)}
    copies = {key: value.clone() for key, (_, value) in values.items() if value is not None}
    for key, (one, value) in values.items() if shapes else ():
        if value is None and one.is_floating_point() and not one.requires_grad:
            copies[key] = torch.zeros((), dtype=one.dtype, device="cpu").expand(one.shape)
    if len(copies) < len(values):
        return None

    def host(leaf: object) -> object:
        if isinstance(leaf, torch.Tensor):
            return copies[id(leaf)]
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    try:
        with torch.no_grad():
            args, kwargs = tree_map(host, (tuple(args), dict(kwargs)))
            return func(*args, **kwargs), copies
    except Exception:  # an operator that the host lacks: nothing is known then
        return None


def on_host(func: Callable[..., object], args: Args, kwargs: Options) -> object:
    """What ``func`` gives, whose shape depends on values, as meta tensors; None if that is not
    known."""
    if not _known(args, kwargs):
        return None
    found = _computed(func, args, kwargs)
    shapes = found or _computed(func, args, kwargs, shapes=True)
    if shapes is None:
        return None

    def stand_in(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        made = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        if found is not None:
            _keep(made, leaf)
        return made

    return tree_map(stand_in, shapes[0])


def follow(func: Callable[..., object], args: Args, kwargs: Options, out: Any) -> None:
    """``func`` of meta tensors gave ``out``: what is known of that, and of what it wrote to."""
    if not _known(args, kwargs):  # nearly all calls end here
        if func in _MADE and out.is_meta:
            if not out.is_floating_point() and 0 < out.numel() <= _MADE[func]:
                made: Any = func(*args, **{**kwargs, "device": "cpu"})
                _keep(out, made)
        elif func in (torch.all, torch.Tensor.all) and out.is_meta and out.numel() == 1:
            setattr(out, _ASSERTED, True)
        return
    tensors = _tensors(args, kwargs)
    name = getattr(func, "__name__", "")
    in_place = name[:3] == "__i" or name == "__setitem__"
    writes = (name.endswith("_") and not name.endswith("__")) or in_place
    if "out" in kwargs or name == "__set__":
        for one in tensors:
            forget(one)
        return
    outs = [one for one in tree_leaves(out) if isinstance(one, torch.Tensor)]
    size = 1 if all(one.numel() == 1 for one in tensors) else _MOST
    if not writes and (not outs or any(one.numel() > size for one in outs)):
        return
    found = _computed(func, args, kwargs)
    if found is None:
        for one in tensors if name[:1] == "_" else tensors[:1]:  # _amp_…_ writes to the others too
            if writes:
                forget(one)
        return
    answer, after = found
    if writes:
        forget(tensors[0])
        _keep(tensors[0], after[id(tensors[0])])
        return
    values = [one for one in tree_leaves(answer) if isinstance(one, torch.Tensor)]
    for one, value in zip(outs, values, strict=False):
        if one.shape == value.shape and not getattr(one, _CELL, None):
            memory = one.untyped_storage()._cdata
            shared = [t for t in tensors if t.untyped_storage()._cdata == memory]
            _keep(one, value, getattr(shared[0], _CELL) if shared else None)


def _keep(tensor: torch.Tensor, value: torch.Tensor, base: _Cell | None = None) -> None:
    """``tensor`` is known to be ``value``; ``base``: the cell of what it is a view of."""
    cell = getattr(tensor, _CELL, None)
    if cell is not None:
        cell.value, cell.valid = value, [True]
    elif base is not None and base.value.numel() == value.numel() == 1:
        setattr(tensor, _CELL, base)
    else:
        setattr(tensor, _CELL, _Cell(value) if base is None else _Cell(value, base.valid))
