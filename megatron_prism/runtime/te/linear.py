"""Linear, LayerNormLinear and GroupedLinear with their tensor- and sequence-parallel communication.

Saved: the un-gathered input, weight twice and bias (pytorch/module/linear.py:421-429 @v2.9).
Column-parallel under sequence parallelism gathers the input in forward and again in backward
(linear.py:178, 644); the gathered copy is dropped after each product (linear.py:334, 866).
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from megatron_prism.runtime.devices.kernels import fused
from megatron_prism.runtime.te.base import (
    TransformerEngineBaseModule,
    begin,
    cast_if_needed,
    check_no_userbuffers,
    clear,
    first_module,
    gather_grad,
    get_workspace,
    keep,
    kept,
    now_or_later,
    quantized_weight,
    rows_back,
    rows_times,
    set_tp_attributes,
    weight_product,
    weight_usage,
)
from megatron_prism.runtime.te.distributed import (
    allreduce,
    gather_along_first_dim,
    reduce_scatter_along_first_dim,
)
from megatron_prism.runtime.te.fp8 import Quantized, Quantizer
from megatron_prism.runtime.te.linear_fp8 import LayerNormLinearFP8, LinearFP8, check_dims, update
from megatron_prism.runtime.te.row_kernels import Norm, norm_backward, norm_forward
from megatron_prism.runtime.te.unsupported import refuse

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
    from megatron_prism.runtime.te.base import LayerState


def options(
    module: TransformerEngineBaseModule, is_first_microbatch: bool | None, inp: torch.Tensor
) -> types.SimpleNamespace:
    """What the functions need to know of their module.

    Raises TypeError where parameters are of another dtype than ``inp`` (base.py:1482 @v2.20.2), as
    with ``--fp32-residual-connection``.
    """
    _check_dtypes(module, inp.dtype)
    return types.SimpleNamespace(
        mode=module.parallel_mode,
        group=module.tp_group,
        size=module.tp_size,
        sp=module.sequence_parallel,
        fuse_wgrad=module.fuse_wgrad_accumulation,
        first_microbatch=bool(is_first_microbatch),
        delayed=module.delayed if module.delay_wgrad_compute else None,
        module=module,
        fp8=None,
    )


def _check_dtypes(module: TransformerEngineBaseModule, dtype: torch.dtype) -> None:
    if torch.is_autocast_enabled("cuda") or module.activation_dtype == dtype:
        return
    for name, parameter in module.named_parameters():
        if parameter.dtype != dtype:
            raise TypeError(
                "Data types for parameters must match when outside of autocasted region. Found "
                f"input dtype: {dtype} and {name!r} dtype: {parameter.dtype}"
            )
    module.fast_setattr("activation_dtype", dtype)


def options_fp8(
    opts: SimpleNamespace, state: LayerState, first: bool | None, inp: torch.Tensor, weight: Weight
) -> SimpleNamespace:
    """What the functions in FP8 need to know besides (``linear_fp8``)."""
    enabled = torch.is_grad_enabled()
    opts.fp8, opts.first, opts.keeps = state, first, enabled
    opts.gathers = opts.mode == "column" and opts.sp
    opts.keeps_input = enabled and weight.requires_grad
    opts.weight_columns = weight_usage(enabled and inp.requires_grad)
    opts.original, opts.dtype = None, inp.dtype
    if getattr(opts.module, "save_original_input", False) and opts.keeps_input:
        if state.recipe.delayed():  # (linear.py:422 @v2.20.2)
            raise ValueError("DelayedScaling recipe is not supported with save_original_input")
        opts.original = True
    opts.first_module = first_module() if enabled else False
    return opts


def forward_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, opts: SimpleNamespace
) -> torch.Tensor:
    """The output rows for input rows ``x`` (un-gathered), communication included."""
    get_workspace(x)
    total = x
    if opts.mode == "column" and opts.sp:
        total, _ = gather_along_first_dim(x, opts.group)
    out = rows_times(total, weight, bias)
    del total
    if opts.mode == "row" and opts.size > 1:
        communicate = reduce_scatter_along_first_dim if opts.sp else allreduce
        out, _ = communicate(out, opts.group)
    return out


def finish_backward(
    grad: torch.Tensor,
    x: torch.Tensor | None,
    weight: Weight,
    opts: SimpleNamespace,
    needs: tuple[bool, ...],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(dx rows, dweight, dbias) for output gradient ``grad``; ``needs`` is (dx, dweight, dbias)."""
    column_sp = opts.mode == "column" and opts.sp
    grad = gather_grad(grad, opts.mode == "row" and opts.sp, opts.group)
    main_grad = weight.main_grad if opts.fuse_wgrad and needs[1] else None
    total, arriving = x, None
    if x is not None and column_sp and needs[1]:
        total, arriving = gather_along_first_dim(x, opts.group, async_op=True)
    dx = product = leaving = None
    if needs[0]:
        # the un-scattered product stays until the end, as in TE (linear.py:735 @v2.9)
        product = dx = rows_back(grad, weight)
        if opts.mode == "column" and opts.size > 1:
            communicate = reduce_scatter_along_first_dim if opts.sp else allreduce
            dx, leaving = communicate(product, opts.group, async_op=True)
    dweight = dbias = None
    if arriving is not None:
        arriving.wait()
    if needs[2]:
        dbias = grad.new_empty(grad.shape[1]) if grad.is_meta else grad.sum(0)  # by the product
    if needs[1]:
        (dweight,) = now_or_later(
            [weight], opts, lambda: [weight_product(weight, total, grad, opts, main_grad)]
        )
    if leaving is not None:
        leaving.wait()
    return dx, dweight, dbias


