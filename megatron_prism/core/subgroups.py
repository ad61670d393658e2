"""Which groups does Megatron make of parts of its groups?

Several instances of the distributed optimizer and hierarchical context parallelism cut groups of
``FAMILIES`` into pieces, of which the sizes of the world say nothing: one piece, as a rank has it,
says how all of them are cut.  So does the embedding's group, which has the stages that the script
says (with MTP layers in a stage of their own that one, too; pretrain_gpt.py:480 @core_v0.19.0).
In: a description and the ranks of one group.  Out: all of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from megatron_prism.core.errors import ProgramError
from megatron_prism.core.membership import of_family
from megatron_prism.core.world import World

__all__ = ["subgroups"]

_LEVEL = re.compile(r"HIERARCHICAL_(\w+?)(?:_GLOO)?_L\d+")
_PARTIAL = "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP"
_EMBEDDINGS = ("EMBEDDING_GROUP", "POSITION_EMBEDDING_GROUP")
_INSTANCE = "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"


def subgroups(world: World, name: str, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...] | None:
    """All groups ``name``, one of which is ``ranks``; None where the sizes of the world already
    give them, or where they are cut in a way that is not known."""
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
    found = _cut(rows, own)
    return None if found is None else tuple(map(tuple, found.tolist()))


def _rows(world: World, name: str) -> np.ndarray:
    """[groups, members] of a family."""
    whole = of_family(world, name)
    return whole.members.reshape(len(whole.start) - 1, -1)


def _cut(rows: np.ndarray, own: np.ndarray) -> np.ndarray | None:
    """[groups, members] of all rows cut as the one that ``own`` is of: every so many places."""
    (row,) = rows[(rows == own[0]).any(axis=1)]
    places, size = np.flatnonzero(np.isin(row, own)), len(own)
    step = int(places[1] - places[0]) if len(places) > 1 else 1
    if len(places) < size or rows.shape[1] % (size * step):
        return None
    blocks = rows.reshape(rows.shape[0], -1, size, step)
    found = np.sort(blocks.transpose(0, 1, 3, 2).reshape(-1, size), axis=1)
    return found if (found == own).all(axis=1).any() else None
