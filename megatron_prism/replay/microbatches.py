"""Another number of microbatches: captured steps in the order of Megatron's scheduler.

In : Programs of M microbatches, and a Scheduler, which runs Megatron's own with stub steps
(``emulate.schedule.schedules``).  Out: Programs of N microbatches.

A program is cut into steps (the span of one forward's or backward's ops; spans that overlap are one
step) and messages between them, each with the ops that lead to it.  The scheduler's own run with M
microbatches must give the same steps, sends, receives and waits; its run with N says in which order
pieces of which kind follow.  A kind is what the scheduler does in the piece, and phases and chunks
of a step, and whether its microbatch is among the first or the last, which have bodies of their own
(parameters that are gathered, gradients that are reduced).  Every piece is a captured one of its
kind, in the surroundings that are most alike; handles, batches and storages are those of the new
places.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any, cast

import numpy as np

from megatron_prism.core import job_settings
from megatron_prism.core.errors import ProgramError, UsageError
from megatron_prism.core.ops import CODE, DTYPE_NAMES, IS_PAIR, PHASE_NAMES, STEPS
from megatron_prism.core.program import Program, Programs
from megatron_prism.core.world import World
from megatron_prism.replay.message_buffers import NEVER, MessageBuffers, PlacedSchedule
from megatron_prism.replay.whatif import with_assumption

Scheduler = Callable[..., Programs]  # (pp, vpp, microbatches, stages=, **settings)
Member = tuple[int, int]  # phase, chunk
Kind = tuple[object, ...]

_FORWARD, _BACKWARD, _WEIGHT = map(PHASE_NAMES.index, STEPS)
_SHAPE = DTYPE_NAMES.index("int64")  # of what messages say of tensors to come
_SYNCS = [CODE[name] for name in ("grad_sync", "param_sync", "mark", "host_wait")]
_RELATIVE = ("microbatch", "handle", "batch", "note")  # of a place, not of a kind
_TIMES = ("ns", "host", "lead", "products")
_SIZES = ("num_in", "num_out", "splits", "flops", "traffic", "kernels", "shape")
_MOST_OPS = 1 << 25  # 4 GB
_MOST_STEPS = 1 << 20  # of the scheduler's own run, 5 us and 2 KB each
# how unlike a captured piece is that stands for a wanted one: from _OTHER on it does not
_NEIGHBOUR, _EDGE, _CHUNK, _BETWEEN, _OTHER = 1, 10, 100, 1000, 10000


def microbatch_count(programs: Programs) -> int:
    """Microbatches of an iteration; 0 if the programs name none."""
    return 1 + max(int(p.ops["microbatch"].max(initial=-1)) for p in programs.programs)


def with_microbatches(programs: Programs, wanted: int, scheduler: Scheduler) -> Programs:
    """The world with ``wanted`` microbatches an iteration.

    Raises:
        UsageError: Megatron's scheduler refuses that number, in its words.
        ProgramError: the captured order is not that of Megatron's scheduler, or a kind of step that
            ``wanted`` microbatches have was not captured.
    """
    there = microbatch_count(programs)
    if wanted == there:
        return programs
    if not there:
        raise ProgramError(
            "no op of the programs names a microbatch, so their number cannot be changed",
            fix="capture the job with that many",
        )
    deferred = _deferred(programs.source, min(there, wanted))
    size = sum(len(program) for program in programs.programs) * -(-wanted // there)
    if size > _MOST_OPS or wanted * len(programs.programs) > _MOST_STEPS:  # before they are made
        raise ProgramError(
            f"{wanted:,} microbatches are {size:,} ops, too many to hold", fix="fewer microbatches"
        )
    order = _Order.of(programs, there, scheduler)
    before, after = order.run(there), order.run(wanted)
    stages = [programs.world.coordinates(program.rank).pp for program in programs.programs]
    pieces = [
        _Pieces(program, programs.world, there, before[stage], deferred)
        for program, stage in zip(programs.programs, stages, strict=True)
    ]
    try:
        made = tuple(
            _Extension(one, after[stage]).program()
            for one, stage in zip(pieces, stages, strict=True)
        )
    except _MissingKindError as error:
        fewest = order.fewest(wanted)
        raise ProgramError(
            f"{there} microbatches have no {error}, which {wanted} microbatches need",
            fix=f"prism capture it with {fewest} microbatches: --global-batch-size, or "
            "global_batch_size of a recipe",
        ) from None
    named = {"microbatches": str(wanted)} if "microbatches" in programs.source else {}
    return with_assumption(
        dataclasses.replace(programs, programs=made, source={**programs.source, **named}),
        f"{wanted} microbatches instead of {there}: captured steps in the order of Megatron's "
        f"scheduler{_memory_doubt(after.values())}",
        Fraction(wanted, there),
    )


def _memory_doubt(schedules: Iterable[_Cut]) -> str:
    """Say what is not known of memory; "" if all of it is."""
    # the combined schedule holds tensors by nodes of its own, whose graphs nobody follows
    for schedule in schedules:
        if max(map(len, schedule.members), default=0) > 1:
            return "; a forward beside a backward: peaks were up to 0.31 % off"
    return ""


def _deferred(source: Mapping[str, str], fewest: int) -> int:
    """How many first microbatches leave a gradient to the end of the iteration
    (core/pipeline_parallel/utils.py drain_embedding_wgrad_compute; limit 0: all of them).
    ProgramError if every one does.
    """
    given = job_settings.plain(job_settings.line_of(source))
    if "defer_embedding_wgrad_compute" not in given:
        return 0
    limit = int(given.get("wgrad_deferral_limit", 0))
    if not 0 < limit < fewest:
        raise ProgramError(
            f"with --defer-embedding-wgrad-compute and --wgrad-deferral-limit {limit} each of "
            f"{fewest} microbatches leaves a gradient to the end of the iteration, which is "
            "another one for every number of them",
            fix="capture the job with that many, or with a smaller limit than microbatches",
        )
    return limit


class _MissingKindError(Exception):
    """No captured piece can stand for one of the wanted schedule."""


def starts_of_forwards(program: Program, world: World) -> tuple[dict[int, int], int]:
    """Of every microbatch the first op of its first forward, and how many microbatches follow each
    other through one chunk.
    """
    cut = _Cut(program, world)
    first = min((one for step in cut.members for one in step if one[0] == _FORWARD), default=())
    begins = {
        step[first]: int(cut.bounds[piece])
        for step, piece in zip(cut.members, cut.steps, strict=True)
        if first in step
    }
    return begins, _group_size([cut]) if first and first[1] >= 0 else 1


# -- pieces ----------------------------------------------------------------------------------------
class _Cut:
    """A program cut into pieces: steps, and what lies between them, cut behind every message.

    members : of every step: microbatch by phase and chunk
    bounds  : int64 [pieces + 1]: where each begins
    places  : of every piece (number of the step, -1), or (that of the step behind it, its place
              between the two)
    steps   : the piece of every step
    talked  : of every step how many messages and waits for them are before its begin and its end
    synced  : bool [messages and waits]: whether the host waits for the device behind each
    """

    talked: list[list[int]]
    synced: np.ndarray

    def __init__(self, program: Program, world: World, like: _Cut | None = None) -> None:
        """Steps have the messages that those of ``like`` have: a forward beside a backward reads
        its batch before the wait that the scheduler has ahead of both.
        """
        ops = program.ops
        self.program, self.pipeline = program, _is_pipeline(program)
        self.stages = _stages(program, world)
        phase = np.where(ops["phase"] == _WEIGHT, _BACKWARD, ops["phase"])
        inside = (ops["microbatch"] >= 0) & np.isin(phase, (_FORWARD, _BACKWARD)) & ~self.pipeline
        at = np.flatnonzero(inside)
        labels = np.stack([ops["microbatch"][at], ops["chunk"][at], phase[at]], axis=1)
        keys, number = np.unique(labels.astype(np.int64), axis=0, return_inverse=True)
        first, last = np.full(len(keys), len(ops)), np.full(len(keys), -1)
        np.minimum.at(first, number.ravel(), at)
        np.maximum.at(last, number.ravel(), at)
        self.members: list[dict[Member, int]] = []
        spans: list[list[int]] = []
        for label in np.argsort(first).tolist():
            microbatch, chunk, what = keys[label].tolist()
            if not spans or first[label] >= spans[-1][1]:
                self.members.append({})
                spans.append([int(first[label]), 0])
            self.members[-1][what, chunk] = microbatch
            spans[-1][1] = max(spans[-1][1], int(last[label]) + 1)
        if like is not None:
            self.members = like.members
            messages = [0, *(1 + self.talking).tolist(), len(ops) + 1]
            for step, span in enumerate(spans):
                for side, before in enumerate(like.talked[step]):
                    span[side] = min(max(span[side], messages[before]), messages[before + 1] - 1)
        self.talked = np.searchsorted(self.talking, np.array(spans).reshape(-1, 2)).tolist()
        self.shapes = [tuple(sorted(one)) for one in self.members]
        # behind a batch of messages the scheduler waits for the device
        waits = np.flatnonzero(ops["name"] == CODE["host_wait"])
        self.synced = np.isin(self.talking + 1, waits) if like is None else like.synced
        bounds, self.places = [0], list[tuple[int, int]]()
        for step, (start, end) in enumerate([*spans, [len(ops), 0]]):
            begin, behind = np.searchsorted(self.talking, [bounds[-1], start]).tolist()
            between: list[int] = []
            for each in range(begin, behind):
                between.append(int(self.talking[each]) + 1)
                if self.synced[each]:
                    stop = start if each + 1 == behind else int(self.talking[each + 1])
                    wait = waits[(waits >= between[-1]) & (waits < stop)][:1] + 1
                    between += wait.tolist() or between[-1:]
            bounds += [*between, start]
            self.places += [(step, i) for i in range(len(between) + 1)]
            if step < len(spans):
                bounds.append(end)
                self.places.append((step, -1))
        self.bounds = np.array(bounds, dtype=np.int64)
        self.steps = [piece for piece, (_, place) in enumerate(self.places) if place < 0]

    def __len__(self) -> int:
        return len(self.places)

    def is_step(self, piece: int) -> bool:
        """Or between steps."""
        return self.places[piece][1] < 0

    def shape(self, piece: int) -> Kind:
        """Phases and chunks of a step; of the steps beside what lies between."""
        step = self.places[piece][0]
        if self.is_step(piece):
            return self.shapes[step]
        return self.beside(step - 1), self.beside(step)

    def beside(self, step: int) -> tuple[Member, ...]:
        """Phases and chunks of a step; nothing if there is none."""
        return self.shapes[step] if 0 <= step < len(self.shapes) else ()

    @cached_property
    def issuers(self) -> np.ndarray:
        """int64 [n]: the op that made the handle that each op has or waits for; -1: none."""
        ops = self.program.ops
        found, last = np.full(len(ops), -1, dtype=np.int64), dict[int, int]()
        for i in np.flatnonzero(ops["handle"] >= 0).tolist():
            handle = int(ops["handle"][i])
            if int(ops["name"][i]) != CODE["wait"]:
                last[handle] = i
            found[i] = last.get(handle, -1)
        return found

    @cached_property
    def talking(self) -> np.ndarray:
        """int64: sends and receives of the pipeline and the waits for them."""
        names, issuers = self.program.ops["name"], self.issuers
        waits = (names == CODE["wait"]) & (issuers >= 0) & self.pipeline[issuers]
        return np.flatnonzero(self.pipeline | waits)

    @cached_property
    def talk(self) -> list[list[int]]:
        """Of every piece its messages and waits for them: between steps at most one."""
        return self._by_piece(self.talking)

    @cached_property
    def syncs(self) -> list[list[int]]:
        """Of every piece what the scheduler asks for: gradients, parameters."""
        return self._by_piece(np.flatnonzero(np.isin(self.program.ops["name"], _SYNCS)))

    def _by_piece(self, at: np.ndarray) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(len(self))]
        for op, piece in zip(at.tolist(), self.piece_of(at).tolist(), strict=True):
            found[piece].append(op)
        return found

    def piece_of(self, at: np.ndarray) -> np.ndarray:
        """int64: the piece in which each op lies; the last one for what is behind all ops."""
        places = np.searchsorted(self.bounds, at, side="right") - 1
        return np.asarray(np.clip(places, 0, len(self) - 1))

    def messages(self, ops: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """Sends, receives and waits of the pipeline, and how many stages they go."""
        names = self.program.ops["name"]
        return tuple((int(names[i]), int(self.stages[i])) for i in ops)

    @cached_property
    def between(self) -> list[Kind]:
        """All that the scheduler does before each step, and behind the last."""
        found: list[Kind] = [()] * (len(self.members) + 1)
        for piece, (step, _) in enumerate(self.places):
            if not self.is_step(piece):
                found[step] += (self.asked(piece),)
        return found

    @cached_property
    def most_alive(self) -> Counter[int | None]:
        """Forwards of every chunk, and of all (None), whose backwards have not come, at most."""
        now, most = Counter[int | None](), Counter[int | None]()
        for phase, chunk in itertools.chain(*self.members):
            for key in (chunk, None):
                now[key] += 1 if phase == _FORWARD else -1
                most[key] = max(most[key], now[key])
        return most

    def asked(self, piece: int) -> Kind:
        """All that the scheduler does in a piece; shapes are other messages than tensors, and so
        are those that a batch has beside others.
        """
        ops, strings = self.program.ops, self.program.strings
        syncs = ((int(ops["name"][i]), int(ops["chunk"][i]), strings[ops["note"][i]])
                 for i in self.syncs[piece])  # fmt: skip
        talk = self.talk[piece]
        shapes = (bool(ops["dtype"][i] == _SHAPE) for i in talk)
        batches = (self.batches.get(int(ops["batch"][i]), ()) for i in talk)
        return (self.messages(talk), *shapes, *batches, *syncs)

    @cached_property
    def batches(self) -> Mapping[int, Kind]:
        """The messages of every batch, by its number."""
        found = defaultdict[int, Kind](tuple)
        for i in np.flatnonzero(self.program.ops["batch"] >= 0).tolist():
            found[int(self.program.ops["batch"][i])] += self.messages([i])
        return found

    def same_order(self, other: _Cut) -> bool:
        """Whether both have the same steps, sends, receives and waits in the same order; what a
        forward and a backward do at once may count as one of them.
        """
        combined = any(len(step) > 1 for step in other.members)
        steps = zip(self.members, other.members, strict=False)
        return (
            len(self.members) == len(other.members)
            and all(one.items() <= step.items() for one, step in steps)
            and self.messages(self.talking) == other.messages(other.talking)
            and (combined or self.talked == other.talked)
        )


def _is_pipeline(program: Program) -> np.ndarray:
    """bool [n]: sends and receives between stages."""
    ops = program.ops
    names = [
        "PIPELINE_MODEL_PARALLEL" in text or "p2p_communication.py" in text
        for text in program.strings
    ]
    known = np.array(names, dtype=bool)
    return np.asarray(IS_PAIR[ops["name"]] & (known[ops["group"]] | known[ops["site"]]))


def _stages(program: Program, world: World) -> np.ndarray:
    """int64 [n]: how many stages on the peer of each message is, and 0 for all other ops.

    Two stages exchange in two groups, one of them everybody's, in which peers are farther away
    (core/pipeline_parallel/p2p_communication.py:65 @0.16.1).
    """
    ops, rank = program.ops, program.rank
    inside = ["PIPELINE_MODEL_PARALLEL" in text for text in program.strings]
    own, peer = world.coordinates(rank).pp, ops["peer"].astype(np.int64)
    there = np.asarray(world._along("pp", (rank + peer) % world.size)) - own
    stages = np.where(np.array(inside, dtype=bool)[ops["group"]], peer, there) % world.pp
    return np.asarray(np.where(IS_PAIR[ops["name"]], stages, 0))


# -- the order -------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class _Order:
    """Megatron's scheduler with the settings under which it gives the captured order.

    stages : those whose order is asked for
    """

    scheduler: Scheduler
    pp: int
    vpp: int | None
    stages: tuple[int, ...]
    settings: Mapping[str, object]
    _cuts: dict[int, dict[int, _Cut]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, programs: Programs, count: int, scheduler: Scheduler) -> _Order:
        """ProgramError if there are none."""
        cuts = [_Cut(program, programs.world) for program in programs.programs]
        stages = [programs.world.coordinates(program.rank).pp for program in programs.programs]
        labels = [chunk for cut in cuts for one in cut.members for _, chunk in one]
        chunks = 1 + max(labels, default=-1)
        vpp = chunks if chunks and programs.world.pp > 1 else None
        group_size = _group_size(cuts) if vpp else None
        for settings in _settings(vpp is not None):
            of = tuple(sorted({*stages}))
            settings = {"group_size": group_size, **settings}
            order = cls(scheduler, programs.world.pp, vpp, of, settings)
            try:
                recorded = order.run(count)
            except UsageError:  # Megatron has no such schedule
                continue
            if all(
                cut.same_order(recorded[stage]) for cut, stage in zip(cuts, stages, strict=True)
            ):
                return order
        raise ProgramError(
            f"{count} microbatches: the steps and messages of the programs are not in the order of "
            "Megatron's scheduler, so other numbers of microbatches cannot be made of them",
            fix="capture the job with that many",
        )

    def run(self, count: int) -> dict[int, _Cut]:
        """Every stage's schedule of ``count`` microbatches."""
        if count not in self._cuts:
            made = self.scheduler(self.pp, self.vpp, count, stages=self.stages, **self.settings)
            self._cuts[count] = {one.rank: _Cut(one, made.world) for one in made.programs}
        return self._cuts[count]

    def fewest(self, wanted: int) -> int:
        """The smallest number whose schedule has every kind of ``wanted`` in the surroundings of a
        steady state.
        """
        after = self.run(wanted)
        for count in range(1, wanted):
            try:
                for stage, cut in self.run(count).items():
                    _Choice(cut, count, after[stage], {}, _EDGE).pieces()
                return count
            except (UsageError, _MissingKindError):
                continue
        return wanted


