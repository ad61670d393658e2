"""One rank's iterations, out of what a profiler recorded of it: calls, and times between them.

In : Recorded.  Out: Measured: the same calls in every kept iteration, how long the rank computed
between them, and from when to when each was on its way.  Work on the device is ordered by when the
host launched it, as its program is; on a host without a device its operators are the work.

A kernel belongs to the call of torch.distributed in whose span the host launched it (correlation
id, thread), or to the batch that the span ends.  A call that moves nothing (its group has one rank,
or it has no elements) has no kernel: it is over as soon as the work before it.

What a profiler does not say is found so: a rank waits for a call where its work pauses until the
call ends (``_Iteration.resumes``); most iterations decide.  A call that nothing pauses for has no
wait.  Where a captured program is given, its waits count and nothing is inferred.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from megatron_prism.core.errors import PrismError
from megatron_prism.core.programs.collectives import NAME_OF
from megatron_prism.core.programs.ops import DTYPE_WORDS
from megatron_prism.features.traces.events import CallArgs, Groups, HostCall, Recorded

_NAMES = NAME_OF | {
    "alltoallv": "all_to_all",
    "all_to_allv": "all_to_all",
    "allgatherv": "all_gather",
    "coalesced": "coalesced",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatterv": "reduce_scatter",
}
_DTYPES = {word.lower(): name for name, word in DTYPE_WORDS.items()}
_DTYPES |= {"long int": "int64", "signed char": "int8", "unsigned char": "uint8"}  # C++'s
_NCCL = re.compile(r"nccl|rccl", re.IGNORECASE)
_WAITED_NS = 1000  # ns: what begins so soon before a call ends has waited for it
_MOST_ELEMENTS = 1 << 56
_LONGEST_LAUNCH_NS = 10**9  # a call of the host takes no longer to launch its kernel
_MESSAGES = ("send", "recv")
_OUTPUT_FIRST = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")


@dataclass(frozen=True)
class Call:
    """One call of a rank; ``key`` is what it is, the rest is when.

    group  : torch's name of its process group; "": the trace does not say
    peer   : of a message, the other's place in the group; root: of a rooted collective; -1: unknown
    issued : when the host asked for it; start, end: when it was on its way, this rank's wait for
             others included
    batch  : calls of one batch have the same; -1: it is in none
    members : ranks of its group; 0: the trace does not say
    kernel  : whether the device, or gloo, ran something for it
    """

    op: str
    dtype: str
    num_in: int
    num_out: int
    group: str
    peer: int = -1
    root: int = -1
    issued: int = 0
    start: int = 0
    end: int = 0
    batch: int = -1
    members: int = 0
    kernel: bool = True

    @property
    def moves_nothing(self) -> bool:
        """Whether it needs no kernel."""
        return self.members == 1 or max(self.num_in, self.num_out) == 0

    @property
    def key(self) -> tuple[str, str, int, int, str, int]:
        """What makes it the same call in another iteration; how much is sent to whom may change."""
        if self.op == "all_to_all":
            return self.op, self.dtype, -1, -1, self.group, -1
        return self.op, self.dtype, self.num_in, self.num_out, self.group, self.peer

    def __str__(self) -> str:
        words = [self.op]
        if self.group:
            words.append(f"in {self.group}")
        if self.dtype:
            words.append(self.dtype)
        words.append(f"of {max(self.num_in, self.num_out):,} elements")
        return " ".join(words)


@dataclass(frozen=True)
class Moment:
    """A segment, a call or a wait (``kind``) in an iteration; ``of``: its or its call's number."""

    kind: str
    of: int


Plan = Callable[[Sequence[Call]], tuple[list[int], list[Moment]]]


