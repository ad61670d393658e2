"""Tiers, where local ranks run: ``cuda`` (the device), ``cpu`` (values), ``meta`` (shapes).

``prepare(tier, changes)`` prepares this process, before Megatron is imported: on ``cuda`` nothing
changes; on the others Transformer Engine's Python runs on kernels of ours (``te_kernels``), and:

remap.py         ``cuda`` means another device
cuda.py          torch.cuda without a driver
cuda_graphs.py   captures of CUDA graphs (meta)
kernels.py       kernels of triton, Apex and others
triton.py        triton without a driver
absent.py        packages that are not here, as names
state_space.py   mamba-ssm, causal-conv1d, flash-linear-attention
recurrences.py   what their scans compute, of tensors that have values
local_layers.py  a norm without apex
moe_dispatch.py  tokens on their way to experts
live_bytes.py    bytes that are alive (meta)
host_shapes.py   copies on the host, which take no memory (meta)
operators.py     shapes of simple results, and what CUDA's kernels take (meta)
cuda_choices.py  where torch chooses otherwise on a GPU (meta)
signatures.py    types that these share

``changes.undo()`` takes everything back.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_prism.core.errors import UnsupportedError, UsageError
from megatron_prism.core.jobs.megatron_source import engine_version
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime.devices import absent, cuda_choices, kernels, state_space, triton
from megatron_prism.runtime.devices.live_bytes import Engine, LiveBytes, workspaces

__all__ = ["Tier", "best", "prepare"]


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


NESTED = 20  # backward passes in backward passes; checkpoints in checkpoints are two or three

_prepared: Tier | None = None


def best() -> str:
    """The most real tier that this host has: ``cuda`` or ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def prepare(
    name: str,
    changes: ProcessChanges,
    engine: bool = True,
    queues: str = "1",
    history: bool = False,
    engine_release: str | None = None,
) -> Tier:
    """Prepare this process for tier ``name`` (``auto``: the best one here).

    changes : log of what is changed in the process; nothing if it runs that tier already
    engine : whether the job's own environment has Transformer Engine; it comes with us, too
    queues : CUDA_DEVICE_MAX_CONNECTIONS of a tier without a device, if the job does not say
    history : keep every request to the allocator, however many; else the first million (``meta``)
    engine_release : the Transformer Engine that must be installed; None: whichever is

    Raises UsageError for an unknown tier, for ``cuda`` without a device, for a second tier while
    ``changes`` of the first are not undone, and for a release where the engine is not virtual.
    """
    tier = _prepare(name, changes, engine, queues, history)
    if engine_release is not None:
        _check_release(engine_release)
    return tier


def _prepare(name: str, changes: ProcessChanges, engine: bool, queues: str, history: bool) -> Tier:
    if _prepared is not None:
        # a second session of the process has the tier of the first, as torch is changed already
        if name not in (_prepared.name, "auto"):
            message = f"this process already runs tier {_prepared.name}, not {name}"
            raise UsageError(message, fix="use one process per tier, or close the first session")
        return _prepared
    if name == "auto":
        name = best()
    if name == "cuda":
        if not torch.cuda.is_available():
            fix = "use --prism-tier cpu (real values) or --prism-tier meta (shapes only)"
            raise UsageError("tier cuda needs a CUDA device, and this host has none", fix=fix)
        tier = Tier("cuda", torch.device("cuda"))
    elif name in ("cpu", "meta"):
        tier = _without_cuda(name, changes, engine, queues)
        _keep_history(tier, history)
    else:
        raise UsageError(f"unknown tier {name!r}", fix="choose cuda, cpu, meta or auto")
    changes.set(sys.modules[__name__], "_prepared", tier)
    return tier


def _check_release(asked: str) -> None:
    installed = engine_version()
    if installed.split(".")[:2] != asked.split(".")[:2]:
        message = f"Transformer Engine {asked} is asked for, and {installed or 'none'} is installed"
        raise UsageError(message, fix=f"pip install --no-deps transformer-engine=={asked}")


