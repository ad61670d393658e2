"""Patches for tiers without a CUDA device (cpu and meta): kernels, graphs, offloading, formats.

Stand-ins for kernels live in ``runtime.devices``; here they are only put in place.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.emulate import job_arguments
from megatron_prism.emulate.patch import META, NO_CUDA, Original, PatchContext, Patches, refused
from megatron_prism.runtime.devices import kernels, local_layers

PATCHES = Patches()


@PATCHES.patch(
    "megatron.core.full_cuda_graph",
    "FullCudaGraphWrapper.__init__",
    reason="a traceback from within torch after the warm-up",
    source="core/full_cuda_graph.py:167 @0.16.1",
    tiers=NO_CUDA,
)
@PATCHES.patch(
    "megatron.core.transformer.cuda_graphs",
    "CudaGraphManager.__init__",
    "TECudaGraphHelper.__init__",
    reason="graphs of layers: a traceback, or a refusal after the warm-up",
    source="core/transformer/cuda_graphs.py:1374, :1677 @0.16.1; :1769 @0.19.0",
    tiers=NO_CUDA,
)
def _no_graphs(module: ModuleType, context: PatchContext) -> None:
    """They are captured after some iterations of warm-up: this comes before it."""
    fix = "leave --enable-cuda-graph or --cuda-graph-impl out, or --prism-tier cuda"
    context.replace(module, refused("CUDA graphs need a CUDA device", fix))


# options that the job does without here: how Megatron says that they are off, and what that means
_LEFT_OUT: dict[str, tuple[dict[str, object], str]] = {
    "a CUDA graph": (
        {"cuda_graph_impl": "none", "enable_cuda_graph": False, "external_cuda_graph": False},
        "kernels are launched one by one, and a graph's own pool takes no memory",
    ),
    "--tp-comm-overlap": (
        {"tp_comm_overlap": False},
        "the same collectives run one after the other, and userbuffers take no memory",
    ),
    "--use-cpu-initialization": (
        {"use_cpu_initialization": False},
        "weights are drawn where they stay, and tier cpu has the same in every layout",
    ),
}


@PATCHES.instead(
    "megatron.training.global_vars",
    "set_global_variables",
    reason="graphs and userbuffers are ways of running a job on a device",
    source="training/global_vars.py:103 @0.16.1; :133 @0.19.0",
    tiers=NO_CUDA,
)
def _leave_out(
    context: PatchContext, original: Original, args: object, *rest: object, **kwargs: object
) -> object:
    """Ways of running the same operations that need a device: the job runs without, and says so."""
    for name, (off, meaning) in _LEFT_OUT.items():
        asked = [key for key, no in off.items() if getattr(args, key, no) not in (no, None)]
        for key in asked:
            context.changes.set_item(job_arguments.left_out, key, getattr(args, key))
            setattr(args, key, off[key])
        scope = getattr(args, "inference_cuda_graph_scope", None)
        if "cuda_graph_impl" in asked and isinstance(scope, enum.Enum):
            args.inference_cuda_graph_scope = type(scope)["none"]  # type: ignore[attr-defined]
        if asked:
            context.say(f"without a GPU {name} is off: {meaning}")
    return original(args, *rest, **kwargs)


@PATCHES.patch(
    "megatron.core.nccl_allocator",
    "init",
    "create_nccl_mem_pool",
    "nccl_mem",
    reason="--use-nccl-ub compiles an allocator against CUDA and NCCL",
    source="core/nccl_allocator.py:32 @0.16.1; :86 @0.19.0",
    tiers=NO_CUDA,
)
def _plain_memory(module: ModuleType, context: PatchContext) -> None:
    """Buffers that NCCL uses directly are as large as others; nvcc would build their pool."""
    context.set(module, "init", lambda: None)
    context.set(module, "create_nccl_mem_pool", lambda symmetric=None: None)
    context.set(module, "nccl_mem", lambda pool, **kwargs: contextlib.nullcontext())


@PATCHES.patch(
    "megatron.core.transformer.experimental_attention_variant.dsa",
    "hadamard_transform",
    reason="fast_hadamard_transform does not install without nvcc",
    source="core/transformer/experimental_attention_variant/dsa.py:267 @0.19.0",
    tiers=NO_CUDA,
)
def _hadamard(module: ModuleType, context: PatchContext) -> None:
    """Sparse attention's indexer turns its queries and keys with a CUDA package's kernel."""
    if module.hadamard_transform is None:
        context.set(module, "hadamard_transform", kernels.transform)


@PATCHES.patch(
    "megatron.core.utils",
    "tex",
    reason="a kernel of Transformer Engine deals out documents over context parallelism",
    source="core/utils.py:2070 @0.16.1; :2440 @0.19.0",
    tiers=NO_CUDA,
)
def _dealt_documents(module: ModuleType, context: PatchContext) -> None:
    """Where Transformer Engine is not installed its kernel's shapes are all that there is."""

    def refuse(*args: object) -> torch.Tensor:
        what = "packed sequences with context parallelism on real values have no stand-in"
        raise UnsupportedError(what, fix="--prism-tier meta")

    if module.tex is None:
        from megatron_prism.runtime.te_kernels.table import TABLE

        deal = TABLE["thd_get_partitioned_indices"] if context.meta else refuse
        context.set(module, "tex", SimpleNamespace(thd_get_partitioned_indices=deal))


