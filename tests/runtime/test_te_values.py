"""Transformer Engine's own Python on tier cpu computes what torch computes."""

import importlib
import sys

import pytest
import torch
from torch import distributed as dist
from torch.nn.functional import cross_entropy, layer_norm, linear, scaled_dot_product_attention

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.core.jobs.megatron_source import engine_version
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.emulate.patches.pipeline import _Zeroed
from megatron_prism.runtime import devices, virtual_world
from megatron_prism.runtime.values import Values

pytestmark = pytest.mark.skipif(not engine_version(), reason="transformer-engine is not installed")


@pytest.fixture(scope="module")
def te():
    changes = ProcessChanges()
    devices.prepare("cpu", changes)
    yield importlib.import_module("transformer_engine.pytorch")
    changes.undo()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(1)


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype).requires_grad_()


def same(ours, theirs, inputs, rtol=1e-4, atol=1e-5):
    """Outputs and gradients agree; returns nothing."""
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, check_dtype=False)
    grad = torch.randn_like(theirs)
    for a, b in zip(
        torch.autograd.grad(ours, inputs, grad.to(ours.dtype), retain_graph=True),
        torch.autograd.grad(theirs, inputs, grad, retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def test_a_kernel_of_shapes_alone_names_the_tier_that_has_it(te):
    with pytest.raises(UnsupportedError, match="thd_read_half_tensor has shapes alone") as caught:
        sys.modules["transformer_engine_torch"].thd_read_half_tensor(torch.ones(4, 1, 1), None, 0)
    assert "--prism-tier meta" in caught.value.fix


def test_linear(te):
    module, x = te.Linear(8, 6, device="cpu"), leaf(5, 2, 8)
    same(module(x), linear(x, module.weight, module.bias), [x, module.weight, module.bias])


def test_gradient_goes_into_main_grad(te):
    module = te.Linear(8, 6, bias=False, fuse_wgrad_accumulation=True, device="cpu")
    x = leaf(5, 8)
    module.weight.main_grad = torch.ones(6, 8)
    module.weight.grad_added_to_main_grad = False
    module(x).sum().backward()
    expected = 1 + x.detach().sum(0).expand(6, 8)
    torch.testing.assert_close(module.weight.main_grad, expected)
    assert module.weight.grad_added_to_main_grad


def test_postponed_weight_gradient(te):
    module, x = te.Linear(8, 6, bias=False, delay_wgrad_compute=True, device="cpu"), leaf(5, 8)
    module(x).sum().backward()
    module.backward_dw()
    torch.testing.assert_close(module.weight.grad, x.detach().sum(0).expand(6, 8))


@pytest.mark.parametrize("centered", [False, True])
def test_norms(te, centered):
    x = leaf(5, 2, 8)
    for kind in (te.LayerNorm, te.RMSNorm):
        module = kind(8, device="cpu", zero_centered_gamma=centered)
        torch.nn.init.normal_(module.weight)
        gamma = module.weight + centered
        if kind is te.LayerNorm:
            expected = layer_norm(x, (8,), gamma, module.bias)
        else:
            expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gamma
        same(module(x), expected, [x, *module.parameters()])


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_layer_norm_linear(te, kind):
    module, x = te.LayerNormLinear(8, 6, normalization=kind, device="cpu"), leaf(5, 2, 8)
    gamma = module.layer_norm_weight
    if kind == "LayerNorm":
        normed = layer_norm(x, (8,), gamma, module.layer_norm_bias)
    else:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gamma
    same(module(x), linear(normed, module.weight, module.bias), [x, *module.parameters()])


def test_layer_norm_mlp(te):
    module, x = te.LayerNormMLP(8, 12, device="cpu"), leaf(5, 2, 8)
    hidden = linear(layer_norm(x, (8,), module.layer_norm_weight, module.layer_norm_bias),
                    module.fc1_weight, module.fc1_bias)  # fmt: skip
    hidden = torch.nn.functional.gelu(hidden, approximate="tanh")
    same(module(x), linear(hidden, module.fc2_weight, module.fc2_bias), [x, *module.parameters()])


def test_operations(te):
    """What --use-transformer-engine-op-fuser makes layers of."""
    ops = te.ops
    norm, first, second = ops.RMSNorm(8), ops.Linear(8, 12), ops.Linear(6, 8, bias=False)
    module, x = ops.Sequential(norm, first, ops.SwiGLU(), second), leaf(5, 8)
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * norm.weight
    a, b = linear(normed, first.weight, first.bias).chunk(2, -1)
    expected = linear(torch.nn.functional.silu(a) * b, second.weight)
    same(module(x), expected, [x, *module.parameters()])


@pytest.mark.parametrize("width", [None, 2])
def test_activations_of_experts_are_scaled(te, width):
    """The op fuser's; its halves may take turns."""
    if not hasattr(te.ops, "ScaledSwiGLU"):
        pytest.skip("of later releases")
    module, x, scales = te.ops.ScaledSwiGLU(glu_interleave_size=width), leaf(5, 8), leaf(5)
    turns = [[0, 1, 4, 5], [2, 3, 6, 7]] if width else [[0, 1, 2, 3], [4, 5, 6, 7]]
    a, b = (x[:, columns] for columns in turns)
    expected = torch.nn.functional.silu(a) * b * scales.unsqueeze(-1)
    same(module(x, scales), expected, [x, scales])


def test_grouped_linear(te):
    module, x = te.GroupedLinear(3, 8, 6, device="cpu"), leaf(9, 8)
    parts = x.split([4, 0, 5])
    weights = [getattr(module, f"weight{i}") for i in range(3)]
    biases = [getattr(module, f"bias{i}") for i in range(3)]
    expected = torch.cat([linear(*a) for a in zip(parts, weights, biases, strict=True)])
    same(module(x, [4, 0, 5]), expected, [x, *weights, *biases])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", ["causal", "no_mask"])
@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_attention(te, mask, form, dtype):
    """Of bf16 one kernel, of fp32 two products and a softmax."""
    module = te.DotProductAttention(4, 16, num_gqa_groups=2, qkv_format=form, attn_mask_type=mask)
    rows = (24, 2) if form == "sbhd" else (2, 24)
    inputs = [leaf(*rows, heads, 16, dtype=dtype) for heads in (4, 2, 2)]
    order = (1, 2, 0, 3) if form == "sbhd" else (0, 2, 1, 3)
    back = (2, 0, 1, 3) if form == "sbhd" else (0, 2, 1, 3)
    expected = scaled_dot_product_attention(
        *(t.permute(order).float() for t in inputs), is_causal=mask == "causal", enable_gqa=True
    )
    off = {"rtol": 0.05, "atol": 0.03} if dtype == torch.bfloat16 else {}
    same(module(*inputs), expected.permute(back).reshape(*rows, 64), inputs, **off)


@pytest.mark.parametrize("window", [(2, 0), (0, 0), (30, 0), (-1, 0)])
@pytest.mark.parametrize("softmax", ["vanilla", "off-by-one", "learnable"])
def test_sliding_windows_and_softmax_offsets(te, window, softmax):
    module = te.DotProductAttention(4, 16, num_gqa_groups=2, window_size=window,
                                    softmax_type=softmax, attn_mask_type="causal")  # fmt: skip
    q, k, v = (leaf(24, 2, heads, 16, dtype=torch.bfloat16) for heads in (4, 2, 2))
    rows, columns = torch.arange(24)[:, None], torch.arange(24)
    seen = (columns <= rows) & ((window[0] < 0) | (columns >= rows - window[0]))
    a, b, c = (t.float().permute(1, 2, 0, 3) for t in (q, k, v))
    b, c = (t.repeat_interleave(2, dim=1) for t in (b, c))
    weights = (a @ b.transpose(2, 3) / 4).exp() * seen
    total, inputs = weights.sum(-1, keepdim=True), [q, k, v]
    if softmax == "off-by-one":
        total = total + 1
    elif softmax == "learnable":
        inputs.append(module.softmax_offset)
        total = total + module.softmax_offset.exp().view(1, 4, 1, 1)
    expected = (weights / total @ c).permute(2, 0, 1, 3).reshape(24, 2, 64)
    same(module(q, k, v), expected, inputs, rtol=0.05, atol=0.05)


def test_a_bias_of_the_scores(te):
    module = te.DotProductAttention(2, 16, attn_mask_type="no_mask")
    q, k, v = (leaf(24, 2, 2, 16, dtype=torch.bfloat16) for _ in range(3))
    bias = leaf(1, 2, 24, 24, dtype=torch.bfloat16)
    out = module(q, k, v, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
    order = (t.float().permute(1, 2, 0, 3) for t in (q, k, v))
    expected = scaled_dot_product_attention(*order, attn_mask=bias.float())
    expected = expected.permute(2, 0, 1, 3).reshape(24, 2, 32)
    same(out, expected, [q, k, v, bias], rtol=0.05, atol=0.05)


def test_the_largest_logit_of_each_head_is_that_of_the_past(te):
    q, k = leaf(24, 2, 4, 16, dtype=torch.bfloat16), leaf(24, 2, 4, 16, dtype=torch.bfloat16)
    out, largest = te.DotProductAttention(4, 16, return_max_logit=True)(q, k, k)
    logits = torch.einsum("sbhd,tbhd->hbst", q.float(), k.float()) / 4
    seen = logits.masked_fill(torch.ones(24, 24).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(largest.float(), seen.amax((1, 2, 3)), rtol=0.01, atol=0.01)
    assert out.shape == (24, 2, 64)


def test_attention_of_packed_sequences(te):
    module = te.DotProductAttention(2, 16, qkv_format="thd", attn_mask_type="padding_causal")
    q, k, v = (leaf(7, 2, 16, dtype=torch.bfloat16) for _ in range(3))
    bounds = torch.tensor([0, 3, 7], dtype=torch.int32)
    out = module(q, k, v, cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=4,
                 max_seqlen_kv=4)  # fmt: skip
    parts = [scaled_dot_product_attention(*(t[a:b].float().transpose(0, 1) for t in (q, k, v)),
                                          is_causal=True).transpose(0, 1).flatten(-2)
             for a, b in ((0, 3), (3, 7))]  # fmt: skip
    same(out, torch.cat(parts), [q, k, v], rtol=0.05, atol=0.05)


def test_backward_drops_what_forward_dropped(te):
    module = te.DotProductAttention(1, 16, attention_dropout=0.5, attn_mask_type="no_mask")
    q, k = leaf(24, 1, 1, 16, dtype=torch.bfloat16), leaf(24, 1, 1, 16, dtype=torch.bfloat16)
    v = torch.eye(24, 16)[:, None, None].bfloat16().contiguous().requires_grad_()
    out = module(q, k, v)  # columns are the shares of the first 16 keys
    (dv,) = torch.autograd.grad(out, [v], torch.ones_like(out))
    assert 0.3 < float((out == 0).float().mean()) < 0.7
    torch.testing.assert_close(dv[:16, 0, 0, 0], out[:, 0].sum(0), rtol=0.05, atol=0.05)


@pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["p2p", "all_gather", "a2a"])
@pytest.mark.parametrize("policy", ["mirror", "noise"])
@pytest.mark.parametrize("rank", [0, 1])
def test_attention_whose_peers_are_virtual(te, kind, dropout, policy, rank):
    """What comes from them has the scale of what is here: gradients too."""
    values = Values(policy, rank=rank)
    virtual_world.start(virtual_world.VirtualWorld(2, rank, (rank,), values, torch.device("cpu")))
    try:
        group = dist.new_group([0, 1], group_desc="CONTEXT_PARALLEL_GROUP")
        module = te.DotProductAttention(
            4, 16, num_gqa_groups=2, attention_dropout=dropout, cp_group=group,
            cp_comm_type=kind, cp_global_ranks=[0, 1], cp_stream=torch.cuda.Stream(),
        )  # fmt: skip
        q, k, v = (leaf(16, 2, heads, 16, dtype=torch.bfloat16) for heads in (4, 2, 2))
        out = module(q, k, v)
        with _Zeroed():  # as emulation has it: the last rank writes half of what it sends
            grads = torch.autograd.grad(out, [q, k, v], torch.full_like(out, 1e-6))
    finally:
        virtual_world.stop()
    assert torch.isfinite(out).all()
    for grad in grads:
        assert 0 < grad.abs().max() < 1e-4


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(te, interleaved):
    rope = importlib.import_module("transformer_engine.pytorch.attention.rope")
    t, angles = leaf(5, 2, 3, 10), torch.randn(5, 1, 1, 4)
    freqs = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles] * 2, -1)
    out = rope.apply_rotary_pos_emb(t, freqs, interleaved=interleaved, fused=True)
    pairs = t[..., :8].unflatten(-1, (4, 2) if interleaved else (2, 4))
    a, b = pairs.unbind(-1 if interleaved else -2)
    turned = [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()]
    turned = torch.stack(turned, -1 if interleaved else -2).flatten(-2)
    same(out, torch.cat([turned, t[..., 8:]], -1), [t])


def test_permutation_there_and_back(te):
    x, probs = leaf(6, 4), leaf(6, 3)
    routing = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 1], [1, 0, 1], [0, 1, 1], [1, 1, 0]])
    expert, token = routing.t().nonzero(as_tuple=True)
    out, taken, row_map = te.moe_permute_with_probs(x, probs, routing, 12)
    same(out, x[token], [x])
    same(taken, probs[token, expert], [probs])
    y = leaf(12, 4)
    same(te.moe_unpermute(y, row_map, restore_shape=x.shape),
         x.new_zeros(6, 4).index_add(0, token, y), [y])  # fmt: skip
    weighted = y * probs[token, expert][:, None]
    same(te.moe_unpermute(y, row_map, probs, x.shape),
         x.new_zeros(6, 4).index_add(0, token, weighted), [y, probs])  # fmt: skip


