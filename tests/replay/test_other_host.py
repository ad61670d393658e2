"""What segments take another host: drawn launches, launches of a real trace, replays."""

import json

import numpy as np
import pytest

import megatron_prism as prism
from benchmarks.report import RESULTS
from megatron_prism.core.programs.program_text import parse
from megatron_prism.replay.costs.host import on_other_host
from megatron_prism.replay.uncertainty.interval import interval

RECORDED = json.loads((RESULTS / "h100_leads.json").read_text(encoding="utf-8"))


def lead_of(launched_ns, takes_ns, factor):
    """The largest delay of a launch, from all launches of a segment."""
    work_before_ns = np.concatenate(([0.0], np.cumsum(takes_ns)[:-1]))
    return max(0, round(float((factor * launched_ns - work_before_ns).max())))


def drawn_segments(rng, number=400):
    """(ns of the host's launches, ns of the kernels, ns of the host) of each segment."""
    segments = []
    for _ in range(number):
        kernels = int(rng.integers(20, 200))
        host_step, device_step = rng.uniform(5e3, 100e3, size=2)
        launched_ns = np.cumsum(rng.exponential(host_step, kernels))
        takes_ns = rng.exponential(device_step, kernels)
        segments.append((launched_ns, takes_ns, round(launched_ns[-1] + host_step)))
    return segments


@pytest.mark.parametrize("factor", [0.4, 0.6, 0.8, 1.25, 1.6, 2.5])
def test_leads_of_drawn_segments_on_another_host(factor):
    segments = drawn_segments(np.random.default_rng(7))
    leads = np.array([lead_of(launched, takes, 1.0) for launched, takes, _ in segments])
    true_leads = np.array([lead_of(launched, takes, factor) for launched, takes, _ in segments])
    device = np.array([round(float(takes.sum())) for _, takes, _ in segments])
    whole = np.array([host for _, _, host in segments])
    lead, rest = on_other_host(leads, whole - leads, device, factor)
    total = true_leads.sum()
    # drawn launches have no late beginning, as real ones have, so a faster host has less to lose
    if factor > 0.7:
        assert lead.sum() == pytest.approx(total, rel=0.06)
    # a lead that scales like the host's time is off by what the device covers
    assert abs(factor * leads.sum() - total) > 2 * abs(lead.sum() - total)
    assert (lead >= 0).all()
    assert (rest >= 0).all()
    assert np.array_equal(lead + rest, np.rint(whole * factor))


@pytest.mark.parametrize("job", RECORDED["jobs"], ids=lambda job: job["job"])
@pytest.mark.parametrize("column", range(1, 5))
def test_leads_of_a_traced_iteration_on_another_host(job, column):
    rows = np.array(job["segments"], dtype=np.int64)
    whole, device, leads = rows[:, 0], rows[:, 1], rows[:, 2]
    factor = RECORDED["factors"][column]
    lead, _ = on_other_host(leads, whole - leads, device, factor)
    total = rows[:, 2 + column].sum()
    error = abs(lead.sum() - total)
    assert error < 0.17 * total
    assert error < abs(factor * leads.sum() - total)


def test_the_same_host_takes_the_same():
    lead, rest = np.array([0, 10, 900, 400]), np.array([0, 990, 100, 600])
    device = np.array([50, 5, 120, 0])
    again = on_other_host(lead, rest, device, 1.0)
    assert [part.tolist() for part in again] == [lead.tolist(), rest.tolist()]


def iteration_ns(op, host):
    programs = parse(f"prism-program 1\nworld size=1\nprogram ranks=0\n{op}\n")
    timeline = prism.replay(programs, machine="h200", what_if=prism.WhatIf(host=host))
    return timeline.iteration_ns, interval(timeline)


@pytest.mark.parametrize(
    ("op", "host", "expected_ms"),
    [
        # 10 ms of launches beside 6 ms of kernels: the device waits for 4 ms, then for none
        ("- compute ns=6ms host=10ms lead=4ms", "0.6x", 6.0),
        ("- compute ns=6ms host=10ms lead=4ms", "0.8x", 8.0),
        ("- compute ns=6ms host=10ms lead=4ms", "1.5x", 15.0),
        # a device that keeps up with 5 ms of launches waits for 10
        ("- compute ns=6ms host=5ms lead=0ms", "2x", 10.0),
        # launches that end long before the host does
        ("- compute ns=1ms host=10ms lead=4ms", "0.5x", 5.0),
    ],
)
def test_a_segment_ends_when_the_slower_one_of_host_and_device_does(op, host, expected_ms):
    assert iteration_ns(op, host)[0] == pytest.approx(1e6 * expected_ms, rel=1e-3)


def test_intervals_follow_the_same_rule():
    """On a host 1.75 times as fast the kernels decide."""
    _, between = iteration_ns("- compute ns=6ms host=10ms lead=4ms", None)
    assert between.low_ns == pytest.approx(6e6, rel=0.02)
    assert between.high_ns == pytest.approx(17.5e6, rel=0.02)
