"""The recorder: writes down every op of a rank while Megatron's own code runs.

The backend hands every communication to ``record``; ``events`` reports streams, events and host
waits; what runs in between becomes compute segments, timed on the device (CUDA events), on the host
(cpu tier) or weighed (meta tier: flops, bytes, kernels).  Time spent here and in answering for
virtual peers belongs to no segment.  ``start`` and ``stop`` enclose one iteration; once one is
written down, ``start(quick=True)`` only times the segments of the next, which costs a quarter.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from types import CodeType
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.core.programs.ops import SHARED
from megatron_prism.core.programs.program import Builder
from megatron_prism.runtime.answers import reduce_op_name
from megatron_prism.runtime.devices import cuda, kernels
from megatron_prism.runtime.devices.moe_dispatch import loads
from megatron_prism.runtime.listeners import CallListener, TrainingListener
from megatron_prism.runtime.process_group import CompletedWork, ForwardedWork, arguments
from megatron_prism.runtime.recorder.measurements import (
    GarbageCollections,
    HostClock,
    Recording,
    stamp,
)
from megatron_prism.runtime.recorder.owners import AllocationOwners
from megatron_prism.runtime.recorder.python_calls import KERNEL_NS, host_ns
from megatron_prism.runtime.recorder.shapes_meter import Meter

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from megatron_prism.core.programs.ops import Op
    from megatron_prism.runtime.devices.live_bytes import LiveBytes
    from megatron_prism.runtime.listeners import Answer, Args, Kwargs
    from megatron_prism.runtime.process_group import PrismGroup
    from megatron_prism.runtime.recorder.measurements import Span
    from megatron_prism.runtime.recorder.owners import Models

Position = tuple[int, int, int, int]
# rows, memory, its streams, trace: as ``Builder.since`` has them
Part = tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[int], list[str]]


_OF_GRAPH = ("_builder", "_labels", "_trace", "_events", "_num_batches", "active")


class Labels(TypedDict, total=False):
    """Of what part of the iteration an op is."""

    phase: str
    microbatch: int
    chunk: int


class RecordedWork(ForwardedWork):
    """The handle of a recorded call; waiting for it is an op."""

    def __init__(self, recorder: Recorder, handle: int, work: dist.Work) -> None:
        super().__init__(work)
        self._recorder, self._handle = recorder, handle

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._recorder.waited(self._handle, sys._getframe(1).f_code)
        return super().wait(timeout)

    def synchronize(self) -> None:
        self._recorder.waited(self._handle, sys._getframe(1).f_code)
        super().synchronize()

    block_current_stream = synchronize


class Recorder(CallListener, TrainingListener):
    """Collects the program of one rank.

    rank  : global rank
    tier  : ``cuda``, ``cpu`` or ``meta``; decides how segments are measured
    live  : the live-byte tracker (meta only)
    """

    def __init__(self, rank: int, tier: str, live: LiveBytes | None = None) -> None:
        self.rank, self.tier = rank, tier
        self.meter = Meter() if live is not None else None
        self._alive = live.alive if live is not None else list
        self._history = live.history if live is not None else None
        if live is not None:
            live.meter = kernels.meter = self.meter
        self.active = self._quick = False
        self.clock = HostClock()  # of iterations that are not recorded
        self._collections = GarbageCollections(lambda: not self._inside)  # of those that are
        self._builder = Builder()
        self._labels: Labels = {}
        self._inside = 0
        self._batch = self._num_batches = -1
        self._batched = False  # the open batch has a message already
        self._streams: dict[int, str] = {}
        self._mark: torch.cuda.Event | None = None
        self._since = 0  # where the open segment began
        self._times: list[int | Span] = []  # of each segment: ns, or the events around it
        self._hosts: list[tuple[int, int]] = []  # when the host began with each, and was through
        self._began = 0
        self._trace: list[str] = []  # what happened, in order, so that iterations can be compared
        self.owners = AllocationOwners()
        self._events: dict[int, int] = {}
        # backwards that began in segments without a kernel, for the next one with any (meta only)
        self._backwards_before = 0
        self._of_iteration = self._builder  # also while a graph is captured

    # -- an iteration -----------------------------------------------------------------------------
    def start(
        self,
        quick: bool = False,
        like: Builder | None = None,
        earlier: Mapping[str, int] | None = None,
    ) -> None:
        """Forget what came before and record from here on; ``quick``: only times of segments;
        ``like``: with its texts, so that its rows can be repeated; ``earlier``: of Program.
        """
        self._builder, self._times, self._trace, self._events = Builder(like), [], [], {}
        self._of_iteration = self._builder
        self._builder.earlier = earlier or {}
        self._collections.start()
        self._hosts, self._num_batches, self._quick, self.active = [], -1, quick, True
        self._backwards_before = 0
        if self.meter is not None:
            loads.start()
            self.meter.take()
            # storages that stand before the first op are the first changes of memory
            standing = self.owners.standing()
            for storage, num_bytes, key, note in self._alive():
                self._builder.memory(storage, num_bytes, standing.get(key, note))
            self.meter.memory = self._memory
            self.meter.python.start()
        self._open()

    def own_ns(self, probes: int = 200) -> int:
        """What recording adds to the host's time for a segment behind a call; CUDA only."""
        # calls that do nothing, so that recording alone takes time
        done = CompletedWork()
        self.start(quick=True)
        for _ in range(probes):
            self.record(None, "barrier", lambda group: done, (), {})
        hosts = self.stop().hosts[1:-1]
        return round(statistics.median(end - begin for begin, end in hosts))

    def _memory(self, storage: int, num_bytes: int, note: str) -> None:
        """Write down that a storage came to be, or went; of the current stream."""
        # the ops of a capture are its graph's, its memory is the iteration's: most of it outlives
        # the capture, and the peak can be in it
        self._of_iteration.memory(storage, num_bytes, note, self.stream_number())

    def stream_number(self) -> int:
        """The current stream: 0 for the default one, 1, 2 … for the others, by first use."""
        stream = self._stream()
        return 0 if stream == "main" else int(stream[1:])

    def owned_by(self, models: Models, optimizer: object) -> None:
        """Whose memory it is; from here on also of what an iteration leaves to the next."""
        self.owners.remove()
        self.owners = AllocationOwners(models, optimizer)
        if self.meter is not None:
            self.owners.follow_forwards()
            self.meter.note = self.owners.note

    def stop(self) -> Recording:
        """What was recorded since ``start``."""
        self._close()
        self.active = False
        if self.meter is not None:
            self.meter.python.stop()
            self.meter.memory = self.meter.note = None
            # names that the storages have by now: gradients and optimizer state may be new
            standing = self.owners.standing()
            owners = {
                number: standing[key] for number, _, key, _ in self._alive() if key in standing
            }
            self._builder.own(owners)
            self.owners.remove()
        builder = None if self._quick else self._builder
        if builder is not None and self._history is not None:
            builder.history = self._history.rows()
        if builder is not None and self.meter is not None:
            builder.routes = loads.table()
        collected = self._collections.stop()
        return Recording(self.rank, builder, self._times, self._trace, self._hosts, collected)

    @contextlib.contextmanager
    def scope(  # type: ignore[override] # of the labels that there are
        self, **labels: Unpack[Labels]
    ) -> Iterator[None]:
        """Label what runs inside: phase, microbatch, chunk."""
        self.cut()
        self.clock.settle()
        before, self._labels = self._labels, {**self._labels, **labels}
        try:
            yield
        finally:
            self.cut()
            self._labels = before

    # -- what repeats itself (``repeats``) --------------------------------------------------------
    def position(self) -> tuple[int, int, int, int]:
        """How many ops, changes of memory, entries of the trace and batches there are."""
        rows, memory = self._builder.position()
        return rows, memory, len(self._trace), self._num_batches

    def since(self, position: Position) -> Part:
        """What was written since."""
        return *self._builder.since(*position[:2]), self._trace[position[2] :]

    def repeat(self, part: Part, batches: int) -> None:
        """Write ``part`` behind the rest; it has so many batches."""
        rows, memory, streams, trace = part
        self._builder.extend(rows, memory, streams)
        self._trace += trace
        self._num_batches += batches

    # -- compute segments -------------------------------------------------------------------------
    def _open(self) -> None:
        if self.tier == "cuda":
            self._mark = stamp()
            self._began = time.time_ns()
        else:
            self._since = time.perf_counter_ns()

    def _close(self) -> None:
        """End the open segment.

        It becomes an op: on tier meta if a kernel ran in it, on the other tiers always.  Between
        two messages of one batch there is no segment.
        """
        if self._batch >= 0 and self._batched:
            return
        if self.tier == "meta":
            self._close_counted()
            return
        # the device's clock is in events of the stream, the host's is beside it
        if self.tier == "cuda":
            self._hosts.append((self._began, time.time_ns()))
            assert self._mark is not None
            self._times.append((self._mark, stamp()))
        # tier cpu: the host computes, so its clock counts
        else:
            self._times.append(time.perf_counter_ns() - self._since)
        self._add("compute", ns=0)

    def _close_counted(self) -> None:
        """End a segment of tier meta, whose work was counted; without a kernel it is none."""
        assert self.meter is not None
        done = self.meter.take()
        if not done.kernels:
            # a backward may begin with a call; its start delays what is launched behind that
            self._backwards_before += done.backwards
            return
        # the host's time is modelled where its calls of Python are counted
        host = lead = -1
        if self.meter.python.counts:
            phase = self._labels.get("phase", "")
            host, lead = host_ns(
                done.python,
                done.kernels,
                phase,
                looped=done.looped,
                products=done.products,
                unseen=done.unseen,
                backwards=done.backwards + self._backwards_before,
            )
        self._backwards_before = 0
        self._add(
            "compute",
            flops=done.flops,
            traffic=done.traffic,
            kernels=done.kernels,
            host=host,
            lead=lead,
            note=done.text(),
        )

    def cut(self, change: Callable[[], object] = lambda: None) -> None:
        """End a segment, ``change`` the stream or a label, and begin another."""
        heard = self.active and not self._inside
        if heard:
            self._close()
        change()
        if heard:
            self._open()

    def _add(self, name: str, on: object = None, **fields: Unpack[Fields]) -> None:
        # quick: the order of ops is compared, and nothing is written down
        self._trace.append(name)
        if self._quick:
            return
        self._builder.add(
            name,
            stream=self._stream(on),
            phase=self._labels.get("phase", ""),
            microbatch=self._labels.get("microbatch", -1),
            chunk=self._labels.get("chunk", -1),
            **fields,
        )

    def _stream(self, stream: object = None) -> str:
        """``main`` for the default stream, ``s1``, ``s2`` … for the others, by first use."""
        stream = torch.cuda.current_stream() if stream is None else stream
        # 0: the default stream, and that of tiers without a device
        number = getattr(stream, "cuda_stream", 0)
        if number == 0:
            return "main"
        return self._streams.setdefault(number, f"s{len(self._streams) + 1}")

    def _enter(self) -> None:
        """What happens until ``_leave`` belongs to no segment."""
        self._close()
        self._inside += 1

    def _leave(self) -> None:
        self._inside -= 1
        if self.meter is not None:
            self.meter.take()
        self._open()

    # -- communication ----------------------------------------------------------------------------
    def record(
        self, group: PrismGroup | None, op: str, answer: Answer, args: Args, kwargs: Kwargs
    ) -> dist.Work | None:
        """Make the call ``answer(group, *args, **kwargs)`` and write it down."""
        if not self.active or self._inside:
            return self.clock.call(answer, group, args, kwargs)
        self._enter()
        try:
            # the index of the op, which waits name
            handle = len(self._builder)
            self._batched = self._batch >= 0
            if self._quick:
                self._trace.append(op)
            else:
                assert group is not None, "only a quick probe is of no group"
                fields = details(group, op, args, kwargs)
                fields |= {"group": group.desc, "handle": handle, "batch": self._batch}
                fields["site"] = self._site()
                self._add(op, **fields)
            work = answer(group, *args, **kwargs)
        finally:
            self._leave()
        # whoever waits for it tells the recorder
        return work if work is None else RecordedWork(self, handle, work)

    def unrecorded(self, answer: Callable[[], None]) -> None:
        """Do what stands for a virtual rank and is no call: it belongs to no segment either."""
        if not self.active or self._inside:
            self.clock.call(lambda group: answer(), None, (), {})
            return
        self._enter()
        try:
            answer()
        finally:
            self._leave()

    def waited(self, handle: int, code: CodeType) -> None:
        """The current stream waits for ``handle``; torch's own wait ends a call in order."""
        if not self.active or self._inside:
            return
        # torch waits itself in calls that are not asynchronous
        if code.co_filename == c10d.__file__ and code.co_name != "wait":
            if not self._quick:
                self._builder.settle(handle)
            return
        self._note("wait", handle=handle)

    def _note(self, name: str, stream: object = None, **fields: Unpack[Fields]) -> None:
        """An op that takes no time itself."""
        self._enter()
        self._add(name, on=stream, **fields)
        self._leave()

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """What is issued inside is one call to NCCL."""
        # a batch inside a batch is part of the outer one
        if self._batch >= 0:
            yield
            return
        self._num_batches += 1
        self._batch, self._batched = self._num_batches, False
        try:
            yield
        finally:
            self._batch = -1

    # -- CUDA graphs of tier meta -----------------------------------------------------------------
    def graph_begun(self) -> None:
        """What is issued from here on is of a graph that is being captured."""
        self.cut()
        assert self.meter is not None
        self.meter.take()
        # put aside: the graph is recorded as a program of its own
        self._outside = {name: getattr(self, name) for name in _OF_GRAPH}
        vars(self).update(zip(_OF_GRAPH, (Builder(), {}, [], {}, -1, True), strict=True))
        self._open()

    def graph_ended(self) -> tuple[Op, ...]:
        """What the graph launches; its own stream is ``main``."""
        self._close()
        stream = self._stream()
        ops = []
        # the graph has a stream of its own, which programs call main
        for op in self._builder.build(self.rank, memory=False):
            if op.stream == stream:
                op = replace(op, stream="main")
            ops.append(op)
        vars(self).update(self._outside)
        return tuple(ops)

    def graph_launched(self, ops: tuple[Op, ...] | None) -> None:
        """One launch for the host, and then all of ``ops``; None: nobody heard its capture."""
        if not self.active or self._inside:
            return
        if ops is None:
            message = (
                "a CUDA graph was captured before the first train step: its kernels are unknown"
            )
            raise UnsupportedError(message, fix="capture it later, or --cuda-graph-impl none")
        self._enter()
        assert self.meter is not None
        # handles and batches of the graph count from where the program is now
        first, batches, own_stream = len(self._builder), self._num_batches + 1, self._stream()
        # the graph's launch takes the host as long as a kernel's, its ops take the host nothing
        host = -1
        if self.meter.python.counts:
            host = KERNEL_NS
        for op in ops:
            fields: dict[str, Any] = {**vars(op), "host": host, "lead": host, **self._labels}
            # the graph's own stream is that on which it is launched
            if op.stream == "main":
                fields["stream"] = own_stream
            if op.handle >= 0:
                fields["handle"] += first
            if op.batch >= 0:
                fields["batch"] += batches
                self._num_batches = max(self._num_batches, fields["batch"])
            self._builder.add(**fields)
            self._trace.append(op.name)
            # the first op has the launch, the others nothing
            host = min(host, 0)
        self._leave()

    def _site(self) -> str:
        """``core/tensor_parallel/mappings.py:31``: the innermost Megatron or TE frame."""
        return self.owners.sites.find(sys._getframe(3))

    # -- what ``report_to`` tells -----------------------------------------------------------------
    def event_recorded(self, event: int, stream: object) -> bool:
        """Event ``event`` is recorded on ``stream`` (None: the current one)."""
        heard = self.active and not self._inside
        if heard:
            self._enter()
            # a wait for the event names this op
            self._events[event] = len(self._builder)
            self._add("record", on=stream, handle=self._events[event])
            self._leave()
        return heard

    def event_waited(self, event: int, stream: object) -> bool:
        """``stream`` (None: the current one) waits for ``event``."""
        heard = self.active and not self._inside and event in self._events
        if heard:
            self._note("wait", stream, handle=self._events[event])
        return heard

    def host_waited(self, note: str) -> bool:
        """The host is about to wait for the device; True if anybody wants to know of its end."""
        if self.clock.running:
            return self.clock.wait()
        heard = self.active and not self._inside
        if heard:
            self._note("host_wait", note=note, site="" if self._quick else self._site())
        return heard

    def host_resumed(self) -> None:
        """The host goes on: until now it waited, which is not its time for the segment."""
        if self.clock.running:
            self.clock.resume()
        elif self.active and not self._inside:
            self._open()


