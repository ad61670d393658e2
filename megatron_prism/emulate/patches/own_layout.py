"""A checkpoint of the job's own layout, in place of one that is not on this machine.

Its metadata are made from the sharded state dict with which the job asks for it: every tensor is
there, in the shape that the job has.  What Megatron keeps beside shards (arguments, groups of
parameters, schedules) is the job's own, too.
"""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.default_planner import (
    create_default_global_save_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItemType

from megatron_prism.core.process_changes import ProcessChanges

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner
    from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE
    from torch.distributed.checkpoint.planner import WriteItem

_ITERATION = 1  # that the checkpoint is of
_FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_FILE = "__0_0.distcp"  # no such file is there


class OwnLayout:
    """Stands in for a checkpoint while Megatron's ``load_checkpoint`` runs.

    Args:
        module: Megatron's module of checkpoints.
        job: the job's arguments.
    """

    def __init__(self, module: ModuleType, job: Namespace) -> None:
        self._module = module
        self._job = job
        self._beside_shards: dict[str, object] = {}

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Let the job find the checkpoint where ``--load`` says."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing import serialization
        from megatron.core.dist_checkpointing.strategies import torch as strategies

        planner_class = strategies.MCoreLoadPlanner
        preprocess = serialization.load_preprocess
        set_up = planner_class.set_up_planner

        def remember(sharded_state: object) -> tuple[object, object, object]:
            parts = preprocess(sharded_state)
            _, self._beside_shards = serialization.extract_sharded_base(parts[0])
            return parts

        def make_metadata(
            planner: MCoreLoadPlanner,
            state_dict: STATE_DICT_TYPE,
            metadata: Metadata,
            is_coordinator: bool = False,
        ) -> None:
            _add_tensors(metadata, state_dict)
            set_up(planner, state_dict, metadata, is_coordinator)

        with tempfile.TemporaryDirectory(prefix="prism-load-") as folder, ProcessChanges() as now:
            _write(Path(folder))
            now.set(self._job, "load", folder)
            # --ckpt-step would name an iteration, and this folder has one checkpoint
            now.set(self._job, "ckpt_step", None)
            # nothing is missing and nothing unexpected
            now.set(self._job, "dist_ckpt_strictness", "assume_ok_unexpected")
            now.set(dist_checkpointing, "load_common_state_dict", self._common_state)
            now.set(serialization, "load_common_state_dict", self._common_state)
            now.set(serialization, "load_preprocess", remember)
            now.set(planner_class, "set_up_planner", make_metadata)
            yield

    def _common_state(self, folder: object) -> dict[str, object]:
        """Make what the checkpoint has beside its shards."""
        content = self._module._build_sharded_state_dict_metadata(self._job)
        return {
            "args": Namespace(**vars(self._job)),
            "checkpoint_version": 3.0,
            "iteration": 0,
            "num_floating_point_operations_so_far": 0,
            "content_metadata": content,
            **self._beside_shards,
        }


def _write(folder: Path) -> None:
    """Write a checkpoint without tensors, which is what ``load_checkpoint`` looks for."""
    tracker = folder / "latest_checkpointed_iteration.txt"
    tracker.write_text(str(_ITERATION), encoding="utf-8")
    place = folder / f"iter_{_ITERATION:07d}"
    place.mkdir()
    (place / "metadata.json").write_text(json.dumps(_FORMAT), encoding="utf-8")
    (place / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data={})))


def _add_tensors(metadata: Metadata, state_dict: STATE_DICT_TYPE) -> None:
    """Add what a job of this layout would have saved under the names that are asked for."""
    plan = create_default_local_save_plan(state_dict, True)
    (plan,), saved = create_default_global_save_plan([plan])
    metadata.state_dict_metadata.update(saved.state_dict_metadata)
    for item in plan.items:
        metadata.storage_data[item.index] = _StorageInfo(_FILE, 0, _num_bytes(item))


def _num_bytes(item: WriteItem) -> int:
    """Return the size of a stored shard; of objects it counts as nothing."""
    if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
        return 0
    data = item.tensor_data
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
