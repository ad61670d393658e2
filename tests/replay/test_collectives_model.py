"""NCCL's estimate: closed forms, its thresholds, and calls that were measured on 4 H200."""

import dataclasses
import itertools
import json
import statistics
from pathlib import Path

import pytest

from megatron_prism.replay.costs import collectives
from megatron_prism.replay.costs.collectives import (
    Shape,
    calls_of,
    expert_call_ns,
    measured_elsewhere,
    modelled,
)
from megatron_prism.replay.costs.machine import machine
from megatron_prism.replay.costs.nccl_settings import parse

H200 = dataclasses.replace(machine("h200"), nvls_rate=0)  # measured with NVLS off
MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "h200_x4_rates.json"
HUGE = 1 << 40


def rate(name, size, per_node, way, hardware=H200):
    """Bytes of the message per second, latency not counted."""
    times = [collectives.times(name, size, per_node, n, hardware)[way] for n in (HUGE, 2 * HUGE)]
    return HUGE / (times[1] - times[0]) * 1e9


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_a_ring_moves_what_the_closed_form_says(size):
    """2 (n - 1) / n of the message by every rank, at the rate of its link; half for a gather."""
    ring = ("ring", "Simple")
    assert rate("all_reduce", size, 8, ring) == pytest.approx(
        H200.link_rate * size / (2 * (size - 1))
    )
    for name in ("all_gather", "reduce_scatter"):
        assert rate(name, size, 8, ring) == pytest.approx(H200.link_rate * size / (size - 1))
    assert rate("broadcast", size, 8, ring) == pytest.approx(H200.link_rate)


@pytest.mark.parametrize(("size", "per_node"), [(16, 1), (16, 2), (64, 8), (512, 8)])
def test_between_nodes_the_rails_of_all_members_carry_a_ring(size, per_node):
    bus = min(H200.link_rate, per_node * H200.network_rate)
    found = rate("all_reduce", size, per_node, ("ring", "Simple"))
    assert found == pytest.approx(bus * size / (2 * (size - 1)))


@pytest.mark.parametrize(("size", "per_node"), [(8, 8), (16, 8), (16, 4), (16, 1)])
def test_an_all_to_all_sends_each_share_once(size, per_node):
    found = rate("all_to_all", size, per_node, ("messages", "Simple"))
    inside = (per_node - 1) / size / H200.link_rate
    outside = (size - per_node) / size / H200.network_rate
    assert found == pytest.approx(1 / max(inside, outside))


def test_latencies_of_a_ring_and_a_tree_are_ncclss_own():
    """``NCCL INFO`` prints them with NCCL_DEBUG_SUBSYS=TUNING; here by hand from its tables."""
    one = collectives.times("all_reduce", 8, 8, 0, H200)
    assert one["ring", "LL"] == pytest.approx(1000 * (6.6 + 14 * 0.6))
    assert one["ring", "Simple"] == pytest.approx(1000 * (8.4 + 14 * 3.4))
    assert one["tree", "LL"] == pytest.approx(1000 * (6.8 + 2 * 7 * 0.6))
    two = collectives.times("all_reduce", 32, 8, 0, H200)
    assert two["tree", "LL"] == pytest.approx(1000 * (6.8 + 2 * (7 * 0.6 + 2 * 5.0)))
    gather = collectives.times("all_gather", 32, 8, 0, H200)
    assert gather["ring", "LL"] == pytest.approx(1000 * (6.6 + 28 * 1.0 + 3 * 2.7))
    alone = collectives.times("all_gather", 32, 1, 0, H200)
    assert alone["ring", "Simple"] == pytest.approx(1000 * (8.4 + 31 * 14))
    assert alone["PAT", "Simple"] == pytest.approx(1000 * (8 + 5 * 14 / 3.5 + 32 * 2.8))


def way(name, size, per_node, num_bytes, hardware=H200):
    times = collectives.times(name, size, per_node, num_bytes, hardware)
    return min(times, key=times.get)


def test_protocols_have_thresholds_and_trees_win_at_scale():
    ways = [way("all_reduce", 8, 8, 1 << k)[1] for k in range(10, 31)]
    runs = [protocol for protocol, _ in itertools.groupby(ways)]
    assert runs in (["LL", "Simple"], ["LL", "LL128", "Simple"])
    assert way("all_reduce", 1024, 8, 1 << 14)[0] == "tree"
    assert way("all_reduce", 1024, 8, 1 << 37)[0] == "ring"
    nvls = machine("h100")
    assert way("all_reduce", 8, 8, 1 << 28, nvls) == ("NVLS", "Simple")
    assert way("all_reduce", 1024, 8, 1 << 28, nvls) == ("NVLS tree", "Simple")
    assert way("all_reduce", 64, 64, 1 << 28, machine("gb200_nvl72")) == ("NVLS", "Simple")
    assert way("all_gather", 256, 1, 1 << 20, nvls)[0] == "PAT"


