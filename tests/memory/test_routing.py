"""Draws of routing: what a probe shows, the laws, and peaks against counting by hand."""

import json
import subprocess
import sys

import numpy as np
import pytest
from helpers.needs import TRAINING
from helpers.pretrain import JOB, SCRIPT

from megatron_prism.cli.main import main
from megatron_prism.core.errors import UsageError
from megatron_prism.core.programs import program
from megatron_prism.core.programs.program import Builder, Programs, RepeatedEvents
from megatron_prism.core.programs.slices import open_programs
from megatron_prism.core.world import World
from megatron_prism.memory import job_peaks, routing
from megatron_prism.runtime.devices.moe_dispatch import ExpertLoads

SENT, EXPERTS, TOPK, WAYS = 64, 8, 2, 4  # a rank has two of the experts


def iteration(rows):
    """Two layers, ``rows`` copies of tokens each: 10 bytes a row kept, 4 more for a moment."""
    made = Builder()
    made.memory(0, 1000, "param:all")
    made.add("compute", phase="forward", microbatch=0)
    for layer, count in enumerate(rows):
        made.memory(10 + layer, 10 * count, f"layers.{layer}")
        made.memory(20 + layer, 4 * count, f"layers.{layer} @moe")
        made.memory(30 + layer, 77, f"layers.{layer} @norm")
        made.add("compute", phase="forward", microbatch=0)
        made.memory(20 + layer, -4 * count)
    made.add("compute", phase="backward", microbatch=0)
    for layer, count in enumerate(rows):
        made.memory(10 + layer, -10 * count)
    made.routes = np.array([(SENT, EXPERTS, TOPK, WAYS), (0, 0, rows[0], 0), (1, 0, rows[1], 0)])
    return made.build(0)


def by_hand(rows):
    return int(iteration(rows).live_bytes().max())


@pytest.fixture
def known():
    plain = iteration((64, 64))
    more = routing.more_tokens(plain.routes)
    probe = iteration([64 + 2 * WAYS * more(layer, 0) for layer in (0, 1)])
    return routing.learned(plain, probe)


def test_a_probe_tells_which_call_a_storage_depends_on(known):
    notes = [known.strings[n] for n in known.allocations["note"]]
    calls = {(note, call) for note, (call, _) in zip(notes, known.routed.tolist(), strict=True)}
    assert {("layers.0", 0), ("layers.1", 1), ("layers.0 @moe", 0), ("layers.1 @moe", 1)} <= calls
    assert {("layers.0 @norm", -1), ("param:all", -1)} <= calls


@pytest.mark.parametrize(("tokens", "calls"), [(1024, 64), (1024, 10), (48, 4), (48, 64)])
def test_a_probe_gives_no_expert_more_tokens_than_there_are(tokens, calls):
    """The allgather dispatcher selects an expert's tokens of all that it has gathered."""
    copies_of_token, experts = 2, 4
    even = tokens * copies_of_token // experts
    of_calls = [(layer, 0, even, 0) for layer in range(calls)]
    routes = np.array([(tokens * copies_of_token, experts, copies_of_token, 1), *of_calls])
    more = routing.more_tokens(routes)
    further = [more(layer, 0) for layer in range(calls)]
    assert max(*further, more(calls, 0)) + even <= tokens
    # each call has another number, or none has more, which ``learned`` does not read
    assert len(set(further)) == calls or not any(further)
    # where each rank sends tokens, nothing limits what a probe sends
    routes[0, 3] = 2
    assert routing.more_tokens(routes)(calls - 1, 0) == routing.STEP * calls


@pytest.mark.parametrize("rows", [(64, 64), (0, 200), (200, 0), (17, 93), (256, 256)])
def test_a_peak_of_other_loads_is_what_a_run_with_them_has(known, rows):
    assert routing._Timeline(known).peak(np.array(rows)) == by_hand(rows)


def microbatches(loads):
    """Forwards of a layer with so many copies of tokens each, and where the events of each are."""
    made, spans = Builder(), []
    made.memory(0, 1000, "param:all")
    made.add("compute", phase="forward", microbatch=-1)
    for number, rows in enumerate(loads):
        first = made.position()[1]
        made.memory(10 + number, 10 * rows, "layers.0")
        made.memory(20 + number, 500, "layers.0 @norm")
        made.add("compute", phase="forward", microbatch=number)
        made.memory(20 + number, -500)
        spans.append((first, made.position()[1]))
    routes = [(0, turn, rows, 0) for turn, rows in enumerate(loads)]
    made.routes = np.array([(SENT, EXPERTS, TOPK, WAYS), *routes])
    return made.build(0), spans


