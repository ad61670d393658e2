"""Megatron's embedding over virtual ranks: the rows of all tokens, and the gradients of its own."""

import pytest
from helpers import processes

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

_LOOKUPS = """
import itertools
from megatron.core import ModelParallelConfig
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
    patches = (
        """[one for one in training.PATCHES if one.name in {"whole-lookup", "mirrored-labels"}]"""
    )
    found, errors = processes.patched(_LOOKUPS, size=4, rank=1, patches=patches)
    assert "summed otherwise True" in found, errors
    lines = [line.split() for line in found if line.startswith("lookup ")]
    assert len(lines) == 24
    for _, way, weight, *_, whole, own in lines:
        completed = way != "plain" and weight == "partition"
        assert (whole, own) == (f"rows={completed}", "gradients=True"), lines
