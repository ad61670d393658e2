"""Is this host as quick as it was at the captures?  Virtual ranks' hosts are taken to follow it.

In : what the local rank's program says that its host takes between two calls, and when it came to
them and left them.  Out: a factor, and releases of the same world whose hosts take that much
longer.  A host that is shared, throttled or otherwise loaded is a tenth slower or quicker within
minutes, and so is everybody's of a job that waits for its hosts.  A rank that is slow now among
peers that are as quick as they were would be a straggler that the job does not have.

Only stretches count in which the device waited for the host when it came to the call before and to
the call after them: elsewhere the host may have waited for the device.  A rank whose GPU is the
bottleneck has few of those, and nothing changes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron_prism.costs import Prices
from megatron_prism.ops import CODE
from megatron_prism.program import Program
from megatron_prism.replay.release import Releases
from megatron_prism.virtual.pace_report import at_once
from megatron_prism.virtual.pace_source import RING

__all__ = ["Drift", "slower", "stretches"]

_SHARE = 0.005  # of the job's time may go into looking and following, at most
_ENOUGH = 0.1  # of the host's time of an iteration must have been seen
_SLIGHT = 0.01  # a change of the factor that is not worth new releases
_MOST = 4.0  # what is further off than this is no drift
_IDLE_NS = 100_000  # the device had nothing to do when the host came; a full queue is ms long


def stretches(program: Program, launches: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """(ns int64 [n - 1], bool [n - 1]): the host's time from each of n launches to the next one,
    and whether it does nothing there but issue segments.

    ``launches``: the first op of each.
    """
    ops, firsts = program.ops, np.asarray(launches, dtype=np.int64)
    segments = ops["name"] == CODE["compute"]
    host = np.concatenate(([0], np.cumsum(np.where(segments, np.maximum(ops["host"], 0), 0))))
    plain = segments | np.isin(ops["name"], [CODE["record"], CODE["mark"], CODE["wait"]])
    plain[firsts] = True
    joined = (ops["batch"] >= 0) & np.isin(ops["batch"], ops["batch"][firsts])
    odd = np.concatenate(([0], np.cumsum(~(plain | joined))))
    return host[firsts[1:]] - host[firsts[:-1]], odd[firsts[1:]] == odd[firsts[:-1]]


def slower(prices: Prices, factor: float) -> Prices:
    """Prices on hosts that take ``factor`` times as long."""
    times = {name: tuple(np.rint(ns * factor).astype(np.int64) for ns in getattr(prices, name))
             for name in ("lead", "host")}  # fmt: skip
    return dataclasses.replace(prices, **times)


class Drift:
    """Looks every now and then, where an iteration begins; ``Pacer.watch``.

    pacer, program : of this rank; the program knows its host's times
    launches       : the first op of each launch
    retimed        : a factor -> releases of the world on hosts that take so much longer
    store, process, processes : of the local ranks, who all look at the same iteration

    factor : what virtual ranks' hosts take now, in times of what they took at the captures
    """

    def __init__(
        self,
        pacer: Any,
        program: Program,
        launches: Sequence[int],
        retimed: Callable[[float], Releases],
        store: Any = None,
        process: int = 0,
        processes: int = 1,
    ) -> None:
        self._pacer, self._retimed, self._store = pacer, retimed, store
        self._process, self._processes = process, processes
        self._ns, self._plain = stretches(program, launches)
        self.factor, self.looks, self.changes, self.took_s = 1.0, 0, 0, 0.0
        self.seen: list[float] = []  # the factors found, one a look
        self._change_s = 0.0  # what the last change cost
        self._next = RING  # the first iteration warms up, and the ring is full then

    def begin(self, iteration: int) -> None:
        """An iteration begins."""
        if iteration != self._next:
            return
        begin = time.perf_counter()
        found = self._measure(iteration)
        look_s = time.perf_counter() - begin
        rows = self._everybodys(iteration, [*found, look_s, self._change_s])
        self.looks += 1
        # from here on all local ranks do the same, since all have the same numbers
        spent, expected = (sum(row[i] for row in rows) for i in (0, 1))
        each_s, look_s, change_s = (max(row[i] for row in rows) for i in (2, 3, 4))
        if self._drifted(spent, expected):
            look_s += change_s
            self._change()
        if each_s:
            self._next += RING * max(1, math.ceil(look_s / (_SHARE * RING * each_s)))
        self.took_s += time.perf_counter() - begin

    def _measure(self, iteration: int) -> list[float]:
        """[ns that this host took, ns that it took at the captures, s of an iteration]; 0 if the
        ring does not say."""
        pacer, launcher = self._pacer, self._pacer.launcher
        stamps = launcher.stamps()
        pacer.lags.append(launcher.lag())
        ours = [j for one in launcher.launches for j in one]
        spent = expected = 0
        begun = []
        for before in range(iteration - RING + 1, iteration):  # not the first, which was cold
            slot = before % RING
            if not (stamps["tag"][slot][ours] == before + 1).all():
                continue
            issued, left = (np.array(times[slot]) for times in (pacer.issued, pacer.left))
            begun.append(issued[0])
            idle = at_once(issued, stamps["came"][slot], pacer.lags, _IDLE_NS)
            usable = self._plain & idle[:-1] & idle[1:]
            if self._ns[usable].sum() >= _ENOUGH * self._ns.sum():
                spent += int((issued[1:] - left[:-1])[usable].sum())
                expected += int(self._ns[usable].sum())
        each = np.diff(begun)
        return [spent, expected, float(np.median(each)) / 1e9 if len(each) else 0.0]

    def _everybodys(self, iteration: int, words: list[float]) -> list[list[float]]:
        """The words of all local ranks."""
        if self._processes == 1:
            return [words]
        keys = [f"prism/pace/drift/{iteration}/{i}" for i in range(self._processes)]
        self._store.set(keys[self._process], json.dumps(words))
        return [json.loads(self._store.get(key)) for key in keys]

    def _drifted(self, spent: float, expected: float) -> bool:
        """Take the factor that was found; whether it is another one."""
        if not expected:
            return False
        found = min(max(spent / expected, 1 / _MOST), _MOST)
        self.seen.append(found)
        if abs(found / self.factor - 1) <= _SLIGHT:
            return False
        self.factor = found
        return True

    def _change(self) -> None:
        """New releases, and calls that keep this host as long as NCCL would now."""
        begin = time.perf_counter()
        self._pacer.launcher.retime(self._retimed(self.factor))
        self._pacer.host_factor = self.factor
        self.changes += 1
        self._change_s = time.perf_counter() - begin

    def summary(self) -> dict[str, Any]:
        """What the run's JSON says."""
        return {
            "factor": round(self.factor, 4),
            "seen": [round(factor, 4) for factor in self.seen[-8:]],
            "looks": self.looks,
            "changes": self.changes,
            "took_s": round(self.took_s, 3),
            "said": str(self),
        }

    def __str__(self) -> str:
        if not self.seen:
            return (
                "virtual ranks' hosts taken to be as quick as at the captures "
                "(the device seldom waits for this one)"
            )
        return (
            f"virtual ranks' hosts taken to need {self.factor:.2f} times what they needed at the "
            f"captures, as this one does now ({self.looks} looks)"
        )
