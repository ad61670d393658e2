"""Align dumps with the programs of the same job: where every rank stood.

In : the State of dumps, and the job's Programs.  Out: per rank the last call that it issued and in
which iteration, where only one place fits.

Start-up calls are in no program, so a group's counter is known only modulo its calls per iteration:
places are found by the calls themselves (operation, dtype, size), group by group.  Several places:
none is named.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from dataclasses import dataclass

from megatron_prism.core.ops import CODE, DTYPE_WORDS, IS_NCCL, Op
from megatron_prism.core.program import Programs
from megatron_prism.features.hang.dumps import Entry
from megatron_prism.features.hang.state import JobState

_STRETCH = 256  # calls of the history that are compared
_DTYPES = {word: name for name, word in DTYPE_WORDS.items()}
Key = tuple[object, ...]  # operation, dtype, elements
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


def recorded(op: Op) -> bool:
    """Whether dumps have it."""
    return bool(op.group and IS_NCCL[CODE[op.name]])


def key(op: Op) -> Key:
    """Return operation, type and size of a call of a program, as dumps say them."""
    size = -1 if op.name in _UNSIZED else max(op.num_in, op.num_out)
    return op.name, DTYPE_WORDS.get(op.dtype, "Float"), size


def seen(entry: Entry) -> Key:
    """Return operation, type and size of a call of a dump."""
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


def _counts(keys: list[Key], last: list[Key]) -> set[int]:
    """After how many of an iteration's calls ``keys`` the last ones can be ``last``; 0 is a whole
    one.
    """
    size = len(keys)
    return {count % size for count in range(1, size + 1)
            if all(keys[(count - 1 - back) % size] == key
                   for back, key in enumerate(last[: -size - 1 : -1]))}  # fmt: skip


class Alignment:
    """The dumps of ``state`` over ``programs``: the calls of every program, group by group."""

    def __init__(self, state: JobState, programs: Programs) -> None:
        self.state, self.programs = state, programs
        self.fifos: dict[int, dict[tuple[str, bool], list[Key]]] = {}
        self.orders: dict[int, list[Key]] = {}
        self.steps: dict[int, list[tuple[int, dict[tuple[str, bool], int]]]] = {}
        for number, program in enumerate(programs.programs):
            self._read(number, list(program))

    def _read(self, number: int, ops: list[Op]) -> None:
        keys: dict[tuple[str, bool], list[Key]] = defaultdict(list)
        steps: list[tuple[int, dict[tuple[str, bool], int]]] = []
        for index, op in enumerate(ops):
            if recorded(op):
                group = (op.group, op.name in ("send", "recv"))
                keys[group].append(key(op))
                steps.append((index, {g: len(k) for g, k in keys.items()}))
        self.orders[number] = [(op.group, *key(op)) for op in ops if recorded(op)]
        self.fifos[number] = dict(keys)
        self.steps[number] = steps

    def places(self) -> dict[int, Place]:
        """rank -> its place."""
        return {rank: self.place(rank, self.fits(rank)) for rank in sorted(self.state.dumps)}

    def fits(self, rank: int) -> list[int]:
        """Steps of the program of ``rank`` after which its dump may have been taken."""
        number, dump = int(self.programs.program_of[rank]), self.state.dumps[rank]
        fifos, steps = self.fifos[number], self.steps[number]
        calls: dict[tuple[str, bool], list[Key]] = defaultdict(list)
        order: list[Key] = []
        for e in dump.entries:
            if e.op != "coalesced" and (e.desc, e.pair) in fifos:
                calls[e.desc, e.pair].append(seen(e))
                order.append((e.desc, *seen(e)))
        allowed = {g: _counts(fifos[g], s) for g, s in calls.items()}
        found = [step for step, (_, counts) in enumerate(steps)
                 if all(counts.get(g, 0) % len(fifos[g]) in c for g, c in allowed.items())
                 ]  # fmt: skip
        if not any(e.done for e in dump.entries):
            return found
        if dump.entries[-1].record < len(dump.entries):  # all since the job began
            found = [step for step in found if step < len(order)]
        # with history the last calls are known in order: the longest stretch that fits
        lengths = {step: self._stretch(number, step, order[-_STRETCH:]) for step in found}
        most = max(lengths.values(), default=0)
        return [step for step, length in lengths.items() if length == most > 0]

    def stops(self, rank: int, step: int) -> list[int]:
        """Ops before which its host may stand after ``step``: no dump says how many of the calls
        behind it that are not NCCL's it has made.
        """
        ops = self.programs.of(rank)
        first = self.steps[int(self.programs.program_of[rank])][step][0] + 1
        rest = itertools.takewhile(lambda at: not recorded(ops[at]), range(first, len(ops)))
        return [first, *(at + 1 for at in rest if ops[at].group)]

    def first_open(self, rank: int, step: int) -> int:
        """The op of the oldest outstanding call of a dump taken after ``step``: as many calls back
        as are outstanding; calls of a rank with itself are in no dump.
        """
        number, left = int(self.programs.program_of[rank]), len(self.state.outstanding[rank])
        known = {g.desc for g in self.state.groups.values() if rank in g.ranks}
        ops = self.programs.programs[number]
        for back in range(step, -1, -1):
            index = self.steps[number][back][0]
            left -= ops[index].group in known
            if left <= 0:
                return index
        return self.steps[number][0][0]

    def _stretch(self, number: int, step: int, order: list[Key]) -> int:
        """How many of the last calls are those of the program up to ``step``, going backwards."""
        calls = self.orders[number]
        for back, key in enumerate(reversed(order)):
            if calls[(step - back) % len(calls)] != key:
                return back if back > step else 0  # before the iteration anything may have been
        return len(order)

    def place(self, rank: int, found: list[int]) -> Place:
        """Its place, if one step alone fits."""
        if len(found) != 1:
            return Place(rank, -1, -1, "", "", "", "", len(found))
        number = int(self.programs.program_of[rank])
        index = self.steps[number][found[0]][0]
        op = self.programs.programs[number][index]
        when = self._iteration(rank, found[0])
        return Place(rank, index, found[0] + 1, op.label, op.name, op.group, op.site, 1, when)

    def _iteration(self, rank: int, step: int) -> int:
        """By the group that calls most in an iteration: before the first one fewer calls were made
        in it (start-up) than one iteration makes, else the number is too high; exact where captures
        know how many calls came before theirs.
        """
        program = self.programs.of(rank)
        fifos, counts = self.fifos[int(self.programs.program_of[rank])], self.state.counts[rank]
        earlier = program.calls_before()
        made = self.steps[int(self.programs.program_of[rank])][step][1]
        sizes = {desc: len(fifos[desc, False]) for desc in counts if (desc, False) in fifos}
        if not sizes:
            return 0
        desc = max(sizes, key=lambda desc: (desc in earlier, sizes[desc]))
        turns = (counts[desc] - earlier.get(desc, 0) - made.get((desc, False), 0)) // sizes[desc]
        return max(0, 1 + turns + (earlier.get("", 0) if desc in earlier else 0))
