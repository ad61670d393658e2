"""Kept slices of two GPUs: replays stay as near to the real jobs as they were, and say how near."""

from statistics import fmean

from benchmarks.accuracy import kept


def test_replays_of_one_sitting_are_as_near_as_when_it_was_stored():
    found = list(kept.captured("second sitting"))
    assert len(found) == 5
    assert all(one.holds and one.width < 0.5 for one in found)
    errors = [abs(one.error) for one in found]
    assert fmean(errors) < 0.025
    assert max(errors) < 0.05