@dataclass
class Measured:
    """One rank's iterations.

    numbers  : of the kept iterations, as the profiler counts
    calls    : of the first of them; all have the same
    tokens   : what happens in which order
    segments : int64 [iterations, segments] ns
    busy     : int64 [iterations, segments] ns in which work ran; in the rest the host was late
    begun, done : int64 [iterations, calls], when each call was on its way
    totals   : int64 [iterations] ns, from the beginning of one to that of the next
    notes    : what was left out, in words
    """

    recorded: Recorded
    numbers: list[int]
    calls: list[Call]
    tokens: list[Moment]
    segments: np.ndarray
    busy: np.ndarray
    begun: np.ndarray
    done: np.ndarray
    totals: np.ndarray
    notes: list[str] = field(default_factory=list)

    def part(self, numbers: Sequence[int], origin: int) -> Measured:
        """Return some of its iterations, with times since ``origin``."""
        rows = [self.numbers.index(number) for number in numbers]
        return Measured(
            recorded=self.recorded,
            numbers=list(numbers),
            calls=self.calls,
            tokens=self.tokens,
            segments=self.segments[rows],
            busy=self.busy[rows],
            begun=self.begun[rows] - origin,
            done=self.done[rows] - origin,
            totals=self.totals[rows],
            notes=self.notes,
        )


# -- calls ----------------------------------------------------------------------------------------
@dataclass
class _HostSpans:
    """A call as the host sees it: a span, and all that lie in it."""

    spans: list[HostCall]

    @property
    def first(self) -> HostCall:
        return self.spans[0]

    def argument(self, name: str) -> Any:
        """Return an argument of the innermost span that has it."""
        default = getattr(CallArgs(), name)
        for span in reversed(self.spans):
            value = getattr(span.args, name)
            if value != default:
                return value
        return default

    @cached_property
    def op(self) -> str:
        """Our name of the call; "" for what is no call."""
        words = [self.argument("op")]
        for span in self.spans:
            # c10d::allreduce_ or nccl:all_reduce
            method = span.name.partition("::")[2].rstrip("_")
            words.append(method or span.name.partition(":")[2])
        for word in words:
            if word in _NAMES:
                return _NAMES[word]
        return ""

    @property
    def is_message(self) -> bool:
        return self.op in _MESSAGES

    @property
    def in_gloo(self) -> HostCall | None:
        """The span in which gloo runs the call at once."""
        for span in reversed(self.spans[1:]):
            if span.name.startswith("gloo:"):
                return span
        return None

    def num_members(self, groups: Groups) -> int:
        """Ranks of the call's group; 0: the trace does not say."""
        members: int = self.argument("members")
        if members:
            return members
        group = self.argument("group")
        if group and group in groups:
            _, ranks = groups[group]
            return len(ranks)
        return 0


def _host_calls(calls: Sequence[HostCall]) -> list[_HostSpans]:
    """Put spans of the host, sorted by start, together to calls; those of no call are left out."""
    asked: list[_HostSpans] = []
    open_: dict[int, _HostSpans] = {}  # by thread
    for call in calls:
        outer = open_.get(call.thread)
        if outer is None or call.start >= outer.first.end:
            outer = open_[call.thread] = _HostSpans([])
            asked.append(outer)
        outer.spans.append(call)
    return [spans for spans in asked if spans.op]


def _numel(dims: object) -> int:
    """Return the elements of all tensors in a nested list of shapes; -1 if there is no shape."""
    if not isinstance(dims, list):
        return -1
    if all(isinstance(side, int) for side in dims):
        # an argument that is no tensor has an empty shape
        if not dims:
            return 0
        return min(math.prod(dims), _MOST_ELEMENTS)
    # a list of tensors counts as all of them
    sizes = [_numel(shape) for shape in dims]
    positive = [size for size in sizes if size > 0]
    if not positive:
        return -1
    return sum(positive)


def _sizes(spans: _HostSpans) -> tuple[int, int]:
    """Return the elements (in, out) of a call; -1: it has none, or they are unknown."""
    num_in, num_out = spans.argument("num_in"), spans.argument("num_out")
    # without the counts that torch notes, sizes follow from shapes
    if num_in is None or num_out is None:
        num_in, num_out = _sizes_by_shapes(spans)
    num_in = max(-1, min(num_in, _MOST_ELEMENTS))
    num_out = max(-1, min(num_out, _MOST_ELEMENTS))
    # a receive gives nothing, a send gets nothing, a barrier neither
    if spans.op in ("recv", "barrier"):
        num_in = -1
    if spans.op in ("send", "barrier"):
        num_out = -1
    return num_in, num_out