def _settings(interleaved: bool) -> Iterator[dict[str, object]]:
    """What a captured order may have come from: how stages exchange tensors, and whether a forward
    runs beside a backward.
    """
    overlaps = ((True, False), (True, True), (False, False)) if interleaved else ((False, False),)
    for combined, (overlap, flush), lengths in itertools.product(
        (False, True), overlaps, (False, True)
    ):
        yield {"overlap_p2p": overlap, "warmup_flush": flush, "variable_lengths": lengths,
               "ep_overlap": combined}  # fmt: skip


def _group_size(cuts: Sequence[_Cut]) -> int:
    """Microbatches that follow each other through one chunk, from the order of the forwards."""
    forwards = [chunk for one in cuts[0].members for phase, chunk in one if phase == _FORWARD]
    return len(list(itertools.takewhile(lambda chunk: chunk == forwards[0], forwards)))


def fewest_microbatches(
    pp: int,
    vpp: int | None,
    wanted: int,
    scheduler: Scheduler,
    stages: Iterable[int] | None = None,
    **settings: object,
) -> int:
    """The smallest number that ``wanted`` microbatches follow from with every piece in the
    surroundings of a steady state; ``stages``: there, None: on all; ``settings`` of the scheduler.
    UsageError: Megatron refuses them.
    """
    vpp = vpp if pp > 1 and vpp != 1 else None
    of = range(pp) if stages is None else stages
    return _Order(scheduler, pp, vpp, tuple({*of}), settings).fewest(wanted)