@PATCHES.patch(
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer",
    "HybridDeviceOptimizer._init_sub_optimizers",
    reason="the host has no values to step with",
    source="core/optimizer/cpu_offloading/hybrid_optimizer.py:251 @0.19.0",
    tiers=NO_CUDA,
)
def _offloaded_optimizer(module: ModuleType, context: PatchContext) -> None:
    """On tier ``meta`` the host has no values to step with; on ``cpu`` host and device are one."""
    if not context.meta:
        what = "--optimizer-cpu-offload moves states between a CUDA device and its host"
        context.replace(
            module, refused(what, "leave it out, --prism-tier meta, or --prism-tier cuda")
        )
        return

    def without_steps(original: Original, self: Any) -> None:
        original(self)
        for optimizer in self.cpu_optimizers:
            optimizer.step = lambda closure=None: None

    context.replace(module, without_steps)


@PATCHES.instead(
    "megatron.core.transformer.transformer_config",
    "TransformerConfig.__post_init__",
    reason="Megatron prints a traceback of the whole model in front of what is wrong",
    source="core/transformer/transformer_config.py:909 @0.16.1; :1294 @0.19.0",
    tiers=NO_CUDA,
)
def _no_low_precision(context: PatchContext, original: Original, self: Any) -> None:
    """Said when the model's configuration is made, and not by its first forward pass."""
    original(self)
    for (what, fix), found in _low_precision(self, context.meta).items():
        if found:
            raise UnsupportedError(what, fix=fix)


def _low_precision(config: Any, meta: bool) -> dict[tuple[str, str], Any]:
    """(what, what to do) -> whether the model asks for it."""
    fp8 = getattr(config, "fp8", None)

    def in_fp8(name: str) -> Any:
        return fp8 and getattr(config, name, False)

    recipe = getattr(config, "fp8_recipe", None)
    other = getattr(recipe, "value", recipe) not in (None, *_RECIPES)
    cuda = "or --prism-tier cuda"
    return {
        ("FP4 is Transformer Engine's on a GPU; its kernels have no rows here",
         f"leave out --fp4-format, {cuda}"): getattr(config, "fp4", None),
        ("FP8 without a GPU is shapes and bytes, not values",
         "use --prism-tier meta; or leave out --fp8-format (a recipe's fp8), and what is "
         f"reported is bf16's; {cuda}"): fp8 and not meta,
        (f"FP8 recipe {getattr(recipe, 'value', recipe)} has no stand-in without a GPU",
         f"one of {', '.join(_RECIPES)}, {cuda}"): fp8 and other,
        ("attention in FP8 (fp8_dot_product_attention or fp8_multi_head_attention of the model's "
         "configuration) has no stand-in without a GPU", f"leave them out, {cuda}"):
        in_fp8("fp8_dot_product_attention") or in_fp8("fp8_multi_head_attention"),
    }  # fmt: skip


