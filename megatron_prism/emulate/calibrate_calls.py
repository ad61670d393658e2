"""How long does a call take a device, once everybody has come?  Part of ``prism calibrate``.

In a job a call has computing before and behind it: its kernel starts later than behind another
call, what it reads is no longer in the GPU's cache, and the clock is that of a GPU that computes.
It takes 2 to 9 us longer so than back to back (2 x H200, 2026-11-23).

So one queue alternates two spans behind a product: two copies, and the same with the call between
them.  What a span with the call takes more is the call's, launches included.  Copies are as long at
every clock, and they fill the cache.  A small call brings all ranks together before each span; of
what is left, whoever comes last does not wait, so of all ranks the shortest time counts.  Of calls
that go one way (broadcasts, messages) the longest does: who sends need not wait until it is there.
On CPUs (gloo) it is the host's time for single calls in a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import Group

__all__ = ["Behind", "in_a_row"]

ONE_WAY = ("broadcast", "send")

_DROPPED = 4  # spans of the beginning
_PRODUCT, _COPIED = 8192, 1 << 26  # rows; bytes: both sides fill every GPU's cache (B200: 126 MB)
_AHEAD_CYCLES = 3_000_000  # about 2 ms of busy waiting, in which the host gets ahead
_HEAT_S, _COOLS_S = 1.0, 0.1  # of products, if nothing was computed for so long

Call = Callable[[], object]
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
        self._word = torch.zeros(1, device="cuda")
        self._used = 0.0

    def __call__(self, name: str, call: Call, count: int, group: Group) -> list[int]:
        """ns of up to ``count`` calls of a collective ``name``; all ranks of ``group`` must call
        this.  Times that are no more than the copies' own are left out."""
        dist.all_reduce(self._word, group=group)
        call()  # connections are made now
        torch.cuda.synchronize()
        if time.monotonic() - self._used > _COOLS_S:
            self._heat()
        torch.cuda.synchronize()
        torch.cuda._sleep(_AHEAD_CYCLES)
        marks = [
            (self._span(None, group), self._span(call, group)) for _ in range(count + _DROPPED)
        ]
        torch.cuda.synchronize()
        without, within = (
            torch.tensor([begin.elapsed_time(end) * 1e6 for begin, end in column], device="cuda")
            for column in zip(*marks[_DROPPED:], strict=True)
        )
        self._used = time.monotonic()
        return of_all_ranks(name, within - without.median(), group)

    def _heat(self) -> None:
        end = time.monotonic() + _HEAT_S
        while time.monotonic() < end:
            for _ in range(50):
                self._compute()
            torch.cuda.synchronize()

    def _compute(self) -> None:
        torch.mm(*self._factors, out=self._product)

    def _span(self, call: Call | None, group: Group) -> Mark:
        """Marks around two copies, with the call between them, if there is one."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._compute()
        dist.all_reduce(self._word, group=group)
        begin.record()
        self._to.copy_(self._from)
        if call is not None:
            call()
        self._to.copy_(self._from)
        end.record()
        return begin, end


def of_all_ranks(name: str, spent: torch.Tensor, group: Group) -> list[int]:
    """ns of each call that took any time, from what it took this rank (float [calls])."""
    op = dist.ReduceOp.MAX if name in ONE_WAY else dist.ReduceOp.MIN
    dist.all_reduce(spent, op=op, group=group)
    return [round(ns) for ns in spent.tolist() if ns >= 1]


def in_a_row(call: Call, count: int) -> list[int]:
    """The host's ns for each of ``count`` calls, which return when they are done."""
    found = []
    call()
    for _ in range(count):
        begin = time.perf_counter_ns()
        call()
        found.append(time.perf_counter_ns() - begin)
    return found
