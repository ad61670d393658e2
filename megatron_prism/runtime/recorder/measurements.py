"""Measured iterations: what is left of a recording, typical times of several, the host's clock.

Device times are read only when the program is asked for, since that waits for the device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from megatron_prism.core.programs.ops import CODE, IS_COLLECTIVE, IS_PAIR
from megatron_prism.core.programs.program import Builder, Program
from megatron_prism.runtime.recorder.kernel_times import Launches, device_ns

if TYPE_CHECKING:
    from megatron_prism.runtime.listeners import Args, Kwargs
    from megatron_prism.runtime.process_group import PrismGroup

_FULL = 2  # the oldest generation


R = TypeVar("R")


class GarbageCollections:
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
        # it begins
        if phase == "start":
            self._began = perf_counter_ns()
        # it is through, in a time that counts
        elif self._counts():
            self._spent += perf_counter_ns() - self._began


class HostClock:
    """Runs from ``start`` to ``stop`` while the host does the job's own work."""

    def __init__(self) -> None:
        self.running = False
        self._began = self._away = self._left = 0
        self._aside = False
        self._collections = GarbageCollections(lambda: not self._aside)

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
        # nothing is clocked, or this call is inside of another one
        if not self.running or self._aside:
            return answer(group, *args, **kwargs)
        self._aside, begin = True, perf_counter_ns()
        try:
            work = answer(group, *args, **kwargs)
            torch.cuda.synchronize()
            return work
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


_PROMPT_SHARE = 0.99  # of all segments: the host noted their begin in time; the others are outliers


Span = tuple[torch.cuda.Event, torch.cuda.Event]  # around a segment


@dataclass(frozen=True)
class Recording:
    """One recorded iteration.

    builder : its ops; None if only times were taken
    times   : of each segment in order: ns, or the CUDA events around it; empty on the meta tier
    trace   : names of all ops in order
    hosts   : of each segment, when the host began to issue it, and was through (time_ns); CUDA only
    collected: ns of full garbage collections in ``hosts``
    busy    : ``kernel_times.busy_ns`` of it; None unless the iteration was traced
    launches: ``kernel_times.launches`` of it; likewise
    """

    rank: int
    builder: Builder | None
    times: list[int | Span]
    trace: list[str]
    hosts: list[tuple[int, int]] = field(default_factory=list)
    collected: int = 0
    busy: np.ndarray | None = None
    launches: Launches | None = None

    def _spans(self) -> list[Span]:
        """The events around the segments; none where times are ns."""
        return [span for span in self.times if isinstance(span, tuple)]

    def segments_ns(self) -> np.ndarray:
        """Duration of each segment, int64 [segments]."""
        if spans := self._spans():
            spans[-1][1].synchronize()
            durations = [round(begin.elapsed_time(end) * 1e6) for begin, end in spans]
            return np.array(durations, dtype=np.int64)
        return np.array(self.times, dtype=np.int64)

    def behind_ns(self) -> np.ndarray:
        """float64 [segments]: how long after its host the device came to each.  Somewhere in an
        iteration it follows at once; without events it is as early as can be everywhere.
        """
        issued = np.array([begin - self.hosts[0][0] for begin, _ in self.hosts], dtype=float)
        # events: when the device came to each segment, on its own clock
        if spans := self._spans():
            spans[-1][0].synchronize()
            first = spans[0][0]
            came = np.array([first.elapsed_time(begin) * 1e6 for begin, _ in spans])
            came += np.quantile(issued - came, _PROMPT_SHARE, method="higher")
            return np.maximum(came - issued, 0)
        # no events: the device takes one segment after the other, each when its host is there
        came, free = issued.copy(), 0.0
        for i, takes in enumerate(self.segments_ns()):
            came[i] = max(free, issued[i])
            free = came[i] + takes
        return came - issued

    def program(self) -> Program:
        """The program with this iteration's own times."""
        assert self.builder is not None
        return timed(self.builder.build(self.rank), self.segments_ns())


def timed(program: Program, segments_ns: np.ndarray) -> Program:
    """``program`` with these durations of its compute ops, if there are any."""
    compute = np.flatnonzero(program.ops["name"] == CODE["compute"])
    if segments_ns.size:
        program.ops["ns"][compute] = segments_ns
    return program


