"""Step times of drawn batches, held to a replay of programs that were put together op by op."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from helpers.uneven_worlds import LENGTHS_VARY as VARIES
from helpers.uneven_worlds import LENGTHS_WORLD as WORLD
from helpers.uneven_worlds import MICROBATCHES
from helpers.uneven_worlds import length_job as job

from megatron_prism.cli import main as cli
from megatron_prism.core.errors import ProgramError
from megatron_prism.core.jobs import job_settings
from megatron_prism.core.programs.program_text import dump
from megatron_prism.features.uneven.drawn import (
    _lines_of_times,
    batches_of_file,
    examine_run,
    to_json,
    to_text,
)
from megatron_prism.features.uneven.length_curves import make_curves, polynomial_weights
from megatron_prism.features.uneven.mixed_lengths import LengthCaptures
from megatron_prism.features.uneven.rank_programs import Sources, apply_inputs
from megatron_prism.features.uneven.samples import Batches
from megatron_prism.features.uneven.step_times import fair_deal, step_times
from megatron_prism.replay.priced_graph import replay


def captures(lengths=(64, 16, 40), **how):
    base, *others = [job(length, **how) for length in lengths]
    return LengthCaptures(base, others)


def drawn(choices, iterations=20, world=WORLD):
    shape = iterations, world.dp, MICROBATCHES
    tokens = np.random.default_rng(0).choice(choices, shape)
    # the longest sample of an iteration is not always the longest one that there is
    longest = np.array(choices)[np.arange(iterations) % len(choices)]
    tokens = np.minimum(tokens, longest[:, None, None])
    return Batches(tokens, tokens.astype(float) ** 2, False, "")


# -- between captures ------------------------------------------------------------------------------
def test_what_is_linear_and_quadratic_is_exact_between_captures():
    lengths = (100, 300, 1000, 4000)
    generator = np.random.default_rng(1)
    documents = generator.integers(1, 700, (50, 5))
    tokens, squares = documents.sum(axis=1), (documents**2).sum(axis=1).astype(float)

    def takes(tokens, squares):
        return 7 + 3 * tokens + 0.02 * squares

    at_captures = np.array([takes(length, length**2) for length in lengths])
    weights = polynomial_weights(lengths, tokens, squares)
    assert at_captures @ weights == pytest.approx(takes(tokens, squares))


def test_a_captured_length_is_that_capture():
    for count in (2, 3, 4):
        lengths = (10, 20, 50, 70)[:count]
        tokens = np.array(lengths)
        weights = polynomial_weights(lengths, tokens, tokens.astype(float) ** 2)
        assert weights == pytest.approx(np.eye(count))


def test_two_captures_give_a_straight_line():
    weights = polynomial_weights((10, 30), np.array([15, 40]), np.array([225.0, 1600.0]))
    assert weights.T.tolist() == [[0.75, 0.25], [-0.5, 1.5]]


# -- step times ------------------------------------------------------------------------------------
@pytest.mark.parametrize("with_experts", [False, True])
def test_steps_take_as_long_as_a_replay_of_their_programs(with_experts):
    world = dataclasses.replace(WORLD, ep=2) if with_experts else WORLD
    length_captures = captures(with_experts=with_experts, world=world)
    batches = drawn((16, 40, 64), world=world)
    times = step_times(make_curves(length_captures), batches)
    sources = Sources(length_captures.captured, None, None, length_captures)
    for iteration, step_ns in enumerate(times.step_ns.tolist()):
        programs = apply_inputs(sources, batches.inputs_of(iteration, world)).programs
        assert step_ns == pytest.approx(replay(programs).iteration_ns, rel=0.002)
    assert len(set(times.step_ns.tolist())) >= 3


def test_without_captures_between_steps_take_as_long_as_with_them():
    batches = drawn(range(16, 65))
    few = step_times(make_curves(captures()), batches)
    many = step_times(make_curves(captures((64, *range(16, 64)))), batches)
    assert few.step_ns == pytest.approx(many.step_ns, rel=0.002)
    assert (few.outside, many.outside) == (0, 0)


def test_lengths_outside_of_the_captures_are_said():
    batches = drawn((16, 64))
    times = step_times(make_curves(captures((64, 40))), batches)
    assert times.outside == (batches.tokens == 16).mean() > 0.5


def test_no_dp_rank_is_the_last_where_all_samples_are_alike():
    batches = drawn((16,))
    tokens = np.full_like(batches.tokens, 64)
    batches = Batches(tokens, tokens.astype(float) ** 2, False, "")
    times = step_times(make_curves(captures()), batches)
    assert not times.last_share.any()
    waiting = next(line for line in _lines_of_times(times) if line.startswith("waiting"))
    assert waiting.endswith("for others; no dp rank is later than others")
    # two of four
    tokens[:, 2:] = 16
    times = step_times(make_curves(captures()), dataclasses.replace(batches, tokens=tokens))
    assert times.last_share.tolist() == [1, 1, 0, 0]


def test_the_dp_rank_with_the_longest_samples_is_awaited():
    batches = drawn((16,))
    tokens = batches.tokens.copy()
    tokens[:, 2] = 64
    batches = Batches(tokens, tokens.astype(float) ** 2, False, "")
    times = step_times(make_curves(captures()), batches)
    assert times.last_share.tolist() == [0, 0, 1, 0]
    assert (times.wait_ns[[0, 1, 3], 2] > 0).all()
    assert times.wait_ns.sum() == times.wait_ns[:, 2].sum()
    assert times.wait_ns[2, 2] == 0
    # three long microbatches, dealt to three of four dp ranks, or to one
    assert times.balanced_gain > 0.25


def test_documents_that_attend_to_themselves_take_less():
    tokens = np.full((1, WORLD.dp, MICROBATCHES), 64)
    whole = Batches(tokens, np.full(tokens.shape, 64.0**2), True, "")
    halves = Batches(tokens, np.full(tokens.shape, 2 * 32.0**2), True, "")
    curves = make_curves(captures())
    long_ns, short_ns = (int(step_times(curves, own).step_ns[0]) for own in (whole, halves))
    # an iteration behind another one takes as long as the three microbatches of a stage
    assert long_ns - short_ns == pytest.approx(MICROBATCHES * 300 * 2048, rel=0.01)


def test_a_fair_deal_gives_all_dp_ranks_equal_work():
    work = np.random.default_rng(3).exponential(size=(4, 8))
    order = fair_deal(work)
    assert sorted(order) == list(range(32))
    dealt = work.reshape(-1)[order].reshape(work.shape).sum(axis=1)
    assert dealt.max() < 1.02 * dealt.mean() < work.sum(axis=1).max()


@pytest.mark.parametrize("seed", range(5))
def test_a_fair_deal_is_near_the_best_one(seed):
    work = np.random.default_rng(seed).exponential(size=(2, 3))
    best = min(
        max(sum(own), work.sum() - sum(own)) for own in itertools.combinations(work.ravel(), 3)
    )
    dealt = work.ravel()[fair_deal(work)].reshape(2, 3).sum(axis=1).max()
    assert dealt <= 1.17 * best  # Graham's bound for two, (4/3 - 1/6)


def test_one_capture_says_nothing_of_other_lengths():
    with pytest.raises(ProgramError, match="one capture, of 64 tokens"):
        make_curves(captures((64,)))


# -- the command -----------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for length in (16, 40, 64):
        (tmp_path / f"s{length}").write_text(dump(job(length)))
    rows = [{"length": 20, "count": 9}, {"length": 60}]
    (tmp_path / "law.jsonl").write_text("\n".join(map(json.dumps, rows)))
    packed = [{"documents": [60, 4]}, {"documents": [32, 32]}]
    (tmp_path / "packed.jsonl").write_text("\n".join(map(json.dumps, packed)))
    listed = [{"dp": 3, "lengths": [20, 50, 64, 64, 16, 64]}]
    (tmp_path / "listed.jsonl").write_text("\n".join(map(json.dumps, listed)))
    return tmp_path


def prism(*words, capsys):
    status = cli.main(("uneven", "s64", *words))
    return status, *capsys.readouterr()


OTHERS = ("capture=s16", "capture=s40")


def test_the_command_says_how_steps_spread(folder, capsys):
    status, out, _ = prism("lengths=law.jsonl", *OTHERS, "iterations=30", "seed=4", capsys=capsys)
    assert status == 0
    assert "30 iterations of 4 dp ranks x 3 microbatches, drawn from law.jsonl, seed 4" in out
    assert "step time     median " in out
    assert "captures of 16, 40, 64 tokens, interpolated" in out
    value = json.loads(prism("lengths=law.jsonl", *OTHERS, "--json", capsys=capsys)[1])
    assert len(value["drawn"]["times"]["step_ns"]) == value["drawn"]["iterations"] == 200
    assert value["verdict"] == "matched"


def test_listed_lengths_are_a_run_too(folder, capsys):
    words = ("lengths=listed.jsonl", *OTHERS, "iterations=2", "--json")
    value = json.loads(prism(*words, capsys=capsys)[1])
    assert value["drawn"]["iterations"] == 2
    status, _, err = prism("lengths=listed.jsonl", *OTHERS, "iterations=3", capsys=capsys)
    assert status == 2
    assert "fix: iterations=2" in err


def test_packed_documents_say_whether_the_job_masks_them(folder, capsys):
    _, out, _ = prism("lengths=packed.jsonl", *OTHERS, capsys=capsys)
    assert "they attend to " in out
    assert "--dataloader-inter-document-masking" in out
    status, _, err = prism("lengths=packed.jsonl", "capture=s16", capsys=capsys)
    assert status == 2
    assert "two captures do not say what attention takes" in err


@pytest.mark.parametrize("flag", ["dataloader_inter_document_masking", "sft"])
def test_unmasked_documents_take_as_long_as_samples_of_one(flag):
    tokens = np.full((4, 4, MICROBATCHES), 64)
    squares = np.where(np.arange(4) % 2, 64.0**2, 32.0**2)[:, None, None] * np.ones(tokens.shape)
    packed = Batches(tokens, squares, True, "")
    others = [with_settings(16), with_settings(40)]
    across = LengthCaptures(with_settings(64), others)
    run = examine_run(Sources(across.captured, None, None, across), packed)
    whole = step_times(make_curves(across), Batches(tokens, tokens.astype(float) ** 2, False, ""))
    assert run.attends_across
    assert run.times.step_ns.tolist() == whole.step_ns.tolist()
    assert run.times.equal_ns == whole.equal_ns
    assert to_json(run)["attends_across"]
    assert "attends across" in to_text(run)

    others = [with_settings(length, **{flag: ""}) for length in (16, 40)]
    masked = LengthCaptures(with_settings(64, **{flag: ""}), others)
    run = examine_run(Sources(masked.captured, None, None, masked), packed)
    assert not run.attends_across
    assert len(set(run.times.step_ns.tolist())) == 2
    assert not to_json(run)["attends_across"]
    assert "attends across" not in to_text(run)


def with_settings(length, **settings):
    programs = job(length)
    line = job_settings.as_text({"seq_length": str(length), **VARIES, **settings})
    return dataclasses.replace(programs, source={"settings": line})


def test_a_microbatch_has_as_many_samples_as_the_job_says(folder):
    rows = [{"length": 16}, {"length": 64}]
    (folder / "law.jsonl").write_text("\n".join(map(json.dumps, rows)))
    many = LengthCaptures(with_settings(64, micro_batch_size="64"), [])
    # of 64 samples one is long
    batches = batches_of_file("law.jsonl", many, 5, 0)
    assert set(batches.tokens.flat) == {64}
    single = LengthCaptures(with_settings(64), [])
    assert set(batches_of_file("law.jsonl", single, 5, 0).tokens.flat) == {16, 64}


def test_drawn_lengths_that_stop_the_job_are_named(folder, capsys):
    for length in (16, 64):
        text = dump(job(length)).replace("variable_seq_lengths", "variable_seq_other")
        (folder / f"s{length}").write_text(text)
    status, out, _ = prism("lengths=law.jsonl", "capture=s16", capsys=capsys)
    assert status == 1
    assert "shape in PIPELINE_MODEL_PARALLEL_GROUP" in out
    assert "smallest example: lengths=" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["seed=3", "microbatches=dp=1:2"], "seed= without a file"),
        (["iterations=3", "microbatches=dp=1:2"], "iterations= without lengths="),
        (["lengths=law.jsonl", "microbatches=dp=1:2"], "there is another input"),
        (["lengths=law.jsonl", "lengths=dp=1:64"], "there is another input"),
        (["lengths=law.jsonl"], "no capture is of 20 tokens"),
        (["lengths=data.idx", "seed=3"], "seed= beside a data set"),
        (["lengths=dp=1:64", "--limit=80GB"], "--limit is of a run of drawn batches"),
        (["lengths=dp=1:64", "--machine=h100"], "--machine is of a run of drawn batches"),
        (["microbatches=dp=1:2", "--calibration=f"], "--calibration is of a run of drawn batches"),
    ],
)
def test_bad_usage_has_a_fix(folder, words, says, capsys):
    (folder / "data.idx").write_bytes(b"")
    status, _, err = prism(*words, capsys=capsys)
    assert status == 2
    assert says in err
