"""What does a collective answer when some, but not all, members of its group run for real?

The k local members really communicate (``real``: a gloo or NCCL group of just them).  Every virtual
member is the mirror of one local member, dealt out in turn, the same way on every local rank, so that
all of them get the same answer.  With all members local nothing here is used: the call goes to the
real group unchanged.

These answers allocate temporaries and finish before they return; they are for semantics.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed as dist

from megatron_prism.virtual.answers import fill_rows
from megatron_prism.virtual.values import Values

__all__ = ["Mixed"]


class Mixed:
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
        self.mirrors: list[int] = []  # group rank -> index of the local member that it is or mirrors
        dealt = 0
        for position in range(n):
            if position in slot_of:
                self.mirrors.append(slot_of[position])
            else:
                self.mirrors.append(dealt % len(self.positions))
                dealt += 1
        self.weight = self.mirrors.count(self.index)

    def local_index(self, group_rank: int) -> int | None:
        """Index of ``group_rank`` among the local members, None if it is virtual."""
        return self.positions.index(group_rank) if group_rank in self.positions else None

    def _all_reduce(self, tensor: torch.Tensor, op: str) -> None:
        opts = dist.AllreduceOptions()
        opts.reduceOp = getattr(dist.ReduceOp, op.upper())
        self.real.allreduce([tensor], opts).wait()

    def reduced(self, tensor: torch.Tensor, op: str) -> None:
        """In place: the reduction over the local members, each counted once per mirror."""
        target = tensor.detach()
        buffer = target if target.is_contiguous() else target.contiguous()
        if op == "sum":
            buffer.mul_(self.weight)
        elif op == "avg":
            buffer.mul_(self.weight / self.n)
            op = "sum"
        elif op == "product":
            buffer.pow_(self.weight)
        elif op == "bxor" and self.weight % 2 == 0:
            buffer.zero_()
        self._all_reduce(buffer, op)
        if buffer is not target:
            target.copy_(buffer)

    def _gather(self, shard: torch.Tensor) -> list[torch.Tensor]:
        outs = [torch.empty_like(shard) for _ in self.positions]
        self.real.allgather([outs], [shard.detach().contiguous()], dist.AllgatherOptions()).wait()
        return outs

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """``out`` [n*k]; slots of virtual members keep their values if the gather is in place."""
        in_place = out.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
        gathered = self._gather(shard.clone() if in_place else shard)
        slots = out.detach().view(self.n, -1)
        for position, source in enumerate(self.mirrors):
            if not in_place or position in self.positions:
                slots[position].copy_(gathered[source].view(-1))

    def gather_list(self, outs: Sequence[torch.Tensor], shard: torch.Tensor) -> None:
        """List form; members may hold shards of different sizes, so each is broadcast in turn."""
        received: dict[int, torch.Tensor] = {}
        for index, position in enumerate(self.positions):
            buffer = shard.detach().clone() if index == self.index else torch.empty_like(outs[position])
            self.broadcast(buffer.contiguous(), position)
            received[index] = buffer
        for position, out in enumerate(outs):
            fill_rows(out, received[self.mirrors[position]])

    def reduce_scatter(self, out: torch.Tensor, whole: torch.Tensor, op: str) -> None:
        """``out`` [k] from ``whole`` [n*k] of every local member."""
        chunks = whole.detach().view(self.n, -1)[list(self.positions)].contiguous()
        self.reduced(chunks, op)
        out.detach().view(-1).copy_(chunks[self.index])

    def reduce_scatter_list(
        self, out: torch.Tensor, parts: Sequence[torch.Tensor], op: str
    ) -> None:
        """List form of reduce_scatter; parts may differ in size."""
        for index, position in enumerate(self.positions):
            buffer = parts[position].detach().clone()
            self.reduced(buffer, op)
            if index == self.index:
                out.detach().copy_(buffer.view_as(out))

    def all_to_all_list(self, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor]) -> None:
        """Exact between local members; virtual members answer with the mirror image."""
        local_in = [ins[position].detach().contiguous() for position in self.positions]
        local_out = [torch.empty_like(outs[position]) for position in self.positions]
        if local_in[0].device.type == "cpu":
            self._exchange(local_out, local_in)
        else:
            self.real.alltoall(local_out, local_in, dist.AllToAllOptions()).wait()
        for position, buffer in zip(self.positions, local_out, strict=True):
            outs[position].detach().copy_(buffer)
        for position, out in enumerate(outs):
            if position not in self.positions:
                fill_rows(out, ins[position])

    def _exchange(self, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor]) -> None:
        """All-to-all by sends and receives: gloo has no list form."""
        works = []
        for index in range(len(self.positions)):
            if index == self.index:
                outs[index].copy_(ins[index])
                continue
            works.append(self.real.send([ins[index]], index, 0))
            works.append(self.real.recv([outs[index]], index, 0))
        for work in works:
            work.wait()

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """From ``root`` (group rank); a virtual root mirrors the first local member."""
        opts = dist.BroadcastOptions()
        opts.rootRank = self.local_index(root) or 0
        opts.rootTensor = 0
        self.real.broadcast([tensor.detach()], opts).wait()

    def reduce(self, tensor: torch.Tensor, op: str, root: int) -> None:
        """As reduced(), on ``root`` only."""
        buffer = tensor.detach().clone()
        self.reduced(buffer, op)
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
        if self.p == root:
            for index, position in enumerate(self.positions):
                stack[index].copy_(parts[position].detach())
        self.broadcast(stack, root)
        out.detach().copy_(stack[self.index])

    def barrier(self, device: torch.device) -> None:
        """Among the local members: an all-reduce of one word, which every backend has."""
        self._all_reduce(torch.zeros(1, dtype=torch.int32, device=device), "sum")
