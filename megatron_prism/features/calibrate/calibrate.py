"""``prism calibrate``: measure this host's calls, for ``prism replay … --calibration FILE``.

``calibrate`` starts one process per device through torch.distributed.run; ``main`` is one of them.
Every group size from 2 to the number of devices that divides it is measured on ranks 0 … n-1, as
``CallTimer`` does it.  Rank 0 writes the file.
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.console import Console
from torch import distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_prism.core.errors import PrismError, UsageError
from megatron_prism.core.files import check_writable, write_whole
from megatron_prism.emulate import host_benchmark
from megatron_prism.replay.costs.collectives import KINDS
from megatron_prism.replay.costs.nccl_settings import NCCL_ENV, recorded

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import Group

HOST_S = 10  # for the host's index
LIMIT_S = 240  # of a stage
# stage -> its environment: what runs side by side needs hardware queues of its own, or each waits
# for the other; calls by themselves are measured as the user has it
STAGES: dict[str, dict[str, str]] = {"calls": {}, "overlap": {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}}


def calibrate(out: Path, num_processes: int | None, *, force: bool, console: Console) -> None:
    """Start one process per device (``num_processes``: default all, or 2 on CPUs) and write
    ``out``.  One GPU alone tells how long NCCL keeps the host, and no call's own time.

    UsageError if ``out`` is taken or there is nothing to measure; PrismError if a process failed.
    """
    if out.exists() and not force:
        raise UsageError(f"{out} exists and is not overwritten", fix="--force, or another name")
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise UsageError(f"cannot write a file {out}", fix="name another with -o FILE.json")
    check_writable(out.absolute().parent, "-o FILE.json")  # before the minute that it takes
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    count = (devices or 2) if num_processes is None else num_processes
    if count < 1 + (not devices):
        message = f"calls among {count} process{'es' * (count != 1)} without a GPU take no time"
        raise UsageError(message, fix="--processes 2, or --host for this host alone")
    if devices and count > devices:
        raise UsageError(f"{count} processes for {devices} devices", fix=f"--processes {devices}")
    where = f"{count} GPUs through NCCL" if devices else f"{count} CPU processes through gloo"
    what = f"calls among {where}; this takes about a minute"
    if count == 1:
        what = "how long NCCL keeps this host for a call, with one GPU"
    console.print(f"measuring {what}")
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "calibration.json"
        for stage in STAGES if devices > 1 and count > 1 else ("calls",):
            _run(stage, count, part)
        console.print(f"measuring this host for {HOST_S} s")
        index = json.loads(host_benchmark.measure(HOST_S).to_json())
        # rows of it one a line, as the processes wrote them
        text = part.read_text().rstrip().removesuffix("}").rstrip()
        write_whole(out, f"{text},\n {json.dumps(index)[1:-1]}\n}}\n", force=True)
    console.print(f"wrote {out}")
    if count == 1:
        console.print(
            "not measured with one GPU: what calls take, how much they and computing slow each "
            "other down, and which sends wait. Replays model these, and their interval says so.\n"
            "fix: prism calibrate on two or more GPUs"
        )


def _run(stage: str, count: int, part: Path) -> None:
    """One stage, in ``count`` processes; PrismError if one failed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(count), "-m", "megatron_prism.features.calibrate.calibrate"]
    try:
        done = subprocess.run(
            [*command, str(part), stage],
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
            env={**os.environ, **STAGES[stage]},
        )
    except subprocess.TimeoutExpired as error:
        message = f"the calibration made no end within {LIMIT_S} s"
        raise PrismError(message, fix="are all GPUs free and healthy?") from error
    if done.returncode or not part.exists():
        message = f"a process of the calibration failed:\n{done.stderr[-1500:]}"
        raise PrismError(message, fix="run nvidia-smi: are all GPUs free and healthy?")


# -- one of the processes --------------------------------------------------------------------------
ONE_WAY = ("broadcast", "send")

_DROPPED = 4  # spans of the beginning
_PRODUCT, _COPIED = 8192, 1 << 26  # rows; bytes: both sides fill every GPU's cache (B200: 126 MB)
_AHEAD_CYCLES = 3_000_000  # about 2 ms of busy waiting, in which the host gets ahead
_HEAT_S, _COOLS_S = 1.0, 0.1  # of products, if nothing was computed for so long

Call = Callable[[], object]
Mark = tuple[torch.cuda.Event, torch.cuda.Event]


