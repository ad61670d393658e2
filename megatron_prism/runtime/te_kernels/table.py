"""The table of Transformer Engine's compiled kernels, and what its rows share.

A row is a function of the kernel's name and arguments (transformer_engine/pytorch/csrc/extensions):
it returns tensors of the shapes and types that the kernel returns, and asks for memory in the
order in which C++ does.  What it asks for and does not return is a temporary.  On tier cpu ``fill``
writes what the kernel computes, by torch's own operators with sums in fp32.  The first line of its
docstring ends with where that stands, ``file.cpp:line @release``.

A kernel without a row is refused by its name; on tier cpu also one of ``SHAPES_ONLY``.
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.core.jobs.megatron_source import Release

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


def adopt(release: Release, device: str = "meta") -> None:
    """From now on ``release`` decides what ``since`` answers; tensors are made on ``device``."""
    global _release, _device
    _release = release
    _device = torch.device(device)


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


WITHOUT_VALUES = "has shapes alone, and tier cpu wants values"


def refuse(name: str, why: str = "has no row in our table (runtime/te_kernels)") -> NoReturn:
    """Raise UnsupportedError that names the kernel ``name``."""
    if name in SHAPES_ONLY and _device.type != "meta":
        why = WITHOUT_VALUES
    meta = "--prism-tier meta, or leave out the option that asks"
    cuda = "leave out the option that asks for it, or --prism-tier cuda"
    fix = meta if why == WITHOUT_VALUES else cuda
    raise UnsupportedError(f"Transformer Engine's kernel {name} {why}", fix=fix)


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


def gradient(of: Callable[[Tensor], Any], x: Tensor, *grads: Tensor) -> Tensor:
    """Of ``of(x)`` in fp32, one tensor or several with a gradient each; ``of`` may be linear, and
    ``x`` anything of the right shape.
    """
    leaf = x.detach().float().requires_grad_()
    with torch.enable_grad():
        results = of(leaf)
    if not isinstance(results, tuple):
        results = (results,)
    grads_of_results = [
        grad.float().view(result.shape) for grad, result in zip(grads, results, strict=True)
    ]
    return torch.autograd.grad(results, leaf, grads_of_results)[0]


def wide(x: Tensor) -> Tensor:
    """fp32 [rows, columns]."""
    return x.reshape(-1, x.shape[-1]).float()


def tensors_in(args: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among the arguments of a kernel."""
    return [a for a in args if isinstance(a, Tensor)]


def member(kind: str, args: Iterable[Any]) -> str:
    """The name of the first argument that belongs to the enumeration ``kind``, in small letters."""
    for value in args:
        if isinstance(value, Member) and value.kind == kind:
            return value.name.removeprefix("NVTE_").lower()
    return ""


_TORCH = {
    0: torch.uint8,
    2: torch.int32,
    4: torch.float32,
    5: torch.float16,
    6: torch.bfloat16,
    7: torch.uint8,
    8: torch.uint8,
    10: torch.uint8,
}


def dtype_of(value: Any) -> torch.dtype:
    """torch's type of an NVTEDType (common/include/transformer_engine/transformer_engine.h:25);
    FP8 and FP4 lie in memory as bytes.
    """
    return value if isinstance(value, torch.dtype) else _TORCH[int(value)]


def rows_of(shape: Sequence[int]) -> int:
    """How many rows a tensor has for a kernel that knows two dimensions."""
    return prod(shape[:-1])


# -- the library -----------------------------------------------------------------------------------
# enumerations that Python stores by number: their members in C++'s order
_ORDERED_MEMBERS = {
    "FP8FwdTensors": "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT "
    "GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
    "FP8BwdTensors": "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3",
}
_DTYPES = {
    "kByte": 0,
    "kInt32": 2,
    "kFloat32": 4,
    "kFloat16": 5,
    "kBFloat16": 6,
    "kFloat8E4M3": 7,
    "kFloat8E5M2": 8,
    "kFloat4E2M1": 10,
}
_BACK_ENDS = {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
_LAST_MAX512 = (2, 17)  # cuDNN's kernel of up to 512 rows went with 2.18


class Member(int):
    """A member of an enumeration ``kind`` that is made as it is asked for."""

    kind: str
    name: str

    @property
    def value(self) -> int:
        return int(self)

    def __repr__(self) -> str:
        return f"{self.kind}.{self.name}"


class _Unknown(type):
    """What the library has under a name without a row: an enumeration, whose members Python
    compares and prints, or what is called, and refused by its name.
    """

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        member = Member(sum(isinstance(value, Member) for value in vars(cls).values()))
        member.kind, member.name = cls.__name__, name
        setattr(cls, name, member)
        return member

    def __call__(cls, *args: object, **options: object) -> NoReturn:
        refuse(cls.__name__)


class Library(types.ModuleType):
    """``transformer_engine_torch`` of the release and device that were adopted.

    Names and numbers of enumerations are C++'s where Python stores them or, in 2.20, holds C++'s
    list against its own (common/util/pybind_helper.h @v2.18).
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, "A stand-in of megatron_prism.")
        back_ends = dict(_BACK_ENDS)
        # later releases lack this back-end
        if _release <= _LAST_MAX512:
            back_ends["NVTE_F16_max512_seqlen"] = 0
        for kind, members in {"DType": _DTYPES, "NVTE_Fused_Attn_Backend": back_ends}.items():
            setattr(self, kind, enum.IntEnum(kind, members))
        for kind, member_names in _ORDERED_MEMBERS.items():
            setattr(self, kind, enum.IntEnum(kind, member_names, start=0))
        # on shapes all kernels answer, with values only those that are computed
        left_out = set() if _device.type == "meta" else SHAPES_ONLY
        for row in TABLE.keys() - left_out:
            setattr(self, row, _checked(row, TABLE[row]))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _Unknown(name, (), {}))
        return getattr(self, name)


def _checked(name: str, row: Kernel) -> Kernel:
    """``row``; arguments that only a later release has are refused by the kernel's name."""

    @functools.wraps(row)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return row(*args, **options)
        # a TypeError of the call itself, or of something inside
        except TypeError:
            try:
                inspect.signature(row).bind(*args, **options)
            except TypeError as error:
                refuse(name, f"is called otherwise than by the releases that are known ({error})")
            raise

    return call
