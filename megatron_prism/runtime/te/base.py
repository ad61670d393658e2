"""The base of all modules (pytorch/module/base.py @v2.9), and the state that a layer keeps for FP8.

Parameters are made on ``device``, marked for tensor parallelism as Megatron expects, and
initialised under the caller's random tracker.  ``now_or_later`` is the end of every backward:
into ``main_grad`` or as a tensor of its own.  The cuBLAS workspace (base.py:71-103) is real memory
that the allocator counts, so it exists on ``meta`` too.
"""

from __future__ import annotations

import collections
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from megatron_prism.runtime.devices.kernels import fused
from megatron_prism.runtime.te.distributed import (
    gather_along_first_dim,
    group_size,
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
)
from megatron_prism.runtime.te.fp8 import (
    DelayedScaling,
    FP8GlobalStateManager,
    Quantized,
    Quantizer,
    Recipe,
    quantizer_of,
)
from megatron_prism.runtime.te.parameters_fp8 import QuantizedTensor, quantize_parameter
from megatron_prism.runtime.te.unsupported import refuse

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import (
        AutogradContext,
        Device,
        Group,
        Init,
        Trackers,
        Weight,
    )
    from megatron_prism.runtime.te.fp8 import Quantized

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


def keep(ctx: AutogradContext, *tensors: Kept) -> None:
    """save_for_backward of tensors and FP8 tensors (prepare_for_saving, quantized_tensor.py)."""
    flat: list[torch.Tensor | None] = []
    for tensor in tensors:
        flat += tensor.take() if isinstance(tensor, Quantized) else [tensor]
    ctx.save_for_backward(*flat)
    ctx.kept = tensors


def kept(ctx: AutogradContext) -> list[Any]:
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


Products = Callable[[], list[torch.Tensor | None]]
WORKSPACE_BYTES = 32 * 1024 * 1024 + 1024  # Hopper (base.py:78 @v2.9)
GROUPED_WORKSPACES = 4  # one per compute stream (common/util/multi_stream.cpp:50 @v2.9)
workspaces: dict[bool, list[torch.Tensor]] = {False: [], True: []}
dummies: dict[tuple[object, ...], torch.Tensor] = {}


def get_workspace(like: torch.Tensor | None = None, grouped: bool = False) -> torch.Tensor | None:
    """Touch the cuBLAS workspace; it takes memory on ``meta`` only.

    ``grouped`` products have workspaces of their own, one per stream (base.py:95 @v2.9).
    """
    held = workspaces[grouped]
    if not held and like is not None and like.is_meta:
        for _ in range(GROUPED_WORKSPACES if grouped else 1):
            held.append(like.new_empty(WORKSPACE_BYTES, dtype=torch.uint8))
    return held[0] if held else None


