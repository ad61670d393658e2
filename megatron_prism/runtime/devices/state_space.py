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
from torch import Tensor
from torch.nn.functional import conv1d, pad, rms_norm, silu, softplus

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime.devices import absent, recurrences
from megatron_prism.runtime.devices.kernels import add_packages, differentiable, fused

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import Grads

_DELTA_CHUNK = 64  # of the gated delta rule, by default


def _like(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Ask for memory as large as that of each tensor; None stays None."""
    memories = list[Tensor | None]()
    for tensor in tensors:
        memories.append(None if tensor is None else torch.empty_like(tensor))
    return tuple(memories)


# -- mamba-ssm -------------------------------------------------------------------------------------


class _Scan:
    """Sizes of a selective scan over ``[batch, length]`` tokens, in chunks, and its buffers."""

    def __init__(self, x: Tensor, b: Tensor, chunk: int) -> None:
        self.x = x
        self.batch, self.length, self.heads, self.size = x.shape
        self.groups, self.states = b.shape[2:]
        self.chunk = chunk
        self.chunks = math.ceil(self.length / chunk)

    def per_head(self) -> Tensor:
        """fp32, one number a head and token."""
        sizes = (self.batch, self.heads, self.chunks, self.chunk)
        return self.x.new_empty(sizes, dtype=torch.float32)

    def products(self) -> Tensor:
        """fp32, C times B inside every chunk."""
        sizes = (self.batch, self.chunks, self.groups, self.chunk, self.chunk)
        return self.x.new_empty(sizes, dtype=torch.float32)

    def at_chunks(self, dtype: torch.dtype) -> Tensor:
        """The state at every chunk's end."""
        sizes = (self.batch, self.chunks, self.heads, self.size, self.states)
        return self.x.new_empty(sizes, dtype=dtype)

    @property
    def flops(self) -> int:
        """Of the forward pass: C B in chunks, states, and both products that make the output."""
        tokens = self.batch * self.length
        columns = self.heads * self.size
        inside_chunk = self.chunk * (self.groups * self.states + columns)
        products_with_states = 2 * columns * self.states
        return 2 * tokens * (inside_chunk + products_with_states)

    def forward(self, dtype: torch.dtype, gate: Tensor | None) -> tuple[Tensor, ...]:
        """(out, out before the gate, cumulated decay)."""
        decay = self.per_head()
        step = self.per_head()
        states = self.at_chunks(torch.float32)
        passed_states = self.at_chunks(dtype)
        del states  # of each chunk alone; what was passed on from chunk to chunk is needed
        products = self.products()
        shape = (self.batch, self.length, self.heads, self.size)
        out = self.x.new_empty(shape)
        ungated = out
        if gate is not None:
            ungated = self.x.new_empty(shape)
        fused("ssd_scan", self.flops, self.x, decay, step, passed_states, products, out, gate)
        return out, ungated, decay

    def backward(self, grad: Tensor, keep: torch.dtype) -> None:
        """The buffers of the backward pass, beside the gradients that it returns."""
        steps_copy = grad.new_empty(self.batch, self.length, self.heads)
        decay = self.per_head()
        step = self.per_head()
        products = self.products()
        # forward's states are made again, and their gradients
        states = self.at_chunks(torch.float32)
        passed_states = self.at_chunks(torch.float32)
        del states
        wide_state_grads = self.at_chunks(torch.float32)
        state_grads = self.at_chunks(keep)
        narrow_states = self.at_chunks(keep)
        del passed_states, wide_state_grads
        wide_step_grad = self.per_head()
        tokens = (self.batch, self.length, self.groups, self.states)
        b_grad = grad.new_empty(tokens, dtype=torch.float32)
        c_grad = grad.new_empty(tokens, dtype=torch.float32)
        decay_grads = [self.per_head(), self.per_head()]
        products_grad = self.products()
        inputs = (grad, self.x, steps_copy, decay, step, products)
        results = (state_grads, narrow_states, wide_step_grad, b_grad, c_grad, *decay_grads)
        fused("ssd_scan_backward", 5 * self.flops // 2, *inputs, *results, products_grad)


@differentiable
def _split_conv_scan(
    sizes: tuple[int, int, int, torch.dtype | None],
    zxbcdt: Tensor,
    *leaves: Tensor | None,
) -> Any:
    """leaves : weight and bias of the convolution, bias of the steps, A, D"""
    chunk, size, groups, state_dtype = sizes
    weight, *_, d = leaves
    assert weight is not None
    assert d is not None
    dtype = state_dtype or zxbcdt.dtype
    channels = weight.shape[0]
    heads = d.shape[0]
    if d.dim() == 2:  # a number for each column of a head, which says how many there are
        size = d.shape[1]
    # columns of the input: the gate z, then x, B and C (which the convolution mixes), a step a head
    batch, length, _ = zxbcdt.shape
    inner = heads * size
    states = (channels - inner) // groups // 2
    mixed = zxbcdt.new_empty(batch, length, channels)
    fused("causal_conv1d", 0, mixed, mixed)
    x = mixed[..., :inner].view(batch, length, heads, size)
    columns_of_b = mixed[..., inner : inner + groups * states]
    b = columns_of_b.view(batch, length, groups, states)
    scan = _Scan(x, b, chunk)
    out, ungated, _ = scan.forward(dtype, x)
    scan.x = scan.x.new_empty(0)  # the mixed tokens are made again

    def backward(grad: Tensor, zxbcdt: Tensor, ungated: Tensor, *leaves: Tensor) -> Grads:
        mixed = zxbcdt.new_empty(batch, length, channels)
        zxbcdt_grad = torch.empty_like(zxbcdt)
        mixed_grad = torch.empty_like(mixed)
        scan.backward(grad, dtype)
        fused("causal_conv1d_backward", 0, mixed, mixed_grad, zxbcdt_grad)
        return None, zxbcdt_grad, *_like(*leaves)

    return out.view(batch, length, inner), (zxbcdt, ungated, *leaves), backward


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    *,
    headdim: int | None = None,
    ngroups: int = 1,
    state_dtype: torch.dtype | None = None,
    **options: object,
) -> Tensor:
    """Convolution, scan and gate of ``zxbcdt`` [batch, length, …]: [batch, length, heads * size].

    Saved: the input, the scan's output before the gate, and the parameters.
    """
    has_own_layers = (
        options.get("rmsnorm_weight") is not None or options.get("outproj_weight") is not None
    )
    if has_own_layers or options.get("return_final_states"):
        raise UnsupportedError(
            "mamba_split_conv1d_scan_combined with its own norm or projection has no stand-in",
            fix="use Megatron's layers, or --prism-tier cuda",
        )
    # shapes alone
    if zxbcdt.is_meta:
        sizes = (chunk_size, headdim or 0, ngroups, state_dtype)
        return _split_conv_scan(sizes, zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D)

    # values: the gate, what the convolution mixes, and a step a head
    heads = A.shape[0]
    mixed_columns = conv1d_weight.shape[0]
    gate_columns = zxbcdt.shape[-1] - mixed_columns - heads
    gate, mixed, dt = zxbcdt.split([gate_columns, mixed_columns, heads], dim=-1)
    mixed, _ = causal_conv1d(mixed, conv1d_weight, conv1d_bias, activation="silu")
    states = (mixed_columns - gate_columns) // 2
    x, b, c = mixed.split([gate_columns, states, states], dim=-1)
    x = x.unflatten(-1, (heads, -1))
    gate = gate.unflatten(-1, (heads, -1))
    b = b.unflatten(-1, (ngroups, -1))
    c = c.unflatten(-1, (ngroups, -1))
    steps = softplus(dt + dt_bias)
    return recurrences.scan(x, steps, A, b, c, D, gate).flatten(-2)


@differentiable
def _chunk_scan(
    chunk: int,
    dtype: torch.dtype | None,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *leaves: Tensor | None,
) -> Any:
    """leaves : D, gate, bias of the steps"""
    gate = leaves[1]
    out, ungated, decay = _Scan(x, b, chunk).forward(dtype or c.dtype, gate)
    state_dtype = dtype or x.dtype

    def backward(grad: Tensor, *saved: Tensor) -> Grads:
        inputs = saved[2:]  # behind the ungated output and the decay
        x, _, _, b = inputs[:4]
        grads = _like(*inputs)
        _Scan(x, b, chunk).backward(grad, state_dtype)
        return None, None, *grads

    return out, (ungated, decay, x, dt, a, b, c, *leaves), backward


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_dtype: torch.dtype | None = None,
    **options: object,
) -> Tensor:
    """The scan of ``x`` [batch, length, heads, size] alone; B, C [batch, length, groups, states].

    Saved: all of these, the output before the gate ``z``, and the cumulated decay in fp32.
    """
    if options.get("return_final_states") or options.get("return_varlen_states"):
        raise UnsupportedError(
            "final states of a Mamba scan have no stand-in without a GPU", fix="--prism-tier cuda"
        )
    # shapes: memory and time of the kernel alone
    if x.is_meta:
        return _chunk_scan(chunk_size, state_dtype, x, dt, A, B, C, D, z, dt_bias)
    # values: the kernel adds the bias in fp32
    steps = dt.float()
    if dt_bias is not None:
        steps = steps + dt_bias
    if options.get("dt_softplus"):
        steps = softplus(steps)
    return recurrences.scan(x, steps, A, B, C, D, z)


