"""Members of every group, for all ranks at once, as arrays.

In : a world, a group description, or explicit lists of ranks.  Out: ``Membership``, the members of
all groups of one description as flat arrays, from which a million ranks read their group, position
and peers without a Python loop.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_prism.core.errors import ProgramError, WorldError
from megatron_prism.core.units import counted
from megatron_prism.core.world import World, family

WORLD_GROUP = "default_pg"  # torch's description of the group of all ranks
_TWIN = "_GLOO"

_SHORT = {
    "tp": "TENSOR_MODEL_PARALLEL_GROUP",
    "cp": "CONTEXT_PARALLEL_GROUP",
    "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
    "ep": "EXPERT_MODEL_PARALLEL_GROUP",
    "etp": "EXPERT_TENSOR_PARALLEL_GROUP",
    "edp": "EXPERT_DATA_PARALLEL_GROUP",
    "dp": "DATA_PARALLEL_GROUP",
    "mp": "MODEL_PARALLEL_GROUP",
    "world": "default_pg",
    "embd": "EMBEDDING_GROUP",
    "optim": "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
    "tp-cp": "TENSOR_AND_CONTEXT_PARALLEL_GROUP",
    "tp-dp": "TENSOR_AND_DATA_PARALLEL_GROUP",
    "tp-ep": "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
    "tp-ep-pp": "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP",
}


@dataclass(frozen=True)
class Membership:
    """All groups of one description; a rank is in at most one of them.

    name    : the description
    members : int32 [total], global ranks, group after group, in group order
    start   : int64 [groups + 1], where each group begins in ``members``
    size    : ranks of the world
    """

    name: str
    members: np.ndarray
    start: np.ndarray
    size: int

    @cached_property
    def group_of(self) -> np.ndarray:
        """int32 [size]: the group of every rank, -1 for ranks in none."""
        group_of = np.full(self.size, -1, dtype=np.int32)
        groups = np.arange(len(self.start) - 1, dtype=np.int32)
        group_of[self.members] = np.repeat(groups, self.group_sizes)
        return group_of

    @cached_property
    def position(self) -> np.ndarray:
        """int32 [size]: the group rank of every rank, -1 for ranks in none."""
        position = np.full(self.size, -1, dtype=np.int32)
        first = np.repeat(self.start[:-1], self.group_sizes)
        position[self.members] = np.arange(len(self.members)) - first
        return position

    @property
    def group_sizes(self) -> np.ndarray:
        """int64 [groups]: how many ranks each group has."""
        return np.diff(self.start)

    def group(self, rank: int) -> np.ndarray:
        """Members of this rank's group in group order, int32 [n]; empty if it is in none."""
        at = int(self.group_of[rank])
        if at < 0:
            return self.members[:0]
        return self.members[self.start[at] : self.start[at + 1]]

    def peers(self, offset: int) -> np.ndarray:
        """int32 [size]: the rank ``offset`` places further in every rank's group; -1 for none.

        Positions wrap around, as pipelines do from the last stage to the first.
        """
        peers = np.full(self.size, -1, dtype=np.int32)
        sizes = np.repeat(self.group_sizes, self.group_sizes)
        first = np.repeat(self.start[:-1], self.group_sizes)
        position = np.arange(len(self.members)) - first
        peers[self.members] = self.members[first + (position + offset) % sizes]
        return peers

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Per group the sum of its members' ``values`` (one per rank of the world), wrapping."""
        return np.add.reduceat(values[self.members], self.start[:-1])


def of_family(world: World, name: str) -> Membership:
    """Megatron's groups ``name`` in ``world``; a gloo twin has the members of its original.

    ProgramError for a name that Megatron does not make.
    """
    if not name:
        message = "a program has a call without a group"
        raise ProgramError(message, fix=f"name one: send {WORLD_GROUP} bf16 peer=1")
    if name == WORLD_GROUP:
        return _regular(name, np.arange(world.size)[None], world.size)
    try:
        # a gloo twin's name is that of its original, with an ending
        row = family(name.removesuffix(_TWIN))
    except WorldError as error:
        message = f"a program uses the group {name}, and who is in it is not known"
        raise ProgramError(message, fix=f"add a line: group {name} 0,1;2,3") from error
    return _regular(name, world.members(row), world.size)


def _regular(name: str, matrix: np.ndarray, size: int) -> Membership:
    start = np.arange(matrix.shape[0] + 1, dtype=np.int64) * matrix.shape[1]
    return Membership(name, matrix.astype(np.int32).ravel(), start, size)


