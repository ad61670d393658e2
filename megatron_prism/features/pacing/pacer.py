"""The pacer: virtual peers answer on the device, at the time at which they would.

In : what this rank is expected to call in an iteration (its program) and the releases of the world
graph.  Every call then takes the stream that ProcessGroupNCCL would take, is answered there, and
holds that stream until the moment that the table gives (``device``).  The program's own events
and waits order the rest, so overlap is the job's own:

* a synchronous call runs on the caller's stream (torch >= 2.8), an asynchronous one, and every
  message, on its group's own, after what the caller's stream holds now; ``wait`` makes the caller's
  stream wait, never the host, but for ``barrier``
* a batch of messages is one call; unbatched messages of each pair have a stream of their own

Host time counts: a rank whose host is slow is slower by all that a call takes beyond NCCL's.  So
the pacing kernel gives most answers itself (``moves``), and streams and events are raw handles;
where it is known how long NCCL keeps the host, the host is kept for what is left of that.

A call that the program does not expect ends pacing until the next iteration, is counted and said.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.features.pacing.device import RING, StreamEnd, Streams
from megatron_prism.features.pacing.moves import Move, move_of
from megatron_prism.runtime.listeners import CallListener
from megatron_prism.runtime.process_group import CompletedWork

if TYPE_CHECKING:
    from torch import distributed as dist

    from megatron_prism.features.pacing.device import Launcher
    from megatron_prism.runtime.listeners import Answer, Args, Kwargs
    from megatron_prism.runtime.process_group import PrismGroup


@dataclass(frozen=True)
class PacedCall:
    """One call that the program expects.

    launch : which launch of the table it belongs to, -1 if it has no virtual peer
    blocks : thread blocks that NCCL would occupy meanwhile
    large  : an answer of several kernels takes long enough to be told from waiting
    host   : ns for which NCCL would keep the host, 0 if that is not known
    """

    op: str
    group: str
    launch: int
    blocks: int = 1
    large: bool = False
    host: int = 0


class _Asked(NamedTuple):
    """A call that the job makes, and what the program expects of it."""

    call: PacedCall
    group: PrismGroup
    answer: Answer
    args: Args
    kwargs: Kwargs

    def make(self) -> dist.Work | None:
        return self.answer(self.group, *self.args, **self.kwargs)


class Batch:
    """Answered one by one, ended by one launch, as of one ``Pacer``."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer, self._begin = pacer, perf_counter_ns()
        self._move: Move | None = None
        self._asked: list[_Asked] = []
        self._answers: list[Callable[[], object]] = []
        self._works: list[CompletedWork] = []

    def add(self, asked: _Asked) -> CompletedWork:
        args, op = asked.args, asked.call.op
        move = None
        # the kernel itself moves one message of a batch
        if op == "send" and self._move is None:
            self._move = move = self._pacer.move(asked)
        if move is None:
            self._answers.append(asked.make)
        self._asked.append(asked)
        source = -1
        if op == "recv":
            source = args[1]
        work = CompletedWork(args[0], source)
        self._works.append(work)
        return work

    def issue(self) -> None:
        """Answer on the group's stream and hold it."""
        if not self._asked:
            return
        pacer, last = self._pacer, self._asked[-1]
        launch = last.call.launch
        pacer.now_issued[launch] = perf_counter_ns()
        streams, launcher = pacer.streams, pacer.launcher
        lane = pacer.lane(id(last.group))
        streams.follow(lane.stream, streams.current(), lane.begin)
        # answers run in front of the kernel that holds the stream
        if self._answers:
            launcher.arrive(lane.stream, launch, pacer.iteration)
            with streams.on(lane.stream):
                for answer in self._answers:
                    answer()
        blocks = sum(asked.call.blocks for asked in self._asked)
        launcher.release(
            lane.stream, launch, pacer.iteration, pacer.first, not self._answers, blocks, self._move
        )
        lane.end = end = StreamEnd(streams, lane.stream)
        for work, asked in zip(self._works, self._asked, strict=True):
            work.after(end, asked.args)
        _keep_host(self._begin + sum(asked.call.host for asked in self._asked))


