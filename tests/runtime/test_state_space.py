"""Virtual mamba-ssm and flash-linear-attention: shapes, values, gradients, saved bytes."""

import pytest
import torch

from megatron_prism.runtime.devices import state_space


def saved_bytes(call):
    """What ``call`` saves for backward besides its arguments' storage, and its result."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = call()
    return sum(t.numel() * t.element_size() for t in kept), out


def test_the_fused_scan_saves_its_input_and_the_ungated_output():
    batch, length, heads, size, groups, states = 2, 512, 8, 64, 2, 128
    inner, mixed = heads * size, heads * size + 2 * groups * states
    x = torch.empty(batch, length, inner + mixed + heads, device="meta", dtype=torch.bfloat16,
                    requires_grad=True)  # fmt: skip
    weight = torch.empty(mixed, 4, device="meta", requires_grad=True)
    bias = torch.empty(mixed, device="meta", requires_grad=True)
    per_head = [torch.empty(heads, device="meta", requires_grad=True) for _ in range(3)]
    saved, out = saved_bytes(lambda: state_space.mamba_split_conv1d_scan_combined(
        x, weight, bias, *per_head, 256, headdim=size, ngroups=groups))  # fmt: skip
    assert out.shape == (batch, length, inner)
    leaves = 4 * (5 * mixed + 3 * heads)
    assert saved == 2 * batch * length * (x.shape[-1] + inner) + leaves
    out.sum().backward()
    assert x.grad.shape == x.shape
    assert weight.grad.shape == weight.shape


def test_the_delta_rule_saves_a_matrix_of_a_chunk_per_token():
    q, k, v = (torch.empty(1, 256, 4, n, device="meta", dtype=torch.bfloat16, requires_grad=True)
               for n in (128, 128, 64))  # fmt: skip
    g, beta = (torch.empty(1, 256, 4, device="meta", requires_grad=True) for _ in range(2))
    saved, (out, state) = saved_bytes(
        lambda: state_space.chunk_gated_delta_rule(q, k, v, g=g, beta=beta)
    )
    assert (out.shape, state) == (v.shape, None)
    assert saved == 256 * 4 * (2 * (128 + 128 + 64) + 4 + 4 + 2 * 64)
    out.sum().backward()
    assert g.grad.shape == g.shape


def random(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, requires_grad=True)


def test_a_scan_is_a_recurrence():
    x, dt, b, c = random(2, 9, 4, 3), random(2, 9, 4), random(2, 9, 2, 5), random(2, 9, 2, 5)
    a, d, bias, z = -random(4).exp(), random(4), random(4), random(2, 9, 4, 3)
    state, out, steps = torch.zeros(2, 4, 3, 5), [], torch.nn.functional.softplus(dt + bias)
    for t in range(9):
        token, key, query = x[:, t], *(one[:, t].repeat_interleave(2, dim=1) for one in (b, c))
        added = torch.einsum("bh,bhp,bhs->bhps", steps[:, t], token, key)
        state = (steps[:, t] * a).exp()[..., None, None] * state + added
        out.append(torch.einsum("bhps,bhs->bhp", state, query) + d[:, None] * token)
    got = state_space.mamba_chunk_scan_combined(
        x, dt, a, b, c, 256, D=d, z=z, dt_bias=bias, dt_softplus=True
    )
    torch.testing.assert_close(got, torch.stack(out, 1) * torch.nn.functional.silu(z))


def test_the_fused_scan_is_convolution_scan_and_gate():
    heads, size = 4, 3
    z, x, b, c, dt = (random(2, 9, n) for n in (12, 12, 10, 10, heads))
    weight, bias, steps, a, d = (random(*shape) for shape in ((32, 4), (32,), (4,), (4,), (4,)))
    mixed = torch.nn.Conv1d(32, 32, 4, groups=32, padding=3)
    mixed.weight.data, mixed.bias.data = weight.detach()[:, None], bias.detach()
    whole = torch.cat([z, x, b, c, dt], -1)
    out = torch.nn.functional.silu(mixed(whole[..., 12:44].mT)[..., :9].mT)
    parts = out.split([12, 10, 10], dim=-1)
    x, b, c = (one.unflatten(-1, (-1, n)) for one, n in zip(parts, (size, 5, 5), strict=True))
    wanted = state_space.mamba_chunk_scan_combined(
        x, dt, a, b, c, 256, D=d, z=z.unflatten(-1, (heads, size)), dt_bias=steps,
        dt_softplus=True,
    )  # fmt: skip
    got = state_space.mamba_split_conv1d_scan_combined(
        whole, weight, bias, steps, a, d, 256, headdim=size, ngroups=2
    )
    torch.testing.assert_close(got, wanted.flatten(-2))


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_gated_norm_has_groups(norm_first):
    norm = state_space.RMSNorm(8, group_size=4, norm_before_gate=norm_first)
    x, z = random(3, 8), random(3, 8)
    gate = torch.nn.functional.silu(z)
    parts = (x if norm_first else x * gate).split(4, dim=-1)
    wanted = torch.cat([torch.nn.functional.rms_norm(one, (4,), eps=1e-5) for one in parts], -1)
    torch.testing.assert_close(norm(x, z), wanted * gate if norm_first else wanted)


@pytest.mark.megatron
def test_the_delta_rule_is_that_of_megatron():
    gdn = pytest.importorskip("megatron.core.ssm.gated_delta_net")
    q, k = (torch.nn.functional.normalize(random(2, 9, 4, n), dim=-1) for n in (6, 6))
    v, g, beta = random(2, 9, 4, 3), -random(2, 9, 4).exp(), random(2, 9, 4).sigmoid()
    got, _ = state_space.chunk_gated_delta_rule(q, k, v, g, beta)
    torch.testing.assert_close(got, gdn.torch_chunk_gated_delta_rule(q, k, v, g, beta)[0])
