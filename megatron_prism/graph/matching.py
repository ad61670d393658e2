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
from megatron_prism.core.ops import CODE, DTYPE_NAMES, IS_CALL, NAMES, REDUCE
from megatron_prism.core.program import Program, Programs
from megatron_prism.core.program_text import format_op
from megatron_prism.graph.classes import Classes

_FIELDS = ("operation", "dtype", "shape", "reduce op", "root", "coalescing")
_COUNT_IN = [CODE[n] for n in ("all_reduce", "broadcast", "reduce", "all_gather", "gather", "send")]
_COUNT_OUT = [CODE[n] for n in ("reduce_scatter", "scatter", "recv")]
_SILENT = [CODE[n] for n in ("grad_sync", "param_sync", "mark")]  # may stand in a batch
_AHEAD = 3  # entries that must agree again for a finding to be called missing, not different


def unsound(program: Program) -> tuple[str, int, str] | None:
    """(kind, op, what is wrong with it) of the first op that means nothing; None if all do."""
    ops = program.ops
    names, handles, batches = ops["name"], ops["handle"], ops["batch"]
    calls = IS_CALL[names]
    found = []
    makers = np.flatnonzero((calls | (names == CODE["record"])) & (handles >= 0))
    known, first = np.unique(handles[makers], return_index=True)
    begun = np.append(makers[first], len(ops))
    waits = np.flatnonzero(names == CODE["wait"])
    place = np.searchsorted(known, handles[waits])
    there = np.append(known, -2)[place] == handles[waits]
    lost = waits[~(there & (begun[place] < waits))]
    if lost.size:
        text = f"it waits for handle {handles[lost[0]]}, which no op before it has"
        found.append(("handle", int(lost[0]), text))
    stray = np.flatnonzero(~calls & (batches >= 0))
    if stray.size:
        text = f"{NAMES[names[stray[0]]]} is no call and cannot be in a batch"
        found.append(("batch", int(stray[0]), text))
    busy = np.flatnonzero(~np.isin(names, _SILENT))
    number = np.where(calls[busy], batches[busy], -1)
    new = np.flatnonzero(np.diff(number, prepend=-2))
    new = new[number[new] >= 0]
    again = np.delete(new, np.unique(number[new], return_index=True)[1])
    if again.size:
        text = f"batch {number[again[0]]} was over: give this one another number"
        found.append(("batch", int(busy[again[0]]), text))
    return min(found, key=lambda one: one[1], default=None)


def signature(program: Program, indices: np.ndarray) -> np.ndarray:
    """What the other members must call alike, int64 [k, 6]: the columns of _FIELDS."""
    ops = program.ops[indices]
    names = ops["name"]
    count = np.where(np.isin(names, _COUNT_IN), ops["num_in"], 0)
    count = np.where(np.isin(names, _COUNT_OUT), ops["num_out"], count)
    count = np.where(ops["splits"] >= 0, 0, count)  # uneven: compared pair by pair
    batch = ops["batch"]
    joined = np.concatenate(([False], (batch[1:] == batch[:-1]) & (batch[1:] >= 0)))
    columns = (names, ops["dtype"], count, ops["reduce"], ops["root"], joined[: len(ops)])
    return np.stack([np.asarray(column, dtype=np.int64) for column in columns], axis=1)


