"""When do virtual peers answer?  At the time at which they would, on the device, as NCCL would.

In : what this rank is expected to call in an iteration (its program) and the releases of the world
graph.  Every call then takes the stream that ProcessGroupNCCL would take, is answered there, and
holds that stream until the moment that the table gives (``pace_kernel``).  The program's own events
and waits order the rest, so overlap is the job's own:

* a synchronous call runs on the caller's stream (torch >= 2.8), an asynchronous one, and every
  message, on its group's own, after what the caller's stream holds now; ``wait`` makes the caller's
  stream wait, never the host, but for ``barrier``
* a batch of messages is one call; unbatched messages of each pair have a stream of their own

A call that the program does not expect ends pacing until the next iteration, is counted and said.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_prism.errors import UnsupportedError
from megatron_prism.virtual.work import Done

__all__ = ["Call", "Pacer", "Tally"]


@dataclass(frozen=True)
class Call:
    """One call that the program expects.

    launch : which launch of the table it belongs to, -1 if it has no virtual peer
    blocks : thread blocks that NCCL would occupy meanwhile
    large  : answering takes long enough to be told from waiting
    """

    op: str
    group: str
    launch: int
    blocks: int = 1
    large: bool = False


@dataclass
class Tally:
    """What became of the iterations."""

    paced: int = 0  # iterations that went as the program says
    strayed: list[str] = field(default_factory=list)  # why others did not
    extra: int = 0  # calls outside iterations, or behind the program's last


class Pacer:
    """Follows one rank's program while it runs.

    calls    : what the program expects, in order of issue
    launcher : ``pace_kernel.Launcher``
    """

    def __init__(self, calls: Sequence[Call], launcher: Any, device: torch.device) -> None:
        self.calls, self.launcher, self.device = calls, launcher, device
        self.tally = Tally()
        self.iteration = -1
        self.active = False
        self._first = 0  # since which iteration all ends are known
        self._at = 0
        self._lanes: dict[Any, _Lane] = {}
        self._batch: _Batch | None = None

    # -- iterations -------------------------------------------------------------------------------
    def begin(self) -> None:
        """A train step starts."""
        self._close()
        self.iteration += 1
        self._at, self.active = 0, True

    def end(self) -> None:
        """No further train step will come."""
        self._close()
        self.active = False

    def _close(self) -> None:
        if not self.active:
            return
        if self._at == len(self.calls):
            self.tally.paced += 1
        else:
            call = self.calls[self._at]
            self._stray(f"ended before {call.op} of {call.group} (call {self._at})")

    def _stray(self, why: str) -> None:
        self.tally.strayed.append(f"iteration {self.iteration + 1}: {why}")
        self.active = False
        self._first = self.iteration + 1

    def _expected(self, group: Any, op: str) -> Call | None:
        """The program's next call if it is this one."""
        if self._at == len(self.calls):
            self.tally.extra += 1
            return None
        call = self.calls[self._at]
        if call.op != op or call.group != group.desc:
            self._stray(
                f"{op} of {group.desc} where the program has {call.op} of {call.group} "
                f"(call {self._at})"
            )
            return None
        self._at += 1
        return call

    # -- calls ------------------------------------------------------------------------------------
    def record(
        self, group: Any, op: str, answer: Callable[..., Any], args: Sequence[Any], kwargs: Any
    ) -> Any:
        """Make ``answer(group, *args, **kwargs)`` at the time at which it would come."""
        call = self._expected(group, op) if self.active else None
        if call is None or call.launch < 0:
            return answer(group, *args, **kwargs)
        if self._batch is not None:
            return self._batch.add(group, call, answer, args, kwargs)
        if op == "barrier":
            self._in_order(group)
            made = self._here(group, call, answer, args, kwargs)
            torch.cuda.current_stream().synchronize()  # NCCL's barrier holds the host
            return made
        opts = kwargs.get("opts", args[-1] if args else None)
        pair = op in ("send", "recv")
        if not pair and not getattr(opts, "asyncOp", True):
            self._in_order(group)
            return self._here(group, call, answer, args, kwargs)
        key = (id(group), args[1]) if pair else id(group)
        with self.lane(key) as lane:
            made = self._here(group, call, answer, args, kwargs)
            lane.end = end = torch.cuda.Event()
            end.record(lane.stream)
        return made.after(end, args)

    def _in_order(self, group: Any) -> None:
        """Calls of one communicator follow each other, on whatever stream."""
        lane = self._lanes.get(id(group))
        if lane is not None and lane.end is not None:
            lane.end.wait()

    def _here(self, group: Any, call: Call, answer: Any, args: Any, kwargs: Any) -> Any:
        """Answer and hold the current stream."""
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                f"{call.op} of {call.group} goes into a CUDA graph, which would answer every "
                "iteration as the first",
                fix="drop the job's CUDA graph flags, or --prism-pace",
            )
        if call.large:
            self.launcher.arrive(call.launch, self.iteration)
        made = answer(group, *args, **kwargs)
        self.hold(call.launch, not call.large, call.blocks)
        return made

    def hold(self, launch: int, fresh: bool, blocks: int) -> None:
        """Hold the current stream until ``launch`` ends, with ``blocks`` thread blocks."""
        self.launcher.release(launch, self.iteration, self._first, fresh, blocks)

    def lane(self, key: Any) -> _Lane:
        """The stream of ``key``, to be entered."""
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane(self.device)
        return lane

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """What is issued inside is one call to NCCL."""
        if not self.active or self._batch is not None:
            yield
            return
        self._batch = _Batch(self)
        try:
            yield
        finally:
            batch, self._batch = self._batch, None
            batch.issue()


class _Lane:
    """A stream of its own for the calls of a group, or the messages of a pair.

    Inside ``with`` it is the current stream, behind what that held before.

    end : of the last call on it
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.end: Any = None
        self._begin = torch.cuda.Event()
        self._before: Any = None

    def __enter__(self) -> _Lane:
        self._before = torch.cuda.current_stream()
        self._begin.record(self._before)
        self.stream.wait_event(self._begin)
        torch.cuda.set_stream(self.stream)
        return self

    def __exit__(self, *_: Any) -> None:
        torch.cuda.set_stream(self._before)


class _Batch:
    """Messages that are issued together: answered one by one, ended by one launch."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer
        self._group: Any = None
        self._launch, self._blocks = -1, 0
        self._end = torch.cuda.Event()
        self._answers: list[Callable[[], Any]] = []

    def add(self, group: Any, call: Call, answer: Any, args: Any, kwargs: Any) -> Done:
        self._group, self._launch = group, call.launch
        self._blocks += call.blocks
        self._answers.append(lambda: answer(group, *args, **kwargs))
        return Done(args[0], args[1] if call.op == "recv" else -1).after(self._end, args)

    def issue(self) -> None:
        """Answer on the group's stream and hold it."""
        if self._launch < 0:
            return
        pacer = self._pacer
        with pacer.lane(id(self._group)) as lane:
            pacer.launcher.arrive(self._launch, pacer.iteration)
            for answer in self._answers:
                answer()
            pacer.hold(self._launch, False, self._blocks)
            self._end.record(lane.stream)
            lane.end = self._end
