"""The captured pieces of one rank in the order of the wanted schedule."""

from __future__ import annotations

from collections import Counter
from functools import cached_property

import numpy as np

from megatron_prism.core.programs.ops import CODE
from megatron_prism.replay.microbatches.captured import CapturedCut
from megatron_prism.replay.microbatches.choice import Choice
from megatron_prism.replay.microbatches.cut import Cut, Kind, Member, phases_of_steps


class Arrangement:
    """The captured pieces of one rank in the order of the wanted schedule.

    Attributes:
        captured: The captured program.
        wanted: The wanted schedule.
        chosen: Of every new piece the captured one.
        base: int64 [pieces + 1], where every new piece begins.
        source: int64 [new ops], the captured op.
        piece: int64 [new ops], the new piece that each is in.
        scheduled: int64 [new ops], the op of the wanted schedule that a message stands for;
            -1: none.
    """

    def __init__(self, captured: CapturedCut, wanted: Cut) -> None:
        """Choose the captured pieces and join them.

        Raises:
            MissingKindError: No captured piece can stand for a wanted one.
        """
        self.captured, self.wanted = captured, wanted
        choice = Choice(captured.order, captured.count, wanted, captured.edges)
        self.chosen = choice.pieces()
        starts = captured.bounds[self.chosen]
        ends = captured.bounds[np.array(self.chosen, dtype=np.int64) + 1]
        lengths = ends - starts
        self.base = np.concatenate(([0], np.cumsum(lengths)))
        self.piece = np.repeat(np.arange(len(lengths)), lengths)
        moved = np.repeat(self.base[:-1] - starts, lengths)
        self.source = np.arange(len(self.piece)) - moved

        self.scheduled = np.full(len(self.source), -1, dtype=np.int64)
        for piece, chosen in enumerate(self.chosen):
            offset = int(self.base[piece] - captured.bounds[chosen])
            messages = zip(captured.messages[chosen], wanted.messages[piece], strict=True)
            for captured_op, wanted_op in messages:
                self.scheduled[captured_op + offset] = wanted_op

    def ops(self) -> np.ndarray:
        """Give the new ops: the captured ones with labels, handles and batches of their places."""
        ops: np.ndarray = self.captured.program.ops[self.source]
        self._label(ops)
        ops["handle"] = self._handles(ops)
        ops["batch"] = self._batches(ops["batch"])
        return ops

    def _label(self, ops: np.ndarray) -> None:
        """Give new ops the microbatches of the wanted schedule.

        Messages of a program without a model have labels, too, which the scheduler gives anew.
        """
        captured, wanted = self.captured, self.wanted
        phases = phases_of_steps(ops)
        is_message = captured.is_pipeline[self.source]
        for op in np.flatnonzero(ops["microbatch"] >= 0).tolist():
            piece = int(self.piece[op])
            member = int(phases[op]), int(ops["chunk"][op])
            step, _ = wanted.places[piece]
            is_label_of_message = bool(is_message[op])

            # a message in a step may have the step's own label
            if wanted.is_step(piece):
                captured_step, _ = captured.places[self.chosen[piece]]
                step_label = captured.members[captured_step].get(member)
                is_label_of_message &= int(ops["microbatch"][op]) != step_label
            if is_label_of_message:
                event = self.scheduled[op]
                row = wanted.program.ops[event]
                ops["chunk"][op] = row["chunk"]
                ops["microbatch"][op] = row["microbatch"]
                continue

            # between steps what a forward beside a backward reads ahead of a wait
            label = self._label_around(step, member)
            ops["microbatch"][op] = label

    def _label_around(self, step: int, member: Member) -> int:
        """Give the microbatch that a step, else the one before it, has of a member; else -1."""
        members = self.wanted.members
        for neighbour in (step, step - 1):
            if not 0 <= neighbour < len(members):
                continue
            if member in members[neighbour]:
                return members[neighbour][member]
        return -1

    def _handles(self, ops: np.ndarray) -> np.ndarray:
        """Give every new op the new place of the op that made its handle; -1: none."""
        captured, wanted = self.captured, self.wanted
        handles = np.full(len(ops), -1, dtype=np.int64)
        issuers = captured.issuers[self.source]
        issuer_pieces = captured.piece_of(issuers)
        is_wait = ops["name"] == CODE["wait"]
        is_message = captured.is_pipeline[issuers] & is_wait
        scheduled_ops = self.scheduled.tolist()
        op_of_event = {event: op for op, event in enumerate(scheduled_ops)}

        # what came last until the piece of each op
        last_use: dict[int, int] = {}  # captured piece -> the last new piece of it until now
        last_twin: dict[Kind, int] = {}  # body -> the last new piece with it until now
        passed_pieces = 0
        for op in np.flatnonzero(issuers >= 0).tolist():
            piece = int(self.piece[op])
            while passed_pieces <= piece:
                chosen = self.chosen[passed_pieces]
                last_use[chosen] = passed_pieces
                last_twin[self._twins[chosen]] = passed_pieces
                passed_pieces += 1

            # messages: the schedule says which one is waited for
            if is_message[op]:
                event = int(self.scheduled[op])
                handles[op] = op_of_event[int(wanted.issuers[event])]
                continue

            issuer_piece = int(issuer_pieces[op])
            new_piece = self._piece_as_far_back(piece, issuer_piece)
            if new_piece is None:
                twin = self._twins[issuer_piece]
                new_piece = last_use.get(issuer_piece, last_twin.get(twin, -1))
            if new_piece >= 0:
                offset = issuers[op] - captured.bounds[issuer_piece]
                handles[op] = self.base[new_piece] + offset
        return handles

    def _piece_as_far_back(self, piece: int, issuer_piece: int) -> int | None:
        """Find the new piece that is as far back as the captured one that made a handle.

        Args:
            piece: The new piece with the op that has the handle.
            issuer_piece: The captured piece in which the handle was made.

        Returns:
            The new piece; None if the one there has other ops, or if both captured pieces are used
            once, as at the begin and the end of an iteration: then their distance grows.
        """
        chosen = self.chosen[piece]
        # within one piece
        if issuer_piece == chosen:
            return piece
        # two single pieces
        if self._uses[chosen] == 1 and self._uses[issuer_piece] == 1:
            return None

        # as far back as it was captured, if the same ops are there
        candidate = piece - (chosen - issuer_piece)
        if candidate < 0:
            return None
        chosen_there = self.chosen[candidate]
        if self._twins[chosen_there] != self._twins[issuer_piece]:
            return None
        return candidate

    @cached_property
    def _uses(self) -> Counter[int]:
        """How many new pieces stand for each captured one."""
        return Counter(self.chosen)

    @cached_property
    def _twins(self) -> list[Kind]:
        """Of every captured piece what is the same for pieces with the same ops of any size."""
        captured = self.captured
        twins: list[Kind] = []
        for piece in range(len(captured)):
            shape, body = captured.shape(piece), captured.body_without_sizes(piece)
            twins.append((shape, body))
        return twins

    def _batches(self, batches: np.ndarray) -> np.ndarray:
        """Number the batches as they come, from 0.

        Messages have the batches of the wanted schedule; no other batch goes beyond its piece.
        """
        scheduled_batches = self.wanted.program.ops["batch"][self.scheduled]
        is_message = self.captured.is_pipeline[self.source]
        places = np.where(is_message, -1, self.piece).tolist()
        old_numbers = np.where(is_message, scheduled_batches, batches).tolist()
        new_numbers = np.full(len(batches), -1, dtype=np.int64)
        number_of_key: dict[tuple[int, int], int] = {}
        for op in np.flatnonzero(batches >= 0).tolist():
            key = places[op], old_numbers[op]
            new_numbers[op] = number_of_key.setdefault(key, len(number_of_key))
        return new_numbers
