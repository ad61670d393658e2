"""What an answer says first of an iteration's time: one number, or a range over hosts.

In : a timeline.  Out: Headline.  Commands print its text, JSON has all of it.  Where GPUs decide,
an iteration takes as long on every host, and the headline is one number.  Where the host decides,
one number would be that of one host, so the headline says what the iteration takes on those that
were measured (``costs.measured_hosts``), until somebody measures the target's.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from megatron_prism.core.units import NS, format_ns
from megatron_prism.replay.costs.host import MODELLED_INDEX, indices_of
from megatron_prism.replay.costs.machine import named_in
from megatron_prism.replay.costs.measured_hosts import MEASURED_HOSTS, HostKind, indices_of_kind
from megatron_prism.replay.timeline import Timeline
from megatron_prism.replay.uncertainty.differences import UncertainTime, of_sources
from megatron_prism.replay.uncertainty.variations import Variations
from megatron_prism.replay.whatif import host_factors

# of the iteration: from here on hosts make more of a difference than an answer is off without a GPU
# where GPUs decide (docs/accuracy.md)
_DECIDES = 0.1
_MEASURE = "prism calibrate --host takes 10 s"
# between the fastest and the slowest measured host, for the mean over all
_BETWEEN = 1.0, 1.4


@dataclass(frozen=True)
class HostAnswer:
    """What an iteration takes on some hosts.

    Attributes:
        where: whose hosts, in words.
        low_index: of the fastest of them.
        high_index: of the slowest.
        low_ns: the least that an iteration takes on them.
        high_ns: the most.
    """

    where: str
    low_index: float
    high_index: float
    low_ns: int
    high_ns: int


@dataclass(frozen=True)
class Headline:
    """What an answer says first.

    Attributes:
        text: the headline.
        assumes: machine and host that ``iteration_ns`` is of, in words.
        machine: its name; "" if nobody knows.
        host_decides: whether measured hosts differ by more than a tenth of the iteration.
        iteration_ns: as replayed.
        low_ns: on the fastest measured host if ``host_decides``, else ``iteration_ns``.
        high_ns: on the slowest measured host if ``host_decides``, else ``iteration_ns``.
        expected_ns: the mean over all measured hosts, by which layouts are ranked;
            ``iteration_ns`` without ``answers``.
        answers: by whose hosts; none where hosts take no time, where the host was named, and where
            no slice has a host's index.
    """

    text: str
    assumes: str
    machine: str
    host_decides: bool
    iteration_ns: int
    low_ns: int
    high_ns: int
    expected_ns: float
    answers: tuple[HostAnswer, ...] = ()


def headline(timeline: Timeline) -> Headline:
    """Say what an iteration takes, over measured hosts where the target's is not known."""
    iteration_ns = timeline.iteration_ns
    variations = Variations(timeline)
    one_number = Headline(
        text=format_ns(iteration_ns),
        assumes=_assumptions(variations),
        machine=timeline.prices.machine,
        host_decides=False,
        iteration_ns=iteration_ns,
        low_ns=iteration_ns,
        high_ns=iteration_ns,
        expected_ns=float(iteration_ns),
    )
    # one number: hosts take no time, the host was named, or no slice has a host's index
    has_indices = bool(indices_of(timeline.graph.programs.source))
    if not variations.knows_host or variations.has_named_host or not has_indices:
        return one_number
    ns_by_index = _ns_by_index(variations)
    answers = _answers(variations, ns_by_index)
    expected_ns = _mean_over_hosts(ns_by_index)
    spread_ns = max(ns_by_index.values()) - min(ns_by_index.values())
    host_decides = spread_ns > _DECIDES * iteration_ns
    # GPUs decide: what hosts make of it is in the interval
    if not host_decides:
        return dataclasses.replace(one_number, expected_ns=expected_ns, answers=answers)
    said_hosts = [f"{_range(answer)} {answer.where}" for answer in answers]
    return dataclasses.replace(
        one_number,
        text=f"{', '.join(said_hosts)}; {_MEASURE}",
        host_decides=True,
        low_ns=min(answer.low_ns for answer in answers),
        high_ns=max(answer.high_ns for answer in answers),
        expected_ns=expected_ns,
        answers=answers,
    )


def over_hosts(
    iteration_ns: float, sources: Iterable[Mapping[str, object]], expected_ns: float
) -> UncertainTime:
    """Centre an uncertain iteration on the mean over measured hosts.

    A layout that waits for its host is then as slow as on a host that nobody chose, and not as fast
    as on the best.  The ends of its range stay where they are.

    Args:
        iteration_ns: as replayed.
        sources: its sources of uncertainty, as of ``differences.of_sources``.
        expected_ns: of its headline.
    """
    estimate = of_sources(iteration_ns, sources)
    ends = dict(estimate.sources)
    # no host moves it
    if "host" not in ends:
        return estimate
    more_ns = expected_ns - estimate.ns
    low_ns, high_ns = ends["host"]
    ends["host"] = max(0.0, low_ns + more_ns), max(0.0, high_ns - more_ns)
    return dataclasses.replace(estimate, ns=expected_ns, sources=ends)


