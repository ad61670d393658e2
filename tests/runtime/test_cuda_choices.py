"""Tier meta chooses as CUDA does: fused norms, optimizers that work on all parameters at once."""

import subprocess
import sys

import pytest

CODE = """
import torch
from torch.nn import functional
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime import devices as tiers
live = tiers.prepare("meta", ProcessChanges()).live
device = torch.device("meta")
MIB = 1 << 20
{body}
"""


def run(body):
    words = [sys.executable, "-c", CODE.format(body=body)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
def test_a_norm_keeps_its_input_and_a_number_a_row():
    out = run("""
norm = torch.nn.RMSNorm(1 << 20, dtype=torch.bfloat16, device=device)
x = torch.empty(8, 1 << 20, dtype=torch.bfloat16, device=device, requires_grad=True)
before = live.now
y = norm(x)
print((live.now - before - 8 * 4) / MIB)  # 16 MiB of output; what autograd keeps is there already
live.reset_peak()
y.backward(torch.empty_like(y))
print(x.grad.shape == x.shape, norm.weight.grad.shape == norm.weight.shape)
print((live.peak() - before) / MIB < 16 * 3 + 2 + 1)
mixed = functional.rms_norm(x, (1 << 20,), torch.empty(1 << 20, device=device))
print(mixed.shape == x.shape)
""")
    assert out == ["16.0", "True", "True", "True", "True"]


@pytest.mark.slow
def test_adamw_holds_a_temporary_of_every_parameter():
    out = run("""
parameters = [torch.nn.Parameter(torch.empty(MIB, device=device)) for _ in range(8)]
adam = torch.optim.AdamW(parameters)
for _ in range(2):
    for p in parameters:
        p.grad = torch.empty_like(p)
    adam.step()
live.reset_peak()
before = live.now
adam.step()
print((live.peak() - before) / (4 * MIB))
""")
    assert 8 <= float(out[0]) < 9


@pytest.mark.slow
def test_dropout_keeps_a_mask_of_one_byte_an_element():
    out = run("""
x = torch.empty(MIB, dtype=torch.bfloat16, device=device, requires_grad=True)
before = live.now
y = torch.nn.Dropout(0.1)(x)
print((live.now - before) / MIB, y.grad_fn.name())  # two bytes of output, one of mask
assert functional.dropout(x, 0.0) is x and functional.dropout(x, 0.1, training=False) is x
print(functional.dropout(x, 1.0).shape == x.shape)
""")
    assert out == ["3.0", "NativeDropoutBackward0", "True"]