@differentiable
def _gated_norm(x: Tensor, weight: Tensor, z: Tensor | None, groups: int) -> Any:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = x.numel() // x.shape[-1]
    inverse_deviations = x.new_empty(groups * rows, dtype=torch.float32)
    fused("gated_rms_norm", 0, x, weight, z, out)
    return out, (x, weight, z, inverse_deviations), _gated_norm_backward


def _gated_norm_backward(grad: Tensor, *saved: Tensor) -> Grads:
    x, weight, z, _ = saved
    grads = _like(x, weight, z)
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
        self.group_size = group_size
        self.eps = eps
        self.norm_before_gate = norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        group = self.group_size or x.shape[-1]
        if x.is_meta:
            return _gated_norm(x, self.weight, z, x.shape[-1] // group)
        gate = None if z is None else silu(z.float())
        gated_input = x
        if gate is not None and not self.norm_before_gate:
            gated_input = x * gate
        rows = gated_input.float().unflatten(-1, (-1, group))
        out = rms_norm(rows, (group,), eps=self.eps).flatten(-2) * self.weight
        if gate is not None and self.norm_before_gate:
            out = out * gate
        return out.to(x.dtype)


# -- causal-conv1d, and fla's ----------------------------------------------------------------------


@differentiable
def _conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    fused("causal_conv1d", 0, x, weight, out)
    return out, (x, weight, bias), _conv_backward


def _conv_backward(grad: Tensor, x: Tensor, *leaves: Tensor | None) -> Grads:
    # gradients of weight and bias are added up in fp32
    wide_grads = list[Tensor]()
    for leaf in leaves:
        if leaf is not None:
            wide_grads.append(leaf.new_empty(leaf.shape, dtype=torch.float32))
    grads = _like(x, *leaves)
    x_grad = grads[0]
    fused("causal_conv1d_backward", 0, grad, x, *wide_grads, x_grad)
    return grads


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: object
) -> Tensor:
    """A depthwise convolution of ``x`` [batch, channels, length]; saved: ``x`` and the weights."""
    if x.is_meta:
        return _conv(x, weight, bias)
    channels, width = weight.shape
    padded = pad(x, (width - 1, 0))  # causal: a token sees itself and those before it
    out = conv1d(padded, weight[:, None], bias, groups=channels)
    if options.get("activation"):
        return silu(out)
    return out


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: object
) -> tuple[Tensor, None]:
    """fla's of ``x`` [batch, length, channels], and no final state."""
    if x.is_meta:
        return _conv(x, weight, bias), None
    by_channels = causal_conv1d_fn(x.mT, weight, bias, **options)
    return by_channels.mT, None


