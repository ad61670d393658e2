"""Patches of Megatron's experts and multi-token prediction.

Dispatchers that go round torch.distributed are refused; what virtual ranks route is made up so that
tokens are as many as in the job; and with --prism-record or --prism-values recorded:PATH the
router's decisions meet a recording.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from megatron_prism.emulate.command_line import job_arguments
from megatron_prism.emulate.patch import (
    META,
    NO_CUDA,
    VALUES,
    Original,
    PatchContext,
    Patches,
    refused,
)
from megatron_prism.runtime.devices import cuda, moe_dispatch
from megatron_prism.runtime.values import BalancedExpertCounts
from megatron_prism.runtime.virtual_world import values_of

PATCHES = Patches()

_MTP = "mtp"  # optimizer.py:150 @0.19.0


@PATCHES.instead(
    "megatron.core.optimizer.optimizer:MegatronOptimizer.has_grad_norm_group",
    at=":294 @0.19.0",
    releases=">=0.19",
)
@PATCHES.instead(
    "megatron.core.optimizer.layer_wise_optimizer",
    "LayerWiseDistributedOptimizer.has_grad_norm_group",
    at=":815 @0.19.0",
    releases=">=0.19",
)
def _norm_of_mtp_heads(context: PatchContext, original: Original, self: Any, group: str) -> bool:
    """With ``--mtp-detach-heads`` MTP layers have a gradient norm of their own, which all ranks add
    up if one of them has such layers: mirrored ranks would all answer as this one.
    """
    found = original(self, group)
    # real ranks answer for themselves
    if group != _MTP or context.is_real():
        return found
    args = job_arguments.parsed()
    detached = getattr(args, "mtp_detach_heads", False) and args.mtp_num_layers
    return bool(found or detached)


@PATCHES.patch(
    "megatron.core.transformer.moe.token_dispatcher:_DeepepManager.__init__",
    "_HybridEPManager.__init__",
    "_NCCLEPManager.__init__ >=0.19",
    at=":942, :1091 @0.16.1; :1216, :1462 @0.19.0",
)
def _no_flex(module: ModuleType, context: PatchContext) -> None:
    """Kernels of DeepEP, HybridEP and NCCL EP write into the memory of other ranks, which are not
    there; on shapes nothing is written, and DeepEP and HybridEP have stand-ins.
    """
    # NCCL EP has no stand-in on any tier
    names = {} if context.meta else {"_DeepepManager": "DeepEP", "_HybridEPManager": "HybridEP"}
    for owner, name in {**names, "_NCCLEPManager": "NCCL EP"}.items():
        call = refused(
            f"--moe-token-dispatcher-type flex talks to the other ranks through {name}, "
            "and virtual ranks have no memory that it could write to",
            "use --moe-token-dispatcher-type alltoall: tokens, experts and layers are the same",
        )
        context.replace(module, call, f"{owner}.__init__")


@PATCHES.instead(
    "megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.preprocess",
    "MoEAllGatherTokenDispatcher.token_dispatch",
    at=":256, :469 @0.16.1; :278, :495 @0.19.0",
    tiers=VALUES,
)
def _balanced_peers(
    context: PatchContext, original: Original, self: Any, *args: Any, **kwargs: Any
) -> Any:
    """Mirrored routing gives a rank more tokens, or fewer, than all ranks together route: counts
    and routing maps of virtual ranks are ours, seen from where they are.
    """
    values = values_of(self.tp_ep_group)
    if values is None:
        return original(self, *args, **kwargs)
    # ranks of tensor parallelism that share the experts of a rank
    ways = self.tp_ep_group.size() // self.ep_size
    blocks = BalancedExpertCounts(self.config.num_moe_experts, self.num_local_experts, ways)
    with values.of_parts(blocks):
        return original(self, *args, **kwargs)


@PATCHES.patch(
    "megatron.core.transformer.moe.router:TopKRouter.routing", at=":545 @0.16.1; :741 @0.19.0"
)
def _recorded_routing(module: ModuleType, context: PatchContext) -> None:
    """How many tokens an expert gets depends on what real peers computed: keep, or give back, what
    every MoE layer's router decides.
    """
    if (recording := context.recording) is None:
        return

    def call(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        # probabilities of experts that only the recording chose stay 0: sizes are what
        # a recording is for
        routed = recording.route(self.layer_number or 0, result[1])
        return (result[0], routed, *result[2:])

    context.replace(module, call)


@PATCHES.patch(
    "megatron.core.transformer.moe.moe_utils:HAVE_TE",
    at=":34, :1192 @0.16.1; bound to None @0.19.0",
    releases="<0.19",
    tiers=NO_CUDA,
)
def _name_without_te(module: ModuleType, context: PatchContext) -> None:
    """0.16.1 tests a name that it only binds if Transformer Engine imports."""
    if not hasattr(module, "te_general_gemm"):
        # not a target: a name that is made here, since nothing else binds it
        context.changes.set(module, "te_general_gemm", None)


@PATCHES.instead(
    "megatron.core.transformer.moe.token_dispatcher",
    "MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize",
    at=":871 @0.16.1",
    tiers=META,
)
def _balanced_splits(
    context: PatchContext, original: Original, self: Any, point: str, tokens_per_expert: Any = None
) -> Any:
    """Token counts steer shapes, and shapes have no data: every expert gets its even share, at the
    one point where the dispatcher copies its splits to the host.
    """
    # a graph cannot wait for numbers of the device
    if point == self.cuda_sync_point and not self.drop_and_pad:
        cuda.refuse_while_capturing("token counts")
    # with capacity the counts are known, and elsewhere nothing is copied
    if self.drop_and_pad or point != self.cuda_dtoh_point:
        return tokens_per_expert
    if cuda.watcher is not None:  # the copy to the host that this stands in for
        cuda.watcher.host_waited("token counts")
    moe_dispatch.follow(self.config)
    splits = moe_dispatch.balanced_splits(
        self,
        total=int(self.num_out_tokens)
        if not torch.is_tensor(self.num_out_tokens)
        else self.routing_map.shape[0] * self.config.moe_router_topk,
        num_experts=self.num_experts,
        local=self.local_expert_indices,
        ep_size=self.ep_size,
        tp_size=self.tp_size,
        topk=self.config.moe_router_topk,
    )
    moe_dispatch.counts["made_up"] = True
    self.num_out_tokens = splits.total
    self.input_splits = splits.sent
    self.output_splits = splits.received
    self.output_splits_tp = splits.received_tp
    self.num_global_tokens_per_local_expert = splits.table
    return splits.per_local_expert


@PATCHES.patch(
    "megatron.core.transformer.moe.token_dispatcher",
    "MoEAllGatherTokenDispatcher.dispatch_postprocess",
    at=":299 @0.16.1; :321 @0.19.0",
    tiers=META,
)
def _balanced_gathered(module: ModuleType, context: PatchContext) -> None:
    """The same where every rank gathers all tokens and keeps those of its experts."""

    def call(original: Original, self: Any, hidden_states: Any, probs: Any) -> Any:
        self.hidden_shape_before_permute = hidden_states.shape
        # as Megatron does up to the counts, which have no values
        local = slice(self.local_expert_indices[0], self.local_expert_indices[-1] + 1)
        self.local_map = self.routing_map[:, local].contiguous()
        chosen = probs[:, local].contiguous()
        self.local_map.sum(dim=0).long()  # the counts that the host would read
        if cuda.watcher is not None:
            cuda.watcher.host_waited("token counts")
        moe_dispatch.follow(self.config)
        splits = moe_dispatch.balanced_splits(
            self,
            total=self.routing_map.shape[0] * self.config.moe_router_topk,
            num_experts=self.config.num_moe_experts,
            local=self.local_expert_indices,
            # all tokens are here already: nothing is sent
            ep_size=1,
            tp_size=1,
            topk=self.config.moe_router_topk,
        )
        moe_dispatch.counts["made_up"] = True
        total = int(splits.per_local_expert.sum())
        permuted, _, self.reversed_local_input_permutation_mapping, *_ = module.permute(
            hidden_states,
            self.local_map,
            num_out_tokens=total,
            fused=self.config.moe_permute_fusion,
        )
        self.local_probs = moe_dispatch.masked_select(
            chosen.T.contiguous(), self.local_map.T.contiguous(), total
        )
        self.routing_map = None
        return permuted, splits.per_local_expert, self.local_probs

    context.replace(module, call)


@PATCHES.patch(
    "megatron.core.transformer.moe.fused_a2a:fused_dispatch",
    "fused_combine",
    "set_deepep_num_sms",
    "hybrid_ep_dispatch",
    "hybrid_ep_combine",
    at=":200, :480 @0.19.0",
    tiers=META,
)
def _fused_dispatch(module: ModuleType, context: PatchContext) -> None:
    """DeepEP and HybridEP write into the memory of other GPUs."""
    for name in ("fused_dispatch", "fused_combine", "hybrid_ep_dispatch", "hybrid_ep_combine"):
        context.set(module, name, getattr(moe_dispatch, name))
    context.set(module, "set_deepep_num_sms", lambda number: None)


@PATCHES.patch(
    "megatron.core.transformer.moe.token_dispatcher:_HybridEPManager.setup_metadata",
    "_DeepepManager.setup_metadata",
    "_DeepepManager._indices_to_multihot",
    at=":993, :1216 @0.19.0",
    tiers=META,
)
def _balanced_flex(module: ModuleType, context: PatchContext) -> None:
    """How many tokens arrive is a value: HybridEP's call does not say how many experts a token goes
    to, and DeepEP's map of experts is filled where its values say.
    """

    def metadata(original: Original, self: Any, *args: object, **kwargs: object) -> object:
        # experts of tensor parallelism count as experts of their own there
        ways = self.num_experts // self.config.num_moe_experts
        moe_dispatch.set_copies(self.config.moe_router_topk * ways)
        moe_dispatch.follow(self.config)
        moe_dispatch.counts["made_up"] = True
        return original(self, *args, **kwargs)

    def multihot(
        original: Original, self: Any, indices: torch.Tensor, probs: torch.Tensor
    ) -> object:
        return moe_dispatch.indices_to_multihot(indices, probs, self.num_local_experts)

    managers = ("_HybridEPManager", "_DeepepManager")
    context.replace(module, metadata, *(f"{owner}.setup_metadata" for owner in managers))
    context.replace(module, multihot, "_DeepepManager._indices_to_multihot")


@PATCHES.instead(
    "megatron.core.transformer.moe.moe_utils:permute",
    at=":289 @0.16.1; by argsort @0.19.0",
    releases="<0.19",
    tiers=META,
)
def _static_permute(
    context: PatchContext,
    original: Original,
    tokens: torch.Tensor,
    routing_map: torch.Tensor,
    probs: torch.Tensor | None = None,
    num_out_tokens: int | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> Any:
    """The unfused permutation selects by mask, which has no shape; its size is known beforehand."""
    # these give a shape without reading the map
    if fused or drop_and_pad or num_out_tokens is None:
        return original(tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad)
    return moe_dispatch.permute_shapes(tokens, probs, int(num_out_tokens))
