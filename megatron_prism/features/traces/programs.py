"""Measured ranks -> programs with times, as a capture writes them.

In : Measured, one per traced rank.  Out: Imported: programs whose segments have samples of every
iteration and whose calls have their time on the wire.  The rank that comes last waits for
nobody, so the shortest of its members' times is the wire's; ranks of one node share a clock, and
there it is the time from the last one's coming to when they end, on average.  What a rank took
longer is skew.

What a trace does not say: the world's sizes follow from the names and members of its groups; ranks
without a trace run what the traced one of their stage does; calls of gloo name no group, and are
given the largest one whose members were all in the call at the same time, in every iteration.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_prism.core.errors import PrismError, ProgramError, UsageError, WorldError
from megatron_prism.core.groups import WORLD_GROUP, of_family
from megatron_prism.core.ops import CODE, IS_CALL, IS_PAIR, OP, UNKNOWN
from megatron_prism.core.program import Builder, Program, Programs
from megatron_prism.core.slices import SliceStore, stand_in_for
from megatron_prism.core.units import counted, format_ns
from megatron_prism.core.world import World, format_ranks
from megatron_prism.features.traces.events import Recorded, read_dumps, read_trace
from megatron_prism.features.traces.pairing import Pairing, pair
from megatron_prism.features.traces.timing import Call, Measured, Moment, measure
from megatron_prism.graph.classes import memberships
from megatron_prism.graph.issue_graph import COMPUTE, MEET, build_issue_graph
from megatron_prism.graph.world_graph import WorldGraph, build
from megatron_prism.replay.priced_graph import PricedGraph
from megatron_prism.replay.timeline import durations_of, evaluate

_TRACE = re.compile(r"\.(json|json\.gz|sqlite)$")
_SIZES = {
    "tp": "TENSOR_MODEL_PARALLEL_GROUP",
    "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
    "cp": "CONTEXT_PARALLEL_GROUP",
    "ep": "EXPERT_MODEL_PARALLEL_GROUP",
    "etp": "EXPERT_TENSOR_PARALLEL_GROUP",
}
_ENDS_AT_ONCE = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"}


@dataclass
class Imported:
    """A job out of its traces.

    measured : by rank, of the iterations that every traced rank has; programs.programs[i] is that
        of the i-th
    call_op  : per traced rank int64 [calls]: the op of every call in its program
    notes    : what did not align and what was inferred, in words
    busy     : per traced rank float64 [ops] ns in which the work of each segment ran, on average;
        beside a capture only
    wire     : float64 [iterations, matched calls] ns since all who are traced have come; nan: none
    skew     : per traced rank float64 [iterations, calls] ns that it waited for the others
    whole    : bool [matched calls]: every member is traced
    """

    graph: WorldGraph
    measured: list[Measured]
    call_op: list[np.ndarray]
    notes: list[str]
    busy: list[np.ndarray] = field(default_factory=list)
    wire: np.ndarray = field(default_factory=lambda: np.empty(0))
    skew: list[np.ndarray] = field(default_factory=list)
    whole: np.ndarray = field(default_factory=lambda: np.empty(0))

    @property
    def programs(self) -> Programs:
        return self.graph.programs

    @property
    def ranks(self) -> list[int]:
        return [program.rank for program in self.programs.programs]

    @property
    def numbers(self) -> list[int]:
        """Of the iterations."""
        return self.measured[0].numbers

    @property
    def computed(self) -> np.ndarray:
        """float64 [traced ranks, iterations] ns between calls."""
        return np.array([one.segments.sum(axis=1) for one in self.measured], dtype=float)

    @property
    def iteration_ns(self) -> np.ndarray:
        """Measured, float64 [iterations]: the mean over ranks of each."""
        return np.asarray(np.mean([one.totals for one in self.measured], axis=0))

    def replayed_ns(self, priced: PricedGraph) -> np.ndarray:
        """float64 [iterations]: each replayed with its own times, one after the other."""
        count = len(self.numbers)
        dag = build_issue_graph(priced.graph, count)
        durations = durations_of(dag, priced.prices)
        meets = np.flatnonzero(dag.kind == MEET)
        own_ns = self.wire[dag.iteration[meets], dag.op[meets]]
        durations[meets] = np.where(np.isnan(own_ns), durations[meets], np.nan_to_num(own_ns))
        for c, index in enumerate(priced.graph.classes.programs):
            nodes = np.flatnonzero((dag.kind == COMPUTE) & (dag.owner == c))
            program = self.programs.programs[index]
            own = np.zeros((count, len(program)), dtype=np.int64)
            own[:, program.ops["name"] == CODE["compute"]] = program.samples
            durations[nodes] = own[dag.iteration[nodes], dag.op[nodes]]
        _, end = evaluate(dag, durations)
        ends = [end[dag.iteration == row].max(initial=0) for row in range(count)]
        return np.diff([0, *ends]).astype(float)


# -- the world and its groups ---------------------------------------------------------------------
def _ranked(found: Sequence[Recorded]) -> list[Recorded]:
    """By rank; UsageError for two of one rank, or of two jobs."""
    if all(one.rank is None for one in found):
        for rank, one in enumerate(found):
            one.rank = rank
    by_rank, by_size = dict[int, Recorded](), dict[int, Recorded]()
    for one in found:
        if one.rank is None or one.rank < 0:
            raise UsageError(
                f"{one.path} does not say of which rank it is", fix="name it rank3.json.gz"
            )
        if (other := by_rank.setdefault(one.rank, one)) is not one:
            what = f"two traces are of rank {one.rank}: {other.path} and {one.path}"
            raise UsageError(what, fix="give the traces of one job, one per rank")
        if one.world:
            by_size[one.world] = one
    if len(by_size) > 1:
        first, second = (f"{by_size[n].path} of {counted(n, 'rank')}" for n in sorted(by_size)[:2])
        what = f"these are traces of two jobs: {first}, {second}"
        raise UsageError(what, fix="give the traces of one job")
    size = max(*by_size, 0, 1 + max(by_rank))
    if size > 1 << 24:
        what = f"{found[0].path} is of a world of {counted(size, 'rank')}"
        raise UsageError(what, fix="a real one")
    for rank, one in by_rank.items():
        one.world = size
        own = {name: group for name, group in one.groups.items() if rank in group[1]}
        one.groups = own or {"": (WORLD_GROUP, tuple(range(size)))}
        wrong = [r for _, ranks in one.groups.values() for r in ranks if not 0 <= r < size]
        if wrong:
            raise UsageError(f"{one.path} has a group with rank {wrong[0]} of {size}", fix="see it")
    return [one for _, one in sorted(by_rank.items())]


def _world(measured: Sequence[Measured]) -> World:
    """The sizes that the names of Megatron's groups tell; data parallel where they tell nothing."""
    groups = [group for one in measured for group in one.recorded.groups.values()]
    sizes = {
        axis: max((len(ranks) for desc, ranks in groups if desc == name), default=1)
        for axis, name in _SIZES.items()
    }
    size = measured[0].recorded.world
    try:
        return World(size, **sizes)  # type: ignore[arg-type]
    except WorldError:
        return World(size)