def typical(
    recordings: Sequence[Recording], own_ns: int = 0, clocks: Sequence[int] = ()
) -> tuple[Program, int]:
    """(the program written down, with the median time of each segment; of how many iterations).

    Times are those of the quick recordings that made the same ops: writing ops down is slower than
    only timing them.  Without any the program keeps its own times.  Every single time stays in
    ``Program.samples``.  If an iteration was traced, segments are what their kernels take, and the
    host's time for each is kept apart, without ``own_ns`` of the recorder behind every call.
    ``clocks``: ns of the host for whole iterations that were not recorded, which are as slow as the
    job is.
    """
    written = next(r for r in recordings if r.builder is not None)
    program = written.program()
    same_trace = [r for r in recordings if r.builder is None and r.trace == written.trace]
    quick = [r for r in same_trace if r.busy is None]
    traced = [r for r in same_trace if r.busy is not None]
    # quick recordings: nothing was written down in them
    if quick:
        times = np.stack([r.segments_ns() for r in quick])
        timed(program, np.median(times, axis=0).round().astype(np.int64))
        if times.size:
            program = replace(program, samples=times.astype(np.int64))
        if traced and times.size:
            program = _apart(program, quick, traced[-1], own_ns, clocks)
    return program, max(1, len(quick))


def _apart(
    program: Program,
    quick: Sequence[Recording],
    traced: Recording,
    own_ns: int,
    clocks: Sequence[int],
) -> Program:
    """Keep the host's time for each segment apart from its kernels'."""
    hosts = np.stack([r.hosts for r in quick])  # [iterations, n, 2]
    names, busy = program.ops["name"], traced.busy
    assert busy is not None
    compute = np.flatnonzero(names == CODE["compute"])
    calls = IS_COLLECTIVE[names] | IS_PAIR[names]
    own = np.where((compute > 0) & calls[compute - 1], own_ns, 0)
    host_ns = np.maximum(hosts[:, :, 1] - hosts[:, :, 0] - own, 0)
    collected = np.array([r.collected for r in quick])
    iteration_ns = np.maximum(host_ns.sum(axis=1) - collected, 0)
    # Delays of a host are few and long, and those of several ranks add up: they are in no segment's
    # median, nor do they delay others if they are spread over an iteration.  So one whole iteration
    # is kept, the middle one, of two the quicker: what disturbs a host only adds.
    # An iteration with a full collection of garbage is taken where there is no other.
    order = np.argsort(iteration_ns, kind="stable")
    order = order[collected[order] == collected.min()]
    middle = int(order[(len(order) - 1) // 2])
    usual = float(iteration_ns[middle])
    unrecorded = _lower_median(np.array(clocks)) / max(1.0, usual) if len(clocks) else 1.0
    scale = unrecorded * usual / max(1.0, host_ns[middle].sum())
    issued = np.rint(host_ns[middle] * scale).astype(np.int64)
    # the trace slows the host down, so of a launch only the place in its segment counts
    length = np.diff(np.asarray(traced.hosts, dtype=np.int64), axis=1)[:, 0]
    place = np.clip((busy[1] - own) / np.maximum(1, length - own), 0, 1)
    launches, waits = traced.launches, None
    if launches is not None:
        behind = [recording.behind_ns() for recording in quick]
        waits = np.stack([launches.waits(own, *pair) for pair in zip(host_ns, behind, strict=True)])
    ns = device_ns(program.samples, busy, waits)
    lead = place * issued  # until the first launch
    if launches is not None:
        lead = np.maximum(lead, launches.leads(own, issued, ns))
        has_kernels = launches.busy > 0
        part = launches.products[has_kernels] / launches.busy[has_kernels]
        program.ops["products"][compute[has_kernels]] = np.rint(part * ns[has_kernels])
    program.ops["host"][compute] = issued
    program.ops["lead"][compute] = np.rint(lead).astype(np.int64)
    program.ops["ns"][compute] = ns
    totals = np.rint(np.concatenate([iteration_ns * unrecorded, clocks])).astype(np.int64)
    return replace(program, hosts=totals)


def _lower_median(values: np.ndarray) -> Any:
    """The middle one of the first axis, of two the smaller: what disturbs a host only adds, and a
    process beside it once made one of two iterations take 811 ms instead of 414 (4 x H200,
    2026-11-22).
    """
    return np.sort(values, axis=0)[(len(values) - 1) // 2].astype(float)


def stamp() -> torch.cuda.Event:
    """A timing event on the current stream that the recorder does not hear of."""
    event = torch.cuda.Event(enable_timing=True)
    super(torch.cuda.Event, event).record(torch.cuda.current_stream())
    return event
