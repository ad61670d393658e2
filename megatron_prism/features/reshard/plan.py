"""A checkpoint and a job's layout: what fits, what is read, and how long reading takes.

In : the metadata of a checkpoint, and what planned ranks told (``planned_rank.as_json``).  Out:
``Reshard``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from megatron_prism.core.rendering import renderer_of
from megatron_prism.core.world import World
from megatron_prism.emulate.processes.workers import Json
from megatron_prism.features.reshard.metadata import Checkpoint

MISSING, OTHER_SHAPE, RESIZED, OTHER_TYPE = "missing", "other shape", "resized", "other type"
REFUSED_MATCHES = (MISSING, OTHER_SHAPE)
_OBJECTS_OF_RANKS = ("rng_state", "rerun_state_machine")


@dataclass(frozen=True)
class Tensor:
    """A tensor that does not map as it is.

    Args:
        key: its name in the checkpoint.
        match: what is the matter with it.
        shape: in the job; empty where the job has none.
        dtype: in the job, too.
        stored_shape: in the checkpoint; empty where it has none.
        stored_dtype: in the checkpoint, too.
    """

    key: str
    match: str
    shape: tuple[int, ...]
    dtype: str
    stored_shape: tuple[int, ...]
    stored_dtype: str


@dataclass(frozen=True)
class RankRead:
    """What one rank reads.

    Args:
        rank: its number.
        taken_bytes: of the parts of tensors that it takes.
        read_bytes: of stored shards that torch reads for these; a shard is read whole, once for
            each part.
        num_files: that these are in.
        host_bytes: the most that the host holds at once: one stored shard.
        device_peak: bytes that are alive while it loads.
        refusal: why Megatron ends the job; empty where it does not.
    """

    rank: int
    taken_bytes: int
    read_bytes: int
    num_files: int
    host_bytes: int
    device_peak: int
    refusal: str


@dataclass(frozen=True)
class Reshard:
    """What becomes of a checkpoint in a job of another layout.

    Args:
        checkpoint: what its metadata say.
        world: of the job.
        ranks: that were planned.
        tensors: that do not map as they are.
        num_same: how many map as they are.
        unexpected: names that no planned rank asks for; None where ranks that might ask were left
            out.
        without_optimizer: whether the job loads it with --no-load-optim and --no-load-rng; None
            where that was not tried.
        has_stand_in: whether the arguments of the checkpoint's job were absent.
        asks_for_states: whether the job reads states of its optimizer.
        read_rate: bytes a second of the file system; None: nobody says.
        shifted_states: parameter -> by how many elements this Megatron shifts its states when the
            job saves them again.
    """

    checkpoint: Checkpoint
    world: World
    ranks: tuple[RankRead, ...]
    tensors: tuple[Tensor, ...]
    num_same: int
    unexpected: tuple[str, ...] | None
    without_optimizer: bool | None
    has_stand_in: bool
    asks_for_states: bool
    read_rate: int | None
    shifted_states: Mapping[str, int]

    @property
    def refusal(self) -> str:
        """Why Megatron ends the job, in the words of its first rank that does; or empty."""
        for rank in self.ranks:
            if rank.refusal:
                return rank.refusal
        return ""

    @property
    def loads(self) -> bool:
        """Whether Megatron loads it."""
        return not self.refusal

    @property
    def assumes_optimizers(self) -> bool:
        """Whether the states of experts were assumed to be in an optimizer as those of the job.

        With expert parallelism Megatron has an optimizer of their own for experts, and loads no
        states that were saved without it.  Names of tensors do not say it.
        """
        # arguments of the job that saved it are known: so is where its experts' states are
        if not (self.has_stand_in and self.asks_for_states):
            return False
        names = self.checkpoint.tensors
        return any("optimizer." in name and ".experts." in name for name in names)

    @property
    def states_survive(self) -> bool:
        """Whether the optimizer goes on with the states of the checkpoint."""
        return self.loads and self.asks_for_states

    @property
    def total_read_bytes(self) -> int:
        """Bytes that all ranks of the job read; of ranks that were not planned, the mean."""
        planned_bytes = sum(rank.read_bytes for rank in self.ranks)
        return planned_bytes * self.world.size // max(1, len(self.ranks))

    @property
    def seconds(self) -> float | None:
        """Seconds that the file system takes for that; None where its rate is unknown."""
        # a refused checkpoint is not read to its end
        if self.read_rate is None or not self.loads:
            return None
        return self.total_read_bytes / self.read_rate

    def to_json(self) -> dict[str, object]:
        """Make what ``prism reshard --json`` prints."""
        unexpected = None if self.unexpected is None else list(self.unexpected)
        return {
            "schema": "prism.reshard/1",
            "checkpoint": str(self.checkpoint.folder),
            "world": str(self.world),
            "loads": self.loads,
            "refusal": self.refusal,
            "without_optimizer": self.without_optimizer,
            "optimizer_format": self.checkpoint.optimizer_format,
            "optimizer_states_survive": self.states_survive,
            "shifted_states": dict(self.shifted_states),
            "same": self.num_same,
            "tensors": [dataclasses.asdict(tensor) for tensor in self.tensors],
            "unexpected": unexpected,
            "ranks": [dataclasses.asdict(rank) for rank in self.ranks],
            "total_read_bytes": self.total_read_bytes,
            "seconds": self.seconds,
            "arguments_assumed": self.has_stand_in,
            "optimizers_assumed": self.assumes_optimizers,
        }

    def to_rows(self) -> list[dict[str, object]]:
        """Make a row for each planned rank."""
        return [dataclasses.asdict(rank) for rank in self.ranks]

    def to_text(self) -> str:
        """Make the page that ``prism reshard`` prints."""
        text: str = renderer_of(self).text(self)
        return text


def combine(
    checkpoint: Checkpoint,
    world: World,
    plans: Sequence[Json],
    *,
    covers_all: bool,
    without_optimizer: bool | None,
    read_rate: int | None,
) -> Reshard:
    """Put what ranks planned together.

    Args:
        checkpoint: that they planned to read.
        world: of the job.
        plans: what each rank told.
        covers_all: whether a name that none of them asks for is asked for by nobody.
        without_optimizer: as in ``Reshard``.
        read_rate: as in ``Reshard``.
    """
    requests: dict[str, Mapping[str, object]] = {}
    # ranks ask for parts of the same tensors: each counts once
    for plan in plans:
        for request in plan["requests"]:
            requests[request["key"]] = request
    shifted_states: dict[str, int] = {}
    for plan in plans:
        shifted_states.update(plan["shifted_states"])
    odd_tensors = []
    for key, request in sorted(requests.items()):
        # shapes, types or whole tensors that differ
        if request["match"] != "same":
            odd_tensors.append(_tensor(key, request))

    # a rank that Megatron ends before it plans has asked for nothing yet
    has_planned = all(plan["requests"] for plan in plans)
    unexpected = None
    if covers_all and has_planned:
        unexpected = tuple(sorted(set(checkpoint.tensors) - set(requests)))
    return Reshard(
        checkpoint=checkpoint,
        world=world,
        ranks=tuple(_rank(plan) for plan in plans),
        tensors=tuple(odd_tensors),
        num_same=len(requests) - len(odd_tensors),
        unexpected=unexpected,
        without_optimizer=without_optimizer,
        has_stand_in=any(plan["stand_in"] for plan in plans),
        asks_for_states=any("optimizer." in key for key in requests),
        read_rate=read_rate,
        shifted_states=shifted_states,
    )


def _tensor(key: str, request: Mapping[str, object]) -> Tensor:
    """Make a tensor of what a rank told of it."""
    return Tensor(
        key=key,
        match=str(request["match"]),
        shape=tuple(cast("Sequence[int]", request["shape"])),
        dtype=str(request["dtype"]).removeprefix("torch."),
        stored_shape=tuple(cast("Sequence[int]", request["stored_shape"])),
        stored_dtype=str(request["stored_dtype"]).removeprefix("torch."),
    )


def _rank(plan: Json) -> RankRead:
    """Make a rank of what it told."""
    file_bytes = plan["file_bytes"]
    return RankRead(
        rank=plan["rank"],
        taken_bytes=plan["taken_bytes"],
        read_bytes=sum(file_bytes.values()),
        num_files=len(file_bytes),
        host_bytes=plan["largest_shard_bytes"],
        device_peak=plan["load_peak"],
        refusal=plan["refusal"],
    )
