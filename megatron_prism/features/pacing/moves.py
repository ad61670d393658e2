"""What one kernel must move to give the answer of ``answers``.

Most answers repeat bytes of one tensor in another, or scale a tensor where it is.  Those the pacing
kernel gives itself, at the pace at which the call runs; ``move_of`` answers None for all others,
which take the functions of ``answers`` and several kernels.  What NCCL would rewrite with the same
bytes (an average of equal tensors) is rewritten, so that the memory is as busy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed import ReduceOp

from megatron_prism.runtime.answers import reduce_op_name

if TYPE_CHECKING:
    from torch.distributed import AllreduceOptions, ReduceScatterOptions

    from megatron_prism.runtime.process_group import PrismGroup

COPY = 0
ADDED = 16  # what is added to a kind of number whose chunks are added up
# how a kind of number is scaled; what is no number here is only copied
KINDS = {
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float32: 3,
    torch.float64: 4,
    torch.int32: 5,
    torch.int64: 6,
}
_KEPT = frozenset({"avg", "min", "max", "band", "bor"})  # equal members reduce to any of them
# comparing takes a sixth of asking for the name
_SUM, _AVERAGE = ReduceOp(ReduceOp.SUM), ReduceOp(ReduceOp.AVG)


class Move(NamedTuple):
    """``to[i] = scale * source[i % period]`` for every byte i below ``size``.

    From kind ADDED on: the sum of ``scale`` chunks of ``source``, each ``period`` bytes long.

    to, source   : addresses; equal where a tensor is rewritten
    size, period : bytes of the one and the other
    kind, scale  : COPY, or which numbers are scaled, or ADDED and which are added up
    read, seen   : address and bytes of what is read besides, as sending it would
    payload      : bytes of the call, as the tally counts them
    outs         : what the call answers
    """

    to: int
    source: int
    size: int
    period: int
    kind: int
    scale: int
    read: int
    seen: int
    payload: int
    outs: Sequence[torch.Tensor]


def _rewritten(tensor: torch.Tensor, kind: int, scale: int, size: int) -> Move | None:
    """Bytes of a tensor that stay where they are, scaled or written again."""
    if not tensor.is_contiguous():
        return None
    at = tensor.data_ptr()
    return Move(at, at, size, size, kind, scale, 0, 0, size, (tensor,))


def _scaling(
    group: PrismGroup, tensor: torch.Tensor, reduce_op: ReduceOp
) -> tuple[int, int] | None:
    """(kind, scale) of a reduction of equal tensors; None if it takes more."""
    if reduce_op == _AVERAGE:
        return COPY, 1
    if reduce_op != _SUM:
        if reduce_op_name(reduce_op) in _KEPT:
            return COPY, 1
        return None
    # parts of a sum are completed, not scaled
    if group._values.parts is not None:
        return None
    kind = KINDS.get(tensor.dtype)
    if kind is None:
        return None
    # noise is drawn for fractions, and integers are mirrored
    if tensor.is_floating_point() and group._values.policy == "noise":
        return None
    return kind, group._n


def _all_reduce(
    group: PrismGroup, tensors: list[torch.Tensor], opts: AllreduceOptions | None = None
) -> Move | None:
    if len(tensors) != 1 or opts is None:
        return None
    tensor = tensors[0]
    scaling = _scaling(group, tensor, opts.reduceOp)
    if scaling is None:
        return None
    kind, scale = scaling
    return _rewritten(tensor, kind, scale, tensor.nbytes)


def _broadcast(group: PrismGroup, tensors: list[torch.Tensor], opts: object = None) -> Move | None:
    if len(tensors) != 1:
        return None
    return _rewritten(tensors[0], COPY, 1, tensors[0].nbytes)


def _all_gather(
    group: PrismGroup, out: torch.Tensor, shard: torch.Tensor, opts: object = None
) -> Move | None:
    if not (out.is_contiguous() and shard.is_contiguous()) or group._values.parts is not None:
        return None
    to, source = out.data_ptr(), shard.data_ptr()
    size, part = out.nbytes, shard.nbytes
    # answers says what is wrong
    if out.dtype != shard.dtype or size != group._n * part:
        return None
    # in place: the others keep what they hold
    if source == to + group._p * part:
        return Move(to, to, size, size, COPY, 1, 0, 0, size, (out,))
    if group._values.policy == "noise" and shard.is_floating_point():
        return None
    return Move(to, source, size, part, COPY, 1, 0, 0, size, (out,))


def _reduce_scatter(
    group: PrismGroup, out: torch.Tensor, full: torch.Tensor, opts: ReduceScatterOptions
) -> Move | None:
    if not (out.is_contiguous() and full.is_contiguous()) or out.dtype != full.dtype:
        return None
    part, size = out.nbytes, full.nbytes
    scaling = _scaling(group, out, opts.reduceOp)
    if scaling is None or size != group._n * part:
        return None
    to, read = out.data_ptr(), full.data_ptr()
    source = read + group._p * part
    kind, scale = scaling
    # stretches of one sequence: the transpose of gathered copies is the sum of all chunks
    # (``values.holds_sequences``)
    is_sum_of_chunks = kind and group._sequence and group._values.mirrors(out)
    if is_sum_of_chunks and to != source:
        return Move(to, read, part, part, ADDED + kind, scale, 0, 0, size, (out,))
    return Move(to, source, part, part, kind, scale, read, size, size, (out,))


def _all_to_all(
    group: PrismGroup,
    out: torch.Tensor,
    source: torch.Tensor,
    out_splits: Sequence[int],
    in_splits: Sequence[int],
    opts: object = None,
) -> Move | None:
    # with other splits what a rank sends to itself lies elsewhere in the two
    if list(out_splits) != list(in_splits) or out.dtype != source.dtype or not source.numel():
        return None
    if not (out.is_contiguous() and source.is_contiguous()):
        return None
    size, period = out.nbytes, source.nbytes
    payload = max(size, period)
    return Move(out.data_ptr(), source.data_ptr(), size, period, COPY, 1, 0, 0, payload, (out,))


def _send(group: PrismGroup, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Move | None:
    tensor = tensors[0]
    if group._ring(tensor) is not None or len(tensors) != 1 or not tensor.is_contiguous():
        return None
    size = tensor.nbytes
    return Move(0, 0, 0, 0, COPY, 1, tensor.data_ptr(), size, size, ())


def _barrier(group: PrismGroup, opts: object = None) -> Move:
    return Move(0, 0, 0, 0, COPY, 1, 0, 0, 0, ())


def _of_one_tensor(find: Callable[..., Move | None]) -> Callable[..., Move | None]:
    """``find`` for a coalesced call of one tensor, as Megatron makes one of every bucket."""

    def move(
        group: PrismGroup,
        outs: Sequence[torch.Tensor],
        ins: Sequence[torch.Tensor],
        opts: object = None,
    ) -> Move | None:
        if len(outs) != 1 or len(ins) != 1:
            return None
        return find(group, outs[0], ins[0], opts)

    return move


move_of: dict[str, Callable[..., Move | None]] = {
    "allreduce": _all_reduce,
    "allreduce_coalesced": _all_reduce,
    "broadcast": _broadcast,
    "_allgather_base": _all_gather,
    "all_gather_single": _all_gather,
    "allgather_into_tensor_coalesced": _of_one_tensor(_all_gather),
    "all_gather_single_coalesced": _of_one_tensor(_all_gather),
    "_reduce_scatter_base": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "reduce_scatter_tensor_coalesced": _of_one_tensor(_reduce_scatter),
    "reduce_scatter_single_coalesced": _of_one_tensor(_reduce_scatter),
    "alltoall_base": _all_to_all,
    "all_to_all_single": _all_to_all,
    "send": _send,
    "barrier": _barrier,
}
