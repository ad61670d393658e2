"""Hangs that the public reported of ranks whose inputs differ: each ends as in its thread."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import forks
from helpers.needs import TRAINING

from megatron_prism.cli import main as cli
from megatron_prism.core.jobs import recipe as recipes
from megatron_prism.emulate.jobs import recipe_job

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.megatron, pytest.mark.ci]

HELPERS = Path(__file__).parents[2] / "helpers"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SMALL = """
    data_path=null train_iters=2 micro_batch_size=1 hidden_size=32 ffn_hidden_size=64
    num_attention_heads=4 vocab_size=100
""".split()


def recipe_of(words, tier="meta"):
    return recipes.load("tiny-gpt_1cpu", [*SMALL, *words.split(), f"prism.tier={tier}"])


def prism(*words, capsys):
    status = cli.main(list(words))
    return status, capsys.readouterr().out


# -- two stages with chunks that exchange shapes ---------------------------------------------------
# https://github.com/NVIDIA/Megatron-LM/issues/5100, pull requests 1485 and 5271: with
# variable_seq_lengths and batches of messages, shapes of outputs and of gradients are swapped, and
# backward ends with shapes that do not fit; with overlap_p2p_comm it does not happen.
CHUNKS = """
    pp=2 vpp=2 num_layers=4 world_size=8 global_batch_size=16 variable_seq_lengths=true
    moe_token_dispatcher_type=alltoall
"""
LENGTHS = {0: (16, 8, 4, 12), 1: (16,) * 4, 2: (16,) * 4, 3: (16,) * 4}


def batched_messages(what, jobs, *words):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", HELPERS / "batched_messages.py", what, *words],
        input=pickle.dumps(jobs),
        capture_output=True,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def chunks(tmp_path_factory):
    """Captures of two stages with chunks at three lengths, with batches of messages and without."""
    folder = tmp_path_factory.mktemp("chunks")
    for kind in ("batched", "single"):
        jobs = []
        for length in (16, 8, 4):
            recipe = recipe_of(f"{CHUNKS} seq_length={length}", "cpu")
            for rank in recipe_job.ranks_of(recipe):
                jobs.append((recipe, rank, folder / f"{kind}-{length}"))
        if kind == "batched":
            answers = batched_messages("captures", jobs, "cpu")
        else:
            answers = forks.capture(jobs, "cpu").values()
        for answer in answers:
            assert "error" not in answer, answer["error"]
    return folder


def test_batches_of_two_stages_with_chunks_swap_outputs_and_gradients(chunks, capsys, monkeypatch):
    monkeypatch.chdir(chunks)
    words = "lengths=dp=0:16,8,4,12 capture=batched-8 capture=batched-4".split()
    status, out = prism("uneven", "batched-16", *words, capsys=capsys)
    assert status == 1
    assert "order in PIPELINE_MODEL_PARALLEL_GROUP, call #11, ranks 4 and 0" in out
    assert "rank 4: what its backward of microbatch 0 of chunk 0 made" in out
    assert "rank 0: takes it for its forward of microbatch 2 of chunk 1" in out
    assert "why: overlap_p2p_comm sends each message in a call of its own" in out


def test_real_processes_with_such_batches_end_in_their_backward():
    (answers,) = batched_messages(
        "processes", [(recipe_of(f"{CHUNKS} seq_length=16", "cpu"), LENGTHS)]
    )
    errors = [answer.get("error", "") for answer in answers]
    assert any("invalid gradient at index 0" in error for error in errors), errors


def test_messages_of_their_own_do_not_swap_them(chunks, capsys, monkeypatch):
    monkeypatch.chdir(chunks)
    words = "lengths=dp=0:16,8,4,12 capture=single-8 capture=single-4".split()
    assert prism("uneven", "single-16", *words, capsys=capsys) == (
        0,
        "every call is matched: the job goes on\n",
    )


# -- HybridEP --------------------------------------------------------------------------------------
# https://github.com/deepseek-ai/DeepEP/issues/604, https://github.com/modelscope/ms-swift/pull/8393:
# the gather of the routing map hangs if ranks have other lengths; padding to one length helps.
HYBRID = """
    world_size=16 ep=16 num_experts=16 global_batch_size=16 moe_token_dispatcher_type=flex
    moe_flex_dispatcher_backend=hybridep
