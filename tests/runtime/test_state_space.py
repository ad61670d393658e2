"""Virtual mamba-ssm and flash-linear-attention: shapes, gradients, saved bytes."""

import pytest
import torch

from megatron_prism.core.errors import UnsupportedError
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


def test_values_are_refused_by_name():
    with pytest.raises(UnsupportedError, match="causal_conv1d_fn"):
        state_space.causal_conv1d_fn(torch.zeros(1, 2, 8), torch.zeros(2, 4))
