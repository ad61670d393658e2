"""Computing and calls that run at once: closed forms, what is refused, a measurement on gloo."""

import dataclasses
import json

import numpy as np
import pytest
from oracles.naive_replay import prices_of, random_programs

from megatron_prism.core.errors import UsageError
from megatron_prism.core.programs.program_text import parse
from megatron_prism.graph import world_graph
from megatron_prism.replay import costs, overlap, timeline
from megatron_prism.replay.costs.collectives import (
    OverlapFactors,
    OverlapRow,
    read_overlap,
)
from megatron_prism.replay.costs.machine import machine
from megatron_prism.replay.priced_graph import price

MS = 1_000_000
GROUP = "DATA_PARALLEL_GROUP"
BESIDE = f"""prism-program 1
world size=2
program ranks=0-1
- all_reduce {GROUP} bf16 n=64 reduce=sum handle=0
- compute ns={1000 * MS}
- wait handle=0
"""
AFTER = BESIDE.replace("- compute", "- wait handle=0\n- compute")


def row(op="all_reduce", bytes=128, kind="gemm", compute=1.0, call=1.0, rounds=None):
    return OverlapRow(op, bytes, kind, compute, call, rounds)


def overlapped(text, call_ms, *rows, iterations=1, **source):
    """The replay of ``text``, whose call takes ``call_ms`` alone, with factors of these rows."""
    programs = parse(text)
    made = world_graph.build(dataclasses.replace(programs, source={**programs.source, **source}))
    prices = costs.price_ops(made, machine("h200"))
    prices = dataclasses.replace(prices, collective_ns=np.full(1, call_ms * MS))
    return overlap.replay_with_overlap(made, prices, read_overlap(rows), "4 x X", iterations)


def found(text, call_ms, compute, call):
    """(iteration ms, Prices) with a call of ``call_ms`` and these factors."""
    slower = overlapped(text, call_ms, row(compute=compute, call=call))
    again = timeline.build_timeline(slower.graph, slower.prices, 1)  # what its prices rest on
    assert again.iteration_ns == slower.iteration_ns
    return slower.iteration_ns / MS, slower.prices


def ms(prices):
    """(computing, the call)"""
    return prices.compute[0].max() / MS, prices.collective_ns[0] / MS


def test_factors_of_few_rounds_are_left_out():
    rows = [
        row(bytes=1 << 28, call=1.3, rounds=12),
        row(bytes=1 << 28, kind="memory", call=1.9, rounds=6),
        row(bytes=1 << 24, call=3.6, rounds=3),  # as measured: a call shorter than a product
        row(bytes=1 << 22, call=2.0),  # a file that does not say
    ]
    points = read_overlap(rows)["all_reduce"].points
    assert points == {
        "gemm": ((1 << 22, 1.0, 2.0), (1 << 28, 1.0, 1.3)), "memory": ((1 << 28, 1.0, 1.9),)
    }  # fmt: skip
    assert read_overlap([row(rounds=1)])["all_reduce"].points == {"gemm": ((128, 1.0, 1.0),)}


@pytest.mark.parametrize(
    ("call_ms", "compute", "call", "expected"),
    [
        (500, 1.0, 1.0, 1000),
        (500, 2.0, 1.0, 1250),  # 500 ms at half speed: 250 ms of work done, 250 left over
        (500, 1.0, 2.0, 1000),  # the call takes 1,000 and is still hidden
        (2000, 2.0, 1.0, 2000),  # computing takes all of the 2,000
        (500, 1.25, 1.25, 1125),  # the call covers 625 of it, 625 x (1 - 1 / 1.25) = 125
        (500, 0.9, 0.9, 1000),  # noise: nothing is faster for company
    ],
)
def test_closed_forms(call_ms, compute, call, expected):
    took, _ = found(BESIDE, call_ms, compute, call)
    assert took == pytest.approx(expected, rel=1e-3)
    alone, prices = found(AFTER, call_ms, compute, call)
    assert alone == call_ms + 1000  # nothing runs at once, nothing is slower
    assert not any("overlap" in said for said in prices.used())


