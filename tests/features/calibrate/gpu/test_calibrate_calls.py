"""What prism calibrate measures behind products is what a call adds, on one device."""

import statistics

import pytest
import torch
from torch import distributed as dist

from megatron_prism.features.calibrate.calibrate import CallTimer


@pytest.fixture(scope="module")
def measure(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield CallTimer()
    dist.destroy_process_group()


def test_a_call_that_does_nothing_takes_next_to_nothing(measure):
    found = measure("all_reduce", lambda: None, 24, None)
    assert statistics.median(found or [0]) < 5_000  # 2.5 us was seen, behind copies of 45 us


def test_copies_take_what_they_take_alone(measure):
    given, taken = (torch.zeros(1 << 28, dtype=torch.uint8, device="cuda") for _ in range(2))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    taken.copy_(given)
    torch.cuda._sleep(3_000_000)
    events[0].record()
    for _ in range(20):
        taken.copy_(given)
    events[1].record()
    torch.cuda.synchronize()
    alone = events[0].elapsed_time(events[1]) * 1e6 / 20
    found = measure("send", lambda: taken.copy_(given), 24, None)
    assert len(found) == 24  # none took as long as nothing
    assert statistics.median(found) == pytest.approx(alone, rel=0.05)
