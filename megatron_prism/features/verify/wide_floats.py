"""float64 in place of float32, for all of a process that is imported behind it."""

from __future__ import annotations

import torch


def widen() -> None:
    """Let ``torch.float32`` and its other names mean float64: a job is computed with 53 bits."""
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    torch.set_default_dtype(torch.float64)
