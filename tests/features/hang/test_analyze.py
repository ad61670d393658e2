"""Culprits are exact for planted faults, nobody innocent is named, and healthy worlds are clean.

Oracle: the fault that was planted, which the verdict never sees, and two labelled sets of real
dumps (NVIDIA's nvidia-resiliency-ext) where PRISM_FR_TRACES names their folder.
"""

import dataclasses
import json
import os
import pathlib

import pytest
from helpers import random_hangs
from helpers.programs import FAULTS, healthy, with_rank
from helpers.random_hangs import KINDS, judged, named

from megatron_prism.cli import main as cli
from megatron_prism.core.programs.program_text import parse
from megatron_prism.features.hang import analyze as hang
from megatron_prism.features.hang import diagnose, fault_plan, hypotheses
from megatron_prism.features.hang import planting as faults
from megatron_prism.features.hang.diagnose import diagnose_graph
from megatron_prism.graph import stall as quiescence
from megatron_prism.graph import world_graph

WORLD = random_hangs.WORLDS[0]
TRACES = pathlib.Path(os.environ.get("PRISM_FR_TRACES", "/nonexistent"))
VERDICTS = {
    "drop": "mismatch",
    "shape": "mismatch",
    "dtype": "mismatch",
    "operation": "mismatch",
    "swap": "mismatch",
    "inversion": "order",
    "lost": "order",
    "message_shape": "mismatch",
    "extra": "mismatch",
    "host_stuck": "host stuck",
    "gil": "host stuck",
    "killed": "missing dump",
    "gpu_error": "device stuck",
    "gpu_hang": "device stuck",
}
RING = """prism-program 1
world size=4
group A 0,1,2,3
group B 0,1,2,3
program ranks=0-2
- all_reduce A bf16 n=4 reduce=sum
- all_gather B bf16 in=4 out=16
program ranks=3
- all_gather B bf16 in=4 out=16
- all_reduce A bf16 n=4 reduce=sum
"""


@pytest.mark.parametrize("kind", KINDS)
def test_the_culprit_is_exact(kind, tmp_path):
    programs, faults, culprits = random_hangs.draw(kind, WORLD, seed=3)
    finished, found = judged(tmp_path / "d", programs, faults, timing=True)
    assert not finished
    assert (found.verdict, named(found)) == (VERDICTS[kind], culprits)
    assert found.exit_code == (3 if kind == "killed" else 1)  # its file may be lost
    assert found.victims
    assert culprits.isdisjoint(victim.rank for victim in found.victims)
    assert found.group
    assert found.evidence


@pytest.mark.parametrize("kind", KINDS)
def test_with_less_recorded_nobody_innocent_is_named(kind, tmp_path):
    programs, faults, culprits = random_hangs.draw(kind, WORLD, seed=3)
    _, found = judged(tmp_path / "d", programs, faults, active_only=True, stacks=False)
    assert named(found) in (culprits, set())
    assert found.exit_code == (1 if found.culprits and kind != "killed" else 3)
    assert any("TORCH_INCLUDE_ONLY_ACTIVE=0" in line for line in found.missing)


def test_two_hosts_that_stop_at_different_calls_are_late_in_a_job_that_runs(tmp_path):
    """Two that stop at the same call have one reason: "two at once" of the labelled cases."""
    faults = {5: quiescence.RankFault(host=6), 10: quiescence.RankFault(host=3)}
    _, found = judged(tmp_path / "d", healthy(WORLD), faults, active_only=True, stacks=False)
    assert (named(found), found.candidates) == (set(), (5, 10))


