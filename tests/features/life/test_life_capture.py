"""A captured job that goes on to its end: its parts against closed forms of a plain GPT's bytes."""

import json
import os
import subprocess
import sys

import pytest
from helpers.needs import TRAINING
from helpers.pretrain import SCRIPT

pytestmark = [TRAINING, pytest.mark.megatron, pytest.mark.slow]

LAYERS, HIDDEN, POSITIONS, VOCABULARY = 2, 64, 32, 1024  # padded to a multiple of 128
# a layer: two norms, and attention and MLP with biases; the last norm; tied embeddings
PARAMETERS = LAYERS * (12 * HIDDEN**2 + 13 * HIDDEN) + 2 * HIDDEN
PARAMETERS += (VOCABULARY + POSITIONS) * HIDDEN
WEIGHTS, GRADIENTS, STATES = 2, 4, 12  # bytes of a parameter: bf16, fp32, main ones and two moments
WORKSPACES = 2 * (32 << 20)  # of cuBLAS, for the main thread and for autograd's
JOB = f"""
--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads 4 --seq-length {POSITIONS}
--max-position-embeddings {POSITIONS} --micro-batch-size 1 --global-batch-size 4 --train-iters 100
--lr 1e-3 --lr-decay-iters 100 --mock-data --vocab-size 1000 --transformer-impl local --bf16
--use-distributed-optimizer --no-gradient-accumulation-fusion --eval-iters 9 --eval-interval 50
--log-interval 1 --no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion
--no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
--attention-backend unfused --num-workers 0
""".split()


def prism(*words, folder):
    """Run a command of prism; its output as text."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-W", "ignore", "-m", "megatron_prism", *map(str, words)]
    done = subprocess.run(line, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    return done.stdout


def answer_of(folder, *flags, ours=(), ranks=1):
    """What fit says of the job with these flags."""
    slices = folder / "slices"
    capture = ["capture", "-o", slices, "--prism-tier", "meta"]
    capture += ["--prism-world-size", ranks, *ours]
    prism(*capture, "--", SCRIPT, *JOB, *flags, folder=folder)
    return json.loads(prism("fit", slices, "--limit", "80GB", "--json", folder=folder))


def test_parts_of_a_whole_life(tmp_path):
    save = ["--save", tmp_path / "checkpoints", "--save-interval", 40]
    load = ["--load", tmp_path / "absent"]
    answer = answer_of(tmp_path, *save, *load, "--async-save", ours=["--prism-life"])
    life = answer["life"]["all"]
    assert list(life["assumed"]) == ["load"]
    parts = life["parts"]
    assert not (tmp_path / "checkpoints").exists()
    few = 0.02  # norms' statistics, step counters, the loss
    kept = WEIGHTS + GRADIENTS + STATES

    def bytes_each(part, workspaces=0):
        return (parts[part] - workspaces) / PARAMETERS

    # weights are there twice when the buffer of all of them is made
    assert bytes_each("model") == pytest.approx(2 * WEIGHTS + GRADIENTS, rel=few)
    assert bytes_each("optimizer") >= WEIGHTS + GRADIENTS + 4
    assert bytes_each("optimizer") < kept
    assert bytes_each("end", WORKSPACES) == pytest.approx(kept, rel=few)
    # a checkpoint is what stands, nothing more
    assert bytes_each("checkpoint", WORKSPACES) == pytest.approx(kept, rel=few)
    # main parameters and two moments by buckets, and weights of bf16
    saving = answer["saving"]
    assert saving["rank_bytes"] / PARAMETERS == pytest.approx(WEIGHTS + STATES, rel=few)
    assert saving["is_async"]
    assert parts["end"] < parts["evaluation"] < parts["steady iteration"]
    assert parts["first iteration"] <= parts["steady iteration"]
    # both moments are there twice: those that are read, and those that the optimizer keeps
    assert bytes_each("load") == pytest.approx(kept + 2 * 4, rel=few)
    # so the first step has all that later ones have
    assert bytes_each("first iteration", WORKSPACES) >= kept


def test_without_the_flag_a_capture_ends_with_its_iteration(tmp_path):
    load = ["--load", tmp_path / "absent"]
    save = ["--save", tmp_path / "checkpoints", "--save-interval", 40]
    life = answer_of(tmp_path, *save, *load)["life"]["all"]
    assert life["assumed"] == {}
    parts = life["parts"]
    assert parts["model"]
    assert parts["optimizer"]
    assert parts["evaluation"] is parts["checkpoint"] is parts["end"] is None
    assert parts["load"] is None


@pytest.mark.parametrize(
    "gathered",
    [
        [],
        [
            "--dist-ckpt-optim-fully-reshardable",
            "--distrib-optim-fully-reshardable-mem-efficient",
        ],
    ],
)
def test_the_ranks_of_a_host_write_a_whole_checkpoint_of_experts(tmp_path, gathered):
    """Experts have an optimizer of their own, and fewer replicas than the other layers."""
    experts, width, ranks = 4, 32, 8
    flags = ["--num-experts", experts, "--moe-ffn-hidden-size", width, "--disable-bias-linear"]
    flags += ["--tensor-model-parallel-size", 2, "--sequence-parallel", "--swiglu"]
    flags += ["--expert-model-parallel-size", 2, "--expert-tensor-parallel-size", 1]
    flags += ["--moe-token-dispatcher-type", "alltoall", "--global-batch-size", ranks, *gathered]
    flags += ["--save", tmp_path / "checkpoints", "--save-interval", 40]
    saving = answer_of(tmp_path, *flags, ours=["--prism-life"], ranks=ranks)["saving"]
    of_experts = LAYERS * experts * 3 * width * HIDDEN
    # attention, router, two norms with biases; the last norm; tied embeddings
    of_others = LAYERS * (4 * HIDDEN**2 + experts * HIDDEN + 4 * HIDDEN) + 2 * HIDDEN
    of_others += (VOCABULARY + POSITIONS) * HIDDEN
    parameters = of_experts + of_others
    assert saving["node_ranks"] == ranks
    assert saving["node_bytes"] / parameters == pytest.approx(WEIGHTS + STATES, rel=0.05)
    if gathered:
        # one of the two first ranks of the tensor-parallel group has half of the states
        assert saving["rank_bytes"] > STATES * (of_others / 2 + of_experts / 2)
