"""Whether an answer is plausible: what cannot be is a fault of ours, and refused as one.

In : the Timeline of an answer, and that of the captured microbatches where the answer has others.
"""

from __future__ import annotations

import numpy as np

from megatron_prism.core.errors import PrismError
from megatron_prism.replay.microbatches.cut import starts_of_forwards
from megatron_prism.replay.timeline import Timeline

_MOST_STRAY = 0.2  # part of what a captured microbatch takes


def check_plausible(after: Timeline, before: Timeline | None = None) -> None:
    """Refuse an answer that cannot be.

    Args:
        after: The answer.
        before: The timeline of the captured microbatches, where the answer has others.

    Raises:
        PrismError: ``after`` computes faster than its machine can, or a microbatch that it has
            more than ``before`` takes much longer or shorter than a captured one.
    """
    programs = after.graph.programs
    reason = _above_peak(after)
    if before is not None and not reason:
        reason = _stray_microbatches(after, before)
    if not reason:
        return
    raise PrismError(
        f"a fault of ours: {programs.num_microbatches} microbatches of {programs.world} would "
        f"take {reason}",
        fix="capture the job with these sizes, and report these slices",
    )


def _above_peak(timeline: Timeline) -> str:
    """Say by how much a timeline computes faster than its machine can; "" if it does not."""
    programs = timeline.graph.programs
    model_flops = programs.source.get("model_flops_per_iteration", "")
    if not model_flops.isdecimal() or not timeline.iteration_ns:
        return ""
    flops_per_s = int(model_flops) / timeline.iteration_ns * 1e9 / programs.world.size
    # FP8 and FP4 count twice BF16's peak
    peak = timeline.prices.peak
    settings = programs.source.get("arguments", "") + programs.source.get("settings", "")
    if "fp8" in settings or "fp4" in settings:
        peak *= 2
    if not peak or flops_per_s <= peak:
        return ""
    return f"{flops_per_s / 1e12:,.0f} TFLOP/s a GPU, of which it has {peak / 1e12:,.0f}"


def _stray_microbatches(after: Timeline, before: Timeline) -> str:
    """Say what a microbatch takes that is not captured, where that strays; "" where it does not."""
    num_after = after.graph.programs.num_microbatches
    num_before = before.graph.programs.num_microbatches
    num_further = num_after - num_before
    if not num_further:
        return ""
    further_ns = (after.iteration_ns - before.iteration_ns) / num_further
    steady_ns = _steady_ns(before)
    # no time, or too few captured microbatches: nothing to compare
    if not further_ns or not steady_ns:
        return ""
    if abs(further_ns / steady_ns - 1) <= _MOST_STRAY:
        return ""
    return f"{further_ns / 1e6:,.2f} ms for each other one, {steady_ns / 1e6:,.2f} as captured"


def _steady_ns(timeline: Timeline) -> float:
    """Measure what a microbatch takes between starts of its forwards on the last stage.

    The last stage warms up shortest.

    Returns:
        ns; 0 if there are too few microbatches.
    """
    world = timeline.graph.programs.world
    longest_ns = 0.0
    for index, program in enumerate(timeline.graph.program_list):
        if world.coordinates(program.rank).pp < world.pp - 1:
            continue
        first_ops, distance = starts_of_forwards(program, world)
        begin_ns = {}
        spans = timeline.spans(index)  # waits have none
        for microbatch, op in first_ops.items():
            span = np.searchsorted(spans["op"], op)
            begin_ns[microbatch] = int(spans["start"][span])
        gaps_ns = []
        for microbatch, begin in begin_ns.items():
            if microbatch + distance in begin_ns:
                gaps_ns.append((begin_ns[microbatch + distance] - begin) / distance)
        # the first two rounds of chunks warm up
        is_warm = distance == 1 or len(begin_ns) > 2 * distance
        if gaps_ns and is_warm:
            steady_gaps_ns = gaps_ns[len(gaps_ns) // 2 :]
            longest_ns = max(longest_ns, float(np.median(steady_gaps_ns)))
    return longest_ns
