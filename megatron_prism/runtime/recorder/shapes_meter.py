"""Flops, bytes and kernels of segments whose kernels do not run, from shapes.

In : every aten call (``LiveBytes`` sees them all on the meta tier).  Out: Work of the calls since
the last ``take``.  Flops are those of torch.utils.flop_counter's formulas; traffic is what a kernel
must read and write once: its tensor inputs and outputs, of a table that it picks from or puts into
only what it moves.  Views and allocations are no kernels, but deterministic algorithms fill what is
allocated (torch.utils.deterministic.fill_uninitialized_memory).  A transposed operand of a product
is marked ``t``.  Stand-ins for fused kernels, which only allocate, say themselves what they would
have done.

Copies between device and host, and operators of the host on tensors that are kept there, are no
kernels of the device.  Their bytes stand in the same text, one entry a kind (``HOST_WORK`` of
``core.programs.ops``).
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import flop_registry

from megatron_prism.core.jobs.job_settings import THREADS_UNKNOWN
from megatron_prism.core.programs.ops import (
    HOST_COPY,
    HOST_COPY_BESIDE,
    HOST_COPY_UNPINNED,
    ON_HOST,
)
from megatron_prism.runtime.devices import cuda
from megatron_prism.runtime.devices.host_shapes import LEAST_BYTES
from megatron_prism.runtime.recorder.python_calls import PythonCalls

if TYPE_CHECKING:
    from torch._ops import OpOverload

# allocate, or only look: no kernel is launched
_FREE = frozenset(
    (
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "set_",
        "resize_",
        "detach",
        "alias",
        "view",
        "_unsafe_view",
        "_reshape_alias",
        "record_stream",
        "item",
        "_local_scalar_dense",
        "is_same_size",
    )
)
_ALLOCATE = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))
_PICK = frozenset(("embedding", "gather", "index", "index_select"))  # from their first argument
_PUT = frozenset(("index_put_", "scatter_", "scatter_add_", "index_add_", "index_copy_"))  # into it
# casts to FP8, of all experts in one call; what is allocated in deterministic mode
_LOOPED = ("fp8_", "fill_empty")
# what torch hands to cuBLAS, whose type its settings decide; Transformer Engine ignores them
_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm"))
# torch's fused Adam reads four tensors and writes three, though its schema says that it writes
# gradients, too (a scaler's; aten/src/ATen/native/FusedAdam.cpp @2.11)
_UNCHANGED = "grads"
COPIED_WHOLE = "clone_dense"  # a clone whose elements lie as those of its source do
_FROM_HOST = frozenset(("copy_", "_to_copy"))
_LONGEST = 240  # distinct kernels of a segment that are written out


@dataclass
class Work:
    """Work of one segment: counts, and each distinct kernel with how often it ran.

    looped   : kernels that C++ launches behind others, within one operator
    products : matrix products that C++ launches behind others, within one operator
    unseen   : of all products, those for whose shape the library chooses a kernel; an expectation
    python   : calls of the job's functions
    backwards: backwards that began, but those inside of another
    host     : one of ``HOST_WORK`` with the threads of the host's operators -> bytes, which are
               not part of ``traffic``
    """

    flops: int = 0
    traffic: int = 0
    kernels: int = 0
    looped: int = 0
    products: int = 0
    unseen: float = 0.0
    python: int = 0
    backwards: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    host: Counter[str] = field(default_factory=Counter)

    def text(self) -> str:
        """``mm(4096x8192,8192x1024t)bfloat16:68719476736:92274688*2; …``: each distinct kernel
        with its flops, its bytes and how often it ran; commonest first.  What the host does
        stands before them.
        """
        words = [f"{kind}:0:{num_bytes}" for kind, num_bytes in self.host.items()]
        for name, count in self.calls.most_common(_LONGEST):
            # the commonest kernels say how often they ran
            if count > 1:
                name = f"{name}*{count}"
            words.append(name)
        # long notes are cut, and say how much is missing
        left = len(self.calls) - _LONGEST
        if left > 0:
            words.append(f"and {left} others")
        return "; ".join(words)


def _on_meta(values: Sequence[object]) -> list[torch.Tensor]:
    """The tensors of shapes among arguments or results, also inside lists."""
    return [value for value in _flat(values) if isinstance(value, torch.Tensor) and value.is_meta]


def _host_threads() -> int:
    """How many threads an operator of the host has in the job; 0: all of its cores.

    torchrun gives each of several ranks of a host one, unless the job says otherwise
    (torch/distributed/run.py, config_from_args @2.11); torch takes all cores of the others.
    """
    if THREADS_UNKNOWN not in os.environ and os.environ.get("OMP_NUM_THREADS", "").isdigit():
        return int(os.environ["OMP_NUM_THREADS"])
    is_alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
    return 0 if is_alone else 1


def _is_asynchronous(
    name: str, args: Sequence[object], kwargs: Mapping[str, object] | None
) -> bool:
    """Whether the host does not wait for a copy: ``non_blocking`` of one of ``_FROM_HOST``."""
    if kwargs and "non_blocking" in kwargs:
        return bool(kwargs["non_blocking"])
    return name == "copy_" and len(args) > 2 and bool(args[2])


def _tensors(values: Iterable[object]) -> list[torch.Tensor]:
    """All tensors among arguments or results, also inside lists."""
    return [value for value in _flat(values) if isinstance(value, torch.Tensor)]


def _large_source_on_host(name: str, args: Sequence[object]) -> torch.Tensor | None:
    """The tensor of the host that this operator copies to the device; None if it copies none, or
    one so small (a batch's tokens) that the copy is a launch like others.
    """
    if name not in _FROM_HOST:
        return None
    source = args[1] if name == "copy_" else args[0]
    if not isinstance(source, torch.Tensor) or source.is_meta:
        return None
    is_large = source.numel() * source.element_size() >= LEAST_BYTES
    return source if is_large else None


def _bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Meter:
    """Adds up work; ``memory`` is told of storages that come and go while someone listens."""

    def __init__(self) -> None:
        self._work = Work()
        self.python = PythonCalls()
        self._starts = 0  # of the engine, when they were last asked for
        self._names: dict[object, str] = {}
        self._held: list[tuple[str, int, int, list[torch.Tensor]]] | None = None
        self.memory: Callable[[int, int, str], None] | None = None
        # whose a storage is that comes to be now, of the tensor that it comes with, if one is known
        self.note: Callable[[torch.Tensor | None], str] | None = None

    def moved(self, storage: int, num_bytes: int, tensor: torch.Tensor | None = None) -> str:
        """A storage came to be, grew or (negative) went; returns whose it is, if that is known."""
        note = ""
        if num_bytes > 0 and self.note is not None:
            note = self.note(tensor)
        if self.memory is not None and num_bytes:
            self.memory(storage, num_bytes, note)
        return note

    @contextlib.contextmanager
    def held(self) -> Iterator[list[tuple[str, int, int, list[torch.Tensor]]]]:
        """Kernels are put on a list, (name, flops, traffic, tensors), and count at the end if they
        are still there; inside another ``held`` they go on its list.
        """
        outer, self._held = self._held, []
        kernels = self._held
        try:
            yield kernels
        finally:
            self._held = outer
            for kernel in kernels:
                self.add(*kernel)

    def take(self) -> Work:
        """The work since the last call."""
        work, self._work = self._work, Work()
        work.python = self.python.take()
        work.backwards = self._backwards_begun()
        return work

    def _backwards_begun(self) -> int:
        """Backwards since the last call, as the engine of tier meta counts them."""
        starts = getattr(torch.autograd.Variable._execution_engine, "starts", 0)
        begun, self._starts = starts - self._starts, starts
        return max(0, begun)  # another engine begins at 0

    def kernel(
        self,
        func: OpOverload,
        args: Sequence[object],
        kwargs: Mapping[str, Any] | None,
        out: object,
    ) -> None:
        """One aten call has been made."""
        # a view launches no kernel
        if func.is_view:
            return
        packet = func._overloadpacket
        name = self._names.get(packet)
        if name is None:
            name = self._names[packet] = str(packet).removeprefix("aten.")
        # memory that comes or goes launches none, unless new memory is filled
        if name in _FREE and not (name in _ALLOCATE and _fills()):
            return
        tensors, outs = _on_meta(args), _on_meta((out,))
        # the host's own tensors
        if not tensors and not outs:
            return
        if name in _FREE:
            filled_bytes = _bytes_of(outs)
            if filled_bytes:  # as ``zero_`` counts them: in and out
                self.add("fill_empty", 0, 2 * filled_bytes, outs)
            return
        # a copy from the host takes the link, not a kernel
        source = _large_source_on_host(name, args)
        if source is not None:
            target = _on_meta((args[0], out))[0]
            self._copied_from_host(source, target, _is_asynchronous(name, args, kwargs))
            return
        if name == "clone" and _lie_alike(tensors[0], outs[0]):
            name = COPIED_WHOLE
        formula = flop_registry.get(packet)
        # torch knows formulas of matrix products, convolutions and attention alone
        flops = int(formula(*args, **(kwargs or {}), out_val=out)) if formula else 0
        touched = tensors + outs
        if len(tensors) > 1:
            if name in _PICK:
                touched = tensors[1:] + outs + outs  # as much is read as written
            elif name in _PUT:
                touched = tensors[1:] + tensors[-1:]
        self.add(name, flops, _bytes_of(touched), tensors or outs)

    def add(self, name: str, flops: int, traffic: int, tensors: list[torch.Tensor]) -> None:
        """A kernel that ran, or would have run: fused ones are added by their stand-ins."""
        # the caller makes one kernel of what it holds back
        if self._held is not None:
            self._held.append((name, flops, traffic, tensors))
            return
        work = self._work
        work.flops += flops
        work.traffic += traffic
        work.kernels += 1
        work.looped += name.startswith(_LOOPED)
        shapes = ",".join("x".join(map(str, t.shape)) for t in tensors[:3])
        # transposed operands of products have kernels of their own
        if flops and any(map(_turned, tensors[:3])):
            shapes = ",".join("x".join(map(str, t.shape)) + "t" * _turned(t) for t in tensors[:3])
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        # products of fp32 that torch allows to compute in TF32
        if flops and dtype == "float32" and name in _PRODUCTS and _allows_tf32():
            dtype = "tf32"
        work.calls[f"{name}({shapes}){dtype}:{flops}:{traffic}"] += 1

    def copied(self, num_bytes: int) -> None:
        """The current stream copies bytes between device and host."""
        self._work.kernels += 1  # the host launches it
        # what computes is on the default stream, and waits for copies there alone
        kind = HOST_COPY_BESIDE if cuda.current_stream() else HOST_COPY
        self._work.host[f"{kind}()"] += num_bytes

    def _copied_from_host(
        self, source: torch.Tensor, target: torch.Tensor, is_asynchronous: bool
    ) -> None:
        """A tensor of the host was copied to ``target``.

        One of another type is converted by the device behind an asynchronous copy, and else by the
        host before it, into memory that is not pinned (aten/src/ATen/native/cuda/Copy.cu,
        copy_kernel_cuda @2.11).
        """
        # the device converts behind the copy, or no type changes
        if source.dtype == target.dtype or is_asynchronous:
            self.copied(_bytes_of([source]))
            if source.dtype != target.dtype:
                self.add("_to_copy", 0, _bytes_of([source, target]), [target])
            return
        # the host converts first, into memory that is not pinned
        self._work.kernels += 1
        self._work.host[f"{ON_HOST}({_host_threads()})"] += _bytes_of([source, target])
        self._work.host[f"{HOST_COPY_UNPINNED}()"] += _bytes_of([target])

    def worked_on_host(
        self,
        func: OpOverload,
        args: Sequence[object],
        kwargs: Mapping[str, object] | None,
        out: object,
    ) -> None:
        """One aten call has been made of tensors of the host; ``func`` computes there."""
        name = str(func._overloadpacket).removeprefix("aten.")
        if func.is_view or name in _FREE:
            return
        read = _tensors((*args, *(kwargs or {}).values()))
        written = []
        names = [argument.name for argument in func._schema.arguments]
        given_by_name = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        # what the schema marks as written to; without such an argument it is the result
        for argument in func._schema.arguments:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and argument.name != _UNCHANGED:
                written += _tensors((given_by_name.get(argument.name),))
        if not written:
            written = _tensors((out,))
        self._work.kernels += 1  # a segment without any is none, and the call takes time
        self._work.host[f"{ON_HOST}({_host_threads()})"] += _bytes_of(read) + _bytes_of(written)

    def launched_with(self, launches: int, unseen: float) -> None:
        """The kernel that was just added is ``launches`` more, which are products; of all of them
        ``unseen`` have a shape that the library has not kept.
        """
        work = self._work
        work.kernels += launches
        work.products += launches
        work.unseen += unseen


def _lie_alike(source: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether both have their elements in one order, so that torch copies the memory as a whole
    (``memcpy_eligible``, aten/src/ATen/native/cuda/Copy.cu @2.11) and not by elements.
    """
    contiguous = source.is_contiguous() and copy.is_contiguous()
    return contiguous or source.stride() == copy.stride()


def _allows_tf32() -> bool:
    """Whether torch multiplies fp32 operands as TF32: ``torch.backends.cuda.matmul``, however the
    job said so (allow_tf32, set_float32_matmul_precision, TORCH_ALLOW_TF32_CUBLAS_OVERRIDE).
    """
    matmul = torch.backends.cuda.matmul
    # from torch 2.9 on; there allow_tf32 raises if the job used this name
    precision = getattr(matmul, "fp32_precision", None)
    if precision is not None:
        return bool(precision == "tf32")
    return bool(matmul.allow_tf32)


def _fills() -> bool:
    """Whether memory is filled as it is allocated (aten/src/ATen/native/cuda/TensorFactories.cu,
    empty_cuda @v2.11).
    """
    filled: bool = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return torch.are_deterministic_algorithms_enabled() and filled


def _turned(tensor: torch.Tensor) -> bool:
    """Columns lie in memory, not rows."""
    return tensor.dim() > 1 and tensor.stride(-1) != 1 and tensor.stride(-2) == 1


def _flat(value: Iterable[object]) -> list[object]:
    leaves: list[object] = []
    for item in value:
        if isinstance(item, (list, tuple)):
            leaves.extend(_flat(item))
        else:
            leaves.append(item)
    return leaves
