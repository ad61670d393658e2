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
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_prism.core.errors import PrismError, ProgramError, UsageError, WorldError
from megatron_prism.core.groups import WORLD_GROUP, of_family
from megatron_prism.core.programs.ops import CODE, IS_CALL, IS_PAIR, OP, UNKNOWN
from megatron_prism.core.programs.program import Builder, Program, Programs
from megatron_prism.core.programs.slices import SliceStore, stand_in_for
from megatron_prism.core.units import counted, format_ns
from megatron_prism.core.world import World, format_ranks
from megatron_prism.features.traces.events import Groups, Recorded, read_dumps, read_trace
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
_MOST_RANKS = 1 << 24
_MESSAGES = ("send", "recv")
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
        return np.array([rank.segments.sum(axis=1) for rank in self.measured], dtype=float)

    @property
    def iteration_ns(self) -> np.ndarray:
        """Measured, float64 [iterations]: the mean over ranks of each."""
        return np.asarray(np.mean([rank.totals for rank in self.measured], axis=0))

    def replayed_ns(self, priced: PricedGraph) -> np.ndarray:
        """float64 [iterations]: each replayed with its own times, one after the other."""
        count = len(self.numbers)
        issue_graph = build_issue_graph(priced.graph, count)
        durations = durations_of(issue_graph, priced.prices)

        # calls take what they took on the wire, those without a time what is modelled
        meets = np.flatnonzero(issue_graph.kind == MEET)
        wire_ns = self.wire[issue_graph.iteration[meets], issue_graph.op[meets]]
        has_time = ~np.isnan(wire_ns)
        durations[meets[has_time]] = wire_ns[has_time]

        # segments take what they took in the iteration
        for class_number, index in enumerate(priced.graph.classes.programs):
            is_own = (issue_graph.kind == COMPUTE) & (issue_graph.owner == class_number)
            nodes = np.flatnonzero(is_own)
            program = self.programs.programs[index]
            segment_ns = np.zeros((count, len(program)), dtype=np.int64)
            segment_ns[:, program.ops["name"] == CODE["compute"]] = program.samples
            durations[nodes] = segment_ns[issue_graph.iteration[nodes], issue_graph.op[nodes]]

        _, node_ends = evaluate(issue_graph, durations)
        ends = [0]
        for iteration in range(count):
            ends.append(node_ends[issue_graph.iteration == iteration].max(initial=0))
        return np.diff(ends).astype(float)


# -- the world and its groups ---------------------------------------------------------------------
def _ranked(recorded: Sequence[Recorded]) -> list[Recorded]:
    """Sort by rank; each gets the size of the world and the groups it is in.

    Raises:
        UsageError: two of one rank, or of two jobs.
    """
    by_rank = _by_rank(recorded)
    by_size = {trace.world: trace for trace in recorded if trace.world}
    if len(by_size) > 1:
        smaller, larger = sorted(by_size)[:2]
        first = f"{by_size[smaller].path} of {counted(smaller, 'rank')}"
        second = f"{by_size[larger].path} of {counted(larger, 'rank')}"
        message = f"these are traces of two jobs: {first}, {second}"
        raise UsageError(message, fix="give the traces of one job")

    # the largest rank says how large the world is at least
    size = max(*by_size, 0, 1 + max(by_rank))
    if size > _MOST_RANKS:
        message = f"{recorded[0].path} is of a world of {counted(size, 'rank')}"
        raise UsageError(message, fix="a real one")
    for rank, trace in by_rank.items():
        trace.world = size
        groups = {name: group for name, group in trace.groups.items() if rank in group[1]}
        # a trace that names no group has the world alone
        trace.groups = groups or {"": (WORLD_GROUP, tuple(range(size)))}
        _check_members(trace)
    return [trace for _, trace in sorted(by_rank.items())]


def _by_rank(recorded: Sequence[Recorded]) -> dict[int, Recorded]:
    """Return the traces by rank; where none says its rank, they are numbered."""
    if all(trace.rank is None for trace in recorded):
        for rank, trace in enumerate(recorded):
            trace.rank = rank
    by_rank: dict[int, Recorded] = {}
    for trace in recorded:
        if trace.rank is None or trace.rank < 0:
            message = f"{trace.path} does not say of which rank it is"
            raise UsageError(message, fix="name it rank3.json.gz")
        if trace.rank in by_rank:
            paths = f"{by_rank[trace.rank].path} and {trace.path}"
            message = f"two traces are of rank {trace.rank}: {paths}"
            raise UsageError(message, fix="give the traces of one job, one per rank")
        by_rank[trace.rank] = trace
    return by_rank


def _check_members(trace: Recorded) -> None:
    """Refuse groups with ranks that the world does not have."""
    for _, ranks in trace.groups.values():
        for rank in ranks:
            if not 0 <= rank < trace.world:
                message = f"{trace.path} has a group with rank {rank} of {trace.world}"
                raise UsageError(message, fix="see it")


def _world(measured: Sequence[Measured]) -> World:
    """Return the sizes that the names of Megatron's groups tell; without names all is dp."""
    sizes = dict.fromkeys(_SIZES, 1)
    for axis, name in _SIZES.items():
        for rank in measured:
            for desc, ranks in rank.recorded.groups.values():
                if desc == name:
                    sizes[axis] = max(sizes[axis], len(ranks))
    size = measured[0].recorded.world
    try:
        return World(size, **sizes)  # type: ignore[arg-type]
    except WorldError:
        return World(size)


_Ranks = tuple[int, ...]


class _Names:
    """What groups are called in programs, and who is in those that the world does not give.

    named   : per rank: torch's name -> ours
    members : per rank: our name -> members
    lists   : our name -> all groups of that name
    """

    def __init__(self, measured: Sequence[Measured], world: World) -> None:
        self.world = world
        self.named: list[dict[str, str]] = []
        self.members: list[dict[str, _Ranks]] = []
        traced_groups: dict[str, set[_Ranks]] = defaultdict(set)
        for rank in measured:
            named, members = self._of_rank(rank.recorded.groups)
            self.named.append(named)
            self.members.append(members)
            for name, ranks in members.items():
                if len(ranks) > 1:
                    traced_groups[name].add(ranks)

        # groups that do not follow from the sizes of the world are listed
        self.lists: dict[str, tuple[_Ranks, ...]] = {}
        for name, groups in traced_groups.items():
            if not self._is_family(name, groups):
                self.lists[name] = _tiled(groups, world.size)

    def _of_rank(self, groups: Groups) -> tuple[dict[str, str], dict[str, _Ranks]]:
        """Name the groups of one rank."""
        descs = Counter(desc for desc, ranks in groups.values() if len(ranks) > 1)
        named: dict[str, str] = {}
        members: dict[str, _Ranks] = {}
        for torch_name, (desc, ranks) in groups.items():
            name = desc
            # a description that says nothing, or that several groups have
            if desc in ("", "undefined") or descs[desc] > 1:
                name = self._unused_shape(ranks, members)
            name = re.sub(r"[\s\"#=]", "_", name)
            named[torch_name] = name
            members[name] = tuple(ranks)
        return named, members

    def _unused_shape(self, ranks: Sequence[int], used: Mapping[str, _Ranks]) -> str:
        """Name a group by how its ranks lie, with a number where that name is used."""
        shape = _shape(ranks, self.world.size)
        name = shape
        for number in itertools.count(2):
            if name not in used:
                break
            name = f"{shape}_{number}"
        return name

    def _is_family(self, name: str, groups: set[_Ranks]) -> bool:
        """Whether the world gives the groups of that name, and they are those of the traces."""
        try:
            family = of_family(self.world, name)
            return all(set(family.group(ranks[0]).tolist()) == set(ranks) for ranks in groups)
        except PrismError:
            return False


def _tiled(groups: set[_Ranks], size: int) -> tuple[_Ranks, ...]:
    """Return every group of a name: ``groups``, and their like in the rest of the world.

    Args:
        groups: those of traced ranks.
        size: of the world.
    """
    first = min(groups)
    step = first[1] - first[0]
    block = len(first) * step
    is_even = all(b - a == step for a, b in itertools.pairwise(first))
    if is_even and size % block == 0:
        tiles: set[_Ranks] = set()
        for start in range(0, size, block):
            for offset in range(step):
                tiles.add(tuple(range(start + offset, start + offset + block, step)))
        if groups <= tiles:
            return tuple(sorted(tiles))
    return tuple(sorted(groups))


def _shape(ranks: Sequence[int], size: int) -> str:
    """Return a name for a group that has none: by how its ranks lie."""
    if len(ranks) == size:
        return WORLD_GROUP
    shape = f"group_of_{len(ranks)}"
    # evenly spaced ranks are named by their distance
    if len(ranks) > 1:
        step = ranks[1] - ranks[0]
        if step > 1:
            shape += f"_every_{step}"
    return shape


