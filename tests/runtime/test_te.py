"""The virtual Transformer Engine computes what torch computes and saves what TE saves."""

import importlib
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist
from torch.nn.functional import layer_norm, linear, scaled_dot_product_attention

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.runtime import te, virtual_world
from megatron_prism.runtime.te import attention, context_parallel, fp8, optimizers
from megatron_prism.runtime.te.attention import (
    DotProductAttention,
    SplitAlongDim,
)
from megatron_prism.runtime.te.base import general_gemm
from megatron_prism.runtime.te.linear import GroupedLinear, LayerNormLinear, Linear
from megatron_prism.runtime.te.moe import (
    moe_permute_with_probs,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from megatron_prism.runtime.te.row_kernels import (
    LayerNorm,
    RMSNorm,
    apply_rotary_pos_emb,
    parallel_cross_entropy,
)
from megatron_prism.runtime.te.unsupported import Lazy, absent_function
from megatron_prism.runtime.values import Values


@pytest.fixture(autouse=True)
def _fused_and_seeded(monkeypatch):
    """The one kernel, though these tensors are fp32, which it does not take on a GPU."""
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    torch.manual_seed(1)


def leaf(*shape, device="cpu"):
    return torch.randn(*shape, device=device).requires_grad_()


def same(ours, theirs, inputs):
    """Outputs and gradients agree; returns nothing."""
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    grad = torch.randn_like(theirs)
    for a, b in zip(
        torch.autograd.grad(ours, inputs, grad, retain_graph=True),
        torch.autograd.grad(theirs, inputs, grad, retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def saved(out):
    """Shapes and dtypes that the last function keeps, parameters included."""
    whole = out  # torch 2.11 frees what a node keeps with the tensor that it led to
    while not hasattr(out.grad_fn, "saved_tensors"):
        out = SimpleNamespace(grad_fn=out.grad_fn.next_functions[0][0])
    kept = [t if t is None else tuple(t.shape) for t in out.grad_fn.saved_tensors]
    del whole
    return kept


def test_linear():
    module, x = Linear(8, 6, device="cpu"), leaf(5, 2, 8)
    same(module(x), linear(x, module.weight, module.bias), [x, module.weight, module.bias])
    assert saved(module(x)) == [(10, 8), (6, 8), (6, 8), (6,)]


def test_linear_returns_its_bias():
    module, x = Linear(8, 6, return_bias=True, device="cpu"), leaf(5, 8)
    out, bias = module(x)
    assert bias is module.bias
    same(out, linear(x, module.weight), [x, module.weight])


@pytest.mark.parametrize("kind", [Linear, LayerNormLinear, GroupedLinear])
def test_another_dtype_than_the_parameters_is_refused(kind):
    """As Transformer Engine does under ``--fp32-residual-connection``."""
    words = (2, 8, 16) if kind is GroupedLinear else (8, 16)
    module = kind(*words, params_dtype=torch.bfloat16, device="cpu")
    more = ([1, 1],) if kind is GroupedLinear else ()
    x = torch.randn(2, 8)
    with pytest.raises(TypeError, match="input dtype: torch.float32 and .* dtype: torch.bfloat16"):
        module(x, *more)
    module(x.bfloat16(), *more)
    with pytest.raises(TypeError, match="autocasted region"):
        module(x, *more)


def test_frozen_weight_keeps_no_input():
    module, x = Linear(8, 6, bias=False, device="cpu"), leaf(5, 8)
    module.weight.requires_grad_(False)
    assert saved(module(x))[0] is None


def test_gradient_goes_into_main_grad():
    module, x = Linear(8, 6, bias=False, fuse_wgrad_accumulation=True, device="cpu"), leaf(5, 8)
    module.weight.main_grad = torch.ones(6, 8)
    module.weight.grad_added_to_main_grad = False
    module(x).sum().backward()
    expected = 1 + x.detach().sum(0).expand(6, 8)
    torch.testing.assert_close(module.weight.main_grad, expected)
    assert module.weight.grad_added_to_main_grad
    module(x, is_first_microbatch=True).sum().backward()
    torch.testing.assert_close(module.weight.main_grad, expected - 1)


def test_postponed_weight_gradient():
    module, x = Linear(8, 6, bias=False, delay_wgrad_compute=True, device="cpu"), leaf(5, 8)
    module(x).sum().backward()
    assert module.weight.grad is None
    module.backward_dw()
    torch.testing.assert_close(module.weight.grad, x.detach().sum(0).expand(6, 8))


@pytest.mark.parametrize("kind", [Linear, GroupedLinear])
def test_postponed_weight_gradient_has_no_history_of_its_own(kind):
    """Megatron calls it outside of any backward, and inputs of later layers have a history."""
    grouped = kind is GroupedLinear
    module = kind(*[1] * grouped, 8, 6, bias=False, delay_wgrad_compute=True,
                  fuse_wgrad_accumulation=True, device="cpu")  # fmt: skip
    weight = module.weight0 if grouped else module.weight
    whole = torch.zeros(2, 6, 8)  # main_grad is a part of the buffer of all gradients
    weight.main_grad, x = whole[0], leaf(5, 8)
    weight.grad_added_to_main_grad = False
    found = []  # as DDP's hook finds it, which runs when the gradient is there, and not before
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: found.append(weight.grad))
    assert weight.skip_backward_post_hook
    for times in (1, 2):
        module(2 * x, *[[5]] * grouped).sum().backward()
        assert len(found) == times - 1
        module.backward_dw()
        assert found[-1].shape == weight.shape
        assert weight.grad_added_to_main_grad
        torch.testing.assert_close(whole[0], times * 2 * x.detach().sum(0).expand(6, 8))
    assert not whole.requires_grad


@pytest.mark.parametrize("centered", [False, True])
def test_norms(centered):
    x = leaf(5, 2, 8)
    for kind in (LayerNorm, RMSNorm):
        module = kind(8, device="cpu", zero_centered_gamma=centered, sequence_parallel=True)
        torch.nn.init.normal_(module.weight)
        gamma = module.weight + centered
        if kind is LayerNorm:
            expected = layer_norm(x, (8,), gamma, module.bias)
            kept = [(10, 8), (10,), (10,)]
        else:
            expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gamma
            kept = [(10, 8), (10,)]
        same(module(x), expected, [x, *module.parameters()])
        assert saved(module(x)) == kept
        assert all(p.sequence_parallel for p in module.parameters())


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_layer_norm_linear(kind):
    module, x = LayerNormLinear(8, 6, normalization=kind, device="cpu"), leaf(5, 2, 8)
    gamma = module.layer_norm_weight
    if kind == "LayerNorm":
        normed = layer_norm(x, (8,), gamma, module.layer_norm_bias)
    else:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gamma
    same(module(x), linear(normed, module.weight, module.bias), [x, *module.parameters()])
    mean = (10,) if kind == "LayerNorm" else None
    assert saved(module(x)) == [(10, 8), (6, 8), (6, 8), (6,), (8,), (10, 8), mean, (10,)]


def test_grouped_linear():
    module, x = GroupedLinear(3, 8, 6, device="cpu"), leaf(9, 8)
    parts = x.split([4, 0, 5])
    weights = [getattr(module, f"weight{i}") for i in range(3)]
    biases = [getattr(module, f"bias{i}") for i in range(3)]
    expected = torch.cat([linear(*a) for a in zip(parts, weights, biases, strict=True)])
    same(module(x, [4, 0, 5]), expected, [x, *weights, *biases])
    assert saved(module(x, [4, 0, 5]))[:3] == [(4, 8), (0, 8), (5, 8)]


@pytest.mark.parametrize("mask_type", ["causal", "no_mask", "arbitrary"])
@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_attention(mask_type, form):
    module = DotProductAttention(4, 8, qkv_format=form, attn_mask_type=mask_type)
    rows = (6, 2) if form == "sbhd" else (2, 6)
    q, k, v = leaf(*rows, 4, 8), leaf(*rows, 2, 8), leaf(*rows, 2, 8)
    hidden = torch.rand(2, 1, 6, 6) < 0.3 if mask_type == "arbitrary" else None
    if hidden is not None:
        hidden[..., 0] = False
    order = (1, 2, 0, 3) if form == "sbhd" else (0, 2, 1, 3)
    back = (2, 0, 1, 3) if form == "sbhd" else (0, 2, 1, 3)
    expected = scaled_dot_product_attention(
        *(t.permute(order) for t in (q, k, v)),
        attn_mask=None if hidden is None else ~hidden,
        is_causal=mask_type == "causal",
        enable_gqa=True,
    )
    out = module(q, k, v, hidden)
    same(out, expected.permute(back).reshape(*rows, 32), [q, k, v])
    assert saved(out) == [(*rows, 4, 8), (*rows, 2, 8), (*rows, 2, 8), (*rows, 4, 8), (48,)]


@pytest.mark.parametrize("window", [(2, 0), (0, 0), (9, 0), (-1, 0)])
@pytest.mark.parametrize("softmax", ["vanilla", "off-by-one", "learnable"])
def test_sliding_windows_and_softmax_offsets(window, softmax, monkeypatch):
    monkeypatch.setattr(attention, "_DEVICE", "cpu")
    module = DotProductAttention(4, 8, window_size=window, softmax_type=softmax)
    q, k, v = leaf(6, 2, 4, 8), leaf(6, 2, 2, 8), leaf(6, 2, 2, 8)
    rows, columns = torch.arange(6)[:, None], torch.arange(6)
    seen = (columns <= rows) & ((window[0] < 0) | (columns >= rows - window[0]))
    a, b, c = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    b, c = (t.repeat_interleave(2, dim=1) for t in (b, c))
    weights = (a @ b.transpose(2, 3) / 8**0.5).exp() * seen
    total = weights.sum(-1, keepdim=True)
    inputs = [q, k, v]
    if softmax == "off-by-one":
        total = total + 1
    elif softmax == "learnable":
        inputs.append(module.softmax_offset)
        assert [name for name, _ in module.named_parameters()] == ["softmax_offset"]
        total = total + module.softmax_offset.exp().view(1, 4, 1, 1)
    expected = (weights / total @ c).permute(2, 0, 1, 3).reshape(6, 2, 32)
    same(module(q, k, v), expected, inputs)
    kept = saved(module(q, k, v))
    assert kept[3:5] == [(6, 2, 4, 8), (48,)]
    assert len(kept) == 5 + (softmax != "vanilla")


def test_a_window_costs_what_it_sees(monkeypatch):
    from megatron_prism.runtime.te import context_parallel

    found = []
    monkeypatch.setattr(
        context_parallel, "fused", lambda name, flops, *tensors: found.append(flops)
    )
    for window in ((-1, 0), (15, 0), (500, 0)):
        module = DotProductAttention(4, 8, window_size=window)
        module(*(torch.empty(64, 2, 4, 8, device="meta") for _ in range(3)))
    whole = 2 * 4 * 2 * 64 * 64 * 16 // 2
    assert found == [whole, 2 * 4 * 2 * 64 * 16 * 16, whole]


def test_a_learned_offset_has_a_gradient_on_shapes_too(monkeypatch):
    monkeypatch.setattr(attention, "_DEVICE", "meta")
    module = DotProductAttention(4, 8, window_size=(2, 0), softmax_type="learnable")
    q, k, v = (leaf(6, 2, 4, 8, device="meta") for _ in range(3))
    module(q, k, v).sum().backward()
    assert module.softmax_offset.grad.shape == (4,)
    assert q.grad.shape == q.shape


def test_a_window_under_context_parallelism_is_refused(monkeypatch):
    module = DotProductAttention(4, 8, window_size=(2, 0))
    monkeypatch.setattr(attention, "context_size", lambda group: 2)
    with pytest.raises(UnsupportedError, match="sliding window"):
        module(*(leaf(6, 2, 4, 8) for _ in range(3)))


def _clipped(query, key=None, **settings):
    module = DotProductAttention(4, 8, num_gqa_groups=2, return_max_logit=True, **settings)
    key = query[:, :, :2] if key is None else key
    return module(query, key, key)


def test_the_largest_logit_of_each_head_is_that_of_the_past():
    query, key = torch.randn(6, 2, 4, 8), torch.randn(6, 2, 2, 8)
    out, largest = _clipped(query, key)
    for head in range(4):
        seen = [float(query[i, b, head] @ key[j, b, head // 2]) / 8**0.5
                for b in range(2) for i in range(6) for j in range(i + 1)]  # fmt: skip
        assert float(largest[head]) == pytest.approx(max(seen), rel=1e-5)
    assert out.shape == (6, 2, 32)
    _, largest = _clipped(query.to("meta"), key.to("meta"))
    assert (largest.shape, largest.dtype) == ((4,), torch.float32)


def test_attention_of_packed_sequences():
    module = DotProductAttention(2, 8, qkv_format="thd", attn_mask_type="padding_causal")
    q, k, v = (leaf(7, 2, 8) for _ in range(3))
    bounds = torch.tensor([0, 3, 7], dtype=torch.int32)
    out = module(q, k, v, cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    first = DotProductAttention(2, 8)(*(t[:3, None] for t in (q, k, v)))
    torch.testing.assert_close(out[:3], first[:, 0])


def test_blocks_under_dropout_have_the_gradients_of_what_they_computed():
    """Forward and backward drop the same probabilities, whatever the order of the blocks."""
    o = SimpleNamespace(form="sbhd", mask_type="causal", scale=0.3, dropout=0.4)
    q, blocks = leaf(4, 1, 4, 8), [(leaf(4, 1, 2, 8), leaf(4, 1, 2, 8)) for _ in range(2)]
    seed = context_parallel.dropout_seed(o)
    out, lse = context_parallel.forward_values(q, blocks, o, 1, seed)
    kept, _ = context_parallel.forward_values(q, blocks, o, 1)
    assert not torch.allclose(out, kept)
    grad = torch.randn_like(out)
    dq, *wanted = torch.autograd.grad(out, [q, *blocks[1], *blocks[0]], grad)
    with torch.no_grad():
        parts = [
            context_parallel.block_gradients(q, blocks[i], out, grad, lse, o, (1, i, 2), seed)
            for i in (1, 0)
        ]
    got = [parts[0][0] + parts[1][0], *parts[0][1:], *parts[1][1:]]
    torch.testing.assert_close(got, [dq, *wanted], rtol=1e-4, atol=1e-5)


def test_dropped_probabilities_are_made_up_for():
    o = SimpleNamespace(form="sbhd", mask_type="no_mask", scale=0.3, dropout=0.25)
    q, block = leaf(4, 1, 2, 8), (leaf(4, 1, 2, 8), torch.ones(4, 1, 2, 8))
    outs = [context_parallel.forward_values(q, [block], o, 0, seed)[0] for seed in range(400)]
    mean = torch.stack(outs).mean((0, -1))  # of weights that sum up to one
    torch.testing.assert_close(mean, torch.ones_like(mean), rtol=0, atol=0.1)


@pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("kind", context_parallel.COMM_TYPES[:3])
@pytest.mark.parametrize("policy", ["mirror", "noise"])
@pytest.mark.parametrize("rank", [0, 1])
def test_attention_whose_peers_are_virtual(kind, dropout, policy, rank):
    """What comes from them has the scale of what is here: gradients too."""
    values = Values(policy, rank=rank)
    virtual_world.start(virtual_world.VirtualWorld(2, rank, (rank,), values, torch.device("cpu")))
    try:
        group = dist.new_group([0, 1], group_desc="CONTEXT_PARALLEL_GROUP")
        module = DotProductAttention(
            4, 8, attention_dropout=dropout, cp_group=group, cp_comm_type=kind
        )
        q, k, v = leaf(6, 2, 4, 8), leaf(6, 2, 2, 8), leaf(6, 2, 2, 8)
        out = module(q, k, v)
        grads = torch.autograd.grad(out, [q, k, v], torch.full_like(out, 1e-6))
    finally:
        virtual_world.stop()
    assert torch.isfinite(out).all()
    for grad in grads:
        assert 0 < grad.abs().max() < 1e-4


@pytest.mark.parametrize(
    ("settings", "form", "named"),
    [
        ({"attn_mask_type": "arbitrary"}, "sbhd", "an arbitrary mask"),
        ({"attn_mask_type": "padding_causal"}, "sbhd", "a padding mask"),
        ({}, "thd", "packed sequences"),
        ({"cp_comm_type": "a2a"}, "thd", "packed sequences"),
        ({"cp_comm_type": "a2a"}, "sbhd", "3 attention heads over 2"),
        ({"cp_comm_type": "ring"}, "sbhd", "type 'ring'"),
    ],
)
def test_what_context_parallelism_lacks_is_named(settings, form, named):
    virtual_world.start(virtual_world.VirtualWorld(2, 0, (0,), Values(), torch.device("cpu")))
    try:
        group, rows = dist.new_group([0, 1]), (6,) if form == "thd" else (6, 2)

        def use():
            module = DotProductAttention(3, 8, qkv_format=form, cp_group=group, **settings)
            module(*(leaf(*rows, 3, 8) for _ in range(3)))

        with pytest.raises(UnsupportedError, match=named):
            use()
    finally:
        virtual_world.stop()


def test_split_gives_views():
    x = leaf(3, 12)
    parts = SplitAlongDim.apply(x, 1, [4, 8])
    assert parts[1]._base is not None or parts[1].untyped_storage()._cdata == (
        x.untyped_storage()._cdata
    )
    (parts[0].sum() + 2 * parts[1].sum()).backward()
    assert x.grad[0].tolist() == [1] * 4 + [2] * 8


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_saves_only_the_frequencies(interleaved):
    t, angles = leaf(5, 2, 3, 10), torch.randn(5, 1, 1, 4)
    freqs = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles] * 2, -1)
    out = apply_rotary_pos_emb(t, freqs, interleaved=interleaved, fused=True)
    pairs = t[..., :8].unflatten(-1, (4, 2) if interleaved else (2, 4))
    a, b = pairs.unbind(-1 if interleaved else -2)
    turned = [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()]
    turned = torch.stack(turned, -1 if interleaved else -2).flatten(-2)
    same(out, torch.cat([turned, t[..., 8:]], -1), [t])
    assert saved(out) == [(5, 1, 1, 8), None]


def test_permutation_there_and_back():
    x, probs = leaf(6, 4), leaf(6, 3)
    routing = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 1], [1, 0, 1], [0, 1, 1], [1, 1, 0]])
    out, taken, row_map = moe_permute_with_probs(x, probs, routing, 12)
    expert, token = routing.t().nonzero(as_tuple=True)
    same(out, x[token], [x])
    out, taken, row_map = moe_permute_with_probs(x, probs, routing, 12)
    same(taken, probs[token, expert], [probs])
    y = leaf(12, 4)
    same(
        moe_unpermute(y, row_map, restore_shape=x.shape),
        x.new_zeros(6, 4).index_add(0, token, y),
        [y],
    )
    merged = moe_unpermute(y, row_map, probs, x.shape)
    weighted = y * probs[token, expert][:, None]
    same(merged, x.new_zeros(6, 4).index_add(0, token, weighted), [y, probs])
    assert saved(moe_unpermute(y, row_map, restore_shape=x.shape)) == [(6, 7)]


