"""A captured program, cut, and which of its steps have bodies of their own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from megatron_prism.core.errors import ProgramError
from megatron_prism.core.programs.program import Program
from megatron_prism.core.world import World
from megatron_prism.replay.microbatches.choice import kind_in_words
from megatron_prism.replay.microbatches.cut import BACKWARD, Cut, Kind, Member

_RELATIVE = ("microbatch", "handle", "batch", "note")  # of a place, not of a kind
_TIMES = ("ns", "host", "lead", "products")
_SIZES = ("num_in", "num_out", "splits", "flops", "traffic", "kernels", "shape")


class CapturedCut(Cut):
    """A captured program, cut like its schedule, whose bodies can be compared."""

    def __init__(
        self, program: Program, world: World, count: int, order: Cut, deferred: int
    ) -> None:
        """Cut a captured program.

        Args:
            program: The program of one rank.
            world: Its world.
            count: Microbatches of an iteration.
            order: The same order as the scheduler has it.
            deferred: How many first microbatches leave a gradient to the end of the iteration.
        """
        super().__init__(program, world, order)
        self.count, self.order, self.deferred = count, order, deferred

    @cached_property
    def _numbers(self) -> np.ndarray:
        """int64 [n]: the same for ops that are equal but for their times."""
        return self._number_equal_ops(_TIMES)

    @cached_property
    def _numbers_without_sizes(self) -> np.ndarray:
        """int64 [n]: the same for ops that are equal but for their times and sizes."""
        return self._number_equal_ops((*_TIMES, *_SIZES))

    def _number_equal_ops(self, ignored: Sequence[str]) -> np.ndarray:
        """Number the ops; those that are equal but for some columns have one number."""
        plain = self.program.ops.copy()
        for name in (*_RELATIVE, *ignored):
            plain[name] = 0
        number_of_row: dict[bytes, int] = {}
        data, row_size = plain.tobytes(), plain.itemsize
        numbers: list[int] = []
        for start in range(0, len(data), row_size):
            row = data[start : start + row_size]
            numbers.append(number_of_row.setdefault(row, len(number_of_row)))
        return np.array(numbers, dtype=np.int64)

    def body(self, piece: int) -> bytes:
        """Give what is the same for pieces with the same ops."""
        start, end = self.bounds[piece], self.bounds[piece + 1]
        return self._numbers[start:end].tobytes()

    def body_without_sizes(self, piece: int) -> bytes:
        """Give what is the same for pieces with the same ops of any size."""
        start, end = self.bounds[piece], self.bounds[piece + 1]
        return self._numbers_without_sizes[start:end].tobytes()

    @cached_property
    def edges(self) -> dict[Kind, tuple[int, int]]:
        """Of steps of one forward or backward how many first and last have bodies of their own.

        The others are the longest run of equal bodies.

        Raises:
            ProgramError: No two steps that follow each other are equal.
        """
        # shape of a step -> microbatch -> piece
        pieces_of_shape = defaultdict[tuple[Member, ...], dict[int, int]](dict)
        for step, members in enumerate(self.members):
            if len(members) == 1:
                (microbatch,) = members.values()
                pieces_of_shape[self.shapes[step]][microbatch] = self.steps[step]

        edges: dict[Kind, tuple[int, int]] = {}
        for shape, pieces in pieces_of_shape.items():
            # none of the backwards that leave a gradient to the end repeats
            first = 0
            phase, _ = shape[0]
            if phase == BACKWARD:
                first = self.deferred
            microbatches = [number for number in sorted(pieces) if number >= first]
            repeating = [pieces[number] for number in microbatches]
            start, end = self._find_run(shape, repeating, first)
            if end - start > 1:
                edges[shape] = first + start, len(microbatches) - end
        return edges

    def _find_run(
        self, shape: tuple[Member, ...], pieces: Sequence[int], first: int
    ) -> tuple[int, int]:
        """Find the longest run of equal bodies.

        Args:
            shape: Phase and chunk of the steps.
            pieces: The steps, by microbatch.
            first: How many microbatches before them never repeat.
        """
        # two steps may differ, the first of them and the last
        may_differ = len(pieces) < 3 and not first
        start, end = _longest_run([self.body(piece) for piece in pieces])
        if end - start > 1 or may_differ:
            return start, end

        # tokens of experts differ from microbatch to microbatch
        start, end = _longest_run([self.body_without_sizes(piece) for piece in pieces])
        if end - start > 1:
            return start, end
        raise ProgramError(
            f"rank {self.program.rank}: every {kind_in_words(shape, True)} has other ops, so "
            "there is none that more microbatches would repeat",
            fix="capture the job with that many",
        )


def _longest_run(bodies: Sequence[bytes]) -> tuple[int, int]:
    """Find [start, end) of the longest run of equal entries, the last of several."""
    best_start, best_end, start = 0, 0, 0
    for end in range(1, len(bodies) + 1):
        if end < len(bodies) and bodies[end] == bodies[start]:
            continue
        if end - start >= best_end - best_start:
            best_start, best_end = start, end
        start = end
    return best_start, best_end
