"""FP8 recipes, quantizers and quantized tensors, and whether FP8 is on.

(pytorch/quantization.py @v2.20.2.)  Shapes only: on tier ``cpu``, whose values would be wrong,
entering it raises UnsupportedError.  Delayed scaling alone has state: a scale and a history of
largest values for each tensor of a layer.  Those are reduced over ``fp8_group`` in one piece, when
the outermost autocast is left and when the first layer's backward is through.
"""

from __future__ import annotations

import contextlib
import enum
import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from megatron_prism.runtime.devices.kernels import fused
from megatron_prism.runtime.te.unsupported import refuse

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import Group


class Format(enum.Enum):
    """Largest value forward and backward (common/recipe/__init__.py @v2.9)."""

    E2M1 = (6.0, 6.0)
    E4M3 = (448.0, 448.0)
    E5M2 = (57344.0, 57344.0)
    HYBRID = (448.0, 57344.0)


class Recipe:
    """Base of the recipes: keeps what it is given, over the class's own defaults."""

    fp8_format = Format.HYBRID
    fp8_dpa = fp8_mha = False

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.args = args
        self.__dict__.update(kwargs)
        if os.environ.get("NVTE_BACKWARD_OVERRIDE") or getattr(self, "backward_override", None):
            refuse("FP8 with another precision in backward", fix="unset NVTE_BACKWARD_OVERRIDE")

    def __repr__(self) -> str:
        """Equal for recipes that say the same: it is a key (quantization.py:714 @v2.20.2)."""
        kept = {key: str(value) for key, value in vars(self).items() if key != "args"}
        return f"{type(self).__name__}({kept})"

    @classmethod
    def delayed(cls) -> bool:
        return issubclass(cls, DelayedScaling)

    @classmethod
    def mxfp8(cls) -> bool:
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        return issubclass(cls, (DelayedScaling, Float8CurrentScaling))

    @classmethod
    def float8_block_scaling(cls) -> bool:
        return issubclass(cls, Float8BlockScaling)

    @classmethod
    def nvfp4(cls) -> bool:
        return issubclass(cls, NVFP4BlockScaling)

    @classmethod
    def custom(cls) -> bool:
        return issubclass(cls, CustomRecipe)


class DelayedScaling(Recipe):
    """One scale a tensor, from the largest values of the last iterations."""

    amax_history_len = 1024
    amax_compute_algo: object = "max"
    reduce_amax = True


class Float8CurrentScaling(Recipe):
    """One scale a tensor, from its own largest value (Megatron's ``tensorwise``)."""


class Float8BlockScaling(Recipe):
    """A scale for 1 x 128 values, of a weight 128 x 128."""

    fp8_format = Format.E4M3


class MXFP8BlockScaling(Recipe):
    """A scale of 8 bits for 32 values; Blackwell."""

    fp8_format = Format.E4M3


class NVFP4BlockScaling(Recipe):
    """Can be named, not entered."""


class CustomRecipe(Recipe):
    """Can be named, not entered."""


Shape = tuple[int, ...]


