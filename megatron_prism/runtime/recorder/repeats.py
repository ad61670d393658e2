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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from megatron_prism.core.ops import CODE, OP, WAITED
from megatron_prism.runtime.devices import cuda_graphs
from megatron_prism.runtime.devices.live_bytes import Outline
from megatron_prism.runtime.devices.moe_dispatch import loads

if TYPE_CHECKING:
    from megatron_prism.core.program import Builder, Program
    from megatron_prism.runtime.devices.live_bytes import LiveBytes
    from megatron_prism.runtime.recorder.recorder import Part, Position, Recorder

_COLUMNS = list(OP.names or ())
_NAME, _MICROBATCH = _COLUMNS.index("name"), _COLUMNS.index("microbatch")
_HANDLE, _BATCH = _COLUMNS.index("handle"), _COLUMNS.index("batch")
_WAIT = CODE["wait"]
Key = tuple[int | None, int]  # chunk, microbatch


@dataclass(frozen=True)
class _Mark:
    """How much there was of everything at one moment."""

    recorded: Position
    history: int
    launches: int
    storages: int
    replays: int  # of CUDA graphs, whose results are not the step's own
    turns: Counter[tuple[int, bool]]  # of dispatchers of tokens


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
    """

    begin: _Mark
    end: _Mark
    part: Part
    history: np.ndarray
    given: tuple[int, ...]
    result: StepValue
    reports: StepValue
    left: StepValue

    @property
    def born(self) -> tuple[int, int]:
        """First and behind the last number of the storages that it made."""
        return self.begin.storages, self.end.storages

    def is_closed(self) -> bool:
        """Whether every handle that it uses is its own, and none stays open."""
        first = self.begin.recorded[0]
        opened: set[int] = set()
        waited: set[int] = set()
        for at, row in enumerate(self.part[0], first):
            if row[_HANDLE] >= 0:
                (waited if row[_NAME] == _WAIT else opened).add(row[_HANDLE])
                if row[_HANDLE] < first or row[_HANDLE] > at:
                    return False
        return opened == waited


def _section(step: Callable[..., StepValue]) -> Callable[..., StepValue]:
    """A method of Repeats for (chunk, microbatch), which is a section of its schedule too."""

    def call(self: Repeats, key: Key, *args: StepValue) -> StepValue:
        run = partial(step, self, key, *args)
        return self.sections.call(step.__name__, key[0], run, whole=True)

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
        self._recorded = False  # those
        self.reset(0)

    def reset(self, microbatches: int) -> None:
        """A schedule of so many microbatches begins."""
        self._last = microbatches - 1
        self.sections.reset()
        if not self._recorded:
            self._forwards.clear()
            self._backwards.clear()
        self._recorded = self._recorder.active
        self._written: dict[Key, int] = {}  # forward -> number of the first storage it would make

    def forget(self) -> None:
        """No step that follows is like one before it."""
        self._recorded = False

    @_section
    def forward(
        self,
        key: Key,
        run: Callable[[], StepValue],
        inputs: StepValue,
        stored: list[StepValue],
        give: Callable[[list[StepValue]], object],
    ) -> StepValue:
        """The result of ``run()``, the forward of ``key``.

        inputs : what it is given;  stored: where it leaves what the job reports
        give   : hands ``inputs`` to the model, as the forward does
        """
        chunk, number = key
        pattern = self._forwards.get(chunk)
        if pattern is not None and 0 < number < self._last:
            give(inputs if isinstance(inputs, list) else [inputs])
            own = self._live.reserve(pattern.born[1] - pattern.born[0])
            self._written[key] = own
            moved = _Moved(pattern.given, self._numbers(inputs), {pattern.born: own})
            self._write(pattern, number, moved)
            stored += self._alike(pattern.reports, moved)
            return self._alike(pattern.result, moved, _tensors(inputs))
        before, given = len(stored), self._numbers(inputs)
        begin = self._mark()
        result = run()
        if number == 1 and number < self._last:
            step = self._lone_step(begin, given, (result, stored[before:], ()))
            if step is not None:
                self._forwards[chunk] = step
        return result

    @_section
    def backward(
        self, key: Key, run: Callable[[], StepValue], inputs: StepValue, others: StepValue
    ) -> StepValue:
        """The result of ``run()``, the backward of ``key``; ``others``: outputs and gradients."""
        chunk, number = key
        if key in self._written:
            pattern, forward = self._backwards.get(chunk), self._forwards[chunk]
            if pattern is None:
                raise NotRepeatedError
            spans = {
                forward.born: self._written.pop(key),
                pattern.born: self._live.reserve(pattern.born[1] - pattern.born[0]),
            }
            moved = _Moved(pattern.given, self._numbers(inputs, others), spans)
            self._write(pattern, number, moved)
            self._leave(others, pattern.left, moved)
            result = self._alike(pattern.result, moved)
            for tensor, grad in zip(_tensors(inputs), _tensors(result), strict=True):
                with _disable_current_modes():
                    tensor.grad = grad
            return result
        given, begin = self._numbers(inputs, others), self._mark()
        result = run()
        if number == 1 and chunk in self._forwards:
            left = (result, (), others)
            step = self._lone_step(begin, given, left, self._forwards[chunk])
            if step is not None:
                self._backwards[chunk] = step
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
        return _Mark(recorded, *counts, loads.turns())

    def _lone_step(
        self, begin: _Mark, given: tuple[int, ...], left: tuple[StepValue, ...], *partners: _Step
    ) -> _Step | None:
        """What was done since ``begin``, if it touches only what it made, was given, or its forward
        made.
        """
        end, recorder = self._mark(), self._recording
        if end.replays > begin.replays:
            return None
        part: Part = ([], [], [], []) if recorder is None else recorder.since(begin.recorded)
        assert self._live.history is not None
        history = self._live.history.rows(begin.history)
        step = _Step(begin, end, part, history, given, *each_tensor(left, self._live.outline))
        if not step.is_closed() or (history[:1, 0] == WAITED).any():
            return None
        touched = history[:, 0]
        mine = np.isin(touched, given) | (touched < 0)
        for first, behind in (step.born, *(one.born for one in partners)):
            mine |= (touched >= first) & (touched < behind)
        return step if mine.all() else None

    def _numbers(self, *values: StepValue) -> tuple[int, ...]:
        return tuple(self._live.number_of(tensor) for tensor in _tensors(*values))

    # -- the same again ---------------------------------------------------------------------------
    def _write(self, step: _Step, microbatch: int, moved: _Moved) -> None:
        assert self._live.history is not None
        begin, end, history = step.begin, step.end, step.history.copy()
        history[:, 0] = moved(history[:, 0])
        history[:, 3] += self._live.history.launches - begin.launches
        self._live.repeat(history, end.launches - begin.launches)
        loads.repeat(begin.turns, end.turns)
        recorder = self._recording
        if recorder is None:
            return
        rows, memory, streams, trace = step.part
        shift = recorder.position()[0] - begin.recorded[0]
        batches = recorder.position()[3] - begin.recorded[3]
        rows = [
            (
                *row[:_MICROBATCH],
                microbatch,
                *row[_MICROBATCH + 1 : _HANDLE],
                row[_HANDLE] if row[_HANDLE] < 0 else row[_HANDLE] + shift,
                row[_BATCH] if row[_BATCH] < 0 else row[_BATCH] + batches,
                *row[_BATCH + 1 :],
            )
            for row in rows
        ]
        storages = moved(np.array([row[1] for row in memory], dtype=np.int64)).tolist()
        memory = [
            (row[0] + shift, storage, *row[2:])
            for row, storage in zip(memory, storages, strict=True)
        ]
        part = (rows, memory, streams, trace)
        recorder.repeat(part, end.recorded[3] - begin.recorded[3])

    def _leave(self, lists: StepValue, outlines: StepValue, moved: _Moved) -> None:
        """Put into the lists that a step is given what it left there, where that is another."""
        for values, left in zip(lists, outlines, strict=True):
            for at, outline in enumerate(left if isinstance(values, list) else ()):
                if isinstance(outline, Outline):
                    number = int(moved(np.array([outline.storage]))[0])
                    if number != self._live.number_of(values[at]):
                        self._live.forget(values[at])
                        values[at] = self._alike(outline, moved, [values[at]])

    def _alike(
        self, outline: StepValue, moved: _Moved, made_from: Sequence[torch.Tensor] = ()
    ) -> StepValue:
        """Tensors of their own that look like those of ``outline``, in the graph behind
        ``made_from``.
        """
        return tree_map_only(Outline, lambda one: self._made(one, moved, made_from), outline)

    def _made(
        self, outline: Outline, moved: _Moved, made_from: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        number = int(moved(np.array([outline.storage]))[0])
        with _disable_current_modes():
            if made_from and outline.requires_grad:
                made = _Made.apply(partial(self._live.adopt, outline, number), *made_from)
            else:
                made = self._live.adopt(outline, number).requires_grad_(outline.requires_grad)
        return made


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

    given, now : what the two were given, in one order
    spans      : (first, behind the last) of storages -> the first that stands for them
    """

    def __init__(
        self, given: tuple[int, ...], now: tuple[int, ...], spans: dict[tuple[int, int], int]
    ) -> None:
        self._given = dict(zip(given, now, strict=True))
        self._spans = spans

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        found = numbers.copy()
        for number, other in self._given.items():
            found[numbers == number] = other
        for (first, behind), start in self._spans.items():
            mine = (numbers >= first) & (numbers < behind)
            found[mine] = numbers[mine] - first + start
        return found


