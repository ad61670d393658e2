"""Real device memory of a local rank: snapshots, peaks by phase, NCCL's memory held in reserve.

Peaks of allocated bytes per iteration and phase (forward, backward, optimizer, and what is between
them), and torch's own snapshot of the iterations from the second on, which memory_viz
(https://pytorch.org/memory_viz) reads.  For the peaks torch's peak counters are reset at every
phase, so the maxima in Megatron's own log are those since the last phase.  After an out-of-memory
the snapshot is written, too.  ``explain`` turns that into an error that names rank, phase and line.
"""

from __future__ import annotations

import contextlib
import ctypes
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import torch

from megatron_prism.core.errors import NotTrainedError, UsageError
from megatron_prism.core.files import whole_file
from megatron_prism.memory import nccl_buffers
from megatron_prism.memory.nccl_buffers import BufferCalibration, Communicator
from megatron_prism.runtime.listeners import TrainingListener
from megatron_prism.runtime.recorder.owners import CallSites
from megatron_prism.runtime.virtual_world import TrafficCounter

if TYPE_CHECKING:
    from megatron_prism.emulate.command_line.options import Options


def take_device_memory(num_bytes: int) -> None:
    """Hold ``num_bytes`` until the process ends.  torch.OutOfMemoryError if they are not there.

    The driver's own call: what torch's allocator hands out would count as allocated.
    """
    pointer = ctypes.c_uint64()
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
    if status == 2:  # CUDA_ERROR_OUT_OF_MEMORY
        raise torch.OutOfMemoryError(f"{num_bytes:,} B for NCCL (NCCL reserve) are not there")
    if status:
        raise RuntimeError(f"cuMemAlloc of {num_bytes:,} B of NCCL reserve: driver error {status}")


class NcclReserve(TrafficCounter):
    """A tally that takes memory as communicators would.

    take : called with bytes to hold; raises torch.OutOfMemoryError
    held : bytes taken until now
    """

    def __init__(
        self, calibration: BufferCalibration, take: Callable[[int], None] = take_device_memory
    ) -> None:
        super().__init__()
        self.held = 0
        self._calibration, self._take = calibration, take
        self._seen: set[tuple[str, str, bool, int, bool]] = set()
        self._used = nccl_buffers.ConnectedCommunicators()

    def add(self, group: str, group_size: int, op: str, num_bytes: int, distance: int = 0) -> None:
        """Count a call, and take what it connects."""
        key = (group, op, num_bytes <= nccl_buffers.SMALL, distance, self.batched)
        if key not in self._seen:
            self._seen.add(key)
            if not group.endswith(nccl_buffers.ON_HOST):
                self._connect(group, group_size, op, num_bytes, distance)
        super().add(group, group_size, op, num_bytes, distance)

    def _connect(self, group: str, size: int, op: str, num_bytes: int, distance: int) -> None:
        first = not self._used.all()
        before, now = self._used.add(group, size, op, num_bytes, distance, self.batched)
        bytes_before = 0 if before is None else self._calibration.bytes_of(before)
        wanted = self._calibration.bytes_of(now)
        if wanted is None or bytes_before is None:
            message = f"the calibration does not know {op} among {size} ranks of {group}"
            fix = "measure it: python -m benchmarks.tools.device_memory -o FILE.json"
            raise UsageError(message, fix=fix)
        # the first communicator also brings what NCCL takes once
        added_bytes = wanted - bytes_before + (self._calibration.once if first else 0)
        if added_bytes > 0:
            self._take(added_bytes)
            self.held += added_bytes


def connected_by(tally: TrafficCounter) -> tuple[Communicator, ...]:
    """The communicators that the calls of a job have connected, as ``TrafficCounter`` saw them."""
    used = nccl_buffers.ConnectedCommunicators()
    for group, size, op, num_bytes in tally.sizes():
        if op not in ("send", "recv") and not group.endswith(nccl_buffers.ON_HOST):
            used.add(group, size, op, num_bytes)
    for group, size, op, distance, batched in tally.ways():
        used.add(group, size, op, 0, distance, batched)
    return used.all()


def add_to(run: Any, session: object) -> None:  # a Run, whose module imports this one
    """Hold an NCCL reserve, and watch the allocator, as ``run.options`` ask."""
    held = run.tally = reserve_from_options(run.options)
    if held is not None:
        run.monitor.held = lambda: held.held
    run.memory = watch_from_options(run.options)
    if run.memory is not None:
        run.follow_training(run.memory)
        run.places.append(run.memory.path.with_suffix(""))


def reserve_from_options(options: Options) -> NcclReserve | None:
    """The NCCL reserve that ``options`` ask for.  UsageError where it would say nothing."""
    if options.reserve_nccl is None:
        return None
    if options.tier != "cuda":
        message = f"--prism-reserve-nccl holds device memory, and tier {options.tier} has none"
        raise UsageError(message, fix="drop it, or use --prism-tier cuda")
    if options.num_processes > 1:
        message = (
            "--prism-reserve-nccl takes one local rank: several have communicators of their own"
        )
        raise UsageError(message, fix="run each rank alone")
    calibration = nccl_buffers.read(options.reserve_nccl)
    if not calibration.measured:
        message = f"the calibration {options.reserve_nccl} has no communicators: nothing to hold"
        fix = "measure them: python -m benchmarks.tools.device_memory -o FILE.json"
        raise UsageError(message, fix=fix)
    return NcclReserve(calibration)