@pytest.mark.parametrize(
    ("products", "computing_ms", "call_ms"),
    [
        (1000, 1250, 500),  # half speed beside 500 ms of the call
        (0, 1000, 1000),  # the call at half speed
        (500, 1167, 667),  # each at three quarters of its own
        (None, 1167, 667),  # nobody knows: as if it were half products
    ],
)
def test_products_and_other_kernels_lose_differently(products, computing_ms, call_ms):
    said = "" if products is None else f" products={products * MS}"
    text = BESIDE.replace(f"ns={1000 * MS}", f"ns={1000 * MS}{said}")
    slower = overlapped(text, 500, row(compute=2.0), row(kind="memory", call=2.0))
    assert ms(slower.prices) == pytest.approx((computing_ms, call_ms), abs=1)


@pytest.mark.parametrize(
    ("rows", "computing_ms", "call_ms"),
    [
        ([row(kind="attention", compute=2.0)], 1250, 500),
        ([row(kind="attention", call=2.0)], 1000, 1000),
        ([], 1000, 500),  # nobody measured attention: as beside products
    ],
)
@pytest.mark.parametrize(
    "group", ["CONTEXT_PARALLEL_GROUP", "HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L0"]
)
def test_beside_calls_of_context_parallel_ranks_runs_attention(rows, computing_ms, call_ms, group):
    """The segment says that it is no products; additions would lose half."""
    text = BESIDE.replace(GROUP, group).replace("size=2", "size=2 cp=2")
    named = f"group {group} 0,1\n" if group.startswith("HIER") else ""
    text = text.replace("program ranks", f"{named}program ranks")
    text = text.replace(f"ns={1000 * MS}", f"ns={1000 * MS} products=0")
    slower = overlapped(text, 500, row(), row(kind="memory", compute=2.0, call=2.0), *rows)
    assert ms(slower.prices) == pytest.approx((computing_ms, call_ms), abs=1)


@pytest.mark.parametrize(
    ("main_ms", "side_ms", "wait", "expected"),
    [
        (1000, 1000, "after", 2000),  # the GPU does one after the other, whoever is first
        (1000, 250, "after", 1250),
        (1000, 250, "before", 1250),  # nothing at once: as before
    ],
)
def test_streams_of_a_rank_share_its_gpu(main_ms, side_ms, wait, expected):
    """A segment of another stream costs what it takes, also without a calibration."""
    side = f"- compute stream=side ns={side_ms * MS}\n"
    text = f"prism-program 1\nworld size=1\nprogram ranks=0\n{side}"
    if wait == "before":
        text += "- record stream=side handle=0\n- wait handle=0\n"
    text += f"- compute ns={main_ms * MS}\n"
    made = price(parse(text), machine="h200", iterations=1)
    ends = made.timeline.spans(0)["end"].max()
    assert ends / MS == pytest.approx(expected, rel=1e-3)
    assert any("streams share the GPU" in said for said in made.prices.used()) == (wait == "after")


@pytest.mark.parametrize(
    ("call_ms", "factor"), [(500, 3.0), (333, 3.6), (280, 3.6), (600, 2.0), (900, 2.3)]
)
def test_a_call_that_outlasts_computing_is_slower_only_beside_it(call_ms, factor):
    """1,000 ms of additions beside the call: it has run 1,000 / factor of its own time then."""
    beside = BESIDE.replace(f"ns={1000 * MS}", f"ns={1000 * MS} products=0")
    slower = overlapped(beside, call_ms, row(), row(kind="memory", call=factor))
    expected = call_ms + 1000 * (1 - 1 / factor)
    assert slower.prices.collective_ns[0] / MS == pytest.approx(expected, rel=2e-3)
    assert slower.iteration_ns / MS == pytest.approx(max(1000, expected), rel=2e-3)


@pytest.mark.parametrize("factor", [2.98, 3.6, 5])
def test_a_call_that_computing_nearly_covers(factor):
    """Its first ms is alone: pass by pass it comes nearer to the end, and does come there."""
    late = BESIDE.replace(f"ns={1000 * MS}", f"ns={4000 * MS} products=0 host={MS} lead={MS}")
    slower = overlapped(late, 100, row(), row(kind="memory", call=factor)).prices
    assert slower.collective_ns[0] / MS == pytest.approx(99 * factor + 1, rel=2e-3)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("factor", [1.5, 1.9, 2.0, 3.6])
def test_computing_on_several_streams_slows_a_call_once(factor):
    side = "".join(f"- compute ns={1000 * MS} stream=s{n}\n" for n in range(2))
    text = BESIDE.replace("- compute", f"{side}- compute")
    slower = overlapped(text, 100, row(call=factor)).prices
    assert slower.collective_ns[0] / MS == pytest.approx(100 * factor, rel=1e-3)


