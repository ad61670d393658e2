"""Peaks of drawn batches, held to programs that were put together op by op."""

import json

import numpy as np
from helpers.uneven_worlds import MICROBATCHES
from helpers.uneven_worlds import memory_job as job
from helpers.uneven_worlds import memory_program as program

from megatron_prism.cli import main as cli
from megatron_prism.core.programs.program_text import dump
from megatron_prism.features.uneven.mixed_lengths import LengthCaptures
from megatron_prism.features.uneven.run_memory import LeftOut, run_memory
from megatron_prism.features.uneven.samples import Batches
from megatron_prism.replay.costs.machine import device_limit

PARAMETERS = 1000


def captures(lengths=(64, 16, 40)):
    base, *others = [job(length) for length in lengths]
    return LengthCaptures(base, others)


def batches_of(tokens):
    tokens = np.array(tokens)
    return Batches(tokens, tokens.astype(float) ** 2, False, "")


def test_peaks_are_those_of_programs_of_these_lengths():
    tokens = np.random.default_rng(0).integers(16, 65, (40, 2, MICROBATCHES))
    memory = run_memory(captures(), batches_of(tokens))
    expected = [max(program(own).peak_bytes() for own in both) for both in tokens.tolist()]
    assert memory.peak_bytes.tolist() == [expected[number] for number in memory.iterations]
    assert sorted(memory.iterations) == list(range(40))
    assert memory.peak_bytes.max() == expected[memory.iteration]
    assert memory.longest in tokens[memory.iteration, memory.rank]


def test_one_long_sample_runs_out_once_in_many_iterations():
    tokens = np.full((3000, 2, MICROBATCHES), 20)
    tokens[1234, 1, 2] = 60
    usual = program([20] * 3).peak_bytes()
    memory = run_memory(captures(), batches_of(tokens), limit=usual + 1)
    assert memory.failing.tolist() == [1234]
    assert (memory.rank, memory.longest, memory.shortest_failing) == (1, 60, 60)
    assert memory.peak_bytes.max() == program([20, 20, 60]).peak_bytes()
    assert run_memory(captures(), batches_of(tokens), limit=1 << 40).failing.tolist() == []


def test_captures_without_memory_or_with_other_storages_say_nothing():
    other = job(16)
    # the second activation is the storage of the first one
    rows = other.programs[0].allocations.copy()
    rows["storage"][rows["storage"] == 11] = 10
    object.__setattr__(other.programs[0], "allocations", rows)
    mixed = LengthCaptures(job(64), [other])
    tokens = np.full((2, 2, MICROBATCHES), 16)
    assert run_memory(mixed, batches_of(tokens)) is None
    # those that ask alike decide if there are several
    mixed = LengthCaptures(job(64), [other, job(40), job(20)])
    memory = run_memory(mixed, batches_of(tokens))
    assert memory.lengths == (20, 40, 64)
    assert memory.outside == 1
    assert memory.peak_bytes[0] == program([16] * 3).peak_bytes()
    # how far they miss the one that is left out
    peak_bytes = program([16] * 3).peak_bytes()
    assert memory.left_out == (LeftOut(16, peak_bytes, peak_bytes),)


def test_temporaries_that_one_capture_lacks_have_no_bytes_there():
    tokens = np.full((1, 2, MICROBATCHES), 20)
    usual = run_memory(captures(), batches_of(tokens))
    short = job(16)
    rows = short.programs[0].allocations
    # the workspace of the second microbatch
    kept = rows[rows["storage"] != 31]
    assert len(kept) == len(rows) - 2
    object.__setattr__(short.programs[0], "allocations", kept)
    memory = run_memory(LengthCaptures(job(64), [short, job(40)]), batches_of(tokens))
    assert memory.lengths == usual.lengths == (16, 40, 64)
    assert memory.left_out == ()
    assert memory.peak_bytes.tolist() == usual.peak_bytes.tolist()


def test_the_command_says_at_which_sample_memory_runs_out(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for length in (16, 40, 64):
        (tmp_path / f"s{length}").write_text(dump(job(length)))
    rows = [{"length": 20, "count": 1000}, {"length": 60}]
    (tmp_path / "law.jsonl").write_text("\n".join(map(json.dumps, rows)))
    usual = program([20] * 3).peak_bytes()
    words = ["uneven", "s64", "lengths=law.jsonl", "capture=s16", "capture=s40", "iterations=300"]
    words += ["--limit", f"{usual + 1}B"]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert "of tensors on rank" in text
    assert "of 300 iterations (once in " in text
    assert "from samples of 60 tokens on" in text
    assert cli.main([*words, "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["drawn"]["memory"]
    assert memory["usual_bytes"] >= usual
    assert memory["shortest_failing"] == 60


def test_a_limit_in_gb_is_what_a_card_sold_as_such_has(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for length in (16, 40, 64):
        (tmp_path / f"s{length}").write_text(dump(job(length)))
    (tmp_path / "law.jsonl").write_text('{"length": 20}')
    words = ["uneven", "s64", "lengths=law.jsonl", "capture=s16", "capture=s40", "iterations=3"]
    assert cli.main([*words, "--limit", "80GB", "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["drawn"]["memory"]
    assert memory["limit_bytes"] == device_limit("80GB")[0] > 79 << 30
