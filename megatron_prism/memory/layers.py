"""The memory of a rank with many equal layers, from the same rank with few and with some more.

In : two programs that differ in their numbers of layers.  Out: bytes.  The most that is allocated
in each step is linear in the layers, so the step of the peak may be another one than with few.
"""

from __future__ import annotations

import numpy as np

from megatron_prism.core.programs.program import Program


def peak_of_layers(
    smaller: Program,
    larger: Program,
    steps_of_smaller: np.ndarray,
    steps: np.ndarray,
    growth: float,
) -> int:
    """Return the bytes that are allocated at the peak of an iteration with more layers.

    Args:
        smaller: with the fewest layers.
        larger: with more layers.
        steps_of_smaller: int64 [ops], the step of each op of ``smaller``.
        steps: int64 [ops], the step of each op of ``larger``, numbered as those.
        growth: layers beyond those of ``larger``, in units of what it has beyond ``smaller``.
    """
    peaks_of_smaller = _peaks_by_step(smaller, steps_of_smaller)
    peaks = _peaks_by_step(larger, steps)
    expected = 0.0
    for step, num_bytes in peaks.items():
        # a step that the fewest layers do not have grows by all that it has
        more_bytes = num_bytes - peaks_of_smaller.get(step, 0)
        expected = max(expected, num_bytes + growth * more_bytes)
    return round(expected)


def _peaks_by_step(program: Program, steps: np.ndarray) -> dict[int, int]:
    """Return step -> the most that is allocated in it, bytes."""
    events = program.allocations
    allocated = np.cumsum(events["bytes"])
    op_of_event = np.minimum(events["before"], len(steps) - 1)
    step_of_event = steps[op_of_event]
    numbers, place = np.unique(step_of_event, return_inverse=True)
    peaks = np.zeros(len(numbers), dtype=np.int64)
    np.maximum.at(peaks, place.ravel(), allocated)
    return dict(zip(numbers.tolist(), peaks.tolist(), strict=True))
