"""Align dumps with the programs of the same job: where every rank stood.

In : the State of dumps, and the job's Programs.  Out: per rank the last call that it issued and in
which iteration, where only one place fits.

Start-up calls are in no program, so a group's counter is known only modulo its calls per iteration:
places are found by the calls themselves (operation, dtype, size), group by group.  Several places:
none is named.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass

from megatron_prism.core.programs.ops import CODE, DTYPE_WORDS, IS_NCCL, Op
from megatron_prism.core.programs.program import Programs
from megatron_prism.features.hang.calls import Entry
from megatron_prism.features.hang.state import JobState

_STRETCH = 256  # calls of the history that are compared
_DTYPES = {word: name for name, word in DTYPE_WORDS.items()}
Key = tuple[object, ...]  # operation, dtype, elements
_UNSIZED = ("all_to_all", "barrier")  # their sizes differ from iteration to iteration


GroupKey = tuple[str, bool]  # description of a group, and whether its messages are meant


@dataclass(frozen=True)
class Place:
    """The last call that a rank issued.

    Attributes:
        rank: The rank.
        index: Op of its program; -1 where several fit, or none.
        issued: Number of the iteration's calls up to it.
        label: Of the op.
        op: The operation.
        group: Description of its group.
        site: File and line.
        candidates: Number of ops that fit.
        iteration: Counted from 1; 0 is unknown.
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
        text = f"rank {self.rank}: "
        if self.iteration:
            text += f"iteration {self.iteration}, "
        text += f"last issued op {self.index} ({self.label}), {self.op} of {self.group}"
        if self.site:
            text += f" at {self.site}"
        return text


def recorded(op: Op) -> bool:
    """Tell whether dumps have an op."""
    return bool(op.group and IS_NCCL[CODE[op.name]])


def key(op: Op) -> Key:
    """Return operation, type and size of a call of a program, as dumps say them."""
    size = -1
    if op.name not in _UNSIZED:
        size = max(op.num_in, op.num_out)
    return op.name, DTYPE_WORDS.get(op.dtype, "Float"), size


def seen(entry: Entry) -> Key:
    """Return operation, type and size of a call of a dump."""
    size = -1
    if entry.op not in _UNSIZED:
        size = max((*entry.numbers[0], *entry.numbers[1]), default=-1)
    dtype = next(iter(entry.dtypes), "")
    return entry.op, dtype, size


def as_dumped(op: Op, entry: Entry) -> Op:
    """Return the op as the dump has it: another operation, dtype or size."""
    inputs, outputs = entry.numbers
    num_in = num_out = -1
    if inputs:
        num_in = sum(inputs)
    if outputs:
        num_out = sum(outputs)
    dtype_word = next(iter(entry.dtypes), "")

    # only some operations have a root,
    root = -1
    if entry.op in ("broadcast", "reduce", "gather", "scatter"):
        root = max(op.root, 0)
    # or reduce
    reduction = ""
    if entry.op in ("all_reduce", "reduce_scatter", "reduce"):
        reduction = op.reduce or "sum"
    handle = op.handle
    if entry.op == "barrier":
        handle = -1  # it holds the host
    return dataclasses.replace(
        op,
        name=entry.op,
        num_in=num_in,
        num_out=num_out,
        splits=None,
        dtype=_DTYPES.get(dtype_word, op.dtype),
        root=root,
        reduce=reduction,
        handle=handle,
    )


def _positions_after(keys: list[Key], last_calls: list[Key]) -> set[int]:
    """Find after how many calls of an iteration the last ones can be ``last_calls``.

    Args:
        keys: The calls of an iteration, which repeats.
        last_calls: As recorded, oldest first.

    Returns:
        Numbers of calls; 0 stands for a whole iteration.
    """
    size = len(keys)
    recent_calls = last_calls[-size:]
    if not recent_calls:
        return set(range(size))
    iterations = keys + keys
    positions: set[int] = set()
    for count in range(1, size + 1):
        end = size + count
        # most counts end in another call: only the others are compared whole
        if iterations[end - 1] != recent_calls[-1]:
            continue
        if iterations[end - len(recent_calls) : end] == recent_calls:
            positions.add(count % size)
    return positions


