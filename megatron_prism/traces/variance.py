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
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_prism.core.files import rendered
from megatron_prism.core.ops import IS_CALL
from megatron_prism.core.world import format_ranks
from megatron_prism.replay.priced_graph import PricedGraph, price
from megatron_prism.traces.programs import Imported

_SHARE = 0.95  # of a time: the longest parts that make it up are looked at
_SLOW, _DRIFT, _LONG = 0.03, 0.02, 0.2  # what is named: of a rank, over the trace, of an iteration
_SURE = 4.0  # standard errors from the others
_DRAWS = 300  # of resampling
_FEWEST = 3  # ranks or iterations of which one can stand out


@dataclass(frozen=True)
class Component:
    """A spread (standard deviation of the logarithm); ``low`` and ``high``: its 90 % interval; nan:
    there is nothing to tell it from."""

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
        by = {one.name: one for one in self.components}

        def of(*names: str) -> float:
            spreads = [by[name].spread for name in names if name in by]
            return round(min(1.0, math.hypot(*(s for s in spreads if math.isfinite(s)), 0.0)), 6)

        slow = [one for one in self.findings if one.kind == "gpu" and one.factor > 1]
        unknown = [one.name for one in self.components if not math.isfinite(one.spread)]
        longer = [one for one in self.findings if one.kind == "iteration"]
        source = f"measured: {len(self.ranks)} ranks x {len(self.numbers)} iterations"
        if unknown:
            source += f"; 0, as nothing tells it: {', '.join(unknown)}"
        if longer:
            source += f"; without {len(longer)} slow iterations, which it cannot express"
        found: dict[str, object] = {
            "name": "traces",
            "gpu": of("gpu", "node"),
            "step": of("iteration", "rank x iteration"),
            "segment": of("segment"),
            "call": of("call"),
            "network": of("network"),
            "source": source,
        }
        if slow:
            factor = float(np.mean([one.factor for one in slow]))
            found["slow_gpu"] = [len(slow) / len(self.ranks), round(factor, 4)]
        return found

    def to_json(self) -> dict[str, object]:
        """Everything, times in ns; what nothing tells is null."""
        plain = dataclasses.asdict(self)
        for one in plain["components"]:
            for key in ("spread", "low", "high"):
                one[key] = one[key] if math.isfinite(one[key]) else None
        return {"schema": "prism.import/1", **plain, "variability": self.variability()}

    def to_text(self) -> str:
        """What ``prism import`` prints."""
        return rendered("report.traces:render_variation", self, str)