def diagnose(a: np.ndarray, b: np.ndarray, ranks: tuple[int, int]) -> tuple[str, int, str]:
    """(kind, entry, what probably happened) of two FIFOs that differ."""
    one, other = ranks
    both = min(len(a), len(b))
    differ = np.flatnonzero((a[:both] != b[:both]).any(axis=1))
    k = int(differ[0]) if differ.size else both
    if k == both:
        more, less, rows = (one, other, a) if len(a) > len(b) else (other, one, b)
        what = f"rank {less} stops {abs(len(a) - len(b))} calls before rank {more}"
        return "missing", k, f"{what}, at {_call(rows[k])}"
    if sorted(map(tuple, a[k:])) == sorted(map(tuple, b[k:])):
        return "order", k, f"rank {other} makes the same calls in another order"
    if not _same(a[k + 1 :], b[k + 1 :]):
        if _same(a[k + 1 :], b[k:]):
            return "missing", k, f"rank {other} never calls {_call(a[k])} #{k + 1}"
        if _same(a[k:], b[k + 1 :]):
            return "missing", k, f"rank {other} calls {_call(b[k])} and rank {one} never"
    fields, shown = np.flatnonzero(a[k] != b[k]).tolist(), []
    for field in fields:
        texts, unit = _TEXTS.get(field), " elements" if _FIELDS[field] == "shape" else ""
        x, y = (texts[row[field]] if texts else int(row[field]) for row in (a[k], b[k]))
        shown.append(f"{_FIELDS[field]}: {x}{unit} on rank {one}, {y}{unit} on rank {other}")
    return _FIELDS[fields[0]], k, "; ".join(shown)


_TEXTS = {0: NAMES, 1: DTYPE_NAMES, 3: REDUCE}  # of the columns of _FIELDS


def _same(x: np.ndarray, y: np.ndarray) -> bool:
    n = min(_AHEAD, len(x), len(y))
    return n > 0 and np.array_equal(x[:n], y[:n])


def _call(row: np.ndarray) -> str:
    return " ".join(filter(None, (NAMES[row[0]], DTYPE_NAMES[row[1]])))


# -- splits ---------------------------------------------------------------------------------------
_GATHER = CODE["all_gather"]
Disagreement = tuple[str, int, tuple[int, int], str]  # group, entry, two ranks, what is likely


def _check_splits(
    programs: Programs, classes: Classes, groups: Mapping[str, Membership]
) -> Iterator[Disagreement]:
    """Disagreements between what i sends to j and what j expects from i, in one group of each
    arrangement of classes by position.
    """
    explicit = {
        program.strings[code]
        for program in programs.programs
        for code in np.unique(program.ops["group"][program.ops["splits"] >= 0])
    }
    for name in sorted(explicit - {""}):  # splits of what is no call mean nothing
        seen = set[bytes]()
        for start, end in itertools.pairwise(groups[name].start.tolist()):
            ranks = groups[name].members[start:end]
            if (key := classes.of[ranks].tobytes()) not in seen:
                seen.add(key)
                members = [programs.of(int(rank)) for rank in ranks]
                fifos = [program.collectives(name).tolist() for program in members]
                for number, ops in enumerate(zip(*fifos, strict=False)):
                    calls = list(zip(members, ops, strict=True))
                    if found := _compare_splits(ranks.tolist(), calls):
                        yield name, number, *found


def _compare_splits(
    ranks: list[int], calls: Sequence[tuple[Program, int]]
) -> tuple[tuple[int, int], str] | None:
    """Two ranks and what is wrong with the splits of one call of all members; absent ones say
    nothing.
    """
    for rank, call in zip(ranks, calls, strict=True):
        if text := _broken(*call):
            return (ranks[0], rank), f"rank {rank} {text}"
    sides = [[_elements(*call, side) for call in calls] for side in (0, 1)]
    for rank, row in zip([*ranks, *ranks], itertools.chain(*sides), strict=True):
        if row is not None and len(row) != len(ranks):
            text = f"rank {rank} gives {len(row)} splits for a group of {len(ranks)}"
            return (ranks[0], rank), text
    if any(row is None for row in itertools.chain(*sides)):
        return None
    sent, wanted = np.array(sides[0]), np.array(sides[1]).T
    if np.array_equal(sent, wanted):
        return None
    i, j = np.argwhere(sent != wanted)[0].tolist()
    return (ranks[i], ranks[j]), (
        f"rank {ranks[i]} sends {sent[i, j]} elements to rank {ranks[j]}, which expects "
        f"{wanted[i, j]}"
    )


