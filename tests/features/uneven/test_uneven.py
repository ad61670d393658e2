"""Inputs that differ between ranks, on programs by hand."""

import dataclasses
import json

import numpy as np
import pytest
from helpers.programs import DP, EP, PP, TP, healthy
from helpers.uneven_worlds import HIDDEN, WORLD, of_microbatches, pipeline, some, sources

from megatron_prism.cli import main as cli
from megatron_prism.core.errors import ProgramError, UsageError
from megatron_prism.core.jobs import job_settings
from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.core.programs.program_text import dump
from megatron_prism.core.world import World
from megatron_prism.features.uneven.between_lengths import op_between
from megatron_prism.features.uneven.inputs import (
    InputKind,
    UnevenInput,
    read_lengths_file,
)
from megatron_prism.features.uneven.mixed_lengths import LengthCaptures, is_batch
from megatron_prism.features.uneven.outcome import examine
from megatron_prism.features.uneven.rank_programs import apply_inputs


# -- microbatches ----------------------------------------------------------------------------------
def test_a_replica_with_fewer_microbatches_matches_without_experts():
    outcome = examine(sources(), [some("microbatches=dp=1:1")])
    assert outcome.verdict == "matched"
    assert "-1 in TENSOR_MODEL_PARALLEL_GROUP" in outcome.counts[0]


def test_experts_across_replicas_make_fewer_microbatches_a_mismatch():
    world = World(16, tp=2, pp=2, ep=2)
    outcome = examine(sources(world), [some("microbatches=dp=3:1", world)])
    assert outcome.verdict == "mismatch"
    assert {finding.group for finding in outcome.findings} == {EP}
    assert "pad the last microbatches" in outcome.advice


def test_one_stage_that_drops_a_microbatch_leaves_messages_without_a_side():
    outcome = examine(sources(), [some("microbatches=0,1:1")])
    kinds = {(finding.kind, finding.group) for finding in outcome.findings}
    assert ("unmatched receive", PP) in kinds


def test_the_smallest_example_has_one_replica_and_one_input():
    world = World(32, tp=2, pp=2, ep=2)
    inputs = [some("microbatches=dp=3;dp=5;dp=7:1", world), some("microbatches=0:2", world)]
    outcome = examine(sources(world), inputs)
    (smallest,) = outcome.smallest
    assert {world.coordinates(rank).dp for rank in smallest.ranks} == {3}
    assert outcome.inputs == tuple(inputs)


# -- loaders ---------------------------------------------------------------------------------------
def forward_ops(with_broadcast):
    ops = []
    for microbatch in range(3):
        step = {"phase": "forward", "microbatch": microbatch}
        if with_broadcast:
            ops.append(Op("broadcast", TP, "int64", 8, 8, root=0, **step))
        ops.append(Op("compute", ns=5, **step))
        ops.append(Op("all_reduce", TP, "bf16", 8, 8, "sum", **step))
    ops.append(Op("all_reduce", DP, "fp32", 8, 8, "sum"))
    return ops


def one_stage(with_broadcast):
    world = World(4, tp=2)
    program = Program.from_ops(0, forward_ops(with_broadcast))
    return Programs(world, (program,), np.zeros(4, dtype=np.int32))


def test_of_a_broadcast_batch_only_the_rank_that_reads_stops():
    captured = one_stage(True)
    (loader,) = [some("loader=dp=1:2", captured.world)]
    uneven_world = apply_inputs(sources(captured=captured), [loader])
    assert {rank: fault.host for rank, fault in uneven_world.faults.items()} == {2: 6}
    outcome = examine(sources(captured=captured), [loader])
    assert outcome.verdict == "waits"
    assert [culprit.rank for culprit in outcome.diagnosis.culprits] == [2]
    assert "StopIteration" in outcome.advice


