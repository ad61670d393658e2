"""When does each stage run what, if a forward takes 1 and a backward 2?  A longest path.

In : programs of a schedule (prism schedule).  Out: ``Timeline``: the steps of every stage in units,
exact.  Where a step has several ops, as in combined 1F1B, they share its time evenly.  Sends cost
nothing and meet their receive as NCCL's do: both are done when both are there, a batch when all of
it is.  It knows no collectives and no bandwidth; its figures are those of textbooks, to see the
shape of a schedule.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron_prism.core.errors import ProgramError
from megatron_prism.core.ops import NAMES, PHASE_NAMES, label
from megatron_prism.core.program import Program
from megatron_prism.core.programs import Programs

__all__ = ["COST", "SPLIT", "Step", "Timeline", "cost_of", "timeline"]

COST: Mapping[str, int] = {"forward": 1, "backward": 2}
SPLIT: Mapping[str, int] = {"forward": 1, "backward": 1, "weight": 1}  # wgrads computed apart


@dataclass(frozen=True)
class Step:
    """A forward or backward of one microbatch on one stage, from its first part to its last."""

    phase: str
    microbatch: int
    chunk: int
    start: Fraction
    end: Fraction

    @property
    def label(self) -> str:
        """``2F0``."""
        return label(self.phase, self.microbatch, self.chunk)


@dataclass(frozen=True)
class Timeline:
    """Steps by stage, ascending in start; ``busy`` is how long each stage computes at all."""

    stages: tuple[tuple[Step, ...], ...]
    busy: tuple[Fraction, ...]
    total: Fraction

    @property
    def bubble(self) -> Fraction:
        """The part of all stages' time in which they compute nothing."""
        return 1 - sum(self.busy, Fraction()) / (len(self.stages) * self.total)


def cost_of(programs: Programs) -> Mapping[str, int]:
    """COST, or SPLIT where weight gradients are computed apart."""
    weight = PHASE_NAMES.index("weight")
    apart = any((program.ops["phase"] == weight).any() for program in programs.programs)
    return SPLIT if apart else COST


def timeline(programs: Programs, cost: Mapping[str, int] | None = None) -> Timeline:
    """Play all stages against each other.  ProgramError if they wait for each other forever."""
    cost = cost_of(programs) if cost is None else cost
    size = programs.world.size
    channels = _Channels(size)
    stages = [_Stage(rank, programs.of(rank), cost, channels) for rank in range(size)]
    going = True
    while going:
        going = sum(stage.advance() for stage in stages) > 0
    stuck = [stage for stage in stages if not stage.done]
    if stuck:
        waits = ", ".join(f"rank {s.rank} at op {s.at} ({s.here})" for s in stuck[:4])
        raise ProgramError(f"the stages wait for each other: {waits}", fix="see prism check")
    total = max((step.end for stage in stages for step in stage.steps()), default=Fraction(1))
    return Timeline(
        tuple(stage.steps() for stage in stages), tuple(stage.busy() for stage in stages), total
    )


End = tuple[str, str, tuple[int, int]]  # group, send or recv, (sender, receiver)


class _Channels:
    """Messages: the k-th send of a directed pair in a group meets the k-th receive."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.posted: dict[End, list[Fraction]] = defaultdict(list)

    def post(self, name: str, group: str, rank: int, peer: int, when: Fraction) -> tuple[End, int]:
        """Post a side; returns where the other side will be."""
        other = (rank + peer) % self.size
        ends = (rank, other) if name == "send" else (other, rank)
        mine = self.posted[group, name, ends]
        mine.append(when)
        back = "recv" if name == "send" else "send"
        return (group, back, ends), len(mine) - 1


class _Stage:
    """One rank's program, played as far as it goes."""

    def __init__(
        self, rank: int, program: Program, cost: Mapping[str, int], channels: _Channels
    ) -> None:
        self.rank, self.program, self.channels = rank, program, channels
        ops, fields = program.ops, ("name", "phase", "microbatch", "chunk", "group", "peer")
        self.columns = [ops[f].tolist() for f in (*fields, "handle", "batch", "stream")]
        self.at = 0
        self.clocks: dict[int, Fraction] = defaultdict(Fraction)
        self.floor = Fraction()  # no stream goes on before: where the host waited
        self.pending: dict[int, tuple[Fraction, End, int, int]] = {}
        self.batches: dict[int, list[int]] = defaultdict(list)
        self.events: dict[int, Fraction] = {}
        self.parts: dict[tuple[int, int, int], list[tuple[Fraction, Fraction]]] = defaultdict(list)
        names, phases, microbatches, chunks = self.columns[:4]
        kinds = list(zip(phases, microbatches, chunks, strict=True))
        compute = NAMES.index("compute")
        counts = Counter(k for k, n in zip(kinds, names, strict=True) if n == compute)
        self.kinds = kinds
        self.cost = {k: Fraction(cost.get(PHASE_NAMES[k[0]], 0), n) for k, n in counts.items()}

    @property
    def done(self) -> bool:
        return self.at == len(self.kinds)

    @property
    def here(self) -> str:
        name: str = NAMES[self.columns[0][self.at]]
        return name

    def advance(self) -> bool:
        """Play until something is waited for that is not there; whether it got anywhere."""
        names, *_, groups, peers, handles, batches, streams = self.columns
        begin, count = self.at, len(self.kinds)
        while self.at < count:
            i = self.at
            name, stream = NAMES[names[i]], streams[i]
            now = max(self.clocks[stream], self.floor)
            if name == "compute":
                self._compute(i, stream, now)
            elif name in ("send", "recv"):
                group = self.program.strings[groups[i]]
                where, number = self.channels.post(name, group, self.rank, peers[i], now)
                self.pending[handles[i]] = (now, where, number, batches[i])
                if batches[i] >= 0:
                    self.batches[batches[i]].append(handles[i])
            elif name == "wait":
                until = self._finished(handles[i])
                if until is None:
                    break
                self.clocks[stream] = max(now, until)
            elif name == "record":
                self.events[handles[i]] = now
            elif name == "host_wait":
                self.floor = max([now, *self.clocks.values()])
            self.at += 1
        return self.at > begin

    def _compute(self, i: int, stream: int, now: Fraction) -> None:
        kind = self.kinds[i]
        self.clocks[stream] = now + self.cost[kind]
        self.parts[kind].append((now, self.clocks[stream]))

    def _finished(self, handle: int) -> Fraction | None:
        """When the op of this handle is done; None if the other side is not there yet."""
        if handle in self.events:
            return self.events[handle]
        batch = self.pending[handle][3]
        last = Fraction()
        for one in self.batches[batch] if batch >= 0 else [handle]:
            posted, where, number, _ = self.pending[one]
            others = self.channels.posted[where]
            if number >= len(others):
                return None
            last = max(last, posted, others[number])
        return last

    def steps(self) -> tuple[Step, ...]:
        """Forwards and backwards, by start."""
        found = [
            Step(PHASE_NAMES[p], m, c, min(a for a, _ in parts), max(b for _, b in parts))
            for (p, m, c), parts in self.parts.items()
        ]
        return tuple(sorted(found, key=lambda step: (step.start, step.end)))

    def busy(self) -> Fraction:
        """How long anything computes."""
        return _covered([part for parts in self.parts.values() for part in parts])


def _covered(intervals: Sequence[tuple[Fraction, Fraction]]) -> Fraction:
    """Length of the union."""
    total, reached = Fraction(), Fraction()
    for start, end in sorted(intervals):
        total += max(Fraction(), end - max(start, reached))
        reached = max(reached, end)
    return total
