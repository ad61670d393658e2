"""What a rank writes into a checkpoint: Megatron's own plan of a save, without the writing.

In : the state dict of a checkpoint on shapes.  Out: ``SavedBytes``.  Megatron copies all that a
rank writes to the host before the first byte is written, for --async-save and without it
(dist_checkpointing/strategies/filesystem_async.py:140 @0.19.0).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.planner import WriteItemType

from megatron_prism.memory.saved_bytes import SavedBytes

if TYPE_CHECKING:
    from argparse import Namespace

    import torch
    from megatron.core.dist_checkpointing.mapping import ShardedBase
    from torch.distributed.checkpoint.planner import WriteItem

# keys of states that a rank alone has: a distributed optimizer's, by buckets
_OWN = "optimizer.distributed."


def planned_write(state_dict: dict[str, object], job: Namespace) -> SavedBytes:
    """Plan the writes of this rank.

    Args:
        state_dict: of Megatron's ``generate_state_dict``; it is consumed.
        job: the job's arguments.
    """
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
    from megatron.core.dist_checkpointing.strategies import torch as strategies

    shards, _ = save_preprocess(state_dict, False)
    # copies on other data-parallel ranks, too: with parallel saving all of these write a part
    by_key, _, _ = strategies._replace_state_dict_keys_with_sharded_keys(shards, False)
    expanded_bytes = _expanded_bytes(by_key)
    items = _planned_items(strategies, by_key)
    own_bytes = shared_bytes = 0
    for item in items:
        num_bytes = _num_bytes(item)
        if item.index.fqn.startswith(_OWN):
            own_bytes += num_bytes
        else:
            shared_bytes += num_bytes
    return SavedBytes(
        own=own_bytes,
        shared=shared_bytes,
        is_divided=bool(getattr(job, "ckpt_fully_parallel_save", False)),
        is_async=_is_async(job),
        expanded=expanded_bytes,
    )


def _is_async(job: Namespace) -> bool:
    """Return whether the job trains on while a checkpoint is written; a stand-in says it apart."""
    return bool(getattr(job, "async_save", False) or getattr(job, "prism_async_save", False))


def _planned_items(
    strategies: ModuleType, by_key: Mapping[str, list[ShardedBase]]
) -> Iterable[WriteItem]:
    """Return the writes that Megatron's planner makes of shards."""
    state = strategies.mcore_to_pyt_state_dict(by_key, False)
    planner = strategies.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    planner.set_up_planner(state, None, False)
    items: Iterable[WriteItem] = planner.create_local_plan().items
    return items


def _expanded_bytes(by_key: Mapping[str, list[ShardedBase]]) -> int:
    """Return what copies in bf16 of quantized tensors take on the device.

    Megatron makes them there before anything is copied to the host.
    """
    num_bytes = 0
    for shards in by_key.values():
        for shard in shards:
            data: torch.Tensor | None = getattr(shard, "data", None)
            if data is not None and "dequantize" in vars(type(data)):
                num_bytes += data.numel() * data.dtype.itemsize
    return num_bytes


def _num_bytes(item: WriteItem) -> int:
    """Return the bytes of a write; of objects it counts as nothing."""
    if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
        return 0
    data = item.tensor_data
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
