"""Answers of collectives in which one member, or some of them, run for real.

Two classes with the same methods, one for every row of the table of collectives.  Inputs and
outputs are as c10d hands them over; a group is its size and group ranks here.  ``op`` is one of the
strings of :func:`reduce_op_name`.

``OneLocalMember``, where this process is the only real one: each method fills the caller's outputs
in place, in the caller's stream, without allocating (a peak measured here must be the real job's
peak; non-contiguous tensors are the exception) and without synchronising with the host.

``PartiallyLocalGroup``, with several: the k local members really communicate (``real``: a gloo or
NCCL group of just them).  Every virtual member is the mirror of one local member, dealt out in
turn, the same way on every local rank, so that all of them get the same answer.  With all members
local on NCCL nothing here is used: the call goes to the real group unchanged.  gloo lacks some of
what NCCL has (averages, bools, lists of all-to-all), so its groups are answered here even then.
These answers allocate temporaries and finish before they return; they are for semantics.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import distributed as dist
from torch.distributed import ReduceOp
from torch.distributed import distributed_c10d as c10d

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.runtime.known_values import forget, summed
from megatron_prism.runtime.values import PartialSums, Values, rms

_NAMES: dict[object, str] = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "avg",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.PRODUCT: "product",
    ReduceOp.BAND: "band",
    ReduceOp.BOR: "bor",
    ReduceOp.BXOR: "bxor",
    ReduceOp.PREMUL_SUM: "premul_sum",
}
_IDENTITIES = frozenset({"avg", "min", "max", "band", "bor"})


def reduce_op_name(op: ReduceOp | ReduceOp.RedOpType) -> str:
    """``sum``, ``avg``, ``min``, ``max``, ``product``, ``band``, ``bor``, ``bxor`` or
    ``premul_sum``.
    """
    kind: object = getattr(op, "op", op)
    return _NAMES[kind]


def reduction_of(op: ReduceOp | ReduceOp.RedOpType, tensor: torch.Tensor) -> str:
    """The name of ``op``, which ``tensor`` is reduced with.

    Raises UnsupportedError for a premultiplied sum of values: c10d does not give its factor back.
    """
    name = reduce_op_name(op)
    if name == "premul_sum" and not tensor.is_meta:
        message = "a premultiplied sum has no virtual answer: c10d does not say its factor"
        fix = "--no-gradient-reduce-div-fusion (Megatron-FSDP), or --prism-tier meta"
        raise UnsupportedError(message, fix=fix)
    return name


def fill_rows(out: torch.Tensor, source: torch.Tensor) -> None:
    """Fill ``out`` [m, ...] with the rows of ``source`` [r, ...], repeated or cut to m rows."""
    # tier meta has no values, and an empty tensor holds none
    if out.is_meta or not out.numel():
        return
    if out.shape == source.shape:
        out.detach().copy_(source.detach())
        return
    # the copies lie behind each other in a flat view, which a tensor with gaps does not have
    if not out.is_contiguous():
        filled = torch.empty_like(out, memory_format=torch.contiguous_format)
        fill_rows(filled, source)
        out.detach().copy_(filled)
        return
    # flat: as many whole copies as fit, and the beginning of one more
    target, rows = out.detach().view(-1), source.detach().reshape(-1)
    # a source without rows: zeros are finite
    if not rows.numel():
        target.zero_()
        return
    if rows.numel() >= target.numel():
        target.copy_(rows[: target.numel()])
        return
    full_copies = target.numel() // rows.numel()
    target[: full_copies * rows.numel()].view(full_copies, -1).copy_(rows)
    remainder = target[full_copies * rows.numel() :]
    remainder.copy_(rows[: remainder.numel()])


# reduce ops of 0 and 1 as bytes
_FOR_BOOLS = {"sum": "max", "product": "min", "band": "min", "bor": "max"}
_FOR_BOOLS |= {op: op for op in ("min", "max", "bxor")}


def _contiguous_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format, requires_grad=False)


class OneLocalMember:
    """Answers for a group of which this process is the only member that runs.

    n, p : size of the whole group, group rank of this process
    """

    def __init__(self, n: int, p: int) -> None:
        self.n, self.p = n, p

    def reduced(self, tensor: torch.Tensor, op: str, values: Values) -> None:
        """In place: the reduction of ``tensor`` over n members, as if all held it (any shape).

        With the policy "noise" the others' values differ a little.  A sum of parts
        (``Values.of_parts``) is completed.  Sums and products of bools are ``or`` and ``and``, as
        NCCL has them.
        """
        # among members that are alike, these operations give what each member holds
        if self.n == 1 or op in _IDENTITIES:
            return
        # shapes alone: the sum of a known flag is known, all else is not
        if tensor.is_meta:
            if op == "sum":
                summed(tensor, self.n)
            else:
                forget(tensor)
            return
        target = tensor.detach()
        # of equal bools, ``or`` and ``and`` are the bool itself
        if target.dtype == torch.bool and op != "bxor":
            return
        if op == "sum":
            # a sum of parts is what the local members hold, or is looked up in the table
            if values.parts is not None and (values.parts.once or values.parts.fill(target)):
                return
            if values.policy == "noise" and target.is_floating_point():
                values.add_peers(target, self.n - 1)
            else:
                target.mul_(self.n)
        elif op == "product":
            target.pow_(self.n)
        elif self.n % 2 == 0:  # bxor of an even number of equal words
            target.zero_()

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, values: Values) -> None:
        """``out`` [n*k] from ``shard`` [k]: copies of the shard in every slot.

        In place (``shard`` is slot p of ``out``) the other slots keep what they hold: a parameter
        gather leaves the peers' parameters at their last known values, which are finite and
        plausible, where copying would give every shard the local one's values.
        """
        if out.is_meta or not shard.numel():
            return
        slots = out.detach().view(self.n, -1)
        # in place
        if slots[self.p].data_ptr() == shard.data_ptr():
            return
        # noise: the peers' shards differ from this one, and have its root mean square
        if values.policy == "noise" and shard.is_floating_point():
            slots.normal_(generator=values.generator(out.device))
            slots.mul_(rms(shard).to(out.dtype))
            slots[self.p].copy_(shard.detach().reshape(-1))
        else:
            slots.copy_(shard.detach().reshape(1, -1))
        if values.parts is not None:
            values.parts.gathered(slots, shard, [self.p] * self.n)

    def gather_list(self, outs: Sequence[torch.Tensor], shard: torch.Tensor) -> None:
        """List form: every output, also of another size than the shard, gets its values."""
        for out in outs:
            if out.data_ptr() != shard.data_ptr() or out.is_meta:
                fill_rows(out, shard)

    def reduce_scatter(
        self,
        out: torch.Tensor,
        all_chunks: torch.Tensor,
        op: str,
        values: Values,
        sequence: bool = False,
    ) -> None:
        """``out`` [k] from ``all_chunks`` [n*k]: the local chunk, reduced over n equal members.

        sequence : mirrored chunks are added up instead (``values.holds_sequences``)
        """
        if out.is_meta or not out.numel():
            return
        # members hold parts of the sum that are known: it is completed
        parts = values.parts
        if op == "sum" and self.n > 1 and parts is not None and parts.fill(out, self.n, self.p):
            return
        # stretches of one sequence; where the sum is in place the other chunks are the job's own
        chunks = all_chunks.detach().view(self.n, -1)
        chunk = chunks[self.p]
        if op == "sum" and sequence and values.mirrors(out) and out.data_ptr() != chunk.data_ptr():
            torch.sum(chunks, 0, out=out.detach().view(-1))
            return
        # n equal members
        if out.data_ptr() != chunk.data_ptr():
            out.detach().view(-1).copy_(chunk)
        self.reduced(out, op, values)

    def reduce_scatter_list(
        self, out: torch.Tensor, parts: Sequence[torch.Tensor], op: str, values: Values
    ) -> None:
        """List form of reduce_scatter."""
        fill_rows(out, parts[self.p])
        self.reduced(out, op, values)

    def all_to_all(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
    ) -> None:
        """``out`` [sum of receive splits, ...] from ``source`` [sum of send splits, ...].

        Peers answer with the mirror image of what is sent to them.  Sizes come from the caller's
        own receive splits, so they are right by construction.  No splits: equal ones.  What this
        member sends to itself arrives as it is; the other rows are not aligned to their peers,
        which would take a copy for each.
        """
        fill_rows(out, source)
        # what this member sends to itself lies elsewhere in the two tensors
        if list(out_splits) != list(in_splits) and not out.is_meta:
            to, start = sum(out_splits[: self.p]), sum(in_splits[: self.p])
            own_rows = source.detach()[start : start + in_splits[self.p]]
            out.detach()[to : to + out_splits[self.p]].copy_(own_rows)

    def all_to_all_list(self, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor]) -> None:
        """List form of all_to_all."""
        for out, source in zip(outs, ins, strict=True):
            fill_rows(out, source)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """A virtual root holds what this member holds."""

    def reduce(self, tensor: torch.Tensor, op: str, root: int, values: Values) -> None:
        """As reduced(), on ``root`` only."""
        if self.p == root:
            self.reduced(tensor, op, values)

    def gather(self, outs: Sequence[torch.Tensor], shard: torch.Tensor, root: int) -> None:
        """To ``root`` only; ``outs`` is empty elsewhere."""
        self.gather_list(outs, shard)

    def scatter(
        self, out: torch.Tensor, parts: Sequence[torch.Tensor], root: int, values: Values
    ) -> None:
        """From ``root``; a virtual root, which gives no ``parts``, sends noise."""
        if parts:
            fill_rows(out, parts[self.p])
        else:
            values.receive(out)

    def barrier(self, device: torch.device) -> None:
        """Nobody is waited for."""


class PartiallyLocalGroup:
    """Answers for one group.

    real      : the real c10d group of the local members, in group-rank order
    positions : group ranks of the local members, ascending
    n, p      : size of the whole group, group rank of this process
    """

    def __init__(self, real: dist.ProcessGroup, positions: Sequence[int], n: int, p: int) -> None:
        self.real = real
        self.positions = tuple(positions)
        self.n, self.p = n, p
        self.index = self.positions.index(p)
        slot_of = {position: i for i, position in enumerate(self.positions)}
        turn = itertools.cycle(range(len(self.positions)))
        # group rank -> index of the local member that it is or mirrors
        self.mirrors = []
        for member in range(n):
            slot = slot_of.get(member)
            # a virtual member mirrors the local ones in turn
            if slot is None:
                slot = next(turn)
            self.mirrors.append(slot)
        # group rank -> group rank of that member
        self.owners = [self.positions[source] for source in self.mirrors]
        self.weight = self.mirrors.count(self.index)
        # group rank -> whether its part of a sum of parts is this process's to give
        self.held = [member == self.index for member in self.mirrors]

    def local_index(self, group_rank: int) -> int | None:
        """Index of ``group_rank`` among the local members, None if it is virtual."""
        return self.positions.index(group_rank) if group_rank in self.positions else None

    def _all_reduce(self, tensor: torch.Tensor, op: str) -> None:
        opts = c10d.AllreduceOptions()
        opts.reduceOp = getattr(dist.ReduceOp, op.upper())
        self.real.allreduce([tensor], opts).wait()

    def _parts_of(self, op: str, parts: PartialSums | None) -> PartialSums | None:
        """What completes this reduction: with all members here there is nothing to complete."""
        return parts if op == "sum" and len(self.positions) < self.n else None

    def reduced(self, tensor: torch.Tensor, op: str, values: Values) -> None:
        """In place: the reduction over the local members, each counted once per mirror.

        A sum of which every member holds a part is completed (``Values.of_parts``).
        """
        self._reduced(tensor, op, values.parts)

    def _reduced(self, tensor: torch.Tensor, op: str, parts: PartialSums | None = None) -> None:
        target = tensor.detach()
        # parts of a sum: each member's counts once, or what all hold is put together first
        rows, weight = self._parts_of(op, parts), self.weight
        if rows is not None and rows.once:
            weight = 1
        elif rows is not None:
            part = _contiguous_like(target)
            if rows.fill(part, held=self.held):
                self._all_reduce(part, "sum")
                target.copy_(part)
                return
        if target.dtype == torch.bool:  # gloo reduces none
            words = target.to(torch.uint8, memory_format=torch.contiguous_format)
            self._reduced(words, _FOR_BOOLS[op])
            target.copy_(words)
            return

        # a local member stands for itself and for those that mirror it
        buffer = target.contiguous()
        divide = op == "avg" and not target.is_floating_point()
        if op == "sum" or divide:
            buffer.mul_(weight)
        elif op == "avg":  # scaled before it is added, as NCCL does: no overflow in half precision
            buffer.mul_(self.weight / self.n)
        elif op == "product":
            buffer.pow_(self.weight)
        # an even number of equal operands
        elif op == "bxor" and self.weight % 2 == 0:
            buffer.zero_()
        self._all_reduce(buffer, "sum" if op == "avg" else op)
        if divide:
            buffer.div_(self.n, rounding_mode="trunc")
        if buffer is not target:
            target.copy_(buffer)

    def _gather(self, shard: torch.Tensor) -> list[torch.Tensor]:
        outs = [_contiguous_like(shard) for _ in self.positions]
        self.real.allgather([outs], [shard.detach().contiguous()], c10d.AllgatherOptions()).wait()
        return outs

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, values: Values) -> None:
        """``out`` [n*k]; slots of virtual members keep their values if the gather is in place."""
        if not shard.numel():
            return
        slots = out.detach().view(self.n, -1)
        in_place = slots[self.p].data_ptr() == shard.data_ptr()
        gathered = self._gather(shard)
        # a virtual member's slot takes the shard that its mirror sent
        for position, source in enumerate(self.mirrors):
            if not in_place or position in self.positions:
                slots[position].copy_(gathered[source].view(-1))
        if values.parts is not None:
            values.parts.gathered(slots, shard, self.owners)

    def gather_list(self, outs: Sequence[torch.Tensor], shard: torch.Tensor) -> None:
        """List form; members may hold shards of different sizes, so each is broadcast in turn."""
        received = [_contiguous_like(outs[position]) for position in self.positions]
        received[self.index].copy_(shard.detach())
        for position, buffer in zip(self.positions, received, strict=True):
            self.broadcast(buffer, position)
        for position, out in enumerate(outs):
            fill_rows(out, received[self.mirrors[position]])

    def reduce_scatter(
        self,
        out: torch.Tensor,
        all_chunks: torch.Tensor,
        op: str,
        values: Values,
        sequence: bool = False,
    ) -> None:
        """``out`` [k] from ``all_chunks`` [n*k] of every local member; parts as in reduced().

        sequence : the chunks of whom a local member is or mirrors are added up instead of weighed
        """
        slots = all_chunks.detach().view(self.n, -1)
        chunks = slots[list(self.positions)].contiguous()
        rows, places = self._parts_of(op, values.parts), zip(chunks, self.positions, strict=True)
        # each member's rows of the table, which add up to the whole
        if rows is not None and all(rows.fill(c, self.n, p, self.held) for c, p in places):
            self._all_reduce(chunks, "sum")
        # a sequence is dealt out: the local member also has the parts of whom it mirrors
        elif op == "sum" and sequence and out.is_floating_point():
            for position, source in enumerate(self.mirrors):
                if position not in self.positions:
                    chunks[source].add_(slots[position])
            self._all_reduce(chunks, "sum")
        else:
            self._reduced(chunks, op)
        out.detach().view(-1).copy_(chunks[self.index])

    def reduce_scatter_list(
        self, out: torch.Tensor, parts: Sequence[torch.Tensor], op: str, values: Values
    ) -> None:
        """List form of reduce_scatter; parts may differ in size."""
        for index, position in enumerate(self.positions):
            buffer = parts[position].detach().clone()
            self._reduced(buffer, op)
            if index == self.index:
                out.detach().copy_(buffer)

    def all_to_all(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
    ) -> None:
        """As ``OneLocalMember.all_to_all``."""
        self.all_to_all_list(self._split(out, out_splits), self._split(source, in_splits))

    def _split(self, tensor: torch.Tensor, splits: Sequence[int]) -> Sequence[torch.Tensor]:
        rows = list(splits) or [tensor.shape[0] // self.n] * self.n
        return tensor.detach().split(rows)

    def all_to_all_list(self, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor]) -> None:
        """Exact between local members; virtual members answer with the mirror image."""
        local_in = [ins[position].detach().contiguous() for position in self.positions]
        local_out = [_contiguous_like(outs[position]) for position in self.positions]
        # gloo has no all-to-all of lists
        if local_in[0].device.type == "cpu":
            self._exchange(local_out, local_in)
        else:
            self.real.alltoall(local_out, local_in, c10d.AllToAllOptions()).wait()
        for position, buffer in zip(self.positions, local_out, strict=True):
            outs[position].detach().copy_(buffer)
        # a virtual member sends back what it is sent
        for position, out in enumerate(outs):
            if position not in self.positions:
                fill_rows(out, ins[position])

    def _exchange(self, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor]) -> None:
        """All-to-all by sends and receives: gloo has no list form."""
        works = []
        for index in range(len(self.positions)):
            # a process sends nothing to itself
            if index == self.index:
                outs[index].copy_(ins[index])
                continue
            works.append(self.real.send([ins[index]], index, 0))
            works.append(self.real.recv([outs[index]], index, 0))
        for work in works:
            work.wait()

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """From ``root`` (group rank), or from the local member that a virtual root mirrors."""
        opts = c10d.BroadcastOptions()
        opts.rootRank = self.mirrors[root]
        opts.rootTensor = 0
        buffer = tensor.detach().contiguous()
        self.real.broadcast([buffer], opts).wait()
        if not tensor.is_contiguous():
            tensor.detach().copy_(buffer)

    def reduce(self, tensor: torch.Tensor, op: str, root: int, values: Values) -> None:
        """As reduced(), on ``root`` only."""
        buffer = tensor.detach().clone()
        self._reduced(buffer, op)
        if self.p == root:
            tensor.detach().copy_(buffer)

    def gather(self, outs: Sequence[torch.Tensor], shard: torch.Tensor, root: int) -> None:
        """To ``root`` only; ``outs`` is empty elsewhere."""
        gathered = self._gather(shard)
        if self.p == root:
            for position, out in enumerate(outs):
                out.detach().copy_(gathered[self.mirrors[position]])

    def scatter(
        self, out: torch.Tensor, parts: Sequence[torch.Tensor], root: int, values: Values
    ) -> None:
        """From ``root``; a virtual root sends noise, since no local tensor is like its parts."""
        if self.local_index(root) is None:
            values.receive(out)
            return
        stack = torch.empty(len(self.positions), *out.shape, dtype=out.dtype, device=out.device)
        # the root's parts of all local members go in one broadcast
        if self.p == root:
            for index, position in enumerate(self.positions):
                stack[index].copy_(parts[position].detach())
        self.broadcast(stack, root)
        out.detach().copy_(stack[self.index])

    def barrier(self, device: torch.device) -> None:
        """Among the local members: an all-reduce of one word, which every backend has."""
        self._all_reduce(torch.zeros(1, dtype=torch.int32, device=device), "sum")