def _keep_host(until: int) -> None:
    """Return at ``until`` (``perf_counter_ns``)."""
    while perf_counter_ns() < until:
        pass


@dataclass
class PaceCounter:
    """What became of the iterations."""

    paced: int = 0  # iterations that went as the program says
    strayed: list[str] = field(default_factory=list)  # why others did not
    extra: int = 0  # calls outside iterations, or behind the program's last


class Pacer(CallListener):
    """Follows one rank's program while it runs.

    calls    : what the program expects, in order of issue
    launcher : ``device.Launcher``
    cuda     : whether tensors of the job are on the device (tests have none)
    """

    def __init__(
        self, calls: Sequence[PacedCall], launcher: Launcher, streams: Streams, cuda: bool = True
    ) -> None:
        self.calls, self.launcher, self.streams = calls, launcher, streams
        self._cuda = cuda
        self._shared = getattr(launcher, "shared", None)
        self.tally = PaceCounter()
        self.iteration = -1
        self.active = False
        self.first = 0  # since which iteration all ends are known
        self._at = 0
        self._lanes: dict[object, _Lane] = {}
        count = 1 + max((call.launch for call in calls), default=-1)
        # per iteration of the ring and launch: when the host came to it
        self.issued = [[0] * count for _ in range(RING)]
        self.now_issued = self.issued[0]
        self.lags: list[tuple[int, int]] = []  # of the device behind the host (``summary``)
        self._batch: Batch | None = None

    # -- iterations -------------------------------------------------------------------------------
    def begin(self) -> None:
        """A train step starts."""
        self._close()
        self.iteration += 1
        self._at, self.active = 0, True
        self.now_issued = self.issued[self.iteration % RING]
        if self._shared is not None:
            self.launcher.compare_clocks(self.iteration + 1)

    def end(self) -> None:
        """No further train step will come."""
        self._close()
        self.active = False

    def _close(self) -> None:
        # outside of an iteration
        if not self.active:
            return
        if self._shared is not None and self._shared.gone[0] > self.iteration:
            self._stray("another local rank did not do what its program says")
        # every call of the program was made
        elif self._at == len(self.calls):
            self.tally.paced += 1
        else:
            call = self.calls[self._at]
            self._stray(f"ended before {call.op} of {call.group} (call {self._at})")

    def _stray(self, why: str) -> None:
        self.tally.strayed.append(f"iteration {self.iteration + 1}: {why}")
        self.active = False
        self.first = self.iteration + 1
        if self._shared is not None:
            self._shared.leave(self.iteration)

    def _expected(self, group: PrismGroup, op: str) -> PacedCall | None:
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
        self, group: PrismGroup, op: str, answer: Answer, args: Args, kwargs: Kwargs
    ) -> dist.Work | None:
        """Make ``answer(group, *args, **kwargs)`` at the time at which it would come."""
        begin = perf_counter_ns()  # all that follows is in NCCL's own time
        call = None
        if self.active:
            call = self._expected(group, op)
        if call is None or call.launch < 0:
            return answer(group, *args, **kwargs)
        if self.streams.capturing():
            message = f"{op} of {call.group} goes into a CUDA graph, which repeats its first answer"
            raise UnsupportedError(message, fix="drop the job's CUDA graph flags, or --prism-pace")
        asked = _Asked(call, group, answer, args, kwargs)
        if self._batch is not None:
            return self._batch.add(asked)
        self.now_issued[call.launch] = begin
        stream = self.streams.current()
        if op == "barrier":
            work = self._in_order(stream, asked)
            self.streams.synchronize(stream)  # NCCL's barrier holds the host
            return work
        pair = op == "send" or op == "recv"
        # torch passes options by name, or last
        opts = kwargs.get("opts")
        if "opts" not in kwargs and args:
            opts = args[-1]
        if not pair and not getattr(opts, "asyncOp", True):
            work = self._in_order(stream, asked)
        else:
            # a pair of ranks has a communicator of its own, and so a stream
            key: object = id(group)
            if pair:
                key = (id(group), args[1])
            lane = self.lane(key)
            work = self._on_own_stream(lane, stream, asked)
        _keep_host(begin + call.host)
        return work

    def _on_own_stream(self, lane: _Lane, stream: int, asked: _Asked) -> dist.Work | None:
        """On a stream of its own, after what the caller's holds now."""
        self.streams.follow(lane.stream, stream, lane.begin)
        work: dist.Work | None = self._moved(lane.stream, asked)
        if work is None:
            with self.streams.on(lane.stream):
                work = self._answered(lane.stream, asked)
        lane.end = end = StreamEnd(self.streams, lane.stream)
        assert isinstance(work, CompletedWork), work
        return work.after(end, asked.args)

    def _in_order(self, stream: int, asked: _Asked) -> dist.Work | None:
        """On the caller's stream, but after what the communicator does on another."""
        lane = self._lanes.get(id(asked.group))
        if lane is not None and lane.end is not None:
            lane.end.wait()
        return self._moved(stream, asked) or self._answered(stream, asked)

    def move(self, asked: _Asked) -> Move | None:
        """What the pacing kernel can do instead of the answer, which is then as good as made."""
        call, group, answer, args, kwargs = asked
        find = move_of.get(answer.__name__)
        if find is None or group.world.observers:
            return None
        if len(group.local) > 1 and call.op != "send":  # real ranks bring data of their own
            return None
        move: Move | None = find(group, *args, **kwargs)
        if move is None:
            return None
        tensors = move.outs
        if call.op == "send":
            tensors = args[0]
        # the kernel reaches no host's memory
        if tensors and (tensors[0].device.type == "cuda") != self._cuda:
            return None
        group.sequence += 1
        distance = 0
        if call.op in ("send", "recv"):
            distance = group.distance(args[1])
        group._count(group.desc, group._n, call.op, move.payload, distance)
        return move

    def _moved(self, stream: int, asked: _Asked) -> CompletedWork | None:
        """Have the pacing kernel answer and hold ``stream``, if it can."""
        move, call = self.move(asked), asked.call
        if move is None:
            return None
        self.launcher.release(
            stream, call.launch, self.iteration, self.first, True, call.blocks, move
        )
        return CompletedWork(move.outs)

    def _answered(self, stream: int, asked: _Asked) -> dist.Work | None:
        """Answer on the current ``stream`` and hold it."""
        call = asked.call
        # with real members an answer waits for them, which is no part of coming to the call
        early = call.large or len(asked.group.local) > 1
        if early:
            self.launcher.arrive(stream, call.launch, self.iteration)
        work = asked.make()
        self.launcher.release(
            stream, call.launch, self.iteration, self.first, not early, call.blocks
        )
        return work

    def lane(self, key: object) -> _Lane:
        """The stream of ``key``."""
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane(*self.streams.make())
        return lane

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """What is issued inside is one call to NCCL."""
        if not self.active or self._batch is not None:
            yield
            return
        self._batch = Batch(self)
        try:
            yield
        finally:
            batch, self._batch = self._batch, None
            batch.issue()


