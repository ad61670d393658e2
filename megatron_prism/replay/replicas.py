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

from megatron_prism.core import shard
from megatron_prism.core.errors import ProgramError, UsageError
from megatron_prism.core.groups import WORLD_GROUP
from megatron_prism.core.ops import CODE, IS_PAIR, NAMES, SHARED
from megatron_prism.core.program import Program, Programs
from megatron_prism.core.slices import renumbered
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


def with_data_parallel(programs: Programs, dp: int) -> Programs:
    """The world with data-parallel size ``dp``.

    UsageError if the experts do not fill such a world, ProgramError if the replicas are not alike
    or a call's size in the new world is not known.
    """
    old = programs.world
    if dp < 1:
        raise UsageError(f"a data-parallel size of {dp}", fix="1 or more")
    if dp == old.dp:
        return programs
    if programs.groups:
        raise ProgramError(
            f"the groups {', '.join(programs.groups)} are lists of ranks, which say nothing of a "
            "larger world",
            fix="capture a world of that size",
        )
    experts = (old.etp or old.tp) * old.ep
    whole = experts // math.gcd(experts, old.tp * old.cp)  # replicas that the experts fill
    if dp % whole:
        raise UsageError(
            f"dp={dp}: experts etp {old.etp} x ep {old.ep} need a multiple of {whole} replicas of "
            f"tp {old.tp} x cp {old.cp} ranks",
            fix=f"dp={-(-dp // whole) * whole}",
        )
    world = dataclasses.replace(old, size=old.size // old.dp * dp)
    same = np.array(partition(programs).programs, dtype=np.int32)
    running = same[partition(programs).of]
    first = _places(old)[:, :, 0]  # [pp, others]: the ranks of the first replica
    differ = _differ(running, _places(old))
    if differ and programs.source.get("tier") == "cuda":
        running = _kinds(programs)[running]
    for stage, other, replica in _differ(running, _places(old)):
        one, unlike = _places(old)[stage, other, [0, replica]].tolist()
        raise ProgramError(
            f"ranks {one} and {unlike} differ in nothing but the replica, and run different "
            "programs",
            fix="change the size first and slow ranks down after that; uneven experts need a "
            "capture of the new size",
        )
    of = np.empty(world.size, dtype=np.int32)
    of[_places(world)] = running[first][:, :, None]
    bare = dataclasses.replace(programs, world=world, program_of=of)
    before, after = memberships(programs), memberships(bare)
    made, widths, sharded = list(programs.programs), set[tuple[int, int]](), False
    moved: dict[int, int] = {}  # captured rank -> the rank that runs its program in the new world
    for index in np.unique(of).tolist():
        place = tuple(np.argwhere(running[first] == index)[0])
        here, there = int(first[place]), int(_places(world)[(*place, 0)])
        sizes = {
            name: (len(before[name].group(here)), len(after[name].group(there)))
            for name in programs.programs[index].groups()
        }
        resized = _Resizer(programs.programs[index], sizes, old, world, here, there)
        made[index] = resized.program()
        moved[programs.programs[index].rank] = there
        widths |= resized.buckets
        sharded |= resized.sharded
    source = renumbered(programs.source, moved)
    scaled = without_unused(dataclasses.replace(bare, programs=tuple(made), source=source))
    text = _text(old.dp, dp, widths, sharded) + ", times of the first replica" * bool(differ)
    return with_assumption(scaled, text, Fraction(dp, old.dp))


def _text(old: int, new: int, widths: set[tuple[int, int]], sharded: bool) -> str:
    text = f"data-parallel size {new} instead of {old}: "
    if sharded:
        text += f"what follows a rank's part of the parameters x {Fraction(old, new)}, other "
    text += "segments and memory as captured"
    if sharded:
        text += f"; {_RESERVED}"
    if any(b % a for a, b in widths):
        text += ", buckets up to their padding too large"
    if any(max(pair) > _BUCKET_GROWS for pair in widths):
        text += ", boundaries of buckets as captured"
    return text


def _places(world: World) -> np.ndarray:
    """int64 [pp, cp x tp, dp]: the rank at every place."""
    ranks = np.arange(world.size)
    where = [np.asarray(world._along(axis, ranks)) for axis in ("pp", "cp", "tp", "dp")]
    found = np.empty((world.pp, world.cp, world.tp, world.dp), dtype=np.int64)
    found[tuple(where)] = ranks
    return found.reshape(world.pp, world.cp * world.tp, world.dp)


def _kinds(programs: Programs) -> np.ndarray:
    """int32 [programs]: of every measured program the first that differs from it in times, and in
    how the parameters are shared out, alone.
    """
    plain = []
    for program in programs.programs:
        bare = shard.without_shard(program) if shard.is_sharded(program) else program
        ops = bare.ops.copy()
        for name in _TOOK:
            ops[name] = -1
        plain.append(dataclasses.replace(bare, ops=ops))
    return equal_programs(tuple(plain))


def _differ(running: np.ndarray, places: np.ndarray) -> list[list[int]]:
    """Stage, other place and replica of ranks that run another program than the first replica's."""
    found: list[list[int]] = np.argwhere(running[places] != running[places][:, :, :1]).tolist()
    return found


@dataclasses.dataclass(frozen=True)
class _Resizer:
    """One program, and the sizes of its groups before and after.

    here, there : the rank, and the one that runs the program in the new world
    buckets     : sizes of groups before and after whose members share out buckets
    """

    given: Program
    sizes: dict[str, tuple[int, int]]
    old: World
    new: World
    here: int
    there: int
    buckets: set[tuple[int, int]] = dataclasses.field(default_factory=set)

    @property
    def sharded(self) -> bool:
        return shard.is_sharded(self.given)

    def program(self) -> Program:
        """The program in the new world."""
        ops = self.given.ops.copy()
        for name, indices in self.given.groups().items():
            if self.sizes[name][0] != self.sizes[name][1]:
                for i in indices.tolist():
                    self._resize(ops[i], name)
        resized = dataclasses.replace(self.given, ops=ops, rank=self.there)
        if not self.sharded:
            return resized
        if shard.has_quantized(self.given):
            raise ProgramError(
                "each FP8 parameter of a rank's part is copied by kernels of its own, and how many "
                "parameters another part has is not known",
                fix="capture a world of that size",
            )
        return _with_shard(resized, Fraction(self.old.dp, self.new.dp))  # of the experts', too

    def _resize(self, row: np.void, group: str) -> None:
        before, after = self.sizes[group]
        name = int(row["name"])
        if IS_PAIR[name]:
            row["peer"] = self._peer(int(row["peer"]), group)
        elif self._shares_more(row):
            raise ProgramError(
                f"replicas share more out than the optimizer's states (an {NAMES[name]} of {group} "
                f"at {self.given.strings[row['site']]}), and what else follows their number is "
                "not known",
                fix="capture a world of that size",
            )
        elif NAMES[name] in ("all_to_all", *EXPERT_CALLS) or row["splits"] >= 0:
            raise ProgramError(
                f"who sends what in an {NAMES[name]} of {group} with {after} ranks is not known",
                fix="capture a world of that size",
            )
        elif name in (CODE["all_gather"], CODE["gather"]) and row["num_out"] > 0:
            row["num_in"], row["num_out"] = self._shard(row, "num_in", "num_out", before, after)
        elif name in (CODE["reduce_scatter"], CODE["scatter"]) and row["num_in"] > 0:
            row["num_out"], row["num_in"] = self._shard(row, "num_out", "num_in", before, after)

    def _shares_more(self, row: np.void) -> bool:
        """Whether a call moves parts of parameters or gradients that are no bucket of DDP's, as
        both FSDPs do.
        """
        site, group = (self.given.strings[row[name]] for name in ("site", "group"))
        if int(row["name"]) not in _OF_PARTS or SHARED not in group or not site:
            return False
        return shard.BUCKETS not in site or "fsdp" in site

    def _shard(
        self, row: np.void, part: str, whole: str, before: int, after: int
    ) -> tuple[int, int]:
        """(elements of one rank, of all) in the new group."""
        if shard.BUCKETS not in self.given.strings[row["site"]]:
            return int(row[part]), int(row[part]) * after
        self.buckets.add((before, after))
        align = math.lcm(after, _ALIGN)
        total = -(-int(row[whole]) // align) * align
        return total // after, total

    def _peer(self, offset: int, group: str) -> int:
        """How far the same stage is in the new world."""
        if group == WORLD_GROUP:
            other = (self.here + offset) % self.old.size
            mine, theirs = self.old.coordinates(self.here), self.old.coordinates(other)
            if mine._replace(pp=0) == theirs._replace(pp=0):
                at = self.new.coordinates(self.there)._replace(pp=theirs.pp)
                return self.new.rank_at(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp) - self.there
        raise ProgramError(
            f"a message goes {offset} places along {group}, which changes its size",
            fix="capture a world of that size",
        )


_OF_HOST = "host", "lead"
# Python's loops of a step: their fixed part, in parts of parameters (docs/measurements.md)
_FIXED = 4
_TOOK = ("ns", "products", *_OF_HOST)


def _with_shard(program: Program, ratio: Fraction) -> Program:
    """The program of a rank that updates ``ratio`` times as many parameters."""
    return _with_memory(_with_segments(program, ratio), ratio)


def _with_segments(program: Program, ratio: Fraction) -> Program:
    ops, strings, most = program.ops.copy(), list(program.strings), shard.parameters(program)
    parts = shard.parts(program)
    now = max(Fraction(1), min(parts * ratio, Fraction(max(most, parts))))
    # slices of a GPU do not say how many parts there are
    of_host = Fraction(now + _FIXED, parts + _FIXED) if parts else ratio
    for index in shard.segments(program).tolist():
        row = ops[index]
        note, num_bytes, kernels = scaled_kernels(strings[row["note"]], ratio, most)
        if row["traffic"] >= 0:
            row["traffic"] = max(0, int(row["traffic"]) + num_bytes)
        if row["kernels"] >= 0:
            row["kernels"] += kernels
        for name in _TOOK:
            if row[name] >= 0:
                row[name] = _times(int(row[name]), of_host if name in _OF_HOST else ratio)
        if note != strings[row["note"]]:
            row["note"] = len(strings)
            strings.append(note)
    return dataclasses.replace(program, ops=ops, strings=tuple(strings))


def _with_memory(program: Program, ratio: Fraction) -> Program:
    """The program with ``ratio`` times as many bytes of storages that a shard's parameters have.

    Requests of earlier iterations are known by their size alone: those follow the shard whose size
    only storages of this iteration have that do.
    """
    memory, history = program.allocations, program.history
    if not len(memory):
        return program
    chosen, within = shard.storages(program)
    come = memory["bytes"] >= shard.SCALAR
    mine, most = memory[chosen], shard.parameters(program)
    parts = _parts(mine["storage"], mine["bytes"], mine["note"], ratio, most)
    sizes = set(memory["bytes"][within].tolist())
    sizes -= set(memory["bytes"][come & ~chosen].tolist())
    earlier = ~np.isin(history[:, 0], memory["storage"]) & np.isin(history[:, 1], [*sizes])
    parts |= _parts(history[earlier, 0], history[earlier, 1], np.zeros(earlier.sum()), ratio, most)
    new = 1 + int(max(memory["storage"].max(), history[:, 0].max(initial=0)))
    names = {}
    for old, sizes_of_it in parts.items():
        names[old] = [old, *range(new, new + len(sizes_of_it) - 1)]
        new += max(0, len(sizes_of_it) - 1)
    rows, storage, num_bytes = _split(memory["storage"], memory["bytes"], parts, names)
    allocations = memory[rows]
    allocations["storage"], allocations["bytes"] = storage, num_bytes
    asked, storage, num_bytes = _split(history[:, 0], history[:, 1], parts, names)
    history = history[asked]
    history[:, 0], history[:, 1] = storage, num_bytes
    return dataclasses.replace(
        program,
        allocations=allocations,
        earlier_peak=_earlier_peak(program, allocations),
        history=history,
        streams=program.streams[rows] if len(program.streams) else program.streams,
        routed=program.routed[rows] if len(program.routed) else program.routed,
    )


def _earlier_peak(program: Program, allocations: np.ndarray) -> np.ndarray:
    """``Program.earlier_peak`` with the optimizer's states that stand in ``allocations``."""
    standing = allocations[allocations["before"] == 0]
    state_sizes: dict[str, Counter[int]] = {}
    for note, size in zip(standing["note"].tolist(), standing["bytes"].tolist(), strict=True):
        text = program.strings[note]
        if text.startswith("optim:"):
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
    storages: np.ndarray, sizes: np.ndarray, notes: np.ndarray, ratio: Fraction, most: int
) -> dict[int, list[int]]:
    """Storage -> bytes of those that come in its place: of a smaller shard the first ones of each
    kind, as a shard is a part of a row of parameters; of a larger one as many more of each, up to
    ``most``, the rank's parameters (0: not known).
    """
    found: dict[int, list[int]] = {}
    for note in np.unique(notes).tolist():
        mine = np.flatnonzero(notes == note)
        left = _times(int(sizes[mine].sum()), ratio)
        for storage, size in zip(storages[mine].tolist(), sizes[mine].tolist(), strict=True):
            count = max(1, min(int(ratio), (most or int(ratio) * len(mine)) // len(mine)))
            taken = min(size, left) if ratio < 1 else _times(size, ratio / count)
            found[storage], left = [taken] * (count if taken else 0), left - taken
    return found


def _split(
    storages: np.ndarray,
    sizes: np.ndarray,
    parts: Mapping[int, list[int]],
    names: Mapping[int, list[int]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Events of storages (bytes that come; negative: that go) with those of ``parts`` in their
    places.

    Returns:
        (the event that each follows from, its storage, its bytes), int64 [events]
    """
    rows, found = list[int](), list[tuple[int, int]]()
    for index, (storage, size) in enumerate(zip(storages.tolist(), sizes.tolist(), strict=True)):
        here = [(storage, size)]
        if storage in parts:
            sign = (size > 0) - (size < 0)
            here = [(n, sign * b) for n, b in zip(names[storage], parts[storage], strict=False)]
        rows += [index] * len(here)
        found += here
    columns = np.array(found, dtype=np.int64).reshape(-1, 2)
    return np.array(rows, dtype=np.int64), columns[:, 0], columns[:, 1]


def _times(size: int, ratio: Fraction) -> int:
    """Rounded up."""
    return -(-size * ratio.numerator // ratio.denominator)