def test_without_a_broadcast_all_ranks_of_the_replica_stop():
    captured = one_stage(False)
    loader = some("loader=dp=1:1", captured.world)
    uneven_world = apply_inputs(sources(captured=captured), [loader])
    assert {rank: fault.host for rank, fault in uneven_world.faults.items()} == {2: 2, 3: 2}


def test_a_loader_that_lasts_is_refused():
    with pytest.raises(ProgramError, match="reads microbatch 9"):
        examine(sources(), [some("loader=dp=1:9")])


# -- lengths ---------------------------------------------------------------------------------------
def test_receives_keep_the_length_of_the_flag_without_variable_lengths():
    captured = pipeline(8)
    lengths = LengthCaptures(captured, [pipeline(2)])
    short = some("lengths=dp=1:2,8,2", captured.world)
    outcome = examine(sources(captured=captured, lengths=lengths), [short])
    assert [(finding.kind, finding.group) for finding in outcome.findings] == [("shape", PP)]
    assert outcome.smallest[0].lengths == (8, 8, 2)
    assert "variable_seq_lengths of the model's configuration" in outcome.advice
    # Megatron's parser has no such flag (training/arguments.py:1232 @0.19.0)
    assert "--variable" not in outcome.advice
    sent = outcome.findings[0].ranks[0]
    assert captured.world.coordinates(sent).dp == 1


def test_with_shapes_ahead_every_length_matches():
    varies = {"variable_seq_lengths": "true"}
    captured = pipeline(8, settings=varies)
    lengths = LengthCaptures(captured, [pipeline(2, settings=varies)])
    mixed = lengths.programs_of((2, 8, 2))
    sizes = [op.num_in for op in mixed.programs[0] if op.name == "send" and op.dtype == "bf16"]
    assert sizes == [2 * HIDDEN, 8 * HIDDEN, 2 * HIDDEN]
    short = some("lengths=dp=1:2,8,2", captured.world)
    world_of_lengths = sources(captured=captured, lengths=lengths)
    assert examine(world_of_lengths, [short]).verdict == "matched"


def test_segments_come_from_the_capture_of_their_length():
    lengths = LengthCaptures(pipeline(8), [pipeline(2)])
    mixed = lengths.programs_of((2, 8, 2))
    for program in mixed.programs:
        assert [op.ns for op in program if op.name == "compute"] == [2, 8, 2]


@pytest.mark.parametrize(
    ("others", "wanted", "says"),
    [
        ([], (4,), "no capture is of 4 tokens; there are 8"),
        ([pipeline(2)], (2, 2), "2 lengths for 3 microbatches"),
        ([pipeline(8)], (8,), "two captures are of 8 tokens"),
        ([pipeline(2, settings={"bf16": ""})], (2,), "s2 has bf16 True, not its default"),
        ([pipeline(2, extra="all_reduce")], (2,), "does 7 ops, not 6"),
    ],
)
def test_what_cannot_be_mixed_is_refused(others, wanted, says):
    with pytest.raises(ProgramError, match=says):
        LengthCaptures(pipeline(8), others).programs_of(wanted)


def tensor_parallel(length, *, site="core/utils.py:2184", dtype="int64"):
    """Two tensor-parallel ranks of two replicas; the first one broadcasts batches and masks."""
    ops = []
    for microbatch in range(2):
        step = {"phase": "forward", "microbatch": microbatch}
        ops.append(Op("broadcast", TP, dtype, length, length, root=0, site=site, **step))
        mask = length * length + length
        ops.append(Op("broadcast", TP, "bool", mask, mask, root=0, site=site, **step))
        ops.append(Op("compute", ns=length, **step))
    line = job_settings.as_text({"seq_length": str(length)})
    program = Program.from_ops(0, ops)
    all_ranks = np.zeros(4, dtype=np.int32)
    world = World(4, tp=2)
    return Programs(world, (program,), all_ranks, source={"settings": line}, path=f"t{length}")


