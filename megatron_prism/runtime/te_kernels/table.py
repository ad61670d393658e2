"""The table of Transformer Engine's compiled kernels, and what its rows share.

A row is a function of the kernel's name and arguments (transformer_engine/pytorch/csrc/extensions):
it returns tensors of the shapes and types that the kernel returns, and asks for memory in the
order in which C++ does.  What it asks for and does not return is a temporary.  On tier cpu ``fill``
writes what the kernel computes, by torch's own operators with sums in fp32.  The first line of its
docstring ends with where that stands, ``file.cpp:line @release``.

A kernel without a row is refused by its name; on tier cpu also one of ``SHAPES_ONLY``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.core.megatron_source import Release
from megatron_prism.runtime.te_kernels.enumerations import Member

Kernel = Callable[..., Any]
Quantizer = Any  # an object of Transformer Engine's, or None
Values = Any  # a tensor, or Transformer Engine's object for one in FP8
TABLE: dict[str, Kernel] = {}
SHAPES_ONLY: set[str] = set()
_release: Release = (0, 0)
_device = torch.device("meta")


def release() -> Release:
    """The release whose Python calls; (0, 0) before it is imported."""
    return _release


def adopt(found: Release, device: str = "meta") -> None:
    """From now on ``found`` decides what ``since`` answers, and tensors are made on ``device``."""
    global _release, _device
    _release, _device = found, torch.device(device)


def since(major: int, minor: int) -> bool:
    """Whether C++ does so from this release on: Python cannot tell.  Dates are of TE's git tags."""
    return _release >= (major, minor)


def kernel(*names: str, values: bool = True) -> Callable[[Kernel], Kernel]:
    """Enter a function as the row of ``names`` (else of its own name).

    values : whether it computes; else it has shapes alone
    """

    def enter(function: Kernel) -> Kernel:
        rows = dict.fromkeys(names or (function.__name__,), function)
        TABLE.update(rows)
        SHAPES_ONLY.update(() if values else rows)
        return function

    return enter


def refuse(name: str) -> NoReturn:
    """Raise UnsupportedError that names the kernel ``name``."""
    if name in SHAPES_ONLY and _device.type != "meta":
        what = f"Transformer Engine's kernel {name} has shapes alone, and tier cpu wants values"
        raise UnsupportedError(what, fix="--prism-tier meta, or leave out the option that asks")
    what = f"Transformer Engine's kernel {name} has no row in our table (runtime/te_kernels)"
    raise UnsupportedError(what, fix="leave out the option that asks for it, or --prism-tier cuda")


def new(shape: Sequence[int] | int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """A request to the allocator; bytes unless ``dtype`` says otherwise."""
    return torch.empty(shape, dtype=dtype, device=_device)


def scratch(shape: Sequence[int] | int, dtype: torch.dtype = torch.uint8) -> None:
    """A request for what only the kernel itself uses: where shapes count."""
    if _device.type == "meta":
        new(shape, dtype)


def fill(out: Tensor, value: Callable[[], Tensor]) -> Tensor:
    """``out``, where it has values with ``value()`` in it; that may have another type and shape."""
    if not out.is_meta:
        with torch.no_grad():
            out.copy_(value().reshape(out.shape))
    return out


def wide(x: Tensor) -> Tensor:
    """fp32 [rows, columns]."""
    return x.reshape(-1, x.shape[-1]).float()


def plain(value: Any) -> Tensor | None:
    return value if isinstance(value, Tensor) else None


def tensors_in(args: Iterable[Any]) -> list[Tensor]:
    return [a for a in args if isinstance(a, Tensor)]


def member(kind: str, args: Iterable[Any]) -> str:
    """The name of the first argument that belongs to the enumeration ``kind``, in small letters."""
    for value in args:
        if isinstance(value, Member) and value.kind == kind:
            return value.name.removeprefix("NVTE_").lower()
    return ""


_TORCH = {
    0: torch.uint8, 2: torch.int32, 4: torch.float32, 5: torch.float16, 6: torch.bfloat16,
    7: torch.uint8, 8: torch.uint8, 10: torch.uint8,
}  # fmt: skip


def dtype_of(value: Any) -> torch.dtype:
    """torch's type of an NVTEDType (common/include/transformer_engine/transformer_engine.h:25);
    FP8 and FP4 lie in memory as bytes."""
    return value if isinstance(value, torch.dtype) else _TORCH[int(value)]


def rows_of(shape: Sequence[int]) -> int:
    """How many rows a tensor has for a kernel that knows two dimensions."""
    return prod(shape[:-1])
