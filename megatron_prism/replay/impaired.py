"""Slow network interfaces of some ranks: their calls between nodes take longer.

``marked`` puts these ranks into classes of their own, ``priced`` makes their calls longer.  A
modelled time only: a call is as slow as its slowest NIC, and calls inside a node do not use it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from megatron_prism.core.collectives import BY_NAME
from megatron_prism.core.ops import NAMES
from megatron_prism.core.programs import Programs
from megatron_prism.core.selectors import format_ranks
from megatron_prism.graph.world_graph import WorldGraph
from megatron_prism.replay import whatif
from megatron_prism.replay.costs import Prices
from megatron_prism.replay.costs.machine import Machine

__all__ = ["SlowNic", "marked", "priced"]

SlowNic = tuple[tuple[int, ...], float, int]  # ranks, bandwidth factor, more latency in ns


def marked(programs: Programs, nics: Sequence[SlowNic]) -> Programs:
    """The same world with the ranks of every slow NIC in classes of their own."""
    for ranks, factor, latency in nics:
        what = f"NIC of {format_ranks(ranks)}: bandwidth x {factor:g}, latency + {latency} ns"
        programs = whatif.assumed(whatif.apart(programs, ranks, what), what)
    return programs


def priced(graph: WorldGraph, prices: Prices, machine: Machine, nics: Sequence[SlowNic]) -> Prices:
    """``prices`` with the calls between nodes of every slow NIC longer."""
    for nic in nics:
        prices = _one(graph, prices, machine, nic)
    return prices


def _one(graph: WorldGraph, prices: Prices, machine: Machine, nic: SlowNic) -> Prices:
    ranks, factor, latency = nic
    classes = np.zeros(len(graph.classes), dtype=bool)
    classes[graph.classes.of[list(ranks)]] = True
    meet, chosen = graph.rendezvous, np.zeros(len(graph.rendezvous), dtype=bool)
    known: dict[tuple[int, str, int, bool], bool] = {}
    for number in np.unique(_owners(meet.start)[classes[meet.classes]]).tolist():
        owner, op = meet.meeting(number)[0]
        program = graph.program_list[owner]
        row = program.ops[op]
        pair = BY_NAME[NAMES[row["name"]]].kind == "pair"
        key = (owner, program.strings[row["group"]], int(row["peer"]), pair)
        if key not in known:
            known[key] = _between_nodes(graph, machine, *key)
        chosen[number] = known[key]
    slower = np.rint(prices.meetings / factor).astype(np.int64) + latency
    sources = list(prices.sources)
    return dataclasses.replace(
        prices,
        meetings=np.where(chosen, slower, prices.meetings),
        meeting_source=whatif._relabelled(prices.meeting_source, chosen, "slow NIC", sources),
        sources=tuple(sources),
    )


def _owners(start: np.ndarray) -> np.ndarray:
    """The rendezvous of every entry of its table."""
    return np.repeat(np.arange(len(start) - 1), np.diff(start))


def _between_nodes(
    graph: WorldGraph, machine: Machine, owner: int, group: str, peer: int, pair: bool
) -> bool:
    membership, rank = graph.groups[group], graph.classes.representatives[owner]
    members = membership.group(rank)
    if pair:
        other = (int(membership.position[rank]) + peer) % len(members)
        members = np.array([rank, int(members[other])])
    return len(np.unique(members // machine.gpus_per_node)) > 1
