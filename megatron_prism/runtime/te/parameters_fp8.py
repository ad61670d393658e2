"""Parameters that are FP8 themselves (--fp8-param-gather): what Megatron does with them.

They say that they have the precision in which they were made, and hold FP8 values instead.
Megatron places the values by rows in its buffers (``replace_raw_data``), casts its fp32 shards into
them after each optimizer step (``cast_master_weights_to_fp8``) and, once they are gathered, has
values by columns made anew (``post_all_gather_processing``; pytorch/tensor/utils.py @v2.20.2).
Shapes only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from megatron_prism.runtime.devices.kernels import fused
from megatron_prism.runtime.te.distributed import group_size
from megatron_prism.runtime.te.fp8 import Quantized, Quantizer
from megatron_prism.runtime.te.unsupported import refuse

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from megatron_prism.runtime.devices.signatures import Group, Handle
    from megatron_prism.runtime.te.fp8 import Quantizer

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


_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default, _aten.expand.default, _aten.view_as.default)
_VIEWS = (_aten.view.default, _aten.slice.Tensor, _aten._unsafe_view.default)
_NEW = ("aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::new_empty",
        "aten::new_zeros")  # fmt: skip


class QuantizedTensor(torch.Tensor):
    """A tensor of shape and precision whose values are ``held`` in FP8."""

    held: Quantized

    @staticmethod
    def __new__(cls, held: Quantized, dtype: torch.dtype) -> QuantizedTensor:
        assert held.rows is not None
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, dtype=dtype, device=held.rows.device, storage_size=0
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's is no class method to mypy
        cls,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        first = args[0]
        if isinstance(first, QuantizedTensor):
            if func in _SAME:
                return type(first)(first.held, first.dtype)
            if func in _VIEWS:  # of values by rows (tensor/float8_tensor.py, __torch_dispatch__)
                part = Quantized(first.held.quantizer, ())
                part.rows, part.scale = func(first.held.rows, *args[1:], **kwargs), first.held.scale
                part.shape = tuple(part.rows.shape)
                return type(first)(part, first.dtype)
            if func is _aten.copy_.default:
                fused("fp8_quantize", 0, args[1], first.held.rows)
                return first
        plain = func._schema.name.startswith(_NEW)
        if not plain:
            fused("fp8_dequantize", 0, *(a.held.rows for a in args if _is_one(a)))
        args = [a.plain() if _is_one(a) else a for a in args]
        return func(*args, **kwargs)

    def plain(self) -> torch.Tensor:
        """A tensor like it in high precision, which nobody counts."""
        with _disable_current_modes():
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """In high precision."""
        assert self.held.rows is not None
        return self.held.rows.new_empty(self.shape, dtype=dtype or self.dtype)

    def get_high_precision_init_val(self) -> torch.Tensor:
        """TE keeps it on the host (base.py:94 @v2.20.2), where nobody counts."""
        return self.plain()

    def clear_high_precision_init_val(self) -> None:
        """It was never there."""


def _is_one(value: object) -> TypeGuard[QuantizedTensor]:
    return isinstance(value, QuantizedTensor)


class Float8Tensor(QuantizedTensor):
    """One scale a tensor (tensor/float8_tensor.py @v2.20.2)."""


class Float8BlockwiseQTensor(QuantizedTensor):
    """One scale a block (tensor/float8_blockwise_tensor.py @v2.20.2)."""


class MXFP8Tensor(QuantizedTensor):
    """One scale for 32 values (tensor/mxfp8_tensor.py @v2.20.2)."""


class NVFP4Tensor(QuantizedTensor):
    """Nothing is one."""


_KINDS = {"delayed": Float8Tensor, "tensorwise": Float8Tensor, "blockwise": Float8BlockwiseQTensor,
          "mxfp8": MXFP8Tensor}  # fmt: skip


def quantize_parameter(module: torch.nn.Module, name: str, quantizer: Quantizer) -> None:
    """Replace an initialised parameter by one in FP8 (module/base.py:1864 @v2.20.2)."""
    old = getattr(module, name)
    quantizer.set_usage(True, torch.is_grad_enabled())
    new = torch.nn.Parameter(_KINDS[quantizer.kind](quantizer(old.detach()), old.dtype))
    new.__dict__.update(old.__dict__)
    setattr(module, name, new)


def replace_raw_data(tensor: QuantizedTensor, new_raw_data: torch.Tensor) -> None:
    """The same values in a part of Megatron's buffer (tensor/utils.py:30 @v2.20.2)."""
    if isinstance(tensor, MXFP8Tensor):
        refuse("buffer for MXFP8 parameters", fix="--reuse-grad-buf-for-mxfp8-param-ag")
    tensor.held.rows = new_raw_data.detach().view(tensor.held.quantizer.dtype).view(tensor.shape)


def cast_master_weights_to_fp8(
    model_weights: list[QuantizedTensor],
    master_weights: list[torch.Tensor | None],
    start_offsets: list[int | None],
    group: Group,
    fsdp_shard_model_weights: object = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """fp32 shards through high precision into FP8, all of them at once (utils.py:204 @v2.20.2)."""
    if fsdp_shard_model_weights is not None:
        refuse("FP8 parameters of Megatron-FSDP")
    wide = [
        None if master is None else master.to(weight.dtype)
        for weight, master in zip(model_weights, master_weights, strict=True)
    ]
    scales = [
        weight.held.row_scales if weight.held.scale is None else weight.held.scale
        for weight in model_weights
    ]
    if not model_weights or isinstance(model_weights[0], MXFP8Tensor):
        return
    there = [scale for scale in scales if scale is not None]  # all but MXFP8's have some
    amaxes = there[0].new_empty(sum(scale.numel() for scale in there), dtype=torch.float32)
    kept = [torch.empty_like(scale) for scale in there]
    dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
    for weight, master in zip(model_weights, wide, strict=True):
        if not manual_post_all_gather_processing:
            weight.held.update_usage(columns=False)
        if master is not None:
            _cast(master, weight.held)
    del kept


def _cast(master: torch.Tensor, held: Quantized) -> None:
    """Into values by rows; with one scale a tensor TE makes values by columns of the shard, too,
    and drops them (a quantizer's usage as it is made; utils.py:434, :590 @v2.20.2)."""
    kind = held.quantizer.kind
    dropped = None
    if kind in ("delayed", "tensorwise"):
        dropped = master.new_empty(master.shape, dtype=torch.uint8)
    fused("fp8_quantize", 0, master, dropped)


def post_all_gather_processing(model_weights: list[QuantizedTensor] | QuantizedTensor) -> None:
    """Values by columns of the new values by rows (tensor/utils.py:1404 @v2.20.2)."""
    for weight in model_weights if isinstance(model_weights, list) else [model_weights]:
        if isinstance(weight, (Float8Tensor, Float8BlockwiseQTensor)):
            fused("fp8_transpose", 0, weight.held.rows, weight.held.columns)
            weight.held.update_usage(columns=True)
