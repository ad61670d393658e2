"""What-ifs: slow ranks or NICs, faster calls, another host or machine, oversubscribed switches.

Other replicas and microbatches are in ``replicas`` and ``microbatches``.

A what-if, and a planted fault that costs time, is an ``Edit`` of programs and of prices.  Nothing
is changed in place.  What an edit assumes is in ``Programs.source["what-if"]`` and in the new
provenance of the prices that it changed.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from megatron_prism.core.errors import UsageError
from megatron_prism.core.groups import named_group
from megatron_prism.core.programs.ops import CODE, IS_CALL, NAMES
from megatron_prism.core.programs.program import WHAT_IF, Program, Programs
from megatron_prism.core.world import format_ranks
from megatron_prism.graph.world_graph import CallKind, WorldGraph, build
from megatron_prism.replay.costs import Prices, price_ops, relabelled
from megatron_prism.replay.costs.collectives import Calibration
from megatron_prism.replay.costs.host import host_scaled, indices_of
from megatron_prism.replay.costs.host_index import read_host_index
from megatron_prism.replay.costs.machine import Machine
from megatron_prism.replay.costs.provenance import Provenance
from megatron_prism.replay.network import Topology

_FINEST = 1000  # denominators of factors
_Prices = Callable[[WorldGraph, Prices, Machine], Prices]


@dataclass(frozen=True)
class Edit:
    """One thing that is not as captured.

    Attributes:
        text: What it assumes, in words; "": nothing that a reader must know.
        ranks: Ranks that it sets apart: they are in other classes than all others.
        programs: What it makes of the programs.
        prices: What it makes of the prices on a machine.
    """

    text: str = ""
    ranks: tuple[int, ...] = ()
    programs: Callable[[Programs], Programs] = lambda programs: programs
    prices: _Prices = lambda graph, prices, machine: prices


def edited(programs: Programs, edits: Iterable[Edit]) -> WorldGraph:
    """Make the world graph of the programs that edits make one after the other.

    Raises:
        WorldError: A rank does not exist.
        PrismError: Calls of the ranks do not fit together.
    """
    # ranks of an edit become classes of their own
    separate_ranks: list[list[int]] = []
    for edit in edits:
        programs = edit.programs(programs)
        if edit.text:
            programs = with_assumption(programs, edit.text)
        if edit.ranks:
            ranks = [programs.world.check_rank(rank) for rank in edit.ranks]
            separate_ranks.append(ranks)
    graph = build(programs, separate_ranks)
    graph.check_fits()
    return graph


def modelled_calls(programs: Programs) -> Edit:
    """Drop the times that calls took: in another world they take others."""
    for program in programs.programs:
        call_ns = program.ops["ns"][_is_call(program.ops)]
        if (call_ns >= 0).any():
            text = "calls as modelled, not as they were traced"
            return Edit(text, programs=lambda captured: _without_times(captured, _is_call))
    return Edit()


def _is_call(ops: np.ndarray) -> np.ndarray:
    """Say which ops are calls."""
    return np.asarray(IS_CALL[ops["name"]])


def _is_modelled_segment(ops: np.ndarray) -> np.ndarray:
    """Say which ops have flops or bytes, so that a roofline has a time for them."""
    return np.asarray((ops["flops"] >= 0) | (ops["traffic"] >= 0))


def _without_times(programs: Programs, chosen: Callable[[np.ndarray], np.ndarray]) -> Programs:
    """Make programs whose chosen ops do not say how long they take."""
    changed: list[Program] = []
    for program in programs.programs:
        ops = program.ops.copy()
        ops["ns"][chosen(ops)] = -1
        changed.append(dataclasses.replace(program, ops=ops))
    return dataclasses.replace(programs, programs=tuple(changed))


def without_unused(programs: Programs) -> Programs:
    """Make the same world without programs that no rank runs."""
    used, program_of = np.unique(programs.program_of, return_inverse=True)
    used_programs = tuple(programs.programs[index] for index in used.tolist())
    return dataclasses.replace(programs, programs=used_programs, program_of=program_of.ravel())


def slow_ranks(
    ranks: Iterable[int],
    factor: Fraction | float | str,
    segments: Callable[[Program], np.ndarray] | None = None,
) -> Edit:
    """Let ranks take longer to compute.

    Args:
        ranks: The ranks.
        factor: How many times as long, rounded up (3/2: half as long again).
        segments: bool [ops] of a program, the segments that do; None: all.
    """
    ranks, exact_factor = tuple(sorted(set(ranks))), parse_factor(factor)
    text = f"ranks {format_ranks(ranks)} compute"
    if len(ranks) == 1:
        text = f"rank {ranks[0]} computes"

    def prices(graph: WorldGraph, prices: Prices, machine: Machine) -> Prices:
        """Make the segments of the ranks' classes longer."""
        # as fast as captured
        if exact_factor == 1:
            return prices
        compute, source = list(prices.compute), list(prices.compute_source)
        sources = list(prices.sources)

        # the ranks are classes of their own
        for index in np.unique(graph.classes.of[list(ranks)]).tolist():
            program = graph.program_list[index]
            is_slow = program.ops["name"] == CODE["compute"]
            if segments is not None:
                is_slow &= segments(program)
            slow_ns = _scaled(compute[index], exact_factor)
            compute[index] = np.where(is_slow, slow_ns, compute[index])
            source[index] = relabelled(source[index], is_slow, f"x {exact_factor}", sources)
        return _with_compute(prices, compute, source, sources)

    return Edit(f"{text} {factor} times as long", ranks, prices=prices)


