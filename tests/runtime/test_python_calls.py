"""Calls of the job's Python, which a host's time without a GPU follows from."""

import sys

import torch

from megatron_prism.runtime.devices.live_bytes import LiveBytes
from megatron_prism.runtime.recorder.python_calls import (
    CALL_NS,
    KERNEL_NS,
    LOOP_NS,
    PRODUCT_NS,
    UNSEEN_NS,
    PythonCalls,
    host_ns,
)


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
