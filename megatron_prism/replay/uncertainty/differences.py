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

from megatron_prism.replay.timeline import Timeline
from megatron_prism.replay.uncertainty.interval import interval

# of a source's deviation: the part that two jobs do not share.  Errors of jobs of one sitting that
# are predicted by one table of kernels differ by about a third of its range (docs/measurements.md)
OWN = 1 / 3
_DRAWS = 4000
_ENDS = 0.025, 0.975  # of an interval of 95 %, which is this many deviations to each side
_DEVIATIONS = 1.959964


@dataclass(frozen=True)
class TimeDifference:
    """A second iteration less a first.

    Attributes:
        ns: What is expected.
        low_ns: The lower end of the 95 % interval.
        high_ns: The upper end.
        first_faster: The chance that the first is shorter.
    """

    ns: float
    low_ns: float
    high_ns: float
    first_faster: float


@dataclass(frozen=True)
class UncertainTime:
    """An iteration, and how much shorter and longer each source of uncertainty may make it.

    Attributes:
        ns: The iteration in ns.
        sources: Source -> (ns shorter, ns longer), the ends of its 95 % interval.
        of: Source -> what its time goes to, by number, with ns (``interval.Uncertainty``).
    """

    ns: float
    sources: Mapping[str, tuple[float, float]]
    of: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    @classmethod
    def of_timeline(cls, timeline: Timeline) -> UncertainTime:
        """Give the iteration of a timeline with its sources of uncertainty."""
        sources = [vars(source) for source in interval(timeline).sources]
        return of_sources(timeline.iteration_ns, sources)

    def scaled(self, by: float) -> UncertainTime:
        """Give the same of what is proportional to the iteration: money, time a token."""
        sources = {}
        for name, (low, high) in self.sources.items():
            sources[name] = (low * by, high * by)
        return UncertainTime(self.ns * by, sources, self.of)

    def compared(self, second: UncertainTime, *, same_kernels: bool = False) -> TimeDifference:
        """Compare this iteration, the first, with a second one.

        Args:
            second: Another iteration.
            same_kernels: Whether both jobs run the same kernels and calls, so that what is unknown
                of these moves both alike.
        """
        own = OWN
        if same_kernels:
            own = 0.0
        times = drawn([self, second], own=own)
        longer = times[:, 1] - times[:, 0]
        low, high = np.quantile(longer, _ENDS)
        # a tie counts half
        chance = np.mean(longer > 0) + np.mean(longer == 0) / 2
        return TimeDifference(second.ns - self.ns, float(low), float(high), float(chance))


@dataclass(frozen=True)
class Standing:
    """A job among others, in the order of their iterations.

    Attributes:
        group: From 1; no two jobs of one group surely differ.
        slower_ns: How much slower than the fastest job.
        low_ns: The lower end of the 95 % interval of ``slower_ns``.
        high_ns: The upper end.
        best: The chance to be the fastest of all.
    """

    group: int
    slower_ns: float
    low_ns: float
    high_ns: float
    best: float


def of_sources(ns: float, sources: Iterable[Mapping[str, Any]]) -> UncertainTime:
    """Collect sources of uncertainty.

    Args:
        ns: The iteration.
        sources: The fields of ``interval.Uncertainty``, also as JSON has them.
    """
    ends, parts = {}, {}
    for source in sources:
        name = source["what"]
        ends[name] = float(source["low_ns"]), float(source["high_ns"])
        if source.get("of"):
            # JSON has numbers as texts
            parts[name] = {int(number): part_ns for number, part_ns in source["of"].items()}
    return UncertainTime(ns, ends, parts)


