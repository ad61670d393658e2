"""Where Transformer Engine's Python asks for a CUDA device, or takes shapes for something else.

Each hook says what would go wrong without it.  All are undone with the ``ProcessChanges``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import sys
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch

from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime.devices import cuda_graphs
from megatron_prism.runtime.devices.kernels import add_packages
from megatron_prism.runtime.devices.moe_dispatch import counts
from megatron_prism.runtime.devices.triton import Absent
from megatron_prism.runtime.te_kernels import attention
from megatron_prism.runtime.te_kernels.table import Kernel

if TYPE_CHECKING:
    from megatron_prism.runtime.devices.live_bytes import LiveBytes

_TE = "transformer_engine.pytorch"


def _no_onnx(changes: ProcessChanges) -> None:
    """Export to ONNX is imported with the rest (pytorch/export.py @v2.9), and nobody exports."""
    names = ("onnx", "onnxscript", f"{_TE}.onnx_extensions")
    add_packages(changes, {name: {} for name in names if name not in sys.modules}, Absent)


def _one_device(changes: ProcessChanges) -> None:
    """``torch.cuda.device(x.device)`` refuses ``meta`` (module/grouped_linear.py @v2.9)."""
    changes.set(torch.cuda, "device", contextlib.nullcontext)


def _wrappers_of_shapes(changes: ProcessChanges) -> None:
    """FP8 tensors are wrappers; no function mode sees them come, and sends their ``cuda`` elsewhere
    (quantized_tensor.py, _make_wrapper_subclass @v2.20).
    """
    make = torch.Tensor._make_wrapper_subclass

    def on_meta(*args: Any, **options: Any) -> Any:
        device = options.get("device")  # the number of one, perhaps 0
        if device is not None and torch.device(device).type == "cuda":
            options["device"] = "meta"
        return make(*args, **options)

    changes.set(torch.Tensor, "_make_wrapper_subclass", staticmethod(on_meta))


def _a_cuda_release(changes: ProcessChanges) -> None:
    """Blocks of FP8 are refused below CUDA 12.9, which torch's build for CPUs has not at all
    (quantization.py:180 @v2.20).
    """
    if torch.version.cuda is None:
        changes.set(torch.version, "cuda", "13.0")


def before_import(changes: ProcessChanges) -> None:
    """What must be so when its modules are imported."""
    for name in ("float", "half", "bfloat16"):  # it replaces them (tensor/__init__.py:88 @v2.20)
        changes.set(torch.nn.Module, name, vars(torch.nn.Module)[name])
    _no_onnx(changes)
    _a_cuda_release(changes)
    attention.add_flash_attn(changes)
    _one_device(changes)
    _wrappers_of_shapes(changes)


class _Operator:
    """A ``torch.library.custom_op`` that is a function: below the dispatcher no mode would see what
    it allocates (attention/dot_product_attention/softmax.py:21 @v2.20).
    """

    def __init__(self, name: str, function: Kernel) -> None:
        self.function = function
        self.signature = inspect.signature(function)
        self.default = self
        self.differentiable = cast(Any, None)
        self.__name__ = name
        space, _, leaf = name.partition("::")
        setattr(getattr(torch.ops, space), leaf, self)

    def register_fake(self, fake: object = None) -> object:
        return fake if fake is not None else lambda fake: fake

    register_kernel = impl = register_torch_dispatch = register_vmap = (
        lambda self, *args, **options: lambda function: function
    )

    def register_autograd(self, backward: Kernel, *, setup_context: Kernel | None = None) -> None:
        """As an autograd function, whose backward runs in sight, too."""
        members = {
            "forward": staticmethod(lambda *args: self.function(*args)),
            "setup_context": staticmethod(setup_context or (lambda ctx, inputs, output: None)),
            "backward": staticmethod(backward),
        }
        name = self.__name__.replace("::", "_")
        self.differentiable = type(name, (torch.autograd.Function,), members)

    def __call__(self, *args: object, **options: object) -> object:
        bound = self.signature.bind(*args, **options)
        bound.apply_defaults()
        run = self.function if self.differentiable is None else self.differentiable.apply
        return run(*bound.arguments.values())


@contextlib.contextmanager
def operators_in_sight() -> Iterator[None]:
    """What is declared inside as a custom operator is a plain function."""
    declare = torch.library.custom_op

    def custom_op(name: str, fn: Kernel | None = None, /, **options: Any) -> object:
        if fn is None:
            return lambda fn: custom_op(name, fn, **options)
        if fn.__module__.startswith(_TE):
            return _Operator(name, fn)
        # parts of torch that it imports for the first time
        return declare(name, fn, **options)

    torch.library.custom_op = custom_op  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.library.custom_op = declare


_workspaces: dict[tuple[bool, ...], object] = {}


def _workspaces_on_the_device(changes: ProcessChanges) -> None:
    """``A.device.index`` of shapes is None, for which torch.empty takes the host
    (cpp_extensions/gemm.py:228 @v2.20; since 2.10).
    """
    changes.on_undo(_workspaces.clear)
    for name, module in list(sys.modules.items()):
        function = vars(module).get("get_cublas_workspace") if name.startswith(_TE) else None
        if function is not None:

            def on_device(device: int | None, *which: bool, of: Kernel = function) -> object:
                return _workspaces.setdefault(which, of(device or 0, *which))

            changes.set(module, "get_cublas_workspace", on_device)


def kept() -> Iterator[tuple[str, object]]:
    """(whose, tensor) of what its modules keep beside their layers."""
    base = sys.modules.get(f"{_TE}.module.base")
    before = [getattr(base, f"_{name}cublas_workspace", None) for name in ("", "multi_stream_")]
    for held in (*_workspaces.values(), *before):  # until 2.9 in two variables
        workspaces = held if isinstance(held, list) else [held]
        for workspace in workspaces:
            yield "cuBLAS workspace", workspace
    for tensor in getattr(base, "_dummy_wgrads", {}).values():
        yield "gradients that Transformer Engine returns in place of main_grad", tensor


def _workspace_comes_first(changes: ProcessChanges) -> None:
    """A layer asks for the workspace when it is made, if its weight is CUDA's
    (module/linear.py:2329 @v2.20).
    """
    linear = importlib.import_module(f"{_TE}.module.linear")
    if hasattr(linear.Linear, "_prealloc_cublas_workspace"):
        changes.set(
            linear.Linear,
            "_prealloc_cublas_workspace",
            lambda self: linear.get_cublas_workspace(0, False, False),
        )


class _Torch(types.ModuleType):
    """torch for one module, but for the names that are set on it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _replace_in(changes: ProcessChanges, module: str, **names: object) -> None:
    instead = _Torch("torch")
    vars(instead).update(names)
    changes.set(importlib.import_module(f"{_TE}.{module}"), "torch", instead)


