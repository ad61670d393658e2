"""What a stage receives as a gradient is multiplied by what its own optimizer divides by."""

import pytest
from helpers import processes

_STAGE = """
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


@pytest.mark.ci
@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.parametrize(("precision", "scales"), [("bf16", (1, 1)), ("fp16", (4096, 2048))])
def test_received_gradients_carry_the_scale_of_now(precision, scales):
    patches = "pipeline.PATCHES + training.PATCHES"
    lines, errors = processes.patched(_STAGE, precision, size=4, rank=1, patches=patches)
    words = " ".join(lines).split()
    assert "scales" in words, errors
    *gradients, activation = (float(word) for word in words[words.index("scales") + 1 :])
    one = 1 / (64 * 2 * 64**0.5)
    assert gradients == pytest.approx([scale * one for scale in scales], rel=0.05)
    assert activation == pytest.approx(1, rel=0.05)
