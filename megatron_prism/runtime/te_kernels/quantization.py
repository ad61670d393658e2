"""Casts to FP8 and back, and the Python objects that C++ builds for them (csrc/quantizer.cpp)."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

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
def _row_of(quantizer: type) -> tuple[str, str, str]:
    """The row of ``_QUANTIZERS`` of a class or of the first of its bases that has one."""
    for base in quantizer.__mro__:
        if base.__name__ in _QUANTIZERS:
            return _QUANTIZERS[base.__name__]
    return refuse(f"quantize({quantizer})")


def kind_of(quantizer: Quantizer) -> str:
    """``current``, ``delayed``, ``block`` or ``mx``; "" without a quantizer."""
    if quantizer is None:
        return ""
    kind, _, _ = _row_of(type(quantizer))  # type: ignore[arg-type]
    return kind


@functools.cache
def _target(quantizer: type, internal: bool) -> tuple[Values, frozenset[str]]:
    """(class of what it makes, the names that its constructors take)."""
    _, name, module = _row_of(quantizer)
    if internal:
        name, module = f"{name}Storage", f"storage.{module}_storage"
    tensor_module = importlib.import_module(f"transformer_engine.pytorch.tensor.{module}")
    tensor_class = getattr(tensor_module, name)
    parameter_names = set[str]()
    for base in tensor_class.__mro__[:-1]:
        constructor = vars(base).get("__new__")
        # torch.Tensor's own is built in and has no signature
        if inspect.isroutine(constructor) or isinstance(constructor, staticmethod):
            parameter_names.update(inspect.signature(constructor).parameters)
    return tensor_class, frozenset(parameter_names)


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
    shape = list(shape)
    kind = kind_of(quantizer)
    tensor, names = _target(type(quantizer), bool(quantizer.internal))  # type: ignore[arg-type]
    fields: dict[str, Any] = {
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
        "with_gemm_swizzled_scales": False,
    }
    if quantizer.internal:  # a storage alone, which is no tensor to autograd
        fields["fake_dtype"] = dtype
    else:
        fields["shape"] = shape
        fields["dtype"] = dtype
    # delayed scaling asks for its scale in front of the values, current scaling behind them
    if kind == "delayed":
        fields["fp8_scale_inv"] = new(1, torch.float32)
    for part in _memory(quantizer, shape):
        memory = None
        if part.wanted:
            request = new if bulk is None or part.name == "data_transpose" else bulk
            memory = request(part.shape, part.dtype)
        fields[part.name] = memory
    if kind == "current":
        fields["fp8_scale_inv"] = new(1, torch.float32)
    if kind == "block":
        fields["is_2D_scaled"] = quantizer.block_scaling_dim == 2
        formats = sys.modules["transformer_engine_torch"].Float8BlockScaleTensorFormat
        fields["data_format"] = formats.GEMM_READY  # the one that is left from 2.10 on
    return tensor(**{name: value for name, value in fields.items() if name in names})


def turned(shape: Sequence[int]) -> list[int]:
    """Of a tensor by columns (make_transpose_shape, quantizer.cpp:49 @v2.18)."""
    return [shape[-1], *shape[:-1]]


class _Part(NamedTuple):
    """A part of a tensor's memory: values or scales, by rows or by columns."""

    name: str
    wanted: bool
    shape: Sequence[int]
    dtype: torch.dtype


def _memory(quantizer: Quantizer, shape: Sequence[int]) -> Iterator[_Part]:
    """Go through what holds values and scales, in C++'s order."""
    kind = kind_of(quantizer)
    if kind in ("current", "delayed"):
        yield _Part("data", quantizer.rowwise_usage, shape, torch.uint8)
        yield _Part("data_transpose", quantizer.columnwise_usage, turned(shape), torch.uint8)
        return
    scale_dtype = torch.uint8 if kind == "mx" else torch.float32
    for way, wanted in (("row", quantizer.rowwise_usage), ("column", quantizer.columnwise_usage)):
        columns = way == "column"
        # MXFP8 keeps values by columns in the order of the rows: only their scales differ
        data_shape = turned(shape) if columns and kind != "mx" else shape
        yield _Part(f"{way}wise_data", wanted, data_shape, torch.uint8)
        scale_shape = quantizer.get_scale_shape(shape, columns) if wanted else ()
        yield _Part(f"{way}wise_scale_inv", wanted, scale_shape, scale_dtype)


def _update(quantizer: Quantizer, out: Values) -> Values:
    """Quantizer::convert_and_update_tensor: what the quantizer wants comes, the rest goes
    (quantizer.cpp:522, :868, :1261, :1703 @v2.18).
    """
    # a plain tensor has nothing to update
    if isinstance(out, Tensor) and not hasattr(out, "_quantizer"):
        return out
    for part in _memory(quantizer, sizes(out)):
        attribute = "_" + part.name.removeprefix("data_")
        if not part.wanted:
            setattr(out, attribute, None)
        elif getattr(out, attribute) is None:
            setattr(out, attribute, new(part.shape, part.dtype))
    if hasattr(out, "_transpose_invalid"):
        out._transpose_invalid = not quantizer.columnwise_usage
    return out


