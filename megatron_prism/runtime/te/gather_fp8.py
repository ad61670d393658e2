"""How are FP8 tensors gathered along their first dimension (pytorch/distributed.py:1003 @v2.20.2)?

With one scale a tensor only values by rows travel, and values by columns are made of them after;
with blocks both travel with their scales, those whose first dimension is not the gathered one
through a buffer of their own that is reordered once they are there.  Parts that are not of whole
blocks travel in high precision.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from megatron_prism.runtime.devices.work import fused
from megatron_prism.runtime.te.comm import group_size
from megatron_prism.runtime.te.quantized import Quantized, Quantizer

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.signatures import Group, Handle

__all__ = ["gather_quantized"]


Move = tuple[torch.Tensor | None, torch.Tensor | None]  # (to, part)


class _Handle:
    """What is left to wait for, and what comes after it (distributed.py:976 @v2.20.2)."""

    def __init__(self, wait: Callable[[], object], after: Callable[[], None]) -> None:
        self._wait, self._after = wait, after

    def wait(self) -> None:
        self._wait()
        self._after()


def gather_quantized(
    x: torch.Tensor | Quantized, group: Group, quantizer: Quantizer, async_op: bool = False
) -> tuple[Quantized, Handle | None]:
    """(all members' ``x`` in FP8, handle or None)."""
    size = group_size(group)
    if size == 1:
        return (x if isinstance(x, Quantized) else quantizer(x)), None
    if quantizer.only_rows_gather:
        return _by_rows(x, group, size, quantizer, async_op)
    if not quantizer.fits(tuple(x.shape)):
        # gathered in high precision, then cast, even if it was FP8 (distributed.py:1148 @v2.20.2)
        wide = x if isinstance(x, torch.Tensor) else x.dequantize()
        whole = wide.new_empty(wide.shape[0] * size, *wide.shape[1:])
        dist.all_gather_into_tensor(whole, wide, group=group)
        return quantizer(whole), None
    return _blocks(x, group, size, quantizer, async_op)


def _by_rows(
    x: torch.Tensor | Quantized, group: Group, size: int, quantizer: Quantizer, async_op: bool
) -> tuple[Quantized, Handle | None]:
    """_all_gather_fp8 (distributed.py:1003 @v2.20.2)."""
    columns = quantizer.columns
    if isinstance(x, torch.Tensor):
        quantizer.set_usage(True, False)
        x = quantizer(x)
        quantizer.set_usage(columns=columns)
    assert x.rows is not None
    quantizer.set_usage(rows=True)
    out = quantizer.make_empty((x.shape[0] * size, *x.shape[1:]), x.rows)
    out.scale = x.scale
    handle = _gather(out.rows, x.rows, group, async_op)
    if columns:  # tells of a transpose that is made again, into the same tensor
        if handle is not None:
            handle.wait()
        fused("fp8_transpose", 0, out.rows, out.columns)
        return out, None
    return out, handle


def _blocks(
    x: torch.Tensor | Quantized, group: Group, size: int, quantizer: Quantizer, async_op: bool
) -> tuple[Quantized, Handle | None]:
    """_start_all_gather_fp8_blockwise, _all_gather_mxfp8 (distributed.py:1097, :1541 @v2.20.2)."""
    if isinstance(x, torch.Tensor):
        x = quantizer(x)
    here = x.rows if x.rows is not None else x.columns
    assert here is not None
    out = quantizer.make_empty((x.shape[0] * size, *x.shape[1:]), here)
    moves, buffers = _moves(x, out, quantizer, size)
    with _coalesced(group, here.device, async_op) as manager:
        for to, part in moves:
            _gather(to, part, group, False)

    def reorder() -> None:
        while buffers:
            to, interleaved = buffers.pop()
            fused("swap_first_dims", 0, interleaved, to)

    if async_op:
        return out, _Handle(manager.wait, reorder)
    reorder()
    return out, None


def _moves(
    x: Quantized, out: Quantized, quantizer: Quantizer, size: int
) -> tuple[list[Move], list[Move]]:
    """([(to, part)] in TE's order, [(to, interleaved buffer)])."""
    moves: list[Move] = []
    buffers: list[Move] = []

    def interleaved(to: torch.Tensor | None, part: torch.Tensor | None) -> torch.Tensor:
        assert part is not None
        made = part.new_empty(part.shape[0] * size, *part.shape[1:])
        buffers.append((to, made))
        return made

    blocks = quantizer.kind == "blockwise"
    if quantizer.rows:
        to = interleaved(out.row_scales, x.row_scales) if blocks else None
        moves += [_scales(x, out, size, "row") if to is None else (to, x.row_scales)]
        moves += [(out.rows, x.rows)]
    if quantizer.columns and blocks:
        to = interleaved(out.columns, x.columns)
        moves += [(out.column_scales, x.column_scales), (to, x.columns)]
    elif quantizer.columns:
        moves += [_scales(x, out, size, "column"), (out.columns, x.columns)]
    return moves, buffers


def _scales(x: Quantized, out: Quantized, size: int, way: str) -> Move:
    """MXFP8's scales without their padding (distributed.py:1635, :1658 @v2.20.2)."""
    part, to = getattr(x, f"{way}_scales"), getattr(out, f"{way}_scales")
    rows = 1
    for length in x.shape[:-1]:
        rows *= length
    rows = rows if way == "row" else rows // 32
    return to[: rows * size], part[:rows]


@contextlib.contextmanager
def _coalesced(group: Group, device: torch.device, async_op: bool) -> Iterator[Handle]:
    with dist._coalescing_manager(group=group, device=device, async_ops=async_op) as manager:
        yield manager


def _gather(
    to: torch.Tensor | None, part: torch.Tensor | None, group: Group, async_op: bool
) -> dist.Work | None:
    """As TE does it: bytes travel."""
    assert to is not None
    assert part is not None
    return dist.all_gather_into_tensor(
        to.view(torch.uint8) if to.element_size() == 1 else to,
        part.view(torch.uint8) if part.element_size() == 1 else part,
        group=group,
        async_op=async_op,
    )
