"""What an answer says first: one number where GPUs decide, a range over hosts where they wait."""

import dataclasses
import statistics

import pytest

import megatron_prism as prism
from megatron_prism.core.programs.program_text import parse
from megatron_prism.features.sweep.sweep import ranked
from megatron_prism.replay.costs.host import MODELLED_INDEX
from megatron_prism.replay.costs.measured_hosts import (
    MEASURED_HOSTS,
    HostKind,
    indices_of_kind,
)
from megatron_prism.replay.uncertainty.differences import UncertainTime
from megatron_prism.replay.uncertainty.headline import HostAnswer, _range, headline, over_hosts

# two groups at once, of two nodes, that may share each rank's NIC
SHARED = """prism-program 1
world size=16 tp=8
program ranks=0-15
- compute kernels=1000 flops=1 host=1us lead=1us
- all_reduce DATA_PARALLEL_GROUP bf16 n=134217728 reduce=sum handle=1
- all_reduce default_pg bf16 n=134217728 reduce=sum handle=2
- wait handle=1
- wait handle=2
"""
HEAD = "prism-program 1\nworld size=1\nprogram ranks=0\n"
HOST_BOUND = "F0 compute kernels=1000 flops=1 host=70ms lead=1us"
GPU_BOUND = "F0 compute kernels=10 flops=685000000000000 host=1ms lead=1us"


def programs(op, **source):
    return dataclasses.replace(parse(f"{HEAD}{op}\n"), source=source)


def first(op, host=None, **source):
    asked = prism.WhatIf(host=host)
    return headline(prism.replay(programs(op, **source), machine="h200", what_if=asked))


def test_a_job_that_waits_for_its_host_has_a_range_over_hosts():
    found = first(HOST_BOUND, tier="meta")
    assert found.host_decides
    assert found.text == (
        "70 ms on NVIDIA's hosts, 87 to 187 ms on rented ones; prism calibrate --host takes 10 s"
    )
    rented = indices_of_kind(HostKind.RENTED)
    assert found.low_ns == found.iteration_ns == pytest.approx(70e6, rel=0.01)
    assert found.high_ns == pytest.approx(70e6 * rented[-1] / MODELLED_INDEX, rel=0.01)
    assert "on H200, hosts like NVIDIA's (index 0.7, assumed)" in found.assumes


def test_a_job_whose_gpus_decide_has_one_number():
    found = first(GPU_BOUND, tier="meta")
    assert not found.host_decides
    assert found.text.endswith(" s")
    assert " to " not in found.text
    assert found.low_ns == found.high_ns == found.iteration_ns


def test_a_host_that_was_named_leaves_one_number():
    found = first(HOST_BOUND, host=1.4, tier="meta")
    assert (found.host_decides, found.answers) == (False, ())
    assert found.text == "140 ms"
    assert found.assumes.endswith("the host that was named")


def test_slices_of_a_gpu_say_their_own_host_beside_the_others():
    op = "- compute ns=2ms host=90ms lead=1ms"
    found = first(op, tier="cuda", host_index="0=1.5")
    assert found.text.startswith("90 ms on the hosts that captured (index 1.5), 42 ms on NVIDIA's")
    without_index = first(op, tier="cuda")
    assert (without_index.host_decides, without_index.text) == (False, "90 ms")


def test_the_headline_is_never_below_the_fastest_measured_host():
    """Nor is the mean over hosts below NVIDIA's: most hosts are slower."""
    fastest = min(host.index for host in MEASURED_HOSTS)
    found = first(HOST_BOUND, tier="meta")
    assert found.low_ns >= 70e6 * fastest / MODELLED_INDEX
    mean = statistics.mean(host.index for host in MEASURED_HOSTS)
    assert found.expected_ns == pytest.approx(70e6 * mean / MODELLED_INDEX, rel=0.01)


def test_each_measured_host_counts_once_and_says_where_it_is_from():
    assert len({host.source for host in MEASURED_HOSTS}) == len(MEASURED_HOSTS)
    assert {host.kind for host in MEASURED_HOSTS} == set(HostKind)


def test_replay_and_compare_and_their_json_have_the_same_headline():
    job = programs(HOST_BOUND, tier="meta")
    timeline = prism.replay(job, machine="h200")
    expected = headline(timeline)
    assert expected.text.split(";")[0] in " ".join(timeline.to_text().split())
    assert timeline.to_json()["headline"]["text"] == expected.text
    both = prism.compare(job, job, machine="h200")
    assert [one["text"] for one in both.to_json()["headlines"]] == [expected.text] * 2
    assert expected.text in " ".join(both.to_text().split())
    assert expected.assumes in " ".join(both.to_text().splitlines()[0:2])


def figures(key, iteration_ns, expected_ns, host_low, host_high):
    decides = expected_ns > iteration_ns
    return {
        "key": key, "axes": {"tp": key}, "iteration_ns": iteration_ns, "tokens_per_gpu": 1e12,
        "p95_ns": None, "headline": {"expected_ns": expected_ns, "host_decides": decides},
        "sources": [{"what": "host", "low_ns": host_low, "high_ns": host_high}],
    }  # fmt: skip


def test_a_layout_that_waits_for_its_host_ranks_by_the_mean_over_hosts():
    """The best on NVIDIA's hosts is no winner if most hosts make it the slowest."""
    waits = figures("waits", 100, 180.0, 10, 160)
    computes = figures("computes", 120, 121.0, 0, 4)
    rows = ranked([waits, computes], "time")
    assert [row.name for row in rows] == ["tp=computes", "tp=waits"]
    assert rows[1].slower[0] == pytest.approx(180 / 121 - 1)
    # its range stays where it was: from 90 to 260
    centred = over_hosts(100, waits["sources"], 180.0)
    assert centred == UncertainTime(180.0, {"host": (90, 80)})


def test_hosts_add_to_an_iteration_whose_calls_share_links():
    """What sharing costs is in the answer of each host, and in the mean that ranks layouts."""
    job = parse(SHARED)
    job = dataclasses.replace(job, source={"tier": "meta"})
    rails = prism.WhatIf(network="rails")
    timeline = prism.replay(job, machine="h200", what_if=rails)
    alone = prism.replay(job, machine="h200")
    assert timeline.iteration_ns > 1.1 * alone.iteration_ns
    found = headline(timeline)
    assert found.expected_ns >= found.iteration_ns
    assert all(answer.low_ns >= found.iteration_ns for answer in found.answers)


def test_a_range_is_printed_without_powers_of_ten():
    answer = HostAnswer("there", 0.6, 1.4, 99_700_000, 450_000_000)
    assert _range(answer) == "100 to 450 ms"