def _assumptions(variations: Variations) -> str:
    """Name the machine and the host that the replay is of."""
    machine = _short_name(variations.prices.machine)
    source = variations.timeline.graph.programs.source
    index_of_rank = indices_of(source)
    if variations.has_named_host:
        host = "the host that was named"
    elif variations.has_modelled_host:
        host = f"hosts like NVIDIA's (index {MODELLED_INDEX}, assumed)"
    elif index_of_rank:
        index = statistics.median(index_of_rank.values())
        host = f"the hosts that captured (index {index:.2g})"
    # hosts took time, but nobody knows how fast they are
    elif variations.knows_host or variations.has_delayed_segments:
        host = "the hosts that captured"
    else:
        host = "hosts that are never late"
    if not machine:
        return f"on {host}"
    return f"on {machine}, {host}"


def _short_name(machine: str) -> str:
    """``H200`` of a shipped machine or one like it; others by their name without their links."""
    shipped_name = named_in(machine)
    if shipped_name is not None:
        return shipped_name.partition("_")[0].upper()
    return machine.partition(",")[0]


def _ns_by_index(variations: Variations) -> dict[float, int]:
    """Replay the iteration on hosts from the fastest to the slowest that were measured."""
    programs = variations.timeline.graph.programs
    iteration_ns = variations.timeline.iteration_ns
    indices = {host.index for host in MEASURED_HOSTS}
    rented = indices_of_kind(HostKind.RENTED)
    shown = {min(indices), max(indices), rented[0], rented[-1], *_BETWEEN}
    shown.add(MODELLED_INDEX)
    ns_by_index = {}
    for index in sorted(shown):
        # slices without a GPU are replayed on such a host already
        if index == MODELLED_INDEX and variations.has_modelled_host:
            ns_by_index[index] = iteration_ns
            continue
        factors = [float(factor) for factor in host_factors(programs, index)]
        # variations leave out that calls share links: only what a host adds counts
        more_ns = variations.with_hosts(factors) - variations.base_ns
        ns_by_index[index] = iteration_ns + more_ns
    return ns_by_index


def _answers(variations: Variations, ns_by_index: dict[float, int]) -> tuple[HostAnswer, ...]:
    """Sum up what the iteration takes, by whose hosts."""
    answers = []
    iteration_ns = variations.timeline.iteration_ns
    # a GPU's slices have the times of a host that was there
    if not variations.has_modelled_host:
        source = variations.timeline.graph.programs.source
        index = statistics.median(indices_of(source).values())
        where = f"on the hosts that captured (index {index:.2g})"
        answers.append(HostAnswer(where, index, index, iteration_ns, iteration_ns))
    # NVIDIA's two kinds: between them
    ns = ns_by_index[MODELLED_INDEX]
    nvidia = f"on {HostKind.NVIDIA.value}"
    answers.append(HostAnswer(nvidia, MODELLED_INDEX, MODELLED_INDEX, ns, ns))
    rented = indices_of_kind(HostKind.RENTED)
    # a slower host can make the last of two iterations shorter
    rented_ns = [ns for index, ns in ns_by_index.items() if rented[0] <= index <= rented[-1]]
    where = f"on {HostKind.RENTED.value}"
    answers.append(HostAnswer(where, rented[0], rented[-1], min(rented_ns), max(rented_ns)))
    return tuple(answers)


def _mean_over_hosts(ns_by_index: dict[float, int]) -> float:
    """Average the iteration over all measured hosts, each once."""
    indices = sorted(ns_by_index)
    times_ns = [ns_by_index[index] for index in indices]
    host_indices = [host.index for host in MEASURED_HOSTS]
    return float(np.mean(np.interp(host_indices, indices, times_ns)))


def _range(answer: HostAnswer) -> str:
    """``577 ms``, or ``0.65 to 1.3 s`` of hosts that differ."""
    if answer.low_index == answer.high_index:
        return format_ns(answer.low_ns)
    unit = "ns"
    for name in ("us", "ms", "s"):
        if answer.high_ns >= NS[name]:
            unit = name
    low, high = _rounded(answer.low_ns / NS[unit]), _rounded(answer.high_ns / NS[unit])
    if low == high:
        return f"{low} {unit}"
    return f"{low} to {high} {unit}"


def _rounded(value: float) -> str:
    """Two significant digits, and all before the point."""
    # 99.5 and more is 100 in two digits
    if value >= 99.5:
        return f"{value:,.0f}"
    return f"{value:.2g}"