def test_chunks_are_sorted(te):
    x, probs = leaf(6, 4), leaf(6)
    sizes, order = torch.tensor([1, 2, 3]), torch.tensor([2, 0, 1])
    out, taken = te.moe_sort_chunks_by_index_with_probs(x, probs, sizes, order)
    same(out, x[[3, 4, 5, 0, 1, 2]], [x])
    assert taken.tolist() == probs[[3, 4, 5, 0, 1, 2]].tolist()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduced", [False, True])
def test_cross_entropy(te, smoothing, reduced):
    loss = importlib.import_module("transformer_engine.pytorch.cross_entropy")
    logits, target = leaf(3, 4, 10), torch.randint(10, (3, 4))
    if not reduced:  # a mean is of all until 2.19
        target[1, 2] = -100
    copy = logits.detach().clone().requires_grad_()  # theirs is written over, until 2.19
    ours = loss.parallel_cross_entropy(logits, target, smoothing, reduced, None)
    theirs = cross_entropy(copy.view(12, 10), target.view(12), label_smoothing=smoothing,
                           reduction="mean" if reduced else "none")  # fmt: skip
    ours = ours.view(theirs.shape)  # 2.20 gives the mean as [1]
    torch.testing.assert_close(ours, theirs)
    weights = torch.randn_like(theirs)
    (found,) = torch.autograd.grad(ours, logits, weights)
    torch.testing.assert_close(found, torch.autograd.grad(theirs, copy, weights)[0])


