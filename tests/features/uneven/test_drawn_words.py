"""Lengths in the words of predict, replay and fit: one run of drawn batches answers all of them."""

import json

import numpy as np
import pytest
from helpers.spreads import spread
from helpers.uneven_worlds import length_job, memory_job

from megatron_prism.cli import main as cli
from megatron_prism.core.programs.program_text import dump
from megatron_prism.features.predict.predict import predict
from megatron_prism.features.uneven.drawn import steps_of_run
from megatron_prism.features.uneven.mixed_lengths import LengthCaptures
from megatron_prism.features.uneven.rank_programs import Sources, apply_inputs
from megatron_prism.features.uneven.samples import Batches
from megatron_prism.replay.priced_graph import replay

OTHERS = ("capture=s16", "capture=s40")


def drawn_run(iterations=12):
    captures = LengthCaptures(length_job(64), [length_job(16), length_job(40)])
    sources = Sources(captures.captured, None, None, captures)
    world = captures.captured.world
    shape = iterations, world.dp, captures.microbatches
    # programs of captured lengths have times that can be replayed
    tokens = np.random.default_rng(5).choice((16, 40, 64), shape, p=(0.8, 0.15, 0.05))
    return sources, Batches(tokens, tokens.astype(float) ** 2, False, "drawn by hand")


def test_without_variation_a_prediction_has_the_steps_of_replayed_programs():
    sources, batches = drawn_run()
    steps = steps_of_run(sources, batches)
    result = predict(sources.captured, steps=steps, variability=spread(), samples=1200)
    world = sources.captured.world
    replayed = []
    for iteration in range(len(batches)):
        programs = apply_inputs(sources, batches.inputs_of(iteration, world)).programs
        replayed.append(replay(programs).iteration_ns)
    # each step as often as every other, and no other
    assert len(set(replayed)) >= 4
    assert result.draws == pytest.approx(np.repeat(sorted(replayed), 100), rel=0.002)
    assert result.inputs.median_ns == pytest.approx(np.median(replayed), rel=0.002)
    # lengths are what moves the tail of this job
    alike = result.inputs.changed["all samples of the mean length"]
    dealt = result.inputs.changed["the same microbatches, dealt by their work"]
    assert alike < dealt < result.inputs.changed_from