def test_a_microbatch_that_a_probe_repeats_depends_on_its_own_call():
    plain, _ = microbatches([64] * 4)
    more = routing.more_tokens(plain.routes)
    grown = [64 + 2 * WAYS * more(0, turn) for turn in range(4)]
    all_run, _ = microbatches(grown)
    known = routing.learned(plain, all_run)

    # the third is written down as the second was
    some_run, spans = microbatches([grown[0], grown[1], grown[1], grown[3]])
    repeated = [RepeatedEvents(spans[2], spans[1], {0: 1})]
    found = routing.learned(plain, some_run, repeated)
    assert found.routed[:, 0].tolist() == known.routed[:, 0].tolist()
    assert set(known.routed[:, 0].tolist()) == {-1, 0, 1, 2, 3}
    rows = np.array([0, 100, 300, 20])
    assert routing._Timeline(found).peak(rows) == routing._Timeline(known).peak(rows)

    # without being told it takes the third for the second
    assert routing.learned(plain, some_run).routed[:, 0].tolist() != known.routed[:, 0].tolist()


def test_other_iterations_are_no_probe():
    plain, other = iteration((64, 64)), iteration((128, 192))
    strange = Builder()
    strange.add("compute")
    strange.memory(1, 5, "another")
    strange.routes = other.routes
    assert not routing.learned(plain, strange.build(0)).routed.size
    assert routing.draw(plain, routing.law("uniform"), 3) is None


def test_laws_spread_as_they_say(known):
    even = routing.draw(known, routing.law("uniform"), 200)
    skewed = routing.draw(known, routing.law("zipf:1.5"), 200)
    assert even.ranks.shape == (200, 4)
    assert by_hand((64, 64)) * 0.9 < even.quantile(0.05) < even.quantile(0.95)
    assert skewed.quantile(0.95) > even.quantile(0.95) * 1.1
    assert skewed.ranks.max() <= by_hand((2 * 128, 2 * 128))  # no expert has more than all tokens
    one, some = skewed.beyond(even.quantile(0.99))
    assert 0 < one < some <= 1
    capped = routing.draw(known, routing.law("zipf:1.5"), 200, capacity=1.0)
    assert capped.ranks.max() <= by_hand((64, 64))


def test_shares_beyond_all_tokens_go_to_others():
    found = routing._at_most(np.array([0.7, 0.2, 0.1, 0.0]), 0.5)
    assert found.tolist() == pytest.approx([0.5, 1 / 3, 1 / 6, 0.0])


def test_a_recording_is_a_law(known, tmp_path):
    chosen = np.zeros((16, EXPERTS), dtype=bool)
    chosen[:, [0, 1]] = True  # all tokens to the first rank's experts
    packed = np.packbits(chosen, axis=-1)
    head = np.frombuffer(b"{}", dtype=np.uint8)
    np.savez(tmp_path / "rank-000000.npz", head=head, **{"route 3#0": packed})
    found = routing.draw(known, routing.law(str(tmp_path)), 2)
    assert found.ranks[:, 0].tolist() == [by_hand((256, 256))] * 2
    assert found.ranks[:, 1:].max() == by_hand((0, 0))
    for text in ("pareto", "zipf:", "zipf:x", str(tmp_path / "none")):
        with pytest.raises(UsageError, match="--routing"):
            routing.law(text)


def test_slices_keep_it(known, tmp_path):
    made = Programs(World(1), (known,), np.zeros(1, dtype=np.int32))
    back = program.load(program.save(made, tmp_path / "a.prism")).programs[0]
    assert np.array_equal(back.routed, known.routed)
    assert np.array_equal(back.routes, known.routes)


RUN = """
import sys
from pathlib import Path
from megatron_prism.core.jobs import recipe as recipes
from megatron_prism.emulate.capture import capture
from megatron_prism.emulate.jobs import recipe_script
from megatron_prism.emulate.rank.session import Session
from megatron_prism.runtime.devices.moe_dispatch import loads

folder, seed, *settings = sys.argv[1:]
recipe = recipes.load("guard-gpt_16gpu_tp2pp2vp2_h200", settings)
if int(seed):
    loads.more = lambda layer, turn: hash((layer, turn, int(seed))) % 193 - 96
    capture.StockCapture._starts_probe = lambda self: False
recipe_script.run(Session(), recipe, 0, Path(folder))
"""
MOE = """
num_experts=8 moe_router_topk=2 moe_ffn_hidden_size=512 seq_length=512
max_position_embeddings=512 ep=4 micro_batch_size=4 global_batch_size=64
num_layers=4 train_iters=2
""".split()
FULL = """
recompute_granularity=full recompute_method=uniform recompute_num_layers=1
""".split()


