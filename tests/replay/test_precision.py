"""The type in which products compute: what it costs, what MFU is a share of, what is asked."""

import dataclasses
import json
from pathlib import Path

import pytest

from megatron_prism.core.programs.program_text import parse
from megatron_prism.core.programs.slices import open_programs
from megatron_prism.replay.costs.kernels import parts_of, product_type
from megatron_prism.replay.costs.machine import machine, machines
from megatron_prism.replay.costs.precision import precision_of
from megatron_prism.replay.priced_graph import replay
from megatron_prism.replay.rates import rates_of

RATES = Path(__file__).parents[2] / "benchmarks/results/h100_fp32_rates.json"
H100 = machine("h100")
FLOPS = 10**13
ARGUMENTS = {"bf16": '{"given":{"--bf16":""},"others":{}}',
             "fp16": '{"given":{"--fp16":""},"others":{}}',
             "neither": '{"given":{"--lr":"1e-4"},"others":{}}',
             "local": '{"given":{"--transformer-impl":"local"},"others":{}}'}  # fmt: skip


def took(name, dtype, on=H100):
    """ns of one large product."""
    note = f"{name}(4096x4096,4096x4096){dtype}:{FLOPS}:4096"
    return sum(parts_of(note, 0, 0, 0, on, None)) - on.kernel_ns


def job(note="", flops=0, **source):
    programs = parse(
        f"prism-program 1\nworld size=2\nprogram ranks=0,1\n0F compute flops={flops} kernels=1"
        f' traffic=8 note="{note}"\n'
    )
    return dataclasses.replace(programs, source=source)


@pytest.mark.parametrize(
    ("name", "dtype", "kind"),
    [
        ("gemm", "float32", "tf32"),
        ("gemm_wgrad", "float32", "tf32"),
        ("grouped_gemm", "float32", "tf32"),
        ("mm", "float32", "fp32"),
        ("baddbmm", "float32", "fp32"),
        ("mm", "tf32", "tf32"),
        ("gemm", "bfloat16", "bf16"),
        ("gemm", "float8_e4m3fn", "fp8"),
    ],
)
def test_the_type_of_products_decides_their_time(name, dtype, kind):
    assert product_type(name, dtype) == kind
    assert took(name, dtype) == pytest.approx(1e9 * FLOPS / H100.flops[kind], rel=0.15)


