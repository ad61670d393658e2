"""Messages that are issued together: NCCL makes one call of them, and so does pacing."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING

from megatron_prism.runtime.pacing.moves import Move
from megatron_prism.runtime.pacing.streams import End
from megatron_prism.runtime.process_group import Done

if TYPE_CHECKING:
    from megatron_prism.runtime.listeners import Answer, Args, Kwargs
    from megatron_prism.runtime.pacing.pacer import Call, Pacer
    from megatron_prism.runtime.process_group import PrismGroup

__all__ = ["Batch"]


class Batch:
    """Answered one by one, ended by one launch, as of one ``pacing.Pacer``."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer, self._begin, self._host = pacer, perf_counter_ns(), 0
        self._group: PrismGroup | None = None
        self._launch, self._blocks = -1, 0
        self._move: Move | None = None
        self._answers: list[Callable[[], object]] = []
        self._made: list[tuple[Done, Args]] = []

    def add(
        self, group: PrismGroup, call: Call, answer: Answer, args: Args, kwargs: Kwargs
    ) -> Done:
        self._group, self._launch = group, call.launch
        self._blocks += call.blocks
        self._host += call.host
        move = None
        if call.op == "send" and self._move is None:
            self._move = move = self._pacer.move(group, call.op, answer, args, kwargs)
        if move is None:
            self._answers.append(lambda: answer(group, *args, **kwargs))
        made = Done(args[0], args[1] if call.op == "recv" else -1)
        self._made.append((made, args))
        return made

    def issue(self) -> None:
        """Answer on the group's stream and hold it."""
        if self._launch < 0:
            return
        pacer, launch = self._pacer, self._launch
        pacer.now_issued[launch] = perf_counter_ns()
        streams, launcher = pacer.streams, pacer.launcher
        lane = pacer.lane(id(self._group))
        streams.follow(lane.stream, streams.current(), lane.begin)
        if self._answers:
            launcher.arrive(lane.stream, launch, pacer.iteration)
            with streams.on(lane.stream):
                for answer in self._answers:
                    answer()
        launcher.release(
            lane.stream, launch, pacer.iteration, pacer.first, not self._answers, self._blocks,
            self._move,
        )  # fmt: skip
        lane.end = end = End(streams, lane.stream)
        for made, args in self._made:
            made.after(end, args)
        while perf_counter_ns() < self._begin + self._host:
            pass