def sizes(tensor: Values) -> list[int]:
    """The shape as C++ has it: Python's of values by columns alone is flat before 2.18."""
    if isinstance(tensor, Tensor):
        return list(tensor.shape)
    for name in ("_data", "_rowwise_data"):
        by_rows = getattr(tensor, name, None)
        if by_rows is not None:
            return list(by_rows.shape)
    by_columns = getattr(tensor, "_transpose", None)
    if by_columns is None and hasattr(tensor, "_is_2D_scaled"):
        by_columns = tensor._columnwise_data
    if by_columns is None:  # MXFP8, whose values by columns have the shape of the rows
        return list(tensor.size())
    last, *leading = by_columns.shape
    return [*leading, last]


def parts(tensor: Values) -> tuple[Tensor | None, ...]:
    """The tensors whose memory holds ``tensor``'s values."""
    if tensor is None or (isinstance(tensor, Tensor) and not hasattr(tensor, "_quantizer")):
        return (tensor,)
    memories = [getattr(tensor, name, None) for name in _DATA]
    return tuple(memory for memory in memories if memory is not None)


# bytes that a thread loads and stores at once
_WIDTHS = [
    (8, 8),
    (4, 8),
    (8, 4),
    (4, 4),
    (2, 8),
    (8, 2),
    (2, 4),
    (4, 2),
    (2, 2),
    (1, 8),
    (8, 1),
    (1, 4),
    (4, 1),
    (1, 2),
    (2, 1),
    (1, 1),
]


