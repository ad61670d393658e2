"""Orders, ties, fronts and tau on results that a person can check."""

import pytest

from benchmarks.accuracy.tables import kendall_tau
from megatron_prism.sweep import sweep as rank


def result(name, time, off, memory, waiting=0):
    stage = {"count": 2, "compute": time - waiting, "exposed": {}, "waiting": {}, "idle": waiting}
    return {
        "key": name, "axes": {"tp": name}, "iteration_ns": time, "low_ns": time - off,
        "high_ns": time + off, "tokens_per_gpu": 1e9 / time, "p95_ns": None,
        "memory": {"bytes": memory}, "stages": [stage],
    }  # fmt: skip


POINTS = [result("c", 300, 5, 10), result("a", 100, 10, 50), result("b", 115, 10, 40, 30)]


def test_points_whose_intervals_overlap_are_equal():
    rows = rank.ranked(POINTS, "time")
    assert [(row.result["key"], row.rank, row.equal) for row in rows] == [
        ("a", 1, True), ("b", 1, True), ("c", 3, False),
    ]  # fmt: skip


def test_cost_is_of_a_billion_tokens():
    first = rank.ranked(POINTS, "cost", price=3.6)[0]
    assert first.cost == pytest.approx(3.6 * 1e9 / 3600 / 1e7)


def test_the_front_holds_what_nothing_beats_in_both():
    worse = result("d", 350, 5, 60)
    assert [one["key"] for one in rank.front([*POINTS, worse])] == ["a", "b", "c"]


def test_a_pair_differs_where_its_time_goes():
    rows = rank.explain(POINTS[1], POINTS[2])
    assert rows == [("idle", 0.0, 30.0), ("compute", 100.0, 85.0)]
    assert sum(row[2] for row in rows) == 115


@pytest.mark.parametrize(
    ("one", "other", "tau"),
    [((1, 2, 3), (10, 20, 30), 1), ((1, 2, 3), (3, 2, 1), -1), ((1, 2, 3), (1, 3, 2), 1 / 3),
     ((1, 1, 2), (1, 2, 3), 2 / 6**0.5)],
)  # fmt: skip
def test_kendalls_tau(one, other, tau):
    assert kendall_tau(one, other) == pytest.approx(tau)
