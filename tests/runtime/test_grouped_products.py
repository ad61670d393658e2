"""Products of experts: a launch each, and what shapes that vary take the host."""

import gzip
import json
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.report import RESULTS
from megatron_prism.core.programs.program_text import parse
from megatron_prism.runtime.devices import kernels
from megatron_prism.runtime.devices.moe_dispatch import counts_vary, loads
from megatron_prism.runtime.recorder.shapes_meter import Meter
from megatron_prism.runtime.te_kernels.product_shapes import unseen_share
from megatron_prism.runtime.te_kernels.products import te_general_grouped_gemm


@pytest.fixture
def meter(monkeypatch):
    made = Meter()
    monkeypatch.setattr(kernels, "meter", made)
    return made


def multiply(counts, dtype=torch.bfloat16):
    """A forward of experts of 64 x 32 on the device of shapes."""
    weights = [torch.empty(64, 32, dtype=dtype, device="meta") for _ in counts]
    inputs = [torch.empty(count, 32, dtype=dtype, device="meta") for count in counts]
    out = [torch.empty(sum(counts), 64, dtype=torch.bfloat16, device="meta")]
    biases = [torch.empty(0, device="meta") for _ in counts]
    te_general_grouped_gemm(weights, True, inputs, False, out, None, counts, biases, single=True)


def test_an_expert_with_tokens_is_a_launch(meter):
    """One traced iteration of 4 experts on 2 x H100 has 4 launches in each of 64 forwards."""
    multiply([5, 7, 4, 9])
    done = meter.take()
    assert (done.kernels, done.products, done.looped) == (4, 3, 0)
    # of its time there is one kernel, as before
    assert sum(done.calls.values()) == 1
    multiply([5, 0, 0, 9])
    done = meter.take()
    assert (done.kernels, done.products) == (2, 1)
    multiply([0, 0])
    assert meter.take().kernels == 1


def test_cutlass_has_one_kernel_for_all_experts(meter, monkeypatch):
    monkeypatch.setenv("NVTE_USE_CUTLASS_GROUPED_GEMM", "1")
    multiply([5, 7, 4, 9])
    assert meter.take().kernels == 1


@pytest.mark.parametrize(
    ("vary", "dtype", "share"),
    [
        (True, torch.bfloat16, unseen_share(1024.0)),
        (False, torch.bfloat16, 0.0),
        (True, torch.uint8, 0.0),
    ],
    ids=["vary", "even", "padded"],
)
def test_products_of_varying_shapes(meter, monkeypatch, vary, dtype, share):
    """Tokens of an expert are padded in FP8."""
    monkeypatch.setattr(loads, "vary", vary)
    multiply([1000, 1024, 1048], dtype)
    done = meter.take()
    assert done.unseen == pytest.approx(3 * share)
    assert done.products == 2


@pytest.mark.parametrize("mean_tokens", [64, 512, 1024, 4096])
def test_shapes_that_the_cache_has_lost(mean_tokens):
    """Drawn counts of tokens in a cache that forgets what was used longest ago."""
    draws = np.random.default_rng(0).exponential(mean_tokens, 40_000).astype(int).tolist()
    kept = OrderedDict()
    num_lost = 0
    for number, count in enumerate(draws):
        # each count is a shape of six products
        is_kept = count in kept
        kept[count] = None
        kept.move_to_end(count)
        if len(kept) > 8_192 // 6:
            kept.popitem(last=False)
        # the first half fills the cache
        if number >= len(draws) // 2:
            num_lost += not is_kept
    assert num_lost / (len(draws) / 2) == pytest.approx(unseen_share(mean_tokens), abs=0.02)


@pytest.mark.parametrize(
    ("fields", "vary"),
    [
        ({"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2}, True),
        ({"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0}, False),
        ({"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 1e-2}, False),
        ({"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 1e-2}, False),
        (
            {
                "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
                "moe_aux_loss_coeff": [0.0, 1e-3],
            },
            True,
        ),
    ],
)
def test_loads_that_an_auxiliary_loss_balances_vary(fields, vary):
    assert counts_vary(SimpleNamespace(**fields)) == vary
    for evens in (
        "moe_router_force_load_balancing",
        "moe_router_enable_expert_bias",
        "moe_pad_expert_input_to_capacity",
    ):
        assert not counts_vary(SimpleNamespace(**fields, **{evens: True}))


RECORDED = json.loads((RESULTS / "h200_one_gpu_hosts.json").read_text(encoding="utf-8"))["jobs"]


@pytest.mark.parametrize("job", RECORDED)
def test_kernels_of_jobs_are_as_many_as_were_launched(job):
    """Sets and copies of memory are no kernels.  Without the experts' own launches 16 experts are
    39 % short, and 32 experts 40 %."""
    file = RESULTS / "without_gpu.json.gz"
    stored = json.loads(gzip.decompress(file.read_bytes()))["one_gpu"][job]
    (program,) = parse(stored["program"]).programs
    counted = int(np.maximum(program.ops["kernels"], 0).sum())
    launched = sum(
        number for name, number in RECORDED[job]["launches"].items() if "LaunchKernel" in name
    )
    assert counted == pytest.approx(launched, rel=0.1)
