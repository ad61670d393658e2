"""What is known of values on tier meta, where tensors have shapes only.

Control values keep their numbers: a tensor that was made of a few numbers on the host (a learning
rate, flags of what a job does), lengths that came from the host (where documents of a packed
sequence end, how many tokens each expert has), and what is computed from such tensors alone.
Everything else depends on data, and is ``Unknown`` where it is read: a number that is finite, so
that what asks for its health is told so (``uniform_values``).

The numbers lie in a cell: one for a tensor of one element and its views, else one for each, which
all end when somebody writes to one of them.  A cell that is ``uniform`` has one number, which
stands for every element.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from megatron_prism.runtime import uniform_values

PLACEHOLDER = 2.0
_CELL, _ASSERTED = "_prism_known", "_prism_asserted"
Args = Sequence[Any]
Options = Mapping[str, Any]
_MOST, _FEW = 1 << 22, 1 << 10  # elements of a tensor of lengths
_MADE = {torch.arange: _MOST, torch.zeros: _FEW}  # of integers: known as they are made


@dataclass
class _Cell:
    """The value of a tensor, on the host; ``valid`` is shared by all that see the same memory, and
    ``uniform``: the value has no dimensions, and each element has it.
    """

    value: torch.Tensor
    valid: list[bool] = field(default_factory=lambda: [True])
    uniform: bool = False


class Unknown(float):
    """A number that depends on data: finite and positive for what computes with it, ``unknown``
    where it, or what was computed from it, is printed.
    """

    def __format__(self, spec: str) -> str:
        # the width of the number's place, so that tables keep their columns
        width = re.match(r"(?:.?[<>=^])?[-+ ]?#?0?(\d+)", spec)
        return f"{'unknown':>{width[1] if width else 0}}"

    def __repr__(self) -> str:
        return "unknown"

    __str__ = __repr__

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float.__add__(self, 0.0),)  # its reader may not have this class


def _computes(name: str) -> Callable[..., object]:
    original = getattr(float, name)

    def method(self: Unknown, *operands: object) -> object:
        result = original(self, *operands)
        if isinstance(result, float):
            return Unknown(result)
        return result  # NotImplemented

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
    if cell is None or not cell.valid[0]:
        return None
    if cell.uniform:
        return cell.value.expand(tensor.shape)
    return cell.value.reshape(tensor.shape)


def _uniform(tensor: torch.Tensor) -> torch.Tensor | None:
    """The one value of all elements of a tensor, without dimensions, if that is known."""
    cell = getattr(tensor, _CELL, None)
    if cell is None or not cell.valid[0]:
        return None
    if cell.uniform:
        return cell.value
    return cell.value.reshape(()) if cell.value.numel() == 1 else None


def asserted(tensor: torch.Tensor) -> bool:
    """How an unknown truth value reads: ``all``'s as what asserts it expects."""
    return hasattr(tensor, _ASSERTED)


def learn(tensor: torch.Tensor, data: object) -> None:
    """``tensor`` was made of ``data``: numbers of the host, or something unknown."""
    if not tensor.is_meta or not 0 < tensor.numel() <= _FEW:
        return
    if isinstance(data, list | tuple):  # of a subclass, too, which tree_leaves takes for a leaf
        data = [*data]
    # one unknown part makes all unknown
    for leaf in tree_leaves(data):
        if not isinstance(leaf, int | float) or isinstance(leaf, Unknown | UnknownCount):
            return
    host = torch.tensor(data, dtype=tensor.dtype, device="cpu")
    _keep(tensor, host.expand(tensor.shape).clone())


def keep_lengths(tensor: torch.Tensor, host: torch.Tensor) -> None:
    """``tensor`` is the copy of ``host``, whose integers are lengths and no tokens: of 32 bits, few
    in a row (tokens of experts, transformer_engine/pytorch/ops/basic/grouped_linear.py:1044
    @2.20), or places of packed sequences, which say where these end.
    """
    if hasattr(host, "__tensor_flatten__"):  # lengths of a nested tensor
        for name in host.__tensor_flatten__()[0]:
            keep_lengths(getattr(tensor, name), getattr(host, name))
        return
    if host.device.type != "cpu" or not 0 < host.numel() <= _MOST:
        return
    # tokens are 64-bit, many, and in rows of batches
    few = host.dtype == torch.int64 and host.dim() == 1 and host.numel() <= _FEW
    if few or host.dtype == torch.int32 or _are_places(host):
        _keep(tensor, host.detach().clone())


def _are_places(host: torch.Tensor) -> bool:
    """Whether [1, tokens] count from 0 in each of one or more sequences."""
    if host.dtype != torch.int64 or host.dim() != 2 or len(host) != 1:
        return False
    row = host[0]
    before = torch.cat((host.new_tensor([-1]), row[:-1]))
    # each place is one more than that before it, or 0 where a sequence begins
    counts_on = row == before + 1
    begins_sequence = row == 0
    return bool((counts_on | begins_sequence).all())