"""
PADS = " moe_hybridep_pad_uneven_dispatch_inputs=true"


def can_pad():
    from megatron.core.transformer.transformer_config import TransformerConfig

    return hasattr(TransformerConfig, "moe_hybridep_pad_uneven_dispatch_inputs")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid")
    kinds = {"equal": HYBRID, "deepep": HYBRID.replace("hybridep", "deepep")}
    kinds["node"] = HYBRID.replace("16", "4")
    if can_pad():
        kinds["padded"] = HYBRID + PADS
    jobs = []
    for name, words in kinds.items():
        for length in (128, 64):
            recipe = recipe_of(f"{words} seq_length={length}")
            jobs += [(recipe, rank, folder / f"{name}-{length}") for rank in (0,)]
    for answer in forks.capture(jobs).values():
        assert "error" not in answer, answer["error"]
    return folder


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("equal", ("all_gather bool", "2048 elements on rank 0, 1024 elements on rank 1")),
        # within a node no call of torch gathers the map
        ("node", ("rank 0 dispatches 4,096 elements and rank 1 dispatches 2,048 elements",)),
    ],
)
def test_hybrid_ep_takes_equal_lengths(name, words, hybrid, capsys, monkeypatch):
    monkeypatch.chdir(hybrid)
    status, out = prism(
        "uneven", f"{name}-128", "lengths=dp=1:64", f"capture={name}-64", capsys=capsys
    )
    assert status == 1
    assert "shape in EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP, call #1, ranks 0 and 1" in out
    assert "why: moe_hybridep_pad_uneven_dispatch_inputs" in out
    for expected in words:
        assert expected in out


@pytest.mark.parametrize("name", ["deepep", "padded"])
def test_deep_ep_and_padding_take_any_lengths(name, hybrid, capsys, monkeypatch):
    if name == "padded" and not can_pad():
        pytest.skip("this Megatron cannot pad")
    monkeypatch.chdir(hybrid)
    status, out = prism(
        "uneven", f"{name}-128", "lengths=dp=1:64", f"capture={name}-64", capsys=capsys
    )
    assert (status, out) == (0, "every call is matched: the job goes on\n")


# -- other numbers of microbatches over shards of parameters ---------------------------------------
# https://github.com/verl-project/verl/issues/6176: dynamic batches give a rank fewer microbatches;
# the others wait in the gather of the next microbatch's parameters for ever.
FSDP = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 64
    --seq-length 64 --micro-batch-size 1 --global-batch-size 16 --train-iters 1 --lr 1e-4
    --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --bf16 --transformer-impl local
    --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-bias-swiglu-fusion --use-megatron-fsdp --ckpt-format fsdp_dtensor
    --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer
    --no-check-for-nan-in-loss-and-grad
""".split()


@TRAINING
def test_a_rank_with_fewer_microbatches_leaves_others_in_a_gather(tmp_path, capsys):
    slices = str(tmp_path / "slices")
    line = [sys.executable, "-m", "megatron_prism", "capture", "-o", slices]
    line += ["--prism-world-size", "4", "--prism-tier", "meta", "--", HELPERS / "pretrain_tiny.py"]
    done = subprocess.run(
        [*line, *FSDP], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    status, out = prism("uneven", slices, "microbatches=dp=1:3", capsys=capsys)
    assert status == 1
    assert "smallest example: microbatches=1:3" in out
    assert "in DATA_PARALLEL_GROUP_WITH_CP" in out
    # the next microbatch of rank 0, and the optimizer of rank 1, which is through
    (first_call,) = [line for line in out.splitlines() if "<-- here" in line]
    left, _, right = first_call.partition("all_gather")
    assert left.split()[-1] == "3F"
    assert " O all_gather" in right
    assert "pad the last microbatches" in out
