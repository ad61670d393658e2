"""Real ranks over gloo beside one rank: a healthy layout is the same job, one with a planted fault
is not, and the parameter and the axis are named.

Needs megatron.training (0.19).
"""

import os
import pathlib
import sys

import pytest
from helpers import stock_jobs
from helpers.needs import TRAINING

from megatron_prism.core.errors import UsageError
from megatron_prism.core.world import World
from megatron_prism.features.verify.verdict import Line, verify

pytestmark = [pytest.mark.slow, pytest.mark.megatron, TRAINING]

JOB = """
--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --seq-length 8192 --bf16 --lr 1e-4
--max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 1024 --train-iters 9000
--mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --transformer-impl local
--tensor-model-parallel-size 8 --sequence-parallel --position-embedding-type rope
--no-rope-fusion
""".split()  # noqa: SIM905
UNREDUCED = """
import importlib, runpy
grads = importlib.import_module("megatron.core.distributed.finalize_model_grads")
grads._allreduce_non_tensor_model_parallel_grads = lambda *args: None
runpy.run_path({script!r}, run_name="__main__")
"""

FORGETFUL = """
import importlib, runpy
optimizer = importlib.import_module("megatron.core.optimizer.optimizer")
load = optimizer.FP32Optimizer.load_state_dict

def forget(self, state):
    load(self, state)
    for one in self.optimizer.state.values():
        one["exp_avg"].zero_()

optimizer.FP32Optimizer.load_state_dict = forget
runpy.run_path({script!r}, run_name="__main__")
"""


def verdict(tmp_path, script, world, *flags, bisect=False, **more):
    line = Line((str(script), *JOB, *flags), world, True, sys.executable)
    return verify(line, None, tmp_path / "kept", lambda text: None, bisect=bisect, **more)


def test_a_healthy_layout_is_the_same_job(tmp_path):
    flags = ["--pipeline-model-parallel-size", "4", "--use-distributed-optimizer",
             "--cross-entropy-loss-fusion"]  # fmt: skip
    found = verdict(tmp_path, stock_jobs.TINY, World(64, tp=8, pp=4), *flags, resume=True)
    assert found.difference is None
    assert found.same
    assert found.copy == World(8, tp=2, pp=2)
    assert found.counts["losses"] == 3 * 8
    assert max(found.worst.values()) < 0.5  # of the tolerance


def test_gradients_that_are_not_reduced_are_named_with_their_axis(tmp_path):
    script = tmp_path / "faulty.py"
    script.write_text(UNREDUCED.format(script=str(stock_jobs.TINY)))
    found = verdict(tmp_path, script, World(8, tp=8), bisect=True)
    assert found.same is False
    assert (found.difference.what, found.difference.iteration) == ("gradient", 1)
    assert found.difference.where == "decoder.final_layernorm.bias"
    assert found.difference.axes == ("tp",)
    assert found.culprits == ["--sequence-parallel"]


def test_shards_that_are_left_out_of_the_norm_are_named_though_they_vanish_in_it(tmp_path):
    # 0.19 does not mark this parameter as sharded, so ranks other than 0 are left out
    found = verdict(tmp_path, stock_jobs.TINY, World(8, tp=8), "--softmax-type", "learnable")
    assert found.same is False
    assert (found.difference.what, found.difference.iteration) == ("gradient norm", 1)
    assert found.difference.where.endswith("core_attention.softmax_offset")
    assert found.difference.place == "rank 1, [2:4]"
    assert found.difference.notes == ("counted 0 times in the norm of rank 0, not 1 times",)


@pytest.mark.skipif("PRISM_MEGATRON" not in os.environ, reason="PRISM_MEGATRON: a checkout")
def test_tied_embeddings_beside_mtp_in_a_pipeline_are_verified(tmp_path, monkeypatch):
    checkout = os.environ["PRISM_MEGATRON"]
    monkeypatch.setenv("PYTHONPATH", checkout)
    flags = ["--pipeline-model-parallel-size", "4", "--mtp-num-layers", "1"]
    script = pathlib.Path(checkout, "pretrain_gpt.py")
    found = verdict(tmp_path, script, World(8, pp=4), *flags)
    assert found.same, found.why or found.difference
    # Megatron allocates it on the last stage, where the embedding is read in its place
    assert found.unnamed == {"output_layer.weight": (256 * 64, True)}


def test_states_that_a_checkpoint_does_not_bring_back_are_named(tmp_path):
    script = tmp_path / "forgetful.py"
    script.write_text(FORGETFUL.format(script=str(stock_jobs.TINY)))
    found = verdict(tmp_path, script, World(8, tp=8), resume=True)
    assert found.run.startswith("resumed elsewhere from iteration 1 (1 rank ")
    assert (found.difference.what, found.difference.iteration) == ("exp_avg", 1)
    assert found.difference.notes[0] == "zero"


def test_float64_has_no_roundings_of_float32(tmp_path):
    found = verdict(tmp_path, stock_jobs.TINY, World(8, tp=8), precise=True)
    assert found.same
    assert found.tolerance < 1e-12


def test_what_megatron_refuses_is_one_line(tmp_path):
    with pytest.raises(UsageError, match="the copy is refused: .*recompute"):
        verdict(tmp_path, stock_jobs.TINY, World(8, tp=8), "--recompute-granularity", "full")
