"""Patches for tiers without a CUDA device (cpu and meta), and the patches of every tier.

Same form as ``startup``.  Stand-ins for kernels live in ``runtime.devices``; here they are only put
in place.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.emulate.patch import Patch, PatchContext, refused
from megatron_prism.emulate.patches import moe, outputs, pipeline, startup, training
from megatron_prism.runtime.devices import cuda, fused_dispatch, kernels, stand_ins
from megatron_prism.runtime.te.moe import counts

__all__ = ["FUSED_ATTENTION", "every_patch", "patches_for"]


def _mla_rope(module: ModuleType, context: PatchContext) -> None:
    """The rotary embedding of multi-latent attention is four triton kernels by default."""
    for name, kernel in kernels.KERNELS.items():
        if hasattr(module, name):
            context.set(module, name, kernel)


def _no_triton(module: ModuleType, context: PatchContext) -> None:
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


def _no_graphs(module: ModuleType, context: PatchContext) -> None:
    """They are captured after some iterations of warm-up: this comes before it."""
    fix = "leave --enable-cuda-graph or --cuda-graph-impl out, or --prism-tier cuda"
    for owner in ("FullCudaGraphWrapper", "CudaGraphManager", "TECudaGraphHelper"):
        if hasattr(module, owner):
            make = refused("CUDA graphs need a CUDA device", fix)
            context.replace(getattr(module, owner), "__init__", make)


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
        "weights are drawn where they stay, from the same distribution",
    ),
    "--use-transformer-engine-op-fuser": (
        {"use_transformer_engine_op_fuser": False},
        "the layers are Transformer Engine's modules, which save the same",
    ),
}


def _leave_out(module: ModuleType, context: PatchContext) -> None:
    """Ways of running the same operations that need a device: the job runs without, and says so."""

    def make(original: Callable[..., object]) -> Callable[..., object]:
        def call(args: object, *rest: object, **kwargs: object) -> object:
            for name, (off, meaning) in _LEFT_OUT.items():
                asked = [key for key, value in off.items() if getattr(args, key, value) != value]
                for key in asked:
                    setattr(args, key, off[key])
                scope = getattr(args, "inference_cuda_graph_scope", None)
                if "cuda_graph_impl" in asked and isinstance(scope, enum.Enum):
                    args.inference_cuda_graph_scope = type(scope)["none"]  # type: ignore[attr-defined]
                if asked and context.leads:
                    sys.stderr.write(f"prism: without a GPU {name} is off: {meaning}\n")
            return original(args, *rest, **kwargs)

        return call

    context.replace(module, "set_global_variables", make, again=True)


def _plain_memory(module: ModuleType, context: PatchContext) -> None:
    """Buffers that NCCL uses directly are as large as others; nvcc would build their pool."""
    context.set(module, "init", lambda: None)
    context.set(module, "create_nccl_mem_pool", lambda symmetric=None: None)
    context.set(module, "nccl_mem", lambda pool, **kwargs: contextlib.nullcontext())


def _hadamard(module: ModuleType, context: PatchContext) -> None:
    """Sparse attention's indexer turns its queries and keys with a CUDA package's kernel."""
    if module.hadamard_transform is None:
        context.set(module, "hadamard_transform", kernels.transform)


def _fsdp2(module: ModuleType, context: PatchContext) -> None:
    """torch's FSDP2 refuses parameters on meta, for somebody may have forgotten to initialise them;
    on tier meta they are what they will ever be.  On tier cpu it wants a CUDA device."""
    if not context.meta:
        what = "--use-torch-fsdp2 shards parameters on a CUDA device"
        make = refused(what, "leave it out, or --prism-tier meta or cuda")
        context.replace(module.TorchFullyShardedDataParallel, "__init__", make)
        return
    from torch.distributed.fsdp import _fully_shard
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    group = _fsdp_param_group.FSDPParamGroup
    context.changes.set(group, "_validate_no_meta_params", lambda self: None)
    for part in vars(_fully_shard).values():  # modules that ask for the streams of a device's type
        if hasattr(part, "_get_device_handle"):
            context.changes.set(part, "_get_device_handle", lambda device_type: torch.cuda)


def _no_offloaded_optimizer(module: ModuleType, context: PatchContext) -> None:
    """It sorts parameters by the device they are on, and here that is one for all."""
    what = "--optimizer-cpu-offload moves states between a CUDA device and its host"
    make = refused(what, "leave it out, or --prism-tier cuda")
    context.replace(module.HybridDeviceOptimizer, "__init__", make)


def _no_low_precision(module: ModuleType, context: PatchContext) -> None:
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


def _no_affinity(module: ModuleType, context: PatchContext) -> None:
    """There is no GPU whose NUMA node this process could move to."""
    context.replace(module, "set_ideal_affinity_for_current_gpu", lambda _: lambda: None)


def _offloaded(module: ModuleType, context: PatchContext) -> None:
    """What is offloaded leaves the device: here its shape is kept, and a tensor made of it when it
    is wanted back.  Buffers of the host are not counted."""

    def offload(original: Callable[..., object]) -> Callable[..., object]:
        def call(self: object, tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
            return tensor.shape, tensor.dtype, tensor.device

        return call

    def reload(original: Callable[..., object]) -> Callable[..., object]:
        def call(self: object, state: tuple[torch.Size, torch.dtype, torch.device], *_: object,
                 **kwargs: object) -> torch.Tensor:  # fmt: skip
            shape, dtype, device = state
            return torch.empty(shape, dtype=dtype, device=device)

        return call

    def manages(original: Callable[..., object]) -> Callable[..., object]:
        return lambda tensor: tensor.is_meta and not isinstance(tensor, torch.nn.Parameter)

    owner = module.ChunkOffloadHandler
    context.replace(owner, "offload", offload)
    context.replace(owner, "reload", reload)
    if hasattr(owner, "_can_manage_tensor_for_offload"):
        check = manages(owner._can_manage_tensor_for_offload)
        context.set(owner, "_can_manage_tensor_for_offload", staticmethod(check))


def _shared_storage(module: ModuleType, context: PatchContext) -> None:
    """A C++ extension gives one tensor's memory to another; compiled in the first backward pass, it
    takes a minute, and a run that was killed meanwhile leaves a lock on which the next one waits.
    On shapes the memory only has to be counted where it is."""

    def share(to: torch.Tensor, of: torch.Tensor) -> None:
        size = of.untyped_storage().nbytes()
        of.untyped_storage().resize_(0)
        to.untyped_storage().resize_(size)

    context.replace(module, "_get_share_storage", lambda original: lambda: share)


_KERNELS: tuple[Patch, ...] = (
    Patch(
        "no-low-precision",
        "megatron.core.transformer.transformer_config",
        "Megatron prints a traceback of the whole model in front of what is wrong",
        "core/transformer/transformer_config.py:909 @0.16.1; :1294 @0.19.0",
        _no_low_precision,
        targets=("TransformerConfig.__post_init__",),
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
        "leave-out",
        "megatron.training.global_vars",
        "graphs, userbuffers and fused operations are ways of running a job on a device",
        "training/global_vars.py:103 @0.16.1; :133 @0.19.0",
        _leave_out,
        targets=("set_global_variables",),
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
        "fsdp2",
        "megatron.core.distributed.torch_fully_sharded_data_parallel",
        "torch's FSDP2 wants its parameters on a CUDA device",
        "core/distributed/torch_fully_sharded_data_parallel.py:45 @0.19.0",
        _fsdp2,
        targets=("TorchFullyShardedDataParallel.__init__",),
    ),
    Patch(
        "mla-rope",
        "megatron.core.fusions.fused_mla_yarn_rope_apply",
        "multi-latent attention launches triton kernels unless --no-rope-fusion",
        "core/fusions/fused_mla_yarn_rope_apply.py:258 @0.19.0",
        _mla_rope,
        targets=tuple(
            f"{name} {'>=' if name.startswith('_') else '<'}0.20" for name in kernels.KERNELS
        ),
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

_KERNELS_META: tuple[Patch, ...] = (
    Patch(
        "offloaded",
        "megatron.core.pipeline_parallel.fine_grained_activation_offload",
        "tier meta cannot tell host from device",
        "core/pipeline_parallel/fine_grained_activation_offload.py:733 @0.16.1; :831 @0.19.0",
        _offloaded,
        targets=(
            "ChunkOffloadHandler.offload",
            "ChunkOffloadHandler.reload",
            "ChunkOffloadHandler._can_manage_tensor_for_offload >=0.19",
        ),
    ),
    Patch(
        "shared-storage",
        "megatron.core.tensor_parallel.random",
        "recomputation without outputs compiles an extension, under a lock",
        "core/tensor_parallel/random.py:69, :821 @0.19.0",
        _shared_storage,
        targets=("_get_share_storage >=0.19",),
    ),
)


def _no_fused_kernels(module: ModuleType, context: PatchContext) -> None:
    """Start-up runs ``$CUDA_HOME/bin/nvcc -V`` unconditionally at 0.16.1."""
    context.set(module, "load", lambda args: None)


def _name_without_te(module: ModuleType, context: PatchContext) -> None:
    """0.16.1 tests a name that it only binds if Transformer Engine imports."""
    if not hasattr(module, "te_general_gemm"):
        # not a target: a name that is made here, since nothing else binds it
        context.changes.set(module, "te_general_gemm", None)


def _sequence_parallel_norm(module: ModuleType, context: PatchContext) -> None:
    """torch's norm refuses sequence parallelism; ours marks its weights as Megatron expects."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
            ours = config.sequence_parallel or config.layernorm_zero_centered_gamma
            if ours or config.persist_layer_norm:  # torch's refuses all three
                return stand_ins.SequenceParallelNorm(config, hidden_size, eps)
            return original(cls, config, hidden_size, eps, **kwargs)

        return call

    context.replace(module.WrappedTorchNorm, "__new__", make)