def outcome_of_batches(length, **options):
    captured = tensor_parallel(8, **options)
    others = [tensor_parallel(other, **options) for other in (2, 4)]
    lengths = LengthCaptures(captured, others)
    short = some(f"lengths=dp=1:8,{length}", captured.world)
    return examine(sources(captured=captured, lengths=lengths), [short])


@pytest.mark.parametrize("length", [2, 5])
def test_batches_are_received_in_the_length_of_the_flag(length):
    outcome = outcome_of_batches(length)
    finding = outcome.findings[0]
    assert (finding.kind, finding.group, finding.ranks) == ("shape", TP, (2, 3))
    assert f"{length} elements on rank 2, 8 elements on rank 3" in finding.likely
    assert "broadcast_data" in outcome.advice


@pytest.mark.parametrize(
    "options", [{"site": "core/tensor_parallel/data.py:95"}, {"site": "train.py:7"}]
)
def test_batches_whose_sizes_go_ahead_have_any_length(options):
    assert outcome_of_batches(5, **options).verdict == "matched"


def test_descriptions_of_packed_documents_have_any_length():
    batch = Op("broadcast", TP, "int64", 8, 8, site="core/utils.py:1", phase="forward")
    documents = dataclasses.replace(batch, dtype="int32")
    backward = dataclasses.replace(batch, phase="backward")
    assert [is_batch(op) for op in (batch, documents, backward)] == [True, False, False]


def test_sizes_between_captures_are_on_a_line_or_on_a_parabola_with_zero():
    def sizes_at(sizes, length):
        ops = {
            captured: [Op("broadcast", TP, "bool", size, size)] for captured, size in sizes.items()
        }
        return op_between(ops, 0, length).num_in

    assert sizes_at({2: 5, 4: 9, 8: 17}, 6) == 13
    # 3 L^2 + L
    assert sizes_at({2: 14, 4: 52, 8: 200}, 6) == 114
    # two captures are on a line
    assert sizes_at({2: 14, 8: 200}, 6) == 138
    for sizes in ({2: 14, 4: 52, 8: 201}, {2: 4, 4: 16, 8: 65}):
        with pytest.raises(ProgramError, match="on no line or parabola"):
            sizes_at(sizes, 6)


def test_a_call_of_no_microbatch_that_depends_on_the_length_is_refused():
    captures = LengthCaptures(pipeline(8, extra="all_reduce"), [pipeline(2, extra="all_reduce")])
    with pytest.raises(ProgramError, match="belongs to no microbatch"):
        captures.programs_of((2, 8, 8))


def test_a_file_of_lengths_has_a_line_for_each_dp_rank(tmp_path):
    file = tmp_path / "lengths.jsonl"
    rows = [{"dp": 0, "lengths": [8, 8, 8]}, {"dp": 1, "lengths": [2, 8, 2]}]
    file.write_text("\n".join(map(json.dumps, rows)))
    inputs = read_lengths_file(file, World(4, pp=2))
    assert inputs == [
        UnevenInput(InputKind.LENGTHS, (0, 2), lengths=(8, 8, 8)),
        UnevenInput(InputKind.LENGTHS, (1, 3), lengths=(2, 8, 2)),
    ]


