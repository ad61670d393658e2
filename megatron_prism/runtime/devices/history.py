"""What did the caching allocator hear since the process began?  For the bytes that it reserves.

Segments keep the shape of what was asked for first: the model, the first iteration without the
optimizer's states, those states.  So a capture on tier ``meta`` keeps every request, the places
where the job empties the cache or waits for the device, and which storages another stream uses
when they are freed: torch gives those back only once the device is past that use.  One such use is
in every job that adds gradients up itself: DDP is made on a stream of its own, so autograd runs its
hooks there, and tells the allocator (torch/csrc/autograd/input_buffer.cpp, record_stream).

Out: int64 rows (storage, bytes, stream, kernels launched before it); ``EMPTIED`` and ``WAITED`` are
rows without a storage, and a row of 0 bytes says that the stream uses the storage.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np

from megatron_prism.core.ops import EMPTIED, WAITED

__all__ = ["History"]


class History:
    """Rows as they come; ``stream`` says which one is current (0: the default).

    launches : kernels so far, which the tracker counts
    """

    def __init__(self, stream: Callable[[], int]) -> None:
        self._stream = stream
        self._rows = array("q")
        self.launches = 0
        self._beside: dict[int, int] = {}  # storage -> its stream, of those not on the default one

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

    def rows(self) -> np.ndarray:
        """int64 [n, 4]: all of it so far."""
        return np.array(self._rows, dtype=np.int64).reshape(-1, 4)
