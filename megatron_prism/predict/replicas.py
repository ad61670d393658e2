"""Which ranks make up one copy of the model?

A replica is the ranks that talk to each other in every layer and along the pipeline (tp x cp,
etp x ep, pp); replicas meet at the end of an iteration.
"""

from __future__ import annotations

import math

import numpy as np

from megatron_prism.graph.world_graph import WorldGraph

__all__ = ["replica_of", "replicas"]


def _together(graph: WorldGraph) -> int:
    """Ranks of a stage that make up one replica."""
    world = graph.programs.world
    etp = world.tp if world.etp is None else world.etp
    return math.lcm(world.tp * world.cp, etp * world.ep)


def replicas(graph: WorldGraph) -> tuple[int, tuple[int, ...]]:
    """(independent replicas, members of each class in one)."""
    world = graph.programs.world
    count = max(1, world.size // (world.pp * _together(graph)))
    if any(ranks % count for ranks in graph.classes.counts):
        count = 1  # not alike: the whole world waits for all of itself
    return count, tuple(ranks // count for ranks in graph.classes.counts)


def replica_of(graph: WorldGraph, ranks: np.ndarray) -> np.ndarray:
    """The replica that each rank is in."""
    world = graph.programs.world
    if replicas(graph)[0] == 1:
        return np.zeros(len(ranks), dtype=np.int64)
    tp, cp, dp = (np.asarray(world._along(axis, ranks)) for axis in ("tp", "cp", "dp"))
    return np.asarray((tp + world.tp * (cp + world.cp * dp)) // _together(graph))