def _sizes_by_shapes(spans: _HostSpans) -> tuple[int, int]:
    """Return the elements (in, out) of a call by the shapes of its first two arguments."""
    shapes = [*spans.first.args.dims, None, None]
    first, second = _numel(shapes[0]), _numel(shapes[1])
    # c10d takes outputs first
    if spans.first.name.startswith("c10d::") and spans.op in _OUTPUT_FIRST and second > 0:
        return second, first
    return first, first


def _call(
    spans: _HostSpans,
    groups: Groups,
    span: tuple[int, int, int],
    batch: int = -1,
    kernel: bool = True,
) -> Call:
    """Make a Call; ``span``: when it was issued, when it began and when it ended."""
    # the third argument is a rank: of the peer, or of the root
    arguments = (*spans.first.args.inputs, "", "", "")
    third = str(arguments[2])
    rank = -1
    if re.fullmatch(r"\d{1,9}", third):
        rank = int(third)
    peer = root = -1
    # messages have a peer, calls from or to one rank have a root
    if spans.is_message:
        peer = rank
    elif spans.op in ("broadcast", "reduce", "gather", "scatter"):
        root = rank

    num_in, num_out = _sizes(spans)
    issued, start, end = span
    return Call(
        op=spans.op,
        dtype=_dtype(spans),
        num_in=num_in,
        num_out=num_out,
        group=spans.argument("group"),
        peer=peer,
        root=root,
        issued=issued,
        start=start,
        end=end,
        batch=batch,
        members=spans.num_members(groups),
        kernel=kernel,
    )


def _dtype(spans: _HostSpans) -> str:
    """Return the first type that a call names and we know; "" if there is none."""
    names = [spans.argument("dtype")]
    for span in spans.spans:
        names.extend(span.args.types)
    for name in names:
        dtype = _DTYPES.get(str(name).lower().removeprefix("c10::"))
        if dtype is not None:
            return dtype
    return ""


def _take_batch(bare: list[_HostSpans], groups: Groups) -> list[_HostSpans]:
    """Take the last calls of a thread that can be one batch off ``bare``: of one group of several
    ranks, all messages or none.
    """
    batch: list[_HostSpans] = []
    while bare and bare[-1].num_members(groups) != 1:
        if batch:
            last, following = bare[-1], batch[-1]
            same_group = last.argument("group") == following.argument("group")
            if not same_group or last.is_message != following.is_message:
                break
        batch.append(bare.pop())
    batch.reverse()
    return batch