def _made(*args: Any) -> torch.device:
    return torch.device("cpu") if args == ("meta",) else torch.device(*args)


def _parameters_are_made(changes: ProcessChanges) -> None:
    """A parameter on ``meta`` is one that is not made yet, and is made anew (module/base.py:1820
    @v2.20; te.ops: ops/basic/basic_linear.py:346, at every forward pass).
    """
    _replace_in(changes, "module.base", device=_made)
    for kind in vars(importlib.import_module(f"{_TE}.ops.basic")).values():
        if isinstance(kind, type) and "pre_first_fuser_forward" in vars(kind):
            # te.ops make parameters again before each forward pass, which this keeps from happening
            first = vars(kind)["pre_first_fuser_forward"]

            def without_reset(self: Any, *args: object, first: Kernel = first) -> object:
                self.reset_parameters = lambda: None
                try:
                    return first(self, *args)
                finally:
                    del self.reset_parameters

            changes.set(kind, "pre_first_fuser_forward", without_reset)


def _some_experts_are_padded(changes: ProcessChanges) -> None:
    """Counts of tokens that we make up are even, and would never be padded for FP8; a router's are
    not (module/fp8_padding.py:74, fp8_unpadding.py:72 @v2.20).
    """
    for name, kind in (("fp8_padding", "Fp8Padding"), ("fp8_unpadding", "Fp8Unpadding")):
        module = importlib.import_module(f"{_TE}.module.{name}")
        owner, resize = getattr(module, kind), getattr(module, f"_{kind}")
        original, back = owner.forward, kind == "Fp8Unpadding"

        def forward(
            self: Any,
            x: torch.Tensor,
            splits: list[int],
            original: Kernel = original,
            resize: Any = resize,
            back: bool = back,
        ) -> object:
            align = self.align_size or 16
            # known counts are padded by Transformer Engine, and so are uneven ones
            if not counts["made_up"] or any(count % align for count in splits):
                return original(self, x, splits)
            padded = list(splits)
            for expert in range(0, len(splits), 2):  # every second expert gets a whole pad
                padded[expert] += align
            out = resize.apply(x, (splits, padded, torch.is_grad_enabled()))
            if back:
                return out
            return out, padded

        changes.set(owner, "forward", forward)


