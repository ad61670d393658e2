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
from megatron_prism.emulate.capture import host_benchmark
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
    devices = 0
    if torch.cuda.is_available():
        devices = torch.cuda.device_count()
    count = num_processes
    if count is None:
        count = devices or 2
    # one GPU still tells how long NCCL keeps the host; one CPU process tells nothing
    if count < 1 + (not devices):
        message = f"calls among {count} process{'es' * (count != 1)} without a GPU take no time"
        raise UsageError(message, fix="--processes 2, or --host for this host alone")
    if devices and count > devices:
        raise UsageError(f"{count} processes for {devices} devices", fix=f"--processes {devices}")
    participants = f"{count} CPU processes through gloo"
    if devices:
        participants = f"{count} GPUs through NCCL"
    subject = f"calls among {participants}; this takes about a minute"
    if count == 1:
        subject = "how long NCCL keeps this host for a call, with one GPU"
    console.print(f"measuring {subject}")
    # only streams of a GPU run side by side, and one GPU has no calls that take time
    stages = ["calls"]
    if devices > 1 and count > 1:
        stages = list(STAGES)
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "calibration.json"
        for stage in stages:
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
    # a GPU that hangs would hold the command for ever
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
        self._from = torch.zeros(_COPIED, dtype=torch.uint8, device="cuda")
        self._to = torch.zeros_like(self._from)
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
        # in turn, so that both spans see the same clock of the GPU
        spans_without, spans_with = [], []
        for _ in range(count + _DROPPED):
            spans_without.append(self._span(None, group))
            spans_with.append(self._span(call, group))
        torch.cuda.synchronize()
        without_call = _span_ns(spans_without[_DROPPED:])
        with_call = _span_ns(spans_with[_DROPPED:])
        self._used = time.monotonic()
        return of_all_ranks(name, with_call - without_call.median(), group)

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
        begin, end = _events(2)
        # the copies begin behind a product, so the host is ahead of the device
        self._compute()
        dist.all_reduce(self._word, group=group)
        begin.record()
        self._to.copy_(self._from)
        if call is not None:
            call()
        self._to.copy_(self._from)
        end.record()
        return begin, end


def _span_ns(spans: Sequence[Mark]) -> torch.Tensor:
    """What the device took between two marks: float32 [spans], in ns."""
    return torch.tensor([begin.elapsed_time(end) * 1e6 for begin, end in spans], device="cuda")


def _events(count: int) -> list[torch.cuda.Event]:
    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]


def of_all_ranks(name: str, spent: torch.Tensor, group: Group) -> list[int]:
    """ns of each call that took any time, from what it took this rank (float [calls])."""
    # a collective begins with its last member, which waits least; what goes one way ends with the
    # receiver, and the sender may end long before
    op = dist.ReduceOp.MIN
    if name in ONE_WAY:
        op = dist.ReduceOp.MAX
    dist.all_reduce(spent, op=op, group=group)
    return [round(ns) for ns in spent.tolist() if ns >= 1]


