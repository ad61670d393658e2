"""What does the caller of a collective get back?  A handle that says: done.

``async_op=True``, ``isend`` and ``irecv`` return one; so does every method of a process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed as dist

__all__ = ["Done"]


class Done(dist.Work):
    """The handle of a finished call: an answer is complete when its method returns.

    torch's FakeWork says that it is never completed, has no result and no source.
    """

    def __init__(self, outs: Sequence[torch.Tensor] = (), source: int = -1) -> None:
        super().__init__()
        self._outs, self._source = outs, source

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def synchronize(self) -> None:
        """The answer was given in the caller's stream."""

    block_current_stream = synchronize

    def result(self) -> list[torch.Tensor]:
        return list(self._outs)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        devices = [self._outs[0].device] if self._outs and self._outs[0].is_cuda else []
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=devices)
        future.set_result(list(self._outs))
        return future

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank
