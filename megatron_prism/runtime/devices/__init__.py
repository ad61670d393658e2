"""Where do local ranks run?  ``cuda`` (the real device), ``cpu`` (real values), ``meta`` (shapes).

``install(tier)`` prepares this process, before Megatron is imported: on ``cuda`` nothing changes;
on the others ``cuda`` means another device (``remap``), torch.cuda answers without a driver
(``cuda_stubs``), Transformer Engine is virtual where it is not installed (``virtual_te``) and, on
``meta``, live bytes are counted (``live``).  It cannot be undone within a process.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_prism.core.errors import UsageError
from megatron_prism.runtime.devices import compiled, cuda_choices, masked_softmax, weight_gradient
from megatron_prism.runtime.devices.live_bytes import LiveBytes

__all__ = ["Tier", "best", "install"]


@dataclass(frozen=True)
class Tier:
    """The tier of this process.

    device   : where local tensors live
    live     : the live-byte tracker (meta only)
    stand_in : what stands in for missing libraries, for the summary
    """

    name: str
    device: torch.device
    live: LiveBytes | None = None
    stand_in: tuple[str, ...] = ()


_installed: Tier | None = None


def best() -> str:
    """The most real tier that this host has: ``cuda`` or ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def install(name: str, engine: bool = True, queues: str = "1", history: bool = False) -> Tier:
    """Prepare this process for tier ``name`` (``auto``: the best one here).

    engine : whether the job's own environment has Transformer Engine; then a virtual one stands in
             for it where it is missing, and its FusedAdam for torch's AdamW
    queues : CUDA_DEVICE_MAX_CONNECTIONS of a tier without a device, if the job does not say
    history : keep every request to the allocator (``history``); only ``meta`` has them

    Raises UsageError for an unknown tier, for ``cuda`` without a device, and for a second tier in
    the same process.
    """
    global _installed
    if _installed is not None:
        if name not in (_installed.name, "auto"):
            raise UsageError(
                f"this process already runs tier {_installed.name}, not {name}",
                fix="use one process per tier",
            )
        return _installed
    if name == "auto":
        name = best()
    if name == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(
                "tier cuda needs a CUDA device, and this host has none",
                fix="use --prism-tier cpu (real values) or --prism-tier meta (shapes only)",
            )
        _installed = Tier("cuda", torch.device("cuda"))
    elif name in ("cpu", "meta"):
        _installed = _without_cuda(name, engine, queues)
        if history:
            _keep_history(_installed)
    else:
        raise UsageError(f"unknown tier {name!r}", fix="choose cuda, cpu, meta or auto")
    return _installed


def _without_cuda(name: str, engine: bool, queues: str) -> Tier:
    from megatron_prism.runtime.devices import cuda_stubs
    from megatron_prism.runtime.devices.remap import Remap

    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiled fusions cost minutes here and fuse nothing
    torch._dynamo.config.disable = True
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", queues)  # Megatron insists; none here
    torch.autograd.set_multithreading_enabled(False)  # modes are per thread
    cuda_stubs.install()
    _no_pinned_memory()
    stand_in = ["torch.cuda: inert streams and events"]
    if engine and importlib.util.find_spec("transformer_engine") is None:
        from megatron_prism.runtime import te as virtual_te

        virtual_te.install()
        # with the version that it is taken for: Megatron refuses options by it
        version = virtual_te.VERSION
        stand_in.append(f"Transformer Engine {version}: virtual, saves what the real one saves")
    stand_in += [weight_gradient.install(), masked_softmax.install()]
    if importlib.util.find_spec("triton") is None:
        _stub_triton()
        stand_in.append("triton: absent, its kernels are never called")
    remap = Remap(name)
    remap.__enter__()
    _remap_backward(remap)
    live = None
    if name == "meta":
        live = LiveBytes("meta", cublas=True)
        compiled.install(live)
        cuda_choices.install()
        torch.distributions.Distribution.set_default_validate_args(False)  # it looks at values
        _keep_parameters()
        live.__enter__()
        cuda_stubs.set_memory_source(live)
        stand_in.append(
            "values: none, shapes only; losses and norms in the log are the placeholder 2.0"
        )
    return Tier(name, torch.device(name), live, tuple(stand_in))


def _keep_history(tier: Tier) -> None:
    from megatron_prism.runtime.devices import cuda_stubs
    from megatron_prism.runtime.devices.history import History

    if tier.live is not None:
        tier.live.history = History(cuda_stubs.current_stream)


def _remap_backward(remap: Any) -> None:
    """torch.autograd.backward turns a function mode off, but runs the job's own backward functions
    (recomputation, all-to-alls), which ask for ``cuda`` tensors."""
    engine = torch.autograd._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        with remap:
            return engine(*args, **kwargs)

    torch.autograd._engine_run_backward = run


def _keep_parameters() -> None:
    """``module.cuda()`` gives a parameter other data; moved to meta it would be another parameter,
    without what Megatron wrote on it (sequence-parallel, an expert's), and shared with nobody."""
    from megatron_prism.runtime.devices.remap import become

    apply = torch.nn.Module._apply

    def moved(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = dict(self._parameters)
        answer = apply(self, *args, **kwargs)
        for name, old in before.items():
            new = self._parameters[name]
            if old is not None and new is not None and new is not old:
                become(old, new)
                self._parameters[name] = old
        return answer

    torch.nn.Module._apply = moved  # type: ignore[method-assign]


def _no_pinned_memory() -> None:
    """DataLoaders ask for pinned memory; without a device its thread fails."""
    init: Callable[..., None] = torch.utils.data.DataLoader.__init__

    def unpinned(self: torch.utils.data.DataLoader, *args: object, **kwargs: object) -> None:
        kwargs["pin_memory"] = False
        init(self, *args, **kwargs)

    torch.utils.data.DataLoader.__init__ = unpinned  # type: ignore[method-assign]


class _Absent(types.ModuleType):
    """A module of a missing library: any attribute is a decorator that leaves functions alone."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)

        def decorate(*args: object, **kwargs: object) -> object:
            if len(args) == 1 and callable(args[0]) and not kwargs:
                return args[0]
            return lambda function: function

        return decorate


def _stub_triton() -> None:
    """Megatron imports triton at module level in places (batch_invariant_kernels.py:15 @0.16.1)."""
    root, language = _Absent("triton"), _Absent("triton.language")
    root.language = language  # type: ignore[attr-defined]
    root.__version__ = "0.0.0"  # type: ignore[attr-defined]
    root.__path__ = []
    sys.modules["triton"], sys.modules["triton.language"] = root, language
