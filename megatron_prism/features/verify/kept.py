"""What the ranks of one run have kept: parts of tensors by name and rank, losses, norms, routing.

In : the folder of a run.  Out: ``Kept``, which puts parts together and says which are missing.
Numpy only.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_prism.core.errors import PrismError
from megatron_prism.core.world import World
from megatron_prism.emulate.processes.workers import Json

COUNTED = "counted"  # how often an element is in a call of the gradient norm's function
STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # of optimizers: Adam's, and SGD's and Muon's

PartKey = tuple[str, tuple[int, ...], tuple[int, ...]]  # name, offset, shape of the part


class UndecidedError(PrismError):
    """Two runs cannot be compared; the message says which of them lacks what."""


@dataclass(frozen=True)
class Shard:
    """A part of a gradient, state or parameter, as ``rank`` has it."""

    key: str
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]
    rank: int
    data: np.ndarray

    def of(self, full_tensor: np.ndarray) -> np.ndarray:
        """Return the same part of another full tensor."""
        ends = zip(self.offset, self.data.shape, strict=True)
        place: tuple[Any, ...] = tuple(slice(start, start + length) for start, length in ends)
        return full_tensor[(*place, ...)]  # a view, of a single number too

    @property
    def part_key(self) -> PartKey:
        """What the same part on another rank has alike."""
        return self.key, self.offset, self.data.shape

    @property
    def bounds(self) -> str:
        """``[32:64, 0:16]``; empty where the rank has all of it."""
        if self.data.shape == self.global_shape:
            return ""
        ends = zip(self.offset, self.data.shape, strict=True)
        return f"[{', '.join(f'{start}:{start + length}' for start, length in ends)}]"

    @property
    def place(self) -> str:
        """``rank 3, [32:64, 0:16]``; the rank alone where it has all of it."""
        bounds = self.bounds
        if not bounds:
            return f"rank {self.rank}"
        return f"rank {self.rank}, {bounds}"


@dataclass(frozen=True)
class MeanLoss:
    """The loss of a token of one microbatch, as the first rank of a context group has it."""

    mean: float
    rank: int


@dataclass
class Kept:
    """What the ranks of one run have kept.

    title : what a sentence calls the run
    """

    folder: Path
    world: World
    title: str = "the run"

    @cached_property
    def facts(self) -> list[Json]:
        """What each rank says of itself.

        Raises:
            UndecidedError: if a rank has not come to its end.
        """
        facts = []
        # each rank writes its facts when it has ended
        for rank in range(self.world.size):
            try:
                facts.append(json.loads((self.folder / f"rank-{rank}.json").read_text()))
            except (OSError, ValueError):
                raise UndecidedError(
                    f"rank {rank} of {self.title} ended before it kept what it did"
                ) from None
        return facts

    @cached_property
    def _tensors(self) -> dict[tuple[str, int], dict[str, list[Shard]]]:
        """(kind, iteration) -> name -> parts."""
        tensors: dict[tuple[str, int], dict[str, list[Shard]]] = {}
        for rank, facts in enumerate(self.facts):
            try:
                with np.load(self.folder / f"rank-{rank}.npz") as file:
                    arrays = [file[name] for name in file.files]
            # a rank that was killed leaves none, or the beginning of one
            except (OSError, ValueError, zipfile.BadZipFile):
                arrays = []
            if len(arrays) != len(facts["tensors"]):
                raise UndecidedError(f"rank {rank} of {self.title} has not kept all its tensors")
            for description, data in zip(facts["tensors"], arrays, strict=True):
                kind, iteration, key, offset, global_shape = description
                part = Shard(key, tuple(offset), tuple(global_shape), rank, data)
                tensors.setdefault((kind, iteration), {}).setdefault(key, []).append(part)
        return tensors

    def check_iterations(self, start: int, end: int) -> None:
        """Check that every rank has trained the iterations behind ``start`` up to ``end``.

        Raises:
            UndecidedError: with the rank that has not.
        """
        wanted = range(start + 1, end + 1)
        for facts in self.facts:
            # a rank that stopped early has fewer norms
            trained = [iteration for iteration in wanted if str(iteration) in facts["norms"]]
            if len(trained) < len(wanted):
                raise UndecidedError(
                    f"rank {facts['rank']} of {self.title} trained {len(trained)} "
                    f"of {len(wanted)} iterations"
                )

    def tensors(self, kind: str, iteration: int) -> dict[str, list[Shard]]:
        """Return name -> the parts that ranks have, in the order in which the model has them."""
        return self._tensors.get((kind, iteration), {})

    def wholes(self, kind: str, iteration: int) -> dict[str, np.ndarray]:
        """Return name -> the whole, of the first ranks that have its parts.

        An element that no rank has is NaN; ``missing_elements`` counts these.
        """
        return {key: assembled(parts) for key, parts in self.tensors(kind, iteration).items()}

    @cached_property
    def losses(self) -> dict[tuple[int, int, str], list[MeanLoss]]:
        """(iteration, microbatch of the whole batch, name) -> the loss on each tensor rank.

        Ranks of one context group have parts of a microbatch, of which the mean is taken.
        """
        # one list for each tensor rank of each microbatch, with a member for each context rank
        parts: dict[tuple[int, int, str], dict[int, list[tuple[list[float], int]]]] = {}
        for facts in self.facts:
            rank = facts["rank"]
            coordinates = self.world.coordinates(rank)
            for iteration, number, values in facts["losses"]:
                microbatch = number * self.world.dp + coordinates.dp
                for name, numbers in values.items():
                    by_tensor_rank = parts.setdefault((iteration, microbatch, name), {})
                    by_tensor_rank.setdefault(coordinates.tp, []).append((numbers, rank))
        losses: dict[tuple[int, int, str], list[MeanLoss]] = {}
        for place, by_tensor_rank in sorted(parts.items()):
            losses[place] = [_mean_loss(members) for members in by_tensor_rank.values()]
        return losses

    @cached_property
    def reported(self) -> dict[tuple[int, str], float]:
        """(iteration, Megatron's name) -> a figure that the last rank reports to TensorBoard."""
        figures: dict[tuple[int, str], float] = {}
        for iteration, name, value in self.facts[-1]["reported"]:
            figures.setdefault((iteration, name), value)  # the first evaluation of an iteration
        return figures

    @cached_property
    def routed(self) -> dict[tuple[int, int], np.ndarray]:
        """(iteration, layer) -> the share of tokens that each expert gets."""
        sums: dict[tuple[int, int], np.ndarray] = {}
        for facts in self.facts:
            for text, counts in facts["routed"].items():
                iteration, layer = map(int, text.split())
                tokens = np.array(counts, float)
                before = sums.get((iteration, layer), np.zeros_like(tokens))
                if before.shape != tokens.shape:
                    raise UndecidedError(
                        f"ranks of {self.title} have different numbers of experts in layer {layer}"
                    )
                sums[iteration, layer] = before + tokens
        shares: dict[tuple[int, int], np.ndarray] = {}
        for place, tokens in sorted(sums.items()):
            shares[place] = tokens / max(tokens.sum(), 1.0)
        return shares

    def norms(self, iteration: int) -> list[float | None]:
        """Return the gradient norm of each rank; None where Megatron has none."""
        return [facts["norms"][str(iteration)] for facts in self.facts]

    def counted(self, iteration: int, rank: int) -> dict[PartKey, np.ndarray] | None:
        """Return how often each element is in the gradient norm that ``rank`` gets.

        A norm is summed over groups, so members' parts are added.  None where this is not known:
        a norm by another function, or of tensors that are no gradient of a parameter.
        """
        groups: set[tuple[int, ...]] = set()
        for call_iteration, _, ranks, _ in self.facts[rank].get("norm_calls", ()):
            if call_iteration == iteration:
                groups.add(tuple(ranks))
        # this rank computed no norm in the iteration
        if not groups:
            return None
        counts: dict[PartKey, np.ndarray] = {}
        for group in sorted(groups):
            for member in group:
                parts = self._counted_in(iteration, member, group)
                if parts is None:
                    return None
                for part_key, count in parts.items():
                    counts[part_key] = counts.get(part_key, 0) + count
        return counts

    def _counted_in(
        self, iteration: int, member: int, group: tuple[int, ...]
    ) -> dict[PartKey, np.ndarray] | None:
        """Return what ``member`` adds to the norm of ``group``; None if that is not known."""
        counts: dict[PartKey, np.ndarray] = {}
        for call_iteration, kind, ranks, nameless in self.facts[member].get("norm_calls", ()):
            if call_iteration != iteration or tuple(ranks) != group:
                continue
            # a tensor that is no gradient of a parameter: nobody can say which elements it has
            if nameless:
                return None
            for part in self._tensors_of(member, kind, iteration):
                count = counts.get(part.part_key, np.zeros(part.data.shape, int))
                counts[part.part_key] = count + part.data
        return counts

    def _tensors_of(self, rank: int, kind: str, iteration: int) -> list[Shard]:
        """Return the parts of one rank."""
        parts = []
        for shards in self.tensors(kind, iteration).values():
            parts += [shard for shard in shards if shard.rank == rank]
        return parts


def assembled(parts: list[Shard]) -> np.ndarray:
    """Put parts together; of copies the first counts, and what nobody has is NaN."""
    full_tensor = np.full(parts[0].global_shape, math.nan)
    for part in reversed(parts):
        if part.global_shape == parts[0].global_shape:
            part.of(full_tensor)[...] = part.data
    return full_tensor


def missing_elements(parts: list[Shard]) -> int:
    """Return how many elements of a whole are in no part."""
    held = np.zeros(parts[0].global_shape, bool)
    for part in parts:
        if part.global_shape == parts[0].global_shape:
            part.of(held)[...] = True
    return int(held.size - held.sum())


def placed(
    counts: Mapping[PartKey, np.ndarray], key: str, global_shape: tuple[int, ...]
) -> np.ndarray:
    """Return the counts of one parameter as a whole; NaN where no part has an element."""
    shards = []
    for (name, offset, _), count in counts.items():
        if name == key:
            shards.append(Shard(name, offset, global_shape, 0, count))
    if not shards:
        return np.full(global_shape, math.nan)
    return assembled(shards)


def _mean_loss(members: list[tuple[list[float], int]]) -> MeanLoss:
    """Return the mean of what the ranks of a context group have of a microbatch.

    A rank has a mean, or a sum and the number of its tokens.
    """
    lengths = {len(numbers) for numbers, _ in members}
    first_rank = members[0][1]
    # ranks that report their loss in different forms have no mean
    if len(lengths) > 1:
        return MeanLoss(math.nan, first_rank)
    total = np.sum([numbers for numbers, _ in members], axis=0)
    # each rank says a mean
    if len(total) != 2:
        return MeanLoss(float(total[0] / len(members)), first_rank)
    # a sum, of no tokens: the loss mask hides all of them
    if not total[1]:
        return MeanLoss(math.nan, first_rank)
    return MeanLoss(float(total[0] / total[1]), first_rank)
