"""No flag, no effect: with the package installed, a run that asks for nothing is the run it was."""

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys

import pytest
from helpers.needs import TRAINING

pytest.importorskip("megatron.core")
SCRIPT = pathlib.Path(__file__).parents[1] / "helpers" / "train_by_hand.py"
TINY = SCRIPT.with_name("pretrain_tiny.py")
HOOK = "torch.backends"  # the entry point's group; torch reads it at import
pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(
        not any(e.name == "megatron_prism" for e in importlib.metadata.entry_points(group=HOOK)),
        reason="megatron_prism is not installed, so torch does not attach it",
    ),
]

# Transformer Engine's Python alone does not import, which the attach hides from Megatron
START = """import runpy, sys; sys.argv = sys.argv[1:]; sys.modules["transformer_engine"] = None
runpy.run_path(sys.argv[0], run_name="__main__")"""
LIGHT = {  # all that the attach itself may import
    "megatron_prism",
    "megatron_prism._attach",
    "megatron_prism.core",
    "megatron_prism.core.bare_engine",
}

JOB = """
--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
--micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr 1e-3 --mock-data --vocab-size 1000
--transformer-impl local --bf16 --no-gradient-accumulation-fusion --eval-iters 0 --log-interval 1
--no-persist-layer-norm --no-masked-softmax-fusion --no-bias-gelu-fusion --no-rope-fusion
--attention-backend unfused --num-workers 0
"""


def run(autoload, *words, script=SCRIPT):
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "PRISM_ARGS")}
    env |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": autoload, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", START, str(script), *words],
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
        check=False,
    )
    modules = re.search(r"^modules (.*)$", done.stdout, re.MULTILINE)
    log = re.sub(r"^modules .*$", "", done.stdout, flags=re.MULTILINE)
    return done, masked(log), set(modules[1].split()) if modules else set()


def masked(text):
    """Without dates, durations, addresses and process ids."""
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d+)?", "DATE", text)
    text = re.sub(r"\d+(\.\d+)?(e-?\d+)? (ms|sec|seconds|s)\b", "TIME", text)
    text = re.sub(r"\(ms\): [\d.]+", "TIME", text)
    text = re.sub(r"\(\d+\.\d+, \d+\.\d+\)", "TIMES", text)
    return re.sub(r"0x[0-9a-f]+|:\d{4,5}\b", "NUMBER", text)


@pytest.mark.ci
def test_a_training_run_is_the_same_with_and_without_the_attach():
    (on, log_on, modules_on), (off, log_off, modules_off) = run("1"), run("0")
    assert on.returncode == off.returncode == 0, on.stderr + off.stderr
    assert "step 2 loss" in log_on
    assert log_on == log_off
    assert modules_on - modules_off == LIGHT
    assert modules_off <= modules_on


@pytest.mark.slow
@TRAINING
def test_pretrain_ends_as_it_would_without_the_attach():
    """On a host without a GPU Megatron refuses; with one it trains.  Both ways: the same."""
    words = [*JOB.split(), "--distributed-backend", "nccl"]
    (on, log_on, _), (off, log_off, _) = (run(a, *words, script=TINY) for a in ("1", "0"))
    assert on.returncode == off.returncode
    assert log_on == log_off
    assert on.stderr.splitlines()[-1:] == off.stderr.splitlines()[-1:]