@pytest.mark.skipif(not TRACES.is_dir(), reason="PRISM_FR_TRACES names no folder")
@pytest.mark.parametrize(
    ("name", "culprits", "verdict"),
    [
        ("gpu_error_1st", {12, 14}, "device stuck"),
        ("lock_gil_2nd", {10, 15}, "host stuck"),
    ],
)
def test_labelled_dumps_of_real_jobs(name, culprits, verdict, capsys):
    assert cli.main(["hang", "--dumps", str(TRACES / name), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert {row["rank"] for row in found["culprits"]} == culprits
    assert found["verdict"] == verdict
    assert culprits.isdisjoint(row["rank"] for row in found["victims"])


# -- from dumps and programs ----------------------------------------------------------------------
def test_outstanding_calls_and_the_programs_leave_one_rank():
    programs, faults, culprits = random_hangs.draw("extra", WORLD, 94)
    state = quiescence.run_until_stalled(programs, faults)
    dumps = random_hangs.dumps_of(state, active_only=True, stacks=False)
    found = dataclasses.replace(hang.diagnose_dumps(dumps), culprits=())  # programs alone decide
    found = hypotheses.explain(dumps, found, healthy(WORLD))
    assert (named(found), found.confidence, found.exit_code) == (culprits, "likely", 1)
    assert culprits.isdisjoint(v.rank for v in found.victims)
    assert "single faults tried on the programs" in found.evidence[-1]


@pytest.mark.parametrize(
    ("kind", "seed"), [("dtype", 18), ("shape", 32), ("operation", 15), ("lost", 88)]
)
def test_one_of_two_is_named_where_the_rest_of_the_job_contradicts_it(kind, seed):
    """Nobody else makes such a call, or all siblings posted the message that it did not post."""
    programs, faults, culprits = random_hangs.draw(kind, WORLD, seed)
    state = quiescence.run_until_stalled(programs, faults)
    found = hang.diagnose_dumps(random_hangs.dumps_of(state, active_only=True, stacks=False))
    assert named(found) == culprits
    assert found.confidence != "certain"


def test_between_two_ranks_the_programs_decide_also_where_a_group_is_still_unused():
    """pg_status says -1 of a group without a call, and counts from 1: one behind, not two."""
    text = """prism-program 1
world size=4 pp=2
group A 0,1;2,3
group B 0,2;1,3
program ranks=0,1
- all_reduce B bf16 n=4 reduce=sum handle=1
program ranks=2,3
- reduce_scatter A fp32 in=64 out=32 reduce=sum
- all_reduce B bf16 n=4 reduce=sum
"""
    programs = parse(text)
    planted = faults.plant(programs, [fault_plan.parse("dtype@rank=3,group=A")])
    found = diagnose.diagnose_stall(quiescence.run_until_stalled(planted.programs))
    assert (found.verdict, found.culprits, found.candidates) == ("mismatch", (), (2, 3))
    found = diagnose.diagnose_stall(quiescence.run_until_stalled(planted.programs), programs)
    assert (named(found), found.culprits[0].kind, found.op) == ({3}, "dtype", "reduce_scatter")


# -- from programs --------------------------------------------------------------------------------
@pytest.mark.parametrize("name", FAULTS)
def test_programs_that_do_not_fit(name):
    programs = healthy(WORLD)
    ops = list(programs.of(5))
    FAULTS[name][0](ops)
    found = diagnose_graph(world_graph.build(with_rank(programs, 5, ops)))
    assert (found.verdict, named(found)) == ("mismatch", {5})


def test_a_ring_over_two_groups_from_programs():
    found = diagnose_graph(world_graph.build(parse(RING)))
    assert (found.verdict, named(found), found.missing) == ("order", {3}, ())
    assert len(found.chain) == 3
    assert diagnose_graph(world_graph.build(healthy(WORLD))).verdict == "healthy"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "name dumps or programs"),
        (["--dumps", "/nonexistent"], "there is no folder"),
        (["{ring}", "--recipe", "tiny-gpt_1cpu"], "whose job dumps are of"),
        (["{ring}", "--seed", "3"], "draws the ranks of faults"),
        (["{ring}", "--confirm"], "--confirm runs real code"),
        (["--dumps", "x", "--programs", "y", "--recipe", "z"], "or add --confirm"),
        (["fault=drop@rank=1"], "fix: prism hang DIR fault=drop@rank=1"),
        (["{ring}", "--html", "{ring}"], "is not overwritten"),
        (["{ring}", "--html", "{ring}.x", "--markdown", "{ring}.x"], "name two files"),
    ],
)
def test_bad_usage_ends_with_2(words, says, tmp_path, capsys):
    """Words that have no effect are refused; places before the work, or the verdict is lost."""
    (tmp_path / "ring").write_text(RING)
    assert cli.main(["hang", *(word.format(ring=tmp_path / "ring") for word in words)]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "fix:" in said


# -- standstills ----------------------------------------------------------------------------------
def test_nothing_of_a_batch_is_launched_before_all_of_it():
    """A rank whose host or device stops between two calls of a coalesced one has made neither."""
    from megatron_prism.core.programs.program_text import parse
    from megatron_prism.graph import stall as quiescence

    text = "prism-program 1\nworld size=2 tp=2\nprogram rank=0 ranks=0-1\n"
    text += "- all_reduce TENSOR_MODEL_PARALLEL_GROUP bf16 n=1\n"
    for _ in range(2):
        text += "- all_reduce TENSOR_MODEL_PARALLEL_GROUP bf16 n=4 batch=0\n"
    for fault in ({"host": 2}, {"device": 2}):
        state = quiescence.run_until_stalled(parse(text), {1: quiescence.RankFault(**fault)})
        assert [bytes(done) for done in state.done] == [b"\1\0\0"] * 2
        assert state.issued == [3, 1 if "host" in fault else 3]
    state = quiescence.run_until_stalled(parse(text), {1: quiescence.RankFault(host=3)})
    assert state.finished


def test_a_barrier_holds_the_host_until_everybody_has_come():
    from megatron_prism.core.programs.program_text import parse
    from megatron_prism.graph import stall as quiescence

    text = """prism-program 1
world size=2 tp=2
program rank=0 ranks=0
- barrier TENSOR_MODEL_PARALLEL_GROUP
- all_reduce TENSOR_MODEL_PARALLEL_GROUP bf16 n=4 reduce=sum handle=1
- compute ns=1
program rank=1 ranks=1
- compute ns=1
- barrier TENSOR_MODEL_PARALLEL_GROUP
- all_reduce TENSOR_MODEL_PARALLEL_GROUP bf16 n=4 reduce=sum handle=1
- compute ns=1
"""
    world = parse(text)
    assert quiescence.run_until_stalled(world).finished
    stuck = quiescence.run_until_stalled(world, {1: quiescence.RankFault(host=1)})
    assert stuck.issued == [1, 1]  # rank 0 never comes to its all-reduce
    stuck = quiescence.run_until_stalled(world, {1: quiescence.RankFault(device=2)})
    assert stuck.issued == [3, 4]  # through the barrier; the all-reduces never meet
    assert stuck.done[0][0] == 1
    behind = parse(text.replace("- barrier TENSOR_MODEL_PARALLEL_GROUP\n", "- barrier "
                                "TENSOR_MODEL_PARALLEL_GROUP handle=0\n"))  # fmt: skip
    stuck = quiescence.run_until_stalled(behind, {1: quiescence.RankFault(host=1)})
    assert stuck.issued == [3, 1]  # an asynchronous one holds nobody
