"""Which FP8 recipes are there, and what do they say of a tensor (common/recipe/__init__.py)?

Only what decides memory and communication is kept: the formats, the length of the amax history and
whether amaxes are reduced.  How many dimensions a block has is TE's default (``quantized``).
"""

from __future__ import annotations

import enum
import os

from megatron_prism.runtime.te.unsupported import refuse

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "Recipe",
]


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