def _broken(program: Program, op: int) -> str | None:
    """In words, why the splits of a call cannot be those of the tensor; None if they can."""
    row = program.ops[op]
    gathers = row["name"] == _GATHER
    for side, name in enumerate(("num_in", "num_out") if row["splits"] >= 0 else ()):
        total, rows = int(row[name]), program.splits[row["splits"]][side]
        whole = rows[0] if gathers and side == 0 and rows else sum(rows)
        if total >= 0 and (total != whole if gathers or not whole else total % whole):
            what = ("sends", "receives")[side]
            return f"{what} {total} elements and gives {whole} rows of them to its members"
    return None


def _elements(program: Program, op: int, side: int) -> np.ndarray | None:
    """Elements to (side 0) or from (side 1) every member; None if the call does not say."""
    row = program.ops[op]
    if row["splits"] < 0:
        return None
    rows = np.array(program.splits[row["splits"]][side], dtype=np.int64)
    whole = int(rows.sum())
    if row["name"] == _GATHER or not whole:  # elements, and everybody gets the same
        return rows
    return rows * (int(row[("num_in", "num_out")[side]]) // whole)


# -- findings -------------------------------------------------------------------------------------
_OF_OPS = ("handle", "batch")  # kinds that are about any op, not about a call


@dataclass(frozen=True)
class Finding:
    """One thing that would hang or corrupt the job.

    kind    : missing, order, operation, dtype, shape, splits, reduce op, root, coalescing,
              wrong group, unmatched send, unmatched receive; handle, batch (of one rank alone)
    group   : description of the group
    ranks   : two ranks that disagree: the one that others agree with, and the odd one
    number  : the entry of the FIFO, from 1 as in dumps; of handle and batch the op, from 0
    picture : the two ranks' calls around it, with an arrow
    likely  : what probably happened
    """

    kind: str
    group: str
    ranks: tuple[int, int]
    number: int
    picture: str
    likely: str

    def __str__(self) -> str:
        one, other = self.ranks
        who = f"rank {one}" if one == other else f"ranks {one} and {other}"
        place = f"{'op' if self.kind in _OF_OPS else 'call'} #{self.number}"
        head = f"{self.kind} in {self.group}, {place}, {who}"
        return f"{head}\n{self.picture}\n  likely: {self.likely}"


def check(programs: Programs, classes: Classes, groups: Mapping[str, Membership]) -> list[Finding]:
    """Every disagreement of the world's programs; collectives first, then p2p, then splits."""
    checker = _Checker(programs, classes, groups)
    if found := list(checker.alone()):
        return found
    found = checker.with_wrong_groups([*checker.collectives(), *checker.pairs()])
    if not found:  # rows are compared entry by entry, which a missing entry would make nonsense
        for name, number, ranks, likely in _check_splits(programs, classes, groups):
            found.append(checker.finding("splits", name, ranks, number, likely))
    return found


class _Checker:
    """What does not fit, of every pair of classes that meet."""

    def __init__(
        self, programs: Programs, classes: Classes, groups: Mapping[str, Membership]
    ) -> None:
        self.programs, self.classes, self.groups = programs, classes, groups
        self.spread: Counter[int] = Counter()  # program -> ranks of the world that run it
        for program, count in zip(classes.programs, classes.counts, strict=True):
            self.spread[program] += count

    def program(self, index: int) -> Program:
        """The program of class ``index``."""
        return self.programs.programs[self.classes.programs[index]]

    def alone(self) -> Iterator[Finding]:
        """What is wrong with a program by itself; one finding per program."""
        first = {number: i for i, number in reversed([*enumerate(self.classes.programs)])}
        for index in sorted(first.values()):
            program = self.program(index)
            if (found := unsound(program)) is not None:
                kind, op, likely = found
                name = program[op].group or "no group"
                yield self._one(index, name, np.arange(len(program)), kind, op, likely)

    def _one(
        self, index: int, name: str, indices: np.ndarray, kind: str, at: int, likely: str
    ) -> Finding:
        """A Finding about entry ``at`` of ``indices`` of class ``index`` alone."""
        rank = self.classes.representatives[index]
        first = 0 if kind in _OF_OPS else 1
        columns = _column(self.program(index), indices, rank, at, first)
        columns[2] += "   <-- here"
        picture = "\n".join(f"  {line}" for line in columns)
        return Finding(kind, name, (rank, rank), at + first, picture, likely)

    # -- collectives ------------------------------------------------------------------------------
    def collectives(self) -> Iterator[Finding]:
        """One finding per pair of classes that meet and disagree."""
        met: set[tuple[str, int, int]] = set()
        done: dict[tuple[str, int], object] = {}  # classes of one group share one ``counts``
        for index, members in enumerate(self.classes.members):
            rank, program = self.classes.representatives[index], self.program(index)
            for name, counts in members.items():
                group, fifo = self.groups[name].group(rank), program.collectives(name)
                if not counts:
                    op = program[int(program.groups()[name][0])]
                    picture = f"  rank {rank}\n  {format_op(op)}   <-- here"
                    likely = f"rank {rank} is in no group called {name} and cannot call it"
                    yield Finding("wrong group", name, (rank, rank), 1, picture, likely)
                    continue
                roots = program.ops["root"][fifo]
                if (outside := roots >= len(group)).any():
                    at = int(outside.argmax())
                    likely = f"there is no group rank {roots[at]} in a group of {len(group)}"
                    yield self._one(index, name, fifo, "root", at, likely)
                if (name, id(counts)) in done:
                    continue
                done[name, id(counts)] = counts
                model = self._majority(counts)
                for other, _ in counts:
                    if other != model and (name, model, other) not in met:
                        met.add((name, model, other))
                        yield from self._compare(group, name, model, other)

    def _majority(self, counts: Sequence[tuple[int, int]]) -> int:
        """The class that is not the odd one: its program runs on most members, then ranks."""
        here, programs = Counter[int](), self.classes.programs
        for index, count in counts:
            here[programs[index]] += count
        return max(
            (index for index, _ in counts),
            key=lambda i: (here[programs[i]], self.spread[programs[i]], -i),
        )

    def _compare(self, group: np.ndarray, name: str, model: int, other: int) -> Iterator[Finding]:
        a, b = (
            signature(program, program.collectives(name))
            for program in map(self.program, (model, other))
        )
        if not np.array_equal(a, b):
            of = self.classes.of[group]
            ranks = (int(group[of == model][0]), int(group[of == other][0]))
            kind, at, likely = diagnose(a, b, ranks)
            yield self.finding(kind, name, ranks, at, likely)

    def with_wrong_groups(self, found: list[Finding]) -> list[Finding]:
        """A call missing in one group and too many in another, by one rank: it took the wrong
        group.
        """
        result = list(found)
        for one, other in itertools.permutations([f for f in found if f.kind == "missing"], 2):
            if one.ranks[1] != other.ranks[1] or one not in result or other not in result:
                continue
            (program, wanted), (_, made) = self._sides(one)
            (_, usual), (theirs, surplus) = self._sides(other)
            if len(made) < len(wanted) and len(surplus) > len(usual):
                lacking = signature(program, wanted[[one.number - 1]])
                extra = signature(theirs, surplus[[other.number - 1]])
                if np.array_equal(lacking[:, :4], extra[:, :4]):
                    likely = f"rank {one.ranks[1]} makes the call of {one.group} in {other.group}"
                    changed = dataclasses.replace(one, kind="wrong group", likely=likely)
                    result[result.index(one)] = changed
                    result.remove(other)
        return result

    def _sides(self, one: Finding) -> list[tuple[Program, np.ndarray]]:
        """Of both ranks of a finding the program and its collectives in that group."""
        programs = map(self.programs.of, one.ranks)
        return [(program, program.collectives(one.group)) for program in programs]

    # -- p2p --------------------------------------------------------------------------------------
    def pairs(self) -> Iterator[Finding]:
        """One finding per directed pair of classes whose sends and receives disagree."""
        for index, partners in enumerate(self.classes.partners):
            rank = self.classes.representatives[index]
            for name, offset in partners:
                size = len(self.groups[name].group(rank))
                if size and partners[name, offset] >= 0:
                    yield from self._pair(index, name, offset % size, size)

    def _pair(self, index: int, name: str, offset: int, size: int) -> Iterator[Finding]:
        rank = self.classes.representatives[index]
        place = int(self.groups[name].position[rank])
        peer = int(self.groups[name].group(rank)[(place + offset) % size])
        program, its = self.program(index), self.programs.of(peer)
        for out, back in (("send", "recv"), ("recv", "send")):
            ours = _towards(program, name, offset, size, out)
            theirs = _towards(its, name, -offset % size, size, back)
            columns = [1, 2]  # dtype and count; batches are each rank's own affair
            a, b = signature(program, ours)[:, columns], signature(its, theirs)[:, columns]
            if np.array_equal(a, b) or (out == "recv" and len(theirs)):
                continue  # a receive without any send is reported here, all else by the sender
            at = min(len(a), len(b))
            differ = np.flatnonzero((a[:at] != b[:at]).any(axis=1))
            if differ.size:
                at = int(differ[0])
                kind = "dtype" if a[at, 0] != b[at, 0] else "shape"
                likely = f"rank {rank} sends what rank {peer} does not expect"
            else:
                many, few, doer, idler = out, back, rank, peer
                if len(a) < len(b):
                    many, few, doer, idler = back, out, peer, rank
                kind = f"unmatched {'receive' if many == 'recv' else 'send'}"
                likely = f"rank {doer} posts {abs(len(a) - len(b))} more {many} than rank {idler} "
                likely += f"posts {few}"
            yield self.finding(kind, name, (rank, peer), at, likely, ours, theirs)

    # -- pictures ---------------------------------------------------------------------------------
    def finding(
        self, kind: str, name: str, ranks: tuple[int, int], at: int, likely: str, *ops: np.ndarray
    ) -> Finding:
        """A Finding whose picture shows entry ``at`` of both ranks and its neighbours; ``ops``: of
        each rank the entries, default the collectives of the group.
        """
        programs = [self.programs.of(rank) for rank in ranks]
        entries = ops or [program.collectives(name) for program in programs]
        left, right = map(_column, programs, entries, ranks, (at, at))
        width = max(map(len, left))
        lines = [f"  {a:{width}}   {b}".rstrip() for a, b in zip(left, right, strict=True)]
        lines[2] += "   <-- here"
        return Finding(kind, name, ranks, at + 1, "\n".join(lines), likely)


def _towards(program: Program, name: str, offset: int, size: int, what: str) -> np.ndarray:
    """Indices of the ``what`` (send or recv) of a program to the member ``offset`` on."""
    found = program.groups().get(name, np.empty(0, dtype=np.int64))
    ops = program.ops[found]
    return np.asarray(found[(ops["name"] == CODE[what]) & (ops["peer"] % size == offset)])


def _column(
    program: Program, indices: np.ndarray, rank: int, number: int, first: int = 1
) -> list[str]:
    """The heading and the entries before, at and after ``number``, shown as counted from first."""
    lines = [f"rank {rank}"]
    for at in (number - 1, number, number + 1):
        if 0 <= at < len(indices):
            op = program[int(indices[at])]
            words = format_op(op).replace(f" {op.group}", "", 1).split()
            lines.append(f"#{at + first} " + " ".join(words))
        else:
            lines.append("(nothing before)" if at < 0 else "(nothing more)")
    return lines
