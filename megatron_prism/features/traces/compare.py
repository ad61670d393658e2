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
from megatron_prism.core.programs.ops import CODE, NAMES, PHASE_NAMES, label
from megatron_prism.core.programs.program import Program
from megatron_prism.core.rendering import Rendered
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
class TraceComparison(Rendered):
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
            message = "fewer than 95 % of a rank's calls are paired, so times are not compared"
            raise PrismError(
                message, fix="capture the job that was traced, with the same arguments"
            )
        return self.times

    def to_json(self) -> dict[str, object]:
        """Everything but the timelines; times in ns."""
        data: dict[str, object] = {"schema": "prism.compare/2"}
        if self.times is not None:
            data["predicted_ns"] = self.times.predicted_ns
            data["replayed_ns"] = self.times.replayed_ns
            data["real_ns"] = self.times.real_ns
        data["ranks"] = self.to_rows()
        data["notes"] = list(self.notes)
        return data

    def to_rows(self) -> list[dict[str, object]]:
        """Of every traced rank its calls and, where they are compared, its times."""
        rows = []
        for pairing in self.pairings:
            row: dict[str, object] = {
                "rank": pairing.rank,
                "captured": pairing.captured,
                "traced": pairing.traced,
                "with_kernel": pairing.kernels,
                "need_none": pairing.bare,
                "lack_theirs": pairing.lost,
                "paired": len(pairing.pairs),
                "first_unpaired": pairing.first,
            }
            rows.append(row)
        # times are compared only where enough calls have a counterpart
        if self.times is not None:
            for row, rank in zip(rows, self.times.ranks, strict=True):
                row.update(dataclasses.asdict(rank))
        return rows


def compare_traces(paths: Sequence[str | os.PathLike[str]], predicted: Timeline) -> TraceComparison:
    """Say what was predicted of a job and what its traces say.

    Args:
        paths: traces of the job, files or folders of them.
        predicted: the replay of the job.

    Raises:
        UsageError: a file is no trace, or of a world of another size.
        PrismError: the traces do not fit together.
    """
    traced = paired(paths, predicted.graph.programs)
    pairings = tuple(beside.pairing for beside in traced.ranks)
    # too few calls have a counterpart: their times would be those of two jobs
    if any(pairing.share < ENOUGH for pairing in pairings):
        return TraceComparison(pairings, None)

    imported = traced.imported()
    real = price(imported.programs).timeline
    ranks = []
    for pairing, busy in zip(pairings, imported.busy, strict=True):
        ranks.append(_compare_rank(predicted, real, pairing, busy))
    times = Times(
        predicted_ns=float(predicted.iteration_ns),
        replayed_ns=float(real.iteration_ns),
        real_ns=float(imported.iteration_ns.mean()),
        ranks=tuple(ranks),
        predicted=predicted,
        real=real,
    )
    return TraceComparison(pairings, times, tuple(imported.notes))


def _compare_rank(
    predicted: Timeline, real: Timeline, pairing: Pairing, busy: np.ndarray
) -> RankComparison:
    """Compare the times of one rank.

    Args:
        predicted: the replay of the job.
        real: the replay of its traces.
        pairing: the rank's calls.
        busy: float64 [ops] ns in which the work of each real segment ran.
    """
    predicted_class = int(predicted.graph.classes.of[pairing.rank])
    real_class = int(real.graph.classes.of[pairing.rank])
    parts = _compare_parts(predicted, predicted_class, real, real_class, float(busy.sum()))

    # what the rank computes in each predicted segment
    program = predicted.graph.program_list[predicted_class]
    spans = predicted.spans(predicted_class)
    computed = np.zeros(len(program))
    computed[spans["op"]] = spans["end"] - spans["start"]
    # calls are compared below
    computed[program.ops["name"] != CODE["compute"]] = 0

    # from call to call, those of one name together
    calls = [op for op, _ in pairing.pairs]
    predicted_steps = _steps(predicted, predicted_class, calls, computed)
    real_steps = _steps(real, real_class, calls, busy)
    predicted_times: dict[str, list[np.ndarray]] = defaultdict(list)
    real_times: dict[str, list[np.ndarray]] = defaultdict(list)
    for number, call in enumerate(_names_of(program, calls)):
        what = f"computing before {call}", f"{call} on the wire", f"{call} waiting for others"
        for part, name in enumerate(what):
            predicted_times[name].append(predicted_steps[number, part])
            real_times[name].append(real_steps[number, part])
    ops = []
    for name, times in predicted_times.items():
        predicted_ns = float(np.sum(times, axis=0))
        real_ns = float(np.sum(real_times[name], axis=0))
        ops.append(Difference(name, predicted_ns, real_ns, len(times)))
    ops.sort(key=lambda difference: -abs(difference.error))
    return RankComparison(pairing.rank, tuple(parts), tuple(ops))


def _compare_parts(
    predicted: Timeline, predicted_class: int, real: Timeline, real_class: int, busy_ns: float
) -> list[Difference]:
    """Return the parts that an iteration of one rank consists of.

    Args:
        predicted: the replay of the job.
        predicted_class: the rank's in it.
        real: the replay of its traces.
        real_class: the rank's in it.
        busy_ns: in which the work of the real segments ran.
    """
    predicted_account = predicted.account(predicted_class)
    real_account = real.account(real_class)
    parts = [Difference("computing", predicted_account.compute, busy_ns)]
    # calls, by their groups
    for what in ("exposed", "waiting"):
        predicted_ns, real_ns = getattr(predicted_account, what), getattr(real_account, what)
        for name in dict.fromkeys([*predicted_ns, *real_ns]):
            difference = Difference(
                f"{what} {name}", predicted_ns.get(name, 0), real_ns.get(name, 0)
            )
            parts.append(difference)
    # segments of traces have the host's delays in them
    host_ns = real_account.idle + real_account.compute - busy_ns
    parts.append(Difference("host: what is left", predicted_account.idle, host_ns))
    return parts


def _names_of(program: Program, calls: Sequence[int]) -> Iterator[str]:
    """Say what each call is, and the iteration's end."""
    for row in program.ops[calls]:
        phase = label(PHASE_NAMES[row["phase"]], -1, -1)
        name = f"{NAMES[row['name']]} {program.strings[row['group']]}"
        if phase != "-":
            name += f" in {phase}"
        yield name
    yield "the end"


def _steps(
    timeline: Timeline, class_number: int, calls: Sequence[int], computed: np.ndarray
) -> np.ndarray:
    """Return times from call to call.

    Args:
        timeline: of the job.
        class_number: of the rank.
        calls: their ops.
        computed: float64 [ops] ns.

    Returns:
        float64 [calls + 1, 3] ns: computed since the call before, on the wire, waiting; the last
        row is the iteration's end.
    """
    spans = timeline.spans(class_number)
    span_of = np.full(len(computed), -1, dtype=np.int64)
    span_of[spans["op"]] = np.arange(len(spans))
    call_spans = spans[span_of[list(calls)]]
    computed_until = np.concatenate(([0.0], np.cumsum(computed)))
    computed_before = np.diff(computed_until[[0, *calls, -1]])
    wire = call_spans["end"] - call_spans["start"]
    waiting = call_spans["start"] - call_spans["ready"]
    columns = computed_before, np.append(wire, 0.0), np.append(waiting, 0.0)
    return np.stack(columns, axis=1)
