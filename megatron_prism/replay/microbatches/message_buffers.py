"""When Python drops the tensors that stages exchange.

Megatron's schedules hold a received tensor, and what is sent, by several names: a local variable, a
slot of a buffer, a list of inputs, a request, the graph of a chunk's output.  Its storage is free
when the last of the names is, an output's when Megatron deallocates it.  No count of storages says
when that is, so it is taken from Megatron's own run without a model (``emulate.schedule``), in
which Python drops a token in place of each tensor.

In : the captured program, and where events of its schedule and of the wanted one are in programs.
Out: which captured storages are such tensors, and before which new op each new one is dropped.
Storages of one origin that the captured schedule does not explain to the op are left out; they
follow captured steps like any other storage.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_prism.core.programs.ops import CODE, DTYPE_NAMES, ITEM_SIZE
from megatron_prism.core.programs.program import Program

# notes of tokens that come, in a schedule's program
RECEIVED, OUTPUT, GRADIENT = "received", "output", "gradient"
FORWARD = "forward"  # of tokens that go: in a forward, which takes a new input
NEVER = -1
_SHAPE = DTYPE_NAMES.index("int64")  # of what messages say of tensors to come
_SITE = "p2p_communication.py"  # where Megatron makes tensors to receive into


@dataclass(frozen=True)
class Life:
    """When the token of a tensor comes and goes.

    event   : of its schedule
    dropped : the event before which Python drops it; NEVER
    cause   : FORWARD, or "" for what the scheduler drops itself
    """

    event: int
    dropped: int
    cause: str


class PlacedSchedule:
    """A schedule, and where its events are in a program of the same order.

    ops       : int64 [events + 1]: the op of each event; the program's end behind all
    step_ends : by the first event of a step the op behind the step
    lives     : of tensors by kind (RECEIVED, OUTPUT, GRADIENT), in the order of their events
    """

    def __init__(
        self,
        schedule: Program,
        event_bounds: Sequence[int],
        op_bounds: Sequence[int],
        steps: Sequence[int],
        messages: Mapping[int, int],
    ) -> None:
        """Place the events.

        Args:
            schedule: of Megatron's scheduler without a model.
            event_bounds: where each piece of the schedule begins, and the end.
            op_bounds: where each piece of the program begins, and the end.
            steps: the pieces that are steps.
            messages: the op by event, of sends, receives and the waits for them.
        """
        self.schedule = schedule
        self.ops = np.full(len(schedule) + 1, -1, dtype=np.int64)
        self.ops[-1] = op_bounds[-1]
        for event, op in messages.items():
            self.ops[event] = op
        self.step_ends: dict[int, int] = {}
        for piece in steps:
            first_event, end_op = event_bounds[piece], op_bounds[piece + 1]
            self.ops[first_event] = op_bounds[piece]
            self.ops[first_event + 1 : event_bounds[piece + 1]] = end_op
            self.step_ends[first_event] = end_op
        # what Python drops behind an event is gone before the op behind it
        self._behind = np.zeros(len(schedule) + 1, dtype=np.int64)
        for event in range(len(schedule)):
            end_op = int(self.ops[event])
            if event in messages or end_op < 0:
                end_op += 1
            elif event in self.step_ends:
                end_op = self.step_ends[event]
            self._behind[event + 1] = max(int(self._behind[event]), end_op)
        self.lives = _lives(schedule)

    def drop(self, life: Life) -> int:
        """Find the op before which a tensor is dropped, as far as the schedule says it; NEVER."""
        if life.dropped < 0:
            return NEVER
        # in a forward, or as the scheduler returns
        if self.way(life) is not None:
            return int(self.ops[life.dropped])
        return int(self._behind[life.dropped])

    def way(self, life: Life) -> Hashable:
        """Say how a tensor goes, if that leaves open before which op; None: it does not.

        A forward's model lets go of its last input some ops after its begin, and the scheduler
        returns some ops before the program's end.
        """
        if life.dropped == len(self.schedule):
            return "return"
        if life.cause == FORWARD:
            return FORWARD, int(self.schedule.ops["chunk"][life.dropped])
        return None


def _lives(schedule: Program) -> dict[str, list[Life]]:
    """Read the lives of a schedule's tokens."""
    drops: dict[int, tuple[int, str]] = {}
    events = schedule.allocations.tolist()
    for event, token, change, note in events:
        if change < 0:
            drops[token] = event, schedule.strings[note]
    lives: dict[str, list[Life]] = {RECEIVED: [], OUTPUT: [], GRADIENT: []}
    for event, token, change, note in events:
        if change > 0:
            dropped, cause = drops.get(token, (NEVER, ""))
            kind = schedule.strings[note]
            lives[kind].append(Life(event, dropped, cause))
    return lives


