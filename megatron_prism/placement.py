"""Where in its program did every rank stand?  Dumps laid over the programs of the same job.

In : a DumpSet, the verdict on it, and the job's Programs.  Out: ``Placed``: per rank the last call
that it issued, where only one place fits; and whether the programs confirm the verdict: with the
culprits stopped where they stood, does everybody else stand where the dumps say, and does the world
come to its end without that (the counterfactual)?

Start-up calls are in no program, so a group's counter is known only modulo its calls per iteration:
places are found by the calls themselves (operation, dtype, size), group by group, and what remains
is settled by ranks of the same stage that are placed already.  Several places: none is named.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from megatron_prism import flight_export, quiescence
from megatron_prism.classes import memberships
from megatron_prism.diagnosis import Diagnosis
from megatron_prism.errors import UsageError
from megatron_prism.flight_dump import Dump, DumpSet, Entry
from megatron_prism.ops import IS_COLLECTIVE, IS_PAIR, Op
from megatron_prism.outstanding import State
from megatron_prism.programs import Programs
from megatron_prism.selectors import format_ranks

__all__ = ["Place", "Placed", "place"]

_STRETCH = 256  # calls of the history that are compared
_UNSIZED = ("all_to_all", "barrier")  # their sizes differ from iteration to iteration


@dataclass(frozen=True)
class Place:
    """The last call that ``rank`` issued: op ``index`` of its program, of ``candidates`` that fit.

    index is -1 where several fit, or none; issued counts the iteration's calls up to it
    """

    rank: int
    index: int
    issued: int
    label: str
    op: str
    group: str
    site: str
    candidates: int

    def __str__(self) -> str:
        if self.index < 0:
            return f"rank {self.rank}: {self.candidates or 'no'} places in its program fit"
        at = f" at {self.site}" if self.site else ""
        what = f"op {self.index} ({self.label}), {self.op} of {self.group}{at}"
        return f"rank {self.rank}: last issued {what}"


@dataclass(frozen=True)
class Placed:
    """places: per rank; confirmed: None where nothing could be driven, else whether it fits."""

    places: tuple[Place, ...]
    confirmed: bool | None
    lines: tuple[str, ...]


def place(found: DumpSet, verdict: Diagnosis, programs: Programs) -> Placed:
    """Lay the dumps over the programs, and try the verdict on them.

    UsageError if the dumps are of a larger world.
    """
    last = max(found.dumps)
    if last >= programs.world.size:
        raise UsageError(f"rank {last} left a dump, and the programs are of {programs.world}",
                         fix="name the programs of the same job")  # fmt: skip
    overlay = _Overlay(State(found), programs)
    places = overlay.places()
    lines, confirmed = overlay.drive(verdict, places)
    return Placed(tuple(places.values()), confirmed, tuple(lines))


def _key(op: Op) -> tuple[object, ...]:
    size = -1 if op.name in _UNSIZED else max(op.num_in, op.num_out)
    return op.name, flight_export.DTYPE_WORDS.get(op.dtype, "Float"), size


def _seen(entry: Entry) -> tuple[object, ...]:
    sizes = [n for side in entry.numbers for n in side]
    size = -1 if entry.op in _UNSIZED else max(sizes, default=-1)
    return entry.op, next(iter(entry.dtypes), ""), size


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


class _Overlay:
    def __init__(self, state: State, programs: Programs) -> None:
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
                keys[group].append(_key(op))
                steps.append((index, {g: len(k) for g, k in keys.items()}))
        self.orders[number] = [(op.group, *_key(op)) for op in ops if op.group]
        self.fifos[number] = {g: _Fifo(k) for g, k in keys.items()}
        self.steps[number] = steps

    # -- places -----------------------------------------------------------------------------------
    def places(self) -> dict[int, Place]:
        """rank -> its place."""
        fits = {rank: self._fits(rank, dump) for rank, dump in sorted(self.state.dumps.items())}
        offsets = self._offsets(fits)
        return {rank: self._place(rank, self._settle(rank, found, offsets))
                for rank, found in fits.items()}  # fmt: skip

    def _fits(self, rank: int, dump: Dump) -> list[int]:
        """Steps of the program of ``rank`` after which its dump may have been taken."""
        number = int(self.programs.program_of[rank])
        fifos, steps = self.fifos[number], self.steps[number]
        seen: dict[tuple[str, bool], list[tuple[object, ...]]] = defaultdict(list)
        order: list[tuple[object, ...]] = []
        for e in dump.entries:
            if e.op != "coalesced" and (e.desc, e.pair) in fifos:
                seen[e.desc, e.pair].append(_seen(e))
                order.append((e.desc, *_seen(e)))
        allowed = {g: fifos[g].counts(s) for g, s in seen.items()}
        found = [
            step
            for step, (_, counts) in enumerate(steps)
            if all(counts.get(g, 0) % len(fifos[g].keys) in c for g, c in allowed.items())
        ]
        if not any(e.done for e in dump.entries):
            return found
        if dump.entries[0].record == 0:  # all of it: an iteration that began has all its calls
            found = [step for step in found if step < len(order)]
        # with history the last calls are known in order: the longest stretch that fits
        lengths = {step: self._stretch(number, step, order[-_STRETCH:]) for step in found}
        most = max(lengths.values(), default=0)
        return [step for step, length in lengths.items() if length == most > 0]

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
        return Place(rank, index, found[0] + 1, op.label, op.name, op.group, op.site, 1)

    # -- the verdict, tried on the programs -------------------------------------------------------
    def drive(self, verdict: Diagnosis, places: dict[int, Place]) -> tuple[list[str], bool | None]:
        """Run the world with the culprits stopped, and without."""
        known = [p for p in places.values() if p.index >= 0]
        lines = [f"{len(known)} of {len(places)} ranks have one place in their programs"]
        healthy = quiescence.run(self.programs)
        lines.append("without a fault the programs come to their end" if healthy.finished
                     else "the programs hang by themselves: see prism check")  # fmt: skip
        faults = self._faults(verdict, places)
        if faults is None or not known:
            return [*lines, "the verdict was not tried on the programs"], None
        state = quiescence.run(self.programs, faults)
        others = [p for p in known if p.rank not in faults]
        same = [p.rank for p in others if self._issued(state, p.rank) == p.issued]
        who = format_ranks(sorted(faults))
        lines.append(f"with rank {who} stopped there, {len(same)} of {len(others)} other ranks "
                     "stand where their dumps say")  # fmt: skip
        return lines, len(same) == len(others) if others else None

    def _issued(self, state: quiescence.Standstill, rank: int) -> int:
        names = self.programs.of(rank).ops["name"][: state.issued[rank]]
        return int((IS_COLLECTIVE | IS_PAIR)[names].sum())

    def _faults(
        self, verdict: Diagnosis, places: dict[int, Place]
    ) -> dict[int, quiescence.Fault] | None:
        """What stops the culprits; None if they are not stopped, or where is not known."""
        faults = {}
        for culprit in verdict.culprits:
            at, head = places.get(culprit.rank), self.state.head(culprit.rank)
            if culprit.kind == "host stuck" and at is not None and at.index >= 0:
                faults[culprit.rank] = quiescence.Fault(host=at.index + 1)
            elif culprit.kind == "device stuck" and at is not None and at.index >= 0 and head:
                faults[culprit.rank] = quiescence.Fault(device=self._first_open(culprit.rank, at))
            elif culprit.kind == "missing dump":
                index = self._never_came(culprit.rank, verdict, places)
                if index is None:
                    return None
                faults[culprit.rank] = quiescence.Fault(host=index, silent=True)
            else:
                return None
        return faults or None

    def _first_open(self, rank: int, at: Place) -> int:
        """The op of the oldest outstanding call: as many calls back as are outstanding."""
        number = int(self.programs.program_of[rank])
        waiting = len(self.state.outstanding[rank])
        return self.steps[number][max(0, at.issued - waiting)][0]

    def _never_came(self, rank: int, verdict: Diagnosis, places: dict[int, Place]) -> int | None:
        """The op of ``rank`` that is the call in which its group waits for it."""
        groups = memberships(self.programs)
        if verdict.group not in groups:
            return None
        members = groups[verdict.group].group(rank).tolist()
        key = (verdict.group, False)
        for other in members:
            at = places.get(other)
            if at is None or at.index < 0 or other == rank:
                continue
            number = int(self.programs.program_of[other])
            name = next(n for n, g in self.state.groups.items()
                        if g.desc == verdict.group and other in g.ranks)  # fmt: skip
            later = self.state.enqueued.get((name, other), verdict.seq) - verdict.seq
            count = self.steps[number][at.issued - 1][1].get(key, 0) - later
            mine = self.programs.of(rank)
            fifo = mine.groups().get(verdict.group, np.empty(0, int))
            fifo = fifo[IS_COLLECTIVE[mine.ops["name"][fifo]]]
            if 0 < count <= len(fifo):
                return int(fifo[count - 1])
        return None
