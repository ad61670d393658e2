"""The interval around an iteration: what each source of uncertainty does to it."""

import dataclasses
import math

import pytest

import megatron_prism as prism
from megatron_prism.core.programs.program_text import parse
from megatron_prism.replay.costs.host import KERNEL_NS, MODELLED_INDEX
from megatron_prism.replay.uncertainty.interval import (
    HOST_FACTOR,
    HOST_MODEL,
    HOSTS,
    Uncertainty,
    answers_by_host,
    combined,
    interval,
)

HEAD = "prism-program 1\nworld size=1\nprogram ranks=0\n"


def timeline(*ops, host=None, **source):
    programs = parse(HEAD + "".join(f"{op}\n" for op in ops))
    programs = dataclasses.replace(programs, source=source)
    return prism.replay(programs, machine="h200", what_if=prism.WhatIf(host=host))


def by_source(*ops, **source):
    return {one.what: one for one in interval(timeline(*ops, **source)).sources}


def test_a_rank_that_waits_for_python_is_as_uncertain_as_its_host():
    """10 ms of host beside 2 ms of kernels: all of the iteration is the host's."""
    found = interval(timeline("- compute ns=2ms host=10ms lead=1ms", tier="cuda"))
    assert found.low_ns == pytest.approx(10e6 / HOST_FACTOR, rel=0.01)
    assert found.high_ns == pytest.approx(10e6 * HOST_FACTOR, rel=0.01)
    (host,) = found.sources
    assert (host.what, "host=" in host.fix) == ("host", True)


def test_a_host_that_is_ahead_counts_only_as_far_as_it_may_be_late():
    """6 ms of host are hidden behind 8 ms of kernels; 1.75 times as many are not."""
    ops = ["- compute ns=4ms host=3ms lead=10us"] * 2
    found = by_source(*ops, tier="cuda")
    assert found["clocks"].high_ns == pytest.approx(0.05 * 8e6, rel=0.02)
    assert found["host"].low_ns < 0.01 * 8e6 < found["host"].high_ns < 1.75 * 6e6


@pytest.mark.parametrize(("index", "low", "high"), [(0.6, 1.35, 3.46), (2.0, 3.46, 1.35)])
def test_a_slow_host_of_the_capture_is_more_likely_faster_in_the_job(index, low, high):
    """Indices of nine hosts in ten are 0.6 to 2, and each varies by 1.35."""
    ops = "- compute ns=2ms host=10ms lead=1ms"
    found = interval(timeline(ops, tier="cuda", host_index=f"0={index}"))
    assert found.low_ns == pytest.approx(10e6 / low, rel=0.02)
    assert found.high_ns == pytest.approx(10e6 * high, rel=0.02)


def test_without_a_gpu_the_host_is_expected_to_take_longer_than_few_flops():
    found = timeline("F0 compute kernels=1000 flops=1", tier="meta")
    assert found.iteration_ns == pytest.approx(1000 * KERNEL_NS, rel=0.01)
    assert any("host's time by its kernels alone" in one for one in found.prices.sources)
    counted = timeline("F0 compute kernels=1000 flops=1 host=70ms lead=1us", tier="meta")
    assert counted.iteration_ns == pytest.approx(70e6, rel=0.01)
    assert any("by its calls of Python and its kernels" in one for one in counted.prices.sources)
    (host,) = (one for one in interval(found).sources if one.what == "host")
    least = math.hypot(math.log(HOST_MODEL[0]), math.log(HOSTS[0] / MODELLED_INDEX))
    assert host.low_ns == pytest.approx((1 - math.exp(-least)) * found.iteration_ns, rel=0.01)
    assert host.high_ns > (HOSTS[1] / MODELLED_INDEX - 1) * found.iteration_ns
    assert "GPU" in host.fix
    loops = timeline("O compute kernels=1000 flops=1", tier="meta")
    assert loops.iteration_ns < found.iteration_ns / 4  # the optimizer's, launched by C++
    large = timeline("F0 compute kernels=10 flops=685000000000000", tier="meta")
    assert "host" not in {one.what for one in interval(large).sources}


