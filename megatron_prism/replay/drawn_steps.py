"""Steps of one job whose inputs differ from iteration to iteration.

A feature that knows such inputs makes ``DrawnSteps``; whoever predicts times reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from megatron_prism.replay.priced_graph import PricedGraph

StepDurations = Callable[[int], np.ndarray]  # step, from 0 -> int64 [nodes], ns


@dataclass(frozen=True)
class DrawnSteps:
    """Steps with drawn inputs: one graph, and the durations of its nodes in each step.

    Attributes:
        priced: The job as it was captured; ranks with other inputs are classes of their own.
        count: How many steps were drawn.
        durations: Of each step.
        changed: What might be changed, in words -> durations of each step with the change.
        text: What was drawn, in words.
    """

    priced: PricedGraph
    count: int
    durations: StepDurations
    changed: Mapping[str, StepDurations]
    text: str
