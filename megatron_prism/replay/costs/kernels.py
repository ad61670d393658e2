"""How long a kernel takes: measured ones by shape or size, rooflines for the rest.

``ops/*.json`` in this package or a file like them (``benchmarks/tools/op_table.py`` writes one).
In: a kernel as the recorder writes it, ``mm(4096x8192,8192x1024t)bfloat16:flops:bytes``.  Out: ns,
or None for what was not measured.

* products and fused attention: between the measured shapes, linearly in logarithms of times and
  sizes; products of more, such as those of a vocabulary, in proportion.  FP16 is as fast as BF16
* everything else: by bytes, as the recorder counts them, under its own name or that of one that
  moves its data alike; below the smallest size that size's time, which is the shortest kernel's,
  above the largest in proportion.
  In a segment a kernel's inputs were just written and may be in L2, its outputs were not: the mean
  of the times with everything in L2 that fits, and with nothing
* a roofline: the start of a kernel, and what its flops or its bytes take; fused attention also
  leaves multiprocessors idle at its end.  Products of fp32 operands are TF32 where Transformer
  Engine makes them, and where the job let torch do so (``product_type``)
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from megatron_prism.core import foreign
from megatron_prism.core.errors import UnsupportedError
from megatron_prism.core.programs.ops import CODE, HOST_WORK
from megatron_prism.core.programs.program import Program
from megatron_prism.replay.costs import host_work, machine
from megatron_prism.replay.costs.machine import Machine
from megatron_prism.replay.costs.provenance import Provenance

FOLDER = Path(__file__).with_name("ops")
_SHAPE = re.compile(r"(\d+(?:x\d+)*)(t?)$")
_LIKE = {"float16": "bfloat16", "float8_e5m2": "float8_e4m3fn"}
# moved alike: name -> the measured one.  The first are compiled by Megatron or fused by TE
_ALIKE = {
    **dict.fromkeys(
        (
            "swiglu",
            "swiglu_back",
            "bias_swiglu",
            "bias_swiglu_back",
            "weighted_swiglu",
            "bias_gelu",
            "bias_gelu_back",
            "gelu_impl",
            "squared_relu",
            "rope",
            "bias_dropout_add_fused_train",
            "bias_dropout_add_fused_inference",
            "sub",
            "div",
            "where",
            "maximum",
            "silu_backward",
            "gelu_backward",
            "threshold_backward",
            "multi_tensor_scale",
            "triu",
            "tril",
            "rsub",
        ),
        "add",
    ),
    **dict.fromkeys(
        (
            "clone",
            "contiguous",
            "slice_backward",
            "select_backward",
            "sqrt",
            "abs",
            "reciprocal",
            "tanh",
            "to",
            "fill_",
            "zeros_like",
            "ones_like",
            "masked_fill",
            "ones",
        ),
        "copy_",
    ),
    **dict.fromkeys(("sub_", "div_", "mul_", "masked_fill_"), "add_"),
    **dict.fromkeys(("amax", "mean", "var", "logsumexp", "argmax"), "sum"),
    "index_put_": "index",
    "fill_empty": "zero_",
    **dict.fromkeys(("gather", "index", "permute", "unpermute", "sort_chunks"), "index_select"),
    "new_zeros": "zero_",
    "zeros": "new_zeros",
    "norm": "_fused_rms_norm",
    "norm_backward": "_fused_rms_norm_backward",
    "layer_norm_backward": "add",
    "multi_tensor_l2norm": "linalg_vector_norm",
    "embedding": "index_select",
    "mul": "add",
    "add": "mul",
    "_softmax": "copy_",
}

_ARITHMETIC = frozenset(("add", "sub", "mul", "div", "where", "maximum"))
# cuBLASLt's through Transformer Engine, which computes in TF32 wherever all operands are fp32
# (common/gemm/cublaslt_gemm.cu:445 @v2.20); torch's do so only if the job asked for it
_GEMMS = ("gemm", "gemm_wgrad", "gemm_block", "gemm_wgrad_block")
_OF_TRANSFORMER_ENGINE = frozenset((*_GEMMS, "grouped_gemm"))
_SINGLE = ("mm", "addmm", "_scaled_mm", *_GEMMS)
# cuBLAS's streams of Transformer Engine, on which products of experts overlap: what starts a kernel
# is hidden on all but one of them (nvte_multi_tensor_gemm, cublaslt_gemm.cu @v2.18)
_EXPERT_STREAMS = 4
_BATCHED = ("bmm", "baddbmm")
PRODUCTS = frozenset((*_SINGLE, *_BATCHED))  # what the power limit was seen to slow down
# what the recorder appends to ``attention`` (``runtime/te_kernels/attention.announce``)
_ATTENTION = (
    "",
    "_dropout",
    "_backward",
    "_backward_deterministic",
    "_backward_dropout",
    "_backward_dropout_deterministic",
)
# of an element of one byte, that a clone and a copy into a tensor move: the recorder counts the
# tensor that is changed as read and as written
_CLONE_BYTES, _COPY_BYTES = 2, 3
_ADAM_BYTES = 28, 16  # of an element: as our stand-in counts it, as recorded of torch's fused one


@dataclass(frozen=True)
class MeasuredKernel:
    """One kernel of a segment, as recorded.

    shapes : of up to three tensors; turned: whether each lies in memory by columns
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    turned: tuple[bool, ...]
    dtype: str
    flops: int
    bytes: int

    @staticmethod
    def parse(name: str, shapes: str, dtype: str, flops: int, num_bytes: int) -> MeasuredKernel:
        """``shapes``: what stood in the brackets."""
        sizes = list[tuple[int, ...]]()
        turned = list[bool]()
        for text in shapes.split(","):
            match = _SHAPE.match(text)
            if match is None:  # a number, which has no shape
                sizes.append(())
                turned.append(False)
            else:
                sizes.append(tuple(map(int, match[1].split("x"))))
                turned.append(bool(match[2]))
        return MeasuredKernel(name, tuple(sizes), tuple(turned), dtype, flops, num_bytes)


