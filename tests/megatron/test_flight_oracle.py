"""A rank captured alone on this laptop makes the calls that NCCL recorded in the real 4-GPU job.

``tests/golden/flight`` holds what the Flight Recorder of ProcessGroupNCCL kept of one iteration of
real jobs on 4 x H200 (megatron-core 0.19.2, torch 2.11.0, stock pretrain_gpt.py; written by
``benchmarks/accuracy/real_rank.py``, 2026-11-21).  Group, operation, dtype and sizes of every
call, in the order of issue over all groups, must be those of the same rank run alone on the meta
tier.
"""

import gzip
import json
import math
import pathlib

import pytest
from helpers.needs import TRAINING
from helpers.pretrain import forked

from megatron_prism.core.programs.program import load

pytestmark = [pytest.mark.megatron, TRAINING]
GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "flight"
# What the recorded jobs were started with: it belongs to the recordings, benchmarks may move on.
JOB = """
--num-layers 16 --hidden-size 4096 --num-attention-heads 32 --group-query-attention
--num-query-groups 8 --ffn-hidden-size 14336 --swiglu --disable-bias-linear
--normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights
--seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 32
--lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --bf16
--use-distributed-optimizer --no-gradient-accumulation-fusion --eval-iters 0 --eval-interval 1000
--log-interval 1 --attention-dropout 0 --hidden-dropout 0 --transformer-impl local
--no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion --num-workers 0
--train-iters 3
""".split()
CASES = {
    "pp4_rank3": "--pipeline-model-parallel-size 4",
    "tp2pp2_rank2": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
    "dp4ov_rank1": "--num-layers 8 --overlap-grad-reduce --overlap-param-gather",
}
NAMES = {  # what ProcessGroupNCCL calls them
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "_all_gather_base": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "allreduce_coalesced": "all_reduce",
    "all_reduce_barrier": "barrier",
}
TYPES = {"BFloat16": "bf16", "Float": "fp32", "Int": "int32", "Long": "int64", "Bool": "bool"}


def elements(sizes):
    return sum(math.prod(shape) for shape in sizes)


def recorded_by_nccl(name):
    """(group, operation, dtype, elements in, elements out) of every call."""
    with gzip.open(GOLDEN / f"h200_{name}.json.gz") as file:
        rows = json.load(file)
    found = []
    for group, profiling, sizes_in, types, sizes_out in rows:
        word = profiling.removeprefix("nccl:").split()[0]
        op = NAMES.get(word, word)
        if op == "coalesced":  # closes a batch whose messages have entries of their own
            continue
        if op == "barrier":  # NCCL's is an all-reduce of one word; ours moves nothing
            found.append((group, op, "", -1, -1))
            continue
        num_in = -1 if op == "recv" else elements(sizes_in)
        num_out = -1 if op == "send" else elements(sizes_out)
        found.append((group, op, TYPES[types[0]], num_in, num_out))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_rank_alone_makes_the_calls_of_the_real_job(name, tmp_path):
    rank = int(name.partition("_rank")[2])
    flags = ["--prism-tier", "meta", "--prism-world-size", "4", "--prism-ranks", str(rank)]
    capture = ("--prism-capture", str(tmp_path / "s"))
    status, said = forked(*CASES[name].split(), *flags, *capture, job=JOB)
    assert status == 0, said[-2000:]
    program = load(tmp_path / "s" / f"slice-{rank:06d}.prism").programs[0]
    derived = [(op.group, op.name, op.dtype, op.num_in, op.num_out) for op in program if op.group]
    expected = recorded_by_nccl(name)
    assert len(expected) > 100
    assert derived == expected
