"""GroupedLinear: one product per local expert.

Saved: the split input, the weights twice and the biases (pytorch/module/grouped_linear.py:224-231
@v2.9); the splits are views of one tensor, so that they cost it once.  On ``meta`` the counts in
``m_splits`` need not be known: rows in are rows out.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from megatron_prism.runtime.devices.kernels import fused
from megatron_prism.runtime.te.base import (
    TransformerEngineBaseModule,
    begin,
    check_no_userbuffers,
    get_workspace,
    keep,
    kept,
    now_or_later,
    quantized_weight,
    weight_product,
)
from megatron_prism.runtime.te.common import refuse
from megatron_prism.runtime.te.fp8 import Quantized, Quantizer
from megatron_prism.runtime.te.linear import add_linear_parameters, options, options_fp8
from megatron_prism.runtime.te.linear_fp8 import check_dims, update

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import (
        AutogradContext,
        Device,
        Grads,
        Group,
        Init,
        Trackers,
        Weight,
    )

__all__ = ["GroupedLinear"]


def _split(x: torch.Tensor, splits: list[int], quantizers: list[Quantizer]) -> list[Quantized]:
    """Rows in FP8 by expert; in one piece where the counts are not known."""
    lengths = splits if sum(splits) == x.shape[0] else [x.shape[0]]
    return [q(rows) for q, rows in zip(quantizers, torch.split(x, lengths), strict=False)]


def _multiply(
    left: Sequence[torch.Tensor | None],
    right: Sequence[torch.Tensor | None],
    flops: int,
    out: torch.Tensor,
) -> None:
    fused("grouped_gemm", flops, *left, *right, out)


class GroupedLinearFP8(torch.autograd.Function):
    """_GroupedLinear (pytorch/module/grouped_linear.py:155 @v2.20.2)."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        inp: torch.Tensor,
        splits: list[int],
        opts: SimpleNamespace,
        *params: Weight,
    ) -> torch.Tensor:
        x = inp.contiguous().view(-1, inp.shape[-1])
        weights, biases = params[: opts.count], params[opts.count :]
        get_workspace(x, grouped=True)
        check_dims(x[:0], weights[0], opts.fp8.weights[0].kind)
        for q in opts.fp8.inputs:
            q.set_usage(True, opts.keeps_input and opts.original is None)
        parts = _split(x, splits, opts.fp8.inputs)
        casts = []
        for i, (q, weight) in enumerate(zip(opts.fp8.weights, weights, strict=True)):
            q.set_usage(True, opts.weight_columns)
            casts.append(quantized_weight(opts.module, weight, q, opts.first, f"weight{i}"))
        out = x.new_empty(x.shape[0], weights[0].shape[0])
        rows, held = [part.rows for part in parts], [cast.rows for cast, _ in casts]
        _multiply(rows, held, 2 * x.numel() * out.shape[1], out)
        for part in parts:
            if part.columns is not None:
                part.update_usage(rows=False, columns=True)
        inputs: Sequence[Quantized | torch.Tensor] = parts if opts.original is None else [inp]
        inputs = inputs if opts.keeps_input else []
        stay = [cast if stays else None for cast, stays in casts]
        if opts.keeps:
            keep(ctx, *inputs, *(None if stays else cast for cast, stays in casts), *biases)
        ctx.stay, ctx.num_parts, ctx.splits, ctx.opts = stay, len(inputs), splits, opts
        ctx.shape, ctx.weights, ctx.has_bias = inp.shape, weights, bool(biases)
        return out.view(*inp.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: AutogradContext, grad: torch.Tensor) -> Grads:
        opts, weights = ctx.opts, ctx.weights
        found = kept(ctx)
        inputs, casts = found[: ctx.num_parts], found[ctx.num_parts :][: opts.count]
        casts = [own or stays for own, stays in zip(casts, ctx.stay, strict=True)]
        ctx.stay = None
        del found
        wide = grad.reshape(-1, grad.shape[-1]).contiguous()
        dbiases = []
        if ctx.has_bias:
            dbiases = [weight.new_empty(weight.shape[0]) for weight in weights]
        grads = _split(wide, ctx.splits, opts.fp8.grads)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = wide.new_empty(wide.shape[0], weights[0].shape[1])
            for cast in casts:
                cast.update_usage(columns=True)
            rows, columns = [part.rows for part in grads], [cast.columns for cast in casts]
            _multiply(rows, columns, 2 * wide.numel() * dx.shape[1], dx)
            del rows, columns
            dx = dx.view(ctx.shape)
        dweights: list[torch.Tensor | None] = [None] * opts.count
        if ctx.needs_input_grad[3]:
            dweights = _weight_gradients_fp8(weights, inputs, grads, ctx.splits, opts)
        update(opts)
        return dx, None, None, *dweights, *dbiases


