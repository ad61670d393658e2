"""Times of a segment's kernels by themselves, read from a trace of one iteration.

CUDA events around a segment also count the moments in which the device waits for Python.  Kineto
(CUPTI) writes down when each kernel was launched and when it ran; a gap between two kernels that
the host did not keep up with is replaced by the gap that kernels have when it does.  Times in ns.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np

_DEVICE = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
_LAUNCH = frozenset(("cuda_runtime", "cuda_driver"))
# copies between GPUs, which keep links awake (emulate/capture/nvlink_keepalive.py): not the job's
_PEER_COPY = "PtoP"
_LAUNCH_NS = 3_000  # from a launch to the earliest start of its kernel
_IDLE_NS = 10_000  # within which a kernel starts if the device has nothing else to do
_GAP_NS = 1_000  # between two kernels, where no two of the trace tell
_STRANGE = 0.01  # of the kernels' time, of which nobody knows who launched it
_LATE = 0.05  # a segment that takes so much longer than its kernels waits for the host
_SURE = 0.01  # of a segment: what it may wait for the host so that its own time is its kernels'


class TraceEvent(TypedDict, total=False):
    """One of a trace; times in us."""

    cat: str
    name: str
    ts: float
    dur: float
    args: dict[str, object]


class Trace(TypedDict, total=False):
    """As Kineto exports it; ``baseTimeNanoseconds`` is a number, or one as text."""

    traceEvents: list[TraceEvent]
    baseTimeNanoseconds: int | str


class Tracer:
    """Kineto around one iteration, unless the job's own profiler runs: there can be one."""

    def __init__(self) -> None:
        import torch

        self._profile: torch.profiler.profile | None = None
        if not torch.autograd._profiler_enabled():
            activity = torch.profiler.ProfilerActivity.CUDA
            self._profile = torch.profiler.profile(activities=[activity])
            self._profile.start()

    def stop(self) -> Trace | None:
        """The trace; None, and a line that says so, if the device cannot be traced."""
        # only one profiler may run: the job's own was first
        if self._profile is None:
            sys.stderr.write("prism: the job's profiler runs, so segments keep the host's delays\n")
            return None
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            trace = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        # without kernels (no permission, say) the trace says nothing of segments
        if any(event.get("cat") == "kernel" for event in trace.get("traceEvents", ())):
            return trace
        sys.stderr.write("prism: no kernel was traced, so segments keep the host's delays\n")
        return None


class Launch(NamedTuple):
    """When the host called the runtime or driver, how long that took (ns), and what it called."""

    at: int
    took: int
    name: str


class KernelSpan(NamedTuple):
    """ns of the trace, what launched it, and its name."""

    begin: int
    end: int
    correlation: object
    name: str


def read(trace: Trace) -> tuple[dict[object, Launch], list[KernelSpan]]:
    """(launches by correlation, what the device did), as traced; words to neighbours left out."""
    launched, kernels = {}, []
    for event in trace["traceEvents"]:
        category, name = event.get("cat"), event.get("name", "")
        if category in _LAUNCH:
            begin, took = _ns(event["ts"]), _ns(event.get("dur", 0))
            correlation = event["args"].get("correlation")
            launched[correlation] = Launch(begin, took, name)
        # flags that GPUs write to their neighbours are no work
        elif category in _DEVICE and _PEER_COPY not in name:
            begin, took = _ns(event["ts"]), _ns(event["dur"])
            correlation = event["args"].get("correlation")
            kernels.append(KernelSpan(begin, begin + took, correlation, name))
    return launched, kernels


def limits_of(trace: Trace, bounds: Sequence[tuple[int, int]]) -> np.ndarray:
    """int64 [segments, 2]: ``bounds`` (the host's clock, ``time.time_ns``) in the trace's times."""
    base = int(trace.get("baseTimeNanoseconds", 0))
    return np.array(bounds, dtype=np.int64).reshape(-1, 2) - base


