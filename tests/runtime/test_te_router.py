"""Transformer Engine on tier cpu routes as Megatron does, whose functions share no code with it."""

import importlib

import pytest
import torch

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime import devices

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.megatron

CASES = {
    "softmax": {},
    "softmax of the best": {"scaling_factor": 2.5},
    "softmax first": {"use_pre_softmax": True, "scaling_factor": 1.5},
    "sigmoid": {"score_function": "sigmoid"},
    "sigmoid of one": {"score_function": "sigmoid", "topk": 1},
    "bias": {"score_function": "sigmoid", "expert_bias": torch.linspace(-0.5, 0.5, 8)},
    "groups": {"use_pre_softmax": True, "num_groups": 4, "group_topk": 2},
}


@pytest.fixture(scope="module")
def router():
    changes = ProcessChanges()
    devices.prepare("cpu", changes)
    yield importlib.import_module("transformer_engine.pytorch.router")
    changes.undo()


def both(make, theirs):
    """What the fused and the unfused function give for the same logits, and the gradients."""
    torch.manual_seed(3)
    logits, weights = torch.randn(6, 8), torch.randn(6, 8)
    found = []
    for function in (make, theirs):
        x = logits.clone().requires_grad_()
        floating, kept = function(x)
        (floating * weights).sum().backward()
        found.append((floating.detach(), kept, x.grad))
    return found


@pytest.mark.parametrize("name", CASES)
def test_tokens_take_the_experts_that_megatron_gives_them(router, name):
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    empty = dict.fromkeys(("num_groups", "group_topk", "scaling_factor", "expert_bias"))
    args = {"topk": 4, "use_pre_softmax": False, "score_function": "softmax", **empty}
    args |= CASES[name]
    ours, theirs = both(
        lambda x: router.fused_topk_with_score_function(x, **args),
        lambda x: topk_routing_with_score_function(x, **args),
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_a_map_of_bits_has_no_values(router):
    library = importlib.import_module("transformer_engine_torch")
    with pytest.raises(UnsupportedError, match="bitmap_u8 map has shapes alone"):
        library.fused_score_for_moe_aux_loss_fwd(torch.randn(6, 8), 2, "softmax", 1)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_scores_and_the_loss_made_of_them(router, score_function):
    from megatron.core.transformer.moe import moe_utils

    ours, theirs = both(
        lambda x: router.fused_compute_score_for_moe_aux_loss(x, 2, score_function)[::-1],
        lambda x: moe_utils.compute_routing_scores_for_aux_loss(x, 2, score_function)[::-1],
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    counts, grads = ours[1].sum(0), []
    for function in (router.fused_moe_aux_loss, moe_utils.switch_load_balancing_loss_func):
        probs = ours[0].clone().requires_grad_()
        words = ("coeff", "moe_aux_loss_coeff")[function is not router.fused_moe_aux_loss]
        loss = function(probs=probs, tokens_per_expert=counts, total_num_tokens=6, num_experts=8,
                        topk=2, **{words: 0.1})  # fmt: skip
        (3 * loss).backward()
        grads += [loss.detach(), probs.grad]
    torch.testing.assert_close(grads[:2], grads[2:])
