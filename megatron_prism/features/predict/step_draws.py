"""Draws of iterations whose inputs differ from step to step.

In : ``DrawnSteps`` and a sampler of their graph.  Out: draws, of which each is of one of the steps,
and the 95th percentile if inputs were changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from megatron_prism.features.predict.sampler import LANES, Sampler
from megatron_prism.features.predict.variability import Variability
from megatron_prism.replay.drawn_steps import DrawnSteps

StepDurations = Callable[[int], np.ndarray]  # step -> int64 [nodes], ns
_MOST_VISITS = 5e9  # of nodes in one draw of each step: some 5 s


@dataclass(frozen=True)
class InputEffect:
    """What inputs that differ between iterations do to the iteration's time.

    Attributes:
        text: What was drawn, in words.
        steps: How many different steps the draws have.
        median_ns: Of these steps without other variation.
        changed: What might be changed -> p95 with the change, ns.
        changed_from: p95 without it, of as few draws, ns.
    """

    text: str
    steps: int
    median_ns: int
    changed: Mapping[str, float]
    changed_from: float


class StepDraws:
    """Draws iterations; the n-th is of the n-th step, and behind the last comes the first again.

    Attributes:
        sampler: Of the job as it was captured.
        steps: How many steps are drawn from.
    """

    def __init__(self, sampler: Sampler, drawn: DrawnSteps) -> None:
        """Prepare to draw.

        Args:
            sampler: Of the graph of the steps.
            drawn: The steps; of very many as many as some seconds allow.
        """
        self.sampler = sampler
        nodes = max(1, len(sampler.paths.lasts))
        # a draw of a step takes as long as LANES of them
        affordable = int(_MOST_VISITS / (nodes * LANES))
        self.steps = max(1, min(drawn.count, affordable))
        self._drawn = drawn

    def draw(
        self,
        spread: Variability,
        count: int,
        *,
        durations: StepDurations | None = None,
        slow: Mapping[int, float] | None = None,
        replicas: range | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> np.ndarray:
        """Draw as ``Sampler.draw`` does.

        Args:
            spread: How much durations vary.
            count: Iterations.
            durations: Of changed steps; None: of the steps as they were drawn.
            slow: Class -> how many times as long one of its ranks computes.
            replicas: Which of them.
            progress: Is told how many draws are done.

        Returns:
            float64 [count, replicas] ns.
        """
        durations_of_step = durations or self._drawn.durations
        drawn_replicas = replicas
        if drawn_replicas is None:
            drawn_replicas = range(self.sampler.replicas)
        times = np.empty((count, len(drawn_replicas)))
        for step in range(min(self.steps, count)):
            own_rows = times[step :: self.steps]
            sampler = self.sampler.of_step(durations_of_step(step), step)
            own_rows[:] = sampler.draw(
                spread, len(own_rows), slow=slow, replicas=drawn_replicas, progress=progress
            )
        return times

    def median_ns(self) -> int:
        """Return the median of the steps without variation."""
        steady: list[int] = []
        for step in range(self.steps):
            sampler = self.sampler.of_step(self._drawn.durations(step), step)
            steady.append(sampler.paths.steady)
        return int(np.median(steady))

    def changes(self) -> Mapping[str, StepDurations]:
        """Return what might be changed, in words, with the durations of each step."""
        return self._drawn.changed

    @property
    def text(self) -> str:
        """What was drawn, in words."""
        return self._drawn.text
