"""How do paced calls follow each other on the device?  Streams and events as raw handles.

A stream is an int here, as the driver has it; ``Streams`` asks torch only which one is current.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from megatron_prism.core.errors import PrismError
from megatron_prism.runtime.pacing.driver import NOT_READY, Driver

__all__ = ["End", "Streams"]


class Streams:
    """The streams of one device."""

    def __init__(self, driver: Driver, device: torch.device) -> None:
        self.driver = driver
        self.free: list[int] = []  # events that nobody holds any more
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self._ours: dict[int, torch.cuda.Stream] = {}
        self._raw = torch._C._cuda_getCurrentRawStream
        self.capturing = torch.cuda.is_current_stream_capturing

    def current(self) -> int:
        """torch's current stream."""
        return self._raw(self._index)

    def make(self) -> tuple[int, int]:
        """(a new stream, an event to follow others with)."""
        stream = torch.cuda.Stream(self._index)
        self._ours[stream.cuda_stream] = stream
        return stream.cuda_stream, self.driver.event()

    def follow(self, stream: int, other: int, event: int) -> None:
        """``stream`` goes on behind what ``other`` holds now."""
        status = self.driver.record(event, other) or self.driver.wait(stream, event, 0)
        if status:
            raise PrismError(f"the CUDA driver refused to order two streams (status {status})")

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """``stream``, one of ``make``, is the current one inside."""
        with torch.cuda.stream(self._ours[stream]):
            yield

    def synchronize(self, stream: int) -> None:
        """The host waits for everything on ``stream``."""
        self.driver.synchronize(stream)


class End:
    """When what is on ``stream`` now ends: an event that is used again once nobody holds this."""

    __slots__ = ("_streams", "handle")

    def __init__(self, streams: Streams, stream: int) -> None:
        self._streams = streams
        self.handle = streams.free.pop() if streams.free else streams.driver.event()
        if status := streams.driver.record(self.handle, stream):
            raise PrismError(f"the CUDA driver refused an event (status {status})")

    def __del__(self) -> None:
        # what waits for it already does not see the next recording
        self._streams.free.append(self.handle)

    def wait(self) -> None:
        """The current stream goes on when that has ended."""
        streams = self._streams
        if status := streams.driver.wait(streams.current(), self.handle, 0):
            raise PrismError(f"the CUDA driver refused to wait (status {status})")

    def query(self) -> bool:
        """Whether it has ended."""
        status = self._streams.driver.query(self.handle)
        if status not in (0, NOT_READY):
            raise PrismError(f"the CUDA driver refused to look at an event (status {status})")
        return bool(status == 0)
