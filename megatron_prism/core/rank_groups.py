"""Which groups does Megatron make, and which ranks are in them?

In : a world size, the sizes of its axes, which of them a group spans.  Out: lists of ranks.
``FAMILIES`` lists everything ``initialize_model_parallel`` creates, ``orthogonal_rank_groups`` is
the arithmetic behind each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_prism.core.errors import WorldError

__all__ = ["FAMILIES", "Family", "family", "orthogonal_rank_groups"]


@dataclass(frozen=True)
class Family:
    """One kind of group that ``initialize_model_parallel`` creates.

    desc   : Megatron's group_desc, also what a Flight Recorder dump says
    grid   : ``dense`` or ``expert``
    axes   : the axes its members differ in; an empty tuple is a group of one
    pick   : ``all`` members of that slice, its ``ends`` (first and last) or its ``first``;
             in one case the whole ``world``
    twin   : a gloo copy ``<desc>_GLOO`` is made beside it unless --disable-gloo-process-groups
    since  : first megatron-core release that makes it
    """

    desc: str
    grid: str
    axes: tuple[str, ...]
    pick: str = "all"
    twin: bool = False
    since: tuple[int, int] = (0, 0)


# In Megatron's order of creation (parallel_state.py:830-1340 @core_v0.16.1, :930-1580
# @core_v0.19.0), for one distributed optimizer instance and without hierarchical or hybrid context
# parallelism.
FAMILIES = (
    Family("GTP_WEIGHT_REMAT_GROUP", "dense", (), since=(0, 19)),
    Family("DATA_PARALLEL_GROUP_WITH_CP", "dense", ("dp", "cp"), twin=True),
    Family("DATA_PARALLEL_GROUP", "dense", ("dp",), twin=True),
    Family("CONTEXT_PARALLEL_GROUP", "dense", ("cp",)),
    Family("MODEL_PARALLEL_GROUP", "dense", ("tp", "pp")),
    Family("TENSOR_MODEL_PARALLEL_GROUP", "dense", ("tp",)),
    Family("PIPELINE_MODEL_PARALLEL_GROUP", "dense", ("pp",)),
    Family("EMBEDDING_GROUP", "dense", ("pp",), pick="ends"),
    Family("POSITION_EMBEDDING_GROUP", "dense", ("pp",), pick="first"),
    Family("TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", "dense", ("tp", "dp", "cp")),
    Family("TENSOR_AND_DATA_PARALLEL_GROUP", "dense", ("tp", "dp")),
    Family("TENSOR_AND_CONTEXT_PARALLEL_GROUP", "dense", ("tp", "cp")),
    Family("EXPERT_GTP_WEIGHT_REMAT_GROUP", "expert", (), since=(0, 19)),
    Family("EXPERT_MODEL_PARALLEL_GROUP", "expert", ("ep",)),
    Family("EXPERT_TENSOR_PARALLEL_GROUP", "expert", ("tp",)),
    Family("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "expert", ("tp", "ep")),
    Family("EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", "expert", ("tp", "ep", "pp")),
    Family(
        "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP",
        "expert",
        ("tp", "ep", "pp"),
        since=(0, 19),
    ),
    Family("EXPERT_DATA_PARALLEL_GROUP", "expert", ("dp",), twin=True),
    Family(
        "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
        "expert",
        ("tp", "ep", "dp", "pp"),
        pick="world",
    ),
)


def orthogonal_rank_groups(
    world_size: int,
    parallel_size: Sequence[int],
    mask: Sequence[bool],
    containing: Iterable[int] | None = None,
) -> list[list[int]]:
    """Every group whose members differ only in the masked axes; the first axis varies fastest.

    The same lists of Python ints, in the same order, as Megatron's own
    generate_masked_orthogonal_rank_groups (megatron/core/parallel_state.py:251 @core_v0.16.1,
    unchanged @core_v0.19.0), which walks every rank in Python.  With ``containing`` only the
    groups that hold one of these ranks are built, whatever the size of the world.  Beware where
    the *list* is used and not its members: Megatron counts and concatenates all tp-ep-pp groups to
    make INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP (:1332 @core_v0.16.1).

    Raises WorldError where Megatron asserts: more groups than the sizes can number.
    """
    sizes, kept = np.asarray(parallel_size, dtype=np.int64), np.asarray(mask, dtype=bool)
    strides = np.cumprod(np.concatenate(([1], sizes[:-1]))).astype(np.int64)
    group_size = int(np.prod(sizes[kept]))
    num_groups = world_size // group_size
    if num_groups > (possible := int(np.prod(sizes[~kept]))):
        raise WorldError(
            f"sizes {' x '.join(map(str, sizes))} = {int(np.prod(sizes))} number {possible} groups "
            f"of {group_size}, not the {num_groups} that {world_size} ranks need",
            fix="pass sizes whose product is the world size",
        )
    if containing is None:
        firsts = _corners(sizes[~kept], strides[~kept])[:num_groups]
    else:
        ranks = np.fromiter(containing, dtype=np.int64)
        if ranks.size and not (ranks.min() >= 0 and ranks.max() < world_size):
            outside = sorted(set(ranks[(ranks < 0) | (ranks >= world_size)].tolist()))
            raise WorldError(
                f"ranks {outside} are outside a world of {world_size} ranks",
                fix=f"choose ranks from 0 to {world_size - 1}",
            )
        where = (ranks[:, None] // strides % sizes)[:, ~kept]  # int64 [ranks, axes not spanned]
        # Groups are numbered over the axes they do not span, the first fastest; since strides grow
        # along the axes, that is also the order of their lowest ranks.
        firsts = np.unique(where @ strides[~kept])
        if num_groups < possible:
            firsts = np.intersect1d(firsts, _corners(sizes[~kept], strides[~kept])[:num_groups])
    groups: list[list[int]] = (firsts[:, None] + _corners(sizes[kept], strides[kept])).tolist()
    return groups


def _corners(sizes: np.ndarray, strides: np.ndarray) -> np.ndarray:
    """All sums of coordinate x stride, int64 [prod(sizes)], first axis fastest."""
    total = np.zeros(1, dtype=np.int64)
    for size, stride in zip(sizes, strides, strict=True):
        total = (np.arange(size)[:, None] * stride + total).reshape(-1)
    return total


def family(desc: str) -> Family:
    """The row called ``desc`` (or its gloo twin).  WorldError if there is none."""
    for row in FAMILIES:
        if desc == row.desc or row.twin and desc == f"{row.desc}_GLOO":
            return row
    raise WorldError(
        f"Megatron makes no group called {desc}",
        fix=f"use one of {', '.join(row.desc for row in FAMILIES)}",
    )
