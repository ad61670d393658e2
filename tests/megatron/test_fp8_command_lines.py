"""FP8 without a GPU: stock command lines, recipe by recipe, in shapes; what is refused is named.

Needs megatron.training (0.19).  All jobs are forks of one process (``stock_jobs``).
"""

import pytest
from helpers import stock_jobs
from helpers.needs import TRAINING

pytestmark = [pytest.mark.slow, pytest.mark.megatron, TRAINING]

JOB = """
--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64
--max-position-embeddings 64 --micro-batch-size 2 --train-iters 2 --lr 1e-3 --mock-data
--vocab-size 1000 --bf16 --use-distributed-optimizer --log-interval 1 --num-workers 0
--eval-iters 0 --eval-interval 1000 --transformer-impl transformer_engine --normalization RMSNorm
--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --prism-emulate
--prism-world-size 8 --prism-ranks 0 --global-batch-size 32 --fp8-format hybrid
"""
SP = "--tensor-model-parallel-size 2 --sequence-parallel"
MOE = """--num-experts 8 --expert-model-parallel-size 4 --moe-grouped-gemm
--moe-token-dispatcher-type alltoall"""
PARAM, LATE = "--fp8-param-gather", "--overlap-grad-reduce --overlap-param-gather"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SOME = "--recompute-granularity selective --recompute-modules"
JOBS = {
    "delayed": f"{SP} {FULL} --fp8-recipe delayed",
    "delayed, stages": "--pipeline-model-parallel-size 2 --fp8-recipe delayed",
    "tensorwise": f"{SP} --num-layers 3 --fp8-recipe tensorwise --first-last-layers-bf16",
    "tensorwise, norms again": f"{SP} {SOME} layernorm --no-gradient-accumulation-fusion "
    "--fp8-recipe tensorwise",
    "blockwise, experts": f"{MOE} --fp8-recipe blockwise",
    "tensorwise, experts": f"{MOE} {SOME} moe_act --fp8-recipe tensorwise",
    "mxfp8": f"{SP} --fp8-recipe mxfp8",
    "delayed, parameters": f"{MOE} --fp8-recipe delayed {PARAM}",
    "blockwise, parameters": f"{SP} --fp8-recipe blockwise {PARAM} {LATE}",
    "mxfp8, parameters": f"--fp8-recipe mxfp8 {PARAM} {LATE} --reuse-grad-buf-for-mxfp8-param-ag",
}
REFUSED = {
    "FP8 without a GPU is shapes": "--prism-tier cpu --fp8-recipe tensorwise",
    "FP8 recipe custom has no stand-in": "--fp8-recipe custom "
    "--fp8-quantizer-factory megatron.core.utils.divide",
}


@pytest.fixture(scope="module")
def jobs():
    """name -> (status, output)."""
    given = {**JOBS, **REFUSED}
    words = {name: (JOB + "--prism-tier meta " + flags).split() for name, flags in given.items()}
    return stock_jobs.named(stock_jobs.TINY, words)


@pytest.mark.parametrize("name", JOBS)
def test_a_job_in_fp8_trains_in_shapes(name, jobs):
    status, said = jobs[name]
    assert status == 0, said[-3000:]
    assert "2 optimizer steps applied of 2" in said


@pytest.mark.parametrize("what", REFUSED)
def test_what_fp8_lacks_is_refused_by_name(what, jobs):
    status, said = jobs[what]
    assert status == 1, said[-3000:]
    last = said.splitlines()[-2:]
    assert last[0].startswith(f"prism: error: {what}")
    assert last[1].startswith("  fix: ")