@pytest.mark.parametrize("seed", [0, 1, 2, 4, 5, 6, 7, 10, 11])  # the others hang on purpose
def test_random_worlds_only_get_slower_and_not_without_factors(seed):
    """Two streams of a rank may be slower for company as well: by half for each other one."""
    made = world_graph.build(random_programs(seed))
    prices = prices_of(made)
    alone = overlap.replay_with_overlap(made, prices, {}, "x").prices
    assert (alone.collective_ns == prices.collective_ns).all()
    factors = {
        "all_reduce": OverlapFactors({"gemm": ((1, 1.3, 1.2),), "memory": ((1, 1.2, 2.0),)}),
        "all_gather": OverlapFactors({"gemm": ((1, 1.1, 1.4),)}),
    }
    slower = overlap.replay_with_overlap(made, prices, factors, "x").prices
    assert (slower.collective_ns >= prices.collective_ns).all()
    for one, before in zip(slower.compute, prices.compute, strict=True):
        assert (one >= before).all()
        assert (one <= np.ceil(before * 1.3**3 * 2) + 1).all()  # at most three calls at once
    ones = dict.fromkeys(factors, OverlapFactors({"memory": ((1, 1.0, 1.0),)}))
    same = overlap.replay_with_overlap(made, prices, ones, "x").prices
    assert (same.collective_ns == prices.collective_ns).all()
    assert same.used() == alone.used()


def test_between_two_sizes_their_ratio_counts():
    rows = [row(compute=1.2), row(kind="memory", compute=1.4), row(bytes=128 << 4, call=3.0)]
    one = read_overlap(rows)["all_reduce"]
    assert one.factors(0, "gemm") == one.factors(128, "gemm") == (1.2, 1.0)
    assert one.factors(128 << 2, "gemm") == (pytest.approx(1.1), pytest.approx(2.0))
    assert one.factors(128 << 3, "gemm") == (pytest.approx(1.05), pytest.approx(2.5))
    assert one.factors(128 << 4, "gemm") == one.factors(1 << 30, "gemm") == (1.0, 3.0)
    assert one.factors(1, "memory") == one.factors(1 << 30, "memory") == (1.4, 1.0)
    assert read_overlap(rows[:1])["all_reduce"].factors(1, "memory") == (1.2, 1.0)


def test_calls_of_processes_without_gpus_are_none_of_slices_of_gpus(tmp_path):
    file = tmp_path / "c.json"
    call = {"op": "all_reduce", "ranks": 2, "bytes": 128, "ns": 500 * MS}
    file.write_text(json.dumps({"source": "2 x CPU, gloo, torch 2", "collectives": [call]}))
    world = parse(BESIDE)
    assert price(world, machine="h200", calibration=file).timeline.iteration_ns == 1000 * MS
    for tier in ("meta", "cuda"):
        slices = dataclasses.replace(world, source={"tier": tier})
        with pytest.raises(UsageError, match="processes without GPUs"):
            price(slices, machine="h200", calibration=file)


def test_what_is_lost_counts_for_as_long_as_both_run():
    """Computing takes 20 us more with 50 of a call beside it, the call 10 more."""
    overlap = pytest.importorskip("megatron_prism.features.calibrate.calibrate")
    us = 1000.0
    one = overlap.OverlapRound(60 * us, 100 * us, 70 * us, 120 * us, 50 * us, True)
    compute, call, counted = overlap._medians(overlap._slowdowns([one] * 3))
    assert (compute, call, counted) == (
        pytest.approx(1 / (1 - 20 / 50)), pytest.approx(1 / (1 - 10 / 50)), 3
    )  # fmt: skip
    # replay: in 50 us side by side computing gets 50 / compute far, the rest it does later
    assert 50 * (1 - 1 / compute) == pytest.approx(20)
    assert overlap._slowdowns([one._replace(covered=False)]) == []
    assert overlap._slowdowns([one._replace(both=20 * us)]) == []  # the head start is a third
    quicker = one._replace(compute_beside=90 * us, call_beside=50 * us)  # noise
    assert overlap._slowdowns([quicker]) == [(1.0, 1.0)]
    stuck = one._replace(compute_beside=900 * us)
    assert overlap._slowdowns([stuck])[0][0] == pytest.approx(10)
