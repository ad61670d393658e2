"""Linear and LayerNormLinear with their tensor- and sequence-parallel communication.

Saved: the un-gathered input, weight twice and bias (pytorch/module/linear.py:421-429 @v2.9).
Column-parallel under sequence parallelism gathers the input in forward and again in backward
(linear.py:178, 644); the gathered copy is dropped after each product (linear.py:334, 866).
"""

from __future__ import annotations

import types
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from megatron_prism.runtime.te.base import (
    TransformerEngineBaseModule,
    begin,
    cast_if_needed,
    check_no_userbuffers,
    clear,
    first_module,
    gather_grad,
    get_workspace,
    now_or_later,
    rows_back,
    rows_times,
    set_tp_attributes,
    weight_product,
    weight_usage,
)
from megatron_prism.runtime.te.common import (
    allreduce,
    gather_along_first_dim,
    reduce_scatter_along_first_dim,
    refuse,
)
from megatron_prism.runtime.te.linear_fp8 import LayerNormLinearFP8, LinearFP8
from megatron_prism.runtime.te.norm import Norm, norm_backward, norm_forward

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

__all__ = ["LayerNormLinear", "Linear", "add_linear_parameters", "options", "options_fp8"]


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
