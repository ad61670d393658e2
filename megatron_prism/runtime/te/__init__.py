"""The virtual Transformer Engine: its modules as shapes and bytes, where it is not installed.

``add_modules(changes)`` puts modules named ``transformer_engine…`` into ``sys.modules``; Megatron's
own core/extensions/transformer_engine.py then runs unmodified, with real values on the CPU and with
shapes on ``meta``.  Each layer saves for backward what TE's layer saves and takes no memory that
TE's kernels do not take.

What follows which source, below transformer_engine/pytorch (``dpa``: attention/
dot_product_attention).  Values and memory in high precision follow v2.9, FP8 follows v2.20.2 and
is shapes alone; a place that differs says so where it is.

    class or function             here                 source @v2.9
    TransformerEngineBaseModule   base                 module/base.py:638
    Linear                        linear               module/linear.py:1009
    LayerNormLinear               linear               module/layernorm_linear.py:1056
    GroupedLinear                 linear               module/grouped_linear.py:510
    LayerNorm, RMSNorm            row_kernels            ops/basic/layer_norm.py:30, rmsnorm.py:30
    DotProductAttention           attention            dpa/dot_product_attention.py:154
    unfused_attention             attention            dpa/backends.py:193, softmax.py:144
    apply_rotary_pos_emb          row_kernels          attention/rope.py:372
    context_attention             context_parallel     dpa/context_parallel.py:3670
    moe_permute, moe_unpermute    moe                  permutation.py:503, 578
    fused_topk_with_score_…       moe                  router.py:81
    parallel_cross_entropy        row_kernels          cross_entropy.py:16
    CudaRNGStatesTracker          distributed          distributed.py:775
    checkpoint                    distributed          distributed.py:622
    FusedAdam, FusedSGD           optimizers           optimizers/fused_adam.py:33, fused_sgd.py:18

    FP8                           here                 source @v2.20.2
    autocast                      fp8                  quantization.py:730
    FP8GlobalStateManager         fp8                  quantization.py:656
    Quantizer, and its kinds      fp8                  tensor/float8_tensor.py:190, and beside it
    LayerState                    base                 module/base.py:1354
    LinearFP8                     linear_fp8           module/linear.py:470
    LayerNormLinearFP8            linear_fp8           module/layernorm_linear.py:250
    GroupedLinearFP8              linear               module/grouped_linear.py:155
    Fp8Padding, Fp8Unpadding      moe                  module/fp8_padding.py:74, fp8_unpadding.py:72
    QuantizedTensor               parameters_fp8       tensor/utils.py

Refused with UnsupportedError: FP8 with values, attention in FP8, FP4, userbuffers, activation
offloading, CUDA graphs, LayerNormMLP, TransformerLayer, the fused operations (te.pytorch.ops),
attention biases, sliding windows and softmax offsets under context parallelism.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from megatron_prism.core.megatron_source import engine_release
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime.te import (
    attention,
    base,
    distributed,
    fp8,
    moe,
    optimizers,
    parameters_fp8,
    row_kernels,
    unsupported,
)
from megatron_prism.runtime.te.base import general_gemm
from megatron_prism.runtime.te.linear import GroupedLinear, LayerNormLinear, Linear
from megatron_prism.runtime.te.row_kernels import LayerNorm, RMSNorm
from megatron_prism.runtime.te.unsupported import Lazy, absent_class, absent_function, refuse

if TYPE_CHECKING:
    import torch

__all__ = ["VERSION", "add_modules", "deciding_release", "set_release"]

# of the sources that the modules follow, but for FP8: 2.20.2's.  Both tested Megatrons accept it
VERSION = "2.9.0"

_PADDING = {"Fp8Padding": moe.Fp8Padding, "Fp8Unpadding": moe.Fp8Unpadding}
_LAYERS = {
    "Linear": Linear,
    "LayerNormLinear": LayerNormLinear,
    "LayerNorm": LayerNorm,
    "RMSNorm": RMSNorm,
    "GroupedLinear": GroupedLinear,
}
_CLASSES = (
    "LayerNormMLP",
    "TransformerLayer",
    "MultiheadAttention",
    "InferenceParams",
    "RotaryPositionEmbedding",
)
_QUANTIZERS = (
    "Quantizer",
    "Float8Quantizer",
    "Float8CurrentScalingQuantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "Float8BlockQuantizer",
    "QuantizedTensorStorage",
    "Float8TensorStorage",
    "MXFP8TensorStorage",
    "NVFP4TensorStorage",
)


def _get_cpu_offload_context(
    enabled: bool = False, *args: object, **kwargs: object
) -> tuple[AbstractContextManager[None], Callable[[torch.Tensor], torch.Tensor]]:
    """(context, function for each output) that do nothing (pytorch/cpu_offload.py @v2.9)."""
    if enabled:
        refuse("activation offloading", fix="leave --cpu-offloading-num-layers out")
    return contextlib.nullcontext(), lambda output: output


def _public(module: types.ModuleType) -> dict[str, object]:
    return {
        k: v
        for k, v in vars(module).items()
        if not k.startswith("_")
        and getattr(v, "__module__", module.__name__) == module.__name__
        and not isinstance(v, types.ModuleType)
    }


def _refusing(*names: str) -> dict[str, object]:
    return {n: absent_function(f"transformer_engine.pytorch.{n}") for n in names}


_ABSENT = {n: absent_class(f"transformer_engine.pytorch.{n}") for n in _CLASSES}
_USERBUFFERS = {
    **{
        name: absent_function(f"userbuffers ({name})", fix="leave --tp-comm-overlap out")
        for name in ("initialize_ub", "destroy_ub")
    },
    "UserBufferQuantizationMode": types.SimpleNamespace(NONE="none", FP8="fp8"),
}
_MOE = {
    **_public(moe),
    "moe_permute_and_pad_with_probs": moe.moe_permute_and_pad_with_probs,
}
_OFFLOAD = {"get_cpu_offload_context": _get_cpu_offload_context, "CPUOffloadEnabled": False}
_LOSS: dict[str, object] = {"parallel_cross_entropy": row_kernels.parallel_cross_entropy}
_QUANTIZED = {
    **{n: v for n, v in _public(parameters_fp8).items() if isinstance(v, type)},
    **{n: absent_class(f"transformer_engine.pytorch.tensor.{n}") for n in _QUANTIZERS},
}
_CASTS = {
    **dict.fromkeys(("fp8_autocast", "autocast"), fp8.autocast),
    **dict.fromkeys(("fp8_model_init", "quantized_model_init"), fp8.fp8_model_init),
    **{
        f"is_{kind}_available": getattr(fp8.FP8GlobalStateManager, f"is_{kind}_available")
        for kind in ("fp8", "mxfp8", "nvfp4", "fp8_block_scaling")
    },
    "FP8GlobalStateManager": fp8.FP8GlobalStateManager,
    "get_default_recipe": fp8.DelayedScaling,
}


def _top() -> dict[str, dict[str, object]]:
    """``transformer_engine`` down to what ``transformer_engine.pytorch`` offers itself."""
    return {
        "": {"__version__": VERSION, "__prism_stand_in__": True},
        ".common": {},
        ".common.recipe": _public(fp8),
        ".pytorch": {
            **_LAYERS, **_PADDING, **_ABSENT, **_USERBUFFERS, **_CASTS, **_LOSS, **_MOE, **_OFFLOAD,
            **_QUANTIZED,
            "DotProductAttention": attention.DotProductAttention,
            "checkpoint": distributed.checkpoint,
            "CudaRNGStatesTracker": distributed.CudaRNGStatesTracker,
            **_refusing("make_graphed_callables", "onnx_export"),
        },
    }  # fmt: skip


def _layer_modules() -> dict[str, dict[str, object]]:
    """``transformer_engine.pytorch.module`` and the operators beside it."""
    rotary: dict[str, object] = {
        "apply_rotary_pos_emb": row_kernels.apply_rotary_pos_emb,
        "apply_fused_qkv_rotary_pos_emb": row_kernels.apply_fused_qkv_rotary_pos_emb,
    }
    files = {
        "linear": "Linear", "layernorm_linear": "LayerNormLinear", "layernorm": "LayerNorm",
        "rmsnorm": "RMSNorm", "grouped_linear": "GroupedLinear",
    }  # fmt: skip
    return {
        ".module": {**_LAYERS, **_PADDING, **_ABSENT, **_USERBUFFERS},
        ".module.base": {
            "TransformerEngineBaseModule": base.TransformerEngineBaseModule,
            "get_dummy_wgrad": base.get_dummy_wgrad,
            "get_workspace": base.get_workspace,
            **_USERBUFFERS,
        },
        **{f".module.{file}": {name: _LAYERS[name]} for file, name in files.items()},
        ".attention": {
            **_ABSENT,
            "DotProductAttention": attention.DotProductAttention,
            "_SplitAlongDim": attention.SplitAlongDim,
            **rotary,
        },
        ".attention.rope": rotary,
        ".permutation": _MOE,
        ".cross_entropy": _LOSS,
        ".transformer": {"TransformerLayer": _ABSENT["TransformerLayer"]},
        ".ops": {},
    }


def _other_modules() -> dict[str, dict[str, object]]:
    """The rest of ``transformer_engine.pytorch``."""
    tensors = ("", ".float8_tensor", ".mxfp8_tensor", ".nvfp4_tensor", ".float8_blockwise_tensor")
    return {
        ".fp8": _CASTS,
        ".quantization": _CASTS,
        ".distributed": _public(distributed),
        ".optimizers": {
            **_public(optimizers), "multi_tensor_applier": optimizers.multi_tensor_applier
        },
        ".cpp_extensions": {
            "general_gemm": general_gemm,
            **_refusing("general_grouped_gemm", "cast_to_fp8"),
        },
        ".cpu_offload": _OFFLOAD,
        **{f".tensor{name}": _QUANTIZED for name in tensors},
        ".float8_tensor": _QUANTIZED,
        ".tensor.utils": {
            **{n: v for n, v in _public(parameters_fp8).items() if not isinstance(v, type)},
            "quantize_master_weights": parameters_fp8.cast_master_weights_to_fp8,
        },
        ".graph": {
            n: absent_function(f"CUDA graphs ({n})")
            for n in ("make_graphed_callables", "save_fp8_tensors", "restore_fp8_tensors",
                      "set_capture_start", "set_capture_end")
        },
        ".utils": {
            "cast_if_needed": base.cast_if_needed,
            **_refusing("make_weak_ref", "get_cudnn_version"),
        },
        ".router": _public(moe),
    }  # fmt: skip


def _contents() -> dict[str, dict[str, object]]:
    """What each module below ``transformer_engine`` holds, parents first."""
    below = {**_layer_modules(), **_other_modules()}
    return {**_top(), **{f".pytorch{name}": held for name, held in below.items()}}


def add_modules(changes: ProcessChanges) -> None:
    """Put the stand-ins into ``sys.modules``; harmless a second time."""
    if getattr(sys.modules.get("transformer_engine"), "__prism_stand_in__", False):
        return
    changes.on_undo(_reset)
    for suffix, contents in _contents().items():
        name = f"transformer_engine{suffix}"
        module = (Lazy if suffix == ".pytorch.ops" else types.ModuleType)(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__dict__.update(contents)
        changes.set_item(sys.modules, name, module)
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)


def set_release(text: str, changes: ProcessChanges) -> None:
    """Have the memory of that release, ``2.17.1``, until ``changes`` are undone."""
    changes.set(unsupported, "release", engine_release(text))


def deciding_release() -> str:
    """The release that decided bytes of this job; "" if all of them have the same."""
    return ".".join(map(str, unsupported.release)) if unsupported.asked else ""


def _reset() -> None:
    """Drop what the job left in the stand-ins: they stay imported."""
    for workspaces in base.workspaces.values():
        workspaces.clear()
    base.dummies.clear()
    unsupported.asked.clear()
    distributed.set_all_rng_states({})
    fp8.FP8GlobalStateManager.reset()
