"""Between whom and over what times of a traced job vary, and who is slow.

In : Imported.  Out: Variation: components of the variance of computing and of calls with intervals,
as ``predict`` reads them; GPUs, nodes and iterations that stand out, each with what the iteration
would take without it; and how much of the calls' time was waiting for the last rank to come.

Ranks that run the same ops are compared with each other.  The logarithm of what rank r computes in
iteration i is a mean, plus what r always adds, what i adds for all, and the rest: the variance of
each follows from mean squares (Searle, Casella & McCulloch, "Variance Components", 1992, ch. 4),
its 90 % interval from resampling ranks and iterations.  Who stands out is named and left out there.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_prism.core.programs.ops import IS_CALL
from megatron_prism.core.rendering import Rendered
from megatron_prism.core.world import format_ranks
from megatron_prism.features.traces.programs import Imported
from megatron_prism.replay.priced_graph import PricedGraph, price

_SHARE = 0.95  # of a time: the longest parts that make it up are looked at
# what is named, as a part of what is usual
_SLOW = 0.03  # of a rank
_DRIFT = 0.02  # of a rank, over the trace
_LONG = 0.2  # of an iteration
_SURE = 4.0  # standard errors from the others
_DRAWS = 300  # of resampling
_FEWEST = 3  # ranks or iterations of which one can stand out
_PREDICTED = {
    "gpu": ("gpu", "node"),
    "step": ("iteration", "rank x iteration"),
    "segment": ("segment",),
    "call": ("call",),
    "network": ("network",),
}  # spreads of ``predict`` -> ours


@dataclass(frozen=True)
class Component:
    """A spread (standard deviation of the logarithm); ``low`` and ``high``: its 90 % interval; nan:
    there is nothing to tell it from.
    """

    name: str
    spread: float
    low: float
    high: float
    basis: str


@dataclass(frozen=True)
class Outlier:
    """What stands out.

    kind      : gpu, node, drift or iteration
    factor    : how many times as long as the others
    effect_ns : by how much the iteration would be shorter without it, replayed; of an iteration,
                by how much it was longer
    """

    kind: str
    what: str
    factor: float
    effect_ns: float
    ranks: tuple[int, ...] = ()
    number: int = -1


@dataclass(frozen=True)
class GroupTime:
    """Calls of one group and kind: ns per iteration, mean over traced ranks.

    last : the rank that most often came last, and its part of the calls; -1: not all are traced
    """

    group: str
    op: str
    calls: float
    wire_ns: float
    skew_ns: float
    last: int
    part: float


@dataclass(frozen=True)
class Variation(Rendered):
    """What varies in a traced job; see the module.

    iteration_ns, replayed_ns : of every iteration, measured and replayed with its own times
    typical_ns : replayed with every segment and call at its mean, as ``prism replay`` has it
    """

    ranks: tuple[int, ...]
    numbers: tuple[int, ...]
    iteration_ns: tuple[float, ...]
    replayed_ns: tuple[float, ...]
    typical_ns: float
    components: tuple[Component, ...]
    findings: tuple[Outlier, ...]
    groups: tuple[GroupTime, ...]
    notes: tuple[str, ...]

    def variability(self) -> dict[str, object]:
        """As ``predict --variability FILE`` reads it."""
        finite = {}
        unknown = []
        # what nothing in the traces tells has no finite spread
        for component in self.components:
            if math.isfinite(component.spread):
                finite[component.name] = component.spread
            else:
                unknown.append(component.name)

        # where the spreads are from, and what is not in them
        source = f"measured: {len(self.ranks)} ranks x {len(self.numbers)} iterations"
        if unknown:
            source += f"; 0, as nothing tells it: {', '.join(unknown)}"
        num_slow_iterations = sum(finding.kind == "iteration" for finding in self.findings)
        if num_slow_iterations:
            source += f"; without {num_slow_iterations} slow iterations, which it cannot express"

        # a spread of the prediction is made of one or two of the traces'
        spreads = {}
        for name, parts in _PREDICTED.items():
            spread = math.hypot(*(finite.get(part, 0.0) for part in parts))
            spreads[name] = round(min(1.0, spread), 6)
        variability: dict[str, object] = {"name": "traces", **spreads, "source": source}

        slow_factors = []
        for finding in self.findings:
            if finding.kind == "gpu" and finding.factor > 1:
                slow_factors.append(finding.factor)
        if slow_factors:
            share = len(slow_factors) / len(self.ranks)
            variability["slow_gpu"] = [share, round(float(np.mean(slow_factors)), 4)]
        return variability

    def to_json(self) -> dict[str, object]:
        """Everything, times in ns; what nothing tells is null."""
        plain = dataclasses.asdict(self)
        for component in plain["components"]:
            for key in ("spread", "low", "high"):
                if math.isnan(component[key]):
                    component[key] = None
        plain["components"] = list(plain["components"])
        return {"schema": "prism.import/1", **plain, "variability": self.variability()}


def vary(imported: Imported) -> Variation:
    """Say what varies in a job, and who stands out."""
    priced = price(imported.programs)
    groups_of_equals = _equal_ranks(imported)
    slow = _slow_ranks(imported, priced, groups_of_equals)
    slow_iterations = _slow_iterations(imported)

    # who stands out is named, and left out of the spreads
    excluded: set[int] = set()
    for outlier in slow:
        if outlier.kind == "gpu":
            excluded.update(outlier.ranks)
    slow_numbers = [outlier.number for outlier in slow_iterations]
    usual = np.flatnonzero(~np.isin(imported.numbers, slow_numbers))
    computing = _computing(imported, groups_of_equals, excluded, usual)
    return Variation(
        ranks=tuple(imported.ranks),
        numbers=tuple(imported.numbers),
        iteration_ns=tuple(imported.iteration_ns.tolist()),
        replayed_ns=tuple(imported.replayed_ns(priced).tolist()),
        typical_ns=float(priced.timeline.iteration_ns),
        components=(*computing, *_calls(imported, usual)),
        findings=(*slow, *slow_iterations),
        groups=tuple(_groups(imported)),
        notes=tuple(imported.notes),
    )


def _equal_ranks(imported: Imported) -> list[list[int]]:
    """Return indices of traced ranks, those that make the same calls together."""
    classes: dict[bytes, list[int]] = defaultdict(list)
    for index, program in enumerate(imported.programs.programs):
        calls = program.ops[IS_CALL[program.ops["name"]]]
        sizes = np.maximum(calls["num_in"], calls["num_out"])
        classes[calls["name"].tobytes() + sizes.tobytes()].append(index)
    return list(classes.values())


def _logs(ns: np.ndarray) -> np.ndarray:
    return np.asarray(np.log(np.maximum(1.0, ns)))


# -- who stands out -------------------------------------------------------------------------------
def _spread_of(values: np.ndarray) -> float:
    """Return a standard deviation that outliers do not move."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


