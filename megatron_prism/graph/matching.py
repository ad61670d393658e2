"""Match the calls of a world's programs by NCCL's rules, and show what does not fit.

In : programs and their classes.  Out: Findings, empty for a healthy world.  Every group is a FIFO
of collectives (a coalesced call is one entry), every directed pair of ranks in a group a FIFO of
sends and receives; the k-th entries of all members must be the same call.  Checked once per set of
classes that meet, never per rank.  Only the first disagreement of a FIFO is reported: what comes
after it follows from it.
"""

from __future__ import annotations

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


def diagnose(
    a: np.ndarray, b: np.ndarray, ranks: tuple[int, int]
) -> tuple[str, tuple[int, int], str]:
    """(kind, (entry, entry), what probably happened) of two FIFOs that differ."""
    both = min(len(a), len(b))
    differ = np.flatnonzero((a[:both] != b[:both]).any(axis=1))
    k = int(differ[0]) if differ.size else both
    if k == both:
        return _shorter(a, b, k, ranks)
    if sorted(map(tuple, a[k:])) == sorted(map(tuple, b[k:])):
        return "order", (k, k), f"rank {ranks[1]} makes the same calls in another order"
    if _same(a[k + 1 :], b[k:]) and not _same(a[k + 1 :], b[k + 1 :]):
        return "missing", (k, k), f"rank {ranks[1]} never calls {_call(a[k])} #{k + 1}"
    if _same(a[k:], b[k + 1 :]) and not _same(a[k + 1 :], b[k + 1 :]):
        return "missing", (k, k), f"rank {ranks[1]} calls {_call(b[k])} and rank {ranks[0]} never"
    fields = [f for f, x, y in zip(_FIELDS, a[k], b[k], strict=True) if x != y]
    shown = "; ".join(_differ(f, a[k], b[k], ranks) for f in fields)
    return fields[0], (k, k), shown


def _shorter(
    a: np.ndarray, b: np.ndarray, k: int, ranks: tuple[int, int]
) -> tuple[str, tuple[int, int], str]:
    more, less = (0, 1) if len(a) > len(b) else (1, 0)
    row = (a, b)[more][k]
    left = abs(len(a) - len(b))
    what = f"rank {ranks[less]} stops {left} calls before rank {ranks[more]}, at {_call(row)}"
    return "missing", (k, k), what


def _same(x: np.ndarray, y: np.ndarray) -> bool:
    n = min(_AHEAD, len(x), len(y))
    return n > 0 and np.array_equal(x[:n], y[:n])


def _call(row: np.ndarray) -> str:
    words = [NAMES[row[0]], DTYPE_NAMES[row[1]]]
    return " ".join(word for word in words if word)


def _differ(field: str, x: np.ndarray, y: np.ndarray, ranks: tuple[int, int]) -> str:
    column = _FIELDS.index(field)
    texts: dict[str, tuple[str, ...]] = {
        "operation": NAMES,
        "dtype": DTYPE_NAMES,
        "reduce op": REDUCE,
    }
    known = texts.get(field)
    shown = [str(known[v[column]]) if known else str(int(v[column])) for v in (x, y)]
    unit = " elements" if field == "shape" else ""
    return f"{field}: {shown[0]}{unit} on rank {ranks[0]}, {shown[1]}{unit} on rank {ranks[1]}"


_GATHER = CODE["all_gather"]


def check_splits(
    programs: Programs, classes: Classes, groups: Mapping[str, Membership]
) -> Iterator[tuple[str, int, tuple[int, int], str]]:
    """Disagreements between what i sends to j and what j expects from i."""
    explicit = {
        program.strings[code]
        for program in programs.programs
        for code in np.unique(program.ops["group"][program.ops["splits"] >= 0])
    }
    for name in sorted(explicit - {""}):  # splits of what is no call mean nothing
        for ranks in _arrangements(groups[name], classes.of):
            table = [_Fifo(programs.of(int(rank)), name) for rank in ranks]
            yield from _compare(name, ranks, table)


def _arrangements(group: Membership, of: np.ndarray) -> Iterator[np.ndarray]:
    """One group of each arrangement of classes by position."""
    seen: set[bytes] = set()
    for index in range(len(group.start) - 1):
        ranks = group.members[group.start[index] : group.start[index + 1]]
        key = of[ranks].tobytes()
        if key not in seen:
            seen.add(key)
            yield ranks


