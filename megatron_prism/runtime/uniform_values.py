"""What holds of every element of a tensor on tier meta, though no element is known.

Values that depend on data are unknown, and they are healthy: finite numbers.  So whatever asks for
their health has one answer for each of them: ``isnan(x)`` is False and ``isfinite(x)`` True
everywhere, ``x != x`` is False, ``x < inf`` is True.  What is computed from such an answer keeps
one value for all its elements as long as each operator works element by element, moves elements
(a view, a copy to another type), or reduces them (``any``, ``sum``).

A value here is a tensor without dimensions on the host, whatever the size of the tensor that it
stands for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Function = Callable[..., object]
Args = Sequence[Any]  # of a function: tensors, numbers, lists
Uniform = Callable[[torch.Tensor], torch.Tensor | None]  # the value of all elements, if it is one

FINITE = 2.0  # what an unknown number counts as where it is compared with an infinite one


def _spellings(*names: str) -> list[Function]:
    """Every function of torch and method of a tensor with one of ``names``."""
    owners = (torch, torch.Tensor)
    spellings = []
    for owner in owners:
        spellings += [getattr(owner, name) for name in names if hasattr(owner, name)]
    return spellings


_UNHEALTHY = ("isnan", "isinf", "isneginf", "isposinf")
_HEALTH: dict[Function, bool] = {
    **dict.fromkeys(_spellings(*_UNHEALTHY), False),
    **dict.fromkeys(_spellings("isfinite"), True),
}
_COMPARISONS: dict[Function, str] = {}
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _COMPARISONS.update(dict.fromkeys(_spellings(_name, f"__{_name}__"), _name))

# operators of Python, by the names that torch's library of operators has for them
_DUNDERS = {
    "invert": "bitwise_not",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "rand": "bitwise_and",
    "ror": "bitwise_or",
    "rxor": "bitwise_xor",
    "iand": "bitwise_and",
    "ior": "bitwise_or",
    "ixor": "bitwise_xor",
    "iadd": "add",
    "imul": "mul",
    "isub": "sub",
    "radd": "add",
    "rmul": "mul",
}
# each element of the result is one of the first argument's (or of its list), in another type maybe
_MOVES = frozenset(
    (
        "all",
        "amax",
        "amin",
        "any",
        "bfloat16",
        "bool",
        "broadcast_to",
        "cat",
        "chunk",
        "clone",
        "concat",
        "contiguous",
        "cpu",
        "cuda",
        "detach",
        "double",
        "expand",
        "expand_as",
        "flatten",
        "float",
        "gather",
        "getitem",
        "half",
        "index_select",
        "int",
        "long",
        "masked_select",
        "max",
        "mean",
        "min",
        "narrow",
        "permute",
        "ravel",
        "repeat",
        "reshape",
        "select",
        "split",
        "squeeze",
        "stack",
        "t",
        "to",
        "transpose",
        "type",
        "unbind",
        "unflatten",
        "unsqueeze",
        "view",
        "view_as",
    )
)
_SUMS = frozenset(("sum", "count_nonzero"))
# arguments of these besides the first say where, and are no data
_ADDRESSED = frozenset(("gather", "getitem", "index_select", "masked_select"))
# kernels that write to a flag, and only if they meet a number that is not finite: its place
_FLAGS: dict[Function, int] = {torch._amp_foreach_non_finite_check_and_unscale_: 1}


def flag_of(func: Function, args: Args) -> torch.Tensor | None:
    """The argument that ``func`` changes only where a number is not finite, if it has one."""
    place = _FLAGS.get(func)
    return None if place is None else args[place]


def health(func: Function, args: Args) -> torch.Tensor | None:
    """What ``func`` says of each element of an unknown tensor because it is finite; None if the
    answer depends on more than that.
    """
    # comparisons with itself or with a number that is not finite: one answer for all elements
    if func in _HEALTH:
        return torch.tensor(_HEALTH[func])
    if func not in _COMPARISONS or len(args) != 2:
        return None
    compare = getattr(torch, _COMPARISONS[func])
    left, right = args
    # a number is equal to itself, unless it is none
    if left is right:
        return torch.as_tensor(compare(torch.tensor(FINITE), FINITE))
    if isinstance(right, float) and not math.isfinite(right):
        return torch.as_tensor(compare(torch.tensor(FINITE), right))
    return None


def name_of(func: Function) -> str:
    """The name that torch's library has for ``func``, without what says that it works in place."""
    name = str(getattr(func, "__name__", ""))
    if name.startswith("__") and name.endswith("__"):
        plain = name.strip("_")
        return _DUNDERS.get(plain, plain)
    return name[:-1] if name.endswith("_") else name


