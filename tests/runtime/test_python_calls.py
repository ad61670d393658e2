"""Calls of the job's Python, which a host's time without a GPU follows from."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_prism.runtime.devices.live_bytes import Engine, LiveBytes
from megatron_prism.runtime.recorder.python_calls import (
    BACKWARD_NS,
    CALL_NS,
    KERNEL_NS,
    LOOP_NS,
    PRODUCT_NS,
    UNSEEN_NS,
    PythonCalls,
    host_ns,
)
from megatron_prism.runtime.recorder.shapes_meter import Meter

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def three():
    return [abs(one) for one in each(3)]


def each(count):
    yield from range(count)


def test_functions_count_and_neither_generators_nor_c_do():
    calls = PythonCalls()
    calls.start()
    three()
    three()
    calls.stop()
    three()
    assert calls.take() == 2 + 2 * (sys.version_info < (3, 12))  # a comprehension was a function
    assert calls.take() == 0


def test_what_watches_operators_does_not_count():
    live, calls = LiveBytes("meta"), PythonCalls()
    with live:
        x = torch.ones(4, device="meta")
        calls.start()
        x + x
        calls.stop()
    assert calls.take() == 0


def test_another_profiler_stays():
    calls, other = PythonCalls(), lambda *event: None
    sys.setprofile(other)
    try:
        calls.start()
        three()
        calls.stop()
        assert sys.getprofile() is other
        assert not calls.counts
    finally:
        sys.setprofile(None)
    assert calls.take() == 0


def test_kernels_of_one_call_and_of_the_optimizer_take_less():
    whole = 100 * CALL_NS + 3 * KERNEL_NS + LOOP_NS
    assert host_ns(100, 4, "forward", looped=1) == (whole, whole // 4)
    assert host_ns(100, 4, "optimizer", looped=1)[0] == 100 * CALL_NS + 4 * LOOP_NS


def test_products_of_one_call_take_less_and_those_of_varying_shapes_more():
    whole = 10 * CALL_NS + 2 * KERNEL_NS + 3 * PRODUCT_NS
    assert host_ns(10, 5, "backward", products=3)[0] == whole
    varying = host_ns(10, 5, "backward", products=3, unseen=4)[0]
    assert varying == whole + 4 * UNSEEN_NS
    assert PRODUCT_NS < KERNEL_NS < UNSEEN_NS


def layer(x):
    return torch.relu(x)


def test_backwards_count_where_they_begin_and_not_inside_of_another(monkeypatch):
    """A schedule that runs the backward of each part by itself starts the engine once a part."""
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", Engine())
    meter = Meter()
    x = torch.ones(4, requires_grad=True)
    # one backward of three layers, and one of each
    layer(layer(layer(x))).sum().backward()
    assert meter.take().backwards == 1
    for _ in range(3):
        layer(x).sum().backward()
    assert meter.take().backwards == 3
    # recomputation starts a backward inside of the first
    checkpoint(layer, x, use_reentrant=True).sum().backward()
    assert meter.take().backwards == 1
    # a backward that fails has ended
    with pytest.raises(RuntimeError):
        torch.ones(1).backward()
    layer(x).sum().backward()
    assert meter.take().backwards == 2


def test_the_start_of_a_backward_is_what_traces_have():
    """From Python's thread to the device's and back, on a host of index 0.7."""
    recorded = json.loads((RESULTS / "h100_backwards.json").read_text(encoding="utf-8"))
    tenths, medians = [], []
    for rank in recorded["ranks"]:
        for values, quantile in ((tenths, 0.1), (medians, 0.5)):
            there_us = np.quantile(rank["until_the_device_thread_us"], quantile)
            back_us = np.quantile(rank["until_pythons_thread_us"], quantile)
            values.append((there_us + back_us) * 0.7 / rank["index"])
    # Python's own calls are between the threads' events, too
    assert min(tenths) == pytest.approx(BACKWARD_NS / 1000, rel=0.02)
    assert min(medians) > BACKWARD_NS / 1000
    one_more = host_ns(10, 5, "backward", backwards=1)[0] - host_ns(10, 5, "backward")[0]
    assert one_more == BACKWARD_NS