@dataclass(frozen=True)
class _Grid:
    """Times on a grid of sizes.

    axes : ascending, in logarithms;  ns : in logarithms, NaN where nothing was measured
    """

    axes: tuple[np.ndarray, ...]
    ns: np.ndarray

    def at(self, sizes: Sequence[float]) -> float | None:
        """ns between the neighbours; None outside."""
        # of each axis the places around the size, with their weights; one place where it is exact
        corners = []
        for axis, size in zip(self.axes, sizes, strict=True):
            x = math.log(size) if size > 0 else -math.inf
            if not axis[0] - 1e-9 <= x <= axis[-1] + 1e-9:
                return None
            high = int(np.searchsorted(axis, x - 1e-9))
            if abs(axis[high] - x) < 1e-9:
                corners.append([(high, 1.0)])
            else:
                part = (x - axis[high - 1]) / (axis[high] - axis[high - 1])
                corners.append([(high - 1, 1 - part), (high, part)])
        # logarithms are linear between the corners of the cell
        total = 0.0
        for corner in product(*corners):
            weight = math.prod(part for _, part in corner)
            total += weight * self.ns[tuple(place for place, _ in corner)]
        # a corner that was not measured
        if math.isnan(total):
            return None
        return math.exp(total)


@dataclass(frozen=True)
class OpTable:
    """A measured table.

    grids   : ``gemm tn bfloat16`` … -> times by shape
    kernels : ``name dtype`` -> (bytes ascending, ns)
    options : kernel with options (``attention_backward_dropout``) -> times as long as without
    sustained : of some products (their shares of the time ascending, factors of their times in
              ``grids``): the power limit slows down what goes on
    """

    device: str
    source: str
    grids: dict[str, _Grid]
    kernels: dict[str, tuple[np.ndarray, np.ndarray]]
    options: dict[str, float] = field(default_factory=dict)
    sustained: tuple[tuple[np.ndarray, np.ndarray], ...] = ()
    _known: dict[MeasuredKernel, float | None] = field(
        default_factory=dict, compare=False, repr=False
    )

    def ns(self, kernel: MeasuredKernel) -> float | None:
        """How long it took; None if nothing like it was measured."""
        if kernel not in self._known:
            look = self._looks.get(kernel.name, self._by_size)
            self._known[kernel] = look(kernel)
        return self._known[kernel]

    def slowdown(self, share: float) -> float:
        """Of products that are that share of a GPU's time: the mean of what was measured, and at
        least 1, though below half of the time they are up to 8 % quicker than in ``grids``: the
        clock follows heat and power, and a rank's neighbours in time are not known.
        """
        if not self.sustained:
            return 1.0
        factors = [float(np.interp(share, shares, slower)) for shares, slower in self.sustained]
        return max(1.0, sum(factors) / len(factors))

    @cached_property
    def _looks(self) -> dict[str, Callable[[MeasuredKernel], float | None]]:
        return {
            **dict.fromkeys(_SINGLE, self._product),
            **dict.fromkeys(_BATCHED, self._batched),
            **{f"attention{suffix}": self._attention for suffix in _ATTENTION},
            "grouped_gemm": self._products_of_experts,
        }

    @cached_property
    def _shortest_ns(self) -> float:
        """The shortest kernel, which is what it takes to start one."""
        return min((float(ns[0]) for _, ns in self.kernels.values()), default=0.0)

    def _products_of_experts(self, kernel: MeasuredKernel) -> float | None:
        """As many products like that of the shapes as have the flops: one of each expert."""
        if len(kernel.shapes) < 3 or not all(kernel.shapes[:3]):
            return None
        first, _, out = kernel.shapes[:3]
        flops_of_one = 2 * math.prod(first) * out[-1]
        if not flops_of_one:
            return None
        one = replace(kernel, name="gemm", flops=flops_of_one)
        ns_of_one = self._product(one)
        if ns_of_one is None:
            return None
        hidden_share = (_EXPERT_STREAMS - 1) / _EXPERT_STREAMS
        hidden_ns = self._shortest_ns * hidden_share
        beside_others_ns = max(ns_of_one - hidden_ns, ns_of_one / 2)
        num_experts = kernel.flops / flops_of_one
        return num_experts * beside_others_ns

    def _product(self, kernel: MeasuredKernel) -> float | None:
        """C[m, n] = A[m, k] B[k, n]; tn, nn, nt say how A and B lie."""
        product = _as_product(kernel)
        if product is None:
            return None
        layout, *sizes = product
        dtype = _LIKE.get(kernel.dtype, kernel.dtype)
        if dtype.startswith("float8"):
            layout = "tn"
        grid = self.grids.get(f"gemm {layout} {dtype}")
        if grid is None:
            return None
        # beyond the largest measured sizes in proportion to the flops
        sizes_inside = list[float]()
        for size, axis in zip(sizes, grid.axes, strict=True):
            sizes_inside.append(min(size, math.exp(axis[-1])))
        ns_inside = grid.at(sizes_inside)
        if ns_inside is None:
            return None
        factor = self.options.get(kernel.name, 1.0)
        return factor * ns_inside * math.prod(sizes) / math.prod(sizes_inside)

    def _batched(self, kernel: MeasuredKernel) -> float | None:
        """Of attention without a fused kernel: two sides as long as the sequence, one short."""
        shapes = kernel.shapes[-2:] if kernel.name == "baddbmm" else kernel.shapes[:2]
        if len(shapes) < 2 or any(len(shape) != 3 for shape in shapes):
            return None
        (batch, m, k), (_, _, n) = shapes
        dtype = _LIKE.get(kernel.dtype, kernel.dtype)
        for short_side, length, second_length, size in (
            ("k", m, n, k),
            ("n", m, k, n),
            ("m", n, k, m),
        ):
            if length == second_length and size <= length:
                grid = self.grids.get(f"bmm {short_side} {dtype}")
                return None if grid is None else grid.at((batch, length, size))
        return None

    def _attention(self, kernel: MeasuredKernel) -> float | None:
        s = _causal_length(kernel)
        if not s:  # no mask, or a part of a sequence
            return None
        name = _plain(kernel.name)
        q_shape = kernel.shapes[0]
        d = q_shape[-1]
        dtype = _LIKE.get(kernel.dtype, kernel.dtype)
        for library in ("cudnn", "flash2"):
            grid = self.grids.get(f"{name} {library} {dtype}")
            if grid is None:
                continue
            heads = math.prod(q_shape) / (s * d)
            ns_without_options = grid.at((heads, s, d))
            if ns_without_options is None:
                return None
            return ns_without_options * self.options.get(kernel.name, 1.0)
        return None

    def _by_size(self, kernel: MeasuredKernel) -> float | None:
        """By its bytes, as the first of several names that was measured."""
        if kernel.flops:
            return None
        dtype = _LIKE.get(kernel.dtype, kernel.dtype)
        moved_bytes = kernel.bytes
        plain = _plain(kernel.name)
        names: tuple[str, ...] = (plain, _ALIKE.get(plain, ""))
        if kernel.name in _ARITHMETIC and _is_broadcast(kernel.shapes):
            names = ("mul broadcast", *names)
        if _turns_a_row(kernel):
            names = ("fp8_quantize row",)
        if kernel.name == "adam" and f"adam {dtype}" not in self.kernels:
            counted_bytes, recorded_bytes = _ADAM_BYTES
            names = ("_fused_adamw_", "")
            moved_bytes = moved_bytes * recorded_bytes // counted_bytes
        # the measured clone turns its tensor; one that does not is a copy of memory
        if kernel.name == "clone_dense":
            names = ("copy_", "")
            moved_bytes = moved_bytes * _COPY_BYTES // _CLONE_BYTES
        factor = self.options.get(kernel.name, 1.0)
        for name in names:
            row = self.kernels.get(f"{name} {dtype}") or self.kernels.get(f"{name} float32")
            if row is None:
                continue
            sizes, ns = row
            log_ns = np.interp(math.log(max(1, moved_bytes)), np.log(sizes), np.log(ns))
            beyond_largest = max(1.0, moved_bytes / float(sizes[-1]))
            return factor * float(np.exp(log_ns)) * beyond_largest
        return None