def forget(tensor: torch.Tensor) -> None:
    """Something unknown was written to ``tensor``."""
    cell = getattr(tensor, _CELL, None)
    if cell is not None:
        cell.valid[0] = False


def summed(tensor: torch.Tensor, count: int) -> None:
    """``count`` members have added up their ``tensor``, of which other members' are unknown, but as
    healthy as this one's: so many times an answer about health, else something unknown.
    """
    cell = getattr(tensor, _CELL, None)
    if cell is None:
        return
    # a flag of all elements, such as: how many are not finite
    settled = cell.valid[0] and cell.uniform and tensor.dtype != torch.bool
    forget(tensor)
    if settled:
        setattr(tensor, _CELL, _Cell(cell.value * count, uniform=True))


def exchanged(outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor]) -> None:
    """Members have given each other ``ins``, and this one has got ``outs``: unknown values, but the
    same answer from each about health.
    """
    values = list[torch.Tensor]()
    # a tensor of which nothing is known settles nothing
    for tensor in ins:
        cell = getattr(tensor, _CELL, None)
        if cell is not None and cell.valid[0] and cell.uniform:
            values.append(cell.value)
    settled = bool(values) and len(values) == len(ins)
    settled = settled and all(bool(value == values[0]) for value in values)
    # outputs forget what they were, and all have the one answer if there is one
    for out in outs:
        forget(out)
        if settled:
            setattr(out, _CELL, _Cell(values[0].to(out.dtype), uniform=True))


def _known(args: Args, kwargs: Options) -> bool:
    """Whether something may be known of a tensor among the arguments."""
    for arg in (*args, *kwargs.values()) if kwargs else args:
        if hasattr(arg, _CELL):
            return True
        if isinstance(arg, (list, tuple)) and any(hasattr(item, _CELL) for item in arg):
            return True
    return False


def _tensors(args: Args, kwargs: Options) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]


