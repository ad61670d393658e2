"""How far the host is ahead of its device at every request of an iteration, in launches.

In : what each op takes the host and the device.  Out: launches that are outstanding, for hosts of
several speeds.

The host launches kernels one after the other and the device runs them one after the other.  The
host is held where it waits for the device, and where as many launches are outstanding as CUDA's
queue has room for.  An iteration begins with a device that is through with the one before:
Megatron reads the norm of the gradients behind each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_prism.core.programs.ops import BEGUN, WAITED
from megatron_prism.core.programs.program import Program
from megatron_prism.graph.loops import run
from megatron_prism.memory.allocator import AHEAD


@dataclass(frozen=True)
class OpTimes:
    """What the ops of a program take.

    Attributes:
        host_ns: float64 [ops], of the host.
        device_ns: float64 [ops], of the device's default stream, waiting for other ranks included.
        host_factor: times as long as ``host_ns`` that half of the hosts take at most.
        host_deviation: of the logarithm of that factor.
    """

    host_ns: np.ndarray
    device_ns: np.ndarray
    host_factor: float = 1.0
    host_deviation: float = 0.0


@dataclass(frozen=True)
class LaunchTimes:
    """What the launches of an iteration take.

    Attributes:
        host_ns: for each launch, of the host.
        device_ns: for each launch, of the device.
        waits: numbers of launches behind which the host waits for the device.
    """

    host_ns: Sequence[float]
    device_ns: Sequence[float]
    waits: frozenset[int]

    def leads(self, host_factor: float, queue: int = AHEAD) -> np.ndarray:
        """Return how many launches are outstanding behind each one.

        Args:
            host_factor: times as long as ``host_ns`` that this host takes.
            queue: launches that may be outstanding.

        Returns:
            int64 [launches + 1]; entry n: when the host has made n launches.
        """
        num_launches = len(self.host_ns)
        is_wait = np.zeros(num_launches + 1, dtype=np.int64)
        is_wait[list(self.waits)] = 1
        device_ends = np.zeros(num_launches + 1)  # entry n: the device is through with n launches
        leads = np.zeros(num_launches + 1, dtype=np.int64)
        host_ns = np.asarray(self.host_ns) * host_factor
        device_ns = np.asarray(self.device_ns)
        run(_follow, [host_ns, device_ns, is_wait, queue], [device_ends, leads])
        return leads


def _follow(host_ns, device_ns, is_wait, queue, device_ends, leads):  # type: ignore[no-untyped-def]
    # in a form that runs interpreted and compiled
    num_launches = len(host_ns)
    host_now = 0.0
    num_done = 0
    for number in range(num_launches + 1):
        while num_done < number and device_ends[num_done + 1] <= host_now:
            num_done += 1
        leads[number] = number - num_done
        if number == num_launches:
            break
        # requests between a launch and the wait behind it came before the wait
        if is_wait[number]:
            host_now = max(host_now, device_ends[number])

        # the next launch; a full queue holds the host until there is room
        host_now += host_ns[number]
        if number >= queue:
            host_now = max(host_now, device_ends[number - queue + 1])
        start = max(device_ends[number], host_now)
        device_ends[number + 1] = start + device_ns[number]


def launch_times(program: Program, times: OpTimes) -> LaunchTimes | None:
    """Divide the times of ops among the launches of the recorded iteration.

    Launches of an op take equal parts of its time.  What ops without a launch take comes before the
    next launch.

    Args:
        program: that recorded memory.
        times: of its ops.

    Returns:
        None where the process's requests are not known, or differ from the iteration's.
    """
    _, iteration, _ = cut_history(program.history)
    events = program.allocations[program.allocations["before"] > 0]
    is_move = (iteration[:, 0] >= 0) & (iteration[:, 1] != 0)
    # what is asked for in front of the first op is none of the recorded allocations
    moves = np.flatnonzero(is_move)
    moves = moves[max(0, len(moves) - len(events)) :]
    if not len(events) or not np.array_equal(iteration[moves, 1], events["bytes"]):
        return None
    launches = iteration[:, 3] - iteration[0, 3]
    num_launches = int(launches[-1])
    if not num_launches:
        return None

    # a launch belongs to the op of the first request behind it
    next_move = np.searchsorted(launches[moves], np.arange(1, num_launches + 1))
    next_move = np.minimum(next_move, len(moves) - 1)
    last_op = len(program) - 1
    op_of_launch = np.minimum(events["before"][next_move], last_op)
    waits = launches[iteration[:, 0] == WAITED].tolist()
    return LaunchTimes(
        host_ns=_divided(times.host_ns, op_of_launch),
        device_ns=_divided(times.device_ns, op_of_launch),
        waits=frozenset(waits),
    )


def cut_history(history: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Cut what a process asked for where its last whole iteration begins.

    Args:
        history: rows of ``Program.history``.

    Returns:
        The rows in front of that iteration, its own rows, and its number in the process, from 1.
        Where no iteration begins: all rows, none, and 0.
    """
    begins = np.flatnonzero(history[:, 0] == BEGUN)
    end = len(history)
    # the step behind the recorded one may have begun when its recording ended
    last = end - 1
    if begins.size and begins[-1] == last:
        end = last
        begins = begins[:-1]
    begin = end
    if begins.size:
        begin = int(begins[-1])
    before = history[:begin]
    iteration = history[begin:end]
    return before, iteration, len(begins)


def _divided(op_ns: np.ndarray, op_of_launch: np.ndarray) -> list[float]:
    """Divide what ops take among their launches; ns of each launch."""
    counts = np.bincount(op_of_launch, minlength=len(op_ns))
    launch_ns = op_ns[op_of_launch] / counts[op_of_launch]

    # ops without a launch of their own
    until_op = np.concatenate([[0.0], np.cumsum(op_ns)])
    ops, first_launches = np.unique(op_of_launch, return_index=True)
    previous_end = 0
    for op, first in zip(ops.tolist(), first_launches.tolist(), strict=True):
        launch_ns[first] += max(0.0, until_op[op] - until_op[previous_end])
        previous_end = max(previous_end, op + 1)
    launch_times: list[float] = launch_ns.tolist()
    return launch_times
