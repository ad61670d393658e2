"""Which kernels does ``op_table.py`` measure by size?  Each as a call, and as the recorder says it.

A case makes, for ``size`` elements on a device, a call without arguments that launches one kernel
(or one multi-tensor op).  Its key and bytes are what the recorder's meter says of that call on
``meta``, so that table and recording can only agree.  Rows are 4,096 wide, logits 32,000.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_prism.runtime.devices.live_bytes import LiveBytes
from megatron_prism.runtime.recorder.shapes_meter import Meter

SIZES = tuple(1 << n for n in (8, 12, 15, 17, 19, 21, 23, 25, 27, 29))
OPTIMIZER_SIZES = (*SIZES, 1 << 30)
WIDE, VOCABULARY, TENSORS = 4096, 32000, 8
BF16, FP32, INT64 = torch.bfloat16, torch.float32, torch.int64
aten = torch.ops.aten
Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """make : (elements, device) -> call;  known : (key, bytes) instead of what the meter says"""

    name: str
    make: Callable[[int, str], Call]
    least: int = 1
    large: bool = False
    ahead: int = 2_000_000
    known: Callable[[int], tuple[str, int]] | None = None

    def signature(self, size: int) -> tuple[str, int]:
        """(``name dtype``, bytes), as recorded.  RuntimeError unless it is one kernel."""
        if self.known is not None:
            return self.known(size)
        live, meter = LiveBytes("meta"), Meter()
        live.meter = meter
        with live:
            call = self.make(size, "meta")
            meter.take()
            call()
        calls = list(meter.take().calls.elements())
        if len(calls) != 1:
            raise RuntimeError(f"not one kernel: {calls}")
        name, _, rest = calls[0].partition("(")
        dtype, _, num_bytes = rest.rpartition(")")[2].split(":")
        return f"{name} {dtype}", int(num_bytes)


def full(shape: Any, device: str, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Noise about 1, so that no op meets a domain it has not."""
    made = torch.empty(shape, dtype=dtype, device=device)
    return made if device == "meta" else made.uniform_(0.5, 1.5)