_ENTRIES = 1_000_000  # of torch's history; older ones go first


class MemoryWatch(TrainingListener):
    """Follows one rank's memory.

    path       : where the snapshot goes
    iterations : phase -> peak of allocated bytes, of every train step
    parts      : part of the job (``part``) -> the same over all of it
    allocated, reserved : peaks of the whole run, which resetting would lose
    cuda       : torch.cuda, or what tests put in its place
    """

    def __init__(self, path: Path, force: bool = False, cuda: ModuleType = torch.cuda) -> None:
        self.path, self.force, self.cuda = path, force, cuda
        self.iterations: list[dict[str, int]] = []
        self.parts: dict[str, int] = {}
        self._inside: list[str] = []  # parts that run now, the innermost last
        self.allocated = self.reserved = 0

    def iteration_started(
        self, number: int, wanted: int, model: object = None, optimizer: object = None
    ) -> None:
        """Train step ``number`` (from 1) of ``wanted`` starts."""
        self._note("between")
        self.iterations.append({})
        if number == min(2, wanted or 1):  # the first one allocates what the others keep
            self.cuda.memory._record_memory_history(max_entries=_ENTRIES, stacks="python")

    @contextlib.contextmanager
    def scope(self, phase: str = "", **labels: object) -> Iterator[None]:
        """What runs inside belongs to ``phase``."""
        self._note("between")
        try:
            yield
        finally:
            self._note(phase)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What runs inside is this part of the job (an iteration, the optimizer step in it)."""
        self._note("between")
        self._inside.append(name)
        try:
            yield
        finally:
            self._note("between")
            self._inside.pop()

    def _note(self, phase: str) -> None:
        allocated = self.cuda.max_memory_allocated()
        self.allocated = max(self.allocated, allocated)
        self.reserved = max(self.reserved, self.cuda.max_memory_reserved())
        self.cuda.reset_peak_memory_stats()
        # parts of the process's life that are on now
        for name in self._inside:
            self.parts[name] = max(self.parts.get(name, 0), allocated)
        if self.iterations and (self._steps() or not self._inside):
            last = self.iterations[-1]
            last[phase] = max(last.get(phase, 0), allocated)

    def _steps(self) -> bool:
        """Whether a train step runs."""
        return any("iteration" in name for name in self._inside)

    def out_of_memory(self) -> None:
        """What is alive now is what the snapshot is for."""
        self.finished()

    def finished(self) -> None:
        """Write the snapshot."""
        self._note("between")
        with whole_file(self.path, force=self.force) as file:
            pickle.dump(self.cuda.memory._snapshot(), file)


def watch_from_options(options: Options) -> MemoryWatch | None:
    """The watch that ``options`` ask for.  UsageError off the device, or if the place is taken."""
    if options.memory is None:
        return None
    if options.tier != "cuda":
        message = (
            f"--prism-memory-snapshot is of a real allocator, and tier {options.tier} has none"
        )
        fix = "--prism-capture DIR and prism fit DIR, or --prism-tier cuda"
        raise UsageError(message, fix=fix)
    path = options.memory / f"rank-{options.rank:06d}.pickle"
    if path.exists() and not options.force:
        message = f"--prism-memory-snapshot: {path} exists and is not overwritten"
        raise UsageError(message, fix="--prism-force, or another folder")
    return MemoryWatch(path, options.force)


def explain(
    error: BaseException, who: str, labels: Mapping[str, object], held: int = 0
) -> Exception:
    """An out-of-memory as the rank's own: who, in which step, at which line of Megatron.

    held : bytes held in reserve that the process holds for communicators
    """
    step = ", ".join(f"{key} {value}" for key, value in labels.items() if value is not None)
    site = _site(error.__traceback__)
    where = f" in {step or 'no phase'}{f', at {site}' if site else ''}"
    lines = [f"{who} ran out of device memory{where}", f"  {str(error).splitlines()[0]}"]
    # a part of the memory was held for virtual ranks
    if held:
        lines.append(f"  {held:,} B of it are held for the large job's communicators")
    return NotTrainedError(
        "\n".join(lines),
        fix="prism fit DIR of a capture shows what is alive there; recompute, a smaller "
        "micro batch or another layout of layers make room",
    )


def _site(trace: TracebackType | None) -> str:
    """The innermost line of Megatron or TE that the error came through."""
    sites, innermost = CallSites(), ""
    while trace is not None:
        innermost = sites.place(trace.tb_frame.f_code.co_filename, trace.tb_lineno) or innermost
        trace = trace.tb_next
    return innermost
