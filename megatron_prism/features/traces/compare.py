"""A predicted timeline beside that of the real job: where the error comes from.

In : traces, and the predicted programs' timeline.  Out: which calls are paired, and where enough
are, predicted against measured time of every traced rank: the parts that its iteration consists of,
and the calls and segments that differ most.
"""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_prism.core.errors import PrismError
from megatron_prism.core.ops import CODE, NAMES, PHASE_NAMES, label
from megatron_prism.core.program import Program
from megatron_prism.core.rendering import renderer_of
from megatron_prism.features.traces.pairing import ENOUGH, Pairing
from megatron_prism.features.traces.programs import paired
from megatron_prism.replay.priced_graph import price
from megatron_prism.replay.timeline import Timeline


@dataclass(frozen=True)
class Difference:
    """Part of an iteration: predicted and real ns; ``count``: how many segments or calls it is."""

    what: str
    predicted: float
    real: float
    count: int = 1

    @property
    def error(self) -> float:
        """Predicted less real, ns."""
        return self.predicted - self.real


@dataclass(frozen=True)
class RankComparison:
    """One traced rank.

    parts : computing, exposed and waited calls by group, host: they add up to the iteration
    ops   : segments and calls by what they are, those that differ most first
    """

    rank: int
    parts: tuple[Difference, ...]
    ops: tuple[Difference, ...]


@dataclass(frozen=True)
class Times:
    """Of a job whose calls are paired.

    predicted_ns, replayed_ns, real_ns : an iteration as predicted, as the imported traces replay,
        and as measured; between the last two is what variation costs
    """

    predicted_ns: float
    replayed_ns: float
    real_ns: float
    ranks: tuple[RankComparison, ...]
    predicted: Timeline = dataclasses.field(repr=False)
    real: Timeline = dataclasses.field(repr=False)


@dataclass(frozen=True)
class TraceComparison:
    """Of a job: what was predicted, what its traces say.

    pairings : of every traced rank, which of its calls are which predicted ones
    times    : None where fewer than ``ENOUGH`` of a rank's calls are paired
    """

    pairings: tuple[Pairing, ...]
    times: Times | None
    notes: tuple[str, ...] = ()

    @property
    def compared(self) -> Times:
        """``times``.  PrismError where they are not compared."""
        if self.times is None:
            what = "fewer than 95 % of a rank's calls are paired, so times are not compared"
            raise PrismError(what, fix="capture the job that was traced, with the same arguments")
        return self.times

    def to_json(self) -> dict[str, object]:
        """Everything but the timelines; times in ns."""
        names = ("predicted_ns", "replayed_ns", "real_ns")
        times = {name: getattr(self.times, name) for name in names} if self.times else {}
        rows, notes = self.to_rows(), list(self.notes)
        return {"schema": "prism.compare/2", **times, "ranks": rows, "notes": notes}

    def to_rows(self) -> list[dict[str, object]]:
        """Of every traced rank its calls and, where they are compared, its times."""
        calls = [
            {"rank": one.rank, "captured": one.captured, "traced": one.traced,
             "with_kernel": one.kernels, "need_none": one.bare, "lack_theirs": one.lost,
             "paired": len(one.pairs), "first_unpaired": one.first}
            for one in self.pairings
        ]  # fmt: skip
        if self.times is None:
            return calls
        times = map(dataclasses.asdict, self.times.ranks)
        return [{**one, **other} for one, other in zip(calls, times, strict=True)]

    def to_text(self) -> str:
        """What ``prism compare`` prints."""
        text: str = renderer_of(self).text(self)
        return text

    def to_html(self) -> str:
        """The same as a page, with both timelines drawn."""
        page: str = renderer_of(self).page(self)
        return page

    def to_chrome_trace(self) -> str:
        """Both timelines of every traced rank, for ui.perfetto.dev."""
        trace: str = renderer_of(self).trace(self)
        return trace


