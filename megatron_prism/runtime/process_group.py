"""The ``prism`` process group: real for its local members, answered for everybody else.

``torch.distributed`` calls the methods named in the table of collectives; each counts the call,
asks ``answers`` (one or several local members) or the real group (all local) for the result, and
returns a finished Work.  A c10d method without a row in the table raises, by name.

Why a ``ProcessGroup`` subclass: ``torch._C._distributed_c10d.Backend`` has no Python constructor,
whereas a ProcessGroup returned by a backend's creator becomes the group itself (torch 2.13
distributed_c10d.py:2278), with no dispatcher hop: 4 to 6 us a call.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_prism.core.collectives import BY_METHOD, BY_NAME
from megatron_prism.core.errors import UnsupportedError
from megatron_prism.runtime.answers import OneLocalMember, PartiallyLocalGroup, reduction_of
from megatron_prism.runtime.known_values import forget
from megatron_prism.runtime.values import Exchange, Values, holds_sequences, is_ring

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from megatron_prism.runtime.listeners import Answer, Args, CallListener


def size_of(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of all of them."""
    return sum(t.numel() * t.element_size() for t in tensors)


def message_size(args: Args) -> int:
    """Bytes of the larger side of a call, as the table of collectives counts them."""
    first, second = args[0], args[1] if len(args) > 1 else None
    if isinstance(second, torch.Tensor):  # out, in, ..
        return max(first.nbytes, second.nbytes)
    if isinstance(second, list) or len(first) != 1:
        return max(size_of(_flat(first)), size_of(_flat(second)))
    size: int = first[0].nbytes
    return size


def _flat(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _flat(item)]
    return []


def arguments(op: str, args: Args) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(inputs, outputs) of a c10d call: outputs come first where there are two."""
    if op == "barrier":
        return [], []
    first = _flat(args[0])
    if op == "send":
        return first, []
    if op == "recv":
        return [], first
    if op in ("all_reduce", "broadcast", "reduce"):
        return first, first
    return _flat(args[1]), first


_KEEP = {"all_reduce", "reduce", "broadcast"}  # what is known of a value, or see to that themselves
_unfinished: list[tuple[DeviceEvent, object]] = []  # (end, tensors) of calls whose handles are gone


class DeviceEvent(Protocol):
    """A place in a stream of the device (``pacing.device.StreamEnd``)."""

    def wait(self) -> None: ...
    def query(self) -> bool: ...


class GroupWorld(Protocol):
    """What a group asks of its world (``runtime.virtual_world.VirtualWorld``)."""

    values: Values
    device: torch.device
    shapes_only: bool

    @property
    def tally(self) -> Any: ...
    @property
    def caller(self) -> CallListener | None: ...
    @property
    def observers(self) -> Sequence[Callable[..., None]]: ...
    def after(self, caller: CallListener) -> CallListener | None: ...
    def batch(self) -> AbstractContextManager[None]: ...
    def build_group(
        self, ranks: Sequence[int] | None, name: str | None, desc: str | None
    ) -> PrismGroup | None: ...
    def connect(
        self, group: PrismGroup, backend: str | None
    ) -> tuple[dist.ProcessGroup | None, PartiallyLocalGroup | None]: ...


class CompletedWork(dist.Work):
    """The handle of a call that needs nothing more from the host.

    An answer is complete when its method returns, or at ``after``'s event on another stream: then
    waiting makes the caller's stream wait.  torch's FakeWork says it is never completed, has no
    result and no source.
    """

    _end: DeviceEvent | None = None
    _held: object = None

    def __init__(self, outs: Sequence[torch.Tensor] = (), source: int = -1) -> None:
        super().__init__()
        self._outs, self._source = outs, source

    def after(self, end: DeviceEvent, held: object) -> CompletedWork:
        """This call ends at the event ``end``; ``held`` stays allocated until someone waits."""
        self._end, self._held = end, held
        return self

    def __del__(self) -> None:
        # a handle that nobody waits for: its tensors stay until the device is done with them
        if self._end is not None and self._held is not None and not sys.is_finalizing():
            _unfinished.append((self._end, self._held))  # first: asking the device may fail
            _unfinished[:] = [one for one in _unfinished if not one[0].query()]

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.synchronize()
        return True

    def is_completed(self) -> bool:
        return self._end is None or bool(self._end.query())

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def synchronize(self) -> None:
        """The caller's stream goes on when the answer is there."""
        if self._end is not None:
            self._end.wait()
            self._held = None

    block_current_stream = synchronize

    def result(self) -> list[torch.Tensor]:
        return list(self._outs)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        self.synchronize()  # a future of CUDA tensors is behind the current stream
        devices: list[int | str | torch.device]
        devices = [out.device for out in self._outs[:1] if out.device.type == "cuda"]
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=devices)
        future.set_result(list(self._outs))
        return future

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank


class ForwardedWork(dist.Work):
    """A handle that asks ``work``, the call's own, for everything."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        return bool(self._work.wait() if timeout is None else self._work.wait(timeout))

    def synchronize(self) -> None:
        self._work.synchronize()

    def block_current_stream(self) -> None:
        self.synchronize()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> BaseException | None:
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        return self._work.result()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._work.get_future()

    def source_rank(self) -> int:
        return self._work._source_rank()

    _source_rank = source_rank


class PrismGroup(dist.ProcessGroup):
    """A group of ``ranks`` (global, in group order) of which some have a process and most do not.

    world : the world it belongs to
    desc  : Megatron's group_desc, the name used in every output
    real  : the real group of the local members, None when this process is the only one
    """

    def __init__(
        self,
        world: GroupWorld,
        ranks: Sequence[int],
        rank: int,
        name: str,
        desc: str,
        backend: str | None = None,
    ) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg] # the one without a store
        self.world = world
        self.ranks = ranks
        self.desc = desc
        self._name = name
        self._n, self._p = len(ranks), rank
        self._alone = OneLocalMember(self._n, rank)
        self._values = world.values
        self._sequence = holds_sequences(desc)
        self._count = world.tally.add
        self.sequence = 0
        self.real, self._mixed = world.connect(self, backend)
        self._passes = self.real is not None and self._mixed is None  # to the real group
        self._exchange: Exchange | None = None

    @property
    def local(self) -> Sequence[int]:
        """Who has a process here that this one meets in its calls: group ranks, ascending."""
        if self._mixed is not None:
            return self._mixed.positions
        return range(self._n) if self._passes else (self._p,)

    @property
    def has_virtual(self) -> bool:
        """Whether some members have no process."""
        return len(self.local) < self._n

    def owners(self) -> list[int]:
        """For each member (group rank) the local member that it is or mirrors."""
        if self._mixed is not None:
            return self._mixed.owners
        return list(range(self._n)) if self._passes else [self._p] * self._n

    @contextlib.contextmanager
    def in_place_of(self, position: int) -> Iterator[None]:
        """This rank and member ``position`` change places."""
        before, ranks = self._p, self.ranks
        known = c10d._world.pg_group_ranks
        places = known[self]
        changed = list(ranks)
        changed[before], changed[position] = changed[position], changed[before]
        self.ranks, self._p = changed, position
        self._alone.p = position
        self.rank = lambda: position  # type: ignore[method-assign] # which torch's own code asks
        known[self] = {rank: place for place, rank in enumerate(changed)}
        try:
            yield
        finally:
            self.ranks, self._p, known[self] = ranks, before, places
            self._alone.p = before
            del self.rank

    # -- identity -------------------------------------------------------------------------------
    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self.desc

    @property
    def pg_name(self) -> str:
        return self._name

    @property  # type: ignore[misc] # torch's can be set
    def bound_device_id(self) -> torch.device | None:
        return None

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self.desc = desc

    def getBackendName(self) -> str:  # noqa: N802 - c10d's spelling
        return "prism"

    name = getBackendName

    def __repr__(self) -> str:
        return f"<prism group {self.desc}: rank {self._p} of {self._n}, virtual peers>"

    def _get_backend(self, device: torch.device) -> PrismGroup:
        return self

    @property
    def supports_coalescing(self) -> bool:
        return False

    def register_mem_pool(self, pool: object, symm: bool = False) -> None:
        """NCCL user buffers need no registration where nothing is sent."""

    def deregister_mem_pool(self, pool: object) -> None:
        """See register_mem_pool."""

    def shutdown(self) -> None:
        if self.real is not None and hasattr(self.real, "shutdown"):
            self.real.shutdown()

    abort = shutdown

    def new_group(self, ranks: Sequence[int], **kwargs: str | None) -> PrismGroup | None:
        """torch >= 2.13 delegates ``dist.new_group`` to the default group (None: not a member)."""
        return self.world.build_group(ranks, kwargs.get("group_name"), kwargs.get("group_desc"))

    def _start_coalescing(self, device: torch.device) -> None:
        """Nothing to open: every answer is complete when its call returns."""

    def _end_coalescing(self, device: torch.device) -> CompletedWork:
        return CompletedWork()

    # -- bookkeeping ----------------------------------------------------------------------------
    def _done(
        self, op: str, ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], distance: int = 0
    ) -> CompletedWork:
        self.sequence += 1
        num_bytes = BY_NAME[op].payload(size_of(ins), size_of(outs))
        self._count(self.desc, self._n, op, num_bytes, distance)
        for observe in self.world.observers:
            observe(self, op, ins, outs)
        if self.world.shapes_only and op not in _KEEP:
            for out in outs:
                forget(out)
        return CompletedWork(outs)

    def _mixed_for(self, tensor: torch.Tensor) -> PartiallyLocalGroup | None:
        return None if tensor.is_meta else self._mixed

    def _answers(self, tensor: torch.Tensor) -> OneLocalMember | PartiallyLocalGroup:
        """Who answers a call of such tensors."""
        return self._mixed_for(tensor) or self._alone

    # -- collectives ----------------------------------------------------------------------------
    def allreduce(
        self, tensors: list[torch.Tensor], opts: dist.AllreduceOptions | None = None
    ) -> CompletedWork:
        for tensor in tensors:
            op = reduction_of(opts.reduceOp, tensor) if opts is not None else "sum"
            self._answers(tensor).reduced(tensor, op, self._values)
        return self._done("all_reduce", tensors, tensors)

    allreduce_coalesced = allreduce

    def broadcast(
        self, tensors: list[torch.Tensor], opts: dist.BroadcastOptions | None = None
    ) -> CompletedWork:
        root = opts.rootRank if opts is not None else 0
        for tensor in tensors:
            self._answers(tensor).broadcast(tensor, root)
        return self._done("broadcast", tensors, tensors)

    def reduce(self, tensors: list[torch.Tensor], opts: dist.ReduceOptions) -> CompletedWork:
        for tensor in tensors:
            op = reduction_of(opts.reduceOp, tensor)
            self._answers(tensor).reduce(tensor, op, opts.rootRank, self._values)
        return self._done("reduce", tensors, tensors)

    def _allgather_base(
        self, out: torch.Tensor, shard: torch.Tensor, opts: object = None
    ) -> CompletedWork:
        self._answers(shard).all_gather(out, shard, self._values)
        return self._done("all_gather", (shard,), (out,))

    all_gather_single: Callable[..., dist.Work] = _allgather_base

    def allgather_into_tensor_coalesced(
        self, outs: list[torch.Tensor], shards: list[torch.Tensor], opts: object = None
    ) -> CompletedWork:
        for out, shard in zip(outs, shards, strict=True):
            self._answers(shard).all_gather(out, shard, self._values)
        return self._done("all_gather", shards, outs)

    all_gather_single_coalesced: Callable[..., dist.Work] = allgather_into_tensor_coalesced

    def allgather(
        self, out_lists: list[list[torch.Tensor]], shards: list[torch.Tensor], opts: object = None
    ) -> CompletedWork:
        for outs, shard in zip(out_lists, shards, strict=True):
            self._answers(shard).gather_list(outs, shard)
        return self._done("all_gather", shards, [out for outs in out_lists for out in outs])

    def allgather_coalesced(
        self, out_lists: list[list[torch.Tensor]], shards: list[torch.Tensor], opts: object = None
    ) -> CompletedWork:
        # c10d hands one list per rank here, one entry per input: the transpose of allgather's
        return self.allgather([list(outs) for outs in zip(*out_lists, strict=True)], shards, opts)

    def _scatter_one(self, out: torch.Tensor, whole: torch.Tensor, op: str) -> None:
        self._answers(whole).reduce_scatter(out, whole, op, self._values, self._sequence)

    def _reduce_scatter_base(
        self, out: torch.Tensor, whole: torch.Tensor, opts: dist.ReduceScatterOptions
    ) -> CompletedWork:
        self._scatter_one(out, whole, reduction_of(opts.reduceOp, whole))
        return self._done("reduce_scatter", (whole,), (out,))

    reduce_scatter_single: Callable[..., dist.Work] = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self, outs: list[torch.Tensor], wholes: list[torch.Tensor], opts: dist.ReduceScatterOptions
    ) -> CompletedWork:
        for out, whole in zip(outs, wholes, strict=True):
            self._scatter_one(out, whole, reduction_of(opts.reduceOp, whole))
        return self._done("reduce_scatter", wholes, outs)

    reduce_scatter_single_coalesced: Callable[..., dist.Work] = reduce_scatter_tensor_coalesced

    def reduce_scatter(
        self,
        outs: list[torch.Tensor],
        part_lists: list[list[torch.Tensor]],
        opts: dist.ReduceScatterOptions,
    ) -> CompletedWork:
        for out, parts in zip(outs, part_lists, strict=True):
            op = reduction_of(opts.reduceOp, out)
            self._answers(out).reduce_scatter_list(out, parts, op, self._values)
        return self._done("reduce_scatter", [t for parts in part_lists for t in parts], outs)

    def alltoall_base(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
        opts: object = None,
    ) -> CompletedWork:
        self._answers(source).all_to_all(out, source, out_splits, in_splits)
        return self._done("all_to_all", (source,), (out,))

    all_to_all_single: Callable[..., dist.Work] = alltoall_base

    def alltoall(
        self, outs: list[torch.Tensor], ins: list[torch.Tensor], opts: object = None
    ) -> CompletedWork:
        self._answers(ins[0]).all_to_all_list(outs, ins)
        return self._done("all_to_all", ins, outs)

    def gather(
        self,
        out_lists: list[list[torch.Tensor]],
        shards: list[torch.Tensor],
        opts: dist.GatherOptions,
    ) -> CompletedWork:
        outs = out_lists[0] if out_lists else []
        self._answers(shards[0]).gather(outs, shards[0], opts.rootRank)
        return self._done("gather", shards, outs)

    def scatter(
        self,
        outs: list[torch.Tensor],
        part_lists: list[list[torch.Tensor]],
        opts: dist.ScatterOptions,
    ) -> CompletedWork:
        parts = part_lists[0] if part_lists else []
        self._answers(outs[0]).scatter(outs[0], parts, opts.rootRank, self._values)
        return self._done("scatter", parts, outs)

    def barrier(self, opts: object = None) -> CompletedWork:
        (self._mixed or self._alone).barrier(self.world.device)
        return self._done("barrier", (), ())

    # -- point to point -------------------------------------------------------------------------
    def distance(self, peer: int) -> int:
        """How many places further in the group ``peer`` is."""
        return (peer - self._p) % self._n

    def _ring(self, tensor: torch.Tensor) -> Exchange | None:
        if self._exchange is None and is_ring(self.desc):
            self._exchange = Exchange(self._values)
        return None if tensor.is_meta else self._exchange

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> dist.Work:
        done = self._done("send", tensors, (), self.distance(peer))
        if (ring := self._ring(tensors[0])) is not None:
            ring.sent(tensors[0])
        if (mixed := self._mixed_for(tensors[0])) is not None:
            index = mixed.local_index(peer)
            if index is not None:
                return _message(mixed.real.send([t.detach() for t in tensors], index, tag), tensors)
        return done

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> dist.Work:
        self._done("recv", (), tensors, self.distance(peer))
        ring, mixed = self._ring(tensors[0]), self._mixed_for(tensors[0])
        index = mixed.local_index(peer) if mixed is not None else None
        if ring is not None:
            ring.received(tensors[0], invented=index is None)
        if mixed is not None and index is not None:
            return _message(mixed.real.recv([t.detach() for t in tensors], index, tag), tensors)
        for tensor in tensors if ring is None else ():
            self._values.receive(tensor)
        return CompletedWork(tensors, peer)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> dist.Work:
        if (mixed := self._mixed_for(tensors[0])) is not None:
            if len(mixed.positions) == self._n:
                self._done("recv", (), tensors)
                return mixed.real.recv_anysource([t.detach() for t in tensors], tag)
            what = f"a receive from any rank on {self.desc}, of which some members are virtual"
            fix = "name the source rank, or make all members or just one of them local"
            raise UnsupportedError(what, fix=fix)
        return self.recv(tensors, (self._p + 1) % self._n, tag)


class _Message(dist.Work):
    """A message of gloo's, which waits for another message if it is waited for twice: NCCL's may
    be, and rings of attention do it."""

    def __init__(self, real: dist.Work) -> None:
        super().__init__()
        self._real, self._waited = real, False

    def wait(self, *timeout: timedelta) -> bool:
        if not self._waited:
            self._real.wait(*timeout)
            self._waited = True
        return True

    def is_completed(self) -> bool:
        return self._waited or self._real.is_completed()

    def source_rank(self) -> int:
        return self._real.source_rank()


def _message(work: dist.Work, tensors: Sequence[torch.Tensor]) -> dist.Work:
    """NCCL's own handle, of which a batch has none, or gloo's."""
    return work if tensors[0].device.type == "cuda" or work is None else _Message(work)


def _real_barrier(real: dist.ProcessGroup, device: torch.device) -> None:
    """An all-reduce of one word, after which the host waits, as NCCL's own barrier does."""
    word = torch.zeros(1, dtype=torch.int32, device=device)
    real.allreduce([word]).wait()
    if device.type == "cuda":
        torch.cuda.synchronize()