def _computed(
    func: Callable[..., object], args: Args, kwargs: Options, shapes: bool = False
) -> tuple[object, dict[int, torch.Tensor]] | None:
    """(what ``func`` gives on the host, the values of its arguments after it by their ids); None if
    one is not known or the host lacks the operator.  ``shapes``: floats without a gradient may be
    anything, as what is known says where they go.
    """
    copies: dict[int, torch.Tensor] = {}
    for tensor in _tensors(args, kwargs):
        value = value_of(tensor)
        # a copy, as the function may write into its arguments
        if value is not None and value.numel() <= _MOST:
            copies[id(tensor)] = value.clone(memory_format=torch.contiguous_format)
        # only integers say where floats go: one zero stands for all elements
        elif value is None and shapes and tensor.is_floating_point() and not tensor.requires_grad:
            zero = torch.zeros((), dtype=tensor.dtype, device="cpu")
            copies[id(tensor)] = zero.expand(tensor.shape)
        else:
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
    known.
    """
    if not _known(args, kwargs):
        return None
    # with the values themselves where they are known, else with tensors of their shapes
    values = _computed(func, args, kwargs)
    shapes = values or _computed(func, args, kwargs, shapes=True)
    if shapes is None:
        return None

    def stand_in(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensor = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        if values is not None:
            _keep(tensor, leaf)
        return tensor

    answer, _ = shapes
    return tree_map(stand_in, answer)


def follow(func: Callable[..., object], args: Args, kwargs: Options, out: Any) -> None:
    """``func`` of meta tensors gave ``out``: what is known of that, and of what it wrote to."""
    # nearly all calls end here
    if not _known(args, kwargs):
        _follow_unknown(func, args, kwargs, out)
        return
    tensors = _tensors(args, kwargs)
    name = getattr(func, "__name__", "")
    # written through another name: nothing is known any more
    if "out" in kwargs or name == "__set__":
        for tensor in tensors:
            forget(tensor)
        return
    outs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    writes = _writes(name)
    if _follow_uniform(func, args, kwargs, outs, writes):
        return
    if writes:
        _follow_write(func, args, kwargs, tensors)
        return
    # of many numbers only those are followed that were lengths
    most_elements = 1 if all(tensor.numel() == 1 for tensor in tensors) else _MOST
    if not outs or any(tensor.numel() > most_elements for tensor in outs):
        return
    answer_and_arguments = _computed(func, args, kwargs)
    if answer_and_arguments is None:
        _learn_health(func, args, outs)
        return
    answer, _ = answer_and_arguments
    values = [leaf for leaf in tree_leaves(answer) if isinstance(leaf, torch.Tensor)]
    for tensor, value in zip(outs, values, strict=False):
        if tensor.shape == value.shape and not getattr(tensor, _CELL, None):
            _keep(tensor, value, _cell_of_memory(tensor, tensors))


def _writes(name: str) -> bool:
    """Whether a function of this name changes its first argument: add_, __iadd__, __setitem__."""
    if name.endswith("__"):
        is_in_place = name.startswith("__i") and name != "__invert__"
        return is_in_place or name == "__setitem__"
    return name.endswith("_")


def _follow_write(
    func: Callable[..., object], args: Args, kwargs: Options, tensors: Sequence[torch.Tensor]
) -> None:
    """``func`` has changed its first argument: its new value is known where all others are."""
    answer_and_arguments = _computed(func, args, kwargs)
    # an operand is unknown, and so is the result
    if answer_and_arguments is None:
        _forget_written(func, args, tensors)
        return
    _, after = answer_and_arguments
    changed = tensors[0]
    forget(changed)
    _keep(changed, after[id(changed)])


def _follow_unknown(func: Callable[..., object], args: Args, kwargs: Options, out: Any) -> None:
    """``func`` of arguments of which nothing is known gave ``out``."""
    # values that depend on no tensor, if they are few integers
    if func in _MADE and out.is_meta:
        if not out.is_floating_point() and 0 < out.numel() <= _MADE[func]:
            value: Any = func(*args, **{**kwargs, "device": "cpu"})
            _keep(out, value)
    elif func is torch.full and out.is_meta:
        learn(out, args[1] if len(args) > 1 else kwargs["fill_value"])
    elif func in (torch.all, torch.Tensor.all) and out.is_meta and out.numel() == 1:
        setattr(out, _ASSERTED, True)
    elif isinstance(out, torch.Tensor) and out.dtype == torch.bool:
        _learn_health(func, args, [out])


def _learn_health(func: Callable[..., object], args: Args, outs: Sequence[torch.Tensor]) -> None:
    """``func`` may have asked whether unknown numbers are finite: they are."""
    value = uniform_values.health(func, args) if outs and outs[0].is_meta else None
    if value is not None:
        setattr(outs[0], _CELL, _Cell(value, uniform=True))


def _follow_uniform(
    func: Callable[..., object],
    args: Args,
    kwargs: Options,
    outs: Sequence[torch.Tensor],
    writes: bool,
) -> bool:
    """Whether all elements of the result have one value, which it is given then; an argument of
    many elements has one value, too.
    """
    tensors = _tensors(args, kwargs)
    cells = [getattr(tensor, _CELL, None) for tensor in tensors]
    if not any(cell is not None and cell.uniform for cell in cells):
        return False
    # what is written to, or what comes out
    result = args[0] if writes else (outs[0] if outs else None)
    if not isinstance(result, torch.Tensor) or not result.is_meta:
        return False
    value = uniform_values.computed(func, args, kwargs, result, _uniform)
    if value is None:
        return False
    value = value.to(result.dtype)
    if writes:
        # what else sees the memory may see a part of it, or more
        forget(result)
        setattr(result, _CELL, _Cell(value, uniform=True))
    elif getattr(result, _CELL, None) is None:
        base = _cell_of_memory(result, tensors)
        # a view is known as long as the memory under it is
        valid = [True] if base is None else base.valid
        setattr(result, _CELL, _Cell(value, valid, uniform=True))
    return True


def _forget_written(
    func: Callable[..., object], args: Args, tensors: Sequence[torch.Tensor]
) -> None:
    """``func`` has written something unknown to its first argument, or to several."""
    # a flag that tells of numbers that are not finite: it keeps what it says
    flag = uniform_values.flag_of(func, args)
    several = getattr(func, "__name__", "")[:1] == "_"
    for tensor in tensors if several else tensors[:1]:
        if tensor is not flag:
            forget(tensor)


def _cell_of_memory(tensor: torch.Tensor, tensors: Sequence[torch.Tensor]) -> _Cell | None:
    """The cell of the first of ``tensors`` that sees the same memory as ``tensor``."""
    # a view has the storage of its base
    memory = tensor.untyped_storage()._cdata
    for candidate in tensors:
        if candidate.untyped_storage()._cdata == memory:
            cell: _Cell | None = getattr(candidate, _CELL, None)
            return cell
    return None


def _keep(tensor: torch.Tensor, value: torch.Tensor, base: _Cell | None = None) -> None:
    """``tensor`` is known to be ``value``; ``base``: the cell of what it is a view of."""
    cell = getattr(tensor, _CELL, None)
    if cell is not None:
        cell.value, cell.valid, cell.uniform = value, [True], False
    elif base is None:
        setattr(tensor, _CELL, _Cell(value))
    elif base.value.numel() == value.numel() == 1:  # one number, seen by both
        setattr(tensor, _CELL, base)
    else:  # a part: known until somebody writes to the whole
        setattr(tensor, _CELL, _Cell(value, base.valid))
