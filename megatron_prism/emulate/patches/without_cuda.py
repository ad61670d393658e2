"""What is changed in Megatron where there is no CUDA device (tiers cpu and meta), and why.

Same form as ``seams``.  Stand-ins for kernels live in ``tiers``; here they are only put in place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.emulate.patch import Context, Patch
from megatron_prism.emulate.patches import (
    embedding,
    kernels,
    labels,
    loss,
    moe,
    mtp,
    outputs,
    pipeline,
    received,
    startup,
    training,
)
from megatron_prism.runtime.devices import cuda_stubs, stand_ins
from megatron_prism.runtime.te import padding

__all__ = ["FUSED_ATTENTION", "PATCHES_META", "PATCHES_WITHOUT_CUDA", "every_patch", "patches_for"]


def _no_fused_kernels(module: ModuleType, context: Context) -> None:
    """Start-up runs ``$CUDA_HOME/bin/nvcc -V`` unconditionally at 0.16.1."""
    context.set(module, "load", lambda args: None)


def _name_without_te(module: ModuleType, context: Context) -> None:
    """0.16.1 tests a name that it only binds if Transformer Engine imports."""
    if not hasattr(module, "te_general_gemm"):
        context.set(module, "te_general_gemm", None)


def _sequence_parallel_norm(module: ModuleType, context: Context) -> None:
    """torch's norm refuses sequence parallelism; ours marks its weights as Megatron expects."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
            ours = config.sequence_parallel or config.layernorm_zero_centered_gamma
            if ours or config.persist_layer_norm:  # torch's refuses all three
                return stand_ins.SequenceParallelNorm(config, hidden_size, eps)
            return original(cls, config, hidden_size, eps, **kwargs)

        return call

    context.replace(module.WrappedTorchNorm, "__new__", make)


def _context_parallel_attention(module: ModuleType, context: Context) -> None:
    """The local attention refuses context parallelism; ours gathers keys and values over cp."""
    base = module.DotProductAttention

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            size = config.context_parallel_size
            config.context_parallel_size = 1
            try:
                original(self, config, *args, **kwargs)
            finally:
                config.context_parallel_size = size

        return call

    def forward(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            if self.config.context_parallel_size == 1:
                return original(self, query, key, value, *args, **kwargs)
            from megatron.core import parallel_state

            group = parallel_state.get_context_parallel_group()
            return stand_ins.context_parallel_attention(
                query, key, value, group, self.softmax_scale
            )

        return call

    context.replace(base, "__init__", make)
    context.replace(base, "forward", forward)


def _one_generator(module: ModuleType, context: Context) -> None:
    """Device and host share one generator here, so the tracker's check for a leak always fires."""

    def keep(record: logging.LogRecord) -> bool:
        return "CPU RNG state changed" not in record.getMessage()

    logging.getLogger(module.__name__).addFilter(keep)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, graph_safe: bool = False, **kwargs: Any) -> Any:
            if graph_safe:  # only a CUDA device has a state that a graph may capture
                fix = "leave --enable-cuda-graph or --cuda-graph-impl out, or --prism-tier cuda"
                raise UnsupportedError("CUDA graphs need a CUDA device", fix=fix)
            return original(*args, **kwargs)

        return call

    context.replace(module, "_get_cuda_rng_state", make)


