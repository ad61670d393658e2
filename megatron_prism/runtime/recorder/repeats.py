"""Forwards and backwards that repeat an earlier one, written down again instead of run again.

On tier meta an iteration of many microbatches does the same many times.  Of every model chunk the
first, the second and the last microbatch run; those between are what the second was, with other
microbatch numbers, handles and storages: ops, allocations and the history of requests come out as
if they had run (``tests/emulate/test_repeats.py`` compares them byte for byte).  Of a second
iteration that is recorded behind the first, so is the second microbatch.  What a schedule gets from
a step (its output, what it reports, the gradient of its input) are tensors of their own, whose life
it decides.

A step that does anything beyond itself (waits for an earlier call, leaves one open, frees what
another step made) is not repeated; ``NotRepeatedError`` where that turns out too late.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from megatron_prism.core.programs.ops import CODE, OP, WAITED
from megatron_prism.core.programs.program import RepeatedEvents
from megatron_prism.runtime.devices import cuda_graphs
from megatron_prism.runtime.devices.live_bytes import Outline
from megatron_prism.runtime.devices.moe_dispatch import loads
from megatron_prism.runtime.recorder.held_tensors import (
    Held,
    StandIn,
    StepMoment,
    Watch,
    find,
    look_alike,
)
from megatron_prism.runtime.virtual_world import TrafficCounter, current

if TYPE_CHECKING:
    from megatron_prism.core.programs.program import Builder, Program
    from megatron_prism.runtime.devices.live_bytes import LiveBytes
    from megatron_prism.runtime.recorder.recorder import Part, Position, Recorder

_COLUMNS = list(OP.names or ())
_NAME, _MICROBATCH = _COLUMNS.index("name"), _COLUMNS.index("microbatch")
_HANDLE, _BATCH = _COLUMNS.index("handle"), _COLUMNS.index("batch")
_WAIT = CODE["wait"]
# attributes of a tensor that was made for a model to hold: what is known of it, what it keeps alive
_KEPT, _KEEPS = "_prism_kept", "_prism_keeps"
Key = tuple[int | None, int]  # chunk, microbatch
Places = frozenset[tuple[int, Hashable]]  # of a model that hold one storage
Turns = dict[int, int]  # layer of a dispatcher -> how many of its calls lie between two steps


@dataclass(frozen=True)
class _Mark:
    """How much there was of everything at one moment."""

    recorded: Position
    history: int
    launches: int
    storages: int
    replays: int  # of CUDA graphs, whose results are not the step's own
    calls: TrafficCounter  # to others
    turns: Counter[tuple[int, bool]]  # of dispatchers of tokens


@dataclass(frozen=True)
class _Replaced:
    """A storage that the model held and that a step replaces by one of its own.

    Attributes:
        held: The new one.
        offset: Its number behind the first storage that the step makes.
        end: When the step lets the old one go, counted without rows of such ends.
        note: Whose the new one is.
        has_graph: Whether the graph behind the new one keeps the inputs of its step alive.
    """

    held: Held
    offset: int
    end: StepMoment
    note: str
    has_graph: bool


@dataclass(frozen=True)
class _Released:
    """A storage of the forward that its model holds, and that the graph lets go in the backward.

    Attributes:
        replaced: By which it is held.
        end: When the graph lets it go.
    """

    replaced: _Replaced
    end: StepMoment


@dataclass(frozen=True)
class _Free:
    """A storage that goes in a step that is written down again."""

    number: int
    num_bytes: int
    end: StepMoment


@dataclass
class _Kept:
    """What is known of a tensor that was made for a model to hold.

    Attributes:
        number: Of its storage.
        key: The step that it belongs to.
        in_graph: Whether a graph holds it, too, so that it does not count; None: not known.
    """

    number: int
    key: Key
    in_graph: bool | None


@dataclass(frozen=True)
class _Step:
    """What one forward or backward did.

    begin, end : marks around it
    part    : what the recorder wrote; empty while nothing is recorded
    history : int64 [n, 4]
    given   : numbers of the storages that it was given
    result  : what it returned, with an ``Outline`` for each tensor
    reports : what it stored for the job's log, likewise
    left    : what was in the lists that it was given, when it had ended, likewise
    replaced : what it puts in the place of what the model held; their ends are not in ``part`` and
               ``history``
    released : what its graph lets go that the model may still hold, likewise
    """

    begin: _Mark
    end: _Mark
    part: Part
    history: np.ndarray
    given: tuple[int, ...]
    result: StepValue
    reports: StepValue
    left: StepValue
    replaced: tuple[_Replaced, ...] = ()
    released: tuple[_Released, ...] = ()

    @property
    def born(self) -> tuple[int, int]:
        """First and behind the last number of the storages that it made."""
        return self.begin.storages, self.end.storages

    def is_closed(self) -> bool:
        """Whether every handle that it uses is its own, and none stays open."""
        first = self.begin.recorded[0]
        opened: set[int] = set()
        waited: set[int] = set()
        for place, row in enumerate(self.part[0], first):
            handle = row[_HANDLE]
            if handle < 0:
                continue
            if row[_NAME] == _WAIT:
                waited.add(handle)
            else:
                opened.add(handle)
            # of another step
            if handle < first or handle > place:
                return False
        return opened == waited


def _section(step: Callable[..., StepValue]) -> Callable[..., StepValue]:
    """A method of Repeats for (chunk, microbatch), which is a section of its schedule too."""

    def call(self: Repeats, key: Key, *args: StepValue) -> StepValue:
        run = partial(step, self, key, *args)
        return self.sections.call(step.__name__, key[0], run, is_whole=True)

    return call


class Repeats:
    """Runs the steps of one schedule after the other, or writes them down again.

    live     : the live-byte tracker of tier meta
    recorder : who records
    """

    def __init__(self, live: LiveBytes, recorder: Recorder) -> None:
        self._live, self._recorder = live, recorder
        self.sections = Sections(recorder)
        self._forwards: dict[int | None, _Step] = {}
        self._backwards: dict[int | None, _Step] = {}
        self._models: dict[int | None, torch.nn.Module] = {}  # chunk -> its model
        # whether a graph holds what a model holds: chunk and places -> that; not there: not known
        self._in_graph: dict[tuple[int | None, Places], bool] = {}
        self._recorded = False  # those
        self.repeated: list[RepeatedEvents] = []  # since steps were last forgotten
        self.reset(0)

    def reset(self, microbatches: int) -> None:
        """A schedule of so many microbatches begins."""
        self._last = microbatches - 1
        self._first_storage = self._live.count
        self.sections.reset()
        # what ran without being recorded has no ops to write down again
        if not self._recorded:
            self._forwards.clear()
            self._backwards.clear()
            self._in_graph.clear()
        self._recorded = self._recorder.active
        # forward -> (number of the first storage it would make, its layers' turns behind the run)
        self._written: dict[Key, tuple[int, Turns]] = {}
        self._gone_back: set[Key] = set()  # whose backward has been

    def forget(self) -> None:
        """No step that follows is like one before it."""
        self._recorded = False
        self.repeated = []

    @_section
    def forward(
        self,
        key: Key,
        run: Callable[[], StepValue],
        inputs: StepValue,
        stored: list[StepValue],
        model: torch.nn.Module,
        give: Callable[[list[StepValue]], object],
    ) -> StepValue:
        """Return the result of ``run()``, the forward of ``key``.

        Args:
            key: Chunk and microbatch.
            run: Makes the forward.
            inputs: What it is given.
            stored: Where it leaves what the job reports.
            model: The chunk.
            give: Hands ``inputs`` to the model, as the forward does.
        """
        chunk, number = key
        self._models[chunk] = model
        pattern = self._forwards.get(chunk)

        # as the second microbatch, unless it is the first or the last
        if pattern is not None and 0 < number < self._last:
            # the model keeps its input, as if it had run
            give(inputs if isinstance(inputs, list) else [inputs])
            own = self._live.reserve(pattern.born[1] - pattern.born[0])
            turns = loads.turns_since(pattern.begin.turns, pattern.end.turns)
            self._written[key] = own, turns
            moved = _Moved(pattern.given, self._numbers(inputs), {pattern.born: own})
            # the graph behind them stays as long as what the model holds
            tensors = _tensors(inputs)
            frees = [*self._replace(key, pattern, own, tensors, is_forward=True)]
            self._write(pattern, number, moved, turns, frees)
            stored += self._alike(pattern.reports, moved)
            return self._alike(pattern.result, moved, _tensors(inputs))

        # the others run
        if number != 1 or number >= self._last:
            return run()
        before, input_storages = len(stored), self._numbers(inputs)
        begin, watch = self._mark(), self._watch(model)
        result = run()
        # what it leaves: its result, and what it has reported
        left = (result, stored[before:], ())
        step = self._lone_step(begin, input_storages, left, watch.finish(), model)
        if step is not None:
            self._forwards[chunk] = step
        return result

    @_section
    def backward(
        self, key: Key, run: Callable[[], StepValue], inputs: StepValue, forward_outputs: StepValue
    ) -> StepValue:
        """Return the result of ``run()``, the backward of ``key``.

        Args:
            key: Chunk and microbatch.
            run: Makes the backward.
            inputs: Of the forward.
            forward_outputs: Outputs of the forward and their gradients.
        """
        chunk, number = key
        # its forward was written down again, so no graph is there; or it is the first that may
        # repeat itself
        if key in self._written:
            result = self._write_backward(key, inputs, forward_outputs)
        elif number == 1 and chunk in self._forwards:
            forward, model = self._forwards[chunk], self._models[chunk]
            input_storages = self._numbers(inputs, forward_outputs)
            begin, watch = self._mark(), self._watch(model)
            result = run()
            left = (result, (), forward_outputs)
            step = self._lone_step(
                begin, input_storages, left, watch.finish(), model, forward, chunk
            )
            if step is not None:
                self._backwards[chunk] = step
        else:
            result = run()
        self._gone_back.add(key)
        return result

    def _write_backward(self, key: Key, inputs: StepValue, forward_outputs: StepValue) -> StepValue:
        """The result of the backward of a forward that was written down again."""
        chunk, number = key
        pattern, forward = self._backwards.get(chunk), self._forwards[chunk]
        if pattern is None:
            raise NotRepeatedError
        # storages of its forward are those that this microbatch's would have made
        of_forward, turns = self._written.pop(key)
        own = self._live.reserve(pattern.born[1] - pattern.born[0])
        # numbers of the steps that ran -> those of this microbatch
        spans = {forward.born: of_forward, pattern.born: own}
        moved = _Moved(pattern.given, self._numbers(inputs, forward_outputs), spans)
        frees = [
            *self._release(key, forward, pattern, of_forward),
            *self._replace(key, pattern, own, (), is_forward=False),
        ]
        self._write(pattern, number, moved, turns, frees)
        self._leave(forward_outputs, pattern.left, moved)
        result = self._alike(pattern.result, moved)
        for tensor, grad in zip(_tensors(inputs), _tensors(result), strict=True):
            with _disable_current_modes():
                tensor.grad = grad
        return result

    # -- what a step did --------------------------------------------------------------------------
    @property
    def _recording(self) -> Recorder | None:
        return self._recorder if self._recorder.active else None

    def _mark(self) -> _Mark:
        live, recorder, recorded = self._live, self._recording, (0, 0, 0, 0)
        if recorder is not None:
            recorder.cut()
            recorded = recorder.position()
        assert live.history is not None
        history = live.history
        counts = len(history), history.launches, live.count, cuda_graphs.replays
        world = current()
        # without a world there is no traffic to count
        calls = TrafficCounter() if world is None else world.tally.copy()
        return _Mark(recorded, *counts, calls, loads.turns())

    def _here(self) -> StepMoment:
        """This moment, in the middle of a step."""
        history, recorder = self._live.history, self._recording
        assert history is not None
        ops = memory = stream = 0
        if recorder is not None:
            ops, memory, *_ = recorder.position()
            stream = recorder.stream_number()
        return StepMoment(len(history), history.launches, ops, memory, stream)

    def _watch(self, model: torch.nn.Module) -> Watch:
        """See where what runs next replaces what this schedule's steps left in ``model``."""
        return Watch(find(model, self._live, self._first_storage), self._here)

    def _lone_step(
        self,
        begin: _Mark,
        input_storages: tuple[int, ...],
        left: tuple[StepValue, ...],
        gone: Sequence[StandIn] | None,
        model: torch.nn.Module,
        forward: _Step | None = None,
        chunk: int | None = None,
    ) -> _Step | None:
        """Return what was done since ``begin``, if it touches only what it made, was given, its
        forward made, or the model held.

        Args:
            begin: The mark before it.
            input_storages: Numbers of the storages that it was given.
            left: What it left: its result, its reports, the lists that it was given.
            gone: Of what the model held, what has gone meanwhile; None if that is not clear.
            model: The chunk.
            forward: Of a backward its forward.
            chunk: Of a backward its chunk.
        """
        end, recorder = self._mark(), self._recording
        # a graph was launched, or the model holds something that cannot be followed
        if end.replays > begin.replays or gone is None:
            return None
        part: Part = ([], [], [], [])
        if recorder is not None:
            part = recorder.since(begin.recorded)
        assert self._live.history is not None
        history = self._live.history.rows(begin.history)
        outlines = each_tensor(left, self._live.outline)

        # ends of what the model held are told apart, as each microbatch has others
        gone = [stand_in for stand_in in gone if not self._holds_given(stand_in, input_storages)]
        replaced = self._replaced(begin, gone, model)
        if replaced is None:
            return None
        # a forward without a graph is run again in its backward, which replaces them once more
        if any(_lacks_graph(storage.held) for storage in replaced):
            return None
        # what it leaves must not be what the model goes on holding
        held = {storage.held.number for storage in replaced}
        if held & {*input_storages, *_outlined(outlines)}:
            return None
        ends_of_forward = self._ends_of_forward(forward, chunk)
        ended = {stand_in.held.number for stand_in in gone} | ends_of_forward.keys()
        ends = _Ends(begin, history, part, ended)
        released = [
            _Released(storage, ends.of[number])
            for number, storage in ends_of_forward.items()
            if number in ends.of
        ]
        replaced = [replace(storage, end=ends.without(storage.end)) for storage in replaced]

        result, reports, lists = outlines
        step = _Step(
            begin,
            end,
            ends.part,
            ends.history,
            input_storages,
            result,
            reports,
            lists,
            replaced=tuple(replaced),
            released=tuple(released),
        )
        # it waits for a handle of another step, or the host waited
        if not step.is_closed() or (history[:1, 0] == WAITED).any():
            return None
        if not _touches_own(step, input_storages, forward):
            return None
        return step

    def _ends_of_forward(self, forward: _Step | None, chunk: int | None) -> dict[int, _Replaced]:
        """Number -> storage that a backward's forward replaced, which ends with its graph."""
        if forward is None:
            return {}
        return {
            storage.held.number: storage
            for storage in forward.replaced
            if self._in_graph.get((chunk, storage.held.places))
        }

    def _holds_given(self, stand_in: StandIn, input_storages: Sequence[int]) -> bool:
        """Whether a model holds a step's input where the stand-in was: each step hands it over."""
        # all holders have the same storage
        tensor = stand_in.held.holders[0].tensor
        counted = self._live.counted(tensor) if isinstance(tensor, torch.Tensor) else None
        return counted is not None and counted[0] in input_storages

    def _replaced(
        self, begin: _Mark, gone: Sequence[StandIn], model: torch.nn.Module
    ) -> list[_Replaced] | None:
        """Return what has taken the place of what the model held; None if nothing has, or a
        storage of another size.
        """
        # what the step itself made and the model holds now, by where it holds it
        successors = {held.places: held for held in find(model, self._live, begin.storages)}
        replaced: list[_Replaced] = []
        for stand_in in gone:
            held = successors.get(stand_in.held.places)
            if held is None or held.num_bytes != stand_in.held.num_bytes:
                return None
            assert stand_in.end is not None, "it has gone"
            offset, note = held.number - begin.storages, self._live.note_of(held.number)
            tensors = [holder.tensor for holder in held.holders]
            has_graph = any(getattr(tensor, "grad_fn", None) is not None for tensor in tensors)
            replaced.append(_Replaced(held, offset, stand_in.end, note, has_graph))
        return replaced

    def _numbers(self, *values: StepValue) -> tuple[int, ...]:
        return tuple(self._live.number_of(tensor) for tensor in _tensors(*values))

    # -- what a model holds -----------------------------------------------------------------------
    def _replace(
        self, key: Key, step: _Step, own: int, inputs: Sequence[torch.Tensor], *, is_forward: bool
    ) -> Iterator[_Free]:
        """Put tensors of a step that is written down in the place of what its model holds.

        Args:
            key: Chunk and microbatch.
            step: The one that ran.
            own: The first number of the storages that this one would make.
            inputs: Of this one.
            is_forward: Whether it is a forward, whose graph may hold them, too.

        Yields:
            What goes.

        Raises:
            NotRepeatedError: It is not known whether something goes.
        """
        chunk, microbatch = key
        before_is_done = (chunk, microbatch - 1) in self._gone_back
        for replaced in step.replaced:
            held = replaced.held
            tensor = held.holders[0].tensor
            # a subclass, which a plain tensor cannot stand for
            if type(tensor) is not torch.Tensor:
                raise NotRepeatedError
            known_tensor: _Kept | None = vars(tensor).get(_KEPT)
            number = self._live.number_of(tensor) if known_tensor is None else known_tensor.number
            del tensor
            in_graph = self._in_graph.get((chunk, held.places)) if is_forward else False
            new_tensor = _Kept(own + replaced.offset, key, in_graph)
            went = self._live.without_telling(partial(self._hold, replaced, new_tensor, inputs))
            self._check_gone(chunk, number, known_tensor, went)
            for storage, num_bytes in went:
                yield _Free(storage, num_bytes, replaced.end)

            # of a step that ran: its graph holds it, or nothing else did
            if known_tensor is None and is_forward and not before_is_done:
                # it did not go when the model let go of it: its graph holds it, too
                is_held = all(storage != number for storage, _ in went)
                new_tensor.in_graph = self._in_graph[chunk, held.places] = is_held
                self._count(replaced, new_tensor)

    def _check_gone(
        self,
        chunk: int | None,
        number: int,
        known_tensor: _Kept | None,
        went: Sequence[tuple[int, int]],
    ) -> None:
        """Raise NotRepeatedError where what a model held cannot be followed.

        Args:
            chunk: Of the model.
            number: Of the storage that it held.
            known_tensor: What is known of a tensor of ours; None for one of a step that ran.
            went: Storages that went with it.
        """
        # nobody knows whether a graph still holds it
        if (
            known_tensor is not None
            and known_tensor.in_graph is None
            and known_tensor.key not in self._gone_back
        ):
            raise NotRepeatedError
        # what else a graph held is an input or its gradient: others have no tensors of ours
        for patterns in (self._forwards, self._backwards):
            pattern = patterns.get(chunk)
            if pattern is None:
                continue
            first, behind = pattern.born
            if any(first <= storage < behind and storage != number for storage, _ in went):
                raise NotRepeatedError

    def _hold(self, replaced: _Replaced, new_tensor: _Kept, inputs: Sequence[torch.Tensor]) -> None:
        """Make ``new_tensor``, and have the model hold it."""
        held = replaced.held
        # the meter and other modes must not see these stand-ins
        with _disable_current_modes():
            storage = torch.empty(held.num_bytes, dtype=torch.uint8, device="meta")
            for holder in held.holders:
                before = holder.tensor
                assert isinstance(before, torch.Tensor)
                tensor = look_alike(before, storage.untyped_storage())
                vars(tensor)[_KEPT] = new_tensor
                vars(tensor)[_KEEPS] = inputs if replaced.has_graph else ()
                holder.put(tensor)
                del before
        # what the model holds counts as its own, what a graph holds with the graph
        if not new_tensor.in_graph:
            self._count(replaced, new_tensor)

    def _count(self, replaced: _Replaced, new_tensor: _Kept) -> None:
        """Count ``new_tensor`` as long as the model holds it, unless its graph does."""
        held = replaced.held
        tensor = held.holders[0].tensor
        assert isinstance(tensor, torch.Tensor)
        # of what both hold, the graph's end is the one that counts
        counts = self._live.counted(tensor) is not None
        if new_tensor.in_graph and counts:
            self._live.forget(tensor)
        elif not new_tensor.in_graph and not counts:
            storage = tensor.untyped_storage()
            self._live.adopt_storage(storage, held.num_bytes, new_tensor.number, replaced.note)

    def _release(self, key: Key, forward: _Step, backward: _Step, first: int) -> Iterator[_Free]:
        """Let the graph of a microbatch go, which its model may still hold something of.

        Args:
            key: Chunk and microbatch.
            forward: The forward that ran.
            backward: Its backward.
            first: The first number of the storages that this microbatch's forward would make.

        Yields:
            What goes.

        Raises:
            NotRepeatedError: A storage goes whose place in the step is not known.
        """
        chunk, _ = key
        # each storage that the forward's graph holds has to go in its backward
        released_places = {released.replaced.held.places for released in backward.released}
        for replaced in forward.replaced:
            places = replaced.held.places
            if self._in_graph.get((chunk, places)) and places not in released_places:
                raise NotRepeatedError
        for released in backward.released:
            replaced = released.replaced
            number = first + replaced.offset
            tensor = replaced.held.holders[0].tensor
            known_tensor: _Kept | None = getattr(tensor, _KEPT, None)
            # the model holds it until the next microbatch
            if known_tensor is not None and known_tensor.number == number:
                known_tensor.in_graph = False
                self._count(replaced, known_tensor)
            else:
                yield _Free(number, replaced.held.num_bytes, released.end)

    # -- the same again ---------------------------------------------------------------------------
    def _write(
        self,
        step: _Step,
        microbatch: int,
        moved: _Moved,
        turns: Turns,
        frees: Sequence[_Free],
    ) -> None:
        """Write a step down again.

        Args:
            step: The one that ran.
            microbatch: Whose this one is.
            moved: Numbers of its storages.
            turns: Calls of dispatchers between the two.
            frees: What goes besides, of what the model held.
        """
        assert self._live.history is not None
        begin, end, history = step.begin, step.end, step.history.copy()
        history[:, 0] = moved(history[:, 0])
        # launches count from the start of the process
        launches = self._live.history.launches - begin.launches
        history[:, 3] += launches
        # ends of what the model held stand where they stood in the step that ran
        in_order = sorted(frees, key=lambda free: free.end.history)
        if in_order:
            places = [free.end.history for free in in_order]
            rows_of_frees = [
                (free.number, -free.num_bytes, 0, free.end.launches + launches) for free in in_order
            ]
            history = np.insert(history, places, rows_of_frees, axis=0)
        self._live.repeat(history, end.launches - begin.launches)
        loads.repeat(begin.turns, end.turns)
        world = current()
        if world is not None:
            world.tally.repeat(end.calls.since(begin.calls))
        recorder = self._recording
        if recorder is None:
            return
        rows, memory, streams, trace = step.part
        ops_before, changes_before, _, batches_before = recorder.position()
        # ops, storages and batches move on by what was recorded since
        shift = ops_before - begin.recorded[0]
        batches = batches_before - begin.recorded[3]
        moved_rows = []
        for row in rows:
            handle, batch = row[_HANDLE], row[_BATCH]
            # -1: no call that is waited for, and no message of a batch
            if handle >= 0:
                handle += shift
            if batch >= 0:
                batch += batches
            before_handle = row[_MICROBATCH + 1 : _HANDLE]
            moved_rows.append(
                (
                    *row[:_MICROBATCH],
                    microbatch,
                    *before_handle,
                    handle,
                    batch,
                    *row[_BATCH + 1 :],
                )
            )
        storages = moved(np.array([row[1] for row in memory], dtype=np.int64)).tolist()
        memory = [
            (row[0] + shift, storage, *row[2:])
            for row, storage in zip(memory, storages, strict=True)
        ]
        streams = [*streams]
        # from behind, so that places in front stay what they are
        for free in reversed(in_order):
            place = free.end.memory
            memory.insert(place, (free.end.ops + shift, free.number, -free.num_bytes, 0))
            streams.insert(place, free.end.stream)
        behind = changes_before + len(memory)
        sources = begin.recorded[1], end.recorded[1]
        self.repeated.append(RepeatedEvents((changes_before, behind), sources, turns))
        part = (moved_rows, memory, streams, trace)
        recorder.repeat(part, end.recorded[3] - begin.recorded[3])

    def _leave(self, lists: StepValue, outlines: StepValue, moved: _Moved) -> None:
        """Put into the lists that a step is given what it left there, where that is another."""
        for values, left in zip(lists, outlines, strict=True):
            if not isinstance(values, list):
                continue
            for place, outline in enumerate(left):
                if not isinstance(outline, Outline):
                    continue
                number = moved.number(outline.storage)
                before = values[place]
                # the step has put another tensor there
                if number != self._live.number_of(before):
                    self._live.forget(before)
                    values[place] = self._alike(outline, moved, [before])

    def _alike(
        self, outline: StepValue, moved: _Moved, made_from: Sequence[torch.Tensor] = ()
    ) -> StepValue:
        """Tensors of their own that look like those of ``outline``, in the graph behind
        ``made_from``.
        """
        return tree_map_only(Outline, lambda leaf: self._made(leaf, moved, made_from), outline)

    def _made(
        self, outline: Outline, moved: _Moved, made_from: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        number = moved.number(outline.storage)
        with _disable_current_modes():
            # its backward hands gradients on to what it was made from
            if made_from and outline.requires_grad:
                tensor = _Made.apply(partial(self._live.adopt, outline, number), *made_from)
            else:
                tensor = self._live.adopt(outline, number).requires_grad_(outline.requires_grad)
        return tensor


class _Ends:
    """A step without the ends of some storages.

    Attributes:
        history: Rows of its history.
        part: What the recorder wrote.
        of: Number of such a storage -> when it went.
    """

    def __init__(self, begin: _Mark, history: np.ndarray, part: Part, ended: Set[int]) -> None:
        """Take the ends out.

        Args:
            begin: The mark before the step.
            history: All rows of the step's history.
            part: All that the recorder wrote in it.
            ended: Numbers of the storages.
        """
        rows, memory, streams, trace = part
        self._begin = begin
        # rows that let one of them go
        is_end = np.isin(history[:, 0], list(ended)) & (history[:, 1] < 0)
        self._in_history = np.flatnonzero(is_end)
        self.history = history[~is_end]
        in_memory: list[int] = []
        for place, (_, storage, num_bytes, _) in enumerate(memory):
            if storage in ended and num_bytes < 0:
                in_memory.append(place)
        self._in_memory = np.array(in_memory, dtype=np.int64)
        not_in_memory = [place for place in range(len(memory)) if place not in {*in_memory}]
        self.part: Part = (
            rows,
            [memory[place] for place in not_in_memory],
            [streams[place] for place in not_in_memory],
            trace,
        )
        self.of: dict[int, StepMoment] = {}
        places_in_memory = {memory[place][1]: place for place in in_memory}
        for place in self._in_history.tolist():
            number, _, _, launches = history[place].tolist()
            # a storage that the recorder did not write down is in the history alone
            ops = stream = change = 0
            if number in places_in_memory:
                change = places_in_memory[number]
                ops, stream = memory[change][0], streams[change]
            end = StepMoment(
                begin.history + place, launches, ops, begin.recorded[1] + change, stream
            )
            self.of[number] = self.without(end)

    def without(self, place: StepMoment) -> StepMoment:
        """Return a place in the step as it is counted from its beginning, without the ends."""
        history = place.history - self._begin.history
        memory = place.memory - self._begin.recorded[1]
        history -= int(np.searchsorted(self._in_history, history))
        memory -= int(np.searchsorted(self._in_memory, memory))
        return replace(place, history=history, memory=memory)


def _touches_own(step: _Step, input_storages: Sequence[int], forward: _Step | None) -> bool:
    """Whether all storages that ``step`` touches came to be in it or in its forward, or were given
    to it; numbers below 0 are the model's.
    """
    touched = step.history[:, 0]
    # given to it, or the model's own
    own = np.isin(touched, input_storages) | (touched < 0)
    for partner in (step, forward):
        if partner is not None:
            first, behind = partner.born
            own |= (touched >= first) & (touched < behind)
    return bool(own.all())


def _lacks_graph(held: Held) -> bool:
    """Whether what a model holds could have a graph behind it, and has none."""
    for holder in held.holders:
        tensor = holder.tensor
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            return tensor.grad_fn is None
    return False


def _outlined(value: StepValue) -> list[int]:
    """Numbers of the storages of outlines."""
    numbers: list[int] = []
    each_tensor(value, lambda outline: numbers.append(outline.storage), Outline)
    return numbers


class _Made(torch.autograd.Function):
    """The output of a forward that was not run: its graph keeps alive what it was made from."""

    @staticmethod
    def forward(
        ctx: StepValue, make: Callable[[], torch.Tensor], *made_from: torch.Tensor
    ) -> StepValue:
        return make()

    @staticmethod
    def backward(ctx: StepValue, *grads: StepValue) -> StepValue:
        raise NotRepeatedError  # its backward is written, too


class _Moved:
    """Numbers of storages of a step, as they are of another.

    old_numbers, new_numbers : what the two were given, in one order
    spans : (first, behind the last) of storages -> the first that stands for them
    """

    def __init__(
        self,
        old_numbers: tuple[int, ...],
        new_numbers: tuple[int, ...],
        spans: dict[tuple[int, int], int],
    ) -> None:
        self._given = dict(zip(old_numbers, new_numbers, strict=True))
        self._spans = spans

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        moved = numbers.copy()
        for number, new_number in self._given.items():
            moved[numbers == number] = new_number
        for span, start in self._spans.items():
            first, behind = span
            is_inside = (numbers >= first) & (numbers < behind)
            moved[is_inside] = numbers[is_inside] - first + start
        return moved

    def number(self, number: int) -> int:
        """The same of one storage."""
        moved = self(np.array([number]))
        return int(moved[0])


def _tensors(*values: StepValue) -> list[torch.Tensor]:
    """Those of tier meta, in order."""
    tensors: list[torch.Tensor] = []
    for value in values:
        each_tensor(value, tensors.append)
    return tensors


# -- what each call of the schedule did ------------------------------------------------------------

StepValue = Any  # what a step takes or returns: tensors, alone or in lists and tuples, and None
CallKey = tuple[str, int | None, int]  # what, chunk, how often it came before


class NotRepeatedError(Exception):
    """What does not repeat itself though it looked so: run it."""


@dataclass(frozen=True)
class _Section:
    """Ops from ``first`` to before ``behind``, behind so many batches; and what was returned."""

    first: int
    behind: int
    batches: int
    result: StepValue


@dataclass(frozen=True)
class _Like:
    """What makes a tensor like another one."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> _Like:
        return _Like(tensor.shape, tensor.dtype, tensor.requires_grad)

    def empty(self) -> torch.Tensor:
        return torch.empty(
            self.shape, dtype=self.dtype, device="meta", requires_grad=self.requires_grad
        )


class Sections:
    """What was recorded of one iteration by the calls that its schedule made.

    recorder : who records it
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._known: dict[CallKey, _Section] = {}
        self._told: dict[CallKey, int] | None = None  # while it is told again: their first ops
        self._content: Builder | None = None
        self._in_order: list[tuple[CallKey, _Section]] = []
        self._firsts: list[int] = []  # ops
        self._counts: Counter[tuple[str, int | None]] = Counter()

    def reset(self) -> None:
        """A schedule begins: its sections count from 0, and replace those of the one before."""
        self._counts.clear()
        if self._told is None:
            self._known = {}

    def call(
        self, name: str, chunk: int | None, run: Callable[[], StepValue], is_whole: bool = False
    ) -> StepValue:
        """``run()``, or what it was; ``is_whole``: its last segment of compute ends with it."""
        if not self._recorder.active:
            return run()
        key = (name, chunk, self._counts[name, chunk])
        self._counts[name, chunk] += 1
        # another stage's program is written from this one: the function does not run again
        if self._told is not None:
            return self._again(key)
        first, _, _, batches = self._recorder.position()
        result = run()
        if is_whole:
            self._recorder.cut()
        behind = self._recorder.position()[0]
        self._known[key] = _Section(first, behind, batches, each_tensor(result, _Like.of))
        return result

    def rest(self) -> bool:
        """What follows until the iteration ends is one more section; whether it has been told."""
        if not self._recorder.active:
            return False
        if self._told is None:
            first, _, _, batches = self._recorder.position()
            self._known["rest", None, 0] = _Section(first, 1 << 60, batches, None)
        else:
            self._again(("rest", None, 0))
        return self._told is not None

    def record_as(self, builder: Builder, rank: int, run: Callable[[], object]) -> Program:
        """The program of ``rank``, which ``run()`` makes the schedule of.

        builder : what was recorded of the iteration whose sections these are
        NotRepeatedError where the other stage does not make the same calls.
        """
        self._content, self._told = builder, {}
        self._in_order = [*self._known.items()]
        self._firsts = [section.first for _, section in self._in_order]
        self._recorder.start(like=builder, earlier=builder.earlier)
        try:
            run()
            recorded = self._recorder.stop().builder
        finally:
            positions, self._told = self._told, None
        # the other stage made other calls, or left some out
        if recorded is None or positions.keys() != self._known.keys():
            raise NotRepeatedError
        return recorded.build(rank, memory=False)

    def _again(self, key: CallKey) -> StepValue:
        section = self._known.get(key)
        # no such call ran, or it is told a second time
        if section is None or key in (self._told or ()):
            raise NotRepeatedError
        assert self._told is not None
        assert self._content is not None
        if self._recorder.meter is not None:  # what ran since the last op is repeated, too
            self._recorder.meter.take()
        position, _, _, batches = self._recorder.position()
        self._told[key] = position
        rows = []
        for row in self._content.rows(section.first, section.behind):
            handle = self._moved(row[_HANDLE])
            batch = row[_BATCH] if row[_BATCH] < 0 else row[_BATCH] - section.batches + batches
            rows.append((*row[:_HANDLE], handle, batch, *row[_BATCH + 1 :]))
        # batches that these ops take
        used = {row[_BATCH] for row in rows if row[_BATCH] >= 0}
        self._recorder.repeat((rows, [], [], []), len(used))
        return each_tensor(section.result, _Like.empty, _Like)

    def _moved(self, handle: int) -> int:
        """A handle of the recorded iteration as it is in the one that is told."""
        if handle < 0:
            return handle
        assert self._told is not None
        # the section in which the handle was opened
        at = bisect_right(self._firsts, handle) - 1
        key, section = self._in_order[at] if at >= 0 else (None, None)
        if section is None or handle >= section.behind or key not in self._told:
            raise NotRepeatedError
        return handle - section.first + self._told[key]


def each_tensor(
    value: StepValue, change: Callable[[StepValue], StepValue], kind: type = torch.Tensor
) -> StepValue:
    """``value`` with ``change`` of every tensor of tier meta in it, or of every ``kind``."""
    return tree_map_only(
        kind, lambda leaf: change(leaf) if getattr(leaf, "is_meta", True) else leaf, value
    )
