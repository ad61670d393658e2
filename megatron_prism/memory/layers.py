"""The memory of a rank with many equal layers, from the same rank with few and with some more.

In : two programs that differ in their numbers of layers.  Out: bytes.  The most that is allocated
in each step is linear in the layers, so the step of the peak may be another one than with few.
"""

from __future__ import annotations

import numpy as np

from megatron_prism.core.program import Program


def peak_of_layers(
    fewer: Program,
    more: Program,
    steps_of_fewer: np.ndarray,
    steps: np.ndarray,
    growth: float,
) -> int:
    """Return the bytes that are allocated at the peak of an iteration with more layers.

    Args:
        fewer: with the fewest layers.
        more: with more layers.
        steps_of_fewer: int64 [ops], the step of each op of ``fewer``.
        steps: int64 [ops], the step of each op of ``more``, numbered as those.
        growth: layers beyond those of ``more``, in units of what ``more`` has beyond ``fewer``.
    """
    most_of_fewer = _most_by_step(fewer, steps_of_fewer)
    most = _most_by_step(more, steps)
    expected = 0.0
    for step, num_bytes in most.items():
        # a step that the fewest layers do not have grows by all that it has
        more_bytes = num_bytes - most_of_fewer.get(step, 0)
        expected = max(expected, num_bytes + growth * more_bytes)
    return round(expected)


def _most_by_step(program: Program, steps: np.ndarray) -> dict[int, int]:
    """Return step -> the most that is allocated in it, bytes."""
    events = program.allocations
    allocated = np.cumsum(events["bytes"])
    op_of_event = np.minimum(events["before"], len(steps) - 1)
    step_of_event = steps[op_of_event]
    numbers, place = np.unique(step_of_event, return_inverse=True)
    most = np.zeros(len(numbers), dtype=np.int64)
    np.maximum.at(most, place.ravel(), allocated)
    return dict(zip(numbers.tolist(), most.tolist(), strict=True))