@functools.cache
def _rows_of_a_block(rows: int, width: int, itemsize: int, of_activation: bool) -> int:
    """Rows of a tile of the fused cast and transpose of delayed scaling, whose sizes are chosen by
    an estimate of costs (KernelConfig, cast_transpose_fusion.cu:44, :570 @v2.18).
    """
    best_cost = math.inf
    rows_of_best = 32 * (4 if of_activation else 8)  # the general kernel, where no tile fits
    for load, store in _WIDTHS:
        tile_columns = load * 32 // itemsize
        tile_rows = store * 32
        if load < itemsize or width % tile_columns or rows % tile_rows:
            continue
        if of_activation and max(load, store) > 4:
            continue
        tiles = width // tile_columns * (rows // tile_rows)
        active_processors = min(-(-tiles // 2), PROCESSORS)
        tensors_read = 2 if of_activation else 1
        lines = tensors_read / min(128 // itemsize, tile_columns)
        lines += 1 / min(128, tile_columns)
        lines += 1 / min(128, tile_rows)
        cost = lines / active_processors
        if cost < best_cost:  # of equal ones the first
            best_cost = cost
            rows_of_best = tile_rows
    return rows_of_best


def sum_in_blocks(x: Tensor, quantizer: Quantizer, of_activation: bool = False) -> None:
    """Ask for the sums over blocks of rows with which a cast finds a bias's gradient."""
    width = x.shape[-1]
    rows = x.numel() // width
    rows_of_block = 128
    if kind_of(quantizer) == "delayed":
        rows_of_block = _rows_of_a_block(rows, width, x.element_size(), of_activation)
    scratch([-(-rows // rows_of_block), width], torch.float32)


def cast_into(out: Values, x: Tensor, quantizer: Quantizer, amax: Tensor | None = None) -> Values:
    """Quantizer::quantize of ``x`` into ``out`` (quantizer.cpp:613, :960, :1404 @v2.18)."""
    if quantizer is None or not x.numel():
        return out
    if kind_of(quantizer) == "current":
        # the largest value and the scale that follows from it; where ``amax`` is given, a kernel in
        # front of the cast has found the largest value, and the scale alone is asked for
        numbers = new(2 if amax is None else 1, torch.float32)
        largest = numbers[:1] if amax is None else amax
        if amax is None:
            fused("fp8_amax", 0, x)
        if quantizer.with_amax_reduction:
            group = quantizer.amax_reduction_group
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
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
    # these recipes cast in a kernel of their own, behind the norm or activation
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
    # no cast: the bias's gradient alone
    if quantizer is None and not grad.is_meta:
        return fill(dbias, lambda: wide(grad).sum(0)), grad
    out = grad
    if quantizer is not None:
        out = create(quantizer, grad.shape, grad.dtype)
    rows = grad.reshape(-1, grad.shape[-1])
    kind = kind_of(quantizer)
    if kind == "mx" or (kind == "delayed" and _casts_both_ways(quantizer)):
        # sums of blocks of rows, beside the cast
        sum_in_blocks(rows, quantizer)
        fused("fp8_quantize", 0, grad, *parts(out))
        return dbias, out
    torch.sum(rows, 0, out=dbias)
    return dbias, cast_into(out, grad, quantizer)


def _casts_both_ways(quantizer: Quantizer) -> bool:
    """Whether values are wanted by rows and by columns."""
    return bool(quantizer.rowwise_usage and quantizer.columnwise_usage)


@kernel(values=False)
def dequantize(x: Values, dtype: object) -> Tensor:
    """cast.cpp:559 @v2.18"""
    out = new(sizes(x), dtype_of(dtype))
    fused("fp8_dequantize", 0, *parts(x), out)
    return out


_DATA_ALIGNMENT, _SCALE_ALIGNMENT = 256, 16  # bytes, in a buffer of several tensors


def _buffer(requests: Sequence[tuple[_Part, int]]) -> list[Tensor]:
    """Tensors of one request (bulk_allocate, allocate.cpp:25 @v2.18).

    Args:
        requests: what each tensor is, and to how many bytes its start is aligned.
    """
    starts = list[int]()
    end = 0
    # each tensor begins at its own alignment
    for part, alignment in requests:
        start = -(-end // alignment) * alignment
        starts.append(start)
        end = start + _bytes_of(part)
    largest_alignment = max(alignment for _, alignment in requests)
    buffer = new(end + largest_alignment)
    tensors = list[Tensor]()
    for start, (part, _) in zip(starts, requests, strict=True):
        memory = buffer[start : start + _bytes_of(part)]
        tensors.append(memory.view(part.dtype).view(*part.shape))
    return tensors


def _bytes_of(part: _Part) -> int:
    return prod(part.shape) * part.dtype.itemsize


def _in_bulk(xs: Sequence[Tensor], quantizers: Sequence[Quantizer]) -> list[Values]:
    """bulk_allocate_fp8_blockwise_tensors, bulk_allocate_mxfp8_tensors (cast.cpp:760, :870 @v2.18):
    one buffer of all data and scales by rows, one by columns.
    """
    memories: list[list[Tensor]] = [[] for _ in xs]  # of each tensor, in the order of ``_memory``
    wanted = list[tuple[int, _Part]]()
    for place, (x, quantizer) in enumerate(zip(xs, quantizers, strict=True)):
        for part in _memory(quantizer, list(x.shape)):
            if part.wanted:
                wanted.append((place, part))
    # one buffer for all rows, and one for all columns
    for way in ("row", "column"):
        owners = list[int]()
        data, scales = list[tuple[_Part, int]](), list[tuple[_Part, int]]()
        for place, part in wanted:
            if part.name == f"{way}wise_data":
                data.append((part, _DATA_ALIGNMENT))
                owners.append(place)
            elif part.name == f"{way}wise_scale_inv":
                scales.append((part, _SCALE_ALIGNMENT))
        if not data:
            continue
        tensors = _buffer(data + scales)
        data_tensors, scale_tensors = tensors[: len(data)], tensors[len(data) :]
        for place, values, scale in zip(owners, data_tensors, scale_tensors, strict=True):
            memories[place] += (values, scale)
    return [
        create(quantizer, x.shape, x.dtype, _one_after_another(memory))
        for quantizer, x, memory in zip(quantizers, xs, memories, strict=True)
    ]


def _one_after_another(memories: Sequence[Tensor]) -> Kernel:
    """Make a function that gives the next of ``memories`` whatever it is asked for."""
    remaining = iter(memories)
    return lambda *_: next(remaining)


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
    # one allocation for all experts, in formats that have no amax of the past
    if not disable_bulk_allocation and kinds in ({"block"}, {"mx"}):
        out = _in_bulk(xs, quantizers)
        return [cast_into(*triple) for triple in zip(out, xs, quantizers, strict=True)]
    return multi_tensor_quantize(xs, quantizers)


@kernel(values=False)
def multi_tensor_quantize(xs: Sequence[Tensor], quantizers: Sequence[Quantizer]) -> list[Values]:
    """cast.cpp:719 @v2.18"""
    out = [create(q, x.shape, x.dtype) for x, q in zip(xs, quantizers, strict=True)]
    return [cast_into(*triple) for triple in zip(out, xs, quantizers, strict=True)]


@kernel(values=False)
def fp8_transpose(x: Tensor, dtype: object, out: Tensor | None = None) -> Tensor:
    """transpose.cpp:20 @v2.18"""
    x = x.contiguous()
    if out is None:
        out = new(turned(x.shape))
    fused("fp8_transpose", 0, x, out)
    return out


def _in_place(name: str) -> Kernel:
    """Make a kernel that returns nothing, which costs know as ``name``."""

    def run(*args: Any, **kwargs: object) -> None:
        """Writes into what it is given: recipe.cpp:17, fp8_partial_cast.cpp:11, padding.cpp:12,
        multi_tensor/compute_scale.cpp:11 @v2.18
        """
        if name != "fp8_scale":
            fused(name, 0, *tensors_in(args))
            return
        # one kernel for each place in the lists; what is no tensor is no traffic
        for arguments in zip(*args[2], strict=False):
            fused(name, 0, *tensors_in(arguments))

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
for _kernel_name, _cost in _WRITERS.items():
    TABLE[_kernel_name] = _in_place(_cost)
SHAPES_ONLY.update(_WRITERS)
