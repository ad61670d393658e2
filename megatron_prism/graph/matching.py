"""Match the calls of a world's programs by NCCL's rules, and show what does not fit.

In : programs and their classes.  Out: Findings, empty for a healthy world.  Every group is a FIFO
of collectives (a coalesced call is one entry), every directed pair of ranks in a group a FIFO of
sends and receives; the k-th entries of all members must be the same call.  Checked once per set of
classes that meet, never per rank.  Only the first disagreement of a FIFO is reported: what comes
after it follows from it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_prism.core.groups import Membership
from megatron_prism.core.programs.ops import CODE, DTYPE_NAMES, IS_CALL, NAMES, REDUCE
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.core.programs.program_text import format_op
from megatron_prism.core.units import counted
from megatron_prism.graph.classes import Classes

_FIELDS = ("operation", "dtype", "shape", "reduce op", "root", "coalescing")
_TEXTS = {0: NAMES, 1: DTYPE_NAMES, 3: REDUCE}  # of the columns of _FIELDS
_COUNT_IN = [CODE[n] for n in ("all_reduce", "broadcast", "reduce", "all_gather", "gather", "send")]
_COUNT_OUT = [CODE[n] for n in ("reduce_scatter", "scatter", "recv")]
_SILENT = [CODE[n] for n in ("grad_sync", "param_sync", "mark")]  # may stand in a batch
_GATHER = CODE["all_gather"]
_SIDES = ("num_in", "num_out")  # elements that a call sends, and receives
_AHEAD = 3  # entries that must agree again for a finding to be called missing, not different
_OF_OPS = ("handle", "batch")  # kinds that are about any op, not about a call


# -- one program by itself -------------------------------------------------------------------------
@dataclass(frozen=True)
class Unsound:
    """An op that means nothing.

    Attributes:
        kind: handle or batch.
        op: Its place in the program.
        likely: What is wrong with it.
    """

    kind: str
    op: int
    likely: str


def unsound(program: Program) -> Unsound | None:
    """Find the first op that means nothing; None if all ops mean something."""
    first: Unsound | None = None
    for check_ops in (_unmade_handle, _stray_batch, _reused_batch):
        finding = check_ops(program)
        if finding is None:
            continue
        if first is None or finding.op < first.op:
            first = finding
    return first


def _unmade_handle(program: Program) -> Unsound | None:
    """Find the first wait for a handle that no op before it has."""
    ops = program.ops
    names, handles = ops["name"], ops["handle"]
    makes_handle = IS_CALL[names] | (names == CODE["record"])
    makers = np.flatnonzero(makes_handle & (handles >= 0))
    made_handles, first = np.unique(handles[makers], return_index=True)
    first_makers = np.append(makers[first], len(ops))

    # -2 is no handle: it stands behind all others, for waits for greater ones
    waits = np.flatnonzero(names == CODE["wait"])
    awaited = handles[waits]
    place = np.searchsorted(made_handles, awaited)
    is_made = np.append(made_handles, -2)[place] == awaited
    is_earlier = first_makers[place] < waits
    unmade = waits[~(is_made & is_earlier)]
    if not unmade.size:
        return None
    op = int(unmade[0])
    return Unsound("handle", op, f"it waits for handle {handles[op]}, which no op before it has")


def _stray_batch(program: Program) -> Unsound | None:
    """Find the first op in a batch that is no call."""
    names = program.ops["name"]
    in_batch = program.ops["batch"] >= 0
    strays = np.flatnonzero(in_batch & ~IS_CALL[names])
    if not strays.size:
        return None
    op = int(strays[0])
    return Unsound("batch", op, f"{NAMES[names[op]]} is no call and cannot be in a batch")


def _reused_batch(program: Program) -> Unsound | None:
    """Find the first call that continues a batch after another op."""
    names, batches = program.ops["name"], program.ops["batch"]
    ops = np.flatnonzero(~np.isin(names, _SILENT))
    is_call = IS_CALL[names[ops]]
    numbers = np.where(is_call, batches[ops], -1)

    # where another batch begins; a number that begins twice was over
    begins = np.flatnonzero(np.diff(numbers, prepend=-2))
    begins = begins[numbers[begins] >= 0]
    _, first_begins = np.unique(numbers[begins], return_index=True)
    again = np.delete(begins, first_begins)
    if not again.size:
        return None
    number = numbers[again[0]]
    text = f"batch {number} was over: give this one another number"
    return Unsound("batch", int(ops[again[0]]), text)


# -- two FIFOs -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class FifoDifference:
    """The first entry in which two FIFOs differ.

    Attributes:
        kind: missing, order, or the field that differs.
        entry: The entry, from 0.
        likely: What probably happened.
    """

    kind: str
    entry: int
    likely: str


def signature(program: Program, indices: np.ndarray) -> np.ndarray:
    """Give what the other members must call alike: int64 [k, 6], the columns of _FIELDS.

    Args:
        program: The program of one rank.
        indices: The calls, k ops.
    """
    ops = program.ops[indices]
    names = ops["name"]

    # elements; uneven splits are compared pair by pair
    counts = np.where(np.isin(names, _COUNT_IN), ops["num_in"], 0)
    counts = np.where(np.isin(names, _COUNT_OUT), ops["num_out"], counts)
    counts = np.where(ops["splits"] >= 0, 0, counts)

    # whether a call is in one batch with the call before it
    batches = ops["batch"]
    is_same_batch = (batches[1:] == batches[:-1]) & (batches[1:] >= 0)
    is_joined = np.concatenate(([False], is_same_batch))[: len(ops)]
    columns = (names, ops["dtype"], counts, ops["reduce"], ops["root"], is_joined)
    return np.stack([np.asarray(column, dtype=np.int64) for column in columns], axis=1)


def first_difference(left: np.ndarray, right: np.ndarray, ranks: tuple[int, int]) -> FifoDifference:
    """Find the first entry in which two FIFOs differ, and what probably happened.

    Args:
        left: Signatures of the rank that others agree with.
        right: Signatures of the other rank; they differ.
        ranks: Both ranks.
    """
    left_rank, right_rank = ranks
    common = min(len(left), len(right))
    is_unlike = (left[:common] != right[:common]).any(axis=1)
    unlike = np.flatnonzero(is_unlike)

    # one FIFO is the begin of the other
    if not unlike.size:
        longer, longer_rank, shorter_rank = left, left_rank, right_rank
        if len(right) > len(left):
            longer, longer_rank, shorter_rank = right, right_rank, left_rank
        missing = len(longer) - common
        text = f"rank {shorter_rank} stops {counted(missing, 'call')} before rank {longer_rank}"
        return FifoDifference("missing", common, f"{text}, at {_call(longer[common])}")

    # the same calls, sorted otherwise
    entry = int(unlike[0])
    if sorted(map(tuple, left[entry:])) == sorted(map(tuple, right[entry:])):
        text = f"rank {right_rank} makes the same calls in another order"
        return FifoDifference("order", entry, text)

    # a call too few or too many, if what follows agrees again
    if not _agree(left[entry + 1 :], right[entry + 1 :]):
        if _agree(left[entry + 1 :], right[entry:]):
            text = f"rank {right_rank} never calls {_call(left[entry])} #{entry + 1}"
            return FifoDifference("missing", entry, text)
        if _agree(left[entry:], right[entry + 1 :]):
            text = f"rank {right_rank} calls {_call(right[entry])} and rank {left_rank} never"
            return FifoDifference("missing", entry, text)
    return _different_fields(left[entry], right[entry], ranks, entry)


def _different_fields(
    left: np.ndarray, right: np.ndarray, ranks: tuple[int, int], entry: int
) -> FifoDifference:
    """Say in which fields two signatures differ."""
    left_rank, right_rank = ranks
    fields = np.flatnonzero(left != right).tolist()
    words: list[str] = []
    for field in fields:
        name = _FIELDS[field]
        unit = ""
        if name == "shape":
            unit = " elements"
        left_text, right_text = str(left[field]), str(right[field])
        if field in _TEXTS:
            names = _TEXTS[field]
            left_text, right_text = names[left[field]], names[right[field]]
        left_words = f"{left_text}{unit} on rank {left_rank}"
        words.append(f"{name}: {left_words}, {right_text}{unit} on rank {right_rank}")
    return FifoDifference(_FIELDS[fields[0]], entry, "; ".join(words))


def _agree(left: np.ndarray, right: np.ndarray) -> bool:
    """Say whether the next entries are the same; not if there are none."""
    count = min(_AHEAD, len(left), len(right))
    return count > 0 and np.array_equal(left[:count], right[:count])


def _call(row: np.ndarray) -> str:
    """Put a signature into words: ``all_reduce bf16``."""
    words = [NAMES[row[0]], DTYPE_NAMES[row[1]]]
    return " ".join(word for word in words if word)


# -- splits ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _SplitsProblem:
    """Splits of one call that do not fit.

    Attributes:
        ranks: Two ranks that disagree, or the first of the group and the odd one.
        likely: What is wrong.
    """

    ranks: tuple[int, int]
    likely: str


def _check_splits(
    programs: Programs, classes: Classes, groups: Mapping[str, Membership]
) -> Iterator[tuple[str, int, _SplitsProblem]]:
    """Compare what each rank sends to each other with what that one expects.

    One group of each arrangement of classes by position is compared.

    Yields:
        The group's description, the entry of the FIFO, and what does not fit.
    """
    names_with_splits: set[str] = set()
    for program in programs.programs:
        has_splits = program.ops["splits"] >= 0
        for code in np.unique(program.ops["group"][has_splits]):
            names_with_splits.add(program.strings[code])

    # splits of an op that is no call mean nothing
    for name in sorted(names_with_splits - {""}):
        arrangements: set[bytes] = set()
        for start, end in itertools.pairwise(groups[name].start.tolist()):
            ranks = groups[name].members[start:end]
            arrangement = classes.of[ranks].tobytes()
            if arrangement in arrangements:
                continue
            arrangements.add(arrangement)
            members = [programs.of(int(rank)) for rank in ranks]
            fifos = [program.collectives(name).tolist() for program in members]
            for number, ops in enumerate(zip(*fifos, strict=False)):
                calls = list(zip(members, ops, strict=True))
                problem = _compare_splits(ranks.tolist(), calls)
                if problem is not None:
                    yield name, number, problem


def _compare_splits(
    ranks: list[int], calls: Sequence[tuple[Program, int]]
) -> _SplitsProblem | None:
    """Find what is wrong with the splits of one call of all members; None if they fit.

    Args:
        ranks: The members.
        calls: Of every member its program and the op.
    """
    # splits that cannot be those of their own tensor
    for rank, (program, op) in zip(ranks, calls, strict=True):
        text = _broken(program, op)
        if text is not None:
            return _SplitsProblem((ranks[0], rank), f"rank {rank} {text}")

    # too few or too many of them
    sent_rows = [_elements(program, op, 0) for program, op in calls]
    expected_rows = [_elements(program, op, 1) for program, op in calls]
    rows = [*sent_rows, *expected_rows]
    for rank, row in zip([*ranks, *ranks], rows, strict=True):
        if row is not None and len(row) != len(ranks):
            text = f"rank {rank} gives {len(row)} splits for a group of {len(ranks)}"
            return _SplitsProblem((ranks[0], rank), text)

    # a member that gives none leaves nothing to compare
    if any(row is None for row in rows):
        return None
    sent, expected = np.array(sent_rows), np.array(expected_rows).T
    if np.array_equal(sent, expected):
        return None
    sender, receiver = np.argwhere(sent != expected)[0].tolist()
    text = f"rank {ranks[sender]} sends {sent[sender, receiver]} elements to rank "
    text += f"{ranks[receiver]}, which expects {expected[sender, receiver]}"
    return _SplitsProblem((ranks[sender], ranks[receiver]), text)


def _broken(program: Program, op: int) -> str | None:
    """Say why the splits of a call cannot be those of the tensor; None if they can."""
    row = program.ops[op]
    if row["splits"] < 0:
        return None
    is_gather = row["name"] == _GATHER
    for side, verb in enumerate(("sends", "receives")):
        elements = int(row[_SIDES[side]])
        rows = program.splits[row["splits"]][side]
        total = sum(rows)

        # a gather's members all send one and the same row
        if is_gather and side == 0 and rows:
            total = rows[0]

        # splits of a gather are elements, others are rows of any length
        if is_gather or not total:
            fits = elements == total
        else:
            fits = elements % total == 0
        if elements >= 0 and not fits:
            return f"{verb} {elements} elements and gives {total} rows of them to its members"
    return None


def _elements(program: Program, op: int, side: int) -> np.ndarray | None:
    """Count elements to (side 0) or from (side 1) every member; None if the call does not say."""
    row = program.ops[op]
    if row["splits"] < 0:
        return None
    rows = np.array(program.splits[row["splits"]][side], dtype=np.int64)
    total = int(rows.sum())
    # splits of a gather are elements, and all members get the same
    if row["name"] == _GATHER or not total:
        return rows
    row_length = int(row[_SIDES[side]]) // total
    return rows * row_length


# -- findings -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Finding:
    """One thing that would hang or corrupt the job.

    Attributes:
        kind: missing, order, operation, dtype, shape, splits, reduce op, root, coalescing,
            wrong group, unmatched send, unmatched receive; handle, batch (of one rank alone).
        group: Description of the group.
        ranks: Two ranks that disagree: the one that others agree with, and the odd one.
        number: The entry of the FIFO, from 1 as in dumps; of handle and batch the op, from 0.
        picture: The two ranks' calls around it, with an arrow.
        likely: What probably happened.
    """

    kind: str
    group: str
    ranks: tuple[int, int]
    number: int
    picture: str
    likely: str

    def __str__(self) -> str:
        """Show the finding with its picture."""
        left, right = self.ranks
        ranks = f"ranks {left} and {right}"
        if left == right:
            ranks = f"rank {left}"
        unit = "call"
        if self.kind in _OF_OPS:
            unit = "op"
        head = f"{self.kind} in {self.group}, {unit} #{self.number}, {ranks}"
        return f"{head}\n{self.picture}\n  likely: {self.likely}"


def check(programs: Programs, classes: Classes, groups: Mapping[str, Membership]) -> list[Finding]:
    """Find every disagreement of the world's programs.

    Args:
        programs: The programs.
        classes: Their ranks in classes of equal ones.
        groups: The members of every group by its description.

    Returns:
        What is wrong with programs by themselves, if anything is; else disagreements of
        collectives, then of messages; else of splits.
    """
    checker = _Checker(programs, classes, groups)
    findings = list(checker.alone())
    if findings:
        return findings
    findings = [*checker.collectives(), *checker.pairs()]
    findings = checker.with_wrong_groups(findings)
    if findings:
        return findings

    # splits are compared entry by entry, which a missing entry would make nonsense
    for name, number, problem in _check_splits(programs, classes, groups):
        findings.append(checker.finding("splits", name, problem.ranks, number, problem.likely))
    return findings


class _Checker:
    """What does not fit, of every pair of classes that meet."""

    def __init__(
        self, programs: Programs, classes: Classes, groups: Mapping[str, Membership]
    ) -> None:
        """Count how many ranks of the world run each program."""
        self._programs, self._classes, self._groups = programs, classes, groups
        self._ranks_of_program: Counter[int] = Counter()
        for program, count in zip(classes.programs, classes.counts, strict=True):
            self._ranks_of_program[program] += count

    def _program(self, index: int) -> Program:
        """Give the program of a class."""
        number = self._classes.programs[index]
        return self._programs.programs[number]

    def alone(self) -> Iterator[Finding]:
        """Find what is wrong with a program by itself; one finding per program."""
        # the first class of every program stands for it
        checked: set[int] = set()
        for index, number in enumerate(self._classes.programs):
            if number in checked:
                continue
            checked.add(number)
            program = self._program(index)
            problem = unsound(program)
            if problem is not None:
                name = program[problem.op].group or "no group"
                every_op = np.arange(len(program))
                yield self._finding_of_one(
                    index, name, every_op, problem.kind, problem.op, problem.likely
                )

    def _finding_of_one(
        self, index: int, name: str, ops: np.ndarray, kind: str, entry: int, likely: str
    ) -> Finding:
        """Make a finding about one class alone.

        Args:
            index: The class.
            name: The group's description.
            ops: The entries among which the finding is.
            kind: The finding's kind.
            entry: The entry that it is about.
            likely: What probably happened.
        """
        rank = self._classes.representatives[index]
        first_number = 1
        if kind in _OF_OPS:
            first_number = 0
        lines = _column(self._program(index), ops, rank, entry, first_number)
        lines[2] += "   <-- here"
        picture = "\n".join(f"  {line}" for line in lines)
        return Finding(kind, name, (rank, rank), entry + first_number, picture, likely)

    # -- collectives ------------------------------------------------------------------------------
    def collectives(self) -> Iterator[Finding]:
        """Find one disagreement per pair of classes that meet and disagree."""
        compared: set[tuple[str, int, int]] = set()
        # classes of one group share one list of classes, which is compared once; it is held here,
        # so that no other list gets its id
        seen: dict[tuple[str, int], object] = {}
        for index, members in enumerate(self._classes.members):
            rank, program = self._classes.representatives[index], self._program(index)
            for name, class_counts in members.items():
                # the rank is no member of the group that it calls
                if not class_counts:
                    yield self._call_of_no_member(index, name)
                    continue

                # a root outside of the group
                group, fifo = self._groups[name].group(rank), program.collectives(name)
                roots = program.ops["root"][fifo]
                is_outside = roots >= len(group)
                if is_outside.any():
                    entry = int(is_outside.argmax())
                    likely = f"there is no group rank {roots[entry]} in a group of {len(group)}"
                    yield self._finding_of_one(index, name, fifo, "root", entry, likely)

                # every other class against the one that most ranks agree with
                key = name, id(class_counts)
                if key in seen:
                    continue
                seen[key] = class_counts
                model = self._majority(class_counts)
                for other_class, _ in class_counts:
                    pair = name, model, other_class
                    if other_class != model and pair not in compared:
                        compared.add(pair)
                        yield from self._compare(group, name, model, other_class)

    def _call_of_no_member(self, index: int, name: str) -> Finding:
        """Make the finding of a rank that calls a group in which it is not."""
        rank, program = self._classes.representatives[index], self._program(index)
        first_op = int(program.groups()[name][0])
        picture = f"  rank {rank}\n  {format_op(program[first_op])}   <-- here"
        likely = f"rank {rank} is in no group called {name} and cannot call it"
        return Finding("wrong group", name, (rank, rank), 1, picture, likely)

    def _majority(self, class_counts: Sequence[tuple[int, int]]) -> int:
        """Find the class that is not the odd one: its program runs on most members, then ranks.

        Args:
            class_counts: Of a group its classes, and how many members each has.
        """
        programs = self._classes.programs
        members_of_program: Counter[int] = Counter()
        for index, count in class_counts:
            members_of_program[programs[index]] += count

        def agreement(index: int) -> tuple[int, int, int]:
            """Rank a class; of equal ones the first is taken."""
            program = programs[index]
            return members_of_program[program], self._ranks_of_program[program], -index

        return max((index for index, _ in class_counts), key=agreement)

    def _compare(
        self, group: np.ndarray, name: str, model: int, odd_class: int
    ) -> Iterator[Finding]:
        """Compare the collectives of two classes in a group.

        Args:
            group: The group's ranks.
            name: Its description.
            model: The class that most ranks agree with.
            odd_class: Another class.
        """
        model_program, odd_program = self._program(model), self._program(odd_class)
        model_calls = signature(model_program, model_program.collectives(name))
        odd_calls = signature(odd_program, odd_program.collectives(name))
        if np.array_equal(model_calls, odd_calls):
            return
        class_of_member = self._classes.of[group]
        model_ranks, odd_ranks = (
            group[class_of_member == model],
            group[class_of_member == odd_class],
        )
        ranks = int(model_ranks[0]), int(odd_ranks[0])
        difference = first_difference(model_calls, odd_calls, ranks)
        yield self.finding(difference.kind, name, ranks, difference.entry, difference.likely)

    def with_wrong_groups(self, findings: list[Finding]) -> list[Finding]:
        """Join a call missing in one group and one too many in another, if one rank made both.

        The rank took the wrong group.
        """
        result = list(findings)
        missing = [finding for finding in findings if finding.kind == "missing"]
        for lack, surplus in itertools.permutations(missing, 2):
            # of one rank, and not joined yet
            odd_rank = lack.ranks[1]
            if surplus.ranks[1] != odd_rank or lack not in result or surplus not in result:
                continue
            if self._is_same_call(lack, surplus):
                likely = f"rank {odd_rank} makes the call of {lack.group} in {surplus.group}"
                changed = dataclasses.replace(lack, kind="wrong group", likely=likely)
                result[result.index(lack)] = changed
                result.remove(surplus)
        return result

    def _is_same_call(self, lack: Finding, surplus: Finding) -> bool:
        """Say whether the call that one group lacks is the one that another has too many."""
        model_rank, odd_rank = lack.ranks
        model_program = self._programs.of(model_rank)
        odd_program = self._programs.of(odd_rank)
        model_calls = model_program.collectives(lack.group)
        odd_calls = odd_program.collectives(lack.group)
        if len(odd_calls) >= len(model_calls):
            return False

        # the other group's model may be another rank
        usual_calls = self._programs.of(surplus.ranks[0]).collectives(surplus.group)
        surplus_calls = odd_program.collectives(surplus.group)
        if len(surplus_calls) <= len(usual_calls):
            return False
        lacking_call = signature(model_program, model_calls[[lack.number - 1]])
        surplus_call = signature(odd_program, surplus_calls[[surplus.number - 1]])
        return np.array_equal(lacking_call[:, :4], surplus_call[:, :4])

    # -- p2p --------------------------------------------------------------------------------------
    def pairs(self) -> Iterator[Finding]:
        """Find one disagreement per directed pair of classes with sends and receives."""
        for index, partners in enumerate(self._classes.partners):
            rank = self._classes.representatives[index]
            for (name, offset), partner in partners.items():
                size = len(self._groups[name].group(rank))
                if size and partner >= 0:
                    yield from self._compare_messages(index, name, offset % size, size)

    def _compare_messages(self, index: int, name: str, offset: int, size: int) -> Iterator[Finding]:
        """Compare a class's sends and receives with those of one peer.

        Args:
            index: The class.
            name: The group's description.
            offset: How many members behind the rank the peer stands in its group.
            size: Members of the group.
        """
        rank = self._classes.representatives[index]
        place = int(self._groups[name].position[rank])
        peer = int(self._groups[name].group(rank)[(place + offset) % size])
        program, peer_program = self._program(index), self._programs.of(peer)
        for direction, opposite in (("send", "recv"), ("recv", "send")):
            ops = _towards(program, name, offset, size, direction)
            peer_ops = _towards(peer_program, name, -offset % size, size, opposite)

            # dtype and count; batches are each rank's own affair
            messages = signature(program, ops)[:, 1:3]
            peer_messages = signature(peer_program, peer_ops)[:, 1:3]
            if np.array_equal(messages, peer_messages):
                continue

            # the sender reports, but for receives without any send
            if direction == "recv" and len(peer_ops):
                continue
            difference = _different_messages(messages, peer_messages, (rank, peer), direction)
            kind, likely = difference.kind, difference.likely
            yield self.finding(kind, name, (rank, peer), difference.entry, likely, ops, peer_ops)

    # -- pictures ---------------------------------------------------------------------------------
    def finding(
        self,
        kind: str,
        name: str,
        ranks: tuple[int, int],
        entry: int,
        likely: str,
        *ops: np.ndarray,
    ) -> Finding:
        """Make a finding whose picture shows an entry of both ranks and its neighbours.

        Args:
            kind: The finding's kind.
            name: The group's description.
            ranks: The two ranks.
            entry: The entry.
            likely: What probably happened.
            ops: Of each rank the entries; none: the collectives of the group.
        """
        programs = [self._programs.of(rank) for rank in ranks]
        fifos = ops or [program.collectives(name) for program in programs]
        left = _column(programs[0], fifos[0], ranks[0], entry)
        right = _column(programs[1], fifos[1], ranks[1], entry)

        # side by side, with an arrow at the entry
        width = max(map(len, left))
        lines: list[str] = []
        for left_line, right_line in zip(left, right, strict=True):
            line = f"  {left_line:{width}}   {right_line}"
            lines.append(line.rstrip())
        lines[2] += "   <-- here"
        return Finding(kind, name, ranks, entry + 1, "\n".join(lines), likely)


def _different_messages(
    messages: np.ndarray, peer_messages: np.ndarray, ranks: tuple[int, int], direction: str
) -> FifoDifference:
    """Say how the messages of two ranks differ.

    Args:
        messages: dtype and count of each message of a rank.
        peer_messages: The same of its peer.
        ranks: The rank and its peer.
        direction: What the rank does: send or recv.
    """
    rank, peer = ranks
    common = min(len(messages), len(peer_messages))
    is_unlike = (messages[:common] != peer_messages[:common]).any(axis=1)
    unlike = np.flatnonzero(is_unlike)
    if unlike.size:
        entry = int(unlike[0])
        kind = "shape"
        if messages[entry, 0] != peer_messages[entry, 0]:
            kind = "dtype"
        return FifoDifference(kind, entry, f"rank {rank} sends what rank {peer} does not expect")

    # one side has more of them
    opposite = {"send": "recv", "recv": "send"}[direction]
    more, fewer, more_rank, fewer_rank = direction, opposite, rank, peer
    if len(messages) < len(peer_messages):
        more, fewer, more_rank, fewer_rank = opposite, direction, peer, rank
    kind = {"send": "unmatched send", "recv": "unmatched receive"}[more]
    surplus = abs(len(messages) - len(peer_messages))
    likely = f"rank {more_rank} posts {surplus} more {more} than rank {fewer_rank} posts {fewer}"
    return FifoDifference(kind, common, likely)


def _towards(program: Program, name: str, offset: int, size: int, direction: str) -> np.ndarray:
    """Find the sends or receives of a program to one member of a group.

    Args:
        program: The program of one rank.
        name: The group's description.
        offset: How many members behind the rank the other one stands.
        size: Members of the group.
        direction: send or recv.
    """
    group_ops = program.groups().get(name, np.empty(0, dtype=np.int64))
    ops = program.ops[group_ops]
    is_direction = ops["name"] == CODE[direction]
    is_peer = ops["peer"] % size == offset
    return np.asarray(group_ops[is_direction & is_peer])


def _column(
    program: Program, ops: np.ndarray, rank: int, entry: int, first_number: int = 1
) -> list[str]:
    """Show a rank's entries before, at and after one, under a heading.

    Args:
        program: The rank's program.
        ops: The entries.
        rank: The rank.
        entry: The entry in the middle, from 0.
        first_number: The number of the first entry.
    """
    lines = [f"rank {rank}"]
    for neighbour in (entry - 1, entry, entry + 1):
        if neighbour < 0:
            lines.append("(nothing before)")
        elif neighbour >= len(ops):
            lines.append("(nothing more)")
        else:
            op = program[int(ops[neighbour])]
            # the finding names the group
            text = format_op(op).replace(f" {op.group}", "", 1)
            words = " ".join(text.split())
            lines.append(f"#{neighbour + first_number} {words}")
    return lines