def _is_broadcast(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether a tensor is read several times for each element of a larger one.  torch's kernel for
    that loads one element at a time instead of a vector (aten/src/ATen/native/cuda/CUDALoops.cuh
    @2.11, gpu_kernel_impl_nocast).
    """
    sizes = [math.prod(shape) for shape in shapes if shape]
    return len(sizes) > 1 and 1 < min(sizes) < max(sizes)


def _turns_a_row(kernel: MeasuredKernel) -> bool:
    """Whether a cast to FP8 writes the transpose, too, of one row, as the distributed optimizer
    casts its part of a parameter: one row of each tile of TE's kernel is used
    (transpose/cast_transpose.cu, cast_transpose_general_kernel @v2.20).
    """
    return kernel.name == "fp8_quantize" and len(kernel.shapes) == 3 and len(kernel.shapes[2]) == 1


def _plain(name: str) -> str:
    """A kernel's name without its options."""
    return name.removesuffix("_deterministic").removesuffix("_dropout")


def _causal_length(kernel: MeasuredKernel) -> int:
    """The sequence of causal attention, by flops: 2 products forward, 5 backward, of heads x s x s
    x d each, halved; 0 if it is not causal.
    """
    if not kernel.shapes or len(kernel.shapes[0]) < 3:
        return 0
    products = 2 if _plain(kernel.name) == "attention" else 5
    flops_of_key = math.prod(kernel.shapes[0]) * products
    if not flops_of_key:
        return 0
    s, remainder = divmod(kernel.flops, flops_of_key)
    if remainder or s not in kernel.shapes[0][:2]:
        return 0
    return s


def _as_product(kernel: MeasuredKernel) -> tuple[str, int, int, int] | None:
    """(layout, m, n, k)."""
    shapes, turned = kernel.shapes, kernel.turned
    if kernel.name == "addmm":
        shapes, turned = shapes[1:], turned[1:]
    if len(shapes) < 2 or not shapes[0] or len(shapes[1]) != 2 or not math.prod(shapes[0]):
        return None
    *leading, last = shapes[0]
    rows = math.prod(leading)
    name = kernel.name.removesuffix("_block")
    if name == "gemm_wgrad":  # dy[rows, m], and x[rows, n] in FP8 maybe turned
        n = kernel.flops // (2 * rows * last) or shapes[1][-1]
        return "nt", last, n, rows
    layout = "nt" if turned[0] else "nn"
    if name == "gemm":  # W as it is stored, [n, k] or [k, n]
        n = kernel.flops // (2 * rows * last)
        if shapes[1] == (n, last):
            layout = "tn"
        return layout, rows, n, last
    if turned[1]:
        if turned[0]:  # no layout of the table
            return None
        layout = "tn"
    return layout, rows, shapes[1][-1], last


_Time = Annotated[float, msgspec.Meta(gt=0, lt=1 << 59)]
_Side = Annotated[float, msgspec.Meta(gt=0, lt=1 << 59)]


class _StoredGrid(msgspec.Struct):
    axes: list[Annotated[list[_Side], msgspec.Meta(min_length=1)]]
    ns: list[_Time | None]


class _StoredSustained(msgspec.Struct):
    shape: list[_Side]
    points: Annotated[
        list[tuple[float, Annotated[float, msgspec.Meta(gt=0.5, lt=10)]]],
        msgspec.Meta(min_length=1),
    ]
    ns: _Time | None = None


@dataclass(frozen=True)
class _StoredTable:
    """What ``benchmarks/tools/op_table.py`` writes.

    kernels : name -> rows of bytes, ns in a row (all data in L2 that fits) and ns with L2 flushed
    """

    device: str
    source: str
    grids: dict[str, _StoredGrid]
    kernels: dict[str, Annotated[list[tuple[_Side, _Time, _Time]], msgspec.Meta(min_length=1)]]
    options: dict[str, Annotated[float, msgspec.Meta(gt=0.5, lt=20)]] = field(default_factory=dict)
    sustained: tuple[_StoredSustained, ...] = ()
    clocks: list[str] = field(default_factory=list)
    left_out: object = None
    took_s: float = 0.0
    event_gap_ns: float = 0.0


def read(name: str | os.PathLike[str]) -> OpTable:
    """The table of that name or in that file.  UsageError says what is wrong with it."""
    stored = machine.read(name, FOLDER, "an op table of ours", _StoredTable)
    fix = "write it again: benchmarks/tools/op_table.py"
    with foreign.reading(name, "an op table of ours", fix):
        grids = {key: _grid(key, grid) for key, grid in stored.grids.items()}
        kernels = {key: _rows(key, rows) for key, rows in stored.kernels.items()}
        sustained = tuple(_sustained(product, grids) for product in stored.sustained)
        return OpTable(stored.device, stored.source, grids, kernels, stored.options, sustained)


def _grid(key: str, stored: _StoredGrid) -> _Grid:
    axes = tuple(np.log(np.asarray(axis, dtype=float)) for axis in stored.axes)
    for axis in axes:
        if not (np.diff(axis) > 0).all():
            raise ValueError(f"the sizes of {key} do not ascend")
    times = np.asarray(stored.ns, dtype=float)  # None is NaN
    sizes = [len(axis) for axis in axes]
    return _Grid(axes, np.log(times.reshape(sizes)))


def _sustained(stored: _StoredSustained, grids: dict[str, _Grid]) -> tuple[np.ndarray, np.ndarray]:
    """(shares, factors over what the table has for the product: the limit slowed that down too)."""
    shares, factors = np.asarray(stored.points, dtype=float).T
    if not (np.diff(shares) > 0).all():
        raise ValueError("shares of sustained products do not ascend")
    grid = grids.get("gemm tn bfloat16")
    if grid is not None and len(grid.axes) != len(stored.shape):
        raise ValueError(f"a sustained product has {len(stored.shape)} sides")
    ns_in_grid = grid.at(stored.shape) if grid is not None else None
    # of the smallest share, whose clock is the highest
    fastest_ns = stored.ns or ns_in_grid or 1.0
    return shares, factors * fastest_ns / (ns_in_grid or fastest_ns)


def _rows(key: str, rows: Sequence[tuple[float, float, float]]) -> tuple[np.ndarray, np.ndarray]:
    """(sizes, ns): the mean of both times."""
    table = np.asarray(rows, dtype=float)
    if not (np.diff(table[:, 0]) > 0).all():
        raise ValueError(f"the sizes of {key} do not ascend")
    return table[:, 0], table[:, 1:].mean(axis=1)


MEASURED = Provenance.MEASURED_SEGMENT
ROOFLINE = Provenance.ROOFLINE
NONE = Provenance.NO_SEGMENT
UNKNOWN = Provenance.UNKNOWN_SEGMENT
OPS = Provenance.OP_TABLE
MIXED = Provenance.OP_TABLE_AND_ROOFLINE
HOST_MEMORY = Provenance.HOST_MEMORY
SLIGHT = 0.05
_MOST_NS = 1 << 59  # 18 years: what follows from it still fits into 64 bits
KERNEL = re.compile(
    r"(?P<name>[^(;]+)\((?P<shapes>[^)]*)\)(?P<dtype>\w*):(?P<flops>\d+):(?P<bytes>\d+)(?:\*(?P<count>\d+))?"
)
# dtype of a kernel in a note -> the type that its products compute in; "tf32" is what the recorder
# writes of torch's own products of fp32 operands where the job allowed TF32
_TORCH = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "tf32": "tf32",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}


