"""Triton without a driver: ``kernel[grid](…)`` starts nothing.

A kernel writes into tensors that Python has made, so that on shapes a launch is what it reads and
writes, whosever it is; on values it is a function of ``COMPUTED``, or refused by its name.  Where
triton is not installed, its modules are stubs: kernels keep their names and do the same.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime.devices import kernels
from megatron_prism.runtime.devices.kernels import fused
from megatron_prism.runtime.known_values import forget

# the kernels that costs know by another name
_COSTS = {
    "_permute_kernel": "permute",
    "_unpermute_kernel": "unpermute",
    "_unpermute_bwd_with_merging_probs_kernel": "unpermute",
    "_sort_chunks_by_map_kernel": "sort_chunks",
    "cross_entropy_kernel": "cross_entropy",
    "element_mul_kernel": "mul",
}

# kernel -> what it writes on tier cpu; its arguments come by name, as they have other places in
# other releases
COMPUTED = kernels.COMPUTED


def _launch(function: Any, args: tuple[object, ...], options: dict[str, object]) -> None:
    name = getattr(function, "__name__", "?")
    tensors = [a for a in (*args, *options.values()) if isinstance(a, torch.Tensor)]
    # shapes alone: its cost counts, and what it wrote is unknown
    if any(tensor.is_meta for tensor in tensors):
        fused(_COSTS.get(name, name), 0, *tensors)
        for tensor in tensors:
            forget(tensor)
        return
    if name not in COMPUTED:
        message = f"the triton kernel {name} needs a GPU, and has no stand-in here"
        fix = "leave out the flag that asks for this fusion, or --prism-tier meta or cuda"
        raise UnsupportedError(message, fix=fix)
    signature = inspect.signature(function.fn)
    named = {k: v for k, v in options.items() if k in signature.parameters}
    with torch.no_grad():
        COMPUTED[name](types.SimpleNamespace(**signature.bind_partial(*args, **named).arguments))


class _Kernel:
    """A kernel of a triton that is not installed.

    Attributes:
        fn: Its function.
        configs: Among which an autotuner would choose; none: there is no autotuner.
        keys: Names of the arguments for whose values it would choose anew.
        arg_names: Of ``fn``.
    """

    def __init__(self, fn: Callable[..., object]) -> None:
        self.fn, self.__name__, self.__module__ = fn, fn.__name__, fn.__module__
        self.configs: Sequence[object] = ()
        self.keys: Sequence[str] = ()
        self.arg_names = tuple(inspect.signature(fn).parameters)

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return _launcher(self, grid)


class Absent(types.ModuleType):
    """A module of a missing library: any attribute is a decorator that leaves functions alone."""

    def __getattr__(self, name: str) -> object:
        # inspect and pickle ask for such names, and must not get a decorator
        if name.startswith("__"):
            raise AttributeError(name)

        def decorate(*args: object, **kwargs: object) -> object:
            # @decorator without arguments
            if len(args) == 1 and callable(args[0]) and not kwargs:
                return args[0]
            # @decorator(…)
            return lambda function: function

        return decorate


def _jit(fn: Callable[..., object] | None = None, **options: object) -> object:
    return _Kernel(fn) if fn is not None else _Kernel


def _autotune(
    configs: Sequence[object], key: Sequence[str], **options: object
) -> Callable[[object], object]:
    """Stand in for triton.autotune."""

    def decorate(kernel: object) -> object:
        if isinstance(kernel, _Kernel):
            kernel.configs, kernel.keys = configs, key
        return kernel

    return decorate


_MODULES = ("", ".language", ".language.core", ".language.standard", ".language.extra", ".runtime")


def _stub(changes: ProcessChanges) -> None:
    """Megatron and Transformer Engine import triton at module level
    (batch_invariant_kernels.py:15 @0.16.1; pytorch/triton/permutation.py:10 @v2.20).
    """
    names = [f"triton{suffix}" for suffix in _MODULES]
    kernels.add_packages(changes, dict.fromkeys(names, {}), Absent)
    vars(sys.modules["triton"]).update(
        __version__="0.0.0",
        jit=_jit,
        autotune=_autotune,
        cdiv=lambda x, y: -(-x // y),
        next_power_of_2=lambda number: 1 << max(0, number - 1).bit_length(),
    )


def _launcher(kernel: Any, grid: object) -> Callable[..., None]:
    """KernelInterface.__getitem__: of a kernel in autotuners and heuristics, too."""
    tuners: list[_Tuner] = []
    while True:
        if len(getattr(kernel, "configs", ())) > 1:
            tuners.append(kernel)
        if hasattr(kernel, "__name__") or not hasattr(kernel, "fn"):
            break
        kernel = kernel.fn

    def launch(*args: object, **options: object) -> None:
        for tuner in tuners:
            _tune(tuner, getattr(kernel, "__name__", "?"), args, options)
        _launch(kernel, args, options)

    return launch


class _Tuner(Protocol):
    """What is read of triton's Autotuner.

    Attributes:
        configs: Among which it chooses.
        keys: Names of the arguments for whose values it chooses anew.
        arg_names: Of the kernel.
    """

    configs: Sequence[object]
    keys: Sequence[str]
    arg_names: Sequence[str]


_TUNING_BYTES = 256 << 20  # the driver's get_empty_cache_for_benchmark (triton 3.6)
_tuned: set[tuple[object, ...]] = set()  # kernel, values of keys and types of tensors


def _tune(tuner: _Tuner, name: str, args: tuple[object, ...], options: dict[str, object]) -> None:
    """Allocate what an autotuner allocates before the first launch with such arguments.

    It measures each configuration with a buffer that empties the L2 cache, and frees it.  The
    allocator keeps the segment, from which later tensors are cut.

    Args:
        tuner: The autotuner.
        name: Of the kernel in it.
        args: Of the launch.
        options: Of the launch, by name.

    Source: Autotuner.run (triton/runtime/autotuner.py, triton 3.6), do_bench (triton/testing.py).
    """
    arguments = {**dict(zip(tuner.arg_names, args, strict=False)), **options}
    key: list[object] = [name]
    for argument in tuner.keys:
        if argument in arguments:
            key.append(arguments[argument])
    shapes: list[torch.Tensor] = []
    for argument, value in arguments.items():
        if argument in tuner.arg_names and isinstance(value, torch.Tensor):
            key.append(value.dtype)
            if value.is_meta:
                shapes.append(value)
    # values are computed by stand-ins, of which none is tuned
    if not shapes or tuple(key) in _tuned:
        return
    _tuned.add(tuple(key))
    torch.empty(_TUNING_BYTES, dtype=torch.uint8, device=shapes[0].device)


def replace_launches(changes: ProcessChanges) -> str:
    """Have kernels start nothing until ``changes`` are undone; says what stands in."""
    _tuned.clear()
    if importlib.util.find_spec("triton") is None:
        _stub(changes)
        return "triton: absent; its kernels have names alone"
    from triton.runtime import driver  # type: ignore[import-not-found]
    from triton.runtime.jit import KernelInterface  # type: ignore[import-not-found]

    changes.set(KernelInterface, "__getitem__", _launcher)
    target = types.SimpleNamespace(backend="cuda", arch=90, warp_size=32)
    none = types.SimpleNamespace(  # autotune() asks for a driver as it decorates
        get_benchmarker=lambda: None,
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_device_properties=lambda device: {},
    )
    changes.set(driver, "_active", none)
    return "triton: its kernels start nothing"