def add_linear_parameters(
    module: TransformerEngineBaseModule,
    bias: bool,
    init: Init | None,
    dtype: torch.dtype | None,
    device: Device,
    suffix: str = "",
) -> None:
    """``weight`` and ``bias`` of this rank's shard, with Megatron's attributes.

    Both names end with ``suffix``; ``init`` None is TE's own, a normal of deviation 0.023.
    """
    init = init or (lambda w: torch.nn.init.normal_(w, mean=0.0, std=0.023))
    column = module.parallel_mode == "column"
    shape = (module.out_features, module.in_features)
    weight = module.add_parameter(f"weight{suffix}", shape, dtype, device, init)
    set_tp_attributes(weight, True, 1 if module.parallel_mode == "row" else 0)
    if module.delay_wgrad_compute:  # DDP's hook then waits for backward_dw, as in TE
        weight.skip_backward_post_hook = True
    if not bias:
        setattr(module, f"bias{suffix}", torch.empty(0, dtype=weight.dtype, device=device))
        return
    param = module.add_parameter(f"bias{suffix}", shape[:1], dtype, device, torch.nn.init.zeros_)
    if column:
        set_tp_attributes(param, True, 0)
    elif module.parallel_mode == "row":
        param.sequence_parallel = module.sequence_parallel


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        weight: Weight,
        inp: torch.Tensor,
        bias: torch.Tensor | None,
        opts: SimpleNamespace,
    ) -> torch.Tensor:
        x = inp.contiguous().view(-1, inp.shape[-1])
        x, cast = cast_if_needed(x, opts.dtype), cast_if_needed(weight, opts.dtype)
        out = forward_product(x, cast, bias, opts)
        ctx.save_for_backward(x if weight.requires_grad else None, cast, weight, bias)
        ctx.opts, ctx.shape = opts, inp.shape
        # saved tensors lose the attributes of the parameter (main_grad)
        opts.weight = weight
        return out.view(-1, *inp.shape[1:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: AutogradContext, grad: torch.Tensor) -> Grads:
        x, _, _, _ = ctx.saved_tensors
        needs = (ctx.needs_input_grad[1], ctx.needs_input_grad[0], ctx.needs_input_grad[2])
        dx, dweight, dbias = finish_backward(grad, x, ctx.opts.weight, ctx.opts, needs)
        return dweight, None if dx is None else dx.view(ctx.shape), dbias, None


class Linear(TransformerEngineBaseModule):
    """pytorch/module/linear.py:1001 @v2.9."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Group = None,
        tp_size: int = 1,
        get_rng_state_tracker: Trackers | None = None,
        init_method: Init | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: object = None,
        device: Device = "cuda",
        rng_tracker_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        name: str | None = None,
        **rest: object,
    ) -> None:
        super().__init__()
        check_no_userbuffers(rest)
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
        self.name, self.save_original_input = name, save_original_input
        self.get_rng_state_tracker, self.rng_tracker_name = get_rng_state_tracker, rng_tracker_name
        add_linear_parameters(self, bias, init_method, params_dtype, device)
        self.reset_parameters(defer_init=device == "meta")
        # a bias added before the sum over ranks would be added once per rank
        self.late_bias = self.apply_bias and parallel_mode == "row" and self.tp_size > 1

    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None, **rest: object
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        """The output, with the bias beside it if ``return_bias``."""
        state, run = begin(self), _Linear.apply
        opts = options(self, is_first_microbatch, inp)
        if state is not None:
            opts = options_fp8(opts, state, is_first_microbatch, inp, self.weight)
            run = LinearFP8.apply
        opts.dtype = (
            torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else (inp.dtype)
        )
        bias = cast_if_needed(self.bias, opts.dtype) if self.use_bias else None
        inner = bias if self.apply_bias and not self.late_bias else None
        out = run(self.weight, inp, inner, opts)
        if self.late_bias:
            out = out + bias
        return (out, bias) if self.return_bias else out


class _LayerNormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        inp: torch.Tensor,
        gamma: torch.Tensor,
        beta: torch.Tensor | None,
        weight: Weight,
        bias: torch.Tensor | None,
        opts: SimpleNamespace,
    ) -> torch.Tensor:
        x = inp.contiguous().view(-1, inp.shape[-1])
        normed, mean, rstd = norm_forward(x, gamma, beta, opts.norm)
        out = forward_product(normed, weight, bias, opts)
        ctx.save_for_backward(x, weight, weight, bias, gamma, normed, mean, rstd)
        ctx.opts, ctx.shape = opts, inp.shape
        opts.weight = weight
        return out.view(-1, *inp.shape[1:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: AutogradContext, grad: torch.Tensor) -> Grads:
        x, _, _, _, gamma, normed, mean, rstd = ctx.saved_tensors
        wants = ctx.needs_input_grad
        needs = (any(wants[:3]), wants[3], wants[4])
        dnormed, dweight, dbias = finish_backward(grad, normed, ctx.opts.weight, ctx.opts, needs)
        if needs[1] and ctx.opts.delayed is None:
            clear(normed)  # (layernorm_linear.py:911 @v2.9)
        dx = dgamma = dbeta = None
        if dnormed is not None:
            dx, dgamma, dbeta = norm_backward(dnormed, x, gamma, (mean, rstd), ctx.opts.norm)
            dx = dx.view(ctx.shape)
        return dx, dgamma, dbeta, dweight, dbias, None


class LayerNormLinear(TransformerEngineBaseModule):
    """pytorch/module/layernorm_linear.py:1056 @v2.9."""

    layer_norm_weight: Weight
    layer_norm_bias: Weight | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Group = None,
        tp_size: int = 1,
        get_rng_state_tracker: Trackers | None = None,
        init_method: Init | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: object = None,
        zero_centered_gamma: bool = False,
        device: Device = "cuda",
        delay_wgrad_compute: bool = False,
        name: str | None = None,
        **rest: object,
    ) -> None:
        super().__init__()
        check_no_userbuffers(rest)
        if return_layernorm_output or return_layernorm_output_gathered:
            refuse("LayerNormLinear that also returns the norm's output")
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
        self.name = name
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.normalization = normalization
        self.norm = Norm(normalization, eps, zero_centered_gamma)
        self.return_layernorm_output = False
        self.get_rng_state_tracker = get_rng_state_tracker
        gamma = torch.nn.init.zeros_ if zero_centered_gamma else torch.nn.init.ones_
        self.add_parameter("layer_norm_weight", (in_features,), params_dtype, device, gamma)
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel
        if normalization == "RMSNorm":
            self.layer_norm_bias = None
        else:
            beta = self.add_parameter(
                "layer_norm_bias", (in_features,), params_dtype, device, torch.nn.init.zeros_
            )
            beta.sequence_parallel = self.sequence_parallel
        add_linear_parameters(self, bias, init_method, params_dtype, device)
        self.reset_parameters(defer_init=device == "meta")

    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None, **rest: object
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        """The output, with the bias beside it if ``return_bias``."""
        state, run = begin(self), _LayerNormLinear.apply
        opts = options(self, is_first_microbatch, inp)
        if state is not None:
            opts = options_fp8(opts, state, is_first_microbatch, inp, self.weight)
            # by columns wherever gradients are on (layernorm_linear.py:346 @v2.20.2)
            opts.weight_columns = opts.keeps
            run = LayerNormLinearFP8.apply
        opts.norm = self.norm
        bias = self.bias if self.use_bias else None
        out = run(
            inp,
            self.layer_norm_weight,
            self.layer_norm_bias,
            self.weight,
            bias if self.apply_bias else None,
            opts,
        )
        return (out, bias) if self.return_bias else out


# -- one product per local expert ------------------------------------------------------------------


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
