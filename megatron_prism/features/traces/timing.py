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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from megatron_prism.core.collectives import NAME_OF
from megatron_prism.core.errors import PrismError
from megatron_prism.core.ops import DTYPE_WORDS
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
        size = max(self.num_in, self.num_out)
        words = [self.op, self.group and f"in {self.group}", self.dtype, f"of {size:,} elements"]
        return " ".join(word for word in words if word)


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
        """Some of its iterations, with times since ``origin``."""
        rows = [self.numbers.index(number) for number in numbers]
        tables = self.segments, self.busy, self.begun - origin, self.done - origin, self.totals
        segments, busy, begun, done, totals = (table[rows] for table in tables)
        found, calls, tokens, notes = self.recorded, self.calls, self.tokens, self.notes
        times = segments, busy, begun, done, totals
        return Measured(found, list(numbers), calls, tokens, *times, notes)


# -- calls ----------------------------------------------------------------------------------------
@dataclass
class _Asked:
    """A call as the host sees it: a span, and all that lie in it."""

    spans: list[HostCall]

    @property
    def first(self) -> HostCall:
        return self.spans[0]

    def says(self, name: str) -> Any:
        """An argument of the innermost span that has it."""
        nothing = getattr(CallArgs(), name)
        values = (getattr(one.args, name) for one in reversed(self.spans))
        return next((value for value in values if value != nothing), nothing)

    @cached_property
    def op(self) -> str:
        """Our name of it; "" for what is no call."""
        names = (one.name for one in self.spans)
        words = [n.partition("::")[2].rstrip("_") or n.partition(":")[2] for n in names]
        return next((_NAMES[word] for word in (self.says("op"), *words) if word in _NAMES), "")

    @property
    def in_gloo(self) -> HostCall | None:
        """The span in which gloo does it at once."""
        inner = reversed(self.spans[1:])
        return next((one for one in inner if one.name.startswith("gloo:")), None)

    def members(self, groups: Groups) -> int:
        """Ranks of its group; 0: the trace does not say."""
        group = self.says("group")
        return self.says("members") or (len(groups[group][1]) if group in groups and group else 0)


def _asked(calls: Sequence[HostCall]) -> list[_Asked]:
    """Calls of the host, each with all spans that it consists of, by start."""
    found: list[_Asked] = []
    open_: dict[int, _Asked] = {}
    for call in calls:
        outer = open_.get(call.thread)
        if outer is None or call.start >= outer.first.end:
            outer = open_[call.thread] = _Asked([])
            found.append(outer)
        outer.spans.append(call)
    return [one for one in found if one.op]


def _numel(dims: object) -> int:
    """Elements of all tensors in a nested list of shapes."""
    if not isinstance(dims, list):
        return -1
    if all(isinstance(side, int) for side in dims):
        return min(math.prod(dims), _MOST_ELEMENTS) if dims else 0
    sizes = [size for one in dims if (size := _numel(one)) > 0]
    return sum(sizes) if sizes else -1


def _sizes(one: _Asked) -> tuple[int, int]:
    """Elements (in, out) of a call."""
    into, out = one.says("num_in"), one.says("num_out")
    if into is None or out is None:
        first, second = (_numel(dims) for dims in (*one.first.args.dims, None, None)[:2])
        c10d = one.first.name.startswith("c10d::")  # it takes outputs first
        swapped = one.op in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
        into, out = (second, first) if c10d and swapped and second > 0 else (first, first)
    into, out = (max(-1, min(size, _MOST_ELEMENTS)) for size in (into, out))
    return (
        -1 if one.op in ("recv", "barrier") else into,
        -1 if one.op in ("send", "barrier") else out,
    )