def drawn(estimates: Sequence[UncertainTime], draws: int = _DRAWS, own: float = OWN) -> np.ndarray:
    """Draw iterations; in each draw the unknowns are the same for all jobs.

    Of each source a job has a part ``own`` of its own.  That part is of what the source's time
    goes to: a segment's kernels are as far off in every job that runs them, and so is a call of a
    size among as many ranks.

    Args:
        estimates: The iterations of the jobs.
        draws: How many draws.
        own: The part of a source's deviation that jobs do not share, from 0 to 1.

    Returns:
        float64 [draws, jobs] ns.
    """
    times = np.empty((draws, len(estimates)))
    drawn_before: dict[str, np.ndarray] = {}
    for job, iteration in enumerate(estimates):
        # jobs that are alike in everything get the same draws
        sources = sorted(iteration.sources.items())
        key = repr((float(iteration.ns), sources, sorted(iteration.of.items())))
        if key not in drawn_before:
            drawn_before[key] = _drawn_job(iteration, key, draws, own)
        times[:, job] = drawn_before[key]
    return times


def _drawn_job(iteration: UncertainTime, key: str, draws: int, own: float) -> np.ndarray:
    """Draw the iteration of one job: float64 [draws] ns.

    Args:
        iteration: The iteration.
        key: The job's text; names what a source goes to that does not say it.
        draws: How many draws.
        own: As in ``drawn``.
    """
    total = np.full(draws, float(iteration.ns))
    for name, (low, high) in sorted(iteration.sources.items()):
        parts: Sequence[tuple[object, float]] = [(key, 1.0)]
        if name in iteration.of:
            parts = list(iteration.of[name].items())
        # parts of length 1 together, so that their sum has deviation 1
        length = math.hypot(*[part_ns for _, part_ns in parts])
        own_deviations = np.zeros(draws)
        for part, part_ns in parts:
            own_deviations += _normal(draws, name, part) * part_ns / length
        shared_deviations = np.sqrt(1 - own**2) * _normal(draws, name)
        deviations = shared_deviations + own * own_deviations
        ends = np.where(deviations > 0, deviations * high, deviations * low)
        total += ends / _DEVIATIONS
    return total


def _normal(draws: int, *names: object) -> np.ndarray:
    """Draw float64 [draws]: the same for the same names, whatever else is drawn."""
    seed = zlib.crc32(repr(names).encode())
    return np.random.default_rng(seed).standard_normal(draws)


def standings(estimates: Sequence[UncertainTime]) -> list[Standing]:
    """Place each job among all, in the order given.

    A job belongs to a group unless it is slower than some job of it at both ends of the 95 %
    interval, so no two of a group surely differ.
    """
    if not estimates:
        return []
    times = drawn(estimates)
    order = sorted(range(len(estimates)), key=lambda job: estimates[job].ns)
    fastest = order[0]

    # the chance to be the fastest; jobs that are as fast in every draw share it
    wins = np.bincount(times.argmin(axis=1), minlength=len(estimates))
    chances = wins / _DRAWS
    ties = [job for job in order if np.array_equal(times[:, job], times[:, fastest])]
    chances[ties] = chances[ties].sum() / len(ties)

    group_of_job: dict[int, int] = {}
    members: list[int] = []
    group = 1
    for job in order:
        is_slower = [_is_surely_slower(times[:, job], times[:, member]) for member in members]
        # a job that is slower than one of the group begins the next
        if any(is_slower):
            members = []
            group += 1
        members.append(job)
        group_of_job[job] = group

    slower = times - times[:, [fastest]]
    lows, highs = np.quantile(slower, _ENDS, axis=0)
    places = []
    for job, iteration in enumerate(estimates):
        place = Standing(
            group=group_of_job[job],
            slower_ns=iteration.ns - estimates[fastest].ns,
            low_ns=float(lows[job]),
            high_ns=float(highs[job]),
            best=float(chances[job]),
        )
        places.append(place)
    return places


def _is_surely_slower(times: np.ndarray, member_times: np.ndarray) -> bool:
    """Say whether drawn times are above those of a member at both ends of the interval."""
    return bool(np.mean(times <= member_times) < _ENDS[0])