# -- groups that the trace does not name ----------------------------------------------------------
def _guess_groups(measured: list[Measured], names: _Names, notes: list[str]) -> list[list[str]]:
    """Return per rank and call the group.

    Where the trace has none it is inferred: the largest that fits all calls of a kind, else the
    largest that fits this one.
    """
    traced = {rank.recorded.rank: rank for rank in measured}
    num_guessed = Counter[str]()
    groups_of_ranks = []
    for i, rank in enumerate(measured):
        groups = [names.named[i].get(call.group, "") for call in rank.calls]
        groups_of_ranks.append(groups)
        # calls of one kind without a group
        places_by_key: dict[object, list[int]] = defaultdict(list)
        for k, call in enumerate(rank.calls):
            if not call.group or not groups[k]:
                places_by_key[call.key].append(k)
        for places in places_by_key.values():
            guesses = _guesses(traced, rank, names.members[i], places)
            num_guessed.update(guesses)
            for k, group in zip(places, guesses, strict=True):
                groups[k] = group
    if num_guessed:
        counts = ", ".join(f"{count} in {name}" for name, count in num_guessed.most_common())
        how = "inferred from who was in a call at once"
        notes.append(f"the traces name no groups: {how} ({counts})")
    return groups_of_ranks


def _guesses(
    traced: Mapping[int | None, Measured],
    rank: Measured,
    members: Mapping[str, _Ranks],
    places: list[int],
) -> list[str]:
    """Return the group of each call in ``places``, which are of one kind.

    Raises:
        PrismError: a call fits no group.
    """
    fits: dict[str, np.ndarray] = {}
    largest_first = sorted(members.items(), key=lambda item: -len(item[1]))
    for name, ranks in largest_first:
        fits[name] = _feasible(traced, rank, ranks, places)
    # a group that fits all calls
    for name, fitting in fits.items():
        if fitting.all():
            return [name] * len(places)

    # else one for each
    guesses = []
    for number, k in enumerate(places):
        fitting_names = [name for name, fitting in fits.items() if fitting[number]]
        if not fitting_names:
            call = f"call {k}, {rank.calls[k]}"
            message = f"rank {rank.recorded.rank}: {call}, is of no known group"
            fix = "the traces of all ranks, or a capture of the job: --slices DIR"
            raise PrismError(message, fix=fix)
        guesses.append(fitting_names[0])
    return guesses


def _feasible(
    traced: Mapping[int | None, Measured],
    rank: Measured,
    ranks: Sequence[int],
    places: list[int],
) -> np.ndarray:
    """Say which calls the members of a group may have made together.

    Args:
        traced: traced ranks.
        rank: the one whose calls they are.
        ranks: of the group.
        places: of the calls, which are of one kind.

    Returns:
        bool [places].
    """
    call = rank.calls[places[0]]
    if call.op in _MESSAGES:
        return np.full(len(places), _may_be_messages(traced, rank, ranks, len(places), call))
    # of ranks without a trace nothing is known, and the largest group is the likeliest
    if any(member not in traced for member in ranks):
        return np.full(len(places), len(ranks) == rank.recorded.world)

    # every member makes as many such calls, and all are in each at one time in every iteration
    begun, done = [], []
    for member in ranks:
        member_rank = traced[member]
        same_calls = [k for k, other in enumerate(member_rank.calls) if other.key == call.key]
        if len(same_calls) != len(places):
            return np.zeros(len(places), bool)
        begun.append(member_rank.begun[:, same_calls])
        done.append(member_rank.done[:, same_calls])
    last_begun, first_done = np.max(begun, axis=0), np.min(done, axis=0)
    return np.asarray((last_begun <= first_done).all(axis=0))


def _may_be_messages(
    traced: Mapping[int | None, Measured],
    rank: Measured,
    ranks: Sequence[int],
    count: int,
    call: Call,
) -> bool:
    """Whether ``count`` messages like ``call`` can be of the group of ``ranks``."""
    own_rank = rank.recorded.rank or 0
    # a message goes to another member of the group
    if not 0 <= call.peer < len(ranks) or ranks[call.peer] == own_rank:
        return False
    peer = traced.get(ranks[call.peer])
    if peer is None:
        return True
    # the peer has as many calls the other way
    back = "send"
    if call.op == "send":
        back = "recv"
    own_place = ranks.index(own_rank)
    num_back = sum(other.op == back and other.peer == own_place for other in peer.calls)
    return num_back >= count


# -- programs -------------------------------------------------------------------------------------
class _Written(NamedTuple):
    """A program, and int64 [calls]: the op of every call."""

    program: Program
    call_op: np.ndarray


def _program(
    rank: Measured, groups: Sequence[str], members: Mapping[str, tuple[int, ...]]
) -> _Written:
    """Write a program with the times of a rank's segments.

    Args:
        rank: of the program.
        groups: of its calls.
        members: group -> ranks.
    """
    own_rank = rank.recorded.rank or 0
    builder = Builder()
    call_op = np.full(len(rank.calls), -1, dtype=np.int64)
    has_time = rank.segments.max(axis=0, initial=0) > 0
    # means of segments add up to the mean iteration; medians would not
    typical_ns = np.rint(rank.segments.mean(axis=0)).astype(np.int64)

    # a call whose wait follows it at once has no handle
    waited_at_once = set()
    for token, following in itertools.pairwise(rank.tokens):
        if token.kind == "call" and following == Moment("wait", token.of):
            waited_at_once.add(token.of)

    for token in rank.tokens:
        # a segment that takes nothing in any iteration is no op
        if token.kind == "segment":
            if has_time[token.of]:
                builder.add("compute", ns=int(typical_ns[token.of]))
        elif token.kind == "wait":
            if token.of not in waited_at_once:
                builder.add("wait", handle=int(call_op[token.of]))
        else:
            call, group = rank.calls[token.of], groups[token.of]
            ranks = members[group]
            if call.op in _MESSAGES and not 0 <= call.peer < len(ranks):
                peer_of = f"who rank {own_rank}'s peer is in {call}"
                message = f"{rank.recorded.path} does not say {peer_of}"
                raise PrismError(message, fix="profile with record_shapes=True")
            call_op[token.of] = handle = len(builder)
            if token.of in waited_at_once:
                handle = -1
            # peers are relative in programs
            peer = 0
            if call.peer >= 0:
                peer = (call.peer - ranks.index(own_rank)) % len(ranks)
            builder.add(
                call.op,
                group=group,
                dtype=call.dtype,
                num_in=call.num_in,
                num_out=call.num_out,
                peer=peer,
                root=call.root,
                handle=handle,
                batch=call.batch,
            )
    builder.add("mark", note=f"rank {own_rank}'s own times")  # ranks that run the same stay apart
    samples = rank.segments[:, has_time]
    return _Written(dataclasses.replace(builder.build(own_rank), samples=samples), call_op)


def assemble(measured: Sequence[Measured]) -> Imported:
    """Put a job together out of its measured ranks.

    Raises:
        UsageError: the traces are of two jobs, or of one rank twice.
        PrismError: their calls do not fit together, with the first place.
    """
    _ranked([rank.recorded for rank in measured])
    ranked = _shared(sorted(measured, key=lambda rank: rank.recorded.rank or 0))
    notes: list[str] = []
    for rank in ranked:
        notes.extend(f"rank {rank.recorded.rank}: {note}" for note in rank.notes)
    world = _world(ranked)
    if len(ranked) < world.size:
        traced = format_ranks([rank.recorded.rank or 0 for rank in ranked])
        count = f"{len(ranked)} of {counted(world.size, 'rank')} traced ({traced})"
        notes.append(f"{count}: they stand for the rest")

    names = _Names(ranked, world)
    groups = _guess_groups(ranked, names, notes)
    imported = _joined(ranked, world, names, groups, notes)
    # where a rank waits forever, sends were buffered
    issue_graph = build_issue_graph(imported.graph)
    if len(issue_graph.order) < len(issue_graph):
        for rank in ranked:
            rank.tokens = [token for token in rank.tokens if not _waits_for_send(rank, token)]
        notes.append("sends end without their receivers here: the job would hang if they waited")
        imported = _joined(ranked, world, names, groups, notes)
    return _with_wire(imported)


def _waits_for_send(rank: Measured, token: Moment) -> bool:
    return token.kind == "wait" and rank.calls[token.of].op == "send"


def _shared(measured: Sequence[Measured]) -> list[Measured]:
    """Return the iterations that all ranks have.

    Times begin with the first call, as ns since 1970 would be rounded to 256 as floating-point
    numbers.
    """
    numbers = set.intersection(*(set(rank.numbers) for rank in measured))
    if not numbers:
        first = measured[0]
        iterations = f"rank {first.recorded.rank} has {first.numbers[0]} to {first.numbers[-1]}"
        fix = "profile the same iterations on every rank"
        raise UsageError(f"no iteration is in all traces: {iterations}", fix=fix)
    begins = [int(rank.begun.min()) for rank in measured if rank.begun.size]
    origin = min(begins, default=0)
    return [rank.part(sorted(numbers), origin) for rank in measured]