def _call(
    one: _Asked, groups: Groups, span: tuple[int, int, int], batch: int = -1, kernel: bool = True
) -> Call:
    """``span``: when it was issued, when it began and when it ended."""
    kinds = [one.says("dtype"), *(kind for span in one.spans for kind in span.args.types)]
    names = (str(kind).lower().removeprefix("c10::") for kind in kinds)
    dtype = next((_DTYPES[name] for name in names if name in _DTYPES), "")
    third = str((*one.first.args.inputs, "", "", "")[2])
    place = int(third) if re.fullmatch(r"\d{1,9}", third) else -1
    peer = place if one.op in ("send", "recv") else -1
    root = place if one.op in ("broadcast", "reduce", "gather", "scatter") else -1
    ranks, sizes, group = one.members(groups), _sizes(one), one.says("group")
    return Call(one.op, dtype, *sizes, group, peer, root, *span, batch, ranks, kernel)


def _batch(bare: list[_Asked], groups: Groups) -> list[_Asked]:
    """Take the last calls of a thread that can be one batch off ``bare``: of one group of several
    ranks, all messages or none.
    """
    found: list[_Asked] = []
    while bare and bare[-1].members(groups) != 1:
        pair = (bare[-1], *found[-1:])
        kinds = {(one.says("group"), one.op in ("send", "recv")) for one in pair}
        if len(kinds) > 1:
            break
        found.append(bare.pop())
    return found[::-1]


