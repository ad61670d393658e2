"""By which factor do computing and a call slow each other down while both run?

Part of ``prism calibrate``.  A GPU's clock follows its heat and power within some ten milliseconds,
so "alone" and "together" measured one after the other compare two clocks (an earlier version found
factors below 1 that way).  Here one uninterrupted queue alternates short phases: computing alone, a
call alone, and a call that starts first with computing right behind it, which is how Megatron
overlaps them (CUDA_DEVICE_MAX_CONNECTIONS=1 is there for that order).  A call launched into the
middle of computing waits for room first, and an earlier version took that for slowness (2.3 times
for 16 MiB, where the job's calls were 1.05 times as long; 4 x H200, 2026-11-22).  Every phase sees
the same clock: a round is compared with the phases alone of that round and the next, and the result
is the median over rounds.

That order is made here by a moment of nothing before computing, and with many connections: with one
the event behind the call, which says when it ended, holds up the kernels that are launched after it
(every factor was 1.0; same day).

Computing is of two kinds: ``gemm``, products that fill the GPU, and ``memory``, additions that take
all of its memory's rate.  On CPUs (gloo) both run throughout a phase, on the host's clock.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import distributed as dist

__all__ = ["overlaps"]

KINDS = ("gemm", "memory")
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SIZES, CPU_SIZES = (1 << 22, 1 << 24, 1 << 26, 1 << 28), (1 << 20,)  # bytes of the message
CPU_PHASE_NS = 2e7
ROUNDS, DROPPED, CPU_ROUNDS = 26, 2, 3
_LONGER = 1.5  # computing lasts that much longer than a call, so that it covers a slow one
_AHEAD_CYCLES = 60_000_000  # 30 ms of busy waiting, in which the host gets ahead
_HEAT_S = 2.0
_HEAD_CYCLES = 20_000  # 10 us that a call has for its launch before computing begins
_MOST = 0.9  # of computing that a call can take; noise must not become a huge factor
Call = Callable[[], Any]
# ns of computing, of the call, of both under or beside each other; whether the round counts
Phases = tuple[float, float, float, float, bool]


def overlaps(
    cuda: bool, size: int, calls: Callable[[int], Mapping[str, Call]]
) -> list[dict[str, Any]]:
    """Rows of factors, as ``costs.overlap`` reads them; every rank of the world takes part.

    ``calls`` gives the calls of messages of so many bytes, by name.
    """
    compute = _computing(cuda)
    run = _on_device if cuda else _on_host
    if cuda:
        _heat(compute["gemm"])
    rows = []
    for num_bytes in SIZES if cuda else CPU_SIZES:
        for name in calls(num_bytes):
            for kind in KINDS if name in OPS else ():
                found = run(compute[kind], calls(num_bytes)[name])  # sums of sums start anew
                if found is not None:
                    first, second, counted = found
                    row = {"op": name, "ranks": size, "bytes": num_bytes, "kind": kind}
                    row |= {"order": "call first" if cuda else "at once"}
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
    side = torch.cuda.Stream()
    one, each = _slowest(
        _between(lambda: _times(10, compute)) / 10, _between(lambda: _times(4, call)) / 4
    )
    count = math.ceil(_LONGER * each / one) + 1  # the same on every rank, or clocks part
    torch.cuda.synchronize()
    torch.cuda._sleep(_AHEAD_CYCLES)
    marks = [_round(side, compute, call, count) for _ in range(ROUNDS + 1)]
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


def _round(
    side: torch.cuda.Stream, compute: Call, call: Call, count: int
) -> list[torch.cuda.Event]:
    """Issue the three phases; the events around them: computing, the call, both (4 to 7).

    Before a call that counts comes one that does not: it waits for the last rank.
    """
    main = torch.cuda.current_stream()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(8)]

    def timed(begin: int, then: Call) -> None:
        side.wait_stream(main)
        with torch.cuda.stream(side):
            call()
        main.wait_stream(side)
        with torch.cuda.stream(side):
            marks[begin].record()
            call()
            marks[begin + 1].record()
        then()
        main.wait_stream(side)

    def computing(begin: int) -> None:
        marks[begin].record()
        torch.cuda._sleep(_HEAD_CYCLES)
        _times(count, compute)
        marks[begin + 1].record()

    computing(0)
    timed(2, lambda: None)
    timed(4, lambda: computing(6))
    return marks


def _read(marks: list[torch.cuda.Event]) -> Phases:
    compute, call, beside, under = (marks[i].elapsed_time(marks[i + 1]) * 1e6 for i in (0, 2, 6, 4))
    return compute, call, beside, under, marks[5].elapsed_time(marks[7]) >= 0


def _call_first(rounds: list[Phases]) -> list[tuple[float, float]]:
    """Factors of the rounds in which computing outlasted the call.

    Computing is slower for as long as the call runs: it loses what both take longer together.
    """
    found = []
    for one, after in zip(rounds, rounds[1:], strict=False):
        if one[4]:
            lost = (one[2] - (one[0] + after[0]) / 2) / one[3]
            found.append((1 / (1 - min(max(lost, 0.0), _MOST)), 2 * one[3] / (one[1] + after[1])))
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
        rounds.append((*alone, *_host_together(compute, call, own, others, calls), True))
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