class _EqualRanks:
    """Computing of ranks that run the same.

    ranks : of the job, in their places here
    level : float64 [ranks]: by how much the logarithm of a rank's time is above the others'
    excess : float64 [ranks, iterations]: the same in each iteration
    noise : standard error of a level
    """

    def __init__(self, imported: Imported, members: list[int]) -> None:
        self.ranks = [imported.ranks[index] for index in members]
        logs = _logs(imported.computed[members])
        self.excess = logs - np.median(logs, axis=0)
        self.level = np.median(self.excess, axis=1)
        spread = _spread_of(self.excess - self.level[:, None])
        self.noise = spread * 1.2533 / math.sqrt(logs.shape[1])  # of a median
        self.places_of_nodes: dict[str, list[int]] = defaultdict(list)
        for place, index in enumerate(members):
            self.places_of_nodes[imported.measured[index].recorded.node].append(place)

    def factor(self, level: float, other_levels: np.ndarray) -> float | None:
        """Return how many times as long as the others one takes; None if it does not stand out."""
        usual = float(np.median(other_levels))
        other_spread = 0.0
        if len(other_levels) > 2:
            other_spread = _spread_of(other_levels)
        error = math.hypot(other_spread, self.noise)
        if level - usual <= max(_SLOW, _SURE * error):
            return None
        return math.exp(level - usual)


