"""Owners of allocations: a note for every storage, ``kind:module @file:line``, parts optional.

What is alive when an iteration starts is found by walking: parameters, gradients and their buffers
from the model, main parameters and states from the optimizer.  What comes to be later gets the
module whose forward runs (global hooks, there only while a slice is recorded) and the innermost
Megatron frame; in a backward that autograd runs in C++ there is no module, and the frame is the one
that called it.  A note costs a walk over Python frames, about a microsecond.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch.nn.modules import module as modules

from megatron_prism.core import code_files
from megatron_prism.runtime.devices import cuda_graphs, live_bytes

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

# package -> how a site begins that is inside it
_NAMED = {
    "megatron.core": "core/",
    "megatron.training": "training/",
    "transformer_engine": "transformer_engine/",
}

_STANDARD_LIBRARY = os.path.dirname(os.__file__)

Models = torch.nn.Module | Sequence[torch.nn.Module]


class CallSites:
    """``core/tensor_parallel/mappings.py:31`` for frames; remembers what it has seen."""

    def __init__(self) -> None:
        # file -> (its short name, "" of a library's; whether it is Megatron's or TE's)
        self._files: dict[str, tuple[str, bool]] = {}
        self._texts: dict[tuple[str, int], str] = {}
        self._libraries: dict[str, bool] = {}  # file -> whether it is a library's

    def _file(self, name: str) -> tuple[str, bool]:
        described = self._files[name] = self._describe(name)
        return described

    def _describe(self, name: str) -> tuple[str, bool]:
        for package, start in _NAMED.items():
            inside = code_files.below_package(package, name)
            if inside is not None:
                return start + inside, True
        # made by exec, ours, or torch's
        in_torch = code_files.below_package("torch", name) is not None
        if name.startswith("<") or code_files.is_ours(name) or in_torch:
            return "", False
        return code_files.last_two(name), False

    def find(self, frame: FrameType | None, foreign: bool = False) -> str:
        """The innermost Megatron or TE frame from ``frame`` outwards; ``foreign``: if there is none
        the innermost of the job's own code.
        """
        foreign_line: tuple[str, int] | None = None
        while frame is not None:
            name = frame.f_code.co_filename
            short, is_ours = self._files.get(name) or self._file(name)
            # Megatron or Transformer Engine
            if is_ours:
                return self._text(short, frame.f_lineno)
            # the job's own code, nearest to the call
            if foreign and foreign_line is None and short:
                foreign_line = (short, frame.f_lineno)
            frame = frame.f_back
        return self._text(*foreign_line) if foreign_line else ""

    def innermost(self, frame: FrameType | None) -> str:
        """The innermost frame of Megatron, TE or the job's own code, from ``frame`` outwards."""
        while frame is not None:
            name = frame.f_code.co_filename
            short, is_megatron = self._files.get(name) or self._file(name)
            if short and (is_megatron or not self._is_library(name)):
                return self._text(short, frame.f_lineno)
            frame = frame.f_back
        return ""

    def _is_library(self, name: str) -> bool:
        is_library = self._libraries.get(name)
        if is_library is None:
            is_library = code_files.is_installed(name) or name.startswith(_STANDARD_LIBRARY)
            self._libraries[name] = is_library
        return is_library

    def place(self, file: str, line: int) -> str:
        """The same of one line; "" if it is not Megatron's or TE's."""
        short, is_ours = self._files.get(file) or self._file(file)
        return self._text(short, line) if is_ours else ""

    def _text(self, short: str, line: int) -> str:
        key = (short, line)
        text = self._texts.get(key)
        if text is None:
            text = self._texts[key] = f"{short}:{line}"
        return text


