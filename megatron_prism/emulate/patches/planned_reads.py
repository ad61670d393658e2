"""Loading a checkpoint on shapes: Megatron's own code plans what it reads, and no tensor is read.

In : a checkpoint's metadata.  Out: ``PlannedRead``, what one rank asks of the checkpoint, by
Megatron's sharded state dict and planner: which tensors are there, which are of another shape or
type, and which stored shards the rank reads.  Objects (a few kilobytes each) are read if their file
is there.

torch reads a stored shard whole for each part of it that a rank takes, one after the other
(FileSystemReader.read_data, checkpoint/filesystem.py @2.11).
"""

from __future__ import annotations

import contextlib
import enum
import io
import math
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future

from megatron_prism.core.process_changes import ProcessChanges

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

COMMON_STATE = "common_state/shard_0_1"  # object of everything that is no shard, since 0.19
_BUCKETS = ".bucket_idx_"  # in the name of an optimizer state that is kept by buckets
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.")
# objects of which each rank of a grid has one: pp x tp, and all ranks
_RANDOM_STATE = re.compile(r"rng_state/shard_[\d.]+_(\d+)\.(\d+)")
_RERUN_STATE = re.compile(r"rerun_state_machine_state/shard_\d+_(\d+)")


class Match(enum.Enum):
    """How a tensor that a rank asks for is in the checkpoint."""

    SAME = "same"
    OTHER_TYPE = "other type"  # copied into the model's, value by value
    RESIZED = "resized"  # Megatron takes the part that both have
    OTHER_SHAPE = "other shape"
    MISSING = "missing"


@dataclass(frozen=True)
class TensorRequest:
    """A tensor of the checkpoint of which a rank takes a part.

    Args:
        key: its name there.
        shape: of the whole tensor, as the job has it.
        dtype: that the job has it in.
        stored_shape: as the checkpoint has it; empty where it has none.
        stored_dtype: of the checkpoint, too.
        match: what comes of both.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    stored_shape: tuple[int, ...]
    stored_dtype: str
    match: Match


@dataclass
class PlannedRead:
    """What one rank would read.

    Args:
        folder: of the checkpoint.
        requests: the tensors, by name.
        objects: names of other things that the rank asks for.
        taken_bytes: of the parts of tensors that the rank takes.
        file_bytes: file -> bytes of stored shards that are read from it; a shard counts as often
            as it is read.
        largest_shard_bytes: the most that is in memory of the host at once.
        optimizer_format: how the checkpoint says that it keeps states of a distributed optimizer.
        stand_in: whether the checkpoint's arguments were absent, and the job's own took their
            place.
        refusal: why Megatron ends the job; empty where it does not.
        shifted_states: parameter -> by how many elements the job shifts its states when it saves
            them again.
    """

    folder: str = ""
    requests: dict[str, TensorRequest] = field(default_factory=dict)
    objects: set[str] = field(default_factory=set)
    taken_bytes: int = 0
    file_bytes: dict[str, int] = field(default_factory=dict)
    largest_shard_bytes: int = 0
    optimizer_format: str = ""
    stand_in: bool = False
    refusal: str = ""
    shifted_states: dict[str, int] = field(default_factory=dict)


# told of what this rank would read, when that is known
observers: list[Callable[[PlannedRead], None]] = []


class PlannedReading:
    """Stands in front of torch's reader while Megatron loads a checkpoint.

    Args:
        strategies: Megatron's module of the strategy torch_dist, whose planner is asked.
        job: the job's arguments.
    """

    def __init__(self, strategies: ModuleType, job: Namespace) -> None:
        self.result = PlannedRead()
        self._planner_class = strategies.MCoreLoadPlanner
        self._job = job
        self._beside_shards: dict[str, object] = {}  # of what the job asks for

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Plan instead of reading what is loaded inside."""
        from megatron.core.dist_checkpointing import serialization

        preprocess = serialization.load_preprocess
        make_plan = self._planner_class.create_local_plan
        read_bytes = checkpoint.FileSystemReader.read_data

        def remember(sharded_state: object) -> tuple[object, object, object]:
            parts = preprocess(sharded_state)
            _, self._beside_shards = serialization.extract_sharded_base(parts[0])
            return parts

        def plan(planner: MCoreLoadPlanner) -> LoadPlan:
            self._compare(planner)
            return make_plan(planner)

        def read(
            reader: checkpoint.FileSystemReader, local_plan: LoadPlan, planner: MCoreLoadPlanner
        ) -> Future[None]:
            self._count(reader, local_plan, planner)
            objects = []
            for item in local_plan.items:
                # objects are small, and are read
                if item.type == LoadItemType.BYTE_IO and not self._stands_in(reader, item, planner):
                    objects.append(item)
            return read_bytes(reader, type(local_plan)(objects), planner)

        with ProcessChanges() as changes:
            changes.set(serialization, "load_preprocess", remember)
            changes.set(self._planner_class, "create_local_plan", plan)
            changes.set(checkpoint.FileSystemReader, "read_data", read)
            # torch would give tensors of shapes alone memory on the host
            changes.set(default_planner, "_init_state_dict", lambda state_dict: None)
            yield

    def _compare(self, planner: MCoreLoadPlanner) -> None:
        """Hold every tensor that the rank asks for against the checkpoint's metadata."""
        metadata = planner.metadata
        checked = [(shard, True) for shard in planner.shapes_validation_sharded_tensors]
        # embeddings are padded to a multiple that depends on tensor parallelism
        resizable = planner.allow_shape_mismatch_sharded_tensors or {}
        checked += [(shard, False) for shard in resizable.values()]
        for shard, is_strict in checked:
            stored = metadata.state_dict_metadata.get(shard.key)
            self.result.requests[shard.key] = _request(shard, stored, is_strict)
        for name, value in planner.state_dict.items():
            if isinstance(value, io.BytesIO):
                self.result.objects.add(name)

    def _count(
        self, reader: checkpoint.FileSystemReader, local_plan: LoadPlan, planner: MCoreLoadPlanner
    ) -> None:
        """Add up the stored shards that a plan reads, and the parts that it takes."""
        result = self.result
        result.folder = str(reader.path)
        for item in local_plan.items:
            place = reader.storage_data[item.storage_index]
            file_bytes = result.file_bytes.get(place.relative_path, 0)
            result.file_bytes[place.relative_path] = file_bytes + place.length
            result.largest_shard_bytes = max(result.largest_shard_bytes, place.length)
            # tensors: torch reads whole shards for the parts that a rank takes
            if item.type == LoadItemType.TENSOR:
                stored = planner.metadata.state_dict_metadata[item.storage_index.fqn]
                element_bytes = stored.properties.dtype.itemsize
                result.taken_bytes += math.prod(item.lengths) * element_bytes
                _check_size(item, planner)

    def _stands_in(
        self, reader: checkpoint.FileSystemReader, item: ReadItem, planner: MCoreLoadPlanner
    ) -> bool:
        """Return whether an object of this job took the place of one whose file is not here."""
        name = item.storage_index.fqn
        place = reader.storage_data[item.storage_index]
        if reader.fs.exists(reader.fs.concat_path(reader.path, place.relative_path)):
            return False
        # what is beside the shards: made from the names of objects
        if name == COMMON_STATE:
            _put(planner, name, [self._common_state(planner.metadata)])
            self.result.stand_in = True
            return True
        serialized = planner.state_dict[name]
        # Megatron has written this rank's own object into it
        if isinstance(serialized, io.BytesIO) and serialized.getbuffer().nbytes:
            serialized.seek(0)
            _put(planner, name, torch.load(serialized, weights_only=False))
            return True
        return False

    def _common_state(self, metadata: Metadata) -> dict[str, object]:
        """Make what the checkpoint has beside its shards, as far as names of objects say it.

        All else is as in the job that loads it.
        """
        content: dict[str, object] = {
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        }
        names = metadata.state_dict_metadata
        states = [name for name in names if _STATE.match(name)]
        arguments = Namespace(**vars(self._job))
        arguments.no_save_optim = not states
        _add_layout(arguments, names)
        state: dict[str, object] = {
            "args": arguments,
            "checkpoint_version": 3.0,
            "iteration": 0,
            "num_floating_point_operations_so_far": 0,
            "content_metadata": content,
        }
        if states:
            # states by buckets are those of a distributed optimizer that is not resharded
            in_buckets = any(_BUCKETS in name for name in states)
            sharding = "dp_reshardable" if in_buckets else "fully_reshardable"
            content["distrib_optim_sharding_type"] = sharding
            state["optimizer"] = {"param_state_sharding_type": sharding}
            # groups of parameters and schedules are those that the job has, once it has asked
            for name in ("optimizer", "opt_param_scheduler"):
                if name in self._beside_shards:
                    state[name] = self._beside_shards[name]
        return state