def _slow_ranks(
    imported: Imported, priced: PricedGraph, groups_of_equals: list[list[int]]
) -> list[Outlier]:
    """Name GPUs and nodes that are slower than those that run the same, and those that drift."""
    outliers: list[Outlier] = []
    for members in groups_of_equals:
        equal_ranks = _EqualRanks(imported, members)
        slow_places: list[int] = []
        for node, factor in _slow_nodes(equal_ranks).items():
            places = equal_ranks.places_of_nodes[node]
            ranks = tuple(equal_ranks.ranks[place] for place in places)
            effect_ns = _without(priced, ranks, factor)
            outliers.append(Outlier("node", f"node {node}", factor, effect_ns, ranks))
            slow_places += places
        outliers += _slow_gpus(equal_ranks, slow_places, priced)
    return outliers


def _slow_nodes(equal_ranks: _EqualRanks) -> dict[str, float]:
    """Return the factors of nodes all of whose ranks are slow."""
    places_of_nodes = equal_ranks.places_of_nodes
    # of few nodes nobody can say which is slow
    if len(places_of_nodes) < _FEWEST or not all(places_of_nodes):
        return {}
    node_levels = [np.median(equal_ranks.level[places]) for places in places_of_nodes.values()]
    levels = np.array(node_levels)
    factors = {}
    for number, (node, places) in enumerate(places_of_nodes.items()):
        # a node of one rank is its GPU
        if len(places) == 1:
            continue
        factor = equal_ranks.factor(float(levels[number]), np.delete(levels, number))
        if factor is not None:
            factors[node] = factor
    return factors


