"""Align dumps with the programs of the same job: where every rank stood, and does the verdict hold.

In : the State of dumps, and the job's Programs.  Out: per rank the last call that it issued and in
which iteration, where only one place fits.

Start-up calls are in no program, so a group's counter is known only modulo its calls per iteration:
places are found by the calls themselves (operation, dtype, size), group by group, and what remains
is settled by ranks of the same stage that are placed already.  Several places: none is named.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from dataclasses import dataclass

from megatron_prism.core.errors import UsageError
from megatron_prism.core.ops import CODE, IS_CALL, Op
from megatron_prism.core.program import Program, Programs
from megatron_prism.core.units import counted
from megatron_prism.core.world import format_ranks
from megatron_prism.graph import stall
from megatron_prism.graph.classes import memberships
from megatron_prism.hang import export
from megatron_prism.hang.dumps import Dump, DumpSet, Entry
from megatron_prism.hang.state import JobState
from megatron_prism.hang.verdict import Culprit, Diagnosis

_STRETCH = 256  # calls of the history that are compared
_DTYPES = {word: name for name, word in export.DTYPE_WORDS.items()}
_UNSIZED = ("all_to_all", "barrier")  # their sizes differ from iteration to iteration


@dataclass(frozen=True)
class Place:
    """The last call that ``rank`` issued: op ``index`` of its program, of ``candidates`` that fit.

    index is -1 where several fit, or none; issued counts the iteration's calls up to it; iteration
    counts from 1, 0 is unknown
    """

    rank: int
    index: int
    issued: int
    label: str
    op: str
    group: str
    site: str
    candidates: int
    iteration: int = 0

    def __str__(self) -> str:
        if self.index < 0:
            return f"rank {self.rank}: {self.candidates or 'no'} places in its program fit"
        at = f" at {self.site}" if self.site else ""
        what = f"op {self.index} ({self.label}), {self.op} of {self.group}{at}"
        when = f"iteration {self.iteration}, " if self.iteration else ""
        return f"rank {self.rank}: {when}last issued {what}"


def key(op: Op) -> tuple[object, ...]:
    size = -1 if op.name in _UNSIZED else max(op.num_in, op.num_out)
    return op.name, export.DTYPE_WORDS.get(op.dtype, "Float"), size


def seen(entry: Entry) -> tuple[object, ...]:
    sizes = [n for side in entry.numbers for n in side]
    size = -1 if entry.op in _UNSIZED else max(sizes, default=-1)
    return entry.op, next(iter(entry.dtypes), ""), size


def as_dumped(op: Op, entry: Entry) -> Op:
    """The op as the dump has it: another operation, dtype or size."""
    sizes = [sum(side) if side else -1 for side in entry.numbers]
    rooted = entry.op in ("broadcast", "reduce", "gather", "scatter")
    reduces = entry.op in ("all_reduce", "reduce_scatter", "reduce")
    return dataclasses.replace(
        op, name=entry.op, num_in=sizes[0], num_out=sizes[1], splits=None,
        dtype=_DTYPES.get(next(iter(entry.dtypes), ""), op.dtype),
        root=(max(op.root, 0) if rooted else -1), reduce=(op.reduce or "sum") if reduces else "",
        handle=-1 if entry.op == "barrier" else op.handle,  # it holds the host
    )  # fmt: skip


class _Fifo:
    """The calls of one program in one group: keys, and how many were issued up to every call."""

    def __init__(self, keys: list[tuple[object, ...]]) -> None:
        self.keys = keys

    def counts(self, seen: list[tuple[object, ...]]) -> set[int]:
        """After how many calls of the iteration ``seen`` can be the last ones; 0 is a whole one."""
        size = len(self.keys)
        seen = seen[-size:]
        return {
            count % size
            for count in range(1, size + 1)
            if all(self.keys[(count - 1 - back) % size] == key
                   for back, key in enumerate(reversed(seen)))
        }  # fmt: skip


class Alignment:
    """The dumps of ``state`` over ``programs``: the calls of every program, group by group."""

    def __init__(self, state: JobState, programs: Programs) -> None:
        self.state, self.programs = state, programs
        self.fifos: dict[int, dict[tuple[str, bool], _Fifo]] = {}
        self.orders: dict[int, list[tuple[object, ...]]] = {}
        self.steps: dict[int, list[tuple[int, dict[tuple[str, bool], int]]]] = {}
        for number, program in enumerate(programs.programs):
            self._read(number, list(program))

    def _read(self, number: int, ops: list[Op]) -> None:
        keys: dict[tuple[str, bool], list[tuple[object, ...]]] = defaultdict(list)
        steps: list[tuple[int, dict[tuple[str, bool], int]]] = []
        for index, op in enumerate(ops):
            if op.group:
                group = (op.group, op.name in ("send", "recv"))
                keys[group].append(key(op))
                steps.append((index, {g: len(k) for g, k in keys.items()}))
        self.orders[number] = [(op.group, *key(op)) for op in ops if op.group]
        self.fifos[number] = {g: _Fifo(k) for g, k in keys.items()}
        self.steps[number] = steps

    # -- places -----------------------------------------------------------------------------------
    def places(self) -> dict[int, Place]:
        """rank -> its place."""
        fits = {rank: self._fits(rank, dump) for rank, dump in sorted(self.state.dumps.items())}
        offsets = self._offsets(fits)
        return {rank: self._place(rank, self._settle(rank, found, offsets))
                for rank, found in fits.items()}  # fmt: skip

    def fits(self, rank: int) -> list[int]:
        """Steps of its program after which its dump may have been taken."""
        return self._fits(rank, self.state.dumps[rank])

    def _fits(self, rank: int, dump: Dump) -> list[int]:
        """Steps of the program of ``rank`` after which its dump may have been taken."""
        number = int(self.programs.program_of[rank])
        fifos, steps = self.fifos[number], self.steps[number]
        calls: dict[tuple[str, bool], list[tuple[object, ...]]] = defaultdict(list)
        order: list[tuple[object, ...]] = []
        for e in dump.entries:
            if e.op != "coalesced" and (e.desc, e.pair) in fifos:
                calls[e.desc, e.pair].append(seen(e))
                order.append((e.desc, *seen(e)))
        allowed = {g: fifos[g].counts(s) for g, s in calls.items()}
        found = [
            step
            for step, (_, counts) in enumerate(steps)
            if all(counts.get(g, 0) % len(fifos[g].keys) in c for g, c in allowed.items())
        ]
        if not any(e.done for e in dump.entries):
            return found
        if dump.entries[-1].record < len(
            dump.entries
        ):  # all of it: an iteration that began has all its calls
            found = [step for step in found if step < len(order)]
        # with history the last calls are known in order: the longest stretch that fits
        lengths = {step: self._stretch(number, step, order[-_STRETCH:]) for step in found}
        most = max(lengths.values(), default=0)
        return [step for step, length in lengths.items() if length == most > 0]

    def first_open(self, rank: int, step: int) -> int:
        """The op of the oldest outstanding call of a dump taken after ``step``: as many calls back
        as are outstanding; calls of a rank with itself are in no dump."""
        number, left = int(self.programs.program_of[rank]), len(self.state.outstanding[rank])
        known = {g.desc for g in self.state.groups.values() if rank in g.ranks}
        ops = self.programs.programs[number]
        for back in range(step, -1, -1):
            index = self.steps[number][back][0]
            left -= ops[index].group in known
            if left <= 0:
                return index
        return self.steps[number][0][0]

    def _stretch(self, number: int, step: int, order: list[tuple[object, ...]]) -> int:
        """How many of the last calls are those of the program up to ``step``, going backwards."""
        calls = self.orders[number]
        for back, key in enumerate(reversed(order)):
            if calls[(step - back) % len(calls)] != key:
                return back if back > step else 0  # before the iteration anything may have been
        return len(order)

    def _residues(self, rank: int, step: int) -> dict[str, int]:
        """Per group, what of its counter the program does not explain, modulo an iteration."""
        number = int(self.programs.program_of[rank])
        _, counts = self.steps[number][step]
        found = {}
        for (name, member), count in self.state.enqueued.items():
            group = self.state.groups.get(name)
            if member == rank and group is not None and (group.desc, False) in self.fifos[number]:
                size = len(self.fifos[number][group.desc, False].keys)
                found[group.desc] = (count - counts.get((group.desc, False), 0)) % size
        return found

    def _offsets(self, fits: dict[int, list[int]]) -> dict[int, Counter[tuple[str, int]]]:
        """program -> (group, residue) of the ranks that have one place only."""
        votes: dict[int, Counter[tuple[str, int]]] = defaultdict(Counter)
        for rank, found in fits.items():
            if len(found) == 1:
                for item in self._residues(rank, found[0]).items():
                    votes[int(self.programs.program_of[rank])][item] += 1
        return votes

    def _settle(
        self, rank: int, found: list[int], offsets: dict[int, Counter[tuple[str, int]]]
    ) -> list[int]:
        votes = offsets.get(int(self.programs.program_of[rank]))
        if len(found) < 2 or not votes:
            return found
        usual: dict[str, int] = {}
        for (desc, residue), _ in votes.most_common():
            usual.setdefault(desc, residue)
        kept = []
        for step in found:
            residues = self._residues(rank, step).items()
            if all(usual.get(desc, residue) == residue for desc, residue in residues):
                kept.append(step)
        return kept or found

    def _place(self, rank: int, found: list[int]) -> Place:
        if len(found) != 1:
            return Place(rank, -1, -1, "", "", "", "", len(found))
        number = int(self.programs.program_of[rank])
        index = self.steps[number][found[0]][0]
        op = self.programs.programs[number][index]
        when = self._iteration(rank, found[0])
        return Place(rank, index, found[0] + 1, op.label, op.name, op.group, op.site, 1, when)

    def _iteration(self, rank: int, step: int) -> int:
        """By the group that calls most in an iteration: before the first one fewer calls were made
        in it (start-up) than one iteration makes, else the number is too high."""
        number = int(self.programs.program_of[rank])
        _, counts = self.steps[number][step]
        best, found = 0, 0
        for (name, member), count in self.state.enqueued.items():
            group = self.state.groups.get(name)
            if member != rank or group is None or (group.desc, False) not in self.fifos[number]:
                continue
            size = len(self.fifos[number][group.desc, False].keys)
            if size > best:
                best, found = size, 1 + (count - counts.get((group.desc, False), 0)) // size
        return max(0, found)


_CALLS_OTHERWISE = ("operation", "dtype", "shape", "coalescing")


@dataclass(frozen=True)
class Confirmation:
    """places: per rank; confirmed: None where nothing could be driven, else whether it fits.

    stops : culprit -> the op of its program at which it went wrong, where that is known
    """

    places: tuple[Place, ...]
    confirmed: bool | None
    lines: tuple[str, ...]
    stops: dict[int, int] = dataclasses.field(default_factory=dict)


def confirm_verdict(found: DumpSet, verdict: Diagnosis, programs: Programs) -> Confirmation:
    """Lay the dumps over the programs, and try the verdict on them.

    UsageError if the dumps are of a larger world.
    """
    last = max(found.dumps)
    if last >= programs.world.size:
        raise UsageError(f"rank {last} left a dump, and the programs are of {programs.world}",
                         fix="name the programs of the same job")  # fmt: skip
    overlay = Alignment(JobState(found), programs)
    trial = _Trial(overlay, overlay.places(), verdict)
    lines, confirmed = trial.drive()
    return Confirmation(tuple(trial.places.values()), confirmed, tuple(lines), trial.stops)


class _Trial:
    """One verdict, tried on the programs."""

    def __init__(self, overlay: Alignment, places: dict[int, Place], verdict: Diagnosis) -> None:
        self.overlay, self.places, self.verdict = overlay, places, verdict
        self.state, self.programs = overlay.state, overlay.programs
        self.groups = memberships(self.programs)
        self.stops: dict[int, int] = {}
        self.changed: dict[int, list[Op]] = {}

    def drive(self) -> tuple[list[str], bool | None]:
        """Run the world with the culprits as they were, and without."""
        known = [p for p in self.places.values() if p.index >= 0]
        lines = [
            f"{len(known)} of {counted(len(self.places), 'rank')} have one place in their programs"
        ]
        healthy = stall.run_until_stalled(self.programs)
        lines.append("without a fault the programs come to their end" if healthy.finished
                     else "the programs hang by themselves: see prism check")  # fmt: skip
        faults = self._faults()
        if faults is None or not known:
            return [*lines, "the verdict was not tried on the programs"], None
        state = stall.run_until_stalled(self._world(), faults)
        culprits = faults.keys() | self.changed.keys()
        others = [p for p in known if p.rank not in culprits]
        same = [p.rank for p in others if self._issued(state, p.rank) == p.issued]
        how = "calling what its dump says" if self.changed else "stopped there"
        lines.append(f"with rank {format_ranks(culprits)} {how}, {len(same)} of {len(others)} "
                     "other ranks stand where their dumps say")  # fmt: skip
        return lines, len(same) == len(others) if others else None

    def _world(self) -> Programs:
        of, made = self.programs.program_of.copy(), list(self.programs.programs)
        for rank, ops in self.changed.items():
            of[rank] = len(made)
            made.append(Program.from_ops(rank, ops))
        return dataclasses.replace(self.programs, programs=tuple(made), program_of=of)

    def _issued(self, state: stall.StalledJob, rank: int) -> int:
        names = self.programs.of(rank).ops["name"][: state.issued[rank]]
        return int(IS_CALL[names].sum())

    # -- what the culprits did --------------------------------------------------------------------
    def _faults(self) -> dict[int, stall.RankFault] | None:
        """What stops the culprits; None if that is not known of one of them."""
        faults: dict[int, stall.RankFault] = {}
        for culprit in self.verdict.culprits:
            rank, at = culprit.rank, self.places.get(culprit.rank)
            placed = at is not None and at.index >= 0
            if culprit.kind == "host stuck" and placed:
                assert at is not None
                self.stops[rank] = at.index + 1
                faults[rank] = stall.RankFault(host=at.index + 1)
            elif culprit.kind == "device stuck" and placed and self.state.head(rank):
                assert at is not None
                self.stops[rank] = self.overlay.first_open(rank, at.issued - 1)
                faults[rank] = stall.RankFault(device=self.stops[rank])
            elif culprit.kind == "missing dump" and (index := self._awaited(rank)) is not None:
                self.stops[rank] = index
                faults[rank] = stall.RankFault(host=index, silent=True)
            elif not self._called(culprit):
                return None
        return faults if faults or self.changed else None

    def _called(self, culprit: Culprit) -> bool:
        """Whether the call that differs, or was not made, could be put into the program."""
        index = self._awaited(culprit.rank)
        if index is None:
            return False
        ops = list(self.programs.of(culprit.rank))
        if culprit.kind == "skipped call":
            gone = ops.pop(index)
            ops = [op for op in ops if op.name != "wait" or op.handle != gone.handle]
        elif culprit.kind in _CALLS_OTHERWISE and (entry := self._entry(culprit.rank)) is not None:
            ops[index] = as_dumped(ops[index], entry)
        else:
            return False
        self.stops[culprit.rank], self.changed[culprit.rank] = index, ops
        return True

    def _entry(self, rank: int) -> Entry | None:
        for e in self.state.dumps[rank].entries:
            if (e.desc, e.seq, e.pair) == (self.verdict.group, self.verdict.seq, False):
                return e if e.op in CODE else None
        return None

    def _awaited(self, rank: int) -> int | None:
        """The op of ``rank`` that is the verdict's call, counted by a member with a known place."""
        verdict, steps = self.verdict, self.overlay.steps
        if verdict.group not in self.groups:
            return None
        for other in self.groups[verdict.group].group(rank).tolist():
            at = self.places.get(other)
            if at is None or at.index < 0 or other == rank:
                continue
            number = int(self.programs.program_of[other])
            name = next(n for n, g in self.state.groups.items()
                        if g.desc == verdict.group and other in g.ranks)  # fmt: skip
            later = self.state.enqueued.get((name, other), verdict.seq) - verdict.seq
            count = steps[number][at.issued - 1][1].get((verdict.group, False), 0) - later
            mine = self.programs.of(rank)
            fifo = mine.collectives(verdict.group)
            if 0 < count <= len(fifo):
                return int(fifo[count - 1])
        return None
