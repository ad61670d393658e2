"""Traces of real jobs over gloo and of GPUs with known times become programs that replay alike."""

import json
import sys

import numpy as np
import pytest
from helpers import traced_jobs
from helpers.kineto import Trace, two_ranks

from megatron_prism.cli.main import main
from megatron_prism.core.errors import PrismError, UsageError
from megatron_prism.core.programs.program_text import parse
from megatron_prism.core.programs.slices import open_programs
from megatron_prism.features.predict.variability import read_variability
from megatron_prism.features.traces.programs import import_traces
from megatron_prism.features.traces.variance import vary
from megatron_prism.replay.priced_graph import WhatIf, price


def test_known_times_come_back(tmp_path):
    two_ranks(tmp_path, slow=1.5)
    found = import_traces([tmp_path])
    assert [op.name for op in found.programs.programs[0]] == [
        "compute",
        "all_reduce",
        "all_reduce",
        "compute",
        "wait",
        "compute",
        "mark",
    ]
    first, second = (one.samples[1] // 1000 for one in found.programs.programs)
    assert first.tolist() == [1000, 400, 400]
    assert second.tolist() == [1500, 400, 400]
    assert (found.wire[1] // 1000).tolist() == [100, 600]
    assert found.skew[0][1].tolist() == [500_000, 0]
    priced = price(found.programs)
    assert priced.timeline.iteration_ns == pytest.approx(2_600_000, rel=1e-3)
    assert set(priced.prices.used()) == {
        "measured: segments of the slices (NVIDIA H200)",
        "measured: times of calls in the slices (NVIDIA H200)",
    }
    assert found.replayed_ns(priced)[1] == pytest.approx(found.iteration_ns[1], rel=1e-3)


CAPTURED = """prism-program 1
world size=2
program rank=0 ranks=0-1
0F0  compute flops=1e12
-    mark note=here
0F0  compute flops=3e12
0F0  all_reduce DATA_PARALLEL_GROUP bf16 n=1024 reduce=sum
0F0  all_reduce DATA_PARALLEL_GROUP bf16 n=4096 reduce=sum handle=4
0B0  compute flops=1e12
-    wait handle=4
O    compute flops=1e12
"""


def test_a_capture_says_what_and_the_traces_how_long(tmp_path):
    two_ranks(tmp_path, slow=1.5)
    found = import_traces([tmp_path], parse(CAPTURED))
    assert found.notes == []
    program = found.programs.of(1)
    assert [op.phase for op in program if op.name == "compute"] == [
        "forward", "forward", "backward", "optimizer"
    ]  # fmt: skip
    assert (program.samples[1] // 1000).tolist() == [375, 1125, 400, 400]
    assert found.programs.of(0)[3].group == "DATA_PARALLEL_GROUP"
    assert price(found.programs).timeline.iteration_ns == pytest.approx(2_600_000, rel=1e-3)


def test_calls_that_a_capture_has_otherwise_are_named(tmp_path):
    two_ranks(tmp_path)
    more = CAPTURED.replace("0B0  compute", "0F0  barrier DATA_PARALLEL_GROUP\n0B0  compute")
    found = import_traces([tmp_path], parse(more))
    assert "call 2 is captured as barrier" in found.notes[0]
    other = CAPTURED.replace("1024", "7").replace("4096", "9")
    with pytest.raises(PrismError, match="call 0 is captured as all_reduce of 7 elements"):
        import_traces([tmp_path], parse(other))


def test_traced_calls_do_not_outlive_their_world(tmp_path):
    two_ranks(tmp_path)
    found = import_traces([tmp_path])
    priced = price(found.programs, what_if=WhatIf(moved="b200"))
    assert not any("times of calls" in source for source in priced.prices.used())
    assert "not as they were traced" in priced.graph.programs.source["what-if"]


def job_of_eight(folder, factors, iterations=20):
    """Eight ranks on four nodes: 1000 us times the rank's factor in each iteration, and a call."""
    for rank in range(8):
        trace, now = Trace(rank, 8, node=f"node{rank // 2}"), 1000.0
        for number in range(iterations):
            took = [1000 * factors(other, number) for other in range(8)]
            trace.step(number, now - 900, now + max(took) + 200 - 900)
            trace.kernel(now - 800, now, now + took[rank])
            trace.call(now - 790, now + took[rank], now + max(took) + 100)
            trace.kernel(now - 780, now + max(took) + 100, now + max(took) + 200)
            now += max(took) + 200
        trace.write(folder)


def test_slow_nodes_gpus_and_drift_are_named_apart(tmp_path):
    noise = np.random.default_rng(3).normal(1, 0.002, (8, 20))

    def factors(rank, number):
        slow = {4: 1.3, 5: 1.3, 1: 1.2}.get(rank, 1.0)
        return slow * noise[rank, number] * (1 + 0.004 * number * (rank == 7))

    job_of_eight(tmp_path, factors)
    varies = vary(import_traces([tmp_path]))
    named = {one.kind: one for one in varies.findings}
    assert named["node"].what == "node node2"
    assert named["node"].factor == pytest.approx(1.27, abs=0.02)  # of a rank's whole iteration
    assert named["gpu"].ranks == (1,)
    assert named["drift"].ranks == (7,)
    assert named["node"].effect_ns == pytest.approx(100_000, rel=0.4)  # rank 1 comes next


def test_spreads_are_those_that_were_put_in(tmp_path):
    rng = np.random.default_rng(5)
    step, own = rng.normal(0, 0.03, 40), rng.normal(0, 0.02, (8, 40))
    gpu = np.tile([0.05, -0.05], 4) / np.sqrt(2) + np.repeat([0.0866, -0.0866, 0.0866, -0.0866], 2)
    job_of_eight(tmp_path, lambda r, n: np.exp(gpu[r] + step[n] + own[r, n]), iterations=40)
    found = {one.name: one for one in vary(import_traces([tmp_path])).components}
    for name, spread in (
        ("gpu", 0.05),
        ("node", 0.1),
        ("iteration", 0.03),
        ("rank x iteration", 0.02),
    ):
        assert found[name].spread == pytest.approx(spread * 1000 / 1100, rel=0.3), name
        assert found[name].low <= found[name].spread <= found[name].high


def test_clocks_of_nodes_are_set_by_when_their_collectives_end(tmp_path):
    two_ranks(tmp_path, slow=1.5)
    one = import_traces([tmp_path])
    two_ranks(tmp_path, slow=1.5, off=7_000.5)  # us
    two = import_traces([tmp_path])
    assert (two.wire == one.wire).all()
    assert all((a == b).all() for a, b in zip(two.skew, one.skew, strict=True))
    assert any("clocks of 2 nodes are set" in note for note in two.notes)
    assert not any("clocks" in note for note in one.notes)


def test_one_rank_stands_for_the_others_and_its_waits_are_theirs(tmp_path):
    two_ranks(tmp_path, slow=1.5)
    found = import_traces([tmp_path / "rank0.json.gz"])
    assert found.programs.program_of.tolist() == [0, 0]
    assert any("1 of 2 ranks traced" in note for note in found.notes)
    assert any("have members without a trace" in note for note in found.notes)
    assert not found.whole.any()


def test_groups_are_named_as_megatron_names_them(tmp_path):
    for rank in range(4):
        first = rank // 2 * 2
        groups = {
            "0": ("default_pg", [0, 1, 2, 3]),
            str(1 + rank // 2): ("TENSOR_MODEL_PARALLEL_GROUP", [first, first + 1]),
            str(5 + rank % 2): ("undefined", [rank % 2, rank % 2 + 2]),
        }
        trace = Trace(rank, 4, groups=groups)
        for number, name in enumerate(groups):
            trace.kernel(10 * number, 100 * number, 100 * number + 50)
            trace.call(10 * number + 5, 100 * number + 50, 100 * number + 90, group=name)
        trace.write(tmp_path)
    programs = import_traces([tmp_path]).programs
    assert (programs.world.size, programs.world.tp) == (4, 2)
    assert dict(programs.groups) == {"group_of_2_every_2": ((0, 2), (1, 3))}
    assert set(programs.of(3).groups()) == {
        "default_pg",
        "TENSOR_MODEL_PARALLEL_GROUP",
        "group_of_2_every_2",
    }


def test_ranks_whose_calls_differ_are_refused(tmp_path):
    for rank, size in ((0, 8), (1, 16)):
        trace = Trace(rank)
        trace.kernel(1, 10, 40)
        trace.call(2, 50, 60, sizes=(size, size))
        trace.write(tmp_path)
    with pytest.raises(PrismError, match="do not fit together"):
        import_traces([tmp_path])


def test_two_jobs_in_one_folder_are_refused(tmp_path):
    for rank, world in ((0, 2), (1, 4)):
        trace = Trace(rank, world)
        trace.kernel(1, 10, 40)
        trace.write(tmp_path)
    with pytest.raises(UsageError, match="two jobs"):
        import_traces([tmp_path])
    with pytest.raises(UsageError, match="two traces are of rank 0"):
        import_traces([tmp_path / "rank0.json.gz"] * 2)
    trace = Trace(-5, 2)
    trace.kernel(1, 10, 40)
    with pytest.raises(UsageError, match="of which rank"):
        import_traces([trace.write(tmp_path)])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no traces"):
        import_traces([tmp_path / "empty"])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it forks")
def test_a_real_job_with_a_slow_rank_and_a_slow_iteration(tmp_path, capsys):
    traces, out = tmp_path / "traces", tmp_path / "job"
    traces.mkdir()
    traced_jobs.trace(traces, slow={2: 1.8}, long=6)
    found = import_traces([traces])
    again, took = found.replayed_ns(price(found.programs)), found.iteration_ns
    assert again.mean() == pytest.approx(took.mean(), rel=0.1)  # on a busy host
    varies = vary(found)
    assert [one.ranks for one in varies.findings if one.kind == "gpu"] == [(2,)]
    assert 6 in [one.number for one in varies.findings if one.kind == "iteration"]
    groups = {name for one in found.programs.programs for name in one.groups()}
    assert groups == {"default_pg", traced_jobs.TP}
    assert main(["import", str(traces), "-o", str(out)]) == 0
    assert "slow gpu: rank 2" in capsys.readouterr().out
    assert open_programs(out) == found.programs
    spreads = read_variability(out / "variability.json")
    assert spreads.source.startswith("measured: 4 ranks x 8 iterations")
    assert spreads.slow_gpu[0] == 0.25
    assert json.loads((out / "import.json").read_text())["schema"] == "prism.import/1"
    assert (
        main(["predict", str(out), "--variability", f"{out}/variability.json", "--samples", "200"])
        == 0
    )
    assert main(["import", str(traces), "-o", str(out)]) == 2  # it is there already