def test_rates_of_fp32_operands_are_the_measured_ones():
    stored = json.loads(RATES.read_text(encoding="utf-8"))
    assert "H100" in stored["device"]
    for kind in ("tf32", "fp32"):
        rows = stored[kind]
        # of a layer: a product and its two gradients, by the median of each
        medians = [sorted(row[way] for row in rows)[len(rows) // 2]
                   for way in ("forward", "dgrad", "wgrad")]  # fmt: skip
        mean = 1e12 * len(medians) / sum(1 / rate for rate in medians)
        assert H100.flops[kind] == pytest.approx(mean, rel=0.02)


def test_every_machine_says_both_rates_and_peaks():
    for name in machines():
        one = machine(name)
        for kind in ("tf32", "fp32"):
            assert 0.45 < one.flops[kind] / one.peaks[kind] < 0.8, name
        assert one.flops["fp32"] < one.flops["tf32"] < one.flops["bf16"]


def test_a_machine_without_these_rates_does_not_take_bf16s():
    bare = dataclasses.replace(H100, flops={"bf16": 6e14})
    assert took("gemm", "float32", bare) == pytest.approx(2e9 * FLOPS / 6e14, rel=0.01)
    assert took("mm", "float32", bare) == pytest.approx(16e9 * FLOPS / 6e14, rel=0.01)
    old = dataclasses.replace(bare, generation="volta", flops={"bf16": 1e14, "fp32": 1e13})
    assert took("gemm", "float32", old) == pytest.approx(1e9 * FLOPS / 1e13, rel=0.01)


@pytest.mark.parametrize(
    ("given", "kernel", "kind", "asks"),
    [
        ("neither", "gemm(64x64,64x64)float32:9000:9; mm(64x64,64x64)float32:10:9", "tf32", True),
        ("neither", "mm(64x64,64x64)float32:9000:9; gemm(64x64,64x64)float32:10:9", "fp32", True),
        # a router in fp32 makes no job of fp32
        ("bf16", "gemm(64x64,64x64)bfloat16:9000:9; gemm(64x64,64x64)float32:10:9", "bf16", False),
        ("fp16", "gemm(64x64,64x64)float16:9000:9", "fp16", False),
        # notes say nothing: the settings do
        ("neither", "", "tf32", True),
        ("local", "", "fp32", True),
        ("bf16", "", "bf16", False),
    ],
)
def test_the_job_says_in_which_type_it_computes(given, kernel, kind, asks):
    found = precision_of(job(kernel, arguments=ARGUMENTS[given]))
    assert found.products == kind
    assert found.peak == (kind if kind in ("tf32", "fp32") else "bf16")
    assert bool(found.asks) == asks
    assert not asks or found.asks.endswith("is `--bf16` missing?")
    assert ("TF32" in found.asks) == (kind == "tf32")


def test_programs_without_settings_are_taken_for_bf16():
    assert precision_of(job()).products == "bf16"
    recipe = precision_of(job(settings='{"given":{"bf16":"false"},"others":{}}'))
    assert recipe.asks.endswith("is `bf16=true` missing?")


def test_mfu_is_a_share_of_the_peak_of_its_type():
    def mfu(given, kernel, **changes):
        programs = job(kernel, FLOPS, arguments=ARGUMENTS[given],
                       model_flops_per_iteration=str(FLOPS))  # fmt: skip
        timeline = replay(programs, machine=dataclasses.replace(H100, **changes))
        share = FLOPS / 2 / timeline.iteration_ns * 1e9
        return rates_of(timeline), share

    wide = f"gemm(64x64,64x64)float32:{FLOPS}:9"
    rates, per_gpu = mfu("neither", wide)
    assert rates.mfu.value == pytest.approx(per_gpu / 494.7e12)
    assert "495 TFLOP/s dense tf32" in rates.mfu.basis
    assert "computes in fp32" in rates.precision
    rates, per_gpu = mfu("bf16", wide.replace("float32", "bfloat16"))
    assert rates.mfu.value == pytest.approx(per_gpu / 989.4e12)
    assert "989 TFLOP/s dense bf16" in rates.mfu.basis
    assert rates.precision == ""
    rates, _ = mfu("neither", wide, peaks={})
    assert rates.mfu.value is None
    assert "no peak of the data sheet for tf32" in rates.mfu.basis


def test_replay_and_fit_ask_a_job_in_fp32_for_bf16():
    programs = open_programs(Path(__file__).parents[1] / "golden/slices/dense_pp2")
    text = " ".join(replay(programs, machine="h100").to_text().split())
    assert "is `" not in text
    notes = tuple(text.replace("bfloat16", "float32") for text in programs.programs[0].strings)
    wide = dataclasses.replace(
        programs,
        programs=tuple(
            dataclasses.replace(one, strings=tuple(text.replace("bfloat16", "float32")
                                                   for text in one.strings))
            for one in programs.programs
        ),
        source={**programs.source, "settings": '{"given":{"bf16":"false"},"others":{}}'},
    )  # fmt: skip
    assert notes != programs.programs[0].strings
    text = " ".join(replay(wide, machine="h100").to_text().split())
    assert "is `bf16=true` missing?" in text
    from megatron_prism.features.fit.fit import fit

    assert "is `bf16=true` missing?" in " ".join(fit(wide, machine="h100").to_text().split())


def test_torchs_own_products_follow_its_setting():
    """Of fp32 operands: TF32 only where the job allowed it, by either name of the setting."""
    torch = pytest.importorskip("torch")
    from megatron_prism.runtime.devices import kernels
    from megatron_prism.runtime.devices.live_bytes import LiveBytes
    from megatron_prism.runtime.recorder.shapes_meter import Meter

    def recorded(dtype=torch.float32):
        live, meter = LiveBytes("meta"), Meter()
        live.meter = meter
        with live:
            x = torch.empty(64, 32, device="meta", dtype=dtype)
            out = x @ x.t()
            out.add_(1)
            # torch's handle of cuBLAS also makes apex's gradients of weights
            kernels.meter, before = meter, kernels.meter
            try:
                kernels._accumulate(x, x, torch.empty(32, 32, device="meta", dtype=torch.float32))
            finally:
                kernels.meter = before
        return meter.take().text()

    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    try:
        matmul.allow_tf32 = False
        plain = recorded()
        assert plain.count("float32:") == 3
        assert "gemm_wgrad" not in plain
        matmul.allow_tf32 = True
        assert recorded().count("tf32:") == 2
        assert "add_(64x64)float32" in recorded()
        assert "tf32" not in recorded(torch.bfloat16)
        assert "gemm_wgrad" in recorded(torch.bfloat16)
    finally:
        matmul.allow_tf32 = before
