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

import numpy as np

from megatron_prism.core.ops import IS_CALL
from megatron_prism.core.rendering import renderer_of
from megatron_prism.core.world import format_ranks
from megatron_prism.features.traces.programs import Imported
from megatron_prism.replay.priced_graph import PricedGraph, price

_SHARE = 0.95  # of a time: the longest parts that make it up are looked at
_SLOW, _DRIFT, _LONG = 0.03, 0.02, 0.2  # what is named: of a rank, over the trace, of an iteration
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
class Variation:
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
        finite = {one.name: one.spread for one in self.components if math.isfinite(one.spread)}
        slow = [one.factor for one in self.findings if one.kind == "gpu" and one.factor > 1]
        unknown = [one.name for one in self.components if one.name not in finite]
        longer = sum(one.kind == "iteration" for one in self.findings)
        source = f"measured: {len(self.ranks)} ranks x {len(self.numbers)} iterations"
        source += f"; 0, as nothing tells it: {', '.join(unknown)}" if unknown else ""
        source += f"; without {longer} slow iterations, which it cannot express" if longer else ""
        spreads = {
            name: round(min(1.0, math.hypot(*(finite.get(part, 0.0) for part in parts))), 6)
            for name, parts in _PREDICTED.items()
        }
        found: dict[str, object] = {"name": "traces", **spreads, "source": source}
        if slow:
            found["slow_gpu"] = [len(slow) / len(self.ranks), round(float(np.mean(slow)), 4)]
        return found

    def to_json(self) -> dict[str, object]:
        """Everything, times in ns; what nothing tells is null."""
        plain = dataclasses.asdict(self)
        plain["components"] = [
            {key: None if value != value else value for key, value in one.items()}  # NaN
            for one in plain["components"]
        ]
        return {"schema": "prism.import/1", **plain, "variability": self.variability()}

    def to_text(self) -> str:
        """What ``prism import`` prints."""
        text: str = renderer_of(self).text(self)
        return text


def vary(found: Imported) -> Variation:
    """What varies in ``found``, and who stands out."""
    priced = price(found.programs)
    alike = _alike(found)
    slow, late = _slow_ranks(found, priced, alike), _slow_iterations(found)
    excluded = {rank for one in slow if one.kind == "gpu" for rank in one.ranks}
    usual = np.flatnonzero(~np.isin(found.numbers, [one.number for one in late]))
    return Variation(
        tuple(found.ranks),
        tuple(found.numbers),
        tuple(found.iteration_ns.tolist()),
        tuple(found.replayed_ns(priced).tolist()),
        float(priced.timeline.iteration_ns),
        (*_computing(found, alike, excluded, usual), *_calls(found, usual)),
        (*slow, *late),
        tuple(_groups(found)),
        tuple(found.notes),
    )


def _alike(found: Imported) -> list[list[int]]:
    """Indices of traced ranks that make the same calls."""
    classes: dict[bytes, list[int]] = defaultdict(list)
    for index, program in enumerate(found.programs.programs):
        ops = program.ops
        talk = ops[IS_CALL[ops["name"]]]
        key = talk["name"].tobytes() + np.maximum(talk["num_in"], talk["num_out"]).tobytes()
        classes[key].append(index)
    return list(classes.values())


def _logs(ns: np.ndarray) -> np.ndarray:
    return np.asarray(np.log(np.maximum(1.0, ns)))