def _flash_attention(module: ModuleType, context: Context) -> None:
    """Megatron's local attention holds the s x s scores; production kernels never do."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            if query.is_meta and self.config.context_parallel_size == 1:
                return stand_ins.FlashAttention.apply(query, key, value)
            return original(self, query, key, value, *args, **kwargs)

        return call

    context.replace(module.DotProductAttention, "forward", make, again=True)


def _balanced_splits(module: ModuleType, context: Context) -> None:
    """Shapes have no routing: every expert gets its even share, and the host knows it at once.

    The one point where the dispatcher needs data is its copy of the splits to the host
    (core/transformer/moe/token_dispatcher.py, _maybe_dtoh_and_synchronize).
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
            if self.drop_and_pad or point != self.cuda_dtoh_point:
                return tokens_per_expert
            if cuda_stubs.watcher is not None:  # the copy to the host that this stands in for
                cuda_stubs.watcher.host_waited("token counts")
            splits = stand_ins.balanced_splits(
                total=int(self.num_out_tokens)
                if not torch.is_tensor(self.num_out_tokens)
                else self.routing_map.shape[0] * self.config.moe_router_topk,
                num_experts=self.num_experts,
                local=self.local_expert_indices,
                ep_size=self.ep_size,
                tp_size=self.tp_size,
            )
            padding.counts["made_up"] = True
            self.num_out_tokens = splits.total
            self.input_splits = splits.sent
            self.output_splits = splits.received
            self.output_splits_tp = splits.received_tp
            self.num_global_tokens_per_local_expert = splits.table
            return splits.per_local_expert

        return call

    context.replace(module.MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", make)


def _static_permute(module: ModuleType, context: Context) -> None:
    """The unfused permutation selects by mask, which has no shape; its size is known beforehand."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(tokens: Any, routing_map: Any, *args: Any, **kwargs: Any) -> Any:
            if not tokens.is_meta:
                return original(tokens, routing_map, *args, **kwargs)
            return stand_ins.permute_shapes(original, tokens, routing_map, *args, **kwargs)

        return call

    context.replace(module, "permute", make)


def _always_finite(module: ModuleType, context: Context) -> None:
    """Shapes have no infinities: the check reads a number that is not there."""
    context.replace(
        module.MixedPrecisionOptimizer,
        "_unscale_main_grads_and_check_for_nan",
        lambda _: lambda self: False,
    )


def _believe_the_step(module: ModuleType, context: Context) -> None:
    """Whether the update was applied goes through a device tensor; on shapes the host's word
    counts.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(value: Any, *args: Any, **kwargs: Any) -> Any:
            original(value, *args, **kwargs)
            return value

        return call

    context.replace(module, "logical_and_across_model_parallel_group", make)


PATCHES_WITHOUT_CUDA: tuple[Patch, ...] = (
    Patch(
        "no-fused-kernels",
        "megatron.legacy.fused_kernels",
        "start-up runs nvcc",
        "legacy/fused_kernels/__init__.py:21 @0.16.1; gone in 0.19.0",
        _no_fused_kernels,
        targets=("load",),
        releases="<0.19",
    ),
    Patch(
        "one-generator",
        "megatron.core.tensor_parallel.random",
        "the device's random state is the host's",
        "core/tensor_parallel/random.py:235 @0.16.1",
        _one_generator,
        targets=("_get_cuda_rng_state",),
    ),
    Patch(
        "name-without-te",
        "megatron.core.transformer.moe.moe_utils",
        "without Transformer Engine the router raises NameError",
        "core/transformer/moe/moe_utils.py (te_general_gemm) @0.16.1",
        _name_without_te,
        targets=("te_general_gemm",),
    ),
    Patch(
        "sequence-parallel-norm",
        "megatron.core.transformer.torch_norm",
        "without apex or Transformer Engine there is no norm for sequence parallelism",
        "core/transformer/torch_norm.py:32 @0.16.1",
        _sequence_parallel_norm,
        targets=("WrappedTorchNorm.__new__",),
    ),
    Patch(
        "context-parallel-attention",
        "megatron.core.transformer.dot_product_attention",
        "without Transformer Engine there is no attention for context parallelism",
        "core/transformer/dot_product_attention.py:58 @0.16.1",
        _context_parallel_attention,
        targets=(
            "DotProductAttention.__init__",
            "DotProductAttention.forward",
        ),
    ),
)

FUSED_ATTENTION = Patch(
    "flash-attention",
    "megatron.core.transformer.dot_product_attention",
    "without a GPU there is no fused attention to run, and its memory is another class",
    "core/transformer/dot_product_attention.py:100 @0.16.1",
    _flash_attention,
    targets=("DotProductAttention.forward",),
)

PATCHES_META: tuple[Patch, ...] = (
    Patch(
        "balanced-splits",
        "megatron.core.transformer.moe.token_dispatcher",
        "token counts steer shapes, and shapes have no data",
        "core/transformer/moe/token_dispatcher.py:871 @0.16.1",
        _balanced_splits,
        targets=("MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize",),
    ),
    Patch(
        "always-finite",
        "megatron.core.optimizer.optimizer",
        "found_inf is a number, and shapes have none",
        "core/optimizer/optimizer.py:496 @0.16.1; :713 @0.19.0",
        _always_finite,
        targets=("MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan",),
    ),
    Patch(
        "believe-the-step",
        "megatron.training.utils",
        "update_successful is reduced as a device tensor",
        "training/utils.py:273 @0.16.1",
        _believe_the_step,
        targets=("logical_and_across_model_parallel_group",),
        releases="<0.19",
    ),
    Patch(
        "believe-the-step-0.19",
        "megatron.training.utils.common_utils",
        "the same in its new home",
        "training/utils/common_utils.py:309 @0.19.0",
        _believe_the_step,
        targets=("logical_and_across_model_parallel_group",),
        releases=">=0.19",
    ),
    Patch(
        "static-permute",
        "megatron.core.transformer.moe.moe_utils",
        "masked_select has no meta kernel",
        "core/transformer/moe/moe_utils.py",
        _static_permute,
        targets=("permute",),
    ),
)


def patches_for(tier: str) -> tuple[Patch, ...]:
    """Every seam that a run on ``tier`` needs."""
    chosen = startup.PATCHES + pipeline.PATCHES + labels.PATCHES + training.PATCHES
    chosen += outputs.PATCHES + moe.PATCHES + embedding.PATCHES + loss.PATCHES
    chosen += received.PATCHES + mtp.PATCHES
    if tier != "cuda":
        chosen += PATCHES_WITHOUT_CUDA + kernels.PATCHES
    return chosen + PATCHES_META + kernels.PATCHES_META if tier == "meta" else chosen


def every_patch() -> tuple[Patch, ...]:
    """Those of all tiers and options."""
    return (*patches_for("meta"), FUSED_ATTENTION, *moe.patches_for_recording(None))
