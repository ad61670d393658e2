"""Received activations of known tokens: the same vector for the same token, and none alike."""

from types import SimpleNamespace

import pytest
from helpers import patching, processes

torch = pytest.importorskip("torch")

from megatron_prism.core.errors import UnsupportedError  # noqa: E402
from megatron_prism.emulate.patches import pipeline  # noqa: E402
from megatron_prism.emulate.patches.pipeline import tokens_of  # noqa: E402
from megatron_prism.runtime.values import (  # noqa: E402
    COUNT,
    TokenVectors,
    Values,  # noqa: E402
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_one_vector_and_no_other_token_has_it(dtype):
    tokens = torch.tensor([[3, 4], [5, 3], [0, COUNT + 4]])
    target = torch.empty(3, 2, 512, dtype=dtype, requires_grad=True)
    TokenVectors().fill(target, tokens)
    rows = target.detach().float()
    assert torch.equal(rows[0, 0], rows[1, 1])
    assert torch.equal(rows[0, 1], rows[2, 1])  # beyond COUNT they begin anew
    different = torch.stack([rows[0, 0], rows[0, 1], rows[1, 0], rows[2, 0]])
    cosines = torch.nn.functional.cosine_similarity(different[:, None], different[None], dim=-1)
    assert (cosines - torch.eye(4)).abs().max() < 0.2  # 512 elements: 0.044 is usual
    again = torch.empty(3, 2, 512, dtype=dtype)
    TokenVectors().fill(again, tokens)  # of another rank
    assert torch.equal(again, target.detach())


def test_vectors_are_of_the_scale_of_a_residual_stream():
    tokens = torch.arange(4096).reshape(2048, 2)  # neighbours in the vocabulary
    target = torch.empty(2048, 2, 64)
    TokenVectors().fill(target, tokens)
    assert abs(target.mean()) < 0.05
    assert abs(target.std() - 1) < 0.05
    assert len(torch.unique(target.reshape(-1, 64), dim=0)) == 4096


def test_tokens_are_the_labels_before():
    tokens = torch.randint(0, 100, (2, 9))
    labels = tokens[:, 1:]
    assert torch.equal(tokens_of(labels, 8, 0, 1)[1:], tokens[:, 1:-1].t())
    # sequence parallelism: a stretch of it
    whole = tokens_of(labels, 8, 0, 1)
    assert torch.equal(tokens_of(labels, 2, 3, 4), whole[6:])
    assert tokens_of(labels, 5, 0, 4) is None
    assert tokens_of(labels[0], 8, 0, 1) is None


def test_only_noise_that_came_as_an_activation_is_told():
    values = Values()
    came, gradient, other = (torch.empty(4, 1, 8) for _ in range(3))
    with values.expecting(activation=came, gradient=gradient):
        values.receive(came)
        values.receive(gradient)
    values.receive(other)
    assert values.is_noise(came)
    assert not values.is_noise(gradient)
    assert not values.is_noise(other)
    values.fill_vectors(came, torch.zeros(4, 1, dtype=torch.int64))
    assert torch.equal(came[0], came[3])
    assert not values.is_noise(came)  # once


class _Group:
    def __init__(self, place, size=2):
        self.place, self.count = place, size

    def rank(self):
        return self.place

    def size(self):
        return self.count


@pytest.mark.parametrize(("place", "virtual", "whole"), [(1, True, True), (0, True, False),
                                                         (1, False, False)])  # fmt: skip
def test_the_last_rank_of_a_ring_sends_nothing_unwritten(monkeypatch, place, virtual, whole):
    """Transformer Engine's backward leaves half of a buffer as it is, which a neighbour adds up."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.cp_group = group
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return torch.empty((2, 2), dtype=gradient.dtype).view(4), None

    def dirty(*args, **kwargs):
        return torch.full(args[0], float("nan"))

    module = SimpleNamespace(AttnFuncWithCPAndKVP2P=Attention)
    monkeypatch.setattr(pipeline, "values_of", lambda group: Values() if virtual else None)
    patching.apply("whole-ring", module, patching.context())
    monkeypatch.setattr(torch, "empty", dirty)
    x = torch.ones(4, requires_grad=True)
    Attention.apply(x, _Group(place)).sum().backward()
    assert bool((x.grad == 0).all()) == whole
    assert torch.empty is dirty


BATCH = """
import sys
import torch
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime import devices as tiers
here = tiers.prepare(sys.argv[1], ProcessChanges())
from megatron.core.tensor_parallel import data
from megatron_prism.emulate import patch
from megatron_prism.emulate.patches import PATCHES
from megatron_prism.runtime import virtual_world
from megatron_prism.runtime.values import Values
local = int(sys.argv[2])
virtual_world.start(virtual_world.VirtualWorld(2, local, (local,), Values(), here.device))
group = torch.distributed.new_group([0, 1], group_desc="TENSOR_MODEL_PARALLEL_GROUP")
context = patch.PatchContext(lambda: None, None, here.name == "meta", (local,), local)
patch.apply([one for one in PATCHES if one.name == "own-broadcasts"], context)
batch = {"image": torch.rand(2, 3, 4), "mask": torch.ones(2, 5)}
found = data.broadcast_data(["image", "mask"], batch, torch.float32, tp_group=group)
assert [tuple(t.shape) for t in found.values()] == [(2, 3, 4), (2, 5)]
assert here.name == "meta" or all(torch.equal(found[key], batch[key]) for key in batch)
assert found["image"].untyped_storage().nbytes() == 4 * (24 + 10)  # one buffer, as Megatron's
"""


@pytest.mark.megatron
@pytest.mark.parametrize(("tier", "rank"), [("cpu", 1), ("meta", 0), ("meta", 1)])
def test_a_batch_that_a_virtual_rank_would_send_is_what_was_read(tier, rank):
    """As pretrain_vlm.py, pretrain_bert.py and pretrain_t5.py ask for theirs."""
    pytest.importorskip("megatron.core")
    done = processes.python(BATCH, tier, rank)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("meta", [True, False])
def test_images_whose_places_are_values_are_refused_on_shapes(meta):
    class LLaVAModel:
        pass

    module = SimpleNamespace(LLaVAModel=LLaVAModel)
    patching.apply("images-have-places", module, patching.context(meta))
    if not meta:
        LLaVAModel()
        return
    with pytest.raises(UnsupportedError, match="tier meta has no values") as caught:
        LLaVAModel()
    assert caught.value.fix == "use --prism-tier cpu"