@pytest.mark.megatron
@pytest.mark.parametrize(
    "recompute",
    [pytest.param((), id="kept"), pytest.param(FULL, id="recomputed", marks=pytest.mark.ci)],
)
def test_a_peak_is_that_of_a_run_with_these_loads(tmp_path, recompute):
    """A capture with even loads predicts, to the byte, the peak of a run with others."""
    pytest.importorskip("megatron.core")
    made = []
    for seed in (0, 1):
        words = [sys.executable, "-c", RUN, str(tmp_path / str(seed)), str(seed), *MOE, *recompute]
        subprocess.run(words, check=True)
        (file,) = (tmp_path / str(seed)).glob("*.prism")
        made.append(program.load(file).programs[0])
    even, other = made
    assert even.live_bytes().max() != other.live_bytes().max()
    found = routing._Timeline(even).peak(_rows(even, 1))
    assert found == other.live_bytes().max()


SCRIPT_MOE = """
--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 2
--moe-token-dispatcher-type alltoall --disable-bias-linear --num-layers 1 --global-batch-size 4
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
""".split()
RECIPE_MOE = "num_experts=4 moe_router_topk=2 ep=2 train_iters={iters}"


@pytest.mark.ci
@pytest.mark.parametrize(
    "job",
    [
        pytest.param(("script", "--train-iters", "1"), marks=TRAINING),
        pytest.param(("script", "--train-iters", "5000", "--eval-interval", "1"), marks=TRAINING),
        ("recipe", "1"),
    ],
    ids=" ".join,
)
@pytest.mark.megatron
def test_every_capture_of_an_moe_job_shows_what_depends_on_routing(tmp_path, capsys, job):
    """On tier meta, however many iterations the job itself would make."""
    pytest.importorskip("megatron.core")
    kind, *settings = job
    folder = str(tmp_path / "slices")
    if kind == "script":
        ours = ["--prism-tier", "meta", "--prism-world-size", "4"]
        words = ["capture", "-o", folder, *ours, "--", str(SCRIPT), *JOB, *SCRIPT_MOE, *settings]
    else:
        changes = RECIPE_MOE.format(iters=settings[0]).split()
        recipe = "guard-gpt_16gpu_tp2pp2vp2_h200"
        words = ["capture", recipe, "-o", folder, *changes]
    assert main(words) == 0, capsys.readouterr()
    made = open_programs(folder).programs
    assert made
    for rank in made:
        drawn = routing.draw(rank, routing.law("zipf:1"), 20)
        assert drawn is not None
        assert len(np.unique(drawn.ranks)) > 1


def test_why_nothing_can_be_drawn_is_said():
    def refused(program, tier="meta"):
        made = Programs(World(1), (program,), np.zeros(1, dtype=np.int32), source={"tier": tier})
        return str(job_peaks._nothing_to_draw(made))

    dense = Builder()
    dense.add("compute")
    every_copy = SENT * WAYS
    assert "the peak is the same for any routing" in refused(iteration((every_copy, every_copy)))
    assert "no iteration with other loads" in refused(iteration((64, 64)))
    assert "no call of a dispatcher" in refused(dense.build(0))
    assert "they are of tier cuda" in refused(dense.build(0), tier="cuda")


def test_a_rank_with_all_experts_keeps_every_copy():
    """Two expert-tensor ranks, no expert parallelism: what each sends, each experts' part gets."""
    drawn = ExpertLoads()
    drawn.more = lambda layer, turn: 5
    even = np.array([3, 3, 2, 2])
    drawn.shape = (10, 4, 2, 2)
    assert drawn.add(object(), even, 2).tolist() == even.tolist()
    drawn.shape = (20, 8, 2, 4)
    assert drawn.add(object(), even, 4).tolist() == (even + 5).tolist()


