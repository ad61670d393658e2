"""Stop at the first operator whose result is not finite, or too large, and say where that is.

A TorchDispatchMode looks at the result of every operator, forward and backward, from the first
train step on; views and fresh memory are not results.  Each look waits for the device, so a job
takes several times as long.
"""

from __future__ import annotations

import pdb
import re
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_prism.core.errors import PrismError, UnsupportedError, UsageError
from megatron_prism.core.ops import label
from megatron_prism.emulate.call_labels import LabelledCalls
from megatron_prism.runtime.recorder.owners import AllocationOwners

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.utils.hooks import RemovableHandle

    from megatron_prism.runtime.recorder.owners import Models

__all__ = ["ValueWatch"]


_FRESH = re.compile(r"aten::(new_)?(empty|resize|set_|_resize|_to_copy\.out)")


class ValueWatch(LabelledCalls):
    """Looks for ``what``: ``nan``, ``inf``, or ``norm>X``.

    tier     : meta has no values, and is refused
    debugger : "pdb" opens a prompt at the place; None ends the job there

    Raises UsageError for another ``what``.
    """

    def __init__(self, what: str, tier: str, debugger: str | None = None) -> None:
        super().__init__()
        norm = re.fullmatch(r"norm>(\d+(\.\d+)?([eE][+-]?\d+)?)", what)
        if what not in ("nan", "inf") and norm is None:
            raise UsageError(f"--prism-watch {what}: nan, inf or norm>X", fix="--prism-watch nan")
        if tier == "meta":
            raise UnsupportedError("--prism-watch: tier meta has shapes only, and no values",
                                   fix="--prism-tier cpu, with a smaller model")  # fmt: skip
        self.what, self.limit = what, float(norm[1]) if norm else 0.0
        self._debugger = debugger
        self._owners = AllocationOwners()
        self._mode = _Mode(self)
        self._looks = self._entered = False
        self._module = ""
        self._hooks: list[RemovableHandle] = []

    def iteration_started(self, number: int, wanted: int, model: Models, optimizer: object) -> None:
        self.iteration = number
        if not self._entered:
            self._entered = self._looks = True
            self._owners = AllocationOwners(model)
            self._owners.follow_forwards()
            self._hooks = [m.register_forward_hook(self._forward) for chunk in self._owners.models
                           for m in chunk.modules()]  # fmt: skip
            self._mode.__enter__()

    def _forward(self, module: torch.nn.Module, args: object, output: object) -> None:
        """Remember whose backward it is that begins with this output."""
        name = self._owners.name_of(module)
        for tensor in pytree.tree_leaves(output):
            node: Any = tensor.grad_fn if isinstance(tensor, torch.Tensor) else None
            if node is not None and "prism" not in node.metadata:  # the innermost module's, once
                node.metadata["prism"] = name
                node.register_prehook(lambda _, name=name: self._backward(name))

    def _backward(self, name: str) -> None:
        self._module = name

    def finished(self) -> None:
        self.stop()
        sys.stderr.write(f"prism: no operator of {self.iteration} iterations gave {self.what}\n")

    def stop(self) -> None:
        """Look no longer; harmless a second time."""
        self._looks = False
        if self._entered:
            self._entered = False
            self._mode.__exit__(None, None, None)
            self._owners.remove()
            while self._hooks:
                self._hooks.pop().remove()

    def odd(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` has what is looked for."""
        if not tensor.is_floating_point() or tensor.is_meta or not tensor.numel():
            return False
        if self.what == "nan":
            return bool(torch.isnan(tensor).any())
        if self.what == "inf":
            return bool(torch.isinf(tensor).any())
        return float(torch.linalg.vector_norm(tensor, dtype=torch.float32)) > self.limit

    def found(self, operator: OpOverload, inputs: list[torch.Tensor], result: torch.Tensor) -> None:
        """Say where it is, and stop: at a prompt, or the job."""
        labels = self._labels
        step = label(labels.get("phase", ""), labels.get("microbatch", -1), labels.get("chunk", -1))
        module = self._owners.module() or self._module
        node = torch._C._current_autograd_node()
        site = self._owners.sites.find(sys._getframe(2), foreign=True)
        given = sum(map(self.odd, inputs))
        shape = "x".join(map(str, result.shape)) or "1"
        lines = [
            f"iteration {self.iteration}, {step}: {operator} gave the first {self.what} "
            f"({shape} {str(result.dtype)[6:]})",
            f"  module  {module or 'none'}" + (f", in {node.name()}" if node is not None else ""),
            f"  line    {site or 'unknown'}",
            f"  inputs  {given} of {len(inputs)} have it already" if given else
            "  inputs  none of them has it",
        ]  # fmt: skip
        self._looks = False  # the mode itself cannot be left from inside
        if self._debugger == "pdb":
            sys.stderr.write("\n".join(["prism: " + lines[0], *lines[1:], ""]))
            pdb.set_trace()
            return
        raise PrismError("\n".join(lines), fix="--prism-debugger pdb opens a prompt there")


class _Mode(TorchDispatchMode):
    def __init__(self, watch: ValueWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._watch._looks and not func.is_view and not _FRESH.match(func.name()):
            for tensor in pytree.tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and self._watch.odd(tensor):
                    inputs = [t for t in pytree.tree_leaves((args, kwargs))
                              if isinstance(t, torch.Tensor)]  # fmt: skip
                    self._watch.found(func, inputs, tensor)
        return result