# -- streams, events and host waits ----------------------------------------------------------------

_READS = ("item", "tolist", "cpu", "__bool__", "__float__", "__int__", "numpy")


def report_to(recorder: Recorder, changes: ProcessChanges) -> None:
    """Report to ``recorder`` until ``changes`` are undone."""
    if recorder.tier == "cuda":
        _wrap_cuda(recorder, changes)
    else:
        changes.set(cuda, "watcher", recorder)


def _wrap_cuda(recorder: Recorder, changes: ProcessChanges) -> None:
    """The functions and methods of streams, events and tensors that order or wait."""
    resumed, set_stream = recorder.host_resumed, torch.cuda.set_stream

    def wrap(
        owner: Any, name: str, before: Callable[..., bool], after: Callable[[], None] | None = None
    ) -> None:
        """``before`` says whether there is anything to report; then ``after`` is called behind."""
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            heard = before(*args, **kwargs)
            result = original(*args, **kwargs)
            if heard and after is not None:
                after()
            return result

        call.__name__, call.__doc__ = name, original.__doc__
        changes.set(owner, name, call)

    def wrap_wait(owner: Any, name: str, note: str) -> None:
        wrap(owner, name, lambda *args, **kwargs: recorder.host_waited(note), resumed)

    def wrap_read(name: str) -> None:
        def waits(self: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
            return self.is_cuda and recorder.host_waited(name.strip("_"))

        wrap(torch.Tensor, name, waits, resumed)

    def switched(stream: Any) -> None:
        if stream is None:  # torch does nothing then
            return
        # a segment that began on one stream and ended on another would be the time between streams
        recorder.cut(lambda: set_stream(stream))

    def uploads(*args: Any, device: Any = None, **kwargs: Any) -> bool:
        return str(device).startswith("cuda") and recorder.host_waited("copy")

    # events and streams order work of the device
    event = torch.cuda.Event
    wrap(torch, "tensor", uploads, resumed)
    wrap(event, "record", lambda self, stream=None: recorder.event_recorded(id(self), stream))
    wrap(event, "wait", lambda self, stream=None: recorder.event_waited(id(self), stream))
    # the host waits for the device
    wrap_wait(event, "synchronize", "event")
    wrap_wait(torch.cuda.Stream, "synchronize", "stream")
    wrap_wait(torch.cuda, "synchronize", "device")
    # reads of values wait, too
    for name in _READS:
        wrap_read(name)
    changes.set(torch.cuda, "set_stream", switched)


# -- fields of a c10d call -------------------------------------------------------------------------

DTYPE = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
    torch.float8_e4m3fn: "fp8e4m3",
    torch.float8_e5m2: "fp8e5m2",
}
_SHOWN = 4  # tensors of a coalesced call whose shapes are written out


