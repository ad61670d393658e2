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

    @property
    def reach(self) -> int:
        """Elements from its first to its last."""
        return (self.size - 1) * self.stride


def _power_of_two(number: int) -> int:
    """The largest power of two that is not above ``number``; at least 1."""
    return 1 << max(number.bit_length() - 1, 0)


def _ceil(number: int, by: int) -> int:
    return -(-number // by)


def _merged(dimensions: list[_Dimension]) -> list[_Dimension]:
    """By stride, neighbours that are laid out as one made one (TensorIterator's coalescing)."""
    merged = list[_Dimension]()
    for dimension in sorted(dimensions, key=lambda dimension: dimension.stride):
        # the next dimension begins where the inner one ends
        if merged and merged[-1].stride * merged[-1].size == dimension.stride:
            inner = merged[-1]
            merged[-1] = _Dimension(inner.size * dimension.size, inner.stride)
        # a dimension of one element does not change addresses
        elif dimension.size > 1:
            merged.append(dimension)
    return merged


def _count(dimensions: list[_Dimension]) -> int:
    """Elements of all dimensions together."""
    return math.prod(dimension.size for dimension in dimensions)


def _dimensions(x: torch.Tensor, dims: Sequence[int]) -> tuple[list[_Dimension], list[_Dimension]]:
    """(dimensions of ``x`` that are reduced, dimensions that stay); without ``dims`` none stays."""
    reduced, staying = list[_Dimension](), list[_Dimension]()
    # a negative dimension counts from the end
    reduced_dims = {dim % x.dim() for dim in dims}
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        dimension = _Dimension(size, stride)
        if not dims or dim in reduced_dims:
            reduced.append(dimension)
        else:
            staying.append(dimension)
    return reduced, staying


def _halve_until_addressable(dimensions: list[_Dimension], itemsize: int) -> None:
    """Split what 32 bit offsets do not reach: one part is reduced after the other.

    Source: TensorIteratorBase::get_dim_to_split, TensorIterator.cpp: the dimension that reaches
    furthest is split, and one of a single element reaches nowhere whatever its stride.
    """
    while sum(dimension.reach for dimension in dimensions) * itemsize > _LARGEST_SPAN:
        furthest = max(dimensions, key=lambda dimension: dimension.reach)
        furthest.size = _ceil(furthest.size, 2)


def _is_along_rows(reduced: list[_Dimension], staying: list[_Dimension]) -> bool:
    """Whether threads that are neighbours reduce one output together, not one each."""
    if not staying:
        return True
    if not reduced:
        return False
    return reduced[0].stride < staying[0].stride


def reduction_bytes(x: torch.Tensor, dims: Sequence[int], element: int = 0) -> tuple[int, ...]:
    """Bytes of the buffer and the semaphores with which blocks share a reduction over ``dims``.

    Where rows are contiguous every thread of a block has four outputs of its own, and the buffer is
    of all threads times all outputs: of a bias's gradient over 4,096 rows of 4,096, 128 MiB.

    Source: ReduceConfig and setReduceConfig, Reduce.cuh.
    """
    reduced, staying = _dimensions(x, dims)
    _halve_until_addressable(reduced + staying, x.itemsize)
    reduced, staying = _merged(reduced), _merged(staying)
    inputs, outputs = _count(reduced), _count(staying)
    if not inputs * outputs:
        return ()

    # the block: its columns lie along the fastest dimension
    along = _is_along_rows(reduced, staying)
    width, height = outputs, inputs
    if along:
        width, height = inputs, outputs
    vector = 1  # outputs of a thread
    fastest = reduced if along else staying
    contiguous = bool(fastest) and fastest[0].stride == 1
    if contiguous and along and width >= 128 and len(reduced) == 1:
        # threads read several elements of a row at once
        width //= 8 if x.itemsize == 2 else 4
    elif contiguous and not along:
        strides = [dimension.stride for dimension in reduced + staying[1:]]
        vector = math.gcd(4, staying[0].size, x.storage_offset(), *strides)
        width //= vector
    most_threads = _BLOCK // vector
    width = min(most_threads, _power_of_two(width))
    height = min(most_threads, _power_of_two(height))
    columns = min(width, _WARP)
    rows = min(height, most_threads // columns)
    columns = min(width, most_threads // rows)

    # rows of a block share the inputs of an output where there are enough, else each has its own
    inputs_at_once = columns if along else 1
    outputs_at_once = 1 if along else columns
    shared = _ceil(inputs, inputs_at_once) >= min(rows * 16, 256)
    if not shared:
        return ()
    inputs_at_once *= rows

    # blocks share them, too, where the outputs alone do not fill the processors
    grid = _ceil(outputs // vector, outputs_at_once)
    values = _ceil(inputs, inputs_at_once)  # of a thread
    target = _PROCESSORS * (_THREADS_PER_PROCESSOR // (columns * rows))
    if values < 256 or grid > target:
        return ()
    blocks = min(_ceil(target, grid), _ceil(values, 16))
    blocks = max(blocks, _ceil(values, 256))
    if blocks < 2:
        return ()
    element_bytes = element or max(4, x.itemsize)  # halves are added up in fp32
    buffer_bytes = element_bytes * outputs * blocks
    if not along:
        buffer_bytes *= columns * vector
    return buffer_bytes, 4 * grid


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
    return (*copies, *reduction_bytes(x, _dims_of(args)))


def _dims_of(args: Args) -> Sequence[int]:
    """The dimensions of a reduction, which may be one number, None or left out: then all."""
    dims = args[1] if len(args) > 1 else None
    if isinstance(dims, int):
        return [dims]
    return dims or ()


def _extreme(args: Args, out: torch.Tensor) -> Sequence[int]:
    """Of a reduction to an element of its input, in the input's type."""
    return reduction_bytes(args[0], _dims_of(args))


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
    count = indices.numel()
    # few indices: one kernel without sorting
    if count <= 3072 and not by_frequency:
        return ()
    segments = min(count, rows)
    parts = count // 10 + segments
    index_bytes = indices.itemsize
    sorted_indices = [count * index_bytes] * (3 if by_frequency else 2)
    segment_bounds = [segments * index_bytes] * 3
    counters = [8, 8]
    sums = parts * out.shape[-1] * max(4, out.itemsize)
    return (*sorted_indices, *segment_bounds, *counters, parts * index_bytes, sums)


def _pairs(args: Args, out: torch.Tensor) -> Sequence[int]:
    """The same of a reduction that also says where: a value and an int64 are 16 bytes."""
    return reduction_bytes(args[0], [args[1]], element=16)


def _sort(args: Args, out: torch.Tensor) -> Sequence[int]:
    """A copy of the values; of more than 4,096 two of their places, too, and what cub takes, which
    was measured (Sort.cpp, Sort.cu).
    """
    x = args[0]
    count = x.numel()
    if not x.dim() or not count:
        return ()
    numbers = [arg for arg in args[1:] if type(arg) is int]  # a bool is no dimension
    dim = numbers[0] if numbers else -1
    # small rows: one copy of the values is sorted in place
    if x.shape[dim] <= 4096:
        return (x.nbytes,)
    cub_bytes = 0
    # fewer than 128 rows: cub sorts them one by one, with temporary memory
    if count // x.shape[dim] < 128:
        cub_bytes = count // 4 + (16 << 10)
    return (x.nbytes, 8 * count, 8 * count, cub_bytes)


def _index_put(args: Args, out: torch.Tensor) -> Sequence[int]:
    """Where it adds: places, in order and as they were, twice each with what sorts them
    (index_put_with_sort_kernel, Indexing.cu).
    """
    accumulate = len(args) > 3 and args[3]
    if not accumulate:
        return ()
    shapes = [index.shape for index in args[1] if index is not None]
    count = math.prod(torch.broadcast_shapes(*shapes))
    return [8 * count] * 6


def _efficient_backward(args: Args, out: torch.Tensor) -> Sequence[int]:
    """A number a row, and the queries' gradient in fp32 (attention_backward.cu)."""
    batch, heads, rows, size = args[1].shape
    return (4 * batch * heads * rows, 4 * batch * heads * rows * size)


def _flash_backward(args: Args, out: torch.Tensor) -> Sequence[int]:
    """fp32 gradient of the queries, and a number a row (mha_bwd, flash_attn/flash_api.cpp)."""
    query, key = args[1:3]
    batch, heads, rows, size = query.shape
    padded_rows = _ceil(rows, 128) * 128
    numbers = 4 * batch * heads * padded_rows
    heads_of_group = heads // key.shape[1]
    if heads_of_group == 1:
        return (numbers, numbers * size)
    # gradients of keys and values of every head, before those of a group are added up
    of_every_head = key.nbytes * heads_of_group
    return (numbers, numbers * size, of_every_head, of_every_head)


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
    # an expanded dimension has stride 0
    if strides[-1] <= 0:
        return False
    for left, right in zip(strides, strides[1:], strict=False):
        if left < right:
            return False
    return True


def _fits(args: Args, kwargs: Kwargs, one_type: bool) -> bool:
    """Whether all tensors are like the first, in rows; numbers always are."""
    # options that change the result: torch itself answers
    if kwargs and not _KNOWN.issuperset(kwargs):
        return False
    first = args[0]
    if not isinstance(first, torch.Tensor) or not _rows(first):
        return False
    # numbers fit any tensor
    for argument in args[1:]:
        if isinstance(argument, torch.Tensor):
            if argument.shape != first.shape or not _rows(argument):
                return False
            if one_type and argument.dtype != first.dtype:
                return False
        elif not isinstance(argument, (int, float)):
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
    if not like.is_meta:
        return None
    dtype = like.dtype
    if kwargs:
        # with another option the result may be anywhere: torch itself answers
        if kwargs.keys() != {"dtype"}:
            return None
        dtype = kwargs["dtype"]
    return torch.empty(args[1], dtype=dtype, device=_META)


def _cat(args: Args, kwargs: Kwargs) -> torch.Tensor | None:
    parts = args[0]
    dim = args[1] if len(args) > 1 else 0
    first = parts[0]
    rank = first.dim()
    if kwargs or not 0 < rank < 4 or not _rows(first):  # four might be channels_last
        return None
    shape = list(first.shape)
    for part in parts[1:]:
        if part.dim() != rank or part.dtype != first.dtype or not _rows(part):
            return None
        shape_with_part = list(part.shape)
        shape_with_part[dim] += shape[dim]
        shape[dim] = shape_with_part[dim]
        if shape_with_part != shape:  # they differ beside the dimension, too
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