@dataclass
class _Lane:
    """A stream of its own for the calls of a group, or the messages of a pair.

    begin : the event with which it follows the callers' streams
    end   : of the last call on it
    """

    stream: int
    begin: int
    end: StreamEnd | None = None


# -- was the rank answered on time? ---------------------------------------------------------------
# From what the device wrote down; times of the summary are in us.

_LATE_NS = 5_000
# From coming to a call to its kernel on a device that has nothing else to do, beyond the least that
# a launch takes: Python's part took more than 30 us on a shared host (H200, 2026-11-22).
_AT_ONCE_NS = 60_000


def summary(
    pacer: Pacer, stamps: dict[str, np.ndarray], predicted: Mapping[str, float]
) -> dict[str, object]:
    """Counts of iterations, and what the last paced one waited for, by group.

    late       : calls that ended later than their peers would have let them, because answering them
                 took longer; nothing is hidden: the rank then runs behind the job by that much
    host_bound : calls that began on the device as soon as the host issued them: the device had
                 nothing left to do and waited for Python, so a faster host would be felt
    iteration  : from the first call of the iteration before to the same call of the last one
    held_us    : from coming to a call to its end; ``predicted_us`` the same in the replay, in which
                 this rank is as fast as its slice; ``predicted`` has them by group
    """
    tally = pacer.tally
    figures: dict[str, object] = {
        "iterations_paced": tally.paced,
        "strayed": tally.strayed[:5],
        "iterations_strayed": len(tally.strayed),
        "calls_outside": tally.extra,
    }
    # a call that waited for a minute
    if stamps["stuck"][0]:
        figures["stuck"] = _name(pacer, int(stamps["stuck"][0]) - 1)
    if pacer.launcher.shared is not None:
        figures["clock"] = pacer.launcher.clock()
    # no iteration was paced as a whole
    iteration = _last(pacer, stamps)
    if iteration is None:
        return figures
    slot = iteration % RING
    came, went, until = (stamps[name][slot] for name in ("came", "went", "until"))
    late = np.maximum(went - until, 0)
    groups: dict[str, dict[str, float]] = {}
    for call, launch in _first_calls(pacer):
        row = groups.setdefault(call.group, {"calls": 0, "held_us": 0.0, "late_us": 0.0})
        row["calls"] += 1
        row["held_us"] += (until[launch] - came[launch]) / 1e3
        row["late_us"] += late[launch] / 1e3
    for name, us in predicted.items():
        if name in groups:
            groups[name]["predicted_us"] = us
    issued = np.array(pacer.issued[slot])
    rounded_groups = {}
    for name, row in groups.items():
        rounded_groups[name] = {key: round(value, 1) for key, value in row.items()}
    return {
        **figures,
        "calls_paced": len(came),
        "late_calls": int((late > _LATE_NS).sum()),
        "late_us": float(late.sum() / 1e3),
        "iteration_us": _felt_us(pacer, stamps, iteration),
        "host_bound": int(at_once(issued, came, pacer.lags).sum()),
        "groups": rounded_groups,
    }


