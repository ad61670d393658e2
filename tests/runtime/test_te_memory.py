"""The virtual Transformer Engine holds what TE holds, and lets go when TE lets go."""

import weakref

import pytest
import torch

from megatron_prism.runtime.devices.live_bytes import LiveBytes
from megatron_prism.runtime.te import base
from megatron_prism.runtime.te.attention import DotProductAttention
from megatron_prism.runtime.te.linear import GroupedLinear, LayerNormLinear, Linear


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


def test_fused_gradients_take_one_dummy_per_shape(live):
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
    dummies = {w.grad.untyped_storage()._cdata for w in grouped.parameters()}
    assert dummies == {linears[1].weight.grad.untyped_storage()._cdata}


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


def _kept(live, monkeypatch, backend, dropout=0.0):
    """Bytes that attention [512, 2, 4 heads, 64] bf16 keeps for backward beside its result."""
    for name in ("FLASH", "FUSED", "UNFUSED"):
        monkeypatch.setenv(f"NVTE_{name}_ATTN", str(int(name == backend)))
    q, k, v = (meta(512, 2, 4, 64, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    module = DotProductAttention(4, 64, attention_dropout=dropout)
    before = live.current()
    out = module(q, k, v)
    kept = live.current() - before - out.untyped_storage().nbytes()
    out.sum().backward()
    assert [t.grad.shape for t in (q, k, v)] == [q.shape] * 3
    return kept


def test_unfused_attention_keeps_what_softmax_gave_and_what_dropout_left(live, monkeypatch):
    scores = 2 * 4 * 512 * 512
    assert _kept(live, monkeypatch, "UNFUSED") == 2 * scores  # bf16
    assert _kept(live, monkeypatch, "UNFUSED", dropout=0.1) == (2 + 2 + 2) * scores  # and its mask
    one = 2 * 4 * 512 * 64 * 2  # flash-attn keeps q, k, v and its result batch first, and sums
    assert _kept(live, monkeypatch, "FLASH") == 4 * one + 2 * 4 * 512 * 4


def test_attention_takes_the_unfused_way_where_no_kernel_fits(live, monkeypatch):
    for name in ("FLASH", "FUSED", "UNFUSED"):
        monkeypatch.setenv(f"NVTE_{name}_ATTN", "1")
    q = meta(64, 2, 4, 64, requires_grad=True)  # fp32
    out = DotProductAttention(4, 64)(q, q, q)
    assert out.grad_fn.name() == "ViewBackward0"


@pytest.mark.parametrize("mask_type", ["causal", "no_mask", "padding"])
def test_unfused_attention_has_the_values_of_fused(monkeypatch, mask_type):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch.manual_seed(0)
    q, k, v = (torch.randn(32, 2, 4, 8, dtype=torch.bfloat16) for _ in "qkv")
    mask = None
    if mask_type == "padding":
        mask = torch.zeros(2, 1, 1, 32, dtype=torch.bool)
        mask[1, ..., 20:] = True
    module = DotProductAttention(4, 8, attn_mask_type=mask_type)
    found = []
    for unfused in "01":
        monkeypatch.setenv("NVTE_UNFUSED_ATTN", unfused)
        monkeypatch.setenv("NVTE_FUSED_ATTN", str(1 - int(unfused)))
        monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
        found.append(module(q, k, v, mask).float()[:20])
    assert torch.allclose(*found, atol=0.03)
