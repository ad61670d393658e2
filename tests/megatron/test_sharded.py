"""Jobs whose parameters are sharded over the data-parallel ranks."""

import pytest
from helpers import stock_jobs
from helpers.needs import TRAINING
from helpers.pretrain import JOB, SCRIPT

pytestmark = [pytest.mark.megatron, TRAINING]

META = "--prism-world-size 64 --prism-tier meta --prism-ranks 5 --".split()
COMMON = "--transformer-impl transformer_engine --pipeline-model-parallel-size 1".split()
SHARDS = {
    "megatron": "--use-distributed-optimizer --use-megatron-fsdp --ckpt-format fsdp_dtensor "
    "--data-parallel-sharding-strategy optim_grads_params",
    "torch": "--use-torch-fsdp2 --ckpt-format torch_dist --untie-embeddings-and-output-weights",
}


# the jobs of the other tests have the one queue that these refuse
SCRIPT_OF_ONES_OWN = """
import os, runpy
os.environ |= dict(CUDA_DEVICE_MAX_CONNECTIONS="8", NCCL_ALGO="Ring",
                   NVTE_ALLOW_NONDETERMINISTIC_ALGO="0", CUBLAS_WORKSPACE_CONFIG=":4096:8")
runpy.run_path({script!r}, run_name="__main__")
"""


def test_shards_are_gathered_and_gradients_scattered(tmp_path):
    script = tmp_path / "pretrain.py"
    script.write_text(SCRIPT_OF_ONES_OWN.format(script=str(SCRIPT)))
    plain = [word for word in JOB if word != "--use-distributed-optimizer"]
    last = "--prism-world-size 64 --prism-tier cpu --prism-ranks 63 --".split()
    deterministic = [
        *SHARDS["megatron"].split(),
        "--deterministic-mode",
        "--attention-dropout",
        "0",
    ]
    *found, (status, said) = stock_jobs.run(
        [
            *([*META, script, *plain, *COMMON, *more.split()] for more in SHARDS.values()),
            [*last, script, *plain, *COMMON, *deterministic],  # torch.empty is full of NaN
        ]
    )
    assert status == 0, said[-3000:]
    assert "grad norm: nan" not in said
    for status, said in found:
        assert status == 0, said[-3000:]
        assert "3 optimizer steps applied of 3" in said
        lines = [line for line in said.splitlines() if "DATA_PARALLEL_GROUP_WITH_CP (32)" in line]
        assert any("all_gather" in line for line in lines)
        assert any("reduce_scatter" in line for line in lines)