def _without_cuda(name: str, changes: ProcessChanges, engine: bool, queues: str) -> Tier:
    from megatron_prism.runtime.devices import cuda, cuda_graphs
    from megatron_prism.runtime.devices.remap import Remap

    _disable_compiler(changes)
    if "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ:  # Megatron insists; none here
        changes.set_item(os.environ, "CUDA_DEVICE_MAX_CONNECTIONS", queues)
    threads = torch._C._is_multithreading_enabled()
    changes.on_undo(lambda: torch._C._set_multithreading_enabled(threads))
    torch._C._set_multithreading_enabled(False)  # modes are per thread
    cuda.replace_functions(changes)
    _no_pinned_memory(changes)
    if not hasattr(torch.distributed, "ProcessGroupNCCL"):  # a build of torch for CPUs
        changes.set(torch.distributed, "ProcessGroupNCCL", _NcclGroup)
    stand_in = ["torch.cuda: inert streams and events"]
    stand_in += [
        add_stand_ins(changes)
        for add_stand_ins in (kernels.add_modules, state_space.add_modules, triton.replace_launches)
    ]
    absent.add_modules(changes)
    live = LiveBytes("meta", cublas=True) if name == "meta" else None
    remap = Remap(name, None if live is None else live.host)
    remap.__enter__()
    changes.on_undo(lambda: remap.__exit__(None, None, None))
    _remap_backward(remap, changes)
    if live is not None:
        live.values = remap
        changes.on_undo(workspaces.clear)
        changes.set(kernels, "meter", None)  # a recorder's, later
        cuda_choices.replace_compile(live, changes)
        cuda_choices.choose_as_cuda(changes)
        # it looks at values
        changes.set(torch.distributions.Distribution, "_validate_args", False)
        _keep_parameters(changes)
        changes.set(torch.autograd.Variable, "_execution_engine", Engine())
        live.follow_resizes(changes)
        cuda_graphs.replace_functions(changes)
        live.__enter__()
        changes.on_undo(lambda: live.__exit__(None, None, None))
        cuda.set_memory_source(live)
        stand_in.append("values: none, shapes only; what depends on data is unknown in the log")
    if engine and engine_version():
        from megatron_prism.runtime import te_kernels

        version, kernels_text = te_kernels.install(changes, name, live), "compute with torch's"
        kernels_text = kernels_text if live is None else "are shapes"
        stand_in.append(f"Transformer Engine {version}: its own Python, its kernels {kernels_text}")
    return Tier(name, torch.device(name), live, tuple(stand_in))


class _NcclGroup:
    """What Megatron asks of NCCL's group where torch has none: options, which nobody reads."""

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = types.SimpleNamespace()


def _disable_compiler(changes: ProcessChanges) -> None:
    """Compiled fusions cost minutes here and fuse nothing."""
    changes.set_item(os.environ, "TORCHDYNAMO_DISABLE", "1")
    config = torch._dynamo.config  # keeps its entries elsewhere than in its attributes
    before = config.disable
    changes.on_undo(lambda: setattr(config, "disable", before))
    config.disable = True


def _keep_history(tier: Tier, whole: bool) -> None:
    from megatron_prism.runtime.devices import cuda_graphs
    from megatron_prism.runtime.devices.live_bytes import History

    if tier.live is not None:
        tier.live.history = History(cuda_graphs.current_stream, whole)


def _remap_backward(remap: Any, changes: ProcessChanges) -> None:
    """torch.autograd.backward turns a function mode off, but runs the job's own backward functions
    (recomputation, all-to-alls), which ask for ``cuda`` tensors.

    A recomputed function that returns a parameter makes the parameter its own output, and its
    backward, which runs it again, starts itself without end.
    """
    engine, depth = torch.autograd._engine_run_backward, 0

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if depth == NESTED:
            message = "a recomputed function returns a parameter (a layer its bias): its backward "
            fix = "--disable-bias-linear, or --recompute-modules without mlp"
            raise UnsupportedError(f"{message}starts itself without end, here as on a GPU", fix=fix)
        # how many backwards run inside of each other
        depth += 1
        try:
            with remap:
                return engine(*args, **kwargs)
        finally:
            depth -= 1

    changes.set(torch.autograd, "_engine_run_backward", run)


def _keep_parameters(changes: ProcessChanges) -> None:
    """``module.cuda()`` gives a parameter other data; moved to meta it would be another parameter,
    without what Megatron wrote on it (sequence-parallel, an expert's), and shared with nobody.
    """
    from megatron_prism.runtime.devices.remap import become

    apply = torch.nn.Module._apply

    def moved(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = dict(self._parameters)
        answer = apply(self, *args, **kwargs)
        # a parameter that moved: the old object takes the new data, with what Megatron wrote on it
        for name, old in before.items():
            new = self._parameters[name]
            if old is not None and new is not None and new is not old:
                become(old, new)
                self._parameters[name] = old
        return answer

    changes.set(torch.nn.Module, "_apply", moved)


def _no_pinned_memory(changes: ProcessChanges) -> None:
    """DataLoaders ask for pinned memory; without a device its thread fails."""
    init: Callable[..., None] = torch.utils.data.DataLoader.__init__

    def unpinned(self: torch.utils.data.DataLoader, *args: object, **kwargs: object) -> None:
        kwargs["pin_memory"] = False
        init(self, *args, **kwargs)

    changes.set(torch.utils.data.DataLoader, "__init__", unpinned)