_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")


@PATCHES.patch(
    "megatron.core.pipeline_parallel.utils",
    "set_ideal_affinity_for_current_gpu",
    reason="offloading asks for the host cores beside the GPU",
    source="core/pipeline_parallel/utils.py:131 @0.19.0",
    tiers=NO_CUDA,
)
def _no_affinity(module: ModuleType, context: PatchContext) -> None:
    """There is no GPU whose NUMA node this process could move to."""
    context.replace(module, lambda original: None)


@PATCHES.patch(
    "megatron.core.pipeline_parallel.fine_grained_activation_offload",
    "ChunkOffloadHandler.offload",
    "ChunkOffloadHandler.reload",
    "ChunkOffloadHandler._can_manage_tensor_for_offload >=0.19",
    reason="tier meta cannot tell host from device",
    source="core/pipeline_parallel/fine_grained_activation_offload.py:733 @0.16.1; :831 @0.19.0",
    tiers=META,
)
def _offloaded(module: ModuleType, context: PatchContext) -> None:
    """What is offloaded leaves the device: here its shape is kept, and a tensor made of it when it
    is wanted back.  Buffers of the host are not counted."""

    def offload(
        original: Original, self: object, tensor: torch.Tensor, *args: object, **kwargs: object
    ) -> object:
        return tensor.shape, tensor.dtype, tensor.device

    def reload(
        original: Original, self: object, state: Any, *_: object, **kwargs: object
    ) -> object:
        shape, dtype, device = state
        return torch.empty(shape, dtype=dtype, device=device)

    def manages(tensor: torch.Tensor) -> bool:
        return tensor.is_meta and not isinstance(tensor, torch.nn.Parameter)

    owner = "ChunkOffloadHandler"
    context.replace(module, offload, f"{owner}.offload")
    context.replace(module, reload, f"{owner}.reload")
    context.set(module, f"{owner}._can_manage_tensor_for_offload", staticmethod(manages))


@PATCHES.patch(
    "megatron.core.tensor_parallel.random",
    "_get_share_storage >=0.19",
    reason="recomputation without outputs compiles an extension, under a lock",
    source="core/tensor_parallel/random.py:69, :821 @0.19.0",
    tiers=META,
)
def _shared_storage(module: ModuleType, context: PatchContext) -> None:
    """A C++ extension gives one tensor's memory to another; compiled in the first backward pass, it
    takes a minute, and a run that was killed meanwhile leaves a lock on which the next one waits.
    On shapes the memory only has to be counted once, as long as one of the two is there."""

    def share(to: torch.Tensor, of: torch.Tensor) -> None:
        kept, shared = to.untyped_storage(), of.untyped_storage()
        size = shared.nbytes()
        shared.resize_(0)
        kept.resize_(size)
        weakref.finalize(shared, id, kept).atexit = False

    context.replace(module, lambda original: share)


@PATCHES.patch(
    "megatron.legacy.fused_kernels",
    "load",
    reason="start-up runs nvcc",
    source="legacy/fused_kernels/__init__.py:21 @0.16.1; gone in 0.19.0",
    releases="<0.19",
    tiers=NO_CUDA,
)
def _no_fused_kernels(module: ModuleType, context: PatchContext) -> None:
    """Start-up runs ``$CUDA_HOME/bin/nvcc -V`` unconditionally at 0.16.1."""
    context.set(module, "load", lambda args: None)


