"""A checkpoint's metadata are read without torch's classes, and nothing in the file is called."""

import json
import os
import pickle

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_prism.core.errors import UsageError
from megatron_prism.features.reshard.metadata import StoredTensor, read_checkpoint, stage


def write(folder, **tensors):
    """Metadata of a checkpoint with these tensors: name -> (shape, type)."""
    entries, places = {"rng_state/shard_0_1": BytesStorageMetadata()}, {}
    places[MetadataIndex("rng_state/shard_0_1")] = _StorageInfo("__0_0.distcp", 0, 100)
    for number, (name, (shape, dtype)) in enumerate(tensors.items()):
        size, start = torch.Size(shape), torch.Size([0] * len(shape))
        chunks = [ChunkStorageMetadata(start, size)]
        entries[name] = TensorStorageMetadata(TensorProperties(dtype), size, chunks)
        place = _StorageInfo(f"__{number % 2}_0.distcp", 100, 1000)
        places[MetadataIndex(name, start)] = place
    folder.mkdir(parents=True, exist_ok=True)
    whole = Metadata(entries, storage_data=places)
    (folder / ".metadata").write_bytes(pickle.dumps(whole))
    return folder


def test_shapes_types_and_files(tmp_path):
    write(tmp_path, a=((4, 8), torch.bfloat16), b=((3,), torch.float32))
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.tensors == {
        "a": StoredTensor((4, 8), "bfloat16"),
        "b": StoredTensor((3,), "float32"),
    }
    assert checkpoint.file_bytes == {"__0_0.distcp": 1100, "__1_0.distcp": 1000}
    assert checkpoint.optimizer_format == ""


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("optimizer.state.exp_avg.decoder.final_layernorm.weight", "names"),
        ("optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0.exp_avg", "buckets"),
        ("chained_1.optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0.param", "buckets"),
    ],
)
def test_how_states_of_the_optimizer_are_kept(tmp_path, name, kept):
    write(tmp_path, **{name: ((8,), torch.float32)})
    assert read_checkpoint(tmp_path).optimizer_format == kept


def test_the_last_checkpoint_of_a_job_counts(tmp_path):
    write(tmp_path / "iter_0000007", a=((1,), torch.float32))
    write(tmp_path / "iter_0000012", b=((1,), torch.float32))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12\n")
    assert list(read_checkpoint(tmp_path).tensors) == ["b"]


class Calls:
    """An object whose pickle makes a folder when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_nothing_in_the_file_is_called(tmp_path):
    target = str(tmp_path / "made")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Calls(target)))
    with pytest.raises(UsageError, match="is no metadata"):
        read_checkpoint(tmp_path)
    assert not os.path.exists(target)


@pytest.mark.parametrize("content", [b"", b"text", pickle.dumps([1, 2])])
def test_another_file_is_refused_by_name(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(UsageError, match="is no metadata of a torch_dist checkpoint"):
        read_checkpoint(tmp_path)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(UsageError, match="has no checkpoint of the format torch_dist"):
        read_checkpoint(tmp_path)


def test_copied_metadata_are_staged_as_a_jobs_folder(tmp_path):
    folder = write(tmp_path / "copied", a=((1,), torch.float32))
    staged = tmp_path / "staged"
    staged.mkdir()
    words = stage(read_checkpoint(folder), staged)
    assert words[:2] == ["--load", str(staged)]
    assert (staged / "latest_checkpointed_iteration.txt").read_text() == "1"
    place = staged / "iter_0000001"
    assert (place / ".metadata").read_bytes() == (folder / ".metadata").read_bytes()
    assert json.loads((place / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    assert not (folder / "metadata.json").exists()