def vary(found: Imported) -> Variation:
    """What varies in ``found``, and who stands out."""
    priced = price(found.programs)
    alike = _alike(found)
    slow, late = _slow_ranks(found, priced, alike), _slow_iterations(found)
    excluded = {rank for one in slow if one.kind == "gpu" for rank in one.ranks}
    without = [
        at for at, number in enumerate(found.numbers) if number not in {one.number for one in late}
    ]
    components = [*_computing(found, alike, excluded, without), *_calls(found, without)]
    return Variation(
        tuple(found.ranks),
        tuple(found.numbers),
        tuple(found.iteration_ns.tolist()),
        tuple(found.replayed_ns(priced).tolist()),
        float(priced.timeline.iteration_ns),
        tuple(components),
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


def _totals(found: Imported, members: Sequence[int]) -> np.ndarray:
    """log ns that each rank computes in each shared iteration, float64 [ranks, iterations]."""
    sums = [found.measured[i].segments[found.rows(i)].sum(axis=1) for i in members]
    logs: np.ndarray = np.log(np.maximum(1.0, np.array(sums, dtype=float)))
    return logs


# -- who stands out -------------------------------------------------------------------------------
def _spread_of(values: np.ndarray) -> float:
    """A standard deviation that outliers do not move."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


def _slow_ranks(found: Imported, priced: PricedGraph, alike: list[list[int]]) -> list[Outlier]:
    """GPUs and nodes that are slower than those that run the same, and those that drift."""
    named = []
    for members in alike:
        logs, ranks = _totals(found, members), [found.ranks[i] for i in members]
        count = logs.shape[1]
        rest = logs - np.median(logs, axis=0)
        own = np.median(rest, axis=1)
        noise = _spread_of(rest - own[:, None]) * 1.2533 / math.sqrt(count)  # of a median
        nodes: dict[str, list[int]] = defaultdict(list)
        for at, index in enumerate(members):
            nodes[found.measured[index].recorded.node].append(at)
        slow_nodes = []
        if len(nodes) >= _FEWEST and all(nodes):
            means = {name: float(np.median(own[at])) for name, at in nodes.items()}
            for name, mine in means.items():
                others = np.array([value for other, value in means.items() if other != name])
                if _stands_out(mine, others, noise) and len(nodes[name]) > 1:
                    slow_nodes += nodes[name]
                    chosen = tuple(ranks[at] for at in nodes[name])
                    factor = math.exp(mine - float(np.median(others)))
                    effect = _without(priced, chosen, factor)
                    named.append(Outlier("node", f"node {name}", factor, effect, chosen))
        for at, rank in enumerate(ranks):
            others, level = np.delete(own, [at, *slow_nodes]), float(own[at])
            if (drift := _drift(rest[at])) is not None:
                named.append(Outlier("drift", f"rank {rank}", drift, 0.0, (rank,)))
                level = float(np.median(rest[at][: count // 3]))  # was it slow from the beginning?
            enough = at not in slow_nodes and len(ranks) >= _FEWEST
            if enough and _stands_out(level, others, noise):
                factor = math.exp(level - float(np.median(others)))
                effect = _without(priced, (rank,), factor)
                named.append(Outlier("gpu", f"rank {rank}", factor, effect, (rank,)))
    return named


def _stands_out(value: float, others: np.ndarray, noise: float) -> bool:
    error = math.hypot(_spread_of(others) if len(others) > 2 else 0.0, noise)
    return bool(value - np.median(others) > max(_SLOW, _SURE * error))


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
    took = found.iteration_ns
    if len(took) < _FEWEST:
        return []
    usual, named = float(np.median(took)), []
    bound = max(_LONG * usual, _SURE * _spread_of(took))
    for at in np.flatnonzero(took - usual > bound).tolist():
        more = []
        for index, one in enumerate(found.measured):
            own = one.segments[found.rows(index)].sum(axis=1).astype(float)
            more.append(float(own[at] - np.median(own)))
        late = [
            rank
            for rank, ns in zip(found.ranks, more, strict=True)
            if ns > max(0.5 * max(more), 0.25 * (took[at] - usual))
        ]
        why = "calls" if not late else f"computing of rank {format_ranks(late)}"
        if len(late) == len(more) > 1:
            why = "computing of all ranks"
        named.append(
            Outlier(
                "iteration",
                f"iteration {found.numbers[at]}: {why}",
                took[at] / usual,
                took[at] - usual,
                tuple(late),
                found.numbers[at],
            )
        )
    return named


# -- components -----------------------------------------------------------------------------------
_NAMES = ("gpu", "node", "iteration", "rank x iteration")


def _squares(logs: np.ndarray, nodes: np.ndarray | None = None) -> tuple[float, ...]:
    """Variances between rows, between their nodes, between columns, and of the rest of a table,
    float64 [ranks, iterations]; nan where there are too few.  ``nodes``: int [ranks]."""
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
    of, number = np.unique(np.zeros(ranks) if nodes is None else nodes, return_inverse=True)
    if len(of) >= _FEWEST and ranks - len(of) > 1:
        sizes = np.bincount(number)
        means = np.bincount(number, weights=rows) / sizes
        own = float(((rows - means[number]) ** 2).sum()) / (ranks - len(of))
        between = max(0.0, float(means.var(ddof=1)) - own / float(sizes.mean()))
    shared = max(0.0, float(columns.var(ddof=1)) - left / ranks)
    return max(0.0, own - left / count), between, shared, left


def _computing(
    found: Imported, alike: list[list[int]], excluded: set[int], without: list[int]
) -> list[Component]:
    """Spreads of computing."""
    tables = []
    for members in alike:
        kept = [i for i in members if found.ranks[i] not in excluded]
        if kept and without:
            names = [found.measured[i].recorded.node for i in kept]
            nodes = np.array([names.index(name) if name else i for i, name in enumerate(names)])
            tables.append((kept, _totals(found, kept)[:, without], nodes))
    if not tables:
        return []
    count = sum(len(kept) for kept, _, _ in tables)
    basis = f"{count} ranks in {len(tables)} kinds, {len(without)} iterations"

    def pooled(logs: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        each = np.array([_squares(*one) for one in logs])
        weights = np.array([[max(1, len(one) - 1)] * len(_NAMES) for one, _ in logs], dtype=float)
        weights = np.where(np.isnan(each), 0.0, weights)
        total = weights.sum(axis=0)
        with np.errstate(invalid="ignore"):
            mean = np.where(total > 0, np.nansum(weights * each, axis=0) / total, np.nan)
        spreads: np.ndarray = np.sqrt(mean)
        return spreads

    rng = np.random.default_rng(0)
    value = pooled([(logs, nodes) for _, logs, nodes in tables])
    draws = np.array(
        [pooled([_resampled(logs, rng, nodes) for _, logs, nodes in tables]) for _ in range(_DRAWS)]
    )
    made = [_component(name, value[i], draws[:, i], basis) for i, name in enumerate(_NAMES)]
    ratios = [_ratios(found, i, without) for kept, _, _ in tables for i in kept]
    ratios = [one for one in ratios if one.size]
    if ratios and len(without) > 1:
        each = np.sqrt([np.log1p((one * one).mean()) for one in ratios])  # of a lognormal factor
        many = np.sqrt((rng.choice(each, (_DRAWS, len(each))) ** 2).mean(axis=1))
        whole = float(np.sqrt((each * each).mean()))
        made.append(_component("segment", whole, many, basis))
    return made


def _component(name: str, value: float, draws: np.ndarray, basis: str) -> Component:
    if math.isnan(value):
        return Component(name, math.nan, math.nan, math.nan, basis)
    low, high = np.nanquantile(np.round(draws, 9), (0.05, 0.95))
    return Component(name, float(value), float(min(low, value)), float(max(high, value)), basis)


def _resampled(
    logs: np.ndarray, rng: np.random.Generator, nodes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Ranks (with their nodes) and iterations of a table, drawn anew."""
    ranks, count = logs.shape
    rows = rng.integers(ranks, size=ranks)
    return logs[rows][:, rng.integers(count, size=count)], nodes[rows]


def _ratios(found: Imported, index: int, without: list[int]) -> np.ndarray:
    """What the segments of a rank took over what is usual for them and the iteration, less 1;
    weighted so that the mean of squares is that of a ns."""
    samples = found.measured[index].segments[found.rows(index)][without].astype(float)
    if samples.shape[1] < 2 or len(samples) < 2 or not samples.sum(axis=1).all():
        return np.empty(0)
    means = samples.mean(axis=0)
    means, samples = means[means > 0], samples[:, means > 0]
    rest = samples / means / (samples.sum(axis=1, keepdims=True) / samples.sum(axis=1).mean()) - 1
    weights = means / means.mean() * len(samples) / (len(samples) - 1)
    weighted: np.ndarray = rest * np.sqrt(weights)
    return weighted


def _calls(found: Imported, without: list[int]) -> list[Component]:
    """Spreads of calls on the wire; of those all of whose members are traced."""
    wire = found.wire[without] if len(without) else found.wire
    kept = np.flatnonzero(found.whole) if found.wire.size else np.empty(0, np.int64)
    means = wire[:, kept].mean(axis=0) if kept.size and len(wire) else np.empty(0)
    if not means.size or not means.sum() or len(wire) < 2:
        basis = "no call has all of its members traced in two iterations"
        return [
            Component(name, math.nan, math.nan, math.nan, basis) for name in ("call", "network")
        ]
    longest = np.argsort(-means, kind="stable")
    enough = int(np.searchsorted(np.cumsum(means[longest]), _SHARE * means.sum())) + 1
    logs = np.log(np.maximum(1.0, wire[:, kept[longest[:enough]]])).T  # [calls, iterations]
    logs = logs - logs.mean(axis=1, keepdims=True)
    basis = f"{len(logs)} calls, {logs.shape[1]} iterations"

    def both(table: np.ndarray) -> tuple[float, float]:
        *_, shared, left = _squares(table - table.mean(axis=1, keepdims=True))
        return math.sqrt(left) if left >= 0 else math.nan, math.sqrt(
            shared
        ) if shared >= 0 else math.nan

    rng = np.random.default_rng(0)
    alone = np.arange(len(logs))
    draws = np.array([both(_resampled(logs, rng, alone)[0]) for _ in range(_DRAWS)])
    value = both(logs)
    return [
        _component(name, value[i], draws[:, i], basis) for i, name in enumerate(("call", "network"))
    ]


def _groups(found: Imported) -> list[GroupTime]:
    """What calls took on the wire and in waiting for the last rank, by group and kind."""
    rows: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    lates: dict[tuple[str, str], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for index, one in enumerate(found.measured):
        program = found.programs.programs[index]
        meets = found.graph.matched_calls.of[int(found.graph.classes.of[program.rank])]
        took = (one.done - one.begun)[found.rows(index)].astype(float)
        for k, op in enumerate(found.call_op[index].tolist()):
            if not one.calls[k].kernel:
                continue
            key = program.strings[program.ops["group"][op]], one.calls[k].op
            skew = found.skew[index][:, k]
            rows[key].append((float((took[:, k] - skew).mean()), float(skew.mean())))
            lates[key][found.ranks[index]] += int((skew <= 0).sum()) * bool(found.whole[meets[op]])
    made = []
    for (group, op), values in rows.items():
        wire, skew = np.sum(values, axis=0) / len(found.measured)
        late = lates[group, op]
        rank = max(late, key=lambda r: late[r])
        total = sum(late.values())
        each, who = len(values) / len(found.measured), rank if total else -1
        part = late[rank] / max(1, total)
        made.append(GroupTime(group, op, each, float(wire), float(skew), who, part))
    return sorted(made, key=lambda row: -(row.wire_ns + row.skew_ns))
