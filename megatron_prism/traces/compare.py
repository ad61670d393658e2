"""A predicted timeline beside that of the real job: where the error comes from.

In : Imported, and the predicted programs' timeline.  Out: Measured against predicted, per traced
rank: the parts that its iteration consists of, and the calls and segments that differ most.  Calls
are aligned by what they are (kind and elements) and their order; what has no counterpart is counted
and the first of it named.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from megatron_prism.core.errors import UsageError
from megatron_prism.core.files import rendered
from megatron_prism.core.ops import CODE, IS_COLLECTIVE, IS_PAIR, NAMES, PHASE_NAMES, label
from megatron_prism.core.program import Program
from megatron_prism.core.units import counted
from megatron_prism.replay.priced_graph import price
from megatron_prism.replay.timeline import Timeline
from megatron_prism.traces.programs import Imported

__all__ = ["Difference", "RankComparison", "TraceComparison", "compare_traces"]


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

    parts   : compute, exposed and waited calls by group, idle: they add up to the iteration
    ops     : segments and calls by what they are, those that differ most first
    aligned : calls that have a counterpart, of so many predicted and real
    first   : the first that has none, in words; "" if all have
    """

    rank: int
    parts: tuple[Difference, ...]
    ops: tuple[Difference, ...]
    aligned: tuple[int, int, int]
    first: str


@dataclass(frozen=True)
class TraceComparison:
    """Of a job: what was predicted, what its traces say.

    predicted_ns, replayed_ns, real_ns : an iteration as predicted, as the imported traces replay,
        and as measured; between the last two is what variation costs
    """

    predicted_ns: float
    replayed_ns: float
    real_ns: float
    ranks: tuple[RankComparison, ...]
    predicted: Timeline = dataclasses.field(repr=False)
    real: Timeline = dataclasses.field(repr=False)
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Everything but the timelines; times in ns."""
        ranks = [dataclasses.asdict(one) for one in self.ranks]
        return {
            "schema": "prism.compare/1",
            "predicted_ns": self.predicted_ns,
            "replayed_ns": self.replayed_ns,
            "real_ns": self.real_ns,
            "ranks": ranks,
            "notes": list(self.notes),
        }

    def to_text(self) -> str:
        """What ``prism compare`` prints."""
        return rendered("report.traces:render_comparison", self, str)

    def to_html(self) -> str:
        """The same as a page, with both timelines drawn."""
        return rendered("report.traces:render_page", self, str)

    def to_chrome_trace(self) -> str:
        """Both timelines of every traced rank, for ui.perfetto.dev."""
        return rendered("report.chrome_trace:render_pairs", self, str)


def compare_traces(found: Imported, predicted: Timeline) -> TraceComparison:
    """What was predicted of a job and what its traces say.

    UsageError if the prediction has no rank that is traced.
    """
    world = predicted.graph.programs.world
    shared = [rank for rank in found.ranks if rank < world.size]
    if not shared or world.size != found.programs.world.size:
        raise UsageError(
            f"the traces are of {counted(found.programs.world.size, 'rank')}, "
            f"the prediction of {world.size:,}",
            fix="capture the job that was traced, or name the slices of that job",
        )
    real = price(found.programs).timeline
    ranks = [_rank(predicted, real, rank) for rank in shared]
    return TraceComparison(
        float(predicted.iteration_ns),
        float(real.iteration_ns),
        float(found.iteration_ns.mean()),
        tuple(ranks),
        predicted,
        real,
        tuple(found.notes),
    )


def _rank(predicted: Timeline, real: Timeline, rank: int) -> RankComparison:
    a, b = (int(one.graph.classes.of[rank]) for one in (predicted, real))
    accounts = predicted.account(a), real.account(b)
    parts = [Difference("computing", accounts[0].compute, accounts[1].compute)]
    for what in ("exposed", "waiting"):
        both = [getattr(one, what) for one in accounts]
        names = dict.fromkeys([*both[0], *both[1]])
        parts += [
            Difference(f"{what} {name}", both[0].get(name, 0), both[1].get(name, 0))
            for name in names
        ]
    parts.append(Difference("idle: the host, or nothing to do", accounts[0].idle, accounts[1].idle))
    first, second = _steps(predicted, a), _steps(real, b)
    pairs, missing = _align(first, second)
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for one, other in pairs:
        for what, ours, theirs in (
            (f"computing before {one.what}", one.before, other.before),
            (f"{one.what} on the wire", one.wire, other.wire),
            (f"{one.what} waiting for others", one.wait, other.wait),
        ):
            row = sums[what]
            row[0], row[1], row[2] = row[0] + ours, row[1] + theirs, row[2] + 1
    ops = [Difference(what, p, r, int(count)) for what, (p, r, count) in sums.items()]
    ops.sort(key=lambda row: -abs(row.error))
    sizes = len(pairs), len(first) - 1, len(second) - 1
    return RankComparison(rank, tuple(parts), tuple(ops), sizes, missing)


@dataclass(frozen=True)
class _Step:
    """A call and what was computed since the one before it; the last is the iteration's end."""

    key: tuple[str, int]
    what: str
    before: float
    wire: float
    wait: float


def _steps(timeline: Timeline, index: int) -> list[_Step]:
    program: Program = timeline.graph.program_list[index]
    spans = timeline.spans(index)
    at = np.full(len(program), -1, dtype=np.int64)
    at[spans["op"]] = np.arange(len(spans))
    names = program.ops["name"]
    calls = np.flatnonzero(IS_COLLECTIVE[names] | IS_PAIR[names])
    took = np.zeros(len(program))
    took[spans["op"]] = spans["end"] - spans["start"]
    computed = np.concatenate(([0.0], np.cumsum(np.where(names == CODE["compute"], took, 0.0))))
    found, since = list[_Step](), 0
    for op in calls.tolist():
        row, span = program.ops[op], spans[at[op]]
        size = int(max(row["num_in"], row["num_out"]))
        step = label(PHASE_NAMES[row["phase"]], -1, -1)
        what = f"{NAMES[row['name']]} {program.strings[row['group']]}" + f" in {step}" * (
            step != "-"
        )
        found.append(
            _Step(
                (NAMES[row["name"]], size),
                what,
                float(computed[op] - computed[since]),
                float(span["end"] - span["start"]),
                float(span["start"] - span["ready"]),
            )
        )
        since = op
    rest = float(computed[-1] - computed[since])
    return [*found, _Step(("end", 0), "the end", rest, 0.0, 0.0)]


def _align(first: list[_Step], second: list[_Step]) -> tuple[list[tuple[_Step, _Step]], str]:
    """Steps that are the same, and the first that has no counterpart."""
    keys = [one.key for one in first], [one.key for one in second]
    if keys[0] == keys[1]:
        return list(zip(first, second, strict=True)), ""
    pairs, missing = [], ""
    for tag, a, b, c, d in difflib.SequenceMatcher(None, *keys, autojunk=False).get_opcodes():
        if tag == "equal":
            pairs += list(zip(first[a:b], second[c:d], strict=True))
        elif not missing:
            ours = f"{first[a].what} of {first[a].key[1]:,} elements" if a < b else "nothing"
            real = f"{second[c].what} of {second[c].key[1]:,} elements" if c < d else "nothing"
            missing = f"call {a} is predicted as {ours}, and is {real}"
    return pairs, missing
