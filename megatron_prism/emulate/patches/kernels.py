"""What becomes, without a CUDA device, of what only such a device can run, and why.

Same form as ``seams``: a stand-in where there is one, else a refusal that names it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.emulate.patch import Context, Patch, refused
from megatron_prism.runtime.devices import hadamard, mla_rope

__all__ = ["PATCHES", "PATCHES_META"]


def _mla_rope(module: ModuleType, context: Context) -> None:
    """The rotary embedding of multi-latent attention is four triton kernels by default."""
    for name, kernel in mla_rope.KERNELS.items():
        if hasattr(module, name):
            context.set(module, name, kernel)


def _no_triton(module: ModuleType, context: Context) -> None:
    """A triton kernel without a stand-in: triton's own words are that libcuda.so is missing."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            name = getattr(self, "__name__", None) or getattr(self.base_fn, "__name__", "?")
            raise UnsupportedError(
                f"the triton kernel {name} needs a GPU, and has no stand-in here",
                fix="leave out the flag that asks for this fusion, or --prism-tier cuda",
            )

        return call

    owner = module.Autotuner if hasattr(module, "Autotuner") else module.JITFunction
    context.replace(owner, "run", make)


def _no_graphs(module: ModuleType, context: Context) -> None:
    """They are captured after some iterations of warm-up: this comes before it."""
    fix = "leave --enable-cuda-graph or --cuda-graph-impl out, or --prism-tier cuda"
    for owner in ("FullCudaGraphWrapper", "CudaGraphManager", "TECudaGraphHelper"):
        if hasattr(module, owner):
            make = refused("CUDA graphs need a CUDA device", fix)
            context.replace(getattr(module, owner), "__init__", make)


def _plain_memory(module: ModuleType, context: Context) -> None:
    """Buffers that NCCL uses directly are as large as others; nvcc would build their pool."""
    context.set(module, "init", lambda: None)
    context.set(module, "create_nccl_mem_pool", lambda symmetric=None: None)
    context.set(module, "nccl_mem", lambda pool, **kwargs: contextlib.nullcontext())


def _hadamard(module: ModuleType, context: Context) -> None:
    """Sparse attention's indexer turns its queries and keys with a CUDA package's kernel."""
    if module.hadamard_transform is None:
        context.set(module, "hadamard_transform", hadamard.transform)


def _no_fsdp2(module: ModuleType, context: Context) -> None:
    """torch shards what it has moved to the CUDA device itself."""
    what = "--use-torch-fsdp2 shards parameters on a CUDA device"
    make = refused(what, "leave it out, or --prism-tier cuda")
    context.replace(module.TorchFullyShardedDataParallel, "__init__", make)


def _no_offloaded_optimizer(module: ModuleType, context: Context) -> None:
    """It sorts parameters by the device they are on, and here that is one for all."""
    what = "--optimizer-cpu-offload moves states between a CUDA device and its host"
    make = refused(what, "leave it out, or --prism-tier cuda")
    context.replace(module.HybridDeviceOptimizer, "__init__", make)


