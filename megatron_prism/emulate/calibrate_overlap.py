"""Measure how much computing and a call slow each other down while both run.

A part of ``prism calibrate``.  A GPU's clock follows its heat and power within some ten
milliseconds, so "alone" and "together" measured one after the other compare two clocks (an earlier
version found factors below 1 that way).  Here one uninterrupted queue alternates two short phases,
which differ in one thing only: a call with computing behind it, and a call with computing beside it
that begins a moment later.  That is how Megatron overlaps them.  A call launched into the middle of
computing waits for room first, and an earlier version took that for slowness (2.3 times for 16 MiB,
where the job's calls were 1.05 times as long; 4 x H200, 2026-11-22).  The result is the median over
rounds.

Streams need hardware queues of their own (CUDA_DEVICE_MAX_CONNECTIONS): with one for all, factors
came out as 1.0 from 64 MiB on, so nothing ran side by side (same day; the cause is assumed).

Computing is of two kinds: ``gemm``, products that fill the GPU, and ``memory``, additions that take
all of its memory's rate.  On CPUs (gloo) both run throughout a phase, on the host's clock.
"""

from __future__ import annotations

import itertools
import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import distributed as dist

from megatron_prism.replay.costs.collectives import KINDS, OVERLAP_METHOD

if TYPE_CHECKING:
    from megatron_prism.emulate.signatures import Json

__all__ = ["overlaps"]

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "exchange")
SIZES, CPU_SIZES = (1 << 24, 1 << 26, 1 << 28), (1 << 20,)  # bytes of the message
CPU_PHASE_NS = 2e7
ROUNDS, DROPPED, CPU_ROUNDS = 26, 2, 3
_LONGER = 2.5  # computing lasts that much longer than a call, so that it covers a slow one
_AHEAD_CYCLES = 60_000_000  # 30 ms of busy waiting, in which the host gets ahead
_HEAD_CYCLES = 20_000  # 10 us that a call has for its launch before computing begins
_LEAST_NS = 30_000  # of both side by side; less says nothing beside that head
_HEAT_S = 2.0
_MOST = 0.9  # of either that the other can take; noise must not become a huge factor

Call = Callable[[], object]
Phases = tuple[float, float, float, float]  # ns, as ``_on_host`` has them


class OverlapRound(NamedTuple):
    """ns of a call and of computing, one behind the other and side by side; for how long both
    ran; whether computing outlasted the call."""

    call: float
    compute: float
    call_beside: float
    compute_beside: float
    both: float
    covered: bool


def overlaps(cuda: bool, size: int, calls: Callable[[int], Mapping[str, Call]]) -> list[Json]:
    """Rows of factors, as ``read_overlap`` reads them; every rank of the world takes part.

    ``calls`` gives the calls of messages of so many bytes, by name.
    """
    compute = _computing(cuda)
    run = _on_device if cuda else _on_host
    if cuda:
        _heat(compute["gemm"])
    rows = []
    for num_bytes in SIZES if cuda else CPU_SIZES:
        for name, kind in itertools.product(OPS, KINDS):
            call = calls(num_bytes).get(name)  # anew each time: sums of sums grow
            found = run(compute[kind], call) if call is not None else None
            if found is not None:
                first, second, counted = found
                row = {
                    "op": name,
                    "ranks": size,
                    "bytes": num_bytes,
                    "kind": kind,
                    "method": OVERLAP_METHOD,
                }
                factors = {"compute": round(first, 4), "call": round(second, 4)}
                rows.append({**row, **factors, "rounds": counted})
    return rows


def _computing(cuda: bool) -> dict[str, Call]:
    if not cuda:
        a, x = torch.randn(256, 256), torch.randn(1 << 20)
        return {"gemm": lambda: torch.mm(a, a), "memory": lambda: torch.add(x, x)}
    a = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(a)
    x = torch.randn(1 << 27, device="cuda").bfloat16()
    y = torch.empty_like(x)
    return {
        "gemm": lambda: torch.mm(a, a, out=out),
        "memory": lambda: torch.add(x, 1.0, out=y),
    }


def _heat(product: Call) -> None:
    end = time.monotonic() + _HEAT_S
    while time.monotonic() < end:
        for _ in range(50):
            product()
        torch.cuda.synchronize()


def _slowest(*times: float) -> list[float]:
    """The same numbers on every rank: the largest of any."""
    found = torch.tensor(times, dtype=torch.float64)
    found = found.cuda() if dist.get_backend() == "nccl" else found
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [max(1.0, value) for value in found.tolist()]


def _medians(pairs: list[tuple[float, float]]) -> tuple[float, float, int] | None:
    """(factor of computing, factor of the call, rounds counted); None if no round counts."""
    if not pairs:
        return None
    first, second = zip(*pairs, strict=True)
    return statistics.median(first), statistics.median(second), len(pairs)


