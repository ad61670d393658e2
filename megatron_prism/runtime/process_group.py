"""The ``prism`` process group: real for its local members, answered for everybody else.

``torch.distributed`` calls the methods named in the table of collectives; each asks ``answers``
(one or several local members) or the real group (all local) for the result, is counted, and returns
a finished Work.  A c10d method without a row in the table raises, by name.

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

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.core.programs.collectives import BY_METHOD
from megatron_prism.runtime.answers import OneLocalMember, PartiallyLocalGroup, reduction_of
from megatron_prism.runtime.known_values import exchanged
from megatron_prism.runtime.values import Exchange, Values, holds_sequences, is_ring

if TYPE_CHECKING:
    from megatron_prism.runtime.listeners import Answer, Args, CallListener


Tensors = Sequence[torch.Tensor]
_Alias = Callable[..., Any]  # of a method that c10d names twice


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
    """The tensors of a value, also inside of lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    tensors = []
    if isinstance(value, (list, tuple)):
        for item in value:
            tensors += _flat(item)
    return tensors


def arguments(op: str, args: Args) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(inputs, outputs) of a c10d call: outputs come first where there are two."""
    if op == "barrier":
        return [], []
    first = _flat(args[0])
    if op == "send":
        return first, []
    if op == "recv":
        return [], first
    # in place: one tensor is both
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
            _unfinished[:] = [pending for pending in _unfinished if not pending[0].query()]

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

    def source_rank(self) -> int:
        return self._work._source_rank()

    _source_rank = source_rank


def _asking_work(name: str) -> Callable[[ForwardedWork], Any]:
    return lambda self: getattr(self._work, name)()


for _name in ("is_completed", "is_success", "exception", "result", "get_future"):
    setattr(ForwardedWork, _name, _asking_work(_name))


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
        group_ranks = c10d._world.pg_group_ranks
        places = group_ranks[self]
        # torch keeps the places of ranks in a table of its own, so that changes, too
        changed = list(ranks)
        changed[before], changed[position] = changed[position], changed[before]
        self.ranks, self._p = changed, position
        self._alone.p = position
        self.rank = lambda: position  # type: ignore[method-assign] # which torch's own code asks
        group_ranks[self] = {rank: place for place, rank in enumerate(changed)}
        try:
            yield
        finally:
            self.ranks, self._p, group_ranks[self] = ranks, before, places
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

    # -- answers: each fills the outputs of its call ----------------------------------------------
    def _mixed_for(self, tensor: torch.Tensor) -> PartiallyLocalGroup | None:
        return None if tensor.is_meta else self._mixed

    def _answers(self, tensor: torch.Tensor) -> OneLocalMember | PartiallyLocalGroup:
        """Who answers a call of such tensors."""
        return self._mixed_for(tensor) or self._alone

    def allreduce(self, tensors: Tensors, opts: dist.AllreduceOptions | None = None) -> None:
        for tensor in tensors:
            op = reduction_of(opts.reduceOp, tensor) if opts is not None else "sum"
            self._answers(tensor).reduced(tensor, op, self._values)

    allreduce_coalesced: _Alias = allreduce

    def broadcast(self, tensors: Tensors, opts: dist.BroadcastOptions | None = None) -> None:
        for tensor in tensors:
            self._answers(tensor).broadcast(tensor, opts.rootRank if opts is not None else 0)

    def reduce(self, tensors: Tensors, opts: dist.ReduceOptions) -> None:
        for tensor in tensors:
            op = reduction_of(opts.reduceOp, tensor)
            self._answers(tensor).reduce(tensor, op, opts.rootRank, self._values)

    def _allgather_base(self, out: torch.Tensor, shard: torch.Tensor, opts: object = None) -> None:
        self._answers(shard).all_gather(out, shard, self._values)

    all_gather_single: _Alias = _allgather_base

    def allgather_into_tensor_coalesced(
        self, outs: Tensors, shards: Tensors, opts: object = None
    ) -> None:
        for out, shard in zip(outs, shards, strict=True):
            self._answers(shard).all_gather(out, shard, self._values)

    all_gather_single_coalesced: _Alias = allgather_into_tensor_coalesced

    def allgather(self, out_lists: Sequence[Tensors], shards: Tensors, opts: object = None) -> None:
        # one list of outputs for each input
        for outs, shard in zip(out_lists, shards, strict=True):
            self._answers(shard).gather_list(outs, shard)

    def allgather_coalesced(
        self, out_lists: Sequence[Tensors], shards: Tensors, opts: object = None
    ) -> None:
        # c10d hands one list per rank here, one entry per input: the transpose of allgather's
        for outs, shard in zip(zip(*out_lists, strict=True), shards, strict=True):
            self._answers(shard).gather_list(outs, shard)

    def _reduce_scatter_base(
        self, out: torch.Tensor, all_chunks: torch.Tensor, opts: dist.ReduceScatterOptions
    ) -> None:
        op = reduction_of(opts.reduceOp, all_chunks)
        self._answers(all_chunks).reduce_scatter(out, all_chunks, op, self._values, self._sequence)

    reduce_scatter_single: _Alias = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self, outs: Tensors, wholes: Tensors, opts: dist.ReduceScatterOptions
    ) -> None:
        for out, all_chunks in zip(outs, wholes, strict=True):
            op = reduction_of(opts.reduceOp, all_chunks)
            self._answers(all_chunks).reduce_scatter(
                out, all_chunks, op, self._values, self._sequence
            )

    reduce_scatter_single_coalesced: _Alias = reduce_scatter_tensor_coalesced

    def reduce_scatter(
        self, outs: Tensors, part_lists: Sequence[Tensors], opts: dist.ReduceScatterOptions
    ) -> None:
        for out, parts in zip(outs, part_lists, strict=True):
            op = reduction_of(opts.reduceOp, out)
            self._answers(out).reduce_scatter_list(out, parts, op, self._values)

    def alltoall_base(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
        opts: object = None,
    ) -> None:
        self._answers(source).all_to_all(out, source, out_splits, in_splits)

    all_to_all_single: _Alias = alltoall_base

    def alltoall(self, outs: Tensors, ins: Tensors, opts: object = None) -> None:
        self._answers(ins[0]).all_to_all_list(outs, ins)

    def dispatch(self, out: torch.Tensor, source: torch.Tensor) -> None:
        """Kernels of other libraries, on shapes."""

    combine: _Alias = dispatch

    def gather(
        self, out_lists: Sequence[Tensors], shards: Tensors, opts: dist.GatherOptions
    ) -> None:
        # members other than the root give no outputs
        outs = out_lists[0] if out_lists else []
        self._answers(shards[0]).gather(outs, shards[0], opts.rootRank)

    def scatter(
        self, outs: Tensors, part_lists: Sequence[Tensors], opts: dist.ScatterOptions
    ) -> None:
        # members other than the root give no parts
        parts = part_lists[0] if part_lists else []
        self._answers(outs[0]).scatter(outs[0], parts, opts.rootRank, self._values)

    def barrier(self, opts: object = None) -> None:
        (self._mixed or self._alone).barrier(self.world.device)

    # -- point to point -------------------------------------------------------------------------
    def distance(self, peer: int) -> int:
        """How many places further in the group ``peer`` is."""
        return (peer - self._p) % self._n

    def _ring(self, tensor: torch.Tensor) -> Exchange | None:
        # attention's rings pass on what they have received, so its content counts
        if self._exchange is None and is_ring(self.desc):
            self._exchange = Exchange(self._values)
        return None if tensor.is_meta else self._exchange

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> dist.Work | None:
        if (ring := self._ring(tensors[0])) is not None:
            ring.sent(tensors[0])
        mixed = self._mixed_for(tensors[0])
        index = None if mixed is None else mixed.local_index(peer)
        if mixed is None or index is None:
            return None
        # the peer has a process here: the message is real
        return _message(mixed.real.send([t.detach() for t in tensors], index, tag), tensors)

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> dist.Work:
        ring, mixed = self._ring(tensors[0]), self._mixed_for(tensors[0])
        index = mixed.local_index(peer) if mixed is not None else None
        if ring is not None:
            ring.received(tensors[0], invented=index is None)
        if mixed is not None and index is not None:
            return _message(mixed.real.recv([t.detach() for t in tensors], index, tag), tensors)
        # a ring has filled its tensors already
        for tensor in tensors if ring is None else ():
            self._values.receive(tensor)
        return CompletedWork(tensors, peer)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        mixed = self._mixed_for(tensors[0])
        if mixed is None:
            # who sends is not said; the next member stands for any
            return _UNCOUNTED["recv"](self, tensors, (self._p + 1) % self._n, tag)
        if len(mixed.positions) < self._n:
            message = f"a receive from any rank on {self.desc}, of which some members are virtual"
            fix = "name the source rank, or make all members or just one of them local"
            raise UnsupportedError(message, fix=fix)
        return mixed.real.recv_anysource([t.detach() for t in tensors], tag)


class _Message(ForwardedWork):
    """A message of gloo's, which waits for another message if it is waited for twice: NCCL's may
    be, and rings of attention do it.
    """

    _waited = False

    def wait(self, *timeout: timedelta) -> bool:
        if not self._waited:
            self._work.wait(*timeout)
            self._waited = True
        return True

    def is_completed(self) -> bool:
        return self._waited or self._work.is_completed()


def _message(work: dist.Work, tensors: Tensors) -> dist.Work:
    """NCCL's own handle, of which a batch has none, or gloo's."""
    return work if tensors[0].device.type == "cuda" or work is None else _Message(work)


def _real_barrier(group: PrismGroup, opts: object = None) -> None:
    """An all-reduce of one word, after which the host waits, as NCCL's own barrier does: c10d finds
    no device in this group and would ask for the CPU's.
    """
    assert group.real is not None, "all members are local, and have a real group"
    word = torch.zeros(1, dtype=torch.int32, device=group.world.device)
    group.real.allreduce([word]).wait()
    if word.is_cuda:
        torch.cuda.synchronize()


def _issued(method: str, answer: Callable[..., dist.Work | None]) -> Answer:
    """What c10d calls: ``answer``, or in groups whose members are all local on NCCL the real
    group's own method; counted, and seen by who follows the calls.
    """
    op, pair = BY_METHOD[method].name, BY_METHOD[method].kind == "pair"

    def plain(self: PrismGroup, *args: Any, **kwargs: Any) -> dist.Work | None:
        # c10d finds no device in this group, so a barrier has a form of its own
        real = self._passes and op != "barrier"
        if real:
            work = getattr(self.real, method)(*args, **kwargs)
        else:
            work = (_real_barrier if self._passes else answer)(self, *args, **kwargs)
        self.sequence += 1
        distance = 0
        # of messages, how far the peer is: slices of other ranks have the same distances
        if pair and not self._passes:
            distance = self.distance(self._p + 1 if method == "recv_anysource" else args[1])
        size = 0 if op == "barrier" else message_size(args)
        self._count(self.desc, self._n, op, size, distance)
        observers = self.world.observers
        if real and not observers:  # as quick as it can be: this is the job's own time
            return work
        if real and work is not None:
            work.wait()  # observers read results
        ins, outs = arguments(op, args)
        for observe in observers:
            observe(self, op, ins, outs)
        if self.world.shapes_only and op not in _KEEP:
            # a reduction's result depends on what others hold
            exchanged(outs, [] if op.startswith("reduce") else ins)
        return work if real or work is not None else CompletedWork(outs)

    def call(self: PrismGroup, *args: object, **kwargs: object) -> dist.Work | None:
        caller = self.world.caller
        # nobody paces, checks or stops at calls
        if caller is None:
            return plain(self, *args, **kwargs)
        return caller.record(self, op, plain, args, kwargs)

    call.__name__, plain.__name__, call.__doc__ = method, method, answer.__doc__
    return call


def _without_row(method: str) -> Callable[..., NoReturn]:
    def call(self: PrismGroup, *args: object, **kwargs: object) -> NoReturn:
        message = f"collective {method!r} on {self.desc} has no row in the table of collectives"
        fix = (
            "add its row to core/programs/collectives.py and its answer to runtime/process_group.py"
        )
        raise UnsupportedError(message, fix=fix)

    return call


_UNCOUNTED = {method: getattr(PrismGroup, method) for method in BY_METHOD}
for _method, _answer in _UNCOUNTED.items():
    setattr(PrismGroup, _method, _issued(_method, _answer))
for _method in ("monitored_barrier", "allreduce_sparse"):
    setattr(PrismGroup, _method, _without_row(_method))