class Quantized:
    """An FP8 tensor: ``rows`` and ``columns`` are values, each None if it is not kept."""

    def __init__(self, quantizer: Quantizer, shape: Shape) -> None:
        self.quantizer, self.shape = quantizer, shape
        self.rows: torch.Tensor | None = None
        self.columns: torch.Tensor | None = None
        self.row_scales: torch.Tensor | None = None
        self.column_scales: torch.Tensor | None = None
        self.scale: torch.Tensor | None = None  # of the whole tensor, where it has one
        self.wide = torch.bfloat16  # precision of what it was cast from

    def update_usage(self, rows: bool | None = None, columns: bool | None = None) -> None:
        """Drop what is not wanted; make values by columns of those by rows where that is possible.

        It is with one scale a tensor (storage/float8_tensor_storage.py:294 @v2.20.2) or with square
        blocks (storage/float8_blockwise_tensor_storage.py:459 @v2.20.2).
        """
        if columns and self.columns is None:
            self._transpose()
        if rows is False:
            self.rows = self.row_scales = None
        if columns is False:
            self.columns = self.column_scales = None

    def _transpose(self) -> None:
        assert self.rows is not None, "an FP8 tensor without values by rows cannot be transposed"
        made = self.quantizer.empty_columns(self.rows, self.shape)
        self.columns, self.column_scales = made
        fused("fp8_transpose", 0, self.rows, self.columns)

    def dequantize(self) -> torch.Tensor:
        """Its values in high precision, by way of fp32 where scales are by block
        (storage/float8_blockwise_tensor_storage.py:236 @v2.20.2)."""
        values = self.rows if self.rows is not None else self.columns
        assert values is not None
        values_fp32 = values.new_empty(self.shape, dtype=torch.float32)
        scaled = torch.empty_like(values_fp32)
        del values_fp32
        made = values.new_empty(self.shape, dtype=self.wide)
        fused("fp8_dequantize", 0, values, scaled, made)
        return made

    def clear(self) -> None:
        """Give the values back before autograd would (``clear`` of TE's storages).

        One scale a tensor may be shared, and stays (storage/float8_tensor_storage.py:123 @v2.20.2).
        """
        for tensor in (self.rows, self.columns, self.row_scales, self.column_scales):
            if tensor is not None:
                tensor.data = tensor.new_empty(0)

    def take(self) -> list[torch.Tensor | None]:
        """Its tensors, for autograd to keep (prepare_for_saving of TE's storages)."""
        taken = [self.rows, self.columns, self.row_scales, self.column_scales, self.scale]
        self.restore([None] * len(taken))
        return taken

    def restore(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Undo ``take``."""
        self.rows, self.columns, self.row_scales, self.column_scales, self.scale = tensors


class Quantizer:
    """How tensors become FP8 in one place of one layer."""

    kind = ""
    only_rows_gather = False  # supports_only_rowwise_all_gather (float8_tensor.py:190 @v2.20.2)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.rows = self.columns = True
        self.group: Group = None  # whose largest value counts, where that is asked for

    def set_usage(self, rows: bool | None = None, columns: bool | None = None) -> None:
        self.rows = self.rows if rows is None else rows
        self.columns = self.columns if columns is None else columns

    def fits(self, shape: Shape) -> bool:
        """Whether a tensor of this shape can be quantised before it is gathered."""
        return True

    def __call__(self, x: torch.Tensor) -> Quantized:
        return self.fill(x, self.make_empty(tuple(x.shape), x))

    def make_empty(self, shape: Shape, like: torch.Tensor) -> Quantized:
        made = Quantized(self, shape)
        if self.rows:
            made.rows, made.row_scales = self.empty_rows(like, shape)
        if self.columns:
            made.columns, made.column_scales = self.empty_columns(like, shape)
        made.scale = self.empty_scale(like)
        return made

    def fill(self, x: torch.Tensor, out: Quantized) -> Quantized:
        """Cast ``x`` into ``out``: one kernel."""
        out.wide = x.dtype
        fused("fp8_quantize", 0, x, out.rows, out.columns)
        return out

    def empty_rows(
        self, like: torch.Tensor, shape: Shape
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(values, scales or None) by rows."""
        return like.new_empty(shape, dtype=self.dtype), None

    def empty_columns(
        self, like: torch.Tensor, shape: Shape
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(values, scales or None) by columns: transposed."""
        return like.new_empty((shape[-1], *shape[:-1]), dtype=self.dtype), None

    def empty_scale(self, like: torch.Tensor) -> torch.Tensor | None:
        return None


class DelayedQuantizer(Quantizer):
    """Float8Quantizer: the scale is known before the tensor is."""

    kind = "delayed"
    only_rows_gather = True

    def empty_scale(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(1, dtype=torch.float32)


class CurrentQuantizer(DelayedQuantizer):
    """Float8CurrentScalingQuantizer: reads the tensor for its largest value first."""

    kind = "tensorwise"

    def fill(self, x: torch.Tensor, out: Quantized) -> Quantized:
        """The largest value may be that of a group: sequence parallelism gathers FP8 values."""
        largest = x.new_empty(2, dtype=torch.float32)  # and its scale (csrc/quantizer.cpp @v2.19)
        fused("fp8_amax", 0, x)
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(largest[:1], op=dist.ReduceOp.MAX, group=self.group)
        return super().fill(x, out)


class BlockQuantizer(Quantizer):
    """Float8BlockQuantizer: blocks of 128 values, or of 128 x 128 where ``square``."""

    kind = "blockwise"
    side = 128

    def __init__(self, dtype: torch.dtype, square: bool = False) -> None:
        super().__init__(dtype)
        self.square = square

    def fits(self, shape: Shape) -> bool:
        """is_quantizable (tensor/float8_blockwise_tensor.py:235 @v2.20.2)."""
        aligned = shape[-1] % self.side == 0 and math.prod(shape[:-1]) % self.side == 0
        return len(shape) > 1 and aligned and not self.square

    def empty_rows(
        self, like: torch.Tensor, shape: Shape
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        values, _ = super().empty_rows(like, shape)
        return values, self._scales(like, math.prod(shape[:-1]), shape[-1])

    def empty_columns(
        self, like: torch.Tensor, shape: Shape
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        values, _ = super().empty_columns(like, shape)
        return values, self._scales(like, shape[-1], math.prod(shape[:-1]))

    def _scales(self, like: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
        """fp32, of blocks along ``inner``, padded to 4 for the product."""
        if self.square:
            shape = (_up(outer, self.side) // self.side, _up(_up(inner, 128) // 128, 4))
        else:
            shape = (_up(inner, self.side) // self.side, _up(outer, 4))
        return like.new_empty(shape, dtype=torch.float32)


class MXQuantizer(Quantizer):
    """MXFP8Quantizer: blocks of 32 values, and nothing is transposed."""

    kind = "mxfp8"

    def fits(self, shape: Shape) -> bool:
        """is_quantizable (tensor/mxfp8_tensor.py:125 @v2.20.2)."""
        return len(shape) > 1 and shape[-1] % 32 == 0 and math.prod(shape[:-1]) % 32 == 0

    def empty_rows(
        self, like: torch.Tensor, shape: Shape
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows, width = math.prod(shape[:-1]), shape[-1]
        scales = (_up(rows, 128), _up(width // 32, 4))
        return like.new_empty(shape, dtype=self.dtype), like.new_empty(scales, dtype=torch.uint8)

    def empty_columns(
        self, like: torch.Tensor, shape: Shape
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows, width = math.prod(shape[:-1]), shape[-1]
        scales = (_up(rows // 32, 4), _up(width, 128))
        return like.new_empty(shape, dtype=self.dtype), like.new_empty(scales, dtype=torch.uint8)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def quantizer_of(recipe: Recipe, what: str) -> Quantizer:
    """For an ``input``, a ``weight`` or a ``grad`` (quantization.py:1588 @v2.20.2)."""
    wide = what == "grad" and recipe.fp8_format is Format.HYBRID
    dtype = torch.float8_e5m2 if wide else torch.float8_e4m3fn
    if recipe.delayed():
        return DelayedQuantizer(dtype)
    if recipe.float8_current_scaling():
        return CurrentQuantizer(dtype)
    if recipe.float8_block_scaling():
        return BlockQuantizer(dtype, square=what == "weight")
    if not recipe.mxfp8():
        refuse(f"recipe {type(recipe).__name__}", fix="delayed, tensorwise, blockwise or mxfp8")
    return MXQuantizer(dtype)


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
            if getattr(recipe, "reduce_amax", True) and group is not None and group.size() > 1:
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            fused("amax_and_scale_update", 0, largest)

    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip: object) -> None:
        """Only CUDA graphs ask for it."""


def _supported(recipe: Recipe) -> Recipe:
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
    manager.enter(_supported(wanted), amax_reduction_group or fp8_group)
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
    known = _supported(recipe or DelayedScaling())
    before = manager._parameters, manager.FP8_RECIPE
    manager._parameters, manager.FP8_RECIPE = enabled, known
    try:
        yield
    finally:
        manager._parameters, manager.FP8_RECIPE = before
