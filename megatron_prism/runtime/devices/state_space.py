"""Virtual mamba-ssm, causal-conv1d and flash-linear-attention: kernels as shapes and bytes.

``add_modules(changes)`` puts modules of these names into ``sys.modules``: the packages are CUDA
kernels and do not install without nvcc.  Each function takes and saves for backward what the real
one does (mamba_ssm 2.3: ops/triton/ssd_combined.py, layernorm_gated.py; causal_conv1d 1.6; fla 0.4:
ops/gated_delta_rule/chunk.py, modules/convolution.py, l2norm.py).  Assumed: the buffers between
kernels live as long as their names do there, and chunks are full.  Tensors that have values are
computed, with autograd's buffers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import conv1d, pad, rms_norm, silu, softplus

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime.devices import absent, recurrences
from megatron_prism.runtime.devices.kernels import add_packages, differentiable, fused

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import Grads

_DELTA_CHUNK = 64  # of the gated delta rule, by default


def _like(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if t is None else torch.empty_like(t) for t in tensors)


# -- mamba-ssm -------------------------------------------------------------------------------------


class _Scan:
    """Sizes of a selective scan over ``[batch, length]`` tokens, in chunks, and its buffers."""

    def __init__(self, x: torch.Tensor, b: torch.Tensor, chunk: int) -> None:
        self.x, (self.batch, self.length, self.heads, self.size) = x, x.shape
        self.groups, self.states = b.shape[2:]
        self.chunk, self.chunks = chunk, math.ceil(self.length / chunk)

    def per_head(self) -> torch.Tensor:
        """fp32, one number a head and token."""
        sizes = (self.batch, self.heads, self.chunks, self.chunk)
        return self.x.new_empty(sizes, dtype=torch.float32)

    def products(self) -> torch.Tensor:
        """fp32, C times B inside every chunk."""
        sizes = (self.batch, self.chunks, self.groups, self.chunk, self.chunk)
        return self.x.new_empty(sizes, dtype=torch.float32)

    def at_chunks(self, dtype: torch.dtype) -> torch.Tensor:
        """The state at every chunk's end."""
        sizes = (self.batch, self.chunks, self.heads, self.size, self.states)
        return self.x.new_empty(sizes, dtype=dtype)

    @property
    def flops(self) -> int:
        """Of the forward pass: C B in chunks, states, and both products that make the output."""
        tokens = self.batch * self.length
        inside = self.chunk * (self.groups * self.states + self.heads * self.size)
        return 2 * tokens * (inside + 2 * self.heads * self.size * self.states)

    def forward(self, dtype: torch.dtype, gate: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """(out, out before the gate, cumulated decay)."""
        decay, step = self.per_head(), self.per_head()
        states = self.at_chunks(torch.float32)
        passed = self.at_chunks(dtype)
        del states
        products = self.products()
        shape = (self.batch, self.length, self.heads, self.size)
        out = self.x.new_empty(shape)
        before = out if gate is None else self.x.new_empty(shape)
        fused("ssd_scan", self.flops, self.x, decay, step, passed, products, out, gate)
        return out, before, decay

    def backward(self, grad: torch.Tensor, keep: torch.dtype) -> None:
        """The buffers of the backward pass, beside the gradients that it returns."""
        step = grad.new_empty(self.batch, self.length, self.heads)
        decay, times = self.per_head(), self.per_head()
        products = self.products()
        states = self.at_chunks(torch.float32)
        passed = self.at_chunks(torch.float32)
        del states
        wide = self.at_chunks(torch.float32)
        grads, kept = self.at_chunks(keep), self.at_chunks(keep)
        del passed, wide
        of_step = self.per_head()
        tokens = (self.batch, self.length, self.groups, self.states)
        of_b, of_c = (grad.new_empty(tokens, dtype=torch.float32) for _ in range(2))
        after, before, of_products = self.per_head(), self.per_head(), self.products()
        fused(
            "ssd_scan_backward",
            5 * self.flops // 2,
            grad,
            self.x,
            step,
            decay,
            times,
            products,
            grads,
            kept,
            of_step,
            of_b,
            of_c,
            after,
            before,
            of_products,
        )


@differentiable
def _split_conv_scan(
    sizes: tuple[int, int, int, torch.dtype | None],
    zxbcdt: torch.Tensor,
    *leaves: torch.Tensor | None,
) -> Any:
    """leaves : weight and bias of the convolution, bias of the steps, A, D"""
    (chunk, size, groups, dtype), (weight, *_, d) = sizes, leaves
    assert weight is not None
    assert d is not None
    channels, dtype = weight.shape[0], dtype or zxbcdt.dtype
    heads, size = (d.shape[0], size) if d.dim() == 1 else d.shape
    batch, length, _ = zxbcdt.shape
    inner = heads * size
    states = (channels - inner) // groups // 2
    mixed = zxbcdt.new_empty(batch, length, channels)
    fused("causal_conv1d", 0, mixed, mixed)
    x = mixed[..., :inner].view(batch, length, heads, size)
    b = mixed[..., inner : inner + groups * states].view(batch, length, groups, states)
    scan = _Scan(x, b, chunk)
    out, before, _ = scan.forward(dtype, x)
    scan.x = scan.x.new_empty(0)  # the mixed tokens are made again

    def backward(
        grad: torch.Tensor, zxbcdt: torch.Tensor, before: torch.Tensor, *leaves: torch.Tensor
    ) -> Grads:
        mixed = zxbcdt.new_empty(batch, length, channels)
        into, of_mixed = torch.empty_like(zxbcdt), torch.empty_like(mixed)
        scan.backward(grad, dtype)
        fused("causal_conv1d_backward", 0, mixed, of_mixed, into)
        return None, into, *_like(*leaves)

    return out.view(batch, length, inner), (zxbcdt, before, *leaves), backward


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    *,
    headdim: int | None = None,
    ngroups: int = 1,
    state_dtype: torch.dtype | None = None,
    **options: object,
) -> torch.Tensor:
    """Convolution, scan and gate of ``zxbcdt`` [batch, length, …]: [batch, length, heads * size].

    Saved: the input, the scan's output before the gate, and the parameters.
    """
    more = options.get("rmsnorm_weight"), options.get("outproj_weight")
    if any(one is not None for one in more) or options.get("return_final_states"):
        what = "mamba_split_conv1d_scan_combined with its own norm or projection has no stand-in"
        raise UnsupportedError(what, fix="use Megatron's layers, or --prism-tier cuda")
    sizes = (chunk_size, headdim or 0, ngroups, state_dtype)
    if not zxbcdt.is_meta:
        width, heads = conv1d_weight.shape[0], A.shape[0]
        gate, mixed, dt = zxbcdt.split([zxbcdt.shape[-1] - width - heads, width, heads], dim=-1)
        states = (width - gate.shape[-1]) // 2
        mixed = causal_conv1d(mixed, conv1d_weight, conv1d_bias, activation="silu")[0]
        x, b, c = mixed.split([gate.shape[-1], states, states], dim=-1)
        x, gate = (one.unflatten(-1, (heads, -1)) for one in (x, gate))
        b, c = (one.unflatten(-1, (ngroups, -1)) for one in (b, c))
        return recurrences.scan(x, softplus(dt + dt_bias), A, b, c, D, gate).flatten(-2)
    return _split_conv_scan(sizes, zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D)


