"""What did this rank do in an iteration?  Writes down every op while Megatron's own code runs.

The backend hands every communication to ``record``; ``watch`` reports streams, events and host
waits; what runs in between becomes compute segments, timed on the device (CUDA events), on the host
(cpu tier) or weighed (meta tier: flops, bytes, kernels).  Time spent here and in answering for
virtual peers belongs to no segment.  ``start`` and ``stop`` enclose one iteration.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed import distributed_c10d as c10d

from megatron_prism.program import Builder, Program
from megatron_prism.slicer.calls import Tracked, details
from megatron_prism.slicer.kernels import Meter
from megatron_prism.tiers import work

__all__ = ["Recorder", "Recording", "typical"]

_MARKS = ("/megatron/core/", "/megatron/training/", "/transformer_engine/")


@dataclass(frozen=True)
class Recording:
    """One recorded iteration; its device times are read only when asked for, since that waits."""

    rank: int
    builder: Builder
    timed: list[tuple[int, Any, Any]]

    def program(self) -> Program:
        """The program, with the times of its segments."""
        program = self.builder.build(self.rank)
        for index, begin, end in self.timed:
            end.synchronize()
            program.ops["ns"][index] = round(begin.elapsed_time(end) * 1e6)
        return program


def typical(programs: Sequence[Program]) -> tuple[Program, int]:
    """(the last program with the median time of each segment, how many iterations that took).

    Iterations that differ in their ops (MoE token counts) are not mixed: then the last one counts.
    """
    last = programs[-1]
    alike = [p for p in programs if _shape_of(p) == _shape_of(last)]
    if len(alike) > 1:
        times = np.stack([p.ops["ns"] for p in alike])
        last.ops["ns"] = np.median(times, axis=0).round().astype(np.int64)
    return last, len(alike)


def _shape_of(program: Program) -> bytes:
    ops = program.ops.copy()
    ops["ns"] = 0
    return ops.tobytes()


class Recorder:
    """Collects the program of one rank.

    rank  : global rank
    tier  : ``cuda``, ``cpu`` or ``meta``; decides how segments are measured
    live  : the live-byte tracker (meta only)
    """

    def __init__(self, rank: int, tier: str, live: Any = None) -> None:
        self.rank, self.tier = rank, tier
        self.meter = Meter() if live is not None else None
        self._alive: Any = live.alive if live is not None else None
        if live is not None:
            live.meter = work.meter = self.meter
        self.active = False
        self._builder = Builder()
        self._labels: dict[str, Any] = {}
        self._inside = 0
        self._batch = self._num_batches = -1
        self._batched = False  # the open batch has a message already
        self._streams: dict[int, str] = {}
        self._since: Any = None  # where the open segment began
        self._timed: list[tuple[int, Any, Any]] = []
        self._sites: dict[tuple[Any, int], str] = {}
        self._events: dict[int, int] = {}

    # -- an iteration -----------------------------------------------------------------------------
    def start(self) -> None:
        """Forget what came before and record from here on."""
        self._builder, self._timed, self._events = Builder(), [], {}
        self._num_batches = -1
        self.active = True
        if self.meter is not None:
            self.meter.take()
            self.meter.memory = self._builder.memory
            for storage, num_bytes in self._alive():
                self._builder.memory(storage, num_bytes)
        self._open()

    def stop(self) -> Recording:
        """What was recorded since ``start``."""
        self._close()
        self.active = False
        if self.meter is not None:
            self.meter.memory = None
        return Recording(self.rank, self._builder, self._timed)

    @contextlib.contextmanager
    def scope(self, **labels: Any) -> Iterator[None]:
        """Label what runs inside: phase, microbatch, chunk."""
        self.cut()
        before, self._labels = self._labels, {**self._labels, **labels}
        try:
            yield
        finally:
            self.cut()
            self._labels = before

    # -- compute segments -------------------------------------------------------------------------
    def _open(self) -> None:
        if self.tier == "cuda":
            self._since = _stamp()
        else:
            self._since = time.perf_counter_ns()

    def _close(self) -> None:
        """End the open segment; it is an op if anything ran in it, unless a batch is being issued:
        nothing runs between its messages."""
        if self._batch >= 0 and self._batched:
            return
        if self.tier == "meta":
            assert self.meter is not None
            done = self.meter.take()
            if done.kernels:
                self._add(
                    "compute",
                    flops=done.flops,
                    traffic=done.traffic,
                    kernels=done.kernels,
                    note=done.text(),
                )
            return
        if self.tier == "cuda":
            self._timed.append((self._add("compute", ns=0), self._since, _stamp()))
            return
        self._add("compute", ns=time.perf_counter_ns() - self._since)

    def cut(self) -> None:
        """End a segment and begin another: a label or the stream changes."""
        if self.active and not self._inside:
            self._close()
            self._open()

    def _add(self, name: str, **fields: Any) -> int:
        labels = self._labels
        return self._builder.add(
            name,
            stream=self._stream(),
            phase=labels.get("phase", ""),
            microbatch=labels.get("microbatch", -1),
            chunk=labels.get("chunk", -1),
            **fields,
        )

    def _stream(self, stream: Any = None) -> str:
        """``main`` for the default stream, ``s1``, ``s2`` … for the others, by first use."""
        stream = torch.cuda.current_stream() if stream is None else stream
        number = getattr(stream, "cuda_stream", 0)
        if number == 0:
            return "main"
        return self._streams.setdefault(number, f"s{len(self._streams) + 1}")

    @contextlib.contextmanager
    def _op(self) -> Iterator[None]:
        """What runs inside belongs to no segment."""
        self._close()
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            if self.meter is not None:
                self.meter.take()
            self._open()

    # -- communication ----------------------------------------------------------------------------
    def record(
        self, group: Any, op: str, answer: Callable[..., Any], args: Sequence[Any], kwargs: Any
    ) -> Any:
        """Make the call ``answer(group, *args, **kwargs)`` and write it down."""
        if not self.active or self._inside:
            return answer(group, *args, **kwargs)
        with self._op():
            fields = details(group, op, args, kwargs)
            handle = len(self._builder)
            self._batched = self._batch >= 0
            site = self._site()
            self._add(op, group=group.desc, handle=handle, batch=self._batch, site=site, **fields)
            made = answer(group, *args, **kwargs)
        return made if made is None else Tracked(self, handle, made)

    def waited(self, handle: int, code: Any) -> None:
        """The current stream waits for ``handle``.  torch's own wait means the call was not async:
        then the op loses its handle instead."""
        if not self.active or self._inside:
            return
        if code.co_filename == c10d.__file__ and code.co_name != "wait":
            self._builder.settle(handle)
            return
        with self._op():
            self._add("wait", handle=handle)

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """What is issued inside is one call to NCCL."""
        if self._batch >= 0:
            yield
            return
        self._num_batches += 1
        self._batch, self._batched = self._num_batches, False
        try:
            yield
        finally:
            self._batch = -1

    def _site(self) -> str:
        """``core/tensor_parallel/mappings.py:31``: the innermost Megatron or TE frame."""
        frame: Any = sys._getframe(3)
        while frame is not None:
            key = (frame.f_code, frame.f_lineno)
            known = self._sites.get(key)
            if known is None:
                path = frame.f_code.co_filename.replace("\\", "/")
                at = max((path.rfind(mark) for mark in _MARKS), default=-1)
                known = "" if at < 0 else f"{path[at + 1 :].removeprefix('megatron/')}:{key[1]}"
                self._sites[key] = known
            if known:
                return known
            frame = frame.f_back
        return ""

    # -- what the watch reports -------------------------------------------------------------------
    def event_recorded(self, event: int, stream: Any) -> None:
        """Event ``event`` is recorded on ``stream`` (None: the current one)."""
        if self.active and not self._inside:
            with self._op():
                self._events[event] = len(self._builder)
                self._builder.add("record", stream=self._stream(stream), handle=self._events[event])

    def event_waited(self, event: int, stream: Any) -> None:
        """``stream`` (None: the current one) waits for ``event``."""
        if self.active and not self._inside and event in self._events:
            with self._op():
                self._builder.add("wait", stream=self._stream(stream), handle=self._events[event])

    def host_waited(self, note: str) -> None:
        """The host waits for the device."""
        if self.active and not self._inside:
            with self._op():
                self._add("host_wait", note=note, site=self._site())


def _stamp() -> Any:
    """A timing event on the current stream that the watch does not hear of."""
    event = torch.cuda.Event(enable_timing=True)
    super(torch.cuda.Event, event).record(torch.cuda.current_stream())
    return event
