"""Offloaded activations leave the device in a capture that need not run every microbatch, and what
is copied and computed on the host takes time.

h200_fourteen_alone.json has larger jobs of both kinds beside the same jobs without offloading.
Needs megatron.training (0.19).
"""

import subprocess
import sys

import pytest
from helpers import stock_jobs
from helpers.needs import TRAINING

import megatron_prism as prism
from megatron_prism.replay.uncertainty.interval import interval

pytestmark = [pytest.mark.slow, pytest.mark.ci, pytest.mark.megatron, TRAINING]

JOB = (
    "--bf16 --transformer-impl transformer_engine --no-gradient-accumulation-fusion --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 8000 --eval-iters 0 --eval-interval 100 --lr 1e-4 "
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 2048 "
    "--max-position-embeddings 2048 --micro-batch-size 2 --global-batch-size 8 --train-iters 4 "
    "--use-distributed-optimizer --num-workers 0"
)
ACTIVATIONS = "--fine-grained-activation-offloading --offload-modules core_attn attn_proj"
OPTIMIZER = (
    "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --use-precision-aware-optimizer"
)


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """Captures the job with flags, once each."""
    place = tmp_path_factory.mktemp("slices")
    known = {}

    def capture(flags, *options):
        key = (flags, options)
        if key not in known:
            out = place / str(len(known))
            launch = f"torchrun --nproc-per-node 1 {stock_jobs.TINY} {JOB} {flags}"
            words = [sys.executable, "-m", "megatron_prism", "capture", "-o", str(out), *options]
            done = subprocess.run(
                [*words, *launch.split()], capture_output=True, text=True, cwd=place
            )
            assert done.returncode == 0, done.stderr[-2000:]
            known[key] = prism.load(out)
        return known[key]

    return capture


@pytest.fixture(autouse=True)
def older_offloading(monkeypatch):
    """Else Megatron refuses to offload activations (arguments.py:1858 @0.19.0)."""
    monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", "1")


def peak_of(programs):
    (of_class,) = prism.peak_memory(programs).classes.values()
    return of_class["peak_allocated"]


def test_repeated_microbatches_offload_as_those_that_run(captured):
    whole = peak_of(captured(ACTIVATIONS, "--prism-all-microbatches"))
    assert peak_of(captured(ACTIVATIONS)) == whole
    # query, key, value and output of three of four layers in bf16: those of the last one stay
    tensor_bytes = 2 * 2048 * 2 * 1024
    assert peak_of(captured("")) - whole == 3 * 4 * tensor_bytes


def test_steps_of_the_optimizer_on_the_host_take_time(captured):
    before, after = (prism.replay(captured(flags), machine="h200") for flags in ("", OPTIMIZER))
    assert after.iteration_ns > 1.05 * before.iteration_ns
    assert any("copies to the host and its memory" in text for text in after.prices.sources)
    # the interval says that nobody measured the host's memory
    assert "memory" in {source.what for source in interval(after).sources}
