"""Casts to FP8 and back, and the Python objects that C++ builds for them (csrc/quantizer.cpp)."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from megatron_prism.runtime.devices.kernels import fused
from megatron_prism.runtime.te_kernels.table import (
    SHAPES_ONLY,
    TABLE,
    Kernel,
    Quantizer,
    Values,
    dtype_of,
    fill,
    kernel,
    new,
    refuse,
    scratch,
    tensors_in,
    wide,
)

# a quantizer's class -> (what decides its scales, its tensor's class, the module of that)
_QUANTIZERS = {
    "Float8CurrentScalingQuantizer": ("current", "Float8Tensor", "float8_tensor"),
    "Float8Quantizer": ("delayed", "Float8Tensor", "float8_tensor"),
    "Float8BlockQuantizer": ("block", "Float8BlockwiseQTensor", "float8_blockwise_tensor"),
    "MXFP8Quantizer": ("mx", "MXFP8Tensor", "mxfp8_tensor"),
}
PROCESSORS = 132  # of an H100
_DATA = ("_data", "_transpose", "_rowwise_data", "_columnwise_data")


@functools.cache
def _known(quantizer: type) -> tuple[str, str, str]:
    names = [base.__name__ for base in quantizer.__mro__ if base.__name__ in _QUANTIZERS]
    return _QUANTIZERS[names[0]] if names else refuse(f"quantize({quantizer})")


def kind_of(quantizer: Quantizer) -> str:
    """``current``, ``delayed``, ``block`` or ``mx``; "" without a quantizer."""
    return "" if quantizer is None else _known(type(quantizer))[0]  # type: ignore[arg-type]


@functools.cache
def _target(quantizer: type, internal: bool) -> tuple[Values, frozenset[str]]:
    """(class of what it makes, the names that its constructors take)."""
    _, name, module = _known(quantizer)
    if internal:
        name, module = f"{name}Storage", f"storage.{module}_storage"
    found = getattr(importlib.import_module(f"transformer_engine.pytorch.tensor.{module}"), name)
    makers = (vars(base).get("__new__") for base in found.__mro__[:-1])
    taken = (
        inspect.signature(make).parameters
        for make in makers
        if inspect.isroutine(make) or isinstance(make, staticmethod)
    )
    return found, frozenset(name for parameters in taken for name in parameters)


def create(
    quantizer: Quantizer, shape: Sequence[int], dtype: torch.dtype, bulk: Kernel | None = None
) -> Values:
    """Quantizer::create_tensor on Hopper, whose FP8 products are all TN (quantizer.cpp:206, :325,
    :650, :1040, :1480 @v2.18); a plain tensor without a quantizer.

    bulk : takes a shape and a type, and gives the memory of values by rows, or of all of blocks
        (``split_quantize``, attention's gradients); None: the allocator
    """
    if quantizer is None:
        return new(shape, dtype)
    shape, kind, take = list(shape), kind_of(quantizer), bulk or new
    tensor, names = _target(type(quantizer), bool(quantizer.internal))  # type: ignore[arg-type]
    found: dict[str, Any] = {
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
        "with_gemm_swizzled_scales": False,
        **({"fake_dtype": dtype} if quantizer.internal else {"shape": shape, "dtype": dtype}),
    }
    if kind == "delayed":
        found["fp8_scale_inv"] = new(1, torch.float32)
    for name, wanted, own, of in _memory(quantizer, shape):
        request = new if name == "data_transpose" else take
        found[name] = request(own, of) if wanted else None
    if kind == "current":
        found["fp8_scale_inv"] = new(1, torch.float32)
    if kind == "block":
        found["is_2D_scaled"] = quantizer.block_scaling_dim == 2
        formats = sys.modules["transformer_engine_torch"].Float8BlockScaleTensorFormat
        found["data_format"] = formats.GEMM_READY  # the one that is left from 2.10 on
    return tensor(**{name: value for name, value in found.items() if name in names})


def turned(shape: Sequence[int]) -> list[int]:
    """Of a tensor by columns (make_transpose_shape, quantizer.cpp:49 @v2.18)."""
    return [shape[-1], *shape[:-1]]


def _memory(
    quantizer: Quantizer, shape: Sequence[int]
) -> Iterator[tuple[str, bool, Sequence[int], torch.dtype]]:
    """(name, whether it is wanted, shape, type) of what holds values and scales, in C++'s order."""
    kind = kind_of(quantizer)
    for way, wanted in (("row", quantizer.rowwise_usage), ("column", quantizer.columnwise_usage)):
        columns = way == "column"
        own = turned(shape) if columns and kind != "mx" else shape
        if kind in ("current", "delayed"):
            yield "data_transpose" if columns else "data", wanted, own, torch.uint8
            continue
        yield f"{way}wise_data", wanted, own, torch.uint8
        scales = quantizer.get_scale_shape(shape, columns) if wanted else ()
        of = torch.uint8 if kind == "mx" else torch.float32
        yield f"{way}wise_scale_inv", wanted, scales, of


def _update(quantizer: Quantizer, out: Values) -> Values:
    """Quantizer::convert_and_update_tensor: what the quantizer wants comes, the rest goes
    (quantizer.cpp:522, :868, :1261, :1703 @v2.18).
    """
    if isinstance(out, Tensor) and not hasattr(out, "_quantizer"):
        return out
    for name, wanted, own, of in _memory(quantizer, sizes(out)):
        name = "_" + name.removeprefix("data_")
        if not wanted:
            setattr(out, name, None)
        elif getattr(out, name) is None:
            setattr(out, name, new(own, of))
    if hasattr(out, "_transpose_invalid"):
        out._transpose_invalid = not quantizer.columnwise_usage
    return out


def sizes(tensor: Values) -> list[int]:
    """The shape as C++ has it: Python's of values by columns alone is flat before 2.18."""
    if isinstance(tensor, Tensor):
        return list(tensor.shape)
    for name in ("_data", "_rowwise_data"):
        if getattr(tensor, name, None) is not None:
            return list(getattr(tensor, name).shape)
    columns = getattr(tensor, "_transpose", None)
    if columns is None and hasattr(tensor, "_is_2D_scaled"):
        columns = tensor._columnwise_data
    return list(tensor.size()) if columns is None else [*columns.shape[1:], columns.shape[0]]


def parts(tensor: Values) -> tuple[Tensor | None, ...]:
    """The tensors whose memory holds ``tensor``'s values."""
    if tensor is None or (isinstance(tensor, Tensor) and not hasattr(tensor, "_quantizer")):
        return (tensor,)
    return tuple(part for name in _DATA if (part := getattr(tensor, name, None)) is not None)


_WIDTHS = [(8, 8), (4, 8), (8, 4), (4, 4), (2, 8), (8, 2), (2, 4), (4, 2), (2, 2), (1, 8), (8, 1),
           (1, 4), (4, 1), (1, 2), (2, 1), (1, 1)]  # fmt: skip


@functools.cache
def _rows_of_a_block(rows: int, width: int, itemsize: int, of_activation: bool) -> int:
    """Rows of a tile of the fused cast and transpose of delayed scaling, whose sizes are chosen by
    an estimate of costs (KernelConfig, cast_transpose_fusion.cu:44, :570 @v2.18).
    """
    costs = []
    for load, store in _WIDTHS:
        across, down = load * 32 // itemsize, store * 32
        if (
            load < itemsize
            or width % across
            or rows % down
            or (of_activation and max(load, store) > 4)
        ):
            continue
        active = min(-(-(width // across * (rows // down)) // 2), PROCESSORS)
        loads = 2 if of_activation else 1
        lines = loads / min(128 // itemsize, across) + 1 / min(128, across) + 1 / min(128, down)
        costs.append((lines / active, down))
    return min(costs, key=lambda one: one[0])[1] if costs else 32 * (4 if of_activation else 8)


def sum_in_blocks(x: Tensor, quantizer: Quantizer, of_activation: bool = False) -> None:
    """Ask for the sums over blocks of rows with which a cast finds a bias's gradient."""
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    delayed = kind_of(quantizer) == "delayed"
    block = _rows_of_a_block(rows, width, x.element_size(), of_activation) if delayed else 128
    scratch([-(-rows // block), width], torch.float32)


def cast_into(out: Values, x: Tensor, quantizer: Quantizer, amax: Tensor | None = None) -> Values:
    """Quantizer::quantize of ``x`` into ``out`` (quantizer.cpp:613, :960, :1404 @v2.18)."""
    if quantizer is None or not x.numel():
        return out
    if kind_of(quantizer) == "current":
        pair = new(1 if amax is not None else 2, torch.float32)
        if amax is None:
            fused("fp8_amax", 0, x)
        if quantizer.with_amax_reduction:
            group = quantizer.amax_reduction_group
            dist.all_reduce(pair[:1] if amax is None else amax, op=dist.ReduceOp.MAX, group=group)
    fused("fp8_quantize", 0, x, *parts(out))
    return out


# What computes in high precision first and casts that: activations (activation.cpp:34 @v2.18), and
# norms (normalization.cpp:92 @v2.18).
_CAST_AFTER = {"activation": ("current", "block"), "norm": ("current", "block", "mx")}


def computed(
    of: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    quantizer: Quantizer,
    value: Callable[[], Tensor],
    out: Values = None,
) -> Values:
    """The output of a kernel of rows, ``of`` a norm or an activation, with its cast."""
    out = create(quantizer, shape, dtype) if out is None else out
    if quantizer is None:
        return fill(out, value)
    if kind_of(quantizer) in _CAST_AFTER[of]:
        amax = new(1, torch.float32) if kind_of(quantizer) == "current" else None
        cast_into(out, new(shape, dtype), quantizer, amax)
    return out


@kernel(values=False)
def create_empty_quantized_tensor(
    quantizer: Quantizer, shape: Sequence[int], dtype: torch.dtype, *rest: object
) -> Values:
    """cast.cpp:135 @v2.18"""
    return create(quantizer, shape, dtype)


@kernel(values=False)
def quantize(x: Tensor, quantizer: Quantizer, out: Values = None, noop: object = None) -> Values:
    """cast.cpp:52 @v2.18"""
    x = x.contiguous()
    out = create(quantizer, x.shape, x.dtype) if out is None else _update(quantizer, out)
    return cast_into(out, x, quantizer)


@kernel()
def bgrad_quantize(grad: Tensor, quantizer: Quantizer) -> tuple[Tensor, Any]:
    """bias.cpp:22 @v2.18"""
    grad = grad.contiguous()
    dbias = new(grad.shape[-1], grad.dtype)
    rows, kind = grad.reshape(-1, grad.shape[-1]), kind_of(quantizer)
    if quantizer is None and not grad.is_meta:
        return fill(dbias, lambda: wide(grad).sum(0)), grad
    out = grad if quantizer is None else create(quantizer, grad.shape, grad.dtype)
    both = kind and quantizer.rowwise_usage and quantizer.columnwise_usage
    if kind == "mx" or (kind == "delayed" and both):  # sums of blocks of rows, beside the cast
        sum_in_blocks(rows, quantizer)
        fused("fp8_quantize", 0, grad, *parts(out))
        return dbias, out
    torch.sum(rows, 0, out=dbias)
    return dbias, cast_into(out, grad, quantizer)


@kernel(values=False)
def dequantize(x: Values, dtype: object) -> Tensor:
    """cast.cpp:559 @v2.18"""
    out = new(sizes(x), dtype_of(dtype))
    fused("fp8_dequantize", 0, *parts(x), out)
    return out


def _buffer(shapes: list[tuple[Sequence[int], torch.dtype, int]]) -> Iterator[Tensor]:
    """Tensors of one request (bulk_allocate, allocate.cpp:25 @v2.18)."""
    starts, end = [], 0
    for shape, dtype, aligned in shapes:
        starts.append(-(-end // aligned) * aligned)
        end = starts[-1] + prod(shape) * dtype.itemsize
    base = new(end + max(aligned for *_, aligned in shapes))
    for start, (shape, dtype, _) in zip(starts, shapes, strict=True):
        yield base[start : start + prod(shape) * dtype.itemsize].view(dtype).view(*shape)


def _in_bulk(xs: Sequence[Tensor], quantizers: Sequence[Quantizer]) -> list[Values]:
    """bulk_allocate_fp8_blockwise_tensors, bulk_allocate_mxfp8_tensors (cast.cpp:760, :870 @v2.18):
    one buffer of all data and scales by rows, one by columns.
    """
    asked = [
        (name, own, of, i)
        for i, (x, q) in enumerate(zip(xs, quantizers, strict=True))
        for name, wanted, own, of in _memory(q, list(x.shape))
        if wanted
    ]
    taken: list[list[Tensor]] = [[] for _ in xs]
    for way in ("row", "column"):
        data, scales = (
            [one for one in asked if one[0].startswith(way) and one[0].endswith(end)]
            for end in ("data", "inv")
        )
        if data:
            made = list(
                _buffer(
                    [(own, of, 256) for _, own, of, _ in data]
                    + [(own, of, 16) for _, own, of, _ in scales]
                )
            )
            for (*_, i), *pair in zip(data, made[: len(data)], made[len(data) :], strict=True):
                taken[i] += pair
    given = [iter(tensors) for tensors in taken]
    return [
        create(q, x.shape, x.dtype, lambda *_, of=of: next(of))
        for q, x, of in zip(quantizers, xs, given, strict=True)
    ]


@kernel(values=False)
def split_quantize(
    x: Tensor,
    counts: Sequence[int],
    quantizers: Sequence[Quantizer],
    disable_bulk_allocation: bool = False,
) -> list[Values]:
    """cast.cpp:1652 @v2.18"""
    xs = x.contiguous().split(list(counts))
    kinds = {kind_of(quantizer) for quantizer in quantizers}
    if not disable_bulk_allocation and kinds in ({"block"}, {"mx"}):
        out = _in_bulk(xs, quantizers)
    else:
        out = [create(q, one.shape, x.dtype) for one, q in zip(xs, quantizers, strict=True)]
    return [cast_into(*three) for three in zip(out, xs, quantizers, strict=True)]


@kernel(values=False)
def multi_tensor_quantize(xs: Sequence[Tensor], quantizers: Sequence[Quantizer]) -> list[Values]:
    """cast.cpp:719 @v2.18"""
    out = [create(q, x.shape, x.dtype) for x, q in zip(xs, quantizers, strict=True)]
    return [cast_into(*three) for three in zip(out, xs, quantizers, strict=True)]


@kernel(values=False)
def fp8_transpose(x: Tensor, dtype: object, out: Tensor | None = None) -> Tensor:
    """transpose.cpp:20 @v2.18"""
    x = x.contiguous()
    out = new(turned(x.shape)) if out is None else out
    fused("fp8_transpose", 0, x, out)
    return out


def _in_place(name: str) -> Kernel:
    def run(*args: Any, **kwargs: object) -> None:
        """Writes into what it is given: recipe.cpp:17, fp8_partial_cast.cpp:11, padding.cpp:12,
        multi_tensor/compute_scale.cpp:11 @v2.18
        """
        for tensors in zip(*args[2], strict=False) if name == "fp8_scale" else [tensors_in(args)]:
            fused(name, 0, *(t if isinstance(t, Tensor) else None for t in tensors))

    return run


_WRITERS = {  # kernel -> the name by which costs know it
    "fused_amax_and_scale_update_after_reduction": "amax_and_scale_update",
    "compute_amax": "fp8_amax",
    "fp8_block_scaling_compute_partial_amax": "fp8_amax",
    "fp8_block_scaling_partial_cast": "fp8_quantize",
    "mxfp8_scaling_compute_partial_amax": "fp8_amax",
    "mxfp8_scaling_partial_cast": "fp8_quantize",
    "multi_tensor_compute_scale_and_scale_inv": "fp8_scale",
    "multi_tensor_compute_scale_inv_e8m0": "fp8_scale",
    "fused_multi_row_padding": "fused_multi_row_padding",
    "fused_multi_row_unpadding": "fused_multi_row_padding",
}
TABLE.update({name: _in_place(of) for name, of in _WRITERS.items()})
SHAPES_ONLY.update(_WRITERS)
