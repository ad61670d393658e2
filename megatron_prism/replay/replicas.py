"""What if a job had more or fewer replicas: ``dp=``.

In : Programs.  Out: Programs of a world with another data-parallel size, in which everything that
follows a rank's shard of parameters has its new size: calls, segments of the optimizer, its states
and what a step allocates.  What is assumed is in ``Programs.source["what-if"]``.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction

import numpy as np

from megatron_prism.core.errors import ProgramError, UsageError
from megatron_prism.core.groups import WORLD_GROUP
from megatron_prism.core.programs import shard
from megatron_prism.core.programs.ops import CODE, IS_PAIR, NAMES, SHARED
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.core.programs.slices import renumbered
from megatron_prism.core.world import World
from megatron_prism.graph.classes import equal_programs, memberships, partition
from megatron_prism.replay.costs.collectives import EXPERT_CALLS
from megatron_prism.replay.costs.kernels import scaled_kernels
from megatron_prism.replay.whatif import with_assumption, without_unused

_OF_PARTS = CODE["all_gather"], CODE["reduce_scatter"]
_ALIGN = 128
_BUCKET_GROWS = 40  # ranks
_RESERVED = (  # 7.7 % is the most of the 42 pairs of benchmarks/accuracy/replicas.py, once 10.4
    "reserved bytes up to 12 % off, for the part of each bucket begins in other parameters"
)
_OF_HOST = "host", "lead"
# Python's loops of a step: their fixed part, in parts of parameters (docs/measurements.md)
_FIXED = 4
_TOOK = ("ns", "products", *_OF_HOST)


def with_data_parallel(programs: Programs, dp: int) -> Programs:
    """Make the world with another data-parallel size.

    Args:
        programs: The captured world.
        dp: The new size.

    Raises:
        UsageError: The experts do not fill such a world.
        ProgramError: The replicas are not alike, or a call's size in the new world is not known.
    """
    old = programs.world
    if dp < 1:
        raise UsageError(f"a data-parallel size of {dp}", fix="1 or more")
    if dp == old.dp:
        return programs
    _check_size(programs, dp)
    world = dataclasses.replace(old, size=old.size // old.dp * dp)

    # the program of every rank; measured replicas differ in times at least
    classes = partition(programs)
    program_of_class = np.array(classes.programs, dtype=np.int32)
    program_of_rank = program_of_class[classes.of]
    old_places, new_places = _places(old), _places(world)
    has_times_of_first = False
    # measured times differ between replicas that run the same: the first one's are taken
    if programs.source.get("tier") == "cuda" and _find_unlike(program_of_rank, old_places):
        has_times_of_first = True
        program_of_rank = _first_alike(programs)[program_of_rank]
    unlike = _find_unlike(program_of_rank, old_places)
    if unlike:
        stage, place, replica = unlike[0]
        first_rank, unlike_rank = old_places[stage, place, [0, replica]].tolist()
        raise ProgramError(
            f"ranks {first_rank} and {unlike_rank} differ in nothing but the replica, and run "
            "different programs",
            fix="change the size first and slow ranks down after that; uneven experts need a "
            "capture of the new size",
        )

    # every replica of the new world runs the programs of the first one
    first_replica = old_places[:, :, 0]
    programs_of_places = program_of_rank[first_replica]
    program_of = np.empty(world.size, dtype=np.int32)
    program_of[new_places] = programs_of_places[:, :, None]
    resized_world = dataclasses.replace(programs, world=world, program_of=program_of)
    old_groups, new_groups = memberships(programs), memberships(resized_world)
    new_programs = list(programs.programs)
    bucket_sizes: set[tuple[int, int]] = set()
    is_sharded = False
    new_rank_of: dict[int, int] = {}  # captured rank -> the rank that runs its program
    for index in np.unique(program_of).tolist():
        program = programs.programs[index]
        stage, place = np.argwhere(programs_of_places == index)[0].tolist()
        old_rank = int(first_replica[stage, place])
        new_rank = int(new_places[stage, place, 0])
        sizes: dict[str, tuple[int, int]] = {}
        for name in program.groups():
            old_group, new_group = (
                old_groups[name].group(old_rank),
                new_groups[name].group(new_rank),
            )
            sizes[name] = len(old_group), len(new_group)
        resizer = _Resizer(program, sizes, old, world, old_rank, new_rank)
        new_programs[index] = resizer.program()
        new_rank_of[program.rank] = new_rank
        bucket_sizes |= resizer.buckets
        is_sharded |= resizer.is_sharded

    # say what that assumes
    source = renumbered(programs.source, new_rank_of)
    resized_world = dataclasses.replace(resized_world, programs=tuple(new_programs), source=source)
    text = _assumption(old.dp, dp, bucket_sizes, is_sharded)
    if has_times_of_first:
        text += ", times of the first replica"
    return with_assumption(without_unused(resized_world), text, Fraction(dp, old.dp))


def _check_size(programs: Programs, dp: int) -> None:
    """Raise an error for a size that the world cannot have."""
    world = programs.world
    if programs.groups:
        raise ProgramError(
            f"the groups {', '.join(programs.groups)} are lists of ranks, which say nothing of a "
            "larger world",
            fix="capture a world of that size",
        )
    experts = (world.etp or world.tp) * world.ep
    ranks_of_replica = world.tp * world.cp
    step = experts // math.gcd(experts, ranks_of_replica)  # replicas that the experts fill
    if dp % step:
        rounds = -(-dp // step)
        raise UsageError(
            f"dp={dp}: experts etp {world.etp} x ep {world.ep} need a multiple of {step} replicas "
            f"of tp {world.tp} x cp {world.cp} ranks",
            fix=f"dp={rounds * step}",
        )


def _assumption(old: int, new: int, buckets: set[tuple[int, int]], is_sharded: bool) -> str:
    """Put into words what another size assumes.

    Args:
        old: The captured data-parallel size.
        new: The new one.
        buckets: Sizes of groups before and after whose members share out buckets.
        is_sharded: Whether ranks update a part of the parameters.
    """
    text = f"data-parallel size {new} instead of {old}: "
    if is_sharded:
        text += f"what follows a rank's part of the parameters x {Fraction(old, new)}, other "
    text += "segments and memory as captured"
    if is_sharded:
        text += f"; {_RESERVED}"

    # padding of a larger group does not end where that of a smaller one does
    if any(after % before for before, after in buckets):
        text += ", buckets up to their padding too large"
    # large groups have larger buckets
    if any(max(pair) > _BUCKET_GROWS for pair in buckets):
        text += ", boundaries of buckets as captured"
    return text


def _places(world: World) -> np.ndarray:
    """int64 [pp, cp x tp, dp]: the rank at every place."""
    ranks = np.arange(world.size)
    axes = [np.asarray(world._along(axis, ranks)) for axis in ("pp", "cp", "tp", "dp")]
    places = np.empty((world.pp, world.cp, world.tp, world.dp), dtype=np.int64)
    places[tuple(axes)] = ranks
    return places.reshape(world.pp, world.cp * world.tp, world.dp)


def _first_alike(programs: Programs) -> np.ndarray:
    """int32 [programs]: the first program that differs from each measured one in times alone.

    How the parameters are shared out may differ, too.
    """
    untimed: list[Program] = []
    for program in programs.programs:
        if shard.is_sharded(program):
            program = shard.without_shard(program)
        ops = program.ops.copy()
        for name in _TOOK:
            ops[name] = -1
        untimed.append(dataclasses.replace(program, ops=ops))
    return equal_programs(tuple(untimed))


def _find_unlike(program_of_rank: np.ndarray, places: np.ndarray) -> list[list[int]]:
    """List (stage, other place, replica) of ranks that run another program than the first one's."""
    programs = program_of_rank[places]
    first_replica = programs[:, :, :1]
    unlike: list[list[int]] = np.argwhere(programs != first_replica).tolist()
    return unlike


