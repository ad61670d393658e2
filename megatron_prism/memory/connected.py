"""Which communicators does a rank make, and what do its calls connect in them?

In : calls, one by one (``Used``) or those of a program (``used_by``).  Out: the communicators, for
``communicators`` to say how much device memory they take.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_prism.core.membership import WORLD_GROUP, of_family, of_lists
from megatron_prism.core.ops import CODE, IS_PAIR, ITEM_SIZE, NAMES
from megatron_prism.core.programs import Programs
from megatron_prism.memory.communicators import Communicator

__all__ = ["ON_HOST", "SMALL", "Used", "used_by"]

ON_HOST = "_GLOO"  # Megatron's names of groups of host tensors end so
SMALL = 1 << 18  # bytes up to which an all-reduce counts as small (measured: 1 KiB and 64 MiB)
_REDUCES = ("all_reduce", "reduce", "barrier")
_EXCHANGES = ("all_to_all", "all_to_all_single")


class Used:
    """The communicators that a rank's calls have connected, in the order of their first use.

    Messages of a batch go through their group's communicator, which connects the two; each pair of
    other messages has a communicator of its own (torch's ProcessGroupNCCL).
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], Communicator] = {}
        self._peers: dict[str, set[int]] = {}

    def add(
        self,
        group: str,
        size: int,
        op: str,
        num_bytes: int,
        distance: int = 0,
        batched: bool = True,
    ) -> tuple[Communicator | None, Communicator]:
        """The communicator of a call, (before it, None if it was not there; with what it connects).

        distance : of a message, how many places further in the group the other end is; 0 for what
                   is no message
        """
        message = op in ("send", "recv")
        pair = message and not batched and distance > 0
        key = (group, distance if pair else 0)
        before = self._made.get(key)
        one = before or Communicator(f"{group} pair" if pair else group, 2 if pair else size)
        kinds, peers = one.kinds, self._peers.setdefault(group, set())
        if pair:
            kinds = kinds | {"out" if op == "send" else "in"}
        elif message:
            peers.add(distance)
        elif op in _EXCHANGES:
            peers.update(range(1, size))
        else:
            kinds = kinds | {_kind(op, num_bytes)}
        now = self._made[key] = replace(one, kinds=kinds, peers=0 if pair else len(peers - {0}))
        return before, now

    def all(self) -> tuple[Communicator, ...]:
        """All of them."""
        return tuple(self._made.values())


def _kind(op: str, num_bytes: int) -> str:
    if op not in _REDUCES:
        return "ring"
    return "small" if num_bytes <= SMALL else "large"


def used_by(programs: Programs, index: int) -> tuple[Communicator, ...]:
    """Communicators of the ranks that run program ``index``, pairs of unbatched p2p included.

    The group of all ranks is always one: every script has a barrier before it trains.
    """
    program = programs.programs[index]
    rank = int(programs.ranks_of(index)[0])
    ops = program.ops
    used = Used()
    used.add(WORLD_GROUP, programs.world.size, "barrier", 0)
    sizes = {WORLD_GROUP: programs.world.size}
    calls = ops[(ops["name"] >= CODE["mark"] + 1) & (ops["group"] != 0)]
    columns = [calls[key].astype(np.int64) for key in ("name", "group", "peer", "dtype", "num_in")]
    for code, text, peer, dtype, num_in, batched in np.unique(
        np.stack([*columns, calls["batch"] >= 0], axis=1), axis=0
    ).tolist():
        group = program.strings[text]
        if group not in sizes:
            sizes[group] = _size(programs, group, rank)
        distance = peer % sizes[group] if IS_PAIR[code] else 0
        if distance or not IS_PAIR[code]:
            num_bytes = num_in * int(ITEM_SIZE[dtype])
            used.add(group, sizes[group], NAMES[code], num_bytes, distance, bool(batched))
    return used.all()


def _size(programs: Programs, group: str, rank: int) -> int:
    if group in programs.groups:
        return len(of_lists(group, programs.groups[group], programs.world.size).group(rank))
    return len(of_family(programs.world, group).group(rank))
