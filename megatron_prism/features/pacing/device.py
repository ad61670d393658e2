"""Hold a device's streams until a virtual peer would have answered, with one kernel a call.

``release`` is the call: it ends when the table says (``kernels.cu``).  A call that several of
torch's kernels answer is preceded by ``arrive``, which writes down when its turn has come.  Nothing
here synchronises with the host.

NVRTC through ``torch.cuda._compile_kernel``, so there is no build step; launches go straight to the
driver, because torch's own wrapper builds its arguments anew each time.  Tables are outside torch's
allocator, so that a peak measured here is the job's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron_prism.core.errors import PrismError
from megatron_prism.features.pacing.moves import ADDED
from megatron_prism.features.pacing.shared_memory import Shared, seats
from megatron_prism.runtime.cuda_driver import NOT_READY, Driver

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike, DTypeLike

    from megatron_prism.features.pacing.answer_times import AnswerTimes
    from megatron_prism.features.pacing.moves import Move


class Streams:
    """The streams of one device."""

    def __init__(self, driver: Driver, device: torch.device) -> None:
        self.driver = driver
        self.free: list[int] = []  # events that nobody holds any more
        index = device.index
        if index is None:
            index = torch.cuda.current_device()
        self._index: int = index
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

    def follow(self, stream: int, leader: int, event: int) -> None:
        """``stream`` goes on behind what ``leader`` holds now."""
        status = self.driver.record(event, leader) or self.driver.wait(stream, event, 0)
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


class StreamEnd:
    """When what is on ``stream`` now ends: an event that is used again once nobody holds this."""

    __slots__ = ("_streams", "handle")

    def __init__(self, streams: Streams, stream: int) -> None:
        self._streams = streams
        if streams.free:
            self.handle = streams.free.pop()
        else:
            self.handle = streams.driver.event()
        status = streams.driver.record(self.handle, stream)
        if status:
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


_TIMEOUT_NS, _PATIENCE_NS = 60_000_000_000, 5_000_000_000
# What a block of NCCL holds (profiler, NCCL 2.28.9 on H200): no block of a matrix product fits
# beside it on its SM.
_SHARED_BYTES = 103_808
_THREADS = 512  # NCCL has 544 to 640; powers of 2 move whole tiles
_FEW = 32  # where nothing is moved

_CALL = struct.Struct("PPPqqPqiiiiii")  # struct Call of the kernel
_CONFIG = struct.Struct("7IxxxxPPIxxxx")  # CUlaunchConfig
_PING = struct.Struct("PPiiii")  # struct Ping
_TRIES = 20  # launches on an idle stream; the quickest counts
_ROUNDS = 64  # round trips of a measurement; the quickest counts
_NOTHING = (0, 0, 0, 0, 0, 1, 0, 0)
_ALIGN = 256


class Launcher:
    """The table of releases on the device, and the launches of the kernel.

    table    : a ``replay.answer_times.AnswerTimes``
    launches : per launch the interactions that it ends
    shared   : where the local ranks tell each other; None if there is one
    """

    def __init__(
        self,
        table: AnswerTimes,
        launches: list[list[int]],
        device: torch.device,
        shared: Shared | None = None,
    ) -> None:
        torch.cuda.synchronize(device)  # the driver's calls want torch's context
        self.device, self.launches, self.shared = device, launches, shared
        self.driver = Driver()
        # a process alone keeps what several would share in its device's memory
        mapped, process = {}, 0
        if shared is not None:
            mapped, process = shared.map(self.driver.map_host), shared.process
        self._put(_columns(table, launches, process), mapped)
        source = cuda_source(_TIMEOUT_NS, _PATIENCE_NS)
        kernel = torch.cuda._compile_kernel(source, "prism_call")
        properties = torch.cuda.get_device_properties(device)
        block_bytes = getattr(properties, "shared_memory_per_block_optin", 49_152)
        # more shared memory than the device lends is refused
        self._shared = min(_SHARED_BYTES, block_bytes)
        kernel.set_shared_memory_config(self._shared)
        self._prepare(kernel.func)
        if shared is not None:
            self._area = mapped["area"]
            self._ping = torch.cuda._compile_kernel(source, "prism_ping")
            self._beside = torch.cuda.Stream(device)

    def _put(self, columns: dict[str, np.ndarray], mapped: dict[str, int]) -> None:
        """All arrays in one piece of device memory, the struct of their addresses at its end."""
        places, size = {}, 0
        for name, array in columns.items():
            places[name] = size
            size += -(-max(1, array.nbytes) // _ALIGN) * _ALIGN
        base = self.driver.allocate(size + _ALIGN)
        self._arrays = {name: (base + places[name], array) for name, array in columns.items()}
        for address, array in self._arrays.values():
            if array.nbytes:
                self.driver.write(address, array)
        # sizes that the kernel reads beside the addresses
        counts = len(columns["own"]), len(self.launches), columns["here"].shape[1], bool(mapped)
        own = {name: address for name, (address, _) in self._arrays.items()}
        own |= {name: mapped[name] for name in SHARED if mapped}
        addresses = [own[name] for name in TABLE]
        packed = np.frombuffer(struct.pack(f"{len(TABLE)}P4i", *addresses, *counts), np.uint8)
        self._table = base + size
        self.driver.write(self._table, packed)

    def _prepare(self, function: int) -> None:
        """Arguments that are written in place: the driver copies them at every launch."""
        self._function = function
        self._call = ctypes.create_string_buffer(_CALL.size)
        self._config = ctypes.create_string_buffer(_CONFIG.size)
        self._args = (ctypes.c_void_p * 1)(ctypes.addressof(self._call))
        self._at = ctypes.addressof(self._config)

    def arrive(self, stream: int, launch: int, iteration: int, kind: int = -1) -> None:
        """Write down, on ``stream``, when the turn of ``launch`` has come."""
        _CALL.pack_into(
            self._call, 0, self._table, *_NOTHING[:3], 0, 0, 0, launch, iteration, 0, 0, kind, 1
        )
        _CONFIG.pack_into(self._config, 0, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0)
        if status := self.driver.launch(self._at, self._function, self._args, None):
            raise PrismError(f"the CUDA driver refused a pacing kernel (status {status})")

    def release(
        self,
        stream: int,
        launch: int,
        iteration: int,
        first: int,
        fresh: bool,
        blocks: int,
        move: Move | None = None,
    ) -> None:
        """Hold ``stream`` until ``launch`` ends; ``fresh``: there was no ``arrive``.

        ``first`` is the first iteration whose ends are known; ``move`` what the call moves.
        """
        if move is None:
            to, source, size, period, kind, scale, read, seen = _NOTHING
        else:
            to, source, size, period, kind, scale, read, seen, _, _ = move
        _CALL.pack_into(
            self._call,
            0,
            self._table,
            to,
            source,
            size,
            period,
            read,
            seen,
            launch,
            iteration,
            first,
            fresh,
            kind,
            scale,
        )
        # nothing to move: few threads watch the clock
        threads = _THREADS if size or seen else _FEW
        _CONFIG.pack_into(self._config, 0, blocks, 1, 1, threads, 1, 1, self._shared, stream, 0, 0)
        if status := self.driver.launch(self._at, self._function, self._args, None):
            raise PrismError(f"the CUDA driver refused a pacing kernel (status {status})")

    def compare_clocks(self, iteration: int) -> None:
        """Measure how far this device's clock is from that of the first local rank's device.

        On a stream of its own: nothing waits for it but the measurement of the others.
        """
        shared = self.shared
        if shared is None:
            return
        words = _PING.pack(
            self._table, self._area, shared.process, shared.processes, iteration + 1, _ROUNDS
        )
        held = ctypes.create_string_buffer(words, len(words))
        args = (ctypes.c_void_p * 1)(ctypes.addressof(held))
        config = _CONFIG.pack(1, 1, 1, 1, 1, 1, 0, self._beside.cuda_stream, 0, 0)
        if status := self.driver.launch(config, self._ping.func, args, None):
            raise PrismError(f"the CUDA driver refused a pacing kernel (status {status})")

    def meet(self) -> None:
        """Compare clocks for the first time; PrismError if that fails."""
        if self.shared is None:
            return
        self.shared.meet("clocks")
        self.compare_clocks(0)
        if self.shared.process and not self.clock()["at"]:
            message = (
                f"local rank {self.shared.process} could not compare its GPU's clock within 5 s"
            )
            raise PrismError(message, fix="run each rank alone, without torchrun")

    def clock(self) -> dict[str, float]:
        """The last comparison of clocks: offset, at, round_trip in ns, and rate; waits for it.

        ``at`` is 0 if there was none: on the first local rank, whose clock is everybody's.
        """
        self._beside.synchronize()
        clocks, which = (np.empty_like(self._arrays[name][1]) for name in ("clocks", "clock"))
        self.driver.read(self._arrays["clocks"][0], clocks)
        self.driver.read(self._arrays["clock"][0], which)
        return dict(zip(clocks.dtype.names or (), clocks[which[0]].tolist(), strict=True))

    def lag(self) -> tuple[int, int]:
        """(the host's clock, ns from there to the device's when an idle one begins a launch).

        Overwrites the first stamp of the first launch; waits for the device.
        """
        torch.cuda.synchronize(self.device)
        stamp = np.zeros(1, np.int64)
        lags = []
        for _ in range(_TRIES):
            begin = time.perf_counter_ns()
            self.arrive(0, 0, 0, -2)
            self.driver.synchronize(0)
            self.driver.read(self._arrays["came"][0], stamp)
            lags.append((int(stamp[0]) - begin, begin))
        shortest_lag, begin = min(lags)
        return begin, shortest_lag

    def stamps(self) -> dict[str, np.ndarray]:
        """What the last RING iterations wrote down; waits for the device.

        end, tag [RING, interactions]; came, went, from, until [RING, launches]; stuck [1]
        """
        torch.cuda.synchronize(self.device)
        stamps: dict[str, np.ndarray] = {}
        for name in ("end", "tag", "came", "went", "from", "until", "stuck"):
            if self.shared is not None and name in SHARED:
                stamps[name] = self.shared.array(name)
                continue
            address, array = self._arrays[name]
            stamps[name] = np.empty_like(array)
            if array.nbytes:
                self.driver.read(address, stamps[name])
        return stamps


def _columns(table: AnswerTimes, launches: list[list[int]], process: int) -> dict[str, np.ndarray]:
    """What the kernel reads and writes, by the names of TABLE."""
    launch_sizes = [len(interactions) for interactions in launches]
    members = list(itertools.chain.from_iterable(launches))
    columns: dict[str, np.ndarray] = {
        "part": _contiguous(np.concatenate(([0], np.cumsum(launch_sizes))), np.int32),
        "member": _contiguous(members, np.int32),
        "own": _contiguous(table.own, np.int64),
        "start": _contiguous(table.start, np.int32),
        "cause": _contiguous(table.cause, np.int32),
        "back": _contiguous(table.back, np.int32),
        "weight": _contiguous(table.weight, np.int64),
    }
    columns["end"] = np.zeros((RING, len(table)), np.int64)
    columns["tag"] = np.zeros((RING, len(table)), np.int32)
    for name in ("came", "went", "from", "until"):
        columns[name] = np.zeros((RING, len(launches)), np.int64)
    columns["ready"] = np.zeros((RING, len(launches)), np.int32)
    columns |= seats(table, launches, process)
    columns["here"] = np.zeros((RING, len(table.of)), np.int64)
    columns["seen"] = np.zeros((RING, len(table.of)), np.int32)
    columns["clocks"] = np.zeros(2, CLOCK)
    for name in ("gone", "stuck", "clock"):
        columns[name] = np.zeros(1, np.int32)
    return columns


def _contiguous(values: ArrayLike, dtype: DTypeLike) -> np.ndarray:
    """An array as the kernel reads it."""
    return np.ascontiguousarray(values, dtype=dtype)


# -- CUDA source -------------------------------------------------------------------------------
# CUDA source of the two kernels that make a device wait until a virtual peer would have answered.
#
# ``prism_arrive`` writes down when a call's turn has come. ``prism_call`` is the call itself: it
# works out when the call ends, tells the calls after it, moves what the call moves while it runs,
# and holds its stream (and as many blocks as NCCL would) until the end. Times are of %globaltimer,
# ns (32 ns a tick on H200).
#
# A call waits from its arrival until its peers are there, then runs for its own time (``own``);
# what it moves is spread evenly over that time. ``own`` is what a call takes its stream, from the
# end of what was before it to the beginning of what comes next (``prism calibrate``), so it comes
# LAUNCH before its kernel begins to run. One warp of block 0 works the ends out, the other blocks
# wait for the last of them.
#
# Several local ranks share ``end``, ``tag``, ``here``, ``seen`` and ``gone``, which are then host
# memory that all their devices see, in the time of the first one's device. ``prism_ping`` measures
# how far this device's clock is from that one: the quickest of many round trips counts, and from
# the second measurement on the drift since the last is continued.


# ns that a kernel which holds a stream for a time takes beyond it, between others (H200: 1.8 to
# 2.1 us behind copies; a kernel that does nothing takes 2.2)
LAUNCH = 2_000
RING = 4  # iterations whose ends are remembered
# The fields of Table, in order: all addresses, but for the last two.
TABLE = (
    *("part", "member", "mine", "with", "whom", "own", "start", "cause", "back", "weight"),
    *("end", "tag", "here", "seen", "gone", "came", "went", "from", "until", "ready", "stuck"),
    *("clocks", "clock"),
)
SHARED = ("end", "tag", "here", "seen", "gone")

# struct Clock, as numpy has it.
CLOCK = [("offset", "<i8"), ("at", "<i8"), ("rate", "<f8"), ("round_trip", "<i8")]

# ns from the beginning of a tile until it is written: copied or rewritten (H200: .8 to 1.8 us), and
# added up (2, 4, 8 chunks of 4 MiB in all: .9, 1.3, 2.3 us; of 32 MiB: 1.8, 2.8, 4.4)
COPY_NS, SUM_NS, CHUNK_NS = 1_800, 1_200, 400


def cuda_source(timeout_ns: int, patience_ns: int) -> str:
    """Return the source for the CUDA compiler.

    Args:
        timeout_ns: after which a call that nobody joins gives up, ns.
        patience_ns: for which a call waits for other local ranks, ns.
    """
    limits = {
        "RING": f"{RING}",
        "TIMEOUT": f"{timeout_ns}LL",
        "LAUNCH": f"{LAUNCH}LL",
        "PATIENCE": f"{patience_ns}LL",
        "ADDED": f"{ADDED}",
        "COPY": f"{COPY_NS}LL",
        "SUM": f"{SUM_NS}LL",
        "CHUNK": f"{CHUNK_NS}LL",
    }
    macros = "".join(f"#define {name} {value}\n" for name, value in limits.items())
    return macros + Path(__file__).with_name("kernels.cu").read_text(encoding="utf-8")