@dataclasses.dataclass(frozen=True)
class _Resizer:
    """One program, and the sizes of its groups before and after.

    Attributes:
        captured: The program.
        sizes: Of every group that it calls the members before and after.
        old: The captured world.
        new: The new world.
        old_rank: The rank that runs the program.
        new_rank: The rank that runs it in the new world.
        buckets: Sizes of groups before and after whose members share out buckets.
    """

    captured: Program
    sizes: dict[str, tuple[int, int]]
    old: World
    new: World
    old_rank: int
    new_rank: int
    buckets: set[tuple[int, int]] = dataclasses.field(default_factory=set)

    @property
    def is_sharded(self) -> bool:
        """Whether the rank updates a part of the parameters."""
        return shard.is_sharded(self.captured)

    def program(self) -> Program:
        """Make the program of the new world."""
        ops = self.captured.ops.copy()
        for name, indices in self.captured.groups().items():
            before, after = self.sizes[name]
            if before == after:
                # a group that stays as large
                continue
            for index in indices.tolist():
                self._resize(ops[index], name, after)
        resized = dataclasses.replace(self.captured, ops=ops, rank=self.new_rank)
        # no part of the optimizer depends on the size
        if not self.is_sharded:
            return resized
        if shard.has_quantized(self.captured):
            raise ProgramError(
                "each FP8 parameter of a rank's part is copied by kernels of its own, and how many "
                "parameters another part has is not known",
                fix="capture a world of that size",
            )

        # parts of experts change by the same ratio
        return _with_shard(resized, Fraction(self.old.dp, self.new.dp))

    def _resize(self, row: np.void, group: str, size: int) -> None:
        """Change a call to what it is in the new world.

        Args:
            row: The op, which is changed.
            group: The description of its group.
            size: The new members of the group.
        """
        code = int(row["name"])
        name = NAMES[code]
        if IS_PAIR[code]:
            row["peer"] = self._peer(int(row["peer"]), group)

        # what shares more out has other segments, too
        elif self._shares_more(row):
            raise ProgramError(
                f"replicas share more out than the optimizer's states (an {name} of {group} "
                f"at {self.captured.strings[row['site']]}), and what else follows their number is "
                "not known",
                fix="capture a world of that size",
            )

        # tokens go where routers send them
        elif name in ("all_to_all", *EXPERT_CALLS) or row["splits"] >= 0:
            raise ProgramError(
                f"who sends what in an {name} of {group} with {size} ranks is not known",
                fix="capture a world of that size",
            )

        # calls of which one side is a rank's part of the other
        elif name in ("all_gather", "gather") and row["num_out"] > 0:
            self._resize_parts(row, "num_in", "num_out", group)
        elif name in ("reduce_scatter", "scatter") and row["num_in"] > 0:
            self._resize_parts(row, "num_out", "num_in", group)

    def _shares_more(self, row: np.void) -> bool:
        """Say whether a call moves parts of parameters or gradients that are no bucket of DDP's.

        Both FSDPs do so.
        """
        strings = self.captured.strings
        site, group = strings[row["site"]], strings[row["group"]]
        if int(row["name"]) not in _OF_PARTS or SHARED not in group or not site:
            return False
        return shard.BUCKETS not in site or "fsdp" in site

    def _resize_parts(self, row: np.void, part: str, whole: str, group: str) -> None:
        """Change the elements of one rank and of all.

        Args:
            row: The op, which is changed.
            part: The column of one rank's elements.
            whole: The column of all elements.
            group: The description of its group.
        """
        before, after = self.sizes[group]
        # every rank has its own part, whatever its size
        if shard.BUCKETS not in self.captured.strings[row["site"]]:
            row[whole] = int(row[part]) * after
            return

        # a bucket is shared out, and padded so that all ranks get as much
        self.buckets.add((before, after))
        alignment = math.lcm(after, _ALIGN)
        units = -(-int(row[whole]) // alignment)
        elements = units * alignment
        row[part], row[whole] = elements // after, elements

    def _peer(self, offset: int, group: str) -> int:
        """Give how far the same stage is in the new world."""
        if group == WORLD_GROUP:
            peer = (self.old_rank + offset) % self.old.size
            place, peer_place = self.old.coordinates(self.old_rank), self.old.coordinates(peer)
            # the same place of another stage
            if place._replace(pp=0) == peer_place._replace(pp=0):
                new = self.new.coordinates(self.new_rank)
                stage = peer_place.pp
                new_peer = self.new.rank_at(tp=new.tp, cp=new.cp, dp=new.dp, pp=stage)
                return new_peer - self.new_rank
        raise ProgramError(
            f"a message goes {offset} places along {group}, which changes its size",
            fix="capture a world of that size",
        )


def _with_shard(program: Program, ratio: Fraction) -> Program:
    """Make the program of a rank that updates ``ratio`` times as many parameters."""
    return _with_memory(_with_segments(program, ratio), ratio)


def _with_segments(program: Program, ratio: Fraction) -> Program:
    """Make the program in which segments of the optimizer are ``ratio`` times as long."""
    ops, strings = program.ops.copy(), list(program.strings)
    parameters, old_parts = shard.parameters(program), shard.parts(program)

    # Python's loops run once a part; slices of a GPU do not say how many parts there are
    host_ratio = ratio
    if old_parts:
        most_parts = Fraction(max(parameters, old_parts))
        new_parts = max(Fraction(1), min(old_parts * ratio, most_parts))
        host_ratio = Fraction(new_parts + _FIXED, old_parts + _FIXED)
    for index in shard.segments(program).tolist():
        row = ops[index]
        old_note = strings[row["note"]]
        note, num_bytes, kernels = scaled_kernels(old_note, ratio, parameters)
        if row["traffic"] >= 0:
            row["traffic"] = max(0, int(row["traffic"]) + num_bytes)
        if row["kernels"] >= 0:
            row["kernels"] += kernels

        # times that are known
        for name in _TOOK:
            time_ratio = ratio
            if name in _OF_HOST:
                time_ratio = host_ratio
            if row[name] >= 0:
                row[name] = _times(int(row[name]), time_ratio)
        if note != old_note:
            row["note"] = len(strings)
            strings.append(note)
    return dataclasses.replace(program, ops=ops, strings=tuple(strings))


def _with_memory(program: Program, ratio: Fraction) -> Program:
    """Make the program with ``ratio`` times as many bytes of what a shard's parameters have.

    Requests of earlier iterations are known by their size alone: those follow the shard whose size
    only storages of this iteration have that do.
    """
    memory, history = program.allocations, program.history
    if not len(memory):
        return program
    parameters = shard.parameters(program)
    is_of_shard, is_within = shard.storages(program)
    changes = memory[is_of_shard]
    parts = _parts(changes["storage"], changes["bytes"], changes["note"], ratio, parameters)

    # requests of earlier iterations
    is_other_birth = (memory["bytes"] >= shard.SCALAR) & ~is_of_shard
    sizes_within = set(memory["bytes"][is_within].tolist())
    other_sizes = set(memory["bytes"][is_other_birth].tolist())
    sizes = list(sizes_within - other_sizes)
    is_earlier = ~np.isin(history[:, 0], memory["storage"])
    earlier = history[is_earlier & np.isin(history[:, 1], sizes)]
    no_notes = np.zeros(len(earlier))
    parts |= _parts(earlier[:, 0], earlier[:, 1], no_notes, ratio, parameters)

    # numbers of the storages that come in place of each: its own, then new ones
    last_storage = max(memory["storage"].max(), history[:, 0].max(initial=0))
    next_number = 1 + int(last_storage)
    numbers: dict[int, list[int]] = {}
    for storage, new_sizes in parts.items():
        additional = max(0, len(new_sizes) - 1)
        numbers[storage] = [storage, *range(next_number, next_number + additional)]
        next_number += additional

    # changes of memory, and requests, in their places
    rows, storages, num_bytes = _split(memory["storage"], memory["bytes"], parts, numbers)
    allocations = memory[rows]
    allocations["storage"] = storages
    allocations["bytes"] = num_bytes
    requests, storages, num_bytes = _split(history[:, 0], history[:, 1], parts, numbers)
    history = history[requests]
    history[:, 0] = storages
    history[:, 1] = num_bytes

    # columns beside the changes of memory, if there are any
    streams, routed = program.streams, program.routed
    if len(streams):
        streams = streams[rows]
    if len(routed):
        routed = routed[rows]
    return dataclasses.replace(
        program,
        allocations=allocations,
        earlier_peak=_earlier_peak(program, allocations),
        history=history,
        streams=streams,
        routed=routed,
    )


def _earlier_peak(program: Program, allocations: np.ndarray) -> np.ndarray:
    """Give ``Program.earlier_peak`` with the optimizer's states that ``allocations`` have."""
    standing = allocations[allocations["before"] == 0]
    state_sizes: dict[str, Counter[int]] = {}
    for note, size in zip(standing["note"].tolist(), standing["bytes"].tolist(), strict=True):
        text = program.strings[note]
        is_state = text.startswith(shard.STATE_NOTES)
        if is_state:
            state_sizes.setdefault(text, Counter())[size] += 1
    rows: list[tuple[int, int, int]] = []
    replaced: set[str] = set()
    for note, size, count in program.earlier_peak.tolist():
        text = program.strings[note]
        # what is no state is as large as it was
        if text not in state_sizes:
            rows.append((note, size, count))
        # all rows of one note become those that stand
        elif text not in replaced:
            replaced.add(text)
            rows += [(note, new_size, number) for new_size, number in state_sizes[text].items()]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def _parts(
    storages: np.ndarray, sizes: np.ndarray, notes: np.ndarray, ratio: Fraction, parameters: int
) -> dict[int, list[int]]:
    """Give the bytes of the storages that come in place of each one.

    Of a smaller shard these are the first storages of each kind, as a shard is a part of a row of
    parameters; of a larger one as many more of each.

    Args:
        storages: The storages of the shard.
        sizes: Their bytes.
        notes: Their kinds.
        ratio: How many times as large the shard becomes.
        parameters: The rank's, which are as many as a kind may have; 0: not known.
    """
    parts: dict[int, list[int]] = {}
    for note in np.unique(notes).tolist():
        is_kind = notes == note
        kind_storages, kind_sizes = storages[is_kind].tolist(), sizes[is_kind].tolist()
        most = parameters or int(ratio) * len(kind_storages)
        count = max(1, min(int(ratio), most // len(kind_storages)))
        bytes_left = _times(sum(kind_sizes), ratio)
        for storage, size in zip(kind_storages, kind_sizes, strict=True):
            # a larger shard
            new_size = _times(size, ratio / count)
            # a smaller one: as long as there is something left
            if ratio < 1:
                new_size = min(size, bytes_left)
            parts[storage] = []
            if new_size:
                parts[storage] = [new_size] * count
            bytes_left -= new_size
    return parts


def _split(
    storages: np.ndarray,
    sizes: np.ndarray,
    parts: Mapping[int, list[int]],
    numbers: Mapping[int, list[int]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Put events of the parts of storages in the places of the storages' own.

    Args:
        storages: The storage of every event.
        sizes: Bytes that come; negative: that go.
        parts: Storage -> bytes of those that come in its place.
        numbers: Storage -> their numbers.

    Returns:
        The event that each new one follows from, its storage and its bytes, int64 [events] each.
    """
    rows: list[int] = []
    events: list[tuple[int, int]] = []
    for index, (storage, size) in enumerate(zip(storages.tolist(), sizes.tolist(), strict=True)):
        # not of the shard
        if storage not in parts:
            rows.append(index)
            events.append((storage, size))
            continue
        sign = (size > 0) - (size < 0)
        for number, new_size in zip(numbers[storage], parts[storage], strict=False):
            rows.append(index)
            events.append((number, sign * new_size))
    columns = np.array(events, dtype=np.int64).reshape(-1, 2)
    return np.array(rows, dtype=np.int64), columns[:, 0], columns[:, 1]


def _times(size: int, ratio: Fraction) -> int:
    """Multiply a size by a ratio, rounded up."""
    return -(-size * ratio.numerator // ratio.denominator)
