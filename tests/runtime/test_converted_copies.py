"""What copies between host and device take of the device, on shapes: as ATen's Copy.cu has it."""

import pytest
from helpers import processes

START = """
import torch
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime import devices as tiers
tier = tiers.prepare("meta", ProcessChanges())
N = 1 << 20
device = torch.zeros(N, dtype=torch.bfloat16, device="cuda")
host = torch.zeros(N, dtype=torch.float32)
before = torch.cuda.memory_allocated()
torch.cuda.reset_peak_memory_stats()
"""
# bytes of an element that the device holds meanwhile, and of what stays
CASES = {
    "host.copy_(device, non_blocking=True)": (4, 0),
    "host.copy_(device, True)": (4, 0),
    "host.copy_(device)": (0, 0),
    "device.copy_(host, non_blocking=True)": (4, 0),
    "device.copy_(host)": (0, 0),
    "host.bfloat16().copy_(device, non_blocking=True)": (0, 0),
    "kept = device.to('cpu', torch.float32, non_blocking=True)": (4, 0),
    "kept = device.to('cpu', torch.float32)": (0, 0),
    "kept = device.to('cpu', non_blocking=True)": (0, 0),
    "kept = host.to('cuda', torch.bfloat16, non_blocking=True)": (2 + 4, 2),
    "kept = host.to('cuda', torch.bfloat16)": (2, 2),
    "kept = host.cuda(non_blocking=True)": (4, 4),
}


@pytest.mark.slow
def test_a_copy_that_nobody_waits_for_is_converted_on_the_device():
    lines = [START]
    for code, (most, stays) in CASES.items():
        lines.append(f"""
kept = None
torch.cuda.reset_peak_memory_stats()
{code}
peak = torch.cuda.max_memory_allocated() - before
left = torch.cuda.memory_allocated() - before
assert (peak, left) == ({most} * N, {stays} * N), ({code!r}, peak / N, left / N)
""")
    done = processes.python("\n".join(lines))
    assert done.returncode == 0, done.stdout + done.stderr
