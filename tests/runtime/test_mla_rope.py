"""Stand-ins for the kernels of multi-latent attention's rotary embedding."""

import numpy as np
import pytest
import torch

from megatron_prism.runtime.devices.kernels import KERNELS

HEADS, HEAD, WIDTH, VALUE = 3, 5, 8, 4


def tables(length):
    angles = torch.randn(length, WIDTH // 2).repeat(1, 2)
    return angles, angles.cos().view(length, 1, 1, WIDTH), angles.sin().view(length, 1, 1, WIDTH)


def rotated(pairs, angles):
    """Pairs as complex numbers, turned; real parts in front of imaginary ones."""
    there = torch.view_as_complex(pairs.double().reshape(*pairs.shape[:-1], WIDTH // 2, 2))
    turned = there * torch.exp(1j * angles[..., : WIDTH // 2].double())
    return torch.cat([turned.real, turned.imag], dim=-1).float()


def run(name, *args):
    KERNELS[f"rotary_{name}_kernel"]["grid"](*args)


def test_queries_turn_by_the_angle_of_their_place():
    angles, cos, sin = tables(6)
    q = torch.randn(12, HEADS, HEAD + WIDTH)
    before = q.clone()
    run("fwd_q", q, cos, sin, HEAD, WIDTH, HEADS, 2, None, None, 0, 0, 0, 1)
    assert torch.equal(q[..., :HEAD], before[..., :HEAD])
    at = angles[torch.arange(12) // 2][:, None]
    assert torch.allclose(q[..., HEAD:], rotated(before[..., HEAD:], at), atol=1e-5)


def test_gradients_are_the_transpose():
    _, cos, sin = tables(6)
    numbers = (HEAD, WIDTH, HEADS, 2, None, None, 0, 0, 0, 1)
    q, grad = torch.randn(12, HEADS, HEAD + WIDTH), torch.randn(12, HEADS, HEAD + WIDTH)
    there, back = q.clone(), grad.clone()
    run("fwd_q", there, cos, sin, *numbers)
    run("bwd_q", back, cos, sin, *numbers)
    assert (there * grad).sum().item() == pytest.approx((q * back).sum().item(), rel=1e-4)
    kv, shared = torch.randn(12, HEADS, HEAD + VALUE), torch.randn(12, WIDTH)
    key, value = torch.empty(12, HEADS, HEAD + WIDTH), torch.empty(12, HEADS, VALUE)
    numbers = (WIDTH, HEAD, VALUE, HEADS, 2, None, None, 0, 0, 0, 0, 0, 0, 0, 0, 1)
    run("fwd_kv", kv, shared, key, value, cos, sin, *numbers)
    dk, dv = torch.randn_like(key), torch.randn_like(value)
    d_kv, d_shared = torch.empty_like(kv), torch.empty(12, 1, WIDTH)
    run("bwd_kv", dk, dv, d_kv, d_shared, cos, sin, *numbers)
    forwards = (key * dk).sum() + (value * dv).sum()
    backwards = (kv * d_kv).sum() + (shared * d_shared[:, 0]).sum()
    assert forwards.item() == pytest.approx(backwards.item(), rel=1e-4)
    assert torch.equal(value, kv[..., HEAD:])


def test_pairs_may_stay_pairs_turn_back_and_be_at_given_places():
    """The kernels of 0.20."""
    forward, backward = (
        KERNELS[f"_mla_rope_{way}_inplace_kernel"]["grid"] for way in ("fwd", "bwd")
    )
    angles, cos, sin = tables(6)
    q, places = torch.randn(12, HEADS, HEAD + WIDTH), torch.arange(12).remainder(6)
    before, numbers = q.clone(), (HEAD, WIDTH, HEADS, None, 2, torch.tensor([0, 7, 12]), places)
    strides = (0, 0, 0, 0, 0, 1)
    forward(q, cos, sin, *numbers, *strides, INVERSE=False, REMOVE_INTERLEAVING=True)
    halves = torch.cat([q[..., HEAD::2], q[..., HEAD + 1 :: 2]], dim=-1)
    assert torch.allclose(halves, rotated(before[..., HEAD:], angles[places][:, None]), atol=1e-5)
    undone = q.clone()
    forward(undone, cos, sin, *numbers, *strides, INVERSE=True, REMOVE_INTERLEAVING=True)
    backward(q, cos, sin, *numbers, *strides, INVERSE=False, REMOVE_INTERLEAVING=True)
    for one in (undone, q):
        assert torch.allclose(one, before, atol=1e-5)


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_packed_sequences_count_from_their_own_beginnings(rank, size):
    angles, cos, sin = tables(8)
    starts = torch.tensor([0, 8, 12])
    total = 12 // size
    q = torch.randn(total, HEADS, HEAD + WIDTH)
    before = q.clone()
    run("fwd_q", q, cos, sin, HEAD, WIDTH, HEADS, None, 2, starts, 0, 0, rank, size)
    # the first and the last quarter, or the two in the middle
    places = {(0, 1): [*range(8), *range(4)], (0, 2): [0, 1, 6, 7, 0, 3],
              (1, 2): [2, 3, 4, 5, 1, 2]}[rank, size]  # fmt: skip
    at = angles[torch.tensor(places)][:, None]
    assert torch.allclose(q[..., HEAD:], rotated(before[..., HEAD:], at), atol=1e-5)


def test_shapes_are_left_alone_and_counted(monkeypatch):
    from megatron_prism.runtime.devices import kernels

    class Meter:
        def add(self, name, flops, traffic, tensors):
            self.seen = name, traffic

    meter = Meter()
    monkeypatch.setattr(kernels, "meter", meter)
    q = torch.empty(12, HEADS, HEAD + WIDTH, device="meta")
    cos = torch.empty(6, 1, 1, WIDTH, device="meta")
    run("fwd_q", q, cos, cos, HEAD, WIDTH, HEADS, 2, None, None, 0, 0, 0, 1)
    assert meter.seen == ("rotary_fwd_q_kernel", 4 * (q.numel() + 2 * cos.numel()))
    assert np.prod(q.shape) == q.numel()
