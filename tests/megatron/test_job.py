"""The main job through the installed megatron-core: stages, communication, memory, bad input."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from helpers import forks

from megatron_prism.core.errors import PrismError
from megatron_prism.core.files import artefact_folder
from megatron_prism.core.jobs import recipe as recipes
from megatron_prism.emulate.jobs import recipe_job

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.megatron

TE_WORKSPACE = 32 << 20  # cuBLAS workspace that Transformer Engine keeps on Hopper
# and those of torch's own products, which only the last stage asks for: main thread, autograd
TORCH_WORKSPACES = 2 * 32 << 20
SMALL = [
    "hidden_size=256",
    "ffn_hidden_size=512",
    "num_attention_heads=8",
    "num_query_groups=8",
    "seq_length=64",
    "vocab_size=1000",
    "world_size=64",
    "global_batch_size=16",
]


def small(*more, name="llama3-70b_1024gpu_tp8pp4vp5_h200"):
    return recipes.load(name, [*SMALL, *more])


def rows(summary):
    return {(r["group"], r["op"]): (r["calls"], r["bytes"]) for r in summary["communication"]}


@pytest.fixture(scope="module")
def dense():
    return recipe_job.emulate(small("num_layers=20"), None)


def test_every_stage_trains(dense):
    assert [s["stage"] for s in dense.ranks] == [0, 1, 2, 3]
    assert all(s["steps"] == 2 for s in dense.ranks)
    assert all(s["layers"] == [1] * 5 for s in dense.ranks)


def test_parameters_are_those_of_the_model(dense):
    """Per layer and tensor-parallel rank: qkv 3h*h/8, proj h*h/8, swiglu 3h*f/8, two norms."""
    h, f, tp, layers, vocab = 256, 512, 8, 5, 1024
    layer = (3 * h * h + h * h + 3 * h * f) // tp + 2 * h
    middle = layers * layer
    edge = vocab * h // tp
    assert [s["parameters"] for s in dense.ranks] == [
        middle + edge,
        middle,
        middle,
        middle + edge + h,  # and the final norm
    ]


def test_sends_and_receives_are_those_of_the_interleaved_schedule(dense):
    """m microbatches, v chunks, p stages: every chunk boundary is crossed both ways."""
    m, v, p = 8, 5, 4
    size = 64 // 8 * 256 * 2  # [seq / tp, 1, hidden] bf16
    for s in dense.ranks:
        sent, received = (rows(s)["PIPELINE_MODEL_PARALLEL_GROUP", op] for op in ("send", "recv"))
        ends = 1 if s["stage"] in (0, p - 1) else 0
        crossings = m * (2 * v - ends)
        assert sent == received == (crossings, crossings * size), s["stage"]


def test_gradients_are_reduced_once_per_iteration(dense):
    for s in dense.ranks:
        _, size = rows(s)["DATA_PARALLEL_GROUP_WITH_CP", "reduce_scatter"]
        padded = 4 * s["parameters"]
        assert padded <= size <= padded * 1.2, s["stage"]  # buckets are padded


def test_peaks_are_labelled_and_earlier_stages_hold_more_activations(dense):
    peaks = [s["memory"]["peaks"][-1] for s in dense.ranks]
    assert all("phase" in p["at"] for p in peaks)
    assert peaks[1]["bytes"] > peaks[2]["bytes"]


def test_live_memory_covers_weights_gradients_and_states(dense):
    """bf16 weights 2 + fp32 gradients 4 bytes, and 12 / dp of optimizer state per parameter."""
    dp = 2
    for s in dense.ranks:
        floor = s["parameters"] * (6 + 12 / dp)
        last = s["stage"] == len(dense.ranks) - 1
        kept = TE_WORKSPACE + TORCH_WORKSPACES * last
        assert floor <= s["memory"]["after"] <= floor * 1.3 + kept, s["stage"]


def test_real_text_on_the_cpu_has_a_falling_loss(tmp_path):
    recipe = recipes.load("tiny-gpt_1cpu", ["train_iters=12"])
    result = recipe_job.emulate(recipe, tmp_path / "out")
    losses = result.ranks[0]["losses"]
    assert losses[-1] < losses[0] - 1.0
    assert result.ranks[0]["master_parameter_moved"] is True
    written = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert written["ranks"][0]["losses"] == losses
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "rank-000000.json",
        "recipe.json",
        "summary.json",
    ]


def test_latent_attention_and_further_tokens_have_the_parameters_of_their_sizes():
    sizes = {"q_lora_rank": 32, "kv_lora_rank": 24, "qk_head_dim": 40, "qk_pos_emb_head_dim": 16,
             "v_head_dim": 48, "mtp_num_layers": 1}  # fmt: skip
    settings = [f"{name}={size}" for name, size in sizes.items()]
    settings += ["prism.tier=meta", "transformer_impl=transformer_engine",
                 "multi_latent_attention=true", "train_iters=1"]  # fmt: skip
    result = recipe_job.emulate(recipes.load("tiny-gpt_1cpu", settings), None)
    hidden, heads, wide, words = 128, 4, 384, 256
    attention = hidden * (32 + 24 + 16) + heads * (32 * (40 + 16) + 24 * (40 + 48) + 48 * hidden)
    layer = attention + 3 * hidden * wide + 2 * hidden  # two norms
    further = layer + 2 * hidden * hidden + 3 * hidden
    assert result.ranks[0]["parameters"] == 2 * layer + further + words * hidden + hidden


@pytest.fixture(scope="module")
def parameters_of_stages():
    """Parameters of each stage of a job with a layout and of one with a hybrid pattern."""
    layout = "pipeline_model_parallel_layout='Et*2|t*3|t*2|tL'"
    pattern = "hybrid_override_pattern=M*-M"
    recipe_of_job = {
        "layout": small("num_layers=8", "vpp=null", layout),
        "pattern": small("num_layers=4", "vpp=null", "position_embedding_type=none", pattern),
    }
    ranks, names = [], []
    for name, recipe in recipe_of_job.items():
        for rank in recipe_job.ranks_of(recipe):
            ranks.append((recipe, rank, None))
            names.append(name)
    parameters = {name: [] for name in recipe_of_job}
    answers = forks.capture(ranks)
    for index, name in enumerate(names):
        assert "summary" in answers[index], answers[index]
        parameters[name].append(answers[index]["summary"]["parameters"])
    return parameters


def test_a_layout_has_the_layers_that_it_says(parameters_of_stages):
    first, three_layers, two_layers, last = parameters_of_stages["layout"]
    layer = three_layers - two_layers
    assert three_layers == 3 * layer
    assert first == last - 256 + layer  # of the last stage a norm less, and a layer more


def test_a_hybrid_pattern_has_the_layers_that_it_says(parameters_of_stages):
    mamba, attention, mlp, _ = parameters_of_stages["pattern"]
    h, f, tp, vocab = 256, 512, 8, 1024
    assert attention == (3 * h * h + h * h) // tp + h
    assert mlp == 3 * h * f // tp + h
    # in: z, x, B, C and dt; convolution with its bias; A, D and dt's bias; norms; out
    inner, heads = 2 * h // tp, 2 * h // 64 // tp
    assert mamba - vocab * h // tp == (
        h * (2 * inner + 2 * 128 + heads) + 5 * (inner + 2 * 128) + 3 * heads + inner + h
        + inner * h
    )  # fmt: skip


def test_a_loss_that_is_not_finite_fails(tmp_path):
    recipe = recipes.load("tiny-gpt_1cpu", ["lr=1e30", "train_iters=5"])
    with pytest.raises(PrismError, match="the loss of iteration . is not finite") as caught:
        recipe_job.emulate(recipe, tmp_path / "out")
    assert caught.value.exit_code == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.one_release
def test_sigterm_unwinds(tmp_path):
    command = [sys.executable, "-m", "megatron_prism", "emulate", "tiny-gpt_1cpu"]
    process = subprocess.Popen(
        [*command, "train_iters=100000", "-o", str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 60
    while not _children(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("recompute_granularity=full", "recompute_method"),
        ("num_layers=3 world_size=2 pp=2", "divisible"),  # by an assertion while layers are built
    ],
)
def test_what_megatron_refuses_is_said_in_its_words(words, says, tmp_path):
    recipe = recipes.load("tiny-gpt_1cpu", ["prism.tier=meta", *words.split()])
    with pytest.raises(PrismError, match=says) as caught:
        recipe_job.emulate(recipe, tmp_path / "out")
    assert caught.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_a_word_for_a_list_of_megatron_is_a_list_of_one(tmp_path):
    words = ["recompute_granularity=selective", "recompute_modules=mlp",
             "add_bias_linear=false", "prism.tier=meta", "train_iters=1"]  # fmt: skip
    made = recipe_job.emulate(recipes.load("tiny-gpt_1cpu", words), tmp_path / "out")
    assert made


@pytest.mark.one_release
def test_a_killed_job_leaves_no_folder_and_no_worker(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "megatron_prism", "emulate", "tiny-gpt_1cpu"]
    process = subprocess.Popen(
        [*command, "train_iters=100000", "-o", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 60
    while not _children(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    (worker, *_) = _children(process.pid)
    process.kill()
    process.wait()
    while os.path.exists(f"/proc/{worker}") and _state(worker) != "Z":
        assert time.monotonic() < deadline, "the worker outlived its parent"
        time.sleep(0.1)
    assert not out.exists()
    with artefact_folder(out):  # the place is free for the next run
        pass


def _children(pid):
    done = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in done.stdout.split()]


def _state(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
