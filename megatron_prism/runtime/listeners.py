"""Interfaces of what follows an emulated job: its training, and its communication calls.

Implementations subclass the protocol and override what they need.  A method that is not overridden
(or that a class with the same methods lacks) is never called, so it costs nothing on the job's own
path; ``overriding`` finds the others once, when the listeners are set.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from megatron_prism.core.programs.ops import CallLabel
from megatron_prism.core.world import World

if TYPE_CHECKING:
    # what reads a launch line imports this module, too, and starts without torch
    from torch import distributed as dist

# Of one of c10d's methods: tensors, lists of them, splits, ranks, options.  Each method has others.
Args = Sequence[Any]
Kwargs = Mapping[str, Any]
Answer = Callable[..., "dist.Work | None"]  # called with the group, then args and kwargs


class TrainingListener(Protocol):
    """Follows the training of one rank.  ``emulate.rank.monitor.TrainingMonitor`` calls it."""

    def world_known(self, world: World) -> None:
        """The parallel sizes of the job's parsed arguments, or of a program without them."""
        return

    def iteration_started(self, number: int, wanted: int, model: Any, optimizer: Any) -> None:
        """Train step ``number`` (from 1) of ``wanted`` is about to start; ``model``: its chunks."""
        return

    def resumed(self, iteration: int) -> None:
        """The job goes on behind ``iteration``, where its checkpoint was, and will now begin."""
        return

    def scope(self, **labels: Any) -> AbstractContextManager[None]:
        """Label what runs inside: phase, and perhaps microbatch and chunk."""
        return contextlib.nullcontext()

    def part(self, name: str) -> AbstractContextManager[None]:
        """Keep the memory peak of what runs inside apart; ``name`` is one of ``monitor.PARTS``."""
        return contextlib.nullcontext()

    def outside_step(self, gathered: bool, begun: bool) -> None:
        """Mark everything until the next train step as not part of a steady iteration.

        gathered : it gathers the parameters that the next step would gather
        begun    : it starts now, not later in this iteration
        """
        return

    def out_of_memory(self) -> None:
        """Device memory ran out: the job ends here."""
        return

    def interrupted(self) -> None:
        """The user ended the job (Ctrl-C) before that."""
        return

    def finished(self) -> None:
        """Training ended with the steps that were asked for.  A PrismError fails the job."""
        return


class CallListener(Protocol):
    """Follows the communication calls of one rank.  ``VirtualWorld`` calls it.

    hands_on : ``record`` makes its call through ``world.after(self)``; of the listeners that
               override ``record`` only the last may do without
    """

    hands_on: bool = False

    def record(
        self, group: Any, op: str, answer: Callable[..., Any], args: Sequence[Any], kwargs: Any
    ) -> Any:
        """Make the call ``answer(group, *args, **kwargs)`` named ``op``; returns its Work."""
        return answer(group, *args, **kwargs)

    def batch(self) -> AbstractContextManager[None]:
        """Take what is issued inside for one call."""
        return contextlib.nullcontext()

    def unrecorded(self, answer: Callable[[], None]) -> None:
        """Do what stands for virtual ranks and is no call."""
        answer()

    def observe(self, group: Any, op: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Look at the tensors of a call after its answer has arrived; may change ``outputs``."""
        return


class CountsIterations(CallListener, TrainingListener):
    """Base of listeners that tell one iteration from another.

    iteration : of the job, from 1, and of the job that a checkpoint is of; 0 before the first
    """

    iteration = before = 0

    def resumed(self, iteration: int) -> None:
        self.before = iteration

    def iteration_started(self, number: int, wanted: int, model: Any, optimizer: Any) -> None:
        self.iteration = self.before + number


class LabelledCalls(CountsIterations):
    """Base of listeners that tell one call of a rank from another."""

    hands_on = True

    def __init__(self) -> None:
        # with torch: a rank runs where such a listener is made
        from megatron_prism.runtime.recorder.owners import CallSites

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
        return CallLabel(
            op,
            group,
            self.iteration,
            labels.get("microbatch", -1),
            labels.get("chunk", -1),
            labels.get("phase", ""),
            site,
        )

    def through(
        self, group: Any, op: str, answer: Answer, args: Args, kwargs: Kwargs
    ) -> dist.Work | None:
        """Make the call, by the listener after this one."""
        caller = group.world.after(self)
        if caller is None:
            return answer(group, *args, **kwargs)
        return caller.record(group, op, answer, args, kwargs)


def overriding(listeners: Iterable[object], protocol: type, name: str) -> tuple[Any, ...]:
    """The listeners that have a method ``name`` of their own."""
    default = getattr(protocol, name)
    return tuple(
        listener for listener in listeners if getattr(type(listener), name, default) is not default
    )
