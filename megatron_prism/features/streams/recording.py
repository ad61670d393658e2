"""Record the memory that each stream reads and writes in one train step, on tier meta.

The recorder of slices sees each operator and each storage that comes and goes (``Meter``); its
methods are wrapped while the step runs.  Streams and events are those that the job's own Python
uses.  A call of NCCL runs on the stream of its communicator, behind the stream that issues it
(ProcessGroupNCCL.cpp, collective: syncStream @v2.11), and holds its tensors until somebody waits
for it (TensorShelf @v2.8).

It does not see what autograd's C++ does on a GPU: operators of a backward run on the stream of
their forward there, and here on the stream that is current.  Autograd orders such streams itself.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.core.programs import ops
from megatron_prism.features.streams.trace import ROW, Kind, RowPlace, StreamTrace, path_of, save
from megatron_prism.runtime.devices import cuda
from megatron_prism.runtime.listeners import LabelledCalls
from megatron_prism.runtime.process_group import ForwardedWork, arguments

if TYPE_CHECKING:
    from torch import distributed as dist
    from torch._ops import OpOverload

    from megatron_prism.emulate.rank.session import Run, Session
    from megatron_prism.runtime.devices.live_bytes import LiveBytes
    from megatron_prism.runtime.listeners import Answer, Args, Kwargs
    from megatron_prism.runtime.process_group import PrismGroup

RECORDED_STEP = 2  # the first has what happens once: states of the optimizer, lazy buffers
_FIELDS = len(ROW.names or ())
# only look at a tensor, or change its description
_NO_KERNELS = frozenset(
    ("set_", "resize_", "detach", "alias", "view", "_unsafe_view", "_reshape_alias", "is_same_size")
)
_ALLOCATES = ("empty", "new_empty")  # begins of names that allocate, and launch nothing
_LIKE_BEGINS, _LIKE_END = ("new_", "empty_"), "_like"  # of names that look at a shape only
# kernels of stand-ins that write tensors that they are given; the others write what is new
_IN_PLACE = frozenset(
    ("adam", "sgd", "multi_tensor_scale", "rope", "gemm_wgrad", "mm", "grouped_gemm", "copy_")
)
_HOST_STORAGES = -2  # numbers of storages on the host go down from here


def add_to(run: Run, session: Session) -> None:
    """Record the second train step of ``run`` beside its slice."""
    assert run.options.capture is not None, "the flag goes with a capture only"
    assert run.tier.live is not None, "the flag goes with tier meta only"
    path = path_of(run.options.capture, run.options.rank)
    recorder = StreamRecorder(run.tier.live, run.options.rank, path)
    session.changes.on_undo(recorder.changes.undo)
    run.follow_calls(recorder)
    run.follow_training(recorder)


class _FollowedWork(ForwardedWork):
    """The handle of calls; waiting for it orders the current stream behind them.

    Args:
        recorder: is told of waits.
        events: ends of the calls.
        work: the handle of others below.
    """

    def __init__(self, recorder: StreamRecorder, events: Sequence[int], work: dist.Work) -> None:
        super().__init__(work)
        self._recorder, self._events = recorder, events

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._recorder.wait_for_events(self._events)
        return super().wait(timeout)

    def synchronize(self) -> None:
        self._recorder.wait_for_events(self._events)
        super().synchronize()

    block_current_stream = synchronize


class StreamRecorder(LabelledCalls):
    """Records the rows of one train step.

    Args:
        live: the tracker of live bytes, whose numbers of storages are those of the rows.
        rank: global rank.
        path: of the file to write.
    """

    def __init__(self, live: LiveBytes, rank: int, path: Path) -> None:
        super().__init__()
        self.changes = ProcessChanges()
        self._live, self._rank, self._path = live, rank, path
        self._rows = array("q")
        self._active = False
        self._depth = 0  # inside of what is recorded as one access: a call, a metered operator
        self._streams: dict[object, int] = {0: 0}
        self._names = ["main"]
        self._places: dict[RowPlace, int] = {}
        self._events: dict[int, int] = {}  # address of an event -> its running number
        self._kept_events: list[object] = []  # an address is not used again while its owner lives
        self._num_events = 0
        self._alive: set[int] = set()
        self._fresh: set[int] = set()  # storages that nothing has written yet
        self._recent: dict[int, int] = {}  # of these, asked for since the last kernel -> bytes
        self._new_outputs: list[tuple[int, int, int, str]] = []  # low, high, bytes, what
        self._writes_outputs = False
        self._kernel_name = ""
        self._host_numbers: dict[int, int] = {}
        self._kept_on_host: list[object] = []
        self._graph_launches = 0
        self._coalesced: dict[int, list[int]] = {}  # stream of an open block -> ends of its calls
        self._follows_blocks = False

    # -- the train step ---------------------------------------------------------------------------
    def iteration_started(self, number: int, wanted: int, model: object, optimizer: object) -> None:
        """Start at the recorded step, and end at the next."""
        super().iteration_started(number, wanted, model, optimizer)
        if self._active:
            self._finish()
        elif number == min(RECORDED_STEP, wanted) and self._live.meter is not None:
            self._start()

    def finished(self) -> None:
        """The recorded step was the last one."""
        if self._active:
            self._finish()

    def _start(self) -> None:
        meter = self._live.meter
        changes = self.changes
        changes.set(meter, "kernel", self._following_kernel(meter.kernel))  # type: ignore[union-attr]
        changes.set(meter, "add", self._following_fused(meter.add))  # type: ignore[union-attr]
        changes.set(meter, "moved", self._following_moves(meter.moved))  # type: ignore[union-attr]
        self._follow_streams(changes)
        self._active = True
        # what earlier steps have left is there before the first row
        for number, num_bytes, _, note in self._live.alive():
            self._alive.add(number)
            place = self._place(note or "a tensor of an earlier step", "")
            self._add(Kind.ALLOCATE, 0, number, 0, num_bytes, place)

    def _finish(self) -> None:
        self._active = False
        self.changes.undo()
        # numbers in one array while the step runs: a row costs no object
        columns = np.array(self._rows, dtype=np.int64).reshape(-1, _FIELDS)
        # rows of the file have types of their own
        rows = np.empty(len(columns), dtype=ROW)
        for index, name in enumerate(ROW.names or ()):
            rows[name] = columns[:, index]
        trace = StreamTrace(
            self._rank,
            rows,
            tuple(self._names),
            tuple(self._places),
            graph_launches=self._graph_launches,
        )
        save(trace, self._path, force=True)
        # events and storages were kept alive, so that no two have one address
        self._kept_events.clear()
        self._kept_on_host.clear()

    # -- rows -------------------------------------------------------------------------------------
    def _add(self, kind: Kind, stream: int, number: int, low: int, high: int, place: int) -> None:
        self._rows.extend((kind, stream, number, low, high, place))

    def _place(self, what: str, site: str) -> int:
        labels = self._labels
        step = ops.label(
            labels.get("phase", ""), labels.get("microbatch", -1), labels.get("chunk", -1)
        )
        return self._places.setdefault(RowPlace(what, site, step), len(self._places))

    def _site(self) -> str:
        """The innermost line of Megatron, Transformer Engine or the job's own code."""
        return self.sites.innermost(sys._getframe(2))

    def _stream(self, stream: object = None) -> int:
        """The place of a stream; None: of the current one."""
        stream = torch.cuda.current_stream() if stream is None else stream
        number = getattr(stream, "cuda_stream", 0)
        place = self._streams.get(number)
        if place is None:
            place = self._new_stream(number, f"s{sum(n.startswith('s') for n in self._names) + 1}")
        return place

    def _new_stream(self, key: object, name: str) -> int:
        place = self._streams[key] = len(self._names)
        self._names.append(name)
        return place

    def _hears(self) -> bool:
        return self._active and not self._depth

    # -- tensors ----------------------------------------------------------------------------------
    def _number(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor's storage; None: it has no memory of its own."""
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if not is_plain:
            wrapped = isinstance(tensor, self._live.wrappers)
            if wrapped or is_traceable_wrapper_subclass(tensor):
                return None
        if not tensor.is_meta:
            return None
        try:
            return self._live.number_of(tensor)
        except KeyError:  # not there yet, or a weak reference
            return None

    def _host_number(self, memory: object) -> int:
        """The number of memory on the host, which lives as long as the recording."""
        key = memory._cdata if isinstance(memory, torch.UntypedStorage) else id(memory)
        number = self._host_numbers.get(key)
        if number is None:
            number = self._host_numbers[key] = _HOST_STORAGES - len(self._host_numbers)
            self._kept_on_host.append(memory)
        return number

    def _touch(self, kind: Kind, tensor: torch.Tensor, stream: int, place: int) -> None:
        """Add an access of a tensor, if it has memory."""
        number = self._number(tensor)
        if number is None or not tensor.numel():
            return
        low, high = _byte_range(tensor)
        if kind is Kind.WRITE:
            self._fresh.discard(number)
        self._add(kind, stream, number, low, high, place)

    # -- operators --------------------------------------------------------------------------------
    def _following_kernel(self, original: Callable[..., None]) -> Callable[..., None]:
        def kernel(
            func: OpOverload,
            args: Sequence[object],
            kwargs: Mapping[str, object] | None,
            out: object,
        ) -> None:
            # a view touches no memory
            if self._hears() and not func.is_view:
                self._operator(func, args, kwargs or {}, out)
            self._depth += 1
            try:
                original(func, args, kwargs, out)
            finally:
                self._depth -= 1

        return kernel

    def _operator(
        self,
        func: OpOverload,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        out: object,
    ) -> None:
        """Add the accesses of one operator; those of new outputs follow when they have numbers."""
        name = func._schema.name.removeprefix("aten::")
        self._new_outputs.clear()
        # it only says something about tensors
        if name in _NO_KERNELS:
            return
        launches = not name.startswith(_ALLOCATES)
        self._kernel_name, self._writes_outputs = name, launches
        if launches:
            self._recent.clear()
        stream = self._stream()
        place = self._place(name, self._site())
        written: set[int] = set()
        # only the shape of its argument is read
        if name.startswith(_LIKE_BEGINS) or name.endswith(_LIKE_END):
            args, kwargs = (), {}
        for argument, spec in zip(args, func._schema.arguments, strict=False):
            self._argument(argument, _is_written(spec), stream, place, written)
        for key, argument in kwargs.items():
            specs = [spec for spec in func._schema.arguments if spec.name == key]
            is_written = bool(specs) and _is_written(specs[0])
            self._argument(argument, is_written, stream, place, written)
        for tensor in _tensors((out,)):
            self._output(tensor, launches, stream, place, written)

    def _argument(
        self, argument: object, is_written: bool, stream: int, place: int, written: set[int]
    ) -> None:
        for tensor in _tensors((argument,)):
            kind = Kind.WRITE if is_written else Kind.READ
            if is_written:
                written.add(id(tensor))
            # tensors of the device
            if tensor.is_meta:
                self._touch(kind, tensor, stream, place)
            # a copy reads pinned memory of the host, which may be reused too early
            elif kind is Kind.READ and tensor.device.type == "cpu" and self._kernel_name == "copy_":
                self._touch_host(kind, tensor, stream, place)

    def _touch_host(self, kind: Kind, tensor: torch.Tensor, stream: int, place: int) -> None:
        if tensor.numel():
            low, high = _byte_range(tensor)
            number = self._host_number(tensor.untyped_storage())
            self._add(kind, stream, number, low, high, place)

    def _output(
        self, tensor: torch.Tensor, launches: bool, stream: int, place: int, written: set[int]
    ) -> None:
        # an argument that is written to is there already
        if not tensor.is_meta or id(tensor) in written:
            return
        # its memory gets a number behind the operator, when ``_moved`` hears of it
        if self._number(tensor) is None:
            low, high = _byte_range(tensor)
            num_bytes = tensor.untyped_storage().nbytes()
            self._new_outputs.append((low, high, num_bytes, _shape_text(tensor)))
        elif launches:
            self._touch(Kind.WRITE, tensor, stream, place)

    def _following_moves(self, original: Callable[..., str]) -> Callable[..., str]:
        def moved(storage: int, num_bytes: int, tensor: torch.Tensor | None = None) -> str:
            if self._active:
                self._moved(storage, num_bytes)
            return original(storage, num_bytes, tensor)

        return moved

    def _moved(self, number: int, num_bytes: int) -> None:
        """A storage comes to be, or goes."""
        if num_bytes < 0:
            self._alive.discard(number)
            self._fresh.discard(number)
            self._recent.pop(number, None)
            self._add(Kind.FREE, 0, number, 0, 0, 0)
            return
        if number in self._alive:  # it grows
            return
        self._alive.add(number)
        stream = self._stream()
        site = self._site()
        # memory of an output, which the operator has announced by its size
        matching = [output for output in self._new_outputs if output[2] == num_bytes]
        if not matching:  # workspaces, what an operator takes while it runs
            self._add(Kind.ALLOCATE, stream, number, 0, num_bytes, self._place("memory", site))
            self._begin(number, num_bytes)
            return
        output = matching[0]
        self._new_outputs.remove(output)
        low, high, _, what = output
        self._add(Kind.ALLOCATE, stream, number, 0, num_bytes, self._place(what, site))
        if self._writes_outputs and high > low:
            place = self._place(self._kernel_name, site)
            self._add(Kind.WRITE, stream, number, low, high, place)
        else:
            self._begin(number, num_bytes)

    def _begin(self, number: int, num_bytes: int) -> None:
        """A storage is there, and nothing has written it yet."""
        self._fresh.add(number)
        self._recent[number] = num_bytes

    def _following_fused(self, original: Callable[..., None]) -> Callable[..., None]:
        def add(name: str, flops: int, traffic: int, tensors: Sequence[torch.Tensor]) -> None:
            if self._hears():
                self._fused(name, tensors)
            original(name, flops, traffic, tensors)

        return add

    def _fused(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """A kernel of a stand-in writes what was asked for since the kernel before it, also where
        the stand-in does not list its result; other new memory is written if it stands last.
        """
        stream = self._stream()
        place = self._place(name, self._site())
        for storage, num_bytes in self._recent.items():
            # written by this kernel for the first time
            if storage in self._fresh:
                self._fresh.discard(storage)
                self._add(Kind.WRITE, stream, storage, 0, num_bytes, place)
        last = None
        if tensors:
            last = tensors[-1]
        for tensor in tensors:
            number = self._number(tensor)
            # its write is there already
            if number in self._recent:
                continue
            is_written = tensor is last and (number in self._fresh or name in _IN_PLACE)
            kind = Kind.READ
            # Adam writes parameters and states that it is given
            if is_written or name == "adam":
                kind = Kind.WRITE
            self._touch(kind, tensor, stream, place)
        self._recent.clear()

    # -- streams and events -----------------------------------------------------------------------
    def _follow_streams(self, changes: ProcessChanges) -> None:
        """Hear of what orders streams, and of what the host waits for."""
        # what orders streams: events, waits, synchronisation
        event, stream = torch.cuda.Event, torch.cuda.Stream
        changes.set(event, "record", self._before(event.record, self._event_recorded))
        changes.set(event, "wait", self._before(event.wait, self._event_waited))
        changes.set(event, "synchronize", self._before(event.synchronize, self._event_awaited))
        changes.set(stream, "synchronize", self._before(stream.synchronize, self._stream_awaited))
        changes.set(
            torch.cuda, "synchronize", self._before(torch.cuda.synchronize, self._device_awaited)
        )
        # what keeps memory, or lets the host read
        record_stream = torch.Tensor.record_stream
        changes.set(torch.Tensor, "record_stream", self._before(record_stream, self._used))
        changes.set(cuda, "host_waits", self._before(cuda.host_waits, self._host_waits))
        changes.set(cuda, "copy_listener", self._copied)
        # what graphs launch is counted alone
        graph = torch.cuda.CUDAGraph
        changes.set(graph, "replay", self._before(graph.replay, self._graph_launched))

    def _before(
        self, original: Callable[..., object], heard: Callable[..., None]
    ) -> Callable[..., object]:
        """Call ``heard`` first."""

        def call(*args: object, **kwargs: object) -> object:
            if self._hears():
                heard(*args, **kwargs)
            return original(*args, **kwargs)

        return call

    def _new_event(self) -> int:
        self._num_events += 1
        return self._num_events

    def _event_recorded(self, event: object, stream: object = None) -> None:
        number = self._events[id(event)] = self._new_event()
        self._kept_events.append(event)
        self._add(Kind.RECORD, self._stream(stream), number, 0, 0, 0)

    def _event_waited(self, event: object, stream: object = None) -> None:
        number = self._events.get(id(event))
        if number is not None:  # else it is of an earlier step, or was never recorded
            self._add(Kind.WAIT, self._stream(stream), number, 0, 0, 0)

    def _event_awaited(self, event: object) -> None:
        number = self._events.get(id(event))
        if number is not None:
            self._add(Kind.HOST_EVENT, 0, number, 0, 0, 0)

    def _stream_awaited(self, stream: object) -> None:
        self._add(Kind.HOST_STREAM, self._stream(stream), 0, 0, 0, 0)

    def _device_awaited(self, device: object = None) -> None:
        self._add(Kind.HOST_DEVICE, 0, 0, 0, 0, 0)

    def _host_waits(self, what: str) -> None:
        """The host reads a value, or copies to the device and waits: for the current stream."""
        if what not in ("stream", "event", "device"):  # which say themselves for what
            self._add(Kind.HOST_STREAM, self._stream(), 0, 0, 0, 0)

    def _used(self, tensor: torch.Tensor, stream: object) -> None:
        number = self._number(tensor)
        if number is not None:
            self._add(Kind.USE, self._stream(stream), number, 0, 0, 0)

    def _copied(self, target: object, source: object, blocks: bool) -> None:
        """Add a copy between device and host that is no operator."""
        if not self._hears():
            return
        stream = self._stream()
        place = self._place("copy_", self._site())
        self._touch_either(Kind.READ, source, stream, place)
        self._touch_either(Kind.WRITE, target, stream, place)
        # the host waits for the copy, and so for all before it on the stream
        if blocks:
            self._add(Kind.HOST_STREAM, stream, 0, 0, 0, 0)

    def _touch_either(self, kind: Kind, tensor: object, stream: int, place: int) -> None:
        """Add an access of a tensor of the device, or of memory of the host."""
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:
            self._touch(kind, tensor, stream, place)
        elif isinstance(tensor, torch.Tensor):
            self._touch_host(kind, tensor, stream, place)
        else:  # what stands for a tensor of the host, and has no storage
            self._add(kind, stream, self._host_number(tensor), 0, 1, place)

    def _graph_launched(self, graph: object) -> None:
        self._graph_launches += 1

    # -- calls ------------------------------------------------------------------------------------
    def record(
        self, group: PrismGroup, op: str, answer: Answer, args: Args, kwargs: Kwargs
    ) -> dist.Work | None:
        """Make a call, and add its accesses on the stream of its communicator."""
        if not self._hears():
            return self.through(group, op, answer, args, kwargs)
        inputs, outputs = arguments(op, args)
        if not all(tensor.is_meta for tensor in (*inputs, *outputs)):  # gloo's, on the host
            return self.through(group, op, answer, args, kwargs)
        event = self._call(group, op, args, inputs, outputs)
        self._depth += 1
        try:
            work = self.through(group, op, answer, args, kwargs)
        finally:
            self._depth -= 1
        return None if work is None else _FollowedWork(self, (event,), work)

    def _call(
        self,
        group: PrismGroup,
        op: str,
        args: Args,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> int:
        """Add a call; returns the event of its end."""
        if not self._follows_blocks:
            self._follow_blocks(type(group))
        stream = self._communicator(group)
        # as ProcessGroupNCCL does: its stream waits for the caller's, and records the end
        begin, end = self._new_event(), self._new_event()
        self._add(Kind.RECORD, self._stream(), begin, 0, 0, 0)
        self._add(Kind.WAIT, stream, begin, 0, 0, 0)
        place = self._place(op, self._site())
        for tensor in inputs:
            self._touch(Kind.READ, tensor, stream, place)
        for tensor in outputs:
            self._touch(Kind.WRITE, tensor, stream, place)
        self._add(Kind.RECORD, stream, end, 0, 0, 0)
        # the call holds its tensors until its end, so their memory is not given away before
        for tensor in (*inputs, *outputs):
            number = self._number(tensor)
            if number is not None:
                self._add(Kind.HOLD, stream, number, end, 0, 0)
        if stream in self._coalesced:
            self._coalesced[stream].append(end)
        return end

    def _communicator(self, group: PrismGroup) -> int:
        """The stream of a group's communicator."""
        key = f"nccl {group.desc}"
        stream = self._streams.get(key)
        return self._new_stream(key, key) if stream is None else stream

    def _follow_blocks(self, group_class: type[PrismGroup]) -> None:
        """Have waits for a block of coalesced calls count as waits for each of its calls."""
        start, end = group_class._start_coalescing, group_class._end_coalescing
        self._follows_blocks = True

        def start_coalescing(group: PrismGroup, device: torch.device) -> None:
            self._coalesced[self._communicator(group)] = []
            start(group, device)

        def end_coalescing(group: PrismGroup, device: torch.device) -> dist.Work:
            events = self._coalesced.pop(self._communicator(group), [])
            return _FollowedWork(self, events, end(group, device))

        self.changes.set(group_class, "_start_coalescing", start_coalescing)
        self.changes.set(group_class, "_end_coalescing", end_coalescing)

    def wait_for_events(self, events: Sequence[int]) -> None:
        """The current stream waits for the ends of calls."""
        for event in events:
            if self._active:
                self._add(Kind.WAIT, self._stream(), event, 0, 0, 0)


def _is_written(spec: torch.Argument) -> bool:
    """Whether an operator writes this argument."""
    return spec.alias_info is not None and spec.alias_info.is_write


def _tensors(values: Iterable[object]) -> list[torch.Tensor]:
    """All tensors of nested lists and tuples."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += _tensors(value)
    return tensors


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of a tensor in its storage, and the one behind its last."""
    item_bytes = tensor.element_size()
    low = int(tensor.storage_offset()) * item_bytes
    # the last element lies as far behind the first as all strides together
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size == 0:
            return low, low
        elements += (size - 1) * stride
    return low, low + elements * item_bytes


def _shape_text(tensor: torch.Tensor) -> str:
    shape = "x".join(str(size) for size in tensor.shape) or "1"
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape}"
