"""By which factor do computing and a call slow each other down while both run?

Part of ``prism calibrate``.  A GPU's clock follows its heat and power within some ten milliseconds,
so "alone" and "together" measured one after the other compare two clocks (an earlier version found
factors below 1 that way).  Here one uninterrupted queue alternates short phases of some three
milliseconds: computing alone, calls alone, computing while calls run throughout, calls while
computing runs throughout; every phase sees the same clock.  The factor of a round is the phase
together over the phases alone of that round and the next, the result the median over rounds.

Computing is of two kinds: ``gemm``, products that fill the GPU, and ``memory``, additions that take
all of its memory's rate.  On CPUs (gloo) the same phases run on the host's clock.
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
SIZES, CPU_SIZES = (1 << 24, 1 << 28), (1 << 20,)  # bytes of the message
PHASE_NS, CPU_PHASE_NS = 3e6, 2e7
ROUNDS, DROPPED, CPU_ROUNDS = 14, 2, 3
_LONGER = 2.0  # what runs beside a phase lasts that much longer, so that it covers a slow one
_AHEAD_CYCLES = 60_000_000  # 30 ms of busy waiting, in which the host gets ahead
_HEAT_S = 2.0
Call = Callable[[], Any]
Phases = tuple[float, float, float, float, bool]  # ns: compute, call, compute under, call under


def overlaps(
    cuda: bool, size: int, calls: Callable[[int], Mapping[str, Call]]
) -> list[dict[str, Any]]:
    """Rows ``{op, ranks, bytes, kind, compute, call, rounds}``; every rank of the world takes part.

    ``calls`` gives the calls of messages of so many bytes, by name.
    """
    compute = _computing(cuda)
    run = _on_device if cuda else _on_host
    if cuda:
        _heat(compute["gemm"])
    rows = []
    for num_bytes in SIZES if cuda else CPU_SIZES:
        for name, call in calls(num_bytes).items():
            for kind in KINDS if name in OPS else ():
                found = run(compute[kind], call)
                if found is not None:
                    first, second, rounds = found
                    rows.append(
                        {"op": name, "ranks": size, "bytes": num_bytes, "kind": kind,
                         "compute": round(first, 4), "call": round(second, 4), "rounds": rounds}
                    )  # fmt: skip
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


def _agreed(compute_ns: float, call_ns: float, phase_ns: float) -> tuple[int, int, int, int]:
    """(computations, calls) of a phase alone and (…) beside one: the same numbers on every rank,
    or the last calls would wait forever."""
    times = torch.tensor([compute_ns, call_ns], dtype=torch.float64)
    times = times.cuda() if dist.get_backend() == "nccl" else times
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    compute, call = (max(1.0, value) for value in times.tolist())
    own, others = max(1, round(phase_ns / compute)), max(1, round(phase_ns / call))
    return (
        own,
        others,
        math.ceil(_LONGER * others * call / compute) + 1,
        math.ceil(_LONGER * own * compute / call) + 1,
    )


def _result(rounds: list[Phases]) -> tuple[float, float, int] | None:
    """(factor of computing, factor of the call, rounds counted); None if none can be used.

    A round counts if what ran beside a phase outlasted it.
    """
    first, second = [], []
    for one, after in zip(rounds, rounds[1:], strict=False):
        if one[4]:
            first.append(2 * one[2] / (one[0] + after[0]))
            second.append(2 * one[3] / (one[1] + after[1]))
    if not first:
        return None
    return statistics.median(first), statistics.median(second), len(first)


# -- on a GPU -------------------------------------------------------------------------------------
def _on_device(compute: Call, call: Call) -> tuple[float, float, int] | None:
    side = torch.cuda.Stream()
    own, others, more, calls = _agreed(
        _between(lambda: _times(10, compute)) / 10, _between(lambda: _times(4, call)) / 4, PHASE_NS
    )
    torch.cuda.synchronize()
    torch.cuda._sleep(_AHEAD_CYCLES)
    marks = [_round(side, compute, call, (own, others, more, calls)) for _ in range(ROUNDS + 1)]
    torch.cuda.synchronize()
    return _result([_read(one) for one in marks][DROPPED:])


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
    side: torch.cuda.Stream, compute: Call, call: Call, counts: tuple[int, int, int, int]
) -> list[torch.cuda.Event]:
    """Issue the four phases; the events around them, and where what runs beside the last two ends.

    Every phase with calls begins with one that is not counted: it waits for the last rank.
    """
    own, others, more, calls = counts
    main = torch.cuda.current_stream()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(10)]

    def beside(begin: int, count: int) -> None:
        with torch.cuda.stream(side):
            marks[begin].record()
            _times(count, call)
            marks[begin + 1].record()

    def together() -> None:
        side.wait_stream(main)
        with torch.cuda.stream(side):
            call()
        main.wait_stream(side)

    marks[0].record()
    _times(own, compute)
    marks[1].record()
    together()
    beside(2, others)
    main.wait_stream(side)
    together()
    beside(8, calls)
    marks[4].record()
    _times(own, compute)
    marks[5].record()
    together()
    compute()
    beside(6, others)
    _times(more, compute)
    marks.append(torch.cuda.Event(enable_timing=True))
    marks[10].record()
    main.wait_stream(side)
    return marks


def _read(marks: list[torch.cuda.Event]) -> Phases:
    spans = [marks[i].elapsed_time(marks[i + 1]) * 1e6 for i in (0, 2, 4, 6)]
    covered = marks[5].elapsed_time(marks[9]) >= 0 and marks[7].elapsed_time(marks[10]) >= 0
    return spans[0], spans[1], spans[2], spans[3], covered


# -- on CPUs --------------------------------------------------------------------------------------
def _on_host(compute: Call, call: Call) -> tuple[float, float, int] | None:
    own, others, _, calls = _agreed(
        _host_ns(lambda: _times(4, compute)) / 4,
        _host_ns(lambda: _times(2, call)) / 2,
        CPU_PHASE_NS,
    )
    rounds = []
    for _ in range(CPU_ROUNDS + 1):
        alone = _host_ns(lambda: _times(own, compute)), _host_ns(lambda: _times(others, call))
        rounds.append((*alone, *_host_together(compute, call, own, others, calls), True))
    return _result(rounds)


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