def _with_compute(
    prices: Prices,
    compute: Iterable[np.ndarray],
    compute_source: Iterable[np.ndarray],
    sources: Iterable[str],
) -> Prices:
    """Give prices other times of segments, with their provenance."""
    return dataclasses.replace(
        prices,
        compute=tuple(compute),
        compute_source=tuple(compute_source),
        sources=tuple(sources),
    )


def faster_calls(factor: Fraction | float | str, name: str = "", group: str = "") -> Edit:
    """Make calls faster.

    Args:
        factor: How many times as fast.
        name: Of the calls: all_reduce, …; send and recv mean messages; "": all.
        group: Of the calls; tp means TENSOR_MODEL_PARALLEL_GROUP, as in faults; "": all.

    Raises:
        UsageError: There are no such calls; raised when prices are made.
    """
    speed = parse_factor(factor)
    # messages are kinds of sends
    kind_name = name
    if name == "recv":
        kind_name = "send"

    def is_faster(kind: CallKind) -> bool:
        """Say whether calls of a kind are meant."""
        if kind_name and kind_name != kind.name:
            return False
        return not group or named_group(group, kind.group)

    def prices(graph: WorldGraph, prices: Prices, machine: Machine) -> Prices:
        """Make the calls shorter."""
        chosen = graph.calls_where(is_faster)
        if not chosen.any():
            raise _no_such_calls(graph, kind_name, group)
        faster_ns = _scaled(prices.collective_ns, 1 / speed)
        return _with_calls(prices, chosen, faster_ns, f"{speed} x as fast")

    place = ""
    if group:
        place = f" in {group}"
    return Edit(f"{name or 'all'} calls{place} {factor} times as fast", prices=prices)


def _no_such_calls(graph: WorldGraph, name: str, group: str) -> UsageError:
    """Say that a world has no calls of a name in a group, and which ones may be meant."""
    calls = name or "calls"
    if group:
        calls = f"{calls} in {group}"
    group_names: set[str] = set()
    for program in graph.program_list:
        group_names.update(program.groups())
    names = sorted(group_names)

    # the nearest name, unless that is the one that was given
    asked = group or name
    similar = difflib.get_close_matches(asked, [*NAMES, *names], n=1)
    suggestion = ""
    if similar and similar[0] != asked:
        suggestion = f"did you mean {similar[0]}? "
    return UsageError(
        f"the world has no {calls}", fix=f"{suggestion}its groups are {', '.join(names)}"
    )


def _with_calls(prices: Prices, chosen: np.ndarray, ns: np.ndarray, assumption: str) -> Prices:
    """Give chosen calls other times, with what was assumed."""
    sources = list(prices.sources)
    source = relabelled(prices.collective_source, chosen, assumption, sources)
    return dataclasses.replace(
        prices,
        collective_ns=np.where(chosen, ns, prices.collective_ns),
        collective_source=source,
        sources=tuple(sources),
    )