Splits = tuple[tuple[int, ...], tuple[int, ...]]  # to and from every member


class Fields(TypedDict, total=False):
    """What ``Builder.add`` is told of an op, besides its name and its labels."""

    group: str
    dtype: str
    num_in: int
    num_out: int
    reduce: str
    peer: int
    root: int
    splits: Splits | None
    handle: int
    batch: int
    shape: str
    site: str
    note: str
    ns: int
    flops: int
    traffic: int
    kernels: int
    host: int
    lead: int


def details(group: PrismGroup, op: str, args: Args, kwargs: Kwargs) -> Fields:
    """The fields of an op from the arguments of the c10d call."""
    ins, outs = arguments(op, args)
    # one tensor says the type of all
    tensor = next(iter(ins or outs), None)
    fields: Fields = {}
    if tensor is not None:
        fields["dtype"] = DTYPE.get(tensor.dtype, "")
        fields["num_in"] = sum(t.numel() for t in ins) if ins else -1
        fields["num_out"] = sum(t.numel() for t in outs) if outs else -1
        fields["shape"] = _shapes(ins or outs)
    # c10d's last argument, where it is not named
    opts = kwargs.get("opts", args[-1] if args else None)
    if op in ("all_reduce", "reduce_scatter", "reduce"):
        fields["reduce"] = reduce_op_name(opts.reduceOp) if hasattr(opts, "reduceOp") else "sum"
    if op in ("broadcast", "reduce", "gather", "scatter"):
        fields["root"] = int(getattr(opts, "rootRank", 0))
    if op in ("send", "recv"):
        # (tensors, peer, tag); a receive from any source has no peer: the next rank stands for it
        peer = args[1] if len(args) > 2 else group.rank() + 1
        fields["peer"] = _nearest(peer - group.rank(), group.size())
    if op == "all_to_all":
        fields["splits"] = _splits(group, args)
    elif op == "all_gather":
        fields["splits"] = _uneven(group, args)
    return fields