class _Fifo:
    """The collectives of one program in one group, their splits in elements."""

    def __init__(self, program: Program, name: str) -> None:
        self.indices = program.collectives(name)
        self.program = program

    def broken(self, number: int) -> str | None:
        """In words, why the splits cannot be those of the tensor; None if they can."""
        row = self.program.ops[self.indices[number]]
        gathers = row["name"] == _GATHER
        for side, name in enumerate(("num_in", "num_out") if row["splits"] >= 0 else ()):
            total, rows = int(row[name]), self.program.splits[row["splits"]][side]
            whole = rows[0] if gathers and side == 0 and rows else sum(rows)
            if total >= 0 and (total != whole if gathers or not whole else total % whole):
                what = ("sends", "receives")[side]
                return f"{what} {total} elements and gives {whole} rows of them to its members"
        return None

    def elements(self, number: int, side: int) -> np.ndarray | None:
        """Elements to (side 0) or from (side 1) every member; None if the call does not say."""
        row = self.program.ops[self.indices[number]]
        if row["splits"] < 0:
            return None
        rows = np.array(self.program.splits[row["splits"]][side], dtype=np.int64)
        if row["name"] == _GATHER:  # elements, and everybody gets the same
            return rows
        total = int(row["num_in"] if side == 0 else row["num_out"])
        whole = int(rows.sum())
        return rows * (total // whole) if whole else rows


def _compare(
    name: str, ranks: np.ndarray, table: list[_Fifo]
) -> Iterator[tuple[str, int, tuple[int, int], str]]:
    for number in range(min(len(fifo.indices) for fifo in table)):
        broken = [(r, text) for r, fifo in zip(ranks, table, strict=True)
                  if (text := fifo.broken(number))]  # fmt: skip
        if broken:
            rank, text = broken[0]
            yield name, number, (int(ranks[0]), int(rank)), f"rank {rank} {text}"
            continue
        sides = [fifo.elements(number, way) for way in (0, 1) for fifo in table]
        known = [side for side in sides if side is not None and len(side) == len(ranks)]
        if len(known) < len(sides):
            yield from _incomplete(name, number, ranks, sides)
            continue
        sent, wanted = np.stack(known[: len(table)]), np.stack(known[len(table) :]).T
        if not np.array_equal(sent, wanted):
            i, j = map(int, np.argwhere(sent != wanted)[0])
            text = (
                f"rank {ranks[i]} sends {sent[i, j]} elements to rank {ranks[j]}, which expects "
                f"{wanted[i, j]}"
            )
            yield name, number, (int(ranks[i]), int(ranks[j])), text


def _incomplete(
    name: str, number: int, ranks: np.ndarray, sides: list[np.ndarray | None]
) -> Iterator[tuple[str, int, tuple[int, int], str]]:
    """Splits of the wrong length are an error; absent ones say nothing."""
    for place, side in enumerate(sides):
        if side is not None and len(side) != len(ranks):
            rank = int(ranks[place % len(ranks)])
            text = f"rank {rank} gives {len(side)} splits for a group of {len(ranks)}"
            yield name, number, (int(ranks[0]), rank), text
            return


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
    found = [*checker.collectives(), *checker.pairs()]
    found = _wrong_groups(found, checker)
    if not found:  # rows are compared entry by entry, which a missing entry would make nonsense
        for name, number, ranks, likely in check_splits(programs, classes, groups):
            found.append(checker.finding("splits", name, ranks, (number, number), likely))
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

    def fifo(self, index: int, name: str) -> np.ndarray:
        """Indices of the collectives of class ``index`` in its group ``name``."""
        return self.program(index).collectives(name)

    def alone(self) -> Iterator[Finding]:
        """What is wrong with a program by itself; one finding per program."""
        seen: set[int] = set()
        for index, number in enumerate(self.classes.programs):
            found = None if number in seen else unsound(self.program(index))
            seen.add(number)
            if found is not None:
                name = self.program(index)[found[1]].group or "no group"
                yield self._one(index, name, np.arange(len(self.program(index))), *found)

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
            for name, counts in members.items():
                if not counts:
                    yield self._stranger(index, name)
                    continue
                roots = self.program(index).ops["root"][self.fifo(index, name)]
                size = len(self.groups[name].group(self.classes.representatives[index]))
                if (outside := roots >= size).any():
                    at = int(outside.argmax())
                    likely = f"there is no group rank {roots[at]} in a group of {size}"
                    yield self._one(index, name, self.fifo(index, name), "root", at, likely)
                if (name, id(counts)) in done:
                    continue
                done[name, id(counts)] = counts
                model = self._majority(counts)
                for other, _ in counts:
                    key = (name, model, other)
                    if other == model or key in met:
                        continue
                    met.add(key)
                    found = self._compare(index, name, model, other)
                    if found is not None:
                        yield found

    def _majority(self, counts: Sequence[tuple[int, int]]) -> int:
        """The class that is not the odd one: its program runs on most members, then ranks."""
        here: Counter[int] = Counter()
        for index, count in counts:
            here[self.classes.programs[index]] += count
        return max(
            (index for index, _ in counts),
            key=lambda i: (
                here[self.classes.programs[i]],
                self.spread[self.classes.programs[i]],
                -i,
            ),
        )

    def _stranger(self, index: int, name: str) -> Finding:
        rank = self.classes.representatives[index]
        first = int(self.program(index).groups()[name][0])
        picture = f"  rank {rank}\n  {format_op(self.program(index)[first])}   <-- here"
        likely = f"rank {rank} is in no group called {name} and cannot call it"
        return Finding("wrong group", name, (rank, rank), 1, picture, likely)

    def _compare(self, index: int, name: str, model: int, other: int) -> Finding | None:
        ours, theirs = self.fifo(model, name), self.fifo(other, name)
        a = signature(self.program(model), ours)
        b = signature(self.program(other), theirs)
        if np.array_equal(a, b):
            return None
        group = self.groups[name].group(self.classes.representatives[index])
        of = self.classes.of[group]
        ranks = (int(group[of == model][0]), int(group[of == other][0]))
        kind, at, likely = diagnose(a, b, ranks)
        return self.finding(kind, name, ranks, at, likely)

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
        group = self.groups[name].group(rank)
        place = int(self.groups[name].position[rank])
        peer = int(group[(place + offset) % size])
        other = int(self.classes.of[peer])
        for out, back in (("send", "recv"), ("recv", "send")):
            ours = self.towards(index, name, offset, size, out)
            theirs = self.towards(other, name, -offset % size, size, back)
            columns = [1, 2]  # dtype and count; batches are each rank's own affair
            a = signature(self.program(index), ours)[:, columns]
            b = signature(self.program(other), theirs)[:, columns]
            if np.array_equal(a, b) or (out == "recv" and len(theirs)):
                continue  # a receive without any send is reported here, all else by the sender
            both = min(len(a), len(b))
            differ = np.flatnonzero((a[:both] != b[:both]).any(axis=1))
            if differ.size:
                at = int(differ[0])
                what = "dtype" if a[at, 0] != b[at, 0] else "shape"
                likely = f"rank {rank} sends what rank {peer} does not expect"
                yield self.finding(what, name, (rank, peer), (at, at), likely, out, back)
            else:
                many, few = (out, back) if len(a) > len(b) else (back, out)
                doer, idler = (rank, peer) if len(a) > len(b) else (peer, rank)
                kind = f"unmatched {'receive' if many == 'recv' else 'send'}"
                likely = f"rank {doer} posts {abs(len(a) - len(b))} more {many} than rank {idler} "
                yield self.finding(
                    kind, name, (rank, peer), (both, both), f"{likely}posts {few}", out, back
                )

    def towards(self, index: int, name: str, offset: int, size: int, what: str) -> np.ndarray:
        """Indices of the ``what`` (send or recv) of class ``index`` to the member ``offset`` on."""
        program = self.program(index)
        found = program.groups().get(name, np.empty(0, dtype=np.int64))
        ops = program.ops[found]
        chosen: np.ndarray = found[(ops["name"] == CODE[what]) & (ops["peer"] % size == offset)]
        return chosen

    # -- pictures ---------------------------------------------------------------------------------
    def finding(
        self,
        kind: str,
        name: str,
        ranks: tuple[int, int],
        at: tuple[int, int],
        likely: str,
        *whats: str,
    ) -> Finding:
        """A Finding whose picture shows entry ``at[i]`` of rank ``ranks[i]`` and its neighbours."""
        columns = []
        for side, (rank, number) in enumerate(zip(ranks, at, strict=True)):
            index = int(self.classes.of[rank])
            if whats:
                size = len(self.groups[name].group(rank))
                step = self._distance(name, rank, ranks[1 - side], size)
                indices = self.towards(index, name, step, size, whats[side])
            else:
                indices = self.fifo(index, name)
            columns.append(_column(self.program(index), indices, rank, number))
        width = max(len(line) for line in columns[0])
        lines = [
            f"  {a:{width}}   {b}".rstrip() for a, b in zip(columns[0], columns[1], strict=True)
        ]
        lines[2] += "   <-- here"
        return Finding(kind, name, ranks, at[0] + 1, "\n".join(lines), likely)

    def _distance(self, name: str, rank: int, peer: int, size: int) -> int:
        position = self.groups[name].position
        return int(position[peer] - position[rank]) % size


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


def _wrong_groups(found: list[Finding], checker: _Checker) -> list[Finding]:
    """A call missing in one group and too many in another, by one rank: it took the wrong group."""
    result = list(found)
    for one in found:
        for other in found:
            if one.group == other.group or one not in result or other not in result:
                continue
            if one.kind != "missing" or other.kind != "missing" or one.ranks[1] != other.ranks[1]:
                continue
            lacks = f"rank {one.ranks[1]} never calls" in one.likely or "stops" in one.likely
            if not lacks or not _is_extra(checker, one, other):
                continue
            likely = f"rank {one.ranks[1]} makes the call of {one.group} in {other.group}"
            result[result.index(one)] = Finding(
                "wrong group", one.group, one.ranks, one.number, one.picture, likely
            )
            result.remove(other)
    return result


def _is_extra(checker: _Checker, lacking: Finding, extra: Finding) -> bool:
    """Whether the odd rank's surplus entry in ``extra`` is the entry it lacks in ``lacking``."""
    wanted = checker.fifo(int(checker.classes.of[lacking.ranks[0]]), lacking.group)
    program = checker.program(int(checker.classes.of[lacking.ranks[0]]))
    surplus = checker.fifo(int(checker.classes.of[extra.ranks[1]]), extra.group)
    theirs = checker.program(int(checker.classes.of[extra.ranks[1]]))
    if lacking.number > len(wanted) or extra.number > len(surplus):
        return False
    a = signature(program, wanted[[lacking.number - 1]])
    b = signature(theirs, surplus[[extra.number - 1]])
    return np.array_equal(a[:, :4], b[:, :4])
