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