# -- on a GPU -------------------------------------------------------------------------------------
def _on_device(compute: Call, call: Call) -> tuple[float, float, int] | None:
    side, word = torch.cuda.Stream(), torch.zeros(1, device="cuda")
    one, each = _slowest(
        _between(lambda: _times(10, compute)) / 10, _between(lambda: _times(2, call)) / 2
    )
    count = math.ceil(_LONGER * each / one) + 1  # the same on every rank, or clocks part
    torch.cuda.synchronize()
    torch.cuda._sleep(_AHEAD_CYCLES)
    phases = _Phases(side, call, lambda: _times(count, compute), lambda: dist.all_reduce(word))
    marks = [phases.round(bool(number % 2)) for number in range(ROUNDS)]
    torch.cuda.synchronize()
    return _medians(_call_first([_read(one) for one in marks][DROPPED:]))


def _times(count: int, call: Call) -> None:
    for _ in range(count):
        call()


def _between(call: Call) -> float:
    """ns of the second of two runs."""
    call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e6


class _Phases:
    """Issues the phases; ``meet`` is a small call, after which all ranks are at the same place."""

    def __init__(self, side: torch.cuda.Stream, call: Call, compute: Call, meet: Call) -> None:
        self.side, self.call, self.compute, self.meet = side, call, compute, meet

    def round(self, beside_first: bool) -> list[list[torch.cuda.Event]]:
        """Marks of both phases: computing behind the call, and beside it."""
        order = (True, False) if beside_first else (False, True)
        found = {beside: self._phase(beside) for beside in order}
        return [found[False], found[True]]

    def _phase(self, beside: bool) -> list[torch.cuda.Event]:
        """[the call begins, ends, computing begins, ends]."""
        main = torch.cuda.current_stream()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        self.meet()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            marks[0].record()
            self.call()
            marks[1].record()
        if not beside:
            main.wait_stream(self.side)
        torch.cuda._sleep(_HEAD_CYCLES)
        marks[2].record()
        self.compute()
        marks[3].record()
        main.wait_stream(self.side)
        return marks


def _read(marks: list[list[torch.cuda.Event]]) -> OverlapRound:
    behind, beside = marks
    call, compute, call_beside, compute_beside = (
        phase[i].elapsed_time(phase[i + 1]) * 1e6 for phase in marks for i in (0, 2)
    )
    both = beside[2].elapsed_time(beside[1]) * 1e6
    covered = beside[1].elapsed_time(beside[3]) >= 0
    return OverlapRound(call, compute, call_beside, compute_beside, both, covered)


def _call_first(rounds: list[OverlapRound]) -> list[tuple[float, float]]:
    """Factors of the rounds that count: what each lost, in times of how long both ran."""
    found = []
    for one in rounds:
        if one.covered and one.both >= _LEAST_NS:
            lost = one.compute_beside - one.compute, one.call_beside - one.call
            first, second = (min(max(ns / one.both, 0.0), _MOST) for ns in lost)
            found.append((1 / (1 - first), 1 / (1 - second)))
    return found


# -- on CPUs --------------------------------------------------------------------------------------
def _on_host(compute: Call, call: Call) -> tuple[float, float, int] | None:
    one, each = _slowest(
        _host_ns(lambda: _times(4, compute)) / 4, _host_ns(lambda: _times(2, call)) / 2
    )
    own, others = max(1, round(CPU_PHASE_NS / one)), max(1, round(CPU_PHASE_NS / each))
    calls = math.ceil(2 * own * one / each) + 1
    rounds = []
    for _ in range(CPU_ROUNDS + 1):
        alone = _host_ns(lambda: _times(own, compute)), _host_ns(lambda: _times(others, call))
        rounds.append((*alone, *_host_together(compute, call, own, others, calls)))
    return _medians(_throughout(rounds))


def _throughout(rounds: list[Phases]) -> list[tuple[float, float]]:
    """Factors of rounds in which the other runs for all of a phase."""
    return [
        (2 * one[2] / (one[0] + after[0]), 2 * one[3] / (one[1] + after[1]))
        for one, after in zip(rounds, rounds[1:], strict=False)
    ]


def _host_together(
    compute: Call, call: Call, own: int, others: int, calls: int
) -> tuple[float, float]:
    """ns of computing beside calls, and of calls beside computing."""
    thread = threading.Thread(target=_times, args=(calls, call))
    thread.start()
    first = _host_ns(lambda: _times(own, compute))
    thread.join()
    over = threading.Event()

    def until_over() -> None:
        while not over.is_set():
            compute()

    thread = threading.Thread(target=until_over)
    thread.start()
    try:
        second = _host_ns(lambda: _times(others, call))
    finally:
        over.set()
        thread.join()
    return first, second


def _host_ns(call: Call) -> float:
    begin = time.perf_counter_ns()
    call()
    return float(time.perf_counter_ns() - begin)
