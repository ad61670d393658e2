"""Which of several jobs is faster, where what nobody measured is the same for all of them.

In : an iteration of each and the sources of its uncertainty (``interval``).  Out: groups in order,
differences with their intervals, chances.

A source (the host's speed, kernels, calls, overlap) is one unknown of the machine: where it makes
one job slower, it makes another one slower, too, each by its own amount.  So every source is drawn
once for all jobs.  A part of it (``OWN``) is each job's own, since jobs do not run the same kernels
and calls.  A job's own interval stays what ``interval`` says of it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_prism.replay.interval import interval
from megatron_prism.replay.timeline import Timeline

# of a source's deviation: the part that two jobs do not share.  Errors of jobs of one sitting that
# are predicted by one table of kernels differ by about a third of its range (docs/measurements.md)
OWN = 1 / 3
_DRAWS = 4000
_ENDS = 0.025, 0.975  # of an interval of 95 %, which is this many deviations to each side
_DEVIATIONS = 1.959964


@dataclass(frozen=True)
class UncertainTime:
    """An iteration in ns, and how much shorter and longer each source may make it.

    of : what the time of a source goes to, by number (``interval.Uncertainty``)
    """

    ns: float
    sources: Mapping[str, tuple[float, float]]
    of: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    def scaled(self, by: float) -> UncertainTime:
        """Of what is proportional to the iteration: money, time a token."""
        ends = {what: (low * by, high * by) for what, (low, high) in self.sources.items()}
        return UncertainTime(self.ns * by, ends, self.of)


@dataclass(frozen=True)
class Standing:
    """A job among others, in the order of their iterations.

    group     : from 1; no two jobs of one surely differ
    slower_ns : than the fastest, with the ends of its interval
    best      : chance to be the fastest of all
    """

    group: int
    slower_ns: float
    low_ns: float
    high_ns: float
    best: float


def estimate(timeline: Timeline) -> UncertainTime:
    """The iteration of a timeline with its sources."""
    return of_sources(timeline.iteration_ns, (vars(one) for one in interval(timeline).sources))


def of_sources(ns: float, sources: Iterable[Mapping[str, Any]]) -> UncertainTime:
    """Of the fields of ``interval.Uncertainty``, also as JSON has them."""
    ends, of = {}, {}
    for one in sources:
        ends[one["what"]] = float(one["low_ns"]), float(one["high_ns"])
        if one.get("of"):
            of[one["what"]] = {int(part): took for part, took in one["of"].items()}
    return UncertainTime(ns, ends, of)


def drawn(estimates: Sequence[UncertainTime], draws: int = _DRAWS, own: float = OWN) -> np.ndarray:
    """float64 [draws, jobs] ns: in each draw the unknowns are the same for all jobs, but for the
    part ``own`` of each.

    That part is of what a source's time goes to: a segment's kernels are as far off in every job
    that runs them, and so is a call of a size among as many ranks.
    """
    found, known = np.empty((draws, len(estimates))), dict[str, np.ndarray]()
    for at, one in enumerate(estimates):
        key = repr((float(one.ns), sorted(one.sources.items()), sorted(one.of.items())))
        if key not in known:
            known[key] = total = np.full(draws, float(one.ns))
            for what, (low, high) in sorted(one.sources.items()):
                parts = one.of.get(what, {key: 1})
                size = math.hypot(*parts.values())
                mine = sum(_normal(draws, what, part) * ns / size for part, ns in parts.items())
                z = np.sqrt(1 - own**2) * _normal(draws, what) + own * mine
                total += np.where(z > 0, z * high, z * low) / _DEVIATIONS
        found[:, at] = known[key]
    return found


def _normal(draws: int, *of: object) -> np.ndarray:
    """float64 [draws]: the same for the same thing, whatever else is drawn."""
    return np.random.default_rng(zlib.crc32(repr(of).encode())).standard_normal(draws)


def standings(estimates: Sequence[UncertainTime]) -> list[Standing]:
    """Each job's place, in the order given.

    A job belongs to a group unless it is slower than some job of it at both ends of the 95 %
    interval, so no two of a group surely differ.
    """
    if not estimates:
        return []
    times = drawn(estimates)
    order = sorted(range(len(estimates)), key=lambda at: estimates[at].ns)
    first, best = order[0], np.bincount(times.argmin(axis=1), minlength=len(estimates)) / _DRAWS
    ties = [at for at in order if np.array_equal(times[:, at], times[:, first])]
    best[ties] = best[ties].sum() / len(ties)
    groups, members, group = {}, list[int](), 1
    for at in order:
        if any(np.mean(times[:, at] <= times[:, one]) < _ENDS[0] for one in members):
            members, group = [], group + 1
        members.append(at)
        groups[at] = group
    ends = np.quantile(times - times[:, [first]], _ENDS, axis=0)
    return [
        Standing(groups[at], one.ns - estimates[first].ns, float(ends[0, at]), float(ends[1, at]),
                 float(best[at]))
        for at, one in enumerate(estimates)
    ]  # fmt: skip


@dataclass(frozen=True)
class TimeDifference:
    """A second iteration less a first: expected, and the ends of its 95 % interval; and the chance
    that the first is shorter.
    """

    ns: float
    low_ns: float
    high_ns: float
    first_faster: float


def difference(first: UncertainTime, second: UncertainTime, own: float = OWN) -> TimeDifference:
    """What of the second's iteration is not the first's; ``own``: the part of each source that they
    do not share, 0 of jobs that run the same kernels and calls.
    """
    times = drawn([first, second], own=own)
    more = times[:, 1] - times[:, 0]
    low, high = np.quantile(more, _ENDS)
    chance = np.mean(more > 0) + np.mean(more == 0) / 2
    return TimeDifference(second.ns - first.ns, float(low), float(high), float(chance))