@functools.cache
def _pointwise(name: str) -> bool:
    """Whether torch's operator ``name`` works element by element."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    tags = [getattr(packet, overload).tags for overload in packet.overloads()]
    return any(torch.Tag.pointwise in operator_tags for operator_tags in tags)


def computed(
    func: Function,
    args: Args,
    kwargs: Mapping[str, object],
    out: torch.Tensor,
    uniform: Uniform,
) -> torch.Tensor | None:
    """The one value of all elements of ``out``, the first result of ``func``; None if there may
    be several, or if it is not known.

    Args:
        func: a function of torch or a method of a tensor, without what it writes to.
        args: its arguments.
        kwargs: its options.
        out: what it gave, on meta.
        uniform: says the one value of all elements of a tensor.
    """
    name = name_of(func)
    # elements move or are added up
    if name in _MOVES or name in _SUMS:
        return _moved(name, args, out, uniform)
    # each element is computed by itself
    if _pointwise(name):
        return _by_element(func, args, kwargs, uniform)
    return None


def _moved(name: str, args: Args, out: torch.Tensor, uniform: Uniform) -> torch.Tensor | None:
    """The value where each element of ``out`` is one of the arguments', or a sum of some."""
    first = args[0]
    # joined or stacked tensors come in a list
    if isinstance(first, list | tuple):
        sources = list(first)
    # the other tensors say where to look, and are no source
    elif name in _ADDRESSED:
        sources = [first]
    else:
        sources = [argument for argument in args if isinstance(argument, torch.Tensor)]
    if not all(isinstance(source, torch.Tensor) for source in sources) or not out.numel():
        return None
    values = [uniform(source) for source in sources]
    known_values = [value for value in values if value is not None]
    if not known_values or len(known_values) < len(values):
        return None
    if any(bool(value != known_values[0]) for value in known_values):
        return None
    value = known_values[0]
    # the same bytes as another type are other numbers
    if name == "view" and out.dtype != sources[0].dtype:
        return None
    if name in _SUMS:
        count = sources[0].numel() // out.numel()
        value = value.to(out.dtype) * count
    return value.to(out.dtype)


def _by_element(
    func: Function, args: Args, kwargs: Mapping[str, object], uniform: Uniform
) -> torch.Tensor | None:
    """The value where an element of the result follows from one element of each argument."""
    scalars: list[object] = []
    for argument in args:
        if not isinstance(argument, torch.Tensor):
            scalars.append(argument)
            continue
        value = uniform(argument)
        # False and anything is False, True or anything is True
        if value is None:
            return _decided(func, args, uniform)
        scalars.append(value.clone())
    if any(isinstance(option, torch.Tensor) for option in kwargs.values()):
        return None
    try:
        answer = func(*scalars, **kwargs)
    except Exception:  # an operator that the host lacks: nothing is known then
        return None
    return answer if isinstance(answer, torch.Tensor) and not answer.dim() else None


_ABSORBING = {"bitwise_and": False, "logical_and": False, "bitwise_or": True, "logical_or": True}


def _decided(func: Function, args: Args, uniform: Uniform) -> torch.Tensor | None:
    """The value of a conjunction or disjunction that one of its two arguments settles."""
    absorbing = _ABSORBING.get(name_of(func))
    if absorbing is None:
        return None
    for argument in args[:2]:
        value = uniform(argument) if isinstance(argument, torch.Tensor) else None
        if value is not None and value.dtype == torch.bool and bool(value) is absorbing:
            return value
    return None
