"""Patches for tiers without a CUDA device (cpu and meta): kernels, graphs, offloading, formats.

Stand-ins for kernels live in ``runtime.devices``; here they are only put in place.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import logging
import sys
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, cast

import torch

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.emulate.command_line import job_arguments
from megatron_prism.emulate.patch import META, NO_CUDA, Original, PatchContext, Patches, refused
from megatron_prism.runtime.devices import cuda, cuda_graphs, kernels, local_layers

PATCHES = Patches(tiers=NO_CUDA)
MOST_WARM_UP = 2  # iterations of a capture without graphs, before those with


@PATCHES.instead(
    "megatron.core.transformer.cuda_graphs:TECudaGraphHelper.create_cudagraphs",
    "_CudaGraphRunner.create_fwd_graph",
    "_CudaGraphRunner.create_bwd_graph",
    at=":2228, :787, :1020 @0.16.1; :2712, :1137, :1389 @0.19.0",
    tiers=META,
)
def _capture_graphs(
    context: PatchContext, original: Original, self: Any, *args: object, **kwargs: object
) -> None:
    """What is captured is in no iteration; a slice has graphs of the microbatches that run."""
    part = context.monitor.part("graph capture")
    with ProcessChanges() as changes, part, cuda_graphs.creation():
        if context.records:
            module = sys.modules[type(self).__module__]
            # a capture runs few microbatches, and a graph is made for each of them
            running = context.monitor.schedule["num_microbatches"]
            changes.set(module, "get_num_microbatches", lambda: running)
            changes.set(self.config, "cuda_graph_warmup_steps", 10)  # then one warm-up is enough
        original(self, *args, **kwargs)


@PATCHES.patch(
    "megatron.core.transformer.cuda_graphs:_ensure_generator_state_is_cudagraph_safe",
    at=":292 @0.16.1; :372 @0.19.0",
    tiers=META,
)
def _states_stay(module: ModuleType, context: PatchContext) -> None:
    """A graph draws from states of generators; here they are tensors, and no kernel draws."""
    context.replace(module, lambda original, generator: generator)


class _LeftOut(NamedTuple):
    """An option that the job does without here.

    Attributes:
        off: How Megatron says that it is off.
        meaning: What that means.
        counts: Whether time or memory are others with it.
    """

    off: dict[str, object]
    meaning: str
    counts: bool = True


_LEFT_OUT = {
    "a CUDA graph": _LeftOut(
        {"cuda_graph_impl": "none", "enable_cuda_graph": False, "external_cuda_graph": False},
        "kernels are launched one by one, and static buffers take no memory",
    ),
    "--tp-comm-overlap": _LeftOut(
        {"tp_comm_overlap": False},
        "the same collectives run one after the other, and userbuffers take no memory",
    ),
    "--use-cpu-initialization": _LeftOut(
        {"use_cpu_initialization": False},
        "weights are drawn where they stay, and tier cpu has the same in every layout",
        counts=False,
    ),
}


@PATCHES.instead(
    "megatron.training.global_vars:set_global_variables",
    at=":103 @0.16.1; :133 @0.19.0",
)
def _leave_out(
    context: PatchContext, original: Original, args: object, *rest: object, **kwargs: object
) -> object:
    """Ways of running the same operations that need a device: the job runs without, and says so."""
    in_shapes = context.meta
    if in_shapes and context.records:
        # a slice can have Transformer Engine's graphs; others are left out
        in_shapes = getattr(args, "cuda_graph_impl", "") == "transformer_engine"
        if in_shapes:
            _warm_up_shortly(context, cast(argparse.Namespace, args))
    for name, (off, meaning, counts) in _LEFT_OUT.items():
        if in_shapes and "cuda_graph_impl" in off:
            continue  # these are captured
        # a setting that is already off, or that this release lacks, is nothing to say
        asked = [key for key, no in off.items() if getattr(args, key, no) not in (no, None)]
        for key in asked:
            context.changes.set_item(job_arguments.left_out, key, getattr(args, key))
            setattr(args, key, off[key])
        scope = getattr(args, "inference_cuda_graph_scope", None)
        # 0.19 derives the scope from the way of making graphs, which is off now
        if "cuda_graph_impl" in asked and isinstance(scope, enum.Enum):
            args.inference_cuda_graph_scope = type(scope)["none"]  # type: ignore[attr-defined]
        if asked:
            context.say(f"without a GPU {name} is off: {meaning}")
        # what answers from the slices is said beside each of them
        if asked and counts:
            context.changes.set_item(job_arguments.without, name, meaning)
    return original(args, *rest, **kwargs)


def _warm_up_shortly(context: PatchContext, args: argparse.Namespace) -> None:
    """Let a capture's job make its graphs as early as its peak allows.

    Two iterations without graphs: the second has the optimizer's states beside activations, which
    is what the job's own warm-up has at most.  One if the job has no more, or ends too early for an
    iteration with graphs that is followed by another; the first step is heard, and not recorded.
    """
    name = "cuda_graph_warmup_steps"
    wanted = getattr(args, name)
    # an iteration with graphs has to follow, and another one behind it
    room = (args.train_iters or MOST_WARM_UP + 2) - 2
    steps = max(1, min(wanted, room, MOST_WARM_UP))
    if steps != wanted:
        context.changes.set_item(job_arguments.left_out, name, wanted)
        setattr(args, name, steps)


@PATCHES.patch(
    "megatron.core.nccl_allocator:init",
    "create_nccl_mem_pool",
    "nccl_mem",
    at=":32 @0.16.1; :86 @0.19.0",
)
def _plain_memory(module: ModuleType, context: PatchContext) -> None:
    """--use-nccl-ub compiles an allocator against CUDA and NCCL; its buffers are as large as
    others.
    """
    context.set(module, "init", lambda: None)
    context.set(module, "create_nccl_mem_pool", lambda symmetric=None: None)
    context.set(module, "nccl_mem", lambda pool, **kwargs: contextlib.nullcontext())


@PATCHES.patch(
    "megatron.core.transformer.experimental_attention_variant.dsa:hadamard_transform",
    at=":267 @0.19.0",
)
def _hadamard(module: ModuleType, context: PatchContext) -> None:
    """Sparse attention's indexer turns its queries and keys with a kernel of
    fast_hadamard_transform, which does not install without nvcc.
    """
    if module.hadamard_transform is None:
        context.set(module, "hadamard_transform", kernels.transform)


@PATCHES.patch("megatron.core.utils:tex", at=":2070 @0.16.1; :2440 @0.19.0")
def _dealt_documents(module: ModuleType, context: PatchContext) -> None:
    """A kernel of Transformer Engine deals documents out over context parallelism; where it is not
    installed its shapes are all that there is.
    """

    def refuse(*args: object) -> torch.Tensor:
        message = "packed sequences with context parallelism on real values have no stand-in"
        raise UnsupportedError(message, fix="--prism-tier meta")

    if module.tex is None:
        from megatron_prism.runtime.te_kernels.table import TABLE

        deal = TABLE["thd_get_partitioned_indices"] if context.meta else refuse
        context.set(module, "tex", SimpleNamespace(thd_get_partitioned_indices=deal))


@PATCHES.patch(
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer",
    "HybridDeviceOptimizer._init_sub_optimizers",
    at=":251 @0.19.0",
)
def _offloaded_optimizer(module: ModuleType, context: PatchContext) -> None:
    """On tier cpu host and device are one; on meta the host's copies are shapes."""
    if context.meta:
        return
    what = "--optimizer-cpu-offload moves states between a CUDA device and its host"
    context.replace(module, refused(what, "leave it out, --prism-tier meta, or --prism-tier cuda"))


