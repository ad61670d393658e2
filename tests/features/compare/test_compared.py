"""What ``prism compare`` says of a side is what ``prism replay`` and ``prism fit`` say of it."""

import dataclasses
import json
import re

import pytest
from helpers.metamorphic import JOBS, MACHINE, STORED, about, answer, fresh, stored

import megatron_prism as prism
from megatron_prism.cli import main as cli
from megatron_prism.cli import what_ifs
from megatron_prism.core.errors import UsageError
from megatron_prism.core.programs.program import save
from megatron_prism.core.programs.slices import FOUND_OF_RANKS
from megatron_prism.features.compare.compare import compare
from megatron_prism.memory.job_peaks import needed, peak_memory
from megatron_prism.replay.priced_graph import WhatIf, price
from megatron_prism.report.metrics import timeline_metrics

CHANGES = ["dp=4", "slow=1:3/2", "moved=b200", "host=1.4", "network=rails", "nccl=NCCL_ALGO=Ring",
           "faster=all_reduce:2", "microbatches=8"]  # fmt: skip


def told(capsys, *words):
    assert cli.main([*words, "--machine", "h100", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@about("dp", "slow", "moved", "host", "network", "nccl", "faster", "microbatches")
@pytest.mark.parametrize("change", CHANGES)
def test_a_side_is_what_replay_and_fit_say_of_it(change, capsys):
    path = str(STORED / "dense_pp2")
    compared = told(capsys, "compare", path, f"{path},{change}")
    sides = [told(capsys, "replay", path), told(capsys, "replay", path, change)]
    assert compared["iterations"] == [side["iteration_ns"] for side in sides]
    for rates, side in zip(compared["rates"], sides, strict=True):
        assert rates == {name: side[name] for name in rates}
    # memory is that of the programs with the what-if
    programs = answer(stored("dense_pp2"), MACHINE, change).graph.programs
    worst = max(peak_memory(programs).classes.values(), key=needed)
    memory = {row["what"]: row["b"] for row in compared["parts"] if row["of"] == "memory"}
    assert memory["device"] == needed(worst)
    allocated = sum(memory.get(kind, 0) for kind in worst["by_category"])
    assert allocated == worst["peak_allocated"]
    assert allocated in [one["peak_bytes"] for one in sides[1]["classes"]]


@pytest.mark.ci
@about("dp")
def test_other_replicas_compare_as_their_fresh_capture():
    before, after = fresh(dp=2), fresh(dp=4)
    what_if = price(before, machine="h100", what_if=WhatIf(dp=4))
    told_of = [compare(before, side, machine="h100") for side in (what_if, after)]
    of_what_if, of_capture = told_of
    # reserved bytes may differ: each bucket's part begins in other parameters
    by_kind = [{part.what: part.b for part in one.kinds if part.what not in ("cache", "device")}
               for one in told_of]  # fmt: skip
    assert by_kind[0] == by_kind[1]
    optimizer = next(part for part in of_what_if.kinds if part.what == "optim")
    assert optimizer.b < 0.51 * optimizer.a + 1024
    assert of_what_if.iterations[1] == pytest.approx(of_capture.iterations[1], rel=0.01)
    # hosts are the same ones, whatever numbers their ranks have, and their errors too
    for one in told_of:
        assert "host_index" not in [setting.name for setting in one.settings]
        spread = one.difference.high_ns - one.difference.low_ns
        assert spread < 0.05 * one.iterations[0]
        # twice the tokens in the time of one iteration: B trains faster, and that decides
        assert one.batches_differ
        assert [round(speed.b / speed.a) for speed in one.speeds] == [2, 1]
        assert one.speeds[0].first_faster < 0.01
        assert "by tokens/s: B is faster with 100.0 %" in one.to_text()
        # the classes have more ranks, and their peaks are at the same step
        text = " ".join(one.to_text().split())
        assert re.search(r"allocated \(-[\d,]+ B\); \d+ -> \d+ ranks", text)
        assert not re.search(r"peak moved \d+ -> \d+ ranks", text)
        assert "A is faster with" not in one.to_text().split("by tokens/s:")[0]


@pytest.mark.parametrize("key", FOUND_OF_RANKS)
def test_what_captures_found_is_no_difference_of_the_jobs(key):
    programs = stored("dense_pp2")
    sides = [
        dataclasses.replace(programs, source={**programs.source, key: f"0={found}"})
        for found in ("model:1", "model:2")
    ]
    compared = compare(*sides, machine="h100")
    assert key not in [setting.name for setting in compared.settings]
    assert "model:1" not in compared.to_text()
    assert "model:1" not in price(sides[0], machine="h100").timeline.to_text()


@about("microbatches")
def test_other_microbatches_compare_as_their_fresh_capture():
    before, after = fresh(microbatches=4), fresh(microbatches=8)
    what_if = what_ifs.priced(before, ["microbatches=8"], "compare", machine="h100")
    told_of = [compare(before, side, machine="h100") for side in (what_if, after)]
    of_what_if, of_capture = ({part.what: part.b for part in one.kinds} for one in told_of)
    assert of_what_if == pytest.approx(of_capture, rel=0.01)
    a, b = (one.iterations[1] for one in told_of)
    assert a == pytest.approx(b, rel=0.02)
    assert all(one.batches_differ for one in told_of)


@pytest.mark.parametrize("job", JOBS)
def test_tokens_decide_only_where_they_differ(job):
    programs = stored(job)
    one = compare(programs, price(programs, machine="h100", what_if=WhatIf(slow={0: 2})),
                  machine="h100")  # fmt: skip
    assert one.batches_differ is False
    assert "tokens/s: " not in one.to_text()
    metrics = timeline_metrics(one.timelines[1])
    assert one.speeds[0].b == metrics.tokens_per_s.value
    assert one.speeds[1].b == metrics.tokens_per_s.value / programs.world.size


def test_a_job_that_does_not_say_its_tokens_is_not_called_faster():
    programs = stored("dense_pp2")
    source = {key: text for key, text in programs.source.items() if "tokens" not in key}
    silent = dataclasses.replace(programs, source=source)
    one = prism.compare(silent, programs, machine="h100")
    assert one.batches_differ is None
    assert one.speeds == ()
    assert "nobody knows which trains faster" in " ".join(one.to_text().split())
    assert "is faster with" not in one.to_text()


def test_a_price_says_what_tokens_cost():
    programs = stored("dense_pp2")
    moved = price(programs, machine="h100", what_if=WhatIf(moved="b200"))
    one = compare(programs, moved, machine="h100", prices=(2.0, 6.0))
    a, b = (metrics_of.tokens_per_s.value for metrics_of in map(timeline_metrics, one.timelines))
    gpus = programs.world.size
    assert one.cost.a == pytest.approx(2.0 * gpus / 3600 / a * 1e9)
    assert one.cost.b == pytest.approx(6.0 * gpus / 3600 / b * 1e9)
    # B is faster, and not three times as fast
    assert one.cost.a < one.cost.b
    assert one.cost.first_cheaper > 0.5 > one.speeds[0].first_faster
    text = " ".join(one.to_text().split())
    assert f"cost of 10^9 tokens {one.cost.a:,.2f} {one.cost.b:,.2f}" in text
    assert "by cost of tokens: A is cheaper" in text
    assert compare(programs, moved, machine="h100").cost is None


def test_a_price_without_tokens_or_times_is_refused(tmp_path, capsys):
    programs = stored("dense_pp2")
    source = {key: text for key, text in programs.source.items() if "tokens" not in key}
    silent = dataclasses.replace(programs, source=source)
    report = peak_memory(programs)
    for a, b in ((silent, programs), (report, programs)):
        with pytest.raises(UsageError, match="so they have no cost"):
            compare(a, b, machine="h100", prices=(2.0, 2.0))
    # traces of a real job, and its slices
    trace = tmp_path / "rank0.json"
    trace.write_text("{}")
    with pytest.raises(UsageError, match="so they have no cost"):
        compare([str(trace)], programs, machine="h100", prices=(2.0, 2.0))
    save(silent, tmp_path / "silent.prism")
    words = ["compare", str(tmp_path / "silent.prism"), str(STORED / "dense_pp2")]
    assert cli.main([*words, "--machine", "h100", "--price", "2.5"]) == 2
    assert "fix: leave --price out" in capsys.readouterr().err


def test_one_price_is_that_of_both_jobs(capsys):
    path = str(STORED / "dense_pp2")
    cost = told(capsys, "compare", path, f"{path},dp=4", "--price", "2.5")["cost"]
    assert cost["prices"] == [2.5, 2.5]


@pytest.mark.parametrize("text", ["0", "-1", "1,2,3", "cheap"])
def test_what_is_no_price_is_refused(text, capsys):
    path = str(STORED / "dense_pp2")
    assert cli.main(["compare", path, "dp=4", f"--price={text}"]) == 2
    assert "--price" in capsys.readouterr().err
