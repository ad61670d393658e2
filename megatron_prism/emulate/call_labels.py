"""Follow a rank's calls with what they are called by: iteration, phase, microbatch, chunk, site."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron_prism.hang.fault_plan import CallLabel
from megatron_prism.runtime.listeners import CallListener, TrainingListener
from megatron_prism.runtime.recorder.owners import CallSites

if TYPE_CHECKING:
    from torch import distributed as dist

    from megatron_prism.runtime.listeners import Answer, Args, Kwargs
    from megatron_prism.runtime.process_group import PrismGroup

__all__ = ["LabelledCalls"]


class LabelledCalls(CallListener, TrainingListener):
    """Base of listeners that tell one call of a rank from another; ``iteration`` counts from 1."""

    hands_on = True

    def __init__(self) -> None:
        self.iteration = 0
        self.sites = CallSites()
        self._labels: dict[str, Any] = {}

    @contextlib.contextmanager
    def scope(self, **labels: Any) -> Iterator[None]:
        """Label what runs inside: phase, microbatch, chunk."""
        before, self._labels = self._labels, {**self._labels, **labels}
        try:
            yield
        finally:
            self._labels = before

    def label(self, op: str, group: str, site: str) -> CallLabel:
        """What a call that is made now is called by."""
        labels = self._labels
        return CallLabel(op, group, self.iteration, labels.get("microbatch", -1),
                         labels.get("chunk", -1), labels.get("phase", ""), site)  # fmt: skip

    def through(
        self, group: PrismGroup, op: str, answer: Answer, args: Args, kwargs: Kwargs
    ) -> dist.Work | None:
        """Make the call, by the listener after this one."""
        caller = group.world.after(self)
        if caller is None:
            return answer(group, *args, **kwargs)
        return caller.record(group, op, answer, args, kwargs)
