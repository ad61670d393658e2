"""The network that mirrors make up: a loss it can learn, and no more tokens than are routed."""

import pytest
from helpers import processes

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

_LOSS = """
import types
from megatron.core.models.common.language_module.language_module import LanguageModule
parallel_state.initialize_model_parallel(4)  # rank 5 is the second of four
group = parallel_state.get_tensor_model_parallel_group()
S, B, R = 16, 2, 12
whole = LanguageModule.compute_language_model_loss
for policy in ("mirror", "noise"):
    world.values.policy = policy
    for fused in (False, True):
        for sequence in (False, True):
            model = types.SimpleNamespace(tp_group=group, config=types.SimpleNamespace(
                cross_entropy_loss_fusion=fused, cross_entropy_fusion_impl="native",
                sequence_parallel=sequence), pg_collection=types.SimpleNamespace(tp=group))
            labels = torch.randint(0, 4 * R, (B, S))
            kept = labels.clone()
            logits = torch.randn(S, B, R, requires_grad=True)
            loss = whole(model, labels, logits.clone())
            loss.sum().backward()
            wanted = labels[:, 4:8].repeat(1, 4) if sequence else labels
            alone = logits.detach().clone().requires_grad_()
            expected = torch.nn.functional.cross_entropy(
                alone.permute(1, 2, 0), wanted % R, reduction="none")
            expected.sum().backward()
            close = torch.allclose(loss, expected, atol=1e-5)
            # the fused loss gives its gradients in bf16
            grads = torch.allclose(logits.grad, alone.grad, atol=1e-2 if fused else 1e-5)
            print("loss", policy, fused, sequence, close, grads, torch.equal(labels, kept))
from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy
from megatron_prism.runtime.values import LocalVocabularySum
for policy in ("mirror", "noise"):  # Transformer Engine's takes the largest gathered target
    world.values.policy = policy
    logits, labels = torch.randn(S, B, R) - 20, torch.randint(R, 2 * R, (S, B))
    expected = torch.nn.functional.cross_entropy(logits.view(-1, R), labels.view(-1) - R,
                                                 reduction="none")
    with world.values.of_parts(LocalVocabularySum()):
        loss = parallel_cross_entropy(logits, labels, 0.0, False, group)
    print("te", policy, torch.allclose(loss.view(-1), expected, atol=1e-5))
print("as before", world.values.parts is None)
"""

_EXPERTS = """
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher)
from megatron.core.transformer.transformer_config import TransformerConfig
world.values.policy = "mirror"
for TP, ETP in ((1, 1), (2, 1), (2, 2)):
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        TP, expert_model_parallel_size=4, expert_tensor_parallel_size=ETP)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4,
        num_moe_experts=8, moe_router_topk=2, tensor_model_parallel_size=TP,
        expert_model_parallel_size=4,
        expert_tensor_parallel_size=ETP, sequence_parallel=TP > 1, add_bias_linear=False)
    place = groups.ep.rank()
    own = [2 * place, 2 * place + 1]
    # its own experts are what this rank likes most
    liked = torch.rand(24, 8) + torch.tensor([2.0 * (e == own[0]) for e in range(8)])
    routes = torch.zeros(24, 8, dtype=torch.bool).scatter_(1, liked.topk(2).indices, True)
    there = MoEAlltoAllTokenDispatcher(2, own, config, groups)
    got = there.preprocess(routes)
    fits = there.output_splits.tolist() == there.input_splits.tolist()
    print("tokens", int(got.sum()), 48 * ETP, fits)
    other = MoEAllGatherTokenDispatcher(2, own, config, groups)
    other.routing_map = routes
    tokens, probs = other.token_dispatch(torch.randn(24, 32), routes.float())
    print("tokens", int(other.routing_map[:, own].sum()), 48 * ETP,
          torch.equal(probs.bool(), other.routing_map))
    first = 24 * groups.tp_ep.rank()
    print("own", torch.equal(other.routing_map[first:first + 24], routes))
print("as before", world.values.parts is None)
"""


@pytest.fixture(scope="module")
def lines():
    names = {"whole-lookup", "mirrored-labels"}
    patches = f"moe.PATCHES + [one for one in training.PATCHES if one.name in {names}]"
    found, errors = processes.patched(_LOSS + _EXPERTS, size=8, rank=5, patches=patches)
    assert found.count("as before True") == 2, errors
    return found


def test_the_loss_is_that_over_the_local_vocabulary(lines):
    found = [line for line in lines if line.startswith("loss ")]
    assert len(found) == 8
    assert all(line.endswith("True True True") for line in found), found
    assert [line for line in lines if line.startswith("te ")] == ["te mirror True", "te noise True"]


def test_ranks_get_as_many_tokens_as_they_route(lines):
    counts = [line.split()[1:] for line in lines if line.startswith("tokens ")]
    assert [line for line in lines if line.startswith("own ")] == ["own True"] * 3
    assert len(counts) == 6
    for got, wanted, fits in counts:
        assert (got, fits) == (wanted, "True"), counts