def _joined(
    ranked: list[Measured], world: World, names: _Names, groups: list[list[str]], notes: list[str]
) -> Imported:
    """Write the programs, and find who meets whom."""
    written = [_program(rank, groups[i], names.members[i]) for i, rank in enumerate(ranked)]
    programs = tuple(program for program, _ in written)
    used: set[str] = set()
    for program in programs:
        used.update(program.groups())
    lists = {name: ranks for name, ranks in names.lists.items() if name in used}
    program_of = stand_in_for(world, [program.rank for program in programs])
    source = {"from": "traces", "device": _device(rank.recorded for rank in ranked)}
    graph = build(Programs(world, programs, program_of, lists, source))
    fix = "profile the same iterations on every rank; without groups (gloo): --slices DIR"
    graph.check_fits(fix)
    return Imported(graph, ranked, [call_op for _, call_op in written], notes)


def _device(recorded: Iterable[Recorded]) -> str:
    """Say what ran, as far as the traces say."""
    names = []
    for trace in recorded:
        if trace.gpu:
            names.append(trace.gpu)
        elif len(trace.device):
            names.append("a GPU")
        else:
            names.append("cpu")
    return max(names, key=len)


# -- time on the wire -----------------------------------------------------------------------------
def _with_wire(imported: Imported) -> Imported:
    """Fill in what calls took on the wire and who waited; the programs' calls get it as ``ns``."""
    graph = imported.graph
    matched = []
    for index, program in enumerate(imported.programs.programs):
        class_number = int(graph.classes.of[program.rank])
        matched.append(graph.matched_calls.of[class_number][imported.call_op[index]])
    times = [_one_by_one(imported, index) for index in range(len(imported.measured))]
    _fill_in_wire(imported, matched, times)

    # what a call takes without waiting
    own_ns = imported.wire
    if not imported.whole.all():
        own_ns = _fastest(imported, matched)
    for rank_times, rank_matched in zip(times, matched, strict=True):
        imported.skew.append(np.maximum(0.0, rank_times.took - own_ns[:, rank_matched]))
    _keep_ns(imported)
    return imported


class _Times(NamedTuple):
    """Of the calls of a rank, float64 [iterations, calls] ns: when it came to each, when the group
    was free, when the call had ended and how long it took.
    """

    came: np.ndarray
    freed: np.ndarray
    done: np.ndarray
    took: np.ndarray


def _one_by_one(imported: Imported, index: int) -> _Times:
    """Let no call of a group begin before the one in front of it has ended, as NCCL does.

    Calls of gloo run in threads, so their records overlap.
    """
    rank = imported.measured[index]
    came = rank.begun.astype(float)
    freed = np.zeros_like(came)
    groups = imported.programs.programs[index].ops["group"][imported.call_op[index]]
    for group in np.unique(groups).tolist():
        calls = np.flatnonzero(groups == group)
        done = np.maximum.accumulate(rank.done[:, calls], axis=1)
        done_before, later_calls = done[:, :-1], calls[1:]
        freed[:, later_calls] = done_before
        rank.begun[:, later_calls] = np.maximum(rank.begun[:, later_calls], done_before)
        rank.done[:, calls] = done
    took = (rank.done - rank.begun).astype(float)
    return _Times(came, freed, rank.done.astype(float), took)


def _fill_in_wire(
    imported: Imported, matched: Sequence[np.ndarray], times: Sequence[_Times]
) -> None:
    """Fill in ``wire`` and ``whole``.

    Args:
        imported: the job.
        matched: per rank int64 [calls]: the matched call of each.
        times: of each rank.
    """
    graph, num_calls = imported.graph, len(imported.graph.matched_calls)
    clocks = _set_clocks(imported, matched)
    wire = np.full((len(imported.numbers), num_calls), np.nan)
    last_came, sum_freed, sum_done = (np.zeros_like(wire) for _ in range(3))
    num_traced = np.zeros(num_calls, dtype=np.int64)
    num_members = np.ones(num_calls, dtype=np.int64)
    is_one_clock, clock_of = np.ones(num_calls, bool), np.full(num_calls, -1)
    for index, program in enumerate(imported.programs.programs):
        calls, clock, rank_times = matched[index], clocks[index], times[index]
        # the shortest of its members' times, and when the last one came
        wire[:, calls] = np.fmin(wire[:, calls], rank_times.took)
        last_came[:, calls] = np.maximum(last_came[:, calls], rank_times.came + clock.moved)
        sum_freed[:, calls] += rank_times.freed + clock.moved
        sum_done[:, calls] += rank_times.done + clock.moved
        np.add.at(num_traced, calls, 1)
        # members on clocks that are not set by each other cannot be compared
        is_one_clock[calls] &= (clock_of[calls] < 0) | (clock_of[calls] == clock.same)
        clock_of[calls] = clock.same
        rank_matched = graph.matched_calls.of[int(graph.classes.of[program.rank])]
        for name, ops in program.groups().items():
            size = len(graph.groups[name].group(program.rank))
            is_pair = IS_PAIR[program.ops["name"][ops]]
            num_members[rank_matched[ops]] = np.where(is_pair, 2, size)

    # with one clock: from the last one's coming, or from when the group was free, to the end
    imported.whole = num_traced >= num_members
    divisor = np.maximum(1, num_traced)
    begun = np.maximum(last_came, sum_freed / divisor)
    together = sum_done / divisor - begun
    comparable = imported.whole & is_one_clock
    imported.wire = np.where(comparable, np.maximum(wire, together), wire)


