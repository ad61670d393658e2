"""Is FP8 on, by which recipe, and what does that cost a layer that holds state for it?

(pytorch/quantization.py @v2.20.2.)  Shapes only: on tier ``cpu``, whose values would be wrong,
entering it raises UnsupportedError.  Delayed scaling alone has state: a scale and a history of
largest values for each tensor of a layer.  Those are reduced over ``fp8_group`` in one piece, when
the outermost autocast is left and when the first layer's backward is through.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from megatron_prism.runtime.devices.work import fused
from megatron_prism.runtime.te.comm import group_size
from megatron_prism.runtime.te.recipes import DelayedScaling, Recipe
from megatron_prism.runtime.te.unsupported import refuse

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import Group

__all__ = ["FP8GlobalStateManager", "autocast", "fp8_model_init"]


Autocast = tuple[bool, Recipe | None, "Group", bool]


class FP8GlobalStateManager:
    """The state of the process: autocast's, and the amaxes of every layer in it."""

    HAS_FP8_TENSORS = False
    IS_FIRST_FP8_MODULE = False
    FP8_RECIPE: Recipe | None = None
    FP8_GROUP: Group = None
    _enabled = _parameters = False
    _depth = 0
    amaxes: dict[tuple[bool, str, int], list[torch.Tensor]] = {}  # key -> histories
    groups: dict[tuple[bool, str, int], tuple[Recipe, Group]] = {}

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls._enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return False

    fp8_graph_capturing = is_fp8_calibration

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Whether layers that are made now have parameters in FP8."""
        return cls._parameters

    with_high_precision_init_val = with_fp8_parameters

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """True for the first layer that asks within an autocast."""
        first, cls.IS_FIRST_FP8_MODULE = cls.IS_FIRST_FP8_MODULE, False
        return first

    @classmethod
    def is_fp8_available(cls) -> tuple[bool, str]:
        return True, ""

    is_mxfp8_available = is_fp8_block_scaling_available = is_fp8_available

    @classmethod
    def is_nvfp4_available(cls) -> tuple[bool, str]:
        return False, "the virtual Transformer Engine has no FP4"

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        return cls.FP8_RECIPE or DelayedScaling()

    @classmethod
    def get_fp8_group(cls) -> Group:
        return cls.FP8_GROUP

    @classmethod
    def reset(cls) -> None:
        """As after import."""
        cls.set_autocast_state((False, None, None, False))
        cls._depth = 0
        cls.amaxes.clear()
        cls.groups.clear()

    @classmethod
    def get_autocast_state(cls) -> Autocast:
        return cls._enabled, cls.FP8_RECIPE, cls.FP8_GROUP, cls.IS_FIRST_FP8_MODULE

    @classmethod
    def set_autocast_state(cls, state: Autocast) -> None:
        cls._enabled, cls.FP8_RECIPE, cls.FP8_GROUP, cls.IS_FIRST_FP8_MODULE = state

    get_fp8_autocast_state, set_fp8_autocast_state = get_autocast_state, set_autocast_state

    @classmethod
    def enter(cls, recipe: Recipe, group: Group) -> None:
        """autocast_enter (quantization.py:730 @v2.20.2)."""
        cls._enabled, cls.FP8_RECIPE, cls.FP8_GROUP = True, recipe, group
        if cls._depth == 0:
            cls.IS_FIRST_FP8_MODULE = True
        cls._depth += 1

    @classmethod
    def leave(cls, state: Autocast) -> None:
        """autocast_exit (quantization.py:772 @v2.20.2)."""
        cls.set_autocast_state(state)
        cls._depth -= 1
        if cls._depth == 0 and torch.is_grad_enabled():
            cls.reduce_and_update_fp8_tensors(forward=True)

    @classmethod
    def add(cls, recipe: Recipe, history: dict[bool, torch.Tensor]) -> None:
        """A layer of delayed scaling takes part in the reductions from now on (:501 @v2.20.2)."""
        for forward in (True, False):
            key = (forward, repr(recipe), id(cls.FP8_GROUP))
            cls.amaxes.setdefault(key, []).append(history[forward])
            cls.groups[key] = (recipe, cls.FP8_GROUP)

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """One all-reduce of all amaxes of a direction (quantization.py:656 @v2.20.2)."""
        for key, histories in cls.amaxes.items():
            if key[0] != forward:
                continue
            recipe, group = cls.groups[key]
            largest = torch.cat([history[0] for history in histories])
            if getattr(recipe, "reduce_amax", True) and group_size(group) > 1:
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            fused("amax_and_scale_update", 0, largest)

    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip: object) -> None:
        """Only CUDA graphs ask for it."""


def _known(recipe: Recipe) -> Recipe:
    if recipe.nvfp4() or recipe.custom():
        refuse(f"recipe {type(recipe).__name__}", fix="delayed, tensorwise, blockwise or mxfp8")
    if recipe.fp8_dpa or recipe.fp8_mha:
        refuse("attention in FP8", fix="leave fp8_dot_product_attention and "
               "fp8_multi_head_attention of the model's configuration as they are")  # fmt: skip
    return recipe


@contextlib.contextmanager
def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Group = None,
    _graph: bool = False,
    recipe: Recipe | None = None,
    amax_reduction_group: Group = None,
) -> Iterator[None]:
    """``fp8_autocast`` and its newer name, whose arguments have other names."""
    manager, wanted = FP8GlobalStateManager, recipe or fp8_recipe or DelayedScaling()
    before = manager.get_autocast_state()
    if not enabled:
        manager._enabled = False
        try:
            yield
        finally:
            manager.set_autocast_state(before)
        return
    if calibrating:
        refuse("FP8 calibration")
    manager.enter(_known(wanted), amax_reduction_group or fp8_group)
    try:
        yield
    finally:
        manager.leave(before)


@contextlib.contextmanager
def fp8_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
) -> Iterator[None]:
    """Layers made inside have parameters in FP8 (quantization.py:878 @v2.20.2)."""
    manager = FP8GlobalStateManager
    known = _known(recipe or DelayedScaling())
    before = manager._parameters, manager.FP8_RECIPE
    manager._parameters, manager.FP8_RECIPE = enabled, known
    try:
        yield
    finally:
        manager._parameters, manager.FP8_RECIPE = before
