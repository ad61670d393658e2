"""The virtual Transformer Engine holds what TE holds, and lets go when TE lets go."""

import weakref

import pytest
import torch

from megatron_prism.runtime.devices.live_bytes import LiveBytes
from megatron_prism.runtime.te import base
from megatron_prism.runtime.te.attention import DotProductAttention
from megatron_prism.runtime.te.grouped_linear import GroupedLinear
from megatron_prism.runtime.te.linear import LayerNormLinear, Linear


@pytest.fixture
def live():
    """Live bytes of a meta run that takes its workspaces anew."""
    held = {kind: list(tensors) for kind, tensors in base.workspaces.items()}
    for tensors in base.workspaces.values():
        tensors.clear()
    with LiveBytes("meta") as counter:
        yield counter
    for kind, tensors in held.items():
        base.workspaces[kind][:] = tensors


def meta(*shape, **kwargs):
    return torch.empty(*shape, device="meta", **kwargs)


def test_plain_products_share_a_workspace_and_grouped_ones_have_four(live):
    Linear(8, 8, bias=False, device="meta")(meta(4, 8))
    assert live.current() == base.WORKSPACE_BYTES
    grouped = GroupedLinear(2, 8, 8, bias=False, device="meta")
    taken = live.current()
    grouped(meta(4, 8), [2, 2])
    grouped(meta(4, 8), [2, 2])
    assert live.current() - taken == 4 * base.WORKSPACE_BYTES


def test_the_attention_mask_lives_no_longer_than_forward(live):
    q = meta(6, 2, 4, 8, requires_grad=True)
    mask = meta(1, 1, 6, 6, dtype=torch.bool)
    seen = weakref.ref(mask.untyped_storage())
    out = DotProductAttention(4, 8)(q, q, q, mask, attn_mask_type="causal")
    del mask
    assert seen() is None
    out.sum().backward()


def test_the_norms_output_is_given_back_before_the_norms_backward(live):
    module = LayerNormLinear(64, 32, bias=False, normalization="RMSNorm", device="meta")
    x = meta(128, 64, requires_grad=True)
    out = module(x)
    normed = out.grad_fn.next_functions and out.grad_fn.saved_tensors[5]
    assert normed.shape == (128, 64)
    out.sum().backward()
    assert normed.numel() == 0


def test_fused_gradients_take_one_dummy_per_shape_but_one_per_grouped_weight(live):
    def fused(module):
        for weight in module.parameters():
            weight.main_grad = meta(*weight.shape)
            weight.grad_added_to_main_grad = False
        return module

    x, sizes = meta(4, 8, requires_grad=True), {"bias": False, "device": "meta"}
    fuse = {"fuse_wgrad_accumulation": True, **sizes}
    linears = [fused(Linear(8, 8, **fuse)) for _ in range(3)]
    linears[0](x).sum().backward()
    assert {m(x).sum().backward() for m in linears} == {None}
    assert len({m.weight.grad.untyped_storage()._cdata for m in linears[1:]}) == 1
    grouped = fused(GroupedLinear(3, 8, 8, **fuse))
    grouped(x, [2, 1, 1]).sum().backward()
    assert len({w.grad.untyped_storage()._cdata for w in grouped.parameters()}) == 3


@pytest.mark.parametrize("bias", [False, True])
def test_products_on_meta_run_no_torch_kernel(bias, live):
    """So that whoever counts torch's own workspaces does not count TE's products."""
    from torch.utils._python_dispatch import TorchDispatchMode

    ran = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ran.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    module = LayerNormLinear(64, 32, bias=bias, device="meta")
    with Watch():
        module(meta(16, 64, requires_grad=True)).sum().backward()
    assert not ran & {"mm", "addmm", "linear", "matmul", "native_layer_norm"}