def product_type(name: str, dtype: str) -> str:
    """Say in which type a kernel multiplies: bf16, fp16, fp8, tf32 or fp32.

    Args:
        name: of the kernel, as a note has it.
        dtype: of its operands, as a note has it.
    """
    operands = _TORCH.get(dtype, "bf16")
    if operands == "fp32" and name in _OF_TRANSFORMER_ENGINE:
        return "tf32"
    return operands


def compute_ns(program: Program, machine: Machine) -> tuple[np.ndarray, np.ndarray]:
    """(ns int64 [n], source uint8 [n]) of every op; 0 and NONE for what is no segment."""
    ns = np.zeros(len(program), dtype=np.int64)
    source = np.full(len(program), NONE, dtype=np.uint8)
    compute = np.flatnonzero(program.ops["name"] == CODE["compute"])
    ops = program.ops[compute]
    measured = ops["ns"] >= 0
    ns[compute[measured]] = ops["ns"][measured]
    source[compute[measured]] = MEASURED
    # segments of equal work are priced once
    unmeasured, rows = compute[~measured], ops[~measured]
    columns = [rows[name].tolist() for name in ("note", "flops", "traffic", "kernels")]
    works = list(zip(*columns, strict=True))
    number_of = {work: number for number, work in enumerate(dict.fromkeys(works))}
    number = np.array([number_of[work] for work in works], dtype=np.int64)
    table = table_of(machine)
    parts, has_no_work = list[SegmentParts](), list[bool]()
    for note, flops, traffic, kernels in number_of:
        text = program.strings[note]
        parts.append(parts_of(text, flops, traffic, kernels, machine, table))
        has_no_work.append(max(flops, traffic) < 0 and not KERNEL.search(text))
    slower = _slowdown([parts[index] for index in number.tolist()], table)
    times, codes = list[int](), list[int]()
    for segment, is_unknown in zip(parts, has_no_work, strict=True):
        segment_ns, code = _priced(segment, slower)
        times.append(segment_ns)
        codes.append(UNKNOWN if is_unknown else code)
    ns[unmeasured] = np.array(times, dtype=np.int64)[number]
    source[unmeasured] = np.array(codes, dtype=np.uint8)[number]
    return ns, source