def test_the_first_iteration_that_stops_is_named(folder, capsys):
    rows = [{"dp": 0, "lengths": [8] * 12}, {"dp": 1, "lengths": [8] * 7 + [2] + [8] * 4}]
    (folder / "drawn.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["uneven", "s8", "lengths=drawn.jsonl", "capture=s2"]
    status, out, _ = prism(*words, capsys=capsys)
    assert status == 1
    assert out.startswith("iteration 3 of 4: the job stops")
    assert "smallest example: lengths=1,3:8,2,8" in out
    value = json.loads(prism(*words, "--json", capsys=capsys)[1])
    assert (value["iteration"], value["iterations"]) == (3, 4)


def test_iterations_with_equal_lengths_are_examined_once(folder, capsys):
    rows = [{"dp": rank, "lengths": [8] * 300} for rank in (0, 1)]
    (folder / "drawn.jsonl").write_text("\n".join(map(json.dumps, rows)))
    status, out, _ = prism("uneven", "s8", "lengths=drawn.jsonl", capsys=capsys)
    assert status == 0
    assert out.startswith("100 iterations, 1 of them different: every call is matched")


@pytest.mark.parametrize(
    ("second", "says"), [([8] * 7, "the last iteration lacks some"), ([8] * 9, "of 2 and of 3")]
)
def test_lengths_of_other_numbers_of_iterations_are_refused(folder, second, says, capsys):
    rows = [{"dp": 0, "lengths": [8] * 6}, {"dp": 1, "lengths": second}]
    (folder / "drawn.jsonl").write_text("\n".join(map(json.dumps, rows)))
    status, _, err = prism("uneven", "s8", "lengths=drawn.jsonl", capsys=capsys)
    assert status == 2
    assert says in err


@pytest.mark.parametrize(
    "text",
    ["", "3", "{}", '{"dp": 0, "lengths": []}', '{"dp": 0, "lengths": [0]}',
     '{"dp": 0, "lengths": ["8"]}', '{"dp": 0, "lengths": [8]}\n{"dp": 0, "lengths": [8]}'],
)  # fmt: skip
def test_a_damaged_file_of_lengths_is_refused(tmp_path, text):
    file = tmp_path / "lengths.jsonl"
    file.write_text(text)
    with pytest.raises(UsageError, match="lengths"):
        read_lengths_file(file, World(4))


# -- the command -----------------------------------------------------------------------------------
def prism(*words, capsys):
    status = cli.main(words)
    return status, *capsys.readouterr()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for length in (2, 8):
        (tmp_path / f"s{length}").write_text(dump(pipeline(length)))
    (tmp_path / "few").write_text(dump(of_microbatches(healthy(WORLD), 1)))
    (tmp_path / "usual").write_text(dump(healthy(WORLD)))
    return tmp_path


def test_the_command_names_the_call_and_the_smallest_example(folder, capsys):
    status, out, _ = prism("uneven", "s8", "lengths=dp=1:2", "capture=s2", capsys=capsys)
    assert status == 1
    assert "smallest example: lengths=1,3:8,8,2" in out
    assert "shape in PIPELINE_MODEL_PARALLEL_GROUP, call #3" in out
    assert "why: a stage receives tensors of --seq-length" in out


def test_other_programs_of_a_rank_are_a_capture_of_its_own(folder, capsys):
    status, out, _ = prism("uneven", "usual", "programs=5:few", "--json", capsys=capsys)
    value = json.loads(out)
    assert status == 1
    assert value["verdict"] == "mismatch"
    assert value["smallest"] == ["programs=5:few"]
    assert {tuple(finding["ranks"]) for finding in value["findings"]} >= {(4, 5)}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["usual"], "no rank gets another input"),
        (["usual", "capture=s2"], "no rank gets another input"),
        (["usual", "microbatches=7"], "microbatches=7 needs ranks and a value"),
        (["usual", "microbatches=dp=1:few"], "'few' is no number"),
        (["usual", "loader=dp=9:1"], "dp"),
        (["usual", "loader=dp=1:1", "capture=s2"], "capture= without lengths="),
        (["usual", "loader=dp=1:1", "loader=dp=1:0"], "has two inputs"),
        (["usual", "lengths=dp=1:2"], "does not say how long"),
        (["s8", "lengths=dp=1:x"], "'x' are no lengths"),
        (["usual", "programs=5:s8"], "s8 is of another world"),
    ],
)
def test_bad_usage_is_status_2_with_a_fix(folder, words, says, capsys):
    status, out, err = prism("uneven", *words, capsys=capsys)
    assert status == 2
    assert says in err
    assert "fix: " in err
