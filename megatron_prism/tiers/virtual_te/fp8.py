"""FP8 as far as Megatron's import goes: recipes can be made, autocast can be entered switched off.

Entering it switched on raises UnsupportedError (pytorch/quantization.py @v2.9).
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from typing import Any

import torch

from megatron_prism.tiers.virtual_te.unsupported import refuse

__all__ = ["FP8GlobalStateManager", "Format", "QuantizedTensor", "autocast", "fp8_model_init"]


class Format(enum.Enum):
    """Largest value forward and backward (common/recipe/__init__.py @v2.9)."""

    E2M1 = (6.0, 6.0)
    E4M3 = (448.0, 448.0)
    E5M2 = (57344.0, 57344.0)
    HYBRID = (448.0, 57344.0)


class Recipe:
    """Base of the recipes: keeps what it is given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.__dict__.update(kwargs)

    def delayed(self) -> bool:
        return isinstance(self, DelayedScaling)

    def mxfp8(self) -> bool:
        return isinstance(self, MXFP8BlockScaling)

    def float8_current_scaling(self) -> bool:
        return isinstance(self, Float8CurrentScaling)

    def float8_block_scaling(self) -> bool:
        return isinstance(self, Float8BlockScaling)

    def nvfp4(self) -> bool:
        return isinstance(self, NVFP4BlockScaling)


class DelayedScaling(Recipe):
    """common/recipe/__init__.py @v2.9."""


class Float8CurrentScaling(Recipe):
    """common/recipe/__init__.py @v2.9."""


class Float8BlockScaling(Recipe):
    """common/recipe/__init__.py @v2.9."""


class MXFP8BlockScaling(Recipe):
    """common/recipe/__init__.py @v2.9."""


class NVFP4BlockScaling(Recipe):
    """common/recipe/__init__.py @v2.9."""


class CustomRecipe(Recipe):
    """common/recipe/__init__.py @v2.9."""


class FP8GlobalStateManager:
    """FP8 is never on."""

    HAS_FP8_TENSORS = False
    IS_FIRST_FP8_MODULE = False

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return False

    is_fp8_calibration = with_fp8_parameters = is_fp8_enabled
    is_first_fp8_module = fp8_graph_capturing = is_fp8_enabled
    with_high_precision_init_val = is_fp8_enabled

    @classmethod
    def is_fp8_available(cls) -> tuple[bool, str]:
        return False, "the virtual Transformer Engine has no FP8"

    is_mxfp8_available = is_fp8_block_scaling_available = is_nvfp4_available = is_fp8_available

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        return DelayedScaling()

    @classmethod
    def get_fp8_group(cls) -> None:
        return None

    @classmethod
    def reset(cls) -> None:
        """No state."""

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """No FP8 tensors."""

    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip: Any) -> None:
        """No FP8 weights."""

    get_fp8_autocast_state = get_autocast_state = get_fp8_group

    @classmethod
    def set_fp8_autocast_state(cls, state: Any) -> None:
        """No state."""

    set_autocast_state = set_fp8_autocast_state


@contextlib.contextmanager
def autocast(enabled: bool = True, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Does nothing if it is switched off."""
    if enabled:
        refuse("FP8 or FP4 autocast", fix="leave --fp8-format and --fp4-format out")
    yield


@contextlib.contextmanager
def fp8_model_init(enabled: bool = True, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Does nothing if it is switched off."""
    if enabled:
        refuse("FP8 parameters", fix="leave --fp8-param-gather out")
    yield


class QuantizedTensor(torch.Tensor):
    """Nothing is one."""
