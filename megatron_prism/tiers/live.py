"""How many bytes are alive on the (virtual) device, and what was going on at the peak?

A TorchDispatchMode sees every storage that an operator creates; a weak finalizer sees it go.  Sums
are exact *allocated* bytes of tensors, before the allocator's rounding and segments.  ``scope``
labels what runs now; the peak remembers the labels.  Only tensors of ``device`` count.

It does not see memory that no tensor holds (context, NCCL), nor ``resize_`` of a
storage after its creation unless an operator returns the tensor again.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["LiveBytes", "Peak", "workspaces"]

# What torch takes from its allocator for every cuBLAS handle that multiplies, and keeps: 32 MiB on
# Hopper (aten/src/ATen/cuda/CublasHandlePool.cpp, getChosenWorkspaceSize, torch 2.11); one handle
# of the main thread, one of autograd's.
WORKSPACE_BYTES = 32 << 20
_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm")
)
workspaces: dict[bool, torch.Tensor] = {}  # is it autograd's -> the tensor


@dataclass
class Peak:
    """The largest number of live bytes and the labels that held then (phase, microbatch, …)."""

    bytes: int = 0
    labels: dict[str, Any] = field(default_factory=dict)


class LiveBytes(TorchDispatchMode):
    """Counts live bytes of tensors on ``device`` (a device type: ``meta`` or ``cpu``).

    cublas : count the workspaces that matrix products would take on a GPU, too
    """

    def __init__(self, device: str = "meta", cublas: bool = False) -> None:
        super().__init__()
        self.device_type, self.cublas = device, cublas
        self.now = 0
        self.high = Peak()
        self.labels: dict[str, Any] = {}
        self.meter: Any = None  # told of every call while a slice is captured
        self._alive: dict[int, tuple[int, int]] = {}  # address -> (bytes, running number)
        self._notes: dict[int, str] = {}  # running number -> whose, of those the meter was told of
        self._count = 0
        self._silent: dict[int, int] | None = None  # running number -> bytes, inside ``inside``

    # -- what cuda_stubs asks ---------------------------------------------------------------------
    def current(self) -> int:
        return self.now

    def peak(self) -> int:
        return self.high.bytes

    def reset_peak(self) -> None:
        """Start a new peak from what is alive now."""
        self.high = Peak(self.now, dict(self.labels))

    @contextlib.contextmanager
    def scope(self, **labels: Any) -> Iterator[None]:
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
            for key, (size, number) in self._alive.items()
        ]

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """What runs here is one kernel: what comes and goes within it is never on the device."""
        outer, self._silent = self._silent, {} if self._silent is None else self._silent
        try:
            yield
        finally:
            left, self._silent = self._silent, outer
            for number, size in left.items() if outer is None else ():
                self._tell(number, size)
            self._mark()

    # -- counting ---------------------------------------------------------------------------------
    def _free(self, key: int) -> None:
        size, number = self._alive.pop(key)
        self.now -= size
        self._notes.pop(number, None)
        if self._silent is not None and self._silent.pop(number, None) is not None:
            return
        if self.meter is not None:
            self.meter.moved(number, -size)

    def track(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor`` if it is on the device and not yet counted."""
        if tensor.device.type != self.device_type:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        known, number = self._alive.get(key, (-1, self._count))
        if known == size:
            return
        if known < 0:
            weakref.finalize(storage, self._free, key).atexit = False
            self._count += 1
            known = 0
        self._alive[key] = (size, number)
        self.now += size - known
        if self._silent is not None and not known:
            self._silent[number] = size
        else:
            self._tell(number, size - known)
        self._mark()

    def _tell(self, number: int, change: int) -> None:
        if self.meter is not None and change:
            note = self.meter.moved(number, change)
            if note:
                self._notes[number] = note

    def _mark(self) -> None:
        if self._silent is None and self.now > self.high.bytes:
            self.high = Peak(self.now, dict(self.labels))

    def _handle(self) -> None:
        """A product is asked for: its thread's cuBLAS handle takes a workspace, once."""
        autograd = torch._C._current_graph_task_id() >= 0  # a CUDA backward has its own thread
        if autograd not in workspaces:
            made = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device_type)
            workspaces[autograd] = made
            self.track(made)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.cublas and func in _PRODUCTS:
            self._handle()
        out = func(*args, **(kwargs or {}))
        if self.meter is not None:
            self.meter.kernel(func, args, kwargs, out)
        if isinstance(out, torch.Tensor):
            self.track(out)
        elif isinstance(out, (tuple, list)):
            for item in out:
                if isinstance(item, torch.Tensor):
                    self.track(item)
        return out
