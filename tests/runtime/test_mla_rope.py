"""Stand-ins for the kernels of multi-latent attention's rotary embedding."""

from types import SimpleNamespace

import pytest
import torch

from megatron_prism.runtime.devices import kernels, triton

HEADS, HEAD, WIDTH, VALUE = 3, 5, 8, 4


def tables(length):
    angles = torch.randn(length, WIDTH // 2).repeat(1, 2)
    return angles, angles.cos().view(length, 1, 1, WIDTH), angles.sin().view(length, 1, 1, WIDTH)


def rotated(pairs, angles):
    """Pairs as complex numbers, turned; real parts in front of imaginary ones."""
    there = torch.view_as_complex(pairs.double().reshape(*pairs.shape[:-1], WIDTH // 2, 2))
    turned = there * torch.exp(1j * angles[..., : WIDTH // 2].double())
    return torch.cat([turned.real, turned.imag], dim=-1).float()


def run(name, cos, sin, tensors, **more):
    """``tensors`` and ``more`` by the names that the kernel gives its arguments."""
    given = {"batch_size": 2, "cp_rank": 0, "cp_size": 1, "emb_dim": WIDTH, "k_dim": HEAD, **more}
    for kind in ("q", "kv"):
        given.setdefault(f"cu_seqlens_{kind}", None)
    if "nope_dim" not in given:
        given["qk_head_dim"] = HEAD
    kernels.COMPUTED[name](SimpleNamespace(COS=cos, SIN=sin, **tensors, **given))


def test_queries_turn_by_the_angle_of_their_place():
    angles, cos, sin = tables(6)
    q = torch.randn(12, HEADS, HEAD + WIDTH)
    before = q.clone()
    run("rotary_fwd_q_kernel", cos, sin, {"Q": q})
    assert torch.equal(q[..., :HEAD], before[..., :HEAD])
    at = angles[torch.arange(12) // 2][:, None]
    assert torch.allclose(q[..., HEAD:], rotated(before[..., HEAD:], at), atol=1e-5)


def test_gradients_are_the_transpose():
    _, cos, sin = tables(6)
    q, grad = torch.randn(12, HEADS, HEAD + WIDTH), torch.randn(12, HEADS, HEAD + WIDTH)
    there, back = q.clone(), grad.clone()
    run("rotary_fwd_q_kernel", cos, sin, {"Q": there})
    run("rotary_bwd_q_kernel", cos, sin, {"DO": back})
    assert (there * grad).sum().item() == pytest.approx((q * back).sum().item(), rel=1e-4)
    kv, shared = torch.randn(12, HEADS, HEAD + VALUE), torch.randn(12, WIDTH)
    key, value = torch.empty(12, HEADS, HEAD + WIDTH), torch.empty(12, HEADS, VALUE)
    names = {"KV": kv, "K_POS_EMB": shared, "O_KEY": key, "O_VALUE": value}
    run("rotary_fwd_kv_kernel", cos, sin, names)
    dk, dv = torch.randn_like(key), torch.randn_like(value)
    d_kv, d_shared = torch.empty_like(kv), torch.empty(12, 1, WIDTH)
    run("rotary_bwd_kv_kernel", cos, sin, {"dK": dk, "dV": dv, "dKV": d_kv, "dEMB": d_shared})
    forwards = (key * dk).sum() + (value * dv).sum()
    backwards = (kv * d_kv).sum() + (shared * d_shared[:, 0]).sum()
    assert forwards.item() == pytest.approx(backwards.item(), rel=1e-4)
    assert torch.equal(value, kv[..., HEAD:])


def test_pairs_may_stay_pairs_turn_back_and_be_at_given_places():
    """The kernels of 0.20."""
    forward, backward = (f"_mla_rope_{way}_inplace_kernel" for way in ("fwd", "bwd"))
    angles, cos, sin = tables(6)
    q, places = torch.randn(12, HEADS, HEAD + WIDTH), torch.arange(12).remainder(6)
    more = {"position_ids": places, "REMOVE_INTERLEAVING": True, "nope_dim": HEAD}
    before = q.clone()
    run(forward, cos, sin, {"Q": q}, INVERSE=False, **more)
    halves = torch.cat([q[..., HEAD::2], q[..., HEAD + 1 :: 2]], dim=-1)
    assert torch.allclose(halves, rotated(before[..., HEAD:], angles[places][:, None]), atol=1e-5)
    undone = q.clone()
    run(forward, cos, sin, {"Q": undone}, INVERSE=True, **more)
    run(backward, cos, sin, {"DO": q}, INVERSE=False, **more)
    for one in (undone, q):
        assert torch.allclose(one, before, atol=1e-5)


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_packed_sequences_count_from_their_own_beginnings(rank, size):
    angles, cos, sin = tables(8)
    starts = torch.tensor([0, 8, 12])
    total = 12 // size
    q = torch.randn(total, HEADS, HEAD + WIDTH)
    before = q.clone()
    more = {"batch_size": None, "cu_seqlens_q": starts, "cp_rank": rank, "cp_size": size}
    run("rotary_fwd_q_kernel", cos, sin, {"Q": q}, **more)
    # the first and the last quarter, or the two in the middle
    places = {(0, 1): [*range(8), *range(4)], (0, 2): [0, 1, 6, 7, 0, 3],
              (1, 2): [2, 3, 4, 5, 1, 2]}[rank, size]  # fmt: skip
    at = angles[torch.tensor(places)][:, None]
    assert torch.allclose(q[..., HEAD:], rotated(before[..., HEAD:], at), atol=1e-5)


def test_shapes_are_left_alone_and_counted(monkeypatch):
    seen = []
    monkeypatch.setattr(kernels, "meter", SimpleNamespace(add=lambda *kernel: seen.append(kernel)))
    q = torch.empty(12, HEADS, HEAD + WIDTH, device="meta")
    cos = torch.empty(6, 1, 1, WIDTH, device="meta")
    triton._Kernel(rotary_fwd_q_kernel)["grid"](q, cos, cos, HEAD, WIDTH, HEADS, 2)
    ((name, _, traffic, _),) = seen
    assert (name, traffic) == ("rotary_fwd_q_kernel", 4 * (q.numel() + 2 * cos.numel()))


def rotary_fwd_q_kernel(*args):
    """As the decorator of an absent triton finds it."""