def in_a_row(call: Call, count: int) -> list[int]:
    """The host's ns for each of ``count`` calls, which return when they are done."""
    call_ns = []
    call()  # connections are made now
    for _ in range(count):
        begin = time.perf_counter_ns()
        call()
        call_ns.append(time.perf_counter_ns() - begin)
    return call_ns


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
    message = torch.zeros(part.numel() * size, dtype=torch.bfloat16, device="cuda")
    received = torch.zeros_like(message)
    rows = []
    between = _step("cuda")
    for asynchronous in (False, True):
        calls: dict[str, WorkCall] = {
            "all_reduce": _with(c10d.AllreduceOptions, asynchronous, group.allreduce, [message]),
            "broadcast": _with(c10d.BroadcastOptions, asynchronous, group.broadcast, [message]),
            "all_gather": _with(
                c10d.AllgatherOptions, asynchronous, group._allgather_base, message, part
            ),
            "reduce_scatter": _with(
                c10d.ReduceScatterOptions,
                asynchronous,
                group._reduce_scatter_base,
                part,
                message,
            ),
            "all_to_all": _with(
                c10d.AllToAllOptions,
                asynchronous,
                group.alltoall_base,
                received,
                message,
                [],
                [],
            ),
        }
        for name, call in calls.items():
            ns, again = _host_ns(call, between)
            rows.append({"op": name, "asynchronous": asynchronous, "ns": ns, "again": again})
    if size == 1:  # nobody to send to
        return rows
    ring = [
        dist.P2POp(dist.isend, message, (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    batch_ns, _ = _host_ns(lambda: dist.batch_isend_irecv(ring)[-1], between)
    rows.append({"op": "message", "asynchronous": True, "ns": batch_ns // len(ring)})
    return rows


def middle(rounds: Sequence[Sequence[Row]]) -> list[Row]:
    """The rows of several ``host_calls``, each with the medians of its times: a shared host is slow
    or quick for ten seconds at a time, so one moment does not say how it usually is.
    """
    middles = []
    # the same call of all rounds
    for rows_of_call in zip(*rounds, strict=True):
        middle_row = dict(rows_of_call[0])
        for key in _TIMES & middle_row.keys():
            middle_row[key] = round(statistics.median(row[key] for row in rows_of_call))
        middles.append(middle_row)
    return middles


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
    inputs = torch.ones(_WIDTH, _WIDTH, device=device)

    def step() -> None:
        model(inputs).sum().backward()
        model(inputs)

    return step


def _host_ns(call: WorkCall, between: WorkCall) -> tuple[int, int]:
    """ns of the host for one call with ``between`` before it, and for one right after that; deep in
    the Python stack.
    """
    return _below(_DEPTH, lambda: _measured(call, between))


def _below(depth: int, measure: Callable[[], tuple[int, int]]) -> tuple[int, int]:
    """What ``measure`` returns, called below so many frames of the Python stack."""
    if depth == 0:
        return measure()
    return _below(depth - 1, measure)


def _measured(call: WorkCall, between: WorkCall) -> tuple[int, int]:
    """The two times of ``_host_ns``: medians of the repeats."""
    repeats = []
    for _ in range(_REPEATS + 1):  # the first makes connections
        torch.cuda.synchronize()
        spent = [0, 0]  # behind a step, and right behind a call
        for _ in range(_CALLS):
            between()
            for turn in range(len(spent)):
                begin = time.perf_counter_ns()
                work = call()
                spent[turn] += time.perf_counter_ns() - begin
        repeats.append(spent)
        if work is not None:  # synchronous calls of NCCL's group return none
            work.wait()
    first = round(statistics.median(first for first, _ in repeats[1:]))
    again = round(statistics.median(again for _, again in repeats[1:]))
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
        backend = "gloo"
        self.device = torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(local)
            backend = "nccl"
            self.device = torch.device("cuda")
        dist.init_process_group(backend)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def samples_ns(self) -> Callable[[str, Call, int, Group], list[int]]:
        """Measures (a collective, its call, how often, among which group): ns of each."""
        if self.cuda:
            return CallTimer()
        # calls of gloo return when they are done
        return lambda _, call, count, __: in_a_row(call, count)


def _tensors(bench: _Bench, n: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two of ``size`` bytes, and the n-th part of one."""
    # tensors as training has them: bf16 on GPUs, fp32 on a CPU
    dtype = torch.float32
    if bench.cuda:
        dtype = torch.bfloat16
    count = max(n, size // dtype.itemsize // n * n)
    message = torch.empty(count, dtype=dtype, device=bench.device)
    received = torch.empty_like(message)
    part = torch.empty(count // n, dtype=dtype, device=bench.device)
    _fill(message, received, part)
    return message, received, part


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
    message, received, part = tensors
    calls: dict[str, Call] = {
        "all_reduce": lambda: dist.all_reduce(message, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(message, part, group=group),
        "broadcast": lambda: dist.broadcast(message, 0, group=group),
    }
    if bench.cuda:
        calls["reduce_scatter"] = lambda: dist.reduce_scatter_tensor(part, message, group=group)
        calls["all_to_all"] = lambda: dist.all_to_all_single(received, message, group=group)
    send = dist.P2POp(dist.isend, message, (bench.rank + 1) % n, group)
    receive = dist.P2POp(dist.irecv, received, (bench.rank - 1) % n, group)
    # one way, as pipelines do it
    if n == 2:
        own_side = receive
        if bench.rank == 0:
            own_side = send
        calls["send"] = lambda: _message([own_side])
    calls["exchange"] = lambda: _message([send, receive])  # round the ring of context parallelism
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
        ops = [dist.P2POp(dist.irecv, message, 0)]
        if bench.rank == 0:
            ops = [dist.P2POp(dist.isend, message, 1)]
        count = min(_MOST_SENDS, _MOST_HELD // size)
        marks = _events(count + 1)
        takes_part = bench.rank < 2
        if takes_part:
            _message(ops)  # connections are made now
        dist.barrier()
        torch.cuda.synchronize()
        if bench.rank == 1:
            torch.cuda._sleep(_BUSY_CYCLES)
        marks[0].record()
        if takes_part:
            for mark in marks[1:]:
                _message(ops)
                mark.record()
        torch.cuda.synchronize()
        if bench.rank == 0:
            # sends that waited for the receiver end after its 50 ms
            ended = sum(marks[0].elapsed_time(mark) < _BUSY_MS for mark in marks[1:])
            rows.append({"bytes": size, "held": ended * size})
    return rows


def _collectives(bench: _Bench, then: Callable[[], None]) -> list[Row]:
    """Rows of every group size; all ranks call ``then`` after each."""
    rows = []
    measure = bench.samples_ns()
    sizes = CPU_SIZES
    if bench.cuda:
        sizes = SIZES
    for n in range(2, bench.size + 1):
        if bench.size % n != 0:
            continue
        group = dist.new_group(list(range(n)))
        # ranks outside of the group wait at the barrier
        if bench.rank < n:
            for size in sizes:
                rows += _rows_of_size(bench, group, n, size, measure)
        dist.barrier()
        then()
    return rows


def _rows_of_size(
    bench: _Bench,
    group: Group,
    n: int,
    size: int,
    measure: Callable[[str, Call, int, Group], list[int]],
) -> list[Row]:
    """Rows {op, ranks, bytes, ns, samples} of each collective with messages of ``size`` bytes."""
    # large messages take long, so they get fewer samples
    count = SAMPLES
    if size > LARGE:
        count = FEW_SAMPLES
    rows = []
    tensors = _tensors(bench, n, size)
    for name, call in _calls(bench, group, n, tensors).items():
        _fill(*tensors)
        samples = measure(name, call, count, group)
        # nothing was above what the copies alone take
        if not samples:
            continue
        ns = round(statistics.median(samples))
        row = {"op": name, "ranks": n, "bytes": size, "ns": ns}
        rows.append({**row, "samples": sorted(samples)})
    return rows


def _text(stored: Row) -> str:
    """JSON with a line for each row of measurements."""
    lines = []
    for key, value in stored.items():
        shown = json.dumps(value)
        # a list of measurements has a row a line
        if isinstance(value, list):
            shown = "[" + ",".join(f"\n  {json.dumps(row)}" for row in value) + "\n ]"
        lines.append(f" {json.dumps(key)}: {shown}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _calls_stage(bench: _Bench) -> Row:
    """What calls take of device and host; the host at several moments."""
    hosts: list[list[Row]] = []

    def look_at_host() -> None:
        looked: list[Row] = []
        if bench.cuda:
            looked = host_calls(bench.rank, bench.size)
        hosts.append(looked)

    look_at_host()
    rows = _collectives(bench, look_at_host)
    # a shared host is looked at several times, some of them between the calls
    while len(hosts) < LOOKS:
        look_at_host()
    device_name = "CPU"
    library = "gloo"
    # without a GPU the calls are gloo's
    if bench.cuda:
        device_name = torch.cuda.get_device_name()
        library = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    # what communicators hold of the device
    held = []
    if bench.cuda and bench.size > 1:
        held = _held(bench)
    today = datetime.date.today()
    return {
        "format": FORMAT,
        "source": f"{bench.size} x {device_name}, {library}, torch {torch.__version__}, {today}",
        NCCL_ENV: recorded(),
        "collectives": rows,
        "overlap": [],
        "host": middle(hosts),
        "held": held,
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
        # the second stage adds to what the first has written
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
            if call is None:
                continue
            factors = _on_device(compute[kind], call)
            # in no round did the two run side by side long enough
            if factors is None:
                continue
            compute_factor, call_factor, counted_rounds = factors
            rows.append(
                {
                    "op": name,
                    "ranks": size,
                    "bytes": num_bytes,
                    "kind": kind,
                    "compute": round(compute_factor, 4),
                    "call": round(call_factor, 4),
                    "rounds": counted_rounds,
                }
            )
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
    slowest = torch.tensor(times, dtype=torch.float64)
    if dist.get_backend() == "nccl":
        slowest = slowest.cuda()
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [max(1.0, ns) for ns in slowest.tolist()]


def _medians(pairs: list[tuple[float, float]]) -> tuple[float, float, int] | None:
    """(factor of computing, factor of the call, rounds counted); None if no round counts."""
    if not pairs:
        return None
    first, second = zip(*pairs, strict=True)
    return statistics.median(first), statistics.median(second), len(pairs)


# -- on a GPU -------------------------------------------------------------------------------------
def _on_device(compute: Call, call: Call) -> tuple[float, float, int] | None:
    """Factors of computing and of the call, and the rounds counted, as ``_medians`` has them."""
    side, word = torch.cuda.Stream(), torch.zeros(1, device="cuda")
    own_compute_ns = _between(lambda: _times(10, compute)) / 10
    own_call_ns = _between(lambda: _times(2, call)) / 2
    compute_ns, call_ns = _slowest(own_compute_ns, own_call_ns)
    # the same on every rank, or clocks part
    count = math.ceil(_LONGER * call_ns / compute_ns) + 1
    torch.cuda.synchronize()
    torch.cuda._sleep(_OVERLAP_AHEAD_CYCLES)
    phases = _Phases(side, call, lambda: _times(count, compute), lambda: dist.all_reduce(word))
    marks = [phases.round(bool(number % 2)) for number in range(ROUNDS)]
    torch.cuda.synchronize()
    rounds = [_round_of(marks_of_round) for marks_of_round in marks[DROPPED:]]
    return _medians(_slowdowns(rounds))


def _times(count: int, call: Call) -> None:
    for _ in range(count):
        call()


def _between(call: Call) -> float:
    """ns of the second of two runs."""
    call()
    begin, end = _events(2)
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
        # the order changes from round to round, so that a drift of the clock meets both
        if beside_first:
            beside = self._phase(beside=True)
            behind = self._phase(beside=False)
        else:
            behind = self._phase(beside=False)
            beside = self._phase(beside=True)
        return [behind, beside]

    def _phase(self, beside: bool) -> list[torch.cuda.Event]:
        """[the call begins, ends, computing begins, ends]."""
        main = torch.cuda.current_stream()
        marks = _events(4)
        self.meet()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            marks[0].record()
            self.call()
            marks[1].record()
        # behind: computing begins when the call has ended
        if not beside:
            main.wait_stream(self.side)
        # the head of the stream is held until all is issued
        torch.cuda._sleep(_HEAD_CYCLES)
        marks[2].record()
        self.compute()
        marks[3].record()
        main.wait_stream(self.side)
        return marks


def _round_of(marks: list[list[torch.cuda.Event]]) -> OverlapRound:
    """Times of a round, from the marks of ``_Phases.round``."""
    behind, beside = marks
    call_begins, call_ends, compute_begins, compute_ends = beside
    return OverlapRound(
        call=behind[0].elapsed_time(behind[1]) * 1e6,
        compute=behind[2].elapsed_time(behind[3]) * 1e6,
        call_beside=call_begins.elapsed_time(call_ends) * 1e6,
        compute_beside=compute_begins.elapsed_time(compute_ends) * 1e6,
        both=compute_begins.elapsed_time(call_ends) * 1e6,
        covered=call_ends.elapsed_time(compute_ends) >= 0,
    )


def _slowdowns(rounds: list[OverlapRound]) -> list[tuple[float, float]]:
    """Factors (of computing, of the call) of the rounds that count."""
    factors = []
    for round_ in rounds:
        # a call that outlasts computing ran alone at its end, and a short overlap is mostly head
        if not round_.covered or round_.both < _LEAST_NS:
            continue
        compute_share = _lost_share(round_.compute_beside - round_.compute, round_.both)
        call_share = _lost_share(round_.call_beside - round_.call, round_.both)
        factors.append((1 / (1 - compute_share), 1 / (1 - call_share)))
    return factors


def _lost_share(lost_ns: float, both_ns: float) -> float:
    """What was lost, as a share of the time in which both ran: 0 to ``_MOST``."""
    return min(max(lost_ns / both_ns, 0.0), _MOST)


if __name__ == "__main__":
    sys.exit(main())
