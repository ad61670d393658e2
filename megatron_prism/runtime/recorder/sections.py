"""The iteration of one stage, told again as that of another stage of the same pipeline.

Stages in the middle of a pipeline do the same in another order.  While one of them is recorded,
``Sections.call`` notes which ops each forward, each backward and each hook of the schedule is.  The
schedule then runs again in another stage's place, on tensors without a model, and each of its calls
is what was noted: ops come out as if that stage had run (``tests/emulate/test_repeats.py``);
allocations do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megatron_prism.core.ops import OP

if TYPE_CHECKING:
    from megatron_prism.core.program import Builder, Program
    from megatron_prism.runtime.recorder.recorder import Recorder

__all__ = ["NotRepeatedError", "Sections", "StepValue", "each_tensor"]

_COLUMNS = list(OP.names or ())
_HANDLE, _BATCH = _COLUMNS.index("handle"), _COLUMNS.index("batch")
StepValue = Any  # what a step takes or returns: tensors, alone or in lists and tuples, and None
Key = tuple[str, int | None, int]  # what, chunk, how often it came before


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

    def made(self) -> torch.Tensor:
        return torch.empty(
            self.shape, dtype=self.dtype, device="meta", requires_grad=self.requires_grad
        )


class Sections:
    """What was recorded of one iteration by the calls that its schedule made.

    recorder : who records it
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._known: dict[Key, _Section] = {}
        self._told: dict[Key, int] | None = None  # while it is told again: their first ops
        self._content: Builder | None = None
        self._counts: Counter[tuple[str, int | None]] = Counter()

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

    def tell(self, builder: Builder, rank: int, run: Callable[[], object]) -> Program:
        """The program of ``rank``, which ``run()`` makes the schedule of.

        builder : what was recorded of the iteration whose sections these are
        NotRepeatedError where the other stage does not make the same calls.
        """
        self._content, self._told = builder, {}
        self._counts.clear()
        self._recorder.start(like=builder)
        try:
            run()
            found = self._recorder.stop().builder
        finally:
            told, self._told = self._told, None
        if found is None or told.keys() != self._known.keys():
            raise NotRepeatedError
        return found.build(rank, memory=False)

    def _again(self, key: Key) -> StepValue:
        section = self._known.get(key)
        if section is None or key in (self._told or ()):
            raise NotRepeatedError
        assert self._told is not None
        assert self._content is not None
        self._recorder.drop_open()
        here, _, _, batches = self._recorder.position()
        self._told[key] = here
        rows = []
        for row in self._content.since(section.first, 0)[0][: section.behind - section.first]:
            handle = self._moved(row[_HANDLE])
            batch = row[_BATCH] if row[_BATCH] < 0 else row[_BATCH] - section.batches + batches
            rows.append((*row[:_HANDLE], handle, batch, *row[_BATCH + 1 :]))
        used = {row[_BATCH] for row in rows if row[_BATCH] >= 0}
        self._recorder.repeat((rows, [], [], []), len(used))
        return each_tensor(section.result, _Like.made, _Like)

    def _moved(self, handle: int) -> int:
        """A handle of the recorded iteration as it is in the one that is told."""
        if handle < 0:
            return handle
        for key, here in (self._told or {}).items():
            section = self._known[key]
            if section.first <= handle < section.behind:
                return handle - section.first + here
        raise NotRepeatedError


def each_tensor(
    value: StepValue, what: Callable[[StepValue], StepValue], kind: type = torch.Tensor
) -> StepValue:
    """``value`` with ``what`` of every tensor of tier meta in it, or of every ``kind``."""
    if isinstance(value, (list, tuple)):
        return type(value)(each_tensor(one, what, kind) for one in value)
    chosen = isinstance(value, kind) and getattr(value, "is_meta", True)
    return what(value) if chosen else value
