"""A rank that is captured alone never waits for a peer.  Here it pauses where it would in its job.

A GPU at its power limit is as fast as it is idle in between: computing without the bubbles of the
job it draws more, its clock falls, and its segments are longer than they are there.  So a second
capture pauses the device where the replay of the first says that it waits for others: a single
thread waits on the segments' stream, between two segments, and is in neither.  A call that moves
data is no rest: with pauses for these, too, segments of tp 2 with sequences of 8,192 became 4 %
shorter, and were 4 % shorter than the job's (2 x H200, 2026-11-22).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megatron_prism.ops import CODE, IS_COLLECTIVE, IS_PAIR, NAMES
from megatron_prism.program import Program

__all__ = ["Rhythm", "pauses"]

_SHORTEST_NS = 5_000  # about what a kernel takes that does nothing
_CYCLES_PER_NS = 1.7  # of an SM between its limits (H200: 1.59 to 1.98 GHz under load)


class Rhythm:
    """The pauses of one iteration.

    names : of all ops of the program, in order of issue
    ns    : int64 [ops]; the device pauses that long behind each
    pause : holds the current stream for so many cycles; None: ``torch.cuda._sleep``
    """

    def __init__(
        self, names: Sequence[str], ns: np.ndarray, pause: Callable[[int], None] | None = None
    ) -> None:
        self.names, self.ns = names, ns
        self.begun = self.strayed = 0  # iterations
        self.paused_ns = 0  # in all of them
        self._pause, self._on = pause, False

    def begin(self) -> None:
        """An iteration begins."""
        self._on = True
        self.begun += 1

    def end(self) -> None:
        """What follows belongs to none."""
        self._on = False

    def after(self, number: int, name: str) -> None:
        """Op ``number`` of the iteration, a ``name``, has been issued.  Where an iteration differs
        from the program, it goes on without pauses."""
        if not self._on:
            return
        if number >= len(self.names) or self.names[number] != name:
            self._on = False
            self.strayed += 1
            return
        if self.ns[number] < _SHORTEST_NS:
            return
        if self._pause is None:
            import torch

            self._pause = torch.cuda._sleep
        self._pause(round(self.ns[number] * _CYCLES_PER_NS))
        self.paused_ns += int(self.ns[number])

    def __str__(self) -> str:
        each = self.paused_ns / max(1, self.begun)
        said = f"in the job's rhythm, {each / 1e6:,.1f} ms of pauses an iteration"
        if self.strayed:
            said += f" ({self.strayed} of {self.begun} iterations paused until they differed)"
        return said


def pauses(program: Program, spans: np.ndarray, main: int) -> Rhythm:
    """What ``program``'s device does not do in a replay.

    spans : ``Timeline.spans`` of its class; main: the lane of the stream that is current without
    further ado.  The time between two segments of that stream in which no call moves data is a
    pause behind the last op of the stream between them; where there is none (only a label changed)
    there is no place for one.
    """
    names, found = program.ops["name"], np.zeros(len(program), dtype=np.int64)
    own = spans[(names[spans["op"]] == CODE["compute"]) & (spans["lane"] == main)]
    calls = spans[IS_COLLECTIVE[names[spans["op"]]] | IS_PAIR[names[spans["op"]]]]
    idle = _without(own["end"][:-1], own["start"][1:], calls)
    streams = np.array([text == "main" for text in program.strings])[program.ops["stream"]]
    # behind a host_wait the host is not on yet, and would be late by the pause
    places = np.flatnonzero(streams & ~np.isin(names, (CODE["compute"], CODE["host_wait"])))
    last = places[np.searchsorted(places, own["op"][1:]) - 1] if len(places) else own["op"][1:]
    fits = (last > own["op"][:-1]) & (last < own["op"][1:])
    found[last[fits]] = idle[fits]
    return Rhythm([NAMES[name] for name in names.tolist()], found)


def _without(begin: np.ndarray, end: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """int64 [n]: ns from each begin to its end that none of ``spans`` covers."""
    order = np.argsort(spans["start"], kind="stable")
    starts, reach = spans["start"][order], np.maximum.accumulate(spans["end"][order])
    # what all spans cover until some time: each adds what reaches beyond those before it
    added = np.maximum(reach - np.maximum(starts, np.concatenate(([0], reach[:-1]))), 0)
    if not len(added):
        return np.maximum(end - begin, 0)
    edges = np.stack([reach - added, reach], axis=1).ravel()
    so_far = np.repeat(np.cumsum(added), 2)
    so_far[::2] -= added
    covered = np.interp(end, edges, so_far) - np.interp(begin, edges, so_far)
    return np.maximum(end - begin - np.rint(covered).astype(np.int64), 0)