class MessageBuffers:
    """The captured storages that are messages' tensors, and what they show of their ends.

    kinds    : of every such storage RECEIVED, OUTPUT or GRADIENT, in the order of the schedule
    followed : those whose ends the schedule explains
    explains_received : whether it explains the end of every received tensor, and of what stages
        send as far as that is told from other storages
    """

    def __init__(
        self, program: Program, origins: Mapping[int, Hashable], captured: PlacedSchedule
    ) -> None:
        """Find them.

        Args:
            program: the captured one.
            origins: of every storage what it is told apart by.
            captured: the program's schedule.
        """
        self._changes: dict[int, list[tuple[int, int, int]]] = {}  # op, bytes, note
        for op, storage, size, note in program.allocations.tolist():
            self._changes.setdefault(storage, []).append((op, size, note))
        storages = {
            RECEIVED: self._received(program, captured),
            OUTPUT: self._made(program, captured, OUTPUT),
            GRADIENT: self._made(program, captured, GRADIENT),
        }
        self.kinds: dict[int, str] = {}
        self._offsets: dict[Hashable, int] = {}  # ops between the schedule's word and the end
        unexplained: set[Hashable] = set()
        has_received = True
        for kind, lives in captured.lives.items():
            # a tensor that is missing would shift all others
            if len(storages[kind]) != len(lives):
                if kind == RECEIVED:
                    has_received = False
                continue
            for storage, life in zip(storages[kind], lives, strict=True):
                self.kinds[storage] = kind
                if not self._explained(storage, life, captured):
                    unexplained.add(origins[storage])
        self.followed = {storage for storage in self.kinds if origins[storage] not in unexplained}
        self.explains_received = has_received and not unexplained

    def drops(self, kind: str, wanted: PlacedSchedule) -> list[int]:
        """Say before which op each tensor of a kind is dropped in another program; NEVER."""
        ends = []
        for life in wanted.lives[kind]:
            end = wanted.drop(life)
            if end != NEVER:
                way = wanted.way(life)
                end += self._offsets.get(way, 0)
            ends.append(end)
        return ends

    def _explained(self, storage: int, life: Life, captured: PlacedSchedule) -> bool:
        """Compare the end of a storage with the schedule's word; learn what that leaves open."""
        # a storage that shrinks or grows is no plain buffer
        if len(self._changes[storage]) > 2:
            return False
        end = self._end(storage)
        expected = captured.drop(life)
        if NEVER in (end, expected):
            return end == expected
        way = captured.way(life)
        if way is None:
            return end == expected
        offset = end - expected
        learned = self._offsets.setdefault(way, offset)
        return offset == learned

    def _end(self, storage: int) -> int:
        """Find the op before which a captured storage goes; NEVER."""
        changes = self._changes[storage]
        if len(changes) == 1:
            return NEVER
        op, _, _ = changes[-1]
        return op

    def _received(self, program: Program, captured: PlacedSchedule) -> list[int]:
        """Find the storage of every received tensor, or none at all.

        From the last to the first: those that stand before the iteration are the first ones.
        """
        births: list[tuple[int, int, int]] = []
        for storage, changes in self._changes.items():
            op, size, note = changes[0]
            if _SITE in program.strings[note]:
                births.append((op, size, storage))
        found: list[int] = []
        for life in reversed(captured.lives[RECEIVED]):
            op = int(captured.ops[life.event])
            row = program.ops[op]
            item_size = ITEM_SIZE[row["dtype"]]
            tensor_bytes = int(row["num_out"] * item_size)
            # the last storage of that size which is there as the message is asked for
            while births:
                birth, size, storage = births.pop()
                if birth <= op and size == tensor_bytes:
                    found.append(storage)
                    break
            else:
                return []
        found.reverse()
        return found

    def _made(self, program: Program, captured: PlacedSchedule, kind: str) -> list[int]:
        """Find the tensor that every forward or backward makes for another stage, or none at all.

        It has a message's size and outlives its step.  Of a backward there is one such storage; of
        a forward, which saves others for its backward, the one that goes when an output does.
        """
        ops = program.ops
        sends = ops[ops["name"] == CODE["send"]]
        tensors = sends[sends["dtype"] != _SHAPE]
        item_sizes = ITEM_SIZE[tensors["dtype"]]
        tensor_bytes = tensors["num_in"] * item_sizes
        sizes = set(tensor_bytes.tolist())
        # storages of a message's size, in the order in which they are made
        births: list[tuple[int, int]] = []
        for storage, changes in self._changes.items():
            op, size, _ = changes[0]
            if size in sizes:
                births.append((op, storage))
        births.sort()
        ops_of_births = np.array([op for op, _ in births], dtype=np.int64)
        storages: list[int] = []
        for life in captured.lives[kind]:
            if life.event not in captured.step_ends:
                return []
            begin = int(captured.ops[life.event])
            step_end = captured.step_ends[life.event]
            first, behind = np.searchsorted(ops_of_births, (begin, step_end)).tolist()
            outliving = []
            for _, storage in births[first:behind]:
                end = self._end(storage)
                # saved for backward: it does not go when the output does
                if kind == OUTPUT and end != captured.drop(life):
                    continue
                if end == NEVER or end >= step_end:
                    outliving.append(storage)
            # none or several: nobody knows which is the message
            if len(outliving) != 1:
                return []
            storages += outliving
        return storages