def _keep_ns(imported: Imported) -> None:
    """Give calls of the programs what they typically took on the wire."""
    graph, wire = imported.graph, imported.wire
    has_time = ~np.isnan(wire).all(axis=0)
    typical_ns = np.full(len(graph.matched_calls), np.nan)
    typical_ns[has_time] = np.rint(np.nanmean(wire[:, has_time], axis=0))
    for class_number, index in enumerate(graph.classes.programs):
        ops = graph.programs.programs[index].ops
        calls = np.flatnonzero(IS_CALL[ops["name"]])
        call_ns = typical_ns[graph.matched_calls.of[class_number][calls]]
        call_ns[np.isnan(call_ns)] = -1
        ops["ns"][calls] = call_ns.astype(np.int64)


class _Clock(NamedTuple):
    """Of a rank's node.

    same  : number of the nodes that were set by each other
    moved : float64 [iterations, 1] ns that its times are moved by in each iteration
    """

    same: int
    moved: np.ndarray


def _set_clocks(imported: Imported, matched: Sequence[np.ndarray]) -> list[_Clock]:
    """Set clocks of different nodes by when their collectives end; a clock per traced rank.

    A collective that every member has a part of the result of is assumed to end at once on all of
    them, and a clock to run evenly for an iteration: the median of a node's differences in it is
    how far its clock is off.  Nodes that share no collective keep their own.
    """
    nodes = [rank.recorded.node or rank.recorded.path for rank in imported.measured]
    # node -> matched call -> float64 [iterations], when it ended there
    ends: dict[str, dict[int, np.ndarray]] = {node: {} for node in nodes}
    for index, rank in enumerate(imported.measured):
        node_ends = ends[nodes[index]]
        for k, call in enumerate(rank.calls):
            if call.op in _ENDS_AT_ONCE:
                node_ends.setdefault(int(matched[index][k]), rank.done[:, k].astype(float))

    # from one node to those that share a collective with it, and on from them
    unmoved = np.zeros((len(imported.numbers), 1))
    clocks: dict[str, _Clock] = {}
    errors: list[float] = []  # ns, of all ends
    for first in ends:
        if first in clocks:
            continue
        clocks[first] = _Clock(len(clocks), unmoved)
        waiting = deque([first])
        while waiting:
            reference = waiting.popleft()
            for node in ends:
                shared = sorted(ends[node].keys() & ends[reference].keys())
                if node in clocks or not shared:
                    continue
                apart = [ends[reference][call] - ends[node][call] for call in shared]
                offsets = np.stack(apart, axis=1) + clocks[reference].moved
                moved = np.median(offsets, axis=1, keepdims=True)
                clocks[node] = _Clock(clocks[reference].same, moved)
                waiting.append(node)
                # how far ends are from the clocks that were chosen
                errors += np.abs(offsets - moved).ravel().tolist()
    if errors:
        half = format_ns(round(np.median(errors)))
        imported.notes.append(
            f"the clocks of {len(clocks)} nodes are set so that their collectives end at once, "
            f"in each iteration; half of the ends are within {half}"
        )
    return [clocks[node] for node in nodes]


