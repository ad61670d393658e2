"""What does the caller of a collective get back?  A handle that says: done.

``async_op=True``, ``isend`` and ``irecv`` return one; so does every method of a process group.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

if TYPE_CHECKING:
    from megatron_prism.runtime.pacing.streams import End

__all__ = ["Done"]

_unfinished: list[tuple[End, object]] = []  # (end, tensors) of calls whose handles are gone


class Done(dist.Work):
    """The handle of a call that needs nothing more from the host.

    An answer is complete when its method returns, or at ``after``'s event on another stream: then
    waiting makes the caller's stream wait.  torch's FakeWork says it is never completed, has no
    result and no source.
    """

    _end: End | None = None
    _held: object = None

    def __init__(self, outs: Sequence[torch.Tensor] = (), source: int = -1) -> None:
        super().__init__()
        self._outs, self._source = outs, source

    def after(self, end: End, held: object) -> Done:
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
        devices = [self._outs[0].device] if self._outs and self._outs[0].is_cuda else []
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=devices)
        future.set_result(list(self._outs))
        return future

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank
