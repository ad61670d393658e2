"""Kernels by table: looked up as they were recorded, interpolated, in proportion beyond."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from megatron_prism.cli import main as cli
from megatron_prism.core.errors import UnsupportedError, UsageError
from megatron_prism.core.programs.program_text import parse
from megatron_prism.replay.costs import kernels
from megatron_prism.replay.costs.kernels import (
    MIXED,
    OPS,
    ROOFLINE,
    MeasuredKernel,
    compute_ns,
    parts_of,
)
from megatron_prism.replay.costs.machine import machine, machines
from megatron_prism.replay.uncertainty.interval import RANGES

ROWS = Path(__file__).parents[2] / "benchmarks/results/h200_segments.json"
H200 = dataclasses.replace(machine("h200"), ops="")
OFF = {one.begins: one.high - 1 for one in RANGES}
SIZES = [512, 1024, 2048]


def cube(base):
    """A time for every (m, n, k): a power law, so that interpolation is exact between sizes."""
    times = [base * (m * n * k) / 512**3 for m in SIZES for n in SIZES for k in SIZES]
    return {"axes": [SIZES] * 3, "ns": [round(ns) for ns in times]}


@pytest.fixture
def stored():
    grids = {f"gemm {layout} bfloat16": cube(base)
             for layout, base in (("tn", 1000), ("nn", 2000), ("nt", 3000))}  # fmt: skip
    grids["gemm tn float8_e4m3fn"] = cube(500)
    grids["attention cudnn bfloat16"] = {"axes": [[4, 8], [1024, 2048], [64, 128]],
                                         "ns": [10, 20, 40, 80, 20, 40, 80, 160]}  # fmt: skip
    grids["bmm k bfloat16"] = {"axes": [[8, 16], [1024, 2048], [64, 128]], "ns": [*[7000] * 8]}
    kernels = {"add bfloat16": [[1024, 2000, 2000], [1 << 20, 3000, 5000], [1 << 30, 4e5, 4e5]],
               "fp8_quantize row bfloat16": [[1 << 10, 10000, 10000]]}  # fmt: skip
    return {"device": "X", "source": "X, today", "grids": grids, "kernels": kernels}


@pytest.fixture
def table(tmp_path, stored):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(stored))
    return kernels.read(path)


def ns(table, name, shapes, dtype="bfloat16", flops=0, num_bytes=0):
    return table.ns(MeasuredKernel.parse(name, shapes, dtype, flops, num_bytes))


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (("mm", "512x512,512x512t"), 1000),
        (("mm", "512x512,512x512"), 2000),
        (("mm", "512x512t,512x512t"), None),  # a layout that was not measured
        (("mm", "2048x512,512x1024t"), 8000),
        (("mm", "768x512,512x512t"), 1500),  # between sizes: a power law is met exactly
        (("addmm", "768,512x512,512x768t"), 1500),
        (("mm", "256x512,512x512t"), None),  # below the measured range
        (("mm", "4096x512,512x512t"), 8000),  # above it in proportion
        (("mm", "8192x512,512x4096t"), 128000),
        (("_scaled_mm", "512x512,512x512t", "float8_e5m2"), 500),
        (("gemm", "2x256x512,1024x512,2x256x1024", "bfloat16", 2 * 512**2 * 1024), 2000),
        (("gemm", "512x1024,1024x512,512x512", "bfloat16", 2 * 512**2 * 1024), 4000),
        (("gemm_wgrad", "2048x512,2048x1024,512x1024"), 24000),
        (("grouped_gemm", "512x512,512x512", "bfloat16", 9), None),
        (("bmm", "8x1024x64,8x64x1024t"), 7000),
        (("baddbmm", "8x1024x1024,8x1024x64,8x64x1024t"), 7000),
        (("bmm", "8x1024x64,8x64x2048"), None),  # no attention
        (("attention", "1024x1x4x64,1024x1x4x64", "bfloat16", 2 * 4 * 1024**2 * 64), 10),
        (("attention", "1024x1x4x64,1024x1x4x64", "bfloat16", 4 * 4 * 1024**2 * 64), None),
        (("attention_backward", "1024x1x4x64", "bfloat16", 5 * 4 * 1024**2 * 64), None),
        (("add", "99", "bfloat16", 0, 1 << 20), 4000),
        (("add", "99", "bfloat16", 0, 8), 2000),  # the shortest kernel
        (("add", "99", "bfloat16", 0, 1 << 32), 16e5),  # larger than any that was measured
        (("fp8_quantize", "9,9,9", "bfloat16", 0, 8 << 10), 80000),  # a row and its transpose
        (("fp8_quantize", "3x3,3x3,3x3", "bfloat16", 0, 8 << 10), None),
        (("swiglu", "99", "bfloat16", 0, 1 << 20), 4000),  # moves its data alike
        (("add", "99", "bfloat16", 7, 1 << 20), None),  # it multiplies: no size tells its time
        (("unheard_of", "99", "bfloat16", 0, 1 << 20), None),
        (("mm", ",512"), None),
    ],
)
def test_a_kernel_is_found_as_it_was_recorded(table, kernel, expected):
    found = ns(table, *kernel)
    assert found == (expected if expected is None else pytest.approx(expected, rel=1e-3))


def test_what_torch_records_is_what_the_table_knows(table):
    """Forward and backward of a linear layer, recorded from torch's own autograd."""
    torch = pytest.importorskip("torch")
    from megatron_prism.runtime.devices.live_bytes import LiveBytes
    from megatron_prism.runtime.recorder.shapes_meter import Meter

    live, meter = LiveBytes("meta"), Meter()
    live.meter = meter
    with live:
        x = torch.empty(512, 1024, device="meta", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(2048, 1024, device="meta", dtype=torch.bfloat16, requires_grad=True)
        meter.take()
        out = torch.nn.functional.linear(x, weight)
        forward = meter.take()
        grad = torch.empty_like(out)
        meter.take()
        torch.autograd.grad(out, (x, weight), grad)
        backward = meter.take()
    size = 512 * 1024 * 2048 / 512**3
    parts = parts_of(forward.text(), 0, 0, 0, H200, table)
    assert parts == (pytest.approx(1000 * size), 0, 0, 0, 0)
    by_table = parts_of(backward.text(), 0, 0, 0, H200, table).products
    assert by_table == pytest.approx((2000 + 3000) * size)  # dgrad and wgrad


@pytest.mark.parametrize(
    ("turn", "name"), [(False, "clone_dense"), (True, "clone")], ids=["as it lies", "turned"]
)
def test_a_clone_that_turns_nothing_is_a_copy_of_memory(turn, name):
    """The clones that tables have were measured with heads before rows: 1.9 times as slow."""
    torch = pytest.importorskip("torch")
    from megatron_prism.runtime.recorder.shapes_meter import Meter

    meter = Meter()
    source = torch.empty(4096, 8192, dtype=torch.bfloat16, device="meta")
    source = source.t() if turn else source
    result = source.clone(memory_format=torch.contiguous_format)
    clone = torch.ops.aten.clone.default
    meter.kernel(clone, (source,), {}, result)
    (recorded,) = meter.take().calls
    num_bytes = 2 * source.nbytes
    assert recorded == f"{name}({source.shape[0]}x{source.shape[1]})bfloat16:0:{num_bytes}"

    ops = kernels.read(kernels.FOLDER / "h100.json")
    # a copy into a tensor is recorded with the tensor that changes twice
    as_copy = ns(ops, "copy_", "4096x8192,4096x8192", num_bytes=3 * source.nbytes)
    as_measured = ns(ops, "clone", "4096x8192", num_bytes=num_bytes)
    expected = as_measured if turn else as_copy
    assert ns(ops, name, "4096x8192", num_bytes=num_bytes) == expected
    assert as_measured > 1.5 * as_copy


def test_deterministic_algorithms_fill_what_is_allocated(tmp_path, stored):
    """Once for every tensor, at the rate of zeros; a host launches them with their kernels."""
    torch = pytest.importorskip("torch")
    from megatron_prism.runtime.devices.live_bytes import LiveBytes
    from megatron_prism.runtime.recorder.shapes_meter import Meter

    live, meter, fills = LiveBytes("meta"), Meter(), []
    live.meter = meter
    for on in (False, True):
        torch.use_deterministic_algorithms(on)
        try:
            with live:
                x = torch.empty(512, 1024, device="meta", dtype=torch.bfloat16)
                x.new_empty(0)
                torch.empty_like(x)
        finally:
            torch.use_deterministic_algorithms(False)
        fills.append(meter.take())
    assert [one.kernels for one in fills] == [0, 2]
    stored["kernels"]["zero_ float32"] = [[1 << 21, 700, 900]]
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(stored))
    text = fills[1].text()
    parts = parts_of(text, 0, 0, 0, H200, kernels.read(path))
    assert parts == (0, pytest.approx(2 * 800), 0, 0, 0)


def test_products_of_experts_are_as_many_small_ones():
    """Thirty-two experts of 512 tokens take far longer than one product of 16,384."""
    h200 = kernels.table_of(machine("h200"))
    flops = 2 * 512 * 2048 * 1024
    note = f"grouped_gemm(512x2048,1024x2048,512x1024)bfloat16:{{}}:{8 << 20}"
    one = parts_of(note.format(flops), 0, 0, 1, H200, h200).data_movers
    all_experts = parts_of(note.format(32 * flops), 0, 0, 1, H200, h200).data_movers
    assert all_experts == pytest.approx(32 * one)
    # a start of a kernel less than by itself: Transformer Engine has four streams for them
    single = f"gemm(512x2048,1024x2048,512x1024)bfloat16:{flops}:{8 << 20}"
    alone = parts_of(single, 0, 0, 1, H200, h200).products
    assert 0.5 * alone <= one < alone
    whole = f"gemm(16384x2048,1024x2048,16384x1024)bfloat16:{32 * flops}:{8 << 20}"
    assert all_experts > 1.3 * parts_of(whole, 0, 0, 1, H200, h200).products


def test_products_in_blocks_of_fp8_are_slower():
    """h200_fourteen_alone.json, blockwise: one profiled iteration of twelve layers."""
    h200 = kernels.table_of(machine("h200"))
    shapes = "(8192x2560,13824x2560,8192x13824)float8_e4m3fn"
    flops = 2 * 8192 * 2560 * 13824
    for name, factor in (("gemm", 1.14), ("gemm_wgrad", 1.39)):
        plain, of_blocks = (
            parts_of(f"{called}{shapes}:{flops}:8", 0, 0, 1, H200, h200).products
            for called in (name, f"{name}_block")
        )
        assert of_blocks == pytest.approx(factor * plain)


def test_dropout_and_a_fixed_order_make_attention_longer(tmp_path, stored):
    stored["options"] = {"attention_dropout": 1.5}
    path = tmp_path / "options.json"
    path.write_text(json.dumps(stored))
    shape, flops = "1024x1x4x64", 2 * 4 * 1024**2 * 64
    plain, slower, forward_only = (
        ns(kernels.read(path), name, shape, flops=flops)
        for name in ("attention", "attention_dropout", "attention_backward_dropout")
    )
    assert slower == pytest.approx(1.5 * plain)
    assert forward_only is None  # by its roofline, that of attention_backward
    names = "attention_backward", "attention_backward_dropout_deterministic"
    by_roof = [parts_of(f"{n}(8x8)bfloat16:{10**15}:128", 0, 0, 0, H200, None) for n in names]
    assert by_roof[0] == by_roof[1]


def test_a_machine_without_fp8_refuses_its_products():
    kernel = "gemm(64x64,64x64)float8_e4m3fn:524288:12288"
    with pytest.raises(UnsupportedError, match="no rate of products in FP8"):
        parts_of(kernel, 0, 0, 0, machine("a100"), None)
    assert parts_of(kernel, 0, 0, 0, dataclasses.replace(machine("h100"), ops=""), None).roof


@pytest.mark.parametrize("heads", [4, 64])
def test_few_heads_leave_multiprocessors_idle(heads):
    """132 of them compute blocks of 128 queries; the last of 2,048 see twice as many keys as the
    mean: 64 blocks take as long as the longest, 1,024 as 7.8 mean ones and half of the longest."""
    shape, flops = f"2048x1x{heads}x128", 2 * heads * 2048**2 * 128
    roof = parts_of(f"attention({shape})bfloat16:{flops}:8", 0, 0, 0, H200, None).roof
    mean = flops / (heads * 16) * 132 / H200.flops["attention"] * 1e9
    blocks = max(2.0, heads * 16 / 132 + 1)
    assert roof == pytest.approx(H200.kernel_ns + blocks * mean, rel=1e-3)


HEAD = "prism-program 1\nworld size=1\nprogram ranks=0\n"
KNOWN = "mm(512x512,512x512t)bfloat16:268435456:1572864*2"
UNKNOWN = "mm(99x512,512x512t)bfloat16:51904512:1572864"
FLOPS, BYTES = 2 * 268435456, 2 * 1572864


def compute(tmp_path, stored, note, work):
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"  # a table is read once
    path.write_text(json.dumps(stored))
    (program,) = parse(f"{HEAD}- compute {work} note={json.dumps(note)}\n").programs
    hardware = dataclasses.replace(H200, ops=str(path))
    (times, source), (roof, _) = (compute_ns(program, one) for one in (hardware, H200))
    return int(times[0]), int(source[0]), int(roof[0])


def test_a_segment_is_the_sum_of_its_kernels_and_what_is_missing_is_never_zero(tmp_path, stored):
    two = f"flops={FLOPS} traffic={BYTES} kernels=2"
    assert compute(tmp_path, stored, KNOWN, two)[:2] == (2000, OPS)
    both = f"flops={FLOPS + 51904512} traffic={BYTES + 1572864} kernels=3"
    took, source, _ = compute(tmp_path, stored, f"{KNOWN}; {UNKNOWN}", both)
    by_roof = H200.kernel_ns + round(1e9 * 1572864 / H200.memory_rate)
    assert (took, source) == (2000 + by_roof, MIXED)
    one = "flops=51904512 traffic=1572864 kernels=1"
    took, source, roof = compute(tmp_path, stored, UNKNOWN, one)
    assert took == roof == by_roof
    assert source == ROOFLINE
    more = f"flops={FLOPS} traffic={BYTES} kernels=5"  # three that nobody named
    assert compute(tmp_path, stored, KNOWN, more)[0] == 2000 + 3 * H200.kernel_ns


def test_products_of_a_rank_that_does_little_else_are_slower(tmp_path, stored):
    """As many products as additions, a factor f of 1 + share: f = 1 + f / (f + 1), so f is the
    golden ratio."""
    stored["sustained"] = [{"shape": [1] * 3, "points": [[0.0, 1.0], [1.0, 2.0]]}]
    note = f"{KNOWN}; add(9)bfloat16:0:1024"
    work = f"flops={FLOPS} traffic={BYTES + 1024} kernels=3"
    assert compute(tmp_path, stored, note, work)[0] == pytest.approx(2000 * 2.618, rel=1e-3)
    alone = f"flops={FLOPS} traffic={BYTES} kernels=2"
    assert compute(tmp_path, stored, KNOWN, alone)[0] == 2 * 2000
    stored["sustained"][0]["points"] = [[0.1, 0.9], [1.0, 0.95]]  # noise: none is faster
    assert compute(tmp_path, stored, KNOWN, alone)[0] == 2000


def test_what_the_table_lacks_is_flagged_and_widens_the_range(tmp_path, stored, capsys):
    table, hardware, world = (tmp_path / name for name in ("t.json", "m.json", "w.txt"))
    table.write_text(json.dumps(stored))
    own = json.loads(machines()["h200"].read_text(encoding="utf-8"))
    hardware.write_text(json.dumps({**own, "ops": str(table)}))
    widths, said = [], []
    for note, work in ((KNOWN, f"flops={FLOPS} kernels=2"), (UNKNOWN, "flops=51904512 kernels=1")):
        world.write_text(f"{HEAD}- compute {work} note={json.dumps(note)}\n")
        assert cli.main(["replay", str(world), "--machine", str(hardware), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["iteration_ns"] > 0
        widths.append((found["high_ns"] - found["low_ns"]) / found["iteration_ns"])
        said.append([source["text"] for source in found["sources"]])
    assert said[0][0].startswith("modelled: op table of 8 x H200")
    assert "X, today" in said[0][0]
    assert said[1][0].startswith("modelled: roofline")
    assert widths[1] > widths[0] > 0
    assert OFF["modelled: op table and roofline"] >= OFF["modelled: roofline"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s["kernels"].update({"x": [[5, 1, 1], [5, 2, 2]]}), "do not ascend"),
        (lambda s: s["grids"].update({"g": {"axes": [[1, 2]], "ns": [1]}}), "reshape"),
        (lambda s: s["grids"].update({"g": {"axes": [[2, 1]], "ns": [1, 2]}}), "do not ascend"),
        (
            lambda s: s.update(sustained=[{"shape": [1] * 3, "points": [[0.5, 1], [0.5, 2]]}]),
            "do not ascend",
        ),
    ],
)
def test_tables_that_cannot_be(tmp_path, stored, change, says):
    change(stored)
    path = tmp_path / "x.json"
    path.write_text(json.dumps(stored))
    with pytest.raises(UsageError) as caught:
        kernels.read(path)
    assert says in str(caught.value)


def test_holes_are_not_filled(tmp_path, stored):
    grid = stored["grids"]["gemm tn bfloat16"]
    grid["ns"][0] = None
    path = tmp_path / "x.json"
    path.write_text(json.dumps(stored))
    table = kernels.read(path)
    assert ns(table, "mm", "512x512,512x512t") is None
    assert ns(table, "mm", "513x513,513x513t") is None
    assert math.isclose(ns(table, "mm", "1024x512,512x512t"), 2000, rel_tol=1e-3)


def test_the_shipped_table_says_how_far_off_it_was():
    """Segments of kernels alone, against the same ranks captured on tier meta."""
    rows = json.loads(ROWS.read_text(encoding="utf-8"))["rows"]
    sure = [row for row in rows if row["kernels_alone"] and row["phase"] != "rest"]
    errors = [abs(row["table_ms"] / row["measured_ms"] - 1) for row in sure]
    assert len(errors) >= 6
    assert max(errors) < 0.1
    assert max(row["lacks"] for row in sure) < 0.01


def test_products_in_a_row_take_what_the_table_says_of_sustained_ones():
    """Under the GPU's power limit: both measured on H200, the table's in short bursts."""
    table = kernels.read("h200")
    rates = json.loads((ROWS.parent / "h200_x4_rates.json").read_text(encoding="utf-8"))["gemm"]
    ratios = []
    for row in rates:
        m, k, n = row["m"], row["k"], row["n"]
        for rate, shapes in ((row["forward"], f"{m}x{k},{k}x{n}t"),
                             (row["wgrad"], f"{n}x{m}t,{m}x{k}")):  # fmt: skip
            ratios.append(2 * m * k * n / rate / 1e3 / ns(table, "mm", shapes))
    mean = sum(ratios) / len(ratios)
    assert mean == pytest.approx(table.slowdown(1.0), abs=0.01), ratios
    slower = [table.slowdown(share) for share in (0.0, 0.3, 0.6, 0.8, 1.0)]
    assert slower == sorted(slower)
    assert slower[0] == 1.0
    calm = [float(np.interp(0.3, *points)) for points in table.sustained]
    assert sum(calm) / len(calm) == pytest.approx(0.92, abs=0.01)