@pytest.mark.parametrize(
    "dispatcher", ["alltoall", pytest.param("allgather", marks=pytest.mark.ci)]
)
@pytest.mark.megatron
def test_experts_of_a_tensor_parallel_job_without_expert_parallelism(tmp_path, capsys, dispatcher):
    """Its capture ended in a gradient of another shape than the tokens."""
    pytest.importorskip("megatron.core")
    folder = str(tmp_path / "slices")
    job = ["num_experts=4", "moe_router_topk=2", "ep=1", "train_iters=2"]
    job += [f"moe_token_dispatcher_type={dispatcher}"]
    assert main(["capture", "guard-gpt_16gpu_tp2pp2vp2_h200", "-o", folder, *job]) == 0
    for rank in open_programs(folder).programs:
        assert routing.has_all_experts(rank)
    assert main(["fit", folder, "--draws", "20"]) == 2
    assert "the peak is the same for any routing" in capsys.readouterr().err


def _rows(made, seed):
    """Copies in every call of a run with this seed."""
    _, experts, _, ways = made.routes[0].tolist()
    local = made.routes[1:, 2] * experts // (made.routes[0, 0] * ways)
    more = [hash((layer, turn, seed)) % 193 - 96 for layer, turn in made.routes[1:, :2].tolist()]
    return made.routes[1:, 2] + np.array(more) * local * ways


def listed(tmp_path, value):
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(value))
    return routing.law(str(file))


def test_listed_tokens_decide_the_peak_of_each_rank(known, tmp_path):
    # four ranks of two experts: the first has all tokens, as many as two experts of a token allow
    drawn = routing.draw(known, listed(tmp_path, [7, 7, 0, 0, 0, 0, 0, 0]), 3)
    most = SENT * WAYS
    assert drawn.ranks.tolist() == [[by_hand((most, most)), *[by_hand((0, 0))] * 3]] * 3
    assert drawn.law.startswith("tokens of ")
    # an expert cannot have a token twice: what is beyond goes to the others
    hot = routing.draw(known, listed(tmp_path, [1, 0, 1e-9, 0, 0, 0, 0, 0]), 3)
    assert hot.ranks[:, :2].min() > by_hand((most // 4, most // 4))
    assert (hot.ranks[:, 2:] == by_hand((0, 0))).all()


@pytest.mark.parametrize("power", [0, 1, 2, 4])
def test_no_draw_gives_an_expert_more_tokens_than_there_are(power):
    """As drawing distinct experts for each token, which shares that are at their limit show."""
    tokens, topk = 512, 2
    weights = np.arange(1.0, 9) ** -power
    shares = routing._at_most(weights / weights.sum(), 1 / topk)
    random = np.random.default_rng(1)
    drawn = [routing._draw_counts(random, tokens * topk, shares, topk) for _ in range(500)]
    assert max(counts.max() for counts in drawn) <= tokens
    assert {int(counts.sum()) for counts in drawn} == {tokens * topk}
    assert np.mean(drawn, axis=0) == pytest.approx(shares * tokens * topk, rel=0.05, abs=3)


def test_tokens_by_layer_of_a_pipeline_are_refused(tmp_path):
    programs = Programs.one_per_rank([iteration((64, 64))] * 2, World(2, pp=2))
    law = listed(tmp_path, {"0": [1] * 8})
    with pytest.raises(UsageError, match="by MoE layer"):
        job_peaks.peak_memory(programs, draws=job_peaks.Draws(law, 1))


def test_listed_tokens_are_those_of_each_layer(known, tmp_path):
    layers = {"0": [1, 1, 0, 0, 0, 0, 0, 0], "1": [0, 0, 0, 0, 0, 0, 1, 1]}
    drawn = routing.draw(known, listed(tmp_path, layers), 2)
    most = SENT * WAYS
    first, *others = [by_hand((most, 0)), by_hand((0, 0)), by_hand((0, 0)), by_hand((0, most))]
    assert drawn.ranks.tolist() == [[first, *others]] * 2


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([1, 2], "tokens of 2 experts, and this job has 8"),
        ([0] * 8, "no expert of MoE layer [01] a token"),
        ({"0": [1] * 8}, "says nothing of MoE layer 1"),
        ([1, -2], "is not a file of tokens by expert"),
        ("zipf", "is not a file of tokens by expert"),
    ],
)
def test_tokens_that_are_none_of_the_jobs_are_refused(known, tmp_path, value, says):
    with pytest.raises(UsageError, match=says):
        routing.draw(known, listed(tmp_path, value), 1)
