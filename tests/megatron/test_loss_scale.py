"""What a stage receives as a gradient is multiplied by what its own optimizer divides by."""

import subprocess
import sys

import pytest

_STAGE = """
import sys
import torch
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime import devices as tiers
from megatron_prism.emulate import patch
from megatron_prism.emulate.patches.pipeline import PATCHES as pipeline_patches
from megatron_prism.emulate.patches.training import PATCHES as training_patches
from megatron_prism.emulate.monitor import TrainingMonitor
from megatron_prism.runtime import virtual_world
from megatron_prism.runtime.values import Values
from megatron_prism.runtime.values import rms
here = tiers.prepare("cpu", ProcessChanges())
world = virtual_world.VirtualWorld(4, 1, [1], Values(rank=1), here.device)
context = patch.PatchContext(lambda: world, TrainingMonitor(), False, (1,), 1)
patch.apply(pipeline_patches + training_patches, context)
virtual_world.start(world)

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer import TransformerConfig

precision = sys.argv[1]
dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
parallel_state.initialize_model_parallel(1, 4)
config = TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4,
    pipeline_model_parallel_size=4, pipeline_dtype=dtype, params_dtype=dtype, **{precision: True})
model = DistributedDataParallel(
    config, DistributedDataParallelConfig(), torch.nn.Linear(8, 8).to(dtype))
optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, params_dtype=dtype,
    initial_loss_scale=4096.0, **{precision: True}), [model])
config.grad_scale_func = optimizer.scale_loss
pipeline = P2PCommunicator(parallel_state.get_pipeline_model_parallel_group(), config)

def received():
    return pipeline.recv_backward((64, 2, 64), False)

scales = [rms(received()).item()]
if precision == "fp16":
    optimizer.chained_optimizers[0].grad_scaler._scale.mul_(0.5)
scales += [rms(received()).item(), rms(pipeline.recv_forward((64, 2, 64), False)).item()]
print("scales", *scales)
"""


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.parametrize(("precision", "scales"), [("bf16", (1, 1)), ("fp16", (4096, 2048))])
def test_received_gradients_carry_the_scale_of_now(precision, scales):
    pytest.importorskip("megatron.core")
    done = subprocess.run(
        [sys.executable, "-c", _STAGE, precision],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    words = done.stdout.split()
    assert "scales" in words, done.stderr[-3000:]
    *gradients, activation = (float(word) for word in words[words.index("scales") + 1 :])
    one = 1 / (64 * 2 * 64**0.5)
    assert gradients == pytest.approx([scale * one for scale in scales], rel=0.05)
    assert activation == pytest.approx(1, rel=0.05)
