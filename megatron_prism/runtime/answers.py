"""Answers of collectives in which this process is the only real member.

One function per row of the table of collectives, named after the row.  Each fills the caller's
outputs in place, in the caller's stream, without allocating (a peak measured here must be the real
job's peak; non-contiguous tensors are the exception) and without synchronising with the host.
Inputs and outputs are as c10d hands them over; ``n`` is the group's size, ``p`` the local member's
group rank.  Groups with several local members are answered in ``mixed_groups``; ranks and groups
are unknown here.

``reduce_op`` is one of the strings of :func:`reduce_op_name`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import ReduceOp

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.runtime.known_values import forget
from megatron_prism.runtime.values import Values, rms

__all__ = [
    "all_gather",
    "all_to_all",
    "fill_rows",
    "gather",
    "reduce_op_name",
    "reduce_scatter",
    "reduced",
]

_NAMES: dict[object, str] = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "avg",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.PRODUCT: "product",
    ReduceOp.BAND: "band",
    ReduceOp.BOR: "bor",
    ReduceOp.BXOR: "bxor",
}
_IDENTITIES = frozenset({"avg", "min", "max", "band", "bor"})


def reduce_op_name(op: ReduceOp | ReduceOp.RedOpType) -> str:
    """``sum``, ``avg``, ``min``, ``max``, ``product``, ``band``, ``bor`` or ``bxor``.

    Raises UnsupportedError for PREMUL_SUM, whose factor c10d does not give back to Python.
    """
    kind: object = getattr(op, "op", op)
    name = _NAMES.get(kind)
    if name is None:
        raise UnsupportedError(
            f"reduce op {op} has no virtual answer",
            fix="use a plain SUM and scale before it (Megatron-FSDP: drop --nccl-ub's premul sum)",
        )
    return name


def reduced(tensor: torch.Tensor, op: str, n: int, values: Values) -> None:
    """In place: the reduction of ``tensor`` over n members that all hold it (any shape).

    A sum of parts (``Values.of_parts``) is completed.  Sums and products of bools are ``or`` and
    ``and``, as NCCL has them.
    """
    if n == 1 or op in _IDENTITIES:
        return
    if tensor.is_meta:
        forget(tensor)
        return
    target = tensor.detach()
    if target.dtype == torch.bool and op != "bxor":
        return
    if op == "sum":
        if values.parts is not None and (values.parts.once or values.parts.fill(target)):
            return
        if values.policy == "noise" and target.is_floating_point():
            values.add_peers(target, n - 1)
        else:
            target.mul_(n)
    elif op == "product":
        target.pow_(n)
    elif n % 2 == 0:  # bxor of an even number of equal words
        target.zero_()


def all_gather(out: torch.Tensor, shard: torch.Tensor, n: int, p: int, values: Values) -> None:
    """``out`` [n*k] from ``shard`` [k]: copies of the shard in every slot.

    In place (``shard`` is slot p of ``out``) the other slots keep what they hold: a parameter
    gather leaves the peers' parameters at their last known values, which are finite and plausible,
    where copying would give every shard the local one's values.
    """
    if out.is_meta or not shard.numel():
        return
    slots = out.detach().view(n, -1)
    if slots[p].data_ptr() == shard.data_ptr():
        return
    if values.policy == "noise" and shard.is_floating_point():
        slots.normal_(generator=values.generator(out.device))
        slots.mul_(rms(shard).to(out.dtype))
        slots[p].copy_(shard.detach().reshape(-1))
    else:
        slots.copy_(shard.detach().reshape(1, -1))
    if values.parts is not None:
        values.parts.gathered(slots, shard, [p] * n)


def reduce_scatter(
    out: torch.Tensor,
    whole: torch.Tensor,
    op: str,
    n: int,
    p: int,
    values: Values,
    sequence: bool = False,
) -> None:
    """``out`` [k] from ``whole`` [n*k]: the local chunk, reduced over n equal members.

    sequence : mirrored chunks are added up instead (``parts.holds_sequences``)
    """
    if out.is_meta or not out.numel():
        return
    if op == "sum" and n > 1 and values.parts is not None and values.parts.fill(out, n, p):
        return
    chunks = whole.detach().view(n, -1)
    chunk = chunks[p]
    if op == "sum" and sequence and values.mirrors(out) and out.data_ptr() != chunk.data_ptr():
        torch.sum(chunks, 0, out=out.detach().view(-1))
        return
    if out.data_ptr() != chunk.data_ptr():
        out.detach().view(-1).copy_(chunk)
    reduced(out, op, n, values)


def fill_rows(out: torch.Tensor, source: torch.Tensor) -> None:
    """Fill ``out`` [m, ...] with the rows of ``source`` [r, ...], repeated or cut to m rows."""
    if out.is_meta or not out.numel():
        return
    if out.shape == source.shape:
        out.detach().copy_(source.detach())
        return
    if not out.is_contiguous():
        filled = torch.empty_like(out, memory_format=torch.contiguous_format)
        fill_rows(filled, source)
        out.detach().copy_(filled)
        return
    target, rows = out.detach().view(-1), source.detach().reshape(-1)
    if not rows.numel():
        target.zero_()
        return
    if rows.numel() >= target.numel():
        target.copy_(rows[: target.numel()])
        return
    whole = target.numel() // rows.numel()
    target[: whole * rows.numel()].view(whole, -1).copy_(rows)
    rest = target[whole * rows.numel() :]
    rest.copy_(rows[: rest.numel()])


def all_to_all(
    out: torch.Tensor,
    source: torch.Tensor,
    out_splits: Sequence[int],
    in_splits: Sequence[int],
    p: int,
) -> None:
    """``out`` [sum of receive splits, ...] from ``source`` [sum of send splits, ...].

    Peers answer with the mirror image of what is sent to them.  Sizes come from the caller's own
    receive splits, so they are right by construction.  No splits: equal ones.  What this member
    sends to itself arrives as it is; the other rows are not aligned to their peers, which would
    take a copy for each.
    """
    fill_rows(out, source)
    if list(out_splits) != list(in_splits) and not out.is_meta:
        to, start = sum(out_splits[:p]), sum(in_splits[:p])
        mine = source.detach()[start : start + in_splits[p]]
        out.detach()[to : to + out_splits[p]].copy_(mine)


def gather(outs: Sequence[torch.Tensor], shard: torch.Tensor) -> None:
    """List form: every output, also of another size than the shard, gets the shard's values."""
    for out in outs:
        if out.data_ptr() != shard.data_ptr() or out.is_meta:
            fill_rows(out, shard)