def other_host(host: str | os.PathLike[str] | float, text: str = "") -> Edit:
    """Make hosts as fast as another one.

    Args:
        host: The other host (``host_factors``).
        text: What that assumes, in words.

    Raises:
        UsageError: The slices do not say how long their host takes, or how fast it was; raised when
            prices are made.
    """

    def prices(graph: WorldGraph, prices: Prices, machine: Machine) -> Prices:
        """Give every class the times of the other host."""
        if not any(program.knows_host for program in graph.programs.programs):
            raise UsageError(
                "the slices do not say how long their host takes, so it cannot be another one",
                fix="capture the ranks on a GPU, or leave host= out",
            )
        factor_of_program = host_factors(graph.programs, host)
        factors = [float(factor_of_program[number]) for number in graph.classes.programs]
        sources = list(prices.sources)
        host_source: list[np.ndarray] = []
        for factor, source in zip(factors, prices.host_source, strict=True):
            every_op = np.ones(len(source), dtype=bool)
            assumption = host_scaled(f"{factor:.3g}")
            host_source.append(relabelled(source, every_op, assumption, sources))
        return dataclasses.replace(
            prices.on_hosts(factors), host_source=tuple(host_source), sources=tuple(sources)
        )

    return Edit(text, prices=prices)


_NUMBER = re.compile(r"([\d./e+-]+)(x?)")


def host_factors(programs: Programs, host: str | os.PathLike[str] | float) -> list[Fraction]:
    """Say how many times as long as in the slices hosts take, of every program.

    Args:
        programs: Of the slices.
        host: The index of the host; a file of ``prism calibrate --host``, or traces of
            torch.profiler (a file or a folder), which say it; ``0.6x``: that many times as long.

    Raises:
        UsageError: The slices do not say how fast their host was.
    """
    text = str(host)
    if isinstance(host, os.PathLike):
        text = os.fspath(host)
    number = None
    if not os.path.exists(text):
        number = _NUMBER.fullmatch(text)

    # a factor needs no index of the slices' hosts
    if number is not None and number[2]:
        factor = parse_factor(number[1])
        return [factor] * len(programs.programs)

    # an index, or a file that has one
    if number is not None:
        target_index = float(parse_factor(number[1]))
    else:
        target_index = read_host_index(text).index
    index_of_rank = indices_of(programs.source)
    if not index_of_rank:
        raise UsageError(
            "the slices do not say how fast their host was",
            fix="capture them again with this release, or say by how much: host=0.6x",
        )

    # ranks whose slices say nothing had a usual host
    usual_index = statistics.median(index_of_rank.values())
    factors: list[Fraction] = []
    for program in programs.programs:
        index = index_of_rank.get(program.rank, usual_index)
        factors.append(parse_factor(target_index / index))
    return factors


def moved(measured_on: Machine, calibration: Calibration | None, target: Machine) -> Edit:
    """Move programs to another machine than the one that measured their segments.

    A measured segment is scaled by what the roofline says of it on the two machines; calls are the
    target's.  A segment of which flops and bytes are unknown keeps its time.

    Args:
        measured_on: The machine that measured the segments.
        calibration: Of the target.
        target: The other machine.
    """

    def prices(graph: WorldGraph, prices: Prices, machine: Machine) -> Prices:
        """Scale measured segments, and price all else on the target."""
        new = price_ops(graph, target, calibration)

        # both by roofline alone: one of them may have no op table
        untimed_programs = _without_times(graph.programs, _is_modelled_segment)
        untimed = dataclasses.replace(graph, programs=untimed_programs)
        old_rooflines = price_ops(untimed, dataclasses.replace(measured_on, ops=""))
        new_rooflines = price_ops(untimed, dataclasses.replace(target, ops=""))
        sources = list(new.sources)
        compute: list[np.ndarray] = []
        compute_source: list[np.ndarray] = []
        assumption = f"scaled from {measured_on.name} to {target.name} by their rooflines"

        # measured segments by their ratio, all others as the target prices them
        for index, old_ns in enumerate(prices.compute):
            is_measured = prices.compute_source[index] == Provenance.MEASURED_SEGMENT
            old_roofline_ns = old_rooflines.compute[index]
            quotient = new_rooflines.compute[index] / np.maximum(old_roofline_ns, 1)
            ratio = np.where(old_roofline_ns > 0, quotient, 1.0)
            scaled_ns = np.rint(old_ns * ratio).astype(np.int64)
            compute.append(np.where(is_measured, scaled_ns, new.compute[index]))
            source = new.compute_source[index]
            compute_source.append(relabelled(source, is_measured, assumption, sources))
        return _with_compute(new, compute, compute_source, sources)

    return Edit(f"on {target.name}", prices=prices)