# -- who stands out -------------------------------------------------------------------------------
def _spread_of(values: np.ndarray) -> float:
    """A standard deviation that outliers do not move."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


def _slow_ranks(found: Imported, priced: PricedGraph, alike: list[list[int]]) -> list[Outlier]:
    """GPUs and nodes that are slower than those that run the same, and those that drift."""
    named: list[Outlier] = []

    def name_if_slow(
        kind: str, what: str, ranks: tuple[int, ...], level: float, others: np.ndarray, noise: float
    ) -> bool:
        usual = float(np.median(others))
        error = math.hypot(_spread_of(others) if len(others) > 2 else 0.0, noise)
        slow = level - usual > max(_SLOW, _SURE * error)
        if slow:
            factor = math.exp(level - usual)
            named.append(Outlier(kind, what, factor, _without(priced, ranks, factor), ranks))
        return slow

    for members in alike:
        logs, ranks = _logs(found.computed[members]), [found.ranks[i] for i in members]
        count = logs.shape[1]
        rest = logs - np.median(logs, axis=0)
        own = np.median(rest, axis=1)
        noise = _spread_of(rest - own[:, None]) * 1.2533 / math.sqrt(count)  # of a median
        nodes: dict[str, list[int]] = defaultdict(list)
        for at, index in enumerate(members):
            nodes[found.measured[index].recorded.node].append(at)
        slow_nodes: list[int] = []
        if len(nodes) >= _FEWEST and all(nodes):
            means = np.array([np.median(own[at]) for at in nodes.values()])
            for number, (name, places) in enumerate(nodes.items()):
                chosen, others = tuple(ranks[at] for at in places), np.delete(means, number)
                if len(places) > 1 and name_if_slow(
                    "node", f"node {name}", chosen, float(means[number]), others, noise
                ):
                    slow_nodes += places
        for at, rank in enumerate(ranks):
            others, level = np.delete(own, [at, *slow_nodes]), float(own[at])
            if (drift := _drift(rest[at])) is not None:
                named.append(Outlier("drift", f"rank {rank}", drift, 0.0, (rank,)))
                level = float(np.median(rest[at][: count // 3]))  # was it slow from the beginning?
            if at not in slow_nodes and len(ranks) >= _FEWEST:
                name_if_slow("gpu", f"rank {rank}", (rank,), level, others, noise)
    return named


def _drift(rest: np.ndarray) -> float | None:
    """The factor from the first to the last iteration, where it is a trend."""
    count = len(rest)
    if count < 8:
        return None
    at = np.arange(count) - (count - 1) / 2
    slope = float((at * rest).sum() / (at * at).sum())
    left = rest - rest.mean() - slope * at
    error = math.sqrt(float((left * left).sum()) / (count - 2) / float((at * at).sum()))
    total = slope * (count - 1)
    return math.exp(total) if abs(total) > _DRIFT and abs(slope) > _SURE * error else None


def _without(priced: PricedGraph, ranks: tuple[int, ...], factor: float) -> float:
    """By how much the iteration is shorter if ``ranks`` compute as fast as the others, ns."""
    if factor <= 0.001:
        return 0.0
    other = priced.again(slow={format_ranks(ranks): str(round(1 / factor, 3))})
    return float(priced.timeline.iteration_ns - other.timeline.iteration_ns)


def _slow_iterations(found: Imported) -> list[Outlier]:
    """Iterations that took longer, with the rank that computed longer in them, if one did."""
    took, computed = found.iteration_ns, found.computed
    if len(took) < _FEWEST:
        return []
    usual, named = float(np.median(took)), []
    more = computed - np.median(computed, axis=1, keepdims=True)
    bound = max(_LONG * usual, _SURE * _spread_of(took))
    for at in np.flatnonzero(took - usual > bound).tolist():
        least = max(0.5 * more[:, at].max(), 0.25 * (took[at] - usual))
        late = tuple(np.array(found.ranks)[more[:, at] > least].tolist())
        why = f"computing of rank {format_ranks(late)}" if late else "calls"
        if len(late) == len(more) > 1:
            why = "computing of all ranks"
        number = found.numbers[at]
        what, factor = f"iteration {number}: {why}", took[at] / usual
        named.append(Outlier("iteration", what, factor, took[at] - usual, late, number))
    return named


# -- components -----------------------------------------------------------------------------------
_COMPUTING = {"gpu": 0, "node": 1, "iteration": 2, "rank x iteration": 3}  # in ``_squares``
_CALLS = {"call": 3, "network": 2}
_Table = tuple[np.ndarray, np.ndarray]  # logs, float64 [ranks, iterations]; nodes, int [ranks]


def _squares(logs: np.ndarray, nodes: np.ndarray) -> tuple[float, ...]:
    """Variances between rows, between their nodes, between columns, and of the rest of a table;
    nan where there are too few.
    """
    ranks, count = logs.shape
    rest = logs - logs.mean()
    rows, columns = rest.mean(axis=1), rest.mean(axis=0)
    rest = rest - rows[:, None] - columns
    nan = math.nan
    if count < 2:
        return nan, nan, nan, nan
    if ranks < 2:
        return nan, nan, nan, float(columns.var(ddof=1))
    left = float((rest * rest).sum()) / ((ranks - 1) * (count - 1))
    own, between = float(rows.var(ddof=1)), nan
    of, number = np.unique(nodes, return_inverse=True)
    if len(of) >= _FEWEST and ranks - len(of) > 1:
        sizes = np.bincount(number)
        means = np.bincount(number, weights=rows) / sizes
        own = float(((rows - means[number]) ** 2).sum()) / (ranks - len(of))
        between = max(0.0, float(means.var(ddof=1)) - own / float(sizes.mean()))
    shared = max(0.0, float(columns.var(ddof=1)) - left / ranks)
    return max(0.0, own - left / count), between, shared, left


def _spreads(tables: Sequence[_Table]) -> np.ndarray:
    """float64 [4]: roots of the ``_squares`` of all tables, which have the same."""
    each = np.array([_squares(*one) for one in tables])
    weights = np.array([[max(1, len(logs) - 1)] for logs, _ in tables], dtype=float)
    weights = np.where(np.isnan(each), 0.0, weights)
    with np.errstate(invalid="ignore"):  # 0 / 0 is unknown
        return np.asarray(np.sqrt(np.nansum(weights * each, axis=0) / weights.sum(axis=0)))


def _components(
    names: Mapping[str, int], tables: Sequence[_Table], rng: np.random.Generator, basis: str
) -> list[Component]:
    """Spreads of ``tables``, with intervals from their ranks (with their nodes) and iterations
    drawn anew.
    """

    def drawn(logs: np.ndarray, nodes: np.ndarray) -> _Table:
        ranks, count = logs.shape
        rows = rng.integers(ranks, size=ranks)
        return logs[rows][:, rng.integers(count, size=count)], nodes[rows]

    value = _spreads(tables)
    draws = np.array([_spreads([drawn(*one) for one in tables]) for _ in range(_DRAWS)])
    return [_component(name, value[i], draws[:, i], basis) for name, i in names.items()]


def _component(name: str, value: float, draws: np.ndarray, basis: str) -> Component:
    if math.isnan(value):
        return Component(name, math.nan, math.nan, math.nan, basis)
    low, high = np.nanquantile(np.round(draws, 9), (0.05, 0.95))
    return Component(name, float(value), float(min(low, value)), float(max(high, value)), basis)


def _computing(
    found: Imported, alike: list[list[int]], excluded: set[int], usual: np.ndarray
) -> list[Component]:
    """Spreads of computing."""
    kinds = [[i for i in members if found.ranks[i] not in excluded] for members in alike]
    kinds = [members for members in kinds if members] if len(usual) else []
    if not kinds:
        return []
    tables = []
    for members in kinds:
        names = [found.measured[i].recorded.node for i in members]
        nodes = np.array([names.index(name) if name else i for i, name in enumerate(names)])
        tables.append((_logs(found.computed[members][:, usual]), nodes))
    basis = f"{sum(map(len, kinds))} ranks in {len(kinds)} kinds, {len(usual)} iterations"
    rng = np.random.default_rng(0)
    components = _components(_COMPUTING, tables, rng, basis)
    samples = [found.measured[i].segments[usual].astype(float) for kept in kinds for i in kept]
    ratios = [one for one in map(_ratios, samples) if one.size]
    if ratios and len(usual) > 1:
        each = np.sqrt([np.log1p((one * one).mean()) for one in ratios])  # of a lognormal factor
        many = np.sqrt((rng.choice(each, (_DRAWS, len(each))) ** 2).mean(axis=1))
        whole = float(np.sqrt((each * each).mean()))
        components.append(_component("segment", whole, many, basis))
    return components


def _ratios(samples: np.ndarray) -> np.ndarray:
    """What segments took over what is usual for them and the iteration, less 1; weighted so that
    the mean of squares is that of a ns.  ``samples``: float64 [iterations, segments] ns.
    """
    if samples.shape[1] < 2 or len(samples) < 2 or not samples.sum(axis=1).all():
        return np.empty(0)
    means = samples.mean(axis=0)
    means, samples = means[means > 0], samples[:, means > 0]
    rest = samples / means / (samples.sum(axis=1, keepdims=True) / samples.sum(axis=1).mean()) - 1
    weights = means / means.mean() * len(samples) / (len(samples) - 1)
    return np.asarray(rest * np.sqrt(weights))


def _calls(found: Imported, usual: np.ndarray) -> list[Component]:
    """Spreads of calls on the wire; of those all of whose members are traced."""
    wire = found.wire[usual] if len(usual) else found.wire
    wire = wire[:, found.whole]
    means = wire.mean(axis=0)
    if not means.sum() or len(wire) < 2:
        basis = "no call has all of its members traced in two iterations"
        return [Component(name, math.nan, math.nan, math.nan, basis) for name in _CALLS]
    longest = np.argsort(-means, kind="stable")
    enough = int(np.searchsorted(np.cumsum(means[longest]), _SHARE * means.sum())) + 1
    logs = _logs(wire[:, longest[:enough]]).T  # [calls, iterations]
    basis = f"{len(logs)} calls, {logs.shape[1]} iterations"
    alone = np.arange(len(logs))
    return _components(_CALLS, [(logs, alone)], np.random.default_rng(0), basis)


def _groups(found: Imported) -> list[GroupTime]:
    """What calls took on the wire and in waiting for the last rank, by group and kind."""
    rows: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    lates: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    for index, one in enumerate(found.measured):
        program = found.programs.programs[index]
        meets = found.graph.matched_calls.of[int(found.graph.classes.of[program.rank])]
        took = (one.done - one.begun).astype(float)
        for k, op in enumerate(found.call_op[index].tolist()):
            if not one.calls[k].kernel:
                continue
            key = program.strings[program.ops["group"][op]], one.calls[k].op
            skew = found.skew[index][:, k]
            rows[key].append((float((took[:, k] - skew).mean()), float(skew.mean())))
            lates[key][program.rank] += int((skew <= 0).sum()) * bool(found.whole[meets[op]])
    count, groups = len(found.measured), []
    for (group, op), values in rows.items():
        wire, skew = np.sum(values, axis=0) / count
        ((last, late),) = lates[group, op].most_common(1)
        who = (last, late / lates[group, op].total()) if late else (-1, 0.0)
        groups.append(GroupTime(group, op, len(values) / count, float(wire), float(skew), *who))
    return sorted(groups, key=lambda row: -(row.wire_ns + row.skew_ns))