class Alignment:
    """The dumps of a job over its programs.

    Attributes:
        state: The job.
        programs: Its programs.
        fifos: Number of a program -> group -> its calls, in the order of issue.
        orders: Number of a program -> its calls with their groups, in the order of issue.
        steps: Number of a program -> for each call its op, and group -> calls up to it.
    """

    def __init__(self, state: JobState, programs: Programs) -> None:
        self.state, self.programs = state, programs
        self.fifos: dict[int, dict[GroupKey, list[Key]]] = {}
        self.orders: dict[int, list[Key]] = {}
        self.steps: dict[int, list[tuple[int, dict[GroupKey, int]]]] = {}
        for number, program in enumerate(programs.programs):
            self._read(number, list(program))

    def _read(self, number: int, ops: list[Op]) -> None:
        """Collect the calls of a program, group by group."""
        keys: dict[GroupKey, list[Key]] = defaultdict(list)
        order: list[Key] = []
        steps: list[tuple[int, dict[GroupKey, int]]] = []
        for index, op in enumerate(ops):
            # what is not NCCL's is in no dump
            if recorded(op):
                is_message = op.name in ("send", "recv")
                keys[op.group, is_message].append(key(op))
                order.append((op.group, *key(op)))
                steps.append((index, {group: len(calls) for group, calls in keys.items()}))
        self.orders[number] = order
        self.fifos[number] = dict(keys)
        self.steps[number] = steps

    def _number(self, rank: int) -> int:
        """Return the number of the program of ``rank``."""
        return int(self.programs.program_of[rank])

    def places(self) -> dict[int, Place]:
        """Return rank -> its place."""
        return {rank: self.place(rank, self.fits(rank)) for rank in sorted(self.state.dumps)}

    def fits(self, rank: int) -> list[int]:
        """Return steps of the program of ``rank`` after which its dump may have been taken."""
        number, dump = self._number(rank), self.state.dumps[rank]
        fifos = self.fifos[number]
        recorded_calls: dict[GroupKey, list[Key]] = defaultdict(list)
        order: list[Key] = []
        for entry in dump.entries:
            if entry.op != "coalesced" and (entry.desc, entry.pair) in fifos:
                recorded_calls[entry.desc, entry.pair].append(seen(entry))
                order.append((entry.desc, *seen(entry)))

        # start-up calls are in no program: steps that fit in each group by itself
        allowed: dict[GroupKey, set[int]] = {}
        for group, calls in recorded_calls.items():
            allowed[group] = _positions_after(fifos[group], calls)
        fitting_steps: list[int] = []
        for step, (_, counts) in enumerate(self.steps[number]):
            positions = {group: counts.get(group, 0) % len(fifos[group]) for group in allowed}
            if all(positions[group] in allowed[group] for group in allowed):
                fitting_steps.append(step)
        if not any(entry.done for entry in dump.entries):
            return fitting_steps

        # all calls since the job began are recorded: a later step would need more of them
        if dump.entries[-1].record < len(dump.entries):
            fitting_steps = [step for step in fitting_steps if step < len(order)]

        # with history the last calls are known in order: the longest stretch that fits
        last_calls = order[-_STRETCH:]
        lengths = {step: self._stretch(number, step, last_calls) for step in fitting_steps}
        longest = max(lengths.values(), default=0)
        return [step for step, length in lengths.items() if length == longest > 0]

    def stops(self, rank: int, step: int) -> list[int]:
        """Return ops before which the host of ``rank`` may stand after ``step``.

        No dump says how many calls behind it that are not NCCL's the rank has made.
        """
        ops = self.programs.of(rank)
        first = self.steps[self._number(rank)][step][0] + 1
        stops = [first]
        for index in range(first, len(ops)):
            # the next call of NCCL would be in the dump
            if recorded(ops[index]):
                break
            if ops[index].group:
                stops.append(index + 1)
        return stops

    def first_open(self, rank: int, step: int) -> int:
        """Return the op of the oldest outstanding call of a dump taken after ``step``.

        It is as many calls back as are outstanding; calls of a rank with itself are in no dump.
        """
        number = self._number(rank)
        remaining = len(self.state.outstanding[rank])
        descriptions = {group.desc for group in self.state.groups.values() if rank in group.ranks}
        ops = self.programs.programs[number]
        for earlier_step in range(step, -1, -1):
            index = self.steps[number][earlier_step][0]
            if ops[index].group in descriptions:
                remaining -= 1
            if remaining <= 0:
                return index
        return self.steps[number][0][0]

    def _stretch(self, number: int, step: int, last_calls: list[Key]) -> int:
        """Count how many of the last calls are those of the program up to ``step``."""
        calls = self.orders[number]
        for back, call in enumerate(reversed(last_calls)):
            if calls[(step - back) % len(calls)] != call:
                # before the iteration anything may have been called; inside it all must fit
                if back > step:
                    return back
                return 0
        return len(last_calls)

    def place(self, rank: int, fitting_steps: list[int]) -> Place:
        """Return the place of ``rank``, if one step alone fits."""
        if len(fitting_steps) != 1:
            return Place(rank, -1, -1, "", "", "", "", len(fitting_steps))
        step = fitting_steps[0]
        number = self._number(rank)
        index = self.steps[number][step][0]
        op = self.programs.programs[number][index]
        iteration = self._iteration(rank, step)
        return Place(rank, index, step + 1, op.label, op.name, op.group, op.site, 1, iteration)

    def _iteration(self, rank: int, step: int) -> int:
        """Return the iteration of a call of the program, by counted calls; 0: unknown.

        It is exact for a group of which the capture counted the calls before its iteration.
        Otherwise the group with most calls in an iteration tells it, if start-up makes fewer calls
        in that group than one iteration; if it makes more, the number is too high.

        Args:
            rank: Whose calls were counted.
            step: Which of the program's calls.
        """
        number = self._number(rank)
        fifos, counts = self.fifos[number], self.state.counts[rank]
        calls_before = self.programs.of(rank).calls_before()
        calls_up_to_step = self.steps[number][step][1]
        sizes: dict[str, int] = {}
        for desc in counts:
            if (desc, False) in fifos:
                sizes[desc] = len(fifos[desc, False])
        if not sizes:
            return 0

        # a group of which the calls before are known is better than one with more calls
        desc = max(sizes, key=lambda desc: (desc in calls_before, sizes[desc]))
        earlier_calls = calls_before.get(desc, 0) + calls_up_to_step.get((desc, False), 0)
        iteration = 1 + (counts[desc] - earlier_calls) // sizes[desc]
        if desc in calls_before:
            iteration += calls_before.get("", 0)
        return max(0, iteration)
