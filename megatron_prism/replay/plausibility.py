"""Whether an answer is plausible: what cannot be is a fault of ours, and refused as one.

In : the Timeline of an answer, and that of the captured microbatches where the answer has others.
"""

from __future__ import annotations

import numpy as np

from megatron_prism.core.errors import PrismError
from megatron_prism.replay.microbatches import microbatch_count, starts_of_forwards
from megatron_prism.replay.timeline import Timeline

_STRAYS = 0.2  # of what a captured microbatch takes


def check_plausible(after: Timeline, before: Timeline | None = None) -> None:
    """PrismError if ``after`` computes faster than its machine can, or its microbatches, other ones
    than those of ``before``, take much longer or shorter than captured ones do.
    """
    programs = after.graph.programs
    wanted = microbatch_count(programs)
    wrong = _above_peak(after)
    if before is not None and not wrong:
        more = wanted - microbatch_count(before.graph.programs)
        each = (after.iteration_ns - before.iteration_ns) / more if more else 0
        steady = _steady_ns(before)
        if each and steady and abs(each / steady - 1) > _STRAYS:
            wrong = f"{each / 1e6:,.2f} ms for each other one, {steady / 1e6:,.2f} as captured"
    if wrong:
        raise PrismError(
            f"a fault of ours: {wanted} microbatches of {programs.world} would take {wrong}",
            fix="capture the job with these sizes, and report these slices",
        )


def _above_peak(timeline: Timeline) -> str:
    programs = timeline.graph.programs
    model = programs.source.get("model_flops_per_iteration", "")
    if not model.isdecimal() or not timeline.iteration_ns:
        return ""
    rate = int(model) / timeline.iteration_ns * 1e9 / programs.world.size
    settings = programs.source.get("arguments", "") + programs.source.get("settings", "")
    most = timeline.prices.peak * (2 if "fp8" in settings or "fp4" in settings else 1)
    if not most or rate <= most:
        return ""
    return f"{rate / 1e12:,.0f} TFLOP/s a GPU, of which it has {most / 1e12:,.0f}"


def _steady_ns(timeline: Timeline) -> float:
    """What a microbatch takes between starts of its forwards on the last stage, which warms up
    shortest; 0 if there are too few.
    """
    world, found = timeline.graph.programs.world, 0.0
    for index, program in enumerate(timeline.graph.program_list):
        if world.coordinates(program.rank).pp < world.pp - 1:
            continue
        ops, apart = starts_of_forwards(program, world)
        spans = timeline.spans(index)  # waits have none
        begins = {n: int(spans["start"][np.searchsorted(spans["op"], op)]) for n, op in ops.items()}
        gaps = [(begins[n + apart] - begins[n]) / apart for n in begins if n + apart in begins]
        if gaps and (apart == 1 or len(begins) > 2 * apart):  # two rounds of chunks warm up
            found = max(found, float(np.median(gaps[len(gaps) // 2 :])))
    return found