@dataclass
class _Work:
    """What a rank ran beside its calls: int64 [n] each, by launch."""

    launch: np.ndarray
    start: np.ndarray
    end: np.ndarray

    def part(self, begin: int, end: int) -> _Work:
        """Return what was launched in [begin, end)."""
        first, last = np.searchsorted(self.launch, (begin, end))
        return _Work(self.launch[first:last], self.start[first:last], self.end[first:last])

    @cached_property
    def until(self) -> np.ndarray:
        """When all launched so far has ended."""
        return np.maximum.accumulate(self.end)

    def done_before(self, place: int, since: int) -> int:
        """When the work up to ``place`` was over, ``since`` at the earliest."""
        if not place:
            return since
        return max(since, int(self.until[place - 1]))

    def busy_before(self, when: np.ndarray) -> np.ndarray:
        """int64 [n]: ns up to each of ``when`` in which any of it ran."""
        starts, ends, ran_before = self._busy_spans
        index = np.searchsorted(starts, when, side="right") - 1
        ran = ran_before[index] + np.minimum(when, ends[index]) - starts[index]
        return np.where(index < 0, 0, ran)

    @cached_property
    def _busy_spans(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """int64 [m] each: when it begins to run and pauses, and how long it ran before."""
        order = np.argsort(self.start, kind="stable")
        start, end = self.start[order], np.maximum.accumulate(self.end[order])
        # a span begins where all before it have ended
        begins = np.append(True, start[1:] > end[:-1])[: len(start)]
        is_last = np.append(begins[1:], True)[: len(end)]
        starts, ends = start[begins], end[is_last]
        lengths = np.cumsum(ends - starts)
        return starts, ends, np.concatenate(([0], lengths[:-1]))

    @cached_property
    def since(self) -> np.ndarray:
        """When the first of all that is still to be launched begins."""
        return np.minimum.accumulate(self.start[::-1])[::-1]


@dataclass
class _Timeline:
    """Work and calls of a rank; ``idle_until``: when what was launched before had ended."""

    work: _Work
    calls: list[Call]
    idle_until: int = 0


@dataclass
class _Kernels:
    """Kernels of a rank and their launches.

    device   : int64 [n, 5], rows of ``Recorded.device``
    launched : int64 [n]: when the host launched each; its start where that is unknown
    thread   : int64 [n]: the thread that launched it
    known    : bool [n]: whether the launch is in the trace
    """

    device: np.ndarray
    launched: np.ndarray
    thread: np.ndarray
    known: np.ndarray

    def part(self, chosen: np.ndarray) -> _Kernels:
        return _Kernels(
            self.device[chosen], self.launched[chosen], self.thread[chosen], self.known[chosen]
        )


def _launched_kernels(recorded: Recorded) -> _Kernels:
    """Find the launch of each kernel by its correlation id."""
    device, launch = recorded.device, recorded.launch
    start, correlation = device[:, 0], device[:, 3]
    if not len(launch):
        nobody = np.zeros(len(device), dtype=np.int64)
        return _Kernels(device, start, nobody, np.zeros(len(device), bool))
    place = np.searchsorted(launch[:, 0], correlation)
    place = np.minimum(place, len(launch) - 1)
    known = (launch[place, 0] == correlation) & (correlation >= 0)
    launched = np.where(known, launch[place, 1], start)
    return _Kernels(device, launched, launch[place, 2], known)


def _on_device(recorded: Recorded, notes: list[str]) -> _Timeline:
    """Read work and calls of a rank on a GPU."""
    kernels, idle_until = _launched_kernels(recorded), 0
    num_kernels = len(recorded.device)

    # what was launched before the profiler began has no launch, and smaller ids than all that have
    if len(recorded.launch):
        first_id = recorded.launch[:, 0].min()
        early = ~kernels.known & (kernels.device[:, 3] < first_id)
        if early.any():
            idle_until = int(kernels.device[early, 1].max())
            count = f"{int(early.sum()):,} of {num_kernels:,} kernels"
            notes.append(f"{count} were launched before the profiler began and are left out")
            kernels = kernels.part(~early)
    num_kernels = len(kernels.device)
    num_lost = int((~kernels.known).sum())
    if num_lost:
        count = f"{num_lost:,} of {num_kernels:,} kernels"
        notes.append(f"{count} have no launch: ordered by their start")

    # a kernel of NCCL belongs to the call in which it was launched
    is_nccl = np.zeros(num_kernels, bool)
    if recorded.names:
        nccl_names = np.array([bool(_NCCL.search(name)) for name in recorded.names])
        is_nccl = nccl_names[kernels.device[:, 4]]
    asked = _host_calls(recorded.calls)
    kernels_of = _kernels_of_calls(asked, kernels, is_nccl & kernels.known)
    explained = np.zeros(num_kernels, bool)
    for numbers in kernels_of.values():
        explained[numbers] = True
    calls, bare = _calls_with_kernels(asked, recorded.groups, kernels, kernels_of)
    num_strange = int((is_nccl & ~explained).sum())
    if num_strange:
        why = "belong to no call of torch.distributed: they count as computing"
        notes.append(f"{num_strange:,} kernels of NCCL {why}")

    # all other kernels are work, in the order of their launches
    work_numbers = np.flatnonzero(~explained)
    order = np.argsort(kernels.launched[work_numbers], kind="stable")
    by_launch = kernels.part(work_numbers[order])
    work = _Work(by_launch.launched, by_launch.device[:, 0], by_launch.device[:, 1])

    # a call without a kernel is over as soon as the work before it
    for spans in bare:
        issued = spans.first.start
        place = int(np.searchsorted(work.launch, issued))
        over = work.done_before(place, issued)
        calls.append(_call(spans, recorded.groups, (issued, over, over), kernel=False))
    calls.sort(key=lambda call: (call.issued, call.start))
    return _Timeline(work, calls, idle_until)


def _kernels_of_calls(
    asked: list[_HostSpans], kernels: _Kernels, chosen: np.ndarray
) -> dict[int, list[int]]:
    """Find the calls that launched kernels.

    Args:
        asked: calls of the host, by start.
        kernels: of the rank.
        chosen: bool [kernels]: those to look at.

    Returns:
        Place in ``asked`` -> numbers of its kernels.
    """
    begins = np.array([spans.first.start for spans in asked], dtype=np.int64)
    kernels_of: dict[int, list[int]] = defaultdict(list)
    for number in np.flatnonzero(chosen).tolist():
        when, thread = int(kernels.launched[number]), int(kernels.thread[number])
        place = int(np.searchsorted(begins, when, side="right")) - 1
        # calls of other threads may have begun since; none takes longer than a second
        while place >= 0:
            span = asked[place].first
            if span.thread == thread and span.end >= when:
                kernels_of[place].append(number)
                break
            if begins[place] <= when - _LONGEST_LAUNCH_NS:
                break
            place -= 1
    return kernels_of


def _calls_with_kernels(
    asked: list[_HostSpans],
    groups: Groups,
    kernels: _Kernels,
    kernels_of: Mapping[int, list[int]],
) -> tuple[list[Call], list[_HostSpans]]:
    """Return the calls that have kernels, and what is left without."""
    calls: list[Call] = []
    bare: dict[int, list[_HostSpans]] = defaultdict(list)  # by thread
    num_batches = 0
    for place, spans in enumerate(asked):
        numbers = kernels_of.get(place)
        # a call without a kernel, or one whose batch launches it later
        if numbers is None:
            if spans.op != "coalesced":
                bare[spans.first.thread].append(spans)
            continue
        rows = kernels.device[numbers]
        issued = int(kernels.launched[numbers].min())
        span = issued, int(rows[:, 0].min()), int(rows[:, 1].max())
        # a call outside of a batch
        if spans.op != "coalesced":
            calls.append(_call(spans, groups, span))
            continue
        # the end of a batch launches one kernel for all calls in it
        for member in _take_batch(bare[spans.first.thread], groups):
            calls.append(_call(member, groups, span, num_batches))
        num_batches += 1
    unexplained: list[_HostSpans] = []
    for thread_bare in bare.values():
        unexplained.extend(thread_bare)
    return calls, unexplained


def _on_host(recorded: Recorded, notes: list[str]) -> _Timeline:
    """Read work and calls of a rank without a GPU, whose backend is gloo."""
    own: list[_HostSpans] = []
    apart: dict[str, list[_HostSpans]] = defaultdict(list)  # by op: on gloo's own threads
    for spans in _host_calls(recorded.calls):
        if spans.first.name.startswith("c10d::"):
            own.append(spans)
        elif spans.first.name.startswith("gloo:"):
            apart[spans.op].append(spans)

    calls: list[Call] = []
    num_lost = 0
    for spans in own:
        issued = spans.first.start
        inner = spans.in_gloo
        # gloo's own span is inside of the call
        if inner is not None:
            start, end = inner.start, inner.end
        elif apart[spans.op]:
            # the delay of gloo's thread is of the call
            elsewhere = apart[spans.op].pop(0)
            start, end = issued, elsewhere.first.end
            spans.spans += elsewhere.spans
        # no span says when it ran
        else:
            num_lost += 1
            continue
        calls.append(_call(spans, recorded.groups, (issued, start, end)))
    if num_lost:
        notes.append(f"{num_lost:,} calls have no span in which they run and are left out")

    main = _main_thread(recorded, own)
    host = recorded.host[recorded.host[:, 2] == main]
    return _Timeline(_Work(host[:, 0], host[:, 0], host[:, 1]), calls)


def _main_thread(recorded: Recorded, own: list[_HostSpans]) -> int:
    """Return the thread that calls most; without calls the busiest one."""
    threads = Counter(spans.first.thread for spans in own)
    if threads:
        return threads.most_common(1)[0][0]
    if not len(recorded.host):
        return 0
    took = (recorded.host[:, 1] - recorded.host[:, 0]).astype(float)
    return int(np.bincount(recorded.host[:, 2], weights=took).argmax())


# -- iterations -----------------------------------------------------------------------------------
class _Resume(NamedTuple):
    """Where a rank goes on behind a wait.

    after : the last call that it made before
    work  : place of the first work that waited
    """

    after: int
    work: int


@dataclass
class _Iteration:
    """One iteration: its work, its calls and where they stand in each other's order."""

    number: int
    begin: int
    end: int
    work: _Work
    calls: list[Call]
    on_host: bool

    @cached_property
    def place(self) -> np.ndarray:
        """int64 [calls]: how much of the work was launched before each."""
        issued = np.array([call.issued for call in self.calls], dtype=np.int64)
        return np.searchsorted(self.work.launch, issued)

    @cached_property
    def cut(self) -> np.ndarray:
        """int64 [calls], ascending: when the work before each call was over."""
        cuts, last = [], self.begin
        for call, place in zip(self.calls, self.place.tolist(), strict=True):
            done = self.work.done_before(place, self.begin)
            next_start = self.end
            if place < len(self.work.since):
                next_start = int(self.work.since[place])
            # between the work before and the work behind, where the call was ready
            ready = max(self._begin_of(call), done)
            last = max(last, min(ready, max(done, next_start)))
            cuts.append(last)
        return np.array(cuts, dtype=np.int64)

    def _begin_of(self, call: Call) -> int:
        """When a call begins to matter: gloo's when it is asked for, a kernel when it starts."""
        if self.on_host:
            return call.issued
        return call.start

    @cached_property
    def resumes(self) -> list[_Resume | None]:
        """Where work waited for each call to end; None if nothing did."""
        return [self._resume(k) for k in range(len(self.calls))]

    def _resume(self, k: int) -> _Resume | None:
        call, place = self.calls[k], self.place
        soon = call.end - _WAITED_NS
        # the first work behind the call that begins when it ends, or later
        work = max(int(np.searchsorted(self.work.since, soon)), int(place[k]))
        after = int(np.searchsorted(place, work, side="right")) - 1
        between = range(k + 1, min(len(self.calls), after + 1))
        waiting_call = self._first_waiting_call(call, soon, between)
        if waiting_call is not None:
            # a call before that work has waited already
            after, work = waiting_call - 1, int(place[waiting_call])
        elif not self.on_host and work == place[k] and self._are_of_group(call.group, between):
            # calls of its own group run after it anyway
            after = k
        if self.work.done_before(work, self.begin) >= call.end:
            return None
        return _Resume(after, work)

    def _are_of_group(self, group: str, numbers: range) -> bool:
        return all(self.calls[number].group == group for number in numbers)

    def _first_waiting_call(self, call: Call, soon: int, between: range) -> int | None:
        """Return the first call of ``between`` that waited for ``call``; None if none did.

        Calls of one group follow each other on a device without any wait of the rank.
        """
        for j in between:
            later = self.calls[j]
            may_wait = self.on_host or later.group != call.group
            if may_wait and self._begin_of(later) >= soon:
                return j
        return None

    def measure(self, tokens: Sequence[Moment], count: int) -> np.ndarray:
        """int64 [2, count] ns of every segment: how long it took, and how long work ran in it."""
        spans: list[tuple[int, int, int]] = []  # of segments: number, begin, end
        now, work_place = self.begin, 0
        cuts = [*self.cut.tolist(), self.end]
        places = [*self.place.tolist(), len(self.work.launch)]
        k = -1  # the call before
        segment: int | None = None
        for token in tokens:
            if token.kind == "segment":
                segment = token.of
            elif token.kind == "call":
                # a segment ends where the work before the call is over
                k = token.of
                if segment is not None:
                    spans.append((segment, now, cuts[k]))
                now, segment, work_place = max(now, cuts[k]), None, places[k]
            else:
                # a wait: the segment ends with the work before it, the next begins as the call ends
                call, resume = self.calls[token.of], self.resumes[token.of]
                if resume is None:
                    waiting_work = int(np.searchsorted(self.work.since, call.end))
                else:
                    waiting_work = resume.work
                work_place = min(max(work_place, waiting_work), places[k + 1])
                done = min(self.work.done_before(work_place, now), cuts[k + 1])
                if segment is not None:
                    spans.append((segment, now, done))
                    now = max(now, done)
                now, segment = max(now, min(call.end, cuts[k + 1])), None
        if segment is not None:
            spans.append((segment, now, self.end))
        return self._sums(spans, count)

    def _sums(self, spans: list[tuple[int, int, int]], count: int) -> np.ndarray:
        """Add up spans (segment, begin, end), as ``measure`` returns them."""
        numbers, begin, end = np.array(spans, dtype=np.int64).reshape(-1, 3).T
        end = np.maximum(begin, end)
        took = np.zeros(count, dtype=np.int64)
        np.add.at(took, numbers, end - begin)
        # nobody recorded the work: all of the time counts as it
        if not len(self.work.launch):
            return np.stack([took, took])
        busy = np.zeros(count, dtype=np.int64)
        ran = self.work.busy_before(end) - self.work.busy_before(begin)
        np.add.at(busy, numbers, ran)
        return np.stack([took, busy])


def _iterations(recorded: Recorded, timeline: _Timeline) -> list[_Iteration]:
    """Split by the profiler's steps; all of it is one iteration where there are none."""
    work, calls = timeline.work, timeline.calls
    on_host = not len(recorded.device)
    issued = work.launch[:1].tolist()
    issued.extend(call.issued for call in calls)
    steps = recorded.steps or [(0, min(issued, default=0), 1 << 62)]

    # what is launched between two steps belongs to the first of them
    next_begins = [begin for _, begin, _ in steps[1:]]
    next_begins.append(steps[-1][2])
    iterations: list[_Iteration] = []
    for (number, begin, end), next_begin in zip(steps, next_begins, strict=True):
        step_work = work.part(begin, next_begin)
        step_calls = [call for call in calls if begin <= call.issued < next_begin]
        if not len(step_work.launch) and not step_calls:
            continue
        # a step is the host's; the device's iteration lasts as long as what runs for it
        if not on_host or not recorded.steps:
            starts = step_work.start.tolist() + [call.start for call in step_calls]
            ends = step_work.end.tolist() + [call.end for call in step_calls]
            begin, end = min(*starts, 1 << 62), max(*ends, 0)
        iterations.append(_Iteration(number, begin, end, step_work, step_calls, on_host))

    # an iteration ends where the next begins
    if iterations:
        iterations[0].begin = max(iterations[0].begin, timeline.idle_until)
    for iteration, following in itertools.pairwise(iterations):
        if not on_host:  # what is fetched early for the next one does not end this one
            work_end = int(iteration.work.end.max(initial=iteration.begin))
            following.begin = max(following.begin, work_end)
        iteration.end = max(iteration.begin, following.begin)
    return [iteration for iteration in iterations if iteration.number >= 0]


def _with_usual_calls(iterations: list[_Iteration], notes: list[str]) -> list[_Iteration]:
    """Keep the iterations with the calls that most have; the others are noted."""
    keys = []
    for iteration in iterations:
        keys.append(tuple((*call.key, call.kernel) for call in iteration.calls))
    usual, count = Counter(keys).most_common(1)[0]
    usual_iterations = []
    for iteration, key in zip(iterations, keys, strict=True):
        if key == usual:
            usual_iterations.append(iteration)
            continue
        place = _first_difference(key, usual)
        shown = f"it ends after {place} calls"
        if place < len(key):
            shown = f"call {place} is {iteration.calls[place]}"
        why = f"its calls are not those of {count} others; {shown}"
        notes.append(f"iteration {iteration.number} is left out: {why}")
    return usual_iterations


def _first_difference(left: Sequence[object], right: Sequence[object]) -> int:
    """Return the first place where two sequences that are not the same differ."""
    for place, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return place
    return min(len(left), len(right))


@dataclass
class _Waits:
    """Where waits stand.

    behind  : call -> the calls that are waited for behind it, ascending
    at_once : calls that are waited for before anything else
    """

    behind: dict[int, list[int]]
    at_once: set[int]


def _waits(iterations: Sequence[_Iteration]) -> _Waits:
    """Find the waits of a rank's calls, by what most iterations show."""
    calls, place = iterations[0].calls, iterations[0].place
    count = len(calls)
    waits = _Waits(defaultdict(list), set())
    last_message = count - 1  # of the messages that are on their way together
    for k in reversed(range(count)):
        if k + 1 == count or calls[k + 1].op not in _MESSAGES or place[k] != place[k + 1]:
            last_message = k
        resumes = [iteration.resumes[k] for iteration in iterations]
        votes = Counter(resume and resume.after for resume in resumes)
        after = votes.most_common(1)[0][0]
        # in most iterations no work resumes behind it
        if after is None:
            continue
        # messages one after the other are on their way together
        if calls[k].op in _MESSAGES:
            after = max(after, last_message)
        after = max(after, k)
        waits.behind[after].insert(0, k)
        num_at_once = 0
        for iteration, resume in zip(iterations, resumes, strict=True):
            if resume == (k, int(iteration.place[k])):
                num_at_once += 1
        if after == k and 2 * num_at_once >= len(iterations):
            waits.at_once.add(k)
    return waits


def _tokens(iterations: Sequence[_Iteration]) -> list[Moment]:
    """Return what happens in which order, as most iterations have it."""
    waits = _waits(iterations)
    tokens, segments = [Moment("segment", 0)], itertools.count(1)
    for k in range(len(iterations[0].calls)):
        tokens.append(Moment("call", k))
        for waited in waits.behind[k]:
            # a segment lies between a call and its wait, but where the rank waits at once
            if waited != k or k not in waits.at_once:
                tokens.append(Moment("segment", next(segments)))
            tokens.append(Moment("wait", waited))
        tokens.append(Moment("segment", next(segments)))
    return tokens


def measure(recorded: Recorded, plan: Plan | None = None) -> Measured:
    """Measure the iterations of a rank.

    Args:
        recorded: what was recorded of the rank.
        plan: says of the calls of an iteration which to keep, and what happens in which order;
            None: all of them, and as the times show.

    Raises:
        PrismError: there is nothing to measure.
    """
    notes = [f"{count:,} {why}" for why, count in recorded.dropped.items()]
    if len(recorded.device):
        timeline = _on_device(recorded, notes)
    else:
        timeline = _on_host(recorded, notes)
    # without a captured program nothing says when a call without a kernel ran
    if plan is None:
        timeline.calls = _without_lost_calls(timeline.calls, notes)

    iterations = _iterations(recorded, timeline)
    if not iterations:
        message = f"{recorded.path} has no work of a device or a host in any of its steps"
        fix = "profile with ProfilerActivity.CPU and CUDA, and call the profiler's step()"
        raise PrismError(message, fix=fix)
    if not recorded.steps:
        notes.append("the profiler marked no steps: all of it counts as one iteration")
    usual = _with_usual_calls(iterations, notes)

    # what happens in which order
    if plan is None:
        tokens = _tokens(usual)
    else:
        chosen, tokens = plan(usual[0].calls)
        for iteration in usual:
            iteration.calls = [iteration.calls[k] for k in chosen]
    return _measured(recorded, usual, tokens, notes)


def _without_lost_calls(calls: list[Call], notes: list[str]) -> list[Call]:
    """Keep the calls that have a kernel; those that should have one are noted."""
    lost = [call for call in calls if not call.kernel and not call.moves_nothing]
    if lost:
        which = f"the first of them {lost[0]}"
        notes.append(f"{len(lost):,} calls have no kernel and are left out, {which}")
    return [call for call in calls if call.kernel]


def _measured(
    recorded: Recorded, iterations: list[_Iteration], tokens: list[Moment], notes: list[str]
) -> Measured:
    """Put the times of iterations with the same calls together."""
    segment_numbers = [token.of for token in tokens if token.kind == "segment"]
    num_segments = 1 + max(segment_numbers, default=0)
    sums = [iteration.measure(tokens, num_segments) for iteration in iterations]
    segments, busy = np.stack(sums, axis=1)
    # segments are differences of times of one clock
    if (segments < 0).any():
        raise PrismError(f"{recorded.path} has times that run backwards", fix="profile it again")

    num_calls = len(iterations[0].calls)
    begun = np.zeros((len(iterations), num_calls), dtype=np.int64)
    done = np.zeros_like(begun)
    for row, iteration in enumerate(iterations):
        begun[row] = [call.start for call in iteration.calls]
        done[row] = [call.end for call in iteration.calls]
    totals = [iteration.end - iteration.begin for iteration in iterations]
    return Measured(
        recorded=recorded,
        numbers=[iteration.number for iteration in iterations],
        calls=iterations[0].calls,
        tokens=tokens,
        segments=segments,
        busy=busy,
        begun=begun,
        done=done,
        totals=np.array(totals, dtype=np.int64),
        notes=notes,
    )
