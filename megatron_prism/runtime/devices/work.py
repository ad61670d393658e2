"""What would a fused kernel have done?  Stand-ins that only allocate announce it here.

While a slice is captured ``meter`` is the recorder's; else nobody listens and nothing is counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron_prism.runtime.recorder.shapes_meter import Meter

__all__ = ["fused"]

meter: Meter | None = None


def fused(name: str, flops: int, *tensors: torch.Tensor | None) -> None:
    """One kernel ``name``: ``flops``, and ``tensors`` are what it reads and writes once."""
    if meter is not None:
        there = [t for t in tensors if t is not None]
        traffic = sum(t.numel() * t.element_size() for t in there)
        meter.add(name, int(flops), traffic, there)
