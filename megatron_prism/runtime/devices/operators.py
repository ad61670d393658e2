"""Operators on tier meta: shapes of simple results, and what CUDA's kernels take while they run.

Tier meta runs no kernel, so nothing takes a workspace there; and torch's own backward formulas
make a new tensor where a dispatch mode might look on, which on a GPU they write into the old one.

torch's own answer on ``meta`` is Python for elementwise operators, 20 to 120 us a call, and 5 us
more than need be for ``new_empty`` (2.11 and 2.13, AMD EPYC); where tensors are of one type and
laid out row by row it is an empty tensor, 2 us.  Everything else is left to torch.

Source: torch 2.11, files of aten/src/ATen/native/cuda as named at each function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch._ops import OpOverload

Args = Sequence[Any]  # of an operator: tensors, numbers, lists
Kwargs = Mapping[str, Any] | None
Answer = Callable[[Args, Kwargs], torch.Tensor | None]
Temporaries = Callable[[Args, torch.Tensor], Sequence[int]]  # of arguments, result: bytes of each

_META = torch.device("meta")
_KNOWN = frozenset(("alpha", "approximate"))  # keywords that change no shape and no type
_aten = torch.ops.aten
_PROCESSORS, _THREADS_PER_PROCESSOR = 132, 2048  # of an H100 and an H200
_WARP, _BLOCK = 32, 512
_LARGEST_SPAN = (1 << 31) - 1  # bytes that 32 bit offsets reach

# Functional forms of what torch's backward formulas do in place to a tensor that they have just
# made (FunctionsManual.cpp, areAnyTensorSubclassLike), and the engine to a sum of gradients that
# nobody else holds (input_buffer.cpp, can_accumulate_inplace).
IN_PLACE = frozenset(
    (
        _aten.index_put.default,
        _aten.index_add.default,
        _aten.scatter_add.default,
        _aten.scatter.src,
        _aten.add.Tensor,
    )
)

# these bring their first argument into rows before they make their result
COPY_INTO_ROWS = frozenset((_aten.embedding_dense_backward.default,))


def temporaries(func: OpOverload) -> Temporaries | None:
    """What tells the bytes of each temporary of ``func`` from (arguments, result), or None."""
    return _TEMPORARIES.get(func)


@dataclass
class _Dimension:
    size: int
    stride: int  # elements


def _power_of_two(number: int) -> int:
    """The largest power of two that is not above ``number``; at least 1."""
    return 1 << max(number.bit_length() - 1, 0)


def _ceil(number: int, by: int) -> int:
    return -(-number // by)


def _merged(dimensions: list[_Dimension]) -> list[_Dimension]:
    """By stride, neighbours that are laid out as one made one (TensorIterator's coalescing)."""
    found: list[_Dimension] = []
    for one in sorted(dimensions, key=lambda d: d.stride):
        if found and found[-1].stride * found[-1].size == one.stride:
            found[-1] = _Dimension(found[-1].size * one.size, found[-1].stride)
        elif one.size > 1:
            found.append(one)
    return found


def reduction_bytes(x: torch.Tensor, dims: Sequence[int], element: int = 0) -> tuple[int, ...]:
    """Bytes of the buffer and the semaphores with which blocks share a reduction over ``dims``.

    Where rows are contiguous every thread of a block has four outputs of its own, and the buffer is
    of all threads times all outputs: of a bias's gradient over 4,096 rows of 4,096, 128 MiB.

    Source: ReduceConfig and setReduceConfig, Reduce.cuh.
    """
    over = {dim % x.dim() for dim in dims} if dims else set(range(x.dim()))
    reduced, kept = (
        [
            _Dimension(size, stride)
            for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True))
            if (dim in over) is wanted
        ]
        for wanted in (True, False)
    )
    while sum((d.size - 1) * d.stride for d in reduced + kept) * x.itemsize > _LARGEST_SPAN:
        largest = max(reduced + kept, key=lambda d: d.size * d.stride)
        largest.size = _ceil(largest.size, 2)  # one part after the other
    reduced, kept = _merged(reduced), _merged(kept)
    inputs, outputs = (math.prod(d.size for d in group) for group in (reduced, kept))
    if not inputs * outputs:
        return ()
    along = not kept or bool(reduced) and reduced[0].stride < kept[0].stride
    if not reduced and kept:
        along = False
    fastest = reduced if along else kept
    width, height = (inputs, outputs) if along else (outputs, inputs)
    vector = 1
    if fastest and fastest[0].stride == 1:
        if along and width >= 128 and len(reduced) == 1:
            width //= 8 if x.itemsize == 2 else 4
        elif not along:
            strides = [d.stride for d in reduced + kept[1:]]
            vector = math.gcd(4, kept[0].size, x.storage_offset(), *strides)
            width //= vector
    most = _BLOCK // vector
    width, height = (min(most, _power_of_two(size)) for size in (width, height))
    columns = min(width, _WARP)
    rows = min(height, most // columns)
    columns = min(width, most // rows)
    step_in, step_out = (columns, 1) if along else (1, columns)
    shared = _ceil(inputs, step_in) >= min(rows * 16, 256)
    step_in, step_out = (step_in * rows, step_out) if shared else (step_in, step_out * rows)
    grid, values = _ceil(outputs // vector, step_out), _ceil(inputs, step_in)
    target = _PROCESSORS * (_THREADS_PER_PROCESSOR // (columns * rows))
    if not shared or values < 256 or grid > target:
        return ()
    blocks = max(min(_ceil(target, grid), _ceil(values, 16)), _ceil(values, 256))
    if blocks < 2:
        return ()
    element = element or max(4, x.itemsize)  # halves are added up in fp32
    return element * outputs * blocks * (1 if along else columns * vector), 4 * grid


_HALVES = (torch.float16, torch.bfloat16)


def _in_type_of(x: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, Sequence[int]]:
    """(what is reduced, bytes of its copy): a reduction that ends in another type first copies its
    input to that type, unless halves are added up in fp32 (make_reduction, ReduceOpsUtils.h; cumsum
    and cumprod, ReduceOps.cpp).
    """
    widens = x.dtype in _HALVES and out.dtype == torch.float32
    if x.dtype == out.dtype or widens:
        return x, ()
    copy = torch.empty_like(x, dtype=out.dtype, device=_META)
    return copy, (copy.nbytes,)


def _reduction(args: Args, out: torch.Tensor) -> Sequence[int]:
    x, copies = _in_type_of(args[0], out)
    dims = args[1] if len(args) > 1 else ()
    dims = [dims] if isinstance(dims, int) else dims or ()
    return (*copies, *reduction_bytes(x, dims))


def _extreme(args: Args, out: torch.Tensor) -> Sequence[int]:
    """Of a reduction to an element of its input, in the input's type."""
    dims = args[1] if len(args) > 1 else ()
    return reduction_bytes(args[0], [dims] if isinstance(dims, int) else dims or ())


def _scan(args: Args, out: torch.Tensor) -> Sequence[int]:
    return _in_type_of(args[0], out)[1]


def _softmax_backward(args: Args, out: torch.Tensor) -> Sequence[int]:
    """The product of gradient and result (softmax_backward_cuda_out, SoftMax.cu)."""
    return (args[0].nbytes,)


def _embedding_backward(args: Args, out: torch.Tensor) -> Sequence[int]:
    """Sorted indices, and fp32 sums of up to ten rows each (Embedding.cu,
    EmbeddingBackwardKernel.cu).
    """
    _, indices, rows, _, by_frequency = args
    count, width = indices.numel(), out.shape[-1]
    if count <= 3072 and not by_frequency:
        return ()
    segments = min(count, rows)
    parts = count // 10 + segments
    size = indices.itemsize
    kept = [count * size] * (3 if by_frequency else 2) + [segments * size] * 3 + [8, 8]
    return (*kept, parts * size, parts * width * max(4, out.itemsize))


def _pairs(args: Args, out: torch.Tensor) -> Sequence[int]:
    """The same of a reduction that also says where: a value and an int64 are 16 bytes."""
    return reduction_bytes(args[0], [args[1]], element=16)


def _sort(args: Args, out: torch.Tensor) -> Sequence[int]:
    """A copy of the values; of more than 4,096 two of their places, too, and what cub takes, which
    was measured (Sort.cpp, Sort.cu).
    """
    x, dim = args[0], next((arg for arg in args[1:] if type(arg) is int), -1)
    if not x.dim() or not x.numel():
        return ()
    count = x.numel()
    if x.shape[dim] <= 4096:
        return (x.nbytes,)
    of_cub = count // 4 + (16 << 10) if count // x.shape[dim] < 128 else 0
    return (x.nbytes, 8 * count, 8 * count, of_cub)


def _index_put(args: Args, out: torch.Tensor) -> Sequence[int]:
    """Where it adds: places, in order and as they were, twice each with what sorts them
    (index_put_with_sort_kernel, Indexing.cu).
    """
    accumulate = len(args) > 3 and args[3]
    count = math.prod(torch.broadcast_shapes(*(i.shape for i in args[1] if i is not None)))
    return [8 * count] * 6 if accumulate else ()


def _efficient_backward(args: Args, out: torch.Tensor) -> Sequence[int]:
    """A number a row, and the queries' gradient in fp32 (attention_backward.cu)."""
    batch, heads, rows, size = args[1].shape
    return (4 * batch * heads * rows, 4 * batch * heads * rows * size)


def _flash_backward(args: Args, out: torch.Tensor) -> Sequence[int]:
    """fp32 gradient of the queries, and a number a row (mha_bwd, flash_attn/flash_api.cpp)."""
    query, key = args[1:3]
    batch, heads, rows, size = query.shape
    rows = _ceil(rows, 128) * 128
    groups = heads // key.shape[1]
    return (
        4 * batch * heads * rows,
        4 * batch * heads * rows * size,
        *([key.nbytes * groups] * 2 if groups > 1 else ()),
    )


_TEMPORARIES: dict[OpOverload, Temporaries] = {
    **dict.fromkeys(
        (
            _aten.sum.default,
            _aten.sum.dim_IntList,
            _aten.sum.IntList_out,
            _aten.mean.default,
            _aten.mean.dim,
            _aten.nansum.default,
            _aten.prod.default,
        ),
        _reduction,
    ),
    **dict.fromkeys((_aten.amax.default, _aten.amin.default), _extreme),
    **dict.fromkeys((_aten.cumsum.default, _aten.cumprod.default), _scan),
    **dict.fromkeys((_aten.max.dim, _aten.min.dim), _pairs),
    **dict.fromkeys((_aten.sort.default, _aten.sort.stable), _sort),
    **dict.fromkeys((_aten.index_put.default, _aten.index_put_.default), _index_put),
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _aten._softmax_backward_data.default: _softmax_backward,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
}


# -- shapes of results -----------------------------------------------------------------------------


def answer(func: OpOverload) -> Answer | None:
    """What makes the result of ``func`` from (args, kwargs), or None where torch is to be asked."""
    return _ANSWERS.get(func)


def _rows(tensor: torch.Tensor) -> bool:
    """Whether it is on meta, of floats, and no stride is smaller than one further right: then what
    torch makes of it is contiguous.
    """
    if not tensor.is_meta or not tensor.dtype.is_floating_point:
        return False
    if tensor.is_contiguous():
        return True
    strides = tensor.stride()
    return strides[-1] > 0 and all(a >= b for a, b in zip(strides, strides[1:], strict=False))


def _fits(args: Args, kwargs: Kwargs, one_type: bool) -> bool:
    """Whether all tensors are like the first, in rows; numbers always are."""
    if kwargs and not _KNOWN.issuperset(kwargs):
        return False
    first = args[0]
    if not isinstance(first, torch.Tensor) or not _rows(first):
        return False
    for other in args[1:]:
        if isinstance(other, torch.Tensor):
            if other.shape != first.shape or not _rows(other):
                return False
            if one_type and other.dtype != first.dtype:
                return False
        elif not isinstance(other, (int, float)):
            return False
    return True


def _alike(args: Args, kwargs: Kwargs) -> torch.Tensor | None:
    if not _fits(args, kwargs, one_type=True):
        return None
    return torch.empty(args[0].shape, dtype=args[0].dtype, device=_META)


def _in_place(args: Args, kwargs: Kwargs) -> torch.Tensor | None:
    return args[0] if _fits(args, kwargs, one_type=False) else None


def _new_empty(args: Args, kwargs: Kwargs) -> torch.Tensor | None:
    like = args[0]
    if not like.is_meta or kwargs and kwargs.keys() != {"dtype"}:
        return None
    return torch.empty(args[1], dtype=kwargs["dtype"] if kwargs else like.dtype, device=_META)


def _cat(args: Args, kwargs: Kwargs) -> torch.Tensor | None:
    parts, dim = args[0], args[1] if len(args) > 1 else 0
    first = parts[0]
    rank = first.dim()
    if kwargs or not 0 < rank < 4 or not _rows(first):  # four might be channels_last
        return None
    shape = list(first.shape)
    for other in parts[1:]:
        if other.dim() != rank or other.dtype != first.dtype or not _rows(other):
            return None
        own = list(other.shape)
        shape[dim], own[dim] = shape[dim] + own[dim], shape[dim] + own[dim]
        if own != shape:
            return None
    return torch.empty(shape, dtype=first.dtype, device=_META)


_ANSWERS: dict[OpOverload, Answer] = {
    _aten.new_empty.default: _new_empty,
    _aten.cat.default: _cat,
    **dict.fromkeys(
        (
            _aten.add.Tensor,
            _aten.sub.Tensor,
            _aten.mul.Tensor,
            _aten.div.Tensor,
            _aten.rsub.Scalar,
            _aten.pow.Tensor_Scalar,
            _aten.neg.default,
            _aten.exp.default,
            _aten.sqrt.default,
            _aten.rsqrt.default,
            _aten.tanh.default,
            _aten.silu.default,
            _aten.sigmoid.default,
            _aten.gelu.default,
            _aten.silu_backward.default,
            _aten.sigmoid_backward.default,
            _aten.tanh_backward.default,
            _aten.gelu_backward.default,
        ),
        _alike,
    ),
    **dict.fromkeys(
        (_aten.add_.Tensor, _aten.sub_.Tensor, _aten.mul_.Tensor, _aten.div_.Tensor), _in_place
    ),
}
