"""Attention of cuDNN and of flash-attn: each is an ``Attention``, computed on tier cpu in fp32.

Arguments of fused attention are told apart by what they are, since each release adds some: Q, K and
V follow the two first tensors, which are cumulated lengths.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime.devices import absent
from megatron_prism.runtime.devices.kernels import add_packages, differentiable, fused
from megatron_prism.runtime.te_kernels.quantization import PROCESSORS, create, kind_of, parts
from megatron_prism.runtime.te_kernels.table import (
    Kernel,
    Values,
    dtype_of,
    kernel,
    member,
    new,
    scratch,
    since,
    tensors_in,
)

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import Grads

Pair = tuple[Tensor | None, Tensor | None]  # what goes in, and where its gradient goes


@dataclass(frozen=True)
class Attention:
    """Who sees whom, and the tensors.

    layout  : of queries, keys and values; ``form``: sbhd, bshd or thd, of the queries
    lengths : cumulated, of queries and of keys
    tensors : q, k, v; of backward also the output and its gradient
    rest    : what else the kernel was given
    """

    layout: str
    mask: str
    bias: str
    scale: float
    dropout: float
    window: tuple[int, int]
    lengths: Sequence[Tensor]
    tensors: tuple[Tensor, ...]
    rest: tuple[Any, ...] = ()

    @property
    def biased(self) -> bool:
        return self.bias in ("pre_scale_bias", "post_scale_bias")

    @property
    def form(self) -> str:
        return self.layout.split("_")[0].translate(str.maketrans("", "", "23"))

    @property
    def size(self) -> tuple[int, int, int]:
        """(sequences, rows of one's queries, of its keys); packed ones are one long sequence."""
        q, k = self.tensors[:2]
        if self.form == "thd":
            return 1, q.shape[0], k.shape[0]
        s, b = self.form.index("s"), self.form.index("b")
        return q.shape[b], q.shape[s], k.shape[s]

    def _sequences(self, *tensors: Tensor) -> Iterator[list[Tensor]]:
        """Views [b, s, h, …] of tensors of queries and, second and third, of keys and values, for
        all sequences or for each packed one.
        """
        if self.form != "thd":
            yield [t if self.form == "bshd" else t.transpose(0, 1) for t in tensors]
            return
        bounds = [of.tolist() for of in self.lengths]
        for i in range(len(bounds[0]) - 1):
            rows, columns = (slice(of[i], of[i + 1]) for of in bounds)
            yield [t[columns if n in (1, 2) else rows][None] for n, t in enumerate(tensors)]

    def _hidden(self, rows: int, columns: int) -> Tensor:
        """bool [b or 1, 1, rows, columns]: which keys a query does not see."""
        distance = torch.arange(columns) - torch.arange(rows)[:, None]
        if "bottom_right" in self.mask:
            distance = distance - (columns - rows)
        left, right = self.window
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if "causal" in self.mask:
            hidden |= distance > 0
        if left >= 0:
            hidden |= distance < -left
        if right >= 0:
            hidden |= distance > right
        hidden = hidden[None, None]
        if "padding" in self.mask and self.form != "thd":
            there = (self.lengths[1][1:] - self.lengths[1][:-1]).view(-1, 1, 1, 1)
            hidden = hidden | (torch.arange(columns) >= there)
        return hidden

    def _logits(self, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
        scores = _heads(q, q.shape[2]) @ _heads(k, q.shape[2]).transpose(-1, -2) * self.scale
        scores = scores if bias is None else scores + bias.float()
        return scores.masked_fill(self._hidden(q.shape[1], k.shape[1]), float("-inf"))

    def _kept(self, shape: Sequence[int], state: Tensor | None) -> Tensor | float:
        """What dropout leaves, the same in forward and backward."""
        if not self.dropout or state is None:
            return 1.0
        generator = torch.Generator().manual_seed(int(state.view(-1)[0]))
        return (torch.rand(tuple(shape), generator=generator) >= self.dropout) / (1 - self.dropout)

    def _by_rows(self, statistics: Tensor) -> Tensor:
        """View of [b, h, s, 1], or of [t, h, 1], as the rows of the queries lie."""
        if self.form == "thd":
            return statistics
        b, h, s = statistics.shape[:3]
        order = (2, 0, 1, 3) if self.form == "sbhd" else (0, 2, 1, 3)
        return statistics.view(b, h, s, 1).permute(order)

    def forward(
        self,
        out: Tensor,
        kept: Sequence[Tensor],
        state: Tensor,
        bias: Tensor | None = None,
        sink: Tensor | None = None,
    ) -> None:
        """Write ``out``, ``kept`` (log of the sum, and largest, of a row's scores) and ``state``.

        sink : one more logit a head, which takes its share and brings no value
        """
        state.random_(1 << 31)
        q, k, v = self.tensors[:3]
        rows = [self._by_rows(t) for t in kept]
        for q1, k1, v1, out1, *rows1 in self._sequences(q, k, v, out, *rows):
            scores = self._logits(q1, k1, bias)
            largest = scores.amax(-1, keepdim=True)
            if sink is not None:
                more = sink.float().expand(len(scores), -1, q1.shape[1], 1)
                scores = torch.cat([scores, more], -1)
            found = scores.logsumexp(-1, keepdim=True)
            shares = (scores - found).exp().nan_to_num()[..., : k1.shape[1]]
            shares = shares * self._kept(shares.shape, state)
            out1.copy_((shares @ _heads(v1, q1.shape[2])).transpose(1, 2))
            for to, of in zip(rows1, (found, largest), strict=False):
                to.copy_(of.transpose(1, 2))

    def backward(
        self,
        grads: Sequence[Tensor],
        statistics: Tensor,
        state: Tensor | None,
        bias: Pair = (None, None),
        sink: Pair = (None, None),
    ) -> None:
        """Write ``grads`` of q, k, v, and those of the bias and the sink."""
        q, _, _, out, grad = self.tensors
        for to in (*grads, bias[1], sink[1]):
            if to is not None:
                to.zero_()
        together = (*self.tensors, grads[0], self._by_rows(statistics))
        keys = self._sequences(q, grads[1], grads[2])
        for (q1, k1, v1, out1, grad1, dq1, lse), (_, dk1, dv1) in zip(
            self._sequences(*together), keys, strict=True
        ):
            heads, groups = q1.shape[2], k1.shape[2]
            lse = lse.transpose(1, 2)
            shares = (self._logits(q1, k1, bias[0]) - lse).exp().nan_to_num()
            keep, dout = self._kept(shares.shape, state), _heads(grad1, heads)
            delta = (dout * _heads(out1, heads)).sum(-1, keepdim=True)
            dscores = shares * (dout @ _heads(v1, heads).transpose(-1, -2) * keep - delta)
            dq1.copy_((dscores @ _heads(k1, heads) * self.scale).transpose(1, 2))
            dk = dscores.transpose(-1, -2) @ _heads(q1, heads) * self.scale
            dv = (shares * keep).transpose(-1, -2) @ dout
            for to, of in ((dk1, dk), (dv1, dv)):
                to.copy_(of.unflatten(1, (groups, -1)).sum(2).transpose(1, 2))
            if bias[0] is not None and bias[1] is not None:
                bias[1].add_(dscores.sum_to_size(bias[0].shape))
            if sink[0] is not None and sink[1] is not None:
                sink[1].sub_(((sink[0].float() - lse).exp() * delta).sum((0, 2), keepdim=True))


def _heads(t: Tensor, heads: int) -> Tensor:
    """[b, heads, s, d] in fp32; groups of heads share keys and values."""
    return t.transpose(1, 2).float().repeat_interleave(heads // t.shape[2], 1)


# -- cuDNN -----------------------------------------------------------------------------------------
_ALIGNED = 256  # bytes beside every plan's own (benchmarks/results/snapshots)


def _call(args: Sequence[Values], scale: float, dropout: float, count: int) -> Attention:
    """count : tensors that follow the lengths: q, k, v; backward also the output, its gradient"""
    first = next(i for i, a in enumerate(args) if isinstance(a, Tensor))
    tensors, rest = tuple(args[first + 2 : first + 2 + count]), args[first + 2 + count :]
    left, right = next(a for a in args if isinstance(a, (tuple, list)))
    layout, mask, bias = (
        member(f"NVTE_{kind}", args) for kind in ("QKV_Layout", "Mask_Type", "Bias_Type")
    )
    return Attention(
        layout,
        mask,
        bias,
        scale,
        dropout,
        (left, right),
        (args[first], args[first + 1]),
        tensors,
        tuple(rest),
    )


def _statistics(call: Attention) -> Tensor:
    q, (batch, rows, _) = call.tensors[0], call.size
    packed = call.form == "thd"
    return new([rows, q.shape[1], 1] if packed else [batch, q.shape[-2], rows, 1], torch.float32)


def announce(call: Attention, name: str, products: int, out: Tensor | None) -> None:
    """One kernel of ``products`` matrix products a head (2 forward, 5 backward).

    A causal mask halves them; a window leaves as many keys a query as it is wide; packed sequences
    count as if they saw each other, an upper bound.  Dropout and a fixed order of sums are in the
    kernel's name.
    """
    (q, k, v, *_), (batch, rows, columns), (left, right) = call.tensors, call.size, call.window
    causal = "causal" in call.mask
    pairs = batch * rows * columns // (2 if causal else 1)
    if left >= 0:
        width = left + 1 + (0 if causal else columns if right < 0 else right)
        pairs = min(pairs, batch * rows * width)
    name += "_dropout" * bool(call.dropout)
    name += "_deterministic" * (products > 2 and is_deterministic())
    flops = products * q.shape[-2] * pairs * (q.shape[-1] + v.shape[-1])
    fused(name, flops, *parts(q), *parts(k), *parts(v), out)


def is_deterministic() -> bool:
    """Whether gradients are summed in one order (dot_product_attention.py,
    DotProductAttention.__init__ @v2.9).
    """
    asked = os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") == "0"
    return asked or torch.are_deterministic_algorithms_enabled()


def rounded(number: int, multiple: int) -> int:
    """Round ``number`` up to a multiple."""
    return -(-number // multiple) * multiple


@kernel()
def fused_attn_fwd(*args: Values) -> list[Values]:
    """attention.cpp:114 @v2.18: out, statistics, (largest logits,) state, (bias,) (offset)"""
    call = _call(args, args[3], args[4], 3)
    q, k, v = call.tensors
    dtype, _, _, _, _, s_quantizer, o_quantizer, bias, offset, _, _, largest, *_ = call.rest
    create(s_quantizer, [0], torch.float32)
    out = create(o_quantizer, [*q.shape[:-1], v.shape[-1]], dtype)
    state = new(2, torch.int64)
    kept = [_statistics(call) for _ in range(2 if largest else 1)]
    scratch(_ALIGNED)
    announce(call, "attention", 2, parts(out)[0])
    more = [t if isinstance(t, Tensor) else None for t in (bias, offset)]
    if not q.is_meta:
        call.forward(out, kept, state, *more)
        if largest and not since(2, 14):  # the largest first, and a sum of exponents over it
            kept = [kept[1], (kept[0] - kept[1]).exp()]
    return [out, *kept, state, *(t for t in more if t is not None)]


@kernel()
def fused_attn_bwd(*args: Values) -> list[Values]:
    """attention.cpp:323 @v2.18: gradients of q, k, v, the bias and the softmax offset"""
    call = _call(args, args[2], args[3], 5)
    q, k, v, _, grad = call.tensors
    at, kept = next((i, a) for i, a in enumerate(call.rest) if isinstance(a, list))
    *of_scores, of_grads = call.rest[at + 3 : at + 6]  # quantizers; kept: statistics, state, …
    for quantizer in of_scores:
        create(quantizer, [0], torch.float32)
    delayed = kind_of(of_grads) == "delayed"
    dtype = torch.uint8 if delayed else call.rest[0]
    grads: list[Values] = list(_gradients(call.layout, dtype, q, k, v))
    if delayed:
        grads = [create(of_grads, g.shape, q.dtype, lambda *_, g=g: g) for g in grads]
    dbias = new(kept[-1].shape, q.dtype) if call.biased else None
    offset = member("NVTE_Softmax_Type", args) != "vanilla_softmax"
    doffset = new([1, q.shape[-2], 1, 1], torch.float32) if offset else None
    scratch(_workspace(call))
    announce(call, "attention_backward", 5, parts(grad)[0])
    if not q.is_meta:
        of_bias = kept[2] if call.biased else None, dbias
        of_sink = kept[-1] if offset else None, doffset
        call.backward(grads, kept[0], kept[1], of_bias, of_sink)
    return [*grads, dbias, doffset]


def _gradients(layout: str, dtype: torch.dtype, q: Tensor, *kv: Tensor) -> list[Tensor]:
    """Three tensors, or parts of one or two where the layout has q, k and v so
    (attention.cpp:384 @v2.18).
    """
    groups, found = layout.split("_"), []
    owners = {1: [(q, *kv)], 2: [(q,), kv], 3: [(q,), kv[:1], kv[1:]]}[len(groups)]
    for group, tensors in zip(groups, owners, strict=True):
        shape, count = list(tensors[0].shape), len(tensors)
        if count == 1:
            found.append(new(shape, dtype))
            continue
        at = len(shape) - len(group.partition(str(count))[2])
        shape.insert(at, count)
        found += new(shape, dtype).unbind(at)
    return found


def _workspace(call: Attention) -> int:
    """Bytes of one backward (cudnn-frontend, scaled_dot_product_flash_attention.h,
    get_fe_workspace_size_node @1.32): gradients of the queries in fp32 and a sum a row, or the
    parts of a fixed order, which a bias's gradient takes, too; with grouped heads keys' and values'
    gradients of every head.
    """
    q, k, v = call.tensors[:3]
    batch, rows, columns = call.size
    heads, size = q.shape[-2:]
    whole = batch * heads
    taken = 4 * whole * rows * (size + 1)
    if (is_deterministic() or call.biased) and call.form != "thd":
        taken = 2 * whole * rounded(rows, 64) * rounded(columns, 128) + 4 * whole * rows
    if k.shape[-2] != heads:
        taken += q.element_size() * whole * columns * (k.shape[-1] + v.shape[-1])
    return taken + _ALIGNED


@kernel()
def get_fused_attn_backend(*args: Values) -> Values:
    """attention.cpp:43 @v2.18: what cuDNN 9 takes on Hopper (nvte_get_fused_attn_backend,
    common/fused_attn/fused_attn.cpp); from 2.19 on of one object, with the reason of a refusal
    """
    from transformer_engine_torch import (  # type: ignore[import-not-found]
        NVTE_Fused_Attn_Backend,
    )

    if len(args) == 1:
        (of,) = args
        rest: Sequence[Values] = (
            of.dropout,
            of.num_attn_heads,
            of.num_gqa_groups,
            of.max_seqlen_q,
            of.max_seqlen_kv,
            of.head_dim_qk,
            of.head_dim_v,
            of.window_size_left,
            of.window_size_right,
        )
        dtype, mask = of.qkv_dtype, of.attn_mask_type.name.lower()
    else:
        dtype, mask, rest = args[1], member("NVTE_Mask_Type", args), args[7:]
    dropout, _, _, rows, columns, *sizes, left, right = rest[:9]
    windowed = left != -1 or right not in (-1, 0)
    fits = dtype_of(dtype) in (torch.float16, torch.bfloat16) and "arbitrary" not in mask
    fits = fits and all(size % 8 == 0 and size <= 256 for size in sizes)
    fits = fits and not (windowed and (dropout or rows > columns))
    name = "NVTE_F16_arbitrary_seqlen" if fits else "NVTE_No_Backend"
    if dtype_of(dtype) == torch.uint8 and set(sizes) == {128} and not (windowed or rows % 128):
        name = "NVTE_FP8"
    answer = NVTE_Fused_Attn_Backend[name]
    why = "no row of our table" if name == "NVTE_No_Backend" else ""
    return (answer, why) if len(args) == 1 else answer


# -- packed sequences, spread over ranks: shapes alone ---------------------------------------------
def _halved(x: Tensor, *rest: object) -> Tensor:
    dim = 0 if x.dim() == 3 else 1
    return new([*x.shape[:dim], x.shape[dim] // 2, *x.shape[dim + 1 :]], x.dtype)


def _to_cp_order(x: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(x.contiguous())


def _thirds(qkv: Tensor) -> Tensor:
    """q, a third of [s, b, h, 3 d], to all three [3, b, s, h, d]."""
    rows, batch, *heads = qkv.shape
    return new([3, batch, rows, *heads], qkv.dtype)


def _together(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    batch, rows, heads, size = q.shape
    return new([rows, batch, heads, 3 * size], q.dtype)


# kernel -> line of attention.cpp @v2.18, name for costs, whether its result is as large as what it
# reads, result (None: over its first tensor)
_PACKED: dict[str, tuple[int, str, bool, Callable[..., Tensor] | None]] = {
    "thd_read_half_tensor": (792, "copy_", True, _halved),
    "thd_get_partitioned_indices": (
        957,
        "",
        True,
        lambda lengths, tokens, size, rank: new(int(tokens) // size, torch.int32),
    ),
    "thd_read_second_half_lse": (
        876,
        "",
        True,
        lambda statistics, lengths, packed, tokens: torch.zeros(
            [*statistics.shape[:-1], tokens], device=statistics.device
        ),
    ),
    "thd_out_correction": (832, "add_", False, None),
    "thd_second_half_lse_correction": (925, "add_", False, None),
    "thd_grad_correction": (942, "add_", False, None),
    "thd_sequence_order_to_cp_rank_order": (978, "index_select", True, _to_cp_order),
    "thd_cp_rank_order_to_sequence_order": (978, "index_select", True, _to_cp_order),
    "fa_prepare_fwd": (611, "copy_", True, _thirds),
    "fa_prepare_bwd": (632, "copy_", True, _together),
    "convert_thd_to_bshd": (
        1052,
        "copy_",
        False,
        lambda x, lengths, batch, rows: new([batch, rows, *x.shape[1:]], x.dtype),
    ),
    "convert_bshd_to_thd": (
        1072,
        "copy_",
        False,
        lambda x, lengths, tokens: new([tokens, *x.shape[2:]], x.dtype),
    ),
}


def _packed(line: int, cost: str, alike: bool, result: Callable[..., Tensor] | None) -> Kernel:
    def run(*args: Values) -> Tensor | None:
        out = None if result is None else result(*args)
        read = tensors_in(args[: 2 if out is None else 1])
        if cost:
            written = read[0] if out is None else out
            fused(cost, 0, *([written] if alike else read), written)
        return out

    run.__doc__ = f"attention.cpp:{line} @v2.18"
    return run


for _name, _row in _PACKED.items():
    kernel(_name, values=False)(_packed(*_row))


# -- flash-attn 2 ----------------------------------------------------------------------------------
# Transformer Engine takes it where cuDNN is off.  Its functions return and keep what those of
# the package do, which cannot be installed without nvcc.
_VERSION = "2.8.1"


def _flash(
    tensors: tuple[Tensor, ...], rest: Sequence[Values], options: dict[str, Values]
) -> Attention:
    """Of [b, s, h, d], or of packed rows [t, h, d]; the last query sees all keys."""
    form = "bshd" if tensors[0].dim() == 4 else "thd"
    mask = "causal_bottom_right" if options.get("causal") else "no_mask_bottom_right"
    scale, dropout = (options.get(name) for name in ("softmax_scale", "dropout_p"))
    if dropout is None:  # without its name it is the only number that is not whole
        dropout = next((a for a in rest if isinstance(a, float)), 0.0)
    sides = options.get("window_size_left", -1), options.get("window_size_right", -1)
    scale = tensors[0].shape[-1] ** -0.5 if scale is None else scale
    window = options.get("window_size", sides)
    return Attention(
        f"{form}_{form}_{form}", mask, "", scale, dropout, window, tensors_in(rest)[:2], tensors
    )


def _flash_forward(call: Attention) -> tuple[Tensor, Tensor, None, Tensor]:
    """mha_fwd, mha_varlen_fwd (csrc/flash_attn/flash_api.cpp @2.8): out, statistics, probabilities
    for tests, random state.
    """
    q, k, v = call.tensors
    out = new([*q.shape[:-1], v.shape[-1]], q.dtype)
    (batch, rows, _), heads, packed = call.size, q.shape[-2], call.form == "thd"
    statistics = new([heads, rows] if packed else [batch, heads, rows], torch.float32)
    state = new(2, torch.int64)
    announce(call, "attention", 2, out)
    if not out.is_meta:
        call.forward(out, [_with_one(statistics, packed)], state)
    return out, statistics, None, state


def _with_one(statistics: Tensor, packed: bool) -> Tensor:
    return (statistics.t() if packed else statistics).unsqueeze(-1)


def _flash_backward(
    call: Attention, grads: Sequence[Tensor], statistics: Tensor, state: Tensor | None
) -> Tensor:
    """mha_bwd (flash_api.cpp @2.8): a number a row; the gradient of the queries in fp32, several
    times where sums have one order; with grouped heads the keys' and values' of every head.
    """
    q, k, v, _, grad = call.tensors
    batch, rows, columns = call.size
    heads, width = q.shape[-2:]
    padded, broad = rounded(rows, 128), rounded(width, 32 if width <= 128 else 64)
    number = new([batch, heads, padded], torch.float32)
    announce(call, "attention_backward", 5, grad)
    if not q.is_meta:
        call.backward(grads, _with_one(statistics, call.form == "thd"), state)
        return number
    copies = -(-PROCESSORS // (batch * heads)) if is_deterministic() else 1
    taken = [new([copies, batch, heads, padded, broad], torch.float32)]
    if k.shape[-2] != heads:
        taken += [new([batch, columns, heads, t.shape[-1]], q.dtype) for t in (k, v)]
    return number


@differentiable
def _attend(
    q: Tensor, k: Tensor, v: Tensor, rest: Sequence[Values], options: dict[str, Values]
) -> Any:
    """FlashAttnFunc, FlashAttnVarlenFunc (flash_attn/flash_attn_interface.py @2.8)."""
    call = _flash((q, k, v), rest, options)
    out, statistics, _, state = _flash_forward(call)
    kept = (q, k, v, out, statistics, *call.lengths, state)
    call = replace(call, tensors=(), lengths=())

    def backward(grad: Tensor, *saved: Tensor) -> Grads:
        q, k, v, out, statistics, *lengths, state = saved
        grads = tuple(torch.empty_like(t) for t in (q, k, v))
        tensors = (q, k, v, out, grad.contiguous())
        _flash_backward(replace(call, lengths=lengths, tensors=tensors), grads, statistics, state)
        return (*grads, None, None)

    return out, kept, backward


def flash_attn(q: Tensor, k: Tensor, v: Tensor, *rest: Values, **options: Values) -> Tensor:
    """flash_attn_func, and flash_attn_varlen_func with its lengths."""
    return _attend(q, k, v, rest, options)


def _raw_forward(
    q: Tensor, k: Tensor, v: Tensor, *rest: object, **options: Values
) -> tuple[Tensor, Tensor, None, Tensor]:
    """_flash_attn_forward, _flash_attn_varlen_forward: what context parallelism calls."""
    return _flash_forward(_flash((q, k, v), rest, options))


def _raw_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    statistics: Tensor,
    *rest: Values,
    **options: Values,
) -> Tensor:
    """_flash_attn_backward, _flash_attn_varlen_backward: into the gradients that it is given."""
    call = _flash((q, k, v, out, grad), rest[3:], options)
    return _flash_backward(call, rest[:3], statistics, options.get("rng_state"))


_PUBLIC: dict[str, object] = dict.fromkeys(
    ("flash_attn_func", "flash_attn_varlen_func"), flash_attn
)
_INTERFACE: dict[str, object] = {
    **_PUBLIC,
    **dict.fromkeys(("_flash_attn_forward", "_flash_attn_varlen_forward"), _raw_forward),
    **dict.fromkeys(("_flash_attn_backward", "_flash_attn_varlen_backward"), _raw_backward),
}
_MODULES: dict[str, dict[str, object]] = {
    "flash_attn": {"__version__": _VERSION, **_PUBLIC},
    "flash_attn.flash_attn_interface": _INTERFACE,
    "flash_attn_2_cuda": {"varlen_bwd": _raw_backward},
}


def add_flash_attn(changes: ProcessChanges) -> None:
    """Put the package into ``sys.modules``, and its version among those that are installed."""
    add_packages(changes, _MODULES, absent.Module)
    version = importlib.metadata.version

    def with_ours(name: str) -> str:
        return _VERSION if name in ("flash-attn", "flash_attn") else version(name)

    changes.set(importlib.metadata, "version", with_ours)