def rows(size: int, device: str, dtype: torch.dtype = BF16) -> torch.Tensor:
    return full((size // WIDE, WIDE), device, dtype)


def logits(size: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp32 logits, a target per row)."""
    count = max(1, size // VOCABULARY)
    return full((count, VOCABULARY), device, FP32), whole(count, VOCABULARY, device)


def whole(count: int, below: int, device: str) -> torch.Tensor:
    """Whole numbers, as tokens are."""
    made = torch.empty(count, dtype=INT64, device=device)
    return made if device == "meta" else made.random_(0, below)


def unary(op: Callable[[torch.Tensor], Any], dtype: torch.dtype = BF16) -> Any:
    def make(size: int, device: str) -> Call:
        x = full(size, device, dtype)
        return lambda: op(x)

    return make


def binary(
    op: Callable[..., Any], dtype: torch.dtype = BF16, other: torch.dtype | None = None
) -> Any:
    def make(size: int, device: str) -> Call:
        x, y = full(size, device, dtype), full(size, device, other or dtype)
        return lambda: op(x, y)

    return make


def by_row(op: Callable[[torch.Tensor], Any], dtype: torch.dtype = BF16) -> Any:
    def make(size: int, device: str) -> Call:
        x = rows(size, device, dtype)
        return lambda: op(x)

    return make


def turned(x: torch.Tensor) -> torch.Tensor:
    """Heads before rows, as attention without a fused kernel wants them."""
    return x.view(-1, 32, WIDE // 32).transpose(0, 1).contiguous()


def lists(op: Callable[..., Any], count: int) -> Any:
    """A multi-tensor op on ``count`` lists of fp32 tensors."""

    def make(size: int, device: str) -> Call:
        each = [[full(size // TENSORS, device, FP32) for _ in range(TENSORS)] for _ in range(count)]
        return lambda: op(*each)

    return make


def elementwise() -> list[Case]:
    """Of activations and gradients."""
    f = torch.nn.functional

    def broadcast(dtype: torch.dtype) -> Case:
        """Heads of a row times one factor for all of them, as rotary embeddings do."""

        def make(size: int, device: str) -> Call:
            x = full((size // WIDE, 32, WIDE // 32), device, dtype)
            y = full((size // WIDE, 1, WIDE // 32), device, dtype)
            return lambda: x * y

        name, one = f"mul broadcast {str(dtype).removeprefix('torch.')}", dtype.itemsize
        moved = lambda n: (name, 2 * one * n + one * n // 32)  # noqa: E731
        return Case(name, make, WIDE, known=moved)

    return [
        Case("add", binary(torch.add)),
        broadcast(BF16),
        broadcast(FP32),
        Case("mul", binary(torch.mul)),
        Case("add_", binary(torch.Tensor.add_)),
        Case("scale", unary(lambda x: x * 0.5)),
        Case("neg", unary(torch.neg)),
        Case("silu", unary(f.silu)),
        Case("silu_backward", binary(aten.silu_backward)),
        Case("sigmoid", unary(torch.sigmoid)),
        Case("rsub", unary(lambda x: 1 - x)),
        Case("gelu", unary(f.gelu)),
        Case("gelu_backward", binary(aten.gelu_backward)),
        Case("relu", unary(torch.relu)),
        Case("to fp32", unary(lambda x: x.float())),
        Case("to bf16", unary(lambda x: x.bfloat16(), FP32)),
        Case("copy_", binary(torch.Tensor.copy_)),
        Case("copy_ to bf16", binary(torch.Tensor.copy_, BF16, FP32)),
        Case("copy_ to fp32", binary(torch.Tensor.copy_, FP32, BF16)),
        Case("copy_ fp32", binary(torch.Tensor.copy_, FP32)),
        Case("clone turned", by_row(turned), 2 * WIDE),
        Case("cat", binary(lambda x, y: torch.cat([x, y]))),
        Case("zeros", unary(lambda x: x.new_zeros(x.shape))),
        Case("native_dropout", unary(lambda x: aten.native_dropout(x, 0.1, True))),
        Case("add fp32", binary(torch.add, FP32)),
        Case("mul fp32", binary(torch.mul, FP32)),
        Case("div fp32", unary(lambda x: x / 3.0, FP32)),
        Case("pow fp32", unary(lambda x: x.pow(2), FP32)),
        Case("rsqrt fp32", unary(torch.rsqrt, FP32)),
        Case("cos fp32", unary(torch.cos, FP32)),
        Case("sin fp32", unary(torch.sin, FP32)),
        Case("exp fp32", unary(torch.exp, FP32)),
        Case("exp_ fp32", unary(torch.Tensor.exp_, FP32)),
        Case("log fp32", unary(torch.log, FP32)),
    ]  # fmt: skip


def rowwise() -> list[Case]:
    """Norms, softmax, sums, embeddings, pieces of the cross entropy."""

    def mask(op: Callable[..., Any]) -> Any:
        def make(size: int, device: str) -> Call:
            x = full((1, max(1, size >> 22), 2048, min(size, 1 << 22) // 2048), device)
            hidden = torch.ones(x.shape[2:], dtype=torch.bool, device=device)[None, None]
            return lambda: op(x, hidden, -10000.0)

        return make

    def softmax_backward(size: int, device: str) -> Call:
        y, grad = rows(size, device), rows(size, device)
        return lambda: aten._softmax_backward_data(grad, y, -1, BF16)

    def rms(size: int, device: str) -> Call:
        x, weight = rows(size, device), full(WIDE, device)
        return lambda: aten._fused_rms_norm(x, [WIDE], weight, 1e-5)

    def rms_backward(size: int, device: str) -> Call:
        x, weight, grad = rows(size, device), full(WIDE, device), rows(size, device)
        rstd = full((size // WIDE, 1), device, FP32)
        return lambda: aten._fused_rms_norm_backward(grad, x, [WIDE], rstd, weight, [True, True])

    def layer(size: int, device: str) -> Call:
        x, weight = rows(size, device), full(WIDE, device)
        return lambda: aten.native_layer_norm(x, [WIDE], weight, weight, 1e-5)

    def layer_backward(size: int, device: str) -> Call:
        x, weight, grad = rows(size, device), full(WIDE, device), rows(size, device)
        mean, rstd = (full((size // WIDE, 1), device, FP32) for _ in range(2))
        args = (grad, x, [WIDE], mean, rstd, weight, weight, [True, True, True])
        return lambda: aten.native_layer_norm_backward(*args)

    def embedding(size: int, device: str) -> Call:
        table, tokens = full((VOCABULARY, WIDE), device), whole(size // WIDE, VOCABULARY, device)
        return lambda: aten.embedding(table, tokens)

    def embedding_backward(size: int, device: str) -> Call:
        grad, tokens = rows(size, device), whole(size // WIDE, VOCABULARY, device)
        return lambda: aten.embedding_dense_backward(grad, tokens, VOCABULARY, -1, False)

    def of_logits(op: Callable[..., Any]) -> Any:
        def make(size: int, device: str) -> Call:
            x, target = logits(size, device)
            column = full((x.shape[0], 1), device, FP32)
            index = torch.arange(x.shape[0], device=device)
            return lambda: op(x, column, index, target)

        return make

    def facts(size: int) -> int:
        return 2 * WIDE + 4 * (size // WIDE)  # the weight, and one number a row

    def chosen(size: int, device: str) -> Call:
        x, order = rows(size, device), whole(size // WIDE, size // WIDE, device)
        return lambda: x.index_select(0, order)

    least = VOCABULARY
    return [
        Case("masked_fill", mask(torch.Tensor.masked_fill), 1 << 15),
        Case("masked_fill_", mask(torch.Tensor.masked_fill_), 1 << 15),
        Case("_softmax", by_row(lambda x: aten._softmax(x, -1, False)), WIDE),
        Case("_softmax_backward_data", softmax_backward, WIDE),
        # on meta these fall apart; runtime/devices/cuda_choices.py records them so
        Case("_fused_rms_norm", rms, WIDE,
             known=lambda n: ("_fused_rms_norm bfloat16", 4 * n + facts(n))),
        Case("_fused_rms_norm_backward", rms_backward, WIDE,
             known=lambda n: ("_fused_rms_norm_backward bfloat16", 6 * n + facts(n))),
        Case("native_layer_norm", layer, WIDE),
        Case("native_layer_norm_backward", layer_backward, WIDE),
        Case("sum bf16", by_row(lambda x: x.view(-1, 4, WIDE // 4).sum(1)), WIDE),
        Case("sum fp32", by_row(lambda x: x.sum(-1), FP32), WIDE),
        Case("mean fp32", by_row(lambda x: x.mean(-1, keepdim=True), FP32), WIDE),
        Case("max fp32", of_logits(lambda x, c, i, t: aten.max(x, -1)), least),
        Case("sub_ fp32", of_logits(lambda x, c, i, t: x.sub_(c)), least),
        Case("div_ fp32", of_logits(lambda x, c, i, t: x.div_(c)), least),
        Case("mul_ fp32", of_logits(lambda x, c, i, t: x.mul_(c)), least),
        Case("index fp32", of_logits(lambda x, c, i, t: aten.index(x, [i, t])), least),
        Case("embedding", embedding, WIDE),
        Case("embedding_dense_backward", embedding_backward, WIDE),
        Case("index_select", chosen, WIDE),
    ]  # fmt: skip


def optimizer() -> list[Case]:
    """AdamW over all parameters at once, norms and copies of gradients."""
    t = torch

    def fused(size: int, device: str) -> Call:
        four = [[full(size // TENSORS, device, FP32) for _ in range(TENSORS)] for _ in range(4)]
        steps = [full((), device, FP32) for _ in range(TENSORS)]
        more = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
        more |= {"amsgrad": False, "maximize": False, "grad_scale": None, "found_inf": None}
        return lambda: t._fused_adamw_(*four, [], steps, **more)

    def each(name: str, op: Callable[..., Any], count: int) -> Case:
        return Case(name, lists(op, count), TENSORS, True)

    return [
        each("_foreach_mul_", lambda x: t._foreach_mul_(x, 0.999), 1),
        each("_foreach_add_", lambda x: t._foreach_add_(x, 1e-8), 1),
        each("_foreach_sqrt", t._foreach_sqrt, 1),
        each("_foreach_div_", lambda x: t._foreach_div_(x, 0.9), 1),
        each("_foreach_lerp_", lambda x, y: t._foreach_lerp_(x, y, 0.1), 2),
        each("_foreach_addcmul_", lambda x, y: t._foreach_addcmul_(x, y, y, 0.1), 2),
        each("_foreach_addcdiv_", lambda x, y, z: t._foreach_addcdiv_(x, y, z, 0.1), 3),
        Case("_fused_adamw_", fused, TENSORS, True),
        Case("linalg_vector_norm", unary(t.linalg.vector_norm, FP32), 1, True),
        Case("zero_ fp32", unary(t.Tensor.zero_, FP32), 1, True),
        Case("add_ fp32 bf16", binary(t.Tensor.add_, FP32, BF16)),
        Case("mul_ fp32 all", unary(lambda x: x.mul_(0.5), FP32), 1, True),
    ]


def kernels() -> list[Case]:
    """Everything that torch alone runs."""
    return [*elementwise(), *rowwise(), *optimizer()]


def transformer_engine() -> list[Case]:
    """Its norm and optimizer, where it is installed, under the names and with the bytes of
    ``runtime/te_kernels``."""
    try:
        from transformer_engine.pytorch import RMSNorm
        from transformer_engine.pytorch.optimizers import FusedAdam
    except (ImportError, OSError):
        return []

    def norm(size: int, device: str, back: bool = False) -> Call:
        module = RMSNorm(WIDE, params_dtype=BF16, device=device)
        x = rows(size, device).requires_grad_(back)
        if not back:
            return lambda: module(x)
        out = module(x)
        grad, inputs = torch.ones_like(out), [x, *module.parameters()]
        return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)

    def adam(size: int, device: str) -> Call:
        weight = torch.nn.Parameter(full(size, device, FP32))
        weight.grad = full(size, device, FP32)
        return FusedAdam([weight]).step

    slow = 8_000_000
    return [
        Case("TE norm", norm, WIDE, False, slow, lambda n: ("norm bfloat16", 4 * n)),
        Case("TE norm backward", lambda n, d: norm(n, d, True), WIDE, False, slow,
             lambda n: ("norm_backward bfloat16", 6 * n)),
        Case("TE adam", adam, 1, True, slow, lambda n: ("adam float32", 28 * n)),
    ]  # fmt: skip
