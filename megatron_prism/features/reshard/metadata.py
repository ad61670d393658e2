"""Names, shapes and files of a checkpoint in the format torch_dist, from its file ``.metadata``.

The file is a pickle of torch's ``Metadata``.  It is read without torch, and nothing in it is
called: every class that it names becomes a ``_Record``, which keeps what the pickle says.
"""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import dataclass
from pathlib import Path

from megatron_prism.core.errors import UsageError

_METADATA, _FORMAT = ".metadata", "metadata.json"
_TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_(\d{7,})")
_RELEASE = "release"
# what Megatron writes into metadata.json
_TORCH_DIST = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
# what reading another file, or a part of one, ends in
_BROKEN = (
    AssertionError,
    AttributeError,
    EOFError,
    IndexError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)
_FIX = "name a folder that has .metadata, or the job's --save folder"


class _Record:
    """An object of a class that is not imported: what it was made from, and its state."""

    # of objects that the pickle makes without a call, or without a state
    args: tuple[object, ...] = ()
    state: object = None

    def __init__(self, *args: object) -> None:
        self.args = args

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __hash__(self) -> int:
        return id(self)

    def field(self, name: str) -> object:
        """Return an attribute of the object, or None."""
        # other states (a tuple, say) have no names
        if isinstance(self.state, dict):
            return self.state.get(name)
        return None


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Args:
        shape: of the whole.
        dtype: such as bfloat16.
    """

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint's metadata say.

    Args:
        folder: that has ``.metadata``.
        tensors: name -> shape and type.
        file_bytes: file -> bytes of the shards in it.
    """

    folder: Path
    tensors: dict[str, StoredTensor]
    file_bytes: dict[str, int]

    @property
    def optimizer_format(self) -> str:
        """How states of a distributed optimizer are kept: "buckets", "names", or "" for none."""
        states = [name for name in self.tensors if re.match(r"(chained_\d+\.)?optimizer\.", name)]
        if not states:
            return ""
        # names of gradient buckets: the format of states that are not resharded
        if any(".bucket_idx_" in name for name in states):
            return "buckets"
        return "names"


class _Unpickler(pickle.Unpickler):
    """Makes records of all classes, and calls nothing that the file names."""

    def find_class(self, module: str, name: str) -> type:
        """Return a class of records for whatever is asked for."""
        return type(name, (_Record,), {"__module__": module})


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the metadata of a checkpoint.

    Args:
        path: the folder of one checkpoint, or of all that a job has saved.

    Raises:
        UsageError: there is none in the format torch_dist.
    """
    folder = _folder_of(path)
    try:
        with (folder / _METADATA).open("rb") as file:
            metadata = _Unpickler(file).load()
        entries = metadata.field("state_dict_metadata")
        places = metadata.field("storage_data")
        tensors = {}
        for name, entry in entries.items():
            # objects have no size
            if entry.field("size") is not None:
                tensors[name] = StoredTensor(_shape(entry), _dtype(entry))
        file_bytes: dict[str, int] = {}
        for place in places.values():
            file_name = place.field("relative_path")
            file_bytes[file_name] = file_bytes.get(file_name, 0) + place.field("length")
    except _BROKEN as error:
        message = f"{folder / _METADATA} is no metadata of a torch_dist checkpoint: {error}"
        raise UsageError(message, fix=_FIX) from error
    return Checkpoint(folder, tensors, file_bytes)


def _folder_of(path: Path) -> Path:
    """Return the folder of one checkpoint, the last that a job has saved where there are some."""
    # the folder of one checkpoint
    if (path / _METADATA).is_file():
        return path
    tracker = path / _TRACKER
    # a job's folder: the last one that it has saved
    if tracker.is_file():
        text = tracker.read_text(encoding="utf-8").strip()
        # Megatron writes a number, or ``release`` for a converted checkpoint
        if text != _RELEASE and not text.isdecimal():
            raise UsageError(f"{tracker} names no iteration", fix=_FIX)
        name = text
        if text != _RELEASE:
            name = f"iter_{int(text):07d}"
        if (path / name / _METADATA).is_file():
            return path / name
        raise UsageError(f"{path / name} has no {_METADATA}", fix=_FIX)
    raise UsageError(f"{path} has no checkpoint of the format torch_dist", fix=_FIX)


def _shape(entry: _Record) -> tuple[int, ...]:
    """Return the shape of a stored tensor: the pickle makes a torch.Size of a tuple."""
    size = entry.field("size")
    assert isinstance(size, _Record), "a size is an object of torch"
    (numbers,) = size.args
    assert isinstance(numbers, tuple), "made from a tuple"
    return numbers


def _dtype(entry: _Record) -> str:
    """Return the type of a stored tensor: the first of its properties, a name in torch."""
    properties = entry.field("properties")
    assert isinstance(properties, _Record), "properties are an object of torch"
    # releases of torch keep them as a tuple or by name
    dtype = properties.field("dtype")
    if isinstance(properties.state, tuple):
        dtype = properties.state[0]
    return getattr(dtype, "__name__", "")


def stage(checkpoint: Checkpoint, folder: Path) -> list[str]:
    """Make a folder from which a job can ``--load`` a checkpoint that is anywhere.

    Args:
        checkpoint: whose files stay where they are.
        folder: empty; gets links to them.

    Returns:
        The job's options.
    """
    source = checkpoint.folder.resolve()
    # other names are of checkpoints that were copied: they count as iteration 1
    iteration = _ITERATION.fullmatch(source.name)
    number = int(iteration[1]) if iteration else 1
    is_release = source.name == _RELEASE
    name = _RELEASE if is_release else f"iter_{number:07d}"
    (folder / _TRACKER).write_text(_RELEASE if is_release else str(number), encoding="utf-8")
    place = folder / name
    if (source / _FORMAT).is_file():
        place.symlink_to(source)
    else:
        # copied metadata may have come without the file that names the format
        place.mkdir()
        for path in source.iterdir():
            (place / path.name).symlink_to(path)
        (place / _FORMAT).write_text(json.dumps(_TORCH_DIST), encoding="utf-8")
    options = ["--load", str(folder), "--ckpt-format", "torch_dist"]
    # a released checkpoint has no iteration
    if not is_release:
        options += ["--ckpt-step", str(number)]
    return options