def compare_traces(paths: Sequence[str | os.PathLike[str]], predicted: Timeline) -> TraceComparison:
    """What was predicted of a job and what its traces say.

    Args:
        paths: traces of the job, files or folders of them.
        predicted: the replay of the job.

    Raises:
        UsageError: a file is no trace, or of a world of another size.
        PrismError: the traces do not fit together.
    """
    both = paired(paths, predicted.graph.programs)
    pairings = tuple(one.pairing for one in both.ranks)
    if any(one.share < ENOUGH for one in pairings):
        return TraceComparison(pairings, None)
    found = both.imported()
    real = price(found.programs).timeline
    ranks = tuple(_rank(predicted, real, *one) for one in zip(pairings, found.busy, strict=True))
    iterations = predicted.iteration_ns, real.iteration_ns, found.iteration_ns.mean()
    ours, replayed, measured = map(float, iterations)
    times = Times(ours, replayed, measured, ranks, predicted, real)
    return TraceComparison(pairings, times, tuple(found.notes))


def _rank(
    predicted: Timeline, real: Timeline, pairing: Pairing, busy: np.ndarray
) -> RankComparison:
    """``busy``: float64 [ops] ns in which the work of each real segment ran."""
    a, b = (int(one.graph.classes.of[pairing.rank]) for one in (predicted, real))
    ours, theirs = predicted.account(a), real.account(b)
    parts = [Difference("computing", ours.compute, float(busy.sum()))]
    for what in ("exposed", "waiting"):
        both = [getattr(one, what) for one in (ours, theirs)]
        names = dict.fromkeys([*both[0], *both[1]])
        parts += [
            Difference(f"{what} {name}", both[0].get(name, 0), both[1].get(name, 0))
            for name in names
        ]
    late = theirs.idle + theirs.compute - float(busy.sum())
    parts.append(Difference("host: what is left", ours.idle, late))
    calls = [op for op, _ in pairing.pairs]
    program, spans = predicted.graph.program_list[a], predicted.spans(a)
    took = np.zeros(len(program))
    took[spans["op"]] = spans["end"] - spans["start"]
    took[program.ops["name"] != CODE["compute"]] = 0
    steps = np.stack([_steps(predicted, a, calls, took), _steps(real, b, calls, busy)], axis=-1)
    sums: dict[str, list[np.ndarray]] = defaultdict(list)
    for call, step in zip(_names_of(program, calls), steps, strict=True):
        whats = f"computing before {call}", f"{call} on the wire", f"{call} waiting for others"
        for what, both in zip(whats, step, strict=True):
            sums[what].append(both)
    totals = ((what, np.sum(both, axis=0).tolist(), len(both)) for what, both in sums.items())
    ops = [Difference(what, p, r, count) for what, (p, r), count in totals]
    ops.sort(key=lambda row: -abs(row.error))
    return RankComparison(pairing.rank, tuple(parts), tuple(ops))


def _names_of(program: Program, calls: Sequence[int]) -> Iterator[str]:
    """What each call is, and the iteration's end."""
    for row in program.ops[calls]:
        step = label(PHASE_NAMES[row["phase"]], -1, -1)
        where = f" in {step}" if step != "-" else ""
        yield f"{NAMES[row['name']]} {program.strings[row['group']]}{where}"
    yield "the end"


def _steps(
    timeline: Timeline, index: int, calls: Sequence[int], computed: np.ndarray
) -> np.ndarray:
    """float64 [calls + 1, 3] ns of class ``index``: computed since the call before, on the wire,
    waiting; the last row is the iteration's end.  ``computed``: float64 [ops] ns.
    """
    spans = timeline.spans(index)
    at = np.full(len(computed), -1, dtype=np.int64)
    at[spans["op"]] = np.arange(len(spans))
    own = spans[at[list(calls)]]
    until = np.concatenate(([0.0], np.cumsum(computed)))
    before = np.diff(until[[0, *calls, -1]])
    wire, wait = own["end"] - own["start"], own["start"] - own["ready"]
    return np.stack([before, np.append(wire, 0.0), np.append(wait, 0.0)], axis=1)
