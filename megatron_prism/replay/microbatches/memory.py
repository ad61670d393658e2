"""Changes of memory of captured pieces in the order of the wanted schedule.

Every piece makes storages of its own.  Tensors of messages go when Megatron's scheduler drops them
(``message_buffers``).  What else is freed in another piece than it came to be in is the oldest that
came to be in such a step, with what it says of itself, of that size: microbatches go through a
chunk in order.  What the end of the iteration frees of every microbatch, it frees of all of them.
Of others there are never more at once than were captured, but for storages of more microbatches in
flight.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np

from megatron_prism.core.programs.ops import CODE, IS_CALL
from megatron_prism.replay.microbatches.arrangement import Arrangement
from megatron_prism.replay.microbatches.cut import Cut, Kind, Member
from megatron_prism.replay.microbatches.message_buffers import MessageBuffers, PlacedSchedule
from megatron_prism.replay.microbatches.storages import MemoryChanges, NewStorages

# what the scheduler asks for between steps
_ASKED_FOR = CODE["grad_sync"], CODE["param_sync"]
_WAITS = CODE["wait"], CODE["host_wait"]


@dataclass(frozen=True)
class _MessageTensors:
    """Captured storages of messages whose ends Megatron's schedule explains.

    Attributes:
        storages: Their numbers.
        drops: (new piece, captured storage that comes in it) -> new op before which it is dropped.
    """

    storages: set[int]
    drops: dict[tuple[int, int], int]


class ArrangedMemory:
    """The changes of memory of arranged pieces."""

    def __init__(self, arrangement: Arrangement) -> None:
        """Take what is arranged.

        Args:
            arrangement: The captured pieces in their new order.
        """
        self._arrangement = arrangement
        self._captured = arrangement.captured
        self._old = arrangement.captured.program.allocations
        self._pieces_of_changes = self._captured.piece_of(self._old["before"])

    def changes(self) -> MemoryChanges:
        """Make the changes of memory of the new program."""
        captured, old = self._captured, self._old
        base = self._arrangement.base
        births, origins = self._births, self._origins
        messages = self._find_message_tensors()
        others = {name: kind for name, kind in origins.items() if name not in messages.storages}
        limits, staying = self._limits(others)
        new = NewStorages(old, messages.storages, origins)

        # the changes of every captured piece, in the order of the new pieces
        first_changes = np.searchsorted(old["before"], captured.bounds[:-1])
        change_bounds = [*first_changes.tolist(), len(old)]
        for piece, chosen in enumerate(self._arrangement.chosen):
            # captured storage -> the new one that this piece changes
            own_storages: dict[int, int] = {}
            offset = int(base[piece] - captured.bounds[chosen])
            first_change, end_change = change_bounds[chosen : chosen + 2]
            for change in range(first_change, end_change):
                captured_before, storage, size, _ = new.captured[change]
                before = captured_before + offset
                origin = origins[storage]
                is_birth = births[storage] == change
                new.drop_messages(before, change)

                # a message's tensor goes when the scheduler drops it, wherever its twin went
                if storage in messages.storages:
                    if is_birth:
                        end = messages.drops[piece, storage]
                        new.receive(origin, before, change, end)
                    else:
                        new.drop_message_with(origin, before, change)
                    continue

                # a storage of another piece is the oldest of its origin
                waiting = new.waiting[origin]
                if is_birth:
                    own_storages[storage] = new.begin(origin)
                elif storage not in own_storages:
                    if not waiting:
                        continue
                    own_storages[storage] = waiting[0]
                number = own_storages[storage]

                # it went early
                if size < 0 and new.live[number] <= 0:
                    continue
                new.change(origin, number, size, before, change)
                if staying[origin]:
                    continue

                # with the last of its kind the others go
                last_free = self._last_frees.get(origin)
                if last_free == change:
                    for surplus in [*waiting]:
                        new.drop(origin, surplus, before, change)
                # there were never more of them
                elif last_free is None and len(waiting) > limits[origin]:
                    oldest = waiting[0]
                    new.drop(origin, oldest, before, change)
        self._drop_surplus(new, staying)
        return new.changes()

    def _drop_surplus(self, new: NewStorages, staying: Mapping[Kind, int]) -> None:
        """Keep as many storages behind the iteration as the captured one keeps."""
        end = len(self._arrangement.source)
        new.drop_messages(end + 1, len(self._old) - 1)
        last_birth: dict[Kind, int] = {}
        for storage, birth in self._births.items():
            origin = self._origins[storage]
            last_birth[origin] = birth
        for origin, waiting in new.waiting.items():
            surplus = max(0, len(waiting) - staying[origin])
            for number in [*waiting][:surplus]:
                new.drop(origin, number, end, last_birth[origin])

    @cached_property
    def _births(self) -> dict[int, int]:
        """Of every captured storage the change that made it."""
        births: dict[int, int] = {}
        for change, storage in enumerate(self._old["storage"].tolist()):
            births.setdefault(storage, change)
        return births

    @cached_property
    def _origins(self) -> dict[int, Kind]:
        """Of every captured storage what it is told apart by.

        That is the phases and chunks of the step in which it came to be, what it says of itself,
        and its size.
        """
        origins: dict[int, Kind] = {}
        for storage, birth in self._births.items():
            row = self._old[birth]
            # storages that are made between steps have no step
            piece = int(self._pieces_of_changes[birth])
            step: Kind = ()
            if self._captured.is_step(piece):
                step = self._captured.shape(piece)
            note, size = int(row["note"]), int(row["bytes"])
            origins[storage] = step, note, size
        return origins

    @cached_property
    def _last_frees(self) -> dict[Kind, int]:
        """Of every origin that the end of the iteration frees the last such change."""
        last_step = max(self._captured.steps, default=-1)
        is_behind = self._pieces_of_changes > last_step
        is_free = self._old["bytes"] < 0
        frees_behind = np.flatnonzero(is_behind & is_free)
        last_frees: dict[Kind, int] = {}
        for change in frees_behind.tolist():
            storage = int(self._old["storage"][change])
            last_frees[self._origins[storage]] = change
        return last_frees

    @property
    def follows_messages(self) -> bool:
        """Whether Megatron's schedule explains the end of every captured tensor of a message."""
        # the memory of this stage is that of a captured stage like it
        if not len(self._old):
            return True
        return self._buffers.explains_received

    @cached_property
    def _buffers(self) -> MessageBuffers:
        """The captured tensors of messages."""
        captured = self._captured
        order = captured.order
        captured_events = self._place(order, range(len(order)), captured.bounds)
        return MessageBuffers(captured.program, self._origins, captured_events)

    def _find_message_tensors(self) -> _MessageTensors:
        """Find the tensors of messages that Megatron's schedule explains."""
        arrangement = self._arrangement
        buffers = self._buffers
        # none is explained
        if not buffers.followed:
            return _MessageTensors(set(), {})
        wanted = self._place(arrangement.wanted, arrangement.chosen, arrangement.base)

        # the n-th tensor of a kind is that of the n-th event of the wanted schedule
        tensors_of_piece = self._tensors_of_pieces(buffers.kinds)
        tensors: dict[str, list[tuple[int, int]]] = {kind: [] for kind in wanted.lives}
        for piece, chosen in enumerate(arrangement.chosen):
            for storage in tensors_of_piece.get(chosen, ()):
                kind = buffers.kinds[storage]
                tensors[kind].append((piece, storage))

        # kinds of which every tensor has its event
        messages = _MessageTensors(set(), {})
        for kind, places in tensors.items():
            ends = buffers.drops(kind, wanted)
            # a piece that stands for another one has not the same tensors
            if len(ends) != len(places):
                continue
            followed = [name for name in buffers.followed if buffers.kinds[name] == kind]
            messages.storages.update(followed)
            for place, end in zip(places, ends, strict=True):
                _, storage = place
                if storage in buffers.followed:
                    messages.drops[place] = end
        return messages

    def _tensors_of_pieces(self, storages: Iterable[int]) -> dict[int, list[int]]:
        """Sort tensors of messages by the captured piece in which they come, in their order."""
        births = self._births
        in_order = sorted(storages, key=births.__getitem__)
        changes = [births[storage] for storage in in_order]
        pieces = self._pieces_of_changes[changes].tolist()
        tensors = defaultdict[int, list[int]](list)
        for storage, piece in zip(in_order, pieces, strict=True):
            tensors[piece].append(storage)
        return tensors

    def _place(self, schedule: Cut, pieces: Sequence[int], bounds: np.ndarray) -> PlacedSchedule:
        """Place the events of a schedule in the program that is made of captured pieces.

        Args:
            schedule: The schedule, cut.
            pieces: The captured piece of each piece of the schedule.
            bounds: Where they begin in the program, and its end.
        """
        captured = self._captured
        names, captured_names = schedule.program.ops["name"], captured.program.ops["name"]
        op_of_event: dict[int, int] = {}
        for piece, captured_piece in enumerate(pieces):
            offset = int(bounds[piece] - captured.bounds[captured_piece])
            events = schedule.messages[piece]
            ops = captured.messages[captured_piece]
            for event, op in zip(events, ops, strict=True):
                op_of_event[event] = op + offset

            # steps have waits of their own, which the scheduler does not know
            if schedule.is_step(piece):
                continue
            events = schedule.syncs[piece]
            ops = captured.syncs[captured_piece]
            if np.array_equal(names[events], captured_names[ops]):
                for event, op in zip(events, ops, strict=True):
                    op_of_event[event] = op + offset
                continue

            # what the scheduler asks for, of gradients or parameters, are calls of the program
            last_call = self._last_call_asked_for(captured_piece)
            if last_call is not None:
                for event in events:
                    if names[event] in _ASKED_FOR:
                        op_of_event[event] = last_call + offset
        event_bounds, op_bounds = schedule.bounds.tolist(), bounds.tolist()
        return PlacedSchedule(
            schedule.program, event_bounds, op_bounds, schedule.steps, op_of_event
        )

    def _last_call_asked_for(self, piece: int) -> int | None:
        """Find the last of the collectives that the scheduler asks for between two steps.

        Python returns to the scheduler behind them, and drops no tensor of its own earlier.  The
        scheduler asks for collectives only where they overlap with steps, so it never waits for
        them at once.  Where they do not, the end of the iteration calls them when the scheduler has
        returned (``finalize_model_grads``).

        Args:
            piece: A captured piece.

        Returns:
            The op; None if the piece begins with no such collective.
        """
        captured = self._captured
        start, end = captured.bounds[piece : piece + 2].tolist()
        names = captured.program.ops["name"]
        handles = captured.program.ops["handle"]
        last_call = None
        for op in range(start, end):
            # a message of the scheduler, or the end of an iteration, which waits for the calls
            if captured.is_pipeline[op] or names[op] in _WAITS:
                break
            is_overlapped = handles[op] >= 0
            if IS_CALL[names[op]] and is_overlapped:
                last_call = op
        return last_call

    def _limits(self, origins: Mapping[int, Kind]) -> tuple[Counter[Kind], Counter[Kind]]:
        """Count how many storages of each origin there may be at once, and how many stay.

        What microbatches have of other sizes (tokens of experts) is counted together.  Where all
        storages of an origin stayed, any number stays.

        Args:
            origins: The origin of every storage to count.
        """
        alive, limits = _count_alive(self._old, origins)

        # microbatches in flight beyond those of the captured schedule, by chunk
        in_flight = self._arrangement.wanted.most_alive
        captured_in_flight = self._captured.most_alive
        additional: dict[int | None, int] = {}
        for chunk, count in in_flight.items():
            difference = count - captured_in_flight[chunk]
            additional[chunk] = max(0, difference)

        for origin, births in Counter(origins.values()).items():
            step = cast("tuple[Member, ...]", origin[0])
            # made between steps, whatever the chunk
            if not step:
                limits[origin] += additional.get(None, 0)
            else:
                any_size = origin[:2]
                in_addition = max(additional[chunk] for _, chunk in step)
                limits[origin] = limits[any_size] + in_addition
            # none of them went
            if alive[origin] == births:
                alive[origin] = len(self._arrangement.source)
        return limits, alive


def _count_alive(
    old: np.ndarray, origins: Mapping[int, Kind]
) -> tuple[Counter[Kind], Counter[Kind]]:
    """Count the storages of each origin at the end and at most.

    Args:
        old: The captured changes.
        origins: The origin of every storage to count.

    Returns:
        Counts by origin, and by origin without size.
    """
    bytes_left = Counter[int]()
    alive = Counter[Kind]()
    peaks = Counter[Kind]()
    changes = zip(old["storage"].tolist(), old["bytes"].tolist(), strict=True)
    for storage, size in changes:
        if storage not in origins:
            continue
        was_alive = bytes_left[storage] > 0
        bytes_left[storage] += size
        is_alive = bytes_left[storage] > 0

        # it comes, goes, or stays
        change = is_alive - was_alive
        origin = origins[storage]
        for key in (origin, origin[:2]):
            alive[key] += change
            peaks[key] = max(peaks[key], alive[key])
    return alive, peaks
