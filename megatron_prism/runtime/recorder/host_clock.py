"""How long does the host take for an iteration that is not recorded?

Recording a segment takes it no time of its own, but what recording does in between costs the CPU's
caches and queues more events, and the segment is slower on the host for it (about a tenth on shared
H200 hosts).  So some iterations are only clocked: from one train step to the next, without the
calls to virtual peers and the waits for the device, as segments are.

A launch waits where some thousand others are before it, and then the host's time is the device's:
a rank whose GPU is the bottleneck would seem to need its host just as long.  So the device comes to
rest behind every call and where a label begins, which does not count either.

Python's full garbage collections do not count, recorded or not: a job has one in hundreds of
iterations, and what recordings leave behind brings them forward (half a second each, in one of
twenty clocked iterations).  Where Python's collector is off, the job collects (--manual-gc), and
that counts.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from megatron_prism.runtime.process_group import PrismGroup
    from megatron_prism.runtime.signatures import Args, Kwargs

__all__ = ["Collections", "HostClock"]

_FULL = 2  # the oldest generation


R = TypeVar("R")


class Collections:
    """ns of Python's own full collections of garbage between ``start`` and ``stop``.

    counts : says at the end of one whether it counts
    """

    def __init__(self, counts: Callable[[], bool]) -> None:
        self._counts = counts
        self._began = self._spent = 0

    def start(self) -> None:
        self._spent = 0
        gc.callbacks.append(self._heard)

    def stop(self) -> int:
        gc.callbacks.remove(self._heard)
        return self._spent

    def _heard(self, phase: str, info: Mapping[str, int]) -> None:
        """Python's collector begins, or is through."""
        if info["generation"] < _FULL or not gc.isenabled():
            return
        if phase == "start":
            self._began = perf_counter_ns()
        elif self._counts():
            self._spent += perf_counter_ns() - self._began


class HostClock:
    """Runs from ``start`` to ``stop`` while the host does the job's own work."""

    def __init__(self) -> None:
        self.running = False
        self._began = self._away = self._left = 0
        self._aside = False
        self._collections = Collections(lambda: not self._aside)

    def start(self) -> None:
        self.running, self._away, self._aside = True, 0, False
        self._collections.start()
        self._began = perf_counter_ns()

    def stop(self) -> int:
        """ns since ``start``, without what was left out."""
        self.running, spent = False, perf_counter_ns() - self._began - self._away
        return spent - self._collections.stop()

    def call(
        self, answer: Callable[..., R], group: PrismGroup | None, args: Args, kwargs: Kwargs
    ) -> R:
        """``answer(group, *args, **kwargs)``, which does not count."""
        if not self.running or self._aside:
            return answer(group, *args, **kwargs)
        self._aside, begin = True, perf_counter_ns()
        try:
            made = answer(group, *args, **kwargs)
            torch.cuda.synchronize()
            return made
        finally:
            self._away += perf_counter_ns() - begin
            self._aside = False

    def settle(self) -> None:
        """Let the device come to rest; whoever watches it counts that as a wait."""
        if self.running and not self._aside:
            torch.cuda.synchronize()

    def wait(self) -> bool:
        """The host is about to wait for the device; whether ``resume`` is to follow."""
        self._left = perf_counter_ns()
        return self.running and not self._aside

    def resume(self) -> None:
        """The host goes on."""
        self._away += perf_counter_ns() - self._left