@dataclass
class _Work:
    """What a rank ran beside its calls: int64 [n] each, by launch."""

    launch: np.ndarray
    start: np.ndarray
    end: np.ndarray

    def part(self, begin: int, end: int) -> _Work:
        """What was launched in [begin, end)."""
        first, last = np.searchsorted(self.launch, (begin, end))
        return _Work(self.launch[first:last], self.start[first:last], self.end[first:last])

    @cached_property
    def until(self) -> np.ndarray:
        """When all launched so far has ended."""
        return np.maximum.accumulate(self.end)

    def done_before(self, place: int, since: int) -> int:
        """When the work up to ``place`` was over, ``since`` at the earliest."""
        return max(since, int(self.until[place - 1])) if place else since

    def busy_before(self, when: np.ndarray) -> np.ndarray:
        """int64 [n]: ns up to each of ``when`` in which any of it ran."""
        starts, ends, before = self._union
        at = np.searchsorted(starts, when, side="right") - 1
        ran = before[at] + np.minimum(when, ends[at]) - starts[at]
        return np.where(at < 0, 0, ran)

    @cached_property
    def _union(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """int64 [m] each: when it begins to run and pauses, and how long it ran before."""
        order = np.argsort(self.start, kind="stable")
        start, end = self.start[order], np.maximum.accumulate(self.end[order])
        first = np.append(True, start[1:] > end[:-1])[: len(start)]
        starts, ends = start[first], end[np.append(first[1:], True)[: len(end)]]
        return starts, ends, np.concatenate(([0], np.cumsum(ends - starts)[:-1]))

    @cached_property
    def since(self) -> np.ndarray:
        """When the first of all that is still to be launched begins."""
        return np.minimum.accumulate(self.start[::-1])[::-1]


def _on_device(found: Recorded, notes: list[str]) -> tuple[_Work, list[Call], int]:
    """Work and calls of a rank on a GPU, and when what was launched before had ended."""
    device, before = found.device, 0
    place = np.searchsorted(found.launch[:, 0], device[:, 3])
    place = np.minimum(place, max(0, len(found.launch) - 1))
    known, launched = np.zeros(len(device), bool), device[:, 0]
    if len(found.launch):
        known = (found.launch[place, 0] == device[:, 3]) & (device[:, 3] >= 0)
        launched = np.where(known, found.launch[place, 1], device[:, 0])
        early = ~known & (device[:, 3] < found.launch[:, 0].min())
        if early.any():
            before = int(device[early, 1].max())
            count = f"{int(early.sum()):,} of {len(device):,} kernels"
            notes.append(f"{count} were launched before the profiler began and are left out")
            device, place, known, launched = (x[~early] for x in (device, place, known, launched))
    if lost := int((~known).sum()):
        notes.append(f"{lost:,} of {len(device):,} kernels have no launch: ordered by their start")
    names = np.array([bool(_NCCL.search(name)) for name in found.names])
    talks = names[device[:, 4]] if len(names) else known
    asked, calls = _asked(found.calls), list[Call]()
    begins = np.array([one.first.start for one in asked], dtype=np.int64)
    batches, explained = 0, np.zeros(len(device), bool)
    kernels: dict[int, list[int]] = defaultdict(list)
    for number in np.flatnonzero(talks & known).tolist():
        when, thread = int(launched[number]), int(found.launch[place[number], 2])
        at = int(np.searchsorted(begins, when, side="right")) - 1
        while at >= 0 and not (asked[at].first.thread == thread and asked[at].first.end >= when):
            at = at - 1 if begins[at] > when - 10**9 else -1
        if at >= 0:
            kernels[at].append(number)
            explained[number] = True
    bare: dict[int, list[_Asked]] = defaultdict(list)  # by thread: what has no kernel so far
    for at, one in enumerate(asked):
        mine = kernels.get(at)
        if mine is None:
            bare[one.first.thread] += [one] * (one.op != "coalesced")
            continue
        span = int(launched[mine].min()), int(device[mine, 0].min()), int(device[mine, 1].max())
        if one.op == "coalesced":
            parts = _batch(bare[one.first.thread], found.groups)
            calls += [_call(part, found.groups, span, batches) for part in parts]
            batches += 1
        else:
            calls.append(_call(one, found.groups, span))
    if strange := int((talks & ~explained).sum()):
        where = "belong to no call of torch.distributed: they count as computing"
        notes.append(f"{strange:,} kernels of NCCL {where}")
    rest = np.flatnonzero(~explained)
    rest = rest[np.argsort(launched[rest], kind="stable")]
    work = _Work(launched[rest], device[rest, 0], device[rest, 1])
    for one in (part for parts in bare.values() for part in parts):
        issued = one.first.start
        over = work.done_before(int(np.searchsorted(work.launch, issued)), issued)
        calls.append(_call(one, found.groups, (issued, over, over), kernel=False))
    calls.sort(key=lambda call: (call.issued, call.start))
    return work, calls, before


def _on_host(found: Recorded, notes: list[str]) -> tuple[_Work, list[Call], int]:
    """Work and calls of a rank without a GPU, whose backend is gloo."""
    asked = _asked(found.calls)
    own = [one for one in asked if one.first.name.startswith("c10d::")]
    apart: dict[str, list[_Asked]] = defaultdict(list)
    for one in asked:
        if one.first.name.startswith("gloo:"):
            apart[one.op].append(one)
    calls, lost = list[Call](), 0
    for one in own:
        if inner := one.in_gloo:
            span = inner.start, inner.end
        elif apart[one.op]:
            other = apart[one.op].pop(0)
            span = one.first.start, other.first.end  # its thread's delay is of the call
            one.spans += other.spans
        else:
            lost += 1
            continue
        calls.append(_call(one, found.groups, (one.first.start, *span)))
    if lost:
        notes.append(f"{lost:,} calls have no span in which they run and are left out")
    main = [one.first.thread for one in own]
    if not main and len(found.host):  # without calls the busiest thread
        took = (found.host[:, 1] - found.host[:, 0]).astype(float)
        main = [int(np.bincount(found.host[:, 2], weights=took).argmax())]
    host = found.host[found.host[:, 2] == (Counter(main).most_common(1) or [(0, 0)])[0][0]]
    return _Work(host[:, 0], host[:, 0], host[:, 1]), calls, 0


# -- iterations -----------------------------------------------------------------------------------
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
            free = int(self.work.since[place]) if place < len(self.work.since) else self.end
            ready = call.issued if self.on_host else call.start
            last = max(last, min(max(ready, done), max(done, free)))
            cuts.append(last)
        return np.array(cuts, dtype=np.int64)

    @cached_property
    def resumes(self) -> list[tuple[int, int] | None]:
        """Of each call: (the last call before it, the work) that waited for it to end; None if
        nothing did.
        """
        found: list[tuple[int, int] | None] = []
        count, place = len(self.calls), self.place
        for k, call in enumerate(self.calls):
            soon = call.end - _WAITED_NS
            work = max(int(np.searchsorted(self.work.since, soon)), int(place[k]))
            stretch = int(np.searchsorted(place, work, side="right")) - 1
            between = range(k + 1, min(count, stretch + 1))
            for j in between:
                other = self.calls[j]
                began = other.issued if self.on_host else other.start
                if began >= soon and (self.on_host or other.group != call.group):
                    stretch, work = j - 1, int(place[j])
                    break
            else:  # calls of its own group run after it anyway
                own = all(self.calls[j].group == call.group for j in between)
                if not self.on_host and own and work == place[k]:
                    stretch = k
            paused = self.work.done_before(work, self.begin) < call.end
            found.append((stretch, work) if paused else None)
        return found

    def measure(self, tokens: Sequence[Moment], count: int) -> np.ndarray:
        """int64 [2, count] ns of every segment: how long it took, and how long work ran in it."""
        spans: list[tuple[int, int, int]] = []  # of segments: number, begin, end
        now, at, place = self.begin, 0, self.place
        cuts = [*self.cut.tolist(), self.end]
        places = [*place.tolist(), len(self.work.launch)]
        k = -1  # the call before
        slot: int | None = None
        for token in tokens:
            if token.kind == "segment":
                slot = token.of
            elif token.kind == "call":
                k = token.of
                if slot is not None:
                    spans.append((slot, now, cuts[k]))
                now, slot, at = max(now, cuts[k]), None, places[k]
            else:
                call = self.calls[token.of]
                resumed = self.resumes[token.of]
                work = resumed[1] if resumed else int(np.searchsorted(self.work.since, call.end))
                at = min(max(at, work), places[k + 1])
                done = min(self.work.done_before(at, now), cuts[k + 1])
                if slot is not None:
                    spans.append((slot, now, done))
                    now = max(now, done)
                now, slot = max(now, min(call.end, cuts[k + 1])), None
        if slot is not None:
            spans.append((slot, now, self.end))
        of, begin, end = np.array(spans, dtype=np.int64).reshape(-1, 3).T
        end = np.maximum(begin, end)
        found = np.zeros((2, count), dtype=np.int64)
        np.add.at(found[0], of, end - begin)
        if len(self.work.launch):
            np.add.at(found[1], of, self.work.busy_before(end) - self.work.busy_before(begin))
            return found
        return np.repeat(found[:1], 2, axis=0)  # nobody recorded the work


def _iterations(found: Recorded, work: _Work, calls: list[Call], idle: int) -> list[_Iteration]:
    """By the profiler's steps; all of it is one where there are none."""
    on_host = not len(found.device)
    low = min(work.launch[:1].tolist() + [c.issued for c in calls], default=0)
    steps = found.steps or [(0, low, 1 << 62)]
    untils = [*(begin for _, begin, _ in steps[1:]), steps[-1][2]]
    made = []
    for (number, begin, end), until in zip(steps, untils, strict=True):
        part = work.part(begin, until)
        own = [call for call in calls if begin <= call.issued < until]
        if not len(part.launch) and not own:
            continue
        if not (on_host and found.steps):
            begin = min(*part.start.tolist(), *(c.start for c in own), 1 << 62)
            end = max(*part.end.tolist(), *(c.end for c in own), 0)
        made.append(_Iteration(number, begin, end, part, own, on_host))
    if made:
        made[0].begin = max(made[0].begin, idle)
    for one, following in zip(made, made[1:], strict=False):
        if not on_host:  # what is fetched early for the next one does not end this one
            following.begin = max(following.begin, int(one.work.end.max(initial=one.begin)))
        one.end = max(one.begin, following.begin)
    return [one for one in made if one.number >= 0]


def _alike(made: list[_Iteration], notes: list[str]) -> list[_Iteration]:
    """The iterations with the calls that most have."""
    keys = [tuple((*call.key, call.kernel) for call in one.calls) for one in made]
    usual, count = Counter(keys).most_common(1)[0]
    for one, key in zip(made, keys, strict=True):
        if key == usual:
            continue
        at = next(i for i, (a, b) in enumerate(itertools.zip_longest(key, usual)) if a != b)
        shown = f"call {at} is {one.calls[at]}" if at < len(key) else f"it ends after {at} calls"
        why = f"its calls are not those of {count} others; {shown}"
        notes.append(f"iteration {one.number} is left out: {why}")
    return [one for one, key in zip(made, keys, strict=True) if key == usual]


def _tokens(made: Sequence[_Iteration]) -> list[Moment]:
    """What happens in which order, as most iterations have it."""
    count = len(made[0].calls)
    votes = [
        Counter(found and found[0] for found in each).most_common(1)[0][0]
        for each in ([one.resumes[k] for one in made] for k in range(count))
    ]
    waits: dict[int, list[int]] = defaultdict(list)
    at_once = set[int]()  # calls that are waited for before anything else
    last, calls, place = count - 1, made[0].calls, made[0].place
    for k in reversed(range(count)):
        pair = calls[k].op in ("send", "recv")
        if k + 1 == count or calls[k + 1].op not in ("send", "recv") or place[k] != place[k + 1]:
            last = k
        stretch = votes[k]
        if stretch is not None:  # messages one after the other are on their way together
            stretch = max(stretch, last if pair else k)
            waits[stretch].insert(0, k)
            alone = sum(one.resumes[k] == (k, int(one.place[k])) for one in made)
            if stretch == k and 2 * alone >= len(made):
                at_once.add(k)
    tokens, slots = [Moment("segment", 0)], itertools.count(1)
    for k in range(count):
        tokens.append(Moment("call", k))
        for other in waits[k]:
            if not (other == k and k in at_once):
                tokens.append(Moment("segment", next(slots)))
            tokens.append(Moment("wait", other))
        tokens.append(Moment("segment", next(slots)))
    return tokens


def measure(found: Recorded, plan: Plan | None = None) -> Measured:
    """Measure the iterations of a rank.

    Args:
        found: what was recorded of the rank.
        plan: says of the calls of an iteration which to keep, and what happens in which order;
            None: all of them, and as the times show.

    Raises:
        PrismError: there is nothing to measure.
    """
    notes = [f"{count:,} {why}" for why, count in found.dropped.items()]
    on_host = not len(found.device)
    work, calls, idle = (_on_host if on_host else _on_device)(found, notes)
    if plan is None:
        if lost := [call for call in calls if not call.kernel and not call.moves_nothing]:
            which = f"the first of them {lost[0]}"
            notes.append(f"{len(lost):,} calls have no kernel and are left out, {which}")
        calls = [call for call in calls if call.kernel]
    made = _iterations(found, work, calls, idle)
    if not made:
        what = f"{found.path} has no work of a device or a host in any of its steps"
        fix = "profile with ProfilerActivity.CPU and CUDA, and call the profiler's step()"
        raise PrismError(what, fix=fix)
    if not found.steps:
        notes.append("the profiler marked no steps: all of it counts as one iteration")
    kept = _alike(made, notes)
    if plan is not None:
        chosen, tokens = plan(kept[0].calls)
        for one in kept:
            one.calls = [one.calls[k] for k in chosen]
    else:
        tokens = _tokens(kept)
    slots = 1 + max((token.of for token in tokens if token.kind == "segment"), default=0)
    segments, busy = np.stack([one.measure(tokens, slots) for one in kept], axis=1)
    if (segments < 0).any():
        raise PrismError(f"{found.path} has times that run backwards", fix="profile it again")
    times = np.array([[(c.start, c.end) for c in one.calls] for one in kept], dtype=np.int64)
    times = times.reshape(len(kept), -1, 2)
    numbers = [one.number for one in kept]
    totals = np.array([one.end - one.begin for one in kept], dtype=np.int64)
    parts = segments, busy, times[:, :, 0], times[:, :, 1], totals
    return Measured(found, numbers, kept[0].calls, tokens, *parts, notes)
