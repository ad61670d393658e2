"""How far the host is ahead: closed forms of steady queues, and times of ops among launches."""

import numpy as np
import pytest

from megatron_prism.core.programs.ops import BEGUN, WAITED
from megatron_prism.core.programs.program import Builder
from megatron_prism.memory.host_lead import LaunchTimes, OpTimes, cut_history, launch_times


def times(number, host, device, waits=()):
    return LaunchTimes([float(host)] * number, [float(device)] * number, frozenset(waits))


def test_a_host_that_is_slower_than_its_device_is_one_launch_ahead():
    assert times(50, host=10, device=4).leads(1.0)[1:].tolist() == [1] * 50


@pytest.mark.parametrize("ratio", [2, 5, 10])
def test_a_faster_host_leaves_the_device_behind_at_the_rate_of_both(ratio):
    """When n launches of 1 ns are made, the device has been busy for n - 1 ns."""
    leads = times(300, host=1, device=ratio).leads(1.0)
    assert leads.tolist() == [0, *(n - (n - 1) // ratio for n in range(1, 301))]


def test_a_slower_host_of_the_same_launches():
    assert times(100, host=1, device=4).leads(4.5).max() == 1


def test_the_queue_holds_the_host():
    leads = times(400, host=1, device=100).leads(1.0, queue=64)
    assert leads.max() == 64
    assert leads[-1] == 64


def test_a_wait_lets_the_device_catch_up():
    leads = times(200, host=1, device=100, waits=[150]).leads(1.0)
    assert leads[150] == 149
    assert leads[151] == 1
    assert leads[200] == 50


def program(*, with_history=True):
    """An op of two launches and one of a single launch, a call without any between them."""
    made = Builder()
    made.add("compute", phase="forward", microbatch=0)
    made.memory(1, 512, "a")
    made.memory(2, 512, "b")
    made.add("compute", phase="forward", microbatch=0)
    made.add("compute", phase="forward", microbatch=0)
    made.memory(3, 512, "c")
    made.add("compute", phase="optimizer")
    rows = [(BEGUN, 0, 0, 70), (1, 512, 0, 71), (2, 512, 0, 72), (3, 512, 0, 73)]
    rows += [(WAITED, 0, 0, 73), (BEGUN, 0, 0, 73)]
    if with_history:
        made.history = np.array(rows, dtype=np.int64)
    return made.build(0)


def test_times_of_ops_are_divided_among_their_launches():
    """What has no launch comes in front of the next one."""
    host = np.array([1.0, 10.0, 3.0, 20.0])
    found = launch_times(program(), OpTimes(host, 2 * host))
    assert found.host_ns == [6.0, 5.0, 23.0]
    assert found.device_ns == [12.0, 10.0, 46.0]
    assert found.waits == {3}


def test_the_last_whole_iteration_of_a_process():
    first, second = [(BEGUN, 0, 0, 0), (1, 5, 0, 1)], [(BEGUN, 0, 0, 2), (2, 6, 0, 3)]
    start, next_step = [(0, 9, 0, 0)], [(BEGUN, 0, 0, 4)]
    whole = np.array(start + first + second + next_step)
    before, iteration, number = cut_history(whole)
    assert before.tolist() == whole[:3].tolist()
    assert iteration.tolist() == whole[3:5].tolist()
    assert number == 2
    # nothing begins but the step behind the recording
    before, iteration, number = cut_history(np.array(start + next_step))
    assert (len(before), len(iteration), number) == (1, 0, 0)


def test_without_the_requests_of_the_process_nothing_is_divided():
    made = program(with_history=False)
    assert launch_times(made, OpTimes(np.ones(len(made)), np.ones(len(made)))) is None