def _no_low_precision(module: ModuleType, context: Context) -> None:
    """Said when the model's configuration is made, and not by its first forward pass."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any) -> None:
            original(self)
            for (what, fix), found in _low_precision(self, context.meta).items():
                if found:
                    raise UnsupportedError(what, fix=fix)

        return call

    context.replace(module.TransformerConfig, "__post_init__", make)


def _low_precision(config: Any, meta: bool) -> dict[tuple[str, str], Any]:
    """(what, what to do) -> whether the model asks for it."""
    fp8 = getattr(config, "fp8", None)

    def asked(name: str) -> Any:
        return fp8 and getattr(config, name, False)

    recipe = getattr(config, "fp8_recipe", None)
    other = getattr(recipe, "value", recipe) not in (None, *_RECIPES)
    cuda = "or --prism-tier cuda"
    return {
        ("FP4 is Transformer Engine's on a GPU; the virtual one has none",
         f"leave out --fp4-format, {cuda}"): getattr(config, "fp4", None),
        ("FP8 without a GPU is shapes and bytes, not values",
         "use --prism-tier meta; or leave out --fp8-format (a recipe's train.fp8), and what is "
         f"reported is bf16's; {cuda}"): fp8 and not meta,
        (f"FP8 recipe {getattr(recipe, 'value', recipe)} has no stand-in without a GPU",
         f"one of {', '.join(_RECIPES)}, {cuda}"): fp8 and other,
        ("attention in FP8 (fp8_dot_product_attention or fp8_multi_head_attention of the model's "
         "configuration) has no stand-in without a GPU", f"leave them out, {cuda}"):
        asked("fp8_dot_product_attention") or asked("fp8_multi_head_attention"),
    }  # fmt: skip


_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")


def _no_affinity(module: ModuleType, context: Context) -> None:
    """There is no GPU whose NUMA node this process could move to."""
    context.replace(module, "set_ideal_affinity_for_current_gpu", lambda _: lambda: None)


def _refuse_allgather(module: ModuleType, context: Context) -> None:
    """This dispatcher sizes its tensors by the routing itself, which shapes do not have."""
    make = refused(
        "--moe-token-dispatcher-type allgather sizes its tensors by the router's choices, "
        "and tier meta has none",
        "use --moe-token-dispatcher-type alltoall, or --prism-tier cpu",
    )
    context.replace(module.MoEAllGatherTokenDispatcher, "__init__", make)


def _refuse_offloading(module: ModuleType, context: Context) -> None:
    """Nothing would leave the counted bytes: tensors of one device are not moved."""
    make = refused(
        "--fine-grained-activation-offloading moves activations to the host, "
        "and tier meta cannot tell host from device",
        "leave it out (memory is then an upper bound), or --prism-tier cuda",
    )
    context.replace(module.ChunkOffloadHandler, "__init__", make)


def _no_mixers(module: ModuleType, context: Context) -> None:
    """Their packages are CUDA kernels, and do not even install on a host without nvcc."""
    for owner, what, fix in _MIXERS:
        if hasattr(module, owner):
            make = refused(what, f"{fix}, or --prism-tier cuda")
            context.replace(getattr(module, owner), "__init__", make)


_MIXERS = (
    ("MambaMixer", "Mamba layers are CUDA kernels of mamba-ssm, and have no stand-in here",
     "leave M out of --hybrid-layer-pattern"),
    ("GatedDeltaNet", "GatedDeltaNet is CUDA kernels of flash-linear-attention, and has no "
     "stand-in here", "leave --experimental-attention-variant out"),
)  # fmt: skip

PATCHES: tuple[Patch, ...] = (
    Patch(
        "no-low-precision",
        "megatron.core.transformer.transformer_config",
        "Megatron prints a traceback of the whole model in front of what is wrong",
        "core/transformer/transformer_config.py:909 @0.16.1; :1294 @0.19.0",
        _no_low_precision,
        targets=("TransformerConfig.__post_init__",),
    ),
    Patch(
        "no-mamba",
        "megatron.core.ssm.mamba_mixer",
        "Megatron asks for a package that needs a GPU",
        "core/ssm/mamba_mixer.py:203 @0.19.0",
        _no_mixers,
        targets=("MambaMixer.__init__",),
    ),
    Patch(
        "no-gated-delta-net",
        "megatron.core.ssm.gated_delta_net",
        "the same",
        "core/ssm/gated_delta_net/common.py:142 @0.19.0",
        _no_mixers,
        targets=("GatedDeltaNet.__init__",),
    ),
    Patch(
        "no-offloaded-optimizer",
        "megatron.core.optimizer.cpu_offloading.hybrid_optimizer",
        "host and device are one here",
        "core/optimizer/cpu_offloading/hybrid_optimizer.py:256 @0.19.0",
        _no_offloaded_optimizer,
        targets=("HybridDeviceOptimizer.__init__",),
    ),
    Patch(
        "no-affinity",
        "megatron.core.pipeline_parallel.utils",
        "offloading asks for the host cores beside the GPU",
        "core/pipeline_parallel/utils.py:131 @0.19.0",
        _no_affinity,
        targets=("set_ideal_affinity_for_current_gpu",),
    ),
    Patch(
        "no-full-graph",
        "megatron.core.full_cuda_graph",
        "a traceback from within torch after the warm-up",
        "core/full_cuda_graph.py:167 @0.16.1",
        _no_graphs,
        targets=("FullCudaGraphWrapper.__init__",),
    ),
    Patch(
        "no-graphs",
        "megatron.core.transformer.cuda_graphs",
        "graphs of layers: a traceback, or a refusal after the warm-up",
        "core/transformer/cuda_graphs.py:1374, :1677 @0.16.1; :1769 @0.19.0",
        _no_graphs,
        targets=(
            "CudaGraphManager.__init__",
            "TECudaGraphHelper.__init__",
        ),
    ),
    Patch(
        "plain-memory",
        "megatron.core.nccl_allocator",
        "--use-nccl-ub compiles an allocator against CUDA and NCCL",
        "core/nccl_allocator.py:32 @0.16.1; :86 @0.19.0",
        _plain_memory,
        targets=(
            "init",
            "create_nccl_mem_pool",
            "nccl_mem",
        ),
    ),
    Patch(
        "hadamard",
        "megatron.core.transformer.experimental_attention_variant.dsa",
        "fast_hadamard_transform does not install without nvcc",
        "core/transformer/experimental_attention_variant/dsa.py:267 @0.19.0",
        _hadamard,
        targets=("hadamard_transform",),
    ),
    Patch(
        "no-fsdp2",
        "megatron.core.distributed.torch_fully_sharded_data_parallel",
        "torch's FSDP2 wants its parameters on a CUDA device",
        "core/distributed/torch_fully_sharded_data_parallel.py:45 @0.19.0",
        _no_fsdp2,
        targets=("TorchFullyShardedDataParallel.__init__",),
    ),
    Patch(
        "mla-rope",
        "megatron.core.fusions.fused_mla_yarn_rope_apply",
        "multi-latent attention launches triton kernels unless --no-rope-fusion",
        "core/fusions/fused_mla_yarn_rope_apply.py:258 @0.19.0",
        _mla_rope,
        targets=tuple(mla_rope.KERNELS),
        releases="<0.20",  # the kernels of 0.20 have no stand-in: no-triton refuses them by name
    ),
    Patch(
        "no-triton",
        "triton.runtime.jit",
        "a kernel without a stand-in is named",
        "triton/runtime/jit.py (JITFunction.run) @3.6",
        _no_triton,
        targets=("JITFunction.run",),
    ),
    Patch(
        "no-autotuning",
        "triton.runtime.autotuner",
        "the same where triton would time a kernel first",
        "triton/runtime/autotuner.py (Autotuner.run) @3.6",
        _no_triton,
        targets=("Autotuner.run",),
    ),
)

PATCHES_META: tuple[Patch, ...] = (
    Patch(
        "refuse-offloading",
        "megatron.core.pipeline_parallel.fine_grained_activation_offload",
        "peaks came out as if nothing were offloaded",
        "core/pipeline_parallel/fine_grained_activation_offload.py:765 @0.16.1; :872 @0.19.0",
        _refuse_offloading,
        targets=("ChunkOffloadHandler.__init__",),
    ),
    Patch(
        "refuse-allgather",
        "megatron.core.transformer.moe.token_dispatcher",
        "its tensors are sized by values",
        "core/transformer/moe/token_dispatcher.py (MoEAllGatherTokenDispatcher)",
        _refuse_allgather,
        targets=("MoEAllGatherTokenDispatcher.__init__",),
    ),
)
