"""The order of evaluated points: by objective, with ties where intervals overlap.

In : results of ``evaluate``.  Out: rows in order, the Pareto front of time against memory, what
makes one point faster than another, and Kendall's tau between two orders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["OBJECTIVES", "Row", "explain", "front", "kendall_tau", "ranked"]

OBJECTIVES = ("time", "tokens_per_gpu", "p95", "cost")
Result = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """A point in its place.

    rank  : 1 + the number of points that are surely better, whose interval ends before this one's
    equal : whether others have this rank too
    cost  : money for 10^9 tokens, None without a price
    """

    rank: int
    equal: bool
    result: Result
    cost: float | None

    @property
    def name(self) -> str:
        axes = self.result["axes"].items()
        return " ".join(f"{axis}={'none' if value is None else value}" for axis, value in axes)


def cost_of(result: Result, price: float | None) -> float | None:
    """Of 10^9 tokens; ``price`` is of a GPU for an hour."""
    tokens = result["tokens_per_gpu"]
    return None if price is None or not tokens else price * 1e9 / (3600 * tokens)


def _score(result: Result, objective: str) -> float:
    """Smaller is better."""
    if objective == "p95" and result["p95_ns"] is not None:
        return float(result["p95_ns"])
    if objective in ("tokens_per_gpu", "cost") and result["tokens_per_gpu"]:
        return 1e9 / float(result["tokens_per_gpu"])
    return float(result["iteration_ns"])


def ranked(results: Sequence[Result], objective: str, price: float | None = None) -> list[Row]:
    """Best first.  A point's score is uncertain as its iteration time is."""
    scored = []
    for result in results:
        score, time = _score(result, objective), result["iteration_ns"] or 1
        low, high = (score * result[key] / time for key in ("low_ns", "high_ns"))
        scored.append((score, str(result["key"]), low, high, result))
    scored.sort(key=lambda one: one[:2])
    ranks = [1 + sum(other[3] < one[2] for other in scored) for one in scored]
    return [
        Row(rank, ranks.count(rank) > 1, one[4], cost_of(one[4], price))
        for rank, one in zip(ranks, scored, strict=True)
    ]


def front(results: Sequence[Result]) -> list[Result]:
    """Points that no other one beats in both iteration time and memory, fastest first."""
    order = sorted(results, key=lambda one: (one["iteration_ns"], one["memory"]["bytes"]))
    found: list[Result] = []
    for one in order:
        if not found or one["memory"]["bytes"] < found[-1]["memory"]["bytes"]:
            found.append(one)
    return found


def breakdown(result: Result) -> dict[str, float]:
    """ns of an iteration by what a mean rank does; adds up to the iteration.

    ``compute``, ``exposed GROUP`` (communication that nothing hides), ``waiting GROUP`` (for the
    ranks of that group to come) and ``idle``.
    """
    ranks = sum(stage["count"] for stage in result["stages"])
    total: dict[str, float] = {"compute": 0.0}
    for stage in result["stages"]:
        part = stage["count"] / ranks
        total["compute"] += stage["compute"] * part
        for what in ("exposed", "waiting"):
            for group, ns in stage[what].items():
                total[f"{what} {group}"] = total.get(f"{what} {group}", 0.0) + ns * part
        total["idle"] = total.get("idle", 0.0) + stage["idle"] * part
    return total


def explain(one: Result, other: Result) -> list[tuple[str, float, float]]:
    """(what, ns in ``one``, ns in ``other``) per token of the same batch, largest change first."""
    a, b = breakdown(one), breakdown(other)
    rows = [(what, a.get(what, 0.0), b.get(what, 0.0)) for what in {**a, **b}]
    return sorted((row for row in rows if row[1] or row[2]), key=lambda r: (-abs(r[1] - r[2]), r))


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float:
    """tau-b of two scores of the same things: 1 the same order, -1 the opposite one.

    Source: Kendall, The treatment of ties in ranking problems, Biometrika 33 (1945), 239-251.
    """
    both = ties_one = ties_other = pairs = 0
    for i in range(len(one)):
        for j in range(i):
            a = (one[i] > one[j]) - (one[i] < one[j])
            b = (other[i] > other[j]) - (other[i] < other[j])
            both += a * b
            ties_one += a == 0
            ties_other += b == 0
            pairs += 1
    scale = ((pairs - ties_one) * (pairs - ties_other)) ** 0.5
    return both / scale if scale else 0.0