@PATCHES.instead(
    "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
    at=":909 @0.16.1; :1294 @0.19.0",
)
def _no_stand_in(context: PatchContext, original: Original, self: Any) -> None:
    """Megatron prints a traceback of the whole model in front of what is wrong: said when the
    configuration is made, and not by its first forward pass.
    """
    original(self)
    for (message, fix), found in _without_stand_in(self, context.meta).items():
        if found:
            raise UnsupportedError(message, fix=fix)


def _without_stand_in(config: Any, meta: bool) -> dict[tuple[str, str], Any]:
    """(what, what to do) -> whether the model asks for it."""
    fp8 = getattr(config, "fp8", None)

    def in_fp8(name: str) -> Any:
        return fp8 and getattr(config, name, False)

    recipe = getattr(config, "fp8_recipe", None)
    # an enumeration of Megatron, or its text; recipes of later releases are unknown here
    other = getattr(recipe, "value", recipe) not in (None, *_RECIPES)
    cuda = "or --prism-tier cuda"
    return {
        (
            "FP4 is Transformer Engine's on a GPU; its kernels have no rows here",
            f"leave out --fp4-format, {cuda}",
        ): getattr(config, "fp4", None),
        (
            "FP8 without a GPU is shapes and bytes, not values",
            "use --prism-tier meta; or leave out --fp8-format (a recipe's fp8), and what is "
            f"reported is bf16's; {cuda}",
        ): fp8 and not meta,
        (
            f"FP8 recipe {getattr(recipe, 'value', recipe)} has no stand-in without a GPU",
            f"one of {', '.join(_RECIPES)}, {cuda}",
        ): fp8 and other,
        (
            "attention in FP8 (fp8_dot_product_attention or fp8_multi_head_attention of the "
            "model's configuration) has no stand-in without a GPU",
            f"leave them out, {cuda}",
        ): in_fp8("fp8_dot_product_attention") or in_fp8("fp8_multi_head_attention"),
        (
            "--moe-paged-stash keeps activations by counts of tokens, which are not known without "
            "a GPU, and runs a step again where its pages overflow",
            f"leave it out, {cuda}",
        ): getattr(config, "moe_paged_stash", False),
        (
            "hybrid and dynamic context parallelism deal sequences out by their lengths, to groups "
            "that change with every batch",
            f"leave --hybrid-context-parallel out, {cuda}",
        ): any(
            getattr(config, f"{kind}_context_parallel", False) for kind in ("hybrid", "dynamic")
        ),
        (
            "activations that are offloaded beside overlapped all-to-alls end in Megatron's own "
            "Chunk mismatch where there are MTP layers",
            "leave one out: --mtp-num-layers, "
            "--overlap-moe-expert-parallel-comm, --fine-grained-activation-offloading",
        ): all(getattr(config, name, False) for name in _OFFLOADED_BESIDE_MTP),
    }