@differentiable
def _l2norm(x: Tensor) -> Any:
    out = torch.empty_like(x)
    inverse_lengths = x.new_empty(x.shape[:-1], dtype=torch.float32)
    fused("l2norm", 0, x, out)
    return out, (out, inverse_lengths), _l2norm_backward


def _l2norm_backward(grad: Tensor, out: Tensor, inverse_lengths: Tensor) -> Grads:
    x_grad = torch.empty_like(out)
    fused("l2norm_backward", 0, grad, out, x_grad)
    return (x_grad,)


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: object = None) -> Tensor:
    """Rows of length 1; saved: the result, and one number a row."""
    if x.is_meta:
        return _l2norm(x)
    squared_length = x.float().square().sum(-1, keepdim=True)
    normed = x * (squared_length + eps).rsqrt()
    return normed.to(x.dtype)


@differentiable
def _delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
    gate_dtype = g.dtype
    decay = g.new_empty(g.shape, dtype=torch.float32)
    inside = k.new_empty(*k.shape[:-1], _DELTA_CHUNK)
    w = torch.empty_like(k)
    u = torch.empty_like(v)
    states = _delta_states(k, v)
    new_values = torch.empty_like(v)
    out = torch.empty_like(v)
    flops = _delta_flops(k, v)
    fused("gated_delta_rule", flops, q, k, v, decay, inside, w, u, states, new_values, out)

    def backward(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor,
        inside: Tensor,
    ) -> Grads:
        # w, u, the new values and the states are made again
        w, u, new_values = _like(k, v, v)
        states = _delta_states(k, v)
        states_grad = _delta_states(k, v)
        new_values_grad = torch.empty_like(v)
        q_grad, k_grad, w_grad, decay_grad = _like(q, k, k, decay)
        # keys and the gate take part twice: through w and u, and by themselves
        second_k_grad, v_grad, beta_grad, second_decay_grad = _like(k, v, beta, decay)
        inputs = (grad, q, k, v, w, u, states, states_grad, new_values, new_values_grad)
        results = (q_grad, k_grad, w_grad, second_k_grad, v_grad)
        fused("gated_delta_rule_backward", 5 * flops // 2, *inputs, *results)
        del w_grad, second_k_grad, second_decay_grad, results
        assert decay_grad is not None
        return q_grad, k_grad, v_grad, decay_grad.to(gate_dtype), beta_grad

    return out, (q, k, v, decay, beta, inside), backward


def _delta_states(k: Tensor, v: Tensor) -> Tensor:
    """The state at every chunk's end."""
    batch, length, heads, size = k.shape
    chunks = math.ceil(length / _DELTA_CHUNK)
    return k.new_empty(batch, chunks, heads, size, v.shape[-1])


def _delta_flops(k: Tensor, v: Tensor) -> int:
    """Of the forward pass: products with the states, and products inside chunks."""
    batch, length, heads, size = k.shape
    width = v.shape[-1]
    with_states = 3 * size * width
    inside_chunk = _DELTA_CHUNK * (2 * size + 2 * width)
    return 2 * batch * length * heads * (with_states + inside_chunk)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    **options: object,
) -> tuple[Tensor, None]:
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
