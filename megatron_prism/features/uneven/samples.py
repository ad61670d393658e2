"""Samples of a run: how many tokens each microbatch of each dp rank has.

In : a file that says how often lengths occur, or lists of lengths.  Out: ``Batches``, the lengths
of all microbatches of a number of iterations.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from megatron_prism.core import foreign
from megatron_prism.core.errors import UsageError
from megatron_prism.core.world import World
from megatron_prism.features.uneven.inputs import UnevenInput
from megatron_prism.features.uneven.kinds import InputKind

_MOST_BYTES = 1 << 26  # of a file of lengths
_LAW_FIX = 'a line for each length: {"length": 4096, "count": 17}'

_Length = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]


class _Row(msgspec.Struct):
    """A line of a file that says how often samples occur."""

    length: _Length | None = None
    documents: tuple[_Length, ...] | None = None
    count: foreign.PositiveInt = 1
    dp: foreign.Natural | None = None


@dataclass(frozen=True)
class Samples:
    """Samples from which a dp rank draws.

    Attributes:
        tokens: int64 [samples].
        squares: int64 [samples], sum of the squares of the lengths of a sample's documents.
        counts: int64 [samples], how often each occurs.
    """

    tokens: np.ndarray
    squares: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True)
class SampleLaw:
    """How often samples occur.

    Attributes:
        of_dp: Samples of the dp ranks that have their own.
        of_others: Samples of all other dp ranks; None: every dp rank has its own.
        is_packed: Whether samples are packed documents, which attend each to itself.
        source: The file.
    """

    of_dp: dict[int, Samples]
    of_others: Samples | None
    is_packed: bool
    source: str


@dataclass(frozen=True)
class Batches:
    """Samples of all microbatches of a number of iterations.

    Attributes:
        tokens: int64 [iterations, dp, microbatches], tokens of a sample.  Samples of one
            microbatch are as long as the longest of them.
        squares: float64 [iterations, dp, microbatches], sum of the squares of the lengths of a
            sample's documents, the mean over the samples of a microbatch; ``tokens ** 2`` where a
            sample is one document.
        is_packed: Whether samples are packed documents.
        source: Where they are from, in words.
    """

    tokens: np.ndarray
    squares: np.ndarray
    is_packed: bool
    source: str

    def __len__(self) -> int:
        """Count the iterations."""
        return len(self.tokens)

    def of_one_document(self) -> Batches:
        """Return the same samples, each as one document."""
        squares = self.tokens.astype(np.float64) ** 2
        return dataclasses.replace(self, squares=squares, is_packed=False)

    def mean_samples(self, shape: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Make samples that are all the mean of these.

        Args:
            shape: Of the arrays.

        Returns:
            Tokens of a sample and squares of its documents, both float64.
        """
        tokens = np.full(shape, self.tokens.mean())
        squares = tokens**2
        if self.is_packed:
            squares[:] = self.squares.mean()
        return tokens, squares

    def inputs_of(self, iteration: int, world: World) -> tuple[UnevenInput, ...]:
        """Give the lengths of one iteration as inputs, one of each dp rank."""
        inputs: list[UnevenInput] = []
        for dp_rank, lengths in enumerate(self.tokens[iteration].tolist()):
            ranks = world.select(f"dp={dp_rank}")
            inputs.append(UnevenInput(InputKind.LENGTHS, ranks, lengths=tuple(lengths)))
        return tuple(inputs)


def holds_lists(path: str | os.PathLike[str]) -> bool:
    """Say whether a file of lengths lists them in order, and does not say how often they occur."""
    with foreign.reading(path, "a file of lengths", _LAW_FIX):
        first_line = b""
        for line in foreign.read_bytes(path, _MOST_BYTES).splitlines():
            if line.strip():
                first_line = line
                break
        return b'"lengths"' in first_line