@differentiable
def _chunk_scan(
    chunk: int,
    dtype: torch.dtype | None,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    *leaves: torch.Tensor | None,
) -> Any:
    out, before, decay = _Scan(x, b, chunk).forward(dtype or c.dtype, leaves[1])
    keep = dtype or x.dtype

    def backward(grad: torch.Tensor, *saved: torch.Tensor) -> Grads:
        inputs = saved[2:]
        grads = _like(*inputs)
        _Scan(inputs[0], inputs[3], chunk).backward(grad, keep)
        return None, None, *grads

    return out, (before, decay, x, dt, a, b, c, *leaves), backward


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    *,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    state_dtype: torch.dtype | None = None,
    **options: object,
) -> torch.Tensor:
    """The scan of ``x`` [batch, length, heads, size] alone; B, C [batch, length, groups, states].

    Saved: all of these, the output before the gate ``z``, and the cumulated decay in fp32.
    """
    if options.get("return_final_states") or options.get("return_varlen_states"):
        raise UnsupportedError(
            "final states of a Mamba scan have no stand-in without a GPU", fix="--prism-tier cuda"
        )
    if not x.is_meta:
        steps = dt.float() + (0 if dt_bias is None else dt_bias)
        steps = softplus(steps) if options.get("dt_softplus") else steps
        return recurrences.scan(x, steps, A, B, C, D, z)
    return _chunk_scan(chunk_size, state_dtype, x, dt, A, B, C, D, z, dt_bias)