class SegmentParts(NamedTuple):
    """ns of a segment: products and other kernels by the table, what is a roofline, what the
    device waits for its host, and copies beside all that.
    """

    products: float
    data_movers: float
    roof: int
    waited: int = 0
    beside: int = 0

    @property
    def kernels(self) -> float:
        """ns of the device's kernels."""
        return self.products + self.data_movers + self.roof


def _slowdown(parts: list[SegmentParts], table: OpTable | None) -> float:
    """Factor of products under the power limit; it changes their share of the time, on which it
    depends.
    """
    products = sum(segment.products for segment in parts)
    remaining = sum(segment.kernels - segment.products + segment.waited for segment in parts)
    if table is None or not products:
        return 1.0
    factor = 1.0
    for _ in range(_ROUNDS):
        slowed_products = factor * products
        factor = table.slowdown(slowed_products / (slowed_products + remaining))
    return factor


_ROUNDS = 4  # the share hardly changes with the factor


def _priced(parts: SegmentParts, slower: float) -> tuple[int, int]:
    """(ns, source)."""
    # exp and log differ in the last digit between processors: a half is a half on all of them
    by_table = round(round(slower * parts.products + parts.data_movers, 3))
    of_device = by_table + parts.roof
    total = max(of_device + parts.waited, parts.beside)
    if total - of_device > SLIGHT * total:
        code = HOST_MEMORY
    elif not by_table:
        code = ROOFLINE
    elif parts.roof / max(1, total) > SLIGHT:
        code = MIXED
    else:
        code = OPS
    return min(total, _MOST_NS), code