def _fastest(imported: Imported, matched: Sequence[np.ndarray]) -> np.ndarray:
    """Return ``wire``, but where members are not traced the fastest of equal calls."""
    pools: dict[object, list[int]] = defaultdict(list)
    for i, rank in enumerate(imported.measured):
        for k, call in enumerate(rank.calls):
            matched_call = int(matched[i][k])
            if imported.whole[matched_call]:
                continue
            # calls whose sizes are unknown, or the routing's matter, are equal to none
            has_sizes = min(call.num_in, call.num_out) >= 0
            if has_sizes and call.op != "all_to_all":
                pools[call.key].append(matched_call)
            else:
                pools[i, k].append(matched_call)
    own_ns = imported.wire.copy()
    for calls in pools.values():
        # the fastest of equal calls has waited least for members without a trace
        own_ns[:, calls] = np.nanmin(imported.wire[:, calls])
    imported.notes.append(
        f"{int((~imported.whole).sum()):,} calls have members without a trace: what these calls "
        "take has waiting for those members in it; what exceeds the fastest of equal calls is "
        "shown so"
    )
    return own_ns


# -- beside a capture ------------------------------------------------------------------------------
class _Finished(NamedTuple):
    """A captured program with the traced times.

    call_op : int64 [calls]: the op of every call
    busy    : float64 [ops] ns in which the work of each segment ran
    """

    program: Program
    call_op: np.ndarray
    busy: np.ndarray


class Beside:
    """A traced rank beside its captured program, which says what waits for what.

    pairing : which of its calls are which captured ones
    slots   : of every segment, its op
    """

    def __init__(self, program: Program, recorded: Recorded, members: Mapping[str, int]) -> None:
        self.program = program
        self.members = members
        self.slots: list[int] = []
        self.pairing: Pairing
        self.measured = measure(recorded, self.plan)

    def plan(self, calls: Sequence[Call]) -> tuple[list[int], list[Moment]]:
        """Return the calls that the capture has, too, and what happens in which order."""
        ops = self.program.ops
        self.pairing = pair(self.program, self.members, calls)
        number_of = {op: number for number, (op, _) in enumerate(self.pairing.pairs)}
        number_of_handle: dict[int, int] = {}
        tokens: list[Moment] = []
        names, handles = ops["name"].tolist(), ops["handle"].tolist()
        for op, (name, handle) in enumerate(zip(names, handles, strict=True)):
            # times of the trace fill the captured segments
            if name == CODE["compute"]:
                tokens.append(Moment("segment", len(self.slots)))
                self.slots.append(op)
            elif op in number_of:
                # a call without a handle is waited for at once
                tokens.append(Moment("call", number_of[op]))
                if handle < 0:
                    tokens.append(Moment("wait", number_of[op]))
                number_of_handle[handle] = number_of[op]
            # waits for calls that the trace lacks are left out
            elif name == CODE["wait"] and handle in number_of_handle:
                tokens.append(Moment("wait", number_of_handle[handle]))
        return [call for _, call in self.pairing.pairs], tokens

    def finished(self) -> _Finished:
        """Return the captured program with the traced times."""
        ops, measured = self.program.ops, self.measured
        both = np.stack([measured.segments, measured.busy]).astype(float)
        all_weights = self._weights()
        for segments in self._unparted_segments():
            # nothing of the trace tells these apart: as the capture has them
            weights = all_weights[segments]
            sums = both[..., segments].sum(axis=-1, keepdims=True)
            both[..., segments] = sums * (weights / weights.sum())
        samples = np.rint(both[0]).astype(np.int64)
        busy = np.zeros(len(ops) + 1)
        busy[self.slots] = both[1].mean(axis=0)

        # ranks that run the same stay apart by a mark of their own
        mark = np.zeros(1, dtype=OP)
        for name in UNKNOWN:
            mark[name] = -1
        mark["name"], mark["note"] = CODE["mark"], len(self.program.strings)
        timed_ops = np.concatenate([ops, mark])
        timed_ops["ns"][self.slots] = np.rint(samples.mean(axis=0)).astype(np.int64)
        for name in ("host", "lead", "products"):  # the traced times have the host's delays in them
            timed_ops[name] = -1
        program = dataclasses.replace(
            self.program,
            ops=timed_ops,
            strings=(*self.program.strings, f"rank {self.program.rank}'s own times"),
            samples=samples,
            hosts=np.empty(0, np.int64),
        )
        call_op = np.array([op for op, _ in self.pairing.pairs], dtype=np.int64)
        return _Finished(program, call_op, busy)

    def _unparted_segments(self) -> list[list[int]]:
        """Return runs of segments without a call or a wait between them."""
        runs: list[list[int]] = []
        run: list[int] = []
        for token in self.measured.tokens:
            if token.kind == "segment":
                run.append(token.of)
                continue
            runs.append(run)
            run = []
        runs.append(run)
        return [run for run in runs if len(run) > 1]

    @cached_property
    def _segment_ns(self) -> np.ndarray:
        """float64 [ops]: what a captured segment takes, roughly where it has no time."""
        ops = self.program.ops
        modelled_ns = np.maximum(ops["flops"], 0) / 5e5 + np.maximum(ops["traffic"], 0) / 3e3
        segment_ns: np.ndarray = np.where(ops["ns"] > 0, ops["ns"].astype(float), modelled_ns)
        return segment_ns

    def _weights(self) -> np.ndarray:
        """float64 [segments]: how times are shared out among segments."""
        weights: np.ndarray = np.maximum(self._segment_ns[self.slots], 1.0)
        return weights


