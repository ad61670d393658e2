"""Patches of Megatron's experts and multi-token prediction.

Dispatchers that go round torch.distributed are refused; what virtual ranks route is made up so that
tokens are as many as in the job; and with --prism-record or --prism-values recorded:PATH the
router's decisions meet a recording.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatron_prism.emulate import job_arguments
from megatron_prism.emulate.patch import Patch, PatchContext, refused
from megatron_prism.runtime.control_values import ValueRecorder, ValueReplayer
from megatron_prism.runtime.values import BalancedExpertCounts
from megatron_prism.runtime.world import values_of

__all__ = ["patches_for_recording"]


_MTP = "mtp"  # optimizer.py:150 @0.19.0


def _norm_of_heads(module: ModuleType, context: PatchContext) -> None:
    """With ``--mtp-detach-heads`` MTP layers have a gradient norm of their own, which all ranks add
    up if one of them has such layers.  Ranks ask each other that; mirrored ones would all be like
    this one, and a stage without MTP layers would leave a call out that the others make."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, group: str) -> bool:
            found = original(self, group)
            if group != _MTP or context.is_real():
                return found
            args = job_arguments.parsed()
            detached = getattr(args, "mtp_detach_heads", False) and args.mtp_num_layers
            return bool(found or detached)

        return call

    for name in ("MegatronOptimizer", "LayerWiseDistributedOptimizer"):
        owner = getattr(module, name, None)
        if owner is not None and owner.__module__ == module.__name__:
            context.replace(owner, "has_grad_norm_group", make)


_MTP_HEADS: tuple[Patch, ...] = tuple(
    Patch(
        f"norm-of-mtp-heads{where}",
        f"megatron.core.optimizer{where}",
        "whether some rank has detached MTP heads is asked of ranks that mirror this one",
        cited,
        _norm_of_heads,
        targets=(f"{owner}.has_grad_norm_group",),
        releases=">=0.19",
    )
    for where, owner, cited in (
        (".optimizer", "MegatronOptimizer", "core/optimizer/optimizer.py:294 @0.19.0"),
        (
            ".layer_wise_optimizer",
            "LayerWiseDistributedOptimizer",
            "core/optimizer/layer_wise_optimizer.py:815 @0.19.0",
        ),
    )  # fmt: skip
)


def _no_flex(module: ModuleType, context: PatchContext) -> None:
    """Their kernels write into the memory of the other ranks, which are not there; on shapes
    nothing is written, and DeepEP and HybridEP have stand-ins."""
    names = {} if context.meta else {"_DeepepManager": "DeepEP", "_HybridEPManager": "HybridEP"}
    for owner, name in {**names, "_NCCLEPManager": "NCCL EP"}.items():
        make = refused(
            f"--moe-token-dispatcher-type flex talks to the other ranks through {name}, "
            "and virtual ranks have no memory that it could write to",
            "use --moe-token-dispatcher-type alltoall: tokens, experts and layers are the same",
        )
        if hasattr(module, owner):
            context.replace(getattr(module, owner), "__init__", make)


def _balanced_peers(module: ModuleType, context: PatchContext) -> None:
    """Counts and routing maps of virtual ranks are ours, seen from where they are."""
    if context.meta:
        return

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            values = values_of(self.tp_ep_group)
            if values is None:
                return original(self, *args, **kwargs)
            ways = self.tp_ep_group.size() // self.ep_size
            blocks = BalancedExpertCounts(self.config.num_moe_experts, self.num_local_experts, ways)
            with values.of_parts(blocks):
                return original(self, *args, **kwargs)

        return call

    for owner, name in (
        ("MoEAlltoAllTokenDispatcher", "preprocess"),
        ("MoEAllGatherTokenDispatcher", "token_dispatch"),
    ):
        context.replace(getattr(module, owner), name, make)


PATCHES: tuple[Patch, ...] = (
    Patch(
        "no-flex",
        "megatron.core.transformer.moe.token_dispatcher",
        "DeepEP, HybridEP and NCCL EP know nothing of process groups",
        "core/transformer/moe/token_dispatcher.py:942, :1091 @0.16.1; :993, :1216, :1462 @0.19.0",
        _no_flex,
        targets=(
            "_DeepepManager.__init__",
            "_HybridEPManager.__init__",
            "_NCCLEPManager.__init__ >=0.19",
        ),
    ),
    Patch(
        "balanced-peers",
        "megatron.core.transformer.moe.token_dispatcher",
        "mirrored routing gives a rank more tokens, or fewer, than all ranks together route",
        "core/transformer/moe/token_dispatcher.py:256, :469 @0.16.1; :278, :495 @0.19.0",
        _balanced_peers,
        targets=(
            "MoEAlltoAllTokenDispatcher.preprocess",
            "MoEAllGatherTokenDispatcher.token_dispatch",
        ),
    ),
    *_MTP_HEADS,
)


def patches_for_recording(recording: ValueRecorder | ValueReplayer | None) -> tuple[Patch, ...]:
    """The patch that keeps, or gives back, what every MoE layer's router decides."""

    def routing(module: ModuleType, context: PatchContext) -> None:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(self: Any, *args: Any, **kwargs: Any) -> Any:
                result = original(self, *args, **kwargs)
                # probabilities of experts that only the recording chose stay 0: sizes are what
                # a recording is for
                assert recording is not None
                routed = recording.route(self.layer_number or 0, result[1])
                return (result[0], routed, *result[2:])

            return call

        context.replace(module.TopKRouter, "routing", make)

    return (
        Patch(
            "recorded-routing",
            "megatron.core.transformer.moe.router",
            "how many tokens an expert gets depends on what real peers computed",
            "core/transformer/moe/router.py:545 @0.16.1; :741 @0.19.0",
            routing,
            targets=("TopKRouter.routing",),
        ),
    )