# -- which piece stands for which ------------------------------------------------------------------
_AROUND = 4  # steps on each side
Edges = Mapping[Kind, tuple[int, int]]  # of steps: how many first and last microbatches differ


class _Choice:
    """For every piece of the wanted schedule a piece of the captured one, of its kind."""

    def __init__(
        self, before: _Cut, count: int, after: _Cut, edges: Edges, unlike: int = _OTHER
    ) -> None:
        self.after, self.edges = after, edges
        self.unlike = unlike  # what differs as much does not stand for it
        self.captured: dict[Kind, dict[Kind, list[int]]] = {}  # kind -> place -> pieces
        for piece in range(len(before)):
            there = self.captured.setdefault(_kind(before, piece), {})
            there.setdefault(self._place(before, piece, count), []).append(piece)

    def pieces(self) -> list[int]:
        """Of every wanted piece the captured one.  _MissingKindError if there is none."""
        wanted = 1 + max((m for one in self.after.members for m in one.values()), default=-1)
        places = defaultdict[tuple[Kind, Kind], list[int]](list)
        for piece in range(len(self.after)):
            key = _kind(self.after, piece), self._place(self.after, piece, wanted)
            places[key].append(piece)
        found = [0] * len(self.after)
        for (kind, place), pieces in places.items():
            there = self.captured.get(kind, {})
            known = (place,) if place in there else there
            costs = {one: _distance(place, one) for one in known}
            least = min(costs.values(), default=_OTHER)
            if least >= self.unlike:
                step = self.after.is_step(pieces[0])
                raise _MissingKindError(_named(self.after.shape(pieces[0]), step))
            nearest = sorted(p for one, cost in costs.items() if cost == least for p in there[one])
            for piece, place_of in zip(pieces, _spread(len(nearest), len(pieces)), strict=True):
                found[piece] = nearest[place_of]
        return found

    def _place(self, cut: _Cut, piece: int, count: int) -> Kind:
        """What tells a piece from others of its kind, and how much: whether microbatches of a step
        are among the first or last; between steps all messages and the steps, and such
        microbatches.
        """
        step, number = cut.places[piece]
        if not cut.is_step(piece):
            phases = cut.program.ops["phase"][cut.talk[piece]].tolist()
            found: list[Any] = [(_BETWEEN, number), (_BETWEEN, tuple(phases))]
            found.append((_BETWEEN, cut.between[step]))
            for other in (step - 1, step):
                beside = cut.beside(other)
                found.append((_CHUNK, tuple(chunk for _, chunk in beside)))
                ends = (_clipped(cut.members[other][one], count, 1, 1) for one in beside)
                found.append((_EDGE, tuple(ends)))
        else:
            members, shape, found = cut.members[step], cut.shape(piece), []
            for phase, chunk in sorted(members):
                usual = (1, 0) if phase == _FORWARD else (0, 1)
                edges = self.edges.get(shape, usual)
                microbatch = members[phase, chunk]
                found.append((_OTHER, _clipped(microbatch, count, *edges)))
                found.append((_EDGE, _clipped(microbatch, count, 1, 1)))
        # they decide what Python frees: buffers of messages live until the next one has their name
        behind = step + cut.is_step(piece)
        for away in range(_AROUND):
            found += [(_NEIGHBOUR, cut.beside(at)) for at in (step - 1 - away, behind + away)]
        return tuple(found)


