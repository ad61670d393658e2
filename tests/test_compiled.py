"""Compiled functions on tier meta: one kernel each, as on a GPU."""

import pytest
import torch

from megatron_prism.slicer.kernels import Meter
from megatron_prism.tiers import compiled, work


@pytest.mark.parametrize(
    ("flops", "kernels", "seen"),
    [
        ((0, 0), 1, "gelu_like(4,4):0:32"),  # what is read and written, not what lies between
        ((0,), 1, "mul(4):0:64"),
        ((0, 8), 2, "mul(4):8:64"),
    ],
)
def test_a_compiled_function_is_one_kernel_unless_it_multiplies_matrices(
    flops, kernels, seen, monkeypatch
):
    meter = Meter()
    monkeypatch.setattr(work, "meter", meter)

    def gelu_like(x):
        for count in flops:
            meter.add("mul", count, 64, [x])
        return x + 1

    x = torch.ones(4)
    assert torch.equal(compiled._compile(gelu_like)(x), x + 1)
    assert torch.equal(compiled._compile(dynamic=True)(gelu_like)(x), x + 1)
    done = meter.take()
    assert done.kernels == 2 * kernels
    assert seen in {text.replace("float32", "") for text in done.calls}
    monkeypatch.setattr(work, "meter", None)
    assert torch.equal(compiled._compile(gelu_like)(x), x + 1)
    assert compiled._compile(torch.nn.Linear) is torch.nn.Linear