class _Names:
    """What groups are called in programs, and who is in those that the world does not give."""

    def __init__(self, measured: Sequence[Measured], world: World) -> None:
        self.world = world
        self.named: list[dict[str, str]] = []  # per rank: torch's name -> ours
        self.members: list[dict[str, tuple[int, ...]]] = []  # per rank: our name -> members
        lists: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        for one in measured:
            descs = Counter(desc for desc, ranks in one.recorded.groups.values() if len(ranks) > 1)
            named, members = dict[str, str](), dict[str, tuple[int, ...]]()
            for key, (desc, ranks) in one.recorded.groups.items():
                name = desc if desc not in ("", "undefined") and descs[desc] <= 1 else ""
                if not name:
                    shape = _shape(ranks, world.size)
                    others = (f"{shape}_{again}" for again in itertools.count(2))
                    name = next(n for n in itertools.chain((shape,), others) if n not in members)
                named[key] = name = re.sub(r"[\s\"#=]", "_", name)
                members[name] = tuple(ranks)
                if len(ranks) > 1:
                    lists[name].add(tuple(ranks))
            self.named.append(named)
            self.members.append(members)
        self.lists = {
            name: found for name, some in lists.items() if (found := self._all(name, some))
        }

    def _all(self, name: str, some: set[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        """Every group of that name; none if the world gives them."""
        try:
            family = of_family(self.world, name)
            if all(set(family.group(ranks[0]).tolist()) == set(ranks) for ranks in some):
                return ()
        except PrismError:
            pass
        size, first = self.world.size, min(some)
        step = first[1] - first[0]
        block = len(first) * step
        if size % block == 0 and all(b - a == step for a, b in zip(first, first[1:], strict=False)):
            tiled = {
                tuple(range(start + at, start + at + block, step))
                for start in range(0, size, block)
                for at in range(step)
            }
            if some <= tiled:
                return tuple(sorted(tiled))
        return tuple(sorted(some))


def _shape(ranks: Sequence[int], size: int) -> str:
    """A name for a group that has none: by how its ranks lie."""
    if len(ranks) == size:
        return WORLD_GROUP
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return f"group_of_{len(ranks)}" + (f"_every_{step}" if step > 1 else "")


# -- groups that the trace does not name ----------------------------------------------------------
def _guess_groups(measured: list[Measured], names: _Names, notes: list[str]) -> list[list[str]]:
    """Per rank and call the group; inferred where the trace has none: the largest that fits all
    calls of a kind, else the largest that fits this one.
    """
    where = {one.recorded.rank: one for one in measured}
    guessed, found = Counter[str](), []
    for i, one in enumerate(measured):
        groups = [names.named[i].get(call.group, "") for call in one.calls]
        found.append(groups)
        largest = sorted(names.members[i].items(), key=lambda item: -len(item[1]))
        by_key: dict[object, list[int]] = defaultdict(list)
        for k, call in enumerate(one.calls):
            if not call.group or not groups[k]:
                by_key[call.key].append(k)
        for places in by_key.values():
            fits = {name: _feasible(where, one, ranks, places) for name, ranks in largest}
            whole = [name for name, fitting in fits.items() if fitting.all()]
            for at, k in enumerate(places):
                own = whole or [name for name, fitting in fits.items() if fitting[at]]
                if not own:
                    what = (
                        f"rank {one.recorded.rank}: call {k}, {one.calls[k]}, is of no known group"
                    )
                    fix = "the traces of all ranks, or a capture of the job: --slices DIR"
                    raise PrismError(what, fix=fix)
                groups[k] = own[0]
                guessed[own[0]] += 1
    if guessed:
        counts = ", ".join(f"{count} in {name}" for name, count in guessed.most_common())
        how = "inferred from who was in a call at once"
        notes.append(f"the traces name no groups: {how} ({counts})")
    return found


def _feasible(
    where: Mapping[int | None, Measured], own: Measured, ranks: Sequence[int], places: list[int]
) -> np.ndarray:
    """bool [places]: whether the members of a group may have made these calls of one kind
    together.
    """
    call, yes = own.calls[places[0]], np.ones(len(places), bool)
    rank = own.recorded.rank or 0
    if call.op in ("send", "recv"):
        if not 0 <= call.peer < len(ranks) or ranks[call.peer] == rank:
            return ~yes
        if (other := where.get(ranks[call.peer])) is None:
            return yes
        back = "recv" if call.op == "send" else "send", ranks.index(rank)
        return yes & (sum((c.op, c.peer) == back for c in other.calls) >= len(places))
    if any(rank not in where for rank in ranks):
        return yes & (len(ranks) == own.recorded.world)
    spans = []
    for one in (where[rank] for rank in ranks):
        alike = [k for k, c in enumerate(one.calls) if c.key == call.key]
        if len(alike) != len(places):
            return ~yes
        spans.append((one.begun[:, alike], one.done[:, alike]))
    begun, done = (np.array(times) for times in zip(*spans, strict=True))
    return np.asarray((begun.max(axis=0) <= done.min(axis=0)).all(axis=0))


# -- programs -------------------------------------------------------------------------------------
def _program(
    one: Measured, groups: Sequence[str], members: Mapping[str, tuple[int, ...]]
) -> tuple[Program, np.ndarray]:
    """A program with the times of its segments, and the op of every call."""
    rank = one.recorded.rank or 0
    builder, where = Builder(), np.full(len(one.calls), -1, dtype=np.int64)
    kept = one.segments.max(axis=0, initial=0) > 0
    tokens = one.tokens
    at_once = {
        a.of
        for a, b in zip(tokens, tokens[1:], strict=False)
        if a.kind == "call" and b.kind == "wait" and a.of == b.of
    }
    typical = np.rint(one.segments.mean(axis=0)).astype(np.int64)
    for token in tokens:
        if token.kind == "segment":
            if kept[token.of]:
                builder.add("compute", ns=int(typical[token.of]))
        elif token.kind == "wait":
            if token.of not in at_once:
                builder.add("wait", handle=int(where[token.of]))
        else:
            call, name = one.calls[token.of], groups[token.of]
            place = members[name].index(rank)
            if call.op in ("send", "recv") and not 0 <= call.peer < len(members[name]):
                what = f"{one.recorded.path} does not say who rank {rank}'s peer is in {call}"
                raise PrismError(what, fix="profile with record_shapes=True")
            where[token.of] = len(builder)
            handle = -1 if token.of in at_once else len(builder)
            peer = (call.peer - place) % len(members[name]) if call.peer >= 0 else 0
            sizes = {"num_in": call.num_in, "num_out": call.num_out}
            places = {"peer": peer, "root": call.root, "handle": handle, "batch": call.batch}
            builder.add(call.op, group=name, dtype=call.dtype, **sizes, **places)
    builder.add("mark", note=f"rank {rank}'s own times")  # ranks that run the same stay apart
    samples = one.segments[:, kept]
    return dataclasses.replace(builder.build(rank), samples=samples), where


def assemble(measured: Sequence[Measured]) -> Imported:
    """A job out of its measured ranks.

    Raises:
        UsageError: the traces are of two jobs, or of one rank twice.
        PrismError: their calls do not fit together, with the first place.
    """
    _ranked([one.recorded for one in measured])
    ranked = _shared(sorted(measured, key=lambda one: one.recorded.rank or 0))
    notes = [f"rank {one.recorded.rank}: {note}" for one in ranked for note in one.notes]
    world = _world(ranked)
    if len(ranked) < world.size:
        traced = format_ranks([one.recorded.rank or 0 for one in ranked])
        whom = f"{len(ranked)} of {counted(world.size, 'rank')} traced ({traced})"
        notes.append(f"{whom}: they stand for the rest")
    names = _Names(ranked, world)
    groups = _guess_groups(ranked, names, notes)
    found = _joined(ranked, world, names, groups, notes)
    dag = build_issue_graph(found.graph)
    if len(dag.order) < len(dag):  # somebody waits forever
        for one in ranked:
            one.tokens = [t for t in one.tokens if t.kind != "wait" or one.calls[t.of].op != "send"]
        notes.append("sends end without their receivers here: the job would hang if they waited")
        found = _joined(ranked, world, names, groups, notes)
    return _with_wire(found)


def _shared(measured: Sequence[Measured]) -> list[Measured]:
    """The iterations that all ranks have; times begin with the first call, as ns since 1970 would
    be rounded to 256 as floating-point numbers.
    """
    numbers = sorted(set.intersection(*(set(one.numbers) for one in measured)))
    if not numbers:
        one = measured[0]
        what = f"no iteration is in all traces: rank {one.recorded.rank} has {one.numbers[0]} to "
        fix = "profile the same iterations on every rank"
        raise UsageError(f"{what}{one.numbers[-1]}", fix=fix)
    origin = min((int(one.begun.min()) for one in measured if one.begun.size), default=0)
    return [one.part(numbers, origin) for one in measured]


def _joined(
    ranked: list[Measured], world: World, names: _Names, groups: list[list[str]], notes: list[str]
) -> Imported:
    """The programs, and who meets whom."""
    made = [_program(one, groups[i], names.members[i]) for i, one in enumerate(ranked)]
    programs, call_op = tuple(program for program, _ in made), [calls for _, calls in made]
    used = {name for program in programs for name in program.groups()}
    of = stand_in_for(world, [program.rank for program in programs])
    source = {"from": "traces", "device": _device(one.recorded for one in ranked)}
    lists = {name: ranks for name, ranks in names.lists.items() if name in used}
    graph = build(Programs(world, programs, of, lists, source))
    fix = "profile the same iterations on every rank; without groups (gloo): --slices DIR"
    graph.check_fits(fix)
    return Imported(graph, ranked, call_op, notes)


def _device(found: Iterable[Recorded]) -> str:
    """What ran, as far as the traces say."""
    names = [one.gpu or ("a GPU" if len(one.device) else "cpu") for one in found]
    return max(names, key=len)


def _with_wire(found: Imported) -> Imported:
    """Fill in what calls took on the wire and who waited; the programs' calls get it as ``ns``."""
    measured, graph = found.measured, found.graph
    at = [
        graph.matched_calls.of[int(graph.classes.of[program.rank])][found.call_op[index]]
        for index, program in enumerate(found.programs.programs)
    ]
    times = [_one_by_one(found, index) for index in range(len(measured))]
    _wire(found, at, times)
    least = found.wire if found.whole.all() else _fastest(found, found.wire, at)
    found.skew = [
        np.maximum(0.0, one.took - least[:, of]) for one, of in zip(times, at, strict=True)
    ]
    _keep_ns(found)
    return found


class _Times(NamedTuple):
    """Of the calls of a rank, float64 [iterations, calls] ns: when it came to each, when the group
    was free, when the call had ended and how long it took.
    """

    came: np.ndarray
    freed: np.ndarray
    done: np.ndarray
    took: np.ndarray


def _one_by_one(found: Imported, index: int) -> _Times:
    """Let the calls of a group begin when the one before has ended at the earliest: one after the
    other, as NCCL's; gloo has threads.
    """
    one = found.measured[index]
    came = one.begun.astype(float)
    freed = np.zeros_like(came)
    groups = found.programs.programs[index].ops["group"][found.call_op[index]]
    for group in np.unique(groups).tolist():
        mine = np.flatnonzero(groups == group)
        over = np.maximum.accumulate(one.done[:, mine], axis=1)
        freed[:, mine[1:]] = over[:, :-1]
        one.begun[:, mine[1:]] = np.maximum(one.begun[:, mine[1:]], over[:, :-1])
        one.done[:, mine] = over
    return _Times(came, freed, one.done.astype(float), (one.done - one.begun).astype(float))


def _wire(found: Imported, at: Sequence[np.ndarray], times: Sequence[_Times]) -> None:
    """Fill in ``wire`` and ``whole``; ``at``: of every call of a rank its matched call."""
    graph, meet = found.graph, found.graph.matched_calls
    clocks = _set_clocks(found, at)
    wire = np.full((len(found.numbers), len(meet)), np.nan)
    last, free, ends = (np.zeros_like(wire) for _ in range(3))
    members = np.zeros(len(meet), dtype=np.int64)
    size = np.ones(len(meet), dtype=np.int64)
    one_clock, clock = np.ones(len(meet), bool), np.full(len(meet), -1)
    for index, program in enumerate(found.programs.programs):
        of, (same, moved) = at[index], clocks[index]
        came, freed, done, took = times[index]
        wire[:, of] = np.fmin(wire[:, of], took)
        last[:, of] = np.maximum(last[:, of], came + moved)
        free[:, of] += freed + moved
        ends[:, of] += done + moved
        np.add.at(members, of, 1)
        one_clock[of] &= (clock[of] < 0) | (clock[of] == same)
        clock[of] = same
        c = int(graph.classes.of[program.rank])
        for name, ops in program.groups().items():
            count = len(graph.groups[name].group(program.rank))
            pairs = IS_PAIR[program.ops["name"][ops]]
            size[meet.of[c][ops]] = np.where(pairs, 2, count)
    found.whole = members >= size
    shown = np.maximum(1, members)
    together = ends / shown - np.maximum(last, free / shown)
    found.wire = np.where(found.whole & one_clock, np.maximum(wire, together), wire)


def _keep_ns(found: Imported) -> None:
    """Give calls of the programs what they typically took on the wire."""
    meet, graph = found.graph.matched_calls, found.graph
    known = ~np.isnan(found.wire).all(axis=0)
    typical = np.full(len(meet), np.nan)
    typical[known] = np.rint(np.nanmean(found.wire[:, known], axis=0))
    for c, index in enumerate(graph.classes.programs):
        ops = graph.programs.programs[index].ops
        calls = np.flatnonzero(IS_CALL[ops["name"]])
        value = typical[meet.of[c][calls]]
        ops["ns"][calls] = np.where(np.isnan(value), -1, np.nan_to_num(value)).astype(np.int64)


class _Clock(NamedTuple):
    """Of a rank's node.

    same  : number of the nodes that were set by each other
    moved : float64 [iterations, 1] ns that its times are moved by in each iteration
    """

    same: int
    moved: np.ndarray


def _set_clocks(found: Imported, at: Sequence[np.ndarray]) -> list[_Clock]:
    """Clocks of all traced ranks, those of different nodes set by when their collectives end.

    A collective that every member has a part of the result of is assumed to end at once on all of
    them, and a clock to run evenly for an iteration: the median of a node's differences in it is
    how far its clock is off.  Nodes that share no collective keep their own.
    """
    nodes = [one.recorded.node or one.recorded.path for one in found.measured]
    ends: dict[str, dict[int, np.ndarray]] = {node: {} for node in nodes}
    for index, one in enumerate(found.measured):
        for k, call in enumerate(one.calls):
            if call.op in _ENDS_AT_ONCE:
                ends[nodes[index]].setdefault(int(at[index][k]), one.done[:, k].astype(float))
    still = np.zeros((len(found.numbers), 1))
    clocks: dict[str, _Clock] = {}
    off = list[float]()
    for first in ends:
        if first not in clocks:
            clocks[first] = _Clock(len(clocks), still)
            known = [first]
            for by in known:  # it grows
                for node in [one for one in ends if one not in clocks]:
                    both = sorted(ends[node].keys() & ends[by].keys())
                    if both:
                        apart = np.stack([ends[by][m] - ends[node][m] for m in both], axis=1)
                        apart += clocks[by].moved
                        moved = np.median(apart, axis=1, keepdims=True)
                        clocks[node] = _Clock(clocks[by].same, moved)
                        known.append(node)
                        off += np.abs(apart - moved).ravel().tolist()
    if off:
        found.notes.append(
            f"the clocks of {len(clocks)} nodes are set so that their collectives end at once, "
            f"in each iteration; half of the ends are within {format_ns(round(np.median(off)))}"
        )
    return [clocks[node] for node in nodes]


def _fastest(found: Imported, wire: np.ndarray, at: Sequence[np.ndarray]) -> np.ndarray:
    """``wire``, but where members are not traced the fastest of equal calls."""
    pools: dict[object, list[int]] = defaultdict(list)
    for i, one in enumerate(found.measured):
        for k, call in enumerate(one.calls):
            known = min(call.num_in, call.num_out) >= 0 and call.op != "all_to_all"
            if not found.whole[at[i][k]]:
                pools[call.key if known else (i, k)].append(int(at[i][k]))
    least = wire.copy()
    for numbers in pools.values():
        least[:, numbers] = np.nanmin(wire[:, numbers])
    found.notes.append(
        f"{int((~found.whole).sum()):,} calls have members without a trace: what these calls take "
        "has waiting for those members in it; what exceeds the fastest of equal calls is shown so"
    )
    return least


# -- beside a capture ------------------------------------------------------------------------------
class Beside:
    """A traced rank beside its captured program, which says what waits for what.

    pairing : which of its calls are which captured ones
    slots   : of every segment, its op
    """

    def __init__(self, program: Program, one: Recorded, members: Mapping[str, int]) -> None:
        self.program = program
        self.members = members
        self.slots: list[int] = []
        self.pairing: Pairing
        self.measured = measure(one, self.plan)

    def plan(self, calls: Sequence[Call]) -> tuple[list[int], list[Moment]]:
        """The calls that the capture has, too, and what happens in which order."""
        ops, names = self.program.ops, self.program.ops["name"]
        self.pairing = pair(self.program, self.members, calls)
        at = {op: number for number, (op, _) in enumerate(self.pairing.pairs)}
        call_of: dict[int, int] = {}  # handle -> call
        tokens: list[Moment] = []
        for op, (name, handle) in enumerate(
            zip(names.tolist(), ops["handle"].tolist(), strict=True)
        ):
            if name == CODE["compute"]:
                tokens.append(Moment("segment", len(self.slots)))
                self.slots.append(op)
            elif op in at:
                tokens.append(Moment("call", at[op]))
                if handle < 0:
                    tokens.append(Moment("wait", at[op]))
                call_of[handle] = at[op]
            elif name == CODE["wait"] and handle in call_of:
                tokens.append(Moment("wait", call_of[handle]))
        return [call for _, call in self.pairing.pairs], tokens

    def finished(self) -> tuple[Program, np.ndarray, np.ndarray]:
        """The captured program with the traced times, the op of every call, and float64 [ops] ns in
        which the work of each segment ran.
        """
        one, ops = self.measured, self.program.ops
        cost = np.where(
            ops["ns"] > 0,
            ops["ns"].astype(float),
            np.maximum(ops["flops"], 0) / 5e5 + np.maximum(ops["traffic"], 0) / 3e3,
        )
        weight = np.maximum(cost[self.slots], 1.0)
        both, run = np.stack([one.segments, one.busy]).astype(float), list[int]()
        for token in [*one.tokens, Moment("call", -1)]:
            if token.kind == "segment":
                run.append(token.of)
                continue
            if len(run) > 1:  # nothing of the trace tells these apart: as the capture has them
                part = weight[run] / weight[run].sum()
                both[..., run] = both[..., run].sum(axis=-1, keepdims=True) * part
            run = []
        samples = np.rint(both[0]).astype(np.int64)
        busy = np.zeros(len(ops) + 1)
        busy[self.slots] = both[1].mean(axis=0)
        row = np.zeros(1, dtype=OP)
        for name in UNKNOWN:
            row[name] = -1
        row["name"], row["note"] = CODE["mark"], len(self.program.strings)
        made = np.concatenate([ops, row])
        made["ns"][self.slots] = np.rint(samples.mean(axis=0)).astype(np.int64)
        for name in ("host", "lead", "products"):  # the traced times have the host's delays in them
            made[name] = -1
        strings = (*self.program.strings, f"rank {self.program.rank}'s own times")
        hosts = np.empty(0, np.int64)
        program = dataclasses.replace(
            self.program, ops=made, strings=strings, samples=samples, hosts=hosts
        )
        return program, np.array([op for op, _ in self.pairing.pairs], dtype=np.int64), busy


@dataclass
class Paired:
    """Traced ranks, by rank, beside the captured programs of their job."""

    captured: Programs
    ranks: list[Beside]

    def imported(self) -> Imported:
        """The captured programs with the traced times.

        Raises:
            UsageError: a stage has no traced rank.
            PrismError: half of a rank's calls or more have no counterpart.
        """
        measured = _shared([one.measured for one in self.ranks])
        notes, finished = list[str](), list[tuple[Program, np.ndarray, np.ndarray]]()
        for one, part in zip(self.ranks, measured, strict=True):
            one.measured = part
            if one.pairing.share < 0.5:
                fix = "capture the job that was traced, with the same arguments"
                raise PrismError(str(one.pairing), fix=fix)
            if one.pairing.share < 1:
                how = "captured calls without a counterpart are modelled, traced ones"
                notes.append(f"{one.pairing}; {how} count as computing")
            notes += [f"rank {one.pairing.rank}: {note}" for note in one.measured.notes]
            finished.append(one.finished())
        programs, call_op, busy = (list(column) for column in zip(*finished, strict=True))
        captured, world = self.captured, self.captured.world
        try:
            of = stand_in_for(world, [program.rank for program in programs])
        except ProgramError as error:
            what = "a stage of the pipeline has no traced rank"
            raise UsageError(what, fix="trace one rank of every stage: --profile-ranks") from error
        device = _device(one.recorded for one in measured)
        source = {**captured.source, "from": "traces", "device": device}
        graph = build(Programs(world, tuple(programs), of, captured.groups, source))
        graph.check_fits()
        return _with_wire(Imported(graph, measured, call_op, notes, busy))


def paired(paths: Sequence[str | os.PathLike[str]], captured: Programs) -> Paired:
    """The traces of one job beside its captured programs.

    Raises:
        UsageError: a file is no trace, or they are of another job than ``captured``.
    """
    found, world = _recorded(paths), captured.world
    if wrong := [one for one in found if one.world not in (0, world.size)]:
        there = counted(wrong[0].world, "rank")
        what = f"{wrong[0].path} is of a job of {there}, the slices of {world.size:,}"
        raise UsageError(what, fix="name the slices of the job that was traced")
    found[0].world = world.size
    groups = memberships(captured)
    ranks = []
    for one in _ranked(found):
        rank = world.check_rank(one.rank or 0)
        members = {name: len(group.group(rank)) for name, group in groups.items()}
        ranks.append(Beside(dataclasses.replace(captured.of(rank), rank=rank), one, members))
    return Paired(captured, ranks)


# -- a job ----------------------------------------------------------------------------------------
def import_traces(
    paths: Sequence[str | os.PathLike[str]], captured: Programs | None = None
) -> Imported:
    """Read the traces of one job: files, or folders of them.

    Args:
        paths: the files or folders.
        captured: the same job's programs, which say what it does (groups, waits, phases) while the
            traces say how long; None: what it does is inferred from the traces.

    Raises:
        UsageError: a file is no trace, or they are of two jobs.
        PrismError: their calls do not fit together, or are not those of ``captured``.
    """
    if captured is not None:
        return paired(paths, captured).imported()
    return assemble([measure(one) for one in _recorded(paths)])


def _recorded(paths: Sequence[str | os.PathLike[str]]) -> list[Recorded]:
    """Every rank in these files and folders."""
    found: list[Recorded] = []
    for path in map(Path, paths):
        files = [path]
        if path.is_dir():
            files = sorted(p for p in path.iterdir() if _TRACE.search(p.name))
            found += [] if files else read_dumps(path)
        found += [one for file in files for one in read_trace(file)]
    return found


def write(found: Imported, folder: Path, *, force: bool = False) -> None:
    """Keep a job as slices in ``folder``.  UsageError if other things are there."""
    programs = found.programs
    store = SliceStore(folder, programs.world, programs.source)
    store.prepare(force)
    if (taken := store.ranks()) and not force:
        what = f"{folder} holds slices already, of ranks {format_ranks(taken)}"
        raise UsageError(what, fix="name another folder with -o DIR, or replace them with --force")
    for program in programs.programs:
        store.put(program, programs.groups)