def of_lists(name: str, groups: Sequence[Sequence[int]], size: int) -> Membership:
    """Groups as a person wrote them, in group order.  ProgramError if they cannot be."""
    members = np.array(list(itertools.chain.from_iterable(groups)), dtype=np.int64)
    counts = np.array([len(group) for group in groups], dtype=np.int64)
    outside = members[(members < 0) | (members >= size)]
    if outside.size:
        message = f"group {name}: rank {outside[0]} is outside a world of {counted(size, 'rank')}"
        raise ProgramError(message, fix=f"choose ranks from 0 to {size - 1}")
    ranks, times = np.unique(members, return_counts=True)
    if (times > 1).any():
        message = f"group {name}: rank {ranks[times > 1][0]} is in it twice"
        raise ProgramError(
            message, fix="give each of the groups that share a rank a name of its own"
        )
    start = np.concatenate(([0], np.cumsum(counts)))
    return Membership(name, members.astype(np.int32), start, size)


def short_names() -> tuple[str, ...]:
    """What people may write for a group: tp, pp, dp, world."""
    return tuple(_SHORT)


def named_group(text: str, desc: str) -> bool:
    """Whether a person who writes ``text`` means groups of description ``desc``."""
    if text == desc or _SHORT.get(text) == desc:
        return True
    return text == "dp" and desc.startswith("DATA_PARALLEL_GROUP")


def short_name(desc: str) -> str:
    """How people write the groups of a description: tp, dp, edp, else its own words."""
    bare = desc.removesuffix("_WITH_CP")
    for name, full in _SHORT.items():
        if bare == full:
            return name
    # other groups of Megatron: their names in lower case
    of_megatron = re.fullmatch(r"[A-Z0-9_]+_GROUP", bare)
    return bare.removesuffix("_GROUP").replace("_", " ").lower() if of_megatron else desc


def with_short_names(text: str) -> str:
    """``text`` with the short names of the groups that it names, if they have one."""
    return re.sub(r"\b[A-Z]\w+_GROUP(?:_WITH_CP)?\b", lambda match: short_name(match[0]), text)


def kind(desc: str) -> str:
    """What the communication of a group counts as: tp, dp, pp, cp, ep, optim, or other."""
    if desc.removesuffix(_TWIN) == _INSTANCE:  # of dp, too, and another group beside it
        return "optim"
    try:
        axes = family(desc).axes
    except WorldError:
        return "other"
    return next((axis for axis in ("dp", "ep", *axes) if axis in axes), "other")


_LEVEL = re.compile(r"HIERARCHICAL_(\w+?)(?:_GLOO)?_L\d+")
_PARTIAL = "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP"
_EMBEDDINGS = ("EMBEDDING_GROUP", "POSITION_EMBEDDING_GROUP")
_INSTANCE = "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"


def subgroups(world: World, name: str, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...] | None:
    """All groups ``name``, one of which is ``ranks``; None where the sizes of the world already
    give them, or where they are cut in a way that is not known.
    """
    own = np.sort(ranks)  # so are torch's groups, whatever the order in which Megatron lists them
    try:
        if np.array_equal(of_family(world, name).group(int(own[0])), own):
            return None
    except ProgramError:
        pass  # Megatron makes it only with these options
    if name == _INSTANCE:  # of whole model replicas in a row (parallel_state.py:1565 @0.19.0)
        rows = _rows(world, "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP").reshape(1, -1)
    elif match := _LEVEL.fullmatch(name):
        rows = _rows(world, match[1])
    elif name.removesuffix("_GLOO") == _PARTIAL:
        rows = _rows(world, "DATA_PARALLEL_GROUP_WITH_CP")
    elif name in _EMBEDDINGS:
        stages = _rows(world, "PIPELINE_MODEL_PARALLEL_GROUP")
        rows = stages[:, np.isin(stages, own).any(axis=0)]
    else:
        return None
    groups = _cut(rows, own)
    if groups is None:
        return None
    return tuple(map(tuple, groups.tolist()))


def _rows(world: World, name: str) -> np.ndarray:
    """[groups, members] of a family."""
    family_groups = of_family(world, name)
    return family_groups.members.reshape(len(family_groups.start) - 1, -1)


def _cut(rows: np.ndarray, own: np.ndarray) -> np.ndarray | None:
    """[groups, members] of all rows cut as the one that ``own`` is of: every so many places."""
    (row,) = rows[(rows == own[0]).any(axis=1)]
    size = len(own)
    places = np.flatnonzero(np.isin(row, own))
    step = int(places[1] - places[0]) if len(places) > 1 else 1
    if len(places) < size or rows.shape[1] % (size * step):
        return None
    # a block of size x step places has ``step`` groups, which take turns in it
    blocks = rows.reshape(rows.shape[0], -1, size, step)
    groups = np.sort(blocks.transpose(0, 1, 3, 2).reshape(-1, size), axis=1)
    has_own = (groups == own).all(axis=1).any()
    return groups if has_own else None
