"""From where on can the device run through a segment without waiting for the host?

Kernels are launched one after the other, small ones often first: a device that has caught up with
its host waits again within the segment, for its k-th kernel, say.  The segment then ends when the
host has come to that launch (L) and the rest has run (R), whatever the device did before, so for
one stream

    end = max(free + ns, begin + max over kernels (L + R))

where the device is free at ``free``, takes ``ns`` without a pause, and the host comes at ``begin``.
A slice keeps the last maximum less ``ns``: the host's lead.  With kernels of several streams it is
an estimate.  In : a traced iteration.  Out: ns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatron_prism.runtime.recorder.kernel_times import limits_of, read

if TYPE_CHECKING:
    from megatron_prism.runtime.recorder.kernel_times import Trace

__all__ = ["Launches", "launches"]

# matrix products and attention: they need little of the memory's rate
_PRODUCTS = re.compile(
    r"^(?!.*(splitkreduce|swizzle_|preprocess|dot_do_o))"
    r".*(gemm|nvjet|cutlass|cublas|xmma|wgmma|bmm|triton_tem|sdpa|fmha|flash)",
    re.IGNORECASE | re.DOTALL,
)
_ROOM_NS = 100_000  # a launch that takes longer waits for room in the queue


@dataclass(frozen=True)
class Launches:
    """The kernels of a traced iteration, by segment, in order of their launch.

    segment : int64 [kernels]
    after   : int64 [kernels], ns of the host from the segment's begin to the launch
    before  : int64 [kernels], ns that the segment's kernels before it take
    length  : int64 [segments], ns of the host; like ``after`` without waits for room in the queue
    busy    : int64 [segments], ns that its kernels take
    products: int64 [segments], of these the ns of matrix products and attention
    """

    segment: np.ndarray
    after: np.ndarray
    before: np.ndarray
    length: np.ndarray
    busy: np.ndarray
    products: np.ndarray

    def leads(self, own: np.ndarray, host: np.ndarray, ns: np.ndarray) -> np.ndarray:
        """float64 [segments]: L + R - ns on a host that takes ``host`` ns for each, and on a device
        that takes ``ns``; 0 where there is no kernel.  ``own``: the tracing's part at its begin."""
        at = self.segment
        place = (self.after - own[at]) / np.maximum(1, self.length - own)[at]
        come = np.clip(place, 0, 1) * host[at]
        done = self.before / np.maximum(1, self.busy)[at] * ns[at]
        found = np.zeros(len(self.length))
        np.maximum.at(found, at, come - done)
        return found

    def waits(self, own: np.ndarray, host: np.ndarray, behind: np.ndarray) -> np.ndarray:
        """float64 [segments]: for how long the device waits for its host within each, if the host
        takes ``host`` ns for it and the device comes to it ``behind`` ns after the host."""
        return np.maximum(self.leads(own, host, self.busy) - behind, 0)


def launches(trace: Trace, bounds: Sequence[tuple[int, int]]) -> Launches:
    """Of a trace as Kineto exports it; ``bounds``: the host's clock around each segment, as in
    ``busy.busy_ns``."""
    begun, kernels = read(trace)
    limits = limits_of(trace, bounds)
    # (when, for how long) the host waited for room
    waits = sorted((one.at, one.took) for one in begun.values()
                   if "Launch" in one.name and one.took > _ROOM_NS)  # fmt: skip
    when = np.array([at for at, _ in waits], dtype=np.int64)
    waited = np.concatenate(([0], np.cumsum([took for _, took in waits]))).astype(np.int64)

    def host(times: np.ndarray) -> np.ndarray:
        """Those times on a clock that stands still while the host waits for room."""
        moved: np.ndarray = times - waited[np.searchsorted(when, times)]
        return moved

    rows = sorted(
        (begun[k.correlation].at, k.end - k.begin, _PRODUCTS.match(k.name) is not None)
        for k in kernels
        if k.correlation in begun
    )
    launched, takes, product = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    segment = np.searchsorted(limits[:, 0], launched, side="right") - 1
    inside = segment >= 0
    inside[inside] = launched[inside] < limits[segment[inside], 1]
    launched, takes, segment = launched[inside], takes[inside], segment[inside]
    busy, products = np.zeros((2, len(limits)), dtype=np.int64)
    np.add.at(busy, segment, takes)
    np.add.at(products, segment, takes * product[inside])
    so_far = np.cumsum(takes) - takes
    first = np.concatenate(([0], np.cumsum(busy)))[:-1]
    begins, ends = host(limits[:, 0]), host(limits[:, 1])
    after, before = host(launched) - begins[segment], so_far - first[segment]
    return Launches(segment, after, before, ends - begins, busy, products)
