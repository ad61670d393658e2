"""Send tensors that Megatron puts on ``cuda`` elsewhere when there is no CUDA device.

A ``TorchFunctionMode`` that rewrites device arguments: ``cpu`` tier (real values on the CPU) or
``meta`` tier (shapes only).  It also answers the few questions Megatron asks of CUDA tensors:

* ``tensor.type()`` says ``torch.cuda.FloatTensor``, and ``is_cuda`` True, of what stands for the
  device's: DistributedOptimizer tests that string (core/optimizer/distrib_optimizer.py:361
  @0.16.1), Megatron-FSDP and offloading optimizers ask for the device
* on ``meta``, ``item()``, ``tolist()``, ``bool()`` and friends, which need data, answer what is
  known (``known_values``), else ``Unknown``: a finite positive number where a loss or gradient norm
  is asked for, False for truth values but ``all``'s; ``equal`` compares sizes

Everything else passes through.  The mode stays active until the session is closed; backward runs in
the calling thread (``torch.autograd.set_multithreading_enabled(False)``), so it applies there too.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from megatron_prism.runtime import known_values
from megatron_prism.runtime.devices import cuda
from megatron_prism.runtime.devices.host_shapes import HostShapes, is_large
from megatron_prism.runtime.known_values import PLACEHOLDER, Unknown, UnknownCount

_TO_CUDA = torch.Tensor.cuda
_TO = torch.Tensor.to
_TYPE = torch.Tensor.type
_EQUALS = (torch.equal, torch.Tensor.equal)
# reading a value on the host waits for the device
_READS: dict[object, str] = {
    torch.Tensor.item: "item",
    torch.Tensor.__float__: "item",
    torch.Tensor.__int__: "item",
    torch.Tensor.__bool__: "bool",
    torch.Tensor.tolist: "tolist",
    torch.Tensor.cpu: "cpu",
    **dict.fromkeys(_EQUALS, "equal"),
}
# but not here, where states of the CPU's generator are compared (:264 @0.16.1)
_OF_HOST = "core/tensor_parallel/random.py"
# what looks at a tensor: it takes no device, and gives none; three of four calls
_ATTRIBUTES = (
    "shape dtype device requires_grad is_meta is_leaf is_sparse layout grad_fn output_nr ndim "
    "itemsize nbytes"
)
_METHODS = (
    "size dim numel stride storage_offset untyped_storage is_contiguous element_size "
    "is_floating_point"
)
_LOOKS = frozenset(
    (
        *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES.split()),
        *(getattr(torch.Tensor, name) for name in _METHODS.split()),
        torch._C._set_grad_enabled,
    )
)
# torch.cuda.FloatTensor, …, which its stubs do not declare; by torch's names of dtypes, since
# ``prism verify --precise`` has another behind float32
_LEGACY = {
    getattr(torch.cuda, f"{name}Tensor"): dtype
    for name, dtype in (
        ("Double", torch.float64),
        ("Float", torch.float32),
        ("Half", torch.float16),
        ("BFloat16", torch.bfloat16),
        ("Long", torch.int64),
        ("Int", torch.int32),
        ("Byte", torch.uint8),
        ("Bool", torch.bool),
    )
}
_NAMES = {dtype: f"torch.{kind.__name__}" for kind, dtype in _LEGACY.items()}


# what makes a tensor of numbers that nobody has said, and may pin its memory
_PINNED = frozenset((torch.empty, torch.empty_like, torch.zeros, torch.zeros_like))

_storages = itertools.count(1)
_UNKNOWN, _COUNT = Unknown(PLACEHOLDER), UnknownCount(0)


def _value_or(tensor: torch.Tensor, otherwise: float) -> float:
    """The number in a tensor of one element, if it is known."""
    value = known_values.value_of(tensor)
    return otherwise if value is None else value.item()


def _number(tensor: torch.Tensor) -> float | int | bool:
    """The number in a tensor of one element; a stand-in of its type where it is not known."""
    if tensor.dtype == torch.bool:
        return _value_or(tensor, known_values.asserted(tensor))
    if tensor.is_floating_point():
        return _value_or(tensor, _UNKNOWN)
    return _value_or(tensor, _COUNT)


def _float(tensor: torch.Tensor) -> float:
    return float(_value_or(tensor, PLACEHOLDER))


def _int(tensor: torch.Tensor) -> int:
    return int(_value_or(tensor, PLACEHOLDER))


def _bool(tensor: torch.Tensor) -> bool:
    return bool(_value_or(tensor, known_values.asserted(tensor)))


def _list(tensor: torch.Tensor) -> object:
    value = known_values.value_of(tensor)
    if value is not None:
        return value.tolist()
    return np.full(tensor.shape, _number(tensor), dtype=object).tolist()


def _on_host(tensor: torch.Tensor, host: HostShapes) -> torch.Tensor:
    """What is known of a meta tensor, or zeros: many of them take no memory."""
    value = known_values.value_of(tensor)
    if value is not None:
        return value.clone()
    if is_large(tensor.shape, tensor.dtype):
        return host.make(tensor.shape, tensor.dtype)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")


def address(tensor: torch.Tensor) -> int:
    """A number for its memory and its place in it: other tensors have others, but for weak
    references, whose storage says where they are.
    """
    storage: Any = tensor.untyped_storage()
    offset_bytes = int(tensor.storage_offset()) * tensor.element_size()
    if not hasattr(storage, "address"):  # far above all offsets, and an int64 in any table
        storage.address = next(_storages) << 40
    return int(storage.address) + offset_bytes


class Remap(TorchFunctionMode):
    """Rewrites ``cuda`` to ``target`` (``cpu`` or ``meta``)."""

    def __init__(self, target: str, host: HostShapes | None = None) -> None:
        """``host``: keeps the large copies of meta tensors that are on the host."""
        super().__init__()
        self.target = torch.device(target)
        self.host = HostShapes() if host is None else host
        self.meta = target == "meta"

    def _is_cuda(self, device: object) -> bool:
        if isinstance(device, torch.device):
            return device.type == "cuda"
        if isinstance(device, str):
            return device.startswith("cuda")
        return isinstance(device, int) and not isinstance(device, bool)

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in _LOOKS:
            return func(*args, **(kwargs or {}))
        if kwargs:
            if self._is_cuda(kwargs.get("device")):
                if func is torch.tensor:  # copies from the host, and waits until it is there
                    cuda.host_waits("copy")
                kwargs = {**kwargs, "device": self.target}
            if "pin_memory" in kwargs:
                # a call that names pinning, wanted or not, makes copies of the device's tensors
                if self.meta and func in _PINNED and self._on_cpu(args, kwargs):
                    return self._host_copy(func, args, kwargs)
                kwargs = {**kwargs, "pin_memory": False}
        else:
            kwargs = {}
        if func in _ANSWERED:
            out = self._answer(func, args, kwargs)
        else:
            try:
                out = func(*args, **kwargs)
            except RuntimeError:  # its shape depends on values
                out = known_values.on_host(func, args, kwargs) if self.meta else None
                if out is None:
                    raise
        if self.meta:
            known_values.follow(func, args, kwargs, out)
        return out

    def _answer(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        reads = func in _READS and self._of_device(func, args, kwargs)
        # the frame that called torch, two above: this function and __torch_function__
        if reads and not sys._getframe(2).f_code.co_filename.endswith(_OF_HOST):
            cuda.host_waits(_READS[func])
        special = _SPECIAL.get(func)
        if special is not None:
            return special(self, func, args, kwargs)
        answer_of_shapes = _OF_SHAPES.get(func)
        if answer_of_shapes is not None and args[0].is_meta:
            return answer_of_shapes(*args)
        return func(*args, **kwargs)

    def _on_cpu(self, args: Sequence[object], kwargs: Mapping[str, Any]) -> bool:
        """Whether what these arguments make is on the host."""
        device = kwargs.get("device")
        if device is not None:
            return torch.device(device).type == "cpu"
        if kwargs["pin_memory"]:
            return True
        like = args[0] if args else None  # of empty_like; else a shape
        return not (isinstance(like, torch.Tensor) and like.is_meta)

    def _host_copy(
        self, func: Callable[..., torch.Tensor], args: Sequence[object], kwargs: dict[str, object]
    ) -> torch.Tensor:
        """New memory of the host for what goes to the device, or comes from there."""
        kwargs = {**kwargs, "pin_memory": False}
        with torch._C._DisableTorchDispatch():  # it is not the device's
            shape = func(*args, **{**kwargs, "device": "meta"})
        if is_large(shape.shape, shape.dtype):
            return self.host.make(shape.shape, shape.dtype)
        return func(*args, **kwargs)

    def _cpu(
        self, func: Callable[..., object], args: Sequence[torch.Tensor], kwargs: dict[str, object]
    ) -> object:
        # host tensors have values and stay as they are
        if not args[0].is_meta:
            return func(*args, **kwargs)
        copy = _on_host(args[0], self.host)
        cuda.copied(copy, args[0], blocks=True)
        return copy

    def _cuda(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        blocks = not kwargs.get("non_blocking", len(args) > 2 and args[2])
        return self._moved(tensor, _TO(tensor, self.target), blocks)

    def _moved(self, before: torch.Tensor, after: torch.Tensor, blocks: bool) -> torch.Tensor:
        """``after`` on the device; a copy from the host ``blocks`` it until the stream is idle."""
        if after.is_meta and not before.is_meta:
            known_values.keep_lengths(after, before)
            _convert_on_device(after, before.dtype, blocks)
            if blocks:
                cuda.host_waits("copy")
        return after

    def _to(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        # Tensor.to("cuda", …) as a positional argument
        if len(args) > 1 and not isinstance(args[1], torch.dtype) and self._is_cuda(args[1]):
            args = (tensor, self.target, *args[2:])
        names_device = kwargs.get("device", _device_in(args)) is not None
        # a shape moves: on the host it gets the values that are known
        if self.meta and tensor.is_meta and names_device:
            return self._from_meta(args, kwargs)
        return self._moved(tensor, func(*args, **kwargs), _blocks(args, kwargs))

    def _data(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """``param.data = device tensor`` of a parameter built on the host; meta wants another."""
        tensor, value = args
        if self.meta and value.is_meta and not tensor.is_meta:
            become(tensor, value)
            return None
        return func(*args, **kwargs)

    def _from_meta(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A copy to the host has what is known, or zeros of the right shape and dtype."""
        # only copies to the host can be answered by values that are known
        device = kwargs.get("device", _device_in(args))
        to_host = isinstance(device, (str, torch.device)) and torch.device(device).type == "cpu"
        if not to_host:
            return _TO(*args, **kwargs)
        tensor = args[0]
        # ``to`` takes a dtype in any place
        dtypes = [argument for argument in args[2:] if isinstance(argument, torch.dtype)]
        dtype = kwargs.get("dtype")
        if not dtype:
            dtype = dtypes[0] if dtypes else tensor.dtype
        copy = _on_host(tensor, self.host).to(dtype)
        _convert_on_device(tensor, copy.dtype, _blocks(args, kwargs))
        cuda.copied(copy, tensor, _blocks(args, kwargs))
        return copy

    def _device(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """``torch.device(0)``: a number is the accelerator's, which torch 2.13 asks for at once."""
        if len(args) == 1 and isinstance(args[0], int):
            return func("cuda", args[0])
        return func(*args, **kwargs)

    def _type(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        if len(args) == 1 and not kwargs:  # a question
            name = _NAMES.get(tensor.dtype) or func(torch.empty(0, dtype=tensor.dtype))
            return name.replace("torch.", "torch.cuda.", 1)
        wanted = args[1] if len(args) > 1 else kwargs.get("dtype")
        if isinstance(wanted, str) and wanted.startswith("torch.cuda."):
            wanted = getattr(torch.cuda, wanted.rpartition(".")[2])
        if wanted in _LEGACY:
            return _TO(tensor, _LEGACY[wanted])
        return func(*args, **kwargs)

    def _pin_memory(self, func: object, args: Sequence[torch.Tensor], kwargs: object) -> object:
        """The host's tensor as it is: nothing is pinned without a device."""
        return args[0]

    def _of_device(self, func: object, args: Sequence[torch.Tensor], kwargs: object) -> bool:
        return args[0].device.type == self.target.type

    def _equal(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Shapes are equal where their sizes are: hashes of parameters that replicas compare."""
        if args[0].is_meta or args[1].is_meta:
            return args[0].shape == args[1].shape
        return func(*args, **kwargs)

    def _tensor(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """``torch.tensor([…])`` of meta scalars would read them."""
        data = args[0] if args else kwargs.get("data")
        leaf = data
        shape = list[int]()
        # nested lists: the shape is theirs, the first leaf says the type
        while isinstance(leaf, (list, tuple)) and leaf:
            shape.append(len(leaf))
            leaf = leaf[0]
        # scalars on meta cannot be read: the result is as unknown as they are
        if self.meta and isinstance(leaf, torch.Tensor) and leaf.is_meta:
            dtype = kwargs.get("dtype") or leaf.dtype
            return torch.empty((*shape, *leaf.shape), dtype=dtype, device="meta")
        tensor = func(*args, **kwargs)
        known_values.learn(tensor, data)
        return tensor

    def _copy_(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """``host.copy_(meta)`` has no data to bring: the host tensor keeps what it holds."""
        target, source = args[:2]
        # device to host
        if source.is_meta and not target.is_meta:
            blocks = not kwargs.get("non_blocking", args[2:] == (True,))
            _convert_on_device(source, target.dtype, blocks)
            cuda.copied(target, source, blocks)
            return target
        # host to device: a copy that blocks makes the host wait for the stream
        if target.is_meta and isinstance(source, torch.Tensor) and not source.is_meta:
            blocks = not kwargs.get("non_blocking", args[2:] == (True,))
            _convert_on_device(target, source.dtype, blocks)
            if blocks:
                cuda.host_waits("copy")
        return func(*args, **kwargs)


def _convert_on_device(of_device: torch.Tensor, host_dtype: torch.dtype, blocks: bool) -> None:
    """Allocate what a copy between host and device takes of the device beside its two ends.

    A copy that the host does not wait for is converted on the device, which holds it once more in
    the host's type meanwhile; of any other the host converts it.

    Args:
        of_device: The end on the device.
        host_dtype: Of the other end.
        blocks: Whether the host waits.

    Source: aten/src/ATen/native/cuda/Copy.cu:346 copy_kernel_cuda @2.11.
    """
    if not blocks and of_device.dtype != host_dtype:
        torch.empty(of_device.shape, dtype=host_dtype, device="meta")


def _device_in(args: Sequence[Any]) -> Any:
    """The device that ``Tensor.to`` is given without its name, or None."""
    if len(args) > 1 and isinstance(args[1], (str, torch.device)):
        return args[1]
    return None


def _blocks(args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether ``Tensor.to`` waits for the copy: ``non_blocking`` is its first flag, then copy."""
    flags = [argument for argument in args[2:] if isinstance(argument, bool)]
    return not kwargs.get("non_blocking", flags[:1] == [True])


def become(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """``tensor`` is the same object with the data of ``value``, and keeps what was written on it.

    Megatron marks parameters (sequence-parallel, an expert's), and ties weights by sharing them.
    """
    marks = dict(vars(tensor))
    if isinstance(tensor, torch.nn.Parameter) and not isinstance(value, torch.nn.Parameter):
        value = torch.nn.Parameter(value, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, value)
    vars(tensor).update(marks)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.Tensor.data.__set__: Remap._data,  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__: Remap._of_device,  # type: ignore[attr-defined]
    _TO_CUDA: Remap._cuda,
    _TO: Remap._to,
    _TYPE: Remap._type,
    torch.Tensor.cpu: Remap._cpu,
    torch.device: Remap._device,
    torch.Tensor.pin_memory: Remap._pin_memory,
    **dict.fromkeys(_EQUALS, Remap._equal),
    torch.tensor: Remap._tensor,
    torch.Tensor.copy_: Remap._copy_,
}
# what reads values answers this of shapes
_OF_SHAPES: dict[Any, Callable[..., Any]] = {
    torch.Tensor.item: _number,
    torch.Tensor.__float__: _float,
    torch.Tensor.__int__: _int,
    torch.Tensor.__index__: _int,
    torch.Tensor.__bool__: _bool,
    torch.Tensor.tolist: _list,
    torch.Tensor.data_ptr: address,
}
_ANSWERED = _SPECIAL.keys() | _OF_SHAPES.keys() | _READS.keys()
