"""LayerNormLinear: a norm and a column-parallel product.

Saved: input, weight twice, bias, gamma, un-gathered norm output, mean (LayerNorm), reciprocal
deviation (pytorch/module/layernorm_linear.py:448-458 @v2.9).  Under sequence parallelism the norm
output is gathered in forward, dropped (layernorm_linear.py:366) and gathered again in backward
(layernorm_linear.py:669).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from megatron_prism.runtime.te.base import TransformerEngineBaseModule, check_no_userbuffers, clear
from megatron_prism.runtime.te.layer_fp8 import begin
from megatron_prism.runtime.te.layernorm_linear_fp8 import LayerNormLinearFP8
from megatron_prism.runtime.te.linear import (
    add_linear_parameters,
    finish_backward,
    forward_product,
    options,
    options_fp8,
)
from megatron_prism.runtime.te.norm import Norm, norm_backward, norm_forward
from megatron_prism.runtime.te.unsupported import refuse

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import (
        Context,
        Device,
        Grads,
        Group,
        Init,
        Trackers,
        Weight,
    )

__all__ = ["LayerNormLinear"]


class _LayerNormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        inp: torch.Tensor,
        gamma: torch.Tensor,
        beta: torch.Tensor | None,
        weight: Weight,
        bias: torch.Tensor | None,
        opts: SimpleNamespace,
    ) -> torch.Tensor:
        x = inp.reshape(-1, inp.shape[-1])
        normed, mean, rstd = norm_forward(x, gamma, beta, opts.norm)
        out = forward_product(normed, weight, bias, opts)
        ctx.save_for_backward(x, weight, weight, bias, gamma, normed, mean, rstd)
        ctx.opts, ctx.shape = opts, inp.shape
        opts.weight = weight
        return out.view(-1, *inp.shape[1:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> Grads:
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
