"""How long does NCCL keep the host for a call?  Part of ``prism calibrate`` on GPUs.

Calls go to the process group itself: what ``torch.distributed`` does in Python before is in the
segments of slices, which are recorded from inside the group's methods.  Between two calls a small
model takes a step, as in a job: a call right after another finds all it needs in the CPU's caches.
The step ends with a forward, because backward runs in autograd's thread: a job calls from the
thread that has just launched kernels, not from one that was asleep meanwhile.
And the Python stack is as deep as in a job: torch's Flight Recorder writes it down for every call.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch._C import _distributed_c10d as c10d

__all__ = ["host_calls", "middle"]

Call = Callable[[], dist.Work | None]
Row = dict[str, Any]  # JSON: op, asynchronous, ns, again

_BYTES = 1 << 18
_REPEATS, _CALLS = 7, 20
_DEPTH = 40  # frames above a call in Megatron's forward
_WIDTH = 256  # of the model between calls
_TIMES = {"ns", "again"}


def host_calls(rank: int, size: int) -> list[Row]:
    """Rows {op, asynchronous, ns, again}: medians of ``_REPEATS`` means of ``_CALLS`` calls of this
    rank after a step of the model, and right after such a call (messages: no ``again``).

    Every rank of the default group (``size`` of them) must call it.
    """
    group = dist.distributed_c10d._get_default_group()
    part = torch.zeros(_BYTES // 2 // size, dtype=torch.bfloat16, device="cuda")
    whole, other = (torch.zeros(part.numel() * size, dtype=torch.bfloat16, device="cuda")
                    for _ in range(2))  # fmt: skip
    rows, between = [], _step("cuda")
    for asynchronous in (False, True):
        calls: dict[str, Call] = {
            "all_reduce": _with(c10d.AllreduceOptions, asynchronous, group.allreduce, [whole]),
            "broadcast": _with(c10d.BroadcastOptions, asynchronous, group.broadcast, [whole]),
            "all_gather": _with(
                c10d.AllgatherOptions, asynchronous, group._allgather_base, whole, part
            ),
            "reduce_scatter": _with(
                c10d.ReduceScatterOptions, asynchronous, group._reduce_scatter_base, part, whole
            ),
            "all_to_all": _with(
                c10d.AllToAllOptions, asynchronous, group.alltoall_base, other, whole, [], []
            ),
        }
        for name, call in calls.items():
            ns, again = _host_ns(call, between)
            rows.append({"op": name, "asynchronous": asynchronous, "ns": ns, "again": again})
    ring = [
        dist.P2POp(dist.isend, whole, (rank + 1) % size),
        dist.P2POp(dist.irecv, other, (rank - 1) % size),
    ]
    both, _ = _host_ns(lambda: dist.batch_isend_irecv(ring)[-1], between)
    rows.append({"op": "message", "asynchronous": True, "ns": both // len(ring)})
    return rows


def middle(rounds: Sequence[Sequence[Row]]) -> list[Row]:
    """The rows of several ``host_calls``, each with the medians of its times: a shared host is slow
    or quick for ten seconds at a time, so one moment does not say how it usually is."""
    return [
        rows[0]
        | {
            key: round(statistics.median(row[key] for row in rows))
            for key in _TIMES & rows[0].keys()
        }
        for rows in zip(*rounds, strict=True)
    ]


def _with(
    kind: Callable[[], Any],
    asynchronous: bool,
    method: Callable[..., dist.Work | None],
    *args: object,
) -> Call:
    """The call with its options; ``rootRank`` 0 where there is a root."""
    options = kind()
    options.asyncOp = asynchronous
    return lambda: method(*args, options)


def _step(device: str) -> Callable[[], None]:
    """Backward and forward of a small model: some forty kernels of a few us each."""
    nn, width = torch.nn, _WIDTH
    layer = (nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
    model = nn.Sequential(*layer, nn.Linear(width, width), nn.LayerNorm(width)).to(device)
    given = torch.ones(_WIDTH, _WIDTH, device=device)

    def step() -> None:
        model(given).sum().backward()
        model(given)

    return step


def _host_ns(call: Call, between: Call) -> tuple[int, int]:
    """ns of the host for one call with ``between`` before it, and for one right after that; deep in
    the Python stack."""
    return _below(_DEPTH, lambda: _measured(call, between))


def _below(depth: int, measure: Callable[[], tuple[int, int]]) -> tuple[int, int]:
    return _below(depth - 1, measure) if depth else measure()


def _measured(call: Call, between: Call) -> tuple[int, int]:
    found = []
    for _ in range(_REPEATS + 1):  # the first makes connections
        torch.cuda.synchronize()
        spent = [0, 0]
        for _ in range(_CALLS):
            between()
            for turn in range(len(spent)):
                begin = time.perf_counter_ns()
                work = call()
                spent[turn] += time.perf_counter_ns() - begin
        found.append(spent)
        if work is not None:  # synchronous calls of NCCL's group return none
            work.wait()
    first, again = (round(statistics.median(column)) for column in zip(*found[1:], strict=True))
    return first // _CALLS, again // _CALLS
