"""Tell the recorder of the streams, events and host waits that the job uses.

On a real device ``torch.cuda``'s classes are wrapped; on the other tiers the stand-ins report by
themselves (``devices.cuda.watcher``).  ``changes.undo()`` puts
everything back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime.devices import cuda
from megatron_prism.runtime.recorder.recorder import Recorder

__all__ = ["report_to"]

# reading a value on the host waits for the device
_READS = ("item", "tolist", "cpu", "__bool__", "__float__", "__int__", "numpy")


def report_to(recorder: Recorder, changes: ProcessChanges) -> None:
    """Report to ``recorder`` until ``changes`` are undone."""
    if recorder.tier == "cuda":
        _wrap_cuda(recorder, changes)
    else:
        changes.set(cuda, "watcher", recorder)


def _wrap(
    changes: ProcessChanges,
    owner: Any,
    name: str,
    before: Callable[..., bool],
    after: Callable[[], None] | None = None,
) -> None:
    """``before`` says whether there is anything to report; then ``after`` is told of the return."""
    original = getattr(owner, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        told = before(self, *args, **kwargs)
        made = original(self, *args, **kwargs)
        if told and after is not None:
            after()
        return made

    call.__name__, call.__doc__ = name, original.__doc__
    changes.set(owner, name, call)


def _wrap_cuda(recorder: Recorder, changes: ProcessChanges) -> None:
    """The methods of streams, events and tensors that order or wait."""
    stream, event, tensor = torch.cuda.Stream, torch.cuda.Event, torch.Tensor

    records = lambda self, stream=None: recorder.event_recorded(id(self), stream)  # noqa: E731
    _wrap(changes, event, "record", records)
    waits = lambda self, stream=None: recorder.event_waited(id(self), stream)  # noqa: E731
    _wrap(changes, event, "wait", waits, recorder.wait_issued)
    resumed = recorder.host_resumed
    _wrap(changes, event, "synchronize", lambda self: recorder.host_waited("event"), resumed)
    _wrap(changes, stream, "synchronize", lambda self: recorder.host_waited("stream"), resumed)
    for name in _READS:
        _wrap(changes, tensor, name, _read(recorder, name), resumed)
    _wrap_functions(recorder, changes)


def _wrap_functions(recorder: Recorder, changes: ProcessChanges) -> None:
    synchronize, set_stream = torch.cuda.synchronize, torch.cuda.set_stream

    def synchronized(device: Any = None) -> None:
        told = recorder.host_waited("device")
        synchronize(device)
        if told:
            recorder.host_resumed()

    def switched(stream: Any) -> None:
        if stream is None:  # torch does nothing then
            return
        # a segment that began on one stream and ended on another would be the time between streams
        recorder.cut(lambda: set_stream(stream))

    changes.set(torch.cuda, "synchronize", synchronized)
    changes.set(torch.cuda, "set_stream", switched)


def _read(recorder: Recorder, name: str) -> Callable[..., bool]:
    def before(self: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        return self.is_cuda and recorder.host_waited(name.strip("_"))

    return before
