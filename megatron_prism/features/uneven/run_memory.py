"""Peak memory of drawn batches: the longest sample decides it.

In : captures of one job at several lengths that recorded memory, and ``Batches``.  Out:
``RunMemory``: the largest peak of a run, the batch that reaches it, and how often a limit is
exceeded.

Captures that ask for the same storages in the same order differ in their sizes alone; temporaries
of single ops may differ (``memory_requests``).  Where a few ask for others, most captures decide.
A storage whose size differs follows the length of the microbatch in which it comes to be; its size
at other lengths is on the polynomial through the captures next to it (``polynomial_weights``).  One
that belongs to no microbatch counts as that of the longest sample of its iteration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_prism.core.programs.program import Program
from megatron_prism.features.uneven.length_curves import polynomial_weights, share_outside
from megatron_prism.features.uneven.memory_requests import Changes, comparable
from megatron_prism.features.uneven.mixed_lengths import LengthCaptures
from megatron_prism.features.uneven.samples import Batches
from megatron_prism.memory.allocator import Settings, replay_requests

_MOST_EVENTS = 100_000_000  # changes of memory that are added up: some 5 s
_MOST_REQUESTS = 1_000_000  # that the allocator's model replays: some 5 s
_CONSTANT, _LONGEST = -1, -2  # in place of a microbatch


@dataclass(frozen=True)
class LeftOut:
    """A capture that asks for other storages than most, and what the others let expect of it.

    Attributes:
        length: Tokens of a sample.
        captured_bytes: Its own peak of tensors.
        expected_bytes: The peak that the others give for this length.
    """

    length: int
    captured_bytes: int
    expected_bytes: int


@dataclass(frozen=True)
class RunMemory:
    """Peaks of a run.

    Attributes:
        iterations: int64 [examined], numbers of the iterations that were added up, from 0: those
            with the longest samples.
        longest_samples: int64 [examined], tokens of the longest sample of each.
        peak_bytes: int64 [examined], tensors at the peak of the rank that needs most.
        rank: The rank that needs most of all.
        iteration: Its iteration, from 0.
        longest: Tokens of the longest sample that it has then.
        usual_bytes: Its peak if all samples have the mean length.
        reserved_bytes: Segments that the allocator takes for that iteration alone.
        limit_bytes: Memory that tensors may take; 0: nobody said.
        outside: Part of the microbatches that is shorter or longer than all of ``lengths``.
        lengths: Tokens of a sample of the captures that ask alike, ascending.
        left_out: The captures that ask otherwise.
    """

    iterations: np.ndarray
    longest_samples: np.ndarray
    peak_bytes: np.ndarray
    rank: int
    iteration: int
    longest: int
    usual_bytes: int
    reserved_bytes: int
    limit_bytes: int
    outside: float
    lengths: tuple[int, ...]
    left_out: tuple[LeftOut, ...] = ()

    @property
    def failing(self) -> np.ndarray:
        """Numbers of the examined iterations whose tensors exceed the limit, int64."""
        failing: np.ndarray = self.iterations[self._exceeds]
        return failing

    @property
    def shortest_failing(self) -> int:
        """Tokens of the shortest longest sample whose iteration exceeds the limit; 0: none does."""
        lengths = self.longest_samples[self._exceeds]
        if not len(lengths):
            return 0
        return int(lengths.min())

    @property
    def _exceeds(self) -> np.ndarray:
        """Whether each examined iteration exceeds the limit, bool."""
        if not self.limit_bytes:
            return np.zeros(len(self.iterations), dtype=bool)
        return self.peak_bytes > self.limit_bytes


@dataclass(frozen=True)
class _Requests:
    """Changes of memory of a class of ranks at all captured lengths.

    Attributes:
        rank: The lowest rank of the class in dp rank 0.
        storage: int64 [events].
        num_bytes: int64 [lengths, events]; below 0 where a storage goes.
        microbatch: int64 [events], whose length the size follows; _CONSTANT: none's, _LONGEST: the
            longest's of the iteration.
    """

    rank: int
    storage: np.ndarray
    num_bytes: np.ndarray
    microbatch: np.ndarray

    def bytes_at(self, weights: np.ndarray, longest_weights: np.ndarray) -> np.ndarray:
        """Give the changes of one iteration of a dp rank, int64 [events].

        Args:
            weights: float64 [lengths, microbatches].
            longest_weights: float64 [lengths], of the longest sample.
        """
        changes = self.num_bytes[-1].astype(np.float64)
        follows = self.microbatch >= 0
        own_weights = weights[:, self.microbatch[follows]]
        changes[follows] = (self.num_bytes[:, follows] * own_weights).sum(axis=0)
        follows_longest = self.microbatch == _LONGEST
        changes[follows_longest] = longest_weights @ self.num_bytes[:, follows_longest]
        whole: np.ndarray = np.rint(changes).astype(np.int64)
        return whole


def run_memory(captures: LengthCaptures, batches: Batches, limit: int = 0) -> RunMemory | None:
    """Find the largest peak of a run.

    Args:
        captures: Of one job at several lengths.
        batches: The samples.
        limit: Bytes that tensors may take; 0: nobody says.

    Returns:
        None: captures recorded no memory, or no two of them ask for the same storages.
    """
    all_changes = _comparable_changes(captures)
    lengths = _lengths_that_ask_alike(all_changes)
    if len(lengths) < 2:
        return None
    requests = _requests_of_classes(captures, lengths, all_changes)
    order = _longest_first(batches)
    events = sum(len(own.storage) for own in requests)
    dp_ranks = batches.tokens.shape[1]
    most = max(1, _MOST_EVENTS // (events * dp_ranks * len(lengths)))
    examined = order[:most]

    # the largest peak of each iteration, and of all
    peaks = np.zeros(len(examined), dtype=np.int64)
    worst = (-1, 0, requests[0], 0)  # bytes, iteration, class, dp rank
    for place, iteration in enumerate(examined.tolist()):
        tokens = batches.tokens[iteration]
        squares = batches.squares[iteration]
        weights = polynomial_weights(lengths, tokens, squares)
        for dp_rank in range(dp_ranks):
            longest = int(tokens[dp_rank].argmax())
            own_weights = weights[:, dp_rank]
            for own in requests:
                changes = own.bytes_at(own_weights, own_weights[:, longest])
                peak = int(changes.cumsum().max())
                peaks[place] = max(peaks[place], peak)
                if peak > worst[0]:
                    worst = peak, iteration, own, dp_rank
    _, iteration, own, dp_rank = worst
    tokens = batches.tokens[iteration, dp_rank]
    squares = batches.squares[iteration, dp_rank]
    return RunMemory(
        iterations=examined,
        longest_samples=batches.tokens[examined].max(axis=(1, 2)),
        peak_bytes=peaks,
        rank=_rank_in(captures, own.rank, dp_rank),
        iteration=iteration,
        longest=int(tokens.max()),
        usual_bytes=_usual_peak(own, lengths, batches),
        reserved_bytes=_reserved(own, polynomial_weights(lengths, tokens, squares), tokens),
        limit_bytes=limit,
        outside=share_outside(lengths, batches),
        lengths=tuple(lengths),
        left_out=tuple(_left_out(captures, lengths, requests)),
    )


def _left_out(
    captures: LengthCaptures, lengths: Sequence[int], requests: Sequence[_Requests]
) -> Iterator[LeftOut]:
    """Compare captures that ask otherwise with what is expected of their lengths."""
    for length in sorted(captures.by_length):
        programs = captures.by_length[length].programs
        has_memory = all(len(program.allocations) for program in programs)
        if length in lengths or not has_memory:
            continue
        tokens = np.full(captures.microbatches, length)
        weights = polynomial_weights(lengths, tokens, tokens.astype(np.float64) ** 2)
        expected_bytes = 0
        for own in requests:
            changes = own.bytes_at(weights, weights[:, 0])
            expected_bytes = max(expected_bytes, int(changes.cumsum().max()))
        # of the iteration alone, as what is expected
        captured_bytes = max(int(program.live_bytes().max()) for program in programs)
        yield LeftOut(length, captured_bytes, expected_bytes)


def _rank_in(captures: LengthCaptures, rank: int, dp_rank: int) -> int:
    """Find the rank that is in another replica what ``rank`` is in its own."""
    world = captures.captured.world
    place = world.coordinates(rank)
    ranks = world.select(f"dp={dp_rank}")
    for other in ranks:
        coordinates = world.coordinates(other)
        if (coordinates.tp, coordinates.cp, coordinates.pp) == (place.tp, place.cp, place.pp):
            return other
    return ranks[0]


def _longest_first(batches: Batches) -> np.ndarray:
    """Order iterations by their longest sample, then by all tokens of a dp rank, int64."""
    longest = batches.tokens.max(axis=(1, 2))
    most_tokens = batches.tokens.sum(axis=2).max(axis=1)
    return np.lexsort((-most_tokens, -longest))


def _usual_peak(requests: _Requests, lengths: Sequence[int], batches: Batches) -> int:
    """Say what a class needs if all samples have the mean length, bytes."""
    tokens, squares = batches.mean_samples(batches.tokens.shape[2:])
    weights = polynomial_weights(lengths, tokens, squares)
    changes = requests.bytes_at(weights, weights[:, 0])
    return int(changes.cumsum().max())


def _reserved(requests: _Requests, weights: np.ndarray, tokens: np.ndarray) -> int:
    """Say what the allocator takes for an iteration alone, bytes; 0: too long to be replayed."""
    if len(requests.storage) > _MOST_REQUESTS:
        return 0
    longest = int(tokens.argmax())
    changes = requests.bytes_at(weights, weights[:, longest])
    rows = list(zip(requests.storage.tolist(), changes.tolist(), strict=True))
    return replay_requests(rows, Settings(), ahead=0).peak_reserved


# -- what captures ask for -------------------------------------------------------------------------
def _comparable_changes(captures: LengthCaptures) -> list[dict[int, Changes]]:
    """Read the changes of memory of every program: by tokens of a sample, where it was recorded."""
    lengths: list[int] = []
    for length in sorted(captures.by_length):
        programs = captures.by_length[length].programs
        if all(len(program.allocations) for program in programs):
            lengths.append(length)
    changes: list[dict[int, Changes]] = []
    for number in range(len(captures.captured.programs)):
        allocations: dict[int, np.ndarray] = {}
        for length in lengths:
            allocations[length] = captures.by_length[length].programs[number].allocations
        changes.append(comparable(allocations))
    return changes


def _lengths_that_ask_alike(changes: Sequence[dict[int, Changes]]) -> list[int]:
    """Find the captures that ask alike: tokens of a sample, ascending.

    Those are meant of which there are most, of equally many the longer ones.
    """
    alike: list[list[int]] = []
    for length in changes[0]:
        for lengths in alike:
            first_length = lengths[0]
            if all(own[length].asks_like(own[first_length]) for own in changes):
                lengths.append(length)
                break
        else:
            alike.append([length])
    most: list[int] = []
    for lengths in alike:
        if (len(lengths), lengths[-1:]) >= (len(most), most[-1:]):
            most = lengths
    return most


def _requests_of_classes(
    captures: LengthCaptures, lengths: Sequence[int], all_changes: Sequence[dict[int, Changes]]
) -> list[_Requests]:
    """Put the changes of memory of every program together, of captures that ask alike."""
    requests: list[_Requests] = []
    for number, base in enumerate(captures.captured.programs):
        changes = all_changes[number]
        num_bytes = np.array([changes[length].num_bytes for length in lengths])
        any_changes = changes[lengths[0]]
        microbatch = _microbatch_of_events(captures, base, any_changes)
        # such as weights: no length changes them
        is_constant = (num_bytes == num_bytes[0]).all(axis=0)
        microbatch[is_constant] = _CONSTANT
        requests.append(_Requests(base.rank, any_changes.storage, num_bytes, microbatch))
    return requests


def _microbatch_of_events(
    captures: LengthCaptures, program: Program, changes: Changes
) -> np.ndarray:
    """Find whose length the storage of each change follows: int64 [changes]."""
    microbatch_of_op = captures.microbatch_of_ops(program)
    last_op = len(program) - 1
    microbatch_of_storage: dict[int, int] = {}
    microbatches = np.empty(len(changes.storage), dtype=np.int64)
    rows = zip(changes.storage.tolist(), changes.before.tolist(), strict=True)
    for place, (storage, before) in enumerate(rows):
        # changes behind the last op come before none
        op = min(before, last_op)
        if storage not in microbatch_of_storage:
            microbatch = int(microbatch_of_op[op])
            if microbatch < 0:
                microbatch = _LONGEST
            microbatch_of_storage[storage] = microbatch
        microbatches[place] = microbatch_of_storage[storage]
    return microbatches
