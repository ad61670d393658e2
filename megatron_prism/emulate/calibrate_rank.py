"""How long do calls take on this host, and (``calibrate_overlap``) what when it computes meanwhile?

One process per device, started by ``prism calibrate`` through torch.distributed.run.  Every group
size from 2 to the number of devices that divides it is measured on ranks 0 … n-1, as
``calibrate_calls`` does it.  Rank 0 writes the file.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from megatron_prism.core.artefact import write_whole
from megatron_prism.emulate.calibrate_calls import Behind, Call, in_a_row
from megatron_prism.emulate.calibrate_host import host_calls, middle
from megatron_prism.emulate.calibrate_overlap import overlaps
from megatron_prism.replay.costs.collectives import METHOD

if TYPE_CHECKING:
    from megatron_prism.emulate.signatures import Json
    from megatron_prism.runtime.devices.signatures import Group

__all__ = ["main"]

FORMAT = 1
# bytes of the message; protocols change between two of them (2 MiB take twice as long as 1)
SIZES = tuple(1 << n for n in range(10, 31))
CPU_SIZES = SIZES[:11:2]
SAMPLES, FEW_SAMPLES, LARGE = 64, 24, 1 << 26  # single calls; fewer of large ones
_SMALL = 2.0**-110
LOOKS = 3  # at the host, at least


class _Bench:
    """Measures on this process's device; every rank of the group calls together."""

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available()
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if self.cuda:
            torch.cuda.set_device(local)
        dist.init_process_group("nccl" if self.cuda else "gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda" if self.cuda else "cpu")

    def samples_ns(self) -> Callable[[str, Call, int, Group], list[int]]:
        """Measures (a collective, its call, how often, among which group): ns of each."""
        return Behind() if self.cuda else lambda _, call, count, __: in_a_row(call, count)


def _tensors(bench: _Bench, n: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two of ``size`` bytes, and the n-th part of one."""
    dtype = torch.bfloat16 if bench.cuda else torch.float32
    count = max(n, size // dtype.itemsize // n * n)
    whole, other, part = (
        torch.empty(length, dtype=dtype, device=bench.device)
        for length in (count, count, count // n)
    )
    _fill(whole, other, part)
    return whole, other, part


def _fill(*tensors: torch.Tensor) -> None:
    """Numbers as a job has them: with zeros calls are up to 8 % quicker (H200, 2026-11-22).

    So small that sums of sums of sums stay finite for all calls of a row among 8 ranks.
    """
    for tensor in tensors:
        tensor.normal_(std=_SMALL)


def _calls(
    bench: _Bench, group: Group, n: int, tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> dict[str, Call]:
    """Collective -> a call whose message is the first of ``tensors``, as nccl-tests counts it."""
    whole, other, part = tensors
    calls: dict[str, Call] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
    }
    if bench.cuda:
        calls["reduce_scatter"] = lambda: dist.reduce_scatter_tensor(part, whole, group=group)
        calls["all_to_all"] = lambda: dist.all_to_all_single(other, whole, group=group)
    if n == 2:
        calls |= _messages(bench.rank, group, whole, other)
    return calls


def _messages(rank: int, group: Group, whole: torch.Tensor, other: torch.Tensor) -> dict[str, Call]:
    """One way (send) and both ways at once (exchange) between two ranks, as pipelines do it."""
    peer = 1 - rank
    there, back = (
        dist.P2POp(dist.isend, whole, peer, group),
        dist.P2POp(dist.irecv, other, peer, group),
    )

    def run(ops: list[dist.P2POp]) -> None:
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return {
        "send": lambda: run([there] if rank == 0 else [back]),
        "exchange": lambda: run([there, back]),
    }


def _collectives(bench: _Bench, then: Callable[[], None]) -> list[Json]:
    """Rows of every group size; all ranks call ``then`` after each."""
    rows, measure = [], bench.samples_ns()
    for n in (n for n in range(2, bench.size + 1) if bench.size % n == 0):
        group = dist.new_group(list(range(n)))
        for size in SIZES if bench.cuda else CPU_SIZES:
            if bench.rank < n:
                tensors = _tensors(bench, n, size)
                for name, call in _calls(bench, group, n, tensors).items():
                    _fill(*tensors)
                    count = SAMPLES if size <= LARGE else FEW_SAMPLES
                    if not (samples := measure(name, call, count, group)):
                        continue
                    ns = round(statistics.median(samples))
                    row = {"op": name, "ranks": n, "bytes": size, "ns": ns}
                    rows.append({**row, "samples": sorted(samples)})
        dist.barrier()
        then()
    return rows


def _text(stored: Json) -> str:
    """JSON with a line for each row of measurements."""
    lines = []
    for key, value in stored.items():
        shown = json.dumps(value)
        if isinstance(value, list):
            shown = "[" + ",".join(f"\n  {json.dumps(row)}" for row in value) + "\n ]"
        lines.append(f" {json.dumps(key)}: {shown}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _calls_stage(bench: _Bench) -> Json:
    """What calls take of device and host; the host at several moments."""
    hosts: list[list[Json]] = []

    def look_at_host() -> None:
        hosts.append(host_calls(bench.rank, bench.size) if bench.cuda else [])

    look_at_host()
    rows = _collectives(bench, look_at_host)
    while len(hosts) < LOOKS:
        look_at_host()
    name = torch.cuda.get_device_name() if bench.cuda else "CPU"
    kind = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if bench.cuda else "gloo"
    today = datetime.date.today()
    return {
        "format": FORMAT,
        "method": METHOD,
        "source": f"{bench.size} x {name}, {kind}, torch {torch.__version__}, {today}",
        "collectives": rows,
        "overlap": [],
        "host": middle(hosts),
    }


def _overlap_stage(bench: _Bench) -> list[Json]:
    def calls(size: int) -> dict[str, Call]:
        return _calls(bench, None, bench.size, _tensors(bench, bench.size, size))

    return overlaps(bench.cuda, bench.size, calls)


@record  # so that the launcher shows what went wrong here
def main() -> int:
    """Entry of one process; arguments: the file to write, and the stage."""
    file, stage = sys.argv[1:]
    bench = _Bench()
    if stage == "calls":
        stored = _calls_stage(bench)
    else:
        with open(file, encoding="utf-8") as before:
            stored = json.load(before)
        stored["overlap"] = _overlap_stage(bench)
    if bench.rank == 0:
        write_whole(file, _text(stored), force=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