def busy_ns(trace: Trace, bounds: Sequence[tuple[int, int]]) -> np.ndarray:
    """int64 [3, segments]: what the host launched in each segment, back to back (-1: nothing, but
    the trace does not say who launched all kernels); how long it took the host until
    the first launch (as long as the segment where there is none); whether the device had nothing to
    do by then (1) or was behind (0).

    trace  : as Kineto exports it; bounds: the host's clock (``time.time_ns``) around each segment
    """
    launched, kernels = read(trace)
    kernels.sort(key=lambda kernel: (kernel.begin, kernel.end))
    limits = limits_of(trace, bounds)
    times = np.zeros((3, len(bounds)), dtype=np.int64)
    times[1] = limits[:, 1] - limits[:, 0]
    nothing = _ns_of_no_kernel(launched, kernels)
    rows = _rows(launched, kernels)
    if not rows.size or not bounds:
        times[0] = nothing
        return times

    # kernels in the order of their segments, and of their begin there
    segment = np.searchsorted(limits[:, 0], rows[:, 2], side="right") - 1
    inside = (segment >= 0) & (rows[:, 2] < limits[segment, 1])
    rows, segment = rows[inside], segment[inside]
    order = np.lexsort((rows[:, 0], segment))
    rows, segment = rows[order], segment[order]
    begin, end, launch = rows.T
    is_first = np.concatenate(([True], segment[1:] != segment[:-1]))

    # a gap counts as it is where the host was ahead, else as gaps usually are
    before = np.concatenate(([0], _reach(end, is_first)[:-1]))
    gap = np.where(is_first, 0, begin - before)
    timely = ~is_first & (launch + _LAUNCH_NS <= before) & (gap > 0)
    usual_gap = _GAP_NS
    if timely.any():
        usual_gap = int(np.median(gap[timely]))
    keeps_gap = timely | (gap <= 0)
    counted_gap = np.where(keeps_gap, np.maximum(gap, 0), np.minimum(gap, usual_gap))
    counted_gap[is_first] = usual_gap

    # of kernels of several streams at a time only the longest counts
    beyond_others = np.maximum(0, end - np.maximum(begin, before))
    added = np.where(is_first, end - begin, beyond_others)
    np.add.at(times[0], segment, counted_gap + added)
    num_kernels = np.bincount(segment, minlength=len(bounds))
    times[0, num_kernels == 0] = nothing
    np.minimum.at(times[1], segment, launch - limits[segment, 0])
    times[2, segment[is_first]] = begin[is_first] <= launch[is_first] + _IDLE_NS
    return times


def _rows(launched: dict[object, Launch], kernels: Sequence[KernelSpan]) -> np.ndarray:
    """int64 [kernels, 3]: begin, end and launch of those whose launch was traced."""
    rows = []
    for kernel in kernels:
        if kernel.correlation in launched:
            rows.append((kernel.begin, kernel.end, launched[kernel.correlation].at))
    return np.array(rows, dtype=np.int64)


def _ns_of_no_kernel(launched: dict[object, Launch], kernels: Sequence[KernelSpan]) -> int:
    """Say what a segment without kernels is: 0, or -1 where kernels have no known launch."""
    total_ns = strange_ns = 0
    for kernel in kernels:
        took = kernel.end - kernel.begin
        total_ns += took
        if kernel.correlation not in launched:
            strange_ns += took
    # most of the time belongs to known launches
    if total_ns and strange_ns <= _STRANGE * total_ns:
        return 0
    return -1


def _reach(end: np.ndarray, is_first: np.ndarray) -> np.ndarray:
    """Where the segment's kernels so far end; kernels of several streams may overlap."""
    reach = end.copy()
    for i in range(1, len(reach)):
        if not is_first[i] and reach[i - 1] > reach[i]:
            reach[i] = reach[i - 1]
    return reach


