"""Orders, ties, fronts and tau on results that a person can check."""

from itertools import combinations

import numpy as np
import pytest

from benchmarks.accuracy.tables import kendall_tau
from megatron_prism.features.sweep import sweep as rank
from megatron_prism.replay.uncertainty.differences import (
    TimeDifference,
    UncertainTime,
    of_sources,
    standings,
)


def result(name, time, off, memory, waiting=0):
    stage = {"count": 2, "compute": time - waiting, "exposed": {}, "waiting": {}, "idle": waiting}
    return {
        "key": name, "axes": {"tp": name}, "iteration_ns": time, "low_ns": time - off,
        "high_ns": time + off, "tokens_per_gpu": 1e9 / time, "p95_ns": None,
        "sources": [{"what": "kernels", "low_ns": off, "high_ns": off}],
        "memory": {"bytes": memory}, "stages": [stage],
    }  # fmt: skip


POINTS = [result("c", 300, 5, 10), result("a", 100, 10, 50), result("b", 115, 10, 40, 30)]


def test_points_that_are_not_surely_slower_are_equal():
    """Of 10 the two do not share 3.3 each: 4.7 together, so 3 more is equal and 15 more is not."""
    near = result("n", 103, 10, 50)
    rows = rank.ranked([*POINTS, near], "time")
    assert [(row.result["key"], row.rank, row.equal) for row in rows] == [
        ("a", 1, True), ("n", 1, True), ("b", 3, False), ("c", 4, False),
    ]  # fmt: skip
    assert rows[0].slower == (0, 0, 0)
    assert rows[2].slower[0] == pytest.approx(0.15)
    assert 0.10 < rows[2].slower[1] < rows[2].slower[2] < 0.20
    assert sum(row.best for row in rows) == pytest.approx(1)


def test_what_is_shared_decides_nothing():
    """Kernels may be off by half, and by as much in both: their own third still decides."""
    slow = {"what": "kernels", "low_ns": 50, "high_ns": 50}
    one, other = (UncertainTime(ns, {"kernels": (50, 50)}) for ns in (100, 200))
    assert one.compared(other).first_faster == 1
    assert of_sources(100, [slow]) == one
    unlike = UncertainTime(101, {"calls": (50, 50)})
    assert 0.4 < one.compared(unlike).first_faster < 0.6
    assert one.compared(one) == TimeDifference(0, 0, 0, 0.5)


def test_kernels_that_both_run_are_as_far_off_in_both():
    """Of 10 % each of layouts of one kind of kernels nothing is left, of two kinds a third."""
    first, alike, half, other = (
        UncertainTime(ns, {"kernels": (10, 10)}, {"kernels": of})
        for ns, of in ((100, {1: 90}), (102, {1: 90}), (102, {1: 45, 2: 45}), (102, {2: 90}))
    )
    widths = []
    for job in (alike, half, other):
        found = first.compared(job)
        widths.append((found.high_ns - found.low_ns) / 2)
    assert widths[0] == pytest.approx(0, abs=1e-6)
    assert widths[2] == pytest.approx(10 / 3 * 2**0.5, rel=0.05)
    assert widths[0] < widths[1] < widths[2]
    as_long = UncertainTime(100, {"kernels": (10, 10)}, {"kernels": {2: 90}})
    assert first.compared(as_long).high_ns == pytest.approx(widths[2], rel=0.1)


def test_no_two_of_a_group_surely_differ():
    rng = np.random.default_rng(3)
    jobs = [UncertainTime(ns, {"host": (0.1 * ns, 0.3 * ns), "calls": (5, rng.uniform(5, 40))})
            for ns in rng.uniform(90, 180, 30)]  # fmt: skip
    places = sorted(zip(standings(jobs), jobs, strict=True), key=lambda pair: pair[1].ns)
    groups = [place.group for place, _ in places]
    assert groups == sorted(groups)
    assert groups[-1] > 1
    for number in set(groups):
        members = [job for place, job in places if place.group == number]
        assert all(a.compared(b).low_ns <= 0 for a, b in combinations(members, 2))


def test_cost_is_of_a_billion_tokens():
    first = rank.ranked(POINTS, "cost", price=3.6)[0]
    assert first.cost == pytest.approx(3.6 * 1e9 / 3600 / 1e7)


def test_the_front_holds_what_nothing_beats_in_both():
    worse = result("d", 350, 5, 60)
    assert [one["key"] for one in rank.front([*POINTS, worse])] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("one", "other", "tau"),
    [((1, 2, 3), (10, 20, 30), 1), ((1, 2, 3), (3, 2, 1), -1), ((1, 2, 3), (1, 3, 2), 1 / 3),
     ((1, 1, 2), (1, 2, 3), 2 / 6**0.5)],
)  # fmt: skip
def test_kendalls_tau(one, other, tau):
    assert kendall_tau(one, other) == pytest.approx(tau)
