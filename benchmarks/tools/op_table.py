"""Measure how long the kernels of training steps take on this GPU: a table for ``costs/ops``.

``python -m benchmarks.tools.op_table OUT.json [--limit 140] [--only sustained]``

One GPU, two minutes.  Products (forward, dgrad and wgrad layouts) and batched products and fused
attention are measured on grids of shapes, everything else by size: bytes as the recorder counts
them, because every op is run on ``meta`` under the recorder's own meter first.  A figure is the
median of 20, on the device, while the host is ahead.  Products find L2 flushed (their weights come
from memory); small kernels run in a row, launch gap included, as in a training step.
``--limit``: seconds after which the rest is left out and named.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.tools.op_table_kernels import OPTIMIZER_SIZES, SIZES, kernels, transformer_engine

REPEATS = 20
LONG_NS = 3e6  # of what takes longer fewer repetitions do
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
WIDTHS = (512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 32768)
LARGEST = 1 << 28  # elements of a weight
WIDTHS_FP8 = (1024, 2048, 4096, 8192, 16384)
BATCHES, LENGTHS, SIZES_OF_HEADS = (8, 16, 32, 64), (1024, 2048, 4096, 8192), (64, 128)
HEADS, SEQUENCES = (4, 8, 16, 32, 64), (1024, 2048, 4096, 8192, 16384)
PRODUCTS, SHARES = ((2048, 6144, 4096), (8192, 8192, 8192)), (0.05, 0.3, 0.5, 0.7, 0.85, 1.0)
BLOCK_NS, STEADY_S = 1e7, 1.5
POOL = 1 << 32  # elements: the largest operand and the largest result
Grid = dict[str, Any]


class Bench:
    """Clock, random operands and what has been found so far."""

    def __init__(self, limit: float) -> None:
        self.begin, self.limit = time.monotonic(), limit
        self.left_out: list[str] = []
        self.clocks: list[str] = []
        noise = torch.randn(1 << 27, device="cuda").bfloat16()
        self.pool = noise.repeat(POOL // noise.numel())  # products of zeros would be faster
        self.out = torch.empty(POOL, dtype=torch.bfloat16, device="cuda")
        self.flush = torch.empty(1 << 27, dtype=torch.int8, device="cuda")
        self.gap = 0.0  # what an event pair adds to a short kernel
        a, out = (one[: 1 << 26].view(8192, 8192) for one in (self.pool, self.out))
        end = time.monotonic() + 4  # heat the GPU as a job does
        while time.monotonic() < end:
            for _ in range(20):
                torch.mm(a, a, out=out)
            torch.cuda.synchronize()
        x = self.pool[:1024]
        self.gap = self.cold(x.neg_) - self.hot(x.neg_)

    def over(self, what: str) -> bool:
        """Whether time is up; then ``what`` is left out."""
        if time.monotonic() - self.begin < self.limit:
            return False
        self.left_out.append(what)
        return True

    def cold(self, call: Callable[[], Any], ahead: int = 2_000_000) -> float:
        """Median ns of one call whose data is not in L2; ``ahead``: cycles the host may take."""
        once = self._between(call, 1, ahead, flush=True)[0]
        repeats = REPEATS if once < LONG_NS else 7
        return max(
            1.0, statistics.median(self._between(call, repeats, ahead, flush=True)) - self.gap
        )

    def hot(self, call: Callable[[], Any], ahead: int = 2_000_000) -> float:
        """Median ns of one of several calls in a row."""
        once = self._between(call, 2, ahead)[-1]
        inner = min(20, max(1, round(2e5 / max(once, 1.0))))

        def several() -> None:
            for _ in range(inner):
                call()

        repeats = REPEATS if once < LONG_NS else 7
        return statistics.median(self._between(several, repeats, ahead * 6)) / inner

    def _between(
        self, call: Callable[[], Any], repeats: int, ahead: int, *, flush: bool = False
    ) -> list[float]:
        """ns of each of ``repeats`` calls; the first two are not counted where there are more."""
        drop = 2 if repeats > 1 else 0
        pairs = [
            [torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats + drop)
        ]
        begin = time.perf_counter_ns()
        call()
        issuing = (time.perf_counter_ns() - begin) * len(pairs)
        # the host gets ahead: cycles of at most 2 GHz, with half as many again in reserve
        torch.cuda._sleep(min(max(ahead, 3 * issuing), 4_000_000_000))
        for begin, end in pairs:
            if flush:
                self.flush.zero_()
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e6 for begin, end in pairs[drop:]]

    def note_clock(self, what: str) -> None:
        """What nvidia-smi says of clock, power and heat now, straight after work."""
        query = "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu"
        command = ["nvidia-smi", query, "--format=csv,noheader", "-i", "0"]
        try:
            said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        except (OSError, subprocess.SubprocessError) as error:
            self.clocks.append(f"{what}: unknown ({type(error).__name__})")
        else:
            self.clocks.append(f"{what}: {said.stdout.strip()}")

    def view(
        self, *shape: int, out: bool = False, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """A tensor of that shape in the pool, or where results go."""
        found = (self.out if out else self.pool)[: math.prod(shape)]
        return (found if dtype is None else found.to(dtype)).view(*shape)


def grid(
    bench: Bench,
    name: str,
    axes: Sequence[Sequence[int]],
    make: Callable[..., Callable[[], Any] | None],
    ahead: int = 2_000_000,
) -> Grid:
    """{axes, ns}: one figure per combination, the last axis fastest; None where not measured."""
    found: list[int | None] = []
    for sizes in itertools.product(*axes):
        ns = None
        if not bench.over(f"{name} {'x'.join(map(str, sizes))}"):
            call = make(*sizes)
            ns = None if call is None else round(bench.cold(call, ahead))
        found.append(ns)
    bench.note_clock(name)
    return {"axes": [list(axis) for axis in axes], "ns": found}


def products(bench: Bench) -> dict[str, Grid]:
    """C[m, n] = A[m, k] B[k, n], by how A and B lie in memory: tn is x W^T (forward), nn is dy W
    (dgrad), nt is dy^T x (wgrad)."""

    def layout(which: str) -> Callable[[int, int, int], Callable[[], Any] | None]:
        def make(m: int, n: int, k: int) -> Callable[[], Any] | None:
            weight = m * n if which == "nt" else n * k
            if weight > LARGEST:
                return None
            a = bench.view(k, m).t() if which == "nt" else bench.view(m, k)
            b = bench.view(n, k).t() if which == "tn" else bench.view(k, n)
            out = bench.view(m, n, out=True)
            return lambda: torch.mm(a, b, out=out)

        return make

    forward, wgrad = (TOKENS, WIDTHS, WIDTHS), (WIDTHS, WIDTHS, TOKENS)
    return {
        f"gemm {which} bfloat16": grid(bench, which, axes, layout(which))
        for which, axes in (("tn", forward), ("nn", forward), ("nt", wgrad))
    }


def products_fp8(bench: Bench) -> dict[str, Grid]:
    """The same in FP8, per-tensor scales, bf16 result: every layout is tn there."""
    one = torch.ones((), device="cuda")
    kind = torch.float8_e4m3fn

    def make(m: int, n: int, k: int) -> Callable[[], Any]:
        a, b = bench.view(m, k, dtype=kind), bench.view(n, k, dtype=kind).t()
        return lambda: torch._scaled_mm(
            a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    axes = (TOKENS, WIDTHS_FP8, WIDTHS_FP8)
    return {"gemm tn float8_e4m3fn": grid(bench, "fp8", axes, make)}


def batched(bench: Bench) -> dict[str, Grid]:
    """Attention without a fused kernel: products with two long sides (s) and a short one (d), named
    after the short one.  k: scores, n: their product with values, m: a gradient of keys."""

    def form(which: str) -> Callable[[int, int, int], Callable[[], Any]]:
        def make(b: int, s: int, d: int) -> Callable[[], Any]:
            m, n, k = (d if side == which else s for side in "mnk")
            left = bench.view(b, k, m).transpose(1, 2) if which == "m" else bench.view(b, m, k)
            right = bench.view(b, n, k).transpose(1, 2) if which == "k" else bench.view(b, k, n)
            out = bench.view(b, m, n, out=True)
            return lambda: torch.bmm(left, right, out=out)

        return make

    axes = (BATCHES, LENGTHS, SIZES_OF_HEADS)
    return {f"bmm {w} bfloat16": grid(bench, f"bmm {w}", axes, form(w)) for w in "knm"}


def attention(bench: Bench) -> dict[str, Grid]:
    """Fused causal attention, tensors [s, 1, heads, d] as Megatron's, by cuDNN (what Transformer
    Engine takes on Hopper) and by flash attention 2."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    ways = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash2": SDPBackend.FLASH_ATTENTION}
    found = {}
    for way, backend in ways.items():

        def run(heads: int, s: int, d: int, backend: Any = backend) -> Any:
            shape = (s, 1, heads, d)
            parts = [bench.view(*shape).permute(1, 2, 0, 3).detach() for _ in range(3)]
            q, k, v = (part.requires_grad_() for part in parts)
            with sdpa_kernel(backend):
                call = torch.nn.functional.scaled_dot_product_attention
                return lambda: call(q, k, v, is_causal=True), (q, k, v)

        def forward(heads: int, s: int, d: int, backend: Any = backend) -> Callable[[], Any]:
            call, _ = run(heads, s, d)

            def once() -> None:
                with sdpa_kernel(backend), torch.no_grad():
                    call()

            return once

        def backward(heads: int, s: int, d: int, backend: Any = backend) -> Callable[[], Any]:
            call, inputs = run(heads, s, d)
            with sdpa_kernel(backend):
                out = call()
            gradient = torch.randn_like(out)
            return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)

        axes = (HEADS, SEQUENCES, SIZES_OF_HEADS)
        for name, make in (("attention", forward), ("attention_backward", backward)):
            key = f"{name} {way} bfloat16"
            try:
                found[key] = grid(bench, key, axes, make, ahead=8_000_000)
            except RuntimeError as error:
                bench.left_out.append(f"{key}: {str(error)[:100]}")
    return found


def sustained(bench: Bench) -> list[dict[str, Any]]:
    """By how much products slow down under the power limit, by their share of the time.

    Blocks of about 10 ms, some of it products and the rest additions, go on for ``STEADY_S``; only
    the last third counts.  The factor is over the smallest share, whose clock is the highest.
    """
    found = []
    for m, n, k in PRODUCTS:
        a, b, out = bench.view(m, k), bench.view(n, k).t(), bench.view(m, n, out=True)
        x = bench.view(1 << 27)
        y = torch.empty_like(x)
        one = bench.hot(lambda: torch.mm(a, b, out=out))  # noqa: B023 - called before the loop goes on
        other = bench.hot(lambda: torch.add(x, 1.0, out=y))  # noqa: B023
        points = []
        for share in SHARES:
            products = max(1, round(share * BLOCK_NS / one))
            additions = round(products * one * (1 - share) / share / other)
            block, took = _steady(
                lambda: torch.mm(a, b, out=out),  # noqa: B023
                lambda: torch.add(x, 1.0, out=y),  # noqa: B023
                products,
                additions,
            )
            points.append([took * products / block, took])
        least = points[0][1]
        rows = [[round(share, 4), round(ns / least, 4)] for share, ns in points]
        found.append({"shape": [m, n, k], "ns": round(least), "points": rows})
        bench.note_clock(f"sustained {m}x{n}x{k}")
    return found


def _steady(
    product: Callable[[], Any], addition: Callable[[], Any], products: int, additions: int
) -> tuple[float, float]:
    """(ns of a block, ns of a product in it) once clock and heat have settled."""
    marks, end = [], time.monotonic() + STEADY_S
    while time.monotonic() < end:
        mine = []
        for _ in range(10):
            three = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            three[0].record()
            for _ in range(products):
                product()
            three[1].record()
            for _ in range(additions):
                addition()
            three[2].record()
            mine.append(three)
        marks += mine
        if len(marks) > 20:
            marks[-20][2].synchronize()  # the host stays 20 blocks ahead
    torch.cuda.synchronize()
    late = marks[-len(marks) // 3 :]
    blocks = [first.elapsed_time(last) * 1e6 for first, _, last in late]
    own = [first.elapsed_time(middle) * 1e6 / products for first, middle, _ in late]
    return statistics.median(blocks), statistics.median(own)


def by_size(bench: Bench) -> dict[str, list[list[int]]]:
    """``name dtype`` -> [bytes, ns in a row, ns with L2 flushed], ascending."""
    found: dict[str, dict[int, list[int]]] = {}
    for case in (*kernels(), *transformer_engine()):
        sizes = OPTIMIZER_SIZES if case.large else SIZES
        for size in sizes:
            if size < case.least or bench.over(f"{case.name} {size}"):
                continue
            try:
                key, num_bytes = case.signature(size)
                call = case.make(size, "cuda")
                times = (bench.hot(call, case.ahead), bench.cold(call, case.ahead))
                row = [num_bytes, *map(round, times)]
            except (RuntimeError, ImportError, TypeError, AttributeError) as error:
                bench.left_out.append(f"{case.name} {size}: {str(error)[:100]}")
                break
            found.setdefault(key, {})[num_bytes] = row
            del call
    bench.note_clock("kernels by size")
    return {key: [rows[size] for size in sorted(rows)] for key, rows in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out")
    parser.add_argument("--limit", type=float, default=140)
    parser.add_argument("--only", choices=["sustained"], help="this part alone")
    args = parser.parse_args()
    bench = Bench(args.limit)
    bench.note_clock("warm")
    if args.only:
        rows = {args.only: sustained(bench), "clocks": bench.clocks}
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(rows, file)
        print(rows)
        return 0
    found: dict[str, Any] = {"kernels": by_size(bench), "grids": {}}
    took = {"kernels": time.monotonic() - bench.begin}
    for part in (products, attention, batched, products_fp8):
        try:
            found["grids"] |= part(bench)
        except RuntimeError as error:  # FP8 on a GPU without it: the rest is still worth having
            bench.left_out.append(f"{part.__name__}: {str(error)[:200]}")
        took[part.__name__] = time.monotonic() - bench.begin
    found["sustained"] = sustained(bench)
    name = torch.cuda.get_device_name()
    found = {
        "device": name,
        "source": f"{name}, torch {torch.__version__}, {datetime.date.today()}, medians of 20"
        " (of 7 above 3 ms), benchmarks/tools/op_table.py",
        "clocks": bench.clocks,
        "took_s": {part: round(seconds, 1) for part, seconds in took.items()},
        "left_out": bench.left_out,
        "event_gap_ns": round(bench.gap),
        **found,
    }
    with open(args.out, "w", encoding="utf-8") as file:
        json.dump(found, file)
    counts = {key: len(rows["ns"]) for key, rows in found["grids"].items()}
    print(f"{found['source']}\n{counts}, {len(found['kernels'])} kernels by size")
    print(f"took {found['took_s']}; {bench.clocks}\n{len(bench.left_out)} left out:")
    print("\n".join(bench.left_out[:25]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