def test_chunks_are_sorted():
    x, probs = leaf(6, 4), leaf(6)
    sizes, order = torch.tensor([1, 2, 3]), torch.tensor([2, 0, 1])
    out, taken = moe_sort_chunks_by_index_with_probs(x, probs, sizes, order)
    same(out, x[[3, 4, 5, 0, 1, 2]], [x])
    assert taken.tolist() == probs[[3, 4, 5, 0, 1, 2]].tolist()


def test_cross_entropy_overwrites_the_logits():
    logits, target = torch.randn(5, 2, 9), torch.randint(0, 9, (5, 2))
    target[0, 0] = -100
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = parallel_cross_entropy(ours, target, 0.0, False, None, -100, False)
    expected = torch.nn.functional.cross_entropy(
        theirs.flatten(0, 1), target.flatten(), reduction="none"
    ).view(5, 2)
    torch.testing.assert_close(loss, expected)
    assert saved(loss) == [(5, 2, 9)]
    weights = torch.randn(5, 2)
    (loss * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("state", [torch.float16, torch.bfloat16])
def test_adam_with_short_states_is_nearly_adamw(state):
    p = torch.randn(7, 3).requires_grad_()
    ref = p.detach().clone().requires_grad_()
    ours = optimizers.FusedAdam([p], lr=0.1, exp_avg_dtype=state, exp_avg_sq_dtype=state)
    theirs = torch.optim.AdamW([ref], lr=0.1, weight_decay=0)
    for _ in range(5):
        p.grad = torch.randn(7, 3) * 1e-6  # whose square is 0 in fp16 without a scale
        ref.grad = p.grad.clone()
        ours.step()
        theirs.step()
    assert {value.dtype for value in ours.state[p].values()} == {state}
    torch.testing.assert_close(p, ref, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("dtypes", "more"),
    [
        # both of all, and one in bf16 on its way back; scales of fp16 are a few bytes
        pytest.param((torch.bfloat16, torch.float16), 3 * 2 * 4000 + 2000, id="in fp32 too"),
        pytest.param((torch.bfloat16, torch.bfloat16), 0, id="fused"),
    ],
)
def test_what_a_step_with_short_states_takes(dtypes, more):
    from megatron_prism.runtime.devices.live_bytes import LiveBytes

    with LiveBytes("meta") as live:
        params = [torch.empty(1000, device="meta") for _ in range(3)]
        moments, squares = dtypes
        adam = optimizers.FusedAdam(params, exp_avg_dtype=moments, exp_avg_sq_dtype=squares)
        for p in params:
            p.grad = torch.empty_like(p)
        adam.step()
        before = live.current()
        live.reset_peak()
        adam.step()
        assert live.current() == before
        assert 0 <= live.peak() - before - more < 64


def test_remainders_are_of_a_master_copy_in_fp32_alone():
    p = torch.zeros(8, dtype=torch.bfloat16).requires_grad_()
    adam = optimizers.FusedAdam(
        [p], master_weights=True, master_weight_dtype=torch.float16, store_param_remainders=True
    )
    p.grad = torch.ones_like(p)
    adam.step()
    assert adam.state[p]["master_param"].dtype == torch.float16


@pytest.mark.parametrize("remainders", [False, True])
def test_adam_is_adamw(remainders):
    dtype = torch.bfloat16 if remainders else torch.float32
    start = torch.randn(7, 3).to(dtype)
    p, ref = start.clone().requires_grad_(), start.float().requires_grad_()
    ours = optimizers.FusedAdam(
        [p], lr=0.1, weight_decay=0.1, master_weights=remainders, store_param_remainders=remainders
    )
    theirs = torch.optim.AdamW([ref], lr=0.1, weight_decay=0.1)
    for _ in range(5):
        p.grad = torch.randn(7, 3).to(dtype)
        ref.grad = p.grad.float()
        ours.step()
        theirs.step()
    torch.testing.assert_close(p.float(), ref, rtol=1e-2 if remainders else 1e-5, atol=1e-5)
    if remainders:
        joined = optimizers._joined(p, ours.state[p]["master_param"])
        torch.testing.assert_close(joined, ref.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("layout", "shape"), [("TN", (5, 6)), ("NN", (5, 6)), ("NT", (5, 6))])
def test_general_gemm(layout, shape):
    a = torch.randn(8, 6) if layout[0] == "N" else torch.randn(6, 8)
    b = torch.randn(8, 5) if layout[1] == "T" else torch.randn(5, 8)
    out = general_gemm(a, b, layout=layout, out_dtype=torch.float64)[0]
    wanted = (b.t() if layout[1] == "T" else b) @ (a if layout[0] == "N" else a.t())
    assert out.dtype == torch.float64
    torch.testing.assert_close(out.float(), wanted)
    assert general_gemm(a.to("meta"), b.to("meta"), layout=layout)[0].shape == shape


def test_multi_tensor():
    flag, tensors = torch.zeros(1, dtype=torch.int), [torch.ones(3), torch.ones(6)]
    total, each = optimizers.multi_tensor_applier(
        optimizers.multi_tensor_l2norm, flag, [tensors], True
    )
    assert total.tolist() == [3.0]
    torch.testing.assert_close(each, torch.tensor([3.0, 6.0]).sqrt())
    optimizers.multi_tensor_applier(optimizers.multi_tensor_scale, flag, [tensors, tensors], 0.5)
    assert tensors[0].tolist() == [0.5] * 3
    assert not flag.item()


def test_meta_has_shapes_and_no_temporaries():
    from megatron_prism.runtime.devices.live_bytes import LiveBytes

    with LiveBytes("meta") as live:
        module = LayerNormLinear(64, 32, bias=False, device="meta")
        x = torch.empty(128, 2, 64, device="meta", requires_grad=True)
        module(torch.empty(1, 1, 64, device="meta"))  # takes the workspace
        before = live.current()
        live.reset_peak()
        out = module(x)
        kept = 4 * (256 * 32 + 256 * 64 + 2 * 256)  # output, norm output, mean, deviation
        assert live.current() - before == live.peak() - before == kept
        out.sum().backward()
    assert out.shape == (128, 2, 32)
    assert x.grad.shape == x.shape


def test_meta_shapes():
    q = torch.empty(6, 2, 4, 8, device="meta", requires_grad=True)
    k = torch.empty(6, 2, 2, 8, device="meta", requires_grad=True)
    out = DotProductAttention(4, 8)(q, k, k)
    assert out.shape == (6, 2, 32)
    out.sum().backward()
    assert k.grad.shape == k.shape
    grouped = GroupedLinear(3, 8, 6, bias=False, device="meta")
    x = torch.empty(9, 8, device="meta", requires_grad=True)
    grouped(x, [0, 0, 0]).sum().backward()  # counts are unknown there
    assert (x.grad.shape, grouped.weight2.grad.shape) == ((9, 8), (6, 8))
    routing = torch.empty(6, 3, device="meta", dtype=torch.bool)
    out, taken, row_map = moe_permute_with_probs(x[:6], x[:6, :3], routing, 12)
    assert (out.shape, taken.shape, row_map.shape) == ((12, 8), (12,), (6, 7))
    with pytest.raises(UnsupportedError, match="unknown number of rows"):
        moe_permute_with_probs(x[:6], x[:6, :3], routing, -1)


@pytest.mark.parametrize(
    ("use", "named"),
    [
        (lambda: Linear(8, 8, device="cpu", ub_overlap_ag=True), "userbuffers"),
        (lambda: fp8.autocast(fp8_recipe=fp8.CustomRecipe()).__enter__(), "CustomRecipe"),
        (lambda: _clipped(torch.ones(2, 1, 4, 8), window_size=(1, 0)), "largest logit"),
        (lambda: absent_function("userbuffers", fix="leave it out")(), "userbuffers"),
        (lambda: Lazy("transformer_engine.pytorch.ops").Sequential(), "ops.Sequential"),
        (lambda: attention.DotProductAttention(4, 8, softmax_type="sparse"), "softmax_type"),
    ],
)
def test_what_is_missing_is_named(use, named):
    with pytest.raises(UnsupportedError, match=named) as caught:
        use()
    assert caught.value.fix


_JOB = """
import sys
import torch
tier, recipe = sys.argv[1:]
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime import devices as tiers
here = tiers.prepare(tier, ProcessChanges())
from megatron_prism.runtime import virtual_world
from megatron_prism.runtime.values import Values
values = Values("mirror", rank=1)
virtual_world.start(virtual_world.VirtualWorld(4, 1, [1], values, here.device))
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
parallel_state.initialize_model_parallel(2)
model_parallel_cuda_manual_seed(1)
config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4,
    num_query_groups=2, tensor_model_parallel_size=2, sequence_parallel=True, bf16=True,
    params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, normalization="RMSNorm",
    gradient_accumulation_fusion=False, attention_dropout=0.0, hidden_dropout=0.0,
    **({"fp8": "hybrid", "fp8_recipe": recipe} if recipe else {}))
model = GPTModel(config, get_gpt_layer_with_transformer_engine_spec(), 256, 32).cuda().bfloat16()
tokens = torch.zeros(2, 32, dtype=torch.long, device="cuda")
loss = model(tokens, tokens, None, labels=tokens)
from megatron.core.pipeline_parallel.schedules import custom_backward
custom_backward(loss.float().mean(), None)
assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
import transformer_engine
assert getattr(transformer_engine, "__prism_stand_in__", False) == (tier == "cpu")
if tier == "cpu":
    assert torch.isfinite(loss).all()
print("ran", tuple(loss.shape), type(model.decoder.layers[0].self_attention.linear_qkv).__name__)
"""


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.parametrize(
    ("tier", "recipe"), [("cpu", ""), ("meta", ""), ("meta", "delayed"), ("meta", "blockwise")]
)
def test_megatrons_own_layers_run(tier, recipe):
    pytest.importorskip("megatron.core")
    words = [sys.executable, "-c", _JOB, tier, recipe]
    env = {key: value for key, value in os.environ.items() if key != "NVTE_UNFUSED_ATTN"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert "ran (2, 32) TELayerNormColumnParallelLinear" in done.stdout, done.stderr[-3000:]


def test_the_table_of_sources_names_what_exists_and_every_layer():
    rows = re.findall(r"^    ([\w, …]+?)  +(\w+)  +\S+\.py:?", te.__doc__, re.MULTILINE)
    named = {}
    for names, module in rows:
        for name in re.findall(r"[A-Za-z_]\w+", names.removesuffix(", and its kinds")):
            found = importlib.import_module(f"megatron_prism.runtime.te.{module}")
            named[name] = [key for key in vars(found) if key.startswith(name)]
            assert named[name], f"{name} is not in {module}"
    assert len(named) >= 25
    layers = {
        name
        for contents in te._contents().values()
        for name, value in contents.items()
        if isinstance(value, type)
        and issubclass(value, (torch.nn.Module, torch.optim.Optimizer))
        and not value.__name__.startswith("_")
    }
    assert {name for name in layers if name not in named} == set()