def _blackwell_at_hand(changes: ProcessChanges) -> None:
    """MXFP8 asks for capability 10.0, and our device is a Hopper GPU (quantization.py:162 @v2.20);
    what it keeps is as on Blackwell.
    """
    quantization = importlib.import_module(f"{_TE}.quantization")
    changes.set(quantization, "check_mxfp8_support", lambda: (True, ""))


def _wrappers_have_no_memory(changes: ProcessChanges, live: LiveBytes) -> None:
    """A quantised tensor has a storage of its own on ``meta``, beside those of its parts."""
    tensor = importlib.import_module(f"{_TE}.tensor")
    changes.set(live, "wrappers", (tensor.QuantizedTensor,))


def _states_are_tensors(changes: ProcessChanges) -> None:
    """Only a CUDA generator has states for graphs (pytorch/distributed.py:111 @v2.20)."""
    distributed = importlib.import_module(f"{_TE}.distributed")
    if hasattr(distributed, "graph_safe_rng_available"):
        changes.set(distributed, "graph_safe_rng_available", lambda: False)


class _OnDevice:
    """A tensor of shapes that says it is CUDA's; of the same class for ``isinstance``."""

    device = torch.device("cuda")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._tensor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


def _shapes_are_offloaded(changes: ProcessChanges) -> None:
    """Only tensors whose ``device.type`` is CUDA's go to the host (cpu_offload.py:454 @v2.20)."""
    state = vars(importlib.import_module(f"{_TE}.cpu_offload")).get("OffloadableLayerState")
    if state is not None:
        asked = state._check_if_offload
        changes.set(state, "_check_if_offload", lambda self, t: asked(self, _OnDevice(t)))


class _Bfloat16:
    """What fp32 and bf16 are equal to."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, dtype: object) -> bool:
        return dtype in (torch.bfloat16, torch.float32)


def _attention_of_all_kinds(changes: ProcessChanges) -> None:
    """fp32 and heads of odd sizes have no attention for context parallelism
    (dot_product_attention/utils.py:670, backends.py:946, :2407 @v2.20); kernels of tier cpu take
    both, and small jobs are so.
    """
    folder = "attention.dot_product_attention"
    _replace_in(changes, f"{folder}.backends", bfloat16=_Bfloat16())
    utils = importlib.import_module(f"{_TE}.{folder}.utils")
    choose = utils.get_attention_backend

    def choose_for_all(params: Any, *arguments: object) -> Any:
        backend = choose(params, *arguments)
        available = backend[-1]
        # some back-end takes the job as it is
        if any(available):
            return backend
        usual = {"qkv_dtype": torch.bfloat16, "head_dim_qk": 64, "head_dim_v": 64}
        return choose(dataclasses.replace(params, **usual), *arguments)

    changes.set(utils, "get_attention_backend", choose_for_all)


def _graphs_keep_shapes(changes: ProcessChanges) -> None:
    """A weak reference is made of an address (pytorch/utils.py:1050 @v2.20)."""
    graph = importlib.import_module(f"{_TE}.graph")
    changes.set(graph, "_graph_pool_handle", cuda_graphs.graph_pool_handle)
    for module in (graph, importlib.import_module(f"{_TE}.utils")):
        changes.set(module, "make_weak_ref", cuda_graphs.weak_references)
    changes.set(graph, "graph_safe_rng_available", lambda: False)


def set_up(changes: ProcessChanges, live: LiveBytes | None) -> None:
    """What is changed in its modules once they are there; ``live``: of shapes."""
    _states_are_tensors(changes)
    # tier cpu: values
    if live is None:
        _attention_of_all_kinds(changes)
        return
    _shapes_are_offloaded(changes)
    _workspaces_on_the_device(changes)
    _workspace_comes_first(changes)
    _parameters_are_made(changes)
    _some_experts_are_padded(changes)
    _blackwell_at_hand(changes)
    _wrappers_have_no_memory(changes, live)
    _graphs_keep_shapes(changes)
