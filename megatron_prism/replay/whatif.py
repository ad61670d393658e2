"""What-ifs: slow ranks or NICs, another machine; not other replicas or microbatches.

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
from megatron_prism.core.ops import CODE, IS_CALL, NAMES
from megatron_prism.core.program import Program, Programs
from megatron_prism.core.slices import WHAT_IF
from megatron_prism.core.world import format_ranks
from megatron_prism.graph.world_graph import WorldGraph, build
from megatron_prism.replay.costs import Prices, price_ops, relabelled
from megatron_prism.replay.costs.collectives import Calibration
from megatron_prism.replay.costs.host import host_scaled, indices_of
from megatron_prism.replay.costs.host_index import read_host_index
from megatron_prism.replay.costs.kernels import MEASURED
from megatron_prism.replay.costs.machine import Machine
from megatron_prism.replay.network import Topology

_FINEST = 1000  # denominators of factors
_Prices = Callable[[WorldGraph, Prices, Machine], Prices]


@dataclass(frozen=True)
class Edit:
    """One thing that is not as captured.

    text     : what it assumes, in words; "": nothing that a reader must know
    ranks    : whom it sets apart: they are in other classes than the rest
    programs : what it makes of the programs
    prices   : what it makes of the prices on a machine
    """

    text: str = ""
    ranks: tuple[int, ...] = ()
    programs: Callable[[Programs], Programs] = lambda programs: programs
    prices: _Prices = lambda graph, prices, machine: prices


def edited(programs: Programs, edits: Iterable[Edit]) -> WorldGraph:
    """The world graph of the programs that ``edits`` make one after the other.

    Raises:
        WorldError: a rank that does not exist.
        PrismError: calls of the ranks do not fit together.
    """
    apart = []
    for edit in edits:
        programs = edit.programs(programs)
        if edit.text:
            programs = with_assumption(programs, edit.text)
        if edit.ranks:
            apart.append([programs.world.check_rank(rank) for rank in edit.ranks])
    graph = build(programs, apart)
    graph.check_fits()
    return graph


def modelled_calls(programs: Programs) -> Edit:
    """Without the times that calls took: in another world they take others."""

    def is_call(ops: np.ndarray) -> np.ndarray:
        return np.asarray(IS_CALL[ops["name"]])

    if not any((one.ops["ns"][is_call(one.ops)] >= 0).any() for one in programs.programs):
        return Edit()
    text = "calls as modelled, not as they were traced"
    return Edit(text, programs=lambda given: _without_times(given, is_call))


def _without_times(programs: Programs, chosen: Callable[[np.ndarray], np.ndarray]) -> Programs:
    """Programs whose ``chosen`` ops do not say how long they take."""
    changed = []
    for program in programs.programs:
        ops = program.ops.copy()
        ops["ns"][chosen(ops)] = -1
        changed.append(dataclasses.replace(program, ops=ops))
    return dataclasses.replace(programs, programs=tuple(changed))


def without_unused(programs: Programs) -> Programs:
    """The same world without programs that no rank runs."""
    kept, of = np.unique(programs.program_of, return_inverse=True)
    left = tuple(programs.programs[index] for index in kept.tolist())
    return dataclasses.replace(programs, programs=left, program_of=of.ravel())


def slow_ranks(
    ranks: Iterable[int],
    factor: Fraction | float | str,
    segments: Callable[[Program], np.ndarray] | None = None,
) -> Edit:
    """``ranks`` take ``factor`` times as long to compute, rounded up (3/2: half as long again).

    segments : bool [ops] of a program, those that do; default all
    """
    ranks, by = tuple(sorted(set(ranks))), parse_factor(factor)
    who = f"rank {ranks[0]} computes" if len(ranks) == 1 else f"ranks {format_ranks(ranks)} compute"

    def prices(graph: WorldGraph, given: Prices, machine: Machine) -> Prices:
        compute, source = list(given.compute), list(given.compute_source)
        sources = list(given.sources)
        for index in np.unique(graph.classes.of[list(ranks)]).tolist() if by != 1 else ():
            program = graph.program_list[index]
            chosen = program.ops["name"] == CODE["compute"]
            if segments is not None:
                chosen &= segments(program)
            compute[index] = np.where(chosen, _scaled(compute[index], by), compute[index])
            source[index] = relabelled(source[index], chosen, f"x {by}", sources)
        return dataclasses.replace(
            given, compute=tuple(compute), compute_source=tuple(source), sources=tuple(sources)
        )

    return Edit(f"{who} {factor} times as long", ranks, prices=prices)


def faster_calls(factor: Fraction | float | str, name: str = "", group: str = "") -> Edit:
    """Calls of ``name`` (all_reduce, …; send means messages) in ``group`` are ``factor`` times as
    fast; empty: all of them; tp means TENSOR_MODEL_PARALLEL_GROUP, as in faults.  UsageError if
    there are none.
    """
    speed, op = parse_factor(factor), "send" if name == "recv" else name

    def prices(graph: WorldGraph, given: Prices, machine: Machine) -> Prices:
        chosen = graph.calls_where(
            lambda kind: op in ("", kind.name) and (not group or named_group(group, kind.group))
        )
        if not chosen.any():
            what = " in ".join(filter(None, (op or "calls", group)))
            names = sorted({text for program in graph.program_list for text in program.groups()})
            close = difflib.get_close_matches(group or op, [*NAMES, *names], n=1)
            meant = f"did you mean {close[0]}? " if close and close[0] != (group or op) else ""
            raise UsageError(
                f"the world has no {what}", fix=f"{meant}its groups are {', '.join(names)}"
            )
        faster = _scaled(given.collective_ns, 1 / speed)
        return _with_calls(given, chosen, faster, f"{speed} x as fast")

    where = f" in {group}" if group else ""
    return Edit(f"{name or 'all'} calls{where} {factor} times as fast", prices=prices)


def _with_calls(prices: Prices, chosen: np.ndarray, ns: np.ndarray, what: str) -> Prices:
    """``prices`` in which the chosen calls take ``ns``, which was assumed: ``what``."""
    sources = list(prices.sources)
    return dataclasses.replace(
        prices,
        collective_ns=np.where(chosen, ns, prices.collective_ns),
        collective_source=relabelled(prices.collective_source, chosen, what, sources),
        sources=tuple(sources),
    )


def other_host(host: str | os.PathLike[str] | float, text: str = "") -> Edit:
    """Hosts are as fast as ``host`` (``host_factors``).

    UsageError if the slices do not say how long their host takes, or how fast it was.
    """

    def prices(graph: WorldGraph, given: Prices, machine: Machine) -> Prices:
        if not any(program.knows_host for program in graph.programs.programs):
            raise UsageError(
                "the slices do not say how long their host takes, so it cannot be another one",
                fix="capture the ranks on a GPU, or leave host= out",
            )
        factors = host_factors(graph.programs, host)
        sources, source = list(given.sources), []
        of = [factors[number] for number in graph.classes.programs]
        for each, factor in zip(given.host_source, of, strict=True):
            every, said = np.ones(len(each), dtype=bool), host_scaled(f"{float(factor):.3g}")
            source.append(relabelled(each, every, said, sources))
        lead, hosts = (tuple(map(_scaled, each, of)) for each in (given.lead, given.host))
        return dataclasses.replace(
            given, lead=lead, host=hosts, host_source=tuple(source), sources=tuple(sources)
        )

    return Edit(text, prices=prices)


_NUMBER = re.compile(r"([\d./e+-]+)(x?)")


def host_factors(programs: Programs, host: str | os.PathLike[str] | float) -> list[Fraction]:
    """Return how many times as long as in the slices hosts take, of every program.

    Args:
        programs: of the slices.
        host: the index of the host; a file of ``prism calibrate --host``, or traces of
            torch.profiler (a file or a folder), which say it; ``0.6x``: that many times as long.

    Raises:
        UsageError: the slices do not say how fast their host was.
    """
    text = os.fspath(host) if isinstance(host, os.PathLike) else str(host)
    number = None if os.path.exists(text) else _NUMBER.fullmatch(text)
    if number is not None and number[2]:
        return [parse_factor(number[1])] * len(programs.programs)
    target = read_host_index(text).index if number is None else float(parse_factor(number[1]))
    here = indices_of(programs.source)
    if not here:
        raise UsageError(
            "the slices do not say how fast their host was",
            fix="capture them again with this release, or say by how much: host=0.6x",
        )
    usual = statistics.median(here.values())
    return [parse_factor(target / here.get(one.rank, usual)) for one in programs.programs]


def moved(here: Machine, calibration: Calibration | None, there: Machine) -> Edit:
    """Programs whose segments were measured on ``here`` run on ``there``, of which ``calibration``
    is.

    A measured segment is scaled by what the roofline says of it on the two machines; calls are
    ``there``'s.  A segment of which flops and bytes are unknown keeps its time.
    """

    def prices(graph: WorldGraph, given: Prices, machine: Machine) -> Prices:
        unknown = _without_times(
            graph.programs, lambda ops: (ops["flops"] >= 0) | (ops["traffic"] >= 0)
        )
        bare = dataclasses.replace(graph, programs=unknown)
        new = price_ops(graph, there, calibration)
        # both by roofline alone: one of them may have no op table
        base, roof = (price_ops(bare, dataclasses.replace(one, ops="")) for one in (here, there))
        compute, source, sources = [], [], list(new.sources)
        what = f"scaled from {here.name} to {there.name} by their rooflines"
        for index, old in enumerate(given.compute):
            measured = given.compute_source[index] == MEASURED
            before, after = base.compute[index], roof.compute[index]
            ratio = np.where(before > 0, after / np.maximum(before, 1), 1.0)
            ns = np.rint(old * ratio).astype(np.int64)
            compute.append(np.where(measured, ns, new.compute[index]))
            source.append(relabelled(new.compute_source[index], measured, what, sources))
        return dataclasses.replace(
            new, compute=tuple(compute), compute_source=tuple(source), sources=tuple(sources)
        )

    return Edit(f"on {there.name}", prices=prices)


def with_assumption(programs: Programs, what: str, batch: Fraction | int = 1) -> Programs:
    """The programs, with one more thing that is not as captured in their source, in which a batch
    is ``batch`` times as large.
    """
    said, source = programs.source.get(WHAT_IF), {**programs.source}
    source[WHAT_IF] = what if said is None else f"{said}; {what}"
    for key in ("tokens_per_iteration", "model_flops_per_iteration"):
        if source.get(key, "").isdecimal():
            source[key] = str(int(int(source[key]) * batch))
    return dataclasses.replace(programs, source=source)


_MOST = 10**6  # times as long; more is none that anybody means, and 64 bits of ns end


def parse_factor(factor: Fraction | float | str) -> Fraction:
    """A factor as a ratio of small numbers.  UsageError unless it is one above 0."""
    try:
        found = Fraction(str(factor)).limit_denominator(_FINEST)
    except (ValueError, ZeroDivisionError):
        found = Fraction(0)
    if not 0 < found <= _MOST:
        raise UsageError(
            f"{str(factor)[:40]} is no factor", fix="above 0, at most a million: 1.5, 3/2"
        )
    return found


def _scaled(ns: np.ndarray, factor: Fraction) -> np.ndarray:
    """ns times factor, rounded up."""
    return -(-ns * factor.numerator // factor.denominator)


def oversubscribed(
    graph: WorldGraph, prices: Prices, machine: Machine, topology: Topology
) -> Prices:
    """Calls between leaves take as much longer as NCCL's model says of a network that is slower by
    the oversubscription.  Everybody below a leaf is taken to send at once: pessimistic where they
    do not.
    """
    if topology.oversubscription == 1:
        return prices
    slower = dataclasses.replace(
        machine, network_rate=machine.network_rate / topology.oversubscription
    )
    before, after = (price_ops(graph, one).collective_ns for one in (machine, slower))
    leaf = machine.gpus_per_node * topology.leaf_nodes
    chosen = graph.calls_where(lambda kind: kind.spans(leaf))
    factor = np.where(chosen, after / np.maximum(1, before), 1.0)
    slower_ns = np.rint(prices.collective_ns * factor).astype(np.int64)
    return _with_calls(prices, chosen, slower_ns, f"between leaves of a {topology}")


def slow_nic(ranks: Iterable[int], factor: float, latency: int) -> Edit:
    """Calls between nodes of ``ranks`` have ``factor`` of the bandwidth and take ``latency`` ns
    more.
    """
    ranks = tuple(ranks)
    text = f"NIC of {format_ranks(ranks)}: bandwidth x {factor:g}, latency + {latency} ns"

    def prices(graph: WorldGraph, given: Prices, machine: Machine) -> Prices:
        meet = graph.matched_calls
        mine = np.isin(meet.classes, graph.classes.of[list(ranks)])
        chosen = graph.calls_where(lambda kind: kind.spans(machine.gpus_per_node))
        chosen &= np.add.reduceat(mine, meet.start[:-1]) > 0 if len(meet) else False
        slower = np.rint(given.collective_ns / factor).astype(np.int64) + latency
        return _with_calls(given, chosen, slower, "slow NIC")

    return Edit(text, ranks, prices=prices)
