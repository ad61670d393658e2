"""What a rank writes into a checkpoint: Megatron's own plan of a save, without the writing.

In : the state dict of a checkpoint on shapes.  Out: ``SavedBytes``.  Megatron copies all that a
rank writes to the host before the first byte is written, for --async-save and without it
(dist_checkpointing/strategies/filesystem_async.py:140 @0.19.0).
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.planner import WriteItemType

from megatron_prism.memory.saved_bytes import Division, Holders, SavedBytes

if TYPE_CHECKING:
    from argparse import Namespace

    import torch
    from megatron.core.dist_checkpointing.mapping import ShardedBase
    from torch.distributed.checkpoint.planner import WriteItem

# keys of states that a rank alone has: a distributed optimizer's, by buckets.  Where experts have
# an optimizer of their own, keys of each have a prefix (optimizer/optimizer.py:1569 @0.19.0)
_OWN = re.compile(r"(chained_\d+\.)?optimizer\.distributed\.")
_STATES = re.compile(r"(chained_\d+\.)?optimizer\.state\.")  # by parameter
_EXPERTS = ".experts."  # of no shared expert, whose part is named shared_experts


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
    written = {}
    for key, shards_of_key in by_key.items():
        written_shards = list(filter(_may_write, shards_of_key))
        if written_shards:
            written[key] = written_shards
    expanded_bytes = _expanded_bytes(by_key)
    is_gathered = _is_gathered(job)
    # each rank has whole states of some parameters (optimizer/layer_wise_optimizer.py @0.19.0)
    is_layer_wise = getattr(job, "use_layer_wise_distributed_optimizer", False)
    own_bytes = 0
    counts = defaultdict[Holders, Counter[int]](Counter)
    for item in _planned_items(strategies, written):
        num_bytes = _num_bytes(item)
        key = item.index.fqn
        # states that no other rank has
        if _OWN.match(key) or (is_layer_wise and _STATES.match(key)):
            own_bytes += num_bytes
        elif num_bytes:
            counts[_holders(key, is_gathered)][num_bytes] += 1
    return SavedBytes(
        own=own_bytes,
        shards=counts,
        division=_division(job),
        is_async=_is_async(job),
        expanded=expanded_bytes,
    )


def _may_write(shard: ShardedBase) -> bool:
    """Return whether the rank or another of its data-parallel group writes the shard.

    Of copies on other tensor-parallel ranks and stages (norms, tied embeddings) none of them does:
    a replica's id is (stage, tensor-parallel rank, data-parallel rank).
    """
    replica = shard.replica_id
    if isinstance(replica, int):
        return True
    return not any(replica[:-1])


def _is_gathered(job: Namespace) -> bool:
    """Return whether a distributed optimizer's states are gathered on the first rank alone."""
    is_reshardable = getattr(job, "dist_ckpt_optim_fully_reshardable", False)
    name = "distrib_optim_fully_reshardable_mem_efficient"
    is_distributed = getattr(job, "use_distributed_optimizer", False)
    return bool(is_distributed and is_reshardable and getattr(job, name, False))


def _holders(key: str, is_gathered: bool) -> Holders:
    """Return which ranks hold a tensor of a checkpoint."""
    is_expert = _EXPERTS in key
    if is_gathered and _STATES.match(key):
        return Holders.FIRST_EXPERT if is_expert else Holders.FIRST_DENSE
    return Holders.EXPERT if is_expert else Holders.DENSE


def _division(job: Namespace) -> Division:
    """Return which ranks divide what all of them hold (training/checkpointing.py:804 @0.19.0)."""
    if not getattr(job, "ckpt_fully_parallel_save", False):
        return Division.NONE
    # releases before 0.17 have the data-parallel group alone
    return Division(getattr(job, "ckpt_fully_parallel_save_process_group", "dp"))


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