def _passing_through(method: str, answer: Answer) -> Answer:
    """Groups whose members are all local on NCCL answer with the real group's own method."""
    op = BY_METHOD[method].name

    def plain(self: PrismGroup, *args: object, **kwargs: object) -> dist.Work | None:
        if not self._passes:
            return answer(self, *args, **kwargs)
        if op == "barrier":  # c10d finds no device in this group and would ask for the CPU's
            assert self.real is not None, "all members are local, and have a real group"
            _real_barrier(self.real, self.world.device)
            return self._done(op, (), ())
        work = getattr(self.real, method)(*args, **kwargs)
        if not self.world.observers:  # as quick as it can be: this is the job's own time
            self.sequence += 1
            self._count(self.desc, self._n, op, message_size(args))
            return work
        if work is not None:
            work.wait()  # observers read results
        self._done(op, *arguments(op, args))
        return work

    def call(self: PrismGroup, *args: object, **kwargs: object) -> dist.Work | None:
        caller = self.world.caller
        if caller is None:
            return plain(self, *args, **kwargs)
        return caller.record(self, op, plain, args, kwargs)

    call.__name__, plain.__name__, call.__doc__ = method, method, answer.__doc__
    return call


def _without_row(method: str) -> Callable[..., NoReturn]:
    def call(self: PrismGroup, *args: object, **kwargs: object) -> NoReturn:
        what = f"collective {method!r} on {self.desc} has no row in the table of collectives"
        fix = "add its row to core/collectives.py and its answer to runtime/process_group.py"
        raise UnsupportedError(what, fix=fix)

    return call


for _method in BY_METHOD:
    setattr(PrismGroup, _method, _passing_through(_method, getattr(PrismGroup, _method)))
for _method in ("monitored_barrier", "allreduce_sparse"):
    setattr(PrismGroup, _method, _without_row(_method))
