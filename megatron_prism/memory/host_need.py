"""What a job needs of its hosts' memory, as far as slices say it.

Slices of tier meta keep the most that the large copies on their rank's host would have taken at
once (``--optimizer-cpu-offload``).  The process itself, its data and what CUDA rounds pinned memory
up to come on top.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_prism.core.programs.program import WHAT_IF, Programs
from megatron_prism.core.programs.slices import HOST_MEMORY
from megatron_prism.core.world import World

_NODE = 8  # ranks of a host where nobody says how many
_BYTES = re.compile(r"(?<!\S)(\d{1,9})=(\d{1,16})(?!\S)")


@dataclass(frozen=True)
class HostNeed:
    """What the host that needs most must have.

    rank_bytes : of the rank that needs most
    node_bytes : of all ranks of a host
    node_ranks : how many these are
    what_if    : other data-parallel sizes, which the figures do not know; "" if there are none
    """

    rank_bytes: int
    node_bytes: int
    node_ranks: int
    what_if: str = ""


def bytes_of(source: Mapping[str, str]) -> dict[int, int]:
    """Captured rank -> bytes of its host, as far as the slices say; a file may lie."""
    matches = _BYTES.finditer(source.get(HOST_MEMORY, ""))
    return {int(match[1]): int(match[2]) for match in matches}


def host_need(programs: Programs) -> HostNeed | None:
    """What ``programs`` need of a host; None if nothing is known of that, or nothing is kept
    there.
    """
    captured = bytes_of(programs.source)
    of_program = np.array([captured.get(program.rank, 0) for program in programs.programs])
    if not of_program.any():
        return None

    # each rank needs what the captured rank of its program needs
    place = programs.program_of
    of_rank = np.where(place < 0, 0, of_program[place])
    node_bytes, node_ranks = most_of_a_node(programs.world, of_rank)
    resized = resized_replicas(programs.source)
    return HostNeed(int(of_rank.max()), node_bytes, node_ranks, resized)


def most_of_a_node(world: World, rank_bytes: np.ndarray) -> tuple[int, int]:
    """Return the bytes of the host whose ranks need most, and how many ranks a host has."""
    node_ranks = min(world.gpus_per_node or _NODE, world.size)
    of_node = np.add.reduceat(rank_bytes, np.arange(0, world.size, node_ranks))
    return int(of_node.max()), node_ranks


def resized_replicas(source: Mapping[str, str]) -> str:
    """Return what-ifs of another number of replicas, in words; "" if there are none.

    They change what the optimizer holds.  Other numbers of microbatches leave it as it is.
    """
    changes = source.get(WHAT_IF, "").split("; ")
    resized = [change.partition(":")[0] for change in changes if change.startswith("data-parallel")]
    return "; ".join(resized)
