"""Phases of training and generating: steps from files, and figures of programs by hand."""

import json

import pytest

from megatron_prism.cli import main as cli
from megatron_prism.core.errors import PrismError, UsageError
from megatron_prism.core.programs.program import Builder, Programs, save
from megatron_prism.core.world import World
from megatron_prism.features.phases.footprint import footprint
from megatron_prism.features.phases.phases import follow, phases
from megatron_prism.features.phases.steps import PARTS, Generate, Offload, Reload, Train, read_steps
from megatron_prism.memory.allocator import Settings

MIB = 1 << 20
# multiples of the allocator's rounding of large segments
NUMBERS = 40 * MIB  # parameters
WEIGHTS, GRADIENTS, OPTIMIZER = 2 * NUMBERS, 4 * NUMBERS, 12 * NUMBERS
ACTIVATIONS = 300 * MIB


def job(beside=0):
    """A rank with 18 bytes of states a parameter; ``beside``: bytes that no part owns."""
    made = Builder()
    made.memory(0, WEIGHTS, "param:buffer")
    made.memory(1, GRADIENTS, "grad:buffer")
    # two moments and the parameters in FP32, which are a category of their own
    for storage, note in ((2, "optim:exp_avg"), (3, "optim:exp_avg_sq"), (4, "master:parameters")):
        made.memory(storage, OPTIMIZER // 3, note)
    if beside:
        made.memory(6, beside, "other:workspace")
    made.add("compute", phase="forward", microbatch=0)
    made.memory(5, ACTIVATIONS, "first @a.py:1")
    made.add("compute", phase="backward", microbatch=0)
    made.memory(5, -ACTIVATIONS)
    made.add("compute", phase="optimizer")
    return Programs(World(1), (made.build(0),), [0], source={"tier": "meta"})


def figures(steps, beside=0, limit=1 << 40):
    """[(name, peak, stays, host)] of the one class."""
    found = phases(job(beside), steps, limit, device=None)
    (rows,) = found.classes.values()
    return [(row.name, row.peak, row.stays, row.host) for row in rows]


def test_the_saver_takes_all_segments_to_the_host():
    """Also the cache, in which nothing is alive: 18 bytes a parameter, and the activations'."""
    all_of_it = WEIGHTS + GRADIENTS + OPTIMIZER + ACTIVATIONS
    steps = [Train(), Offload("torch_memory_saver"), Generate(0, 9 * MIB, 2, 0), Reload(), Train()]
    assert figures(steps) == [
        ("train", all_of_it, all_of_it, 0),
        ("offload", all_of_it, 0, all_of_it),
        ("generate", 9 * MIB, 0, all_of_it),
        ("reload", all_of_it, all_of_it, 0),
        ("train", all_of_it, all_of_it, 0),
    ]


def test_copies_of_the_optimizer_are_12_bytes_a_parameter():
    steps = [Train(), Offload("copies", ("optimizer",)), Reload(("optimizer",))]
    (_, _, offload, reload_) = (None, *figures(steps))
    assert offload[2:] == (WEIGHTS + GRADIENTS, 12 * NUMBERS)
    assert reload_[2:] == (18 * NUMBERS, 0)


def test_the_saver_takes_and_returns_the_segments_that_are_there():
    """The cache of the iteration was given back with the copies."""
    steps = [Train(), Offload("copies", ("optimizer",)), Reload(("optimizer",))]
    steps += [Offload("torch_memory_saver"), Generate(0, 9 * MIB, 2, 0), Reload(), Train()]
    rows = figures(steps)
    assert rows[4] == ("generate", 9 * MIB, 0, 18 * NUMBERS)
    assert rows[5] == ("reload", 18 * NUMBERS, 18 * NUMBERS, 0)
    assert rows[6] == ("train", 18 * NUMBERS + ACTIVATIONS, 18 * NUMBERS + ACTIVATIONS, 0)


@pytest.mark.parametrize(("outside", "freed"), [(0, 0), (3 * MIB, 3 * MIB), (9 * MIB, 5 * MIB)])
def test_groups_give_back_no_more_than_is_outside_of_the_allocator(outside, freed):
    (program,) = job().programs
    reserved = 18 * NUMBERS + ACTIVATIONS
    sizes = {"peak_reserved": reserved, "peak_device": reserved + outside, "nccl": 5 * MIB}
    held = footprint(program, sizes, Settings())
    (row,) = follow([Offload("torch_memory_saver", ends_groups=True)], held)
    assert row.stays == outside - freed


def test_gradients_are_not_copied():
    (_, offload, reload_) = figures([Train(), Offload("copies"), Reload()])
    assert offload[2:] == (0, (2 + 12) * NUMBERS)
    # without the cache of the iteration
    assert reload_[1:] == (18 * NUMBERS, 18 * NUMBERS, 0)


def test_what_no_part_owns_stays_and_the_saver_takes_it_too():
    beside = 64 * MIB
    (_, copies) = figures([Train(), Offload("copies")], beside)
    assert copies[2] == beside
    (_, saver) = figures([Train(), Offload("torch_memory_saver")], beside)
    assert saver[2] == 0


def test_a_segment_stays_while_a_block_of_it_is_in_use():
    """Small tensors of all kinds share segments of 2 MiB."""
    made = Builder()
    made.memory(0, 1 << 19, "param:a")
    made.memory(1, 1 << 19, "other:b")
    made.add("compute", phase="optimizer")
    small = Programs(World(1), (made.build(0),), [0], source={"tier": "meta"})
    (rows,) = phases(small, [Train(), Offload("copies")], 1 << 40, device=None).classes.values()
    assert rows[1].stays == 2 * MIB
    assert rows[1].host == 1 << 19


@pytest.mark.parametrize(
    ("sleep", "stays", "host"), [(0, 70 * MIB, 0), (1, 10 * MIB, 20 * MIB), (2, 10 * MIB, 0)]
)
def test_levels_of_sleep(sleep, stays, host):
    generate = Generate(20 * MIB, 40 * MIB, sleep, 10 * MIB)
    rows = figures([Train(), Offload("torch_memory_saver"), generate, Reload()])
    saved = rows[1][3]
    assert rows[2] == ("generate", 70 * MIB, stays, saved + host)
    # what the engine keeps is beside the training process
    assert rows[3][1] == rows[0][1] + stays


def test_weights_that_come_back_first_are_beside_the_engine():
    """As where new weights are sent to the engine while it wakes up."""
    steps = [Train(), Offload("copies"), Reload(("weights",)), Generate(WEIGHTS, 8 * MIB, 2, 0)]
    rows = figures([*steps, Reload(("gradients", "optimizer")), Train()])
    assert rows[2][2:] == (WEIGHTS, OPTIMIZER)
    assert rows[3][1] == WEIGHTS + WEIGHTS + 8 * MIB
    assert rows[4][2:] == (18 * NUMBERS, 0)


def test_the_phase_that_decides_and_the_verdict():
    steps = [Train(), Offload("torch_memory_saver"), Generate(0, 2000 * MIB, 2, 0), Reload()]
    found = phases(job(), steps, 1500 * MIB, device=None)
    assert found.decides.name == "generate"
    assert not found.fits
    text = found.to_text()
    assert text.startswith("does not fit: the limit is 1.465 GiB")
    assert "to generate: 1.953 GiB, 500 MiB too much" in text
    assert phases(job(), steps, 2000 * MIB, device=None).fits


def written(folder, text):
    path = folder / "rl.yaml"
    path.write_text(text)
    return path


def test_a_file_of_phases(tmp_path):
    text = """
phases:
  - train
  - offload: {with: copies, parts: [optimizer, weights], destroy_groups: true}
  - generate: {weights: 1GiB, cache: 512MiB, sleep: 1}
  - reload: [weights]
  - reload: [optimizer, gradients]
"""
    with pytest.raises(UsageError, match="not offloaded"):
        read_steps(written(tmp_path, "[train, reload]"))
    steps = read_steps(written(tmp_path, text.replace("reload: [optimizer, gradients]", "reload")))
    assert steps[1] == Offload("copies", ("weights", "optimizer"), True)
    assert steps[2] == Generate(1 << 30, 512 * MIB, 1, 0)
    assert steps[3:] == [Reload(("weights",)), Reload(PARTS)]
    short = "[train, {offload: torch_memory_saver}, {generate: 60GiB}, reload]"
    assert read_steps(written(tmp_path, short))[2] == Generate(0, 60 << 30, 2, 0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "train",
        "[]",
        "- dance",
        "- train: 3",
        "- {train: , reload: }",
        "- offload: tape",
        "- offload: {with: torch_memory_saver, parts: [weights]}",
        "- offload: {with: copies, parts: [activations]}",
        "- offload: {with: copies, parts: []}",
        "- generate: {sleep: 3}",
        "- generate: {cache: -1}",
        "- generate: {cache: much}",
        "- generate: {tokens: 3}",
        "- reload",
        "- offload\n- train",
        "- offload\n- reload: [weights]",
        "- offload\n- offload",
        "- offload: {with: copies}\n- reload: [weights]\n- train",
        "- [",
    ],
)
def test_what_is_no_list_of_phases_is_refused(text, tmp_path):
    with pytest.raises(PrismError):
        read_steps(written(tmp_path, text))


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save(job(), tmp_path / "job.prism")
    written(tmp_path, "[train, offload, {generate: 3GiB}, reload]")
    words = ["phases", "job.prism", "rl.yaml", "--device", "none"]
    assert cli.main([*words, "--limit", "4GiB", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    (rows,) = answer["classes"].values()
    assert [row["name"] for row in rows] == ["train", "offload", "generate", "reload"]
    assert rows[2]["peak"] == 3 << 30
    assert "not held against a real job" in answer["provenance"]
    assert cli.main([*words, "--limit", "2GiB"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "generate" in text
    assert answer["provenance"] in text
    assert cli.main(words) == 2
