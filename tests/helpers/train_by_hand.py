"""A tiny GPT of megatron-core trained on the CPU by a loop of its own, without emulation.

Prints its losses, then the modules it ended with: what an attach that nobody asked for could alter.
"""

import contextlib
import sys

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig

STEPS, LENGTH = 3, 16


def model():
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
    )
    spec = get_gpt_layer_local_spec()
    return GPTModel(config, spec, vocab_size=128, max_sequence_length=LENGTH)


def train():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    tokens = torch.arange(LENGTH).view(1, LENGTH)
    hidden = torch.tril(torch.ones(1, 1, LENGTH, LENGTH)) < 0.5
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = net(tokens, tokens, hidden, labels=tokens + 1).mean()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.9f}")


if __name__ == "__main__":
    torch.cuda.current_device = lambda: "cpu"  # this and the random streams need a driver
    get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()
    torch.manual_seed(1234)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    parallel_state.initialize_model_parallel()
    train()
    print("modules", *sorted(sys.modules))
