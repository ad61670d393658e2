"""What is changed where multi-token prediction asks all ranks, and why.  Same form as ``seams``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatron_prism.emulate.patch import Context, Patch

__all__ = ["PATCHES"]

_MTP = "mtp"  # optimizer.py:150 @0.19.0


def _settings() -> Any:
    """The script's arguments; None where it has none: a recipe's job, which has no such layers."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)


def _norm_of_heads(module: ModuleType, context: Context) -> None:
    """With ``--mtp-detach-heads`` MTP layers have a gradient norm of their own, which all ranks add
    up if one of them has such layers.  Ranks ask each other that; mirrored ones would all be like
    this one, and a stage without MTP layers would leave a call out that the others make."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, group: str) -> bool:
            found = original(self, group)
            if group != _MTP or context.all_local():
                return found
            args = _settings()
            detached = getattr(args, "mtp_detach_heads", False) and args.mtp_num_layers
            return bool(found or detached)

        return call

    for name in ("MegatronOptimizer", "LayerWiseDistributedOptimizer"):
        owner = getattr(module, name, None)
        if owner is not None and owner.__module__ == module.__name__:
            context.replace(owner, "has_grad_norm_group", make)


PATCHES: tuple[Patch, ...] = tuple(
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
