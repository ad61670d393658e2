"""Rows of each expert padded to what an FP8 product wants (module/fp8_padding.py @v2.20.2).

Padding is a copy of all rows, and so is taking it away; with counts that fit as they are there is
neither.  A router's counts hardly ever all fit, while the even shares that tier ``meta`` makes up
often do: where those are ``made_up``, every second expert gets a whole unit more, which is what
padding adds on the average.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_prism.runtime.devices.work import fused
from megatron_prism.runtime.te.fp8 import FP8GlobalStateManager

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import Context, Grads

__all__ = ["Fp8Padding", "Fp8Unpadding"]

counts = {"made_up": False}  # by the stand-in for the dispatcher's copy of them to the host


class _Resize(torch.autograd.Function):
    """Rows copied to their places among other gaps, ``to`` of them in all."""

    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, before: list[int], after: list[int]) -> torch.Tensor:
        ctx.lengths = before, after
        return _copied(x, before, after)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> Grads:
        before, after = ctx.lengths
        return _copied(grad.contiguous(), after, before), None, None


def _copied(x: torch.Tensor, before: list[int], after: list[int]) -> torch.Tensor:
    out = x.new_zeros(sum(after), x.shape[-1]) if not x.is_meta else None
    if out is None:
        out = x.new_empty(sum(after), x.shape[-1])
        fused("fused_multi_row_padding", 0, x, out)
        return out
    pairs = zip(torch.split(out, after), torch.split(x, before), strict=True)
    for to, rows in pairs:
        length = min(len(to), len(rows))
        to[:length] = rows[:length]
    return out


def _padded(splits: list[int], align: int | None) -> list[int]:
    if align is None:  # (quantization.py:262 @v2.20.2)
        align = 32 if FP8GlobalStateManager.get_fp8_recipe().mxfp8() else 16
    padded = [-(-count // align) * align for count in splits]
    if padded == splits and counts["made_up"]:
        padded = [count + align * (i % 2 == 0) for i, count in enumerate(padded)]
    return padded


class _Padding(torch.nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size


class Fp8Padding(_Padding):
    """module/fp8_padding.py:74 @v2.20.2."""

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, list[int]]:
        """(padded rows, how many of each expert)."""
        padded = _padded(m_splits, self.align_size)
        if padded == m_splits:
            return inp, m_splits
        return _Resize.apply(inp.view(-1, inp.shape[-1]), m_splits, padded), padded


class Fp8Unpadding(_Padding):
    """module/fp8_unpadding.py:72 @v2.20.2."""

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> torch.Tensor:
        """The rows without their padding."""
        padded = _padded(m_splits, self.align_size)
        if padded == m_splits:
            return inp
        made: torch.Tensor = _Resize.apply(inp.view(-1, inp.shape[-1]), padded, m_splits)
        return made
