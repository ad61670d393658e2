"""What a rank writes into a checkpoint, in the source of slices.

The bytes are on the rank's host before they are written.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from megatron_prism.core.programs.program import Programs
from megatron_prism.core.programs.slices import SAVED_BYTES, of_ranks
from megatron_prism.core.world import World
from megatron_prism.memory.host_need import most_of_a_node, resized_replicas


class Holders(Enum):
    """The ranks of a job that hold the same shard."""

    DENSE = "dense"  # the ranks of a data-parallel group
    EXPERT = "expert"  # the ranks of an expert data-parallel group
    # the first rank of these: states of a distributed optimizer that were gathered there
    # (--distrib-optim-fully-reshardable-mem-efficient)
    FIRST_DENSE = "first_dense"
    FIRST_EXPERT = "first_expert"


_OF_EXPERTS = (Holders.EXPERT, Holders.FIRST_EXPERT)
_OF_FIRST = (Holders.FIRST_DENSE, Holders.FIRST_EXPERT)


class Division(Enum):
    """The ranks that divide the shards that all of them hold."""

    NONE = "none"  # --no-ckpt-fully-parallel-save: the first rank writes them
    DATA_PARALLEL = "dp"
    EXPERT_DATA_PARALLEL = "ep_dp"  # --ckpt-fully-parallel-save-process-group ep_dp


_COUNTS = r"((?:\d{1,16}x\d{1,9}(?:\+\d{1,16}x\d{1,9})*)?)"
_DIVISIONS = "|".join(division.value for division in Division)
_TEXT = re.compile(
    r"own:(\d{1,16}),"
    + "".join(f"{holders.value}:{_COUNTS}," for holders in Holders)
    + rf"divided:({_DIVISIONS}),async:([01]),expanded:(\d{{1,16}})"
)


@dataclass(frozen=True)
class SavedBytes:
    """What one rank may write.

    Args:
        own: bytes that this rank alone has: states of a distributed optimizer by buckets.
        shards: bytes of a shard that other ranks have, too -> number of shards, by its holders.
        division: which ranks divide these shards.
        is_async: whether the job trains on while they are written.
        expanded: bytes that copies of quantized tensors take on the device meanwhile.
    """

    own: int
    shards: Mapping[Holders, Mapping[int, int]] = field(default_factory=dict)
    division: Division = Division.DATA_PARALLEL
    is_async: bool = False
    expanded: int = 0

    def as_text(self) -> str:
        """Write it without spaces."""
        text = f"own:{self.own}"
        for holders in Holders:
            counts = sorted(self.shards.get(holders, {}).items())
            joined = "+".join(f"{size}x{count}" for size, count in counts)
            text += f",{holders.value}:{joined}"
        text += f",divided:{self.division.value}"
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
            own, *counts, division, is_async, expanded = match.groups()
            shards = {}
            for holders, joined in zip(Holders, counts, strict=True):
                if joined:
                    shards[holders] = _counted(joined)
            ranks[rank] = SavedBytes(
                int(own), shards, Division(division), is_async == "1", int(expanded)
            )
    return ranks


def _counted(joined: str) -> Counter[int]:
    """Read sizes and counts of shards."""
    counts = Counter[int]()
    for pair in joined.split("+"):
        size, _, count = pair.partition("x")
        counts[int(size)] += int(count)
    return counts


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
        programs: of the job; a rank writes what the captured rank of its program writes. With
            another number of replicas a distributed optimizer has other states: nothing is said.
    """
    of_captured = of_source(programs.source)
    if not of_captured or resized_replicas(programs.source):
        return None
    writes_of_rank: list[SavedBytes | None] = []
    for place in programs.program_of:
        writes = None
        if place >= 0:
            writes = of_captured.get(programs.programs[place].rank)
        writes_of_rank.append(writes)
    rank_bytes = _divided(programs.world, writes_of_rank)
    node_bytes, node_ranks = most_of_a_node(programs.world, rank_bytes)
    return SavingNeed(
        rank_bytes=int(rank_bytes.max()),
        node_bytes=node_bytes,
        node_ranks=node_ranks,
        device_bytes=max(writes.expanded for writes in of_captured.values()),
        is_async=any(writes.is_async for writes in of_captured.values()),
    )