def table_of(machine: Machine) -> OpTable | None:
    """The machine's op table.  UsageError if there is no such table."""
    return _read(machine.ops) if machine.ops else None


_read = functools.lru_cache(maxsize=4)(read)


def parts_of(
    note: str, flops: int, traffic: int, kernels: int, machine: Machine, table: OpTable | None
) -> SegmentParts:
    """One segment by its kernels; what they leave of its flops and bytes is one more."""
    flops_left, traffic_left, kernels_left = max(0, flops), max(0, traffic), max(1, kernels)
    products = data_movers = 0.0
    roof = waited = beside = 0
    # kernels that the note names
    for match in KERNEL.finditer(note):
        count = int(match["count"] or 1)
        name = match["name"].strip()
        kernel_flops, kernel_bytes = int(match["flops"]), int(match["bytes"])
        # no kernel, and not among the segment's bytes
        if name in HOST_WORK:
            work = host_work.host_work(name, match["shapes"], kernel_bytes, machine)
            waited += work.waited
            beside += work.beside
            continue
        kernel = MeasuredKernel.parse(
            name, match["shapes"], match["dtype"], kernel_flops, kernel_bytes
        )
        kernel_ns = None
        if table is not None:
            kernel_ns = table.ns(kernel)
        # nobody measured one like it
        if kernel_ns is None:
            roof += count * (machine.kernel_ns + _roofline(kernel, machine))
        elif name in PRODUCTS:
            products += count * kernel_ns
        else:
            data_movers += count * kernel_ns
        flops_left -= count * kernel_flops
        traffic_left -= count * kernel_bytes
        kernels_left -= count
    # the note names the commonest only
    if kernels_left > 0:
        unnamed = MeasuredKernel("", (), (), "bfloat16", max(0, flops_left), max(0, traffic_left))
        roof += kernels_left * machine.kernel_ns + _roofline(unnamed, machine)
    return SegmentParts(products, data_movers, roof, waited, beside)


