"""What the host does of large tensors, and copies between it and the device, take time.

The measured host is that of benchmarks/results/h200_host_work.json; h200_fourteen_alone.json has
two jobs with and without offloading.
"""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from megatron_prism.core.programs.ops import HOST_WORK
from megatron_prism.replay.costs import kernels, machine
from megatron_prism.replay.costs.host_work import copies_beside, host_work
from megatron_prism.replay.costs.kernels import parts_of, scaled_kernels

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
H200 = machine.machine("h200")
A100 = machine.machine("a100")
GH200 = machine.machine("gh200")
GIB = 1 << 30


def test_rates_are_those_of_the_measured_host():
    measured = json.loads((RESULTS / "h200_host_work.json").read_text())
    # of a job's step on eight threads: Adam by itself is faster, on fewer threads by as much
    for threads in (1, 2, 4, 8):
        best, _ = measured["adam"][str(threads)]
        rate = 1e9 / host_work("host_memory", str(threads), 10**9, H200).waited
        assert rate == pytest.approx(best / 2.3, rel=0.3)
    for direction in ("d2h", "h2d"):
        pinned = measured["copies"][f"{direction} pinned 512"]
        assert 1e9 / host_work("host_copy", "", 10**9, H200).waited == pytest.approx(pinned, 0.02)
    unpinned = measured["copies"]["h2d pageable 512"]
    rate = 1e9 / host_work("host_copy_unpinned", "", 10**9, H200).waited
    assert rate == pytest.approx(unpinned, 0.05)


def test_an_older_link_is_slower_and_nvlink_to_the_host_faster():
    waited = [host_work("host_copy", "", GIB, node).waited for node in (A100, H200, GH200)]
    assert waited == sorted(waited, reverse=True)
    assert waited[-1] < waited[1] / 4


def test_without_a_number_of_threads_all_cores_work():
    all_cores = host_work("host_memory", "0", GIB, H200)
    assert all_cores == host_work("host_memory", "", GIB, H200)
    assert all_cores == host_work("host_memory", "64", GIB, H200)


def test_the_device_waits_for_steps_of_the_host_and_not_for_copies_beside():
    kernel = "add(1024x1024)bfloat16:0:6291456"
    alone = parts_of(kernel, 0, 6291456, 1, H200, None)
    steps = parts_of(f"host_memory(8):0:{GIB}; {kernel}", 0, 6291456, 1, H200, None)
    beside = parts_of(f"host_copy_beside():0:{GIB}; {kernel}", 0, 6291456, 1, H200, None)
    # bytes of the host are none of the device's
    assert steps.kernels == beside.kernels == alone.kernels
    assert steps.waited > 10 * alone.kernels
    assert beside.waited == 0
    assert kernels._priced(steps, 1.0)[0] == round(steps.waited + steps.kernels)
    # as long as the longer of both
    assert kernels._priced(beside, 1.0)[0] == beside.beside


def test_more_replicas_step_less_on_the_host():
    note, added_bytes, added_kernels = scaled_kernels(
        "host_memory(8):0:1000; host_copy():0:400", Fraction(1, 4)
    )
    assert note == "host_memory(8):0:250; host_copy():0:100"
    assert (added_bytes, added_kernels) == (0, 0)


def test_copies_beside_are_told_from_kernels():
    assert copies_beside("host_copy_beside():0:8388608; clone(4096x8)bfloat16:0:64")
    assert not copies_beside("host_copy():0:8388608")
    assert not copies_beside("clone(4096x8)bfloat16:0:64")


def test_every_name_that_the_recorder_writes_has_a_price():
    pytest.importorskip("torch")
    from megatron_prism.runtime.recorder import shapes_meter

    written = {
        shapes_meter.HOST_COPY,
        shapes_meter.HOST_COPY_BESIDE,
        shapes_meter.HOST_COPY_UNPINNED,
        shapes_meter.ON_HOST,
    }
    assert written == HOST_WORK
    for kind in HOST_WORK:
        assert sum(host_work(kind, "", GIB, H200)) > 0