def _divided(world: World, writes_of_rank: Sequence[SavedBytes | None]) -> np.ndarray:
    """Return what each rank writes, bytes.

    Ranks of a group divide whole shards, as Megatron's ``distribute_shards_to_ranks`` does
    (dist_checkpointing/exchange_utils.py:125 @0.19.0).

    Args:
        world: the ranks.
        writes_of_rank: by rank; None where nothing is known of it.
    """
    division = next(writes.division for writes in writes_of_rank if writes is not None)
    rank_bytes = np.zeros(world.size, dtype=np.int64)
    divided_groups: dict[object, np.ndarray] = {}  # alike groups divide alike
    for group in _dividing_groups(world, division):
        writers_of = {}
        for is_expert in (False, True):
            writers_of[is_expert] = _writers(world, group, is_expert)
        members = tuple(id(writes_of_rank[rank]) for rank in group)
        key = (members, str(writers_of))
        if key not in divided_groups:
            writes_of_member = [writes_of_rank[rank] for rank in group]
            divided_groups[key] = _divided_in_group(writes_of_member, writers_of)
        rank_bytes[group] = divided_groups[key]
    return rank_bytes


def _dividing_groups(world: World, division: Division) -> list[list[int]]:
    """Return the groups of ranks that divide what their members hold."""
    groups = defaultdict[object, list[int]](list)
    for rank in range(world.size):
        place = world.coordinates(rank)
        if division is Division.DATA_PARALLEL:
            groups[place.tp, place.pp].append(rank)
        elif division is Division.EXPERT_DATA_PARALLEL:
            groups[place.etp, place.ep, place.pp].append(rank)
        else:
            groups[rank].append(rank)
    return list(groups.values())


def _writers(world: World, group: Sequence[int], is_expert: bool) -> list[list[int]]:
    """Return the places in a group whose ranks hold the same shards, the first replica first.

    Shards of which another group has the first replica are written there.
    """
    places_of = defaultdict[object, list[int]](list)
    is_first = set[object]()
    for place, rank in enumerate(group):
        coordinates = world.coordinates(rank)
        model_part: tuple[int, ...] = (coordinates.tp, coordinates.pp)
        replica = (coordinates.dp, coordinates.cp)
        # experts are replicated over other groups
        if is_expert:
            model_part = (coordinates.etp, coordinates.ep, coordinates.pp)
            replica = (coordinates.edp, 0)
        # the first replica comes first: it alone writes shards that are not divided
        if replica == (0, 0):
            is_first.add(model_part)
            places_of[model_part].insert(0, place)
        else:
            places_of[model_part].append(place)
    return [places for model_part, places in places_of.items() if model_part in is_first]


def _divided_in_group(
    writes_of_member: Sequence[SavedBytes | None],
    writers_of: Mapping[bool, Sequence[Sequence[int]]],
) -> np.ndarray:
    """Return what each rank of a group writes, bytes.

    Args:
        writes_of_member: by place in the group.
        writers_of: whether shards are experts' -> places of the ranks that hold the same shards.
    """
    loads = np.zeros(len(writes_of_member), dtype=np.int64)
    for place, writes in enumerate(writes_of_member):
        if writes is not None:
            loads[place] = writes.own
    rows = []  # (number of writers, -bytes, number of shards, writers)
    for holders in Holders:
        for holding_places in writers_of[holders in _OF_EXPERTS]:
            writes = writes_of_member[holding_places[0]]
            # no program of that rank was captured
            if writes is None:
                continue
            places = list(holding_places)
            # shards that the first replica alone writes
            if holders in _OF_FIRST:
                places = places[:1]
            for size, count in writes.shards.get(holders, {}).items():
                rows.append((len(places), -size, count, sorted(places)))
    # shards that few ranks hold come first, then large ones; each goes to whom has least
    for _, negative_size, count, places in sorted(rows):
        for _ in range(count):
            writer = places[int(np.argmin(loads[places]))]
            loads[writer] -= negative_size
    return loads