def _tensors(*values: StepValue) -> list[torch.Tensor]:
    """Those of tier meta, in order."""
    found: list[torch.Tensor] = []
    for value in values:
        each_tensor(value, found.append)
    return found


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
        self, what: str, chunk: int | None, run: Callable[[], StepValue], whole: bool = False
    ) -> StepValue:
        """``run()``, or what it was; ``whole``: its last segment of compute ends with it."""
        if not self._recorder.active:
            return run()
        key = (what, chunk, self._counts[what, chunk])
        self._counts[what, chunk] += 1
        if self._told is not None:
            return self._again(key)
        first, _, _, batches = self._recorder.position()
        result = run()
        if whole:
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
            found = self._recorder.stop().builder
        finally:
            told, self._told = self._told, None
        if found is None or told.keys() != self._known.keys():
            raise NotRepeatedError
        return found.build(rank, memory=False)

    def _again(self, key: CallKey) -> StepValue:
        section = self._known.get(key)
        if section is None or key in (self._told or ()):
            raise NotRepeatedError
        assert self._told is not None
        assert self._content is not None
        if self._recorder.meter is not None:  # what ran since the last op is repeated, too
            self._recorder.meter.take()
        here, _, _, batches = self._recorder.position()
        self._told[key] = here
        rows = []
        for row in self._content.rows(section.first, section.behind):
            handle = self._moved(row[_HANDLE])
            batch = row[_BATCH] if row[_BATCH] < 0 else row[_BATCH] - section.batches + batches
            rows.append((*row[:_HANDLE], handle, batch, *row[_BATCH + 1 :]))
        used = {row[_BATCH] for row in rows if row[_BATCH] >= 0}
        self._recorder.repeat((rows, [], [], []), len(used))
        return each_tensor(section.result, _Like.empty, _Like)

    def _moved(self, handle: int) -> int:
        """A handle of the recorded iteration as it is in the one that is told."""
        if handle < 0:
            return handle
        assert self._told is not None
        at = bisect_right(self._firsts, handle) - 1
        key, section = self._in_order[at] if at >= 0 else (None, None)
        if section is None or handle >= section.behind or key not in self._told:
            raise NotRepeatedError
        return handle - section.first + self._told[key]


def each_tensor(
    value: StepValue, what: Callable[[StepValue], StepValue], kind: type = torch.Tensor
) -> StepValue:
    """``value`` with ``what`` of every tensor of tier meta in it, or of every ``kind``."""
    return tree_map_only(
        kind, lambda one: what(one) if getattr(one, "is_meta", True) else one, value
    )
