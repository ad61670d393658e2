"""Inputs that are drawn from ranges, on programs by hand."""

import json

import pytest
from helpers.programs import EP, healthy
from helpers.uneven_worlds import WORLD, of_microbatches, pipeline, some, sources

import megatron_prism
from megatron_prism.cli import main as cli
from megatron_prism.core.errors import ProgramError, UsageError
from megatron_prism.core.programs.program_text import dump
from megatron_prism.core.world import World
from megatron_prism.features.uneven.input_ranges import read_range, search
from megatron_prism.features.uneven.inputs import InputKind, UnevenInput, join_counts
from megatron_prism.features.uneven.mixed_lengths import LengthCaptures, sequence_length
from megatron_prism.features.uneven.outcome import examine
from megatron_prism.features.uneven.rank_programs import Sources, apply_inputs


def range_of(word, world=WORLD):
    key, _, text = word.partition("=")
    return read_range(InputKind(key), text, world)


EXPERTS = World(16, tp=2, pp=2, ep=2)


def test_a_difference_of_one_rank_is_found_first():
    ranges = [range_of("microbatches=0-15:2-4", EXPERTS)]
    result = search(sources(EXPERTS), [], ranges, iterations=30, seed=0)
    assert result.outcome.verdict == "mismatch"
    assert {finding.group for finding in result.outcome.findings} == {EP}
    (smallest,) = result.outcome.smallest
    assert {EXPERTS.coordinates(rank).dp for rank in smallest.ranks} == {0}
    assert smallest.count == 3
    assert result.drawn == 30
    # all dp ranks of a group of experts drew the same count in a few
    assert 0 < result.stopping < 30


def test_draws_that_all_match_are_counted_once_each():
    ranges = [range_of("microbatches=0-7:2-4")]
    result = search(sources(), [], ranges, iterations=100, seed=0)
    assert result.outcome.verdict == "matched"
    # two dp ranks with three counts
    assert (result.examined, result.drawn, result.stopping, result.refused) == (9, 100, 0, 0)


def test_a_loader_that_lasts_is_no_input_and_one_that_ends_waits():
    ranges = [range_of("loader=0-7:3-9")]
    assert search(sources(), [], ranges, iterations=20, seed=0).outcome.verdict == "matched"
    ranges = [range_of("loader=0-7:1-9")]
    result = search(sources(), [], ranges, iterations=20, seed=0)
    assert result.outcome.verdict == "waits"
    assert [str(smallest) for smallest in result.outcome.smallest] == ["loader=0,1,4,5:1"]


def test_draws_that_megatron_refuses_are_counted():
    def of_even_counts(programs, count):
        if count % 2:
            raise ProgramError(f"Megatron refuses {count} microbatches", fix="2")
        return of_microbatches(programs, count)

    only_even = Sources(healthy(WORLD), of_even_counts, lambda path: None)
    ranges = [range_of("microbatches=dp=1:4-5")]
    result = search(only_even, [], ranges, iterations=50, seed=0)
    assert 0 < result.refused < 50
    assert result.refusal.startswith("Megatron refuses 5 microbatches")
    with pytest.raises(ProgramError, match="refuses 5"):
        search(only_even, [], [range_of("microbatches=dp=1:5-5")], iterations=5, seed=0)


def lengths_in(*captured):
    base, *others = [pipeline(length) for length in captured]
    return sources(captured=base, lengths=LengthCaptures(base, others))


def test_lengths_are_drawn_among_captured_ones():
    few = lengths_in(8, 2)
    world = few.captured.world
    result = search(few, [], [range_of("lengths=0-3:1-9", world)], iterations=20, seed=0)
    # a stage that receives --seq-length gets less
    assert result.outcome.findings[0].kind == "shape"
    (smallest,) = result.outcome.smallest
    assert sorted(smallest.lengths) == [2, 8, 8]
    with pytest.raises(UsageError, match="no capture is of 3 to 7 tokens"):
        search(few, [], [range_of("lengths=0-3:3-7", world)], iterations=20, seed=0)