def with_assumption(programs: Programs, assumption: str, batch: Fraction | int = 1) -> Programs:
    """Say in the programs' source one more thing that is not as captured.

    Args:
        programs: The programs.
        assumption: What differs.
        batch: How many times as large an iteration's batch is.
    """
    # after what was assumed before
    source = {**programs.source}
    earlier = source.get(WHAT_IF)
    source[WHAT_IF] = assumption
    if earlier is not None:
        source[WHAT_IF] = f"{earlier}; {assumption}"

    # what an iteration does grows with its batch
    for key in ("tokens_per_iteration", "model_flops_per_iteration"):
        if source.get(key, "").isdecimal():
            amount = int(source[key]) * batch
            source[key] = str(int(amount))
    return dataclasses.replace(programs, source=source)


_MOST = 10**6  # times as long; more is none that anybody means, and 64 bits of ns end


def parse_factor(factor: Fraction | float | str) -> Fraction:
    """Read a factor as a ratio of small numbers.

    Raises:
        UsageError: It is not above 0, or above a million.
    """
    try:
        exact_factor = Fraction(str(factor)).limit_denominator(_FINEST)
    # no number at all
    except (ValueError, ZeroDivisionError):
        exact_factor = Fraction(0)
    if not 0 < exact_factor <= _MOST:
        raise UsageError(
            f"{str(factor)[:40]} is no factor", fix="above 0, at most a million: 1.5, 3/2"
        )
    return exact_factor


def _scaled(ns: np.ndarray, factor: Fraction) -> np.ndarray:
    """Multiply ns by a factor, rounded up."""
    return -(-ns * factor.numerator // factor.denominator)


def oversubscribed(
    graph: WorldGraph, prices: Prices, machine: Machine, topology: Topology
) -> Prices:
    """Let calls between leaves take longer, for their share of the links above.

    They take as much longer as NCCL's model says of a network that is slower by the
    oversubscription.  All ranks below a leaf are taken to send at once: pessimistic where they do
    not.

    Args:
        graph: The joined programs.
        prices: Their prices without contention.
        machine: The machine that they run on.
        topology: Of its network.
    """
    # every leaf has links for all its ranks
    if topology.oversubscription == 1:
        return prices
    slower_rate = machine.network_rate / topology.oversubscription
    slower_machine = dataclasses.replace(machine, network_rate=slower_rate)
    usual_ns = price_ops(graph, machine).collective_ns
    slower_ns = price_ops(graph, slower_machine).collective_ns

    # calls whose ranks are below several leaves
    leaf_ranks = machine.gpus_per_node * topology.leaf_nodes
    chosen = graph.calls_where(lambda kind: kind.spans(leaf_ranks))
    quotient = slower_ns / np.maximum(1, usual_ns)
    factor = np.where(chosen, quotient, 1.0)
    call_ns = np.rint(prices.collective_ns * factor).astype(np.int64)
    return _with_calls(prices, chosen, call_ns, f"between leaves of a {topology}")


def slow_nic(ranks: Iterable[int], factor: float, latency: int) -> Edit:
    """Slow down the calls between nodes of ranks with a slow NIC.

    Args:
        ranks: The ranks.
        factor: The part of the bandwidth that the calls have.
        latency: ns that they take in addition.
    """
    ranks = tuple(ranks)
    text = f"NIC of {format_ranks(ranks)}: bandwidth x {factor:g}, latency + {latency} ns"

    def prices(graph: WorldGraph, prices: Prices, machine: Machine) -> Prices:
        """Make the calls between nodes longer in which one of the ranks takes part."""
        # calls in which a rank takes part, as far as they leave a node
        matched_calls = graph.matched_calls
        if not len(matched_calls):
            return prices
        slow_classes = graph.classes.of[list(ranks)]
        is_slow_member = np.isin(matched_calls.classes, slow_classes)
        first_members = matched_calls.start[:-1]
        has_slow_member = np.add.reduceat(is_slow_member, first_members) > 0
        chosen = graph.calls_where(lambda kind: kind.spans(machine.gpus_per_node))
        chosen &= has_slow_member
        slower_ns = np.rint(prices.collective_ns / factor).astype(np.int64) + latency
        return _with_calls(prices, chosen, slower_ns, "slow NIC")

    return Edit(text, ranks, prices=prices)