def _spread(there: int, wanted: int) -> Iterator[int]:
    """Which of ``there`` equal pieces stands for each of ``wanted``: the first and the last quarter
    for themselves, since what they find in memory differs, the others in turn.
    """
    first = (there + 2) // 4
    last = min(first, there - 1 - first)
    for i in range(wanted):
        if i < first:
            yield i
        elif wanted - i <= last:
            yield there - (wanted - i)
        else:
            yield first + (i - first) % (there - first - last)


def _kind(cut: _Cut, piece: int) -> Kind:
    """What a piece must have in common with one that stands for it: what the scheduler does in it,
    a step's phases and chunks, and the phases of the steps beside what lies between: the iteration
    begins and ends with work of its own, which no two steps have between them.
    """
    if cut.is_step(piece):
        return cut.shape(piece), cut.asked(piece)
    step, _ = cut.places[piece]
    sides = (tuple(phase for phase, _ in cut.beside(at)) for at in (step - 1, step))
    return *sides, cut.asked(piece)


def _clipped(number: int, count: int, first: int, last: int) -> tuple[int, int]:
    return min(number, first), min(count - 1 - number, last)


def _distance(one: Kind, other: Kind) -> int:
    return sum(a[0] for a, b in zip(one, other, strict=True) if a != b)  # type: ignore[index]


