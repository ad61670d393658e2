"""Count the bytes that are alive on the (virtual) device, and keep the history of requests.

A TorchDispatchMode sees every storage that an operator creates; a weak finalizer sees it go.  Sums
are exact *allocated* bytes of tensors, before the allocator's rounding and segments.  ``scope``
labels what runs now; the peak remembers the labels.  Only tensors of ``device`` count.

It does not see memory that no tensor holds (context, NCCL).
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.core.programs.ops import BEGUN, EMPTIED, WAITED
from megatron_prism.runtime.devices import cuda, operators
from megatron_prism.runtime.devices.host_shapes import LEAST_BYTES, HostShapes
from megatron_prism.runtime.devices.operators import (
    COPY_INTO_ROWS,
    IN_PLACE,
    Temporaries,
    temporaries,
)

if TYPE_CHECKING:
    from types import FrameType

    from torch._ops import OpOverload

    from megatron_prism.runtime.recorder.shapes_meter import Meter

    # is an operator a product, does it change its first argument, does it copy that into rows
    Before = tuple[bool, bool, bool]
    # an operator, what happens before it (None: nothing), what answers it, is its result a view, is
    # it a kernel, what it takes while it runs, may it change its first argument on a GPU
    Known = tuple[
        OpOverload, Before | None, operators.Answer | None, bool, bool, Temporaries | None, bool
    ]


class History:
    """Rows as they come; ``stream`` says which one is current (0: the default; negative: the pool
    of a CUDA graph).

    launches : kernels so far, which the tracker counts
    whole    : keep all rows; else only those of the parts of the job that fit into a million
    """

    def __init__(self, stream: Callable[[], int], whole: bool = True) -> None:
        self._stream, self.whole = stream, whole
        self._rows = array("q")
        self.launches = 0
        self.spans: list[tuple[str, int, int]] = []  # part of the job, its rows from and to
        self._beside: dict[int, int] = {}  # storage -> its stream, of those not on the default one

    def another(self) -> History:
        """Return an empty history of the same streams, which keeps all rows."""
        history = History(self._stream)
        history._beside = dict(self._beside)
        return history

    def moved(self, storage: int, num_bytes: int) -> None:
        """A storage came to be, grew or (negative) went."""
        stream = self._stream() if num_bytes > 0 else 0
        if stream:
            self._beside[storage] = stream
        self._rows.extend((storage, num_bytes, stream, self.launches))

    def added(self, to: int, storage: int) -> None:
        """Autograd's hook adds ``storage`` to ``to``, on the stream that ``to`` was made on."""
        if to in self._beside:
            self.used(storage, self._beside[to])

    def used(self, storage: int, stream: int) -> None:
        """``stream`` uses it; one that was made on another comes back late."""
        if stream != self._beside.get(storage, 0):
            self._rows.extend((storage, 0, stream, self.launches))

    def emptied(self) -> None:
        """The job empties the allocator's cache."""
        self._rows.extend((EMPTIED, 0, 0, self.launches))

    def waited(self) -> None:
        """The host waits until the device is through; waits without a request between are one."""
        if len(self._rows) < 4 or self._rows[-4] != WAITED:
            self._rows.extend((WAITED, 0, 0, self.launches))

    def begun(self) -> None:
        """A train step begins."""
        self._rows.extend((BEGUN, 0, 0, self.launches))

    @property
    def full(self) -> bool:
        return not self.whole and len(self) > _LONGEST

    def __len__(self) -> int:
        return len(self._rows) // 4

    def rows(self, start: int = 0) -> np.ndarray:
        """int64 [n, 4]: all of it so far, from row ``start``."""
        return np.array(self._rows[4 * start :], dtype=np.int64).reshape(-1, 4)

    def extend(self, rows: np.ndarray, launches: int) -> None:
        """Rows of a part of the job that repeats itself, with so many kernels."""
        self._rows.frombytes(rows.tobytes())
        self.launches += launches
        for storage, _, stream, _ in rows[(rows[:, 1] > 0) & (rows[:, 2] > 0)].tolist():
            self._beside[storage] = stream


