"""CUDA graphs on tier ``meta``: what is captured runs once, and a replay runs nothing again.

torch's and Transformer Engine's Python captures as on a GPU: static inputs, what a capture keeps,
and what the graphs before it have freed.  To the allocator a graph's pool is a stream of its own,
with a negative number, whose segments stay until the end.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime.devices import cuda

replays = 0  # so far
_handles = itertools.count(1)
_open: list[CUDAGraph] = []  # the graphs that are being captured


class CUDAGraph:
    """Stands in for torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._pool: tuple[int, int] = (0, 0)

    def capture_begin(self, pool: tuple[int, int] | None = None, **options: object) -> None:
        self._pool = pool or graph_pool_handle()
        _open.append(self)

    def capture_end(self) -> None:
        _open.remove(self)

    def pool(self) -> tuple[int, int]:
        return self._pool

    def replay(self) -> None:
        """The kernels of the capture, of which nobody here has values."""
        global replays
        replays += 1

    def reset(self) -> None:
        """Its memory is the allocator's again once no graph of the pool is left."""

    def register_generator_state(self, generator: object) -> None:
        """No kernel draws numbers."""


def graph_pool_handle() -> tuple[int, int]:
    return (0, next(_handles))


def current_stream() -> int:
    """Whose blocks a request gets: the current stream's, or those of the pool of the graph that is
    being captured."""
    return -_open[-1].pool()[1] if _open else cuda.current_stream()


def weak_references(tensors: Any) -> Any:
    """Tensors at the addresses of ``tensors`` (nested), which they do not keep alive."""
    with _disable_current_modes():
        return tree_map_only(torch.Tensor, _weak_reference, tensors)


def _weak_reference(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def replace_functions(changes: ProcessChanges) -> None:
    """Put them into torch.cuda until ``changes`` are undone."""
    answers: dict[str, Any] = {
        "CUDAGraph": CUDAGraph,
        "graph_pool_handle": graph_pool_handle,
        "is_current_stream_capturing": lambda: bool(_open),
    }
    for module in (torch.cuda, torch.cuda.graphs):
        for name, answer in answers.items():
            changes.set(module, name, answer)
    changes.set(torch._C, "_graph_pool_handle", graph_pool_handle)
    if not hasattr(torch._C, "_host_emptyCache"):
        changes.set(torch._C, "_host_emptyCache", lambda: None)
    changes.on_undo(_open.clear)