def _slow_gpus(
    equal_ranks: _EqualRanks, slow_places: list[int], priced: PricedGraph
) -> list[Outlier]:
    """Name slow GPUs outside of ``slow_places``, and all that drift."""
    outliers = []
    num_iterations = equal_ranks.excess.shape[1]
    for place, rank in enumerate(equal_ranks.ranks):
        level = float(equal_ranks.level[place])
        drift = _drift(equal_ranks.excess[place])
        if drift is not None:
            outliers.append(Outlier("drift", f"rank {rank}", drift, 0.0, (rank,)))
            # was it slow from the beginning?
            beginning = equal_ranks.excess[place][: num_iterations // 3]
            level = float(np.median(beginning))
        # a slow node has been named, and of few ranks none can be
        if place in slow_places or len(equal_ranks.ranks) < _FEWEST:
            continue
        other_levels = np.delete(equal_ranks.level, [place, *slow_places])
        factor = equal_ranks.factor(level, other_levels)
        if factor is not None:
            effect_ns = _without(priced, (rank,), factor)
            outliers.append(Outlier("gpu", f"rank {rank}", factor, effect_ns, (rank,)))
    return outliers


def _drift(excess: np.ndarray) -> float | None:
    """Return the factor from the first to the last iteration; None where there is no trend.

    Args:
        excess: float64 [iterations]: by how much a rank's time is above the others'.
    """
    count = len(excess)
    if count < 8:
        return None
    # a line of least squares, and the standard error of its slope
    time = np.arange(count) - (count - 1) / 2
    time_squares = float((time * time).sum())
    slope = float((time * excess).sum() / (time * time).sum())
    residuals = excess - excess.mean() - slope * time
    variance = float((residuals * residuals).sum()) / (count - 2)
    error = math.sqrt(variance / time_squares)
    total = slope * (count - 1)
    if abs(total) <= _DRIFT or abs(slope) <= _SURE * error:
        return None
    return math.exp(total)


def _without(priced: PricedGraph, ranks: tuple[int, ...], factor: float) -> float:
    """By how much the iteration is shorter if ``ranks`` compute as fast as the others, ns."""
    if factor <= 0.001:
        return 0.0
    faster = priced.again(slow={format_ranks(ranks): str(round(1 / factor, 3))})
    return float(priced.timeline.iteration_ns - faster.timeline.iteration_ns)


def _slow_iterations(imported: Imported) -> list[Outlier]:
    """Name iterations that took longer, with the ranks that computed longer in them."""
    took, computed = imported.iteration_ns, imported.computed
    if len(took) < _FEWEST:
        return []
    usual_ns = float(np.median(took))
    longer = computed - np.median(computed, axis=1, keepdims=True)
    bound = max(_LONG * usual_ns, _SURE * _spread_of(took))
    outliers = []
    for row in np.flatnonzero(took - usual_ns > bound).tolist():
        excess_ns = took[row] - usual_ns
        # the cause is who took half as much longer as the slowest, and a quarter of the excess
        threshold = max(0.5 * longer[:, row].max(), 0.25 * excess_ns)
        is_late = longer[:, row] > threshold
        late_ranks = tuple(np.array(imported.ranks)[is_late].tolist())
        # nobody computed longer
        if not late_ranks:
            why = "calls"
        # all did: no rank is the cause
        elif len(late_ranks) == len(longer) > 1:
            why = "computing of all ranks"
        else:
            why = f"computing of rank {format_ranks(late_ranks)}"
        number = imported.numbers[row]
        text = f"iteration {number}: {why}"
        factor = took[row] / usual_ns
        outliers.append(Outlier("iteration", text, factor, excess_ns, late_ranks, number))
    return outliers


# -- components -----------------------------------------------------------------------------------
_COMPUTING = {"gpu": 0, "node": 1, "iteration": 2, "rank x iteration": 3}  # in ``_squares``
_CALLS = {"call": 3, "network": 2}


class _Table(NamedTuple):
    """Times of equal rows.

    logs  : float64 [rows, iterations], logarithms of ns
    nodes : int64 [rows]: the node of each
    """

    logs: np.ndarray
    nodes: np.ndarray


def _squares(table: _Table) -> tuple[float, ...]:
    """Variances between rows, between their nodes, between columns, and of the rest of a table;
    nan where there are too few.
    """
    rows, columns = table.logs.shape
    residuals = table.logs - table.logs.mean()
    row_means, column_means = residuals.mean(axis=1), residuals.mean(axis=0)
    residuals = residuals - row_means[:, None] - column_means
    nan = math.nan
    if columns < 2:
        return nan, nan, nan, nan
    # with one row what all share cannot be told from the rest
    if rows < 2:
        return nan, nan, nan, float(column_means.var(ddof=1))

    residual = float((residuals * residuals).sum()) / ((rows - 1) * (columns - 1))
    row_variance, node_variance = float(row_means.var(ddof=1)), nan
    nodes, node_of = np.unique(table.nodes, return_inverse=True)
    # nodes of several rows each: what their rows share is theirs
    if len(nodes) >= _FEWEST and rows - len(nodes) > 1:
        sizes = np.bincount(node_of)
        node_means = np.bincount(node_of, weights=row_means) / sizes
        row_rest = row_means - node_means[node_of]
        row_variance = float((row_rest**2).sum()) / (rows - len(nodes))
        node_rest = float(node_means.var(ddof=1)) - row_variance / float(sizes.mean())
        node_variance = max(0.0, node_rest)
    shared = max(0.0, float(column_means.var(ddof=1)) - residual / rows)
    return max(0.0, row_variance - residual / columns), node_variance, shared, residual


def _spreads(tables: Sequence[_Table]) -> np.ndarray:
    """float64 [4]: roots of the ``_squares`` of all tables, which have the same."""
    squares = np.array([_squares(table) for table in tables])
    degrees = [[max(1, len(table.logs) - 1)] for table in tables]
    weights = np.where(np.isnan(squares), 0.0, np.array(degrees, dtype=float))
    with np.errstate(invalid="ignore"):  # 0 / 0 is unknown
        means = np.nansum(weights * squares, axis=0) / weights.sum(axis=0)
        return np.asarray(np.sqrt(means))


def _components(
    names: Mapping[str, int], tables: Sequence[_Table], rng: np.random.Generator, basis: str
) -> list[Component]:
    """Return spreads of ``tables``, with intervals from rows and iterations drawn anew.

    Args:
        names: of the spreads, and their places in ``_squares``.
        tables: of equal rows; a row is drawn with its node.
        rng: for the draws.
        basis: what the spreads are from, in words.
    """

    def drawn(table: _Table) -> _Table:
        num_rows, num_columns = table.logs.shape
        rows = rng.integers(num_rows, size=num_rows)
        columns = rng.integers(num_columns, size=num_columns)
        return _Table(table.logs[rows][:, columns], table.nodes[rows])

    spreads = _spreads(tables)
    draws = np.empty((_DRAWS, len(spreads)))
    for number in range(_DRAWS):
        draws[number] = _spreads([drawn(table) for table in tables])
    return [_component(name, spreads[i], draws[:, i], basis) for name, i in names.items()]


def _component(name: str, spread: float, draws: np.ndarray, basis: str) -> Component:
    if math.isnan(spread):
        return _unknown_component(name, basis)
    low, high = np.nanquantile(np.round(draws, 9), (0.05, 0.95))
    low, high = min(low, spread), max(high, spread)
    return Component(name, float(spread), float(low), float(high), basis)


def _unknown_component(name: str, basis: str) -> Component:
    return Component(name, math.nan, math.nan, math.nan, basis)


def _computing(
    imported: Imported, groups_of_equals: list[list[int]], excluded: set[int], usual: np.ndarray
) -> list[Component]:
    """Return spreads of computing, of all ranks but ``excluded`` in iterations ``usual``."""
    kinds = []
    for members in groups_of_equals:
        usual_members = [index for index in members if imported.ranks[index] not in excluded]
        if usual_members:
            kinds.append(usual_members)
    if not kinds or not len(usual):
        return []

    # of whole iterations
    tables = []
    for members in kinds:
        logs = _logs(imported.computed[members][:, usual])
        tables.append(_Table(logs, _node_numbers(imported, members)))
    num_ranks = sum(len(members) for members in kinds)
    basis = f"{num_ranks} ranks in {len(kinds)} kinds, {len(usual)} iterations"
    rng = np.random.default_rng(0)
    components = _components(_COMPUTING, tables, rng, basis)

    # of segments
    ratios = []
    for members in kinds:
        for index in members:
            samples = imported.measured[index].segments[usual].astype(float)
            rank_ratios = _ratios(samples)
            if rank_ratios.size:
                ratios.append(rank_ratios)
    if ratios and len(usual) > 1:
        squares = [np.log1p((ratio * ratio).mean()) for ratio in ratios]
        spreads = np.sqrt(squares)  # of a lognormal factor
        drawn = rng.choice(spreads, (_DRAWS, len(spreads)))
        draws = np.sqrt((drawn**2).mean(axis=1))
        spread = float(np.sqrt((spreads * spreads).mean()))
        components.append(_component("segment", spread, draws, basis))
    return components


def _node_numbers(imported: Imported, members: list[int]) -> np.ndarray:
    """int64 [members]: a number of each one's node; a rank whose node is unknown is alone."""
    names = [imported.measured[index].recorded.node for index in members]
    numbers = []
    for place, name in enumerate(names):
        if name:
            numbers.append(names.index(name))
        else:
            numbers.append(place)
    return np.array(numbers)


def _ratios(samples: np.ndarray) -> np.ndarray:
    """What segments took over what is usual for them and the iteration, less 1; weighted so that
    the mean of squares is that of a ns.  ``samples``: float64 [iterations, segments] ns.
    """
    count, num_segments = samples.shape
    if num_segments < 2 or count < 2 or not samples.sum(axis=1).all():
        return np.empty(0)
    means = samples.mean(axis=0)
    has_time = means > 0
    means, samples = means[has_time], samples[:, has_time]
    # an iteration that is longer in all of its segments is no spread of them
    iteration_factors = samples.sum(axis=1, keepdims=True) / samples.sum(axis=1).mean()
    residuals = samples / means / iteration_factors - 1
    weights = means / means.mean() * count / (count - 1)
    return np.asarray(residuals * np.sqrt(weights))


def _calls(imported: Imported, usual: np.ndarray) -> list[Component]:
    """Return spreads on the wire of calls all of whose members are traced."""
    wire = imported.wire
    if len(usual):
        wire = wire[usual]
    wire = wire[:, imported.whole]
    means = wire.mean(axis=0)
    if not means.sum() or len(wire) < 2:
        basis = "no call has all of its members traced in two iterations"
        return [_unknown_component(name, basis) for name in _CALLS]

    # the longest calls, which are most of the time
    longest = np.argsort(-means, kind="stable")
    sums = np.cumsum(means[longest])
    count = int(np.searchsorted(sums, _SHARE * means.sum())) + 1
    logs = _logs(wire[:, longest[:count]]).T
    basis = f"{len(logs)} calls, {logs.shape[1]} iterations"
    table = _Table(logs, np.arange(len(logs)))  # no two on one node
    return _components(_CALLS, [table], np.random.default_rng(0), basis)


class _GroupTimes:
    """Times of the calls of one group and kind.

    wire_ns, skew_ns : of every call of every traced rank, means over iterations
    times_last       : rank -> how often it was the last, of calls all of whose members are traced
    """

    def __init__(self) -> None:
        self.wire_ns: list[float] = []
        self.skew_ns: list[float] = []
        self.times_last: Counter[int] = Counter()


def _groups(imported: Imported) -> list[GroupTime]:
    """What calls took on the wire and in waiting for the last rank, by group and kind."""
    times: dict[tuple[str, str], _GroupTimes] = defaultdict(_GroupTimes)
    for index, measured in enumerate(imported.measured):
        program = imported.programs.programs[index]
        class_number = int(imported.graph.classes.of[program.rank])
        matched = imported.graph.matched_calls.of[class_number]
        took = (measured.done - measured.begun).astype(float)
        for k, op in enumerate(imported.call_op[index].tolist()):
            call = measured.calls[k]
            # a call without a kernel has no times
            if not call.kernel:
                continue
            group = program.strings[program.ops["group"][op]]
            skew = imported.skew[index][:, k]
            group_times = times[group, call.op]
            group_times.wire_ns.append(float((took[:, k] - skew).mean()))
            group_times.skew_ns.append(float(skew.mean()))
            # who waits for nobody was the last, if all are known
            times_last = 0
            if imported.whole[matched[op]]:
                times_last = int((skew <= 0).sum())
            group_times.times_last[program.rank] += times_last

    num_ranks = len(imported.measured)
    rows = []
    for (group, op), group_times in times.items():
        ((last_rank, times_last),) = group_times.times_last.most_common(1)
        part = 0.0
        if times_last:
            part = times_last / group_times.times_last.total()
        else:
            # nobody was surely the last
            last_rank = -1
        row = GroupTime(
            group=group,
            op=op,
            calls=len(group_times.wire_ns) / num_ranks,
            wire_ns=float(np.sum(group_times.wire_ns, axis=0) / num_ranks),
            skew_ns=float(np.sum(group_times.skew_ns, axis=0) / num_ranks),
            last=last_rank,
            part=part,
        )
        rows.append(row)
    rows.sort(key=lambda row: -(row.wire_ns + row.skew_ns))
    return rows