def _weight_gradients_fp8(
    weights: Sequence[Weight],
    inputs: Sequence[Quantized | torch.Tensor],
    grads: Sequence[Quantized],
    splits: list[int],
    opts: SimpleNamespace,
) -> list[torch.Tensor | None]:
    """Added to ``main_grad``, returned, or left for ``backward_dw``."""
    if opts.original is not None:
        for q in opts.fp8.inputs:
            q.set_usage(q.only_rows_gather, True)
        (whole,) = (one for one in inputs if isinstance(one, torch.Tensor))
        cast = _split(whole.reshape(-1, whole.shape[-1]), splits, opts.fp8.inputs)
    else:
        cast = [one for one in inputs if isinstance(one, Quantized)]
    flops = 2 * sum(part.shape[0] for part in grads) * weights[0].numel()

    def products() -> list[torch.Tensor | None]:
        mains = [weight.main_grad if opts.fuse_wgrad else None for weight in weights]
        out = mains if opts.fuse_wgrad else [torch.empty_like(weight) for weight in weights]
        left, right = [part.columns for part in grads], [part.columns for part in cast]
        fused("grouped_gemm", flops, *left, *right, *out)
        for part in cast:
            part.clear()
        return [None if opts.fuse_wgrad else made for made in out]

    return now_or_later(weights, opts, products)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        inp: torch.Tensor,
        splits: list[int],
        opts: SimpleNamespace,
        *params: Weight,
    ) -> torch.Tensor:
        x = inp.contiguous().view(-1, inp.shape[-1])
        weights, biases = params[: opts.count], params[opts.count :]
        get_workspace(x, grouped=True)
        out = x.new_empty(x.shape[0], weights[0].shape[0])
        parts = list(torch.split(x, splits)) if sum(splits) == x.shape[0] else [x]
        if not x.is_meta:
            for i, (rows, to) in enumerate(zip(parts, torch.split(out, splits), strict=True)):
                to.copy_(
                    torch.nn.functional.linear(rows, weights[i], biases[i] if biases else None)
                )
        else:
            fused("grouped_gemm", 2 * x.numel() * out.shape[1], x, *weights, out)
        keep = parts if weights[0].requires_grad else []
        ctx.save_for_backward(*keep, *weights, *weights, *biases)
        ctx.num_parts, ctx.splits, ctx.opts, ctx.shape = len(keep), splits, opts, inp.shape
        ctx.weights, ctx.has_bias = weights, bool(biases)
        return out.view(*inp.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: AutogradContext, grad: torch.Tensor) -> Grads:
        parts = ctx.saved_tensors[: ctx.num_parts]
        opts, weights = ctx.opts, ctx.weights
        grad = grad.reshape(-1, grad.shape[-1]).contiguous()
        dx = None
        if ctx.needs_input_grad[0]:
            dx = grad.new_empty(grad.shape[0], weights[0].shape[1])
            if not grad.is_meta:
                for to, part, w in zip(
                    torch.split(dx, ctx.splits), torch.split(grad, ctx.splits), weights, strict=True
                ):
                    to.copy_(part @ w)
            else:
                fused("grouped_gemm", 2 * grad.numel() * dx.shape[1], grad, *weights, dx)
            dx = dx.view(ctx.shape)
        dweights: list[torch.Tensor | None] = [None] * opts.count
        if ctx.needs_input_grad[3]:
            grads = torch.split(grad, ctx.splits) if len(parts) == opts.count else [grad]
            pairs = [
                (parts[i], grads[i]) if len(parts) == opts.count else (parts[0], grad)
                for i in range(opts.count)
            ]
            dweights = _weight_gradients(weights, pairs, opts)
        dbiases = []
        if ctx.has_bias:
            dbiases = [
                weights[0].new_empty(weights[0].shape[0]) if grad.is_meta else part.sum(0)
                for part in (weights if grad.is_meta else torch.split(grad, ctx.splits))
            ]
        return dx, None, None, *dweights, *dbiases


def _weight_gradients(
    weights: Sequence[Weight],
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    opts: SimpleNamespace,
) -> list[torch.Tensor | None]:
    mains = [weight.main_grad if opts.fuse_wgrad else None for weight in weights]

    def products() -> list[torch.Tensor | None]:
        return [
            weight_product(weight, x, grad, opts, main)
            for weight, main, (x, grad) in zip(weights, mains, pairs, strict=True)
        ]

    return now_or_later(weights, opts, products)


class GroupedLinear(TransformerEngineBaseModule):
    """pytorch/module/grouped_linear.py:505 @v2.9."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Group = None,
        tp_size: int = 1,
        get_rng_state_tracker: Trackers | None = None,
        rng_tracker_name: str | None = None,
        init_method: Init | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Device = "cuda",
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        name: str | None = None,
        **rest: object,
    ) -> None:
        super().__init__()
        check_no_userbuffers(rest)
        if rest.get("single_grouped_weight") or rest.get("single_grouped_bias"):
            refuse("GroupedLinear with one grouped parameter")
        self.set_parallel(tp_group, tp_size, sequence_parallel)
        self.set_linear(
            in_features,
            out_features,
            parallel_mode,
            bias=bias,
            return_bias=return_bias,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
        )
        self.num_gemms, self.name = num_gemms, name
        self.save_original_input = save_original_input
        self.get_rng_state_tracker, self.rng_tracker_name = get_rng_state_tracker, rng_tracker_name
        for i in range(num_gemms):
            add_linear_parameters(self, bias, init_method, params_dtype, device, suffix=str(i))
        self.reset_parameters(defer_init=device == "meta")

    def forward(
        self, inp: torch.Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """Rows of expert i are the i-th of ``m_splits``."""
        splits = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else list(m_splits)
        if len(splits) != self.num_gemms:
            raise ValueError(f"{len(splits)} splits for {self.num_gemms} products")
        state, run = begin(self, self.num_gemms), _GroupedLinear.apply
        opts = options(self, is_first_microbatch, inp)
        opts.count = self.num_gemms
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)] if self.use_bias else []
        if state is not None:
            opts = options_fp8(opts, state, is_first_microbatch, inp, weights[0])
            run = GroupedLinearFP8.apply
        out = run(inp, splits, opts, *weights, *(biases if self.apply_bias else []))
        return (out, biases) if self.return_bias else out