def at_once(
    issued: np.ndarray, came: np.ndarray, lags: list[tuple[int, int]], within: int = _AT_ONCE_NS
) -> np.ndarray:
    """bool [launches]: began within ``within`` ns of the time that a launch takes at best.

    issued : the host's clock when the host came to each, came: the device's when that did
    lags   : (host's clock, ns from there to the device's when an idle device begins a launch) at
             the beginning and the end of the run; clocks drift evenly between them
    """
    times, shortest_lags = np.array(lags, dtype=np.int64).T
    first_lag = shortest_lags[0]
    # differences first: the device's clock has more digits than a float
    drifts = (shortest_lags - first_lag).astype(float)
    expected = np.interp(issued - times[0], times - times[0], drifts)
    began_at_once: np.ndarray = (came - issued - first_lag) - expected <= within
    return began_at_once


def _felt_us(pacer: Pacer, stamps: dict[str, np.ndarray], iteration: int) -> float | None:
    """From the first call of the iteration before to its own; None if that one was not paced."""
    before = (iteration - 1) % RING
    if iteration < 1 or (stamps["tag"][before][pacer.launcher.launches[0]] != iteration).any():
        return None
    first = stamps["came"][:, 0]
    return float(first[iteration % RING] - first[before]) / 1e3


def _last(pacer: Pacer, stamps: dict[str, np.ndarray]) -> int | None:
    """The last iteration whose every end is known."""
    interactions = list(itertools.chain.from_iterable(pacer.launcher.launches))
    if not interactions:
        return None
    # only the last RING iterations have stamps
    for iteration in range(pacer.iteration, max(-1, pacer.iteration - RING), -1):
        if (stamps["tag"][iteration % RING][interactions] == iteration + 1).all():
            return iteration
    return None


def _first_calls(pacer: Pacer) -> list[tuple[PacedCall, int]]:
    """(call, launch), a batch once."""
    seen: dict[int, PacedCall] = {}
    for call in pacer.calls:
        if call.launch >= 0:
            seen.setdefault(call.launch, call)
    return [(call, launch) for launch, call in seen.items()]


def _name(pacer: Pacer, launch: int) -> str:
    """``call 12: all_reduce of TENSOR_MODEL_PARALLEL_GROUP``."""
    for number, call in enumerate(pacer.calls):
        if call.launch == launch:
            return f"call {number}: {call.op} of {call.group}"
    return f"launch {launch}"
