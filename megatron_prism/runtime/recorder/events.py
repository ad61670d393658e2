"""Which streams, events and host waits does the job use?  Tells the recorder of each.

On a real device ``torch.cuda``'s classes are wrapped; on the other tiers the stand-ins report by
themselves (``cuda_stubs.watcher``).  ``install`` may be called once; ``remove``
puts everything back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_prism.runtime.devices import cuda_stubs
from megatron_prism.runtime.recorder.recorder import Recorder

__all__ = ["install", "remove"]

_undo: list[Callable[[], None]] = []
# reading a value on the host waits for the device
_READS = ("item", "tolist", "cpu", "__bool__", "__float__", "__int__", "numpy")


def install(recorder: Recorder) -> None:
    """Report to ``recorder`` until ``remove``."""
    remove()
    if recorder.tier == "cuda":
        _wrap_cuda(recorder)
    else:
        cuda_stubs.watcher = recorder


def remove() -> None:
    """Stop reporting."""
    cuda_stubs.watcher = None
    while _undo:
        _undo.pop()()


def _wrap(
    owner: Any, name: str, before: Callable[..., bool], after: Callable[[], None] | None = None
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
    setattr(owner, name, call)
    _undo.append(lambda: setattr(owner, name, original))


def _wrap_cuda(recorder: Recorder) -> None:
    """The methods of streams, events and tensors that order or wait."""
    stream, event, tensor = torch.cuda.Stream, torch.cuda.Event, torch.Tensor

    _wrap(event, "record", lambda self, stream=None: recorder.event_recorded(id(self), stream))
    waits = lambda self, stream=None: recorder.event_waited(id(self), stream)  # noqa: E731
    _wrap(event, "wait", waits, recorder.wait_issued)
    resumed = recorder.host_resumed
    _wrap(event, "synchronize", lambda self: recorder.host_waited("event"), resumed)
    _wrap(stream, "synchronize", lambda self: recorder.host_waited("stream"), resumed)
    for name in _READS:
        _wrap(tensor, name, _read(recorder, name), resumed)
    _wrap_functions(recorder)


def _wrap_functions(recorder: Recorder) -> None:
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

    torch.cuda.synchronize, torch.cuda.set_stream = synchronized, switched
    _undo.append(lambda: setattr(torch.cuda, "synchronize", synchronize))
    _undo.append(lambda: setattr(torch.cuda, "set_stream", set_stream))


def _read(recorder: Recorder, name: str) -> Callable[..., bool]:
    def before(self: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        return self.is_cuda and recorder.host_waited(name.strip("_"))

    return before