def read_law(path: str | os.PathLike[str], world: World) -> SampleLaw:
    """Read how often samples occur: JSON lines, each of one length or one packed sample.

    Args:
        path: The file.  A line is ``{"length": 4096, "count": 17}``, or ``{"documents": [1000,
            3096]}`` of a packed sample; ``"dp": 1`` is of that dp rank alone.
        world: The world of the ranks.

    Raises:
        UsageError: A line is none of these, or some dp rank has no samples.
    """
    place = Path(path)
    rows: list[_Row] = []
    with foreign.reading(place, "a file that says how often lengths occur", _LAW_FIX):
        for line in foreign.read_bytes(place, _MOST_BYTES).splitlines():
            if line.strip():
                rows.append(foreign.value_of_json(line, _Row))
    rows_of_dp: dict[int | None, list[_Row]] = {}
    packed_rows = 0
    for row in rows:
        if (row.length is None) == (not row.documents):
            raise UsageError(f"{place}: a line has no length, or two", fix=_LAW_FIX)
        if row.dp is not None and row.dp >= world.dp:
            raise UsageError(
                f"{place}: there is no dp rank {row.dp}", fix=f"dp ranks from 0 to {world.dp - 1}"
            )
        packed_rows += row.length is None
        rows_of_dp.setdefault(row.dp, []).append(row)
    # a job either packs its samples or pads them
    if packed_rows not in (0, len(rows)):
        raise UsageError(
            f"{place} has samples of one document and packed ones",
            fix='"documents": [4096] for a sample of one document',
        )
    of_dp: dict[int, Samples] = {}
    for dp_rank, own_rows in rows_of_dp.items():
        if dp_rank is not None:
            of_dp[dp_rank] = _samples(own_rows)
    of_others = None
    if None in rows_of_dp:
        of_others = _samples(rows_of_dp[None])
    elif len(of_dp) < world.dp:
        missing = min(set(range(world.dp)) - set(of_dp))
        raise UsageError(f"{place}: dp rank {missing} has no lengths", fix=_LAW_FIX)
    return SampleLaw(of_dp, of_others, packed_rows > 0, place.name)


def _samples(rows: Sequence[_Row]) -> Samples:
    """Make the samples of rows."""
    tokens: list[int] = []
    squares: list[int] = []
    counts: list[int] = []
    for row in rows:
        documents = row.documents or (row.length or 0,)
        tokens.append(sum(documents))
        squares.append(sum(length * length for length in documents))
        counts.append(row.count)
    columns = [np.array(column, dtype=np.int64) for column in (tokens, squares, counts)]
    return Samples(*columns)


def draw(
    law: SampleLaw, shape: tuple[int, int, int], samples_per_microbatch: int, seed: int
) -> Batches:
    """Draw the samples of a run, each independently of all others.

    Args:
        law: How often samples occur.
        shape: Iterations, dp ranks, microbatches.
        samples_per_microbatch: The micro batch size.
        seed: Of the draws.
    """
    iterations, dp, microbatches = shape
    generator = np.random.default_rng(seed)
    tokens = np.empty((*shape, samples_per_microbatch), dtype=np.int64)
    squares = np.empty((*shape, samples_per_microbatch), dtype=np.int64)
    for dp_rank in range(dp):
        samples = law.of_dp.get(dp_rank, law.of_others)
        assert samples is not None  # read_law refuses a dp rank without samples
        shares = samples.counts / samples.counts.sum()
        size = iterations, microbatches, samples_per_microbatch
        chosen = generator.choice(len(shares), size=size, p=shares)
        tokens[:, dp_rank] = samples.tokens[chosen]
        squares[:, dp_rank] = samples.squares[chosen]
    source = f"drawn from {law.source}, seed {seed}"
    return collate(tokens, squares, law.is_packed, source)


def collate(tokens: np.ndarray, squares: np.ndarray, is_packed: bool, source: str) -> Batches:
    """Put samples into microbatches.

    Args:
        tokens: int64 [iterations, dp, microbatches, samples].
        squares: int64, of the same shape.
        is_packed: Whether samples are packed documents.
        source: Where they are from, in words.
    """
    longest = tokens.max(axis=-1)
    # shorter samples are padded, and the padding attends, too
    mean_squares = longest.astype(np.float64) ** 2
    if is_packed:
        mean_squares = squares.mean(axis=-1)
    return Batches(longest, mean_squares, is_packed, source)


def listed(
    inputs: Sequence[UnevenInput], world: World, microbatches: int, usual: int, source: str
) -> Batches:
    """Make the batches that lists of lengths say.

    Args:
        inputs: Lengths of some ranks, of as many iterations each (``split_iterations``).
        world: The world of the ranks.
        microbatches: Of an iteration.
        usual: Tokens of a sample of all other dp ranks.
        source: Where they are from, in words.

    Raises:
        UsageError: Ranks of one dp rank have different lengths.
    """
    longest_list = max(len(uneven_input.lengths) for uneven_input in inputs)
    iterations = max(1, longest_list // microbatches)
    tokens = np.full((iterations, world.dp, microbatches), usual, dtype=np.int64)
    for uneven_input in inputs:
        dp_ranks = sorted({world.coordinates(rank).dp for rank in uneven_input.ranks})
        for dp_rank in dp_ranks:
            if set(world.select(f"dp={dp_rank}")) - set(uneven_input.ranks):
                raise UsageError(
                    f"{uneven_input} names some ranks of dp rank {dp_rank}, and all of them get "
                    "one batch",
                    fix=f"lengths=dp={dp_rank}:{uneven_input.value}",
                )
            lengths = np.array(uneven_input.lengths, dtype=np.int64)
            tokens[:, dp_rank] = lengths.reshape(-1, min(len(lengths), microbatches))
    return Batches(tokens, tokens.astype(np.float64) ** 2, False, source)
