"""What a rank writes into a checkpoint, in the source of slices.

The bytes are on the rank's host before they are written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_prism.core.program import Programs
from megatron_prism.core.slices import SAVED_BYTES, of_ranks

_NODE = 8  # ranks of a host where nobody says how many
_TEXT = re.compile(
    r"own:(\d{1,16}),shared:(\d{1,16}),divided:([01]),async:([01]),expanded:(\d{1,16})"
)


@dataclass(frozen=True)
class SavedBytes:
    """What one rank writes.

    Args:
        own: bytes that this rank alone has: states of a distributed optimizer by buckets.
        shared: bytes of which each rank of its data-parallel group has the same.
        is_divided: whether the ranks of that group each write a part of these
            (--ckpt-fully-parallel-save); else the first rank writes all.
        is_async: whether the job trains on while they are written.
        expanded: bytes that copies of quantized tensors take on the device meanwhile.
    """

    own: int
    shared: int
    is_divided: bool
    is_async: bool
    expanded: int = 0

    def of_rank(self, number: int, num_ranks: int) -> int:
        """Return what a rank of a data-parallel group has on its host.

        Args:
            number: of the rank in the group.
            num_ranks: of the group.
        """
        if self.is_divided:
            # Megatron divides by size, so that each rank has about as much
            return self.own + -(-self.shared // num_ranks)
        if number == 0:
            return self.own + self.shared
        return self.own

    def as_text(self) -> str:
        """Write it without spaces."""
        text = f"own:{self.own},shared:{self.shared},divided:{self.is_divided:d}"
        return f"{text},async:{self.is_async:d},expanded:{self.expanded}"


def of_source(source: Mapping[str, str]) -> dict[int, SavedBytes]:
    """Read what captured ranks write.

    Args:
        source: what slices say of their job; a file may lie.

    Returns:
        Rank -> its writes; a rank whose slice does not say it is absent.
    """
    ranks = {}
    for rank, text in of_ranks(source).get(SAVED_BYTES, {}).items():
        match = _TEXT.fullmatch(text)
        if match is not None:
            own, shared, divided, is_async, expanded = map(int, match.groups())
            ranks[rank] = SavedBytes(own, shared, divided == 1, is_async == 1, expanded)
    return ranks


@dataclass(frozen=True)
class SavingNeed:
    """What a save needs of the hosts of a job, and of its devices beyond the state dict.

    Args:
        rank_bytes: of the rank that needs most.
        node_bytes: of all ranks of the host that needs most.
        node_ranks: how many these are.
        device_bytes: copies of quantized tensors, of the rank that needs most.
        is_async: whether the job trains on meanwhile.
    """

    rank_bytes: int
    node_bytes: int
    node_ranks: int
    device_bytes: int
    is_async: bool


def saving_need(programs: Programs) -> SavingNeed | None:
    """Say what a save needs; None where the slices do not say what is written.

    Args:
        programs: of the job; a rank writes what the captured rank of its program writes.
    """
    of_captured = of_source(programs.source)
    if not of_captured:
        return None
    world = programs.world
    num_replicas = world.size // (world.tp * world.pp)
    rank_bytes = np.zeros(world.size, dtype=np.int64)
    for rank, place in enumerate(programs.program_of):
        if place < 0 or programs.programs[place].rank not in of_captured:
            continue
        coordinates = world.coordinates(rank)
        number = coordinates.dp * world.cp + coordinates.cp
        writes = of_captured[programs.programs[place].rank]
        rank_bytes[rank] = writes.of_rank(number, num_replicas)
    node_ranks = min(world.gpus_per_node or _NODE, world.size)
    node_bytes = np.add.reduceat(rank_bytes, np.arange(0, world.size, node_ranks))
    return SavingNeed(
        rank_bytes=int(rank_bytes.max()),
        node_bytes=int(node_bytes.max()),
        node_ranks=node_ranks,
        device_bytes=max(writes.expanded for writes in of_captured.values()),
        is_async=any(writes.is_async for writes in of_captured.values()),
    )