@pytest.mark.parametrize("remainders", [False, True])
def test_adam_is_adamw(te, remainders):
    optimizers = importlib.import_module("transformer_engine.pytorch.optimizers")
    start = torch.randn(40).bfloat16().float()
    ours = torch.nn.Parameter(start.bfloat16() if remainders else start.clone())
    theirs = torch.nn.Parameter(start.clone())
    more = {"master_weights": True, "store_param_remainders": True} if remainders else {}
    one = optimizers.FusedAdam([ours], lr=0.1, weight_decay=0.01, **more)
    two = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.01)
    for _ in range(3):
        grad = torch.randn(40).bfloat16()
        ours.grad, theirs.grad = grad.to(ours.dtype), grad.float()
        one.step()
        two.step()
    off = {"rtol": 0.01, "atol": 0.01} if remainders else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(ours.float(), theirs.detach(), **off)


@pytest.mark.parametrize("state", [torch.float16, torch.bfloat16])
def test_adam_with_short_states_is_nearly_adamw(te, state):
    optimizers = importlib.import_module("transformer_engine.pytorch.optimizers")
    ours = torch.nn.Parameter(torch.randn(40))
    theirs = torch.nn.Parameter(ours.detach().clone())
    one = optimizers.FusedAdam([ours], lr=0.1, exp_avg_dtype=state, exp_avg_sq_dtype=state)
    two = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.0)
    for _ in range(3):
        ours.grad = torch.randn(40)
        theirs.grad = ours.grad.clone()
        one.step()
        two.step()
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


def test_multi_tensor(te):
    optimizers = importlib.import_module("transformer_engine.pytorch.optimizers")
    tensors, flag = [torch.tensor([3.0, 0.0]), torch.tensor([4.0])], torch.zeros(1).int()
    apply = optimizers.multi_tensor_applier
    norm, each = apply(optimizers.multi_tensor_l2norm, flag, [tensors], True)
    assert (norm.tolist(), each.tolist()) == ([5.0], [3.0, 4.0])
    apply(optimizers.multi_tensor_scale, flag, [tensors, tensors], 2.0)
    assert [t.tolist() for t in tensors] == [[6.0, 0.0], [8.0]]
    assert not flag.item()
    apply(optimizers.multi_tensor_scale, flag, [[torch.tensor([float("inf")])]] * 2, 1.0)
    assert flag.item()
