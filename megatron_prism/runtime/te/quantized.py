"""What is an FP8 tensor made of?  Its values by rows, by columns, and its scales.

Products want both operands along the contracted dimension, so a tensor is kept by rows, by columns
or both (``set_usage``).  On Hopper values by columns are a tensor of their own, transposed, with
one scale a tensor (tensor/float8_tensor.py @v2.20.2, non-TN products come with Blackwell) or one a
block (tensor/float8_blockwise_tensor.py:162 @v2.20.2); MXFP8 does not transpose
(tensor/mxfp8_tensor.py:139 @v2.20.2).  Sizes are those that csrc/quantizer.cpp allocates.

Shapes only: nothing here has values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from megatron_prism.runtime.devices.work import fused
from megatron_prism.runtime.te.comm import group_size
from megatron_prism.runtime.te.recipes import Format, Recipe
from megatron_prism.runtime.te.unsupported import refuse

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import Group

__all__ = ["Quantized", "Quantizer", "quantizer_of"]

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
        if group_size(self.group) > 1:
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