@differentiable
def _gated_norm(x: torch.Tensor, weight: torch.Tensor, z: torch.Tensor | None, groups: int) -> Any:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = x.new_empty(groups * (x.numel() // x.shape[-1]), dtype=torch.float32)
    fused("gated_rms_norm", 0, x, weight, z, out)
    return out, (x, weight, z, rows), _gated_norm_backward


def _gated_norm_backward(grad: torch.Tensor, *saved: torch.Tensor) -> Grads:
    x, _, z, _ = saved
    grads = _like(*saved[:3])
    fused("gated_rms_norm_backward", 0, grad, x, z, *grads)
    return *grads, None


class RMSNorm(torch.nn.Module):
    """mamba_ssm's norm in groups, with a gate ``z`` or without."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.group_size, self.eps, self.norm_before_gate = group_size, eps, norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        group = self.group_size or x.shape[-1]
        if not x.is_meta:
            gate = 1 if z is None else silu(z.float())
            rows = (x if self.norm_before_gate else x * gate).float().unflatten(-1, (-1, group))
            out = rms_norm(rows, (group,), eps=self.eps).flatten(-2) * self.weight
            return (out * gate if self.norm_before_gate else out).to(x.dtype)
        return _gated_norm(x, self.weight, z, x.shape[-1] // group)


# -- causal-conv1d, and fla's ----------------------------------------------------------------------


@differentiable
def _conv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    fused("causal_conv1d", 0, x, weight, out)
    return out, (x, weight, bias), _conv_backward


def _conv_backward(grad: torch.Tensor, x: torch.Tensor, *leaves: torch.Tensor | None) -> Grads:
    wide = [t.new_empty(t.shape, dtype=torch.float32) for t in leaves if t is not None]
    grads = _like(x, *leaves)
    fused("causal_conv1d_backward", 0, grad, x, *wide, grads[0])
    return grads


def causal_conv1d_fn(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **options: object
) -> torch.Tensor:
    """A depthwise convolution of ``x`` [batch, channels, length]; saved: ``x`` and the weights."""
    if not x.is_meta:
        before = pad(x, (weight.shape[1] - 1, 0))
        out = conv1d(before, weight[:, None], bias, groups=weight.shape[0])
        return silu(out) if options.get("activation") else out
    return _conv(x, weight, bias)


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **options: object
) -> tuple[torch.Tensor, None]:
    """fla's of ``x`` [batch, length, channels], and no final state."""
    if not x.is_meta:
        return causal_conv1d_fn(x.mT, weight, bias, **options).mT, None
    return _conv(x, weight, bias), None


@differentiable
def _l2norm(x: torch.Tensor) -> Any:
    out, rows = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    fused("l2norm", 0, x, out)
    return out, (out, rows), _l2norm_backward


def _l2norm_backward(grad: torch.Tensor, out: torch.Tensor, rows: torch.Tensor) -> Grads:
    into = torch.empty_like(out)
    fused("l2norm_backward", 0, grad, out, into)
    return (into,)


def l2norm(x: torch.Tensor, eps: float = 1e-6, output_dtype: object = None) -> torch.Tensor:
    """Rows of length 1; saved: the result, and one number a row."""
    if not x.is_meta:
        return (x * (x.float().square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)
    return _l2norm(x)


@differentiable
def _delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> Any:
    decay, of_gate = g.new_empty(g.shape, dtype=torch.float32), g.dtype
    inside = k.new_empty(*k.shape[:-1], _DELTA_CHUNK)
    w, u = torch.empty_like(k), torch.empty_like(v)
    states, new = _delta_states(k, v), torch.empty_like(v)
    out = torch.empty_like(v)
    flops = _delta_flops(k, v)
    fused("gated_delta_rule", flops, q, k, v, decay, inside, w, u, states, new, out)

    def backward(
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        inside: torch.Tensor,
    ) -> Grads:
        w, u, new = _like(k, v, v)
        states, of_states = _delta_states(k, v), _delta_states(k, v)
        of_new = torch.empty_like(v)
        of_q, of_k, of_w, of_decay = _like(q, k, k, decay)
        again, of_v, of_beta, more = _like(k, v, beta, decay)
        fused(
            "gated_delta_rule_backward",
            5 * flops // 2,
            grad,
            q,
            k,
            v,
            w,
            u,
            states,
            of_states,
            new,
            of_new,
            of_q,
            of_k,
            of_w,
            again,
            of_v,
        )
        del of_w, again, more
        assert of_decay is not None
        return of_q, of_k, of_v, of_decay.to(of_gate), of_beta

    return out, (q, k, v, decay, beta, inside), backward


def _delta_states(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    batch, length, heads, size = k.shape
    return k.new_empty(batch, math.ceil(length / _DELTA_CHUNK), heads, size, v.shape[-1])


def _delta_flops(k: torch.Tensor, v: torch.Tensor) -> int:
    tokens = k.shape[0] * k.shape[1] * k.shape[2]
    size, width = k.shape[-1], v.shape[-1]
    return 2 * tokens * (3 * size * width + _DELTA_CHUNK * (2 * size + 2 * width))


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Linear attention with a gated delta rule: q, k [batch, length, heads, size], v […, width].

    Saved: all inputs, the cumulated gate in fp32, and a matrix of a chunk's size a head and token.
    """
    if not q.is_meta:
        return recurrences.delta_rule(q, k, v, g, beta), None
    return _delta_rule(q, k, v, g, beta), None


_PACKAGES: dict[str, dict[str, object]] = {
    "mamba_ssm": {"__version__": "2.3.0"},
    "mamba_ssm.ops": {},
    "mamba_ssm.ops.triton": {},
    "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNorm},
    "mamba_ssm.ops.triton.ssd_combined": {
        "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
        "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
    },
    "causal_conv1d": {
        "__version__": "1.6.0",
        "causal_conv1d_fn": causal_conv1d_fn,
        "causal_conv1d_update": None,
    },
    "causal_conv1d.causal_conv1d_varlen": {"causal_conv1d_varlen_states": None},
    "fla": {"__version__": "0.4.0"},
    "fla.modules": {},
    "fla.modules.convolution": {"causal_conv1d": causal_conv1d},
    "fla.modules.l2norm": {"l2norm": l2norm},
    "fla.ops": {},
    "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
}


def add_modules(changes: ProcessChanges) -> str:
    """Put them into ``sys.modules``; says what they are."""
    add_packages(changes, _PACKAGES, absent.Module)
    return "mamba-ssm, causal-conv1d, flash-linear-attention: what they allocate; values on the CPU"