_LISTS = ("multi_tensor_l2norm",)  # one kernel, however many tensors
_WHOLE = ("fp8_transpose",)  # of parameters, not of a rank's part of them
_SCALARS = 16  # bytes


def scaled_kernels(note: str, factor: Fraction, most: int = 0) -> tuple[str, int, int]:
    """Elementwise kernels of ``factor`` times as many elements of parameters.

    There are as many times as many kernels, but at least one of each, and no more of one than
    ``most``, the rank's parameters (0: not known), if there were not; their bytes together are
    ``factor`` times as many.

    Returns:
        (the note; how many bytes and kernels more there are)
    """
    added_bytes = added_kernels = 0

    def scaled(match: re.Match[str]) -> str:
        nonlocal added_bytes, added_kernels
        name = match["name"].strip()
        count = int(match["count"] or 1)
        num_bytes = int(match["bytes"])
        # no kernel, and not among the segment's bytes
        if name in HOST_WORK:
            return f"{match['name']}({match['shapes']}):0:{round(num_bytes * factor)}"
        is_scalar = num_bytes <= _SCALARS
        if name in _WHOLE or is_scalar and count < 3:  # of a step, not of each parameter
            return match[0]
        new_count = count
        if name not in _LISTS and count > 1:
            wanted = max(1, round(count * factor))
            new_count = min(wanted, max(count, most or wanted))
        new_bytes = num_bytes
        if not is_scalar:
            new_bytes = max(1, round(num_bytes * count * factor / new_count))
        added_bytes += new_count * new_bytes - count * num_bytes
        added_kernels += new_count - count
        growth = new_bytes / num_bytes
        shapes = ",".join(_scaled_shape(text, growth) for text in match["shapes"].split(","))
        flops = round(int(match["flops"]) * new_bytes / num_bytes)
        text = f"{match['name']}({shapes}){match['dtype']}:{flops}:{new_bytes}"
        if new_count > 1:
            text += f"*{new_count}"
        return text

    new_note = KERNEL.sub(scaled, note)
    return new_note, added_bytes, added_kernels