@pytest.mark.parametrize(
    "name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
)
@pytest.mark.parametrize("hardware", ["h100", "b200", "gb200_nvl72"])
def test_more_bytes_and_more_nodes_never_take_less(name, hardware):
    one = machine(hardware)
    shapes = [(2, 2)] if name == "send" else [(2, 2), (8, 8), (16, 8), (128, 8), (128, 1)]
    for size, per_node in shapes:
        shape = Shape(size, per_node)
        times = [modelled(name, shape, 1 << k, one) for k in range(4, 34)]
        # trees are faster for their medium sizes' neighbours: NCCL's own correction has steps
        assert all(a <= b * 1.25 for a, b in itertools.pairwise(times))
        assert times[0] > one.call_ns
    assert modelled("all_reduce", Shape(16, 8), 1 << 26, one) > modelled(
        "all_reduce", Shape(16, 16), 1 << 26, one
    )


@pytest.mark.parametrize(
    ("ranks", "dispatch", "combine"),
    [(16, 71.71, 62.95), (32, 57.69, 57.46), (64, 49.97, 49.77)],
)
def test_calls_of_experts_take_what_hybrid_ep_publishes(ranks, dispatch, combine):
    """GB/s of H100, 4,096 tokens of 7,168 in BF16 with 8 experts each: kernels with 16
    multiprocessors (docs/README_Hybrid-EP.md @hybrid-ep); a copy for each node counts."""
    to_ranks, to_nodes = (4096 * n * (1 - (1 - 1 / n) ** 8) * 7168 * 2 for n in (ranks, ranks // 8))
    for name, rate in (("dispatch", dispatch), ("combine", combine)):
        ns = expert_call_ns(name, Shape(ranks, 8), to_ranks, to_nodes, machine("h100"))
        assert ns == pytest.approx(to_nodes / rate, rel=0.02)


def test_one_rank_alone_waits_for_nobody():
    assert modelled("all_reduce", Shape(1, 1), 1 << 20, H200) == 0


def test_it_is_near_calls_that_were_measured():
    """64 calls among 2 and 4 H200, 16 KiB to 256 MiB, behind kernels, the host ahead."""
    rows = json.loads(MEASURED.read_text(encoding="utf-8"))["calls"]
    assert len(rows) == 64
    errors = {}
    for row in rows:
        shape = Shape(row["ranks"], row["ranks"])
        ns = modelled(row["op"], shape, row["bytes"], H200)
        errors[row["op"], row["ranks"], row["bytes"]] = ns / row["ns"] - 1
    four = [abs(error) for (_, ranks, _), error in errors.items() if ranks == 4]
    assert statistics.mean(map(abs, errors.values())) < 0.13
    assert statistics.mean(four) < 0.11
    assert max(map(abs, errors.values())) < 0.42


def elsewhere(name, *args):
    return measured_elsewhere((name,), name, *args)


def test_calls_inside_a_node_take_what_other_gpus_of_the_kind_took():
    """The table's own sizes to the ns; between two and four by ratio; never where NCCL sums in the
    switch, between nodes, or without a table."""
    off, h100 = parse("NCCL_NVLS_ENABLE=0"), machine("h100")
    table = calls_of("hopper")
    for name, size, num_bytes in (("all_gather", 2, 1 << 26), ("reduce_scatter", 4, 1 << 24)):
        found = elsewhere(name, Shape(size, size), num_bytes, h100, off)
        assert found == pytest.approx(table.look_up(name, size, num_bytes), abs=2)
    ratio = {
        n: elsewhere("all_gather", Shape(n, n), 1 << 26, h100, off)
        / modelled("all_gather", Shape(n, n), 1 << 26, h100, off)
        for n in (2, 3, 4, 8)
    }
    assert ratio[2] > ratio[3] > ratio[4] == pytest.approx(ratio[8], rel=1e-4)
    large = ("all_reduce", Shape(8, 8), 1 << 28)
    assert elsewhere(*large, h100) is None
    assert elsewhere(*large, h100, off) is not None
    assert elsewhere("all_gather", Shape(16, 8), 1 << 26, h100, off) is None
    assert elsewhere("all_gather", Shape(2, 2), 1 << 26, machine("a100"), off) is None


def test_an_exchange_is_two_messages_that_no_algorithm_forbids():
    """NCCL_ALGO is about collectives; the table's exchange is scaled by the model of a message."""
    tree, h100, pair = parse("NCCL_ALGO=Tree NCCL_NVLS_ENABLE=0"), machine("h100"), Shape(2, 2)
    both = ("exchange", "send"), "send", pair, 1 << 24, h100
    took = calls_of("hopper").look_up("exchange", 2, 1 << 24)
    assert measured_elsewhere(*both, tree) == pytest.approx(took, abs=2)
    alone = ("send",), *both[1:]
    assert measured_elsewhere(*both, tree) > measured_elsewhere(*alone, tree)
