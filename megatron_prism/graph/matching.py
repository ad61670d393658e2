"""Do the programs of a world fit together?  NCCL's rules, and a picture of what breaks them.

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

from megatron_prism.core.membership import Membership
from megatron_prism.core.ops import CODE, IS_COLLECTIVE
from megatron_prism.core.program import Program
from megatron_prism.core.program_text import format_op
from megatron_prism.core.programs import Programs
from megatron_prism.graph.call_sequence import diagnose, signature, unsound
from megatron_prism.graph.classes import Classes
from megatron_prism.graph.splits import check_splits

__all__ = ["Finding", "check"]


@dataclass(frozen=True)
class Finding:
    """One thing that would hang or corrupt the job.

    kind    : missing, order, operation, dtype, shape, splits, reduce op, root, coalescing,
              wrong group, unmatched send, unmatched receive; handle, batch (of one rank alone)
    group   : description of the group
    ranks   : two ranks that disagree: the one that others agree with, and the odd one
    number  : the entry of the FIFO, from 0
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
        place = f"op #{self.number}" if self.kind in ("handle", "batch") else f"call #{self.number}"
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
    """Fingerprints of FIFOs, computed once per class and name."""

    def __init__(
        self, programs: Programs, classes: Classes, groups: Mapping[str, Membership]
    ) -> None:
        self.programs, self.classes, self.groups = programs, classes, groups
        self._fifos: dict[tuple[int, str], np.ndarray] = {}
        self.spread: Counter[int] = Counter()  # program -> ranks of the world that run it
        for program, count in zip(classes.programs, classes.counts, strict=True):
            self.spread[program] += count

    def program(self, index: int) -> Program:
        """The program of class ``index``."""
        return self.programs.programs[self.classes.programs[index]]

    def fifo(self, index: int, name: str) -> np.ndarray:
        """Indices of the collectives of class ``index`` in its group ``name``."""
        key = (self.classes.programs[index], name)
        if key not in self._fifos:
            found = self.program(index).groups().get(name, np.empty(0, dtype=np.int64))
            self._fifos[key] = found[IS_COLLECTIVE[self.program(index).ops["name"][found]]]
        return self._fifos[key]

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
        columns = _column(self.program(index), indices, rank, at)
        columns[2] += "   <-- here"
        picture = "\n".join(f"  {line}" for line in columns)
        return Finding(kind, name, (rank, rank), at, picture, likely)

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
        return Finding("wrong group", name, (rank, rank), 0, picture, likely)

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
        return Finding(kind, name, ranks, at[0], "\n".join(lines), likely)

    def _distance(self, name: str, rank: int, peer: int, size: int) -> int:
        position = self.groups[name].position
        return int(position[peer] - position[rank]) % size


def _column(program: Program, indices: np.ndarray, rank: int, number: int) -> list[str]:
    """The heading and the entries before, at and after ``number``."""
    lines = [f"rank {rank}"]
    for at in (number - 1, number, number + 1):
        if 0 <= at < len(indices):
            op = program[int(indices[at])]
            words = format_op(op).replace(f" {op.group}", "", 1).split()
            lines.append(f"#{at} " + " ".join(words))
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
    if lacking.number >= len(wanted) or extra.number >= len(surplus):
        return False
    a = signature(program, wanted[[lacking.number]])
    b = signature(theirs, surplus[[extra.number]])
    return np.array_equal(a[:, :4], b[:, :4])
