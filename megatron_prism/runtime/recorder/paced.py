"""Records a rank while virtual ranks answer when they would (``virtual.pacing``).

A GPU at its power limit is as fast as it is idle in between, and products beside a call have fewer
SMs: segments of a rank that waits for nobody take other times than the job's (the last of two
stages 3 % more, 2 x H200).  So a rank can be recorded once more at the pace that the first slices
give.  Waits that the recorder hears of belong to no segment: calls are answered between two of
them, and a segment begins behind a wait, not before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_prism.runtime.recorder.recorder import Recorder

if TYPE_CHECKING:
    from torch import distributed as dist

    from megatron_prism.runtime.pacing.pacer import Pacer
    from megatron_prism.runtime.process_group import PrismGroup
    from megatron_prism.runtime.signatures import Answer, Args, Kwargs

__all__ = ["PacedRecorder"]


class PacedRecorder(Recorder):
    """Writes down what it hands on to ``pacer``, a ``pacing.Pacer``; CUDA only."""

    def __init__(self, rank: int, tier: str, pacer: Pacer) -> None:
        super().__init__(rank, tier)
        self.pacer = pacer

    def record(
        self, group: PrismGroup | None, op: str, answer: Answer, args: Args, kwargs: Kwargs
    ) -> dist.Work | None:
        """Make the call when it would be answered, and write it down."""

        def paced(group: PrismGroup, *args: object, **kwargs: object) -> dist.Work | None:
            return self.pacer.record(group, op, answer, args, kwargs)

        # without a group it is a probe of what recording costs
        return super().record(group, op, answer if group is None else paced, args, kwargs)

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """What is issued inside is one call, which is made at its end: no part of a segment."""
        if self._batch >= 0:
            yield
            return
        with super().batch(), contextlib.ExitStack() as together:
            together.enter_context(self.pacer.batch())
            yield
            self.aside(together.close)

    def wait_issued(self) -> None:
        """The open segment, in which nothing ran so far, begins behind that wait."""
        if self.active and not self._inside:
            self._open()