@PATCHES.instead(
    "megatron.core.transformer.torch_norm",
    "WrappedTorchNorm.__new__",
    reason="without apex or Transformer Engine there is no norm for sequence parallelism",
    source="core/transformer/torch_norm.py:32 @0.16.1",
    tiers=NO_CUDA,
)
def _sequence_parallel_norm(
    context: PatchContext,
    original: Original,
    cls: Any,
    config: Any,
    hidden_size: int,
    eps: float = 1e-5,
    **kwargs: Any,
) -> Any:
    """torch's norm refuses sequence parallelism; ours marks its weights as Megatron expects."""
    ours = config.sequence_parallel or config.layernorm_zero_centered_gamma
    if ours or config.persist_layer_norm:  # torch's refuses all three
        return local_layers.SequenceParallelNorm(config, hidden_size, eps)
    return original(cls, config, hidden_size, eps, **kwargs)


@PATCHES.patch(
    "megatron.core.transformer.dot_product_attention",
    "DotProductAttention.__init__",
    "DotProductAttention.forward",
    reason="without Transformer Engine there is no attention for context parallelism",
    source="core/transformer/dot_product_attention.py:58 @0.16.1",
    tiers=NO_CUDA,
)
def _context_parallel_attention(module: ModuleType, context: PatchContext) -> None:
    """The local attention refuses context parallelism; ours gathers keys and values over cp."""

    def make(original: Original, self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        size = config.context_parallel_size
        config.context_parallel_size = 1
        try:
            original(self, config, *args, **kwargs)
        finally:
            config.context_parallel_size = size

    def forward(
        original: Original, self: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self.config.context_parallel_size == 1:
            return original(self, query, key, value, *args, **kwargs)
        from megatron.core import parallel_state

        group = parallel_state.get_context_parallel_group()
        return local_layers.context_parallel_attention(query, key, value, group, self.softmax_scale)

    context.replace(module, make, "DotProductAttention.__init__")
    context.replace(module, forward, "DotProductAttention.forward")


@PATCHES.patch(
    "megatron.core.tensor_parallel.random",
    "_get_cuda_rng_state",
    "_set_cuda_rng_state",
    reason="the device's random state is the host's",
    source="core/tensor_parallel/random.py:235 @0.16.1",
    tiers=NO_CUDA,
)
def _one_generator(module: ModuleType, context: PatchContext) -> None:
    """Device and host share one generator here, so the tracker's check for a leak always fires."""

    def keep(record: logging.LogRecord) -> bool:
        return "CPU RNG state changed" not in record.getMessage()

    logging.getLogger(module.__name__).addFilter(keep)

    def call(
        original: Original, *args: object, graph_safe: bool = False, **kwargs: object
    ) -> object:
        return original(*args, **kwargs)  # only a CUDA device has states for graphs

    context.replace(module, call)


@PATCHES.instead(
    "megatron.training.training",
    "build_train_valid_test_data_iterators",
    reason="what data loaders draw moved the device's random state",
    source="training/training.py:3422 @0.16.1; :4601 @0.19.0",
    tiers=NO_CUDA,
)
@PATCHES.instead(
    "megatron.training.initialize",
    "_warmup_jit_function",
    reason="tensors of a warm-up, whose sizes depend on tp and cp, moved the device's random state",
    source="training/initialize.py:463 @0.16.1; :497 @0.19.0",
    tiers=NO_CUDA,
)
def _other_draws(
    context: PatchContext, original: Original, *args: object, **kwargs: object
) -> object:
    """What is drawn beside the model leaves the device's random state alone.

    A data loader draws a seed from the host's generator, which is the device's here: dropout of a
    job that goes on from a checkpoint would be another one than before.  A CUDA generator advances
    by calls (Philox), the host's by elements: layouts would start from other weights.
    """
    with torch.random.fork_rng(devices=[]):
        return original(*args, **kwargs)


@PATCHES.instead(
    "megatron.core.transformer.attention",
    "SelfAttention.run_realtime_tests",
    reason="shapes are neither equal nor different",
    source="core/transformer/attention.py:1300 @0.16.1; :1741 @0.19.0",
    tiers=META,
)
def _no_realtime_tests(
    context: PatchContext, original: Original, *args: object, **kwargs: object
) -> None:
    """``--test-mode`` asserts that norms of all ranks are equal; the calls stay."""
    with contextlib.suppress(AssertionError):
        original(*args, **kwargs)