def test_variation_comes_on_top_of_lengths():
    sources, batches = drawn_run()
    steps = steps_of_run(sources, batches)
    still = predict(sources.captured, steps=steps, variability=spread(), samples=2400)
    varied = predict(sources.captured, steps=steps, variability=spread(step=0.1), samples=2400)
    assert len(np.unique(varied.draws)) > 2000
    # the slowest of eight ranks is slower than usual
    assert np.quantile(varied.draws, 0.95) > 1.03 * np.quantile(still.draws, 0.95)
    again = predict(sources.captured, steps=steps, variability=spread(step=0.1), samples=2400)
    assert again.draws.tolist() == varied.draws.tolist()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for length in (16, 40, 64):
        (tmp_path / f"s{length}").write_text(dump(length_job(length)))
        (tmp_path / f"m{length}").write_text(dump(memory_job(length)))
    rows = [{"length": 20, "count": 500}, {"length": 60}]
    (tmp_path / "m64.jsonl").write_text('{"length": 64}')
    (tmp_path / "law.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def prism(*words, capsys):
    return cli.main(words), *capsys.readouterr()


def test_predict_replay_and_uneven_draw_the_same_steps(folder, capsys):
    words = ("s64", "lengths=law.jsonl", *OTHERS)
    status, out, _ = prism("predict", *words, "iterations=30", "--samples", "200", capsys=capsys)
    assert status == 0
    assert "30 iterations of 4 dp ranks x 3 microbatches, drawn from law.jsonl, seed 0" in out
    assert "all samples of the mean length" in out
    _, replayed, _ = prism("replay", *words, "--iterations", "30", "--json", capsys=capsys)
    _, uneven, _ = prism("uneven", *words, "iterations=30", "--json", capsys=capsys)
    assert json.loads(replayed) == json.loads(uneven)
    _, text, _ = prism("replay", *words, "--iterations", "30", capsys=capsys)
    assert "step time     median" in text
    assert "memory" not in text


def test_the_seed_of_predict_draws_other_samples(folder, capsys):
    words = ("predict", "s64", "lengths=law.jsonl", *OTHERS, "iterations=20", "--samples", "200")
    texts = []
    for seed in ("1", "2"):
        _, out, _ = prism(*words, "--seed", seed, "--json", capsys=capsys)
        texts.append(json.loads(out)["inputs"]["text"])
    assert texts[0] != texts[1]


def test_fit_says_how_often_a_run_does_not_fit(folder, capsys):
    usual = memory_job(20).programs[0].peak_bytes()
    longest = memory_job(60).programs[0].peak_bytes()
    words = ("fit", "m64", "lengths=law.jsonl", "capture=m16", "capture=m40", "iterations=300")
    words += ("--device", "none", "--json")
    status, out, _ = prism(*words, "--limit", "80GB", capsys=capsys)
    assert status == 0
    memory = json.loads(out)["drawn"]["memory"]
    assert usual < memory["peak_bytes"] <= longest
    # what the allocator rounds up for the job as captured is not left to tensors
    captured = prism("fit", "m64", "--device", "none", "--limit", "80GiB", "--json", capsys=capsys)
    (figures,) = json.loads(captured[1])["classes"].values()
    beside = figures["peak_reserved"] - figures["peak_allocated"]
    limit = f"{usual + 1 + beside}B"
    status, out, _ = prism(*words, "--limit", limit, capsys=capsys)
    assert status == 1
    memory = json.loads(out)["drawn"]["memory"]
    assert memory["limit_bytes"] == usual + 1
    assert memory["shortest_failing"] == 60
    status, out, _ = prism(*words[:-1], "--limit", limit, capsys=capsys)
    assert "of 300 iterations (once in " in out
    assert "segments beyond tensors, NCCL and the context take" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["predict", "s64", "lengths=none.jsonl", *OTHERS], "none.jsonl: no file of that name"),
        (["predict", "s64", "lengths=law.jsonl"], "one capture does not say how long"),
        (["predict", "s64", "lengths=dp=1:64", *OTHERS], "draws from the samples of a run"),
        (["predict", "s64", "lengths=law.jsonl", *OTHERS, "dp=8"], "does not understand dp=8"),
        (["replay", "s64", "lengths=dp=1:64", *OTHERS], "draws from the samples of a run"),
        (["replay", "s64", "lengths=law.jsonl", *OTHERS, "--html", "x.html"], "--html shows one"),
        (["replay", "s64", "--iterations", "101"], "--iterations 101 of one kind"),
        (["fit", "m64", "lengths=law.jsonl", "--free", "1GiB"], "--free is of a job whose samples"),
        (["fit", "m64", "lengths=m64.jsonl", "--limit", "80GB"], "do not say what memory other"),
        (["fit", "m64", "lengths=dp=1:64", "capture=m16", "--limit", "80GB"], "draws from the"),
    ],
)
def test_what_cannot_be_answered_has_a_fix(folder, words, says, capsys):
    status, _, err = prism(*words, capsys=capsys)
    assert status == 2
    assert says in err
    assert "fix: " in err


def test_lengths_that_stop_the_job_stop_a_prediction(folder, capsys):
    for length in (16, 40, 64):
        text = (folder / f"s{length}").read_text().replace("variable_seq_lengths", "other_lengths")
        (folder / f"s{length}").write_text(text)
    words = ("s64", "lengths=law.jsonl", *OTHERS)
    status, _, err = prism("predict", *words, capsys=capsys)
    assert status != 0
    assert "the job stops in iteration" in err
    status, out, _ = prism("replay", *words, capsys=capsys)
    assert status == 1
    assert "shape in PIPELINE_MODEL_PARALLEL_GROUP" in out


def test_copies_of_the_model_that_differ_are_drawn_as_one_world():
    # two ranks of tp in each dp rank: one slow replica is not half of each
    from helpers.pricing import priced
    from helpers.spreads import ALL, same

    from megatron_prism.core.programs.ops import Op
    from megatron_prism.core.world import World
    from megatron_prism.features.predict.sampler import replicas

    job = same(World(4, tp=2), [Op("compute", ns=1000), Op("all_reduce", ALL, "bf16", 1, 1, "sum")])
    alike = priced(job, 1000)
    assert replicas(alike.graph).count == 2
    slow = alike.again(slow={0: 2, 1: 2})
    assert replicas(slow.graph).count == 1