def rows_times(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x W^T + b``; on ``meta`` only its memory."""
    if x.is_meta:
        out = x.new_empty(x.shape[0], weight.shape[0])
        fused("gemm", 2 * x.numel() * weight.shape[0], x, weight, out)
        return out
    return torch.nn.functional.linear(x, weight, bias)


def rows_back(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``dy W``; on ``meta`` only its memory."""
    if not grad.is_meta:
        return grad @ weight
    out = grad.new_empty(grad.shape[0], weight.shape[1])
    fused("gemm", 2 * grad.numel() * weight.shape[1], grad, weight, out)
    return out


def clear(*tensors: torch.Tensor | None) -> None:
    """Give the memory back before autograd would (clear_tensor_data, pytorch/utils.py:37 @v2.9)."""
    for tensor in tensors:
        if tensor is not None:
            tensor.data = tensor.new_empty(0)


def get_dummy_wgrad(
    shape: Sequence[int], dtype: torch.dtype, zero: bool = False, device: Device = None
) -> torch.Tensor:
    """The shared tensor returned where the gradient went into ``main_grad`` (base.py:161 @v2.9)."""
    key = (*shape, dtype, str(device))
    if key not in dummies:
        dummies[key] = torch.empty(
            tuple(shape), dtype=dtype, device=device or "cuda", requires_grad=False
        )
    if zero:
        dummies[key].fill_(0)
    return dummies[key].detach()


def cast_if_needed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def set_tp_attributes(tensor: Weight, parallel: bool, dim: int, stride: int = 1) -> None:
    """The attributes that Megatron reads (pytorch/distributed.py:144 @v2.9)."""
    tensor.tensor_model_parallel = parallel
    tensor.partition_dim = dim
    tensor.partition_stride = stride


def _divide(features: int, parts: int) -> int:
    if features % parts:
        raise ValueError(f"{features} features do not divide by {parts} ranks")
    return features // parts


def check_no_userbuffers(kwargs: Mapping[str, object]) -> None:
    """Overlap through userbuffers and other options that change what the layer does."""
    for name, value in kwargs.items():
        if name.startswith("ub_") and name != "ub_name" and value:
            refuse(f"userbuffers ({name})", fix="leave --tp-comm-overlap out")
        if name == "symmetric_ar_type" and value is not None:
            refuse("symmetric-memory all-reduce")


def now_or_later(
    weights: Sequence[Weight], opts: SimpleNamespace, products: Products
) -> list[torch.Tensor | None]:
    """What autograd gets for ``weights``: gradients that ``products`` computes now, or leaves to
    ``backward_dw`` (base.py:1442 @v2.9)."""
    found: list[torch.Tensor | None] = [None] * len(weights)
    if opts.delayed is None:
        found = products()
    else:
        opts.delayed.append(_postponed(weights, opts, products))
    if not opts.fuse_wgrad:
        return found
    return [fused_gradient(weight, weight.main_grad) for weight in weights]


def _postponed(
    weights: Sequence[Weight], opts: SimpleNamespace, products: Products
) -> Callable[[], None]:
    def compute() -> None:
        for weight, dweight in zip(weights, products(), strict=True):
            if not opts.fuse_wgrad:
                weight.grad = dweight

    return compute


def weight_product(
    weight: Weight,
    inputs: torch.Tensor | None,
    grad: torch.Tensor,
    opts: SimpleNamespace,
    main_grad: torch.Tensor | None,
) -> torch.Tensor | None:
    """The product alone, also where the backward has postponed it; None if it was added."""
    assert inputs is not None, "a weight's gradient without its input"
    if grad.is_meta:
        fused("gemm_wgrad", 2 * grad.numel() * inputs.shape[1], grad, inputs, weight)
    if not opts.fuse_wgrad:
        shape = (grad.shape[1], inputs.shape[1])
        return grad.new_empty(shape) if grad.is_meta else grad.t() @ inputs
    overwrite = opts.first_microbatch or getattr(weight, "overwrite_main_grad", False)
    assert main_grad is not None
    if not main_grad.is_meta:  # the fused kernel writes in place and takes nothing
        product = (grad.t() @ inputs).to(main_grad.dtype)
        main_grad.copy_(product) if overwrite else main_grad.add_(product)
    return None


def fused_gradient(weight: Weight, main_grad: torch.Tensor) -> torch.Tensor | None:
    """What autograd gets where the gradient goes into ``main_grad``, now or later: Megatron's DDP
    wants one to be there."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    zero = getattr(weight, "zero_out_wgrad", False)
    return get_dummy_wgrad(main_grad.shape, weight.dtype, zero, weight.device)


@dataclass(frozen=True)
class ParameterInit:
    """What Megatron-FSDP reads of a parameter of a module on the meta device."""

    init_fn: Init | None
    fp8_meta_index: None = None  # FP8 parameters are refused there


class TransformerEngineBaseModule(torch.nn.Module):
    """Parameters, tracker, groups and the checkpoint's extra state."""

    weight: Weight
    bias: Weight

    def __init__(self) -> None:
        super().__init__()
        self.name: str | None = None
        self.activation_dtype: torch.dtype | None = None
        self.fp8 = self.fp8_initialized = self.fp8_calibration = False
        self.primary_weights_in_fp8 = False  # what Megatron-FSDP asks; it refuses FP8 parameters
        self.fp8_meta: dict[str, object] = {"recipe": None, "fp8_checkpoint": False}
        self.fp8_state: LayerState | None = None
        self.fp8_weights: dict[str, Quantized] = {}
        self.tp_group: Group = None
        self.tp_size = 1
        self.sequence_parallel = False
        self.param_init_meta: dict[str, ParameterInit] = {}
        self.get_rng_state_tracker: Trackers | None = None
        self.rng_tracker_name: str | None = None
        self.delayed: list[Callable[[], None]] = []
        self.delay_wgrad_compute = False
        self.wgrad_accumulation_and_reduce_hooks: list[Callable[[], None]] = []

    def fast_setattr(self, name: str, value: object) -> None:
        self.__dict__[name] = value

    def set_parallel(self, tp_group: Group, tp_size: int, sequence_parallel: bool) -> None:
        """Group, size (of the group where there is one) and whether activations are sharded."""
        self.tp_group = tp_group
        self.tp_size = group_size(tp_group) if tp_group is not None else tp_size
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel

    def set_linear(
        self,
        in_features: int,
        out_features: int,
        parallel_mode: str | None,
        *,
        bias: bool,
        return_bias: bool,
        fuse_wgrad_accumulation: bool,
        delay_wgrad_compute: bool,
    ) -> None:
        """Features of this rank's shard (after ``set_parallel``); where bias and gradients go."""
        self.parallel_mode = parallel_mode
        self.in_features, self.out_features = in_features, out_features
        if parallel_mode == "column":
            self.out_features = _divide(out_features, self.tp_size)
        elif parallel_mode == "row":
            self.in_features = _divide(in_features, self.tp_size)
        self.use_bias, self.return_bias = bias, return_bias
        self.apply_bias = bias and not return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute

    def set_tensor_parallel_group(self, tp_group: Group) -> None:
        self.tp_group = tp_group
        self.tp_group_initialized = True

    def add_parameter(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None,
        device: Device,
        init: Init | None,
    ) -> Weight:
        """A parameter that ``reset_parameters`` initialises with ``init``."""
        data = torch.empty(shape, dtype=dtype or torch.get_default_dtype(), device=device)
        self.register_parameter(name, torch.nn.Parameter(data))
        self.param_init_meta[name] = ParameterInit(init)
        return getattr(self, name)

    def reset_parameters(self, defer_init: bool = False) -> None:
        if defer_init:
            return
        for name, meta in self.param_init_meta.items():
            param, init = getattr(self, name), meta.init_fn
            if init is None:
                continue
            if self.get_rng_state_tracker is None:
                init(param)
                continue
            names = (self.rng_tracker_name,) if self.rng_tracker_name else ()
            with self.get_rng_state_tracker().fork(*names):
                init(param)
        self.quantize_parameters()

    def quantize_parameters(self) -> None:
        """Weights become FP8 where fp8_model_init says so (``parameters_fp8``)."""
        linear = hasattr(self, "in_features")  # a norm's weight stays as it is
        names = [name for name in self.param_init_meta if linear and name.startswith("weight")]
        state = begin_parameters(self, len(names))
        if state is not None:
            for name, quantizer in zip(names, state.weights, strict=True):
                quantize_parameter(self, name, quantizer)

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Made when a layer first runs in FP8 (``layer_fp8.begin``)."""

    def get_extra_state(self) -> torch.Tensor:
        """Empty without state for FP8 (base.py:827 @v2.9)."""
        if self.fp8_state is None or not self.fp8_meta["fp8_checkpoint"]:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        held: torch.Tensor = self.fp8_state.saved()
        return held

    def set_extra_state(self, state: object) -> None:
        """Restores nothing: there are no values, and FP8's state is made anew."""

    def gather_grad(self, grad: torch.Tensor, row: bool) -> torch.Tensor:
        """[tokens, features] of the output's gradient, gathered if it is sharded."""
        return gather_grad(grad, row and self.sequence_parallel, self.tp_group)

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        self.wgrad_accumulation_and_reduce_hooks.append(hook)

    def need_backward_dw(self) -> bool:
        return self.delay_wgrad_compute

    def backward_dw(self) -> None:
        """Compute the weight gradients that the backward postponed."""
        with torch.no_grad():  # TE's kernels know no autograd; nobody's backward runs around this
            while self.delayed:
                self.delayed.pop(0)()
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()


def gather_grad(grad: torch.Tensor, sharded: bool, group: Group) -> torch.Tensor:
    """[tokens, features] of the output's gradient, gathered if it is sharded (base.py:1103)."""
    grad = grad.reshape(-1, grad.shape[-1]).contiguous()
    return gather_along_first_dim(grad, group)[0] if sharded else grad


def general_gemm(
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    workspace: object = None,
    out_dtype: torch.dtype | None = None,
    quantization_params: object = None,
    gelu: object = None,
    gelu_in: object = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    ub: object = None,
    **rest: object,
) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
    """(op(B) @ op(A), gradient of the bias, None, None); ``layout`` is op(A) then op(B).

    ``T`` means that A, stored [n, k], is used as [k, n]; likewise for B.  With ``grad`` the bias is
    not added: its gradient is the sum of B's rows.
    """
    if gelu or ub is not None or quantization_params is not None or alpha != 1.0:
        refuse("general_gemm with gelu, userbuffers, quantisation or alpha")
    get_workspace(A)
    left = B.t() if layout[1] == "T" else B
    right = A.t() if layout[0] == "T" else A
    dtype = out_dtype or (out.dtype if out is not None else A.dtype)
    db = B.new_empty(B.shape[-1]) if grad and bias is not None else None
    if A.is_meta:
        shape = (*left.shape[:-1], right.shape[-1])
        out = out if out is not None else A.new_empty(shape, dtype=dtype)
        fused("gemm", 2 * left.numel() * right.shape[-1], left, right, out)
        return out, db, None, None
    wide = torch.promote_types(dtype, torch.promote_types(A.dtype, B.dtype))
    product = left.to(wide) @ right.to(wide)
    if db is not None:
        db.copy_(B.reshape(-1, B.shape[-1]).sum(0))
    elif bias is not None:
        product = product + bias
    if out is None:
        return product.to(dtype), db, None, None
    out.add_(product) if accumulate else out.copy_(product)
    return out, db, None, None