LATE = """prism-program 1
world size=2
program rank=0 ranks=0
F0 compute ns=3ms host=4ms lead=1ms kernels=60 flops=9e12
- all_reduce DATA_PARALLEL_GROUP bf16 n=4194304 handle=1
B0 compute ns=2ms host=1ms lead=10us kernels=20 flops=9e12
- wait handle=1
O compute ns=1ms host=3ms lead=1ms kernels=50
program rank=1 ranks=1
F0 compute ns=2ms host=5ms lead=1ms kernels=90 flops=9e12
- all_reduce DATA_PARALLEL_GROUP bf16 n=4194304 handle=1
B0 compute ns=2ms host=2ms lead=10us kernels=30 flops=9e12
- wait handle=1
O compute ns=1ms host=1ms lead=1ms kernels=20
"""
AHEAD = LATE.replace("host=5ms", "host=1ms").replace("host=4ms", "host=1ms")
KNOWN = {"0=2.0 1=1.0": "cuda", "0=0.9 1=0.92": "cuda", "0=0.5 1=2.6": "cuda", "": "meta"}


@pytest.mark.parametrize("text", [LATE, AHEAD], ids=["late", "ahead"])
@pytest.mark.parametrize(("here", "tier"), KNOWN.items(), ids=map(str, KNOWN))
def test_the_interval_of_an_unknown_host_holds_the_answers_of_the_usual_ones(text, here, tier):
    """They are those of ``host=``; a host that is named, and not the slowest, leaves less open."""
    source = {"tier": tier, **({"host_index": here} if here else {})}
    programs = dataclasses.replace(parse(text), source=source)

    def on(index):
        return prism.replay(programs, machine="h200", what_if=prism.WhatIf(host=index))

    unknown = prism.replay(programs, machine="h200")
    between, answers = interval(unknown), dict(answers_by_host(unknown))
    assert (min(answers), max(answers)) == HOSTS
    for index, ns in answers.items():
        named = on(index)
        assert ns == pytest.approx(named.iteration_ns, rel=2e-3)
        assert between.low_ns <= named.iteration_ns <= between.high_ns
        assert answers_by_host(named) == ()
        less = interval(named)
        if index < HOSTS[1]:
            assert less.high_ns - less.low_ns < between.high_ns - between.low_ns
    assert list(answers.values()) == sorted(answers.values())


def test_another_host_than_that_of_the_model():
    ops = "F0 compute kernels=1000 flops=1"
    once, twice = (timeline(ops, tier="meta", host=factor) for factor in ("1x", "2x"))
    assert twice.iteration_ns == pytest.approx(2 * once.iteration_ns, rel=0.01)


def test_delays_inside_segments_are_the_hosts():
    found = by_source("- compute ns=2ms", tier="cuda")
    assert found["host"].high_ns == pytest.approx((HOST_FACTOR - 1) * 2e6, rel=0.01)
    assert "clocks" not in found


def test_independent_sources_add_up_as_squares():
    found = combined(100, [Uncertainty("a", 3, 30, ""), Uncertainty("b", 4, 40, "")])
    assert (found.low_ns, found.high_ns) == (95, 150)
    assert [one.what for one in found.sources] == ["b", "a"]
    assert combined(100, [Uncertainty("a", 500, 0, "")]).low_ns == 0


def test_a_segment_without_a_time_may_be_as_long_as_the_longest_known():
    found = timeline("- compute ns=100ms", "- compute kernels=3", "- compute ns=1ms")
    high = interval(found).high_ns - found.iteration_ns
    assert high == pytest.approx(100e6, rel=1e-3)
    (one,) = interval(found).sources
    assert (one.what, one.low_ns) == ("no time", 0)
    assert "33 % of the segments" in one.why
    said = [text.partition(":")[0] for text in found.prices.used()]
    assert said == ["given", "unknown"]  # nobody says who measured the others
    known = timeline("- compute ns=100ms", "- compute kernels=3 traffic=5", tier="meta")
    assert {text.partition(":")[0] for text in known.prices.used()} == {"measured", "modelled"}
    assert interval(timeline("- compute kernels=3")).sources == ()  # of which commands warn
