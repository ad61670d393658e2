"""What a rank's ops take the host and the device, as the replay of its iteration prices them.

In : a priced world.  Out: ``OpTimes``, from which the host's lead follows (``memory/host_lead``).
"""

from __future__ import annotations

import math
import statistics

import numpy as np

from megatron_prism.core.programs.ops import CODE
from megatron_prism.core.programs.program import Program
from megatron_prism.memory.host_lead import OpTimes
from megatron_prism.replay.costs.host import indices_of
from megatron_prism.replay.priced_graph import PricedGraph
from megatron_prism.replay.uncertainty.interval import HOST_MODEL, HOSTS

_DEVIATIONS = 1.645  # of a normal law, to each side of nine in ten
_SAME_NS = 1000  # a segment that begins so soon behind its launch has waited for the host


def op_times(priced: PricedGraph, rank: int, program: Program) -> OpTimes | None:
    """Find what the ops of a rank take.

    Args:
        priced: the world.
        rank: of the class.
        program: of the rank, as it recorded memory.

    Returns:
        None where the slices do not say what the host takes.
    """
    timeline = priced.timeline
    index = int(timeline.graph.classes.of[rank])
    prices = timeline.prices
    # a what-if may have changed the ops
    if not prices.host or len(timeline.graph.program_list[index]) != len(program):
        return None
    host_ns = prices.lead[index] + prices.host[index]
    # a host that takes no time would let a rank queue its whole iteration at once
    if not host_ns.any():
        return None
    return OpTimes(
        host_ns=host_ns.astype(float),
        device_ns=_device_ns(priced, index),
        host_factor=_middle_host(priced),
        host_deviation=math.hypot(_deviation(HOSTS), _deviation(HOST_MODEL)),
    )


def _deviation(range_of_hosts: tuple[float, float]) -> float:
    """Return the deviation of the logarithm of a range that nine in ten hosts are in."""
    low, high = range_of_hosts
    return math.log(high / low) / (2 * _DEVIATIONS)


def _middle_host(priced: PricedGraph) -> float:
    """Return how many times as long as priced the middle one of the usual hosts takes."""
    middle_index = math.sqrt(HOSTS[0] * HOSTS[1])
    index_of_rank = indices_of(priced.programs.source)
    if not index_of_rank:
        return middle_index
    return middle_index / statistics.median(index_of_rank.values())


def _device_ns(priced: PricedGraph, index: int) -> np.ndarray:
    """Return what ops take the default stream; float64 [ops].

    What the stream waits for in front of a segment, other than for its host, is part of the
    segment: calls, and the ranks that are late for them.
    """
    timeline = priced.timeline
    program = timeline.graph.program_list[index]
    device_ns = np.zeros(len(program))
    launched = {}  # op -> when the host had launched it
    leads = timeline.prices.lead[index]
    for op, start, _ in timeline.host_spans(index).tolist():
        launched[op] = start + int(leads[op])
    main_lane = timeline.lanes.index("main")
    is_segment = program.ops["name"] == CODE["compute"]
    previous_end = 0
    for op, lane, _, start, end in timeline.spans(index).tolist():
        if lane != main_lane or not is_segment[op]:
            continue
        begins = max(previous_end, min(start, launched.get(op, 0)))
        waited_for_host = start <= launched.get(op, -1) + _SAME_NS
        if waited_for_host:
            begins = start
        device_ns[op] = max(0, end - begins)
        previous_end = max(previous_end, end)
    return device_ns