def _put(planner: default_planner.DefaultLoadPlanner, name: str, value: object) -> None:
    """Give the loader an object, as ``load_bytes`` of torch's planner does with one that is read.

    Megatron's planner keeps the state dict as it is; torch's, which Megatron uses for what is no
    shard, works on a flat copy.
    """
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[name], value)
    else:
        planner.state_dict[name] = value


def _add_layout(arguments: Namespace, names: Iterable[str]) -> None:
    """Give arguments the layout of the job that saved objects of some names."""
    # with --no-save-rng there is no object of it; without a number of ranks none is the same
    arguments.no_save_rng = True
    arguments.world_size = 0
    for name in names:
        random_state = _RANDOM_STATE.fullmatch(name)
        if random_state is not None:
            arguments.pipeline_model_parallel_size = int(random_state[1])
            arguments.tensor_model_parallel_size = int(random_state[2])
            arguments.no_save_rng = False
        rerun_state = _RERUN_STATE.fullmatch(name)
        if rerun_state is not None:
            arguments.world_size = int(rerun_state[1])


def refusal_of(error: BaseException) -> str:
    """Return why Megatron ends the job: kind and text of an error.

    torch wraps an error of its planner in one that is no Exception and that begins with a
    traceback: the error inside says why.
    """
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    # Megatron prints why before it ends the process
    if isinstance(error, SystemExit):
        return "Megatron ends the job there; what it printed says why"
    text = str(error) or "without a word"
    # the text of a KeyError is quoted
    if isinstance(error, KeyError):
        text = str(error.args[0])
    return f"{type(error).__name__}: {text}"


def _request(
    shard: ShardedTensor,
    stored: TensorStorageMetadata | BytesStorageMetadata | None,
    is_strict: bool,
) -> TensorRequest:
    """Compare a shard that a rank asks for with what the checkpoint has under its name."""
    shape = tuple(shard.global_shape)
    dtype = str(shard.dtype)
    # an object under the name of a tensor is none
    if not isinstance(stored, TensorStorageMetadata):
        return TensorRequest(shard.key, shape, dtype, (), "", Match.MISSING)
    stored_shape = tuple(stored.size)
    stored_dtype = str(stored.properties.dtype)
    match = Match.SAME
    if stored_shape != shape:
        match = Match.OTHER_SHAPE if is_strict else Match.RESIZED
    elif stored_dtype != dtype:
        match = Match.OTHER_TYPE
    return TensorRequest(shard.key, shape, dtype, stored_shape, stored_dtype, match)


def _check_size(item: ReadItem, planner: MCoreLoadPlanner) -> None:
    """Raise as torch's reader does where a part does not fit its place."""
    target = planner.resolve_tensor(item).detach()
    if target.size() != torch.Size(item.lengths):
        raise AssertionError(
            f"req {item.storage_index} mismatch sizes {target.size()} vs {item.lengths}"
        )
    planner.commit_tensor(item, target)
