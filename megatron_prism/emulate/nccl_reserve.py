"""What if the large job's communicators took their memory here?  ``--prism-ballast``.

A virtual group makes no NCCL communicator, so a rank alone has room that the real one lacks.  This
tally sees every call; when a group is first used in a new way, it takes as much device memory as
the calibration says NCCL would take then (``costs.communicators``), outside torch's allocator, as
NCCL does.  Where that fails, the rank runs out of memory at the op where the real one would.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from megatron_prism.core.errors import UsageError
from megatron_prism.memory import communicators, connected
from megatron_prism.memory.communicators import Calibration, Communicator
from megatron_prism.runtime.traffic import Tally

if TYPE_CHECKING:
    from megatron_prism.emulate.options import Options

__all__ = ["Ballast", "connected_by", "from_options", "take_device_memory"]


def take_device_memory(num_bytes: int) -> None:
    """Hold ``num_bytes`` until the process ends.  torch.OutOfMemoryError if they are not there.

    The driver's own call: what torch's allocator hands out would count as allocated.
    """
    pointer = ctypes.c_uint64()
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
    if status == 2:  # CUDA_ERROR_OUT_OF_MEMORY
        raise torch.OutOfMemoryError(f"{num_bytes:,} B for NCCL (ballast) are not there")
    if status:
        raise RuntimeError(f"cuMemAlloc of {num_bytes:,} B of ballast: driver error {status}")


class Ballast(Tally):
    """A tally that takes memory as communicators would.

    take : called with bytes to hold; raises torch.OutOfMemoryError
    held : bytes taken until now
    """

    def __init__(
        self, calibration: Calibration, take: Callable[[int], None] = take_device_memory
    ) -> None:
        super().__init__()
        self.held = 0
        self._calibration, self._take = calibration, take
        self._seen: set[tuple[str, str, bool, int, bool]] = set()
        self._used = connected.Used()

    def add(self, group: str, group_size: int, op: str, num_bytes: int, distance: int = 0) -> None:
        """Count a call, and take what it connects."""
        key = (group, op, num_bytes <= connected.SMALL, distance, self.batched)
        if key not in self._seen:
            self._seen.add(key)
            if not group.endswith(connected.ON_HOST):
                self._connect(group, group_size, op, num_bytes, distance)
        super().add(group, group_size, op, num_bytes, distance)

    def _connect(self, group: str, size: int, op: str, num_bytes: int, distance: int) -> None:
        first = not self._used.all()
        before, now = self._used.add(group, size, op, num_bytes, distance, self.batched)
        had = 0 if before is None else self._calibration.bytes_of(before)
        wanted = self._calibration.bytes_of(now)
        if wanted is None or had is None:
            raise UsageError(
                f"the ballast's calibration does not know {op} among {size} ranks of {group}",
                fix="measure it: python benchmarks/device_memory.py -o FILE.json",
            )
        more = wanted - had + (self._calibration.once if first else 0)
        if more > 0:
            self._take(more)
            self.held += more


def connected_by(tally: Tally) -> tuple[Communicator, ...]:
    """The communicators that the calls of a job have connected, as ``tally`` saw them."""
    used = connected.Used()
    for group, size, op, num_bytes in tally.sizes():
        if op not in ("send", "recv") and not group.endswith(connected.ON_HOST):
            used.add(group, size, op, num_bytes)
    for group, size, op, distance, batched in tally.ways():
        used.add(group, size, op, 0, distance, batched)
    return used.all()


def from_options(options: Options) -> Ballast | None:
    """The ballast that ``options`` ask for.  UsageError where it would say nothing."""
    if options.ballast is None:
        return None
    if options.tier != "cuda":
        raise UsageError(
            f"--prism-ballast holds device memory, and tier {options.tier} has none",
            fix="drop it, or use --prism-tier cuda",
        )
    if options.num_processes > 1:
        raise UsageError(
            "--prism-ballast takes one local rank: several have NCCL communicators of their own",
            fix="run each rank alone",
        )
    calibration = communicators.read(options.ballast)
    if not calibration.measured:
        raise UsageError(
            f"the calibration {options.ballast} has no communicators, so there is nothing to hold",
            fix="measure them: python benchmarks/device_memory.py -o FILE.json",
        )
    return Ballast(calibration)