# What torch takes from its allocator for every cuBLAS handle and stream that multiply, and keeps:
# 32 MiB on Hopper (aten/src/ATen/cuda/CublasHandlePool.cpp, getChosenWorkspaceSize, torch 2.11);
# one handle of the main thread, one of autograd's.
WORKSPACE_BYTES = 32 << 20
_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm")
)
_ALLOCATE = ("aten::empty", "aten::new_empty")  # and launch nothing
_ADD, _SUM = torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor
_LONGEST = 1 << 20  # rows outside captures: 32 MiB, replayed in a few seconds
_FRESH = ("aten::lift", "aten::lift_fresh")  # said to be views, and the first to see their storage
workspaces: dict[tuple[bool, int], torch.Tensor] = {}  # is it autograd's, stream -> the tensor


@dataclass
class LivePeak:
    """The largest number of live bytes and the labels that held then (phase, microbatch, …)."""

    bytes: int = 0
    labels: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Outline:
    """A tensor without its storage: the storage's number, bytes and note, and how it is seen."""

    storage: int
    bytes: int
    note: str
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool


class _Gone(weakref.ref[torch.UntypedStorage]):
    """A weak reference that knows its storage's address: a quarter of ``weakref.finalize``."""

    __slots__ = ("key",)
    key: int


class Engine(torch._C._ImperativeEngine):
    """torch's, whoever starts it (Megatron does by itself): what C++ calls has this frame below.

    starts : backwards so far that began outside of another one.  On a GPU such a backward goes to
             the thread of its device, and one inside of it stays there
    """

    starts = 0
    _depth = 0

    def run_backward(self, *args: Any, **options: Any) -> Any:
        if not self._depth:
            self.starts += 1
        self._depth += 1
        try:
            return super().run_backward(*args, **options)
        finally:
            self._depth -= 1


def _is_view(func: OpOverload) -> bool:
    """Whether all that an operator returns is a view of what it is given."""
    infos = [result.alias_info for result in func._schema.returns]
    seen = bool(infos) and all(info is not None and not info.is_write for info in infos)
    return seen and func._schema.name not in _FRESH


def _in_place(func: OpOverload, caller: FrameType, args: operators.Args) -> torch.Tensor | None:
    """The argument that ``func`` changes on a GPU, if torch's engine calls it from C++."""
    # called from Python: the operator allocates its result
    if caller.f_code is not Engine.run_backward.__code__:
        return None
    if func is not _SUM:
        return args[0]
    # backward's sums of gradients: an operand that nothing else holds takes the result
    for tensor in args[:2]:
        if isinstance(tensor, torch.Tensor) and _held_once(tensor):
            return tensor
    return None


# the engine, the arguments of the operator as a tuple, a name in ``_in_place``, one here, the call
_REFERENCES, _USES, _STORAGES = 5, 4, 2


def _held_once(tensor: torch.Tensor) -> bool:
    """Whether nobody but the engine holds ``tensor``, nor another one of its storage."""
    storage = tensor.untyped_storage()._cdata
    uses = tensor._use_count()  # type: ignore[attr-defined]
    once = uses <= _USES and sys.getrefcount(tensor) <= _REFERENCES
    return once and torch._C._storage_Use_Count(storage) <= _STORAGES