def _scaled_shape(text: str, factor: float) -> str:
    """A shape whose first dimension is ``factor`` times as long; one of 1 stays."""
    first, remainder = re.match(r"(\d*)(.*)", text).groups()  # type: ignore[union-attr] # maybe ""
    if first in ("", "1"):
        return text
    return f"{max(1, round(int(first) * factor))}{remainder}"


# of bf16 where a machine does not say: half on the data sheets of A100, H100 and B200; outside
# tensor cores a sixteenth, a fifteenth and a thirtieth
_TF32_OF_BF16, _FP32_OF_BF16 = 1 / 2, 1 / 16


def _product_rate(machine: Machine, dtype: str) -> float:
    """Flops per second of large products in a type; UnsupportedError of FP8 without a rate."""
    if dtype in machine.flops:
        return machine.flops[dtype]
    bf16 = machine.flops["bf16"]
    if dtype == "fp8":
        fix = "a machine with fp8 in its flops, or a job without FP8"
        raise UnsupportedError(f"{machine.name} has no rate of products in FP8", fix=fix)
    if dtype == "tf32" and machine.generation != "volta":
        return bf16 * _TF32_OF_BF16
    # Volta has no TF32, so its fp32 operands are multiplied in fp32
    if dtype in ("tf32", "fp32"):
        return machine.flops.get("fp32", bf16 * _FP32_OF_BF16)
    return bf16


_MULTIPROCESSORS = {"volta": 80, "ampere": 108, "hopper": 132, "blackwell": 148}  # V100 to B200
_QUERIES = 128  # of a block of fused attention (FlashAttention-2, arXiv 2307.08691, section 3.3)


def _roofline(kernel: MeasuredKernel, machine: Machine) -> int:
    """ns of its work, by the larger of flops and bytes.

    A block of fused attention is some queries of one head, and one multiprocessor computes it.
    Under a causal mask the last queries see all keys, so that a block takes up to twice the mean.
    No attention is shorter than its longest block, and half of that is what the others wait at the
    end.  Products are not like that: of those on H100 and H200 that were measured, waves of tiles
    (NVIDIA's Matrix Multiplication Background, DU-09799) explain nothing that sizes do not.
    """
    name = _plain(kernel.name)
    dtype = product_type(name, kernel.dtype)
    rate = _product_rate(machine, dtype)
    if dtype in ("bf16", "fp16"):
        rate = machine.flops.get(name, rate)  # attention, attention_backward
    flops = float(kernel.flops)
    if name in ("attention", "attention_backward") and kernel.shapes and kernel.shapes[0]:
        queries = max(_QUERIES, math.prod(kernel.shapes[0][:-1]))
        times_mean = 2 if _causal_length(kernel) else 1
        longest_block = min(flops * _QUERIES / queries * times_mean, flops)
        # flops of all multiprocessors in the time of the longest block
        longest = longest_block * _MULTIPROCESSORS[machine.generation]
        flops = max(longest, flops + longest / 2)
    compute_s = flops / rate
    memory_s = kernel.bytes / machine.memory_rate
    return round(1e9 * max(compute_s, memory_s))