class AllocationOwners:
    """Notes about storages of one rank.

    models    : its model chunks
    optimizer : Megatron's optimizer, or None
    """

    def __init__(self, models: Models = (), optimizer: object = None) -> None:
        self.models = [models] if isinstance(models, torch.nn.Module) else list(models)
        self.optimizer = optimizer
        self.sites = CallSites()
        self._names: dict[int, str] = {}
        self._stack: list[str] = []
        self._hooks: list[RemovableHandle] = []
        self._notes: dict[tuple[str, str, str], str] = {}

    # -- while an iteration runs ------------------------------------------------------------------
    def follow_forwards(self) -> None:
        """Follow the modules' forwards until ``remove``."""
        self.remove()
        for number, model in enumerate(self.models):
            for name, module in model.named_modules():
                self._names[id(module)] = self._name(number, name)
        self._hooks = [
            modules.register_module_forward_pre_hook(self._enter),
            modules.register_module_forward_hook(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        """Follow no longer."""
        while self._hooks:
            self._hooks.pop().remove()
        self._stack.clear()

    def _name(self, chunk: int, name: str) -> str:
        """``chunk2.decoder.layers.0.mlp``; without wrappers, and without a lone chunk."""
        while name == "module" or name.startswith("module."):
            name = name[7:]
        return ".".join(filter(None, (f"chunk{chunk}" if len(self.models) > 1 else "", name)))

    def _enter(self, module: torch.nn.Module, args: object) -> None:
        above = self._stack[-1] if self._stack else ""
        self._stack.append(self._names.get(id(module), above))

    def _leave(self, module: torch.nn.Module, args: object, output: object) -> None:
        if self._stack:
            self._stack.pop()

    def module(self) -> str:
        """The module whose forward runs, "" in none."""
        return self._stack[-1] if self._stack else ""

    def name_of(self, module: torch.nn.Module) -> str:
        """Its name in the model, "" if it is no part of it."""
        return self._names.get(id(module), "")

    def note(self, tensor: torch.Tensor | None = None) -> str:
        """Of a storage that comes to be now, with ``tensor``.

        Masks of a data loader, and what CUDA graphs are made of, have kinds of their own.
        """
        frame = sys._getframe(1)
        module = self.module()
        site = self.sites.find(frame, foreign=True)
        kind = ""
        if not module and tensor is not None and _is_loaders_mask(tensor, frame):
            kind = "mask:attention mask"
        elif cuda_graphs.creating:
            kind = "graph:"
        key = module, site, kind
        text = self._notes.get(key)
        if text is None:
            place = f" @{site}" if site else ""
            text = self._notes[key] = f"{kind}{module}{place}".strip()
        return text

    # -- what is there before it ------------------------------------------------------------------
    def standing(self) -> dict[int, str]:
        """Storage address -> note, of parameters, gradients and the optimizer's tensors."""
        notes = {}
        for key, parts in self.parts().items():
            kind = parts[0][0]
            names = list(dict.fromkeys(name for _, name, _ in parts))
            notes[key] = f"{kind}:{_together(names)}"
        return notes

    def parts(self) -> dict[int, list[tuple[str, str, int]]]:
        """Storage address -> (kind, name, bytes) of each tensor of ``standing`` that it holds."""
        parts: dict[int, list[tuple[str, str, int]]] = {}
        sources = (
            self._of_buffers("master", "grad"),
            self._of_models(),
            self._of_buffers("param"),
            self._of_optimizer(),
            _workspaces(),
        )
        for tensors in sources:
            buffers = set(parts)  # main gradients are pieces of the model's buffers
            for kind, name, tensor in tensors:
                tensor = getattr(tensor, "_local_tensor", tensor)  # noqa: PLW2901 - of a DTensor
                if isinstance(tensor, torch.Tensor):
                    key = tensor.untyped_storage()._cdata
                    if key not in buffers:
                        parts.setdefault(key, []).append((kind, name, tensor.nbytes))
        return parts

    def _of_buffers(self, *kinds: str) -> Iterator[tuple[str, str, object]]:
        """The buffers of ``kinds`` of Megatron-FSDP, which say what they hold; parameters and the
        optimizer see parts of some of them.

        Source: ParameterGroup, core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py.
        """
        for model in self.models:
            for module in model.modules():
                buffer = getattr(module, "param_and_grad_buffer", None)
                for group in getattr(buffer, "parameter_groups", None) or ():
                    yield from (row for row in _of_group(group) if row[0] in kinds)

    def _of_models(self) -> Iterator[tuple[str, str, object]]:
        for number, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                short = self._name(number, name)
                yield "param", short, parameter
                yield from (("param", short, t) for t in _parts(parameter))
                yield "grad", short, parameter.grad
                # DistributedDataParallel's view of its buffer of gradients
                yield "grad", short, getattr(parameter, "main_grad", None)
            for name, buffer in model.named_buffers():
                yield "other", self._name(number, name), buffer
            for name, module in model.named_modules():
                # the dictionary's name depends on Transformer Engine's release
                fp8_weights = getattr(module, "fp8_weights", {}) or getattr(
                    module, "_fp8_workspaces", {}
                )
                label = f"{self._name(number, name)} weights in FP8"
                for weight in fp8_weights.values():
                    for tensor in vars(weight).values():
                        yield "other", label, tensor

    def _of_optimizer(self) -> Iterator[tuple[str, str, object]]:
        for part in getattr(self.optimizer, "chained_optimizers", None) or [self.optimizer]:
            inner = getattr(part, "optimizer", part)
            for group in getattr(inner, "param_groups", None) or ():
                for parameter in group["params"]:
                    yield "master", "main parameters", parameter
                    yield "grad", "main parameters", parameter.grad
            for state in (getattr(inner, "state", None) or {}).values():
                if not isinstance(state, dict):
                    continue
                for name, tensor in state.items():
                    # Transformer Engine's FusedAdam keeps the parameters in FP32 among its states
                    kind = "master" if name == "master_param" else "optim"
                    yield kind, str(name), tensor
                    # moments in FP8, --exp-avg-sq-dtype fp8
                    local_tensor = getattr(tensor, "_local_tensor", tensor)
                    for part in _parts(local_tensor):
                        yield kind, str(name), part


def _is_loaders_mask(tensor: torch.Tensor, frame: FrameType | None) -> bool:
    """Say whether a tensor is a mask of sequence x sequence, of a function that gets a batch.

    Megatron's loaders have one per sample: get_batch of pretrain_gpt.py, get_batch_on_this_tp_rank,
    get_batch_on_this_cp_rank; Megatron-Bridge's are named alike.

    tensor : of the storage
    frame  : in which it comes to be
    """
    if tensor.dtype != torch.bool or tensor.dim() < 3:
        return False
    while frame is not None:
        if frame.f_code.co_name.startswith("get_batch"):
            return True
        frame = frame.f_back
    return False


def _of_group(group: object) -> Iterator[tuple[str, str, object]]:
    """What each buffer of a group of Megatron-FSDP's parameters holds, by the buffer's name."""
    for name, buffer in vars(group).items():
        data = getattr(buffer, "data", None)
        if not isinstance(data, torch.Tensor) or not hasattr(buffer, "is_data_distributed"):
            continue
        if name.startswith("main_weight"):
            yield "master", "main parameters", data
        elif "grad" in name or "gbuf" in name:
            # a shard's, where replicas share gradients out
            shared_out = buffer.is_data_distributed
            yield "grad", "main parameters" if shared_out else "main gradients", data
        else:
            yield "param", "buffer of weights", data


def _parts(tensor: object) -> Iterable[object]:
    """The tensors that the values of a tensor in FP8 are in."""
    written = vars(tensor).items() if hasattr(tensor, "_quantizer") else ()
    return [value for name, value in written if name.startswith("_")]


def _workspaces() -> Iterator[tuple[str, str, object]]:
    """What cuBLAS's handles and Transformer Engine's modules hold, if they are in use."""
    for workspace in live_bytes.workspaces.values():
        yield "work", "cuBLAS workspace", workspace
    hooks = sys.modules.get("megatron_prism.runtime.te_kernels.hooks")
    if hooks is not None:
        for name, tensor in hooks.kept():
            yield "work", name, tensor


def _together(names: list[str]) -> str:
    """Name a storage by the parameters that lie in it."""
    if len(names) == 1:
        return names[0]
    buffer = f"buffer of {len(names)} parameters"
    common = ".".join(os.path.commonprefix([name.split(".") for name in names]))
    # of one part of the model
    if common:
        return f"{buffer} of {common}"
    return buffer