def device_ns(
    elapsed_ns: np.ndarray, traced: np.ndarray, waits: np.ndarray | None = None
) -> np.ndarray:
    """int64 [segments]: what each takes if the host is always ahead.

    elapsed_ns : [iterations, segments] between the CUDA events around each, where nothing was
                 traced
    traced : by ``busy_ns``
    waits  : [iterations, segments] of that, for which the device waited for its host; None: known
             of no segment but where an idle device waited for its first launch

    A segment that takes hardly longer than its kernels, and hardly waits, keeps its own time, which
    is that of the clocks of an undisturbed iteration; the kernels of the others are brought to
    those clocks.  (Behind a forward that takes its host as long, a backward of 46 ms begins with
    waits of 0.6 ms.)  A segment without kernels takes the device nothing: what passed between its
    events was the host's time, counted there.

    Of every segment the median counts.  Clocks dip for some ten milliseconds (a GPU at its power
    limit): no segment's median has that, but every iteration has, so all are brought to the median
    of what those that keep up take together.
    """
    busy, median_ns = traced[0], np.median(elapsed_ns, axis=0)
    # waits are not known, but for the first launch of an idle device
    if waits is None:
        first_wait = np.minimum(traced[1], _LATE * median_ns)
        own_ns = median_ns - np.where(traced[2] > 0, first_wait, 0)
        hardly_waits = np.ones(len(busy), dtype=bool)
        usual_ns = median_ns
    # waits are known, and leave each iteration
    else:
        elapsed_ns = np.maximum(elapsed_ns - waits, 0)
        hardly_waits = np.median(waits, axis=0) <= _SURE * median_ns
        own_ns = np.where(busy < 0, median_ns, np.median(elapsed_ns, axis=0))
        usual_ns = own_ns
    keeps_up = hardly_waits & (busy > 0) & (own_ns <= (1 + _LATE) * busy + _GAP_NS)

    # what keeps up says how clocks are beside those of the traced iteration, if it is enough
    clock_ratio = dips = 1.0
    if own_ns[keeps_up].sum() > _LATE * own_ns.sum():
        clock_ratio = own_ns[keeps_up].sum() / busy[keeps_up].sum()
        together_ns = elapsed_ns[:, keeps_up].sum(axis=1)
        dips = np.median(together_ns) / usual_ns[keeps_up].sum()
    # at the clocks of an undisturbed iteration, kernels take no longer than their segment
    kernels_ns = np.minimum(median_ns, busy * clock_ratio)
    ns = np.where(keeps_up | (busy < 0), own_ns, kernels_ns)
    return np.rint(ns * dips).astype(np.int64)


def _ns(microseconds: float) -> int:
    """Whole ns of one of the trace's times."""
    return round(float(microseconds) * 1000)


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
        that takes ``ns``; 0 where there is no kernel.  ``own``: the tracing's part at its begin.
        """
        segment = self.segment
        without_own = np.maximum(1, self.length - own)
        place = (self.after - own[segment]) / without_own[segment]
        launched_ns = np.clip(place, 0, 1) * host[segment]
        done_share = self.before / np.maximum(1, self.busy)[segment]
        leads = np.zeros(len(self.length))
        np.maximum.at(leads, segment, launched_ns - done_share * ns[segment])
        return leads

    def waits(self, own: np.ndarray, host: np.ndarray, behind: np.ndarray) -> np.ndarray:
        """float64 [segments]: for how long the device waits for its host within each, if the host
        takes ``host`` ns for it and the device comes to it ``behind`` ns after the host.
        """
        return np.maximum(self.leads(own, host, self.busy) - behind, 0)


def launches(trace: Trace, bounds: Sequence[tuple[int, int]]) -> Launches:
    """Of a trace as Kineto exports it; ``bounds``: the host's clock around each segment, as in
    ``busy_ns``.
    """
    begun, kernels = read(trace)
    limits = limits_of(trace, bounds)
    # (when, for how long) the host waited for room
    waits = []
    for launch in begun.values():
        if "Launch" in launch.name and launch.took > _ROOM_NS:
            waits.append((launch.at, launch.took))
    waits.sort()
    wait_begins = np.array([begin for begin, _ in waits], dtype=np.int64)
    waited = np.concatenate(([0], np.cumsum([took for _, took in waits]))).astype(np.int64)

    def host(times: np.ndarray) -> np.ndarray:
        """Return times on a clock that stands still while the host waits for room."""
        moved: np.ndarray = times - waited[np.searchsorted(wait_begins, times)]
        return moved

    # a row a kernel: when it was launched, how long it took, whether it is a matrix product
    rows = []
    for kernel in kernels:
        if kernel.correlation in begun:
            took, is_product = kernel.end - kernel.begin, _PRODUCTS.match(kernel.name) is not None
            rows.append((begun[kernel.correlation].at, took, is_product))
    rows.sort()
    launched, takes, product = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    # kernels that were launched between two segments belong to none
    segment = np.searchsorted(limits[:, 0], launched, side="right") - 1
    inside = segment >= 0
    inside[inside] = launched[inside] < limits[segment[inside], 1]
    launched, takes, segment = launched[inside], takes[inside], segment[inside]
    busy, products = np.zeros((2, len(limits)), dtype=np.int64)
    np.add.at(busy, segment, takes)
    np.add.at(products, segment, takes * product[inside])
    # the device's work ahead of each kernel: of the whole trace, then of its segment
    so_far = np.cumsum(takes) - takes
    first = np.concatenate(([0], np.cumsum(busy)))[:-1]
    begins, ends = host(limits[:, 0]), host(limits[:, 1])
    after, before = host(launched) - begins[segment], so_far - first[segment]
    return Launches(segment, after, before, ends - begins, busy, products)