class LiveBytes(TorchDispatchMode):
    """Counts live bytes of tensors on ``device`` (a device type: ``meta`` or ``cpu``).

    cublas : count the workspaces that matrix products would take on a GPU, too
    """

    def __init__(self, device: str = "meta", cublas: bool = False) -> None:
        super().__init__()
        self.device_type, self.meta, self.cublas = device, device == "meta", cublas
        self.now = 0
        self.values: AbstractContextManager[object] = contextlib.nullcontext()  # answers reads
        self.wrappers: tuple[type, ...] = ()  # tensors whose memory is that of what they wrap
        self.high = LivePeak()
        self.host = HostShapes()  # copies on the host, which count by themselves
        self.parts: dict[str, int] = {}  # part of the job -> the most that was alive in it
        self._running = self._seen = 0  # the most in this part; below ``_seen`` nothing is new
        self.labels: dict[str, object] = {}
        self.meter: Meter | None = None  # told of every call while a slice is captured
        self.history: History | None = None  # of every request
        self.earlier: tuple[History, int] | None = None  # an ended one, the live peak till then
        # address -> (bytes, running number, what tells when it goes)
        self._alive: dict[int, tuple[int, int, _Gone]] = {}
        self._known: dict[int, Known] = {}  # operators by id: ``_ask``
        self._notes: dict[int, str] = {}  # running number -> whose, of those the meter was told of
        self.count = 0
        self._silent: dict[int, int] | None = None  # running number -> bytes, inside ``inside``
        self._changed: dict[int, int] = {}  # the same, of those of outside that change there
        # (running number, bytes) of what goes, inside ``without_telling``
        self._untold: list[tuple[int, int]] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch.compile is off on these tiers, so no operator needs torch's guard against it."""
        return False

    # -- what cuda_stubs asks ---------------------------------------------------------------------
    def current(self) -> int:
        return self.now

    def peak(self) -> int:
        return self.high.bytes

    def reset_peak(self) -> None:
        """Start a new peak from what is alive now."""
        self.high = LivePeak(self.now, dict(self.labels))
        self._seen = self.now

    def end_history(self) -> None:
        """Keep what the history knows by now, and add no more: a long job would fill memory."""
        if self.history is not None:
            self.earlier, self.history = (self.history, self.high.bytes), None

    def begin_probe(self, changes: ProcessChanges) -> None:
        """Keep peaks and history as they are until ``changes`` are undone: what runs from here on
        is no iteration of the job.
        """
        history, high, parts = self.history, self.high, {**self.parts}
        self.end_history()
        # steps that repeat themselves are told apart by what they ask for
        if history is not None:
            self.history = history.another()

        def end_probe() -> None:
            self.history, self.high, self.parts = None, high, parts

        changes.on_undo(end_probe)

    def iteration_started(self, number: int, wanted: int, model: object, optimizer: object) -> None:
        """Train step ``number`` begins."""
        if self.history is not None:
            self.history.begun()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What runs inside is this part of the job (an iteration, the optimizer step in it)."""
        # the peak of the part alone; the part around it gets the larger of both back
        outer_peak = self._running
        self._running = self._seen = self.now
        history = self.history
        start = 0 if history is None else len(history)
        try:
            yield
        finally:
            if history is not None:
                history.spans.append((name, start, len(history)))
                if history.full:
                    self.end_history()
            self.parts[name] = max(self.parts.get(name, 0), self._running)
            self._running = max(outer_peak, self._running)

    @contextlib.contextmanager
    def scope(self, **labels: object) -> Iterator[None]:
        """Label what runs inside: ``with live.scope(phase="forward", microbatch=3)``."""
        before = self.labels
        self.labels = {**before, **labels}
        try:
            yield
        finally:
            self.labels = before

    def alive(self) -> list[tuple[int, int, int, str]]:
        """(running number, bytes, address, whose if known) of every storage that is alive now."""
        return [
            (number, size, key, self._notes.get(number, ""))
            for key, (size, number, _) in self._alive.items()
        ]

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """What runs here is one kernel: what comes and goes within it is never on the device.

        A tensor of outside that it changes is there twice: the compiler makes another one, and
        copies it back at the end (functionalisation).
        """
        outer, self._silent = self._silent, {} if self._silent is None else self._silent
        try:
            yield
        finally:
            left, self._silent = self._silent, outer
            # the outermost kernel has ended: what is left of it is on the device from now on
            if outer is None:
                for number, size in left.items():
                    self._notify(number, size)
                changed, self._changed = self._changed, {}
                self.record_temporaries(changed.values())
            self._mark()

    def record_temporaries(self, sizes: Iterable[int]) -> None:
        """Something has taken so many bytes each, all at once, and has given them back."""
        temporaries = [
            torch.empty(size, dtype=torch.uint8, device=self.device_type) for size in sizes
        ]
        for tensor in temporaries:
            self.track(tensor)

    # -- what repeats itself ----------------------------------------------------------------------
    def number_of(self, tensor: torch.Tensor) -> int:
        """The running number of its storage, which is counted."""
        return self._alive[tensor.untyped_storage()._cdata][1]

    def outline(self, tensor: torch.Tensor) -> Outline:
        """What ``adopt`` needs of a tensor."""
        size, number, _ = self._alive[tensor.untyped_storage()._cdata]
        seen = (tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype)
        return Outline(number, size, self._notes.get(number, ""), *seen, tensor.requires_grad)

    def reserve(self, count: int) -> int:
        """The first of ``count`` running numbers that nobody else gets."""
        self.count += count
        return self.count - count

    def repeat(self, rows: np.ndarray, launches: int) -> None:
        """What ``rows`` of a history say happens, with so many kernels."""
        assert self.history is not None
        self.history.extend(rows, launches)
        alive = self.now + np.cumsum(rows[:, 1])
        for now in (alive.max(initial=self.now), alive[-1] if alive.size else self.now):
            self.now = int(now)
            self._mark()

    def adopt(self, outline: Outline, number: int) -> torch.Tensor:
        """A tensor like ``outline`` whose storage counts already, as ``number``; without modes."""
        storage = torch.empty(outline.bytes, dtype=torch.uint8, device="meta").untyped_storage()
        tensor = torch.empty(0, dtype=outline.dtype, device="meta")
        tensor.set_(storage, outline.offset, outline.shape, outline.stride)
        self.adopt_storage(storage, outline.bytes, number, outline.note)
        return tensor

    def adopt_storage(
        self, storage: torch.UntypedStorage, num_bytes: int, number: int, note: str
    ) -> None:
        """Follow a storage that counts already, as ``number``."""
        gone = _Gone(storage, self._free)
        gone.key = storage._cdata
        self._alive[gone.key] = (num_bytes, number, gone)
        if note:
            self._notes[number] = note

    def counted(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """The running number and bytes of its storage; None if nobody counts it."""
        size_and_number = self._alive.get(tensor.untyped_storage()._cdata)
        return None if size_and_number is None else (size_and_number[1], size_and_number[0])

    def note_of(self, number: int) -> str:
        """Whose a storage is, "" if that is not known."""
        return self._notes.get(number, "")

    def without_telling(self, change: Callable[[], object]) -> list[tuple[int, int]]:
        """Do ``change``; the storages that go in it count until ``repeat`` says that they go.

        Returns:
            Their numbers and bytes, in the order in which they went.
        """
        self._untold = []
        try:
            change()
        finally:
            went, self._untold = self._untold, None
        return went

    def forget(self, tensor: torch.Tensor) -> None:
        """Its storage has gone already, as ``repeat`` was told."""
        _, number, _ = self._alive.pop(tensor.untyped_storage()._cdata)
        self._notes.pop(number, None)

    # -- counting ---------------------------------------------------------------------------------
    def _free(self, gone: _Gone) -> None:
        size, number, _ = self._alive.pop(gone.key)
        self._notes.pop(number, None)
        # inside ``without_telling``: it counts until ``repeat`` says when it goes
        if self._untold is not None:
            self._untold.append((number, size))
            return
        self.now -= size
        # it came and went inside of one kernel, so it was never on the device
        if self._silent is not None and self._silent.pop(number, None) is not None:
            return
        if self.history is not None:
            self.history.moved(number, -size)
        if self.meter is not None:
            self.meter.moved(number, -size)

    def track(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor`` if it is on the device and not yet counted."""
        # of another device, whose memory is not counted
        if not (tensor.is_meta if self.meta else tensor.device.type == self.device_type):
            return
        if type(tensor) is not torch.Tensor and (
            isinstance(tensor, self.wrappers) or is_traceable_wrapper_subclass(tensor)
        ):
            return  # a DTensor: what it wraps has memory
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        before = self._alive.get(key)
        if before is None:
            if hasattr(storage, "address"):
                return  # a weak reference's: its memory is another's
            counted_size, number, gone = 0, self.count, _Gone(storage, self._free)
            gone.key = key
            self.count += 1
        else:
            counted_size, number, gone = before
            if counted_size == size:
                return
        self._alive[key] = (size, number, gone)
        self.now += size - counted_size
        # inside of one kernel nobody is told: what is left at its end is
        if self._silent is not None and before is None:
            self._silent[number] = size
        else:
            self._notify(number, size - counted_size, tensor)
        if self.now > self._seen:
            self._mark()

    def follow_resizes(self, changes: ProcessChanges) -> None:
        """Count what FSDP does: it gives a buffer's storage back, and takes it anew, by resizing.

        What is taken anew is another request to the allocator.
        """
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            before = self._alive.get(storage._cdata)
            answer = original(storage, size)
            # another size is another request: the storage goes, and comes with a new number
            if before is not None and before[0] != size:
                self._free(before[2])
                self.count += 1
                self._alive[storage._cdata] = (size, self.count - 1, before[2])
                self.now += size
                self._notify(self.count - 1, size)
                if self.now > self._seen:
                    self._mark()
            return answer

        changes.set(torch.UntypedStorage, "resize_", resize_)

    def _notify(self, number: int, change: int, tensor: torch.Tensor | None = None) -> None:
        if not change:  # to the history 0 bytes mean something else
            return
        if self.history is not None:
            self.history.moved(number, change)
        if self.meter is not None:
            note = self.meter.moved(number, change, tensor)
            if note:
                self._notes[number] = note

    def _mark(self) -> None:
        if self._silent is not None:
            return
        self._running = max(self._running, self.now)
        if self.now > self.high.bytes:
            self.high = LivePeak(
                self.now, self.labels
            )  # which nobody changes: ``scope`` makes new ones
        self._seen = min(self._running, self.high.bytes)

    def _handle(self) -> None:
        """A product is asked for: its thread's cuBLAS handle takes a workspace, once a stream."""
        autograd = torch._C._current_graph_task_id() >= 0  # a CUDA backward has its own thread
        key = autograd, cuda.current_stream()
        if key not in workspaces:
            workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device_type)
            workspaces[key] = workspace
            self.track(workspace)

    def _change(self, tensor: object) -> None:
        """What runs ``inside`` changes it."""
        if isinstance(tensor, torch.Tensor):
            size_and_number = self._alive.get(tensor.untyped_storage()._cdata)
            # tensors that were made inside do not count
            if (
                size_and_number is not None
                and self._silent is not None
                and size_and_number[1] not in self._silent
            ):
                self._changed[size_and_number[1]] = size_and_number[0]

    def _ask(self, func: OpOverload) -> Known:
        """What is known of ``func``: asked once, as an operator's own hash is a call to Python."""
        # views take no memory, and neither views nor allocations launch kernels
        view = _is_view(func)
        answer = operators.answer(func) if self.cublas else None
        launches = not view and not func._schema.name.startswith(_ALLOCATE)
        takes = temporaries(func) if self.cublas else None
        product = self.cublas and func in _PRODUCTS
        in_place = self.cublas and func in IN_PLACE
        changes = func._schema.is_mutable
        copies = self.cublas and func in COPY_INTO_ROWS
        before = product, changes, copies
        prepares = func is _ADD or any(before)
        return func, before if prepares else None, answer, view, launches, takes, in_place

    def used(self, tensor: torch.Tensor, stream: int) -> None:
        """``stream`` uses ``tensor``: torch.Tensor.record_stream."""
        size_and_number = self._alive.get(tensor.untyped_storage()._cdata)
        if self.history is not None and size_and_number is not None:
            self.history.used(size_and_number[1], stream)

    def copied(self, tensor: torch.Tensor) -> None:
        """A tensor of the device is copied to the host or from there; small ones count nothing."""
        num_bytes = tensor.numel() * tensor.element_size()
        if self.meter is not None and num_bytes >= LEAST_BYTES:
            self.meter.copied(num_bytes)

    def _added(self, to: torch.Tensor, grad: object) -> None:
        """``to += grad``: is that autograd's hook of a parameter, which may have its own stream?"""
        node = torch._C._current_autograd_node()
        # an addition of the program itself, outside the backward
        if node is None or not node.name().endswith("AccumulateGrad"):
            return
        # both have to be tensors of the device
        keys = [t.untyped_storage()._cdata for t in (to, grad) if isinstance(t, torch.Tensor)]
        numbers = [self._alive[key][1] for key in keys if key in self._alive]
        if self.history is not None and len(numbers) == 2:
            self.history.added(*numbers)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        # a tensor that wraps others (a DTensor) has no memory: the operator runs on what it wraps
        for kind in types:
            if hasattr(kind, "__tensor_flatten__"):
                return self._of_wrapper(kind, func, types, args, kwargs)
        facts = self._known.get(id(func))
        if facts is None:
            facts = self._known[id(func)] = self._ask(func)
        # operands of the host: its memory and its time
        if self.host and not facts[3] and self.host.concerned(args, kwargs):
            return self._on_host(func, args, kwargs)
        _, before, answer, view, launches, takes, in_place = facts
        rows = None  # memory until the operator is through
        if before is not None:
            rows = self._prepare(func, before, args)
        out = None if answer is None else answer(args, kwargs)
        if in_place and torch._C._current_graph_task_id() >= 0:
            changed = _in_place(func, sys._getframe(1), args)
            out = out if changed is None else changed
        if out is None:
            out = func(*args, **kwargs) if kwargs else func(*args)
        # views are counted by nobody, but the meter sees every operator
        if self.meter is not None:
            self.meter.kernel(func, args, kwargs, out)
        # a view has the memory of its base, which is counted
        if view:
            return out
        if launches and self.history is not None:
            self.history.launches += 1
        if isinstance(out, torch.Tensor):
            self.track(out)
        elif isinstance(out, (tuple, list)):
            self._track_all(out)
        # what the operator takes for itself while it runs comes behind its result
        if takes is not None:
            self._take_temporaries(takes, args, cast(torch.Tensor, out))
        del rows
        return out

    def _on_host(self, func: OpOverload, args: operators.Args, kwargs: operators.Kwargs) -> object:
        """An operator of tensors that are on the host: no kernel of the device."""
        answer = self.host.answer(func, args, kwargs)
        if self.meter is not None:
            self.meter.worked_on_host(func, args, kwargs, answer)
        return answer

    def _of_wrapper(
        self,
        kind: type,
        func: OpOverload,
        types: Sequence[type],
        args: operators.Args,
        kwargs: operators.Kwargs,
    ) -> object:
        """An operator of a tensor that is made of others."""
        if not kind.__module__.startswith("torch.nested"):
            return NotImplemented  # DTensor makes of it what its rank does: that comes here
        with self, self.values:  # the Python of nested tensors reads lengths
            return cast(Any, kind).__torch_dispatch__(func, types, args, kwargs)

    def _prepare(
        self, func: OpOverload, before: Before, args: operators.Args
    ) -> torch.Tensor | None:
        """What happens before an operator: cuBLAS has its workspace, a tensor that is changed is
        noted, and one that is not in rows is copied.

        Returns:
            The copy, whose memory lasts until the operator is through.
        """
        product, changes, copies = before
        # a matrix product asks cuBLAS for its workspace, an addition may be autograd's
        if product:
            self._handle()
        elif func is _ADD and self.history is not None:
            self._added(*args[:2])
        # inside of a compiled kernel: the change costs a copy
        if changes and self._silent is not None:
            self._change(args[0])
        if not copies or self._silent is not None or args[0].is_contiguous():
            return None
        rows = torch.empty_like(args[0])
        self.track(rows)
        return rows

    def _take_temporaries(
        self, takes: Temporaries, args: operators.Args, out: torch.Tensor
    ) -> None:
        if self._silent is None:
            self.record_temporaries(takes(args, out))

    def _track_all(self, results: Sequence[object]) -> None:
        for result in results:
            if isinstance(result, torch.Tensor):
                self.track(result)