_OFFLOADED_BESIDE_MTP = (
    "fine_grained_activation_offloading",
    "mtp_num_layers",
    "overlap_moe_expert_parallel_comm",
)
_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")


@PATCHES.patch(
    "megatron.core.pipeline_parallel.utils:set_ideal_affinity_for_current_gpu",
    at=":131 @0.19.0",
)
def _no_affinity(module: ModuleType, context: PatchContext) -> None:
    """Offloading asks for the host cores beside the GPU, which is not there."""
    context.replace(module, lambda original: None)


class _HostCopy:
    """Memory of the host that a tensor was copied to: a shape, which counts nowhere."""

    layout, is_meta = torch.strided, True

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    def size(self) -> torch.Size:
        return self.shape

    def numel(self) -> int:
        return self.shape.numel()

    def element_size(self) -> int:
        return self.dtype.itemsize

    def is_pinned(self) -> bool:
        return True

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> _HostCopy:
        cuda.copied(self, source, blocks=False)
        return self

    @classmethod
    def __torch_function__(
        cls, func: object, types: object, args: tuple[Any, ...] = (), kwargs: object = None
    ) -> Any:
        if func is torch.Tensor.copy_:
            cuda.copied(args[0], args[1], blocks=False)
        return args[0]  # a tensor of the device, which is filled from here