def test_two_ranges_of_a_rank_are_refused():
    ranges = [range_of("microbatches=dp=1:4-5"), range_of("microbatches=dp=1:1-2")]
    with pytest.raises(UsageError, match="two ranges of microbatches="):
        search(sources(), [], ranges, iterations=5, seed=0)


@pytest.mark.parametrize(
    "word", ["microbatches=dp=1:5-4", "microbatches=dp=1:0-4", "lengths=dp=1:0-4"]
)
def test_empty_ranges_are_refused(word):
    with pytest.raises(UsageError, match="is empty|begins with 0"):
        range_of(word)


@pytest.mark.parametrize("word", ["microbatches=dp=1:4", "lengths=dp=1:4,2", "programs=0:a-b"])
def test_other_values_are_no_ranges(word):
    assert range_of(word) is None


# -- counts with lengths ---------------------------------------------------------------------------
def test_a_count_and_lengths_of_the_same_ranks_are_one_input():
    inputs = [some("microbatches=dp=1:2"), some("lengths=dp=1:4,8"), some("microbatches=dp=0:2")]
    joined = join_counts(inputs)
    assert joined == [
        UnevenInput(InputKind.LENGTHS, inputs[0].ranks, count=2, lengths=(4, 8)),
        inputs[2],
    ]
    assert str(joined[0]) == "microbatches=2,3,6,7:2 lengths=2,3,6,7:4,8"


def test_lengths_are_those_of_another_number_of_microbatches():
    def scheduler(programs, count):
        return pipeline(sequence_length(programs), microbatches=count)

    base = pipeline(8)
    few = Sources(base, scheduler, lambda path: None, LengthCaptures(base, [pipeline(2)]))
    short = UnevenInput(InputKind.LENGTHS, (1, 3), count=2, lengths=(8, 2))
    programs = apply_inputs(few, [short]).programs
    segments = [op.ns for op in programs.of(1) if op.name == "compute"]
    assert segments == [8, 2]
    outcome = examine(few, [short])
    assert outcome.findings[0].kind == "shape"
    # the count does not matter for it
    assert [str(smallest) for smallest in outcome.smallest] == [
        "microbatches=1,3:2 lengths=1,3:8,2"
    ]


# -- the command and the function ------------------------------------------------------------------
def prism(*words, capsys):
    status = cli.main(words)
    return status, *capsys.readouterr()


@pytest.fixture
def usual(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "usual").write_text(dump(healthy(EXPERTS)))
    (tmp_path / "s8").write_text(dump(pipeline(8)))
    (tmp_path / "s2").write_text(dump(pipeline(2)))


def test_the_command_says_how_many_draws_stop(usual, capsys):
    words = ["uneven", "usual", "loader=0-15:1-3", "iterations=20", "seed=3"]
    status, out, _ = prism(*words, capsys=capsys)
    assert status == 1
    head, _, rest = out.partition("\n")
    assert head.startswith("20 draws, ")
    assert head.endswith("of the draws stop")
    assert "the job stops; smallest example: loader=" in rest
    value = json.loads(prism(*words, "--json", capsys=capsys)[1])
    assert value["search"]["iterations"] == value["search"]["drawn"] == 20
    assert value["verdict"] == "waits"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["usual", "microbatches=dp=1:3", "seed=1"], "seed= without a file or a range"),
        (["usual", "loader=0-15:2-3", "--limit", "80GB"], "--limit is of a run"),
        (["usual", "microbatches=dp=1:3", "iterations=5"], "iterations= without lengths="),
    ],
)
def test_words_without_effect_are_refused(usual, words, says, capsys):
    status, _, err = prism("uneven", *words, capsys=capsys)
    assert status == 2
    assert says in err


def test_the_function_takes_the_words_of_the_command(usual):
    captured = megatron_prism.load("s8")
    result = megatron_prism.uneven(captured, ["lengths=dp=1:2,8,8", "capture=s2"])
    assert result.stops
    assert "smallest example: lengths=1,3:2,8,8" in result.to_text()
    assert result.to_json()["verdict"] == "mismatch"
    assert result.rows()[0]["kind"] == "shape"
