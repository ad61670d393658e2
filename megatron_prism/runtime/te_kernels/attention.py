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

# values of a tensor that a kernel reads, and where the kernel writes its gradient
Pair = tuple[Tensor | None, Tensor | None]


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
        """The layout of the queries alone: ``sb3hd`` and ``sbhd_sb2hd`` are both sbhd."""
        layout_of_queries = self.layout.split("_")[0]
        return layout_of_queries.replace("2", "").replace("3", "")

    @property
    def size(self) -> tuple[int, int, int]:
        """(sequences, rows of one's queries, of its keys); packed ones are one long sequence."""
        q, k = self.tensors[:2]
        form = self.form
        if form == "thd":
            return 1, q.shape[0], k.shape[0]
        rows_dim = form.index("s")
        batch = q.shape[form.index("b")]
        return batch, q.shape[rows_dim], k.shape[rows_dim]

    def _sequences(self, *tensors: Tensor) -> Iterator[list[Tensor]]:
        """Views [b, s, h, …] of tensors of queries and, second and third, of keys and values, for
        all sequences or for each packed one.
        """
        if self.form == "bshd":
            yield list(tensors)
            return
        if self.form == "sbhd":
            yield [tensor.transpose(0, 1) for tensor in tensors]
            return
        # thd: sequences of all lengths behind each other, with the places where they begin
        query_bounds, key_bounds = (lengths.tolist() for lengths in self.lengths)
        for sequence in range(len(query_bounds) - 1):
            rows = slice(query_bounds[sequence], query_bounds[sequence + 1])
            columns = slice(key_bounds[sequence], key_bounds[sequence + 1])
            views = []
            for place, tensor in enumerate(tensors):
                part = tensor[rows]
                if place in (1, 2):
                    part = tensor[columns]
                views.append(part[None])
            yield views

    def _hidden(self, rows: int, columns: int) -> Tensor:
        """bool [b or 1, 1, rows, columns]: which keys a query does not see."""
        distance = torch.arange(columns) - torch.arange(rows)[:, None]
        if "bottom_right" in self.mask:  # the last query sees the last key
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
            # padded rows have keys as well, which come after those of the sequence
            key_bounds = self.lengths[1]
            keys_of_sequence = (key_bounds[1:] - key_bounds[:-1]).view(-1, 1, 1, 1)
            hidden = hidden | (torch.arange(columns) >= keys_of_sequence)
        return hidden

    def _logits(self, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
        """fp32 [b, h, queries, keys]; -inf where a query does not see a key."""
        heads = q.shape[2]
        keys = _heads(k, heads).transpose(-1, -2)
        scores = _heads(q, heads) @ keys * self.scale
        if bias is not None:
            scores = scores + bias.float()
        hidden = self._hidden(q.shape[1], k.shape[1])
        return scores.masked_fill(hidden, float("-inf"))

    def _dropout_factors(self, shape: Sequence[int], state: Tensor | None) -> Tensor | float:
        """What dropout leaves, scaled: the same in forward and backward, by the saved state."""
        if not self.dropout or state is None:
            return 1.0
        seed = int(state.view(-1)[0])
        generator = torch.Generator().manual_seed(seed)
        stays = torch.rand(tuple(shape), generator=generator) >= self.dropout
        return stays / (1 - self.dropout)

    def _by_rows(self, statistics: Tensor) -> Tensor:
        """View of [b, h, s, 1], or of [t, h, 1], as the rows of the queries lie."""
        form = self.form
        if form == "thd":
            return statistics
        batch, heads, rows = statistics.shape[:3]
        numbers = statistics.view(batch, heads, rows, 1)
        if form == "sbhd":
            return numbers.permute(2, 0, 1, 3)
        return numbers.permute(0, 2, 1, 3)

    def forward(
        self,
        out: Tensor,
        statistics: Sequence[Tensor],
        state: Tensor,
        bias: Tensor | None = None,
        sink: Tensor | None = None,
    ) -> None:
        """Write ``out``, ``state``, and ``statistics``: of a row's scores the log of the sum of
        their exponents, and perhaps the largest.

        sink : one more logit a head, which takes its share and brings no value
        """
        state.random_(1 << 31)
        q, k, v = self.tensors[:3]
        by_rows = [self._by_rows(numbers) for numbers in statistics]
        for q1, k1, v1, out1, *numbers1 in self._sequences(q, k, v, out, *by_rows):
            queries, heads = q1.shape[1:3]
            keys = k1.shape[1]
            scores = self._logits(q1, k1, bias)
            largest = scores.amax(-1, keepdim=True)
            # the sink is one more column of the scores, and of no values
            if sink is not None:
                sink_logits = sink.float().expand(len(scores), -1, queries, 1)
                scores = torch.cat([scores, sink_logits], -1)
            log_of_sum = scores.logsumexp(-1, keepdim=True)
            # a query that sees no key has shares of nan: it takes nothing
            shares = (scores - log_of_sum).exp().nan_to_num()[..., :keys]
            shares = shares * self._dropout_factors(shares.shape, state)
            values = shares @ _heads(v1, heads)
            out1.copy_(values.transpose(1, 2))
            for numbers, value in zip(numbers1, (log_of_sum, largest), strict=False):
                numbers.copy_(value.transpose(1, 2))

    def backward(
        self,
        grads: Sequence[Tensor],
        statistics: Tensor,
        state: Tensor | None,
        bias: Pair = (None, None),
        sink: Pair = (None, None),
    ) -> None:
        """Write ``grads`` of q, k, v, and those of the bias and the sink."""
        q = self.tensors[0]
        dq, dk, dv = grads
        bias_values, dbias = bias
        sink_values, dsink = sink
        for gradient in (dq, dk, dv, dbias, dsink):
            if gradient is not None:
                gradient.zero_()
        of_queries = self._sequences(*self.tensors, dq, self._by_rows(statistics))
        of_keys = self._sequences(q, dk, dv)
        for views, (_, dk1, dv1) in zip(of_queries, of_keys, strict=True):
            q1, k1, v1, out1, grad1, dq1, log_of_sum = views
            heads, groups = q1.shape[2], k1.shape[2]
            log_of_sum = log_of_sum.transpose(1, 2)
            shares = (self._logits(q1, k1, bias_values) - log_of_sum).exp().nan_to_num()
            factors = self._dropout_factors(shares.shape, state)
            dout = _heads(grad1, heads)
            # the gradient of softmax: what each share gains less what its whole row gains
            row_gain = (dout * _heads(out1, heads)).sum(-1, keepdim=True)
            dshares = dout @ _heads(v1, heads).transpose(-1, -2) * factors
            dscores = shares * (dshares - row_gain)
            dq_of_heads = dscores @ _heads(k1, heads) * self.scale
            dk_of_heads = dscores.transpose(-1, -2) @ _heads(q1, heads) * self.scale
            dv_of_heads = (shares * factors).transpose(-1, -2) @ dout
            dq1.copy_(dq_of_heads.transpose(1, 2))
            dk1.copy_(_sum_of_groups(dk_of_heads, groups))
            dv1.copy_(_sum_of_groups(dv_of_heads, groups))
            # one bias for several rows or heads has the sum of their gradients
            if bias_values is not None and dbias is not None:
                dbias.add_(dscores.sum_to_size(bias_values.shape))
            # the sink takes a share and brings no value: its gradient is what its share costs the
            # row
            if sink_values is not None and dsink is not None:
                sink_share = (sink_values.float() - log_of_sum).exp()
                dsink.sub_((sink_share * row_gain).sum((0, 2), keepdim=True))


def _heads(rows: Tensor, heads: int) -> Tensor:
    """[b, heads, s, d] in fp32 of [b, s, h, d]; groups of heads share keys and values."""
    heads_of_group = heads // rows.shape[2]
    return rows.transpose(1, 2).float().repeat_interleave(heads_of_group, 1)


def _sum_of_groups(gradients: Tensor, groups: int) -> Tensor:
    """[b, s, groups, d] of [b, heads, s, d]: heads of a group add to the same keys or values."""
    by_group = gradients.unflatten(1, (groups, -1))
    return by_group.sum(2).transpose(1, 2)


# -- cuDNN -----------------------------------------------------------------------------------------
_ALIGNED = 256  # bytes beside every plan's own (benchmarks/results/snapshots)


def _call(args: Sequence[Values], scale: float, dropout: float, count: int) -> Attention:
    """count : tensors that follow the lengths: q, k, v; backward also the output, its gradient"""
    # numbers and enums lead; the first tensors are the two cumulated lengths, then q, k and v
    first = 0
    while not isinstance(args[first], Tensor):
        first += 1
    q_place = first + 2
    rest_place = q_place + count
    left, right = next(arg for arg in args if isinstance(arg, (tuple, list)))
    return Attention(
        layout=member("NVTE_QKV_Layout", args),
        mask=member("NVTE_Mask_Type", args),
        bias=member("NVTE_Bias_Type", args),
        scale=scale,
        dropout=dropout,
        window=(left, right),
        lengths=(args[first], args[first + 1]),
        tensors=tuple(args[q_place:rest_place]),
        rest=tuple(args[rest_place:]),
    )


def _statistics(call: Attention) -> Tensor:
    """A number of each row of each head, as cuDNN lays them out."""
    q = call.tensors[0]
    batch, rows, _ = call.size
    if call.form == "thd":
        return new([rows, q.shape[1], 1], torch.float32)
    return new([batch, q.shape[-2], rows, 1], torch.float32)


def announce(call: Attention, name: str, products: int, out: Tensor | None) -> None:
    """One kernel of ``products`` matrix products a head (2 forward, 5 backward).

    A causal mask halves them; a window leaves as many keys a query as it is wide; packed sequences
    count as if they saw each other, an upper bound.  Dropout and a fixed order of sums are in the
    kernel's name.
    """
    q, k, v = call.tensors[:3]
    batch, rows, columns = call.size
    left, right = call.window
    causal = "causal" in call.mask
    pairs = batch * rows * columns
    # half of all pairs of rows and columns
    if causal:
        pairs //= 2
    # a window: keys behind the query, the query, and keys ahead of it
    if left >= 0:
        keys_ahead = right
        if causal:
            keys_ahead = 0
        elif right < 0:  # no bound to the right
            keys_ahead = columns
        window_keys = left + 1 + keys_ahead
        pairs = min(pairs, batch * rows * window_keys)
    if call.dropout:
        name += "_dropout"
    if products > 2 and is_deterministic():
        name += "_deterministic"
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
    q, _, v = call.tensors
    dtype, _, _, _, _, s_quantizer, o_quantizer, bias, offset, _, _, wants_largest, *_ = call.rest
    create(s_quantizer, [0], torch.float32)
    out = create(o_quantizer, [*q.shape[:-1], v.shape[-1]], dtype)
    state = new(2, torch.int64)
    statistics = [_statistics(call)]
    if wants_largest:
        statistics.append(_statistics(call))
    scratch(_ALIGNED)
    announce(call, "attention", 2, parts(out)[0])
    bias = bias if isinstance(bias, Tensor) else None
    offset = offset if isinstance(offset, Tensor) else None
    if not q.is_meta:
        call.forward(out, statistics, state, bias, offset)
        # the order of results before 2.14
        if wants_largest and not since(2, 14):
            # the largest came first then, and a sum of exponents over it
            log_of_sum, largest = statistics
            statistics = [largest, (log_of_sum - largest).exp()]
    results = [out, *statistics, state]
    for optional in (bias, offset):
        if optional is not None:
            results.append(optional)
    return results


@kernel()
def fused_attn_bwd(*args: Values) -> list[Values]:
    """attention.cpp:323 @v2.18: gradients of q, k, v, the bias and the softmax offset"""
    scale, dropout = args[2], args[3]
    call = _call(args, scale, dropout, 5)
    q, k, v, _, grad = call.tensors
    # a list of what forward kept (statistics, state, …), two padded lengths, three quantizers
    place = 0
    while not isinstance(call.rest[place], list):
        place += 1
    saved = call.rest[place]
    *score_quantizers, grad_quantizer = call.rest[place + 3 : place + 6]
    for quantizer in score_quantizers:
        create(quantizer, [0], torch.float32)
    # delayed scaling writes gradients in FP8
    delayed = kind_of(grad_quantizer) == "delayed"
    dtype = torch.uint8 if delayed else call.rest[0]
    grads: list[Values] = list(_gradients(call.layout, dtype, q, k, v))
    if delayed:
        grads = [_in_memory(grad_quantizer, memory, q.dtype) for memory in grads]
    has_offset = member("NVTE_Softmax_Type", args) != "vanilla_softmax"
    dbias = new(saved[-1].shape, q.dtype) if call.biased else None
    doffset = new([1, q.shape[-2], 1, 1], torch.float32) if has_offset else None
    scratch(_workspace(call))
    announce(call, "attention_backward", 5, parts(grad)[0])
    if not q.is_meta:
        statistics, state = saved[:2]
        bias = saved[2] if call.biased else None
        offset = saved[-1] if has_offset else None
        call.backward(grads, statistics, state, (bias, dbias), (offset, doffset))
    return [*grads, dbias, doffset]


def _in_memory(quantizer: Values, memory: Tensor, dtype: torch.dtype) -> Values:
    """Transformer Engine's tensor in FP8 whose values lie in ``memory``."""
    return create(quantizer, memory.shape, dtype, lambda *_: memory)


def _gradients(layout: str, dtype: torch.dtype, q: Tensor, *kv: Tensor) -> list[Tensor]:
    """Three tensors, or parts of one or two where the layout has q, k and v so
    (attention.cpp:384 @v2.18).
    """
    layouts = layout.split("_")
    owners: list[tuple[Tensor, ...]] = [(q,), kv[:1], kv[1:]]
    # one tensor of q, k and v (sb3hd), or one of k and v (sbhd_sb2hd)
    if len(layouts) == 1:
        owners = [(q, *kv)]
    elif len(layouts) == 2:
        owners = [(q,), kv]
    gradients = list[Tensor]()
    for group_layout, tensors in zip(layouts, owners, strict=True):
        shape = list(tensors[0].shape)
        count = len(tensors)
        if count == 1:
            gradients.append(new(shape, dtype))
            continue
        # sb3hd, sbh3d: the digit stands where the parts lie side by side
        dims_behind = len(group_layout.partition(str(count))[2])
        parts_dim = len(shape) - dims_behind
        shape.insert(parts_dim, count)
        gradients += new(shape, dtype).unbind(parts_dim)
    return gradients


def _workspace(call: Attention) -> int:
    """Bytes of one backward (cudnn-frontend, scaled_dot_product_flash_attention.h,
    get_fe_workspace_size_node @1.32): gradients of the queries in fp32 and a sum a row, or the
    parts of a fixed order, which a bias's gradient takes, too; with grouped heads keys' and values'
    gradients of every head.
    """
    q, k, v = call.tensors[:3]
    batch, rows, columns = call.size
    heads, size = q.shape[-2:]
    all_heads = batch * heads
    sums_of_rows = 4 * all_heads * rows
    workspace_bytes = sums_of_rows * size + sums_of_rows
    # a fixed order of sums needs a part for each block of keys
    if (is_deterministic() or call.biased) and call.form != "thd":
        parts_in_order = 2 * all_heads * rounded(rows, 64) * rounded(columns, 128)
        workspace_bytes = parts_in_order + sums_of_rows
    # gradients of keys and values of every head, before groups are summed
    if k.shape[-2] != heads:
        columns_of_head = k.shape[-1] + v.shape[-1]
        workspace_bytes += q.element_size() * all_heads * columns * columns_of_head
    return workspace_bytes + _ALIGNED


@kernel()
def get_fused_attn_backend(*args: Values) -> Values:
    """attention.cpp:43 @v2.18: what cuDNN 9 takes on Hopper (nvte_get_fused_attn_backend,
    common/fused_attn/fused_attn.cpp); from 2.19 on of one object, with the reason of a refusal
    """
    from transformer_engine_torch import (  # type: ignore[import-not-found]
        NVTE_Fused_Attn_Backend,
    )

    from_config = len(args) == 1
    # 2.19: one object of all choices
    if from_config:
        (config,) = args
        dtype = dtype_of(config.qkv_dtype)
        mask = config.attn_mask_type.name.lower()
        dropout = config.dropout
        rows, columns = config.max_seqlen_q, config.max_seqlen_kv
        head_sizes = [config.head_dim_qk, config.head_dim_v]
        left, right = config.window_size_left, config.window_size_right
    else:
        dtype = dtype_of(args[1])
        mask = member("NVTE_Mask_Type", args)
        dropout, _, _, rows, columns, *head_sizes, left, right = args[7:16]
    # (-1, 0) is a causal mask, (-1, -1) is none
    windowed = left != -1 or right not in (-1, 0)
    name = "NVTE_No_Backend"
    if _fits_16_bit(dtype, mask, head_sizes) and not (windowed and (dropout or rows > columns)):
        name = "NVTE_F16_arbitrary_seqlen"
    # FP8: heads of 128 columns, and rows in whole tiles of 128
    if dtype == torch.uint8 and set(head_sizes) == {128} and not (windowed or rows % 128):
        name = "NVTE_FP8"
    backend = NVTE_Fused_Attn_Backend[name]
    if not from_config:
        return backend
    reason = "no row of our table" if name == "NVTE_No_Backend" else ""
    return backend, reason


def _fits_16_bit(dtype: torch.dtype, mask: str, head_sizes: Sequence[int]) -> bool:
    """Whether cuDNN's kernel of 16 bit takes this type, mask and heads."""
    if dtype not in (torch.float16, torch.bfloat16) or "arbitrary" in mask:
        return False
    return all(size % 8 == 0 and size <= 256 for size in head_sizes)


# -- packed sequences, spread over ranks: shapes alone ---------------------------------------------
def _halved(x: Tensor, *lengths: object) -> Tensor:
    rows_dim = 0 if x.dim() == 3 else 1
    shape = list(x.shape)
    shape[rows_dim] //= 2
    return new(shape, x.dtype)


def _indices_of_rank(lengths: Tensor, tokens: Values, size: int, rank: int) -> Tensor:
    return new(int(tokens) // size, torch.int32)


def _second_half_of_statistics(
    statistics: Tensor, lengths: Tensor, packed: bool, tokens: int
) -> Tensor:
    return torch.zeros([*statistics.shape[:-1], tokens], device=statistics.device)


def _to_cp_order(x: Tensor, *lengths: object) -> Tensor:
    return torch.empty_like(x.contiguous())


def _thirds(qkv: Tensor) -> Tensor:
    """q, a third of [s, b, h, 3 d], to all three [3, b, s, h, d]."""
    rows, batch, *heads = qkv.shape
    return new([3, batch, rows, *heads], qkv.dtype)


def _together(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    batch, rows, heads, size = q.shape
    return new([rows, batch, heads, 3 * size], q.dtype)


def _padded_batch(x: Tensor, lengths: Tensor, batch: int, rows: int) -> Tensor:
    return new([batch, rows, *x.shape[1:]], x.dtype)


def _packed_batch(x: Tensor, lengths: Tensor, tokens: int) -> Tensor:
    return new([tokens, *x.shape[2:]], x.dtype)


# kernel -> line of attention.cpp @v2.18, name for costs, whether its result is as large as what it
# reads, result (None: over its first tensor)
_PACKED: dict[str, tuple[int, str, bool, Callable[..., Tensor] | None]] = {
    "thd_read_half_tensor": (792, "copy_", True, _halved),
    "thd_get_partitioned_indices": (957, "", True, _indices_of_rank),
    "thd_read_second_half_lse": (876, "", True, _second_half_of_statistics),
    "thd_out_correction": (832, "add_", False, None),
    "thd_second_half_lse_correction": (925, "add_", False, None),
    "thd_grad_correction": (942, "add_", False, None),
    "thd_sequence_order_to_cp_rank_order": (978, "index_select", True, _to_cp_order),
    "thd_cp_rank_order_to_sequence_order": (978, "index_select", True, _to_cp_order),
    "fa_prepare_fwd": (611, "copy_", True, _thirds),
    "fa_prepare_bwd": (632, "copy_", True, _together),
    "convert_thd_to_bshd": (1052, "copy_", False, _padded_batch),
    "convert_bshd_to_thd": (1072, "copy_", False, _packed_batch),
}


def _packed(
    line: int, cost: str, reads_as_much: bool, result: Callable[..., Tensor] | None
) -> Kernel:
    """Make the kernel of a row of ``_PACKED``."""

    def run(*args: Values) -> Tensor | None:
        if result is None:  # over its first tensor
            out = None
            read = tensors_in(args[:2])
            written = read[0]
        else:
            out = written = result(*args)
            read = tensors_in(args[:1])
        if reads_as_much:
            read = [written]
        if cost:
            fused(cost, 0, *read, written)
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
    tensors: tuple[Tensor, ...], arguments: Sequence[Values], options: dict[str, Values]
) -> Attention:
    """Of [b, s, h, d], or of packed rows [t, h, d]; the last query sees all keys."""
    form = "bshd" if tensors[0].dim() == 4 else "thd"
    mask = "causal_bottom_right" if options.get("causal") else "no_mask_bottom_right"
    dropout = options.get("dropout_p")
    if dropout is None:  # without its name it is the only number that is not whole
        floats = [argument for argument in arguments if isinstance(argument, float)]
        dropout = floats[0] if floats else 0.0
    scale = options.get("softmax_scale")
    if scale is None:
        scale = tensors[0].shape[-1] ** -0.5
    if "window_size" in options:
        window = options["window_size"]
    else:  # the functions below the public ones take both sides by themselves
        window = (options.get("window_size_left", -1), options.get("window_size_right", -1))
    return Attention(
        layout=f"{form}_{form}_{form}",
        mask=mask,
        bias="",
        scale=scale,
        dropout=dropout,
        window=window,
        lengths=tensors_in(arguments)[:2],
        tensors=tensors,
    )


def _flash_forward(call: Attention) -> tuple[Tensor, Tensor, None, Tensor]:
    """mha_fwd, mha_varlen_fwd (csrc/flash_attn/flash_api.cpp @2.8): out, statistics, probabilities
    for tests, random state.
    """
    q, _, v = call.tensors
    batch, rows, _ = call.size
    heads = q.shape[-2]
    packed = call.form == "thd"
    out = new([*q.shape[:-1], v.shape[-1]], q.dtype)
    statistics = new([heads, rows] if packed else [batch, heads, rows], torch.float32)
    state = new(2, torch.int64)
    announce(call, "attention", 2, out)
    if not out.is_meta:
        call.forward(out, [_as_columns(statistics, packed)], state)
    return out, statistics, None, state


def _as_columns(statistics: Tensor, packed: bool) -> Tensor:
    """View [b, h, s, 1] or, of packed sequences, [t, h, 1] of flash-attn's statistics."""
    if packed:
        return statistics.t().unsqueeze(-1)
    return statistics.unsqueeze(-1)


def _flash_backward(
    call: Attention, grads: Sequence[Tensor], statistics: Tensor, state: Tensor | None
) -> Tensor:
    """mha_bwd (flash_api.cpp @2.8): a number a row; the gradient of the queries in fp32, several
    times where sums have one order; with grouped heads the keys' and values' of every head.
    """
    q, k, v, _, grad = call.tensors
    batch, rows, columns = call.size
    heads, width = q.shape[-2:]
    padded_rows = rounded(rows, 128)
    padded_width = rounded(width, 32 if width <= 128 else 64)
    number_of_row = new([batch, heads, padded_rows], torch.float32)
    announce(call, "attention_backward", 5, grad)
    if not q.is_meta:
        call.backward(grads, _as_columns(statistics, call.form == "thd"), state)
        return number_of_row
    # shapes alone: the temporaries, which live until the kernel returns
    copies = 1
    if is_deterministic():
        copies = -(-PROCESSORS // (batch * heads))
    temporaries = [new([copies, batch, heads, padded_rows, padded_width], torch.float32)]
    # grouped heads: gradients of each head of queries, which are summed afterwards
    if k.shape[-2] != heads:
        temporaries.append(new([batch, columns, heads, k.shape[-1]], q.dtype))
        temporaries.append(new([batch, columns, heads, v.shape[-1]], q.dtype))
    return number_of_row


@differentiable
def _attend(
    q: Tensor, k: Tensor, v: Tensor, arguments: Sequence[Values], options: dict[str, Values]
) -> Any:
    """FlashAttnFunc, FlashAttnVarlenFunc (flash_attn/flash_attn_interface.py @2.8)."""
    call = _flash((q, k, v), arguments, options)
    out, statistics, _, state = _flash_forward(call)
    saved_tensors = (q, k, v, out, statistics, *call.lengths, state)
    call = replace(call, tensors=(), lengths=())  # backward holds no tensor but the saved ones

    def backward(grad: Tensor, *saved: Tensor) -> Grads:
        q, k, v, out, statistics, *lengths, state = saved
        grads = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        tensors = (q, k, v, out, grad.contiguous())
        call_of_backward = replace(call, lengths=lengths, tensors=tensors)
        _flash_backward(call_of_backward, grads, statistics, state)
        return (*grads, None, None)

    return out, saved_tensors, backward


def flash_attn(q: Tensor, k: Tensor, v: Tensor, *arguments: Values, **options: Values) -> Tensor:
    """flash_attn_func, and flash_attn_varlen_func with its lengths."""
    return _attend(q, k, v, arguments, options)


def _raw_forward(
    q: Tensor, k: Tensor, v: Tensor, *arguments: object, **options: Values
) -> tuple[Tensor, Tensor, None, Tensor]:
    """_flash_attn_forward, _flash_attn_varlen_forward: what context parallelism calls."""
    return _flash_forward(_flash((q, k, v), arguments, options))


def _raw_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    statistics: Tensor,
    *arguments: Values,
    **options: Values,
) -> Tensor:
    """_flash_attn_backward, _flash_attn_varlen_backward: into the gradients that it is given."""
    grads = arguments[:3]
    call = _flash((q, k, v, out, grad), arguments[3:], options)
    return _flash_backward(call, grads, statistics, options.get("rng_state"))


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