def _named(kind: Kind, step: bool) -> str:
    """A kind in words: ``backward of chunk 1``."""
    if step:
        words = (PHASE_NAMES[phase] + (f" of chunk {chunk}" if chunk >= 0 else "")
                 for phase, chunk in cast("tuple[tuple[int, int], ...]", kind))  # fmt: skip
        return " with ".join(words)
    before, after = (_named(one, True) if one else "" for one in kind)  # type: ignore[arg-type]
    return f"{after or 'end'} behind {before or 'the start'} with these messages"


class _Pieces(_Cut):
    """A captured program, cut, and which of its steps have bodies of their own."""

    def __init__(
        self, program: Program, world: World, count: int, order: _Cut, deferred: int
    ) -> None:
        super().__init__(program, world, order)
        self.count, self.order, self.deferred = count, order, deferred

    @cached_property
    def _numbers(self) -> tuple[np.ndarray, np.ndarray]:
        """int64 [n] twice: ops that are equal but for their times, and for their sizes, too."""
        return tuple(self._equal(but) for but in (_TIMES, (*_TIMES, *_SIZES)))  # type: ignore

    def _equal(self, but: Sequence[str]) -> np.ndarray:
        plain = self.program.ops.copy()
        for name in (*_RELATIVE, *but):
            plain[name] = 0
        numbers: dict[bytes, int] = {}
        data, size = plain.tobytes(), plain.itemsize
        found = (numbers.setdefault(data[at : at + size], len(numbers))
                 for at in range(0, len(data), size))  # fmt: skip
        return np.fromiter(found, dtype=np.int64, count=len(plain))

    def body(self, piece: int, sizes: bool = True) -> bytes:
        """The same for pieces with the same ops (of other sizes, if not ``sizes``)."""
        numbers = self._numbers[0 if sizes else 1]
        return numbers[self.bounds[piece] : self.bounds[piece + 1]].tobytes()

    @cached_property
    def edges(self) -> dict[Kind, tuple[int, int]]:
        """Of steps of one forward or backward: how many first and last have other bodies than the
        longest run of equal ones.  ProgramError if steps differ without an order.
        """
        steps = defaultdict[tuple[Member, ...], dict[int, int]](dict)
        for step, members in enumerate(self.members):
            if len(members) == 1:
                (number,) = members.values()
                steps[self.shapes[step]][number] = self.steps[step]
        found: dict[tuple[object, ...], tuple[int, int]] = {}
        for shape, pieces in steps.items():
            first = self.deferred if shape[0][0] == _BACKWARD else 0  # none of them repeats
            numbers = [number for number in sorted(pieces) if number >= first]
            for sizes in (True, False):  # tokens of experts differ from microbatch to microbatch
                start, end = _longest_run([self.body(pieces[n], sizes) for n in numbers])
                if end - start > 1 or len(numbers) < 3 and not first:
                    break
            else:
                raise ProgramError(
                    f"rank {self.program.rank}: every {_named(shape, True)} has other ops, so "
                    "there is none that more microbatches would repeat",
                    fix="capture the job with that many",
                )
            if end - start > 1:
                found[shape] = first + start, len(numbers) - end
        return found


def _equal_ends(one: np.ndarray, other: np.ndarray) -> int:
    """How many last rows of two columns are equal."""
    count = min(len(one), len(other))
    pairs = np.stack([other[name] for name in other.dtype.names or ()], axis=1)[::-1][:count]
    unlike = np.flatnonzero((one[::-1][:count] != pairs).any(axis=1))
    return int(unlike[0]) if len(unlike) else count


def _longest_run(bodies: Sequence[bytes]) -> tuple[int, int]:
    """[start, end) of the longest run of equal entries, the last of several."""
    best, start = (0, 0), 0
    for at in range(1, len(bodies) + 1):
        if at == len(bodies) or bodies[at] != bodies[start]:
            best = max((start, at), best, key=lambda run: run[1] - run[0])
            start = at
    return best


