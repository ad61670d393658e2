"""How long does a call take a device, once everybody has come?  Part of ``prism calibrate``.

In a job a call has computing before and behind it: its kernel starts later than behind another
call, what it reads is no longer in the GPU's cache, and the clock is that of a GPU that computes.
Measured behind products, calls took 3 to 8 us longer than back to back (2 x H200, 2026-11-23),
which is half as long again for 1 MiB.

So one queue alternates two spans behind a product: two copies, and the same with the call between
them.  What a span with the call takes more is the call's, launches included.  Copies are as long at
every clock, and they fill the cache.  Whoever comes last does not wait, so of all ranks the
shortest time counts.  On CPUs (gloo) it is the host's time for single calls in a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist

__all__ = ["Behind", "in_a_row"]

_DROPPED = 4  # spans of the beginning
_PRODUCT, _COPIED = 8192, 1 << 26  # rows; bytes: more than a GPU's cache has
_AHEAD_CYCLES = 3_000_000  # about 2 ms of busy waiting, in which the host gets ahead
_HEAT_S = 1.0

Call = Callable[[], Any]
Mark = tuple[torch.cuda.Event, torch.cuda.Event]


class Behind:
    """Measures on this process's GPU."""

    def __init__(self) -> None:
        def matrix(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda")

        half = _PRODUCT // 2
        self._factors = matrix(_PRODUCT, half), matrix(half, half)
        self._product = matrix(_PRODUCT, half)
        self._from, self._to = (
            torch.zeros(_COPIED, dtype=torch.uint8, device="cuda") for _ in range(2)
        )
        end = time.monotonic() + _HEAT_S
        while time.monotonic() < end:
            for _ in range(50):
                self._compute()
            torch.cuda.synchronize()

    def __call__(self, call: Call, count: int, group: Any) -> list[int]:
        """ns of ``count`` calls, of each what the quickest rank of ``group`` took; all ranks of it
        must call this."""
        torch.cuda.synchronize()
        torch.cuda._sleep(_AHEAD_CYCLES)
        marks = [(self._span(None), self._span(call)) for _ in range(count + _DROPPED)]
        torch.cuda.synchronize()
        without, within = (
            torch.tensor([begin.elapsed_time(end) * 1e6 for begin, end in column], device="cuda")
            for column in zip(*marks[_DROPPED:], strict=True)
        )
        spent = within - without.median()
        dist.all_reduce(spent, op=dist.ReduceOp.MIN, group=group)
        return [max(1, round(ns)) for ns in spent.tolist()]

    def _compute(self) -> None:
        torch.mm(*self._factors, out=self._product)

    def _span(self, call: Call | None) -> Mark:
        """Marks around two copies, with the call between them, if there is one."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._compute()
        begin.record()
        self._to.copy_(self._from)
        if call is not None:
            call()
        self._to.copy_(self._from)
        end.record()
        return begin, end


def in_a_row(call: Call, count: int) -> list[int]:
    """The host's ns for each of ``count`` calls, which return when they are done."""
    found = []
    call()
    for _ in range(count):
        begin = time.perf_counter_ns()
        call()
        found.append(time.perf_counter_ns() - begin)
    return found