def _nearest(offset: int, size: int) -> int:
    """``offset`` in a ring of ``size``, by the shorter way (forwards where both are alike)."""
    offset %= size
    return offset - size if offset > size // 2 else offset


def _splits(group: PrismGroup, args: Args) -> Splits | None:
    """(rows to, rows from) every member where they are facts: mirrored peers send what we send, and
    that is nobody's split.
    """
    # real members' sizes, or balanced ones that are known without values
    sizes_count = not group.has_virtual or group.world.shapes_only
    if len(args) < 4 or not sizes_count or not (len(args[2]) and len(args[3])):
        return None
    return tuple(map(int, args[3])), tuple(map(int, args[2]))


def _uneven(group: PrismGroup, args: Args) -> Splits | None:
    """(elements to, elements from) every member of a gather into tensors of several sizes, where
    all know them: whole parameters belong to single ranks (layer_wise_optimizer.py:763 @0.19.0).
    Of experts' tokens (mappings.py:153 @0.19.0) mirrored peers have as many as we have.
    """
    lists, shards = args[0], args[1]
    if group.has_virtual and SHARED not in group.desc:
        return None
    # one list of outputs, of a size for each member
    if torch.is_tensor(lists) or len(lists) != 1 or torch.is_tensor(lists[0]):
        return None
    sizes = tuple(out.numel() for out in lists[0])
    return ((shards[0].numel(),) * len(sizes), sizes) if len(set(sizes)) > 1 else None


def _shapes(tensors: Sequence[torch.Tensor]) -> str:
    words = ["x".join(map(str, t.shape)) or "1" for t in tensors[:_SHOWN]]
    left_out = len(tensors) - _SHOWN
    return ",".join(words) + (f",+{left_out}" if left_out > 0 else "")