# -- the program of the wanted schedule ------------------------------------------------------------
class _Extension:
    """The captured pieces of one rank in the order of the wanted schedule.

    chosen    : of every new piece the captured one
    base      : int64 [pieces + 1], where every new piece begins
    source    : int64 [new ops], the captured op; piece: the new piece that each is in
    scheduled : int64 [new ops], the op of the wanted schedule that a message, or a wait for one,
                stands for; -1: none
    """

    def __init__(self, given: _Pieces, after: _Cut) -> None:
        self.given, self.after = given, after
        self.chosen = _Choice(given.order, given.count, after, given.edges).pieces()
        bounds = [given.bounds[piece : piece + 2] for piece in self.chosen]
        lengths = [end - start for start, end in bounds]
        self.base = np.concatenate(([0], np.cumsum(lengths)))
        self.source = np.concatenate([np.arange(start, end) for start, end in bounds])
        self.piece = np.repeat(np.arange(len(bounds)), lengths)
        self.scheduled = np.full(len(self.source), -1, dtype=np.int64)
        for base, (start, _), chosen, talk in zip(
            self.base.tolist(), bounds, self.chosen, after.talk, strict=False
        ):
            for captured, wanted in zip(given.talk[chosen], talk, strict=True):
                self.scheduled[base + captured - start] = wanted

    def program(self) -> Program:
        """The program."""
        program = self.given.program
        ops = program.ops[self.source]
        ops["microbatch"] = self._microbatches(ops)
        ops["handle"] = self._handles(ops)
        ops["batch"] = self._batches(ops["batch"])
        allocations, memory, early = self._memory()
        compute = program.ops["name"] == CODE["compute"]
        samples = program.samples
        if samples.size:
            samples = samples[:, (np.cumsum(compute) - 1)[self.source[compute[self.source]]]]
        return dataclasses.replace(
            program,
            ops=ops,
            allocations=allocations,
            samples=samples,
            history=self._history(allocations, memory, early),
            streams=program.streams[memory] if len(program.streams) else program.streams,
            routed=program.routed[memory] if len(program.routed) else program.routed,
        )

    def _microbatches(self, ops: np.ndarray) -> np.ndarray:
        """As the wanted schedule has them; messages of a program without a model have labels, too,
        which the scheduler gives anew.
        """
        found = ops["microbatch"].copy()
        given, after = self.given, self.after
        phase = np.where(ops["phase"] == _WEIGHT, _BACKWARD, ops["phase"])
        messages = given.pipeline[self.source]
        for i in np.flatnonzero(found >= 0).tolist():
            piece, member = int(self.piece[i]), (int(phase[i]), int(ops["chunk"][i]))
            step, place = after.places[piece]
            captured = given.members[given.places[self.chosen[piece]][0]] if place < 0 else {}
            if messages[i] and found[i] != captured.get(member, None if place < 0 else -1):
                row = after.program.ops[self.scheduled[i]]
                ops["chunk"][i], found[i] = row["chunk"], row["microbatch"]
            else:  # between steps what a forward beside a backward reads ahead of a wait
                beside = after.members[step : step + 1] + after.members[max(0, step - 1) : step]
                found[i] = next((one[member] for one in beside if member in one), -1)
        return found

    def _handles(self, ops: np.ndarray) -> np.ndarray:
        """Of every op the new place of who made its handle."""
        given, found = self.given, np.full(len(ops), -1, dtype=np.int64)
        issuer = given.issuers[self.source]
        home = given.piece_of(issuer)
        messages = given.pipeline[issuer] & (ops["name"] == CODE["wait"])
        new_place = {op: at for at, op in enumerate(self.scheduled.tolist())}
        used = Counter(self.chosen)
        last: dict[int, int] = {}  # captured piece -> where it was used last
        alike: dict[Kind, int] = {}
        at = 0
        for i in np.flatnonzero(issuer >= 0).tolist():
            piece = int(self.piece[i])
            for passed in range(at, piece + 1):
                last[self.chosen[passed]] = passed
                alike[self._alike(self.chosen[passed])] = passed
            at = max(at, piece + 1)
            if messages[i]:
                found[i] = new_place[int(self.after.issuers[self.scheduled[i]])]
                continue
            old, there = self.chosen[piece], int(home[i])
            behind = piece - (old - there)  # as far back as it was captured
            once = used[old] == 1 and used[there] == 1
            if there == old:
                new = piece
            elif not once and behind >= 0 and (
                self._alike(self.chosen[behind]) == self._alike(there)
            ):  # fmt: skip
                new = behind
            else:
                new = last.get(there, alike.get(self._alike(there), -1))
            if new >= 0:
                found[i] = self.base[new] + issuer[i] - given.bounds[there]
        return found

    def _alike(self, piece: int) -> Kind:
        return self.given.shape(piece), self.given.body(piece, sizes=False)

    def _batches(self, batch: np.ndarray) -> np.ndarray:
        """Batches as they come, from 0: of messages those of the wanted schedule; no other one goes
        beyond its piece.
        """
        of_schedule = self.after.program.ops["batch"][self.scheduled]
        messages = self.given.pipeline[self.source]
        place = np.where(messages, -1, self.piece).tolist()
        numbers = np.where(messages, of_schedule, batch).tolist()
        found, known = np.full(len(batch), -1, dtype=np.int64), dict[tuple[int, int], int]()
        for i in np.flatnonzero(batch >= 0).tolist():
            found[i] = known.setdefault((place[i], numbers[i]), len(known))
        return found

    # -- memory -----------------------------------------------------------------------------------
    def _memory(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Changes of memory with storages of their own for every piece, which captured change each
        is, and bool [changes]: whether it comes with that one, earlier or later than captured.

        Tensors of messages go when Megatron's scheduler drops them (``message_buffers``).  What
        else is freed in another piece than it came to be in is the oldest that came to be in such a
        step, as what it says of itself, of that size: microbatches go through a chunk in order.
        What the end of the iteration frees of every microbatch, it frees of all of them.  Of
        others there are never more at once than were captured, but for those of more microbatches
        in flight.
        """
        given, old = self.given, self.given.program.allocations
        pieces_of_changes = given.piece_of(old["before"])
        births: dict[int, int] = {}  # storage -> the change that made it
        for change, storage in enumerate(old["storage"].tolist()):
            births.setdefault(storage, change)
        origins: dict[int, Kind] = {}
        for storage, birth in births.items():
            origins[storage] = self._origin(birth, int(pieces_of_changes[birth]))
        messages, drops = self._message_drops(births, origins)
        most, stays = self._most({s: kind for s, kind in origins.items() if s not in messages})

        # what the end of the iteration frees of every microbatch: origin -> the last such change
        last_step = max(given.steps, default=-1)
        freed_behind = (pieces_of_changes > last_step) & (old["bytes"] < 0)
        ends: dict[Kind, int] = {}
        for change in np.flatnonzero(freed_behind).tolist():
            ends[origins[int(old["storage"][change])]] = change

        made = _MadeStorages(old, messages, origins)
        first = np.append(np.searchsorted(old["before"], given.bounds[:-1]), len(old)).tolist()
        for piece, chosen in enumerate(self.chosen):
            new_of: dict[int, int] = {}  # captured storage -> the piece's own
            moved = int(self.base[piece] - given.bounds[chosen])
            for change in range(first[chosen], first[chosen + 1]):
                captured_before, storage, size, _ = made.captured[change]
                before, origin = captured_before + moved, origins[storage]
                made.drop_messages(before, change)
                # a message's tensor goes when the scheduler drops it, wherever its twin went
                if storage in messages:
                    if births[storage] == change:
                        made.receive(origin, before, change, drops[piece, storage])
                    else:
                        made.drop_message_with(origin, before, change)
                    continue
                queue = made.waiting[origin]
                if births[storage] == change:
                    new_of[storage] = made.begin(origin)
                elif storage not in new_of and not queue:
                    continue
                new = new_of.setdefault(storage, queue[0] if queue else -1)
                # it went early
                if size < 0 and made.live[new] <= 0:
                    continue
                made.change(origin, new, size, before, change)
                # with the last of its kind, or because there were never more of them
                gone: list[int] = []
                if ends.get(origin) == change:
                    gone = [*queue]
                elif origin not in ends and len(queue) > most[origin]:
                    gone = [queue[0]]
                if not stays[origin]:
                    for number in gone:
                        made.drop(origin, number, before, change)
        # the iteration keeps as many as the captured one
        end = len(self.source)
        made.drop_messages(end + 1, len(old) - 1)
        last_birth = {origins[storage]: birth for storage, birth in births.items()}
        for origin, queue in made.waiting.items():
            for number in [*queue][: max(0, len(queue) - stays[origin])]:
                made.drop(origin, number, end, last_birth[origin])
        return made.arrays()

    def _message_drops(
        self, births: Mapping[int, int], origins: Mapping[int, Kind]
    ) -> tuple[set[int], dict[tuple[int, int], int]]:
        """Find the tensors of messages that Megatron's schedule explains.

        Args:
            births: of every captured storage the change that made it.
            origins: of every captured storage what it is told apart by.

        Returns:
            Captured storages; (new piece, captured storage that comes in it) -> the new op before
            which it is dropped.
        """
        given, old = self.given, self.given.program.allocations
        order = given.order
        captured = self._placed(order, range(len(order)), given.bounds)
        buffers = MessageBuffers(given.program, origins, captured)
        if not buffers.followed:
            return set(), {}
        wanted = self._placed(self.after, self.chosen, self.base)

        # captured piece -> its tensors of messages, as they come
        tensors_of = defaultdict[int, list[int]](list)
        storages = sorted(buffers.kinds, key=births.__getitem__)
        pieces = given.piece_of(old["before"][[births[storage] for storage in storages]])
        for storage, piece in zip(storages, pieces.tolist(), strict=True):
            tensors_of[piece].append(storage)

        # the n-th tensor of a kind is that of the n-th event of the wanted schedule
        tensors: dict[str, list[tuple[int, int]]] = {kind: [] for kind in wanted.lives}
        for piece, chosen in enumerate(self.chosen):
            for storage in tensors_of.get(chosen, ()):
                tensors[buffers.kinds[storage]].append((piece, storage))
        messages: set[int] = set()
        drops: dict[tuple[int, int], int] = {}
        for kind, places in tensors.items():
            ends = buffers.drops(kind, wanted)
            # a piece that stands for another one has not the same tensors
            if len(ends) != len(places):
                continue
            messages |= {s for s in buffers.followed if buffers.kinds[s] == kind}
            for (piece, storage), end in zip(places, ends, strict=True):
                if storage in buffers.followed:
                    drops[piece, storage] = end
        return messages, drops

    def _placed(self, schedule: _Cut, pieces: Sequence[int], bounds: np.ndarray) -> PlacedSchedule:
        """Place the events of a schedule in the program that is made of captured pieces.

        Args:
            schedule: the schedule, cut.
            pieces: the captured piece of each piece of the schedule.
            bounds: where they begin in the program, and its end.
        """
        given = self.given
        names, captured_names = schedule.program.ops["name"], given.program.ops["name"]
        op_of_event: dict[int, int] = {}
        for piece, captured in enumerate(pieces):
            moved = int(bounds[piece] - given.bounds[captured])
            pairs = [*zip(schedule.talk[piece], given.talk[captured], strict=True)]
            # steps have waits of their own, which the scheduler does not know
            syncs, captured_syncs = schedule.syncs[piece], given.syncs[captured]
            if not schedule.is_step(piece) and np.array_equal(
                names[syncs], captured_names[captured_syncs]
            ):
                pairs += zip(syncs, captured_syncs, strict=True)
            for event, op in pairs:
                op_of_event[event] = op + moved
        return PlacedSchedule(
            schedule.program, schedule.bounds.tolist(), bounds.tolist(), schedule.steps, op_of_event
        )

    def _history(self, new: np.ndarray, changes: np.ndarray, early: np.ndarray) -> np.ndarray:
        """All requests since the process began: those before the iteration as captured, then those
        of ``new``, whose storages get numbers that no earlier one has.

        What a history has between two requests (the host waits, a stream uses a storage) comes with
        the one before it, and so do launches.
        """
        given, old = self.given.program.history, self.given.program.allocations
        at = np.flatnonzero(given[:, 1])
        start = len(old) - _equal_ends(given[at, :2], old[["storage", "bytes"]])
        if start == len(old):
            return given
        place = np.append(at[start - len(old) :], len(given))
        ends = np.append(given[place[:-1], 3], given[-1, 3])
        lives_on = np.full(1 + int(new["storage"].max()), -1)
        for storage, change in zip(new["storage"][::-1], changes[::-1], strict=True):
            lives_on[storage] = old["storage"][change] if change < start else -1
        fresh = 1 + max(int(given[:, 0].max()), int(old["storage"].max()))
        numbers = np.where(lives_on < 0, fresh + np.arange(len(lives_on)), lives_on)
        new["storage"] = numbers[new["storage"]]
        mine = changes >= start
        new, change, early = new[mine], changes[mine] - start, early[mine]
        lengths = np.where(early, 1, place[change + 1] - place[change])
        first = np.cumsum(lengths) - lengths
        source = np.repeat(place[change] - first, lengths) + np.arange(lengths.sum())
        found = given[source]
        launched = np.cumsum(took := np.where(early, 0, ends[change + 1] - ends[change])) - took
        found[:, 3] += np.repeat(launched + ends[0] - ends[change], lengths)
        found[first, 0], found[first, 1] = new["storage"], new["bytes"]
        last: dict[int, int] = {}  # captured storage -> the new one that stands for it now
        between = np.ones(len(found), dtype=bool)
        between[first] = False
        for i, storage in zip(range(len(found)), given[source, 0].tolist(), strict=True):
            if not between[i]:
                last[storage] = found[i, 0]
            elif storage in last:
                found[i, 0] = last[storage]
        return np.concatenate([given[: place[0]], found])

    def _origin(self, birth: int, piece: int) -> Kind:
        """What storages are told apart by: phases and chunks of the step in which they came to be,
        what they say of themselves, and their size.
        """
        row = self.given.program.allocations[birth]
        step = self.given.shape(piece) if self.given.is_step(piece) else ()
        return step, int(row["note"]), int(row["bytes"])

    def _most(self, origins: Mapping[int, Kind]) -> tuple[Counter[Kind], Counter[Kind]]:
        """How many storages of each origin there may be at once, and how many stay; where all of
        them stayed, any number.

        What microbatches have of other sizes (tokens of experts) is counted together.

        Args:
            origins: of the storages to count.
        """
        old = self.given.program.allocations
        bytes_left, alive_now, most = Counter[int](), Counter[Kind](), Counter[Kind]()
        for storage, size in zip(old["storage"].tolist(), old["bytes"].tolist(), strict=True):
            if storage not in origins:
                continue
            origin, bytes_before = origins[storage], bytes_left[storage]
            bytes_left[storage] += size
            came = (bytes_left[storage] > 0) - (bytes_before > 0)
            for key in (origin, origin[:2]):
                alive_now[key] += came
                most[key] = max(most[key], alive_now[key])

        # microbatches in flight beyond those of the captured schedule, by chunk
        in_flight, captured_in_flight = self.after.most_alive, self.given.most_alive
        more = {chunk: max(0, in_flight[chunk] - captured_in_flight[chunk]) for chunk in in_flight}
        for origin, born in Counter(origins.values()).items():
            step = cast("tuple[Member, ...]", origin[0])
            most[origin] = most[origin[:2] if step else origin]
            most[origin] += max((more[chunk] for _, chunk in step), default=more.get(None, 0))
            if alive_now[origin] == born:
                alive_now[origin] = len(self.source)
        return most, alive_now


class _MadeStorages:
    """The changes of memory of a new program, as they are made.

    captured : the captured changes
    live     : bytes of every new storage
    waiting  : new storages by origin, the oldest first; none of a message's tensors
    """

    def __init__(
        self, old: np.ndarray, messages: Collection[int], origins: Mapping[int, Kind]
    ) -> None:
        """Begin with nothing.

        Args:
            old: the captured changes.
            messages: captured storages that are messages' tensors.
            origins: of every captured storage what it is told apart by.
        """
        self.captured: list[tuple[int, int, int, int]] = old.tolist()
        self.live: list[int] = []
        self.waiting = defaultdict[Kind, deque[int]](deque)
        self._dtype = old.dtype
        self._rows: list[tuple[int, int, int, int, int, bool]] = []
        # messages' tensors to drop: (before, new storage, origin, captured change)
        self._pending: list[tuple[int, int, Kind, int]] = []
        # captured frees of messages' tensors, which say where among changes of one op they come
        self._frees = defaultdict[tuple[int, Kind], list[int]](list)
        for change, (before, storage, size, _) in enumerate(self.captured):
            if size < 0 and storage in messages:
                self._frees[before, origins[storage]].append(change)

    def begin(self, origin: Kind) -> int:
        """Make a storage, without bytes yet; returns its number."""
        number = len(self.live)
        self.live.append(0)
        self.waiting[origin].append(number)
        return number

    def change(self, origin: Kind, number: int, size: int, before: int, change: int) -> None:
        """Change a storage as a captured change does."""
        self._add(number, size, before, self.captured[change][3], change, False)
        if self.live[number] <= 0:
            self.waiting[origin].remove(number)

    def drop(self, origin: Kind, number: int, before: int, change: int) -> None:
        """Free a storage beside a captured change."""
        self._add(number, -self.live[number], before, 0, change, True)
        self.waiting[origin].remove(number)

    def receive(self, origin: Kind, before: int, change: int, end: int) -> None:
        """Make a message's tensor, which is dropped before op ``end`` (NEVER)."""
        number = len(self.live)
        self.live.append(0)
        _, _, size, note = self.captured[change]
        self._add(number, size, before, note, change, False)
        if end != NEVER:
            heapq.heappush(self._pending, (max(end, before), number, origin, change))

    def drop_messages(self, before: int, change: int) -> None:
        """Drop the messages' tensors that are gone as a captured change comes before an op.

        A tensor goes ahead of other changes before the same op, unless a captured one went behind.
        """
        while self._pending and self._pending[0][0] <= before:
            end, number, origin, birth = self._pending[0]
            captured_before = self.captured[change][0]
            frees = self._frees.get((captured_before, origin), ())
            if end == before and any(free >= change for free in frees):
                return
            heapq.heappop(self._pending)
            self._add(number, -self.live[number], end, 0, birth, True)

    def drop_message_with(self, origin: Kind, before: int, change: int) -> None:
        """Drop a message's tensor where a captured one went, if one goes before this op."""
        for place, (end, number, other, _) in enumerate(self._pending):
            if end == before and other == origin:
                self._add(number, -self.live[number], before, 0, change, False)
                del self._pending[place]
                heapq.heapify(self._pending)
                return

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Give the changes, the captured change of each, and whether it only stands beside it."""
        changes = np.array([row[:4] for row in self._rows], dtype=self._dtype)
        columns = np.array([row[4:] for row in self._rows], dtype=np.int64).reshape(-1, 2).T
        return changes, columns[0], columns[1].astype(bool)

    def _add(
        self, number: int, size: int, before: int, note: int, change: int, beside: bool
    ) -> None:
        self.live[number] += size
        self._rows.append((before, number, size, note, change, beside))
