"""Do the programs confirm a verdict?  The culprits stopped where they stood, and everybody driven.

In : a DumpSet, the verdict on it, and the job's Programs.  Out: ``Placed``: where every rank stood
(``overlay``); with the culprits stopped there, or calling what their dumps say, does everybody else
come to stand where the dumps say, and does the world come to its end without that (the
counterfactual)?  ``plugin.confirm`` asks the same of the culprit's real code.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from megatron_prism.core.errors import UsageError
from megatron_prism.core.ops import CODE, IS_COLLECTIVE, IS_PAIR, Op
from megatron_prism.core.program import Program
from megatron_prism.core.programs import Programs
from megatron_prism.core.selectors import format_ranks
from megatron_prism.graph import stall
from megatron_prism.graph.classes import memberships
from megatron_prism.hang.alignment import Overlay, Place, as_dumped
from megatron_prism.hang.dumps import DumpSet, Entry
from megatron_prism.hang.outstanding import State
from megatron_prism.hang.verdict import Blamed, Diagnosis

__all__ = ["Place", "Placed", "place"]

_TALK = IS_COLLECTIVE | IS_PAIR
_CALLS_OTHERWISE = ("operation", "dtype", "shape", "coalescing")


@dataclass(frozen=True)
class Placed:
    """places: per rank; confirmed: None where nothing could be driven, else whether it fits.

    stops : culprit -> the op of its program at which it went wrong, where that is known
    """

    places: tuple[Place, ...]
    confirmed: bool | None
    lines: tuple[str, ...]
    stops: dict[int, int] = dataclasses.field(default_factory=dict)


def place(found: DumpSet, verdict: Diagnosis, programs: Programs) -> Placed:
    """Lay the dumps over the programs, and try the verdict on them.

    UsageError if the dumps are of a larger world.
    """
    last = max(found.dumps)
    if last >= programs.world.size:
        raise UsageError(f"rank {last} left a dump, and the programs are of {programs.world}",
                         fix="name the programs of the same job")  # fmt: skip
    overlay = Overlay(State(found), programs)
    trial = _Trial(overlay, overlay.places(), verdict)
    lines, confirmed = trial.drive()
    return Placed(tuple(trial.places.values()), confirmed, tuple(lines), trial.stops)


class _Trial:
    """One verdict, tried on the programs."""

    def __init__(self, overlay: Overlay, places: dict[int, Place], verdict: Diagnosis) -> None:
        self.overlay, self.places, self.verdict = overlay, places, verdict
        self.state, self.programs = overlay.state, overlay.programs
        self.groups = memberships(self.programs)
        self.stops: dict[int, int] = {}
        self.changed: dict[int, list[Op]] = {}

    def drive(self) -> tuple[list[str], bool | None]:
        """Run the world with the culprits as they were, and without."""
        known = [p for p in self.places.values() if p.index >= 0]
        lines = [f"{len(known)} of {len(self.places)} ranks have one place in their programs"]
        healthy = stall.run(self.programs)
        lines.append("without a fault the programs come to their end" if healthy.finished
                     else "the programs hang by themselves: see prism check")  # fmt: skip
        faults = self._faults()
        if faults is None or not known:
            return [*lines, "the verdict was not tried on the programs"], None
        state = stall.run(self._world(), faults)
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

    def _issued(self, state: stall.Standstill, rank: int) -> int:
        names = self.programs.of(rank).ops["name"][: state.issued[rank]]
        return int(_TALK[names].sum())

    # -- what the culprits did --------------------------------------------------------------------
    def _faults(self) -> dict[int, stall.Fault] | None:
        """What stops the culprits; None if that is not known of one of them."""
        faults: dict[int, stall.Fault] = {}
        for culprit in self.verdict.culprits:
            rank, at = culprit.rank, self.places.get(culprit.rank)
            placed = at is not None and at.index >= 0
            if culprit.kind == "host stuck" and placed:
                assert at is not None
                self.stops[rank] = at.index + 1
                faults[rank] = stall.Fault(host=at.index + 1)
            elif culprit.kind == "device stuck" and placed and self.state.head(rank):
                assert at is not None
                self.stops[rank] = self.overlay.first_open(rank, at.issued - 1)
                faults[rank] = stall.Fault(device=self.stops[rank])
            elif culprit.kind == "missing dump" and (index := self._awaited(rank)) is not None:
                self.stops[rank] = index
                faults[rank] = stall.Fault(host=index, silent=True)
            elif not self._called(culprit):
                return None
        return faults if faults or self.changed else None

    def _called(self, culprit: Blamed) -> bool:
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
            fifo = mine.groups().get(verdict.group, np.empty(0, int))
            fifo = fifo[IS_COLLECTIVE[mine.ops["name"][fifo]]]
            if 0 < count <= len(fifo):
                return int(fifo[count - 1])
        return None
