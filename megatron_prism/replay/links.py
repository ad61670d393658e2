"""Which transfers share which links?  The ports of every rank, once per class.

In : a WorldGraph and how many ranks a node has.  Out: Links, what ``events`` shares out.  Each rank
has a port into its node and one to the network, and each of them two directions.  All ranks of a
class use theirs alike, so a port of a class stands for one of each of its ranks, exactly.  A node's
shared uplinks and the switches behind them are not in here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_prism.core.ops import CODE, IS_PAIR
from megatron_prism.graph.world_graph import WorldGraph

__all__ = ["Links", "ports"]

_OUT, _IN = 0, 1


@dataclass(frozen=True)
class Links:
    """start : int64 [rendezvous + 1], slices of ``of``: the links that each rendezvous uses."""

    start: np.ndarray
    of: np.ndarray

    def __len__(self) -> int:
        return int(self.of.max(initial=-1)) + 1


def ports(graph: WorldGraph, gpus_per_node: int) -> Links:
    """Link ``4 c + 2 net + in``: of class c, inside the node or to the network, out of it or in.

    Calls whose group (or pair) is on one node go inside, others over the network, for the lowest
    rank of a class as for all of it.
    """
    meet = graph.rendezvous
    number = np.repeat(np.arange(len(meet), dtype=np.int64), np.diff(meet.start))
    base = np.empty(len(number), dtype=np.int64)
    names = np.empty(len(number), dtype=np.uint8)
    for index, program in enumerate(graph.program_list):
        mine = np.flatnonzero(meet.classes == index)
        ops = program.ops[meet.ops[mine]]
        names[mine] = ops["name"]
        codes = np.stack([ops["group"].astype(np.int64), IS_PAIR[ops["name"]] * ops["peer"]])
        kinds, which = np.unique(codes, axis=1, return_inverse=True)
        across = [
            _leaves(graph, index, program.strings[group], peer, gpus_per_node)
            for group, peer in kinds.T.tolist()
        ]
        base[mine] = 4 * index + 2 * np.array(across, dtype=np.int64)[which.ravel()]
    out, into = names != CODE["recv"], names != CODE["send"]
    owners = np.concatenate([number[out], number[into]])
    found = np.concatenate([base[out] + _OUT, base[into] + _IN])
    order = np.argsort(owners, kind="stable")
    start = np.searchsorted(owners[order], np.arange(len(meet) + 1))
    return Links(start.astype(np.int64), found[order])


def _leaves(graph: WorldGraph, index: int, name: str, peer: int, gpus_per_node: int) -> bool:
    """Whether the call reaches beyond the node."""
    membership, rank = graph.groups[name], graph.classes.representatives[index]
    members = membership.group(rank)
    if peer:
        members = members[[(int(membership.position[rank]) + peer) % len(members)]]
    return bool((members // gpus_per_node != rank // gpus_per_node).any())