@dataclass
class Paired:
    """Traced ranks, by rank, beside the captured programs of their job."""

    captured: Programs
    ranks: list[Beside]

    def imported(self) -> Imported:
        """Return the captured programs with the traced times.

        Raises:
            UsageError: a stage has no traced rank.
            PrismError: half of a rank's calls or more have no counterpart.
        """
        measured = _shared([beside.measured for beside in self.ranks])
        notes: list[str] = []
        finished: list[_Finished] = []
        for beside, shared_part in zip(self.ranks, measured, strict=True):
            beside.measured = shared_part
            pairing = beside.pairing
            # most calls have no counterpart: another job was traced
            if pairing.share < 0.5:
                fix = "capture the job that was traced, with the same arguments"
                raise PrismError(str(pairing), fix=fix)
            if pairing.share < 1:
                how = "captured calls without a counterpart are modelled, traced ones"
                notes.append(f"{pairing}; {how} count as computing")
            notes += [f"rank {pairing.rank}: {note}" for note in beside.measured.notes]
            finished.append(beside.finished())

        # other ranks run what the traced one of their stage does
        captured, world = self.captured, self.captured.world
        programs = tuple(rank.program for rank in finished)
        try:
            program_of = stand_in_for(world, [program.rank for program in programs])
        except ProgramError as error:
            message = "a stage of the pipeline has no traced rank"
            raise UsageError(
                message, fix="trace one rank of every stage: --profile-ranks"
            ) from error
        device = _device(rank.recorded for rank in measured)
        source = {**captured.source, "from": "traces", "device": device}
        graph = build(Programs(world, programs, program_of, captured.groups, source))
        graph.check_fits()
        call_op, busy = [rank.call_op for rank in finished], [rank.busy for rank in finished]
        return _with_wire(Imported(graph, measured, call_op, notes, busy))


def paired(paths: Sequence[str | os.PathLike[str]], captured: Programs) -> Paired:
    """Put the traces of one job beside its captured programs.

    Raises:
        UsageError: a file is no trace, or they are of another job than ``captured``.
    """
    recorded, world = _recorded(paths), captured.world
    for trace in recorded:
        # 0: the trace does not say how large its world is
        if trace.world not in (0, world.size):
            traced_ranks = counted(trace.world, "rank")
            message = f"{trace.path} is of a job of {traced_ranks}, the slices of {world.size:,}"
            raise UsageError(message, fix="name the slices of the job that was traced")
    recorded[0].world = world.size

    groups = memberships(captured)
    ranks = []
    for trace in _ranked(recorded):
        rank = world.check_rank(trace.rank or 0)
        members = {name: len(group.group(rank)) for name, group in groups.items()}
        program = dataclasses.replace(captured.of(rank), rank=rank)
        ranks.append(Beside(program, trace, members))
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
    return assemble([measure(trace) for trace in _recorded(paths)])


def _recorded(paths: Sequence[str | os.PathLike[str]]) -> list[Recorded]:
    """Read every rank in these files and folders."""
    recorded: list[Recorded] = []
    for path in map(Path, paths):
        if not path.is_dir():
            recorded += read_trace(path)
            continue
        # a folder has traces, or else dumps
        files = sorted(file for file in path.iterdir() if _TRACE.search(file.name))
        if not files:
            recorded += read_dumps(path)
        for file in files:
            recorded += read_trace(file)
    return recorded


def write(imported: Imported, folder: Path, *, force: bool = False) -> None:
    """Keep a job as slices in ``folder``.  UsageError if other things are there."""
    programs = imported.programs
    store = SliceStore(folder, programs.world, programs.source)
    store.prepare(force)
    taken = store.ranks()
    if taken and not force:
        message = f"{folder} holds slices already, of ranks {format_ranks(taken)}"
        raise UsageError(
            message, fix="name another folder with -o DIR, or replace them with --force"
        )
    for program in programs.programs:
        store.put(program, programs.groups)