class CallTimer:
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
        this.  Times that are no more than the copies' own are left out.
        """
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


WorkCall = Callable[[], dist.Work | None]
Row = dict[str, Any]  # JSON: op, asynchronous, ns, again

_BYTES = 1 << 18
_REPEATS, _CALLS = 7, 20
_DEPTH = 40  # frames above a call in Megatron's forward
_WIDTH = 256  # of the model between calls
_TIMES = {"ns", "again"}


def host_calls(rank: int, size: int) -> list[Row]:
    """Rows {op, asynchronous, ns, again}: medians of ``_REPEATS`` means of ``_CALLS`` calls of this
    rank after a step of the model, and right after such a call (messages: no ``again``, and among
    one rank none).

    Every rank of the default group (``size`` of them) must call it.
    """
    group = dist.distributed_c10d._get_default_group()
    part = torch.zeros(_BYTES // 2 // size, dtype=torch.bfloat16, device="cuda")
    whole, other = (
        torch.zeros(part.numel() * size, dtype=torch.bfloat16, device="cuda") for _ in range(2)
    )
    rows, between = [], _step("cuda")
    for asynchronous in (False, True):
        calls: dict[str, WorkCall] = {
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
    if size == 1:  # nobody to send to
        return rows
    ring = [
        dist.P2POp(dist.isend, whole, (rank + 1) % size),
        dist.P2POp(dist.irecv, other, (rank - 1) % size),
    ]
    both, _ = _host_ns(lambda: dist.batch_isend_irecv(ring)[-1], between)
    rows.append({"op": "message", "asynchronous": True, "ns": both // len(ring)})
    return rows


def middle(rounds: Sequence[Sequence[Row]]) -> list[Row]:
    """The rows of several ``host_calls``, each with the medians of its times: a shared host is slow
    or quick for ten seconds at a time, so one moment does not say how it usually is.
    """
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
) -> WorkCall:
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


def _host_ns(call: WorkCall, between: WorkCall) -> tuple[int, int]:
    """ns of the host for one call with ``between`` before it, and for one right after that; deep in
    the Python stack.
    """
    return _below(_DEPTH, lambda: _measured(call, between))


def _below(depth: int, measure: Callable[[], tuple[int, int]]) -> tuple[int, int]:
    return _below(depth - 1, measure) if depth else measure()


def _measured(call: WorkCall, between: WorkCall) -> tuple[int, int]:
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


FORMAT = 1
# bytes of the message; protocols change between two of them (2 MiB take twice as long as 1)
SIZES = tuple(1 << n for n in range(10, 31))
CPU_SIZES = SIZES[:11:2]
SAMPLES, FEW_SAMPLES, LARGE = 64, 24, 1 << 26  # single calls; fewer of large ones
_SMALL = 2.0**-110
LOOKS = 3  # at the host, at least
HELD_SIZES = tuple(1 << n for n in (16, 20, 23, 25, 26, 27))
_MOST_HELD, _MOST_SENDS = 1 << 28, 64  # bytes of all sends of a row, and how many
_BUSY_CYCLES, _BUSY_MS = 100_000_000, 20.0  # about 50 ms; sends that do not wait end before


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
        return CallTimer() if self.cuda else lambda _, call, count, __: in_a_row(call, count)


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
    there, back = (
        dist.P2POp(dist.isend, whole, (bench.rank + 1) % n, group),
        dist.P2POp(dist.irecv, other, (bench.rank - 1) % n, group),
    )
    if n == 2:  # one way, as pipelines do it
        calls["send"] = lambda: _message([there] if bench.rank == 0 else [back])
    calls["exchange"] = lambda: _message([there, back])  # round the ring of context parallelism
    return calls


def _message(ops: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def _held(bench: _Bench) -> list[Row]:
    """Rows {bytes, held}: of messages of so many bytes in a row, the bytes whose sends ended while
    their receiver was busy; all ranks call this.
    """
    rows = []
    for size in HELD_SIZES:
        message, _, _ = _tensors(bench, 1, size)
        way, peer = (dist.isend, 1) if bench.rank == 0 else (dist.irecv, 0)
        ops = [dist.P2POp(way, message, peer)]
        count = min(_MOST_SENDS, _MOST_HELD // size)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        if bench.rank < 2:
            _message(ops)  # connections are made now
        dist.barrier()
        torch.cuda.synchronize()
        if bench.rank == 1:
            torch.cuda._sleep(_BUSY_CYCLES)
        marks[0].record()
        for mark in marks[1:] if bench.rank < 2 else ():
            _message(ops)
            mark.record()
        torch.cuda.synchronize()
        if bench.rank == 0:
            ended = sum(marks[0].elapsed_time(mark) < _BUSY_MS for mark in marks[1:])
            rows.append({"bytes": size, "held": ended * size})
    return rows


def _collectives(bench: _Bench, then: Callable[[], None]) -> list[Row]:
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


def _text(stored: Row) -> str:
    """JSON with a line for each row of measurements."""
    lines = []
    for key, value in stored.items():
        shown = json.dumps(value)
        if isinstance(value, list):
            shown = "[" + ",".join(f"\n  {json.dumps(row)}" for row in value) + "\n ]"
        lines.append(f" {json.dumps(key)}: {shown}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _calls_stage(bench: _Bench) -> Row:
    """What calls take of device and host; the host at several moments."""
    hosts: list[list[Row]] = []

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
        "source": f"{bench.size} x {name}, {kind}, torch {torch.__version__}, {today}",
        NCCL_ENV: recorded(),
        "collectives": rows,
        "overlap": [],
        "host": middle(hosts),
        "held": _held(bench) if bench.cuda and bench.size > 1 else [],
    }


def _overlap_stage(bench: _Bench) -> list[Row]:
    def calls(size: int) -> dict[str, Call]:
        return _calls(bench, None, bench.size, _tensors(bench, bench.size, size))

    return overlaps(bench.size, calls)


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


# Measure how much computing and a call slow each other down while both run.
#
# A part of ``prism calibrate``. A GPU's clock follows its heat and power within some ten
# milliseconds, so "alone" and "together" measured one after the other compare two clocks (an
# earlier version found factors below 1 that way). Here one uninterrupted queue alternates two
# short phases, which differ in one thing only: a call with computing behind it, and a call with
# computing beside it that begins a moment later. That is how Megatron overlaps them. A call
# launched into the middle of computing waits for room first, and an earlier version took that for
# slowness (2.3 times for 16 MiB, where the job's calls were 1.05 times as long; 4 x H200,
# 2026-11-22). The result is the median over rounds.
#
# Streams need hardware queues of their own (CUDA_DEVICE_MAX_CONNECTIONS): with one for all,
# factors came out as 1.0 from 64 MiB on, so nothing ran side by side (same day; the cause is
# assumed).
#
# Computing is of three kinds: ``gemm``, products that fill the GPU, ``memory``, additions that take
# all of its memory's rate, and ``attention``, the fused one that context parallelism has beside its
# exchanges.

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "exchange")
OVERLAP_SIZES = (1 << 24, 1 << 26, 1 << 28)  # bytes of the message
# Transformer Engine's kernels first
_FUSED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
ROUNDS, DROPPED = 26, 2
_LONGER = 2.5  # computing lasts that much longer than a call, so that it covers a slow one
_OVERLAP_AHEAD_CYCLES = 60_000_000  # 30 ms of busy waiting, in which the host gets ahead
_HEAD_CYCLES = 20_000  # 10 us that a call has for its launch before computing begins
_LEAST_NS = 30_000  # of both side by side; less says nothing beside that head
_OVERLAP_HEAT_S = 2.0
_MOST = 0.9  # of either that the other can take; noise must not become a huge factor


class OverlapRound(NamedTuple):
    """ns of a call and of computing, one behind the other and side by side; for how long both
    ran; whether computing outlasted the call.
    """

    call: float
    compute: float
    call_beside: float
    compute_beside: float
    both: float
    covered: bool


def overlaps(size: int, calls: Callable[[int], Mapping[str, Call]]) -> list[Row]:
    """Rows of factors, as ``read_overlap`` reads them; every rank of the world takes part.

    ``calls`` gives the calls of messages of so many bytes, by name.
    """
    compute = _computing()
    _heat(compute["gemm"])
    rows = []
    for num_bytes in OVERLAP_SIZES:
        for name, kind in itertools.product(OPS, KINDS):
            call = calls(num_bytes).get(name)  # anew each time: sums of sums grow
            found = _on_device(compute[kind], call) if call is not None else None
            if found is not None:
                first, second, counted = found
                row = {"op": name, "ranks": size, "bytes": num_bytes, "kind": kind}
                factors = {"compute": round(first, 4), "call": round(second, 4)}
                rows.append({**row, **factors, "rounds": counted})
    return rows


def _computing() -> dict[str, Call]:
    attend = torch.nn.functional.scaled_dot_product_attention
    a = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(a)
    x = torch.randn(1 << 27, device="cuda").bfloat16()
    y = torch.empty_like(x)
    q = torch.randn(1, 32, 4096, 128, dtype=torch.bfloat16, device="cuda")  # batch, head, row

    def attention() -> None:
        with sdpa_kernel(_FUSED, set_priority=True):
            attend(q, q, q, is_causal=True)

    return {
        "gemm": lambda: torch.mm(a, a, out=out),
        "memory": lambda: torch.add(x, 1.0, out=y),
        "attention": attention,
    }


def _heat(product: Call) -> None:
    end = time.monotonic() + _OVERLAP_HEAT_S
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
    torch.cuda._sleep(_OVERLAP_AHEAD_CYCLES)
    phases = _Phases(side, call, lambda: _times(count, compute), lambda: dist.all_reduce(word))
    marks = [phases.round(bool(number % 2)) for number in range(ROUNDS)]
    torch.cuda.synchronize()
    return _medians(_call_first([_round_of(one) for one in marks][DROPPED:]))


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


def _round_of(marks: list[list[torch.cuda.Event]]) -> OverlapRound:
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


if __name__ == "__main__":
    sys.exit(main())