@PATCHES.patch(
    "megatron.core.pipeline_parallel.fine_grained_activation_offload:ChunkOffloadHandler.offload",
    "ChunkOffloadHandler._can_manage_tensor_for_offload >=0.19",
    at=":733 @0.16.1; :831 @0.19.0; :895 @0.20.0",
    tiers=META,
)
def _offloaded(module: ModuleType, context: PatchContext) -> None:
    """Tier meta cannot tell host from device: Megatron copies to, and from, shapes of the host."""
    pool = SimpleNamespace(allocate=_HostCopy, free=lambda copy: None)

    def offload(
        original: Original, self: Any, tensor: torch.Tensor, *args: object, **kwargs: object
    ) -> object:
        self.cpu_tensor_pool = pool
        return original(self, tensor, use_cpu_pool=True)

    def manages(tensor: torch.Tensor) -> bool:
        return tensor.is_meta and not isinstance(tensor, torch.nn.Parameter)

    owner = "ChunkOffloadHandler"
    context.replace(module, offload, f"{owner}.offload")
    context.set(module, f"{owner}._can_manage_tensor_for_offload", staticmethod(manages))


@PATCHES.patch(
    "megatron.core.tensor_parallel.random:_get_share_storage >=0.19",
    at=":69, :821 @0.19.0",
    tiers=META,
)
def _shared_storage(module: ModuleType, context: PatchContext) -> None:
    """Recomputation without outputs compiles a C++ extension that gives one tensor's memory to
    another: it takes a minute, and a run that was killed meanwhile leaves a lock on which the next
    one waits. On shapes the memory only has to be counted once, as long as one of the two is there.
    """

    def share(to: torch.Tensor, of: torch.Tensor) -> None:
        # the memory counts for the receiver as long as the giver is there
        kept, shared = to.untyped_storage(), of.untyped_storage()
        size = shared.nbytes()
        shared.resize_(0)
        kept.resize_(size)
        weakref.finalize(shared, id, kept).atexit = False

    context.replace(module, lambda original: share)


@PATCHES.patch(
    "megatron.legacy.fused_kernels:load",
    at=":21 @0.16.1; gone in 0.19.0",
    releases="<0.19",
)
def _no_fused_kernels(module: ModuleType, context: PatchContext) -> None:
    """Start-up runs ``$CUDA_HOME/bin/nvcc -V`` unconditionally at 0.16.1."""
    context.set(module, "load", lambda args: None)


@PATCHES.instead("megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__", at=":32 @0.16.1")
def _sequence_parallel_norm(
    context: PatchContext,
    original: Original,
    cls: Any,
    config: Any,
    hidden_size: int,
    eps: float = 1e-5,
    **kwargs: Any,
) -> Any:
    """Without apex and Transformer Engine there is only torch's norm, which refuses sequence
    parallelism; ours marks its weights as Megatron expects.
    """
    # where torch's norm does, it stays: it is what a real job without extensions runs
    ours = config.sequence_parallel or config.layernorm_zero_centered_gamma
    if ours or config.persist_layer_norm:  # torch's refuses all three
        return local_layers.SequenceParallelNorm(config, hidden_size, eps)
    return original(cls, config, hidden_size, eps, **kwargs)


@PATCHES.patch(
    "megatron.core.tensor_parallel.random:_get_cuda_rng_state",
    "_set_cuda_rng_state",
    at=":235 @0.16.1",
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
    "megatron.training.training:build_train_valid_test_data_iterators",
    at=":3422 @0.16.1; :4601 @0.19.0",
)
@PATCHES.instead(
    "megatron.training.initialize:_warmup_jit_function",
    at=":463 @0.16.1; :497 @0.19.0",
)
def _other_draws(
    context: PatchContext, original: Original, *args: object, **kwargs: object
) -> object:
    """What is drawn beside the model leaves the device's random state, which is the host's here,
    alone.

    A data loader draws a seed: dropout of a job that goes on from a checkpoint would be another one
    than before. A CUDA generator advances by calls (Philox), the host's by elements: layouts, whose
    warm-up tensors differ in size, would start from other weights.
    """
    with torch.random.fork_rng(devices=[]):
        return original(*args, **kwargs)


@PATCHES.instead(
    "megatron.core.transformer.attention:SelfAttention.run_realtime_tests",
    at=":1300 @0.16.1; :1741 @0.19.0",
    tiers=META,
)
def _no_realtime_tests(
    context: PatchContext, original: Original, *args: object, **kwargs: object
) -> None:
    """``--test-mode`` asserts that norms of all ranks are equal; the calls stay."""
    with contextlib.suppress(AssertionError):
        original(*args, **kwargs)