def _context_parallel_attention(module: ModuleType, context: PatchContext) -> None:
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


def _one_generator(module: ModuleType, context: PatchContext) -> None:
    """Device and host share one generator here, so the tracker's check for a leak always fires."""

    def keep(record: logging.LogRecord) -> bool:
        return "CPU RNG state changed" not in record.getMessage()

    logging.getLogger(module.__name__).addFilter(keep)

    def make(original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, graph_safe: bool = False, **kwargs: object) -> object:
            return original(*args, **kwargs)  # only a CUDA device has states for graphs

        return call

    context.replace(module, "_get_cuda_rng_state", make)
    context.replace(module, "_set_cuda_rng_state", make)


def _flash_attention(module: ModuleType, context: PatchContext) -> None:
    """Megatron's local attention holds the s x s scores; production kernels never do."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            if query.is_meta and self.config.context_parallel_size == 1:
                return stand_ins.FlashAttention.apply(query, key, value)
            return original(self, query, key, value, *args, **kwargs)

        return call

    context.replace(module.DotProductAttention, "forward", make, again=True)


def _balanced_splits(module: ModuleType, context: PatchContext) -> None:
    """Shapes have no routing: every expert gets its even share, and the host knows it at once.

    The one point where the dispatcher needs data is its copy of the splits to the host
    (core/transformer/moe/token_dispatcher.py, _maybe_dtoh_and_synchronize).
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
            if self.drop_and_pad or point != self.cuda_dtoh_point:
                return tokens_per_expert
            if cuda.watcher is not None:  # the copy to the host that this stands in for
                cuda.watcher.host_waited("token counts")
            splits = stand_ins.balanced_splits(
                total=int(self.num_out_tokens)
                if not torch.is_tensor(self.num_out_tokens)
                else self.routing_map.shape[0] * self.config.moe_router_topk,
                num_experts=self.num_experts,
                local=self.local_expert_indices,
                ep_size=self.ep_size,
                tp_size=self.tp_size,
            )
            counts["made_up"] = True
            self.num_out_tokens = splits.total
            self.input_splits = splits.sent
            self.output_splits = splits.received
            self.output_splits_tp = splits.received_tp
            self.num_global_tokens_per_local_expert = splits.table
            return splits.per_local_expert

        return call

    context.replace(module.MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", make)


def _balanced_gathered(module: ModuleType, context: PatchContext) -> None:
    """As ``_balanced_splits`` where every rank gathers all tokens and keeps those of its experts
    (core/transformer/moe/token_dispatcher.py, MoEAllGatherTokenDispatcher.dispatch_postprocess).
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, hidden_states: Any, probs: Any) -> Any:
            self.hidden_shape_before_permute = hidden_states.shape
            local = slice(self.local_expert_indices[0], self.local_expert_indices[-1] + 1)
            self.local_map = self.routing_map[:, local].contiguous()
            chosen = probs[:, local].contiguous()
            self.local_map.sum(dim=0).long()  # the counts that the host would read
            if cuda.watcher is not None:
                cuda.watcher.host_waited("token counts")
            splits = stand_ins.balanced_splits(
                total=self.routing_map.shape[0] * self.config.moe_router_topk,
                num_experts=self.config.num_moe_experts,
                local=self.local_expert_indices,
                ep_size=1,
                tp_size=1,
            )
            counts["made_up"] = True
            total = int(splits.per_local_expert.sum())
            permuted, _, self.reversed_local_input_permutation_mapping, *_ = module.permute(
                hidden_states,
                self.local_map,
                num_out_tokens=total,
                fused=self.config.moe_permute_fusion,
            )
            self.local_probs = stand_ins.masked_select(
                chosen.T.contiguous(), self.local_map.T.contiguous(), total
            )
            self.routing_map = None
            return permuted, splits.per_local_expert, self.local_probs

        return call

    context.replace(module.MoEAllGatherTokenDispatcher, "dispatch_postprocess", make)


def _fused_dispatch(module: ModuleType, context: PatchContext) -> None:
    for name in ("fused_dispatch", "fused_combine", "hybrid_ep_dispatch", "hybrid_ep_combine"):
        context.set(module, name, getattr(fused_dispatch, name))
    context.set(module, "set_deepep_num_sms", lambda number: None)


def _balanced_flex(module: ModuleType, context: PatchContext) -> None:
    """HybridEP's call does not say how many experts a token goes to; DeepEP's map of experts is
    filled where its values say."""

    def metadata(original: Callable[..., object]) -> Callable[..., object]:
        def call(self: Any, *args: object, **kwargs: object) -> object:
            ways = self.num_experts // self.config.num_moe_experts
            fused_dispatch.set_copies(self.config.moe_router_topk * ways)
            counts["made_up"] = True
            return original(self, *args, **kwargs)

        return call

    def multihot(original: Callable[..., object]) -> Callable[..., object]:
        return lambda self, indices, probs: fused_dispatch.indices_to_multihot(
            indices, probs, self.num_local_experts
        )

    context.replace(module._HybridEPManager, "setup_metadata", metadata)
    context.replace(module._DeepepManager, "setup_metadata", metadata)
    context.replace(module._DeepepManager, "_indices_to_multihot", multihot)
    context.set(module, "fused_indices_to_multihot", fused_dispatch.indices_to_multihot)


def _static_permute(module: ModuleType, context: PatchContext) -> None:
    """The unfused permutation selects by mask, which has no shape; its size is known beforehand."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(tokens: Any, routing_map: Any, *args: Any, **kwargs: Any) -> Any:
            if not tokens.is_meta:
                return original(tokens, routing_map, *args, **kwargs)
            return stand_ins.permute_shapes(original, tokens, routing_map, *args, **kwargs)

        return call

    context.replace(module, "permute", make)


def _always_finite(module: ModuleType, context: PatchContext) -> None:
    """Shapes have no infinities: the check reads a number that is not there."""
    context.replace(
        module.MixedPrecisionOptimizer,
        "_unscale_main_grads_and_check_for_nan",
        lambda _: lambda self: False,
    )


def _materialised(module: ModuleType, context: PatchContext) -> None:
    """Megatron-FSDP takes parameters on meta for those that nobody has initialised yet; on tier
    meta they are what they will ever be."""
    is_meta: Callable[[torch.Tensor], bool] = vars(torch._C.TensorBase)["is_meta"].__get__
    package = module.__name__.rpartition(".")[0]

    def asked(tensor: torch.Tensor) -> bool:
        by_fsdp = sys._getframe(1).f_globals.get("__name__", "").startswith(package)
        return not by_fsdp and is_meta(tensor)

    def make(original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            if any(getattr(one, "fp8_param_gather", False) for one in (*args, *kwargs.values())):
                raise UnsupportedError(
                    "Megatron-FSDP reaches into FP8 parameters, and virtual ones have no data",
                    fix="leave --fp8-param-gather out, or --prism-tier cuda",
                )
            changes = ProcessChanges()
            changes.set(torch.Tensor, "is_meta", property(asked))
            try:
                return original(*args, **kwargs)
            finally:
                changes.undo()

        return call

    context.replace(module.ParamAndGradBuffer, "__init__", make)


def _no_realtime_tests(module: ModuleType, context: PatchContext) -> None:
    """``--test-mode`` asserts that norms of all ranks are equal; the calls stay."""

    def make(original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> None:
            with contextlib.suppress(AssertionError):
                original(*args, **kwargs)

        return call

    context.replace(module.SelfAttention, "run_realtime_tests", make)


def _believe_the_step(module: ModuleType, context: PatchContext) -> None:
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
        targets=("_get_cuda_rng_state", "_set_cuda_rng_state"),
    ),
    Patch(
        "name-without-te",
        "megatron.core.transformer.moe.moe_utils",
        "without Transformer Engine the router raises NameError",
        "core/transformer/moe/moe_utils.py (te_general_gemm) @0.16.1",
        _name_without_te,
        targets=("HAVE_TE",),  # that name is bound only with Transformer Engine
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
        "fused-dispatch",
        "megatron.core.transformer.moe.fused_a2a",
        "DeepEP and HybridEP write into the memory of other GPUs",
        "core/transformer/moe/fused_a2a.py:200, :480 @0.19.0",
        _fused_dispatch,
        targets=(
            "fused_dispatch",
            "fused_combine",
            "set_deepep_num_sms",
            "hybrid_ep_dispatch",
            "hybrid_ep_combine",
        ),
    ),
    Patch(
        "balanced-flex",
        "megatron.core.transformer.moe.token_dispatcher",
        "how many tokens arrive is a value",
        "core/transformer/moe/token_dispatcher.py:993, :1216 @0.19.0",
        _balanced_flex,
        targets=(
            "_HybridEPManager.setup_metadata",
            "_DeepepManager.setup_metadata",
            "_DeepepManager._indices_to_multihot",
            "fused_indices_to_multihot",
        ),
    ),
    Patch(
        "balanced-gathered",
        "megatron.core.transformer.moe.token_dispatcher",
        "the same where all tokens are gathered",
        "core/transformer/moe/token_dispatcher.py:299 @0.16.1; :321 @0.19.0",
        _balanced_gathered,
        targets=("MoEAllGatherTokenDispatcher.dispatch_postprocess",),
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
        "materialised",
        "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer",
        "Megatron-FSDP initialises parameters on meta, or fails",
        "core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py:2880 @0.19.0",
        _materialised,
        targets=("ParamAndGradBuffer.__init__",),
    ),
    Patch(
        "no-realtime-tests",
        "megatron.core.transformer.attention",
        "shapes are neither equal nor different",
        "core/transformer/attention.py:1300 @0.16.1; :1741 @0.19.0",
        _no_realtime_tests,
        targets=("SelfAttention.run_realtime_tests",),
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
    """Every patch that a run on ``tier`` needs."""
    chosen = startup.PATCHES + pipeline.PATCHES + training.PATCHES
    chosen += outputs.PATCHES + moe.PATCHES
    if tier != "cuda":
        chosen += PATCHES_WITHOUT_CUDA + _KERNELS
    return chosen + PATCHES_META + _KERNELS_META if tier == "meta" else chosen


def every_patch() -> tuple[Patch, ...]:
    """Those of all tiers and options."""
    return (*patches_for("meta"), FUSED_ATTENTION, *moe.patches_for_recording(None))
