"""Megatron's embedding over virtual ranks: the rows of all tokens, and the gradients of its own."""

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

_LOOKUPS = """
import itertools
import torch
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime import devices as tiers
from megatron_prism.emulate import patch
from megatron_prism.emulate.patches import training
from megatron_prism.emulate.monitor import TrainingMonitor
from megatron_prism.runtime import virtual_world
from megatron_prism.runtime.values import Values
here = tiers.prepare("cpu", ProcessChanges())
world = virtual_world.VirtualWorld(4, 1, [1], Values(rank=1), here.device)
context = patch.PatchContext(lambda: world, TrainingMonitor(), False, (1,), 1)
names = {"whole-lookup", "mirrored-labels"}
patch.apply([one for one in training.PATCHES if one.name in names], context)
virtual_world.start(world)

from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.tensor_parallel import VocabParallelEmbedding

parallel_state.initialize_model_parallel(4)
group = parallel_state.get_tensor_model_parallel_group()
V, R, H, B, S = 48, 12, 8, 2, 16
for way, weight, scattered, deterministic in itertools.product(
    ["mirror", "noise", "plain"], ["partition", "shard"], [False, True], [False, True]
):
    config = ModelParallelConfig(tensor_model_parallel_size=4, deterministic_mode=deterministic,
        use_cpu_initialization=True)
    embedding = VocabParallelEmbedding(V, H, init_method=torch.nn.init.normal_, config=config,
        reduce_scatter_embeddings=scattered, tp_group=group)
    if weight == "shard":  # whose rows these are is not known
        embedding.weight = torch.nn.Parameter(torch.randn(R + 1, H))
    with torch.no_grad():  # every row holds its number
        embedding.weight[:, 0] = torch.arange(len(embedding.weight))
    world.values.policy = "mirror" if way == "plain" else way
    look_up = VocabParallelEmbedding.forward
    if way == "plain":
        look_up = look_up.__wrapped__
    tokens = torch.randint(0, V, (B, S), generator=torch.Generator().manual_seed(3))
    tokens[0, 0] = V + 5  # padding beyond the vocabulary
    out = look_up(embedding, tokens)
    numbers = (out[..., 0].t() if scattered else out[..., 0]).long().tolist()
    columns = range(S // 4, S // 2) if scattered else range(S)  # this is the second of four
    wanted = [[int(tokens[b, s]) % R for s in columns] for b in range(B)]
    out.sum().backward()
    touched = sorted(set(embedding.weight.grad.abs().sum(1).nonzero().flatten().tolist()))
    own = sorted({int(t) - R for t in tokens.flatten() if R <= t < 2 * R})
    print("lookup", way, weight, scattered, deterministic,
          f"rows={numbers == wanted} gradients={touched == own}")
print("summed otherwise", world.values.parts is None)
"""


def test_every_token_has_a_row_and_gradients_stay():
    pytest.importorskip("megatron.core")
    done = subprocess.run(
        [sys.executable, "-c", _LOOKUPS], capture_output=True, text=True, timeout=300, check=False
    )
    assert "summed otherwise True" in done.stdout, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("lookup ")]
    assert len(lines) == 24
    for _, way, weight, *_, whole, own in lines:
        completed = way != "plain" and weight == "partition"
        assert (whole, own) == (f"rows={completed}", "gradients=True"), lines
