"""Work of the host is counted apart from kernels: steps of an optimizer there, and large copies."""

import pytest
import torch

from megatron_prism.core.jobs.job_settings import THREADS_UNKNOWN
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime.devices import cuda
from megatron_prism.runtime.devices.live_bytes import LiveBytes
from megatron_prism.runtime.devices.remap import Remap
from megatron_prism.runtime.recorder.shapes_meter import Meter

NUMBERS = 1 << 20
SMALL = 16


@pytest.fixture
def recorded():
    """Runs a function on tier meta, and returns the work of what it did."""

    def run(step):
        live = LiveBytes("meta")
        live.meter = Meter()
        with ProcessChanges() as changes:
            cuda.replace_functions(changes)
            cuda.set_memory_source(live)
            with Remap("meta", live.host), live:
                step(live.meter)
                return live.meter.take()

    yield run
    cuda.set_memory_source(None)


def test_a_step_of_adam_on_the_host_moves_28_bytes_a_parameter(recorded, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.delenv(THREADS_UNKNOWN, raising=False)

    def step(meter):
        weight, grad, moment, variance = (
            torch.empty(NUMBERS, device="cuda").cpu().pin_memory() for _ in range(4)
        )
        meter.take()
        # what torch.optim.AdamW(…, fused=True) calls
        torch._fused_adamw_(
            [weight],
            [grad],
            [moment],
            [variance],
            [],
            [torch.ones(())],
            lr=1e-4,
            beta1=0.9,
            beta2=0.99,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    work = recorded(step)
    step_bytes = 4  # the number of the step
    assert dict(work.host) == {"host_memory(8)": 28 * NUMBERS + step_bytes}
    assert work.traffic == 0
    assert work.text().startswith("host_memory(8):0:")


def test_copies_count_by_their_bytes_and_small_ones_as_launches(recorded):
    def step(meter):
        weight = torch.empty(NUMBERS, device="cuda")
        copy = weight.cpu()
        meter.take()
        weight.copy_(copy)
        weight.cpu()
        torch.empty(SMALL, device="cuda").copy_(torch.zeros(SMALL))

    assert dict(recorded(step).host) == {"host_copy()": 2 * 4 * NUMBERS}


def test_a_copy_to_another_type_is_converted_on_the_host_first(recorded, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(THREADS_UNKNOWN, "1")

    def step(meter):
        copy = torch.empty(NUMBERS, device="cuda").cpu()
        weight = torch.empty(NUMBERS, device="cuda", dtype=torch.bfloat16)
        meter.take()
        weight.copy_(copy)

    # the job's number of threads is not known: a rank alone has all cores
    assert dict(recorded(step).host) == {
        "host_memory(0)": (4 + 2) * NUMBERS,
        "host_copy_unpinned()": 2 * NUMBERS,
    }


def test_an_asynchronous_copy_to_another_type_is_converted_on_the_device(recorded):
    """As HybridDeviceOptimizer copies its parameters back (hybrid_optimizer.py:124 @0.19.0)."""

    def step(meter):
        copy = torch.empty(NUMBERS, device="cuda").cpu()
        weight = torch.empty(NUMBERS, device="cuda", dtype=torch.bfloat16)
        meter.take()
        weight.copy_(copy, non_blocking=True)

    work = recorded(step)
    assert dict(work.host) == {"host_copy()": 4 * NUMBERS}
    assert work.traffic == (4 + 2) * NUMBERS


def test_copies_of_another_stream_are_beside_the_computing(recorded):
    def step(meter):
        weight = torch.empty(NUMBERS, device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()):
            weight.cpu()

    assert dict(recorded(step).host) == {"host_copy_beside()": 4 * NUMBERS}
