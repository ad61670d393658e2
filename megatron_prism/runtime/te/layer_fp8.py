"""What does a layer keep for FP8: its quantizers, delayed scaling's state, its weight in FP8?

(pytorch/module/base.py @v2.20.2.)  The weight in FP8 stays from the first microbatch to the last of
an iteration and is filled anew in the next, so that it is memory of the whole run.
"""

from __future__ import annotations

import collections
import pickle
from typing import TYPE_CHECKING, Any

import torch

from megatron_prism.runtime.te.fp8 import FP8GlobalStateManager
from megatron_prism.runtime.te.parameters_fp8 import QuantizedTensor
from megatron_prism.runtime.te.quantized import Quantized, Quantizer, quantizer_of
from megatron_prism.runtime.te.recipes import DelayedScaling, Recipe
from megatron_prism.runtime.te.rng import (
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
)
from megatron_prism.runtime.te.unsupported import refuse

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import Context, Device
    from megatron_prism.runtime.te.base import TransformerEngineBaseModule

__all__ = [
    "LayerState",
    "begin",
    "begin_parameters",
    "first_module",
    "keep",
    "kept",
    "quantized_weight",
    "weight_usage",
]

Kept = Quantized | torch.Tensor | None
TENSORS = {True: 3, False: 2}  # of a product, forward and backward (module/base.py:1139 @v2.20.2)


class LayerState:
    """Quantizers of one layer's tensors, and the state that delayed scaling keeps for them.

    products : how many it has (GroupedLinear: one per expert)
    """

    def __init__(self, recipe: Recipe, products: int, device: Device) -> None:
        self.recipe, self.products = recipe, products
        self.inputs, self.weights, self.grads = (
            [quantizer_of(recipe, what) for _ in range(products)]
            for what in ("input", "weight", "grad")
        )
        self.history: dict[bool, torch.Tensor] = {}
        self.scale: dict[bool, torch.Tensor] = {}
        self.stash: collections.deque[list[torch.Tensor]] = collections.deque()
        self.updated: list[torch.Tensor] | None = None
        self.registered = False
        if not isinstance(recipe, DelayedScaling):
            return
        for forward, count in TENSORS.items():  # DelayedScalingRecipeState
            shape = (recipe.amax_history_len, products * count)
            self.scale[forward] = torch.ones(shape[1], device=device)
            self.history[forward] = torch.zeros(shape, device=device)

    def begin(self, recompute: bool, again: bool) -> None:
        """prepare_forward (module/base.py:1587 @v2.20.2).

        recompute : in a checkpointed region; again : it runs a second time
        """
        if not self.history:
            return
        if again:  # the scales of the first time, kept for it (quantization.py:785, :813)
            self.updated = [self.history[True].clone(), self.scale[True].clone()]
            self.stash.popleft()
            return
        if not self.registered:
            FP8GlobalStateManager.add(self.recipe, self.history)
            self.registered = True
        if recompute:
            self.stash.append([self.history[True].clone(), self.scale[True].clone()])

    def saved(self) -> torch.Tensor:
        """What a checkpoint holds of it: bytes on the host (module/base.py:1354 @v2.20.2)."""
        if not self.history:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        state: dict[str, object] = {"recipe": self.recipe}
        for forward, name in ((True, "fwd"), (False, "bwd")):
            for kind, held in (("scale", self.scale), ("amax_history", self.history)):
                state[f"{kind}_{name}"] = torch.zeros(held[forward].shape, device="cpu")
        state["extra_fp8_variables"] = {"fp8_checkpoint": True, "num_gemms": self.products}
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


def begin(module: TransformerEngineBaseModule, products: int = 1) -> LayerState | None:
    """The LayerState with which ``module`` runs now, None without FP8 (base.py:1528 @v2.20.2)."""
    manager = FP8GlobalStateManager
    module.fp8 = module.fp8_meta["fp8_checkpoint"] = manager.is_fp8_enabled()
    if not module.fp8:
        return None
    recipe, device = manager.get_fp8_recipe(), next(module.parameters()).device
    if device.type != "meta":
        refuse("FP8 with values", fix="--prism-tier meta, which has no values, or leave "
               "--fp8-format out")  # fmt: skip
    state = module.fp8_state
    if state is None or not isinstance(recipe, type(state.recipe)):
        module.fp8_state = state = LayerState(recipe, products, device)
        module.fp8_weights.clear()
    module.fp8_meta["recipe"] = recipe
    state.begin(is_fp8_activation_recompute_enabled(), in_fp8_activation_recompute_phase())
    return state


def begin_parameters(module: TransformerEngineBaseModule, products: int) -> LayerState | None:
    """The LayerState of a layer whose weights are FP8 themselves, None for others."""
    manager = FP8GlobalStateManager
    if not manager.with_fp8_parameters() or not products:
        return None
    device = next(module.parameters()).device
    if device.type != "meta":
        refuse("FP8 parameters with values", fix="--prism-tier meta, which has no values")
    module.fp8_state = LayerState(manager.get_fp8_recipe(), products, device)
    return module.fp8_state


def quantized_weight(
    module: TransformerEngineBaseModule,
    weight: torch.Tensor,
    quantizer: Quantizer,
    first: bool | None,
    name: str,
) -> tuple[Quantized, bool]:
    """(the weight in FP8, whether it stays for the next microbatch) (base.py:792 @v2.20.2).

    first : of the microbatches; None: Megatron does not say, and nothing is kept
    """
    if isinstance(weight, QuantizedTensor):
        weight.held.update_usage(columns=True)  # as its own quantizer wants it (base.py:835)
        return weight.held, True
    held = module.fp8_weights.get(name) if first is not None else None
    if held is not None and (
        held.columns is not None or not quantizer.columns or quantizer.kind == "blockwise"
    ):  # _is_weight_workspace_valid (base.py:757), which says nothing of blocks
        if first:
            quantizer.fill(weight, held)
        return held, True
    made = quantizer(weight)
    if first is not None:
        module.fp8_weights[name] = made
    return made, first is not None


def first_module() -> bool:
    """Whether this is the first layer of an autocast; a recompute does not use that up
    (_check_fp8_reduce_and_update, module/linear.py:320 @v2.20.2)."""
    before = FP8GlobalStateManager.IS_FIRST_FP8_MODULE
    first = FP8GlobalStateManager.is_first_fp8_module()
    if in_fp8_activation_recompute_phase():
        FP8GlobalStateManager.IS_FIRST_FP8_MODULE = before
    return first


def weight_usage(needs_input_grad: bool) -> bool:
    """Whether the weight is wanted by columns, too (module/linear.py:571 @v2.20.2)."""
    first_pass = is_fp8_activation_recompute_enabled() and not in_fp8_activation_recompute_phase()
    return needs_input_grad or first_pass


def keep(ctx: Context, *tensors: Kept) -> None:
    """save_for_backward of tensors and FP8 tensors (prepare_for_saving, quantized_tensor.py)."""
    flat: list[torch.Tensor | None] = []
    for tensor in tensors:
        flat += tensor.take() if isinstance(tensor, Quantized) else [tensor]
    ctx.save_for_backward(*flat)
    ctx.kept = tensors


def kept(ctx: Context) -> list[Any]:
    """What ``keep`` was given."""
    flat: list[torch.Tensor | None] = list(ctx.saved_tensors)
    found: list[Kept] = []
    for tensor in ctx.kept:
        if not isinstance(tensor, Quantized):
            found.append(flat.pop(0))
            continue
        count = len(tensor.take())
        tensor.restore(flat[:count])
        del flat[:count]
        found.append(tensor)
    ctx.kept = None
    return found
